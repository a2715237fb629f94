"""Texts in, answers out: what `evaluate` scores, in the form of transformers' pipelines."""

from __future__ import annotations

import csv
import json
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import make_family
from hubs import Hub
from huggingface_hub import HfApi
from terminal import done, run
from torch import Tensor
from transformers import pipeline

import bertvision
from bertvision.errors import BertvisionWarning, InputError, UnknownNameError, WorkspaceError
from bertvision.models.heads import SpanHead
from bertvision.pipelines.prediction import answers
from bertvision.pipelines.prediction.backbone import Backbone
from bertvision.pipelines.prediction.inputs import layout_of
from bertvision.pipelines.prediction.predictor import Predictor, load_predictors, together
from bertvision.pipelines.prediction.source import find_source
from bertvision.pipelines.results.intervals import add_intervals
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import TASKS
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace

WORDS = ["anna", "was", "born", "in", "1901", "who", "founded", "the", "firm", "."]
QUESTION = {"question": "who founded the firm ?", "context": "anna founded the firm in 1901 ."}


def write_rows(path: Path, count: int, seed: int, *, scores: bool) -> str:
    """Pairs of texts with a class or a score of them."""
    drawn = random.Random(seed)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["first", "second", "label"])
        for i in range(count):
            texts = [" ".join(drawn.choices(WORDS, k=drawn.randint(2, 12))) for _ in range(2)]
            rows.writerow([*texts, drawn.random() * 5 if scores else ["no", "yes", "maybe"][i % 3]])
    return str(path)


def make_pairs(model: Path, folder: Path, *, scores: bool, **options: Any) -> Path:
    """A workspace of pairs of texts with one snapshot."""
    root = folder / "workspace"
    bertvision.finetune(
        model=str(model),
        task="csv",
        train=write_rows(folder / "train.csv", 36, 1, scores=scores),
        dev=write_rows(folder / "dev.csv", 12, 2, scores=scores),
        text="first",
        save_at="1",
        batch_size=8,
        precision="32",
        workspace=root,
        **{"pair": "second", "lr": 1e-3, **options},
    )
    return root


def make_sentences(model: Path, folder: Path, *, scores: bool) -> Path:
    """As `make_pairs`, with the head cls-learned-pooling on the snapshot."""
    root = make_pairs(model, folder, scores=scores)
    common: dict[str, Any] = {"precision": "32", "workspace": root}
    bertvision.extract("1e", encoding="float32", **common)
    bertvision.train("cls-learned-pooling", checkpoint="1e", epochs=2, **common)
    bertvision.evaluate("cls-learned-pooling", **common)
    return root


