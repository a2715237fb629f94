"""Windows: every context token is covered, overlaps are exact, labels point at the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sentences.task import sentence_windows
from bertvision.pipelines.tasks.squad.read import Answer, Question
from bertvision.pipelines.tasks.squad.windows import question_windows
from bertvision.pipelines.tasks.windows import Windows

CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def tokenizer(tiny_bert: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_bert)
    return loaded


def question(text: str, context: str, answer: Answer | None = None, id: str = "q") -> Question:
    return Question(id, text, context, (answer,) if answer else (), answer is None)


def window(windows: Windows, i: int) -> slice:
    first = int(windows.first_token[i])
    return slice(first, first + int(windows.n_tokens[i]))


WORDS = st.sampled_from(
    [
        "anna",
        "Founded",
        "norvik",
        "in",
        "1901",
        ".",
        "Zoë",
        "lives",
        "x's",
        "日本",
        "[SEP]",
        "\u200b",
    ]
)
TEXT = st.lists(WORDS, max_size=60).map(" ".join)


@st.composite
def questions_with_answers(draw: st.DrawFn) -> Question:
    context = draw(TEXT)
    answer = None
    if context and draw(st.booleans()):
        begin = draw(st.integers(0, len(context) - 1))
        end = draw(st.integers(begin + 1, min(len(context), begin + 40)))
        answer = Answer(context[begin:end], begin)
    return question(draw(TEXT), context, answer)


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int, int]:
    """max_length, max_question_length and overlap that leave room for the context."""
    question_length, overlap = draw(st.integers(1, 12)), draw(st.integers(0, 12))
    return question_length + 3 + overlap + draw(st.integers(1, 30)), question_length, overlap


@given(st.lists(questions_with_answers(), max_size=4), lengths())
@settings(max_examples=200, deadline=None)
def test_windows_cover_overlap_and_label(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    sizes: tuple[int, int, int],
) -> None:
    max_length, max_question_length, overlap = sizes
    windows = question_windows(
        questions,
        tokenizer,
        max_length=max_length,
        max_question_length=max_question_length,
        overlap=overlap,
    )
    assert len(windows.input_ids) == windows.n_tokens.sum()
    assert windows.offset_mapping.shape == (len(windows.input_ids), 2)
    assert set(windows.item_index.tolist()) == set(range(len(questions)))
    assert (np.diff(windows.item_index) >= 0).all()
    assert (windows.n_tokens <= max_length).all()

    for i, q in enumerate(questions):
        ids = tokenizer(q.question, add_special_tokens=False, split_special_tokens=True)
        question_ids = ids["input_ids"][:max_question_length]
        encoded = tokenizer(
            q.context,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
        )
        n_context = len(encoded["input_ids"])
        capacity = max_length - len(question_ids) - 3
        of_question = np.flatnonzero(windows.item_index == i)
        for k, w in enumerate(of_question):
            at = window(windows, w)
            # Which context tokens this window must hold, by the definition of the overlap
            first = k * (capacity - overlap)
            last = min(first + capacity, n_context)
            assert windows.input_ids[at].tolist() == [
                CLS,
                *question_ids,
                SEP,
                *encoded["input_ids"][first:last],
                SEP,
            ]
            outside = len(question_ids) + 2
            assert windows.token_type_ids[at].tolist() == [0] * outside + [1] * (last - first + 1)
            assert windows.offset_mapping[at].tolist() == [
                *[[-1, -1]] * outside,
                *map(list, encoded["offset_mapping"][first:last]),
                [-1, -1],
            ]
            _check_label(windows, int(w), q, encoded["offset_mapping"], first, last)
        assert last == n_context  # of the last window: every token was in one
        assert len(of_question) == 1 or first + overlap < n_context  # and no window is needless


def _check_label(
    windows: Windows,
    w: int,
    q: Question,
    offsets: list[tuple[int, int]],
    first: int,
    last: int,
) -> None:
    start, end = int(windows.labels["start_positions"][w]), int(windows.labels["end_positions"][w])
    covering = []
    if q.answers:
        begin, stop = q.answers[0].answer_start, q.answers[0].answer_start + len(q.answers[0].text)
        covering = [t for t, (b, e) in enumerate(offsets) if b < stop and e > begin]
    if not covering or covering[0] < first or covering[-1] >= last:
        assert (start, end) == (0, 0)
        return
    span = windows.offset_mapping[window(windows, w)][start : end + 1].tolist()
    assert span == [list(offsets[t]) for t in covering]
    tokens_of_answer = q.answers[0].text.replace("\u200b", "").strip()
    assert tokens_of_answer in q.context[span[0][0] : span[-1][1]].replace("\u200b", "")


def test_a_window_that_fits_is_what_the_tokenizer_makes_of_the_pair(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    q = question("Who founded the firm?", "Anna founded Norvik in 1901.", Answer("Norvik", 13))
    windows = question_windows([q], tokenizer)
    pair = tokenizer(q.question, q.context, return_offsets_mapping=True)
    assert len(windows) == 1
    assert windows.input_ids.tolist() == pair["input_ids"]
    assert windows.token_type_ids.tolist() == pair["token_type_ids"]
    of_context = [s == 1 for s in pair.sequence_ids(0)]
    assert windows.offset_mapping[of_context].tolist() == [
        list(o) for o, of in zip(pair["offset_mapping"], of_context, strict=True) if of
    ]
    s, e = windows.labels["start_positions"][0], windows.labels["end_positions"][0]
    begin, end = windows.offset_mapping[s, 0], windows.offset_mapping[e, 1]
    assert q.context[begin:end] == "Norvik"
    assert [a.dtype for a in (windows.input_ids, windows.token_type_ids, windows.n_tokens)] == [
        np.int32,
        np.uint8,
        np.int32,
    ]


def test_an_answer_is_labelled_in_each_window_that_holds_it_whole(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    # 10 context tokens, windows of 6 that share 4: [0, 6) [2, 8) [4, 10); the answer is [4, 6)
    q = question("who", "a of in and was is who what where when", Answer("was is", 12))
    windows = question_windows([q], tokenizer, max_length=10, max_question_length=1, overlap=4)
    assert windows.n_tokens.tolist() == [10, 10, 10]
    assert windows.labels["start_positions"].tolist() == [3 + 4, 3 + 2, 3 + 0]
    assert windows.labels["end_positions"].tolist() == [3 + 5, 3 + 3, 3 + 1]
    assert windows.first_token.tolist() == [0, 10, 20]


def test_special_tokens_written_in_a_text_are_text(tokenizer: PreTrainedTokenizerBase) -> None:
    q = question("[CLS] who [SEP]?", "the [SEP] of [CLS] rome")
    windows = question_windows([q], tokenizer)
    assert np.count_nonzero(windows.input_ids == CLS) == 1
    assert np.count_nonzero(windows.input_ids == SEP) == 2


def test_an_empty_context_makes_one_window(tokenizer: PreTrainedTokenizerBase) -> None:
    windows = question_windows([question("who", "")], tokenizer)
    assert windows.input_ids.tolist()[0::2] == [CLS, SEP]
    assert windows.n_tokens.tolist() == [4]
    assert (
        windows.labels["start_positions"].tolist(),
        windows.labels["end_positions"].tolist(),
    ) == ([0], [0])


def test_no_questions_make_no_windows(tokenizer: PreTrainedTokenizerBase) -> None:
    windows = question_windows([], tokenizer)
    assert len(windows) == 0
    assert windows.offset_mapping.shape == (0, 2)
    assert windows.first_token.tolist() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 319}, "max_length 386 .* 319 tokens of the context, .* the overlap of 319"),
        ({"max_length": 64}, "max_length 64 .* -3 tokens of the context"),
        ({"overlap": -1}, "overlap -1"),
        ({"max_question_length": 0}, "max_question_length is 0"),
    ],
)
def test_lengths_without_room_are_refused_by_their_values(
    tokenizer: PreTrainedTokenizerBase, options: dict[str, int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        question_windows([question("who", "anna")], tokenizer, **options)


def test_a_slow_tokenizer_is_refused() -> None:
    from transformers import CanineTokenizer

    with pytest.raises(InputError, match="CanineTokenizer .* must be a fast tokenizer"):
        question_windows([question("who", "anna")], CanineTokenizer())


class CountingTokenizer:
    """The tokenizer given, keeping the lists of texts it was called with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, texts: list[str] | str, *pair: str, **options: Any) -> Any:
        if isinstance(texts, list):  # and no pair, which the template is read from
            self.texts += texts
        return self.tokenizer(texts, *pair, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def test_thousands_of_questions_take_seconds_and_each_context_once(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    contexts = [f"anna founded the firm in 1901 . context {i} " * 15 for i in range(400)]
    questions = [question("who founded it?", contexts[i // 5], id=str(i)) for i in range(2000)]
    counting = CountingTokenizer(tokenizer)
    begin = time.perf_counter()
    question_windows(questions, counting)  # type: ignore[arg-type]
    assert time.perf_counter() - begin < 10  # 0.4 s on one idle core
    assert sorted(counting.texts) == sorted(contexts + ["who founded it?"] * 2000)


def sentences(*texts: str | tuple[str, str], label: Any = None) -> list[Sentence]:
    pairs = [text if isinstance(text, tuple) else (text, None) for text in texts]
    return [Sentence(str(i), a, b, label) for i, (a, b) in enumerate(pairs)]


@given(st.lists(st.one_of(TEXT, st.tuples(TEXT, TEXT)), max_size=5), st.integers(8, 60))
@settings(max_examples=100, deadline=None)
def test_a_sentence_or_pair_is_one_window_as_the_tokenizer_makes_it(
    tokenizer: PreTrainedTokenizerBase, texts: list[Any], max_length: int
) -> None:
    windows = sentence_windows(sentences(*texts), tokenizer, max_length=max_length)
    assert windows.item_index.tolist() == list(range(len(texts)))
    assert len(windows.input_ids) == windows.n_tokens.sum()
    for i, text in enumerate(texts):
        at = window(windows, i)
        parts = text if isinstance(text, tuple) else (text,)
        own = tokenizer(
            *([part] for part in parts),
            max_length=max_length,
            truncation="longest_first",
            split_special_tokens=True,
        )
        assert windows.input_ids[at].tolist() == own["input_ids"][0]
        assert windows.token_type_ids[at].tolist() == own["token_type_ids"][0]
        special = [s is None for s in own.sequence_ids(0)]
        assert ((windows.offset_mapping[at] == -1).all(axis=1) == special).all()


def test_a_pair_is_cut_where_it_is_longer(tokenizer: PreTrainedTokenizerBase) -> None:
    pair = ("who is anna", " ".join(["rome"] * 30))
    windows = sentence_windows(sentences(pair), tokenizer, max_length=12)
    assert windows.n_tokens.tolist() == [12]
    assert windows.token_type_ids.tolist() == [0] * 5 + [1] * 7  # [CLS] who is anna [SEP] rome …


def test_labels_are_classes_or_scores(tokenizer: PreTrainedTokenizerBase) -> None:
    def label_of(*labels: Any) -> np.ndarray:
        items = [Sentence(str(i), "anna", None, label) for i, label in enumerate(labels)]
        return sentence_windows(items, tokenizer).labels["label"]

    assert label_of(2, None, 0).tolist() == [2, -1, 0]
    assert label_of(2, None, 0).dtype == np.int32
    assert label_of(None).tolist() == [-1]
    scores = label_of(2.5, None, 0)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, [2.5, np.nan, 0])


def test_no_sentences_make_no_windows(tokenizer: PreTrainedTokenizerBase) -> None:
    windows = sentence_windows([], tokenizer)
    assert len(windows) == 0
    assert windows.offset_mapping.shape == (0, 2)
    assert windows.labels["label"].shape == (0,)


def test_a_sentence_without_words_is_its_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert sentence_windows(sentences(""), tokenizer).input_ids.tolist() == [CLS, SEP]


@pytest.mark.parametrize(
    ("texts", "max_length", "least"), [(("anna",), 3, 4), ((("a", "b"),), 4, 5)]
)
def test_windows_without_room_for_a_text_are_refused(
    tokenizer: PreTrainedTokenizerBase, texts: Any, max_length: int, least: int
) -> None:
    with pytest.raises(InputError, match=f"max_length {max_length} .* give at least {least}$"):
        sentence_windows(sentences(*texts), tokenizer, max_length=max_length)
    assert len(sentence_windows(sentences(*texts), tokenizer, max_length=least)) == 1
