"""Context in hidden states: how much of a token's state is its word, and how much its context.

How contextual the hidden states of each layer are.

Ethayarajh (2019), *How Contextual are Contextualized Word Representations?*: self-similarity of a
word's uses (definition 1), similarity of tokens with their sentence (definition 2; here with their
window), maximum explainable variance (definition 3; about the mean of the uses, as the code of the
paper has it), each less what random uses have (section 3.4).

The tokens that are needed are read once and held.

Words in the hidden states that a workspace stores, and under which name it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Unpack

import numpy as np

from bertvision.errors import InputError
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.reduce import hold
from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Keeps, Labels, Numbers
from bertvision.pipelines.analysis.sides import in_order, joined_rows
from bertvision.pipelines.analysis.uses import (
    CONTEXTS,
    Groups,
    Rows,
    Uses,
    Vocabulary,
    alike,
    common,
    sample_positions,
    sample_uses,
    sample_windows,
    separation,
)
from bertvision.pipelines.declare import OnDask, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, curves
from bertvision.pipelines.reading import Tags, parse_tags
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.scheduler import use_scheduler

if TYPE_CHECKING:
    import dask.array as da

    from bertvision.featurestore.split import ActivationSplit


OfLayers = Annotated[Array, Axes.of("snapshots", "layers")]


@dataclass(frozen=True, eq=False, repr=False)
class ContextResult(AnalysisResult):
    """How contextual the hidden states of each layer are.

    Attributes:
        random_cosine: (snapshots, layers) mean cosine of two random uses of any words: the
            anisotropy baseline of cosines.
        self_similarity: mean cosine of two uses of a word, averaged over words.
        intra_similarity: mean cosine of a token with the mean of its window, averaged over windows.
        explained: share of the variance of a word's uses that their first principal component
            explains (MEV), averaged over words.
        random_explained: the same of as many groups of as many random uses: its baseline.
        static_similarity: mean cosine of a token's state with its own in ``hidden_states[0]``, the
            output of the embeddings with position, type and LayerNorm; NaN where that is not
            stored.
        static_baseline: mean cosine with that of another token.
        nearest: share of uses whose nearest neighbour among all sampled is of the same word.
        margin: mean cosine with the nearest use of the same word, less that with the nearest of
            another.
        chance: share that neighbours at random would have.
        by_position: (snapshots, positions, layers) mean cosine of two tokens at the same position
            of different windows; NaN of a position that fewer than two windows have.
        positions: counted from the beginning of a window, special tokens too.
        snapshots: names of the snapshots.
        name: Name of the snapshot, for titles.
        layers: layer numbers (0 = embedding output).
        n_words: words that are sampled.
        n_uses: uses of these.
        n_windows: windows of the intra-window similarity.
        n_window_tokens: tokens of these.
        n_at: Tokens that entered, by position.
        n_available: tokens that there are.
        n_special: Special tokens among them.
        n_pieces: pieces of words, which are left out.
        n_marks: tokens without a letter or a digit, which are left out.
        n_repeated: uses in surroundings that were there before, which are left out.
        n_rare: uses of words that have too few, which are left out.
        contexts: Uses that a word must have.
        seed: Seed of the samples.
    """

    kind = "context"
    keeps: ClassVar[Keeps] = {"int8": "values", "int4": "course"}
    heading = "Context: what becomes of words"
    caption = (
        "Similarity of a word's uses, of tokens of a window, and with the static embedding, each "
        "less that of random uses"
    )
    reading = (
        "Random: mean cosine of two random uses of any words, the baseline, which the similarities "
        "are less of. Self: of two uses of a word. Window: of a token with the mean of its window. "
        "MEV: the most of the variance of a word's uses that one direction explains, less that of "
        "as many random uses. Static: of a token with its own state in layer 0, the output of the "
        "embeddings with position and LayerNorm, less that with another token's. Nearest: in per "
        "cent, uses whose nearest neighbour is of the same word."
    )
    seen = (
        "Over the layers: the baseline, similarities less theirs, nearest neighbours, and of the "
        "last snapshot the similarity of tokens at the same position, less the baseline."
    )

    random_cosine: OfLayers
    self_similarity: OfLayers
    intra_similarity: OfLayers
    explained: OfLayers
    random_explained: OfLayers
    static_similarity: OfLayers
    static_baseline: OfLayers
    nearest: OfLayers
    margin: OfLayers
    chance: float
    by_position: Annotated[Array, Axes.of("snapshots", "positions", "layers")]
    positions: tuple[Count, ...]
    snapshots: Labels
    name: str
    layers: Numbers
    n_words: Count
    n_uses: Count
    n_windows: Count
    n_window_tokens: Count
    n_at: Annotated[tuple[Count, ...], Axes.of("positions")]
    n_available: Count
    n_special: Count
    n_pieces: Count
    n_marks: Count
    n_repeated: Count
    n_rare: Count
    contexts: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        samples = f"{', '.join(self.snapshots)}, {self.name}"
        return f"Context, {samples}, {self.n_uses:,} uses of {self.n_words:,} words"

    def adjusted(self) -> dict[str, Array]:
        """(snapshots, layers) of each similarity less its baseline."""
        return {
            "self_adjusted": self.self_similarity - self.random_cosine,
            "intra_adjusted": self.intra_similarity - self.random_cosine,
            "explained_adjusted": self.explained - self.random_explained,
            "static_adjusted": self.static_similarity - self.static_baseline,
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each snapshot and layer, as ``--csv`` writes them; NaN becomes None."""
        measured = {name: getattr(self, name) for name in _MEASURED} | self.adjusted()
        positions = zip(self.positions, self.by_position.swapaxes(0, 1), strict=True)
        labels = {"snapshot": self.snapshots, "layer": self.layers}
        return self.listed(labels, measured | {f"position_{p}": x for p, x in positions})

    def shown(self) -> list[dict[str, Any]]:
        """The rows, with neighbours in per cent."""
        rows = self.rows()
        for row in rows:
            row["percent"] = row["nearest"] and 100 * row["nearest"]
        return rows

    def columns(self) -> list[Column]:
        """The baseline, what is less of it, and what neighbours say."""
        return [
            Column("layer", "layer", "text"),
            Column("snapshot", "snapshot", "text"),
            Column("random_cosine", "random", digits=3),
            Column("self_adjusted", "self", "signed", digits=3),
            Column("intra_adjusted", "window", "signed", digits=3),
            Column("explained_adjusted", "MEV", "signed", digits=3),
            Column("static_adjusted", "static", "signed", digits=3),
            Column("percent", "nearest (%)", digits=1),
            Column("margin", "margin", "signed", digits=3),
        ]

    def remarks(self) -> list[str]:
        """Remarks on the words that entered, and those that did not."""
        left = {
            "pieces of longer words": self.n_pieces,
            "punctuation and other marks": self.n_marks,
            "special tokens": self.n_special,
            "uses in the same surroundings as another": self.n_repeated,
            f"uses of words with fewer than {self.contexts}": self.n_rare,
        }
        counts = ", ".join(f"{n:,} {what}" for what, n in left.items())
        return [
            f"A word is a token that is a whole word. Of {self.n_available:,} tokens are left out: "
            f"{counts}. By chance {100 * self.chance:.1f} % of neighbours are of the same word. "
            f"Windows: {self.n_windows:,}, with {self.n_window_tokens:,} tokens."
        ]

    def charts(self) -> dict[str, Chart]:
        """A line for each snapshot; the first is the similarity of a word's uses."""
        keys = {"random": "random_cosine"}
        levels = {"nearest": {"chance": self.chance}}
        rows = self.rows()
        charts: dict[str, Chart] = {
            name: curves(
                rows,
                keys.get(name, name),
                f"{title[0].lower()}{title[1:]} ({label})",
                by=["snapshot"],
                levels=levels.get(name),
            )
            for name, (title, label) in sorted(
                _PANELS.items(), key=lambda panel: panel[0] == "random"
            )
        }
        same = [
            {"layer": row["layer"], "position": f"position {p}"}
            | {"cosine": row[f"position_{p}"] - row["random_cosine"]}
            for row in rows
            if row["snapshot"] == self.snapshots[-1] and row["random_cosine"] is not None
            for p in self.positions
            if row[f"position_{p}"] is not None
        ]
        label = f"same position, other windows of {self.snapshots[-1]} (cosine − random)"
        return charts | {"position": curves(same, "cosine", label, by=["position"])}


