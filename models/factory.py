"""Heads by name: how they are found, made, counted and listed.

A name is one of `HEADS`, one that an installed package offers as an entry point of the group
``bertvision.heads``, or the dotted path ``package.module:Class`` of a class of one's own. Plugins
and own classes are torch modules made with the keyword arguments ``layers`` and ``hidden``. They
map hidden states (tokens, layers, hidden) and lengths (batch,) to a `SpanOutput`, or, if the class
attribute ``kind`` is ``"classification"``, hidden states of one token per example to a
`ClassOutput`. A classification head that also takes ``classes`` is good for any task; one that does
not, for two classes.

Costs of a head: its parameters, and its arithmetic beside that of the encoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeGuard, get_args

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bertvision.errors import InputError, UnknownNameError
from bertvision.models import Kind
from bertvision.models.heads import SpanHead
from bertvision.models.zoo import HEADS as HEADS
from bertvision.models.zoo import HeadSpec as HeadSpec
from bertvision.models.zoo import check_head, plugins
from bertvision.plugins import load_class

_TOKENS = 64  # of a window, so that convolutions over tokens see what they usually see
_DECLARED: tuple[Kind, ...] = ("span", "classification")
"""Kinds that a class may have; a head for words is a span head that was told so."""
_COSTLY = {"span": 0.25, "token": 0.25, "classification": 8.0}
"""Multiplications per token that are too many where all heads are meant, in parts of the encoder's.
A span head then takes about as long to train as the encoder to run; a classification head sees one
token of a window of a hundred and more."""


def count_parameters(head: nn.Module) -> tuple[int, int]:
    """Parameters that receive gradients, and all with floating-point buffers.

    BatchNorm's running mean and variance are such buffers; the paper counts them.
    """
    trainable = sum(p.numel() for p in head.parameters() if p.requires_grad)
    total = sum(p.numel() for p in head.parameters())
    return trainable, total + sum(b.numel() for b in head.buffers() if b.is_floating_point())


def multiplications(head: nn.Module, kind: Kind, *, layers: int, hidden: int) -> int | None:
    """Multiplications of a forward pass per token, of matrix products and convolutions.

    Args:
        head: Head on the meta device: nothing is computed, operations are counted.
        kind: Kind of the head.
        layers: number of hidden states that it takes.
        hidden: width of the hidden states.

    Returns:
        None where it does what the meta device cannot, as a head of one's own may.
    """
    states = torch.empty(_TOKENS, layers, hidden, device="meta")
    lengths = torch.tensor([_TOKENS]) if kind == "span" else torch.ones(_TOKENS, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            head(states, lengths)
    except Exception:  # code of the user's own may raise anything
        return None
    return int(counter.get_total_flops()) // 2 // _TOKENS


def encoder_multiplications(layers: int, hidden: int) -> int:
    """Multiplications per token of the linear layers of BERT with so many hidden states.

    12 · hidden² in each layer: query, key, value, output, and twice 4 · hidden² around the
    activation. Attention's own products, which depend on the window, come on top.
    """
    return 12 * hidden**2 * max(layers - 1, 1)


def is_costly(kind: Kind, count: int | None, layers: int, hidden: int) -> bool:
    """Whether a head is so expensive beside its encoder that it is trained only when named."""
    return count is not None and count > _COSTLY[kind] * encoder_multiplications(layers, hidden)


BERT_LARGE_PARAMETERS = 335_141_888
"""Parameters of the BERT-large-uncased encoder with pooler."""


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
    kind: Kind
    """Subject of its logits: ``span`` or ``classification``."""
    multiplications: int | None
    """Multiplications of a forward pass, per token."""
    costly: bool
    """Expensive beside an encoder of these dimensions: left out where all heads are meant."""
    source: str
    """Where it was described; of a plugin, the class."""


def build_head(
    name: str, *, layers: int, hidden: int, classes: int = 2, kind: Kind | None = None
) -> nn.Module:
    """Make a head with fresh weights, from torch's global random generator.

    Args:
        name: a name of the registry or of a plugin, or a dotted path ``package.module:Class``.
        layers: number of hidden states of the encoder, the embedding output included.
        hidden: width of the hidden states.
        classes: Number of logits of a classification head, 1 for a score; of a token with
            ``kind`` token; span heads have nothing to do with it.
        kind: ``token`` gives a span head an output layer for the classes of each token; None, and
            any other, leaves a head what it is.

    Raises:
        UnknownNameError: no head has this name.
        InputError: the class cannot be imported, does not make a torch module, or makes one for two
            classes alone where there are others.
    """
    make: Callable[..., object]
    kwargs: Mapping[str, Any] = {}
    if check_head(name) in HEADS:
        make, kwargs = load_class(HEADS[name].target, "head"), HEADS[name].kwargs
    elif ":" in name:
        make = load_class(name, "head", named=True)
    else:
        make = load_class(plugins()[name], "head")
    # a class says what it is; of a function, only what it makes
    classifies = not inspect.isclass(make) or getattr(make, "kind", "span") == "classification"
    takes = classifies and "classes" in inspect.signature(make).parameters
    if takes:
        kwargs = {**kwargs, "classes": classes}
    try:
        if getattr(make, "__init__", None) is nn.Module.__init__:  # whose signature takes anything
            raise TypeError("it has no __init__ of its own")
        if lacking := sorted(getattr(make, "__abstractmethods__", ())):
            raise TypeError(f"it lacks {', '.join(lacking)}")
        inspect.signature(make).bind(layers=layers, hidden=hidden, **kwargs)
    except TypeError as error:
        raise InputError(
            f"head {name!r} cannot be made with layers={layers}, hidden={hidden} ({error}): its "
            "class must take the keyword arguments 'layers' and 'hidden', others need defaults"
        ) from None
    head = make(layers=layers, hidden=hidden, **kwargs)
    if not isinstance(head, nn.Module):
        raise InputError(f"head {name!r} is a {type(head).__name__}: it must be a torch.nn.Module")
    if classes != 2 and not takes and kind_of(head) == "classification":
        raise InputError(
            f"head {name!r} is for two classes, and there are {classes} (1: a score): its class "
            "must take the keyword argument 'classes'"
        )
    if kind == "token":
        if not _labels_words(head):
            raise InputError(
                f"head {name!r} labels no words: its class must inherit from bertvision.SpanHead, "
                "with the forward pass of that, whose output layer is made for classes of tokens; "
                "`bertvision heads --kind token` lists such heads"
            )
        head.label_tokens(classes)
    return head


def describe_heads(
    layers: int = 25, hidden: int = 1024, kind: Kind | None = None
) -> list[HeadInfo]:
    """All heads of the registry and of plugins, for an encoder of these dimensions.

    Heads are made on the meta device, so that nothing is allocated. Classification heads are made
    for one state more, the pooler output.

    Args:
        layers: number of hidden states of the encoder, the embedding output included.
        hidden: width of the hidden states.
        kind: list this kind alone.

    Raises:
        UnknownNameError: there is no such kind.
        InputError: a dimension is below 1 or too small for a head, or a plugin cannot be imported.
    """
    if kind not in (None, *get_args(Kind)):
        raise UnknownNameError(f"there is no kind {kind!r} of heads: {' or '.join(get_args(Kind))}")
    registered = [name for name, spec in HEADS.items() if kind is None or spec.learns(kind)]
    named = [*registered, *sorted(plugins())]
    if kind == "token":
        with torch.device("meta"):
            made = {name: build_head(name, layers=layers, hidden=hidden) for name in named}
        named = [name for name, head in made.items() if _labels_words(head)]
    infos = (describe_head(name, layers, hidden) for name in named)
    return [info for info in infos if kind in (None, "token", info.kind)]


def _labels_words(head: nn.Module) -> TypeGuard[SpanHead]:
    """Whether a head can get an output layer for the classes of tokens."""
    return isinstance(head, SpanHead) and type(head).forward is SpanHead.forward


def kind_of(head: nn.Module) -> Kind:
    """Subject of a head's logits: its class attribute ``kind``, ``span`` without one.

    Raises:
        InputError: the attribute is something else.
    """
    kind: Kind = getattr(head, "kind", "span")
    if kind not in _DECLARED and not (kind == "token" and "kind" in vars(head)):
        raise InputError(
            f"{type(head).__name__}.kind is {kind!r}: it must be {' or '.join(_DECLARED)}"
        )
    return kind


def describe_head(name: str, layers: int = 25, hidden: int = 1024) -> HeadInfo:
    """A head for an encoder of these dimensions; see `describe_heads`.

    Args:
        name: As in `build_head`.
        layers: number of hidden states of the encoder, the embedding output included.
        hidden: width of the hidden states.

    Raises:
        UnknownNameError: no head has this name.
        InputError: a dimension is below 1 or too small for the head, or it cannot be imported.
    """
    return (_registered if name in HEADS else _describe)(name, layers, hidden)


@cache
def _registered(name: str, layers: int, hidden: int) -> HeadInfo:
    return _describe(name, layers, hidden)  # kept: counting operations takes a tenth of a second


def _describe(name: str, layers: int, hidden: int) -> HeadInfo:
    with torch.device("meta"):
        head = build_head(name, layers=layers, hidden=hidden)
        kind = kind_of(head)
        states = layers + (kind == "classification")
        if states != layers:
            head = build_head(name, layers=states, hidden=hidden)
    doc = (inspect.getdoc(head) or "").partition("\n")[0]
    trainable, total = count_parameters(head)
    count = multiplications(head, kind, layers=states, hidden=hidden)
    spec = HEADS.get(name)
    return HeadInfo(
        name=name,
        description=spec.description if spec else doc,
        trainable=trainable,
        total=total,
        percent=100 * total / BERT_LARGE_PARAMETERS,
        kind=kind,
        multiplications=count,
        costly=is_costly(kind, count, layers, hidden),
        source=spec.source if spec else plugins().get(name, name),
    )
