"""How hidden states of each encoding lie on the disk: what records are checked by, without torch.

`encoding` has the arithmetic between hidden states and codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from bertvision.errors import InputError

if TYPE_CHECKING:
    import torch

PLAN_DTYPES = {
    "example_id": "int64", "n_tokens": "int32", "first_token": "int64", "shard": "int32",
}  # fmt: skip
PLAN_ARRAYS = tuple(PLAN_DTYPES)
"""The arrays that a plan is stored as."""


EncodingName: TypeAlias = str
"""A name in `ENCODINGS`, or ``transform:ERROR`` (see `get_encoding`)."""
TRANSFORM, ERRORS = "transform", (0.001, 0.5)
"""Name of the encoding before its error, and the errors that it takes."""

TRANSFORM_ARRAYS = {
    "channel_mean": ("float32", ("layer", "hidden")),
    "channel_std": ("float32", ("layer", "hidden")),
    "predictor": ("float16", ("layer", "hidden", "hidden_below")),
    "basis": ("float16", ("layer", "hidden", "axis")),
    "axis_class": ("int64", ("layer", "axis")),
    "step": ("float32", ("layer",)),
    "symbol_frequency": ("int64", ("class", "symbol")),
}
"""Types and dimensions of the arrays of a split that the transform is stored as."""
TRANSFORM_SIZES = {"class": 25, "symbol": 50}
"""Lengths of the dimensions that no split decides."""
TRANSFORM_MOST_HIDDEN = 4096


class Encoding(NamedTuple):
    """How one encoding is held in torch and in Zarr.

    Attributes:
        name: Name of the encoding, and but for int4 of the codes' type in torch.
        zarr_dtype: Type of the codes on disk and in numpy.
        code_bytes: bytes of one code.
        levels: codes go from −levels to levels; 0 for the float encodings.
        group: channels that share a scale; 0: all do.
        packed: channels in a code, 1 or 2.
        scale_dtype: Type of the scale on disk, in numpy and in torch; of no meaning without one.
        relative_rounding: root mean square of the rounding errors of a float encoding, as a part of
            the value.
        error: Root mean square error in deviations of the channel that was asked for: of the
            transform, whose codes are made of all layers and come out of a shard as float32.
    """

    name: EncodingName
    zarr_dtype: str
    code_bytes: int
    levels: int = 0
    group: int = 0
    packed: int = 1
    scale_dtype: str = "float32"
    relative_rounding: float = 0.0
    error: float = 0.0

    @property
    def quantised(self) -> bool:
        """Whether codes come with a scale and channel statistics."""
        return self.levels > 0

    @property
    def exact(self) -> bool:
        """Whether values of float32 are kept to the last bit."""
        return not self.calibrated and self.relative_rounding == 0

    @property
    def transformed(self) -> bool:
        """Whether the layers of an example are coded together (see `transform`)."""
        return self.error > 0

    @property
    def calibrated(self) -> bool:
        """Whether a sample of hidden states decides how others are encoded."""
        return self.quantised or self.transformed

    @property
    def torch_dtype(self) -> torch.dtype:
        """The codes' type in torch; no two encodings share one, so codes tell their encoding."""
        named = self.packed == 1 and not self.transformed
        return _torch_dtype(self.name if named else self.zarr_dtype)

    @property
    def scale_torch_dtype(self) -> torch.dtype:
        """The scale's type in torch."""
        return _torch_dtype(self.scale_dtype)

    def matrix_bytes(self, layers: int, hidden: int) -> int:
        """Bytes of the matrices of a transform, before their compression; 0 of other encodings."""
        return 2 * 2 * layers * hidden**2 if self.transformed else 0

    def codes_size(self, hidden: int) -> int:
        """Length of the last axis of codes for so many channels.

        Raises:
            InputError: the encoding does not take that number of channels.
        """
        if hidden % self.packed:
            raise InputError(
                f"encoding {self.name} packs {self.packed} channels in a byte and cannot hold "
                f"{hidden}: choose int8"
            )
        if self.transformed and hidden > TRANSFORM_MOST_HIDDEN:
            raise InputError(
                f"encoding {self.name} takes {TRANSFORM_MOST_HIDDEN} channels at most, not "
                f"{hidden}, as its matrices are of channels by channels: choose int8 or int4"
            )
        return hidden // self.packed

    def scale_shape(self, hidden: int) -> tuple[int, ...]:
        """Shape of the scale of one (token, layer): () for int8, (groups,) for int4."""
        return (-(-hidden // self.group),) if self.group else ()


ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        Encoding("int8", "int8", 1, levels=127),
        Encoding("int4", "uint8", 1, levels=7, group=64, packed=2, scale_dtype="uint8"),
        Encoding("bfloat16", "uint16", 2, relative_rounding=1.67e-3),
        Encoding("float16", "float16", 2, relative_rounding=2.1e-4),
        Encoding("float32", "float32", 4),
    )
}


def transform_room(shard_tokens: int, hidden: int) -> int:
    """Bytes that a layer of a shard of a transform has room for.

    That is two for each value, beyond which float16 is smaller and keeps more, and what as many
    examples as tokens take each: the length of a code, and its states.
    """
    return shard_tokens * -(-(2 * hidden + 16) // 4) * 4


ENCODING_NAMES = f"{', '.join(ENCODINGS)}, or {TRANSFORM}:ERROR, such as {TRANSFORM}:0.05"
"""The names as help and messages list them."""


def get_encoding(name: str) -> Encoding:
    """The encoding of that name; ``transform:0.05`` is that of an error of 5 % of a deviation.

    Raises:
        InputError: there is none.
    """
    if name in ENCODINGS:
        return ENCODINGS[name]
    kind, _, text = name.partition(":")
    low, high = ERRORS
    if kind == TRANSFORM:
        try:
            error = float(text)
        except ValueError:
            error = 0.0
        if not low <= error <= high:
            raise InputError(
                f"encoding {name!r}: give the error wanted, from {low:g} to {high:g} of a "
                "channel's deviation, such as transform:0.05"
            )
        return Encoding(f"{TRANSFORM}:{error:g}", "float32", 4, error=error)
    raise InputError(f"unknown encoding {name!r}: choose one of {ENCODING_NAMES}")


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
