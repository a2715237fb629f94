"""Analyses of a store beside what one writes with all states in memory, NumPy and scikit-learn.

    python benchmarks/analyses.py --json analyses.json

Both sides begin with the files of a store in int8 and end with the numbers, which are compared
first: an analysis that says something else is an error. In seconds of wall time.

- *cka*: biased linear CKA of every layer with every layer; the peer has products of centred states;
- *cca*: mean canonical correlation of every layer with every layer; the peer has a QR
  decomposition of each layer and singular values for each pair. bertvision gives PWCCA beside it;
- *rsa*: of a sample of tokens, layer with layer; the peer correlates upper triangles of
  scikit-learn's cosine similarities. bertvision gives the variant by token beside it;
- *isotropy*: all that `bertvision isotropy` prints of the tokens and of [CLS]; the peer computes
  the same numbers, layer by layer;
- *mean cosine and PCA alone*: two of these numbers, of the tokens; the peer has the closed form of
  the one and scikit-learn's PCA for the other. bertvision computes the others too.
"""

from __future__ import annotations

from common import harness  # first: it sets what torch reads when it is imported

# isort: split
import time
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
from common.data import Synthetic, lengths
from peers import isotropy as in_numpy
from sklearn.metrics.pairwise import cosine_similarity

from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.cca import cca_of_arrays as cca
from bertvision.pipelines.analysis.cka import cka_of_arrays as cka
from bertvision.pipelines.analysis.isotropy import IsotropyResult
from bertvision.pipelines.analysis.isotropy import isotropy_of_arrays as isotropy
from bertvision.pipelines.analysis.rsa import Paired
from bertvision.pipelines.analysis.rsa import rsa_of_arrays as rsa

Array = npt.NDArray[Any]
OURS, PEER = "bertvision", "in memory, NumPy and scikit-learn"
COMPONENTS, OUTLIER_SD = (1, 3, 10), 6.0


