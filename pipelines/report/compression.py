"""The table of compressed encoders: the share of the score each keeps, its size and its speed.

The columns follow Rogers, Kovaleva & Rumshisky (2020, arXiv:2002.12327), *A Primer in BERTology*,
table 1: how much smaller, the share of the performance that is left, the speed-up. Theirs is a
ratio of scores; here the trivial answer's is taken off both first, so that the share is smaller
and not to be set beside published ones. A row stands for a measurement that is there; nothing is
taken from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bertvision.errors import BertvisionError
from bertvision.pipelines.analysis.exits import WITHIN, ExitsResult
from bertvision.pipelines.analysis.prune import PruningResult
from bertvision.pipelines.analysis.result import read_analyses
from bertvision.pipelines.finetuning.latency_record import (
    NAME,
    Latencies,
    QuantisedScores,
    quantise_command,
    read_latencies,
)
from bertvision.pipelines.measurements import weights_of_snapshot
from bertvision.pipelines.records import leaving_out, read_record
from bertvision.pipelines.report.section import (
    RETENTION,
    SPEED_UP,
    Reading,
    Section,
    Table,
    basis,
    floor_of,
)
from bertvision.pipelines.results.columns import Column, columns
from bertvision.pipelines.results.rows import Results, Row
from bertvision.pipelines.tasks.scores import headline, headline_metric
from bertvision.pipelines.workspace.records import read_run_config
from bertvision.pipelines.workspace.reproduce import training_command
from bertvision.pipelines.workspace.snapshots import count_encoder_parameters
from bertvision.pipelines.workspace.workspace import Workspace

R = TypeVar("R", ExitsResult, PruningResult)
_SCORE = ("score", "score_sd", "score_low", "score_high", "command", "baseline")


def compression_section(reading: Reading) -> Section | None:
    """The last snapshot that was scored, beside what is smaller; None where nothing is."""
    workspace, results, left_out = reading.workspace, reading.results, reading.left_out
    if not results.bert:
        return None
    encoder = results.bert[-1]
    weights = weights_of_snapshot(workspace, encoder["checkpoint"])
    if weights is None:  # removed since it was scored: nothing is known of its size
        return None
    measured = _Encoder(workspace, encoder, weights, left_out)
    rows = [measured.row(results.baseline), *measured.quantised(results), *measured.heads(results)]
    rows += [*measured.exits(), *measured.pruned()]
    depth = rows[0]["layers"]
    plain = all(r["how"] == "whole" or (r["how"], r["layers"]) == ("head", depth) for r in rows)
    if plain and rows[0]["speed_up"] is None:
        return None
    lead = (
        "What an answer takes: the encoder, as far as it is run, with what stands on it. Retention "
        f"is what the score is above {floor_of(results) or 0}, in per cent of the encoder's, which "
        "is less than the ratio of scores that papers give, and not comparable with it; early "
        "exits and masked heads, which are scored on hidden states as they are stored, or on a "
        "part of the items, are compared with all layers and heads of the same measurement. "
        "Speed-up is measured in turns (`bertvision latency`); early exits are counted in layers "
        "alone, and masked heads are computed all the same, so that both have none. 8-bit layers "
        "are compared with the encoder in float32, which all else of it is in."
    )
    table = Table(
        "compression",
        f"Compressed encoders at {encoder['checkpoint']}: size, {results.score}, speed",
        [
            *columns("text", name="system", how="how"),
            Column("parameters", "parameters", "count"),
            Column("percent", "% of the encoder"),
            Column("smaller", "smaller (×)", digits=2),
            Column("score", results.score, sd=True, interval=True),
            RETENTION,
            Column("layers", "layers run"),
            SPEED_UP,
        ],
        compared(rows),
        "",
        "bertvision latency --checkpoint TAG; bertvision quantise; bertvision exits TAG; "
        "bertvision prune TAG; bertvision finetune --variant keep:K --distil FOLDER:TAG",
        more=["bytes", "weights_sha256"],
        trace=True,
        basis=basis(results, [encoder]),
        remarks=[
            f"Early exits and masked heads are those of the least layers and heads with at most "
            f"{WITHIN:g} point less, chosen on what is scored."
        ]
        if any(row["how"] in ("early exits", "masked heads") for row in rows)
        else [],
        joined=compared,
    )
    return Section("compression", "Compression", lead, tables=[table])


def compared(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows with their size, retention and speed-up beside the first encoder's.

    Rows of other workspaces than the first are compared with its encoder, where they are of the
    same data; their speed-up is that of their encoder beside it, where it was measured in turns
    with it, and unknown of all else.
    """
    first, rows_beside = rows[0], []
    for system in rows:
        row = dict(system)
        same = row.get("data") == first.get("data")
        own = row["of"] == first["of"]
        size, whole = row["parameters"], first["parameters"]
        row["percent"] = 100 * size / whole if size and whole else None
        row["smaller"] = first["bytes"] / row["bytes"] if row["bytes"] and first["bytes"] else None
        full = row["full"] if row["full"] is not None else (first["score"] if same else None)
        trivial = row["baseline"] or 0.0
        learned = None if full is None else full - trivial
        row["retention"] = None
        if learned is not None and learned > 0:
            row["retention"] = 100 * ((row["score"] - trivial) / learned)
        if not own:
            row["speed_up"] = first["beside"].get(row["weights_sha256"])
        rows_beside.append(row)
    return rows_beside


