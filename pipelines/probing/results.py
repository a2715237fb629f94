"""Probes that were trained, as kept in ``probes/<data set>/``: none of them is trained again."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from bertvision.pipelines.measurements import Measurements
from bertvision.pipelines.probing.options import ProbeOptions
from bertvision.pipelines.records import digest_of
from bertvision.pipelines.tasks.soundness import SplitSoundness, doubts, is_doubtful


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ControlRecord(_Record):
    """The control task; see `Control`."""

    accuracy: float
    selectivity: float
    memorised: float
    unseen: float


class MdlRecord(_Record):
    """The online code of the training labels; see `OnlineCode`."""

    bits: float
    uniform_bits: float
    compression: float
    ends: list[int]


class ProbeRecord(_Record):
    """A probe on one input."""

    layers: tuple[int, ...]
    """Hidden states, end to end where there are several."""
    accuracy: float
    """Per cent of the scored examples."""
    low: float
    """Lower end of its 95 % interval over resampled examples."""
    high: float
    """Upper end."""
    held_out: float
    """Per cent of the held-out examples, by which the best layer is chosen; mean over folds."""
    weight_decay: list[float]
    """Chosen, fold by fold."""
    epochs: list[int]
    """Epochs of the chosen probe, fold by fold."""
    correct: str
    """Whether each scored example is right: a bit each, packed, as base64."""
    control: ControlRecord | None = None
    mdl: MdlRecord | None = None

    def bits(self, examples: int) -> npt.NDArray[np.bool_]:
        """(examples,) whether each scored example is right."""
        packed = np.frombuffer(base64.b64decode(self.correct), np.uint8)
        return np.unpackbits(packed, count=examples).astype(bool)


class ProbeFile(Measurements):
    """All probes of a snapshot, a pooling and one choice of settings."""

    model_config = ConfigDict(frozen=False, extra="forbid")
    folder: ClassVar[str] = "probes"
    makes: ClassVar[str] = "bertvision probe"

    task: str
    settings: ProbeOptions
    classes: list[str]
    examples: dict[str, int]
    """How many train, are held out, and are scored; in a cross-validation, of the first fold and of
    all."""
    majority: float
    """Per cent that the most frequent class of the training examples scores."""
    soundness: dict[str, SplitSoundness] | None = None
    """Contradictions of each split, and what it shares with others; None in files of before."""
    probes: list[ProbeRecord] = Field(default_factory=list)

    @property
    def doubts(self) -> str | None:
        """What is wrong with the data where their scores say little; else None."""
        checked = self.soundness or {}
        return doubts(checked) if is_doubtful(checked) else None

    @property
    def data(self) -> str:
        """A digest of the data of all splits."""
        digests = {k: v for k, v in self.made_from.items() if k.endswith(": data_sha256")}
        return digest_of(digests)[:12]

    def told(self) -> Mapping[str, object]:
        """By field what decides the probes: all but these, and what was found of the data."""
        without = {"probes", "made_from", "settings", "soundness"}
        return {**self.made_from, **self.model_dump(mode="json", exclude=without)}

    def resume(self, root: Path) -> Self:
        """As `Measurements.resume`; a file of before is told of doubts about its data."""
        held = super().resume(root)
        if held.soundness is None and self.doubts:
            held = held.model_copy(update={"soundness": self.soundness})
            held.write(root)  # reports are to mark it, even where nothing is left to be trained
        return held

    def find(self, layers: tuple[int, ...]) -> ProbeRecord | None:
        """The probe on an input, if it was trained."""
        return next((probe for probe in self.probes if probe.layers == layers), None)

    def put(self, probe: ProbeRecord) -> None:
        """Add a probe, or replace that on the same input."""
        others = [held for held in self.probes if held.layers != probe.layers]
        self.probes = sorted([*others, probe], key=lambda p: (len(p.layers), p.layers))


def packed(correct: npt.NDArray[np.bool_]) -> str:
    """The text that `ProbeRecord.bits` reads.

    Args:
        correct: (examples,)
    """
    return base64.b64encode(np.packbits(correct).tobytes()).decode("ascii")
