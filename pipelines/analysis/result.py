"""Results of analyses: labelled arrays, and how they are read.

A result names the axes of its arrays, its columns and its charts once; the table, CSV, JSON,
pandas, xarray, Markdown, LaTeX, the figure, the file that a workspace keeps in ``analysis/`` and
the section of the report follow. `LabelledResult` holds an `xarray.Dataset`, and is all that a new
analysis needs. A result with methods of its own is a frozen dataclass whose annotations say what
each field is, and `Axes` along what; what is read from a disk is checked against them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from pydantic import (
    BaseModel,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    TypeAdapter,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from bertvision.pipelines.files import to_json
from bertvision.pipelines.measurements import read_current
from bertvision.pipelines.plotting import Chart, Figure, Plotted, curves, figure
from bertvision.pipelines.records import Count, Record, read_record
from bertvision.pipelines.results.columns import Column, Kind, latex_of, markdown_of, table_of
from bertvision.pipelines.text import Displayed, fill
from bertvision.pipelines.workspace.config import Tag
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    import xarray as xr


Numbers = Annotated[tuple[Count, ...], Field(min_length=1)]
"""Numbers of layers, of which there is at least one."""
Labels = Annotated[tuple[str, ...], Field(min_length=1)]
"""Names of what stands side by side."""


class Axes(NamedTuple):
    """The axes of an array or of tuples in one another, as a part of the field's annotation.

    An axis that is called like another field of the result is as long as that field; any other is
    as long wherever its name stands.
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, *names: str) -> Axes:
        """The axes with these names, from the outermost."""
        return cls(names)


class _FieldOfResult(NamedTuple):
    """Annotation of a field."""

    hint: Any
    """Its type, with what pydantic reads of the annotation."""
    axes: tuple[str, ...]
    """Names of its axes; none of what is no sequence, or as long as it likes."""
    is_array: bool


@cache
def described(result: Any) -> dict[str, _FieldOfResult]:
    """Annotations of a result's fields by name, in order.

    Raises:
        TypeError: an array has no axes.
    """
    axes_of_field = {}
    hints = get_type_hints(result, include_extras=True)
    for field in fields(result):
        hint = hints[field.name]
        bare, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        axes = next((extra.names for extra in extras if isinstance(extra, Axes)), ())
        is_array = get_origin(bare) is np.ndarray
        if is_array and not axes:
            raise TypeError(f"{result.__name__}.{field.name} is an array: name its Axes")
        axes_of_field[field.name] = _FieldOfResult(hint, axes, is_array)
    return axes_of_field


@cache
def values_model(result: Any) -> type[BaseModel]:
    """The model of a result's JSON: arrays are lists of numbers, null is NaN.

    Args:
        result: a dataclass.
    """
    defaults = {f.name: ... if f.default is MISSING else f.default for f in fields(result)}
    declared: dict[str, Any] = {
        name: (_nested(len(axes.axes)) if axes.is_array else axes.hint, defaults[name])
        for name, axes in described(result).items()
    }
    return create_model(result.__name__, __base__=Record, **declared)


def values_of(result: Any) -> dict[str, Any]:
    """The fields of a result by name, as JSON has them."""
    kind: Any = type(result)  # a class is hashable, which mypy does not see
    return {name: _plain(getattr(result, name)) for name in described(kind)}


def read_fields(result: Any, values: BaseModel) -> dict[str, Any]:
    """The fields of a result out of its `values_model`.

    Raises:
        ValueError: an axis is not as long as it should be; names the field and both lengths.
    """
    lengths: dict[str, int] = {}
    for name, axes in described(result).items():
        own = getattr(values, name)
        if not axes.axes and isinstance(own, tuple):
            lengths[name] = len(own)
    read = {}
    for name, axes in described(result).items():
        value = getattr(values, name)
        for axis, length in zip(axes.axes, _lengths(value, len(axes.axes)), strict=True):
            for count in length:
                if count != lengths.setdefault(axis, count):
                    raise ValueError(f"{name} has {count} values where {lengths[axis]} belong")
        shape = [lengths.get(axis, 0) for axis in axes.axes]
        read[name] = np.array(value, np.float64).reshape(shape) if axes.is_array else value
    return read


def _lengths(value: Any, depth: int) -> Iterator[list[int]]:
    """The lengths of all tuples at each depth."""
    level = [value]
    for _ in range(depth):
        yield [len(part) for part in level]
        level = [inner for part in level for inner in part]


