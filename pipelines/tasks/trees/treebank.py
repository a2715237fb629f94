"""A treebank as data for extraction: ``--task treebank --data FOLDER``.

A folder has ``train``, ``dev`` and ``test`` as CoNLL-U, each perhaps with ``.gz``: named
``train.conllu``, or as Universal Dependencies names them, ``en_ewt-ud-train.conllu``. The encoder
reads the words of a sentence with a space between them, one window for each sentence; what of a
longer one does not fit is cut off, and counted.

From tokens to words: which word each token of a window is a piece of, by its characters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.features import FeaturesTask
from bertvision.pipelines.tasks.sentences.windows import sentence_windows
from bertvision.pipelines.tasks.source import read_text
from bertvision.pipelines.tasks.trees.conllu import ParsedSentence, blocks, parse
from bertvision.pipelines.tasks.windows import Windows

Offsets = npt.NDArray[np.int32]
NO_WORD = -1


def words_of_tokens(words: Sequence[str], offsets: Offsets) -> npt.NDArray[np.int64]:
    """The word that each token is a piece of.

    A token that begins with a space, as those of SentencePiece do, belongs to the word behind it.

    Args:
        words: of a sentence, which the encoder read with a space between them.
        offsets: (tokens, 2) characters [start, end) of each token; −1 −1 of special ones.

    Returns:
        (tokens,) index of the word; `NO_WORD` of special tokens and of what stands for a space
        alone.
    """
    text = " ".join(words)
    # of every character its word; of a space between two words the next character that is none
    lengths = np.array([len(word) + 1 for word in words])
    word_of = np.append(np.repeat(np.arange(len(words)), lengths)[: len(text)], NO_WORD)
    solid = np.array([not letter.isspace() for letter in text] + [True])
    position = np.where(solid, np.arange(len(solid)), len(text))
    following = np.minimum.accumulate(position[::-1])[::-1]
    start, end = offsets[:, 0].clip(0), offsets[:, 1]
    first = following[start]
    found: npt.NDArray[np.int64] = np.where(first < end, word_of[first], NO_WORD)
    return found


def is_cut(text: str, offsets: Offsets, max_length: int) -> bool:
    """Whether a window is full before its text ends.

    Args:
        text: of the sentence.
        offsets: (tokens, 2) characters of each token; −1 −1 of special ones.
        max_length: most tokens of a window.
    """
    return len(offsets) >= max_length and int(offsets[:, 1].max()) < len(text)


log = logging.getLogger(__name__)

TREEBANK = "treebank"
"""Name of the task, and of its data set in a workspace."""
SPLITS = ("train", "dev", "test")
_ENDS = (".conllu", ".conllu.gz")


class TreebankTask(FeaturesTask):
    """Sentences with their trees, which are no labels of windows: an encoder is looked at alone."""

    words = ("sentences", "sentences")

    def splits(self, source: str) -> tuple[str, ...]:
        """The members of `SPLITS` that a folder holds; that of a file by its name, else ``all``.

        Raises:
            InputError: it is neither, or the folder holds none.
        """
        path = Path(source)
        if path.is_file():
            return (_split_of(path) or "all",)
        found = tuple(split for split in SPLITS if _files(path, split))
        if not found:
            self._find(source, SPLITS[0])  # says what lacks
        return found

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read the file of a split, or a file as any.

        Raises:
            InputError: it is missing or malformed; names file, line and value.
        """
        path = self._find(source, split)
        text, digest = read_text(path)
        items: list[ParsedSentence] = []
        skipped: list[str] = []
        lines: dict[str, int] = {}
        for block in blocks(text):
            try:
                sentence, line = parse(block), block.lines[0].number
                if sentence.id in lines:
                    raise InputError(
                        f"line {line}: the sent_id {sentence.id!r} is that of line "
                        f"{lines[sentence.id]} too: names of sentences must differ"
                    )
            except InputError as error:
                message = f"{path}, {error}"
                if not config.skip_bad:
                    raise InputError(f"{message}. --skip-bad leaves such sentences out") from error
                skipped.append(message)
                continue
            lines[sentence.id] = line
            items.append(sentence)
        if not items:
            why = f" after skipping {len(skipped)}: {skipped[0]}" if skipped else ""
            raise InputError(f"{path}: holds no sentence{why}")
        if skipped:
            log.warning("%s left out: %s", counted(len(skipped), "malformed sentence"), skipped[0])
        return TaskData(items, digest, skipped)

    def check_data(self, items: Sequence[Any], source: str) -> NoReturn:
        """Refuse to be trained on.

        Raises:
            InputError: always.
        """
        self._refuse()

    def windows(
        self, items: Sequence[ParsedSentence], tokenizer: Any, config: TaskConfig
    ) -> Windows:
        """One window for each sentence, in their order; says how many are cut off."""
        sentences = [Sentence(item.id, item.text) for item in items]
        windows = sentence_windows(sentences, tokenizer, max_length=config.max_length)
        ends = windows.first_token + windows.n_tokens
        cut = sum(
            is_cut(item.text, windows.offset_mapping[begin:end], config.max_length)
            for item, begin, end in zip(items, windows.first_token, ends, strict=True)
        )
        if cut:
            log.warning(
                "%d of %s have more than %d tokens and are cut off: they are left out where whole "
                "trees are needed; --max-length, where the data are first named, makes room",
                *(cut, counted(len(items), "sentence"), config.max_length),
            )
        return replace(windows, labels={})

    def table(self, items: Sequence[ParsedSentence]) -> pa.Table:
        """Sentences as the store's text side, a row each: words, parts of speech, heads."""
        texts, numbers = pa.list_(pa.string()), pa.list_(pa.int32())
        return pa.table(
            {
                "id": pa.array([item.id for item in items], pa.string()),
                "text": pa.array([item.text for item in items], pa.string()),
                "words": pa.array([item.words for item in items], texts),
                "upos": pa.array([item.upos for item in items], texts),
                "heads": pa.array([item.heads for item in items], numbers),
                "relations": pa.array([item.relations for item in items], texts),
            }
        )

    def items_of(self, table: pa.Table) -> list[ParsedSentence]:
        """The inverse of `table`."""
        rows = table.drop_columns(["text"]).to_pylist()
        return [
            ParsedSentence(row.pop("id"), **{name: tuple(values) for name, values in row.items()})
            for row in rows
        ]

    def _find(self, source: str, split: str) -> Path:
        path = Path(source)
        if path.is_file():
            return path
        if not path.is_dir():
            raise InputError(
                f"{source}: there is no such file or folder, which {self.name} is to be read of"
            )
        found = _files(path, split)
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise InputError(f"{source}: holds several files of {split} ({names}): keep one")
        if not found:
            raise InputError(
                f"{source}: holds no {split}.conllu, nor a file like en_ewt-ud-{split}.conllu (or "
                f"the same with .gz), to read {self.name} from"
            )
        return found[0]

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"no encoder and no head can be trained on {self.name}, whose labels are those of "
            "words: use `bertvision structure`"
        )


def _split_of(path: Path) -> str | None:
    """The split that a file is of: ``train.conllu`` or ``…-train.conllu``; None of others."""
    for end in _ENDS:
        if path.name.endswith(end):
            last = path.name.removesuffix(end).replace("_", "-").split("-")[-1]
            return last if last in SPLITS else None
    return None


def _files(folder: Path, split: str) -> list[Path]:
    inside = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in inside if _split_of(path) == split and path.is_file())
