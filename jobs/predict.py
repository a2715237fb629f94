"""Answers to texts, by an encoder and what was trained on it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from bertvision.errors import InputError, counted
from bertvision.jobs.show import Row, Rows, Values
from bertvision.pipelines.declare import PrecisionOption, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Names, StrPath, parse_names, path_of
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.workspace.data import check_source

_SHOWN = 40
"""Rows of the table on a terminal."""


@job
def predict(
    what: Names,
    *,
    data: Annotated[StrPath | None, Option(decides=False)] = None,
    text: str | None = None,
    text_pair: str | None = None,
    output: Annotated[StrPath | None, Option(decides=False)] = None,
    skip_bad: bool = False,
    precision: PrecisionOption = "auto",
    workspace: WorkspacePath = None,
) -> Rows[Row]:
    """Answer texts with an encoder, heads and ensembles.

    An encoder is run once for all that read its hidden states. Windows, decoding rules and the
    threshold of no answer are those of `bertvision evaluate`. Long files are answered in parts: a
    killed command is finished by the same one.

    Examples:
        >>> import bertvision
        >>> _ = bertvision.train("learned-pooling", checkpoint="1e")
        >>> _ = bertvision.evaluate("learned-pooling", trained_on="1e")
        >>> rows = bertvision.predict(
        ...     ["bert:1e", "learned-pooling:1e"],
        ...     text="Where is it?",
        ...     text_pair="It is in the garden.",
        ... )
        >>> [row.system for row in rows]
        ['bert:1e', 'learned-pooling:1e']

    Args:
        what: bert:1e, heads such as adapter-64-shared:0.3e, ensembles, folders of snapshots, heads
            or predictors, or owner/name on the hub.
        data: File with texts: .csv, .tsv, .jsonl or .parquet with named columns, SQuAD's JSON,
            CoNLL columns, CoNLL-U, or a text on each line; - reads standard input.
        text: A text, or a question, in the place of a file.
        text_pair: Second text of a pair, or the context of the question.
        output: File to write: .jsonl or .csv with a row for each answer; .json with answers by id,
            as in SQuAD; .conll with tags, or .conllu with parses.
        skip_bad: Leave malformed rows out and count them.

    Returns:
        A row for each answer: the system, the id, and the label with its probability and those of
        all classes, the score, the answer with its place in the context, the words with their tags
        and entities or with heads and relations, or the sentences in the order that was found.

    Raises:
        UnknownNameError: there is no such head or snapshot.
        InputError: the data are malformed, or the task of the systems has no texts.
        WorkspaceError: a head or snapshot is damaged.
    """
    names = parse_names(what)
    if (text is None) == (data is None):
        if text is not None or sys.stdin.isatty():
            raise InputError("give --text or --data FILE: one of the two")
        data = "-"
    if text_pair is not None and text is None:
        raise InputError("--text-pair is the second text of --text: give both, or --data")
    target = path_of(output)
    if target is not None:
        check_output(target, len(names))
    check_source("--data", None if data in (None, "-") else str(data))
    from bertvision.pipelines.prediction.source import find_source

    sources = [find_source(name, path_of(workspace)) for name in names]
    from bertvision.pipelines.prediction.answers import answer
    from bertvision.pipelines.prediction.inputs import read_inputs, text_columns
    from bertvision.pipelines.prediction.predictor import (
        Predictor,
        check_alike,
        load_predictors,
    )

    predictors: list[Predictor] = load_predictors(sources, precision)
    first = predictors[0]
    check_alike(predictors)
    if text is not None:
        texts = [text] if text_pair is None else [text, text_pair]
        columns = text_columns(first.layout)
        if len(texts) != len(columns):
            raise InputError(
                f"{first.record.name} answers {' and '.join(columns)}: give --text"
                + (" and --text-pair" if columns[1:] else " alone")
            )
        items = [first.item(dict(zip(columns, texts, strict=True)))]
    else:
        items = read_inputs(first.task, first.record.task, str(data), skip_bad=skip_bad)
    if target is not None:
        check_form(target, first.task.kind)
    table = predicted_table if target is None else partial(written_table, path=target)
    return Rows(map(Row, answer(predictors, items, target)), table)


FORMS = (".jsonl", ".csv", ".json")
_COLUMNS = {"token": ".conll", "tree": ".conllu"}
"""Form in columns of the answers of a task, by its kind."""


def check_form(path: Path, kind: str) -> None:
    """Refuse columns for answers that are not of words, or of another form.

    Args:
        path: Path of the file.
        kind: Kind of the task (`Task.kind`).

    Raises:
        InputError: The answers cannot be written in this form.
    """
    if path.suffix in _COLUMNS.values() and path.suffix != _COLUMNS.get(kind):
        forms = ", ".join([*FORMS, *filter(None, [_COLUMNS.get(kind)])])
        raise InputError(f"--output {path}: answers of this task are written as {forms}")


def check_output(path: Path, systems: int) -> None:
    """Refuse a file that answers cannot be written to.

    Args:
        path: Path of the file.
        systems: Number of systems that answer.

    Raises:
        InputError: Its form is not known, or has no room for several systems.
    """
    forms = (*FORMS, *_COLUMNS.values())
    if path.suffix not in forms:
        raise InputError(f"--output {path}: name it {', '.join(forms)}")
    if path.suffix not in (".jsonl", ".csv") and systems > 1:
        raise InputError(
            f"--output {path}: {path.suffix} has one answer for each id, and there are {systems} "
            "systems: write .jsonl or .csv, or ask one system at a time"
        )
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"--output {path}: give a file in a folder that exists")


def written_table(rows: Sequence[Values], path: Path) -> str:
    """A line on the file that was written."""
    return f"{counted(len(rows), 'answer')} in {path}"


def predicted_table(rows: Sequence[Values]) -> str:
    """The answers, each in a line; of many the first."""
    shown = rows[:_SHOWN]
    names = {row["system"] for row in rows}
    heads = columns("text", system="system") if len(names) > 1 else []
    if rows and "words" in rows[0]:
        lines = [
            "  ".join(
                [*(str(row[column.key]) for column in [*heads, _ID]), words_with_tags(row)],
            )
            for row in shown
        ]
        table = "\n".join(lines)
    else:
        by_key = {"sentences": _ORDER, "answer": _ANSWER}
        columns_shown = next((by_key[key] for key in by_key if rows and key in rows[0]), _LABEL)
        table = table_of(
            [*heads, _ID, *columns_shown],
            [
                {
                    **row,
                    "answer": row.get("answer") or "(no answer)",
                    "text": " ".join(row.get("sentences", ())),
                }
                for row in shown
            ],
        )
    if len(rows) > _SHOWN:
        left = counted(len(rows) - _SHOWN, "answer")
        table += f"\n… and {left} more: --json, --csv FILE or --output FILE have all of them"
    return table


_ID = Column("id", "id", "text")
_LABEL = [Column("label", "label", "text"), Column("score", "score", digits=3)]
_ANSWER = [
    Column("answer", "answer", "text"),
    Column("score", "score", digits=3),
    Column("no_answer", "no answer", digits=3),
]
_ORDER = [Column("answer", "order", "text"), Column("text", "text", "text")]


def words_with_tags(row: Values) -> str:
    """Words of a row, each with its tag behind a slash unless it stands outside of entities.

    Of a parse, the head and the relation stand in the place of the tag: ``Anna/2:nsubj``.
    """
    tags = row["tags"] if "tags" in row else row["answer"].split(" ")
    return " ".join(
        word if tag == "O" else f"{word}/{tag}"
        for word, tag in zip(row["words"], tags, strict=True)
    )
