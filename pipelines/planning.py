"""How long work takes, as jobs of the same workspace have measured it; never a guess.

What an extraction would write: counted from the data, by the tokenizer alone.

What a training or a sweep would do: the heads, their steps, and what is trained already.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from transformers import PreTrainedConfig

from bertvision.errors import BertvisionError
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.featurestore.writer import expected_bytes, free_bytes
from bertvision.featurestore.writing.origin import check_split, tokenizer_digest
from bertvision.models.factory import count_parameters
from bertvision.pipelines.encoders.kept_states import check_poolings
from bertvision.pipelines.encoders.loading import (
    Dimensions,
    checkpoint_weight_names,
    dimensions,
    find_unloaded,
    load_tokenizer,
    read_config,
)
from bertvision.pipelines.encoders.sites.names import width_of
from bertvision.pipelines.encoders.sites.taps import check_same_sites
from bertvision.pipelines.encoders.weights import weight_names
from bertvision.pipelines.extraction.contents import asked_split, chosen_tokens, provenance
from bertvision.pipelines.extraction.extract import asked_jobs, wanted_splits
from bertvision.pipelines.extraction.job import ExtractionJob, check_lengths
from bertvision.pipelines.extraction.layers import layers_of_tokens
from bertvision.pipelines.extraction.stored_tokens import plan_jobs
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.precision import device
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.records import Record, read_record
from bertvision.pipelines.results.sweep import asked_runs, combinations, unscored
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.training.module import build_heads
from bertvision.pipelines.training.train import plan_passes
from bertvision.pipelines.training.training_pass import TrainingPass
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.heads import trained_heads
from bertvision.pipelines.workspace.job_options import ExtractOptions, TrainOptions
from bertvision.pipelines.workspace.records import (
    ExtractionCosts,
    RunConfig,
    is_added,
    is_snapshot,
    read_run_config,
    read_run_metrics,
    read_snapshot_info,
)
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

R = TypeVar("R", bound=Record)


class Rate(NamedTuple):
    """Measured rate of a unit of work."""

    seconds: float
    """For a window that is extracted, or a step of a head."""
    measured: str
    """The record that says so, as seen from the workspace."""


def extraction_rate(
    workspace: Workspace, name: str, *, precision: str, pooled_from: str | None
) -> Rate | None:
    """Seconds for a window of a stored split, as another extraction of its data set had them.

    Windows of one data set are about equally long, those of another are not: only what was
    extracted of the same one counts, with the same arithmetic and device, by the encoder or from
    stored tokens as this is to be, and all tokens or pooled like this.

    Args:
        workspace: Workspace with the records of extractions.
        name: Name of the split that is to be stored.
        precision: Precision of the encoder.
        pooled_from: stored split that is to be pooled; None runs the encoder.

    Returns:
        The rate of the split of the same name, else of the largest extraction; None where there
        was none.
    """
    asked = StoredName.parse(name)

    def alike(costs_of_split: ExtractionCosts) -> bool:
        other = StoredName.parse(costs_of_split.split)
        return (
            costs_of_split.examples_written > 0
            and (costs_of_split.precision, costs_of_split.device) == (precision, device().type)
            and (costs_of_split.pooled_from is None) == (pooled_from is None)
            and other[2:] == asked[2:]
            and (other.tokens == "all") == (asked.tokens == "all")
        )

    costs = _records(workspace.root.glob("extraction/*/*.json"), ExtractionCosts)
    measured = [(path, record) for path, record in costs if alike(record)]
    if not measured:
        return None
    path, record = max(measured, key=lambda x: (x[1].split == name, x[1].examples_written))
    return Rate(record.seconds / record.examples_written, _seen(workspace, path))


def training_rate(workspace: Workspace, config: RunConfig) -> Rate | None:
    """Seconds for a step of a head, as another training of it had them.

    Only trainings of the same head on as many layers count, with the same batch size and
    arithmetic.

    Args:
        workspace: Workspace with trained heads.
        config: Configuration of the run that is to be trained.

    Returns:
        The rate of the longest training, with its share of what runs of a pass have in common; None
        where there was none.
    """
    best: tuple[int, Rate] | None = None
    for tag, name in trained_heads(workspace):
        folder = workspace.head_dir(tag, name)
        try:
            run_config, metrics = read_run_config(folder), read_run_metrics(folder)
        except BertvisionError:
            continue  # the commands that need it say what is wrong
        if _work(run_config) == _work(config) and metrics.steps > (best[0] if best else 0):
            seen = _seen(workspace, folder / "metrics.json")
            best = metrics.steps, Rate(metrics.own_seconds / metrics.steps, seen)
    return None if best is None else best[1]


def _work(run: RunConfig) -> tuple[object, ...]:
    """Work of a step of a run, which decides how long it takes."""
    training = run.training
    return run.head, len(run.layers), run.hidden_size, training.batch_size, training.precision


def _records(paths: Iterable[Path], kind: type[R]) -> Iterator[tuple[Path, R]]:
    """The records that can be read."""
    for path in paths:
        try:
            yield path, read_record(path, kind, "")
        except BertvisionError:
            continue


def _seen(workspace: Workspace, path: Path) -> str:
    return path.relative_to(workspace.root).as_posix()


State = Literal["new", "begun", "there"]
"""State of a thing before a job begins."""


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
    """Plan of an extraction."""

    splits: list[PlannedSplit]
    store: str
    free: int | None
    """Bytes free in the store; None where that is not known."""


def plan_extraction(
    workspace: Workspace, data: Dataset, tags: Sequence[str], options: ExtractOptions
) -> ExtractionPlan:
    """Plan `extract` for some snapshots; nothing is computed or written.

    The data are read and cut into windows by the tokenizer, so that the counts are exact.

    Args:
        workspace: perhaps not on the disk yet.
        data: Data that are to be extracted, perhaps not added yet.
        tags: snapshots; ``0e``, ``untrained`` and means need not be made.
        options: Options that would be kept, and how.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: an option is wrong, or the encoder has no token for a pooling.
        ProvenanceError: a split was begun from something else, as the job would say too.
    """
    store = workspace.at(options.store)
    wanted_splits(
        data, options, workspace.config.model
    )  # what it refuses is refused before an encoder is looked for
    storage = open_storage(store.activations)
    cut: dict[tuple[str, str], Windows] = {}
    rows: list[PlannedSplit] = []
    for tag in map(SnapshotTag, tags):
        encoder = _Unloaded.of(workspace, tag)
        jobs = asked_jobs(workspace, data, tag, encoder.folder, options)
        tokens = jobs[0].options.tokens or ()
        check_poolings([pooling for pooling in tokens if pooling != "all"], encoder.tokenizer)
        # of a data set that was not added yet nothing is stored
        known = data.name is None or is_added(workspace.root, data.name)
        parts = plan_jobs(store, jobs, lossy=True, mend=False) if encoder.made and known else jobs
        for job in jobs:
            key = job.split, tokenizer_digest(encoder.tokenizer)
            if key not in cut:
                cut[key] = data.windows(job.split, encoder.tokenizer, tokens)
                check_lengths(encoder.size.max_length, cut[key])
            for pooling in tokens:
                own = (p for p in parts if p.split == job.split)
                part = next((p for p in own if pooling in (p.options.tokens or ())), None)
                rows.append(
                    _planned(workspace, data, encoder, part, job, pooling, storage, cut[key])
                )
    return ExtractionPlan(rows, str(storage), free_bytes(storage))


@dataclass(frozen=True)
class _Unloaded:
    """An encoder by its configuration: its tokenizer and its sizes, without weights."""

    folder: Path
    """The snapshot, or, where it is not made yet, the checkpoint that it is made of."""
    made: bool
    config: PreTrainedConfig
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
        if not made and not (tag.is_untrained or tag.is_pretrained):
            workspace.require_snapshot(tag)  # which says what makes it
        encoder = None
        if not made:
            encoder = find_unloaded(model.name_or_path, model.revision)
            folder = encoder.folder
        config = read_config(folder, f"snapshot {tag}")
        tokenizer = load_tokenizer(folder)
        size = dimensions(config, tokenizer)
        if not made:  # variants may leave layers out
            size = size._replace(layers=model.num_hidden_layers)
        task = load_task(workspace.config.task.name)
        if made or not find_task(task.name).learns:
            names = checkpoint_weight_names(encoder) if encoder else weight_names(folder)
            pooler = any("pooler" in name.split(".") for name in names)
        else:
            pooler = _task_has_pooler(task, config, workspace.config.task)
        return cls(folder, made, config, tokenizer, size, pooler)


def _task_has_pooler(task: Task, config: PreTrainedConfig, settings: TaskConfig) -> bool:
    """Whether the encoder that learns a task has a pooler, whatever its checkpoint has."""
    config = copy.deepcopy(config)
    for name, value in task.model_options(settings).items():
        setattr(config, name, value)
    with torch.device("meta"):
        model = task.model_class.from_config(config, trust_remote_code=False)
    return getattr(model.base_model, "pooler", None) is not None


def _planned(
    workspace: Workspace,
    data: Dataset,
    encoder: _Unloaded,
    part: ExtractionJob | None,
    asked: ExtractionJob,
    tokens: TokenPooling,
    storage: Storage,
    windows: Windows,
) -> PlannedSplit:
    """Plan of a stored split: its state, and the bytes to write.

    Args:
        workspace: Workspace with the data.
        data: Data that are extracted.
        encoder: Encoder of the snapshot.
        part: Job with its source; None where what is stored stays as it is.
        asked: Job without it.
        tokens: Tokens that are kept.
        storage: Storage of the store.
        windows: Windows of the split.

    Raises:
        ProvenanceError: it was begun from something else.
    """
    job = part or asked
    windows = chosen_tokens(windows, asked, data.task)
    layers = layers_of_tokens(asked.options, encoder.size.layers, pooler=encoder.pooler)[tokens]
    spec, contents = asked_split(
        *(workspace, data, asked, tokens, windows, storage),
        layers=layers,
        hidden_size=width_of(asked.options.sites or (), encoder.config),
        made_from={},
    )
    plan, total = contents.plan, expected_bytes(contents.plan, spec)
    missing, exists = plan.n_shards, Ledger(storage, spec.tag, spec.split).exists
    if exists:
        stored = StoredSplit(storage, spec.tag, spec.split)
        if part is not None and encoder.made:
            if part.options.sites is not None:
                check_same_sites(stored, part.options.sites)
            attention = str(stored.record.provenance.get("attn_implementation"))
            info = read_snapshot_info(encoder.folder)
            made_from = provenance(workspace, data, info, part, tokens, attention)
            check_split(stored.ledger, replace(spec, provenance=made_from), contents)
        missing = stored.record.shards - len(stored.committed_shards())
    source = None if job.pooled_from is None else f"{job.tag}/{job.pooled_from.name}"
    precision = str(asked.options.precision)
    rate = extraction_rate(workspace, spec.split, precision=precision, pooled_from=source)
    seconds = rate and rate.seconds * len(plan) * missing / plan.n_shards
    return PlannedSplit(
        tag=spec.tag,
        split=spec.split,
        state="new" if not exists else "begun" if missing else "there",
        windows=len(plan),
        tokens=int(plan.n_tokens.sum()),
        shards=plan.n_shards,
        shards_to_write=missing,
        bytes=total,
        bytes_to_write=total * missing // plan.n_shards,
        encoding=spec.encoding,
        layers=spec.layers,
        makes_snapshot=not encoder.made,
        pooled_from=source,
        seconds=seconds if missing else 0.0,
        measured=rate.measured if rate and missing else None,
    )


class PlannedRun(NamedTuple):
    """A head as a training would leave it."""

    head: str
    trained_on: str
    state: State
    fraction: float
    seed: int
    parameters: int
    """All of the head's, running statistics included."""
    examples: int
    """Windows that it is trained on in an epoch."""
    epochs: int
    steps: int
    seconds: float | None
    """For all of its steps; None where no training of this head was measured in this workspace."""
    measured: str | None
    """The record that the seconds are from."""


