"""TokenTransform: vectors centred or whitened by the moments of a split's tokens, and back again.

Moments are those of the tokens of a few whole shards, the same on every rank. Whitening is the
symmetric one (ZCA), which of all changes the vectors least: Kessy, Lewin and Strimmer 2018, The
American Statistician 72, equation 8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertvision.errors import InputError, WorkspaceError, counted
from bertvision.featurestore.lazy import decoded_layers
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.tokens.order import KeptTokens

TransformName = Literal["center", "whiten"]
_SHARDS = 32  # of 4,096 tokens: the mean norm is within 0.1 % where norms differ by a third
_PARTS = ("mean", "matrix", "back", "scale")
_FLOOR = 1e-5
"""Variance added to every direction, as a part of the channels' mean variance: directions in which
the tokens do not vary, or hardly, are not blown up."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenTransform:
    """Vectors less their mean and, whitened, with the identity as their covariance.

    Attributes:
        mean: (layers, hidden) float32.
        matrix: (layers, hidden, hidden) float32, symmetric, by which centred vectors are
            multiplied; None leaves them.
        back: (layers, hidden, hidden) float32 its inverse, or None.
        scale: (layers,) float32 by which centred vectors are multiplied, or None.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e/train"]
        >>> stream = split.tokens(-1, batch_size=512, transform="whiten")
        >>> batch = next(iter(stream))
        >>> states = stream.transform.inverse(batch.vectors)  # as they are stored
        >>> example, position = int(batch.examples[0]), int(batch.positions[0])
        >>> bool((split[example][position, :, -1] - states[0]).abs().max() < 1e-3)
        True
        >>> held_out = split.tokens(-1, transform=stream.transform)  # the same moments
    """

    mean: Tensor
    matrix: Tensor | None = None
    back: Tensor | None = None
    scale: Tensor | None = None

    def __repr__(self) -> str:
        layers, hidden = self.mean.shape
        does = "whitens" if self.matrix is not None else "centres"
        scaled = "" if self.scale is None else f", scaled by {self.scale.tolist()}"
        return f"<TokenTransform: {does} (tokens, {layers}, {hidden}){scaled}>"

    @classmethod
    def of(
        cls,
        split: SplitReader,
        positions: Sequence[int],
        selection: KeptTokens,
        name: TransformName,
    ) -> TokenTransform:
        """Measure the moments of the selected tokens of at most 32 shards, evenly spread.

        Args:
            split: Split to read.
            positions: Places on the stored layer axis.
            selection: Tokens that count.
            name: ``center``, or ``whiten``, which centres too.

        Raises:
            InputError: there is no transform of this name, the tokens are too few to whiten them,
                or hold NaN or infinity.
            CorruptStoreError: what is stored is damaged.
        """
        if name not in ("center", "whiten"):
            raise InputError(
                f"transform is {name!r}: give 'center', 'whiten' or a TokenTransform "
                "(TokenTransform.load reads a file), or leave it out"
            )
        hidden, whitens = split.record.hidden_size, name == "whiten"
        shards = sample_shards(selection)
        tokens = int(selection.counts[shards].sum())
        if whitens and tokens <= hidden:
            raise InputError(
                f"whitening {hidden} channels needs more tokens than channels, and "
                f"{counted(tokens, 'token')} of {split.name} count: take transform='center'"
            )
        first = np.zeros((len(positions), hidden), np.float32)  # near the mean: sums stay small
        total = np.zeros((len(positions), hidden))
        squares = np.zeros((len(positions), hidden, hidden) if whitens else 0)
        for n, shard in enumerate(shards):
            rows = selection.of_shard(shard)
            for i, states in enumerate(decoded_layers(split, shard, positions, any_order=True)):
                own = states[rows]
                if not n:
                    first[i] = own.mean(axis=0)
                own = own - first[i]
                total[i] += own.sum(axis=0, dtype=np.float64)
                if whitens:
                    squares[i] += own.T @ own
        mean = total / tokens
        if not np.isfinite(mean).all() or not np.isfinite(squares).all():
            raise InputError(
                f"vectors of {split.name} hold NaN or infinity, of which no mean can be taken: "
                "leave such tokens out with keep="
            )
        center = torch.from_numpy((first + mean).astype(np.float32))
        if not whitens:
            return cls(center)
        matrices = np.array(
            [
                _whitening(square / tokens - np.outer(own, own))
                for square, own in zip(squares, mean, strict=True)
            ]
        )
        matrix, back = torch.from_numpy(matrices.astype(np.float32)).unbind(1)
        return cls(center, matrix, back)

    def __call__(self, vectors: Tensor) -> Tensor:
        """Transformed vectors, (n, layers, hidden), or (n, hidden) of one layer, in their type."""
        centred = vectors - self._like(vectors, self.mean)
        if self.scale is not None:
            centred *= _scales(vectors, self.scale)
        return centred if self.matrix is None else _multiplied(centred, self.matrix)

    def inverse(self, vectors: Tensor) -> Tensor:
        """Vectors as they are stored, of transformed ones of the same shape."""
        mean = self._like(vectors, self.mean)
        if self.scale is not None:
            vectors = vectors / _scales(vectors, self.scale)
        return (vectors if self.back is None else _multiplied(vectors, self.back)) + mean

    def require(self, layers: int, hidden: int) -> None:
        """Refuse vectors of another shape.

        Args:
            layers: Number of layers side by side.
            hidden: Channels of each.

        Raises:
            InputError: the transform is of other ones.
        """
        if tuple(self.mean.shape) != (layers, hidden):
            raise InputError(
                f"the transform is of (layers, hidden) = {tuple(self.mean.shape)}, and the vectors "
                f"are of {(layers, hidden)}: take the layers of the stream that it is from"
            )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TokenTransform:
        """The transform on a device."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device, non_blocking=non_blocking)

        mean = self.mean.to(device, non_blocking=non_blocking)
        return TokenTransform(mean, move(self.matrix), move(self.back), move(self.scale))

    def save(self, path: str | Path) -> Path:
        """Write it as safetensors, to be kept beside what was trained on its vectors.

        Raises:
            WorkspaceError: the file cannot be written.
        """
        path = Path(path).expanduser()
        parts = {name: getattr(self, name) for name in _PARTS}
        try:
            save_file({name: x.contiguous() for name, x in parts.items() if x is not None}, path)
        except (OSError, SafetensorError) as error:
            raise WorkspaceError(f"{path} cannot be written: {error}") from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> TokenTransform:
        """Read what `save` wrote.

        Raises:
            WorkspaceError: the file is missing, or no transform.
        """
        path = Path(path).expanduser()
        try:
            parts = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WorkspaceError(f"{path} cannot be read as a transform: {error}") from error
        mean, matrix, back, scale = (parts.get(name) for name in _PARTS)
        square = mean is not None and mean.ndim == 2 and (*mean.shape, mean.shape[1])
        if (
            mean is None
            or not square
            or set(parts) - set(_PARTS)
            or (matrix is None) != (back is None)
            or any(x is not None and tuple(x.shape) != square for x in (matrix, back))
            or any(x.dtype != torch.float32 or not x.isfinite().all() for x in parts.values())
            or (matrix is not None and back is not None and not _inverse(matrix, back))
            or (scale is not None and (scale.shape != mean.shape[:1] or not (scale > 0).all()))
        ):
            shapes = {name: (x.dtype, tuple(x.shape)) for name, x in parts.items()}
            raise WorkspaceError(
                f"{path} holds {shapes}, no transform: give what TokenTransform.save wrote"
            )
        return cls(mean, matrix, back, scale)

    def _like(self, vectors: Tensor, mean: Tensor) -> Tensor:
        layers, hidden = mean.shape
        if not isinstance(vectors, Tensor) or not vectors.is_floating_point():
            kind = getattr(vectors, "dtype", type(vectors).__name__)
            raise InputError(f"vectors are {kind}: give a tensor of floats")
        if vectors.shape[1:] == (hidden,) and layers == 1:
            return mean[0].to(vectors)
        if vectors.shape[1:] != (layers, hidden):
            raise InputError(
                f"vectors have the shape {tuple(vectors.shape)}: the transform is of (n, "
                f"{layers}, {hidden})" + (f" or (n, {hidden})" if layers == 1 else "")
            )
        return mean.to(vectors)


def sample_shards(selection: KeptTokens) -> list[int]:
    """At most 32 shards with selected tokens, evenly spread, whatever a stream's order and rank."""
    shards = np.flatnonzero(selection.counts)
    places = np.linspace(0, len(shards) - 1, min(len(shards), _SHARDS)).round().astype(int)
    chosen: list[int] = shards[places].tolist()
    return chosen


