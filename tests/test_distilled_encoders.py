"""Encoders of fewer layers that learn from a whole one: what they are told, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.modeling_outputs import SequenceClassifierOutput

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.models.outputs import distillation_loss
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.kept_logits import keep_logits
from bertvision.pipelines.finetuning.module import FinetuneModule
from bertvision.pipelines.repeats.run import repeat
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.teacher import Teacher
from bertvision.pipelines.workspace.creation import open_workspace
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace


@pytest.fixture(scope="session")
def kept(workspace: Workspace) -> Workspace:
    """The shared workspace, whose snapshot 1e teaches."""
    keep_logits(workspace, "1e", ["train"])
    return workspace


@pytest.fixture
def options(kept: Workspace) -> FinetuneOptions:
    """Options of a student of one layer, with the teacher's data."""
    return FinetuneOptions(
        model=kept.config.model.name_or_path,
        train=kept.config.data["train"].source,
        dev=kept.config.data["dev"].source,
        variant=("keep:1",),
        save_at=("1e",),
        batch_size=8,
        lr=1e-3,
        tune_fraction=0.2,
        precision="32",
        distil=f"{kept.root}:1e",
    )


def student(folder: Path, options: FinetuneOptions, **more: Any) -> bytes:
    finetune(folder, options, evaluate=False, **more)
    return (folder / "snapshots" / "1e" / "model.safetensors").read_bytes()


def plain(options: FinetuneOptions) -> FinetuneOptions:
    return replace(options, distil=None, temperature=None, labels_weight=None)


def test_a_student_has_its_teacher_in_its_settings_and_its_snapshots(
    options: FinetuneOptions, kept: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kept.root.parent)
    named = replace(options, distil=f"{kept.root.name}:1e", temperature=4.0)
    student(tmp_path / "ws", named)
    held = Workspace.find(tmp_path / "ws").config.finetune
    teacher = read_snapshot_info(kept.snapshot_dir("1e"))
    assert held.distil == f"{kept.root}:1e"
    assert (held.temperature, held.labels_weight) == (4, 0.5)
    assert held.teacher_sha256 == teacher.weights_sha256
    assert read_snapshot_info(tmp_path / "ws/snapshots/1e").finetune == held
    with pytest.raises(WorkspaceError, match="made with temperature = 4.0, not 2.0"):
        student(tmp_path / "ws", replace(options, temperature=2.0))


def test_all_weight_on_labels_is_plain_fine_tuning_bit_for_bit(
    options: FinetuneOptions, tmp_path: Path
) -> None:
    alone = student(tmp_path / "plain", plain(options))
    labels = student(tmp_path / "labels", replace(options, labels_weight=1.0))
    taught = student(tmp_path / "taught", options)
    assert labels == alone
    assert taught != alone


