"""Commands run in this process, and their tables taken apart, for the tests of the command line."""

from __future__ import annotations

import re

from typer.testing import CliRunner, Result

from bertvision.cli import app


def run(*args: object) -> Result:
    """The result of a command: ``exit_code``, ``stdout``, ``stderr``."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


def done(*args: object) -> str:
    """Stdout of a command that must succeed."""
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def cells(text: str) -> list[list[str]]:
    """The cells of a table, parted only where every line has a gap of two columns: aligned."""
    lines = text.strip("\n").split("\n")
    width = max(map(len, lines))
    blank = "".join(
        " " if all(line.ljust(width)[i] == " " for line in lines) else "x" for i in range(width)
    )
    columns = [m.span() for m in re.finditer(r"x+( x+)*", blank)]
    return [[line[start:end].strip() for start, end in columns] for line in lines]
