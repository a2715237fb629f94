"""A store inside a zip: read as its folder is, never written, safe where it was made to hurt."""

from __future__ import annotations

import pickle
import random
import shutil
import stat
import struct
import subprocess
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from stores import Made, shard_path
from terminal import done, run
from torch.utils.data import DataLoader, Dataset

import bertvision
from bertvision.errors import (
    BertvisionError,
    CorruptStoreError,
    IncompleteSplitError,
    InputError,
    StoreNotFoundError,
)
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.zipped import ZipStorage
from bertvision.pipelines.workspace.workspace import Workspace

RECORD = "ledger/1e/train/split.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a split in several shards; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("zips") / "activations"
    Made([17, 40, 3, 25, 60, 9, 31], encoding="int8", compression="none").write(folder)
    return folder


def members(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def zipped(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Path:
    """The folder as a zip of its content."""
    return zipped(tmp_path / "activations.zip", members(folder))


def content(split: ActivationSplit) -> list[torch.Tensor]:
    return [split.read([i]).decode() for i in range(len(split))]


@pytest.mark.parametrize("inside", ["", "activations/", "a/"])
def test_a_zip_reads_as_its_folder_does(folder: Path, tmp_path: Path, inside: str) -> None:
    files = {f"{inside}{name}": data for name, data in members(folder).items()}
    path = zipped(tmp_path / "s.zip", files)
    split, own = (bertvision.ActivationStore.open(p)["1e/train"] for p in (path, folder))
    assert split.name == own.name
    assert all(map(torch.equal, content(split), content(own)))
    assert torch.equal(split[2], own[2])
    assert split.table() == own.table()
    assert split.to_xarray().equals(own.to_xarray())
    assert np.array_equal(split.dask().compute(), own.dask().compute())
    streams = [list(s.tokens(1, batch_size=16)) for s in (split, own)]
    assert all(torch.equal(a.vectors, b.vectors) for a, b in zip(*streams, strict=True))
    assert split.verify() == []


def test_a_zip_with_long_headers_is_read(folder: Path, tmp_path: Path) -> None:
    """Zips of more than 4 GiB have them."""
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        for name, data in members(folder).items():
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(data)
    assert bertvision.ActivationStore.open(tmp_path / "s.zip")["1e/train"].verify() == []


@pytest.mark.skipif(shutil.which("zip") is None, reason="the program zip is not installed")
def test_the_documented_command_makes_such_a_zip(folder: Path, tmp_path: Path) -> None:
    words = ["zip", "-q", "-0", "-r", tmp_path / "activations.zip", folder.name]
    subprocess.run(words, check=True, cwd=folder.parent)
    split = bertvision.ActivationStore.open(str(tmp_path / "activations.zip"))["1e/train"]
    assert split.verify() == []


def test_commands_that_read_take_a_zip(store: Path, tmp_path: Path) -> None:
    assert "train" in done("store", "ls", "--store", store)
    done("store", "verify", "--store", store)
    done("store", "export", "1e/train", tmp_path / "out", "--format", "npy", "--store", store)
    assert np.load(tmp_path / "out" / "hidden_states.npy").shape == (185, 3, 16)


def test_heads_are_trained_and_evaluated_from_a_zip(workspace: Workspace, tmp_path: Path) -> None:
    space = Workspace.find(shutil.copytree(workspace.root, tmp_path / "workspace"))
    path = zipped(tmp_path / "activations.zip", members(Path(space.activations)))
    shutil.rmtree(space.activations)
    bertvision.train("learned-pooling", checkpoint="1e", workspace=space.root, store=path)
    bertvision.evaluate("learned-pooling", workspace=space.root, store=path)


@pytest.mark.parametrize("plan", [[], ["--dry-run"]])
@pytest.mark.parametrize("there", [True, False])
def test_an_extraction_into_a_zip_is_refused_before_anything_is_read(
    workspace: Workspace, store: Path, plan: list[str], there: bool
) -> None:
    path = store if there else store.with_name("none.zip")
    with mock.patch.object(Workspace, "dataset", side_effect=AssertionError):
        result = run("extract", "--pool", "cls", "-w", workspace.root, "--store", path, *plan)
    assert result.exit_code == 2
    assert "is a zip, which is only read" in " ".join(result.stderr.split())
    assert path.exists() == there


def test_texts_are_not_generated_into_a_zip(store: Path) -> None:
    """Before the decoder is looked for, of which there is none here."""
    with pytest.raises(InputError, match="is a zip, which is only read"):
        bertvision.generate("0e/p", model="no-decoder", data="none.jsonl", store=store)


def test_what_finishes_a_split_is_not_done_in_a_zip(folder: Path, tmp_path: Path) -> None:
    begun = shutil.copytree(folder, tmp_path / "begun")
    (begun / "ledger" / "1e" / "train" / "00001.json").unlink()
    with bertvision.ActivationStore.open(begun).writer("2e", "x", hidden_size=4, layers=[0]) as w:
        w.add("a", np.zeros((3, 1, 4), np.float32))
    split = bertvision.ActivationStore.open(zipped(tmp_path / "b.zip", members(begun)))["1e/train"]
    for read in (
        split.require_complete,
        lambda: split.open_shard(1),
        lambda: bertvision.ActivationStore.open(split.storage)["2e/x"],
    ):
        with pytest.raises(IncompleteSplitError, match="this store can only be read, so finish"):
            read()


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.remove("1e", "train"),
        lambda store: store.writer("2e", "train", hidden_size=4, layers=[0]).__enter__(),
        lambda store: store.storage.write("a", b""),
        lambda store: store.storage.move(RECORD, "a"),
        lambda store: store.storage.sweep(""),
        lambda store: bertvision.ActivationStore.create(store.storage.path.with_name("new.zip")),
    ],
)
def test_nothing_writes_to_a_zip(store: Path, write: Callable[[Any], Any]) -> None:
    before = store.read_bytes()
    with pytest.raises(InputError, match="is a zip, which is only read: name another folder"):
        write(bertvision.ActivationStore.open(store))
    assert store.read_bytes() == before
    assert list(store.parent.iterdir()) == [store]


