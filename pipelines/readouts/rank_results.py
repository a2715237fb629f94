"""Rankings as they are kept, and their rows beside BM25.

A ranking is a folder that is whole or absent. ``result.json`` has everything that is reported and
the settings it follows from; ``dev.run`` and ``test.run`` have the ranking itself in the format of
trec_eval, which computes the same metrics from them and from ``qrels/`` beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, JsonValue, ValidationError, model_validator

from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.readouts.batched import Floats
from bertvision.pipelines.readouts.options import CROSS_ENCODER
from bertvision.pipelines.readouts.rank_metrics import (
    Candidates,
    Metrics,
    expected_at_random,
    summary,
)
from bertvision.pipelines.records import Count, Record, read_record, what_is_wrong
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.uncertainty import deviation, format_p, paired_bootstrap
from bertvision.pipelines.workspace.config import Tag

FOLDER, FILE = "ranking", "result.json"
"""Folder of rankings in a workspace, and name of the file in the folder of each."""
_OPTIONS = {"checkpoint": "checkpoint", "scorers": "scorer", "pool": "pooling"}
"""Options of the command and what settings call them."""
Row = dict[str, Any]


class PerQuestion(Record):
    """Fields of `QuestionScores` on test, of questions with a positive passage in their order."""

    ap: list[float]
    rr: list[float]
    p1: list[float]


class _System(Record):
    """Settings of any system."""

    data_sha256: str
    scorer: str


class _OfSnapshot(_System):
    """Settings of a system that reads an encoder's states, or is the encoder."""

    checkpoint: Tag


class _OfStates(_OfSnapshot):
    """Settings of a scorer of stored states."""

    pooling: TokenPooling
    layers: Annotated[tuple[Count, ...], Field(min_length=1)]


class Ranking(Record):
    """The contents of ``result.json``."""

    settings: dict[str, JsonValue]
    """Everything the scores depend on; compared before they are used again."""
    metrics: dict[str, dict[str, int | float]]
    """Fields of `Metrics`, of ``dev`` and ``test``."""
    per_question: PerQuestion
    epoch: int
    """The chosen one; 0 where nothing was learned."""
    dev_map_by_epoch: list[float]
    """From epoch 0."""

    @model_validator(mode="after")
    def _whole(self) -> Ranking:
        kinds: dict[str, type[_System]] = {"bm25": _System, CROSS_ENCODER: _OfSnapshot}
        try:
            kinds.get(str(self.settings.get("scorer")), _OfStates).model_validate(self.settings)
        except ValidationError as error:
            raise ValueError(f"settings: {what_is_wrong(error)}") from None
        for part, metrics in {"test": {}, **self.metrics}.items():
            for field in Metrics._fields:
                if field not in metrics:
                    raise ValueError(f"metrics.{part}.{field} is missing")
        return self

    @property
    def weights(self) -> list[tuple[str, object]]:
        """The snapshot, and the digest of its weights that the scores follow from; none of BM25."""
        names = ("weights_sha256", "activations.weights_sha256")
        given = self.settings
        return [(str(given["checkpoint"]), given[name]) for name in names if name in given]

    def mend(self, path: Path) -> str:
        """See `OfSnapshots`."""
        dataset = next(p.name for p in path.parents if p.parent.name == FOLDER)
        command = f"bertvision rank {dataset}"
        for option, name in _OPTIONS.items():
            command += f" --{option} {self.settings[name]}" if name in self.settings else ""
        return f"delete {path.parent}, and `{command}` ranks anew"

    @property
    def ap(self) -> Floats:
        """(questions with a positive passage of test,) average precision."""
        return np.array(self.per_question.ap, np.float64)


def read_ranked(path: Path) -> Ranking:
    """Read the ``result.json`` of a ranking.

    Raises:
        WorkspaceError: it is missing or damaged.
    """
    mend = f"delete {path.parent} and give the command again"
    return read_record(path, Ranking, "bertvision rank", mend)


