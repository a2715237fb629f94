"""Results of jobs: a list or a record to Python, a table to the eye, a frame to pandas."""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Protocol,
    SupportsIndex,
    TypeVar,
    overload,
)

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

from bertvision.errors import InputError, did_you_mean
from bertvision.pipelines.plotting import Chart, Plotted, points
from bertvision.pipelines.results.columns import (
    MARK,
    Column,
    columns,
    footnotes,
    marked,
    table_of,
)
from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.text import Displayed, fill, flat_rows, format_table, shorten, size

Values = Mapping[str, Any]


class Result(Protocol):
    """A result of a job: its text is the command's table, its JSON what ``--json`` prints."""

    def to_json(self) -> Any:
        """The result as lists, dicts, texts and numbers."""


R = TypeVar("R", bound=Result, covariant=True)


class Row(Mapping[str, Any]):
    """One row of a table: values by name, as attributes and by key; names depend on the task.

    Examples:
        >>> import bertvision
        >>> row = bertvision.results()[0]
        >>> row.name, row["checkpoint"], 0 <= row.f1 <= 100
        ('BERT', '0.5e', True)
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name in Row.__slots__ or name not in self._values:
            values = {} if name in Row.__slots__ else self._values
            hint = did_you_mean(name, values)
            raise AttributeError(f"the row has no {name!r}: {hint}it has {', '.join(values)}")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a row is not changed: {name!r} cannot be set")

    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (self._values,)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def to_json(self) -> dict[str, Any]:
        """Values by name."""
        return dict(self._values)


class Rows(Sequence[R], Plotted, Displayed, Generic[R]):
    """Several results, in order: a list to Python, a table where it is shown.

    Examples:
        >>> import bertvision
        >>> rows = bertvision.extract("1e", split="dev", pool="max")
        >>> len(rows), rows[0].examples
        (1, 24)
        >>> print(str(rows).splitlines()[0].split("  ")[0])
        split
        >>> list(rows.to_pandas().columns)[:3]
        ['tag', 'split', 'examples']
    """

    def __init__(
        self,
        rows: Iterable[R],
        table: Callable[[Sequence[Values]], str] | None = None,
        charts: Callable[[Sequence[Values]], Mapping[str, Chart]] | None = None,
    ) -> None:
        self._rows, self._table, self._charts = tuple(rows), table or plain_table, charts

    @overload
    def __getitem__(self, index: SupportsIndex) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[R]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> R | Rows[R]:
        if isinstance(index, slice):
            return Rows(self._rows[index], self._table, self._charts)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return self._table(self.to_json())

    def charts(self) -> Mapping[str, Chart]:
        """Charts by measure, of scores and probes.

        Raises:
            InputError: the rows are neither.
        """
        if self._charts is None:
            raise InputError(
                "these rows are drawn by nothing of bertvision: `to_pandas()` gives a frame, whose "
                "`plot` draws columns; results, sweep and probe give rows with figures"
            )
        return self._charts(self.to_json())

    def to_json(self) -> list[Any]:
        """The rows as ``--json`` prints them."""
        return [row.to_json() for row in self._rows]

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows as ``--csv`` writes them; names inside of a field follow it with a dot."""
        return flat_rows(self.to_json())


class Shown(Displayed):
    """Base of a single result: its text is what the command prints."""

    rows_in: ClassVar[str] = "rows"
    """The field that holds its rows; a result without that field is one row itself."""

    if TYPE_CHECKING:  # the other base of a result has it

        def to_json(self) -> dict[str, Any]:
            """The fields as ``--json`` prints them."""

    @abstractmethod
    def table(self, values: Values) -> str:
        """The text that the command prints.

        Args:
            values: the fields, as `to_json` gives them.
        """

    def to_rows(self) -> list[dict[str, Any]]:
        """Rows as ``--csv`` writes them; names inside of a field follow it with a dot."""
        values = self.to_json()
        return flat_rows(values.get(self.rows_in, values))

    def __repr__(self) -> str:
        return self.table(self.to_json())

    __str__ = __repr__


class ShownRecord(Shown, BaseModel):
    """A result whose fields are those of ``--json``."""

    model_config = ConfigDict(
        frozen=True, extra="allow", protected_namespaces=(), arbitrary_types_allowed=True
    )

    def to_json(self) -> dict[str, Any]:
        """The fields as ``--json`` prints them."""
        return self.model_dump(mode="json", exclude_unset=True)


def plain_table(rows: Sequence[Values]) -> str:
    """A table of all fields of the first rows, texts shortened; see `_FIRST` and `_WIDEST`."""
    if not rows:
        return "no rows"
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_cell(row.get(name)) for name in names] for row in rows[:_FIRST]]
    rest = f"\n… {len(rows):,} rows in all" if len(rows) > _FIRST else ""
    return format_table(names, lines) + rest


_FIRST, _WIDEST = 10, 40


def _cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        value = " | ".join(map(str, value))
    text = f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 2]} …"


def _rows(values: Any) -> Any:
    return values if isinstance(values, Rows) else Rows(map(Row, values))


