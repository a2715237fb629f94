"""Probing a workspace: from sentences to a table, stopped at any time, refused where it must be."""

from __future__ import annotations

import csv
import json
import random
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byhand import fields, rewrite
from probing import problem
from processes import run_code
from typer.testing import CliRunner

import bertvision
from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.extraction.layers import (
    needed_layers,
    parse_concat,
    parse_inputs,
    wanted_layers,
)
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.readouts.directions import SavedProbe
from bertvision.pipelines.readouts.inputs import read_inputs
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe_results import (
    ProbeFile,
    Probing,
    probe,
    probe_rows,
)
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.dataset import add_dataset
from bertvision.pipelines.workspace.workspace import Workspace

OPTIONS = ProbeOptions(max_epochs=24, lr=0.02, weight_decays=(1e-4, 1e-2))


def write_probing(path: Path, seed: int = 0, examples: int = 160) -> Path:
    """A file like SentEval's: is there a king in the sentence or a queen?"""
    words = [
        "the",
        "a",
        "of",
        "in",
        "and",
        "was",
        "who",
        "works",
        "river",
        "city",
        "anna",
        "london",
    ]
    draw, lines = random.Random(seed), []
    for i in range(examples):
        label = draw.choice("IO")
        sentence = draw.choices(words, k=draw.randint(3, 8))
        sentence.insert(draw.randint(0, len(sentence)), "king" if label == "I" else "queen")
        lines.append(f"{('tr', 'tr', 'va', 'te')[i % 4]}\t{label}\t{' '.join(sentence)} .")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def extracted(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace without a task, with the features of a probing task; nothing is probed."""
    folder = tmp_path_factory.mktemp("probing")
    space = feature_workspace(folder / "workspace", str(tiny_bert))
    source = write_probing(folder / "bigram_shift.txt")
    name = add_dataset(space.root, "bigram_shift", str(source)).name
    from bertvision.pipelines.extraction.features import ensure_features

    splits, poolings = ("train", "dev", "test"), ("cls", "mean")
    ensure_features(space, ["untrained", "0e"], name, splits, poolings, precision="32")
    return space


@pytest.fixture
def space(extracted: Workspace, tmp_path: Path) -> Workspace:
    """A copy that may be changed."""
    shutil.copytree(extracted.root, tmp_path / "workspace")
    return Workspace.find(tmp_path / "workspace")


def run(space: Workspace, **options: Any) -> list[ProbeFile]:
    given: dict[str, Any] = {"options": OPTIONS, "precision": "32", **options}
    return probe(space, "bigram_shift", given.pop("tags", ["0e"]), **given)


def test_the_probes_of_a_snapshot(space: Workspace) -> None:
    found = run(space, untrained=True, concat=["first+last"])
    assert [(f.tag, f.pooling) for f in found] == [
        ("untrained", "cls"),
        ("untrained", "mean"),
        ("0e", "cls"),
        ("0e", "mean"),
    ]
    for file in found:
        assert [p.layers for p in file.probes] == [(0,), (1,), (2,), (1, 2)]
        assert file.examples == {"folds": 1, "train": 80, "held_out": 40, "scored": 40}
        assert ProbeFile.read(file.place(space.root)) == file
        for p in file.probes:
            assert p.low <= p.accuracy <= p.high
            assert 100 * p.bits(40).mean() == pytest.approx(p.accuracy)
    cls, mean = found[2:]
    assert mean.probes[0].accuracy > mean.majority + 20  # a word's own vector is in the mean
    # [CLS] of the embedding output knows nothing of the sentence
    assert cls.probes[0].accuracy == pytest.approx(cls.majority)
    assert mean.best_layer() == max(
        ((0,), (1,), (2,)),
        key=lambda k: (mean.find(k).held_out, -k[0]),  # type: ignore[union-attr]
    )


def test_weights_are_kept_of_probes_that_were_trained_before(space: Workspace) -> None:
    run(space)
    job = partial(bertvision.probe, "bigram_shift", pool="mean", options=OPTIONS, workspace=space)
    with pytest.raises(InputError, match="save=True"):
        job().direction(1)
    probes = job(save=True, inlp=1, precision="32")
    (file,) = probes._files
    (record,) = (p for p in file.probes if p.layers == (1,))
    assert record.inlp is not None
    assert len(record.inlp.accuracy) == 2
    for projections in (3, 2):
        (again,) = (p for p in job(inlp=projections)._files[0].probes if p.layers == (1,))
        assert again.inlp is not None
        assert len(again.inlp.accuracy) == 1 + projections
        assert again.inlp.accuracy[:2] == record.inlp.accuracy
    pooled = PooledSplit(space, "0e", "bigram_shift", "test", "mean")
    x = read_inputs(pooled, [(1,)])[:, 0]
    saved = SavedProbe.load(file.weights_path(space.root, (1,)), record.weights or "")
    given = (x @ saved.parameters["weight"].T + saved.parameters["bias"]).argmax(axis=1)
    gold = [item.label for item in space.dataset("bigram_shift").items("test")]
    assert (given == gold).tolist() == record.bits(len(gold)).tolist()
    weight = saved.parameters["weight"]
    assert probes.direction(1).tolist() == (weight[1] - weight[0]).tolist()
    assert (probes.direction(1, "I") == -probes.direction(1, "O")).all()
    before = file.weights_path(space.root, (1,)).stat().st_mtime_ns
    assert job(save=True, inlp=1)._files[0] == file
    assert file.weights_path(space.root, (1,)).stat().st_mtime_ns == before
    file.weights_path(space.root, (1,)).write_bytes(b"damaged")
    assert job(save=True).direction(1).tolist() == (weight[1] - weight[0]).tolist()
    assert saved.source == {
        "dataset": "bigram_shift",
        "tag": "0e",
        "pooling": "mean",
        "layers": "1",
    }
    assert (probes.direction(1, tag=0) == probes.direction(1, tag="0e")).all()
    assert (probes.direction(1, 0) == probes.direction(1, "I")).all()
    with pytest.raises(InputError, match="no probe is of layer 7.*pooling='mean': layer 0, 1, 2"):
        probes.direction(7)
    with pytest.raises(InputError, match="no probe is of layer 1, tag='9e'"):
        probes.direction(1, tag=9)
    three = np.array([[1, 0], [np.nan, np.nan], [0, 1]], np.float32)
    sparse = SavedProbe({}, three, ("a", "b", "c"))
    assert sparse.direction("a", "means").tolist() == [1, -1]
    with pytest.raises(InputError, match="class b: it or all others have no training examples"):
        sparse.direction("b", "means")
    several = bertvision.probe("bigram_shift", options=OPTIONS, workspace=space, precision="32")
    with pytest.raises(InputError, match="pooling='cls'.*pooling='mean'"):
        several.direction(1)


def test_the_differences_are_of_the_same_examples(space: Workspace) -> None:
    found = run(space, untrained=True)
    rows = probe_rows(found)
    twins = {(f.pooling, p.layers): p for f in found[:2] for p in f.probes}
    for row, probe_ in zip(rows[6:], [p for f in found[2:] for p in f.probes], strict=True):
        twin = twins[row["pooling"], probe_.layers]
        assert row["difference"] == pytest.approx(probe_.accuracy - twin.accuracy)
        assert row["difference_low"] <= row["difference"] <= row["difference_high"]
    assert all(row["difference"] is None for row in rows[:6])
    # drawn in pairs, the same answers differ by nothing in every draw
    same = found[0].model_copy(update={"tag": "0e"})
    for row in probe_rows([found[0], same])[3:]:
        assert (row["difference_low"], row["difference"], row["difference_high"]) == (0, 0, 0)
    assert [sum(row["best"] for row in rows[i : i + 3]) for i in range(0, 12, 3)] == [1] * 4


def test_probes_read_the_layer_and_the_rows_they_say(space: Workspace) -> None:
    """The record's scores are those of a probe on features read by hand."""
    import torch

    from bertvision.pipelines.readouts.probe import Inputs
    from bertvision.pipelines.readouts.probe_data import read_data
    from bertvision.pipelines.readouts.probe_measures import measure

    (file,) = run(space, poolings=("mean",), concat=["0+2"])
    data = read_data(space.dataset("bigram_shift"), OPTIONS)
    splits = [
        PooledSplit(space, "0e", "bigram_shift", s, "mean").features()
        for s in ("train", "dev", "test")
    ]
    every = np.concatenate(splits)
    for key in ((2,), (0, 2)):
        x = np.concatenate([every[:, i] for i in key], axis=1)[:, None]
        alone = measure(problem(Inputs(torch.from_numpy(x)), data.labels, OPTIONS), data)
        record = file.find(key)
        assert record is not None
        assert (record.bits(40) == alone.correct[0]).all()


def test_a_second_call_trains_nothing_and_another_layer_alone(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(space, layers=[2])
    loaded: list[Any] = []
    load = Probing.load
    monkeypatch.setattr(
        Probing, "load", lambda self, group: loaded.append(list(group)) or load(self, group)
    )
    before = run(space, layers=[2])[0].place(space.root).read_bytes()
    assert not loaded
    found = run(space)
    assert loaded == [[("cls", (0,)), ("cls", (1,)), ("mean", (0,)), ("mean", (1,))]]
    whole = found[0].place(space.root).read_bytes()
    shutil.rmtree(space.root / "probes")
    assert run(space)[0].place(space.root).read_bytes() == whole != before


def test_control_and_code_are_added_to_what_is_there(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = run(space, poolings=("mean",))
    trained = []
    train = Probing._train
    monkeypatch.setattr(Probing, "_train", lambda self, *a: trained.append(a) or train(self, *a))
    (more,) = run(space, poolings=("mean",), control=True, mdl=True)
    assert not trained
    for before, after in zip(plain.probes, more.probes, strict=True):
        assert before.correct == after.correct
        assert after.control is not None
        assert after.mdl is not None
        assert after.control.selectivity == pytest.approx(after.accuracy - after.control.accuracy)
        assert after.control.unseen > 90
        assert after.mdl.uniform_bits == 80
        assert after.mdl.compression == pytest.approx(80 / after.mdl.bits)


KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from bertvision.pipelines.readouts.probe_results import ProbeFile
from test_probe_run import OPTIONS, run
from bertvision.pipelines.workspace.workspace import Workspace

write, calls = ProbeFile.write, []
def killing(probes, root):
    write(probes, root)
    calls.append(1)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
ProbeFile.write = killing
run(Workspace.find(Path(sys.argv[1])), control=True, memory=1)
"""


def test_a_killed_run_is_finished_with_the_same_files(
    extracted: Workspace, space: Workspace, tmp_path: Path
) -> None:
    whole = Workspace.find(shutil.copytree(extracted.root, tmp_path / "whole"))
    expected = [f.place(whole.root).read_bytes() for f in run(whole, control=True)]
    code = run_code(KILLED, space.root, 5)
    assert code.returncode == -signal.SIGKILL, code.stderr
    (begun,) = ProbeFile.read_all(space)
    assert len(begun.probes) == 3  # a probe and its control, twice
    found = run(space, control=True)
    assert [f.place(space.root).read_bytes() for f in found] == expected


def test_other_settings_have_files_of_their_own(space: Workspace) -> None:
    run(space, poolings=("mean",))
    mlp = replace(OPTIONS, hidden=50)
    run(space, poolings=("mean",), options=mlp)
    found = ProbeFile.read_all(space)
    assert sorted(f.settings.hidden for f in found) == [0, 50]
    assert {row["probe"] for row in probe_rows(found)} == {"linear", "mlp-50"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("train: weights_sha256", "0" * 64), ("test: data_sha256", "1" * 64), ("majority", 12.5)],
    ids=["snapshot", "data", "labels"],
)
def test_probes_of_something_else_are_refused_by_field(
    space: Workspace, field: str, value: object
) -> None:
    (file,) = run(space, poolings=("mean",), layers=[0])
    path = file.place(space.root)
    held = fields(path)
    (held["made_from"] if ":" in field else held)[field] = value
    rewrite(path, held)
    with pytest.raises(ProvenanceError, match=field):
        run(space, poolings=("mean",), layers=[0])


def test_a_damaged_file_is_named(space: Workspace) -> None:
    (file,) = run(space, poolings=("mean",), layers=[0])
    file.place(space.root).write_text("{}")
    with pytest.raises(WorkspaceError, match="damaged"):
        run(space, poolings=("mean",), layers=[0])


def test_layers_that_are_not_there_are_refused(space: Workspace) -> None:
    nowhere = space.at(str(space.root / "nowhere"))
    for wrong in ({"layers": [9]}, {"concat": ["foo"]}, {"layers": [3], "poolings": ("mean",)}):
        with pytest.raises(InputError, match="no layer 9|--concat 'foo'|no layer 3") as refusal:
            run(nowhere, **wrong)
        assert "extract" not in str(refusal.value)
    assert not (space.root / "nowhere").exists()  # nothing was extracted first


@pytest.mark.parametrize("field", ["encoding", "precision", "nonfinite"])
def test_a_twin_that_was_stored_otherwise_gives_no_difference(space: Workspace, field: str) -> None:
    twin, file = run(space, untrained=True, poolings=("mean",), layers=[0])
    assert probe_rows([twin, file])[1]["difference"] is not None
    twin.made_from[f"train: {field}"] = "other"
    assert probe_rows([twin, file])[1]["difference"] is None


def test_snapshots_that_would_be_stored_otherwise_are_refused_before_extraction(
    space: Workspace,
) -> None:
    other = space.at(str(space.root / "other"))
    splits, name = ["test"], "bigram_shift"
    extract(
        other, "0e", dataset=name, splits=splits, tokens="mean", encoding="float32", precision="32"
    )
    there = sorted(path for path in (space.root / "other").rglob("*"))
    with pytest.raises(ProvenanceError, match=r"encoding = '(int8|float32)'.*'(int8|float32)'"):
        run(other, poolings=("mean",))  # train and dev would be int8
    assert sorted(path for path in (space.root / "other").rglob("*")) == there
    (file,) = run(other, poolings=("mean",), layers=[0], encoding="float32")
    assert {v for k, v in file.made_from.items() if k.endswith("encoding")} == {"float32"}
    with pytest.raises(ProvenanceError, match=r"encoding = 'int8', 0e/.* 'float32'"):
        run(other, poolings=("mean",), untrained=True)


def test_a_subset_of_layers_suffices_for_its_probes(space: Workspace) -> None:
    splits = ["train", "dev", "test"]
    for split in splits:
        extract(
            *(space, "0e"),
            dataset="bigram_shift",
            splits=[split],
            tokens="max",
            layers=[0, 2],
            precision="32",
        )
    (file,) = run(space, poolings=("max",), layers=[0])
    assert [p.layers for p in file.probes] == [(0,)]
    with pytest.raises(ProvenanceError, match="holds layers 0,2 and not 1: give --layers 0,2"):
        run(space, poolings=("max",))


@pytest.mark.parametrize(
    ("option", "value"),
    [("--weight-decays", "nan"), ("--weight-decays", "1e-4,inf"), ("--seed", str(10**30))],
)
def test_numbers_that_are_none_are_refused(tmp_path: Path, option: str, value: str) -> None:
    from bertvision.cli import app

    args = ["probe", "bigram_shift", "--workspace", str(tmp_path / "w"), option, value]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert option in result.stderr
    assert not (tmp_path / "w").exists()


def test_layers_known_answers() -> None:
    assert wanted_layers(None, ["first+last"], 2, [0, 1, 2, 3]) == [(0,), (1,), (2,), (1, 2)]
    assert wanted_layers([3, 3], [], 2, [0, 1, 2, 3]) == [(3,)]
    assert parse_concat("0+last+4", 6) == (0, 6, 4)


def test_what_is_needed_is_known_before_it_is_stored() -> None:
    """The pooler's output, here 3, is of cls alone."""
    choice = partial(parse_inputs, "first+last,3", 2)
    assert needed_layers(choice, ["cls"], 2) == [1, 2, 3]
    with pytest.raises(InputError, match="no layer 3; there are 0,1,2"):
        needed_layers(choice, ["cls", "mean"], 2)


@pytest.mark.parametrize("text", ["first", "1+1", "a+b", "last+6", ""])
def test_what_cannot_be_joined_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="first\\+last"):
        parse_concat(text, 6)


def test_scores_and_spans_are_refused(
    tiny_bert: Path, tmp_path: Path, workspace: Workspace
) -> None:
    with pytest.raises(InputError, match="no classes"):
        probe(workspace, None, ["1e"])


@pytest.mark.parametrize("standardise", [False, True])
def test_scores_are_learned_as_by_ridge_cv(
    tiny_bert: Path, tmp_path: Path, standardise: bool
) -> None:
    from scipy.stats import pearsonr, spearmanr
    from sklearn.linear_model import RidgeCV
    from sklearn.preprocessing import StandardScaler

    random_words, folder = random.Random(4), tmp_path / "rates"
    folder.mkdir()
    for split, rows in {"train": 60, "dev": 20, "test": 30}.items():
        lines = ["a,b"]
        for i in range(rows):
            kings = random_words.randint(0, 4)
            some = random_words.choices(["the", "city", "of", "in", "anna"], k=5)
            lines.append(" ".join([*["king"] * kings, *some, *["river"] * (i % 3)]) + f",{kings}.5")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    space = feature_workspace(tmp_path / "w", str(tiny_bert))
    name = add_dataset(space.root, "csv", str(folder), text="a", label="b").name
    with pytest.raises(InputError, match="rates has no classes.*--solver ridge"):
        probe(space, name, ["0e"])
    options = ProbeOptions(solver="ridge", weight_decays=(1e-4, 1e-2, 1.0), standardise=standardise)
    job = partial(
        bertvision.probe, name, pool="mean", layers="1", options=options, workspace=space.root
    )
    probes = job(save=True, precision="32")
    (row,) = probes
    x, gold = {}, {}
    for split in ("train", "dev", "test"):
        pooled = PooledSplit(space, "0e", name, split, "mean")
        x[split] = read_inputs(pooled, [(1,)])[:, 0].astype(np.float64)
        gold[split] = np.array([item.label for item in space.dataset(name).items(split)])
    scaler = StandardScaler(with_mean=standardise, with_std=standardise).fit(x["train"])
    model = RidgeCV(60 * np.array([1e-4, 1e-2, 1.0]))
    model.fit(scaler.transform(x["train"]), gold["train"])
    told = model.predict(scaler.transform(x["test"]))
    assert row["weight_decay"] == pytest.approx(model.alpha_ / 60)
    assert row["pearson"] == pytest.approx(100 * pearsonr(told, gold["test"]).statistic, abs=1e-6)
    assert row["spearman"] == pytest.approx(100 * spearmanr(told, gold["test"]).statistic, abs=1e-6)
    assert row["rmse"] == pytest.approx(np.sqrt(((told - gold["test"]) ** 2).mean()))
    constant = gold["train"].mean() - gold["test"]
    assert row["mean_rmse"] == pytest.approx(np.sqrt((constant**2).mean()))
    assert row["pearson_low"] < row["pearson"] < row["pearson_high"]
    scale = scaler.scale_ if standardise else 1.0
    assert probes.direction(1) == pytest.approx(model.coef_ / scale, rel=1e-3, abs=1e-5)
    with pytest.raises(InputError, match="has no classes"):
        probes.direction(1, "king")
    assert "rmse of the mean" in str(probes)
    assert list(job()) == list(probes)
    with pytest.raises(InputError, match="--control"):
        job(control=True)
    assert bertvision.report(workspace=space.root).tables == ["score_probes"]
    reported = json.loads((space.root / "report/tables/score_probes.json").read_text())
    assert [line["pearson_low"] for line in reported["rows"]] == [row["pearson_low"]]


def test_a_probe_that_is_refused_leaves_no_workspace(tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "rates.csv").write_text("text,label\n" + "the king,0.5\nthe city,1.5\n" * 9)
    (tmp_path / "empty").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").write_text("mine")
    for root in (tmp_path / "new", tmp_path / "empty", tmp_path / "own"):
        with pytest.raises(InputError, match="rates has no classes"):
            bertvision.probe(
                "csv", data=tmp_path / "rates.csv", model=str(tiny_bert), workspace=root
            )
        assert root.is_dir() == (root.name != "new")
        left = [path.name for path in root.iterdir()] if root.is_dir() else []
        assert left == (["notes.txt"] if root.name == "own" else [])


@pytest.mark.parametrize(
    ("standardise", "advice"), [(False, "--standardise"), (True, "--weight-decays")]
)
def test_that_lbfgs_ended_early_is_said_once_with_what_helps(
    space: Workspace,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    standardise: bool,
    advice: str,
) -> None:
    for module in ("probe", "probe_results"):
        monkeypatch.setattr(f"bertvision.pipelines.readouts.{module}.MOST_ITERATIONS", 1)
    options = ProbeOptions(solver="lbfgs", weight_decays=(1e-4,), standardise=standardise)
    run(space, options=options, poolings=["cls", "mean"], inlp=1)
    (message,) = (text for text in caplog.messages if "optimum" in text)
    assert "6 of 6 probes of bigram_shift at 0e" in message
    assert message.count("--") == 1
    assert advice in message


def test_classes_are_no_scores(space: Workspace) -> None:
    with pytest.raises(InputError, match="bigram_shift has classes"):
        run(space, options=ProbeOptions(solver="ridge"))


def test_data_in_one_piece_is_cross_validated(tiny_bert: Path, tmp_path: Path) -> None:
    lines = [line.split("\t") for line in write_probing(tmp_path / "x").read_text().splitlines()]
    source = tmp_path / "royal.csv"
    with source.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["text", "label"], *([text, label] for _, label, text in lines)]
        )
    space = feature_workspace(tmp_path / "w", str(tiny_bert))
    name = add_dataset(space.root, "csv", str(source), text="text", label="label").name
    options = replace(OPTIONS, folds=4, max_epochs=12)
    (found,) = probe(space, name, ["0e"], layers=[0], poolings=["mean"], options=options)
    assert found.examples["folds"] == 4
    assert found.examples["scored"] == 160
    assert len(found.probes[0].epochs) == 4
    assert found.probes[0].accuracy > 85


