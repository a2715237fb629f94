"""The teacher of an encoder: another one's logits on the same training windows.

A student of fewer layers (`keep:K`) learns from the whole encoder: the task-specific distillation
of Turc et al. (2019, arXiv:1908.08962) and, of DistilBERT, Sanh et al. (2019, arXiv:1910.01108).
"""

from __future__ import annotations

from bertvision.errors import ProvenanceError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.tasks.logits import WindowIndex
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.training.teacher import Teacher, TeacherFile
from bertvision.pipelines.workspace.snapshots import snapshot_at
from bertvision.pipelines.workspace.workspace import Workspace


def find_logits(place: str) -> TeacherFile:
    """The logits that a teacher left on its training windows.

    Args:
        place: ``FOLDER:TAG``.

    Raises:
        InputError: as of `snapshot_at` and `TeacherFile.find`; UnknownNameError, WorkspaceError and
            ProvenanceError likewise.
    """
    workspace, tag = snapshot_at(place)
    return TeacherFile.find(workspace, tag, elsewhere=True)


def teacher_of(workspace: Workspace, windows: Windows) -> Teacher | None:
    """The teacher that a workspace's settings name, with its logits; None where they name none.

    Args:
        workspace: of the student.
        windows: that the student is trained on.

    Raises:
        WorkspaceError: the teacher's logits are not there, damaged, or of other windows.
        ProvenanceError: the teacher has other weights by now, or learned from other items.
    """
    settings = workspace.config.finetune
    if settings.distil is None:
        return None
    other, _ = snapshot_at(settings.distil)
    held = find_logits(settings.distil)
    if held.weights_sha256 != settings.teacher_sha256:
        raise ProvenanceError(
            f"{workspace.root} learns from {settings.distil} with the weights "
            f"{str(settings.teacher_sha256)[:12]}…, and it now has {held.weights_sha256[:12]}…: "
            "start another --workspace"
        )
    if difference := first_difference(_items(other), _items(workspace)):
        name, there, here = difference
        raise ProvenanceError(
            f"the teacher {settings.distil} learned from other items: with {name} = {there!r}, "
            f"this workspace with {here!r}; start another --workspace with the teacher's data, "
            "--seed and parts of them"
        )
    return Teacher(
        held.read(WindowIndex.of([], windows)),
        None,
        temperature=settings.temperature,
        labels_weight=settings.labels_weight,
    )


def _items(workspace: Workspace) -> dict[str, object]:
    """What decides which items of the data are trained on, and what their classes are."""
    config, finetune = workspace.config, workspace.config.finetune
    task = config.task.model_dump()
    if load_task(config.task.name).kind != "span":  # a window is an item, however it is cut
        del task["max_length"]
    part = {"train_questions": finetune.train_questions, "nested": finetune.nested}
    chosen = config.task.tune_fraction or config.task.dev_fraction or finetune.train_questions
    seed = {"seed": finetune.seed} if chosen else {}
    return {**task, "data": config.data["train"].sha256, **part, **seed}
