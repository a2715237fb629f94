"""Stores made to hurt: refused by an error of bertvision's own, before memory or time is spent."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks import LENGTHS, make, reseal
from faults import contents
from stores import Made, record_path

from bertvision.errors import BertvisionError, CorruptStoreError
from bertvision.featurestore.split import ActivationSplit

STORES = {"plain": ("int8", "none"), "zstd": ("int8", "zstd"), "pcodec": ("float32", "pcodec")}


@pytest.mark.parametrize(
    ("attacks", "least"),
    [
        (["plain:mutated", "plain:nested", "plain:sparse", "zstd:bombs", "pcodec:bombs",
          "plain:tables"], 180),
        pytest.param(
            ["plain:all mutated"], 2500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]
        ),
    ],
)  # fmt: skip
def test_hostile_stores_are_refused_before_memory_or_time_is_spent(
    tmp_path: Path, attacks: list[str], least: int, tried: Callable[[int, str], None]
) -> None:
    for name, store in STORES.items():
        make(tmp_path / name, *store)
    before = contents(tmp_path)
    command = [sys.executable, Path(__file__).with_name("attacks.py")]
    places = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [*command, *(f"{tmp_path}/{attack}" for attack in attacks)],
        env=env, check=True, capture_output=True, text=True,
    )  # fmt: skip
    *harmful, count = done.stdout.splitlines()
    assert harmful == []
    tried(int(count), "stores")
    assert int(count) >= least
    assert contents(tmp_path) == before


def hidden_in(name: str, root: Path) -> tuple[Path, Path]:
    """Move a file or folder of the store out of it, and leave a link in its place."""
    outside = root.parent / "outside"
    shutil.move(root / name, outside)
    (root / name).symlink_to(outside)
    return root / name, outside


@pytest.mark.parametrize(
    "name",
    ["ledger", "ledger/1e", "ledger/1e/train", "ledger/1e/train/split.json",
     "ledger/1e/train/00001.json", "arrays.zarr", "arrays.zarr/1e/train",
     "arrays.zarr/1e/train/hidden_states", "arrays.zarr/1e/train/hidden_states/c/1/0/0",
     "arrays.zarr/1e/train/scale/c/1/0", "arrays.zarr/1e/train/n_tokens/c/0", "examples",
     "examples/train.parquet"],
)  # fmt: skip
def test_links_out_of_the_store_are_not_followed(tmp_path: Path, name: str) -> None:
    root = tmp_path / "store"
    made = Made(LENGTHS, encoding="int8", layers=2, hidden=6, shard_tokens=64)
    made.write(root)
    _, outside = hidden_in(name, root)
    held = contents(outside) if outside.is_dir() else outside.read_bytes()
    with pytest.raises(BertvisionError, match="link"):  # noqa: PT012
        split = ActivationSplit(root, "1e", "train")
        split.read(range(7))
        split.table()
    # nor written through
    if "0000" in name:
        made.write(root)
    else:
        with pytest.raises(BertvisionError, match="link"):  # noqa: PT012
            made.write(root)
            (root / "ledger/1e/train/00001.json").unlink()
            made.write(root)
    assert held == (contents(outside) if outside.is_dir() else outside.read_bytes())


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_a_folder_by_its_address_is_guarded_as_one_by_its_path(
    tmp_path: Path, protocol: str
) -> None:
    root = tmp_path / "store"
    make(root)
    hidden_in("examples", root)
    with pytest.raises(BertvisionError, match="link"):
        ActivationSplit(f"{protocol}://{root}", "1e", "train").table()


def test_names_in_records_cannot_lead_out_of_the_store(tmp_path: Path) -> None:
    split = make(tmp_path / "store")
    (tmp_path / "secret").mkdir()
    path = tmp_path / "store/ledger/1e/train/split.json"
    record = json.loads(path.read_text())
    for name in ("../../../../secret", "/etc", "a/b", "..", "zarr.json", ""):
        changed = json.loads(json.dumps(record))
        changed["arrays"][name] = changed["arrays"]["start_positions"]
        reseal(path, changed)
        with pytest.raises(CorruptStoreError, match=r"split\.json is damaged"):
            ActivationSplit(tmp_path / "store", "1e", "train")
    for field, value in (("tag", "../1e"), ("split", "../train"), ("tag", "2e")):
        reseal(path, {**record, field: value})
        with pytest.raises(CorruptStoreError, match="is the record of"):
            ActivationSplit(tmp_path / "store", "1e", "train")
    assert split.record.tag == "1e"


@pytest.mark.parametrize("checksums", ["", "x", "AAAA", "é" * 8, "A" * 4096, "=" * 16])
def test_checksums_that_are_none_are_refused(tmp_path: Path, checksums: str) -> None:
    split = make(tmp_path)
    path = record_path(split, 1)
    record = json.loads(path.read_text())
    assert len(base64.b64decode(record["checksums"])) % 8 == 0
    reseal(path, {**record, "checksums": checksums})
    with pytest.raises(CorruptStoreError, match="shard 1: its record holds no checksum"):
        split.read(split.plan.examples_of(1))


@pytest.mark.parametrize("codec", ["numcodecs.pickle", "numcodecs.json2", "vlen-utf8", "bytes"])
def test_codecs_and_types_that_run_code_are_never_looked_at(tmp_path: Path, codec: str) -> None:
    before = make(tmp_path)
    for array in ("hidden_states", "n_tokens"):
        path = tmp_path / f"arrays.zarr/1e/train/{array}/zarr.json"
        metadata = json.loads(path.read_text())
        metadata["codecs"] = [{"name": codec, "configuration": {"id": "pickle"}}]
        metadata["data_type"] = "numpy.object"
        path.write_text(json.dumps(metadata))
    split = ActivationSplit(tmp_path, "1e", "train")
    assert split.read(range(7)).codes.equal(before.read(range(7)).codes)
    assert len(split.verify()) == 2
