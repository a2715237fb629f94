"""A snapshot's own logits on splits of its workspace, computed once; those of an encoder's teacher.

``bert/<tag>/<split>.safetensors``: of ``tune`` and ``dev`` for its scores and for ensembles, of
``train`` for students (`training.teacher`). Each says which weights left it. Large splits are
computed in parts, each kept when it is done, so that a killed run goes on where it was.

A student of fewer layers (`keep:K`) learns from the whole encoder's logits on the same windows: the
task-specific distillation of Turc et al. (2019, arXiv:1908.08962) and, of DistilBERT, Sanh et al.
(2019, arXiv:1910.01108).
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from bertvision.errors import ProvenanceError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
from bertvision.pipelines.precision import Precision, autocast, device, resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.records import Count, Record
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.tasks.windows import Windows, collate
from bertvision.pipelines.training.teacher import Teacher, TeacherFile
from bertvision.pipelines.workspace.config import Tag, WorkspaceConfig
from bertvision.pipelines.workspace.creation import planned_run
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.records import is_snapshot
from bertvision.pipelines.workspace.selection import check_split, trained_on
from bertvision.pipelines.workspace.snapshots import Snapshot, load_snapshot, snapshot_at
from bertvision.pipelines.workspace.workspace import Workspace

Float32Array = npt.NDArray[np.float32]

_PART = 16_384
"""Windows that are computed before they are kept: of BERT-large some minutes of a GPU."""


class KeptLogits(Record):
    """The logits that a snapshot left on a split."""

    tag: Tag
    split: str
    windows: Count
    seconds: float
    """Wall time of the forward passes."""
    bytes: Count
    file: str
    """In the workspace."""


def keep_logits(workspace: Workspace, tag: str, splits: Sequence[str]) -> list[KeptLogits]:
    """Compute a snapshot's logits on splits, where they are not kept yet, and keep them.

    Args:
        workspace: Workspace with the snapshot.
        tag: Tag of the snapshot.
        splits: Splits of the workspace's own data.

    Returns:
        What is kept, in the order of ``splits``.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: the snapshot was not fine-tuned.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    folder = workspace.require_output(tag)
    for split in splits:
        check_split(split, workspace.config.data, None)
    snapshot = load_snapshot(folder)
    task, predicted = load_task(snapshot.info.task.name), []
    for split in splits:
        command = f"bertvision logits --checkpoint {tag} --split {split}"
        logits, seconds = logits_on(workspace, tag, split, snapshot, task, command)
        path = workspace.bert_dir(tag) / f"{split}.safetensors"
        predicted.append(
            KeptLogits(
                tag=tag,
                split=split,
                windows=len(logits.windows.n_tokens),
                seconds=seconds,
                bytes=path.stat().st_size,
                file=path.relative_to(workspace.root).as_posix(),
            )
        )
    return predicted


def logits_on(
    workspace: Workspace,
    tag: str,
    split: str,
    snapshot: Snapshot,
    task: Task,
    command: str,
    *,
    folder: Path | None = None,
    where: torch.device | None = None,
) -> tuple[Logits, float]:
    """A snapshot's logits, read or made, and the wall time of the forward passes in seconds.

    Args:
        workspace: Workspace whose windows they are of.
        tag: Tag of the snapshot.
        split: Split of the workspace's own data.
        snapshot: Snapshot that leaves them.
        task: Task that it was fine-tuned for.
        command: Command that makes them, for messages.
        folder: Folder in which they are kept; None is the encoder's own.
        where: device that it is run on, in float32; None is this machine's accelerator, and the
            precision of the workspace.

    Raises:
        WorkspaceError: what is kept is damaged, or of other windows.
    """
    weights, windows = snapshot.info.weights_sha256, workspace.windows(split, snapshot.tokenizer)
    index = WindowIndex.of(workspace.items(split), windows)
    path = (folder or workspace.bert_dir(tag)) / f"{split}.safetensors"
    seconds = _seconds(path, weights)
    if seconds is not None:
        return Logits.load(path, index, command), seconds
    precision = resolve_precision("32" if where else workspace.config.finetune.precision)
    parts, spent, files = [], 0.0, []
    for first in range(0, len(windows), _PART):
        whole = len(windows) <= _PART
        file = path if whole else path.with_name(f".{split}-{first}.safetensors")
        some, desc = windows.part(first, first + _PART), f"BERT {tag} {split}"
        part, seconds = _part(file, snapshot, task, some, command, precision, desc, where)
        parts.append(part.arrays)
        spent += seconds
        files.append(file)
    logits = Logits(
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, index
    )
    if len(files) > 1:
        logits.save(path, _made_by(snapshot, f"{spent:.3f}"))
        for file in files:
            file.unlink()
    return logits, spent


