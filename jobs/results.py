"""Results: every score of a workspace, a system's answers and errors, the report's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from bertvision.errors import InputError
from bertvision.jobs.show import (
    DIFFERENCE,
    FRACTION,
    PLACES,
    Row,
    Rows,
    Shown,
    Values,
    score_charts,
    score_columns,
    systems_table,
)
from bertvision.pipelines.declare import Seed, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import StrPath, Tag, parse_tag
from bertvision.pipelines.results.columns import Column, columns, marked, table_of
from bertvision.pipelines.results.error_analysis import ErrorAnalysis
from bertvision.pipelines.text import flat_rows, format_table
from bertvision.pipelines.workspace.checks import find_workspace
from bertvision.pipelines.workspace.workspace import Workspace


def results(*, split: str = "dev", workspace: StrPath | None = None) -> Rows[Row]:
    """Every score of a workspace: BERT, heads and ensembles, seeds apart, as in the report.

    Examples:
        >>> import bertvision
        >>> frame = bertvision.results().to_pandas()
        >>> list(frame.name + " " + frame.checkpoint)
        ['BERT 0.5e', 'BERT 1e']

    Args:
        split: Split that was scored.
        workspace: folder of the experiment; by default the one you stand in.

    Returns:
        A row for each result: ``system`` (bert, quantised, head or ensemble), ``name``, ``run``,
        ``trained_on``, ``checkpoint``, ``fraction``, ``seed``, the task's ``score`` and every
        metric in per cent, ``difference`` from BERT at the snapshot scored on, costs, ``file`` and
        ``command``.

    Raises:
        WorkspaceError: a file is damaged; the message names it.
    """
    space = find_workspace(workspace)
    from bertvision.pipelines.results.rows import read_rows

    return Rows(map(Row, read_rows(space, split).runs), results_table, score_charts)


def predictions(
    system: str,
    *,
    trained_on: Tag | None = None,
    checkpoint: Tag | None = None,
    split: str = "dev",
    workspace: StrPath | None = None,
) -> Rows[Row]:
    """A scored system's answer to every item of a split, with the gold answer and the score.

    Examples:
        >>> import bertvision
        >>> answers = bertvision.predictions("bert:1e")
        >>> answers[0].question, answers[0].gold
        ('when was david born ?', ['1901'])
        >>> worst = answers.to_pandas().sort_values("f1").head()

    Args:
        system: System, as for `compare`: ``NAME[:TRAINED_ON[:CHECKPOINT]]``.
        trained_on: snapshot the head was trained on, where several are possible.
        checkpoint: snapshot it was scored on, likewise.
        split: Split that was scored.
        workspace: folder of the experiment; by default the one you stand in.

    Returns:
        A row for each item in the order of the data: ``id``; ``question`` and ``context``, or
        ``text`` and ``pair``; ``gold``, of spans a list of texts that is empty where there is no
        answer; ``answer``; and in per cent ``f1`` and ``exact`` of spans, ``accuracy`` of classes
        and of yes or no, nothing of a task that predicts a number.

    Raises:
        UnknownNameError: the system was not scored, or several are meant.
        WorkspaceError: predictions are missing, damaged or of other data.
    """
    source = None if trained_on is None else parse_tag(trained_on)
    target = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(workspace)
    from bertvision.pipelines.results.answers import answer_rows
    from bertvision.pipelines.results.results import read_results
    from bertvision.pipelines.results.systems import find_system

    scored = read_results(space, split)
    result = find_system(scored, system, trained_on=source, checkpoint=target, split=split)
    return Rows(map(Row, answer_rows(space, result)))


@job
def table(
    name: str | None = None,
    *,
    beside: Annotated[Sequence[StrPath] | None, Option(flag="--with", several=True)] = None,
    split: str = "dev",
    workspace: WorkspacePath = None,
) -> Rows[Row]:
    """Print a table of the report.

    Scores, snapshots against each other, parts of the data, probes and others; rows of several
    workspaces say which data they are of, by its digest.

    Examples:
        >>> import bertvision
        >>> {"learning_curve", "costs", "results"} <= {row.table for row in bertvision.table()}
        True
        >>> bertvision.table("learning_curve").to_pandas().checkpoint.to_list()
        ['0.5e', '1e']

    Args:
        name: Table of the report; by default the names of all.
        beside: Another workspace, whose rows stand beside; may be repeated.
        split: Split that was scored, or NAME-SPLIT of an added data set; the tables of another
            split than dev are of scores alone.

    Raises:
        UnknownNameError: a workspace has no such table.
        InputError: ``beside`` without a name, or the same workspace twice.
        WorkspaceError: there are no results, or a file that many results need is damaged.
    """
    space = find_workspace(workspace)
    others = [find_workspace(other) for other in beside or ()]
    _check_beside(name, space, others)
    from bertvision.pipelines.report.build import find_table, read_tables

    if name is None:
        tables = read_tables(space, split=split, intervals=False).values()
        rows = [{"table": t.name, "rows": len(t.rows), "title": t.title} for t in tables]
        listed: Rows[Row] = Rows(map(Row, rows), _list_of_tables)
    else:
        shown = find_table(space, name, others, split)
        listed = Rows(
            [Row({key: row.get(key) for key in shown.keys()}) for row in shown.rows],  # noqa: SIM118
            lambda rows: replace(shown, rows=rows).text(),
        )
    return listed


def _check_beside(name: str | None, space: Workspace, others: Sequence[Workspace]) -> None:
    if others and name is None:
        raise InputError(
            f"--with {others[0].root}: name the table that its rows are to stand in; `bertvision "
            "table` alone lists the names"
        )
    seen = {space.root.resolve()}
    for root in (other.root.resolve() for other in others):
        if root in seen:
            raise InputError(f"--with {root}: this workspace is named twice; name each once")
        seen.add(root)


def _list_of_tables(rows: Sequence[Values]) -> str:
    table, title = columns("text", table="table", title="what")
    return table_of([table, Column("rows", "rows", "count"), title], rows)


def results_table(rows: Sequence[Values]) -> str:
    """Systems with their scores, and the difference from BERT."""
    shown = [Column("name", "system", "text"), FRACTION, Column("seed", "seed", "count"), *PLACES]
    shown += [*score_columns(rows), DIFFERENCE]
    baseline = next((r["baseline"] for r in rows if r["baseline"] is not None), None)
    return systems_table(shown, [{**r, "name": marked(r["name"], r)} for r in rows], baseline)


class Errors(Shown, ErrorAnalysis):
    """Where a system errs."""

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each group of each grouping."""
        groups = self.to_json()["groups"].items()
        return [{"grouping": by, **row} for by, rows in groups for row in flat_rows(rows)]

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return errors_table(values)


