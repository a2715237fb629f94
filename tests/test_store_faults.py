"""The store under faults: nothing committed is lost, nothing half-written looks whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import Made

from bertvision.errors import (
    CorruptStoreError,
    DiskSpaceError,
    FormatVersionError,
    LockedError,
)
from bertvision.featurestore import writer as writer_module
from bertvision.featurestore.split import ActivationSplit

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
LENGTHS = [5, 31, 64, 1, 17, 40, 22, 9, 33, 60, 2, 28]


@pytest.fixture
def made() -> Made:
    return Made(LENGTHS)


HOLDER = """
import sys
from pathlib import Path
from bertvision.featurestore.writer import open_writer
from stores import Made

made = Made([5, 31, 64, 1, 17, 40, 22, 9, 33, 60, 2, 28])
with open_writer(Path(sys.argv[1]), made.spec, made.contents, made.stats) as writer:
    made.write_shard(writer, 0)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_second_writer_is_refused_and_a_killed_one_leaves_no_lock(
    tmp_path: Path, made: Made
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=ENV, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(LockedError, match="another process is writing 1e/train"):
            made.write(tmp_path)
        process.kill()
    assert made.write(tmp_path).verify() == []


KILLED = """
import os, signal, sys
from pathlib import Path
from bertvision.featurestore import arrays, durable, examples, ledger, writer
from stores import Made

point, count = sys.argv[2], int(sys.argv[3])
holders = {
    "write_durably": (ledger, examples), "seal": (writer,), "write_array": (arrays,),
    "create_sharded": (arrays,), "consolidate": (arrays,), "fsync": (durable, ledger),
}
calls = 0
for module in holders[point]:
    def dying(*args, _real=getattr(module, point), **kwargs):
        global calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return _real(*args, **kwargs)
    setattr(module, point, dying)
Made([5, 31, 64, 1, 17, 40, 22, 9, 33, 60, 2, 28], encoding="int8").write(Path(sys.argv[1]))
"""
POINTS = [
    *(("write_durably", n) for n in (1, 2, 3, 5)),
    *(("seal", n) for n in (1, 9, 24, 26, 31)),
    *(("write_array", n) for n in (1, 4, 7)),
    ("create_sharded", 1),
    ("create_sharded", 2),
    ("consolidate", 1),
    ("fsync", 12),
    ("fsync", 60),
]


@pytest.mark.parametrize(("point", "count"), POINTS)
def test_killed_anywhere_the_same_command_ends_the_same(
    tmp_path: Path, point: str, count: int
) -> None:
    made = Made(LENGTHS, encoding="int8")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), point, str(count)],
        env=ENV,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    committed: set[int] = set()
    if (tmp_path / "ledger/1e/train/split.json").exists():
        left = ActivationSplit(tmp_path, "1e", "train")
        assert left.verify() == []
        committed = left.ledger.shards()
    split = made.write(tmp_path)
    assert split.verify() == []
    assert split.is_complete
    assert committed <= split.ledger.shards()
    assert not list(tmp_path.rglob("*.tmp"))
    whole = made.write(tmp_path / "whole")
    for i in range(len(split)):
        assert torch.equal(split[i], whole[i])


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "flipped":
        data = data[:100] + bytes([data[100] ^ 4]) + data[101:]
    path.write_bytes({"flipped": data, "empty": b"", "truncated": data[:-9]}.get(how, data))
    if how == "missing":
        path.unlink()


@pytest.mark.parametrize("array", ["hidden_states", "scale"])
@pytest.mark.parametrize("how", ["flipped", "empty", "truncated", "missing"])
def test_damaged_shards_are_never_read_and_verify_names_them(
    tmp_path: Path, how: str, array: str
) -> None:
    made = Made(LENGTHS, encoding="int8")
    split = made.write(tmp_path)
    damage(split.shard_path(array, 2), how)
    split = ActivationSplit(tmp_path, "1e", "train")
    for i in made.plan.examples_of(2):
        with pytest.raises(CorruptStoreError, match="shard 2"):
            split.read([i])
    assert split[0].isfinite().all()
    assert [p.split(":")[0] for p in split.verify()] == ["1e/train shard 2"]


def test_swapped_shards_are_found_by_verify(tmp_path: Path, made: Made) -> None:
    split = made.write(tmp_path)
    one, two = (split.shard_path("hidden_states", s) for s in (0, 1))
    data = one.read_bytes()
    shutil.copy(two, one)
    two.write_bytes(data)
    assert {p.split(":")[0] for p in split.verify()} == {"1e/train shard 0", "1e/train shard 1"}


def test_an_edited_shape_is_refused_before_anything_is_read(tmp_path: Path, made: Made) -> None:
    split = made.write(tmp_path)
    path = split.group_path / "hidden_states/zarr.json"
    metadata = json.loads(path.read_text())
    metadata["shape"][0] = 10**15
    path.write_text(json.dumps(metadata))
    with pytest.raises(CorruptStoreError, match="the ledger says float32"):
        ActivationSplit(tmp_path, "1e", "train").read([0])


def test_a_newer_format_and_a_damaged_record_are_refused(tmp_path: Path, made: Made) -> None:
    made.write(tmp_path)
    path = tmp_path / "ledger/1e/train/split.json"
    text = path.read_text()
    path.write_text(text.replace('"format": "1.0"', '"format": "2.0"').replace('"1.0"', '"2.0"'))
    with pytest.raises(FormatVersionError, match="format 2.*install a newer"):
        ActivationSplit(tmp_path, "1e", "train")
    path.write_text(text[:-40])
    with pytest.raises(CorruptStoreError, match=r"split\.json is damaged"):
        ActivationSplit(tmp_path, "1e", "train")


def test_a_full_disk_is_one_clear_error_and_loses_nothing(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, root: Path) -> None:
        raise OSError(28, "No space left on device")

    made.write(tmp_path, shards=2)
    monkeypatch.setattr(writer_module, "seal", full)
    with pytest.raises(DiskSpaceError, match="full.*goes on from there"):
        made.write(tmp_path)
    monkeypatch.undo()
    assert made.write(tmp_path).verify() == []


@pytest.mark.slow
def test_a_writer_killed_again_and_again_at_random_still_ends_the_same(tmp_path: Path) -> None:
    made = Made(LENGTHS, encoding="int8")
    rng = np.random.default_rng(0)
    points = ["write_durably", "seal", "write_array", "consolidate", "fsync"]
    kills = 0
    for _ in range(40):
        point, count = str(rng.choice(points)), str(rng.integers(1, 8))
        command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), point, count]
        kills += subprocess.run(command, env=ENV, check=False).returncode == -signal.SIGKILL
        if (tmp_path / "store/ledger/1e/train/split.json").exists():
            assert ActivationSplit(tmp_path / "store", "1e", "train").verify() == []
    split = made.write(tmp_path / "store")
    assert kills > 5
    assert split.verify() == []
    whole = made.write(tmp_path / "whole")
    for shard in range(made.plan.n_shards):
        assert split.ledger.read_shard(shard) == whole.ledger.read_shard(shard)
