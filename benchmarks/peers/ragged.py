"""Readers of ragged examples: containers that hand out one payload (see `base.payloads`) each."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from common.data import Synthetic

from bertvision.featurestore.format.encoding import ChannelStats
from peers.base import BATCH, Batch, Content, Packer, Reader, payloads

PER_FILE = 16
"""Examples per file or chunk, where a container leaves it open: 70 to 140 MB at BERT-large."""


class Ragged(Reader):
    """A container of payloads: float16 as its users store it, or our int8 codes to compare."""

    title: str

    def __init__(self, layers: int, hidden: int, content: Content) -> None:
        super().__init__(layers, hidden)
        self._content = content
        self._packer = Packer(layers, hidden, content)
        self._stats: ChannelStats | None = None
        self.name = f"{self.title}, ragged {content}"
        self.stored = f"ragged {content} (seq, layers, hidden)" + (
            " with scales, as one payload" if content == "int8" else ""
        )

    def prepare(self, folder: Any, synthetic: Synthetic) -> None:
        """Write the payloads."""
        super().prepare(folder, synthetic)
        self._stats = synthetic.stats if self._content == "int8" else None

    def batches(self, seed: int) -> Iterator[Batch]:
        """Packed codes or float16."""
        for parts in self.parts(seed):
            yield self._packer.pack(parts, self._stats)

    @abstractmethod
    def parts(self, seed: int) -> Iterator[list[Any]]:
        """The payloads of each mini-batch of an epoch."""

    def grouped(self, payload: Any, seed: int) -> Iterator[list[Any]]:
        """Mini-batches of ``payload(example)`` in an order of our own, for random access."""
        for group in self.groups(seed):
            yield [payload(int(i)) for i in group]


class SafeTensors(Ragged):
    """A safetensors file per 16 examples, a tensor of bytes an example."""

    title = "safetensors"
    needs = "safetensors"
    mapped = True

    def write(self, synthetic: Synthetic) -> None:
        """Write files of `PER_FILE` examples."""
        from safetensors.numpy import save_file

        found: dict[str, Any] = {}
        for i, payload in enumerate(payloads(synthetic, self._content, self.examples)):
            found[str(i)] = np.frombuffer(payload, np.uint8)
            if len(found) == PER_FILE or i == self.examples - 1:
                save_file(found, self.folder / f"{i // PER_FILE:05d}.safetensors")
                found = {}

    def open(self) -> None:
        """Open all files."""
        from safetensors import safe_open

        paths = sorted(self.folder.glob("*.safetensors"))
        self._files = [safe_open(path, framework="numpy") for path in paths]

    def close(self) -> None:
        """Close them."""
        self._files = []

    def parts(self, seed: int) -> Iterator[list[Any]]:
        """One tensor an example."""
        return self.grouped(lambda i: self._files[i // PER_FILE].get_tensor(str(i)), seed)


class Arrow(Ragged):
    """Hugging Face datasets: a binary column read without copies, or a column of lists."""

    needs = "datasets"
    mapped = True

    def __init__(self, layers: int, hidden: int, content: Content, as_lists: bool = False) -> None:
        self.title = f"datasets (Arrow) {'lists, torch format' if as_lists else 'binary column'}"
        super().__init__(layers, hidden, content)
        self._as_lists = as_lists
        self.limit = 32 if as_lists else None

    def write(self, synthetic: Synthetic) -> None:
        """Write a dataset of one column."""
        from datasets import Dataset, Features, LargeList, Value

        def rows() -> Iterator[dict[str, Any]]:
            for payload in payloads(synthetic, self._content, self.examples):
                yield {"x": np.frombuffer(payload, np.float16) if self._as_lists else payload}

        column = LargeList(Value("float16")) if self._as_lists else Value("large_binary")
        dataset = Dataset.from_generator(
            rows,
            features=Features({"x": column}),
            cache_dir=str(self.folder / "cache"),
            writer_batch_size=PER_FILE,
        )
        dataset.save_to_disk(self.folder / "dataset")
        shutil.rmtree(self.folder / "cache")

    def open(self) -> None:
        """Map the dataset."""
        import torch
        from datasets import load_from_disk

        kind = {"type": "torch", "dtype": torch.float16} if self._as_lists else {"type": "arrow"}
        self._data = load_from_disk(str(self.folder / "dataset")).with_format(**kind)

    def close(self) -> None:
        """Let go of the mapping."""
        self._data = None

    def parts(self, seed: int) -> Iterator[list[Any]]:
        """The column's value of each example."""
        if self._as_lists:
            return self.grouped(lambda i: self._data[i]["x"].numpy(), seed)
        return self.grouped(lambda i: self._data[i]["x"][0].as_buffer(), seed)


class LitData(Ragged):
    """litdata's chunks and its own shuffling, in the caller's process (workers slow it down)."""

    title = "litdata"
    needs = "litdata"
    shuffled = "its own: chunks and the items within them"
    mapped = True

    def write(self, synthetic: Synthetic) -> None:
        """Write chunks of 64 MB, its default for large items."""
        import torch
        from litdata.streaming.cache import Cache

        cache = Cache(str(self.folder), chunk_bytes="64MB")
        for i, payload in enumerate(payloads(synthetic, self._content, self.examples)):
            cache[i] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        cache.done()
        cache.merge()

    def open(self) -> None:
        """Open the dataset."""
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(str(self.folder), shuffle=True, drop_last=False)
        self._loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=0, collate_fn=list)

    def close(self) -> None:
        """Let go of the mappings."""
        self._loader = None

    def parts(self, seed: int) -> Iterator[list[Any]]:
        """One tensor of bytes an example."""
        for batch in self._loader:
            yield [item.numpy() for item in batch]


