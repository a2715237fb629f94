"""The two snapshots that an analysis sets side by side, of one workspace or of two."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import dask.array as da

from bertvision.errors import ProvenanceError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.joined import Rows, places_in
from bertvision.pipelines.analysis.kept import Given, Other
from bertvision.pipelines.extraction.layers import layers_text
from bertvision.pipelines.workspace.workspace import Workspace


class Sides(NamedTuple):
    """A split of each of two snapshots.

    Attributes:
        x: of the rows.
        y: of the columns.
        names: what each is called, for titles.
        own: those that the workspace holds.
        others: those that another one holds, by name.
    """

    x: ActivationSplit
    y: ActivationSplit
    names: tuple[str, str]
    own: tuple[ActivationSplit, ...]
    others: Mapping[str, Other]

    @property
    def are_one(self) -> bool:
        """Whether both are the same split."""
        return not self.others and self.x.name == self.y.name

    def arrays(self) -> tuple[da.Array, da.Array, Rows | None]:
        """The hidden states of both, the same object where both are one, and see `places_in`.

        Raises:
            ProvenanceError: they do not hold the same tokens.
        """
        places, states = places_in(self.x, self.y), self.x.dask()
        return states, states if self.are_one else self.y.dask(), places

    def told(self) -> dict[str, Any]:
        """Names and layers, as functions of arrays take them."""
        return {
            "names": self.names,
            "layers_x": self.x.record.layers,
            "layers_y": self.y.record.layers,
        }


def sides(
    workspace: Workspace, first: str, second: str, split: str, beside: Workspace | None
) -> Sides:
    """A split of two snapshots.

    Args:
        workspace: with the first.
        first: snapshot of the rows.
        second: snapshot of the columns.
        split: which both have.
        beside: with the second; None is the same workspace.

    Raises:
        IncompleteSplitError: shards of one are missing.
    """
    x = workspace.split(first, split).require_complete()
    y = (beside or workspace).split(second, split).require_complete()
    if beside is None:
        return Sides(x, y, (x.name, y.name), (x, y), {})
    mine, theirs = told_apart((workspace, beside))
    others = {f"{theirs}: {y.name}": Other(beside, y)}
    return Sides(x, y, (f"{mine}: {x.name}", f"{theirs}: {y.name}"), (x,), others)


def check_layers(splits: Sequence[ActivationSplit]) -> None:
    """Refuse splits that hold other layers than the first of them.

    Raises:
        ProvenanceError: one does; names both and what they hold.
    """
    first, *others = splits
    for other in others:
        if first.record.layers != other.record.layers:
            raise ProvenanceError(
                f"{first.name} holds layers {layers_text(first.record.layers)}, {other.name} "
                f"{layers_text(other.record.layers)}: extract the same layers of both"
            )


def given_beside(workspace: Workspace, beside: Workspace | None) -> dict[str, Given]:
    """The option that names the other workspace, as it is typed where one stands in the first."""
    if beside is None:
        return {}
    _, name = told_apart((workspace, beside))
    path = os.path.relpath(beside.root, workspace.root)
    return {"with": Given(path, None, named=f"with-{name}")}


def told_apart(workspaces: Sequence[Workspace]) -> list[str]:
    """The names of the folders of workspaces, with as many of those above as tell them apart."""
    parts = [workspace.root.parts for workspace in workspaces]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts) and depth < max(map(len, parts)):
        depth += 1
    return ["-".join(part[-depth:]).removeprefix("/-") for part in parts]
