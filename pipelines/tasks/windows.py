"""Windows: texts as the inputs that an encoder takes, and batches of them, padded.

All windows of a split are kept ragged: concatenated, with the number of tokens of each. Lengths are
thus known before the encoder runs, which is what the shards of a store are planned from. How a
question over a long context becomes several windows is in `squad.windows`; a sentence, or a pair of
them, is one (`sentences.task`). Special tokens stand where the tokenizer's own template has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


TEXTS_AT_ONCE = 1024
"""Texts per call of a tokenizer: bounds the memory that its Python lists take."""

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """All windows of a split, concatenated; window w has tokens first_token[w] + [0, n_tokens[w]).

    The windows of an item are consecutive; of a question, in the order of the context.
    """

    input_ids: Int32Array
    """(tokens,) vocabulary indices."""
    token_type_ids: npt.NDArray[np.uint8]
    """(tokens,) as the tokenizer gives them: to BERT 0 up to and including the first [SEP], then
    1; 0 throughout where it has none."""
    offset_mapping: Int32Array
    """(tokens, 2) characters [start, end) of the context, or of the sentence that the token is of;
    −1 −1 for special tokens, and for those of a question."""
    n_tokens: Int32Array
    """(windows,)"""
    item_index: Int32Array
    """(windows,) index into the items that the windows were made from."""
    labels: Mapping[str, npt.NDArray[Any]]
    """(windows,) each. Of questions ``start_positions`` and ``end_positions``: the first and last
    (inclusive) token of the first gold answer, counted inside the window, or 0, the first special
    token, if there is none or it is not wholly in this window. Of sentences ``label``: the class,
    −1 where there is none, or the score, NaN where there is none."""
    marks: Mapping[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """(tokens,) each: what an output layer of a task's own reads beside the text, such as where
    words begin, as keyword arguments of the model; −1 of tokens that are not marked."""
    token_labels: Mapping[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    """(tokens,) each: what is right of tokens, where windows alone do not say it; −1 of tokens that
    nothing is learned of."""
    parts: Int32Array | None = None
    """(tokens,) the item that each token is of, where a window may hold several, one after another:
    no token sees those of another item, and positions begin anew. None: the item of the window."""
    token_fields: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """(tokens,) each: what a store keeps of tokens beside these, such as a loss mask."""
    places: Mapping[str, Int32Array] = field(default_factory=dict)
    """By pooling ``at:FIELD``, (windows,) the token to which the column points, counted inside the
    window."""
    keep: npt.NDArray[np.bool_] | None = None
    """(tokens,) whether each is kept of what an encoder gives; None: all are."""

    def places_of(self, rows: npt.NDArray[np.int64]) -> dict[str, Int32Array]:
        """`places` of some windows, (batch,) numbers: (batch,) each."""
        return {pooling: tokens[rows] for pooling, tokens in self.places.items()}

    @property
    def first_token(self) -> npt.NDArray[np.int64]:
        """(windows,) where each window begins in the concatenated arrays."""
        ends = np.cumsum(self.n_tokens, dtype=np.int64)
        return ends - self.n_tokens

    @property
    def n_kept(self) -> npt.NDArray[np.integer]:
        """(windows,) tokens that are kept of each."""
        if self.keep is None:
            return self.n_tokens
        before = np.append(0, np.cumsum(self.keep, dtype=np.int64))
        ends = np.cumsum(self.n_tokens, dtype=np.int64)
        counts: npt.NDArray[np.int64] = np.diff(before[ends], prepend=0)
        return counts

    def kept_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """(kept tokens,) which tokens of some windows, one after another, are kept; None: all."""
        if self.keep is None:
            return None
        begins, lengths = self.first_token[rows], self.n_tokens[rows]
        spans = [self.keep[a : a + n] for a, n in zip(begins, lengths, strict=True)]
        return np.flatnonzero(np.concatenate(spans))

    def __len__(self) -> int:
        return len(self.n_tokens)

    def part(self, first: int, stop: int) -> Windows:
        """The windows from ``first`` to below ``stop``, in memory of their own."""
        begins = np.append(self.first_token, len(self.input_ids))
        stop = min(stop, len(self))
        tokens, rows = slice(begins[first], begins[stop]), slice(first, stop)
        return Windows(
            self.input_ids[tokens].copy(),
            self.token_type_ids[tokens].copy(),
            self.offset_mapping[tokens].copy(),
            self.n_tokens[rows].copy(),
            self.item_index[rows].copy(),
            {name: values[rows].copy() for name, values in self.labels.items()},
            {name: values[tokens].copy() for name, values in self.marks.items()},
            {name: values[tokens].copy() for name, values in self.token_labels.items()},
            None if self.parts is None else self.parts[tokens].copy(),
            {name: values[tokens].copy() for name, values in self.token_fields.items()},
            {pooling: values[rows].copy() for pooling, values in self.places.items()},
            None if self.keep is None else self.keep[tokens].copy(),
        )

    def separated(self, rows: npt.NDArray[np.int64]) -> tuple[Windows, npt.NDArray[np.int64]]:
        """Some windows with one item each: what an encoder is to read by itself.

        Args:
            rows: (batch,) which windows.

        Returns:
            Windows, and which of them hold the tokens of ``rows``, in the same order.
        """
        if self.parts is None:
            return self, rows
        begins, lengths = self.first_token[rows], self.n_tokens[rows]
        spans = [np.arange(a, a + n) for a, n in zip(begins, lengths, strict=True)]
        tokens = np.concatenate(spans)
        parts, new = self.parts[tokens], np.zeros(len(tokens), bool)
        new[1:] = parts[1:] != parts[:-1]
        new[np.cumsum(lengths) - lengths] = True
        starts = np.flatnonzero(new)
        apart = Windows(
            self.input_ids[tokens],
            self.token_type_ids[tokens],
            self.offset_mapping[tokens],
            np.diff(np.append(starts, len(tokens))).astype(np.int32),
            parts[starts],
            {},
        )
        return apart, np.arange(len(starts))


_TEXT = "a"  # what a template is read from: any text that makes tokens


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A pair of texts as an encoder takes it: before, first text, between, second text, after.

    BERT's is ``[CLS] first [SEP] second [SEP]``, RoBERTa's ``<s> first </s></s> second </s>``. Each
    field holds (tokens, 2) vocabulary indices and token types.
    """

    before: Int32Array
    between: Int32Array
    after: Int32Array
    types: tuple[int, int]
    """Token types of the first and the second text."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Template:
        """The template of a fast tokenizer, read from what it makes of a pair.

        Raises:
            InputError: it is not a fast one, or makes no tokens.
        """
        require_fast(tokenizer)
        encoded = tokenizer(_TEXT, _TEXT, return_token_type_ids=True, verbose=False)
        has_types = "token_type_ids" in tokenizer.model_input_names
        types = np.array(encoded["token_type_ids"]) * has_types
        tokens = np.stack([np.array(encoded["input_ids"]), types], axis=1).astype(np.int32)
        sequence = np.array([-1 if s is None else s for s in encoded.sequence_ids(0)])
        first, second = np.flatnonzero(sequence == 0), np.flatnonzero(sequence == 1)
        if not len(first) or not len(second):
            raise InputError(
                f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r} makes no token of "
                f"{_TEXT!r}: it cannot make windows"
            )
        return cls(
            tokens[: first[0]],
            tokens[first[-1] + 1 : second[0]],
            tokens[second[-1] + 1 :],
            (int(types[first[0]]), int(types[second[0]])),
        )

    def __len__(self) -> int:
        """Special tokens of a pair."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: Int32Array, second: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Vocabulary indices and token types of a pair, (tokens,) each.

        Args:
            first: (tokens,) vocabulary indices of the first text.
            second: likewise.
        """
        before, between, after = self.before.T, self.between.T, self.after.T
        ids = np.concatenate([before[0], first, between[0], second, after[0]])
        types = np.full(len(ids), self.types[0], np.int32)
        types[: len(self.before)] = before[1]
        begin = len(self.before) + len(first)
        types[begin : begin + len(self.between)] = between[1]
        end = len(ids) - len(self.after)
        types[begin + len(self.between) : end] = self.types[1]
        types[end:] = after[1]
        return ids, types


def special_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether the windows of a tokenizer begin, and whether they end, with a special token.

    Raises:
        InputError: it is not a fast one.
    """
    require_fast(tokenizer)
    encoded = tokenizer(_TEXT, return_special_tokens_mask=True, verbose=False)
    special = encoded["special_tokens_mask"]
    return bool(special[0]), bool(special[-1])


