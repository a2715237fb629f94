"""Every kind of analysis keeps its promises: its file is read again, a hostile one is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from inspect import isabstract
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analyses import MAKERS, made
from byhand import fields, rewrite
from figures import Drawing
from test_hostile_records import VALUES, WHOLE_FILES

import bertvision
from bertvision.errors import WorkspaceError
from bertvision.pipelines import analysis
from bertvision.pipelines.analysis.result import (
    Analysis,
    AnalysisResult,
    LabelledResult,
    read_analysis,
)
from bertvision.pipelines.analysis.twonn import TwoNnResult
from bertvision.pipelines.records import write_record
from bertvision.pipelines.results.columns import Column, latex_of

pytestmark = pytest.mark.usefixtures("charts_drawn_anew")


@pytest.fixture(scope="module", params=analysis.results(), ids=lambda kind: kind.kind)
def result(request: pytest.FixtureRequest) -> AnalysisResult:
    return made(request.param)


@pytest.fixture
def kept(result: AnalysisResult, tmp_path: Path) -> Path:
    """The file of a result."""
    record: Any = Analysis[type(result)]  # type: ignore[misc]
    path = tmp_path / f"{result.kind}-1e-dev.json"
    weights = {"1e": "0" * 64}
    write_record(
        path,
        record(command="bertvision", weights_sha256=weights, kind=result.kind, result=result),
    )
    return path


def presented(result: AnalysisResult) -> None:
    """Everything that is made of a result."""
    assert result.title()
    assert result.table()
    keys = {column.key for column in result.columns()}
    assert keys <= {key for row in result.shown() for key in row}  # a row may lack some
    json.dumps([result.rows(), result.shown(), result.to_json()], allow_nan=False)
    lines = len(result.shown())
    assert result.to_markdown().count("\n") == lines + 2
    assert result.to_latex().count("\n") == lines + 6
    assert result.drawn()


def test_every_kind_is_a_command_a_verb_and_has_a_result_that_is_tested() -> None:
    kinds = [kind.kind for kind in analysis.results()]
    labelled = {kind for kind in analysis.results() if issubclass(kind, LabelledResult)}
    assert set(analysis.results()) == {*MAKERS, *labelled} == set(_subclasses(AnalysisResult))
    assert len(set(kinds)) == len(kinds)
    assert all(callable(getattr(bertvision, kind)) for kind in kinds)


def _subclasses(kind: type[AnalysisResult]) -> list[type[AnalysisResult]]:
    """The classes that have results; examples of the documentation may have made others."""
    classes = [one for sub in kind.__subclasses__() for one in (sub, *_subclasses(sub))]
    own = [one for one in classes if one.__module__.startswith("bertvision.")]
    return [one for one in own if not isabstract(one) and hasattr(one, "kind")]


def test_a_result_comes_back_from_its_file_to_the_last_bit(
    result: AnalysisResult, kept: Path
) -> None:
    again = read_analysis(kept, type(result)).result
    assert again.to_xarray().identical(result.to_xarray())
    for name, value in vars(result).items():
        if name == "dataset":
            continue
        assert type(getattr(again, name)) is type(value)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(again, name), value)
        else:
            assert getattr(again, name) == value
    assert again.to_json() == result.to_json() == fields(kept)["result"]
    assert type(result).from_json(result.to_json()).to_json() == result.to_json()
    presented(again)


def test_a_file_of_anything_else_is_refused_in_a_sentence(
    result: AnalysisResult, kept: Path, tried: Callable[[int, str], None]
) -> None:
    for content in WHOLE_FILES:
        kept.write_bytes(content)
        with pytest.raises(WorkspaceError) as error:
            read_analysis(kept, type(result))
        assert str(kept) in str(error.value)
        assert len(str(error.value)) < 1000
    tried(len(WHOLE_FILES), "files")


def test_a_field_of_another_kind_is_refused_or_what_is_read_can_be_shown(
    result: AnalysisResult, kept: Path, tried: Callable[[int, str], None]
) -> None:
    values = fields(kept)
    whole = result.to_json()
    told: list[str] = []
    for name in [*whole, "kind", "weights_sha256"]:
        inside = {**values, "result": {**whole, name: "HERE"}}
        text = json.dumps(inside if name in whole else {**values, name: "HERE"})
        for value in VALUES:
            kept.write_text(text.replace('"HERE"', value), encoding="utf-8")
            try:
                found = read_analysis(kept, type(result)).result
            except WorkspaceError as error:
                told.append(str(error))
            else:
                presented(found)
        tried(len(VALUES), "values of fields")
    assert len(told) > 0.6 * len(VALUES) * (len(whole) + 2)
    assert max(map(len, told)) < 1000


def test_a_sequence_of_another_length_is_refused_by_its_name(
    result: AnalysisResult, kept: Path
) -> None:
    values = fields(kept)
    for name, value in result.to_json().items():
        if not isinstance(value, list) or len(value) < 2:
            continue
        rewrite(kept, {**values, "result": {**result.to_json(), name: value[:-1]}})
        with pytest.raises(WorkspaceError, match=r"result: \w+ has \d+ values where \d+ belong"):
            read_analysis(kept, type(result))


def test_a_file_of_another_kind_is_refused(result: AnalysisResult, kept: Path) -> None:
    rewrite(kept, {**fields(kept), "kind": "other"})
    with pytest.raises(WorkspaceError, match=f"kind is 'other' where '{result.kind}' belongs"):
        read_analysis(kept, type(result))


def test_the_figure_has_no_text_on_another_and_is_the_same_twice(
    result: AnalysisResult, tmp_path: Path
) -> None:
    result.figure().save(tmp_path / "figure.svg")
    drawn = Drawing(tmp_path / "figure.svg")
    assert drawn.texts[0] == result.title()
    assert drawn.faults() == []
    assert result.figure() == (tmp_path / "figure.svg").read_text()
    huge = re.sub(r"-?\d+\.\d+(e-?\d+)?", "1e308", json.dumps(result.to_json()))
    assert type(result).from_json(json.loads(huge)).figure().startswith("<svg ")


def test_a_table_in_latex_and_markdown_says_what_its_columns_say() -> None:
    result = made(TwoNnResult)
    row = result.shown()[0]
    first = f"{row['dimension']:.1f} ± {row['dimension_sd']:.1f}"
    assert result.to_markdown().splitlines()[:2] == [
        "| snapshot | layer | dimension | distinct | tokens |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    assert first in result.to_markdown().splitlines()[2]
    assert first.replace("±", r"$\pm$") in result.to_latex()
    assert latex_of([Column("a", "50 %_{x}", "text")], [{"a": "b & c"}]).splitlines()[2:5:2] == [
        r"50 \%\_\{x\} \\",
        r"b \& c \\",
    ]


def test_a_labelled_dataset_that_is_another_is_refused() -> None:
    whole = made(TwoNnResult).to_json()
    values = whole["variables"]
    for wrong, says in (
        ({**whole, "coords": {"snapshot": ["0e", "1e"]}}, "no coordinate labels layer"),
        ({**whole, "coords": {**whole["coords"], "layer": [0, 1]}}, "conflicting sizes"),
        ({**whole, "variables": {"dimension": values["dimension"]}}, "variables and their dims"),
        ({**whole, "variables": {**values, "other": 1.0}}, "variables are not dimension, distinct"),
        ({**whole, "variables": {**values, "distinct": [["many"]]}}, "could not convert"),
    ):
        with pytest.raises(ValueError, match=says):
            TwoNnResult.from_json(wrong)
