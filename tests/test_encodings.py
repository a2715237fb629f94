"""Effects of int8 and int4 on analyses are measured, marked in rows, and said below."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertvision
from bertvision import ActivationSplit, ActivationStore
from bertvision.featurestore.format.layout import ENCODINGS
from bertvision.pipelines import analysis
from bertvision.pipelines.analysis.cca import CcaResult
from bertvision.pipelines.analysis.cka import CkaResult
from bertvision.pipelines.analysis.isotropy import ROUNDED, IsotropyResult, Rounding
from bertvision.pipelines.analysis.isotropy import isotropy_of_arrays as isotropy
from bertvision.pipelines.analysis.request import encoding_notes
from bertvision.pipelines.analysis.rsa import RsaResult
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.report.analyses import analysis_section
from bertvision.pipelines.report.section import Reading
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.workspace.workspace import Workspace

ROOT = Path(__file__).parents[1]
SPREADS = [1.0, 0.2, 0.03, 0.004, 0.0005]
"""Deviation of [CLS] by layer, where ordinary tokens have 1."""


def hidden_states(windows: int = 160, hidden: int = 48) -> list[torch.Tensor]:
    """(seq, layers, hidden) windows whose first token is nearly the same in all of them."""
    rng = np.random.default_rng(11)
    mixing = rng.normal(size=(len(SPREADS), hidden, hidden)) / np.sqrt(hidden)
    size = np.ones(hidden)
    size[:3] = 6  # a few channels dominate
    given = []
    for _ in range(windows):
        tokens = rng.normal(size=(9, len(SPREADS), hidden)) * size + 1
        first = np.einsum("lh,lhk->lk", rng.normal(size=(len(SPREADS), hidden)), mixing) * size
        tokens[0] = 2 * np.sin(np.arange(hidden)) + np.array(SPREADS)[:, None] * first
        given.append(torch.from_numpy(tokens).float())
    return given


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ActivationSplit]:
    store = ActivationStore.create(tmp_path_factory.mktemp("encodings") / "store")
    made = {}
    for encoding in ("float32", "float16", "bfloat16", "int8", "int4"):
        layers = list(range(len(SPREADS)))
        with store.writer("0e", encoding, hidden_size=48, layers=layers, encoding=encoding) as out:
            for i, states in enumerate(hidden_states()):
                out.add(i, states)
            made[encoding] = out.finish()
    return made


def measure(split: ActivationSplit) -> IsotropyResult:
    lengths = split.plan.n_tokens.astype(np.int64)
    variance = [split.rounding_variance(first=first) for first in (False, True)]
    rounding = [
        Rounding(relative=split.encoding.relative_rounding) if v is None else Rounding(v)
        for v in variance
    ]
    return isotropy(
        {"0e": split.dask()},
        first={"0e": np.cumsum(lengths) - lengths},
        scheduler="threads",
        rounding={"0e": rounding},
    )


@pytest.mark.parametrize("encoding", ["float16", "bfloat16", "int8", "int4"])
def test_the_expected_rounding_is_that_which_happens(
    splits: dict[str, ActivationSplit], encoding: str
) -> None:
    def stack(split: ActivationSplit) -> np.ndarray[Any, Any]:
        order = np.argsort(split.plan.example_id)
        return np.stack([split[int(i)].permute(0, 2, 1).numpy() for i in order]).astype(float)

    true, stored = stack(splits["float32"]), stack(splits[encoding])
    happened = np.square(stored - true)  # (windows, seq, layers, hidden)
    for first in (False, True):
        values = true[:, :1] if first else true
        error = (happened[:, :1] if first else happened).mean(axis=(0, 1)).sum(axis=1)
        expected = splits[encoding].rounding_variance(first=first)
        if expected is None:
            relative = ENCODINGS[encoding].relative_rounding
            expected = relative**2 * np.square(values).mean(axis=(0, 1))
        ratio = expected.sum(axis=1) / error
        # [CLS] of nearly equal values is rounded alike in all windows, so that few numbers count
        most = 2.0 if first else 1.12
        assert (ratio < most).all()
        assert (ratio > 1 / most).all()


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "int4"])
def test_rows_in_which_rounding_hides_the_statistic_are_marked(
    splits: dict[str, ActivationSplit], encoding: str
) -> None:
    exact, stored = measure(splits["float32"]), measure(splits[encoding])
    assert not any(row["is_rounded"] for row in exact.rows())
    marked = {(row["set"], row["layer"]) for row in stored.rows() if row["is_rounded"]}
    assert {name for name, _ in marked} == {"first tokens"}
    for row, true in zip(stored.rows(), exact.rows(), strict=True):
        off = max(
            abs((row[key] or 0) - true[key])
            for key in ("explained_variance_1", "gamma_largest", "mean_correlation", "dominant")
        )
        if (row["set"], row["layer"]) in marked:
            continue
        assert off < 2 * ROUNDED, row
    # where [CLS] is a thousand times nearer to itself than tokens are, all of it is rounding
    assert ("first tokens", 4) in marked
    if encoding != "bfloat16":  # which a larger encoder would need, to be as wrong
        worst = stored.rows()[-1]
        assert abs(worst["gamma_largest"] - exact.rows()[-1]["gamma_largest"]) > 0.02
    (remark,) = stored.remarks()
    assert "first tokens of 0e" in remark
    assert "--encoding float32" in remark
    assert remark.replace(" ", "") in stored.table().replace("\n", "").replace(" ", "")
    assert any(str(row["layer"]).endswith("*") for row in stored.shown())


def test_the_table_of_encodings_is_what_was_measured() -> None:
    """docs/analyses/deviation.json is written by benchmarks/deviation.py on a real encoder."""
    statistics = json.loads((ROOT / "docs/analyses/deviation.json").read_text())["statistics"]

    def keeps(names: list[str], encoding: str) -> str:
        """The worst of some statistics, by the rule of docs/analyses.md."""
        worst = 0.0
        for name in names:
            exact, other = (
                np.array(statistics[name]["values"][e], float) for e in ("float32", encoding)
            )
            span = statistics[name]["most"] - statistics[name]["least"]
            worst = max(worst, float(np.nanmax(np.abs(other - exact))) / span)
        return "values" if worst <= 0.01 else "course" if worst <= 0.1 else "unmeasured"

    measured = {
        "cka": ["CKA", "CKA without the largest channels"],
        "cca": ["SVCCA", "PWCCA"],
        "rsa": ["RSA", "RSA by token"],
        "isotropy": [
            *("mean cosine, tokens", "log I, tokens", "share of the mean vector, tokens"),
            *("EV 1, tokens", "mean norm, tokens", "correlation of channels, tokens"),
        ],
        "context": [
            *("random cosine", "self-similarity less random", "window less random"),
            *("static less another's", "nearest of the same word", "margin of the nearest"),
        ],
        "languages": ["variance between groups", "clusters (V-measure)"],
    }
    declared = {result.kind: result.keeps for result in analysis.results()}
    for kind, names in measured.items():
        kept = {encoding: keeps(names, encoding) for encoding in ("int8", "int4")}
        declared_here = dict.fromkeys(kept, "unmeasured") | dict(declared.pop(kind))
        assert declared_here == kept, kind
    assert not any(declared.values())


def test_what_an_encoding_keeps_less_well_than_it_promises_is_said(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    with ActivationStore.create(tmp_path).writer("0e", "s", hidden_size=32, layers=[4, 9]) as out:
        for i in range(60):
            states = rng.normal(size=(9, 2, 32))
            states[0, 1, 5] += 4000  # a massive activation of the first token, in layer 9
            out.add(i, states)
        split = out.finish()
    (note,) = encoding_notes("cka", CkaResult.keeps, [split, split])
    assert "the first token of each window of layer 9 less well than int8" in note
    assert encoding_notes("cka", CkaResult.keeps, []) == []


def test_of_int4_what_is_kept_is_said_by_analysis(splits: dict[str, ActivationSplit]) -> None:
    (course,) = encoding_notes("rsa", RsaResult.keeps, [splits["int4"]])
    assert "of which rsa keeps the course over layers" in course
    (unmeasured,) = encoding_notes("lens", {}, [splits["int4"]])
    assert "was not measured" in unmeasured
    for encoding in ("float32", "bfloat16", "float16", "int8"):
        assert encoding_notes("rsa", RsaResult.keeps, [splits[encoding]]) == []


def test_notes_stand_below_the_table_and_in_the_report_and_are_kept(
    workspace: Workspace, tmp_path: Path
) -> None:
    space = Workspace.find(shutil.copytree(workspace.root, tmp_path / "space"))
    store = tmp_path / "int4"
    extract(space, "1e", splits=["dev"], tokens="all", encoding="int4", store=str(store))
    space = space.at(str(store))
    for run in (bertvision.rsa, bertvision.cca):  # of which the second has remarks of its own
        for _ in range(2):  # measured, then as it was kept
            said = " ".join(run("1e", "1e", workspace=space).table().split())
            note = f"1e/dev is stored as int4, of which {run.__name__} keeps the course"
            assert note in said
    left_out: list[str] = []
    reading = Reading(space, read_rows(space), left_out)
    sections = [analysis_section(kind, reading) for kind in (CcaResult, RsaResult)]
    assert left_out == []
    for section in sections:
        assert section is not None
        (table,) = section.tables
        assert any("is stored as int4" in remark for remark in table.remarks)
