"""Hidden states of a token made smaller before a body of convolutions reads them."""

from __future__ import annotations

from torch import Tensor, nn

from bertvision.models.adapters import SharedAdapter
from bertvision.models.pooling import Pooling, make_pooling


class Reduction(nn.Module):
    """Pool the layers, compress the result with an adapter, either or neither.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        pooling: how the layers become one, or None to keep them.
        size: width of a `SharedAdapter` after that, or None to keep the width.
    """

    def __init__(self, layers: int, hidden: int, pooling: Pooling | None, size: int | None) -> None:
        super().__init__()
        self.channels = layers if pooling is None else 1
        self.width = hidden if size is None else size
        self.pooling = None if pooling is None else make_pooling(pooling, layers, hidden)
        self.adapter = None if size is None else SharedAdapter(hidden, size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Reduce: (tokens, layers, hidden) → (tokens, channels, width)."""
        if self.pooling is not None:
            hidden_states = self.pooling(hidden_states).unsqueeze(1)
        return hidden_states if self.adapter is None else self.adapter(hidden_states)
