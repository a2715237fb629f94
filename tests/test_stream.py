"""The stream: every example once, the same for any number of threads, exactly resumable."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from stores import Made, shard_path

from bertvision.errors import CorruptStoreError, IncompleteSplitError, InputError
from bertvision.featurestore import readahead
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.readahead import BufferPool, idle_references
from bertvision.featurestore.sampler import Sampler
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader

LENGTHS = np.random.default_rng(1).integers(1, 33, 90).tolist()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> ActivationSplit:
    return Made(LENGTHS, encoding="int8").write(tmp_path_factory.mktemp("store"))


def examples(loader: ActivationLoader) -> list[list[int]]:
    return [batch.examples.tolist() for batch in loader]


@pytest.mark.parametrize("readers", [0, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("buffer", [1, 4, 100])
def test_ranks_share_an_epoch_exactly(
    split: ActivationSplit, readers: int, world_size: int, buffer: int
) -> None:
    drawn = []
    for rank in range(world_size):
        loader = ActivationLoader(
            split,
            batch_size=7,
            readers=readers,
            rank=rank,
            world_size=world_size,
            buffer=buffer,
        )
        batches = examples(loader)
        assert len(batches) == len(loader)
        drawn += [i for batch in batches for i in batch]
    assert sorted(drawn) == list(range(len(split)))


@pytest.mark.parametrize("layers", [None, [1], [1, 0]])
@pytest.mark.parametrize("encoding", ["int8", "int4", "bfloat16", "float32"])
def test_small_examples_come_out_of_loaded_shards_as_from_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, layers: list[int] | None
) -> None:
    split, loaded = Made(LENGTHS[:40], encoding=encoding).write(tmp_path), list[bool]()

    def drawn(epochs: int) -> list[tuple[list[int], torch.Tensor]]:
        loader = ActivationLoader(split, batch_size=7, layers=layers, seed=1, readers=1)
        every = [(b.examples.tolist(), b.decode()) for _ in range(epochs) for b in loader]
        loaded.append(loader._loaded is not None and loader._loaded.whole)
        return every

    from_memory = drawn(3)
    monkeypatch.setattr(readahead, "_SMALL_EXAMPLE", 0)
    from_files = drawn(3)
    assert loaded == [True, False]
    for (names, values), (others, read) in zip(from_memory, from_files, strict=True):
        assert names == others
        assert torch.equal(values, read)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("readers", [0, 1])
def test_a_changed_byte_is_refused_where_its_example_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: int, small: bool
) -> None:
    split = Made(LENGTHS[:40], encoding="int8").write(tmp_path)
    if not small:
        monkeypatch.setattr(readahead, "_SMALL_EXAMPLE", 0)
    path = shard_path(split, "hidden_states", 1)
    changed = bytearray(path.read_bytes())
    changed[0] ^= 1
    path.write_bytes(changed)
    with pytest.raises(CorruptStoreError, match=r"shard 1: example 0 of it, layer \d"):
        list(ActivationLoader(split, batch_size=7, readers=readers))


@pytest.mark.parametrize("readers", [0, 1, 3])
def test_kept_batches_hold_what_the_store_holds(split: ActivationSplit, readers: int) -> None:
    kept = list(ActivationLoader(split, batch_size=8, readers=readers, buffer=2))
    for batch in kept:  # read only now: no buffer may have been used again meanwhile
        for i, hidden_states in zip(batch.examples.tolist(), batch.unpack(), strict=True):
            assert torch.equal(hidden_states, split[i])
        assert torch.equal(
            batch.labels["start_positions"],
            torch.from_numpy(split.labels["start_positions"][batch.examples.numpy()]),
        )


def seen(batch: ActivationBatch) -> tuple[list[int], bytes]:
    """The examples that came, and a digest of their values."""
    assert batch.scale is not None
    codes = batch.codes.contiguous().numpy().tobytes() + batch.scale.numpy().tobytes()
    return batch.examples.tolist(), hashlib.sha256(codes).digest()


@pytest.mark.parametrize("readers", [0, 1, 3])
def test_resume_is_exact_anywhere_in_three_epochs(split: ActivationSplit, readers: int) -> None:
    loader = ActivationLoader(split, batch_size=16, seed=3, readers=readers, buffer=3)
    whole, states = [], []
    for _ in range(3):
        states.append((len(whole), loader.state_dict()))
        for batch in loader:
            whole.append(seen(batch))
            states.append((len(whole), loader.state_dict()))
    per_epoch = len(loader)
    for position in (0, 1, per_epoch - 1, per_epoch, per_epoch + 3, 3 * per_epoch - 1):
        state = next(s for n, s in states if n == position)
        resumed = ActivationLoader(split, batch_size=16, seed=3, readers=readers, buffer=3)
        resumed.load_state_dict(state)
        rest = []
        while len(rest) < len(whole) - position:
            rest += [seen(batch) for batch in resumed]
        assert rest == whole[position:]


@dataclass
class ByLength(Sampler):
    """Jumps through the whole store."""

    descending: bool = False

    def sequence(self, plan: ShardPlan, epoch: int, world_size: int) -> npt.ArrayLike:
        order = np.argsort(plan.n_tokens, kind="stable")
        return np.roll(order[::-1] if self.descending else order, epoch)


@pytest.mark.parametrize("readers", [0, 2])
def test_an_order_of_ones_own_is_shared_by_ranks_and_resumed_exactly(
    split: ActivationSplit, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    monkeypatch.setattr(readahead, "_MOST_OPEN", 3)  # of the split's shards: they come back

    def stream(rank: int) -> ActivationLoader:
        return ActivationLoader(
            split, sampler=ByLength(), batch_size=7, readers=readers, rank=rank, world_size=2
        )

    drawn = []
    for rank in (0, 1):
        loader, whole = stream(rank), []
        for _ in range(2):
            whole += [seen(batch) for batch in loader]
        drawn += [i for examples, _ in whole[: len(loader)] for i in examples]
        for position in (3, len(loader), len(loader) + 1):
            one = stream(rank)
            for _ in zip(range(position), itertools.chain(one, one), strict=False):
                pass
            other = stream(rank)
            other.load_state_dict(json.loads(json.dumps(one.state_dict())))
            rest: list[object] = []
            while len(rest) < len(whole) - position:
                rest += [seen(batch) for batch in other]
            assert rest == whole[position:]
    assert drawn == np.argsort(split.plan.n_tokens, kind="stable").tolist()


def test_small_batches_of_a_near_store_are_read_by_one_thread_and_large_ones_by_two(
    split: ActivationSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, int]] = []
    real = readahead.Threads.__init__

    def counted(self: readahead.Threads, threads: int, name: str) -> None:
        started.append((name, threads))
        real(self, threads, name)

    monkeypatch.setattr(readahead.Threads, "__init__", counted)

    def threads(of: ActivationSplit) -> list[int]:
        started.clear()
        next(iter(ActivationLoader(of, batch_size=4)))
        next(iter(of.tokens(0)))
        names = ("bertvision-batch", "bertvision-tokens")
        return [count for name, count in started if name in names]

    assert threads(split) == [1, 1]
    monkeypatch.setattr(readahead, "_LARGE_BYTES", 4 * 16 * 16)  # a batch and a layer have more
    assert threads(split) == [2, 2]


def test_no_more_shards_are_open_than_a_system_allows(
    split: ActivationSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: set[ShardReader] = set()
    most, opening, closing = 0, ShardReader.__init__, ShardReader.close

    def opened(self: ShardReader, *args: Any) -> None:
        nonlocal most
        opening(self, *args)
        held.add(self)
        most = max(most, len(held))

    def closed(self: ShardReader) -> None:
        held.discard(self)
        closing(self)

    monkeypatch.setattr(readahead, "_MOST_OPEN", 4)
    monkeypatch.setattr(ShardReader, "__init__", opened)
    monkeypatch.setattr(ShardReader, "close", closed)
    assert split.plan.n_shards > 20
    loader = ActivationLoader(split, sampler=ByLength(), batch_size=2, readers=0)
    assert len(list(loader)) == len(loader)
    assert most <= 4 + 2
    assert not held


def test_a_position_is_refused_in_another_order_than_its_own(split: ActivationSplit) -> None:
    loader = ActivationLoader(split, sampler=ByLength(), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    assert state["sampler"] == "ByLength(descending=False)"
    for other in (
        ActivationLoader(split, batch_size=4),
        ActivationLoader(split, sampler=ByLength(descending=True), batch_size=4),
    ):
        with pytest.raises(InputError, match=r"of ByLength\(descending=False\), .* the same"):
            other.load_state_dict(state)
    for options in ({"batch_size": 5}, {"batch_size": 4, "world_size": 2}):
        other = ActivationLoader(split, sampler=ByLength(), **options)
        with pytest.raises(InputError, match="another order of epoch 0"):
            other.load_state_dict(state)
        other.load_state_dict({**state, "epoch": 1, "batch": 0})  # between epochs it may change
    plain = ActivationLoader(split, batch_size=4)
    plain.load_state_dict({"epoch": 1, "batch": 2})  # as earlier versions saved it
    assert len(examples(plain)) == len(plain) - 2


def test_samplers_that_are_none_or_change_the_length_are_refused(split: ActivationSplit) -> None:
    class Growing(Sampler):
        exactly_once = False

        def sequence(self, plan: ShardPlan, epoch: int, world_size: int) -> npt.ArrayLike:
            return np.arange(20 * (epoch + 1))

    with pytest.raises(InputError, match="subclass of bertvision.Sampler"):
        ActivationLoader(split, sampler=torch.utils.data.SequentialSampler(split))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="leave shuffle, seed and buffer out"):
        ActivationLoader(split, sampler=ByLength(), seed=1)
    loader = ActivationLoader(split, sampler=Growing())
    assert len(examples(loader)) == 2
    with pytest.raises(InputError, match=r"Growing\(\) gives 3 batches in epoch 1, 2 in epoch 0"):
        examples(loader)


def test_layers_are_a_subset_and_unshuffled_is_stored_order(split: ActivationSplit) -> None:
    loader = ActivationLoader(split, batch_size=8, layers=[2, 0], shuffle=False)
    first = next(iter(loader))
    assert first.examples.tolist() == list(range(8))
    assert torch.equal(first.decode(), split.read(range(8), layers=[2, 0]).decode())


def test_memory_of_batches_and_shards_is_used_again(split: ActivationSplit) -> None:
    loader = ActivationLoader(split, batch_size=4, readers=2, buffer=2)
    for _ in range(3):
        for batch in loader:
            batch.decode()
    assert len(loader._pools["int8", 16]._buffers) <= 5  # two ahead, one in use, hand-over


def test_a_buffer_somebody_refers_to_is_never_given_out_again() -> None:
    pool = BufferPool()
    array = pool.take((4, 3), np.float32)
    view = torch.from_numpy(array)[1:].view(-1)
    address = array.ctypes.data
    del array
    gc.collect()
    assert pool.take((4, 3), np.float32).ctypes.data != address
    del view
    assert pool.take((4, 3), np.float32).ctypes.data == address


def test_where_references_are_counted_otherwise_no_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The count of an idle buffer is not known but tried: here it never changes."""
    monkeypatch.setattr(sys, "getrefcount", lambda _: 2)
    idle_references.cache_clear()
    try:
        pool = BufferPool()
        one = pool.take((4, 3), np.float32)
        one[...] = 1
        other = pool.take((4, 3), np.float32)
        other[...] = 2
        assert (one == 1).all()
    finally:
        idle_references.cache_clear()


