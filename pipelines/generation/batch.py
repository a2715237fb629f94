"""A batch of prompts, gone on with token by token until each has ended, and what was computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.pipelines.generation.choosing import Chooser
from bertvision.pipelines.generation.decoder import Decoder
from bertvision.pipelines.generation.prompts import Prompt
from bertvision.pipelines.tasks.windows import Int32Array

FINISH_REASONS = ("stop", "length", "context")
"""Why a text ends, by its number in the store: its last token is one that ends texts; it has as
many new tokens as were asked for; or the decoder takes no more tokens."""


class Continued(NamedTuple):
    """A prompt and what follows."""

    key: str
    input_ids: Int32Array
    """(tokens,) of the prompt and all that was generated."""
    prompt_tokens: int
    hidden_states: Tensor
    """(tokens, layers, hidden) float32 on the CPU."""
    finish_reason: int
    """See `FINISH_REASONS`."""


def go_on(
    prompts: Sequence[Prompt],
    decoder: Decoder,
    choose: Chooser,
    *,
    most_new: int,
    longest: int,
    stops: Collection[int],
    told: Callable[[int, int], None],
) -> list[Continued]:
    """Generate the texts of a batch.

    Every token is read by the decoder, the last one of a text too, so that the states of all are
    there. What a row has after its end goes nowhere.

    Args:
        prompts: of the batch.
        decoder: that goes on with them.
        choose: their tokens.
        most_new: tokens of a text behind its prompt.
        longest: tokens of a text, its prompt included.
        stops: token ids that end a text.
        told: called after each step with the tokens that were generated, and with those that will
            not be because a text has ended.
    """
    limits = [new_tokens(prompt, most_new, longest) for prompt in prompts]
    reading = decoder.begin()
    ids, real = decoder.padded([prompt.ids for prompt in prompts])
    given = reading.feed(ids, real)
    written: list[list[int]] = [[] for _ in prompts]
    steps: list[Tensor] = []
    reasons: list[int | None] = [None] * len(prompts)
    going = torch.ones((len(prompts), 1), dtype=torch.bool)
    read = given.states
    while going.any():
        tokens = choose(given.logits)
        given = reading.feed(tokens[:, None], going)
        steps.append(given.states)
        new, ended = int(going.sum()), 0
        for row in going.squeeze(1).nonzero().squeeze(1).tolist():
            written[row].append(int(tokens[row]))
            if written[row][-1] in stops:
                reasons[row] = 0
            elif len(written[row]) == limits[row]:
                reasons[row] = 1 if limits[row] == most_new else 2
            if reasons[row] is not None:
                ended += limits[row] - len(written[row])
        going = torch.tensor([[reason is None] for reason in reasons])
        told(new, ended)
    return [
        Continued(
            prompt.key,
            np.concatenate([prompt.ids, np.array(new, np.int32)]),
            len(prompt.ids),
            torch.cat([states[-len(prompt.ids) :], *(step[row] for step in steps[: len(new)])]),
            reason or 0,
        )
        for row, (prompt, new, states, reason) in enumerate(
            zip(prompts, written, read, reasons, strict=True)
        )
    ]


def new_tokens(prompt: Prompt, most_new: int, longest: int) -> int:
    """How many tokens a prompt is gone on with at most."""
    return min(most_new, longest - len(prompt.ids))
