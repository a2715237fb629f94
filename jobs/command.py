"""Commands made from jobs, and their completion in the shell.

A command has an option for each argument of its job, and --json, --csv and --dry-run. Completion
looks at names of files and folders alone, so that an answer takes no longer than the command line
itself; whatever goes wrong, nothing is offered.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

import typer

from bertvision.jobs.dry_run import PLANNED, dry_run
from bertvision.pipelines.declare import Argument, arguments, described, summary
from bertvision.pipelines.files import write_text
from bertvision.pipelines.options import flag
from bertvision.pipelines.ranks import RESULT_FILE, this_rank
from bertvision.pipelines.reading import READ, Names, parse_layers
from bertvision.pipelines.text import csv_text, flat_rows, printable

Offered = Callable[[Any], Iterable[str]]
"""Names that are offered in a context of click, whose ``params`` have what was typed before."""


def completion(
    argument: Argument, command: str
) -> Callable[[typer.Context, str], list[str]] | None:
    """The completion of an argument, where there is something to offer.

    Args:
        argument: Argument of a job.
        command: Name of the job.
    """
    names = _OF_COMMANDS.get((command, argument.name)) or _OFFERED.get(argument.name)
    if names is None and (choices := argument.choices):
        names = _fixed(*choices)
    return None if names is None else _completion(names)


def _completion(names: Offered) -> Callable[[typer.Context, str], list[str]]:
    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            before, comma, last = incomplete.rpartition(",")  # several values have commas
            given = before.split(",")
            offered = dict.fromkeys(names(ctx))
            return [f"{before}{comma}{n}" for n in offered if n.startswith(last) and n not in given]
        except Exception:  # a traceback in the middle of a line that is typed helps nobody
            return []

    return complete


def _root(ctx: Any) -> Path:
    """Folder of the workspace that was named, or else of the one that one stands in."""
    from bertvision.pipelines.workspace.workspace import FILE

    if (named := ctx.params.get("workspace")) is not None:
        return Path(named).expanduser()
    return next(place for place in (Path.cwd(), *Path.cwd().parents) if (place / FILE).is_file())


def _stored(ctx: Any) -> list[tuple[str, str]]:
    """Snapshot and name of each stored split, where the store is a folder."""
    from bertvision.featurestore.format.ledger import LEDGER

    store = ctx.params.get("store")
    folder = (Path(store) if store else _root(ctx) / "activations") / LEDGER
    return sorted((path.parent.name, path.name) for path in folder.glob("*/[!.]*"))


def _tags(ctx: Any) -> list[str]:
    """Snapshots that are made, and those whose activations are stored."""
    made = [path.parent.name for path in _root(ctx).glob("snapshots/*/snapshot.json")]
    return sorted({*made, *(tag for tag, _ in _stored(ctx))})


def _new_tags(ctx: Any) -> list[str]:
    """Snapshots that can be extracted: these, and the two that are made without training."""
    return [*_tags(ctx), "0e", "untrained"]


def _trained_tags(ctx: Any) -> list[str]:
    return sorted({path.parents[1].name for path in _heads_in(ctx)})


def _heads_in(ctx: Any) -> list[Path]:
    return list(_root(ctx).glob("heads/*/[!.]*/metrics.json"))


def _trained(ctx: Any) -> list[str]:
    """Heads that were trained, on the snapshot that was named before, if one was."""
    tag = ctx.params.get("trained_on")
    heads = [p for p in _heads_in(ctx) if tag in (None, p.parents[1].name)]
    return sorted(path.parent.name for path in heads)


def _splits(ctx: Any) -> list[str]:
    """Names of stored splits, at the snapshot that was named before, if one was."""
    tag = ctx.params.get("checkpoint")
    splits = [split for at, split in _stored(ctx) if tag in (None, at)]
    return [*splits, "train", "tune", "dev"]


def _named_splits(ctx: Any) -> list[str]:
    return [f"{tag}/{split}" for tag, split in _stored(ctx)]


def _tasks(ctx: Any) -> list[str]:
    """Tasks, and data sets that were added."""
    try:
        added = [path.stem for path in _root(ctx).glob("datasets/*.json")]
    except StopIteration:
        added = []
    return [*_tasks_known(ctx), *added]


def _fixed(*names: str) -> Offered:
    return lambda ctx: names


def _known(place: str, name: str, *before: str) -> Offered:
    """Names in a mapping or tuple, or values of a type, which is imported when it is asked for."""

    def names(ctx: Any) -> Iterable[str]:
        names = getattr(import_module(f"bertvision.{place}"), name)
        return [*before, *(get_args(names) or names)]

    return names


_HEADS = _known("models.zoo", "HEADS")
_tasks_known = _known("pipelines.tasks.registry", "TASKS")


_OFFERED: dict[str, Offered] = {
    "checkpoint": _tags,
    "trained_on": _trained_tags,
    "split": _splits,
    "splits": _splits,
    "train_split": _splits,
    "encoding": _known("featurestore.format.layout", "ENCODINGS"),
    "heads": _trained,
    "task": _tasks,
    "pool": _known("pipelines.poolings", "POOLINGS"),
    "decay": _fixed("none", "linear"),
    "variant": _known("pipelines.variants.registry", "VARIANTS"),
}
"""By parameter, in every command."""
_OF_COMMANDS: dict[tuple[str, str], Offered] = {
    ("extract", "checkpoint"): _new_tags,
    ("extract", "tokens"): _known("pipelines.poolings", "POOLINGS", "none"),
    ("extract", "windows"): _fixed("cut", "split", "pack"),
    ("train", "heads"): _HEADS,
    **{(name, "distil"): _tags for name in ("train", "sweep")},
    ("sweep", "heads"): _HEADS,
    ("sweep", "trained_on"): _tags,
    ("heads", "name"): _HEADS,
    **{(name, place): _tags for name in ("cka", "cca", "rsa") for place in ("first", "second")},
    **{
        (name, "name"): _named_splits
        for name in (
            *("info", "verify", "repair", "rm", "export_states", "audit", "shuffle_tokens"),
            "view",
        )
    },
}
"""By command and parameter, before the other."""


Job = Callable[..., Any]

_JSON = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
_CSV = Annotated[Path | None, typer.Option(help="Write the rows to this CSV file too.")]
_DRY_RUN = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show what would be made, with size and time, and do nothing.",
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
