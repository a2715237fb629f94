"""The place of this process among those of one run: several share a training, the first speaks.

`torchrun` says it in the environment of every process that it starts, and so does
``bertvision … --devices N``. Light, because every command asks before it prints.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from bertvision.errors import InputError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Rank:
    """The place of this process among those that share its work."""

    number: int = 0
    """From 0, over all machines."""
    count: int = 1
    """How many there are."""
    local: int = 0
    """From 0, on this machine: the number of its GPU."""
    local_count: int = 1
    """How many there are on this machine."""

    @property
    def first(self) -> bool:
        """Whether this process holds the locks, writes the files and prints."""
        return self.number == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.count == 1

    def part(self, items: Sequence[_T]) -> list[_T]:
        """What of independent work is this process's own: a run of neighbours, all in one part.

        Args:
            items: the same on every rank.
        """
        first, after = (len(items) * n // self.count for n in (self.number, self.number + 1))
        return list(items[first:after])

    def claim_device(self) -> None:
        """See one GPU alone, that of this rank; to be called before torch looks for any."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.alone or seen == "":  # hidden on purpose
            return
        visible = [str(n) for n in range(self.local_count)] if seen is None else seen.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[self.local % len(visible)]


def this_rank() -> Rank:
    """What ``torchrun`` says of this process; the only one where it was not started by it.

    Raises:
        InputError: the variables of the environment are not those of ``torchrun``, or the machines
            have different numbers of processes.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Rank()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        number, count, local, local_count = (int(os.environ[name]) for name in names)
    except (KeyError, ValueError):
        given = ", ".join(f"{name}={os.environ.get(name)}" for name in names)
        raise InputError(
            f"TORCHELASTIC_RUN_ID is set, but the variables that torchrun sets with it are not "
            f"whole numbers ({given}): start with torchrun, or unset TORCHELASTIC_RUN_ID"
        ) from None
    if count % local_count:
        raise InputError(
            f"{count} processes over machines of {local_count}: start torchrun with the same "
            "--nproc-per-node on every machine"
        )
    return Rank(number, count, local, local_count)
