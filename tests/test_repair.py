"""Damage is extracted again, nothing else, and the store ends as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stores import record_path, shard_path
from terminal import run

from bertvision.errors import CorruptStoreError, StoreNotFoundError, UnknownNameError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import Buffers
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.store import ActivationStore
from bertvision.pipelines.extraction.extract import extract, repair
from bertvision.pipelines.workspace.workspace import Workspace


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Workspace:
    """A copy of the shared workspace, with the dev split in several shards."""
    root = tmp_path / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("activations"))
    copy = Workspace.find(root)
    extract(copy, "1e", splits=["dev"], precision="32", shard_tokens=256)
    return copy


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def test_exactly_what_is_damaged_is_extracted_again(space: Workspace) -> None:
    split = space.split("1e", "dev")
    root = Path(str(space.activations))
    whole = files(root)
    kept = shard_path(split, "hidden_states", 0)
    written = kept.stat().st_mtime_ns
    assert split.record.shards >= 4
    flip(shard_path(split, "hidden_states", 1), 77)
    shard_path(split, "scale", 2).write_bytes(b"")
    record_path(split, 3).write_text("{")
    flip(root / "arrays.zarr/1e/dev/start_positions/c/0", 20)
    flip(root / "arrays.zarr/1e/dev/channel_std/c/0/0", 20)
    (root / "arrays.zarr/1e/dev/hidden_states/zarr.json").write_text("{}")
    flip(root / "examples/dev.parquet", 300)
    done = repair(space, "1e", "dev")
    assert done.shards == [1, 2, 3]
    assert len(done.damage) >= 7
    assert files(root) == whole
    assert kept.stat().st_mtime_ns == written


def test_a_repair_that_is_killed_anywhere_is_ended_by_the_same_command(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, tried: Callable[[int, str], None]
) -> None:
    """Never does a split with a shard missing or damaged pass for whole in between."""
    root = Path(str(space.activations))
    whole = files(root)
    shards = range(space.split("1e", "dev").record.shards)
    write, left = LocalStorage.write, -1

    def dying(storage: LocalStorage, key: str, content: Buffers, *only_if: Any) -> str:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return write(storage, key, content, *only_if)

    def damaged_and_repaired() -> None:
        for shard in shards:
            flip(shard_path(space.split("1e", "dev"), "hidden_states", shard), 77)
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "write", dying)
            repair(space, "1e", "dev")

    damaged_and_repaired()
    total = -1 - left
    of_shards = 3 * len(shards)  # two files and a record of each
    stops = range(total - of_shards + 1, total + 1, 2)
    tried(len(stops), "kills")
    for stop in stops:
        left = stop
        with pytest.raises(KeyboardInterrupt):
            damaged_and_repaired()
        held = space.split("1e", "dev")
        assert held.missing_shards() == []
        assert (held.verify() == []) == (files(root) == whole)
        assert repair(space, "1e", "dev").lacking is None
        assert files(root) == whole


def test_a_damaged_record_is_restored_from_its_copy(space: Workspace) -> None:
    root = Path(str(space.activations))
    whole = files(root)
    (root / "ledger/1e/dev/split.json").write_text("not JSON")
    assert repair(space, "1e", "dev").shards == []
    assert files(root) == whole
    (root / "ledger/1e/dev/split.json").write_text("not JSON")
    (root / "arrays.zarr/1e/dev/zarr.json").unlink()
    with pytest.raises(CorruptStoreError, match="its copy in .* too: remove"):
        repair(space, "1e", "dev")


def test_a_whole_split_is_left_alone_and_pending_shards_stay_pending(space: Workspace) -> None:
    root = Path(str(space.activations))
    split = space.split("1e", "dev")
    record_path(split, 2).unlink()
    before = files(root)
    done = repair(space, "1e", "dev")
    assert (done.damage, done.shards) == ([], [])
    assert done.lacking is not None
    assert done.lacking.startswith("1e/dev lacks 1 of 7 shards (first: 2): run ")
    assert files(root) == before
    flip(shard_path(split, "hidden_states", 0), 5)
    assert repair(space, "1e", "dev").shards == [0]
    assert ActivationSplit(root, "1e", "dev").missing_shards() == [2]
    with pytest.raises(StoreNotFoundError, match="no split 1e/train"):
        repair(space, "1e", "train")


def test_a_damaged_plan_is_mended_without_touching_whole_shards(space: Workspace) -> None:
    split = space.split("1e", "dev")
    root = Path(str(space.activations))
    whole = files(root)
    written = {s: shard_path(split, "hidden_states", s).stat().st_mtime_ns for s in (0, 1, 2, 3)}
    flip(root / "arrays.zarr/1e/dev/n_tokens/c/0", 20)
    flip(shard_path(split, "hidden_states", 2), 40)
    damaged = ActivationSplit(root, "1e", "dev").verify()
    assert {d.split(":")[0] for d in damaged if "shard " in d} == {"1e/dev shard 2"}
    assert repair(space, "1e", "dev").shards == [2]
    assert files(root) == whole
    for shard in (0, 1, 3):
        assert shard_path(split, "hidden_states", shard).stat().st_mtime_ns == written[shard]


def test_nothing_is_taken_back_before_it_is_known_that_it_can_be_made_again(
    space: Workspace,
) -> None:
    root = Path(str(space.activations))
    split = space.split("1e", "dev")
    flip(shard_path(split, "hidden_states", 1), 77)
    before = files(root)
    shutil.rmtree(space.snapshot_dir("1e"))
    with pytest.raises(UnknownNameError, match="1e"):
        repair(space, "1e", "dev")
    assert files(root) == before


def test_a_lost_record_is_damage_and_no_reason_to_begin_anew(space: Workspace) -> None:
    root = Path(str(space.activations))
    whole = files(root)
    (root / "ledger/1e/dev/split.json").unlink()
    for call in (
        lambda: ActivationStore.open(root)["1e"]["dev"],
        lambda: extract(space, "1e", splits=["dev"], precision="32", shard_tokens=256),
    ):
        with pytest.raises(CorruptStoreError, match="shards are recorded|shards of it are rec"):
            call()
    assert repair(space, "1e", "dev").shards == []
    assert files(root) == whole


def test_a_split_that_cannot_be_repaired_hinders_no_other(space: Workspace) -> None:
    extract(space, "0.5e", splits=["dev"], precision="32", shard_tokens=256)
    for tag in ("0.5e", "1e"):
        flip(shard_path(space.split(tag, "dev"), "hidden_states", 1), 77)
    shutil.rmtree(space.snapshot_dir("0.5e"))
    judged = run("store", "repair", "-w", space.root)
    assert judged.exit_code == 1
    assert "0.5e/dev was not repaired: " in judged.stdout
    assert "1e/dev: repaired, 1 shard extracted again" in judged.stdout
    assert space.split("1e", "dev").verify() == []
    assert run("store", "repair", "0.5e/dev", "-w", space.root).exit_code == 2


def test_what_a_killed_repair_leaves_hinders_no_reader(space: Workspace) -> None:
    """Nor does one that is under way: it writes each array again, under another name first."""
    split = space.split("1e", "dev")
    for chunk in Path(str(split.storage), "arrays.zarr/1e/dev").glob("*/c/0"):
        chunk.with_name(".0.tmp").write_bytes(b"half")
    assert space.split("1e", "dev").verify() == []