def test_the_loss_of_a_step_is_that_of_the_teachers_own_windows(
    options: FinetuneOptions, kept: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed once more, from the file of logits and the rows of the batch, window by window."""
    logits = load_file(kept.bert_dir("1e") / "train.safetensors")
    n_tokens = logits["n_tokens"].astype(int)
    first = n_tokens.cumsum() - n_tokens
    checked = 0
    real = FinetuneModule._loss

    def compared(self: FinetuneModule, batch: Any, rows: Any) -> torch.Tensor:
        nonlocal checked
        loss = real(self, batch, rows)
        teacher, self.teacher = self.teacher, None
        with torch.no_grad():
            self.eval()
            output, labels = self._output(batch, rows), real(self, batch, rows)
            self.teacher = teacher
            expected = float(labels) * 0.25
            for i, row in enumerate(rows):
                n = n_tokens[row]
                for name in ("start_logits", "end_logits"):
                    own = torch.from_numpy(logits[name][first[row] : first[row] + n])
                    said = getattr(output, name)[i, :n]
                    told = distillation_loss(said[None], own[None], temperature=3)
                    expected += 0.75 * float(told) / 2
            assert float(real(self, batch, rows)) == pytest.approx(expected, rel=1e-4)
            self.train()
        checked += 1
        return loss

    monkeypatch.setattr(FinetuneModule, "_loss", compared)
    student(tmp_path / "ws", replace(options, temperature=3.0, labels_weight=0.25))
    assert checked == 9  # batches of 8 of 72 windows


def test_a_taught_score_is_pulled_half_way() -> None:
    """Squared errors: of the labels and of the teacher, without any temperature."""
    arrays = {"logits": np.array([[1.0], [3.0], [5.0]], np.float32)}
    index = WindowIndex([], np.ones(3, np.int32), np.arange(3, dtype=np.int32), None)
    teacher = Teacher(Logits(arrays, index), None, temperature=7, labels_weight=0.5)
    said = torch.tensor([[2.0], [4.0]], requires_grad=True)
    task, output = load_task("stsb"), SequenceClassifierOutput(logits=said)  # type: ignore[arg-type]
    labels = ((said[:, 0] - torch.tensor([0.0, 5.0])) ** 2).sum()
    loss = teacher.mixed(task, output, torch.tensor([2, 1]), labels, "sum")
    loss.backward()
    assert float(loss.detach()) == 0.5 * (4 + 1) + 0.5 * (9 + 1)
    assert said.grad is not None
    assert said.grad[:, 0].tolist() == [(2 - 0) + (2 - 5), (4 - 5) + (4 - 3)]


def test_an_interrupted_student_ends_in_the_same_snapshot(
    options: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = student(tmp_path / "whole", options)
    step = FinetuneModule.training_step

    def killed(self: FinetuneModule, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch.number == 4:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    monkeypatch.setattr(FinetuneModule, "training_step", killed)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        student(tmp_path / "killed", options, resume_every_seconds=0)
    assert (tmp_path / "killed" / "finetune" / "resume.ckpt").is_file()
    monkeypatch.undo()
    assert student(tmp_path / "killed", options) == expected


# --- what is refused ---


def test_a_teacher_of_other_weights_than_it_had_is_refused_by_name(
    options: FinetuneOptions, kept: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "teacher"
    shutil.copytree(kept.root, root, ignore=shutil.ignore_patterns("heads", "activations"))
    taught = replace(options, distil=f"{root}:1e")
    path = root / "bert/1e/train.safetensors"
    arrays = load_file(path)
    save_file(arrays, path, {"weights_sha256": "0" * 64, "seconds": "1", "snapshot": "1e"})
    command = f"`bertvision logits --checkpoint 1e --workspace {root}`"
    with pytest.raises(ProvenanceError, match=f"000….*{command}"):
        student(tmp_path / "ws", taught)
    path.unlink()
    with pytest.raises(WorkspaceError, match=f"are not kept in {root}: {command}"):
        student(tmp_path / "ws", taught)
    assert not (tmp_path / "ws").exists()


def test_a_teacher_that_was_fine_tuned_anew_since_does_not_go_on_teaching(
    options: FinetuneOptions, kept: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FinetuneModule, "training_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        student(tmp_path / "ws", options)
    file = tmp_path / "ws" / "bertvision.yaml"
    weights = read_snapshot_info(kept.snapshot_dir("1e")).weights_sha256
    file.write_text(file.read_text().replace(weights, "ab" * 32))
    with pytest.raises(ProvenanceError, match=r"with the weights abababababab…, and it now has"):
        finetune(tmp_path / "ws", FinetuneOptions(), resume=True)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"seed": 1}, "with seed = 0, this workspace with 1"),
        ({"tune_fraction": 0.3}, "with tune_fraction = 0.2, this workspace with 0.3"),
        ({"max_length": 300}, "with max_length = 386, this workspace with 300"),
    ],
)
def test_a_teacher_of_other_items_is_refused_by_what_differs(
    options: FinetuneOptions, tmp_path: Path, other: dict[str, Any], says: str
) -> None:
    with pytest.raises(ProvenanceError, match=f"learned from other items: {says}"):
        student(tmp_path / "ws", replace(options, **other))
    assert not (tmp_path / "ws").exists()
    student(tmp_path / "ws", plain(options))  # the corrected call is not held to the refused one


def test_what_is_done_can_be_asked_for_again_without_its_teacher(
    options: FinetuneOptions, kept: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "teacher"
    shutil.copytree(kept.root, root, ignore=shutil.ignore_patterns("heads", "activations"))
    taught = replace(options, distil=f"{root}:1e")
    made = student(tmp_path / "ws", taught)
    shutil.rmtree(root)
    assert student(tmp_path / "ws", taught) == made
    with pytest.raises(WorkspaceError, match="no workspace in .*teacher"):
        student(tmp_path / "other", taught)
    assert not (tmp_path / "other").exists()


def test_a_teacher_may_be_moved_and_is_known_by_its_weights(
    options: FinetuneOptions, kept: Workspace, tmp_path: Path
) -> None:
    place = tmp_path / "teacher"
    shutil.copytree(kept.root, place, ignore=shutil.ignore_patterns("heads", "activations"))
    moving = replace(options, distil=f"{place}:1e")
    expected = student(tmp_path / "ws", moving)
    digest = Workspace.find(tmp_path / "ws").config.digest()
    assert open_workspace(tmp_path / "ws", options, resume=False).config.digest() == digest
    shutil.rmtree(place)
    shutil.rmtree(tmp_path / "ws/snapshots")
    assert student(tmp_path / "ws", options) == expected  # the new place, the same teacher
    with pytest.raises(WorkspaceError, match="made with distil"):
        student(tmp_path / "ws", replace(options, distil=f"{kept.root}:0.5e"))


def test_the_temperature_of_a_student_can_be_given_without_its_teacher(
    options: FinetuneOptions, tmp_path: Path
) -> None:
    root = open_workspace(tmp_path / "ws", options, resume=False).root
    plain_but = replace(options, distil=None, temperature=4.0)
    with pytest.raises(WorkspaceError, match="made with temperature = 2.0, not 4.0"):
        open_workspace(root, plain_but, resume=False)
    open_workspace(root, replace(plain_but, temperature=2.0), resume=False)


def test_seeds_that_choose_other_items_than_their_teachers_are_refused_before_any_is_made(
    options: FinetuneOptions, tmp_path: Path
) -> None:
    with pytest.raises(ProvenanceError, match=r"seed = 0, this workspace with 1.*--tune-fraction"):
        repeat(tmp_path / "seeds", options, seeds=2)
    assert not (tmp_path / "seeds").exists()


def test_students_have_any_seed_where_it_chooses_no_items(
    options: FinetuneOptions, kept: Workspace, tmp_path: Path
) -> None:
    """A teacher whose whole training data are trained on, nothing held out."""
    whole = replace(plain(options), tune_fraction=0.0)
    student(tmp_path / "teacher", whole)
    keep_logits(Workspace.find(tmp_path / "teacher"), "1e", ["train"])
    taught = replace(whole, distil=f"{tmp_path / 'teacher'}:1e")
    repeat(tmp_path / "seeds", taught, seeds=2)
    for seed in (0, 1):
        made = read_snapshot_info(tmp_path / f"seeds/seed-{seed}/snapshots/1e")
        assert (made.finetune.seed, made.finetune.distil) == (seed, taught.distil)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"distil": "teacher"}, "--distil teacher: give the folder of a workspace"),
        ({"distil": None, "temperature": 3.0}, "name it with --distil FOLDER:TAG"),
        ({"temperature": 0.5}, "temperature"),
        ({"labels_weight": -0.5}, "labels.weight"),
    ],
)
def test_what_says_no_teacher_is_refused_before_anything_is_made(
    options: FinetuneOptions, tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        student(tmp_path / "ws", replace(options, **given))
    assert not (tmp_path / "ws").exists()
