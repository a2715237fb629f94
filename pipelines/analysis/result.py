"""What every analysis gives back: a table for the eye, rows for CSV and pandas, JSON, a figure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_origin, get_type_hints

import numpy as np

from bertvision.pipelines.drawing.figures import Figure, titled
from bertvision.pipelines.drawing.svg import Canvas
from bertvision.pipelines.files import to_json

if TYPE_CHECKING:
    import pandas as pd


class AnalysisResult(ABC):
    """Base of results, which are frozen dataclasses of numbers, texts, tuples and float64 arrays.

    A subclass says how it is read; its fields are its JSON.
    """

    seen: ClassVar[str]
    """What one should see in its figure."""

    @abstractmethod
    def title(self) -> str:
        """One line that says what was measured on how much."""

    @abstractmethod
    def table(self) -> str:
        """Text for a terminal."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Rows as ``--csv`` writes them; what is not a number is None."""

    @abstractmethod
    def drawing(self) -> Canvas:
        """What is in its figure."""

    def figure(self) -> Figure:
        """The drawing with its title, which a notebook shows."""
        return titled(self.title(), self.seen, self.drawing())

    def __repr__(self) -> str:
        return self.table()

    def to_pandas(self) -> pd.DataFrame:
        """A frame of `rows`."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def to_json(self) -> dict[str, Any]:
        """The fields by name; arrays and tuples are lists, NaN is null."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The result whose `to_json` these are; arrays are equal to the last bit, null is NaN.

        Args:
            values: by the names of the fields.
        """
        hints = get_type_hints(cls)
        read = {f.name: _read(values[f.name], hints[f.name]) for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**read)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return to_json(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _read(value: Any, hint: Any) -> Any:
    if get_origin(hint) is np.ndarray:
        return np.array(value, np.float64)
    return _tuples(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
