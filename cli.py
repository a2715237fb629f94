"""The command line: parse, call one pipeline function, print.

Nothing heavy is imported at the top, so that `bertvision --help` answers at once. Results go to
stdout (as JSON with --json), everything else to stderr. Errors of the user are one message and
status 2; a stop by SIGINT or SIGTERM is 130 or 143.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

import bertvision
from bertvision.commands.analysis import cka, isotropy
from bertvision.commands.options import (
    Json,
    Precision,
    Store,
    Workspace,
    find_workspace,
    parse_choice,
    parse_layers,
    parse_names,
    parse_tag,
    parse_tags,
    show,
)
from bertvision.commands.store import app as store_app
from bertvision.errors import BertvisionError, BertvisionWarning

# Read by torch at its first allocation: huge pages make CPU training up to twice as fast.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class _Group(typer.core.TyperGroup):
    """Turns errors that are no bug into a message and a status, and warnings into one line."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _one_line(warnings.showwarning)
            try:
                return super().invoke(ctx)
            except BertvisionError as error:
                message, status = str(error), getattr(error, "exit_code", 2)
            except KeyboardInterrupt:
                typer.echo("Stopped; what was finished is kept.", err=True)
                raise typer.Exit(130) from None
            except OSError as error:
                if error.filename is None:
                    raise  # not about a place that the user could do something about
                message, status = f"{error.filename}: {error.strerror}", 2
            typer.secho(f"Error: {message}", err=True, fg="red")
            raise typer.Exit(status)


def _one_line(show: Any) -> Any:
    """``warnings.showwarning`` that shows bertvision's own without the line that raised them."""

    def showwarning(message: Any, category: type[Warning], *where: Any, **file: Any) -> None:
        if issubclass(category, BertvisionWarning):
            typer.secho(f"Warning: {message}", err=True, fg="yellow")
        else:
            show(message, category, *where, **file)

    return showwarning


