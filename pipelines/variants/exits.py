"""The task's loss at several layers at once, each with a small output layer of its own.

Lee et al. (2015, arXiv:1409.5185), *Deeply-Supervised Nets*; Xin et al. (2020, arXiv:2004.12993),
*DeeBERT*; Zhou et al. (2020, arXiv:2006.04152), *BERT Loses Patience* (PABEE); Xin et al. (2021),
*BERxiT: Early Exiting for BERT with Better Fine-Tuning*. The last layer has the task's own output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.models import Kind
from bertvision.models.outputs import ClassOutput, SpanOutput, pad_packed
from bertvision.pipelines.encoders.loading import Float32Linear
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Batch
from bertvision.pipelines.variants.depth import initialise
from bertvision.pipelines.variants.freezing import FreezeStored
from bertvision.pipelines.variants.variant import Groups, Variant

NAME = "exits"
"""Name of the output layers in the model, and first word of their tensors' names."""


class ExitLayers(nn.Module):
    """Output layers for hidden states below the last: a linear one each, which computes in float32.

    Args:
        layers: numbers of the hidden states.
        hidden: their width.
        outputs: classes, 1 of a score, 2 of spans (start and end).
        learned: Whether there are logits of the losses' weights, of the layers and the last one.
    """

    def __init__(
        self, layers: Sequence[int], hidden: int, outputs: int, *, learned: bool = False
    ) -> None:
        super().__init__()
        self.at = nn.ModuleDict({str(layer): Float32Linear(hidden, outputs) for layer in layers})
        self.scores = nn.Parameter(torch.zeros(len(layers) + 1)) if learned else None

    def forward(self, layer: int, states: Tensor, kind: Kind) -> SpanOutput | ClassOutput:
        """Logits of one of them.

        Args:
            layer: its number.
            states: States of that layer, (batch, seq, hidden); (batch, 1, hidden) is enough of
                classes.
            kind: Kind of the task: ``span`` reads every token, else the first is read.

        Returns:
            Logits (batch, seq) of start and end, or (batch, classes).
        """
        if kind != "span":
            return ClassOutput(self.at[str(layer)](states[:, 0]))
        start, end = self.at[str(layer)](states).unbind(-1)
        return SpanOutput(start, end)


class Exits(Variant):
    """``exits:LAYERS``: the mean of the losses at these layers and the last, weighted as it says.

    LAYERS are ``all``, or numbers between ``+``, each with a weight behind ``=`` where it is not 1:
    ``exits:4+8``, ``exits:4=0.5+8=1+12=2``. The loss is Σ w_l · L_l / Σ w_l. What has no weight is
    not computed: with weight on the last alone it is plain fine-tuning, bit for bit.
    """

    kinds = ("span", "classification")
    reads_cls = True
    needs = "layers"
    reads_states = True
    weighted: ClassVar[bool] = True
    """Whether the argument may have weights."""
    learned: ClassVar[bool] = False
    """Whether they are learned."""

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        self.weights(layers)

    def check_beside(self, others: Sequence[Variant], layers: int) -> None:
        """See `Variant.check_beside`."""
        lowest = min(self.weights(layers))
        for other in others:
            if isinstance(other, Exits) and other is not self:
                raise InputError(f"--variant {self},{other}: leave one of the two out")
            if isinstance(other, FreezeStored) and lowest < other.layers:
                raise InputError(
                    f"--variant {self}: with {other} layer {lowest} is not run; take "
                    f"freeze:{other.layers}, or layers from {other.layers} on"
                )

    def weights(self, depth: int) -> dict[int, float]:
        """The weight of the loss at each layer before anything is learned; the last one last.

        Args:
            depth: transformer layers of the encoder.

        Returns:
            By layer, ascending; they sum to 1.

        Raises:
            InputError: the argument does not name layers of such an encoder.
        """
        text = str(self.argument)
        parts = [str(n) for n in range(1, depth)] if text == "all" else text.split("+")
        weights: dict[int, float] = {}
        try:
            for part in parts:
                layer, equals, weight = part.partition("=")
                if equals and not self.weighted:
                    raise ValueError
                value = float(weight) if equals else 1.0
                if (
                    not 1 <= int(layer) <= depth
                    or int(layer) in weights
                    or not 0 <= value < math.inf
                ):
                    raise ValueError
                weights[int(layer)] = value
        except ValueError:
            weights = {}
        weights.setdefault(depth, 1.0)
        if len(weights) < 2 or not weights[depth]:
            shape = "LAYER=WEIGHT+LAYER" if self.weighted else "LAYER+LAYER"
            raise InputError(
                f"--variant {self}: give {self.name}:all or {self.name}:{shape}, with some of the "
                f"layers 1 to {depth - 1} once each; layer {depth}, the last, has the task's own "
                "output layer" + (", whose weight must be above 0" * self.weighted)
            )
        total = sum(weights.values())
        return {layer: weights[layer] / total for layer in sorted(weights)}

    def build(self, model: PreTrainedModel) -> None:
        """See `Variant.build`."""
        config = model.config
        *layers, _ = self.weights(config.num_hidden_layers)
        outputs = config.num_labels or 2
        exits = ExitLayers(layers, config.hidden_size, outputs, learned=self.learned)
        initialise(model, exits)
        model.add_module(NAME, exits.to(next(model.parameters()).device))
        self.state = tuple(f"{NAME}.{key}" for key in exits.state_dict())

    def loss(
        self, model: PreTrainedModel, task: Task, batch: Batch, output: Any, loss: Tensor
    ) -> Tensor:
        """See `Variant.loss`."""
        depth, exits = model.config.num_hidden_layers, exits_of(model)
        losses = {}
        for layer, weight in self.weights(depth).items():
            if layer < depth and weight:
                states = self.read(output.hidden_states[layer - depth - 1])
                losses[layer] = task.loss(exits(layer, states, task.kind), batch)
        return self.joined(exits, {**losses, depth: loss}, len(batch.input_ids))

    def read(self, states: Tensor) -> Tensor:
        """Input of an output layer from the states of its layer."""
        return states

    def joined(self, exits: ExitLayers, losses: Mapping[int, Tensor], windows: int) -> Tensor:
        """The losses as one.

        Args:
            exits: Exits of the model.
            losses: Losses by layer, ascending, each summed over the windows of a batch; the last
                one last.
            windows: Their number.
        """
        weights = self.weights(max(losses))
        return torch.stack([weights[layer] * loss for layer, loss in losses.items()]).sum()


