"""Stores, or some of their splits, pushed; and pulled into a store that may hold others.

The files of a store that belong to a split, in the order in which they are to appear.

Splits of a store pulled into a store that may hold others.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import (
    CorruptStoreError,
    IncompleteSplitError,
    InputError,
    ProvenanceError,
    StoreError,
    StoreNotFoundError,
    UnknownNameError,
    did_you_mean,
)
from bertvision.featurestore.creation import store_lock, write_root
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.ledger import LEDGER, Ledger, split_records
from bertvision.featurestore.format.logits import OUTPUTS
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.format.records import ROOT, SplitRecord
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import fsync, make_folder
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.sharing import manifest as manifests
from bertvision.pipelines.sharing.cards import store_card
from bertvision.pipelines.sharing.hub import Repository
from bertvision.pipelines.sharing.manifest import CARD, Manifest, earlier_push
from bertvision.pipelines.sharing.transfer import (
    Base,
    Content,
    Sent,
    base_of,
    bytes_of,
    fetch,
    send,
    staging,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi


_EXAMPLES = "examples"
_ARRAY_FILE = re.compile(
    r"(?:[a-z][a-z0-9_]*/)?zarr\.json|[a-z][a-z0-9_]*/c(?:/\d{1,9})+", re.ASCII
)
_LEDGER_FILE = re.compile(r"split\.json|\d{5,9}\.json", re.ASCII)
_OF_SHARD = re.compile(
    rf"(?:hidden_states|scale|{'|'.join(OUTPUTS)})/c/(\d+)(?:/.*)?|(\d+)\.json", re.ASCII
)
_SHARDED = tuple(f"{name}/c/" for name in ("hidden_states", "scale", *OUTPUTS))


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
        shard_record = ledger.find_shard(shard, record)
        for name, file in shard_record.files.items() if shard_record else ():
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
    names = set()
    for path in files:
        parts = path.split("/")
        if len(parts) == 4 and parts[0] == LEDGER and parts[3] == "split.json":
            tag, split = parts[1:3]
            if SnapshotTag.is_valid(tag) and _is_name(split):
                names.add((SnapshotTag(tag), split))
    return [f"{tag}/{split}" for tag, split in sorted(names)]


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
        splits: Records by ``tag/split``; None is one without a record, of which shards are known
            by name.
        files: bytes by path.

    Returns:
        Paths: shards, their records and the split's, its texts, the arrays that its record names,
        and the metadata of its snapshot. Nothing else in these folders.
    """
    paths = set()
    for name, split in splits.items():
        group = f"{ROOT}/{name}/"
        parts = {"zarr.json", *(part.partition("/")[0] for part in _SHARDED)}
        parts |= {*split.record.arrays} if split else set()
        for path in files_of(name, files):
            if path.removeprefix(group).partition("/")[0] in parts or not path.startswith(group):
                paths.add(path)
        above = f"{ROOT}/{name.partition('/')[0]}/zarr.json"
        paths |= {above} & set(files)
    return paths


def shard_bytes(name: str, files: Mapping[str, int]) -> int:
    """Bytes of the shards of a split, out of a listing of its store."""
    group = f"{ROOT}/{name}/"
    shards = tuple(f"{group}{part}" for part in _SHARDED)
    return sum(length for path, length in files.items() if path.startswith(shards))


def shard_of(key: str, name: str) -> int | None:
    """The shard that a file of a split belongs to; None of what lies beside the shards."""
    group, records = f"{ROOT}/{name}/", f"{LEDGER}/{name}/"
    inside = key.removeprefix(group) if key.startswith(group) else key.removeprefix(records)
    match = _OF_SHARD.fullmatch(inside)
    return int(match[1] or match[2]) if match else None


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


log = logging.getLogger(__name__)
_REMEDY = (
    "push fewer splits to a repository, or extract with larger shards (in Python, "
    "bertvision.extract(…, shard_tokens=32768)), which makes fewer files"
)


