"""Hidden states as a forward pass gives them: padded batches of a tensor for each layer, hooks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
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
        labels: Row of each label, by name.
        fields: Fields by name, (seq, …) each.
    """

    hidden_states: Tensor
    input_ids: Tensor | None
    labels: dict[str, Any]
    fields: dict[str, Tensor]
    logits: Tensor | None


def batch_examples(
    layout: Layout,
    hidden_states: object,
    attention_mask: object,
    dims: Sequence[str],
    input_ids: object,
    labels: Mapping[str, object] | None,
    fields: Mapping[str, object] | None,
    logits: object = None,
) -> list[BatchExample]:
    """The examples of a batch; arguments are those of `ActivationWriter.add_batch`.

    Raises:
        InputError: Shapes do not go together.
    """
    layers = _layers(layout, hidden_states, dims)
    mask = _real(attention_mask, layers[0].shape[:2])
    lengths = mask.sum(dim=1).tolist()
    if 0 in lengths:
        raise InputError(f"row {lengths.index(0)} of attention_mask masks all tokens: leave it out")
    dtype = reduce(torch.promote_types, (layer.dtype for layer in layers))
    shape = (sum(lengths), len(layers), layout.hidden_size)
    states = torch.empty(shape, dtype=dtype, device=layers[0].device)
    for position, layer in enumerate(layers):  # each may lie on a device of its own
        states[:, position] = layer.detach()[mask.to(layer.device)]
    of_tokens = {"input_ids": input_ids} if input_ids is not None else {}
    of_tokens |= dict(fields or {})
    packed = {name: _packed(name, values, mask, lengths) for name, values in of_tokens.items()}
    top = [] if logits is None else _packed("logits", logits, mask, lengths)
    of_examples = {
        name: _rows(name, values, len(lengths)) for name, values in (labels or {}).items()
    }
    return [
        BatchExample(
            part,
            packed["input_ids"][i] if input_ids is not None else None,
            {name: rows[i] for name, rows in of_examples.items()},
            {name: packed[name][i] for name in fields or ()},
            top[i] if logits is not None else None,
        )
        for i, part in enumerate(states.split(lengths))
    ]


def _layers(layout: Layout, hidden_states: object, dims: Sequence[str]) -> list[Tensor]:
    """A tensor (batch, seq, hidden) for each layer of the split."""
    wanted, hidden = layout.layers, layout.hidden_size
    named = "layer_names" in layout.provenance
    whole = not isinstance(hidden_states, list | tuple)
    states = _tensor("hidden_states", hidden_states) if whole else None
    one = states is not None and states.ndim == 3 and len(wanted) == 1
    if (states is None or one) and tuple(dims) != BATCH_DIMS:
        raise InputError(f"dims={dims!r} are of one tensor of all layers: leave them out")
    if isinstance(hidden_states, list | tuple):
        layers = [_tensor(f"layer {i} given", x) for i, x in enumerate(hidden_states)]
        if len(layers) != len(wanted):
            if named or len(layers) <= max(wanted):
                given = json.loads(str(layout.provenance["layer_names"])) if named else list(wanted)
                raise InputError(
                    f"{len(layers)} layers were given, and the split has {given}: give "
                    f"{'' if named else 'all of a forward pass, or '}one tensor for each of these"
                )
            layers = [layers[index] for index in wanted]
    elif states is not None:
        if one:
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


