"""The place of this process among those of one run: several share a training, the first speaks.

`torchrun` says it in the environment of every process that it starts, and so does
``bertvision … --devices N``. Light, because every command asks before it prints.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from bertvision.errors import InputError, counted

RESULT_FILE = "BERTVISION_RESULT"
"""Names where the first of several ranks writes its result, for the process that started them:
libraries print to stdout as they like."""
STARTER = "BERTVISION_STARTER"
"""Names the end of a pipe that is at its end when the process that started a rank is."""

_T = TypeVar("_T")
_ORPHANED = 300.0
"""Seconds that a rank without a starter has to end its step and to save, unless it is stuck."""


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
        """Part of independent work that is this process's own: a run of neighbours.

        Args:
            items: the same on every rank.
        """
        first, after = (len(items) * n // self.count for n in (self.number, self.number + 1))
        return list(items[first:after])

    def claim_device(self) -> None:
        """See one GPU alone, that of this rank; to be called before torch looks for any.

        Raises:
            InputError: see `check_devices`.
        """
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.alone or seen == "":  # hidden on purpose
            return
        import torch

        there = torch.cuda.device_count()  # it asks the driver, and does not begin to use it
        self.check_devices(there)
        if there:
            visible = [str(n) for n in range(there)] if seen is None else seen.split(",")
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[self.local]

    def check_devices(self, there: int) -> None:
        """Refuse more ranks than GPUs; where there is none, all share the CPU.

        Args:
            there: Number of GPUs a process of this machine may see.

        Raises:
            InputError: names what is allowed.
        """
        if 0 < there < self.local_count:
            raise InputError(
                f"{self.local_count} processes on a machine that shows them "
                f"{counted(there, 'GPU')}: give torchrun --nproc-per-node {there} or less, or set "
                "CUDA_VISIBLE_DEVICES= to let them share the CPU"
            )


def this_rank() -> Rank:
    """Rank of this process by ``torchrun``; the only one where it was not started by it.

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


def end_with_starter() -> None:
    """Let this process end when the one that started it as a rank has, also where that was killed.

    SIGTERM lets a training end its step and save. A rank that waits for another inside a library
    hears no signal, and is ended five minutes later. What ``torchrun`` started is watched on Linux.
    """
    pipe = os.environ.pop(STARTER, None)
    if pipe is not None:
        end = int(pipe)  # nobody writes: it is ready when nobody can
    elif not this_rank().alone and hasattr(os, "pidfd_open"):
        try:
            end = os.pidfd_open(os.getppid())
        except OSError:  # it is outside of the container, or the system is an old one
            return
    else:
        return

    def watch() -> None:
        ready = select.poll()
        ready.register(end, select.POLLIN)
        ready.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHANED)
        os._exit(os.EX_TEMPFAIL)

    threading.Thread(target=watch, daemon=True).start()
