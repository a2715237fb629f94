"""The head over the vocabulary that a checkpoint was pretrained with.

Heads of masked language modelling are a small transform of a state and a linear decoder onto the
vocabulary: of BERT a dense layer, GELU and LayerNorm (Devlin et al. 2019, section 3.1), and so with
other families. They are taken apart at the decoder, so that a vocabulary may be gone through in
parts. Those of decoders are the norm behind the last layer and a linear output layer, which name
the token that follows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions as ModelOutput,
)

from bertvision.errors import InputError
from bertvision.featurestore.format.logits import TopLogits, TopRule
from bertvision.pipelines.encoders.loading import load_reported, read_config
from bertvision.pipelines.precision import device

Floats = npt.NDArray[np.float32]

_NEXT = (
    "take a checkpoint that was saved with it, such as google-bert/bert-base-uncased or "
    "FacebookAI/roberta-base"
)
_NEXT_DECODER = "take a decoder such as openai-community/gpt2 or google/gemma-3-270m"
_PROBED = 16  # tokens whose logits are compared
_TOLERANCE = 1e-4
_LOGITS_AT_ONCE = 1 << 25
"""Logits that are in memory at a time."""


class MlmHead:
    """Logits over the vocabulary, of hidden states of any layer; on the CPU, in float32.

    Args:
        transform: a masked language model that reads states as ``inputs_embeds``, and gives what
            its decoder would read as ``logits``.
        decoder: Layer behind the transform.

    Attributes:
        weight: (vocabulary, width) of the decoder.
    """

    def __init__(self, transform: PreTrainedModel, decoder: nn.Linear) -> None:
        self._transform = transform
        self.weight: Floats = decoder.weight.detach().numpy()
        bias = torch.zeros(len(self.weight)) if decoder.bias is None else decoder.bias.detach()
        self._bias: Floats = bias.numpy()

    def features(self, place: int, states: Floats) -> Floats:
        """Input of the decoder, (tokens, width), from (tokens, hidden) states.

        Args:
            place: Place of their layer on the layer axis; this head is the same for all.
            states: States of some tokens.
        """
        with torch.inference_mode():
            given = torch.from_numpy(np.ascontiguousarray(states)).unsqueeze(0)
            features: Floats = self._transform(inputs_embeds=given).logits.squeeze(0).numpy()
        return features

    def bias(self, place: int) -> Floats:
        """(vocabulary,) what the decoder adds; ``place`` is as in `features`."""
        return self._bias


class CausalHead:
    """Logits of the next token over the vocabulary, of hidden states of any layer of a decoder.

    Args:
        norm: Norm behind the last layer.
        output: Output layer.
        normed: Places on the layer axis whose states went through the norm already.

    Attributes:
        weight: (vocabulary, width) of the output layer.
    """

    def __init__(self, norm: nn.Module, output: nn.Linear, normed: Collection[int]) -> None:
        self._norm, self._normed = norm, frozenset(normed)
        self.weight: Floats = output.weight.detach().numpy()
        bias = torch.zeros(len(self.weight)) if output.bias is None else output.bias.detach()
        self._bias: Floats = bias.numpy()

    def features(self, place: int, states: Floats) -> Floats:
        """Input of the output layer, (tokens, hidden), from (tokens, hidden) states.

        Args:
            place: Place of their layer on the layer axis.
            states: States of some tokens.
        """
        if place in self._normed:
            return states
        with torch.inference_mode():
            features: Floats = self._norm(torch.from_numpy(np.ascontiguousarray(states))).numpy()
        return features

    def bias(self, place: int) -> Floats:
        """(vocabulary,) what the output layer adds; ``place`` is as in `features`."""
        return self._bias


class _Given(nn.Module):
    """Stands where the encoder was: its last hidden state is what it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> ModelOutput:
        return ModelOutput(last_hidden_state=inputs_embeds)


