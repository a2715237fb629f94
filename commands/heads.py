"""Heads: listed, trained, evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from bertvision.commands.options import (
    DryRun,
    HeadDevices,
    Json,
    Precision,
    Store,
    Workspace,
    runs_verb,
    show,
)
from bertvision.pipelines.text import fill, format_table
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.verbs.arguments.reading import parse_choice
from bertvision.verbs.tables import Values, number


@runs_verb
def train(
    heads: Annotated[list[str], typer.Argument(help="Names from `bertvision heads`.")],
    *,
    checkpoint: Annotated[
        str | None, typer.Option(help="Snapshot to train on; by default the only one stored.")
    ] = None,
    options: TrainOptions,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and order.")] = 0,
    fraction: Annotated[
        float, typer.Option(help="Part of the training examples, 0 to 1; parts are nested.")
    ] = 1.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace heads that were trained otherwise.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="The same as --logger tensorboard.")
    ] = False,
    logger: Annotated[
        str | None,
        typer.Option(help="Also log losses with csv, tensorboard, wandb or mlflow."),
    ] = None,
    devices: HeadDevices = 1,
    workspace: Workspace = None,
    store: Store = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train heads on stored activations, several in one pass, without running BERT.

    A name may carry its own part of the examples and seed, adapter-386-shared@f0.3@s1, and its own
    layers, learning rate and epochs, learned-pooling@l0-6@lr0.01@e3: heads that differ in these
    stand beside each other.
    """


@runs_verb
def evaluate(
    heads: Annotated[list[str], typer.Argument(help="Names of trained heads.")],
    trained_on: Annotated[
        str | None,
        typer.Option(help="Snapshot the heads were trained on; by default the only one."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Snapshot whose activations to evaluate on; by default the same."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split to score.")] = "dev",
    precision: Precision = "auto",
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Score trained heads with the official metric, on any snapshot's activations."""


def heads(
    name: Annotated[
        str | None, typer.Argument(help="Show this head in full; by default list all.")
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(help="Width of the hidden states; by default the workspace's, or 1024."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="How many hidden states the encoder has, with the embedding output; by default "
            "the workspace's, or 25."
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="List this kind alone: span or classification.")
    ] = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """List the heads, or show one, with what they cost.

    Sizes are those for the workspace's encoder; outside a workspace, for BERT-large.
    """
    from bertvision.models import Kind
    from bertvision.models.registry import describe_head, describe_heads

    wanted = parse_choice(kind, get_args(Kind), "--kind") if kind else None
    layers, hidden, encoder = _dimensions(workspace, layers, hidden)
    if name is not None:
        one = describe_head(name, layers, hidden)._asdict()
        show(one, as_json, lambda head: head_table(head, encoder))
    else:
        infos = [info._asdict() for info in describe_heads(layers, hidden, wanted)]
        show(infos, as_json, lambda heads: heads_table(heads, encoder))


def _dimensions(
    workspace: Path | None, layers: int | None, hidden: int | None
) -> tuple[int, int, str]:
    """Hidden states, their width, and a line that says whose these are."""
    from bertvision.errors import WorkspaceError
    from bertvision.verbs.arguments.checks import find_workspace

    whose, found = "BERT-large", (25, 1024)
    if layers is None or hidden is None:
        try:
            model = find_workspace(workspace).config.model
            whose, found = (
                "the workspace's encoder",
                (model.num_hidden_layers + 1, model.hidden_size),
            )
        except WorkspaceError:
            if workspace is not None:
                raise
    if layers is not None or hidden is not None:
        whose = "an encoder"
    layers, hidden = found[0] if layers is None else layers, found[1] if hidden is None else hidden
    return layers, hidden, f"for {whose}: {layers} hidden states of width {hidden:,}"


_LEGEND = (
    "M mult./token: millions of multiplications of a forward pass for each token.  *: costly "
    "beside the encoder; `bertvision sweep` trains it only when named.  `bertvision heads NAME` "
    "shows one head in full."
)


def heads_table(heads: Sequence[Values], encoder: str) -> str:
    """Name, parameters, arithmetic and description of each head.

    Args:
        heads: fields of `HeadInfo`.
        encoder: what the sizes are for.
    """
    table = format_table(
        ["head", "parameters", "% BERT-large", "M mult./token", "description"],
        [
            [
                h["name"] + (" *" if h["costly"] else ""),
                f"{h['total']:,}",
                f"{h['percent']:.4f}",
                _millions(h),
                h["description"],
            ]
            for h in heads
        ],
    )
    return f"{table}\n\n{fill(f'Sizes {encoder}.')}\n{fill(_LEGEND)}"


def head_table(head: Values, encoder: str) -> str:
    """One head: what it does, where it comes from, what it costs."""
    from bertvision.models.zoo import HEADS

    spec = HEADS.get(head["name"])
    made = spec.target + "".join(f" {k}={v}" for k, v in spec.kwargs.items()) if spec else ""
    lines = {
        "head": head["name"],
        "kind": head["kind"],
        "what": head["description"],
        "source": head["source"],
        "made by": made,
        "sizes": encoder,
        "parameters": f"{head['trainable']:,} trained, {head['total']:,} with running statistics",
        "": f"{head['percent']:.4f} % of BERT-large",
        "arithmetic": f"{_millions(head)} million multiplications for each token",
        "costly": "yes: `bertvision sweep` trains it only when named" if head["costly"] else "no",
    }
    return "\n".join(f"{name:<12}{text}" for name, text in lines.items() if text)


def _millions(head: Values) -> str:
    return number(head["multiplications"] and head["multiplications"] / 1e6, "{:.3g}")
