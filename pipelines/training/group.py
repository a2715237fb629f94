"""The processes that train one model together: what they tell each other.

Every rank holds the whole model and takes its share of each global batch. Losses are sums over the
examples divided by the number of examples of the *global* batch, so that the sum of the ranks'
gradients is the gradient of that batch, whatever their shares: a last short batch is right, and so
is a rank that has no example of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from bertvision.pipelines.tasks.batch import Int64Array

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another that neither answers nor dies."""
_BUCKET = 25_000_000
"""Values of gradients that are summed at once, 100 MB: their copy is what the sum costs of
memory."""


class RankLostError(BertvisionError):
    """Another process of the same training ended; this one cannot go on without it."""

    exit_code: int = 75
    """EX_TEMPFAIL: the fault is not of this process, and the same command goes on."""


class Group:
    """The processes that train together; of one alone every method does nothing.

    Args:
        rank: which of them this is.
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
            parameters: in the same order on every rank.
        """
        if self.rank.alone:
            return
        found = [p for p in parameters if p.requires_grad]
        have = torch.tensor([p.grad is not None for p in found], dtype=torch.int32, device=device())
        dist.all_reduce(have, dist.ReduceOp.MAX)
        found = [p for p, any_has in zip(found, have.tolist(), strict=True) if any_has]
        for p in found:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for gradients in _buckets([p.grad for p in found if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def trainer_options(self) -> dict[str, Any]:
        """What a Lightning Trainer is to be told of the devices."""
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
        InputError: see `this_rank`.
        RankLostError: another rank ended while this one needed it.
    """
    rank = this_rank()
    if rank.alone:
        yield Group(rank)
        return
    cuda = device().type == "cuda"
    if cuda:
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


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients in runs of one type, of at most `_BUCKET` values where each has fewer."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        held = sum(other.numel() for other in bucket)
        if bucket and (held + gradient.numel() > _BUCKET or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
