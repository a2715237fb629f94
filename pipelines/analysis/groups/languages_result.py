"""How far languages, or any groups of texts, lie apart, as it is read."""

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

OfLayers = Annotated[Array, Axes.of("layers")]


@dataclass(frozen=True, eq=False, repr=False)
class LanguagesResult(AnalysisResult):
    """How far groups of texts lie apart in each layer.

    Attributes:
        between: (layers,) share of the variance that lies between groups.
        cosine: (layers, groups, groups) cosines between the centroids of groups.
        identified: (layers,) accuracy of a linear classifier on the other half of the texts.
        identified_centred: (layers,) the same, after each group is moved to the same centre.
        clusters: (layers,) V-measure of k-means.
        clusters_centred: (layers,) the same, centred.
        retrieved: (layers,) how often the nearest text of another group is the translation; NaN
            where texts are no translations.
        retrieved_centred: (layers,) the same, centred.
        majority: accuracy of always naming the largest group.
        groups: their names.
        sizes: (groups,) texts of each.
        name: what was measured, for titles.
        layers: layer numbers (0 = embedding output).
        n_scored: texts that the classifier was scored on.
        seed: of the sample, the halves and the starts of k-means.
    """

    kind = "languages"
    heading = "How far languages, or other groups of texts, lie apart"
    caption = "Groups of texts by layer: told apart as they are, and after centring"
    reading = (
        "Between: share of the variance that lies between groups. Identified: accuracy of a linear "
        "classifier on texts that it was not trained on. Clusters: V-measure of k-means with as "
        "many clusters as groups. Centred: after the mean of each group is taken away, which "
        "leaves what groups have in common; a linear classifier then has nothing to go on, and "
        "comes to the share of the largest group."
    )
    seen = (
        "How well groups are told apart, as they are and centred; retrieval; and the share of the "
        "variance that lies between groups."
    )

    between: OfLayers
    cosine: Annotated[Array, Axes.of("layers", "groups", "groups")]
    identified: OfLayers
    identified_centred: OfLayers
    clusters: OfLayers
    clusters_centred: OfLayers
    retrieved: OfLayers
    retrieved_centred: OfLayers
    majority: float
    groups: Names
    sizes: Annotated[tuple[Count, ...], Axes.of("groups")]
    name: str
    layers: Numbers
    n_scored: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        of = ", ".join(f"{g} ({n:,})" for g, n in zip(self.groups, self.sizes, strict=True))
        return f"Groups of texts, {self.name}: {of}"

    @property
    def _translated(self) -> bool:
        return bool(np.isfinite(self.retrieved).any())

    def columns(self) -> list[Column]:
        """Columns for a layer; retrieval where there are translations."""
        return [
            Column("layer", "layer", "text"),
            Column("between", "between", digits=3),
            Column("identified", "identified", digits=3),
            Column("identified_centred", "centred", digits=3),
            Column("clusters", "clusters", digits=3),
            Column("clusters_centred", "centred", digits=3),
            *(
                [
                    Column("retrieved", "retrieved", digits=3),
                    Column("retrieved_centred", "centred", digits=3),
                ]
                if self._translated
                else []
            ),
        ]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layer, with the cosines of every two centroids."""
        values = self.to_json()
        keys = ["between", "identified", "identified_centred", "clusters", "clusters_centred"]
        keys += ["retrieved", "retrieved_centred"]
        return [
            {
                "name": self.name,
                "layer": layer,
                **{key: values[key][i] for key in keys},
                **{
                    f"cosine {self.groups[a]} {self.groups[b]}": values["cosine"][i][a][b]
                    for a in range(len(self.groups))
                    for b in range(a)
                },
            }
            for i, layer in enumerate(self.layers)
        ]

    def remarks(self) -> list[str]:
        """What chance gives."""
        return [
            f"Always naming the largest group is right on {100 * self.majority:.1f} % of the "
            f"{self.n_scored:,} texts that classifiers were scored on."
        ]

    def charts(self) -> dict[str, Chart]:
        """Each measure as it is beside the same, centred; retrieval where it was measured."""
        told = {"identified": "accuracy (share)", "clusters": "V-measure of k-means"}
        told |= {"retrieved": "translations found (share)"} if self._translated else {}
        rows = self.rows()
        both = {
            key: [
                {"layer": row["layer"], "texts": how, key: row[f"{key}{end}"]}
                for how, end in (("as they are", ""), ("centred", "_centred"))
                for row in rows
            ]
            for key in told
        }
        levels = {"identified": {"largest group": self.majority}}
        found: dict[str, Chart] = {
            key: curves(both[key], key, label, by=["texts"], levels=levels.get(key))
            for key, label in told.items()
        }
        found["between"] = curves(rows, "between", "variance between groups (share)", by=["name"])
        return found
