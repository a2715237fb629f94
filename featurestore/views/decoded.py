"""Hidden states of some tokens, decoded: no more than one shard's codes are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from bertvision.featurestore.format.encoding import decode
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.reader import SplitReader


def decoded_tokens(
    split: SplitReader,
    examples: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    positions: Sequence[int],
) -> npt.NDArray[np.float32]:
    """The states of some tokens, equal to those of `ActivationSplit.read`, bit for bit.

    Read are the examples that the tokens are of, in these layers alone: an example is the smallest
    piece that has a checksum. Decoded are the tokens.

    Args:
        split: complete.
        examples: (tokens,) the example of each.
        places: (tokens,) where in its example each is.
        positions: Places on the stored layer axis.

    Returns:
        (tokens, layers, hidden) float32, in the order given.

    Raises:
        CorruptStoreError: what is stored is damaged.
    """
    plan = split.plan
    states = torch.empty((len(examples), len(positions), split.record.hidden_size))
    if not positions:
        return states.numpy()
    shards = plan.shard[examples]
    for shard in np.unique(shards).tolist():
        here = np.flatnonzero(shards == shard)
        needed, of_needed = np.unique(examples[here], return_inverse=True)
        lengths = plan.n_tokens[needed].astype(np.int64)
        codes, scale = split.buffers(int(lengths.sum()), len(positions))
        reader = split.open_shard(shard)
        try:
            split.gather(needed, partial(_always, reader), positions, codes, scale)
        finally:
            reader.close()
        rows = (np.cumsum(lengths) - lengths)[of_needed] + places[here]
        chosen = torch.from_numpy(codes[:, rows]).transpose(0, 1)
        states[torch.from_numpy(here)] = decode(
            chosen.view(torch.bfloat16) if split.encoding.name == "bfloat16" else chosen,
            None if scale is None else torch.from_numpy(scale[rows]),
            split.stats_of(positions),
        )
    return states.numpy()


def _always(reader: ShardReader, shard: int) -> ShardReader:
    return reader
