"""The activation store: listed, verified, repaired, audited, shuffled, removed from."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from bertvision.errors import (
    BertvisionError,
    CorruptStoreError,
    FormatVersionError,
    IncompleteSplitError,
    InputError,
    WorkspaceError,
    counted,
)
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.jobs.show import Row, Rows, Shown, ShownRecord, Values, mapping_table
from bertvision.pipelines.declare import Seed, Where, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Layers, StrPath, parse_layers, parse_tag, path_of, text_of
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.checks import find_workspace
from bertvision.pipelines.workspace.reproduce import not_extracted

if TYPE_CHECKING:
    from bertvision.featurestore.store import ActivationStore

_NAMED = 10
_log = logging.getLogger(__name__)


@job
def ls(**where: Unpack[Where]) -> Rows[Row]:
    """List the snapshots and splits that are stored."""
    opened = open_store(**where)
    stored = [split.info() for split in opened.stored_splits()]
    return Rows(map(Row, [*stored, *_growing(opened)]), splits_table)


class SplitFacts(ShownRecord):
    """Sizes, encoding and provenance of a split."""

    def table(self, values: Values) -> str:
        """Names and values."""
        return mapping_table(values)


@job
def info(name: str | None = None, **where: Unpack[Where]) -> SplitFacts:
    """Show everything about one split: sizes, encoding, provenance.

    Args:
        name: Split, such as 0.3e/train.

    Raises:
        UnknownNameError: There is no such split.
        InputError: No split is named.
        IncompleteSplitError: Shards of the split are missing.
    """
    opened = open_store(**where)
    if name is None:
        stored = _names(opened)
        raise InputError(
            f"which split? name one: {', '.join(stored)}"
            if stored
            else "the store is empty: `bertvision extract` writes to it"
        )
    tag, split = split_name(name)
    try:
        return SplitFacts(**opened[tag][split].info())
    except IncompleteSplitError:
        from bertvision.featurestore.writing.growing import GrowingLedger

        growing = GrowingLedger(opened.storage, tag, split).info()
        if growing is None:
            raise
        return SplitFacts(**growing)


class Verified(Shown):
    """The problems of each split that was read again."""

    def __init__(self, problems: dict[str, list[str]]) -> None:
        self.problems = problems

    def to_json(self) -> dict[str, Any]:
        """Problems by the name of the split."""
        return dict(self.problems)

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each split."""
        return [
            {"split": name, "problems": problem_list}
            for name, problem_list in self.problems.items()
        ]

    def table(self, values: Values) -> str:
        """A line for each split that is whole, the problems of the others."""
        if not values:
            return "the store is empty"
        return "\n".join(
            "\n".join(problems) if problems else f"{name}: whole"
            for name, problems in values.items()
        )

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 1 where a split is not whole."""
        return int(any(self.problems.values()))


@job
def verify(name: str | None = None, **where: Unpack[Where]) -> Verified:
    """Read every committed byte again.

    The command exits with 1 where a split is not whole.

    Args:
        name: Split, such as 0.3e/train; by default all.

    Raises:
        UnknownNameError: There is no such split.
    """
    from bertvision.featurestore.writing.committed import find_growing_damage

    opened = open_store(**where)
    problems: dict[str, list[str]] = {}
    for stored in [name] if name else _names(opened):
        tag, split = split_name(stored)
        try:
            problems[stored] = opened[tag][split].verify()
        except IncompleteSplitError:
            problems[stored] = find_growing_damage(opened.storage, tag, split)
        except (CorruptStoreError, FormatVersionError) as error:
            problems[stored] = [f"{stored}: {error}"]
    return Verified(problems)


class Repairs(Rows[Row]):
    """Results of a repair, a row for each split."""

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 1 where a split still lacks something."""
        return int(any(row["lacking"] for row in self))


