"""Files written in blocks past the page cache: every byte, whatever the system does meanwhile."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from faults import Killed, Op, Recorder
from hypothesis import given
from hypothesis import strategies as st
from powerloss import PowerLoss

from bertvision.errors import DiskSpaceError
from bertvision.featurestore.storage import durable as pieces
from bertvision.featurestore.storage.durable import _Disk, write_durably, write_pieces

BLOCK = 4096
DIRECT = getattr(os, "O_DIRECT", 0)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "BLOCK_BYTES", BLOCK)
        yield


def cut(content: bytes, places: list[int]) -> list[bytes]:
    """A content in pieces, some of them empty."""
    ends = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[a:b] for a, b in pairwise(ends)]


contents = st.integers(0, 5 * BLOCK + 9).map(random.Random(0).randbytes)


@given(contents, st.lists(st.integers(0, 10**6), max_size=9))
def test_all_pieces_stand_in_the_file_in_their_order(content: bytes, places: list[int]) -> None:
    with tempfile.TemporaryFile() as file:
        write_pieces(file.fileno(), cut(content, places))
        assert os.pread(file.fileno(), len(content) + 1, 0) == content


@given(contents, st.lists(st.integers(1, 2 * BLOCK), min_size=1, max_size=9))
def test_short_writes_are_gone_on_with(content: bytes, most: list[int]) -> None:
    """Behind one a disk that wants whole sectors refuses the rest, which then goes another way."""
    real, left = os.write, [*most]
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: real(fd, data[: left.pop() if left else None]))
        write_pieces(file.fileno(), [content])
        patch.undo()
        assert os.pread(file.fileno(), len(content) + 1, 0) == content


def test_whole_blocks_go_past_the_page_cache_and_the_end_through_it(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.write, list[tuple[int, bool]]()

    def write(descriptor: int, data: memoryview) -> int:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        seen.append((len(data), bool(flags & DIRECT)))
        return real(descriptor, data)

    with (disk / "file").open("wb", buffering=0) as file:
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | DIRECT)
        except OSError:
            pytest.skip("this file system knows no O_DIRECT")
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        monkeypatch.setattr(os, "write", write)
        write_pieces(file.fileno(), [bytes(2 * BLOCK), bytes(BLOCK + 5)])
        assert fcntl.fcntl(file, fcntl.F_GETFL) == flags
    assert seen == [(BLOCK, bool(DIRECT))] * 3 + [(5, False)]


def test_a_file_is_the_old_one_or_the_new_one_wherever_the_power_goes(tmp_path: Path) -> None:
    folder, new = tmp_path / "folder", random.Random(1).randbytes(5 * BLOCK + 9)
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    start, recorder = tmp_path / "start", Recorder(folder)
    start.mkdir()
    (start / "file").write_bytes(b"old")
    with recorder.recording():
        write_durably(folder / "file", cut(new, [3, BLOCK, 3 * BLOCK + 1]))
    assert sum(op.kind == "write" for op in recorder.ops) == 6
    for at in range(len(recorder.ops) + 1):
        for seed in range(4):
            disk, state = PowerLoss(start), tmp_path / f"state-{at}-{seed}"
            for op in recorder.ops[:at]:
                disk.do(op)
            disk.disk(state, random.Random(seed))
            found = (state / "file").read_bytes()
            assert found in (b"old", new)
            assert found == new or at < len(recorder.ops)


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_disk_that_fills_or_a_kill_leaves_what_was_there(tmp_path: Path, at: int) -> None:
    path, new = tmp_path / "file", [bytes(BLOCK)] * 5 + [b"end"]
    path.write_bytes(b"old")
    for error in (OSError(errno.ENOSPC, "No space left on device"), Killed()):
        writes = iter(range(6))

        def before(_: int, op: Op, error: BaseException = error, writes: object = writes) -> None:
            if op.kind == "write" and next(writes) == at:  # type: ignore[call-overload]
                raise error

        wanted = DiskSpaceError if isinstance(error, OSError) else Killed
        with Recorder(tmp_path, before).recording(), pytest.raises(wanted):
            write_durably(path, new)
        assert path.read_bytes() == b"old"
    write_durably(path, new)
    assert path.read_bytes() == b"".join(new)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_pieces_that_cannot_be_made_leave_nothing(tmp_path: Path) -> None:
    def made() -> Iterator[bytes]:
        yield bytes(3 * BLOCK)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_durably(tmp_path / "file", made())
    assert list(tmp_path.iterdir()) == []


def test_what_is_still_written_stays_in_its_file_when_the_descriptor_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go_on = os.write, threading.Event()

    def slow(descriptor: int, data: memoryview) -> int:
        go_on.wait(20)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    first = os.open(tmp_path / "first", os.O_WRONLY | os.O_CREAT)
    disk = _Disk(first)
    disk.write(memoryview(mmap.mmap(-1, BLOCK)))
    os.close(first)  # as one does who is interrupted
    second = os.open(tmp_path / "second", os.O_WRONLY | os.O_CREAT)
    assert second == first
    go_on.set()
    disk.close()
    os.close(second)
    assert (tmp_path / "first").read_bytes() == bytes(BLOCK)
    assert (tmp_path / "second").read_bytes() == b""


def test_a_thread_that_outlives_the_main_one_writes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = """
import sys, threading
from pathlib import Path
from bertvision.featurestore.storage.durable import write_durably

def pieces():
    yield bytes(5 << 20)
    threading.main_thread().join()
    for _ in range(4):
        yield b"x" * (3 << 20)

threading.Thread(target=write_durably, args=(Path(sys.argv[1]), pieces())).start()
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
    assert path.read_bytes() == bytes(5 << 20) + b"x" * (12 << 20)
