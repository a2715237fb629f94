"""Splits of a workspace: their questions, windows, and the names they are stored under."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bertvision.pipelines.config import FinetuneConfig, TaskConfig
from bertvision.pipelines.tasks.registry import Tokens

if TYPE_CHECKING:
    from bertvision.pipelines.tasks.squad import Question
    from bertvision.pipelines.tasks.windows import Windows


def windows_of(questions: list[Question], tokenizer: Any, task: TaskConfig) -> Windows:
    """Make windows with the lengths of a task."""
    from bertvision.pipelines.tasks.windows import make_windows

    return make_windows(
        questions,
        tokenizer,
        max_length=task.max_length,
        max_question_length=task.max_question_length,
        overlap=task.overlap,
    )


def source_split(split: str) -> str:
    """The split of the source from which a split of the workspace is taken."""
    return "train" if split == "tune" else split


def stored_split(split: str, tokens: Tokens) -> str:
    """The name of a stored split: ``train`` holds all tokens, ``train-cls`` the [CLS] alone."""
    return f"{split}-cls" if tokens == "cls" else split


def parse_stored_split(name: str) -> tuple[str, Tokens]:
    """The split of the workspace, and which tokens of it are stored: ``stored_split`` undone."""
    split = name.removesuffix("-cls")
    return split, "all" if split == name else "cls"


def select_questions(
    questions: list[Question], split: str, task: TaskConfig, finetune: FinetuneConfig
) -> list[Question]:
    """The questions of a split, out of all questions of its source, in their order.

    ``train`` and ``tune`` part the training questions (or the subset of them that
    ``train_questions`` asks for) by whole contexts.
    """
    from bertvision.pipelines.tasks.squad import hold_out

    if task.answerable_only:
        questions = [question for question in questions if not question.is_impossible]
    if split not in ("train", "tune"):
        return questions
    if finetune.train_questions is not None:
        questions = _subset(questions, finetune.train_questions, seed=finetune.seed)
    if task.tune_fraction == 0:
        return questions if split == "train" else []
    kept, held_out = hold_out(questions, task.tune_fraction, seed=finetune.seed)
    return kept if split == "train" else held_out


def _subset(questions: list[Question], limit: int, *, seed: int) -> list[Question]:
    """At most ``limit`` questions: whole contexts in a seeded order, as many as fit."""
    by_context: dict[str, int] = {}
    for question in questions:
        by_context[question.context] = by_context.get(question.context, 0) + 1
    contexts = list(by_context)
    chosen: set[str] = set()
    count = 0
    for index in np.random.default_rng([seed, 1]).permutation(len(contexts)):
        context = contexts[int(index)]
        if count + by_context[context] <= limit:
            chosen.add(context)
            count += by_context[context]
    return [question for question in questions if question.context in chosen]