class _Encoder:
    """The encoder that all rows of a workspace are of, and what was measured of it."""

    def __init__(self, workspace: Workspace, row: Row, weights: str, left_out: list[str]) -> None:
        self._workspace = workspace
        self._encoder = row
        self._left_out = left_out
        self._tag: str = row["checkpoint"]
        self._of_dev = f"{self._tag}/dev"  # tune chose thresholds, and train was learned
        self._folder = workspace.snapshot_dir(self._tag)
        self._depth = workspace.config.model.num_hidden_layers
        self._parameters = cache(self._count)
        self._weights = weights
        measured = [m for m in read_latencies(workspace, []) if m.tag == self._tag]
        self._latencies: Latencies | None = measured[0] if measured else None

    def _count(self, layers: int) -> int | None:
        try:
            return count_encoder_parameters(self._folder, layers)
        except (BertvisionError, ValueError, IndexError):
            return None  # a family whose configuration says more of each layer

    def _system(self, **values: Any) -> Row:
        """A row, with what all have."""
        parameters = values.get("parameters")
        row: Row = {
            "of": self._weights,
            "weights_sha256": None,
            "full": None,
            "speed_up": None,
            "beside": {},
            "parameters": None,
            "bytes": None if parameters is None else 4 * parameters,
            "layers": float(self._depth),
        }
        return row | values

    def _scored(self, row: Row) -> Row:
        return {key: row.get(key) for key in (*_SCORE, "file")}

    def _speed_up(self, name: str, trained_on: str | None = None) -> float | None:
        for system in self._latencies.systems if self._latencies else ():
            if (system.name, system.trained_on) == (name, trained_on):
                return system.speed_up
        return None

    def row(self, baseline: float | None) -> Row:
        """The encoder itself: whole, or as far as a variant left it, perhaps a student."""
        settings = self._workspace.config.finetune
        variant = [v for v in settings.variant if v.partition(":")[0] in ("keep", "drop")]
        how = ["first layers"] * bool(variant) + ["distilled"] * bool(settings.distil)
        name = " ".join(["BERT", *map(str, settings.variant)])
        systems = self._latencies.systems if self._latencies else ()
        return self._system(
            **self._scored(self._encoder) | {"baseline": baseline},
            name=name,
            how=", ".join(how) or "whole",
            parameters=self._parameters(self._depth),
            speed_up=1.0 if systems else None,
            weights_sha256=self._weights,
            beside={s.weights_sha256: s.speed_up for s in systems if s.weights_sha256},
        )

    def quantised(self, results: Results) -> list[Row]:
        """With 8-bit linear layers."""
        rows = []
        for row in (r for r in results.quantised if r["checkpoint"] == self._tag):
            with leaving_out(self._left_out):
                path = self._workspace.root / row["file"]
                record = read_record(path, QuantisedScores, quantise_command(self._tag))
                whole = None if record.whole is None else dict(headline(record.whole))
                task = self._workspace.config.task.name
                system = self._system(
                    **self._scored(row),
                    name=row["name"],
                    how="8 bits",
                    parameters=self._parameters(self._depth),
                    speed_up=self._speed_up(NAME),
                    full=whole and whole[headline_metric(task, whole)],
                )
                rows.append(system | {"bytes": record.bytes})
        return rows

    def heads(self, results: Results) -> list[Row]:
        """Heads that were trained on this snapshot, on as many layers as they take."""
        systems = []
        for row in results.full:
            if not row["trained_on"] == row["checkpoint"] == self._tag:
                continue
            run = (self._workspace.root / row["file"].split("; ")[0]).parents[2]
            with leaving_out(self._left_out):
                systems.append(self._head(row, run))
        return systems

    def _head(self, row: Row, run: Path) -> Row:
        config = read_run_config(run)
        layers = min(max(config.layers), self._depth)
        below, own = self._parameters(layers), row["parameters"]
        command = training_command(config, self._depth + 1)
        return self._system(
            **self._scored(row) | {"command": f"{command}; {row['command']}"},
            name=row["name"],
            how="distilled head" if config.training.distil else "head",
            layers=float(layers),
            parameters=None if None in (below, own) else below + own,
            speed_up=self._speed_up(run.name, self._tag),
        )

    def exits(self) -> list[Row]:
        """The fewest layers in the mean that are as good as all but a point, by each criterion."""
        return [
            self._system(
                name=f"exits by {criterion}",
                how="early exits",
                score=float(result.least_scores[k]),
                full=float(result.fixed[-1]),
                baseline=result.trivial,
                parameters=self._parameters(self._depth),
                layers=float(result.least[k]),
                **origin,
            )
            for result, origin in self._analyses(ExitsResult)
            for k, criterion in enumerate(result.criteria)
        ]

    def pruned(self) -> list[Row]:
        """The fewest attention heads that are as good as all but a point."""
        rows = []
        for result, origin in self._analyses(PruningResult):
            full = float(result.score[0])
            if len(enough := np.flatnonzero(result.score >= full - WITHIN)):
                at = int(enough[-1])
                name = f"{100 * float(result.left[at]):.0f} % of attention heads"
                score = {"score": float(result.score[at]), "full": full, **origin}
                how, baseline = "masked heads", result.trivial
                rows.append(self._system(name=name, how=how, baseline=baseline, **score))
        return rows

    def _analyses(self, kind: type[R]) -> Iterator[tuple[R, dict[str, str]]]:
        """The results of a kind on dev of this encoder, with their origin."""
        for file, analysis in read_analyses(self._workspace, kind, self._left_out).items():
            if self._tag in analysis.weights_sha256 and analysis.result.name == self._of_dev:
                yield analysis.result, {"file": file, "command": analysis.command}
