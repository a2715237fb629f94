"""Progress with rate and ETA on stderr, for people and for log files."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress(total: int, desc: str | None, unit: str, *, initial: int = 0) -> tqdm[Any]:
    """A tqdm bar on stderr; where stderr is no terminal it writes a line every ten seconds.

    Args:
        total: how many units the work has.
        desc: what is being done, in one or two words; None shows nothing, where it is a part of
            what another bar shows.
        unit: what is counted (``example``, ``step``).
        initial: units done before this process started (a resumed run).

    Returns:
        The bar: a context manager with ``update(n)`` and ``set_postfix``.
    """
    interactive = sys.stderr.isatty()
    # nothing is said of ``disable`` otherwise: an argument would go before what --quiet has set
    hidden: dict[str, Any] = {"disable": True} if desc is None else {}
    return tqdm(
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
