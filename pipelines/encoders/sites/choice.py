"""Sites of a snapshot's encoder that are extracted: those that are meant, and those stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertvision.errors import ProvenanceError
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.encoders.hub import read_config
from bertvision.pipelines.encoders.sites.names import choose_sites

_SHOWN = 3


def snapshot_sites(folder: Path, patterns: Sequence[str]) -> tuple[str, ...]:
    """The names of the sites that patterns mean, in the order in which they are computed.

    Args:
        folder: of the snapshot.
        patterns: as of `choose_sites`.

    Raises:
        InputError: a pattern means no site of its encoder, or the family has no known sites.
    """
    config = read_config(folder, f"snapshot {folder.name}")
    return choose_sites(patterns, config.model_type, config.num_hidden_layers)


def check_same_sites(stored: StoredSplit, sites: Sequence[str]) -> None:
    """Refuse to go on with a split of other sites; what it lacks is said by name.

    Args:
        stored: a split of sites, whole or begun.
        sites: names of those that are wanted.

    Raises:
        ProvenanceError: it holds others.
    """
    held = stored.layer_names
    lacking = [name for name in sites if name not in held]
    more = [name for name in held if name not in sites]
    if not lacking and not more:
        return
    parts = [f"lacks {_some(lacking)}"] if lacking else []
    parts += [f"holds {_some(more)} beside those that are asked for"] if more else []
    raise ProvenanceError(
        f"{stored.name} in {stored.storage} {' and '.join(parts)}: its sites were chosen when it "
        "was begun; take the same, another --store, or remove it with "
        f"`bertvision store rm {stored.name}`"
    )


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
