"""Files as other programs write them, with known hidden states, for the tests of imports."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

LENGTHS = (5, 9, 1, 7, 12, 3, 8, 2, 6, 4, 10, 11)
"""Tokens of the samples: more than ten, so that 10 sorts before 2 as a text."""
LAYERS, HIDDEN = 3, 8


def states(i: int, tokens: int | None = None, layers: int = LAYERS) -> torch.Tensor:
    """The hidden states (tokens, layers, hidden) of sample i: bfloat16 values, as float32."""
    rng = np.random.default_rng(i)
    values = rng.normal(size=(tokens or LENGTHS[i], layers, HIDDEN))
    return torch.from_numpy(values).bfloat16().float()


def token_ids(i: int, tokens: int | None = None) -> torch.Tensor:
    """The token ids (tokens,) of sample i."""
    return 100 * i + torch.arange(tokens or LENGTHS[i])


def speculators(folder: Path) -> Path:
    """Files as speculators keeps them: bfloat16, named after the row of the data."""
    folder.mkdir(parents=True)
    for i in range(len(LENGTHS)):
        sample = {"hidden_states": states(i).bfloat16(), "token_ids": token_ids(i)}
        save_file(sample, folder / f"hs_{i}.safetensors")
    return folder


def deepspec(folder: Path) -> Path:
    """A cache of version 2: two chosen layers, the last one, and a loss mask, in two shards."""
    folder.mkdir(parents=True)
    index, shards = b"", [b"", b""]
    for i, n in enumerate(LENGTHS):
        shard, begins = int(i >= 7), []
        last, chosen = states(i)[:, 2], states(i)[:, :2].reshape(n, -1)
        for array in (
            token_ids(i).int(),
            torch.ones(n, dtype=torch.uint8),
            torch.arange(n).remainder(2).to(torch.uint8),
            chosen.bfloat16().view(torch.int16),
            last.contiguous().bfloat16().view(torch.int16),
        ):
            begins.append(len(shards[shard]))
            shards[shard] += array.numpy().tobytes()
        index += struct.pack("<QIIQQQQQ", i, shard, n, *begins)
    (folder / "samples.idx").write_bytes(index)
    for i, data in enumerate(shards):
        (folder / f"shard-{i:05d}.bin").write_bytes(data)
    manifest = {
        **{"version": 2, "num_samples": len(LENGTHS), "num_shards": 2, "hidden_size": HIDDEN},
        **{"target_layer_ids": [1, 9], "hidden_dtype": "bfloat16", "token_dtype": "int32"},
        **{"mask_dtype": "uint8", "index_record_size": 56, "target_model_name_or_path": "some/llm"},
        "shards": [{"shard_id": i, "file_name": f"shard-{i:05d}.bin"} for i in (0, 1)],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def saelens(folder: Path) -> Path:
    """Activations that SAELens caches: one hook, all samples of one length, two files."""
    from datasets import Array2D, Dataset, Features, Sequence, Value

    hook, context = "blocks.0.hook_mlp_out", 6
    rows = range(len(LENGTHS))
    of = {
        hook: Array2D(shape=(context, HIDDEN), dtype="float32"),
        "token_ids": Sequence(Value("int32"), length=context),
    }
    held = {
        hook: torch.stack([states(i, context, 1)[:, 0] for i in rows]),
        "token_ids": torch.stack([token_ids(i, context) for i in rows]).int(),
    }
    Dataset.from_dict(held, features=Features(of)).save_to_disk(str(folder), num_shards=2)
    return folder


def numpy_files(folder: Path) -> Path:
    """A file for each sample, with its token ids beside it."""
    folder.mkdir(parents=True)
    for i in range(len(LENGTHS)):
        np.save(folder / f"text-{i}.npy", states(i).numpy())
        np.save(folder / f"text-{i}.input_ids.npy", token_ids(i).numpy())
    return folder


def flat(folder: Path) -> Path:
    """All tokens in one array, with lengths, keys, ids, a label and a field beside it."""
    folder.mkdir(parents=True)
    rows = range(len(LENGTHS))
    np.save(folder / "hidden_states.npy", torch.cat([states(i) for i in rows]).numpy())
    np.save(folder / "lengths.npy", np.array(LENGTHS))
    np.save(folder / "input_ids.npy", torch.cat([token_ids(i) for i in rows]).numpy())
    np.save(folder / "labels.family.npy", np.arange(len(LENGTHS)) % 3)
    np.save(folder / "loss_mask.npy", np.arange(sum(LENGTHS)) % 2 == 0)
    (folder / "keys.json").write_text(json.dumps([f"text-{i}" for i in rows]))
    return folder
