"""Questions over contexts as windows: ``[CLS] question [SEP] part of the context [SEP]``.

So it is to BERT; to another encoder it is what the template of its tokenizer says. A context that
does not fit is cut into consecutive windows that share ``overlap`` tokens, so that an answer near a
cut is whole, with some of its surroundings, in one of them (Devlin et al. 2019, arXiv:1810.04805;
run_squad.py of google-research/bert names the step between windows instead, its `doc_stride`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.tasks.special_tokens import Template, require_fast
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.tasks.squad.sliding_window import TextTokens, cut
from bertvision.pipelines.tasks.windows import TEXTS_AT_ONCE, Windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def question_windows(
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


def _tokenise(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[TextTokens]:
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