def main() -> None:
    """Check that both sides say the same, measure, print a table, write every repetition."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--examples", type=int, default=117, help="windows, of 171 tokens each")
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=2_000, help="of the sample of rsa")
    options = parser.parse_args()
    if options.quick:
        options.examples, options.layers, options.hidden = 12, 3, 32
        options.tokens, options.repeats = 300, 2
    n_tokens = lengths(options.examples)
    folder = options.folder / f"analyses-{options.examples}x{options.layers}x{options.hidden}"
    splits = [
        Synthetic(n_tokens, layers=options.layers, hidden=options.hidden, seed=seed).write(
            folder, tag=tag
        )
        for seed, tag in enumerate(("0e", "1e"))
    ]
    tokens = min(options.tokens, splits[0].record.tokens)
    results: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    for name, (ours, peer) in sides(splits, tokens).items():
        np.testing.assert_allclose(ours(), peer(), rtol=0, atol=1e-3, err_msg=name)
        found = harness.interleave({OURS: timed(ours), PEER: timed(peer)}, options.repeats)
        results |= {f"{side} | {name}": figures for side, figures in found.items()}
        compared = harness.ratios(found, OURS, higher_is_better=False)
        ratios |= {f"{side} | {name}": ratio for side, ratio in compared.items()}
    states = 2 * splits[0].record.tokens * options.layers * options.hidden * 4
    harness.report(
        options.json,
        benchmark="analyses",
        settings={
            "examples": options.examples,
            "tokens": splits[0].record.tokens,
            "tokens_of_rsa": tokens,
            "layers": options.layers,
            "hidden": options.hidden,
        },
        unit="s",
        results=results,
        ratios=ratios,
        notes=[f"float32 states of both splits in memory: {states / 1e9:.2f} GB"],
    )


def sides(
    splits: list[ActivationSplit], tokens: int
) -> dict[str, tuple[Callable[[], Array], Callable[[], Array]]]:
    """By analysis what bertvision does and what its peer does; both give the same numbers.

    Args:
        splits: two, with the same tokens.
        tokens: of rsa, the first ones.
    """
    rows = np.arange(tokens)

    def arrays() -> list[da.Array]:
        return [ActivationSplit(s.storage, s.tag, s.split).dask() for s in splits]

    def in_memory(states: list[da.Array], n: int | None = None) -> list[Array]:
        return [x[:n].compute(scheduler="threads") for x in states]

    def our_rsa() -> Array:
        x, y = arrays()
        return rsa({"train": Paired(x, y, rows, rows)}, n_tokens=tokens, repeats=1).of_pairs[0, 0]

    n_tokens = splits[0].plan.n_tokens.astype(np.int64)
    first = np.cumsum(n_tokens) - n_tokens

    def measured(**options: Any) -> IsotropyResult:
        states = {"0e": arrays()[0]}
        asked = {"components": COMPONENTS, "outlier_sd": OUTLIER_SD, "max_tokens": None}
        return isotropy(states, **asked, **options)

    def our_isotropy() -> Array:
        found = measured(first={"0e": first})
        values = [getattr(found, name)[0] for name in in_numpy.NAMES]
        far = np.zeros((2, *splits[0].dask().shape[1:]), bool)
        for j, layers in enumerate(found.outlier_channels[0]):
            for i, channels in enumerate(layers):
                far[j, i, list(channels)] = True
        return np.concatenate([np.ravel(value) for value in (*values, far)])

    def peer_isotropy() -> Array:
        (x,) = in_memory(arrays()[:1])
        sets = [in_numpy.statistics(of, COMPONENTS, OUTLIER_SD) for of in (x, x[first])]
        names = (*in_numpy.NAMES, "outlier_channels")
        return np.concatenate([np.ravel([of[name] for of in sets]) for name in names])

    def our_two() -> Array:
        found = measured()
        return np.stack([found.mean_cosine[0, 0], found.explained_variance[0, 0, :, -1]])

    def peer_two() -> Array:
        (x,) = in_memory(arrays()[:1])
        return in_numpy.cosine_and_components(x, COMPONENTS[-1])

    return {
        "cka": (
            lambda: cka(*arrays(), unbiased=False, drop_channels=0, max_tokens=None).cka,
            lambda: peer_cka(*in_memory(arrays())),
        ),
        "cca": (
            lambda: cca(*arrays(), keep=1, ridge=0, max_tokens=None).svcca,
            lambda: peer_cca(*in_memory(arrays())),
        ),
        "rsa": (our_rsa, lambda: peer_rsa(*in_memory(arrays(), tokens))),
        "isotropy": (our_isotropy, peer_isotropy),
        "mean cosine and PCA alone": (our_two, peer_two),
    }


def timed(run: Callable[[], Array]) -> Callable[[], float]:
    """A function that runs another and gives its seconds."""

    def seconds() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    return seconds


def peer_cka(x: Array, y: Array) -> Array:
    """(layers, layers) from the products of centred channels (Kornblith et al. 2019, section 4)."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    own = [
        [np.linalg.norm(side[:, i].T @ side[:, i]) for i in range(side.shape[1])] for side in (x, y)
    ]
    between = [
        [np.linalg.norm(y[:, j].T @ x[:, i]) ** 2 for j in range(y.shape[1])]
        for i in range(x.shape[1])
    ]
    return np.array(between) / np.outer(*own)


def peer_cca(x: Array, y: Array) -> Array:
    """(layers, layers) mean cosine of principal angles between the spans of the channels."""
    bases = [
        [np.linalg.qr(side[:, i] - side[:, i].mean(axis=0))[0] for i in range(side.shape[1])]
        for side in (x, y)
    ]
    return np.array(
        [[np.linalg.svd(a.T @ b, compute_uv=False).mean() for b in bases[1]] for a in bases[0]]
    )


def peer_rsa(x: Array, y: Array) -> Array:
    """(layers, layers) Pearson's correlation of the strict upper triangles of cosines."""
    upper = np.triu_indices(len(x), 1)
    kernels = [
        [cosine_similarity(side[:, i])[upper] for i in range(side.shape[1])] for side in (x, y)
    ]
    return np.corrcoef(*kernels)[: x.shape[1], x.shape[1] :]


if __name__ == "__main__":
    main()
