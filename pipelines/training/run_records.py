"""The records beside a trained head's weights: its settings, and what its training came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertvision.pipelines.records import read_record
from bertvision.pipelines.workspace.reproduce import TRAINING_DEFAULTS, train_again


def read_run_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a run, with the defaults of what older runs did not record.

    Args:
        folder: ``heads/<trained_on>/<run>``.

    Raises:
        WorkspaceError: it is damaged.
    """

    def complete(values: dict[str, Any]) -> dict[str, Any]:
        training = {**TRAINING_DEFAULTS, **values["training"]}
        str(values["head"]), str(values["trained_on"]), len(values["layers"])
        training["fraction"], training["seed"] = float(training["fraction"]), int(training["seed"])
        return {"kind": "span", **values, "training": training}

    return read_record(folder / "config.json", train_again(folder), complete)


def read_run_metrics(folder: Path) -> dict[str, Any]:
    """``metrics.json`` of a run's training, with the defaults of what older runs did not record.

    Args:
        folder: ``heads/<trained_on>/<run>``.

    Raises:
        WorkspaceError: it is damaged.
    """

    def complete(values: dict[str, Any]) -> dict[str, Any]:
        own = values["seconds"] / max(1, len(values.get("trained_together", ())))
        return {"own_seconds": own, "examples": None, "epoch": None, **values}

    return read_record(folder / "metrics.json", train_again(folder), complete)
