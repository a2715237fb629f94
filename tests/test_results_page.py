"""Pages of results: tables are what the committed rows make, verdicts follow from intervals."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pytest
from docs_scripts import DOCS, docs_script

import bertvision

MEASURED = [
    *sorted(DOCS.glob("results*.md")),
    *(DOCS / f"{name}.md" for name in ("analyses", "findings", "scaling", "performance", "tokens")),
    DOCS / "compression.md",
    DOCS / "index.md",
    DOCS.parent / "README.md",
]
"""Pages whose prose has measured numbers."""
NUMBERS: dict[str, dict[str, dict[str, str]]] = tomllib.loads((DOCS / "numbers.toml").read_text())
"""By page, phrases of its prose, and what each rests on: a row, a setting or a cited work."""
_MADE = re.compile(r"<!-- [a-z]+: [\w -]+ -->\n(.*?)<!-- end -->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.@-])[+−]?\d[\d,]*(?:\.\d+)?(?:e[-−]?\d+)?(?!\w|\.\d)")


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
    shown = " ".join(re.findall(r"<!-- claims: ([\w -]+) -->", text)).split()
    for path in generator.RESULTS.glob("*/claims.toml"):
        claims = tomllib.loads(path.read_text())["claim"]
        tested = [claim for claim in claims if not claim.get("untested")]
        asked = {tuple(pair) for claim in tested for pair in claim["pairs"]}
        held = json.loads((path.parent / "comparisons.json").read_text())
        assert {(c["first"], c["second"]) for c in held} == asked
        assert path.parent.name in shown


def test_a_claim_that_was_not_compared_is_not_decided(generator: ModuleType) -> None:
    lines = generator.claims("squad11").splitlines()
    start = next(i for i, line in enumerate(lines) if "enough to beat the encoder" in line)
    rows = [line.strip("| ").split(" | ")[-2:] for line in lines[start : start + 2]]
    assert rows[0][0] == "+4.0, not tested"
    assert {cell.partition(", ")[2] for row in rows for cell in row} == {"not tested"}
    assert "not tested" not in "".join(lines[:start] + lines[start + 2 :])


def test_every_comparison_of_several_runs_stands_in_one_table(generator: ModuleType) -> None:
    runs = [f"glue_{task}" for task in ("mrpc", "stsb", "cola", "sst2")]
    text = generator.claims(" ".join(runs))
    marks = sum(text.partition("\n\n")[0].count(mark) for mark in generator.MARKS.values())
    held = [json.loads((generator.RESULTS / run / "comparisons.json").read_text()) for run in runs]
    assert marks == sum(map(len, held))


def test_the_weights_of_every_head_are_judged(generator: ModuleType) -> None:
    head, _, *lines = (
        line.strip("| ").split(" | ")
        for line in generator.weights("all").splitlines()
        if line.startswith("|")
    )
    ahead = {
        (run, name, tag): cell
        for run, name, *cells in lines
        for tag, cell in zip(head[2:], cells, strict=True)
    }
    for path in generator.RESULTS.glob("*/tables/pooling_weights.json"):
        for row in json.loads(path.read_text())["rows"]:
            cell = ahead.pop((path.parents[1].name, row["name"], row["trained_on"]))
            upper, rest = range(9, 13), (range(1, 5), range(5, 9))
            most = max(sum(row[f"layer_{i}"] for i in third) for third in rest)
            assert (cell[0] == "+") == (sum(row[f"layer_{i}"] for i in upper) > most)
    assert set(ahead.values()) <= {"–"}


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


def numbers(text: str) -> Iterator[str]:
    """Numbers of a text without sign and thousands separators; years are none."""
    for match in _NUMBER.finditer(text):
        number = match[0].rstrip(",")
        if not re.fullmatch(r"(19|20)\d\d", number):
            yield number.lstrip("+−").replace(",", "").replace("−", "-")


def measured(path: Path) -> str:
    """A page; of scaling.md the section that was measured, as all others reckon on paper."""
    text = path.read_text()
    if path.name != "scaling.md":
        return text
    return text.partition("## One and two workers\n")[2].partition("\n## ")[0]


def tables_and_prose(page: str) -> tuple[str, str]:
    """Tables with what is generated around them, and the running text without code and links."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    made = "\n".join(_MADE.findall(text))
    lines = _MADE.sub("", text).splitlines()
    tables = "\n".join([made, *(line for line in lines if line.startswith("|"))])
    prose = " ".join(line for line in lines if not line.startswith(("|", "#", "    ")))
    prose = re.sub(r"<!--.*?-->|!?\[[^\]]*\]\([^)]*\)|`[^`]*`|\*", "", prose)
    return tables, re.sub(r"\s+", " ", prose)


