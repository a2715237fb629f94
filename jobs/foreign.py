"""Hidden states of others into the store, and splits out of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.layout import ENCODINGS, EncodingName
from bertvision.featurestore.format.names import CompressionName
from bertvision.jobs.show import ShownRecord, Values
from bertvision.jobs.store import open_store, split_name, store_place
from bertvision.pipelines.declare import NewStorePath, StorePath, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import (
    StrPath,
    path_of,
)
from bertvision.pipelines.text import size

FilesKind = Literal["safetensors", "npz", "npy", "arrow", "deepspec"]
_NAMED = 5


class Imported(ShownRecord):
    """Result of `import_states` (see `pipelines.foreign.importing.Imported`)."""

    def table(self, values: Values) -> str:
        """Lines on the added and the skipped samples."""
        name = f"{values['tag']}/{values['split']}"
        skipped: dict[str, str] = values["skipped"]
        lines = [
            f"{name}: {counted(values['examples'], 'example')} of {values['source']}, "
            f"{values['added']:,} added by this call, {size(values['bytes'])}",
            f"layers: {', '.join(map(str, values['layers']))}",
        ]
        if skipped:
            lines.append(f"left out, as they cannot be read: {counted(len(skipped), 'sample')}")
            lines += [f"  {key}: {why}" for key, why in list(skipped.items())[:_NAMED]]
        return "\n".join(lines)


@job
def import_states(
    source: StrPath,
    name: str,
    *,
    layers: str | Iterable[int | str] | None = None,
    encoding: Annotated[EncodingName, Option(f"{', '.join(ENCODINGS)}.")] = "int8",
    compression: CompressionName = "none",
    shard_tokens: Annotated[int | None, Option(ge=1)] = None,
    permute: Annotated[int | None, Option(ge=0)] = None,
    model: str | None = None,
    lengths: StrPath | None = None,
    input_ids: StrPath | None = None,
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None,
    shape: str | Iterable[int] | None = None,
    column: str | None = None,
    format: FilesKind | None = None,  # noqa: A002
    skip_bad: bool = False,
    workspace: WorkspacePath = None,
    store: NewStorePath = None,
) -> Imported:
    """Store hidden states that other programs wrote.

    All readers take them then. The kind of the files is recognised: a folder of safetensors files
    (speculators, vLLM), caches of TransformerLens as safetensors or .npz, a DeepSpec cache, a data
    set that `datasets` saved (SAELens), HDF5 (structural probes), arrays of NumPy and memory maps
    (docs/foreign-states.md). Nothing is unpickled. A killed import is
    finished by the same call: nothing is stored twice.

    Examples:
        >>> import bertvision, numpy as np
        >>> np.save("states.npy", np.random.rand(6, 9, 2, 8).astype("float32"))
        >>> done = bertvision.import_states("states.npy", "0e/mine", layers="0,6", store="brought")
        >>> done.examples, done.layers
        (6, [0, 6])

    Args:
        source: Folder of safetensors, .npz or .npy files, DeepSpec cache, data set that `datasets`
            saved, HDF5 or .npy file or memory map.
        name: Split to write, such as 0e/train.
        layers: Indices or names of the layers, such as 2,18,33; by default those of the files.
        compression: none, zstd or pcodec.
        shard_tokens: Tokens of a shard; by default 4,096, or twice the longest sample.
        permute: Seed of a stored order that mixes neighbours.
        model: Name of their model, for the provenance.
        lengths: .npy with the tokens of each sample, beside one array.
        input_ids: .npy with the token ids, beside one array.
        dtype: Numbers of a memory map: float16, bfloat16, float32 or float64.
        shape: Shape of a memory map, such as 1000,128,4,768.
        column: Column of the hidden states; or a pattern for the names of the layers, such as
            'blocks.*.hook_resid_post'.
        format: Kind of files, in a mixed folder: safetensors, npz, npy, arrow or deepspec.
        skip_bad: Leave out damaged samples, and count them.

    Raises:
        InputError: the files are damaged or of no known kind, or an argument is wrong.
        NonFiniteError: a sample holds NaN or infinity.
        ProvenanceError: the split was begun from another source or with other options.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk is full; what was committed stays.
    """
    tag, split = split_name(name)
    sizes, path = _shape(shape), path_of(source)
    assert path is not None
    place = store_place(workspace, store)
    from bertvision.featurestore.store import ActivationStore
    from bertvision.pipelines.foreign.content import parse_stored_layers
    from bertvision.pipelines.foreign.importing import find_source, import_source

    named = parse_stored_layers(layers)
    source_there = find_source(
        path.expanduser(),
        lengths=path_of(lengths),
        input_ids=path_of(input_ids),
        dtype=dtype,
        shape=sizes,
        column=column,
        kind=format,
        layers=None if named is None else len(named),
    )
    done = import_source(
        *(ActivationStore.create(place), tag, split, source_there),
        layers=named,
        encoding=encoding,
        compression=compression,
        shard_tokens=shard_tokens,
        permute=permute,
        model=model,
        skip_bad=skip_bad,
    )
    return Imported(**done.to_json())


class Exported(ShownRecord):
    """Result of `export_states` (see `pipelines.foreign.exporting.Exported`)."""

    def table(self, values: Values) -> str:
        """Line on the written files."""
        return (
            f"{values['split']}: {counted(values['examples'], 'example')} in {values['folder']}, "
            f"{values['format']}, {values['dtype']}, {size(values['bytes'])}; "
            f"{values['written']:,} written by this call"
        )


@job
def export_states(
    name: str,
    folder: StrPath,
    *,
    format: Literal["safetensors", "npy", "arrow"] = "safetensors",  # noqa: A002
    dtype: Literal["float32", "float16"] = "float32",
    layers: str | Iterable[int | str] | None = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> Exported:
    """Write a split as files that other programs read.

    A killed export is finished by the same call: what has its name is whole.

    Examples:
        >>> import bertvision
        >>> done = bertvision.export_states("1e/dev", "out", format="npy", layers="-1")
        >>> done.examples
        24

    Args:
        name: Split, such as 0.3e/train.
        folder: Folder to write to, new or empty.
        format: safetensors (a file for each example), npy (one array) or arrow (a data set that
            `datasets` opens).
        dtype: float32 or float16.
        layers: Layers, by index or name; by default all.

    Raises:
        UnknownNameError: there is no such split.
        InputError: the folder holds something else, or an argument is wrong.
        IncompleteSplitError: shards of the split are missing.
        NonFiniteError: a value is beyond float16.
        CorruptStoreError: the split is damaged.
        DiskSpaceError: the disk is too small, or full.
        LockedError: another process is exporting to the folder.
    """
    tag, split = split_name(name)
    target = path_of(folder)
    assert target is not None
    opened = open_store(workspace, store)[f"{tag}/{split}"]
    from bertvision.pipelines.foreign.content import parse_stored_layers
    from bertvision.pipelines.foreign.exporting import export_split

    done = export_split(
        opened,
        target.expanduser(),
        kind=format,
        dtype=dtype,
        layers=parse_stored_layers(layers),
    )
    return Exported(**done.to_json())


def _shape(shape: str | Iterable[int] | None) -> tuple[int, ...] | None:
    if shape is None:
        return None
    parts = shape.split(",") if isinstance(shape, str) else list(shape)
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise InputError(f"--shape {shape!r}: give numbers, such as 1000,128,4,768") from None
