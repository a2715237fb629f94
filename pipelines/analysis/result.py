"""Results of analyses: a table for the eye, rows for CSV and pandas, JSON, a figure.

A result says once what its fields are (`fields`), how its rows are read (`columns`) and which
charts it has. The command, the file that is kept and the section of the report all come from that.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from bertvision.pipelines.analysis.fields import read_fields, values_model, values_of
from bertvision.pipelines.plotting import Chart, Figure, Plotted, figure
from bertvision.pipelines.results.columns import Column, table_of
from bertvision.pipelines.text import fill, html_of

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]


class AnalysisResult(Plotted):
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
    noted: ClassVar[tuple[str, ...]] = ()
    """Sentences on the encodings of the splits that were read, where they change what is told."""

    @abstractmethod
    def title(self) -> str:
        """One line that says what was measured on how much."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Rows as ``--csv`` writes them; what is not a number is None."""

    @abstractmethod
    def columns(self) -> list[Column]:
        """Columns of `shown`, the one that heads its row first."""

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
        """All that is said below its table, here and in the report: `noted`, then `remarks`."""
        return [*self.noted, *self.remarks()]

    def with_notes(self, notes: Sequence[str]) -> Self:
        """The result, with sentences on the encodings of the splits that it was measured on.

        They are no part of what was measured, so that they are no field.
        """
        object.__setattr__(self, "noted", tuple(notes))
        return self

    def table(self) -> str:
        """Text for a terminal."""
        table = table_of(self.columns(), self.shown())
        return "\n\n".join([self.title(), table, *map(fill, (self.reading, *self.footnotes()))])

    def drawn(self) -> list[Chart]:
        """The charts of its figure; all that there are, if nothing else is said."""
        return list(self.charts().values())

    def figure(self) -> Figure:
        """The charts of `drawn` below the title, which a notebook shows."""
        return figure(self.title(), self.seen, self.drawn())

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return html_of(self.table)

    def to_pandas(self) -> pd.DataFrame:
        """A frame of `rows`."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def to_json(self) -> dict[str, Any]:
        """The fields by name; arrays and tuples are lists, NaN is null."""
        return values_of(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The result whose `to_json` these are; arrays are equal to the last bit, null is NaN.

        Args:
            values: by the names of the fields.

        Raises:
            ValueError: they are not the fields of such a result; names the first that is wrong.
        """
        text = json.dumps(values, allow_nan=False)
        found: Self = TypeAdapter(cls).validate_json(text, strict=True)
        return found

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """In a record: read from JSON as its fields are described, written as `to_json` says."""
        if not is_dataclass(cls):  # the base, of which there are no files
            return core_schema.is_instance_schema(cls)

        def read(values: Any) -> AnalysisResult:
            return cls(**read_fields(cls, values))

        from_file = core_schema.no_info_after_validator_function(
            read, handler.generate_schema(values_model(cls))
        )
        return core_schema.json_or_python_schema(
            json_schema=from_file,
            python_schema=core_schema.is_instance_schema(cls),
            serialization=core_schema.plain_serializer_function_ser_schema(values_of),
        )
