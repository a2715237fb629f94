"""The surface for users changes only where a change means it to: see `surface`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import surface
from processes import run_code

NUMBER = re.compile(r"[−+-]?\d[\d,]*\.?\d*(?:e[−+-]?\d+)?")
NEW = "run `python tests/surface.py`, and read what changed"


def test_commands_names_and_records_are_those_that_are_written_down() -> None:
    # in a process of its own: which records there are depends on what was imported before
    done = run_code("import surface; print(surface.surface(), end='')")
    assert done.returncode == 0, done.stderr
    written, now = surface.SURFACE.read_text().splitlines(), done.stdout.splitlines()
    gone, new = sorted(set(written) - set(now)), sorted(set(now) - set(written))
    assert (gone, new) == ([], []), NEW
    assert written == now, NEW


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return surface.outputs(tmp_path_factory.mktemp("outputs"))


@pytest.mark.parametrize("command", json.loads(surface.OUTPUTS.read_text()))
def test_commands_say_what_they_said(said: dict[str, Any], command: str) -> None:
    written, now = json.loads(surface.OUTPUTS.read_text())[command], said[command]
    assert now["status"] == written["status"] == 0, now["text"]
    assert now.get("csv") == written.get("csv"), NEW
    assert list(differences(written["json"], now["json"])) == [], NEW
    # numbers of a table are those of its JSON, rounded: the last digit is the machine's
    assert [NUMBER.sub("#", line) for line in now["text"]] == [
        NUMBER.sub("#", line) for line in written["text"]
    ], NEW


def differences(written: Any, now: Any, where: str = "") -> list[str]:
    """Where two values in JSON types differ by more than the rounding of another machine."""
    if isinstance(written, dict) and isinstance(now, dict):
        if list(written) != list(now):
            return [f"{where}: keys {sorted({*written} ^ {*now})}"]
        return [d for key in written for d in differences(written[key], now[key], f"{where}.{key}")]
    if isinstance(written, list) and isinstance(now, list):
        if len(written) != len(now):
            return [f"{where}: {len(written)} values, now {len(now)}"]
        pairs = enumerate(zip(written, now, strict=True))
        return [d for i, (one, other) in pairs for d in differences(one, other, f"{where}[{i}]")]
    if isinstance(written, float) and isinstance(now, float):
        near = math.isclose(written, now, rel_tol=1e-4, abs_tol=1e-6)
        return [] if near else [f"{where}: {written}, now {now}"]
    return [] if written == now else [f"{where}: {written!r}, now {now!r}"]


def test_a_difference_is_told() -> None:
    assert differences({"a": [1.0, "x"]}, {"a": [1.00001, "x"]}) == []
    assert differences({"a": [1.0]}, {"a": [1.1]}) == [".a[0]: 1.0, now 1.1"]
    assert differences({"a": 1}, {"b": 1}) == [": keys ['a', 'b']"]
    assert differences([1, 2], [1]) == [": 2 values, now 1"]


def test_every_command_that_reads_what_is_stored_is_written_down() -> None:
    written = json.loads(surface.OUTPUTS.read_text())
    assert len(written) > 25
    assert Path(surface.FIXTURES / "workspace-1.tar.xz").exists()
