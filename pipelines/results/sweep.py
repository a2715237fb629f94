"""Sweep: heads × seeds × parts of the data × snapshots trained on × snapshots evaluated on.

Heads of one seed and snapshot are trained from one stream, whatever part of the data each is given,
and all heads are evaluated on a snapshot in one pass. What was done before is not done again, so an
interrupted sweep is continued by the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.models import Kind
from bertvision.models.factory import describe_heads
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.progress import parts
from bertvision.pipelines.ranks import this_rank
from bertvision.pipelines.results.columns import grouped
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.tasks.registry import head_kind
from bertvision.pipelines.tasks.scores import headline, headline_metric
from bertvision.pipelines.training.evaluate import evaluate_across, is_evaluated
from bertvision.pipelines.training.launch import share_out
from bertvision.pipelines.training.train import train
from bertvision.pipelines.training.trained_head import kind_of_run
from bertvision.pipelines.training.training_pass import SplitOpener
from bertvision.pipelines.workspace.heads import (
    ResidentActivations,
    head_activations,
    stored_tags,
)
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.reproduce import option_words
from bertvision.pipelines.workspace.runs import Run, check_told, own_part, runs_of
from bertvision.pipelines.workspace.workspace import Workspace

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
    rates: Sequence[float] = (),
    options: TrainOptions | None = None,
    split: str = "dev",
    devices: int = 1,
    data_device: str | None = None,
) -> list[Result]:
    """Train and evaluate every combination that is not there yet.

    Of several learning rates all are trained and scored on ``tune``; the best of each head, part
    and snapshot, by the mean over seeds, is scored on ``split``.

    Args:
        workspace: Workspace with the activations.
        heads: names of heads; by default all of the workspace's kind of task but the costly ones.
        trained_on: snapshots to train on; by default all whose training split is stored.
        checkpoints: snapshots to evaluate on; by default all whose ``split`` is stored.
        fractions: parts of the training examples, nested by seed; 0 is the head untrained.
        seeds: Seeds of initial weights, order, dropout and the choice of examples.
        rates: Learning rates to choose from; none trains with that of the options.
        options: Options of training.
        split: Split that is scored.
        devices: processes that share the heads out among them.
        data_device: Device that the codes of training splits stay on; None streams them.

    Returns:
        The results of these runs on these snapshots, as `read_results` orders them.

    Raises:
        UnknownNameError: there is no such head, snapshot or stored split.
        WorkspaceError: a run was trained with other options before; nothing was changed.
        StoppedError: SIGINT or SIGTERM; all is saved.
        RankLostError: one of several processes ended; names it.
    """
    options = options or TrainOptions()
    asked = asked_runs(workspace, heads, fractions, seeds, options, rates)
    if devices > 1:
        words = ["sweep", *(run.text for run in asked), *option_words(options), "--split", split]
        for name, tags in (("--trained-on", trained_on), ("--checkpoint", checkpoints)):
            words += [name, ",".join(tags)] if tags else []
        words += [] if data_device is None else ["--data-device", data_device]
        share_out(words, workspace, asked, devices)  # what follows finds everything done
    rank = this_rank()
    rank.claim_device()
    runs = options.named(own_part(asked, rank), workspace.config.model)
    groups, sources, targets = combinations(workspace, runs, trained_on, checkpoints, split)
    if rates:
        for tokens, tags in sources.items():
            for tag in tags:  # before anything is trained
                head_activations(workspace, tag, tokens, "tune")
    splits: SplitOpener = head_activations
    if data_device is not None:
        splits = ResidentActivations(data_device, runs, options.layers)
    trainings = [(group, tag) for tokens, group in groups.items() for tag in sources[tokens]]
    weights = [len(group) for group, _ in trainings]
    for (group, tag), part in zip(trainings, parts(weights, "training"), strict=True):
        log.info("train %s on %s", counted(len(group), "head"), tag)
        with part:
            train(workspace, group, tag, options, splits=splits)
    del splits  # and the memory of a device is free
    wanted: set[tuple[str, str, str]] = set()
    for tokens, group in groups.items():
        trained = [(str(source), run) for source in sources[tokens] for run in group]
        if rates:
            for tag in sources[tokens]:
                own = [pair for pair in trained if pair[0] == tag]
                _evaluate_missing(workspace, own, tag, "tune", options.precision)
            trained = best_rates(workspace, trained)
        for tag in targets[tokens]:
            _evaluate_missing(workspace, trained, tag, split, options.precision)
            wanted |= {(run.name, source, tag) for source, run in trained}
    return [
        result
        for result in read_results(workspace, split)
        if (result.run, result.trained_on, result.checkpoint) in wanted
    ]


def _evaluate_missing(
    workspace: Workspace,
    trained: Sequence[tuple[str, Run]],
    tag: SnapshotTag,
    split: str,
    precision: str,
) -> None:
    """Score the heads that are not scored on a split of a snapshot yet."""
    missing = unscored(workspace, trained, tag, split, precision)
    log.info("evaluate %s on %s of %s", counted(len(missing), "head"), split, tag)
    for first in range(0, len(missing), _TOGETHER):
        part = missing[first : first + _TOGETHER]
        evaluate_across(workspace, part, tag=tag, split=split, precision=precision)


def best_rates(workspace: Workspace, trained: Sequence[tuple[str, Run]]) -> list[tuple[str, Run]]:
    """The runs whose learning rate does best on ``tune``, of each head, part and snapshot.

    Rates are compared by the mean over seeds of the metric that stands for the task; of answers
    whose threshold is tuned on ``tune``, by F1 with the best threshold there. Of equals the
    smallest is taken.

    Args:
        workspace: Workspace in which they are scored on ``tune`` of their own snapshot.
        trained: Snapshot that each run was trained on, and the run, whose name has its rate.
    """
    scores: dict[tuple[str, str], float] = {}
    for result in read_results(workspace, "tune"):
        if result.trained_on == result.checkpoint:
            metrics = headline(result.rules)
            oracle = "best_f1" if "best_f1" in metrics else None
            key = oracle or headline_metric(workspace.config.task.name, metrics)
            scores[result.trained_on, result.run] = metrics[key]
    best: list[tuple[str, Run]] = []
    for alike in grouped(trained, _but_for_rate).values():
        rates = grouped(alike, lambda pair: float(pair[1].settings["lr"]))
        means = {
            rate: fmean(scores[source, run.name] for source, run in pairs)
            for rate, pairs in sorted(rates.items())
        }
        chosen = max(means, key=lambda rate: means[rate])
        told = ", ".join(f"{rate:g}: {mean:.1f}" for rate, mean in means.items())
        source, run = alike[0]
        log.info("%s on %s: learning rate %g (on tune %s)", run.head, source, chosen, told)
        best += rates[chosen]
    return best


def _but_for_rate(pair: tuple[str, Run]) -> tuple[Hashable, ...]:
    """Parts of a run's name that do not say its learning rate and seed."""
    source, run = pair
    settings = sorted((name, value) for name, value in run.settings.items() if name != "lr")
    return source, run.head, run.fraction, *settings


