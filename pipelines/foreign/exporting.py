"""Export: a split of the store → files that other programs read."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertvision.errors import DiskSpaceError, InputError
from bertvision.featurestore.format.records import first_difference
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import full_disk_named, make_folder
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.files import write_json
from bertvision.pipelines.foreign.arrow import ArrowTarget
from bertvision.pipelines.foreign.content import (
    RECORD,
    Content,
    ExportRecord,
    Format,
    Target,
    read_export,
)
from bertvision.pipelines.foreign.numpy_arrays import NumpyTarget
from bertvision.pipelines.foreign.safetensors_folder import SafetensorsTarget
from bertvision.pipelines.progress import progress
from bertvision.pipelines.text import size

_TARGETS: dict[Format, type[Any]] = {
    "safetensors": SafetensorsTarget,
    "npy": NumpyTarget,
    "arrow": ArrowTarget,
}


class Exported(NamedTuple):
    """Result of an export.

    Attributes:
        split: ``tag/split``.
        folder: Folder of the files.
        format: Format of the files.
        dtype: Type of the hidden states.
        examples: Number of exported examples.
        written: Number of these written by this call.
        bytes: Bytes of the files.
    """

    split: str
    folder: str
    format: str
    dtype: str
    examples: int
    written: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Values by name."""
        return self._asdict()


def export_split(
    split: ActivationSplit,
    folder: Path,
    *,
    kind: Format,
    dtype: Literal["float16", "float32"],
    layers: Sequence[int | str] | None = None,
) -> Exported:
    """Write the hidden states of a split as files for other programs.

    A call that was killed is finished by the same one: what has its name is whole.

    Args:
        split: a complete one.
        folder: Folder to write to; it must be empty, or hold the same export.
        kind: Kind of the files.
        dtype: Type of the hidden states; float16 and float32 hold int8's to well below its error.
        layers: indices or names; None is all.

    Raises:
        InputError: the folder holds something else, or a layer is not stored.
        IncompleteSplitError: shards of the split are missing.
        NonFiniteError: a value is beyond float16.
        CorruptStoreError: the split is damaged.
        DiskSpaceError: the disk is too small, or full.
        LockedError: another process is exporting to the folder.
    """
    content = Content(split, dtype, layers)
    wanted = ExportRecord(
        split=split.name,
        split_sha256=split.record.identity,
        format=kind,
        dtype=dtype,
        layers=content.layers,
        examples=len(content),
        provenance=dict(split.record.provenance),
    )
    make_folder(folder.parent)
    lock = folder.with_name(f".{folder.name}.export.lock")
    with full_disk_named(folder), exclusive(lock, f"exporting to {folder}"):
        there = _begun(folder, wanted)
        if there is None:
            _check_space(folder.parent, content)
            make_folder(folder)
            write_json(folder / RECORD, wanted.model_dump())
        target: Target = _TARGETS[kind](folder, content)
        pending, written = target.pending(), 0
        per_shard = [len(split.plan.examples_of(shard)) for shard in range(split.plan.n_shards)]
        done = len(content) - sum(per_shard[shard] for shard in pending)
        with progress(len(content), f"export {split.name}", "example", initial=done) as bar:
            for shard in pending:
                written += target.write(shard)
                bar.update(per_shard[shard])
        target.finish()
        write_json(folder / RECORD, wanted.model_copy(update={"complete": True}).model_dump())
    size_on_disk = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Exported(split.name, str(folder), kind, dtype, len(content), written, size_on_disk)


def _begun(folder: Path, wanted: ExportRecord) -> ExportRecord | None:
    """The record of the export that is to be resumed; None where there is none.

    Raises:
        InputError: the folder holds something else.
    """
    record = read_export(folder)
    if record is None:
        files_there = (
            [path for path in folder.iterdir() if not path.name.startswith(".")]
            if (folder.is_dir())
            else []
        )
        if files_there or folder.is_file():
            raise InputError(f"{folder} is there and no export: name an empty folder, or a new one")
        return None
    names = set(ExportRecord.model_fields) - {"complete"}
    if differs := first_difference(record.model_dump(), wanted.model_dump(), sorted(names)):
        field, there, here = differs
        raise InputError(
            f"{folder} holds an export with {field} = {there!r}, now it is {here!r}: name another "
            "folder"
        )
    return record


def _check_space(folder: Path, content: Content) -> None:
    values = int(content.lengths.sum()) * len(content.layers) * content.split.record.hidden_size
    needed, free = values * content.dtype.itemsize, shutil.disk_usage(folder).free
    if needed > free:
        raise DiskSpaceError(
            f"{size(needed)} are needed in {folder}, {size(free)} are free: export fewer --layers, "
            "float16 instead of float32, or to another disk"
        )
