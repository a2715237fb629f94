"""Encoders with fewer or more layers: the lowest alone, the last copied, new ones on top.

Cutting: Merchant et al. (2020, arXiv:2004.14448, section 5.3) and Sajjad et al. (2020,
arXiv:2004.03844), *On the Effect of Dropping Layers of Pre-trained Transformer Models*.
"""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.variants.variant import Variant, integer, transformer_layers


def _set_layers(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Put these layers in the place of those that there are."""
    there, config = transformer_layers(model), model.config
    if getattr(config, "layer_types", None):
        raise InputError(
            f"the layers of {config.model_type} are of different types, in a fixed order: none can "
            "be taken away or added"
        )
    del there[:]
    there.extend(layers)
    config.num_hidden_layers = len(layers)  # the encoder has the same object


class Keep(Variant):
    """``keep:K``: the first K layers alone; the encoder is one of K layers."""

    needs = "layers"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        if integer(self, 1) >= layers:
            raise InputError(
                f"--variant {self}: the encoder has {layers} layers; keep 1 to {layers - 1}"
            )

    def depth(self, layers: int) -> int:
        """See `Variant.depth`."""
        return integer(self, 1)

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        _set_layers(model, list(transformer_layers(model))[: integer(self, 1)])


class Drop(Variant):
    """``drop:N``: without the last N layers; the same as keeping the others."""

    needs = "layers"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        if integer(self, 1) >= layers:
            raise InputError(
                f"--variant {self}: the encoder has {layers} layers; drop 1 to {layers - 1}"
            )

    def depth(self, layers: int) -> int:
        """See `Variant.depth`."""
        return layers - integer(self, 1)

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        _set_layers(model, list(transformer_layers(model))[: -integer(self, 1)])


class Copy(Variant):
    """``copy:N``: the last N layers once more on top of themselves, with the same weights."""

    needs = "layers"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        if integer(self, 1) > layers:
            raise InputError(
                f"--variant {self}: the encoder has {layers} layers; copy 1 to {layers}"
            )

    def depth(self, layers: int) -> int:
        """See `Variant.depth`."""
        return layers + integer(self, 1)

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        there = list(transformer_layers(model))
        _set_layers(model, there + [copy.deepcopy(layer) for layer in there[-integer(self, 1) :]])


class Extra(Variant):
    """``extra:N``: N layers on top, with new weights as the encoder's library initialises them."""

    needs = "layers"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        integer(self, 1)

    def depth(self, layers: int) -> int:
        """See `Variant.depth`."""
        return layers + integer(self, 1)

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        there = list(transformer_layers(model))
        new = [copy.deepcopy(there[-1]) for _ in range(integer(self, 1))]
        for layer in new:
            initialise(model, layer)
        _set_layers(model, there + new)


def initialise(model: PreTrainedModel, part: nn.Module) -> None:
    """Give a part of a model new weights, as the model's own library initialises them.

    Args:
        model: Model whose rule it is.
        part: a module of it, or made like one.
    """
    for module in part.modules():
        vars(module)["_is_hf_initialized"] = False  # transformers leaves alone what it loaded
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = False  # type: ignore[attr-defined]
        model._init_weights(module)
