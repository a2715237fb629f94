"""Section about candidate passages, ranked from hidden states beside BM25."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.extraction.layers import layers_text
from bertvision.pipelines.measurements import read_current
from bertvision.pipelines.readouts.options import CROSS_ENCODER
from bertvision.pipelines.readouts.rank_metrics import expected_at_random, read_qrels, summary
from bertvision.pipelines.readouts.rank_results import (
    FILE,
    FOLDER,
    Ranking,
    mark_best,
    read_ranked,
    system_row,
)
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.report.section import Section
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.workspace.workspace import Workspace

FILES = f"{FOLDER}/*/**/{FILE}"
"""Where rankings are, in a workspace."""
_RESAMPLES = 2_000


def rankings_section(workspace: Workspace, left_out: list[str]) -> Section | None:
    """Every ranking of the workspace, beside BM25 and a random order; None where there is none.

    Args:
        workspace: that they are of.
        left_out: gets a message for each file that is damaged and left out.
    """
    rows: list[Row] = []
    for folder in sorted((workspace.root / FOLDER).glob("[!.]*")):
        rows += _rows(workspace, folder, left_out)
    if not rows:
        return None
    table = Table(
        "rankings",
        "Rankings of test in per cent, with 95 % intervals over questions; best: of the scorer and "
        "pooling, the layers with the highest MAP on dev",
        [
            Column("system", "system", "text"),
            Column("checkpoint", "snapshot", "text"),
            Column("pooling", "pooling", "text"),
            Column("layers", "layers", "text"),
            Column("mark", "best", "text"),
            Column("seeds", "seeds", "count"),
            Column("dev_map", "dev MAP"),
            Column("map", "MAP", sd=True, interval=True),
            Column("mrr", "MRR"),
            Column("p1", "P@1"),
            Column("difference", "− BM25", "signed"),
        ],
        rows,
        FILES,
        "bertvision rank DATA --data FOLDER",
        group="group",
        more=[
            *("difference_low", "difference_high", "p", "questions", "without_positive"),
            *("map_all", "mrr_all", "p1_all", "data"),
        ],
        trace=True,
    )
    lead = (
        "MAP, MRR and P@1 over questions that have a right passage. Look at the best rows: their "
        "layers were chosen on dev, where the highest number of test would be too high. "
        "An interval of one seed holds the choice of questions alone."
    )
    return Section("rankings", "Answer ranking", lead, tables=[table])


def _rows(workspace: Workspace, folder: Path, left_out: list[str]) -> list[Row]:
    """BM25, a random order, then a row for each scorer and input, its seeds together."""
    groups: dict[tuple[str, ...], dict[Path, Ranking]] = {}
    files = folder.glob(f"**/{FILE}")
    for path, record in read_current(workspace, files, read_ranked, left_out).items():
        groups.setdefault(_key(record), {})[path] = record
    baselines = {
        key[0]: next(iter(records.values())) for key, records in groups.items() if key[1] == "bm25"
    }
    rows: list[Row] = []
    for key, records in sorted(groups.items(), key=lambda item: _place(item[0])):
        data, system, *place = key
        names = dict(zip(("checkpoint", "pooling", "layers"), place, strict=False))
        baseline = None if system == "bm25" else baselines.get(data)
        row = system_row(
            list(records.values()), baseline, resamples=_RESAMPLES, system=system, **names
        )
        row["map_sd"] = row.pop("map_sd_over_seeds")
        row |= {
            "group": f"{folder.name}, data sha256 {data[:12]}…",
            "data": data[:12],
            "file": "; ".join(p.relative_to(workspace.root).as_posix() for p in records),
            "command": f"bertvision rank {folder.name}",
        }
        rows.append(row)
        if system == "bm25":
            rows += _by_chance(folder, row, left_out)
    learned = [row for row in rows if "pooling" in row]
    mark_best(learned, ("data", "system", "checkpoint", "pooling"))
    for row in learned:
        row["mark"] = "best" if row["best"] and row["dev_map"] is not None else None
    return rows


def _key(record: Ranking) -> tuple[str, ...]:
    """What rankings that differ by their seed alone have in common."""
    of: dict[str, Any] = dict(record.settings)
    if of["scorer"] == "bm25":
        return str(of["data_sha256"]), "bm25"
    if of["scorer"] == CROSS_ENCODER:
        return str(of["data_sha256"]), CROSS_ENCODER, str(of["checkpoint"])
    place = str(of["checkpoint"]), str(of["pooling"]), layers_text(tuple(of["layers"]))
    return str(of["data_sha256"]), str(of["scorer"]), *place


def _place(key: Sequence[str]) -> tuple[object, ...]:
    data, system, *rest = key
    if not rest:
        return data, -1.0, "", "", (), system
    if len(rest) == 1:
        return data, SnapshotTag(rest[0]).fraction, "", system, (), ""
    tag, pooling, layers = rest
    numbers = tuple(int(layer) for layer in layers.split("+"))
    return data, SnapshotTag(tag).fraction, pooling, system, (len(numbers), *numbers), ""


def _by_chance(folder: Path, beside: Row, left_out: list[str]) -> list[Row]:
    """The exact expectation of a random order, from the labels that are kept for trec_eval."""
    path = folder / "qrels" / "test.qrels"
    if not path.is_file():
        return []
    with leaving_out(left_out):
        question, label = read_qrels(path)
        expected = summary(expected_at_random(label, question), int(question.max()) + 1)
        if expected.questions != beside["questions"]:
            raise WorkspaceError(
                f"{path} is damaged ({expected.questions} of its questions have a positive "
                f"passage, of BM25's {beside['questions']}): `{beside['command']}` writes it again"
            )
        kept = {key: beside[key] for key in ("group", "data", "command")}
        file = (Path(beside["file"]).parents[1] / "qrels" / path.name).as_posix()
        return [{"system": "random order", **kept, "file": file, **expected._asdict()}]
    return []
