"""Objects that threads may share: a split, of which each of them reads what it asked for."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import Made

from bertvision import ActivationLoader, ActivationStore
from bertvision.errors import InputError, LockedError
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writing.appending import ActivationWriter


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns five hundred times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


class Disturbed(ActivationSplit):
    """At every look at the shard that is kept open, another thread has just put its own there."""

    @property
    def _last(self) -> tuple[int, ShardReader]:
        return 0, self.open_shard(0)

    @_last.setter
    def _last(self, kept: tuple[int, ShardReader] | None) -> None:
        pass


def test_the_shard_that_another_thread_keeps_open_is_never_read_for_ones_own(
    tmp_path: Path,
) -> None:
    made = Made([1, 2, 1, 1] * 3, shard_tokens=2)
    alone = made.write(tmp_path)
    shared = Disturbed(tmp_path, "1e", "train")
    assert all(torch.equal(shared[i], alone[i]) for i in range(len(alone)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "compression"), [("float32", "none"), ("int8", "zstd"), ("bfloat16", "none")]
)
def test_threads_that_share_a_split_read_their_own_examples(
    tmp_path: Path, restless: None, encoding: str, compression: str
) -> None:
    """Examples as small as possible, and one to a shard almost: what is mixed up shows at once."""
    made = Made([1, 2, 1, 1] * 8, encoding=encoding, compression=compression, shard_tokens=2)
    made.write(tmp_path)
    alone = ActivationSplit(tmp_path, "1e", "train")
    true = [alone[i] for i in range(len(alone))]
    shared = ActivationSplit(tmp_path, "1e", "train")

    def read(seed: int) -> list[int]:
        drawn = random.Random(seed).choices(range(len(true)), k=600)
        return [i for i in drawn if not torch.equal(shared[i], true[i])]

    with ThreadPoolExecutor(16) as pool:
        assert [wrong for found in pool.map(read, range(16)) for wrong in found] == []


def test_a_split_that_is_sent_elsewhere_is_opened_there(tmp_path: Path) -> None:
    """The number of its open file would stand for another one in another process."""
    split = Made([1, 2, 1, 1] * 3, shard_tokens=2).write(tmp_path)
    expected = split[7]
    for again in (pickle.loads(pickle.dumps(split)), copy.copy(split), copy.deepcopy(split)):
        assert again._last is None
        assert torch.equal(again[7], expected)
    with pytest.raises(TypeError, match="open it there"):
        pickle.dumps(split._last)


def test_a_split_that_is_open_is_read_on_both_sides_of_a_fork(tmp_path: Path) -> None:
    split = Made([1, 2, 1, 1] * 3, shard_tokens=2).write(tmp_path)
    expected = [split[i] for i in range(len(split))]
    split[3]
    if (child := os.fork()) == 0:
        same = all(torch.equal(split[i], expected[i]) for i in (3, *range(len(split))))
        os._exit(0 if same else 1)
    assert torch.equal(split[3], expected[3])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(torch.equal(split[i], expected[i]) for i in range(len(split)))


def in_child(call: Callable[[], object]) -> str:
    """Message of a forked process after a call: its error, or nothing; a hang is ended."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(20)
        said = ""
        try:
            call()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it hung, or died"
    return said


def a_writer(folder: Path, **options: Any) -> ActivationWriter:
    store = ActivationStore.create(folder)
    return store.writer("0e", "s", hidden_size=8, layers=[0, 1], **options)


def states_of(key: int) -> torch.Tensor:
    return torch.full((1 + key % 5, 2, 8), float(key)) + torch.arange(8.0)


def test_threads_may_share_a_writer(tmp_path: Path, restless: None) -> None:
    writer = a_writer(tmp_path, encoding="float32", shard_tokens=64)

    def add(thread: int) -> None:
        for key in range(thread, 240, 8):
            writer.add(key, states_of(key), labels={"y": key})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    split = writer.finish()
    ids = split.table()["id"].to_pylist()
    assert len(split) == 240
    assert split.verify() == []
    for i, row in enumerate(split.plan.example_id.tolist()):
        key = int(ids[row])
        assert torch.equal(split[i].permute(0, 2, 1), states_of(key))
        assert int(split.array("y")[i]) == key


def test_a_forked_process_is_told_that_it_has_no_writer(tmp_path: Path) -> None:
    writer = a_writer(tmp_path, shard_tokens=64)
    for key in range(40):
        writer.add(key, states_of(key))

    def leave_block() -> None:
        with writer:
            pass

    for call in (
        lambda: writer.add("x", torch.randn(60, 2, 8)),
        writer.flush,
        writer.discard,
        writer.close,
        writer.finish,
    ):
        assert "make a writer here, with another part=" in in_child(call)
    # a block that ends in the child, as after `os.fork` within it, takes nothing from the parent
    assert in_child(leave_block) == ""
    with pytest.raises(LockedError):
        a_writer(tmp_path, shard_tokens=64)
    assert len(writer.finish()) == 40


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_an_iteration_that_was_begun_before_a_fork_is_refused_in_the_child(
    tmp_path: Path, kind: str
) -> None:
    split = Made([3, 1, 2, 4] * 12, encoding="int8", shard_tokens=8).write(tmp_path)
    source: Any = (
        ActivationLoader(split, batch_size=2, readers=2)
        if kind == "loader"
        else split.tokens(batch_size=4, readers=2)
    )
    iteration = iter(source)
    next(iteration)
    assert "begin an iteration in the process that draws from it" in in_child(
        lambda: next(iteration)
    )

    def anew() -> None:
        nonlocal iteration
        del iteration  # its threads are in the parent: letting go of it does not wait for them
        assert sum(1 for _ in source) > 4

    assert in_child(anew) == ""
    assert sum(1 for _ in iteration) > 4


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_a_second_thread_and_a_second_iteration_are_refused(tmp_path: Path, kind: str) -> None:
    split = Made([3, 1, 2, 4] * 12, encoding="int8", shard_tokens=8).write(tmp_path)
    source: Any = (
        ActivationLoader(split, batch_size=2) if kind == "loader" else split.tokens(batch_size=4)
    )
    first = iter(source)
    next(first)
    with ThreadPoolExecutor(1) as pool, first._lock:  # as while this thread is drawing
        refused = pool.submit(next, first).exception()
    assert isinstance(refused, InputError)
    assert "give each thread" in str(refused)
    next(iter(source))
    with pytest.raises(InputError, match="has ended, because another one"):
        next(first)


def test_threads_may_share_a_store_and_open_splits_of_it(tmp_path: Path, restless: None) -> None:
    made = Made([1, 2, 1, 1] * 3, shard_tokens=2)
    made.write(tmp_path)
    store = ActivationStore.open(tmp_path)

    def read(i: int) -> bool:
        return torch.equal(store["1e/train"][i % 12].permute(0, 2, 1), made.of_stored(i % 12))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(96)))


def test_processes_and_threads_may_share_a_dataset_of_rows(tmp_path: Path) -> None:
    made = Made([1, 2, 1, 1] * 3, shard_tokens=2)
    rows = made.write(tmp_path).to_dataset()

    def check(i: int) -> bool:
        return torch.equal(rows[i % 12]["hidden_states"], made.of_stored(i % 12))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check, range(48)))

    def check_all() -> None:
        assert all(map(check, range(12)))

    assert in_child(check_all) == ""
