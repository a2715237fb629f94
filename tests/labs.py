"""A workspace in which systems were scored: BERT and two heads, on two snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path

from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.workspace import Workspace

HEADS = ["adapter-64-shared", "learned-pooling"]


def scored_copy(workspace: Workspace, folder: Path) -> Workspace:
    """A copy at ``folder``, with `HEADS` trained on 0.5e and scored on 0.5e and 1e.

    The training is done once per session; tests may change their copy.
    """
    made = workspace.root.with_name("scored")
    if not made.exists():
        _score(workspace, made)
    shutil.copytree(made, folder)
    return Workspace.find(folder)


def _score(workspace: Workspace, folder: Path) -> None:
    shutil.copytree(workspace.root, folder, ignore=lambda _, names: {"heads"} & set(names))
    made = Workspace.find(folder)
    train(made, HEADS, "0.5e", TrainOptions(precision="32", lr=0.01))
    for tag in ("0.5e", "1e"):
        evaluate(made, HEADS, trained_on="0.5e", tag=tag, precision="32")
