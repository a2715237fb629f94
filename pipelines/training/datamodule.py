"""ActivationDataModule: the splits of a snapshot as Lightning data, decoded on the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from bertvision.errors import counted
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.sampler import Sampler
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader


class HiddenStates(NamedTuple):
    """Input of a head: the hidden states of a batch's real tokens, decoded.

    Its fields are called as those of an `ActivationBatch`.
    """

    hidden_states: Tensor
    """(tokens, layers, hidden), examples one after another."""
    lengths: Tensor
    """(batch,) int64, tokens of each example."""
    labels: dict[str, Tensor]
    """Per-example arrays of the split, each (batch, …): ``start_positions``, …"""
    examples: Tensor
    """(batch,) int64, position of each example in the split."""

    def __repr__(self) -> str:
        tokens, layers, hidden = self.hidden_states.shape
        dtype = str(self.hidden_states.dtype).removeprefix("torch.")
        return (
            f"<HiddenStates: {counted(len(self.lengths), 'example')} of "
            f"{counted(tokens, 'token')}, {counted(layers, 'layer')} × {hidden}, {dtype} on "
            f"{self.hidden_states.device}>\n"
            f"  labels: {', '.join(sorted(self.labels)) or 'none'}"
        )


def decoded(batch: ActivationBatch, dtype: torch.dtype) -> HiddenStates:
    """Decode a batch on the device it is on."""
    return HiddenStates(batch.decode(dtype), batch.lengths, batch.labels, batch.examples)


class ActivationDataModule(pl.LightningDataModule):
    """Streams a store's splits to any LightningModule, which gets `HiddenStates` batches.

    Codes travel to the device and are decoded there. Ranks of a distributed trainer share each
    epoch, and a trainer resumed from its checkpoint goes on in the middle of an epoch exactly.

    Args:
        store: path of the activation store.
        checkpoint: the snapshot's tag.
        train: Split to train on, shuffled; its name, or opened.
        val: Split to validate on in its stored order, likewise, or None.
        batch_size: examples per batch and rank.
        layers: indices of hidden states, or all.
        seed: Seed of the shuffling.
        readers: threads that read shards; by default chosen by the size of a batch.
        buffer: shards in the shuffle buffer; by default as many as fit in 768 MiB.
        sampler: an order of your own for training, in place of ``seed`` and ``buffer``.
        dtype: Type of the decoded hidden states.

    Raises:
        StoreNotFoundError: there is no store.
        UnknownNameError: it has no snapshot or split of that name; the message says which it has.
        IncompleteSplitError: a split's extraction has not ended.
        InputError: a layer is not stored.

    Examples:
        >>> data = bertvision.ActivationDataModule("activations", "1e", val="dev", batch_size=20)
        >>> batch = next(iter(data.train_dataloader()))  # a Trainer's module is given it decoded
        >>> batch.hidden_states.shape
        torch.Size([1347, 3, 32])
        >>> data
        ActivationDataModule(train=1e/train, batch_size=20, val=1e/dev)
    """

    def __init__(
        self,
        store: str | Path,
        checkpoint: str,
        *,
        train: str | ActivationSplit = "train",
        val: str | ActivationSplit | None = None,
        batch_size: int = 16,
        layers: Sequence[int] | None = None,
        seed: int = 0,
        readers: int | None = None,
        buffer: int | None = None,
        sampler: Sampler | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()

        def opened(split: str | ActivationSplit) -> ActivationSplit:
            if isinstance(split, str):
                split = ActivationStore.open(store)[SnapshotTag(checkpoint)][split]
            return _checked(split, layers)

        self._train = opened(train)
        self._shown = {"train": self._train.name, "batch_size": batch_size, "layers": layers}
        self._dtype = dtype
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "layers": layers,
            "readers": readers,
        }
        self._order: dict[str, Any] = {"seed": seed, "buffer": buffer, "sampler": sampler}
        self._position: dict[str, Any] | None = None
        self.train_loader: ActivationLoader | None = None
        if val is not None:
            held_out = opened(val)
            self._shown["val"] = held_out.name
            # defined only then: Lightning warns of a validation loader nobody uses
            self.val_dataloader = lambda: self._loader(held_out, shuffle=False)  # type: ignore[method-assign]

    def __str__(self) -> str:  # Lightning's own reads batches to tell their sizes
        given = (f"{name}={value}" for name, value in self._shown.items() if value is not None)
        return f"ActivationDataModule({', '.join(given)})"

    __repr__ = __str__

    def train_dataloader(self) -> ActivationLoader:
        """The shuffled stream of the training split, of this rank.

        A trainer that overfits some batches is given the stored order, as it does with loaders of
        torch: the same batches in each epoch.
        """
        overfits = self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]
        order = {"shuffle": False} if overfits else self._order
        self.train_loader = self._loader(self._train, **order)
        if self._position is not None:
            self.train_loader.load_state_dict(self._position)
            self._position = None
        return self.train_loader

    def state_dict(self) -> dict[str, Any]:
        """The position of the training stream.

        Lightning saves a loader's own state too, but does not load it where the optimiser was
        made with `estimated_stepping_batches`, which asks for the loader too early.
        """
        return {} if self.train_loader is None else dict(self.train_loader.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position (called by the trainer before it asks for the loader)."""
        self._position = state_dict or None

    def on_after_batch_transfer(self, batch: ActivationBatch, dataloader_idx: int) -> HiddenStates:
        """Decode on the device."""
        return decoded(batch, self._dtype)

    def _loader(self, split: ActivationSplit, **order: Any) -> ActivationLoader:
        trainer = self.trainer
        return ActivationLoader(
            split,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
            **self._options,
            **order,
        )


def _checked(split: ActivationSplit, layers: Sequence[int] | None) -> ActivationSplit:
    """The split, whole and with these layers: a wrong name is better said before the training."""
    split.layer_positions(layers)
    return split.require_complete()
