"""Small ranking data that tests share: written as files, and as arrays."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bertvision.pipelines.readouts.rank_metrics import Candidates, tie_order

Rows = Mapping[str, Sequence[tuple[str, str, int, str]]]
"""By part: (query, passage, label, question id)."""


def write_aligned(folder: Path, rows: Rows) -> Path:
    """Write a.toks, b.toks, sim.txt and id.txt of each part."""
    for part, lines in rows.items():
        (folder / part).mkdir(parents=True)
        for column, name in enumerate(("a.toks", "b.toks", "sim.txt", "id.txt")):
            text = "".join(f"{line[column]}\n" for line in lines)
            (folder / part / name).write_text(text, encoding="utf-8")
    return folder


def write_table(folder: Path, rows: Rows, ending: str, *, header: bool) -> None:
    """Write train.tsv or train.csv and so on."""
    for part, lines in rows.items():
        with (folder / f"{part}.{ending}").open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if ending == "tsv" else ",")
            writer.writerows([("query", "passage", "label", "query_id")] if header else [])
            writer.writerows(lines)


def candidates(labels: Sequence[Sequence[int]], ids: Sequence[str] | None = None) -> Candidates:
    """Candidates of questions with these labels, whose passages are all distinct."""
    counts = [len(row) for row in labels]
    n = sum(counts)
    question = np.repeat(np.arange(len(labels)), counts)
    return Candidates(
        [f"q{i}" for i in range(len(labels))],
        question,
        question.copy(),
        np.arange(n),
        np.array([label for row in labels for label in row], np.int64),
        tie_order(ids or [f"{i:06d}" for i in range(n)]),
    )


def random_candidates(questions: int, seed: int) -> Candidates:
    """Questions with 4 to 12 passages, of which one to three, but not all, answer."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(questions):
        n = int(random.integers(4, 13))
        row = np.zeros(n, int)
        row[random.permutation(n)[: random.integers(1, 4)]] = 1
        rows.append(row.tolist())
    return candidates(rows)
