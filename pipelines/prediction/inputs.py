"""What is asked: texts, pairs, and questions with their contexts, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertvision.errors import InputError
from bertvision.pipelines.tasks.sentences.rows import MAX_CHARACTERS

if TYPE_CHECKING:
    pass


def zipped(
    question: str | Sequence[str] | None, context: str | Sequence[str] | None
) -> dict[str, str] | list[dict[str, str]]:
    """Questions with their contexts, as dicts.

    Raises:
        InputError: One of the two is missing, or their numbers differ.
    """
    if question is None or context is None:
        raise InputError("give a question and a context: one of the two is missing")
    if isinstance(question, str) and isinstance(context, str):
        return {"question": question, "context": context}
    questions = [question] if isinstance(question, str) else list(question)
    contexts = [context] * len(questions) if isinstance(context, str) else list(context)
    if len(questions) != len(contexts):
        raise InputError(
            f"{len(questions)} questions and {len(contexts)} contexts: give one context for each "
            "question, or one for all"
        )
    return [{"question": q, "context": c} for q, c in zip(questions, contexts, strict=True)]


def checked_text(text: object, name: str, *, strip: bool) -> str:
    """A text that can be answered.

    Raises:
        InputError: It is no text, empty, or longer than any that is taken.
    """
    if not isinstance(text, str):
        raise InputError(f"the {name} {text!r} is no text")
    text = text.strip() if strip else text
    if not text.strip():
        raise InputError(f"the {name} is empty")
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"the {name} has {len(text):,} characters, but at most {MAX_CHARACTERS:,} are taken"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the {name} has the lone surrogate {text[error.start]!r} at character "
            f"{error.start}, which is no Unicode text"
        ) from error
    return text
