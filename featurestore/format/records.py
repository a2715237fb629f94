"""The records of the ledger (store format 1): a split, its arrays, a shard and its files.

Also where two records differ, said by the name of a field with both values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.keeping import KEEP, KEPT_POSITION
from bertvision.featurestore.format.layout import (
    PLAN_DTYPES,
    TRANSFORM_ARRAYS,
    TRANSFORM_SIZES,
    EncodingName,
    get_encoding,
    transform_room,
)
from bertvision.featurestore.format.logits import LOGITS, OUTPUTS, TOP_LOGITS, TopRule
from bertvision.featurestore.format.names import CompressionName

FORMAT = "1.1"
"""Format of the store: readers refuse a higher major number. Since 1.1 a shard's record says which
split it belongs to."""
ROOT = "arrays.zarr"
"""Folder of a store's Zarr hierarchy."""
FEATURES = frozenset({"split_sha256", "table_digest"})
"""Known names among those that a split's ``requires`` may hold, and writes there: its
shards are bound to it, and the digest of its examples is of columns."""

MOVES = "moves"
"""Name in ``requires`` beside `GROWING` while examples move to other shards."""

GROWING = "growing"
"""Name in ``requires`` beside `FEATURES` while examples are still added to a split: its record
has no plan yet (see `writing.growing`)."""

SHUFFLED = "shuffled_tokens"
"""Name in ``requires`` beside `FEATURES` where the tokens of a split were permuted, so that its
examples do not lie where its plan says (see `shuffling`)."""

PLACES = ("token_example", "token_position")
"""Arrays of such a split: the example of each stored token, and its place in that."""

_Count = Annotated[int, Field(ge=1, le=1 << 48)]
Identifier = Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,79}$")]
_MOST_DECODED_BYTES = 1 << 26
_IDENTITY = (
    *("tag", "split", "encoding", "compression", "layers", "hidden_size", "shard_tokens"),
    *("plan_sha256", "examples_sha256", "provenance"),
)
_RESULTS = ("examples", "tokens", "shards", "plan_sha256", "examples_sha256")
_Small = Annotated[int, Field(ge=1, le=1 << 20)]


class _Record(BaseModel):
    # a later minor version may add fields; what a reader must not ignore is named in `requires`
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class ShardFile(_Record):
    """One file of a shard: its length and xxh3-128, which is as fast as the memory."""

    bytes: int = Field(ge=1)
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")


class ShardRecord(_Record):
    """Record of a committed shard.

    Attributes:
        shard: its number in the plan.
        split_sha256: `SplitRecord.identity` of the split that it belongs to; None in format 1.0.
        examples: Number of its examples.
        tokens: real tokens it holds.
        nonfinite: hidden-state values that were NaN or infinite and were replaced.
        files: Files by array name (``hidden_states``, ``scale``, those of `OUTPUTS`).
        checksums: base64 of little-endian uint64 (layers, examples): xxh3-64 of the codes of each
            example's real tokens in each stored layer, so that any part that is read is checked.
    """

    shard: int = Field(ge=0)
    split_sha256: str | None = None
    examples: _Count
    tokens: _Count
    nonfinite: int = Field(default=0, ge=0)
    files: dict[str, ShardFile]
    checksums: str


class ArrayRecord(_Record):
    """An array that is written with the plan.

    Attributes:
        dtype: NumPy's name of an integer, float or boolean type.
        dims: names of its dimensions; the first is example, token or layer.
        shape: Length of each of ``dims``.
        sha256: Digest of its values, little-endian, in C order.
    """

    dtype: Literal[
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64",
    ]  # fmt: skip
    dims: tuple[Identifier, ...] = Field(min_length=1, max_length=4)
    shape: tuple[_Count, ...] = Field(min_length=1, max_length=4)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Header(_Record):
    """Header of a split's record, which says how to read the rest.

    Attributes:
        format: Format of the store.
        requires: features of a later minor version that a reader must know.
    """

    format: str = Field(pattern=r"^\d{1,4}\.\d{1,4}$")
    requires: tuple[str, ...] = ()


Provenance = dict[str, str | int | float | bool | None]
"""Origin of activations, or of anything else; any difference is refused."""


