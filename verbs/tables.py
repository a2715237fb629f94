"""What the tables of several commands share: their metrics, their cells, names with values."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertvision.pipelines.plotting.charts import Chart, points
from bertvision.pipelines.text import fill, format_table, shorten, size

Values = Mapping[str, Any]


def metric_names(found: Sequence[Values]) -> dict[str, str]:
    """The metrics that occur, with their names for people, in the order of columns."""
    from bertvision.pipelines.tasks.scores import METRICS

    return {key: name for key, name in METRICS.items() if any(key in row for row in found)}


def metric_cells(metrics: Mapping[str, float], keys: Iterable[str]) -> list[str]:
    """A score for each of some metrics."""
    return [number(metrics.get(key)) for key in keys]


def baseline_cells(score: float, keys: Iterable[str]) -> tuple[str, list[str]]:
    """What always giving the commonest answer scores, so that a system that learned nothing shows.

    Args:
        score: of the commonest answer, in per cent: of no answer, or of the largest class.
        keys: of the metrics that are shown.

    Returns:
        What the system is called, and its cells.
    """
    from bertvision.pipelines.tasks.scores import trivial_metrics

    name, metrics = trivial_metrics(score, keys := list(keys))
    return name, metric_cells(metrics, keys)


def meanings(keys: Iterable[str]) -> str:
    """What some of the metrics that are shown mean, to stand behind a legend."""
    from bertvision.pipelines.tasks.scores import MEANINGS

    return "".join(f"  {MEANINGS[key]}" for key in keys if key in MEANINGS)


def marked_scores(name: str, scores: Values) -> str:
    """A system's name, with a mark where its threshold was not tuned.

    Args:
        name: as it is shown.
        scores: the fields of its ``metrics.json``.
    """
    from bertvision.pipelines.results.columns import MARK
    from bertvision.pipelines.tasks.scores import is_untuned

    return name + MARK if is_untuned(scores["rules"], scores["threshold_tuned_on"]) else name


def with_footnote(table: str, names: Iterable[str], rows: Iterable[Values] = ()) -> str:
    """A table of systems, with what `MARK` says below it where one of their names has it.

    Args:
        table: the text.
        names: of the systems.
        rows: their metrics, some of which may lack what others have.
    """
    from bertvision.pipelines.results.columns import FOOTNOTE, MARK, ORACLE_NOTE, lack_oracle

    notes = [FOOTNOTE] if any(name.endswith(MARK) for name in names) else []
    notes += [ORACLE_NOTE] if lack_oracle(rows) else []
    return "\n".join([table, *map(fill, notes)])


def score_charts(rows: Sequence[Values]) -> dict[str, Chart]:
    """Scores of systems as points: a row for each system, a series for each pair of snapshots.

    Several seeds of a system are one point, their mean, with their standard deviation.

    Args:
        rows: of `results`, where seeds are apart, or of `sweep`, where they are together.
    """
    from bertvision.pipelines.tasks.scores import CORRELATIONS

    found: dict[str, Chart] = {}
    for key in ("score", "difference"):
        kept = [row for row in rows if row.get(key) is not None]
        if not kept:
            continue
        names = metric_names(kept)
        metric = next(
            (name for name in names if all(row.get(name) == row["score"] for row in kept)), "score"
        )
        title = names.get(metric, "score")
        unit = "× 100" if metric in CORRELATIONS else "%"
        label = f"{title} ({unit})" if key == "score" else f"{title} less BERT's (points)"
        levels = [row["baseline"] for row in kept if row.get("baseline") is not None]
        level = 0.0 if key == "difference" else levels[0] if levels else None
        drawn, cases = _by_system(kept, key)
        found[key] = points(
            drawn,
            cases,
            label,
            name="name",
            levels={"commonest answer" if key == "score" else "as BERT": level},
            over="seeds",
        )
    return found


def _by_system(rows: Sequence[Values], key: str) -> tuple[list[Values], dict[str, str]]:
    """A row for each system with a column for each pair of snapshots; and these columns."""
    from bertvision.pipelines.results.columns import MARK, marked

    values: dict[tuple[str, str], list[float]] = {}
    deviations: dict[tuple[str, str], float | None] = {}
    for row in rows:
        part = "" if row["fraction"] == 1 else f", {100 * row['fraction']:.4g} % of the data"
        # tuned and untuned seeds have no mean
        name = row["name"] if row["name"].endswith(MARK) else marked(row["name"], row)
        at = (f"{name}{part}", f"{row['trained_on']} → {row['checkpoint']}")
        values.setdefault(at, []).append(row[key])
        deviations[at] = row.get(f"{key}_sd")
    found: dict[str, dict[str, Any]] = {}
    for (name, case), of in values.items():
        sd = statistics.stdev(of) if len(of) > 1 else deviations[name, case]
        found.setdefault(name, {"name": name}).update(
            {case: statistics.fmean(of), f"{case}_sd": sd}
        )
    return list(found.values()), {case: case for _, case in values}


def number(value: float | None, form: str = "{:.1f}") -> str:
    """A number in a form, or a dash where there is none."""
    return "-" if value is None else form.format(value)


def mapping_table(values: Values) -> str:
    """Names and values, nested names joined by dots; bytes as sizes, what is too long cut short."""
    found = _flat("", values)
    used = max((len(name) for name, _ in found), default=0) + 2
    return format_table(["name", "value"], [[k, shorten(_text(k, v), used)] for k, v in found])


def flat_rows(values: Any) -> list[dict[str, Any]]:
    """What ``--json`` prints as rows of a table: names inside of a field follow it with a dot.

    Args:
        values: a mapping, which is one row, or a list of them.
    """
    several = values if isinstance(values, list) else [values]
    return [dict(_flat("", row)) for row in several]


def _flat(prefix: str, values: Values) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        found += _flat(f"{name}.", value) if isinstance(value, Mapping) else [(name, value)]
    return found


def _text(name: str, value: Any) -> str:
    if name.rpartition(".")[2].startswith("bytes") and value is not None:
        return size(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
