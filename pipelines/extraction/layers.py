"""Which layers are read, alone and end to end."""

from __future__ import annotations

from collections.abc import Sequence

from bertvision.errors import InputError

Layers = tuple[int, ...]
"""Hidden states of one input, in the order in which they stand end to end."""


def wanted_layers(
    layers: Sequence[int] | None, concat: Sequence[str], depth: int, stored: Sequence[int]
) -> list[Layers]:
    """The inputs of one pooling.

    Args:
        layers: indices of hidden states; None is all of them, without the pooler's output, which
            has the number ``depth + 1`` and is of [CLS] alone.
        concat: such as ``first+last``: ``first`` is 1, the output of the first transformer layer,
            ``last`` is ``depth``; numbers stand for themselves.
        depth: transformer layers of the encoder.
        stored: which there are, stored or to be.

    Raises:
        InputError: there is no such layer, or a part of ``concat`` cannot be read.
    """
    single = [i for i in stored if i <= depth] if layers is None else list(dict.fromkeys(layers))
    found = [(i,) for i in single] + [parse_concat(text, depth) for text in concat]
    for layer in sorted({i for key in found for i in key}):
        if layer not in stored:
            raise InputError(
                f"there is no layer {layer}: there are {', '.join(map(str, stored))}; choose of "
                "these"
            )
    return list(dict.fromkeys(found))


def parse_concat(text: str, depth: int, *, option: str = "--concat") -> Layers:
    """``first+last`` → (1, depth).

    Args:
        text: two layers or more between ``+``: ``first``, ``last`` or numbers.
        depth: transformer layers of the encoder.
        option: that the text was given by, for the message.

    Raises:
        InputError: it does not name two different layers or more.
    """
    names = {"first": 1, "last": depth}
    try:
        found = tuple(names[part] if part in names else int(part) for part in text.split("+"))
    except ValueError:
        found = ()
    if len(set(found)) < 2 or len(set(found)) < len(found):
        raise InputError(
            f"{option} {text!r}: join two different layers or more with '+', such as first+last or "
            f"0+{depth}"
        )
    return found


def layers_text(layers: Layers) -> str:
    """As people write it: ``3``, ``0+6``."""
    return "+".join(map(str, layers))
