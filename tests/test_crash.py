"""Killed or without power at any moment: what was acknowledged is there, the rest is done again."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from faults import Killed, Op, Recorder, contents, small
from powerloss import PowerLoss
from processes import run_code
from stores import Made

from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writer import open_writer


def write(made: Made, store: Path, acknowledged: list[int] | None = None) -> list[int]:
    """Write what is pending, as an extraction does; returns the shards that were computed."""
    computed = []
    with open_writer(store, made.spec, made.contents, made.stats) as writer:
        for shard in writer.pending():
            computed.append(shard)
            made.write_shard(writer, shard)
            if acknowledged is not None:
                acknowledged.append(shard)
    return computed


@pytest.fixture
def whole(memory: Path) -> tuple[list[Op], dict[str, bytes]]:
    """Calls of writing the small split, and the files at its end."""
    recorder = Recorder(memory / "whole")
    with recorder.recording():
        write(small(), memory / "whole")
    return recorder.ops, contents(memory / "whole")


def committed(store: Path) -> set[int]:
    """Shards that the ledger names, each of which is there and exact."""
    if not (store / "ledger/1e/train/split.json").exists():
        return set()
    made, split = small(), ActivationSplit(store, "1e", "train")
    found = split.ledger.shards()
    # what is above the splits is written after the split's record, before the first shard
    shared = ("1e/train arrays.zarr/zarr.json", "1e/train arrays.zarr/1e/zarr.json")
    assert [what for what, _ in find_damage(split) if found or not what.startswith(shared)] == []
    for shard in found:
        for i in made.plan.examples_of(shard):
            truth = made.of_stored(i).transpose(1, 2)
            assert float((split[i] - truth).norm()) <= 9e-3 * float(truth.norm())
    return found


# A warm process forks one that dies for each point; it has no threads, and runs no Zarr itself.
# What was begun and what was acknowledged is noted outside the store.
DYING = """
import os, signal, sys
from pathlib import Path
import torch
from faults import Recorder, small
from bertvision.featurestore.writer import open_writer

torch.set_num_threads(1)
root, made = Path(sys.argv[1]), small()
made.stats()
for point in sys.argv[2:]:
    number, _, torn = point.partition("t")
    if os.fork():
        os.wait()
        continue
    notes = os.open(root / f"{point}.notes", os.O_WRONLY | os.O_CREAT)

    def before(i, op):
        if i == int(number):
            os.write(notes, f"point {op}\\n".encode())
            if torn:
                return len(op.data) // 2
            os.kill(os.getpid(), signal.SIGKILL)
        if torn and i == int(number) + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with Recorder(root / point, before).recording():
        with open_writer(root / point, made.spec, made.contents, made.stats) as writer:
            for shard in writer.pending():
                os.write(notes, f"begun {shard}\\n".encode())
                made.write_shard(writer, shard)
                os.write(notes, f"done {shard}\\n".encode())
    os._exit(0)
