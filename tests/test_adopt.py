"""Checkpoints that others fine-tuned become snapshots: scored as they are, read as any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.numpy import load_file
from test_predict import WORDS, write_rows
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

import bertvision
from bertvision.errors import InputError, UnknownNameError, WorkspaceError
from bertvision.pipelines.finetuning import adopt
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

CLASSES = ("yes", "no", "maybe")
"""Outputs of the checkpoints, in another order than that of the data (no, yes, maybe)."""


@pytest.fixture(scope="module")
def output(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a Trainer, which knows its classes by number alone."""
    folder = tmp_path_factory.mktemp("trainer")
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_bert, num_labels=3)
    texts = [" ".join(WORDS[i % 7 :][:3]) for i in range(24)]
    rows = [{**tokenizer(text), "label": i % 3} for i, text in enumerate(texts)]
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_steps=3,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    return folder / "out"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    return {
        "task": "csv",
        "train": write_rows(folder / "train.csv", 36, 1, scores=False),
        "dev": write_rows(folder / "dev.csv", 12, 2, scores=False),
        "text": "first",
        "pair": "second",
        "precision": "32",
    }


@pytest.fixture(scope="module")
def adopted(output: Path, data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of the two checkpoints of the first epoch and of the end."""
    root = tmp_path_factory.mktemp("adopted") / "workspace"
    names = [str(output / f"checkpoint-{step}") for step in (3, 6)]
    done = bertvision.adopt(names, classes=CLASSES, workspace=root, **data)
    assert [snapshot.tag for snapshot in done.snapshots] == ["0.5e", "1e"]
    assert done.steps == 0
    return root


def test_snapshots_answer_as_their_own_model_with_classes_in_the_order_of_the_data(
    output: Path, adopted: Path
) -> None:
    space = Workspace.find(adopted)
    assert space.config.task.classes == ("maybe", "no", "yes")
    checkpoint = output / "checkpoint-6"
    theirs = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    snapshot = load_snapshot(space.snapshot_dir("1e"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    batch = tokenizer(["anna founded the firm"], ["in 1901 ."], return_tensors="pt")
    with torch.no_grad():
        wanted = theirs(**batch).logits[:, [CLASSES.index(c) for c in space.config.task.classes]]
        given = snapshot.model(**batch).logits
    assert torch.equal(given, wanted)
    assert snapshot.model.config.id2label == {0: "maybe", 1: "no", 2: "yes"}
    info = snapshot.info
    assert (info.adopted_from, info.step, info.steps_per_epoch) == (str(checkpoint), 6, 6)
    kept = load_file(space.bert_dir("1e") / "dev.safetensors")
    assert all(np.isfinite(values).all() for values in kept.values())


def test_heads_are_trained_beside_and_more_checkpoints_are_added_later(
    output: Path,
    data: dict[str, Any],
    adopted: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(adopted, root)
    before = Workspace.find(root)
    out = tmp_path / "out"
    shutil.copytree(output, out)
    (out / "checkpoint-99").mkdir()
    done = bertvision.adopt(str(out), workspace=root, **data)  # the first two at another place
    assert [snapshot.tag for snapshot in done.snapshots] == ["0.5e", "1e", "1.5e", "2e"]
    assert "checkpoint-99" in caplog.text
    after = Workspace.find(root)
    assert after.config.finetune.epochs == 2.0
    for tag in ("0.5e", "1e"):
        infos = [load_snapshot(space.snapshot_dir(tag)).info for space in (before, after)]
        assert infos[0] == infos[1]
    bertvision.extract("2e", encoding="float32", precision="32", workspace=root)
    bertvision.train("cls-learned-pooling", checkpoint="2e", precision="32", workspace=root)
    (scores,) = bertvision.evaluate("cls-learned-pooling", precision="32", workspace=root)
    assert scores.trained_on == "2e"


def test_what_another_process_adopts_meanwhile_stays(
    output: Path, adopted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(adopted, root)
    own, other = (str(output / f"checkpoint-{step}") for step in (9, 12))

    def meanwhile(config: object) -> None:
        monkeypatch.setattr(adopt, "_warn", lambda config: None)
        bertvision.adopt(other, workspace=root)

    monkeypatch.setattr(adopt, "_warn", meanwhile)
    bertvision.adopt(own, workspace=root)
    space = Workspace.find(root)
    assert list(space.snapshots()) == list(space.config.finetune.tags)
    assert space.config.adopted is not None
    assert list(space.config.adopted.sources) == ["0.5e", "1e", "1.5e", "2e"]


def test_a_checkpoint_that_changed_is_not_taken_for_the_snapshot_that_was_made_of_it(
    output: Path, data: dict[str, Any], tmp_path: Path
) -> None:
    root, folder = tmp_path / "workspace", tmp_path / "checkpoint-6"
    shutil.copytree(output / "checkpoint-6", folder)
    bertvision.adopt(str(folder), classes=CLASSES, workspace=root, **data)
    bertvision.adopt(str(folder), workspace=root)
    moved = folder.rename(tmp_path / "moved")
    bertvision.adopt(str(moved), workspace=root)
    config = Workspace.find(root).config
    assert config.adopted is not None
    assert config.adopted.sources == {"1e": str(moved)}
    assert config.model.name_or_path == str(moved)  # where 0e and untrained are made from
    moved.rename(folder)
    shutil.copyfile(output / "checkpoint-9/model.safetensors", folder / "model.safetensors")
    with pytest.raises(WorkspaceError, match="1e of .* is .*moved, whose weights are others"):
        bertvision.adopt(str(folder), workspace=root)
    shutil.copytree(folder, moved)
    with pytest.raises(WorkspaceError, match="are not those that snapshot 1e"):
        bertvision.adopt(str(moved), workspace=root)
    shutil.rmtree(folder)  # as Trainer removes old ones: later ones are added nevertheless
    done = bertvision.adopt(str(output / "checkpoint-9"), workspace=root)
    assert [snapshot.tag for snapshot in done.snapshots] == ["1e", "1.5e"]


def test_a_snapshot_that_was_removed_is_adopted_again(adopted: Path, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(adopted, root)
    space = Workspace.find(root)
    weights = load_snapshot(space.snapshot_dir("1e")).info.weights_sha256
    shutil.rmtree(space.snapshot_dir("1e"))
    bertvision.finetune(resume=True, workspace=root)
    assert load_snapshot(space.snapshot_dir("1e")).info.weights_sha256 == weights


def test_the_encoder_before_fine_tuning_is_told_by_model_alone(
    tiny_bert: Path, output: Path, data: dict[str, Any], adopted: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnknownNameError, match="is not known"):
        bertvision.extract("0e", precision="32", workspace=adopted)
    with pytest.raises(UnknownNameError, match="bertvision adopt FOLDER:3e"):
        bertvision.extract("3e", precision="32", workspace=adopted)
    root, last = tmp_path / "workspace", str(output / "checkpoint-12")
    bertvision.adopt(last, model=str(tiny_bert), classes=CLASSES, workspace=root, **data)
    (split, *_) = bertvision.extract("0e", precision="32", workspace=root)
    assert split.tag == "0e"


def test_an_answerer_of_questions_is_adopted_by_a_tag_behind_a_colon(
    workspace: Workspace, tmp_path: Path
) -> None:
    folder, tag = tmp_path / "someones", workspace.snapshots()[-1]
    shutil.copytree(workspace.snapshot_dir(tag), folder)
    (folder / "snapshot.json").unlink()
    task = workspace.config.task
    done = bertvision.adopt(
        f"{folder}:3e",
        train=workspace.dataset().source("train"),
        dev=workspace.dataset().source("dev"),
        task=task.name,
        max_length=task.max_length,
        max_question_length=task.max_question_length,
        overlap=task.overlap,
        precision="32",
        workspace=tmp_path / "workspace",
    )
    places = [Workspace.find(done.workspace).bert_dir("3e"), workspace.bert_dir(tag)]
    given, wanted = (load_file(place / "dev.safetensors") for place in places)
    assert all(np.array_equal(given[name], wanted[name]) for name in wanted)


REFUSED: dict[str, tuple[list[str], dict[str, Any], type[Exception], str]] = {
    "no tag": (["untold"], {}, InputError, "for how long behind a colon"),
    "a tag of no fine-tuning": (["untold:0e"], {}, InputError, "named by --model"),
    "two of one tag": (["out/checkpoint-6", "untold:1e"], {}, InputError, "are both snapshot 1e"),
    "no folder": (["./nowhere:1e"], {}, InputError, "no folder"),
    "no folder, nor a tag": (["out/checkpoint-99"], {}, InputError, "there is no folder out/ch"),
    "a tag that is none": (["untold:a.c"], {}, InputError, "'a.c' is neither a number of epochs"),
    "a word for what was fine-tuned": (["untold:main"], {}, InputError, "untold was fine-tuned"),
    "a folder that is no word": (["un-told"], {}, InputError, "un-told:step1000"),
    "a folder without any": (["empty"], {}, InputError, "empty holds no checkpoint"),
    "no data": (
        ["out/checkpoint-6"],
        {"task": None, "train": None, "dev": None},
        InputError,
        "--task sst2 --data glue/SST-2",
    ),
    "a class twice": (
        ["out/checkpoint-6"],
        {"classes": "yes,no,yes"},
        InputError,
        "yes comes twice",
    ),
    "an unknown class": (
        ["out/checkpoint-6"],
        {"classes": "yes,no,never"},
        InputError,
        "the classes of the data are maybe, no, yes",
    ),
    "a damaged state": (["damaged"], {}, InputError, "does not say how long"),
    "unnamed classes": (["out/checkpoint-6"], {}, InputError, "LABEL_0.*--classes"),
    "too few classes": (["out/checkpoint-6"], {"classes": "yes,no"}, InputError, "has 3 outputs"),
    "a file that is cut off": (["cut:3e"], {}, InputError, "damaged, or still being written"),
    "no output layer": (["plain:1e"], {}, InputError, "has no output layer"),
    "another encoder": (
        ["out/checkpoint-6", "smaller:2e"],
        {"classes": CLASSES},
        InputError,
        "snapshots are of one encoder",
    ),
    "another tokenizer": (
        ["out/checkpoint-6", "worded:2e"],
        {"classes": CLASSES},
        InputError,
        "the tokenizer of",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_snapshot_is_refused_by_name_and_leaves_nothing(
    tiny_bert: Path,
    output: Path,
    data: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").symlink_to(output)
    (tmp_path / "empty/checkpoint-3").mkdir(parents=True)
    shutil.copytree(tiny_bert, tmp_path / "plain")
    checkpoint = output / "checkpoint-6"
    for name in ("untold", "damaged", "smaller", "worded", "cut"):
        shutil.copytree(checkpoint, tmp_path / name)
    (tmp_path / "untold/trainer_state.json").unlink()
    shutil.copytree(tmp_path / "untold", tmp_path / "un-told")
    (tmp_path / "damaged/trainer_state.json").write_text('{"global_step": 0, "epoch": NaN}')
    with (tmp_path / "cut/model.safetensors").open("r+b") as file:
        file.truncate(5000)
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (tmp_path / "smaller/config.json").write_text(json.dumps(config))
    words = AutoTokenizer.from_pretrained(checkpoint)
    words.add_tokens(["oslo"])
    words.save_pretrained(tmp_path / "worded")
    names, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        bertvision.adopt(names, workspace=tmp_path / "workspace", **{**data, **options})
    assert not (tmp_path / "workspace").exists()


def test_a_workspace_takes_no_other_snapshots_than_those_it_was_made_of(
    output: Path, data: dict[str, Any], adopted: Path, workspace: Workspace, tmp_path: Path
) -> None:
    with pytest.raises(WorkspaceError, match="fine-tuned there"):
        bertvision.adopt(str(output), workspace=workspace.root)
    other = str(output / "checkpoint-9")
    with pytest.raises(WorkspaceError, match="name another tag for"):
        bertvision.adopt(f"{other}:1e", workspace=adopted)
    with pytest.raises(WorkspaceError, match="was made with --classes yes,no,maybe"):
        bertvision.adopt(other, classes="no,yes,maybe", workspace=adopted)
    with pytest.raises(WorkspaceError, match="was made with max_length"):
        bertvision.adopt(other, max_length=64, workspace=adopted)