class ExitsByDepth(Exits):
    """``exits-by-depth:LAYERS``: the weight of each loss is the number of its layer.

    Zhou et al. (2020): upper layers, which most inputs leave from, count the most.
    """

    weighted = False

    def weights(self, depth: int) -> dict[int, float]:
        """See `Exits.weights`."""
        layers = super().weights(depth)
        return {layer: layer / sum(layers) for layer in layers}


class ExitsLearned(Exits):
    """``exits-learned:LAYERS``: the weights of the losses are learned beside all else.

    The weights w = softmax(a) of K losses begin equal, and Σ w_l · L_l − (Σ log w_l) / K is
    minimised: the weighting of losses by their uncertainty, of Kendall et al. (2018,
    arXiv:1705.07115, section 3.2), with weights that are held to the sum 1. Where losses stay as
    they are it ends at w_l = 1 / (K · (1 + L_l − Σ w_l · L_l)): easier layers count more, and the
    logarithm keeps the others from vanishing.
    """

    weighted = False
    learned = True

    def groups(self, model: PreTrainedModel, groups: Groups) -> Groups:
        """See `Variant.groups`."""
        own = exits_of(model).scores
        assert own is not None
        rest = [
            {**group, "params": [p for p in group["params"] if p is not own]} for group in groups
        ]
        return [*rest, {"params": [own], "weight_decay": 0.0, "scale": _RATE}]

    def joined(self, exits: ExitLayers, losses: Mapping[int, Tensor], windows: int) -> Tensor:
        """See `Exits.joined`."""
        assert exits.scores is not None
        logs = exits.scores.log_softmax(0)
        even = -logs.mean() - math.log(len(logs))  # 0 of equal weights
        return torch.stack([*losses.values()]) @ logs.exp() + windows * even


_RATE = 1000.0
"""Times the learning rate, for logits of weights: Adam moves each by about the rate in a step."""


class ExitsDetached(Exits):
    """``exits-detached:LAYERS``: the encoder hears of the last loss alone, and the others listen.

    As DeeBERT trains its exits, whose encoder is fixed by then (Xin et al. 2020, section 3.1): what
    the last layer says is that of plain fine-tuning, bit for bit.
    """

    weighted = False

    def read(self, states: Tensor) -> Tensor:
        """See `Exits.read`."""
        return states.detach()

    def joined(self, exits: ExitLayers, losses: Mapping[int, Tensor], windows: int) -> Tensor:
        """See `Exits.joined`."""
        return torch.stack([*losses.values()]).sum()


def exits_of(model: PreTrainedModel) -> ExitLayers:
    """The output layers that a model has beside that of its task."""
    exits = getattr(model, NAME)
    assert isinstance(exits, ExitLayers)
    return exits


class ExitHead(nn.Module):
    """An output layer as a head of packed hidden states.

    Args:
        exits: Output layers.
        place: Place of its layer on the axis of layers.
        layer: Number of its layer.
        kind: Kind of the task.
    """

    def __init__(self, exits: ExitLayers, place: int, layer: int, kind: Kind) -> None:
        super().__init__()
        self.exits, self.place, self.layer, self.kind = exits, place, layer, kind

    def forward(self, states: Tensor, lengths: Tensor) -> SpanOutput | ClassOutput:
        """Logits of packed hidden states (tokens, layers, hidden), with lengths (batch,)."""
        padded = pad_packed(states[:, self.place], lengths, fill=0.0)
        return self.exits.forward(self.layer, padded, self.kind)
