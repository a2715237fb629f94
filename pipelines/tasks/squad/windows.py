"""Questions over contexts as windows: ``[CLS] question [SEP] part of the context [SEP]``.

So it is to BERT; to another encoder it is what the template of its tokenizer says. A context that
does not fit is cut into consecutive windows that share ``overlap`` tokens, so that an answer near a
cut is whole, with some of its surroundings, in one of them (Devlin et al. 2019, arXiv:1810.04805;
run_squad.py of google-research/bert names the step between windows instead, its `doc_stride`).

Where a context that is too long for a window is cut, and which windows hold the answer whole.

What the tasks on SQuAD's data share: questions over contexts, cut into windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.soundness import Example
from bertvision.pipelines.tasks.source import named_split, on_hub, only_file
from bertvision.pipelines.tasks.squad.read import FORMS, Answer, Question, load_squad, read_squad
from bertvision.pipelines.tasks.tables import Column
from bertvision.pipelines.tasks.task import Labels, Task
from bertvision.pipelines.tasks.windows import Template, TextTokens, Windows, require_fast, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Int32Array = npt.NDArray[np.int32]


class Piece(NamedTuple):
    """Content of a window of a question, counted in tokens."""

    item_index: int
    """Index of the question."""
    first: int
    """Context tokens [first, last)."""
    last: int
    begin: int
    """Where they begin in the window."""
    n_tokens: int
    """Tokens of the whole window."""
    start_position: int
    """First token of the answer in the window; 0 if it is not wholly there."""
    end_position: int


def cut(
    index: int,
    question: Question,
    context: TextTokens,
    *,
    room: int,
    begin: int,
    after: int,
    overlap: int,
) -> Iterator[Piece]:
    """The windows of one question, with labels.

    Args:
        index: Index of the question.
        question: Question with its answers.
        context: its tokens.
        room: most context tokens of a window.
        begin: Position at which the context begins in a window.
        after: special tokens after it.
        overlap: context tokens that two consecutive windows share.
    """
    answer = _answer_tokens(question, context.offsets)
    first, n_context = 0, len(context.ids)
    while True:
        last = min(first + room, n_context)
        start = end = 0
        if answer is not None and first <= answer[0] and answer[1] < last:
            start, end = (token - first + begin for token in answer)
        yield Piece(index, first, last, begin, begin + last - first + after, start, end)
        if last == n_context:
            return
        first = last - overlap


def _answer_tokens(question: Question, offsets: Int32Array) -> tuple[int, int] | None:
    """First and last (inclusive) context token that share a character with the first answer."""
    if not question.answers:
        return None
    text, begin = question.answers[0]
    first = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], begin + len(text), side="left")) - 1
    # The tokenizer may drop every character of an answer (control characters): then no token has it
    return (first, last) if first <= last else None


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
        questions: Questions whose windows are made.
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
    contexts = dict(zip(distinct, tokenise(distinct, tokenizer), strict=True))
    texts = [q.question for q in questions]
    question_ids = [tokens.ids[:max_question_length] for tokens in tokenise(texts, tokenizer)]
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


SPLITS = ("train", "dev")


class QuestionTask(Task):
    """A task whose items are the `Question` of a file in SQuAD's form, or of the hub."""

    settings: ClassVar[tuple[str, ...]] = (
        "max_length",
        "max_question_length",
        "overlap",
        "answerable_only",
    )
    words = ("contexts", "questions")
    forms = (".json",)
    schema: ClassVar[Mapping[str, Any]] = {
        "id": pa.string(),
        "question": pa.string(),
        "context": pa.string(),
        "is_impossible": pa.bool_(),
    }

    def splits(self, source: str) -> tuple[str, ...]:
        """Train and dev; those of them that a folder holds, or the one that a file is named for.

        Raises:
            InputError: a folder holds several files of a split.
        """
        path = Path(source)
        if path.is_file():
            return (named_split(path),)
        return tuple(split for split in SPLITS if _file(path, split)) or SPLITS

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read a SQuAD file, as any split; or the split's of a folder or a data set of the hub.

        Raises:
            InputError: it is missing, malformed, or has no question; or a folder holds several
                files of the split.
        """
        if (path := Path(source)).is_dir() and any(_file(path, each) for each in SPLITS):
            if (file := _file(path, split)) is None:
                raise InputError(
                    f"{source}: holds no {split}*.json, .jsonl or .csv (or the same with .gz) to "
                    f"read {self.name} from"
                )
            source = str(file)
        data = load_squad(source, split, skip_bad=config.skip_bad)
        questions = [q for q in data.questions if not (config.answerable_only and q.is_impossible)]
        return TaskData(questions, data.sha256, data.skipped)

    def group(self, item: Question) -> str:
        """The context: questions on one text are held out together."""
        return item.context

    def example(self, item: Question) -> Example:
        """The question on its context, and whether it is answerable: answers may be worded anew."""
        return (item.question, item.context), not item.is_impossible

    def windows(self, items: Sequence[Question], tokenizer: Any, config: TaskConfig) -> Windows:
        """Windows of the questions, in their order, several of a long context."""
        return question_windows(
            items,
            tokenizer,
            max_length=config.max_length,
            max_question_length=config.max_question_length,
            overlap=config.overlap,
        )

    def read_unlabelled(self, path: Path, config: TaskConfig) -> list[Any]:
        """The questions of a file in the form of SQuAD, whose answers are not looked at."""
        return list(read_squad(path, skip_bad=config.skip_bad, labelled=False).questions)

    def inputs(self, config: TaskConfig) -> dict[str, Column]:
        """A question and its context."""
        return {name: Column((name,)) for name in ("question", "context")}

    def unlabelled(self, texts: Mapping[str, str], name: str) -> Question:
        """A question whose answer is not known."""
        return Question(name, **texts, answers=(), is_impossible=True)

    def table(self, items: Sequence[Question]) -> pa.Table:
        """Questions as the store's text side; row i is what ``question_index`` i names."""
        answers = [[a._asdict() for a in q.answers] for q in items]
        kind = pa.list_(pa.struct([("text", pa.string()), ("answer_start", pa.int64())]))
        return super().table(items).add_column(3, "answers", pa.array(answers, kind))

    def items_of(self, table: pa.Table) -> list[Question]:
        """The inverse of `table`."""
        return [
            Question(**{**row, "answers": tuple(Answer(**answer) for answer in row["answers"])})
            for row in table.to_pylist()
        ]

    def stored(self, windows: Windows) -> Labels:
        """Where the answer is, and whether there is one: what every task on questions learns."""
        return {
            "question_index": windows.item_index,
            **windows.labels,
            "answerable": window_labels(windows),
        }


def _file(folder: Path, split: str) -> Path | None:
    """The file of a split in a folder; None without one, and in a folder of Parquet files."""
    if not folder.is_dir() or on_hub(str(folder)):
        return None
    return only_file(folder, [f"{split}*{form}" for form in FORMS], split, older="-v1.1")


def window_labels(windows: Windows) -> npt.NDArray[np.int8]:
    """1 for each window that wholly holds the first gold answer, else 0: (windows,).

    An answer never begins at token 0, the [CLS], which is where windows without one point.
    """
    return (windows.labels["start_positions"] > 0).astype(np.int8)