@job
def repair(name: str | None = None, **where: Unpack[Where]) -> Repairs:
    """Extract again what is damaged, and only that.

    It needs the snapshot and the data that the activations came from. It exits with 1 where shards
    are missing that were never written, or where one of several splits cannot be repaired.

    Args:
        name: Split, such as 0.3e/train; by default all.

    Raises:
        UnknownNameError: There is no such split.
        WorkspaceError: There is no workspace, or the split was not extracted.
    """
    from bertvision.featurestore.format.ledger import split_names
    from bertvision.pipelines.extraction.extract import Repaired
    from bertvision.pipelines.extraction.extract import repair as run

    try:
        space = find_workspace(**where)
    except WorkspaceError as error:
        if where.get("store") is None:
            raise
        raise WorkspaceError(
            f"{error}; a split that was imported, or written by a program, cannot be repaired: "
            "remove it with `bertvision store rm`, and import or write it again"
        ) from error
    wanted = [split_name(name)] if name else split_names(open_store(**where).storage)
    done = []
    for tag, split in wanted:
        try:
            done.append(run(space, tag, split))
        except BertvisionError as error:
            if name:
                raise
            reason = f"{tag}/{split} was not repaired: {error}"  # the others are all the same
            done.append(Repaired(f"{tag}/{split}", [], [], reason))
    return Repairs((Row(split._asdict()) for split in done), repaired_table)


@job
def rm(
    name: str,
    *,
    yes: Annotated[bool, Option(flag="--yes -y")] = False,
    **where: Unpack[Where],
) -> Rows[Row]:
    """Remove stored hidden states, to free their space; asks first.

    Heads and scores that were made from them stay. `bertvision extract` writes the same hidden
    states again, from the snapshot and the data.

    Args:
        name: A split, such as 0.3e/train, or a snapshot: all its splits.
        yes: Remove without asking.

    Raises:
        UnknownNameError: There is no such snapshot or split.
        LockedError: Another process is writing the split.
    """
    opened = open_store(**where)
    tag, slash, split = name.partition("/")
    tag = parse_tag(tag)
    named = [split] if slash else list(opened[tag])
    if not yes:
        import typer

        sizes = (f"{tag}/{split}, {size(opened.stored_bytes(tag, split))}" for split in named)
        typer.confirm(f"Remove {'; '.join(sizes)} from {opened.storage}?", abort=True, err=True)
    removed: list[Row] = []
    try:
        for split in named:
            removed.append(Row({"tag": tag, "split": split, "bytes": opened.remove(tag, split)}))
    except BaseException:  # an interrupt too: what is gone is told
        if removed:
            _log.warning(removed_table(removed))
        raise
    return Rows(removed, removed_table)


