"""Options that several commands share, commands that run a verb, and how results are shown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertvision.pipelines.ranks import RESULT_FILE, this_rank
from bertvision.pipelines.text import csv_text, printable
from bertvision.pipelines.workspace.job_options import DATA, LABEL, PAIR, TEXT

if TYPE_CHECKING:
    from bertvision.verbs.rows import Result

Workspace = Annotated[
    Path | None,
    typer.Option(
        "--workspace", "-w", help="Folder of the experiment; by default the one you stand in."
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Activation store: a folder or an fsspec URL, such as s3://bucket/folder; by default "
        "the workspace's."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Say what would be made, of which size and in which time, and do nothing.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON.")]
Precision = Annotated[
    str, typer.Option(help="Arithmetic: 32, bf16, or auto, which is bf16 where it is native.")
]
Scheduler = Annotated[
    str,
    typer.Option(
        help="Where to compute: threads, processes, or tcp://HOST:PORT of a Dask cluster."
    ),
]
MaxTokens = Annotated[
    int, typer.Option(min=0, help="Seeded sample of at most so many tokens; 0 uses all.")
]
Data = Annotated[str | None, typer.Option(help=DATA.help)]
TextColumn = Annotated[str | None, typer.Option("--text", help=TEXT.help)]
PairColumn = Annotated[str | None, typer.Option("--pair", help=PAIR.help)]
LabelColumn = Annotated[str | None, typer.Option("--label", help=LABEL.help)]
NewModel = Annotated[
    str | None,
    typer.Option("--model", help="Make a workspace for the hidden states of this encoder alone."),
]
MissingEncoding = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        help="How to store what is extracted: int8 (default), int4, bfloat16, float16, float32.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option("--scheduler", help="tcp://HOST:PORT of a Dask cluster whose workers extract."),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=16, help="Tokens of a window of added data (default 128; text 512, chat 1024)."
    ),
]
SkipBad = Annotated[
    bool | None,
    typer.Option("--skip-bad", help="Skip rows of added data that are malformed or fit no window."),
]
Scored = Annotated[str, typer.Option("--split", help="Split that was scored.")]
HeadDevices = Annotated[
    int,
    typer.Option(
        "--devices",
        min=1,
        help="Processes that share the heads out among them, a GPU for each where there are GPUs "
        "(docs/scaling.md).",
    ),
]
_CSV_HELP = "Write the rows to this CSV file too."
Csv = Annotated[Path | None, typer.Option(help=_CSV_HELP)]
Plot = Annotated[
    Path | None, typer.Option(help="SVG file to write; by default in analysis/ of the workspace.")
]


_CSV_FILE: ContextVar[Path | None] = ContextVar("csv_file", default=None)


def _keep_csv(context: typer.Context, value: Path | None) -> None:
    _CSV_FILE.set(value)
    context.call_on_close(partial(_CSV_FILE.set, None))


_KeptCsv = Annotated[Path | None, typer.Option(help=_CSV_HELP, callback=_keep_csv)]


def _takes_csv(csv: _KeptCsv = None) -> None:
    """The option of a command whose verb has none."""


class CommandGroup(typer.core.TyperGroup):
    """Commands that say of an option in front of them that it belongs behind.

    Each that has ``--json`` has ``--csv`` too: where its verb does not take it, `show` writes it.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        one = typer.Typer(add_completion=False)
        one.command()(_takes_csv)
        option = typer.main.get_command(one).params[0]
        option.expose_value = False
        for command in self.commands.values():
            names = [parameter.name for parameter in command.params]
            if "as_json" in names and "csv" not in names:
                command.params.insert(names.index("as_json"), option)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """What click does, with more to say of an option that it does not know."""
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


def runs_verb(command: Callable[..., None]) -> Callable[..., None]:
    """A command that calls the verb of its name with what was typed, and shows the result.

    Args:
        command: of ``commands/<family>.py``, with the parameters of the verb in
            ``verbs/<family>.py``, and ``as_json``; with ``dry_run`` the verb is only planned.
    """

    @wraps(command)
    def run(*, as_json: bool, dry_run: bool = False, **given: Any) -> None:
        module = import_module(command.__module__.replace(".commands.", ".verbs."))
        verb = getattr(module, command.__name__)
        if dry_run:
            verb = partial(import_module("bertvision.verbs.beforehand.dry_run").dry_run, verb)
        result: Result = verb(**given)
        show(result, as_json, str)

    return run


def show(
    result: Any, as_json: bool, table: Callable[[Any], str], rows: Sequence[Any] | None = None
) -> None:
    """Print a result to stdout: as JSON, or as the table that ``table`` makes of it.

    Of several ranks the first prints; to a file where the process that started them asks for it.

    Args:
        result: of a verb, or in JSON types.
        as_json: print JSON.
        table: makes the text for people.
        rows: of the file of ``--csv``, where they are not those of the result.
    """
    if not this_rank().first:
        return
    values = result.to_json() if hasattr(result, "to_json") else result
    if (csv := _CSV_FILE.get()) is not None:
        from bertvision.pipelines.files import write_text
        from bertvision.verbs.tables import flat_rows

        own = result.to_rows() if hasattr(result, "to_rows") else flat_rows(values)
        write_text(csv, csv_text(own if rows is None else rows))
    text = json.dumps(values, indent=2, allow_nan=False) if as_json else printable(table(result))
    if (file := os.environ.get(RESULT_FILE)) is None:
        typer.echo(text)
    else:
        Path(file).write_text(text)
