"""What every source of foreign hidden states gives: samples by key, one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, counted

LABELS = "labels."
"""Before the name of what a sample has as a whole, in files that are imported and exported."""
_IDS = ("token_ids", "input_ids")
_SCALES = "hidden_states_scales"


class Sample(NamedTuple):
    """The hidden states of one example, and what lies beside them.

    Attributes:
        states: (seq, layers, hidden) float, on the CPU.
        input_ids: (seq,) token ids, or None.
        labels: arrays of the example as a whole, by name.
        fields: arrays of its tokens, by name, (seq, …) each.
    """

    states: Tensor
    input_ids: npt.NDArray[Any] | None = None
    labels: Mapping[str, npt.NDArray[Any]] = {}
    fields: Mapping[str, npt.NDArray[Any]] = {}


class Source(ABC):
    """Hidden states in files of others.

    Attributes:
        keys: of its samples, in its own order.
        longest: tokens of the longest sample.
        bad: what cannot be read, a reason by key; such a sample is not among the keys.
        layer_names: what the layers are, where the files say it.
        model: whose hidden states they are, where the files say it.
    """

    kind: ClassVar[str]
    """What the files are, in a word or two; kept in the provenance."""
    keys: Sequence[str]
    longest: int
    bad: Mapping[str, str] = {}
    layer_names: Sequence[int | str] | None = None
    model: str | None = None

    @abstractmethod
    def read(self, position: int) -> Sample:
        """The sample at a position among the keys.

        Raises:
            InputError: it is damaged, or contradicts itself.
        """


def as_layers(name: str, states: Tensor) -> Tensor:
    """States of one sample as (seq, layers, hidden): what has no axis of layers has one layer.

    Args:
        name: of the sample, for the message.
        states: (seq, layers, hidden) or (seq, hidden).

    Raises:
        InputError: it is neither, or no floats.
    """
    if states.ndim not in (2, 3) or not states.is_floating_point() or 0 in states.shape:
        raise InputError(
            f"{name} holds {states.dtype} of shape {tuple(states.shape)}: hidden states are "
            "floats (tokens, layers, hidden) or (tokens, hidden)"
        )
    if states.dtype.itemsize == 1:  # float8 of several kinds
        states = states.to(torch.float32)
    return states.unsqueeze(1) if states.ndim == 2 else states


def sample_of(name: str, tensors: Mapping[str, Tensor]) -> Sample:
    """A sample out of named tensors, as files with one example have them.

    Args:
        name: of the file, for messages.
        tensors: ``hidden_states``; with it perhaps ``token_ids`` or ``input_ids``, scales of 8-bit
            floats, ``labels.NAME``, and arrays of tokens under any other name. What is none of
            these is left out.

    Raises:
        InputError: there are no hidden states, or as many tokens as ids.
    """
    if "hidden_states" not in tensors:
        raise InputError(f"{name} has no hidden_states: it has {', '.join(sorted(tensors))}")
    states = as_layers(name, tensors["hidden_states"])
    if (scales := tensors.get(_SCALES)) is not None:
        try:
            states = states * scales.to(torch.float32)
        except RuntimeError:
            raise InputError(
                f"{name}: {_SCALES} of shape {tuple(scales.shape)} are not those of hidden states "
                f"of shape {tuple(states.shape)}"
            ) from None
    ids = next((tensors[of].numpy() for of in _IDS if of in tensors), None)
    check_ids(name, len(states), ids)
    labels, fields = {}, {}
    for key, tensor in tensors.items():
        if key in (*_IDS, _SCALES, "hidden_states") or tensor.dtype == torch.bfloat16:
            continue
        if key.startswith(LABELS):
            labels[key.removeprefix(LABELS)] = tensor.numpy()
        elif tensor.ndim and len(tensor) == len(states):
            fields[key] = tensor.numpy()
    return Sample(states, ids, labels, fields)


def check_ids(name: str, tokens: int, ids: npt.NDArray[Any] | None) -> None:
    """Check that there is an id for each token.

    Raises:
        InputError: there is not: the hidden states may be those of other tokens.
    """
    if ids is not None and ids.shape != (tokens,):
        raise InputError(
            f"{name} has hidden states of {counted(tokens, 'token')} and token ids of shape "
            f"{ids.shape}: they are not of one text; compute it again"
        )


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """An array out of a file as a tensor in memory of its own.

    Raises:
        InputError: its numbers are of no kind that tensors are.
    """
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError:
        raise InputError(f"{array.dtype} is no type of hidden states: give floats") from None
