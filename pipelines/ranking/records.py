"""Rankings on the disk, each a folder that is whole or absent.

``result.json`` has everything that is reported and the settings it follows from; ``dev.run`` and
``test.run`` have the ranking itself in the format of trec_eval, which computes the same metrics
from them and from ``qrels/`` beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue, ValidationError, model_validator

from bertvision.pipelines.files import new_folder
from bertvision.pipelines.measurements import check_made_from
from bertvision.pipelines.ranking.metrics import (
    Candidates,
    Floats,
    Metrics,
    score_questions,
    summary,
)
from bertvision.pipelines.ranking.options import CROSS_ENCODER
from bertvision.pipelines.ranking.trec_eval import run_file
from bertvision.pipelines.records import (
    Count,
    Record,
    read_record,
    what_is_wrong,
    write_record,
)
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.workspace.config import Tag

FOLDER, FILE = "ranking", "result.json"
"""Where rankings are in a workspace, and what is in the folder of each."""
_OPTIONS = {"checkpoint": "checkpoint", "scorers": "scorer", "pool": "pooling"}
"""Options of the command and what settings call them."""


class PerQuestion(Record):
    """Fields of `QuestionScores` on test, of questions with a positive passage in their order."""

    ap: list[float]
    rr: list[float]
    p1: list[float]


class _System(Record):
    """What settings say of any system."""

    data_sha256: str
    scorer: str


class _OfSnapshot(_System):
    """What they say of a system that reads an encoder's states, or is the encoder."""

    checkpoint: Tag


class _OfStates(_OfSnapshot):
    """What they say of a scorer of stored states."""

    pooling: TokenPooling
    layers: Annotated[tuple[Count, ...], Field(min_length=1)]


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

    @model_validator(mode="after")
    def _whole(self) -> Ranking:
        kinds: dict[str, type[_System]] = {"bm25": _System, CROSS_ENCODER: _OfSnapshot}
        try:
            kinds.get(str(self.settings.get("scorer")), _OfStates).model_validate(self.settings)
        except ValidationError as error:
            raise ValueError(f"settings: {what_is_wrong(error)}") from None
        lacking = [
            f"metrics.{part}.{field}"
            for part, found in {"test": {}, **self.metrics}.items()
            for field in Metrics._fields
            if field not in found
        ]
        if lacking:
            raise ValueError(f"{lacking[0]} is missing")
        return self

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
