"""Where a system errs: by groups of questions, beside BERT, and in examples one can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertvision.pipelines.analysis.bootstrap import mcnemar
from bertvision.pipelines.analysis.groups import groups_of
from bertvision.pipelines.compare import Metric, metrics_of, per_question
from bertvision.pipelines.files import write_json
from bertvision.pipelines.results import Result, read_results
from bertvision.pipelines.scoring import headline
from bertvision.pipelines.systems import (
    find_system,
    read_frame,
    read_predictions,
    read_system_logits,
    written,
)
from bertvision.pipelines.tasks.decoding import SpanPrediction
from bertvision.pipelines.tasks.squad import Question
from bertvision.pipelines.tasks.squad_metrics import answer_score
from bertvision.pipelines.workspace import Workspace

CELLS = ("both right", "only the system", "only BERT", "none")
"""Of agreement with BERT: which of the two is right."""

_AROUND = 120  # characters of context shown on each side of an answer


class Answers(NamedTuple):
    """A system's answers to the questions of a split, and whether each is right."""

    result: Result
    predictions: Mapping[str, str | bool]
    scores: dict[Metric, list[float]]
    """By metric, per question, in per cent; the last metric is right or wrong."""

    @property
    def right(self) -> list[bool]:
        """Whether the answer is exactly a gold answer, or the yes or no is true."""
        return [score == 100 for score in self.scores[metrics_of(self.result)[-1]]]


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
        workspace: with the system's predictions and logits.
        system: ``NAME[:TRAINED_ON[:CHECKPOINT]]`` of `systems.find_system`.
        trained_on: snapshot the head was trained on, where several are possible.
        checkpoint: snapshot it was scored on, likewise.
        split: what was scored.
        examples: how many to show of each cell of agreement.
        seed: of their choice.

    Returns:
        ``system``; ``groups``, by grouping the scores and number of the questions of each group,
        with BERT's at the same snapshot; ``second``, how often the second most likely answer is
        right where the first is wrong (None for yes or no); ``agreement`` with BERT (None where the
        system is BERT, or BERT was not scored there); ``examples``.

    Raises:
        UnknownNameError: the system was not scored, or several are meant.
        WorkspaceError: predictions or logits are missing, damaged or of other data.
    """
    results = read_results(workspace, split)
    result = find_system(results, system, trained_on=trained_on, checkpoint=checkpoint)
    questions = workspace.questions(split)
    answers = read_answers(result, questions)
    bert = next((r for r in results if _is_its_bert(r, result)), None)
    baseline = None if bert is None else read_answers(bert, questions)
    second = None
    if "accuracy" not in answers.scores:
        second = second_answers(workspace, answers, questions, split)
    found = {
        "system": written(result),
        "name": result.name,
        "trained_on": result.trained_on,
        "checkpoint": result.checkpoint,
        "split": split,
        "questions": len(questions),
        "metrics": list(answers.scores),
        "groups": group_scores(questions, answers, baseline),
        "second": None if second is None else _second_summary(questions, answers, second),
        "agreement": None if baseline is None else agreement(answers.right, baseline.right),
        "examples": _examples(questions, answers, baseline, second, examples, seed),
        "seed": seed,
    }
    write_json(result.folder / "errors.json", found)
    return found


def read_answers(result: Result, questions: Sequence[Question]) -> Answers:
    """Read a system's predictions and score each.

    Raises:
        WorkspaceError: they are missing, damaged or of other data.
    """
    predictions = read_predictions(result, questions)
    scores = {m: per_question(result, predictions, questions, m) for m in metrics_of(result)}
    return Answers(result, predictions, scores)


def group_scores(
    questions: Sequence[Question], answers: Answers, baseline: Answers | None
) -> dict[str, list[dict[str, Any]]]:
    """Mean scores of each group of `groups_of`, in per cent; BERT's with ``bert_`` in front."""
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
            }
            for group, rows in groups.items()
        ]
        for grouping, groups in groups_of(questions).items()
    }


