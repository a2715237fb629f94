"""The benchmarks: fair turns, honest ratios, realistic data, and reports that can be plotted."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from sentences import PLACES
from test_calibration import inject
from workspaces import PEOPLE

import bertvision
from bertvision.pipelines.workspace.workspace import Workspace

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *arguments: str | Path) -> str:
    """Run a benchmark as its users do."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments],
        capture_output=True,
        text=True,
        # more threads than free cores make small repetitions wait for each other
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks as scripts find it, or one that writes docs/."""
    for folder in (BENCHMARKS.parent / "docs", BENCHMARKS):
        monkeypatch.syspath_prepend(str(folder))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


@pytest.mark.slow
def test_loader_reports_every_repetition_of_every_reader(tmp_path: Path) -> None:
    report_path = tmp_path / "loader.json"
    printed = run(
        *("loader.py", "--quick", "--folder", tmp_path, "--json", report_path),
        *("--only", "preadv of int8, 1", "reused buffer", "safetensors"),
    )
    report = json.loads(report_path.read_text())
    sides = {
        "bertvision",
        "limit: preadv of int8, 1 thread",
        "np.memmap dense float16, reused buffer",
        "safetensors, ragged float16",
        "safetensors, ragged int8",
    }
    conditions = {"stored, warm", "bfloat16, warm", "stored, cold"}
    assert set(report["results"]) == {f"{s} | {c}" for s in sides for c in conditions}
    assert all(len(figures) == 2 and min(figures) > 0 for figures in report["results"].values())
    others = {f"{s} | {c}" for s in sides - {"bertvision"} for c in conditions}
    assert set(report["ratios"]) == others
    assert report["unit"] == "examples/s"
    assert report["machine"]["torch"]
    assert str(tmp_path) not in report_path.read_text()
    assert all(side in printed for side in sides)


def test_a_reader_that_loses_data_is_refused(module: Any, tmp_path: Path) -> None:
    data, loader, limits = module("common.data"), module("loader"), module("peers.limits")
    synthetic = data.Synthetic(data.lengths(20), layers=2, hidden=16)
    reader = limits.RawRead(2, 16, threads=1)
    reader.prepare(tmp_path, synthetic)
    loader.check(reader, synthetic)
    file = tmp_path / "raw" / "payloads.int8"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RuntimeError, match="20 of 20 examples, and 0"):
        loader.check(reader, synthetic)


def test_every_repetition_runs_every_side_once_in_changing_order(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    sides = {name: lambda name=name: float(turns.append(name) or len(turns)) for name in "abc"}
    harness = module("common.harness")
    monkeypatch.setattr(harness.KERNELS, "make", lambda: True)  # no side needs them
    results = harness.interleave(sides, repeats=20, warmup=1)
    rounds = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(rounds) == 21
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert {r[0] for r in rounds} == {"a", "b", "c"}
    # the warm-up is dropped, and figures of one repetition stand at one position
    assert sorted(results[name][0] for name in "abc") == [4.0, 5.0, 6.0]


def test_ratios_compare_within_a_repetition(module: Any) -> None:
    results = {"ours": [10.0, 20.0, 90.0], "peer": [5.0, 5.0, 30.0]}
    ratios = module("common.harness").ratios
    assert ratios(results, "ours", higher_is_better=True) == {"peer": 3.0}
    assert ratios(results, "ours", higher_is_better=False) == {"peer": pytest.approx(1 / 3)}


def test_dropped_files_are_cold_until_they_are_read(
    module: Any, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", os.fdatasync)  # or the pages would not have been written
    harness = module("common.harness")
    file = disk / "file"
    file.write_bytes(bytes(1 << 20))
    harness.drop_cache([disk])
    if harness.cached_share([file]) > 0:
        pytest.skip("this file system keeps its pages")
    harness.warm_cache([disk])
    assert harness.cached_share([file]) == 1


def test_lengths_are_those_of_squad(module: Any) -> None:
    n_tokens = module("common.data").lengths(500, seed=3)
    assert 36 <= n_tokens.min() < n_tokens.max() <= 386
    assert n_tokens.mean() == pytest.approx(170.8, abs=2)
    assert np.median(n_tokens) == pytest.approx(159, abs=3)


def test_synthetic_activations_have_outlier_channels_and_related_layers(module: Any) -> None:
    x = module("common.data").hidden_states(1500, layers=4, hidden=1024).double().numpy()
    centred = x - x.mean(0)
    spread = centred.std(0)
    standing_out = np.abs(x.mean(0))[-1] / np.median(spread[-1])
    assert (standing_out > 15).sum() == 3
    assert np.sort(standing_out)[-4] < 2
    for layer in range(3):
        a, b = (centred[:, i] / spread[i] for i in (layer, layer + 1))
        assert 0.6 < (a * b).mean() < 0.95


def test_a_split_is_written_once_and_then_reused(module: Any, tmp_path: Path) -> None:
    data = module("common.data")
    wanted = data.lengths(30)
    split = data.write_split(tmp_path, wanted, layers=3, hidden=16, shard_tokens=512)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("hidden_states/c/*/*/*")}
    again = data.write_split(tmp_path, wanted, layers=3, hidden=16, shard_tokens=512)
    assert before
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("hidden_states/c/*/*/*")}
    assert sorted(again.plan.n_tokens) == sorted(wanted)
    truth = data.Synthetic(wanted, layers=3, hidden=16)
    example = truth.example(int(split.plan.example_id[7]))  # (seq, layers, hidden)
    error = (split[7].transpose(1, 2) - example).norm() / example.norm()
    assert 0 < error < 0.02


def test_sizes_are_of_the_statistics_that_each_encoding_is_stored_with(
    module: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel with massive activations is widened for int8, whose other channels can spare it."""
    inject(monkeypatch)
    size = module("size")
    sample = size.real(workspace, "1e", 1)
    wider = sample.stats["int8"].std[-1] / sample.stats["int4"].std[-1]
    assert wider[3] == pytest.approx(7, rel=1e-4)
    assert np.delete(wider.numpy(), 3) == pytest.approx(1)
    found = {name: size.errors(sample, name) for name in ("int8", "int4", "bfloat16")}
    assert found["bfloat16"]["nrmse"] < found["int8"]["nrmse"] < found["int4"]["nrmse"]


