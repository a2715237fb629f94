"""Linear CKA of the layers of two snapshots (Kornblith et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.kernels import Centring, cheaper_form
from bertvision.pipelines.analysis.layer_maps import LayerByLayer, Matrix
from bertvision.pipelines.analysis.moments import ChannelMoments, each_merged, each_of
from bertvision.pipelines.analysis.reduce import sampled_blocks, tree_reduce
from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import Axes, Keeps
from bertvision.pipelines.analysis.sides import pair
from bertvision.pipelines.declare import MaxTokens, OnDask, OtherWorkspace, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Tag, parse_tag
from bertvision.pipelines.records import Count
from bertvision.pipelines.scheduler import compute, use_scheduler

if TYPE_CHECKING:
    import dask.array as da


@dataclass(frozen=True, eq=False, repr=False)
class CkaResult(LayerByLayer):
    """Similarity of the layers of two splits; see `LayerByLayer` for what is not named here.

    Attributes:
        cka: (layers_x, layers_y) CKA with all channels; NaN where a layer does not vary.
        cka_dropped: (layers_x, layers_y) the same without ``dropped_x`` and ``dropped_y``.
        dropped_x: per layer of x, the channels of largest variance, largest first.
        dropped_y: the same of y.
        unbiased: HSIC₁ (may be slightly below zero) or the biased HSIC₀.
    """

    kind = "cka"
    keeps: ClassVar[Keeps] = {"int8": "values", "int4": "course"}
    heading = "CKA: how alike layers are"
    caption = "Linear CKA: layers of the first snapshot (rows) and of the second (columns)"
    reading = (
        "Linear CKA says how alike the hidden states of two layers are, whatever turns, moves or "
        "scales them: 1 are the same. Few channels of large variance may decide it, so it is also "
        "measured without these."
    )
    seen = "Heat maps of layer × layer; the deeper the colour, the more alike two layers are."
    quantity = "CKA"

    cka: Matrix
    cka_dropped: Matrix
    dropped_x: Annotated[tuple[tuple[Count, ...], ...], Axes.of("layers_x")]
    dropped_y: Annotated[tuple[tuple[Count, ...], ...], Axes.of("layers_y")]
    unbiased: bool

    @property
    def n_dropped(self) -> int:
        """Channels of each layer that ``cka_dropped`` leaves out."""
        return len(self.dropped_x[0])

    def title(self) -> str:
        """One line that says what was measured on how much."""
        return f"Linear CKA ({'unbiased' if self.unbiased else 'biased'}), {self.tokens()}"

    def measures(self) -> dict[str, str]:
        """CKA of all channels, and without those of largest variance, where any are dropped."""
        plural = "s" if self.n_dropped > 1 else ""
        without = f"without the {self.n_dropped} channel{plural} of largest variance per layer"
        return {"cka": "all channels"} | ({"cka_dropped": without} if self.n_dropped else {})


def cka_of_arrays(
    x: da.Array,
    y: da.Array,
    *,
    places: NDArray[np.int64] | None = None,
    unbiased: bool = True,
    drop_channels: int = 3,
    max_tokens: int | None = 20_000,
    seed: int = 0,
    scheduler: str = "threads",
    names: tuple[str, str] = ("x", "y"),
    layers_x: Sequence[int] | None = None,
    layers_y: Sequence[int] | None = None,
) -> CkaResult:
    """Linear CKA of every layer of x with every layer of y.

    Costs 2 · tokens · (layers_x · hidden_x) · (layers_y · hidden_y) operations in float32, or
    tokens² · (layers_x · hidden_x + layers_y · hidden_y) where these are fewer; half of it where x
    is y. The sample keeps that in bounds and is read from the splits once. With ``max_tokens=None``
    all tokens enter, and the blocks are read twice, for the means and then centred. Up to 2 GiB of
    centred tokens are held, on each worker of a cluster; of more the blocks are let go, and read
    once per group of layers.

    Args:
        x: (token, layer, hidden) float32 activations, chunked along the tokens.
        y: (token, layer, hidden) activations of the same tokens; its layers and hidden size may
            differ.
        places: (tokens,) row of y that holds the token of each row of x; None is the same row.
        unbiased: HSIC₁, else the biased HSIC₀.
        drop_channels: channels of largest variance to leave out of each layer in the second matrix.
        max_tokens: size of the uniform sample of tokens; None takes all of them.
        seed: Seed of that sample.
        scheduler: ``threads``, ``processes`` or ``tcp://host:port``; the result is the same.
        names: Names of x and y, for titles (snapshot tags, for example).
        layers_x: layer numbers of x; 0, 1, … by default.
        layers_y: layer numbers of y; 0, 1, … by default.

    Raises:
        InputError: the tokens do not match, are fewer than 4, or an option is out of range.
        NonFiniteError: NaN or infinity in the activations.
    """
    hidden = min(x.shape[-1], y.shape[-1])
    if not 0 <= drop_channels < hidden:
        raise InputError(
            f"drop_channels is {drop_channels}; give 0 to {hidden - 1}, below the hidden size of "
            f"{hidden}"
        )
    arrays = (x,) if x is y else (x, y)
    tokens = min(x.shape[0], max_tokens or x.shape[0])
    form = cheaper_form(tokens, [array.shape[1:] for array in arrays])
    with use_scheduler(scheduler, "cka"):
        blocks = sampled_blocks(arrays, max_tokens, seed, form.rows(tokens), places)
        moments: list[ChannelMoments] = compute(
            tree_reduce(blocks, partial(each_of, ChannelMoments.of), each_merged)
        )
        if moments[0].n < 4:
            raise InputError(f"CKA needs at least 4 tokens; there are {moments[0].n}")
        sides = [Centring.of(m, drop_channels) for m in moments]
        sums = form.sums(blocks, sides)
    values = sums.cka(unbiased=unbiased)[:, : x.shape[1], -y.shape[1] :]
    return CkaResult(
        cka=values[0],
        cka_dropped=values[-1],
        dropped_x=sides[0].dropped,
        dropped_y=sides[-1].dropped,
        x=names[0],
        y=names[1],
        layers_x=tuple(range(x.shape[1]) if layers_x is None else layers_x),
        layers_y=tuple(range(y.shape[1]) if layers_y is None else layers_y),
        n_tokens=sums.n,
        n_available=x.shape[0],
        unbiased=unbiased,
        seed=seed,
    )


@job
def cka(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    beside: OtherWorkspace = None,
    max_tokens: MaxTokens = 20_000,
    biased: Annotated[bool, Option(apart=True)] = False,
    seed: Seed = 0,
    **where: Unpack[OnDask],
) -> CkaResult:
    """Compare the layers of two snapshots by linear CKA.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.cka("0.5e", "1e", max_tokens=200)
        >>> alike.cka.shape  # (layers, layers)
        (3, 3)
        >>> list(alike.to_pandas().columns)
        ['x', 'y', 'layer_x', 'layer_y', 'cka', 'cka_dropped']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have.
        biased: Use the biased estimator.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the two do not hold the same tokens.
    """
    request = Request(cka, locals())
    both = pair(request, parse_tag(first), parse_tag(second), split, beside)

    def measure() -> CkaResult:
        x, y, places = both.arrays()
        return cka_of_arrays(
            x,
            y,
            places=places,
            unbiased=not biased,
            max_tokens=max_tokens or None,
            seed=seed,
            scheduler=request.scheduler,
            **both.told(),
        )

    return request.answer(CkaResult, measure)
