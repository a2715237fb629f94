"""Typed records: what is kept in JSON or YAML, checked when it is read and when it is made."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.storage.durable import sealed, unsealed, write_durably

log = logging.getLogger(__name__)
_M = TypeVar("_M", bound=BaseModel)

Count: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of things, as a record may hold one."""


class Settings(BaseModel):
    """Base of settings: frozen; unknown fields are refused, so that a typing error never passes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Record(BaseModel):
    """Base of what a command writes in JSON: frozen; fields that are not known are left out."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False
    )

    def to_json(self) -> dict[str, Any]:
        """The record as it is kept, fields in order."""
        return self.model_dump(mode="json")


def validated(section: type[_M], values: Mapping[str, object]) -> _M:
    """Settings from the values of options.

    Raises:
        InputError: a value is not allowed; the message names its option.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = "".join(f"--{part} " for part in first["loc"][:1]).replace("_", "-")
        value = f"{first['input']!r}: " if first["loc"] else ""
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "literal_error":
            what = f"choose {first['ctx']['expected']}".replace("'", "")
        raise InputError(f"{name}{value}{what}") from error


def digest_of(value: object) -> str:
    """Hex sha256 of a JSON-able value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def write_record(path: Path, record: BaseModel) -> None:
    """Write a record in JSON, atomically, with its own checksum as the last field.

    Raises:
        DiskSpaceError: the disk is full.
    """
    text = json.dumps(record.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
    write_durably(path, sealed(text.encode()) + b"\n")


def read_record(
    path: Path,
    model: type[_M],
    again: str,
    mend: str | None = None,
    *,
    sha256: str | None = None,
) -> _M:
    """Read a record that a command wrote in JSON.

    Args:
        path: Path of the file.
        model: Model of the value, strict: no text is taken for a number.
        again: the command that makes it, for the messages.
        mend: Advice where it is damaged; by default to delete it and run ``again``.
        sha256: SHA-256 of the file, where it is known; a record of `write_record` knows its own.

    Raises:
        WorkspaceError: it is missing or damaged; names the file, the field and what to do.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no file")
        text = path.read_bytes()
        if sha256 is not None and hashlib.sha256(text).hexdigest() != sha256:
            raise ValueError("it is not as it was written")
        if not issubclass(model, RootModel):  # whose names are anybody's
            text = unsealed(text.removesuffix(b"\n"))
        return model.model_validate_json(text, strict=True)
    except FileNotFoundError:
        raise WorkspaceError(f"there is no {path}: `{again}` makes it") from None
    except (OSError, ValueError) as error:
        what = what_is_wrong(error) if isinstance(error, ValidationError) else error
        mend = mend or f"delete it and run `{again}` again"
        raise WorkspaceError(f"{path} is damaged ({what}): {mend}") from error


@contextmanager
def leaving_out(left_out: list[str] | None) -> Iterator[None]:
    """Go on without what is damaged: its message is added to a list, once.

    Args:
        left_out: the list; None lets the error be raised.
    """
    try:
        yield
    except WorkspaceError as error:
        if left_out is None:
            raise
        leave_out(str(error), left_out)


def leave_out(message: str, left_out: list[str] | None) -> None:
    """Say what is left out: its message is added to a list, once.

    Args:
        message: names it, and says what makes it again.
        left_out: the list; None is to log it.
    """
    if left_out is None:
        log.warning("%s", message)
    elif message not in left_out:
        left_out.append(message)


def what_is_wrong(error: ValidationError) -> str:
    """The first field that is not what it should be, its names joined by dots; why; its value."""
    first = error.errors()[0]
    field, value = ".".join(map(str, first["loc"])), first["input"]
    told = first["msg"].removeprefix("Value error, ")
    if field and not isinstance(value, dict | list):
        told += f", found {repr(value)[:80]}"
    return f"{field}: {told}" if field else told
