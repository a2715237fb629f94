"""The heads by name.

A name is one of `HEADS`, one that an installed package offers as an entry point of the group
``bertvision.heads``, or the dotted path ``package.module:Class`` of a class of one's own. Plugins
and own classes are torch modules made with the keyword arguments ``layers`` and ``hidden``; a span
head maps hidden states (tokens, layers, hidden) and lengths (batch,) to a `SpanOutput`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import torch
from torch import nn

from bertvision.errors import InputError, UnknownNameError

BERT_LARGE_PARAMETERS = 335_141_888
"""Parameters of the BERT-large-uncased encoder with pooler."""

ENTRY_POINT_GROUP = "bertvision.heads"


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How a head is made. The target is imported when the head is built."""

    target: str
    """Dotted path ``package.module:Class``."""
    kwargs: Mapping[str, Any]
    """Keyword arguments beside ``layers`` and ``hidden``."""
    description: str
    """One line."""
    source: str = field(default="BERT Vision")
    """Where the head was described."""


def _adapter(size: int, *, shared: bool, skip: bool) -> HeadSpec:
    projection = "one projection for all layers" if shared else "one projection per layer"
    return HeadSpec(
        "bertvision.models.heads:AdapterSpanHead",
        {"size": size, "shared": shared, "skip": skip},
        f"every layer compressed to {size} by {projection}"
        + (", last layer concatenated" if skip else ""),
        "BERT Vision, after Houlsby et al. 2019",
    )


HEADS: dict[str, HeadSpec] = {
    "learned-pooling": HeadSpec(
        "bertvision.models.heads:PoolingSpanHead",
        {"learned": True},
        "learned weighted sum of the layers",
        "Tenney et al. 2019; Peters et al. 2018",
    ),
    "average-pooling": HeadSpec(
        "bertvision.models.heads:PoolingSpanHead", {"learned": False}, "mean of the layers"
    ),
    "adapter-64-shared": _adapter(64, shared=True, skip=False),
    "adapter-64-shared-skip": _adapter(64, shared=True, skip=True),
    "adapter-64-independent": _adapter(64, shared=False, skip=False),
    "adapter-64-independent-skip": _adapter(64, shared=False, skip=True),
    "adapter-386-shared": _adapter(386, shared=True, skip=False),
    "adapter-386-shared-skip": _adapter(386, shared=True, skip=True),
    "adapter-386-independent": _adapter(386, shared=False, skip=False),
    "adapter-386-independent-skip": _adapter(386, shared=False, skip=True),
}


class HeadInfo(NamedTuple):
    """A head as ``bertvision heads`` lists it."""

    name: str
    """Name that `build_head` takes."""
    description: str
    """One line."""
    trainable: int
    """Parameters that receive gradients."""
    total: int
    """All parameters and floating-point buffers, such as BatchNorm running statistics."""
    percent: float
    """``total`` in per cent of `BERT_LARGE_PARAMETERS`."""


def build_head(name: str, *, layers: int, hidden: int) -> nn.Module:
    """Make a head with fresh weights, from torch's global random generator.

    Args:
        name: a name of the registry or of a plugin, or a dotted path ``package.module:Class``.
        layers: number of hidden states of the encoder, the embedding output included.
        hidden: width of the hidden states.

    Raises:
        UnknownNameError: no head has this name.
        InputError: the class cannot be imported, or does not make a torch module.
    """
    make: Callable[..., object]
    kwargs: Mapping[str, Any] = {}
    if name in HEADS:
        make, kwargs = _resolve(HEADS[name].target), HEADS[name].kwargs
    elif ":" in name:
        make = _resolve(name)
    else:
        make = _load_plugin(name)
    try:
        inspect.signature(make).bind(layers=layers, hidden=hidden, **kwargs)
    except TypeError as error:
        raise InputError(
            f"head {name!r} cannot be made with layers={layers}, hidden={hidden} ({error}): its "
            "class must take the keyword arguments 'layers' and 'hidden', others need defaults"
        ) from None
    head = make(layers=layers, hidden=hidden, **kwargs)
    if not isinstance(head, nn.Module):
        raise InputError(f"head {name!r} is a {type(head).__name__}: it must be a torch.nn.Module")
    return head


def describe_heads(layers: int = 25, hidden: int = 1024) -> list[HeadInfo]:
    """All heads of the registry and of plugins, for an encoder of these dimensions.

    Heads are made on the meta device, so that nothing is allocated.

    Args:
        layers: number of hidden states of the encoder, the embedding output included.
        hidden: width of the hidden states.

    Raises:
        InputError: a dimension is below 1, or a plugin cannot be imported.
    """
    names = [*HEADS, *sorted(_plugins())]
    return [_describe(name, layers, hidden) for name in names]


def count_parameters(head: nn.Module) -> tuple[int, int]:
    """Parameters that receive gradients, and all with floating-point buffers (`HeadInfo`)."""
    trainable = sum(p.numel() for p in head.parameters() if p.requires_grad)
    total = sum(p.numel() for p in head.parameters())
    return trainable, total + sum(b.numel() for b in head.buffers() if b.is_floating_point())


def _describe(name: str, layers: int, hidden: int) -> HeadInfo:
    with torch.device("meta"):
        head = build_head(name, layers=layers, hidden=hidden)
    doc = (inspect.getdoc(head) or "").partition("\n")[0]
    trainable, total = count_parameters(head)
    return HeadInfo(
        name=name,
        description=HEADS[name].description if name in HEADS else doc,
        trainable=trainable,
        total=total,
        percent=100 * total / BERT_LARGE_PARAMETERS,
    )


def _plugins() -> dict[str, EntryPoint]:
    found = entry_points(group=ENTRY_POINT_GROUP)
    return {point.name: point for point in found if point.name not in HEADS}


def _load_plugin(name: str) -> Callable[..., object]:
    plugins = _plugins()
    if name not in plugins:
        close = difflib.get_close_matches(name, [*HEADS, *plugins], n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownNameError(
            f"there is no head {name!r}: {hint}`bertvision heads` lists them; "
            "a class of your own is given as package.module:Class"
        )
    return _resolve(f"{plugins[name].module}:{plugins[name].attr}")


def _resolve(target: str) -> Callable[..., object]:
    """Import ``package.module:Class``."""
    module_name, _, attribute = target.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"head {target!r} cannot be imported ({error}): give package.module:Class of an "
            "importable module"
        ) from error
    if not callable(found):
        raise InputError(f"head {target!r} is not a class: give package.module:Class")
    return found
