"""The arithmetic under the report: scales, labels, cells, colours."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bertvision.pipelines.report as package
from bertvision.pipelines.drawing.figures import THEME, both
from bertvision.pipelines.drawing.svg import (
    Canvas,
    Labels,
    Plot,
    round_range,
    shortened,
    text_width,
    ticks,
)
from bertvision.pipelines.report.headline import _last_layer
from bertvision.pipelines.report.page import in_code, in_groups
from bertvision.pipelines.report.pooling import softmax
from bertvision.pipelines.report.scores import learning_curve
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.rows import Results
from bertvision.pipelines.text import signed

numbers = st.floats(-1e4, 1e4, allow_nan=False)


@given(numbers, st.floats(1e-3, 1e4), st.integers(3, 10))
def test_ticks_are_within_few_and_evenly_apart(low: float, span: float, most: int) -> None:
    found = ticks(low, low + span, most)
    assert 1 <= len(found) <= most + 1
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)
    steps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert all(step == pytest.approx(steps[0]) for step in steps)


def test_ticks_known() -> None:
    assert ticks(0, 100, 6) == [0, 20, 40, 60, 80, 100]
    assert ticks(41.2, 54.9) == [42, 44, 46, 48, 50, 52, 54]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_a_range_holds_its_values_with_air(values: list[float]) -> None:
    low, high = round_range(values)
    assert low < min(values)
    assert max(values) < high
    assert high - low < 3 * (max(values) - min(values)) + 5


@given(st.lists(st.tuples(st.floats(45, 390), st.floats(35, 240)), max_size=40))
def test_labels_cover_neither_points_nor_each_other(points: list[tuple[float, float]]) -> None:
    canvas = Canvas(400, 300)
    labels = Labels(Plot(canvas, 40, 30, 390, 250, (0, 1), (0, 1)), points)
    for i, (x, y) in enumerate(points):
        labels.add(x, y, f"head-{i}")
    boxes = labels.boxes
    for i, a in enumerate(boxes[len(points) :]):
        for b in boxes[: len(points) + i]:
            assert a[0] >= b[2] or b[0] >= a[2] or a[1] >= b[3] or b[1] >= a[3]
        assert a[0] >= 40
        assert a[2] <= 400


def test_scales_put_values_where_they_belong() -> None:
    plot = Plot(Canvas(100, 100), 10, 10, 90, 90, (0, 10), (0, 100))
    assert (plot.x(0), plot.x(5), plot.x(10)) == (10, 50, 90)
    assert (plot.y(0), plot.y(25), plot.y(100)) == (90, 70, 10)
    logarithmic = Plot(Canvas(100, 100), 10, 10, 90, 90, (0.01, 100), (0, 1), log_x=True)
    assert logarithmic.x(1) == pytest.approx(50)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.floats(20, 300))
def test_a_shortened_text_fits_and_begins_alike(text: str, room: float) -> None:
    found = shortened(text, room)
    assert text_width(found) <= room or found == "…"
    assert found == text or (found[-1] == "…" and text.startswith(found[:-1]))


def test_drawings_escape_what_they_are_given() -> None:
    canvas = Canvas(10, 10)
    canvas.text(0, 0, "<script>&")
    canvas.marker("circle", 0, 0, "s0", tip='"<b>')
    text = str(both("id", "<title>", "a & b", lambda _: canvas))
    assert "<script" not in text
    assert "<b>" not in text
    assert text.count("&lt;script&gt;&amp;") == 2
    assert "<title>&lt;title&gt;</title>" in re.sub(r'(<title) id="[^"]*"', r"\1", text)


def test_marks_of_two_digits_have_no_minus_zero() -> None:
    canvas = Canvas(10, 10)
    canvas.line(-0.01, 0.04, 1.25, 100.0, "axis")
    assert canvas.parts == ['<line class="axis" x1="0" y1="0" x2="1.2" y2="100"/>']


@pytest.mark.parametrize(
    ("column", "row", "text"),
    [
        (Column("v", "", digits=1), {"v": 50.25}, "50.2"),
        (Column("v", "", sd=True), {"v": 50.0, "v_sd": 0.31}, "50.0 ± 0.3"),
        (Column("v", "", sd=True), {"v": 50.0, "v_sd": None}, "50.0"),
        (Column("v", "", "signed"), {"v": -1.34}, "−1.3"),
        (Column("v", "", "signed"), {"v": 1.34}, "+1.3"),
        (Column("v", "", "signed"), {"v": -0.01}, "0.0"),
        (Column("v", "", "count"), {"v": 1046444}, "1,046,444"),
        (Column("v", "", "size"), {"v": 4_870_000_000}, "4.87 GB"),
        (Column("v", ""), {}, "–"),
        (Column("v", "", "text"), {"v": None}, "–"),
    ],
)
def test_cells_as_people_read_them(column: Column, row: dict[str, float], text: str) -> None:
    assert column.text(row) == text


def test_csv_keeps_quotes_lines_and_full_precision() -> None:
    rows = [{"a": 'x,"y"\nz', "b": 0.1 + 0.2, "b_sd": None}]
    table = Table("t", "", [Column("a", "", "text"), Column("b", "", sd=True)], rows, "", "")
    header, cells = csv.reader(io.StringIO(table.csv()))
    assert header == ["a", "b", "b_sd"]
    assert cells == ['x,"y"\nz', "0.30000000000000004", ""]


def test_signed_differences() -> None:
    assert [signed(v) for v in (1.25, -0.34, -0.04, 0)] == ["+1.2", "−0.3", "0.0", "0.0"]


def test_softmax_of_equal_and_of_huge_scalars() -> None:
    assert softmax([3.0, 3.0]) == [0.5, 0.5]
    assert softmax([1000.0, 0.0]) == pytest.approx([1, 0])


def test_prose_has_code_and_apostrophes_and_is_escaped() -> None:
    assert in_code("BERT's `a's <b>` <i>") == ("BERT’s <code>a&#39;s &lt;b&gt;</code> &lt;i&gt;")


def test_groups_keep_their_order() -> None:
    rows = [{"k": "b", "v": 1}, {"k": "a", "v": 2}, {"k": "b", "v": 3}]
    assert in_groups(rows, "k") == [("b", [rows[0], rows[2]]), ("a", [rows[1]])]


def _results(*tags: str) -> Results:
    """Of BERT and a head trained on 1e and on each of these snapshots, scored there and on 1e."""

    def row(system: str, trained_on: str, checkpoint: str) -> dict[str, object]:
        place = {"system": system, "name": system, "trained_on": trained_on}
        score = {"score": 50.0, "score_sd": None, "seeds": 1, "bert": 50.0, "difference": 0.0}
        return place | {"checkpoint": checkpoint, "fraction": 1.0} | score

    bert = [row("bert", tag, tag) for tag in tags]
    heads = [row("head", tag, on) for tag in tags for on in dict.fromkeys((tag, tags[-1]))]
    return Results(bert, heads, [], [], [], [], "f1", None, None, "questions")


def test_heads_on_an_encoder_without_fine_tuning_are_controls() -> None:
    found = _results("untrained", "0e", "0.5e", "1e").full
    assert {r["trained_on"] for r in found} == {"0.5e", "1e"}


def test_untrained_has_no_place_among_epochs() -> None:
    with_twin = learning_curve(_results("untrained", "0e", "1e"))
    assert with_twin == learning_curve(_results("0e", "1e"))
    (figure,) = with_twin.figures
    assert "untrained" not in figure.file
    assert [r["checkpoint"] for r in with_twin.tables[0].rows] == ["0e", "1e"]
    assert learning_curve(_results("untrained")).missing


def _themes() -> dict[str, dict[str, str]]:
    css = THEME.read_text() + (Path(str(package.__file__)).parent / "style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    names = ("light", "dark", "print")
    return {
        name: dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{3,6})", block))
        for name, block in zip(names, blocks, strict=True)
    }


def _contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2)."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * d for d in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_colours_can_be_read(theme: str) -> None:
    colours = _themes()[theme]
    assert _contrast("#000", "#fff") == pytest.approx(21)
    for name in ("ink", "soft", "link"):
        assert _contrast(colours[name], colours["paper"]) >= 4.5, name
    for i in range(8):
        assert _contrast(colours[f"s{i}"], colours["paper"]) >= 3, f"s{i}"


def _scored(**scores: float) -> Results:
    """Heads on one snapshot, BERT at 50."""
    rows = [
        {
            "name": name.replace("_", "-"),
            "trained_on": "1e",
            "checkpoint": "1e",
            "fraction": 1,
            "score": score,
            "difference": score - 50,
            "bert": 50.0,
            "seeds": 1,
        }
        for name, score in scores.items()
    ]
    return Results([], rows, [], [], [], [], "f1", None, None, "questions")


def test_what_other_layers_add_is_claimed_only_of_a_control() -> None:
    """Beyond the last layer alone, an adapter has parameters of its own too."""
    heads = {"last_layer": 52.0, "adapter_64_shared": 54.25}
    text = _last_layer(_scored(**heads))
    assert "scores 52.0 F1 at 1e (+2.0 against BERT)" in text
    assert "may come from the other states or from its own parameters" in text
    assert "last-layer-adapter-64 beside adapter-64-shared" in text
    text = _last_layer(_scored(**heads, last_layer_adapter_64=54.0))
    assert "last-layer-adapter-64, the control" in text
    assert "scores 54.0 F1, and adapter-64-shared, with one on every layer, 54.2 F1" in text
    assert "the difference, +0.2, is what the other layers bring" in text
    other = _last_layer(_scored(last_layer=52.0, last_layer_adapter_386=53.0, average_pooling=51.0))
    assert "may come from the other states" in other  # no head has this adapter on every layer
    text = _last_layer(_scored(cls_last_state=52.0, cls_learned_pooling=53.0))
    assert text.endswith("may come from the other states or from its own parameters.")
