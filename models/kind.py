"""The kinds of heads, for whoever names one and needs no torch."""

from typing import Literal

Kind = Literal["span", "classification"]
"""What the logits of a head are of: the tokens of a span, or the classes of an example."""
