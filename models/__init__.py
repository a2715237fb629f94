"""What is learned: heads on hidden states, as plain torch modules.

Nothing here knows a disk, a store or Lightning.
"""

from typing import Literal

Kind = Literal["span", "classification"]
"""What the logits of a head are of: the tokens of a span, or the classes of an example."""