def _nested(depth: int) -> Any:
    """Tuples in one another, of numbers or None."""
    hint: Any = float | None
    for _ in range(depth):
        hint = tuple[hint, ...]
    return hint


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return to_json(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


Kept = Literal["values", "course", "unmeasured"]
"""``values``: the largest deviation from float32 is 1 % of the range over layers at most; `course`:
10 %, so that it is the same where the statistic rises and falls."""


Keeps = Mapping[str, Kept]
"""Accuracy of an analysis on tokens by lossy encoding; ``unmeasured`` where it is missing."""


class Variable(NamedTuple):
    """A variable of a result, its column and its chart.

    Attributes:
        dims: Names of its axes, apart by a space; of a dataclass its fields are the plural.
        label: Header of its column, and name of its values in charts; without one it has no column.
        digits: Decimals in tables.
        sd: Whether the variable ``<name>_sd`` holds a standard deviation of it.
        kind: Kind of its column's values.
        interval: Whether its column shows ``<name>_low`` and ``<name>_high`` too.
        chart: Name of its values in charts, where that is another; empty for no chart.
        field: Field of a dataclass that holds it, where that is called otherwise.
    """

    dims: str
    label: str = ""
    digits: int = 2
    sd: bool = False
    kind: Kind = "number"
    interval: bool = False
    chart: str | None = None
    field: str = ""


class AnalysisResult(Plotted, Displayed):
    """Base of results, which are frozen dataclasses of numbers, texts, tuples and float64 arrays.

    A subclass is read as its class attributes say, and its fields are its JSON. Arrays, and tuples
    with a value for each layer, are annotated with their `fields.Axes`.
    """

    kind: ClassVar[str]
    """The command that makes it, and the first word of its files."""
    heading: ClassVar[str]
    """Heading of its section in the report."""
    caption: ClassVar[str]
    """Caption of its table in the report."""
    reading: ClassVar[str]
    """How its columns are to be read: below the table, and above the section of the report."""
    seen: ClassVar[str]
    """Sentence on what its figure shows."""
    variables: ClassVar[Mapping[str, Variable]] = {}
    """Its variables by their keys in rows, in the order of the columns."""
    named: ClassVar[tuple[str, ...]] = ()
    """Fields with which every row begins."""
    keeps: ClassVar[Keeps] = {}
    noted: ClassVar[tuple[str, ...]] = ()
    """Sentences on the encodings of the splits that were read, where they change what is told."""

    titled: ClassVar[str] = ""
    """Title, with fields in braces, where `title` says nothing else."""

    def title(self) -> str:
        """One line that says what was measured on how much."""
        return self.titled.format(**vars(self))

    def rows(self) -> list[dict[str, Any]]:
        """Rows as ``--csv`` writes them, one for each combination of coordinates; NaN is None."""
        labels = {dim: getattr(self, f"{dim}s") for dim in self._dims()}
        values = {key: getattr(self, v.field or key) for key, v in self.variables.items()}
        return self.listed(labels, values)

    def listed(
        self, labels: Mapping[str, Sequence[Any]], values: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """A row for each combination of labels, with the values that stand there.

        Args:
            labels: Labels of each axis by key, from the outermost.
            values: Array by key, or tuples in one another, with these axes.
        """
        same = {name: getattr(self, name) for name in self.named}
        plain = {key: _plain(value) for key, value in values.items()}
        rows = []
        for place in np.ndindex(*map(len, labels.values())):
            names = zip(labels.items(), place, strict=True)
            row = same | {key: labels_of_axis[i] for (key, labels_of_axis), i in names}
            rows.append(row | {key: reduce(getitem, place, value) for key, value in plain.items()})
        return rows

    def _dims(self) -> Sequence[str]:
        """The axes of all variables together."""
        return next(iter(self.variables.values())).dims.split()

    def columns(self) -> list[Column]:
        """Columns of `shown`, the one that heads its row first: coordinates, then variables."""
        return [
            *(Column(dim, dim, "text") for dim in self._dims()),
            *(
                Column(key, v.label, v.kind, digits=v.digits, sd=v.sd, interval=v.interval)
                for key, v in self.variables.items()
                if v.label
            ),
        ]

    def levels(self) -> Mapping[str, Mapping[str, float]]:
        """Level lines of charts by variable, and by their names."""
        return {}

    def charts(self) -> dict[str, Chart]:
        """Each variable over layers, a line for each combination of the other coordinates."""
        rows, levels, charts = self.rows(), self.levels(), dict[str, Chart]()
        for key, variable in self.variables.items():
            label = variable.label if variable.chart is None else variable.chart
            dims = variable.dims.split()
            if label and "layer" in dims:
                by = [*self.named, *(dim for dim in dims if dim != "layer")]
                over = "samples" if variable.sd else ""
                charts[key] = curves(rows, key, label, by=by, levels=levels.get(key), over=over)
        return charts

    def to_rows(self) -> list[dict[str, Any]]:
        """The same rows, by the name that all results have."""
        return self.rows()

    def shown(self) -> list[dict[str, Any]]:
        """Rows as people read them: of the table, and of the report; `rows`, if nothing else."""
        return self.rows()

    def remarks(self) -> list[str]:
        """Sentences below the table of this result alone."""
        return []

    def footnotes(self) -> list[str]:
        """All sentences below its table, here and in the report: `noted`, then `remarks`."""
        return [*self.noted, *self.remarks()]

    def with_notes(self, notes: Sequence[str]) -> Self:
        """The result, with sentences on the encodings of the splits that it was measured on.

        They are no part of what was measured, so that they are no field.
        """
        object.__setattr__(self, "noted", tuple(notes))
        return self

    def table(self) -> str:
        """Text for a terminal."""
        tables = [
            (f"{name}\n" if name else "") + table_of(columns, rows, stacked=bool(name))
            for name, columns, rows in self.tables()
        ]
        return "\n\n".join([self.title(), *tables, *map(fill, (self.reading, *self.footnotes()))])

    def tables(self) -> list[tuple[str, list[Column], list[dict[str, Any]]]]:
        """Headings, columns and rows of its tables; one without a heading, if nothing else."""
        return [("", self.columns(), self.shown())]

    def drawn(self) -> list[Chart]:
        """The charts of its figure; all that there are, if nothing else is said."""
        return list(self.charts().values())

    def figure(self) -> Figure:
        """The charts of `drawn` below the title, which a notebook shows."""
        return figure(self.title(), self.seen, self.drawn())

    def __repr__(self) -> str:
        return self.table()

    def to_markdown(self) -> str:
        """The table of `shown` in Markdown."""
        return markdown_of(self.columns(), self.shown())

    def to_latex(self) -> str:
        """The table of `shown` as a LaTeX tabular, with the rules of booktabs."""
        return latex_of(self.columns(), self.shown())

    def to_xarray(self) -> xr.Dataset:
        """The fields with axes as variables, those that label axes as coordinates, others as attrs.

        Fields of uneven length are variables of objects.
        """
        import xarray as xr

        fields_, values = described(type(self)), values_of(self)
        axes = {axis for field in fields_.values() for axis in field.axes}
        variables: dict[str, Any] = {}
        for name, field in fields_.items():
            if field.is_array:
                variables[name] = (field.axes, getattr(self, name))
            elif field.axes:
                cells = np.empty(len(values[name]), object)
                cells[:] = values[name]
                with suppress(ValueError):  # of uneven length
                    even = np.array(values[name])
                    cells = even if even.ndim == len(field.axes) else cells
                variables[name] = (field.axes[: cells.ndim], cells)
        coordinates = {name: values[name] for name in fields_ if name in axes}
        rest = {k: v for k, v in values.items() if k not in variables and k not in coordinates}
        return xr.Dataset(variables, coordinates, rest)

    def to_json(self) -> dict[str, Any]:
        """The fields by name; arrays and tuples are lists, NaN is null."""
        return values_of(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The result whose `to_json` these are; arrays are equal to the last bit, null is NaN.

        Args:
            values: Values by the names of the fields.

        Raises:
            ValueError: they are not the fields of such a result; names the first that is wrong.
        """
        text = json.dumps(values, allow_nan=False)
        result: Self = TypeAdapter(cls).validate_json(text, strict=True)
        return result

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """In a record: read from JSON as its fields are described, written as `to_json` says."""
        model = cls._model()
        if model is None:
            return core_schema.is_instance_schema(cls)
        from_file = core_schema.no_info_after_validator_function(
            cls._read, handler.generate_schema(model)
        )
        return core_schema.json_or_python_schema(
            json_schema=from_file,
            python_schema=core_schema.is_instance_schema(cls),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda x: x.to_json()),
        )

    @classmethod
    def _model(cls) -> type[BaseModel] | None:
        """The model of its JSON; None of a base, of which there are no files."""
        return values_model(cls) if is_dataclass(cls) else None

    @classmethod
    def _read(cls, values: Any) -> Self:
        return cls(**read_fields(cls, values))


class _Labelled(Record):
    """The JSON of a `LabelledResult`."""

    title: Annotated[str, Field(min_length=1)]
    coords: dict[str, tuple[int, ...] | tuple[str, ...]]
    variables: dict[str, JsonValue]


class LabelledResult(AnalysisResult):
    """Base of results that hold an `xarray.Dataset` of numbers.

    A subclass says how it is read (`kind`, `heading`, …) and what its `variables` are. Tables have
    a row for each combination of coordinates, charts a line over ``layer`` for each combination of
    the others; a method of the subclass may change either.

    Args:
        dataset: float64 variables with the dims that `variables` names, a coordinate of integers or
            texts for each dim, and the title of the result in ``attrs``.

    Raises:
        ValueError: The dataset has other variables, dims or coordinates.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        dims = {name: tuple(v.dims.split()) for name, v in self.variables.items()}
        dims |= {f"{name}_sd": dims[name] for name, v in self.variables.items() if v.sd}
        given = {str(name): dataset[name].dims for name in dataset.data_vars}
        if given != dims:
            raise ValueError(f"variables and their dims are {given} where {dims} belong")
        if unlabelled := set(dataset.sizes) - set(dataset.coords):
            raise ValueError(f"no coordinate labels {', '.join(sorted(map(str, unlabelled)))}")
        self.dataset = dataset.astype(np.float64)

    def title(self) -> str:
        """One line that says what was measured on how much."""
        return str(self.dataset.attrs["title"])

    def rows(self) -> list[dict[str, Any]]:
        """A row for each combination of coordinates."""
        frame = self.dataset.to_dataframe().reset_index()
        return [
            {str(key): None if value != value else value for key, value in row.items()}
            for row in frame.to_dict("records")
        ]

    def _dims(self) -> Sequence[str]:
        return list(map(str, self.dataset.sizes))

    def to_xarray(self) -> xr.Dataset:
        """The dataset."""
        return self.dataset

    def to_json(self) -> dict[str, Any]:
        """Title, coordinates and variables by name; arrays are lists, NaN is null."""
        return {
            "title": self.title(),
            "coords": {str(k): x.values.tolist() for k, x in self.dataset.coords.items()},
            "variables": {str(k): to_json(x.values) for k, x in self.dataset.data_vars.items()},
        }

    @classmethod
    def _model(cls) -> type[BaseModel] | None:
        return _Labelled

    @classmethod
    def _read(cls, values: Any) -> Self:
        import xarray as xr

        dims = {name: variable.dims.split() for name, variable in cls.variables.items()}
        try:
            variables = {
                name: (dims[name.removesuffix("_sd")], np.array(value, np.float64))
                for name, value in values.variables.items()
            }
            coords = {name: list(labels) for name, labels in values.coords.items()}
            dataset = xr.Dataset(variables, coords, {"title": values.title})
        except (KeyError, TypeError) as error:
            raise ValueError(f"variables are not {', '.join(dims)}: {error}") from None
        return cls(dataset)


FOLDER = "analysis"
"""Where they are, in a workspace."""

R = TypeVar("R", bound=AnalysisResult)


class Analysis(Record, Generic[R]):
    """An analysis of stored activations, and what it is of; ``Analysis[CkaResult]``, for one."""

    command: str
    """The command that makes it."""
    weights_sha256: dict[Tag, str]
    """By snapshot the digest of the weights whose hidden states were read."""
    splits_sha256: dict[str, str] = {}
    """By stored split the digest of its record; none in what earlier versions wrote."""
    files_sha256: dict[str, str] = {}
    """By name the digest of what else was read."""
    settings: dict[str, JsonValue] = {}
    """Settings that decide the result beside the splits."""
    notes: tuple[str, ...] = ()
    """Sentences on the encodings of the splits, where they change what is told."""
    kind: str
    """The kind of its result."""
    result: R

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> Self:
        if self.kind != self.result.kind:
            raise ValueError(f"kind is {self.kind!r} where {self.result.kind!r} belongs")
        self.result.with_notes(self.notes)
        return self

    @property
    def weights(self) -> list[tuple[str, object]]:
        """Snapshots, and the digests of their weights."""
        return list(self.weights_sha256.items())

    def mend(self, path: Path) -> str:
        """See `OfSnapshots`; first what is stored is to be of these weights."""
        if self.files_sha256:  # no stored state is among what was read
            return f"`{self.command}`"
        tags = ",".join(self.weights_sha256)
        return f"`bertvision extract --checkpoint {tags}`, then `{self.command}`"


def read_analysis(path: Path, result: type[R], again: str | None = None) -> Analysis[R]:
    """Read an analysis that a command kept.

    Args:
        path: Path of the file.
        result: class of its result.
        again: the command that makes it, for the messages.

    Raises:
        WorkspaceError: it is missing or damaged; names the field and what to do.
    """
    # mypy takes no class that is known at run time alone
    record: type[Analysis[R]] = Analysis[result]  # type: ignore[valid-type]
    return read_record(path, record, again or f"bertvision {result.kind}")


def read_analyses(
    workspace: Workspace, result: type[R], left_out: list[str]
) -> dict[str, Analysis[R]]:
    """The analyses of a kind that a workspace keeps, by the file inside of it.

    Args:
        workspace: Workspace that they are of.
        result: class of their results.
        left_out: see `read_current`.
    """
    files = (workspace.root / FOLDER).glob(f"{result.kind}-*.json")
    results = read_current(workspace, files, lambda path: read_analysis(path, result), left_out)
    return {
        path.relative_to(workspace.root).as_posix(): analysis for path, analysis in results.items()
    }
