"""The names that splits are stored under, with their parts: data set, split, sites, pooling."""

from __future__ import annotations

from typing import Final, NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.poolings import POOLINGS, TokenPooling

_SITES: Final = "sites"


class StoredName(NamedTuple):
    """The parts of the name that a split is stored under, none of which has a hyphen in it."""

    split: str
    """Split of the workspace or of the data set."""
    tokens: TokenPooling = "all"
    """All tokens of each window, or a pooling of them."""
    dataset: str | None = None
    """A data set beside the workspace's own, or None."""
    sites: bool = False
    """Whether it holds other sites of the encoder than its hidden states."""

    @classmethod
    def parse(cls, name: str) -> StoredName:
        """The parts of a name.

        Raises:
            InputError: it has too many parts.
        """
        parts = name.split("-")
        pooling = next((p for p in POOLINGS if p == parts[-1]), None) if len(parts) > 1 else None
        parts = parts[:-1] if pooling else parts
        sites = len(parts) > 1 and parts[-1] == _SITES
        parts = parts[:-1] if sites else parts
        if len(parts) > 2:
            raise InputError(
                f"{name!r} is no stored split: write [DATA SET-]SPLIT[-{_SITES}][-POOLING], such "
                "as dev, dev-cls or bigram_shift-test-mean"
            )
        dataset = parts[0] if len(parts) > 1 else None
        return cls(parts[-1], pooling or "all", dataset, sites)

    @property
    def name(self) -> str:
        """As it is written: ``train``, ``dev-cls``, ``bigram_shift-test-mean``, ``dev-sites``."""
        pooling = None if self.tokens == "all" else self.tokens
        parts = [self.dataset, self.split, _SITES if self.sites else None, pooling]
        return "-".join(part for part in parts if part is not None)


def check_hidden_states(split: str) -> None:
    """Refuse a stored split of other sites, where hidden states are meant.

    Args:
        split: its name in the store.

    Raises:
        InputError: it is one.
    """
    first, *rest = split.split("-")
    if _SITES in rest:
        states = "-".join([first, *(part for part in rest if part != _SITES)])
        raise InputError(
            f"{split} holds sites of the encoder, and hidden states are needed: name {states}; "
            "sites are read by name, with split.read, split.dask and split.tokens (docs/sites.md)"
        )
