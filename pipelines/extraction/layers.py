"""The layers that are read, alone and end to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bertvision.errors import InputError
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.workspace.job_options import ExtractOptions

Layers = tuple[int, ...]
"""Hidden states of one input, in the order in which they stand end to end."""
LayerChoice = Callable[[Sequence[int]], list[Layers]]
"""The inputs that were asked for, out of the indices of what is stored."""


def needed_layers(choice: LayerChoice, poolings: Sequence[TokenPooling], depth: int) -> list[int]:
    """Every hidden state that is read, known before anything is extracted.

    Args:
        choice: Choice of the inputs.
        poolings: Poolings of the tokens.
        depth: transformer layers of the encoder.

    Raises:
        InputError: as ``choice``.
    """
    offered = [kept_layers(None, depth, pooler=True, tokens=pooling) for pooling in poolings]
    return sorted({i for stored in offered for layers in choice(stored) for i in layers})


def kept_layers(
    layers: Sequence[int] | None, num_hidden_layers: int, *, pooler: bool, tokens: TokenPooling
) -> tuple[int, ...]:
    """Indices of the hidden states to keep, ascending.

    Args:
        layers: Layers that were asked for; negative ones count from the end; None is all there is.
        num_hidden_layers: Number of layers of the encoder.
        pooler: Whether the snapshot has one.
        tokens: Kept tokens; only beside the [CLS] alone stands the pooler output, as the last.

    Raises:
        InputError: the encoder has no such hidden state.
    """
    offered = pooler and tokens == "cls"
    depth = num_hidden_layers + 1
    states = depth + offered
    if layers is None:
        return tuple(range(states))
    # the last hidden state is −1 whether there is a pooler output or not
    wanted = sorted({layer + depth if layer < 0 else layer for layer in layers})
    if not wanted or wanted[0] < 0 or wanted[-1] >= states:
        allowed = f"hidden states 0 (embedding output) to {num_hidden_layers}"
        if offered:
            allowed += f", and its pooler output as {num_hidden_layers + 1}"
        elif pooler:
            allowed += "; its pooler output is kept with --pool cls"
        raise InputError(f"layers {list(layers)}: the encoder has {allowed}")
    return tuple(wanted)


def layers_of_tokens(
    options: ExtractOptions, num_hidden_layers: int, *, pooler: bool
) -> dict[TokenPooling, tuple[int, ...]]:
    """Indices of the hidden states, or of the sites, that are kept, by what is kept of a window.

    Args:
        options: Tokens and layers, or sites, that are kept.
        num_hidden_layers: Number of layers of the encoder.
        pooler: Whether the snapshot has one.

    Raises:
        InputError: the encoder has no such hidden state.
    """
    depth, tokens = num_hidden_layers, options.tokens or ()
    layers = {t: kept_layers(options.layers, depth, pooler=pooler, tokens=t) for t in tokens}
    return dict.fromkeys(tokens, tuple(range(len(options.sites)))) if options.sites else layers


def wanted_layers(
    layers: Sequence[int] | None, concat: Sequence[str], depth: int, stored: Sequence[int]
) -> list[Layers]:
    """The inputs of one pooling.

    Args:
        layers: indices of hidden states; None is all of them, without the pooler's output, which
            has the number ``depth + 1`` and is of [CLS] alone.
        concat: see `parse_concat`.
        depth: transformer layers of the encoder.
        stored: Layers that there are, stored or to be.

    Raises:
        InputError: there is no such layer, or a part of ``concat`` cannot be read.
    """
    single = _all(depth, stored) if layers is None else [(layer,) for layer in layers]
    return _held([*single, *(parse_concat(text, depth) for text in concat)], stored)


def parse_inputs(text: str, depth: int, stored: Sequence[int]) -> list[Layers]:
    """``all``, ``0,3,first+last`` → the inputs of one pooling, each once, in the order given.

    Args:
        text: parts between commas: ``all`` as None of `wanted_layers`, a number, ``first``,
            ``last``, or several as `parse_concat` reads them.
        depth: transformer layers of the encoder.
        stored: Layers that there are, stored or to be.

    Raises:
        InputError: a part is none of these, joins a layer with itself, or there is no such hidden
            state.
    """
    layers: list[Layers] = []
    for part in map(str.strip, text.split(",")):
        if part == "all":
            layers += _all(depth, stored)
        elif "+" in part:
            layers.append(parse_concat(part, depth, option="--layers"))
        else:
            try:
                layers.append((_layer(part, depth),))
            except ValueError:
                raise InputError(
                    f"--layers {text!r}: {part!r} is no layer; give all, numbers, first or last, "
                    "between commas, joined by + where they are to be put end to end, such as "
                    "all,first+last"
                ) from None
    return _held(layers, stored)


def parse_concat(text: str, depth: int, *, option: str = "--concat") -> Layers:
    """``first+last`` → (1, depth).

    Args:
        text: two layers or more between ``+``: ``first``, the output of the first transformer
            layer, ``last`` or numbers.
        depth: transformer layers of the encoder.
        option: Option that the text was given by, for the message.

    Raises:
        InputError: it does not name two different layers or more.
    """
    try:
        places = tuple(_layer(part, depth) for part in text.split("+"))
    except ValueError:
        places = ()
    if len(set(places)) < 2 or len(set(places)) < len(places):
        raise InputError(
            f"{option} {text!r}: join two different layers or more with '+', such as first+last or "
            f"0+{depth}"
        )
    return places


def layers_text(layers: Layers) -> str:
    """As people write it: ``3``, ``0+6``."""
    return "+".join(map(str, layers))


def _layer(name: str, depth: int) -> int:
    names = {"first": 1, "last": depth}
    return names[name.strip()] if name.strip() in names else int(name)


def _all(depth: int, stored: Sequence[int]) -> list[Layers]:
    return [(layer,) for layer in stored if layer <= depth]


def _held(inputs: list[Layers], stored: Sequence[int]) -> list[Layers]:
    """Each once; refused where a layer is not stored."""
    for layer in sorted({layer for layers in inputs for layer in layers}):
        if layer not in stored:
            layers_text = ",".join(map(str, stored))
            raise InputError(f"there is no layer {layer}; there are {layers_text}: choose of these")
    return list(dict.fromkeys(inputs))
