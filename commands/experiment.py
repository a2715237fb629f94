"""An experiment as a whole: what it holds, the quickstart, and scoring a predictions file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bertvision.commands.options import Json, Store, Workspace, find_workspace, show
from bertvision.commands.tables import Row, mapping_table, metric_cells, metric_names
from bertvision.pipelines.text import format_table


def status(workspace: Workspace = None, store: Store = None, as_json: Json = False) -> None:
    """What the workspace holds, and what can be run next."""
    from bertvision.pipelines.workspace.status import status as run

    show(run(find_workspace(workspace, store)), as_json, status_table)


def score(
    predictions: Annotated[Path, typer.Argument(help='{"question id": "answer"}')],
    data: Annotated[Path, typer.Argument(help="SQuAD file.")],
    na_prob: Annotated[
        Path | None, typer.Option(help='{"question id": probability of no answer}')
    ] = None,
    na_prob_thresh: Annotated[
        float, typer.Option(help="Predict no answer above this probability.")
    ] = 1.0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip malformed questions and count them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Score a predictions file with the official SQuAD 2.0 metric."""
    from bertvision.pipelines.tasks.squad.metrics import score_files

    result = score_files(
        predictions, data, na_prob, na_prob_thresh=na_prob_thresh, skip_bad=skip_bad
    )
    show(result, as_json, mapping_table)


def quickstart(
    workspace: Annotated[Path, typer.Option("--workspace", "-w", help="Folder to make.")] = Path(
        "quickstart"
    ),
    as_json: Json = False,
) -> None:
    """Run the whole main job on a small built-in example, without network, in minutes."""
    from bertvision.pipelines.quickstart import quickstart as run

    show(run(workspace), as_json, quickstart_table)


def status_table(status: Row) -> str:
    """What a workspace holds and what can be run next."""
    items = ", ".join(f"{split} {n:,}" for split, n in status["items"].items())
    stored = {tag: list(splits) for tag, splits in status["stored"].items()}
    for tag, splits in status["unfinished"].items():
        stored.setdefault(tag, []).extend(f"{split} (unfinished)" for split in splits)
    scores: Row = next((s["bert"] for s in status["snapshots"] if s["bert"]), {})
    names = metric_names([scores])
    lines = [
        f"workspace  {status['workspace']}",
        f"model      {status['model']}",
        f"task       {status['task']} ({items or 'hidden states alone'})",
        "",
        format_table(
            ["snapshot", "made", *(f"BERT {names[key]}" for key in scores), "activations"],
            [
                [
                    s["tag"],
                    "yes" if s["made"] else "no",
                    *metric_cells(s["bert"] or {}, scores),
                    _stored(stored.get(s["tag"], [])),
                ]
                for s in status["snapshots"]
            ],
        ),
    ]
    if status["heads"] or status["begun"]:
        lines += ["", _heads_table(status)]
    if status["next"]:
        lines += ["", "next:", *(f"  {command}" for command in status["next"])]
    return "\n".join(lines)


def _heads_table(status: Row) -> str:
    """A line for each head, whatever parts of the data and seeds it was trained with."""
    found: dict[str, list[tuple[str, str]]] = {}
    for key, mark in (("heads", ""), ("begun", " (begun)")):
        for head in status[key]:
            name = head["name"].partition("@")[0]
            found.setdefault(name, []).append((f"{head['trained_on']}{mark}", head["name"]))
    return format_table(
        ["head", "trained on", "runs"],
        [
            [name, ", ".join(dict.fromkeys(tag for tag, _ in runs)), str(len(runs))]
            for name, runs in sorted(found.items())
        ],
    )


def _stored(splits: Sequence[str]) -> str:
    """The stored splits of the own data, and the names of other data sets that are stored."""
    from bertvision.pipelines.workspace.selection import StoredName

    parsed = {split: StoredName.parse(split.partition(" ")[0]).dataset for split in splits}
    own = [split for split, dataset in parsed.items() if dataset is None]
    added = sorted({dataset for dataset in parsed.values() if dataset is not None})
    return ", ".join([*own, *(f"{dataset}-…" for dataset in added)]) or "-"


def quickstart_table(result: Row) -> str:
    """The one table of the quickstart, with where the time went."""
    names = metric_names([r["metrics"] for r in result["rows"]])
    rows = [
        [r["system"], r["trained_on"], r["evaluated_on"], f"{r['percent_of_encoder']:.3f}"]
        + metric_cells(r["metrics"], names)
        for r in result["rows"]
    ]
    header = ["system", "trained on", "evaluated on", "% of encoder"]
    table = format_table([*header, *names.values()], rows)
    seconds = "   ".join(f"{name} {value:.1f}" for name, value in result["seconds"].items())
    return f"{table}\n\nseconds: {seconds}\n\n{result['remark']}"
