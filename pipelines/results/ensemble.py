"""Ensembles of heads and BERT: the maximum or mean of their softmaxes, from stored logits.

`softmax` says how logits are combined; the combination is decoded like any logits, with a
no-answer threshold tuned on the same combination. No model runs.

Several models' softmaxes combined to one: their element-wise maximum or mean.

Over values that compete with each other (the tokens of a window, two classes) every model's logits
become probabilities, of which the maximum or mean is taken. The maximum does not sum to 1, which
decoding does not need.

A softmax forgets how high a window's logits are, by which the windows of one question are compared.
So the mean of the models' log partition functions (the logarithm of the softmax's denominator) is
added to the logarithm again. It is one number per window and changes nothing within it; with it, a
model combined with itself is the model, also for contexts of several windows.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from bertvision.errors import BertvisionWarning, InputError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.models import Kind
from bertvision.pipelines.files import digests_in, keep_others, new_folder, write_json
from bertvision.pipelines.records import digest_of, read_record, write_record
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.systems import Combine, read_windows
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.registry import head_kind
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.trained_head import task_of_kind
from bertvision.pipelines.workspace.heads import find_head
from bertvision.pipelines.workspace.records import (
    BertScores,
    EnsembleScores,
    HeadScores,
    read_run_config,
)
from bertvision.pipelines.workspace.reproduce import (
    BERT_COMMAND,
    ensemble_command,
    evaluation_command,
)
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]


def combine_softmaxes(
    members: Sequence[Float32Array], lengths: npt.NDArray[np.integer], combine: Combine
) -> Float64Array:
    """Logarithm of the combined softmaxes: log of the maximum or mean of probabilities.

    It is computed from log probabilities, so that nothing underflows: the result is finite and at
    most 0. The order of the members does not matter, to the last bit.

    Args:
        members: logits of each member, (values,): groups of consecutive values that compete.
        lengths: (groups,) how many values each group has, all at least 1.
        combine: maximum or mean.

    Returns:
        (values,) float64.
    """
    logits = np.stack(members).astype(np.float64)
    # Sorted, because sums of floating-point numbers depend on their order
    logs = np.sort(logits - np.repeat(log_partition(logits, lengths), lengths, axis=1), axis=0)
    if combine == "max":
        return np.asarray(logs[-1])
    total = np.logaddexp.reduce(logs, axis=0)
    return np.asarray(np.minimum(total - np.log(len(members)), 0.0))


def combine_logits(
    members: Sequence[Float32Array], lengths: npt.NDArray[np.integer], combine: Combine
) -> Float32Array:
    """`combine_softmaxes` with the members' mean log partition added: what is decoded.

    A model with itself gives its own logits. Arguments as there.

    Returns:
        (values,) float32.
    """
    partition = log_partition(np.stack(members).astype(np.float64), lengths)
    level = np.sort(partition, axis=0).mean(axis=0)
    logs = combine_softmaxes(members, lengths, combine)
    return np.asarray(logs + np.repeat(level, lengths), np.float32)


def combined(members: Sequence[Logits], combine: Combine) -> Logits:
    """The logits of several systems on the same windows as one (see `combine_logits`).

    Args:
        members: Logits of each.
        combine: Maximum or mean.
    """
    windows, arrays = members[0].windows, {}
    for name, values in members[0].arrays.items():
        # the tokens of a window compete with each other, or its classes
        lengths = windows.n_tokens if values.ndim == 1 else np.full(len(values), values.shape[1])
        together = [logits.arrays[name].ravel() for logits in members]
        arrays[name] = combine_logits(together, lengths, combine).reshape(values.shape)
    return Logits(arrays, windows)


def log_partition(logits: Float64Array, lengths: npt.NDArray[np.integer]) -> Float64Array:
    """Logarithm of the softmax's denominator of each group.

    Args:
        logits: (members, values).
        lengths: (groups,) values of each group.

    Returns:
        (members, groups).
    """
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    highest = np.maximum.reduceat(logits, first, axis=1)
    weights = np.exp(logits - np.repeat(highest, lengths, axis=1))
    return np.asarray(highest + np.log(np.add.reduceat(weights, first, axis=1)))


class Member(NamedTuple):
    """One system of an ensemble."""

    run: str
    """Name of the run, or ``bert``."""
    folder: Path
    """Where its metrics and logits are."""
    command: str
    """Command that makes these."""


def ensemble(
    workspace: Workspace,
    runs: Sequence[str],
    *,
    with_bert: bool,
    trained_on: str,
    tag: str,
    combine: Combine = "max",
    split: str = "dev",
) -> dict[str, Any]:
    """Combine systems on one snapshot's split, score the combination and keep it.

    Args:
        workspace: Workspace with the systems' logits.
        runs: trained heads.
        with_bert: Whether BERT, at the snapshot of the activations, is a member.
        trained_on: snapshot that the heads were trained on.
        tag: snapshot on whose activations they were scored.
        combine: Way to combine the softmaxes, ``max`` or ``mean``.
        split: Split that is scored.

    Returns:
        The contents of ``ensembles/<tag>/<name>/metrics.json``, and as ``parts`` those of each
        member. Beside it are ``predictions.json``, ``na_scores.json`` and the logits.

    Raises:
        InputError: there are fewer than two members, or one comes twice, or no heads learn it.
        UnknownNameError: there is no such head.
        WorkspaceError: a member has no logits on this snapshot, or they are of other data.
    """
    if combine not in get_args(Combine):
        raise InputError(f"--combine {combine!r}: choose one of {', '.join(get_args(Combine))}")
    trained_on, tag = str(SnapshotTag(trained_on)), str(SnapshotTag(tag))
    task_config = workspace.config.task
    head_kind(task_config.name)  # refuses a task that no heads learn
    if load_task(task_config.name).outputs(task_config) == 1:
        raise InputError(
            f"{task_config.name} predicts a score, and ensembles combine the probabilities of "
            "answers and classes: compare its systems one by one with `bertvision report`"
        )
    members = _members(workspace, runs, with_bert, trained_on, tag, split)
    started = time.perf_counter()
    parts = _scores(members)
    _check_current(workspace, members, parts)
    sums = [part.sha256 for part in parts]
    together = _combined(workspace, members, sums, tag, split, combine)
    kind: Kind = "span" if together.kind == "span" else "classification"
    tune, task = None, task_of_kind(kind, workspace.config.task.name)
    if task.tunes and split != "tune":
        tune = _tune(workspace, members, sums, tag, combine)
    scores = task.score(together, tune)
    names = [member.run for member in members]
    trainings = [read_run_config(m.folder.parents[1]).training for m in members if m.run != "bert"]
    metrics = EnsembleScores(
        members=tuple(names),
        combine=combine,
        kind=kind,
        trained_on=trained_on,
        checkpoint=tag,
        split=split,
        fraction=_common([training.fraction for training in trainings], 1.0),
        seed=_common([training.seed for training in trainings], 0),
        rules=scores.rules,
        threshold_tuned_on="tune" if tune is not None and scores.tuned else None,
        weights={name: part.weights_sha256 for name, part in zip(names, parts, strict=True)},
        seconds=time.perf_counter() - started,
        command=ensemble_command(names, combine, trained_on, tag, split),
    )
    place = ensemble_dir(workspace, names, combine, trained_on, tag, split)
    with new_folder(place) as folder:
        write_json(folder / "predictions.json", scores.predictions)
        write_json(folder / "na_scores.json", scores.na_scores)
        together.save(folder / f"{split}.safetensors")
        digests = digests_in(folder, sorted(file.name for file in folder.iterdir()))
        metrics = metrics.model_copy(update={"sha256": digests})
        write_record(folder / "metrics.json", metrics)
        keep_others(place, folder, "metrics.json")
    # BERT was perhaps scored on another split only
    return {**metrics.to_json(), "parts": [part.to_json() for part in parts if part.split == split]}


def ensemble_dir(
    workspace: Workspace,
    members: Sequence[str],
    combine: str,
    trained_on: str,
    tag: str,
    split: str = "dev",
) -> Path:
    """Folder of an ensemble: ``ensembles/1e/max-bert+adapter-386-shared@0.3e``."""
    name = f"{combine}-{'+'.join(members)}"
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 9]}-{digest_of(list(members))[:8]}"
    suffix = "" if split == "dev" else f"-{split}"
    return workspace.root / "ensembles" / tag / f"{name}@{trained_on}{suffix}"


_LONGEST = 160  # of the 255 bytes that file systems allow


def _members(
    workspace: Workspace,
    runs: Sequence[str],
    with_bert: bool,
    trained_on: str,
    tag: str,
    split: str,
) -> list[Member]:
    """The members in an order that does not depend on how they were named."""
    if len({Run.parse(run).name for run in runs}) != len(runs):
        raise InputError(f"heads {', '.join(runs)}: name each once")
    if len(runs) + with_bert < 2:
        raise InputError("an ensemble has two members or more: name another head, or --with-bert")
    suffix = "" if split == "dev" else f"-{split}"
    members = [
        Member(
            folder.name,
            folder / "eval" / f"{tag}{suffix}",
            evaluation_command(folder.name, trained_on, tag, split),
        )
        for folder in sorted(find_head(workspace, trained_on, run) for run in runs)
    ]
    if not with_bert:
        return members
    return [Member("bert", workspace.bert_dir(tag), BERT_COMMAND), *members]


def _scores(members: Sequence[Member]) -> list[BertScores | HeadScores]:
    """Scores of the members, after checking that all read the same encoder."""
    scores: list[BertScores | HeadScores] = []
    encoders = []
    for member in members:
        path = member.folder / "metrics.json"
        if member.run == "bert":
            bert = read_record(path, BertScores, member.command)
            scores.append(bert)
            encoders.append(bert.weights_sha256)
        else:
            head = read_record(path, HeadScores, member.command)
            scores.append(head)
            encoders.append(str(head.provenance.get("weights_sha256")))
        if encoders[-1] != encoders[0]:
            raise WorkspaceError(
                f"{member.run} was scored on an encoder with other weights than {members[0].run}: "
                f"`{member.command}` scores it again"
            )
    return scores


def _check_current(
    workspace: Workspace, members: Sequence[Member], parts: Sequence[BertScores | HeadScores]
) -> None:
    """Refuse members whose scores are of other weights than those that stand there now."""
    for member, part in zip(members, parts, strict=True):
        if member.folder not in {result.folder for result in read_results(workspace, part.split)}:
            raise WorkspaceError(
                f"the scores of {member.run} in {member.folder} are of other weights than those "
                f"that stand in the workspace: `{member.command}` scores it again"
            )


def _combined(
    workspace: Workspace,
    members: Sequence[Member],
    sums: Sequence[Mapping[str, str]],
    tag: str,
    split: str,
    combine: Combine,
) -> Logits:
    """The members' logits as one; ``sums`` are the digests of each member's files."""
    windows = read_windows(workspace, tag, split)
    read = [
        Logits.load(
            *(member.folder / f"{split}.safetensors", windows, member.command),
            digests.get(f"{split}.safetensors"),
        )
        for member, digests in zip(members, sums, strict=True)
    ]
    for member, logits in zip(members, read, strict=True):
        if logits.kind != read[0].kind:
            raise InputError(
                f"{members[0].run} is of kind {read[0].kind}, {member.run} of kind {logits.kind}: "
                "combine systems of one kind"
            )
    return combined(read, combine)


def _tune(
    workspace: Workspace,
    members: Sequence[Member],
    sums: Sequence[Mapping[str, str]],
    tag: str,
    combine: Combine,
) -> Logits | None:
    """The same combination on the held-out split; None where a member was not run on it."""
    lacking = [m.run for m in members if not (m.folder / "tune.safetensors").is_file()]
    if "tune" not in workspace.splits() or lacking:
        warnings.warn(
            f"the no-answer threshold stays at 0: {', '.join(lacking) or 'the workspace'} has no "
            f"logits on the split tune (`bertvision extract --checkpoint {tag} --split tune`, then "
            "evaluate again)",
            BertvisionWarning,
            stacklevel=3,
        )
        return None
    return _combined(workspace, members, sums, tag, "tune", combine)


def _common(values: Sequence[Any], otherwise: Any) -> Any:
    return values[0] if len(set(values)) == 1 else otherwise
