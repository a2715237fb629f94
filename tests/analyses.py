"""A small result of every kind of analysis, of random hidden states."""

from __future__ import annotations

from collections.abc import Callable

import dask.array as da
import numpy as np
import torch
import xarray as xr
from test_lens import WORDS, Head

from bertvision.pipelines.analysis.attention import AttentionResult, WindowMaps
from bertvision.pipelines.analysis.attention import attention_of_maps as attention
from bertvision.pipelines.analysis.cca import CcaResult
from bertvision.pipelines.analysis.cca import cca_of_arrays as cca
from bertvision.pipelines.analysis.cka import CkaResult
from bertvision.pipelines.analysis.cka import cka_of_arrays as cka
from bertvision.pipelines.analysis.cloze import ClozeResult
from bertvision.pipelines.analysis.context import ContextResult, Samples
from bertvision.pipelines.analysis.context import context_of_arrays as context
from bertvision.pipelines.analysis.exits import ExitsResult
from bertvision.pipelines.analysis.isotropy import IsotropyResult
from bertvision.pipelines.analysis.isotropy import isotropy_of_arrays as isotropy
from bertvision.pipelines.analysis.languages import LanguagesResult
from bertvision.pipelines.analysis.languages import languages_of_groups as languages
from bertvision.pipelines.analysis.lens import LensResult, lens_of_array
from bertvision.pipelines.analysis.prune import PruningResult
from bertvision.pipelines.analysis.relations import RelationsResult
from bertvision.pipelines.analysis.result import AnalysisResult, LabelledResult
from bertvision.pipelines.analysis.rsa import Paired, RsaResult
from bertvision.pipelines.analysis.rsa import rsa_of_arrays as rsa
from bertvision.pipelines.analysis.structure import StructureResult
from bertvision.pipelines.analysis.uses import Uses
from bertvision.pipelines.readouts.options import BASELINES, SYNTAX_METRICS


def states(seed: int, tokens: int = 40, layers: int = 3, hidden: int = 6) -> da.Array:
    values = np.random.default_rng(seed).standard_normal((tokens, layers, hidden))
    return da.from_array(values, chunks=(16, layers, hidden))


def _isotropy() -> IsotropyResult:
    first = np.arange(0, 40, 4)
    snapshots = {tag: states(i) for i, tag in enumerate(("0.5e", "1e"))}
    return isotropy(
        snapshots, first=dict.fromkeys(snapshots, first), components=(1, 3), outlier_sd=1.0
    )


def _context() -> ContextResult:
    groups = [np.arange(k, 40, 4) for k in range(4)]
    uses = Uses(groups, groups[::-1], 1, 2, 3, 4, 5, 6)
    windows = [np.arange(10), np.arange(10, 25)]
    at = [np.array([0, 10, 25]), np.array([4])]
    snapshots = {tag: states(i) for i, tag in enumerate(("0.5e", "1e"))}
    return context(snapshots, Samples(uses, windows, at, (0, 4)))


def _rsa() -> RsaResult:
    rows = np.arange(40)
    splits = {name: Paired(states(i), states(i + 1), rows, rows) for i, name in enumerate("ab")}
    return rsa(splits, n_tokens=20, repeats=2)


def _attention() -> AttentionResult:
    random = torch.Generator().manual_seed(0)
    ids = np.array([2, 7, 8, 3], np.int32)
    weights = [torch.rand(2, 3, 4, 4, generator=random).softmax(-1) for _ in range(3)]
    return attention([WindowMaps(i, ids, of) for i, of in enumerate(weights)], sep=3)


def _pruning() -> PruningResult:
    random = np.random.default_rng(0)
    return PruningResult(
        rise=random.normal(size=(2, 3)),
        sensitivity=random.random((2, 3)),
        loss=1.5,
        left=np.linspace(1, 0, 4),
        score=np.array([80.0, 75.0, 40.0, 10.0]),
        random=np.array([80.0, 60.0, 30.0, 10.0]),
        random_sd=np.array([0.0, 5.0, 9.0, 0.0]),
        metric="f1",
        trivial=50.0,
        layers=(1, 2),
        heads=(1, 2, 3),
        name="1e/dev",
        n_ranked=5,
        n_scored=6,
        seed=0,
    )


def _relations() -> RelationsResult:
    return RelationsResult(
        relations=("det", "nsubj"),
        examples=(20, 12),
        layers=(2, 1),
        heads=(1, 3),
        directions=("head to dependent", "dependent to head"),
        accuracy=np.array([0.9, 0.4]),
        offsets=(1, -2),
        by_offset=np.array([0.8, 0.5]),
        low=np.array([0.02, -0.3]),
        high=np.array([0.2, 0.1]),
        few=("iobj",),
        few_examples=(3,),
        name="1e/treebank-dev",
        n_chosen=30,
        n_scored=30,
        n_cut=1,
        seed=0,
    )


