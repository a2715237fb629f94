"""Shared parts of results of layer × layer: a table, rows and a heat map for each measure."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Numbers
from bertvision.pipelines.files import to_json
from bertvision.pipelines.plotting import Chart, HeatMap, curves
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column

Matrix = Annotated[Array, Axes.of("layers_x", "layers_y")]


@dataclass(frozen=True, eq=False, repr=False)
class LayerByLayer(AnalysisResult):
    """Base of results that have a value for every layer of x with every layer of y.

    Attributes:
        x: Name of x, for titles.
        y: Name of y.
        layers_x: layer numbers of the rows (0 = embedding output).
        layers_y: layer numbers of the columns.
        n_tokens: tokens that entered.
        n_available: tokens that the splits hold.
        seed: Seed of the sample of tokens.
    """

    named = ("x", "y")
    quantity: ClassVar[str]
    """Name of the values, on their scale of colours."""

    x: str
    y: str
    layers_x: Numbers
    layers_y: Numbers
    n_tokens: Count
    n_available: Count
    seed: int

    @abstractmethod
    def measures(self) -> dict[str, str]:
        """By field its title; the first is that of the report's table."""

    def tokens(self) -> str:
        """The end of a title: of what, on how much."""
        counts = f"{self.n_tokens:,} of {self.n_available:,} tokens"
        return f"{self.x} × {self.y}, {counts}"

    def columns(self) -> list[Column]:
        """A column for each layer of y, of the first measure."""
        return self._columns(next(iter(self.measures())))

    def _columns(self, measure: str) -> list[Column]:
        digits = 3 if len(self.layers_y) <= 13 else 2
        across = (Column(f"{measure}_{j}", str(j), digits=digits) for j in self.layers_y)
        return [Column("layer", f"{self.x} \\ {self.y}", "text"), *across]

    def shown(self) -> list[dict[str, Any]]:
        """A row for each layer of x, with every measure."""
        lines: list[dict[str, Any]] = [{"layer": str(layer)} for layer in self.layers_x]
        for name in self.measures():
            for line, values in zip(lines, to_json(getattr(self, name)), strict=True):
                pairs = zip(self.layers_y, values, strict=True)
                line |= {f"{name}_{j}": value for j, value in pairs}
        return lines

    def tables(self) -> list[tuple[str, list[Column], list[dict[str, Any]]]]:
        """For each measure a row per layer of x, a column per layer of y."""
        rows = self.shown()
        return [(label, self._columns(name), rows) for name, label in self.measures().items()]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each pair of layers, as ``--csv`` writes them; NaN becomes None."""
        labels = {"layer_x": self.layers_x, "layer_y": self.layers_y}
        return self.listed(labels, {name: getattr(self, name) for name in self.measures()})

    def charts(self) -> dict[str, Chart]:
        """A heat map for each measure, and each measure of the layers of the same number."""
        axes = (f"layer of {self.x}", self.layers_x, f"layer of {self.y}", self.layers_y)
        maps: dict[str, Chart] = {
            name: HeatMap(
                *axes,
                f"{self.quantity}, {label}",
                getattr(self, name),
                title=label,
                missing="layer does not vary",
            )
            for name, label in self.measures().items()
        }
        same = [
            row | {"pair": f"{self.x} and {self.y}"}
            for row in self.rows()
            if row["layer_x"] == row["layer_y"]
        ]
        for name, label in self.measures().items() if same else ():
            of_values = f"{self.quantity}, {label}, of the same layer"
            maps[f"{name}_same"] = curves(same, name, of_values, by=["pair"], places="layer_x")
        return maps

    def drawn(self) -> list[Chart]:
        """The heat maps of layer × layer."""
        return [chart for chart in self.charts().values() if isinstance(chart, HeatMap)]
