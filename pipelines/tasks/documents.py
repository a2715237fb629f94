"""Rows with named fields, of JSON lines, Parquet, or a data set on the hub.

A source is a file, a folder with ``train``, ``dev`` and perhaps ``test`` in one of `FORMS`, or what
``datasets`` reads: a name on the hub, or a folder of Parquet files of other names.

Documents as windows: one each, consecutive ones, or several documents in one.

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
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bertvision.errors import InputError, counted
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.features import FeaturesTask
from bertvision.pipelines.tasks.source import (
    find_file,
    find_in,
    hub_splits,
    load_hub,
    on_hub,
    read_text,
    splits_in,
    text_lines,
)
from bertvision.pipelines.tasks.windows import TEXTS_AT_ONCE, Int32Array, Windows, require_fast

log = logging.getLogger(__name__)

FORMS = (".jsonl", ".parquet")
SPLITS = ("train", "dev", "test")
_HUB_NAMES = {"validation": "dev"}
_Item = TypeVar("_Item")


class Row(NamedTuple):
    """A row of a source."""

    place: str
    """Where it stands, such as ``line 3``: the name of an item that has no ``id``."""
    fields: dict[str, Any] | InputError
    """By name; or why they cannot be read."""


def offered_splits(source: str, task: str, forms: Sequence[str] = FORMS) -> tuple[str, ...]:
    """The splits that a source offers; ``all`` of a file.

    Args:
        source: path of a file or folder, or a name on the hub.
        task: Task that it is read for.
        forms: Forms of its files.

    Raises:
        InputError: it is nothing of this kind.
    """
    if Path(source).is_file():
        return ("all",)
    if _by_datasets(source, forms):
        return tuple(_HUB_NAMES.get(name, name) for name in hub_splits(source))
    return splits_in(source, {split: _names(split, forms) for split in SPLITS}, task)


def find_rows(source: str, split: str, task: str, forms: Sequence[str] = FORMS) -> Path | None:
    """The file that holds a split; None where ``datasets`` reads it.

    Raises:
        InputError: there is none.
    """
    if not Path(source).is_file() and _by_datasets(source, forms):
        return None
    return find_file(source, _names(split, forms), task)


def read_items(
    source: str,
    split: str,
    path: Path | None,
    columns: Sequence[Sequence[str]],
    parse: Callable[[dict[str, Any], str], _Item | None],
    *,
    skip_bad: bool,
) -> TaskData:
    """Read the rows of a split, each as an item.

    Args:
        source: Source that `find_rows` was asked for.
        split: Split of it.
        path: Path of its file; None asks ``datasets``.
        columns: Columns that are read of a table: the first of these which it has all of. JSON
            lines have each its own.
        parse: makes an item of a row's fields and its name; None of one that holds nothing, and
            `InputError` of one that is malformed.
        skip_bad: Leave malformed rows out, and count them.

    Raises:
        InputError: a row is malformed, two have one ``id``, or none is left.
    """
    rows, digest = _hub(source, split, columns) if path is None else _file(path, columns)
    where = str(path or f"{source} ({split})")
    items: list[Any] = []
    skipped: list[str] = []
    empty, places = 0, dict[str, str]()
    for row in rows:
        try:
            if isinstance(row.fields, InputError):
                raise row.fields
            name = _name(row.fields, row.place)
            if name in places:
                raise InputError(f"the id {name!r} is already that of {places[name]}")
            item = parse(row.fields, name)
        except InputError as error:
            message = f"{where}, {row.place}: {error}"
            if not skip_bad:
                raise InputError(f"{message}. --skip-bad leaves such rows out") from error
            skipped.append(message)
            continue
        if item is None:
            empty += 1
            continue
        places[name] = row.place
        items.append(item)
    if not items:
        why = f" after skipping {len(skipped)}: {skipped[0]}" if skipped else ""
        raise InputError(f"{where}: holds nothing but empty rows{why}")
    if empty:
        log.info("%s: %s left out", where, counted(empty, "empty row"))
    if skipped:
        log.warning("%s left out: %s", counted(len(skipped), "malformed row"), skipped[0])
    return TaskData(items, digest, skipped)


def text_field(fields: dict[str, Any], name: str, option: str = "") -> str:
    """A field that must be there, and be a string of Unicode.

    Raises:
        InputError: it is not.
    """
    if name not in fields:
        raise InputError(f"has the fields {list(fields)}, but not {name!r}{option}")
    if not isinstance(fields[name], str):
        raise InputError(f"{name} must be a string: {str(fields[name])[:80]!r}")
    text = str(fields[name])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} has the lone surrogate {text[error.start]!r} at character {error.start}, "
            "which is no Unicode text"
        ) from error
    return text


def _name(fields: dict[str, Any], place: str) -> str:
    name = fields.get("id")
    if not isinstance(name, str | int | None):
        raise InputError(f"the id {name!r} must be a string or a whole number")
    return place if name in (None, "") else str(name)


def _file(path: Path, columns: Sequence[Sequence[str]]) -> tuple[Iterator[Row], str]:
    form = Path(path.name.removesuffix(".gz")).suffix
    if form == ".jsonl":
        text, digest = read_text(path)
        return _lines(text), digest
    if path.suffix != ".parquet":
        raise InputError(
            f"{path}: its form is not known: name it {' or '.join(FORMS)}, as what it is"
        )
    return _parquet(path, columns), sha256_of_files([path])


def _lines(text: str) -> Iterator[Row]:
    for line in text_lines(text):
        place = f"line {line.number}"
        try:
            fields = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            yield Row(place, InputError(f"is not JSON that can be read: {error}"))
            continue
        good = isinstance(fields, dict)
        yield Row(place, fields if good else InputError("is JSON, but no object"))


def _parquet(path: Path, columns: Sequence[Sequence[str]]) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            wanted, number = _wanted(file.schema_arrow.names, columns, str(path)), 0
            for batch in file.iter_batches(1024, columns=wanted):
                for fields in batch.to_pylist():
                    yield Row(f"row {number}", fields)
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: is no Parquet file that can be read: {error}") from error


def _hub(source: str, split: str, columns: Sequence[Sequence[str]]) -> tuple[Iterator[Row], str]:
    """The rows of a data set, and the digest of what is read of them."""
    named = next((name for name, ours in _HUB_NAMES.items() if ours == split), split)
    data = load_hub(source, named if named in hub_splits(source) else split, ())
    chosen = data.select_columns(_wanted(data.column_names, columns, source))
    digest = hashlib.sha256()
    for fields in chosen:
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
    return (Row(f"row {i}", fields) for i, fields in enumerate(chosen)), digest.hexdigest()


def _wanted(names: Sequence[str], columns: Sequence[Sequence[str]], where: str) -> list[str]:
    """The first of ``columns`` that a table has, and its names of rows.

    Raises:
        InputError: it has none.
    """
    for wanted in columns:
        if set(wanted) <= set(names):
            return [*wanted, *(["id"] if "id" in names and "id" not in wanted else [])]
    raise InputError(f"{where}: has the columns {list(names)}, but not {list(columns[0])}")


def _by_datasets(source: str, forms: Sequence[str]) -> bool:
    """Whether ``datasets`` is to read it: no folder that holds a file of a split by its name."""
    named = [name for split in SPLITS for name in _names(split, forms)]
    return on_hub(source) and not (Path(source).is_dir() and find_in(Path(source), named))


def _names(split: str, forms: Sequence[str]) -> list[str]:
    return [f"{split}{form}" for form in forms]


class _Piece(NamedTuple):
    document: int
    ids: Int32Array  # (tokens,)
    types: Int32Array  # (tokens,)
    offsets: Int32Array  # (tokens, 2)
    special: int


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
    require_fast(tokenizer)
    special = tokenizer.num_special_tokens_to_add()
    if max_length < special + 2:
        raise InputError(
            f"windows of max_length {max_length} leave no room for a text beside {special} special "
            f"tokens: give at least {special + 2}"
        )
    pieces = list(_pieces(texts, tokenizer, max_length))
    if how == "cut":
        pieces = _first_pieces(pieces, max_length)
    lengths = np.array([len(piece.ids) for piece in pieces], np.int32)
    documents = np.array([piece.document for piece in pieces], np.int32)
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
        token_type_ids=np.concatenate([piece.types for piece in pieces]).astype(np.uint8),
        offset_mapping=np.concatenate([piece.offsets for piece in pieces]),
        n_tokens=n_tokens.astype(np.int32),
        item_index=documents[begins],
        labels={},
        parts=of_tokens if how == "pack" else None,
        token_fields={} if how == "cut" else {"text_row": of_tokens},
    )


def _pieces(texts: Sequence[str], tokenizer: Any, max_length: int) -> Iterator[_Piece]:
    """Pieces of documents in one window, in order; only the last one may be shorter."""
    has_types = "token_type_ids" in tokenizer.model_input_names
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        encoded = tokenizer(
            list(texts[start : start + TEXTS_AT_ONCE]),
            padding=False,
            truncation=True,
            max_length=max_length,
            stride=0,
            return_overflowing_tokens=True,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
            verbose=False,
        )
        for i, ids in enumerate(encoded["input_ids"]):
            document = start + int(encoded["overflow_to_sample_mapping"][i])
            if not ids:
                raise InputError(
                    f"document {document} ({texts[document][:40]!r}) makes no token, and the "
                    "tokenizer adds no special one: leave it out of the data"
                )
            special = np.array(encoded["special_tokens_mask"][i], bool)
            offsets = np.array(encoded["offset_mapping"][i], np.int32).reshape(-1, 2)
            offsets[special] = -1
            types = np.array(encoded["token_type_ids"][i], np.int32) * has_types
            yield _Piece(document, np.array(ids, np.int32), types, offsets, int(special.sum()))


def _first_pieces(pieces: Sequence[_Piece], max_length: int) -> list[_Piece]:
    """The first of each document; says how many tokens the others have."""
    begins = np.unique([piece.document for piece in pieces], return_index=True)[1]
    first = [pieces[i] for i in begins]
    cut = set(range(len(pieces))) - set(begins.tolist())
    if cut:
        log.warning(
            "%d of %s have more than %d tokens and are cut off, %s of them; --windows split keeps "
            "them, and --max-length makes room, where the data are first named",
            len({pieces[i].document for i in cut}),
            counted(len(first), "document"),
            *(
                max_length,
                counted(sum(len(pieces[i].ids) - pieces[i].special for i in cut), "token"),
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


class TextTask(FeaturesTask):
    """Documents without labels: a model is looked at alone."""

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
