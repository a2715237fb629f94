"""Whether stored hidden states are those of the tokens beside them."""

from __future__ import annotations

from collections import Counter

from bertvision.errors import InputError, counted
from bertvision.pipelines.workspace.reproduce import not_extracted
from bertvision.verbs.arguments.checks import find_workspace
from bertvision.verbs.arguments.reading import (
    Layers,
    StrPath,
    at_least,
    parse_layers,
    text_of,
)
from bertvision.verbs.rows import ShownRecord
from bertvision.verbs.store.foreign import open_store, split_name
from bertvision.verbs.tables import Values

_NAMED = 10


class Audited(ShownRecord):
    """What `audit` found (see `pipelines.audit.audit.Audit`)."""

    def table(self, values: Values) -> str:
        """What is wrong, and what that says of the whole split."""
        sampled, examples, wrong = values["sampled"], values["examples"], values["wrong"]
        of = f"{sampled:,} of {counted(examples, 'example')} of {values['split']} computed again"
        shared = [found["what"] for found in values["deviations"]]
        verdict = f"{counted(wrong, 'example')} wrong" if wrong else "all are as they should be"
        if shared:
            verdict = f"{counted(wrong, 'example')} wrong, and all others deviate together"
            verdict = verdict if wrong else "none is wrong by itself, but all deviate together"
        lines = [f"{of}: {verdict}", *(f"  {what}" for what in shared)]
        if sampled < examples:
            lines.append(
                f"with {values['confidence']:.0%} confidence at most {values['at_most']:.2%} of "
                "the split are wrong"
            )
        lines += [f"note: {remark}" for remark in values["remarks"]]
        kinds = Counter(found["kind"] for found in values["findings"])
        if len(kinds) > 1 or wrong > _NAMED:
            lines.append(", ".join(f"{kind}: {n:,}" for kind, n in kinds.most_common()))
        lines += [f"  {f['key']}: {f['what']}" for f in values["findings"][:_NAMED]]
        return "\n".join(lines)


def audit(
    name: str,
    *,
    model: StrPath | None = None,
    tokenizer: StrPath | None = None,
    layers: Layers | None = None,
    sample: int = 100,
    seed: int = 0,
    tolerance: float | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> Audited:
    """Compute a sample of a split's examples again, and compare them with what is stored.

    It finds shifted rows, swapped examples, wrong layers, missing prefixes, wrong norms, samples
    that were cut off and states of other weights (docs/foreign-states.md). A split of the
    workspace is compared with its snapshot and its data; an imported one with the encoder that is
    named, over the token ids that are stored.

    Examples:
        >>> import bertvision
        >>> found = bertvision.audit("1e/dev", sample=8)
        >>> found.sampled, found.wrong, round(found.at_most, 2)
        (8, 0, 0.31)

    Args:
        name: of the split, such as ``0.3e/train``.
        model: the encoder of an imported split, a folder or a name on the hub.
        tokenizer: where it is not beside the encoder.
        layers: which hidden state each layer of an imported split is; by default its indices.
        sample: examples that are computed again.
        seed: of their choice.
        tolerance: how far computed states may be from stored ones, beside what the encoding loses,
            in parts of their distance from the mean; by default 0.01 where float32 was recorded,
            and 0.1 elsewhere.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such split, or its snapshot or data are gone.
        InputError: an encoder must be named, or is not that of the split.
        IncompleteSplitError: shards of the split are missing.
        CorruptStoreError: the split is damaged.
        WorkspaceError: the snapshot or the data changed.
    """
    tag, split = split_name(name)
    at_least(sample, 1, "--sample")
    if tolerance is not None and not 0 < tolerance < 1:
        raise InputError(f"--tolerance {tolerance}: give a number between 0 and 1")
    states = parse_layers(layers)
    if model is None and (tokenizer is not None or states is not None):
        raise InputError("--tokenizer and --layers belong to an encoder: name it with --model")
    opened = open_store(workspace, store)[f"{tag}/{split}"]
    if model is None and (reason := not_extracted(opened)) is not None:
        raise InputError(f"{reason}: name the encoder that it is of with --model")
    space = None if model is not None else find_workspace(workspace, store)
    from bertvision.pipelines.audit.audit import audit_split
    from bertvision.pipelines.audit.reference import of_model, of_workspace

    opened.require_complete()
    if space is None:
        reference = of_model(opened, text_of(model) or "", text_of(tokenizer), states)
    else:
        reference = of_workspace(space, opened)
    found = audit_split(opened, reference, sample=sample, seed=seed, tolerance=tolerance)
    return Audited(**found.to_json())
