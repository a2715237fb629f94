"""Where two records differ: said by the name of a field, with both values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def first_difference(
    there: Mapping[str, object],
    here: Mapping[str, object],
    fields: Iterable[str] | None = None,
) -> tuple[str, object, object] | None:
    """The first field in which two records differ; records inside records are looked into.

    Args:
        there: what was kept.
        here: what it is compared with.
        fields: that are compared, in this order; None is all, those of ``there`` first.

    Returns:
        The field, its names joined by dots, and what it is there and here (None where it is
        missing); None where nothing differs.
    """
    for field in {**there, **here} if fields is None else fields:
        kept, now = there.get(field), here.get(field)
        if isinstance(kept, Mapping) and isinstance(now, Mapping):
            if inner := first_difference(kept, now):
                return f"{field}.{inner[0]}", *inner[1:]
        elif kept != now:
            return field, kept, now
    return None
