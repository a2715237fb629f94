"""Compressed encoders: what 8 bits are, and a table whose numbers are those of the measurements."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_latency import _answers
from torch import nn

import bertvision
from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines import precision
from bertvision.pipelines.analysis.exits import ExitsResult
from bertvision.pipelines.analysis.prune import PruningResult
from bertvision.pipelines.analysis.result import Analysis
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.finetuning import kept_logits
from bertvision.pipelines.finetuning import latency as quantising
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.kept_logits import keep_logits, predict_logits
from bertvision.pipelines.finetuning.latency import measure_latency, quantise, quantised
from bertvision.pipelines.finetuning.latency_record import latency_file
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.report.build import find_table
from bertvision.pipelines.report.compression import compared
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import FinetuneOptions, TrainOptions
from bertvision.pipelines.workspace.records import BertScores, read_snapshot_info
from bertvision.pipelines.workspace.snapshots import count_encoder_parameters, load_snapshot
from bertvision.pipelines.workspace.status import _is_reported
from bertvision.pipelines.workspace.workspace import Workspace

LOW = "learned-pooling@l0-1"


@pytest.fixture(scope="module")
def lab(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A copy with two heads, one of them distilled on the lower layer, and the 8-bit encoder."""
    root = tmp_path_factory.mktemp("compression") / "lab"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    space = Workspace.find(root)
    keep_logits(space, "1e", ["train"])
    heads = ["learned-pooling", f"{LOW}@d1e"]
    train(space, heads, "1e", TrainOptions(epochs=1, batch_size=8, precision="32"))
    evaluate(space, heads, trained_on="1e", tag="1e", precision="32")
    quantise(space, "1e")
    return space


