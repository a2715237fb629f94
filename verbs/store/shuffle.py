"""A copy of a split whose tokens are permuted."""

from __future__ import annotations

from bertvision.errors import InputError, counted
from bertvision.verbs.arguments.reading import StrPath, at_least, path_of
from bertvision.verbs.rows import ShownRecord
from bertvision.verbs.store.foreign import open_store, split_name
from bertvision.verbs.tables import Values


class ShuffledTokens(ShownRecord):
    """What `shuffle_tokens` wrote."""

    def table(self, values: Values) -> str:
        """What was copied, and how it is read."""
        return (
            f"{values['split']}: {counted(values['tokens'], 'token')} of {values['source']} in the "
            f"order of seed {values['seed']}, {counted(values['shards'], 'shard')}; "
            "split.tokens(shuffle=False) streams them"
        )


def shuffle_tokens(
    name: str,
    to: str,
    *,
    seed: int = 0,
    scratch: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> ShuffledTokens:
    """Copy a split with its tokens in the order of a seeded permutation (docs/tokens.md).

    One pass over the copy in stored order is a shuffle of all tokens. Codes move as they are. A
    call that was killed is finished by the same one.

    Examples:
        >>> import bertvision
        >>> bertvision.shuffle_tokens("1e/train", "train-shuffled", seed=1).tokens
        4665
        >>> split = bertvision.ActivationStore.open("activations")["1e/train-shuffled"]
        >>> batch = next(iter(split.tokens(-1, shuffle=False)))
        >>> batch.examples[:5].tolist() == sorted(batch.examples[:5].tolist())
        False

    Args:
        name: of the split to copy, such as ``0.3e/train``.
        to: name of the copy in the same snapshot, such as ``train-shuffled``.
        seed: of the permutation.
        scratch: folder for as many bytes again, taken for a while; by default beside a local store,
            else where the system keeps temporary files.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such split.
        InputError: its tokens are shuffled already, or an argument is wrong.
        IncompleteSplitError: shards of the split are missing.
        ProvenanceError: the copy was begun from another split or with another seed.
        LockedError: another process is writing the copy.
        CorruptStoreError: the split is damaged.
        DiskSpaceError: the disk is too small, or full.
    """
    tag, split = split_name(name)
    split_name(f"{tag}/{to}")
    at_least(seed, 0, "--seed")
    if (folder := path_of(scratch)) is not None:
        folder = folder.expanduser()
        if not folder.is_dir():
            raise InputError(f"--scratch {folder}: there is no such folder")
    opened = open_store(workspace, store)[f"{tag}/{split}"]
    from bertvision.featurestore.shuffling.shuffle import shuffle_split

    copy = shuffle_split(opened, to, seed, scratch=folder)
    record = copy.record
    return ShuffledTokens(
        split=copy.name,
        source=opened.name,
        seed=seed,
        tokens=record.tokens,
        shards=record.shards,
    )
