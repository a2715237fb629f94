"""Run only the upper layers of an encoder, over a batch that it has seen whole.

A change in one layer leaves all below it as they were, so that what they gave is kept from the
whole pass and given again: the very tensors, so that the result is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.variants.variant import transformer_layers


class Replay:
    """What the layers of an encoder gave in the last whole pass.

    Args:
        layers: of the encoder, from the bottom up.

    Attributes:
        start: number of the first layer that computes, from 0: those below give what is kept, and
            nothing more is kept. None runs all layers, and keeps what they give.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.start: int | None = None
        self._computed = [layer.forward for layer in layers]
        self._kept: list[Any] = [None] * len(layers)

    def layer(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """What a layer gives, in the place of its own forward pass."""
        if self.start is None:
            self._kept[number] = self._computed[number](*args, **kwargs)
        elif number >= self.start:
            return self._computed[number](*args, **kwargs)
        return self._kept[number]


@contextmanager
def replayed(model: PreTrainedModel) -> Iterator[Replay]:
    """Let an encoder begin at any layer, with what those below gave in its last whole pass.

    Args:
        model: an encoder, with an output layer or without; when the block is left it is as it was.

    Yields:
        Where to begin. It changes nothing for a family that shares one layer among all (ALBERT),
        which always runs whole.
    """
    try:
        layers = [*transformer_layers(model)]
    except InputError:
        layers = []
    replay = Replay(layers)
    with ExitStack() as patches:
        for number, layer in enumerate(layers):
            patches.callback(_restore, layer, vars(layer).get("forward"))
            layer.forward = partial(replay.layer, number)
        yield replay


def _restore(layer: nn.Module, own: Any) -> None:
    """Give a layer the forward pass of its class back, or one of its own."""
    del layer.forward
    if own is not None:
        layer.forward = own
