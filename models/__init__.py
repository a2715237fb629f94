"""Heads on hidden states, as plain torch modules.

Nothing here knows a disk, a store or Lightning.
"""

from typing import Literal

Kind = Literal["span", "classification", "token"]
"""Subject of a head's logits: the tokens of a span, the classes of an example, or the classes of
each token, for which span heads are given an output layer of their own."""
