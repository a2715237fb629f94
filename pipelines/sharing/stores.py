"""Stores, or some of their splits, pushed; and pulled into a store that may hold others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING

from bertvision.errors import (
    CorruptStoreError,
    IncompleteSplitError,
    ProvenanceError,
    StoreNotFoundError,
)
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.ledger import LEDGER
from bertvision.featurestore.format.records import ROOT, SplitRecord
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.store import ActivationStore
from bertvision.pipelines.sharing import manifest as manifests
from bertvision.pipelines.sharing.cards.store import store_card
from bertvision.pipelines.sharing.hub import Repository
from bertvision.pipelines.sharing.manifest import CARD, Manifest, earlier_push
from bertvision.pipelines.sharing.store_files import (
    files_of,
    local_root,
    shard_bytes,
    splits_in,
    stages_of,
    written_for,
)
from bertvision.pipelines.sharing.upload import Base, Content, Sent, base_of, bytes_of, send

if TYPE_CHECKING:
    from huggingface_hub import HfApi

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
        api: of the hub.
        repository: a data set.
        store: on a local disk.
        names: of splits, ``tag/split``.
        private: whether a new repository is.
        licence: of the texts and hidden states, for the card.
        replace: take the place of what `push` did not send, and of other splits of these names.
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
    kept = {name: split for name, split in others.items() if name not in replaced | gone}
    for split in splits:
        _check_fits(repository, split.record, kept)
    if whole and (more := sorted(set(kept) - set(here))):
        log.info("%s holds %s too: --replace removes them", repository, ", ".join(more))
    manifest = Manifest(kind="store", bertvision=version("bertvision")).content()
    beside: dict[str, Content] = {manifests.FILE: manifest}
    shards: dict[str, Content] = {}
    records: dict[str, Content] = {}
    for split in splits:
        for stage, files in zip((beside, shards, records), stages_of(split, root), strict=True):
            stage.update(files)
    all_splits = kept | here
    ordered = [all_splits[name] for name in splits_in(f"ledger/{n}/split.json" for n in all_splits)]
    last: dict[str, Content] = {
        f"{ROOT}/{key}": content
        for key, content in arrays.root_files([split.record for split in ordered]).items()
    }
    there = base.files if base else {}
    sent = {*beside, *shards, *records, *last}
    removed = _outdated(there, {n: others.get(n) for n in {*here, *gone}}, replaced, sent)
    # texts of a split are those of all snapshots
    removed -= {path for name in set(kept) - set(here) for path in files_of(name, there)}
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
    found: dict[str, ActivationSplit] = {}
    if names := splits_in(base.files):
        storage = open_storage(f"hf://{base.repository}")
        for name in names:
            # what cannot be reached, or is newer, is there all the same: that ends the push
            with suppress(CorruptStoreError, IncompleteSplitError, StoreNotFoundError):
                found[name] = ActivationSplit(storage, *name.split("/"))
    return found


def _outdated(
    there: Mapping[str, int],
    splits: Mapping[str, ActivationSplit | None],
    replaced: Collection[str],
    sent: Collection[str],
) -> set[str]:
    """What bertvision wrote of some splits of a repository, and is not theirs any more.

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
        where: that is.
        here: its record.
        there: the record of the split of that name there.
        remedy: what to do, for the message.

    Raises:
        ProvenanceError: they tell of different activations.
    """
    if difference := there.difference(here):
        field, kept, new = difference
        raise ProvenanceError(
            f"{where} holds another {here.tag}/{here.split}, with {field.strip()} = {kept!r}, and "
            f"this one has {new!r}: {remedy}"
        )