def token_norms(
    split: SplitReader, positions: Sequence[int], selection: KeptTokens
) -> npt.NDArray[np.float32]:
    """Euclidean norms of the selected tokens, in a pass over all shards.

    Args:
        split: Split to read.
        positions: Places on the stored layer axis.
        selection: Tokens whose norms are wanted.

    Returns:
        (layers, token axis); NaN of other tokens, and of fill.

    Raises:
        CorruptStoreError: what is stored is damaged.
    """
    plan = split.plan
    norms = np.full((len(positions), plan.n_shards, plan.shard_tokens), np.nan, np.float32)
    for shard in np.flatnonzero(selection.counts).tolist():
        rows = selection.of_shard(shard)
        for i, states in enumerate(decoded_layers(split, shard, positions, any_order=True)):
            norms[i, shard, rows] = np.linalg.norm(states[rows], axis=1)
    return norms.reshape(len(positions), -1)


def short_tokens(
    split: SplitReader, positions: Sequence[int], selection: KeptTokens, max_norm: float | str
) -> KeptTokens:
    """The selected tokens whose norm in each layer is at most ``max_norm``.

    Args:
        split: Split to read.
        positions: Places on the stored layer axis.
        selection: Tokens to choose from.
        max_norm: A number, or a factor of the layer's median norm, such as ``"10x"``.

    Raises:
        InputError: ``max_norm`` is something else, or no token is left.
        CorruptStoreError: what is stored is damaged.
    """
    factor = re.fullmatch(r"(\d+(?:\.\d+)?)x", max_norm) if isinstance(max_norm, str) else None
    number = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
    if factor is None and not (number and 0 < float(max_norm) < math.inf):
        raise InputError(
            f"max_norm is {max_norm!r}: give the largest norm, such as 500.0, or a factor of the "
            "median norm, such as '10x'"
        )
    norms = token_norms(split, positions, selection)
    if factor is None:
        short = (norms <= float(max_norm)).all(axis=0)  # a NaN is not
    else:
        medians = np.nanmedian(norms, axis=1, keepdims=True)
        short = (norms <= float(factor[1]) * medians).all(axis=0)
    if not short.any():
        raise InputError(
            f"max_norm {max_norm!r} leaves no token of {split.name}, whose shortest has a norm of "
            f"{np.nanmin(norms, initial=math.inf):.4g}: give a larger one"
        )
    return KeptTokens(selection.tokens, np.packbits(short.reshape(split.plan.n_shards, -1), axis=1))


def _whitening(covariance: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], ...]:
    """The symmetric square root of the inverse of a covariance, and its inverse."""
    values, vectors = np.linalg.eigh(covariance)
    spread = np.sqrt(np.maximum(values, 0) + _FLOOR * max(values.mean(), np.finfo(float).tiny))
    return (vectors / spread) @ vectors.T, (vectors * spread) @ vectors.T


def _inverse(matrix: Tensor, back: Tensor) -> bool:
    """Whether matrices, (layers, hidden, hidden), undo each other but for rounding."""
    identity = torch.eye(matrix.shape[1], dtype=torch.float64)
    return bool((matrix.double() @ back.double() - identity).abs().max() < 1e-2)


def _scales(vectors: Tensor, scale: Tensor) -> Tensor:
    return scale[:, None].to(vectors) if vectors.ndim == 3 else scale.to(vectors)


def _multiplied(vectors: Tensor, matrix: Tensor) -> Tensor:
    if vectors.ndim == 2:
        return vectors @ matrix[0].to(vectors)
    return torch.einsum("nlh,lhk->nlk", vectors, matrix.to(vectors))
