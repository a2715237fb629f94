"""Write docs/reference/errors.md, every error and who raises it, from the sources: ``make docs``.

A test keeps the page current.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("reference") / "errors.md"
BASES = ("BertvisionError", "BertvisionWarning")
_MANY = 40
"""Names that raise an error before they are no longer listed."""

HEADER = """\
# Errors

Written by `make docs` from the docstrings; do not edit.

Everything that bertvision raises on purpose is a `BertvisionError`, and most errors are of the
matching built-in as well, so that `except FileNotFoundError` works as one expects. A message says
what was given, what is allowed and what to do next. The command line prints it without a traceback
and exits with status 2, unless [its table](../cli.md) says otherwise; a lost rank is 75, so that a
queue of jobs may try again. Of these names `bertvision` exports `BertvisionError` and
`BertvisionWarning`; the others are imported from `bertvision.errors`, or from the module that is
named. [The API](api.md) says of every name why it raises what.
"""


def render() -> str:
    """The whole page."""
    tree = re.search(r"```\n.*?```", _docstring(_parsed(ROOT / "errors.py")), re.DOTALL)
    assert tree is not None
    parts = [HEADER, tree[0].replace("```", "```text", 1) + "\n"]
    raised = list(_raised())
    for node, module in errors():
        bases = " and ".join(f"`{ast.unparse(base)}`" for base in node.bases)
        home = "" if module == "errors" else f", from `bertvision.{module}`"
        parts += [f"## {node.name}\n", f"Kind of {bases}{home}. {_one_line(_docstring(node))}\n"]
        names = dict.fromkeys(f"`{name}`" for error, name in raised if error == node.name)
        if len(names) > _MANY:
            parts.append("Raised by most of [the API](api.md).\n")
        elif names:
            parts.append(f"Raised by {', '.join(names)}.\n")
    return "\n".join(parts)


def _rooms(top: Path) -> Iterator[Path]:
    """A folder of the package and those in it."""
    return (path.parent for path in sorted(top.rglob("__init__.py")))


def errors() -> Iterator[tuple[ast.ClassDef, str]]:
    """The classes of errors and warnings, those of ``errors.py`` first, with their modules."""
    known = set(BASES)
    rooms = [room for top in sorted(ROOT.glob("*/__init__.py")) for room in _rooms(top.parent)]
    files = [ROOT / "errors.py", *(f for room in rooms for f in sorted(room.glob("*.py")))]
    for path in files:
        for node in _parsed(path).body:
            if not isinstance(node, ast.ClassDef):
                continue
            if node.name in BASES or known & {ast.unparse(base) for base in node.bases}:
                known.add(node.name)
                yield node, ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _raised() -> Iterator[tuple[str, str]]:
    """Error, and a public function or method that raises it, as its docstring says."""
    import bertvision

    for public in bertvision.__all__[1:]:
        home = str(bertvision._home(public))
        module = _parsed((ROOT / home.replace(".", "/")).with_suffix(".py"))
        for node in module.body:
            if getattr(node, "name", None) != public:
                continue
            inner = node.body if isinstance(node, ast.ClassDef) else []
            yield from _reasons(node, public)
            for method in inner:
                if not getattr(method, "name", "_").startswith("_"):
                    yield from _reasons(method, f"{public}.{method.name}")


def _reasons(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The errors that the section ``Raises:`` of a docstring names."""
    _, found, section = _docstring(node).partition("\nRaises:\n")
    if found:
        text = "\n".join(takewhile(lambda line: line.startswith(" "), section.splitlines()))
        for error in re.findall(r"^    (\w+): ", text, re.MULTILINE):
            yield error, name


def _docstring(node: ast.AST) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""


def _one_line(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
