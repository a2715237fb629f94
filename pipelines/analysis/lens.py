"""The lens: words that a head over the vocabulary reads from the hidden states of every layer.

The states of a layer go through the head that was made for those of the last (nostalgebraist 2020,
*interpreting GPT: the logit lens*), or through one of their own (`train_lens`). The head is asked
for the word that the token is.

A vocabulary has tens of thousands of words, and a block of tokens has a logit for each of them in
each layer: together they would be gigabytes. So the vocabulary is gone through in tiles. The
logarithm of the sum of exponentials is carried along with the largest logit so far, as in Milakov
& Gimelshein (2018), *Online normalizer calculation for softmax*, algorithm 3, and so is the
divergence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, Unpack, cast

import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.reduce import (
    Blocks,
    aligned_blocks,
    gathered_blocks,
    tree_reduce,
)
from bertvision.pipelines.analysis.request import Request, Setting
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Numbers, Variable
from bertvision.pipelines.declare import MaxTokens, OnDask, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.progress import progress
from bertvision.pipelines.reading import Tag, parse_tag
from bertvision.pipelines.readouts.options import LensOptions
from bertvision.pipelines.records import Count
from bertvision.pipelines.scheduler import compute, use_scheduler
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    import dask.array as da

    from bertvision.pipelines.encoders.vocabulary_head import CausalHead, MlmHead


Floats = NDArray[np.float32]
TILE, TOKENS = 4096, 512
"""Words and tokens whose logits are held at a time: 8 MB for each of a few matrices."""
Words = NDArray[np.int64]
OfLayers = Annotated[Array, Axes.of("layers")]


@dataclass(frozen=True, eq=False, repr=False)
class LensResult(AnalysisResult):
    """Accuracy of reading the word of each token from its state in each layer.

    Attributes:
        top1: (layers,) share of tokens whose own word gets the largest logit.
        top1_rare: (layers,) the same of rare words: those beside the most frequent ones that make
            up half of the tokens; NaN where there are none.
        mrr: (layers,) mean of 1 / rank of the own word.
        log_p: (layers,) mean log-probability of the own word, nats.
        kl: (layers,) mean KL(p ‖ q), nats: p what the last of the layers says, q what this one
            does.
        name: Name of the split, for titles.
        head: Name of the head, for titles.
        note: A sentence about the head.
        layers: layer numbers (0 = embedding output).
        n_words: size of the vocabulary.
        n_tokens: tokens that entered.
        n_rare: tokens of rare words among them.
        n_available: tokens that the split holds, without special ones.
        majority: share of the most frequent word: the top-1 of who always gives it.
        unigram_log_p: mean log-probability, in nats, by the frequencies of the split themselves.
        seed: Seed of the sample of tokens.
    """

    kind = "lens"
    heading = "The word that a state gives (lens)"
    titled = "Lens, {name}, {head}, {n_tokens:,} of {n_available:,} tokens"
    caption = "Reading the word of each token from its state in every layer"
    reading = (
        "An encoder is asked for the word that stands there, which it saw, as no token was masked: "
        "the numbers say how well it can still be read from a layer's state by the head, not how "
        "well hidden words are guessed. A decoder is asked for the word that follows. Top-1: share "
        "of tokens whose word comes first; of rare words: without the frequent words that make up "
        "half of the tokens. MRR: mean of 1 / rank. Log p: mean log-probability of the word, nats. "
        "KL: how far what the layer says of all words is from what the last one says, nats."
    )
    seen = (
        "Panels over the layers: how often the token's own word comes first, of all words and of "
        "rare ones, its mean 1 / rank and log-probability, and the divergence from the last layer."
    )

    named = ("name", "head")
    variables = {
        "top1": Variable("layer", "top-1", 3, chart="top-1 (share of tokens)"),
        "top1_rare": Variable("layer", "of rare words", 3, chart="top-1 (share of rare words)"),
        "mrr": Variable("layer", "MRR", 3, chart="mean 1 / rank of the own word"),
        "log_p": Variable("layer", "log p", chart="log p of the own word (nats)"),
        "kl": Variable("layer", "KL to the last", chart="KL to the last layer (nats)"),
    }

    top1: OfLayers
    top1_rare: OfLayers
    mrr: OfLayers
    log_p: OfLayers
    kl: OfLayers
    name: str
    head: str
    note: str
    layers: Numbers
    n_words: Count
    n_tokens: Count
    n_rare: Count
    n_available: Count
    majority: float
    unigram_log_p: float
    seed: int

    def remarks(self) -> list[str]:
        """The head, and what one scores who looks at no state."""
        return [
            self.note,
            f"Without looking at a state: always giving the most frequent of {self.n_words:,} "
            f"words scores top-1 {self.majority:.3f}; giving each its frequency in the split log p "
            f"{self.unigram_log_p:.2f}.".replace("-", "−").replace("top−1", "top-1"),
        ]

    def levels(self) -> dict[str, dict[str, float]]:
        """Score of a guess that looks at no state."""
        return {
            "top1": {"most frequent word": self.majority},
            "log_p": {"by frequency": self.unigram_log_p},
        }


@job
def lens(
    checkpoint: Tag,
    *,
    split: str = "dev",
    trained: Annotated[bool, Option(apart=True)] = False,
    train_split: str | None = None,
    steps: Annotated[int | None, Option(ge=1)] = None,
    dropout: Annotated[float | None, Option(ge=0)] = None,
    lr: float | None = None,
    max_tokens: MaxTokens = 10_000,
    seed: Seed = 0,
    **where: Unpack[OnDask],
) -> LensResult:
    """Read the word of each token from its state in each layer.

    The encoder's own MLM head reads the state. No word is masked: it says what a layer still holds
    of the word that stands there. A decoder's own output layer reads the word that follows, behind
    the norm of the last layer (the logit lens). With ``trained`` each layer is read by a head of
    its own, which is trained from the store first.

    Examples:
        >>> import bertvision
        >>> read = bertvision.lens("1e", trained=True, steps=3, max_tokens=200)
        >>> read.top1.shape  # (layers,)
        (3,)
        >>> list(read.to_pandas().columns)
        ['name', 'head', 'layer', 'top1', 'top1_rare', 'mrr', 'log_p', 'kl']

    Args:
        checkpoint: Snapshot to read.
        split: Split to read, stored with all tokens.
        trained: Train a head for each layer, instead of the MLM head.
        train_split: Split that heads are trained on (default train).
        steps: Steps of training, of about 512 tokens (default 500).
        dropout: Share of a state set to zero in training (default 0.5).
        lr: Learning rate (default 0.001).

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, the encoder has no such head, or an option is
            out of range or belongs to trained heads.
    """
    given = {"steps": steps, "dropout": dropout, "lr": lr}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not trained and (chosen or train_split is not None):
        option = "--train-split" if train_split is not None else f"--{next(iter(chosen))}"
        raise InputError(f"{option} is of heads that are trained: give --trained too")
    learned_of = train_split or "train"
    if trained and split == learned_of:
        raise InputError(
            f"--trained: the heads would be trained on {split}, where they are then asked: "
            "name another split with --split or --train-split"
        )
    request = Request(lens, locals())
    tag, usual = parse_tag(checkpoint), LensOptions()
    (x, *others) = request.splits([tag], split, *([learned_of] if trained else []))
    request.names = [split]
    options = usual._replace(**chosen)
    for keyword in ("train_split", "steps", "dropout", "lr"):
        del request.settings[keyword]
    if trained:
        request.settings["train_split"] = Setting(learned_of, "train")
        for keyword in given:
            value, default = getattr(options, keyword), getattr(usual, keyword)
            request.settings[keyword] = Setting(value, default)

    def measure() -> LensResult:
        from torch import nn

        from bertvision.pipelines.encoders.vocabulary_head import CausalHead
        from bertvision.pipelines.readouts.lens import train_lens, words_of
        from bertvision.pipelines.workspace.snapshots import load_snapshot, load_snapshot_tokenizer

        folder = request.workspace.require_snapshot(tag)
        special = load_snapshot_tokenizer(folder).all_special_ids
        words = words_of(x)
        decoder: Decoder
        if not others:
            decoder, head, note = pretrained_head(request.workspace, tag, x.record.layers)
            if isinstance(decoder, CausalHead):
                words = following(words, x.plan.n_tokens)
        else:
            asked = words_of(others[0])
            asked[np.isin(asked, special)] = -1
            embeddings = cast(nn.Embedding, load_snapshot(folder).model.get_input_embeddings())
            decoder = train_lens(others[0], asked, embeddings.weight, options._replace(seed=seed))
            head = "heads trained by layer"
            note = (
                f"Each layer has an affine map of its own onto the input embeddings of {tag}, "
                f"trained on {learned_of} for {options.steps:,} steps with dropout "
                f"{options.dropout:g}."
            )
        return lens_of_array(
            x.dask(),
            words,
            decoder,
            special=special,
            max_tokens=max_tokens or None,
            seed=seed,
            scheduler=request.scheduler,
            name=x.name,
            head=head,
            note=note,
            layers=x.record.layers,
        )

    return request.answer(LensResult, measure)


def following(words: Words, lengths: NDArray[np.integer]) -> Words:
    """The word behind each token in its window; −1 of the last.

    Args:
        words: (tokens,) word of each token, windows one after another.
        lengths: (windows,) tokens of each.
    """
    shifted = np.append(words[1:], -1)
    shifted[np.cumsum(lengths, dtype=np.int64) - 1] = -1
    return shifted


def pretrained_head(
    workspace: Workspace, tag: str, layers: Sequence[int]
) -> tuple[MlmHead | CausalHead, str, str]:
    """The head over the vocabulary that the encoder or decoder was pretrained with.

    Args:
        workspace: Workspace of the snapshot.
        tag: Tag of the snapshot.
        layers: Numbers of the hidden states that are read.

    Returns:
        The head, its name, and a sentence about it.

    Raises:
        InputError: there is none that can be applied to layers.
    """
    from bertvision.pipelines.encoders.vocabulary_head import is_causal, load_causal_head
    from bertvision.pipelines.workspace.pretrained import checkpoint_of_states

    checkpoint = checkpoint_of_states(workspace, SnapshotTag(tag))
    if not is_causal(checkpoint.config):
        return mlm_head(workspace, tag)
    name = Path(checkpoint.name_or_path).name
    head = load_causal_head(checkpoint.folder, checkpoint.name_or_path, layers)
    note = f"The output layer of {name} is asked for the token that follows."
    if SnapshotTag(tag).is_untrained:
        note = f"{tag} has random weights, which the output layer of {name} was not trained with."
    return head, f"output layer of {name}", note


def mlm_head(workspace: Workspace, tag: str) -> tuple[MlmHead, str, str]:
    """The MLM head of the pretrained encoder, what it is called, and what is to be known of it."""
    from bertvision.pipelines.encoders.vocabulary_head import load_mlm_head
    from bertvision.pipelines.workspace.pretrained import checkpoint_of_states

    checkpoint = checkpoint_of_states(workspace, SnapshotTag(tag))
    name = Path(checkpoint.name_or_path).name
    head = load_mlm_head(checkpoint.folder, checkpoint.name_or_path)
    snapshot = SnapshotTag(tag)
    if snapshot.is_untrained:
        note = f"{tag} has random weights, which the MLM head of {name} was never trained with."
    elif snapshot.is_pretrained or snapshot.is_named:
        note = f"The MLM head is the one that {name} was pretrained with."
    else:
        note = (
            f"{tag} was fine-tuned without an MLM head. The states are read by that of {name}, the "
            "encoder it began as: what it reads less well may be there still, in other coordinates."
        )
    return head, f"MLM head of {name}", note


def lens_of_array(
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
    """Read the word of each token from every layer, by a decoder.

    Costs 2 · tokens · layers · vocabulary · width operations in float32, and as many exponentials
    as logits; what is held of these is bounded by ``tile``. Sums over tokens are in float64.

    Args:
        x: (token, layer, hidden) float32 activations, chunked along the tokens.
        words: (token,) vocabulary index of the word that each token is asked for; −1 leaves it out.
        decoder: reads states over the vocabulary.
        special: vocabulary indices whose tokens are left out: no head was ever asked for them.
        max_tokens: size of the uniform sample of the other tokens; None takes all of them.
        tile: words whose logits are held at a time.
        seed: Seed of that sample.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        name: Name of x, for titles.
        head: Name of the decoder, for titles.
        note: A sentence about the decoder.
        layers: layer numbers of x; 0, 1, … by default.

    Raises:
        InputError: no token is left, a word is not in the vocabulary, or an option is out of range.
        NonFiniteError: NaN or infinity in the logits of a layer.
    """
    if tile < 1 or (max_tokens is not None and max_tokens < 1):
        raise InputError(f"tile is {tile} and max_tokens {max_tokens}: give 1 or more of each")
    asked = np.asarray(words).astype(np.int64)
    n_words = len(decoder.weight)
    if asked.shape != x.shape[:1] or asked.min() < -1 or asked.max() >= n_words:
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
    import dask.array as da

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


class Decoder(Protocol):
    """Reads states over a vocabulary: logits of a layer are weight · features + bias."""

    weight: Floats
    """(vocabulary, width), the same for all layers."""

    def features(self, place: int, states: Floats) -> Floats:
        """(tokens, width) of (tokens, hidden) states, ``place`` on the layer axis."""

    def bias(self, place: int) -> Floats:
        """(vocabulary,) of the layer at ``place``."""


class LensSums(NamedTuple):
    """Sums over tokens; of rare tokens those whose word is rare.

    Attributes:
        n: tokens.
        n_rare: rare ones among them.
        top1: (layers,) tokens whose own word has the largest logit, and shares it with none.
        top1_rare: (layers,) rare ones among them.
        reciprocal_rank: (layers,) of 1 / rank; words with the same logit stand before it.
        log_p: (layers,) of the log-probability of the own word, nats.
        kl: (layers,) of KL(p ‖ q) in nats, p what the last layer says and q what this one does.
    """

    n: int
    n_rare: int
    top1: Array
    top1_rare: Array
    reciprocal_rank: Array
    log_p: Array
    kl: Array

    @classmethod
    def empty(cls, layers: int) -> LensSums:
        """The sums of no token."""
        return cls(0, 0, *(np.zeros(layers) for _ in range(5)))

    def merge(self, other: LensSums) -> LensSums:
        """The sums of the tokens of both."""
        pairs: Any = zip(self, other, strict=True)
        return LensSums(*(a + b for a, b in pairs))


def lens_sums(
    states: Floats, words: NDArray[np.int64], rare: NDArray[np.bool_], decoder: Decoder, tile: int
) -> LensSums:
    """The sums of a block of tokens.

    Args:
        states: (tokens, layers, hidden).
        words: (tokens,) vocabulary index of each token; negative ones are left out.
        rare: (vocabulary,) which words are rare.
        decoder: Decoder of the layers.
        tile: words at a time.

    Raises:
        NonFiniteError: a logit is NaN or infinite.
    """
    used = np.flatnonzero(words >= 0)
    sums = LensSums.empty(states.shape[1])
    for start in range(0, len(used), TOKENS):
        part = used[start : start + TOKENS]
        sums = sums.merge(_part(states[part], words[part], rare, decoder, tile))
    return sums


def _part(
    states: Floats, words: NDArray[np.int64], rare: NDArray[np.bool_], decoder: Decoder, tile: int
) -> LensSums:
    tokens, layers = states.shape[:2]
    order = [layers - 1, *range(layers - 1)]  # what the others are compared with comes first
    rows = np.arange(tokens)
    biases = [decoder.bias(i) for i in range(layers)]
    features = [decoder.features(i, states[:, i]) for i in range(layers)]
    own = np.stack(
        [
            np.einsum("tw,tw->t", f, decoder.weight[words]) + b[words]
            for f, b in zip(features, biases, strict=True)
        ]
    )
    above = np.zeros((layers, tokens), np.int64)
    largest = np.full((layers, tokens), -np.inf, np.float32)
    total = np.zeros((layers, tokens))
    apart = np.zeros((layers, tokens))  # Σ exp(last − its largest) · (last − this)
    for start in range(0, len(decoder.weight), tile):
        weight = decoder.weight[start : start + tile]
        inside = (words >= start) & (words < start + len(weight))
        last = shares = np.empty(0, np.float32)
        rescale = np.empty(0)
        for i in order:
            logits = features[i] @ weight.T
            logits += biases[i][start : start + tile]
            before = largest[i].copy()
            np.maximum(before, logits.max(axis=1), out=largest[i])
            shrink = np.exp(before - largest[i], dtype=np.float64)
            exp = np.exp(logits - largest[i][:, None])
            total[i] = total[i] * shrink + exp.sum(axis=1, dtype=np.float64)
            if i == layers - 1:
                last, shares, rescale = logits, exp, shrink
            else:
                more = (shares * (last - logits)).sum(axis=1, dtype=np.float64)
                apart[i] = apart[i] * rescale + more
            as_large = logits >= own[i][:, None]
            as_large[rows[inside], words[inside] - start] = False
            above[i] += as_large.sum(axis=1)
    logsumexp = largest + np.log(total)
    if not np.isfinite(logsumexp).all():
        place = int(np.flatnonzero(~np.isfinite(logsumexp).all(axis=1))[0])
        raise NonFiniteError(
            f"the logits of the layer at place {place} of those stored hold NaN or infinity; check "
            "the activations with `bertvision store verify`"
        )
    kl = apart / total[-1] - logsumexp[-1] + logsumexp
    is_rare = rare[words]
    return LensSums(
        tokens,
        int(is_rare.sum()),
        (above == 0).sum(axis=1).astype(np.float64),
        (above == 0)[:, is_rare].sum(axis=1).astype(np.float64),
        (1 / (1 + above)).sum(axis=1),
        (own - logsumexp).sum(axis=1, dtype=np.float64),
        kl.sum(axis=1),
    )


def best_words(states: Floats, decoder: Decoder, tile: int = TILE) -> tuple[Words, Floats]:
    """The word that a decoder reads from each state, and its log-probability.

    Args:
        states: (tokens, layers, hidden)
        decoder: Decoder of the layers.
        tile: words whose logits are held at a time.

    Returns:
        Index in the vocabulary of the word with the largest logit, of equal ones the first, and its
        log-probability in nats, (tokens, layers) each.
    """
    words = np.empty(states.shape[:2], np.int64)
    log_p = np.empty(states.shape[:2], np.float32)
    with progress(states.shape[0] * states.shape[1], "lens", "state") as bar:
        for begin in range(0, len(states), TOKENS):
            for i in range(states.shape[1]):
                features = decoder.features(i, states[begin : begin + TOKENS, i])
                largest = np.full(len(features), -np.inf, np.float32)
                total = np.zeros(len(features))
                best = np.zeros(len(features), np.int64)
                for start in range(0, len(decoder.weight), tile):
                    logits = features @ decoder.weight[start : start + tile].T
                    logits += decoder.bias(i)[start : start + tile]
                    first = logits.argmax(axis=1)
                    of_tile = logits[np.arange(len(logits)), first]
                    best = np.where(of_tile > largest, start + first, best)
                    before, largest = largest, np.maximum(largest, of_tile)
                    total *= np.exp(before - largest, dtype=np.float64)
                    total += np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
                words[begin : begin + TOKENS, i] = best
                log_p[begin : begin + TOKENS, i] = -np.log(total)
                bar.update(len(features))
    return words, log_p
