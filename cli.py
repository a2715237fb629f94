"""The command line: parse, call one pipeline function, print.

Nothing heavy is imported at the top, so that `bertvision --help` answers at once. Results go to
stdout (as JSON with --json), everything else to stderr. Errors of the user are one message and
status 2; a stop by SIGINT or SIGTERM is 130 or 143.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import bertvision
from bertvision.errors import BertvisionError

if TYPE_CHECKING:
    from bertvision.pipelines.workspace import Workspace

# Read by torch at its first allocation: huge pages make CPU training up to twice as fast.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class _Group(typer.core.TyperGroup):
    """Turns the errors that bertvision raises on purpose into a message and a status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BertvisionError as error:
            typer.secho(f"Error: {error}", err=True, fg="red")
            raise typer.Exit(getattr(error, "exit_code", 2)) from None
        except KeyboardInterrupt:
            typer.secho("Stopped; what was finished is kept.", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    help="Run BERT once, keep what every layer computed, train many small heads on it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
store_app = typer.Typer(help="Look into the activation store.", no_args_is_help=True)
app.add_typer(store_app, name="store")

_Workspace = Annotated[
    Path | None,
    typer.Option(
        "--workspace", "-w", help="Folder of the experiment; by default the one you stand in."
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
_Precision = Annotated[str, typer.Option(help="auto, 32 or bf16.")]
_Scheduler = Annotated[str, typer.Option(help="threads, processes or tcp://HOST:PORT.")]
_MaxTokens = Annotated[
    int, typer.Option(min=0, help="Seeded sample of at most so many tokens; 0 uses all.")
]
_Plot = Annotated[Path | None, typer.Option(help="Where to write the PNG.")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"bertvision {bertvision.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")] = False,
) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("bertvision").setLevel(logging.WARNING if quiet else logging.INFO)


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
    workspace: _Workspace = None,
    as_json: _Json = False,
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
    given["save_at"] = None if save_at is None else _tags(save_at)
    result = run(workspace, FinetuneOptions(**given), resume=resume)
    _print(result, as_json, status_table)


@app.command()
def status(workspace: _Workspace = None, as_json: _Json = False) -> None:
    """What the workspace holds, and what can be run next."""
    from bertvision.pipelines.status import status as run
    from bertvision.pipelines.tables import status_table
    from bertvision.pipelines.workspace import Workspace

    _print(run(Workspace.find(workspace)), as_json, status_table)


@app.command()
def extract(
    checkpoint: Annotated[
        str | None, typer.Option(help="Snapshots, such as 0.3e or 0.3e,1e.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Such as train,dev; by default all of the workspace.")
    ] = None,
    encoding: Annotated[str, typer.Option(help="int8, bfloat16, float16 or float32.")] = "int8",
    layers: Annotated[
        str, typer.Option(help="Hidden states to keep, such as 0,6,12 (0: embeddings), or all.")
    ] = "all",
    precision: _Precision = "auto",
    workspace: _Workspace = None,
    as_json: _Json = False,
) -> None:
    """Write a snapshot's hidden states into the activation store.

    A killed extraction is finished by the same command.
    """
    from bertvision.pipelines.extract import extract as run
    from bertvision.pipelines.tables import extracted_table

    space = _find(workspace)
    done = []
    tags = _tags(checkpoint) if checkpoint else [space.only(space.snapshots(), "snapshots")]
    for tag in tags:
        done += run(
            space,
            tag,
            splits=_names(split),
            encoding=encoding,
            layers=_layers(layers),
            precision=precision,
        )
    _print([item._asdict() for item in done], as_json, extracted_table)


@app.command()
def train(
    heads: Annotated[list[str], typer.Argument(help="Names from `bertvision heads`.")],
    checkpoint: Annotated[str | None, typer.Option(help="Snapshot to train on.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the store.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Windows per step.")] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-3,
    layers: Annotated[str, typer.Option(help="Hidden states to train on, or all.")] = "all",
    precision: _Precision = "auto",
    seed: Annotated[int, typer.Option(help="Of initial weights and order.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace heads that were trained otherwise.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")
    ] = False,
    workspace: _Workspace = None,
    as_json: _Json = False,
) -> None:
    """Train heads on stored activations, several in one pass, without running BERT."""
    from pydantic import ValidationError

    from bertvision.errors import InputError
    from bertvision.pipelines.tables import trained_table
    from bertvision.pipelines.train import TrainOptions
    from bertvision.pipelines.train import train as run

    space = _find(workspace)
    try:
        options = TrainOptions(
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            layers=_layers(layers),
            precision=precision,
            seed=seed,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-")
        raise InputError(f"--{name} {first['input']}: {first['msg']}") from None
    stored = (tag for tag, splits in space.stored().items() if "train" in splits)
    tag = _tag(checkpoint) if checkpoint else space.only(stored, "activations of train")
    metrics = run(space, heads, tag, options, overwrite=overwrite, tensorboard=tensorboard)
    _print(metrics, as_json, trained_table)


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
    precision: _Precision = "auto",
    workspace: _Workspace = None,
    as_json: _Json = False,
) -> None:
    """Score trained heads with the official metric, on any snapshot's activations."""
    from bertvision.pipelines.evaluate import evaluate as run
    from bertvision.pipelines.tables import evaluated_table
    from bertvision.pipelines.workspace import head_folder

    space = _find(workspace)
    trained = {tag for tag, name in space.heads() if name in map(head_folder, heads)}
    source = _tag(trained_on) if trained_on else space.only(trained, f"{heads[0]} was trained on")
    target = _tag(checkpoint) if checkpoint else source
    results = run(space, heads, trained_on=source, tag=target, split=split, precision=precision)
    _print(results, as_json, evaluated_table)


@app.command()
def heads(
    hidden: Annotated[int, typer.Option(help="Width of the hidden states.")] = 1024,
    layers: Annotated[int, typer.Option(help="Hidden states, embedding output included.")] = 25,
    as_json: _Json = False,
) -> None:
    """List the heads with their parameters, by default at BERT-large's dimensions."""
    from bertvision.models.registry import describe_heads
    from bertvision.pipelines.tables import heads_table

    _print([h._asdict() for h in describe_heads(layers, hidden)], as_json, heads_table)


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
    as_json: _Json = False,
) -> None:
    """Score a predictions file with the official SQuAD 2.0 metric."""
    from bertvision.pipelines.tables import mapping_table
    from bertvision.pipelines.tasks.squad_metrics import score_files

    result = score_files(predictions, data, na_prob, na_prob_thresh=na_prob_thresh)
    _print(result, as_json, mapping_table)


