"""Sweep: heads × seeds × parts of the data × snapshots trained on × snapshots evaluated on.

Heads of one seed and snapshot are trained from one stream, whatever part of the data each is given,
and all heads are evaluated on a snapshot in one pass. What was done before is not done again, so an
interrupted sweep is continued by the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from bertvision.errors import InputError, UnknownNameError
from bertvision.featurestore.schema import SnapshotTag
from bertvision.models.heads import Kind
from bertvision.models.registry import describe_heads
from bertvision.pipelines.evaluate import STORED, evaluate_across, is_evaluated
from bertvision.pipelines.report.rows import read_rows
from bertvision.pipelines.results import Result, read_results
from bertvision.pipelines.runs import runs_of
from bertvision.pipelines.tasks.registry import TASKS
from bertvision.pipelines.train import TrainOptions, train
from bertvision.pipelines.workspace import Workspace

log = logging.getLogger(__name__)

_TOGETHER = 48
"""Heads evaluated in one pass: bounds the memory of their logits, and what a kill can lose."""


def sweep(
    workspace: Workspace,
    heads: Sequence[str] = (),
    *,
    trained_on: Sequence[str] = (),
    checkpoints: Sequence[str] = (),
    fractions: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0,),
    options: TrainOptions | None = None,
    split: str = "dev",
) -> list[Result]:
    """Train and evaluate every combination that is not there yet.

    Args:
        workspace: with the activations.
        heads: names of heads; by default all of the workspace's kind of task but the costly ones.
        trained_on: snapshots to train on; by default all whose training split is stored.
        checkpoints: snapshots to evaluate on; by default all whose ``split`` is stored.
        fractions: parts of the training examples, nested by seed; 0 is the head untrained.
        seeds: of initial weights, order, dropout and the choice of examples.
        options: how to train.
        split: what is scored.

    Returns:
        The results of these runs on these snapshots, as `read_results` orders them.

    Raises:
        UnknownNameError: there is no such head, snapshot or stored split.
        WorkspaceError: a run was trained with other options before; nothing was changed.
        StoppedError: SIGINT or SIGTERM; all is saved.
    """
    options = options or TrainOptions()
    kind: Kind = "span" if TASKS[workspace.config.task.name].tokens == "all" else "classification"
    model = workspace.config.model
    if not heads:
        states = model.num_hidden_layers + 1
        heads = default_heads(kind, layers=states, hidden=model.hidden_size)
    runs = runs_of(heads, fractions, seeds)
    sources = _tags(workspace, trained_on, STORED[kind].format("train"), "--trained-on")
    targets = _tags(workspace, checkpoints, STORED[kind].format(split), "--checkpoint")
    names = [run.name for run in runs]
    for tag in sources:
        log.info("train %d runs on %s", len(runs), tag)
        train(workspace, runs, tag, options)
    for tag in targets:
        missing = [
            (source, name)
            for source in sources
            for name in names
            if not is_evaluated(workspace, source, name, tag=tag, split=split)
        ]
        log.info("evaluate %d runs on %s", len(missing), tag)
        for first in range(0, len(missing), _TOGETHER):
            evaluate_across(
                workspace,
                missing[first : first + _TOGETHER],
                tag=tag,
                split=split,
                precision=options.precision,
            )
    return [
        result
        for result in read_results(workspace, split)
        if result.run in names and result.trained_on in sources and result.checkpoint in targets
    ]


def default_heads(kind: Kind, *, layers: int, hidden: int) -> list[str]:
    """The heads of a kind, but for those that cost as much as the encoder (see `HeadInfo`).

    Args:
        kind: of the heads.
        layers: number of hidden states of the encoder, the embedding output included.
        hidden: width of the hidden states.
    """
    return [info.name for info in describe_heads(layers, hidden, kind) if not info.costly]


def _tags(
    workspace: Workspace, wanted: Sequence[str], split: str, option: str
) -> list[SnapshotTag]:
    """The snapshots that are wanted, or all, of which a split is stored whole."""
    stored = sorted(SnapshotTag(tag) for tag, names in workspace.stored().items() if split in names)
    whole = [tag for tag in stored if workspace.split(tag, split).is_complete]
    tags = sorted({SnapshotTag(tag) for tag in wanted}) or whole
    if absent := [tag for tag in tags if tag not in whole]:
        held = ", ".join(whole) or "none"
        raise UnknownNameError(
            f"{option} {','.join(absent)}: no whole split {split} is stored; stored are {held}: "
            f"`bertvision extract --checkpoint {absent[0]}` writes it"
        )
    if not tags:
        raise InputError(
            f"no split {split} is stored: `bertvision extract` writes it; `bertvision status` says "
            "what there is"
        )
    return tags


def sweep_rows(workspace: Workspace, results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for each head, part of the data and pair of snapshots, its seeds together.

    Args:
        workspace: of the results.
        results: of heads.

    Returns:
        Rows as `read_rows` makes them: means and standard deviations over seeds, the difference
        from BERT at the snapshot evaluated on, costs, files and commands.
    """
    wanted = {(r.name, r.fraction, r.trained_on, r.checkpoint) for r in results}
    keys = ("name", "fraction", "trained_on", "checkpoint")
    return [row for row in read_rows(workspace).heads if tuple(row[key] for key in keys) in wanted]