def _known(name: str) -> str:
    try:
        encoding = get_encoding(name)
    except InputError as error:
        raise ValueError(str(error)) from None
    if encoding.name != name:
        raise ValueError(f"encoding {name!r} is written {encoding.name!r}")
    return name


class Layout(Header):
    """Layout of a split and its shards, which is known before its examples are.

    Attributes:
        tag: the snapshot.
        split: its name.
        encoding: Encoding of the hidden states.
        compression: Compression of their chunks.
        layers: indices of the stored hidden states; 0 is the embedding output.
        hidden_size: channels of a hidden state.
        shard_tokens: capacity of a shard.
        provenance: Origin of the activations; any difference is refused.
        versions: Versions of the libraries that wrote it; differences are allowed.
    """

    tag: str
    split: str
    encoding: Annotated[EncodingName, AfterValidator(_known)]
    compression: CompressionName = "none"
    layers: tuple[Annotated[int, Field(ge=0, le=9999)], ...] = Field(min_length=1, max_length=9999)
    hidden_size: _Small
    shard_tokens: _Small
    provenance: Provenance
    versions: dict[str, str]

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        """See that a reader takes its chunks, and knows its layers apart."""
        encoding = get_encoding(self.encoding)
        width = encoding.codes_size(self.hidden_size)
        chunk = self.shard_tokens * width * encoding.code_bytes
        if encoding.transformed and self.compression != "none":
            raise ValueError(f"{self.encoding} compresses by itself: leave {self.compression} out")
        room = transform_room(self.shard_tokens, self.hidden_size)
        if encoding.transformed and room > _MOST_DECODED_BYTES:
            raise ValueError(
                f"a shard of {self.shard_tokens} tokens × {self.hidden_size} is too large for "
                f"{self.encoding}: take fewer tokens to a shard"
            )
        if self.compression != "none" and chunk > _MOST_DECODED_BYTES:
            raise ValueError(
                f"a compressed layer of a shard has {chunk} bytes, {_MOST_DECODED_BYTES} at most "
                "are due: take fewer tokens to a shard, or no compression"
            )
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers do not increase")
        try:
            _ = self.top
        except InputError as error:
            raise ValueError(f"{TOP_LOGITS}: {error}") from None
        return self

    @property
    def top(self) -> TopRule | None:
        """Rule of the log-probabilities that its shards have; None where they have none."""
        return TopRule.parse(self.provenance.get(LOGITS)) if TOP_LOGITS in self.requires else None


