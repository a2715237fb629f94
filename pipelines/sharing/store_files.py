"""The files of a store that belong to a split, in the order in which they are to appear."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from bertvision.errors import CorruptStoreError, InputError
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.ledger import LEDGER
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.format.records import ROOT
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.stored_split import StoredSplit

_EXAMPLES = "examples"
_ARRAY_FILE = re.compile(
    r"(?:[a-z][a-z0-9_]*/)?zarr\.json|[a-z][a-z0-9_]*/c(?:/\d{1,9})+", re.ASCII
)
_LEDGER_FILE = re.compile(r"split\.json|\d{5,9}\.json", re.ASCII)
_OF_SHARD = re.compile(r"(?:hidden_states|scale)/c/(\d+)/.*|(\d+)\.json", re.ASCII)
_SHARDED = ("hidden_states/c/", "scale/c/")


def local_root(storage: Storage, doing: str) -> Path:
    """The folder of a store on a local disk.

    Raises:
        InputError: it lies elsewhere.
    """
    if not isinstance(storage, LocalStorage):
        raise InputError(
            f"{storage} is not on a local disk, from which {doing}: copy it to one first, with the "
            "tool of its provider"
        )
    return storage.root


def stages_of(split: ActivationSplit, root: Path) -> list[dict[str, Path]]:
    """The files of a complete split by key: what lies beside the shards, the shards, their records.

    In this order whoever reads meanwhile, and a push that is killed, find no record of what is not
    there. The split's own record is the last file of the last stage.

    Args:
        split: complete.
        root: folder of its store.

    Raises:
        CorruptStoreError: a file is missing, or of another length than the ledger says.
    """
    record, ledger = split.record, split.ledger
    group = arrays.group_key(record)
    beside = [f"{_EXAMPLES}/{split.split}.parquet", f"{_EXAMPLES}/{split.split}.parquet.sha256"]
    beside += [
        key
        for path in sorted((root / group).rglob("*"))
        if path.is_file() and _is_array_file(key := path.relative_to(root).as_posix(), group)
        if not key.removeprefix(f"{group}/").startswith(_SHARDED)
    ]
    shards, records = {}, []
    for shard in range(record.shards):
        found = ledger.find_shard(shard, record)
        for name, file in found.files.items() if found else ():
            shards[shard_key(record, name, shard)] = file.bytes
        records.append(f"{LEDGER}/{split.name}/{shard:05d}.json")
    records.append(f"{LEDGER}/{split.name}/split.json")
    for key in (*beside, *shards, *records):
        path = root / key
        if not path.is_file() or path.stat().st_size != shards.get(key, path.stat().st_size):
            raise CorruptStoreError(
                f"{path} is missing or of another length than the ledger says: `bertvision store "
                f"repair {split.name}` extracts again what is damaged; nothing was sent"
            )
    return [{key: root / key for key in stage} for stage in (beside, shards, records)]


def splits_in(files: Iterable[str]) -> list[str]:
    """The splits that a listing of a store has, as ``tag/split``, tags ordered as numbers."""
    found = set()
    for path in files:
        parts = path.split("/")
        if len(parts) == 4 and parts[0] == LEDGER and parts[3] == "split.json":
            tag, split = parts[1:3]
            if SnapshotTag.is_valid(tag) and _is_name(split):
                found.add((SnapshotTag(tag), split))
    return [f"{tag}/{split}" for tag, split in sorted(found)]


def files_of(name: str, files: Mapping[str, int]) -> dict[str, int]:
    """The files of a split out of a listing of its store, and no others.

    Args:
        name: ``tag/split``.
        files: bytes by path.
    """
    split = name.partition("/")[2]
    examples = {f"{_EXAMPLES}/{split}.parquet", f"{_EXAMPLES}/{split}.parquet.sha256"}
    return {
        path: length
        for path, length in files.items()
        if path in examples or _is_array_file(path, f"{ROOT}/{name}") or _is_record(path, name)
    }


def written_for(splits: Mapping[str, StoredSplit | None], files: Mapping[str, int]) -> set[str]:
    """The files in a listing of a store that bertvision wrote for splits of it.

    Args:
        splits: by ``tag/split``; None is one without a record, of which shards are known by name.
        files: bytes by path.

    Returns:
        Paths: shards, their records and the split's, its texts, the arrays that its record names,
        and the metadata of its snapshot. Nothing else in these folders.
    """
    found = set()
    for name, split in splits.items():
        group = f"{ROOT}/{name}/"
        parts = {"zarr.json", "hidden_states", "scale", *(split.record.arrays if split else ())}
        for path in files_of(name, files):
            if path.removeprefix(group).partition("/")[0] in parts or not path.startswith(group):
                found.add(path)
        above = f"{ROOT}/{name.partition('/')[0]}/zarr.json"
        found |= {above} & set(files)
    return found


def shard_bytes(name: str, files: Mapping[str, int]) -> int:
    """Bytes of the shards of a split, out of a listing of its store."""
    group = f"{ROOT}/{name}/"
    shards = tuple(f"{group}{part}" for part in _SHARDED)
    return sum(length for path, length in files.items() if path.startswith(shards))


def shard_of(key: str, name: str) -> int | None:
    """The shard that a file of a split belongs to; None of what lies beside the shards."""
    group, records = f"{ROOT}/{name}/", f"{LEDGER}/{name}/"
    inside = key.removeprefix(group) if key.startswith(group) else key.removeprefix(records)
    found = _OF_SHARD.fullmatch(inside)
    return int(found[1] or found[2]) if found else None


def patterns_of(name: str) -> list[str]:
    """Patterns of fnmatch for the files of a split."""
    split = name.partition("/")[2]
    return [
        *(f"{_EXAMPLES}/{split}.parquet", f"{_EXAMPLES}/{split}.parquet.sha256"),
        *(f"{ROOT}/{name}/*", f"{LEDGER}/{name}/*"),
    ]


def _is_array_file(path: str, group: str) -> bool:
    inside = path.removeprefix(f"{group}/")
    return inside != path and _ARRAY_FILE.fullmatch(inside) is not None


def _is_record(path: str, name: str) -> bool:
    inside = path.removeprefix(f"{LEDGER}/{name}/")
    return inside != path and _LEDGER_FILE.fullmatch(inside) is not None


def _is_name(text: str) -> bool:
    try:
        check_name(text, "split")
    except InputError:
        return False
    return True
