"""Ranks that a process of this machine starts: what they import, and when they end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import running

from bertvision.errors import InputError
from bertvision.pipelines.training.group import RankLostError, joined
from bertvision.pipelines.training.launch import environment, launch, meeting_place, own_program


def test_ranks_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """Neither does the process that starts them; a folder of data may hold a torch.py, or worse."""
    for name in ("json", "torch", "bertvision"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('this is not {name}')")
    done = subprocess.run(
        [*own_program(), "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bertvision ")


def test_ranks_import_what_their_starter_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a head of one's own, or bertvision itself, from a folder that a script put there."""
    package = tmp_path / "bertvision"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("def main(): print('this one')")
    monkeypatch.syspath_prepend(tmp_path)
    done = subprocess.run(own_program(), capture_output=True, text=True)
    assert done.stdout == "this one\n", done.stderr


STUCK = """
import os, signal
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, signal.SIG_IGN)  # as one that waits inside NCCL
    os.kill(os.getppid(), signum)
while True:
    signal.pause()
"""


def test_a_stuck_rank_is_killed_after_the_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits for the end of a step, which may never come."""
    monkeypatch.setattr("bertvision.pipelines.training.launch._GRACE", 0.1)
    with pytest.raises(RankLostError, match="rank 0 of 1 was killed by SIGKILL"):
        launch([], 1, program=[sys.executable, "-c", STUCK])


STARTER = """
import sys
from bertvision.pipelines.training.launch import launch
launch([], 1, program=[sys.executable, "-c", *sys.argv[1:]])
"""
RANK = """
import os, signal, sys
from bertvision.pipelines import ranks
heard = open(sys.argv[1], "w")

def end(signum, frame):
    heard.write(signal.Signals(signum).name)
    sys.exit()

signal.signal(signal.SIGALRM, end)
signal.alarm(30)  # where nothing else ends it
signal.signal(signal.SIGTERM, STOP)
ranks._ORPHANED = SECONDS
ranks.end_with_starter()
os.kill(os.getppid(), signal.SIGKILL)
while True:
    signal.pause()
"""

TORCHRUN = """
import os
del os.environ["BERTVISION_STARTER"]  # which it does not know
os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
"""


@pytest.mark.parametrize(
    ("stop", "seconds", "heard", "first"),
    [
        ("end", "60", "SIGTERM", ""),
        ("signal.SIG_IGN", "0", "", ""),
        ("end", "60", "SIGTERM", TORCHRUN),
    ],
    ids=["between steps", "stuck", "torchrun"],
)
def test_a_rank_ends_when_its_starter_was_killed(
    tmp_path: Path, stop: str, seconds: str, heard: str, first: str
) -> None:
    """Or it would hold its GPU and the lock of the workspace, with nobody to stop it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = first + RANK.replace("STOP", stop).replace("SECONDS", seconds)
    with running(STARTER, code, pipe) as starter:
        assert pipe.read_text() == heard  # to the end of the rank
        assert starter.finished().returncode == -signal.SIGKILL


COMMAND = """
import os, signal
from bertvision.cli import app
signal.alarm(30)
read, write = os.pipe()
os.environ["BERTVISION_STARTER"] = str(read)
try:
    app(["heads"])
except SystemExit:
    os.close(write)
    signal.pause()
"""


def test_every_command_ends_with_its_starter() -> None:
    with running(COMMAND) as child:
        assert child.finished().returncode == -signal.SIGTERM


def test_more_ranks_than_gpus_are_refused_before_they_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also by the rank that has one: it would wait for the others."""
    for name, value in environment(meeting_place(), 0, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refused = pytest.raises(InputError, match="2 processes on a machine that shows them 1 GPU")
    with refused, joined():
        pass
