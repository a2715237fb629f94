"""Pairs of phrases: read and refused, found in tokens, learned, and begun with by another task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentences import PLACES, SUBJECTS
from transformers import AutoTokenizer, BertConfig, BertModel

import bertvision
from bertvision.errors import InputError, ProvenanceError, UnknownNameError, WorkspaceError
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.sentences.phrases import PhrasePair, PhrasePairLayer
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.pretrained import load_pretrained, pretrained
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

TASK = load_task("phrases")


def generated(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of a person or a place in each of two sentences: the same words, or others."""
    random, rows = np.random.default_rng(seed), []
    for i in range(count):
        people, places = random.choice(SUBJECTS, 2), random.choice(PLACES, 2)
        if i % 2:
            people[1], places[1] = people[0], places[0]
        text, pair = (f"{a} lives in {b} ." for a, b in zip(people, places, strict=True))
        # a phrase of two words or of one, never at the same place in both
        words = [f"in {place}" if i % 4 < 2 else str(place) for place in places]
        spans = [
            [s.index(w), s.index(w) + len(w)] for s, w in zip((text, pair), words, strict=True)
        ]
        label = "same" if places[0] == places[1] else "other"
        rows.append(
            dict(
                id=f"{seed}-{i}", text=text, pair=pair, first=spans[0], second=spans[1], label=label
            )
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("phrases")
    write(folder / "train.jsonl", generated(80, 1))
    write(folder / "dev.jsonl", generated(24, 2))
    return {
        "model": str(tiny_bert),
        "task": "phrases",
        "data": str(folder),
        "epochs": 4.0,
        "save_at": ("0e", "4e"),
        "lr": 3e-3,
        "tune_fraction": 0.0,
        "precision": "32",
    }


@pytest.fixture(scope="module")
def finished(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    root = tmp_path_factory.mktemp("workspace")
    bertvision.finetune(workspace=root, **options)
    return Workspace.find(root)


def test_a_line_is_read_with_its_spans(tmp_path: Path) -> None:
    row = dict(text="he passed away", pair="he died", first=[3, 14], second=[3, 7], label="para")
    other = {**row, "label": "not", "id": "b"}
    path = write(tmp_path / "train.jsonl", [row, other])
    found = TASK.read(str(path), "train", TaskConfig(name="phrases"))
    assert found.classes == ("not", "para")
    expected = PhrasePair("line 1", "he passed away", "he died", (3, 14), (3, 7), 1)
    assert found.items == [expected, expected._replace(id="b", label=0)]
    assert found.items[0].phrases == ("passed away", "died")
    assert TASK.items_of(TASK.table(found.items)) == found.items


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": [3, 3]}, r"line 1: first is \[3, 3\]: give the characters \[begin, end\)"),
        ({"second": [3, 8]}, r"second is \[3, 8\]: .* in 'he died', of 7 characters"),
        ({"second": "died"}, "second is 'died'"),
        ({"first": [True, 3]}, r"first is \[True, 3\]"),
        ({"first": [2, 3]}, r"first is \[2, 3\]"),
        ({"text": " he"}, "the text ' he' must be without spaces around it"),
        ({"label": 1}, "label must be a string: 1"),
        ({"id": [1]}, r"the id \[1\] must be a string or a number"),
    ],
)
def test_a_malformed_line_is_refused_with_its_value(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    row = dict(text="he passed away", pair="he died", first=[3, 14], second=[3, 7], label="para")
    path = write(tmp_path / "train.jsonl", [{**row, **change}])
    with pytest.raises(InputError, match=message):
        TASK.read(str(path), "train", TaskConfig(name="phrases"))
    path.write_text("[1]\n")
    with pytest.raises(InputError, match="line 1: is JSON, but no object with text, pair, first"):
        TASK.read(str(path), "train", TaskConfig(name="phrases"))


def test_a_row_that_is_left_out_leaves_its_spans_with_it(tmp_path: Path) -> None:
    """The first of two rows with one id is kept, with its own spans."""
    row = dict(id="a", text="he passed away", pair="he died", first=[3, 14], second=[3, 7])
    again = {**row, "first": [0, 2], "second": [0, 2], "label": "same"}
    rows = [{**row, "label": "para"}, again, {**again, "id": "b"}]
    path = write(tmp_path / "train.jsonl", rows)
    found = TASK.read(str(path), "train", TaskConfig(name="phrases", skip_bad=True))
    assert [(x.id, x.first, x.second) for x in found.items] == [
        ("a", (3, 14), (3, 7)),
        ("b", (0, 2), (0, 2)),
    ]
    assert "line 2: the id 'a' is already that of line 1" in found.skipped[0]


def test_the_tokens_of_phrases_are_marked_in_their_sentence(tiny_bert: Path) -> None:
    item = PhrasePair("a", "anna lives in london", "in rome boris works", (11, 20), (0, 7), 0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    windows = TASK.windows([item], tokenizer, TaskConfig(name="phrases", max_length=32))
    tokens = tokenizer.convert_ids_to_tokens(windows.input_ids)
    by_mark = {
        which: [t for t, m in zip(tokens, windows.marks["phrases"], strict=True) if m == which]
        for which in (0, 1)
    }
    assert by_mark == {0: ["in", "london"], 1: ["in", "rome"]}


def test_a_phrase_outside_its_window_is_an_error_with_its_name(tiny_bert: Path) -> None:
    text = "anna " * 30 + "london"
    item = PhrasePair("far", text, "in rome", (len(text) - 6, len(text)), (0, 7), 0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    with pytest.raises(
        InputError,
        match="1 of 1 pair do not fit.*'london' of 'far' has no token in its window of 16: give",
    ):
        TASK.windows([item], tokenizer, TaskConfig(name="phrases", max_length=16))


def test_pairs_that_do_not_fit_are_refused_or_left_out_with_their_number(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    far = "anna " * 30 + "london"
    for split, (count, seed) in {"train": (12, 1), "dev": (6, 2)}.items():
        rows = generated(count, seed)
        for row in rows[1:3]:
            row |= {"text": far, "first": [len(far) - 6, len(far)]}
        write(folder / f"{split}.jsonl", rows)
    given = {**options, "data": str(folder), "epochs": 0.2, "save_at": ("0.2e",), "max_length": 16}
    given |= {"tune_fraction": 0.2, "workspace": tmp_path / "run"}
    with pytest.raises(InputError, match="2 of 12 items of train do not fit.*--skip-bad leaves"):
        bertvision.finetune(**given)
    assert not (tmp_path / "run").exists()
    bertvision.finetune(**given, skip_bad=True)
    assert "left out: 2 of 6 items of dev do not fit, the first: the phrase 'london'" in caplog.text
    space = Workspace.find(tmp_path / "run")
    assert [item.id for item in space.items("dev")] == ["2-0", "2-3", "2-4", "2-5"]
    held = [item.id for split in ("train", "tune") for item in space.items(split)]
    assert sorted(held) == sorted(f"1-{i}" for i in range(12) if i not in (1, 2))
    assert {name: data.questions for name, data in space.config.data.items()} == {
        "train": 8,
        "tune": 2,
        "dev": 4,
    }
    said = json.loads((space.bert_dir("0.2e") / "predictions.json").read_text())
    assert set(said) == {item.id for item in space.items("dev")}
    bertvision.report(workspace=space.root)
    page = (space.root / "report/index.html").read_text()
    assert page.count("2 of the source that fit no window left out") == 2  # of train, and of dev


def test_where_no_pair_fits_nothing_is_left_out(options: dict[str, Any], tmp_path: Path) -> None:
    rows, far = generated(4, 1), "anna " * 30 + "london"
    short = [{**row, "text": far, "first": [len(far) - 6, len(far)]} for row in rows]
    for split in ("train", "dev"):
        write(tmp_path / f"{split}.jsonl", rows if split == "train" else short)
    given = {**options, "data": str(tmp_path), "max_length": 16, "skip_bad": True}
    with pytest.raises(InputError, match="4 of 4 items of dev do not fit.* larger --max-length$"):
        bertvision.finetune(workspace=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_a_pair_is_the_largest_values_of_each_phrase_compared(tiny_bert: Path) -> None:
    torch.manual_seed(0)
    config = load_model(tiny_bert).config
    layer = PhrasePairLayer(config).eval()
    states = torch.randn(1, 5, 32)
    marks = torch.tensor([[-1, 0, 0, -1, 1]])
    u, v = torch.maximum(states[0, 1], states[0, 2]), states[0, 4]
    expected = layer.classes(torch.cat([u, v, (u - v).abs(), u * v]))
    torch.testing.assert_close(layer(states, phrases=marks).logits[0], expected)
    padded = torch.cat([states, torch.full((1, 3, 32), 9.0)], 1)
    wider = torch.cat([marks, torch.full((1, 3), -1)], 1)
    torch.testing.assert_close(layer(padded, phrases=wider).logits[0], expected)


def test_phrases_are_learned_and_scored_as_classes(finished: Workspace) -> None:
    def accuracy(tag: str) -> float:
        found = json.loads((finished.bert_dir(tag) / "metrics.json").read_text())
        return float(found["rules"]["argmax"]["metrics"]["accuracy"])

    assert accuracy("4e") > 90 > accuracy("0e")
    found = bertvision.compare("bert:4e", "bert:0e", workspace=finished.root, resamples=100)
    assert found.metric == "accuracy"
    row = bertvision.predictions("bert:4e", workspace=finished.root)[0]
    assert row["phrases"] == list(finished.items("dev")[0].phrases)
    assert row["gold"] in ("same", "other")
    assert bertvision.error_analysis("bert:4e", workspace=finished.root).confusions is not None


def test_no_head_learns_phrases(finished: Workspace) -> None:
    with pytest.raises(InputError, match="no head learns the task phrases"):
        bertvision.train("cls-last-state", workspace=finished.root)


def begun(finished: Workspace, place: Path, **changes: Any) -> Workspace:
    """A workspace that begins with the encoder of phrases."""
    rows = generated(16, 3)
    data = place.with_name(f"{place.name}-data")
    data.mkdir()
    for split in ("train", "dev"):
        write(data / f"{split}.jsonl", [{k: r[k] for k in ("text", "pair", "label")} for r in rows])
    given: dict[str, Any] = {
        "init_from": f"{finished.root}:4e",
        "task": "csv",
        "pair": "pair",
        "data": str(data),
        "save_at": ("0e", "1e"),
        "max_length": 32,
        "tune_fraction": 0.0,
        "precision": "32",
    }
    bertvision.finetune(workspace=place, **{**given, **changes})
    return Workspace.find(place)


def test_another_task_begins_with_the_encoder_and_a_new_output_layer(
    finished: Workspace, tmp_path: Path
) -> None:
    workspace = begun(finished, tmp_path / "next")
    assert workspace.config.finetune.init_from == f"{finished.root}:4e"
    before = load_snapshot(finished.snapshot_dir("4e")).model.base_model.state_dict()
    model = load_snapshot(workspace.snapshot_dir("0e")).model
    after = model.base_model.state_dict()
    assert all(torch.equal(after[name], of) for name, of in before.items())
    assert set(after) - set(before) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert model.config.id2label == {0: "other", 1: "same"}
    bertvision.finetune(workspace=workspace.root, resume=True)  # nothing is to be made again


def test_the_pretrained_pooler_stays_where_the_task_before_had_none(
    options: dict[str, Any], tiny_bert: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(tiny_bert, tmp_path / "with-pooler")
    BertModel(BertConfig.from_pretrained(checkpoint)).save_pretrained(checkpoint)
    pooler = load_model(checkpoint).pooler.state_dict()
    short = {**options, "model": str(checkpoint), "epochs": 0.1, "save_at": ("0.1e",)}
    bertvision.finetune(workspace=tmp_path / "first", **short)
    again = {**short, "init_from": f"{tmp_path / 'first'}:0.1e"}
    del again["model"]
    bertvision.finetune(workspace=tmp_path / "second", **again)
    second = Workspace.find(tmp_path / "second")
    workspace = begun(second, tmp_path / "third", init_from=f"{second.root}:0.1e")
    model = load_snapshot(workspace.snapshot_dir("0e")).model
    found = model.base_model.pooler.state_dict()
    assert all(torch.equal(found[name], of) for name, of in pooler.items())


def test_an_output_layer_of_the_same_form_is_not_taken_over(
    finished: Workspace, options: dict[str, Any], tmp_path: Path
) -> None:
    given = {**options, "epochs": 1.0, "save_at": ("1e",), "seed": 9, "init_from": None}
    given.pop("model")
    given["init_from"] = f"{finished.root}:4e"
    bertvision.finetune(workspace=tmp_path, **given)
    again = Workspace.find(tmp_path)
    start = load_pretrained(again, pretrained(again))
    old = load_snapshot(finished.snapshot_dir("4e")).model
    assert not torch.equal(start.output_layer.classes.weight, old.output_layer.classes.weight)
    for name, of in old.base_model.state_dict().items():
        assert torch.equal(start.base_model.state_dict()[name], of)


def test_a_start_may_be_moved_and_is_known_by_its_weights(
    finished: Workspace, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(finished.root, first)
    data = {"init_from": f"{first}:4e", "save_at": ("1e",)}
    workspace = begun(Workspace.find(first), tmp_path / "next", **data)
    weights = (workspace.snapshot_dir("1e") / "model.safetensors").read_bytes()
    shutil.rmtree(workspace.root / "snapshots")
    first.rename(second)
    with pytest.raises(InputError):
        bertvision.finetune(workspace=workspace.root, resume=True)
    bertvision.finetune(workspace=workspace.root, init_from=f"{second}:4e", resume=True)
    assert (workspace.snapshot_dir("1e") / "model.safetensors").read_bytes() == weights
    with pytest.raises(WorkspaceError, match="was made with model = .*first/snapshots/4e, not"):
        bertvision.finetune(workspace=workspace.root, init_from=f"{second}:0e", resume=True)
    assert Workspace.find(workspace.root).config.finetune.init_from == f"{first}:4e"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tune_fraction": 0.25}, "with tune_fraction = 0.0, this workspace with 0.25"),
        ({"dev": "train.jsonl"}, "was trained on .*train.jsonl, which is to be scored on here"),
    ],
)
def test_what_the_start_learned_is_not_scored(
    change: dict[str, Any],
    message: str,
    finished: Workspace,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    given = {**options, "init_from": f"{finished.root}:4e", **change}
    del given["model"]
    if "dev" in given:
        given["dev"] = str(Path(given["data"]) / given["dev"])
    with pytest.raises(ProvenanceError, match=message):
        bertvision.finetune(workspace=tmp_path / "next", **given)
    assert not (tmp_path / "next").exists()


def test_a_start_behind_the_start_is_asked_too(
    finished: Workspace, options: dict[str, Any], tmp_path: Path
) -> None:
    between = begun(finished, tmp_path / "between", save_at=("1e",))
    given = {**options, "init_from": f"{between.root}:1e", "tune_fraction": 0.25}
    del given["model"]
    with pytest.raises(ProvenanceError, match=f"{finished.root}:4e was trained on other parts"):
        bertvision.finetune(workspace=tmp_path / "next", **given)


def test_questions_can_follow_another_number_of_classes(
    finished: Workspace, tmp_path: Path
) -> None:
    from workspaces import write_squad

    squad = write_squad(tmp_path / "train.json", 3, 1)
    bertvision.finetune(
        workspace=tmp_path / "run",
        init_from=f"{finished.root}:4e",
        train=squad,
        dev=squad,
        max_length=64,
        overlap=16,
        max_question_length=16,
        save_at=("0e",),
        precision="32",
    )
    model = load_snapshot(Workspace.find(tmp_path / "run").snapshot_dir("0e")).model
    assert model.qa_outputs.weight.shape == (2, 32)


@pytest.mark.parametrize(
    ("place", "message", "error"),
    [
        ("1e", "--init-from 1e: give the folder of a workspace and a snapshot there", InputError),
        ("{}:Late", "give the folder of a workspace and a snapshot there", InputError),
        ("{}:0.7e", r"has no snapshot 0\.7e", UnknownNameError),
    ],
)
def test_a_start_that_is_not_there_is_said(
    place: str, message: str, error: type[Exception], finished: Workspace, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        begun(finished, tmp_path / "next", init_from=place.format(finished.root))


def test_a_model_and_a_start_are_one_too_many(
    finished: Workspace, tiny_bert: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="both name the encoder to begin with"):
        begun(finished, tmp_path / "other", model=str(tiny_bert))


def test_an_encoder_with_adapters_cannot_be_begun_with(
    options: dict[str, Any], finished: Workspace, tmp_path: Path
) -> None:
    adapted = {**options, "epochs": 0.1, "save_at": ("0.1e",), "variant": ("houlsby:4",)}
    bertvision.finetune(workspace=tmp_path / "adapted", **adapted)
    with pytest.raises(InputError, match="has .*bottleneck.*, which its family does not have"):
        begun(finished, tmp_path / "next", init_from=f"{tmp_path / 'adapted'}:0.1e")


def test_predict_classifies_phrases_as_evaluate_does(
    finished: Workspace, options: dict[str, Any], tmp_path: Path
) -> None:
    lines = (Path(options["data"]) / "dev.jsonl").read_text().splitlines()
    dev = [json.loads(line) for line in lines]
    bare = write(tmp_path / "bare.jsonl", [{**row, "label": None} for row in dev])
    common: dict[str, Any] = {"workspace": finished.root, "precision": "32"}
    rows = bertvision.predict("bert:4e", data=bare, **common)
    scored = json.loads((finished.bert_dir("4e") / "predictions.json").read_text())
    classes = finished.config.task.classes
    assert {row.id: row.label for row in rows} == {k: classes[v] for k, v in scored.items()}
    (first, second), row = ((dev[0][x] for x in ("first", "second")), dev[0])
    marked = [
        f"{text[:a]}[{text[a:b]}]{text[b:]}"
        for text, (a, b) in ((row["text"], first), (row["pair"], second))
    ]
    (typed,) = bertvision.predict("bert:4e", text=marked[0], text_pair=marked[1], **common)
    assert (typed.label, typed.score) == (rows[0].label, pytest.approx(rows[0].score, abs=1e-5))
    with pytest.raises(InputError, match="'he died' marks no phrase: put one pair of brackets"):
        bertvision.predict("bert:4e", text=marked[0], text_pair="he died", **common)
