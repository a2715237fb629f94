"""The names of what a user may choose of the format; light, for a command line lists them."""

from __future__ import annotations

from typing import Literal

EncodingName = Literal["int8", "int4", "bfloat16", "float16", "float32"]
CompressionName = Literal["none", "zstd", "pcodec"]
NonFinite = Literal["error", "record"]
"""What to do about NaN and infinity: refuse them, or replace and count them (see `encode`)."""
