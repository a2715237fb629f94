"""A store that one release of zarr described is whole for another, which describes it otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bertvision import ActivationStore
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.split import ActivationSplit

NULL = {"consolidated_metadata": None}


@pytest.fixture
def split(tmp_path: Path) -> ActivationSplit:
    store = ActivationStore.create(tmp_path / "store")
    with store.writer("0e", "clips", hidden_size=4, layers=[0, 1]) as writer:
        writer.add("one", torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)))
        return writer.finish()


def rewrite(store: Path, change: Any) -> list[Path]:
    """Change what groups below the root say, and name their files."""
    files = [*(store / "arrays.zarr").glob("*/**/zarr.json")]
    groups = [path for path in files if json.loads(path.read_text())["node_type"] == "group"]
    for path in groups:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return groups


@pytest.mark.parametrize("says", [True, False], ids=["zarr 3.1.0", "zarr 3.1.6"])
def test_groups_may_say_or_not_that_they_consolidate_nothing(
    split: ActivationSplit, tmp_path: Path, says: bool
) -> None:
    def change(group: dict[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in group.items() if key not in NULL}
        return rest | NULL if says else rest

    assert len(rewrite(tmp_path / "store", change)) == 2
    assert find_damage(split) == []


def test_what_else_a_group_says_is_compared(split: ActivationSplit, tmp_path: Path) -> None:
    rewrite(tmp_path / "store", lambda group: group | {"attributes": NULL | {"other": 1}})
    assert len(find_damage(split)) == 2
