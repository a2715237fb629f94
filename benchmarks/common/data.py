"""Synthetic activations with the sizes and statistics of BERT-large on SQuAD.

Benchmarks need nobody's weights: what readers, codecs and quantisers feel is the distribution of
lengths, of magnitudes over layers and channels, and the channels that stand out.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.calibration import Calibration, ChannelStatsAccumulator
from bertvision.featurestore.format.encoding import ChannelStats, encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.plan import SHARD_TOKENS, ShardPlan
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writer import open_writer

MAX_LENGTH = 386
LAYERS, HIDDEN = 25, 1024
"""BERT-large: the embedding output and 24 layers."""

# 65 evenly spaced quantiles of the tokens of a window: 83,222 questions of SQuAD 1.1's training set
# (432 articles), BERT's uncased vocabulary, `tasks.windows.question_windows` with its defaults (386
# tokens, questions of at most 64, overlap 128): 84,049 windows, mean 170.8.
_QUANTILES = (
    *(36, 61, 73, 83, 92, 101, 107, 111, 114, 117, 119, 121, 123),
    *(125, 127, 129, 130, 132, 134, 135, 137, 139, 141, 142, 144, 146),
    *(148, 150, 151, 153, 155, 157, 159, 161, 163, 165, 167, 170, 172),
    *(174, 177, 179, 182, 185, 187, 190, 193, 197, 200, 204, 208, 213),
    *(218, 223, 228, 234, 241, 249, 257, 267, 280, 295, 317, 356, 386),
)
_POOL_TOKENS = 2048


def lengths(n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Tokens of ``n`` windows, distributed as SQuAD's: 36 to 386, mean 171, (n,) int64.

    One draw from each of ``n`` equal parts of the distribution, in random order: so also a small
    sample has SQuAD's mean.
    """
    rng = np.random.default_rng(seed)
    level = rng.permutation((np.arange(n) + rng.random(n)) / n)
    return np.interp(level, np.linspace(0, 1, len(_QUANTILES)), _QUANTILES).round().astype(np.int64)


