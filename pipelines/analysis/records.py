"""Analyses as a workspace keeps them, in ``analysis/<name>.json`` beside the figure."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, JsonValue, model_validator

from bertvision.pipelines.measurements import read_current
from bertvision.pipelines.records import Count, Record, read_record
from bertvision.pipelines.workspace.config import Tag
from bertvision.pipelines.workspace.workspace import Workspace

FOLDER = "analysis"
"""Where they are, in a workspace."""
Layers = Annotated[tuple[Count, ...], Field(min_length=1)]
Numbers = tuple[float | None, ...]
"""None is what was no number (NaN)."""


class CkaValues(Record):
    """What ``bertvision cka --json`` prints; see `CkaResult`."""

    x: str
    y: str
    layers_x: Layers
    layers_y: Layers
    cka: tuple[Numbers, ...]
    cka_dropped: tuple[Numbers, ...]
    dropped_x: tuple[tuple[int, ...], ...]
    dropped_y: tuple[tuple[int, ...], ...]
    n_tokens: Count
    n_available: Count
    unbiased: bool
    seed: int

    @model_validator(mode="after")
    def _of_one_shape(self) -> CkaValues:
        for name in ("cka", "cka_dropped"):
            rows = getattr(self, name)
            _expect(name, [rows], len(self.layers_x))
            _expect(name, rows, len(self.layers_y))
        return self


class IsotropyValues(Record):
    """What ``bertvision isotropy --json`` prints; see `IsotropyResult`."""

    name: str
    layers: Layers
    mean_cosine: Numbers
    mean_norm: Numbers
    components: tuple[int, ...]
    explained_variance: tuple[Numbers, ...]
    top_channel: tuple[int, ...]
    top_cosine: Numbers
    outlier_channels: tuple[tuple[int, ...], ...]
    outlier_sd: float
    n_tokens: Count
    n_available: Count
    seed: int

    @model_validator(mode="after")
    def _of_one_shape(self) -> IsotropyValues:
        by_layer = ("mean_cosine", "mean_norm", "explained_variance", "top_channel", "top_cosine")
        for name in (*by_layer, "outlier_channels"):
            _expect(name, [getattr(self, name)], len(self.layers))
        _expect("explained_variance", self.explained_variance, len(self.components))
        return self


class RsaValues(Record):
    """What ``bertvision rsa --json`` prints; see `RsaResult`."""

    of_pairs: tuple[tuple[tuple[Numbers, ...], ...], ...]
    of_tokens: tuple[tuple[tuple[Numbers, ...], ...], ...]
    x: str
    y: str
    splits: Annotated[tuple[str, ...], Field(min_length=1)]
    layers_x: Layers
    layers_y: Layers
    n_tokens: tuple[Count, ...]
    n_available: tuple[Count, ...]
    seed: int

    @model_validator(mode="after")
    def _of_one_shape(self) -> RsaValues:
        for name in ("of_pairs", "of_tokens", "n_tokens", "n_available"):
            _expect(name, [getattr(self, name)], len(self.splits))
        repeats = len(self.of_pairs[0])
        for name in ("of_pairs", "of_tokens"):
            splits = getattr(self, name)
            _expect(name, splits, max(repeats, 1))
            for matrix in (matrix for samples in splits for matrix in samples):
                _expect(name, [matrix], len(self.layers_x))
                _expect(name, matrix, len(self.layers_y))
        return self


class Analysis(Record):
    """An analysis of stored activations, and what it is of."""

    command: str
    """The command that makes it."""
    weights_sha256: dict[Tag, str]
    """By snapshot the digest of the weights whose hidden states were read."""
    splits_sha256: dict[str, str] = {}
    """By stored split the digest of its record; none in what earlier versions wrote."""
    settings: dict[str, JsonValue] = {}
    """What decides the result beside the splits."""

    @property
    def weights(self) -> list[tuple[str, object]]:
        """Snapshots, and the digests of their weights."""
        return list(self.weights_sha256.items())

    def mend(self, path: Path) -> str:
        """See `OfSnapshots`; first what is stored is to be of these weights."""
        tags = ",".join(self.weights_sha256)
        return f"`bertvision extract --checkpoint {tags}`, then `{self.command}`"


class CkaAnalysis(Analysis):
    """CKA between the layers of two snapshots."""

    kind: Literal["cka"] = "cka"
    result: CkaValues


class RsaAnalysis(Analysis):
    """RSA between the layers of two snapshots."""

    kind: Literal["rsa"] = "rsa"
    result: RsaValues


class IsotropyAnalysis(Analysis):
    """Isotropy of the layers of a snapshot."""

    kind: Literal["isotropy"] = "isotropy"
    result: IsotropyValues


_A = TypeVar("_A", bound=Analysis)


def read_analyses(workspace: Workspace, kind: type[_A], left_out: list[str]) -> dict[str, _A]:
    """The analyses of a kind that a workspace keeps, by the file inside of it.

    Args:
        workspace: that they are of.
        kind: a class of analyses.
        left_out: see `read_current`.
    """
    name = kind.model_fields["kind"].default

    def read(path: Path) -> _A:
        return read_record(path, kind, f"bertvision {name}")

    files = (workspace.root / FOLDER).glob(f"{name}-*.json")
    found = read_current(workspace, files, read, left_out)
    return {path.relative_to(workspace.root).as_posix(): of for path, of in found.items()}


def _expect(name: str, rows: tuple[Sized, ...] | list[Sized], length: int) -> None:
    """Refuse rows of another length.

    Raises:
        ValueError: one has it.
    """
    if wrong := [len(row) for row in rows if len(row) != length]:
        raise ValueError(f"{name} has {wrong[0]} values where {length} belong")