class MosaicStreaming(Ragged):
    """MDS shards and their own shuffling, in the caller's process (workers slow it down)."""

    title = "mosaicml-streaming"
    needs = "streaming"
    shuffled = "its own (py1e): across shards, within blocks"

    def write(self, synthetic: Synthetic) -> None:
        """Write MDS shards of at most 64 MiB, its default."""
        from streaming import MDSWriter

        with MDSWriter(out=str(self.folder), columns={"x": "bytes"}, exist_ok=True) as out:
            for payload in payloads(synthetic, self._content, self.examples):
                out.write({"x": payload})

    def open(self) -> None:
        """Open the dataset."""
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory
        from torch.utils.data import DataLoader

        clean_stale_shared_memory()
        data = StreamingDataset(local=str(self.folder), shuffle=True, batch_size=BATCH)
        self._loader = DataLoader(data, batch_size=BATCH, num_workers=0, collate_fn=list)

    def close(self) -> None:
        """Let go of its threads and shared memory."""
        self._loader = None

    def parts(self, seed: int) -> Iterator[list[Any]]:
        """One payload an example."""
        for batch in self._loader:
            yield [item["x"] for item in batch]


class Lance(Ragged):
    """A Lance table with a blob column, rows taken by number.

    Of its encodings of large binary values this one is the fastest to read at random by far.
    """

    title = "Lance"
    needs = "lance"

    def write(self, synthetic: Synthetic) -> None:
        """Write a table of one column."""
        import lance
        import pyarrow as pa

        blob = pa.field("x", pa.large_binary(), metadata={b"lance-encoding:blob": b"true"})
        schema = pa.schema([blob])
        batches = (
            pa.record_batch([pa.array([payload], pa.large_binary())], schema=schema)
            for payload in payloads(synthetic, self._content, self.examples)
        )
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        lance.write_dataset(
            reader, self.folder / "table", mode="overwrite", data_storage_version="2.1"
        )

    def open(self) -> None:
        """Open the table."""
        import lance

        self._data = lance.dataset(self.folder / "table")

    def close(self) -> None:
        """Let go of it."""
        self._data = None

    def parts(self, seed: int) -> Iterator[list[Any]]:
        """The blob of each example."""
        for group in self.groups(seed):
            files = self._data.take_blobs("x", indices=group.tolist())
            yield [file.readall() for file in files]


class ArrayRecord(Ragged):
    """ArrayRecord files read through grain, with its prefetching threads."""

    title = "array_record with grain"
    needs = "grain"
    shuffled = "grain's global shuffle"

    def write(self, synthetic: Synthetic) -> None:
        """Write files of `PER_FILE` records, uncompressed, each record its own group."""
        from array_record.python.array_record_module import ArrayRecordWriter

        out = None
        for i, payload in enumerate(payloads(synthetic, self._content, self.examples)):
            if i % PER_FILE == 0:
                if out:
                    out.close()
                path = self.folder / f"{i // PER_FILE:05d}.array_record"
                out = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
            out.write(payload)
        out.close()

    def open(self) -> None:
        """Open all files."""
        from grain.sources import ArrayRecordDataSource

        self._source = ArrayRecordDataSource(
            [str(path) for path in sorted(self.folder.glob("*.array_record"))]
        )

    def close(self) -> None:
        """Let go of them."""
        self._source = None

    def parts(self, seed: int) -> Iterator[list[Any]]:
        """One record an example."""
        from grain import MapDataset, ReadOptions

        data = MapDataset.source(self._source).shuffle(seed=seed)
        # not its default of 500 records ahead, which is for records of kilobytes
        stream = data.to_iter_dataset(ReadOptions(num_threads=16, prefetch_buffer_size=BATCH))
        batch: list[Any] = []
        for record in stream:
            batch.append(record)
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch


class Zarr(Ragged):
    """One Zarr array of bytes, sharded and uncompressed, of which each example is a slice."""

    def __init__(self, layers: int, hidden: int, content: Content, zarrs: bool) -> None:
        self.title = "zarr with zarrs" if zarrs else "zarr-python"
        super().__init__(layers, hidden, content)
        self.needs = "zarrs" if zarrs else ""
        self._pipeline = "zarrs.ZarrsCodecPipeline" if zarrs else _ZARR_PYTHON

    @property
    def slug(self) -> str:
        """Its folder, which both pipelines read."""
        return f"zarr-{self._content}"

    def write(self, synthetic: Synthetic) -> None:
        """Write the payloads one after another, and where each begins."""
        import zarr

        parts = [
            np.frombuffer(p, np.uint8) for p in payloads(synthetic, self._content, self.examples)
        ]
        values = np.concatenate(parts)
        array = zarr.create_array(
            self.folder / "payloads.zarr",
            shape=values.shape,
            chunks=(_CHUNK,),
            shards=(_CHUNK * 64,),
            dtype="uint8",
            compressors=None,
            overwrite=True,
        )
        array[:] = values
        np.save(self.folder / "ends.npy", np.cumsum([part.size for part in parts]))

    def open(self) -> None:
        """Open the array with its pipeline."""
        import zarr

        with zarr.config.set({"codec_pipeline.path": self._pipeline}):
            self._array = zarr.open_array(self.folder / "payloads.zarr", mode="r")
        self._ends = np.load(self.folder / "ends.npy")

    def parts(self, seed: int) -> Iterator[list[Any]]:
        """One slice an example."""

        def payload(i: int) -> Any:
            return np.asarray(self._array[self._ends[i - 1] if i else 0 : self._ends[i]])

        return self.grouped(payload, seed)


_CHUNK = 1 << 20  # bytes
_ZARR_PYTHON = "zarr.core.codec_pipeline.BatchedCodecPipeline"
