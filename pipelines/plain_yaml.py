"""YAML of others, read without what could stand for more than its text: no tags, no references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_MOST_BYTES = 1 << 20
"""A file of settings has a few kilobytes."""


class _Plain(yaml.SafeLoader):
    """Reads values as they stand, without references."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            # a few lines of them stand for more values than any memory holds
            raise ValueError("it refers to a value by *name; write the value itself")
        return super().compose_node(parent, index)


def read_yaml(path: Path, *, front_matter: bool = False) -> Any:
    """The value in a YAML file.

    Args:
        path: of the file.
        front_matter: of a Markdown file, whose head between two lines of ``---`` is YAML; None
            where it has no head.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, not UTF-8, nested too deep, not YAML, or a value in it is none.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    text = data.decode("utf-8")
    if front_matter:
        lines = text.splitlines()
        if not lines or lines[0] != "---" or "---" not in lines[1:]:
            return None
        text = "\n".join(lines[1 : lines.index("---", 1)])
    try:
        return yaml.load(text, _Plain)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deep to be read") from None
