"""Probes that were trained, as kept in ``probes/<data set>/``: what is there is not trained again.

One file holds the probes of a snapshot and a pooling with the same settings, and what they were
made from. It is replaced as a whole whenever probes are added.
"""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from bertvision.errors import ProvenanceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import Provenance, first_difference
from bertvision.pipelines.probing.options import ProbeOptions
from bertvision.pipelines.records import digest_of, leaving_out, read_record, write_record
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.tasks.soundness import SplitSoundness, doubts, is_doubtful

FOLDER = "probes"


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


class ProbeFile(_Record):
    """All probes of a snapshot, a pooling and one choice of settings."""

    dataset: str
    """Name of the data set, or of the workspace's task."""
    task: str
    tag: str
    pooling: TokenPooling
    settings: ProbeOptions
    made_from: Provenance
    """Provenance of the hidden states and of the data: any difference is refused."""
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


def place(root: Path, probes: ProbeFile) -> Path:
    """Where a file of probes is kept in the workspace at ``root``."""
    name = f"{probes.tag}-{probes.pooling}-{probes.settings.digest}.json"
    return root / FOLDER / probes.dataset / name


def write(root: Path, probes: ProbeFile) -> None:
    """Keep probes; the file is whole at any time."""
    path = place(root, probes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, probes)


def resume(root: Path, new: ProbeFile) -> ProbeFile:
    """What was kept before of the same snapshot, pooling and settings; ``new`` where nothing was.

    Args:
        root: of the workspace.
        new: without probes, with what they would be made from now.

    Raises:
        ProvenanceError: what was kept was made from something else; names the field.
        WorkspaceError: the file is damaged.
    """
    path = place(root, new)
    if not path.exists():
        return new
    held = read(path)
    if difference := first_difference(_told(held), _told(new)):
        name, there, here = difference
        raise ProvenanceError(
            f"{path} holds probes made with {name} = {there!r}, now it is {here!r}: delete "
            "that file to train them again, or use another --workspace"
        )
    if held.soundness is None and new.doubts:
        held = held.model_copy(update={"soundness": new.soundness})
        write(root, held)  # reports are to mark it, even where nothing is left to be trained
    return held


def read(path: Path) -> ProbeFile:
    """Read a file of probes.

    Raises:
        WorkspaceError: it is damaged.
    """
    return read_record(path, ProbeFile, "bertvision probe")


def read_all(root: Path, damaged: list[str] | None = None) -> list[ProbeFile]:
    """All probes of the workspace at ``root``, by data set, snapshot and pooling.

    Args:
        root: of the workspace.
        damaged: gets a message for each file that is damaged, which is then left out.

    Raises:
        WorkspaceError: a file is damaged, and there is no list of these.
    """
    found = []
    for path in sorted((root / FOLDER).glob("*/*.json")):
        with leaving_out(damaged):
            found.append(read(path))
    return sorted(
        found, key=lambda f: (f.dataset, f.settings.digest, SnapshotTag(f.tag), f.pooling)
    )


def _told(file: ProbeFile) -> dict[str, object]:
    """What a file says, by field, all but its probes."""
    values = file.model_dump(mode="json", exclude={"probes", "made_from", "settings", "soundness"})
    return {**file.made_from, **values}
