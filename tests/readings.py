"""Results of the public functions on a workspace, in a form that two versions of the code share.

`readings` is of what files say: text, whole numbers, and arithmetic on a few recorded numbers.
`values` is of what a machine computes from stored bytes, which its kernels may round differently.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.split import ActivationSplit
from bertvision.models.factory import HEADS, build_head
from bertvision.models.outputs import SpanOutput
from bertvision.pipelines.readouts.probe_results import ProbeFile, probe_rows
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.training.evaluate import is_evaluated
from bertvision.pipelines.training.trained_head import load_head
from bertvision.pipelines.workspace.heads import trained_heads
from bertvision.pipelines.workspace.records import read_run_config, read_run_metrics
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace

PLACE = "/@ROOT@"
"""Stands for the folder that a fixture lies in, wherever that is.

It begins like an absolute path, because a plain YAML value cannot begin with ``@``.
"""
_SAMPLE = 32  # of the decoded numbers of a split
_EXAMPLES = 4  # that logits of heads are kept of
_MOST_SHAPES = 12
_LARGEST_HEAD = 400_000  # parameters: the heads above it take seconds

Floats = npt.NDArray[np.float32]


def readings(space: Workspace) -> dict[str, Any]:
    """Everything that reading a workspace gives and no machine rounds, as JSON has it."""
    found = {
        "status": status(space),
        "rows": _rows(space),
        "runs": _runs(space),
        "evaluated": _evaluated(space),
        "probes": probe_rows(ProbeFile.read_all(space)),
        "snapshots": {
            str(tag): load_snapshot(space.snapshot_dir(tag)).info.model_dump(mode="json")
            for tag in space.snapshots()
        },
        "splits": {split.name: _split(split) for split in _splits(space)},
    }
    return dict(json.loads(json.dumps(found).replace(str(space.root.parent), PLACE)))


def values(space: Workspace) -> dict[str, Floats]:
    """Numbers that are computed from what is stored, by what they are of."""
    found: dict[str, Floats] = {}
    for split in _splits(space):
        if split.is_complete:
            decoded = split.read(range(len(split))).decode().numpy().ravel()
            found[f"decoded/{split.name}"] = decoded[:: math.ceil(decoded.size / _SAMPLE)]
    for tag, name in trained_heads(space):
        module, config = load_head(space.head_dir(tag, name))
        stored = "dev" if config.kind == "span" else "dev-cls"
        batch = space.split(tag, stored).read(range(_EXAMPLES), config.layers)
        found[f"logits/{tag}/{name}"] = _logits(module, batch.decode(), batch.lengths)
    return found


def head_states() -> dict[str, dict[str, list[int]] | str]:
    """By head the names and shapes of what its ``model.safetensors`` holds.

    Of heads with more than a few, their digest.
    """
    found: dict[str, dict[str, list[int]] | str] = {}
    for name in HEADS:
        state = _made(name, "meta").state_dict()
        shapes = {key: list(state[key].shape) for key in sorted(state)}
        many = len(shapes) > _MOST_SHAPES
        found[name] = _digest(json.dumps(shapes).encode()) if many else shapes
    return found


def head_logits() -> dict[str, Floats]:
    """Logits of every head but the largest, with weights that are set one by one by name."""
    found = {}
    lengths = torch.tensor([3, 7, 1])
    for name in HEADS:
        if sum(x.numel() for x in _made(name, "meta").state_dict().values()) > _LARGEST_HEAD:
            continue
        head = _made(name, "cpu")
        head.load_state_dict({key: _pattern(key, x) for key, x in head.state_dict().items()})
        count = len(lengths) if HEADS[name].kind == "classification" else int(lengths.sum())
        states = _pattern("hidden_states", torch.empty(count, 3, 16))
        sizes = lengths if HEADS[name].kind == "span" else torch.ones_like(lengths)
        found[name] = _logits(head.eval(), states, sizes)
    return found


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Differences of a reading from the expected one: missing parts and other values.

    A later version may say more of a thing, by a new key; lists are as long as they were. Floats
    are the same up to the rounding of their last digits.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        lacking = [f"{where}/{key} is missing" for key in expected if key not in found]
        both = [key for key in expected if key in found]
        return lacking + [
            line
            for key in both
            for line in differences(found[key], expected[key], f"{where}/{key}")
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}/{i}")]
    if isinstance(expected, float) and isinstance(found, float | int):
        if math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9):
            return []
    elif type(expected) is type(found) and expected == found:
        return []
    return [f"{where} is {found!r}, not {expected!r}"]


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    """When each file below a folder was changed and what is in it; locks are left out."""
    return {
        path.relative_to(root).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and path.name != ".lock"
    }


def _splits(space: Workspace) -> list[ActivationSplit]:
    return [space.split(tag, name) for tag, names in space.stored().items() for name in names]


def _split(split: ActivationSplit) -> dict[str, Any]:
    """Description of a stored split, with digests of the parts that no arithmetic changes."""
    arrays = {name: split.array(name) for name in sorted(split.record.arrays)}
    info = split.info()
    provenance = json.dumps(info.pop("provenance"), sort_keys=True)
    return {
        "info": info,
        "provenance": _digest(provenance.encode()),
        "damage": [what for what, _ in find_damage(split)],
        "missing": split.missing_shards(),
        "arrays": {
            name: [str(x.dtype), list(x.shape), _digest(np.ascontiguousarray(x).tobytes())]
            for name, x in arrays.items()
        },
        "table": _digest(json.dumps(split.table().to_pylist()).encode()),
    }


def _rows(space: Workspace) -> dict[str, Any]:
    rows = read_rows(space)._asdict()
    rows["metrics"] = [column.key for column in rows["metrics"]]
    return rows


def _runs(space: Workspace) -> dict[str, Any]:
    folders = {f"{tag}/{name}": space.head_dir(tag, name) for tag, name in trained_heads(space)}
    return {
        name: {
            "config": read_run_config(folder).to_json(),
            "metrics": read_run_metrics(folder).to_json(),
        }
        for name, folder in folders.items()
    }


def _evaluated(space: Workspace) -> dict[str, bool]:
    """Whether each head counts as scored on each snapshot that it has results of."""
    rows = [row for row in read_rows(space).runs if row["system"] == "head"]
    return {
        row["file"]: is_evaluated(
            space, row["trained_on"], row["run"], tag=row["checkpoint"], precision="32"
        )
        for row in rows
    }


@torch.inference_mode()
def _logits(head: nn.Module, states: torch.Tensor, lengths: torch.Tensor) -> Floats:
    output = head(states, lengths)
    if not isinstance(output, SpanOutput):
        return np.asarray(output.logits.numpy())
    real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    return torch.stack([output.start_logits[real], output.end_logits[real]]).numpy()


def _made(name: str, device: str) -> nn.Module:
    with torch.device(device):
        return build_head(name, layers=3, hidden=16)


def _pattern(name: str, like: torch.Tensor) -> torch.Tensor:
    """Numbers that follow from a name alone, in sizes with which every part shows in the logits.

    Weights are as large as their fan-in allows, the gains of normalisations are near 1, biases
    small.
    """
    if not like.is_floating_point():
        return torch.zeros_like(like)
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100_003
    index = np.arange(start, start + like.numel(), dtype=np.int64)
    plain = (index * 7_919 % 1_009) / 504 - 1
    if like.ndim > 1:
        plain *= 3 if name == "hidden_states" else 2 / math.sqrt(like[0].numel())
    elif name.endswith(("running_var", "weight")):
        plain = 1 + plain / 2
    else:
        plain /= 10
    return torch.from_numpy(plain.astype(np.float32)).reshape(like.shape)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
