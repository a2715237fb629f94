"""The tables of papers: scores with their intervals, printed by name, workspaces together."""

from __future__ import annotations

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from reports import HEADS

import bertvision
from bertvision.errors import InputError, UnknownNameError
from bertvision.jobs.command import show
from bertvision.pipelines.report import build
from bertvision.pipelines.report.build import find_table, read_tables, write_report
from bertvision.pipelines.report.intervals import _correlation, add_intervals
from bertvision.pipelines.report.listing import control
from bertvision.pipelines.report.scores import data_fractions, learning_curve
from bertvision.pipelines.report.section import DIFFERENT, Reading, Table, basis, columns_of_all
from bertvision.pipelines.results.answers import per_item
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.results.systems import read_predictions
from bertvision.pipelines.uncertainty import paired_bootstrap
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.workspace import Workspace as OpenWorkspace

pytestmark = pytest.mark.usefixtures("charts_left_out")

HEAD = HEADS[1]


@pytest.fixture
def other(lab_copy: OpenWorkspace) -> OpenWorkspace:
    """The same laboratory at another place."""
    return lab_copy


# --- intervals ----------------------------------------------------------------------------------


def test_an_interval_is_that_of_the_bootstrap_over_contexts_and_seeds(lab: OpenWorkspace) -> None:
    rows = read_rows(lab).heads
    add_intervals(lab, rows, [])
    items = lab.items("dev")
    found = {(r.name, r.seed, r.fraction, r.trained_on, r.checkpoint): r for r in read_results(lab)}
    (row,) = (
        r for r in rows if (r["name"], r["fraction"], r["trained_on"], r["checkpoint"]) == PLACE
    )
    for metric in ("f1", "exact"):
        results = [found[HEAD, seed, 1.0, "0.5e", "1e"] for seed in (0, 1)]
        scores = [per_item(r, read_predictions(r, items), items, metric) for r in results]
        expected = paired_bootstrap(
            scores, np.zeros(len(items)), clusters=[item.context for item in items]
        )
        assert expected.first == pytest.approx(row[metric])
        assert row[f"{metric}_low"] == pytest.approx(expected.low, abs=2)
        assert row[f"{metric}_high"] == pytest.approx(expected.high, abs=2)
    assert (row["score_low"], row["score_high"]) == (row["f1_low"], row["f1_high"])


PLACE = (HEAD, 1.0, "0.5e", "1e")


def test_intervals_are_the_same_twice_and_hold_the_score(lab: OpenWorkspace) -> None:
    once, twice = read_rows(lab), read_rows(lab)
    for results in (once, twice):
        add_intervals(lab, [*results.bert, *results.heads, *results.ensembles], [])
    assert once == twice
    rows = (*once.bert, *once.heads, *once.ensembles)
    assert all(row["score_low"] <= row["score"] <= row["score_high"] for row in rows)
    # who never answers scores the same on every context
    assert max(row["score_high"] - row["score_low"] for row in rows) > 5


def test_bert_has_its_interval_in_every_table_whose_caption_promises_them(
    lab: OpenWorkspace,
) -> None:
    results = read_rows(lab)
    add_intervals(lab, [*results.bert, *results.heads], [])
    of = {r["checkpoint"]: (r["score_low"], r["score"], r["score_high"]) for r in results.bert}
    controls = [r | {"trained_on": "0e"} for r in results.heads if r["trained_on"] == "0.5e"]
    sections = (
        learning_curve(Reading(lab, results, [])),
        data_fractions(Reading(lab, results, [])),
        control(Reading(lab, results._replace(heads=controls), [])),
    )
    for section in sections:
        (table,) = section.tables
        assert "95 % intervals" in table.basis
        assert {"bert_low", "bert_high"} <= set(table.keys())
        rows = [row for row in table.rows if row.get("bert") is not None]
        assert {(row["bert_low"], row["bert"], row["bert_high"]) for row in rows} == set(
            of.values()
        )
    (in_brackets,) = (c for c in sections[1].tables[0].columns if c.key == "bert")
    assert re.fullmatch(
        r"[\d.]+ \([\d.]+–[\d.]+\)", in_brackets.text(sections[1].tables[0].rows[0])
    )


