"""A store in a folder: nothing outside of it is read, and several threads use it at once."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import in_memory

from bertvision.errors import CorruptStoreError
from bertvision.featurestore.storage import local
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.storage import ABSENT


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns at almost every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient")
def test_threads_make_and_remove_folders_of_one_storage(tmp_path: Path) -> None:
    with in_memory(tmp_path) as folder:
        storage = LocalStorage(folder)

        def work(name: int) -> None:
            for i in range(20):
                storage.write(f"{name}/{i}/file", b"")
            for i in range(20):
                storage.remove(f"{name}/{i}")

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(work, range(4))) == [None] * 4
        assert storage.names("0") == []


def test_a_folder_that_is_removed_while_a_file_is_written_is_made_again_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, real = LocalStorage(tmp_path / "store"), local.write_durably

    def write_and_lose(path: Path, content: bytes) -> None:
        real(path, content)
        storage.remove("a")

    monkeypatch.setattr(local, "write_durably", write_and_lose)
    assert storage.write("a/b/file", b"1") == ABSENT
    monkeypatch.undo()
    storage.write("a/b/file", b"2")
    assert storage.read("a/b/file") == b"2"
    with storage.lock("a/c/lock", "it"):
        pass


@pytest.mark.parametrize("key", ["../out", "in/../../out", "in/..", "/etc/hosts", "gone/../../out"])
def test_keys_that_lead_out_of_the_folder_are_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "store" / "in").mkdir(parents=True)
    (tmp_path / "out").write_bytes(b"secret")
    storage = LocalStorage(tmp_path / "store")
    for call in (storage.read, storage.open, storage.names, storage.remove, storage.version):
        with pytest.raises(CorruptStoreError, match="a store is read and written only"):
            call(key)
    assert (tmp_path / "out").read_bytes() == b"secret"


def test_a_store_may_be_reached_by_a_link_but_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "real" / "in").mkdir(parents=True)
    (tmp_path / "real" / "in" / "file").write_bytes(b"1")
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    storage = LocalStorage(tmp_path / "linked")
    assert storage.read("in/file") == storage.read("./in//file") == b"1"
    for name in ("looped", "dangling"):  # neither is there, and both are links
        (tmp_path / "real" / name).symlink_to(name if name == "looped" else "nothing")
        for key in (name, f"{name}/file"):
            with pytest.raises(CorruptStoreError, match="behind a link"):
                storage.version(key)


def test_what_is_no_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of a pipe would wait for ever."""
    storage = LocalStorage(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    with monkeypatch.context() as patch, listening:
        patch.chdir(tmp_path)  # the path of a socket may have a hundred characters
        listening.bind("socket")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for key in ("pipe", "folder", "socket"):
        with pytest.raises(CorruptStoreError, match=f"{key} is no file"):
            storage.open(key)
    for key in ("gone", "gone/file", "file/file"):
        with pytest.raises(FileNotFoundError):
            storage.open(key)


@pytest.mark.timeout(20)
def test_a_lock_that_an_interrupt_left_stops_neither_this_thread_nor_others(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage._flushing.acquire()  # as at the end of a block whose exit was interrupted
    storage.write("a/b", b"x")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(storage.write, "c/d", b"y").result(10)
    assert storage.read("c/d") == b"y"


def test_a_file_whose_close_was_interrupted_does_not_close_another(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a", b"x")
    file = storage.open("a")

    def interrupted(descriptor: int) -> None:
        os.close(descriptor)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file.close(interrupted)
    other = os.open(tmp_path / "a", os.O_RDONLY)  # which gets the number that is free
    file.close()
    del file
    assert os.fstat(other).st_size == 1
    os.close(other)
