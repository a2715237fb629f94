"""The bytes of a shard file are Zarr's own, and nothing of them is read unchecked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from stores import Made, shard_path
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from bertvision.errors import CorruptStoreError, InputError
from bertvision.featurestore.format import shard
from bertvision.featurestore.format.shardfile import compress, decompress, read_spans, shard_pieces
from bertvision.featurestore.storage.local import LocalStorage

LENGTHS = [5, 31, 64, 1, 17, 40, 22, 9, 33, 60, 2, 28]


@pytest.mark.parametrize(
    ("encoding", "compression"),
    [("int8", "none"), ("int8", "zstd"), ("int4", "none"), ("float32", "none"),
     ("bfloat16", "pcodec"), ("float16", "pcodec"), ("float32", "zstd")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr")
def test_zarr_reads_what_is_written_and_writes_the_same_bytes(
    tmp_path: Path, encoding: str, compression: str
) -> None:
    made = Made(LENGTHS, encoding=encoding, compression=compression)
    split = made.write(tmp_path)
    path = tmp_path / "arrays.zarr/1e/train"
    for name in ("hidden_states", "scale") if split.encoding.quantised else ("hidden_states",):
        array = zarr.open_array(path / name, mode="r")
        values = array[...]
        rows = values[: split.record.shard_tokens]
        sharding = array.metadata.codecs[0]
        chunk_spec = array.metadata.get_chunk_spec(
            (0,) * array.ndim, array._async_array.config, default_buffer_prototype()
        )
        encoded = sync(
            sharding.encode(
                [(default_buffer_prototype().nd_buffer.from_ndarray_like(rows), chunk_spec)]
            )
        )
        assert next(iter(encoded)).to_bytes() == shard_path(split, name, 0).read_bytes()
    stored = zarr.open_array(path / "hidden_states", mode="r")[...]
    for i in (0, 5, 11):
        start, n = int(made.plan.first_token[i]), int(made.plan.n_tokens[i])
        ours = split.read([i]).codes
        if encoding == "bfloat16":
            ours = ours.view(torch.uint16)
        np.testing.assert_array_equal(ours.numpy(), stored[start : start + n])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("compression", ["zstd", "pcodec"])
def test_compression_keeps_every_value(tmp_path: Path, compression: str) -> None:
    plain, packed = (
        Made(LENGTHS, encoding="bfloat16", compression=c).write(tmp_path / c)
        for c in ("none", compression)
    )
    assert packed.verify() == []
    for i in range(len(plain)):
        assert torch.equal(plain[i], packed[i])
    assert torch.equal(packed.read([3], layers=[1]).decode(), plain.read([3], layers=[1]).decode())


def test_a_chunk_that_claims_to_be_larger_is_refused(tmp_path: Path) -> None:
    out = np.empty(1000, np.int16)
    large = np.zeros(1 << 20, np.int16)
    for compression in ("zstd", "pcodec"):
        data = np.frombuffer(compress(large, compression), np.uint8)
        with pytest.raises(CorruptStoreError, match="does not decode"):
            decompress(data, compression, out)
    with pytest.raises(CorruptStoreError, match="does not decode"):
        decompress(np.zeros(4, np.uint8), "none", out)


def test_an_index_is_checked_before_it_is_followed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("f", shard_pieces([np.arange(10, dtype=np.uint8), np.arange(6, dtype=np.uint8)]))
    data = bytearray((tmp_path / "f").read_bytes())
    assert [tuple(span) for span in read_spans(storage.open("f"), 2)] == [(0, 10), (14, 6)]
    for position in range(24, len(data)):
        changed = data.copy()
        changed[position] ^= 1
        (tmp_path / "f").write_bytes(changed)
        with pytest.raises(CorruptStoreError, match="index"):
            read_spans(storage.open("f"), 2)
    (tmp_path / "f").write_bytes(data[:20])
    with pytest.raises(CorruptStoreError, match="too few"):
        read_spans(storage.open("f"), 2)


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_a_compression_that_cannot_take_the_codes_is_refused_before_anything_is_written(
    tmp_path: Path, encoding: str
) -> None:
    with pytest.raises(InputError, match="pcodec takes values of two bytes.*zstd"):
        Made(LENGTHS, encoding=encoding, compression="pcodec").write(tmp_path)
    assert not list(tmp_path.rglob("split.json"))


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("rows", [0, 1, 20, 33, 10**6])
def test_examples_read_in_blocks_of_any_size_are_each_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, rows: int
) -> None:
    """Whether a block is an example, a few of them, or all."""
    made = Made(LENGTHS, encoding="int8", compression=compression, shard_tokens=400)
    split = made.write(tmp_path)
    whole = split.read(range(len(LENGTHS)))
    monkeypatch.setattr(shard, "_BLOCK_BYTES", rows * split.record.hidden_size)
    examples = len(split.plan.examples_of(0))
    assert examples == len(LENGTHS)
    reader = split.open_shard(0)
    for first, last in ((0, examples), (2, 3), (3, examples - 1)):
        low, high = split.plan.first_token[first], split.plan.first_token[last - 1]
        high += split.plan.n_tokens[last - 1]
        codes, scale = split.buffers(int(high - low), 2)
        reader.read(first, last, [2, 0], codes, scale)
        assert np.array_equal(codes.transpose(1, 0, 2), whole.codes[low:high, [2, 0]])
        assert whole.scale is not None
        assert np.array_equal(scale, whole.scale[low:high, [2, 0]])
    codes, scale = split.buffers(split.plan.tokens_of(0), 1)
    for wrong in range(examples):
        kept = [*reader._checksums[1]]
        reader._checksums[1][wrong] ^= 1
        with pytest.raises(CorruptStoreError, match=f"example {wrong} of it, layer 1"):
            reader.read(0, examples, [1], codes, scale)
        reader._checksums[1][:] = kept
    reader.close()
