"""Names that become paths, and the records of the ledger (store format 1)."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field

from bertvision.errors import InputError
from bertvision.featurestore.encoding import EncodingName

_TAG = re.compile(r"(?:0|[1-9]\d{0,5})(?:\.\d{1,6})?e", re.ASCII)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}", re.ASCII)


class SnapshotTag(str):
    """The encoder at a point of fine-tuning: ``0e`` is pretrained, then ``0.3e``, ``1e``.

    Tags are ordered as numbers. One fraction has one tag: ``1.0e`` and ``0.30e`` are refused in
    favour of ``1e`` and ``0.3e``, so that two folders never mean the same snapshot.

    Raises:
        InputError: the text is not a tag in canonical form.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> SnapshotTag:  # noqa: D102
        if not _TAG.fullmatch(text):
            raise InputError(
                f"{text!r} is not a snapshot tag: write the fraction of an epoch and 'e', "
                "such as 0e, 0.3e, 1e or 2e"
            )
        canonical = cls.of(float(text[:-1]), _checked=True)
        if canonical != text:
            raise InputError(f"{text!r} is not in canonical form: write {canonical}")
        return str.__new__(cls, text)

    @classmethod
    def is_valid(cls, text: str) -> bool:
        """Whether the text is a tag in canonical form."""
        try:
            cls(text)
        except InputError:
            return False
        return True

    @classmethod
    def of(cls, fraction: float, *, _checked: bool = False) -> SnapshotTag:
        """The tag of a fraction of an epoch (``0.3`` → ``0.3e``, ``1`` → ``1e``), to 1e-6."""
        text = f"{fraction:.6f}".rstrip("0").rstrip(".") + "e"
        return str.__new__(cls, text) if _checked else cls(text)

    @property
    def fraction(self) -> float:
        """The fraction of an epoch, as a number."""
        return float(self[:-1])

    def step(self, steps_per_epoch: int) -> int:
        """The optimiser step at which the snapshot is taken: round(fraction × steps per epoch)."""
        return round(self.fraction * steps_per_epoch)

    def __lt__(self, other: str) -> bool:
        return self.fraction < SnapshotTag(other).fraction

    def __le__(self, other: str) -> bool:
        return self.fraction <= SnapshotTag(other).fraction

    def __gt__(self, other: str) -> bool:
        return self.fraction > SnapshotTag(other).fraction

    def __ge__(self, other: str) -> bool:
        return self.fraction >= SnapshotTag(other).fraction


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it is safe as a folder name of a split, head or task.

    Raises:
        InputError: it is not 1 to 63 of a-z, 0-9, ``_``, ``-``, or begins with ``_`` or ``-``.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is not a {what} name: use 1 to 63 of a-z, 0-9, '_' and '-', "
            "beginning with a letter or digit"
        )
    return name


FORMAT = "1.0"
"""Format of the store: readers refuse a higher major number."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardFile(_Record):
    """One file of a shard: its length and sha256."""

    bytes: int = Field(ge=1)
    sha256: str


class ShardRecord(_Record):
    """What the ledger says of one committed shard.

    Attributes:
        shard: its number in the plan.
        examples: how many it holds.
        tokens: real tokens it holds.
        files: by array name (``hidden_states``, ``scale``).
    """

    shard: int = Field(ge=0)
    examples: int = Field(ge=1)
    tokens: int = Field(ge=1)
    files: dict[str, ShardFile]


class SplitRecord(_Record):
    """What the ledger says of a split: written once, before the first shard.

    Attributes:
        format: of the store.
        tag: the snapshot.
        split: its name.
        encoding: of the hidden states.
        layers: indices of the stored hidden states; 0 is the embedding output.
        hidden_size: channels of a hidden state.
        examples: how many the split has.
        tokens: real tokens of all examples.
        shards: how many the plan has.
        shard_tokens: capacity of a shard.
        chunk_tokens: tokens of an inner chunk (of one layer).
        permutation_seed: of the stored order; None where the data's order was kept.
        plan_sha256: digest of the plan.
        arrays_sha256: of the values of each array that is written with the plan.
        examples_sha256: of the examples table's content.
        provenance: what the activations were computed from; any difference is refused.
        versions: of the libraries that wrote it; differences are allowed.
    """

    format: str = FORMAT
    tag: str
    split: str
    encoding: EncodingName
    layers: tuple[int, ...] = Field(min_length=1)
    hidden_size: int = Field(ge=1)
    examples: int = Field(ge=1)
    tokens: int = Field(ge=1)
    shards: int = Field(ge=1)
    shard_tokens: int = Field(ge=1)
    chunk_tokens: int = Field(ge=1)
    permutation_seed: int | None
    plan_sha256: str
    arrays_sha256: dict[str, str]
    examples_sha256: str
    provenance: dict[str, str | int | float | bool | None]
    versions: dict[str, str]

    def difference(self, other: SplitRecord) -> tuple[str, object, object] | None:
        """The first field in which two records tell of different activations, with both values.

        Channel statistics are results, and versions may differ, so neither is compared.
        """
        mine, theirs = self._compared(), other._compared()
        for field in sorted(mine.keys() | theirs.keys()):
            if mine.get(field) != theirs.get(field):
                return field, mine.get(field), theirs.get(field)
        return None

    def _compared(self) -> dict[str, object]:
        fields = self.model_dump(exclude={"provenance", "versions", "arrays_sha256", "format"})
        # provenance first in the message: it says why the plan, say, is another one
        return {f" {k}": v for k, v in self.provenance.items()} | dict(fields)
