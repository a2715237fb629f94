"""The names of heads: of those that are built in also how they are made. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bertvision.errors import UnknownNameError, did_you_mean
from bertvision.models import Kind
from bertvision.plugins import offered

ENTRY_POINT_GROUP = "bertvision.heads"
_PAPER = "BERT Vision"
_MIX = "Peters et al. 2018; Tenney et al. 2019"
_HOULSBY = "BERT Vision, after Houlsby et al. 2019"
_CHOLLET = "BERT Vision, after Chollet 2017"


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How a head is made. The target is imported when the head is built."""

    target: str
    """Dotted path ``package.module:Class``."""
    kwargs: Mapping[str, Any]
    """Keyword arguments beside ``layers`` and ``hidden``."""
    description: str
    """One line."""
    source: str = field(default=_PAPER)
    """Where the head was described."""
    kind: Kind = "span"
    """Subject of its logits."""

    def learns(self, kind: str) -> bool:
        """Whether a head learns what logits of a kind are of.

        Span heads label words too, unless they score start and end together.
        """
        return kind == self.kind or (
            kind == "token" and self.kind == "span" and ".bilinear:" not in self.target
        )

    @property
    def convolves(self) -> bool:
        """Whether it convolves, which may cost more than the encoder."""
        return any(name in self.target for name in (".cnn:", ".inception:", ".xception:"))


def _span(module: str, description: str, source: str = _PAPER, **kwargs: Any) -> HeadSpec:
    return HeadSpec(f"bertvision.models.{module}", kwargs, description, source)


def _adapter(size: int, *, shared: bool, skip: str | None = None) -> HeadSpec:
    projection = "one projection for all layers" if shared else "one projection per layer"
    beside = {
        None: "",
        "last": ", last layer concatenated",
        "pooled-adapter": ", the compressed weighted sum of the layers concatenated",
    }
    text = f"every layer compressed to {size} by {projection}{beside[skip]}"
    return _span("heads:AdapterSpanHead", text, _HOULSBY, size=size, shared=shared, skip=skip)


def _control(size: int) -> HeadSpec:
    """The adapter of `_adapter` without the other layers: what they add is beyond it."""
    text = f"last layer alone, compressed to {size}: the control of the adapters of {size}"
    target = "heads:PooledAdapterSpanHead"
    source = "after Houlsby et al. 2019"
    return _span(target, text, source, pooling="last", size=size, skip=False)


def _cnn(description: str, **kwargs: Any) -> HeadSpec:
    return _span(
        "cnn:CNNSpanHead", f"1×N convolutions along the hidden axis{description}", **kwargs
    )


def _cls(module: str, description: str, source: str = _PAPER, **kwargs: Any) -> HeadSpec:
    target = f"bertvision.models.{module}"
    return HeadSpec(target, kwargs, description, source, "classification")


