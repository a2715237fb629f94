"""The commands that make a result again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bertvision.pipelines.workspace.records import RunConfig

TRAINING_DEFAULTS: Mapping[str, Any] = {
    "epochs": 1,
    "batch_size": 16,
    "lr": 1e-3,
    "seed": 0,
    "fraction": 1.0,
    "best_epoch": False,
}
"""What `bertvision train` does where an option is left out (precision depends on the machine)."""

BERT_COMMAND = "bertvision finetune --resume"
"""The command that makes BERT's own results."""


def training_command(config: RunConfig, hidden_states: int | None = None) -> str:
    """The command that trains a run again: its options, but for those that are the default.

    The precision is always among them, because its default depends on the machine.

    Args:
        config: of the run.
        hidden_states: how many the encoder has; where the run was trained on all of them (of the
            [CLS] alone, and on the pooler output), ``--layers`` is left out. None writes it out.
    """
    training = config.training
    words = ["bertvision", "train", config.head, "--checkpoint", config.trained_on]
    for option in ("epochs", "batch_size", "lr"):
        words += _option(option, getattr(training, option))
    pooler = config.activations.get("tokens") == "cls"
    if hidden_states is None or config.layers != tuple(range(hidden_states + pooler)):
        words += ["--layers", ",".join(map(str, config.layers))]
    words += ["--precision", training.precision]
    for option in ("seed", "fraction"):
        words += _option(option, getattr(training, option))
    return shlex.join(words + (["--best-epoch"] if training.best_epoch else []))


def evaluation_command(run: str, trained_on: str, checkpoint: str, split: str = "dev") -> str:
    """The command that scores a run."""
    words = ["bertvision", "evaluate", run, "--trained-on", trained_on, "--checkpoint", checkpoint]
    return shlex.join(words + ([] if split == "dev" else ["--split", split]))


def ensemble_command(
    members: Sequence[str], combine: str, trained_on: str, checkpoint: str, split: str = "dev"
) -> str:
    """The command that makes an ensemble of runs, and of BERT where ``bert`` is a member."""
    words = ["bertvision", "ensemble", *(run for run in members if run != "bert")]
    words += ["--with-bert"] if "bert" in members else []
    words += ["--combine", combine, "--trained-on", trained_on, "--checkpoint", checkpoint]
    return shlex.join(words + ([] if split == "dev" else ["--split", split]))


def ensemble_name(members: Sequence[str], combine: str) -> str:
    """An ensemble as people read it: ``max(BERT, adapter-386-shared)``."""
    return f"{combine}({', '.join('BERT' if run == 'bert' else run for run in members)})"


def _option(name: str, value: Any) -> list[str]:
    if value == TRAINING_DEFAULTS[name]:
        return []
    text = f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return [f"--{name.replace('_', '-')}", text]
