"""Settings of a trained lens; nothing heavy is imported for them."""

from __future__ import annotations

from typing import NamedTuple


class LensOptions(NamedTuple):
    """How the heads of a trained lens learn."""

    steps: int = 500
    """Optimiser steps, of about 512 tokens each."""
    dropout: float = 0.5
    """Share of the channels of a state that are set to zero, anew for each token and step."""
    lr: float = 1e-3
    """Learning rate of Adam at the beginning; it falls linearly to 0."""
    seed: int = 0
    """Seed of the order of examples and of dropout."""
