"""What is asked of a treebank: which splits are read, how probes are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from bertvision.errors import InputError
from bertvision.pipelines.options import Option, Options
from bertvision.pipelines.stored_name import StoredName


@dataclass(frozen=True, kw_only=True)
class StructureOptions(Options):
    """Settings of the training of all probes, and of the intervals of their scores.

    Those of the training are Hewitt & Manning's (2019, section 3 and appendix): Adam at 0.001,
    batches of 20 sentences, at most 40 epochs.
    """

    rank: Annotated[int, Option("Rank of the structural probes, at most.", ge=1)] = 128
    """Hewitt & Manning found no gain above 64 or 128."""
    units: Annotated[
        int, Option("Hidden units of the classifiers of edge probing; 0 is a linear one.", ge=0)
    ] = 256
    seeds: Annotated[int, Option("How many times each probe is trained.", ge=1)] = 3
    epochs: Annotated[int, Option("Most epochs of a training; the best on dev is kept.", ge=1)] = 40
    batch_size: Annotated[int, Option("Sentences per step.", ge=1)] = 20
    lr: Annotated[float, Option("Learning rate of Adam at the start.", gt=0)] = 1e-3
    resamples: Annotated[int, Option("How often the bootstrap draws, for intervals.", ge=1)] = 1000
    seed: Annotated[int, Option("First seed of starts and batches.", ge=0, lt=1 << 31)] = 0


def treebank_splits(split: str) -> tuple[str, str, str]:
    """The stored splits that are needed to score one: train, dev, and itself.

    Args:
        split: as it is stored, such as ``treebank-test``.

    Raises:
        InputError: it is the training part itself, or keeps one vector for each sentence.
    """
    name = StoredName.parse(split)
    if name.tokens != "all" or name.split == "train":
        raise InputError(
            f"--split {split}: give one of all tokens that no probe is trained on, such as "
            f"{StoredName('test', 'all', name.dataset).name}"
        )
    train, dev = (StoredName(part, "all", name.dataset).name for part in ("train", "dev"))
    return train, dev, split
