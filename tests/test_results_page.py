"""Pages of results: tables are what the committed rows make, verdicts follow from intervals."""

from __future__ import annotations

import json
import re
import tomllib
from types import ModuleType
from typing import Any

import pytest
from docs_scripts import docs_script


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The script that writes the page."""
    return docs_script("generate_results")


def test_pages_are_what_the_rows_make(generator: ModuleType) -> None:
    assert {"results"} <= set(generator.PAGES)
    for name, path in generator.PAGES.items():
        page = path.read_text()
        assert generator.render(name, page) == page, "run `make docs`"


def test_every_view_stands_in_its_page_and_every_claim_was_compared(generator: ModuleType) -> None:
    text = ""
    for name, path in generator.PAGES.items():
        page = path.read_text()
        views = tomllib.loads(generator.VIEWS[name].read_text())
        assert set(re.findall(r"<!-- table: ([\w-]+) -->", page)) == set(views)
        text += page
    for path in generator.RESULTS.glob("*/claims.toml"):
        claims = tomllib.loads(path.read_text())["claim"]
        tested = [claim for claim in claims if not claim.get("untested")]
        asked = {tuple(pair) for claim in tested for pair in claim["pairs"]}
        held = json.loads((path.parent / "comparisons.json").read_text())
        assert {(c["first"], c["second"]) for c in held} == asked
        assert f"<!-- claims: {path.parent.name} -->" in text


def test_a_claim_that_was_not_compared_is_not_decided(generator: ModuleType) -> None:
    lines = generator.claims("squad11").splitlines()
    start = next(i for i, line in enumerate(lines) if "enough to beat the encoder" in line)
    rows = [line.strip("| ").split(" | ") for line in lines[start : start + 4]]
    assert {row[-1] for row in rows} == {"not tested"}
    assert [row[-3] for row in rows][0] == "+4.0 (no interval)"
    assert "not tested" not in "".join(lines[:start] + lines[start + 4 :])


def test_the_weights_of_every_head_are_judged(generator: ModuleType) -> None:
    lines = [line.strip("| ").split(" | ") for line in generator.weights("all").splitlines()]
    verdicts = {tuple(line[:3]): line[-1] for line in lines if len(line) == 8}
    for path in generator.RESULTS.glob("*/tables/pooling_weights.json"):
        for row in json.loads(path.read_text())["rows"]:
            verdict = verdicts[path.parents[1].name, row["name"], row["trained_on"]]
            upper, rest = range(9, 13), (range(1, 5), range(5, 9))
            most = max(sum(row[f"layer_{i}"] for i in third) for third in rest)
            holds = sum(row[f"layer_{i}"] for i in upper) > most
            assert verdict == ("holds" if holds else "does not")


def test_a_changed_row_changes_the_page(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = json.loads

    def one_more(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: v if k == "fraction" else one_more(v) for k, v in value.items()}
        if isinstance(value, list):
            return [one_more(v) for v in value[::-1]]  # so that differences of a list change too
        return value + 1 if isinstance(value, float) else value

    def raised(text: str) -> object:
        return one_more(real(text))

    monkeypatch.setattr(generator.json, "loads", raised)
    for name, path in generator.PAGES.items():
        page = path.read_text()
        assert generator.render(name, page) != page


@pytest.mark.parametrize(
    ("kind", "low", "high", "said"),
    [
        ("better", 0.1, 2.0, "holds"),
        ("better", -0.1, 2.0, "cannot be told"),
        ("better", -2.0, -0.1, "does not"),
        ("match", -0.9, 2.0, "holds"),
        ("match", -1.1, 2.0, "cannot be told"),
        ("match", -3.0, -1.1, "does not"),
        ("alike", -0.9, 0.9, "holds"),
        ("alike", -0.9, 1.1, "cannot be told"),
        ("alike", 1.1, 2.0, "does not"),
        ("alike", -2.0, -1.1, "does not"),
    ],
)
def test_verdicts(generator: ModuleType, kind: str, low: float, high: float, said: str) -> None:
    assert generator.verdict(kind, low, high) == said
