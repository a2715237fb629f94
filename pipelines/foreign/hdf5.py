"""An HDF5 file with a data set for each example, as structural probes and speech tools write it.

Structural probes (Hewitt and Manning 2019) name a data set (layers, tokens, hidden) by the number
of its sentence, AllenNLP's ELMo likewise. A group for each example, with ``hidden_states`` (tokens,
layers, hidden) and arrays beside it, is read as a safetensors file of that content would be.

h5py is imported when a file is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.files import check_regular
from bertvision.pipelines.foreign.sample import (
    Sample,
    Source,
    as_layers,
    as_tensor,
    sample_of,
)

SUFFIXES = (".h5", ".hdf5", ".hdf")
_STATES = "hidden_states"
_MOST_UNPACKED = 1_000
"""Bytes of numbers for each stored byte: the most that deflate packs."""


class Hdf5File(Source):
    """The examples of an HDF5 file.

    Args:
        path: The file.
        layers: Number of layers, where the shapes do not tell it; None is not said.

    Raises:
        InputError: h5py is missing, the file is damaged, or its axes cannot be told apart.
    """

    kind = "HDF5"

    def __init__(self, path: Path, layers: int | None = None) -> None:
        self._path, self.bad, self.keys = path, dict[str, str](), list[str]()
        shapes: dict[str, tuple[int, ...]] = {}
        self.longest, self._groups = 0, set[str]()
        with _opened(path) as file:
            if any(not isinstance(name, str) for name in file):
                raise InputError(f"{path} has a name that is not UTF-8: name its data sets anew")
            for name in sorted(file, key=_order):
                try:
                    there = _member(f"{path}: {name}", file, name)
                    if hasattr(there, "keys"):
                        states = _member(f"{path}: {name}/{_STATES}", there, _STATES)
                        if len(getattr(states, "shape", ())) not in (2, 3):
                            raise InputError(
                                f"{path}: {name}/{_STATES} must be a data set (tokens, hidden) or "
                                "(tokens, layers, hidden)"
                            )
                        self._groups.add(name)
                        self.longest = max(self.longest, *states.shape[:1])
                    elif there.dtype.kind != "f":
                        continue  # the sentences, say, or their numbers
                    else:
                        shapes[name] = there.shape
                except InputError as error:
                    self.bad[name] = str(error)
                    continue
                self.keys.append(name)
        if not self.keys and not self.bad:
            raise InputError(
                f"{path} has no data sets of floats: give one (layers, tokens, hidden) for each "
                f"example, or a group for each with {_STATES} (tokens, layers, hidden)"
            )
        self._layers_first = _layers_first(path, shapes, layers)
        for shape in shapes.values():
            axis = 1 if self._layers_first and len(shape) == 3 else 0
            self.longest = max(self.longest, shape[axis] if len(shape) > axis else 0)

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        key = self.keys[position]
        name = f"{self._path}: {key}"
        with _opened(self._path) as file:
            there = _member(name, file, key)
            if key in self._groups:
                members = {each: _member(f"{name}/{each}", there, each) for each in there}
                numbers = {k: _values(v) for k, v in members.items() if _is_array(v)}
                return sample_of(name, {k: as_tensor(v) for k, v in numbers.items()})
            states = as_tensor(_values(there))
        if states.ndim == 3 and self._layers_first:
            states = states.transpose(0, 1)
        return Sample(as_layers(name, states))


def _layers_first(path: Path, shapes: dict[str, tuple[int, ...]], layers: int | None) -> bool:
    """Whether the first of three axes is that of the layers, which is as long in all examples.

    Raises:
        InputError: The shapes do not tell it.
    """
    three = [shape for shape in shapes.values() if len(shape) == 3]
    first, second = ({shape[axis] for shape in three} for axis in (0, 1))
    if not three or len(first) != len(second):
        return len(first) < len(second)
    if (layers in first) != (layers in second) and len(first) == 1:
        return layers in first
    if len(first) > 1:
        raise InputError(
            f"{path} has data sets of {len(first)} different first and {len(second)} different "
            "second axes: of layers there are equally many in each example; give (layers, tokens, "
            "hidden), or a file for each number of layers"
        )
    advice = "; name the layers with --layers, as many as there are"
    if first == second:
        advice = "; give a group for each example, with hidden_states (tokens, layers, hidden)"
    raise InputError(
        f"{path} has data sets of shape {three[0]}, which may be (layers, tokens, hidden) or "
        f"(tokens, layers, hidden){advice}"
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An HDF5 file; errors name it."""
    check_regular(path)
    try:
        import h5py
    except ImportError:
        raise InputError(
            f"{path} is HDF5, and h5py is not installed: `pip install h5py`, or save its arrays as "
            ".npy"
        ) from None
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except InputError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise InputError(f"{path} is damaged, cut off or still being written: {error}") from None


def _member(name: str, group: Any, key: str) -> Any:
    """A data set or a group inside of the file.

    Raises:
        InputError: There is none, it lies elsewhere, or its numbers were never written.
    """
    import h5py

    link = group.get(key, getlink=True) if key in group else None
    if link is None:
        raise InputError(f"{name} is not there: it has {', '.join(sorted(group)) or 'nothing'}")
    if not isinstance(link, h5py.HardLink):
        raise InputError(f"{name} is a link, which may lead out of the file: copy what it names")
    there = group[key]
    if not isinstance(there, h5py.Dataset | h5py.Group):
        raise InputError(f"{name} is a type and holds no values: remove it")
    if isinstance(there, h5py.Dataset) and (there.external or there.is_virtual):
        raise InputError(f"{name} has its values in other files: copy them into this one")
    if isinstance(there, h5py.Dataset) and there.shape is None:
        raise InputError(f"{name} is empty and has no shape: remove it")
    if isinstance(there, h5py.Dataset) and there.size:
        stored = there.id.get_storage_size()
        if there.nbytes > _MOST_UNPACKED * stored:
            raise InputError(
                f"{name} has {there.nbytes:,} bytes of numbers in {stored:,} of the file: it was "
                "not written to its end; write it again"
            )
    return there


def _is_array(there: Any) -> bool:
    return not hasattr(there, "keys") and there.dtype.kind in "biuf"


def _values(there: Any) -> np.ndarray[Any, Any]:
    """The numbers of a data set."""
    values: np.ndarray[Any, Any] = there[()]
    return np.asarray(values)


def _order(name: str) -> tuple[int, str]:
    """By number where there is one, then by name."""
    return int(name) if name.isdigit() and name.isascii() and len(name) < 19 else -1, name
