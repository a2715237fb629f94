"""The command line: parse, call one job, print.

Nothing heavy is imported at the top, so that `bertvision --help` answers at once. Results go to
stdout (as JSON with --json), everything else to stderr. Errors of the user are one message and
status 2; a stop by SIGINT or SIGTERM is 130 or 143.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import bertvision
from bertvision.errors import BertvisionError, BertvisionWarning, InputError
from bertvision.pipelines import analysis
from bertvision.pipelines.ranks import end_with_starter, this_rank
from bertvision.pipelines.text import printable

# Read by torch at its first allocation: huge pages make CPU training up to twice as fast.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def commands() -> dict[str, tuple[str, ...]]:
    """Commands by heading of `bertvision --help`; `bertvision rsa` calls ``bertvision.rsa``."""
    return {
        "Start": ("quickstart", "doctor", "status"),
        "Fine-tune": ("finetune", "adopt", "repeat", "logits"),
        "Store": ("extract", "generate", "store"),
        "Heads": ("heads", "plan", "train", "evaluate", "predict", "sweep", "ensemble"),
        "Analyse": tuple(analysis.names()),
        "Read out": ("probe", "rank", "similarity", "view"),
        "Compare": ("compare", "spread", "errors", "latency", "quantise", "score"),
        "Share": ("table", "report", "push", "pull"),
    }


_STORE = {
    "ls": "jobs.store:ls",
    "info": "jobs.store:info",
    "verify": "jobs.store:verify",
    "repair": "jobs.store:repair",
    "rm": "jobs.store:rm",
    "import": "jobs.foreign:import_states",
    "export": "jobs.foreign:export_states",
    "audit": "jobs.store:audit",
    "shuffle": "jobs.store:shuffle_tokens",
}
"""Jobs of `bertvision store`, by command."""


def _place(name: str) -> str:
    """The module and function of a command."""
    function = {"errors": "error_analysis"}.get(name, name)
    return f"{bertvision._home(function)}:{function}"


class Commands(dict[str, Any]):
    """Commands by name; the module of a job is imported when its command is looked at."""

    def __init__(self, places: Mapping[str, str]) -> None:
        super().__init__(dict.fromkeys(places))
        self.places = places

    def __getitem__(self, name: str) -> Any:
        made = super().__getitem__(name)
        if made is None:
            from bertvision.jobs.command import command

            module, _, function = self.places[name].partition(":")
            job = getattr(import_module(f"bertvision.{module}"), function)
            made = self[name] = command(job, name)
        return made

    def get(self, name: str, default: Any = None) -> Any:
        """The command of a name."""
        return self[name] if name in self else default  # noqa: SIM401  (that would call itself)

    def items(self) -> Any:
        """Names and commands."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """All commands."""
        return [self[name] for name in self]


def _summary(place: str) -> str:
    """The first line of a job's docstring, out of its source: nothing is imported."""
    module, _, function = place.partition(":")
    if module.startswith("pipelines.analysis."):
        source = analysis.sources()[function]
    else:
        source = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    _, _, below = source.read_text(encoding="utf-8").partition(f"\ndef {function}(")
    return below.partition('"""')[2].partition("\n")[0].rstrip('"').replace("`", "")


class CommandGroup(typer.core.TyperGroup):
    """Commands that say of an option in front of them that it belongs behind."""

    headings: Mapping[str, Sequence[str]]
    places: Mapping[str, str]

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        groups = self.commands
        self.commands = Commands(self.places)
        self.commands.update(groups)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return [name for names in self.headings.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their headings, a line each."""
        for heading, names in self.headings.items():
            rows = [(name, self._line(name)) for name in names]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the name of a command, or an option; no job is imported for a name."""
        if incomplete.startswith("-"):
            return list(super().shell_complete(ctx, incomplete))
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        item: Any = typer.core.CompletionItem  # type: ignore[attr-defined]
        return [item(name, help=self._line(name)) for name in names]

    def _line(self, name: str) -> str:
        if name in self.places:
            return _summary(self.places[name])
        return str(self.commands[name].get_short_help_str(100))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as click does, with more to say of an option that it does not know."""
        named = [arg for arg in args if arg in self.commands]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", None)
            for name in named:
                if any(option in parameter.opts for parameter in self.commands[name].params):
                    place = f"{ctx.command_path} {name} {option}"
                    error.message += f": it belongs behind the command, {place}"  # type: ignore[attr-defined]
                    break
            raise


# Functions of Python without a command of their name, and the command that shows what they read.
_SHOWN_BY = {"results": "table", "predictions": "errors", "error_analysis": "errors"}


class _Group(CommandGroup):
    """Turns errors that are no bug into a message and a status, and warnings into one line."""

    def __init__(self, **given: Any) -> None:
        self.headings = commands()
        names = [name for names in self.headings.values() for name in names if name != "store"]
        self.places = {name: _place(name) for name in names}
        super().__init__(**given)

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
        """Resolve as click does, and name the command that shows what a function reads."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if (instead := _SHOWN_BY.get(args[0])) is not None:
                error.message = (  # type: ignore[attr-defined]
                    f"No such command '{args[0]}', which is a function of Python, "
                    f"bertvision.{args[0]}(): take `bertvision {instead}`"
                )
            raise


class _StoreGroup(CommandGroup):
    """The commands of the store."""

    headings: Mapping[str, Sequence[str]] = {"Commands": tuple(_STORE)}  # noqa: RUF012
    places = _STORE


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
app.add_typer(
    typer.Typer(
        cls=_StoreGroup,
        help="List, verify, audit, import, export and remove splits.",
        no_args_is_help=True,
        callback=lambda: None,
    ),
    name="store",
)


if __name__ == "__main__":
    app()
