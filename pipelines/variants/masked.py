"""A masked-language loss beside the loss of the task, on the same texts.

An auxiliary language model was a part of fine-tuning in Radford et al. (2018, *Improving Language
Understanding by Generative Pre-Training*, section 3.2), and Sun et al. (2019, arXiv:1905.05583) and
Gururangan et al. (2020, arXiv:2004.10964) found more of pretraining on the task's texts to help.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PreTrainedModel

from bertvision.errors import InputError
from bertvision.models.outputs import without_autocast
from bertvision.pipelines.encoders.loading import (
    PretrainedEncoder,
    keep_outputs_in_float32,
    load_tokenizer,
)
from bertvision.pipelines.encoders.vocabulary_head import load_masked_model, taken_apart
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Batch
from bertvision.pipelines.variants.variant import Variant

NAME = "mlm"
"""Name of the head in the model, and first word of its tensors' names."""
SHARE, MASKED, RANDOM = 0.15, 0.8, 0.1
"""Parts: of a window's tokens those that are guessed; of these masked and replaced ones."""


class MaskedLanguage(Variant):
    """``mlm:WEIGHT``: WEIGHT times the loss of masked words is added to that of the task.

    In every step the texts of the batch run a second time with 15 % of their words masked as in
    pretraining (Devlin et al. 2019, section 3.1); the loss of a window is the mean over its masked
    words, through the MLM head that the checkpoint was pretrained with, whose decoder is the word
    embeddings.
    """

    needs = "weight"

    def __init__(self, name: str, argument: str | None) -> None:
        """See `Variant`."""
        super().__init__(name, argument)
        self._head: TiedHead | None = None

    @property
    def weight(self) -> float:
        """How much the masked-language loss counts.

        Raises:
            InputError: the argument is no number above 0.
        """
        try:
            value = float(str(self.argument))
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise InputError(f"--variant {self}: give a number above 0, such as {self.name}:0.5")
        return value

    def check(self, layers: int) -> None:
        """See `Variant.check`."""
        _ = self.weight

    def check_checkpoint(self, checkpoint: PretrainedEncoder) -> None:
        """See `Variant.check_checkpoint`."""
        name = checkpoint.name_or_path
        if load_tokenizer(checkpoint.folder).mask_token_id is None:
            raise InputError(
                f"--variant {self}: the tokenizer of {name} has no mask token; take a checkpoint "
                "that was pretrained on masked words, such as google-bert/bert-base-uncased"
            )
        model = load_masked_model(checkpoint.folder, name)
        decoder = model.get_output_embeddings()
        if decoder is None or decoder.weight is not model.get_input_embeddings().weight:
            raise InputError(
                f"--variant {self}: the decoder of {name}'s MLM head is not its word embeddings, "
                "so that it cannot learn with them; take a checkpoint where the two are tied, such "
                "as google-bert/bert-base-uncased"
            )
        taken_apart(model, name)

    def begin(self, model: PreTrainedModel) -> None:
        """See `Variant.begin`."""
        if self.checkpoint is None:  # as random as the rest
            masked = AutoModelForMaskedLM.from_config(model.config, trust_remote_code=False)
            self._head = _head(masked)
        else:
            self._head = _head(load_masked_model(self.checkpoint, str(self.checkpoint)))
            self._head.masking = Masking.of(load_tokenizer(self.checkpoint))

    def build(self, model: PreTrainedModel) -> None:
        """See `Variant.build`."""
        head = self._head
        if head is None:  # whose values a snapshot has
            with torch.device("meta"):
                config = model.config
                masked = AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
            head = _head(masked).to_empty(device="cpu")
        model.add_module(NAME, head.to(next(model.parameters()).device))
        self.state = tuple(f"{NAME}.{key}" for key in head.state_dict())

    def loss(
        self, model: PreTrainedModel, task: Task, batch: Batch, output: Any, loss: Tensor
    ) -> Tensor:
        """See `Variant.loss`."""
        masking = head_of(model).masking
        assert masking is not None  # what is trained has begun
        masked = masked_words(batch.input_ids, batch.attention_mask.bool(), masking)
        return loss + self.weight * masked_loss(model, batch, *masked)


