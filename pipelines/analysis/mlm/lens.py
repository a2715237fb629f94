"""The lens: what a head over the vocabulary reads from the hidden states of every layer.

The states of a layer go through the head that was made for those of the last (nostalgebraist 2020,
*interpreting GPT: the logit lens*), or through one of their own (`trained`). What is asked for is
the word that the token is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import dask.array as da
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.mlm.lens_result import LensResult
from bertvision.pipelines.analysis.mlm.sums import TILE, Decoder, LensSums, lens_sums
from bertvision.pipelines.analysis.reduce import (
    Blocks,
    aligned_blocks,
    gathered_blocks,
    tree_reduce,
)
from bertvision.pipelines.scheduler import compute, use_scheduler

Words = NDArray[np.int64]


def lens(
    x: da.Array,
    words: NDArray[np.integer],
    decoder: Decoder,
    *,
    special: Collection[int] = (),
    max_tokens: int | None = 10_000,
    tile: int = TILE,
    seed: int = 0,
    scheduler: str = "threads",
    name: str = "x",
    head: str = "head",
    note: str = "",
    layers: Sequence[int] | None = None,
) -> LensResult:
    """What a decoder reads from every layer.

    Costs 2 · tokens · layers · vocabulary · width operations in float32, and as many exponentials
    as logits; what is held of these is bounded by ``tile``. Sums over tokens are in float64.

    Args:
        x: (token, layer, hidden) float32 activations, chunked along the tokens.
        words: (token,) vocabulary index of each token.
        decoder: reads states over the vocabulary.
        special: vocabulary indices whose tokens are left out: no head was ever asked for them.
        max_tokens: size of the uniform sample of the other tokens; None takes all of them.
        tile: words whose logits are held at a time.
        seed: of that sample.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        name: what x is, for titles.
        head: what the decoder is, for titles.
        note: what is to be known of it.
        layers: layer numbers of x; 0, 1, … by default.

    Raises:
        InputError: no token is left, a word is not in the vocabulary, or an option is out of range.
        NonFiniteError: NaN or infinity in the logits of a layer.
    """
    if tile < 1 or (max_tokens is not None and max_tokens < 1):
        raise InputError(f"tile is {tile} and max_tokens {max_tokens}: give 1 or more of each")
    asked = np.asarray(words).astype(np.int64)
    n_words = len(decoder.weight)
    if asked.shape != x.shape[:1] or asked.min() < 0 or asked.max() >= n_words:
        raise InputError(
            f"{len(asked):,} words up to index {asked.max()} for {x.shape[0]:,} tokens and a head "
            f"over {n_words:,} words: take the tokenizer and the head of the encoder itself"
        )
    asked[np.isin(asked, np.array([*special], np.int64))] = -1
    entering = np.flatnonzero(asked >= 0)
    if not len(entering):
        raise InputError(f"{name} holds special tokens alone: there is no word to be read")
    counts = np.bincount(asked[entering], minlength=n_words)
    with use_scheduler(scheduler, "lens"):
        blocks = _blocks(x, asked, entering, max_tokens, seed)
        reads = delayed(decoder)  # sent to workers once, not with each block
        leaf = partial(_sums, rare=_rare(counts), tile=tile)
        sums: LensSums = compute(
            tree_reduce([(*block, reads) for block in blocks], leaf, LensSums.merge)
        )
    shares = counts[counts > 0] / len(entering)
    with np.errstate(invalid="ignore"):  # no rare word: NaN
        top1_rare = sums.top1_rare / np.float64(sums.n_rare)
    return LensResult(
        top1=sums.top1 / sums.n,
        top1_rare=top1_rare,
        mrr=sums.reciprocal_rank / sums.n,
        log_p=sums.log_p / sums.n,
        kl=sums.kl / sums.n,
        name=name,
        head=head,
        note=note,
        layers=tuple(range(x.shape[1]) if layers is None else layers),
        n_words=n_words,
        n_tokens=sums.n,
        n_rare=sums.n_rare,
        n_available=len(entering),
        majority=float(shares.max()),
        unigram_log_p=float((shares * np.log(shares)).sum()),
        seed=seed,
    )


def _rare(counts: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether a word is rare: none of the most frequent ones, which make up half of the tokens."""
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    rare = np.empty(len(counts), np.bool_)
    rare[order] = before >= counts.sum() / 2
    return rare


def _blocks(
    x: da.Array, asked: Words, entering: Words, max_tokens: int | None, seed: int
) -> Blocks:
    """Blocks of states and their words: of a sample, or of all tokens where there are no more."""
    chunks = (x.chunks[0], 1, 1)
    arrays = (x, da.from_array(asked[:, None, None], chunks=chunks))  # type: ignore[no-untyped-call]
    if max_tokens is None or len(entering) <= max_tokens:
        return aligned_blocks(arrays)
    random = np.random.default_rng(seed)
    drawn = np.sort(random.choice(entering, max_tokens, replace=False, shuffle=False))
    return gathered_blocks(arrays, (drawn, drawn))


def _sums(
    states: NDArray[np.float32],
    words: Words,
    decoder: Decoder,
    *,
    rare: NDArray[np.bool_],
    tile: int,
) -> LensSums:
    return lens_sums(states, words[:, 0, 0], rare, decoder, tile)
