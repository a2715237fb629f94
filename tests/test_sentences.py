"""Sentence tasks: what is learned, what is kept, how it is scored, and what changes no score."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer, pipeline

from bertvision.errors import InputError
from bertvision.models.outputs import ClassOutput
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.tasks.data import Sentence, TaskConfig
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import collate

CLASSES = ("no", "perhaps", "yes")
ITEMS = [
    Sentence("a", "anna lives in paris .", None, 2),
    Sentence("b", "boris wrote a book .", "the book was in london .", 0),
    Sentence("c", "", None, 1),
    Sentence("d", "who is king ?", None, None),
]


def task_of(name: str = "csv") -> SentenceTask:
    task = load_task(name)
    assert isinstance(task, SentenceTask)
    return task


def predicted(logits: np.ndarray, items: list[Sentence]) -> Logits:
    rows = np.arange(len(items), dtype=np.int32)
    windows = WindowIndex(items, np.full(len(items), 3, np.int32), rows, None)
    return Logits({"logits": logits}, windows)


def one_hot(classes: list[int], n: int) -> np.ndarray:
    return np.eye(n, dtype=np.float32)[classes]


def test_outputs_are_one_for_each_class_and_one_of_a_score():
    task = task_of()
    classes, scores = TaskConfig(name="csv", classes=CLASSES), TaskConfig(name="csv")
    assert (task.outputs(classes), task.outputs(scores)) == (3, 1)


@pytest.mark.parametrize("classes", [CLASSES, ("no", "yes"), ()])
def test_transformers_own_pipeline_reads_a_snapshot(
    classes: tuple[str, ...], tiny_bert: Path, tmp_path: Path
):
    """Names of the classes with their probabilities, and a score as it is.

    Also from a checkpoint whose output layer was made for something else, and from those saved
    before the names were written.
    """
    task, config = task_of(), TaskConfig(name="csv", classes=classes)
    tokenizer, text = AutoTokenizer.from_pretrained(tiny_bert), ITEMS[0].text
    other = {"num_labels": len(classes) or 1, "problem_type": "multi_label_classification"}
    first = load_model(tiny_bert, task.model_class, **other)
    first.save_pretrained(tmp_path / "old")
    model = load_model(tmp_path / "old", task.model_class, **task.model_options(config))
    assert model.state_dict().keys() == first.state_dict().keys()
    assert all(torch.equal(x, first.state_dict()[name]) for name, x in model.state_dict().items())
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "new")
    said = pipeline("text-classification", str(tmp_path / "new"), device="cpu")(text, top_k=None)
    with torch.no_grad():
        output = model(**tokenizer(text, return_tensors="pt"))
    assert output.loss is None
    expected = output.logits[0].softmax(0) if classes else output.logits[0]
    names = classes or ("score",)
    assert {x["label"]: x["score"] for x in said} == pytest.approx(
        dict(zip(names, expected.tolist(), strict=True))
    )


def test_windows_labels_and_store_agree(tiny_bert: Path):
    task, config = task_of(), TaskConfig(name="csv", classes=CLASSES, max_length=16)
    windows = task.windows(ITEMS, AutoTokenizer.from_pretrained(tiny_bert), config)
    assert len(windows) == len(ITEMS)
    for arrays in (task.labels(windows), task.stored(windows)):
        assert arrays["label"].tolist() == [2, 0, 1, -1]
        assert np.issubdtype(arrays["label"].dtype, np.integer)
    assert windows.n_tokens.tolist() == [7, 14, 2, 6]
    scored = [item._replace(label=0.5) for item in ITEMS[:3]] + ITEMS[3:]
    found = task.labels(task.windows(scored, AutoTokenizer.from_pretrained(tiny_bert), config))
    assert found["label"].dtype == np.float32
    assert np.array_equal(found["label"], [0.5, 0.5, 0.5, np.nan], equal_nan=True)


@pytest.mark.parametrize("labels", [[2, 0, 1, None], [0.5, -1.25, 3.0, None], [None] * 4])
def test_table_gives_the_items_back(labels: list[float | None]):
    task = task_of()
    items = [item._replace(label=x) for item, x in zip(ITEMS, labels, strict=True)]
    found = task.items_of(task.table(items))
    assert found == items
    assert [type(i.label) for i in found] == [type(i.label) for i in items]


def test_loss_is_summed_cross_entropy_and_the_heads_mean(tiny_bert: Path):
    task, config = task_of(), TaskConfig(name="csv", classes=CLASSES, max_length=16)
    windows = task.windows(ITEMS[:3], AutoTokenizer.from_pretrained(tiny_bert), config)
    batch = collate(windows, windows.first_token, np.arange(3), 0, task.labels(windows))
    logits = torch.randn(3, 3)
    output = SimpleNamespace(logits=logits)
    expected = functional.cross_entropy(logits, torch.tensor([2, 0, 1]), reduction="none")
    torch.testing.assert_close(task.loss(output, batch), expected.sum())
    stored = {"label": torch.from_numpy(task.stored(windows)["label"])}
    torch.testing.assert_close(task.head_loss(ClassOutput(logits), stored), expected.mean())
    assert task.logits(output)["logits"] is logits


def test_loss_of_scores_is_the_squared_error(tiny_bert: Path):
    task, config = task_of(), TaskConfig(name="csv", max_length=16)
    items = [item._replace(label=x) for item, x in zip(ITEMS, (0.5, 2.25, -1.0), strict=False)]
    windows = task.windows(items, AutoTokenizer.from_pretrained(tiny_bert), config)
    batch = collate(windows, windows.first_token, np.arange(3), 0, task.labels(windows))
    logits = torch.tensor([[0.0], [2.0], [1.0]])
    found = task.loss(SimpleNamespace(logits=logits), batch)
    torch.testing.assert_close(found, torch.tensor(0.25 + 0.0625 + 4))
    stored = {"label": torch.from_numpy(task.stored(windows)["label"])}
    torch.testing.assert_close(task.head_loss(ClassOutput(logits), stored), found / 3)


def test_scores_of_classes_and_which_tasks_have_f1():
    items = [Sentence(str(i), "a", "b", label) for i, label in enumerate([1, 1, 0, 0])]
    logits = one_hot([1, 0, 0, 0], 2)
    for name in ("rte", "mrpc", "cola", "csv"):
        scores = task_of(name).score(predicted(logits, items), None)
        metrics = scores.rules["argmax"]["metrics"]
        assert scores.rules["argmax"]["threshold"] is None
        assert metrics["accuracy"] == 75
        assert metrics["matthews"] == pytest.approx(100 / 3**0.5)
        assert metrics["majority"] == 50
        assert metrics["total"] == 4
        assert ("f1" in metrics) == (name == "mrpc")
        assert scores.predictions == {"0": 1, "1": 0, "2": 0, "3": 0}
        assert scores.na_scores == {}
    assert task_of("mrpc").score(predicted(logits, items), None).rules["argmax"]["metrics"][
        "f1"
    ] == pytest.approx(200 / 3)


def test_scores_of_a_regression():
    items = [Sentence(str(i), "a", "b", x) for i, x in enumerate([0.0, 1.0, 2.0, 5.0])]
    logits = np.array([[0.1], [0.2], [0.3], [0.35]], np.float32)
    scores = task_of("stsb").score(predicted(logits, items), None)
    metrics = scores.rules["argmax"]["metrics"]
    assert metrics["spearman"] == pytest.approx(100)
    assert metrics["pearson"] == pytest.approx(100 * np.corrcoef(logits[:, 0], [0, 1, 2, 5])[0, 1])
    assert scores.predictions["3"] == pytest.approx(0.35)


def test_what_cannot_be_scored_is_refused():
    task, items = task_of(), [Sentence("a", "x", None, 1), Sentence("b", "y", None, 0)]
    nan = np.array([[0.0, np.nan], [1.0, 0.0]])
    with pytest.raises(InputError, match="NaN"):
        task.score(predicted(nan, items), None)
    with pytest.raises(InputError, match="1 of 2 items have no label"):
        task.score(predicted(np.eye(2), [items[0], items[1]._replace(label=None)]), None)
    with pytest.raises(InputError, match=r"shape \(3, 2\).*2 items"):
        task.score(predicted(np.zeros((3, 2)), items), None)