class Masking(NamedTuple):
    """Facts about a tokenizer that masking needs."""

    mask: int
    """Vocabulary index of the mask."""
    special: tuple[int, ...]
    """Vocabulary indices that are never chosen."""
    words: int
    """Size of the vocabulary."""

    @classmethod
    def of(cls, tokenizer: Any) -> Masking:
        """Facts about a tokenizer with a mask token."""
        special = tuple(sorted(tokenizer.all_special_ids))
        return cls(int(tokenizer.mask_token_id), special, len(tokenizer))


class TiedHead(nn.Module):
    """An MLM head without its decoder's weight, which is that of the word embeddings.

    Args:
        transform: Step of the head before the decoder (see `taken_apart`).
        decoder: Decoder whose bias it takes; the weight it is given whenever it is called.

    Attributes:
        masking: Masking of words for it, while it is trained.
    """

    def __init__(self, transform: PreTrainedModel, decoder: nn.Linear) -> None:
        super().__init__()
        for module in transform.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter is decoder.bias:  # another name of the same
                    module.register_parameter(name, None)
        self.transform = transform
        self.masking: Masking | None = None
        self.bias: nn.Parameter | None = decoder.bias

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        """Logits (tokens, vocabulary), float32.

        Args:
            states: last hidden states, (tokens, hidden).
            weight: Weight of the word embeddings, (vocabulary, width).
        """
        features = self.transform(inputs_embeds=states.unsqueeze(0)).logits.squeeze(0)
        with without_autocast(features):
            return F.linear(features.float(), weight.float(), self.bias)


def masked_words(input_ids: Tensor, real: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
    """Choose and mask words as the code of Devlin et al. (2019) does.

    Of every window 15 % of its tokens are chosen, one at least, special ones aside. Of these 80 %
    become the mask, 10 % a random word, and 10 % stay. Draws come from torch's generator of the
    CPU.

    Args:
        input_ids: (batch, seq)
        real: (batch, seq) where there is no padding.
        masking: Tokenizer whose mask it is.

    Returns:
        The indices with masks, and which were chosen, (batch, seq) each, on the device of
        ``input_ids``.
    """
    where = input_ids.device
    ids, special = input_ids.cpu(), torch.tensor(masking.special)
    free = real.cpu() & ~torch.isin(ids, special)
    there = free.sum(1, keepdim=True)
    wanted = (SHARE * there).round().clamp_min(1).minimum(there)
    order = torch.rand(ids.shape).masked_fill(~free, 2.0).argsort(1).argsort(1)
    chosen, fate = order < wanted, torch.rand(ids.shape)
    drawn = torch.randint(masking.words, ids.shape)
    changed = torch.where(
        fate < MASKED, masking.mask, torch.where(fate < MASKED + RANDOM, drawn, ids)
    )
    return torch.where(chosen, changed, ids).to(where), chosen.to(where)


def masked_loss(model: PreTrainedModel, batch: Batch, ids: Tensor, chosen: Tensor) -> Tensor:
    """The mean cross-entropy of the chosen words of each window, summed over the windows, ().

    Args:
        model: Model with a `TiedHead`.
        batch: the windows as they are.
        ids: (batch, seq) the same with masks.
        chosen: (batch, seq) which words are guessed.
    """
    states = model.base_model(**{**batch.text, "input_ids": ids}).last_hidden_state[chosen]
    weight = model.get_input_embeddings().weight
    logits = head_of(model)(states, weight)
    losses = F.cross_entropy(logits, batch.input_ids[chosen], reduction="none")
    counts = chosen.sum(1, keepdim=True).expand_as(chosen)[chosen]
    return (losses / counts).sum()


def head_of(model: PreTrainedModel) -> TiedHead:
    """The MLM head that a model has beside the output layer of its task."""
    head = getattr(model, NAME)
    assert isinstance(head, TiedHead)
    return head


def _head(model: PreTrainedModel) -> TiedHead:
    """The head of a masked language model, which is of no other use afterwards."""
    keep_outputs_in_float32(model)
    return TiedHead(*taken_apart(model, model.config.model_type)).eval()
