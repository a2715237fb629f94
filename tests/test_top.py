"""The tokens that lie furthest along a direction: exact over shards, ties by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import Made

from bertvision.errors import IncompleteSplitError, InputError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.views.top import as_direction, top_tokens

LENGTHS = [30, 7, 41, 18, 64, 25, 9, 33]  # several shards of 64 tokens


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> ActivationSplit:
    """A split in which every seventh token has the state of the first one."""
    made = Made(LENGTHS)
    same = made.hidden_states[0][0].clone()
    for states in made.hidden_states:
        states[::7] = same
    return made.write(tmp_path_factory.mktemp("top"))


def sorted_by_hand(split: ActivationSplit, direction: Any, layer: int) -> list[tuple[int, int]]:
    """Places of all tokens, by score and then by their order in the store."""
    places = [(e, p) for e in range(len(split)) for p in range(int(split.plan.n_tokens[e]))]
    scores = np.concatenate(
        [np.asarray([row @ direction for row in e[..., layer].double().numpy()]) for e in split]
    )
    order = np.argsort(-np.round(scores, 9), kind="stable")
    return [places[i] for i in order]


@pytest.mark.parametrize("k", [1, 20, 10_000])
def test_they_are_those_of_a_sort_of_all_tokens(split: ActivationSplit, k: int) -> None:
    direction = np.random.default_rng(1).normal(size=16)
    if split[0][0, :, 2].double().numpy() @ direction < 0:
        direction = -direction  # so that the equal tokens are among the first
    top = split.top(direction, layer=2, k=k)
    assert [(t.example, t.position) for t in top] == sorted_by_hand(split, direction, 2)[:k]
    assert len(top) == min(k, sum(LENGTHS))
    for token in top[:20]:
        state = split[token.example][token.position, :, 2].double().numpy()
        assert token.score == pytest.approx(state @ direction, abs=1e-12)


def test_equal_states_have_equal_scores_wherever_they_lie(split: ActivationSplit) -> None:
    direction = split[0][0, :, 1].double().numpy()  # the repeated state is the furthest
    repeated = [(e, p) for e, n in enumerate(split.plan.n_tokens) for p in range(0, n, 7)]
    top = split.top(direction, layer=1, k=len(repeated))
    assert len({token.score for token in top}) == 1
    assert [(token.example, token.position) for token in top] == repeated


def test_a_channel_gives_its_values(split: ActivationSplit) -> None:
    (first, *_) = top = split.top(-1, layer=0, k=3)
    values = torch.cat([example[:, 15, 0] for example in split])
    assert [token.score for token in top] == values.sort(descending=True).values[:3].tolist()
    assert split[first.example][first.position, 15, 0].item() == first.score
    unit = np.eye(16)[15]
    assert split.top(unit, layer=0, k=3) == top
    assert top_tokens(split, np.stack([unit, as_direction(3, 16)]), 0, 3)[0] == top


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"direction": [1.0, 2.0]}, r"shape \(2,\): the hidden states have 16 channels"),
        ({"direction": 16}, "channel 16: give a whole number from 0 to 15"),
        ({"direction": 1.5}, "channel 1.5: give a whole number"),
        ({"direction": "norm"}, "direction is str: give 16 numbers"),
        ({"direction": np.zeros(16)}, "the direction is zero"),
        ({"direction": np.full(16, np.nan)}, "holds NaN"),
        ({"direction": 1, "k": 0}, "k is 0: give 1 or more"),
        ({"direction": 1, "layer": 9}, "layer 9 is not stored"),
        ({"direction": 1, "layer": [0, 1]}, r"layer is \[0, 1\]: name one"),
    ],
)
def test_others_are_refused(
    split: ActivationSplit, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        split.top(**arguments)


def test_a_split_that_is_not_whole_has_none(tmp_path: Path) -> None:
    unfinished = Made(LENGTHS).write(tmp_path, shards=1)
    with pytest.raises(IncompleteSplitError):
        unfinished.top(0)
