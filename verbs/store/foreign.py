"""Hidden states of others into the store, and splits out of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.names import CompressionName, SnapshotTag, check_name
from bertvision.pipelines.text import size
from bertvision.verbs.arguments.checks import find_workspace
from bertvision.verbs.arguments.reading import (
    ENCODINGS,
    StrPath,
    parse_choice,
    parse_tag,
    path_of,
    text_of,
)
from bertvision.verbs.rows import ShownRecord
from bertvision.verbs.tables import Values

if TYPE_CHECKING:
    from bertvision.featurestore.store import ActivationStore

_RAW = ("float16", "bfloat16", "float32", "float64")
_NAMED = 5


class Imported(ShownRecord):
    """What `import_states` did (see `pipelines.foreign.importing.Imported`)."""

    def table(self, values: Values) -> str:
        """What was added, and what was left out."""
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


def import_states(
    source: StrPath,
    name: str,
    *,
    layers: str | Iterable[int | str] | None = None,
    encoding: str = "int8",
    compression: str = "none",
    shard_tokens: int | None = None,
    permute: int | None = None,
    model: str | None = None,
    lengths: StrPath | None = None,
    input_ids: StrPath | None = None,
    dtype: str | None = None,
    shape: str | Iterable[int] | None = None,
    column: str | None = None,
    format: str | None = None,  # noqa: A002
    skip_bad: bool = False,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> Imported:
    """Store hidden states that other programs wrote, as a split that all readers take.

    What the files are is found out: a folder of safetensors files (speculators, vLLM), a DeepSpec
    cache, a data set that ``datasets`` saved (SAELens), arrays of NumPy and memory maps
    (docs/foreign-states.md). A call that was killed is finished by the same one.

    Examples:
        >>> import bertvision, numpy as np
        >>> np.save("states.npy", np.random.rand(6, 9, 2, 8).astype("float32"))
        >>> done = bertvision.import_states("states.npy", "0e/mine", layers="0,6", store="brought")
        >>> done.examples, done.layers
        (6, [0, 6])

    Args:
        source: folder or file.
        name: of the split, such as ``0e/train``.
        layers: what the layers are, by index or name; by default what the files say.
        encoding: int8, int4, bfloat16, float16 or float32.
        compression: none, zstd or pcodec.
        shard_tokens: capacity of a shard; by default what suits the longest sample.
        permute: seed of a permutation that mixes neighbours; None keeps the order.
        model: whose hidden states they are, for the provenance.
        lengths: ``.npy`` with the tokens of each sample, beside one array.
        input_ids: ``.npy`` with the token ids, beside one array.
        dtype: of a memory map: float16, bfloat16, float32 or float64.
        shape: of a memory map, such as ``1000,128,4,768``.
        column: of a data set, where several could be hidden states.
        format: Kind of files, of a folder that holds several: safetensors, npy, arrow or deepspec.
        skip_bad: leave out samples that are damaged, and count them.
        workspace: folder of the experiment; by default the one you stand in.
        store: a folder or URL, made where there is none; by default the workspace's.

    Raises:
        InputError: the files are damaged or of no known kind, or an argument is wrong.
        NonFiniteError: a sample holds NaN or infinity.
        ProvenanceError: the split was begun from another source or with other options.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk is full; what was committed stays.
    """
    tag, split = split_name(name)
    parse_choice(encoding, ENCODINGS, "--encoding")
    parse_choice(compression, ("none", "zstd", "pcodec"), "--compression")
    if dtype is not None:
        parse_choice(dtype, _RAW, "--dtype")
    if format is not None:
        parse_choice(format, ("safetensors", "npy", "arrow", "deepspec"), "--format")
    named, sizes = _layers(layers), _shape(shape)
    path = path_of(source)
    assert path is not None
    place = text_of(store) or str(find_workspace(workspace).activations)
    from bertvision.featurestore.store import ActivationStore
    from bertvision.pipelines.foreign.finding import find_source
    from bertvision.pipelines.foreign.importing import import_source

    found = find_source(
        path.expanduser(),
        lengths=path_of(lengths),
        input_ids=path_of(input_ids),
        dtype=dtype,
        shape=sizes,
        column=column,
        kind=format,
    )
    kind: CompressionName = compression  # type: ignore[assignment]  # it was checked
    done = import_source(
        *(ActivationStore.create(place), tag, split, found),
        layers=named,
        encoding=encoding,
        compression=kind,
        shard_tokens=shard_tokens,
        permute=permute,
        model=model,
        skip_bad=skip_bad,
    )
    return Imported(**done.to_json())


class Exported(ShownRecord):
    """What `export_states` did (see `pipelines.foreign.exporting.Exported`)."""

    def table(self, values: Values) -> str:
        """What was written, and where."""
        return (
            f"{values['split']}: {counted(values['examples'], 'example')} in {values['folder']}, "
            f"{values['format']}, {values['dtype']}, {size(values['bytes'])}; "
            f"{values['written']:,} written by this call"
        )


def export_states(
    name: str,
    folder: StrPath,
    *,
    format: str = "safetensors",  # noqa: A002
    dtype: str = "float32",
    layers: str | Iterable[int | str] | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> Exported:
    """Write a split as files that other programs read.

    Safetensors are a file for each example, as speculators names and fills them; npy is one array
    of all tokens with the lengths beside it; arrow a folder that ``datasets.load_from_disk`` opens
    (docs/foreign-states.md). A call that was killed is finished by the same one.

    Examples:
        >>> import bertvision
        >>> done = bertvision.export_states("1e/dev", "out", format="npy", layers="-1")
        >>> done.examples
        24

    Args:
        name: of the split, such as ``0.3e/train``.
        folder: to write to: a new one, an empty one, or one with the same export.
        format: safetensors, npy or arrow.
        dtype: float32 or float16.
        layers: which, by index or name; by default all.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

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
    parse_choice(format, ("safetensors", "npy", "arrow"), "--format")
    parse_choice(dtype, ("float16", "float32"), "--dtype")
    chosen, target = _layers(layers), path_of(folder)
    assert target is not None
    opened = open_store(workspace, store)[f"{tag}/{split}"]
    from bertvision.pipelines.foreign.exporting import export_split

    done = export_split(
        opened,
        target.expanduser(),
        kind=format,  # type: ignore[arg-type]  # it was checked
        dtype=dtype,  # type: ignore[arg-type]
        layers=chosen,
    )
    return Exported(**done.to_json())


