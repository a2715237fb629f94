"""The sites of an encoder by name, and where `families` has them.

The names are those of TransformerLens, which SAELens takes as ``hook_name`` too: blocks count from
0, and ``blocks.3`` lies between the hidden states 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.encoders.families import FAMILIES

FINAL_NORM = "ln_final.hook_normalized"
"""The last hidden state after a final normalisation, of families that have one."""


class Site(NamedTuple):
    """Where the activations of a site are seen in a forward pass."""

    block: int
    """The block that must have been computed, counted from 0."""
    module: str
    """Path of a module in the encoder."""
    side: Literal["reads", "gives"]
    """Whether the module's first input or its output is meant."""


def sites_of(model_type: str, depth: int) -> dict[str, Site]:
    """The sites of an encoder by name, in the order in which they are computed.

    Args:
        model_type: Model type of its configuration, such as ``bert``.
        depth: Number of layers it has.

    Raises:
        InputError: the modules of the family are not known.
    """
    if (family := FAMILIES.get(model_type)) is None:
        raise InputError(
            f"no sites are known of a {model_type} encoder: there are those of "
            f"{', '.join(FAMILIES)}; its hidden states can be extracted, without --sites"
        )
    sites: dict[str, Site] = {}
    for i in range(depth):
        block = f"{family.blocks}.{i}"

        def see(name: str, side: Literal["reads", "gives"], module: str, number: int = i) -> None:
            sites[f"blocks.{number}.hook_{name}"] = Site(number, module, side)

        see("resid_pre", "reads", block)
        see("attn_out", "gives", f"{block}.{family.attn_out}")
        if family.resid_mid is not None:
            see("resid_mid", "reads", f"{block}.{family.resid_mid}")
        see("mlp_out", "gives", f"{block}.{family.mlp_out}")
        if family.resid_post is None:
            see("resid_post", "gives", block)
        else:
            see("resid_post", "reads", f"{block}.{family.resid_post}")
            see("normalized_resid_post", "gives", f"{block}.{family.resid_post}")
    if family.ln_final is not None:
        sites[FINAL_NORM] = Site(depth - 1, family.ln_final, "gives")
    return sites


def choose_sites(patterns: Sequence[str], model_type: str, depth: int) -> tuple[str, ...]:
    """The names that patterns mean, each once, in the order in which they are computed.

    Args:
        patterns: names, in which ``*`` stands for anything, ``?`` for a character and ``[36]`` for
            one of some, such as ``blocks.*.hook_mlp_out``.
        model_type: Model type of the encoder's configuration.
        depth: Number of layers it has.

    Raises:
        InputError: a pattern means no site of the encoder, or its family has no known sites.
    """
    names = sites_of(model_type, depth)
    for pattern in patterns:
        _require(pattern, names, f"a {model_type} encoder of {depth} layers")
    return tuple(n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns))


def check_patterns(patterns: Sequence[str], depth: int) -> None:
    """Refuse patterns that mean no site of any family, before anything heavy is imported.

    Args:
        patterns: As in `choose_sites`.
        depth: Number of layers the encoder has at most.

    Raises:
        InputError: one means none.
    """
    names = [name for family in FAMILIES for name in sites_of(family, depth)]
    for pattern in patterns:
        _require(pattern, dict.fromkeys(names), f"an encoder of {depth} layers")


def _require(pattern: str, names: dict[str, Site] | dict[str, None], encoder: str) -> None:
    if any(fnmatchcase(name, pattern) for name in names):
        return
    first = [name for name in names if name.startswith("blocks.0.")]
    others = [name for name in names if not name.startswith("blocks.")]
    raise InputError(
        f"--sites {pattern!r} means no site of {encoder}: there are "
        f"{', '.join([*first, *others])}, and those of the other blocks; write * for any of them, "
        "such as blocks.*.hook_mlp_out"
    )
