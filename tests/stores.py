"""Stores with known contents, for the tests of the feature store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.calibration import (
    Calibration,
    Calibrator,
    ChannelStatsAccumulator,
)
from bertvision.featurestore.format.encoding import encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.logits import TopLogits
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writer import SplitWriter, open_writer


class Made:
    """Random hidden states of ragged examples, and everything to write them as a split."""

    def __init__(
        self,
        lengths: list[int],
        *,
        layers: int = 3,
        hidden: int = 16,
        encoding: str = "float32",
        compression: str = "none",
        shard_tokens: int = 64,
        seed: int | None = 0,
        tag: str = "1e",
        split: str = "train",
        top: int = 0,
    ) -> None:
        rng = np.random.default_rng(7)
        self.hidden_states = [
            torch.from_numpy(rng.normal(size=(n, layers, hidden)).astype(np.float32))
            for n in lengths
        ]
        self.plan = ShardPlan.make(lengths, shard_tokens=shard_tokens, seed=seed)
        token = np.arange(sum(lengths), dtype=np.int32)
        self.contents = SplitContents(
            self.plan,
            per_token={"input_ids": token, "offset_mapping": np.stack([token, token + 1], 1)},
            per_example={"start_positions": np.arange(len(lengths), dtype=np.int32)},
            examples=pa.table({"id": [f"q{i}" for i in range(len(lengths))]}),
        )
        self.spec = SplitSpec(
            tag=tag,
            split=split,
            encoding=encoding,
            compression=compression,
            layers=tuple(range(layers)),
            hidden_size=hidden,
            provenance={
                "model": "tiny",
                "weights_sha256": "ab",
                "data_sha256": "cd",
                "max_length": max(lengths),
                **({"logits": f"top:{top}"} if top else {}),
            },
        )
        self.logits: list[TopLogits] | None = None
        if rule := self.spec.top:
            self.logits = [
                rule.of(torch.from_numpy(rng.normal(size=(n, 3 * top)))).map(torch.Tensor.numpy)
                for n in lengths
            ]

    def stats(self) -> Calibration:
        encoding = get_encoding(self.spec.encoding)
        if encoding.transformed:
            states = torch.cat(self.hidden_states)
            calibrator = Calibrator(encoding, np.full(len(states), "ordinary"))
            calibrator.add(states, torch.ones(len(states), dtype=torch.bool))
            return calibrator.result()
        accumulator = ChannelStatsAccumulator()
        accumulator.add(torch.cat(self.hidden_states))
        return Calibration(accumulator.result())

    def of_stored(self, i: int) -> torch.Tensor:
        """The true hidden states (seq, layers, hidden) of the i-th stored example."""
        return self.hidden_states[int(self.plan.example_id[i])]

    def write(self, store: Path, shards: int | None = None) -> ActivationSplit:
        """Write all pending shards, or the first so many of them."""
        with open_writer(store, self.spec, self.contents, self.stats) as writer:
            for shard in writer.pending()[:shards]:
                self.write_shard(writer, shard)
        return ActivationSplit(store, self.spec.tag, self.spec.split)

    def write_shard(self, writer: SplitWriter, shard: int) -> None:
        stored = self.plan.examples_of(shard)
        members = [self.of_stored(i) for i in stored]
        encoded = encode(torch.cat(members), writer.split.encoding, writer.stats)
        logits = None
        if self.logits is not None:
            rows = self.plan.example_id[stored.start : stored.stop].tolist()
            logits = TopLogits.joined([self.logits[row] for row in rows])
        writer.write_shard(shard, *encoded, logits=logits)


def shard_path(split: ActivationSplit, name: str, shard: int) -> Path:
    """The file of one array's shard, of a split on the local disk."""
    return Path(str(split.storage), shard_key(split.record, name, shard))


def record_path(split: ActivationSplit, shard: int) -> Path:
    """The file of a shard's record."""
    return Path(str(split.storage), "ledger", split.name, f"{shard:05d}.json")
