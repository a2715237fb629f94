"""Hidden states as a forward pass gives them: padded batches of a tensor for each layer, hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bertvision.errors import InputError, did_you_mean
from bertvision.featurestore.format.records import Layout

BATCH_DIMS = ("batch", "seq", "layers", "hidden")


class BatchExample(NamedTuple):
    """An example of a batch, without its padding; what `ActivationWriter.add` takes.

    Attributes:
        hidden_states: (seq, layers, hidden).
        input_ids: (seq,) or None.
        labels: By name, the row of each.
        fields: By name, (seq, …) each.
    """

    hidden_states: Tensor
    input_ids: Tensor | None
    labels: dict[str, Any]
    fields: dict[str, Tensor]


def batch_examples(
    layout: Layout,
    hidden_states: object,
    attention_mask: object,
    dims: Sequence[str],
    input_ids: object,
    labels: Mapping[str, object] | None,
    fields: Mapping[str, object] | None,
) -> list[BatchExample]:
    """The examples of a batch; arguments are those of `ActivationWriter.add_batch`.

    Raises:
        InputError: Shapes do not go together.
    """
    layers = _layers(layout, hidden_states, dims)
    shape = layers[0].shape[:2]
    mask = torch.ones(shape, dtype=torch.bool)
    if attention_mask is not None:
        mask = torch.as_tensor(attention_mask).cpu() != 0
    if mask.shape != shape:
        raise InputError(
            f"attention_mask is {tuple(mask.shape)}: give (batch, seq) = {tuple(shape)}"
        )
    lengths = mask.sum(dim=1).tolist()
    if 0 in lengths:
        raise InputError(f"row {lengths.index(0)} of attention_mask masks all tokens: leave it out")
    here = mask.to(layers[0].device)
    states = torch.stack([layer.detach()[here] for layer in layers], dim=1).split(lengths)
    of_tokens = {"input_ids": input_ids} if input_ids is not None else {}
    of_tokens |= dict(fields or {})
    packed = {name: _packed(name, values, mask, lengths) for name, values in of_tokens.items()}
    of_examples = {
        name: _rows(name, values, len(lengths)) for name, values in (labels or {}).items()
    }
    return [
        BatchExample(
            states[i],
            packed["input_ids"][i] if input_ids is not None else None,
            {name: rows[i] for name, rows in of_examples.items()},
            {name: packed[name][i] for name in fields or ()},
        )
        for i in range(len(lengths))
    ]


def _layers(layout: Layout, hidden_states: object, dims: Sequence[str]) -> list[Tensor]:
    """A tensor (batch, seq, hidden) for each layer of the split."""
    wanted, hidden = layout.layers, layout.hidden_size
    if isinstance(hidden_states, list | tuple):
        layers = [torch.as_tensor(layer) for layer in hidden_states]
        if len(layers) != len(wanted):
            if len(layers) <= max(wanted):
                raise InputError(
                    f"{len(layers)} layers were given, and the split has {list(wanted)}: give all "
                    "of a forward pass, or one tensor for each of these"
                )
            layers = [layers[index] for index in wanted]
    else:
        states = torch.as_tensor(hidden_states)
        if states.ndim == 3 and len(wanted) == 1:
            states = states.unsqueeze(2)
        elif sorted(dims) != sorted(BATCH_DIMS):
            raise InputError(
                f"dims={dims!r}: give {', '.join(map(repr, BATCH_DIMS))} in the array's order"
            )
        elif states.ndim == len(BATCH_DIMS):
            states = states.permute([list(dims).index(dim) for dim in BATCH_DIMS])
        if states.ndim != len(BATCH_DIMS) or states.shape[2] != len(wanted):
            raise InputError(
                f"hidden_states are {tuple(states.shape)}: give (batch, seq, {len(wanted)} layers, "
                f"{hidden} channels), or a tensor (batch, seq, {hidden}) for each layer"
            )
        layers = list(states.unbind(2))
    for index, layer in zip(wanted, layers, strict=True):
        if (
            layer.ndim != 3
            or layer.shape[::2] != (layers[0].shape[0], hidden)
            or (layer.shape != layers[0].shape)
        ):
            raise InputError(
                f"layer {index} is {tuple(layer.shape)}: give (batch, seq, {hidden} channels), in "
                "all layers alike"
            )
    return layers


def _packed(name: str, values: object, mask: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    """Values of real tokens, (batch, seq, …), example by example."""
    array = torch.as_tensor(values).cpu()
    if array.shape[:2] != mask.shape:
        raise InputError(
            f"{name} is {tuple(array.shape)}: give (batch, seq, …), {tuple(mask.shape)}"
        )
    return list(torch.split(array[mask], lengths))


def _rows(name: str, values: object, count: int) -> Any:
    """Labels of examples, (batch, …), on the CPU."""
    rows = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if rows.shape[:1] != (count,):
        raise InputError(f"labels {name} are {rows.shape}: give one for each of {count} examples")
    return rows


Take = Callable[[list[Tensor], Tensor | None, Tensor | None], None]
"""Takes the layers of a batch, (batch, seq, hidden) each, its attention mask and its input ids."""


@contextmanager
def hooked(model: nn.Module, modules: Sequence[str] | None, take: Take) -> Iterator[None]:
    """Give what every forward pass of a model computes to a function.

    Args:
        model: Module that is called with a batch; with ``modules`` None, one of transformers.
        modules: Names of its modules, as ``named_modules`` has them, whose outputs are the layers;
            None takes the hidden states that it returns.
        take: Called at the end of each pass.

    Raises:
        InputError: A module is not there, or the model cannot return hidden states; in a pass, a
            module gave no tensor, or was not called.
    """
    outputs: dict[str, Tensor] = {}
    parameters = inspect.signature(model.forward)

    def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        outputs.clear()
        return args, kwargs if modules is not None else kwargs | {"output_hidden_states": True}

    def keep(name: str) -> Callable[..., None]:
        def kept(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, Tensor):
                raise InputError(f"module {name} gives {type(first).__name__}: name one of tensors")
            outputs[name] = first

        return kept

    def end(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = parameters.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if modules is None:
            states = getattr(output, "hidden_states", None)
            if not states:
                raise InputError(
                    f"{type(model).__name__} returned no hidden states: name modules=, or give "
                    "return_dict=True"
                )
        else:
            if idle := [name for name in modules if name not in outputs]:
                raise InputError(f"module {idle[0]} was not called in this forward pass")
            states = [outputs[name] for name in modules]
        mask, ids = given.get("attention_mask"), given.get("input_ids")
        take(list(states), mask, ids)
        outputs.clear()

    named = dict(model.named_modules())
    takes = parameters.parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
    if modules is None and not (any_name or "output_hidden_states" in takes):
        raise InputError(
            f"{type(model).__name__} takes no output_hidden_states: name modules= whose outputs "
            "are the layers"
        )
    with ExitStack() as hooks:
        for name in modules or ():
            if name not in named:
                raise InputError(
                    f"{type(model).__name__} has no module {name!r}: "
                    f"{did_you_mean(name, named)}named_modules() lists them"
                )
            hooks.callback(named[name].register_forward_hook(keep(name)).remove)
        hooks.callback(model.register_forward_pre_hook(ask, with_kwargs=True).remove)
        hooks.callback(model.register_forward_hook(end, with_kwargs=True).remove)
        yield
