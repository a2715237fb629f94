"""Uses of words: tokens that are words of a single piece, and how alike their states are.

A word that the tokenizer cuts into pieces has no state of its own, so it is left out, and counted.
A use in surroundings that were there before, as of a paragraph that several questions are asked
of, is no other use.

Groups of vectors, such as the uses of a word, are measured in each layer: their cosines, the
directions they need, and whether the nearest neighbour of a use is another use of the same word. A
block holds whole groups behind one another, so each is measured exactly, in float64, and let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dask.delayed import Delayed, delayed
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis import kernels
from bertvision.pipelines.analysis.moments import Array, Block
from bertvision.pipelines.analysis.reduce import (
    SAMPLE_ROWS,
    Blocks,
    check_finite,
    cut_blocks,
    tree_reduce,
)
from bertvision.pipelines.scheduler import compute

if TYPE_CHECKING:
    import dask.array as da


Rows = NDArray[np.int64]
MARKERS = ("Ġ", "▁")
"""Prefixes of tokens that begin a word, where the tokenizer marks these and not the others."""
NO_LETTER = "\N{REPLACEMENT CHARACTER}"
"""Reading of a token that is a part of the bytes of a letter."""
SURROUNDINGS = 8
"""Tokens on either side by which two uses are known to be of the same text."""
CONTEXTS = 5
"""Uses that a word must have, as in Ethayarajh (2019)."""


class Vocabulary(NamedTuple):
    """Kinds of the ids of a tokenizer.

    Attributes:
        special: (ids,) whether a token is special, or not known.
        begins: (ids,) whether it begins a word, with a letter or a digit in it.
        goes_on: (ids,) whether it continues the word before it.
    """

    special: NDArray[np.bool_]
    begins: NDArray[np.bool_]
    goes_on: NDArray[np.bool_]

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Kinds of the ids of a tokenizer.

        Args:
            tokenizer: a fast one.

        Raises:
            InputError: it marks neither tokens that begin a word nor those that continue one.
        """
        n = len(tokenizer)
        tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(range(n))]
        special = np.isin(np.arange(n), tokenizer.all_special_ids)
        read = tokenizer.backend_tokenizer.decode_batch(
            [[i] for i in range(n)], skip_special_tokens=False
        )
        texts = [text.strip().lstrip("".join(MARKERS)) for text in read]
        solid = np.array([any(letter.isalnum() for letter in text) for text in texts])
        prefix = getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)
        if prefix and any(token.startswith(prefix) for token in tokens):
            goes_on = np.array([token.startswith(prefix) for token in tokens])
            return cls(special, solid & ~goes_on & ~special, goes_on & ~special)
        marked = np.array([token.startswith(MARKERS) for token in tokens])
        if not marked.any():
            raise InputError(
                "the tokenizer marks neither tokens that begin a word (Ġ, ▁) nor those that go on "
                "with one (##), so that words cannot be told: take an encoder whose tokenizer does"
            )
        goes_on = np.array([text[:1].isalnum() or text[:1] == NO_LETTER for text in texts])
        return cls(special, solid & marked & ~special, goes_on & ~marked & ~special)


class Uses(NamedTuple):
    """Tokens that are uses of words.

    Attributes:
        groups: Rows of the sampled uses of each word.
        random: Groups of the same number and sizes, each a use of any word.
        n_special: tokens that are special.
        n_pieces: tokens that are pieces of words.
        n_marks: tokens without a letter or a digit.
        n_repeated: uses in surroundings that were there before.
        n_rare: uses of words with fewer than `CONTEXTS` others.
        n_words: words with enough uses, sampled or not.
    """

    groups: list[Rows]
    random: list[Rows]
    n_special: int
    n_pieces: int
    n_marks: int
    n_repeated: int
    n_rare: int
    n_words: int


