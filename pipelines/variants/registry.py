"""The variants by name: light, because settings and the command line check names here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertvision.errors import InputError, did_you_mean
from bertvision.plugins import is_dotted_path, load_class, offered

if TYPE_CHECKING:
    from bertvision.pipelines.encoders.loading import PretrainedEncoder
    from bertvision.pipelines.tasks.registry import TaskKind
    from bertvision.pipelines.variants.variant import Variant

_HERE = "bertvision.pipelines.variants"
VARIANTS: dict[str, str] = {
    "keep": f"{_HERE}.depth:Keep",
    "drop": f"{_HERE}.depth:Drop",
    "copy": f"{_HERE}.depth:Copy",
    "extra": f"{_HERE}.depth:Extra",
    "reinit": f"{_HERE}.few_samples:Reinitialise",
    "lora": f"{_HERE}.adapters:Lora",
    "houlsby": f"{_HERE}.adapters:Houlsby",
    "freeze": f"{_HERE}.freezing:Freeze",
    "freeze-stored": f"{_HERE}.freezing:FreezeStored",
    "no-bias-correction": f"{_HERE}.few_samples:NoBiasCorrection",
    "layer-decay": f"{_HERE}.few_samples:LayerwiseDecay",
    "mixout": f"{_HERE}.few_samples:Mixout",
    "cls-norm": f"{_HERE}.cls:ClsNorm",
    "isobn": f"{_HERE}.cls:IsoBn",
    "exits": f"{_HERE}.exits:Exits",
    "exits-by-depth": f"{_HERE}.exits:ExitsByDepth",
    "exits-learned": f"{_HERE}.exits:ExitsLearned",
    "exits-detached": f"{_HERE}.exits:ExitsDetached",
    "mlm": f"{_HERE}.masked:MaskedLanguage",
}
"""Name → ``package.module:Class``, in the order in which several are applied."""
GROUP = "bertvision.variants"
"""Entry points under which installed packages offer more."""


def load_variants(texts: Sequence[str]) -> list[Variant]:
    """The variants that texts such as ``freeze:6`` name, in the order in which they are applied.

    Args:
        texts: a name, or a name, a colon and an argument; also ``package.module:Class``, with
            ``=argument`` behind it where it takes one.

    Raises:
        InputError: there is none of a name, an argument is wrong, or a name stands twice.
    """
    check_names(texts)
    known = _known(texts)
    variants: list[Variant] = []
    for text in texts:
        name, argument = _parts(text)
        named = is_dotted_path(name)
        kind = load_class(name if named else known[name], "variant", named=named)
        variants.append(kind(name, argument))
    order = {name: i for i, name in enumerate(known)}
    return sorted(variants, key=lambda variant: order.get(variant.name, len(order)))


def _known(texts: Sequence[str]) -> dict[str, str]:
    """Paths of variants by name; installed packages are asked only where a name is not ours."""
    ours = all(_parts(text)[0] in VARIANTS for text in texts)
    return dict(VARIANTS) if ours else {**VARIANTS, **offered(GROUP)}


def check_names(texts: Sequence[str]) -> None:
    """Refuse names of no variant, before anything heavy is imported.

    Raises:
        InputError: there is none of a name, or one stands twice.
    """
    known, seen = _known(texts), set[str]()
    for text in texts:
        name, _ = _parts(text)
        if not is_dotted_path(name) and name not in known:
            raise InputError(
                f"--variant {text}: there is no variant {name!r}; "
                f"{did_you_mean(name, list(known))}choose from {', '.join(known)}"
            )
        if name in seen:
            raise InputError(f"--variant {','.join(texts)}: {name} stands twice")
        seen.add(name)


def fitting_depth(
    texts: Sequence[str],
    layers: int,
    kind: TaskKind,
    checkpoint: PretrainedEncoder | None = None,
) -> int:
    """The transformer layers of an encoder with variants, after checking that each fits it.

    Args:
        texts: As in `load_variants`.
        layers: Layers of the pretrained encoder.
        kind: Kind of the task.
        checkpoint: Checkpoint of the pretrained encoder, where it is to be looked at.

    Raises:
        InputError: one does not fit; names it, and what is allowed.
    """
    variants = load_variants(texts)
    for variant in variants:
        if kind not in variant.kinds:
            raise InputError(
                f"--variant {variant} is for tasks of the kind {' or '.join(variant.kinds)}, and "
                f"this one is of the kind {kind}: leave it out, or choose another --task"
            )
        variant.check(layers)
        layers = variant.depth(layers)
    for variant in variants:
        variant.check_beside(variants, layers)
        if checkpoint is not None:
            if variant.reads_cls:
                _check_has_cls(variant, checkpoint)
            variant.check_checkpoint(checkpoint)
    return layers


def _check_has_cls(variant: Variant, checkpoint: PretrainedEncoder) -> None:
    from bertvision.pipelines.encoders.loading import load_tokenizer
    from bertvision.pipelines.tasks.windows import special_ends

    if not all(special_ends(load_tokenizer(checkpoint.folder))):
        raise InputError(
            f"--variant {variant} reads [CLS], which {checkpoint.name_or_path} does not have: "
            "leave it out, or fine-tune an encoder"
        )


def _parts(text: str) -> tuple[str, str | None]:
    """A variant's name and its argument."""
    name, colon, argument = text.partition(":")
    path, equals, own = text.partition("=")
    if name not in VARIANTS and is_dotted_path(path):
        return path, own if equals else None
    return name, argument if colon else None
