"""Damaged stores: nothing wrong is ever read, every error says where, and `verify` finds it all."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import contents
from stores import Made, record_path, shard_path

from bertvision.errors import BertvisionError, CorruptStoreError
from bertvision.featurestore import damage
from bertvision.featurestore.format.logits import TopLogits
from bertvision.featurestore.split import ActivationSplit

LENGTHS = [5, 31, 40, 17, 20, 9, 33]
PLACE = re.compile(r"shard \d|\d{5}\.json|split\.json|array \w+|\.parquet|zarr\.json")


def make(encoding: str, compression: str) -> Made:
    made = Made(
        *(LENGTHS,),
        **{"encoding": encoding, "compression": compression, "layers": 2, "hidden": 6},
        **{"shard_tokens": 64, "top": 3 if encoding == "int4" else 0},
    )
    assert made.plan.n_shards == 3
    return made


class Stored:
    """A store with its true contents, that is damaged and mended again and again."""

    def __init__(self, root: Path, encoding: str, compression: str) -> None:
        self.root = root
        self.made = make(encoding, compression)
        split = self.made.write(root)
        self.bytes = contents(root)
        self.values = split.read(range(len(split))).decode()
        self.labels = split.labels["start_positions"]
        self.token_ids = split.array("input_ids")
        self.table = split.table()
        self.logits = self.of_logits(split)

    @staticmethod
    def of_logits(split: ActivationSplit) -> TopLogits | None:
        """Log-probabilities of all examples, where there are some."""
        if split.record.top is None:
            return None
        return split.read(range(len(split)), logits=True).logits

    def open(self) -> ActivationSplit:
        return ActivationSplit(self.root, "1e", "train")

    def read(self, table: bool = True) -> None:
        """Read everything; what comes out is true, or an error says what is damaged."""
        split = self.open()
        assert torch.equal(split.read(range(len(split))).decode(), self.values)
        assert np.array_equal(split.labels["start_positions"], self.labels)
        assert np.array_equal(split.array("input_ids"), self.token_ids)
        assert not table or split.table().equals(self.table)
        if self.logits is not None:
            assert all(map(torch.equal, self.of_logits(split) or (), self.logits))

    def found(self) -> list[str]:
        """Problems that `verify` finds, or the error with which the split is refused."""
        try:
            return self.open().verify()
        except BertvisionError as error:
            return [str(error)]

    def same_meaning(self, name: str, data: bytes) -> bool:
        """Whether damaged bytes still say the same: of Zarr's metadata."""
        return name.endswith("zarr.json") and damage.arrays.same_metadata(data, self.bytes[name])

    def damaged(self, name: str, data: bytes) -> None:
        """See that this content of a file is never read as something else, and is found."""
        (self.root / name).write_bytes(data)
        try:
            self.read(table=name.endswith(".parquet"))
        except BertvisionError as error:
            assert PLACE.search(str(error)), f"{name}: {error}"  # noqa: PT017
        found = self.found()
        if not found:
            assert self.same_meaning(name, data), f"{name}: not found"
        assert all(PLACE.search(what) for what in found), found
        (self.root / name).write_bytes(self.bytes[name])


@pytest.fixture
def known_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zarr's metadata follow from the ledger alone; made once for each record, not each time."""

    def once(real: Callable[..., dict[str, bytes]]) -> Callable[..., dict[str, bytes]]:
        made: dict[str, dict[str, bytes]] = {}

        def lookup(records: object) -> dict[str, bytes]:
            key = repr(records)
            if key not in made:
                made[key] = real(records)
            return made[key]

        return lookup

    for name in ("split_metadata", "root_files"):
        monkeypatch.setattr(damage.arrays, name, once(getattr(damage.arrays, name)))


STORES = [("int8", "none"), ("int4", "zstd"), ("float32", "pcodec"), ("transform:0.1", "none")]