def split_name(name: str) -> tuple[SnapshotTag, str]:
    """``0e/train`` → tag and split.

    Raises:
        InputError: it is not of that form.
    """
    tag, _, split = name.partition("/")
    if not split:
        raise InputError(f"{name!r}: name a snapshot and a split of it, such as 0e/train")
    return SnapshotTag(parse_tag(tag)), check_name(split, "split")


def open_store(workspace: StrPath | None, store: StrPath | None) -> ActivationStore:
    """The store that is named, or the workspace's."""
    from bertvision.featurestore.store import ActivationStore

    return ActivationStore.open(text_of(store) or str(find_workspace(workspace).activations))


def _layers(layers: str | Iterable[int | str] | None) -> list[int | str] | None:
    """Indices, or names where one is no number."""
    if layers is None:
        return None
    texts = [
        str(part).strip() for part in (layers.split(",") if isinstance(layers, str) else layers)
    ]
    if all(text.removeprefix("-").isdecimal() for text in texts):
        return [int(text) for text in texts]
    return list(texts)


def _shape(shape: str | Iterable[int] | None) -> tuple[int, ...] | None:
    if shape is None:
        return None
    parts = shape.split(",") if isinstance(shape, str) else list(shape)
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise InputError(f"--shape {shape!r}: give numbers, such as 1000,128,4,768") from None
