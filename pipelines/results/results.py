"""The results of a workspace, in one list: what every table, comparison and report starts from.

A result is one system scored on one split. Systems are BERT at a snapshot, a run (a head trained on
one snapshot's activations, with one fraction of the data and one seed) on some snapshot's
activations, and ensembles of these. Each knows the folder its numbers come from and the command
that makes them again. Only files of a few kilobytes are read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from bertvision.errors import WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.finetuning.latency_record import FOLDER, NAME, RUN, quantise_command
from bertvision.pipelines.measurements import is_current, weights_of_snapshot
from bertvision.pipelines.records import leaving_out, read_record
from bertvision.pipelines.tasks.scores import Rules, is_untuned
from bertvision.pipelines.workspace.heads import is_head_of_snapshot
from bertvision.pipelines.workspace.records import (
    BertScores,
    EnsembleScores,
    HeadScores,
    read_run_config,
    read_run_metrics,
)
from bertvision.pipelines.workspace.reproduce import (
    BERT_COMMAND,
    ensemble_command,
    ensemble_name,
    evaluation_command,
)
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)

System = Literal["bert", "quantised", "head", "ensemble"]


class Result(NamedTuple):
    """One system, scored on one split."""

    system: System
    """Kind of the system."""
    name: str
    """As people read it: ``BERT``, the head, or the ensemble's members."""
    run: str
    """Name of the run, ``bert``, or the name of the ensemble's folder."""
    head: str | None
    """The head, as `bertvision train` names it; None for BERT and ensembles."""
    fraction: float
    """Part of the training examples; of an ensemble what its heads have in common, else 1."""
    seed: int
    """Seed of the training; of an ensemble what its heads have in common, else 0."""
    trained_on: str
    """Snapshot whose activations the head was trained on; BERT's own."""
    checkpoint: str
    """Snapshot whose activations it was scored on; BERT's own."""
    split: str
    """Split that was scored."""
    rules: Rules
    """By decoding rule its ``threshold`` and its ``metrics``, in per cent."""
    folder: Path
    """Where metrics.json and predictions.json are."""
    command: str
    """The command that makes this result, in the workspace."""
    members: tuple[str, ...] = ()
    """Members of an ensemble: names of runs, and ``bert``."""
    sha256: Mapping[str, str] = MappingProxyType({})
    """Digests of files in ``folder``, by name; of older results none."""
    threshold_tuned_on: str | None = None
    """Split that tuned the no-answer threshold; None where there is none, or it was left at 0."""

    @property
    def untuned(self) -> bool:
        """Whether its threshold was left at 0, where others tune it (`is_untuned`)."""
        return is_untuned(self.rules, self.threshold_tuned_on)

    @property
    def tuning(self) -> dict[str, str | None]:
        """``threshold_tuned_on`` of a row, where there is a threshold that can be tuned."""
        tuned_on = self.threshold_tuned_on
        return {"threshold_tuned_on": tuned_on} if tuned_on or self.untuned else {}


def read_results(
    workspace: Workspace, split: str = "dev", left_out: list[str] | None = None
) -> list[Result]:
    """All results on one split.

    Args:
        workspace: Workspace that they are of.
        split: Split that was scored.
        left_out: gets a message for each result whose files are damaged, or of other weights than
            there are now, and which is left out.

    Returns:
        Ordered by the snapshot trained on and the one scored on (as numbers), system (BERT, BERT in
        8 bits, heads, ensembles), name, fraction and seed.

    Raises:
        WorkspaceError: a file is damaged and there is no list of these; the message names it and
            the command that makes it again.
    """
    results = [*_bert(workspace, split, left_out), *_heads(workspace, split, left_out)]
    results += _quantised(workspace, split, left_out)
    results += _ensembles(workspace, split, {result.folder for result in results}, left_out)
    systems = get_args(System)
    return sorted(
        results,
        key=lambda r: (
            SnapshotTag(r.trained_on),
            SnapshotTag(r.checkpoint),
            systems.index(r.system),
            r.name,
            r.fraction,
            r.seed,
            r.run,
        ),
    )


def _bert(workspace: Workspace, split: str, left_out: list[str] | None) -> Iterator[Result]:
    for path in (workspace.root / "bert").glob("*/metrics.json"):
        yield from _encoder(workspace, path, split, "bert", "BERT", "bert", BERT_COMMAND, left_out)


def _quantised(workspace: Workspace, split: str, left_out: list[str] | None) -> Iterator[Result]:
    for path in (workspace.root / FOLDER).glob("*/metrics.json"):
        again = quantise_command(path.parent.name)
        yield from _encoder(workspace, path, split, "quantised", NAME, RUN, again, left_out)


