"""A workspace with a tiny encoder and sentences of many lengths, made in a second."""

from __future__ import annotations

import random
from pathlib import Path

from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.dataset import add_dataset
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

WORDS = ["anna", "was", "born", "in", "1901", "who", "founded", "the", "firm", "."]


def sentence_space(model: Path, folder: Path, sentences: int = 90) -> Workspace:
    """A workspace in ``folder`` with snapshot 0e and the data set ``sentences`` (split ``all``).

    Args:
        model: the encoder.
        folder: of the workspace and its data.
        sentences: how many, of 3 to 60 words.
    """
    space = feature_workspace(folder / "workspace", str(model))
    drawn = random.Random(0)
    lines = [
        f"{' '.join(drawn.choices(WORDS, k=drawn.randint(3, 60)))},{i % 2}"
        for i in range(sentences)
    ]
    source = folder / "sentences.csv"
    source.write_text("\n".join(["text,label", *lines]))
    add_dataset(space.root, "csv", str(source), text="text", label="label", max_length=100)
    ensure_snapshot(space, "0e")
    return space
