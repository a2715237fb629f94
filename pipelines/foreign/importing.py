"""Import: hidden states that others wrote → a split of the store, through its public writer.

A path → the source of the kind of files that it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bertvision.errors import InputError, NonFiniteError, counted
from bertvision.featurestore.format.names import CompressionName
from bertvision.featurestore.format.plan import SHARD_TOKENS
from bertvision.featurestore.format.records import Provenance
from bertvision.featurestore.store import ActivationStore
from bertvision.pipelines.files import check_regular
from bertvision.pipelines.foreign.arrow import STATE, ArrowFolder
from bertvision.pipelines.foreign.content import read_export
from bertvision.pipelines.foreign.deepspec import INDEX, DeepSpecCache
from bertvision.pipelines.foreign.hdf5 import SUFFIXES, Hdf5File
from bertvision.pipelines.foreign.numpy_arrays import (
    STATES,
    NumpyArray,
    NumpyFolder,
    load_array,
    load_raw,
    open_flat,
)
from bertvision.pipelines.foreign.safetensors_folder import NPZ, NpzFolder, SafetensorsFolder
from bertvision.pipelines.foreign.sample import Sample, Source, files_of
from bertvision.pipelines.progress import progress

KINDS = ("safetensors", "npz", "npy", "arrow", "deepspec")
"""Kinds of files that a folder may hold."""
_TENSOR_FILES = {".safetensors": SafetensorsFolder, NPZ: NpzFolder}
"""Sources of files of named tensors, by suffix."""
_NOT_READ = (".pt", ".pth", ".pkl", ".zst")


def find_source(
    path: Path,
    *,
    lengths: Path | None = None,
    input_ids: Path | None = None,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    column: str | None = None,
    kind: str | None = None,
    layers: int | None = None,
) -> Source:
    """Open hidden states that others wrote, of whichever kind they are.

    Args:
        path: a folder of safetensors or npy files, a DeepSpec cache, a data set that ``datasets``
            saved, an ``.npy`` file or a file of bare numbers.
        lengths: ``.npy`` with the tokens of each sample; of one array alone.
        input_ids: ``.npy`` with the token ids; of one array alone.
        dtype: Type of the numbers of a file without a header.
        shape: Shape of a file without a header.
        column: Column of an Arrow data set that has the hidden states, or a pattern of the tensors,
            by name, that are the layers.
        kind: Kind of files to read in a folder, one of `KINDS`; None where it has one kind alone.
        layers: Number of layers, where the shapes of an HDF5 file do not tell it.

    Raises:
        InputError: there is nothing at the path that is known, it is damaged, or it holds files of
            several kinds.
    """
    if not path.exists():
        raise InputError(f"there is nothing at {path}")
    if not path.is_dir():
        check_regular(path)
        if path.suffix in _TENSOR_FILES and kind is None:
            return _TENSOR_FILES[path.suffix]([path], column)
        for option, value in (("--column", column), ("--format", kind)):
            if value is not None:
                raise InputError(f"{option} is for a folder, and {path} is a file: leave it out")
        if path.suffix in SUFFIXES:
            return Hdf5File(path, layers)
        return _array(path, lengths, input_ids, dtype, shape)
    given = {"--lengths": lengths, "--input-ids": input_ids, "--dtype": dtype, "--shape": shape}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{wrong[0]} is for one file of numbers, and {path} is a folder")
    exported = read_export(path)
    if exported is not None and not exported.complete:
        raise InputError(
            f"{path} is an export that was not finished: run `bertvision store export` again first"
        )
    if exported is not None and kind is None:
        kind = exported.format
    source = _folder(path, column, kind)
    if exported is not None:
        source.layer_names = exported.layers
    return source


def _folder(path: Path, column: str | None, kind: str | None) -> Source:
    there = _kinds(path)
    if not there:
        raise InputError(_unknown(path))
    if kind is None and len(there) > 1:
        raise InputError(
            f"{path} holds files of several kinds, {' and '.join(there)}, of which one is read: "
            f"choose with {' or '.join(f'--format {each}' for each in there)}"
        )
    chosen = kind or there[0]
    if chosen not in there:
        raise InputError(f"--format {chosen}: {path} holds {' and '.join(there)}: name that")
    if chosen == "arrow":
        return ArrowFolder(path, column)
    if chosen in ("safetensors", "npz"):
        suffix = f".{chosen}"
        return _TENSOR_FILES[suffix](files_of(path, suffix), column)
    if column is not None:
        raise InputError(f"--column names tensors or a column, not in {chosen}: leave it out")
    if chosen == "deepspec":
        return DeepSpecCache(path)
    return open_flat(path) if (path / STATES).exists() else NumpyFolder(path)


def _kinds(path: Path) -> list[str]:
    """The kinds of files in a folder, of `KINDS`."""
    there = {
        "safetensors": bool(files_of(path, ".safetensors")),
        "npz": bool(files_of(path, NPZ)),
        "npy": bool(files_of(path, ".npy")),
        "arrow": (path / STATE).exists(),
        "deepspec": (path / INDEX).exists(),
    }
    return [kind for kind in KINDS if there[kind]]


def _array(
    path: Path,
    lengths: Path | None,
    input_ids: Path | None,
    dtype: str | None,
    shape: tuple[int, ...] | None,
) -> Source:
    if path.suffix in _NOT_READ:
        raise InputError(_unknown(path))
    if (dtype is None) != (shape is None):
        raise InputError("--dtype and --shape say together what a file without a header holds")
    if path.suffix == ".npy" and dtype is not None:
        raise InputError(f"{path} says itself what it holds: leave --dtype and --shape out")
    if path.suffix != ".npy" and (dtype is None or shape is None):
        raise InputError(
            f"{path} has no name that says what it is: of a memory map give --dtype and --shape, "
            "such as --dtype float16 --shape 1000,128,4,768"
        )
    raw = dtype is not None and shape is not None
    states = load_raw(path, dtype, shape) if dtype and shape else load_array(path)
    beside = [None if given is None else load_array(given) for given in (lengths, input_ids)]
    return NumpyArray(states, *beside, is_bfloat16=raw and dtype == "bfloat16")


def _unknown(path: Path) -> str:
    endings = sorted({p.suffix for p in path.iterdir()} - {""}) if path.is_dir() else [path.suffix]
    advice = ""
    if set(endings) & {".pt", ".pth", ".pkl"}:
        advice = "; what torch.save or pickle wrote is not opened, as it can run code: save it as "
        advice += "safetensors with the program that it is from"
    elif ".zst" in endings:
        advice = "; unpack *.zst first, with `zstd -d`"
    elif set(endings).intersection(SUFFIXES):
        advice = "; of HDF5 name the file itself"
    elif (path / "dataset_dict.json").is_file():
        advice = "; it has several splits: name the folder of one"
    return (
        f"{path} holds no hidden states that are known (it has {', '.join(endings) or 'nothing'}): "
        "safetensors, npz, npy or HDF5 files, a DeepSpec cache, or a data set that `datasets` saved"
        + advice
    )


_NAMED = 3  # of what is wrong, in a message


class Imported(NamedTuple):
    """Result of an import.

    Attributes:
        tag: Snapshot of the split.
        split: its name.
        source: Kind of the files.
        examples: Number of examples of the split.
        added: Number added by this call; the others were there before.
        skipped: why samples were left out, by key.
        bytes: Size of the split's shards.
        layers: Names or indices of the layers.
    """

    tag: str
    split: str
    source: str
    examples: int
    added: int
    skipped: dict[str, str]
    bytes: int
    layers: list[int] | list[str]

    def to_json(self) -> dict[str, Any]:
        """Values by name."""
        return self._asdict()


def import_source(
    store: ActivationStore,
    tag: str,
    split: str,
    source: Source,
    *,
    layers: Sequence[int | str] | None = None,
    encoding: str = "int8",
    compression: CompressionName = "none",
    shard_tokens: int | None = None,
    permute: int | None = None,
    model: str | None = None,
    skip_bad: bool = False,
) -> Imported:
    """Add the samples of a source that the split does not have yet, and finish it.

    A call that was killed is finished by the same one: what was committed is not read again. It
    must begin with the same sample, whose digest stands in the provenance.

    Args:
        store: Its place.
        tag: Tag of the split.
        split: its name.
        source: Source of the samples.
        layers: Indices or names of the layers; by default those of the files, else ``stored 0``,
            ``stored 1``.
        encoding: Encoding of the store.
        compression: Compression of the store.
        shard_tokens: capacity of a shard; by default what suits the longest sample.
        permute: seed of a permutation of the stored order.
        model: Model whose hidden states they are; by default what the files say.
        skip_bad: Leave out what is damaged, and count it.

    Raises:
        InputError: a sample is damaged or of another shape than the others, or the split holds
            examples that are not of the source.
        NonFiniteError: a sample holds NaN or infinity.
        ProvenanceError: the split was begun from another source.
        LockedError: another process is writing it.
        DiskSpaceError: the disk is full; what was committed stays.
    """
    skipped = dict(source.bad)
    if skipped and not skip_bad:
        raise InputError(_bad(skipped))
    first = _first(source, skipped, skip_bad)
    names = layers or source.layer_names or [f"stored {i}" for i in range(first.states.shape[1])]
    if len(names) != first.states.shape[1]:
        raise InputError(
            f"the samples have {counted(first.states.shape[1], 'layer')}, and "
            f"{len(names)} {'is' if len(names) == 1 else 'are'} named: "
            f"{', '.join(map(str, names))}: name each layer once with --layers"
        )
    if shard_tokens is None:
        shard_tokens = SHARD_TOKENS if 2 * source.longest <= SHARD_TOKENS else 2 * source.longest
    made_from: Provenance = {"imported_from": source.kind, "first_sample_sha256": _digest(first)}
    if (model or source.model) is not None:
        made_from["model"] = model or source.model
    with store.writer(
        *(tag, split),
        hidden_size=first.states.shape[2],
        layers=names,
        encoding=encoding,
        compression=compression,
        shard_tokens=shard_tokens,
        provenance=made_from,
    ) as writer:
        there = set(writer)
        if strange := there.difference(source.keys):
            raise InputError(
                f"{tag}/{split} holds {counted(len(strange), 'example')} that are not of this "
                f"source, {min(strange)!r} first: import it to another split"
            )
        name = f"import {tag}/{split}"
        with progress(len(source.keys), name, "example", initial=len(there)) as bar:
            for position, key in enumerate(source.keys):
                if key in there:
                    continue
                bar.update(1)
                if key in skipped:
                    continue
                try:
                    sample = source.read(position)
                    writer.add(
                        key,
                        sample.states,
                        input_ids=sample.input_ids,
                        labels=sample.labels,
                        fields=sample.fields,
                    )
                except (InputError, NonFiniteError) as error:
                    if not skip_bad:
                        raise _with_options(error) from None
                    if key not in writer:  # else the error is of one that was dropped
                        skipped[key] = str(error)
        if skip_bad:
            with suppress(NonFiniteError):  # of those that are dropped
                writer.flush()
        skipped |= writer.dropped
        added = len(writer) - len(there)
        done = writer.finish(permute)
    layer_labels: list[int] | list[str] = done.layer_names or [*done.record.layers]
    size = store.stored_bytes(tag, split)
    return Imported(tag, split, source.kind, len(done), added, skipped, size, layer_labels)


def _first(source: Source, skipped: dict[str, str], skip_bad: bool) -> Sample:
    """The first sample that can be read, which says what all are like."""
    for position, key in enumerate(source.keys):
        try:
            return source.read(position)
        except InputError as error:
            if not skip_bad:
                raise
            skipped[key] = str(error)
    raise InputError(f"there is no sample that can be read: {_bad(skipped) if skipped else 'none'}")


def _with_options(error: InputError | NonFiniteError) -> InputError | NonFiniteError:
    """An error of the writer with what an import has to offer."""
    if not isinstance(error, NonFiniteError):
        return error
    what = str(error).partition(": look at the model")[0]
    return NonFiniteError(
        f"{what}: leave such samples out with --skip-bad, or choose --encoding bfloat16 or float32 "
        "where values are large and finite"
    )


def _digest(sample: Sample) -> str:
    """Hex sha256 of hidden states and token ids, as they lie in memory."""
    digest = hashlib.sha256(f"{sample.states.dtype} {tuple(sample.states.shape)}".encode())
    digest.update(sample.states.contiguous().view(torch.uint8).numpy().tobytes())
    if sample.input_ids is not None:
        digest.update(sample.input_ids.astype("<i8").tobytes())
    return digest.hexdigest()


def _bad(bad: dict[str, str]) -> str:
    """Sentence on the damaged samples, the first by name."""
    named = "; ".join(list(bad.values())[:_NAMED])
    more = f"; and {len(bad) - _NAMED:,} more" if len(bad) > _NAMED else ""
    return (
        f"{counted(len(bad), 'sample')} cannot be read: {named}{more}: have them written again, or "
        "leave them out with --skip-bad"
    )