def unsupported(page: str, entries: dict[str, dict[str, str]]) -> list[str]:
    """Numbers from 10 on, or with decimals, that stand in no table and no entry."""
    tables, prose = tables_and_prose(page)
    for phrase in sorted(entries, key=len, reverse=True):
        assert phrase in prose, f"numbers.toml lists what the page does not say: {phrase}"
        prose = prose.replace(phrase, " ")
    known = {*numbers(tables), *map(str, range(10))}
    return [number for number in numbers(prose) if number not in known]


def values(row: str) -> list[float]:
    """Values of the expression behind ``path:`` on a committed file, or on a figure's titles."""
    path, expression = row.split(": ", 1)
    text = (DOCS / path).read_text()
    data = dict(re.findall(r"<title>([^<]*)(?:, |: )([-\d.]+)</title>", text))
    if path.endswith(".json"):
        data = json.loads(text)
    rows = data if isinstance(data, list) else data.get("rows", [])

    def pick(**where: Any) -> list[dict[str, Any]]:
        return [row for row in rows if where.items() <= row.items()]

    def pair(first: str, second: str) -> list[float]:
        [of] = pick(first=first, second=second)
        return [of["difference"], of["low"], of["high"]]

    names: dict[str, Any] = {"data": data, "rows": rows, "pick": pick, "pair": pair, "mean": mean}
    names["one"] = lambda **where: pick(**where)[0]
    found = eval(expression, names)  # of a file of this repository
    return found if isinstance(found, list) else [found]


def agrees(shown: str, value: float) -> bool:
    """Whether a number is a value as rounded as it is shown, signs apart."""
    digits = re.sub(r"e.*", "", shown).partition(".")[2]
    unit = 10.0 ** -len(digits) * float("1" + (re.findall(r"e.*", shown) or ["e0"])[0])
    return abs(abs(value) - float(shown)) <= unit * 0.5 + 1e-9


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.name)
def test_every_number_of_the_prose_has_its_row(path: Path) -> None:
    left = unsupported(measured(path), NUMBERS.get(path.name, {}))
    assert not left, f"no row in a table or in docs/numbers.toml: {', '.join(left)}"


ROWS = [
    (page, phrase, entry["row"])
    for page, entries in NUMBERS.items()
    for phrase, entry in entries.items()
    if "row" in entry
]


@pytest.mark.parametrize(("page", "phrase", "row"), ROWS)
def test_a_number_is_that_of_its_row(page: str, phrase: str, row: str) -> None:
    shown, found = list(numbers(phrase)), values(row)
    assert len(shown) == len(found), (shown, found)
    assert all(map(agrees, shown, found)), (shown, found)


def test_entries_say_what_a_number_rests_on() -> None:
    assert set(NUMBERS) <= {path.name for path in MEASURED}
    for entries in NUMBERS.values():
        for phrase, entry in entries.items():
            assert len(entry) == 1
            assert set(entry) <= {"row", "setting", "cited"}
            assert list(numbers(phrase)), phrase


def test_every_script_of_a_page_is_run_for_it() -> None:
    pages = docs_script("reproduce").PAGES
    scripts = {str(path.relative_to(DOCS / "results")) for path in DOCS.glob("results/**/*.sh")}
    run = {name: {line.split()[0] for line in lines} for name, lines in pages.items()}
    assert set().union(*run.values()) == scripts
    for name, own in run.items():
        linked = re.findall(r"\(results/([\w/-]+\.sh)\)", (DOCS / f"{name}.md").read_text())
        assert set(linked) <= own, name


