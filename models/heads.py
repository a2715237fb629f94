"""Base classes of heads, the span heads of pooling and adapters, and heads of classes.

A head of classes has a logit per class from one vector per example and state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertvision.errors import InputError
from bertvision.models import Kind
from bertvision.models.outputs import (
    ClassOutput,
    SpanOutput,
    TokenOutput,
    pad_packed,
    without_autocast,
)
from bertvision.models.pooling import (
    IndependentAdapter,
    Pooling,
    Reduction,
    SharedAdapter,
    make_pooling,
)


class Head(nn.Module, ABC):
    """Base of the heads: features of each token → a linear output layer.

    A sub-class says in `features` what it computes per token. The output layer begins as
    N(0, 0.02) with zero bias, the initialisation of BERT's own layers (Devlin et al. 2019 code,
    ``initializer_range``).

    Args:
        layers: number of hidden states (25 for BERT-large: the embedding output and 24 layers).
        hidden: width of the hidden states (1024 for BERT-large).
        width: features per token.
        outputs: logits per token.

    Raises:
        InputError: ``layers``, ``hidden`` or ``outputs`` is below 1.
    """

    kind: ClassVar[Kind]
    """Subject of the logits: the tokens of a span, or the classes of an example."""

    def __init__(self, *, layers: int, hidden: int, width: int, outputs: int = 2) -> None:
        super().__init__()
        check_dimensions(layers, hidden)
        if outputs < 1:
            raise InputError(f"{outputs} outputs: a head needs a logit for each class, or one")
        self.layers = layers
        self.hidden = hidden
        self.output = _output_layer(width, outputs)

    @abstractmethod
    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """Features of each token, to be concatenated.

        Args:
            hidden_states: (tokens, layers, hidden), the tokens of all examples one after the other.
            lengths: (batch,) tokens per example.

        Returns:
            Parts, each (tokens, width of the part); the widths sum to ``width``.
        """

    def logits(self, parts: Sequence[Tensor]) -> Tensor:
        """The output layer on the concatenated parts: (tokens, outputs), at least in float32.

        Also under autocast: in bfloat16 the best tokens of a window are often equal, and which of
        them is answered is chance.

        Raises:
            InputError: the parts are no list of tensors whose widths sum to ``width``.
        """
        if isinstance(parts, Tensor) or sum(p.shape[-1] for p in parts) != self.output.in_features:
            given = [parts] if isinstance(parts, Tensor) else parts
            shapes = ", ".join(str(tuple(part.shape)) for part in given)
            what = "a tensor" if isinstance(parts, Tensor) else "tensors"
            raise InputError(
                f"features of {type(self).__name__} returned {what} of shape {shapes}: return a "
                f"list of tensors (tokens, width) whose widths sum to {self.output.in_features}"
            )
        # W [a, b] = W_a a + W_b b: the concatenation, without copying the features.
        dtype = torch.promote_types(self.output.weight.dtype, torch.float32)
        weight, bias = self.output.weight.to(dtype), self.output.bias.to(dtype)
        weights = torch.split(weight, [part.shape[1] for part in parts], dim=1)
        with without_autocast(weight):
            logits = F.linear(parts[0].to(dtype), weights[0], bias)
            for part, weight in zip(parts[1:], weights[1:], strict=True):
                logits = logits + F.linear(part.to(dtype), weight)
        return logits

    def check(self, hidden_states: Tensor) -> None:
        """Refuse the hidden states of another encoder.

        Raises:
            InputError: they are not (tokens, layers, hidden) of this head.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[1:] != (self.layers, self.hidden):
            raise InputError(
                f"hidden states of shape {tuple(hidden_states.shape)} given to a head for (tokens, "
                f"{self.layers} layers, {self.hidden} hidden): build the head for this encoder, "
                "with layers = its number of hidden states (the embedding output included)"
            )


def _output_layer(width: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(width, outputs)
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)
    return layer


