"""Speculators' trainer on a store: the backend ``bertvision`` for its hidden states.

Speculators is imported when the backend is registered, and not before.
"""

from __future__ import annotations

import argparse
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.pipelines.foreign.content import keys_of, parse_stored_layers

_READS_BACKENDS = "speculators.train.config.resolution"


def register_speculators_backend() -> None:
    """Let speculators' trainer read its hidden states out of a split of an activation store.

    Call it before anything of ``speculators.train`` is imported, which looks once for the backends
    that there are. The trainer then takes ``--hidden-states-backend bertvision``, with ``--store``,
    ``--store-split`` and ``--store-layers``. What vLLM generates meanwhile goes through files, as
    with speculators' own backend ``file``.

    Raises:
        InputError: speculators is not installed, or looked already.
    """
    try:
        from hs_connectors import FileBackend, HiddenStatesBackend, HiddenStatesTransfer
    except ModuleNotFoundError as error:
        raise InputError(
            f"speculators is not installed ({error}): pip install speculators"
        ) from error
    if "bertvision" in HiddenStatesBackend.registry:
        return
    if _READS_BACKENDS in sys.modules:
        raise InputError(
            "speculators.train was imported before, and has read which backends there are: call "
            "register_speculators_backend() first"
        )

    class StoreBackend(FileBackend):  # type: ignore[misc]
        """A `HiddenStatesBackend` that reads a store; vLLM is launched as for files."""

        add_train_args = staticmethod(_add_arguments)
        from_train_args = staticmethod(transfer_of)

    HiddenStatesTransfer.register(StoreTransfer)
    HiddenStatesBackend.register("bertvision")(StoreBackend)


class StoreTransfer:
    """Hidden states of a split, by the row of speculators' data (`HiddenStatesTransfer`).

    It travels to workers as names, and each of them opens the split for itself.

    Args:
        store: folder or URL.
        name: ``tag/split``.
        layers: Layers by index or name, the last of them the verifier's last hidden state *before*
            its final normalisation, which speculators applies itself; None is all.
    """

    def __init__(self, store: str, name: str, layers: list[int | str] | None = None) -> None:
        self.store, self.name, self.layers = store, name, layers

    def __reduce__(self) -> tuple[type[StoreTransfer], tuple[Any, ...]]:
        return StoreTransfer, (self.store, self.name, self.layers)

    @cached_property
    def split(self) -> ActivationSplit:
        """The split.

        Raises:
            StoreNotFoundError: there is no store.
            UnknownNameError: there is no such split.
            IncompleteSplitError: shards of it are missing.
            InputError: it has no token ids, some tokens of each example, or fewer than two layers.
        """
        split: ActivationSplit = ActivationStore.open(self.store)[self.name]
        split.require_complete().require_all_tokens()
        if "input_ids" not in split.record.arrays:
            raise InputError(
                f"{self.name} has no token ids, which speculators compares with its data: import "
                "or write them with the hidden states"
            )
        if len(split.layer_positions(self.layers)) < 2:
            raise InputError(
                f"{self.name}: speculators needs two layers or more, the last of them the "
                "verifier's last hidden state: name them with --store-layers"
            )
        return split

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {number: position for position, number in enumerate(keys_of(self.split)[1])}

    @cached_property
    def _token_ids(self) -> Tensor:
        return torch.from_numpy(self.split.array("input_ids"))

    def setup(self) -> None:
        """Nothing is to be done."""

    def get_cached(self, file_idx: int) -> dict[str, Tensor] | None:
        """The stored example of a row of speculators' data.

        Args:
            file_idx: the row.

        Returns:
            ``hidden_states`` (tokens, layers, hidden) float32 and ``token_ids`` (tokens,) int64;
            None where the split has no example of it.

        Raises:
            CorruptStoreError: it is damaged.
        """
        if (position := self._positions.get(file_idx)) is None:
            return None
        states = self.split.read([position], self.layers).decode()
        begin = int(self.split.plan.first_token[position])
        return {
            "hidden_states": states.contiguous(),
            "token_ids": self._token_ids[begin : begin + len(states)].long(),
        }

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Tensor] | None:
        """Read a file that vLLM wrote just now, as speculators' own backend does."""
        from hs_connectors import FileTransfer

        sample: dict[str, Tensor] | None = FileTransfer(Path()).get_generated(hs_transfer_params)
        return sample

    def delete(self, handle: str) -> None:
        """Remove a file that vLLM wrote."""
        Path(handle).unlink()


def transfer_of(args: argparse.Namespace, data_path: str) -> StoreTransfer:
    """The transfer of a training.

    Args:
        args: Arguments of the backend: ``store``, ``store_split``, ``store_layers``.
        data_path: Folder of speculators' data, which is not looked at.

    Raises:
        InputError: no split is named, or as `StoreTransfer.split`.
    """
    if args.store_split is None:
        raise InputError("name the split of the store, such as --store-split 0e/train")
    layers = parse_stored_layers(args.store_layers)
    transfer = StoreTransfer(args.store, args.store_split, layers)
    _ = transfer.split  # so that what is wrong is said before any worker starts
    return transfer


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", default="activations", help="Folder or URL of the store.")
    parser.add_argument("--store-split", help="Split with the hidden states, such as 0e/train.")
    parser.add_argument(
        "--store-layers",
        help="Layers by index or name, between commas; the last one is the verifier's last hidden "
        "state before its final normalisation. Default: all of the split.",
    )
