"""Classes of one's own: named by their dotted path, or offered by installed packages.

An installed package offers a class as an entry point of a group; a script or a file in the current
folder is named by its dotted path ``package.module:Class``.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from importlib.metadata import entry_points
from typing import Any

from bertvision.errors import InputError

_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_dotted_path(name: str) -> bool:
    """Whether a name is written ``package.module:Class``."""
    return _DOTTED.fullmatch(name) is not None


def offered(group: str) -> dict[str, str]:
    """What installed packages offer: name → dotted path ``package.module:Class``.

    Args:
        group: of the entry points, such as ``bertvision.heads``.
    """
    return {point.name: f"{point.module}:{point.attr}" for point in entry_points(group=group)}


def load_class(target: str, what: str) -> Any:
    """Import ``package.module:Class``, also from a file in the current folder.

    The current folder is looked in last, and for this import alone, so that no file there can stand
    for a module of Python or of an installed package.

    Args:
        target: the dotted path.
        what: what it should be, for the message: head, task.

    Raises:
        InputError: it cannot be imported, or is nothing that can be called.
    """
    module, _, attribute = target.partition(":")
    here = os.getcwd()
    sys.path.append(here)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{what} {target!r} cannot be imported ({error}): give package.module:Class of a "
            f"module that is installed, on PYTHONPATH or in the current folder, {here}"
        ) from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise InputError(f"{what} {target!r} is not a class: give package.module:Class")
    return found