def hidden_states(
    tokens: int, *, layers: int = LAYERS, hidden: int = HIDDEN, seed: int = 0
) -> Tensor:
    """A seeded model of BERT's hidden states: (tokens, layers, hidden) float32.

    - A layer keeps most of the one before (residual stream): neighbours correlate by about 0.9.
    - Within a layer, channels share a few directions with a falling spectrum, and vary in spread
      (log-normal) and mean.
    - Tokens differ in norm, and a few (as [CLS] and [SEP] do) by far.
    - Three channels in a thousand stand out by 20 to 50 times the ordinary spread, mostly through
      their mean, more so in the upper layers; these are what breaks plain absmax quantisation
      (Kovaleva et al. 2021, arXiv:2105.06990; Dettmers et al. 2022, arXiv:2208.07339).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rank = min(64, hidden)
    spectrum = torch.arange(1, rank + 1).float().pow(-0.5)
    directions = normal(rank, hidden) * (spectrum / spectrum.norm()).unsqueeze(1)
    spread = torch.exp(0.25 * normal(layers, hidden))
    mean = 0.3 * normal(layers, hidden)
    outliers = torch.randperm(hidden, generator=generator)[: max(1, round(0.003 * hidden))]
    size = torch.empty(len(outliers)).uniform_(20, 50, generator=generator)
    size *= normal(len(outliers)).sign()
    token_norm = torch.exp(0.15 * normal(tokens, 1))
    token_norm[torch.rand(tokens, generator=generator) < 0.02] *= 2.5

    out = torch.empty(tokens, layers, hidden)
    state = normal(tokens, hidden)
    for layer in range(layers):
        update = normal(tokens, rank) @ directions + 0.5 * normal(tokens, hidden)
        state = 0.9 * state + 0.44 * update
        ordinary = token_norm * state * spread[layer] + mean[layer]
        growth = 0.3 + 0.7 * layer / max(1, layers - 1)
        ordinary[:, outliers] = growth * size * (1 + 0.15 * token_norm * state[:, outliers])
        out[:, layer] = 0.55 * ordinary  # LayerNorm's output: most channels well below 1
    return out


class Synthetic:
    """Examples whose tokens are runs of one pool of hidden states, so that any number is cheap.

    Attributes:
        n_tokens: (examples,) in the caller's order.
        layers: hidden states per token.
        hidden: channels.
        seed: of the pool, the runs and the stored order.
    """

    def __init__(
        self,
        n_tokens: npt.ArrayLike,
        *,
        layers: int = LAYERS,
        hidden: int = HIDDEN,
        seed: int = 0,
    ) -> None:
        self.n_tokens = np.asarray(n_tokens, np.int64)
        self.layers, self.hidden, self.seed = layers, hidden, seed
        rng = np.random.default_rng(seed + 1)
        self._first = rng.integers(0, _POOL_TOKENS, len(self.n_tokens))

    def __len__(self) -> int:
        return len(self.n_tokens)

    @property
    def pool(self) -> Tensor:
        """(pool, layers, hidden) float32."""
        return _pool(self.layers, self.hidden, self.seed)

    @cached_property
    def stats(self) -> ChannelStats:
        """Channel statistics of the pool."""
        accumulator = ChannelStatsAccumulator()
        for block in self.pool.split(256):
            accumulator.add(block)
        return accumulator.result()

    def rows(self, example: int) -> Tensor:
        """The rows of the pool that an example consists of, (seq,) int64."""
        return (int(self._first[example]) + torch.arange(int(self.n_tokens[example]))) % len(
            self.pool
        )

    def example(self, example: int) -> Tensor:
        """The hidden states of an example, (seq, layers, hidden) float32."""
        return self.pool[self.rows(example)]

    def write(
        self,
        folder: Path,
        *,
        encoding: str = "int8",
        shard_tokens: int = SHARD_TOKENS,
        tag: str = "1e",
        split: str = "train",
    ) -> ActivationSplit:
        """Write the examples as a split of a store, or finish and open the one that is there.

        Raises:
            ProvenanceError: the folder holds a split that was made with other arguments.
        """
        total = int(self.n_tokens.sum())
        token = np.arange(total, dtype=np.int32)
        rng = np.random.default_rng(self.seed + 2)
        start = rng.integers(0, self.n_tokens)
        contents = SplitContents(
            ShardPlan.make(self.n_tokens, shard_tokens=shard_tokens, seed=self.seed),
            per_token={"input_ids": token, "offset_mapping": np.stack([token, token + 1], 1)},
            per_example={
                "question_index": np.arange(len(self), dtype=np.int32),
                "start_positions": start.astype(np.int32),
                "end_positions": rng.integers(start, self.n_tokens).astype(np.int32),
            },
            examples=pa.table({"id": [str(i) for i in range(len(self))]}),
        )
        spec = SplitSpec(
            tag=tag,
            split=split,
            encoding=encoding,
            layers=tuple(range(self.layers)),
            hidden_size=self.hidden,
            provenance={"model": "synthetic", "seed": self.seed, "max_length": MAX_LENGTH},
        )
        with open_writer(folder, spec, contents, lambda: Calibration(self.stats)) as writer:
            pending = writer.pending()
            if pending:
                # a token's codes depend on that token alone: the pool is encoded once, not each run
                codes, scale, *counts = encode(self.pool, get_encoding(encoding), writer.stats)
            for shard in pending:
                examples = contents.plan.example_id[contents.plan.examples_of(shard)]
                rows = torch.cat([self.rows(int(example)) for example in examples])
                writer.write_shard(
                    shard, codes[rows], None if scale is None else scale[rows], *counts
                )
        return ActivationSplit(folder, tag, split)


@lru_cache(maxsize=2)
def _pool(layers: int, hidden: int, seed: int) -> Tensor:
    return hidden_states(_POOL_TOKENS, layers=layers, hidden=hidden, seed=seed)


def write_split(
    folder: Path,
    n_tokens: npt.ArrayLike,
    *,
    encoding: str = "int8",
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    seed: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    tag: str = "1e",
    split: str = "train",
) -> ActivationSplit:
    """Write synthetic activations of these lengths as a split, or reuse the same ones.

    Args:
        folder: of the store.
        n_tokens: (examples,) tokens of each, for example from `lengths`.
        encoding: of the hidden states.
        layers: hidden states per token.
        hidden: channels.
        seed: of everything.
        shard_tokens: capacity of a shard.
        tag: of the snapshot.
        split: its name.
    """
    synthetic = Synthetic(n_tokens, layers=layers, hidden=hidden, seed=seed)
    return synthetic.write(
        folder, encoding=encoding, shard_tokens=shard_tokens, tag=tag, split=split
    )
