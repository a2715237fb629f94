"""What layers say over the vocabulary: the lens on stored states, and cloze tests."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.analyses.shared import runs_analysis
from bertvision.commands.options import Csv, Json, MaxTokens, Plot, Workspace, runs_verb


@runs_analysis
def lens(
    checkpoint: Annotated[str, typer.Argument(help="Snapshot to read.")],
    split: Annotated[str, typer.Option(help="Split to read, stored with all tokens.")] = "dev",
    trained: Annotated[
        bool,
        typer.Option("--trained", help="Train a head for each layer, instead of the MLM head."),
    ] = False,
    train_split: Annotated[
        str | None, typer.Option(help="Split that heads are trained on (default train).")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of training, of about 512 tokens (default 500)."),
    ] = None,
    dropout: Annotated[
        float | None,
        typer.Option(min=0, help="Share of a state set to zero in training (default 0.5)."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (default 0.001).")] = None,
    max_tokens: MaxTokens = 10_000,
) -> None:
    """Read the word of each token from its state in every layer, by the encoder's own MLM head.

    No word is masked: it says what a layer still holds of the word that stands there. With
    --trained each layer is read by a head of its own, which is trained from the store first.
    """


@runs_verb
def cloze(
    checkpoint: Annotated[str, typer.Argument(help="Snapshot to ask.")] = "0e",
    items: Annotated[
        str,
        typer.Option(
            help="File of items (.jsonl), or agreement: sentences made here, in which a verb has "
            "to agree with its subject."
        ),
    ] = "agreement",
    k: Annotated[int, typer.Option(min=2, help="How many first candidates P@k looks at.")] = 10,
    resamples: Annotated[
        int, typer.Option(min=1, help="How often the bootstrap draws, for intervals.")
    ] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of draws, and of shuffled words.")] = 0,
    plot: Plot = None,
    csv: Csv = None,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Ask for masked words, facts or verbs, through the encoder's own MLM head.

    Runs the encoder on texts in which one word is masked, and says how often the right word comes
    before all other candidates, beside guessing, shuffled words and negated texts.
    """
