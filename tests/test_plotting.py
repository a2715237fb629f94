"""Results on matplotlib axes: labelled, with the intervals they have, readable without colours."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from analyses import made
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from bertvision.errors import InputError, UnknownNameError
from bertvision.jobs.finetune import Spread
from bertvision.jobs.readouts import probe_charts
from bertvision.jobs.show import Row, Rows, score_charts
from bertvision.pipelines import analysis
from bertvision.pipelines.analysis.cka import CkaResult
from bertvision.pipelines.analysis.cloze import ClozeResult
from bertvision.pipelines.analysis.lens import LensResult
from bertvision.pipelines.analysis.prune import PruningResult
from bertvision.pipelines.analysis.rsa import RsaResult
from bertvision.pipelines.analysis.structure import StructureResult
from bertvision.pipelines.plotting import Curves, HeatMap, draw, panels, points

pytestmark = pytest.mark.usefixtures("charts_drawn_anew")


@pytest.fixture
def ax() -> Axes:
    return Figure().subplots()


def bars(ax: Axes) -> Iterator[ErrorbarContainer]:
    return (found for found in ax.containers if isinstance(found, ErrorbarContainer))


@pytest.mark.parametrize("kind", analysis.results(), ids=lambda kind: kind.kind)
def test_every_measure_of_every_analysis_is_drawn_with_names_on_its_axes(kind: Any) -> None:
    result = made(kind)
    for name, chart in result.charts().items():
        figure = Figure()
        ax = result.plot(figure.subplots(), measure=name)
        figure.draw_without_rendering()
        rows = not isinstance(chart, HeatMap) and chart.names
        assert ax.get_xlabel()
        assert rows or ax.get_ylabel(), name
        empty = isinstance(chart, Curves) and not any(s.values for s in chart.series.values())
        assert empty or ax.collections or list(bars(ax)), name


def test_without_axes_a_figure_is_made_that_is_saved(tmp_path: Any) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    ax = made(RsaResult).plot()
    ax.figure.savefig(path := tmp_path / "rsa.pdf")
    plt.close(ax.figure)
    assert path.read_bytes().startswith(b"%PDF")


def test_bars_of_rsa_are_the_standard_deviation_over_samples(ax: Axes) -> None:
    result = made(RsaResult)
    result.plot(ax)
    mean, sd = result.of_pairs[0].mean(axis=0), result.of_pairs[0].std(axis=0, ddof=1)
    line, _, (drawn,) = next(bars(ax))
    np.testing.assert_allclose(line.get_ydata(), np.diagonal(mean))
    ends = np.array([segment[:, 1] for segment in drawn.get_segments()])
    np.testing.assert_allclose(ends[:, 1] - ends[:, 0], 2 * np.diagonal(sd))
    assert "standard deviation over samples" in ax.get_legend().get_title().get_text()


def test_structure_has_its_intervals_over_sentences_and_its_baselines(ax: Axes) -> None:
    result = made(StructureResult)
    result.plot(ax, measure="uuas")
    drawn = [found.lines[2][0].get_segments() for found in bars(ax)]
    ends = np.array([[segment[:, 1] for segment in of] for of in drawn])
    np.testing.assert_allclose(ends[..., 0], result.low[:, 0])
    np.testing.assert_allclose(ends[..., 1], result.high[:, 0])
    levels = {line.get_label(): line.get_ydata()[0] for line in ax.get_lines()}
    assert levels["chain"] == result.baseline[0, 0]
    assert "95 % interval" in ax.get_legend().get_title().get_text()


def test_points_in_rows_have_intervals_where_their_series_has_them(ax: Axes) -> None:
    result = made(ClozeResult)
    result.plot(ax)
    with_bars = {of.get_label(): of.has_xerr for of in bars(ax)}
    assert with_bars["P@1"]
    assert not with_bars["guessing"]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"{group} (n = {n:,})" for group, n in zip(result.groups, result.n_items, strict=True)
    ]
    top, bottom = ax.get_ylim()[::-1]
    assert top < bottom, "the first group is at the top"


def test_several_results_on_one_axes_differ_in_colour_and_shape(ax: Axes) -> None:
    result = made(CkaResult)
    for _ in range(2):
        result.plot(ax, measure="cka_same")
    first, second = (found.lines[0] for found in bars(ax))
    assert first.get_color() != second.get_color()
    assert first.get_marker() != second.get_marker()


def test_a_level_line_that_is_there_is_not_named_twice(ax: Axes) -> None:
    result = made(LensResult)
    for _ in range(2):
        result.plot(ax)
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels.count("most frequent word") == 1


def test_differences_have_zero_in_the_middle_of_their_colours(ax: Axes) -> None:
    result = made(PruningResult)
    (cells,) = result.plot(ax, measure="rise").collections
    assert cells.get_clim() == (-np.abs(result.rise).max(), np.abs(result.rise).max())


def test_layers_of_a_map_are_named_by_their_numbers(ax: Axes) -> None:
    layers = tuple(range(0, 50, 2))
    chart = HeatMap("y", layers, "x", layers, "CKA", np.eye(25))
    draw(chart, ax)
    shown = {
        math.floor(t): label.get_text()
        for t, label in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
    }
    assert len(shown) <= 13
    assert all(text == str(layers[at]) for at, text in shown.items())


def test_an_unknown_measure_is_refused_with_those_there_are(ax: Axes) -> None:
    with pytest.raises(UnknownNameError, match="did you mean top1.*log_p, kl"):
        made(LensResult).plot(ax, measure="top_1")


def scored(name: str, score: float, **more: Any) -> Row:
    row = {"name": name, "trained_on": "1e", "checkpoint": "1e", "fraction": 1, "baseline": 50.0}
    return Row({**row, "score": score, "f1": score, "difference": None, **more})


def test_seeds_of_a_head_are_one_point_with_their_deviation(ax: Axes) -> None:
    rows = Rows([scored("a", 60.0), scored("a", 64.0), scored("b", 70.0)], None, score_charts)
    rows[:].plot(ax)
    (found,) = bars(ax)
    np.testing.assert_allclose(found.lines[0].get_xdata(), [62, 70])
    ends = found.lines[2][0].get_segments()
    assert ends[0][:, 0] == pytest.approx([62 - 8**0.5, 62 + 8**0.5])
    assert ax.get_xlabel() == "F1 (%)"


def test_joined_seeds_of_a_sweep_keep_the_deviation_they_come_with(ax: Axes) -> None:
    rows = Rows([scored("a", 62.0, score_sd=3.0)], None, score_charts)
    rows.plot(ax)
    (found,) = bars(ax)
    assert found.lines[2][0].get_segments()[0][:, 0] == pytest.approx([59, 65])


def probed(tag: str, layers: str, accuracy: float) -> Row:
    same = {"dataset": "order", "pooling": "mean", "probe": "linear", "settings": "a"}
    none = dict.fromkeys(("difference", "selectivity", "compression"))
    ends = {"low": accuracy - 2, "high": accuracy + 3, "majority": 50.0}
    return Row({"tag": tag, "layers": layers, "accuracy": accuracy, **same, **none, **ends})


def test_probes_are_lines_over_single_layers_with_intervals(ax: Axes) -> None:
    rows = [probed(tag, n, 60.0 + i) for tag in ("0e", "1e") for i, n in enumerate(("2", "10"))]
    Rows([*rows, probed("1e", "2+10", 90.0)], None, probe_charts).plot(ax)
    first, second = bars(ax)
    assert [first.get_label(), second.get_label()] == ["0e", "1e"]
    np.testing.assert_array_equal(first.lines[0].get_xdata(), [2, 10])
    assert first.lines[2][0].get_segments()[0][:, 1] == pytest.approx([58, 63])
    assert "largest class" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_methods_of_a_spread_stand_in_rows_with_their_deviation(ax: Axes) -> None:
    of = {
        "variant": [],
        "runs": 3,
        "difference": None,
        "difference_low": None,
        "difference_high": None,
    }
    rows = [
        {"method": "plain", "score": 80.0, "score_sd": 2.0, **of},
        {"method": "lora", "score": 84.0, "score_sd": None, **of}
        | {"difference": 4.0, "difference_low": 1.0, "difference_high": 7.0},
    ]
    found = Spread(
        task="mrpc",
        metric="accuracy",
        baseline=66.0,
        baseline_name="majority class",
        rows=rows,
        runs=[],
        unfinished=[],
    )
    found.plot(ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["plain", "lora"]
    (drawn,) = bars(found.plot(Figure().subplots(), measure="difference"))
    assert drawn.lines[2][0].get_segments()[0][:, 0] == pytest.approx([1, 7])


def test_rows_that_nothing_draws_say_what_to_do() -> None:
    with pytest.raises(InputError, match="to_pandas"):
        Rows([Row({"a": 1})]).plot()


def test_no_rows_are_no_figure(ax: Axes) -> None:
    with pytest.raises(InputError, match="nothing can be drawn"):
        Rows([], None, score_charts).plot(ax)


def test_tuned_and_untuned_seeds_are_points_of_their_own() -> None:
    shared = {"name": "a", "trained_on": "1e", "checkpoint": "1e", "fraction": 1, "f1": 1.0}
    rows = [
        {**shared, "score": 70.0, "f1": 70.0, "threshold_tuned_on": "tune"},
        {**shared, "score": 60.0, "f1": 60.0, "threshold_tuned_on": None},
    ]
    chart = score_charts(rows)["score"]
    assert isinstance(chart, Curves)
    assert len(chart.names) == 2
    (series,) = chart.series.values()
    assert sorted(series.values) == [60.0, 70.0]


def test_rows_of_two_results_are_not_drawn_under_the_names_of_one() -> None:
    chart = points([{"name": "a", "x": 1.0}], {"x": "x"}, "x", name="name")
    other = points([{"name": "b", "x": 2.0}], {"x": "x"}, "x", name="name")
    axes = Figure().subplots()
    draw(chart, axes)
    with pytest.raises(InputError, match="rows of another result"):
        draw(other, axes)


def test_svg_escapes_what_it_is_given_and_has_names_that_are_its_own() -> None:
    hostile = "<script>&$x$"
    rows = [{"name": hostile, "x": 1.0}, {"name": "b", "x": 2.0}]
    chart = points(rows, {hostile: "x", "y": "x"}, "x", name="name")
    one, two = (panels(ident, hostile, [chart])[0].svg for ident in ("a", "b"))
    for text in (one, two):
        assert "<script" not in text
        assert text.count("&lt;script&gt;&amp;$x$") >= 3  # the name, the row, a tip
        assert not re.search(r"https?:|url\(|<style|font-family: ", text)
        assert "#000000" not in text
    names = [set(re.findall(r'id="([^"]*)"', text)) for text in (one, two)]
    assert names[0]
    assert not names[0] & names[1]
    assert panels("a", hostile, [chart])[0].svg == one
