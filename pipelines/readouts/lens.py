"""A head over the vocabulary for each layer, trained from the store: the lens that fits its layer.

The head of the checkpoint reads the last layer; what it misses in another may be there in other
coordinates. So each layer gets an affine map of its own onto the input embeddings of the encoder,
to which the decoder is tied: logits = E(W h + b) + c, with E fixed (as the translators of Belrose
et al. 2023, *Eliciting latent predictions from transformers with the tuned lens*, which however
learn to agree with the last layer). It learns to name the token itself, which was not masked, from
its state after heavy dropout, so that it does not lean on a few channels. The loss is convex in W,
b and c, which begin at zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.precision import device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.readouts.batched import FixedEpochs, Ints, Readout, Stack
from bertvision.pipelines.readouts.batched import train as train_batched
from bertvision.pipelines.readouts.inputs import Float32s
from bertvision.pipelines.readouts.options import LensOptions

BATCH_TOKENS = 512
"""About so many tokens to a step: bounds the logits of a layer, 63 MB of 30,522 words."""


def words_of(split: ActivationSplit) -> Ints:
    """(tokens,) vocabulary index of each token, in the order of ``split.dask()``.

    Raises:
        InputError: the split keeps a vector for each window, or does not say which words it is of.
    """
    tokens = split.record.provenance.get("tokens", "all")
    if tokens != "all" or "input_ids" not in split.record.arrays:
        raise InputError(
            f"{split.name} does not keep the states of all tokens beside their words (tokens: "
            f"{tokens}): name a split that was extracted without --pool"
        )
    lengths = split.require_all_tokens().plan.n_tokens.astype(np.int64)
    before = np.cumsum(lengths) - lengths
    rows = np.repeat(split.plan.first_token - before, lengths) + np.arange(lengths.sum())
    words: Ints = split.array("input_ids")[rows].astype(np.int64)
    return words


class TrainedLens:
    """The trained heads of all layers; a `Decoder`.

    Args:
        weight: (vocabulary, width) input embeddings.
        maps: W (width, hidden), b (width,) and c (vocabulary,) of each layer.
    """

    def __init__(self, weight: Float32s, maps: list[tuple[Float32s, Float32s, Float32s]]) -> None:
        self.weight = weight
        self._maps = maps

    def features(self, place: int, states: Float32s) -> Float32s:
        """(tokens, width) of (tokens, hidden) states of the layer at ``place``."""
        matrix, offset, _ = self._maps[place]
        features: Float32s = states @ matrix.T + offset
        return features

    def bias(self, place: int) -> Float32s:
        """(vocabulary,) of the layer at ``place``."""
        return self._maps[place][2]


class _Batch(NamedTuple):
    states: Tensor
    """(tokens, layers, hidden)"""
    words: Tensor
    """(tokens,)"""


class _Heads(Readout[_Batch]):
    """A head for each layer; the logits of one layer are held at a time.

    Args:
        layers: Number of layers.
        hidden: Width of a hidden state.
        tied: (vocabulary, width) input embeddings.
        options: Settings of the training.
    """

    def __init__(self, layers: int, hidden: int, tied: Tensor, options: LensOptions) -> None:
        self.count, self._hidden, self._tied = layers, hidden, tied
        self._dropout = options.dropout
        self._random = torch.Generator(tied.device).manual_seed(options.seed)

    def start(self, seed: int) -> list[Tensor]:
        """W, b and c of all layers, which are zero."""
        words, width = self._tied.shape
        shapes = (width, self._hidden), (width,), (words,)
        return [torch.zeros(self.count, *shape) for shape in shapes]

    def gradients(
        self, parameters: list[Tensor], which: Tensor, batch: _Batch
    ) -> list[Tensor] | None:
        """See `Readout`."""
        if not len(batch.states):
            return None
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        for i in range(self.count):
            own = [p[i].detach().requires_grad_() for p in parameters]
            matrix, offset, bias = own
            states = dropped(batch.states[:, i], self._dropout, self._random)
            features = torch.addmm(offset, states, matrix.T)
            loss = F.cross_entropy(torch.addmm(bias, features, self._tied.T), batch.words)
            if not torch.isfinite(loss):
                raise NonFiniteError(
                    f"the loss of the layer at place {i} of those stored is {loss.item()}: check "
                    "the activations with `bertvision store verify`, or give a lower learning rate"
                )
            for gradient, slope in zip(gradients, torch.autograd.grad(loss, own), strict=True):
                gradient[i] = slope
        return gradients


def train_lens(
    split: ActivationSplit, asked: Ints, embeddings: Tensor, options: LensOptions
) -> TrainedLens:
    """Train the heads of all layers, in as few passes over the store as the steps take.

    Args:
        split: A complete split with all tokens of its examples.
        asked: (tokens of the split,) word of each token in stored order; negative ones are not
            learned from.
        embeddings: (vocabulary, width) input embeddings of the encoder.
        options: Settings of the training.

    Raises:
        InputError: an option is out of range, or no token is to be learned from.
        NonFiniteError: the loss of a layer is NaN or infinite.
    """
    if options.steps < 1 or not 0 <= options.dropout < 1 or not options.lr > 0:
        raise InputError(
            f"{options.steps} steps at a learning rate of {options.lr} with dropout "
            f"{options.dropout}: give 1 step or more, a rate above 0, and dropout from 0 to below 1"
        )
    if not (asked >= 0).any():
        raise InputError(f"{split.name} holds special tokens alone: there is no word to be learned")
    where, layers = device(), len(split.record.layers)
    tied = embeddings.detach().to(where, torch.float32)
    examples = max(1, round(BATCH_TOKENS * len(split) / split.record.tokens))
    loader = ActivationLoader(split, batch_size=examples, seed=options.seed)
    starts = np.cumsum(split.plan.n_tokens, dtype=np.int64) - split.plan.n_tokens

    stack = Stack(
        _Heads(layers, split.record.hidden_size, tied, options),
        options.seed,
        partial(torch.optim.Adam, lr=options.lr),
        FixedEpochs(np.ones(layers, np.int64)),
        where,
    )
    schedule = LambdaLR(stack.optimiser, lambda step: 1 - step / options.steps)

    def passes() -> Iterator[_Batch]:
        while True:
            for batch in loader:
                rows = [
                    np.arange(starts[i], starts[i] + split.plan.n_tokens[i])
                    for i in batch.examples.numpy()
                ]
                words = torch.from_numpy(asked[np.concatenate(rows)]).to(where)
                states = batch.to(where).hidden_states
                bar.update()
                yield _Batch(states[words >= 0], words[words >= 0])
                schedule.step()

    with progress(options.steps, "trained lens", "step") as bar:
        train_batched([stack], lambda epoch: islice(passes(), options.steps), epochs=1)
    matrices, offsets, biases = (p.cpu().numpy() for p in stack.best)
    return TrainedLens(tied.cpu().numpy(), list(zip(matrices, offsets, biases, strict=True)))


def dropped(states: Tensor, share: float, random: torch.Generator) -> Tensor:
    """States of which a share of the channels is zero, each by itself; the others make up for it.

    Args:
        states: (tokens, hidden)
        share: Share of the channels, from 0 to below 1.
        random: Generator of their device.
    """
    is_kept = torch.rand(states.shape, generator=random, device=states.device) >= share
    return states * is_kept / (1 - share)
