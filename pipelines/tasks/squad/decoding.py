"""From start and end logits to answers: spans, their score against no answer, a threshold.

Two rules say which spans of a window are candidates:

- ``n-best``: every span that begins and ends on context tokens, with end ≥ start and at most
  `max_answer_length` tokens; a span's score is start logit + end logit. The rule of Devlin et al.
  2019 (arXiv:1810.04805, section 4.3) and run_squad.py of google-research/bert, without the
  latter's shortcut of combining only the 20 best starts and ends.
- ``argmax``: the one span from the highest start to the highest end, each taken by itself over all
  tokens of the window. If the end lies before the start, or either is at [CLS] or otherwise outside
  the context, the window has no answer. No limit of length.

Over the windows of a question the best span is the highest-scoring candidate of any window, and the
null score, of no answer, is the *lowest* start + end logit at [CLS] of any window: a question has
an answer if one of its windows is sure of it (run_squad.py: ``score_null = min(…)``). The rule's
decision is then `apply_threshold` at 0.0. For ``argmax`` this is exact: a candidate is by its
construction at least as high as [CLS] in its window, hence as the null score, so that it is always
kept; and a question without any candidate has the text ``""`` at every threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from bertvision.errors import InputError
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.squad.metrics import answer_score
from bertvision.pipelines.tasks.squad.read import Question

NO_SPAN = float(np.finfo(np.float32).min)
"""The score of a question without any candidate span; finite, so that it can be written as JSON."""

_Int = npt.NDArray[np.integer]


class Candidate(NamedTuple):
    """One possible answer to a question."""

    text: str
    """The part of the context; ``""`` for no answer."""
    score: float
    """Start logit + end logit."""
    probability: float
    """Softmax of the score over the candidates kept, no answer among them."""
    start: int | None = None
    """Its first character in the context; None for no answer."""


class SpanPrediction(NamedTuple):
    """Prediction for one question, before a threshold decides whether to answer."""

    text: str
    """The best span's text; ``""`` if there is no candidate."""
    score: float
    """Its score, or `NO_SPAN`."""
    null_score: float
    """The score of no answer."""
    n_best: tuple[Candidate, ...]
    """The candidates with distinct texts and no answer, the highest score first."""

    @property
    def na_score(self) -> float:
        """How much no answer is preferred: null score − score, in logits."""
        return self.null_score - self.score


def decode(
    logits: Logits,
    *,
    rule: Literal["n-best", "argmax"] = "n-best",
    n_best: int = 20,
    max_answer_length: int = 30,
) -> dict[str, SpanPrediction]:
    """Decode the logits of a split's windows (see the module for the rules).

    Args:
        logits: Logits of spans. The context's tokens are consecutive in a window.
        rule: Rule of which spans are candidates.
        n_best: Number of candidates to keep per question, besides no answer.
        max_answer_length: most tokens of a span, for the rule ``n-best``.

    Returns:
        A prediction for every question that has a window, by question id.

    Raises:
        InputError: the arrays do not belong together, a logit is not finite, or an option is out of
            range.
    """
    if rule not in ("n-best", "argmax"):
        raise InputError(f"{rule!r} is no decoding rule: choose n-best or argmax")
    if n_best < 1 or max_answer_length < 1:
        raise InputError(
            f"n_best is {n_best} and max_answer_length {max_answer_length}: both must be at least 1"
        )
    # Float64, so that sums of the lowest float32 logits do not overflow
    start, end = (np.asarray(logits.arrays[f"{at}_logits"], np.float64) for at in ("start", "end"))
    windows, questions = logits.windows, logits.windows.items
    offset_mapping = windows.offset_mapping
    if offset_mapping is None:
        offset_mapping = np.empty((0, 2), np.int32)
    ends = np.cumsum(windows.n_tokens, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if not len(start) == len(end) == len(offset_mapping) == total:
        raise InputError(
            f"{len(start)} start logits, {len(end)} end logits and {len(offset_mapping)} offsets "
            f"do not belong to windows of {total} tokens together"
        )
    if not (np.isfinite(start).all() and np.isfinite(end).all()):
        raise InputError("the logits hold NaN or infinity: the model that made them has diverged")

    spans: dict[int, dict[str, tuple[float, int]]] = {}  # question → text → best score, its start
    null: dict[int, float] = {}
    rows = (windows.item_index.tolist(), (ends - windows.n_tokens).tolist(), ends.tolist())
    for question, first, last in zip(*rows, strict=True):
        s, e, offsets = start[first:last], end[first:last], offset_mapping[first:last]
        null[question] = min(null.get(question, np.inf), float(s[0] + e[0]))
        if rule == "n-best":
            begins, finishes, scores = _best_spans(s, e, offsets, n_best, max_answer_length)
        else:
            begins, finishes, scores = _argmax_span(s, e, offsets)
        context, best = questions[question].context, spans.setdefault(question, {})
        for b, f, score in zip(
            offsets[begins, 0].tolist(), offsets[finishes, 1].tolist(), scores.tolist(), strict=True
        ):
            text = context[b:f]
            if text not in best or score > best[text][0]:
                best[text] = score, b
    return {
        questions[i].id: _prediction(candidates, null[i], n_best) for i, candidates in spans.items()
    }


_Spans = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]


