"""Typed records: what is kept in JSON or YAML, checked when it is read and when it is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from bertvision.errors import InputError, WorkspaceError

_S = TypeVar("_S", bound=BaseModel)


class Settings(BaseModel):
    """Base of settings: frozen; unknown fields are refused, so that a typing error never passes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def validated(section: type[_S], values: Mapping[str, object]) -> _S:
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
        raise InputError(f"{name}{value}{first['msg'].removeprefix('Value error, ')}") from error


def digest_of(value: object) -> str:
    """Hex sha256 of a JSON-able value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def read_record(
    path: Path, again: str, check: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Read a JSON object that a command wrote.

    Args:
        path: of the file.
        again: the command that makes it, for the messages.
        check: completes the values, or raises where they are not what they should be.

    Raises:
        WorkspaceError: it is missing or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return check(values)
    except FileNotFoundError:
        raise WorkspaceError(f"there is no {path}: `{again}` makes it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise WorkspaceError(
            f"{path} is damaged ({what}): delete it and run `{again}` again"
        ) from error
