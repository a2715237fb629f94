"""Lower layers that do not learn: Merchant et al. (2020, arXiv:2004.14448, section 5.2)."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.variants.variant import (
    Variant,
    embeddings,
    integer,
    transformer_layers,
)


class Freeze(Variant):
    """``freeze:K``: the embeddings and the K lowest layers keep their weights, without dropout.

    The hidden state k of a window is the same in every epoch: the one that a store
    of the pretrained encoder holds. ``freeze:0`` freezes the embeddings alone.
    """

    needs = "layers"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        if integer(self, 0) > layers:
            raise InputError(
                f"--variant {self}: the encoder has {layers} layers; freeze 0 to {layers}"
            )

    def _frozen(self, model: PreTrainedModel) -> list[nn.Module]:
        lower = list(transformer_layers(model))[: integer(self, 0)]
        return [*embeddings(model), *lower]

    @property
    def layers(self) -> int:
        """How many are frozen."""
        return integer(self, 0)

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        for module in self._frozen(model):
            module.requires_grad_(False)

    def train(self, model: PreTrainedModel) -> None:
        """See `Variant.train`."""
        for module in self._frozen(model):
            module.eval()


class FreezeStored(Freeze):
    """``freeze-stored:K``: the same, with hidden state K computed once and read from a store.

    Its gradients are those of `Freeze`, up to the rounding of what is stored: float32 where the
    training is in float32, bfloat16 where it is in bfloat16.
    """

    alone = "reads its states from a store that one process writes and removes"
