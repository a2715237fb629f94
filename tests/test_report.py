"""The report says what the files say, escapes what it is given, and replaces nothing but itself."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer
from byhand import change, fields, rewrite
from figures import SVG, Drawing
from reports import HEADS, Page, read_table
from typer.testing import CliRunner

from bertvision.cli import app
from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.report.headline import sentences
from bertvision.pipelines.report.page import Report
from bertvision.pipelines.results.rows import read_rows

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.workspace import Workspace as OpenWorkspace

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>&amp; `code` </style>'


@pytest.fixture(scope="module")
def written(lab: OpenWorkspace, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report(lab, tmp_path_factory.mktemp("out") / "report")


@pytest.fixture
def copy(lab_copy: OpenWorkspace) -> OpenWorkspace:
    return lab_copy


def f1(space: OpenWorkspace, file: str) -> float:
    return float(json.loads((space.root / file).read_text())["rules"]["n-best"]["metrics"]["f1"])


def test_every_number_is_that_of_the_file_beside_it(lab: OpenWorkspace, written: Report) -> None:
    runs = read_table(written.page, "runs")
    metrics = {p for p in lab.root.rglob("metrics.json") if p.parent.parent.name != "heads"}
    scored = {p.relative_to(lab.root).as_posix() for p in metrics if "rules" in p.read_text()}
    assert {run["file"] for run in runs} == scored
    for run in runs:
        assert float(run["score"]) == f1(lab, run["file"])
        assert run["command"].startswith("bertvision ")


def test_seeds_are_a_mean_and_a_standard_deviation(lab: OpenWorkspace, written: Report) -> None:
    rows = [r for r in read_table(written.page, "results") if r["name"] in HEADS]
    assert len(rows) == 2 * 2 * 2 * 2  # heads, parts of the data, snapshots on both sides
    for row in rows:
        scores = [f1(lab, file) for file in row["file"].split("; ")]
        bert = f1(lab, f"bert/{row['checkpoint']}/metrics.json")
        assert row["seeds"] == str(len(scores)) == "2"
        mean, sd = sum(scores) / 2, abs(scores[0] - scores[1]) / 2**0.5
        assert float(row["f1"]) == pytest.approx(mean)
        assert float(row["f1_sd"]) == pytest.approx(sd)
        assert float(row["difference"]) == pytest.approx(mean - bert)


def test_the_page_shows_the_rows_of_its_tables(written: Report) -> None:
    page = Page(written.page.read_text(encoding="utf-8"))
    assert sorted(page.tables) == sorted(written.tables)
    cells = [line for line in page.tables["results"] if len(line) > 1]
    header, rows = cells[0], cells[1:]
    values = read_table(written.page, "results")
    assert [line[0] for line in rows] == [value["name"] for value in values]
    at = header.index("F1")
    for line, value in zip(rows, values, strict=True):
        sd = f" ± {float(value['f1_sd']):.1f}" if value["f1_sd"] else ""
        assert line[at] == f"{float(value['f1']):.1f}{sd}"


def test_csv_and_json_hold_the_same(written: Report) -> None:
    for name in written.tables:
        path = written.page.parent / "tables" / f"{name}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        as_text = [{k: "" if v is None else str(v) for k, v in row.items()} for row in rows]
        assert as_text == read_table(written.page, name)
        assert rows


def test_files_that_rows_name_are_there(lab: OpenWorkspace, written: Report) -> None:
    named = 0
    for name in written.tables:
        for row in read_table(written.page, name):
            for file in filter(None, row.get("file", "").split("; ")):
                assert (lab.root / file).is_file()
                named += 1
    assert named > 50


def test_pooling_weights_are_those_of_the_head(lab: OpenWorkspace, written: Report) -> None:
    from bertvision.pipelines.training.trained_head import load_head

    folders = [
        lab.root / "heads" / "1e" / name for name in ("learned-pooling", "learned-pooling@s1")
    ]
    heads = [load_head(folder).module for folder in folders]
    expected = sum(head.pooling.scalars.softmax(0) for head in heads) / 2
    (row,) = (r for r in read_table(written.page, "pooling_weights") if r["trained_on"] == "1e")
    found = [float(row[f"layer_{i}"]) for i in range(3)]
    assert found == pytest.approx((100 * expected).tolist(), abs=1e-4)
    assert sum(found) == pytest.approx(100)


def test_an_ensemble_is_set_beside_its_best_member(lab: OpenWorkspace, written: Report) -> None:
    row, never = read_table(written.page, "ensembles")
    assert never["name"] == "(never answering)"
    members = ("bert/1e/metrics.json", "heads/1e/adapter-64-shared/eval/1e/metrics.json")
    best = max(f1(lab, file) for file in members)
    assert float(row["best_member"]) == best
    assert float(row["gain"]) == pytest.approx(f1(lab, row["file"]) - best)
    basis = json.loads((written.page.parent / "tables" / "ensembles.json").read_text())["basis"]
    assert "one seed" in basis
    assert basis.endswith("they do not cover the choice of the seed.")


def test_the_same_workspace_gives_the_same_bytes(
    lab: OpenWorkspace, written: Report, tmp_path: Path
) -> None:
    again = write_report(lab, tmp_path / "again")
    for path in sorted(written.page.parent.rglob("*.*")):
        other = again.page.parent / path.relative_to(written.page.parent)
        assert path.read_bytes() == other.read_bytes()


def test_the_headline_claims_what_the_rows_hold(lab: OpenWorkspace) -> None:
    results = read_rows(lab)
    text = sentences(results)
    assert 3 <= len(text) <= 7
    for tag in ("0.5e", "1e"):
        own = [r for r in results.full if r["trained_on"] == r["checkpoint"] == tag]
        best = max(own, key=lambda r: r["score"])
        claim = f"{best['score']:.1f} ± {best['score_sd']:.1f} F1 (n = 2) at {tag} ({best['name']};"
        assert claim in next(sentence for sentence in text if sentence.startswith("On the snap"))
    argmax = max(r["argmax_f1"] for r in own)
    assert any("(argmax), the best head at 1e is" in s and f"{argmax:.1f} F1" in s for s in text)
    no_answer = json.loads((lab.root / "bert/1e/metrics.json").read_text())["rules"]["n-best"]
    share = 100 * no_answer["metrics"]["NoAns_total"] / no_answer["metrics"]["total"]
    assert any(f"Never answering would score {share:.1f} F1" in sentence for sentence in text)


def test_the_page_stands_alone_and_in_order(written: Report) -> None:
    text = written.page.read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"https?://|<script|@import|url\(", text)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    links = [str(a["href"]) for tag, a in page.tags if tag == "a"]
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)
    assert all((written.page.parent / link).is_file() for link in links if link[0] != "#")
    labels = [name for _, a in page.tags for name in str(a.get("aria-labelledby") or "").split()]
    assert set(labels) <= set(ids)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    assert all(a.get("scope") for tag, a in page.tags if tag == "th")
    drawings = [a for tag, a in page.tags if tag == "svg"]
    assert drawings
    assert all(a["role"] == "img" and a["aria-labelledby"] for a in drawings)
    assert written.bytes < 2_000_000


def test_hostile_text_stays_text(copy: OpenWorkspace) -> None:
    head = copy.root / "heads" / "1e" / "adapter-64-shared"
    change(head / "config.json", head=HOSTILE)
    path = head / "eval" / "1e" / "errors.json"
    errors = fields(path)
    errors["system"] = HOSTILE
    for group in errors["groups"]["answer"]:
        group["group"] = HOSTILE
    for example in errors["examples"]:
        example.update(question=HOSTILE, context=HOSTILE, answer=HOSTILE, gold=[HOSTILE])
    rewrite(path, errors)
    text = write_report(copy).page.read_text(encoding="utf-8")
    assert text.count("&lt;script&gt;") > 20
    page = Page(text)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not [a for _, a in page.tags for name in a if name.startswith("on")]
    assert text.count("</style>") == 1


@pytest.fixture
def bare(copy: OpenWorkspace) -> Report:
    """The report of BERT alone."""
    shutil.rmtree(copy.root / "heads")
    shutil.rmtree(copy.root / "ensembles")
    return write_report(copy)


def test_sections_without_data_name_the_command(bare: Report) -> None:
    found, text = bare, bare.page.read_text(encoding="utf-8")
    assert len(found.missing) == 7
    assert text.count('<p class="missing">') == len(found.missing)
    for line in re.findall(r'<p class="missing">(.*?)</p>', text):
        assert "<code>bertvision " in line
    assert found.tables == ["learning_curve", "costs", "results", "runs", "waiting"]


def test_no_results_is_an_error_that_says_what_to_run(copy: OpenWorkspace) -> None:
    for name in ("heads", "ensembles", "bert"):
        shutil.rmtree(copy.root / name)
    with pytest.raises(WorkspaceError, match="no results to report: `bertvision finetune"):
        write_report(copy)
    assert not (copy.root / "report").exists()


@pytest.mark.usefixtures("charts_left_out")
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("bert/1e/metrics.json", "{"),
        ("heads/1e/learned-pooling/eval/0.5e/metrics.json", '{"rules": {}}'),
        ("heads/1e/adapter-64-shared/eval/1e/metrics.json", "{"),
        ("heads/1e/learned-pooling/config.json", "[]"),
        ("heads/1e/adapter-64-shared/config.json", "[]"),
        ("heads/1e/adapter-64-shared/metrics.json", "[]"),
        ("heads/1e/learned-pooling/model.safetensors", "no tensors"),
        ("heads/1e/adapter-64-shared/eval/1e/errors.json", '{"groups": {}}'),
        ("heads/1e/adapter-64-shared/eval/1e/errors.json", "null"),
    ],
)
def test_a_damaged_file_is_named_and_left_out_with_what_follows_from_it(
    copy: OpenWorkspace, file: str, content: str
) -> None:
    (copy.root / file).write_text(content)
    report = write_report(copy)
    assert len(report.left_out) == 1
    assert re.search(re.escape(file) + r".*`bertvision ", report.left_out[0])
    assert report.left_out[0] in str(report)
    assert report.left_out == report.to_json()["left_out"]
    page = report.page.read_text(encoding="utf-8")
    assert "1 file is left out of all that follows" in page
    assert html.escape(file) in page
    runs = [run["file"] for run in read_table(report.page, "runs")]
    assert file not in runs
    assert len(runs) >= 13  # of 19: most follow from other files
    # an ensemble is no better than its members
    gone = "1e/adapter-64-shared/" in file and "errors" not in file
    assert any(run.startswith("ensembles/") for run in runs) is not (gone or "bert" in file)


@pytest.mark.usefixtures("charts_left_out")
def test_what_an_extraction_cost_is_unknown_where_its_record_is_damaged(
    copy: OpenWorkspace,
) -> None:
    path = copy.root / "extraction" / "1e" / "train.json"
    path.write_text("{")
    report = write_report(copy)
    (message,) = report.left_out
    assert message.startswith(f"{path} is damaged (")
    costs = {row["title"]: row for row in read_table(report.page, "costs")}
    of_1e = [row for title, row in costs.items() if title.startswith("1e → ")]
    assert of_1e
    assert {row["extraction_seconds"] for row in of_1e} == {""}
    assert all(row["training_seconds"] for row in of_1e)
    assert {row["extraction_seconds"] for title, row in costs.items() if "0.5e →" in title} != {""}


def test_a_whole_workspace_has_no_damaged_files(written: Report) -> None:
    assert written.left_out == []
    assert "damaged" not in written.page.read_text(encoding="utf-8")


def test_where_nothing_whole_is_left_the_damage_is_the_error(copy: OpenWorkspace) -> None:
    for name in ("heads", "ensembles", "bert/0.5e"):
        shutil.rmtree(copy.root / name)
    (copy.root / "bert/1e/metrics.json").write_text("{")
    with pytest.raises(WorkspaceError, match=r"bert/1e/metrics\.json is damaged.*`bertvision fine"):
        write_report(copy)
    assert not (copy.root / "report").exists()


def test_an_older_report_is_replaced(
    written: Report, bare: Report, copy: OpenWorkspace, tmp_path: Path
) -> None:
    shutil.copytree(written.page.parent, tmp_path / "out")
    second = write_report(copy, tmp_path / "out")
    held = {path.stem for path in (tmp_path / "out" / "tables").iterdir()}
    assert held == set(second.tables) == set(bare.tables)
    assert "ensembles" in set(written.tables) - held


@pytest.mark.parametrize("foreign", ["notes.txt", "tables/notes.txt", "index.html"])
def test_a_folder_with_anything_else_is_left_alone(
    lab: OpenWorkspace, tmp_path: Path, foreign: str
) -> None:
    out = tmp_path / "out"
    (out / "tables").mkdir(parents=True)
    (out / foreign).write_text("mine")
    with pytest.raises(InputError, match=f"holds {foreign}, which is no part of a report"):
        write_report(lab, out)
    assert (out / foreign).read_text() == "mine"


def test_a_file_and_the_workspace_itself_are_no_place(lab: OpenWorkspace, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file: give a folder"):
        write_report(lab, tmp_path / "file")
    with pytest.raises(InputError, match="no part of a report"):
        write_report(lab, lab.root)


def test_the_command_says_where_and_what_is_missing(
    bare: Report, copy: OpenWorkspace, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["report", "--workspace", str(copy.root), "--out", str(out)]
    shown = CliRunner().invoke(app, options)
    assert shown.exit_code == 0, shown.output
    assert str(out / "index.html") in shown.output
    said = " ".join(shown.output.split())
    assert "no data for: " in said
    assert ", Control: before fine-tuning," in said
    values: dict[str, Any] = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert values["page"] == str(out / "index.html")
    assert values["bytes"] == (out / "index.html").stat().st_size


def test_commands_that_the_page_names_are_those_of_the_program(bare: Report) -> None:
    program: Any = typer.main.get_command(app)
    named = re.findall(r"<code>(bertvision [^<]*)</code>", bare.page.read_text(encoding="utf-8"))
    lines = {html.unescape(line) for text in named for line in text.split("; ")}
    assert len(lines) > 8
    for line in lines:
        _, name, *words = shlex.split(line)
        command = program.commands[name]
        if words:
            command.make_context(name, words)


def test_figures_are_files_that_need_nothing_beside_them(written: Report) -> None:
    paths = {path.stem: path for path in (written.page.parent / "figures").iterdir()}
    assert sorted(paths) == sorted(written.figures)
    for path in paths.values():
        drawn = Drawing(path)
        assert drawn.faults() == []
        assert drawn.tips
        text = path.read_text()
        assert text.count("http") == 1
        assert not {"class", "clip-path"} & {
            name for node in drawn.root.iter(f"{SVG}g") for name in node.attrib
        }
