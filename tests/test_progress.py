"""A bar says which part of the whole job it is, and how long all of it will take."""

from __future__ import annotations

import io
import re
import sys

import pytest
from terminal import run

from bertvision.pipelines import progress as module
from bertvision.pipelines.progress import parts, progress
from bertvision.pipelines.workspace.workspace import Workspace


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the module sees; a test sets them."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_a_bar_alone_says_nothing_of_others() -> None:
    with progress(4, "extract", "example") as bar:
        bar.update(2)
        assert bar.desc.rstrip(": ") == "extract"
        assert not bar.format_dict["postfix"]


def test_parts_are_numbered_over_those_inside_of_them() -> None:
    said = []
    for outer in parts([1, 1, 1], "snapshot"):
        with outer:
            for inner in parts([10, 30], "split"):
                with inner, progress(1, "extract", "example") as bar:
                    said.append(bar.desc.rstrip(": "))
    assert said == [f"extract ({n} of 6 splits)" for n in range(1, 7)]
    with progress(1, "extract", "example") as bar:
        assert bar.desc.rstrip(": ") == "extract"


def test_the_time_left_is_that_of_all_parts_by_their_weight(clock: list[float]) -> None:
    first, second = parts([1, 3], "split")
    with first, progress(10, "a", "example") as bar:
        assert not bar.format_dict["postfix"]  # nothing was measured yet
        clock[0] += 5
        bar.n = 5  # half of a quarter in 5 seconds
        assert bar.format_dict["postfix"] == "all: 00:35 left"
        bar.set_postfix_str("loss=1", refresh=False)
        assert bar.format_dict["postfix"] == "loss=1, all: 00:35 left"
    clock[0] += 5
    with second, progress(30, "b", "example") as bar:
        assert bar.format_dict["postfix"] == "all: 00:30 left"
        bar.n = 30
        assert not bar.format_dict["postfix"]


def test_what_was_done_before_does_not_make_the_rest_look_quick(clock: list[float]) -> None:
    first, second, third = parts([2, 1, 1], "split")
    with first:
        pass  # complete: there is no bar
    with second, progress(10, "b", "example", initial=5) as bar:
        clock[0] += 10
        bar.n = 10  # an eighth in 10 seconds, and a quarter is left
        assert bar.format_dict["postfix"] == "all: 00:20 left"
    with third, progress(10, "c", "example") as bar:
        assert bar.format_dict["postfix"] == "all: 00:20 left"


def test_an_error_leaves_no_part_behind() -> None:
    (part, _) = parts([1, 1], "split")
    with pytest.raises(RuntimeError), part:
        raise RuntimeError
    with progress(1, "alone", "example") as bar:
        assert bar.part is None


def test_a_log_file_gets_what_is_left_of_several_snapshots(workspace: Workspace) -> None:
    words = ["--split", "tune,dev", "--encoding", "bfloat16", "--precision", "32", "--pool", "sep"]
    told = run("extract", "--checkpoint", "0.5e,1e", *words, "-w", workspace.root).stderr
    named = re.findall(r"extract (\S+) \((\d) of 4 splits\)", told)
    splits = ["0.5e/tune-sep", "0.5e/dev-sep", "1e/tune-sep", "1e/dev-sep"]
    assert list(dict.fromkeys(named)) == [(name, str(n)) for n, name in enumerate(splits, 1)]


def test_in_a_notebook_bars_are_widgets_where_they_can_be() -> None:
    """Without a kernel they are text: tqdm decides, and bars go to stderr as before."""
    assert module.NOTEBOOK is False
    out = io.StringIO()
    held, sys.stderr = sys.stderr, out
    try:
        with progress(2, "text", "example") as bar:
            bar.update(2)
    finally:
        sys.stderr = held
    assert "text: 100%" in out.getvalue()
