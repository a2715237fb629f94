"""Documents as windows: one each, consecutive ones, or several documents in one.

A packed window holds whole documents in the order of the data, as many as there is room for. A
document that does not fit any more begins the next window, and only one that is longer than a
window is divided. Each document keeps the special tokens that the tokenizer gives it, sees nothing
of the others, and has positions of its own: its hidden states are those of the document alone.

Documents as data for extraction: ``--task text --data FILE [--text COLUMN] [--windows HOW]``.

A document is a row of JSON lines, of Parquet or of a data set on the hub; of plain text a file is
one, and a folder of ``.txt`` files holds as many. Empty documents are left out, and counted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from bertvision.errors import InputError, counted
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.features import UnlabelledTask
from bertvision.pipelines.tasks.source import read_text, split_files
from bertvision.pipelines.tasks.tables import (
    FORMS,
    ID,
    Column,
    Layout,
    find_rows,
    offered_splits,
    read_items,
)
from bertvision.pipelines.tasks.windows import Encoded, Int32Array, Windows, encode

log = logging.getLogger(__name__)


def document_windows(
    texts: Sequence[str],
    tokenizer: Any,
    *,
    max_length: int,
    how: Literal["cut", "split", "pack"] = "cut",
) -> Windows:
    """Tokenise documents.

    Args:
        texts: Texts in the order of the data.
        tokenizer: a fast (Rust) tokenizer, whose template places the special tokens.
        max_length: most tokens of a window, special tokens included.
        how: see `TaskConfig.windows`. What is cut off is counted and said.

    Returns:
        The windows, with the token field ``text_row``, the row of the document, unless each is of
        one document whole or cut.

    Raises:
        InputError: ``max_length`` leaves no room for a text, a document makes no token at all, or
            the tokenizer is not a fast one.
    """
    pieces = list(encode(texts, tokenizer, max_length=max_length, pieces=True))
    if how == "cut":
        pieces = _first_pieces(pieces, max_length)
    lengths = np.array([len(piece.ids) for piece in pieces], np.int32)
    documents = np.array([piece.row for piece in pieces], np.int32)
    begins = _filled(lengths, max_length) if how == "pack" else np.arange(len(pieces))
    n_tokens = np.add.reduceat(lengths, begins)
    of_tokens = np.repeat(documents, lengths)
    if how == "pack":
        log.info(
            "%s packed into %s of %d tokens, %.0f %% of which they fill",
            counted(len(texts), "document"),
            counted(len(n_tokens), "window"),
            *(max_length, 100 * n_tokens.mean() / max_length),
        )
    return Windows(
        input_ids=np.concatenate([piece.ids for piece in pieces]),
        token_type_ids=np.concatenate([piece.types for piece in pieces]),
        offset_mapping=np.concatenate([piece.offsets for piece in pieces]),
        n_tokens=n_tokens.astype(np.int32),
        item_index=documents[begins],
        labels={},
        parts=of_tokens if how == "pack" else None,
        token_fields={} if how == "cut" else {"text_row": of_tokens},
    )


def _first_pieces(pieces: Sequence[Encoded], max_length: int) -> list[Encoded]:
    """The first of each document; says how many tokens the others have."""
    begins = np.unique([piece.row for piece in pieces], return_index=True)[1]
    first = [pieces[i] for i in begins]
    cut = set(range(len(pieces))) - set(begins.tolist())
    if cut:
        log.warning(
            "%d of %s have more than %d tokens and are cut off, %s of them; --windows split keeps "
            "them, and --max-length makes room, where the data are first named",
            len({pieces[i].row for i in cut}),
            counted(len(first), "document"),
            *(
                max_length,
                counted(sum(int((pieces[i].offsets[:, 0] >= 0).sum()) for i in cut), "token"),
            ),
        )
    return first


def _filled(lengths: Int32Array, most: int) -> Int32Array:
    """The first piece of each window, where a window takes the next piece while there is room."""
    begins, length = [], most
    for i, n in enumerate(lengths.tolist()):
        if length + n > most:
            begins.append(i)
            length = 0
        length += n
    return np.array(begins, np.int32)


_FORMS = (*FORMS, ".txt")


class Document(NamedTuple):
    """A text, of any length."""

    id: str
    text: str


class TextTask(UnlabelledTask):
    """Documents without labels: a model is looked at alone."""

    item: ClassVar[Any] = Document
    schema: ClassVar[Mapping[str, Any]] = {"id": pa.string(), "text": pa.large_string()}
    words = ("documents", "documents")
    columns = ("text",)
    settings = ("max_length", "windows")

    def splits(self, source: str) -> tuple[str, ...]:
        """The splits of a folder or a data set; ``all`` of a file or a folder of plain texts.

        Raises:
            InputError: it is nothing of this kind.
        """
        if _is_folder_of_texts(source):
            return ("all",)
        return offered_splits(source, self.name, _FORMS)

    def read(self, source: str, split: str, config: TaskConfig) -> TaskData:
        """Read the documents of a split.

        Raises:
            InputError: it is missing or malformed; names file, line and field.
        """
        if _is_folder_of_texts(source):
            return _plain(sorted(Path(source).glob("*.txt")), config)
        path = find_rows(source, split, self.name, _FORMS)
        if path is not None and path.name.removesuffix(".gz").endswith(".txt"):
            return _plain([path], config)
        columns = {"text": Column((config.text or "text",)), "id": ID}
        layout = Layout(columns, hint="name the one of the text with --text")
        return read_items(source, split, self.name, _parsed, layout, skip_bad=config.skip_bad)

    def windows(self, items: Sequence[Document], tokenizer: Any, config: TaskConfig) -> Windows:
        """The windows of documents, as `TaskConfig.windows` says."""
        texts = [item.text for item in items]
        return document_windows(texts, tokenizer, max_length=config.max_length, how=config.windows)


def _parsed(fields: dict[str, Any], name: str) -> Document | None:
    return Document(name, fields["text"]) if fields["text"].strip() else None


def _is_folder_of_texts(source: str) -> bool:
    """Whether a folder has plain texts, and no file that is named for a split."""
    folder = Path(source)
    if not folder.is_dir() or not any(folder.glob("*.txt")):
        return False
    return not any(
        (folder / name).is_file() for names in split_files(_FORMS).values() for name in names
    )


def _plain(paths: Sequence[Path], config: TaskConfig) -> TaskData:
    """Files of plain text, a document each, by their names."""
    items, skipped, digest = [], [], hashlib.sha256()
    for path in paths:
        try:
            text, own = read_text(path)
        except InputError as error:
            if not config.skip_bad:
                raise
            skipped.append(str(error))
            continue
        digest.update(own.encode())
        items.append(Document(path.name, text))
    if not items:
        raise InputError(
            f"{paths[0].parent}: holds no text after skipping {len(skipped)}: {skipped[0]}"
        )
    return TaskData(items, own if len(paths) == 1 else digest.hexdigest(), skipped)
