"""Stores without activations: what opening a store reads, at any number of examples."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.calibration import Calibration
from bertvision.featurestore.format.encoding import ChannelStats
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import ShardFile, ShardRecord
from bertvision.featurestore.storage.durable import sealed
from bertvision.featurestore.writer import open_writer
from common.data import HIDDEN, LAYERS, lengths


def write_metadata(folder: Path, count: int, *, tag: str, split: str) -> None:
    """Write a split of BERT-large's dimensions that is complete but for the shards' own files.

    Args:
        folder: of the store.
        count: examples, of SQuAD's lengths.
        tag: of the snapshot.
        split: its name.
    """
    plan = ShardPlan.make(lengths(count), seed=0)
    position = np.zeros(count, np.int32)
    contents = SplitContents(
        plan,
        per_token={},
        per_example={"start_positions": position, "end_positions": position},
        examples=pa.table({"id": [str(i) for i in range(count)]}),
    )
    spec = SplitSpec(tag, split, "int8", tuple(range(LAYERS)), HIDDEN, {"model": "synthetic"})
    stats = ChannelStats(torch.zeros(LAYERS, HIDDEN), torch.ones(LAYERS, HIDDEN))
    with open_writer(folder, spec, contents, lambda: Calibration(stats)):
        pass
    file = ShardFile(bytes=1, xxh3_128="0" * 32)
    for shard in range(plan.n_shards):
        members = plan.examples_of(shard)
        record = ShardRecord(
            shard=shard,
            examples=len(members),
            tokens=plan.tokens_of(shard),
            files={"hidden_states": file, "scale": file},
            checksums=base64.b64encode(bytes(8 * LAYERS * len(members))).decode(),
        )
        path = folder / "ledger" / tag / split / f"{shard:05d}.json"
        path.write_bytes(sealed(record.model_dump_json(indent=1).encode()))
