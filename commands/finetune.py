"""``bertvision finetune``: BERT's snapshots, and their scores."""

from __future__ import annotations

from typing import Annotated

import typer

from bertvision.commands.experiment import status_table
from bertvision.commands.options import (
    Data,
    Json,
    LabelColumn,
    PairColumn,
    TextColumn,
    Workspace,
    parse_tags,
    show,
)


def finetune(
    model: Annotated[
        str | None, typer.Option(help="Encoder, such as BERT: hub name or local folder.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="A task, such as answerable, cola, sst2, csv (docs/tasks.md lists them); or a "
            "data set on the hub in SQuAD's form, such as squad_v2."
        ),
    ] = None,
    data: Data = None,
    train: Annotated[str | None, typer.Option(help="File of the training data.")] = None,
    dev: Annotated[str | None, typer.Option(help="File of the data to score on.")] = None,
    text: TextColumn = None,
    pair: PairColumn = None,
    label: LabelColumn = None,
    epochs: Annotated[float | None, typer.Option(help="How long to train (default 1).")] = None,
    save_at: Annotated[
        str | None,
        typer.Option(help="Fractions of an epoch to snapshot at, such as 0,0.1,0.3,1 (default 1)."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows per batch (default 8).")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of Adam (default 1e-5).")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Decoupled; above 0 is AdamW.")] = None,
    warmup: Annotated[float | None, typer.Option(help="Fraction of steps.")] = None,
    decay: Annotated[str | None, typer.Option(help="none or linear.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Batches per optimiser step (default 1).")
    ] = None,
    gradient_clip: Annotated[float | None, typer.Option(help="Largest norm; 0 is off.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, 32 or bf16.")] = None,
    train_questions: Annotated[
        int | None, typer.Option(help="Train on a seeded subset of at most so many questions.")
    ] = None,
    tune_fraction: Annotated[
        float | None, typer.Option(help="Part of train held out for thresholds (default 0.05).")
    ] = None,
    answerable_only: Annotated[
        bool | None, typer.Option("--answerable-only", help="Leave unanswerable questions out.")
    ] = None,
    skip_bad: Annotated[
        bool | None, typer.Option("--skip-bad", help="Skip malformed questions and count them.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of a window (default 386, of sentences 128).")
    ] = None,
    max_question_length: Annotated[
        int | None, typer.Option(help="Tokens of a question (default 64).")
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(help="Tokens that windows share (default 128).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random (default 0).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the workspace's run; needs no options.")
    ] = False,
    workspace: Workspace = None,
    as_json: Json = False,
) -> None:
    """Fine-tune BERT with snapshots at fractions of an epoch, and score each on dev.

    Makes a workspace, or continues the one that was made with the same options: an interrupted run
    goes on where it was, to the same snapshots bit for bit.
    """
    given = dict(locals())
    from bertvision.pipelines.finetuning.finetune import finetune as run
    from bertvision.pipelines.workspace.options import FinetuneOptions

    for name in ("workspace", "as_json", "resume"):
        del given[name]
    given["save_at"] = None if save_at is None else parse_tags(save_at)
    result = run(workspace, FinetuneOptions(**given), resume=resume)
    show(result, as_json, status_table)