def test_a_tenth_of_the_commands_and_of_the_data_is_left(tmp_path: Path) -> None:
    reproduce = docs_script("reproduce")
    asked = ["repeat", "--seeds", "3", "--train-questions", "5300", "--steps", "60"]
    left = ["repeat", "--seeds", "3", "--train-questions", "530", "--steps", "50"]
    assert reproduce.scaled(asked) == left
    article = {"paragraphs": []}
    wholes = {
        "dev.json.gz": json.dumps({"version": "v2.0", "data": [article] * 25}),
        "train.tsv": "text\tlabel\udcf0\n" + "".join(f"word {i}\t{i}\n" for i in range(1999)),
        "dev.conllu": "".join(f"# {i}\n1\tword\n\n" for i in range(1005)),
    }
    parts = {}
    for name, text in wholes.items():
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt", errors="surrogateescape") as file:  # not all is UTF-8
            file.write(text)
        reproduce.cut(tmp_path / name, tmp_path / "part" / name)
        with opened(tmp_path / "part" / name, "rt", errors="surrogateescape") as file:
            parts[name] = file.read()
    assert json.loads(parts["dev.json.gz"]) == {"version": "v2.0", "data": [article] * 3}
    lines = wholes["train.tsv"].splitlines()
    assert parts["train.tsv"].splitlines() == lines[:100] + lines[1000:1100]
    assert parts["dev.conllu"].count("# ") == parts["dev.conllu"].count("\n\n") == 105


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_a_page_run(tiny_bert: Path, tmp_path: Path) -> None:
    rows = {
        "MRPC": (
            "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n",
            "{i}\t{n}\t1\t{text}\t{other}\n",
        ),
        "STS-B": ("index\tsentence1\tsentence2\tscore\n", "{n}\t{text}\t{other}\t{i}.5\n"),
        "CoLA": ("", "gj04\t{i}\t\t{text}\n"),
        "SST-2": ("sentence\tlabel\n", "{text}\t{i}\n"),
    }
    for folder, (header, row) in rows.items():
        for split in ("train", "dev"):
            path = tmp_path / "whole" / "glue" / folder / f"{split}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [f"david was born in {1900 + n} {split}" for n in range(100)]
            lines = [
                row.format(n=n, i=n % 2, text=text, other=f"{text} again")
                for n, text in enumerate(texts)
            ]
            path.write_text(header + "".join(lines))
    before = {path: path.stat().st_mtime_ns for path in DOCS.rglob("*.json")}
    given = [f"mpnet={tiny_bert}", f"data={tmp_path / 'whole'}"]
    command = [sys.executable, DOCS / "reproduce.py", "results-glue", tmp_path / "out", *given]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    for task in ("mrpc", "stsb", "cola", "sst2"):
        scored = bertvision.results(workspace=tmp_path / "out" / f"glue_{task}")
        assert {row.checkpoint for row in scored} == {"0e", "0.1e", "0.3e", "1e", "3e"}
        assert sum(row.system == "head" for row in scored) == 4 * 3 * 3 * 3
    assert before == {path: path.stat().st_mtime_ns for path in DOCS.rglob("*.json")}


def test_a_number_without_a_row_is_found() -> None:
    page = "It has 41.5 points, 12 more than [10](x), `99`, and 3 of 1,299 (2019).\n\n| 1,299 |\n"
    assert unsupported(page, {}) == ["41.5", "12"]
    assert unsupported(page, {"41.5 points, 12 more": {"setting": "made up"}}) == []
    with pytest.raises(AssertionError, match="does not say"):
        unsupported(page, {"41.6 points": {"setting": "made up"}})
    assert agrees("41", 40.5)
    assert not agrees("41", 40.45)
    assert not agrees("6.2e-3", 6.3e-3)
