"""Records that a test changes by hand: without their seal, as an earlier version wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SEAL = "record_sha256"


def fields(path: Path) -> dict[str, Any]:
    """The fields of a record, without its seal."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    values.pop(SEAL, None)
    return values


def rewrite(path: Path, values: dict[str, Any]) -> None:
    """Write what a record shall say, without a seal."""
    path.write_text(json.dumps({k: v for k, v in values.items() if k != SEAL}), encoding="utf-8")


def change(path: Path, **values: Any) -> None:
    """Give fields of a record other values."""
    rewrite(path, {**fields(path), **values})


def forget_digests(folder: Path) -> None:
    """Let scores no longer know the digests of the files beside them, which a test then changes."""
    change(folder / "metrics.json", sha256={})
