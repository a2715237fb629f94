"""Kept measurements are found again where they were made from the same, else refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from bertvision.errors import ProvenanceError, WorkspaceError
from bertvision.pipelines.measurements import Measurements, check_made_from
from bertvision.pipelines.options import Options
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    lr: float = 0.1


class Kept(Measurements):
    folder: ClassVar[str] = "kept"
    makes: ClassVar[str] = "bertvision measure"

    settings: Settings
    scores: list[int] = []


def kept(tag: str = "1e", *scores: int, lr: float = 0.1, data: str = "a") -> Kept:
    return Kept(
        dataset="sick",
        tag=tag,
        pooling="mean",
        settings=Settings(lr=lr),
        made_from={"data_sha256": data},
        scores=list(scores),
    )


def test_what_was_measured_is_found_again_by_snapshot_pooling_and_settings(tmp_path: Path) -> None:
    new = kept()
    assert new.resume(tmp_path) is new
    kept("1e", 3).write(tmp_path)
    assert new.resume(tmp_path).scores == [3]
    for other in (kept("0.5e"), kept(lr=0.2)):
        assert other.resume(tmp_path) is other
    names = {path.name for path in (tmp_path / "kept" / "sick").iterdir()}
    assert names == {f"1e-mean-{new.settings.digest}.json"}


def test_of_something_else_it_is_refused_by_field_with_what_to_do(tmp_path: Path) -> None:
    kept("1e", 3).write(tmp_path)
    with pytest.raises(ProvenanceError) as refusal:
        kept(data="b").resume(tmp_path)
    assert str(refusal.value) == (
        f"{kept().place(tmp_path)} was made with data_sha256 = 'a', now it is 'b': delete that "
        "file to measure again, or use another --workspace"
    )
    check_made_from(tmp_path, {"a": 1}, {"a": 1}, "nothing")


@pytest.fixture
def space(tiny_bert: Path, tmp_path: Path) -> Workspace:
    """A workspace with no more than the snapshot 0e."""
    made = feature_workspace(tmp_path / "space", str(tiny_bert))
    ensure_snapshot(made, "0e")
    return made


def test_all_are_read_in_the_order_of_snapshots_without_the_damaged(space: Workspace) -> None:
    for tag in ("10e", "untrained", "2e"):
        kept(tag, 1).write(space.root)
    assert [found.tag for found in Kept.read_all(space)] == ["untrained", "2e", "10e"]
    kept("2e").place(space.root).write_text("{")
    left_out: list[str] = []
    assert [found.tag for found in Kept.read_all(space, left_out)] == ["untrained", "10e"]
    assert len(left_out) == 1
    assert left_out[0].endswith("run `bertvision measure` again")
    with pytest.raises(WorkspaceError, match="is damaged"):
        Kept.read_all(space)


@pytest.mark.parametrize("field", ["weights_sha256", "train: weights_sha256"])
def test_what_is_of_other_weights_is_left_out_and_named_or_logged(
    space: Workspace, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = read_snapshot_info(space.snapshot_dir("0e")).weights_sha256
    kept("0e").model_copy(update={"made_from": {field: weights}}).write(space.root)
    kept("2e").model_copy(update={"made_from": {field: "gone"}}).write(space.root)
    assert [found.tag for found in Kept.read_all(space)] == ["0e", "2e"]
    kept("0e").model_copy(update={"made_from": {field: "other"}}).write(space.root)
    left_out: list[str] = []
    for _ in range(2):
        assert [found.tag for found in Kept.read_all(space, left_out)] == ["2e"]
    assert left_out == [
        f"{kept('0e').place(space.root)} is of other weights than {space.snapshot_dir('0e')} has: "
        "delete that file, and `bertvision measure sick --checkpoint 0e --pool mean` measures anew"
    ]
    assert caplog.messages == []
    Kept.read_all(space)
    assert caplog.messages == left_out
    (space.snapshot_dir("0e") / "snapshot.json").write_text("{")  # nothing can be compared
    assert [found.tag for found in Kept.read_all(space)] == ["0e", "2e"]


def test_a_tag_that_is_none_is_damage(tmp_path: Path) -> None:
    place = kept().place(tmp_path)
    kept().write(tmp_path)
    place.write_text(place.read_text().replace('"1e"', '"../1e"').replace("record_sha256", "x"))
    with pytest.raises(WorkspaceError, match=r"is damaged \(tag: "):
        Kept.read(place)