def test_a_correlation_of_sums_is_the_correlation() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=50)
    y = x + random.normal(size=50)
    terms = np.array([[x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()]])
    assert _correlation(terms, np.array([50.0]))[0] == pytest.approx(100 * np.corrcoef(x, y)[0, 1])
    assert _correlation(np.zeros((1, 5)), np.array([50.0]))[0] == 0  # of a constant


def test_without_answers_there_is_no_interval_and_damaged_ones_are_named(
    other: OpenWorkspace,
) -> None:
    folder = other.bert_dir("1e")
    (other.bert_dir("0.5e") / "predictions.json").unlink()
    (folder / "predictions.json").write_text("{}")
    damaged: list[str] = []
    rows = read_rows(other).bert
    add_intervals(other, rows, damaged)
    assert [row.get("score_low") for row in rows] == [None, None]
    assert len(damaged) == 1
    assert str(folder) in damaged[0]
    report = write_report(other)
    assert report.left_out == damaged
    assert "score" in find_table(other, "learning_curve").json()


def test_captions_say_how_many_items_and_seeds_and_what_intervals_cover(
    lab: OpenWorkspace, tmp_path: Path
) -> None:
    tables = read_tables(lab)
    seeds = dict.fromkeys(("parameters", "cross_checkpoint", "data_fractions"), "2 seeds")
    seeds["results"] = "1 to 2 seeds"  # the ensemble has one
    for name, count in seeds.items():
        assert tables[name].basis.startswith(f"24 questions, {count}, mean ± standard deviation")
        assert "95 % intervals over questions" in tables[name].basis
        assert "and over seeds where there are several" in tables[name].basis
    results = read_rows(lab)
    told = "too narrow for few seeds: of {} drawn again {} % of their spread is left"
    for name in ("parameters", "data_fractions"):
        assert told.format(2, 71) in tables[name].basis
    assert told.format(3, 82) in basis(
        results, [r | {"seeds": 3, "score_low": 0.0} for r in results.heads]
    )
    one = [row | {"seeds": 1, "score_low": 0.0} for row in results.heads]
    assert basis(results, one, shown=True).startswith("24 questions, one seed; in brackets 95 %")
    assert basis(results, one).endswith("they do not cover the choice of the seed.")
    assert "1 to 2 seeds" in basis(results, [*one, *results.heads])
    page = write_report(lab, tmp_path / "report").page.read_text(encoding="utf-8")
    assert page.count("24 questions, 2 seeds") >= 5


# --- tables ---------------------------------------------------------------------------------------


def test_heads_stand_beside_bert_and_never_answering_with_em_and_f1(lab: OpenWorkspace) -> None:
    table = read_tables(lab)["parameters"]
    names = [row["name"] for row in table.rows]
    assert names[-2:] == ["BERT", "(never answering)"]
    assert set(names[:-2]) == set(HEADS)
    results = read_rows(lab)
    for row in table.rows[:-2]:
        for tag in ("0.5e", "1e"):
            (own,) = (
                r
                for r in results.full
                if (r["name"], r["trained_on"], r["checkpoint"]) == (row["name"], tag, tag)
            )
            assert (row[f"{tag}_exact"], row[tag]) == (own["exact"], own["f1"])
    bert = table.rows[-2]
    assert bert["percent"] == 100
    assert [bert[tag] for tag in ("0.5e", "1e")] == [r["f1"] for r in results.bert]


def test_pairs_of_snapshots_are_columns(lab: OpenWorkspace) -> None:
    table = read_tables(lab)["cross_checkpoint"]
    keys = ["0.5e:0.5e", "0.5e:1e", "1e:0.5e", "1e:1e"]
    assert [column.key for column in table.columns] == ["name", *keys]
    results = read_rows(lab)
    bert = {r["checkpoint"]: r["score"] for r in results.bert}
    rows = {row["name"]: row for row in table.rows}
    assert set(rows) == {*HEADS, "BERT itself", "(never answering)"}
    for key in keys:
        on, at = key.split(":")
        assert rows["BERT itself"][key] == bert[at]
        for r in results.heads:
            if (r["fraction"], r["trained_on"], r["checkpoint"]) == (1, on, at):
                assert rows[r["name"]][key] == r["score"]