def _part(
    path: Path,
    snapshot: Snapshot,
    task: Task,
    windows: Windows,
    command: str,
    precision: Precision,
    desc: str,
    where: torch.device | None,
) -> tuple[Logits, float]:
    """The logits on some windows, read or made and kept, and their seconds."""
    index = WindowIndex.of([], windows)
    seconds = _seconds(path, snapshot.info.weights_sha256)
    if seconds is not None:
        return Logits.load(path, index, command), seconds
    arrays, seconds = predict_logits(
        snapshot.model,
        task,
        windows,
        padding=pad_id(snapshot.tokenizer, snapshot.model.config),
        precision=precision,
        desc=desc,
        where=where,
    )
    logits, text = Logits(arrays, index), f"{seconds:.3f}"
    logits.save(path, _made_by(snapshot, text))
    return logits, float(text)


def _made_by(snapshot: Snapshot, seconds: str) -> dict[str, str]:
    info = snapshot.info
    return {"snapshot": info.tag, "weights_sha256": info.weights_sha256, "seconds": seconds}


def _seconds(path: Path, weights_sha256: str) -> float | None:
    """Seconds recorded in a file of logits; None where it is absent or of other weights."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
        return float(metadata["seconds"]) if metadata["weights_sha256"] == weights_sha256 else None
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def predict_logits(
    model: PreTrainedModel,
    task: Task,
    windows: Windows,
    *,
    padding: int,
    precision: Precision,
    desc: str | None,
    where: torch.device | None = None,
) -> tuple[dict[str, Float32Array], float]:
    """Run BERT over windows, sorted by length so that hardly any padding is computed.

    Args:
        model: Model with the output layer of ``task``; it is moved to the device.
        task: Task that it was fine-tuned for.
        windows: Windows to run it over.
        padding: vocabulary index of the padding token.
        precision: arithmetic of the forward pass.
        desc: name of the progress bar; None shows none.
        where: device; None is this machine's accelerator.

    Returns:
        The logits by name as `Task.window_logits` gives them, in the order of the windows:
        (tokens,) of spans, (windows, …) of classes; and the wall time of the forward passes in
        seconds.
    """
    where = where or device()
    budget = 8_192 if where.type == "cpu" else 65_536  # tokens of a batch, padding included
    model.to(where).eval()  # type: ignore[arg-type]
    first_token, token_types = windows.first_token, takes_token_types(model)
    logits: dict[str, dict[int, Float32Array]] = {}
    order = np.argsort(-windows.n_tokens, kind="stable").astype(np.int64)
    began = time.monotonic()
    done = 0
    with torch.inference_mode(), progress(len(order), desc, "window") as bar:
        while done < len(order):
            size = max(1, budget // int(windows.n_tokens[order[done]]))
            rows = order[done : done + size]
            batch = collate(windows, first_token, rows, padding, token_types=token_types)
            with autocast(precision, where):
                output = model(**batch.to(where).inputs)
            for name, of_windows in task.window_logits(output, batch).items():
                # together: from a GPU one transfer, not one for each window
                values = torch.cat(of_windows).float().cpu().numpy()
                ends = np.cumsum([len(of) for of in of_windows])[:-1]
                parts = np.split(values, ends)
                logits.setdefault(name, {}).update(zip(rows.tolist(), parts, strict=True))
            done += len(rows)
            bar.update(len(rows))
    seconds = time.monotonic() - began
    joined = {name: np.concatenate([of[i] for i in range(len(of))]) for name, of in logits.items()}
    return joined, seconds


def open_student(root: Path | None, options: FinetuneOptions, *, resume: bool) -> Workspace:
    """As `open_workspace`; none is made that its teacher could not teach.

    Where every snapshot is there, the teacher is needed no more.

    Args:
        root: Folder of the workspace.
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
        workspace: Workspace of the student; it may be planned and not yet made.

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
        workspace: Workspace of the student.
        windows: Windows that the student is trained on.

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
