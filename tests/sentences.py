"""Small sentence data that the tests share, in the words of the tiny BERT."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SUBJECTS = ["anna", "boris", "clara", "david"]
PLACES = ["london", "paris", "rome"]


def write_probing(path: Path, train: int = 40, dev: int = 12, test: int = 16) -> Path:
    """A file in SentEval's form, classes O and I: whether two words changed places."""
    random = np.random.default_rng(0)
    lines = []
    for split, count in (("tr", train), ("va", dev), ("te", test)):
        for i in range(count):
            words = [random.choice(SUBJECTS), "lives", "in", random.choice(PLACES)]
            words += ["and", "works", "."][: 3 if i % 3 else 1]
            if shifted := i % 2:
                words[1], words[2] = words[2], words[1]
            lines.append(f"{split}\t{'I' if shifted else 'O'}\t{' '.join(words)}")
    path.write_text("\n".join(lines) + "\n")
    return path
