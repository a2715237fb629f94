"""Where SQuAD's questions come from: a file, or a split of a data set on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertvision.errors import InputError
from bertvision.pipelines.tasks.source import load_hub, read_text
from bertvision.pipelines.tasks.squad.read import SquadData, SquadReader


def read_squad(path: Path, *, skip_bad: bool = False) -> SquadData:
    """Read a SQuAD file.

    Args:
        path: a ``.json`` or ``.json.gz`` file in the form of SQuAD v1.1 or v2.0.
        skip_bad: leave out malformed articles, paragraphs and questions and report them in
            ``skipped``. A file that cannot be read at all, or of which no question is left, is an
            error all the same.

    Raises:
        InputError: the file or a part of it is malformed; names the file, the JSON path and why.
    """
    path = Path(path)
    document, digest = read_json(path)
    with _at(str(path)):
        reader = SquadReader(str(path), skip_bad)
        return reader.finish(reader.document(document), digest)


def load_squad(source: str, split: str, *, skip_bad: bool = False) -> SquadData:
    """Read a SQuAD file or, through ``datasets``, a split of a hub data set.

    Args:
        source: a ``.json`` or ``.json.gz`` file; or a data set with the columns id, question,
            context and answers {text, answer_start} (``squad_v2``, ``squad``), by its hub name or
            as a folder.
        split: the hub split; ``dev`` means the hub's ``validation``. A file is one split.
        skip_bad: as in `read_squad`.

    Raises:
        InputError: the source cannot be loaded, or holds malformed questions.
    """
    path = Path(source)
    if path.is_file() or source.endswith((".json", ".gz")):
        return read_squad(path, skip_bad=skip_bad)
    hub_split = "validation" if split == "dev" else split
    rows = load_hub(source, hub_split, ["answers", "context", "id", "question"])
    where = f"{source} ({hub_split})"
    with _at(where):
        reader = SquadReader(where, skip_bad)
        for i, row in enumerate(rows):
            reader.row(row, f"[{i}]")
        return reader.finish(None, None)


def read_json(path: Path) -> tuple[Any, str]:
    """Parse a ``.json`` or ``.json.gz`` file of UTF-8.

    Returns:
        (what it holds, SHA-256 of the file's bytes in hex).

    Raises:
        InputError: the file cannot be read, decompressed, decoded or parsed.
    """
    text, digest = read_text(path)
    try:
        return json.loads(text), digest
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON that can be read: {error}") from error


@contextmanager
def _at(source: str) -> Iterator[None]:
    """Put the source in front of the message of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from error.__cause__
