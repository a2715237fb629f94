"""The command line: parse, call one verb, print.

Nothing heavy is imported at the top, so that `bertvision --help` answers at once. Results go to
stdout (as JSON with --json), everything else to stderr. Errors of the user are one message and
status 2; a stop by SIGINT or SIGTERM is 130 or 143.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import nullcontext
from typing import Annotated, Any

import typer

import bertvision
from bertvision.commands.analyses.alike import cca, cka, rsa
from bertvision.commands.analyses.exits import exits
from bertvision.commands.analyses.groups import languages
from bertvision.commands.analyses.heads import attention, prune, relations
from bertvision.commands.analyses.layers import context, isotropy
from bertvision.commands.analyses.mlm import cloze, lens
from bertvision.commands.analyses.pairs import rank, similarity
from bertvision.commands.analyses.probe import probe
from bertvision.commands.analyses.structure import structure
from bertvision.commands.beforehand.doctor import doctor
from bertvision.commands.declared_options import with_options
from bertvision.commands.errors import errors
from bertvision.commands.experiment import quickstart, report, score, status
from bertvision.commands.extract import extract
from bertvision.commands.finetune import finetune
from bertvision.commands.heads import evaluate, heads, train
from bertvision.commands.latency import latency, quantise
from bertvision.commands.logits import logits
from bertvision.commands.options import CommandGroup
from bertvision.commands.repeats import repeat, spread
from bertvision.commands.results import table
from bertvision.commands.sharing.hub import pull, push
from bertvision.commands.store.audit import audit
from bertvision.commands.store.foreign import export_states, import_states
from bertvision.commands.store.generation import generate
from bertvision.commands.store.inspection import app as store_app
from bertvision.commands.store.shuffle import shuffle_tokens
from bertvision.commands.sweep import sweep
from bertvision.commands.systems import compare, ensemble
from bertvision.errors import BertvisionError, BertvisionWarning, InputError
from bertvision.pipelines.ranks import end_with_starter, this_rank
from bertvision.pipelines.text import printable

# Read by torch at its first allocation: huge pages make CPU training up to twice as fast.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


# Functions of Python without a command of their name, and the command that shows what they read.
_SHOWN_BY = {"results": "table", "predictions": "errors", "error_analysis": "errors"}


class _Group(CommandGroup):
    """Turns errors that are no bug into a message and a status, and warnings into one line."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _one_line(warnings.showwarning)
            try:
                return super().invoke(ctx)
            except BertvisionError as error:
                message, status = str(error), getattr(error, "exit_code", 2)
            except KeyboardInterrupt:
                _say("Stopped; what was finished is kept.")
                raise typer.Exit(130) from None
            except OSError as error:
                if error.filename is None:
                    raise  # not about a place that the user could do something about
                message, status = f"{error.filename}: {error.strerror}", 2
            _say(f"Error: {message}", "red")
            raise typer.Exit(status)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """What click does, and for functions that read results, the command that shows these."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if (instead := _SHOWN_BY.get(args[0])) is not None:
                error.message = (  # type: ignore[attr-defined]
                    f"No such command '{args[0]}', which is a function of Python, "
                    f"bertvision.{args[0]}(): take `bertvision {instead}`"
                )
            raise


def _say(text: str, colour: str | None = None) -> None:
    """Show a line on stderr, above the progress bars where there are any."""
    tqdm = sys.modules.get("tqdm")
    with tqdm.tqdm.external_write_mode(sys.stderr) if tqdm else nullcontext():
        typer.secho(printable(text), err=True, fg=colour)


class _Lines(logging.Handler):
    """Shows what is logged on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        _say(self.format(record))


def _one_line(show: Any) -> Any:
    """``warnings.showwarning`` that shows bertvision's own without the line that raised them."""

    def showwarning(message: Any, category: type[Warning], *where: Any, **file: Any) -> None:
        if issubclass(category, BertvisionWarning):
            _say(f"Warning: {message}", "yellow")
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
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show warnings and errors alone.")
    ] = False,
) -> None:
    logger, handler = logging.getLogger("bertvision"), _Lines()
    logger.addHandler(handler)
    ctx.call_on_close(lambda: logger.removeHandler(handler))
    end_with_starter()
    rank = this_rank()
    if not rank.alone and ctx.invoked_subcommand not in _SHARED:
        raise InputError(
            f"{ctx.invoked_subcommand} is for one process, and torchrun started {rank.count}: "
            f"these share their work: {', '.join(sorted(_SHARED))}"
        )
    quiet = quiet or not rank.first
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"  # read when a command imports it


_SHARED = {"finetune", "train", "sweep"}
"""Commands that several ranks run together."""
_MAIN = (finetune, status, extract, generate, logits)
_HEADS = (train, evaluate, heads, score, quickstart, doctor)
_LABORATORY = (repeat, spread, sweep, ensemble, compare, latency, quantise, errors, table, report)
_ANALYSES = (probe, rank, similarity, cka, cca, rsa, isotropy, context, lens, structure, exits)
_RUN = (languages, attention, relations, prune, cloze)  # these run the encoder
_SHARING = (push, pull)
for command in (*_MAIN, *_HEADS, *_LABORATORY, *_ANALYSES, *_RUN, *_SHARING):
    app.command()(with_options(command))
store_app.command("import")(import_states)
store_app.command("export")(export_states)
store_app.command("audit")(audit)
store_app.command("shuffle")(shuffle_tokens)
for registered in store_app.registered_commands:
    if registered.callback is not None:
        registered.callback = with_options(registered.callback)
app.add_typer(store_app, name="store")


if __name__ == "__main__":
    app()