class NextTokens:
    """The most probable next tokens of each token, of the last hidden states of a decoder.

    What stands behind the decoder is applied by the model's own code, with the caps and scales that
    some families have.

    Args:
        model: Decoder with its output layer, which stays as it is.
        rule: Number of tokens that are kept.
        name: Its name in messages.

    Raises:
        InputError: It is no decoder, its vocabulary has fewer tokens, or its logits are not a
            function of its last hidden state.
    """

    def __init__(self, model: PreTrainedModel, rule: TopRule, name: str) -> None:
        self.rule = rule
        words = int(model.config.vocab_size)
        if not is_causal(model.config) or words < rule.k:
            raise InputError(
                f"--logits {rule}: {name} has {words:,} tokens in its vocabulary"
                if is_causal(model.config)
                else f"--logits {rule}: {name} does not name the token that follows; "
                f"{_NEXT_DECODER}"
            )
        self._head = copy(model)
        self._head._modules = dict(model._modules)
        setattr(self._head, model.base_model_prefix, _Given())
        self._most = max(1, _LOGITS_AT_ONCE // words)
        ids = torch.arange(min(_PROBED, words), device=model.device).unsqueeze(0)
        with torch.inference_mode():
            made = model(input_ids=ids, output_hidden_states=True)
            logits = self._head(inputs_embeds=made.hidden_states[-1]).logits
        apart = (logits - made.logits).abs().max() > _TOLERANCE * made.logits.abs().max()
        if bool(apart):
            raise InputError(
                f"--logits {rule}: the logits of {type(model).__name__} are not a function of the "
                f"last hidden state alone; {_NEXT_DECODER}"
            )

    def __call__(self, states: Tensor) -> TopLogits:
        """Kept log-probabilities, arrays of NumPy, of last hidden states, (tokens, hidden).

        In float32 whatever the caller computes in: a logit of 20 in bfloat16 is off by up to 0.06.
        """
        parts = []
        with torch.inference_mode(), torch.autocast(states.device.type, enabled=False):
            for some in states.float().split(self._most):
                logits = self._head(inputs_embeds=some.unsqueeze(0)).logits.squeeze(0)
                parts.append(self.rule.of(logits).map(lambda x: x.cpu().numpy()))
        return TopLogits.joined(parts)


def load_next_tokens(
    folder: Path, name: str, rule: TopRule, encoder: PreTrainedModel, *, same: bool
) -> NextTokens:
    """Load what stands behind a decoder that was saved without it.

    Args:
        folder: Folder of the checkpoint that it began as.
        name: Its name in messages.
        rule: Number of tokens that are kept.
        encoder: The decoder as it was saved.
        same: Whether its weights are still those of the checkpoint.

    Raises:
        InputError: The checkpoint has no output layer, or one of its own that was not saved with
            the snapshot; or as of `NextTokens`.
    """
    if not is_causal(encoder.config):
        raise InputError(
            f"--logits {rule}: {name} does not name the token that follows; {_NEXT_DECODER}"
        )
    model, missing = load_reported(folder, AutoModelForCausalLM)
    output = model.get_output_embeddings()
    if missing or output is None:
        raise InputError(f"{name} has no output layer over its vocabulary: {_NEXT_DECODER}")
    tied = output.weight is model.get_input_embeddings().weight
    if not same and not tied:
        raise InputError(
            f"--logits {rule}: the snapshot was saved without the output layer of {name}, which "
            "shares no weights with its embeddings: take the snapshot 0e, or a decoder that "
            "shares them"
        )
    setattr(model, model.base_model_prefix, encoder)
    model.tie_weights()
    whole: Any = model.eval()
    return NextTokens(whole.to(device()), rule, name)


def load_masked_model(folder: Path, name: str) -> PreTrainedModel:
    """Load a checkpoint with the MLM head that it was pretrained with.

    Args:
        folder: Folder of the checkpoint.
        name: Its name in messages.

    Raises:
        InputError: the family has no MLM head, or the checkpoint lacks its weights.
    """
    config = read_config(folder, name)
    if type(config) not in AutoModelForMaskedLM._model_mapping:
        raise InputError(
            f"{name} has no MLM head: {config.model_type} is not pretrained on masked tokens; "
            f"{_NEXT}"
        )
    model, missing = load_reported(folder, AutoModelForMaskedLM)
    if missing:
        shown = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        raise InputError(
            f"{name} has no MLM head: its weights lack {len(missing)} of the "
            f"{type(model).__name__}'s ({shown}); {_NEXT}"
        )
    return model


def load_mlm_head(folder: Path, name: str) -> MlmHead:
    """Load the MLM head of a checkpoint, and hold it to the model's own logits.

    Args:
        folder: Folder of the checkpoint.
        name: Its name in messages.

    Raises:
        InputError: as `load_masked_model`, or its logits are not a linear decoder's of the last
            hidden state.
    """
    model = load_masked_model(folder, name)
    ids = torch.arange(min(_PROBED, model.config.vocab_size)).unsqueeze(0)
    with torch.inference_mode():
        output = model(input_ids=ids, output_hidden_states=True)
    head = MlmHead(*taken_apart(model, name))
    features = head.features(0, output.hidden_states[-1].squeeze(0).numpy())
    own = output.logits.squeeze(0).numpy()
    logits = features @ head.weight.T + head.bias(0)
    if own.shape != logits.shape or np.abs(own - logits).max() > _TOLERANCE * np.abs(own).max():
        raise InputError(
            f"{name}: the logits of {type(model).__name__} are not a transform and a linear "
            f"decoder of its last hidden state, which is what can be applied to layers; {_NEXT}"
        )
    return head


def taken_apart(model: PreTrainedModel, name: str) -> tuple[PreTrainedModel, nn.Linear]:
    """The head of a masked language model, which is of no other use afterwards.

    Args:
        model: Model of `load_masked_model`.
        name: Its name in messages.

    Returns:
        The model without its encoder, which gives what the decoder would read for ``inputs_embeds``
        as ``logits``; and the decoder.

    Raises:
        InputError: what stands behind the head is no linear decoder.
    """
    decoder = model.get_output_embeddings()
    parents = [
        (module, key)
        for module in model.modules()
        for key, child in module.named_children()
        if child is decoder
    ]
    if not isinstance(decoder, nn.Linear) or len(parents) != 1:
        raise InputError(
            f"{name}: {type(model).__name__} has no linear decoder onto the vocabulary; {_NEXT}"
        )
    (parent, key) = parents[0]
    setattr(parent, key, nn.Identity())
    setattr(model, model.base_model_prefix, _Given())
    return model, decoder


def is_causal(config: PreTrainedConfig) -> bool:
    """Whether a family is pretrained to name the next token, and not masked ones."""
    kind = type(config)
    return (
        kind in AutoModelForCausalLM._model_mapping
        and kind not in AutoModelForMaskedLM._model_mapping
    )


def load_causal_head(folder: Path, name: str, layers: Sequence[int]) -> CausalHead:
    """Load the output layer of a decoder and the norm before it.

    They are held to the model's own logits.

    Args:
        folder: Folder of the checkpoint.
        name: Its name in messages.
        layers: Numbers of the hidden states that are read, in the order of their axis.

    Raises:
        InputError: the checkpoint lacks the weights, or its logits are not a linear layer's of the
            normed last state.
    """
    model, missing = load_reported(folder, AutoModelForCausalLM)
    output = model.get_output_embeddings()
    if missing or not isinstance(output, nn.Linear):
        raise InputError(f"{name} has no output layer over its vocabulary: {_NEXT_DECODER}")
    read: list[Tensor] = []
    norms: list[tuple[nn.Module, Tensor]] = []
    hooks = [output.register_forward_pre_hook(lambda _, given: read.append(given[0]))]
    hooks += [
        module.register_forward_hook(lambda m, _, given: norms.append((m, given)))
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
    ]
    ids = torch.arange(min(_PROBED, model.config.vocab_size)).unsqueeze(0)
    with torch.inference_mode():
        made = model(input_ids=ids, output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        norm = next((m for m, given in norms if torch.equal(given, read[-1])), None)
        logits = output(read[-1])
    apart = (logits - made.logits).abs().max() > _TOLERANCE * made.logits.abs().max()
    if norm is None or bool(apart):
        raise InputError(
            f"{name}: the logits of {type(model).__name__} are not those of a norm and a linear "
            f"layer behind its last state, which is what can be applied to layers; {_NEXT_DECODER}"
        )
    depth = len(made.hidden_states) - 1
    is_normed = torch.equal(made.hidden_states[-1], read[-1])
    normed = [place for place, layer in enumerate(layers) if is_normed and layer == depth]
    return CausalHead(norm, output, normed)