def sample_uses(
    ids: NDArray[np.integer[Any]],
    lengths: Rows,
    vocabulary: Vocabulary,
    *,
    most: int,
    of_word: int,
    seed: int,
) -> Uses:
    """A sample of uses of words that have `CONTEXTS` or more.

    Words are drawn at random, then uses of each, until there are as many as asked for. The random
    groups are drawn from all uses of all words of one piece, each once.

    Args:
        ids: (tokens,) of windows behind one another.
        lengths: (windows,) tokens of each window.
        vocabulary: Vocabulary of the ids.
        most: uses of all words together.
        of_word: uses of a word.
        seed: Seed of the sample.

    Raises:
        InputError: no word has enough uses.
    """
    window = np.repeat(np.arange(len(lengths)), lengths)
    special, goes_on = vocabulary.special[ids], vocabulary.goes_on[ids]
    # a token that is followed by the rest of its word is a piece of it
    cut = np.append(goes_on[1:] & (window[1:] == window[:-1]), False)
    pieces = ~special & (goes_on | cut)
    single = vocabulary.begins[ids] & ~pieces
    rows = np.flatnonzero(single)
    _, once = np.unique(_surroundings(ids, window, rows), return_index=True)
    fresh = rows[np.sort(once)]
    words, word, counts = np.unique(ids[fresh], return_inverse=True, return_counts=True)
    frequent = np.flatnonzero(counts >= CONTEXTS)
    random = np.random.default_rng(seed)
    groups = _groups(fresh, word, random.permutation(frequent), counts, most, of_word, random)
    if not groups:
        raise InputError(
            f"no word of one piece has {CONTEXTS} uses among {len(ids):,} tokens, as many as "
            "--tokens allows: take a split of more text, or more --tokens"
        )
    sizes = [len(group) for group in groups]
    drawn = random.choice(fresh, sum(sizes), replace=False)
    return Uses(
        groups,
        np.split(drawn, np.cumsum(sizes)[:-1]),
        n_special=int(special.sum()),
        n_pieces=int(pieces.sum()),
        n_marks=int((~special & ~pieces & ~single).sum()),
        n_repeated=len(rows) - len(fresh),
        n_rare=int(counts[counts < CONTEXTS].sum()),
        n_words=len(frequent),
    )


def _groups(
    rows: Rows,
    word: Rows,
    order: Rows,
    counts: Rows,
    most: int,
    of_word: int,
    random: np.random.Generator,
) -> list[Rows]:
    """Uses of words in an order, as many as there may be, ascending."""
    by_word = np.argsort(word, kind="stable")
    starts = np.cumsum(counts) - counts
    groups: list[Rows] = []
    left = most
    for k in order.tolist():
        n = min(of_word, int(counts[k]))
        if n > left:
            break
        uses = rows[by_word[starts[k] : starts[k] + counts[k]]]
        groups.append(np.sort(random.choice(uses, n, replace=False)))
        left -= n
    return groups


def _surroundings(ids: NDArray[np.integer[Any]], window: Rows, rows: Rows) -> NDArray[np.uint64]:
    """(rows,) a number that is the same where a token and those around it are."""
    hashes = np.zeros(len(rows), np.uint64)
    for step in range(-SURROUNDINGS, SURROUNDINGS + 1):
        at = (rows + step).clip(0, len(ids) - 1)
        inside = (rows + step == at) & (window[at] == window[rows])
        id_ = np.where(inside, ids[at].astype(np.int64) + 1, 0).astype(np.uint64)
        hashes = (
            hashes * np.uint64(0x9E3779B97F4A7C15) + id_
        )  # wraps around; odd, so it loses nothing
    return hashes


