"""Commands run in this process, and their tables taken apart, for the tests of the command line."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from typer.testing import CliRunner, Result

from bertvision.cli import app
from bertvision.pipelines.workspace.workspace import Workspace


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


def with_heads(workspace: Workspace, root: Path) -> Path:
    """A copy of a workspace with heads: two on 0.5e, one of them also on 1e."""
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    common = ["-w", root, "--precision", "32", "--epochs", 2, "--batch-size", 8]
    done("train", "learned-pooling", "adapter-64-shared", "--checkpoint", 0.5, *common)
    done("train", "learned-pooling", "--checkpoint", "1e", *common)
    return root
