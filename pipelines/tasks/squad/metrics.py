"""The official metric of SQuAD 2.0: exact match and token F1, in total, HasAns and NoAns.

Written from the definition in Rajpurkar et al. 2018 (arXiv:1806.03822) to give the keys and values
of its evaluate-v2.0.py, bit for bit; all scores are percentages. For v1.1 data, where every
question has an answer, they are those of SQuAD 1.1.

A question without a prediction is an error here: the official script stops at it with a KeyError.
"""

from __future__ import annotations

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import BertvisionWarning, InputError
from bertvision.pipelines.tasks.source import read_text
from bertvision.pipelines.tasks.squad.read import Question, read_squad
from bertvision.pipelines.tasks.tables import parse_json

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class AnswerScore(NamedTuple):
    """How well one predicted text answers one question, each the best over its gold answers."""

    exact: float
    """1 if the normalised texts are equal, else 0."""
    f1: float
    """Harmonic mean of precision and recall over normalised tokens, 0 to 1."""


def normalise_answer(text: str) -> str:
    """Lower-case, without ASCII punctuation, without the articles a, an, the, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def answer_score(prediction: str, question: Question) -> AnswerScore:
    """Score one predicted text; ``""`` means no answer.

    Gold answers that normalise to nothing do not count; where none is left, as for unanswerable
    questions, the only right answer is one that normalises to nothing.
    """
    golds = [gold for answer in question.answers if (gold := normalise_answer(answer.text))]
    predicted = normalise_answer(prediction)
    golds = golds or [""]
    return AnswerScore(
        float(predicted in golds), max(_f1(gold.split(), predicted.split()) for gold in golds)
    )


def _f1(gold: list[str], predicted: list[str]) -> float:
    if not gold or not predicted:
        return float(gold == predicted)
    common = sum((Counter(gold) & Counter(predicted)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def squad_metrics(
    predictions: Mapping[str, str],
    questions: Sequence[Question],
    na_probs: Mapping[str, float] | None = None,
    na_prob_thresh: float = 1.0,
) -> dict[str, float | int]:
    """Score predictions as evaluate-v2.0.py does.

    Args:
        predictions: answer text by question id, ``""`` for no answer. Further ids are ignored.
        questions: the questions of a data file.
        na_probs: no-answer probability (or any score that rises with it) by question id.
        na_prob_thresh: No-answer probability above which the answer counts as ``""``.

    Returns:
        ``exact``, ``f1``, ``total``; the same with ``HasAns_`` and ``NoAns_`` in front for the
        groups that exist; and, with ``na_probs``, the best ``exact`` and ``f1`` that a threshold
        could reach on this very data (``best_exact``, ``best_exact_thresh``, ``best_f1``,
        ``best_f1_thresh``). Scores are percentages. Of questions with equal probability, the search
        may cut between them, as the official one does.

    Raises:
        InputError: there are no questions, or one has no prediction or no-answer probability.
    """
    if not questions:
        raise InputError("there are no questions to score")
    _check_ids(predictions, questions, "prediction")
    raw = {q.id: answer_score(predictions[q.id], q) for q in questions}
    scores = raw
    if na_probs is not None:
        _check_ids(na_probs, questions, "no-answer probability")
        scores = {
            q.id: AnswerScore(float(not q.answers), float(not q.answers))
            if na_probs[q.id] > na_prob_thresh
            else raw[q.id]
            for q in questions
        }

    metrics: dict[str, float | int] = {}
    groups = {
        "": questions,
        "HasAns_": [q for q in questions if q.answers],
        "NoAns_": [q for q in questions if not q.answers],
    }
    for prefix, group in groups.items():
        if group:
            metrics[f"{prefix}exact"] = 100.0 * sum(scores[q.id].exact for q in group) / len(group)
            metrics[f"{prefix}f1"] = 100.0 * sum(scores[q.id].f1 for q in group) / len(group)
            metrics[f"{prefix}total"] = len(group)
    if na_probs is not None:
        has_answer = {q.id: bool(q.answers) for q in questions}
        order = sorted((i for i in na_probs if i in raw), key=na_probs.__getitem__)
        for name in ("exact", "f1"):
            gains = (
                getattr(raw[i], name) if has_answer[i] else -1.0 if predictions[i] else 0.0
                for i in order
            )
            best, at = _best_threshold(gains, groups["NoAns_"])
            metrics[f"best_{name}"] = 100.0 * best / len(questions)
            metrics[f"best_{name}_thresh"] = 0.0 if at is None else na_probs[order[at]]
    return metrics


def _best_threshold(
    gains: Iterable[float], unanswerable: Collection[Question]
) -> tuple[float, int | None]:
    """The highest running score, and after which question it is first reached.

    It begins with abstaining everywhere, which is right on the unanswerable questions; then one
    question after the other is answered, in the order of the no-answer probability.
    """
    score = best = float(len(unanswerable))
    at = None
    for i, gain in enumerate(gains):
        score += gain
        if score > best:
            best, at = score, i
    return best, at


def score_files(
    predictions: Path,
    data: Path,
    na_prob: Path | None = None,
    *,
    na_prob_thresh: float = 1.0,
    skip_bad: bool = False,
) -> dict[str, float | int]:
    """Score an official-format predictions file against a SQuAD file.

    Args:
        predictions: JSON ``{"question id": "answer text", …}``.
        data: a SQuAD file, v1.1 or v2.0.
        na_prob: JSON ``{"question id": no-answer probability, …}``.
        na_prob_thresh: As in `squad_metrics`.
        skip_bad: Leave malformed parts of the data file out of the score.

    Returns:
        The metrics of `squad_metrics`. Predictions of ids that the data file does not have, and
        skipped parts of it, do not count and are reported by a BertvisionWarning.

    Raises:
        InputError: a file is malformed, or does not cover the questions.
    """
    texts = _read_mapping(predictions)
    if isinstance(texts.get("data"), list):
        raise InputError(
            f"{predictions} is a file of questions in SQuAD's form, not of predictions: give first "
            'the predictions, {"question id": "answer text", …}, and then the data'
        )
    for question_id, text in texts.items():
        if not isinstance(text, str):
            raise InputError(
                f"{predictions}: [{question_id!r}]: expected the answer text (a string, "
                f"'' for no answer), found {text!r:.40}"
            )
    probabilities = None if na_prob is None else _read_mapping(na_prob)
    for question_id, value in (probabilities or {}).items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InputError(
                f"{na_prob}: [{question_id!r}]: expected the no-answer probability (a number), "
                f"found {value!r:.40}"
            )
    squad = read_squad(data, skip_bad=skip_bad)
    known = {q.id for q in squad.questions}
    if unknown := [i for i in texts if i not in known]:
        _warn(
            f"{predictions}: {len(unknown)} of {len(texts)} predictions are for ids that are not "
            f"in {data}, the first of them {unknown[0]!r}; they do not count"
        )
    if squad.skipped:
        _warn(f"skipped {len(squad.skipped)} malformed parts, the first: {squad.skipped[0]}")
    return squad_metrics(texts, squad.questions, probabilities, na_prob_thresh)


def _read_mapping(path: Path) -> dict[str, Any]:
    document = parse_json(read_text(path)[0], path)
    if not isinstance(document, dict):
        raise InputError(
            f"{path}: expected an object of question ids, found {type(document).__name__}"
        )
    return document


def _check_ids(given: Collection[str], questions: Sequence[Question], what: str) -> None:
    if missing := [q.id for q in questions if q.id not in given]:
        raise InputError(
            f"{len(missing)} of {len(questions)} questions have no {what}, the first of them "
            f"{missing[0]!r}: every question of the data needs one"
        )


def _warn(message: str) -> None:
    warnings.warn(message, BertvisionWarning, stacklevel=3)
