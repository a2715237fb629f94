"""Costs are sums of recorded numbers; kept measurements are found again or refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from byhand import change, fields
from labs import HEADS, scored_copy

from bertvision.errors import ProvenanceError, WorkspaceError
from bertvision.pipelines.measurements import Measurements, check_made_from
from bertvision.pipelines.options import Options
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.rows import Costs, read_costs
from bertvision.pipelines.results.systems import label
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import count_encoder_parameters
from bertvision.pipelines.workspace.workspace import Workspace

OWN = {HEADS[0]: 3.0, HEADS[1]: 5.0}
STEPS = {"0.5e": 80, "1e": 200}
FINE_TUNING = {"0.5e": 40.0, "1e": 100.0}
"""Half a second each, in the median of the run."""


@pytest.fixture
def lab(workspace: Workspace, tmp_path: Path) -> Workspace:
    """With known seconds and bytes in the places where they are recorded."""
    lab = scored_copy(workspace, tmp_path / "lab")
    for tag, seconds in FINE_TUNING.items():
        # another process was at work while the first half was trained: 90 s by the clock
        change(lab.snapshot_dir(tag) / "snapshot.json", step=STEPS[tag], seconds=90 + seconds)
    change(lab.snapshot_dir("1e") / "snapshot.json", seconds_per_step=0.5)
    for tag in FINE_TUNING:
        path = lab.root / "extraction" / tag / "train.json"
        change(path, examples=9, examples_written=9, seconds=7.0, bytes=1000)
    for head, seconds in OWN.items():
        change(lab.head_dir("0.5e", head) / "metrics.json", own_seconds=seconds)
    ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    ensemble(lab, HEADS, with_bert=False, trained_on="0.5e", tag="0.5e")
    return lab


def _costs(lab: Workspace) -> dict[str, Costs]:
    results = read_results(lab)
    return dict(zip(map(label, results), read_costs(lab, results), strict=True))


def test_seconds_are_the_sum_of_what_a_system_needs(lab: Workspace) -> None:
    costs = _costs(lab)
    both = "+".join(HEADS)
    expected = {
        "bert:0.5e": (40.0, 0, 0),
        "bert:1e": (100.0, 0, 0),
        f"{HEADS[0]}:0.5e": (40.0, 7.0, 3.0),
        f"{HEADS[0]}:0.5e:1e": (100.0, 7.0, 3.0),  # the encoder it is scored on is needed too
        f"max-{both}:0.5e": (40.0, 7.0, 8.0),  # one extraction, two trainings
        f"max-bert+{both}:0.5e:1e": (100.0, 7.0, 8.0),  # BERT is fine-tuned once
    }
    for name, parts in expected.items():
        cost = costs[name]
        assert (
            cost["fine_tuning_seconds"],
            cost["extraction_seconds"],
            cost["training_seconds"],
        ) == parts, name
        assert cost["seconds"] == sum(parts)
        assert cost["speed_up"] == pytest.approx(100 / sum(parts))


def test_parameters_are_in_per_cent_of_the_encoder(lab: Workspace) -> None:
    costs = _costs(lab)
    encoder = count_encoder_parameters(lab.snapshot_dir("1e"))
    heads = [
        json.loads((lab.head_dir("0.5e", head) / "metrics.json").read_text())["total"]
        for head in HEADS
    ]
    assert (costs["bert:1e"]["parameters"], costs["bert:1e"]["percent"]) == (encoder, 100)
    assert costs[f"{HEADS[0]}:0.5e"]["parameters"] == heads[0]
    assert costs[f"{HEADS[0]}:0.5e"]["percent"] == pytest.approx(100 * heads[0] / encoder)
    together = costs[f"max-bert+{'+'.join(HEADS)}:0.5e:1e"]
    assert together["parameters"] == encoder + sum(heads)


def test_bytes_are_those_of_the_training_split(lab: Workspace) -> None:
    costs = _costs(lab)
    assert costs["bert:1e"]["bytes"] == 0
    assert costs[f"{HEADS[0]}:0.5e"]["bytes"] == 1000
    assert costs[f"max-{'+'.join(HEADS)}:0.5e"]["bytes"] == 1000


def test_retention_is_above_never_answering_and_of_bert_at_the_last_snapshot(
    lab: Workspace,
) -> None:
    def retention(bert: float) -> dict[str, float | None]:
        path = lab.bert_dir("1e") / "metrics.json"
        rules = fields(path)["rules"]
        rules["n-best"]["metrics"]["f1"] = bert
        change(path, rules=rules)
        return {name: cost["retention"] for name, cost in _costs(lab).items()}

    found = {label(r): r.rules["n-best"]["metrics"] for r in read_results(lab)}
    never = 100 * found["bert:1e"]["NoAns_total"] / found["bert:1e"]["total"]
    assert never == pytest.approx(100 / 3)
    costs = retention(never + 20)
    assert costs.pop("bert:1e") == pytest.approx(100)
    for name, value in costs.items():
        assert value == pytest.approx(100 * (found[name]["f1"] - never) / 20)
    assert set(retention(never).values()) == {None}  # BERT itself knows nothing


def test_what_was_not_recorded_is_none_and_so_is_every_sum_with_it(lab: Workspace) -> None:
    (lab.root / "extraction" / "0.5e" / "train.json").unlink()
    cost = _costs(lab)[f"{HEADS[0]}:0.5e"]
    assert cost["extraction_seconds"] is cost["bytes"] is cost["seconds"] is None
    assert cost["speed_up"] is None
    assert (cost["fine_tuning_seconds"], cost["training_seconds"]) == (40.0, 3.0)
    assert _costs(lab)["bert:0.5e"]["speed_up"] == 2.5

    # earlier versions timed no step: then it is the wall time, and None where that is unknown
    change(lab.snapshot_dir("1e") / "snapshot.json", seconds=None, seconds_per_step=None)
    costs = _costs(lab)
    assert costs["bert:1e"]["seconds"] is None
    assert costs["bert:0.5e"]["seconds"] == 90 + 40.0
    assert all(cost["speed_up"] is None for cost in costs.values())


def test_an_extraction_that_was_recorded_in_part_is_unknown(lab: Workspace) -> None:
    change(lab.root / "extraction" / "0.5e" / "train.json", examples_written=8)
    cost = _costs(lab)[f"{HEADS[0]}:0.5e"]
    assert cost["extraction_seconds"] is cost["bytes"] is None


@pytest.mark.parametrize("tag", ["0e", "untrained"])
def test_an_encoder_before_fine_tuning_needs_none(lab: Workspace, tag: str) -> None:
    import shutil

    shutil.copytree(lab.snapshot_dir("0.5e"), lab.snapshot_dir(tag))
    shutil.copytree(lab.bert_dir("0.5e"), lab.bert_dir(tag))
    change(lab.snapshot_dir(tag) / "snapshot.json", tag=tag, step=0, seconds=None)
    cost = _costs(lab)[f"bert:{tag}"]
    assert cost["seconds"] == 0
    assert cost["speed_up"] is None


def test_without_berts_score_there_is_no_retention(lab: Workspace) -> None:
    (lab.bert_dir("1e") / "metrics.json").unlink()
    assert all(cost["retention"] is None for cost in _costs(lab).values())


def test_a_damaged_record_is_named(lab: Workspace) -> None:
    path = lab.root / "extraction" / "0.5e" / "train.json"
    path.write_text("{")
    with pytest.raises(WorkspaceError, match="train.json is damaged"):
        _costs(lab)


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
