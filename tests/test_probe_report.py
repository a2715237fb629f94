"""Probes in the report: what the tables and figures say is what the files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, as_printed, measure
from figures import Drawing
from reports import Page, read_table

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe_measures import ControlRecord, MdlRecord
from bertvision.pipelines.readouts.probe_results import (
    ProbeFile,
    ProbeRecord,
    packed,
    probe_rows,
)
from bertvision.pipelines.report.build import find_table, read_tables, write_report
from bertvision.pipelines.report.probing import (
    _best_pooling,
    _reference,
    probe_tip,
    shown_lines,
)
from bertvision.pipelines.report.section import DIFFERENT
from bertvision.pipelines.tasks.registry import PROBING
from bertvision.pipelines.tasks.soundness import SplitSoundness
from bertvision.pipelines.text import signed
from bertvision.pipelines.uncertainty import share
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

N = 500


def put_probes(
    space: Workspace,
    tasks: tuple[str, ...],
    tags: tuple[str, ...],
    poolings: tuple[str, ...],
    layers: int,
    more: bool = False,
) -> None:
    """Files of probes whose accuracy is largest in the middle, for mean pooling, at late tags."""
    random = np.random.default_rng(0)
    for task in tasks:
        for at, tag in enumerate(tags):
            for pooling in poolings:
                file = ProbeFile(
                    dataset=task,
                    task=task,
                    tag=tag,
                    pooling=pooling,  # type: ignore[arg-type]
                    settings=ProbeOptions(),
                    made_from={"train: weights_sha256": tag},
                    classes=["0", "1"],
                    examples={"folds": 1, "train": 900, "held_out": 100, "scored": N},
                    majority=50.0,
                )
                keys = [(i,) for i in range(layers)] + ([(1, layers - 1)] if more else [])
                for key in keys:
                    distance = abs(key[0] - layers // 2) / layers
                    chance = 0.6 + 0.08 * at - 0.1 * distance + 0.05 * (pooling == "mean")
                    right = random.random(N) < chance
                    score = share(right)
                    record = ProbeRecord(
                        layers=key,
                        accuracy=score.value,
                        low=score.low,
                        high=score.high,
                        held_out=100 * chance,
                        weight_decay=[1e-4],
                        epochs=[40],
                        correct=packed(right),
                    )
                    if more:
                        record.control = ControlRecord(
                            accuracy=50, selectivity=score.value - 50, memorised=60, unseen=100
                        )
                        record.mdl = MdlRecord(
                            bits=400, uniform_bits=900, compression=2.25, ends=[1, 900]
                        )
                    file.put(record)
                file.write(space.root)


@pytest.fixture(scope="module")
def space(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace for features alone."""
    return feature_workspace(tmp_path_factory.mktemp("probed") / "probed", str(tiny_bert))


@pytest.fixture
def copy(space: Workspace, tmp_path: Path) -> Workspace:
    return Workspace.find(shutil.copytree(space.root, tmp_path / "probed"))


@pytest.mark.usefixtures("charts_left_out")
def test_a_workspace_of_probes_alone_has_a_report(copy: Workspace) -> None:
    tags, poolings = ("untrained", "0e", "1e"), ("cls", "mean")
    put_probes(copy, ("bigram_shift", "cr"), tags, poolings, 3, more=True)
    report = write_report(copy)
    assert report.tables == [
        *("probes", "probe_layers", "probe_means", "probes_joined", "probes_control")
    ]
    assert report.figures == [
        "probe-map-0e",
        "probe-map-1e",
        "probe-snapshots",
        "probe-gains",
        "probe-poolings",
    ]
    files = {(f.dataset, f.tag, f.pooling): f for f in ProbeFile.read_all(copy)}
    table = read_table(report.page, "probes")
    assert [(r["dataset"], r["tag"]) for r in table] == [
        (d, t) for d in ("bigram_shift", "cr") for t in tags
    ]
    for row in table:
        for pooling in poolings:
            record = files[row["dataset"], row["tag"], pooling].find((1,))  # type: ignore[index]
            twin = files[row["dataset"], "untrained", pooling].find((1,))  # type: ignore[index]
            assert record is not None
            assert twin is not None
            assert row[f"{pooling}_layers"] == "1"  # the middle one, by its held-out score
            assert float(row[f"{pooling}_accuracy"]) == record.accuracy
            if row["tag"] != "untrained":
                gain = record.accuracy - twin.accuracy
                assert float(row[f"{pooling}_difference"]) == pytest.approx(gain)
    text = report.page.read_text(encoding="utf-8")
    mean = [files[d, "1e", "mean"].find((1,)).accuracy for d in ("bigram_shift", "cr")]  # type: ignore[index,union-attr]
    assert f"Probes of the best layer of 1e, mean-pooled, score {sum(mean) / 2:.1f} %" in text
    assert Page(text).tables["probes"][2][0] == "untrained"  # after the header and the data set


