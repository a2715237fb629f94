"""Sentence ordering: ListMLE by its definition, Kendall's τ, windows, and a run to the scores."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from transformers import AutoTokenizer
from workspaces import write_squad

import bertvision
from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.results.intervals import add_intervals
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.ordering import Paragraph, kendall_tau, list_mle, read_paragraphs
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.lightning import TrainingLog
from bertvision.pipelines.training.resume import StoppedError
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

TASK = load_task("ordering")
WORDS = ["anna", "boris", "city", "david", "firm", "king", "london", "paris", "river", "rome"]


def test_list_mle_is_that_of_a_hand_computation() -> None:
    # right order: the second (2), the third (0), the first (1)
    scores, positions = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[2, 0, 1]])
    e = math.e
    expected = -math.log(e**2 / (e + e**2 + 1)) - math.log(1 / (1 + e))
    assert list_mle(scores, positions).item() == pytest.approx(expected, rel=1e-6)


def test_the_probabilities_of_all_orders_are_those_of_plackett_and_luce() -> None:
    scores = torch.tensor([0.3, -1.2, 2.0, 0.7])
    total = 0.0
    for order in itertools.permutations(range(4)):  # order[i]: what stands at place i
        left, by_definition = list(range(4)), 1.0
        for k in order:
            by_definition *= float(scores[k].exp() / sum(scores[j].exp() for j in left))
            left.remove(k)
        positions = torch.empty(4, dtype=torch.int64)
        positions[list(order)] = torch.arange(4)
        found = float((-list_mle(scores[None], positions[None])).exp())
        assert found == pytest.approx(by_definition, rel=1e-5)
        total += found
    assert total == pytest.approx(1, rel=1e-5)


def test_what_is_in_no_list_changes_nothing() -> None:
    scores, positions = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([[1, 0, 2]])
    wide = torch.tensor([[9.0, 1.0, 9.0, 2.0, 0.5, 9.0]], requires_grad=True)
    marks = torch.tensor([[-1, 1, -1, 0, 2, -1]])
    found = list_mle(wide, marks)
    torch.testing.assert_close(found, list_mle(scores, positions))
    (gradient,) = torch.autograd.grad(found.sum(), wide)
    assert gradient[marks < 0].tolist() == [0, 0, 0]
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("seed", range(8))
def test_tau_is_that_of_scipy(seed: int) -> None:
    order = np.random.default_rng(seed).permutation(seed + 2).tolist()
    expected = kendalltau(order, range(len(order))).statistic
    assert kendall_tau(order) == pytest.approx(expected)


def test_an_answer_counts_as_by_hand_and_another_is_refused() -> None:
    item = Paragraph("p", ("a", "b", "c", "d"))
    assert item.label == "0 1 2 3"
    assert TASK.parts(item, "0 1 2 3") == {"tau": (1, 1), "perfect": (1, 1)}
    found = TASK.parts(item, "0 2 1 3")  # one of six pairs is turned
    assert found == {"tau": (pytest.approx(2 / 3), 1), "perfect": (0, 1)}
    assert TASK.parts(item, "3 2 1 0")["tau"] == (-1, 1)
    for wrong in ("0 1 2", "0 1 2 2", ""):
        with pytest.raises(WorkspaceError, match="is none of the 4 sentences of 'p'"):
            TASK.parts(item, wrong)


def test_a_text_has_a_sentence_in_each_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.txt"
    path.write_text("One.\nTwo.\n\n \nAlone.\n\nSame.\nSame.\n\r\nThree.\r\nFour.\r\n")
    found = read_paragraphs(path)
    sentences = [("One.", "Two."), ("Three.", "Four.")]
    assert [item.sentences for item in found.items] == sentences
    assert "2 of 4 paragraphs in" in caplog.text
    path.write_text("Alone.\n")
    with pytest.raises(InputError, match="1 of 1 paragraph in .*: none is left"):
        read_paragraphs(path)
    assert TASK.items_of(TASK.table(found.items)) == found.items


def test_contexts_of_squad_are_parted_into_sentences_once_each(tmp_path: Path) -> None:
    path = Path(write_squad(tmp_path / "train.json", 2, 1))
    document = json.loads(path.read_text())
    paragraph = document["data"][0]["paragraphs"][0]
    paragraph["context"] = 'It is 3.5 m. "So?" he said. Is it? (Yes.) ' + paragraph["context"]
    for qa in paragraph["qas"]:
        qa["answers"], qa["is_impossible"] = [], True
    document["data"][0]["paragraphs"] = [paragraph]
    path.write_text(json.dumps(document))
    (item,) = read_paragraphs(path).items
    assert item.sentences[:2] == ("It is 3.5 m.", '"So?" he said.')
    assert item.sentences[2] == "Is it?"


def test_every_sentence_has_a_special_token_and_its_right_position(tiny_bert: Path) -> None:
    item = Paragraph("p", ("anna wrote .", "boris lives in london .", "the river .", "the king ."))
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    windows = TASK.windows([item], tokenizer, TaskConfig(name="ordering", max_length=64))
    marks = windows.marks["sentences"]
    begins = np.flatnonzero(marks >= 0)
    assert marks[begins].tolist() == [0, 1, 2, 3]
    assert set(windows.input_ids[begins]) == {tokenizer.cls_token_id}
    assert windows.input_ids[-1] == tokenizer.sep_token_id
    assert tuple(windows.token_labels["positions"][begins]) == item.shown
    assert windows.token_type_ids[begins].tolist() == [0, 1, 0, 1]  # and so its other tokens
    changes = np.flatnonzero(np.diff(windows.token_type_ids)) + 1
    assert changes.tolist() == begins[1:].tolist()
    for k, begin in enumerate(begins):
        end = [*begins, len(marks) - 1][k + 1]
        (start, _), (_, stop) = windows.offset_mapping[[begin + 1, end - 1]]
        assert item.text[start:stop] == item.sentences[item.shown[k]]


def test_sentences_are_cut_and_counted_where_the_window_is_short(
    tiny_bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    item = Paragraph("p", ("anna " * 20, "boris wrote", "clara wrote"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    windows = TASK.windows([item], tokenizer, TaskConfig(name="ordering", max_length=16))
    assert windows.n_tokens.tolist() == [16]
    assert (windows.marks["sentences"] >= 0).sum() == 3
    assert "1 of 1 paragraph have more than 16 tokens" in caplog.text
    many = Paragraph("many", tuple(f"a{'b' * i}" for i in range(1, 9)))
    with pytest.raises(InputError, match="'many' has 8 sentences, and a window of 16 tokens no"):
        TASK.windows([many], tokenizer, TaskConfig(name="ordering", max_length=16))


def test_paragraphs_without_room_are_said_before_a_workspace_is_made_or_left_out(
    options: dict[str, Any], tmp_path: Path
) -> None:
    many = tmp_path / "dev.txt"
    many.write_text("".join(f"{word} .\n" for word in WORDS))
    given = {**options, "max_length": 16, "dev": str(many)}
    with pytest.raises(InputError, match="has 10 sentences, and a window of 16 tokens no room"):
        bertvision.finetune(workspace=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()
    many.write_text(f"{many.read_text()}\n{WORDS[0]} .\n{WORDS[1]} .\n")
    given |= {"epochs": 0.1, "save_at": ("0.1e",), "skip_bad": True}
    bertvision.finetune(workspace=tmp_path / "run", **given)
    (item,) = Workspace.find(tmp_path / "run").items("dev")
    assert len(item.sentences) == 2


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, random = tmp_path_factory.mktemp("ordering"), np.random.default_rng(0)
    for split, count in (("train", 160), ("dev", 24)):
        blocks = []
        for _ in range(count):  # words in the order of the alphabet
            words = sorted(random.choice(WORDS, int(random.integers(2, 5)), replace=False))
            blocks.append("\n".join(f"{word} ." for word in words))
        (folder / f"{split}.txt").write_text("\n\n".join(blocks))
    return {
        "model": str(tiny_bert),
        "task": "ordering",
        "data": str(folder),
        "epochs": 16.0,
        "save_at": ("0e", "16e"),
        "lr": 3e-3,
        "max_length": 64,
        "tune_fraction": 0.0,
        "precision": "32",
    }


@pytest.fixture(scope="module")
def finished(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    root = tmp_path_factory.mktemp("workspace")
    bertvision.finetune(workspace=root, **options)
    return Workspace.find(root)


def scores(workspace: Workspace, tag: str) -> dict[str, float]:
    found = json.loads((workspace.bert_dir(tag) / "metrics.json").read_text())
    return dict(found["rules"]["argmax"]["metrics"])


def test_an_order_is_learned_kept_and_compared(finished: Workspace) -> None:
    before, after = scores(finished, "0e"), scores(finished, "16e")
    assert after["tau"] > 40  # five standard errors of random orders
    assert after["tau"] > before["tau"] + 30
    assert after["perfect"] > before["perfect"]
    tokenizer = load_snapshot(finished.snapshot_dir("16e")).tokenizer
    index = WindowIndex.of(finished.items("dev"), finished.windows("dev", tokenizer))
    logits = Logits.load(finished.bert_dir("16e") / "dev.safetensors", index, "finetune")
    assert logits.kind == "order"
    said = json.loads((finished.bert_dir("16e") / "predictions.json").read_text())
    assert TASK.score(logits, None).predictions == said
    found = bertvision.compare("bert:16e", "bert:0e", workspace=finished.root, resamples=100)
    assert (found.metric, found.words) == ("tau", ("paragraphs", "paragraphs"))
    assert found.first_score == pytest.approx(after["tau"])
    rows = read_rows(finished).bert
    add_intervals(finished, rows, left_out := [])
    assert not left_out
    assert rows[0]["tau_low"] < rows[0]["tau"] < rows[0]["tau_high"]


def test_an_interrupted_run_ends_in_the_same_weights(
    finished: Workspace,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = TrainingLog.on_train_batch_end

    def stop(self: TrainingLog, trainer: Any, *rest: Any) -> None:
        real(self, trainer, *rest)
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLog, "on_train_batch_end", stop)
        with pytest.raises(StoppedError):
            bertvision.finetune(workspace=tmp_path, **options)
    bertvision.finetune(workspace=tmp_path, resume=True)
    files = [
        w.snapshot_dir("16e") / "model.safetensors" for w in (Workspace.find(tmp_path), finished)
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_it_is_extracted_and_heads_are_refused(finished: Workspace) -> None:
    bertvision.extract(checkpoint="16e", split="dev", workspace=finished.root)
    split = finished.split("16e", "dev").require_complete()
    assert TASK.items_of(split.table()) == finished.items("dev")
    with pytest.raises(InputError, match="no head learns the task ordering"):
        bertvision.train("learned-pooling", workspace=finished.root)
    row = bertvision.predictions("bert:16e", workspace=finished.root)[0]
    assert row["gold"] == finished.items("dev")[0].label


def test_predict_orders_paragraphs_as_evaluate_does(
    finished: Workspace, options: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"workspace": finished.root, "precision": "32"}
    rows = bertvision.predict("bert:16e", data=f"{options['data']}/dev.txt", **common)
    scored = json.loads((finished.bert_dir("16e") / "predictions.json").read_text())
    assert {row.id: row.answer for row in rows} == scored
    predictor = bertvision.Predictor.load("bert:16e", **common)
    answer = predictor("Bees hum. Ants walk.")
    assert sorted(answer["order"]) == [0, 1]
    assert answer["sentences"] == [["Bees hum.", "Ants walk."][i] for i in answer["order"]]
    for text, count in (("One alone.", "1 sentence"), ("Two. Two.", "2 sentences")):
        with pytest.raises(InputError, match=rf"has {count}: give 2 to 30, none twice"):
            predictor(text)