def test_no_zip_is_no_store(tmp_path: Path, folder: Path) -> None:
    for path in (tmp_path / "none.zip", folder / RECORD / "no.zip"):
        with pytest.raises(
            StoreNotFoundError, match=f"in the zip {path}, which is not there.*: correct the path"
        ):
            bertvision.ActivationStore.open(path)
    above = {f"gemma/activations/{name}": content for name, content in members(folder).items()}
    with pytest.raises(
        StoreNotFoundError, match="holds activations: .* from the folder that it is in"
    ):
        bertvision.ActivationStore.open(zipped(tmp_path / "above.zip", above))
    nested = zipped(tmp_path / "inner.zip", members(folder)).read_bytes()
    with pytest.raises(StoreNotFoundError):
        bertvision.ActivationStore.open(zipped(tmp_path / "outer.zip", {"inner.zip": nested}))


def test_a_folder_that_is_called_like_a_zip_stays_one(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "folder.zip")
    split = bertvision.ActivationStore.open(tmp_path / "folder.zip")["1e/train"]
    assert split.verify() == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//x", "./x", "a\\x", ".."])
def test_paths_that_lead_elsewhere_are_refused_by_name(
    folder: Path, tmp_path: Path, name: str
) -> None:
    path = zipped(tmp_path / "s.zip", members(folder) | {name: b"x"})
    with pytest.raises(CorruptStoreError, match="which is no path of a store's file") as caught:
        bertvision.ActivationStore.open(path)
    assert repr(name) in str(caught.value)


def test_a_link_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    path, link = zipped(tmp_path / "s.zip", members(folder)), zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(CorruptStoreError, match="'link', a link"):
        bertvision.ActivationStore.open(path)


