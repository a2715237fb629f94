"""Every command that prints JSON writes a table too: --csv is there, and has the same rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from stores import Made, shard_path
from typer.testing import CliRunner

from bertvision.cli import app


def commands(group: Any, name: str = "bertvision") -> Iterator[tuple[str, Any]]:
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


ALL = dict(commands(typer.main.get_command(app)))


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.stdout


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("name", ALL)
def test_a_command_has_csv_where_it_has_json_and_says_the_same_of_it(name: str) -> None:
    flags = {flag: p for p in ALL[name].params for flag in p.opts}
    assert ("--csv" in flags) == ("--json" in flags)
    if "--csv" in flags:
        assert flags["--csv"].help == "Write the rows to this CSV file too."


def test_there_are_commands_with_a_table() -> None:
    assert len(ALL) > 40
    assert sum(any("--csv" in p.opts for p in command.params) for command in ALL.values()) > 35


def test_rows_are_those_of_json_beside_the_table_and_beside_json(tmp_path: Path) -> None:
    Made([4, 6], encoding="int8").write(tmp_path / "store")
    table = run("store", "ls", "--store", tmp_path / "store", "--csv", tmp_path / "a.csv")
    assert "1e/train" in table
    listed = run(
        "store", "ls", "--store", tmp_path / "store", "--json", "--csv", tmp_path / "b.csv"
    )
    (split,) = json.loads(listed)
    (row,) = rows_of(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()
    assert row["tokens"] == str(split["tokens"]) == "10"
    assert row["provenance.model"] == split["provenance"]["model"]  # nested names have a dot
    assert float(row["bytes_per_example"]) == split["bytes_per_example"]  # in full


def test_a_single_result_is_one_row_and_a_list_has_all(tmp_path: Path) -> None:
    out = tmp_path / "new" / "heads.csv"
    heads = json.loads(run("heads", "-w", tmp_path, "--layers", 3, "--hidden", 16, "--json"))
    run("heads", "--layers", 3, "--hidden", 16, "--csv", out)
    assert [row["name"] for row in rows_of(out)] == [head["name"] for head in heads]
    run("heads", "learned-pooling", "--layers", 3, "--hidden", 16, "--csv", out)
    (one,) = rows_of(out)
    assert one["name"] == "learned-pooling"


def test_rows_of_verify_name_the_split_and_what_is_wrong(tmp_path: Path) -> None:
    split = Made([4, 6]).write(tmp_path / "store")
    shard_path(split, "hidden_states", 0).unlink()
    out = tmp_path / "found.csv"
    run("store", "verify", "--store", tmp_path / "store", "--csv", out, code=1)
    (row,) = rows_of(out)
    assert row["split"] == "1e/train"
    assert "missing" in row["problems"]


def test_a_file_of_one_call_is_not_written_by_the_next(tmp_path: Path) -> None:
    Made([4, 6]).write(tmp_path / "store")
    out = tmp_path / "a.csv"
    run("store", "ls", "--store", tmp_path / "store", "--csv", out)
    out.unlink()
    run("store", "ls", "--store", tmp_path / "store")
    assert not out.exists()
