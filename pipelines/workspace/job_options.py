"""Options of the jobs that make a workspace, its activations, its heads and generated texts.

Light, because the command line reads names, defaults and help here; and below the jobs, because the
workspace writes down the commands that make a result again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from bertvision.errors import InputError
from bertvision.featurestore.format.keeping import Keep
from bertvision.featurestore.format.layout import ENCODING_NAMES, EncodingName, get_encoding
from bertvision.featurestore.format.logits import TopRule
from bertvision.featurestore.format.names import CompressionName, NonFinite, SnapshotTag
from bertvision.pipelines.options import Option, Options, PrecisionName
from bertvision.pipelines.poolings import POOLING_NAMES, TokenPooling, check_pooling
from bertvision.pipelines.tasks.registry import SQUAD, find_task, is_task
from bertvision.pipelines.workspace.runs import LABELS_WEIGHT, TEMPERATURE, Run

if TYPE_CHECKING:
    from pydantic import BaseModel

    from bertvision.pipelines.workspace.config import ModelConfig


DATA = Option("File, folder or data set on the hub, to be named once.")
TEXT = Option("Column of the texts (tasks csv and text; default text).")
PAIR = Option("Column of the second texts (task csv).")
LABEL = Option("Column of the labels (task csv; default label).")
KEEP = Option(
    "Tokens to keep: completion, from:N (all but the first N), every:N (one of N), or the name of "
    "a mask field."
)
LOGITS = Option(
    "Log-probabilities of a decoder's next tokens to keep: top:K, of the K most probable ones."
)


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Options of a new workspace: its encoder, its task and its data; None is the default.

    Those named like a field of `TaskConfig` or `FinetuneConfig` mean that field, whose default and
    bounds are there.
    """

    model: Annotated[str | None, Option("Encoder, such as BERT: hub name or local folder.")] = None
    revision: Annotated[str | None, Option("Branch, tag or commit on the hub.")] = None
    task: Annotated[
        str | None,
        Option(
            "A task, such as answerable, cola, sst2, csv (docs/tasks.md), or a hub data set in "
            "SQuAD's form, such as squad_v2."
        ),
    ] = None
    data: Annotated[str | None, DATA] = None
    """Source of both ``train`` and ``dev``."""
    train: Annotated[str | None, Option("File or hub data set to train on.")] = None
    dev: Annotated[str | None, Option("File or hub data set to score on.")] = None
    text: Annotated[str | None, TEXT] = None
    pair: Annotated[str | None, PAIR] = None
    label: Annotated[str | None, LABEL] = None
    precision: Annotated[
        str | None, Option("Arithmetic: 32, bf16, or auto, which is bf16 where it is native.")
    ] = None
    train_questions: Annotated[
        int | None,
        Option(
            "Train on a seeded subset of this size, with held-out questions; subsets of a seed are "
            "nested."
        ),
    ] = None
    tune_fraction: Annotated[
        float | None, Option("Part of train held out for thresholds (default 0.05).")
    ] = None
    dev_fraction: Annotated[
        float | None, Option("Part of the training data to score on, where there is no dev.")
    ] = None
    answerable_only: Annotated[bool | None, Option("Leave unanswerable questions out.")] = None
    skip_bad: Annotated[
        bool | None, Option("Skip malformed items and those that fit no window.")
    ] = None
    skip_shared: Annotated[bool | None, Option("Leave out training items with a text of dev.")] = (
        None
    )
    max_length: Annotated[
        int | None, Option("Tokens of a window (default 386, of sentences 128).")
    ] = None
    max_question_length: Annotated[int | None, Option("Tokens of a question (default 64).")] = None
    overlap: Annotated[
        int | None, Option("Tokens that neighbouring windows share (default 128).")
    ] = None
    seed: Annotated[int | None, Option("Seed of everything random (default 0).")] = None

    def source(self, split: str) -> str | None:
        """Where a split of the source comes from: an absolute path, or a hub name."""
        if split == "dev" and self.dev_fraction:
            split = "train"
        source: str | None = getattr(self, split) or self.data or self._hub
        if source is None:
            return None
        path = Path(source).expanduser()
        return str(path.resolve()) if path.exists() else source

    @property
    def own_task(self) -> str | None:
        """The task that ``task`` names, where it does not name a data set."""
        own = self.task is not None and is_task(self.task) and self.task not in SQUAD
        return self.task if own else None

    @property
    def _hub(self) -> str | None:
        return find_task(self.own_task).hub if self.own_task else self.task

    def given(self, section: type[BaseModel]) -> dict[str, Any]:
        """The options that were given, of those that ``section`` has under the same name."""
        names = {f.name for f in fields(self)} & set(section.model_fields)
        return {n: getattr(self, n) for n in sorted(names) if getattr(self, n) is not None}


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(DataOptions):
    """Options of ``bertvision finetune``; None follows the workspace, or else the default."""

    init_from: Annotated[
        str | None,
        Option(
            "Begin with another workspace's encoder instead of --model, and a new output layer: "
            "FOLDER:TAG, such as ../phrases:1e."
        ),
    ] = None
    epochs: Annotated[float | None, Option("How long to train (default 1).")] = None
    save_at: tuple[str, ...] | None = None
    """Tags of the snapshots."""
    batch_size: Annotated[int | None, Option("Windows per batch (default 8).")] = None
    lr: Annotated[float | None, Option("Learning rate of Adam (default 1e-5).")] = None
    weight_decay: Annotated[
        float | None, Option("Decoupled weight decay; above 0, Adam is AdamW (default 0).")
    ] = None
    warmup: Annotated[
        float | None, Option("Part of the steps in which the learning rate rises (default 0).")
    ] = None
    decay: Annotated[
        str | None, Option("none keeps the learning rate, linear lets it fall to 0.")
    ] = None
    accumulate: Annotated[int | None, Option("Batches per optimiser step (default 1).")] = None
    gradient_clip: Annotated[
        float | None, Option("Largest norm of the gradient; 0 is off (default 0).")
    ] = None
    order: Annotated[
        str | None,
        Option(
            "Order of training windows: shuffled (default), given, or length, the shortest first."
        ),
    ] = None
    variant: Annotated[
        tuple[str, ...] | None,
        Option("Changes to fine-tuning, such as freeze:6,layer-decay:0.9 (docs/variants.md)."),
    ] = None
    distil: Annotated[
        str | None,
        Option(
            "Also learn from another encoder's logits, kept by `bertvision logits`: FOLDER:TAG, "
            "such as ../teacher:1e."
        ),
    ] = None
    temperature: Annotated[
        float | None, Option("Divisor of logits, with --distil (default 2).")
    ] = None
    labels_weight: Annotated[
        float | None, Option("Part of the loss that labels have, with --distil (default 0.5).")
    ] = None

    def sources(self) -> dict[str, str | None]:
        """Where train and dev of a new workspace come from.

        Raises:
            InputError: something that one needs was not given.
        """
        sources = {split: self.source(split) for split in ("train", "dev")}
        missing = [f"--{name}" for name, source in sources.items() if source is None]
        if self.model is None and self.init_from is None:
            missing.insert(0, "--model")
        if missing:
            raise InputError(
                f"a new workspace needs {' and '.join(missing)}: such as --model "
                "bert-large-uncased --train train-v2.0.json --dev dev-v2.0.json, --task squad_v2 "
                "from the hub, or --task cola --data glue/CoLA"
            )
        return sources


