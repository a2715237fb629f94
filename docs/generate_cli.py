"""Write docs/cli.md from the commands: ``make docs``. A test keeps it current."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import bertvision
from bertvision.cli import app, commands
from bertvision.pipelines.declare import arguments

TARGET = Path(__file__).with_name("cli.md")

HEADER = """\
# The command line

Written by `make docs` from the commands; do not edit. `bertvision train --help` says more of one.

Results go to stdout, progress and messages to stderr. Every command works on the workspace it is
run in (the folder with `bertvision.yaml`, or any folder below it). A command that is killed is
finished by running it again. `bertvision NAME …` is
`bertvision.NAME(…)` in Python, with the same arguments but for --json, --csv and --dry-run (which
is `dry_run`), and `beside=` for --with; `errors` is `error_analysis`, `store` is `ActivationStore`.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | `store verify` found damage, `store audit` wrong examples; `store repair`, `doctor` |
| 2 | an option, file or workspace is wrong; the message says what to do |
| 130, 143 | stopped by SIGINT or SIGTERM; what was finished is kept |
"""
_OFTEN, _NEARLY_ALL = 3, 20
"""Commands that share an option before it is described once, above all of them, and before they do
not name it any more."""


def render() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    headings = commands()
    by_name = {name: root.commands[name] for names in headings.values() for name in names}
    store = by_name["store"].commands
    options = Counter(
        _entry(option)
        for command in [*by_name.values(), *store.values()]
        if command is not by_name["store"]
        for option in command.params
    )
    often: dict[str, Entry] = {}
    for entry, n in options.most_common():
        if n >= _OFTEN and entry[0].startswith("`-"):
            often.setdefault(entry[0], entry)  # of the same flags, the commonest
    shared = set(often.values())
    named = {entry for entry in shared if options[entry] < _NEARLY_ALL}
    lines = [HEADER, "## Options of many commands\n"]
    lines += [_line(entry) for entry in sorted(shared)]
    told: dict[frozenset[Entry], str] = {}
    for heading, names in headings.items():
        lines.append(f"\n## {heading}")
        for name in names:
            if name == "store":
                for word, command in store.items():
                    lines += _section(f"store {word}", command, shared, named, None)
            else:
                own = {_entry(option) for option in by_name[name].params}
                like = next((other for entries, other in told.items() if entries <= own), None)
                told_there = _fields(like)
                lines += _section(
                    name, by_name[name], shared | told_there, named - told_there, like
                )
                if fields := _fields(name):
                    told.setdefault(frozenset(fields), name)
    return "\n".join(lines) + "\n"


Entry = tuple[str, str, str]
"""Flags, default and help of an option."""


def _entry(option: Any) -> Entry:
    flags = " ".join(f"`{flag}`" for flag in reversed([*option.opts, *option.secondary_opts]))
    default = option.default
    shown = (
        "" if default is None or default is False or option.required else f" (default {default})"
    )
    if option.param_type_name == "argument":
        flags = f"`{option.name.upper()}`"
    return flags, shown, option.help or ""


def _line(entry: Entry) -> str:
    flags, default, text = entry
    return f"- {flags}{default}: {text}"


def _fields(name: str | None) -> set[Entry]:
    """The options of a command that are fields of an options class."""
    if name is None or name == "errors":
        return set()
    fields = {a.name for a in arguments(getattr(bertvision, name)) if a.options}
    command: Any = typer.main.get_command(app)
    return {_entry(o) for o in command.commands[name].params if o.name in fields}


def _section(
    name: str, command: Any, told: set[Entry], named: set[Entry], like: str | None
) -> Iterator[str]:
    """A command: its help, its options that were not told elsewhere, and the names of others."""
    yield f"\n### bertvision {name}\n"
    yield command.help.partition("\n\n")[0]
    own = [_entry(option) for option in command.params]
    lines = [_line(entry) for entry in own if entry not in told]
    if above := [flags for flags, *rest in own if (flags, *rest) in named]:
        lines.append(f"- {', '.join(above)}: as above.")
    if like:
        lines.append(f"- The options of `bertvision {like}`.")
    if lines:
        yield "\n" + "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
