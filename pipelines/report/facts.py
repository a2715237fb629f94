"""What the header of the report says: model, data, snapshots, trainings, stores, versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertvision.errors import StoreError, WorkspaceError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.results.rows import Results
from bertvision.pipelines.stored_name import StoredName
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.heads import trained_heads
from bertvision.pipelines.workspace.records import read_run_config, read_snapshot_info
from bertvision.pipelines.workspace.selection import source_split
from bertvision.pipelines.workspace.workspace import FILE, Workspace


def facts(
    workspace: Workspace, results: Results, left_out: list[str]
) -> list[tuple[str, list[str]]]:
    """Names and values, a line each.

    Args:
        workspace: that they are of.
        results: its rows.
        left_out: gets a message for each head whose ``config.json`` is damaged and left out.
    """
    config = workspace.config
    model, task, tuned = config.model, config.task, config.finetune
    data = [
        f"{name}: {split.questions:,} {results.items} of {split.source}, sha256 "
        f"{split.sha256[:12]}…"
        # once: they are of the source, of which other splits are parts, too
        + (
            f", {len(split.misfits):,} of the source that fit no window left out"
            if split.misfits and source_split(name, task) == name
            else ""
        )
        + (
            f", {len(split.shared):,} of the source that share a text with dev left out"
            if split.shared and source_split(name, task) == name
            else ""
        )
        for name, split in config.data.items()
    ]
    loaded = load_task(task.name)
    revision = f", revision {model.revision}" if model.revision else ""
    found: list[tuple[str, str | list[str]]] = [
        (
            "Model",
            f"{model.name_or_path}{revision}: {model.num_hidden_layers} layers, width "
            f"{model.hidden_size}, weights sha256 {model.weights_sha256[:12]}…",
        ),
        (
            "Task",
            "none: for hidden states alone"
            if not find_task(task.name).learns
            else f"{task.name}, windows of {task.max_length} tokens"
            + (f", overlap {task.overlap}" if "overlap" in loaded.settings else "")
            + (f", classes {', '.join(task.classes)}" if 0 < len(task.classes) <= 20 else "")
            + (", answerable questions only" if task.answerable_only else ""),
        ),
        ("Data", data),
        ("Snapshots", _snapshots(workspace)),
        (
            "Fine-tuning",
            ""
            if not find_task(task.name).learns
            else f"{tuned.epochs:g} epoch{'' if tuned.epochs == 1 else 's'}, "
            f"batch {tuned.batch_size}"
            + (f" × {tuned.accumulate}" if tuned.accumulate > 1 else "")
            + f", learning rate {tuned.lr:g}, warmup {tuned.warmup:g}, decay {tuned.decay}, "
            f"precision {tuned.precision}, seed {tuned.seed}"
            + (f", variant {', '.join(tuned.variant)}" if tuned.variant else "")
            + (f", begun with the encoder of {tuned.init_from}" if tuned.init_from else "")
            + (
                f", distilled from {tuned.distil} with temperature {tuned.temperature:g}, labels "
                f"weighing {tuned.labels_weight:g}"
                if tuned.distil
                else ""
            ),
        ),
        ("Heads", _heads(workspace, left_out)),
        ("Activations", _stored(workspace)),
        ("Ensembles", f"{len(results.ensembles)}" if results.ensembles else ""),
        ("Versions", ", ".join(f"{name} {version}" for name, version in config.versions.items())),
        ("From", f"{FILE}, snapshots/*/snapshot.json, heads/*/*/config.json"),
    ]
    lines = [(name, [value] if isinstance(value, str) else value) for name, value in found]
    return [(name, [line for line in value if line]) for name, value in lines if any(value)]


def _snapshots(workspace: Workspace) -> str:
    parts = []
    for tag in workspace.snapshots():
        try:
            step = read_snapshot_info(workspace.snapshot_dir(tag)).step
            parts.append(f"{tag} (step {step:,})")
        except WorkspaceError:
            parts.append(str(tag))  # its scores are here even where its record is not
    return ", ".join(parts)


def _heads(workspace: Workspace, left_out: list[str]) -> str:
    """How many runs, and the settings that occur among them."""
    configs = []
    for tag, run in trained_heads(workspace):
        with leaving_out(left_out):
            configs.append(read_run_config(workspace.root / "heads" / tag / run))
    if not configs:
        return "none trained yet"
    names = {config.head for config in configs}
    settings = [
        f"{counted(len(names), 'head')} in {counted(len(configs), 'training')}",
        "trained on " + _each(SnapshotTag(config.trained_on) for config in configs),
    ]
    for key, name in (
        ("epochs", "epochs"),
        ("batch_size", "batch"),
        ("lr", "learning rate"),
        ("precision", "precision"),
        ("seed", "seeds"),
        ("fraction", "parts of the data"),
    ):
        settings.append(f"{name} {_each(getattr(config.training, key) for config in configs)}")
    settings.append(f"activations as {_each(config.encoding for config in configs)}")
    return ", ".join(settings)


def _stored(workspace: Workspace) -> list[str]:
    try:
        stored = workspace.stored()
        infos = [workspace.split(tag, name).info() for tag in stored for name in stored[tag]]
        own = [i for i in infos if StoredName.parse(i["split"]).dataset is None]
    except (StoreError, OSError) as error:
        return [f"the store at {workspace.activations} cannot be read: {error}"]
    return [
        f"{i['tag']}/{i['split']}: {counted(i['examples'], 'window')}, {i['encoding']}, "
        f"{size(i['bytes'])}"
        for i in own
    ] + _added(infos) or ["none in the store now"]


def _added(infos: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each data set that was added: what is stored of it."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for info in infos:
        name = StoredName.parse(info["split"]).dataset
        if name is not None:
            found.setdefault(name, []).append(info)
    lines = []
    for name, of in found.items():
        splits = [StoredName.parse(info["split"]) for info in of]
        lines.append(
            f"{name}: {', '.join(dict.fromkeys(s.split for s in splits))} of "
            f"{', '.join(dict.fromkeys(str(info['tag']) for info in of))}, "
            f"{', '.join(dict.fromkeys(str(s.tokens) for s in splits))} of the tokens, "
            f"{size(sum(info['bytes'] for info in of))}"
        )
    return lines


def _each(values: Iterable[Any]) -> str:
    """The values that occur, once each, numbers as short as they go."""
    found: Sequence[Any] = sorted({v for v in values if v is not None})
    return " / ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in found) or "not recorded"
