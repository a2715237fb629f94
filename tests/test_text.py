"""Text for people, and hints in messages."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import did_you_mean
from bertvision.jobs.show import mapping_table
from bertvision.pipelines import text
from bertvision.pipelines.text import csv_text, printable

CELLS = st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text("a,\"\n '"))


@given(st.lists(st.dictionaries(st.sampled_from("abc"), CELLS, min_size=1), min_size=1))
def test_csv_reads_back_in_full_precision(rows: list[dict[str, Any]]) -> None:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    expected = [["" if (x := row.get(key)) is None else str(x) for key in keys] for row in rows]
    assert list(csv.reader(io.StringIO(csv_text(rows), newline=""))) == [keys, *expected]


def test_csv_has_the_columns_asked_for_and_lists_between_spaces() -> None:
    rows = [{"epochs": [3, 0], "map": 1.5, "more": 1}, {"map": None}]
    assert csv_text(rows, ["map", "epochs"]) == "map,epochs\n1.5,3 0\n,\n"


def test_a_hint_names_what_is_close_and_nothing_else() -> None:
    names = ["learned-pooling", "adapter-64", "adapter-64-shared"]
    assert did_you_mean("learned-poling", names) == "did you mean learned-pooling? "
    several = did_you_mean("adapter-64-share", names, most=2)
    assert several == "did you mean adapter-64-shared or adapter-64? "
    assert did_you_mean("bert", names) == did_you_mean("adapter-64", names) == ""


def test_a_table_fits_the_terminal_and_a_pipe_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line wraps on a terminal; what is left out is said, and a file lacks nothing."""
    header, rows = ["layer", *(f"column {i}" for i in range(20))], [["1", *["0.5"] * 20]]
    whole = text.format_table(header, rows)
    assert "column 19" in whole.splitlines()[0]
    monkeypatch.setattr(text, "terminal_width", lambda: 80)
    cut = text.format_table(header, rows)
    assert max(map(len, cut.splitlines())) <= 80
    assert "not shown: column 8" in cut.replace("column 7, ", "")
    stacked = text.format_table(header, rows, stacked=True)
    assert max(map(len, stacked.splitlines())) <= 80
    assert all(name in stacked for name in header)
    assert "not shown" not in stacked
    assert stacked.count("layer") > 1  # each part says again what its rows are


def test_a_long_value_keeps_both_ends_on_a_terminal_and_all_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest, values = "0123456789abcdef" * 4, {"provenance": {"weights_sha256": "0f" * 50}}
    assert text.shorten(digest, 30) == digest
    assert "0f" * 50 in mapping_table(values)
    monkeypatch.setattr(text, "terminal_width", lambda: 80)
    assert text.shorten(digest, 16) == digest
    cut = text.shorten(digest, 30)
    assert (len(cut), cut[:10], cut[-10:]) == (50, digest[:10], digest[-10:])
    assert max(map(len, mapping_table(values).splitlines())) == 80
    lines = text.fill("tables  " + "a_table, " * 20, 8).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert {line[:8] for line in lines[1:]} == {" " * 8}


@pytest.mark.parametrize("text", ["=HYPERLINK(1)", "+1+1", "-cmd", "@SUM(A1)", "\t=1"])
def test_no_text_of_the_data_is_a_formula_of_a_spreadsheet(text: str) -> None:
    (_, row) = csv.reader(io.StringIO(csv_text([{"text": text}]), newline=""))
    assert row == ["'" + text]


def test_numbers_stay_numbers_in_a_spreadsheet() -> None:
    rows = [{"a": -1.5, "b": "-1.5", "c": "+2 %", "d": [-1, 2], "e": "−3", "f": "1e"}]
    assert csv_text(rows).splitlines()[1] == "-1.5,-1.5,'+2 %,-1 2,−3,1e"


def test_no_text_of_the_data_steers_the_terminal() -> None:
    shown = printable("\x1b]0;title\x07 \x9b31m a\tb\nc \u202egnp.exe é 猫 ─")
    assert shown == "\\x1b]0;title\\x07 \\x9b31m a\tb\nc \\u202egnp.exe é 猫 ─"
