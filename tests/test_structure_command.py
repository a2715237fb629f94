"""``bertvision structure``: a treebank from its files to the table, the figure and the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from figures import Drawing
from reports import read_table
from terminal import done, run
from treebanks import write_treebank

from bertvision.pipelines.readouts.structure import METRICS, train
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.workspace.workspace import Workspace

FEW = ["--seeds", 2, "--epochs", 2, "--units", 4, "--rank", 4, "--resamples", 20]


@pytest.fixture(scope="module")
def stored(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a treebank of two snapshots."""
    folder = tmp_path_factory.mktemp("treebank")
    trees = write_treebank(folder / "trees", train=12, dev=4, test=6)
    for tag, new in (("0e", ["--model", tiny_bert, "--data", trees]), ("untrained", [])):
        given = ["--checkpoint", tag, "--task", "treebank", "--precision", "32", *new]
        done("extract", *given, "-w", folder / "space", "--json")
    return folder / "space"


@pytest.fixture
def space(stored: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(stored, tmp_path / "space")


def test_snapshots_stand_beside_each_other_and_each_is_kept(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def counted(*given: Any) -> Any:
        trained.append(given[4])
        return train(*given)

    monkeypatch.setattr("bertvision.pipelines.readouts.structure.train", counted)
    first = run("structure", "0e", *FEW, "-w", space)
    assert first.exit_code == 0
    assert trained == [0, 1]  # a training for each seed
    lines = first.stdout.splitlines()
    assert (
        lines[0] == "Structure, 0e, sentences: 12 treebank-train, 4 treebank-dev, 6 treebank-test"
    )
    assert [line.split()[:2] for line in lines[3:6]] == [["0e", "0"], ["0e", "1"], ["0e", "2"]]
    assert "0e, relation: centre of gravity of the mix" in first.stdout.replace("\n", " ")
    csv = tmp_path / "both.csv"
    both = json.loads(done("structure", "0e,untrained", *FEW, "-w", space, "--csv", csv, "--json"))
    assert trained == [0, 1, 0, 1]  # of the second snapshot alone
    assert both["tags"] == ["0e", "untrained"]
    kept = json.loads((space / "analysis" / "structure-0e-treebank-test.json").read_text())
    assert kept["result"]["value"] == both["value"][:1]
    assert kept["command"].startswith("bertvision structure 0e --split treebank-test --rank 4")
    header, *rows = csv.read_text().splitlines()
    assert header.split(",")[:4] == ["system", "layer", "uuas", "uuas_sd"]
    assert [row.split(",")[0] for row in rows[-3:]] == ["chain", "random", "majority"]
    assert len(rows) == 2 * 3 + 3
    for name in ("0e", "untrained", "0e+untrained"):
        drawn = Drawing(space / "analysis" / f"structure-{name}-treebank-test.svg")
        assert drawn.faults() == []
        assert {"UUAS", "NSpr", "part of speech", "chain"} <= set(drawn.texts)


def test_it_is_in_the_report(space: Path) -> None:
    done("structure", "0e", *FEW, "-w", space, "--json")
    page = write_report(Workspace.find(space)).page
    rows = read_table(page, "structure")
    assert [row["system"] for row in rows] == [*["0e"] * 3, "chain", "random trees", "majority"]
    assert set(METRICS) <= rows[0].keys()
    assert "Structure: trees in hidden states" in page.read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--split", "treebank-train"], "such as treebank-test"),
        (["--split", "treebank-test-mean"], "give one of all tokens that no probe is trained on"),
        (["--split", "test"], "no split 'train' of 0e"),
        (["--plot", "trees.png"], "give a file that ends in .svg"),
        (["--rank", 0], "'--rank': Input should be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    stored: Path, given: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertvision.pipelines.readouts.structure.train", None)
    found = run("structure", "0e", *given, "-w", stored)
    assert found.exit_code != 0
    assert message in " ".join(found.stderr.split())


def test_parts_that_were_not_extracted_alike_and_other_data_are_refused(space: Path) -> None:
    more = ["-w", space, "--json", "--precision", "32"]
    done("store", "rm", "0e/treebank-dev", "--yes", "-w", space)
    done("extract", "--checkpoint", "0e", "--split", "treebank-dev", "--encoding", "float32", *more)
    found = run("structure", "0e", *FEW, "-w", space)
    assert "has encoding = 'int8', 0e/treebank-dev 'float32': extract all" in found.stderr


def test_a_treebank_without_a_test_part_names_the_option_for_another(space: Path) -> None:
    done("store", "rm", "0e/treebank-test", "--yes", "-w", space)
    result = run("structure", "0e", *FEW, "-w", space)
    assert result.exit_code == 2
    assert "no split 'treebank-test'" in result.stderr
    assert "with --split, such as --split treebank-dev" in result.stderr
