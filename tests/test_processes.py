"""The tests' own processes are real ones: exit codes, signals, output, nothing inherited."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from processes import run_code, running


def test_a_process_is_one_of_its_own_with_its_arguments_and_its_output() -> None:
    code = "import os, sys; print(os.getpid(), sys.argv[1:]); print('e', file=sys.stderr)"
    done = run_code(code, 1, "two")
    pid, _, arguments = done.stdout.partition(" ")
    assert int(pid) != os.getpid()
    assert (arguments, done.stderr, done.returncode) == ("['1', 'two']\n", "e\n", 0)


def test_it_starts_with_the_heavy_modules_and_one_thread() -> None:
    code = "import sys, os; print('torch' in sys.modules, len(os.listdir('/proc/self/task')))"
    if sys.platform == "linux":
        assert run_code(code).stdout == "True 1\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("1 / 0", 1),
    ],
    ids=["exit", "SIGKILL", "SIGTERM", "error"],
)
def test_its_end_is_told_as_subprocess_tells_it(code: str, expected: int) -> None:
    done = run_code(code)
    assert done.returncode == expected
    assert ("ZeroDivisionError" in done.stderr) == (code == "1 / 0")


SLEEPING = """
import time
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    raise SystemExit(7)
"""


def test_sigint_is_a_keyboard_interrupt() -> None:
    with running(SLEEPING) as child:
        while not child.output():
            assert child.process.is_alive()
            time.sleep(0.005)
        assert child.process.pid is not None
        os.kill(child.process.pid, signal.SIGINT)
        assert child.finished().returncode == 7


def test_the_environment_is_that_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERTVISION_ONE", "1")
    code = "import os; print(os.environ['BERTVISION_ONE'], os.environ['BERTVISION_TWO'])"
    assert run_code(code, BERTVISION_TWO="2").stdout == "1 2\n"
