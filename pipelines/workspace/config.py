"""The settings of a workspace, as stored in ``bertvision.yaml``.

Every field that changes a number is here; paths of what was made are not (the workspace knows
them). Models are frozen and refuse unknown fields, so that a typing error never passes silently.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.files import write_text
from bertvision.pipelines.plain_yaml import read_yaml, with_value, yaml_text
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.records import Settings, digest_of, what_is_wrong
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.variants.registry import check_names
from bertvision.pipelines.workspace.runs import LABELS_WEIGHT, TEMPERATURE

Tag = Annotated[str, AfterValidator(SnapshotTag)]
Order = Literal["shuffled", "given", "length"]
"""How training windows follow one another."""


class ModelConfig(Settings):
    """The pretrained encoder."""

    name_or_path: str
    """Hub name, or the absolute path of a local folder."""
    revision: str | None = None
    """Commit on the hub, or the revision that an adopted checkpoint was named with; None for a
    local folder."""
    weights_sha256: str
    """Digest of the pretrained weights' bytes."""
    hidden_size: int
    num_hidden_layers: int
    """Transformer layers; there is one hidden state more, the embedding output."""
    output_layer: Literal["kept", "reordered", "new"] | None = None
    """Whether fine-tuning begins with the output layer that the checkpoint has of other data, as it
    is or with its classes in the order of these data; None where it has none, and in workspaces of
    earlier versions, which kept it as it was."""
    special_ends: bool = True
    """Whether its windows stand between special tokens, as those of decoders do not; the file does
    not say it where they do."""

    @model_serializer(mode="wrap")
    def _without_default(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        if self.special_ends:
            del values["special_ends"]
        return values

    @property
    def pooling(self) -> TokenPooling:
        """Pooling where none is said: [CLS], or of decoders, which have none, the last token."""
        return "cls" if self.special_ends else "last"

    def usual_tokens(self, task: str) -> TokenPooling:
        """Tokens of each window that heads of a task read where nothing else is said."""
        tokens = find_task(task).tokens
        return self.pooling if tokens == "cls" else tokens


class DataConfig(Settings):
    """One split of the task's data."""

    source: str
    """Absolute path of a file, or the name of a data set on the hub."""
    sha256: str
    """Digest of the whole source, before any selection."""
    questions: int
    """Number of items of the split, questions or sentences, after selection."""
    misfits: tuple[str, ...] = ()
    """Ids of items of the source that are left out because no window holds them (``skip_bad``); the
    file does not say it where there are none."""
    shared: tuple[str, ...] = ()
    """Ids of items of ``train`` that are left out because a text of theirs is in ``dev``
    (``skip_shared``), likewise."""

    @model_serializer(mode="wrap")
    def _without_none(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        for name in ("misfits", "shared"):
            if not values[name]:
                del values[name]
        return values


class FinetuneConfig(Settings):
    """Optimisation. Defaults are those of the paper: Adam, 1e-5, batches of 8, one epoch."""

    epochs: float = Field(1.0, gt=0)
    save_at: tuple[Tag, ...] = (SnapshotTag("1e"),)
    """Tags of the snapshots, in order."""
    batch_size: int = Field(8, ge=1)
    """Windows per forward pass."""
    lr: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled (AdamW) where above 0."""
    spare_vectors: bool = False
    """Weight decay spares biases and LayerNorm, as in the code of Devlin et al. (2019); in
    workspaces of earlier versions it does not."""
    warmup: float = Field(0.0, ge=0, lt=1)
    """Fraction of all optimiser steps over which the rate rises from 0."""
    decay: Literal["none", "linear"] = "none"
    """``linear``: the rate falls to 0 at the end of the last epoch."""
    accumulate: int = Field(1, ge=1)
    """Batches per optimiser step."""
    gradient_clip: float = Field(0.0, ge=0)
    """Largest norm of the gradient; 0 leaves it alone."""
    precision: Literal["auto", "32", "bf16"] = "auto"
    train_questions: int | None = Field(None, ge=1)
    """Train on a seeded subset of at most this many questions, those held out among them."""
    nested: bool = False
    """Whether a smaller subset of the same seed is part of a larger one, and so is what is held out
    of it; in workspaces from before this was a setting, whole contexts are taken as they fit."""
    order: Order = "shuffled"
    """``shuffled`` anew in each epoch; in every epoch as ``given`` in the file, or by ``length``,
    the shortest windows first."""
    variant: tuple[str, ...] = ()
    """Changes to fine-tuning, such as ``freeze:6`` (see docs/variants.md)."""
    init_from: str | None = None
    """Snapshot of another workspace whose encoder is what is fine-tuned: ``FOLDER:TAG``, with
    the absolute path of the workspace."""
    distil: str | None = None
    """Teacher whose logits are learned from too: ``FOLDER:TAG``, the absolute path of a workspace
    and a snapshot there."""
    temperature: float = Field(TEMPERATURE, ge=1)
    """Temperature that divides the logits of both."""
    labels_weight: float = Field(LABELS_WEIGHT, ge=0, le=1)
    """Part of the loss that labels have; the teacher has the rest."""
    teacher_sha256: str | None = None
    """Digest of the teacher's weights."""
    seed: int = Field(0, ge=0)
    """Decides the held-out part, the order of batches, dropout and the new output layer."""

    @field_validator("save_at")
    @classmethod
    def _sorted(cls, tags: tuple[SnapshotTag, ...]) -> tuple[SnapshotTag, ...]:
        if not tags:
            raise InputError("save_at names no snapshot: give at least one, such as 1e")
        return tuple(sorted(set(tags)))

    @field_validator("variant")
    @classmethod
    def _known(cls, variant: tuple[str, ...]) -> tuple[str, ...]:
        check_names(variant)
        return variant

    @model_validator(mode="after")
    def _of_a_teacher(self) -> FinetuneConfig:
        told = self.temperature, self.labels_weight
        if self.distil is None and told != (TEMPERATURE, LABELS_WEIGHT):
            raise InputError(
                "--temperature and --labels-weight are of learning from another encoder's logits: "
                "name it with --distil FOLDER:TAG, such as --distil ../teacher:1e"
            )
        if self.distil is not None:
            folder, _, tag = self.distil.rpartition(":")
            if not folder or not SnapshotTag.is_valid(tag):
                raise InputError(
                    f"--distil {self.distil}: give the workspace of the teacher and its snapshot, "
                    "such as ../teacher:1e"
                )
        return self

    @model_validator(mode="after")
    def _within_epochs(self) -> FinetuneConfig:
        if any(tag.is_untrained for tag in self.tags):
            raise InputError(
                "--save-at untrained: fine-tuning starts from the pretrained encoder; its "
                "untrained twin is made where --checkpoint untrained asks for it"
            )
        for part in (part for tag in self.tags if tag.is_mean for part in tag.parts):
            if part not in self.tags:
                raise InputError(
                    f"--save-at {','.join(self.tags)}: {part}, which a mean is asked of, is not "
                    "among the snapshots: name it too"
                )
        last = self.tags[-1]
        if last.fraction > self.epochs:
            raise InputError(
                f"snapshot {last} lies after the end of {self.epochs:g} epochs: give --epochs "
                f"{last.fraction:g} or more, or leave {last} out of --save-at"
            )
        return self

    @property
    def tags(self) -> tuple[SnapshotTag, ...]:
        """``save_at`` as snapshot tags, ordered as numbers."""
        return tuple(SnapshotTag(tag) for tag in self.save_at)


class AdoptedConfig(Settings):
    """Snapshots that others fine-tuned."""

    sources: dict[Tag, str]
    """Checkpoint of each: the absolute path of its folder, or its name on the hub."""
    classes: tuple[str, ...] = ()
    """Classes of the checkpoints in the order of their outputs, where their configuration does not
    name them."""

    def tag_of(self, model: ModelConfig) -> SnapshotTag | None:
        """Tag of the checkpoint that is a workspace's encoder too; None where that is another."""
        names = model.name_or_path, f"{model.name_or_path}@{model.revision}"
        tags = (SnapshotTag(tag) for tag, source in self.sources.items() if source in names)
        return next(tags, None)


_LATER = {
    "model": ("output_layer",),
    "task": (
        *("classes", "text", "pair", "label", "dev_fraction", "linked", "windows", "date"),
        "skip_shared",
    ),
    "finetune": (
        *("spare_vectors", "variant", "nested", "order"),
        *("temperature", "labels_weight", "teacher_sha256", "init_from"),
    ),
}
"""Settings that came with later versions: workspaces from before keep their digest."""


class WorkspaceConfig(Settings):
    """The whole of ``bertvision.yaml``."""

    format: Literal[1] = 1
    model: ModelConfig
    task: TaskConfig
    data: dict[str, DataConfig]
    """By split: ``train`` without the held-out part, ``tune`` (held out), ``dev``."""
    finetune: FinetuneConfig
    adopted: AdoptedConfig | None = None
    """Checkpoints of others, where nothing was fine-tuned here; the file does not say it without
    any."""
    activations: str | None = None
    """Folder or URL of the activation store; None is ``activations/`` in the workspace."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Library versions when the workspace was made."""

    @model_serializer(mode="wrap")
    def _without_none(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        if values["adopted"] is None:
            del values["adopted"]
        return values

    def digest(self) -> str:
        """Hex sha256 of all settings that decide the snapshots' values."""
        values = self.model_dump(mode="json")
        del values["versions"], values["activations"]
        del values["finetune"]["distil"]  # where the teacher is; its weights say which it is
        if self.finetune.init_from is not None:  # likewise where the start is
            values["finetune"]["init_from"] = True
            del values["model"]["name_or_path"]
        if self.model.output_layer == "kept":  # as earlier versions did without a word
            values["model"]["output_layer"] = None
        for section, fields in _LATER.items():
            defaults = type(getattr(self, section)).model_fields
            for field in fields:  # of what is not set nothing is said
                value = values[section][field]
                if value == defaults[field].default or value in ([], None):
                    del values[section][field]
        return digest_of(values)

    @classmethod
    def read(cls, path: Path) -> WorkspaceConfig:
        """The settings in a file.

        Raises:
            WorkspaceError: it cannot be read, or is not one of this version's.
        """
        try:
            values = read_yaml(path)
        except (OSError, ValueError) as error:
            raise WorkspaceError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise WorkspaceError(f"{path} is not a workspace file: it holds no settings")
        if values.get("format") != 1:
            version = reprlib.repr(values.get("format"))
            raise WorkspaceError(
                f"{path} has format {version}; this version of bertvision reads format 1: update "
                "bertvision, or start another --workspace"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise WorkspaceError(f"{path}: {what_is_wrong(error)}") from error

    def write(self, path: Path) -> None:
        """Put the settings into a file, whole or not at all."""
        values = self.model_dump(mode="json")
        write_text(path, yaml_text(values))

    def write_place(self, path: Path) -> None:
        """Put ``activations`` into a file that has all else already, and leave its comments alone.

        Raises:
            WorkspaceError: the file is not one that a line can be changed in.
        """
        try:
            with path.open(encoding="utf-8", newline="") as file:  # its line ends stay too
                text = with_value(file.read(), "activations", self.activations)
        except (OSError, ValueError) as error:
            raise WorkspaceError(
                f"{path} cannot be changed: {error}; write `activations: {self.activations}` into "
                "it as a line of its own"
            ) from error
        write_text(path, text)
