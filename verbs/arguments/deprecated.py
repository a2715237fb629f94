"""Former names of arguments, which work until the version that is named."""

from __future__ import annotations

import warnings
from typing import TypeVar

from bertvision.errors import DeprecatedWarning, InputError

_T = TypeVar("_T")


def renamed(
    former: str, given: _T | None, name: str, value: _T, *, default: _T, since: str, gone: str
) -> _T:
    """The value of an argument that may be given by its former name.

    Called in a verb itself, so that the warning names the line that called the verb.

    Args:
        former: name of the argument, such as ``tokens``.
        given: by it; None is nothing.
        name: the argument has now.
        value: given by that.
        default: of the argument.
        since: version in which it was renamed.
        gone: version that does not know the former name.

    Raises:
        InputError: both were given.
    """
    if given is None:
        return value
    option, now = (f"--{x.replace('_', '-')}" for x in (former, name))
    if value != default:
        raise InputError(f"{option} is the former name of {now}: give {now} alone")
    warnings.warn(
        f"{option} is called {now} since {since}, and its former name goes in {gone}: give {now}",
        DeprecatedWarning,
        stacklevel=3,
    )
    return given
