"""Poolings of tokens that are stored: what `extract --pool` writes, without the encoder.

**What may be pooled.** Tokens in float32 are what the encoder gave, so that every pooling of them
is what a pooled extraction writes, to the last bit. Of tokens in a lossy encoding only the mean is
taken, and only where the same encoding is asked for: errors of tokens average out, so that the mean
is about as good as one that was encoded once (measured with MiniLM on the quickstart's questions,
by layer, in parts of what tells windows apart: 0.7 to 1.0 % in int8 instead of 0.6 to 0.7 %; in
int4 10 to 14 % instead of 10). The maximum and [SEP] lose two to three times what a pooled
extraction loses. The [CLS] must not be taken: tokens are encoded by how tokens differ, and the
[CLS] of one window differs so little from that of another that the error of int8 is ten times the
difference in the middle layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import cpu_count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import (
    CorruptStoreError,
    IncompleteSplitError,
    InputError,
    ProvenanceError,
    StoreNotFoundError,
    UnknownNameError,
)
from bertvision.featurestore.format.encoding import decode_numpy
from bertvision.featurestore.format.records import first_difference
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.encoders.kept_states import (
    KeptStates,
    check_poolings,
    kept_tokens,
)
from bertvision.pipelines.encoders.weights import has_pooler
from bertvision.pipelines.extraction.contents import (
    POOLED_SHARD_WINDOWS,
    provenance,
    without_digest,
)
from bertvision.pipelines.extraction.job import (
    ExtractionJob,
    LoadedSource,
    TokenSplit,
    load_encoder,
)
from bertvision.pipelines.extraction.layers import kept_layers
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.poolings import (
    SpecialEnds,
    TokenPooling,
)
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.tasks.windows import Windows, special_ends
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace

_THREADS = min(4, cpu_count() or 1)
"""Stored shards that are pooled at once: each takes the memory of its codes."""


class StoredTokens:
    """Poolings of a split of all tokens, as the encoder that it was extracted with gives them.

    Args:
        split: complete, of all tokens.
        layers: Indices of the hidden states, ascending, by pooling.
        special: Special tokens at the ends of each window.

    Attributes:
        device: Device that computes, where the store is read.
        tokens: the poolings, in the order of ``layers``.
        attention: Attention that the encoder computed.
    """

    def __init__(
        self,
        split: ActivationSplit,
        layers: Mapping[TokenPooling, Sequence[int]],
        special: SpecialEnds = (True, True),
    ) -> None:
        self.device = torch.device("cpu")
        self.tokens: tuple[TokenPooling, ...] = tuple(layers)
        self.attention = str(split.record.provenance["attn_implementation"])
        self._split = split
        self._layers = sorted(
            {layer for layers_of_pooling in layers.values() for layer in layers_of_pooling}
        )
        self._positions = split.layer_positions(self._layers)
        self._kept = KeptStates(layers, split.record.hidden_size, self.device, special)
        self._place = np.argsort(split.plan.example_id)

    def check(self, windows: Windows) -> None:
        """Make sure that the split is of these windows.

        Raises:
            ProvenanceError: it is not.
            CorruptStoreError: its arrays are damaged.
        """
        plan = self._split.plan
        if not (
            len(plan) == len(windows)
            and np.array_equal(windows.n_tokens[plan.example_id], plan.n_tokens)
            and np.array_equal(plan.place(windows.input_ids, 0), self._split.array("input_ids"))
        ):
            raise ProvenanceError(
                f"{self._split.name} holds other windows than the data make now: the versions of "
                "tokenizers or transformers differ; install those it was extracted with, or use "
                "another --store"
            )

    @property
    def logits(self) -> None:
        """None: poolings have none."""

    def kept(
        self, tokens: TokenPooling, lengths: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.integer]:
        """How many vectors it gives out of windows of these lengths, (windows,) each."""
        return kept_tokens(tokens, lengths)

    def batches(self, lengths: npt.NDArray[np.integer]) -> list[slice]:
        """Cut a sequence of windows into batches; (windows,) tokens of each."""
        starts = range(0, len(lengths), POOLED_SHARD_WINDOWS)
        return [slice(i, min(i + POOLED_SHARD_WINDOWS, len(lengths))) for i in starts]

    def __call__(self, windows: Windows, rows: npt.NDArray[np.int64]) -> list[Tensor]:
        """Poolings of some windows, computed by Dask, a task for each stored shard.

        Args:
            windows: Windows of the split.
            rows: (batch,) which of them.

        Returns:
            For each of ``tokens``, (windows, layers, hidden) float32, in memory that the next call
            reuses.

        Raises:
            CorruptStoreError: what is stored is damaged.
        """
        import dask

        self._kept.begin(windows.n_tokens[rows], windows.places_of(rows))
        examples = self._place[rows]
        shards = self._split.plan.shard[examples]
        pool = dask.delayed(self._pool, pure=False, traverse=False)  # type: ignore[attr-defined]
        tasks = [
            pool(int(shard), np.flatnonzero(shards == shard), examples)
            for shard in np.unique(shards)
        ]
        dask.compute(*tasks, scheduler="threads", num_workers=_THREADS)  # type: ignore[attr-defined, no-untyped-call]
        return self._kept.result()

    def _pool(
        self, shard: int, windows: npt.NDArray[np.int64], examples: npt.NDArray[np.int64]
    ) -> None:
        """Pool the windows of a batch that lie in one shard; beside its codes one layer is held."""
        split = self._split
        examples = examples[windows]
        reader = split.open_shard(shard)
        tokens = int(split.plan.n_tokens[examples].sum())
        codes, scale = split.buffers(tokens, len(self._positions))
        split.gather(examples, lambda _: reader, self._positions, codes, scale)
        reader.close()
        for i, (layer, position) in enumerate(zip(self._layers, self._positions, strict=True)):
            of_layer = None if scale is None else scale[:, i : i + 1]
            stats = split.stats_of([position])
            states = decode_numpy(codes[i][:, None], of_layer, stats, split.encoding)[:, 0]
            self._kept.add(layer, torch.from_numpy(states), windows)


def load_tokens(workspace: Workspace, job: ExtractionJob) -> LoadedSource:
    """Stored tokens in the place of the encoder that they came from.

    Args:
        workspace: Workspace with the snapshot and the store.
        job: the extraction, with the split that it is pooled from.

    Raises:
        InputError: the encoder has no token for a pooling.
        StoreNotFoundError: the split is not there, as seen from this machine.
        IncompleteSplitError: it is not whole.
        WorkspaceError: the snapshot is damaged.
    """
    if job.pooled_from is None:
        raise InputError(f"the extraction of {job.split} is not of stored tokens")
    split = workspace.split(job.tag, job.pooled_from.name).require_complete()
    folder = workspace.require_snapshot(job.tag)
    tokenizer, poolings = load_snapshot_tokenizer(folder), job.options.tokens or ()
    check_poolings(poolings, tokenizer)
    layers = {pooling: pooled_layers(workspace, job, pooling) for pooling in poolings}
    source = StoredTokens(split, layers, special_ends(tokenizer))
    info, hidden = read_snapshot_info(folder), split.record.hidden_size
    return LoadedSource(source, tokenizer, info, layers, hidden, source.check)


def pooled_layers(
    workspace: Workspace, job: ExtractionJob, pooling: TokenPooling
) -> tuple[int, ...]:
    """The hidden states that a pooled extraction keeps.

    Args:
        workspace: Workspace with the snapshot.
        job: the extraction, with the layers that were asked for.
        pooling: Pooling that they are of.

    Raises:
        InputError: the encoder has no such hidden state.
    """
    pooler = has_pooler(workspace.require_snapshot(job.tag))
    depth = workspace.config.model.num_hidden_layers
    return kept_layers(job.options.layers, depth, pooler=pooler, tokens=pooling)


log = logging.getLogger(__name__)

_Sources = dict[tuple[ExtractionJob, TokenPooling], ActivationSplit | None]


def plan_jobs(
    workspace: Workspace, jobs: Sequence[ExtractionJob], *, lossy: bool, mend: bool
) -> list[ExtractionJob]:
    """The extractions with their sources; one for each source, where a split needs two.

    What was begun is ended as it was begun; what is complete and has outlived the tokens that it
    was pooled from is left out. Of what is new,

    - tokens in a lossy encoding are pooled only where the encoder is run for none of it: what is
      made by one call is made alike;
    - an encoder that is run for one pooling of a split gives all others with it.

    Args:
        workspace: Workspace with the store.
        jobs: one for each split of the data, without sources.
        lossy: Whether tokens in a lossy encoding may be pooled at all.
        mend: Whether parts of what is complete are written again.

    Raises:
        ProvenanceError: the tokens that a split was begun from are gone.
        InputError: the encoder has no such hidden state.
    """
    sources: _Sources = {}
    new = []
    for job in jobs:
        for pooling in job.options.tokens or ():
            # of stored tokens hidden states alone can be pooled
            by_encoder = pooling == "all" or job.options.sites is not None
            begun = None if by_encoder else _begun(workspace, job, pooling)
            if begun is not None:
                if not mend and _stands_alone(workspace, job, pooling, begun):
                    log.info(
                        "%s is complete, and stays as it is: the tokens that it was pooled from "
                        "are no longer stored",
                        begun.name,
                    )
                    continue
                sources[job, pooling] = _tokens_of(workspace, job, pooling, begun)
            elif by_encoder:
                sources[job, pooling] = None
            else:
                sources[job, pooling] = find_tokens(workspace, job, pooling)
                new.append((job, pooling))
    if not lossy or any(sources[key] is None for key in new):
        for key in new:
            tokens = sources[key]
            sources[key] = tokens if tokens is not None and is_exact(tokens) else None
    for job, pooling in new:
        if any(sources[key] is None for key in new if key[0] == job):
            sources[job, pooling] = None
    return [part for job in jobs for part in _by_source(job, sources)]


def load_sources(
    workspace: Workspace, jobs: Sequence[ExtractionJob]
) -> dict[ExtractionJob, LoadedSource]:
    """Sources of the hidden states of each extraction; the encoder is loaded once, or not at all.

    Args:
        workspace: Workspace with the snapshot and the store.
        jobs: Jobs of one snapshot, as `plan_jobs` gives them.

    Raises:
        InputError: the encoder has no such hidden state, or no token for a pooling.
        WorkspaceError: the snapshot is damaged.
    """
    loaded = {}
    of_encoder = [job for job in jobs if job.pooled_from is None]
    if of_encoder:
        first = of_encoder[0]
        every = dict.fromkeys(pooling for job in of_encoder for pooling in job.options.tokens or ())
        encoder = load_encoder(workspace, first.tag, replace(first.options, tokens=tuple(every)))
        loaded = dict.fromkeys(of_encoder, encoder)
    return loaded | {job: load_tokens(workspace, job) for job in jobs if job not in loaded}


def find_tokens(
    workspace: Workspace, job: ExtractionJob, pooling: TokenPooling
) -> ActivationSplit | None:
    """The stored split of which a pooling can be taken instead of running the encoder.

    Args:
        workspace: Workspace with the store.
        job: the extraction.
        pooling: Pooling that it is to give.

    Returns:
        The split; None where there is none, or it cannot give the pooling, which is logged.

    Raises:
        InputError: the encoder has no such hidden state.
    """
    try:
        split = open_tokens(workspace, job, pooling)
    except (StoreNotFoundError, UnknownNameError):
        return None
    except IncompleteSplitError:
        log.info("the encoder is run: the stored split of all tokens is not complete")
        return None
    except (CorruptStoreError, ProvenanceError) as error:
        log.info("the encoder is run: %s", error)
        return None
    record, asked = split.record, job.options.encoding
    if is_exact(split) or (pooling == "mean" and record.encoding == asked):
        return split
    why = (
        f"its encoding {record.encoding} is not the {asked} that is asked for"
        if pooling == "mean"
        else f"of {record.encoding} tokens only the mean is as good as a pooled extraction"
    )
    log.info("the encoder is run: %s holds all tokens, but %s", split.name, why)
    return None


def open_tokens(workspace: Workspace, job: ExtractionJob, pooling: TokenPooling) -> ActivationSplit:
    """The stored split of all tokens that a pooling is of, whatever its encoding.

    Args:
        workspace: Workspace with the store.
        job: the extraction.
        pooling: Pooling that it is to give.

    Raises:
        StoreNotFoundError: nothing is stored.
        UnknownNameError: all tokens are not.
        IncompleteSplitError: not all shards are.
        CorruptStoreError: the split's record or plan is damaged.
        ProvenanceError: they are of another snapshot, other data or other arithmetic, lack a layer,
            or hold values that were NaN or infinite.
        InputError: the encoder has no such hidden state.
    """
    data, options = workspace.dataset(job.options.dataset), job.options
    layers = pooled_layers(workspace, job, pooling)
    split = workspace.split(job.tag, StoredName(job.split, "all", data.name).name)
    split.require_complete()
    record = split.record
    attention = str(record.provenance.get("attn_implementation"))
    info = read_snapshot_info(workspace.require_snapshot(job.tag))
    wanted = provenance(workspace, data, info, job, "all", attention)
    # tokens are compared when they are read (see `StoredTokens.check`)
    if difference := first_difference(without_digest(record.provenance), wanted):
        field, there, here = difference
        raise ProvenanceError(
            f"{split.name} holds all tokens, but with {field} = {there!r}, now it is {here!r}"
        )
    if lacking := sorted(set(layers).difference(record.layers)):
        depth = workspace.config.model.num_hidden_layers
        output = f" ({depth + 1} is the pooler output)" if lacking[-1] > depth else ""
        raise ProvenanceError(
            f"{split.name} holds all tokens, but not of layer {', '.join(map(str, lacking))}"
            f"{output}"
        )
    if options.nonfinite == "record" and split.info()["nonfinite"]:
        raise ProvenanceError(f"{split.name} holds values that were NaN or infinite")
    return split


def is_exact(split: ActivationSplit) -> bool:
    """Whether a split holds what the encoder gave, to the last bit."""
    return split.encoding.exact


def _begun(
    workspace: Workspace, job: ExtractionJob, pooling: TokenPooling
) -> ActivationSplit | None:
    return PooledSplit(workspace, job.tag, job.options.dataset, job.split, pooling).find()


def _stands_alone(
    workspace: Workspace, job: ExtractionJob, pooling: TokenPooling, begun: ActivationSplit
) -> bool:
    """Whether a split is whole and just what is asked for, and the tokens it was made from gone."""
    record, options = begun.record, job.options
    name = record.provenance.get("pooled_from")
    if not isinstance(name, str) or not begun.is_complete:
        return False
    try:
        workspace.split(job.tag, name)
    except (StoreNotFoundError, UnknownNameError):
        pass
    else:
        return False
    source = TokenSplit(name, str(record.provenance.get("pooled_from_encoding")))
    attention = str(record.provenance.get("attn_implementation"))
    info = read_snapshot_info(workspace.require_snapshot(job.tag))
    same = replace(job, pooled_from=source)
    data = workspace.dataset(options.dataset)
    wanted = provenance(workspace, data, info, same, pooling, attention)
    made_from = without_digest(record.provenance)
    return (record.encoding, record.compression, record.layers, made_from) == (
        *(options.encoding, options.compression, pooled_layers(workspace, job, pooling)),
        wanted,
    )


def _tokens_of(
    workspace: Workspace, job: ExtractionJob, pooling: TokenPooling, begun: ActivationSplit
) -> ActivationSplit | None:
    """The tokens that a split was begun from; None where the encoder was run."""
    made_from = begun.record.provenance
    name, encoding = made_from.get("pooled_from"), made_from.get("pooled_from_encoding")
    if name is None:
        return None
    try:
        tokens = open_tokens(workspace, job, pooling)
        if tokens.record.encoding != encoding:
            raise ProvenanceError(f"{tokens.name} is now of encoding {tokens.record.encoding}")
    except (StoreNotFoundError, UnknownNameError, IncompleteSplitError, ProvenanceError) as error:
        layers = ",".join(map(str, begun.record.layers))
        raise ProvenanceError(
            f"{begun.name} was pooled from the {encoding} tokens of {job.tag}/{name}, which are "
            f"not there as they were ({error}): extract them again (bertvision extract "
            f"--checkpoint {job.tag} --split {name} --pool none --encoding {encoding} --layers "
            f"{layers}), or use another --store"
        ) from None
    return tokens


def _by_source(job: ExtractionJob, sources: _Sources) -> list[ExtractionJob]:
    """The parts of the extraction of a split that have one source each."""
    parts: dict[TokenSplit | None, list[TokenPooling]] = {}
    for pooling in (pooling for pooling in job.options.tokens or () if (job, pooling) in sources):
        tokens = sources[job, pooling]
        source = None if tokens is None else TokenSplit(tokens.split, tokens.record.encoding)
        parts.setdefault(source, []).append(pooling)
    return [
        replace(job, pooled_from=source, options=replace(job.options, tokens=tuple(poolings)))
        for source, poolings in parts.items()
    ]
