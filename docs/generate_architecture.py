"""Write docs/architecture/, a page for each room, from the sources: ``make docs``.

A test keeps the pages current.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("architecture")


def rooms() -> list[Path]:
    """The folders of the package, from the root of the repository."""
    tops = sorted(path.parent for path in ROOT.glob("*/__init__.py"))
    found = (path.parent for top in tops for path in sorted(top.rglob("__init__.py")))
    return [path.relative_to(ROOT) for path in found]


def page_of(room: Path) -> Path:
    """The page of a room."""
    return TARGET / f"{'-'.join(room.parts)}.md"


def render(room: Path) -> str:
    """The page of a room: what it is for, its modules, and the rooms it imports."""
    purpose = _docstring(ROOT / room / "__init__.py")
    modules = [path for path in sorted((ROOT / room).glob("*.py")) if path.name != "__init__.py"]
    inner = [other for other in rooms() if other.parent == room]
    parts = [f"# {room}/", "Written by `make docs` from the sources; do not edit.", purpose]
    if inner:
        parts.append("Rooms inside:")
        parts.append("\n".join(f"- {_link(other)}: {_idea(other)}" for other in inner))
    if modules:
        rows = ["| module | idea | what it offers |", "|---|---|---|"]
        rows += [f"| `{m.name}` | {_first_sentence(m)} | {_names(m)} |" for m in modules]
        parts.append("\n".join(rows))
    imported = _imported(room, modules)
    if imported:
        parts.append(f"It imports {', '.join(_link(other) for other in imported)}.")
    return "\n\n".join(parts) + "\n"


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _idea(room: Path) -> str:
    return _docstring(ROOT / room / "__init__.py").partition("\n")[0].rstrip(".")


def _first_sentence(module: Path) -> str:
    """The first line of a module's docstring, as a cell of a table."""
    line = _docstring(module).partition("\n")[0].rstrip(".").replace("``", "`")
    return line.replace("|", "\\|")


def _names(module: Path) -> str:
    """The public classes and functions of a module."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in tree.body if isinstance(node, kinds)]
    return ", ".join(f"`{name}`" for name in names if not name.startswith("_"))


def _imported(room: Path, modules: list[Path]) -> list[Path]:
    """The other rooms that modules of a room import, anywhere in their sources."""
    known = rooms()
    found = set()
    for module in modules:
        for dotted in re.findall(r"\bbertvision\.([\w.]+)", module.read_text(encoding="utf-8")):
            holders = [r for r in known if f"{dotted}.".startswith(f"{'.'.join(r.parts)}.")]
            if holders:
                found.add(max(holders, key=lambda r: len(r.parts)))
    return sorted(found - {room})


def _link(room: Path) -> str:
    return f"[{room}]({page_of(room).name})"


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for old in TARGET.glob("*.md"):
        old.unlink()
    for each in rooms():
        page_of(each).write_text(render(each), encoding="utf-8")
