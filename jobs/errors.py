"""Where a system errs."""

from __future__ import annotations

from typing import Annotated, Any

from bertvision.jobs.show import Shown, Values, flat_rows
from bertvision.pipelines.declare import Seed, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Tag, parse_tag
from bertvision.pipelines.results.error_analysis import ErrorAnalysis
from bertvision.pipelines.text import format_table
from bertvision.pipelines.workspace.checks import find_workspace


class Errors(Shown, ErrorAnalysis):
    """Where a system errs."""

    def to_json(self) -> dict[str, Any]:
        """The fields as ``--json`` prints them."""
        return ErrorAnalysis.to_json(self)

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

    found = run(
        space,
        system,
        trained_on=source,
        checkpoint=target,
        split=split,
        examples=examples,
        seed=seed,
    )
    return Errors.model_validate(found)


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
    if confused := result["confusions"]:
        rows = [
            [c["gold"], c["answer"], f"{c['n']:,}", f"{c['n'] / c['of']:.1%}"] for c in confused
        ]
        table = format_table(["gold", "taken for", "n", "part of the class"], rows)
        parts.append(f"The classes that are most often taken for another\n\n{table}")
    if cells := result["agreement"]:
        named = {"none": "neither"}
        rows = [
            [named.get(c, c), f"{cells[c]:,}", f"{cells[c] / result['questions']:.1%}"]
            for c in CELLS
        ]
        table = format_table(["who is right", "n", "part"], rows)
        test = f"McNemar's exact test that both err equally often: p = {cells['p']:.2g}"
        parts.append(f"Beside BERT at the same snapshot\n\n{table}\n{test}")
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
    return format_table(
        [grouping, "n", *keys.values()],
        [[row["group"], f"{row['n']:,}", *(f"{row[key]:.1f}" for key in keys)] for row in rows],
    )


def _second(second: Values) -> str:
    """How often the second answer is right, of questions with an answer and without apart.

    Where no answer is right and a text was given, no answer is nearly always what comes second.
    """
    rows = [
        [kind, f"{wrong:,}", f"{right:,}", f"{right / wrong:.1%}"]
        for kind in ("HasAns", "NoAns")
        for wrong, right in [(second[f"first_wrong_{kind}"], second[f"second_right_{kind}"])]
        if wrong
    ]
    table = format_table(["questions", "first wrong", "second right", "part"], rows)
    return (
        f"Where the first answer is wrong, is the second right?\n\n{table}"
        if rows
        else ("The first answer is right everywhere.")
    )


def _example(example: Values, unit: str) -> str:
    answers = {"gold": example["gold"], "answer": example["answer"]}
    answers |= {key: example[key] for key in ("second", "bert") if example.get(key) is not None}
    cell = {"none": "both wrong"}.get(example["cell"], example["cell"])
    lines = [f"{cell}: {example['question']} ({example['id']})"]
    lines += [example["context"]] if example["context"] else []
    lines += [f"{name:<8}{_answer(value)}" for name, value in answers.items()]
    return "\n  ".join([*lines, f"{unit:<8}{example['score']:.0f} %"])


def _answer(value: str | bool | list[str]) -> str:
    if isinstance(value, bool):
        return "answerable" if value else "not answerable"
    return " | ".join(value) or "(no answer)" if isinstance(value, list) else value or "(no answer)"