def test_a_file_that_is_there_twice_is_refused_by_name(store: Path) -> None:
    with zipfile.ZipFile(store, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(RECORD, b"{}")
    with pytest.raises(CorruptStoreError, match=f"'{RECORD}' twice"):
        bertvision.ActivationStore.open(store)


def test_compressed_members_are_refused_by_name_whatever_they_hold(
    folder: Path, tmp_path: Path
) -> None:
    path = zipped(tmp_path / "bomb.zip", {"ledger/x": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match="'ledger/x' compressed .* again with `zip -0 -r"):
        bertvision.ActivationStore.open(path)


def test_a_truncated_zip_is_refused(store: Path) -> None:
    data = store.read_bytes()
    for length in (0, 10, len(data) // 2, len(data) - 1, len(data) - 100):
        store.write_bytes(data[:length])
        with pytest.raises(CorruptStoreError, match="is no whole zip"):
            bertvision.ActivationStore.open(store)


def entry(data: bytes, name: str) -> int:
    """Offset of a member's entry in the central directory."""
    at = data.rindex(name.encode()) - 46
    assert data[at : at + 4] == b"PK\1\2"
    return at


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ((20, 24), 1 << 31, "a size or place that it does not have"),  # both sizes
        ((24,), 7, "a size or place that it does not have"),
        ((42,), 0x7FFFFFFF, "a size or place that it does not have"),
        ((42,), 1, "does not hold ledger/1e/train/split.json where it says"),
        ((16,), 12345, "do not have the checksum of the zip"),
    ],
)
def test_a_directory_that_lies_is_refused_by_name(
    store: Path, field: tuple[int, ...], value: int, message: str
) -> None:
    data = bytearray(store.read_bytes())
    for offset in field:
        struct.pack_into("<L", data, entry(data, RECORD) + offset, value)
    store.write_bytes(data)
    with pytest.raises(CorruptStoreError, match=message):
        bertvision.ActivationStore.open(store)["1e/train"].read([0])


def test_damage_of_a_shard_is_found_by_the_stores_own_checksum(folder: Path, store: Path) -> None:
    split = bertvision.ActivationStore.open(store)["1e/train"]
    shard = shard_path(bertvision.ActivationStore.open(folder)["1e/train"], "hidden_states", 1)
    data = bytearray(store.read_bytes())
    data[data.index(shard.read_bytes()) + 100] ^= 1
    store.write_bytes(data)
    (fault,) = split.verify()
    assert "shard 1" in fault


def test_any_flipped_byte_is_an_error_of_ours_or_harmless(folder: Path, store: Path) -> None:
    data, own = store.read_bytes(), bertvision.ActivationStore.open(folder)["1e/train"]
    directory, draw = len(data) - data.index(b"PK\1\2"), random.Random(0)
    refused = 0
    for _ in range(100):
        changed = bytearray(data)
        changed[-draw.randrange(1, directory)] ^= 1 << draw.randrange(8)
        store.write_bytes(changed)
        try:
            split = bertvision.ActivationStore.open(store)["1e/train"]
            assert all(map(torch.equal, content(split), content(own)))
        except (BertvisionError, FileNotFoundError):
            refused += 1
    assert 0 < refused < 100


def test_a_zip_that_was_replaced_is_noticed(folder: Path, store: Path) -> None:
    storage = open_storage(store)
    assert storage.size(RECORD)
    zipped(store, {f"activations/{name}": data for name, data in members(folder).items()})
    with pytest.raises(CorruptStoreError, match="or was replaced while it was read"):
        storage.open(RECORD)


class Vectors(Dataset[torch.Tensor]):
    def __init__(self, split: ActivationSplit) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.split[i]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_one_zip_at_once(folder: Path, store: Path, context: str) -> None:
    split, own = (bertvision.ActivationStore.open(p)["1e/train"] for p in (store, folder))
    first = split[0]  # what is open is open in forked workers too
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    given = list(DataLoader(Vectors(split), batch_size=None, **options))
    assert torch.equal(given[0], first)
    assert all(torch.equal(given[i], own[i]) for i in range(len(own)))


def test_threads_read_one_member_at_once(store: Path) -> None:
    storage = open_storage(store)
    whole = np.frombuffer(storage.read(RECORD), np.uint8)
    file = storage.open(RECORD)

    def read(offset: int) -> bool:
        out = np.empty(len(whole) - offset, np.uint8)
        file.read_into(out, offset)
        return np.array_equal(out, whole[offset:])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(200)))
    with pytest.raises(EOFError):
        file.read_into(np.empty(2, np.uint8), len(whole) - 1)
    file.close()


def test_a_storage_travels_to_another_process_as_its_path(store: Path) -> None:
    storage = pickle.loads(pickle.dumps(open_storage(store)))
    assert isinstance(storage, ZipStorage)
    assert str(storage) == str(store)
    with pytest.raises(TypeError, match="open it there"):
        pickle.dumps(storage.open(RECORD))
