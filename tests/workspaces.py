"""Small question sets and settings that the tests of the pipelines share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PEOPLE = ["anna", "boris", "clara", "david"]
SETTINGS: dict[str, Any] = {
    "epochs": 2.0,
    "save_at": ("0e", "0.3e", "1e", "1.5e"),
    "batch_size": 4,
    "accumulate": 2,
    "lr": 1e-3,
    "warmup": 0.1,
    "decay": "linear",
    "gradient_clip": 1.0,
    "tune_fraction": 0.2,
    "precision": "32",
    "seed": 5,
}


def write_squad(path: Path, contexts: int, seed: int) -> str:
    """Contexts of varied length with three questions, the third of them unanswerable."""
    random = np.random.default_rng(seed)
    paragraphs = []
    for c in range(contexts):
        people = random.permutation(PEOPLE)[:3]
        years = random.choice(["1901", "1902", "1950"], 3)
        text = "".join(f"{p} was born in {y} . " for p, y in zip(people, years, strict=True))
        context = text * int(random.integers(1, 5)) + f"firm {seed} {c} ."
        qas = []
        for q, (person, year) in enumerate(zip(people, years, strict=True)):
            found = [{"text": str(year), "answer_start": context.index(year)}]
            qas.append(
                {
                    "id": f"{seed}-{c}-{q}",
                    "question": f"when was {person} born ?" if q < 2 else f"who founded {person} ?",
                    "answers": found if q < 2 else [],
                    "is_impossible": q == 2,
                }
            )
        paragraphs.append({"context": context, "qas": qas})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))
    return str(path)


STOP_AT = """
import os, sys
from bertvision.pipelines.training.lightning import TrainingLog

def stop_at(step, signum, real=TrainingLog.on_train_batch_end):
    def on_train_batch_end(self, trainer, *rest):
        real(self, trainer, *rest)
        if trainer.global_step == step:
            os.kill(os.getpid(), signum)
    TrainingLog.on_train_batch_end = on_train_batch_end

if int(sys.argv[1]):
    stop_at(*map(int, sys.argv[1:3]))
"""
"""Start of a script whose training gets the signal ``argv[2]`` at the end of step ``argv[1]``."""


def answerable_options(model: Path, folder: Path) -> dict[str, Any]:
    """Options of a small workspace of the task answerable, with several windows to a context."""
    return {
        "model": str(model),
        "task": "answerable",
        "train": write_squad(folder / "train.json", 20, 1),
        "dev": write_squad(folder / "dev.json", 6, 2),
        "save_at": ("0e", "0.5e", "1e"),
        "batch_size": 8,
        "lr": 1e-3,
        "tune_fraction": 0.2,
        "precision": "32",
        "max_length": 30,
        "max_question_length": 8,
        "overlap": 4,
    }
