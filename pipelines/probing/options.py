"""How probes are trained: SentEval's protocol by default, every deviation an option."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from bertvision.errors import InputError
from bertvision.pipelines.options import Option, Options

Criterion = Literal["accuracy", "loss"]
"""What of the held-out examples stops a probe and chooses its weight decay."""


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
