"""Prompts: rows of a source as the tokens that a decoder goes on from."""

from __future__ import annotations

import datetime
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from bertvision.errors import InputError, UnknownNameError, counted
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.writing.columns import as_key
from bertvision.featurestore.writing.growing import GrowingLedger
from bertvision.pipelines.encoders.loading import check_token_ids
from bertvision.pipelines.tasks.chat import (
    CONVERSATION,
    read_messages,
    reads_clock,
    to_be_answered,
)
from bertvision.pipelines.tasks.data import TaskConfig, as_date
from bertvision.pipelines.tasks.tables import read_items
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import Int32Array, Template

log = logging.getLogger(__name__)

PromptTask = Literal["text", "chat"]


class Prompt(NamedTuple):
    """A prompt to continue."""

    key: str
    """Its name: the field ``id`` of its row, else where the row stands."""
    ids: Int32Array
    """(tokens,) vocabulary indices, one at least."""


class _Row(NamedTuple):
    id: str
    given: Any
    """A text, or the messages of a conversation."""


def read_prompts(
    source: str,
    tokenizer: Any,
    *,
    task: PromptTask,
    column: str | None,
    split: str | None,
    longest: int,
    model: PreTrainedModel,
    skip_bad: bool,
    date: str | None = None,
) -> list[Prompt]:
    """Read prompts, and make tokens of them.

    A text gets the special tokens that the tokenizer puts in front of a text, and none behind. A
    conversation goes through the tokenizer's chat template, up to where the assistant answers.

    Args:
        source: Source of texts or conversations (see `tasks.tables`).
        tokenizer: a fast one.
        task: Task of the rows.
        column: Column of the texts.
        split: Split of the source; None where it has one alone.
        longest: tokens that the decoder takes.
        model: Decoder that is to read them.
        date: Date that a chat template is told, as YYYY-MM-DD; None is today.
        skip_bad: Leave out rows that are malformed, and prompts without room for an answer.

    Raises:
        InputError: a row is malformed or too long, or the tokenizer has no chat template.
        UnknownNameError: the source has no such split, or several of which none is named.
    """
    reader = load_task(task)
    splits = reader.splits(source)
    if split is None and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        raise UnknownNameError(f"{source} has {', '.join(splits)}: name one of them with --split")
    if task == "text":
        config = TaskConfig(name=task, text=column, skip_bad=skip_bad)
        rows = [_Row(item.id, item.text) for item in reader.read(source, split, config).items]
    else:
        rows = read_items(source, split, task, _asked, CONVERSATION, skip_bad=skip_bad).items
    tokens = _chat_tokens(tokenizer, date) if task == "chat" else _text_tokens(tokenizer)
    prompts, bad = [], []
    for row in rows:
        try:
            ids = _checked(tokens(row.given), longest)
            check_token_ids(ids, tokenizer, model)
            prompts.append(Prompt(as_key(row.id), ids))
        except InputError as error:
            if not skip_bad:
                hint = ". --skip-bad leaves such prompts out" if len(rows) > 1 else ""
                raise InputError(f"{source}, {row.id}: {error}{hint}") from error
            bad.append(f"{row.id}: {error}")
    if not prompts:
        raise InputError(f"{source}: no prompt is left after skipping {len(bad)}: {bad[0]}")
    if bad:
        log.warning("%s left out: %s", counted(len(bad), "prompt"), bad[0])
    return prompts


def prompt_date(
    given: str | None, tokenizer: Any, task: PromptTask, store: str, tag: str, split: str
) -> str | None:
    """The date that a chat template is told: the same whenever a split is resumed.

    Args:
        given: Date that was asked for, as YYYY-MM-DD.
        tokenizer: Tokenizer with the template.
        task: Kind of the prompts.
        store: Folder or URL of the activation store.
        tag: Tag of the split.
        split: Name of the split, which may have been begun.

    Returns:
        The date given, or else recorded, or else today's; None where nothing reads the clock, and
        for a split that was begun before dates were recorded.

    Raises:
        InputError: a date is given that is none, or that nothing reads.
    """
    if task != "chat" or not reads_clock(tokenizer):
        if given is not None:
            raise InputError(
                f"--date {given}: no chat template reads the clock here, so that no text depends "
                "on the date: leave it out"
            )
        return None
    if given is not None:
        try:
            return as_date(given).isoformat()
        except InputError as error:
            raise InputError(f"--date {given!r}: {error}") from None
    begun = GrowingLedger(open_storage(store), tag, split).state()
    if begun is None:
        return datetime.date.today().isoformat()
    recorded = begun.provenance.get("date")
    return None if recorded is None else str(recorded)


def digest(prompts: Sequence[Prompt]) -> str:
    """Hex sha256 of keys and tokens."""
    made = hashlib.sha256()
    for prompt in prompts:
        key = prompt.key.encode()
        made.update(f"{len(key)} {len(prompt.ids)} ".encode() + key)
        made.update(prompt.ids.astype("<i4").tobytes())
    return made.hexdigest()


def _text_tokens(tokenizer: Any) -> Callable[[str], Int32Array]:
    before = Template.of(tokenizer).before[:, 0]

    def tokens(text: str) -> Int32Array:
        encoded = tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return np.concatenate([before, np.array(encoded["input_ids"], np.int32)])

    return tokens


def _chat_tokens(tokenizer: Any, date: str | None) -> Callable[[Any], Int32Array]:
    return lambda messages: to_be_answered(messages, tokenizer, date)


def _checked(ids: Int32Array, longest: int) -> Int32Array:
    if not len(ids):
        raise InputError("the prompt makes no token: there is nothing to go on from")
    if len(ids) >= longest:
        raise InputError(
            f"the prompt has {len(ids):,} tokens, and the model takes {longest:,} with what it "
            "goes on with: shorten it"
        )
    return ids


def _asked(fields: dict[str, Any], name: str) -> _Row:
    """A conversation, without the answer that its last message may be.

    Raises:
        InputError: it is malformed, or nothing is asked.
    """
    messages = read_messages(fields)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InputError("has nothing but an answer")
    return _Row(name, messages)
