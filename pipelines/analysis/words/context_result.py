"""What `context` gives back: how much of a token's state is its word, and how much its context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from bertvision.pipelines.analysis.fields import Axes, Names, Numbers
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.plotting import Chart, curves
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column

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
        name: what they are of, for titles.
        layers: layer numbers (0 = embedding output).
        n_words: words that are sampled.
        n_uses: uses of these.
        n_windows: windows of the intra-window similarity.
        n_window_tokens: tokens of these.
        n_at: by position tokens that entered.
        n_available: tokens that there are.
        n_special: of these, special tokens.
        n_pieces: pieces of words, which are left out.
        n_marks: tokens without a letter or a digit, which are left out.
        n_repeated: uses in surroundings that were there before, which are left out.
        n_rare: uses of words that have too few, which are left out.
        contexts: how many uses a word must have.
        seed: of the samples.
    """

    kind = "context"
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
    snapshots: Names
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
        of = f"{', '.join(self.snapshots)}, {self.name}"
        return f"Context, {of}, {self.n_uses:,} uses of {self.n_words:,} words"

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
        values = {name: getattr(self, name) for name in _MEASURED} | self.adjusted()
        return [
            {"snapshot": snapshot, "layer": layer}
            | {name: _number(of[k, i]) for name, of in values.items()}
            | {
                f"position_{p}": _number(self.by_position[k, j, i])
                for j, p in enumerate(self.positions)
            }
            for k, snapshot in enumerate(self.snapshots)
            for i, layer in enumerate(self.layers)
        ]

    def shown(self) -> list[dict[str, Any]]:
        """The rows, with neighbours in per cent."""
        found = []
        for row in self.rows():
            nearest = row["nearest"]
            found.append(row | {"percent": None if nearest is None else 100 * nearest})
        return found

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
        """What entered, and what did not."""
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


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
