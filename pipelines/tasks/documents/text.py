"""Documents as data for extraction: ``--task text --data FILE [--text COLUMN] [--windows HOW]``.

A document is a row of JSON lines, of Parquet or of a data set on the hub; of plain text a file is
one, and a folder of ``.txt`` files holds as many. Empty documents are left out, and counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from bertvision.errors import InputError
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.data import TaskData
from bertvision.pipelines.tasks.documents.rows import (
    FORMS,
    find_rows,
    offered_splits,
    read_items,
    text_field,
)
from bertvision.pipelines.tasks.documents.windows import document_windows
from bertvision.pipelines.tasks.features import FeaturesTask
from bertvision.pipelines.tasks.source import read_text
from bertvision.pipelines.tasks.windows import Windows

_FORMS = (*FORMS, ".txt")


class Document(NamedTuple):
    """A text, of any length."""

    id: str
    text: str


class TextTask(FeaturesTask):
    """Documents without labels: a model is looked at alone."""

    words = ("documents", "documents")
    columns = ("text",)
    settings = ("max_length", "windows")

    def splits(self, source: str) -> tuple[str, ...]:
        """Those that a folder or a data set holds; ``all`` of a file or a folder of plain texts.

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
        column = config.text or "text"

        def parse(fields: dict[str, Any], name: str) -> Document | None:
            text = text_field(fields, column, ": name the one of the text with --text")
            return Document(name, text) if text.strip() else None

        return read_items(source, split, path, [[column]], parse, skip_bad=config.skip_bad)

    def check_data(self, items: Sequence[Any], source: str) -> NoReturn:
        """Refuse to be trained on.

        Raises:
            InputError: always.
        """
        self._refuse()

    def windows(self, items: Sequence[Document], tokenizer: Any, config: TaskConfig) -> Windows:
        """The windows of documents, as `TaskConfig.windows` says."""
        texts = [item.text for item in items]
        return document_windows(texts, tokenizer, max_length=config.max_length, how=config.windows)

    def table(self, items: Sequence[Document]) -> pa.Table:
        """Documents as the store's text side, a row each."""
        names = pa.array([item.id for item in items], pa.string())
        return pa.table({"id": names, "text": pa.array([x.text for x in items], pa.large_string())})

    def items_of(self, table: pa.Table) -> list[Document]:
        """The inverse of `table`."""
        return [Document(row["id"], row["text"]) for row in table.to_pylist()]

    def _refuse(self) -> NoReturn:
        raise InputError(
            f"no encoder and no head can be trained on {self.name}, which has no labels: its "
            "hidden states are for `bertvision.ActivationStore` and split.tokens()"
        )


def _is_folder_of_texts(source: str) -> bool:
    """Whether a folder has plain texts, and no file that is named for a split."""
    folder = Path(source)
    if not folder.is_dir() or not any(folder.glob("*.txt")):
        return False
    return not any(
        (folder / f"{s}{form}").is_file() for s in ("train", "dev", "test") for form in _FORMS
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
