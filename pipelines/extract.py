"""Extraction: a snapshot's hidden states of every window, into the activation store.

The shard plan comes first, from token lengths alone; then shard after shard is a function of
(snapshot, shard): computed and encoded on the device, in stored order, and written by a thread
while the next one is computed. All poolings of a window come from one forward pass.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bertvision.errors import DiskSpaceError, InputError
from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.encoding import ChannelStats, get_encoding
from bertvision.featurestore.ledger import Ledger
from bertvision.featurestore.place import Place, place_of
from bertvision.featurestore.shardfile import CompressionName
from bertvision.featurestore.writer import (
    SplitWriter,
    expected_bytes,
    free_bytes,
    open_writer,
)
from bertvision.pipelines.dataset import Dataset
from bertvision.pipelines.encoder import channel_stats
from bertvision.pipelines.extraction_cost import ExtractionCost
from bertvision.pipelines.extraction_job import ExtractionJob, LoadedEncoder, load_encoder
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.pretrained import ensure_snapshot
from bertvision.pipelines.progress import progress
from bertvision.pipelines.selection import parse_stored_split, stored_split
from bertvision.pipelines.shardwork import NonFinite, ShardWork
from bertvision.pipelines.split_contents import as_recorded, provenance, split_contents
from bertvision.pipelines.tables import size
from bertvision.pipelines.tasks.registry import TASKS, Tokens
from bertvision.pipelines.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.cluster_extract import ClusterWork

log = logging.getLogger(__name__)


class Extracted(NamedTuple):
    """What an extraction did to one split.

    Attributes:
        tag: the snapshot.
        split: its name in the store.
        examples: windows of the split.
        shards_written: shards written by this call, with
        examples_written: windows; the others were there before.
        seconds: wall time of this call, of which
        encoder_seconds: were spent computing: forward pass and encoding. Both are of all splits
            that were written together.
        bytes: of all shards of the split.
    """

    tag: str
    split: str
    examples: int
    shards_written: int
    examples_written: int
    seconds: float
    encoder_seconds: float
    bytes: int


class Keeping(NamedTuple):
    """How activations are kept.

    Attributes:
        encoding: int8, int4, bfloat16, float16 or float32. Pooled states of early layers lie so
            close together that bfloat16 rounds away most of what tells them apart (measured of
            [CLS] with all-MiniLM-L6-v2: up to 84 % of it); int8, which stores the deviation from a
            channel's mean, loses 0.7 %.
        compression: of the codes: none, zstd or pcodec.
        shard_tokens: capacity of a shard; None is what suits the tokens.
        store: another folder or URL: the workspace's from the moment on when a split of it is open
            for writing, so that a failure before leaves the workspace as it is.
    """

    encoding: str = "int8"
    compression: CompressionName = "none"
    shard_tokens: int | None = None
    store: str | None = None


def extract(
    workspace: Workspace,
    tag: str,
    *,
    splits: Sequence[str] | None = None,
    tokens: Sequence[Tokens] | None = None,
    dataset: str | None = None,
    encoding: str = "int8",
    compression: CompressionName = "none",
    layers: Sequence[int] | None = None,
    precision: str = "auto",
    nonfinite: NonFinite = "error",
    shard_tokens: int | None = None,
    shards: Sequence[int] | None = None,
    mend: bool = False,
    store: str | None = None,
    scheduler: str | None = None,
) -> list[Extracted]:
    """Write the activations of a snapshot into the workspace's store.

    What is there already, from the same snapshot, data and settings, is kept: a killed extraction
    is finished by the same call and computes at most one shard again.

    Args:
        workspace: with the snapshot; ``0e`` and ``untrained`` are made where they are missing.
        tag: which snapshot.
        splits: names of splits, also as they are stored (``train-cls``); all of the data by
            default.
        tokens: what to keep of each window: ``("all",)`` tokens (stored as ``train``), or poolings
            of them, ``cls``, ``sep``, ``mean``, ``max`` (``train-cls``, …; with cls goes the pooler
            output where the snapshot has a pooler). None is what the task's heads need.
        dataset: an added data set; None is the workspace's own data.
        encoding: see `Keeping`, also for compression, shard_tokens and store.
        compression: of the codes.
        layers: indices of the hidden states to keep (0 is the embedding output), or all.
        precision: of the forward pass: auto, 32 or bf16.
        nonfinite: refuse NaN and infinity ("error"), or replace and count them ("record").
        shard_tokens: capacity of a shard.
        shards: which to write, of those that are missing; all of them by default.
        mend: write everything beside the shards again, and ``shards`` even where they are there.
        store: another place for the activations.
        scheduler: address of a Dask cluster (``tcp://…``) whose workers compute the shards; None
            computes them here.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: an option is wrong, the encoder has no token for a pooling, or the splits are
            not all of the same tokens.
        ProvenanceError: a split was begun from something else.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk cannot hold what is missing.
        NonFiniteError: a hidden state is NaN or infinite.
    """
    get_encoding(encoding)
    keeping = Keeping(encoding, compression, shard_tokens, store)
    workspace.at(store)  # a wrong name is said before the encoder is loaded
    data = workspace.dataset(dataset)
    names, kept = _wanted(data, splits, tokens)
    ensure_snapshot(workspace, tag)
    arithmetic = resolve_precision(precision)
    loaded = load_encoder(workspace, tag, kept, layers, arithmetic)
    items = {split: data.items(split) for split in names}  # of all, before hours go into the first
    done = []
    for split, found in items.items():
        job = ExtractionJob(
            root=workspace.root,
            tag=tag,
            dataset=data.name,
            split=split,
            tokens=kept,
            layers=None if layers is None else tuple(layers),
            precision=arithmetic,
            nonfinite=nonfinite,
        )
        extraction = _Extraction(workspace, data, found, job, loaded, keeping)
        done += extraction.run(shards, mend, scheduler)
    return done


def _wanted(
    data: Dataset, splits: Sequence[str] | None, tokens: Sequence[Tokens] | None
) -> tuple[list[str], tuple[Tokens, ...]]:
    """Which splits of the data are meant, and what of their windows is kept."""
    default = tuple(dict.fromkeys(tokens or (TASKS[data.config.name].tokens,)))
    if "all" in default and len(default) > 1:
        raise InputError(
            f"{', '.join(default)}: all tokens and poolings are extracted by two calls, or leave "
            "the poolings out: `bertvision probe` computes them from all tokens"
        )
    names = list(splits or data.splits)
    parsed = [parse_stored_split(name) for name in names]
    kinds = {default if found.tokens == "all" else (found.tokens,) for found in parsed}
    if len(kinds) > 1 or (tokens is not None and kinds != {default}):
        raise InputError(
            f"splits {', '.join(names)}: a name that ends with a pooling means that alone, the "
            f"others here mean {', '.join(default)!r}: extract them by two calls, or choose with "
            "--pool"
        )
    if not names:
        raise InputError(
            "the workspace has no data of its own: name a data set with --task and --data"
        )
    return [found.split for found in parsed], kinds.pop()


class _Extraction:
    """The extraction of one split of the data, into as many stored splits as there are poolings."""

    def __init__(
        self,
        workspace: Workspace,
        data: Dataset,
        items: Sequence[Any],
        job: ExtractionJob,
        loaded: LoadedEncoder,
        keeping: Keeping,
    ) -> None:
        self.workspace, self.job, self.keeping = workspace, job, keeping
        self.started = time.perf_counter()
        self.encoder = loaded.encoder
        self.windows = data.task.windows(items, loaded.tokenizer, data.config)
        self.place = place_of(workspace.at(keeping.store).activations)
        self.specs: dict[Tokens, SplitSpec] = {}
        self.contents: dict[Tokens, SplitContents] = {}
        seed = workspace.config.finetune.seed if job.split in ("train", "all") else None
        for kept in job.tokens:
            self.contents[kept] = split_contents(
                *(data.task, self.windows, items, kept),
                seed=seed,
                shard_tokens=keeping.shard_tokens,
            )
            self.specs[kept] = SplitSpec(
                tag=job.tag,
                split=stored_split(job.split, kept, data.name),
                encoding=keeping.encoding,
                compression=keeping.compression,
                layers=loaded.layers[kept],
                hidden_size=loaded.hidden_size,
                provenance=provenance(
                    *(workspace, data, loaded.info, job.split, kept),
                    *(job.precision, job.nonfinite, self.encoder.attention),
                ),
            )

    def run(
        self, shards: Sequence[int] | None, mend: bool, scheduler: str | None
    ) -> list[Extracted]:
        """Write what is missing."""
        total = {
            kept: expected_bytes(self.contents[kept].plan, self.specs[kept]) for kept in self.specs
        }
        self._say(sum(total.values()))
        plan = next(iter(self.contents.values())).plan
        with ExitStack() as stack:
            writers: dict[Tokens, SplitWriter] = {}
            fresh: dict[Tokens, bool] = {}
            for kept, spec in self.specs.items():
                ledger, contents = Ledger(self.place, spec.tag, spec.split), self.contents[kept]
                fresh[kept] = not ledger.exists
                if fresh[kept]:
                    _check_space(self.place, total[kept])
                elif mend:
                    contents = as_recorded(contents, ledger.read_split().arrays)
                again = (shards or ()) if mend else None
                calibrate = partial(self._channel_stats, kept)
                opened = open_writer(self.place, spec, contents, calibrate, mend=again)
                writers[kept] = stack.enter_context(opened)
            self.workspace.keep_at(self.keeping.store)
            pending = _pending(writers, shards)
            lacking = Counter(kept for missing in pending.values() for kept in missing)
            _check_space(self.place, sum(total[k] * n // plan.n_shards for k, n in lacking.items()))
            count = sum(len(plan.examples_of(shard)) for shard in pending)
            costs = {k: stack.enter_context(self._cost(k, fresh=fresh[k])) for k in writers}
            bar = stack.enter_context(progress(count, f"extract {self._name}", "example"))
            work = self._work(writers, scheduler)
            for written in work.write(pending):
                bar.update(written.record.examples / len(pending[written.record.shard]))
                if not mend:  # a repair is not what it takes to extract
                    costs[written.tokens].note(written.record, work.seconds / len(writers))
            for kept, cost in costs.items():
                cost.bytes = writers[kept].split.info()["bytes"]
        return [
            Extracted(
                tag=str(spec.tag),
                split=spec.split,
                examples=len(plan),
                shards_written=lacking[kept],
                examples_written=sum(
                    len(plan.examples_of(shard)) for shard, on in pending.items() if kept in on
                ),
                seconds=time.perf_counter() - self.started,
                encoder_seconds=work.seconds,
                bytes=costs[kept].bytes,
            )
            for kept, spec in self.specs.items()
        ]

    @property
    def _name(self) -> str:
        """Of the stored splits, for people."""
        first = next(iter(self.specs.values()))
        poolings = [kept for kept in self.job.tokens if kept != "all"]
        name = stored_split(self.job.split, "all", self.job.dataset)
        return f"{first.tag}/{name}" + (f"-{','.join(poolings)}" if poolings else "")

    def _say(self, total: int) -> None:
        plan, free = next(iter(self.contents.values())).plan, free_bytes(self.place)
        log.info(
            "%s: %d windows, %d tokens, %d shards, %s; free on the disk: %s",
            self._name,
            len(plan),
            int(self.windows.n_tokens.sum()),
            plan.n_shards * len(self.specs),
            size(total),
            "unknown" if free is None else size(free),
        )

    def _channel_stats(self, kept: Tokens) -> ChannelStats:
        return self._all_stats[kept]

    @cached_property
    def _all_stats(self) -> Mapping[Tokens, ChannelStats]:
        """Of all that is kept, from one pass over the sample."""
        stats = channel_stats(self.encoder, self.windows, self.job.nonfinite)
        return dict(zip(self.encoder.tokens, stats, strict=True))

    def _work(
        self, writers: Mapping[Tokens, SplitWriter], scheduler: str | None
    ) -> ShardWork | ClusterWork:
        if scheduler is None:
            return ShardWork(writers, self.windows, self.encoder, self.job.nonfinite)
        from bertvision.pipelines.cluster_extract import ClusterWork

        return ClusterWork(writers, self.job, scheduler)

    def _cost(self, kept: Tokens, *, fresh: bool) -> ExtractionCost:
        """The record of what the extraction of a split costs, with the options it is made with."""
        spec, contents = self.specs[kept], self.contents[kept]
        path = self.workspace.root / "extraction" / spec.tag / f"{spec.split}.json"
        known = {
            "tag": str(spec.tag),
            "split": spec.split,
            "examples": len(contents.plan),
            "tokens": kept,
            "layers": list(spec.layers),
            "encoding": spec.encoding,
            "compression": spec.compression,
            "precision": spec.provenance["precision"],
            "nonfinite": spec.provenance["nonfinite"],
            "shard_tokens": contents.plan.shard_tokens,
            "device": self.encoder.device.type,
            "store": str(self.place),
        }
        return ExtractionCost(path, fresh=fresh, started=self.started, known=known)


def _pending(
    writers: Mapping[Tokens, SplitWriter], shards: Sequence[int] | None
) -> dict[int, list[Tokens]]:
    """Which splits lack a shard, by its number."""
    pending: dict[int, list[Tokens]] = {}
    for kept, writer in writers.items():
        for shard in writer.pending():
            if shards is None or shard in shards:
                pending.setdefault(shard, []).append(kept)
    return dict(sorted(pending.items()))


def _check_space(place: Place, needed: int) -> None:
    free = free_bytes(place)
    if free is not None and needed > free:
        raise DiskSpaceError(
            f"{size(needed)} are needed in {place}, {size(free)} are free: free some space, keep "
            "fewer --layers, extract one --split at a time, or use --encoding int8 or int4"
        )
