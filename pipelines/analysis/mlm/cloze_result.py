"""What a cloze test says, as a result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

from bertvision.pipelines.analysis.fields import Axes, Names
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.plotting import Chart, points
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column

OfGroups = Annotated[Array, Axes.of("groups")]
_SHOWN = 8
_SYSTEMS = {
    "p1": "P@1",
    "chance": "guessing",
    "majority": "commonest answer",
    "shuffled": "P@1, shuffled words",
    "negated": "P@1, negated",
}
"""Names that are told of what was left out; the rest are in the JSON."""


@dataclass(frozen=True, eq=False, repr=False)
class ClozeResult(AnalysisResult):
    """How often the right word is preferred to the others it may be chosen from.

    All shares are of items, by group; NaN where a group has no such item.

    Attributes:
        p1: (groups,) share of items whose answer comes first.
        p1_low: (groups,) lower end of its 95 % interval.
        p1_high: (groups,) its upper end.
        pk: (groups,) share whose answer is among the first ``k``, of items with more candidates.
        mrr: (groups,) mean of 1 / rank of the answer.
        chance: (groups,) ``p1`` of guessing.
        majority: (groups,) ``p1`` of always giving the candidate that is most often the answer
            where the same candidates are to be chosen from.
        shuffled: (groups,) ``p1`` where the other words stand in a random order, of items with two
            words or more.
        negated: (groups,) how often the answer comes first in the negated text.
        negated_same: (groups,) how often the same word comes first in both.
        groups: their names; ``all`` is the last where there are several.
        n_items: items of each.
        n_negated: items of each with a negated text.
        n_candidates: (groups,) mean number of candidates.
        name: the set of items, for titles.
        model: what answered, for titles.
        note: what is to be known of it.
        k: of ``pk``.
        left_out: what was left out, each with its reason: items, and candidates that are not one
            token.
        resamples: of the bootstrap over items.
        seed: of the bootstrap, and of the order of shuffled words.
    """

    kind = "cloze"
    heading = "The missing word (cloze tests)"
    caption = "How often the right word comes first where one word is masked"
    reading = (
        "P@1: share of items whose answer the MLM head prefers to all other candidates, with a 95 "
        "% interval from drawing items again. Guessing and the commonest answer see no text. "
        "Shuffled: the other words of the text in a random order; what stays right there needs no "
        "syntax. Negated: P@1 of the same answer where the text denies it, which should be low; "
        "same: how often both texts get the same word."
    )
    seen = "A row for each group: P@1 with its interval, beside guessing and the controls."

    p1: OfGroups
    p1_low: OfGroups
    p1_high: OfGroups
    pk: OfGroups
    mrr: OfGroups
    chance: OfGroups
    majority: OfGroups
    shuffled: OfGroups
    negated: OfGroups
    negated_same: OfGroups
    groups: Names
    n_items: Annotated[tuple[Count, ...], Axes.of("groups")]
    n_negated: Annotated[tuple[Count, ...], Axes.of("groups")]
    n_candidates: OfGroups
    name: str
    model: str
    note: str
    k: Count
    left_out: tuple[str, ...]
    resamples: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        return f"Cloze, {self.model}, {self.name}, {self.n_items[-1]:,} items"

    def columns(self) -> list[Column]:
        """The columns of a group; controls that no item has are left out."""
        rows = self.rows()
        columns = [
            Column("group", "group", "text"),
            Column("items", "items", "count"),
            Column("candidates", "candidates", digits=0),
            Column("p1", "P@1", digits=3, interval=True),
            Column("pk", f"P@{self.k}", digits=3),
            Column("mrr", "MRR", digits=3),
            Column("chance", "guessing", digits=3),
            Column("majority", "commonest answer", digits=3),
            Column("shuffled", "shuffled", digits=3),
            Column("negated", "negated", digits=3),
            Column("negated_same", "same", digits=3),
        ]
        return [c for c in columns if any(row[c.key] is not None for row in rows)]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each group, as ``--csv`` writes them; NaN becomes None."""
        values = self.to_json()
        shares = ("p1", "p1_low", "p1_high", "pk", "mrr", "chance", "majority", "shuffled")
        return [
            {
                "name": self.name,
                "model": self.model,
                "group": group,
                "items": self.n_items[i],
                "candidates": values["n_candidates"][i],
                **{key: values[key][i] for key in (*shares, "negated", "negated_same")},
                "negated_items": self.n_negated[i],
            }
            for i, group in enumerate(self.groups)
        ]

    def remarks(self) -> list[str]:
        """What answered, and what was left out."""
        told = [self.note]
        if self.left_out:
            more = len(self.left_out) - _SHOWN
            shown = "; ".join(self.left_out[:_SHOWN]) + (
                f"; and {more:,} more, in the JSON" if more > 0 else ""
            )
            told.append(f"Left out: {shown}.")
        return told

    def charts(self) -> dict[str, Chart]:
        """A row of points for each group: P@1 with its interval, and the controls there are."""
        names = {name: key for key, name in _SYSTEMS.items()}
        rows = [row | {"group": f"{row['group']} (n = {row['items']:,})"} for row in self.rows()]
        chart = points(rows, names, "items answered (share)", name="group")
        return {"p1": replace(chart, span=(0, 1))}
