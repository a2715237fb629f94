"""Section about layers as such: how alike those of two snapshots are (CKA), and how isotropic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bertvision.pipelines.analysis.alike.rsa import RsaResult
from bertvision.pipelines.analysis.records import (
    FOLDER,
    CkaAnalysis,
    CkaValues,
    IsotropyAnalysis,
    RsaAnalysis,
    read_analyses,
)
from bertvision.pipelines.analysis.result import AnalysisResult
from bertvision.pipelines.drawing.figures import NARROW
from bertvision.pipelines.drawing.layers import layer_maps
from bertvision.pipelines.drawing.svg import Canvas
from bertvision.pipelines.report.section import Figure, Section, make_figure
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.workspace.workspace import Workspace

FILES = f"{FOLDER}/*.json"
"""Where they are, in a workspace."""
_MAPS = 6
"""Heat maps that are drawn; the table has all pairs."""


def layers_section(workspace: Workspace, left_out: list[str]) -> Section | None:
    """Every CKA, RSA and isotropy that was measured in the workspace; None where none was.

    Args:
        workspace: that they are of.
        left_out: gets a message for each file that is damaged and left out.
    """
    alike = read_analyses(workspace, CkaAnalysis, left_out)
    lie = read_analyses(workspace, RsaAnalysis, left_out)
    spread = read_analyses(workspace, IsotropyAnalysis, left_out)
    if not (alike or lie or spread):
        return None
    lead = (
        "Linear CKA says how alike the hidden states of two layers are, whatever turns or scales "
        "them: 1 are the same. Few channels of large variance may decide it; the files have it "
        "without these too. RSA says how alike the cosines between tokens are. Isotropy: a mean "
        "cosine near 0 is that of tokens in all directions; of the variance the first principal "
        "components explain little there."
    )
    figures = [_map(file, a) for file, a in list(alike.items())[:_MAPS]]
    figures += [_drawn(file, a, RsaResult) for file, a in list(lie.items())[:_MAPS]]
    tables = [
        *([_cka(alike)] if alike else []),
        *([_rsa(lie)] if lie else []),
        *([_isotropy(spread)] if spread else []),
    ]
    return Section("layers", "Layers beside layers", lead, figures=figures, tables=tables)


def _title(of: CkaValues) -> str:
    kind = "" if of.unbiased else ", biased"
    return f"{of.x} × {of.y}{kind}, {of.n_tokens:,} of {of.n_available:,} tokens"


def _map(file: str, analysis: CkaAnalysis) -> Figure:
    of = analysis.result
    values = np.array(of.cka, np.float64)  # null is NaN

    def draw(_: float) -> Canvas:
        sides = (of.x, of.layers_x), (of.y, of.layers_y)
        drawing = layer_maps("CKA", {"all channels": values}, *sides)
        canvas = Canvas(max(drawing.width + 8, NARROW), drawing.height)  # room for its scale
        canvas.put(drawing, 0, 0)
        return canvas

    return make_figure(
        Path(file).stem.replace(".", "-"),
        f"CKA of layers, {of.x} × {of.y}",
        f"Linear CKA of layers, {_title(of)}; the deeper the colour, the more alike.",
        file,
        analysis.command,
        draw,
    )


def _drawn(file: str, analysis: RsaAnalysis, kind: type[AnalysisResult]) -> Figure:
    """The figure of a result, as its command draws it."""
    result = kind.from_json(analysis.result.to_json())
    ident, caption = Path(file).stem.replace(".", "-"), f"{result.title()}. {result.seen}"
    drawing = result.drawing()
    return make_figure(ident, result.title(), caption, file, analysis.command, lambda _: drawing)


def _rsa(found: dict[str, RsaAnalysis]) -> Table:
    lines: list[dict[str, Any]] = []
    for file, analysis in found.items():
        result = RsaResult.from_json(analysis.result.to_json())
        of = f"{result.x} × {result.y}, {result.repeats} samples"
        lines += [
            row
            | {"of": of, "layer": str(row["layer_x"]), "file": file, "command": analysis.command}
            for row in result.same_layers()
        ]
    return Table(
        "rsa",
        "RSA: how alike the cosines between tokens are in the same layer of two snapshots",
        [
            Column("split", "split", "text"),
            Column("layer", "layer", "text"),
            Column("rsa", "RSA", digits=3),
            Column("rsa_sd", "± over samples", digits=3),
            Column("by_token", "by token", digits=3),
            Column("by_token_sd", "± over samples", digits=3),
        ],
        lines,
        f"{FOLDER}/rsa-<first>-<second>-<splits>.json",
        "bertvision rsa FIRST SECOND",
        group="of",
        more=["x", "y"],
        trace=True,
    )


def _cka(found: dict[str, CkaAnalysis]) -> Table:
    lines: list[dict[str, Any]] = []
    layers: set[int] = set()
    for file, analysis in found.items():
        of = analysis.result
        layers |= set(of.layers_y)
        for i, layer in enumerate(of.layers_x):
            line: dict[str, Any] = {"pair": _title(of), "layer": str(layer), "file": file}
            line |= {"command": analysis.command, "x": of.x, "y": of.y, "seed": of.seed}
            for j, other in enumerate(of.layers_y):
                line[f"layer_{other}"] = of.cka[i][j]
                line[f"layer_{other}_dropped"] = of.cka_dropped[i][j]
            lines.append(line)
    return Table(
        "cka",
        "Linear CKA: layers of the first snapshot (rows) and of the second (columns)",
        [
            Column("layer", "layer", "text"),
            *(Column(f"layer_{i}", str(i), digits=2) for i in sorted(layers)),
        ],
        lines,
        f"{FOLDER}/cka-<first>-<second>-<split>.json",
        "bertvision cka FIRST SECOND",
        group="pair",
        more=["x", "y", "seed", *(f"layer_{i}_dropped" for i in sorted(layers))],
        trace=True,
    )


def _isotropy(found: dict[str, IsotropyAnalysis]) -> Table:
    lines: list[dict[str, Any]] = []
    components: dict[int, None] = {}
    for file, analysis in found.items():
        of = analysis.result
        components |= dict.fromkeys(of.components)
        for i, layer in enumerate(of.layers):
            variance = zip(of.components, of.explained_variance[i], strict=True)
            lines.append(
                {
                    "of": f"{of.name}, {of.n_tokens:,} of {of.n_available:,} tokens",
                    "layer": str(layer),
                    "mean_cosine": of.mean_cosine[i],
                    "top_cosine": of.top_cosine[i],
                    "mean_norm": of.mean_norm[i],
                    **{f"ev_{k}": share for k, share in variance},
                    "outliers": len(of.outlier_channels[i]),
                    "seed": of.seed,
                    **{"file": file, "command": analysis.command},
                }
            )
    return Table(
        "isotropy",
        "Isotropy by layer: mean cosine of two tokens, the part of one channel in it, variance "
        "that the first principal components explain",
        [
            Column("layer", "layer", "text"),
            Column("mean_cosine", "mean cosine", digits=3),
            Column("top_cosine", "largest part", digits=3),
            *(Column(f"ev_{k}", f"variance in {k}", digits=3) for k in components),
            Column("mean_norm", "mean norm", digits=2),
            Column("outliers", "outlier channels", "count"),
        ],
        lines,
        f"{FOLDER}/isotropy-<snapshot>-<split>.json",
        "bertvision isotropy TAG",
        group="of",
        more=["seed"],
        trace=True,
    )