def agreement(right: Sequence[bool], bert_right: Sequence[bool]) -> dict[str, Any]:
    """How often a system and BERT are right together, alone or not at all.

    Returns:
        Number of questions in each of the four cells, and ``p`` of McNemar's exact test: whether
        the two err equally often.
    """
    cells = [_cell(a, b) for a, b in zip(right, bert_right, strict=True)]
    counts = {cell: cells.count(cell) for cell in CELLS}
    return {**counts, "p": mcnemar(counts["only the system"], counts["only BERT"])}


def second_answers(
    workspace: Workspace, answers: Answers, questions: Sequence[Question], split: str
) -> list[str]:
    """What a system would have answered had its answer not been allowed.

    Candidates are the best spans with distinct texts and, where the task has it, no answer, moved
    by the no-answer threshold like the decision itself.

    Raises:
        WorkspaceError: the system's logits are missing, damaged or of other data.
    """
    result = answers.result
    frame = read_frame(workspace, result.checkpoint, split)
    logits = read_system_logits(result.folder / f"{split}.safetensors", frame, result.command)
    decoded = logits.on(frame).decode("n-best")
    threshold = result.rules["n-best"]["threshold"]
    return [_second(decoded[q.id], str(answers.predictions[q.id]), threshold) for q in questions]


def _second(prediction: SpanPrediction, first: str, threshold: float | None) -> str:
    """The best candidate other than ``first``; ``""`` where there is none."""
    ranked = [
        (c.score if c.text else c.score - (threshold or 0.0), c.text)
        for c in prediction.n_best
        if c.text != first and (c.text or threshold is not None)
    ]
    return max(ranked)[1] if ranked else ""


def _second_summary(
    questions: Sequence[Question], answers: Answers, second: Sequence[str]
) -> dict[str, Any]:
    """Where the first answer is wrong: how many questions, and in how many the second is right."""
    wrong = [row for row, right in enumerate(answers.right) if not right]
    found = [row for row in wrong if answer_score(second[row], questions[row]).exact == 1]
    return {
        "first_wrong": len(wrong),
        "second_right": len(found),
        "percent": 100 * len(found) / len(wrong) if wrong else None,
        "second_right_HasAns": sum(bool(questions[row].answers) for row in found),
        "second_right_NoAns": sum(not questions[row].answers for row in found),
    }


def _cell(right: bool, bert_right: bool) -> str:
    return CELLS[(not right) * 2 + (not bert_right)]


def _is_its_bert(candidate: Result, result: Result) -> bool:
    """Whether a result is BERT's at the same snapshot, scored in the same way."""
    return (
        candidate.system == "bert"
        and result.system != "bert"
        and candidate.checkpoint == result.checkpoint
        and headline(candidate.rules).keys() == headline(result.rules).keys()
    )


def _examples(
    questions: Sequence[Question],
    answers: Answers,
    baseline: Answers | None,
    second: Sequence[str] | None,
    count: int,
    seed: int,
) -> list[dict[str, Any]]:
    """A seeded choice of questions from each cell of agreement; without BERT, right and wrong."""
    names = ["right" if right else "wrong" for right in answers.right]
    if baseline is not None:
        names = [_cell(*pair) for pair in zip(answers.right, baseline.right, strict=True)]
    cells: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        cells.setdefault(name, []).append(row)
    random = np.random.default_rng(seed)
    chosen = []
    for cell in [cell for cell in (*CELLS, "right", "wrong") if cell in cells]:
        rows = random.permutation(cells[cell])[:count]
        chosen += [(cell, int(row)) for row in sorted(rows)]
    return [
        {
            "cell": cell,
            "id": questions[row].id,
            "question": questions[row].question,
            "context": _around(questions[row], answers.predictions[questions[row].id]),
            "gold": _gold(questions[row], answers),
            "answer": answers.predictions[questions[row].id],
            **({} if second is None else {"second": second[row]}),
            "bert": None if baseline is None else baseline.predictions[questions[row].id],
            "score": answers.scores[metrics_of(answers.result)[0]][row],
        }
        for cell, row in chosen
    ]


def _gold(question: Question, answers: Answers) -> list[str] | bool:
    if "accuracy" in answers.scores:
        return not question.is_impossible
    return list(dict.fromkeys(answer.text for answer in question.answers))


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
