"""``bertvision structure``: what of gold trees each layer holds."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Csv, Json, Plot, Store, Workspace, runs_verb
from bertvision.pipelines.analysis.structure.options import StructureOptions


@runs_verb
def structure(
    checkpoint: Annotated[
        str, typer.Argument(help="Snapshots, such as 0e,1e; untrained has random weights.")
    ],
    *,
    split: Annotated[
        str,
        typer.Option(
            help="Split that is scored; probes are trained on train of the same treebank."
        ),
    ] = "treebank-test",
    options: StructureOptions,
    plot: Plot = None,
    csv: Csv = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Measure how much of gold trees each layer holds, by structural probes and edge probing.

    Reads a stored treebank with train and dev, which `bertvision extract --task treebank` stores. A
    second call with the same settings, of the same weights, gives what was kept.
    """