@dataclass(frozen=True, kw_only=True)
class ExtractOptions(Options):
    """Options of an extraction: which hidden states are kept, and how."""

    splits: Annotated[
        tuple[str, ...] | None,
        Option("Splits, such as train,dev; by default all of the workspace.", "--split"),
    ] = None
    """Also as they are stored (``train-cls``)."""
    tokens: Annotated[
        tuple[TokenPooling, ...] | None,
        Option(
            "Vectors to keep of a window: none for all tokens, or "
            f"{POOLING_NAMES}; by default those of the task's heads.",
            "--pool",
        ),
    ] = None
    """``("all",)`` (stored as ``train``), or poolings (``train-cls``, …), one of them also by
    itself; with cls goes the pooler output where the snapshot has a pooler."""
    dataset: str | None = None
    """An added data set; None is the workspace's own data."""
    encoding: Annotated[EncodingName, Option(f"{ENCODING_NAMES}.")] = "int8"
    """Pooled states of early layers lie so close together that bfloat16 rounds away most of what
    tells them apart (measured of [CLS] with all-MiniLM-L6-v2: up to 84 % of it); int8, which stores
    the deviation from a channel's mean, loses 0.7 %."""
    compression: Annotated[
        CompressionName,
        Option("none; zstd, for slow disks; or pcodec, to archive float encodings."),
    ] = "none"
    layers: Annotated[
        tuple[int, ...] | None,
        Option("Hidden states to keep, such as 0,6,12 (0: embeddings), or all."),
    ] = None
    """Negative ones count from the end."""
    sites: Annotated[
        tuple[str, ...] | None,
        Option("Other sites than hidden states, such as blocks.*.hook_mlp_out (docs/sites.md)."),
    ] = None
    keep: Annotated[str | None, KEEP] = None
    """Stored as ``train-kept``."""
    logits: Annotated[str | None, LOGITS] = None
    precision: Annotated[
        PrecisionName, Option("Arithmetic: 32, bf16, or auto, which is bf16 where it is native.")
    ] = "auto"
    nonfinite: Annotated[
        NonFinite,
        Option("NaN and infinity: error, or record to replace and count them."),
    ] = "error"
    scheduler: Annotated[
        str | None, Option("tcp://HOST:PORT of a Dask cluster whose workers compute the shards.")
    ] = None
    store: str | None = None
    """Another folder or URL: the workspace's from the moment on when a split of it is open for
    writing, so that a failure before leaves the workspace as it is."""
    shard_tokens: Annotated[int | None, Option(ge=1)] = None
    """Capacity of a shard; None is what suits the tokens."""

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str):
            object.__setattr__(self, "tokens", (self.tokens,))
        super().__post_init__()
        for pooling in self.tokens or ():
            if pooling != "all":
                check_pooling(pooling)
        object.__setattr__(self, "encoding", get_encoding(self.encoding).name)
        if self.sites and self.layers:
            raise InputError(f"--layers {self.layers}: name blocks in --sites, as blocks.3.*")
        if self.keep is not None:
            Keep.parse(self.keep)
        if self.logits is not None:
            TopRule.parse(self.logits)
        for name, rule in (("keep", self.keep), ("logits", self.logits)):
            if rule is not None and self.tokens not in (None, ("all",)):
                raise InputError(
                    f"--{name} {rule} beside --pool {','.join(self.tokens)}: poolings are of "
                    "all tokens of a window; leave one of the two out"
                )


