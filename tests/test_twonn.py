"""Intrinsic dimension: known answers, and an analysis that is added in one file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from terminal import done

import bertvision
from bertvision.errors import InputError, NonFiniteError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines import analysis
from bertvision.pipelines.analysis.reduce import sampled_rows
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.analysis.twonn import intrinsic_dimension
from bertvision.pipelines.report.analyses import analysis_section
from bertvision.pipelines.report.section import Reading
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.workspace.workspace import Workspace

ROOT = Path(__file__).parents[1]
LENGTHS = '''"""Mean length of hidden states."""

from __future__ import annotations

import numpy as np

from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import LabelledResult, Variable
from bertvision.pipelines.declare import FigurePath, StorePath, WorkspacePath, job
from bertvision.pipelines.reading import Tags, parse_tags


class LengthsResult(LabelledResult):
    kind = "lengths"
    heading = "Lengths"
    caption = "Mean length of the hidden states of each layer"
    reading = "Length: Euclidean norm."
    seen = "Lines: the mean length in each layer."
    variables = {"length": Variable("snapshot layer", "mean length", digits=3)}


@job
def lengths(
    checkpoint: Tags,
    *,
    split: str = "dev",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> LengthsResult:
    """Measure how long hidden states are.

    Args:
        checkpoint: Snapshots to analyse, such as 0e,1e.
        split: Split to analyse.
    """
    request = Request(lengths, locals())
    request.splits(parse_tags(checkpoint), split)
    layers = request.same_layers()

    def measure() -> LengthsResult:
        import xarray as xr

        values = [np.linalg.norm(x, axis=2).mean(axis=0) for x in request.samples(10**6, 0)]
        variables = {"length": (("snapshot", "layer"), values)}
        coords = {"snapshot": request.tags, "layer": list(layers)}
        return LengthsResult(xr.Dataset(variables, coords, {"title": f"Lengths, {split}"}))

    return request.answer(LengthsResult, measure)
'''


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_a_flat_or_curved_manifold_has_its_own_dimension(dimension: int) -> None:
    random = np.random.default_rng(dimension)
    points = random.uniform(-1, 1, (1_500, dimension))
    turned = points @ np.linalg.qr(random.normal(size=(20, dimension)))[0].T
    curved = np.concatenate([points, np.sin(points), points**2], axis=1)
    for vectors in (turned + 100, curved * 1e-3):
        assert intrinsic_dimension(vectors) == pytest.approx(dimension, rel=0.12)


def test_noise_has_more_dimensions_than_its_manifold_and_scale_is_no_matter() -> None:
    random = np.random.default_rng(0)
    line = np.concatenate([random.uniform(0, 1, (1_000, 1)), np.zeros((1_000, 9))], axis=1)
    noise = random.normal(size=line.shape)
    assert intrinsic_dimension(line + 1e-7 * noise) < 1.2
    assert intrinsic_dimension(line + noise) > 6
    assert intrinsic_dimension(7 * noise) == pytest.approx(intrinsic_dimension(noise))


def test_too_few_distinct_vectors_have_no_dimension() -> None:
    assert np.isnan(intrinsic_dimension(np.eye(19)))
    assert np.isnan(intrinsic_dimension(np.zeros((1, 4))))
    far = 1e6 + np.random.default_rng(0).uniform(0, 1e-3, (200, 2))  # lost in squared lengths
    assert 1.5 < intrinsic_dimension(far) < 2.5


def test_a_deviation_is_over_samples_and_none_is_said_of_one(workspace: Workspace) -> None:
    result = bertvision.twonn("0.5e,1e", max_tokens=120, repeats=2, workspace=workspace)
    held = result.to_xarray()
    assert dict(held.sizes) == {"snapshot": 2, "layer": 3}
    assert (held.distinct <= 120).all()
    states = np.concatenate([x.numpy().transpose(0, 2, 1) for x in workspace.split("1e", "dev")])
    dims = [
        intrinsic_dimension(
            np.unique(states[sampled_rows(len(states), 120, [0, k]), 2].astype(np.float32), axis=0)
        )
        for k in range(2)
    ]
    measured = held.sel(snapshot="1e", layer=2)
    assert measured.dimension.item() == pytest.approx(np.mean(dims))
    assert measured.dimension_sd.item() == pytest.approx(np.std(dims, ddof=1))
    assert measured.tokens.item() == 120
    assert result.remarks() == []
    for one in ({"repeats": 1, "max_tokens": 120}, {"repeats": 3, "max_tokens": 100_000}):
        alone = bertvision.twonn("1e", **one, workspace=workspace)
        assert alone.to_xarray().dimension_sd.isnull().all()
        assert "±" not in alone.table().split("Intrinsic dimension: ")[0]
        assert "Without ±" in alone.table()
    assert (alone.to_xarray().tokens == len(states)).all()
    with pytest.raises(InputError, match="--max-tokens 5: give 20 or more"):
        bertvision.twonn("1e", max_tokens=5, workspace=workspace)


def test_hidden_states_that_are_no_numbers_are_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ActivationSplit.dask
    monkeypatch.setattr(ActivationSplit, "dask", lambda split: real(split) * np.nan)
    with pytest.raises(NonFiniteError, match="the activations hold NaN or infinity in 3 of 3"):
        bertvision.twonn("1e", seed=77, workspace=workspace)


def test_an_analysis_is_added_by_one_file(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lengths.py").write_text(LENGTHS)
    monkeypatch.setattr(analysis, "__path__", [*analysis.__path__, str(tmp_path)])
    assert "lengths" in analysis.names()
    assert re.search(r"lengths +Measure how long hidden states are\.", done("--help"))
    assert "Split to analyse.  [default: dev]" in done("lengths", "--help")

    csv = tmp_path / "lengths.csv"
    out = done("lengths", "1e", "-w", workspace.root, "--json", "--csv", csv)
    states = np.concatenate([x.numpy().transpose(0, 2, 1) for x in workspace.split("1e", "dev")])
    expected = np.linalg.norm(states, axis=2).mean(axis=0)
    values = json.loads(out)["variables"]["length"]
    np.testing.assert_allclose(values, [expected], rtol=1e-6)
    assert csv.read_text().splitlines()[0] == "snapshot,layer,length"

    kept: AnalysisResult = bertvision.lengths("1e", workspace=workspace)  # type: ignore[attr-defined]
    assert kept.to_json()["variables"]["length"] == values
    assert f"{expected[0]:.3f}" in kept.table()
    reading = Reading(workspace, read_rows(workspace), [])
    section = analysis_section(type(kept), reading)
    assert section is not None
    assert section.title == "Lengths"
    assert [figure.name for figure in section.figures] == [kept.title()]
    for path in (workspace.root / "analysis").glob("lengths-*"):
        path.unlink()


def test_the_page_on_adding_an_analysis_shows_the_file() -> None:
    page = (ROOT / "docs" / "adding-an-analysis.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    source = iter((ROOT / "pipelines" / "analysis" / "twonn.py").read_text().splitlines())
    lines = [line for line in shown.splitlines() if line.strip() not in ("", "...")]
    assert [line for line in lines if line not in source] == []  # in the same order
    assert len(lines) >= 40