class Combinations(NamedTuple):
    """Combinations of a sweep, by the tokens that heads read."""

    groups: dict[TokenPooling, list[Run]]
    """The runs."""
    sources: dict[TokenPooling, list[SnapshotTag]]
    """Snapshots that these are trained on."""
    targets: dict[TokenPooling, list[SnapshotTag]]
    """Snapshots that they are evaluated on."""


def asked_runs(
    workspace: Workspace,
    heads: Sequence[str],
    fractions: Sequence[float],
    seeds: Sequence[int],
    options: TrainOptions,
    rates: Sequence[float] = (),
) -> list[Run]:
    """The runs of a sweep, as they were asked for.

    Args:
        workspace: Workspace whose task decides which heads are meant where none is named.
        heads: As in `sweep`, likewise ``fractions``, ``seeds`` and ``options``.
        fractions: parts of the training examples.
        seeds: Seeds of each head and part.
        options: Options of training.
        rates: Learning rates to choose from.

    Raises:
        UnknownNameError: there is no such head.
        InputError: no head learns the task, or a teacher or a learning rate is named twice.
    """
    model, task = workspace.config.model, workspace.config.task.name
    if not heads:
        states = model.num_hidden_layers + 1
        heads = default_heads(head_kind(task), layers=states, hidden=model.hidden_size)
    asked = runs_of(heads, fractions, seeds)
    check_told(asked, options.distil, options.temperature, options.labels_weight)
    if rates and (named := [run.text for run in asked if "lr" in run.settings]):
        raise InputError(f"{named[0]} names its own learning rate: leave it out, or --lr")
    if rates and "tune" not in workspace.splits():
        raise InputError(
            f"{workspace.root} holds nothing out of train to choose a learning rate on: give one "
            "--lr, or make another workspace with --tune-fraction above 0"
        )
    return [run.having(lr=rate) for run in asked for rate in rates] if rates else asked


