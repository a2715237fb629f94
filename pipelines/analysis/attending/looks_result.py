"""What attention heads look at, as it is read: a table of layers, rows of heads, heat maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from bertvision.pipelines.analysis.fields import Axes, Names, Numbers
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.sums.moments import Array
from bertvision.pipelines.plotting import Chart, HeatMap
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column

MEASURES = ("entropy", "cls", "sep", "previous", "next", "same")
"""What is measured of each head, in this order."""
TITLES = {
    "entropy": "entropy",
    "cls": "to the first token",
    "sep": "to [SEP]",
    "previous": "to the previous token",
    "next": "to the next token",
    "same": "to itself",
}
"""How people read them."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionResult(AnalysisResult):
    """What each attention head looks at, in the mean over windows.

    Attributes:
        values: (measures, layers, heads) means over windows of the mean over their tokens: the
            entropy in parts of that of looking at all tokens alike (1: broad, 0: at one token
            alone), and shares of attention from 0 to 1.
        errors: (measures, layers, heads) their standard errors over windows; NaN of one window.
        alike: (measures,) the same of looking at all tokens alike: what says nothing.
        measures: names, see `MEASURES`.
        layers: numbers of the transformer layers, from 1.
        heads: numbers of the attention heads, from 1.
        name: what was measured, for titles.
        n_windows: windows that entered.
        n_available: windows of the split.
        n_tokens: tokens of these windows.
        seed: of the sample of windows.
    """

    kind = "attention"
    heading = "What attention heads look at"
    caption = "By layer: entropy, and the attention head that looks most at each place"
    reading = (
        "Entropy: mean over the layer's heads, in parts of that of looking at all tokens alike. "
        "Others: the largest share of attention that a head of the layer gives there, and its "
        "number; the last row is what attention to all tokens alike would give. Of many heads one "
        "is always largest: --csv has them all, with standard errors."
    )
    seen = (
        "Heat maps of layer × attention head: the deeper the colour, the more of its attention a "
        "head gives there; entropy 1 is attention to all tokens alike."
    )

    values: Annotated[Array, Axes.of("measures", "layers", "heads")]
    errors: Annotated[Array, Axes.of("measures", "layers", "heads")]
    alike: Annotated[Array, Axes.of("measures")]
    measures: Names
    layers: Numbers
    heads: Numbers
    name: str
    n_windows: Count
    n_available: Count
    n_tokens: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        windows = f"{self.n_windows:,} of {self.n_available:,} windows"
        return f"Attention heads, {self.name}, {windows}, {self.n_tokens:,} tokens"

    def columns(self) -> list[Column]:
        """Columns for a layer."""
        return [
            Column("layer", "layer", "text"),
            Column("entropy", "entropy", digits=3),
            Column("lowest", "lowest", "text"),
            *(Column(name, TITLES.get(name, name), "text") for name in self.measures[1:]),
        ]

    def shown(self) -> list[dict[str, Any]]:
        """A row for each layer: its mean entropy, and its strongest heads."""

        def strongest(of: Array, at: int) -> str:
            return f"{of[at]:.3f} (head {self.heads[at]})"

        found: list[dict[str, Any]] = []
        for i, layer in enumerate(self.layers):
            entropy = self.values[0, i]
            row = {"layer": str(layer), "entropy": float(entropy.mean())}
            row["lowest"] = strongest(entropy, int(entropy.argmin()))
            for name, of in zip(self.measures[1:], self.values[1:, i], strict=True):
                row[name] = strongest(of, int(of.argmax()))
            found.append(row)
        shares = {n: f"{v:.3f}" for n, v in zip(self.measures[1:], self.alike[1:], strict=True)}
        return [*found, {"layer": "(all alike)", "entropy": 1.0, "lowest": None, **shares}]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head: measures and their standard errors."""
        made = self.to_json()
        return [
            {
                "name": self.name,
                "layer": layer,
                "head": head,
                **{name: made["values"][k][i][j] for k, name in enumerate(self.measures)},
                **{f"{name}_se": made["errors"][k][i][j] for k, name in enumerate(self.measures)},
            }
            for i, layer in enumerate(self.layers)
            for j, head in enumerate(self.heads)
        ]

    def charts(self) -> dict[str, Chart]:
        """A heat map of layer × head for each measure."""
        axes = ("layer", self.layers, "attention head", self.heads)
        return {
            name: HeatMap(
                *axes,
                "entropy (1: all tokens alike)"
                if name == "entropy"
                else f"share of attention {TITLES.get(name, name)}",
                values,
                title=TITLES.get(name, name),
                cell=(18.0, 18.0),
            )
            for name, values in zip(self.measures, self.values, strict=True)
        }
