"""Pooled hidden states of several snapshots, extracted alike where they are missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import NamedTuple

from bertvision.errors import InputError, ProvenanceError
from bertvision.featurestore.format.layout import EncodingName, get_encoding
from bertvision.featurestore.format.records import first_difference
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.extraction.contents import made_from_data
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.extraction.job import ExtractionJob
from bertvision.pipelines.extraction.layers import kept_layers
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.extraction.stored_tokens import find_tokens
from bertvision.pipelines.poolings import POOLING_NAMES, TokenPooling, check_pooling
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.workspace.job_options import ExtractOptions
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.reproduce import stored_options
from bertvision.pipelines.workspace.workspace import Workspace


def ensure_features(
    workspace: Workspace,
    tags: Sequence[str],
    dataset: str | None,
    splits: Sequence[str],
    poolings: Sequence[TokenPooling],
    *,
    layers: Sequence[int] | None = None,
    encoding: EncodingName | None = None,
    precision: str = "auto",
    scheduler: str | None = None,
) -> None:
    """Extract the pooled hidden states that are missing; what is stored whole is left alone.

    They are taken of stored tokens, without the encoder, where these are as good for all of them.

    Everything is checked before the first extraction, so that a refusal leaves nothing half made.
    Of one pooling all splits of all tags must be of one encoding, precision and treatment of
    non-finite values, and pooled from tokens of one lossy encoding or of none: features are
    compared, and a difference would be that of the arithmetic too.

    Args:
        workspace: with the snapshots; ``0e`` and ``untrained`` are made where they are missing.
        tags: the snapshots.
        dataset: an added data set; None is the workspace's own data.
        splits: Splits of the data.
        poolings: Names of poolings (see `pipelines.poolings`), or ``all`` for all tokens.
        layers: Layers that must be there; None is every hidden state, without the pooler's output.
            Where nothing is stored yet all are extracted.
        encoding: Encoding of what is missing, and asked of what is stored; None is int8 for what is
            missing, and takes what is stored as it is.
        precision: Precision of the forward pass; ``auto`` takes what is stored as it is.
        scheduler: see `extract`.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: a pooling is not known, or the encoder has no token for it.
        ProvenanceError: what is stored was extracted from another snapshot or other data, lacks a
            layer, or differs in a setting from what was asked or from what it is compared with.
    """
    if not poolings:
        raise InputError(f"--pool: name one or more of {POOLING_NAMES}")
    for pooling in poolings:
        if pooling != "all":
            check_pooling(pooling)
    for tag in tags:
        ensure_snapshot(workspace, tag)
    arithmetic = resolve_precision(precision)
    if encoding is not None:
        get_encoding(encoding)
    asked = {"encoding": encoding, "precision": None if precision == "auto" else arithmetic}
    depth = workspace.config.model.num_hidden_layers
    # the pooler's output only where it is asked for
    needed = kept_layers(layers, depth, pooler=layers is not None, tokens="cls")
    new = ExtractOptions(precision=arithmetic)
    new = new if encoding is None else replace(new, encoding=encoding)
    data = workspace.dataset(dataset)
    data.check(splits)
    wanted: list[_Wanted] = []
    for pooling in poolings:
        for tag in tags:
            for split in splits:
                pooled = PooledSplit(workspace, tag, dataset, split, pooling)
                stored, tokens = pooled.find(), None
                if stored is not None:
                    _check_stored(pooled, stored, asked, needed)
                elif pooling != "all":
                    job = ExtractionJob(workspace.root, tag, split, replace(new, dataset=data.name))
                    tokens = find_tokens(workspace, job, pooling)
                wanted.append(_Wanted(pooled, stored, tokens))
    lossy = {pooling: _lossy(pooling, wanted) for pooling in poolings}
    missing: dict[tuple[str, str, ExtractOptions, bool], list[TokenPooling]] = {}
    for pooling in poolings:
        known: dict[str, dict[str, object]] = {}
        for one in wanted:
            if one.pooled.pooling != pooling:
                continue
            options = new if one.found is None else replace(stored_options(one.found), tokens=None)
            origin = {_POOLED_FROM: one.origin(lossy=lossy[pooling])}
            known[f"{one.pooled.tag}/{one.pooled.name}"] = asdict(options) | origin
            if one.found is None or not one.found.is_complete:
                key = one.pooled.tag, one.pooled.split, options, lossy[pooling]
                missing.setdefault(key, []).append(pooling)
        _check_alike(known)
    together: dict[tuple[str, ExtractOptions, bool, tuple[TokenPooling, ...]], list[str]] = {}
    for (tag, split, options, may_lose), lacking in missing.items():
        together.setdefault((tag, options, may_lose, tuple(lacking)), []).append(split)
    for (tag, options, may_lose, tokens_of), names in together.items():
        extract(
            workspace,
            tag,
            options,
            splits=tuple(names),
            tokens=tokens_of,
            dataset=dataset,
            scheduler=scheduler,
            lossy=may_lose,
        )


_POOLED_FROM = "pooled_from_encoding"


class _Wanted(NamedTuple):
    """A pooled split that must be there."""

    pooled: PooledSplit
    found: ActivationSplit | None
    """The stored split, whole or begun."""
    tokens: ActivationSplit | None
    """Where nothing is: the stored tokens that it can be taken of."""

    def origin(self, *, lossy: bool) -> str | None:
        """The lossy encoding of the tokens that are pooled; None where nothing was lost."""
        if self.found is not None:
            encoding = self.found.record.provenance.get(_POOLED_FROM)
        else:
            encoding = self.tokens.record.encoding if self.tokens and lossy else None
        if encoding is None or get_encoding(str(encoding)).exact:
            return None
        return str(encoding)


def _lossy(pooling: TokenPooling, wanted: Sequence[_Wanted]) -> bool:
    """Whether what is missing of a pooling is taken of stored tokens in a lossy encoding.

    All of it, as what it is compared with was; or, where it is compared with nothing, all that is
    missing, so that the encoder need not be run.
    """
    mine = [one for one in wanted if one.pooled.pooling == pooling]
    origins = {one.origin(lossy=False) for one in mine if one.found is not None}
    alike = mine if origins else wanted
    possible = all(one.tokens is not None for one in alike if one.found is None)
    return possible and None not in origins


def _check_stored(
    pooled: PooledSplit,
    stored: ActivationSplit,
    asked: Mapping[str, str | None],
    needed: Collection[int],
) -> None:
    """Refuse what is stored of another snapshot or other data, or not as was asked."""
    snapshot = pooled.workspace.snapshot_dir(pooled.tag)
    weights = read_snapshot_info(snapshot).weights_sha256
    wanted = {"weights_sha256": weights, **made_from_data(pooled.data, pooled.split)}
    wanted |= {field: value for field, value in asked.items() if value is not None}
    there = {**stored.record.provenance, "encoding": stored.record.encoding}
    if difference := first_difference(there, wanted, wanted):
        field, before, now = difference
        raise ProvenanceError(
            f"{stored.name} was extracted with {field} = {before!r}, now it is {now!r}: use the "
            "same, or another --store"
        )
    if lacking := sorted(set(needed).difference(stored.record.layers)):
        layers_text = ",".join(map(str, stored.record.layers))
        raise ProvenanceError(
            f"{stored.name} holds layers {layers_text} and not {', '.join(map(str, lacking))}: "
            f"give --layers {layers_text} or some of them, or extract all into another --store"
        )


def _check_alike(known: Mapping[str, Mapping[str, object]]) -> None:
    """Refuse splits that are compared but were not, or would not be, extracted alike."""
    alike = ("encoding", "precision", "nonfinite", _POOLED_FROM)
    for first, other in pairwise(known):
        if difference := first_difference(known[first], known[other], alike):
            field, one, another = difference
            advice = f"ask for the {field} of what is stored (--encoding, --precision)"
            if field == _POOLED_FROM:
                advice = "extract all tokens of both (`bertvision extract --pool none`)"
            raise ProvenanceError(
                f"{first} has {field} = {one!r}, {other} {another!r}, so that they cannot be "
                f"compared: {advice}, or extract all alike into another --store"
            )
