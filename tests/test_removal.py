"""Removing stored splits: what is named goes, all else stays, and a kill leaves nothing false."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from stores import Made
from terminal import done, run

from bertvision.errors import (
    CorruptStoreError,
    InputError,
    LockedError,
    StoreNotFoundError,
    UnknownNameError,
)
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.store import ActivationStore

LENGTHS = [30, 40, 50]
OTHERS = [("1e", "dev"), ("2e", "train")]


def filled(root: Any) -> ActivationStore:
    """A store of 1e/train, 1e/dev and 2e/train, each of three shards."""
    for tag, split in (("1e", "train"), *OTHERS):
        Made(LENGTHS, tag=tag, split=split, encoding="int8").write(root)
    return ActivationStore.open(root)


def files(root: Path) -> dict[str, bytes]:
    """Files of a store, but for locks."""
    found = (p for p in root.rglob("*") if p.is_file() and p.name != ".lock")
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in found}


def names(store: ActivationStore) -> list[str]:
    return [split.name for split in store.stored_splits()]


def test_a_removed_split_is_gone_and_the_others_are_as_if_it_had_never_been(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    never = tmp_path / "never"
    for tag, split in OTHERS:
        Made(LENGTHS, tag=tag, split=split, encoding="int8").write(never)
    expected = store["1e"]["train"].info()["bytes"]
    assert store.remove("1e", "train") == expected > 0
    assert files(tmp_path / "store") == files(never)
    assert [store[tag][split].verify() for tag, split in OTHERS] == [[], []]
    with pytest.raises(UnknownNameError, match="no split 'train' of 1e"):
        store.remove("1e", "train")
    assert Made(LENGTHS, encoding="int8").write(tmp_path / "store").verify() == []


def test_after_the_last_split_nothing_is_left_of_it(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for tag, split in (*OTHERS, ("1e", "train")):
        store.remove(tag, split)
    assert list(files(tmp_path)) == ["arrays.zarr/zarr.json"]
    assert len(store) == 0


class Killed(BaseException):
    """The process ends here."""


def test_a_killed_removal_of_the_only_split_is_ended_by_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what it shares with nobody: its table of examples, its line in the root metadata."""
    remove, write = LocalStorage.remove, LocalStorage.write
    whole = tmp_path / "whole"
    Made(LENGTHS, encoding="int8").write(whole)
    for steps in range(100):
        root, left = tmp_path / str(steps), [steps]
        shutil.copytree(whole, root)

        def killed(storage: LocalStorage, *given: Any, do: Any, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            do(storage, *given)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "remove", partialmethod(killed, do=remove))
            patch.setattr(LocalStorage, "write", partialmethod(killed, do=write))
            try:
                ActivationStore.open(root).remove("1e", "train")
                break
            except Killed:
                pass
        ActivationStore.open(root).remove("1e", "train")
        assert list(files(root)) == ["arrays.zarr/zarr.json"]
    assert 5 < steps < 99


