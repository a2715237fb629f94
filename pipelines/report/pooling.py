"""Section about learned pooling: the weights of trained heads, read from their files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.report.drawing import curves
from bertvision.pipelines.report.section import Section, make_figure
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.workspace.heads import trained_heads
from bertvision.pipelines.workspace.records import read_run_config
from bertvision.pipelines.workspace.reproduce import training_command
from bertvision.pipelines.workspace.workspace import Workspace

Row = dict[str, Any]


def pooling_section(workspace: Workspace, left_out: list[str]) -> Section:
    """Learned weights of the layers.

    Args:
        workspace: with the heads.
        left_out: gets a message for each head whose files are damaged, which is then left out.
    """
    rows, layers = pooling_rows(workspace, left_out), workspace.config.model.num_hidden_layers
    ident, title = "pooling-weights", "Pooling weights by layer"
    if not rows:
        return Section(
            ident,
            title,
            missing="No head with learned pooling was trained: `bertvision train learned-pooling "
            "--checkpoint TAG`.",
        )
    caption = (
        "Weight of each layer in the learned sum (softmax, so that they add up to 100 %); dotted: "
        "all layers alike. Peaks say which layers the head reads, a flat line that it does not "
        "care. The weights are those of the sum, not a measure of what a layer knows."
    )
    if any(max(r["layers"]) > layers for r in rows):
        caption += f" Of [CLS] heads, {layers + 1} is the pooler's output."
    source, command = "heads/<trained on>/<head>/model.safetensors", "bertvision train HEAD…"
    figure = make_figure(
        ident,
        "Learned pooling weights by layer",
        caption,
        source,
        command,
        lambda width: curves.pooling_weights(rows, width),
    )
    flat = [
        {**r, **{f"layer_{i}": 100 * w for i, w in zip(r["layers"], r["weights"], strict=True)}}
        for r in rows
    ]
    indices = sorted({i for r in rows for i in r["layers"]})
    table = Table(
        "pooling_weights",
        "Learned pooling: weights of the layers in per cent, and the factor γ",
        [
            Column("name", "head", "text"),
            Column("trained_on", "trained on", "text"),
            Column("seeds", "seeds", "count"),
            Column("gamma", "γ", digits=3),
            *(Column(f"layer_{i}", str(i)) for i in indices),
        ],
        flat,
        source,
        command,
        trace=True,
    )
    return Section(ident, title, figures=[figure], tables=[table])


def pooling_rows(workspace: Workspace, left_out: list[str]) -> list[Row]:
    """Weights of every learned pooling of runs on all examples, seeds together.

    A pooling is a pair of tensors ``….scalars`` (one for each hidden state) and ``….gamma``, as
    `LearnedPooling` keeps them; its weights are the softmax of the scalars.

    Args:
        workspace: with the heads.
        left_out: gets a message for each head whose files are damaged, which is then left out.

    Returns:
        By head and snapshot: ``name`` (with the pooling's own name where a head has several),
        ``trained_on``, ``seeds``, ``gamma``, ``weights`` (one for each hidden state, they sum
        to 1; means over seeds), ``layers`` (which hidden states), ``file`` and ``command``.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for tag, run in trained_heads(workspace):
        with leaving_out(left_out):
            for part, row in _poolings(workspace, workspace.root / "heads" / tag / run):
                groups.setdefault((row.pop("name"), part, tag), []).append(row)
    return [
        _mean(name, tag, rows)
        for (name, _, tag), rows in sorted(
            groups.items(), key=lambda item: (item[0][0], SnapshotTag(item[0][2]))
        )
    ]


def _poolings(workspace: Workspace, folder: Path) -> list[tuple[str, Row]]:
    """What a run's poolings are called in it, where it has several, and their rows."""
    config, path = read_run_config(folder), folder / "model.safetensors"
    if config.training.fraction != 1:
        return []
    try:
        with safe_open(path, "pt") as file:
            names = sorted(name for name in file.keys() if _is_scalars(name))  # noqa: SIM118
            found = {name: file.get_tensor(name).flatten().tolist() for name in names}
            gammas = {name: _gamma(file, name) for name in names}
    except (OSError, SafetensorError) as error:
        raise WorkspaceError(
            f"{path} is damaged ({error}): run `{training_command(config)} --overwrite` again"
        ) from error
    rows: list[tuple[str, Row]] = []
    for name, scalars in found.items():
        if len(scalars) != len(config.layers):
            continue  # of a head of one's own, which pools something else
        part = "" if len(found) == 1 else f" ({name.rpartition('.')[0]})"
        row: Row = {
            "name": config.head + config.variant + part,
            "weights": softmax(scalars),
            "gamma": gammas[name],
            "layers": config.layers,
            "file": path.relative_to(workspace.root).as_posix(),
            "command": training_command(config, workspace.config.model.num_hidden_layers + 1),
        }
        rows.append((part, row))
    return rows


def softmax(scalars: Sequence[float]) -> list[float]:
    """exp(w) / Σ exp(w)."""
    top = max(scalars)
    powers = [math.exp(w - top) for w in scalars]
    return [power / sum(powers) for power in powers]


def _mean(name: str, tag: str, rows: Sequence[Row]) -> Row:
    gammas = [r["gamma"] for r in rows if r["gamma"] is not None]
    return {
        "name": name,
        "trained_on": tag,
        "seeds": len(rows),
        "gamma": sum(gammas) / len(gammas) if gammas else None,
        "weights": [sum(w) / len(rows) for w in zip(*(r["weights"] for r in rows), strict=True)],
        "layers": rows[0]["layers"],
        "file": "; ".join(r["file"] for r in rows),
        "command": "; ".join(dict.fromkeys(r["command"] for r in rows)),
    }


def _is_scalars(name: str) -> bool:
    return name == "scalars" or name.endswith(".scalars")


def _gamma(file: Any, scalars: str) -> float | None:
    name = scalars.removesuffix("scalars") + "gamma"
    return float(file.get_tensor(name)) if name in file.keys() else None  # noqa: SIM118
