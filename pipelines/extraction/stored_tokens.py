"""Poolings by Dask of tokens that are stored: what `extract --pool` writes, without the encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import cpu_count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import InputError, ProvenanceError, UnknownNameError
from bertvision.featurestore.format.encoding import decode_numpy
from bertvision.featurestore.lazy import SplitSource, decoded_layers, map_shards
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.encoders.kept_states import KeptStates, kept_tokens
from bertvision.pipelines.encoders.token_pooling import check_poolings, pool_numpy
from bertvision.pipelines.encoders.weights import has_pooler
from bertvision.pipelines.extraction.contents import POOLED_SHARD_WINDOWS
from bertvision.pipelines.extraction.job import ExtractionJob, LoadedSource
from bertvision.pipelines.extraction.layers import kept_layers
from bertvision.pipelines.tasks.registry import POOLINGS, TokenPooling
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    import dask.array as da

_THREADS = min(4, cpu_count() or 1)
"""Stored shards that are pooled at once: each takes the memory of its codes."""


class StoredTokens:
    """Poolings of a split of all tokens, as the encoder that it was extracted with gives them.

    Args:
        split: complete, of all tokens.
        layers: by pooling, the indices of the hidden states, ascending.

    Attributes:
        device: where it computes: where the store is read.
        tokens: the poolings, in the order of ``layers``.
        attention: that the encoder computed.
    """

    def __init__(
        self, split: ActivationSplit, layers: Mapping[TokenPooling, Sequence[int]]
    ) -> None:
        self.device = torch.device("cpu")
        self.tokens: tuple[TokenPooling, ...] = tuple(layers)
        self.attention = str(split.record.provenance["attn_implementation"])
        self._split = split
        self._layers = sorted({layer for of in layers.values() for layer in of})
        self._positions = split.layer_positions(self._layers)
        self._kept = KeptStates(layers, split.record.hidden_size, self.device)
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
            windows: of the split.
            rows: (batch,) which of them.

        Returns:
            For each of ``tokens``, (windows, layers, hidden) float32, in memory that the next call
            reuses.

        Raises:
            CorruptStoreError: what is stored is damaged.
        """
        import dask

        self._kept.begin(windows.n_tokens[rows])
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
        workspace: with the snapshot and the store.
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
    source = StoredTokens(split, layers)
    info, hidden = read_snapshot_info(folder), split.record.hidden_size
    return LoadedSource(source, tokenizer, info, layers, hidden, source.check)


def pooled_layers(
    workspace: Workspace, job: ExtractionJob, pooling: TokenPooling
) -> tuple[int, ...]:
    """The hidden states that a pooled extraction keeps.

    Args:
        workspace: with the snapshot.
        job: the extraction, with the layers that were asked for.
        pooling: whose they are.

    Raises:
        InputError: the encoder has no such hidden state.
    """
    pooler = has_pooler(workspace.require_snapshot(job.tag))
    depth = workspace.config.model.num_hidden_layers
    return kept_layers(job.options.layers, depth, pooler=pooler, tokens=pooling)


def pool_split(
    split: ActivationSplit, poolings: Sequence[TokenPooling], layers: Sequence[int] | None = None
) -> da.Array:
    """Poolings of the windows of a split that holds all tokens.

    Equal to the pooled extraction of the same snapshot but for the error of the split's encoding;
    the examples are in the split's own stored order (``split.plan.example_id``).

    Args:
        split: a complete split of all tokens.
        poolings: of cls, sep, mean and max; the order of the axis. Of an encoder whose windows do
            not begin or end with a special token, cls or sep is a token like any other (see
            `token_pooling.check_poolings`).
        layers: indices of hidden states, or all.

    Returns:
        Lazy float32 (example, pooling, layer, hidden), one task per shard.

    Raises:
        UnknownNameError: there is no such pooling.
        InputError: no pooling, one twice, or the split is pooled already.
        IncompleteSplitError: shards are not committed yet.
    """
    for pooling in poolings:
        if pooling not in POOLINGS:
            raise UnknownNameError(f"no pooling {pooling!r}: there are {', '.join(POOLINGS)}")
    if not poolings or len(set(poolings)) < len(poolings):
        raise InputError(f"poolings {list(poolings)}: name at least one, each once")
    held = split.record.provenance.get("tokens", "all")
    if held != "all":
        raise InputError(
            f"{split.name} holds one vector per window, its {held} pooling: take the split of all "
            "tokens, or read this one as it is"
        )
    positions = tuple(split.layer_positions(layers))
    sizes = tuple(len(split.plan.examples_of(shard)) for shard in range(split.plan.n_shards))
    tail = (len(poolings), len(positions))
    return map_shards(split, _pool_shard, positions, tuple(poolings), chunks=(sizes,), tail=tail)


def _pool_shard(
    shard: npt.NDArray[np.int64],
    source: SplitSource,
    positions: tuple[int, ...],
    poolings: tuple[TokenPooling, ...],
) -> npt.NDArray[np.float32]:
    """(examples of the shard, poolings, layers, hidden)."""
    split, number = source.open(), int(shard[0])
    examples = split.plan.examples_of(number)
    lengths = split.plan.n_tokens[examples.start : examples.stop]
    shape = (len(examples), len(poolings), len(positions), split.record.hidden_size)
    pooled = np.empty(shape, np.float32)
    for i, states in enumerate(decoded_layers(split, number, positions)):
        for p, pooling in enumerate(poolings):
            pooled[:, p, i] = pool_numpy(states, lengths, pooling)
    return pooled
