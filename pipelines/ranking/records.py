"""Rankings on the disk, each a folder that is whole or absent.

``result.json`` has everything that is reported and the settings it follows from; ``dev.run`` and
``test.run`` have the ranking itself in the format of trec_eval, which computes the same metrics
from them and from ``qrels/`` beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from bertvision.pipelines.files import new_folder
from bertvision.pipelines.measurements import check_made_from
from bertvision.pipelines.ranking.metrics import (
    Candidates,
    Floats,
    ranks,
    score_questions,
    summary,
)
from bertvision.pipelines.records import Record, read_record, write_record

FOLDER, FILE = "ranking", "result.json"
"""Where rankings are in a workspace, and what is in the folder of each."""
_OPTIONS = {"checkpoint": "checkpoint", "scorers": "scorer", "pool": "pooling"}
"""Options of the command and what settings call them."""


class PerQuestion(Record):
    """Fields of `QuestionScores` on test, of questions with a positive passage in their order."""

    ap: list[float]
    rr: list[float]
    p1: list[float]


class Ranking(Record):
    """What ``result.json`` says."""

    settings: dict[str, JsonValue]
    """Everything the scores depend on; compared before they are used again."""
    metrics: dict[str, dict[str, int | float]]
    """Fields of `Metrics`, of ``dev`` and ``test``."""
    per_question: PerQuestion
    epoch: int
    """The chosen one; 0 where nothing was learned."""
    dev_map_by_epoch: list[float]
    """From epoch 0."""

    @property
    def weights(self) -> list[tuple[str, object]]:
        """The snapshot, and the digest of its weights that the scores follow from; none of BM25."""
        names = ("weights_sha256", "activations.weights_sha256")
        of = self.settings
        return [(str(of["checkpoint"]), of[name]) for name in names if name in of]

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


def write_ranking(
    folder: Path,
    settings: Mapping[str, Any],
    scores: Mapping[str, npt.NDArray[np.float32]],
    candidates: Mapping[str, Candidates],
    passages: Sequence[str],
    *,
    epoch: int = 0,
    curve: Sequence[float] = (),
) -> Ranking:
    """Score a ranking and write it.

    Args:
        folder: of the ranking.
        settings: see `Ranking`.
        scores: (pairs,) of each part that was ranked.
        candidates: of these parts.
        passages: ids of all passages.
        epoch: see `Ranking`.
        curve: ``dev_map_by_epoch`` of `Ranking`.

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
    ranking = Ranking(
        settings=dict(settings),
        metrics=metrics,
        per_question=PerQuestion(
            **{name: x.tolist() for name, x in questions["test"]._asdict().items()}
        ),
        epoch=epoch,
        dev_map_by_epoch=list(curve),
    )
    with new_folder(folder) as temporary:  # which puts on the disk what is written into it
        for part, values in scores.items():
            text = run_file(values, candidates[part], passages, folder.name)
            (temporary / f"{part}.run").write_text(text, encoding="utf-8")
        write_record(temporary / FILE, ranking)
    return ranking


def find_ranking(folder: Path, settings: Mapping[str, Any]) -> Ranking | None:
    """The ranking in ``folder``, or None where there is none yet.

    Raises:
        ProvenanceError: it was made with other settings; names the field.
        WorkspaceError: it is damaged.
    """
    if not (folder / FILE).is_file():
        return None
    held = read_ranked(folder / FILE)
    mend = "give the same, use another --workspace, or delete that folder"
    check_made_from(folder, held.settings, settings, mend)
    return held


def read_ranked(path: Path) -> Ranking:
    """Read the ``result.json`` of a ranking.

    Raises:
        WorkspaceError: it is missing or damaged.
    """
    mend = f"delete {path.parent} and give the command again"
    return read_record(path, Ranking, "bertvision rank", mend)


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
