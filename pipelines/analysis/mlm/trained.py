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

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.analysis.mlm.options import LensOptions
from bertvision.pipelines.analysis.mlm.sums import Floats
from bertvision.pipelines.precision import device
from bertvision.pipelines.progress import progress

BATCH_TOKENS = 512
"""About so many tokens to a step: bounds the logits of a layer, 63 MB of 30,522 words."""


class TrainedLens:
    """The trained heads of all layers; a `Decoder`.

    Args:
        weight: (vocabulary, width) input embeddings.
        maps: of each layer W (width, hidden), b (width,) and c (vocabulary,).
    """

    def __init__(self, weight: Floats, maps: list[tuple[Floats, Floats, Floats]]) -> None:
        self.weight = weight
        self._maps = maps

    def features(self, place: int, states: Floats) -> Floats:
        """(tokens, width) of (tokens, hidden) states of the layer at ``place``."""
        matrix, offset, _ = self._maps[place]
        found: Floats = states @ matrix.T + offset
        return found

    def bias(self, place: int) -> Floats:
        """(vocabulary,) of the layer at ``place``."""
        return self._maps[place][2]


def train_lens(
    split: ActivationSplit,
    asked: NDArray[np.int64],
    embeddings: Tensor,
    options: LensOptions,
) -> TrainedLens:
    """Train the heads of all layers, in as few passes over the store as the steps take.

    Args:
        split: complete, with all tokens of its examples.
        asked: (tokens of the split,) word of each token in stored order; negative ones are not
            learned from.
        embeddings: (vocabulary, width) of the encoder.
        options: how they learn.

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
    where = device()
    tied = embeddings.detach().to(where, torch.float32)
    shapes = (tied.shape[1], split.record.hidden_size), (tied.shape[1],), (tied.shape[0],)
    heads = [
        [torch.zeros(shape, device=where, requires_grad=True) for shape in shapes]
        for _ in split.record.layers
    ]
    optimiser = torch.optim.Adam([p for head in heads for p in head], lr=options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda k: 1 - k / options.steps)
    examples = max(1, round(BATCH_TOKENS * len(split) / split.record.tokens))
    loader = ActivationLoader(split, batch_size=examples, seed=options.seed)
    starts = np.cumsum(split.plan.n_tokens, dtype=np.int64) - split.plan.n_tokens
    random = torch.Generator(where).manual_seed(options.seed)
    done = 0
    with progress(options.steps, "trained lens", "step") as bar:
        while done < options.steps:
            for batch in loader:
                of = batch.examples.numpy()
                rows = [np.arange(starts[i], starts[i] + split.plan.n_tokens[i]) for i in of]
                words = torch.from_numpy(asked[np.concatenate(rows)]).to(where)
                states = batch.to(where).hidden_states[words >= 0]
                if len(states):
                    _step(heads, states, words[words >= 0], tied, options.dropout, random)
                    optimiser.step()
                    optimiser.zero_grad()
                schedule.step()
                bar.update()
                done += 1
                if done == options.steps:
                    break
    maps = [tuple(p.detach().cpu().numpy() for p in head) for head in heads]
    return TrainedLens(tied.cpu().numpy(), maps)  # type: ignore[arg-type]


def _step(
    heads: list[list[Tensor]],
    states: Tensor,
    words: Tensor,
    tied: Tensor,
    dropout: float,
    random: torch.Generator,
) -> None:
    """Gradients of every layer's loss; the logits of one layer are held at a time."""
    for i, (matrix, offset, bias) in enumerate(heads):
        features = torch.addmm(offset, dropped(states[:, i], dropout, random), matrix.T)
        logits = torch.addmm(bias, features, tied.T)
        loss = F.cross_entropy(logits, words)
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"the loss of the layer at place {i} of those stored is {loss.item()}: check the "
                "activations with `bertvision store verify`, or give a lower learning rate"
            )
        loss.backward()


def dropped(states: Tensor, share: float, random: torch.Generator) -> Tensor:
    """States of which a share of the channels is zero, each by itself; the others make up for it.

    Args:
        states: (tokens, hidden).
        share: from 0 to below 1.
        random: of their device.
    """
    kept = torch.rand(states.shape, generator=random, device=states.device) >= share
    return states * kept / (1 - share)
