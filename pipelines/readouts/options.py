"""Options of readouts: how each is trained, and the names of its scorers.

Nothing heavy is imported here, so that the command line answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, get_args

from bertvision.errors import InputError
from bertvision.pipelines.options import Option, Options
from bertvision.pipelines.reading import StoredName

Criterion = Literal["accuracy", "loss"]
"""Score on held-out examples that stops a probe and chooses its weight decay."""
Solver = Literal["adam", "lbfgs", "ridge"]
ScorerName = Literal["cosine", "bilinear", "logistic", "mlp", "logistic-uv", "mlp-uv"]
SCORERS: tuple[ScorerName, ...] = get_args(ScorerName)
"""Scorers of a question and a passage."""
CROSS_ENCODER = "cross-encoder"
"""The fine-tuned encoder itself, which reads question and passage together."""
PairScorerName = Literal["cosine", "trained"]
PAIR_SCORERS: tuple[PairScorerName, ...] = get_args(PairScorerName)
"""Scorers of the similarity of two sentences."""
SyntaxMetric = Literal["uuas", "dspr", "root", "nspr", "upos", "relation"]
SYNTAX_METRICS: tuple[SyntaxMetric, ...] = get_args(SyntaxMetric)
"""Metrics of syntax: two of the distance probe, two of the depth probe, two of edge probes."""
Baseline = Literal["chain", "random", "majority"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
"""Each word hangs on the one before it; a random tree; the most frequent label."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Options):
    """Settings of a probe's training.

    The defaults are those of SentEval (Conneau & Kiela 2018, LREC; ``senteval/tools/classifier.py``
    and ``validation.py``): one linear layer, Adam at 1e-3, batches of 64, dev accuracy every 4
    epochs, the weight decay with the best dev accuracy. The weight decay is added to the gradient
    of the mean loss and applies to the biases as well, as there.
    """

    hidden: Annotated[int, Option(ge=0)] = 0
    """Units of the hidden layer, with a sigmoid; 0 is a linear probe."""
    batch_size: Annotated[int, Option("Examples per step.", ge=1)] = 64
    solver: Annotated[
        Solver,
        Option(
            "adam as in SentEval; lbfgs as scikit-learn's LogisticRegression; ridge for scores, as "
            "its RidgeCV.",
            later=True,
        ),
    ] = "adam"
    """With ``lbfgs`` the loss is the mean cross-entropy plus half the weight decay times the sum of
    the squared weights, without the biases: scikit-learn's ``C`` is 1 / (weight decay × training
    examples). With ``ridge`` it is half the mean squared error plus the same, so that ``alpha`` is
    weight decay × training examples."""
    lr: Annotated[float, Option(gt=0)] = 1e-3
    epoch_size: Annotated[int, Option(ge=1)] = 4
    """Epochs between two looks at the held-out examples."""
    tenacity: Annotated[int, Option(ge=0)] = 5
    """Looks without a new best that are forgiven, in all; one more ends the training."""
    max_epochs: Annotated[int, Option("Most epochs of a training.", "--epochs", ge=1)] = 200
    weight_decays: Annotated[
        tuple[float, ...], Option("Weight decays to try; the best on held-out examples is taken.")
    ] = (1e-5, 1e-4, 1e-3, 1e-2)
    standardise: Annotated[bool, Option("Scale features by the training examples.")] = False
    """Features then have mean 0 and deviation 1."""
    folds: Annotated[int, Option("Parts of the cross-validation, for data in one piece.", ge=2)] = (
        10
    )
    group: Annotated[
        str | None,
        Option(
            "Column of groups (task csv), each scored by probes of the others alone.", later=True
        ),
    ] = None
    """Leaves one group out at a time, in the place of ``folds``, of data in one piece."""
    dev_fraction: Annotated[float, Option(gt=0, lt=1)] = 0.1
    """Part of the training examples that is held out where the data have no dev split."""
    seed: Annotated[int, Option("Seed of starts, batches and folds.", ge=0, lt=1 << 63)] = 1111
    """Below 2^63: that of torch's generators."""

    def __post_init__(self) -> None:
        super().__post_init__()
        decays = self.weight_decays
        if not decays or decays[0] < 0 or any(b <= a for a, b in pairwise(decays)):
            raise InputError(
                f"--weight-decays {','.join(map(str, decays))}: give numbers from 0 in increasing "
                "order, such as 1e-5,1e-4"
            )
        if self.solver != "adam" and self.hidden:
            raise InputError(
                f"--solver {self.solver} is of linear probes, whose optimum is one: leave it out, "
                "or the hidden layer (--mlp)"
            )
        if self.solver == "ridge" and not decays[0]:
            raise InputError(
                "--weight-decays 0 with --solver ridge: leave-one-out needs decays above 0"
            )


