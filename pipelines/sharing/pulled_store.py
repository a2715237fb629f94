"""Splits of a store pulled into a store that may hold others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import (
    CorruptStoreError,
    ProvenanceError,
    StoreError,
    UnknownNameError,
    did_you_mean,
)
from bertvision.featurestore.creation import store_lock, write_root
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.format.ledger import LEDGER, Ledger, split_records
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import fsync, make_folder
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.sharing.download import fetch, staging
from bertvision.pipelines.sharing.hub import Repository
from bertvision.pipelines.sharing.store_files import files_of, patterns_of, shard_of, splits_in
from bertvision.pipelines.sharing.stores import check_same

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_TOLD = 3


def pull_store(
    api: HfApi,
    repository: Repository,
    files: Mapping[str, int],
    folder: Path,
    names: Sequence[str] | None = None,
) -> list[str]:
    """Bring splits into a store, if every file is as its ledger says.

    Args:
        api: of the hub.
        repository: at a commit.
        files: that it holds.
        folder: of the store, which may hold other splits, or is made.
        names: of splits, ``tag/split``; None is all.

    Returns:
        Names of the splits that are there now.

    Raises:
        UnknownNameError: the repository has no such split.
        InputError: it has files among those of a split that no split has.
        ProvenanceError: the store has another split of that name.
        CorruptStoreError: a file is not as the ledger says; nothing of the split was put in place.
        HubError: the hub cannot be reached, or refuses.
        DiskSpaceError: the disk is too small.
    """
    held = splits_in(files)
    names = list(dict.fromkeys(held if names is None else names))
    for name in names:
        if name not in held:
            raise UnknownNameError(
                f"{repository} has no split {name}: {did_you_mean(name, held)}it holds "
                f"{', '.join(held) or 'none'}"
            )
    target = LocalStorage(folder)
    with staging(folder, repository) as stage:
        records = [f"{LEDGER}/{name}/split.json" for name in names]
        fetch(api, repository, files, records, stage, records)
        brought = LocalStorage(stage)
        _check_fit(repository, brought, target, names)
        missing = [name for name in names if not _is_there(target, name)]
        wanted = [path for name in missing for path in files_of(name, files)]
        patterns = [pattern for name in missing for pattern in patterns_of(name)]
        if missing:
            fetch(api, repository, files, wanted, stage, patterns)
        write_root(brought)  # of these splits alone
        for name in missing:
            _check(repository, brought, name, files_of(name, files))
        for name in missing:
            _put(stage, target, name, list(files_of(name, files)))
    return names


def _check_fit(
    repository: Repository, brought: LocalStorage, target: LocalStorage, names: Sequence[str]
) -> None:
    """Refuse splits that the store has otherwise, or whose texts it has otherwise."""
    there = {f"{record.tag}/{record.split}": record for record in split_records(target)}
    examples = {record.split: record.examples_sha256 for record in there.values()}
    for name in names:
        tag, split = name.split("/")
        try:
            record = Ledger(brought, tag, split).read_split()
        except StoreError:
            brought.remove(f"{LEDGER}/{name}/split.json")  # or it would not be asked for again
            raise
        if name in there:
            check_same(str(target), record, there[name], "name another FOLDER")
        elif Ledger(target, tag, split).exists:
            raise ProvenanceError(
                f"{target} has a {name} that is damaged or still being written: name another "
                f"FOLDER, or remove it with `bertvision store rm {name}`"
            )
        elif examples.setdefault(split, record.examples_sha256) != record.examples_sha256:
            raise ProvenanceError(
                f"{target} has other examples of {split} than {repository}: a split has the same "
                "examples in every snapshot; name another FOLDER"
            )


def _is_there(target: LocalStorage, name: str) -> bool:
    """Whether a split is complete in the store, which was found to be of the same content."""
    tag, split = name.split("/")
    return Ledger(target, tag, split).exists and StoredSplit(target, tag, split).is_complete


def _check(repository: Repository, brought: LocalStorage, name: str, keys: Iterable[str]) -> None:
    """Compare every byte that was brought with the ledger; remove what is wrong, to bring it anew.

    Raises:
        CorruptStoreError: something is wrong.
        IncompleteSplitError: shards are missing in the repository.
    """
    split = ActivationSplit(brought, *name.split("/"))
    split.require_complete(any_order=True)
    damage = find_damage(split)
    if not damage:
        return
    shards = {found.shard for found in damage}
    for key in keys:
        if shard_of(key, name) in shards:  # None is what lies beside the shards
            brought.remove(key)
    told = "; ".join(found.what for found in damage[:_TOLD])
    raise CorruptStoreError(
        f"{repository}: {told}{' …' if len(damage) > _TOLD else ''}: nothing of {name} was put in "
        "place; run the same command again, which brings the damaged files alone; where it says "
        "the same, they are damaged in the repository: name an earlier --revision"
    )


def _put(stage: Path, target: LocalStorage, name: str, keys: Sequence[str]) -> None:
    """Put the files of a split in place: its record, then the shards' records, last.

    Every file is linked, so that whoever is killed does it again without another download.
    """
    tag, split = name.split("/")
    ledger, own = Ledger(target, tag, split), f"{LEDGER}/{name}/split.json"
    with ledger.lock(), store_lock(target):
        for key in keys:  # or a killed call would leave records of what was replaced
            if key.startswith(f"{LEDGER}/") and key != own and not _is_same(stage, target, key):
                target.remove(key)
        records = sorted(key for key in keys if key.startswith(f"{LEDGER}/") and key != own)
        shared = any(record.split == split for record in split_records(target))
        for key in keys:
            # those that are there are of the same content, and splits of other snapshots use them
            if not key.startswith(f"{LEDGER}/") and not (shared and key.startswith("examples/")):
                _link(stage / key, target.root / key)
        for key in (own, *records):
            _link(stage / key, target.root / key)
        write_root(target)


def _is_same(stage: Path, target: LocalStorage, key: str) -> bool:
    there = target.root / key
    return there.is_file() and there.read_bytes() == (stage / key).read_bytes()


def _link(source: Path, path: Path) -> None:
    """Let a file appear at a second place, whole and durably."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.pulled")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(source, temporary)
    fsync(temporary)
    os.replace(temporary, path)
    temporary.unlink(missing_ok=True)  # two links of one file do not take each other's place
    fsync(path.parent)
