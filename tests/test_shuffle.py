"""Splits of shuffled tokens: the same vectors in the permuted order, whole wherever one dies."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import Op, Recorder, contents, small
from processes import run_code
from stores import Made, record_path, shard_path
from terminal import done, run

import bertvision
from bertvision.errors import (
    CorruptStoreError,
    DiskSpaceError,
    FormatVersionError,
    IncompleteSplitError,
    InputError,
    ProvenanceError,
)
from bertvision.featurestore.format import ledger
from bertvision.featurestore.shuffling import shuffle_split
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.tokens.stream import TokenStream

LENGTHS = np.random.default_rng(1).integers(1, 33, 40).tolist()
TINY = 1 << 10  # bytes of memory: every shard has a bucket of its own


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ActivationSplit:
    return Made(LENGTHS, encoding="int8").write(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def copy(source: ActivationSplit) -> ActivationSplit:
    return shuffle_split(source, "mixed", 5, memory=TINY)


def streamed(stream: TokenStream) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """(example, position) of all tokens of an epoch, and their vectors (tokens, …)."""
    batches = list(stream)
    places = [
        place
        for batch in batches
        for place in zip(batch.examples.tolist(), batch.positions.tolist(), strict=True)
    ]
    return places, torch.cat([batch.vectors for batch in batches])


@pytest.mark.parametrize(
    ("encoding", "compression", "memory"),
    [
        ("int8", "none", TINY),
        ("int4", "zstd", 1 << 30),
        ("bfloat16", "none", 1 << 16),
        ("float32", "zstd", TINY),
    ],
)
def test_the_order_is_the_permutation_and_every_vector_is_the_sources(
    tmp_path: Path, encoding: str, compression: str, memory: int
) -> None:
    made = Made(LENGTHS, encoding=encoding, compression=compression, hidden=66)
    source = made.write(tmp_path)
    places, vectors = streamed(source.tokens(shuffle=False))
    copy = shuffle_split(source, "mixed", 5, memory=memory)
    found, moved = streamed(copy.tokens(shuffle=False, batch_size=37))
    order = np.random.default_rng(5).permutation(len(places))
    assert found == [places[i] for i in order]
    assert torch.equal(moved, vectors[order])
    assert copy.verify() == []


def test_any_memory_gives_the_same_bytes(tmp_path: Path) -> None:
    source = Made(LENGTHS, encoding="int8").write(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    shuffle_split(source, "mixed", memory=TINY)
    (tmp_path / "scratch").mkdir()
    shuffle_split(
        ActivationSplit(tmp_path / "other", "1e", "train"), "mixed", scratch=tmp_path / "scratch"
    )
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    assert not list((tmp_path / "scratch").iterdir())


def test_arrays_of_tokens_move_with_them_and_those_of_examples_stay(
    source: ActivationSplit, copy: ActivationSplit
) -> None:
    ids = source.array("input_ids")
    left_out = ids[source.plan.first_token[:9]].tolist()
    found, _ = streamed(copy.tokens(0, shuffle=False, without=left_out))
    kept, _ = streamed(source.tokens(0, shuffle=False, without=left_out))
    assert sorted(found) == sorted(kept)
    assert len(kept) == sum(LENGTHS) - 9
    starts = copy.labels["start_positions"], source.labels["start_positions"]
    assert np.array_equal(*starts)
    assert copy.table() == source.table()


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_a_copy_and_a_stopped_stream_goes_on(
    copy: ActivationSplit, shuffle: bool
) -> None:
    whole, _ = streamed(copy.tokens(1, shuffle=shuffle, batch_size=50))
    shares = []
    for rank in range(3):
        options = {"shuffle": shuffle, "batch_size": 50, "rank": rank, "world_size": 3}
        one = copy.tokens(1, **options)
        places, _ = streamed(one)
        begun = copy.tokens(1, **options)
        next(iter(begun))
        again = copy.tokens(1, **options)
        again.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        assert streamed(again)[0] == places[-len(places) + 50 :]
        shares += places
    assert sorted(shares) == sorted(whole)
    assert shuffle or shares == whole


def test_a_position_in_another_permutation_is_refused(tmp_path: Path) -> None:
    source = Made(LENGTHS).write(tmp_path)
    states = []
    for seed in (1, 2):
        stream = shuffle_split(source, "mixed", seed).tokens(0, shuffle=False)
        states.append(stream.state_dict())
        ActivationStore.open(tmp_path).remove("1e", "mixed")
    shuffle_split(source, "mixed", 1).tokens(0, shuffle=False).load_state_dict(states[0])
    with pytest.raises(InputError, match="its plan is"):
        ActivationSplit(tmp_path, "1e", "mixed").tokens(0, shuffle=False).load_state_dict(states[1])


def test_whoever_takes_examples_refuses_a_copy_and_names_its_source(
    copy: ActivationSplit,
) -> None:
    refusing: list[Callable[[], object]] = [
        lambda: copy[0],
        lambda: copy.read([3, 4]),
        lambda: copy.text(0),
        lambda: copy.open_shard(0),
        lambda: copy.dask(),
        lambda: copy.to_xarray(),
        lambda: bertvision.ActivationLoader(copy),
        lambda: copy.require_complete(),
        lambda: shuffle_split(copy, "again"),
    ]
    for refused in refusing:
        with pytest.raises(InputError, match="1e/mixed were shuffled.*examples of 1e/train"):
            refused()
    tree = ActivationStore.open(str(copy.storage)).to_xarray()
    assert list(tree["1e"]) == ["train"]
    assert "tokens shuffled" in repr(copy)


def test_a_reader_that_does_not_know_of_shuffled_tokens_refuses_them_by_name(
    copy: ActivationSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_KNOWN", {*ledger.FEATURES, ledger.GROWING})
    with pytest.raises(FormatVersionError, match="needs shuffled_tokens, which"):
        ActivationSplit(copy.storage, "1e", "mixed")


def test_a_copy_that_was_begun_from_something_else_is_refused(tmp_path: Path) -> None:
    source = Made(LENGTHS).write(tmp_path)
    shuffle_split(source, "mixed", 1)
    shuffle_split(source, "mixed", 1)  # it is whole: nothing is done
    with pytest.raises(ProvenanceError, match="shuffle_seed = 1, now it is 2"):
        shuffle_split(source, "mixed", 2)
    other = Made(LENGTHS[:-1], split="other").write(tmp_path)
    with pytest.raises(ProvenanceError, match="shuffled_from = '1e/train', now it is '1e/other'"):
        shuffle_split(other, "mixed", 1)
    with pytest.raises(ProvenanceError, match="1e/other .* was written with examples = 39"):
        shuffle_split(source, "other", 1)
    with pytest.raises(InputError, match="into itself"):
        shuffle_split(source, "train", 1)


def test_an_incomplete_source_or_copy_is_refused(tmp_path: Path) -> None:
    source = Made(LENGTHS).write(tmp_path, shards=2)
    with pytest.raises(IncompleteSplitError, match="extract"):
        shuffle_split(source, "mixed")
    copy = shuffle_split(Made(LENGTHS).write(tmp_path), "mixed", 3)
    record_path(copy, 1).unlink()
    with pytest.raises(IncompleteSplitError, match="store shuffle 1e/train mixed --seed 3"):
        copy.tokens(0)


def test_damage_is_found_in_the_copy_and_never_copied(tmp_path: Path) -> None:
    source = Made(LENGTHS).write(tmp_path)
    copy = shuffle_split(source, "mixed")
    for split in (copy, source):
        path = shard_path(split, "hidden_states", 1)
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    assert any("shard 1" in line for line in copy.verify())
    with pytest.raises(CorruptStoreError, match="1e/train shard 1"):
        shuffle_split(source, "another")
    assert not ActivationSplit(tmp_path, "1e", "another").ledger.shards()


def test_a_bucket_that_changes_between_the_passes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Made(LENGTHS).write(tmp_path)
    from_disk = np.fromfile

    def flipped(path: Path, dtype: np.dtype) -> np.ndarray:
        data = bytearray(Path(path).read_bytes())
        data[5] ^= 1
        Path(path).write_bytes(data)
        return from_disk(path, dtype)

    with monkeypatch.context() as patched:
        patched.setattr(np, "fromfile", flipped)
        with pytest.raises(CorruptStoreError, match="was changed"):
            shuffle_split(source, "mixed")
    assert shuffle_split(source, "mixed").verify() == []


def test_codes_in_memory_are_those_that_were_allowed(tmp_path: Path) -> None:
    made = Made([64] * 120, layers=4, hidden=256, shard_tokens=256)
    source = made.write(tmp_path)
    codes = sum(states.nbytes for states in made.hidden_states)
    allowed = codes // 8
    tracemalloc.start()
    shuffle_split(source, "mixed", memory=allowed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert codes > 30e6
    # the tokens of a portion, those of them that go to a bucket, a shard or two, and the order
    assert peak < 3 * allowed + 100 * source.record.tokens


def test_a_disk_without_room_is_said_before_anything_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Made(LENGTHS).write(tmp_path)
    monkeypatch.setattr(type(source.storage), "free_bytes", lambda _: 1000)
    with pytest.raises(DiskSpaceError, match="has room for 1,000"):
        shuffle_split(source, "mixed")


# A warm process forks one that dies for each point.
DYING = """
import os, signal, sys
from pathlib import Path
import torch
from faults import Recorder
from bertvision.featurestore.shuffling import shuffle_split
from bertvision.featurestore.split import ActivationSplit

