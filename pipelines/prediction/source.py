"""What a predictor is made of: the snapshot and the heads that a name in a workspace means."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bertvision.errors import BertvisionWarning, InputError
from bertvision.pipelines.prediction.backbone import BERT
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.systems import Combine, SystemName, find_system
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.trained_head import task_of_kind
from bertvision.pipelines.workspace.heads import find_head, only_tag, trained_on
from bertvision.pipelines.workspace.records import read_run_config
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    pass


class Source(NamedTuple):
    """What a predictor is made of, in a workspace."""

    name: str
    snapshot: Path
    members: tuple[str, ...]
    heads: dict[str, Path]
    """Folders of its heads, by the names of them among the members."""
    combine: Combine | None
    threshold: float | None


def find_source(text: str, folder: Path, workspace: str | Path | None) -> Source:
    """The snapshot and the heads that a name, or a folder in a workspace, means.

    Raises:
        UnknownNameError: There is no such head, snapshot or ensemble.
        InputError: The folder holds nothing that answers.
    """
    if folder.is_dir():
        folder = folder.resolve()
        if (folder / "snapshot.json").is_file():
            workspace, text = folder.parents[1], f"{BERT}:{folder.name}"
        elif folder.parents[1].name == "heads" and (folder / "config.json").is_file():
            workspace, text = folder.parents[2], f"{folder.name}:{folder.parent.name}"
        else:
            raise InputError(
                f"{folder} is no snapshot, no trained head in a workspace and no folder of "
                "Predictor.save_pretrained"
            )
    space = Workspace.find(workspace)
    asked = SystemName.parse(text)
    results = read_results(space, "dev", left_out=[])
    if asked.name == BERT:
        tag = asked.checkpoint or only_tag(space.snapshots(), "snapshots")
        return Source(
            f"{BERT}:{tag}",
            *(space.require_snapshot(tag), (BERT,), {}, None),
            _threshold(space, results, BERT, tag, tag),
        )
    if asked.name.startswith(("max-", "mean-")) and "+" in asked.name:
        ensemble = find_system(results, text)
        on, tag = ensemble.trained_on, ensemble.checkpoint
        runs = [run for run in ensemble.members if run != BERT]
        return Source(
            text,
            space.require_snapshot(tag),
            tuple(run if run == BERT else f"{run}:{on}" for run in ensemble.members),
            {f"{run}:{on}": find_head(space, on, run) for run in runs},
            "max" if asked.name.startswith("max-") else "mean",
            ensemble.rules["n-best"]["threshold"] if "n-best" in ensemble.rules else None,
        )
    run = Run.parse(asked.name)
    on = asked.trained_on or trained_on(space, [run.text])
    tag = asked.checkpoint or on
    name = f"{run.name}:{on}"
    return Source(
        name if tag == on else f"{name}:{tag}",
        *(space.require_snapshot(tag), (name,), {name: find_head(space, on, run.name)}, None),
        _threshold(space, results, run.name, on, tag),
    )


def _threshold(
    space: Workspace, results: Sequence[Result], run: str, trained_on: str, tag: str
) -> float | None:
    """The threshold of no answer that a system was scored with; None where its task has none."""
    config = space.config.task
    kind = None if run == BERT else read_run_config(find_head(space, trained_on, run)).kind
    task = load_task(config.name) if kind is None else task_of_kind(kind, config.name)
    if not task.tunes:
        return None
    for result in results:
        if (result.run, result.trained_on, result.checkpoint) == (run, trained_on, tag):
            return result.rules["n-best"]["threshold"]
    warnings.warn(
        f"the no-answer threshold of {run}:{tag} is 0, since it was not scored: `bertvision "
        + (f"evaluate {run} --checkpoint {tag}` tunes it" if run != BERT else "finetune` tunes it"),
        BertvisionWarning,
        stacklevel=2,
    )
    return 0.0
