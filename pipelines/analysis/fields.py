"""The fields of a result, described once: their types, their axes, and what a file may hold.

A result is a frozen dataclass. Its annotations say what each field is, and `Axes` how long: from
these alone comes the model that checks what is read from a disk, value for value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel, Field, create_model

from bertvision.pipelines.files import to_json
from bertvision.pipelines.records import Count, Record

Numbers = Annotated[tuple[Count, ...], Field(min_length=1)]
"""Numbers of layers, of which there is at least one."""
Names = Annotated[tuple[str, ...], Field(min_length=1)]
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
    found = {}
    hints = get_type_hints(result, include_extras=True)
    for field in fields(result):
        hint = hints[field.name]
        bare, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        axes = next((extra.names for extra in extras if isinstance(extra, Axes)), ())
        is_array = get_origin(bare) is np.ndarray
        if is_array and not axes:
            raise TypeError(f"{result.__name__}.{field.name} is an array: name its Axes")
        found[field.name] = _FieldOfResult(hint, axes, is_array)
    return found


@cache
def values_model(result: Any) -> type[BaseModel]:
    """The model of a result's JSON: arrays are lists of numbers, null is NaN.

    Args:
        result: a dataclass.
    """
    defaults = {f.name: ... if f.default is MISSING else f.default for f in fields(result)}
    declared: dict[str, Any] = {
        name: (_nested(len(of.axes)) if of.is_array else of.hint, defaults[name])
        for name, of in described(result).items()
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
    for name, of in described(result).items():
        own = getattr(values, name)
        if not of.axes and isinstance(own, tuple):
            lengths[name] = len(own)
    read = {}
    for name, of in described(result).items():
        value = getattr(values, name)
        for axis, length in zip(of.axes, _lengths(value, len(of.axes)), strict=True):
            for found in length:
                if found != lengths.setdefault(axis, found):
                    raise ValueError(f"{name} has {found} values where {lengths[axis]} belong")
        shape = [lengths.get(axis, 0) for axis in of.axes]
        read[name] = np.array(value, np.float64).reshape(shape) if of.is_array else value
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
