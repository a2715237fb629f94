"""The teacher of an encoder: another one's logits on the same training windows.

A student of fewer layers (`keep:K`) learns from the whole encoder: the task-specific distillation
of Turc et al. (2019, arXiv:1908.08962) and, of DistilBERT, Sanh et al. (2019, arXiv:1910.01108).
"""

from __future__ import annotations

import reprlib
from pathlib import Path

from bertvision.errors import ProvenanceError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.tasks.logits import WindowIndex
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.training.teacher import Teacher, TeacherFile
from bertvision.pipelines.workspace.config import WorkspaceConfig
from bertvision.pipelines.workspace.creation import planned_run
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.records import is_snapshot
from bertvision.pipelines.workspace.selection import trained_on
from bertvision.pipelines.workspace.snapshots import snapshot_at
from bertvision.pipelines.workspace.workspace import Workspace


def open_student(root: Path | None, options: FinetuneOptions, *, resume: bool) -> Workspace:
    """As `open_workspace`; none is made that its teacher could not teach.

    Where every snapshot is there, the teacher is needed no more.

    Args:
        root: as there.
        options: likewise.
        resume: likewise.

    Raises:
        WorkspaceError: as there, likewise InputError; and as of `check_teacher`, ProvenanceError
            likewise.
    """
    workspace = planned_run(root, options, resume=resume)
    if not all(is_snapshot(workspace.snapshot_dir(t)) for t in workspace.config.finetune.tags):
        check_teacher(workspace)
    return workspace.ensure_written()


def check_teacher(workspace: Workspace) -> TeacherFile | None:
    """The logits of the teacher that a workspace's settings name; None where they name none.

    Args:
        workspace: of the student; it may be planned and not yet made.

    Raises:
        WorkspaceError: the teacher or its logits are not there.
        UnknownNameError: it has no such snapshot.
        InputError: as of `TeacherFile.find`.
        ProvenanceError: the teacher has other weights by now, or learned from other items.
    """
    settings = workspace.config.finetune
    if settings.distil is None:
        return None
    other, tag = snapshot_at(settings.distil)
    teacher = TeacherFile.find(other, tag, elsewhere=True)
    if teacher.weights_sha256 != settings.teacher_sha256:
        raise ProvenanceError(
            f"{workspace.root} learns from {settings.distil} with the weights "
            f"{str(settings.teacher_sha256)[:12]}…, and it now has {teacher.weights_sha256[:12]}…: "
            "start another --workspace"
        )
    if difference := first_difference(_items(other.config), _items(workspace.config)):
        name, there, here = difference
        raise ProvenanceError(
            f"the teacher {settings.distil} learned from other items: with {name} = "
            f"{reprlib.repr(there)}, this workspace with {reprlib.repr(here)}; "
            f"{_ALIKE if name == 'seed' else ''}start a new --workspace with the teacher's data, "
            "--seed and parts of them"
        )
    return teacher


_ALIKE = (
    "the seed chooses what is held out, and with --tune-fraction 0, whole training data and a dev "
    "of their own for both it chooses nothing, so that students may have any seed; or "
)


def teacher_of(workspace: Workspace, windows: Windows) -> Teacher | None:
    """The teacher that a workspace's settings name, with its logits; None where they name none.

    Args:
        workspace: of the student.
        windows: that the student is trained on.

    Raises:
        WorkspaceError: the teacher's logits are not there, damaged, or of other windows.
        ProvenanceError: as of `check_teacher`.
    """
    teacher, settings = check_teacher(workspace), workspace.config.finetune
    if teacher is None:
        return None
    return Teacher(
        teacher.read(WindowIndex.of([], windows)),
        None,
        temperature=settings.temperature,
        labels_weight=settings.labels_weight,
    )


def _items(config: WorkspaceConfig) -> dict[str, object]:
    """Choice of the items that are trained on, and their classes."""
    task = config.task.model_dump()
    if load_task(config.task.name).kind != "span":  # a window is an item, however it is cut
        del task["max_length"]
    return {**task, **trained_on(config)}
