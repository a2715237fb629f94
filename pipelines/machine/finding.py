"""What an examination of the machine says."""

from __future__ import annotations

from typing import Literal, NamedTuple

Verdict = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    """``warning`` where something could be better, ``error`` where bertvision cannot be used."""
    found: str
    """What there is, with numbers."""
    advice: str = ""
    """What to change, in one sentence; empty where nothing is."""
