"""Former names work, say what replaces them and until when, and go in the version they name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from packaging.version import Version
from typer.testing import CliRunner

import bertvision
from bertvision.cli import app
from bertvision.errors import DeprecatedWarning, InputError

ROOT = Path(__file__).parents[1]


def test_a_former_name_is_taken_with_a_warning_at_the_line_that_gave_it() -> None:
    said = r"--tokens is called --max-tokens since 0\.2, .* goes in 0\.4: give --max-tokens"
    # its value arrives where that of the new name is checked
    with (
        pytest.warns(DeprecatedWarning, match=said) as warned,
        pytest.raises(InputError, match=r"--max-tokens.*\b2\b|\b2\b.*--max-tokens"),
    ):
        bertvision.rsa("0e", "1e", tokens=2)
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(InputError, match="--tokens is the former name of --max-tokens"):
        bertvision.rsa("0e", "1e", tokens=100, max_tokens=200)


@pytest.mark.filterwarnings("default::bertvision.errors.DeprecatedWarning")
def test_the_command_line_takes_the_former_name_and_shows_the_new_one(tmp_path: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["rsa", "--help"]).output
    assert "--max-tokens" in shown
    assert "--tokens" not in shown
    given = ["rsa", "0e", "1e", "--tokens", "60", "--workspace", str(tmp_path)]
    assert "Warning: --tokens is called --max-tokens" in runner.invoke(app, given).output


def test_no_former_name_outlives_the_version_it_was_to_go_in() -> None:
    calls = [
        {keyword.arg: keyword.value for keyword in node.keywords}
        for path in (ROOT / "verbs").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "renamed"
    ]
    gone = [Version(ast.literal_eval(given["gone"])) for given in calls]
    assert gone
    assert all(Version(bertvision.__version__) < version for version in gone)
