"""``bertvision store audit``: whether stored hidden states are those of the tokens beside them."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.options import Json, Store, Workspace, show


def audit(
    name: Annotated[str, typer.Argument(help="Split, such as 0.3e/train.")],
    model: Annotated[
        str | None,
        typer.Option(help="Encoder of an imported split: a folder or a name on the hub."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Its tokenizer, where it is not beside the encoder.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Hidden states that the layers of an imported split are, such as 2,18,33; by "
            "default its indices."
        ),
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Examples that are computed again.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of their choice.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="How far states may be apart beside what the encoding loses, in parts of their "
            "distance from the mean; by default 0.01, or 0.1 where the arithmetic is not known to "
            "be float32."
        ),
    ] = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Compute a sample of a split again and compare; exit with 1 where an example is wrong.

    A checksum says that what is stored is what was written. This says that it is right: of these
    tokens, layers and weights.
    """
    from bertvision.verbs.store.audit import audit as run

    found = run(
        name,
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        sample=sample,
        seed=seed,
        tolerance=tolerance,
        workspace=workspace,
        store=store,
    )
    show(found, as_json, str)
    values = found.to_json()
    if values["wrong"] or values["deviations"]:
        raise typer.Exit(1)
