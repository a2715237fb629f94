"""A batch of prompts, gone on with token by token until each has ended, and what was computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.pipelines.generation.choosing import Chooser
from bertvision.pipelines.generation.decoder import Decoder
from bertvision.pipelines.generation.prompts import Prompt
from bertvision.pipelines.generation.settings import TextSettings
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
    settings: TextSettings,
    told: Callable[[int, int], None],
) -> list[Continued]:
    """Generate the texts of a batch.

    Every token is read by the decoder, the last one of a text too, so that the states of all are
    there. Where half of the rows of a batch have ended, the others go on without them.

    Args:
        prompts: of the batch.
        decoder: that goes on with them.
        choose: their tokens.
        most_new: tokens of a text behind its prompt.
        longest: tokens of a text, its prompt included.
        stops: token ids that end a text.
        settings: Settings of the decoder that change its texts.
        told: called after each step with the tokens that were generated, and with those that will
            not be because a text has ended.
    """
    limits = [new_tokens(prompt, most_new, longest) for prompt in prompts]
    changes = [
        settings.of_prompt(len(prompt.ids), len(prompt.ids) + limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    reading = decoder.begin()
    given = reading.feed(*decoder.padded([prompt.ids for prompt in prompts]))
    states = [[of[-len(p.ids) :]] for p, of in zip(prompts, given.states, strict=True)]
    written: list[list[int]] = [[] for _ in prompts]
    reasons: dict[int, int] = {}
    rows, logits = list(range(len(prompts))), given.logits
    while len(reasons) < len(prompts):
        going = [row not in reasons for row in rows]
        if any(changes):
            logits = logits.clone()  # those of a pass cannot be changed
            for place in np.flatnonzero(going).tolist():
                row = rows[place]
                text = torch.tensor([[*prompts[row].ids.tolist(), *written[row]]])
                change: Any = changes[row]
                logits[place] = change(text.to(logits.device), logits[place : place + 1])[0]
        tokens = choose(logits, rows)
        given = reading.feed(tokens[:, None], torch.tensor(going)[:, None])
        logits, never = given.logits, 0
        for place in np.flatnonzero(going).tolist():
            row, token = rows[place], int(tokens[place])
            written[row].append(token)
            states[row].append(given.states[place])
            if token in stops:
                reasons[row] = 0
            elif len(written[row]) == limits[row]:
                reasons[row] = 1 if limits[row] == most_new else 2
            if row in reasons:
                never += limits[row] - len(written[row])
        told(sum(going), never)
        left = [place for place, row in enumerate(rows) if row not in reasons]
        if 0 < len(left) <= len(rows) / 2:  # less often, and more is computed that goes nowhere
            reading.keep(left)
            rows, logits = [rows[place] for place in left], logits[left]
    return [
        Continued(
            prompt.key,
            np.concatenate([prompt.ids, np.array(written[row], np.int32)]),
            len(prompt.ids),
            torch.cat(states[row]),
            reasons[row],
        )
        for row, prompt in enumerate(prompts)
    ]


def new_tokens(prompt: Prompt, most_new: int, longest: int) -> int:
    """How many tokens a prompt is gone on with at most."""
    return min(most_new, longest - len(prompt.ids))
