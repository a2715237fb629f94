"""A writer of examples that is killed, without power or without space: what was committed stays."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults import Op, Recorder
from powerloss import PowerLoss
from processes import run_code
from written import LENGTHS, add, check, kept, logits, open_writer, states, write

from bertvision.errors import CorruptStoreError, DiskSpaceError


@pytest.fixture(params=[None, 3], ids=["as added", "permuted"])
def permute(request: pytest.FixtureRequest) -> int | None:
    found: int | None = request.param
    return found


@pytest.fixture
def ops(memory: Path, permute: int | None) -> list[Op]:
    """Operations of writing the small split."""
    recorder = Recorder(memory / "whole")
    with recorder.recording():
        write(memory / "whole", permute)
    check(memory / "whole")
    return recorder.ops


def points(ops: list[Op], most: int) -> list[int]:
    """Some operations: of each kind of call on each kind of file one, the rest at random."""
    kinds = {}
    for i, op in enumerate(ops):
        plain = tuple("#" if part.isdigit() else part for part in Path(op.path).parts)
        kinds.setdefault((op.kind, *plain), i)
    chosen = sorted(kinds.values())
    random.Random(0).shuffle(chosen)
    return sorted(chosen[:most])


# Two processes add every second example each, and each dies at its own point.
BOTH_DYING = """
import os, signal, sys
from pathlib import Path
import torch
from faults import Recorder
from written import LENGTHS, add, open_writer

torch.set_num_threads(1)
root = Path(sys.argv[1])

def part_of(store, part, point):
    notes = os.open(root / f"{store.name}.{part}.notes", os.O_WRONLY | os.O_CREAT)

    def before(i, op):
        if i == point:
            os.kill(os.getpid(), signal.SIGKILL)

    with Recorder(store, before).recording(), open_writer(store, part) as writer:
        for key in list(LENGTHS)[part::2]:
            add(writer, key)
            writer.flush()
            os.pwrite(notes, "".join(sorted(writer)).encode(), 0)

for points in sys.argv[2:]:
    for part, point in enumerate(map(int, points.split("-"))):
        if not os.fork():
            part_of(root / points, part, point)
            os._exit(1)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
"""


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_two_parts_that_are_killed_at_once_go_on(
    memory: Path, count: int, tried: Callable[[int, str], None]
) -> None:
    rng = random.Random(0)
    chosen = [f"{rng.randrange(20, 200)}-{rng.randrange(20, 200)}" for _ in range(count)]
    tried(count, "pairs of kills")
    ended = run_code(BOTH_DYING, memory, *chosen)
    assert ended.returncode == 0, ended.stderr
    begun = 0
    for points in chosen:
        store = memory / points
        sure = {key for part in (0, 1) for key in (memory / f"{points}.{part}.notes").read_text()}
        assert sure <= kept(store), points
        begun += 0 < len(sure) < len(LENGTHS)
        with open_writer(store, 0) as one, open_writer(store, 1) as other:
            for writer, keys in ((one, list(LENGTHS)[::2]), (other, list(LENGTHS)[1::2])):
                for key in keys:
                    if key not in writer:
                        add(writer, key)
            other.close()
            one.finish(examples=len(LENGTHS))
        check(store)
        shutil.rmtree(store)
    assert begun


# A warm process forks one that dies for each point. What was sure is noted outside the store.
DYING = """
import os, signal, sys
from pathlib import Path
import torch
from faults import Recorder
from written import LENGTHS, add, open_writer

torch.set_num_threads(1)
root, permute = Path(sys.argv[1]), None if sys.argv[2] == "None" else int(sys.argv[2])
for point in sys.argv[3:]:
    if os.fork():
        os.wait()
        continue
    notes = os.open(root / f"{point}.notes", os.O_WRONLY | os.O_CREAT)

    def before(i, op):
        if i == int(point):
            os.kill(os.getpid(), signal.SIGKILL)

    with Recorder(root / point, before).recording():
        with open_writer(root / point) as writer:
            for key in LENGTHS:
                add(writer, key)
                sure = set(writer) - set(writer.unwritten)
                os.pwrite(notes, "".join(sorted(sure)).encode(), 0)
            writer.finish(permute)
    os._exit(1)
