"""Workspaces that an earlier version wrote: they open, say the same, and are gone on with.

``fixtures/make_workspace_1.py`` made them, and what they said then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import opened
from readings import (
    PLACE,
    contents,
    differences,
    head_logits,
    head_states,
    readings,
    values,
)
from safetensors.torch import load_file

from bertvision.featurestore.format.arrays import same_metadata
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.readouts.options import ProbeOptions, RankOptions
from bertvision.pipelines.readouts.probe_results import probe, probe_rows
from bertvision.pipelines.readouts.rank_systems import rank
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.results.error_analysis import errors
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.sweep import sweep
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import FinetuneOptions, TrainOptions
from bertvision.pipelines.workspace.pretrained import pretrained
from bertvision.pipelines.workspace.records import read_run_metrics
from bertvision.pipelines.workspace.workspace import Workspace

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "workspace-1.json").read_text("utf-8"))
OPTIONS = EXPECTED["options"]
NAMES = ["squad", "sentences"]
Contents = dict[str, tuple[int, bytes]]
TRAINED = TrainOptions(**OPTIONS["train"])
ROUNDED = 1e-4
"""Tolerance relative to the largest logit: kernels of other machines sum in another order."""


def unpack(folder: Path) -> Path:
    """The archive in a folder, whose place is written where paths are recorded."""
    with opened(FIXTURES / "workspace-1.tar.xz") as archive:
        archive.extractall(folder)
    for path in [*folder.rglob("*.yaml"), *folder.rglob("*.json")]:
        data = path.read_bytes()
        if PLACE.encode() in data:
            path.write_bytes(data.replace(PLACE.encode(), str(folder).encode()))
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, for tests that change nothing."""
    return unpack(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive, for tests that go on with something; none of them needs what another changes."""
    return unpack(tmp_path_factory.mktemp("changed"))


def assert_unchanged(root: Path, before: Contents, again: str | None = None) -> None:
    """Nothing was written since; but files named ``again`` may have been, with what was in them."""
    after = contents(root)
    assert after.keys() == before.keys()
    assert [path for path in after if not same(path, after[path][1], before[path][1])] == []
    touched = {path for path, (time, _) in after.items() if before[path][0] != time}
    assert {path for path in touched if again is None or not path.endswith(again)} == set()


def same(path: str, one: bytes, other: bytes) -> bool:
    """Whether two files hold the same: metadata may name the same things in another order."""
    return one == other or (path.endswith("zarr.json") and same_metadata(one, other))


def expected_values(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / "workspace-1.npz") as arrays:
        return {key: arrays[key] for key in arrays.files if key.startswith(f"{name}/")}


def assert_near(found: Any, expected: Any, what: str) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDED * scale, err_msg=what)


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_results_status_probes_snapshots_and_splits_say_what_they_said(
    shared: Path, name: str
) -> None:
    before = contents(shared)
    expected = {
        k: v for k, v in EXPECTED["workspaces"][name].items() if k not in ("report", "digest")
    }
    assert differences(readings(Workspace.find(shared / name)), expected) == []
    assert_unchanged(shared, before)


def test_the_fixture_holds_what_it_is_to_protect() -> None:
    """Or a reading of nothing would be found equal to a reading of nothing."""
    squad, sentences = (EXPECTED["workspaces"][name] for name in NAMES)
    assert len(squad["rows"]["runs"]) == 16
    assert {row["system"] for row in squad["rows"]["runs"]} == {"bert", "head", "ensemble"}
    assert len(squad["rows"]["others"]) == 1
    assert all(squad["evaluated"].values())
    assert sum(map(len, (squad["evaluated"], sentences["evaluated"]))) == 12
    assert squad["status"]["unfinished"] == {"0e": ["dev"]}
    assert list(sentences["snapshots"]) == ["untrained", "6e"]
    assert sum(row["difference"] is not None for row in sentences["probes"]) == 8
    for workspace in (squad, sentences):
        assert all(split["damage"] == [] for split in workspace["splits"].values())
        assert {split["info"]["encoding"] for split in workspace["splits"].values()} == {"int8"}


@pytest.mark.parametrize("name", NAMES)
def test_stored_states_decode_to_the_same_and_trained_heads_answer_the_same(
    shared: Path, name: str
) -> None:
    found = values(Workspace.find(shared / name))
    expected = expected_values(name)
    assert {f"{name}/{key}" for key in found} == set(expected)
    for key, x in found.items():
        assert_near(x, expected[f"{name}/{key}"], key)


def test_heads_of_every_name_take_their_saved_weights_and_compute_the_same() -> None:
    found, expected = head_states(), EXPECTED["heads"]
    assert {name: found.get(name) for name in expected} == expected
    logits = {f"head/{name}": x for name, x in head_logits().items()}
    for key, x in expected_values("head").items():
        assert_near(logits[key], x, key)


@pytest.mark.parametrize("name", NAMES)
def test_settings_have_the_digest_that_a_resume_file_of_theirs_knows(
    tmp_path: Path, name: str
) -> None:
    with opened(FIXTURES / "workspace-1.tar.xz") as archive:
        archive.extract(f"{name}/bertvision.yaml", tmp_path)  # as it was packed
    config = Workspace.find(tmp_path / name).config
    assert config.digest() == EXPECTED["workspaces"][name]["digest"]


@pytest.mark.parametrize("name", NAMES)
def test_a_report_of_everything_is_written(shared: Path, tmp_path: Path, name: str) -> None:
    report = write_report(Workspace.find(shared / name), tmp_path / "report")
    expected = EXPECTED["workspaces"][name]["report"]
    assert (report.results, report.missing) == (expected["results"], expected["missing"])


def test_the_encoder_is_found_by_the_name_and_the_digest_that_were_recorded(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(shared / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    checkpoint = pretrained(Workspace.find(shared / "squad"))
    assert checkpoint.folder.is_relative_to(shared)


# --- what is there is not made again ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"), [("squad", "finetune"), ("sentences", "finetune csv")]
)
def test_what_was_fine_tuned_is_not_fine_tuned_again(shared: Path, name: str, options: str) -> None:
    data, before = shared / "data", contents(shared)
    ending = "json" if name == "squad" else "csv"
    asked = FinetuneOptions(
        model="example/tiny-bert",
        train=str(data / f"train.{ending}"),
        dev=str(data / f"dev.{ending}"),
        **OPTIONS[options],
    )
    for given, resume in ((FinetuneOptions(), True), (asked, False)):
        found = finetune(shared / name, given, resume=resume)
        assert (found["steps"], found["seconds"]) == (0, 0)
    assert_unchanged(shared, before)


@pytest.mark.parametrize(
    ("name", "tag", "split", "shard_tokens"),
    [
        ("squad", "1e", "train", 256),
        ("squad", "1e", "dev-cls", 16),
        ("sentences", "6e", "dev", None),
    ],
)
def test_what_was_extracted_is_not_extracted_again(
    shared: Path, name: str, tag: str, split: str, shard_tokens: int | None
) -> None:
    before = contents(shared)
    space = Workspace.find(shared / name)
    (done,) = extract(space, tag, splits=[split], precision="32", shard_tokens=shard_tokens)
    assert (done.shards_written, done.examples_written) == (0, 0)
    assert_unchanged(shared, before, again="zarr.json")


def test_heads_that_were_trained_and_scored_are_neither_trained_nor_scored_again(
    shared: Path,
) -> None:
    before = contents(shared)
    for name, workspace in EXPECTED["workspaces"].items():
        space = Workspace.find(shared / name)
        for key, run in workspace["runs"].items():
            tag, head = key.split("/")
            (metrics,) = train(space, [head], tag, TRAINED)
            assert differences(metrics.to_json(), run["metrics"]) == []
    space = Workspace.find(shared / "squad")
    results = sweep(space, options=TRAINED, **OPTIONS["sweep"])
    assert len(results) == 8  # two parts of the data, two seeds, scored on two snapshots
    assert_unchanged(shared, before)


def test_probes_that_were_trained_are_not_trained_again(shared: Path) -> None:
    before = contents(shared)
    space = Workspace.find(shared / "sentences")
    options = ProbeOptions(**OPTIONS["probe"])
    found = probe(space, "royal", ["6e"], options=options, precision="32", **OPTIONS["probes"])
    expected = EXPECTED["workspaces"]["sentences"]["probes"]
    assert differences(probe_rows(found), expected) == []
    assert_unchanged(shared, before)


def test_rankings_that_were_made_are_not_made_again(shared: Path) -> None:
    before = contents(shared)
    training = RankOptions(**OPTIONS["training"])
    space = Workspace.find(shared / "squad")
    found = rank(space, "wikiqa", ["1e"], options=training, **OPTIONS["rank"])
    assert differences(found["rows"], EXPECTED["rankings"]) == []
    assert_unchanged(shared, before, again=".qrels")


# --- what is gone on with -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head", "on", "tag"),
    [
        ("squad", "adapter-64-shared", "0.5e", "1e"),
        ("squad", "learned-pooling@f0.5", "1e", "1e"),
        ("sentences", "cls-learned-pooling", "6e", "6e"),
    ],
)
def test_heads_that_are_scored_again_give_the_same_answers_and_scores(
    changed: Path, name: str, head: str, on: str, tag: str
) -> None:
    space = Workspace.find(changed / name)
    folder = space.head_dir(on, head) / "eval" / tag
    rules = json.loads((folder / "metrics.json").read_text())["rules"]
    predictions = (folder / "predictions.json").read_text()
    logits = load_file(folder / "dev.safetensors")
    (metrics,) = evaluate(space, [head], trained_on=on, tag=tag, precision="32")
    for rule, scores in rules.items():
        assert differences(metrics.rules[rule]["metrics"], scores["metrics"]) == []
        threshold = metrics.rules[rule]["threshold"]
        assert threshold == scores["threshold"] or abs(threshold - scores["threshold"]) < 1e-4
    assert json.loads((folder / "predictions.json").read_text()) == json.loads(predictions)
    again = load_file(folder / "dev.safetensors")
    assert set(again) == set(logits)
    for key, x in logits.items():
        assert_near(again[key].numpy(), x.numpy(), key)


@pytest.mark.parametrize("combine", ["max", "mean"])
def test_an_ensemble_is_not_stale_and_comes_out_the_same(changed: Path, combine: Any) -> None:
    space = Workspace.find(changed / "squad")
    (held,) = [r for r in read_results(space) if r.run.startswith(f"{combine}-bert+")]
    runs = ["learned-pooling", "learned-pooling@s1"]
    found = ensemble(space, runs, with_bert=True, trained_on="1e", tag="1e", combine=combine)
    for rule, scores in held.rules.items():
        assert differences(found["rules"][rule]["metrics"], scores["metrics"]) == []
    (again,) = [r for r in read_results(space) if r.run == held.run]
    assert again.folder == held.folder


def test_errors_that_were_analysed_are_the_same_when_they_are_again(changed: Path) -> None:
    space = Workspace.find(changed / "squad")
    for system, path in (
        ("learned-pooling:1e", space.head_dir("1e", "learned-pooling") / "eval/1e/errors.json"),
        ("bert:1e", space.bert_dir("1e") / "errors.json"),
    ):
        expected = json.loads(path.read_text("utf-8"))
        assert differences(json.loads(json.dumps(errors(space, system))), expected) == []


def test_an_extraction_that_was_begun_is_finished_and_its_cost_added_up(changed: Path) -> None:
    space = Workspace.find(changed / "squad")
    cost = space.root / "extraction" / "0e" / "dev.json"
    spent, before = json.loads(cost.read_text()), contents(space.root / "activations")
    (done,) = extract(space, "0e", splits=["dev"], precision="32", shard_tokens=128)
    split = space.split("0e", "dev")
    assert done.shards_written == len(
        EXPECTED["workspaces"]["squad"]["splits"]["0e/dev"]["missing"]
    )
    assert split.is_complete
    assert split.verify() == []
    after = contents(space.root / "activations")
    rewritten = [p for p, (_, data) in before.items() if not same(p, after[p][1], data)]
    assert rewritten == []
    now = json.loads(cost.read_text())
    assert spent["examples_written"] < now["examples_written"] == now["examples"] == len(split)
    assert now["seconds"] > spent["seconds"]


def test_a_training_that_was_stopped_goes_on_where_it_stood(changed: Path) -> None:
    space = Workspace.find(changed / "squad")
    (stopped,) = (space.root / "heads" / "1e").glob(".run-*")
    log = (stopped / "log.csv").read_text().splitlines()
    # a mark that a training from the beginning would not keep
    (stopped / "log.csv").write_text("\n".join([log[0], "1,99", *log[2:], ""]))
    name, options = EXPECTED["stopped"], TrainOptions(**OPTIONS["stopped"])
    (metrics,) = train(space, [name], "1e", options)
    folder = space.head_dir("1e", name)
    assert (folder / "log.csv").read_text().splitlines()[1] == "1,99"
    assert not stopped.exists()
    assert read_run_metrics(folder) == metrics
    expected = EXPECTED["continued"]
    for key in ("steps", "examples", "epoch", "trained_together"):
        assert getattr(metrics, key) == expected["metrics"][key]
    losses = expected["metrics"]["held_out_losses"]
    assert metrics.held_out_losses == pytest.approx(losses, rel=1e-3)
    weights = load_file(folder / "model.safetensors")
    # a constant on all logits changes no loss: what moves their bias is rounding alone
    assert set(weights) == {*expected["weights"], "output.bias"}
    for key, x in expected["weights"].items():
        np.testing.assert_allclose(weights[key].flatten().numpy(), x, rtol=0, atol=1e-3)
