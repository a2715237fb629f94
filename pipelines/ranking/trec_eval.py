"""Rankings and labels in the files of trec_eval, which computes the same metrics from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bertvision.errors import WorkspaceError
from bertvision.pipelines.ranking.metrics import Candidates, Ints, ranks


def run_file(
    scores: npt.NDArray[np.float32], candidates: Candidates, passages: Sequence[str], name: str
) -> str:
    """A ranking as trec_eval reads it: ``question Q0 passage rank score name``, a line each."""
    place = ranks(scores, candidates.question, candidates.tie)
    order = np.lexsort((place, candidates.question))
    return "".join(
        f"{candidates.questions[candidates.question[i]]} Q0 {passages[candidates.passage[i]]} "
        f"{place[i]} {scores[i]:.9g} {name}\n"
        for i in order
    )


def read_qrels(path: Path) -> tuple[Ints, Ints]:
    """What `qrels_file` wrote: the number of the question and the label of each candidate.

    Args:
        path: of the file.

    Returns:
        (candidates,) of each.

    Raises:
        WorkspaceError: it is damaged; names the line.
    """
    numbers: dict[str, int] = {}
    question, label = [], []
    try:
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match line.split(" "):
                case [name, "0", _, ("0" | "1") as digit]:
                    question.append(numbers.setdefault(name, len(numbers)))
                    label.append(int(digit))
                case _:
                    raise ValueError(f"line {i} is {line[:80]!r}")
        if not any(label):
            raise ValueError("it has no positive passage")
    except (OSError, ValueError) as error:
        again = f"`bertvision rank {path.parents[1].name}` writes it again"
        raise WorkspaceError(f"{path} is damaged ({error}): {again}") from error
    return np.array(question, np.int64), np.array(label, np.int64)


def qrels_file(candidates: Candidates, passages: Sequence[str]) -> str:
    """The labels as trec_eval reads them: ``question 0 passage label``, a line each."""
    return "".join(
        f"{candidates.questions[q]} 0 {passages[p]} {label}\n"
        for q, p, label in zip(
            candidates.question, candidates.passage, candidates.label, strict=True
        )
    )
