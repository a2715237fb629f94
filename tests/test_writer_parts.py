"""Several processes add examples to one split: nothing is lost, nothing is there twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import Running
from written import LENGTHS, add, check, logits, open_writer, states

from bertvision.errors import InputError, LockedError, NonFiniteError
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.writing.appending import ActivationWriter

WRITING = """
import os, signal, sys, torch
from written import LENGTHS, add, open_writer

torch.set_num_threads(1)
store, part, parts, dies = sys.argv[1], *map(int, sys.argv[2:])
with open_writer(store, part) as writer:
    print("open", flush=True)
    for key in sorted(LENGTHS)[part::parts]:
        if key not in writer:
            add(writer, key)
            writer.flush()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_write_one_split_and_one_that_is_killed_goes_on(tmp_path: Path) -> None:
    def start(name: str, *arguments: object) -> Running:
        folder = tmp_path / name
        folder.mkdir()
        return Running(WRITING, (tmp_path / "store", *arguments), folder, {})

    ended = [
        process.finished()
        for process in [start(f"first-{part}", part, 3, int(part == 1)) for part in range(3)]
    ]
    assert [process.returncode for process in ended] == [0, -9, 0], ended
    again = start("again", 1, 3, 0).finished()
    assert again.returncode == 0, again.stderr
    with open_writer(tmp_path / "store") as writer:
        assert list(writer) == sorted(LENGTHS)
        writer.finish()
    check(tmp_path / "store")


def test_an_example_that_two_processes_add_is_stored_by_one(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store", 0) as one:
        with open_writer(tmp_path / "store", 1) as other:
            for key in "da":
                add(one, key)
            add(other, "a")
            add(other, "f")
            one.flush()
            with pytest.raises(InputError, match="'a' first, were stored by another process"):
                other.flush()
            assert set(other.unwritten) == {"a", "f"}
            other.discard()
            for key in "fb":
                add(other, key)
        for key in "ec":
            add(one, key)
        one.finish()
    check(tmp_path / "store")


def test_channel_statistics_are_those_of_whoever_filled_a_shard_first(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store", 0) as one, open_writer(tmp_path / "store", 1) as other:
        for key in "daf":
            add(other, key)
        for key in "bec":
            add(one, key)
        other.close()
        one.finish()
    check(tmp_path / "store")  # it decodes each example by the same ones


def test_what_does_not_fit_the_statistics_of_another_part_is_dropped_alone(tmp_path: Path) -> None:
    def int4(part: int) -> ActivationWriter:
        store = ActivationStore.create(tmp_path / "store")
        shape: dict[str, Any] = {"hidden_size": 4, "layers": [0, 1], "shard_tokens": 16}
        return store.writer("0e", "s", **shape, encoding="int4", logits="top:2", part=part)

    with int4(0) as one:
        add(one, "a")
        large = states("f")
        large[0, 1, 2] = 9e7
        one.add("f", large, input_ids=[102], labels={"label": 102}, logits=logits("f"))
        add(one, "e")
        with int4(1) as other:
            add(other, "b")
        with pytest.raises(
            NonFiniteError, match=r"'f': token 0, layer 1: 9e\+07 does not fit int4"
        ):
            one.flush()
        assert list(one) == ["a", "b", "e"]
        add(one, "f")
        split = one.finish()
    keys = split.table()["id"].to_pylist()
    assert keys == ["a", "b", "e", "f"]
    for row, found in zip(split.plan.example_id.tolist(), split, strict=True):
        truth = states(keys[row]).transpose(1, 2)
        assert float((found - truth).norm()) <= 0.2 * float(truth.norm()), keys[row]


def test_arrays_of_two_processes_must_be_the_same(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store", 0) as one, open_writer(tmp_path / "store", 1) as other:
        add(one, "d")
        other.add("a", states("a"), logits=logits("a"))
        one.close()
        with pytest.raises(InputError, match="no 'input_ids', the examples before it have int32"):
            other.close()
        assert other.unwritten == ["a"]
        other.discard()
        add(other, "a")  # the arrays of what was dropped count no more
        other.finish()
    assert ActivationStore.open(tmp_path / "store")["0e/s"].table()["id"].to_pylist() == ["a", "d"]


def test_a_split_is_not_finished_while_a_part_was_begun_and_not_closed(tmp_path: Path) -> None:
    def fail() -> None:
        with open_writer(tmp_path / "store", 1) as writer:
            add(writer, "d")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with open_writer(tmp_path / "store") as writer:
        add(writer, "a")
        with pytest.raises(InputError, match=r"1 part of 0e/s began and did not end, part 1 first"):
            writer.finish()
    with open_writer(tmp_path / "store", 1) as writer:
        add(writer, "d")
    with open_writer(tmp_path / "store") as writer:
        assert len(writer.finish()) == 2


def test_what_other_parts_stored_counts_for_a_split_that_must_be_whole(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as one:
        add(one, "a")
        one.flush()
        with pytest.raises(InputError, match="0e/s has 1 examples, not 2"):
            one.finish(examples=2)
        with open_writer(tmp_path / "store", 1) as other:
            add(other, "d")
        assert len(one.finish(examples=2)) == 2


def test_other_snapshots_ask_for_no_example_that_another_part_stored(tmp_path: Path) -> None:
    def snapshot(tag: str, part: int) -> ActivationWriter:
        store = ActivationStore.create(tmp_path / "store")
        shape: dict[str, Any] = {"hidden_size": 4, "layers": [0, 1], "shard_tokens": 16}
        return store.writer(tag, "s", **shape, encoding="float32", logits="top:2", part=part)

    with snapshot("0e", 0) as writer:
        for key in "da":
            add(writer, key)
        writer.finish()
    with snapshot("1e", 0) as one:
        add(one, "a")
        with snapshot("1e", 1) as other:
            add(other, "d")
        assert len(one.finish()) == 2


def test_who_finds_the_split_removed_writes_nothing_to_another(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with open_writer(store) as writer:
        add(writer, "d")
        # as by hand, since a writer that is open keeps `remove` away
        (store / "ledger/0e/s/split.json").unlink()
        with pytest.raises(LockedError, match="was removed or replaced while examples were added"):
            writer.flush()
        writer.discard()
    assert ActivationStore.open(store).tags() == []
