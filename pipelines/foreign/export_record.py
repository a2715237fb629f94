"""The record of a folder of exported files: what they are of, and whether all are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from bertvision.errors import InputError
from bertvision.pipelines.files import read_json

RECORD = "export.json"
Format = Literal["safetensors", "npy", "arrow"]


class ExportRecord(BaseModel):
    """What a folder of exported files says of itself.

    Attributes:
        split: ``tag/split``.
        split_sha256: digest of all that decides the split's hidden states.
        format: of the files.
        dtype: of the hidden states.
        layers: indices or names, in the order in which they lie in the files.
        examples: how many.
        provenance: of the split.
        complete: whether all is there.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    split: str
    split_sha256: str
    format: Format
    dtype: Literal["float16", "float32"]
    layers: list[int] | list[str]
    examples: int
    provenance: dict[str, Any]
    complete: bool = False


def read_export(folder: Path) -> ExportRecord | None:
    """What a folder says of itself as an export; None where it is none.

    Raises:
        InputError: the record is damaged.
    """
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        return ExportRecord.model_validate(read_json(path))
    except ValidationError as error:
        raise InputError(f"{path} is damaged: {error.errors()[0]['msg']}") from None
