"""What may be shared between threads: a split, of which each of them reads what it asked for."""

from __future__ import annotations

import copy
import os
import pickle
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from stores import Made

from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.split import ActivationSplit


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
