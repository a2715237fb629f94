"""Attention of every head: a table of layers, rows of heads, heat maps.

What each attention head looks at: entropy, and shares of tokens that stand in a fixed place.

Clark et al. (2019), *What Does BERT Look At? An Analysis of BERT's Attention* (arXiv:1906.04341),
sections 3.1 to 3.3: many heads look at a neighbour, at [SEP], or broadly at all tokens.

Run it on the splits of a workspace.

Attention maps of a snapshot's encoder, batch by batch; nobody keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.request import Request, Setting
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Labels, Numbers
from bertvision.pipelines.declare import Kept, PrecisionOption, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, HeatMap
from bertvision.pipelines.progress import progress
from bertvision.pipelines.reading import Tag, parse_tag
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.tasks.windows import Windows

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from bertvision.pipelines.precision import Precision


_CELLS = 2**27
"""Weights of attention that a batch may have over all layers and heads: half a gigabyte."""


class WindowMaps(NamedTuple):
    """The attention of one window."""

    row: int
    """Number of the window among all of its split."""
    input_ids: npt.NDArray[np.int32]
    """(tokens,)"""
    weights: Tensor
    """(layers, heads, tokens, tokens) float32: how much the token of the third axis looks at that
    of the fourth; each row sums to 1."""


def load_eager(folder: Path) -> PreTrainedModel:
    """The encoder of a snapshot, with the attention that gives its weights.

    Args:
        folder: Folder of the snapshot.

    Raises:
        InputError: the weights are damaged, or the family has no such attention.
    """
    from bertvision.pipelines.encoders.loading import load_model

    return load_model(folder, attn_implementation="eager")


def sampled_windows(count: int, most: int | None, seed: int) -> npt.NDArray[np.int64]:
    """A seeded sample of windows, ascending; all where there are fewer.

    Args:
        count: Number of windows.
        most: size of the sample; None takes all.
        seed: Seed of the sample.
    """
    if most is None or most >= count:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))


def attention_maps(
    model: PreTrainedModel,
    windows: Windows,
    rows: npt.NDArray[np.int64],
    *,
    precision: Precision = "32",
    desc: str = "attention",
) -> Iterator[WindowMaps]:
    """The attention of windows, one after another, longest first.

    Args:
        model: an encoder of `load_eager`; it is moved to this machine's accelerator.
        windows: Windows of a split.
        rows: (sample,) which of them.
        precision: arithmetic of the forward pass; weights are float32 in both.
        desc: name of the progress bar.

    Raises:
        InputError: the model gives no attention of each head to each token.
    """
    import torch

    from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
    from bertvision.pipelines.precision import autocast, device
    from bertvision.pipelines.tasks.windows import collate

    where = device()
    model.to(where).eval()  # type: ignore[arg-type]
    order = rows[np.argsort(-windows.n_tokens[rows].astype(np.int64), kind="stable")]
    first, types, padding = (
        windows.first_token,
        takes_token_types(model),
        pad_id(None, model.config),
    )
    layers, heads = int(model.config.num_hidden_layers), int(model.config.num_attention_heads)
    done = 0
    with torch.inference_mode(), progress(len(order), desc, "window") as bar:
        while done < len(order):
            longest = int(windows.n_tokens[order[done]])
            size = max(1, _CELLS // (layers * heads * longest**2))
            batch = collate(windows, first, order[done : done + size], padding, token_types=types)
            with autocast(precision, where):
                output = model(**batch.to(where).inputs, output_attentions=True)
            maps = output.attentions or ()
            if len(maps) != layers or any(
                one.shape[1:] != (heads, longest, longest) for one in maps
            ):
                raise InputError(
                    f"{model.config.model_type} gives attention of the shapes "
                    f"{[tuple(one.shape) for one in maps if one is not None]}, where {layers} "
                    f"layers of {heads} attention heads over {longest} tokens are needed: its "
                    "attention cannot be measured"
                )
            for i, row in enumerate(order[done : done + size].tolist()):
                n = int(windows.n_tokens[row])
                weights = torch.stack([one[i, :, :n, :n] for one in maps]).float()
                yield WindowMaps(row, windows.input_ids[first[row] : first[row] + n], weights)
            done += size
            bar.update(len(batch.input_ids))


MEASURES = ("entropy", "cls", "sep", "previous", "next", "same")
"""Measures of each head, in this order."""
TITLES = {
    "entropy": "entropy",
    "cls": "to the first token",
    "sep": "to [SEP]",
    "previous": "to the previous token",
    "next": "to the next token",
    "same": "to itself",
}
"""How people read them."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionResult(AnalysisResult):
    """Attention of each head, averaged over windows.

    Attributes:
        values: (measures, layers, heads) means over windows of the mean over their tokens: the
            entropy in parts of that of looking at all tokens alike (1: broad, 0: at one token
            alone), and shares of attention from 0 to 1.
        errors: (measures, layers, heads) their standard errors over windows; NaN of one window.
        alike: (measures,) the same of looking at all tokens alike: what says nothing.
        measures: names, see `MEASURES`.
        layers: numbers of the transformer layers, from 1.
        heads: numbers of the attention heads, from 1.
        name: Name of the measured snapshot, for titles.
        n_windows: windows that entered.
        n_available: windows of the split.
        n_tokens: tokens of these windows.
        seed: Seed of the sample of windows.
    """

    kind = "attention"
    heading = "What attention heads look at"
    titled = (
        "Attention heads, {name}, {n_windows:,} of {n_available:,} windows, {n_tokens:,} tokens"
    )
    caption = "By layer: entropy, and the attention head that looks most at each place"
    reading = (
        "Entropy: mean over the layer's heads, in parts of that of looking at all tokens alike. "
        "Others: the largest share of attention that a head of the layer gives there, and its "
        "number; the last row is what attention to all tokens alike would give. Of many heads one "
        "is always largest: --csv has them all, with standard errors."
    )
    seen = (
        "Heat maps of layer × attention head: the deeper the colour, the more of its attention a "
        "head gives there; entropy 1 is attention to all tokens alike."
    )

    named = ("name",)

    values: Annotated[Array, Axes.of("measures", "layers", "heads")]
    errors: Annotated[Array, Axes.of("measures", "layers", "heads")]
    alike: Annotated[Array, Axes.of("measures")]
    measures: Labels
    layers: Numbers
    heads: Numbers
    name: str
    n_windows: Count
    n_available: Count
    n_tokens: Count
    seed: int

    def columns(self) -> list[Column]:
        """Columns for a layer."""
        return [
            Column("layer", "layer", "text"),
            Column("entropy", "entropy", digits=3),
            Column("lowest", "lowest", "text"),
            *(Column(name, TITLES.get(name, name), "text") for name in self.measures[1:]),
        ]

    def shown(self) -> list[dict[str, Any]]:
        """A row for each layer: its mean entropy, and its strongest heads."""

        def strongest(values: Array, at: int) -> str:
            return f"{values[at]:.3f} (head {self.heads[at]})"

        rows: list[dict[str, Any]] = []
        for i, layer in enumerate(self.layers):
            entropy = self.values[0, i]
            row = {"layer": str(layer), "entropy": float(entropy.mean())}
            row["lowest"] = strongest(entropy, int(entropy.argmin()))
            for name, value in zip(self.measures[1:], self.values[1:, i], strict=True):
                row[name] = strongest(value, int(value.argmax()))
            rows.append(row)
        shares = {n: f"{v:.3f}" for n, v in zip(self.measures[1:], self.alike[1:], strict=True)}
        return [*rows, {"layer": "(all alike)", "entropy": 1.0, "lowest": None, **shares}]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each head: measures and their standard errors."""
        values = dict(zip(self.measures, self.values, strict=True))
        errors = {f"{k}_se": e for k, e in zip(self.measures, self.errors, strict=True)}
        return self.listed({"layer": self.layers, "head": self.heads}, values | errors)

    def charts(self) -> dict[str, Chart]:
        """A heat map of layer × head for each measure."""
        axes = ("layer", self.layers, "attention head", self.heads)
        return {
            name: HeatMap(
                *axes,
                "entropy (1: all tokens alike)"
                if name == "entropy"
                else f"share of attention {TITLES.get(name, name)}",
                values,
                title=TITLES.get(name, name),
                cell=(18.0, 18.0),
            )
            for name, values in zip(self.measures, self.values, strict=True)
        }


def attention_of_maps(
    maps: Iterable[WindowMaps],
    *,
    sep: int | None,
    name: str = "x",
    n_available: int | None = None,
    seed: int = 0,
) -> AttentionResult:
    """Measure what each attention head looks at.

    Args:
        maps: Maps of `attention_maps`; one window is held at a time.
        sep: vocabulary index of [SEP]; None where there is none.
        name: Name of its subject, for titles.
        n_available: windows of the split; by default those given.
        seed: Seed of the sample of windows, for the record.

    Raises:
        InputError: there is no window.
    """
    sums, alike, tokens = [], [], 0
    for window in maps:
        is_sep = window.input_ids == (-1 if sep is None else sep)
        sums.append(looks(window.weights, is_sep))
        alike.append(_alike(is_sep))
        tokens += len(window.input_ids)
    if not sums:
        raise InputError("attention is measured on windows; there is none")
    values = np.stack(sums)
    spread = values.std(axis=0, ddof=1) if len(sums) > 1 else np.full(values.shape[1:], np.nan)
    return AttentionResult(
        values=values.mean(axis=0),
        errors=spread / np.sqrt(len(sums)),
        alike=np.mean(alike, axis=0),
        measures=MEASURES,
        layers=tuple(range(1, values.shape[2] + 1)),
        heads=tuple(range(1, values.shape[3] + 1)),
        name=name,
        n_windows=len(sums),
        n_available=len(sums) if n_available is None else n_available,
        n_tokens=tokens,
        seed=seed,
    )


def looks(weights: Tensor, is_sep: npt.NDArray[np.bool_]) -> Array:
    """The measures of one window, (measures, layers, heads) float64.

    Args:
        weights: (layers, heads, tokens, tokens), rows that sum to 1.
        is_sep: (tokens,) which tokens are [SEP].
    """
    n = weights.shape[-1]
    w = weights.double()
    entropy = -(w * w.clamp_min(1e-300).log()).sum(dim=-1).mean(dim=-1)
    along = w.diagonal(dim1=-2, dim2=-1)
    before, after = (w.diagonal(offset=k, dim1=-2, dim2=-1) for k in (-1, 1))
    measures = [
        entropy / np.log(n) if n > 1 else entropy,
        w[..., 0].mean(dim=-1),
        w[..., is_sep].sum(dim=-1).mean(dim=-1),
        before.sum(dim=-1) / max(n - 1, 1),
        after.sum(dim=-1) / max(n - 1, 1),
        along.mean(dim=-1),
    ]
    return np.stack([measure.cpu().numpy() for measure in measures])


def _alike(is_sep: npt.NDArray[np.bool_]) -> list[float]:
    """The measures of attention to all tokens alike."""
    n = len(is_sep)
    share = 1 / n
    return [1.0, share, float(is_sep.mean()), share, share, share]


@job
def attention(
    checkpoint: Tag,
    *,
    split: str = "dev",
    task: str | None = None,
    windows: Annotated[int, Option(ge=0)] = 200,
    precision: PrecisionOption = "auto",
    seed: Seed = 0,
    **where: Unpack[Kept],
) -> AttentionResult:
    """Measure what each attention head looks at.

    Entropy, [SEP], neighbours, over windows of a split; it runs the encoder.

    Examples:
        >>> import bertvision
        >>> heads = bertvision.attention("1e", windows=3)
        >>> heads.values.shape  # (measures, layers, attention heads)
        (6, 2, 4)

    Args:
        checkpoint: Snapshot to analyse.
        split: Split to analyse.
        task: A data set that was added before, not the workspace's own.
        windows: Largest seeded sample of windows; 0 takes all.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: ``plot`` does not end in ``.svg``, or the family gives no attention.
    """
    request, tag = Request(attention, locals()), parse_tag(checkpoint)
    folder, arithmetic = request.snapshot(tag, precision)
    data = request.workspace.dataset(task)
    data.check([split])
    request.names = [split]
    request.settings["task"] = Setting(data.name, None, f"task-{data.name}")

    def measure() -> AttentionResult:
        from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer

        tokenizer = load_snapshot_tokenizer(folder)
        every = data.windows(split, tokenizer)
        if every.parts is not None:
            raise InputError(
                f"the windows of {data.name} hold several documents each, which do not attend to "
                "each other: add the documents without packing, in another --workspace"
            )
        rows = sampled_windows(len(every), windows or None, seed)
        where = f"{tag}/{split}" if data.name is None else f"{tag}/{data.name}-{split}"
        return attention_of_maps(
            attention_maps(load_eager(folder), every, rows, precision=arithmetic),
            sep=tokenizer.sep_token_id,
            name=where,
            n_available=len(every),
            seed=seed,
        )

    return request.answer(AttentionResult, measure)