def _tensor(name: str, value: object) -> Tensor:
    """A dense tensor of what was given."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: {type(value).__name__} is no array: {error}") from None
    if tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"{name} is sparse, or has no values: give a dense tensor")
    return tensor


def _real(attention_mask: object, shape: torch.Size) -> Tensor:
    """Whether each token is real, (batch, seq), on the CPU."""
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool)
    mask = _tensor("attention_mask", attention_mask).cpu()
    if mask.shape != shape:
        raise InputError(
            f"attention_mask is {tuple(mask.shape)}: give (batch, seq) = {tuple(shape)}"
        )
    real = mask != 0
    if not torch.equal(real.to(mask.dtype), mask):
        strange = mask[real & (mask != 1)][0].item()
        raise InputError(
            f"attention_mask holds {strange}: give 1 or True at real tokens, 0 or False at padding"
        )
    return real


def _packed(name: str, values: object, mask: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    """Values of real tokens, (batch, seq, …), example by example."""
    array = _tensor(name, values).cpu()
    if array.shape[:2] != mask.shape:
        raise InputError(
            f"{name} is {tuple(array.shape)}: give (batch, seq, …), {tuple(mask.shape)}"
        )
    return list(torch.split(array[mask], lengths))


def _rows(name: str, values: object, count: int) -> Any:
    """Labels of examples, (batch, …), on the CPU."""
    try:
        rows = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InputError(f"labels {name} are no array: {error}") from None
    if rows.shape[:1] != (count,):
        raise InputError(f"labels {name} are {rows.shape}: give one for each of {count} examples")
    return rows


Take = Callable[[list[Tensor], Tensor | None, Tensor | None, Tensor | None], None]
"""Takes the layers of a batch, (batch, seq, hidden) each, its attention mask, its input ids, and
the logits of a model with an output layer, (batch, seq, vocabulary)."""


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
            module gave no tensor or was not called once, the attention mask cannot be told, or
            the pass continues a cache.
    """
    _check_hooked(model, modules)
    outputs: dict[str, Tensor] = {}
    parameters = inspect.signature(model.forward)
    rest = {p.kind: name for name, p in parameters.parameters.items()}
    running: list[Mapping[str, Any]] = []

    def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = dict(parameters.bind_partial(*args, **kwargs).arguments)
        if given.pop(rest.get(inspect.Parameter.VAR_POSITIONAL, ""), None):
            raise InputError(
                f"{type(model).__name__}.forward does not name its arguments: give attention_mask "
                "and the others by name"
            )
        given |= given.pop(rest.get(inspect.Parameter.VAR_KEYWORD, ""), {})
        cache = given.get("past_key_values")
        length = getattr(cache, "get_seq_length", None)
        if length() if length else cache:
            raise InputError(
                "this pass continues a cache (past_key_values), as generate does, and computes the "
                "new tokens alone: generate first, then call the model once on the whole texts"
            )
        outputs.clear()
        running[:] = [given]
        return args, kwargs if modules is not None else kwargs | {"output_hidden_states": True}

    def keep(name: str) -> Callable[..., None]:
        def kept(_: nn.Module, __: Any, output: Any) -> None:
            if not running:  # a checkpointed block that a backward pass computes again
                return
            first = output[0] if isinstance(output, tuple) and output else output
            if not isinstance(first, Tensor):
                raise InputError(f"module {name} gives {type(first).__name__}: name one of tensors")
            if name in outputs:
                raise InputError(
                    f"module {name} was called twice in this forward pass, as shared layers are: "
                    "name modules that are called once, or give add_batch the states"
                )
            outputs[name] = first.detach().clone()  # what follows may change it in place

        return kept

    def end(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        given = running.pop()
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
        logits = getattr(output, "logits", None)
        take(list(states), given.get("attention_mask"), given.get("input_ids"), logits)
        outputs.clear()

    named = dict(model.named_modules())
    with ExitStack() as hooks:
        for name in modules or ():
            hooks.callback(named[name].register_forward_hook(keep(name)).remove)
        hooks.callback(model.register_forward_pre_hook(ask, with_kwargs=True).remove)
        hooks.callback(model.register_forward_hook(end, with_kwargs=True).remove)
        yield


def _check_hooked(model: nn.Module, modules: Sequence[str] | None) -> None:
    """Check that a model can be hooked, and has these modules.

    Raises:
        InputError: It cannot, or has not.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is {type(model).__name__}: give a torch module, such as its .model"
        )
    if modules is None:
        takes = inspect.signature(model.forward).parameters
        any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
        if not (any_name or "output_hidden_states" in takes):
            raise InputError(
                f"{type(model).__name__} takes no output_hidden_states: name modules= whose "
                "outputs are the layers"
            )
        return
    if isinstance(modules, str):
        raise InputError(f"modules={modules!r}: give a list of names, one for each layer")
    named = dict(model.named_modules())
    for name in modules:
        if name not in named:
            raise InputError(
                f"{type(model).__name__} has no module {name!r}: "
                f"{did_you_mean(name, named)}named_modules() lists them"
            )
    if len({*modules}) < len(modules):
        raise InputError(f"modules={list(modules)}: name each once")
