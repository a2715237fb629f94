"""Describe and verify a split."""

from __future__ import annotations

import hashlib
from typing import Any

from bertvision.errors import CorruptStoreError
from bertvision.featurestore import arrays
from bertvision.featurestore.split import ActivationSplit


def info(split: ActivationSplit) -> dict[str, Any]:
    """What a split holds, in JSON types: sizes in bytes, completeness, provenance.

    ``times_smaller_than_dense_float32`` compares the shards on the disk with float32 frames padded
    to ``dense_length`` tokens, the layout of the original research.
    """
    r, plan = split.record, split.plan
    committed = sorted(split.ledger.shards() & set(range(r.shards)))
    records = [split.ledger.read_shard(shard) for shard in committed]
    stored = sum(file.bytes for record in records for file in record.files.values())
    done = sum(record.examples for record in records)
    length = int(r.provenance.get("max_length") or plan.n_tokens.max())
    dense = 4 * length * len(r.layers) * r.hidden_size
    return {
        "tag": str(split.tag),
        "split": split.split,
        "complete": len(committed) == r.shards,
        "shards": r.shards,
        "shards_committed": len(committed),
        "examples": r.examples,
        "tokens": r.tokens,
        "encoding": r.encoding,
        "layers": list(r.layers),
        "hidden_size": r.hidden_size,
        "bytes": stored,
        "bytes_per_example": stored / done if done else None,
        "times_smaller_than_dense_float32": dense * done / stored if stored else None,
        "dense_length": length,
        "format": r.format,
        "provenance": dict(r.provenance),
        "versions": dict(r.versions),
    }


def verify(split: ActivationSplit) -> list[str]:
    """Read every committed byte of a split again and compare it with the ledger.

    Returns:
        What is wrong, a line each, naming the shard; empty when all is well.
    """
    problems = []
    for name, expected in split.record.arrays_sha256.items():
        try:
            if arrays.digest(split.array(name)) != expected:
                problems.append(f"{split.name} array {name}: differs from what was recorded")
        except CorruptStoreError as error:
            problems.append(f"{split.name} array {name}: {error}")
    try:
        split.table()
    except CorruptStoreError as error:
        problems.append(str(error))
    for shard in sorted(split.ledger.shards()):
        problems += (
            f"{split.name} shard {shard}: {what}" for what in _shard_problems(split, shard)
        )
    return problems


def _shard_problems(split: ActivationSplit, shard: int) -> list[str]:
    if shard >= split.record.shards:
        return [f"the plan has only {split.record.shards} shards"]
    try:
        record = split.ledger.read_shard(shard)
    except CorruptStoreError as error:
        return [str(error)]
    problems = []
    for name, file in record.files.items():
        path = split.shard_path(name, shard)
        if not path.is_file():
            problems.append(f"{name} is missing")
            continue
        with open(path, "rb") as f:
            if hashlib.file_digest(f, "sha256").hexdigest() != file.sha256:
                problems.append(f"{name} was changed on the disk")
    return problems
