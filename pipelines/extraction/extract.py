"""Extraction: a snapshot's hidden states of every window, into the activation store.

The shard plan comes first, from token lengths alone; then shard after shard is a function of
(snapshot, shard): computed and encoded on the device, in stored order, and written by a thread
while the next one is computed. All poolings of a window come from one forward pass.

Repair a store: extract exactly what is damaged again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import CorruptStoreError, InputError
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.format.calibration import is_beyond_promise
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.opening import open_storage
from bertvision.pipelines.encoders.sites.taps import snapshot_sites
from bertvision.pipelines.extraction.job import Extracted as Extracted
from bertvision.pipelines.extraction.job import ExtractionJob
from bertvision.pipelines.extraction.split_extraction import SplitExtraction
from bertvision.pipelines.extraction.stored_tokens import load_sources, plan_jobs
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.progress import parts
from bertvision.pipelines.reading import StoredName, sites_part
from bertvision.pipelines.workspace.config import ModelConfig
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.job_options import ExtractOptions
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.reproduce import not_extracted, stored_options
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
_KINDS = {
    "first": "the first token of a window",
    "special": "the other special tokens",
    "ordinary": "ordinary tokens",
    "pooled": "the pooled states",
}


def extract(
    workspace: Workspace,
    tag: str,
    options: ExtractOptions | None = None,
    *,
    shards: Sequence[int] | None = None,
    mend: bool = False,
    lossy: bool = True,
    **changes: Any,
) -> list[Extracted]:
    """Write the activations of a snapshot into the workspace's store.

    What is there already, from the same snapshot, data and settings, is kept: a killed extraction
    is finished by the same call and computes at most one shard again. Poolings of tokens that are
    stored are taken of these, without the encoder, as far as they are as good (see
    `stored_tokens`).

    Args:
        workspace: with the snapshot; ``0e`` and ``untrained`` are made where they are missing.
        tag: Tag of the snapshot.
        options: Options of what is kept, and how.
        shards: Missing shards to write; all of them by default.
        mend: write everything beside the shards again, and ``shards`` even where they are there.
        lossy: Whether a pooling may be taken of stored tokens in a lossy encoding.
        **changes: fields of `ExtractOptions` that differ from ``options``.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: an option is wrong, the encoder has no token for a pooling, or the splits are
            not all of the same tokens.
        ProvenanceError: a split was begun from something else, or pooled from stored tokens that
            are gone.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk cannot hold what is missing.
        NonFiniteError: a hidden state is NaN or infinite.
    """
    options = replace(options or ExtractOptions(), **changes)
    store = workspace.at(options.store)  # a wrong name is reported before the encoder is loaded
    data = workspace.dataset(named_dataset(options))
    splits, _ = wanted_splits(data, options, workspace.config.model)
    planned = asked_jobs(workspace, data, tag, ensure_snapshot(workspace, tag), options)
    if mend and options.scheduler is not None:
        raise InputError("what is damaged is extracted again here: leave the scheduler out")
    jobs = plan_jobs(store, planned, lossy=lossy, mend=mend)
    if not jobs:
        workspace.keep_at(options.store)
    loaded = load_sources(store, jobs)
    items = {split: data.items(split) for split in splits}  # before hours go into the first
    done: list[Extracted] = []
    told: set[tuple[str, str]] = set()
    for job, part in zip(jobs, parts([len(items[j.split]) for j in jobs], "split"), strict=True):
        with part:
            extraction = SplitExtraction(workspace, data, job, loaded[job])
            extracted = extraction.run(shards, mend)
        for written in extracted:
            done.append(written)
            _warn_of_errors(written, job.options.encoding, told)
    return done


def _warn_of_errors(written: Extracted, encoding: str, told: set[tuple[str, str]]) -> None:
    """Say what the encoding keeps worse than it promises; of a snapshot's other splits not again.

    Args:
        written: a split.
        encoding: Encoding of it.
        told: what was said: poolings and kinds of token; gets those that are said now.
    """
    pooling = StoredName.parse(written.split).tokens
    for kind, error in written.encoding_error.items():
        if is_beyond_promise(error["largest"], encoding) and (pooling, kind) not in told:
            told.add((pooling, kind))
            log.warning(
                "%s/%s: %s keeps %s with an error of %.2g %% of the channels' deviations in layer "
                "%s: take --encoding bfloat16 (into another --store) where they matter",
                *(written.tag, written.split, encoding, _KINDS.get(kind, kind)),
                *(100 * error["largest"], error["in_layer"]),
            )


def named_dataset(options: ExtractOptions) -> str | None:
    """The data set that is meant: named, or part of the names of stored splits.

    Raises:
        InputError: several are.
    """
    splits, dataset = options.splits or (), options.dataset
    named = {StoredName.parse(name).dataset for name in splits} - {None}
    if len(named | ({dataset} if dataset else set())) > 1:
        raise InputError(
            f"splits {', '.join(splits)} are of {' and '.join(sorted(map(str, named)))}"
            + (f", not of {dataset}" if dataset else "")
            + ": extract one data set at a time"
        )
    return dataset or next(iter(named), None)


def wanted_splits(
    data: Dataset, options: ExtractOptions, model: ModelConfig
) -> tuple[list[str], tuple[TokenPooling, ...]]:
    """The splits of the data that are meant, and what of their windows is kept.

    Raises:
        InputError: there are none, or they are not all of the same tokens.
    """
    whole = options.keep or options.logits
    usual: TokenPooling = "all" if whole else model.usual_tokens(data.config.name)
    default = tuple(dict.fromkeys(options.tokens or (usual,)))
    if "all" in default and len(default) > 1:
        raise InputError(
            f"{', '.join(default)}: all tokens and poolings are extracted by two calls, or leave "
            "the poolings out: `bertvision probe` computes them from all tokens"
        )
    names = list(options.splits or data.splits)
    if not names:
        raise InputError(
            "the workspace has no data of its own: name a data set with --task and --data"
        )
    if data.config.windows == "pack" and default != ("all",):
        raise InputError(
            f"--pool {','.join(default)}: a window of {data.name} holds several documents, which "
            "have no vector in common: leave --pool out, or take --windows cut in another "
            "--workspace"
        )
    parsed = [StoredName.parse(name) for name in names]
    for name in (n for n, stored_name in zip(names, parsed, strict=True) if stored_name.sites):
        if options.sites is None:
            raise InputError(f"--split {name} is of sites: name them too, with --sites")
    for name in (n for n, stored_name in zip(names, parsed, strict=True) if stored_name.some):
        if options.keep is None:
            raise InputError(f"--split {name} has some tokens of each window: say which, --keep")
    kinds = {
        default if stored_name.tokens == "all" else (stored_name.tokens,) for stored_name in parsed
    }
    if len(kinds) > 1 or (options.tokens is not None and kinds != {default}):
        raise InputError(
            f"splits {', '.join(names)}: a name that ends with a pooling means that alone, the "
            f"others here mean {', '.join(default)!r}: extract them by two calls, or choose with "
            "--pool"
        )
    return [stored_name.split for stored_name in parsed], kinds.pop()


def asked_jobs(
    workspace: Workspace, data: Dataset, tag: str, folder: Path, options: ExtractOptions
) -> list[ExtractionJob]:
    """The extraction of each split of a snapshot that is meant, with nothing left to choose.

    Args:
        workspace: Workspace with the data.
        data: Data that are extracted.
        tag: Tag of the snapshot.
        folder: Folder of the snapshot, or of what it is made of.
        options: Options of what is kept, and how.

    Raises:
        InputError: as `wanted_splits`, the encoder has no such site, the sites are of several
            widths, or a split is named for sites of another.
    """
    splits, tokens = wanted_splits(data, options, workspace.config.model)
    precision = resolve_precision(options.precision)
    options = replace(options, dataset=data.name, tokens=tokens, precision=precision)
    if options.sites is not None:
        sites, width = snapshot_sites(folder, options.sites)
        part = sites_part(width, workspace.config.model.hidden_size)
        for name in options.splits or ():
            if (named := StoredName.parse(name)).sites not in (None, part):
                raise InputError(
                    f"--split {name}: the --sites that are named have {width:,} channels, and are "
                    f"stored as {named._replace(sites=part).name}: name that, or other sites"
                )
        options = replace(options, sites=sites)
    return [ExtractionJob(workspace.root, tag, split, options) for split in splits]


class Repaired(NamedTuple):
    """Result of a repair of one split.

    Attributes:
        name: ``tag/split``.
        damage: Faults that were found, a line each; empty where all was well.
        shards: Shards that were extracted again; the others were not touched.
        lacking: Parts that an incomplete split still lacks; why one could not be repaired.
    """

    name: str
    damage: list[str]
    shards: list[int]
    lacking: str | None


def repair(workspace: Workspace, tag: str, split: str) -> Repaired:
    """Extract again what is damaged in a split, from the snapshot it came from.

    What is whole is not touched. A shard that was never written is not damage: `extract` goes on
    with it.

    Args:
        workspace: Workspace with the store and the snapshot.
        tag: Tag of the snapshot.
        split: its name.

    Raises:
        StoreNotFoundError: there is no such split.
        ProvenanceError: the snapshot, the data or the options are not those it was made from.
        CorruptStoreError: its record and the copy of it are both damaged.
    """
    ledger = Ledger(open_storage(workspace.activations), tag, split)
    damage, again = [], set[int]()
    try:
        ledger.read_split()
    except CorruptStoreError as error:
        damage.append(str(error))
        with ledger.lock():
            ledger.restore_split()
    # a damaged plan hides what is wrong with shards, so they are looked at again once it is back
    for _ in range(2):
        split_to_mend = ActivationSplit(workspace.activations, tag, split)
        damage_before = find_damage(split_to_mend)
        if not damage_before:
            break
        damage += [item.what for item in damage_before]
        if split_to_mend.record.is_shuffled:
            source = split_to_mend.record.provenance.get("shuffled_from")
            again_by = f"remove it and run `bertvision store shuffle {source} {split}` again"
            lacking = f"{split_to_mend.name} was shuffled from {source}: {again_by}"
            return Repaired(split_to_mend.name, damage, [], lacking)
        if (reason := not_extracted(split_to_mend)) is not None:
            again_by = "run `bertvision store import` again from the files that it was made of"
            if "imported_from" not in split_to_mend.record.provenance:
                again_by = "have that program write it again"
            lacking = f"{reason}, so that nothing here can repair it: remove it and {again_by}"
            return Repaired(split_to_mend.name, damage, [], lacking)
        shards = [item.shard for item in damage_before if item.shard is not None]
        again.update(shard for shard in shards if shard < split_to_mend.record.shards)
        # everything beside the shards too, with the options of before
        extract(workspace, tag, stored_options(split_to_mend), shards=shards, mend=True)
    return Repaired(f"{tag}/{split}", damage, sorted(again), split_to_mend.lacking())