@dataclass(frozen=True, kw_only=True)
class RankOptions(Options):
    """Settings of the training of scorers."""

    margin: Annotated[float, Option("Margin of the pairwise hinge loss.", gt=0)] = 1.0
    """By how much a positive passage must score above a negative one to cost nothing."""
    epochs: Annotated[int, Option("Most epochs; the best on dev is kept.", ge=0)] = 30
    patience: Annotated[
        int, Option("Epochs without a better MAP on dev that end a training.", ge=1)
    ] = 5
    batch_size: Annotated[int, Option("Questions per step.", ge=1)] = 32
    lr: Annotated[float, Option("Learning rate of AdamW.", gt=0)] = 1e-3
    weight_decay: Annotated[float, Option("Weight decay of AdamW.", ge=0)] = 1e-2


@dataclass(frozen=True, kw_only=True)
class SimilarityOptions(Options):
    """Settings of the trained scorer, and of the intervals of all."""

    seeds: Annotated[int, Option("Trainings of the trained scorer.", ge=1)] = 3
    epochs: Annotated[int, Option("Most epochs; the best on dev is kept.", ge=1)] = 100
    patience: Annotated[
        int, Option("Epochs without a better dev score that end a training.", ge=1)
    ] = 10
    batch_size: Annotated[int, Option("Pairs per step.", ge=1)] = 64
    lr: Annotated[float, Option("Learning rate of AdamW.", gt=0)] = 1e-3
    weight_decay: Annotated[float, Option("Weight decay of AdamW.", ge=0)] = 1e-2
    dev_fraction: Annotated[float, Option(gt=0, lt=1)] = 0.1
    """Part of the training pairs that is held out where the data have no dev to choose on."""
    resamples: Annotated[int, Option("Bootstrap samples of intervals.", ge=1)] = 1000


@dataclass(frozen=True, kw_only=True)
class StructureOptions(Options):
    """Settings of the training of all probes, and of the intervals of their scores.

    Those of the training are Hewitt & Manning's (2019, section 3 and appendix): Adam at 0.001,
    batches of 20 sentences, at most 40 epochs.
    """

    rank: Annotated[int, Option("Rank of the structural probes, at most.", ge=1)] = 128
    """Hewitt & Manning found no gain above 64 or 128."""
    units: Annotated[int, Option("Hidden units of edge probes; 0 is linear.", ge=0)] = 256
    seeds: Annotated[int, Option("Trainings of each probe.", ge=1)] = 3
    epochs: Annotated[int, Option("Most epochs; the best on dev is kept.", ge=1)] = 40
    batch_size: Annotated[int, Option("Sentences per step.", ge=1)] = 20
    lr: Annotated[float, Option("Learning rate of Adam at the start.", gt=0)] = 1e-3
    resamples: Annotated[int, Option("Bootstrap samples of intervals.", ge=1)] = 1000
    seed: Annotated[int, Option("First seed of starts and batches.", ge=0, lt=1 << 31)] = 0


def treebank_splits(split: str) -> tuple[str, str, str]:
    """The stored splits that are needed to score one: train, dev, and itself.

    Args:
        split: Name of a stored split, such as ``treebank-test``.

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


class LensOptions(NamedTuple):
    """Settings of the training of the heads of a lens."""

    steps: int = 500
    """Optimiser steps, of about 512 tokens each."""
    dropout: float = 0.5
    """Share of the channels of a state that are set to zero, anew for each token and step."""
    lr: float = 1e-3
    """Learning rate of Adam at the beginning; it falls linearly to 0."""
    seed: int = 0
    """Seed of the order of examples and of dropout."""