class SplitRecord(Layout):
    """Record of a split: written once, before the first shard or after the last.

    Attributes:
        examples: Number of examples of the split.
        tokens: real tokens of all examples.
        shards: Number of shards of the plan.
        permutation_seed: Seed of the stored order; None where the data's order was kept.
        plan_sha256: digest of the plan.
        arrays: Arrays written with the plan, by name.
        examples_sha256: Digest of the examples table's content.
    """

    examples: _Count
    tokens: _Count
    shards: Annotated[int, Field(ge=1, le=10**9)]
    permutation_seed: int | None
    plan_sha256: str
    arrays: dict[Identifier, ArrayRecord]
    examples_sha256: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        """See that it does not contradict itself, before memory is spent on what it says."""
        encoding = get_encoding(self.encoding)
        due: dict[str, tuple[str, tuple[str, ...]]] = {
            name: (dtype, ("example",)) for name, dtype in PLAN_DTYPES.items()
        }
        if encoding.quantised:
            for name in ("channel_mean", "channel_std"):
                due[name] = ("float32", ("layer", "hidden"))
        if encoding.transformed:
            due |= TRANSFORM_ARRAYS
        for name in PLACES if self.is_shuffled else ():
            if name not in self.arrays:
                raise ValueError(f"there is no array {name}")
            array = self.arrays[name]
            if not array.dtype.startswith("uint") or array.dims != ("token",):
                raise ValueError(f"array {name} is not of whole numbers by token")
        if self.keep is not None:
            due[KEPT_POSITION] = ("int32", ("token",))
        sizes = {"example": self.examples, "token": self.axis}
        sizes |= {"layer": len(self.layers), "hidden": self.hidden_size}
        if encoding.transformed:
            sizes |= TRANSFORM_SIZES | dict.fromkeys(("hidden_below", "axis"), self.hidden_size)
        for name, (dtype, dims) in due.items():
            if name not in self.arrays:
                raise ValueError(f"there is no array {name}")
            if (self.arrays[name].dtype, self.arrays[name].dims) != (dtype, dims):
                raise ValueError(f"array {name} is not {dtype} by {' and '.join(dims)}")
        for name, array in self.arrays.items():
            if name in ("hidden_states", "scale") or (self.top and name in OUTPUTS):
                raise ValueError(f"array {name} is not written with the plan")
            if len(array.dims) != len(array.shape) or any(
                sizes.get(dim, size) != size
                for dim, size in zip(array.dims, array.shape, strict=True)
            ):
                raise ValueError(f"array {name} has another shape than the split")
        return self

    @property
    def axis(self) -> int:
        """Length of the stored token axis, fill included."""
        return self.shards * self.shard_tokens

    @property
    def is_shuffled(self) -> bool:
        """Whether its tokens were permuted: examples do not lie where the plan says."""
        return SHUFFLED in self.requires

    @property
    def keep(self) -> str | None:
        """Rule of the tokens that are stored of each example; None where all are."""
        rule = self.provenance.get(KEEP) if KEPT_POSITION in self.arrays else None
        return None if rule is None else str(rule)

    @cached_property
    def identity(self) -> str:
        """sha256 of all that decides the split's activations, which its shards are bound to.

        Shards of two extractions of the same data and plan, of other weights say, would otherwise
        pass for each other wherever their files are mixed. Libraries' versions are left out, as
        another one may go on with a split.
        """
        fields = self.model_dump(mode="json", include=set(_IDENTITY))
        # statistics of the encoding and labels are among them
        fields["arrays"] = {name: array.sha256 for name, array in self.arrays.items()}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def owns(self, shard: ShardRecord) -> bool:
        """Whether a shard's record is of this split, as far as its format tells."""
        unbound = shard.split_sha256 is None and self.format == "1.0"
        return unbound or shard.split_sha256 == self.identity

    def describe(self) -> str:
        """Content in a line, with the size of the codes before any compression."""
        encoding = get_encoding(self.encoding)
        width = encoding.codes_size(self.hidden_size) * encoding.code_bytes
        size = f", {self.tokens * len(self.layers) * width / 1e6:,.1f} MB"
        return (
            f"{counted(self.examples, 'example')} of {counted(self.tokens, 'token')}, "
            f"{counted(len(self.layers), 'layer')} × {self.hidden_size}, {self.encoding}"
            # how many bytes an error takes is known when they are written
            f"{'' if encoding.transformed else size}"
            f"{', tokens shuffled' if self.is_shuffled else ''}"
            f"{'' if self.keep is None else f', kept: {self.keep}'}"
            f"{'' if self.top is None else f', log-probabilities: {self.top}'}"
        )

    def difference(self, other: SplitRecord) -> tuple[str, object, object] | None:
        """The first field in which two records tell of different activations, with both values.

        Channel statistics are results, and versions may differ, so neither is compared.
        """
        return first_difference(self._compared(), other._compared())

    def _compared(self) -> dict[str, object]:
        fields = self.model_dump(exclude={"provenance", "versions", "arrays", "format", "requires"})
        results = {name: fields.pop(name) for name in _RESULTS}
        # causes first in the message: they say why the plan, say, is another one
        return {f" {k}": v for k, v in self.provenance.items()} | fields | results


def first_difference(
    there: Mapping[str, object],
    here: Mapping[str, object],
    fields: Iterable[str] | None = None,
) -> tuple[str, object, object] | None:
    """The first field in which two records differ; records inside records are looked into.

    Args:
        there: Values that were recorded.
        here: Values that it is compared with.
        fields: Fields that are compared, in this order; None is all, those of ``there`` first.

    Returns:
        The field, its names joined by dots, and what it is there and here (None where it is
        missing); None where nothing differs.
    """
    for field in {**there, **here} if fields is None else fields:
        before, now = there.get(field), here.get(field)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            if inner := first_difference(before, now):
                return f"{field}.{inner[0]}", *inner[1:]
        elif before != now:
            return field, before, now
    return None
