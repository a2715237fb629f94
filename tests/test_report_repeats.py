"""Methods with several seeds in a report: what `spread` says, as a section and as a page."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import CHROMIUM, measure
from reports import Page, read_table
from terminal import cells, done, run
from workspaces import SETTINGS, write_squad

import bertvision
from bertvision.pipelines.workspace.workspace import Workspace

METHODS = ["plain", "freeze-0", "freeze-1", "freeze-2"]


@pytest.fixture(scope="module")
def made(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, and copies of them that say they froze 0, 1 and 2 layers."""
    root = tmp_path_factory.mktemp("methods")
    data = {name: write_squad(root / f"{name}.json", n, n) for name, n in _SIZES.items()}
    short = {**SETTINGS, "epochs": 0.3, "save_at": ["0.3e"], "seed": 0, "seeds": 2}
    bertvision.repeat(model=str(tiny_bert), **data, **short, workspace=root / "plain")
    for name in METHODS[1:]:
        shutil.copytree(root / "plain", root / name)
        variant = name.replace("-", ":")
        for path in (root / name).glob("seed-*/bertvision.yaml"):
            path.write_text(path.read_text().replace("variant: []", f"variant: ['{variant}']"))
    return root


_SIZES = {"train": 10, "dev": 3}


@pytest.fixture
def methods(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in which one stands."""
    shutil.copytree(made, tmp_path / "methods")
    monkeypatch.chdir(tmp_path / "methods")
    return tmp_path / "methods"


def test_a_page_of_its_own_has_the_table_that_spread_prints(methods: Path) -> None:
    found = bertvision.report(METHODS)
    assert found.page == methods / "report" / "index.html"
    assert found.results == 8
    text = found.page.read_text()
    page = Page(text)
    printed = cells(done("spread", *METHODS).split("\n\n")[1])
    assert page.tables["methods"] == printed
    assert [row[0] for row in printed[1:]] == METHODS
    assert "methods: fine-tuning with several seeds</h1>" in text
    assert "The first run: plain, seed 0" in text
    assert html.escape("bertvision spread plain freeze-0 freeze-1 freeze-2") in text
    rows = {row["method"]: row for row in read_table(found.page, "method_runs")}
    for one in bertvision.spread(METHODS).runs:
        assert float(rows[one.method][f"seed_{one.seed}"]) == one.score


def test_the_figures_are_those_of_spread_and_the_curve_needs_three_numbers(methods: Path) -> None:
    found = bertvision.report(METHODS)
    assert found.figures == ["methods", "methods-freeze"]
    drawn = "".join((methods / f"report/figures/{name}.svg").read_text() for name in found.figures)
    whole = bertvision.spread(METHODS).figure()
    for tip in ("plain, seed 0", "freeze-2, seed 1", "K of freeze:K"):
        assert drawn.count(tip) == whole.count(tip) > 0
    assert bertvision.report(METHODS[:3]).figures == ["methods"]


def test_a_folder_of_runs_has_a_page_and_stays_a_folder_of_runs(methods: Path) -> None:
    found = bertvision.report(workspace="freeze-1")
    assert found.page == methods / "freeze-1" / "report" / "index.html"
    assert [row["method"] for row in read_table(found.page, "methods")] == ["freeze-1"]
    again = bertvision.report(workspace="freeze-1")
    assert (again.page, again.bytes) == (found.page, found.bytes)
    assert bertvision.spread("freeze-1").rows[0].runs == 2


def test_methods_are_a_section_of_the_report_of_a_run(
    methods: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(methods / "plain" / "seed-1")
    alone = bertvision.report()
    folders = [f"../../{name}" for name in METHODS]
    found = bertvision.report(folders)
    assert found.page == alone.page == methods / "plain/seed-1/report/index.html"
    assert set(found.tables) - set(alone.tables) == {"methods", "method_runs"}
    assert set(found.figures) - set(alone.figures) == {"methods", "methods-freeze"}
    assert found.results == alone.results == 1
    text = found.page.read_text()
    assert text.index('id="learning-curve"') < text.index('<section id="methods"')
    assert "Of 4 methods of fine-tuning plain scores highest in the mean" in text
    failed = sum(run["failed"] for run in bertvision.spread(folders).to_json()["runs"])
    assert (f". {failed} of 8 runs are not above the trivial answer." in text) == bool(failed)
    assert "of the 3 others the 95 % interval is wholly below it" in text


def test_a_seed_without_a_score_is_named_with_what_finishes_it(methods: Path) -> None:
    shutil.rmtree(methods / "freeze-1" / "seed-1" / "bert")
    found = bertvision.report(METHODS)
    text = html.unescape(found.page.read_text())
    assert "Not finished: freeze-1, seed 1: <code>bertvision finetune --resume" in text
    assert "No interval of freeze-1: one run alone has no spread." in text.replace("’", "'")
    rows = {row["method"]: row for row in read_table(found.page, "method_runs")}
    assert rows["freeze-1"]["seed_1"] == ""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_nothing_of_the_page_leaves_it_or_covers_anything(methods: Path, tmp_path: Path) -> None:
    long = "a-method-with-a-name-that-no-phone-has-the-room-for"
    (methods / "plain").rename(methods / long)
    text = bertvision.report([long, *METHODS[1:]]).page.read_text()
    for found in measure(tmp_path, (text, 360), (text, 1000)):
        assert found["wide"] == found["out"] == found["overlaps"] == found["dead"] == []


def _another_task(root: Path) -> None:
    for path in (root / "freeze-1").glob("seed-*/bertvision.yaml"):
        path.write_text(path.read_text().replace("name: squad_v2", "name: squad_v1"))


def _other_data(root: Path) -> None:
    path = root / "freeze-1" / "seed-0" / "bertvision.yaml"
    digest = Workspace.find(path.parent).config.data["dev"].sha256
    path.write_text(path.read_text().replace(digest, "a" * 64))


def _as_it_is(root: Path) -> None:
    pass


REFUSED: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "no runs": (_as_it_is, ["plain", "nothing"], "/nothing does not exist: a folder of runs"),
    "mixed tasks": (_another_task, ["plain", "freeze-1"], "task.name is 'squad_v1', there it is"),
    "another task than the workspace": (
        _another_task,
        ["plain", "-w", "freeze-1/seed-0"],
        "plain does not belong in the report of .*seed-0: its task is 'squad_v2', there it is "
        "'squad_v1'; `bertvision report plain --workspace .*plain` writes a page of the methods",
    ),
    "other data than the workspace": (
        _other_data,
        ["plain", "-w", "freeze-1/seed-0"],
        "its dev is '.*', there it is 'aaa",
    ),
    "neither folder nor workspace": (_as_it_is, [], "no workspace in"),
    "no workspace there": (_as_it_is, ["plain", "-w", "nothing"], "no workspace in .*/nothing"),
    "a store": (_as_it_is, ["plain", "--store", "x"], "--store: a page of methods shows nothing"),
    "something else there": (_as_it_is, ["plain", "--out", "freeze-0"], "holds seed-0, which is"),
}


@pytest.mark.parametrize(("spoil", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shown_is_refused_by_name_and_nothing_is_written(
    methods: Path, spoil: Callable[[Path], None], given: list[str], message: str
) -> None:
    spoil(methods)
    before = sorted(methods.rglob("*"))
    ended = run("report", *given)
    assert ended.exit_code == 2
    assert re.search(message, " ".join(ended.stderr.split()))
    assert sorted(methods.rglob("*")) == before
