"""Heads on hidden states, as plain torch modules.

Nothing here knows a disk, a store or Lightning.
"""

from typing import Literal

Kind = Literal["span", "classification"]
"""Subject of a head's logits: the tokens of a span, or the classes of an example."""