class SpanHead(Head):
    """Base of the span heads: the logits of a token are its scores as start and as end.

    After `label_tokens` they are its scores for classes.
    """

    kind: Kind = "span"  # type: ignore[misc]  # of a head for tokens it is that of the object

    def label_tokens(self, classes: int) -> None:
        """Give the head an output layer, with fresh weights, for the classes of each token.

        Args:
            classes: Number of classes.
        """
        self.kind = "token"
        self.output = _output_layer(self.output.in_features, classes)

    def forward(self, hidden_states: Tensor, lengths: Tensor) -> SpanOutput | TokenOutput:
        """Logits of every token.

        Args:
            hidden_states: (tokens, layers, hidden), the tokens of all examples one after the other,
                without padding.
            lengths: (batch,) int64, tokens per example.

        Returns:
            Logits, each (batch, max(lengths)), padded with the dtype's smallest finite number; of
            classes (batch, max(lengths), classes), padded with zeros.

        Raises:
            InputError: the shapes do not fit this head or each other.
        """
        self.check(hidden_states)
        logits = self.logits(self.features(hidden_states, lengths))
        if self.kind == "token":
            return TokenOutput(pad_packed(logits, lengths, fill=0.0))
        return span_output(logits, lengths)


class PoolingSpanHead(SpanHead):
    """Pool the layers, then the output layer.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        pooling: Way in which the layers become one.
    """

    def __init__(self, *, layers: int, hidden: int, pooling: Pooling) -> None:
        super().__init__(layers=layers, hidden=hidden, width=hidden)
        self.pooling = make_pooling(pooling, layers, hidden)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """The pooled state: (tokens, hidden)."""
        return [self.pooling(hidden_states)]


class AdapterSpanHead(SpanHead):
    """Compress each layer with an adapter, flatten the layers, then the output layer.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        size: width of the compressed states.
        shared: one `SharedAdapter` for all layers if true, else an `IndependentAdapter`.
        skip: Further input of the output layer, concatenated: the last hidden state
            itself, the learned pooling of all layers compressed by an adapter of its own, or
            nothing.
    """

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        size: int,
        shared: bool,
        skip: Literal["last", "pooled-adapter"] | None = None,
    ) -> None:
        beside = {"last": hidden, "pooled-adapter": size, None: 0}[skip]
        super().__init__(layers=layers, hidden=hidden, width=layers * size + beside)
        self.skip = skip
        self.adapter: SharedAdapter | IndependentAdapter
        if shared:
            self.adapter = SharedAdapter(hidden, size)
        else:
            self.adapter = IndependentAdapter(layers, hidden, size)
        if skip == "pooled-adapter":
            self.pooled = Reduction(layers, hidden, "learned", size)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """The compressed layers (tokens, layers × size), and what the skip brings."""
        compressed = self.adapter(hidden_states).flatten(1)
        if self.skip == "last":
            return [compressed, hidden_states[:, -1]]
        if self.skip == "pooled-adapter":
            return [compressed, self.pooled(hidden_states).flatten(1)]
        return [compressed]


class PooledAdapterSpanHead(SpanHead):
    """Pool the layers, compress the result, perhaps concatenate the last layer, then the output.

    Args:
        layers: number of hidden states, the embedding output included.
        hidden: width of the hidden states.
        pooling: Way in which the layers become one.
        size: width of the compressed state.
        skip: Whether the last hidden state itself is concatenated.
    """

    def __init__(
        self, *, layers: int, hidden: int, pooling: Pooling, size: int, skip: bool = True
    ) -> None:
        super().__init__(layers=layers, hidden=hidden, width=size + hidden * skip)
        self.skip = skip
        self.pooled = Reduction(layers, hidden, pooling, size)

    def features(self, hidden_states: Tensor, lengths: Tensor) -> Sequence[Tensor]:
        """The compressed pooled state (tokens, size), and with skip the last (tokens, hidden)."""
        compressed = self.pooled(hidden_states).flatten(1)
        return [compressed, hidden_states[:, -1]] if self.skip else [compressed]


def check_dimensions(layers: int, hidden: int) -> None:
    """Refuse an encoder without layers or width.

    Raises:
        InputError: ``layers`` or ``hidden`` is below 1.
    """
    if layers < 1 or hidden < 1:
        raise InputError(f"layers={layers}, hidden={hidden}: both must be at least 1")


def span_output(logits: Tensor, lengths: Tensor) -> SpanOutput:
    """Start and end logits of a padded batch from those of packed tokens (tokens, 2)."""
    padded = pad_packed(logits, lengths, fill=torch.finfo(logits.dtype).min)
    return SpanOutput(*padded.unbind(-1))


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
        pooling: Way in which the states become one.
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
        pooling: Way in which the states become one.
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
