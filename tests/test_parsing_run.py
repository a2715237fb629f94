"""Dependency parsing from fine-tuning to the report, and what refuses it by name."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byhand import fields, rewrite
from safetensors.numpy import load_file
from transformers import BertConfig, BertForMaskedLM
from treebanks import write_treebank

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.finetuning import kept_logits
from bertvision.pipelines.finetuning.kept_logits import keep_logits, predict_logits
from bertvision.pipelines.results.intervals import add_intervals
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.parsing import attached, named
from bertvision.pipelines.training.lightning import TrainingLog
from bertvision.pipelines.training.resume import StoppedError
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = write_treebank(tmp_path_factory.mktemp("treebank") / "drawn", train=60, dev=12)
    return {
        "model": str(tiny_bert),
        "task": "parsing",
        "data": str(folder),
        "epochs": 6.0,
        "save_at": ("0e", "2e", "6e"),
        "batch_size": 8,
        "lr": 3e-3,
        "max_length": 32,
        "precision": "32",
        "seed": 1,
    }


@pytest.fixture(scope="module")
def finished(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    root = tmp_path_factory.mktemp("parsing")
    bertvision.finetune(workspace=root, **options)
    return Workspace.find(root)


def scores(workspace: Workspace, tag: str) -> dict[str, float]:
    found = json.loads((workspace.bert_dir(tag) / "metrics.json").read_text())
    return dict(found["rules"]["argmax"]["metrics"])


def test_a_parser_is_learned(finished: Workspace) -> None:
    before, after = scores(finished, "0e"), scores(finished, "6e")
    assert after["las"] > 80 > 30 > before["las"]
    assert after["uas"] >= after["las"]
    assert after["total"] == 12


def test_scores_are_those_of_the_predictions_and_of_the_kept_logits(finished: Workspace) -> None:
    items = finished.items("dev")
    said = json.loads((finished.bert_dir("6e") / "predictions.json").read_text())
    counts = [attached(said[item.id], item) for item in items]
    las = 100 * sum(c.labelled for c in counts) / sum(c.words for c in counts)
    assert scores(finished, "6e")["las"] == pytest.approx(las)
    _, tokenizer, info = load_snapshot(finished.snapshot_dir("6e"))
    index = WindowIndex.of(items, finished.windows("dev", tokenizer))
    logits = Logits.load(finished.bert_dir("6e") / "dev.safetensors", index, "finetune")
    assert logits.kind == "tree"
    again = finished.dataset().task.score(logits, None)
    assert again.predictions == said
    assert info.task.classes == finished.config.task.classes


def test_an_interrupted_run_ends_in_the_same_weights(
    finished: Workspace,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = TrainingLog.on_train_batch_end

    def stop(self: TrainingLog, trainer: Any, *rest: Any) -> None:
        real(self, trainer, *rest)
        if trainer.global_step == 11:  # inside the second epoch
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLog, "on_train_batch_end", stop)
        with pytest.raises(StoppedError):
            bertvision.finetune(workspace=tmp_path, **options)
    found = Workspace.find(tmp_path)
    assert not found.snapshot_dir("2e").exists()
    bertvision.finetune(workspace=tmp_path, resume=True)
    for tag in ("2e", "6e"):
        files = [w.snapshot_dir(tag) / "model.safetensors" for w in (found, finished)]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert scores(found, tag) == scores(finished, tag)


def test_two_snapshots_are_compared_over_sentences(finished: Workspace) -> None:
    found = bertvision.compare("bert:6e", "bert:2e", workspace=finished.root, resamples=200)
    assert found.metric == "las"
    assert found.first_score == pytest.approx(scores(finished, "6e")["las"])
    assert found.low <= found.difference <= found.high
    assert found.baseline == scores(finished, "6e")["majority"] < found.first_score
    assert found.words == ("sentences", "sentences")
    by_uas = bertvision.compare(
        "bert:6e", "bert:2e", metric="uas", workspace=finished.root, resamples=200
    )
    assert by_uas.second_score == pytest.approx(scores(finished, "2e")["uas"])
    with pytest.raises(InputError, match="can be compared by las and uas"):
        bertvision.compare("bert:6e", "bert:2e", metric="f1", workspace=finished.root)


def test_what_the_commonest_arc_scores_is_known_where_one_result_tells_it(
    finished: Workspace, tmp_path: Path
) -> None:
    """Snapshots that an earlier version scored have it from those that are scored since."""
    root = shutil.copytree(finished.root, tmp_path / "copy")
    for tag in ("0e", "6e"):
        values = fields(path := root / "bert" / tag / "metrics.json")
        del values["rules"]["argmax"]["metrics"]["majority"]
        rewrite(path, values)
    space = Workspace.find(root)
    known = scores(finished, "2e")["majority"]
    found = bertvision.compare("bert:6e", "bert:0e", workspace=root, resamples=10)
    assert found.baseline == read_rows(space).baseline == known
    kept = [
        {row["checkpoint"]: row["retention"] for row in read_rows(s).bert}
        for s in (space, finished)
    ]
    assert kept[0] == kept[1]
    assert kept[0]["2e"] != 100 * scores(finished, "2e")["las"] / scores(finished, "6e")["las"]


def test_scores_have_intervals_over_sentences(finished: Workspace) -> None:
    rows = read_rows(finished).bert
    add_intervals(finished, rows, left_out := [])
    assert not left_out
    last = next(row for row in rows if row["checkpoint"] == "6e")
    assert last["score"] == last["las"] == pytest.approx(scores(finished, "6e")["las"])
    assert last["las_low"] < last["las"] < last["las_high"]
    assert last["score_low"] == last["las_low"]
    assert last["uas_low"] <= last["uas"] <= last["uas_high"]


def test_predictions_name_relations(finished: Workspace) -> None:
    rows = bertvision.predictions("bert:6e", workspace=finished.root)
    item = finished.items("dev")[0]
    gold = zip(item.sentence.heads, item.sentence.relations, strict=True)
    assert rows[0]["gold"] == " ".join(f"{head}:{relation}" for head, relation in gold)
    assert rows[0]["text"] == item.text
    assert set(rows[0]) == {"id", "text", "gold", "answer", "las", "uas"}


def test_the_report_has_the_scores(finished: Workspace, tmp_path: Path) -> None:
    bertvision.report(out=tmp_path, workspace=finished.root)
    page = (tmp_path / "index.html").read_text()
    assert "LAS" in page
    assert "UAS" in page
    assert f"{scores(finished, '6e')['las']:.1f}" in page
    assert "commonest arc" in page
    assert "Always giving one arc would score" in page


def test_its_activations_are_extracted_with_the_trees(finished: Workspace) -> None:
    bertvision.extract(checkpoint="6e", split="dev", workspace=finished.root)
    split = finished.split("6e", "dev").require_complete()
    assert finished.dataset().task.items_of(split.table()) == finished.items("dev")
    assert len(split) == 12


def test_heads_are_refused_by_name(finished: Workspace) -> None:
    for train in (bertvision.train, bertvision.sweep):
        for head in ("learned-pooling", "cls-last-state"):
            with pytest.raises(InputError, match="no head learns the task parsing"):
                train(head, workspace=finished.root)
    with pytest.raises(InputError, match="no head learns the task parsing"):
        bertvision.sweep(workspace=finished.root)
    with pytest.raises(InputError, match="the answers of parsing are right in parts"):
        bertvision.error_analysis("bert:6e", workspace=finished.root)


@pytest.mark.parametrize("variant", ["exits:1", "cls-norm", "isobn"])
def test_variants_that_read_one_token_refuse_it(
    variant: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"--variant {variant} is for tasks of the kind .*tree"):
        bertvision.finetune(workspace=tmp_path, **options, variant=(variant,))


def test_layers_from_a_store_give_the_trees_of_layers_that_are_run(
    options: dict[str, Any], tmp_path: Path
) -> None:
    short = {**options, "epochs": 1.0, "save_at": ("1e",)}
    found = []
    for variant in ("freeze:1", "freeze-stored:1"):
        root = tmp_path / variant.partition(":")[0]
        bertvision.finetune(workspace=root, **short, variant=(variant,))
        found.append(load_file(Workspace.find(root).bert_dir("1e") / "dev.safetensors"))
    for name in ("arcs", "relations"):
        assert np.corrcoef(found[0][name].ravel(), found[1][name].ravel())[0, 1] > 0.99


def test_a_parser_is_learned_beside_masked_words(options: dict[str, Any], tmp_path: Path) -> None:
    model = shutil.copytree(options["model"], tmp_path / "model")
    BertForMaskedLM(BertConfig.from_pretrained(model)).save_pretrained(model)
    given = {**options, "model": str(model), "save_at": ("0e", "6e"), "variant": ("mlm:0.5",)}
    bertvision.finetune(workspace=tmp_path / "run", **given)
    space = Workspace.find(tmp_path / "run")
    assert scores(space, "6e")["las"] > 60 > 30 > scores(space, "0e")["las"]


def test_logits_in_parts_and_in_bf16_are_those_of_one_run(
    finished: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their arrays are ragged: windows have as many rows as words, or as pairs of them."""
    space = Workspace.find(shutil.copytree(finished.root, tmp_path / "copy"))
    path = space.bert_dir("6e") / "dev.safetensors"
    whole = load_file(path)
    path.unlink()
    monkeypatch.setattr(kept_logits, "_PART", 5)
    keep_logits(space, "6e", ["dev"])
    found = load_file(path)
    model, tokenizer, _ = load_snapshot(space.snapshot_dir("6e"))
    windows, task = space.windows("dev", tokenizer), space.dataset().task
    half, _ = predict_logits(model, task, windows, padding=0, precision="bf16", desc=None)
    for name in ("arcs", "relations"):
        np.testing.assert_allclose(found[name], whole[name], atol=1e-4)
        assert half[name].dtype == np.float32
        assert np.corrcoef(half[name].ravel(), whole[name].ravel())[0, 1] > 0.99


