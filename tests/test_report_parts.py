"""The small parts of the report: cells, files, prose, colours, claims."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

import bertvision.pipelines.report as package
from bertvision.pipelines.plotting import COLOURS
from bertvision.pipelines.report.headline import _last_layer
from bertvision.pipelines.report.listing import control, other_checkpoints
from bertvision.pipelines.report.page import in_code
from bertvision.pipelines.report.scores import learning_curve, softmax
from bertvision.pipelines.report.section import Reading, Section, Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.rows import Results
from bertvision.pipelines.workspace.workspace import Workspace


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


def test_softmax_of_equal_and_of_huge_scalars() -> None:
    assert softmax([3.0, 3.0]) == [0.5, 0.5]
    assert softmax([1000.0, 0.0]) == pytest.approx([1, 0])


def test_prose_has_code_and_apostrophes_and_is_escaped() -> None:
    assert in_code("BERT's `a's <b>` <i>") == ("BERT’s <code>a&#39;s &lt;b&gt;</code> &lt;i&gt;")


def _results(*tags: str) -> Results:
    """Results of BERT and a head trained on 1e and each of these tags, scored there and on 1e."""

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


def test_checkpoints_with_names_are_not_taken_for_the_encoder_before_fine_tuning(
    workspace: Workspace,
) -> None:
    reading = Reading(workspace, _results("0e", "step1000", "1e"), [])
    for section, tag in ((control, "0e"), (other_checkpoints, "step1000")):
        made = section(reading)
        assert made is not None
        assert {r["trained_on"] for r in made.tables[0].rows if "trained_on" in r} == {tag}
    none = Reading(workspace, _results("step1000", "1e"), [])
    assert "on the pretrained encoder" in control(none).missing
    assert other_checkpoints(Reading(workspace, _results("0e", "1e"), [])) is None


def _curve(workspace: Workspace, *tags: str) -> Section:
    return learning_curve(Reading(workspace, _results(*tags), []))


def test_untrained_has_no_place_among_epochs(workspace: Workspace) -> None:
    with_twin, without = (_curve(workspace, *tags, "0e", "1e") for tags in (("untrained",), ()))
    assert with_twin.tables == without.tables
    (figure,), (same,) = with_twin.figures, without.figures
    assert figure.file == same.file
    assert "untrained" not in figure.file
    assert [r["checkpoint"] for r in with_twin.tables[0].rows] == ["0e", "1e"]
    assert _curve(workspace, "untrained").missing


def _themes() -> dict[str, dict[str, str]]:
    css = (Path(str(package.__file__)).parent / "style.css").read_text()
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
    for colour in COLOURS:
        assert _contrast(colour, colours["paper"]) >= 2.9, colour


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
