"""A small split that is written by keys, and what must be true of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertvision.featurestore.format.logits import TopRule
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.writing.appending import ActivationWriter

LENGTHS = {"d": 9, "a": 5, "f": 1, "b": 16, "e": 8, "c": 7}
"""Keys and lengths in the order in which they are added: three shards and a half."""


def states(key: str) -> torch.Tensor:
    """Hidden states (seq, layers, hidden) that are a function of the key."""
    return torch.from_numpy(np.random.default_rng(ord(key)).normal(size=(LENGTHS[key], 2, 4)))


def logits(key: str) -> torch.Tensor:
    """Logits (seq, vocabulary) that are a function of the key."""
    return torch.from_numpy(np.random.default_rng(ord(key)).normal(size=(LENGTHS[key], 7)))


def open_writer(store: Path | str, part: int = 0) -> ActivationWriter:
    """A writer of the split: int8, of shards of 16 tokens."""
    made = ActivationStore.create(store)
    shape: dict[str, Any] = {"hidden_size": 4, "layers": [0, 1], "shard_tokens": 16}
    return made.writer("0e", "s", **shape, logits="top:2", part=part)


def add(writer: ActivationWriter, key: str) -> None:
    """Add an example with all that it has."""
    ids = [ord(key)] * LENGTHS[key]
    labels = {"label": ord(key)}
    writer.add(key, states(key), input_ids=ids, labels=labels, logits=logits(key))


def write(store: Path | str, permute: int | None = None) -> list[str]:
    """Add what is not there and finish; returns the keys that were added."""
    added = []
    with open_writer(store) as writer:
        for key in LENGTHS:
            if key not in writer:
                add(writer, key)
                added.append(key)
        writer.finish(permute)
    return added


def kept(store: Path | str) -> set[str]:
    """The keys that the split knows."""
    if not Path(store, "ledger/0e/s/split.json").exists():
        return set()
    with open_writer(store) as writer:
        return set(writer)


def check(store: Path) -> None:
    """Every example is there once, exact beside its arrays, and nothing else is left."""
    split = ActivationStore.open(store)["0e/s"]
    keys = split.table()["id"].to_pylist()
    assert keys == sorted(LENGTHS)
    for i, row in enumerate(split.plan.example_id.tolist()):
        truth = states(keys[row]).transpose(1, 2)
        assert float((split[i] - truth).norm()) <= 2e-2 * float(truth.norm())
        begin, n = int(split.plan.first_token[i]), LENGTHS[keys[row]]
        assert split.array("input_ids")[begin : begin + n].tolist() == [ord(keys[row])] * n
        assert split.labels["label"][i] == ord(keys[row])
        top = TopRule(2).of(logits(keys[row]))
        assert all(map(torch.equal, split.logits(i), top))
    assert sorted(split.plan.example_id.tolist()) == list(range(len(LENGTHS)))
    assert split.verify() == []
    assert split.is_complete
    left = [path for path in store.rglob("*") if path.suffix in (".tmp", ".next", ".safetensors")]
    assert left == []
    assert not (store / "ledger/0e/s/next").exists()
