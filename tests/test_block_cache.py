"""Remote stores read through a cache on the disk: what was read once is not asked for again."""

from __future__ import annotations

import pickle
from pathlib import Path

import fsspec
import hubs
import numpy as np
import pytest
import torch
from remotes import only_ours
from stores import Made

import bertvision
from bertvision.errors import InputError
from bertvision.featurestore.storage import remote as blocks
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader

LENGTHS = [30, 40, 50, 60, 20, 64]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that fsspec's configuration names; blocks are small."""
    folder = tmp_path / "blocks"
    monkeypatch.setitem(fsspec.config.conf, "blockcache", {"cache_storage": str(folder)})
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 10)
    return folder


def test_a_store_on_the_hub_is_read_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time no byte of a shard is asked for, and the values are the same."""
    Made(LENGTHS, encoding="int8").write(tmp_path / "store")
    here = ActivationStore.open(tmp_path / "store")["1e/train"].read(range(6)).decode()
    with hubs.running(monkeypatch, tmp_path / "cache") as hub:
        bertvision.push("store", "me/acts", store=tmp_path / "store")
        for asked in (True, False):
            hub.requests.clear()
            store = ActivationStore.open("blockcache::hf://datasets/me/acts")
            assert torch.equal(store["1e/train"].read(range(6)).decode(), here)
            assert bool(hub.asked("GET", "/hidden_states/c/")) == asked


@only_ours
def test_a_store_on_s3_is_streamed_once(cache: Path, s3: list[str]) -> None:
    """Threads that read one file at once find no half of a block; other layers are asked for."""
    Made(LENGTHS, layers=6, hidden=64).write("s3://bucket/once")
    truth = [batch.decode() for batch in _stream("s3://bucket/once")]
    for layers, asked in (([0], True), ([0], False), (None, True), (None, False)):
        s3.clear()
        batches = _stream("blockcache::s3://bucket/once", layers)
        kept = slice(None) if layers is None else layers
        for batch, whole in zip(batches, truth, strict=True):
            assert torch.equal(batch.decode(), whole[:, kept])
        assert any("GET" in line and "hidden_states/c/" in line for line in s3) == asked
    assert not [path for path in cache.rglob(".*") if path.is_file()]


def _stream(url: str, layers: list[int] | None = None) -> list[bertvision.ActivationBatch]:
    split = ActivationStore.open(url)["1e/train"]
    return list(ActivationLoader(split, batch_size=2, layers=layers, seed=0))


def test_a_file_that_was_replaced_is_another_one(cache: Path) -> None:
    storage = open_storage("blockcache::memory://tests/replaced")
    for content in (b"a" * 3000, b"b" * 3000):
        storage.write("f", content)
        assert _content("blockcache::memory://tests/replaced", 3000) == content


@pytest.mark.parametrize("damage", [b"", b"short"])
def test_a_block_that_is_not_whole_is_asked_for_again(cache: Path, damage: bytes) -> None:
    """A machine that lost its power may leave such a block."""
    url = "blockcache::memory://tests/halved"
    open_storage(url).write("f", content := bytes(range(250)) * 12)
    assert _content(url, 3000) == content
    found = [path for path in cache.rglob("*") if path.is_file()]
    assert len(found) == 3
    found[0].write_bytes(damage)
    assert _content(url, 3000) == content


def test_a_cache_that_cannot_be_written_is_none(cache: Path) -> None:
    """A full disk, or a file in its place, costs requests and nothing else."""
    cache.write_text("a file")
    url = "blockcache::memory://tests/unkept"
    open_storage(url).write("f", content := bytes(3000))
    assert _content(url, 3000) == content


def _content(url: str, size: int) -> bytes:
    out = np.empty(size, np.uint8)
    file = open_storage(url).open("f")
    file.read_into(out, 0)
    file.close()
    return out.tobytes()


def test_another_process_reads_through_the_cache_too(cache: Path) -> None:
    """By the storage, and by its name, which is how tasks of Dask find a store."""
    storage = open_storage("blockcache::memory://tests/sent")
    assert str(pickle.loads(pickle.dumps(storage))) == str(storage)
    assert str(storage) == "blockcache::memory://tests/sent"


def test_other_caches_are_refused() -> None:
    with pytest.raises(InputError, match="blockcache::"):
        open_storage("filecache::s3://bucket/store")
