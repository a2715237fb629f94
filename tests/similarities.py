"""Small data of similarity that tests share, in the forms of the real files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

PEOPLE = ["anna", "boris", "clara", "david"]
PLACES = ["paris", "london", "rome"]
HEADER = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment"
SIZES = {"SICK_train.txt": 60, "SICK_trial.txt": 20, "SICK_test_annotated.txt": 40}


def sentence_pairs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """(first, second, how many of three words they share)."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        drawn = [[str(random.choice(w)) for w in (PEOPLE, PLACES, ["1901", "1902"])] for _ in "12"]
        same = sum(a == b for a, b in zip(*drawn, strict=True))
        first, second = (f"{p} was in {q} in {y} ." for p, q, y in drawn)
        found.append((first, f"{second} book {seed} {i} ?", same))
    return found


def write_sick(folder: Path) -> Path:
    """SICK, whose relatedness grows with what both sentences share."""
    folder.mkdir(parents=True, exist_ok=True)
    judged = ["CONTRADICTION", "NEUTRAL", "NEUTRAL", "ENTAILMENT"]
    for seed, (name, size) in enumerate(SIZES.items()):
        lines = [
            f"{i}\t{a}\t{b}\t{1 + 4 * same / 3:.1f}\t{judged[same]}"
            for i, (a, b, same) in enumerate(sentence_pairs(size, seed))
        ]
        (folder / name).write_text("\n".join([HEADER, *lines, ""]), encoding="utf-8")
    return folder


def write_sts(folder: Path, subsets: dict[str, int]) -> Path:
    """Sub-sets with so many scored pairs each, every fourth line without a score."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, size) in enumerate(subsets.items()):
        lines = []
        for i, (a, b, same) in enumerate(sentence_pairs(size, seed + 10)):
            lines.append(f"{5 * same / 3:.2f}\t{a}\t{b}")
            if i % 3 == 0:
                lines.append(f"\tnobody {name} {i}\tjudged this")
        (folder / f"{name}.test.tsv").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


def write_glue_sts(folder: Path) -> Path:
    """The STS Benchmark of GLUE: no scores of test."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, size) in enumerate({"train": 60, "dev": 30}.items()):
        lines = [
            f"{i}\tnews\t{a}\t{b}\t{5 * same / 3:.3f}"
            for i, (a, b, same) in enumerate(sentence_pairs(size, seed + 20))
        ]
        header = "index\tgenre\tsentence1\tsentence2\tscore"
        (folder / f"{name}.tsv").write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    return folder
