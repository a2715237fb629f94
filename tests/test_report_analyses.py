"""Rankings, CKA, isotropy and what waits are in the report, where the workspace holds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from byhand import change, fields, rewrite
from reports import read_table
from test_rank import write_people

import bertvision
from bertvision import rank
from bertvision.pipelines.report.build import read_tables, write_report
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.workspace import Workspace as OpenWorkspace

pytestmark = pytest.mark.usefixtures("charts_left_out")


@pytest.fixture
def space(workspace: OpenWorkspace, tmp_path: Path) -> OpenWorkspace:
    """A workspace with activations, without heads and analyses."""
    ignored = shutil.ignore_patterns("heads", "report", "analysis", "probes")
    return Workspace.find(shutil.copytree(workspace.root, tmp_path / "space", ignore=ignored))


def test_cka_and_isotropy_are_kept_and_shown(space: OpenWorkspace, tmp_path: Path) -> None:
    assert {"cka", "isotropy"}.isdisjoint(read_tables(space))
    alike = bertvision.cka(
        "0.5e", "1e", max_tokens=100, plot=tmp_path / "elsewhere.svg", workspace=space
    )
    spread = bertvision.isotropy(["1e"], max_tokens=100, seed=3, workspace=space)
    kept = json.loads((space.root / "analysis" / "cka-0.5e-1e-dev.json").read_text())
    assert kept["result"] == alike.to_json()
    assert kept["command"] == "bertvision cka 0.5e 1e --split dev --max-tokens 100"
    assert set(kept["weights_sha256"]) == {"0.5e", "1e"}
    report = write_report(space)
    assert "cka-0-5e-1e-dev" in report.figures
    rows = read_table(report.page, "cka")
    found = np.array([[float(row[f"cka_{j}"]) for j in range(3)] for row in rows])
    np.testing.assert_array_equal(found, alike.cka)
    rows = read_table(report.page, "isotropy")
    assert [float(row["mean_cosine"]) for row in rows] == spread.mean_cosine.ravel().tolist()
    shares = spread.explained_variance[0, :, :, 1].ravel()
    told = [float(row["explained_variance_3"] or "nan") for row in rows]
    np.testing.assert_array_equal(told, shares)
    assert rows[0]["command"] == "bertvision isotropy 1e --split dev --max-tokens 100 --seed 3"


def test_rsa_is_shown_as_its_command_prints_it(space: OpenWorkspace) -> None:
    lie = bertvision.rsa(
        "0.5e", "1e", split=["dev", "tune"], max_tokens=60, repeats=3, workspace=space
    )
    report = write_report(space)
    rows = read_table(report.page, "rsa")
    assert [float(row["rsa"]) for row in rows] == [row["rsa"] for row in lie.same_layers()]
    assert [row["split"] for row in rows] == ["dev"] * 3 + ["tune"] * 3
    said = "bertvision rsa 0.5e 1e --split dev,tune --max-tokens 60 --repeats 3"
    assert {row["command"] for row in rows} == {said}
    assert "rsa-0-5e-1e-dev+tune" in report.figures


def test_analyses_of_other_weights_and_damaged_ones_are_left_out_and_named(
    space: OpenWorkspace,
) -> None:
    bertvision.isotropy(["0.5e"], max_tokens=100, workspace=space)
    bertvision.isotropy(["1e"], max_tokens=100, workspace=space)
    folder = space.root / "analysis"
    change(folder / "isotropy-1e-dev.json", weights_sha256={"1e": "0" * 64})
    report = write_report(space)
    (of,) = {row["of"] for row in read_table(report.page, "isotropy")}
    assert of.startswith("Isotropy, 0.5e, dev, 100 tokens and")
    assert len(report.left_out) == 1
    assert "isotropy-1e-dev.json is of other weights" in report.left_out[0]
    assert "then `bertvision isotropy 1e --split dev --max-tokens 100`" in report.left_out[0]
    (folder / "isotropy-0.5e-dev.json").write_text("{")
    report = write_report(space)
    assert len(report.left_out) == 2
    assert "isotropy-0.5e-dev.json is damaged" in report.left_out[0]
    assert "isotropy" not in report.tables


@pytest.fixture(scope="module")
def analysed(workspace: OpenWorkspace, tmp_path_factory: pytest.TempPathFactory) -> OpenWorkspace:
    """A workspace with an analysis of two snapshots and one of one, and without scores."""
    ignored = shutil.ignore_patterns("heads", "report", "analysis", "probes", "bert")
    root = shutil.copytree(
        workspace.root, tmp_path_factory.mktemp("analysed") / "w", ignore=ignored
    )
    bertvision.cka("0.5e", "1e", max_tokens=100, workspace=root)
    bertvision.isotropy("1e", max_tokens=100, workspace=root)
    return Workspace.find(root)


@pytest.mark.parametrize(
    ("kind", "change_it", "told"),
    [
        ("cka", {"result": {}}, "result.x: Field required"),
        ("cka", {"cka": [[1.0]]}, "result: cka has 1 values where 3 belong"),
        ("cka", {"layers_y": []}, "result.layers_y: "),
        ("isotropy", {"result": {}}, "result.mean_cosine: Field required"),
        ("isotropy", {"mean_share": [[[0.5]] * 2]}, "result: mean_share has 1 values where 3"),
        ("isotropy", {"mean_norm": [[["1"] * 3] * 2]}, "result.mean_norm.0.0.0: "),
        ("isotropy", {"weights_sha256": {"../1e": "0"}}, "weights_sha256.../1e"),
    ],
)
def test_an_analysis_that_says_something_else_is_damaged(
    analysed: OpenWorkspace,
    tmp_path: Path,
    kind: str,
    change_it: dict[str, object],
    told: str,
) -> None:
    space = Workspace.find(shutil.copytree(analysed.root, tmp_path / "space"))
    (path,) = (space.root / "analysis").glob(f"{kind}-*.json")
    values = fields(path)
    for name, value in change_it.items():
        (values if name in values else values["result"])[name] = value
    rewrite(path, values)
    report = write_report(space)
    (message,) = report.left_out
    assert f"{path} is damaged ({told}" in message
    assert f"run `bertvision {kind}` again" in message
    assert [name for name in ("cka", "isotropy") if name in report.tables] == (
        ["isotropy"] if kind == "cka" else ["cka"]
    )


@pytest.fixture(scope="module")
def ranked(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenWorkspace:
    """A workspace of rankings alone."""
    folder = tmp_path_factory.mktemp("ranked")
    rank(
        "wikiqa",
        data=write_people(folder / "data"),
        scorers="cosine,logistic",
        layers="0,1",
        seeds=2,
        epochs=2,
        model=tiny_bert,
        workspace=folder / "space",
    )
    return Workspace.find(folder / "space")


def test_rankings_are_those_of_the_command(ranked: OpenWorkspace) -> None:
    expected = rank(
        "wikiqa",
        scorers="cosine,logistic",
        layers="0,1",
        seeds=2,
        epochs=2,
        resamples=2000,
        workspace=ranked.root,
    ).rows
    report = write_report(ranked)
    assert "rankings" in report.tables
    assert "below: answer ranking" in report.page.read_text(encoding="utf-8")
    rows = read_tables(ranked)["rankings"].rows
    assert [row["system"] for row in rows[:2]] == ["bm25", "random order"]

    def key(row: object) -> tuple[object, ...]:
        return tuple(row.get(k) for k in ("system", "checkpoint", "pooling", "layers"))  # type: ignore[attr-defined]

    told = {key(row): row for row in rows}
    assert set(told) == {key(row) for row in expected}
    for row in expected:
        mine = told[key(row)]
        for field in ("map", "map_low", "map_high", "mrr", "p1", "difference", "seeds"):
            assert mine.get(field) == row.get(field), field
        assert (mine.get("mark") == "best") == bool(row.get("best"))
    assert told["logistic", "0e", "mean", "1"]["map_sd"] is not None


def test_rankings_of_other_weights_are_left_out_and_named(
    ranked: OpenWorkspace, tmp_path: Path
) -> None:
    copy = Workspace.find(shutil.copytree(ranked.root, tmp_path / "copy"))
    change(copy.snapshot_dir("0e") / "snapshot.json", weights_sha256="0" * 64)
    report = write_report(copy)
    systems = [row["system"] for row in read_table(report.page, "rankings")]
    assert systems == ["bm25", "random order"]  # which no encoder is needed for
    assert len(report.left_out) == 2 * 3  # layers × the cosine and two seeds
    folder = copy.root / "ranking" / "wikiqa" / "0e" / "mean" / "1" / "cosine"
    (told,) = (line for line in report.left_out if str(folder) in line)
    assert told == (
        f"{folder / 'result.json'} is of other weights than {copy.snapshot_dir('0e')} has: delete "
        f"{folder}, and `bertvision rank wikiqa --checkpoint 0e --scorers cosine --pool mean` "
        "ranks anew"
    )


def test_a_damaged_ranking_is_left_out(ranked: OpenWorkspace, tmp_path: Path) -> None:
    copy = Workspace.find(shutil.copytree(ranked.root, tmp_path / "copy"))
    path = copy.root / "ranking" / "wikiqa" / "0e" / "mean" / "1" / "cosine" / "result.json"
    path.write_text("{")
    report = write_report(copy)
    assert len(report.left_out) == 1
    assert str(path) in report.left_out[0]
    assert len(read_table(report.page, "rankings")) == len(read_tables(ranked)["rankings"].rows) - 1


@pytest.mark.parametrize(
    ("name", "told"),
    [("scorer", "settings: scorer: "), ("checkpoint", "settings: checkpoint: Field required")],
)
def test_a_ranking_that_does_not_say_what_it_is_of_is_damaged(
    ranked: OpenWorkspace, tmp_path: Path, name: str, told: str
) -> None:
    copy = Workspace.find(shutil.copytree(ranked.root, tmp_path / "copy"))
    path = copy.root / "ranking" / "wikiqa" / "0e" / "mean" / "1" / "cosine" / "result.json"
    settings = fields(path)["settings"]
    change(path, settings={k: v for k, v in settings.items() if k != name})
    (message,) = write_report(copy).left_out
    assert f"{path} is damaged ({told}" in message
    change(path, settings=settings, metrics={"test": {"map": 1.0}})
    (message,) = write_report(copy).left_out
    assert "(metrics.test." in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"0 0 p",
        b"0 0 p 2\n",
        b"0 0 p yes\n",
        b"\n",
        b"\xff 0 p 1\n",
        b"0 0 p 0\n",
        b"0 0 p 1\n",
    ],
    ids=["empty", "cut", "label", "word", "blank", "bytes", "none", "lost"],
)
def test_labels_that_are_damaged_take_the_random_order_alone(
    ranked: OpenWorkspace, tmp_path: Path, content: bytes
) -> None:
    copy = Workspace.find(shutil.copytree(ranked.root, tmp_path / "copy"))
    path = copy.root / "ranking" / "wikiqa" / "qrels" / "test.qrels"
    path.write_bytes(content)
    report = write_report(copy)
    (message,) = report.left_out
    assert message.startswith(f"{path} is damaged (")
    assert message.endswith("`bertvision rank wikiqa` writes it again")
    systems = {row["system"] for row in read_table(report.page, "rankings")}
    assert systems == {"bm25", "cosine", "logistic"}


def test_what_waits_is_told_with_its_command(space: OpenWorkspace) -> None:
    rows = read_tables(space)["waiting"].rows
    assert {row["next"] for row in rows} >= {
        f"bertvision train adapter-386-shared --checkpoint {tag}" for tag in ("0.5e", "1e")
    }
    assert all(row["why"].startswith("stored, and no head") for row in rows)