def test_a_stream_left_open_at_the_end_of_a_script_says_nothing(
    split: ActivationSplit, tmp_path: Path
) -> None:
    """Nearly every script that somebody tries something with ends so."""
    code = (
        "import sys, bertvision\n"
        "split = bertvision.ActivationStore.open(sys.argv[1])['1e']['train']\n"
        "stream = iter(bertvision.ActivationLoader(split))\n"
        "first, item = next(stream), split[0]\n"
    )
    command = [sys.executable, "-c", code, str(split.storage)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("readers", [0, 2])
def test_a_damaged_shard_stops_the_stream_with_its_name(tmp_path: Path, readers: int) -> None:
    split = Made(LENGTHS, encoding="int8").write(tmp_path)
    shard_path(split, "hidden_states", 5).unlink()
    with pytest.raises(CorruptStoreError, match="shard 5"):
        list(ActivationLoader(split, batch_size=4, readers=readers, buffer=3))


@pytest.mark.parametrize("readers", [0, 1, 3])
@pytest.mark.parametrize("name", ["read", "prefetch", "__init__"])
@pytest.mark.parametrize("error", [MemoryError, OSError, KeyError])
def test_a_reader_that_dies_stops_the_stream_with_its_error(
    split: ActivationSplit,
    monkeypatch: pytest.MonkeyPatch,
    readers: int,
    name: str,
    error: type[Exception],
) -> None:
    real, calls = getattr(ShardReader, name), itertools.count()

    def dying(*args: object, **kwargs: object) -> object:
        if next(calls) == 7:
            raise error("the reader died")
        return real(*args, **kwargs)

    before = threading.active_count()
    monkeypatch.setattr(ShardReader, name, dying)
    loader = ActivationLoader(split, batch_size=4, readers=readers, buffer=3)
    started = time.monotonic()
    if name == "prefetch" and not readers:
        assert len(list(loader)) == len(loader)  # without readers nothing is brought near
        return
    with pytest.raises(error, match="the reader died"):
        list(loader)
    assert time.monotonic() - started < 5
    assert threading.active_count() == before
    monkeypatch.undo()
    assert len(list(loader)) == len(loader)  # and it can be iterated again


def test_leaving_an_iteration_ends_its_threads(split: ActivationSplit) -> None:
    before = threading.active_count()
    iterator = iter(ActivationLoader(split, batch_size=4, readers=3))
    next(iterator)
    iterator.close()
    assert threading.active_count() == before


def test_incomplete_splits_and_bad_arguments_are_refused(
    tmp_path: Path, split: ActivationSplit
) -> None:
    with pytest.raises(IncompleteSplitError):
        ActivationLoader(Made(LENGTHS).write(tmp_path, shards=1))
    with pytest.raises(InputError, match="readers is -1"):
        ActivationLoader(split, readers=-1)
    with pytest.raises(InputError, match="batch_size is 0"):
        ActivationLoader(split, batch_size=0)
