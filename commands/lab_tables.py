"""Tables of ensembles, comparisons and error analyses, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertvision.pipelines.results.bootstrap import format_p
from bertvision.pipelines.results.error_analysis import CELLS
from bertvision.pipelines.tasks.scores import METRICS, headline
from bertvision.pipelines.text import format_table
from bertvision.pipelines.workspace.reproduce import ensemble_name


def ensemble_table(result: Mapping[str, Any]) -> str:
    """The members and their combination, with the metrics that all have."""
    systems = ["BERT" if run == "bert" else run for run in result["members"]]
    systems.append(ensemble_name(result["members"], result["combine"]))
    metrics = [headline(part["rules"]) for part in (*result["parts"], result)]
    shown = [name for name in METRICS if all(name in m for m in metrics)]
    return format_table(
        ["system", *(METRICS[name] for name in shown)],
        [
            [system, *(f"{m[name]:.1f}" for name in shown)]
            for system, m in zip(systems, metrics, strict=True)
        ],
    )


def compare_table(result: Mapping[str, Any]) -> str:
    """Both scores, the difference with its interval and p, and what it says."""
    table = format_table(
        ["system", METRICS[result["metric"]]],
        [
            [result["first"], f"{result['first_score']:.2f}"],
            [result["second"], f"{result['second_score']:.2f}"],
            ["difference", f"{result['difference']:+.2f}"],
        ],
    )
    interval = f"{result['low']:+.2f} to {result['high']:+.2f}"
    p = format_p(result["p"], result["resamples"])
    return f"{table}\n\n95 % interval  {interval}\np              {p}\n\n{result['sentence']}"


def errors_table(result: Mapping[str, Any]) -> str:
    """Groups with their scores, the second answer, agreement with BERT, and the examples."""
    parts = [
        _groups(grouping, rows, result["metrics"]) for grouping, rows in result["groups"].items()
    ]
    if (second := result["second"]) and second["first_wrong"]:
        parts.append(
            f"where the first answer is wrong ({second['first_wrong']:,} questions), the second is "
            f"right in {second['percent']:.1f} %: {second['second_right_HasAns']:,} HasAns, "
            f"{second['second_right_NoAns']:,} NoAns"
        )
    if confused := result["confusions"]:
        rows = [
            [c["gold"], c["answer"], f"{c['n']:,}", f"{c['n'] / c['of']:.1%}"] for c in confused
        ]
        parts.append(format_table(["gold", "taken for", "n", "part of the class"], rows))
    if cells := result["agreement"]:
        rows = [[c, f"{cells[c]:,}", f"{cells[c] / result['questions']:.1%}"] for c in CELLS]
        table = format_table(["right, beside BERT", "n", "part"], rows)
        parts.append(f"{table}\nMcNemar's exact test: p = {cells['p']:.2g}")
    parts += [_example(example) for example in result["examples"]]
    return "\n\n".join(parts)


def _groups(grouping: str, rows: list[dict[str, Any]], metrics: list[str]) -> str:
    sides = {"": "", "bert_": "BERT "} if f"bert_{metrics[0]}" in rows[0] else {"": ""}
    keys = {f"{key}{m}": f"{side}{METRICS[m]}" for key, side in sides.items() for m in metrics}
    return format_table(
        [grouping, "n", *keys.values()],
        [[row["group"], f"{row['n']:,}", *(f"{row[key]:.1f}" for key in keys)] for row in rows],
    )


def _example(example: Mapping[str, Any]) -> str:
    answers = {"gold": example["gold"], "answer": example["answer"]}
    answers |= {key: example[key] for key in ("second", "bert") if example.get(key) is not None}
    lines = [f"{example['cell']}: {example['question']} ({example['id']})"]
    lines += [example["context"]] if example["context"] else []
    lines += [f"{name:<8}{_answer(value)}" for name, value in answers.items()]
    return "\n  ".join([*lines, f"{'score':<8}{example['score']:.0f}"])


def _answer(value: str | bool | list[str]) -> str:
    if isinstance(value, bool):
        return "answerable" if value else "not answerable"
    return " | ".join(value) or "(no answer)" if isinstance(value, list) else value or "(no answer)"