class Audited(ShownRecord):
    """Result of `audit` (see `pipelines.audit.audit.Audit`)."""

    def table(self, values: Values) -> str:
        """Lines on the wrong examples, and the bound that they give for the whole split."""
        sampled, examples, wrong = values["sampled"], values["examples"], values["wrong"]
        sample = (
            f"{sampled:,} of {counted(examples, 'example')} of {values['split']} computed again"
        )
        shared = [finding["what"] for finding in values["deviations"]]
        verdict = f"{counted(wrong, 'example')} wrong" if wrong else "all are as they should be"
        if shared:
            verdict = f"{counted(wrong, 'example')} wrong, and all others deviate together"
            verdict = verdict if wrong else "none is wrong by itself, but all deviate together"
        lines = [f"{sample}: {verdict}", *(f"  {what}" for what in shared)]
        if sampled < examples:
            lines.append(
                f"with {values['confidence']:.0%} confidence at most {values['at_most']:.2%} of "
                "the split are wrong"
            )
        lines += [f"note: {remark}" for remark in values["remarks"]]
        kinds = Counter(finding["kind"] for finding in values["findings"])
        if len(kinds) > 1 or wrong > _NAMED:
            lines.append(", ".join(f"{kind}: {n:,}" for kind, n in kinds.most_common()))
        lines += [f"  {f['key']}: {f['what']}" for f in values["findings"][:_NAMED]]
        return "\n".join(lines)

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 1 where an example is wrong."""
        values = self.to_json()
        return int(bool(values["wrong"] or values["deviations"]))


@job
def audit(
    name: str,
    *,
    model: StrPath | None = None,
    tokenizer: StrPath | None = None,
    layers: Layers | None = None,
    sample: Annotated[int, Option(ge=1)] = 100,
    seed: Seed = 0,
    tolerance: float | None = None,
    **where: Unpack[Where],
) -> Audited:
    """Compute a sample of a split again, and compare.

    A checksum says that what is stored is what was written. This says that it is right: of these
    tokens, layers and weights. A split of the workspace is compared with its snapshot and its data,
    an imported one with the encoder that is named. The command exits with 1 where an example is
    wrong.

    Examples:
        >>> import bertvision
        >>> found = bertvision.audit("1e/dev", sample=8)
        >>> found.sampled, found.wrong, round(found.at_most, 2)
        (8, 0, 0.31)

    Args:
        name: Split, such as 0.3e/train.
        model: Encoder of an imported split: a folder or a name on the hub.
        tokenizer: Its tokenizer, where it is not beside the encoder.
        layers: Hidden states of an imported split's layers, such as 2,18,33; by default its
            indices.
        sample: Examples that are computed again.
        seed: Seed of their choice.
        tolerance: Largest distance of states beyond the encoding's loss, in parts of their distance
            from the mean (default 0.01, or 0.1 where the arithmetic is not known to be float32).

    Raises:
        UnknownNameError: there is no such split, or its snapshot or data are gone.
        InputError: an encoder must be named, or is not that of the split.
        IncompleteSplitError: shards of the split are missing.
        CorruptStoreError: the split is damaged.
        WorkspaceError: the snapshot or the data changed.
    """
    tag, split = split_name(name)
    if tolerance is not None and not 0 < tolerance < 1:
        raise InputError(f"--tolerance {tolerance}: give a number between 0 and 1")
    states = parse_layers(layers)
    if model is None and (tokenizer is not None or states is not None):
        raise InputError("--tokenizer and --layers belong to an encoder: name it with --model")
    opened = open_store(**where)[f"{tag}/{split}"]
    if model is None and (reason := not_extracted(opened)) is not None:
        raise InputError(f"{reason}: name the encoder that it is of with --model")
    space = None if model is not None else find_workspace(**where)
    from bertvision.pipelines.audit.audit import audit_split
    from bertvision.pipelines.audit.reference import of_model, of_workspace

    opened.require_complete()
    if space is None:
        reference = of_model(opened, text_of(model) or "", text_of(tokenizer), states)
    else:
        reference = of_workspace(space, opened)
    findings = audit_split(opened, reference, sample=sample, seed=seed, tolerance=tolerance)
    return Audited(**findings.to_json())


class ShuffledTokens(ShownRecord):
    """Result of `shuffle_tokens`."""

    def table(self, values: Values) -> str:
        """Line on the copy, and how to read it."""
        return (
            f"{values['split']}: {counted(values['tokens'], 'token')} of {values['source']} in the "
            f"order of seed {values['seed']}, {counted(values['shards'], 'shard')}; "
            "split.tokens(shuffle=False) streams them"
        )


@job
def shuffle_tokens(
    name: str,
    to: str,
    *,
    seed: Seed = 0,
    scratch: StrPath | None = None,
    **where: Unpack[Where],
) -> ShuffledTokens:
    """Copy a split with its tokens permuted.

    One pass over the copy in stored order is a shuffle of all tokens, for trainers of sparse
    autoencoders (docs/tokens.md). A killed copy is finished by the same call. Examples cannot be
    read from it, and heads not trained on it.

    Examples:
        >>> import bertvision
        >>> bertvision.shuffle_tokens("1e/train", "train-shuffled", seed=1).tokens
        4665
        >>> split = bertvision.ActivationStore.open("activations")["1e/train-shuffled"]
        >>> batch = next(iter(split.tokens(-1, shuffle=False)))
        >>> batch.examples[:5].tolist() == sorted(batch.examples[:5].tolist())
        False

    Args:
        name: Split to copy, such as 0.3e/train.
        to: Name of the copy in the same snapshot, such as train-shuffled.
        seed: Seed of the permutation.
        scratch: Folder for temporary files of the split's size; by default beside a local store,
            else the system's.

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
    if (folder := path_of(scratch)) is not None:
        folder = folder.expanduser()
        if not folder.is_dir():
            raise InputError(f"--scratch {folder}: there is no such folder")
    opened = open_store(**where)[f"{tag}/{split}"]
    from bertvision.featurestore.shuffling import shuffle_split

    copy = shuffle_split(opened, to, seed, scratch=folder)
    record = copy.record
    return ShuffledTokens(
        split=copy.name,
        source=opened.name,
        seed=seed,
        tokens=record.tokens,
        shards=record.shards,
    )


