"""How hidden states of each encoding lie on the disk: what records are checked by, without torch.

`encoding` has the arithmetic between hidden states and codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from bertvision.errors import InputError

if TYPE_CHECKING:
    import torch

PLAN_DTYPES = {
    "example_id": "int64", "n_tokens": "int32", "first_token": "int64", "shard": "int32",
}  # fmt: skip
PLAN_ARRAYS = tuple(PLAN_DTYPES)
"""The arrays that a plan is stored as."""


EncodingName = Literal["int8", "int4", "bfloat16", "float16", "float32"]


class Encoding(NamedTuple):
    """How one encoding is held in torch and in Zarr.

    Attributes:
        name: of the encoding, which is also the name of the codes' type in torch, but for int4.
        zarr_dtype: of the codes on disk and in numpy.
        code_bytes: bytes of one code.
        levels: codes go from −levels to levels; 0 for the float encodings.
        group: channels that share a scale; 0: all do.
        packed: channels in a code, 1 or 2.
        scale_dtype: of the scale on disk, in numpy and in torch; of no meaning without one.
        relative_rounding: root mean square of the rounding errors of a float encoding, as a part of
            the value.
    """

    name: EncodingName
    zarr_dtype: str
    code_bytes: int
    levels: int = 0
    group: int = 0
    packed: int = 1
    scale_dtype: str = "float32"
    relative_rounding: float = 0.0

    @property
    def quantised(self) -> bool:
        """Whether codes come with a scale and channel statistics."""
        return self.levels > 0

    @property
    def exact(self) -> bool:
        """Whether values of float32 are kept to the last bit."""
        return not self.quantised and self.relative_rounding == 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The codes' type in torch; no two encodings share one, so codes tell their encoding."""
        return _torch_dtype(self.name if self.packed == 1 else self.zarr_dtype)

    @property
    def scale_torch_dtype(self) -> torch.dtype:
        """The scale's type in torch."""
        return _torch_dtype(self.scale_dtype)

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


def get_encoding(name: str) -> Encoding:
    """The encoding of that name.

    Raises:
        InputError: there is none.
    """
    if name not in ENCODINGS:
        raise InputError(f"unknown encoding {name!r}: choose one of {', '.join(ENCODINGS)}")
    return ENCODINGS[name]


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