def _best_spans(
    start: npt.NDArray[np.float64],
    end: npt.NDArray[np.float64],
    offsets: _Int,
    n_best: int,
    max_length: int,
) -> _Spans:
    """The n best valid spans of a window: first token, last token, score; best first."""
    tokens = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(tokens):
        return tokens, tokens, np.empty(0)
    first, last = tokens[0], tokens[-1] + 1
    width = min(max_length, len(tokens))
    ends = np.concatenate([end[first:last], np.full(width - 1, -np.inf)])
    # (context tokens, width): the span of i + 1 .. i + width tokens from each start on
    scores = (start[first:last, None] + sliding_window_view(ends, width)).ravel()
    top = np.arange(len(scores))
    if len(scores) > n_best:
        top = np.sort(np.argpartition(scores, -n_best)[-n_best:])
    top = top[scores[top] > -np.inf]
    top = top[np.argsort(-scores[top], kind="stable")]
    begin = first + top // width
    return begin, begin + top % width, scores[top]


def _argmax_span(
    start: npt.NDArray[np.float64], end: npt.NDArray[np.float64], offsets: _Int
) -> _Spans:
    """The span from the highest start to the highest end of a window, if it is one."""
    s, e = np.argmax(start), np.argmax(end)
    valid = offsets[s, 0] >= 0 and offsets[e, 0] >= 0 and s <= e
    span = np.array([[s, e]])[: int(valid)]
    return span[:, 0], span[:, 1], start[span[:, 0]] + end[span[:, 1]]


def _prediction(
    candidates: dict[str, tuple[float, int]], null_score: float, n_best: int
) -> SpanPrediction:
    spans = sorted(
        ((text, score, start) for text, (score, start) in candidates.items()),
        key=lambda span: -span[1],
    )[:n_best]
    entries = sorted([*spans, ("", null_score, None)], key=lambda entry: -entry[1])
    weights = np.exp(np.array([score for _, score, _ in entries]) - entries[0][1])
    probabilities = (weights / weights.sum()).tolist()
    ranked = tuple(
        Candidate(text, score, probability, start)
        for (text, score, start), probability in zip(entries, probabilities, strict=True)
    )
    text, score = spans[0][:2] if spans else ("", NO_SPAN)
    return SpanPrediction(text, score, null_score, ranked)


def apply_threshold(
    predictions: Mapping[str, SpanPrediction], threshold: float | None
) -> dict[str, str]:
    """Answer texts in the official form: ``""`` where `na_score` is above the threshold.

    Args:
        predictions: Predictions by question id.
        threshold: Threshold in logits; None never abstains.
    """
    return {
        question_id: "" if threshold is not None and p.na_score > threshold else p.text
        for question_id, p in predictions.items()
    }


def tune_threshold(
    predictions: Mapping[str, SpanPrediction], questions: Sequence[Question]
) -> float | None:
    """The threshold with the highest F1 on these questions (take a part of the training data).

    Every threshold that makes a difference is tried, from abstaining everywhere to answering
    everywhere; of equally good ones the lowest is taken.

    Args:
        predictions: Predictions by question id, one for each of the questions.
        questions: the part to tune on.

    Returns:
        The threshold for `apply_threshold`; None, never abstain, when no question of the part is
        unanswerable.

    Raises:
        InputError: a question has no prediction.
    """
    if all(q.answers for q in questions):
        return None
    if missing := [q.id for q in questions if q.id not in predictions]:
        raise InputError(
            f"cannot tune a threshold: {len(missing)} of {len(questions)} questions have no "
            f"prediction, the first of them {missing[0]!r}"
        )
    na_scores = np.array([predictions[q.id].na_score for q in questions])
    # What answering a question instead of abstaining adds to the F1
    gains = np.array(
        [answer_score(predictions[q.id].text, q).f1 - answer_score("", q).f1 for q in questions]
    )
    thresholds, group = np.unique(na_scores, return_inverse=True)
    totals = np.concatenate([[0.0], np.cumsum(np.bincount(group, weights=gains))])
    best = int(np.argmax(totals))
    return float(thresholds[best - 1] if best else np.nextafter(thresholds[0], -np.inf))
