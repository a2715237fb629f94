"""Attention heads that follow dependency relations, as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from bertvision.pipelines.analysis.fields import Axes, Names
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.plotting import Chart, points
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column

DIRECTIONS = ("dependent to head", "head to dependent")
"""Who looks at whom."""
OfRelations = Annotated[Array, Axes.of("relations")]


@dataclass(frozen=True, eq=False, repr=False)
class RelationsResult(AnalysisResult):
    """The best attention head of each dependency relation, beside the best offset.

    Attributes:
        relations: names, the most frequent first.
        examples: (relations,) how often each stands in the scored sentences.
        layers: (relations,) layer of the best head, from 1.
        heads: (relations,) its number, from 1.
        directions: (relations,) who looks at whom, of `DIRECTIONS`.
        accuracy: (relations,) how often it looks most at the right word.
        offsets: (relations,) the best offset from a word to its head.
        by_offset: (relations,) how often the head stands there.
        low: (relations,) lower end of the 95 % interval, over sentences, of their difference.
        high: (relations,) upper end.
        few: relations that have too few examples.
        few_examples: (few,) how many they have.
        name: what was measured, for titles.
        n_chosen: sentences on which heads and offsets were chosen.
        n_scored: other sentences, on which they were scored.
        n_cut: sentences that were left out because they are longer than a window.
        seed: of the choice of sentences and of the bootstrap.
    """

    kind = "relations"
    heading = "Attention heads that follow a dependency relation"
    caption = "By relation: the best attention head, and the best fixed offset"
    reading = (
        "Accuracy: how often the word that a word looks at most is its head, or it the head's; the "
        "head and the offset were chosen on other sentences. Ahead: by how much the attention head "
        "is better than the offset, with its 95 % interval over sentences; it does not cover that "
        "the best of many heads was taken."
    )
    seen = "For each relation: how often the best attention head is right, and the best offset."

    relations: Names
    examples: Annotated[tuple[Count, ...], Axes.of("relations")]
    layers: Annotated[tuple[Count, ...], Axes.of("relations")]
    heads: Annotated[tuple[Count, ...], Axes.of("relations")]
    directions: Annotated[tuple[str, ...], Axes.of("relations")]
    accuracy: OfRelations
    offsets: Annotated[tuple[int, ...], Axes.of("relations")]
    by_offset: OfRelations
    low: OfRelations
    high: OfRelations
    few: tuple[str, ...]
    few_examples: Annotated[tuple[Count, ...], Axes.of("few")]
    name: str
    n_chosen: Count
    n_scored: Count
    n_cut: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        many = f"chosen on {self.n_chosen:,} sentences, scored on {self.n_scored:,} others"
        return f"Dependency relations, {self.name}, {many}"

    def columns(self) -> list[Column]:
        """Columns for a relation."""
        return [
            Column("relation", "relation", "text"),
            Column("examples", "examples", "count"),
            Column("attention_head", "layer.head", "text"),
            Column("direction", "looks", "text"),
            Column("accuracy", "accuracy (%)"),
            Column("offset", "offset", "text"),
            Column("by_offset", "by offset (%)"),
            Column("ahead", "ahead (95 %)", interval=True),
        ]

    def shown(self) -> list[dict[str, Any]]:
        """The rows in per cent, a head as ``layer.head``."""
        return [
            row
            | {
                "attention_head": f"{row['layer']}.{row['head']}",
                "offset": f"{row['offset']:+d}".replace("-", "−"),
                **{
                    key: 100 * row[key]
                    for key in ("accuracy", "by_offset", "ahead", "ahead_low", "ahead_high")
                },
            }
            for row in self.rows()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each relation."""
        return [
            {
                "name": self.name,
                "relation": relation,
                "examples": self.examples[i],
                "layer": self.layers[i],
                "head": self.heads[i],
                "direction": self.directions[i],
                "accuracy": float(self.accuracy[i]),
                "offset": self.offsets[i],
                "by_offset": float(self.by_offset[i]),
                "ahead": float(self.accuracy[i] - self.by_offset[i]),
                "ahead_low": float(self.low[i]),
                "ahead_high": float(self.high[i]),
            }
            for i, relation in enumerate(self.relations)
        ]

    def remarks(self) -> list[str]:
        """What was left out, with counts."""
        found = []
        if self.few:
            named = ", ".join(
                f"{r} ({n})" for r, n in zip(self.few, self.few_examples, strict=True)
            )
            found.append(f"Left out, with too few examples: {named}.")
        if self.n_cut:
            found.append(f"Left out, longer than a window: {self.n_cut:,} sentences.")
        return found

    def charts(self) -> dict[str, Chart]:
        """Accuracy of the best head and offset by relation; and their difference, with interval."""
        rows, of = self.shown(), "dependency relation"
        both = {"best attention head": "accuracy", "best offset": "by_offset"}
        ahead, equal = {"difference": "ahead"}, {"no difference": 0.0}
        return {
            "accuracy": points(rows, both, "accuracy (%)", name="relation", of_places=of),
            "ahead": points(
                rows,
                ahead,
                "attention head less offset (points)",
                name="relation",
                of_places=of,
                levels=equal,
            ),
        }