def test_a_split_that_is_being_created_is_not_touched_by_a_removal_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its arrays, which no record names yet, nor its examples."""
    Made(LENGTHS, split="train", encoding="int8").write(tmp_path)
    removed = threading.Thread(
        target=lambda: ActivationStore.open(tmp_path).remove("1e", "train"), daemon=True
    )
    commit = Ledger.commit_split

    def late(ledger: Ledger, record: Any) -> None:
        removed.start()
        removed.join(0.5)  # it waits for us, or else has done its harm by now
        commit(ledger, record)

    monkeypatch.setattr(Ledger, "commit_split", late)
    made = Made(LENGTHS, split="dev", encoding="int8").write(tmp_path)
    removed.join()
    assert made.verify() == []
    assert len(made.table()) > 0
    assert names(ActivationStore.open(tmp_path)) == ["1e/dev"]


@pytest.mark.parametrize("within", [False, True], ids=["between steps", "within a folder"])
def test_a_killed_removal_leaves_an_unfinished_split_or_none_and_can_be_gone_on_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    within: bool,
    tried: Callable[[int, str], None],
) -> None:
    """At every step: what is left is told truly, is removed by the same call, or written again."""
    remove, write = LocalStorage.remove, LocalStorage.write
    steps = states = 0
    filled(tmp_path / "whole")
    while True:
        root = shutil.copytree(tmp_path / "whole", tmp_path / str(steps))
        store, left = ActivationStore.open(root), steps

        def step(storage: LocalStorage, key: str) -> None:
            nonlocal left
            if left == 0:
                inside = [p for p in (storage.root / key).rglob("*") if p.is_file()]
                if within and inside:
                    inside[0].unlink()
                raise Killed
            left -= 1

        def removing(storage: LocalStorage, key: str) -> None:
            step(storage, key)
            remove(storage, key)

        def writing(storage: LocalStorage, key: str, content: Any) -> None:
            step(storage, key)
            write(storage, key, content)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "remove", removing)
            patch.setattr(LocalStorage, "write", writing)
            try:
                store.remove("1e", "train")
                break
            except Killed:
                pass
        if "1e/train" in names(store):
            states += 1
            held = ActivationSplit(root, "1e", "train")
            assert find_damage(held) == []
            assert held.is_complete == (steps == 0)
        for tag, split in OTHERS:
            assert len(store[tag][split].read(range(len(LENGTHS)))) == len(LENGTHS)
        if steps % 2:
            assert Made(LENGTHS, encoding="int8").write(root).verify() == []
        if (root / "arrays.zarr/1e/train").is_dir():
            store.remove("1e", "train")
            assert names(store) == ["1e/dev", "2e/train"]
            assert not (root / "arrays.zarr/1e/train").exists()
            assert [store[tag][split].verify() for tag, split in OTHERS] == [[], []]
        steps += 1
    tried(steps, "kills")
    assert steps > 8
    assert 4 < states < steps


def test_a_split_that_is_written_is_not_removed(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = files(tmp_path)
    with (
        Ledger(open_storage(tmp_path), "1e", "train").lock(),
        pytest.raises(LockedError, match="another process is writing 1e/train"),
    ):
        store.remove("1e", "train")
    assert files(tmp_path) == before


def test_a_damaged_split_is_removed_too(tmp_path: Path) -> None:
    store = filled(tmp_path)
    (tmp_path / "ledger/1e/train/split.json").write_text("{")
    (tmp_path / "ledger/1e/train/00001.json").write_text("{")
    store.remove("1e", "train")
    assert names(store) == ["1e/dev", "2e/train"]
    assert store["1e"]["dev"].verify() == []


def test_a_split_of_a_remote_store_is_removed() -> None:
    store = filled("memory://removal")
    assert store.remove("1e", "train") > 0
    assert names(store) == ["1e/dev", "2e/train"]
    assert "train" not in store.storage.names("arrays.zarr/1e")
    assert [store[tag][split].verify() for tag, split in OTHERS] == [[], []]


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = files(tmp_path)
    for tag, split in (("1e", ".."), ("..", "train"), ("1e", "")):
        with pytest.raises(InputError):
            store.remove(tag, split)
    assert files(tmp_path) == before


def test_the_command_asks_and_says_what_it_freed(tmp_path: Path) -> None:
    filled(tmp_path)
    where = ("--store", tmp_path)
    before = files(tmp_path)
    asked = run("store", "rm", "1e/train", *where)  # nobody answers
    assert asked.exit_code == 1
    assert re.match(r"Remove 1e/train, [0-9.]+ kB from .*\? \[y/N\]", asked.stderr)
    assert files(tmp_path) == before
    for name in ("9e", "1e/test", "1e/"):
        assert run("store", "rm", name, "--yes", *where).exit_code == 2
    assert files(tmp_path) == before
    lines = done("store", "rm", "1e", "--yes", *where).splitlines()
    assert [line.split(",")[0] for line in lines[:2]] == ["removed 1e/dev", "removed 1e/train"]
    assert lines[2].endswith(" freed")
    (gone,) = json.loads(done("store", "rm", "2e/train", "-y", "--json", *where))
    assert (gone["tag"], gone["split"]) == ("2e", "train")
    assert gone["bytes"] > 0
    assert done("store", "ls", *where) == "the store is empty\n"


def test_what_was_removed_before_a_failure_is_said(tmp_path: Path) -> None:
    filled(tmp_path)
    with Ledger(open_storage(tmp_path), "1e", "train").lock():
        tried = run("store", "rm", "1e", "--yes", "--store", tmp_path)
    assert tried.exit_code == 2
    assert "removed 1e/dev, " in tried.stderr
    assert "another process is writing 1e/train" in tried.stderr


def test_a_folder_above_a_store_says_where_the_store_is(tmp_path: Path) -> None:
    filled(tmp_path / "activations")
    with pytest.raises(StoreNotFoundError, match=r"open the one in .*/activations$"):
        ActivationStore.open(tmp_path)
    with pytest.raises(StoreNotFoundError, match=r"`bertvision extract` writes one"):
        ActivationStore.open(tmp_path / "nowhere")


def test_a_table_that_no_split_needs_hinders_none(tmp_path: Path) -> None:
    """A partial restore may leave it: no command would name it, so none could remove it."""
    store = filled(tmp_path)
    (tmp_path / "examples/train.parquet").write_bytes(b"")
    with pytest.raises(CorruptStoreError, match="is damaged: .*; `bertvision store repair`"):
        Made(LENGTHS, tag="3e").write(tmp_path)
    for tag in ("1e", "2e"):
        store.remove(tag, "train")
    (tmp_path / "examples/train.parquet").write_bytes(b"PAR1")
    assert Made(LENGTHS, tag="3e").write(tmp_path).verify() == []