def test_attention_heads_are_pruned_and_times_measured(finished: Workspace, tmp_path: Path) -> None:
    root = shutil.copytree(finished.root, tmp_path / "copy")
    pruned = bertvision.prune("6e", items=12, orders=2, workspace=root)
    assert pruned.metric == "las"
    assert bertvision.latency(checkpoint="6e", windows=4, rounds=1, workspace=root).systems


def test_relations_that_the_training_data_lack_are_counted(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(options["data"], folder)
    dev = folder / "xx_drawn-ud-dev.conllu"
    text = dev.read_text().replace("\tpunct\t", "\tnew:one\t")
    dev.unlink()
    (folder / f"{dev.name}.gz").write_bytes(gzip.compress(text.encode()))
    short = {**options, "data": str(folder), "epochs": 0.2, "save_at": ("0.2e",)}
    bertvision.finetune(workspace=tmp_path / "run", **short)
    assert "1 relation of 12 words in dev are not in the training data (new:one)" in caplog.text


def test_predict_parses_texts_as_evaluate_does(
    finished: Workspace, options: dict[str, Any], tmp_path: Path
) -> None:
    """Trees in the file are not looked at: one without them is parsed alike, and scores as dev."""
    dev = next(Path(options["data"]).glob("*dev.conllu"))
    bare = tmp_path / "bare.conllu"
    words = [line.split("\t") for line in dev.read_text().split("\n")]
    bare.write_text("\n".join("\t".join([*x[:2], *"________"][: len(x)]) for x in words))
    common: dict[str, Any] = {"workspace": finished.root, "precision": "32"}
    rows = bertvision.predict("bert:6e", data=bare, output=tmp_path / "out.conllu", **common)
    items = finished.items("dev")
    classes = finished.config.task.classes
    scored = json.loads((finished.bert_dir("6e") / "predictions.json").read_text())
    assert [row.answer for row in rows] == [named(scored[item.id], classes) for item in items]
    written = [line.split("\t") for line in (tmp_path / "out.conllu").read_text().split("\n")]
    said = [(x[1], x[6], x[7]) for x in written if len(x) == 10]
    assert said == [
        (word, str(head), relation)
        for row in rows
        for word, head, relation in zip(row.words, row.heads, row.relations, strict=True)
    ]
    predictor = bertvision.Predictor.load("bert:6e", **common)
    text = items[0].text
    assert predictor(text)["heads"] == list(rows[0].heads)
    predictor.save_pretrained(tmp_path / "saved")
    assert bertvision.Predictor.from_pretrained(tmp_path / "saved", precision="32")(
        [text]
    ) == predictor([text])
    with pytest.raises(InputError, match="written as .jsonl, .csv, .json, .conllu"):
        bertvision.predict("bert:6e", text=text, output=tmp_path / "out.conll", **common)
