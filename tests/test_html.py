"""Results in a notebook: tables, every text of the data escaped, and frames of the same rows."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from stores import Made

from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.views.html import html_table
from bertvision.jobs.show import Row, Rows, ShownRecord, Values
from bertvision.pipelines.text import format_table, html_of


class Parsed(HTMLParser):
    """The cells and texts of some HTML, and the names of its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


ATTACK = "<script>alert('x')</script> & \"quoted\""


def test_texts_of_the_data_are_escaped() -> None:
    found = Parsed(html_table(["name", ATTACK], [["a", ATTACK]], title=ATTACK))
    assert set(found.elements) == {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert found.texts == [ATTACK, "name", ATTACK, "a", ATTACK]


def test_what_a_command_prints_becomes_tables_with_the_text_around_them() -> None:
    def text() -> str:
        first = format_table(["name", "n"], [["a", "1"], ["b", "12"]])
        second = format_table(["x"], [["y"]])
        return f"title <b>\n{first}\n\nbetween\n{second}\nafter"

    found = Parsed(html_of(text))
    assert found.texts == [
        "title <b>",
        "name",
        "n",
        "a",
        "1",
        "b",
        "12",
        "between",
        "x",
        "y",
        "after",
    ]
    assert html_of(text).count("text-align:right") == 3  # the numbers with their header
    assert text().splitlines()[1:3] == ["name   n", "a      1"]  # a terminal has what it had


def test_a_text_of_the_data_that_looks_like_a_place_stays_a_text() -> None:
    found = Parsed(html_of(lambda: format_table(["x"], [["y"]]) + "\n0;-0;\x00"))
    assert found.texts[-1].startswith("0;-0;")
    assert found.elements.count("table") == 1


def test_long_tables_show_their_beginning_and_say_how_long_they_are() -> None:
    html = html_table(["n"], [[str(i)] for i in range(1234)])
    assert Parsed(html).texts[-1] == "… 1,234 rows in all"
    assert len(html) < 10_000


class Found(ShownRecord):
    """A result of rows."""

    title: str
    rows: list[dict[str, Any]]

    def table(self, values: Values) -> str:
        """Its title and rows."""
        return f"{values['title']}\n" + format_table(["a"], [[str(r["a"])] for r in values["rows"]])


def test_results_show_their_table_and_are_frames_of_their_rows() -> None:
    found = Found(title=ATTACK, rows=[{"a": 1, "b": {"c": 2.5}}, {"a": 2}])
    assert Parsed(found._repr_html_()).texts == [ATTACK, "a", "1", "2"]
    assert found.to_pandas().to_dict("list")["a"] == [1, 2]
    assert found.to_pandas()["b.c"][0] == 2.5
    rows = Rows([Row({"name": ATTACK, "score": {"f1": 50.0}})])
    assert ATTACK in Parsed(rows._repr_html_()).texts
    assert list(rows.to_pandas().columns) == ["name", "score.f1"]
    assert Parsed(Rows([])._repr_html_()).texts == ["no rows"]


def test_store_snapshot_and_split_say_what_they_hold(tmp_path: Path) -> None:
    Made([4, 6]).write(tmp_path)
    Made([4, 6, 60], tag="2e", split="dev").write(tmp_path, shards=1)
    store = ActivationStore.open(tmp_path)
    assert Parsed(store._repr_html_()).texts[1:] == [
        "snapshot",
        "splits",
        "1e",
        "train",
        "2e",
        "dev",
    ]
    assert "2 examples of 10 tokens" in store["1e"]._repr_html_()
    shown = Parsed(store["1e/train"]._repr_html_()).texts
    assert dict(zip(shown[1::2], shown[2::2], strict=True)) == {
        "examples": "2, 10 tokens",
        "layers": "0, 1, 2",
        "hidden size": "16",
        "encoding": "float32",
        "tokens kept": "all",
        "labels": "start_positions",
        "complete": "yes",
    }
    assert "lacks 1 of 2 shards" in store["2e/dev"]._repr_html_()
