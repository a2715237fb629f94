"""Where a system errs: by groups of items, beside BERT, and in examples one can read.

Groups of items that an error analysis sets side by side: by answer or class, length, wording.

Lengths are counted in words, what stands between white space, so that they do not depend on a
tokenizer.

What a system would have answered instead: the second most likely span of each question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NotRequired, Self, TypeVar

import numpy as np
from pydantic import model_validator
from typing_extensions import TypedDict

from bertvision.errors import InputError
from bertvision.pipelines.records import Record, write_record
from bertvision.pipelines.results.answers import (
    Answers,
    Confusion,
    ConfusionMatrix,
    confusion_matrix,
    confusions,
    gold_of,
    read_answers,
)
from bertvision.pipelines.results.columns import grouped
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.systems import find_system, label, read_windows
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.scores import headline, kind_of_metrics
from bertvision.pipelines.tasks.squad.decoding import SpanPrediction, decode
from bertvision.pipelines.tasks.squad.metrics import answer_score
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.workspace.config import Tag
from bertvision.pipelines.workspace.workspace import Workspace

_Item = TypeVar("_Item")

_ASKS = re.compile(r"\b(what|whom|whose|who|when|where|which|why|how(?: (?:many|much))?)\b", re.I)
_ALIKE = {"whom": "who", "whose": "who", "how many": "how many/much", "how much": "how many/much"}
_WORDS = ["what", "who", "when", "where", "which", "why", "how", "how many/much", "other"]


MOST_CLASSES = 20
"""Groups by class that can be looked at side by side."""


def question_word(question: str) -> str:
    """First question word of a question, or ``other``.

    ``In what year`` is ``what``; ``whom`` and ``whose`` count as ``who``.
    """
    match = _ASKS.search(" ".join(question.split()))
    word = match[0].lower() if match else "other"
    return _ALIKE.get(word, word)


def length_range(words: int, starts: Sequence[int]) -> str:
    """The range of lengths that ``words`` lies in, as text: ``3-4``, ``9 or more``.

    Args:
        words: Number of words, at least the first of ``starts``.
        starts: first length of each range, ascending.
    """
    first = max(start for start in starts if start <= words)
    after = [start for start in starts if start > words]
    if not after:
        return f"{first} or more"
    return str(first) if after[0] == first + 1 else f"{first}-{after[0] - 1}"


def groups_of(questions: Sequence[Question]) -> dict[str, dict[str, list[int]]]:
    """Rows of the questions in each group, by grouping; groups in reading order, none empty.

    Groupings: ``answer`` (HasAns, NoAns), ``answer length`` (words of the first gold answer, where
    there is one), ``context length`` (words) and ``question word``.
    """
    answers, contexts = (1, 2, 3, 5, 9), (0, 100, 150, 200, 300)
    ranges = [length_range(n, answers) for n in answers]
    return {
        "answer": _group(questions, lambda q: "HasAns" if q.answers else "NoAns", ["HasAns"]),
        "answer length (words)": _group(
            [q if q.answers else None for q in questions],
            lambda q: length_range(max(1, len(q.answers[0].text.split())), answers),
            ranges,
        ),
        "context length (words)": _group(
            questions,
            lambda q: length_range(len(q.context.split()), contexts),
            [length_range(n, contexts) for n in contexts],
        ),
        "question word": _group(questions, lambda q: question_word(q.question), _WORDS),
    }


def groups_of_sentences(
    sentences: Sequence[Sentence], classes: Sequence[str]
) -> dict[str, dict[str, list[int]]]:
    """Rows of the sentences in each group, by grouping; groups in reading order, none empty.

    Groupings: ``class`` (the gold one, where there are at most `MOST_CLASSES`) and ``length``
    (words, of a pair those of both).
    """
    lengths = (0, 6, 11, 21, 41)
    groups = {
        "length (words)": _group(
            sentences,
            lambda s: length_range(len(f"{s.text} {s.pair or ''}".split()), lengths),
            [length_range(n, lengths) for n in lengths],
        )
    }
    if len(classes) > MOST_CLASSES:
        return groups
    return {"class": _group(sentences, lambda s: classes[int(s.label or 0)], classes), **groups}


def _group(
    items: Sequence[_Item | None], name: Callable[[_Item], str], order: Sequence[str]
) -> dict[str, list[int]]:
    rows_by_group: dict[str, list[int]] = {group: [] for group in order}
    for row, item in enumerate(items):
        if item is not None:
            rows_by_group.setdefault(name(item), []).append(row)
    return {group: rows for group, rows in rows_by_group.items() if rows}


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test: do two systems err equally often?

    Of the questions that only one of them gets right, each is as likely to be the first's as the
    second's if they are equally good (McNemar 1947, Psychometrika 12; exact binomial form).

    Args:
        only_first: questions that the first alone gets right.
        only_second: questions that the second alone gets right.
    """
    n, few = only_first + only_second, min(only_first, only_second)
    ways, tail = 1, 1
    for k in range(1, few + 1):
        ways = ways * (n - k + 1) // k  # n over k, exactly
        tail += ways
    return float(min(1.0, 2 * tail / (1 << n)))