def combinations(
    workspace: Workspace,
    runs: Sequence[Run],
    trained_on: Sequence[str],
    checkpoints: Sequence[str],
    split: str,
) -> Combinations:
    """Runs, and the snapshots that they are trained and evaluated on.

    Args:
        workspace: Workspace with the activations.
        runs: Runs with the names that they are kept under (`TrainOptions.named`).
        trained_on: As in `sweep`, likewise ``checkpoints`` and ``split``.
        checkpoints: snapshots to evaluate on.
        split: Split that is scored.

    Raises:
        UnknownNameError: of a snapshot that is named nothing is stored.
        InputError: nothing is stored at all.
    """
    task = workspace.config.task.name
    groups = grouped(runs, lambda run: run.tokens(kind_of_run(run, task)))
    return Combinations(
        groups,
        {t: stored_tags(workspace, trained_on, t, "train", "--trained-on") for t in groups},
        {t: stored_tags(workspace, checkpoints, t, split, "--checkpoint") for t in groups},
    )


def unscored(
    workspace: Workspace,
    trained: Sequence[tuple[str, Run]],
    tag: str,
    split: str,
    precision: str,
) -> list[tuple[str, Run]]:
    """The snapshots and runs trained on them that are not scored on a snapshot yet.

    Args:
        workspace: Workspace with the activations.
        trained: Snapshots, and runs that are trained on them.
        tag: Snapshot that they are scored on.
        split: Split that is scored.
        precision: Precision of the scoring.
    """
    return [
        (source, run)
        for source, run in trained
        if not is_evaluated(workspace, source, run.name, tag=tag, split=split, precision=precision)
    ]


def default_heads(kind: Kind, *, layers: int, hidden: int) -> list[str]:
    """The heads of a kind, but for those that cost as much as the encoder (see `HeadInfo`).

    Args:
        kind: Kind of the heads.
        layers: number of hidden states of the encoder, the embedding output included.
        hidden: width of the hidden states.
    """
    return [info.name for info in describe_heads(layers, hidden, kind) if not info.costly]


def sweep_rows(workspace: Workspace, results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for each head, part of the data and pair of snapshots, its seeds together.

    Args:
        workspace: Workspace of the results.
        results: Results of heads.

    Returns:
        Rows as `read_rows` makes them: means and standard deviations over seeds, the difference
        from BERT at the snapshot evaluated on, the score of always giving the commonest answer
        (``baseline``), costs, files and commands.
    """
    wanted = {(r.name, r.fraction, r.trained_on, r.checkpoint) for r in results}
    keys = ("name", "fraction", "trained_on", "checkpoint")
    result_rows = read_rows(workspace, results[0].split if results else "dev")
    rows = [*result_rows.heads, *result_rows.others]
    return [row for row in rows if tuple(row[key] for key in keys) in wanted]
