"""Sections that are tables alone: ensembles, controls, all results, their origin, waiting jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.errors import StoreError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.report.section import (
    BERT,
    EVALUATE,
    HEADS,
    NO_SYSTEM,
    OF_HEADS,
    PERCENT,
    RETENTION,
    SEEDS,
    SPEED_UP,
    Reading,
    Section,
    Table,
    basis,
    floor_of,
    heading,
    of_bert,
    order,
    pair,
)
from bertvision.pipelines.results.columns import Column, columns
from bertvision.pipelines.results.rows import COSTS, Results, columns_of, is_control
from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.tasks.scores import kind_of_metrics
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.status import status

ARGMAX = ("argmax_exact", "argmax_f1")
_WHY = {
    "finetune": "BERT is not fine-tuned, or not scored, at every snapshot",
    "extract": "hidden states are not stored, or not whole",
    "train": "stored, and no head is trained on it; or its training was interrupted",
    "evaluate": "trained, and not scored on its own snapshot",
}
"""Reasons for which `status` names a command."""


def ensembles(reading: Reading) -> Section:
    """Ensembles against their best member."""
    ident, title, results = "ensembles", "Ensembles", reading.results
    if not results.ensembles:
        missing = "There is no ensemble: `bertvision ensemble HEAD… --with-bert` makes one."
        return Section(ident, title, missing=missing)
    metrics = [c for c in results.metrics if c.key not in ("HasAns_exact", *ARGMAX)]
    table = Table(
        "ensembles",
        "Ensembles by the snapshot they are evaluated on",
        [
            *columns("text", name="ensemble", pair="trained on → evaluated on"),
            *metrics,
            Column("best_member", f"best member {results.score}"),
            *columns("signed", gain="vs best member", difference="vs BERT"),
        ],
        [
            r | {"pair": f"{r['trained_on']} → {r['checkpoint']}"}
            for r in sorted(results.ensembles, key=lambda r: (pair(r)[::-1], -r["score"]))
        ]
        + results.trivial,
        "ensembles/<evaluated on>/<name>/metrics.json",
        "bertvision ensemble HEAD… --with-bert",
        more=["seeds", "trained_on", "checkpoint", "bert", "threshold_tuned_on"],
        trace=True,
        basis=basis(results, results.ensembles),
    )
    lead = (
        "Element-wise maximum or mean of the members' probabilities, then the same decoding. An "
        "ensemble is worth its cost where it scores above its best member."
    )
    return Section(ident, title, lead, tables=[table])


def control(reading: Reading) -> Section:
    """Heads on activations of the pretrained encoder."""
    ident, title, results = "control", "Control: before fine-tuning", reading.results
    rows = [r for r in results.heads if is_control(r) and not _is_named(r)]
    if not rows:
        missing = (
            "No head was trained on the pretrained encoder: `bertvision extract "
            "--checkpoint 0e`, then `bertvision sweep HEAD… --trained-on 0e --checkpoint 0e`."
        )
        return Section(ident, title, missing=missing)
    lead = (
        "Heads on the activations of the encoder before any fine-tuning. They show how much of the "
        "score the heads' own training makes, and how much comes from the fine-tuned encoder."
    )
    if results.baseline is not None:
        name = floor_of(results)
        lead += f" {name[0].upper()}{name[1:]} scores {results.baseline:.1f}."
    table = _controls(ident, "Heads on activations before fine-tuning", rows, results)
    return Section(ident, title, lead, tables=[table])


def other_checkpoints(reading: Reading) -> Section | None:
    """Heads on activations of checkpoints with words as tags, such as those of pretraining."""
    ident, results = "checkpoints", reading.results
    rows = [r for r in results.heads if _is_named(r)]
    if not rows:
        return None
    lead = (
        "Heads on the activations of other checkpoints of the model, each under its own name, such "
        "as those of pretraining. None of them was fine-tuned on the task."
    )
    table = _controls(ident, "Heads on activations of other checkpoints", rows, results)
    return Section(ident, "Other checkpoints", lead, tables=[table])


def _is_named(row: Mapping[str, Any]) -> bool:
    return SnapshotTag(row["trained_on"]).is_named


def _controls(ident: str, caption: str, rows: Sequence[dict[str, Any]], results: Results) -> Table:
    """Table of heads on activations of encoders that were not fine-tuned."""
    return Table(
        ident,
        caption,
        [
            *columns("text", name="head", trained_on="trained on"),
            Column("fraction", "part", digits=2),
            SEEDS,
            *results.metrics,
            Column("bert", f"BERT {results.score}", sd=True),
        ],
        [r | of_bert(results, r) for r in sorted(rows, key=lambda r: (-r["score"], r["name"]))]
        + results.trivial,
        *OF_HEADS,
        trace=True,
        basis=basis(results, rows),
    )


def other_task(reading: Reading) -> Section | None:
    """Heads that only tell answerable questions, where the task is to find answers."""
    results = reading.results
    if not results.others:
        return None
    table = Table(
        "answerable",
        "Heads that tell whether a question is answerable, in per cent",
        [
            *columns("text", name="head", trained_on="trained on", checkpoint="evaluated on"),
            SEEDS,
            PERCENT,
            *columns_of(results.others),
        ],
        sorted(results.others, key=lambda r: (pair(r), r["name"])),
        *OF_HEADS,
        trace=True,
        basis=basis(results, results.others),
    )
    lead = (
        "These heads do not find answers; their scores are of another question than those above "
        "and are compared with nothing else here."
    )
    return Section("answerable", "Answerable or not", lead, tables=[table])


def all_results(reading: Reading) -> Section:
    """Every system with every metric."""
    results = reading.results
    rows = [*results.bert, *results.heads, *results.ensembles]
    ordered = sorted(rows, key=lambda r: (pair(r), order(r)))
    shown = [
        Column("name", "system", "text"),
        Column("fraction", "part of the data", digits=2),
        SEEDS,
        PERCENT,
        *results.metrics,
        Column("difference", f"{results.score} vs BERT", "signed"),
        RETENTION,
        SPEED_UP,
    ]
    plain = {"fraction": 1, "speed_up": None, "retention": None}
    same = {key for key, value in plain.items() if all(r[key] == value for r in rows)}
    shown = [column for column in shown if column.key not in same]
    keys = [column.key for column in shown]
    table = Table(
        "results",
        f"All results on {results.split}, in per cent",
        shown,
        [
            *(r | {"pair": heading(r)} for r in ordered),
            *(r | {"pair": NO_SYSTEM} for r in results.trivial),
        ],
        f"{BERT}, {HEADS}, ensembles/<evaluated on>/<name>/metrics.json",
        f"{BERT_COMMAND}; {EVALUATE}; bertvision ensemble",
        group="pair",
        more=[
            *("system", "trained_on", "checkpoint", "threshold_tuned_on"),
            *(key for key in COSTS if key not in keys),
        ],
        trace=True,
        basis=basis(results, rows),
    )
    meanings = [METRICS[key].meaning for c in results.metrics if (key := c.key) in METRICS]
    lead, notes = _spans_lead(results), [meaning for meaning in meanings if meaning]
    if lead is None:
        lead, notes = " ".join(notes), []
    return Section("results", "All results", lead, notes, tables=[table])


def sources(reading: Reading) -> Section:
    """File and command of every single result."""
    results = reading.results
    rows = [
        r | {"pair": heading(r)} for r in sorted(results.runs, key=lambda r: (pair(r), order(r)))
    ]
    table = Table(
        "runs",
        "Every result by run, seeds apart",
        [
            Column("run", "run", "text"),
            Column("score", results.score),
            *columns("code", file="file", command="command"),
        ],
        rows,
        source="",
        command="",
        group="pair",
        more=["threshold_tuned_on"],
    )
    lead = "Where each score stands, and the command that makes it again, run in the workspace."
    return Section("sources", "Where the numbers come from", lead, tables=[table])


def waiting_section(reading: Reading) -> Section | None:
    """The commands that are next; None where none waits or the store cannot be read."""
    commands: list[str] = []
    with leaving_out(reading.left_out):
        try:
            commands = status(reading.workspace)["next"]
        except (StoreError, OSError):
            return None  # which the facts about the store say
    rows = [
        {"why": _WHY[command.split()[1]], "next": command}
        for command in commands
        if command.split()[1] in _WHY
    ]
    if not rows:
        return None
    table = Table(
        "waiting",
        "What is begun or stored and not yet in the tables above",
        [Column("why", "what waits", "text"), Column("next", "command", "code")],
        rows,
        "the workspace",
        "bertvision status",
    )
    return Section("waiting", "What waits", tables=[table])


def _spans_lead(results: Results) -> str | None:
    """How answers that are spans are scored; None where answers are something else."""
    if kind_of_metrics({column.key for column in results.metrics}) != "span":
        return None
    text = (
        "EM is the share of exact matches, F1 the overlap of words. They are of the best valid "
        "span; the argmax columns take the most likely start and end, each by itself."
    )
    if results.baseline is not None:
        text += (
            " HasAns and NoAns are the questions with and without an answer: a system that "
            f"never answers scores 0 on the first, 100 on the second and {results.baseline:.1f} "
            "over all."
        )
    return text
