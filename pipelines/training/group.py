"""The processes that train one model together: what they tell each other.

Every rank holds the whole model and takes its share of each global batch. Losses are sums over the
examples divided by the number of examples of the *global* batch, so that the sum of the ranks'
gradients is the gradient of that batch, whatever their shares: a last short batch is right, and so
is a rank that has no example of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from bertvision.errors import BertvisionError
from bertvision.pipelines.precision import device
from bertvision.pipelines.ranks import Rank, this_rank
from bertvision.pipelines.tasks.windows import Int64Array

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another that neither answers nor dies."""
_BUCKET = 25_000_000
"""Values of gradients that are summed at once, 100 MB: their copy is what the sum costs of
memory."""


class RankLostError(BertvisionError):
    """Another process of the same training ended; this one cannot go on without it."""

    exit_code: int = 75
    """EX_TEMPFAIL: the fault is not of this process, and the same command goes on."""


class RanksDifferError(BertvisionError):
    """Processes of the same training do not have the same before them."""

    exit_code: int = 2


class Group:
    """The processes that train together; of one alone every method does nothing.

    Args:
        rank: Number of this one among them.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def first_says(self, *numbers: int) -> tuple[int, ...]:
        """Numbers as the first rank has them: waits until it is here.

        Args:
            *numbers: the same count of them on every rank.
        """
        if self.rank.alone:
            return numbers
        told = torch.tensor(numbers, dtype=torch.int64, device=device())
        dist.broadcast(told, 0)
        return tuple(told.tolist())

    def check_same(self, seen: Mapping[str, bytes]) -> None:
        """Compare what ranks must have in common; each of them raises where one has another.

        Args:
            seen: Values by name, in the same order on every rank.

        Raises:
            RanksDifferError: names the ranks, and what they see otherwise than the first.
        """
        if self.rank.alone:
            return
        digests = (hashlib.sha256(state).digest()[:8] for state in seen.values())
        numbers = [int.from_bytes(digest, "big", signed=True) for digest in digests]
        for name, ranks in zip(seen, self._others(torch.tensor(numbers)), strict=True):
            if ranks:
                raise RanksDifferError(
                    f"{_named(ranks)} another {name} than rank 0: every rank must see the same "
                    "files under the same paths; run the same command again once they do"
                )

    def check_weights(self, parameters: Iterable[nn.Parameter], step: int) -> None:
        """Compare all weights, by sums of their bits, which any order of adding leaves the same.

        Args:
            parameters: Parameters in the same order on every rank.
            step: after which they are compared.

        Raises:
            RanksDifferError: names the ranks that have drifted from the first, on every rank.
        """
        if self.rank.alone:
            return
        drifted = self._others(torch.stack([_sum_of_bits(p.detach()) for p in parameters]))
        if ranks := sorted({rank for ranks in drifted for rank in ranks}):
            raise RanksDifferError(
                f"{_named(ranks)} other weights than rank 0 after step {step}, which was not "
                "saved: devices or libraries differ, or one of them is faulty; on machines that "
                "are alike the same command goes on from what was saved before"
            )

    def _others(self, numbers: Tensor) -> list[list[int]]:
        """For each of (n,) int64 numbers, the ranks that have another than the first."""
        own = numbers.to(device())
        gathered = [torch.empty_like(own) for _ in range(self.rank.count)]
        dist.all_gather(gathered, own)
        differ = (torch.stack(gathered) != gathered[0]).cpu()  # (ranks, n)
        return [column.nonzero().flatten().tolist() for column in differ.T]

    def share(self, rows: Int64Array) -> Int64Array:
        """This rank's part of a global batch: every ``count``-th of it, perhaps none.

        Args:
            rows: (batch,) the examples of the global batch.
        """
        return rows if self.rank.alone else rows[self.rank.number :: self.rank.count]

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks, in place."""
        if not self.rank.alone:
            dist.all_reduce(value)
        return value

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their sums over all ranks, the same bit for bit on each.

        What has no gradient on any rank has none afterwards: optimisers leave it alone.

        Args:
            parameters: Parameters in the same order on every rank.
        """
        if self.rank.alone:
            return
        shared = [p for p in parameters if p.requires_grad]
        have = torch.tensor(
            [p.grad is not None for p in shared], dtype=torch.int32, device=device()
        )
        dist.all_reduce(have, dist.ReduceOp.MAX)
        shared = [p for p, any_has in zip(shared, have.tolist(), strict=True) if any_has]
        for p in shared:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for gradients in _buckets([p.grad for p in shared if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def trainer_options(self) -> dict[str, Any]:
        """Options of a Lightning Trainer for the devices."""
        if self.rank.alone:
            return {"devices": 1}
        return {
            "accelerator": "gpu" if device().type == "cuda" else "cpu",
            "devices": self.rank.local_count,
            "num_nodes": self.rank.count // self.rank.local_count,
            "strategy": SummedGradients(timeout=PATIENCE),
            "use_distributed_sampler": False,
        }


@contextmanager
def joined() -> Iterator[Group]:
    """The group of this process, once all of its ranks are there.

    Raises:
        InputError: see `this_rank`, likewise `Rank.check_devices`.
        RankLostError: another rank ended while this one needed it.
    """
    rank = this_rank()
    if rank.alone:
        yield Group(rank)
        return
    cuda = device().type == "cuda"
    if cuda:
        rank.check_devices(torch.cuda.device_count())
        torch.cuda.set_device(rank.local)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
        yield Group(rank)
        dist.destroy_process_group()  # not after an error: it might wait for who is gone
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RankLostError(
            f"rank {rank.number} of {rank.count} lost another rank, which ended or does not "
            "answer: what that one says is the reason; run the same command again to continue"
        ) from error


class SummedGradients(DDPStrategy):
    """Lightning's processes and devices, with gradients that the training sums itself.

    Its wrapper would average them over ranks during each backward pass, which is the gradient of
    the global batch only where all ranks have equally many examples and every rank has some.
    """

    def configure_ddp(self) -> None:
        """Begin with the weights of the first rank everywhere; the model stays unwrapped."""
        assert self.model is not None
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            dist.broadcast(tensor.detach(), 0)


def _named(ranks: Sequence[int]) -> str:
    """Ranks as the beginning of a sentence on what they have."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers} has" if len(ranks) == 1 else f"ranks {numbers} have"


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of a value."""


def _sum_of_bits(values: Tensor) -> Tensor:
    """() int64, the sum of values whose bits are read as integers; it wraps around."""
    return values.reshape(-1).view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in runs of one type, of at most `_BUCKET` values where each has fewer."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        size = sum(other.numel() for other in bucket)
        if bucket and (size + gradient.numel() > _BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
