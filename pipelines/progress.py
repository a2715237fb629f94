"""Progress with rate and time left on stderr or in a notebook, for people and for log files.

Jobs that do many things one after another, such as splits of several snapshots, name these with
`parts`: a bar then also says which of how many it is, and how long all of them will take.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm as auto_tqdm

if TYPE_CHECKING:
    from tqdm import tqdm

    _Tqdm = tqdm[Any]
else:
    _Tqdm = auto_tqdm

NOTEBOOK = any(kind.__module__ == "tqdm.notebook" for kind in auto_tqdm.__mro__)
"""Whether bars are widgets here, which are drawn anew and not written in lines."""


class Part:
    """A part of a job: a context manager; bars that are made inside of it say which part it is.

    Args:
        job: all parts; made by `parts`.
        index: Index of this one.
    """

    def __init__(self, job: _Job, index: int) -> None:
        self.job, self.index = job, index
        self.outer: Part | None = None
        self.worked = False
        self._token: Token[Part | None] | None = None

    def __enter__(self) -> Part:
        self.outer = _NOW.get()
        if self.outer is not None:
            self.outer.worked = True  # what is inside says itself what it left out
        self.root.started = self.root.started or time.perf_counter()
        self._token = _NOW.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self._token is not None:
            _NOW.reset(self._token)
        if not self.worked:
            self.root.skipped += self.share

    @property
    def root(self) -> _Job:
        """The job of which this is a part of a part."""
        return self.job if self.outer is None else self.outer.root

    @property
    def share(self) -> float:
        """Its part of the root's work, 0 to 1."""
        own = self.job.weights[self.index] / self.job.total
        return own if self.outer is None else own * self.outer.share

    @property
    def place(self) -> tuple[int, int]:
        """Its number among all parts of its kind, from 0, and how many there are."""
        count = len(self.job.weights)
        if self.outer is None:
            return self.index, count
        number, outer = self.outer.place
        return number * count + self.index, outer * count

    def done(self, fraction: float) -> float:
        """The fraction of the root's work that is done.

        Args:
            fraction: Fraction of this part.
        """
        weights = self.job.weights
        own = (sum(weights[: self.index]) + weights[self.index] * fraction) / self.job.total
        return own if self.outer is None else self.outer.done(own)

    def left(self, fraction: float) -> float | None:
        """Seconds until the root's work is done, if all is as fast; None before and after it.

        Args:
            fraction: Fraction of this part that is done.
        """
        done = self.done(fraction)
        worked = done - self.root.skipped
        if worked <= 0 or math.isclose(done, 1):  # not begun, or ended
            return None
        return (time.perf_counter() - self.root.started) * (1 - done) / worked


class _Job:
    """Several parts, done one after another."""

    def __init__(self, weights: Sequence[float], unit: str) -> None:
        self.weights, self.unit = list(weights), unit
        self.total = sum(self.weights) or 1.0
        self.started = 0.0
        self.skipped = 0.0
        """Part of the work that was done before, and takes no time."""


_NOW: ContextVar[Part | None] = ContextVar("part", default=None)


def parts(weights: Sequence[float], unit: str) -> list[Part]:
    """The parts of a job, each to be entered while it is done, in their order.

    Those inside of another part are counted together with those of its siblings, of which each is
    taken to have as many.

    Args:
        weights: Amount of work of each, in any unit.
        unit: Name of one of them: ``split``.
    """
    job = _Job(weights, unit)
    return [Part(job, index) for index in range(len(job.weights))]


class _Bar(auto_tqdm):  # type: ignore[type-arg]
    """A bar that also says how long the whole job will take."""

    part: Part | None = None

    @property
    def format_dict(self) -> Any:
        """Fields of the bar."""
        values = super().format_dict
        if self.part is not None and self.part.place[1] > 1 and self.total:
            left = self.part.left(self.n / self.total)
            if left is not None:
                whole = f"all: {self.format_interval(left)} left"
                values["postfix"] = ", ".join(filter(None, [values["postfix"], whole]))
        return values


def progress(total: int, desc: str | None, unit: str, *, initial: int = 0) -> _Tqdm:
    """A tqdm bar on stderr; where stderr is no terminal it writes a line every ten seconds.

    In a notebook it is a widget, where ipywidgets are installed.

    Args:
        total: Number of units the work has.
        desc: Name of the work, in one or two words; None shows nothing, where it is a part
            of what another bar shows.
        unit: Name of what is counted (``example``, ``step``).
        initial: units done before this process started (a resumed run).

    Returns:
        The bar: a context manager with ``update(n)`` and ``set_postfix``.
    """
    interactive = NOTEBOOK or sys.stderr.isatty()
    # nothing is said of ``disable`` otherwise: an argument would go before what --quiet has set
    hidden: dict[str, Any] = {"disable": True} if desc is None else {}
    part = _NOW.get()
    if part is not None:
        part.worked = True
        part.root.skipped += part.share * initial / total if total else 0.0
        number, count = part.place
        if desc is not None and count > 1:
            desc = f"{desc} ({number + 1} of {count} {part.job.unit}s)"
    bar = _Bar(
        total=total,
        desc=desc,
        unit=f" {unit}",
        initial=initial,
        file=sys.stderr,
        mininterval=0.2 if interactive else 10.0,
        dynamic_ncols=interactive,
        smoothing=0.05,
        **hidden,
    )
    bar.part = part
    return bar