def _encoder(
    workspace: Workspace,
    path: Path,
    split: str,
    system: System,
    name: str,
    run: str,
    command: str,
    left_out: list[str] | None,
) -> Iterator[Result]:
    """A snapshot with its own output layer; nothing where it is of another split or weights."""
    with leaving_out(left_out):
        tag = path.parent.name
        scores = read_record(path, BertScores, command)
        if SnapshotTag.is_valid(tag) and scores.split == split:
            there = weights_of_snapshot(workspace, tag)
            weights = [(workspace.snapshot_dir(tag), scores.weights_sha256, there)]
            if not is_current(path, weights, f"`{command}`", left_out):
                return
            yield Result(
                system=system,
                name=name,
                run=run,
                head=None,
                fraction=1.0,
                seed=0,
                trained_on=tag,
                checkpoint=tag,
                split=split,
                rules=scores.rules,
                folder=path.parent,
                command=command,
                sha256=scores.sha256,
                threshold_tuned_on=scores.threshold_tuned_on,
            )


def _heads(workspace: Workspace, split: str, left_out: list[str] | None) -> Iterator[Result]:
    read_config = cache(read_run_config)
    weights_of = cache(_weights_of_head)
    snapshots = cache(partial(weights_of_snapshot, workspace))
    suffix = "" if split == "dev" else f"-{split}"
    for path in (workspace.root / "heads").glob(f"*/[!.]*/eval/[!.]*{suffix}/metrics.json"):
        with leaving_out(left_out):
            checkpoint, folder = path.parent.name.removesuffix(suffix), path.parents[2]
            trained_on = folder.parent.name
            if not (is_head_of_snapshot(folder) and SnapshotTag.is_valid(checkpoint)):
                continue
            config = read_config(folder)
            training = config.training
            again = evaluation_command(config.run.text, trained_on, checkpoint, split)
            scores = read_record(path, HeadScores, again)
            if left_out is not None:
                read_run_metrics(folder)  # the costs of all that it is part of
            encoder = scores.provenance.get("weights_sha256")
            weights = [
                (folder, scores.weights_sha256, weights_of(folder)),
                (workspace.snapshot_dir(checkpoint), encoder, snapshots(checkpoint)),
            ]
            if not is_current(path, weights, f"`{again}`", left_out):
                continue
            yield Result(
                system="head",
                name=config.head + config.variant,
                run=folder.name,
                head=config.head,
                fraction=training.fraction,
                seed=training.seed,
                trained_on=trained_on,
                checkpoint=checkpoint,
                split=split,
                rules=scores.rules,
                folder=path.parent,
                command=again,
                sha256=scores.sha256,
                threshold_tuned_on=scores.threshold_tuned_on,
            )


def _ensembles(
    workspace: Workspace, split: str, current: set[Path], left_out: list[str] | None
) -> Iterator[Result]:
    """Ensembles whose members are among the current scores, or not scored on their own any more."""
    for path in (workspace.root / "ensembles").glob("*/[!.]*/metrics.json"):
        with leaving_out(left_out):
            scores = read_record(path, EnsembleScores, "bertvision ensemble")
            if scores.split != split:
                continue
            members, trained_on, checkpoint = scores.members, scores.trained_on, scores.checkpoint
            again = ensemble_command(members, scores.combine, trained_on, checkpoint, split)
            if _is_stale(workspace, scores, current, left_out):
                log.warning(
                    "%s is of other weights than its members have: `%s`", path.parent, again
                )
                continue
            yield Result(
                system="ensemble",
                name=ensemble_name(members, scores.combine),
                run=path.parent.name,
                head=None,
                fraction=scores.fraction,
                seed=scores.seed,
                trained_on=trained_on,
                checkpoint=checkpoint,
                split=split,
                rules=scores.rules,
                folder=path.parent,
                command=again,
                members=members,
                sha256=scores.sha256,
                threshold_tuned_on=scores.threshold_tuned_on,
            )


def _weights_of_head(folder: Path) -> str | None:
    """Nothing is known of a head whose record is damaged: whoever loads it is told."""
    with suppress(WorkspaceError):
        return read_run_metrics(folder).sha256.get("model.safetensors")
    return None


def _is_stale(
    workspace: Workspace,
    ensemble: EnsembleScores,
    current: set[Path],
    left_out: list[str] | None,
) -> bool:
    """Whether a member was trained and scored anew, or its scores are of other weights, or gone."""
    suffix = "" if ensemble.split == "dev" else f"-{ensemble.split}"
    for run, weights in ensemble.weights.items():
        model: type[BertScores | HeadScores] = BertScores
        folder = head = workspace.bert_dir(ensemble.checkpoint)
        if run != "bert":
            model, head = HeadScores, workspace.head_dir(ensemble.trained_on, run)
            folder = head / "eval" / f"{ensemble.checkpoint}{suffix}"
        path = folder / "metrics.json"
        if not path.is_file():
            continue
        files = (path, head / "config.json", head / "metrics.json")
        if any(str(file) in message for message in left_out or () for file in files):
            return True
        scores = read_record(path, model, ensemble.command)
        listed = folder in current or scores.split != ensemble.split
        if scores.weights_sha256 != weights or not listed:
            return True
    return False