class TrainingPlan(NamedTuple):
    """Plan of a training or a sweep."""

    runs: list[PlannedRun]
    passes: int
    """Over the store, in each epoch; heads of a seed and snapshot share one."""
    evaluations: int
    """Scorings of a head on a snapshot that are missing; a training has none."""


def plan_training(
    workspace: Workspace,
    runs: Sequence[Run],
    tag: str,
    options: TrainOptions,
    *,
    overwrite: bool = False,
) -> TrainingPlan:
    """Plan `train`; nothing is computed or written.

    Args:
        workspace: Workspace with the activations.
        runs: heads, as they were asked for.
        tag: the snapshot.
        options: Options of training.
        overwrite: replace heads that were trained otherwise.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        WorkspaceError: a head of that name was trained otherwise.
        IncompleteSplitError: the extraction of the split has not ended.
    """
    named = options.named(list(runs), workspace.config.model)
    passes = plan_passes(workspace, named, SnapshotTag(tag), options, overwrite=overwrite)
    plans = [plan() for plan in passes]
    rows = {run: row for plan in plans for run, row in _rows(plan).items()}
    return TrainingPlan([rows[run] for run in named], sum(bool(plan.todo) for plan in plans), 0)


def plan_sweep(
    workspace: Workspace,
    heads: Sequence[str],
    *,
    trained_on: Sequence[str],
    checkpoints: Sequence[str],
    fractions: Sequence[float],
    seeds: Sequence[int],
    rates: Sequence[float],
    options: TrainOptions,
    split: str,
) -> TrainingPlan:
    """Plan `sweep`; nothing is computed or written.

    Args:
        workspace: Workspace with the activations.
        heads: As in `sweep`, likewise all that follow.
        trained_on: snapshots to train on.
        checkpoints: snapshots to evaluate on.
        fractions: parts of the training examples.
        seeds: Seeds of each head and part.
        rates: Learning rates to choose from.
        options: Options of training.
        split: Split that would be scored.

    Raises:
        UnknownNameError: as of `sweep`, likewise WorkspaceError and InputError.
    """
    runs = asked_runs(workspace, heads, fractions, seeds, options, rates)
    named = options.named(runs, workspace.config.model)
    groups, sources, targets = combinations(workspace, named, trained_on, checkpoints, split)
    planned_runs: list[PlannedRun] = []
    passes = evaluations = 0
    for tokens, group in groups.items():
        for source in sources[tokens]:
            planned = plan_training(workspace, group, source, options)
            planned_runs += planned.runs
            passes += planned.passes
        pairs = [(source, run) for source in sources[tokens] for run in group]
        if rates:  # which of them is chosen is not known
            tuned = [p for p in pairs if unscored(workspace, [p], p[0], "tune", options.precision)]
            evaluations += len(tuned) + len(pairs) // len(rates) * len(targets[tokens])
            continue
        evaluations += sum(
            len(unscored(workspace, pairs, tag, split, options.precision))
            for tag in targets[tokens]
        )
    return TrainingPlan(planned_runs, passes, evaluations)


def _rows(plan: TrainingPass) -> dict[Run, PlannedRun]:
    """The runs of a pass; those that are trained need no seconds."""
    heads = build_heads(
        list(plan.configs),
        layers=len(plan.layers),
        hidden=plan.split.record.hidden_size,
        classes=plan.classes,
        kind=plan.kind,
        device="meta",
    )
    begun = (plan.folder / "resume.ckpt").is_file() if plan.todo else False
    total, rows = len(plan.split), {}
    for run, config in plan.configs.items():
        examples, training = run.examples(total), config.training
        steps = training.epochs * ceil(examples / training.batch_size)
        todo = run in plan.todo
        rate = training_rate(plan.workspace, config) if todo and steps else None
        rows[run] = PlannedRun(
            head=run.head + run.variant,
            trained_on=str(plan.tag),
            state="there" if not todo else "begun" if begun else "new",
            fraction=run.fraction,
            seed=run.seed,
            parameters=count_parameters(heads[run])[1],
            examples=examples,
            epochs=training.epochs if examples else 0,
            steps=steps,
            seconds=rate.seconds * steps if rate else None if todo and steps else 0.0,
            measured=rate.measured if rate else None,
        )
    return rows
