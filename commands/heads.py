"""Heads: listed, trained, evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from bertvision.commands.options import (
    Json,
    Precision,
    Store,
    Workspace,
    runs_verb,
    show,
)
from bertvision.pipelines.text import format_table
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.verbs.arguments.reading import parse_choice
from bertvision.verbs.tables import Values, number


@runs_verb
def train(
    heads: Annotated[list[str], typer.Argument(help="Names from `bertvision heads`.")],
    *,
    checkpoint: Annotated[str | None, typer.Option(help="Snapshot to train on.")] = None,
    options: TrainOptions,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and order.")] = 0,
    fraction: Annotated[
        float, typer.Option(help="Part of the training examples, 0 to 1; parts are nested.")
    ] = 1.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace heads that were trained otherwise.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")
    ] = False,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Train heads on stored activations, several in one pass, without running BERT.

    A name may carry its own part of the examples and seed, adapter-386-shared@f0.3@s1, and its own
    layers, learning rate and epochs, learned-pooling@l0-6@lr0.01@e3: heads that differ in these
    stand beside each other.
    """


@runs_verb
def evaluate(
    heads: Annotated[list[str], typer.Argument(help="Trained heads.")],
    trained_on: Annotated[
        str | None, typer.Option(help="Snapshot the heads were trained on.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Snapshot whose activations to evaluate on.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split to score.")] = "dev",
    precision: Precision = "auto",
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Score trained heads with the official metric, on any snapshot's activations."""


def heads(
    hidden: Annotated[
        int | None, typer.Option(help="Width of the hidden states; by default BERT-large's 1024.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(help="Hidden states, embedding output included; by default BERT-large's 25."),
    ] = None,
    kind: Annotated[str | None, typer.Option(help="span or classification alone.")] = None,
    workspace: Annotated[
        Path | None, typer.Option("--workspace", "-w", help="Take the dimensions of its encoder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the heads with their parameters, by default at BERT-large's dimensions."""
    from bertvision.models import Kind
    from bertvision.models.registry import describe_heads
    from bertvision.verbs.arguments.checks import find_workspace

    if workspace is not None:
        model = find_workspace(workspace).config.model
        hidden = model.hidden_size if hidden is None else hidden
        layers = model.num_hidden_layers + 1 if layers is None else layers
    wanted = parse_choice(kind, get_args(Kind), "--kind") if kind else None
    layers, hidden = 25 if layers is None else layers, 1024 if hidden is None else hidden
    infos = describe_heads(layers, hidden, wanted)
    show([info._asdict() for info in infos], as_json, heads_table)


def heads_table(heads: Sequence[Values]) -> str:
    """Name, parameters, arithmetic and description of each head."""
    return format_table(
        ["head", "trainable", "total", "% BERT-large", "M mult./token", "description"],
        [
            [
                h["name"],
                f"{h['trainable']:,}",
                f"{h['total']:,}",
                f"{h['percent']:.4f}",
                number(h["multiplications"] and h["multiplications"] / 1e6, "{:.3g}"),
                h["description"] + (" (costly)" if h["costly"] else ""),
            ]
            for h in heads
        ],
    )
