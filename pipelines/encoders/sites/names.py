"""The sites of an encoder by name, and where `families` has them.

The names are those of TransformerLens, which SAELens takes as ``hook_name`` too: blocks count from
0, and ``blocks.3`` lies between the hidden states 3 and 4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.encoders.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
    what: Literal["residual", "heads", "neurons"] = "residual"
    """Channels: those of the residual stream, of all attention heads side by side, or of the
    feed-forward layer."""

    def width(self, config: PreTrainedConfig) -> int:
        """Number of channels in an encoder of this configuration."""
        hidden = int(config.hidden_size)
        if self.what == "heads":
            heads = int(config.num_attention_heads)
            return heads * int(getattr(config, "head_dim", None) or hidden // heads)
        if self.what == "neurons":
            attribute = FAMILIES[config.model_type].intermediate_size
            return int(getattr(config, attribute) or 4 * hidden)
        return hidden


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

        def see(name: str, *site: Any, number: int = i) -> None:
            sites[f"blocks.{number}.{name}"] = Site(number, *site)

        see("hook_resid_pre", block, "reads")
        see("attn.hook_z", f"{block}.{family.attn_proj}", "reads", "heads")
        see("hook_attn_out", f"{block}.{family.attn_out or family.attn_proj}", "gives")
        if family.resid_mid is not None:
            see("hook_resid_mid", f"{block}.{family.resid_mid}", "reads")
        see("mlp.hook_post", f"{block}.{family.mlp_proj}", "reads", "neurons")
        see("hook_mlp_out", f"{block}.{family.mlp_out}", "gives")
        if family.resid_post is None:
            see("hook_resid_post", block, "gives")
        else:
            see("hook_resid_post", f"{block}.{family.resid_post}", "reads")
            see("hook_normalized_resid_post", f"{block}.{family.resid_post}", "gives")
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


def width_of(sites: Sequence[str], config: PreTrainedConfig) -> int:
    """Channels of the hidden states of an encoder, or of sites of it, which have one width.

    Args:
        sites: names of sites; empty for hidden states.
        config: Configuration of the encoder.

    Raises:
        InputError: the sites are of several widths, which no split holds.
    """
    if not sites:
        return int(config.hidden_size)
    known, names = sites_of(config.model_type, config.num_hidden_layers), dict[int, list[str]]()
    for name in sites:
        names.setdefault(known[name].width(config), []).append(name)
    if len(names) > 1:
        calls = (
            f"{','.join(_kinds(names[width]))} ({width:,} channels)" for width in sorted(names)
        )
        raise InputError(
            f"--sites means sites of {len(names)} widths, and a split holds those of one: take a "
            f"call for each width, with sites of {' or of '.join(calls)}"
        )
    return next(iter(names))


def _kinds(sites: Sequence[str]) -> list[str]:
    """Names with * for the number of the block, each once."""
    return list(dict.fromkeys(re.sub(r"^blocks\.\d+", "blocks.*", name) for name in sites))


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
