"""Ctrl-C at any line of a writer's call: the same call again ends well, and nothing is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import bertvision.featurestore
from bertvision import ActivationStore
from bertvision.errors import InputError
from bertvision.featurestore.writing.appending import ActivationWriter

FOLDER = str(Path(bertvision.featurestore.__file__).parent)
LENGTHS = [5, 1, 9, 4, 7, 3, 8, 2, 6]


@contextmanager
def interrupted(at: int | None = None) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the n-th line of the store's code that this thread runs, once.

    Yields:
        A list of one number: the lines that were run.
    """
    lines = [0]

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename.startswith(FOLDER) else None)
    try:
        yield lines
    finally:
        sys.settrace(before)


def states(key: int) -> torch.Tensor:
    """(seq, layers, hidden) hidden states that are a function of the key."""
    return torch.arange(LENGTHS[key] * 8.0).reshape(-1, 2, 4) + 100 * key


class Run:
    """Writes a split, and interrupts one kind of call at one of its lines.

    Args:
        folder: Store that is made.
        encoding: Encoding of the split.
        call: Name of the call that is interrupted: add, flush or finish.
        at: Number of the line, counted over all calls of that kind; None for none.
    """

    def __init__(self, folder: Path, encoding: str, call: str, at: int | None = None) -> None:
        self.lines, self._call, self._at = 0, call, at
        store = ActivationStore.create(folder)
        writer = store.writer(
            "0e", "s", hidden_size=4, layers=[0, 1], shard_tokens=16, encoding=encoding
        )
        for key in range(len(LENGTHS)):
            self._do("add", writer, lambda key=key: writer.add(key, states(key), labels={"y": key}))
            if key == 3:
                self._do("flush", writer, writer.flush)
        self._do("finish", writer, writer.finish)
        split = store["0e/s"]
        assert split.verify() == []
        ids = split.table()["id"].to_pylist()
        assert sorted(ids) == [str(key) for key in range(len(LENGTHS))]
        for i, row in enumerate(split.plan.example_id.tolist()):
            key = int(ids[row])
            stored = split[i].permute(0, 2, 1)
            assert torch.allclose(stored, states(key), atol=0 if encoding == "float32" else 8)
            assert int(split.array("y")[i]) == key

    def _do(self, name: str, writer: ActivationWriter, call: Callable[[], Any]) -> None:
        if name != self._call:
            call()
            return
        at = None if self._at is None else self._at - self.lines
        try:
            with interrupted(at) as lines:
                call()
        except KeyboardInterrupt:
            try:
                call()
            except InputError as error:
                # an example that was taken in the last moment is said to be there
                if "already" not in str(error):
                    raise
        finally:
            self.lines += lines[0]


CALLS = ["add", "flush", "finish"]


@pytest.mark.parametrize("call", CALLS)
def test_the_same_call_again_ends_well(tmp_path: Path, call: str) -> None:
    encoding = "int8"  # of which the first shard waits for the channel statistics
    lines = Run(tmp_path / "whole", encoding, call).lines
    assert lines > 20
    step = max(1, lines // 12)
    for at in range(1 + lines % step, lines, step):
        Run(tmp_path / str(at), encoding, call, at)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_the_same_call_again_ends_well_at_many_more_lines(
    tmp_path: Path, encoding: str, call: str
) -> None:
    lines = Run(tmp_path / "whole", encoding, call).lines
    for at in range(1, lines, max(1, lines // 300)):
        Run(tmp_path / str(at), encoding, call, at)


def test_a_commit_that_two_interrupts_left_in_the_queue_takes_no_later_examples(
    tmp_path: Path,
) -> None:
    store = ActivationStore.create(tmp_path)
    writer = store.writer("0e", "s", hidden_size=4, layers=[0, 1], encoding="float32")
    writer.add(0, states(0))
    buffer = writer._buffer
    asked_for = buffer.batch
    writer.flush()
    writer.add(1, states(1))
    writer.flush()
    writer.add(2, states(2))
    assert writer._buffer is buffer  # it is filled for the second time
    writer._commit(buffer, asked_for)
    assert writer.unwritten == ["2"]
    assert not buffer.is_committed
    writer.add(3, states(3))
    split = writer.finish()
    assert split.table()["id"].to_pylist() == ["0", "1", "2", "3"]
    assert split.verify() == []