def second_answers(
    workspace: Workspace, answers: Answers, questions: Sequence[Question], split: str
) -> list[str]:
    """Second answers: those a system would have given had its answer not been allowed.

    Candidates are the best spans with distinct texts and, where the task has it, no answer, moved
    by the no-answer threshold like the decision itself.

    Raises:
        WorkspaceError: the system's logits are missing, damaged or of other data.
    """
    result = answers.result
    windows = read_windows(workspace, result.checkpoint, split)
    path = result.folder / f"{split}.safetensors"
    decoded = decode(Logits.load(path, windows, result.command, result.sha256.get(path.name)))
    threshold = result.rules["n-best"]["threshold"]
    return [_second(decoded[q.id], str(answers.predictions[q.id]), threshold) for q in questions]


def second_summary(
    questions: Sequence[Question], answers: Answers, second: Sequence[str]
) -> dict[str, Any]:
    """Where the first answer is wrong: how many questions, and in how many the second is right."""
    wrong = [row for row, right in enumerate(answers.right) if not right]
    rows = [row for row in wrong if answer_score(second[row], questions[row]).exact == 1]
    return {
        "first_wrong": len(wrong),
        "second_right": len(rows),
        "percent": 100 * len(rows) / len(wrong) if wrong else None,
        "first_wrong_HasAns": sum(bool(questions[row].answers) for row in wrong),
        "first_wrong_NoAns": sum(not questions[row].answers for row in wrong),
        "second_right_HasAns": sum(bool(questions[row].answers) for row in rows),
        "second_right_NoAns": sum(not questions[row].answers for row in rows),
    }


def _second(prediction: SpanPrediction, first: str, threshold: float | None) -> str:
    """The best candidate other than ``first``; ``""`` where there is none."""
    ranked = [
        (c.score if c.text else c.score - (threshold or 0.0), c.text)
        for c in prediction.n_best
        if c.text != first and (c.text or threshold is not None)
    ]
    return max(ranked)[1] if ranked else ""


CELLS = ("both right", "only the system", "only BERT", "none")
"""Cells of the agreement with BERT: who of the two is right."""

Group = dict[str, str | int | float]
"""Its name as ``group``, the number of its items as ``n``, and its mean scores."""


class Example(TypedDict):
    """An item to read, with what was answered: a text, yes or no, or a class."""

    cell: str
    id: str
    question: str
    context: str
    gold: Any
    answer: Any
    second: NotRequired[str]
    bert: Any
    score: float


class ErrorAnalysis(Record):
    """``errors.json``: what `errors` returns."""

    system: str
    name: str
    trained_on: Tag
    checkpoint: Tag
    split: str
    questions: int
    metrics: list[str]
    groups: dict[str, list[Group]]
    second: dict[str, int | float | None] | None
    confusions: list[Confusion] | None
    confusion_matrix: ConfusionMatrix | None = None
    """A file of an earlier version has none."""
    agreement: dict[str, int | float] | None
    examples: list[Example]
    seed: int

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Self:
        for group in chain.from_iterable(self.groups.values()):
            for key in ("group", "n", *self.metrics):
                if isinstance(group.get(key), str | None) != (key == "group" and key in group):
                    raise ValueError(f"{key} of a group is {group.get(key)!r}")
        if self.agreement and (lacking := set(CELLS) - self.agreement.keys()):
            raise ValueError(f"agreement lacks {sorted(lacking)[0]!r}")
        return self


