"""The output layer that a checkpoint brings from another fine-tuning."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from workspaces import write_squad

from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import PretrainedEncoder
from bertvision.pipelines.encoders.output_layer import choose_output, load_with_output
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

NAMES = ("NEUTRAL", "ENTAILMENT", "CONTRADICTION")
SORTED = ("contradiction", "entailment", "neutral")
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 20,
    "max_position_embeddings": 16,
}
INPUTS = {"input_ids": torch.arange(5)[None] + 3, "attention_mask": torch.ones(1, 5).long()}


def classifier(folder: Path, names: tuple[str, ...], family: str = "bert") -> PretrainedEncoder:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        family,
        **SIZES,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
        pad_token_id=0,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    return PretrainedEncoder(folder, str(folder), None, AutoConfig.from_pretrained(folder))


def begun(checkpoint: PretrainedEncoder, classes: tuple[str, ...]) -> tuple[Any, PreTrainedModel]:
    task = load_task("csv")
    options = task.model_options(TaskConfig(name="csv", classes=classes))
    choice = choose_output(checkpoint, task.model_class, options)
    place, kind = checkpoint.folder, task.model_class
    model = load_with_output(
        place, kind, checkpoint.config, options, origin=choice.origin, seed=3
    ).eval()
    return choice, model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**INPUTS).logits[0]
    return found


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert"]
)
def test_rows_follow_the_names_of_classes(family: str, tmp_path: Path):
    checkpoint = classifier(tmp_path, NAMES, family)
    theirs = logits(AutoModelForSequenceClassification.from_pretrained(tmp_path).eval())
    choice, model = begun(checkpoint, SORTED)
    assert choice.origin == "reordered"
    assert "NEUTRAL, ENTAILMENT, CONTRADICTION" in choice.reason
    assert torch.allclose(logits(model), theirs[[2, 1, 0]])
    assert model.config.id2label == dict(enumerate(SORTED))


@pytest.mark.parametrize(
    ("names", "classes", "origin"),
    [
        (("no", "yes"), ("no", "yes"), "kept"),
        (("Not entailment", "Entailment"), ("not_entailment", "entailment"), "kept"),
        (("LABEL_0", "LABEL_1"), ("0", "1"), "kept"),
        (("LABEL_0", "LABEL_1"), ("1", "0"), "reordered"),
        (("LABEL_0", "LABEL_1"), ("1", "2"), "new"),
        (("LABEL_0", "LABEL_1"), ("no", "yes"), "new"),
        (("a", "A"), ("a", "A"), "new"),  # without case they are one
        (("yes", "no", "maybe"), ("no", "yes"), "new"),
        (("no", "yes"), (), "new"),
        (("LABEL_0",), (), "kept"),
    ],
)
def test_names_decide(
    names: tuple[str, ...], classes: tuple[str, ...], origin: str, tmp_path: Path
):
    choice, model = begun(classifier(tmp_path, names), classes)
    assert choice.origin == origin
    assert model.config.num_labels == (len(classes) or 1)
    old = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    new = model.state_dict()
    assert all(
        torch.equal(value, new[name])
        for name, value in old.state_dict().items()
        if not name.startswith("classifier.")
    )
    if origin == "new":
        assert "new output layer" in choice.reason
        assert not new["classifier.bias"].any()
        assert new["classifier.weight"].std() < 0.05
        again = begun(PretrainedEncoder(tmp_path, "", None, old.config), classes)[1]
        assert torch.equal(again.state_dict()["classifier.weight"], new["classifier.weight"])


def test_a_checkpoint_without_an_output_layer_says_nothing(tiny_bert: Path):
    checkpoint = PretrainedEncoder(tiny_bert, "", None, AutoConfig.from_pretrained(tiny_bert))
    assert begun(checkpoint, ("LABEL_0", "LABEL_1"))[0] == (None, "")


def test_weights_of_another_shape_are_named(tmp_path: Path):
    checkpoint = classifier(tmp_path, NAMES)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 21}))
    with pytest.raises(InputError, match=r"word_embeddings\.weight of shape \(20, 8\), and \(21,"):
        begun(checkpoint, ("no", "yes"))


def test_names_that_changed_since_are_refused(tmp_path: Path):
    checkpoint = classifier(tmp_path, NAMES)
    checkpoint.config.id2label = dict(enumerate("abc"))
    task = load_task("csv")
    options = task.model_options(TaskConfig(name="csv", classes=SORTED))
    with pytest.raises(InputError, match="names the classes a, b, c now"):
        load_with_output(
            *(tmp_path, task.model_class, checkpoint.config, options), origin="reordered", seed=0
        )


def taught(folder: Path, tiny_bert: Path) -> list[str]:
    """A classifier of three words, its labels in no order; rows of a file that it is right on."""
    words = dict(zip(NAMES, ("anna", "rome", "city"), strict=True))
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        tiny_bert,
        id2label=dict(enumerate(NAMES)),
        label2id={name: i for i, name in enumerate(NAMES)},
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    rows = [(f"{words[n]} founded {i}", n) for i in range(10) for n in NAMES]
    inputs = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
    gold = torch.tensor([NAMES.index(n) for _, n in rows])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(30):
        loss = model(**inputs, labels=gold).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model.eval()(**inputs).logits.argmax(1) == gold).all()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return [f"{text},{name.lower()}" for text, name in rows]


def test_a_classifier_of_others_is_as_right_at_0e(
    tiny_bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    rows = taught(tmp_path / "model", tiny_bert)
    scores = {}
    for name in ("three", "two"):
        kept = [row for row in rows if name == "three" or not row.endswith("neutral")]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *kept]))
        options = FinetuneOptions(
            model=str(tmp_path / "model"),
            task="csv",
            data=str(tmp_path / f"{name}.csv"),
            dev_fraction=0.3,
            save_at=("0e",),
            max_length=16,
            precision="32",
        )
        with caplog.at_level(logging.INFO):
            finetune(tmp_path / name, options)
        space = Workspace.find(tmp_path / name)
        snapshot = load_snapshot(space.snapshot_dir("0e"))
        assert snapshot.info.pretrained.output_layer == ("reordered" if name == "three" else "new")
        classes = SORTED if name == "three" else SORTED[:2]
        config = AutoConfig.from_pretrained(space.snapshot_dir("0e"))
        assert config.id2label == dict(enumerate(classes))
        metrics = json.loads((space.bert_dir("0e") / "metrics.json").read_text())
        scores[name] = metrics["rules"]["argmax"]["metrics"]["accuracy"]
    assert scores["three"] == 100
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "its classes, NEUTRAL, ENTAILMENT, CONTRADICTION, are put into the order" in said
    assert (
        "the data have 2 classes (contradiction, entailment): fine-tuning begins with a new" in said
    )


def test_spans_begin_from_a_classifier(tiny_bert: Path, tmp_path: Path):
    classifier(tmp_path / "model", NAMES)
    config = AutoConfig.from_pretrained(tiny_bert, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "model")
    options = FinetuneOptions(
        model=str(tmp_path / "model"),
        train=write_squad(tmp_path / "train.json", 4, 1),
        dev=write_squad(tmp_path / "dev.json", 2, 2),
        save_at=("0e",),
        precision="32",
    )
    finetune(tmp_path / "run", options)
    model: Any = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "run/snapshots/0e")
    assert model.qa_outputs.out_features == 2
