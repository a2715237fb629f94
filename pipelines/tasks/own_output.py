"""An encoder of any family with an output layer of a task's own, where transformers has none.

The layer reads the whole last hidden state and the marks of the windows (`Windows.marks`). The
pooler, which only classes of [CLS] need, is left out, as of spans.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from bertvision.errors import InputError


class OutputLayer(nn.Module):
    """Output layer on an encoder: made with its configuration, called with its last hidden state.

    It returns a NamedTuple with a field ``logits``, and ``hidden_states`` and ``attentions``, which
    are None until those of the encoder are put there. Its weights are those of linear layers: they
    begin as N(0, 0.02) in every family, with biases of 0.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    """Names of the marks that it is called with as keywords, (batch, seq) int64 each."""


class OwnOutput:
    """Stands where an ``AutoModelFor…`` of transformers would, for one output layer.

    Args:
        layer: class of the output layer.
    """

    def __init__(self, layer: type[OutputLayer]) -> None:
        self.layer = layer

    def from_pretrained(self, folder: Path, **options: Any) -> Any:
        """The encoder of a checkpoint with the layer; options as of ``PreTrainedModel``'s own."""
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return _model_class(cast(Any, type(config)), cast(Any, self.layer)).from_pretrained(
            folder, **options
        )

    def from_config(self, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
        """The encoder that a configuration describes with the layer, both with random weights."""
        options.pop("trust_remote_code", None)  # there is no other code
        kind = _model_class(cast(Any, type(config)), cast(Any, self.layer))
        return cast(PreTrainedModel, kind._from_config(config, **options))


@cache
def _model_class(config: type[PreTrainedConfig], layer: type[OutputLayer]) -> type[PreTrainedModel]:
    """The family's encoder with the layer, as a class of its own.

    Raises:
        InputError: the family has no class that its models with output layers share.
    """
    model_class = AutoModel._model_mapping[config]
    encoder: Any = model_class[0] if isinstance(model_class, tuple) else model_class
    family: Any = encoder.__mro__[1]
    if not issubclass(family, PreTrainedModel) or family is PreTrainedModel:
        raise InputError(
            f"{encoder.__name__} has no class that it shares with models that have an output layer:"
            " take an encoder of another family, such as bert-base-uncased"
        )
    pooler = "add_pooling_layer" in inspect.signature(encoder.__init__).parameters

    class WithOutput(family):  # type: ignore[misc]
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            without = {"add_pooling_layer": False} if pooler else {}
            setattr(self, self.base_model_prefix, encoder(config, **without))
            self.output_layer = layer(config)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            # a family may know its own modules alone, and leave others as they lie in memory
            if isinstance(module, nn.Linear) and module in set(self.output_layer.modules()):
                init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    init.zeros_(module.bias)
            else:
                super()._init_weights(module)

        def forward(self, **inputs: Any) -> Any:
            marks = {name: inputs.pop(name) for name in layer.reads}
            states = self.base_model(**inputs)
            output = self.output_layer(states.last_hidden_state, **marks)
            return output._replace(
                hidden_states=getattr(states, "hidden_states", None),
                attentions=getattr(states, "attentions", None),
            )

    WithOutput.__name__ = WithOutput.__qualname__ = f"{encoder.__name__}With{layer.__name__}"
    return WithOutput
