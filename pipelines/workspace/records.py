"""Records of a workspace in JSON: snapshots, data sets, runs, scores of systems, extractions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from bertvision.errors import InputError, StoreNotFoundError, UnknownNameError
from bertvision.featurestore.format.names import check_name
from bertvision.featurestore.format.records import Provenance
from bertvision.models import Kind
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.records import Count, Record, Settings, read_record
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.tasks.registry import NAMED_BY_FILE, TASKS, path_name
from bertvision.pipelines.tasks.scores import Rules, headline
from bertvision.pipelines.workspace.config import DataConfig, FinetuneConfig, ModelConfig, Tag
from bertvision.pipelines.workspace.runs import LABELS_WEIGHT, TEMPERATURE, Run


class RunTraining(Record):
    """How a run was trained: the options that it was given, its seed and part of the data."""

    epochs: Count
    batch_size: Count
    lr: float
    precision: str
    best_epoch: bool
    distil: Tag | None = None
    """Snapshot whose logits it also learned from; without one the file says nothing of it."""
    temperature: float = TEMPERATURE
    labels_weight: float = LABELS_WEIGHT
    seed: Count
    fraction: float


_UNSAID = {"classes": 2, "variant": "", "teacher_sha256": None, "buffer": None}
_OF_TEACHER = ("distil", "temperature", "labels_weight")


class RunConfig(Record):
    """``config.json`` of a run: everything its weights depend on."""

    head: str
    kind: Kind
    trained_on: Tag
    layers: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=10_000)
    ]
    hidden_size: Annotated[int, Field(ge=1, le=1 << 20)]
    encoding: str
    classes: Annotated[int, Field(ge=1, le=1 << 20)] = 2
    """The file does not say it where it is 2."""
    variant: str = ""
    """Settings that the run's name carries (`Run.variant`); the file does not say it without."""
    training: RunTraining
    activations: Provenance
    """Identity of the activations: their number, plan and provenance."""
    teacher_sha256: str | None = None
    """Digest of the weights whose logits it learned from; the file does not say it without."""
    buffer: Count | None = None
    """Shards in the shuffle buffer that mixed them. It follows from the rest: configurations are
    compared without it; earlier versions did not keep it."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        for name, default in _UNSAID.items():
            if values[name] == default:
                del values[name]
        for name in _OF_TEACHER if self.training.distil is None else ():
            del values["training"][name]
        return values

    @property
    def tokens(self) -> TokenPooling:
        """The tokens of each window that the head reads."""
        return self.run.tokens(self.kind)

    @property
    def run(self) -> Run:
        """The run, as its folder is named."""
        return Run(self.head, self.training.fraction, self.training.seed, self.variant)


class RunMetrics(Record):
    """``metrics.json`` of a run: what its training came to."""

    head: str
    trained_on: Tag
    fraction: float
    seed: Count
    trainable: Count
    """Parameters that were trained."""
    total: Count
    """Parameters in all."""
    examples: Count
    steps: Count
    epoch: Count
    """Epoch whose weights were kept, from 1; 0 for a head as it is made."""
    loss: float | None
    """Mean of the last tenth of the steps; None where there were none."""
    held_out_losses: list[float] | None
    """Held-out loss of each epoch; None where no epoch was chosen by it."""
    seconds: float
    """Wall time of the training, of all runs that shared it."""
    own_seconds: float
    """Its steps times the median seconds of one, and an equal share of what the pass spent besides
    the steps of its runs. Earlier versions gave the sum of the steps, and all of the rest."""
    wait_seconds: float
    """Part of ``seconds`` that was spent waiting for data."""
    seconds_per_epoch: float
    trained_together: list[str]
    sha256: dict[Literal["model.safetensors", "config.json"], str] = {}
    """Digests of the files that a head is made from; earlier versions kept none."""


class PassRecord(Record):
    """``pass.json`` of a training that is under way: the runs that it trains from one stream."""

    runs: Annotated[tuple[RunConfig, ...], Field(min_length=1)]


class BertScores(Record):
    """``metrics.json`` of BERT at a snapshot."""

    snapshot: str
    weights_sha256: str
    split: str
    rules: Rules
    threshold_tuned_on: str | None = None
    seconds: dict[str, float]
    """Seconds of the forward passes, by split."""
    sha256: dict[str, str] = {}
    """Digests of the files beside it, by name; earlier versions kept none."""

    @model_validator(mode="before")
    @classmethod
    def _tuned_where_tune_was_run(cls, values: Any) -> Any:
        """Earlier versions did not say it: BERT was run over tune where a threshold was tuned."""
        seconds = values.get("seconds") if isinstance(values, dict) else None
        if isinstance(seconds, dict) and "tune" in seconds and "threshold_tuned_on" not in values:
            return {**values, "threshold_tuned_on": "tune"}
        return values


class HeadScores(Record):
    """``metrics.json`` of a run on a split of a snapshot's activations."""

    head: str
    trained_on: Tag
    checkpoint: Tag
    split: str
    rules: Rules
    precision: str
    threshold_tuned_on: str | None
    seconds: float
    weights_sha256: str
    """Digest of the head's weights."""
    provenance: Provenance
    """Provenance of the activations that were scored."""
    activations: dict[str, Provenance]
    """By split what tells the activations from others, those that tuned a threshold included."""
    sha256: dict[str, str] = {}
    """Digests of the files beside it, by name; earlier versions kept none."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """The system and its scores, in a line: the provenance takes a page."""
        for name in ("head", "trained_on", "checkpoint", "split"):
            yield name, getattr(self, name)
        for name, value in headline(self.rules).items():
            if name in METRICS:
                yield name, round(value, 1)


class EnsembleScores(Record):
    """``metrics.json`` of an ensemble."""

    members: tuple[str, ...]
    combine: str
    kind: Kind
    trained_on: Tag
    checkpoint: Tag
    split: str
    fraction: float
    """Part of the training examples, where its heads have it in common, else 1."""
    seed: int
    """Seed of the training, where its heads have it in common, else 0."""
    rules: Rules
    threshold_tuned_on: str | None
    weights: dict[str, str]
    """Digest of each member's weights."""
    seconds: float
    command: str
    sha256: dict[str, str] = {}
    """Digests of the files beside it, by name; earlier versions kept none."""