def sample_windows(special: NDArray[np.bool_], lengths: Rows, most: int, seed: int) -> list[Rows]:
    """The tokens of windows at random, without special ones, as many windows as hold ``most``.

    Args:
        special: (tokens,) of windows behind one another.
        lengths: (windows,) tokens of each window.
        most: tokens of all together; one window there is in any case.
        seed: Seed of the sample.
    """
    ends = np.cumsum(lengths)
    samples: list[Rows] = []
    left = most
    for k in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        rows = np.arange(ends[k] - lengths[k], ends[k])
        rows = rows[~special[rows]]
        if len(rows) < 2:
            continue
        if len(rows) > left and samples:
            break
        samples.append(rows)
        left -= len(rows)
    return samples


def sample_positions(lengths: Rows, positions: Sequence[int], most: int, seed: int) -> list[Rows]:
    """For each position the tokens that stand there, of as many windows at random as are asked for.

    Args:
        lengths: (windows,) tokens of each window.
        positions: counted from the beginning of a window.
        most: windows.
        seed: Seed of the sample.
    """
    starts = np.cumsum(lengths) - lengths
    order = np.random.default_rng(seed).permutation(len(lengths))
    long = ((position, order[lengths[order] > position][:most]) for position in positions)
    return [np.sort(starts[windows] + position) for position, windows in long]


ROUNDING = 1e-24
"""Variance that is less than this part of the squared lengths is what rounding leaves of none."""


class Groups(NamedTuple):
    """Groups of vectors in blocks of whole groups.

    Attributes:
        blocks: (vectors, layers, hidden) each.
        sizes: Sizes of each block's groups, in vectors.
    """

    blocks: Blocks
    sizes: list[list[int]]

    @classmethod
    def of(cls, x: da.Array, groups: Sequence[Rows]) -> Groups:
        """The groups of some rows; nothing is read yet.

        Args:
            x: (token, layer, hidden) hidden states.
            groups: rows of each.
        """
        sizes: list[list[int]] = []
        cuts: list[list[Rows]] = []
        for group in groups:
            if not cuts or sum(sizes[-1]) + len(group) > SAMPLE_ROWS:
                cuts.append([])
                sizes.append([])
            cuts[-1].append(group)
            sizes[-1].append(len(group))
        return cls(cut_blocks(x, [np.concatenate(cut) for cut in cuts]), sizes)