@pytest.mark.usefixtures("charts_left_out")
def test_probes_are_hidden_where_there_are_none(workspace: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "lab"
    ignored = shutil.ignore_patterns("heads", "activations", "report", "probes")
    space = Workspace.find(shutil.copytree(workspace.root, root, ignore=ignored))
    assert "What each layer knows" not in write_report(space).page.read_text(encoding="utf-8")
    put_probes(space, ("cr",), ("0e",), ("mean",), 3)
    report = write_report(space)
    assert "probes" in report.tables
    assert [f for f in report.figures if f.startswith("probe")] == ["probe-map-0e"]
    assert report.results > 0


@pytest.mark.usefixtures("charts_left_out")
def test_of_many_snapshots_the_twin_and_the_last_are_shown(copy: Workspace) -> None:
    tags = ("untrained", *(f"{i}e" for i in range(9)))
    put_probes(copy, ("bigram_shift",), tags, ("mean",), 3)
    put_probes(copy, ("cr",), ("untrained", "0e"), ("mean",), 3)  # of a line that is left out
    report = write_report(copy)
    assert {"probe-snapshots", "probe-gains"} <= set(report.figures)
    assert shown_lines(tags) == [*(f"{i}e" for i in range(2, 9)), "untrained"]
    put_probes(copy, ("mr",), ("0e",), ("mean",), 3)  # no line that is shown, and no twin
    assert {"probe-snapshots", "probe-gains"} <= set(write_report(copy).figures)


def test_the_best_pooling_is_of_what_all_poolings_have() -> None:
    def row(pooling: str, dataset: str, tag: str, held_out: float) -> dict[str, object]:
        line = {"pooling": pooling, "dataset": dataset, "tag": tag, "best": True, "doubts": None}
        return {**line, "held_out": held_out}

    shared = [row("cls", "cr", "0e", 70), row("mean", "cr", "0e", 80)]
    hard, twin = row("mean", "mr", "0e", 20), row("cls", "cr", "untrained", 100)
    assert _best_pooling([*shared, hard, twin]) == "mean"
    assert _best_pooling([row("cls", "cr", "0e", 70), hard, row("mean", "sst", "0e", 40)]) == "mean"


def test_layers_and_means_by_category_are_those_of_the_files(copy: Workspace) -> None:
    tasks = ("sentence_length", "word_content", "bigram_shift", "past_present")
    put_probes(copy, tasks, ("untrained", "1e"), ("cls", "mean"), 3)
    shutil.rmtree(copy.root / "probes" / "word_content")
    put_probes(copy, ("word_content",), ("untrained", "1e"), ("mean",), 3)
    rows = {
        (r["dataset"], r["tag"], r["pooling"], r["layers"]): r
        for r in probe_rows(ProbeFile.read_all(copy))
    }
    tables = read_tables(copy)
    grid = {(r["group"], r["name"]): r for r in tables["probe_layers"].rows}
    own = rows["bigram_shift", "1e", "mean", "2"]
    line = grid["1e, mean-pooled", "bigram_shift"]
    assert line["layer_2"] == own["accuracy"]
    assert line["layer_2_difference"] == own["difference"]
    shown = f"{own['accuracy']:.1f} ({signed(own['difference'])})"
    assert shown in tables["probe_layers"].text()
    assert line["best"] == "1"
    surface = [rows[task, "1e", "mean", "0"]["accuracy"] for task in tasks[:2]]
    mean = grid["1e, mean-pooled", "mean of surface (2)"]
    assert mean["layer_0"] == pytest.approx(sum(surface) / 2)
    assert ("1e, cls-pooled", "mean of surface (2)") not in grid  # of one data set alone
    assert ("1e, cls-pooled", "mean of all (3)") in grid

    means = {(r["group"], r["name"]): r for r in tables["probe_means"].rows}
    assert [name for group, name in means if group == "1e"] == [
        *("surface", "syntactic", "semantic", "all")
    ]
    line = means["1e", "all"]
    assert line["datasets"] == ["sentence_length", "bigram_shift", "past_present"]
    shared = [(task, "1e", "mean") for task in line["datasets"]]
    best = [rows[*place, "1"] for place in shared]
    assert line["mean_best"] == pytest.approx(sum(r["accuracy"] for r in best) / 3)
    assert line["mean_best_difference"] == pytest.approx(sum(r["difference"] for r in best) / 3)
    every = [rows[*place, str(i)]["accuracy"] for place in shared for i in range(3)]
    assert line["mean_layers"] == pytest.approx(sum(every) / 9)
    assert means["untrained", "all"]["mean_layers_difference"] is None
    notes = tables["probe_means"].notes
    assert "Without word_content: not probed at every snapshot with every pooling." in notes


def test_means_are_of_the_layers_that_all_snapshots_have(copy: Workspace) -> None:
    """Means over other layers would depend on what was probed."""
    put_probes(copy, ("cr", "mr"), ("0e",), ("mean",), 5)
    put_probes(copy, ("cr", "mr"), ("1e",), ("mean",), 2)
    table = read_tables(copy)["probe_means"]
    rows = {(r["dataset"], r["tag"], r["layers"]): r for r in probe_rows(ProbeFile.read_all(copy))}
    for line in table.rows:
        assert line["layers"] == [0, 1]
        places = [(task, line["tag"], layer) for task in ("cr", "mr") for layer in ("0", "1")]
        mean = sum(rows[place]["accuracy"] for place in places) / 4
        assert line["mean_layers"] == pytest.approx(mean)
        best = sum(rows[task, line["tag"], "1"]["accuracy"] for task in ("cr", "mr")) / 2
        assert line["mean_best"] == pytest.approx(best)  # at 0e, layer 2 is better held out
    assert {line["tag"] for line in table.rows} == {"0e", "1e"}
    assert (
        "Shown: the layers 0, 1 alone; not every snapshot and data set was probed on 2, 3, 4 with "
        "every pooling." in table.notes
    )
    assert "layers" in table.keys()  # noqa: SIM118


def test_without_a_layer_that_all_have_there_are_no_means(copy: Workspace) -> None:
    put_probes(copy, ("cr",), ("0e", "1e"), ("mean",), 2)
    for file in ProbeFile.read_all(copy):
        kept = file.probes[int(SnapshotTag(file.tag).fraction)]
        file.model_copy(update={"probes": [kept]}).write(copy.root)
    tables = read_tables(copy)
    assert "probe_means" not in tables
    assert len(tables["probe_layers"].rows) == 2


def test_doubtful_data_are_in_no_mean(copy: Workspace) -> None:
    put_probes(copy, ("odd_man_out", "past_present", "subj_number"), ("1e",), ("mean",), 3)
    bad = SplitSoundness(rows=10, contradicting=8, ceiling=60.0, shared={})
    for file in ProbeFile.read_all(copy):
        if file.dataset == "odd_man_out":
            file.model_copy(update={"soundness": {"train": bad}}).write(copy.root)
    tables = read_tables(copy)
    names = [row["name"] for row in tables["probe_layers"].rows]
    assert names == ["past_present", "subj_number", "odd_man_out", "mean of semantic (2)"]
    (mean,) = tables["probe_means"].rows
    assert mean["datasets"] == ["past_present", "subj_number"]


def test_probes_of_several_workspaces_stand_under_their_data_set(
    copy: Workspace, space: Workspace, tmp_path: Path
) -> None:
    other = Workspace.find(shutil.copytree(space.root, tmp_path / "other"))
    put_probes(copy, ("cr", "mr"), ("0e",), ("mean",), 3)
    put_probes(other, ("cr", "mr"), ("3e",), ("mean",), 3)
    for file in ProbeFile.read_all(other):
        if file.dataset == "mr":
            made_from = file.made_from | {"test: data_sha256": "0" * 64}
            file.model_copy(update={"made_from": made_from}).write(other.root)
    table = find_table(copy, "probes", [other])
    assert [(r["dataset"], r["workspace"], r["tag"]) for r in table.rows] == [
        *(("mr", "probed", "0e"), ("mr", "other", "3e")),
        *(("cr", "probed", "0e"), ("cr", "other", "3e")),
    ]
    mr, cr = ([row["data"] for row in table.rows if row["dataset"] == d] for d in ("mr", "cr"))
    assert (len(set(mr)), len(set(cr))) == (2, 1)
    assert DIFFERENT in table.notes


@pytest.mark.parametrize("name", ["probes", "probe_layers", "probe_means"])
def test_workspaces_of_the_same_data_are_not_said_to_differ(
    name: str, copy: Workspace, tmp_path: Path
) -> None:
    put_probes(copy, ("cr", "mr", "past_present"), ("0e",), ("mean",), 3)
    twin = Workspace.find(shutil.copytree(copy.root, tmp_path / "twin"))
    assert DIFFERENT not in find_table(copy, name, [twin]).notes


@pytest.mark.usefixtures("charts_left_out")
def test_a_damaged_file_of_probes_is_left_out(copy: Workspace) -> None:
    put_probes(copy, ("cr", "mr"), ("0e",), ("mean",), 3)
    (path,) = (copy.root / "probes" / "cr").glob("*.json")
    path.write_text("{")
    report = write_report(copy)
    assert len(report.left_out) == 1
    assert str(path) in report.left_out[0]
    assert {row["dataset"] for row in read_table(report.page, "probes")} == {"mr"}


@pytest.mark.usefixtures("charts_left_out")
def test_probes_of_other_weights_are_left_out_and_named(
    copy: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    put_probes(copy, ("cr", "mr"), ("0e", "1e"), ("mean",), 3)
    assert write_report(copy).left_out == []  # there is no snapshot to compare them with
    ensure_snapshot(copy, "0e")
    report = write_report(copy)
    assert {row["tag"] for row in read_table(report.page, "probes")} == {"1e"}
    assert len(report.left_out) == 2
    (file,) = (copy.root / "probes" / "cr").glob("0e-*.json")
    assert report.left_out[0] == (
        f"{file} is of other weights than {copy.snapshot_dir('0e')} has: delete that file, and "
        "`bertvision probe cr --checkpoint 0e --pool mean` measures anew"
    )
    assert "2 files are left out" in report.page.read_text(encoding="utf-8")
    assert {row["tag"] for row in read_tables(copy)["probes"].rows} == {"1e"}
    assert any(report.left_out[0] in line for line in caplog.messages)


def test_a_map_says_what_its_differences_are_from() -> None:
    some = [{"difference": 1.0}, {"difference": None}]
    assert _reference(some[:1]) == "the untrained twin"
    assert _reference(some[1:]) == "the most frequent class"
    assert _reference(some).endswith("(where none fits, the most frequent class)")


def test_a_workspace_without_results_has_none(copy: Workspace) -> None:
    with pytest.raises(WorkspaceError, match="no results"):
        write_report(copy)


def test_a_mark_says_its_score_and_what_was_gained() -> None:
    row = {"dataset": "cr", "tag": "1e", "pooling": "mean", "layers": "3", "accuracy": 81.25}
    row |= {"low": 80.0, "high": 82.5, "difference": None}
    assert probe_tip(row) == "cr, 1e, mean, layer 3: 81.2 [80.0, 82.5]"
    row |= {"difference": -0.5, "difference_low": -2.0, "difference_high": 1.0}
    assert probe_tip(row).endswith(", −0.5 [−2.0, +1.0] against untrained")


@pytest.mark.parametrize(
    ("tasks", "poolings", "layers"),
    [(PROBING, ("cls", "sep", "mean", "max"), 7), (PROBING[-3:], ("mean",), 25)],
    ids=["many tasks", "many layers"],
)
def test_it_fits_every_page(
    copy: Workspace, tmp_path: Path, tasks: tuple[str, ...], poolings: tuple[str, ...], layers: int
) -> None:
    put_probes(copy, tasks, ("untrained", "0.3e"), poolings, layers)
    report = write_report(copy)
    gains = [f for f in report.figures if f.startswith("probe-gains")]
    assert len(gains) == (2 if len(tasks) > 6 else 1)
    for path in (report.page.parent / "figures").iterdir():
        assert Drawing(path).faults() == []
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH")
    page = report.page.read_text(encoding="utf-8")
    *shown, printed = measure(tmp_path, (page, 360), (page, 1000), (as_printed(page), 688))
    for width, found in zip((360, 1000), shown, strict=True):
        assert found["width"] == found["page"] == width
        assert found["wide"] == found["out"] == found["overlaps"] == []
        assert found["dead"] == []
    assert printed["wide"] == printed["out"] == printed["overlaps"] == []
    assert json.loads((report.page.parent / "tables/probes.json").read_text())["rows"]
