"""Stores of other versions: format 1 reads back for ever, what is newer is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from archives import opened
from faults import contents, small

from bertvision.errors import CorruptStoreError, FormatVersionError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import is_sealed, sealed
from bertvision.featurestore.store import ActivationStore

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def format_1(tmp_path: Path) -> Path:
    with opened(FIXTURES / "format-1.tar.xz") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "store"


def test_a_store_that_was_written_in_format_1_reads_back(format_1: Path) -> None:
    expected = dict(np.load(FIXTURES / "format-1.npz"))
    encodings = set()
    before = contents(format_1)
    store = ActivationStore.open(format_1)
    assert list(store) == ["0e", "0.3e", "1e", "2e", "3e", "4e"]
    for tag, snapshot in store.items():
        split = snapshot["train"].require_complete()
        assert split.verify() == []
        batch = split.read(range(len(split)))
        codes = batch.codes.view(torch.int16) if split.encoding.name == "bfloat16" else batch.codes
        np.testing.assert_array_equal(codes.numpy(), expected[f"{tag}/codes"])
        true = torch.from_numpy(expected[f"{tag}/hidden_states"])
        # the codes are the same to the bit; the arithmetic on them may be another machine's
        torch.testing.assert_close(batch.decode(), true, rtol=1e-6, atol=1e-6)
        if batch.scale is not None:
            np.testing.assert_array_equal(batch.scale.numpy(), expected[f"{tag}/scale"])
        for name in split.record.arrays:
            np.testing.assert_array_equal(split.array(name), expected[name])
        assert split.table().to_pylist() == json.loads(str(expected["table"]))
        assert split.record.provenance["overlap"] == 0.5
        encodings.add(split.encoding.name)
    assert encodings == {"int8", "int4", "float32", "float16", "bfloat16"}
    assert contents(format_1) == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    small().write(tmp_path)
    return tmp_path / "ledger/1e/train/split.json"


def change(path: Path, **fields: object) -> ActivationSplit:
    """The split after its record was written with other fields by somebody who may do so."""
    record = json.loads(path.read_text()) | fields
    record.pop("record_sha256")
    path.write_bytes(sealed(json.dumps(record, indent=1).encode()))
    return ActivationSplit(path.parents[3], "1e", "train")


def test_a_later_minor_version_is_read_and_what_it_adds_ignored(path: Path) -> None:
    true = ActivationSplit(path.parents[3], "1e", "train")
    split = change(path, format="1.7", colour={"of": ["a", 1]})
    assert split.record.format == "1.7"
    assert torch.equal(split[3], true[3])


@pytest.mark.parametrize("version", ["2.0", "10.1", "0.9"])
def test_another_major_version_is_refused_whatever_else_it_holds(path: Path, version: str) -> None:
    with pytest.raises(FormatVersionError, match=f"format {version[:-2]}.*install a newer"):
        change(path, format=version)
    path.write_text(json.dumps({"format": version, "everything": "else is different"}))
    with pytest.raises(FormatVersionError, match=f"format {version[:-2]}.*install a newer"):
        ActivationSplit(path.parents[3], "1e", "train")


def test_a_required_feature_nobody_knows_is_refused_by_name(path: Path) -> None:
    # even where the rest of the record cannot be understood without it
    for more in ({}, {"encoding": "int3"}):
        with pytest.raises(FormatVersionError, match=r"needs moon, sun.*install a newer"):
            change(path, requires=["sun", "moon"], **more)


def test_a_record_without_a_format_is_damage(path: Path) -> None:
    record = json.loads(path.read_text())
    del record["format"], record["record_sha256"]
    path.write_bytes(sealed(json.dumps(record, indent=1).encode()))
    with pytest.raises(CorruptStoreError, match=r"split\.json is damaged: format"):
        ActivationSplit(path.parents[3], "1e", "train")


@pytest.mark.parametrize("version", ["1", "1.x", "1.0.0", "", "one", 1.0, None])
def test_a_format_that_is_none_is_damage(path: Path, version: object) -> None:
    with pytest.raises(CorruptStoreError, match=r"split\.json is damaged: format"):
        change(path, format=version)


def test_every_byte_of_a_record_is_under_its_checksum(path: Path) -> None:
    for record in (path, path.with_name("00001.json")):
        data = record.read_bytes()
        assert is_sealed(data)
        assert list(json.loads(data))[-1] == "record_sha256"
        for i in range(len(data)):
            assert not is_sealed(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        assert not any(is_sealed(data[:i]) for i in range(len(data)))
        assert not is_sealed(data + b"\n")
