"""Published patterns: effects have the sign and the size that a made-up run gives them."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from docs_scripts import docs_script

LAYERS = 7
"""How many the run has, the embeddings among them: thirds of two."""


@pytest.fixture(scope="module")
def patterns() -> ModuleType:
    return docs_script("patterns")


def flat(value: float) -> dict[str, list[float]]:
    """A score that is the same in all layers, with an interval of one on both sides."""
    return {"value": [value] * LAYERS, "low": [value - 1] * LAYERS, "high": [value + 1] * LAYERS}


@pytest.fixture
def run() -> dict[str, Any]:
    """The last third of the layers moves by 0.4 on dev, 0.1 elsewhere; nothing else happens."""
    near, first, far = (
        [[1.0] * 5 + [top, top], [1.0] * 5 + [top + 0.02] * 2] for top in (0.6, 0.9, 0.9)
    )
    places = {"mean_cosine": [0.1] * LAYERS, "outlier_channels": [[1, 2, 3, 4]] * LAYERS}
    mixes = {"upos": [[0, 6, *[6] * 5]], "relation": [[0, 0, 0, 6, *[6] * 3]]}
    return {
        "encoder": "example",
        "task": "squad_v1",
        "seed": 0,
        "rsa": {"dev": {"0.1e": first, "1e": near}, "treebank-test": {"0.1e": far, "1e": far}},
        "isotropy": {"dev": {"0e": places, "1e": copy.deepcopy(places)}},
        "context": {"0e": {"self_adjusted": [0.9, 0.8, 0.8, 0.6, 0.5, 0.5, 0.5]}},
        "structure": {"0e": {"uuas": flat(60), "upto": mixes}, "1e": {"uuas": flat(60)}},
    }


def test_effects_of_similarity_are_differences_of_thirds(
    patterns: ModuleType, run: dict[str, Any]
) -> None:
    sd = np.std([0.6, 0.62], ddof=1)
    found = patterns.top_changes_most(run)
    assert found.value == pytest.approx(1 - 0.61)
    assert found.high - found.value == pytest.approx(1.96 * sd)
    found = patterns.less_out_of_domain(run)
    assert found.value == pytest.approx(0.3)
    assert found.high - found.value == pytest.approx(1.96 * np.hypot(sd, sd))
    found = patterns.grows(run)
    assert (found.value, found.low) == pytest.approx((0.3, 0.3)), "on the same tokens"


def test_what_does_not_change_has_no_effect(patterns: ModuleType, run: dict[str, Any]) -> None:
    assert patterns.uses_part(run).value == pytest.approx(0.3)
    for effect in (patterns.anisotropic_above, patterns.top_grows_anisotropic):
        assert tuple(effect(run)) == (0, 0, 0)
    assert tuple(patterns.outliers_stay(run)) == (0.5, 0.5, 0.5)
    run["isotropy"]["dev"]["1e"]["outlier_channels"][0] = [9]
    assert patterns.outliers_stay(run).value == pytest.approx(24 / 28 - 0.5)
    found = patterns.syntax_stays(run)
    assert found.value == 0
    assert found.high == -found.low == pytest.approx(np.sqrt(2))


def test_the_layer_that_knows_most_syntax_is_compared_with_the_last(
    patterns: ModuleType, run: dict[str, Any]
) -> None:
    for end in ("value", "low", "high"):
        run["structure"]["0e"]["uuas"][end][3] += 10
    assert patterns.syntax_in_the_middle(run).value == 10
    assert patterns.syntax_stays(run).value == -10
    assert patterns.speech_before_relations(run).value == 2  # expected layers 1 and 3


def test_no_interval_decides_what_may_have_another_reason(
    patterns: ModuleType, run: dict[str, Any]
) -> None:
    rows = patterns.judged([run], docs_script("generate_results").verdict)
    assert patterns.less_out_of_domain(run).low > 0
    [row] = [row for row in rows if row[0].startswith("Less so on text of another domain")]
    assert "length and format" in row[0]
    assert row[-1] == "cannot be told"


def test_a_pattern_holds_where_it_holds_in_the_runs_of_all_seeds(
    patterns: ModuleType, run: dict[str, Any]
) -> None:
    verdict = docs_script("generate_results").verdict
    other = {**copy.deepcopy(run), "seed": 1}
    rows = patterns.judged([run, other], verdict)
    assert len(rows) == len(patterns.PATTERNS)
    assert rows[0][-1] == "holds"
    other["rsa"]["dev"]["1e"] = [[0.6] * 5 + [1.0] * 2] * 2  # the lower layers change most
    rows = patterns.judged([run, other], verdict)
    assert rows[0][-1] == "cannot be told"
    assert rows[0][3].count(";") == 1
    other["structure"] = {}
    rows = patterns.judged([run, other], verdict)
    assert [row[3].count(";") for row in rows].count(0) == 3, "judged on the run that has it"
    run["structure"] = {}
    left = patterns.judged([run, other], verdict)
    assert len(left) == len(patterns.PATTERNS) - 3, "what was not measured is not judged"
