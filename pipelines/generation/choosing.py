"""The token that comes next: the likeliest, or one that is drawn, by draws of each prompt alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor


class Chooser:
    """Chooses the tokens of some prompts.

    What is drawn of a prompt follows from the seed and its key alone, so that neither its
    neighbours in a batch nor a kill change it.

    Args:
        keys: of the prompts.
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_p: see `nucleus`.
        seed: of the draws.
        before: Changes to the divided logits, in front of the nucleus (see `TextSettings`).
        after: Changes to the logits behind it.
    """

    def __init__(
        self,
        keys: Sequence[str],
        temperature: float,
        top_p: float,
        seed: int,
        before: Sequence[LogitsProcessor] = (),
        after: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._before, self._after = list(before), list(after)
        digests = [hashlib.sha256(f"{seed} {key}".encode()).digest() for key in keys]
        self._draws = [np.random.default_rng(np.frombuffer(d, "<u4")) for d in digests]

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """The next token of some of the prompts, (rows,) on the CPU.

        Args:
            logits: (rows, vocabulary) float32.
            rows: (rows,) which prompts these are of.
        """
        if self._temperature == 0:
            return logits.argmax(dim=1).cpu()
        # from the likeliest down, which no temperature divides to infinity
        below = logits.double() - logits.max(dim=1, keepdim=True).values
        scores, none = below / self._temperature, torch.zeros(len(rows), 0, dtype=torch.int64)
        for change in self._before:
            scores = change(none, scores)
        likely = nucleus(scores.softmax(dim=1), self._top_p)
        if self._after:
            scores = likely.log()
            for change in self._after:
                scores = change(none, scores)
            likely = scores.softmax(dim=1)
        # in the order of the vocabulary: where two are about as likely, that of their likelihoods
        # may change with the last digit, and with it every token behind
        reached = likely.cumsum(dim=1)
        drawn = torch.tensor([[self._draws[row].random()] for row in rows], dtype=torch.float64)
        found = torch.searchsorted(reached, drawn.to(reached) * reached[:, -1:], right=True)
        return found.squeeze(1).clamp(max=logits.shape[1] - 1).cpu()


def nucleus(likely: Tensor, top_p: float) -> Tensor:
    """The smallest set of the likeliest tokens that reach a probability together; others get 0.

    Holtzman et al. 2020, The Curious Case of Neural Text Degeneration (arXiv:1904.09751), section
    3.1.

    Args:
        likely: (rows, vocabulary) probabilities.
        top_p: the probability; 1 keeps all.
    """
    if top_p == 1:
        return likely
    ordered, order = likely.sort(dim=1, descending=True, stable=True)
    ordered[ordered.cumsum(dim=1) - ordered >= top_p] = 0
    return torch.zeros_like(likely).scatter_(1, order, ordered)
