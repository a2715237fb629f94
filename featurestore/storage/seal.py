"""Seals: a JSON record that carries its own checksum, so that each of its bytes is protected."""

from __future__ import annotations

import hashlib
import re

SEAL = b"record_sha256"
_NO_DIGITS = b"0" * 64
_INDENT = re.compile(rb"\{\n( *)")


def sealed(record: bytes) -> bytes:
    """A JSON object with its own checksum as the last field.

    The checksum is the sha256 of the text as it is with 64 zeros in place of the digits.

    Args:
        record: an object with a field at least, on lines of their own; ends with a line feed and a
            brace.

    Raises:
        ValueError: it is no such text.
    """
    begin = _INDENT.match(record)
    if begin is None or not record.endswith(b"\n}"):
        raise ValueError("only an object whose fields are on lines of their own can be sealed")
    seal = b",\n" + begin[1] + b'"' + SEAL + b'": "' + _NO_DIGITS + b'"\n}'
    text = record.removesuffix(b"\n}") + seal
    return _with_digits(text, hashlib.sha256(text).hexdigest().encode())


def is_sealed(text: bytes) -> bool:
    """Whether a text passes the checksum at its end."""
    blank = _with_digits(text, _NO_DIGITS)
    return _with_digits(text, hashlib.sha256(blank).hexdigest().encode()) == text


def unsealed(text: bytes) -> bytes:
    """A text without the seal at its end; as it is where it has none.

    Raises:
        ValueError: it does not pass its own checksum.
    """
    place = text.rfind(b'"' + SEAL + b'"')
    if place < 0:
        return text
    if not is_sealed(text):
        raise ValueError("it does not pass its own checksum")
    return text[:place].rstrip().removesuffix(b",") + b"\n}"


def _with_digits(text: bytes, digits: bytes) -> bytes:
    return text[:-67] + digits + text[-3:]
