"""Analyses of a store that does not fit into memory."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import dask
import numpy as np
import pyarrow as pa
import pytest
import torch
from clusters import cluster

from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writer import open_writer
from bertvision.pipelines.analysis.isotropy import isotropy_of_arrays as isotropy
from bertvision.pipelines.scheduler import ClusterError, compute, use_scheduler

LIMIT = 640 << 20
"""Bytes of the worker; Python and its libraries take more than half of them."""
LAYERS, HIDDEN, LENGTH = 64, 64, 64
SHARD_TOKENS = 8 * LENGTH
SHARD_BYTES = SHARD_TOKENS * LAYERS * HIDDEN * 4
WORKER = {
    # what does not fit is neither put on the disk nor waited for: the worker is killed
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 0.95,
}


@pytest.fixture(scope="module")
def states() -> torch.Tensor:
    """(tokens, layers, hidden) of every shard."""
    return torch.from_numpy(
        np.random.default_rng(0).normal(size=(SHARD_TOKENS, LAYERS, HIDDEN)).astype(np.float32)
    )


@pytest.fixture(
    scope="module", params=[1.25, pytest.param(4, marks=pytest.mark.slow)], ids="{} times".format
)
def times(request: pytest.FixtureRequest) -> float:
    """How many times the worker's memory the store is."""
    return float(request.param)


@pytest.fixture(scope="module")
def split(
    tmp_path_factory: pytest.TempPathFactory, states: torch.Tensor, times: float
) -> Iterator[ActivationSplit]:
    """Float32 activations of more than the worker's memory."""
    shards = math.ceil(times * LIMIT / SHARD_BYTES)
    folder = tmp_path_factory.mktemp("large")
    lengths = [LENGTH] * (shards * SHARD_TOKENS // LENGTH)
    plan = ShardPlan.make(lengths, shard_tokens=SHARD_TOKENS)
    spec = SplitSpec("1e", "train", "float32", tuple(range(LAYERS)), HIDDEN, {})
    contents = SplitContents(plan, {}, {}, pa.table({"id": ["x"]}))
    with open_writer(folder, spec, contents, NotImplemented) as writer:
        assert plan.n_shards == shards
        for shard in range(shards):
            writer.write_shard(shard, states, None)
    yield ActivationSplit(folder, "1e", "train")
    shutil.rmtree(folder)  # pytest would keep it


def peak_bytes() -> int:
    """The most memory that this process has had (its own, not that of whom it was made by)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_store_larger_than_the_memory_of_the_worker_is_analysed_within_it(
    split: ActivationSplit, states: torch.Tensor, times: float
) -> None:
    """Blocks are read when they are needed and let go when they are merged.

    It protects what makes a store of any size analysable: a chunk is a shard, reading is not ahead
    of computing, partial results are merged pairwise, and pooling holds one layer. A worker that is
    about to exceed its limit is killed, and a task is not given to a second one; the peak is what
    the kernel counted. That this would be noticed is seen at the end, where the same worker is to
    hold half of the store at once.
    """
    from distributed import Client

    tokens = split.plan.n_shards * SHARD_TOKENS
    assert split.info()["bytes"] >= times * LIMIT
    with (
        dask.config.set(WORKER),
        cluster(1, fresh=True, allowed_failures=0, memory_limit=LIMIT) as made,
        Client(made, set_as_default=False) as client,
    ):
        address = made.scheduler_address
        result = isotropy({"1e": split.dask()}, max_tokens=None, scheduler=address)
        assert result.n_vectors == ((tokens,),)
        norms = np.linalg.norm(states.numpy().astype(np.float64), axis=2).mean(axis=0)
        np.testing.assert_allclose(result.mean_norm[0, 0], norms, rtol=1e-9)
        with use_scheduler(address):
            mean = compute(split.dask().mean(axis=0, dtype=np.float64))
        np.testing.assert_allclose(mean, states.double().mean(dim=0), atol=1e-6)
        (peak,) = client.run(peak_bytes).values()
        assert SHARD_BYTES < peak < LIMIT
        with pytest.raises(ClusterError, match="too little memory"), use_scheduler(address):
            compute(split.dask()[: tokens // 2].rechunk(-1).sum())