@app.command()
def cka(
    first: Annotated[str, typer.Argument(help="Snapshot.")],
    second: Annotated[str, typer.Argument(help="Snapshot; may be the same.")],
    split: Annotated[str, typer.Option(help="Split that both have.")] = "dev",
    max_tokens: _MaxTokens = 20_000,
    biased: Annotated[bool, typer.Option("--biased", help="The biased estimator.")] = False,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    scheduler: _Scheduler = "threads",
    plot: _Plot = None,
    workspace: _Workspace = None,
    as_json: _Json = False,
) -> None:
    """Linear CKA between the layers of two snapshots: table, JSON and a PNG."""
    from bertvision.pipelines.analyse import run_cka

    result = run_cka(
        _find(workspace),
        first,
        second,
        split=split,
        max_tokens=max_tokens or None,
        biased=biased,
        seed=seed,
        scheduler=scheduler,
        plot=plot,
    )
    _print(result.to_dict(), as_json, lambda _: result.table())


@app.command()
def isotropy(
    checkpoint: Annotated[str, typer.Argument(help="Snapshot.")],
    split: Annotated[str, typer.Option(help="Split to analyse.")] = "dev",
    max_tokens: _MaxTokens = 100_000,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    scheduler: _Scheduler = "threads",
    plot: _Plot = None,
    workspace: _Workspace = None,
    as_json: _Json = False,
) -> None:
    """Isotropy of each layer: mean cosine, explained variance, outlier channels."""
    from bertvision.pipelines.analyse import run_isotropy

    result = run_isotropy(
        _find(workspace),
        checkpoint,
        split=split,
        max_tokens=max_tokens or None,
        seed=seed,
        scheduler=scheduler,
        plot=plot,
    )
    _print(result.to_dict(), as_json, lambda _: result.table())


