"""The house has rooms: imports go one way between them, and in no circle.

The graph is built from the sources, so that imports inside functions and under TYPE_CHECKING count
too: a circle that only works because half of it is late is a circle all the same.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = sorted(path.parent for path in ROOT.glob("*/__init__.py"))


@cache
def modules() -> dict[str, Path]:
    """The modules of the package by dotted name."""
    files = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in room.rglob("*.py"))]
    named = {}
    for path in files:
        parts = ("bertvision", *path.relative_to(ROOT).with_suffix("").parts)
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def imported(source: str, known: set[str]) -> Iterator[str]:
    """The modules of the package that a source imports anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known and not node.level:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in known else str(node.module)


@cache
def graph() -> dict[str, set[str]]:
    """The imports of every module."""
    known = modules()
    return {
        name: set(imported(path.read_text(), set(known))) - {name} for name, path in known.items()
    }


def layers(container: str) -> list[list[str]]:
    """The rooms of a container from the roof down, as its contract in pyproject.toml lists them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = [c for c in config["contracts"] if c.get("containers") == [container]]
    return [line.replace(":", "|").replace(" ", "").split("|") for line in found["layers"]]


def upward(container: str) -> list[str]:
    """Imports that go up, or sideways between rooms that are to know nothing of each other."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = [c for c in config["contracts"] if c.get("containers") == [container]]
    level = {room: i for i, rooms in enumerate(layers(container)) for room in rooms}
    strangers = [set(line.replace(" ", "").split("|")) for line in found["layers"] if "|" in line]
    wrong = []
    for name, targets in graph().items():
        for target in targets:
            ends = [m.removeprefix(f"{container}.").split(".")[0] for m in (name, target)]
            if not all(m.startswith(f"{container}.") for m in (name, target)):
                continue
            a, b = ends
            apart = a != b and any({a, b} <= rooms for rooms in strangers)
            if level[a] > level[b] or apart:
                wrong.append(f"{name} imports {target}")
    return wrong


def test_no_module_imports_itself_by_any_way_round() -> None:
    # a package is no more than its modules: importing it runs a docstring
    inner = {name: targets - {"bertvision"} for name, targets in graph().items()}
    try:
        TopologicalSorter(inner).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize("container", ["bertvision.pipelines", "bertvision.featurestore"])
def test_rooms_import_only_what_lies_below_them(container: str) -> None:
    assert upward(container) == []


@pytest.mark.parametrize("container", ["bertvision.pipelines", "bertvision.featurestore"])
def test_every_module_has_its_place_in_the_law(container: str) -> None:
    depth = container.count(".") + 1
    held = {name.split(".")[depth] for name in modules() if name.startswith(f"{container}.")}
    assert held == {room for rooms in layers(container) for room in rooms}


def test_training_never_runs_an_encoder_and_extraction_knows_no_head() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in targets
        if (".training." in name and (".extraction." in target or ".encoders." in target))
        or (".extraction." in name and (".training." in target or ".models." in target))
    ]
    assert wrong == []


def test_a_circle_and_an_arrow_upwards_would_be_found() -> None:
    late = "def f():\n    from bertvision.b import g\n"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import bertvision.a\n"
    known = {"bertvision.a", "bertvision.b"}
    circle = {
        "bertvision.a": set(imported(late, known)),
        "bertvision.b": set(imported(typed, known)),
    }
    with pytest.raises(CycleError):
        TopologicalSorter(circle).prepare()


def test_every_room_says_what_it_is_for() -> None:
    silent = [
        name
        for name, path in modules().items()
        if path.name == "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_docstrings_and_helps_are_sentences_that_stand_by_themselves() -> None:
    odd = [
        f"{name}: {text[:60]}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(text := node.value, str)
        if text.startswith(("Of ", "That ", "Which ")) and text.rstrip().endswith(".")
    ]
    assert odd == []
