"""The doctor says what this machine is, what to change, and leaves nothing behind."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from terminal import done, run

from bertvision.pipelines import machine
from bertvision.pipelines.machine import disk_speed, examine_disk, examine_libraries

NAMES = [
    *("python", "libraries", "threads", "bfloat16", "gpu", "huge pages", "disk", "free space"),
    "locale",
]


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads as it was, afterwards."""
    held = torch.get_num_threads()
    yield
    torch.set_num_threads(held)


def test_the_command_looks_at_everything_and_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(done("doctor", "--json"))
    assert found["usable"] is True
    assert [finding["name"] for finding in found["findings"]] == NAMES
    assert all(finding["found"] for finding in found["findings"])
    assert {f["verdict"] for f in found["findings"]} <= {"ok", "warning"}
    assert all(bool(f["advice"]) == (f["verdict"] != "ok") for f in found["findings"])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_measured_has_no_name_that_a_kill_could_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[list[Path]] = []
    flush = os.fsync

    def seen(descriptor: int) -> None:
        held.append(list(tmp_path.iterdir()))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    disk_speed(tmp_path)
    assert held == [[]]


def test_a_store_in_the_home_is_looked_at_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    assert str(home) in done("doctor", "--store", "~/activations")


def test_the_table_of_the_doctor_has_a_row_for_each_thing(tmp_path: Path) -> None:
    done("doctor", "--csv", tmp_path / "found.csv", "--store", tmp_path)
    with (tmp_path / "found.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["name"] for row in rows] == NAMES
    assert list(rows[0]) == ["name", "verdict", "found", "advice"]


def test_a_folder_that_cannot_be_written_makes_it_unusable() -> None:
    result = run("doctor", "--store", "/proc/nowhere")
    assert result.exit_code == 1
    assert "disk: Use a --workspace in a folder that you may write to" in result.stdout


def test_libraries_outside_their_ranges_are_named_with_them() -> None:
    def old(name: str) -> str:
        return "1.9" if name == "torch" else metadata.version(name)

    _, finding = examine_libraries(version_of=old)
    assert finding.verdict == "warning"
    assert "torch 1.9 (needed: >=2.6)" in finding.advice


def test_a_library_that_is_missing_is_an_error_with_the_command_that_installs_it() -> None:
    def without(name: str) -> str:
        if name == "zarr":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    _, finding = examine_libraries(version_of=without)
    assert finding.verdict == "error"
    assert "pip install 'zarr<4,>=3.1'" in finding.advice


def test_more_threads_than_cores_are_a_warning_with_the_right_number(threads: None) -> None:
    cores = machine.usable_cores()
    torch.set_num_threads(cores + 3)
    finding = machine.examine_threads({})
    assert finding.verdict == "warning"
    assert f"OMP_NUM_THREADS={cores}:" in finding.advice
    torch.set_num_threads(cores)
    assert machine.examine_threads({"OMP_NUM_THREADS": str(cores)}).verdict == "ok"


def test_cores_that_stand_still_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    finding = machine.examine_threads({"OMP_NUM_THREADS": "1"})
    assert " 1 thread, " in finding.found
    assert finding.advice.endswith("3 of 4 cores stand still.")


@pytest.mark.parametrize(
    ("setting", "environment", "advice"),
    [
        ("always madvise [never]", {}, "echo madvise >"),
        ("always [madvise] never", {}, "THP_MEM_ALLOC_ENABLE=1"),
        ("always [madvise] never", {"THP_MEM_ALLOC_ENABLE": "1"}, ""),
        ("[always] madvise never", {}, ""),
    ],
)
def test_huge_pages_that_torch_does_not_get_are_said(
    tmp_path: Path, setting: str, environment: dict[str, str], advice: str
) -> None:
    path = tmp_path / "enabled"
    path.write_text(setting)
    finding = machine.examine_pages(path, environment)
    assert finding.verdict == ("warning" if advice else "ok")
    assert advice in finding.advice


def test_the_disk_is_measured_and_its_file_removed(tmp_path: Path) -> None:
    assert min(disk_speed(tmp_path)) > 0
    disk, room = examine_disk(tmp_path / "not" / "there" / "yet")
    assert str(tmp_path) in disk.found
    assert "/s" in disk.found
    assert room.name == "free space"
    assert list(tmp_path.iterdir()) == []


def test_a_locale_without_utf8_is_a_warning() -> None:
    code = "from bertvision.pipelines.machine import examine_text\nprint(*examine_text(), sep='|')"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=os.environ | plain, capture_output=True, check=True).stdout
    assert told.decode("ascii").startswith("locale|warning|")
    assert "PYTHONUTF8=1" in told.decode("ascii")


def test_bfloat16_is_measured_against_float32() -> None:
    finding = machine.examine_bfloat16()
    assert "GFLOP/s" in finding.found
    assert machine.matmul_seconds(torch.float32) > 0