class Encoded(NamedTuple):
    """A text, a pair of texts or a piece of a text in one window."""

    row: int
    """Index of the text."""
    ids: Int32Array
    """(tokens,) vocabulary indices."""
    types: npt.NDArray[np.uint8]
    """(tokens,) token types; 0 where the tokenizer has none."""
    offsets: Int32Array
    """(tokens, 2) characters of the text; −1 −1 of special tokens."""


def encode(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    pairs: Sequence[str] | None = None,
    pieces: bool = False,
    names: Sequence[str] | None = None,
) -> Iterator[Encoded]:
    """Texts as the tokenizer's template has them, in order.

    Args:
        texts: The texts, or the first ones of pairs.
        tokenizer: a fast (Rust) tokenizer.
        max_length: most tokens of a window, special tokens included. What is beyond is cut off, of
            a pair from the longer text first.
        pairs: The second texts, of pairs.
        pieces: Whether what is beyond goes on in further windows.
        names: Names of the texts, for messages; None is their number.

    Raises:
        InputError: ``max_length`` leaves no room for a text, a text makes no token at all, or the
            tokenizer is not a fast one.
    """
    require_fast(tokenizer)
    special = tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    if max_length < special + 2:
        raise InputError(
            f"windows of max_length {max_length} leave no room for a text beside {special} special "
            f"tokens: give at least {special + 2}"
        )
    has_types = "token_type_ids" in tokenizer.model_input_names
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        rows = slice(start, start + TEXTS_AT_ONCE)
        encoded = tokenizer(
            list(texts[rows]),
            None if pairs is None else list(pairs[rows]),
            padding=False,
            truncation="longest_first",
            max_length=max_length,
            return_overflowing_tokens=pieces,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
            verbose=False,
        )
        for i, ids in enumerate(encoded["input_ids"]):
            row = start + (encoded["overflow_to_sample_mapping"][i] if pieces else i)
            if not ids:
                name = f"text {row}" if names is None else names[row]
                raise InputError(
                    f"{name} ({texts[row][:40]!r}) makes no token, and the tokenizer adds no "
                    "special one: leave it out of the data"
                )
            offsets = np.array(encoded["offset_mapping"][i], np.int32).reshape(-1, 2)
            offsets[np.array(encoded["special_tokens_mask"][i], bool)] = -1
            types = np.array(encoded["token_type_ids"][i], np.uint8) * np.uint8(has_types)
            yield Encoded(row, np.array(ids, np.int32), types, offsets)


