"""The figure of structure: a panel for each metric, over the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bertvision.pipelines.analysis.structure.gold import Floats
from bertvision.pipelines.drawing.figures import Box, panels, sample, series
from bertvision.pipelines.drawing.layers import layer_plot
from bertvision.pipelines.drawing.svg import Canvas

Lines = Mapping[str, Mapping[str, Floats]]
_UPTO = ", all layers up to it"


def structure_panels(
    alone: Lines,
    upto: Lines,
    baselines: Mapping[str, Mapping[str, float]],
    layers: Sequence[int],
    names: Mapping[str, str],
    width: float,
) -> Canvas:
    """Panels over the layers, with one legend.

    Args:
        alone: by metric and snapshot (layers,) scores.
        upto: the same of mixes, of the metrics that have them; drawn dashed.
        baselines: by metric and baseline a score, NaN for none; drawn dashed.
        layers: their numbers.
        names: of metrics and baselines.
        width: px.
    """
    tags = list(dict.fromkeys(tag for lines in alone.values() for tag in lines))
    others = [name for name in dict.fromkeys(n for of in baselines.values() for n in of)]
    number = {name: i for i, name in enumerate([*tags, *others])}

    def draw(c: Canvas, metric: str, box: Box) -> None:
        levels = {
            name: np.full(len(layers), level)
            for name, level in baselines.get(metric, {}).items()
            if np.isfinite(level)
        }
        lines = [
            *((name, line, "") for name, line in alone[metric].items()),
            *((name, line, "dashed") for name, line in upto.get(metric, {}).items()),
            *((name, line, "dashed") for name, line in levels.items()),
        ]
        values = np.concatenate([*(line for _, line, _ in lines), [0.0]])
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        p = layer_plot(c, box, layers, (1.1 * low, 1.1 * high or 1.0), "")
        for name, line, cls in lines:
            points = list(zip(layers, map(float, line), strict=True))
            tips = [f"{names.get(name, name)}: layer {at}, {value:.4g}" for at, value in points]
            series(p, number[name], points, tips, cls=cls, r=2.5 if cls else 4)

    entries = [sample(number[tag], tag) for tag in tags]
    if upto:
        entries += [sample(number[tag], f"{tag}{_UPTO}", "dashed") for tag in tags]
    entries += [sample(number[name], names.get(name, name), "dashed") for name in others]
    titles = [(metric, names.get(metric, metric)) for metric in alone]
    return panels(titles, draw, entries, width)
