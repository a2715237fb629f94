"""Answerable or not: labels, scores, and BERT fine-tuned and evaluated on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byhand import fields
from workspaces import answerable_options, write_squad

from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.finetuning.baseline import evaluate_bert
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.registry import TASKS
from bertvision.pipelines.tasks.scores import headline, headline_metric, kind_of_metrics
from bertvision.pipelines.tasks.squad.read import Answer, Question
from bertvision.pipelines.tasks.squad.spans import binary_metrics, window_labels
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)
from bertvision.pipelines.workspace.creation import open_workspace
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.snapshots import count_encoder_parameters, load_snapshot
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace


def question(name: str, *, answerable: bool) -> Question:
    answers = (Answer("anna", 0),) if answerable else ()
    return Question(name, "who ?", "anna", answers, not answerable)


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answerable_options(tiny_bert, tmp_path_factory.mktemp("squad"))


@pytest.fixture(scope="module")
def finished(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    root = tmp_path_factory.mktemp("workspaces") / "finished"
    finetune(root, FinetuneOptions(**options))
    return Workspace.find(root)


def test_a_window_is_answerable_only_where_it_holds_the_gold_answer(finished: Workspace) -> None:
    _, tokenizer, _ = load_snapshot(finished.snapshot_dir("0e"))
    questions, windows = finished.items("train"), finished.windows("train", tokenizer)
    labels = window_labels(windows)
    assert labels.dtype == np.int8
    without_answer = 0
    for w, first in enumerate(windows.first_token):
        asked = questions[windows.item_index[w]]
        tokens = slice(first, first + windows.n_tokens[w])
        places = windows.offset_mapping[tokens]
        held = False
        if not asked.is_impossible:
            text, begin = asked.answers[0]
            covers = (places[:, 0] <= begin) & (places[:, 1] >= begin + len(text))
            held = bool((covers & (places[:, 0] >= 0)).any())  # the answers here are one token
            without_answer += not held
        assert labels[w] == held
    assert without_answer > 5  # windows of answerable questions that do not hold the answer
    assert 0.1 < labels.mean() < 0.9
    np.testing.assert_array_equal(load_task("answerable").labels(windows)["answerable"], labels)


def test_a_question_is_answerable_where_any_of_its_windows_is() -> None:
    asked = [question(f"q{i}", answerable=i in (0, 2, 3)) for i in range(5)]
    logits = np.array(
        # q0: its second window; q1: none; q2: a tie is no answer; q3, q4: yes
        [[2, -1], [0.5, 1], [3, 1], [4, 4], [-5, -4], [0, 7], [1, 0]],
        np.float32,
    )
    rows = np.array([0, 0, 1, 2, 3, 4, 4], np.int32)
    windows = WindowIndex(asked, np.ones(7, np.int32), rows, None)
    scores = load_task("answerable").score(Logits({"logits": logits}, windows), None)
    assert scores.predictions == {"q0": True, "q1": False, "q2": False, "q3": True, "q4": True}
    assert scores.na_scores == {"q0": -0.5, "q1": 2.0, "q2": 0.0, "q3": -1.0, "q4": -7.0}
    assert list(scores.rules) == ["argmax"]
    assert scores.rules["argmax"] == {
        "threshold": None,
        # of 3 said and 3 true, 2 are right; 3 of 5 questions are told right
        "metrics": {
            "accuracy": pytest.approx(60.0),
            "f1": pytest.approx(200 / 3),
            "precision": pytest.approx(200 / 3),
            "recall": pytest.approx(200 / 3),
            "majority": pytest.approx(60.0),
            "total": 5,
        },
    }
    json.dumps(scores._asdict(), allow_nan=False)


@pytest.mark.parametrize(
    ("predicted", "gold", "accuracy", "f1", "precision", "recall", "majority"),
    [
        ("1111", "1110", 75.0, 600 / 7, 75.0, 100.0, 75.0),
        ("0000", "1110", 25.0, 0.0, 0.0, 0.0, 75.0),
        ("0000", "0000", 100.0, 0.0, 0.0, 0.0, 100.0),
        ("10000000", "11000000", 87.5, 200 / 3, 100.0, 50.0, 75.0),
        ("1010", "1010", 100.0, 100.0, 100.0, 100.0, 50.0),
    ],
    ids=["always", "never", "none-true", "half-found", "perfect"],
)
def test_binary_metrics_by_hand(
    predicted: str,
    gold: str,
    accuracy: float,
    f1: float,
    precision: float,
    recall: float,
    majority: float,
) -> None:
    said, true = (np.array([c == "1" for c in text]) for text in (predicted, gold))
    assert binary_metrics(said, true) == {
        "accuracy": pytest.approx(accuracy),
        "f1": pytest.approx(f1),
        "precision": pytest.approx(precision),
        "recall": pytest.approx(recall),
        "majority": pytest.approx(majority),
        "total": len(gold),
    }


def test_the_headline_is_of_the_tuned_rule_where_there_is_one() -> None:
    spans = {"n-best": {"metrics": {"f1": 3.0}}, "argmax": {"metrics": {"f1": 2.0}}}
    assert headline(spans) == {"f1": 3.0}
    assert headline({"argmax": {"metrics": {"accuracy": 1.0}}}) == {"accuracy": 1.0}
    both = {"f1": 1.0, "accuracy": 2.0}
    names = {name: headline_metric(name, both) for name in ("squad_v2", "squad_v1", "answerable")}
    assert names == {"squad_v2": "f1", "squad_v1": "f1", "answerable": "accuracy"}


def test_the_kind_of_a_task_is_that_of_its_metrics() -> None:
    spans = {name for name, entry in TASKS.items() if entry.kind == "span"}
    assert spans == {"squad_v1", "squad_v2"}
    for name in ("squad_v2", "answerable", "sst2", "features"):
        assert load_task(name).kind == TASKS[name].kind
    asked = [question("q", answerable=True), question("r", answerable=False)]
    for name in ("squad_v2", "answerable"):
        task = load_task(name)
        window = WindowIndex(asked, np.ones(2, np.int32), np.arange(2), np.full((2, 2), -1))
        names = ["start_logits", "end_logits"] if task.kind == "span" else ["logits"]
        logits = Logits(
            {x: np.zeros(2 if task.kind == "span" else (2, 2), np.float32) for x in names}, window
        )
        assert logits.kind == task.kind
        assert kind_of_metrics(headline(task.score(logits, None).rules)) == task.kind


def test_bert_is_fine_tuned_and_scored(finished: Workspace) -> None:
    assert finished.config.task.name == "answerable"
    model, tokenizer, info = load_snapshot(finished.snapshot_dir("1e"))
    assert type(model).__name__ == "BertForSequenceClassification"
    assert info.seconds is not None
    assert info.seconds > 0
    windows, asked = finished.windows("dev", tokenizer), finished.items("dev")
    path = finished.bert_dir("1e") / "dev.safetensors"
    saved = Logits.load(path, WindowIndex.of(asked, windows), "bertvision")
    assert list(saved.arrays) == ["logits"]
    assert (finished.bert_dir("1e") / "tune.safetensors").is_file()
    gains: dict[str, float] = {}
    for w, first in enumerate(windows.first_token):
        tokens = slice(first, first + windows.n_tokens[w])
        with torch.inference_mode():
            (logits,) = model(
                torch.from_numpy(windows.input_ids[tokens]).long()[None],
                token_type_ids=torch.from_numpy(windows.token_type_ids[tokens]).long()[None],
            ).logits
        np.testing.assert_allclose(saved.arrays["logits"][w], logits, atol=1e-5)
        name = asked[windows.item_index[w]].id
        gains[name] = max(gains.get(name, -np.inf), float(logits[1] - logits[0]))
    folder = finished.bert_dir("1e")
    predictions = json.loads((folder / "predictions.json").read_text())
    assert predictions == {name: gain > 0 for name, gain in gains.items()}
    metrics = json.loads((folder / "metrics.json").read_text())
    right = sum(predictions[q.id] != q.is_impossible for q in asked)
    found = metrics["rules"]["argmax"]["metrics"]
    assert found["accuracy"] == pytest.approx(100 * right / len(asked))
    assert found["majority"] == pytest.approx(200 / 3)  # two of three questions have an answer
    assert found["total"] == len(asked)
    found_again = evaluate_bert(finished, "1e")
    assert found_again is not None
    assert found_again.to_json() == fields(folder / "metrics.json")


def test_the_pooler_belongs_to_the_encoder(finished: Workspace) -> None:
    folder = finished.snapshot_dir("1e")
    encoder = sum(p.numel() for p in load_snapshot(folder).model.base_model.parameters())
    assert count_encoder_parameters(folder) == encoder
    assert load_snapshot(folder).model.base_model.pooler is not None


def test_status_shows_accuracy_and_f1(finished: Workspace) -> None:
    metrics = json.loads((finished.bert_dir("1e") / "metrics.json").read_text())
    found = status(finished)
    assert found["task"] == "answerable"
    (shown,) = (s["bert"] for s in found["snapshots"] if s["tag"] == "1e")
    argmax = metrics["rules"]["argmax"]["metrics"]
    assert shown == {"accuracy": argmax["accuracy"], "f1": argmax["f1"]}


def test_the_task_on_its_own_continues_the_workspace(
    finished: Workspace, options: dict[str, Any]
) -> None:
    for again in (FinetuneOptions(**options), FinetuneOptions(task="answerable")):
        assert open_workspace(finished.root, again, resume=True).config == finished.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "squad_v2"}, "task = answerable, not squad_v2"),
        ({"task": "answerable", "dev": "squad_v2"}, r"dev\.json, not squad_v2"),
    ],
)
def test_other_tasks_and_data_are_refused(
    finished: Workspace, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkspaceError, match=message):
        open_workspace(finished.root, FinetuneOptions(**change), resume=False)


def test_without_files_the_data_is_that_of_squad_v2() -> None:
    asked = FinetuneOptions(task="answerable")
    assert (asked.source("train"), asked.source("dev")) == ("squad_v2", "squad_v2")
    assert FinetuneOptions(task="squad").source("dev") == "squad"


def test_data_of_one_kind_of_question_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    asked = {**options, "answerable_only": True}
    with pytest.raises(InputError, match="leave it out of --task answerable"):
        open_workspace(tmp_path / "ws", FinetuneOptions(**asked), resume=False)
    document = json.loads(Path(write_squad(tmp_path / "v2.json", 4, 3)).read_text())
    for paragraph in document["data"][0]["paragraphs"]:
        paragraph["qas"] = [qa for qa in paragraph["qas"] if not qa["is_impossible"]]
    (tmp_path / "v1.json").write_text(json.dumps(document))
    asked = {**options, "train": str(tmp_path / "v1.json")}
    with pytest.raises(InputError, match=r"v1\.json has no unanswerable question"):
        open_workspace(tmp_path / "ws", FinetuneOptions(**asked), resume=False)
    assert not (tmp_path / "ws").exists()


def test_a_task_is_known_by_its_name() -> None:
    for name, entry in TASKS.items():
        assert load_task(name).name == name
        assert entry.tokens in ("all", "cls")
    with pytest.raises(ValueError, match="'squat' is no task: did you mean squad_v2"):
        TaskConfig(name="squat")


def test_the_digest_of_settings_is_what_it_was_before_there_were_other_tasks() -> None:
    config = WorkspaceConfig(
        model=ModelConfig(
            name_or_path="bert", weights_sha256="0" * 64, hidden_size=32, num_hidden_layers=2
        ),
        task=TaskConfig(),
        data={"train": DataConfig(source="/train.json", sha256="0" * 64, questions=1)},
        finetune=FinetuneConfig(),
    )
    # resume files and snapshots of older workspaces carry it
    assert config.digest() == "96f8bcc63e6878b2a814445ecad8bbd9aa5e133a1d2c0c7525674442c8b5556a"
