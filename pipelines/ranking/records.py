"""Rankings on the disk, each a folder that is whole or absent.

``result.json`` has everything that is reported and the settings it follows from; ``dev.run`` and
``test.run`` have the ranking itself in the format of trec_eval, which computes the same metrics
from them and from ``qrels/`` beside.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import WorkspaceError
from bertvision.pipelines.files import new_folder
from bertvision.pipelines.ranking.metrics import (
    Candidates,
    Floats,
    QuestionScores,
    ranks,
    score_questions,
    summary,
)

FILE = "result.json"


@dataclass(frozen=True)
class Record:
    """What ``result.json`` says."""

    settings: dict[str, Any]
    """Everything the scores depend on; compared before they are used again."""
    metrics: dict[str, dict[str, float]]
    """Fields of `Metrics`, of ``dev`` and ``test``."""
    test: QuestionScores
    """(questions with a positive passage,) each, in the order of the data."""
    epoch: int
    """The chosen one; 0 where nothing was learned."""
    curve: list[float]
    """MAP on dev after each epoch, from epoch 0."""


def write_record(
    folder: Path,
    settings: Mapping[str, Any],
    scores: Mapping[str, npt.NDArray[np.float32]],
    candidates: Mapping[str, Candidates],
    passages: Sequence[str],
    *,
    epoch: int = 0,
    curve: Sequence[float] = (),
) -> Record:
    """Score a ranking and write it.

    Args:
        folder: of the ranking.
        settings: see `Record`.
        scores: (pairs,) of each part that was ranked.
        candidates: of these parts.
        passages: ids of all passages.
        epoch: see `Record`.
        curve: see `Record`.

    Raises:
        InputError: no question has a positive passage.
    """
    questions = {
        part: score_questions(values, c.label, c.question, c.tie)
        for part, values in scores.items()
        for c in [candidates[part]]
    }
    metrics = {
        part: summary(found, len(candidates[part].questions))._asdict()
        for part, found in questions.items()
    }
    record = Record(dict(settings), metrics, questions["test"], epoch, list(curve))
    with new_folder(folder) as temporary:  # which puts on the disk what is written into it
        for part, values in scores.items():
            text = run_file(values, candidates[part], passages, folder.name)
            (temporary / f"{part}.run").write_text(text, encoding="utf-8")
        result = {
            "settings": record.settings,
            "metrics": metrics,
            "per_question": {
                name: values.tolist() for name, values in record.test._asdict().items()
            },
            "epoch": epoch,
            "dev_map_by_epoch": record.curve,
        }
        text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
        (temporary / FILE).write_text(f"{text}\n", encoding="utf-8")
    return record


def read_record(folder: Path, settings: Mapping[str, Any]) -> Record | None:
    """The ranking in ``folder``, or None where there is none yet.

    Raises:
        WorkspaceError: it is damaged, or was made with other settings; names the field.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        record = Record(
            values["settings"],
            values["metrics"],
            QuestionScores(*(_floats(values["per_question"][k]) for k in QuestionScores._fields)),
            values["epoch"],
            values["dev_map_by_epoch"],
        )
        held = dict(record.settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkspaceError(
            f"{path} is damaged ({error}): delete {folder} and give the command again"
        ) from error
    for field in {**held, **settings}:
        there, here = held.get(field), settings.get(field)
        if there != here:
            raise WorkspaceError(
                f"{folder} was ranked with {field} = {there!r}, now it is {here!r}: give the same, "
                "use another --workspace, or delete that folder"
            )
    return record


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


def qrels_file(candidates: Candidates, passages: Sequence[str]) -> str:
    """The labels as trec_eval reads them: ``question 0 passage label``, a line each."""
    return "".join(
        f"{candidates.questions[q]} 0 {passages[p]} {label}\n"
        for q, p, label in zip(
            candidates.question, candidates.passage, candidates.label, strict=True
        )
    )


def _floats(values: list[float]) -> Floats:
    return np.array(values, np.float64)
