"""What is kept of measurements is found again where it was made from the same, else refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from bertvision.errors import ProvenanceError, WorkspaceError
from bertvision.pipelines.measurements import Measurements, check_made_from
from bertvision.pipelines.options import Options


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


def test_all_are_read_in_the_order_of_snapshots_without_the_damaged(tmp_path: Path) -> None:
    for tag in ("10e", "untrained", "2e"):
        kept(tag, 1).write(tmp_path)
    assert [found.tag for found in Kept.read_all(tmp_path)] == ["untrained", "2e", "10e"]
    kept("2e").place(tmp_path).write_text("{")
    damaged: list[str] = []
    assert [found.tag for found in Kept.read_all(tmp_path, damaged)] == ["untrained", "10e"]
    assert len(damaged) == 1
    assert damaged[0].endswith("run `bertvision measure` again")
    with pytest.raises(WorkspaceError, match="is damaged"):
        Kept.read_all(tmp_path)


def test_a_tag_that_is_none_is_damage(tmp_path: Path) -> None:
    place = kept().place(tmp_path)
    kept().write(tmp_path)
    place.write_text(place.read_text().replace('"1e"', '"../1e"').replace("record_sha256", "x"))
    with pytest.raises(WorkspaceError, match=r"is damaged \(tag: "):
        Kept.read(place)
