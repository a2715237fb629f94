"""The card of a repository: its README.md, made of what is recorded and of nothing else.

What no record says is left out. A name is only written where it is one on the hub: of a local
folder stands there that it is one, not where it lay.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertvision.pipelines.text import size

LIBRARY = "bertvision"
_HUB_NAME = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?", re.ASCII)
ENCODER = {
    "weights_sha256": "weights",
    "config_sha256": "configuration",
    "tokenizer_sha256": "tokenizer",
    "data_sha256": "data",
}
"""Digests in a provenance, as a card names them."""


def on_hub(name: object) -> str | None:
    """A model's name, where it is one on the hub and no folder of somebody's disk."""
    text = str(name or "")
    return text if _HUB_NAME.fullmatch(text) and not Path(text).exists() else None


def encoder_name(provenance: Mapping[str, Any]) -> str:
    """What the encoder is called: its name on the hub with the revision, or that it is local."""
    name, revision = on_hub(provenance.get("model")), provenance.get("model_revision")
    if name is None:
        return "a local folder (its digests are below)"
    return f"[{name}](https://huggingface.co/{name})" + (f" at `{revision}`" if revision else "")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; what is None is an empty cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def facts(values: Mapping[str, object]) -> str:
    """Names and values as a table; what is None or empty is left out."""
    return table(
        ["", ""], [(name, value) for name, value in values.items() if value not in (None, "", ())]
    )


def code(text: str, language: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.strip()}\n```"


def page(metadata: str, title: str, sections: Sequence[str]) -> bytes:
    """The card: YAML for the hub, then Markdown.

    Args:
        metadata: in YAML.
        title: of the page.
        sections: in order; an empty one is left out.
    """
    text = "\n\n".join([f"---\n{metadata.strip()}\n---", f"# {title}", *filter(None, sections)])
    return f"{text}\n".encode()


def digests(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The digests of a provenance, by what they are of."""
    return {
        f"sha256 of the {name}": f"`{provenance[key]}`"
        for key, name in ENCODER.items()
        if provenance.get(key)
    }


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def bytes_text(n: int) -> str:
    """Bytes as people read them, and in full."""
    return f"{size(n)} ({n:,} bytes)"