@pytest.fixture(scope="module")
def classes(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentences(tiny_bert, tmp_path_factory.mktemp("classes"), scores=False)


@pytest.fixture(scope="module")
def scores(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sentences(tiny_bert, tmp_path_factory.mktemp("scores"), scores=True)


def load(names: Sequence[str], root: Path) -> list[Predictor]:
    return load_predictors([find_source(name, root) for name in names], "32")


def stored(root: Path, place: str) -> dict[str, Any]:
    """The predictions that were scored."""
    values: dict[str, Any] = json.loads((root / place / "predictions.json").read_text())
    return values


SYSTEMS = {
    "bert:1e": "bert/1e",
    "bert:0.5e": "bert/0.5e",
    "adapter-64-shared:1e": "heads/1e/adapter-64-shared/eval/1e",
    "learned-pooling@s1:0.5e": "heads/0.5e/learned-pooling@s1/eval/0.5e",
    "learned-pooling:0.5e:1e": "heads/0.5e/learned-pooling/eval/1e",
    "max-bert+adapter-64-shared:1e": "ensembles/1e/max-bert+adapter-64-shared@1e",
}


def test_answers_to_questions_are_those_that_were_scored(lab: Workspace) -> None:
    systems = {name: place for name, place in SYSTEMS.items() if (lab.root / place).is_dir()}
    assert len(systems) >= 5
    items = lab.items("dev")
    predictors = load([*systems], lab.root)
    for predictor, logits in zip(predictors, together(predictors, items), strict=True):
        said = {
            item.id: row["answer"] for item, row in zip(items, predictor.read(logits), strict=True)
        }
        assert said == stored(lab.root, systems[predictor.record.name]), predictor


def test_classes_are_those_that_were_scored_and_those_of_the_pipeline(classes: Path) -> None:
    items = Workspace.find(classes).items("dev")
    for name, place in (
        ("bert:1e", "bert/1e"),
        ("cls-learned-pooling", "heads/1e/cls-learned-pooling/eval/1e"),
    ):
        (predictor,) = load([name], classes)
        names = predictor.record.task.classes
        said = predictor.answers(items)
        expected = stored(classes, place)
        assert [row["label"] for row in said] == [names[expected[item.id]] for item in items]
        for row in said:
            assert sum(row["probabilities"].values()) == pytest.approx(1)
            assert row["score"] == max(row["probabilities"].values())
    both = load(["bert:1e", "cls-learned-pooling:1e"], classes)
    for predictor, logits in zip(both, together(both, items), strict=True):
        (alone,) = load([predictor.record.name], classes)
        expected_logits = alone.logits(items).arrays["logits"]
        assert np.allclose(logits.arrays["logits"], expected_logits, atol=1e-5)
    (own,) = load(["bert:1e"], classes)
    theirs = pipeline("text-classification", model=str(classes / "snapshots" / "1e"), device="cpu")
    pairs = [{"text": item.text, "text_pair": item.pair} for item in items]
    for call in ({}, {"top_k": None}, {"top_k": 2}):
        assert_same(own(pairs, **call), theirs(pairs, **call))
        assert_same(own(pairs[0], **call), theirs(pairs[0], **call))


def test_heads_on_other_poolings_answer_what_was_scored(classes: Path, tmp_path: Path) -> None:
    """Alone, from one pass beside the encoder's own output layer, and saved."""
    common: dict[str, Any] = {"precision": "32", "workspace": classes}
    bertvision.extract("1e", pool="mean,last", encoding="float32", **common)
    bertvision.train("cls-learned-pooling", pool="mean", epochs=2, **common)
    bertvision.train("cls-last-state@plast@l1", checkpoint="1e", **common)
    names = ["cls-learned-pooling@pmean", "cls-last-state@plast@l1"]
    rows = bertvision.evaluate(names, **common)
    space = Workspace.find(classes)
    items = space.items("dev")
    for name, row in zip(names, rows, strict=True):
        config = bertvision.load_head(classes / "heads" / "1e" / name).config
        assert row.provenance["tokens"] == config.tokens
        assert "tokens" not in config.training.model_dump()
        (alone,) = load([name], classes)
        said, expected = alone.answers(items), stored(classes, f"heads/1e/{name}/eval/1e")
        labels = alone.record.task.classes
        assert [answer["label"] for answer in said] == [labels[expected[x.id]] for x in items]
        beside = together(load(["bert:1e", name], classes), items)[1]
        assert np.allclose(beside.arrays["logits"], alone.logits(items).arrays["logits"], atol=1e-5)
        alone.save_pretrained(tmp_path / name)
        assert Predictor.from_pretrained(tmp_path / name, precision="32").answers(items) == said
    measured = bertvision.latency(names, checkpoint="1e", windows=4, **common)
    assert [system.name for system in measured.systems] == ["BERT", *names]
    (row,) = bertvision.sweep("cls-learned-pooling", pool="mean", epochs=2, **common)
    assert row.name == names[0]
    with pytest.raises(InputError, match="reads all tokens of a window: leave the pooling mean"):
        Run.parse("learned-pooling@pmean").tokens("span")
    with pytest.raises(UnknownNameError, match="these heads read train-max.*--pool max`"):
        bertvision.train("cls-last-state@pmax", checkpoint="1e", **common)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_decoders_learn_classes_and_their_heads_read_the_last_token(
    family: str, tmp_path: Path
) -> None:
    """One without a token to pad with, and one with a special token at its beginning."""
    root = make_pairs(make_family(family, tmp_path / "model"), tmp_path, scores=False, pair=None)
    space, common = Workspace.find(root), {"precision": "32", "workspace": root}
    assert json.loads((root / "snapshots/1e/config.json").read_text())["pad_token_id"] is not None
    bertvision.extract("1e", encoding="float32", **common)
    assert "bertvision train cls-learned-pooling --checkpoint 1e" in status(space)["next"]
    (head,) = bertvision.train("cls-learned-pooling", epochs=2, **common)
    assert head.head == "cls-learned-pooling@plast"
    asked = [Run.parse("cls-last-state@pcls"), Run.parse("cls-last-state")]
    named = [run.name for run in TrainOptions().named(asked, space.config.model)]
    assert named == ["cls-last-state@pcls", "cls-last-state@plast"]  # what is said is what is read
    bertvision.evaluate("cls-learned-pooling", **common)  # as it was typed for training
    items = space.items("dev")
    for name, place in (("bert:1e", "bert/1e"), (head.head, f"heads/1e/{head.head}/eval/1e")):
        (predictor,) = load([name], root)
        names, expected = predictor.record.task.classes, stored(root, place)
        assert [row["label"] for row in predictor.answers(items)] == [
            names[expected[item.id]] for item in items
        ]
    (own,) = load(["bert:1e"], root)
    theirs = pipeline("text-classification", model=str(root / "snapshots" / "1e"), device="cpu")
    texts = [item.text for item in items]
    assert_same(own(texts), theirs(texts))
    theirs.tokenizer.pad_token_id = theirs.model.config.pad_token_id
    assert_same(own(texts), theirs(texts, batch_size=4))


def test_scores_are_those_that_were_scored_and_those_of_the_pipeline(
    scores: Path, tmp_path: Path
) -> None:
    items = Workspace.find(scores).items("dev")
    for name, place in (
        ("bert:1e", "bert/1e"),
        ("cls-learned-pooling", "heads/1e/cls-learned-pooling/eval/1e"),
    ):
        (predictor,) = load([name], scores)
        said, expected = predictor.answers(items), stored(scores, place)
        assert [row["score"] for row in said] == pytest.approx(
            [expected[item.id] for item in items], abs=1e-5
        )
    (own,) = load(["bert:1e"], scores)
    theirs = pipeline("text-classification", model=str(scores / "snapshots" / "1e"), device="cpu")
    pair = {"text": items[0].text, "text_pair": items[0].pair}
    assert_same(own(pair), theirs(pair))
    out = tmp_path / "scores.json"
    rows = answers.answer([own], items, out)
    assert json.loads(out.read_text()) == {row["id"]: row["score"] for row in rows}


def assert_same(ours: Any, theirs: Any) -> None:
    """The same form and names, and numbers that differ by rounding alone."""
    assert type(ours) is type(theirs)
    if isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        assert ours["label"] == theirs["label"]
        assert ours["score"] == pytest.approx(theirs["score"], abs=1e-5)


def test_a_question_is_answered_as_the_pipeline_of_questions_has_it(lab: Workspace) -> None:
    predictor = Predictor.load("adapter-64-shared:1e", workspace=lab.root, precision="32")
    answer = predictor(**QUESTION)
    assert list(answer) == ["score", "start", "end", "answer"]
    assert answer["answer"] == QUESTION["context"][answer["start"] : answer["end"]]
    assert predictor(QUESTION) == answer
    for again in predictor([QUESTION, QUESTION]):  # a batch of another size may round otherwise
        assert again == {**answer, "score": pytest.approx(answer["score"], rel=1e-5)}
    two = predictor(question=["who ?", "where ?"], context=QUESTION["context"])
    assert len(two) == 2
    with pytest.raises(InputError, match="one of the two is missing"):
        predictor(question="who ?")
    with pytest.raises(InputError, match="give one context for each"):
        predictor(question=["who ?"], context=["a", "b"])
    with pytest.raises(InputError, match="is no row with question, context"):
        predictor("who ?")
    with pytest.raises(InputError, match="'context'"):
        predictor({"question": "who ?"})
    with pytest.raises(InputError, match="empty"):
        predictor({"question": " ", "context": "anna"})


def test_an_encoder_runs_once_for_all_that_read_it(
    lab: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["bert:1e", "adapter-64-shared:1e", "learned-pooling:1e"]
    predictors = load(names, lab.root)
    assert len({id(predictor._backbone) for predictor in predictors}) == 1
    passes = []
    model = predictors[0]._backbone._model
    model.base_model.register_forward_hook(lambda *given: passes.append(1))
    items = lab.items("dev")
    made = together(predictors, items)
    assert len(passes) == 1  # all windows are one batch
    for name, logits in zip(names, made, strict=True):
        (alone,) = load([name], lab.root)
        for key, values in alone.logits(items).arrays.items():
            assert np.allclose(values, logits.arrays[key], atol=1e-4), name


def test_an_encoder_that_pads_otherwise_gives_heads_the_states_of_an_extraction(
    lab: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertvision.pipelines.prediction import backbone

    items = lab.items("dev")
    usual = together(load(["bert:1e", "learned-pooling:1e"], lab.root), items)
    monkeypatch.setattr(backbone, "can_pack", lambda model: False)
    apart = together(load(["bert:1e", "learned-pooling:1e"], lab.root), items)
    for one, other in zip(usual, apart, strict=True):
        for key, values in one.arrays.items():
            assert np.allclose(values, other.arrays[key], atol=1e-4)


def test_a_saved_predictor_needs_no_workspace_and_answers_the_same(
    lab: Workspace, classes: Path, tmp_path: Path
) -> None:
    for root, name in (
        (lab.root, "max-bert+adapter-64-shared:1e"),
        (lab.root, "learned-pooling:1e"),
        (classes, "bert:1e"),
        (classes, "cls-learned-pooling:1e"),
    ):
        predictor = Predictor.load(name, workspace=root, precision="32")
        items = Workspace.find(root).items("dev")
        folder = tmp_path / name.replace(":", "-")
        predictor.save_pretrained(folder)
        again = Predictor.from_pretrained(folder, precision="32")
        assert again.record == predictor.record
        assert again.answers(items) == predictor.answers(items)
        again.save_pretrained(tmp_path / "again")  # and it can be saved once more
        assert Predictor.load(tmp_path / "again", precision="32").record == predictor.record
        shutil.rmtree(tmp_path / "again")


def test_the_encoder_is_cut_above_what_heads_read(workspace: Workspace, tmp_path: Path) -> None:
    run = "learned-pooling@l0-1"
    bertvision.train(run, checkpoint="1e", epochs=1, precision="32", workspace=workspace)
    with pytest.warns(BertvisionWarning, match="threshold of no answer of .* is 0"):
        predictor = Predictor.load(f"{run}:1e", workspace=workspace.root, precision="32")
    predictor.save_pretrained(tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["num_hidden_layers"] == 1
    again = Predictor.from_pretrained(tmp_path / "cut", precision="32")
    items = workspace.items("dev")
    assert again.answers(items) == predictor.answers(items)


def test_a_saved_predictor_that_changed_is_refused(lab: Workspace, tmp_path: Path) -> None:
    predictor = Predictor.load("learned-pooling:1e", workspace=lab.root, precision="32")
    predictor.save_pretrained(tmp_path / "saved")
    for name in ("predictor.json", "model.safetensors", "heads/0/model.safetensors"):
        folder = Path(shutil.copytree(tmp_path / "saved", tmp_path / name.replace("/", "-")))
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        with pytest.raises(WorkspaceError, match=f"{name} is missing or damaged"):
            Predictor.from_pretrained(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(WorkspaceError, match="holds something else"):
        predictor.save_pretrained(tmp_path / "other")
    with pytest.raises(WorkspaceError, match="holds no predictor"):
        Predictor.from_pretrained(tmp_path / "other")
    with pytest.raises(UnknownNameError, match="no folder"):
        Predictor.from_pretrained("nowhere")


def test_a_predictor_goes_over_the_hub(classes: Path, hub: Hub, tmp_path: Path) -> None:
    predictor = Predictor.load("cls-learned-pooling:1e", workspace=classes, precision="32")
    predictor.push_to_hub("anna/pairs", license="mit")
    sent = hub.files("model", "anna/pairs")
    assert {"README.md", "config.json", "heads/0/config.json", "predictor.json"} <= set(sent)
    assert b"license: mit" in sent["README.md"]
    again = Predictor.from_pretrained("anna/pairs", cache_dir=tmp_path / "cache", precision="32")
    pair = {"text": "anna was born .", "text_pair": "who founded the firm ?"}
    assert again(pair) == predictor(pair)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors").write_bytes(b"0" * 64)
    api = HfApi()
    api.create_repo("anna/encoder")
    api.upload_folder(repo_id="anna/encoder", folder_path=bare)
    with pytest.raises(WorkspaceError, match="anna/encoder holds no predictor"):
        Predictor.from_pretrained("anna/encoder", cache_dir=tmp_path / "other")
    assert not [*(tmp_path / "other").rglob("model.safetensors")]
    words = ["cls-learned-pooling:1e", "anna/typed", "--with-encoder", "--license", "mit"]
    done("push", *words, "--workspace", classes)
    typed = hub.files("model", "anna/typed")
    names = ("heads/0/model.safetensors", "model.safetensors", "tokenizer.json")
    assert all(typed[name] == sent[name] for name in names)
    pulled = tmp_path / "pulled"
    done("pull", "anna/pairs", pulled)
    assert Predictor.load(pulled, precision="32")(pair) == predictor(pair)


def test_a_saved_encoder_keeps_the_variant_of_its_fine_tuning(
    tiny_bert: Path, tmp_path: Path
) -> None:
    root = make_pairs(tiny_bert, tmp_path, scores=False, variant="houlsby:4", lr=1e-2)
    predictor = Predictor.load("bert:1e", workspace=root, precision="32")
    predictor.save_pretrained(tmp_path / "saved")
    items = Workspace.find(root).items("dev")
    again = Predictor.from_pretrained(tmp_path / "saved", precision="32")
    for one, other in zip(again.answers(items), predictor.answers(items), strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-6)


class LastLayer(SpanHead):
    """A head of the user's own."""

    def __init__(self, *, layers: int, hidden: int) -> None:
        super().__init__(layers=layers, hidden=hidden, width=hidden)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> list[Tensor]:
        return [hidden_states[:, -1]]


class FirstLayer(LastLayer):
    def features(self, hidden_states: Tensor, lengths: Tensor) -> list[Tensor]:
        return [hidden_states[:, 0]]


def test_heads_of_classes_of_ones_own_answer_where_these_are_named(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_heads", sys.modules[__name__])
    shutil.copytree(workspace.root, root := tmp_path / "workspace")
    names = ["my_heads:FirstLayer", "my_heads:LastLayer"]  # in the order of ensembles
    common: dict[str, Any] = {"workspace": root, "precision": "32"}
    bertvision.train(names, checkpoint="1e", **common)
    bertvision.evaluate(names, trained_on="1e", **common)
    bertvision.ensemble(names, trained_on="1e", combine="mean", workspace=root)
    for system in (f"{names[0]}:1e", f"mean-{names[0]}+{names[1]}:1e"):
        predictor = Predictor.load(system, **common)
        assert set(predictor(**QUESTION)) == {"score", "start", "end", "answer"}
    predictor.save_pretrained(tmp_path / "saved")
    again = Predictor.from_pretrained(tmp_path / "saved", named=names, precision="32")
    assert again(**QUESTION) == predictor(**QUESTION)
    for load_it in (
        lambda: Predictor.load("mean-my_heads-firstlayer+my_heads-lastlayer:1e", **common),
        lambda: Predictor.from_pretrained(tmp_path / "saved", named=names[0]),
    ):
        with pytest.raises(InputError, match="code of somebody's own: write my_heads:"):
            load_it()


# --- other data of the task ---


def _numbers(rules: dict[str, Any]) -> dict[str, Any]:
    """Metrics and threshold of each decoding rule, by ``rule/name``."""
    return {
        f"{rule}/{name}": value
        for rule, decoded in rules.items()
        for name, value in {"threshold": decoded["threshold"], **decoded["metrics"]}.items()
    }


def test_scores_on_other_data_are_those_of_the_same_data_stored(
    lab: Workspace, classes: Path, tmp_path: Path
) -> None:
    dev = lab.dataset().source("dev")
    names = ["learned-pooling:1e", "bert:1e", "max-bert+adapter-64-shared:1e"]
    rows = bertvision.evaluate(names, data=dev, precision="32", workspace=lab.root)
    places = ["heads/1e/learned-pooling/eval/1e", SYSTEMS["bert:1e"], SYSTEMS[names[2]]]
    for row, place in zip(rows, places, strict=True):
        scored = json.loads((lab.root / place / "metrics.json").read_text())
        assert _numbers(row.rules) == pytest.approx(_numbers(scored["rules"]), rel=1e-5), row
        assert row.items == len(lab.items("dev"))
    table = done("evaluate", "learned-pooling", "--trained-on", 1, "--data", dev, "-w", lab.root)
    assert table.splitlines()[1].split()[:3] == ["learned-pooling", "1e", "1e"]
    other = tmp_path / "other.csv"
    other.write_text("first,second,label\nanna,who ?,yes\nanna,who ?,never\n")
    refused = run("evaluate", "cls-learned-pooling", "--data", other, "-w", classes)
    assert refused.exit_code == 2
    assert "'never' is none of the 3 classes" in refused.stderr
    scored_row = bertvision.evaluate(
        "cls-learned-pooling", data=other, skip_bad=True, workspace=classes
    )[0]
    assert scored_row.items == 1


def test_a_stored_split_of_other_data_is_scored_by_the_names_of_its_classes(
    classes: Path, tmp_path: Path
) -> None:
    """Whatever their order; heads are never scored on classes that they do not tell."""
    common: dict[str, Any] = {"precision": "32", "workspace": classes}
    dev = [line.split(",") for line in (classes.parent / "dev.csv").read_text().splitlines()[1:]]
    for name, no in (("shouted", "NO"), ("never", "never"), ("merged", "YES"), ("rated", "")):
        lines = [
            ",".join([*texts, no if label == "no" else label])
            if no
            else ",".join([*texts, f"0.{i}"])
            for i, (*texts, label) in enumerate(dev)
        ]
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(["first,second,label", *lines]))
        source: dict[str, Any] = {"task": "csv", "data": path, "text": "first", "pair": "second"}
        bertvision.extract("1e", encoding="float32", **source, **common)
    assert Workspace.find(classes).dataset("shouted").config.classes == ("NO", "maybe", "yes")
    (scored,) = bertvision.evaluate("cls-learned-pooling", split="shouted-all", **common)
    (expected,) = bertvision.evaluate("cls-learned-pooling", **common)
    assert scored.rules == expected.rules
    (again,) = bertvision.evaluate("cls-learned-pooling", split="shouted-all-cls", **common)
    assert again.rules == expected.rules  # the name that the split is stored under
    with pytest.raises(InputError, match="shouted-all-mean: .* was trained on cls: name shouted-"):
        bertvision.evaluate("cls-learned-pooling", split="shouted-all-mean", **common)
    answers, expected_answers = (
        bertvision.predictions("cls-learned-pooling", split=split, workspace=classes)
        for split in ("shouted-all", "dev")
    )
    assert [(a.gold, a.answer) for a in answers] == [(a.gold, a.answer) for a in expected_answers]
    with pytest.raises(
        InputError, match="classes maybe, never, yes, and heads .* tell the classes maybe"
    ):
        bertvision.evaluate("cls-learned-pooling", split="never-all", **common)
    for name in ("merged", "rated"):  # two classes that are one here, and scores
        with pytest.raises(InputError, match="score them on data with labels among these"):
            bertvision.evaluate("cls-learned-pooling", split=f"{name}-all", **common)


def test_whole_numbers_are_scores_where_heads_tell_scores(scores: Path, tmp_path: Path) -> None:
    """Such as a file of ratings from 1 to 5; a head is not scored on names of classes."""
    source = Path(Workspace.find(scores).dataset().source("dev"))
    header, *rows = [line.rpartition(",")[0] for line in source.read_text().splitlines()]
    for name, labels in (("whole", "123"), ("decimal", ["1.0", "2.0", "3.0"]), ("named", "abc")):
        lines = [f"{row},{labels[i % 3]}" for i, row in enumerate(rows)]
        folder = tmp_path / name
        folder.mkdir()
        for split in ("train", "dev"):
            (folder / f"{split}.csv").write_text("\n".join([f"{header},label", *lines]))
    (folder := tmp_path / "decimal").joinpath("train.csv").write_text(
        "\n".join([f"{header},label", *(f"{row},0.5" for row in rows)])
    )
    common: dict[str, Any] = {"precision": "32", "workspace": scores}
    whole, decimal = (
        bertvision.evaluate("cls-learned-pooling", data=tmp_path / name, **common)[0]
        for name in ("whole", "decimal")
    )
    assert whole.rules == decimal.rules
    assert whole.items == len(rows)
    with pytest.raises(InputError, match="named has the classes a, b, c, and .* tells scores"):
        bertvision.evaluate("cls-learned-pooling", data=tmp_path / "named", **common)


def test_scores_on_other_data_have_the_intervals_of_the_report(
    lab: Workspace, classes: Path, scores: Path
) -> None:
    for space, name in (
        (lab, "adapter-64-shared"),  # of one seed
        (Workspace.find(classes), "cls-learned-pooling"),
        (Workspace.find(scores), "cls-learned-pooling"),
    ):
        rows = [r for r in read_rows(space).heads if r["trained_on"] == "1e"]
        rows = [r for r in rows if (r["name"], r["checkpoint"]) == (name, "1e")][:1]
        add_intervals(space, rows, left_out := [])
        assert (len(rows), left_out) == (1, [])
        (scored,) = bertvision.evaluate(
            f"{name}:1e", data=space.dataset().source("dev"), precision="32", workspace=space.root
        )
        assert scored.intervals
        for metric, ends in scored.intervals.items():
            stored = rows[0][f"{metric}_low"], rows[0][f"{metric}_high"]
            assert ends == pytest.approx(stored, abs=1e-4), metric


# --- the command ---


def rows_of(text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def test_texts_are_typed_or_read_in_any_form(classes: Path, tmp_path: Path) -> None:
    pairs = [("anna was born .", "who ?"), ('said "in" 1901', "the firm")]
    forms = {
        "rows.csv": 'id,second,first\na,who ?,anna was born .\nb,the firm,"said ""in"" 1901"\n',
        "rows.tsv": 'id\tfirst\tsecond\na\tanna was born .\twho ?\nb\tsaid "in" 1901\tthe firm\n',
        "rows.jsonl": "".join(
            json.dumps({"id": name, "text": one, "text_pair": two}) + "\n"
            for name, (one, two) in zip("ab", pairs, strict=True)
        ),
        "rows.txt": "".join(json.dumps({"first": a, "second": b}) + "\n" for a, b in pairs),
    }
    common = ("-w", classes, "--precision", "32", "--json")
    said = {}
    for name, content in forms.items():
        (tmp_path / name).write_text(content)
        rows = rows_of(
            done("predict", "cls-learned-pooling:1e", "--data", tmp_path / name, *common)
        )
        said[name] = [(row["label"], row["score"]) for row in rows]
        assert [row["id"] for row in rows] == (
            ["line 1", "line 2"] if name == "rows.txt" else ["a", "b"]
        )
    assert len(set(map(str, said.values()))) == 1
    (one,) = rows_of(
        done(
            "predict",
            "cls-learned-pooling:1e",
            "--text",
            *pairs[0][:1],
            "--text-pair",
            pairs[0][1],
            *common,
        )
    )
    assert (one["label"], pytest.approx(one["score"], abs=1e-6)) == said["rows.csv"][0]


def test_questions_are_read_in_squads_form_and_from_rows(lab: Workspace, tmp_path: Path) -> None:
    dev = lab.dataset().source("dev")
    out = tmp_path / "answers.json"
    common = ("-w", lab.root, "--precision", "32")
    text = done("predict", "adapter-64-shared:1e", "--data", dev, "--output", out, *common)
    items = lab.items("dev")
    assert text.startswith(f"{len(items)} answers in ")
    expected = stored(lab.root, "heads/1e/adapter-64-shared/eval/1e")
    assert json.loads(out.read_text()) == expected
    unsure = json.loads((tmp_path / "answers.na_prob.json").read_text())
    assert unsure.keys() == expected.keys()
    assert all(0 <= share <= 1 for share in unsure.values())
    asked = [{"id": q.id, "question": q.question} for q in items if q.context == items[0].context]
    paragraph = {"context": items[0].context, "qas": asked}
    (tmp_path / "asked.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    text = done(
        "predict", "adapter-64-shared:1e", "--data", tmp_path / "asked.json", *common, "--json"
    )
    assert {row["id"]: row["answer"] for row in rows_of(text)} == {
        question["id"]: expected[question["id"]] for question in asked
    }
    rows = tmp_path / "rows.csv"
    with rows.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "context", "question"])
        table.writerows([item.id, item.context, item.question] for item in items)
    csv_out = tmp_path / "answers.csv"
    done("predict", "adapter-64-shared:1e", "bert:1e", "--data", rows, "--output", csv_out, *common)
    with csv_out.open(newline="") as file:
        answered = list(csv.DictReader(file))
    assert len(answered) == 2 * len(items)
    of_head = [row for row in answered if row["system"] == "adapter-64-shared:1e"]
    assert {row["id"]: row["answer"] for row in of_head} == expected
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_killed_command_is_finished_by_the_same_one(
    lab: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = lab.items("dev")
    monkeypatch.setattr(answers, "_PART", max(1, len(items) // 3))
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    names = ["adapter-64-shared:1e", "learned-pooling:1e"]
    predictors = load(names, lab.root)
    rows = answers.answer(predictors, items, whole)
    asked: list[int] = []
    logits = Backbone.logits

    def dying(self: Backbone, windows: Any, members: Any, desc: Any) -> Any:
        asked.append(len(windows))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return logits(self, windows, members, desc)

    monkeypatch.setattr(Backbone, "logits", dying)
    with pytest.raises(KeyboardInterrupt):
        answers.answer(predictors, items, cut)
    assert not cut.exists()
    begun = len(asked)
    assert answers.answer(predictors, items, cut) == rows
    assert cut.read_bytes() == whole.read_bytes()
    parts = -(-len(items) // answers._PART)
    assert len(asked) - begun == parts - 1  # what was answered is not asked again
    asked.clear()
    asked.append(0)
    with pytest.raises(KeyboardInterrupt):
        answers.answer(predictors, items, cut)
    other = answers.answer(predictors[:1], items, cut)  # other systems: no part is of use
    assert other == rows[: len(items)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bert:1e", "--text", "who ?"], "give --text and --text-pair"),
        (["bert:1e", "--text-pair", "anna"], "--text-pair is the second text"),
        (["bert:1e", "--text", "a", "--data", "b.csv"], "one of the two"),
        (["bert:1e", "--data", "none.csv"], "there is no such file"),
        (["bert:2e", "--text", "a", "--text-pair", "b"], "no snapshot 2e"),
        (["nothing:1e", "--text", "a", "--text-pair", "b"], "no head nothing"),
        (["learned-pooling", "--text", "a", "--text-pair", "b"], "learned-pooling:1e"),
        (
            ["bert:1e", "--text", "a", "--text-pair", "b", "--output", "a.txt"],
            ".jsonl, .csv, .json",
        ),
        (["bert:1e", "bert:0.5e", "--text", "a", "--text-pair", "b", "--output", "a.json"], "one"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    lab: Workspace, words: list[str], says: str
) -> None:
    refused = run("predict", *words, "-w", lab.root)
    assert refused.exit_code == 2
    assert says in " ".join(refused.stderr.split())


def test_malformed_rows_are_named_or_left_out(classes: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = ['{"first": "anna", "second": "who ?"}', "anna", '{"first": " ", "second": "who ?"}']
    rows.write_text("\n".join([*lines, '{"first": 1, "second": "who ?"}']))
    common = ("predict", "cls-learned-pooling:1e", "--data", rows, "-w", classes)
    refused = run(*common)
    assert refused.exit_code == 2
    assert "line 2" in refused.stderr
    assert [row["id"] for row in rows_of(done(*common, "--skip-bad", "--json"))] == ["line 1"]
    other = tmp_path / "other.csv"
    other.write_text("one,two\na,b\n")
    refused = run("predict", "cls-learned-pooling:1e", "--data", other, "-w", classes)
    assert refused.exit_code == 2
    assert "'first'" in refused.stderr


def test_all_tasks_that_an_encoder_learns_answer_texts_and_others_are_refused() -> None:
    for name, entry in TASKS.items():
        task, config = load_task(name), TaskConfig(name=name)
        if entry.learns:
            assert layout_of(task, config).columns
        elif name in ("treebank", "text", "chat"):
            with pytest.raises(InputError, match="defines inputs, unlabelled and answers"):
                layout_of(task, config)