HEADS: Final[dict[str, HeadSpec]] = {
    "last-layer": _span(
        "heads:PoolingSpanHead",
        "last layer alone: the baseline, BERT's own output layer trained once more",
        "Devlin et al. 2019",
        pooling="last",
    ),
    "last-layer-adapter-64": _control(64),
    "last-layer-adapter-386": _control(386),
    "average-pooling": _span("heads:PoolingSpanHead", "mean of the layers", pooling="average"),
    "learned-pooling": _span(
        "heads:PoolingSpanHead",
        "learned weighted sum of the layers (scalar mix)",
        _MIX,
        pooling="learned",
    ),
    "attention-pooling": _span(
        "heads:PoolingSpanHead",
        "weighted sum of the layers, weights of each token's own from a learned query",
        "Yang et al. 2016, over layers",
        pooling="attention",
    ),
    "learned-pooling-bilinear-64": _span(
        "bilinear:BilinearSpanHead",
        "learned weighted sum; the end also scored with the expected start, rank 64",
        "Wang & Jiang 2017; Kim et al. 2017; Dozat & Manning 2017",
        pooling="learned",
        rank=64,
    ),
    "adapter-64-shared": _adapter(64, shared=True),
    "adapter-64-shared-skip": _adapter(64, shared=True, skip="last"),
    "adapter-64-independent": _adapter(64, shared=False),
    "adapter-64-independent-skip": _adapter(64, shared=False, skip="last"),
    "adapter-386-shared": _adapter(386, shared=True),
    "adapter-386-shared-skip": _adapter(386, shared=True, skip="last"),
    "adapter-386-shared-pooled-skip": _adapter(386, shared=True, skip="pooled-adapter"),
    "adapter-386-independent": _adapter(386, shared=False),
    "adapter-386-independent-skip": _adapter(386, shared=False, skip="last"),
    "learned-pooling-adapter-386-skip": _span(
        "heads:PooledAdapterSpanHead",
        "learned weighted sum compressed to 386, last layer concatenated",
        _HOULSBY,
        pooling="learned",
        size=386,
    ),
    "cnn-1xn": _cnn(", a channel per layer"),
    "cnn-1xn-dilated": _cnn(", a channel per layer, dilated by 2", dilation=2),
    "cnn-1xn-no-dropout": _cnn(", a channel per layer, without dropout", dropout=0.0),
    "average-pooling-cnn-1xn": _cnn(" of the mean of the layers", pooling="average"),
    "learned-pooling-cnn-1xn": _cnn(" of the learned weighted sum", pooling="learned"),
    "learned-pooling-adapter-386-cnn-1xn": _cnn(
        " of the learned weighted sum compressed to 386", pooling="learned", size=386
    ),
    "learned-pooling-adapter-386-cnn-nxn": _span(
        "cnn:NxNSpanHead",
        "N×N convolutions (N = 1 to 7) over tokens and the weighted sum compressed to 386; "
        "layers of our own, the paper's cannot be identified",
    ),
    "learned-pooling-adapter-386-inception": HeadSpec(
        "bertvision.models.inception:InceptionSpanHead",
        {},
        "Inception v1 over tokens and the weighted sum compressed to 386; costs half as much as "
        "BERT-large; layers of our own, the paper's cannot be identified",
        "BERT Vision, after Szegedy et al. 2015",
    ),
    "learned-pooling-adapter-386-xception": HeadSpec(
        "bertvision.models.xception:XceptionSpanHead",
        {},
        "Xception over tokens and the weighted sum compressed to 386; costs more than BERT-large",
        _CHOLLET,
    ),
    "cls-last-state": _cls(
        "heads:PoolingClassHead",
        "last state of [CLS] alone (the pooler output): the baseline",
        "Devlin et al. 2019",
        pooling="last",
    ),
    "cls-learned-pooling": _cls(
        "heads:PoolingClassHead",
        "learned weighted sum of the [CLS] states (scalar mix)",
        _MIX,
        pooling="learned",
    ),
    "cls-average-pooling-adapter-386-skip": _cls(
        "heads:PooledAdapterClassHead",
        "mean of the [CLS] states compressed to 386, last state concatenated",
        _HOULSBY,
        pooling="average",
        size=386,
    ),
    "cls-learned-pooling-adapter-386-skip": _cls(
        "heads:PooledAdapterClassHead",
        "learned weighted sum of the [CLS] states compressed to 386, last state concatenated",
        _HOULSBY,
        pooling="learned",
        size=386,
    ),
    "cls-xception-abbreviated": _cls(
        "xception:XceptionAbbreviatedClassHead",
        "entry of Xception, 1×3 kernels, a channel per [CLS] state",
        _CHOLLET,
    ),
    "cls-xception-abbreviated-skip": _cls(
        "xception:XceptionAbbreviatedClassHead",
        "entry of Xception, 1×3 kernels, last [CLS] state concatenated",
        _CHOLLET,
        skip=True,
    ),
    "cls-xception-full": _cls(
        "xception:XceptionFullClassHead",
        "all of Xception, 1×3 kernels, a channel per [CLS] state; the costliest of its kind",
        _CHOLLET,
    ),
}
"""The heads by name, in the order they are listed."""


def plugins() -> dict[str, str]:
    """Name → dotted path of the heads that installed packages offer."""
    return {name: path for name, path in offered(ENTRY_POINT_GROUP).items() if name not in HEADS}


def check_head(name: str) -> str:
    """Return ``name`` if there is such a head, or if it is the dotted path of a class.

    Raises:
        UnknownNameError: there is none.
    """
    if name in HEADS or ":" in name:
        return name
    if name not in (others := plugins()):
        hint = did_you_mean(name, [*HEADS, *others], most=3)
        raise UnknownNameError(
            f"there is no head {name!r}: {hint}`bertvision heads` lists them; "
            "a class of your own is given as package.module:Class"
        )
    return name