SourceName = Literal["store", "auto", "live"]


class Source(NamedTuple):
    """Source of the hidden states that heads train on."""

    name: SourceName = "store"
    encoding: str | None = None
    """Encoding of what is not stored yet; None is that of an extraction where nothing is said."""

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read ``store``, ``auto[:ENCODING]`` or ``live[:ENCODING]``.

        Raises:
            InputError: It is another text.
        """
        name, colon, encoding = text.partition(":")
        if name not in get_args(SourceName) or bool(colon) != bool(encoding and name != "store"):
            raise InputError(
                f"--source {text}: choose store, auto or live, the latter two perhaps with the "
                "encoding of what is not stored yet, as in auto:bfloat16"
            )
        if encoding:
            try:
                get_encoding(encoding)
            except InputError as error:
                raise InputError(f"--source {text}: {error}") from None
        return cls(name, encoding or None)  # type: ignore[arg-type]  # checked above


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """How heads are trained. Defaults are the paper's: Adam 1e-3, batches of 16, one epoch."""

    epochs: Annotated[int, Option("Passes over the training examples.", gt=0)] = 1
    batch_size: Annotated[int, Option("Windows per step.", gt=0)] = 16
    lr: Annotated[float, Option("Learning rate of Adam.", gt=0)] = 1e-3
    pool: Annotated[
        TokenPooling | None,
        Option(f"Pooling that classification heads read, of {POOLING_NAMES}; by default cls."),
    ] = None
    """A head's name says it (``@pmean``)."""
    layers: Annotated[tuple[int, ...] | None, Option("Hidden states to train on.")] = None
    precision: Annotated[
        PrecisionName, Option("Arithmetic: 32, bf16, or auto, which is bf16 where it is native.")
    ] = "auto"
    best_epoch: Annotated[
        bool, Option("Keep the epoch with the lowest loss on tune, not the last.")
    ] = False
    distil: Annotated[
        str | None,
        Option("Also learn from the logits of this snapshot, kept by `bertvision logits`."),
    ] = None
    """Its tag. A head's name says it (``@d1e``), and what the next two are."""
    temperature: Annotated[float, Option("Divisor of logits, with --distil.", ge=1)] = TEMPERATURE
    labels_weight: Annotated[
        float, Option("Part of the loss that labels have, with --distil.", ge=0, le=1)
    ] = LABELS_WEIGHT
    """The teacher's logits have the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool is not None:
            check_pooling(self.pool)
        if self.distil is not None:
            object.__setattr__(self, "distil", str(SnapshotTag(self.distil)))
        elif (self.temperature, self.labels_weight) != (TEMPERATURE, LABELS_WEIGHT):
            raise InputError(
                f"--temperature {self.temperature:g} and --labels-weight {self.labels_weight:g} "
                "are of learning from a snapshot's logits: name it with --distil 1e, or write both "
                "into the head's name, as learned-pooling@d1e@t4@w0.1"
            )

    def named(self, runs: Sequence[Run], model: ModelConfig) -> list[Run]:
        """Runs whose names say what these options have them read and learn from.

        A head on another pooling, or a distilled one, thus stands beside the one that reads [CLS]
        and learned from labels alone. What a name says already goes before the options.

        Args:
            runs: Runs as they were asked for.
            model: Encoder of the workspace, whose usual pooling is read where none is said. Of
                [CLS] no name says it, but where that is not the usual one.
        """
        taught = {} if self.distil is None else {name: getattr(self, name) for name in _TAUGHT}
        named = []
        for run in runs:
            pool = run.settings.get("pool", self.pool or model.pooling)
            pool = None if pool == model.pooling == "cls" else pool
            # a teacher that a name says goes with its own temperature
            named.append(run.having(pool=pool, **({} if "distil" in run.settings else taught)))
        return named

    @property
    def unnamed(self) -> TrainOptions:
        """The same without a pooling and a teacher, which names say (`named`)."""
        return replace(self, pool=None, **_TAUGHT)


_TAUGHT: dict[str, Any] = {
    "distil": None,
    "temperature": TEMPERATURE,
    "labels_weight": LABELS_WEIGHT,
}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """Options of ``bertvision generate``."""

    max_new_tokens: Annotated[
        int, Option("Largest number of tokens generated for a prompt.", ge=1)
    ] = 128
    temperature: Annotated[
        float,
        Option("Divisor of logits before a token is drawn; 0 takes the likeliest.", ge=0),
    ] = 0.0
    top_p: Annotated[
        float | None,
        Option(
            "Draw from the likeliest tokens that have this probability together; by default as the "
            "model's generation_config.json says.",
            gt=0,
            le=1,
        ),
    ] = None
    seed: Annotated[
        int, Option("Seed of the draws; every prompt has its own.", ge=0, lt=1 << 63)
    ] = 0
    date: Annotated[
        str | None,
        Option(
            "Date for chat templates, such as 2024-07-26; by default the day on which the split is "
            "begun."
        ),
    ] = None
    batch_size: Annotated[int, Option("Prompts that are continued together.", ge=1)] = 16
    layers: Annotated[
        tuple[int, ...] | None,
        Option("Indices of the hidden states to keep, such as 0,6,-1, or all."),
    ] = None
    sites: Annotated[
        tuple[str, ...] | None,
        Option(
            "Keep sites inside the layers instead, by name or pattern, such as "
            "'blocks.*.hook_mlp_out' (docs/sites.md)."
        ),
    ] = None
    keep: Annotated[str | None, KEEP] = None
    logits: Annotated[str | None, LOGITS] = None
    encoding: Annotated[EncodingName, Option(f"{ENCODING_NAMES}.")] = "int8"
    permute: Annotated[
        int | None, Option("Seed of a stored order that mixes neighbours.", ge=0)
    ] = None
    precision: Annotated[
        PrecisionName, Option("Arithmetic: 32, bf16, or auto, which is bf16 where it is native.")
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None:
            Keep.parse(self.keep)
        if self.logits is not None:
            TopRule.parse(self.logits)
