"""Commands are made from jobs: an option for each argument, and --json, --csv and --dry-run."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

import typer

from bertvision.jobs.completion import completion
from bertvision.jobs.dry_run import PLANNED, dry_run
from bertvision.jobs.show import flat_rows
from bertvision.pipelines.declare import Argument, arguments, described, summary
from bertvision.pipelines.files import write_text
from bertvision.pipelines.options import flag
from bertvision.pipelines.ranks import RESULT_FILE, this_rank
from bertvision.pipelines.reading import READ, Names, parse_layers
from bertvision.pipelines.text import csv_text, printable

Job = Callable[..., Any]

_JSON = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
_CSV = Annotated[Path | None, typer.Option(help="Write the rows to this CSV file too.")]
_DRY_RUN = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Say what would be made, of which size and in which time, and do nothing.",
    ),
]


def command(job: Job, name: str) -> Any:
    """Make a command: it calls a job with what was typed, and shows the result.

    Args:
        job: Job (see `declare.job`).
        name: Name of the command.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name)(_function(job))
    made = typer.main.get_command(app)
    made.name = name
    return made


def _function(job: Job) -> Callable[..., None]:
    """A function for Typer, with a parameter for each option."""
    offered = arguments(job)
    texts = described(job)
    parameters = [_parameter(argument, texts, job, offered) for argument in offered]
    if job.__name__ in PLANNED:
        parameters.append(_own("dry_run", _DRY_RUN, False))
    parameters += [_own("csv", _CSV, None), _own("as_json", _JSON, False)]

    def run(*, as_json: bool, csv: Path | None, dry_run: bool = False, **typed: Any) -> None:
        values = {a.name: typed[a.name] for a in offered}
        result = _planned(job, values) if dry_run else job(**values)
        show(result, as_json, csv)
        if status := getattr(result, "exit_status", 0):
            raise typer.Exit(status)

    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    run.__name__ = job.__name__
    run.__doc__ = _plain(summary(inspect.getdoc(job) or ""), offered)
    return run


def _planned(job: Job, values: dict[str, Any]) -> Any:
    return dry_run(job, **values)


def show(result: Any, as_json: bool, csv: Path | None) -> None:
    """Print a result to stdout, as JSON or as its table, and write its rows to a file.

    The first of several ranks prints; to a file where the process that started them asks for it.

    Args:
        result: Result of a job.
        as_json: Whether to print JSON.
        csv: File of the rows.
    """
    if not this_rank().first:
        return
    values = result.to_json()
    if csv is not None:
        write_text(
            csv, csv_text(result.to_rows() if hasattr(result, "to_rows") else flat_rows(values))
        )
    text = json.dumps(values, indent=2, allow_nan=False) if as_json else printable(str(result))
    if (file := os.environ.get(RESULT_FILE)) is None:
        typer.echo(text)
    else:
        Path(file).write_text(text)


def _parameter(
    argument: Argument, texts: dict[str, str], job: Job, offered: tuple[Argument, ...]
) -> inspect.Parameter:
    """The parameter of Typer for an argument of a job."""
    option = argument.option
    help_text = _plain(texts.get(argument.name, ""), offered)
    hint, default = _typed(argument), argument.default
    if argument.options is not None:
        default = _as_typed(argument)
    elif hint is str and isinstance(default, int | float):
        default = f"{default:g}"
    settings: dict[str, Any] = {"help": help_text, "min": option.ge, "max": option.le}
    settings["autocompletion"] = completion(argument, job.__name__)
    if Path in (hint, *get_args(hint)):
        settings["path_type"] = str  # or a URL would lose a slash
    if argument.positional:
        info: Any = typer.Argument(**settings)
    else:
        names = flag(argument.name, option).split()
        info = typer.Option(*names, **settings)
    return _own(argument.name, Annotated[hint, info], default)


def _typed(argument: Argument) -> Any:
    """The type of what is typed: a number, a switch, a list of words, or a text."""
    kinds = get_args(argument.hint) or (argument.hint,)
    optional = NoneType in kinds or argument.default is None
    words = argument.positional and set(get_args(Names)) <= set(kinds)
    if words or argument.option.several:
        plain: Any = list[str]
    elif os.PathLike[str] in kinds:
        plain = Path
    elif argument.hint in READ or len(set(kinds) - {NoneType}) > 1:
        plain = str
    else:
        (kind,) = set(kinds) - {NoneType}
        plain = kind if kind in (bool, int, float) else str
    return plain | None if optional else plain


def _as_typed(argument: Argument) -> Any:
    """The default of a field of options as it would be typed."""
    default = argument.default
    if argument.hint not in READ:
        return default
    if default is None:
        return "all" if READ[argument.hint] is parse_layers else None
    return ",".join(f"{x:.0e}".replace("e-0", "e-") for x in default)


def _own(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _plain(text: str, offered: tuple[Argument, ...]) -> str:
    """A docstring's text for a terminal: arguments are flags, without the marks of code."""
    flags = {a.name: a.flag for a in offered if not a.positional}
    text = re.sub(r"``([\w]+)``", lambda match: flags.get(match[1], match[1]), text)
    return text.replace("``", "")