def test_from_sentences_to_a_table_on_the_command_line(tiny_bert: Path, tmp_path: Path) -> None:
    from bertvision.cli import app

    write_probing(tmp_path / "bigram_shift.txt")
    args = ["probe", "bigram_shift", "--workspace", str(tmp_path / "w"), "--epochs", "8"]
    first = [*args, "--model", str(tiny_bert), "--data", str(tmp_path), "--untrained"]
    runner = CliRunner()
    result = runner.invoke(app, [*first, "--csv", str(tmp_path / "out.csv")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["data", "snapshot", "majority", "cls", "mean"]
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["bigram_shift", "untrained"],
        ["bigram_shift", "0e"],
    ]
    with (tmp_path / "out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * 2 * 3
    # again without the data: from what is kept
    again = runner.invoke(app, [*args, "--untrained", "--json"])
    assert again.exit_code == 0, again.output
    rows = json.loads(again.stdout)
    assert [str(r["accuracy"]) for r in rows] == [r["accuracy"] for r in table]
    assert rows[-1]["difference"] is not None
    # what the program cannot know
    lost = runner.invoke(app, ["probe", "mr", "--workspace", str(tmp_path / "w")])
    assert lost.exit_code == 2
    assert "--data" in lost.stderr


def test_training_examples_of_one_class_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    data = tmp_path / "one.csv"
    of_one = [f"Text {i}.,{int(i == 0)}\n" for i in range(12)]
    data.write_text("text,label\n" + "".join(of_one))
    with pytest.raises(InputError, match="training examples are of one class"):
        bertvision.probe("csv", data=data, model=tiny_bert, workspace=tmp_path / "w")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["csv", "--data", "none.csv"], "none.csv"),
        (["csv", "--data", "mr.csv", "--label", "stars"], "but not ['stars']"),
        (["cola", "--data", "mr.csv"], "by its name this file holds mr"),
        (["mr"], "--data"),
        (["features", "--data", "mr.csv"], "'features' is no task"),
        (["csv", "--data", "mr.csv", "--encoding", "int7"], "encoding 'int7'"),
        (["csv", "--data", "mr.csv", "--pool", "median"], "--pool 'median'"),
        (["csv", "--data", "mr.csv", "--layers", "a"], "--layers 'a'"),
    ],
)
def test_a_command_that_fails_leaves_no_new_workspace(
    tiny_bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    """A folder that a mistake has made would be found by every later command."""
    from bertvision.cli import app

    (tmp_path / "mr.csv").write_text("text,label\nGood.,1\nBad.,0\n")
    monkeypatch.chdir(tmp_path)
    command = ["probe", *arguments, "--model", str(tiny_bert), "--workspace", "w"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mr.csv"]


def test_a_file_of_ones_own_may_be_named_like_a_task(tiny_bert: Path, tmp_path: Path) -> None:
    """It is no data set of that task, so that both can be added; its columns are the default."""
    from bertvision.pipelines.workspace.data import open_data

    source = tmp_path / "mr.csv"
    source.write_text("text,label\nGood.,1\nBad.,0\n")
    space, name = open_data(tmp_path / "w", str(tiny_bert), "csv", str(source))
    assert name == "csv_mr"
    held = Workspace.find(space.root).dataset(name)
    assert (held.config.text, held.config.label, held.splits) == ("text", "label", ("all",))
    assert [item.text for item in held.items("all")] == ["Good.", "Bad."]
    again = open_data(space.root, None, "csv", str(source), text="text")
    assert again[1] == name


def test_the_module_is_not_left_locked(space: Workspace) -> None:
    """Two at once would overwrite each other's files."""
    from bertvision.errors import LockedError
    from bertvision.featurestore.storage.lock import exclusive

    folder = space.root / ProbeFile.folder / "bigram_shift"
    folder.mkdir(parents=True)
    with exclusive(folder / ".lock", "testing"), pytest.raises(LockedError, match="probing"):
        run(space)
    run(space, layers=[0])
