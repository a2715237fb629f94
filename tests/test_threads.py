"""What may be shared between threads: a split, of which each of them reads what it asked for."""

from __future__ import annotations

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
