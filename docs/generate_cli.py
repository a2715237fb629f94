"""Write docs/cli.md from the command line's own help: ``make docs``. A test keeps it current."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from bertvision.cli import app

TARGET = Path(__file__).with_name("cli.md")
WIDTH = 88

HEADER = """\
# The command line

Written by `make docs` from `bertvision … --help`; do not edit.

Results go to stdout, as JSON with `--json`; progress and messages go to stderr. Every command works
on the workspace it is run in (the folder with `bertvision.yaml`, or any folder below it), or on
`--workspace DIR`. A command that is killed is finished by running it again.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | `store verify` found damage, `store audit` examples that are wrong |
| 2 | an option, file or workspace is wrong; the message says what to do |
| 130, 143 | stopped by SIGINT or SIGTERM; what was finished is kept |
"""


def render() -> str:
    """The whole page."""
    root = typer.main.get_command(app)
    sections = [
        f"## {name}\n\n```text\n{text}\n```\n" for name, text in _helps(root, "bertvision", None)
    ]
    return "\n".join([HEADER, *sections])


def _helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """Path and help of a command and of all its sub-commands, in the order they were defined."""
    context = command.make_context(
        name, [], parent, resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH
    )
    lines = (line.rstrip() for line in command.get_help(context).splitlines())
    yield context.command_path, "\n".join(lines).strip()
    for sub_name, sub_command in getattr(command, "commands", {}).items():
        yield from _helps(sub_command, sub_name, context)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
