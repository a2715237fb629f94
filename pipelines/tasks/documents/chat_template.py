"""A conversation as tokens, through the tokenizer's own chat template, and whose tokens they are.

A template may mark what the assistant says with ``{% generation %}``: transformers then gives the
mask. Of one without it the mask is found by difference: a turn of the assistant is what the text up
to and with it has more than the text up to it, which ends with the prompt to answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2.exceptions import TemplateError

from bertvision.errors import InputError
from bertvision.pipelines.tasks.windows import Int32Array

_MARKS = re.compile(r"\{%-?\s*generation\b")
_Messages = Sequence[Mapping[str, Any]]


class Tokens(NamedTuple):
    """A text as an encoder takes it, and what of it is learned."""

    ids: Int32Array
    """(tokens,) vocabulary indices."""
    loss_mask: npt.NDArray[np.uint8]
    """(tokens,) 1 of what the assistant says, or of the completion."""


def conversation(messages: _Messages, tokenizer: Any) -> Tokens:
    """The tokens of a conversation.

    Args:
        messages: with ``role`` and ``content``; a turn of the role ``assistant`` is learned.
        tokenizer: a fast one, with a chat template.

    Raises:
        InputError: it has no chat template, the template refuses the messages, or a text up to a
            turn is not how the text of all turns begins.
    """
    if _MARKS.search(_template(tokenizer, "give prompt and completion")):
        found = _templated(
            messages, tokenizer, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Tokens(
            np.array(found["input_ids"], np.int32), np.array(found["assistant_masks"], np.uint8)
        )
    text = _templated(messages, tokenizer, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise InputError(
                "message 0 is the assistant's, and the chat template has no {% generation %}: what "
                "is said cannot be told from what stands before it; begin with another role"
            )
        before = _templated(messages[:i], tokenizer, tokenize=False, add_generation_prompt=True)
        through = _templated(messages[: i + 1], tokenizer, tokenize=False)
        if not through.startswith(before) or not text.startswith(through):
            raise InputError(
                f"the chat template of {tokenizer.name_or_path!r} has no {{% generation %}}, and "
                f"writes what stands before message {i} in another way when more follows: what the "
                "assistant says cannot be told from the rest; give prompt and completion"
            )
        spans.append((len(before), len(through)))
    return _masked(text, spans, tokenizer, special=False)


def to_be_answered(messages: _Messages, tokenizer: Any) -> Int32Array:
    """The tokens of a conversation that the assistant is to go on with, (tokens,).

    Args:
        messages: with ``role`` and ``content``.
        tokenizer: a fast one, with a chat template.

    Raises:
        InputError: it has no chat template, or the template refuses the messages.
    """
    _template(tokenizer, "give plain texts as prompts, without a template")
    text = _templated(messages, tokenizer, tokenize=False, add_generation_prompt=True)
    return _masked(text, (), tokenizer, special=False).ids


def continued(prompt: str, completion: str, tokenizer: Any) -> Tokens:
    """The tokens of a prompt and its completion, with the tokenizer's special tokens around both.

    A token that stands for the end of the one and the beginning of the other is the completion's.

    Args:
        prompt: what comes first.
        completion: what is learned.
        tokenizer: a fast one.
    """
    text = prompt + completion
    return _masked(text, [(len(prompt), len(text))], tokenizer, special=True)


def _template(tokenizer: Any, instead: str) -> str:
    """A tokenizer's chat template; ``instead`` says what can be done without one."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template: take one of a "
            f"model that was tuned on conversations, or {instead}"
        ) from error


def _templated(messages: _Messages, tokenizer: Any, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} does not take these messages: "
            f"{str(error).strip() or type(error).__name__}"
        ) from error


def _masked(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Any, *, special: bool
) -> Tokens:
    """The tokens of a text, and which of them stand for characters of the spans [begin, end)."""
    encoded = tokenizer(
        text,
        add_special_tokens=special,
        split_special_tokens=special,  # those that a template writes are meant
        return_offsets_mapping=True,
        verbose=False,
    )
    begins, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    mask = np.zeros(len(begins), bool)
    for begin, end in spans:
        mask |= (begins < end) & (ends > begin) & (begins < ends)
    return Tokens(np.array(encoded["input_ids"], np.int32), mask.astype(np.uint8))