"""


def killed_at(memory: Path, points: list[str]) -> Iterator[tuple[Path, dict[str, list[str]]]]:
    """The stores that writers leave that are killed at these points, with their notes."""
    ended = run_code(DYING, memory, *points)
    assert ended.returncode == 0, ended.stderr
    for point in points:
        notes: dict[str, list[str]] = {"point": [], "begun": [], "done": []}
        for line in (memory / f"{point}.notes").read_text().splitlines():
            kind, _, what = line.partition(" ")
            notes[kind].append(what)
        yield memory / point, notes


def named_points(ops: list[Op], most: int) -> list[int]:
    """Numbers of operations: of each kind of call on each kind of file the first and the last."""
    by_name: dict[tuple[str, ...], list[int]] = {}
    for i, op in enumerate(ops):
        plain = tuple("#" if part.isdigit() else part for part in Path(op.path).parts)
        by_name.setdefault((op.kind, *plain), []).append(i)
    ends = [i for numbers in by_name.values() for i in {numbers[0], numbers[-1]}]
    random.Random(0).shuffle(ends)
    shards = [i for i in ends if "hidden_states/c" in ops[i].path or "ledger" in ops[i].path]
    return sorted({*shards, *ends[: max(0, most - len(shards))]})


RENAMED = "ledger/1e/train/.00001.json.tmp: rename"
"""The call that commits a shard."""


def check_killed(store: Path, notes: dict[str, list[str]], expected: dict[str, bytes]) -> None:
    point = notes["point"]
    found = committed(store) if store.exists() else set()
    assert {int(shard) for shard in notes["done"]} <= found, point
    again = write(small(), store)
    assert len(set(again) & {int(shard) for shard in notes["begun"]}) <= 1, point
    assert not found & set(again), point
    # nothing else is left either: no temporary file, no shard that no record names
    assert contents(store) == expected, point


@pytest.mark.parametrize(
    ("part", "torn", "least"), [(3, 6, 20), pytest.param(1, 12, 50, marks=pytest.mark.slow)]
)
def test_killed_anywhere_the_same_command_ends_the_same(
    memory: Path,
    whole: tuple[list[Op], dict[str, bytes]],
    part: int,
    torn: int,
    least: int,
    tried: Callable[[int, str], None],
) -> None:
    ops, expected = whole
    (renamed,) = (i for i, op in enumerate(ops) if str(op) == RENAMED)
    points = [str(i) for i in sorted({renamed, *named_points(ops, 50)[::part]})]
    # and in the middle of a write, of every kind of file
    points += [f"{i}t" for i in named_points(ops, 200) if len(ops[i].data) > 40][:torn]
    tried(len(points), "kills")
    names = set()
    for store, notes in killed_at(memory, points):
        (name,) = notes["point"]
        names.add(name)
        check_killed(store, notes, expected)
    assert len(names) >= least
    assert {name.rpartition(" ")[2] for name in names} >= {
        "create", "write", "fsync", "rename", "mkdir",
    }  # fmt: skip
    assert RENAMED in names


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_and_again_the_same_command_ends_the_same(
    memory: Path, whole: tuple[list[Op], dict[str, bytes]]
) -> None:
    ops, expected = whole
    rng = random.Random(0)
    for _ in range(10):
        points = sorted({str(rng.randrange(len(ops))) for _ in range(33)})
        for store, notes in killed_at(memory, points):
            check_killed(store, notes, expected)
            shutil.rmtree(store)


def test_orphans_of_a_killed_writer_are_swept(memory: Path) -> None:
    made = small()
    expected = write(made, memory / "store") and contents(memory / "store")
    folder = memory / "store/ledger/1e/train"
    for name in (".00007.json.tmp", ".split.json.tmp"):
        (folder / name).write_bytes(b"{")
    (memory / "store/examples/.other.parquet.tmp").write_bytes(b"PAR1")
    assert write(made, memory / "store") == []
    assert contents(memory / "store") == expected


def run(
    store: Path, before: object, log: list[Op], acknowledged: list[tuple[int, int]]
) -> BaseException | None:
    """Write once with a hook; appends what was done, and after how many calls what was sure."""
    done: list[int] = []
    recorder = Recorder(store, before)  # type: ignore[arg-type]
    start = len(log)

    class Noted(list[int]):
        def append(self, shard: int) -> None:
            acknowledged.append((start + len(recorder.ops), shard))
            done.append(shard)

    error: BaseException | None = None
    try:
        with recorder.recording():
            write(small(), store, Noted())
    except (Killed, OSError) as raised:
        error = raised
    log += recorder.ops
    return error


def die(at: int, i: int, op: Op) -> None:
    if i == at:
        raise Killed(str(op))


def crash_states(
    memory: Path, log: list[Op], acknowledged: list[tuple[int, int]], count: int, seed: int
) -> None:
    """Cut the power after so many of the calls, and see that everything sure is there."""
    rng = random.Random(seed)
    expected = contents(memory / "whole")
    lost_something = 0
    for n in range(count):
        cut = rng.randrange(1, len(log) + 1)
        disk = PowerLoss()
        for op in log[:cut]:
            disk.do(op)
        store = memory / f"disk-{seed}-{n}"
        disk.disk(store, rng)
        lost_something += len(list(store.rglob("*"))) > 0
        sure = {shard for when, shard in acknowledged if when <= cut}
        found = committed(store)
        assert sure <= found, log[cut - 1]
        assert not found & set(write(small(), store)), log[cut - 1]
        assert {k: v for k, v in contents(store).items() if not k.endswith(".tmp")} == expected
        shutil.rmtree(store)
    assert lost_something > count / 2


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(2))
def test_after_a_power_loss_every_record_tells_of_data_that_is_there(
    memory: Path,
    whole: tuple[list[Op], dict[str, bytes]],
    seed: int,
    count: int,
    tried: Callable[[int, str], None],
) -> None:
    log: list[Op] = []
    sure: list[tuple[int, int]] = []
    assert run(memory / "store", None, log, sure) is None
    assert [shard for _, shard in sure] == [0, 1, 2]
    tried(count, "power losses")
    crash_states(memory, log, sure, count, seed)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_a_power_loss_after_a_kill_loses_nothing_either(
    memory: Path, whole: tuple[list[Op], dict[str, bytes]], seed: int
) -> None:
    # who resumes must not take for flushed what the killed writer had no time to flush
    rng = random.Random(seed)
    log: list[Op] = []
    sure: list[tuple[int, int]] = []
    for _ in range(3):
        run(memory / "store", partial(die, rng.randrange(len(whole[0]))), log, sure)
    assert run(memory / "store", None, log, sure) is None
    sure += [(len(log), shard) for shard in range(3)]
    crash_states(memory, log, sure, 15, seed)


@pytest.mark.parametrize("part", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flush_that_fails_is_an_error_and_nothing_is_lost(
    memory: Path,
    whole: tuple[list[Op], dict[str, bytes]],
    part: int,
    tried: Callable[[int, str], None],
) -> None:
    ops, expected = whole
    flushes = [i for i, op in enumerate(ops) if op.kind == "fsync"][::part]
    tried(len(flushes), "flushes")
    for at in flushes:

        def fail(i: int, op: Op, at: int = at) -> None:
            if i == at:
                raise OSError(errno.EIO, "Input/output error")

        store, log, sure = memory / f"store-{at}", [], []
        error = run(store, fail, log, sure)
        assert isinstance(error, OSError), ops[at]
        assert error.errno == errno.EIO
        found = committed(store)
        assert {shard for _, shard in sure} <= found
        write(small(), store)
        assert contents(store) == expected, ops[at]
        shutil.rmtree(store)