class TextTokens(NamedTuple):
    """The tokens of a text, without special ones."""

    ids: Int32Array
    """(tokens,) vocabulary indices."""
    offsets: Int32Array
    """(tokens, 2) characters [start, end) of the text."""


def tokenise(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[TextTokens]:
    """The tokens of whole texts, in order.

    Args:
        texts: The texts, of any length.
        tokenizer: a fast (Rust) tokenizer.
    """
    for i in range(0, len(texts), TEXTS_AT_ONCE):
        encoded = tokenizer(
            list(texts[i : i + TEXTS_AT_ONCE]),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            split_special_tokens=True,  # "[SEP]" written in a context is text
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,  # no warning about contexts longer than the model: that is what we cut
        )
        for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            yield TextTokens(np.array(ids, np.int32), np.array(offsets, np.int32).reshape(-1, 2))


def require_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot say which characters a token stands for.

    Raises:
        InputError: it is not a fast one.
    """
    if not tokenizer.is_fast:
        raise InputError(
            f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r} cannot make windows: it "
            "must be a fast tokenizer (one with tokenizer.json)"
        )


Int64Array = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Windows padded to the longest of them."""

    input_ids: Tensor
    """int64 (batch, seq)"""
    token_type_ids: Tensor | None
    """int64 (batch, seq); None for a model that takes none."""
    attention_mask: Tensor
    """int64 (batch, seq): 1 for real tokens."""
    labels: dict[str, Tensor]
    """(batch,) by name, int64 of classes and positions, float32 of scores: what the task learns;
    (batch, seq) int64 of tokens, −1 where there is nothing to learn."""
    marks: Mapping[str, Tensor] = MappingProxyType({})
    """int64 (batch, seq) by name: `Windows.marks`, −1 also of padding."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Inputs of the model with its output layer, as keyword arguments."""
        return {**self.text, **self.marks}

    @property
    def text(self) -> dict[str, Tensor]:
        """Inputs of the encoder alone, as keyword arguments."""
        given = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        types = self.token_type_ids
        return given if types is None else {**given, "token_type_ids": types}

    def to(self, where: torch.device) -> Batch:
        """The same batch on a device."""
        types = self.token_type_ids
        return Batch(
            self.input_ids.to(where),
            None if types is None else types.to(where),
            self.attention_mask.to(where),
            {name: values.to(where) for name, values in self.labels.items()},
            {name: values.to(where) for name, values in self.marks.items()},
        )


def collate(
    windows: Windows,
    first_token: Int64Array,
    rows: Int64Array,
    pad_id: int,
    labels: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    token_types: bool = True,
) -> Batch:
    """Pad the windows ``rows`` to the longest of them.

    Args:
        windows: all windows of a split.
        first_token: (windows,) ``windows.first_token``, computed once by the caller.
        rows: (batch,) the windows to take.
        pad_id: vocabulary index of the padding token.
        labels: Labels of all windows by name: (windows,), or (tokens,) of
            ``windows.token_labels``; none where nothing is learned.
        token_types: Whether the model takes token types.
    """
    import torch  # windows are read where nothing is computed

    lengths = windows.n_tokens[rows]
    shape = (len(rows), int(lengths.max()))
    input_ids = np.full(shape, pad_id, np.int64)
    token_type_ids = np.zeros(shape, np.int64)
    for i, row in enumerate(rows):
        tokens = slice(first_token[row], first_token[row] + lengths[i])
        input_ids[i, : lengths[i]] = windows.input_ids[tokens]
        token_type_ids[i, : lengths[i]] = windows.token_type_ids[tokens]
    mask = np.arange(shape[1]) < lengths[:, None]

    def padded(ragged: npt.NDArray[Any]) -> Tensor:
        values = np.full(shape, -1, np.int64)
        for i, row in enumerate(rows):
            values[i, : lengths[i]] = ragged[first_token[row] : first_token[row] + lengths[i]]
        return torch.from_numpy(values)

    def label(values: npt.NDArray[Any]) -> Tensor:
        is_score = np.issubdtype(values.dtype, np.floating)
        return torch.from_numpy(values.astype(np.float32 if is_score else np.int64))

    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(token_type_ids) if token_types else None,
        torch.from_numpy(mask.astype(np.int64)),
        {
            name: padded(values) if name in windows.token_labels else label(values[rows])
            for name, values in (labels or {}).items()
        },
        {name: padded(values) for name, values in windows.marks.items()},
    )