@pytest.fixture
def copy(lab: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(lab.root, tmp_path / "lab")
    return Workspace.find(tmp_path / "lab")


# --- 8 bits ---


def test_a_quantised_layer_multiplies_whole_numbers(lab: Workspace) -> None:
    """By hand: int8 weights with a scale per output channel, inputs on a grid of 128 steps."""
    model = load_snapshot(lab.snapshot_dir("1e")).model
    made, layers = quantised(model)
    name, layer = next(iter(layers.items()))
    eight = made.get_submodule(name)
    weight = eight.weight()
    whole = weight.int_repr().double()
    scale = weight.q_per_channel_scales()[:, None]
    assert whole.abs().max() <= 128
    held = whole * scale
    assert bool(((held - layer.weight).abs() <= 0.51 * scale).all())
    torch.manual_seed(0)
    x = torch.randn(3, layer.in_features)
    with torch.inference_mode():
        found = eight(x)
    step = float(x.max() - x.min()) / 127  # x86 kernels keep a bit free
    bound = held.abs().sum(dim=1).float() * step  # of rounding every input
    exact = (x.double() @ held.T + layer.bias.double()).float()
    assert bool(((found - exact).abs() <= bound).all())


def test_the_encoder_is_quantised_and_its_output_layer_is_not(lab: Workspace) -> None:
    model = load_snapshot(lab.snapshot_dir("1e")).model
    before = {name: x.clone() for name, x in model.state_dict().items()}
    made, layers = quantised(model)
    linear = {n for n, m in model.base_model.named_modules() if isinstance(m, nn.Linear)}
    assert {name.removeprefix("bert.") for name in layers} == linear
    assert isinstance(made.qa_outputs, nn.Linear)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_its_scores_are_those_of_its_own_logits_and_stand_among_the_results(
    lab: Workspace,
) -> None:
    snapshot = load_snapshot(lab.snapshot_dir("1e"))
    made, _ = quantised(snapshot.model)
    task, windows = load_task("squad_v2"), lab.windows("dev", snapshot.tokenizer)
    arrays, _ = predict_logits(made, task, windows, padding=0, precision="32", desc=None)
    held = load_file(lab.root / "quantised/1e/dev.safetensors")
    plain = load_file(lab.bert_dir("1e") / "dev.safetensors")
    for name in ("start_logits", "end_logits"):
        assert np.array_equal(held[name], arrays[name])
        assert 0 < np.abs(held[name] - plain[name]).max() < 0.5
    (found,) = (r for r in read_results(lab) if r.system == "quantised")
    assert (found.name, found.run, found.checkpoint) == ("BERT, int8", "bert-int8", "1e")
    said = bertvision.predictions("bert-int8:1e", workspace=lab.root)
    assert len(said) == len(lab.items("dev"))
    against = bertvision.compare("bert-int8:1e", "bert:1e", workspace=lab.root)
    eight, whole = (
        json.loads((lab.root / folder / "1e/metrics.json").read_text())["rules"]["n-best"]
        for folder in ("quantised", "bert")
    )
    assert against.difference == pytest.approx(
        eight["metrics"][against.metric] - whole["metrics"][against.metric]
    )


def test_the_size_is_a_byte_for_each_quantised_weight(lab: Workspace) -> None:
    shown = bertvision.quantise("1e", workspace=lab.root)
    model = load_snapshot(lab.snapshot_dir("1e")).model
    total = sum(p.numel() for p in model.base_model.parameters())  # as the table counts
    linear = [m.weight for m in model.base_model.modules() if isinstance(m, nn.Linear)]
    assert shown.float_bytes == 4 * total
    saved = sum(3 * w.numel() - 16 * w.shape[0] for w in linear)
    assert shown.bytes == 4 * total - saved
    assert "BERT, int8" in str(shown)


def test_8_bits_are_compared_with_the_encoder_in_the_same_precision(copy: Workspace) -> None:
    """In a workspace of bf16: what float32 gives is scored too, and the table takes that."""
    file = copy.root / "bertvision.yaml"
    file.write_text(file.read_text().replace("precision: '32'", "precision: bf16"))
    shutil.rmtree(copy.root / "quantised")
    space = Workspace.find(copy.root)
    assert space.config.finetune.precision == "bf16"
    own = space.bert_dir("1e") / "metrics.json"
    plain = read_record(own, BertScores, "")  # the shared workspace was scored in float32
    held = quantise(space, "1e")
    assert (held.precision, held.whole) == ("32", plain.rules)
    assert quantise(space, "1e") == held
    plain.rules["n-best"]["metrics"]["f1"] = 99.0  # as if bf16 had given it
    write_record(own, plain)
    row = _table(space)["/BERT, int8"]
    full = held.whole["n-best"]["metrics"]["f1"]
    trivial = row["baseline"]
    assert row["retention"] == pytest.approx(100 * (row["score"] - trivial) / (full - trivial))
    assert "BERT, float32" in str(bertvision.quantise("1e", workspace=space.root))


def test_a_report_is_old_where_8_bits_were_scored_since(copy: Workspace) -> None:
    page = copy.root / "report" / "index.html"
    page.parent.mkdir()
    page.write_text("")
    later = page.stat().st_mtime + 60
    os.utime(page, (later, later))
    assert _is_reported(copy)
    os.utime(copy.root / "quantised/1e/metrics.json", (later + 60, later + 60))
    assert not _is_reported(copy)


@pytest.mark.parametrize("file", ["dev", ".dev-0"])
def test_damaged_logits_name_the_command_that_makes_them(
    copy: Workspace, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr(kept_logits, "_PART", 16_384 if file == "dev" else 5)
    for folder in (copy.root / "quantised/1e", copy.bert_dir("1e")):
        arrays = load_file(folder / "dev.safetensors")
        del arrays["end_logits"]
        with safe_open(folder / "dev.safetensors", framework="numpy") as kept:
            metadata = kept.metadata()
        (folder / "dev.safetensors").unlink()
        save_file(arrays, folder / f"{file}.safetensors", metadata)
        (folder / "metrics.json").unlink()
    with pytest.raises(WorkspaceError, match=r"run `bertvision quantise --checkpoint 1e`"):
        quantise(copy, "1e")
    with pytest.raises(
        WorkspaceError, match=r"run `bertvision logits --checkpoint 1e --split dev`"
    ):
        keep_logits(copy, "1e", ["dev"])


def test_what_is_scored_is_not_scored_again_but_for_other_weights(
    copy: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = quantise(copy, "1e")
    monkeypatch.setattr(quantising, "scored", lambda *_: pytest.fail("ran again"))
    assert quantise(copy, "1e") == held
    shutil.rmtree(copy.root / "snapshots/1e")
    shutil.copytree(copy.root / "snapshots/0.5e", copy.root / "snapshots/1e")
    left_out: list[str] = []
    assert not [r for r in read_results(copy, left_out=left_out) if r.system == "quantised"]
    (message,) = (m for m in left_out if "quantised" in m)
    assert "`bertvision quantise --checkpoint 1e`" in message


def test_an_encoder_that_torch_cannot_quantise_is_refused_by_name(
    lab: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_snapshot(lab.snapshot_dir("1e")).model
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = type("Own", (nn.Linear,), {})
    with pytest.raises(InputError, match="bert has no linear layers that torch can quantise"):
        quantised(model)


# --- the table ---


def _table(space: Workspace, *others: Workspace) -> dict[str, dict[str, Any]]:
    table = find_table(space, "compression", others)
    return {f"{row.get('workspace', '')}/{row['name']}": dict(row) for row in table.rows}


def test_rows_are_what_was_measured(lab: Workspace) -> None:
    rows = _table(lab)
    assert list(rows) == ["/BERT", "/BERT, int8", "/learned-pooling", f"/{LOW}@d1e"]
    shown = {r.run: r for r in bertvision.results(workspace=lab.root) if r.checkpoint == "1e"}
    bert, eight = rows["/BERT"], rows["/BERT, int8"]
    whole = count_encoder_parameters(lab.snapshot_dir("1e"))
    assert (bert["parameters"], bert["percent"], bert["retention"]) == (whole, 100, 100)
    assert bert["how"] == "whole"
    trivial = bert["baseline"]
    assert trivial is not None
    for name, run in (("/BERT, int8", "bert-int8"), ("/learned-pooling", "learned-pooling")):
        score = shown[run].score
        expected = 100 * (score - trivial) / (bert["score"] - trivial)
        assert bert["score"] > trivial
        assert rows[name]["score"] == score
        assert rows[name]["retention"] == pytest.approx(expected)
    of = bertvision.quantise("1e", workspace=lab.root)
    assert eight["smaller"] == of.float_bytes / of.bytes
    assert of.float_bytes == 4 * whole
    low = rows[f"/{LOW}@d1e"]
    one = load_model(lab.snapshot_dir("1e"), num_hidden_layers=1)
    head = 3 + 2 * 32 + 2  # two weights and γ, and the output layer
    assert low["parameters"] == sum(p.numel() for p in one.parameters()) + head
    assert (low["how"], low["layers"], low["speed_up"]) == ("distilled head", 1, None)
    assert low["command"].startswith(f"bertvision train {LOW}@d1e --checkpoint 1e")
    assert rows["/learned-pooling"]["layers"] == 2


def test_speed_ups_are_those_of_the_latencies_and_students_stand_beside(
    copy: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FinetuneOptions(
        model=copy.config.model.name_or_path,
        train=copy.config.data["train"].source,
        dev=copy.config.data["dev"].source,
        save_at=("1e",),
        lr=1e-3,
        tune_fraction=0.2,
        precision="32",
        variant=("keep:1",),
        distil=f"{copy.root}:1e",
    )
    finetune(tmp_path / "student", options)
    student = Workspace.find(tmp_path / "student")
    answers = _answers(monkeypatch)
    heads, beside = [("1e", f"{LOW}@d1e")], [f"{student.root}:1e"]
    measured = measure_latency(
        *(copy, heads), tag="1e", windows=4, rounds=1, precision="32", in_8_bits=True, beside=beside
    )
    names = ["BERT", "BERT, int8", "student:1e", f"{LOW}@d1e"]
    assert [system.name for system in measured.systems] == list(answers) == names
    assert [system.layers for system in measured.systems] == [2, 2, 1, 1]
    ups = {"BERT, int8": 1.5, "student:1e": 1.9, f"{LOW}@d1e": 1.8}
    systems = [s.model_copy(update={"speed_up": ups.get(s.name, 1.0)}) for s in measured.systems]
    write_record(latency_file(copy, "1e"), measured.model_copy(update={"systems": tuple(systems)}))
    rows = _table(copy, student)
    assert rows["lab/BERT"]["speed_up"] == 1
    assert rows["lab/BERT, int8"]["speed_up"] == 1.5
    assert rows[f"lab/{LOW}@d1e"]["speed_up"] == 1.8
    assert rows["lab/learned-pooling"]["speed_up"] is None
    taught, bert = rows["student/BERT keep:1"], rows["lab/BERT"]
    assert (taught["how"], taught["speed_up"]) == ("first layers, distilled", 1.9)
    assert taught["percent"] == 100 * taught["parameters"] / bert["parameters"] < 100
    above = bert["score"] - bert["baseline"]
    expected = 100 * (taught["score"] - taught["baseline"]) / above
    assert taught["retention"] == pytest.approx(expected)
    alone = _table(student)
    assert alone["/BERT keep:1"]["retention"] == 100


def test_measurements_on_other_items_are_compared_with_their_own_whole() -> None:
    common = {"of": "a", "weights_sha256": None, "beside": {}, "speed_up": None, "baseline": 50.0}
    size = {"parameters": 100, "bytes": 400}
    whole = {**common, **size, "score": 90.0, "full": None}
    exits = {**common, **size, "score": 79.0, "full": 80.0}
    chance = {**common, **size, "score": 79.0, "full": 45.0}
    other = {**whole, "of": "b", "score": 70.0, "data": "other data", "speed_up": 1.0}
    found = compared([whole, exits, chance, other])
    assert [row["retention"] for row in found] == [100, pytest.approx(100 * 29 / 30), None, None]
    assert found[3]["speed_up"] is None  # of another encoder, which was not measured beside


def test_early_exits_and_masked_heads_are_the_least_within_a_point(copy: Workspace) -> None:
    weights = read_snapshot_info(copy.snapshot_dir("1e")).weights_sha256
    lines = np.array([[2.0, 1.5, 1.0]])
    exits = ExitsResult(
        criteria=("entropy",),
        thresholds=np.array([[np.nan, 0.1, 0.6]]),
        mean_layers=lines,
        scores=np.array([[80.0, 79.5, 60.0]]),
        least=np.array([1.2]),  # a threshold between those that are shown
        least_scores=np.array([79.25]),
        layers=(1, 2),
        fixed=np.array([55.0, 80.0]),
        weights=np.array([0.5, 0.5]),
        metric="f1",
        trivial=50.0,
        tolerance=None,
        name="1e/dev",
        n_windows=4,
        n_items=4,
    )
    pruned = PruningResult(
        rise=np.zeros((2, 2)),
        sensitivity=np.ones((2, 2)),
        loss=0.5,
        left=np.array([1.0, 0.5, 0.0]),
        score=np.array([70.0, 71.0, 50.0]),
        random=np.array([70.0, 60.0, 50.0]),
        random_sd=np.zeros(3),
        metric="f1",
        trivial=50.0,
        layers=(1, 2),
        heads=(1, 2),
        name="1e/dev",
        n_ranked=2,
        n_scored=2,
        seed=0,
    )
    (copy.root / "analysis").mkdir(exist_ok=True)
    of_tune = replace(exits, name="1e/tune"), replace(pruned, name="1e/tune")
    for result in (exits, pruned, *of_tune):
        command = f"bertvision {result.kind} 1e"
        record = Analysis[type(result)](  # type: ignore[misc]
            command=command, weights_sha256={"1e": weights}, kind=result.kind, result=result
        )
        file = f"{result.kind}-{result.name.replace('/', '-')}.json"
        write_record(copy.root / "analysis" / file, record)
    rows = _table(copy)
    table = find_table(copy, "compression", ()).rows
    assert [r["how"] for r in table][-2:] == ["early exits", "masked heads"]  # of dev alone
    assert len(table) == len(rows)
    early, masked = rows["/exits by entropy"], rows["/50 % of attention heads"]
    assert (early["how"], early["layers"], early["score"]) == ("early exits", 1.2, 79.25)
    assert early["retention"] == pytest.approx(100 * 29.25 / 30)
    assert (early["command"], early["speed_up"]) == ("bertvision exits 1e", None)
    assert masked["retention"] == pytest.approx(100 * 21 / 20)
    assert (masked["how"], masked["command"]) == ("masked heads", "bertvision prune 1e")
    assert masked["percent"] is None  # they are masked, not removed


def test_8_bits_beside_a_gpu_are_refused(copy: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertvision.pipelines.finetuning import latency

    monkeypatch.setattr(latency, "device", lambda: torch.device("cuda"))
    with pytest.raises(InputError, match="8-bit layers run on a CPU.*on cuda"):
        measure_latency(copy, [], tag="1e", in_8_bits=True)


def test_8_bits_are_measured_beside_float32_alone(
    copy: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU of bf16, on which ``auto`` were bf16 for all but them."""
    monkeypatch.setattr(precision, "has_bf16", lambda: True)
    with pytest.raises(InputError, match="--quantised --precision bf16: what is not in 8 bits"):
        measure_latency(copy, [], tag="1e", precision="bf16", in_8_bits=True)
    found = measure_latency(copy, [], tag="1e", windows=1, rounds=1, in_8_bits=True)
    assert found.precision == "32"


def test_nothing_compressed_has_no_table(workspace: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "plain"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    names = bertvision.table(workspace=root)
    assert "compression" not in str(names)
