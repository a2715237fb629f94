"""Conversations as data for extraction: ``--task chat --data FILE``, with a loss mask of tokens.

A row has ``messages``, a list of ``{"role": …, "content": …}`` that the tokenizer's own chat
template makes a text of; or ``prompt`` and ``completion``, two strings that follow one another. The
store keeps ``loss_mask`` beside each token: 1 of what the assistant says, or of the completion,
else 0.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import date
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.documents.chat_template import (
    Tokens,
    continued,
    conversation,
    reads_clock,
)
from bertvision.pipelines.tasks.documents.rows import (
    find_rows,
    offered_splits,
    read_items,
    text_field,
)
from bertvision.pipelines.tasks.features import FeaturesTask
from bertvision.pipelines.tasks.special_tokens import require_fast
from bertvision.pipelines.tasks.windows import Windows

log = logging.getLogger(__name__)


class Chat(NamedTuple):
    """A conversation, or a prompt with its completion."""

    id: str
    messages: str | None
    """Those of a conversation, as JSON; None of a prompt."""
    prompt: str | None = None
    completion: str | None = None

    @property
    def text(self) -> str:
        """What tells it from others."""
        return self.messages or f"{self.prompt}{self.completion}"


class ChatTask(FeaturesTask):
    """Conversations: a model is looked at alone."""

    words = ("conversations", "conversations")

    def splits(self, source: str) -> tuple[str, ...]:
        """Those that a folder or a data set holds; ``all`` of a file.

        Raises:
            InputError: it is nothing of this kind.
        """
        return offered_splits(source, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read the conversations of a split.

        Raises:
            InputError: it is missing or malformed; names file, line and field.
        """
        path, columns = (
            find_rows(source, split, self.name),
            (["messages"], ["prompt", "completion"]),
        )
        return read_items(source, split, path, columns, _parsed, skip_bad=config.skip_bad)

    def check_data(self, items: Sequence[Any], source: str) -> NoReturn:
        """Refuse to be trained on.

        Raises:
            InputError: always.
        """
        self._refuse()

    def windows(self, items: Sequence[Chat], tokenizer: Any, config: TaskConfig) -> Windows:
        """A window for each, with the token field ``loss_mask``; says how many are cut off.

        Raises:
            InputError: the tokenizer has no chat template, or it does not say what the assistant's
                turns are.
        """
        require_fast(tokenizer)
        made: list[Tokens] = []
        for item in items:
            try:
                made.append(
                    continued(item.prompt or "", item.completion or "", tokenizer)
                    if item.messages is None
                    else conversation(json.loads(item.messages), tokenizer, config.date)
                )
            except InputError as error:
                raise InputError(f"{item.id}: {error}") from error
        most = config.max_length
        cut = np.array([max(0, len(of.ids) - most) for of in made])
        if cut.any():
            log.warning(
                "%d of %s have more than %d tokens and are cut off, %s of them; --max-length, "
                "where the data are first named, makes room",
                *(int((cut > 0).sum()), counted(len(made), "conversation"), most),
                counted(int(cut.sum()), "token"),
            )
        ids = np.concatenate([of.ids[:most] for of in made])
        return Windows(
            input_ids=ids,
            token_type_ids=np.zeros(len(ids), np.uint8),
            offset_mapping=np.full((len(ids), 2), -1, np.int32),
            n_tokens=np.array([min(len(of.ids), most) for of in made], np.int32),
            item_index=np.arange(len(made), dtype=np.int32),
            labels={},
            token_fields={"loss_mask": np.concatenate([of.loss_mask[:most] for of in made])},
        )

    def settled(self, config: TaskConfig, tokenizer: Any) -> TaskConfig:
        """The settings with today's date, where the chat template reads the clock and none is set.

        Args:
            config: settings of the task.
            tokenizer: of the encoder.
        """
        if config.date is not None or not reads_clock(tokenizer):
            return config
        today = date.today().isoformat()
        log.info(
            "the chat template writes the date: it is told %s, now and whenever these data are "
            "read again; --date names another one",
            today,
        )
        return config.model_copy(update={"date": today})

    def table(self, items: Sequence[Chat]) -> pa.Table:
        """Conversations as the store's text side, a row each."""
        columns = zip(*items, strict=True)
        return pa.table(
            {
                name: pa.array(column, pa.large_string())
                for name, column in zip(Chat._fields, columns, strict=True)
            }
        )

    def items_of(self, table: pa.Table) -> list[Chat]:
        """The inverse of `table`."""
        return [Chat(**row) for row in table.to_pylist()]

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"no encoder and no head can be trained on {self.name}, which has no labels: its "
            "hidden states are for `bertvision.ActivationStore` and split.tokens()"
        )


def _parsed(fields: dict[str, Any], name: str) -> Chat:
    """A row as a conversation.

    Raises:
        InputError: it is malformed; names the field.
    """
    if "messages" not in fields:
        prompt, completion = text_field(fields, "prompt"), text_field(fields, "completion")
        if not completion:
            raise InputError("the completion is empty")
        return Chat(name, None, prompt, completion)
    kept = read_messages(fields)
    if all(message["role"] != "assistant" for message in kept):
        raise InputError("has no message of the role 'assistant'")
    return Chat(name, json.dumps(kept, ensure_ascii=False))


def read_messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row, each with ``role`` and ``content``; fields without a value are left.

    Raises:
        InputError: they are malformed; names the message and the field.
    """
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"messages must be a list of objects: {str(messages)[:80]!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InputError(f"message {i} must be an object: {str(message)[:80]!r}")
        try:
            text_field(message, "role"), text_field(message, "content")
        except InputError as error:
            raise InputError(f"message {i}: {error}") from error
    return [{key: value for key, value in m.items() if value is not None} for m in messages]