torch.set_num_threads(1)
root = Path(sys.argv[1])
for point in sys.argv[2:]:
    if os.fork():
        os.wait()
        continue

    def before(i, op):
        if i == int(point):
            os.kill(os.getpid(), signal.SIGKILL)

    source = ActivationSplit(root / point, "1e", "train")
    with Recorder(root / point, before).recording():
        shuffle_split(source, "mixed", 5, memory=1)
    os._exit(0)
"""


def begun(store: Path) -> ActivationSplit:
    return ActivationSplit(store, "1e", "train")


def committed(split: ActivationSplit) -> dict[int, int]:
    """The file of each committed shard's record, by the system's number."""
    return {shard: record_path(split, shard).stat().st_ino for shard in split.ledger.shards()}


@pytest.mark.parametrize("most", [8, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_anywhere_the_same_call_ends_in_the_same_bytes(
    memory: Path, most: int, tried: Callable[[int, str], None]
) -> None:
    made = small()
    made.contents = replace(made.contents, per_token={"input_ids": np.arange(155, dtype=np.int32)})
    made.write(memory / "fresh")
    shutil.copytree(memory / "fresh", memory / "whole")
    recorder = Recorder(memory / "whole")
    with recorder.recording():
        shuffle_split(begun(memory / "whole"), "mixed", 5, memory=1)
    expected = contents(memory / "whole")
    points = chosen(recorder.ops, most)
    for point in points:
        shutil.copytree(memory / "fresh", memory / str(point))
    ended = run_code(DYING, memory, *points)
    assert ended.returncode == 0, ended.stderr
    tried(len(points), "kills")
    unfinished = 0
    for point in points:
        store, op = memory / str(point), recorder.ops[point]
        kept = {}
        if "mixed" in ActivationStore.open(store)["1e"]:
            split = ActivationSplit(store, "1e", "mixed")
            kept = committed(split)
            unfinished += 0 < len(kept) < 3
            if len(kept) < 3:  # nothing that is half-written looks whole
                with pytest.raises(IncompleteSplitError):
                    split.tokens(0)
        again = committed(shuffle_split(begun(store), "mixed", 5, memory=1))
        # and no shard is written twice
        assert kept.items() <= again.items(), op
        assert contents(store) == expected, op
    assert unfinished >= 2
    assert any(".bucket" in recorder.ops[point].path for point in points)


def chosen(ops: list[Op], most: int) -> list[int]:
    """Operations to die at: those on shards, records and buckets before others, evenly spread."""
    own = [i for i, op in enumerate(ops) if "hidden_states" in op.path or "ledger" in op.path]
    own += [i for i, op in enumerate(ops) if ".bucket" in op.path]
    rest = sorted(set(range(len(ops))).difference(own))
    own = sorted(own)
    return sorted([*own[:: max(1, len(own) // most)], *rest[:: max(1, 3 * len(rest) // most)]])


def test_the_command_says_what_it_wrote(source: ActivationSplit) -> None:
    store = str(source.storage)
    said = done("store", "shuffle", "1e/train", "by-command", "--seed", 2, "--store", store)
    assert f"1e/by-command: {sum(LENGTHS):,} tokens of 1e/train in the order of seed 2" in said
    refused = run("store", "shuffle", "1e/train", "train", "--store", store)
    assert refused.exit_code == 2
    assert "into itself" in refused.stderr
    elsewhere = ["--store", store, "--scratch", "nowhere"]
    refused = run("store", "shuffle", "1e/train", "else", *elsewhere)
    assert refused.exit_code == 2
    assert "--scratch nowhere: there is no such folder" in refused.stderr
