"""Classes of one's own: named by their dotted path, or offered by installed packages.

An installed package offers a class as an entry point of a group; a script or a file in the current
folder is named by its dotted path ``package.module:Class``.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from bertvision.errors import InputError, did_you_mean

_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_dotted_path(name: str) -> bool:
    """Whether a name is written ``package.module:Class``."""
    return _DOTTED.fullmatch(name) is not None


def offered(group: str) -> dict[str, str]:
    """Offers of installed packages: name → dotted path ``package.module:Class``.

    Args:
        group: Group of the entry points, such as ``bertvision.heads``.
    """
    return {point.name: f"{point.module}:{point.attr}" for point in entry_points(group=group)}


def load_class(target: str, what: str, *, named: bool = False) -> Any:
    """Import ``package.module:Class``.

    Args:
        target: the dotted path.
        what: Its kind, for the message: head, task.
        named: the user wrote this path: a module that is not installed is also looked for in the
            current folder, for itself alone, so that no file there can stand for another module.

    Raises:
        InputError: it cannot be imported, or is nothing that can be called.
    """
    name, _, attribute = target.partition(":")
    try:
        value: Any = _module(name, named)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{what} {target!r} cannot be imported ({error}): give package.module:Class of a "
            f"module that is installed, on PYTHONPATH or in the current folder, {os.getcwd()}"
        ) from error
    classes = [k for k, v in vars(value).items() if isinstance(v, type) and v.__module__ == name]
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise InputError(
                f"{what} {target!r} is not there: the module {name} has no attribute {part!r}; "
                f"{did_you_mean(part, classes)}its classes: {', '.join(classes) or 'none'}"
            )
        value = getattr(value, part)
    if not callable(value):
        raise InputError(f"{what} {target!r} is not a class: give package.module:Class")
    return value


def _module(name: str, here: bool) -> ModuleType:
    """A module that is installed, or else, where ``here`` allows it, of the current folder."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        top = name.partition(".")[0]
        spec = PathFinder.find_spec(top, [os.getcwd()]) if here and error.name == top else None
        if spec is None or spec.loader is None or spec.origin is None:
            raise
    sys.modules[top] = made = module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[top]
        raise
    return importlib.import_module(name)