@pytest.fixture(params=STORES, ids=["-".join(s) for s in STORES])
def stored(request: pytest.FixtureRequest, tmp_path: Path, known_metadata: None) -> Stored:
    return Stored(tmp_path / "store", *request.param)


def kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def flips(stored: Stored, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Single flipped bits, as many in each kind of file."""
    rng = random.Random(seed)
    kinds: dict[str, list[str]] = {}
    for name in stored.bytes:
        kinds.setdefault(kind(name), []).append(name)
    for i in range(count):
        name = rng.choice(sorted(kinds.values())[i % len(kinds)])
        data = bytearray(stored.bytes[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield name, bytes(data)


@pytest.mark.parametrize("count", [180, pytest.param(700, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_read_and_verify_finds_it(
    stored: Stored, count: int, tried: Callable[[int, str], None]
) -> None:
    hit = Counter[str]()
    for name, data in flips(stored, count, 0):
        stored.damaged(name, data)
        hit[kind(name)] += 1
    assert len(hit) > 20
    tried(hit.total(), "flipped bits")
    stored.read()
    assert stored.found() == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_bit_of_a_shard_or_a_record_is_read_flipped(stored: Stored) -> None:
    split = stored.open()
    files = [shard_path(split, "hidden_states", 1), record_path(split, 1)]
    files += [record_path(split, 1).with_name("split.json")]
    for path in files:
        name = str(path.relative_to(stored.root))
        for bit in range(0, 8 * len(stored.bytes[name]), 5):  # each bit of a byte somewhere
            data = bytearray(stored.bytes[name])
            data[bit // 8] ^= 1 << bit % 8
            stored.damaged(name, bytes(data))


def test_a_file_of_any_other_length_is_never_read(stored: Stored) -> None:
    split = stored.open()
    names = ["hidden_states", "scale"] if split.encoding.quantised else ["hidden_states"]
    paths = [shard_path(split, name, 1) for name in names] + [record_path(split, 1)]
    for path in paths:
        data = path.read_bytes()
        for length in [*range(len(data)), len(data) + 1]:
            path.write_bytes((data + b"\0")[:length])
            with pytest.raises(CorruptStoreError, match=r"shard 1|00001\.json"):
                split.open_shard(1)
        assert [what for what in stored.found() if "shard 1" in what or "00001.json" in what]
        path.write_bytes(data)
    stored.read()


@pytest.mark.parametrize("how", ["empty", "missing", "zeros", "a folder"])
def test_a_file_that_is_not_there_is_never_read_as_zeros(
    stored: Stored, how: str, tried: Callable[[int, str], None]
) -> None:
    names = sorted({kind(name): name for name in stored.bytes}.values())
    tried(len(names), "files")
    for name in names:
        path = stored.root / name
        path.unlink()
        if how == "a folder":
            path.mkdir()
        elif how != "missing":
            path.write_bytes(b"" if how == "empty" else bytes(len(stored.bytes[name])))
        try:
            stored.read()
        except BertvisionError as error:
            # without its split.json a split does not exist
            assert PLACE.search(str(error)) or "no split 1e/train" in str(error), name  # noqa: PT017
        if how == "missing" and name.endswith(".sha256"):
            stored.read(table=True)  # as in stores of before: then what the table holds must do
        else:
            assert stored.found() or re.search(r"\d{5}\.json", name), name
        if how == "a folder":
            path.rmdir()
        path.write_bytes(stored.bytes[name])
    assert stored.found() == []


@pytest.mark.parametrize("name", ["hidden_states", "scale"])
def test_swapped_shards_of_one_length_are_found_by_readers_and_by_verify(
    tmp_path: Path, name: str
) -> None:
    made = make("int8", "none")
    split = made.write(tmp_path)
    one, two = (shard_path(split, name, shard) for shard in (0, 1))
    data = one.read_bytes()
    assert len(data) == two.stat().st_size
    shutil.copy(two, one)
    two.write_bytes(data)
    again = ActivationSplit(tmp_path, "1e", "train")
    for shard in (0, 1):
        for i in made.plan.examples_of(shard):
            with pytest.raises(CorruptStoreError, match=f"shard {shard}"):
                again.read([i])
    assert torch.equal(again[len(again) - 1], split[len(split) - 1])
    assert [what.split(":")[0] for what in again.verify()] == [
        "1e/train shard 0", "1e/train shard 1",
    ]  # fmt: skip


def test_swapped_records_are_found(tmp_path: Path) -> None:
    split = make("int8", "none").write(tmp_path)
    one, two = (record_path(split, shard) for shard in (0, 1))
    data = one.read_bytes()
    shutil.copy(two, one)
    two.write_bytes(data)
    with pytest.raises(CorruptStoreError, match=r"00000\.json is the record of shard 1"):
        ActivationSplit(tmp_path, "1e", "train")[0]
    assert len(split.verify()) == 2


@pytest.mark.parametrize("mixed", ["shards", "the split's record"])
@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_shards_of_another_extraction_of_the_same_data_are_found(
    tmp_path: Path, encoding: str, mixed: str
) -> None:
    """Two fine-tunings with equal tags, plans and options: a merge of their stores is no store.

    Each shard is whole and its record too, so nothing but what they are bound to tells them apart.
    """
    ours, theirs = make(encoding, "none"), make(encoding, "none")
    split = ours.write(tmp_path / "ours")
    theirs.hidden_states = [states * 1.001 for states in theirs.hidden_states]
    weights = {**theirs.spec.provenance, "weights_sha256": "cd"}
    theirs.spec = dataclasses.replace(theirs.spec, provenance=weights)
    other = theirs.write(tmp_path / "theirs")
    if mixed == "shards":
        found = [2]
        for name in split.ledger.find_shard(2, split.record).files:
            shutil.copy(shard_path(other, name, 2), shard_path(split, name, 2))
        shutil.copy(record_path(other, 2), record_path(split, 2))
    else:
        found = [0, 1, 2]
        shutil.copytree(tmp_path / "ours", tmp_path / "kept")
        for folder in ("ledger/1e/train/split.json", "arrays.zarr/1e/train/zarr.json"):
            shutil.copy(tmp_path / "theirs" / folder, tmp_path / "ours" / folder)
        for name in split.record.arrays:
            folder = f"arrays.zarr/1e/train/{name}"
            shutil.copytree(
                tmp_path / "theirs" / folder, tmp_path / "ours" / folder, dirs_exist_ok=True
            )
    again = ActivationSplit(tmp_path / "ours", "1e", "train")
    for shard in found:
        for i in ours.plan.examples_of(shard):
            with pytest.raises(CorruptStoreError, match="belongs to another extraction"):
                again.read([i])
    with pytest.raises(CorruptStoreError, match="belongs to another extraction"):
        again.info()
    named = [what.split(":")[0] for what in again.verify() if what.startswith("1e/train shard")]
    assert named == [f"1e/train shard {shard}" for shard in found]


@pytest.mark.parametrize(
    ("field", "value"),
    [("shape", [10**15, 2, 6]), ("shape", [1, 1, 1]), ("fill_value", 7), ("data_type", "float64"),
     ("codecs", []), ("chunk_grid", None)],
)  # fmt: skip
def test_edited_metadata_changes_nothing_that_is_read_and_verify_finds_it(
    tmp_path: Path, field: str, value: object
) -> None:
    made = make("int8", "none")
    before = made.write(tmp_path)
    for array in ("hidden_states", "scale", "n_tokens", "channel_mean"):
        path = tmp_path / f"arrays.zarr/1e/train/{array}/zarr.json"
        text = path.read_text()
        metadata = json.loads(text)
        metadata[field] = value
        path.write_text(json.dumps(metadata))
        split = ActivationSplit(tmp_path, "1e", "train")
        assert all(torch.equal(split[i], before[i]) for i in range(len(split)))
        (what,) = split.verify()
        assert f"{array}/zarr.json: differs from what the ledger describes" in what
        path.write_text(text)
