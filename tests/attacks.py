"""Stores made to hurt, and the process in which what they do to a reader is measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from faults import contents
from numcodecs.zstd import Zstd
from stores import Made, record_path, shard_path

from bertvision.errors import BertvisionError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import sealed
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader

LENGTHS = [5, 31, 40, 17, 20, 9, 33]
MOST_BYTES = 200 << 20
MOST_SECONDS = 1.0
VALUES: list[Any] = [
    None, True, 0, -1, 10**15, 1 << 64, 1e308, float("nan"), "", "x" * 200, "../../../etc",
    "/etc/passwd", "int8", "object", [], {}, [[[]]], [10**15, 10**15], {"..": {"..": []}}, [0] * 9,
]  # fmt: skip


def make(root: Path, encoding: str = "int8", compression: str = "none") -> ActivationSplit:
    return Made(
        LENGTHS, encoding=encoding, compression=compression, layers=2, hidden=6, shard_tokens=64
    ).write(root)


def use(root: Path) -> None:
    """Everything a reader does with a store, until the first error of bertvision's own."""
    for step in (
        lambda: ActivationStore.open(root).splits(),
        lambda: ActivationStore.open(root)["1e"]["train"].read(range(7)).decode(),
        lambda: [b.padded() for b in ActivationLoader(ActivationSplit(root, "1e", "train"))],
        lambda: ActivationSplit(root, "1e", "train").table(),
        lambda: ActivationSplit(root, "1e", "train").info(),
        lambda: ActivationSplit(root, "1e", "train").labels,
        lambda: ActivationSplit(root, "1e", "train").verify(),
    ):
        try:
            step()
        except BertvisionError as error:
            assert 10 < len(str(error)) < 2000  # noqa: PT017


def reseal(path: Path, record: Any) -> None:
    """Write a record that passes its own checksum, as somebody who knows the format can."""
    record.pop("record_sha256", None)
    path.write_bytes(sealed(json.dumps(record, indent=1).encode()))


