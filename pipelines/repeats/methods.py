"""Methods as they are typed, and the scored run of each of their seeds.

A method is written ``FOLDER`` or ``FOLDER@NAME[:TRAINED_ON[:CHECKPOINT]]``: BERT at its last
snapshot, or another system that was scored in the workspace of every seed.
"""

from __future__ import annotations

import reprlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.repeats.folder import require_seeds
from bertvision.pipelines.results.costs import read_costs
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.systems import find_system, label
from bertvision.pipelines.tasks.scores import (
    CORRELATIONS,
    first_trivial_score,
    headline,
    headline_metric,
    trivial_metrics,
)
from bertvision.pipelines.workspace.records import read_run_metrics, read_snapshot_info
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.workspace import Workspace

_TASK = (
    *("name", "answerable_only", "skip_bad", "dev_fraction", "linked"),
    *("classes", "text", "pair", "label"),
)
"""Settings of the task that decide what is scored; how texts are cut is a method's own."""


class SeedRun(NamedTuple):
    """A system, fine-tuned or trained with one seed, and scored on dev."""

    seed: int
    score: float
    """Per cent."""
    trained_parameters: int | None
    """Those of the encoder and its output layer, of a head those of the head; None of ensembles,
    and of snapshots of earlier versions."""
    kept_bytes: int | None
    """Bytes of the weights that are kept for the task: the snapshot's, or the head's beside the
    encoder it was trained on; None of ensembles."""
    fine_tuning_seconds: float | None
    """Steps × median seconds of a step; None where it was not recorded."""
    extraction_seconds: float | None
    training_seconds: float | None
    """Training of a head; 0 of BERT."""
    folder: str
    """Where ``metrics.json`` is."""


class Unfinished(NamedTuple):
    """A seed without a score."""

    seed: int
    command: str
    """What makes it."""


class Method(NamedTuple):
    """The runs of a folder, seeds in order."""

    name: str
    """The folder's name, with the system behind it where it was named."""
    root: Path
    system: str
    """As one types it: ``bert:3e``."""
    variant: tuple[str, ...]
    task: str
    metric: str
    trivial: float | None
    """Score of always giving the commonest answer, in per cent; None where that has none to tell,
    as of correlations."""
    trivial_name: str
    """What that answer is called: ``majority class``, ``never answering``, …."""
    runs: tuple[SeedRun, ...]
    """At least one."""
    unfinished: tuple[Unfinished, ...]
    compared: dict[str, Any]
    """What methods must have in common to be compared."""


def read_method(text: str) -> Method:
    """The runs of a method.

    Args:
        text: ``FOLDER[@NAME[:TRAINED_ON[:CHECKPOINT]]]``.

    Raises:
        WorkspaceError: there is no such folder, it holds no runs, they differ in more than the
            seed, none of them is scored, or a file is damaged.
        UnknownNameError: no seed has such a system, or several are meant.
        InputError: the folder is a file.
    """
    root, system = _parsed(text)
    workspaces = require_seeds(root)
    results = [read_results(workspace) for workspace in workspaces]
    if system is None:
        written = (
            f"bert:{[tag for tag in workspaces[0].config.finetune.tags if not tag.is_mean][-1]}"
        )
        command = BERT_COMMAND
    else:  # what the seeds have together decides, so that the same is taken of each
        meant = find_system([*{label(r): r for of in results for r in of}.values()], system)
        written, command = label(meant), meant.command
    runs, unfinished, found = [], [], []
    for workspace, of in zip(workspaces, results, strict=True):
        seed = workspace.config.finetune.seed
        if (result := next((r for r in of if label(r) == written), None)) is None:
            again = f"{command} --workspace {shlex.quote(str(workspace.root))}"
            unfinished.append(Unfinished(seed, again))
        else:
            found.append(result)
            runs.append(_run(workspace, result))
    if not found:
        raise WorkspaceError(
            f"{root}: none of its runs is scored yet; `{unfinished[0].command}` finishes the first"
        )
    config = workspaces[0].config
    compared = [_compared(workspace, result) for result in found]
    for other in compared[1:]:
        _check(root, root, compared[0], other)
    metric = compared[0]["metric"]
    every = [headline(result.rules) for result in found]
    trivial = first_trivial_score(every, metric)
    return Method(
        name=root.name if system is None else f"{root.name}@{system}",
        root=root,
        system=written,
        variant=config.finetune.variant,
        task=config.task.name,
        metric=metric,
        trivial=trivial,
        trivial_name=_trivial_name(every[0], metric, trivial),
        runs=tuple(runs),
        unfinished=tuple(unfinished),
        compared=compared[0],
    )


