"""Write docs/reference/api.md, the public names with their docstrings: ``make docs``.

The page has a directive of mkdocstrings for each name, in the order and under the headings of
``bertvision.__init__``, so that the site takes text and signatures from the sources. A test keeps
it current.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from bertvision.pipelines import analysis

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("reference") / "api.md"

HEADER = """\
# API

Written by `make docs` from the public names; do not edit. The site shows the signature and the
docstring of each name here. What they do together, with code that a test runs, is in
[From Python](../python-api.md).
"""


def render() -> str:
    """The whole page."""
    parts = [HEADER]
    for heading, names in groups():
        parts.append(f"## {heading}\n")
        parts += [f"::: bertvision.{name}\n{_options(name)}" for name in names]
    return "\n".join(parts)


def _options(name: str) -> str:
    """Options of mkdocstrings for a name: fields of options have their help in the annotation."""
    return "    options:\n      show_if_no_docstring: true\n" if name.endswith("Options") else ""


def groups() -> Iterator[tuple[str, list[str]]]:
    """Headings and names: the comments inside ``_MODULES``, and what stands below each."""
    source = (ROOT / "__init__.py").read_text(encoding="utf-8")
    table = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"
    )
    assert isinstance(table.value, ast.Dict)
    lines = source.splitlines()
    heading, names = "", list[str]()
    line = table.lineno
    for key, value in zip(table.value.keys, table.value.values, strict=True):
        assert key is not None
        comments = [text.strip() for text in lines[line : key.lineno - 1] if "#" in text]
        if comments:
            if names:
                yield heading, names
            text = comments[-1].removeprefix("#").strip()
            heading, names = text[0].upper() + text[1:], []
        names += ast.literal_eval(value)
        line = value.end_lineno or line
    yield heading, names
    yield "Analyses of hidden states", analysis.names()


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render(), encoding="utf-8")
