"""Files and folders that appear whole, whoever else is at work in the same place."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stores import Made

from bertvision.featurestore.storage import durable
from bertvision.featurestore.storage.durable import swap, write_durably
from bertvision.pipelines.files import new_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("content", [b"new", [b"n", b"ew"], lambda path: path.write_bytes(b"new")])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_under_the_temporary_name_is_not_written_through(
    tmp_path: Path, content: bytes | list[bytes] | Callable[[Path], object], dangling: bool
) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    folder.mkdir()
    if not dangling:
        outside.write_text("another's")
    (folder / ".file.tmp").symlink_to(outside)
    write_durably(folder / "file", content)
    assert not (folder / "file").is_symlink()
    assert (folder / "file").read_bytes() == b"new"
    assert names(folder) == ["file"]
    assert (outside.read_text() == "another's") if not dangling else not outside.exists()


def test_links_planted_in_a_store_lead_no_shard_and_no_record_out_of_it(tmp_path: Path) -> None:
    """At the temporary name of every file that a split consists of."""
    made = Made([5, 31, 40, 17])
    made.write(tmp_path / "whole")
    outside = tmp_path / "outside"
    outside.write_text("another's")
    made.write(tmp_path / "store", shards=0)
    whole = tmp_path / "whole"
    keys = [str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()]
    for key in keys:
        # what else is written with the plan is there already, and not written again
        if "/c/" not in key or "hidden_states" in key:
            planted = tmp_path / "store" / key
            planted.parent.mkdir(parents=True, exist_ok=True)
            planted.with_name(f".{planted.name}.tmp").symlink_to(outside)
    split = made.write(tmp_path / "store")
    assert outside.read_text() == "another's"
    assert split.verify() == []
    shards = (tmp_path / "store/arrays.zarr/1e/train/hidden_states/c").rglob("*")
    assert not any(path.is_symlink() for path in shards)


@pytest.mark.parametrize("by_a_library", [False, True])
def test_a_file_that_several_write_at_once_is_one_of_theirs_whole(
    tmp_path: Path, by_a_library: bool
) -> None:
    target, together = tmp_path / "file", threading.Barrier(4)

    def write(number: int) -> None:
        whole = bytes([number]) * 5000 * (number + 1)
        pieces = [whole[i : i + 1000] for i in range(0, len(whole), 1000)]

        def by_path(path: Path) -> int:
            return path.write_bytes(whole)

        together.wait()
        for _ in range(50):
            write_durably(
                target, (lambda path: path.write_bytes(whole)) if by_a_library else pieces
            )
            found = target.read_bytes()
            assert found == bytes([found[0]]) * 5000 * (found[0] + 1)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert names(tmp_path) == ["file"]


def test_a_writer_that_fails_takes_nothing_away_from_who_waits(tmp_path: Path) -> None:
    target, begun = tmp_path / "file", threading.Event()

    def failing() -> Iterator[bytes]:
        yield b"half"
        begun.set()
        raise ValueError("the content ends here")

    def fail() -> None:
        with pytest.raises(ValueError, match="ends here"):
            write_durably(target, failing())

    with ThreadPoolExecutor(2) as threads:
        for _ in range(60):
            begun.clear()
            first = threads.submit(fail)
            assert begun.wait(60)
            threads.submit(write_durably, target, [b"wh", b"ole"]).result()
            first.result()
            assert target.read_bytes() == b"whole"
    assert names(tmp_path) == ["file"]


def test_what_a_library_writes_is_as_readable_as_everything_else(tmp_path: Path) -> None:
    write_durably(tmp_path / "text", b"x")
    wanted = stat.S_IMODE((tmp_path / "text").stat().st_mode)
    tensors = {"x": torch.ones(2)}
    write_durably(tmp_path / "weights", lambda path: save_file(tensors, path))
    with new_folder(tmp_path / "folder") as made:
        save_file(tensors, made / "weights")
    for path in ("weights", "folder/weights"):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == wanted


def test_folders_made_by_several_at_once_are_one_of_theirs_whole(tmp_path: Path) -> None:
    target, together = tmp_path / "folder", threading.Barrier(4)

    def make(number: int) -> None:
        together.wait()
        with new_folder(target) as folder:
            for part in range(20):
                (folder / f"{part}").write_text(str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(4)))
    assert names(tmp_path) == ["folder"]
    assert len(names(target)) == 20
    assert len({path.read_text() for path in target.iterdir()}) == 1


def test_a_folder_that_is_replaced_is_never_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if not swap(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot swap two names")
    target, moved = tmp_path / "in" / "folder", []
    replace = os.replace

    def noted(source: Path, to: Path) -> None:
        moved.append(Path(source).name)
        replace(source, to)

    monkeypatch.setattr(os, "replace", noted)
    for text in ("old", "new"):
        with new_folder(target) as folder:
            (folder / "file").write_text(text)
        assert (target / "file").read_text() == text
    assert moved == [".folder.tmp"]  # the first; the second took the place of the first in one step
    assert names(target.parent) == ["folder"]


def test_a_folder_is_replaced_or_stays_wherever_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed cleans nothing up; the next one finds the old or the new folder."""
    target, replace = tmp_path / "folder", os.replace

    def make(text: str) -> None:
        with new_folder(target) as folder:
            (folder / "file").write_text(text)

    for stop in (1, 2):
        make("old")
        left = stop

        def dying(source: Path, to: Path) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            replace(source, to)

        with monkeypatch.context() as patch:
            patch.setattr("bertvision.pipelines.files.swap", lambda *paths: False)
            patch.setattr(os, "replace", dying)
            patch.setattr("bertvision.pipelines.files._settle", lambda *paths: None)
            with pytest.raises(KeyboardInterrupt):
                make("new")
        with pytest.raises(ValueError, match="stop"), new_folder(target):
            raise ValueError("stop")  # whoever comes next brings back what there was
        assert (target / "file").read_text() == "old"
        assert names(tmp_path) == ["folder"]


@pytest.mark.timeout(20)
def test_an_interrupt_while_the_writing_thread_begins_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's duplicate of the descriptor is open for ever then, and shares the lock."""
    duplicates: list[int] = []

    def interrupted(*args: object) -> object:
        duplicates.append(os.dup(locked[0]))
        raise KeyboardInterrupt

    locked: list[int] = []
    real = durable.write_pieces
    with monkeypatch.context() as patched:
        patched.setattr(durable, "write_pieces", lambda d, p: (locked.append(d), real(d, p)))
        patched.setattr(durable, "_Disk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_durably(tmp_path / "file", [b"first"])
    write_durably(tmp_path / "file", [b"second"])
    assert (tmp_path / "file").read_bytes() == b"second"
    assert names(tmp_path) == ["file"]
    os.close(duplicates[0])