@pytest.mark.slow
def test_deviations_of_int4_are_larger_than_those_of_int8(
    module: Any, workspace: Workspace, tmp_path: Path
) -> None:
    space = module("deviation").copy_of(workspace, tmp_path / "space")
    people = tmp_path / "people.csv"
    lines = [f"{PEOPLE[i % 4]} lives in {PLACES[i % 3]} {i},{PEOPLE[i % 4]}" for i in range(48)]
    people.write_text("\n".join(["text,label", *lines]))
    bertvision.extract("1e", task="csv", data=people, pool="mean", workspace=space.root)
    json_ = tmp_path / "deviation.json"
    run(
        *("deviation.py", "--workspace", space.root, "--checkpoint", "0.5e,1e", "--split", "train"),
        *("--groups", "people-all", "--tokens", "300", "--folder", tmp_path, "--json", json_),
    )
    assert str(tmp_path) not in json_.read_text()
    report = json.loads(json_.read_text())
    assert (report["settings"]["layers"], report["settings"]["hidden"]) == (3, 32)
    found = report["statistics"]
    assert {"CKA", "RSA", "PWCCA", "log I, [CLS]", "random cosine", "groups identified"} <= set(
        found
    )
    eight, four = (
        {name: of[encoding]["absolute"] for name, of in found.items() if not of[encoding]["lost"]}
        for encoding in ("int8", "int4")
    )
    assert len(eight) == len(found) > 20
    assert all(0 <= of["median"] <= of["largest"] for of in [*eight.values(), *four.values()])
    # of few texts, shares of right ones may stay
    assert np.mean([of["median"] > eight[name]["median"] for name, of in four.items()]) > 0.8
    assert 0 < found["CKA"]["int8"]["absolute"]["largest"] < 0.01
    table = module("generate_figures").table(report)
    assert "| CKA | " in table
    # of the tiny encoder's [CLS], nearly the same everywhere, four bits leave nothing
    lost = [name for name, of in found.items() if of["int4"]["lost"]]
    assert all(f"| {name} | " in table for name in lost)


@pytest.mark.slow
def test_analyses_are_measured_beside_peers_that_say_the_same(module: Any, tmp_path: Path) -> None:
    report_path = tmp_path / "analyses.json"
    run("analyses.py", "--quick", "--folder", tmp_path, "--json", report_path)
    report = json.loads(report_path.read_text())
    sides = {"bertvision", "in memory, NumPy and scikit-learn"}
    kinds = {"cka", "cca", "rsa", "isotropy", "mean cosine and PCA alone"}
    assert set(report["results"]) == {f"{side} | {kind}" for side in sides for kind in kinds}
    assert all(len(figures) == 2 and min(figures) > 0 for figures in report["results"].values())
    assert len(report["ratios"]) == len(kinds)