def check_comparable(methods: Sequence[Method]) -> None:
    """Refuse methods of another task, other data or another metric than the first.

    Raises:
        InputError: one comes twice.
        WorkspaceError: one is of something else; names what.
    """
    seen = set()
    for method in methods:
        if (key := (method.root, method.system)) in seen:
            raise InputError(f"{method.name} is named twice: name each method once")
        seen.add(key)
        _check(methods[0].root, method.root, methods[0].compared, method.compared)


def _parsed(text: str) -> tuple[Path, str | None]:
    """Folder and system; an ``@`` that is part of the folder's name stays there."""
    places = [text, *(text[:i] for i, letter in enumerate(text) if letter == "@")]
    folder = next((p for p in places if p and Path(p).expanduser().exists()), None)
    if folder is None:
        folder = text.partition("@")[0]
    system = text[len(folder) + 1 :]
    if len(folder) < len(text) and not system:
        raise InputError(
            f"{text!r} names no system behind the @: write {folder}@bert:1e, or leave "
            "it out to mean the last snapshot of BERT"
        )
    return Path(folder).expanduser().resolve(), system or None


def _run(workspace: Workspace, result: Result) -> SeedRun:
    metrics = headline(result.rules)
    (costs,) = read_costs(workspace, [result])
    trained = weights = None
    if result.system in ("bert", "quantised"):
        weights = workspace.snapshot_dir(result.checkpoint)
        trained = read_snapshot_info(weights).trained_parameters
    elif result.system == "head":
        weights = result.folder.parents[1]
        trained = read_run_metrics(weights).trainable
    files = weights.glob("*.safetensors") if weights else ()
    return SeedRun(
        seed=workspace.config.finetune.seed,
        score=metrics[headline_metric(workspace.config.task.name, metrics)],
        trained_parameters=trained,
        kept_bytes=sum(file.stat().st_size for file in files) if weights else None,
        fine_tuning_seconds=costs["fine_tuning_seconds"],
        extraction_seconds=costs["extraction_seconds"],
        training_seconds=costs["training_seconds"],
        folder=str(result.folder),
    )


def _trivial_name(metrics: Mapping[str, float], metric: str, trivial: float | None) -> str:
    if trivial is None:
        return "no correlation" if metric in CORRELATIONS else "nothing right"
    return trivial_metrics(trivial, metrics)[0].strip("()")


def _compared(workspace: Workspace, result: Result) -> dict[str, Any]:
    config, metrics = workspace.config, headline(result.rules)
    task = config.task.model_dump(mode="json", include=set(_TASK))
    return {
        "task": {name: task[name] for name in _TASK},
        "data": {split: config.data[split].sha256 for split in ("train", "dev")},
        "misfits": config.data["dev"].misfits,
        "metric": headline_metric(config.task.name, metrics),
        "threshold_tuned": not result.untuned,
    }


def _check(first: Path, root: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    if difference := first_difference(there, here):
        name, of_first, own = difference
        raise WorkspaceError(
            f"{root} cannot be compared with {first}: {name} is {reprlib.repr(own)}, there it is "
            f"{reprlib.repr(of_first)}; methods are compared on one task, its data and its metric"
        )