def mutations(document: Any, step: int) -> Iterator[tuple[int, Any]]:
    """The document with one value replaced or left out: every so many-th such change, numbered."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield path
        if isinstance(value, dict | list):
            for key in value if isinstance(value, dict) else range(len(value)):
                yield from places(value[key], (*path, key))

    changes = product(places(document, ()), [*VALUES, "left out"])
    for i, (path, value) in islice(enumerate(changes), 0, None, step):
        copy = {"": json.loads(json.dumps(document))}
        holder: Any = copy
        for key in ("", *path)[:-1]:
            holder = holder[key]
        if value == "left out":
            del holder[("", *path)[-1]]
        else:
            holder[("", *path)[-1]] = value
        yield i, copy.get("")


def mutated(root: Path, step: int = 53) -> Iterator[str]:
    """Stores whose metadata was mutated, one after another; each is mended before the next."""
    records = [root / "ledger/1e/train/split.json", root / "ledger/1e/train/00001.json"]
    for path in [*records, *sorted((root / "arrays.zarr").rglob("zarr.json"))]:
        text = path.read_text()
        document = json.loads(text)
        document.pop("record_sha256", None)
        for i, changed in mutations(document, step):
            if path in records and isinstance(changed, dict):
                reseal(path, changed)
            elif path in records or not i % (6 * step):  # what nobody reads, here and there
                path.write_text(json.dumps(changed))
            else:
                continue
            yield f"{path.relative_to(root)} {i}: {json.dumps(changed)[:3000]}"
        path.write_text(text)


def nested(root: Path) -> Iterator[str]:
    """Metadata nested a hundred thousand levels deep, and endless numbers."""
    deep = b"[" * 100_000 + b"]" * 100_000
    for name in ("ledger/1e/train/split.json", "ledger/1e/train/00001.json",
                 "arrays.zarr/1e/train/zarr.json", "arrays.zarr/zarr.json"):  # fmt: skip
        path = root / name
        data = path.read_bytes()
        for bad in (deep, b'{"shape": ' + deep + b"}", b"1" * 100_000, b"\xff\xfe", b"{}", b"null"):
            for content in (bad, sealed(b'{\n"shard": ' + bad + b"\n}")):
                path.write_bytes(content)
                yield f"{name}: {content[:30]!r}"
        path.write_bytes(data)


def sparse(root: Path) -> Iterator[str]:
    """Files of a tebibyte of zeros, which take no space on the disk."""
    for name in contents(root):
        path = root / name
        data = path.read_bytes()
        with path.open("wb") as file:
            file.truncate(1 << 40)
        yield name
        path.write_bytes(data)


def bombs(root: Path) -> Iterator[str]:
    """Compressed data that claims, or is, far larger than it may be, with all its checksums."""
    import google_crc32c

    def crc(data: bytes) -> bytes:
        return int(google_crc32c.value(data)).to_bytes(4, "little")

    split = ActivationSplit(root, "1e", "train")
    huge = bytes(Zstd(level=1).encode(bytes(1 << 29)))
    assert len(huge) < 200_000
    chunk = root / "arrays.zarr/1e/train/n_tokens/c/0"
    data = chunk.read_bytes()
    for bad in (huge, huge[:100]):
        chunk.write_bytes(bad + crc(bad))
        yield "an array"
    # and declared to be so large
    record_file = root / "ledger/1e/train/split.json"
    text = record_file.read_text()
    record = json.loads(text)
    record["arrays"]["n_tokens"]["shape"] = [1 << 18, 1 << 10]
    record["arrays"]["n_tokens"]["dims"] = ["example", "more"]
    record["examples"] = 1 << 18
    chunk.unlink()
    chunk.mkdir()
    (chunk / "0").write_bytes(huge + crc(huge))
    reseal(record_file, record)
    yield "a declared array"
    record_file.write_text(text)
    (chunk / "0").unlink()
    chunk.rmdir()
    chunk.write_bytes(data)
    if split.record.compression == "none":
        return
    path, committed_file = shard_path(split, "hidden_states", 1), record_path(split, 1)
    data, text = path.read_bytes(), committed_file.read_text()
    packed = huge
    if split.record.compression == "pcodec":
        from numcodecs.pcodec import PCodec

        packed = bytes(PCodec().encode(np.zeros(1 << 27, np.float32)))
    assert len(packed) < 1 << 20
    index = np.array([0, len(packed) + 4] * 2, "<u8").tobytes()
    bad = packed + crc(packed) + index + crc(index)
    path.write_bytes(bad)
    committed = json.loads(text)
    committed["files"]["hidden_states"] = {
        "bytes": len(bad), "xxh3_128": xxhash.xxh3_128_hexdigest(bad)
    }  # fmt: skip
    reseal(committed_file, committed)
    yield f"a shard in {split.record.compression}"
    path.write_bytes(data)
    committed_file.write_text(text)


def tables(root: Path) -> Iterator[str]:
    """Parquet that unpacks to far more than it is, and that is none."""
    path = root / "examples/train.parquet"
    data = path.read_bytes()
    # of half as much again as a reader may take; pyarrow would hash it for seconds
    size = 3 << 27
    ends = pa.py_buffer(np.array([0, size], np.int32))
    huge = pa.StringArray.from_buffers(1, ends, pa.py_buffer(bytes(size)))
    plain = {"use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"id": huge}), path, compression="zstd", **plain)
    del huge
    assert path.stat().st_size < 1 << 20
    yield "one huge text"
    many = pa.array(["x" * (1 << 20)]).take(pa.array(np.zeros(384, np.int32)))
    pq.write_table(pa.table({"id": many}), path, compression="zstd")
    assert path.stat().st_size < 1 << 20
    del many
    yield "one text many times"
    for bad in (b"", b"PAR1", b"PAR1" * 3, b"PAR1" + b"\xff" * 99 + b"PAR1", data[:-1], data[4:]):
        path.write_bytes(bad)
        yield f"{bad[:9]!r}"
    path.write_bytes(data)


KINDS: dict[str, Callable[[Path], Iterator[str]]] = {
    "mutated": mutated, "all mutated": partial(mutated, step=1), "nested": nested,
    "sparse": sparse, "bombs": bombs, "tables": tables,
}  # fmt: skip


def limited() -> None:
    """The body of the process: what it prints are the stores that did harm."""
    import resource

    count = 0
    for argument in sys.argv[1:]:
        folder, name = argument.split(":")
        root = Path(folder)
        use(root)  # imports, threads and caches are not counted
        assert ActivationSplit(root, "1e", "train").verify() == []
        for what in KINDS[name](root):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            started = time.process_time()
            try:
                use(root)
            except BaseException as error:  # noqa: BLE001
                print(f"{name}: {what}: {type(error).__name__}: {error}"[:4000])
            seconds = time.process_time() - started
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            # `use` does seven things
            if seconds > 7 * MOST_SECONDS or grown > MOST_BYTES:
                print(f"{name}: {what}: {seconds:.1f} s, {grown >> 20} MiB"[:4000])
            count += 1
    print(count)


if __name__ == "__main__":
    limited()
