"""Answers of predictors to many texts: in parts that a killed process need not make again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bertvision.featurestore.storage.durable import make_folder, write_durably
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.files import write_json, write_text
from bertvision.pipelines.prediction.predictor import Predictor, together
from bertvision.pipelines.progress import progress
from bertvision.pipelines.text import csv_text, flat_rows

_PART = 1_024
"""Items that are answered before their answers are kept."""

Answer = dict[str, Any]


def answer(
    predictors: Sequence[Predictor], items: Sequence[Any], output: Path | None
) -> list[Answer]:
    """Answer items with several predictors.

    Args:
        predictors: Predictors of one task.
        items: Items of the task, without labels.
        output: File that gets the answers; None writes none. Parts are kept beside it until it is
            whole, under a name that begins with a dot.

    Returns:
        The answers, system by system, each with ``system`` and ``id``.

    Raises:
        LockedError: Another process is writing the file.
        DiskSpaceError: The disk is full.
    """
    if output is None:
        return _ordered(predictors, list(_parts(predictors, items, None)))
    output = output.absolute()
    folder = output.with_name(f".{output.name}.parts")
    lock = output.with_name(f".{output.name}.lock")
    with exclusive(lock, f"writing {output.name}"):
        # of other systems or texts, no part is of use
        parts = folder / _digest(predictors, items)
        if folder.is_dir() and not parts.is_dir():
            shutil.rmtree(folder)
        make_folder(parts)
        rows = _ordered(predictors, list(_parts(predictors, items, parts)))
        _write(output, rows, spans=predictors[0].task.kind == "span")
        shutil.rmtree(folder)
        lock.unlink(missing_ok=True)  # while it is held: nobody waits for it
    return rows


def _parts(
    predictors: Sequence[Predictor], items: Sequence[Any], folder: Path | None
) -> Iterator[list[Answer]]:
    """Answers in parts of the items, each part system by system."""
    with progress(len(items), "predict" if items[1:] else None, "item") as bar:
        for begin in range(0, len(items), _PART):
            some = items[begin : begin + _PART]
            file = None if folder is None else folder / f"{begin}.jsonl"
            if file is not None and file.is_file():
                part = [
                    json.loads(line)
                    for line in file.read_text(encoding="utf-8").split("\n")
                    if line
                ]
            else:
                part = [
                    {"system": predictor.record.name, "id": item.id, **row}
                    for predictor, logits in zip(
                        predictors, together(predictors, some), strict=True
                    )
                    for item, row in zip(some, predictor.read(logits), strict=True)
                ]
                if file is not None:
                    write_durably(file, [_lines(part).encode()])
            yield part
            bar.update(len(some))


def _ordered(predictors: Sequence[Predictor], parts: Sequence[Sequence[Answer]]) -> list[Answer]:
    """The answers of parts, system by system."""
    rows: list[Answer] = []
    for i in range(len(predictors)):
        for part in parts:
            count = len(part) // len(predictors)
            rows += part[i * count : (i + 1) * count]
    return rows


def _write(path: Path, rows: Sequence[Answer], *, spans: bool) -> None:
    if path.suffix == ".jsonl":
        write_text(path, _lines(rows))
    elif path.suffix == ".csv":
        write_text(path, csv_text(flat_rows(rows)))
    elif path.suffix in (".conll", ".conllu"):
        write_text(path, "".join(map(_in_columns, rows)))
    else:
        # a score is what it is; a class stands beside the probabilities of all
        names = ("answer", "tags", "label" if "probabilities" in rows[0] else "score")
        key = next(name for name in names if name in rows[0])
        by_id = {row["id"]: row[key] for row in rows}
        if spans:
            unsure = {row["id"]: row["no_answer"] for row in rows}
            write_json(path.with_name(f"{path.stem}.na_prob.json"), unsure)
        write_json(path, by_id)


def _in_columns(row: Answer) -> str:
    """A sentence in columns: of tags the words and these, of a parse CoNLL-U."""
    if "tags" in row:
        lines = [f"{word}\t{tag}" for word, tag in zip(row["words"], row["tags"], strict=True)]
        return "\n".join(lines) + "\n\n"
    lines = [f"# sent_id = {row['id']}", f"# text = {' '.join(row['words'])}"]
    for number, (word, head, relation) in enumerate(
        zip(row["words"], row["heads"], row["relations"], strict=True), 1
    ):
        empty = "_"
        fields = [number, word, *[empty] * 4, empty if head is None else head, relation or empty]
        lines.append("\t".join(map(str, [*fields, empty, empty])))
    return "\n".join(lines) + "\n\n"


def _digest(predictors: Sequence[Predictor], items: Sequence[Any]) -> str:
    """Digest of the systems and of what they are asked."""
    digest = hashlib.sha256("".join(predictor.digest for predictor in predictors).encode())
    for item in items:
        digest.update(repr(item).encode())
    return digest.hexdigest()[:32]


def _lines(rows: Sequence[Answer]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
