"""The command as a process: signals, its exit status, and finishing what was begun."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from processes import running
from terminal import done
from workspaces import write_squad

BERTVISION = Path(sysconfig.get_path("scripts")) / "bertvision"
Interrupted = Callable[[list[str], Callable[[], bool], signal.Signals], tuple[int, str]]


# the option -q tells tqdm before it is imported, and in a warm process it is
COMMAND = """
from functools import partialmethod
from tqdm import tqdm
tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)
from bertvision.cli import app
app()
"""


def interrupted(args: list[str], ready: Callable[[], bool], how: signal.Signals) -> tuple[int, str]:
    """Run a command in a process of its own and signal it as soon as it is ready."""
    with running(COMMAND, *args, CUDA_VISIBLE_DEVICES="") as child:
        while child.process.is_alive():
            if ready():
                assert child.process.pid is not None
                os.kill(child.process.pid, how)
                break
            time.sleep(0.005)
        code, out, errors = child.finished()
    assert out == ""
    return code, errors


def interrupted_as_installed(
    args: list[str], ready: Callable[[], bool], how: signal.Signals
) -> tuple[int, str]:
    """The same of the installed command, which has to import everything first."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [BERTVISION, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        while process.poll() is None:
            if ready():
                process.send_signal(how)
                break
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.005)
        out, errors = process.communicate()
    assert out == b""
    return process.returncode, errors.decode()


@pytest.fixture(scope="module")
def large(
    tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> tuple[Path, dict[str, bytes]]:
    """A workspace whose train split has many shards, and what its extraction writes."""
    folder = tmp_path_factory.mktemp("large")
    data = {name: write_squad(folder / f"{name}.json", n, n) for name, n in _SIZES.items()}
    args = ["--train", data["train"], "--dev", data["dev"], "--save-at", 0, "--precision", "32"]
    done("finetune", "--model", tiny_bert, *args, "--tune-fraction", 0, "-w", folder / "ws")
    done(*_extract(folder / "ws"))
    written = contents(folder / "ws/activations")
    shutil.rmtree(folder / "ws/activations")
    return folder / "ws", written


_SIZES = {"train": 350, "dev": 4}


def _extract(root: Path) -> list[str]:
    return ["extract", "--split", "train", "--precision", "32", "-w", str(root)]


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, without lock files."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("process", "how"),
    [
        (interrupted, signal.SIGKILL),
        (interrupted, signal.SIGINT),
        (interrupted, signal.SIGTERM),
        # with an entry point and a -q of its own; to import everything takes ten seconds
        pytest.param(interrupted_as_installed, signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_extraction_is_finished_by_the_same_command(
    large: tuple[Path, dict[str, bytes]], tmp_path: Path, process: Interrupted, how: signal.Signals
) -> None:
    root, expected = tmp_path / "ws", large[1]
    shutil.copytree(large[0], root)
    ledger = root / "activations/ledger/0e/train"
    code, errors = process(["-q", *_extract(root)], (ledger / "00001.json").is_file, how)
    # a process that a signal ended is to the shell what exits with 128 + the signal: 143
    assert code == (130 if how == signal.SIGINT else -how), errors
    assert errors == ("Stopped; what was finished is kept.\n" if how == signal.SIGINT else "")
    before = contents(root / "activations")
    shards = {name for name in expected if re.fullmatch(r"ledger/0e/train/\d+\.json", name)}
    committed = shards & before.keys()
    assert 2 <= len(committed) < len(shards)
    held = {path: path.stat().st_mtime_ns for path in ledger.glob("0*.json")}

    (found,) = json.loads(done(*_extract(root), "--json"))
    assert found["shards_written"] == len(shards) - len(committed)
    assert contents(root / "activations") == expected
    assert {path: path.stat().st_mtime_ns for path in held} == held


def test_an_interrupted_finetune_is_finished_by_the_same_command(
    tiny_bert: Path, tmp_path: Path, one_thread: None
) -> None:
    train, dev = (write_squad(tmp_path / f"{name}.json", 8, 1) for name in ("train", "dev"))
    root = tmp_path / "ws"
    options = {"model": tiny_bert, "train": train, "dev": dev, "batch-size": 1, "epochs": 4}
    options |= {"save-at": "4", "precision": "32", "workspace": root}
    args = ["finetune", *(f"--{name}={value}" for name, value in options.items())]
    log = root / "finetune/log.csv"
    code, errors = interrupted(
        args, lambda: log.is_file() and len(log.read_text().splitlines()) > 3, signal.SIGINT
    )
    assert code == 130, errors
    assert "Traceback" not in errors
    assert "Error: stopped by SIGINT; all steps taken are saved" in errors.splitlines()[-1]
    steps = len(log.read_text().splitlines()) - 1
    found = json.loads(done(*args, "--json"))
    assert found["snapshots"][0]["made"]
    assert found["steps"] + steps == len(log.read_text().splitlines()) - 1


@pytest.mark.parametrize("at", ["bertvision.cli", "typer"])
def test_a_stop_while_it_is_still_starting_is_one_line(at: str) -> None:
    code = f"""
import runpy, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
runpy.run_module("bertvision", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Stopped; nothing was begun.\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bertvision", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout.startswith("bertvision ")
