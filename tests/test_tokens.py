"""The token stream: what it gives is what the store holds, in an exact order, in bounded memory."""

from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import Made, shard_path

from bertvision.errors import (
    CorruptStoreError,
    IncompleteSplitError,
    InputError,
    UnknownNameError,
)
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader
from bertvision.featurestore.tokens.feed import TokenBatch
from bertvision.featurestore.tokens.stream import TokenStream

LENGTHS = np.random.default_rng(1).integers(1, 33, 60).tolist()
TOKENS = sum(LENGTHS)
ENCODINGS = ("int8", "int4", "bfloat16", "float16", "float32")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> ActivationSplit:
    return Made(LENGTHS, encoding="int8").write(tmp_path_factory.mktemp("store"))


def places(batch: TokenBatch) -> list[tuple[int, int]]:
    return list(zip(batch.examples.tolist(), batch.positions.tolist(), strict=True))


def seen(batch: TokenBatch) -> tuple[list[tuple[int, int]], bytes]:
    return places(batch), batch.vectors.numpy().tobytes()


def every(split: ActivationSplit) -> list[tuple[int, int]]:
    return [(i, p) for i, n in enumerate(split.plan.n_tokens.tolist()) for p in range(n)]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 500),
    st.integers(1, 20),
    st.integers(1, 3),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_each_token_comes_once_an_epoch_over_all_ranks(
    split: ActivationSplit, batch_size: int, buffer: int, world: int, readers: int, shuffle: bool
) -> None:
    drawn = []
    for rank in range(world):
        stream = split.tokens(
            1,
            batch_size=batch_size,
            shuffle=shuffle,
            buffer=buffer,
            rank=rank,
            world_size=world,
            readers=readers,
        )
        drawn += [place for batch in stream for place in places(batch)]
    assert sorted(drawn) == every(split)
    if not shuffle:
        assert drawn == every(split)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("layers", [2, -1, [2, 0], None])
def test_vectors_are_the_decoded_states_of_the_tokens_that_are_named(
    tmp_path: Path, encoding: str, layers: Any
) -> None:
    split = Made(LENGTHS[:20], encoding=encoding, hidden=66).write(tmp_path)
    kept = list(split.tokens(layers, batch_size=37, buffer=3))
    several = [layers] if isinstance(layers, int) else layers
    truth = [split.read([example], several).decode() for example in range(len(split))]
    for batch in kept:  # read only now: no buffer may have been used again meanwhile
        for vector, (example, position) in zip(batch.vectors, places(batch), strict=True):
            expected = truth[example][position]
            assert torch.equal(vector, expected[0] if isinstance(layers, int) else expected)


@pytest.mark.parametrize("compression", ["zstd"])
def test_compressed_shards_stream_alike(tmp_path: Path, compression: str) -> None:
    plain = Made(LENGTHS, encoding="int8").write(tmp_path / "plain")
    packed = Made(LENGTHS, encoding="int8", compression=compression).write(tmp_path / "packed")
    pairs = zip(plain.tokens([0, 2]), packed.tokens([0, 2]), strict=True)
    assert all(seen(one) == seen(other) for one, other in pairs)


