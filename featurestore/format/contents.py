"""What a store holds: the names and records of its splits, as the ledger tells them."""

from __future__ import annotations

from collections.abc import Iterator

from bertvision.errors import (
    CorruptStoreError,
    FormatVersionError,
    IncompleteSplitError,
    InputError,
    StoreNotFoundError,
    UnknownNameError,
    did_you_mean,
)
from bertvision.featurestore.format.ledger import LEDGER, Ledger
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.format.records import SplitRecord
from bertvision.featurestore.storage.storage import Storage


def require_store(storage: Storage) -> Storage:
    """The storage itself, if a store is there.

    Raises:
        StoreNotFoundError: there is none.
    """
    names = storage.names("")
    if LEDGER not in names:
        hint = "`bertvision extract` writes one, where Workspace.find(FOLDER).activations says"
        if "activations" in names:
            hint = f"open the one in {storage}/activations"
        raise StoreNotFoundError(f"there is no activation store at {storage}: {hint}")
    return storage


def require_tag(storage: Storage, tag: SnapshotTag) -> None:
    """Make sure that a snapshot has a split.

    Raises:
        UnknownNameError: it has none.
    """
    if next(splits_of(storage, tag), None) is None:
        held = ", ".join(sorted({tag for tag, _ in split_names(storage)}, key=SnapshotTag))
        raise UnknownNameError(
            f"no activations of {tag} in {storage}: it holds {held or 'nothing yet'}; "
            f"`bertvision extract --checkpoint {tag}` writes them, or says what makes {tag}"
        )


def require_split(storage: Storage, tag: SnapshotTag, split: str) -> None:
    """Make sure that a split was created.

    Raises:
        UnknownNameError: it was not.
    """
    ledger = Ledger(storage, tag, check_name(split, "split"))
    if not (ledger.exists or ledger.shards()):  # all of them are listed for the message alone
        held = list(splits_of(storage, tag))
        raise UnknownNameError(
            f"no split {split!r} of {tag} in {storage}: "
            f"{did_you_mean(split, held)}it holds {', '.join(held)}; "
            "`bertvision status` says what can be extracted"
        )


def split_names(storage: Storage) -> list[tuple[str, str]]:
    """(tag, split) of every split that was created, tags ordered as numbers.

    Folders of other names are not looked at. A split whose record was lost is named as long as
    shards of it are recorded.
    """
    tags = sorted(map(SnapshotTag, filter(SnapshotTag.is_valid, storage.names(LEDGER))))
    return [(tag, split) for tag in tags for split in splits_of(storage, tag)]


def splits_of(storage: Storage, tag: str) -> Iterator[str]:
    """Names of the splits of one snapshot that were created, complete or not."""
    for split in sorted(filter(_is_name, storage.names(f"{LEDGER}/{tag}"))):
        ledger = Ledger(storage, tag, split)
        if ledger.exists or ledger.shards():
            yield split


def split_records(storage: Storage) -> list[SplitRecord]:
    """The records of all splits that can be read; damaged and growing ones are left out."""
    found = []
    for tag, split in split_names(storage):
        try:
            found.append(Ledger(storage, tag, split).read_split())
        except (CorruptStoreError, FormatVersionError, IncompleteSplitError):
            continue  # whoever opens that split is told
    return found


def _is_name(text: str) -> bool:
    try:
        check_name(text, "split")
    except InputError:
        return False
    return True
