"""The report in a real browser: nothing overflows, nothing is fetched, all is drawn."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from browser import CHROMIUM, as_printed, measure, pdf, screenshot
from byhand import change
from PIL import Image

import bertvision
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.workspace import Workspace as OpenWorkspace

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
PHONE, PORTRAIT, LANDSCAPE, SCREEN = 360, 688, 1017, 1000
"""Widths in px; of A4 between the page's margins."""


@pytest.fixture(scope="module")
def full(lab: OpenWorkspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a workspace with everything."""
    lab = Workspace.find(shutil.copytree(lab.root, tmp_path_factory.mktemp("browser") / "lab"))
    bertvision.cka("0.5e", "1e", workspace=lab)
    bertvision.isotropy(["0.5e", "1e"], workspace=lab)
    (lab.root / "bert" / "2e").mkdir()
    (lab.root / "bert" / "2e" / "metrics.json").write_text("{")  # to be named on the page
    return write_report(lab).page


@pytest.fixture(scope="module")
def bare(workspace: OpenWorkspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a workspace in which BERT alone was scored, at one snapshot."""
    root = tmp_path_factory.mktemp("bare") / "bare"
    ignored = shutil.ignore_patterns("heads", "activations", "report", "extraction", "0.5e")
    shutil.copytree(workspace.root, root, ignore=ignored)
    return write_report(Workspace.find(root)).page


@pytest.fixture(scope="module")
def crowded(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of many systems: the folders of two heads, copied under other names."""
    lab = full.parents[1]
    root = tmp_path_factory.mktemp("crowded") / "crowded"
    shutil.copytree(lab, root, ignore=shutil.ignore_patterns("activations", "report"))
    for tag in ("0.5e", "1e"):
        for folder in sorted((root / "heads" / tag).glob("[!.]*")):
            head = folder.name.partition("@")[0]
            for i in range(14):
                name = f"{head}-with-a-rather-long-name-{i}"
                twin = folder.with_name(folder.name.replace(head, name))
                shutil.copytree(folder, twin)
                change(twin / "config.json", head=name)
    return write_report(Workspace.find(root)).page


@pytest.fixture(scope="module", params=["full", "bare", "crowded"])
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """Findings of the browser in each page, on screens and printed, by the width."""
    path: Path = request.getfixturevalue(request.param)
    page = path.read_text(encoding="utf-8")
    printed = as_printed(page)
    pages = {PHONE: page, SCREEN: page, PORTRAIT: printed, LANDSCAPE: printed}
    folder = tmp_path_factory.mktemp("measured")
    found = measure(folder, *((page, width) for width, page in pages.items()))
    return dict(zip(pages, found, strict=True))


@pytest.mark.parametrize("width", [PHONE, SCREEN])
def test_nothing_leaves_the_page_or_covers_anything(
    measured: dict[int, dict[str, Any]], width: int
) -> None:
    found = measured[width]
    assert found["width"] == found["page"] == width
    assert found["wide"] == found["out"] == found["overlaps"] == []
    assert found["anchors"] > 5
    assert found["dead"] == []
    assert found["figures"] > 0


def test_nothing_is_fetched_and_nothing_runs(measured: dict[int, dict[str, Any]]) -> None:
    found = measured[SCREEN]
    assert found["requests"] == []
    assert found["images"] == 0
    assert found["scripts"] == 1  # the one that measures


def test_print_cuts_nothing(measured: dict[int, dict[str, Any]]) -> None:
    upright = measured[PORTRAIT]
    assert upright["wide"] == upright["out"] == upright["overlaps"] == []
    assert [name for name in upright["scrolled"] if not name.endswith("huge")] == []
    assert measured[LANDSCAPE]["scrolled"] == []


def test_the_measurement_sees_what_it_should(full: Path, tmp_path: Path) -> None:
    text = full.read_text(encoding="utf-8")
    broken = text.replace('<nav aria-label="Contents">', '<div style="width:500px">x</div><nav>')
    broken = broken.replace('href="#workspace"', 'href="#nowhere"')
    broken = broken.replace(
        "</svg>", '<text x="900" y="9">a</text><text x="900" y="9">b</text></svg>'
    )
    broken = broken.replace(
        "</main>", '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw="></main>'
    )
    (found,) = measure(tmp_path, (broken, PHONE))
    assert found["wide"][0].startswith("DIV")
    assert found["page"] > PHONE
    assert found["dead"] == ["#nowhere"]
    assert found["images"] == 1
    assert found["out"]
    assert found["overlaps"]


@pytest.mark.parametrize(("width", "dark"), [(PHONE, True), (SCREEN, False)])
def test_it_is_drawn_in_its_theme(full: Path, tmp_path: Path, width: int, dark: bool) -> None:
    with Image.open(screenshot(full, tmp_path / "page.png", width, dark=dark)) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[1] == width
    paper = pixels[0, 0].mean()
    assert (paper < 60) if dark else (paper > 240)
    apart = np.abs(pixels.mean(axis=2) - paper) > 100
    assert 0.01 < apart.mean() < 0.4  # text, on paper
    # saturated: the first two series of the figures
    spread = pixels.max(axis=2).astype(int) - pixels.min(axis=2)
    assert (spread > 100).sum() > 500


def test_figures_of_their_own_cover_nothing_and_have_a_theme(
    workspace: OpenWorkspace, tmp_path: Path
) -> None:
    bertvision.cka("0.5e", "1e", plot=tmp_path / "cka.svg", workspace=workspace)
    bertvision.isotropy(["1e"], plot=tmp_path / "isotropy.svg", workspace=workspace)
    figures = sorted(tmp_path.glob("*.svg"))
    assert len(figures) == 2
    pages = (
        f'<html><head><meta http-equiv="x"></head><body>{path.read_text("utf-8")}</body></html>'
        for path in figures
    )
    for found in measure(tmp_path, *((page, SCREEN) for page in pages)):
        assert found["out"] == found["overlaps"] == found["requests"] == []
    for path, dark in product(figures, (False, True)):
        with Image.open(screenshot(path, tmp_path / "figure.png", SCREEN, dark=dark)) as image:
            corner = np.asarray(image.convert("RGB"))[0, 0].mean()
        assert (corner < 60) if dark else (corner > 240)


def test_it_prints(full: Path, tmp_path: Path) -> None:
    content = pdf(full, tmp_path / "page.pdf")
    assert content.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    assert 5 <= pages <= 40
