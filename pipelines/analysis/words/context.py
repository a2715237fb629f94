"""How contextual the hidden states of each layer are.

Ethayarajh (2019), *How Contextual are Contextualized Word Representations?*: self-similarity of a
word's uses (definition 1), similarity of tokens with their sentence (definition 2; here with their
window), maximum explainable variance (definition 3; about the mean of the uses, as the code of the
paper has it), each less what random uses have (section 3.4).

The tokens that are needed are read once and held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import dask.array as da
import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.analysis.sums.reduce import hold
from bertvision.pipelines.analysis.words.alike import Groups, alike, common
from bertvision.pipelines.analysis.words.context_result import ContextResult
from bertvision.pipelines.analysis.words.neighbours import separation
from bertvision.pipelines.analysis.words.uses import CONTEXTS, Rows, Uses
from bertvision.pipelines.scheduler import use_scheduler


class Samples(NamedTuple):
    """The tokens that enter, as rows of windows behind one another.

    Attributes:
        uses: of words.
        windows: tokens of some windows, without special ones.
        at: for each position the tokens that stand there.
        positions: these.
    """

    uses: Uses
    windows: list[Rows]
    at: list[Rows]
    positions: Sequence[int]


def context(
    snapshots: Mapping[str, da.Array],
    samples: Samples,
    *,
    rows: Mapping[str, Rows] | None = None,
    scheduler: str = "threads",
    name: str = "x",
    layers: Sequence[int] | None = None,
    seed: int = 0,
) -> ContextResult:
    """How contextual the hidden states of each layer are.

    Costs uses² · layers · hidden operations in float32 for each snapshot, for the neighbours.

    Args:
        snapshots: by name (token, layer, hidden) float32 activations of the same tokens.
        samples: the tokens that enter.
        rows: by snapshot (tokens,) its row of each token; None is the same row.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        name: what they are of, for titles.
        layers: layer numbers; 0, 1, … by default.
        seed: that the samples were drawn with.

    Raises:
        InputError: fewer than two words or two windows.
        NonFiniteError: NaN or infinity in the activations.
    """
    x = next(iter(snapshots.values()))
    numbers = tuple(range(x.shape[1]) if layers is None else layers)
    if len(samples.uses.groups) < 2 or len(samples.windows) < 1:
        raise InputError(
            f"{len(samples.uses.groups)} words and {len(samples.windows)} windows are sampled: "
            "context compares two words or more; give more --tokens"
        )
    found = []
    with use_scheduler(scheduler, "context"):
        for snapshot, states in snapshots.items():
            places = None if rows is None else rows[snapshot]
            found.append(_measured(states, samples, places))
    columns = {field: np.array([of[field] for of in found]) for field in found[0]}
    if numbers[0] != 0:  # what is compared with is not the output of the embeddings
        for field in ("static_similarity", "static_baseline"):
            columns[field] = np.full_like(columns[field], np.nan)
    uses = samples.uses
    return ContextResult(
        **{field: of for field, of in columns.items() if field != "chance"},
        chance=float(columns["chance"][0]),
        positions=tuple(samples.positions),
        snapshots=tuple(snapshots),
        name=name,
        layers=numbers,
        n_words=len(uses.groups),
        n_uses=sum(map(len, uses.groups)),
        n_windows=len(samples.windows),
        n_window_tokens=sum(map(len, samples.windows)),
        n_at=tuple(map(len, samples.at)),
        n_available=x.shape[0],
        n_special=uses.n_special,
        n_pieces=uses.n_pieces,
        n_marks=uses.n_marks,
        n_repeated=uses.n_repeated,
        n_rare=uses.n_rare,
        contexts=CONTEXTS,
        seed=seed,
    )


def _measured(states: da.Array, samples: Samples, rows: Rows | None) -> dict[str, Array | float]:
    """The statistics of a snapshot, by field."""
    kinds = samples.uses.groups, samples.uses.random, samples.windows, samples.at
    groups = [
        Groups.of(states, [of if rows is None else rows[of] for of in kind]) for kind in kinds
    ]
    held = hold(*(of.blocks for of in groups))
    uses, random, windows, at = (
        of._replace(blocks=blocks) for of, blocks in zip(groups, held, strict=True)
    )
    of_words, of_random = alike(uses, explained=True), alike(random, explained=True)
    sums = common(random)
    apart = separation(uses)
    return {
        "random_cosine": sums.cosine(),
        "self_similarity": _mean(of_words.cosine),
        "intra_similarity": _mean(alike(windows).to_mean),
        "explained": _mean(of_words.explained),
        "random_explained": _mean(of_random.explained),
        "static_similarity": sums.static(),
        "static_baseline": sums.static_of_others(),
        "nearest": apart.nearest,
        "margin": apart.margin,
        "chance": apart.chance,
        "by_position": alike(at).cosine,
    }


def _mean(values: Array) -> Array:
    """Over groups, without those that have no value."""
    n = np.isfinite(values).sum(axis=0)
    mean: Array = np.nansum(values, axis=0) / np.where(n > 0, n, np.nan)
    return mean