app = typer.Typer(
    cls=_Group,
    help="Run BERT once, keep what every layer computed, train many small heads on it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"bertvision {bertvision.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")] = False,
) -> None:
    logger, handler = logging.getLogger("bertvision"), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    ctx.call_on_close(lambda: logger.removeHandler(handler))
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when a command imports it


@app.command()
def finetune(
    model: Annotated[
        str | None, typer.Option(help="BERT checkpoint: hub name or local folder.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    task: Annotated[str | None, typer.Option(help="Data set on the hub, such as squad_v2.")] = None,
    train: Annotated[str | None, typer.Option(help="SQuAD file (.json, .json.gz).")] = None,
    dev: Annotated[str | None, typer.Option(help="SQuAD file (.json, .json.gz).")] = None,
    epochs: Annotated[float | None, typer.Option(help="How long to train.")] = None,
    save_at: Annotated[
        str | None, typer.Option(help="Fractions of an epoch to snapshot at: 0,0.1,0.3,1.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows per batch.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of Adam.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Decoupled; above 0 is AdamW.")] = None,
    warmup: Annotated[float | None, typer.Option(help="Fraction of steps.")] = None,
    decay: Annotated[str | None, typer.Option(help="none or linear.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches per optimiser step.")] = None,
    gradient_clip: Annotated[float | None, typer.Option(help="Largest norm; 0 is off.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, 32 or bf16.")] = None,
    train_questions: Annotated[
        int | None, typer.Option(help="Train on a seeded subset of at most so many questions.")
    ] = None,
    tune_fraction: Annotated[
        float | None, typer.Option(help="Part of train held out for no-answer thresholds.")
    ] = None,
    answerable_only: Annotated[
        bool | None, typer.Option("--answerable-only", help="Leave unanswerable questions out.")
    ] = None,
    skip_bad: Annotated[
        bool | None, typer.Option("--skip-bad", help="Skip malformed questions and count them.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a window.")] = None,
    max_question_length: Annotated[int | None, typer.Option(help="Tokens of a question.")] = None,
    overlap: Annotated[int | None, typer.Option(help="Tokens that windows share.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
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
    from bertvision.pipelines.finetune import finetune as run
    from bertvision.pipelines.options import FinetuneOptions
    from bertvision.pipelines.tables import status_table

    for name in ("workspace", "as_json", "resume"):
        del given[name]
    given["save_at"] = None if save_at is None else parse_tags(save_at)
    result = run(workspace, FinetuneOptions(**given), resume=resume)
    show(result, as_json, status_table)


@app.command()
def status(workspace: Workspace = None, store: Store = None, as_json: Json = False) -> None:
    """What the workspace holds, and what can be run next."""
    from bertvision.pipelines.status import status as run
    from bertvision.pipelines.tables import status_table

    show(run(find_workspace(workspace, store)), as_json, status_table)


@app.command()
def extract(
    checkpoint: Annotated[
        str | None, typer.Option(help="Snapshots, such as 0.3e or 0.3e,1e.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Such as train,dev; by default all of the workspace.")
    ] = None,
    encoding: Annotated[
        str, typer.Option(help="int8, int4, bfloat16, float16 or float32.")
    ] = "int8",
    compression: Annotated[
        str, typer.Option(help="none; zstd for slow disks; pcodec to archive float encodings.")
    ] = "none",
    layers: Annotated[
        str, typer.Option(help="Hidden states to keep, such as 0,6,12 (0: embeddings), or all.")
    ] = "all",
    precision: Precision = "auto",
    nonfinite: Annotated[
        str, typer.Option(help="NaN and infinity: error, or record to replace and count them.")
    ] = "error",
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Write a snapshot's hidden states into the activation store.

    A killed extraction is finished by the same command. A store named with --store is the
    workspace's from then on.
    """
    from bertvision.featurestore.shardfile import CompressionName
    from bertvision.pipelines.extract import extract as run
    from bertvision.pipelines.shardwork import NonFinite
    from bertvision.pipelines.tables import extracted_table

    space = find_workspace(workspace)
    done = []
    tags = parse_tags(checkpoint) if checkpoint else [space.only(space.snapshots(), "snapshots")]
    for tag in tags:
        space.require_snapshot(tag)  # of all, before hours are spent on the first
    space = space.keep_at(store)
    for tag in tags:
        done += run(
            space,
            tag,
            splits=parse_names(split),
            encoding=encoding,
            compression=parse_choice(compression, get_args(CompressionName), "--compression"),
            layers=parse_layers(layers),
            precision=precision,
            nonfinite=parse_choice(nonfinite, get_args(NonFinite), "--nonfinite"),
        )
    show([item._asdict() for item in done], as_json, extracted_table)


@app.command()
def train(
    heads: Annotated[list[str], typer.Argument(help="Names from `bertvision heads`.")],
    checkpoint: Annotated[str | None, typer.Option(help="Snapshot to train on.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the store.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Windows per step.")] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    layers: Annotated[str, typer.Option(help="Hidden states to train on, or all.")] = "all",
    precision: Precision = "auto",
    seed: Annotated[int, typer.Option(help="Of initial weights and order.")] = 0,
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
    """Train heads on stored activations, several in one pass, without running BERT."""
    from bertvision.pipelines.config import validated
    from bertvision.pipelines.tables import trained_table
    from bertvision.pipelines.train import TrainOptions
    from bertvision.pipelines.train import train as run

    given = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "layers": parse_layers(layers),
        "precision": precision,
        "seed": seed,
    }
    options = validated(TrainOptions, given)
    space = find_workspace(workspace, store)
    stored = (tag for tag, splits in space.stored().items() if "train" in splits)
    tag = parse_tag(checkpoint) if checkpoint else space.only(stored, "activations of train")
    metrics = run(space, heads, tag, options, overwrite=overwrite, tensorboard=tensorboard)
    show(metrics, as_json, trained_table)


@app.command()
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
    from bertvision.pipelines.evaluate import evaluate as run
    from bertvision.pipelines.tables import evaluated_table

    space = find_workspace(workspace, store)
    source = parse_tag(trained_on) if trained_on else space.trained_on(heads)
    target = parse_tag(checkpoint) if checkpoint else source
    results = run(space, heads, trained_on=source, tag=target, split=split, precision=precision)
    show(results, as_json, evaluated_table)


@app.command()
def heads(
    hidden: Annotated[int, typer.Option(help="Width of the hidden states.")] = 1024,
    layers: Annotated[int, typer.Option(help="Hidden states, embedding output included.")] = 25,
    as_json: Json = False,
) -> None:
    """List the heads with their parameters, by default at BERT-large's dimensions."""
    from bertvision.models.registry import describe_heads
    from bertvision.pipelines.tables import heads_table

    show([h._asdict() for h in describe_heads(layers, hidden)], as_json, heads_table)


@app.command()
def score(
    predictions: Annotated[Path, typer.Argument(help='{"question id": "answer"}')],
    data: Annotated[Path, typer.Argument(help="SQuAD file.")],
    na_prob: Annotated[
        Path | None, typer.Option(help='{"question id": probability of no answer}')
    ] = None,
    na_prob_thresh: Annotated[
        float, typer.Option(help="Predict no answer above this probability.")
    ] = 1.0,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip malformed questions and count them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Score a predictions file with the official SQuAD 2.0 metric."""
    from bertvision.pipelines.tables import mapping_table
    from bertvision.pipelines.tasks.squad_metrics import score_files

    result = score_files(
        predictions, data, na_prob, na_prob_thresh=na_prob_thresh, skip_bad=skip_bad
    )
    show(result, as_json, mapping_table)


@app.command()
def quickstart(
    workspace: Annotated[Path, typer.Option("--workspace", "-w", help="Folder to make.")] = Path(
        "quickstart"
    ),
    as_json: Json = False,
) -> None:
    """Run the whole main job on a small built-in example, without network, in minutes."""
    from bertvision.pipelines.quickstart import quickstart as run
    from bertvision.pipelines.tables import quickstart_table

    show(run(workspace), as_json, quickstart_table)


app.command()(cka)
app.command()(isotropy)
app.add_typer(store_app, name="store")


if __name__ == "__main__":
    app()
