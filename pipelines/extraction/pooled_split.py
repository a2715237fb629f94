"""Pooled hidden states of a split as arrays: what probes and rankers are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bertvision.errors import StoreNotFoundError, UnknownNameError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.workspace import Workspace

_READ_AT_ONCE = 4096  # examples: bounds the memory of codes beside the features


@dataclass(frozen=True)
class PooledSplit:
    """The pooled hidden states of a split, stored or not.

    Examples:
        >>> space = bertvision.Workspace.find()
        >>> dev = bertvision.PooledSplit(space, "1e", None, "dev", "mean")
        >>> dev.name, dev.find() is None  # `ensure_features` extracts it
        ('dev-mean', True)
    """

    workspace: Workspace
    """With the activations."""
    tag: str
    """Tag of the snapshot."""
    dataset: str | None
    """Name of an added data set; None is the workspace's own data."""
    split: str
    """Name of the split in the data."""
    pooling: TokenPooling
    """Over the tokens of a window."""

    @property
    def data(self) -> Dataset:
        """The data that the split is of."""
        return self.workspace.dataset(self.dataset)

    @property
    def name(self) -> str:
        """As it is stored under the snapshot."""
        return StoredName(self.split, self.pooling, self.data.name).name

    def find(self) -> ActivationSplit | None:
        """The stored split, whole or begun; None where there is none."""
        try:
            return self.workspace.split(self.tag, self.name)
        except (StoreNotFoundError, UnknownNameError):
            return None

    @cached_property
    def stored(self) -> ActivationSplit:
        """The stored split, whole.

        Raises:
            StoreNotFoundError: nothing was extracted yet.
            UnknownNameError: this was not extracted.
            IncompleteSplitError: its extraction has not ended.
        """
        return self.workspace.split(self.tag, self.name).require_complete()

    def __len__(self) -> int:
        """Number of vectors: windows."""
        return len(self.stored)

    @property
    def width(self) -> int:
        """Channels of a vector of one layer."""
        return self.stored.record.hidden_size

    def features(self, layers: Sequence[int] | None = None) -> npt.NDArray[np.float32]:
        """Pooled hidden states of all items, decoded.

        Args:
            layers: indices of hidden states, of which alone bytes are read; None is all.

        Returns:
            (windows, layers, hidden) in the order of the data; of sentences a window is an item.

        Raises:
            StoreNotFoundError: as `stored`, also UnknownNameError and IncompleteSplitError.
            InputError: a layer is not stored.
        """
        positions = self.stored.layer_positions(layers)
        features = np.empty((len(self), len(positions), self.width), np.float32)
        for rows, values in self.blocks(layers):
            features[rows] = values
        return features

    def blocks(
        self, layers: Sequence[int] | None = None
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Pooled hidden states, decoded some at a time, so that memory stays bounded.

        Args:
            layers: As in `features`.

        Yields:
            (block,) numbers of the windows in the order of the data, and their (block, layers,
            hidden).

        Raises:
            StoreNotFoundError: as `features`.
        """
        stored = self.stored
        for start in range(0, len(stored), _READ_AT_ONCE):
            rows = np.arange(start, min(start + _READ_AT_ONCE, len(stored)))
            yield stored.plan.example_id[rows], stored.read(rows, layers).decode().numpy()
