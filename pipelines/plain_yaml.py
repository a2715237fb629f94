"""YAML that people edit: read as it stands, and changed in one place.

Nothing is read that could stand for more than its text, no tags and no references; what is changed
keeps the comments.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class _Exact(yaml.SafeDumper):
    """Writes text that is read again as it was."""


def _represent_text(dumper: _Exact, value: str) -> yaml.ScalarNode:
    # without quotes, or in single ones, separators of lines other than \n come back as spaces
    style = None if value.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Exact.add_representer(str, _represent_text)


def yaml_text(values: Mapping[str, object], *, width: float = 80) -> str:
    """YAML of settings, which `read_yaml` reads as they were.

    Args:
        values: plain values, nested or not.
        width: Width of lines that can be broken.
    """
    return str(yaml.dump(values, Dumper=_Exact, sort_keys=False, allow_unicode=True, width=width))


def read_yaml(path: Path, *, front_matter: bool = False) -> Any:
    """The value in a YAML file.

    Args:
        path: Path of the file.
        front_matter: Whether the file is Markdown, whose head between two lines of ``---`` is YAML;
            None is given where it has no head.

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


def with_value(text: str, key: str, value: object) -> str:
    """A YAML text with another value of a key of its outermost mapping.

    All else stays as it is written: comments, order, quotes.

    Args:
        text: Text of a mapping with one key a line, not in braces.
        key: Key of the mapping; added at the end where it is not there.
        value: a scalar.

    Raises:
        ValueError: the text is not YAML, or no such mapping.
    """
    try:
        node = yaml.compose(text, _Plain)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(node, yaml.MappingNode) or node.flow_style:
        raise ValueError("it is no mapping with a key in each line")
    line = yaml_text({key: value}, width=float("inf")).rstrip("\n")
    for name, item in node.value:
        if name.value == key:
            return text[: name.start_mark.index] + line + text[item.end_mark.index :]
    return f"{text.rstrip()}\n{line}\n"