@job
def error_analysis(
    system: str,
    *,
    trained_on: Tag | None = None,
    checkpoint: Tag | None = None,
    examples: Annotated[int, Option(ge=0)] = 3,
    seed: Seed = 0,
    split: str = "dev",
    workspace: WorkspacePath = None,
) -> Errors:
    """Show where a system errs, by groups and examples.

    BERT at the same snapshot stands beside.

    Examples:
        >>> import bertvision
        >>> sorted(bertvision.error_analysis("bert:1e").groups)[:2]
        ['answer', 'answer length (words)']

    Args:
        system: System as for `bertvision compare`: NAME[:SNAPSHOT].
        trained_on: Snapshot the head was trained on.
        checkpoint: Snapshot it was scored on.
        examples: Examples shown of each kind.
        seed: Seed of the choice of examples.
        split: Split that was scored.

    Raises:
        UnknownNameError: the system was not scored, or several are meant.
        InputError: it predicts scores, which are neither right nor wrong.
        WorkspaceError: predictions or logits are missing, damaged or of other data.
    """
    source = None if trained_on is None else parse_tag(trained_on)
    target = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(workspace)
    from bertvision.pipelines.results.error_analysis import errors as run

    analysis = run(
        space,
        system,
        trained_on=source,
        checkpoint=target,
        split=split,
        examples=examples,
        seed=seed,
    )
    return Errors.model_validate(analysis)