_MEASURED = (
    *("random_cosine", "self_similarity", "intra_similarity", "explained", "random_explained"),
    *("static_similarity", "static_baseline", "nearest", "margin"),
)
_PANELS: dict[str, tuple[str, str]] = {
    "random": ("Random uses: the baseline", "cosine"),
    "self_adjusted": ("Self-similarity of a word's uses", "cosine − random"),
    "intra_adjusted": ("Similarity with the window's mean", "cosine − random"),
    "explained_adjusted": ("Variance that one direction explains", "share − random"),
    "static_adjusted": ("Similarity with the static embedding", "cosine − another token's"),
    "nearest": ("Nearest is the same word", "share of uses"),
    "margin": ("Nearest of the same word less nearest other", "cosine − cosine"),
}


class Samples(NamedTuple):
    """The tokens that enter, as rows of windows behind one another.

    Attributes:
        uses: Uses of words.
        windows: tokens of some windows, without special ones.
        at: Tokens at each position.
        positions: these.
    """

    uses: Uses
    windows: list[Rows]
    at: list[Rows]
    positions: Sequence[int]


def context_of_arrays(
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
        name: Name of their subject, for titles.
        layers: layer numbers; 0, 1, … by default.
        seed: Seed that the samples were drawn with.

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
    scores = []
    with use_scheduler(scheduler, "context"):
        for snapshot, states in snapshots.items():
            places = None if rows is None else rows[snapshot]
            scores.append(_measured(states, samples, places))
    columns = {field: np.array([score[field] for score in scores]) for field in scores[0]}
    if numbers[0] != 0:  # what is compared with is not the output of the embeddings
        for field in ("static_similarity", "static_baseline"):
            columns[field] = np.full_like(columns[field], np.nan)
    uses = samples.uses
    return ContextResult(
        **{field: column for field, column in columns.items() if field != "chance"},
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
        Groups.of(
            states, [rows_of_set if rows is None else rows[rows_of_set] for rows_of_set in kind]
        )
        for kind in kinds
    ]
    persisted = hold(*(group.blocks for group in groups))
    uses, random, windows, at = (
        group._replace(blocks=blocks) for group, blocks in zip(groups, persisted, strict=True)
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


POSITIONS = (0, 1, 2, 4, 16, 64, 256)
"""Positions at which tokens are compared, where windows are as long."""
AT_A_POSITION = 200
"""Windows at each."""


@job
def context(
    checkpoint: Tags,
    *,
    split: str = "dev",
    tokens: Annotated[int, Option(ge=10)] = 5_000,
    uses: Annotated[int, Option(ge=2)] = 20,
    seed: Seed = 0,
    **where: Unpack[OnDask],
) -> ContextResult:
    """Measure how much of a token's state is its context.

    Uses of a word are compared with each other, with other words of their window, and with random
    tokens.

    Examples:
        >>> import bertvision
        >>> words = bertvision.context("0.5e,1e", tokens=300)
        >>> words.self_similarity.shape  # (snapshots, layers)
        (2, 3)
        >>> sorted(words.adjusted())
        ['explained_adjusted', 'intra_adjusted', 'self_adjusted', 'static_adjusted']

    Args:
        checkpoint: Snapshots to analyse, such as 0e,1e.
        split: Split to analyse.
        tokens: Uses of words that are sampled, and tokens of windows.
        uses: Uses of a word, at most.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or words cannot be told.
        ProvenanceError: the snapshots do not hold the same tokens, or not the same layers.
    """
    request = Request(context, locals())
    splits = request.splits(tuple(dict.fromkeys(parse_tags(checkpoint))), split)
    request.same_layers()
    _check_tokens(splits[0])
    folder = request.workspace.require_snapshot(request.tags[0])

    def measure() -> ContextResult:
        from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer

        first = splits[0]
        vocabulary = Vocabulary.of(load_snapshot_tokenizer(folder))
        ids = in_order(first, "input_ids").astype(np.int64)
        lengths = first.plan.n_tokens[np.argsort(first.plan.example_id)].astype(np.int64)
        positions = [p for p in POSITIONS if (lengths > p).sum() > 1]
        samples = Samples(
            sample_uses(ids, lengths, vocabulary, most=tokens, of_word=uses, seed=seed),
            sample_windows(vocabulary.special[ids], lengths, tokens, seed),
            sample_positions(lengths, positions, AT_A_POSITION, seed),
            positions,
        )
        return context_of_arrays(
            {str(x.tag): x.dask() for x in splits},
            samples,
            rows=dict(zip(map(str, request.tags), joined_rows(splits), strict=True)),
            scheduler=request.scheduler,
            name=split,
            layers=first.record.layers,
            seed=seed,
        )

    return request.answer(ContextResult, measure)


def _check_tokens(split: ActivationSplit) -> None:
    """Refuse a split whose tokens are not known.

    Raises:
        InputError: it holds a vector for each window, or no ids of tokens.
    """
    if split.record.tokens == split.record.examples:
        raise InputError(
            f"{split.name} holds one vector for each window, and words are looked for in all "
            f"tokens: `bertvision extract --checkpoint {split.tag} --pool none` writes a split of "
            "these; give its name with --split"
        )
    if "input_ids" not in split.record.arrays:
        raise InputError(
            f"{split.name} was written without the ids of its tokens: `bertvision store rm "
            f"{split.name}`, then `bertvision extract --checkpoint {split.tag} --split "
            f"{split.split}` writes them"
        )
