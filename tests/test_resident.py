"""A split on a device: the batches of its store, read once; what does not fit is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import Made, shard_path

from bertvision.errors import CorruptStoreError, InputError
from bertvision.featurestore import resident
from bertvision.featurestore.format.layout import ENCODINGS
from bertvision.featurestore.stream import ActivationLoader

LENGTHS = [5, 17, 1, 9, 30, 12, 3, 22, 8, 14, 6, 27, 11]


@pytest.mark.parametrize("encoding", [*ENCODINGS, "transform:0.1"])
@pytest.mark.parametrize("layers", [None, [2, 0]])
def test_batches_on_a_device_are_those_of_the_store_bit_for_bit(
    tmp_path: Path, encoding: str, layers: list[int] | None
) -> None:
    split = Made(LENGTHS, encoding=encoding).write(tmp_path)
    options: dict[str, Any] = {"batch_size": 4, "layers": layers, "seed": 3, "buffer": 2}
    streamed = ActivationLoader(split, **options)
    gathered = ActivationLoader(split.to("cpu", layers and sorted(layers)), **options)
    for _ in range(2):
        for ours, theirs in zip(gathered, streamed, strict=True):
            assert ours.examples.tolist() == theirs.examples.tolist()
            assert ours.lengths.tolist() == theirs.lengths.tolist()
            assert torch.equal(ours.decode(), theirs.decode())
            assert torch.equal(ours.decode(torch.bfloat16), theirs.decode(torch.bfloat16))
            assert ours.labels.keys() == theirs.labels.keys()


def test_a_split_on_a_device_is_read_once_and_checked(tmp_path: Path) -> None:
    split = Made(LENGTHS, encoding="int8").write(tmp_path)
    there = split.to("cpu")
    expected = [x.clone() for x in split]
    assert "1e/train on cpu: 13 examples" in repr(there)
    assert torch.equal(there[3], expected[3])
    path = shard_path(split, "hidden_states", 0)
    changed = bytearray(path.read_bytes())
    changed[0] ^= 1
    path.write_bytes(changed)
    assert all(torch.equal(x, y) for x, y in zip(there, expected, strict=True))
    with pytest.raises(CorruptStoreError, match="shard 0"):
        split.to("cpu")[3]
    with pytest.raises(CorruptStoreError, match="shard 0"):  # of a process of its own
        pickle.loads(pickle.dumps(there))[3]


def test_what_is_not_there_or_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Made(LENGTHS, encoding="int8", top=2).write(tmp_path)
    for device in ("cuba", "cuda:99"):
        with pytest.raises(InputError, match=f"device '{device}'.*cpu is always there"):
            split.to(device)
    with pytest.raises(InputError, match=r"layer 1 of 1e/train is not on cpu, where 0, 2 are"):
        split.to("cpu", [0, 2]).read([0], layers=1)
    with pytest.raises(InputError, match="leave `to` out"):
        ActivationLoader(split.to("cpu"), logits=True)
    top = split.read([2], logits=True).logits
    again = split.to("cpu").read([2], logits=True).logits
    assert top is not None
    assert again is not None
    assert torch.equal(top.topk_logprobs, again.topk_logprobs)
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:       24000000 kB\nMemAvailable:          1 kB\n")
    monkeypatch.setattr(resident, "_MEMORY", memory)
    with pytest.raises(InputError, match=r"1e/train takes .* GB, and cpu has 0.0 GB free"):
        split.to("cpu")