def system_row(
    records: Sequence[Ranking], baseline: Ranking | None, *, resamples: int, **names: Any
) -> Row:
    """A row of the table: one scorer with one input, over its seeds.

    A question's score is its mean over seeds. Questions are drawn with replacement for the 95 %
    interval of the MAP and, paired with BM25's, of the difference (`paired_bootstrap`).

    Args:
        records: A ranking for each seed.
        baseline: BM25's; None where this is BM25 itself.
        resamples: Number of draws of questions.
        **names: Names of the system, the first fields of the row.
    """
    ap = 100 * np.mean([record.ap for record in records], axis=0)
    dev = [record.metrics["dev"]["map"] for record in records if "dev" in record.metrics]
    test = [record.metrics["test"] for record in records]
    means: Row = {name: float(np.mean([one[name] for one in test])) for name in Metrics._fields}
    counts = {name: int(means[name]) for name in ("questions", "without_positive")}
    ends = paired_bootstrap(ap, np.zeros_like(ap), resamples=resamples)
    row: Row = {
        **names,
        "seeds": len(records),
        "epochs": [record.epoch for record in records],
        "dev_map": float(np.mean(dev)) if dev else None,
        **means,
        **counts,
        "map_low": ends.low,
        "map_high": ends.high,
        "map_sd_over_seeds": deviation([one["map"] for one in test]),
    }
    if baseline is not None:
        ahead = paired_bootstrap(ap, 100 * baseline.ap, resamples=resamples)
        row |= {"difference": ahead.difference, "difference_low": ahead.low}
        row |= {"difference_high": ahead.high, "p": ahead.p}
    return row


def random_row(dev: Candidates | None, test: Candidates, **names: Any) -> Row:
    """The row of a random order: exact expectations."""
    expected = {
        name: summary(expected_at_random(part.label, part.question), len(part.questions))
        for name, part in (("dev", dev), ("test", test))
        if part is not None
    }
    on_dev = expected["dev"].map if dev is not None else None
    return {**names, "dev_map": on_dev, **expected["test"]._asdict()}


def mark_best(rows: Sequence[Row], same: Sequence[str]) -> None:
    """Set ``best`` in every row: whether its MAP on dev is the highest of its group.

    The choice never sees test, so that the MAP of the row it falls on is no maximum of many.

    Args:
        rows: Rows of systems.
        same: Fields that the rows of a group have in common.
    """
    tops: dict[tuple[Any, ...], float] = {}
    for row in rows:
        group = tuple(row[field] for field in same)
        tops[group] = max(tops.get(group, -1.0), -1.0 if row["dev_map"] is None else row["dev_map"])
    for row in rows:
        row["best"] = row["dev_map"] == tops[tuple(row[field] for field in same)]


SCORES = [
    Column("dev_map", "dev MAP"),
    Column("map", "MAP", sd=True, interval=True),
    *columns(mrr="MRR", p1="P@1"),
    Column("difference", "− BM25", "signed"),
]
"""Columns of the scores of a system."""


def table(result: Row) -> str:
    """The rows for a terminal, BM25 first, and what the columns leave out."""
    shown = columns("text", system="system", checkpoint="checkpoint", pooling="pool")
    shown += [Column("layers", "layers", "text"), *SCORES[:-1], replace(SCORES[-1], interval=True)]
    rows = [
        {
            **row,
            "layers": f"{row['layers']} *" if row.get("best") else row.get("layers"),
            "map_sd": row.get("map_sd_over_seeds"),
            "p": format_p(row["p"], result["resamples"]) if "p" in row else None,
        }
        for row in result["rows"]
    ]
    lines = [table_of([*shown, Column("p", "p", "text")], rows), ""]
    first = result["rows"][0]
    lines.append(f"test: {first['questions']:,} questions with a positive passage")
    if without := first["without_positive"]:
        lines[-1] += f"; {without:,} without one are left out (counted as 0 in --json, --csv)"
    if any(row.get("best") for row in result["rows"]):
        lines.append("*: the layers with the highest MAP on dev, of each system and pooling")
    return "\n".join(lines)
