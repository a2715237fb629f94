"""Structural probes: a linear map under which squared distances and norms are those of a tree.

Hewitt & Manning (2019), *A Structural Probe for Finding Syntax in Word Representations*, equations
1 to 3. The distance probe learns B such that ‖B(h_i − h_j)‖² is the number of edges between two
words, the depth probe one such that ‖B h_i‖² is the depth of a word. Probes of all layers are one
batch: their parameters are stacked, and one product projects the words of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bertvision.pipelines.analysis.structure.states import Batch

Array = npt.NDArray[Any]
_START = 0.05  # weights start uniform in ± this, as in the authors' code


class Probes(ABC):
    """Probes of one kind, each with an input of its own; what is learned is kept outside.

    Attributes:
        count: how many there are.
    """

    count: int

    @abstractmethod
    def start(self, seed: int) -> list[Tensor]:
        """Parameters before training, (probes, …) each, on the CPU.

        Args:
            seed: of what is random in them; probes of one seed start alike.
        """

    @abstractmethod
    def losses(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """The loss of each probe, summed over what there is to be told, and how much that is.

        Args:
            parameters: of some probes, (some, …) each.
            which: (some,) their numbers.
            batch: sentences.

        Returns:
            (some,), and the number of sentences, words or arcs.
        """


class StructuralProbes(Probes):
    """What distance and depth probes share: a projection of each layer."""

    def __init__(self, layers: int, hidden: int, rank: int) -> None:
        """One probe for each layer.

        Args:
            layers: how many are read.
            hidden: their width.
            rank: rows of B, at most ``hidden``.
        """
        self.count, self._shape = layers, (hidden, min(rank, hidden))

    def start(self, seed: int) -> list[Tensor]:
        """See `Probes`."""
        random = torch.Generator().manual_seed(seed)
        weight = torch.empty(self._shape).uniform_(-_START, _START, generator=random)
        return [weight.expand(self.count, *self._shape).clone()]

    def losses(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """The L1 loss of each sentence, divided by its number of pairs or words, summed."""
        found = self.predicted(parameters, which, batch)
        target, weight = np.zeros((2, *found.shape[1:]), np.float32)
        for i, values in enumerate(self._gold(batch)):
            part = (i, *(slice(n) for n in values.shape))
            target[part] = values
            weight[part] = 1 / values.size
        gold, share = (torch.from_numpy(x).to(found.device) for x in (target, weight))
        loss = ((found - gold).abs() * share).flatten(1).sum(1)
        return loss, len(batch.sentences)

    @abstractmethod
    def predicted(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> Tensor:
        """Distances or depths of the sentences, padded to the longest; see `losses`."""

    @abstractmethod
    def _gold(self, batch: Batch) -> Sequence[Array]:
        """What they should be, of each sentence."""

    def by_sentence(self, parameters: list[Tensor], batch: Batch) -> list[Array]:
        """Predictions of all probes for each sentence: (probes, words) or (probes, words, words).

        They are rounded to four decimals of an edge: distances that are equal in the tree, and but
        for float32 in its embedding, are to have the same rank.

        Args:
            parameters: of all probes.
            batch: sentences.
        """
        which = torch.arange(self.count, device=batch.states.device)
        found = self.predicted(parameters, which, batch).cpu().numpy().round(4)
        parts: list[Any] = [
            (slice(None), i, *map(slice, values.shape))
            for i, values in enumerate(self._gold(batch))
        ]
        return [found[part] for part in parts]

    def _projected(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> Tensor:
        """(some, sentences, longest, rank) projected words; behind the last of a sentence zeros."""
        states = batch.states if len(which) == self.count else batch.states[which]
        words = torch.bmm(states, parameters[0]).transpose(0, 1)
        return pad_sequence(words.split(batch.lengths), batch_first=True).permute(2, 0, 1, 3)


class DistanceProbes(StructuralProbes):
    """Squared distances of words are edges between them."""

    def predicted(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> Tensor:
        """Distances, (some, sentences, longest, longest)."""
        x = self._projected(parameters, which, batch)
        # moved near the origin, so that little is lost where squares of norms cancel
        words = torch.tensor(batch.lengths, device=x.device).view(-1, 1, 1)
        x = x - x.detach().sum(dim=2, keepdim=True) / words
        squares = (x * x).sum(-1)
        between = squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * x @ x.transpose(-1, -2)
        return between.clamp(min=0)

    def _gold(self, batch: Batch) -> Sequence[Array]:
        return [gold.distances for gold in batch.golds]


class DepthProbes(StructuralProbes):
    """Squared norms of words are their depths."""

    def predicted(self, parameters: list[Tensor], which: Tensor, batch: Batch) -> Tensor:
        """Depths, (some, sentences, longest)."""
        return self._projected(parameters, which, batch).square().sum(-1)

    def _gold(self, batch: Batch) -> Sequence[Array]:
        return [gold.depths for gold in batch.golds]