class ExtractionCosts(Record):
    """``extraction/<tag>/<stored split>.json``: what an extraction cost, and its options."""

    tag: str
    split: str
    examples: Count
    tokens: TokenPooling
    layers: tuple[int, ...]
    encoding: str
    compression: str
    precision: str
    nonfinite: str
    shard_tokens: Count
    device: str
    store: str
    pooled_from: str | None = None
    """Stored split of the same snapshot that was pooled; None where the encoder was run."""
    examples_written: Count = 0
    """Examples written by all calls; an interrupted one may have computed some again."""
    seconds: float = 0.0
    encoder_seconds: float = 0.0
    bytes: Count = 0


MARKER = "snapshot.json"
"""In the folder of a whole snapshot."""
SNAPSHOT_REMEDY = "delete the folder and run `bertvision finetune --resume` to make it again"


class SnapshotInfo(Settings):
    """``snapshot.json``: what a snapshot was made from."""

    tag: str
    step: Count
    """Optimiser steps taken."""
    steps_per_epoch: Count
    """Optimiser steps in one epoch; 0 where the snapshot was made without training data."""
    seconds: float | None = None
    """Wall time of fine-tuning up to here; None where it was not measured."""
    seconds_per_step: float | None = None
    """Median wall time of an optimiser step so far; earlier versions did not measure it."""
    trained_parameters: Count | None = None
    """How many parameters are trained, the output layer's among them; earlier versions did not
    count them."""
    weights_sha256: str
    """Digest of this snapshot's own weights."""
    config_sha256: str
    """Digest of this snapshot's model configuration."""
    tokenizer_sha256: str
    adopted_from: str | None = None
    """Checkpoint of others that it is: a folder, or a name on the hub. How it was fine-tuned is not
    known, and ``finetune`` says nothing of it."""
    adopted_sha256: str | None = None
    """Digest of that checkpoint's weights."""
    pretrained: ModelConfig
    task: TaskConfig
    data: dict[str, DataConfig]
    finetune: FinetuneConfig
    """Hyper-parameters, precision and seed."""
    versions: dict[str, str]
    created: str
    """UTC, ISO 8601."""