def _cloze() -> ClozeResult:
    """By hand: asking takes a tokenizer."""
    shares = np.array([0.25, 0.75, 0.5])
    return ClozeResult(
        **dict.fromkeys(("p1", "pk", "mrr", "chance", "majority", "shuffled"), shares),
        p1_low=shares - 0.1,
        p1_high=shares + 0.1,
        negated=np.array([0.5, np.nan, 0.5]),
        negated_same=np.array([1, np.nan, 1]),
        groups=("a group of a long name, as relations have them", "facts", "all"),
        n_items=(4, 4, 8),
        n_negated=(4, 0, 4),
        n_candidates=np.array([2.0, 3, 2.5]),
        name="items",
        model="0e",
        note="A note.",
        k=10,
        left_out=("candidate 'word', not one token (of 3 items)",),  # as many as there are
        resamples=100,
        seed=0,
    )


def _languages() -> LanguagesResult:
    values = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)
    groups = [np.arange(12), np.arange(12, 24)]
    return languages(
        lambda layer: values + layer, groups, ["de", "en"], layers=[0, 1], translations=True
    )


def _structure() -> StructureResult:
    random = np.random.default_rng(0)
    value = random.uniform(0, 1, (2, 6, 3)) * np.array([100, 1, 100, 1, 100, 100])[:, None]
    baseline = np.full((3, 6), np.nan)
    baseline[:2, :4], baseline[2, 4:] = random.uniform(0, 0.5, (2, 4)), 25.0
    return StructureResult(
        tags=("0e", "untrained"),
        layers=(0, 1, 2),
        metrics=SYNTAX_METRICS,
        value=value,
        low=0.9 * value,
        high=1.1 * value,
        sd=0.01 * value,
        baselines=BASELINES,
        baseline=baseline,
        tasks=("upos", "relation"),
        upto=random.uniform(60, 90, (2, 2, 2, 3)),
        weights=random.dirichlet(np.ones(3), (2, 2, 2)),
        parts=("treebank-train", "treebank-dev", "treebank-test"),
        sentences=(90, 20, 30),
        cut=(2, 0, 1),
        wordless=(1, 0, 0),
        untrained=("vocative", "discourse"),
        untrained_counts=(3, 1),
        unscored=("dislocated", "list"),
        unscored_counts=(5, 2),
        rank=128,
        units=256,
    )


def _exits() -> ExitsResult:
    return ExitsResult(
        criteria=("entropy", "probability", "patience"),
        thresholds=np.array(
            [[np.nan, 0.2, 0.3, 0.7], [np.nan, 0.9, 0.6, 0.5], [np.nan, 1, 0, np.nan]]
        ),
        mean_layers=np.array([[4, 3.2, 2.5, 1], [4, 3, 2, 1], [4, 2.1, 1, np.nan]]),
        scores=np.array([[88, 88.5, 84, 70], [88, 87, 80, 70], [88, 85, 70, np.nan]]),
        least=np.array([3.1, 3.0, 4.0]),
        least_scores=np.array([87.2, 87, 88]),
        layers=(1, 2, 4),
        fixed=np.array([70.0, 80, 88]),
        weights=np.array([0.2, 0.3, 0.5]),
        metric="accuracy",
        trivial=62.5,
        tolerance=None,
        name="1e/dev",
        n_windows=40,
        n_items=32,
    )


MAKERS: dict[type[AnalysisResult], Callable[[], AnalysisResult]] = {
    CkaResult: lambda: cka(states(0), states(1, layers=2)),
    CcaResult: lambda: cca(states(0, 80), states(1, 80, layers=2)),
    RsaResult: _rsa,
    LensResult: lambda: lens_of_array(
        states(0), np.arange(40) % WORDS, Head(), special=[1], tile=8
    ),
    ClozeResult: _cloze,
    IsotropyResult: _isotropy,
    ContextResult: _context,
    AttentionResult: _attention,
    PruningResult: _pruning,
    RelationsResult: _relations,
    LanguagesResult: _languages,
    StructureResult: _structure,
    ExitsResult: _exits,
}


def made(kind: type[AnalysisResult]) -> AnalysisResult:
    """A small result of a kind; the dataset of a labelled one is of random numbers."""
    if not issubclass(kind, LabelledResult):
        return MAKERS[kind]()
    random, sizes = np.random.default_rng(0), {"snapshot": ["0e", "1e"]}
    variables = {}
    for name, variable in kind.variables.items():
        dims = variable.dims.split()
        labels = {dim: sizes.get(dim, list(range(3))) for dim in dims}
        sizes |= labels
        for end in ("", "_sd") if variable.sd else ("",):
            variables[name + end] = (dims, random.uniform(1, 9, [len(labels[d]) for d in dims]))
    return kind(xr.Dataset(variables, sizes, {"title": f"A result of {kind.kind}"}))