_AROUND = 120  # characters of context shown on each side of an answer


def errors(
    workspace: Workspace,
    system: str,
    *,
    trained_on: str | None = None,
    checkpoint: str | None = None,
    split: str = "dev",
    examples: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """Analyse the errors of one system, and keep it as ``errors.json`` beside its metrics.

    Args:
        workspace: Workspace with the system's predictions and logits.
        system: ``NAME[:TRAINED_ON[:CHECKPOINT]]`` of `systems.find_system`.
        trained_on: snapshot the head was trained on, where several are possible.
        checkpoint: snapshot it was scored on, likewise.
        split: Split that was scored.
        examples: Number of examples of each cell of agreement.
        seed: Seed of their choice.

    Returns:
        ``system``; ``groups``, by grouping the scores and number of the items of each group, with
        BERT's at the same snapshot; ``second``, how often the second most likely answer is right
        where the first is wrong (None where there are no answers but classes); ``confusions``, the
        most frequent ones, and ``confusion_matrix``, all of them (None where the classes have no
        names); ``agreement`` with BERT (None
        where the system is BERT, or BERT was not scored there); ``examples``.

    Raises:
        UnknownNameError: the system was not scored, or several are meant.
        InputError: it predicts scores, or what is right in parts, neither right nor wrong.
        WorkspaceError: predictions or logits are missing, damaged or of other data.
    """
    results = read_results(workspace, split)
    result = find_system(results, system, trained_on=trained_on, checkpoint=checkpoint, split=split)
    if "pearson" in headline(result.rules):
        raise InputError(
            f"{label(result)} predicts scores, which are near or far but neither right nor "
            "wrong: `bertvision compare` sets two systems side by side"
        )
    data = workspace.dataset()
    if data.task.ratios:
        raise InputError(
            f"the answers of {data.task.name} are right in parts, not right or wrong: "
            "bertvision.predictions shows in Python what each item scores, `bertvision compare` "
            "sets two systems side by side"
        )
    items = workspace.items(split)
    answers = read_answers(result, items)
    bert = next((r for r in results if _is_its_bert(r, result)), None)
    baseline = None if bert is None else read_answers(bert, items)
    spans = kind_of_metrics(answers.scores) == "span"
    second = second_answers(workspace, answers, items, split) if spans else None
    sentences = bool(data.classes)
    groups = groups_of_sentences(items, data.classes) if sentences else groups_of(items)
    analysis = ErrorAnalysis(
        system=label(result),
        name=result.name,
        trained_on=result.trained_on,
        checkpoint=result.checkpoint,
        split=split,
        questions=len(items),
        metrics=list(answers.scores),
        groups=group_scores(groups, answers, baseline, _trivial(items, spans=spans)),
        second=None if second is None else second_summary(items, answers, second),
        confusions=confusions(items, answers, data.classes) if sentences else None,
        confusion_matrix=confusion_matrix(items, answers, data.classes) if sentences else None,
        agreement=None if baseline is None else agreement(answers.right, baseline.right),
        examples=_examples(items, answers, baseline, second, data.classes, examples, seed),
        seed=seed,
    )
    write_record(result.folder / "errors.json", analysis)
    return analysis.to_json()


def group_scores(
    groups: Mapping[str, Mapping[str, Sequence[int]]],
    answers: Answers,
    baseline: Answers | None,
    trivial: Sequence[bool],
) -> dict[str, list[Group]]:
    """Mean scores of each group, in per cent; BERT's with ``bert_`` in front.

    Args:
        groups: Items of each group, by grouping and name.
        answers: Answers of the system.
        baseline: BERT's.
        trivial: Whether never answering, or the largest class, is right on each item; its score is
            ``trivial`` of a group.
    """
    sides = [("", answers), *([] if baseline is None else [("bert_", baseline)])]
    return {
        grouping: [
            {
                "group": group,
                "n": len(rows),
                **{
                    f"{prefix}{metric}": float(np.mean([scores[row] for row in rows]))
                    for prefix, side in sides
                    for metric, scores in side.scores.items()
                },
                "trivial": 100 * float(np.mean([trivial[row] for row in rows])),
            }
            for group, rows in rows_by_group.items()
        ]
        for grouping, rows_by_group in groups.items()
    }


def _trivial(items: Sequence[Any], *, spans: bool) -> list[bool]:
    """Whether a system that learned nothing is right on each item (see `trivial_metrics`)."""
    if spans:
        return [not item.answers for item in items]
    gold = [gold_of(item) for item in items]
    commonest = Counter(gold).most_common(1)[0][0]
    return [label == commonest for label in gold]


def agreement(right: Sequence[bool], bert_right: Sequence[bool]) -> dict[str, int | float]:
    """How often a system and BERT are right together, alone or not at all.

    Returns:
        Number of questions in each of the four cells, and ``p`` of McNemar's exact test: whether
        the two err equally often.
    """
    cells = [_cell(a, b) for a, b in zip(right, bert_right, strict=True)]
    counts = {cell: cells.count(cell) for cell in CELLS}
    return {**counts, "p": mcnemar(counts["only the system"], counts["only BERT"])}


def _cell(right: bool, bert_right: bool) -> str:
    return CELLS[(not right) * 2 + (not bert_right)]


def _is_its_bert(candidate: Result, result: Result) -> bool:
    """Whether a result is BERT's at the same snapshot, scored in the same way."""
    return (
        candidate.system == "bert"
        and result.system != "bert"
        and candidate.checkpoint == result.checkpoint
        and kind_of_metrics(headline(candidate.rules)) == kind_of_metrics(headline(result.rules))
        and candidate.untuned == result.untuned
    )


def _examples(
    items: Sequence[Any],
    answers: Answers,
    baseline: Answers | None,
    second: Sequence[str] | None,
    classes: Sequence[str],
    count: int,
    seed: int,
) -> list[Example]:
    """A seeded choice of items from each cell of agreement; without BERT, right and wrong."""
    names = ["right" if right else "wrong" for right in answers.right]
    if baseline is not None:
        names = [_cell(*pair) for pair in zip(answers.right, baseline.right, strict=True)]
    cells = grouped(range(len(names)), lambda row: names[row])
    random = np.random.default_rng(seed)
    chosen = []
    for cell in [cell for cell in (*CELLS, "right", "wrong") if cell in cells]:
        rows = random.permutation(cells[cell])[:count]
        chosen += [(cell, items[row], int(row)) for row in sorted(rows)]

    def named(answer: Any) -> Any:
        return classes[answer] if classes else answer

    examples = []
    for cell, item, row in chosen:
        answer = answers.predictions[item.id]
        example = Example(
            cell=cell,
            id=item.id,
            question=item.text if classes else item.question,
            context=(item.pair or "") if classes else _around(item, answer),
            gold=named(_gold(item, answers)),
            answer=named(answer),
            bert=None if baseline is None else named(baseline.predictions[item.id]),
            score=next(iter(answers.scores.values()))[row],
        )
        if second is not None:
            example["second"] = second[row]
        examples.append(example)
    return examples


def _gold(item: Any, answers: Answers) -> Any:
    if kind_of_metrics(answers.scores) == "span":
        return list(dict.fromkeys(answer.text for answer in item.answers))
    return gold_of(item)


def _around(question: Question, answer: str | bool) -> str:
    """The context around the gold answer, in brackets; without one, around what was answered."""
    context, begin, length = question.context, 0, 0
    if question.answers:
        begin, length = question.answers[0].answer_start, len(question.answers[0].text)
    elif isinstance(answer, str) and answer in context:
        begin = context.index(answer)
    left, right = max(0, begin - _AROUND), min(len(context), begin + length + _AROUND)
    middle = f"[{context[begin : begin + length]}]" if length else context[begin : begin + length]
    text = context[left:begin] + middle + context[begin + length : right]
    return ("… " if left else "") + " ".join(text.split()) + (" …" if right < len(context) else "")