"""


@pytest.mark.parametrize("most", [6, pytest.param(500, marks=pytest.mark.slow)])
def test_killed_anywhere_a_writer_goes_on_where_it_was(
    memory: Path, ops: list[Op], permute: int | None, most: int, tried: Callable[[int, str], None]
) -> None:
    chosen = points(ops, most)
    tried(len(chosen), "kills")
    ended = run_code(DYING, memory, permute, *chosen)
    assert ended.returncode == 0, ended.stderr
    for point in chosen:
        store = memory / str(point)
        sure = set((memory / f"{point}.notes").read_text())
        there = kept(store)
        # all that was sure, and no shard but the last was lost
        assert sure <= there, ops[point]
        assert set(write(store, permute)) == set("dafbec") - there, ops[point]
        check(store)
        shutil.rmtree(store)


def sure(ops: list[Op]) -> set[str]:
    """Keys of the shards whose records were flushed: their folder, after they had their names."""
    flushed = [i for i, op in enumerate(ops) if str(op) == "ledger/0e/s: fsync"]
    found = set[str]()
    for shard, keys in enumerate(("daf", "b", "ec")):
        named = [i for i, op in enumerate(ops) if op.to == f"ledger/0e/s/{shard:05d}.json"]
        if named and flushed and named[0] < flushed[-1]:
            found.update(keys)
    return found


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_after_a_power_loss_every_key_that_is_known_is_there(
    memory: Path, ops: list[Op], permute: int | None, count: int, tried: Callable[[int, str], None]
) -> None:
    rng = random.Random(0)
    tried(count, "power losses")
    lost = 0
    for n in range(count):
        cut = rng.randrange(1, len(ops) + 1)
        disk = PowerLoss()
        for op in ops[:cut]:
            disk.do(op)
        store = memory / f"disk-{n}"
        disk.disk(store, rng)
        there = kept(store)
        assert set(write(store, permute)) == set("dafbec") - there, ops[cut - 1]
        lost += len(there) < 6
        assert sure(ops[:cut]) <= there, ops[cut - 1]
        check(store)
        shutil.rmtree(store)
    assert lost


@pytest.mark.parametrize("most", [24, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_flush_or_write_that_fails_is_an_error_and_nothing_is_lost(
    memory: Path,
    ops: list[Op],
    permute: int | None,
    code: int,
    most: int,
    tried: Callable[[int, str], None],
) -> None:
    kind = "fsync" if code == errno.EIO else "write"
    chosen = [i for i in points(ops, most) if ops[i].kind == kind]
    tried(len(chosen), "faults")
    for at in chosen:

        def fail(i: int, op: Op, at: int = at) -> None:
            if i == at:
                raise OSError(code, "fault")

        store = memory / f"{code}-{at}"
        expected = DiskSpaceError if code == errno.ENOSPC else OSError
        with pytest.raises(expected), Recorder(store, fail).recording():
            write(store, permute)
        there = kept(store)
        assert set(write(store, permute)) == set("dafbec") - there, ops[at]
        check(store)


def once(at: int, code: int) -> Callable[[int, Op], None]:
    """A hook that lets one operation fail the first time."""
    left = {at}

    def fail(i: int, op: Op) -> None:
        if i in left:
            left.remove(i)
            raise OSError(code, "fault")

    return fail


@pytest.mark.parametrize("most", [24, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_whichever_call_fails_the_same_one_is_made_again_and_nothing_is_lost(
    memory: Path,
    ops: list[Op],
    permute: int | None,
    code: int,
    most: int,
    tried: Callable[[int, str], None],
) -> None:
    kinds = {errno.EIO: ("fsync", "rename"), errno.ENOSPC: ("create", "write", "mkdir")}[code]
    chosen = [i for i in points(ops, most) if ops[i].kind in kinds]
    tried(len(chosen), "faults")
    failed = 0

    def twice(call: Callable[[], Any]) -> Any:
        nonlocal failed
        try:
            return call()
        except (OSError, DiskSpaceError):
            failed += 1
            return call()

    for at in chosen:
        store = memory / f"{code}-{at}"
        with Recorder(store, once(at, code)).recording():
            writer = twice(partial(open_writer, store))
            for key in LENGTHS:
                twice(partial(add, writer, key))
            twice(partial(writer.finish, permute))
        check(store)
    assert failed > len(chosen) // 2  # not all end a call of the writer


def test_after_a_full_disk_the_same_writer_goes_on(memory: Path) -> None:
    full = True

    def fail(i: int, op: Op) -> None:
        if full and "hidden_states" in op.path and op.kind == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    with Recorder(memory / "store", fail).recording(), open_writer(memory / "store") as writer:
        add(writer, "b")
        with pytest.raises(DiskSpaceError):
            add(writer, "d")
        full = False
        add(writer, "d")
    assert set(write(memory / "store")) == set("afec")
    check(memory / "store")


def test_what_a_disk_refuses_can_be_discarded(memory: Path) -> None:
    broken = True

    def fail(i: int, op: Op) -> None:
        if broken and "hidden_states" in op.path and op.kind == "fsync":
            raise OSError(errno.EIO, "fault")

    with Recorder(memory / "store", fail).recording(), open_writer(memory / "store") as writer:
        writer.add("d", states("d"), labels={"label": 1}, logits=logits("d"))
        with pytest.raises(OSError, match="fault"):
            writer.flush()
        writer.discard()
        assert list(writer) == writer.unwritten == []
        broken = False
        writer.add("a", states("a"), logits=logits("a"))
        assert len(writer.finish()) == 1


@pytest.mark.parametrize("end", ["finish", "close"])
def test_what_could_not_be_written_is_not_left_out_by_the_next_finish(
    memory: Path, end: str
) -> None:
    full = True

    def fail(i: int, op: Op) -> None:
        if full and "hidden_states" in op.path and op.kind == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    with Recorder(memory / "store", fail).recording():
        writer = open_writer(memory / "store")
        for key in "daf":
            writer.add(key, states(key), logits=logits(key))
        with pytest.raises(DiskSpaceError):
            getattr(writer, end)()
        full = False
        assert len(writer.finish()) == 3


def test_a_finish_is_not_ended_with_other_shards_than_it_was_begun_with(memory: Path) -> None:
    def fail(i: int, op: Op) -> None:
        if op.to == "ledger/0e/s/00000.json":
            raise OSError(errno.EIO, "fault")

    store = memory / "store"
    with open_writer(store) as writer:
        for key in "dafb":
            writer.add(key, states(key), logits=logits(key))
    writer = open_writer(store)
    with pytest.raises(OSError, match="fault"), Recorder(store, fail).recording():
        writer.finish()
    (store / "ledger/0e/s/00001.json").unlink()
    with pytest.raises(CorruptStoreError, match="shard 1 came or went while the split was finish"):
        open_writer(store)