def errors_table(result: Values) -> str:
    """Groups with their scores, the second answer, agreement with BERT, and the examples."""
    from bertvision.pipelines.results.error_analysis import CELLS, MOST_CLASSES
    from bertvision.pipelines.tasks.metrics import METRICS

    parts = [f"{result['system']} on {result['split']}: scores in per cent of groups of items"]
    parts += [
        _groups(grouping, rows, result["metrics"])
        for grouping, rows in result["groups"].items()
        if len(rows) > 1  # one group is the whole
    ]
    if (second := result["second"]) and "first_wrong_HasAns" in second:
        parts.append(_second(second))
    if (matrix := result["confusion_matrix"]) and len(matrix["classes"]) <= MOST_CLASSES:
        parts.append(_matrix(matrix["classes"], matrix["counts"]))
    share = Column("share", "part", form="{:.1%}")
    if confused := result["confusions"]:
        rows = [{**c, "share": c["n"] / c["of"]} for c in confused]
        shown = [*columns("text", gold="gold", answer="taken for"), Column("n", "n", "count")]
        table = table_of([*shown, replace(share, label="part of the class")], rows)
        parts.append(f"The classes that are most often taken for another\n\n{table}")
    if cells := result["agreement"]:
        rows = [
            {
                "who": "neither" if cell == "none" else cell,
                "n": cells[cell],
                "share": cells[cell] / result["questions"],
            }
            for cell in CELLS
        ]
        who = [Column("who", "who is right", "text"), Column("n", "n", "count"), share]
        test = f"McNemar's exact test that both err equally often: p = {cells['p']:.2g}"
        parts.append(f"Beside BERT at the same snapshot\n\n{table_of(who, rows)}\n{test}")
    unit = METRICS[result["metrics"][0]].label
    if result["examples"]:
        parts.append("Examples")
    parts += [_example(example, unit) for example in result["examples"]]
    return "\n\n".join(parts)


def _matrix(classes: list[str], counts: list[list[int]]) -> str:
    lines = [[name, *(f"{n:,}" for n in row)] for name, row in zip(classes, counts, strict=True)]
    table = format_table(["gold \\ answer", *classes], lines, stacked=True)
    return f"How often each class (a row) is taken for each (a column)\n\n{table}"


def _groups(grouping: str, rows: list[dict[str, Any]], metrics: list[str]) -> str:
    from bertvision.pipelines.tasks.metrics import METRICS

    sides = {"": "", "bert_": "BERT "} if f"bert_{metrics[0]}" in rows[0] else {"": ""}
    keys = {
        f"{key}{m}": f"{side}{METRICS[m].label}" for key, side in sides.items() for m in metrics
    }
    if any(row.get("trivial") for row in rows):  # which earlier versions did not record
        keys["trivial"] = "never answering" if "f1" in metrics else "majority class"
    shown = [Column("group", grouping, "text"), Column("n", "n", "count")]
    shown += [Column(key, label) for key, label in keys.items()]
    return table_of(shown, rows)


def _second(second: Values) -> str:
    """How often the second answer is right, of questions with an answer and without apart.

    Where no answer is right and a text was given, no answer is nearly always what comes second.
    """
    rows = [
        {"kind": kind, "wrong": wrong, "right": right, "share": right / wrong}
        for kind in ("HasAns", "NoAns")
        for wrong, right in [(second[f"first_wrong_{kind}"], second[f"second_right_{kind}"])]
        if wrong
    ]
    if not rows:
        return "The first answer is right everywhere."
    shown = [Column("kind", "questions", "text")]
    shown += columns("count", wrong="first wrong", right="second right")
    shown.append(Column("share", "part", form="{:.1%}"))
    return f"Where the first answer is wrong, is the second right?\n\n{table_of(shown, rows)}"


def _example(example: Values, unit: str) -> str:
    answers = {"gold": example["gold"], "answer": example["answer"]}
    answers |= {key: example[key] for key in ("second", "bert") if example.get(key) is not None}
    cell = {"none": "both wrong"}.get(example["cell"], example["cell"])
    lines = [f"{cell}: {example['question']} ({example['id']})"]
    lines += [example["context"]] if example["context"] else []
    width = max(8, len(unit) + 1)
    lines += [f"{name:<{width}}{_answer(value)}" for name, value in answers.items()]
    return "\n  ".join([*lines, f"{unit:<{width}}{example['score']:.0f} %"])


def _answer(value: str | bool | list[str]) -> str:
    if isinstance(value, bool):
        return "answerable" if value else "not answerable"
    return " | ".join(value) or "(no answer)" if isinstance(value, list) else value or "(no answer)"