@pytest.mark.parametrize(("readers", "endless"), [(0, False), (2, False), (0, True), (2, True)])
def test_resume_is_exact_at_every_batch_of_three_epochs(
    split: ActivationSplit, readers: int, endless: bool
) -> None:
    def stream(rank: int) -> TokenStream:
        options = {"seed": 3, "buffer": 4, "endless": endless, "world_size": 2}
        return split.tokens(0, batch_size=100, readers=readers, rank=rank, **options)

    def batches(of: TokenStream) -> Iterator[TokenBatch]:
        while True:
            yield from of

    one, whole, states = stream(1), [], []
    total = 3 * -(-TOKENS // 2 // 100)
    for batch in itertools.islice(batches(one), total + 2):
        whole.append(seen(batch))
        states.append(json.dumps(one.state_dict()))
    assert len({str(places) for places, _ in whole}) == total + 2
    other = stream(0)  # the state of one rank is that of all
    for _ in itertools.islice(batches(other), 3):
        pass
    assert json.dumps(other.state_dict()) == states[2]
    for position in range(1, total + 1):
        resumed = stream(1)
        resumed.load_state_dict(json.loads(states[position - 1]))
        rest = [seen(batch) for batch in itertools.islice(batches(resumed), 2)]
        assert rest == whole[position : position + 2]


def test_an_endless_stream_has_full_batches_and_each_token_once_an_epoch(
    split: ActivationSplit,
) -> None:
    stream = split.tokens(-1, batch_size=64, endless=True, buffer=3)
    batches = list(itertools.islice(stream, 3 * TOKENS // 64))
    assert {len(batch) for batch in batches} == {64}
    drawn = [place for batch in batches for place in places(batch)]
    epochs = [drawn[i * TOKENS : (i + 1) * TOKENS] for i in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == every(split)
    assert epochs[0] != epochs[1]
    with pytest.raises(TypeError, match="without end"):
        len(stream)


def test_the_order_does_not_depend_on_layers_or_threads(split: ActivationSplit) -> None:
    options = [{"layers": 0}, {"layers": [2, 1], "readers": 0}, {"layers": 2, "readers": 3}]
    orders = [
        [places(batch) for batch in split.tokens(batch_size=70, seed=5, buffer=4, **option)]
        for option in options
    ]
    assert orders[0] == orders[1] == orders[2]


def test_tokens_are_left_out_by_their_ids_and_by_an_array(split: ActivationSplit) -> None:
    ids = split.array("input_ids")
    first, n = split.plan.first_token, split.plan.n_tokens
    special = set(ids[first].tolist()) | set(ids[first + n - 1].tolist())
    drawn = [p for batch in split.tokens(1, without=special) for p in places(batch)]
    lengths = dict(enumerate(n.tolist()))
    assert sorted(drawn) == [(i, p) for i, p in every(split) if 0 < p < lengths[i] - 1]
    # a mask over the token axis, and a stored array by its name, whose zeros are left out
    odd = [p for batch in split.tokens(1, keep=ids % 2) for p in places(batch)]
    assert {int(ids[first[i] + p]) % 2 for i, p in odd} == {1}
    named = [p for batch in split.tokens(1, keep="input_ids") for p in places(batch)]
    assert len(odd) == TOKENS // 2
    assert len(named) == TOKENS - 1  # the token with id 0
    both = [p for batch in split.tokens(1, without=special, keep=ids % 2) for p in places(batch)]
    assert set(both) == set(odd) & set(drawn)


def test_states_that_any_code_stored_stream_by_the_names_of_their_layers_and_a_loss_mask(
    tmp_path: Path,
) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(n, 2, 8, generator=generator) for n in (5, 9, 3)]
    masks = [torch.rand(len(states), generator=generator) > 0.5 for states in given]
    store = ActivationStore.create(tmp_path / "states")
    options = {"hidden_size": 8, "layers": ["mlp", "residual"], "encoding": "float32"}
    with store.writer("0e", "chat", **options) as writer:
        for i, (states, mask) in enumerate(zip(given, masks, strict=True)):
            writer.add(i, states, fields={"loss_mask": mask.numpy()})
        split = writer.finish()
    (batch,) = split.tokens("residual", keep="loss_mask", shuffle=False)
    wanted = [states[mask, 1] for states, mask in zip(given, masks, strict=True)]
    assert batch.vectors.shape == (int(sum(mask.sum() for mask in masks)), 8)
    assert torch.equal(batch.vectors, torch.cat(wanted))
    assert torch.equal(split.read([0], "residual").decode()[:, 0], given[0][:, 1])
    (both,) = split.tokens(["residual", "mlp"], shuffle=False)
    assert torch.equal(both.vectors, torch.cat(given).flip(1))


@pytest.mark.parametrize("encoding", ["int8", "float32"])
@pytest.mark.parametrize("layers", [1, [0, 2]])
def test_scaled_vectors_have_the_mean_norm_of_sae_trainers(
    tmp_path: Path, encoding: str, layers: Any
) -> None:
    split = Made(LENGTHS, encoding=encoding).write(tmp_path)
    plain = torch.cat([batch.vectors for batch in split.tokens(layers, seed=1)])
    stream = split.tokens(layers, seed=1, scaled=True)
    scaled = torch.cat([batch.vectors for batch in stream])
    norms = scaled.norm(dim=-1).mean(dim=0)
    assert torch.allclose(norms, torch.full_like(norms, 16**0.5), rtol=1e-3)  # hidden is 16
    factors = stream.scale_factors
    wanted = plain * (factors if isinstance(layers, int) else factors[:, None])
    assert torch.allclose(scaled, wanted, atol=1e-5)


def test_vectors_of_a_stream_are_those_of_its_batches(split: ActivationSplit) -> None:
    whole = [batch.decode(torch.bfloat16) for batch in split.tokens(1, batch_size=90)]
    alone = list(split.tokens(1, batch_size=90).vectors("cpu", torch.bfloat16))
    assert all(torch.equal(one, other) for one, other in zip(whole, alone, strict=True))
    assert alone[0].shape == (90, 16)
    assert alone[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float16", torch.int32, None])
def test_vectors_of_no_floating_point_type_are_refused(split: ActivationSplit, dtype: Any) -> None:
    with pytest.raises(InputError, match="dtype is .*such as torch.float32"):
        next(split.tokens(0).vectors("cpu", dtype))


def test_memory_is_that_of_the_buffer_whatever_the_size_of_the_split(tmp_path: Path) -> None:
    def peak(examples: int) -> int:
        made = Made([30] * examples, hidden=256, layers=1, encoding="float32", shard_tokens=64)
        split = made.write(tmp_path / str(examples))
        del made
        assert split.plan.n_shards == examples // 2
        stream = split.tokens(0, batch_size=32, buffer=4, readers=1)
        tracemalloc.start()
        for batch in stream:
            batch.decode()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small, large = peak(40), peak(240)
    shard = 64 * 256 * 4
    assert small > 4 * shard
    assert large < small + 2 * shard  # of 100 shards more


@pytest.mark.parametrize("buffer", [4, 99])
def test_memory_is_taken_once_however_many_epochs_and_iterations_there_are(
    tmp_path: Path, buffer: int
) -> None:
    made = Made([30] * 40, hidden=1024, layers=6, encoding="int4", shard_tokens=64)
    split = made.write(tmp_path)
    shards = min(buffer + 1, split.plan.n_shards)
    stream = split.tokens(0, batch_size=32, buffer=buffer, readers=1)
    list(stream)
    ours = tracemalloc.Filter(True, "*/featurestore/*")  # not a kernel that is compiled meanwhile
    tracemalloc.start()
    held = []
    for _ in range(3):
        list(stream)
        iterator = iter(stream)
        next(iterator)
        iterator.close()
        traces = tracemalloc.take_snapshot().filter_traces([ours]).traces
        held.append(sum(trace.size for trace in traces))
    tracemalloc.stop()
    # no second ring, and neither scales of all layers nor checksums of what was read
    ring = shards * 64 * 512
    assert max(held) < ring // 2


def test_without_readers_no_more_is_read_than_the_next_batch_needs(
    split: ActivationSplit, shards_read: list[str]
) -> None:
    next(iter(split.tokens(0, batch_size=5, buffer=4, readers=0)))
    assert len(shards_read) == 4
    shards_read.clear()
    options = {"buffer": 99, "rank": 1, "world_size": 4, "endless": True}
    next(iter(split.tokens(0, batch_size=5, readers=0, **options)))
    share = split.record.shards / 4
    assert share <= len(shards_read) <= share + 2


def test_what_somebody_kept_is_given_back_with_the_last_batch(tmp_path: Path) -> None:
    """A stream that held whatever was ever kept of it would hold the split, and more."""
    split = Made([64] * 40, hidden=256, layers=1).write(tmp_path)
    stream = split.tokens(0, batch_size=64, buffer=1, readers=0)
    vectors = 64 * 256 * 4
    list(stream.vectors())  # what is allocated once
    tracemalloc.start()
    kept = list(stream.vectors())
    assert tracemalloc.get_traced_memory()[0] > 32 * vectors
    del kept
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 8 * vectors


@pytest.fixture
def shards_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are read, in order."""
    names, real = [], ShardReader.read

    def read(self: ShardReader, *args: Any) -> None:
        names.append(self.name)
        real(self, *args)

    monkeypatch.setattr(ShardReader, "read", read)
    return names


@pytest.mark.parametrize("endless", [True, False])
def test_a_small_split_is_not_read_again_to_fill_a_large_buffer(
    tmp_path: Path, shards_read: list[str], endless: bool
) -> None:
    """Nor is memory taken for more shards than there are."""
    split = Made([64] * 3, hidden=256, layers=1).write(tmp_path)
    tracemalloc.start()
    batches = iter(split.tokens(0, batch_size=64, buffer=256, endless=endless))
    first = next(batches)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    batches.close()
    assert len(set(places(first))) == 64
    assert len(shards_read) == len(set(shards_read)) == 3
    assert peak < (3 + 3 + 4) * 64 * 256 * 4


@pytest.mark.parametrize("readers", [0, 1, 3])
@pytest.mark.parametrize("endless", [True, False])
def test_shards_that_all_fit_into_the_buffer_are_read_once(
    split: ActivationSplit, shards_read: list[str], readers: int, endless: bool
) -> None:
    """Though iterations were left, and each rank needs other shards in each epoch."""
    shards = split.record.shards
    for rank in range(2):
        options = {"rank": rank, "world_size": 2, "seed": 4, "endless": endless, "batch_size": 30}
        stream = split.tokens(1, buffer=shards, readers=readers, **options)
        resumed = split.tokens(1, buffer=shards, readers=0, **options)
        shards_read.clear()
        for batches in (3, 17, 1, 40, 40):
            before, drawn = stream.state_dict(), []
            for batch in itertools.islice(stream, batches):
                drawn.append(seen(batch))
            by_stream = len(shards_read)
            resumed.load_state_dict(before)
            assert drawn == [seen(batch) for batch in itertools.islice(resumed, batches)]
            del shards_read[by_stream:]
        assert len(shards_read) == len(set(shards_read)) <= shards


def test_a_shard_that_could_not_be_read_is_read_again(
    split: ActivationSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards in memory hold nothing of a reading that failed."""
    stream = split.tokens(1, batch_size=50, buffer=split.record.shards)
    wanted = [seen(batch) for batch in split.tokens(1, batch_size=50, buffer=split.record.shards)]
    real, calls = ShardReader.read, itertools.count()

    def dying(*args: Any) -> None:
        if next(calls) == 3:
            args[4][...] = 77  # the codes
            raise MemoryError("the reader died")
        real(*args)

    monkeypatch.setattr(ShardReader, "read", dying)
    with pytest.raises(MemoryError, match="the reader died"):
        list(stream)
    monkeypatch.undo()
    assert [seen(batch) for batch in stream] == wanted


def test_streams_that_differ_in_their_mix_read_each_shard_from_the_disk_once(disk: Path) -> None:
    """Three in step cost 1.1 times the bytes of one, though no page outlives a round.

    Streams of other seeds, which need other shards, cost three times as much.
    """
    made = Made([64] * 48, layers=1, hidden=1024, encoding="float32")
    split = made.write(disk)
    files = [path for path in disk.rglob("*") if path.is_file()]

    def forget() -> None:
        for path in files:
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(*options: dict[str, int]) -> tuple[int, list[list[tuple[int, int]]]]:
        streams = [split.tokens(0, batch_size=64, buffer=4, readers=0, **o) for o in options]
        forget()
        before = bytes_from_disk()
        orders: list[list[tuple[int, int]]] = [[] for _ in streams]
        for batches in zip(*streams, strict=True):
            for order, batch in zip(orders, batches, strict=True):
                order += places(batch)
            forget()
        return bytes_from_disk() - before, orders

    one, _ = read({"mix": 0})
    if not one:
        pytest.skip("the temporary folder is not on a disk whose reads are counted")
    together, orders = read(*({"mix": mix} for mix in range(3)))
    assert together <= 1.1 * one
    assert [sorted(order) for order in orders] == [every(split)] * 3
    assert orders[0] != orders[1] != orders[2] != orders[0]
    apart, _ = read(*({"seed": seed} for seed in range(3)))
    assert apart > 2 * one


def bytes_from_disk() -> int:
    """Bytes that this process has had the disk read so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def test_a_position_is_refused_in_another_stream(split: ActivationSplit) -> None:
    stream = split.tokens(0, batch_size=50, seed=1, buffer=4)
    next(iter(stream))
    state = stream.state_dict()
    for name, options in {
        "batch_size": {"batch_size": 51},
        "seed": {"seed": 2},
        "buffer": {"buffer": 5},
        "endless": {"endless": True},
        "world_size": {"world_size": 2},
        "mix": {"mix": 1},
        "tokens": {"without": [5]},
    }.items():
        other = split.tokens(0, **{"batch_size": 50, "seed": 1, "buffer": 4, **options})
        with pytest.raises(InputError, match=f"its {name} is "):
            other.load_state_dict(state)
    with pytest.raises(InputError, match="its seed is 1, here it is None"):
        split.tokens(0, batch_size=50, shuffle=False).load_state_dict({**state, "buffer": 1})


def test_wrong_arguments_and_incomplete_splits_are_refused(
    tmp_path: Path, split: ActivationSplit
) -> None:
    for name, value in {"batch_size": 0, "buffer": 0, "seed": -1, "readers": -1}.items():
        with pytest.raises(InputError, match=f"{name} is {value}"):
            split.tokens(0, **{name: value})
    with pytest.raises(InputError, match="rank 2 is outside the world of 2"):
        split.tokens(0, rank=2, world_size=2)
    with pytest.raises(InputError, match="layer 7 is not stored"):
        split.tokens(7)
    with pytest.raises(UnknownNameError, match="has no array 'loss_mask'"):
        split.tokens(0, keep="loss_mask")
    with pytest.raises(InputError, match=r"keep is int64 of shape \(3,\)"):
        split.tokens(0, keep=[1, 0, 1])
    with pytest.raises(InputError, match=r"keep is <U1 of shape .*: give a number or bool"):
        split.tokens(0, keep=np.full(len(split.array("input_ids")), "y"))
    for name, odd in {"batch_size": 8.0, "buffer": "x", "rank": 0.5, "mix": None}.items():
        with pytest.raises(InputError, match=f"{name} is {odd!r}: give a whole number"):
            split.tokens(0, **{name: odd})
    for without in (5, "[CLS]", [1.5], None):
        with pytest.raises(InputError, match="without is .*: give vocabulary indices"):
            split.tokens(0, without=without)
    for layers in (0.5, [0, 1.5], [[0]], object()):
        with pytest.raises(InputError, match="layers is .*: give indices of hidden states"):
            split.tokens(layers)
    with pytest.raises(InputError, match="are left out"):
        split.tokens(0, without=range(TOKENS))
    with pytest.raises(IncompleteSplitError):
        Made(LENGTHS).write(tmp_path, shards=1).tokens(0)


def test_a_layer_may_be_a_number_of_numpy(split: ActivationSplit) -> None:
    """An element of an arange is such a layer; alone it gives no axis of layers."""
    (batch,) = split.tokens(np.int64(1), batch_size=TOKENS)
    assert batch.vectors.shape == (TOKENS, 16)
    assert split.read([0], np.int64(1)).codes.shape[1] == 1


@pytest.mark.parametrize(
    "state", [None, {}, {"batches": -3}, {"batches": "x"}, {"batches": 1.5}], ids=repr
)
def test_what_is_no_position_is_refused(split: ActivationSplit, state: Any) -> None:
    stream = split.tokens(0)
    if state:
        state = {**stream.state_dict(), **state}
    with pytest.raises(InputError, match="position"):
        stream.load_state_dict(state)
    assert stream.batches == 0


def test_a_layer_that_no_factor_can_scale_is_named(tmp_path: Path) -> None:
    """Zeros times infinity would be streamed as NaN."""
    store = ActivationStore.create(tmp_path / "states")
    options = {"hidden_size": 8, "layers": [0, 4], "encoding": "float32"}
    with store.writer("0e", "zeros", **options) as writer:
        writer.add("a", torch.stack([torch.ones(3, 8), torch.zeros(3, 8)], dim=1))
        split = writer.finish()
    assert torch.isfinite(next(iter(split.tokens(0, scaled=True))).vectors).all()
    with pytest.raises(InputError, match="layer 4 of 0e/zeros have a mean norm of 0"):
        next(iter(split.tokens(scaled=True)))


@pytest.mark.parametrize("readers", [0, 2])
def test_a_flipped_bit_stops_the_stream_with_the_shard(tmp_path: Path, readers: int) -> None:
    split = Made(LENGTHS, encoding="int8").write(tmp_path)
    path = shard_path(split, "hidden_states", 5)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="shard 5.*layer 0"):
        list(split.tokens(0, readers=readers, buffer=3))
    assert len(list(split.tokens(1, readers=readers, buffer=3))) == 1  # other layers are whole


@pytest.mark.parametrize("readers", [0, 2])
def test_a_reader_that_dies_stops_the_stream_and_its_threads(
    split: ActivationSplit, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    real, calls = ShardReader.read, itertools.count()

    def dying(*args: Any) -> None:
        if next(calls) == 7:
            raise MemoryError("the reader died")
        real(*args)

    before = threading.active_count()
    monkeypatch.setattr(ShardReader, "read", dying)
    stream = split.tokens(0, batch_size=20, readers=readers, buffer=2)
    with pytest.raises(MemoryError, match="the reader died"):
        list(stream)
    assert threading.active_count() == before
    monkeypatch.undo()
    stream.load_state_dict({**stream.state_dict(), "batches": 0})
    assert len(list(stream)) == len(stream)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc")
@pytest.mark.parametrize("buffer", [2, 99])
def test_an_iteration_that_ends_anyhow_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int
) -> None:
    plain = Made(LENGTHS, encoding="int8").write(tmp_path / "plain")
    packed = Made(LENGTHS, encoding="int8", compression="zstd").write(tmp_path / "packed")
    options = {"batch_size": 20, "readers": 2, "buffer": buffer}

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()  # what is only forgotten would be closed by chance
    try:
        before = opened()
        stream = plain.tokens(0, **options)
        assert len(list(stream)) == len(stream)
        assert opened() == before
        batches = iter(stream)
        next(batches)
        batches.close()
        assert opened() == before
        for shard in range(packed.plan.n_shards):
            path = shard_path(packed, "hidden_states", shard)
            index = path.read_bytes()[-(16 * 3 + 4) :]
            path.write_bytes(bytes(path.stat().st_size - len(index)) + index)
        damaged = packed.tokens(0, **options)
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match="checksum"):
                list(damaged)
        assert opened() == before
        monkeypatch.setattr(ShardReader, "read", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(plain.tokens(0, **options))
        assert opened() == before
    finally:
        gc.enable()


def test_leaving_an_iteration_ends_its_threads(split: ActivationSplit) -> None:
    before = threading.active_count()
    iterator = iter(split.tokens(0, batch_size=4, readers=3))
    next(iterator)
    iterator.close()
    assert threading.active_count() == before


def test_a_stream_has_one_iteration_at_a_time(split: ActivationSplit) -> None:
    """Two would give tokens twice, and save a position that is of neither."""
    stream, alone = split.tokens(0, batch_size=30), split.tokens(0, batch_size=30)
    whole = [seen(batch) for batch in alone]
    with pytest.raises(InputError, match="a stream has one at a time"):
        list(zip(stream, stream, strict=True))
    stream = split.tokens(0, batch_size=30)
    first, second = iter(stream), iter(stream)
    drawn = [seen(next(first)), seen(next(second))]
    with pytest.raises(InputError, match="another one was begun"):
        next(first)
    state = stream.state_dict()
    assert [*drawn, *map(seen, second)] == whole
    third = iter(stream)
    next(third)
    stream.load_state_dict(state)
    with pytest.raises(InputError, match="or a position loaded"):
        next(third)
    assert [seen(batch) for batch in stream] == whole[2:]


@pytest.mark.parametrize("encoding", ["int8", "float32"])
@pytest.mark.parametrize("scaled", [False, True])
def test_vectors_may_be_kept_and_changed_though_their_memory_is_used_again(
    tmp_path: Path, encoding: str, scaled: bool
) -> None:
    split = Made(LENGTHS, encoding=encoding).write(tmp_path)
    options = {"batch_size": 50, "seed": 2, "scaled": scaled}
    wanted = [batch.vectors.clone() for batch in split.tokens(1, **options)]
    stream = split.tokens(1, **options)
    kept = []
    for vectors in stream.vectors():
        kept.append(vectors)
        vectors += 1
    assert all(torch.equal(one, other + 1) for one, other in zip(kept, wanted, strict=True))
    del kept, vectors
    for vectors in stream.vectors():
        vectors.zero_()
    places = set()
    for vectors in stream.vectors():
        places.add(vectors.data_ptr())
    assert len(places) <= 4 < len(wanted)


def test_values_that_would_count_as_a_yes_are_refused(split: ActivationSplit) -> None:
    for name in ("shuffle", "endless", "scaled"):
        with pytest.raises(InputError, match=f"{name} is 'no': give True or False"):
            split.tokens(0, **{name: "no"})
    assert (
        split.tokens(0, shuffle=np.bool_(False)).state_dict()
        == split.tokens(0, shuffle=False).state_dict()
    )
    keep = np.ones(len(split.array("input_ids")))
    keep[0] = np.nan
    with pytest.raises(InputError, match="keep has NaN for 1 token of"):
        split.tokens(0, keep=keep)
    for index in (-1, 1 << 31, 1 << 70):
        with pytest.raises(InputError, match="without"):
            split.tokens(0, without=[index])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_of_torch_says_what_to_iterate_over(
    split: ActivationSplit, workers: int
) -> None:
    for stream in (split.tokens(0), ActivationLoader(split)):
        loader = torch.utils.data.DataLoader(stream, num_workers=workers)  # type: ignore[var-annotated]
        with pytest.raises(InputError, match="iterate over it, without a DataLoader"):
            next(iter(loader))
    with pytest.raises(InputError, match="shuffle is 'no': give True or False"):
        ActivationLoader(split, shuffle="no")  # type: ignore[arg-type]