def test_a_table_is_printed_with_its_caption_and_written_as_in_the_report(
    lab: OpenWorkspace, tmp_path: Path
) -> None:
    found = bertvision.table("data_fractions", workspace=lab.root)
    show(found, True, tmp_path / "t.csv")
    report = write_report(lab, tmp_path / "report")
    written = report.page.parent / "tables" / "data_fractions.csv"
    assert (tmp_path / "t.csv").read_text() == written.read_text()
    assert str(found).startswith(read_tables(lab)["data_fractions"].title)
    assert "± " in str(found)
    names = [row.table for row in bertvision.table(workspace=lab.root)]
    assert names == report.tables


def test_another_name_is_refused_with_those_there_are(lab: OpenWorkspace) -> None:
    with pytest.raises(UnknownNameError, match=r"'parameter': did you mean parameters\?"):
        bertvision.table("parameter", workspace=lab.root)


def test_the_names_are_listed_without_a_bootstrap(
    lab: OpenWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of large data take minutes to be read and drawn."""
    drawn = []
    monkeypatch.setattr(build, "add_intervals", lambda *given: drawn.append(given))
    assert len(bertvision.table(workspace=lab.root)) > 5
    assert not drawn
    bertvision.table("results", workspace=lab.root)
    assert drawn


# --- several workspaces -----------------------------------------------------------------------


def test_workspaces_stand_beside_each_other(lab: OpenWorkspace, other: OpenWorkspace) -> None:
    found = bertvision.table("results", beside=[other.root], workspace=lab.root)
    alone = bertvision.table("results", workspace=lab.root)
    assert len(found) == 2 * len(alone)
    for group in dict.fromkeys(row.pair for row in found):
        own = [row.workspace for row in found if row.pair == group]
        assert own == ["lab"] * (len(own) // 2) + ["other"] * (len(own) // 2)
    assert len({row.data for row in found}) == 1
    assert DIFFERENT not in str(found)


def test_different_data_are_told_apart(
    lab: OpenWorkspace, other: OpenWorkspace, tmp_path: Path
) -> None:
    path = other.root / "bertvision.yaml"
    digest = lab.config.data["dev"].sha256
    path.write_text(path.read_text().replace(digest, "f" * 64))
    table = find_table(lab, "parameters", [Workspace.find(other.root)])
    assert {(row["workspace"], row["data"]) for row in table.rows} == {
        ("lab", f"squad_v2 {digest[:12]}"),
        ("other", f"squad_v2 {'f' * 12}"),
    }
    assert DIFFERENT in table.text()
    assert "squad_v2 ffffffffffff" in table.text()
    with (tmp_path / "t.csv").open("w") as file:
        file.write(table.csv())
    with (tmp_path / "t.csv").open() as file:
        assert len({row["data"] for row in csv.DictReader(file)}) == 2


def test_a_score_of_two_metrics_is_called_by_both() -> None:
    first = Table("t", "", [Column("name", "head", "text"), Column("1e", "F1 at 1e")], [], "", "")
    other = replace(first, columns=[Column("1e", "Pearson at 1e"), Column("3e", "Pearson at 3e")])
    assert [column.label for column in columns_of_all([first, other])] == [
        *("head", "F1 at 1e / Pearson at 1e", "Pearson at 3e")
    ]


def test_other_workspaces_need_a_name_and_are_named_once(
    lab: OpenWorkspace, other: OpenWorkspace
) -> None:
    with pytest.raises(InputError, match=f"--with {other.root}: name the table .* lists the names"):
        bertvision.table(beside=[other.root], workspace=lab.root)
    for twice in ([lab.root], [other.root, other.root / ".." / other.root.name]):
        with pytest.raises(InputError, match=f"--with {twice[0]}: .* named twice"):
            bertvision.table("results", beside=twice, workspace=lab.root)


def test_workspaces_of_one_name_have_their_paths(
    lab: OpenWorkspace, other: OpenWorkspace, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    twin = Workspace.find(shutil.move(other.root, tmp_path / "more" / "lab"))
    found = find_table(lab, "runs", [twin])
    assert {row["workspace"] for row in found.rows} == {str(lab.root), str(twin.root)}


def test_where_nothing_is_scored_no_data_are_asked_for(
    tiny_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A workspace of hidden states alone has no data of its own, and its report warned of that."""
    from bertvision.pipelines.workspace.creation import feature_workspace

    add_intervals(feature_workspace(tmp_path / "w", str(tiny_bert)), [], [])
    assert not caplog.records