@app.command()
def quickstart(
    workspace: Annotated[Path, typer.Option("--workspace", "-w", help="Folder to make.")] = Path(
        "quickstart"
    ),
    as_json: _Json = False,
) -> None:
    """Run the whole main job on a small built-in example, without network, in minutes."""
    from bertvision.pipelines.quickstart import quickstart as run

    from bertvision.pipelines.tables import quickstart_table

    _print(run(workspace), as_json, quickstart_table)


@store_app.command("ls")
def store_ls(workspace: _Workspace = None, as_json: _Json = False) -> None:
    """The snapshots and splits that are stored."""
    from bertvision.pipelines.tables import splits_table

    _print([split.info() for split in _store(workspace).splits()], as_json, splits_table)


@store_app.command("info")
def store_info(
    name: Annotated[str, typer.Argument(help="Such as 0.3e/train.")],
    workspace: _Workspace = None,
    as_json: _Json = False,
) -> None:
    """Everything about one split: sizes, encoding, provenance."""
    from bertvision.pipelines.tables import mapping_table

    _print(_split(workspace, name).info(), as_json, mapping_table)


@store_app.command("verify")
def store_verify(
    name: Annotated[str | None, typer.Argument(help="Such as 0.3e/train; by default all.")] = None,
    workspace: _Workspace = None,
    as_json: _Json = False,
) -> None:
    """Read every committed byte again; exits with 1 where something is damaged."""
    splits = [_split(workspace, name)] if name else _store(workspace).splits()
    found = {split.name: split.verify() for split in splits}
    if as_json:
        _print(found, True, str)
    else:
        for split, problems in found.items():
            typer.echo("\n".join(problems) if problems else f"{split}: whole")
    if any(found.values()):
        raise typer.Exit(1)


def _find(workspace: Path | None) -> Workspace:
    from bertvision.pipelines.workspace import Workspace

    return Workspace.find(workspace)


def _store(workspace: Path | None) -> Any:
    from bertvision.featurestore.store import ActivationStore

    return ActivationStore.open(_find(workspace).activations)


def _split(workspace: Path | None, name: str) -> Any:
    tag, _, split = name.partition("/")
    return _store(workspace)[tag][split]


def _tags(text: str) -> tuple[str, ...]:
    """``0.1,0.3e,1`` → tags."""
    from bertvision.errors import InputError
    from bertvision.featurestore.schema import SnapshotTag

    tags = []
    for part in text.split(","):
        part = part.strip()
        if not part.endswith("e"):
            try:
                part = SnapshotTag.of(float(part))
            except ValueError:
                raise InputError(f"{part!r} is not a fraction of an epoch: such as 0.3") from None
        tags.append(SnapshotTag(part))
    return tuple(tags)


def _tag(text: str) -> str:
    """One tag."""
    from bertvision.errors import InputError

    if len(tags := _tags(text)) != 1:
        raise InputError(f"{text!r}: name one snapshot, such as 0.3e")
    return tags[0]


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",")]


def _layers(text: str) -> tuple[int, ...] | None:
    from bertvision.errors import InputError

    if text == "all":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--layers {text!r}: give indices such as 0,6,12, or all") from None


def _print(result: Any, as_json: bool, table: Any) -> None:
    typer.echo(json.dumps(result, indent=2, allow_nan=False) if as_json else table(result))


if __name__ == "__main__":
    app()