RowsField = Annotated[
    Rows[Row], BeforeValidator(_rows), PlainSerializer(lambda rows: rows.to_json())
]
"""Rows inside of a result, made of a list of dicts."""


def metric_names(rows: Sequence[Values]) -> dict[str, str]:
    """The metrics that occur, with their names for people, in the order of columns."""
    return {key: m.label for key, m in METRICS.items() if any(key in row for row in rows)}


def score_columns(rows: Sequence[Values]) -> list[Column]:
    """A column for each metric that occurs, with its deviation over seeds or its interval."""
    return [Column(key, label, sd=True, interval=True) for key, label in metric_names(rows).items()]


def meanings(shown: Iterable[Column]) -> str:
    """Explanations of the metrics among the columns, to follow a legend."""
    metrics = (METRICS[column.key] for column in shown if column.key in METRICS)
    return "".join(f"  {metric.meaning}" for metric in metrics if metric.meaning)


def marked_scores(name: str, scores: Values) -> str:
    """A system's name, with a mark where its threshold was not tuned.

    Args:
        name: Name as it is shown.
        scores: the fields of its ``metrics.json``.
    """
    from bertvision.pipelines.tasks.scores import is_untuned

    return name + MARK if is_untuned(scores["rules"], scores["threshold_tuned_on"]) else name


def systems_table(
    shown: Sequence[Column], rows: Sequence[Values], baseline: float | None = None
) -> str:
    """A table of systems, the commonest answer below them, and what marks in it mean.

    Args:
        shown: Columns; the first has the names of the systems.
        rows: Systems, with their metrics among the values.
        baseline: Score of the commonest answer, in per cent: of no answer, or of the largest class;
            None leaves it out.
    """
    from bertvision.pipelines.tasks.scores import trivial_metrics

    lines = [*rows]
    if baseline is not None:
        name, metrics = trivial_metrics(baseline, [column.key for column in shown])
        lines.append({shown[0].key: name, **metrics})
    return "\n".join([table_of(shown, lines), *map(fill, footnotes(shown, rows))])


FRACTION = Column("fraction", "part of data", form="{:.4g}")
PLACES = columns("text", trained_on="trained on", checkpoint="evaluated on")
DIFFERENCE = Column("difference", "− BERT", "signed")


def score_charts(rows: Sequence[Values]) -> dict[str, Chart]:
    """Scores of systems as points: a row for each system, a series for each pair of snapshots.

    Several seeds of a system are one point, their mean, with their standard deviation.

    Args:
        rows: Rows of `results`, where seeds are apart, or of `sweep`, where they are together.
    """
    charts: dict[str, Chart] = {}
    for key in ("score", "difference"):
        scored_rows = [row for row in rows if row.get(key) is not None]
        if not scored_rows:
            continue
        names = metric_names(scored_rows)
        metric = next(
            (name for name in names if all(row.get(name) == row["score"] for row in scored_rows)),
            "score",
        )
        title = names.get(metric, "score")
        unit = METRICS[metric].unit if metric in METRICS else "%"
        label = f"{title} ({unit})" if key == "score" else f"{title} less BERT's (points)"
        levels = [row["baseline"] for row in scored_rows if row.get("baseline") is not None]
        level = 0.0 if key == "difference" else levels[0] if levels else None
        drawn, cases = _by_system(scored_rows, key)
        charts[key] = points(
            drawn,
            cases,
            label,
            name="name",
            levels={"commonest answer" if key == "score" else "as BERT": level},
            over="seeds",
        )
    return charts


def _by_system(rows: Sequence[Values], key: str) -> tuple[list[Values], dict[str, str]]:
    """A row for each system with a column for each pair of snapshots; and these columns."""
    values: dict[tuple[str, str], list[float]] = {}
    deviations: dict[tuple[str, str], float | None] = {}
    for row in rows:
        part = "" if row["fraction"] == 1 else f", {100 * row['fraction']:.4g} % of the data"
        # tuned and untuned seeds have no mean
        name = row["name"] if row["name"].endswith(MARK) else marked(row["name"], row)
        at = (f"{name}{part}", f"{row['trained_on']} → {row['checkpoint']}")
        values.setdefault(at, []).append(row[key])
        deviations[at] = row.get(f"{key}_sd")
    by_system: dict[str, dict[str, Any]] = {}
    for (name, case), value in values.items():
        sd = statistics.stdev(value) if len(value) > 1 else deviations[name, case]
        by_system.setdefault(name, {"name": name}).update(
            {case: statistics.fmean(value), f"{case}_sd": sd}
        )
    return list(by_system.values()), {case: case for _, case in values}


def mapping_table(values: Values) -> str:
    """Names and values, nested names joined by dots; bytes as sizes, what is too long cut short."""
    (row,) = flat_rows(values)
    pairs = row.items()
    used = max((len(name) for name, _ in pairs), default=0) + 2
    return format_table(["name", "value"], [[k, shorten(_text(k, v), used)] for k, v in pairs])


def _text(name: str, value: Any) -> str:
    if name.rpartition(".")[2].startswith("bytes") and value is not None:
        return size(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