def test_tokens_compares_streams_of_vectors_that_give_the_same(tmp_path: Path) -> None:
    report_path = tmp_path / "tokens.json"
    printed = run("tokens.py", "--quick", "--folder", tmp_path, "--json", report_path)
    report = json.loads(report_path.read_text())
    mapped = "np.memmap float16, random rows"
    limit = "limit: preadv of int8 in file order, 1 thread"
    sides = {
        "bertvision",
        mapped,
        limit,
        "limit: preadv of the chunks, rows of 16 shards at random",
    }
    conditions = {"stored, warm", "float32, warm", "stored, cold", "float32, cold"}
    assert {f"{s} | {c}" for s in sides for c in conditions} <= set(report["results"])
    assert all(len(figures) == 2 and min(figures) > 0 for figures in report["results"].values())
    resident = "bertvision, all shards in the buffer"
    assert {c for c in conditions if f"{resident} | {c}" in report["results"]} == {
        "stored, warm",
        "float32, warm",
    }
    assert report["ratios"][f"{limit} | float32, warm"] > 0
    assert report["notes"] in ([], ["not installed: sae-lens"])
    assert "in memory float32" in printed


@pytest.mark.slow
def test_pooled_reads_the_same_vectors_from_all_sides(tmp_path: Path) -> None:
    report_path = tmp_path / "pooled.json"
    run("pooled.py", "--quick", "--folder", tmp_path, "--json", report_path)
    report = json.loads(report_path.read_text())
    ours = {f"bertvision, int8 | {condition}" for condition in ("warm", "cold")}
    assert report["ratios"].keys() == report["results"].keys() - ours
    assert report["settings"]["bytes_per_example"]["numpy, memory-mapped"] > 2 * 13 * 768


@pytest.mark.slow
def test_hook_times_a_loop_that_keeps_its_states_beside_one_that_does_not(tmp_path: Path) -> None:
    report_path = tmp_path / "hook.json"
    run("hook.py", "--quick", "--folder", tmp_path, "--json", report_path)
    report = json.loads(report_path.read_text())
    kept = {"writer.hook", "writer.add_batch", "torch.save"}
    assert report["results"].keys() == kept | {"bare loop"}
    assert report["ratios"].keys() == kept
    assert report["settings"]["layers"] == 7


@pytest.mark.slow
def test_trainers_says_of_each_form_what_a_kill_and_a_flipped_bit_leave(tmp_path: Path) -> None:
    report_path = tmp_path / "trainers.json"
    run("trainers.py", "--quick", "--folder", tmp_path, "--json", report_path)
    results = json.loads(report_path.read_text())["results"]
    files = ["safetensors, a file each", "torch.save, a file each", "memory map, float16"]
    for form in ["bertvision, int8", "bertvision, float16", *files, "data set (Arrow), float16"]:
        assert min(results[f"{form} | writing, vectors/s"]) > 0
        assert min(results[f"{form} | reading, vectors/s"]) > 0
        told = 100 * form.startswith("bertvision")
        assert results[f"{form} | flipped bits found, %"] == [told]
    assert results["bertvision, int8 | lost by a kill"] == [0]
    assert max(results["torch.save, a file each | given again after a kill, %"]) < 10
    assert min(results["memory map, float16 | given again after a kill, %"]) == 100


@pytest.mark.parametrize("name", ["performance", "analyses", "tokens"])
def test_the_page_shows_what_the_reports_say(module: Any, name: str) -> None:
    page = BENCHMARKS.parent / "docs" / f"{name}.md"
    text = page.read_text()
    assert module("generate_figures").with_tables(text, page.with_suffix("")) == text
    for report in page.with_suffix("").glob("*.json"):
        assert f"<!-- table: {report.stem} -->" in text


@pytest.mark.slow
def test_frozen_says_after_how_many_epochs_a_store_has_paid_for_itself(
    tmp_path: Path, tiny_bert: Path
) -> None:
    report_path = tmp_path / "frozen.json"
    printed = run(
        *("frozen.py", "--quick", "--folder", tmp_path, "--json", report_path),
        *("--model", tiny_bert, "--layers", "1"),
    )
    written = json.loads(report_path.read_text())
    assert set(written["results"]) == {"freeze-stored", "freeze", "all layers"}
    assert all(len(figures) == 2 for figures in written["results"].values())
    assert written["settings"]["seconds_to_store"] > 0
    assert "has paid for itself after" in printed


@pytest.mark.slow
def test_encodings_are_written_and_read_side_by_side(
    tmp_path: Path, tiny_bert: Path, dev_json: Path
) -> None:
    report_path = tmp_path / "encodings.json"
    run(
        *("encodings.py", "--quick", "--folder", tmp_path, "--json", report_path),
        *("--model", tiny_bert, "--data", dev_json),
    )
    written = json.loads(report_path.read_text())
    conditions = {"extraction", "all layers", "last layer"}
    encodings = {"bfloat16", "int8", "int4", *(f"transform:{e}" for e in (0.05, 0.115, 0.2))}
    assert set(written["results"]) == {f"{e} | {c}" for e in encodings for c in conditions}
    assert set(written["settings"]["readers"]) == encodings
