"""Folders of transformers' Trainer: its checkpoints, and how far each was trained.

``trainer_state.json`` is all that is read; ``training_args.bin`` and the optimiser are pickles.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from bertvision.errors import InputError
from bertvision.pipelines.records import Record, what_is_wrong

_FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)", re.ASCII)


class TrainerState(Record):
    """The point of a training at which a checkpoint was saved."""

    global_step: Annotated[int, Field(ge=1)]
    """Optimiser steps taken."""
    epoch: Annotated[float, Field(gt=0)]
    """Epochs trained."""


def trainer_state(folder: Path) -> TrainerState | None:
    """The state in the folder of a checkpoint; None where it has none.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        InputError: the file is damaged, or nothing was trained yet.
    """
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        return TrainerState.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(
            f"{path} does not say how long was trained ({what_is_wrong(error)}): remove it and say "
            "it yourself, such as FOLDER:1e"
        ) from error


def checkpoint_folders(folder: Path) -> tuple[list[Path], list[Path]]:
    """Folders ``checkpoint-500``, … that Trainer wrote into its output folder, by step.

    Returns:
        Those with a configuration; and those without one, as a killed training leaves.
    """
    numbered = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name))
    }
    paths = [numbered[step] for step in sorted(numbered)]
    whole = [path for path in paths if (path / "config.json").is_file()]
    return whole, [path for path in paths if path not in whole]
