"""What an extraction would write: counted from the data, by the tokenizer alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedConfig

from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.featurestore.writer import expected_bytes, free_bytes
from bertvision.featurestore.writing.origin import check_split, tokenizer_digest
from bertvision.pipelines.encoders.hub import read_config
from bertvision.pipelines.encoders.loading import (
    Dimensions,
    checkpoint_weight_names,
    dimensions,
    find_unloaded,
    load_tokenizer,
)
from bertvision.pipelines.encoders.sites.choice import check_same_sites, snapshot_sites
from bertvision.pipelines.encoders.token_pooling import check_poolings
from bertvision.pipelines.encoders.weights import weight_names
from bertvision.pipelines.extraction.contents import (
    order_seed,
    provenance,
    shard_capacity,
    split_contents,
)
from bertvision.pipelines.extraction.extract import wanted_splits
from bertvision.pipelines.extraction.job import ExtractionJob, check_lengths
from bertvision.pipelines.extraction.layers import kept_layers
from bertvision.pipelines.extraction.source_choice import plan_jobs
from bertvision.pipelines.planning.rates import extraction_rate
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.stored_name import StoredName
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.registry import TokenPooling, find_task
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.dataset_record import is_added
from bertvision.pipelines.workspace.job_options import ExtractOptions
from bertvision.pipelines.workspace.records import is_snapshot, read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace

State = Literal["new", "begun", "there"]
"""What there is of a thing before a job begins."""


class PlannedSplit(NamedTuple):
    """A stored split as an extraction would leave it, and what of it is missing."""

    tag: str
    split: str
    """Its name in the store."""
    state: State
    windows: int
    tokens: int
    """Tokens whose hidden states are kept; of a pooling, one for each window."""
    shards: int
    shards_to_write: int
    bytes: int
    """All shards, before any compression."""
    bytes_to_write: int
    encoding: str
    layers: tuple[int, ...]
    makes_snapshot: bool
    """Whether the snapshot is made first."""
    pooled_from: str | None
    """Stored split that is pooled; None runs the encoder."""
    seconds: float | None
    """For what is missing; None where nothing like it was measured in this workspace. Splits that
    differ by their pooling alone are written by one pass, which each of them has here."""
    measured: str | None
    """The record that the seconds are from."""


class ExtractionPlan(NamedTuple):
    """What an extraction would do."""

    splits: list[PlannedSplit]
    store: str
    free: int | None
    """Bytes free in the store; None where that is not known."""


def plan_extraction(
    workspace: Workspace, data: Dataset, tags: Sequence[str], options: ExtractOptions
) -> ExtractionPlan:
    """What `extract` would do for each of some snapshots; nothing is computed or written.

    The data are read and cut into windows by the tokenizer, so that the counts are exact.

    Args:
        workspace: perhaps not on the disk yet.
        data: that are to be extracted, perhaps not added yet.
        tags: snapshots; ``0e``, ``untrained`` and means need not be made.
        options: what would be kept, and how.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: an option is wrong, or the encoder has no token for a pooling.
        ProvenanceError: a split was begun from something else, as the job would say too.
    """
    store = workspace.at(options.store)
    splits, tokens = wanted_splits(data, options)
    precision = resolve_precision(options.precision)
    options = replace(options, dataset=data.name, tokens=tokens, precision=precision)
    storage = open_storage(store.activations)
    cut: dict[tuple[str, str], Windows] = {}
    rows: list[PlannedSplit] = []
    for tag in map(SnapshotTag, tags):
        encoder = _Unloaded.of(workspace, tag)
        check_poolings([kept for kept in tokens if kept != "all"], encoder.tokenizer)
        own = options
        if options.sites is not None:
            own = replace(options, sites=snapshot_sites(encoder.folder, options.sites))
        jobs = [ExtractionJob(workspace.root, tag, split, own) for split in splits]
        # of a data set that was not added yet nothing is stored
        known = data.name is None or is_added(workspace.root, data.name)
        parts = plan_jobs(store, jobs, lossy=True, mend=False) if encoder.made and known else jobs
        for job in jobs:
            key = job.split, tokenizer_digest(encoder.tokenizer)
            if key not in cut:
                cut[key] = data.task.windows(data.items(job.split), encoder.tokenizer, data.config)
                check_lengths(encoder.size.max_length, cut[key])
            for kept in tokens:
                own_part = (p for p in parts if p.split == job.split)
                part = next((p for p in own_part if kept in (p.options.tokens or ())), None)
                split = _Split(workspace, data, encoder, part, job, kept)
                rows.append(split.planned(storage, cut[key]))
    return ExtractionPlan(rows, str(storage), free_bytes(storage))


@dataclass(frozen=True)
class _Unloaded:
    """An encoder by its configuration: its tokenizer and its sizes, without weights."""

    folder: Path
    """The snapshot, or, where it is not made yet, the checkpoint that it is made of."""
    made: bool
    tokenizer: Any
    size: Dimensions
    pooler: bool

    @classmethod
    def of(cls, workspace: Workspace, tag: SnapshotTag) -> _Unloaded:
        """The encoder of a snapshot.

        Raises:
            UnknownNameError: it is not there, and only fine-tuning makes it.
            InputError: the checkpoint that it would be made of cannot be reached.
        """
        folder = workspace.snapshot_dir(tag)
        made = is_snapshot(folder)
        model = workspace.config.model
        if tag.is_mean and not made:
            parts = [cls.of(workspace, SnapshotTag(part)) for part in tag.parts]
            return replace(parts[-1], made=False)
        if not made and not (tag.is_untrained or tag.fraction == 0):
            workspace.require_snapshot(tag)  # which says what makes it
        found = None
        if not made:
            found = find_unloaded(model.name_or_path, model.revision)
            folder = found.folder
        config = read_config(folder, f"snapshot {tag}")
        tokenizer = load_tokenizer(folder)
        size = dimensions(config, tokenizer)
        if not made:  # variants may leave layers out
            size = size._replace(layers=model.num_hidden_layers)
        task = load_task(workspace.config.task.name)
        if made or not find_task(task.name).learns:
            names = checkpoint_weight_names(found) if found else weight_names(folder)
            pooler = any("pooler" in name.split(".") for name in names)
        else:
            pooler = _task_has_pooler(task, config, workspace.config.task)
        return cls(folder, made, tokenizer, size, pooler)


def _task_has_pooler(task: Task, config: PreTrainedConfig, settings: TaskConfig) -> bool:
    """Whether the encoder that learns a task has a pooler, whatever its checkpoint has."""
    config = copy.deepcopy(config)
    for name, value in task.model_options(settings).items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = task.model_class.from_config(config, trust_remote_code=False)
    return getattr(model.base_model, "pooler", None) is not None


@dataclass(frozen=True)
class _Split:
    """One stored split of an extraction."""

    workspace: Workspace
    data: Dataset
    encoder: _Unloaded
    job: ExtractionJob | None
    """With its source; None where what is stored stays as it is."""
    asked: ExtractionJob
    kept: TokenPooling

    def planned(self, storage: Storage, windows: Windows) -> PlannedSplit:
        """What is there of it, and what would be written."""
        job, options = self.job or self.asked, self.asked.options
        sites = options.sites or ()
        name = StoredName(job.split, self.kept, self.data.name, bool(sites)).name
        contents = split_contents(
            *(self.data.task, windows, self.data.items(job.split), self.kept),
            seed=order_seed(self.workspace, job.split),
            shard_tokens=options.shard_tokens
            or shard_capacity(storage, job.tag, name, int(windows.n_tokens.max())),
        )
        layers = kept_layers(
            options.layers, self.encoder.size.layers, pooler=self.encoder.pooler, tokens=self.kept
        )
        spec = SplitSpec(
            tag=job.tag,
            split=name,
            encoding=options.encoding,
            layers=tuple(range(len(sites))) if sites else layers,
            hidden_size=self.encoder.size.hidden_size,
            provenance={},
            compression=options.compression,
        )
        plan, total = contents.plan, expected_bytes(contents.plan, spec)
        missing, exists = plan.n_shards, Ledger(storage, spec.tag, spec.split).exists
        if exists:
            missing = self._missing(StoredSplit(storage, spec.tag, spec.split), spec, contents)
        source = None if job.pooled_from is None else f"{job.tag}/{job.pooled_from.name}"
        rate = extraction_rate(
            self.workspace, name, precision=str(options.precision), pooled_from=source
        )
        state: State = "new" if not exists else "begun" if missing else "there"
        seconds = rate and rate.seconds * len(plan) * missing / plan.n_shards
        return PlannedSplit(
            tag=spec.tag,
            split=name,
            state=state,
            windows=len(plan),
            tokens=int(plan.n_tokens.sum()),
            shards=plan.n_shards,
            shards_to_write=missing,
            bytes=total,
            bytes_to_write=total * missing // plan.n_shards,
            encoding=spec.encoding,
            layers=spec.layers,
            makes_snapshot=not self.encoder.made,
            pooled_from=source,
            seconds=seconds if missing else 0.0,
            measured=rate.measured if rate and missing else None,
        )

    def _missing(self, stored: StoredSplit, spec: SplitSpec, contents: SplitContents) -> int:
        """How many shards of a split that was begun are missing.

        Raises:
            ProvenanceError: it was begun from something else.
        """
        if self.job is not None and self.encoder.made:
            if self.job.options.sites is not None:
                check_same_sites(stored, self.job.options.sites)
            attention = str(stored.record.provenance.get("attn_implementation"))
            info = read_snapshot_info(self.encoder.folder)
            made_from = provenance(self.workspace, self.data, info, self.job, self.kept, attention)
            check_split(stored.ledger, replace(spec, provenance=made_from), contents)
        return stored.record.shards - len(stored.committed_shards())