def read_run_config(folder: Path) -> RunConfig:
    """``config.json`` of a run.

    Args:
        folder: ``heads/<trained_on>/<run>``.

    Raises:
        WorkspaceError: it is missing or damaged.
    """
    return read_record(folder / "config.json", RunConfig, _train_again(folder))


def read_run_metrics(folder: Path) -> RunMetrics:
    """``metrics.json`` of a run.

    Args:
        folder: ``heads/<trained_on>/<run>``.

    Raises:
        WorkspaceError: it is missing or damaged.
    """
    return read_record(folder / "metrics.json", RunMetrics, _train_again(folder))


def is_snapshot(folder: Path) -> bool:
    """Whether ``folder`` is a whole snapshot."""
    return (folder / MARKER).is_file()


def read_snapshot_info(folder: Path) -> SnapshotInfo:
    """Read the provenance of a snapshot.

    Raises:
        StoreNotFoundError: ``folder`` is no whole snapshot.
        WorkspaceError: its ``snapshot.json`` is damaged.
    """
    if not is_snapshot(folder):
        raise StoreNotFoundError(
            f"{folder} is no snapshot (it has no {MARKER}): make it with `bertvision finetune`"
        )
    again = "bertvision finetune --resume"
    return read_record(folder / MARKER, SnapshotInfo, again, SNAPSHOT_REMEDY)


def _train_again(folder: Path) -> str:
    """The training of a run whose records cannot be read, as far as its folder tells it."""
    return f"bertvision train {folder.name} --checkpoint {folder.parent.name} --overwrite"


_RESERVED = ("train", "tune", "dev", "test", "all")


class DatasetRecord(Record):
    """``datasets/<name>.json``: where an added data set comes from, and how it is read."""

    task: TaskConfig
    data: dict[str, DataConfig]
    """By split."""


def record_path(root: Path, name: str) -> Path:
    """Where the record of a data set of the workspace at ``root`` lies, or will lie."""
    return root / "datasets" / f"{check_name(name, 'data set')}.json"


def is_added(root: Path, name: str) -> bool:
    """Whether a data set of this name was added to the workspace at ``root``."""
    return record_path(root, name).is_file()


def read_dataset_record(root: Path, name: str) -> DatasetRecord:
    """The record of an added data set.

    Raises:
        UnknownNameError: it was not added.
        WorkspaceError: its record is damaged.
    """
    path = record_path(root, name)
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in path.parent.glob("*.json"))) or "none"
        raise UnknownNameError(
            f"{root} has no data set {name!r} (there are: {names}): say where it is with --data "
            "PATH"
        )
    again = "bertvision extract --task TASK --data PATH"
    return read_record(path, DatasetRecord, again, "delete it and name the data with --data again")


def dataset_name(task: str, source: str, own: str | None = None) -> str:
    """The name of a data set: its task's, or of a file of one's own the file's.

    A file that is named like a task is no data set of that task: of ``mr.csv`` it is ``csv_mr``.
    Data of the workspace's own task are named by both: ``sst2_reviews``.

    Args:
        task: Task of the data.
        source: Place of the data.
        own: Task of the workspace's own data, where these are others.

    Raises:
        InputError: the file's name cannot be one.
    """
    if task not in NAMED_BY_FILE and task != own:
        return path_name(task)
    name = re.sub(r"[^a-z0-9]+", "_", Path(source).name.lower().split(".")[0]).strip("_")
    if name in TASKS or task not in NAMED_BY_FILE:
        name = f"{path_name(task)}_{name}"
    if not name or name in _RESERVED or len(name) > 40:
        raise InputError(
            f"{source}: a data set is named by its file, and {name!r} cannot be one's name: rename "
            "the file to something of its own, of at most 40 letters, digits and '_'"
        )
    return name
