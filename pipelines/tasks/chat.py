"""A conversation as tokens, through the tokenizer's own chat template, and whose tokens they are.

A template may mark what the assistant says with ``{% generation %}``: where the marks stand in the
text is found by characters written in their place. Of one without marks the turns are found by
difference: a turn of the assistant is what the text up to and with it has more than the text up to
it, which ends with the prompt to answer. A token is learned if it stands for a character of a turn.

A template may read the clock (``strftime_now``). It is given a date that is kept with the data, so
that the same conversation has the same tokens on any day.

Conversations as data for extraction: ``--task chat --data FILE``, with a loss mask of tokens.

A row has ``messages``, a list of ``{"role": …, "content": …}`` that the tokenizer's own chat
template makes a text of; or ``prompt`` and ``completion``, two strings that follow one another. The
store keeps ``loss_mask`` beside each token: 1 of what the assistant says, or of the completion,
else 0.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from jinja2.exceptions import TemplateError

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.data import TaskConfig, TaskData, as_date
from bertvision.pipelines.tasks.features import UnlabelledTask
from bertvision.pipelines.tasks.tables import (
    ID,
    Column,
    Layout,
    offered_splits,
    read_items,
    read_object,
)
from bertvision.pipelines.tasks.windows import Int32Array, Windows, require_fast

_MARKS = re.compile(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}")
_CLOCK = "strftime_now"
_CODES = "aAbBcdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZC"
"""Codes of ``strftime``, all written beforehand: a template cannot call Python."""
_Messages = Sequence[Mapping[str, Any]]


CONVERSATION = Layout({"messages": Column(("messages",), "json"), "id": ID})
LAYOUTS = (
    CONVERSATION,
    Layout({"prompt": Column(("prompt",)), "completion": Column(("completion",)), "id": ID}),
)
_MESSAGE = Layout({"role": Column(("role",)), "content": Column(("content",))})


class Tokens(NamedTuple):
    """A text as an encoder takes it, and what of it is learned."""

    ids: Int32Array
    """(tokens,) vocabulary indices."""
    loss_mask: npt.NDArray[np.uint8]
    """(tokens,) 1 of what the assistant says, or of the completion."""


def reads_clock(tokenizer: Any) -> bool:
    """Whether a tokenizer's chat template writes the date, or anything else of the clock."""
    return bool(tokenizer.chat_template) and _CLOCK in _template(tokenizer, "give none")


