"""Classification heads: a logit per class from one vector per example and state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from bertvision.errors import InputError
from bertvision.models.heads import Head
from bertvision.models.outputs import ClassOutput
from bertvision.models.pooling import Pooling, Reduction, make_pooling


class ClassificationHead(Head):
    """Base of the classification heads: one token per example, whose features are scored.

    The token is the example's [CLS], or a pooling of its tokens. ``layers`` counts all states that
    are stored: those of the layers, and of [CLS] last the pooler output where the encoder has one
    (26 for BERT-large).

    Args:
        layers: number of states.
        hidden: width of the states.
        width: features per example.
        classes: logits; 1 for the score of a regression.
    """

    kind = "classification"

    def __init__(self, *, layers: int, hidden: int, width: int, classes: int = 2) -> None:
        super().__init__(layers=layers, hidden=hidden, width=width, outputs=classes)

    def forward(self, hidden_states: Tensor, lengths: Tensor) -> ClassOutput:
        """Logits of every example.

        Args:
            hidden_states: (batch, states, hidden) of all examples.
            lengths: (batch,) int64, all 1.

        Returns:
            Logits (batch, classes).

        Raises:
            InputError: there is more than one token per example, or the shapes do not fit this
                head.
        """
        if len(lengths) != len(hidden_states):
            raise InputError(
                f"{len(hidden_states)} tokens of {len(lengths)} examples given to a classification "
                "head, which reads one token of each: extract it with `bertvision extract "
                "--pool cls`"
            )
        self.check(hidden_states)
        return ClassOutput(self.logits(self.features(hidden_states, lengths)))


class PoolingClassHead(ClassificationHead):
    """Pool the states, then the output layer.

    Args:
        layers: number of states.
        hidden: width of the states.
        pooling: how the states become one.
        classes: logits.
    """

    def __init__(self, *, layers: int, hidden: int, pooling: Pooling, classes: int = 2) -> None:
        super().__init__(layers=layers, hidden=hidden, width=hidden, classes=classes)
        self.pooling = make_pooling(pooling, layers, hidden)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """The pooled state: (batch, hidden)."""
        return [self.pooling(hidden_states)]


class PooledAdapterClassHead(ClassificationHead):
    """Pool the states, compress the result, concatenate the last state, then the output layer.

    Args:
        layers: number of states.
        hidden: width of the states.
        pooling: how the states become one.
        size: width of the compressed state.
        classes: logits.
    """

    def __init__(
        self, *, layers: int, hidden: int, pooling: Pooling, size: int, classes: int = 2
    ) -> None:
        super().__init__(layers=layers, hidden=hidden, width=size + hidden, classes=classes)
        self.pooled = Reduction(layers, hidden, pooling, size)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """The compressed pooled state (batch, size) and the last state (batch, hidden)."""
        return [self.pooled(hidden_states).flatten(1), hidden_states[:, -1]]
