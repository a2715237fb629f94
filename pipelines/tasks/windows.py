"""Windows: texts as the inputs that an encoder takes, without padding.

A question over a context is ``[CLS] question [SEP] part of the context [SEP]`` to BERT, and what
the template of its tokenizer says to another encoder. A context that does not fit is cut into
consecutive windows that share ``overlap`` tokens, so that an answer near a cut is whole, with some
of its surroundings, in one of them (Devlin et al. 2019, arXiv:1810.04805; run_squad.py of
google-research/bert names the step between windows instead, its `doc_stride`). A sentence, or a
pair of them, is one window.

All windows of a split are kept ragged: concatenated, with the number of tokens of each. Lengths are
thus known before the encoder runs, which is what the shards of a store are planned from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sliding_window import TextTokens, cut
from bertvision.pipelines.tasks.special_tokens import Template, require_fast
from bertvision.pipelines.tasks.squad.read import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1024  # texts per call of the tokenizer: bounds the memory its Python lists take

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

    @property
    def first_token(self) -> npt.NDArray[np.int64]:
        """(windows,) where each window begins in the concatenated arrays."""
        ends = np.cumsum(self.n_tokens, dtype=np.int64)
        return ends - self.n_tokens

    def __len__(self) -> int:
        return len(self.n_tokens)


def make_windows(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 386,
    max_question_length: int = 64,
    overlap: int = 128,
) -> Windows:
    """Tokenise questions and contexts and cut them into windows.

    Args:
        questions: whose windows to make.
        tokenizer: a fast (Rust) tokenizer.
        max_length: most tokens of a window, special tokens included.
        max_question_length: most tokens of a question; what is beyond is cut off.
        overlap: context tokens that two consecutive windows share.

    Returns:
        The windows, by question. Every context token is in at least one window; the last window of
        a question ends at the last token; an empty context makes one window.

    Raises:
        InputError: the lengths leave no room for a context, or the tokenizer is not a fast one or
            puts no special token before a pair of texts, so that nothing can stand for no answer.
    """
    require_fast(tokenizer)
    template = Template.of(tokenizer)
    if not len(template.before):
        raise InputError(
            f"{type(tokenizer).__name__} of {tokenizer.name_or_path!r} puts no special token at "
            "the start of a question and its context, and a window without the answer points "
            "there: take an encoder that has one, such as bert-base-uncased or roberta-base"
        )
    if max_question_length < 1 or overlap < 0:
        raise InputError(
            f"max_question_length is {max_question_length} and overlap {overlap}: give a question "
            "length of at least 1 and an overlap of at least 0 tokens"
        )
    capacity = max_length - max_question_length - len(template)
    if capacity - overlap < 1:
        raise InputError(
            f"windows of max_length {max_length} hold, beside max_question_length "
            f"{max_question_length} and {len(template)} special tokens, {capacity} tokens of the "
            f"context, which must be more than the overlap of {overlap}: raise max_length or lower "
            "max_question_length or overlap"
        )

    distinct = list(dict.fromkeys(q.context for q in questions))
    contexts = dict(zip(distinct, _tokenise(distinct, tokenizer), strict=True))
    texts = [q.question for q in questions]
    question_ids = [tokens.ids[:max_question_length] for tokens in _tokenise(texts, tokenizer)]
    pieces = [
        piece
        for i, (question, ids) in enumerate(zip(questions, question_ids, strict=True))
        for piece in cut(
            *(i, question, contexts[question.context]),
            room=max_length - len(ids) - len(template),
            begin=len(template.before) + len(ids) + len(template.between),
            after=len(template.after),
            overlap=overlap,
        )
    ]

    n_tokens = np.array([p.n_tokens for p in pieces], np.int32)
    total = int(n_tokens.sum(dtype=np.int64))
    input_ids = np.empty(total, np.int32)
    token_type_ids = np.empty(total, np.uint8)
    offset_mapping = np.full((total, 2), -1, np.int32)
    at = 0
    for piece in pieces:
        tokens = contexts[questions[piece.item_index].context]
        window = slice(at, at + piece.n_tokens)
        parts = question_ids[piece.item_index], tokens.ids[piece.first : piece.last]
        input_ids[window], token_type_ids[window] = template.join(*parts)
        begin = at + piece.begin
        offset_mapping[begin : begin + len(parts[1])] = tokens.offsets[piece.first : piece.last]
        at += piece.n_tokens
    return Windows(
        input_ids=input_ids,
        token_type_ids=token_type_ids,
        offset_mapping=offset_mapping,
        n_tokens=n_tokens,
        item_index=np.array([p.item_index for p in pieces], np.int32),
        labels={
            "start_positions": np.array([p.start_position for p in pieces], np.int32),
            "end_positions": np.array([p.end_position for p in pieces], np.int32),
        },
    )


def sentence_windows(
    sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, *, max_length: int = 128
) -> Windows:
    """Tokenise sentences, or pairs of them, a window each.

    Args:
        sentences: in the order of the data.
        tokenizer: a fast (Rust) tokenizer, whose template places the special tokens.
        max_length: most tokens of a window, special tokens included. What is beyond is cut off, of
            a pair from the longer sentence first.

    Returns:
        The windows, with ``labels["label"]``: int32 classes, or float32 where a label is a float.

    Raises:
        InputError: ``max_length`` leaves no room for a text, a sentence makes no token at all, or
            the tokenizer is not a fast one.
    """
    require_fast(tokenizer)
    special = tokenizer.num_special_tokens_to_add(pair=any(s.pair is not None for s in sentences))
    if max_length < special + 2:
        raise InputError(
            f"windows of max_length {max_length} leave no room for a text beside {special} special "
            f"tokens: give at least {special + 2}"
        )
    encodings = list(_encode(sentences, tokenizer, max_length))
    for sentence, encoding in zip(sentences, encodings, strict=True):
        if not len(encoding.ids):
            raise InputError(
                f"sentence {sentence.id!r} ({sentence.text!r}) makes no token, and the tokenizer "
                "adds no special one: leave it out of the data"
            )
    return Windows(
        input_ids=_joined([e.ids for e in encodings]),
        token_type_ids=_joined([e.types for e in encodings]).astype(np.uint8),
        offset_mapping=_joined([e.offsets for e in encodings], (0, 2)),
        n_tokens=np.array([len(e.ids) for e in encodings], np.int32),
        item_index=np.arange(len(sentences), dtype=np.int32),
        labels={"label": _label_array([sentence.label for sentence in sentences])},
    )


class _Encoding(NamedTuple):
    ids: Int32Array  # (tokens,)
    types: Int32Array  # (tokens,)
    offsets: Int32Array  # (tokens, 2)


def _tokenise(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[TextTokens]:
    for i in range(0, len(texts), _BATCH):
        encoded = tokenizer(
            list(texts[i : i + _BATCH]),
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


def _encode(
    sentences: Sequence[Sentence], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[_Encoding]:
    """Each sentence or pair as the tokenizer's template has it, in order."""
    has_types = "token_type_ids" in tokenizer.model_input_names
    for start in range(0, len(sentences), _BATCH):
        batch = sentences[start : start + _BATCH]
        for pair, run in groupby(batch, key=lambda sentence: sentence.pair is not None):
            group = list(run)
            encoded = tokenizer(
                [sentence.text for sentence in group],
                [sentence.pair or "" for sentence in group] if pair else None,
                padding=False,
                truncation="longest_first",
                max_length=max_length,
                split_special_tokens=True,
                return_attention_mask=False,
                return_token_type_ids=True,
                return_special_tokens_mask=True,
                return_offsets_mapping=True,
                verbose=False,
            )
            for i, ids in enumerate(encoded["input_ids"]):
                offsets = np.array(encoded["offset_mapping"][i], np.int32).reshape(-1, 2)
                offsets[np.array(encoded["special_tokens_mask"][i], bool)] = -1
                types = np.array(encoded["token_type_ids"][i], np.int32) * has_types
                yield _Encoding(np.array(ids, np.int32), types, offsets)


def _joined(parts: list[Int32Array], empty: tuple[int, ...] = (0,)) -> Int32Array:
    return np.concatenate(parts) if parts else np.zeros(empty, np.int32)


def _label_array(labels: Sequence[int | float | None]) -> npt.NDArray[Any]:
    if any(isinstance(label, float) for label in labels):
        return np.array([np.nan if label is None else label for label in labels], np.float32)
    return np.array([-1 if label is None else label for label in labels], np.int32)
