"""Few new weights inside an encoder that keeps its own: LoRA, and Houlsby's adapters.

Hu et al. (2022, arXiv:2106.09685), *LoRA: Low-Rank Adaptation of Large Language Models*; Houlsby et
al. (2019, arXiv:1902.00751), *Parameter-Efficient Transfer Learning for NLP*. The output layer, and
the pooler as a part of it, are trained with them: they are new to every task.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.variants.variant import Variant, integer, transformer_layers

_QUERY_AND_VALUE = (
    *("query", "value", "query_proj", "value_proj", "q", "v", "q_lin", "v_lin"),
    *("q_proj", "v_proj"),  # Llama and what follows its code
)
_FUSED = ("Wqkv", "in_proj")
"""Where query, key and value are one matrix."""
_SUBLAYERS = (
    ("attention.output.dense", "output.dense"),  # BERT and what follows its code
    ("attention.attn.o", "output.dense"),  # MPNet
    ("attention.out_lin", "ffn.lin2"),  # DistilBERT
    ("attn.Wo", "mlp.Wo"),  # ModernBERT
)
"""The last projection of attention and of the feed-forward network, inside a layer."""


class Lora(Variant):
    """``lora:R``: products of rank R are added to the weights of query and value, and trained.

    W + B·A, with A as `peft` initialises it and B of zeros (Hu et al., 4.1; α = R, so that nothing
    is rescaled, as they have it for RoBERTa). A snapshot holds the sum: an encoder like any other.
    """

    needs = "rank"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        integer(self, 1)
        _peft()

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        names = _linear(model, _QUERY_AND_VALUE) or _linear(model, _FUSED)
        if not names:
            raise InputError(
                f"--variant {self}: {model.config.model_type} has no linear layer of queries and "
                "values by a name that is known here; take another encoder, or houlsby"
            )
        rank, peft = integer(self, 1), _peft()
        model.base_model.requires_grad_(False)
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names)
        peft.inject_adapter_in_model(config, model)
        _train_what_reads_it(model)

    def whole(self, model: PreTrainedModel) -> PreTrainedModel:
        """See `Variant.whole`: a copy with the products in the weights."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        merged = copy.deepcopy(model)
        modules = [(n, m) for n, m in merged.named_modules() if isinstance(m, BaseTunerLayer)]
        for name, module in modules:
            module.merge(safe_merge=True)
            parent, _, last = name.rpartition(".")
            setattr(merged.get_submodule(parent), last, module.get_base_layer())
        return merged


class Houlsby(Variant):
    """``houlsby:D``: a bottleneck of D units behind each sublayer, trained with the LayerNorms.

    x + U·gelu(D·x + b) + c of what attention and the feed-forward network give, before it is added
    to their input (Houlsby et al., figure 2). It begins next to the identity: weights are of
    deviation 0.001, as in the authors' code. Theirs stand behind the dropout of the
    sublayer, these in front of it, where all families have a place.
    """

    needs = "units"

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        integer(self, 1)

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        self._places(model)
        model.base_model.requires_grad_(False)
        _train_what_reads_it(model)
        for layer in transformer_layers(model):
            for module in layer.modules():
                if isinstance(module, nn.LayerNorm):
                    module.requires_grad_(True)

    def build(self, model: PreTrainedModel) -> None:
        """See `Variant.build`."""
        names = self._places(model)
        for name in names:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            new = Bottleneck(linear.out_features, integer(self, 1))
            linear.add_module("bottleneck", new.to(linear.weight.device))
            linear.register_forward_hook(_through)
        keys = ("down.weight", "down.bias", "up.weight", "up.bias")
        self.state = tuple(f"{name}.bottleneck.{key}" for name in names for key in keys)

    def _places(self, model: PreTrainedModel) -> Sequence[str]:
        """Names of the projections that a bottleneck stands behind."""
        known = {id(module): name for name, module in model.named_modules()}
        places: list[str] = []
        for layer in transformer_layers(model):
            inside = dict(layer.named_modules())
            pair = next(
                (names for names in _SUBLAYERS if all(name in inside for name in names)), None
            )
            if pair is None:
                raise InputError(
                    f"--variant {self}: the layers of {model.config.model_type} have no sublayers "
                    "by names that are known here; take another encoder, or lora"
                )
            places += [known[id(inside[name])] for name in pair]
        return places


class Bottleneck(nn.Module):
    """x + up(gelu(down(x))) over vectors of one width."""

    def __init__(self, width: int, units: int) -> None:
        """Take vectors of ``width`` channels through ``units``."""
        super().__init__()
        self.down, self.up = nn.Linear(width, units), nn.Linear(units, width)
        for linear in (self.down, self.up):
            nn.init.trunc_normal_(linear.weight, std=1e-3, a=-2e-3, b=2e-3)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) of (…, width)."""
        raised: Tensor = self.up(F.gelu(self.down(x)))
        return x + raised


def _through(linear: nn.Module, args: Any, output: Tensor) -> Tensor:
    bottleneck = linear.bottleneck
    assert isinstance(bottleneck, Bottleneck)
    through: Tensor = bottleneck(output)
    return through


def _linear(model: PreTrainedModel, last: Sequence[str]) -> list[str]:
    """Names of the linear layers inside the transformer layers that end in one of these."""
    inside = {id(module) for layer in transformer_layers(model) for module in layer.modules()}
    return [
        name
        for name, module in model.named_modules()
        if id(module) in inside
        and isinstance(module, nn.Linear)
        and name.rpartition(".")[2] in last
    ]


def _train_what_reads_it(model: PreTrainedModel) -> None:
    """The output layer, and the pooler where the encoder has one."""
    encoder = {id(p) for p in model.base_model.parameters()}
    pooler = getattr(model.base_model, "pooler", None)
    read = [p for p in model.parameters() if id(p) not in encoder]
    for parameter in [*read, *(pooler.parameters() if pooler is not None else [])]:
        parameter.requires_grad_(True)


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise InputError("--variant lora needs PEFT: `pip install bertvision[peft]`") from None
    return peft