class Alike(NamedTuple):
    """How alike the vectors of each group are; NaN of a group without two directions.

    Attributes:
        length: (groups, layers) mean length of its vectors.
        cosine: (groups, layers) mean cosine of two different vectors.
        to_mean: (groups, layers) mean cosine of a vector with the mean vector of its group.
        explained: (groups, layers) share of the variance about the mean in the first principal
            component.
    """

    length: Array
    cosine: Array
    to_mean: Array
    explained: Array

    def merge(self, other: Alike) -> Alike:
        """The values of the groups of both."""
        return Alike(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


class Common(NamedTuple):
    """Sums over vectors, from which mean cosines over all pairs follow.

    Attributes:
        n: (layers,) vectors that have a direction in the layer and in the first one.
        unit: (layers, hidden) Σ u with u of length 1.
        first: (layers, hidden) Σ of those of the first layer, of the same vectors.
        to_first: (layers,) Σ of the cosine of a vector with the same token in the first layer.
    """

    n: Array
    unit: Array
    first: Array
    to_first: Array

    def merge(self, other: Common) -> Common:
        """The sums of both."""
        return Common(*(a + b for a, b in zip(self, other, strict=True)))

    def cosine(self) -> Array:
        """(layers,) mean cosine of two different vectors."""
        return _of_pairs((self.unit**2).sum(axis=1) - self.n, self.n)

    def static(self) -> Array:
        """(layers,) mean cosine of a vector with the same token in the first layer."""
        return self.to_first / self.n

    def static_of_others(self) -> Array:
        """(layers,) mean cosine of a vector with another token in the first layer."""
        return _of_pairs((self.unit * self.first).sum(axis=1) - self.to_first, self.n)


def alike(groups: Groups, *, explained: bool = False) -> Alike:
    """How alike the vectors of each group are.

    Args:
        groups: Groups that are read.
        explained: Whether the variance is asked for too; NaN where not.

    Raises:
        NonFiniteError: NaN or infinity in the vectors.
    """
    blocks = _with_sizes(groups)
    leaf = partial(_alike, explained=explained)
    alike: Alike = compute(tree_reduce(blocks, leaf, Alike.merge))
    check_finite(alike.length.T)
    return alike


def common(groups: Groups) -> Common:
    """Sums over all vectors of the groups.

    Args:
        groups: Groups that are read.
    """
    shared: Common = compute(tree_reduce(groups.blocks, _common, Common.merge))
    return shared


def _with_sizes(groups: Groups) -> Blocks:
    pairs = zip(groups.blocks, groups.sizes, strict=True)
    return [(*block, delayed(sizes)) for block, sizes in pairs]


def _alike(block: Block, sizes: Sequence[int], *, explained: bool) -> Alike:
    parts = []
    for part in np.split(block, np.cumsum(sizes)[:-1]):
        x = part.astype(np.float64)
        length = np.linalg.norm(x, axis=2).mean(axis=0)
        if not np.isfinite(length).all():
            x = np.zeros_like(x)  # it is refused by its length
        unit, n = _unit(x)
        cosine = _of_pairs((unit.sum(axis=0) ** 2).sum(axis=1) - n, n)
        mean, _ = _unit(x.mean(axis=0)[None])
        to_mean = np.einsum("nlc,lc->l", unit, mean[0]) / np.where(n > 0, n, np.nan)
        share = _explained(x) if explained else np.full(x.shape[1], np.nan)
        parts.append((length, cosine, to_mean, share))
    return Alike(*(np.array(column) for column in zip(*parts, strict=True)))


def _explained(x: Array) -> Array:
    """(layers,) from the vectors' products, of which there are fewer than channels."""
    squares = (x**2).sum(axis=(0, 2))
    x = (x - x.mean(axis=0)).transpose(1, 0, 2)
    values = np.linalg.eigvalsh(x @ x.swapaxes(1, 2)).clip(min=0)
    total = values.sum(axis=1)
    varies = total > ROUNDING * squares
    share: Array = np.where(varies, values[:, -1] / np.where(varies, total, 1), np.nan)
    return share


def _common(block: Block) -> Common:
    unit, _ = _unit(block.astype(np.float64))
    first = unit[:, :1]
    # of both or of none, so that each vector is paired with as many
    both: NDArray[np.bool_] = np.logical_and(unit.any(axis=2), first.any(axis=2))[..., None]
    unit, first = unit * both, first * both
    to_first = np.einsum("nlc,nlc->l", unit, first)
    n = both.sum(axis=(0, 2)).astype(np.float64)
    return Common(n, unit.sum(axis=0), first.sum(axis=0), to_first)


def _unit(x: Array) -> tuple[Array, Array]:
    """Vectors of length 1, or of zeros where there is no direction; and how many have one."""
    norm = np.linalg.norm(x, axis=2, keepdims=True)
    return x / np.where(norm > 0, norm, 1), (norm[..., 0] > 0).sum(axis=0).astype(np.float64)


def _of_pairs(total: Array, n: Array) -> Array:
    """A sum over ordered pairs of different vectors, as a mean."""
    pairs = n * (n - 1)
    mean: Array = total / np.where(pairs > 0, pairs, np.nan)
    return mean


ROWS = 512
"""Uses of one edge of a tile, whose cosines are there at once."""


class Separation(NamedTuple):
    """How uses of a word lie to each other and to those of others.

    Attributes:
        nearest: (layers,) share of uses whose nearest neighbour is of the same word; NaN where
            none has a direction.
        margin: (layers,) mean of the cosine with the nearest use of the same word, less that with
            the nearest of another.
        chance: share that neighbours at random would have.
    """

    nearest: Array
    margin: Array
    chance: float


def separation(uses: Groups) -> Separation:
    """How uses of words lie to each other.

    Costs uses² · layers · hidden operations in float32.

    Args:
        uses: a group for each word, two words or more, with two uses of each or more.
    """
    sizes = np.concatenate([np.array(of) for of in uses.sizes])
    units = [delayed(_units)(*block) for block in uses.blocks]
    of_word = [delayed(_nearest_of_word)(*of) for of in zip(units, uses.sizes, strict=True)]
    parts: list[list[Delayed]] = [[] for _ in units]
    tile = delayed(_tile, nout=2)
    for i, one in enumerate(units):
        for j in range(i, len(units)):
            mine, theirs = tile(one, units[j], uses.sizes[i] if i == j else None)
            parts[i].append(mine)
            if j > i:
                parts[j].append(theirs)
    of_others = [delayed(_best)(of) for of in parts]
    same, other = compute(delayed(_behind)(of_word, of_others))
    n = len(same)
    chance = float((sizes * (sizes - 1)).sum() / (n * (n - 1)))
    both = np.isfinite(same) & np.isfinite(other)
    count = both.sum(axis=0)
    count = np.where(count > 0, count, np.nan)
    apart = np.subtract(same, other, where=both, out=np.zeros(both.shape))
    margin: Array = apart.sum(axis=0) / count
    return Separation(((same > other) & both).sum(axis=0) / count, margin, chance)


def _units(block: NDArray[Any]) -> NDArray[Any]:
    norm = np.linalg.norm(block.astype(np.float64), axis=2, keepdims=True)
    units: NDArray[Any] = (block / np.where(norm > 0, norm, np.nan)).astype(kernels.PRODUCTS)
    return units


def _nearest_of_word(units: NDArray[Any], sizes: Sequence[int]) -> NDArray[Any]:
    """(uses, layers) the largest cosine of each use with another of its word."""
    nearest = []
    for group in np.split(units, np.cumsum(sizes)[:-1]):
        cosines = np.einsum("ilc,jlc->lij", group, group)
        np.einsum("lii->li", cosines)[:] = -np.inf
        nearest.append(_known(cosines).max(axis=2).T)
    return np.concatenate(nearest)


def _tile(
    one: NDArray[Any], other: NDArray[Any], sizes: Sequence[int] | None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """(uses, layers) the largest cosine of each use of two blocks with one of another word.

    Words do not go on from block to block: only in a block with itself, whose ``sizes`` are given,
    are two uses of one.
    """
    # what came from another worker may begin at any byte, and products of it round otherwise
    one = np.require(one, requirements=("C", "A"))
    other = np.require(other, requirements=("C", "A"))
    word = None if sizes is None else np.repeat(np.arange(len(sizes)), sizes)
    mine, theirs = (np.full(x.shape[:2], -np.inf, x.dtype) for x in (one, other))
    for start in range(0, len(one), ROWS):
        for begin in range(0, len(other), ROWS):
            rows, columns = slice(start, start + ROWS), slice(begin, begin + ROWS)
            for layer in range(one.shape[1]):
                cosines = _known(one[rows, layer] @ other[columns, layer].T)
                if word is not None:
                    cosines[word[rows, None] == word[None, columns]] = -np.inf
                np.maximum(mine[rows, layer], cosines.max(axis=1), out=mine[rows, layer])
                np.maximum(theirs[columns, layer], cosines.max(axis=0), out=theirs[columns, layer])
    return mine, theirs


def _known(cosines: NDArray[Any]) -> NDArray[Any]:
    """Zero vectors have no neighbours."""
    cosines[np.isnan(cosines)] = -np.inf
    return cosines


def _best(parts: list[NDArray[Any]]) -> NDArray[Any]:
    best: NDArray[Any] = np.maximum.reduce(parts)
    return best


def _behind(*blocks: list[NDArray[Any]]) -> list[NDArray[Any]]:
    return [np.concatenate(parts) for parts in blocks]
