"""Samples of foreign hidden states, by key, one after another."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
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
_FLOATS = (torch.float16, torch.float32, torch.float64)


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
        keys: Keys of its samples, in its own order.
        longest: tokens of the longest sample.
        bad: Samples that cannot be read, a reason by key; they are not among the keys.
        layer_names: Names of the layers, where the files say them.
        model: Name of their model, where the files say it.
    """

    kind: ClassVar[str]
    """Kind of the files, in a word or two; kept in the provenance."""
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


def files_of(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder with a suffix, by name; hidden ones are of the system that copied it.

    Args:
        folder: Folder of the samples.
        suffix: End of the names, such as ``.npy``.
    """
    return sorted(p for p in folder.glob(f"*{suffix}") if not p.name.startswith("."))


def as_layers(name: str, states: Tensor) -> Tensor:
    """States of one sample as (seq, layers, hidden): what has no axis of layers has one layer.

    Args:
        name: Name of the sample, for the message.
        states: (seq, layers, hidden) or (seq, hidden).

    Raises:
        InputError: it is neither, or no floats.
    """
    if states.ndim not in (2, 3) or not states.is_floating_point() or 0 in states.shape:
        hint = ""
        if states.ndim == 4 and states.shape[0] == 1:
            hint = "; leave the axis of the batch out, as with states[0]"
        elif states.ndim in (2, 3) and len(states) == 0:
            hint = "; a sample without tokens is none"
        raise InputError(
            f"{name} holds {states.dtype} of shape {tuple(states.shape)}: hidden states are "
            f"floats (tokens, layers, hidden) or (tokens, hidden){hint}"
        )
    if states.dtype.itemsize == 1:  # float8 of several kinds
        states = states.to(torch.float32)
    return states.unsqueeze(1) if states.ndim == 2 else states


def sample_of(name: str, tensors: Mapping[str, Tensor]) -> Sample:
    """A sample out of named tensors, as files with one example have them.

    Args:
        name: Name of the file, for messages.
        tensors: ``hidden_states``; with it perhaps ``token_ids`` or ``input_ids``, scales of 8-bit
            floats, ``labels.NAME``, and arrays of tokens under any other name. What is none of
            these is left out.

    Raises:
        InputError: there are no hidden states, or as many tokens as ids.
    """
    if "hidden_states" not in tensors:
        raise InputError(no_states(name, tensors))
    given = tensors["hidden_states"]
    states = as_layers(name, given)
    if (scales := tensors.get(_SCALES)) is not None:
        states = _scaled(name, states, scales, given.ndim)
    tokens = next((tensors[places] for places in _IDS if places in tensors), None)
    ids = None if tokens is None else whole_numbers(name, tokens)
    check_ids(name, states.shape, ids)
    labels, fields = {}, {}
    for key, tensor in tensors.items():
        if key in (*_IDS, _SCALES, "hidden_states") or not _is_of_numpy(tensor):
            continue
        if key.startswith(LABELS):
            labels[key.removeprefix(LABELS)] = tensor.numpy()
        elif tensor.ndim and len(tensor) == len(states):
            fields[key] = tensor.numpy()
    return Sample(states, ids, labels, fields)


def hooks_of(
    name: str, shapes: Mapping[str, Sequence[int]], pattern: str | None = None
) -> list[str]:
    """The activations in a file of named tensors that are its layers, in the order of the blocks.

    Args:
        name: Name of the file, for the message.
        shapes: Shape of each tensor.
        pattern: Names that are taken, such as ``blocks.*.hook_resid_post``; None takes the hooks of
            TransformerLens, where all vectors have one length.

    Raises:
        InputError: There are none, they have different shapes, or are a batch of several texts.
    """
    if pattern is not None:
        chosen = [each for each in shapes if fnmatchcase(each, pattern)]
    else:
        chosen = [each for each in shapes if "hook_" in each]
    chosen.sort(key=lambda each: [(len(part), part) for part in re.split(r"(\d+)", each)])
    if not chosen:
        raise InputError(
            no_states(name, shapes)
            if pattern is None
            else f"{name} has nothing named {pattern!r}: it has {_some(sorted(shapes))}"
        )
    if len({tuple(shapes[each]) for each in chosen}) > 1:
        raise InputError(
            f"{name} has activations of different shapes, {_some(chosen)}: choose with --column, "
            "such as --column 'blocks.*.hook_resid_post'"
        )
    shape = tuple(shapes[chosen[0]])
    if len(shape) == 3 and shape[0] != 1:
        raise InputError(
            f"{name} has a batch of {shape[0]} texts, {chosen[0]} of shape {shape}, and does not "
            "say where they end: save a file for each text, without padding"
        )
    if len(shape) not in (2, 3) or 0 in shape:
        raise InputError(
            f"{name}: {chosen[0]} has shape {shape}: give (tokens, hidden), or (1, tokens, hidden)"
        )
    return chosen


def hooked_sample(name: str, tensors: Mapping[str, Tensor], hooks: Sequence[str]) -> Sample:
    """A sample out of the activations of hooks, as caches of TransformerLens have them.

    Args:
        name: Name of the file, for messages.
        tensors: (tokens, hidden) or (1, tokens, hidden) of each hook; perhaps token ids.
        hooks: Names of the layers, in their order.

    Raises:
        InputError: They are no floats, or there is not an id for each token.
    """
    states = torch.stack([tensors[hook] for hook in hooks], dim=-2)
    states = as_layers(name, states.squeeze(0) if states.ndim == 4 else states)
    tokens = next((tensors[each] for each in (*_IDS, "tokens") if each in tensors), None)
    ids = None
    if tokens is not None:
        ids = whole_numbers(name, tokens.squeeze(0) if tokens.ndim == 2 else tokens)
    check_ids(name, states.shape, ids)
    return Sample(states, ids)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def no_states(name: str, names: Iterable[str]) -> str:
    """The message of a file that lacks hidden states: its name, and those of what it has."""
    return (
        f"{name} has no hidden_states: it has {_some(sorted(names)) or 'nothing'}; save the "
        "states of all layers as hidden_states, (tokens, layers, hidden), or name them with a "
        "pattern, --column"
    )


def _scaled(name: str, states: Tensor, scales: Tensor, axes: int) -> Tensor:
    """States times their scales, which may lack axes but give none more.

    Args:
        name: Name of the file.
        states: Tensor (seq, layers, hidden).
        scales: Tensor of factors, as the file has them.
        axes: Number of axes that the states have in the file.
    """
    if axes == scales.ndim == 2:  # the states had no axis of layers
        scales = scales.unsqueeze(1)
    short = scales.ndim <= states.ndim and not scales.is_complex()
    fits = short and all(
        n in (1, due) for n, due in zip(scales.shape[::-1], states.shape[::-1], strict=False)
    )
    if not fits:
        raise InputError(
            f"{name}: {_SCALES} of shape {tuple(scales.shape)} are not those of hidden states "
            f"of shape {tuple(states.shape)}"
        )
    return states * scales.to(torch.float32)


def _is_of_numpy(tensor: Tensor) -> bool:
    """Whether NumPy has its type, as it has not of bfloat16 and floats of 8 bits."""
    return not tensor.is_floating_point() or tensor.dtype in _FLOATS


def whole_numbers(name: str, ids: Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Token ids as an array.

    Raises:
        InputError: they are no whole numbers.
    """
    whole = (
        ids.dtype.kind in "iu"
        if isinstance(ids, np.ndarray)
        else (not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool)
    )
    if not whole:
        raise InputError(
            f"{name} has token ids of {ids.dtype}, which are no whole numbers: save them as int32 "
            "or int64"
        )
    return native(ids) if isinstance(ids, np.ndarray) else ids.numpy()


def check_ids(name: str, shape: Sequence[int], ids: npt.NDArray[Any] | None) -> None:
    """Check that there is an id for each token.

    Args:
        name: Name of the sample.
        shape: Shape of its hidden states, (seq, layers, hidden).
        ids: Token ids, or None.

    Raises:
        InputError: there is not: the hidden states may be those of other tokens.
    """
    if ids is not None and ids.shape != (shape[0],):
        turned = len(ids.shape) == 1 and len(ids) == shape[1]
        raise InputError(
            f"{name} has hidden states of {counted(shape[0], 'token')} and token ids of shape "
            f"{ids.shape}: "
            + (
                "they are (layers, tokens, hidden), it seems; save them as (tokens, layers, hidden)"
                if turned
                else "they are not of one text; compute it again"
            )
        )


def native(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array out of a file in memory of its own, in this machine's order of bytes."""
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """An array out of a file as a tensor in memory of its own.

    Raises:
        InputError: its numbers are of no kind that tensors are.
    """
    try:
        return torch.from_numpy(native(array))
    except TypeError:
        raise InputError(f"{array.dtype} is no type of hidden states: give floats") from None
