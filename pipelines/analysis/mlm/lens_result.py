"""What the words that layers give say, as a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from bertvision.pipelines.analysis.fields import Axes, Numbers
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.plotting import Chart, curves
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column

OfLayers = Annotated[Array, Axes.of("layers")]


@dataclass(frozen=True, eq=False, repr=False)
class LensResult(AnalysisResult):
    """How well the word that each token is can be read from its state in each layer.

    Attributes:
        top1: (layers,) share of tokens whose own word gets the largest logit.
        top1_rare: (layers,) the same of rare words: those beside the most frequent ones that make
            up half of the tokens; NaN where there are none.
        mrr: (layers,) mean of 1 / rank of the own word.
        log_p: (layers,) mean log-probability of the own word, nats.
        kl: (layers,) mean KL(p ‖ q), nats: p what the last of the layers says, q what this one
            does.
        name: what was measured, for titles.
        head: what read the states, for titles.
        note: what is to be known of the head.
        layers: layer numbers (0 = embedding output).
        n_words: size of the vocabulary.
        n_tokens: tokens that entered.
        n_rare: tokens of rare words among them.
        n_available: tokens that the split holds, without special ones.
        majority: share of the most frequent word: the top-1 of who always gives it.
        unigram_log_p: mean log-probability, in nats, by the frequencies of the split themselves.
        seed: of the sample of tokens.
    """

    kind = "lens"
    heading = "The word that a state gives (lens)"
    caption = "Reading the word of each token from its state in every layer"
    reading = (
        "No token was masked: the encoder saw each word that is asked for. So the numbers say how "
        "well the word that stands there can still be read from a layer's state by the head, not "
        "how well hidden words are guessed. Top-1: share of tokens whose own word comes first; of "
        "rare words: without the frequent words that make up half of the tokens. MRR: mean of 1 / "
        "rank. Log p: mean log-probability of the own word, nats. KL: how far what the layer says "
        "of all words is from what the last one says, nats."
    )
    seen = (
        "Panels over the layers: how often the token's own word comes first, of all words and of "
        "rare ones, its mean 1 / rank and log-probability, and the divergence from the last layer."
    )

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

    def title(self) -> str:
        """One line that says what was measured on how much."""
        of = f"{self.n_tokens:,} of {self.n_available:,} tokens"
        return f"Lens, {self.name}, {self.head}, {of}"

    def columns(self) -> list[Column]:
        """The columns of a layer."""
        return [
            Column("layer", "layer", "text"),
            Column("top1", "top-1", digits=3),
            Column("top1_rare", "of rare words", digits=3),
            Column("mrr", "MRR", digits=3),
            Column("log_p", "log p", digits=2),
            Column("kl", "KL to the last", digits=2),
        ]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layer, as ``--csv`` writes them; NaN becomes None."""
        values = self.to_json()
        keys = ("top1", "top1_rare", "mrr", "log_p", "kl")
        return [
            {
                "name": self.name,
                "head": self.head,
                "layer": layer,
                **{key: values[key][i] for key in keys},
            }
            for i, layer in enumerate(self.layers)
        ]

    def remarks(self) -> list[str]:
        """The head, and what one scores who looks at no state."""
        return [
            self.note,
            f"Without looking at a state: always giving the most frequent of {self.n_words:,} "
            f"words scores top-1 {self.majority:.3f}; giving each its frequency in the split log p "
            f"{self.unigram_log_p:.2f}.".replace("-", "−").replace("top−1", "top-1"),
        ]

    def charts(self) -> dict[str, Chart]:
        """A line for each measure."""
        rows, by = self.rows(), ["name", "head"]
        most = {"most frequent word": self.majority}
        often = {"by frequency": self.unigram_log_p}
        return {
            "top1": curves(rows, "top1", "top-1 (share of tokens)", by=by, levels=most),
            "top1_rare": curves(rows, "top1_rare", "top-1 (share of rare words)", by=by),
            "mrr": curves(rows, "mrr", "mean 1 / rank of the own word", by=by),
            "log_p": curves(rows, "log_p", "log p of the own word (nats)", by=by, levels=often),
            "kl": curves(rows, "kl", "KL to the last layer (nats)", by=by),
        }
