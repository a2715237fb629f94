"""How probes are trained: SentEval's protocol by default, every deviation an option."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bertvision.pipelines.records import digest_of

Criterion = Literal["accuracy", "loss"]
"""What of the held-out examples stops a probe and chooses its weight decay."""


def _increasing(values: tuple[float, ...]) -> tuple[float, ...]:
    if not values or any(b <= a for a, b in zip(values, values[1:], strict=False)):
        raise ValueError("give weight decays in increasing order, such as 1e-5,1e-4")
    return values


class ProbeOptions(BaseModel):
    """Settings of a probe's training.

    The defaults are those of SentEval (Conneau & Kiela 2018, LREC; ``senteval/tools/classifier.py``
    and ``validation.py``): one linear layer, Adam at 1e-3, batches of 64, dev accuracy every 4
    epochs, the weight decay with the best dev accuracy. The weight decay is added to the gradient
    of the mean loss and applies to the biases as well, as there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    hidden: int = Field(0, ge=0)
    """Units of the hidden layer, with a sigmoid; 0 is a linear probe."""
    batch_size: int = Field(64, ge=1)
    lr: float = Field(1e-3, gt=0)
    epoch_size: int = Field(4, ge=1)
    """Epochs between two looks at the held-out examples."""
    tenacity: int = Field(5, ge=0)
    """Looks without a new best that are forgiven, in all; one more ends the training."""
    max_epochs: int = Field(200, ge=1)
    weight_decays: Annotated[
        tuple[Annotated[float, Field(ge=0)], ...], AfterValidator(_increasing)
    ] = (1e-5, 1e-4, 1e-3, 1e-2)
    standardise: bool = False
    """Scale every feature to mean 0 and deviation 1 over the training examples."""
    folds: int = Field(10, ge=2)
    """Of the cross-validation, for data that have no splits of their own."""
    dev_fraction: float = Field(0.1, gt=0, lt=1)
    """Part of the training examples that is held out where the data have no dev split."""
    seed: int = Field(1111, ge=0, lt=1 << 63)
    """Below 2^63: that of torch's generators."""

    def recorded(self) -> dict[str, Any]:
        """Every setting, as JSON keeps it."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """Short name of these settings, for files."""
        return digest_of(self.recorded())[:12]
