"""What a system would have answered instead: the second most likely span of each question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertvision.pipelines.results.answers import Answers
from bertvision.pipelines.results.systems import read_windows
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.squad.decoding import SpanPrediction, decode
from bertvision.pipelines.tasks.squad.metrics import answer_score
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.workspace.workspace import Workspace


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
    found = [row for row in wrong if answer_score(second[row], questions[row]).exact == 1]
    return {
        "first_wrong": len(wrong),
        "second_right": len(found),
        "percent": 100 * len(found) / len(wrong) if wrong else None,
        "first_wrong_HasAns": sum(bool(questions[row].answers) for row in wrong),
        "first_wrong_NoAns": sum(not questions[row].answers for row in wrong),
        "second_right_HasAns": sum(bool(questions[row].answers) for row in found),
        "second_right_NoAns": sum(not questions[row].answers for row in found),
    }


def _second(prediction: SpanPrediction, first: str, threshold: float | None) -> str:
    """The best candidate other than ``first``; ``""`` where there is none."""
    ranked = [
        (c.score if c.text else c.score - (threshold or 0.0), c.text)
        for c in prediction.n_best
        if c.text != first and (c.text or threshold is not None)
    ]
    return max(ranked)[1] if ranked else ""