def split_name(name: str) -> tuple[SnapshotTag, str]:
    """``0e/train`` → tag and split.

    Raises:
        InputError: it is not of that form.
    """
    tag, _, split = name.partition("/")
    if not split:
        raise InputError(f"{name!r}: name a snapshot and a split of it, such as 0.3e/train")
    return SnapshotTag(parse_tag(tag)), check_name(split, "split")


def open_store(workspace: StrPath | None, store: StrPath | None) -> ActivationStore:
    """The store that is named, or the workspace's."""
    from bertvision.featurestore.store import ActivationStore

    return ActivationStore.open(store_place(workspace, store))


def store_place(workspace: StrPath | None, store: StrPath | None) -> str:
    """Path or URL of the store that is named, or of the workspace's.

    Raises:
        WorkspaceError: neither is there.
    """
    if place := text_of(store):
        return place
    try:
        return str(find_workspace(workspace).activations)
    except WorkspaceError as error:
        raise WorkspaceError(f"{error}; a store needs none: name it with --store") from None


def _names(store: ActivationStore) -> list[str]:
    return [f"{tag}/{split}" for tag in store for split in store[tag]]


def _growing(store: ActivationStore) -> list[Values]:
    """Facts about the splits that examples are still added to."""
    from bertvision.featurestore.writing.growing import GrowingLedger

    ledgers = (GrowingLedger(store.storage, tag, split) for tag in store for split in store[tag])
    growing = (ledger.info() for ledger in ledgers if ledger.is_growing)
    return [info for info in growing if info is not None]


def splits_table(splits: Sequence[Values]) -> str:
    """Table of the splits of a store."""
    if not splits:
        return "the store is empty"
    shown = [
        Column("name", "split", "text"),
        Column("examples", "examples", "count"),
        *columns("text", encoding="encoding", depth="layers"),
        Column("bytes", "size", "size"),
        Column("whole", "complete", "text"),
        Column("each", "per example", "size"),
        Column("smaller", "× smaller"),
    ]
    rows = [
        {
            **s,
            "name": f"{s['tag']}/{s['split']}",
            "depth": len(s["layers"]),
            "whole": _completeness(s),
            "each": s["bytes_per_example"] or 0,
            "smaller": s["times_smaller_than_dense_float32"] or 0,
        }
        for s in splits
    ]
    table = table_of(shown, rows)
    return f"{table}\n\n{size(sum(s['bytes'] for s in splits))} in all"


def _completeness(split: Values) -> str:
    if split.get("growing"):
        return f"still being written, {counted(split['shards_committed'], 'shard')}"
    committed = f"{split['shards_committed']} of {counted(split['shards'], 'shard')}"
    return "yes" if split["complete"] else committed


def removed_table(splits: Sequence[Values]) -> str:
    """Lines on the removed splits and the freed space."""
    lines = [f"removed {s['tag']}/{s['split']}, {size(s['bytes'])}" for s in splits]
    return "\n".join([*lines, f"{size(sum(s['bytes'] for s in splits))} freed"])


def repaired_table(splits: Sequence[Values]) -> str:
    """Lines on the damage and the repaired shards."""
    if not splits:
        return "the store is empty"
    return "\n".join(line for s in splits for line in _repaired(s))


def _repaired(split: Values) -> list[str]:
    lines = list(split["damage"])
    if lines:
        shards = counted(len(split["shards"]), "shard")
        lines.append(f"{split['name']}: repaired, {shards} extracted again")
    if split["lacking"]:
        return [*lines, split["lacking"]]
    return lines or [f"{split['name']}: whole"]
