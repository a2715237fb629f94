"""Attention maps of a snapshot's encoder, batch by batch; nobody keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import load_model, pad_id, takes_token_types
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.tasks.batch import collate
from bertvision.pipelines.tasks.windows import Windows

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
        folder: of the snapshot.

    Raises:
        InputError: the weights are damaged, or the family has no such attention.
    """
    return load_model(folder, attn_implementation="eager")


def sampled_windows(count: int, most: int | None, seed: int) -> npt.NDArray[np.int64]:
    """A seeded sample of windows, ascending; all where there are fewer.

    Args:
        count: of windows.
        most: size of the sample; None takes all.
        seed: of the sample.
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
        windows: of a split.
        rows: (sample,) which of them.
        precision: arithmetic of the forward pass; weights are float32 in both.
        desc: name of the progress bar.

    Raises:
        InputError: the model gives no attention of each head to each token.
    """
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
            found = output.attentions or ()
            if len(found) != layers or any(
                of.shape[1:] != (heads, longest, longest) for of in found
            ):
                raise InputError(
                    f"{model.config.model_type} gives attention of the shapes "
                    f"{[tuple(of.shape) for of in found if of is not None]}, where {layers} layers "
                    f"of {heads} attention heads over {longest} tokens are needed: its attention "
                    "cannot be measured"
                )
            for i, row in enumerate(order[done : done + size].tolist()):
                n = int(windows.n_tokens[row])
                weights = torch.stack([of[i, :, :n, :n] for of in found]).float()
                yield WindowMaps(row, windows.input_ids[first[row] : first[row] + n], weights)
            done += size
            bar.update(len(batch.input_ids))
