"""Writing a split whose lock another process holds: while it may, and not a moment longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import Made, record_path

from bertvision.errors import LockedError, StoreNotFoundError
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.delegation import Grant, granted
from bertvision.featurestore.format.encoding import encode
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writer import SplitWriter, granted_writer, open_writer
from bertvision.featurestore.writing.buffer import ShardContent

LENGTHS = [9, 30, 17, 5, 40, 22, 13, 8, 31]


def files(store: Path) -> dict[str, bytes]:
    paths = (path for path in store.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(store)): path.read_bytes() for path in paths}


Layers = Callable[[], Iterator[Any]]


def change_next_content(
    monkeypatch: pytest.MonkeyPatch, layers: Callable[[Layers], Iterator[Any]]
) -> None:
    """Let the layers of the shard that is written next come by way of a function of them."""

    def content(*args: Any) -> ShardContent:
        monkeypatch.undo()
        found = ShardContent(*args)
        plain = found._layers
        found._layers = lambda: layers(plain)  # type: ignore[method-assign]
        return found

    monkeypatch.setattr("bertvision.featurestore.writer.ShardContent", content)


@pytest.fixture
def made() -> Made:
    return Made(LENGTHS, encoding="int8")


def test_shards_written_by_others_are_those_of_the_holder(tmp_path: Path, made: Made) -> None:
    made.write(tmp_path / "alone")
    with (
        open_writer(tmp_path / "shared", made.spec, made.contents, made.stats) as writer,
        granted(writer.ledger) as grant,
    ):
        for shard in writer.pending():
            made.write_shard(granted_writer(grant), shard)
    assert files(tmp_path / "shared") == files(tmp_path / "alone")


def test_the_same_shard_written_by_several_at_once_is_whole(tmp_path: Path, made: Made) -> None:
    made.write(tmp_path / "alone")
    with (
        open_writer(tmp_path / "shared", made.spec, made.contents, made.stats) as writer,
        granted(writer.ledger) as grant,
    ):
        start = threading.Barrier(4)

        def everything() -> None:
            other = granted_writer(grant)
            start.wait()
            for shard in range(other.plan.n_shards):
                made.write_shard(other, shard)

        threads = [threading.Thread(target=everything) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert files(tmp_path / "shared") == files(tmp_path / "alone")
    assert not ActivationSplit(tmp_path / "shared", "1e", "train").verify()


@pytest.mark.parametrize("url", ["folder", "memory"])
def test_who_lost_the_right_writes_no_more(tmp_path: Path, made: Made, url: str) -> None:
    store = tmp_path if url == "folder" else f"memory://{tmp_path.name}"
    with open_writer(store, made.spec, made.contents, made.stats) as writer:
        with granted(writer.ledger) as grant:
            late = granted_writer(grant)
            made.write_shard(late, 0)
        with pytest.raises(LockedError, match="has ended.*run the same command again"):
            made.write_shard(late, 1)
        with pytest.raises(LockedError):
            granted_writer(grant)
        assert writer.ledger.shards() == {0}


def test_the_next_holder_takes_away_the_right_that_a_dead_one_lent(
    tmp_path: Path, made: Made
) -> None:
    with open_writer(tmp_path, made.spec, made.contents, made.stats) as writer:
        context = granted(writer.ledger)
        grant = context.__enter__()  # and it dies
        late = granted_writer(grant)
        half = record_path(late.split, 1).with_name("..00001.json.0.tmp.tmp")
        half.write_bytes(b"{")
    made.write_shard(late, 0)  # nobody else writes: it may
    with open_writer(tmp_path, made.spec, made.contents, made.stats) as writer:
        with pytest.raises(LockedError):
            made.write_shard(late, 1)
        assert writer.pending() == list(range(1, writer.plan.n_shards))
        assert not half.exists()


def test_the_right_may_be_lost_between_the_files_and_the_record(tmp_path: Path, made: Made) -> None:
    with open_writer(tmp_path, made.spec, made.contents, made.stats) as writer:
        context = granted(writer.ledger)
        late = granted_writer(context.__enter__())
        storage, write = late.ledger.storage, late.ledger.storage.write

        def slowly(*args: Any) -> str:
            version: str = write(*args)
            context.__exit__(None, None, None)
            return version

        storage.write = slowly  # type: ignore[method-assign]
        with pytest.raises(LockedError):
            made.write_shard(late, 0)
        assert writer.pending() == list(range(writer.plan.n_shards))


@contextmanager
def two_writers(
    made: Made, store: Path | str
) -> Iterator[tuple[SplitWriter, SplitWriter, tuple[torch.Tensor, torch.Tensor | None]]]:
    """Two to which the right was lent, and shard 0 as the first, of another machine, has it."""
    with (
        open_writer(store, made.spec, made.contents, made.stats) as writer,
        granted(writer.ledger) as grant,
    ):
        late, quick = granted_writer(grant), granted_writer(grant)
        members = [made.of_stored(i) * 1.001 for i in made.plan.examples_of(0)]
        yield late, quick, encode(torch.cat(members), late.split.encoding, late.stats)


@pytest.mark.parametrize("url", ["folder", "memory"])
def test_who_begins_between_the_files_of_another_replaces_none_of_them(
    tmp_path: Path, made: Made, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own first file takes so long that the other's second one and record come before."""
    store = tmp_path if url == "folder" else f"memory://between-{tmp_path.name}"
    with two_writers(made, store) as (late, quick, encoded):
        first_done, begun, committed = (threading.Event() for _ in range(3))
        write = quick.ledger.storage.write

        def halting(key: str, *given: Any) -> str:
            if "/scale/" in key:
                first_done.set()
                assert begun.wait(60)
            return write(key, *given)

        def slow(layers: Layers) -> Iterator[Any]:
            begun.set()
            assert committed.wait(60)
            yield from layers()

        quick.ledger.storage.write = halting  # type: ignore[method-assign]

        def written() -> None:
            made.write_shard(quick, 0)
            committed.set()

        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(written)
            assert first_done.wait(60)
            change_next_content(monkeypatch, slow)
            found = late.write_shard(0, *encoded)
            done.result()
        assert found == late.ledger.find_shard(0, late.split.record)
        assert find_damage(ActivationSplit(store, "1e", "train")) == []


@pytest.mark.parametrize("url", ["folder", "memory"])
@pytest.mark.parametrize("when", ["before", "while it writes"])
def test_a_late_writer_replaces_nothing_that_is_committed(
    tmp_path: Path, made: Made, url: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of another kind of machine, so that its values differ in the last bits."""
    store = tmp_path if url == "folder" else f"memory://late-{tmp_path.name}"
    with two_writers(made, store) as (late, quick, encoded):
        committed = []

        def overtake() -> None:
            made.write_shard(quick, 0)
            committed.append(quick.ledger.find_shard(0, quick.split.record))

        def overtaken(layers: Layers) -> Iterator[Any]:
            yield from layers()
            overtake()

        if when == "before":
            overtake()
        else:
            change_next_content(monkeypatch, overtaken)
        assert [late.write_shard(0, *encoded)] == committed
        assert [late.ledger.find_shard(0, late.split.record)] == committed
        assert find_damage(ActivationSplit(store, "1e", "train")) == []


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=f"no split 1e/train in {tmp_path}"):
        granted_writer(Grant(str(tmp_path), "1e", "train", "token"))
