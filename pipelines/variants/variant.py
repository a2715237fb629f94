"""Base of variants of fine-tuning; each changes one thing, and leaves the rest as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import PretrainedEncoder
from bertvision.pipelines.encoders.weights import weights_of
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Batch

Groups = list[dict[str, Any]]
"""Parameter groups, as torch's optimisers take them: ``params``, and settings beside them."""


class Variant:
    """One change to fine-tuning, such as ``freeze:6``; made by `load_variants` from its argument.

    What a variant does not change it inherits: all methods do nothing here.
    """

    reads_cls: ClassVar[bool] = False
    """Whether it reads the state of [CLS], which decoders do not have."""
    kinds: ClassVar[tuple[str, ...]] = (
        "span",
        "classification",
        "token",
        "tree",
        "phrases",
        "order",
    )
    """Kinds of the tasks that it fits."""
    needs: ClassVar[str | None] = None
    """Name of the argument behind the colon, such as ``layers``; None where there is none."""
    reads_states: ClassVar[bool] = False
    """Whether its `loss` reads the hidden states of all layers."""
    alone: ClassVar[str | None] = None
    """Why several processes cannot share its batches, after its name; None where they can."""
    state: tuple[str, ...] = ()
    """Names of tensors that it adds to the model's own, so that snapshots keep them."""
    checkpoint: Path | None = None
    """Folder of the pretrained weights, in `begin`; None where they are random."""

    def __init__(self, name: str, argument: str | None) -> None:
        """Read the argument.

        Raises:
            InputError: it is missing, or there is one too many.
        """
        self.name = name
        self.argument = argument
        if (argument is None) != (self.needs is None):
            what = f"give {name}:{self.needs.upper()}" if self.needs else f"give {name} alone"
            raise InputError(f"--variant {self}: {what}")

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}:{self.argument}"

    def check(self, layers: int) -> None:
        """Refuse an encoder that it does not fit.

        Args:
            layers: transformer layers that there are, after the variants before this one.

        Raises:
            InputError: names what is allowed.
        """

    def check_checkpoint(self, checkpoint: PretrainedEncoder) -> None:
        """Refuse a checkpoint that lacks what it needs, before a workspace is made.

        Raises:
            InputError: names the checkpoint and what it lacks.
        """

    def check_beside(self, others: Sequence[Variant], layers: int) -> None:
        """Refuse variants that it cannot be combined with.

        Args:
            others: all that were asked for, itself among them, in their order.
            layers: transformer layers that there are after all of them.

        Raises:
            InputError: names both.
        """

    def check_shared(self, processes: int) -> None:
        """Refuse to be trained by several processes, each with its share of every batch.

        Args:
            processes: Their number.

        Raises:
            InputError: it needs whole batches, or has to be alone for another reason.
        """
        if self.alone is not None and processes > 1:
            raise InputError(
                f"--variant {self} {self.alone}, so that {processes} processes cannot share it: "
                "train it with one (--devices 1)"
            )

    def depth(self, layers: int) -> int:
        """How many transformer layers there are after it."""
        return layers

    def build(self, model: PreTrainedModel) -> None:
        """Give the model its structure: before the first step, and whenever a snapshot is read.

        Layers that the configuration tells of are there when a snapshot is read; see `begin`.
        """

    def begin(self, model: PreTrainedModel) -> None:
        """Change the pretrained model before the first step, its configuration included.

        New weights come from torch's global generator, which is seeded.
        """

    def groups(self, model: PreTrainedModel, groups: Groups) -> Groups:
        """The parameter groups of the optimiser; the rate of one is ``scale`` times that of all."""
        return groups

    def optimizer(self, groups: Groups, lr: float) -> torch.optim.Optimizer | None:
        """An optimiser in the place of Adam; None leaves it."""
        return None

    def loss(
        self, model: PreTrainedModel, task: Task, batch: Batch, output: Any, loss: Tensor
    ) -> Tensor:
        """Loss, summed over the windows of a batch, ().

        A window's part of it must not depend on the rest of its batch.

        Args:
            model: Model that is trained.
            task: Task that it is trained for.
            batch: Batch with labels, on the model's device.
            output: Output of the model for it, with ``hidden_states`` where a variant
                `reads_states`: (batch, seq, hidden) each, the last one last; those below frozen
                layers that are not run are not among them.
            loss: the task's, or what the variants before this one made of it.
        """
        return loss

    def train(self, model: PreTrainedModel) -> None:
        """Differences from ``model.train()`` while it is trained."""

    def whole(self, model: PreTrainedModel) -> PreTrainedModel:
        """Model that a snapshot keeps; another one, where it is not this one."""
        return model


def begin(
    variants: Sequence[Variant], model: PreTrainedModel, checkpoint: Path | None = None
) -> None:
    """Change a pretrained model as variants say, in their order, before the first step.

    Args:
        variants: Variants in their order.
        model: Model with the output layer of its task.
        checkpoint: folder that it was read from; None where its weights are random.
    """
    for variant in variants:
        variant.checkpoint = checkpoint
        variant.begin(model)
        variant.build(model)


def whole(variants: Sequence[Variant], model: PreTrainedModel) -> PreTrainedModel:
    """Model that a snapshot keeps of one that was made by variants."""
    for variant in variants:
        model = variant.whole(model)
    return model


def restore(variants: Sequence[Variant], model: PreTrainedModel, folder: Path) -> None:
    """Give a model that was read from a snapshot what variants added to it.

    Args:
        variants: Variants that it was made by.
        model: Model as transformers reads it.
        folder: Folder of the snapshot.

    Raises:
        InputError: the snapshot lacks a tensor of theirs.
    """
    for variant in variants:
        variant.build(model)
    if wanted := [name for variant in variants for name in variant.state]:
        weights = weights_of(folder, wanted)
        model.load_state_dict(weights, strict=False)
    model.eval()


def integer(variant: Variant, least: int) -> int:
    """The argument as a whole number.

    Raises:
        InputError: it is none, or below ``least``.
    """
    try:
        value = int(str(variant.argument))
    except ValueError:
        value = least - 1
    if value < least:
        raise InputError(
            f"--variant {variant}: give a whole number of {variant.needs}, from {least}"
        )
    return value


def fraction(variant: Variant, *, one: bool = False) -> float:
    """The argument as a number between 0 and 1, both left out.

    Args:
        variant: Variant whose argument it is.
        one: 1 is allowed too.

    Raises:
        InputError: it is none.
    """
    try:
        value = float(str(variant.argument))
    except ValueError:
        value = -1.0
    if not 0 < value < 1 and not (one and value == 1):
        bounds = "above 0, at most 1" if one else "between 0 and 1"
        raise InputError(f"--variant {variant}: give a number {bounds}, such as {variant.name}:0.9")
    return value


def transformer_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer layers of an encoder, from the bottom up.

    Raises:
        InputError: the family has no list of them, or shares one among all.
    """
    encoder, config = model.base_model, model.config
    count = config.num_hidden_layers
    stacks = [
        module
        for name, module in encoder.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and name.split(".")[-1] in ("layer", "layers", "h")
    ]
    if len(stacks) != 1:
        raise InputError(
            f"{config.model_type} has no list of its {count} transformer layers (ALBERT "
            "shares one among all): variants that touch single layers do not fit it"
        )
    return stacks[0]


def embeddings(model: PreTrainedModel) -> Sequence[nn.Module]:
    """Part of an encoder below its layers: everything before the first of them."""
    encoder = model.base_model
    return [m for name, m in encoder.named_children() if "embed" in name.lower()]
