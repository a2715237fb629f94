"""The items of a workspace's splits, and the names that splits are stored under."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, TypeVar

from bertvision.errors import InputError, UnknownNameError
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.tasks.registry import POOLINGS, TokenPooling
from bertvision.pipelines.workspace.config import FinetuneConfig

T = TypeVar("T")


HEAD_TOKENS: Final[dict[str, TokenPooling]] = {"span": "all", "classification": "cls"}
"""What heads take of each window, by their kind."""


class StoredName(NamedTuple):
    """The parts of the name that a split is stored under, none of which has a hyphen in it."""

    split: str
    """Split of the workspace or of the data set."""
    tokens: TokenPooling = "all"
    """All tokens of each window, or a pooling of them."""
    dataset: str | None = None
    """A data set beside the workspace's own, or None."""

    @classmethod
    def parse(cls, name: str) -> StoredName:
        """The parts of a name.

        Raises:
            InputError: it has too many parts.
        """
        parts = name.split("-")
        pooling = next((p for p in POOLINGS if p == parts[-1]), None) if len(parts) > 1 else None
        parts = parts[:-1] if pooling else parts
        if len(parts) > 2:
            raise InputError(
                f"{name!r} is no stored split: write [DATA SET-]SPLIT[-POOLING], such as dev, "
                "dev-cls or bigram_shift-test-mean"
            )
        return cls(parts[-1], pooling or "all", parts[0] if len(parts) > 1 else None)

    @property
    def name(self) -> str:
        """As it is written: ``train``, ``dev-cls``, ``bigram_shift-test-mean``."""
        parts = [self.dataset, self.split, None if self.tokens == "all" else self.tokens]
        return "-".join(part for part in parts if part is not None)


def head_split(kind: str, split: str) -> str:
    """The name of the stored split that heads of a kind take for a split of the workspace."""
    return StoredName(split, HEAD_TOKENS[kind]).name


def check_split(split: str, held: Collection[str], dataset: str | None) -> None:
    """Refuse a split that a data set does not have.

    Args:
        split: that was asked for.
        held: those there are.
        dataset: the data set's name; None is the workspace's own data.

    Raises:
        UnknownNameError: there is no such split.
    """
    if split not in held:
        what = "the workspace's own data" if dataset is None else dataset
        raise UnknownNameError(
            f"{split!r} is no split of {what}: there are {', '.join(held) or 'none'}"
        )


def source_split(split: str, task: TaskConfig) -> str:
    """The split of the source from which a split of the workspace is taken."""
    return "train" if split == "tune" or (split == "dev" and task.dev_fraction) else split


def select_items(
    items: list[T],
    split: str,
    task: TaskConfig,
    finetune: FinetuneConfig,
    group: Callable[[T], str],
) -> list[T]:
    """The items of a split, out of all items of its source, in their order.

    ``train`` and ``tune`` part the training items (or the subset of them that ``train_questions``
    asks for) by whole groups; where ``dev`` is a part of the data too, it is taken off first.

    Args:
        items: of the source.
        split: of the workspace.
        task: how large the parts are that are held out.
        finetune: how many items are taken, and the seed.
        group: what keeps items together.
    """
    if task.dev_fraction and split in ("train", "tune", "dev"):
        items, dev = hold_out(items, task.dev_fraction, group, seed=finetune.seed)
        if split == "dev":
            return dev
    if split not in ("train", "tune"):
        return items
    if finetune.train_questions is not None:
        items = _subset(items, finetune.train_questions, group, seed=finetune.seed)
    if task.tune_fraction == 0:
        return items if split == "train" else []
    kept, held_out = hold_out(items, task.tune_fraction, group, seed=finetune.seed)
    return kept if split == "train" else held_out


def hold_out(
    items: Sequence[T], fraction: float, group: Callable[[T], str], *, seed: int
) -> tuple[list[T], list[T]]:
    """Split items into a kept and a held-out part, by whole groups.

    The groups with the smallest SHA-256 of (seed, group) are held out, so that the choice is the
    same on every machine and whatever the order of the items.

    Args:
        items: of a training split.
        fraction: part of the distinct groups to hold out, 0 ≤ fraction < 1; the number is rounded,
            but above 0 it is at least one group, if there are two.
        group: what keeps items together, such as their text.
        seed: which groups.

    Returns:
        (kept, held out), both in the order given.

    Raises:
        InputError: the fraction is outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise InputError(f"cannot hold out a fraction of {fraction}: give 0 ≤ fraction < 1")
    groups = list(dict.fromkeys(map(group, items)))
    count = round(fraction * len(groups))
    if fraction > 0 and len(groups) > 1:
        count = min(max(count, 1), len(groups) - 1)
    groups.sort(key=lambda text: hashlib.sha256(f"{seed}\n{text}".encode()).digest())
    held = set(groups[:count])
    kept = [item for item in items if group(item) not in held]
    return kept, [item for item in items if group(item) in held]


def _subset(items: list[T], limit: int, group: Callable[[T], str], *, seed: int) -> list[T]:
    """At most ``limit`` items: whole groups in a seeded order, as many as fit."""
    import numpy as np

    sizes = Counter(map(group, items))
    groups = list(sizes)
    chosen: set[str] = set()
    count = 0
    for index in np.random.default_rng([seed, 1]).permutation(len(groups)):
        found = groups[int(index)]
        if count + sizes[found] <= limit:
            chosen.add(found)
            count += sizes[found]
    return [item for item in items if group(item) in chosen]
