"""Inputs of predictors: texts, pairs, questions with their contexts; typed or in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.source import read_text, text_lines
from bertvision.pipelines.tasks.tables import (
    ID,
    MAX_CHARACTERS,
    Collector,
    Layout,
    Row,
    check_text,
    parse_json,
    read_object,
    read_table,
)
from bertvision.pipelines.tasks.task import Task

FORMS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Forms of files of rows with named columns."""
STDIN = "-"
_OF_PIPELINES = {"text": "text", "pair": "text_pair"}
"""Names that the pipelines of transformers give the texts of a sentence task."""


def layout_of(task: Task, config: TaskConfig) -> Layout:
    """The columns that a task reads of what it is asked.

    Args:
        task: Task that answers.
        config: Its settings.

    Raises:
        InputError: Its items are no texts that somebody types.
    """
    columns = {}
    for name, column in task.inputs(config).items():
        usual = _OF_PIPELINES.get(name, name)
        columns[name] = column._replace(names=(*column.names, usual), filled=True)
    names = ", ".join(column.names[0] for column in columns.values() if not column.optional)
    return Layout({**columns, "id": ID}, hint=f"give {names} of each")


def text_columns(layout: Layout) -> list[str]:
    """Names of the texts that an item must have, in their order."""
    return [column.names[0] for column in layout.columns.values() if not column.optional]


def make_item(task: Task, layout: Layout, given: Any, name: str) -> Any:
    """The item of a text, or of texts by name.

    Args:
        task: Task that answers.
        layout: Its columns.
        given: A text, of tasks of one text; or a mapping with the texts, and perhaps an ``id``.
        name: Id of an item that has none of its own.

    Raises:
        InputError: A text is missing, empty, or longer than any that is taken.
    """
    texts = text_columns(layout)
    if isinstance(given, str) and len(texts) == 1:
        given = {texts[0]: given}
    if not isinstance(given, Mapping):
        names = ", ".join(texts)
        raise InputError(f"{str(given)[:80]!r} is no row with {names}: {layout.hint}")
    return _of_fields(task, read_object(dict(given), [layout]), name)


def _of_fields(task: Task, fields: dict[str, Any], name: str) -> Any:
    name = fields.pop("id", None) or name
    for column, text in fields.items():
        if isinstance(text, str):
            check_text(text, f"the {column}", MAX_CHARACTERS)
    return task.unlabelled(fields, name)


def read_inputs(task: Task, config: TaskConfig, source: str, *, skip_bad: bool) -> list[Any]:
    """The items of a file.

    Args:
        task: Task that answers.
        config: Its settings.
        source: File in one of `FORMS`, or of `Task.forms`, such as a ``.json`` file of questions in
            the form of SQuAD, or CoNLL columns, whose labels are not looked at. Any other file, and
            `STDIN`, have a text on each line, or, of pairs and questions, an object of JSON.
        skip_bad: Leave malformed rows out and count them.

    Raises:
        InputError: The file is missing or malformed, or lacks a column.
    """
    layout = layout_of(task, config)
    path = Path(source).expanduser()
    form = Path(path.name.removesuffix(".gz")).suffix
    if source != STDIN and form in task.forms:
        return task.read_unlabelled(path, config.model_copy(update={"skip_bad": skip_bad}))
    if source == STDIN:
        rows = _line_rows(sys.stdin.read(), layout)
    elif form in FORMS:
        rows = read_table(path, layout, forms=FORMS).rows
    elif form == ".json":
        raise InputError(f"{source}: .json is for questions; give .jsonl, an object on each line")
    else:
        rows = _line_rows(read_text(path)[0], layout)
    collected = Collector("standard input" if source == STDIN else source, skip_bad=skip_bad)
    for row in rows:
        with collected.part(row.place):
            collected.take(_of_fields(task, row.fields, row.place), row.place)
    return list(collected.data("").items)


def _line_rows(content: str, layout: Layout) -> Iterable[Row]:
    """A text on each line; of several texts, an object of JSON."""
    (first, *others) = (column for column in layout.columns if column != "id")
    if others:
        return (
            Row(line.number, partial(_read_line, line.text, layout)) for line in text_lines(content)
        )
    name = layout.columns[first].names[0]
    return (
        Row(line.number, partial(read_object, {name: line.text}, [layout]))
        for line in text_lines(content)
    )


def _read_line(line: str, layout: Layout) -> dict[str, Any]:
    if not line.lstrip().startswith("{"):
        raise InputError(f"is no object of JSON: {layout.hint}")
    return read_object(parse_json(line), [layout])


def zipped(
    question: str | Sequence[str] | None, context: str | Sequence[str] | None
) -> dict[str, str] | list[dict[str, str]]:
    """Questions with their contexts, as dicts.

    Raises:
        InputError: One of the two is missing, or their numbers differ.
    """
    if question is None or context is None:
        raise InputError("give a question and a context: one of the two is missing")
    if isinstance(question, str) and isinstance(context, str):
        return {"question": question, "context": context}
    questions = [question] if isinstance(question, str) else list(question)
    contexts = [context] * len(questions) if isinstance(context, str) else list(context)
    if len(questions) != len(contexts):
        raise InputError(
            f"{len(questions)} questions and {len(contexts)} contexts: give one context for each "
            "question, or one for all"
        )
    return [{"question": q, "context": c} for q, c in zip(questions, contexts, strict=True)]