def conversation(messages: _Messages, tokenizer: Any, date: str | None = None) -> Tokens:
    """The tokens of a conversation.

    Args:
        messages: with ``role`` and ``content``; a turn of the role ``assistant`` is learned.
        tokenizer: a fast one, with a chat template.
        date: Date that the template is told, as YYYY-MM-DD; None is today.

    Raises:
        InputError: it has no chat template, the template refuses the messages, or a text up to a
            turn is not how the text of all turns begins.
    """
    template = _dated(_template(tokenizer, "give prompt and completion"), date)
    text = _text(messages, tokenizer, template)
    if _MARKS.search(template):
        return _masked(text, _marked(messages, tokenizer, template, text), tokenizer, special=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i == 0:
            raise InputError(
                "message 0 is the assistant's, and the chat template has no {% generation %}: what "
                "is said cannot be told from what stands before it; begin with another role"
            )
        before = _text(messages[:i], tokenizer, template, add_generation_prompt=True)
        through = _text(messages[: i + 1], tokenizer, template)
        if not through.startswith(before) or not text.startswith(through):
            raise InputError(
                f"the chat template of {tokenizer.name_or_path!r} has no {{% generation %}}, and "
                f"writes what stands before message {i} in another way when more follows: what the "
                "assistant says cannot be told from the rest; give prompt and completion"
            )
        spans.append((len(before), len(through)))
    return _masked(text, spans, tokenizer, special=False)


def to_be_answered(messages: _Messages, tokenizer: Any, date: str | None = None) -> Int32Array:
    """The tokens of a conversation that the assistant is to go on with, (tokens,).

    Args:
        messages: Messages with ``role`` and ``content``.
        tokenizer: a fast one, with a chat template.
        date: Date that the template is told, as YYYY-MM-DD; None is today.

    Raises:
        InputError: it has no chat template, or the template refuses the messages.
    """
    template = _template(tokenizer, "give plain texts as prompts, without a template")
    text = _text(messages, tokenizer, _dated(template, date), add_generation_prompt=True)
    return _masked(text, (), tokenizer, special=False).ids


def continued(prompt: str, completion: str, tokenizer: Any) -> Tokens:
    """The tokens of a prompt and its completion, with the tokenizer's special tokens around both.

    A token that stands for the end of the one and the beginning of the other is the completion's.

    Args:
        prompt: Text that comes first.
        completion: Completion that is learned.
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


def _text(messages: _Messages, tokenizer: Any, template: str, **options: Any) -> str:
    try:
        text = tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, **options
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} does not take these messages: "
            f"{str(error).strip() or type(error).__name__}"
        ) from error
    return str(text)


def _with(macro: str, template: str) -> str:
    """A template behind a macro of ours; white space at its beginning is treated as before."""
    # jinja drops blanks in front of a block that begins a line
    return macro + '{{ "" }}' + re.sub(r"^[ \t]+(?=\{[%#](?!\+))", "", template)


def _dated(template: str, date: str | None) -> str:
    """A template in which the clock stands still at noon of a date."""
    if date is None or _CLOCK not in template:
        return template
    now = datetime.combine(as_date(date), time(12))
    codes = [f"%{flag}{code}" for flag in ("-", "") for code in _CODES]
    written = [("%%", "\0"), *((code, now.strftime(code)) for code in codes), ("\0", "%")]
    pairs = ", ".join(f"[{_literal(begin)}, {_literal(to)}]" for begin, to in written)
    return _with(
        f"{{% macro {_CLOCK}(format) %}}{{% set of = namespace(text=format) %}}"
        f"{{% for code, value in [{pairs}] %}}{{% set of.text = of.text.replace(code, value) %}}"
        "{% endfor %}{{ of.text }}{% endmacro %}",
        template,
    )


def _literal(text: str) -> str:
    return '"' + "".join(f"\\u{ord(c):04x}" for c in text) + '"'


def _marked(messages: _Messages, tokenizer: Any, template: str, text: str) -> list[tuple[int, int]]:
    """The spans of a text that its template marks, as [begin, end) characters."""
    unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    begin, end = next(unused), next(unused)
    macro = f"{{% macro marked_as_said() %}}{begin}{{{{ caller() }}}}{end}{{% endmacro %}}"
    calls = {"generation": "call marked_as_said()", "endgeneration": "endcall"}
    marking = _MARKS.sub(lambda m: f"{{%{m[1]} {calls[m[2]]} {m[3]}%}}", template)
    written = _text(messages, tokenizer, _with(macro, marking))
    if written.translate({ord(begin): None, ord(end): None}) != text:
        raise InputError(
            f"the chat template of {tokenizer.name_or_path!r} changes what stands between "
            "{% generation %} and {% endgeneration %} afterwards: what the assistant says cannot "
            "be told from the rest; give prompt and completion"
        )
    spans, place, begun = [], 0, 0
    for character in written:
        if character == begin:
            begun = place
        elif character == end:
            spans.append((begun, place))
        else:
            place += 1
    return spans


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
        said = np.flatnonzero((begins < end) & (ends > begin) & (begins < ends))
        if len(said):  # with tokens between them that stand for no character
            mask[said[0] : said[-1] + 1] = True
    return Tokens(np.array(encoded["input_ids"], np.int32), mask.astype(np.uint8))


log = logging.getLogger(__name__)


class Chat(NamedTuple):
    """A conversation, or a prompt with its completion."""

    id: str
    messages: str | None
    """The messages of a conversation, as JSON; None of a prompt."""
    prompt: str | None = None
    completion: str | None = None

    @property
    def text(self) -> str:
        """Text that tells it from others."""
        return self.messages or f"{self.prompt}{self.completion}"


class ChatTask(UnlabelledTask):
    """Conversations: a model is looked at alone."""

    words = ("conversations", "conversations")
    item: ClassVar[Any] = Chat
    schema: ClassVar[Mapping[str, Any]] = dict.fromkeys(Chat._fields, pa.large_string())

    def splits(self, source: str) -> tuple[str, ...]:
        """The splits that a folder or a data set holds; ``all`` of a file.

        Raises:
            InputError: it is nothing of this kind.
        """
        return offered_splits(source, self.name)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read the conversations of a split.

        Raises:
            InputError: it is missing or malformed; names file, line and field.
        """
        skip_bad = config.skip_bad
        return read_items(source, split, self.name, _parsed, *LAYOUTS, skip_bad=skip_bad)

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
        cut = np.array([max(0, len(one.ids) - most) for one in made])
        if cut.any():
            log.warning(
                "%d of %s have more than %d tokens and are cut off, %s of them; --max-length, "
                "where the data are first named, makes room",
                *(int((cut > 0).sum()), counted(len(made), "conversation"), most),
                counted(int(cut.sum()), "token"),
            )
        ids = np.concatenate([one.ids[:most] for one in made])
        return Windows(
            input_ids=ids,
            token_type_ids=np.zeros(len(ids), np.uint8),
            offset_mapping=np.full((len(ids), 2), -1, np.int32),
            n_tokens=np.array([min(len(one.ids), most) for one in made], np.int32),
            item_index=np.arange(len(made), dtype=np.int32),
            labels={},
            token_fields={"loss_mask": np.concatenate([one.loss_mask[:most] for one in made])},
        )

    def settled(self, config: TaskConfig, tokenizer: Any) -> TaskConfig:
        """The settings with today's date, where the chat template reads the clock and none is set.

        Args:
            config: settings of the task.
            tokenizer: Tokenizer of the encoder.
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


def _parsed(fields: dict[str, Any], name: str) -> Chat:
    """A row as a conversation.

    Raises:
        InputError: it is malformed; names the field.
    """
    if "messages" not in fields:
        if not fields["completion"]:
            raise InputError("the completion is empty")
        return Chat(name, None, **fields)
    messages = read_messages(fields)
    if all(message["role"] != "assistant" for message in messages):
        raise InputError("has no message of the role 'assistant'")
    return Chat(name, json.dumps(messages, ensure_ascii=False))


def read_messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row, each with ``role`` and ``content``; fields without a value are left.

    Raises:
        InputError: they are malformed; names the message and the field.
    """
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"messages must be a list of objects: {str(messages)[:80]!r}")
    for i, message in enumerate(messages):
        try:
            read_object(message, [_MESSAGE])
        except InputError as error:
            raise InputError(f"message {i}: {error}") from error
    return [{key: value for key, value in m.items() if value is not None} for m in messages]