def push_store(
    api: HfApi,
    repository: Repository,
    store: ActivationStore,
    names: Sequence[str],
    *,
    private: bool | None = None,
    licence: str | None = None,
    replace: bool = False,
    whole: bool = False,
) -> Sent:
    """Send complete splits of a store beside those that the repository holds.

    What an earlier push left of these splits and is none of theirs, such as shards of another
    division, is removed.

    Args:
        api: API of the hub.
        repository: a data set.
        store: Store on a local disk.
        names: Names of splits, ``tag/split``.
        private: Whether a new repository is.
        licence: Licence of the texts and hidden states, for the card.
        replace: Take the place of what `push` did not send, and of other splits of these names.
        whole: ``names`` are all of the store; with ``replace`` the repository holds no others then.

    Raises:
        UnknownNameError: there is no such split.
        IncompleteSplitError: shards of one are missing.
        CorruptStoreError: files of one are missing.
        ProvenanceError: the repository holds another split of that name, or other examples of it.
        InputError: the hub does not take so many files, or the repository holds something else;
            nothing was sent.
        HubError: the hub cannot be reached, or refuses.
    """
    root = local_root(store.storage, "stores are pushed")
    splits: list[ActivationSplit] = [store[name].require_complete(any_order=True) for name in names]
    base = base_of(api, repository)
    others: dict[str, ActivationSplit] = {}
    if base is not None:
        earlier_push(api, base.repository, base.files, "store", replace=replace)
        others = _records_there(base)
    here = {split.name: split for split in splits}
    replaced, gone = set[str](), set[str]()
    if replace:
        replaced = {n for n in others if n in here and others[n].record.difference(here[n].record)}
        gone = set(others) - set(here) if whole else gone
    remaining = {name: split for name, split in others.items() if name not in replaced | gone}
    for split in splits:
        _check_fits(repository, split.record, remaining)
    if whole and (more := sorted(set(remaining) - set(here))):
        log.info("%s holds %s too: --replace removes them", repository, ", ".join(more))
    manifest = Manifest(kind="store", bertvision=version("bertvision")).content()
    beside: dict[str, Content] = {manifests.FILE: manifest}
    shards: dict[str, Content] = {}
    records: dict[str, Content] = {}
    for split in splits:
        for stage, files in zip((beside, shards, records), stages_of(split, root), strict=True):
            stage.update(files)
    all_splits = remaining | here
    ordered = [all_splits[name] for name in splits_in(f"ledger/{n}/split.json" for n in all_splits)]
    last: dict[str, Content] = {
        f"{ROOT}/{key}": content
        for key, content in arrays.root_files([split.record for split in ordered]).items()
    }
    there = base.files if base else {}
    sent = {*beside, *shards, *records, *last}
    removed = _outdated(there, {n: others.get(n) for n in {*here, *gone}}, replaced, sent)
    # texts of a split are those of all snapshots
    removed -= {path for name in set(remaining) - set(here) for path in files_of(name, there)}
    lengths = {path: length for path, length in there.items() if path not in removed}
    lengths |= {key: bytes_of(content) for key, content in shards.items()}
    last[CARD] = store_card(
        repository.name, ordered, {n: shard_bytes(n, lengths) for n in all_splits}, licence
    )
    return send(
        api,
        repository,
        [beside, shards, records, last],
        f"{', '.join(names)}, pushed by bertvision {version('bertvision')}",
        private=private,
        remedy=_REMEDY,
        base=base,
        removed=removed,
    )


def _records_there(base: Base) -> dict[str, ActivationSplit]:
    """The splits that a repository holds, by name; those that cannot be read are replaced."""
    splits: dict[str, ActivationSplit] = {}
    if names := splits_in(base.files):
        storage = open_storage(f"hf://{base.repository}")
        for name in names:
            # what cannot be reached, or is newer, is there all the same: that ends the push
            with suppress(CorruptStoreError, IncompleteSplitError, StoreNotFoundError):
                splits[name] = ActivationSplit(storage, *name.split("/"))
    return splits


def _outdated(
    there: Mapping[str, int],
    splits: Mapping[str, ActivationSplit | None],
    replaced: Collection[str],
    sent: Collection[str],
) -> set[str]:
    """Files that bertvision wrote for some splits of a repository and that are outdated.

    Of a split that gives way to another one, its records too: they end first, so that none is of
    what is not there.
    """
    ends = tuple(f"{LEDGER}/{name}/" for name in replaced)
    owned = written_for(splits, there)
    return {path for path in owned if path not in sent or path.startswith(ends)}


def _check_fits(
    repository: Repository, record: SplitRecord, others: Mapping[str, ActivationSplit]
) -> None:
    """Refuse to push a split over another one, or its texts over those of other snapshots."""
    remedy = "push it to another repository or --revision"
    for other in (split.record for split in others.values()):
        if (other.tag, other.split) == (record.tag, record.split):
            check_same(str(repository), record, other, f"{remedy}, or in its place with --replace")
        elif other.split == record.split and other.examples_sha256 != record.examples_sha256:
            raise ProvenanceError(
                f"{repository} has other examples of {record.split}, of {other.tag}: a split has "
                f"the same examples in every snapshot; {remedy}"
            )


def check_same(where: str, here: SplitRecord, there: SplitRecord, remedy: str) -> None:
    """Refuse a split that is another one where it is to go.

    Args:
        where: Place, for the message.
        here: its record.
        there: the record of the split of that name there.
        remedy: Next step, for the message.

    Raises:
        ProvenanceError: they tell of different activations.
    """
    if difference := there.difference(here):
        field, before, new = difference
        raise ProvenanceError(
            f"{where} holds another {here.tag}/{here.split}, with {field.strip()} = {before!r}, "
            f"and this one has {new!r}: {remedy}"
        )


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
        api: API of the hub.
        repository: Repository at a commit.
        files: Files that it holds.
        folder: Folder of the store, which may hold other splits, or is made.
        names: Names of splits, ``tag/split``; None is all.

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
    there = splits_in(files)
    names = list(dict.fromkeys(there if names is None else names))
    for name in names:
        if name not in there:
            raise UnknownNameError(
                f"{repository} has no split {name}: {did_you_mean(name, there)}it holds "
                f"{', '.join(there) or 'none'}"
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
    shards = {damaged.shard for damaged in damage}
    for key in keys:
        if shard_of(key, name) in shards:  # None is what lies beside the shards
            brought.remove(key)
    told = "; ".join(damaged.what for damaged in damage[:_TOLD])
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
