"""The extraction of one split of the data: its stored splits are opened, filled, accounted for.

A quantised encoding is calibrated on a sample of the split's windows. What the extraction has cost
so far, added up over interrupted calls, is recorded in the workspace, not in the store: no other
machine would repeat these times.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.errors import DiskSpaceError, NonFiniteError, WorkspaceError, counted
from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.calibration import POOLED, Calibration, Calibrator
from bertvision.featurestore.format.encoding import encode
from bertvision.featurestore.format.layout import ENCODINGS, get_encoding
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.records import ShardRecord
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.featurestore.writer import (
    SplitWriter,
    expected_bytes,
    free_bytes,
    open_writer,
)
from bertvision.featurestore.writing.origin import TOKEN_IDS
from bertvision.pipelines.encoders.encoder import HiddenStateSource
from bertvision.pipelines.encoders.sites.taps import check_same_sites
from bertvision.pipelines.extraction.contents import (
    asked_split,
    chosen_tokens,
    provenance,
    token_ids_digest,
)
from bertvision.pipelines.extraction.job import Extracted, ExtractionJob, LoadedSource
from bertvision.pipelines.extraction.shardwork import ShardWork, raise_of_window
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.progress import progress
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.records import read_record, write_record
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.records import ExtractionCosts
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.extraction.cluster import ClusterWork


_WRITE_EVERY = 10.0
"""Seconds between two writes: so much of a killed call may be missing."""


class ExtractionCost:
    """The record ``extraction/<tag>/<stored split>.json``, kept while a split is extracted.

    A context manager: what was noted is written when it ends, also by an error. Where nothing was
    noted nothing is written. The caller holds the split's lock.

    Args:
        path: Path of the record.
        fresh: the split is created by this call; what an earlier one cost does not count.
        started: `time.perf_counter` of when this call took up the split.
        new: the record before anything was extracted.

    Attributes:
        bytes: Size of all shards written so far.
        seconds: Seconds that this call spent on shards, where it does other things too; None is all
            its time.
    """

    def __init__(self, path: Path, *, fresh: bool, started: float, new: ExtractionCosts) -> None:
        if fresh:
            path.unlink(missing_ok=True)
        self._path = path
        self._started = self._written = started
        self._new = new
        self._before = _read(path, new)
        self._examples = self._before.examples_written
        self.bytes = self._before.bytes
        self._spent_computing = 0.0
        self.seconds: float | None = None
        self._noted = False

    def __enter__(self) -> ExtractionCost:
        return self

    def __exit__(self, *error: object) -> None:
        if self._noted:
            self._write()

    def note(self, record: ShardRecord, encoder_seconds: float) -> None:
        """Count a shard that was committed.

        Args:
            record: Record of the shard.
            encoder_seconds: spent computing by this call so far.
        """
        self._noted = True
        self._examples += record.examples
        self.bytes += sum(file.bytes for file in record.files.values())
        self._spent_computing = encoder_seconds
        if time.perf_counter() - self._written >= _WRITE_EVERY:
            self._write()

    def _write(self) -> None:
        self._written = time.perf_counter()
        seconds = self._written - self._started if self.seconds is None else self.seconds
        sums = {
            "examples_written": self._examples,
            "seconds": self._before.seconds + seconds,
            "encoder_seconds": self._before.encoder_seconds + self._spent_computing,
            "bytes": self.bytes,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self._path, self._new.model_copy(update=sums))


def _read(path: Path, new: ExtractionCosts) -> ExtractionCosts:
    """The sums of earlier calls; ``new`` where the record is damaged or tells of another store."""
    try:
        before = read_record(path, ExtractionCosts, "bertvision extract")
    except WorkspaceError:
        return new
    # as earlier versions wrote it
    absolute = str(path.parents[2] / new.store)
    return before if before.store in (new.store, absolute) else new


log = logging.getLogger(__name__)


class SplitExtraction:
    """The extraction of one split of the data, into as many stored splits as there are poolings."""

    def __init__(
        self,
        workspace: Workspace,
        data: Dataset,
        job: ExtractionJob,
        loaded: LoadedSource,
    ) -> None:
        self.workspace, self.job, self.options = workspace, job, job.options
        self.tokens = job.options.tokens or ()
        self.started = time.perf_counter()
        self.source = loaded.source
        self.windows = data.windows(job.split, loaded.tokenizer, self.tokens)
        loaded.check(self.windows)
        self.windows = chosen_tokens(self.windows, job, data.task)
        # an unknown word is a word
        special = {*loaded.tokenizer.all_special_ids} - {loaded.tokenizer.unk_token_id}
        self.special = tuple(special)
        self.storage = open_storage(workspace.at(job.options.store).activations)
        self.specs: dict[TokenPooling, SplitSpec] = {}
        self.contents: dict[TokenPooling, SplitContents] = {}
        digest = token_ids_digest(self.windows)
        for pooling in self.tokens:
            made_from = provenance(
                *(workspace, data, loaded.info, job, pooling, self.source.attention)
            )
            self.specs[pooling], self.contents[pooling] = asked_split(
                *(workspace, data, job, pooling, self.windows, self.storage),
                layers=loaded.layers[pooling],
                hidden_size=loaded.hidden_size,
                made_from={**made_from, TOKEN_IDS: digest},
            )

    def run(self, shards: Sequence[int] | None, mend: bool) -> list[Extracted]:
        """Write what is missing.

        Args:
            shards: Missing shards to write; None is all of them.
            mend: write everything beside the shards again, and ``shards`` even if they are there.
        """
        total = {
            pooling: expected_bytes(self.contents[pooling].plan, self.specs[pooling])
            for pooling in self.specs
        }
        plan = next(iter(self.contents.values())).plan
        with ExitStack() as stack:
            writers: dict[TokenPooling, SplitWriter] = {}
            fresh = {
                pooling: not Ledger(self.storage, spec.tag, spec.split).exists
                for pooling, spec in self.specs.items()
            }
            for pooling, spec in self.specs.items():
                if self.options.sites is not None and not fresh[pooling]:
                    stored = StoredSplit(self.storage, spec.tag, spec.split)
                    check_same_sites(stored, self.options.sites)
            begun = not any(fresh.values())
            if not begun:
                self._say(sum(total.values()))
            self._check_space(sum(total[pooling] for pooling in fresh if fresh[pooling]))
            refusing = self.options.encoding == "float16" and self.options.nonfinite == "error"
            if refusing and any(fresh.values()):
                self._check_range()
            for pooling in self.specs:
                again = (shards or ()) if mend else None
                writers[pooling] = stack.enter_context(self.open_writer(pooling, again))
            pending = _pending(writers, shards)
            lacking = Counter(pooling for missing in pending.values() for pooling in missing)
            self._check_space(sum(total[k] * n // plan.n_shards for k, n in lacking.items()))
            # only now: whatever fails before leaves the workspace with the store that it had
            self.workspace.keep_at(self.options.store)
            count = sum(len(plan.examples_of(shard)) for shard in pending)
            costs = {k: stack.enter_context(self.cost(k, fresh=fresh[k])) for k in writers}
            if begun and pending:
                self._say(sum(total.values()))
            elif begun:
                log.info("%s is complete: nothing to extract", self._name)
            name = f"extract {self._name}"
            bar = stack.enter_context(progress(count, name, "example")) if pending else None
            work = self._work(writers)
            left = {shard: len(missing) for shard, missing in pending.items()}
            for written in work.write(pending):
                left[written.record.shard] -= 1
                # in all splits that lacked it
                if left[written.record.shard] == 0 and bar is not None:
                    bar.update(written.record.examples)
                if not mend:  # a repair is not what it takes to extract
                    costs[written.tokens].note(written.record, work.seconds / len(writers))
            infos: dict[TokenPooling, dict[str, Any]] = {}
            for pooling, cost in costs.items():
                info = infos[pooling] = writers[pooling].split.info()
                cost.bytes = info["bytes"]
        return [
            Extracted(
                tag=str(spec.tag),
                split=spec.split,
                examples=len(plan),
                shards_written=lacking[pooling],
                examples_written=sum(
                    len(plan.examples_of(shard)) for shard, on in pending.items() if pooling in on
                ),
                seconds=time.perf_counter() - self.started,
                encoder_seconds=work.seconds,
                bytes=costs[pooling].bytes,
                pooled_from=self._pooled_from,
                encoding_error=infos[pooling]["encoding_error"],
            )
            for pooling, spec in self.specs.items()
        ]

    def open_writer(
        self, pooling: TokenPooling, mend: Collection[int] | None = None
    ) -> AbstractContextManager[SplitWriter]:
        """Open a stored split to write to; a new one is calibrated and made.

        Args:
            pooling: Pooling of the split, or ``all``.
            mend: Shards to write again, as in `featurestore.writer.open_writer`.
        """
        made = partial(self._calibration, pooling)
        return open_writer(
            self.storage, self.specs[pooling], self.contents[pooling], made, mend=mend
        )

    def _check_space(self, needed: int) -> None:
        free = free_bytes(self.storage)
        if free is None or needed <= free:
            return
        advice = ["free some space", "name another --store"]
        if any(len(spec.layers) > 1 for spec in self.specs.values()):
            advice.append("keep fewer --sites" if self.options.sites else "keep fewer --layers")
        if len(self.specs) > 1:
            advice.append("extract one --pool at a time")
        spec = next(iter(self.specs.values()))
        if smaller := _smaller(spec.encoding, spec.hidden_size):
            advice.append(f"take a smaller --encoding ({', '.join(smaller)})")
        raise DiskSpaceError(
            f"{size(needed)} are needed in {self.storage}, {size(free)} are free: "
            f"{', '.join(advice[:-1])} or {advice[-1]}"
        )

    @property
    def _pooled_from(self) -> str | None:
        """The stored split that is pooled, as the store names it."""
        tokens = self.job.pooled_from
        return None if tokens is None else f"{self.job.tag}/{tokens.name}"

    @property
    def _name(self) -> str:
        """The stored splits in words."""
        first = next(iter(self.specs.values()))
        poolings = [pooling for pooling in self.tokens if pooling != "all"]
        name = StoredName.parse(first.split)._replace(tokens="all").name
        return f"{first.tag}/{name}" + (f"-{','.join(poolings)}" if poolings else "")

    def _say(self, total: int) -> None:
        plan, free = next(iter(self.contents.values())).plan, free_bytes(self.storage)
        tokens = self.job.pooled_from
        how = f"pooled from the {tokens.encoding} tokens of {self._pooled_from}" if tokens else ""
        log.info(
            "%s %s: %s, %s, %s, %s; free on the disk: %s",
            self._name,
            how or "by the encoder",
            counted(len(plan), "window"),
            counted(int(self.windows.n_tokens.sum()), "token")
            + (f", {plan.total_tokens:,} of them kept" if self.options.keep else ""),
            counted(plan.n_shards * len(self.specs), "shard"),
            size(total),
            "unknown" if free is None else size(free),
        )

    def _calibration(self, pooling: TokenPooling) -> Calibration:
        return self._calibrations[pooling]

    @cached_property
    def _calibrations(self) -> Mapping[TokenPooling, Calibration]:
        """One for each kind that is kept, from one pass over the sample."""
        calibrations = calibrate(
            *(self.source, self.windows, self.options.encoding),
            hidden_size=next(iter(self.specs.values())).hidden_size,
            special=self.special,
            nonfinite=self.options.nonfinite,
        )
        for pooling, calibration in zip(self.source.tokens, calibrations, strict=True):
            self._say_encodings(pooling, calibration.compared)
        return dict(zip(self.source.tokens, calibrations, strict=True))

    def _check_range(self) -> None:
        """Refuse float16 for a sample with values beyond its range, before a split is made.

        Raises:
            NonFiniteError: it has some; the message names window, token and layer.
        """
        encoded = partial(encode, encoding=get_encoding("float16"))
        rows = _sample(self.source, self.windows)
        for batch in self.source.batches(self.windows.n_tokens[rows]):
            states = self.source(self.windows, rows[batch])
            for pooling, hidden_states in zip(self.source.tokens, states, strict=True):
                lengths = self.source.kept(pooling, self.windows.n_kept[rows[batch]]).tolist()
                raise_of_window(
                    encoded,
                    dict(zip(rows[batch].tolist(), hidden_states.split(lengths), strict=True)),
                    f"{self.specs[pooling].tag}/{self.specs[pooling].split}",
                    self.options.sites or self.specs[pooling].layers,
                )

    def _say_encodings(self, pooling: TokenPooling, errors: Mapping[str, float]) -> None:
        """Say what a split takes in each encoding, and which error that leaves on the sample."""
        plan, spec = self.contents[pooling].plan, self.specs[pooling]
        told = (
            f"{name} {size(expected_bytes(plan, replace(spec, encoding=name)))}, {error:.2g}"
            for name, error in errors.items()
        )
        log.info(
            "%s/%s by encoding, with its error in deviations of a channel: %s",
            *(spec.tag, spec.split, "; ".join(told)),
        )

    def _work(self, writers: Mapping[TokenPooling, SplitWriter]) -> ShardWork | ClusterWork:
        if self.options.scheduler is None:
            return ShardWork(writers, self.windows, self.source, self.options.nonfinite)
        from bertvision.pipelines.extraction.cluster import ClusterWork

        return ClusterWork(writers, self.job, self.options.scheduler)

    def cost(self, pooling: TokenPooling, *, fresh: bool) -> ExtractionCost:
        """The record of what the extraction of a split costs, with the options it is made with."""
        spec, contents = self.specs[pooling], self.contents[pooling]
        path = self.workspace.root / "extraction" / spec.tag / f"{spec.split}.json"
        new = ExtractionCosts(
            tag=spec.tag,
            split=spec.split,
            examples=len(contents.plan),
            tokens=pooling,
            layers=spec.layers,
            encoding=spec.encoding,
            compression=spec.compression,
            precision=self.options.precision,
            nonfinite=self.options.nonfinite,
            shard_tokens=contents.plan.shard_tokens,
            device=self.source.device.type,
            store=_place(str(self.storage), self.workspace.root),
            pooled_from=self.job.pooled_from and self.job.pooled_from.name,
        )
        return ExtractionCost(path, fresh=fresh, started=self.started, new=new)


def _place(store: str, root: Path) -> str:
    """Where a store is: as seen from the workspace, where it lies in it and moves with it."""
    inside = "://" not in store and Path(store).is_relative_to(root)
    return Path(store).relative_to(root).as_posix() if inside else store


def _pending(
    writers: Mapping[TokenPooling, SplitWriter], shards: Sequence[int] | None
) -> dict[int, list[TokenPooling]]:
    """The splits that lack a shard, by its number."""
    pending: dict[int, list[TokenPooling]] = {}
    for pooling, writer in writers.items():
        for shard in writer.pending():
            if shards is None or shard in shards:
                pending.setdefault(shard, []).append(pooling)
    return dict(sorted(pending.items()))


def _smaller(encoding: str, hidden_size: int) -> list[str]:
    """The encodings that take less room, the largest of them first."""
    if encoding not in ENCODINGS:
        return []
    sizes = {
        name: candidate.codes_size(hidden_size) * np.dtype(candidate.zarr_dtype).itemsize
        for name, candidate in ENCODINGS.items()
    }
    smaller = [name for name in sizes if sizes[name] < sizes[encoding]]
    return sorted(smaller, key=lambda name: -sizes[name])


CALIBRATION_WINDOWS = {"all": 64, "pooled": 256}
"""Windows that channel statistics are taken from, evenly spread over the split. Measured on SQuAD
with all-MiniLM-L6-v2, fine-tuned for an epoch: from 4, 16, 64, 256 and 512 windows the relative
error of int8 is 6.36, 6.27, 6.22, 6.22 and 6.22e-3, that of int4 9.15, 9.02, 8.97, 8.97 and
8.97e-2. 64 windows (11,000 tokens) fix a channel's deviation to 1 % (8 % in the worst channel).

Of the [CLS] alone a window is one vector, and these vectors lie close together, so the error is
measured against their deviation from their mean (the same encoder, fine-tuned on 244 questions to
tell answerable ones; mean of the layers): 8.5, 6.9, 6.7 and 6.7e-3 of int8 from 16, 64, 256 and 512
of 2,872 windows, 6.7e-3 from all; of int4 1.22, 1.05, 1.02, 1.02 and 1.02e-1."""

TRANSFORM_TOKENS = 60
"""Tokens for each channel that the predictors and axes of a transform are taken from. Measured of
all-MiniLM-L6-v2 on SQuAD at an error of 0.115, bits a value on held-out text from 10, 21, 42 and 83
tokens for each of its 384 channels: 2.13, 2.05, 2.00 and 1.97."""


def calibrate(
    encoder: HiddenStateSource,
    windows: Windows,
    encoding: str,
    *,
    hidden_size: int,
    special: Collection[int] = (),
    nonfinite: Literal["error", "record"] = "error",
) -> list[Calibration]:
    """Channel statistics of a sample of a split's windows, and the error that they leave.

    Args:
        encoder: Encoder of the snapshot, or what stands for it.
        windows: Windows of the split.
        encoding: one that is calibrated.
        hidden_size: Channels of a hidden state.
        special: vocabulary indices of the tokenizer's special tokens.
        nonfinite: Treatment of tokens with NaN or infinity: refused, or left out.

    Returns:
        For each of the encoder's ``tokens``.

    Raises:
        NonFiniteError: there is one, or no token is without; it names window, token and layer.
    """
    encoding_to_use = get_encoding(encoding)
    least = 0
    if encoding_to_use.transformed:
        kept = sum(int(encoder.kept(k, windows.n_kept).sum()) for k in encoder.tokens)
        each = max(1, kept / len(windows) / len(encoder.tokens))
        least = math.ceil(TRANSFORM_TOKENS * hidden_size / each)
    rows = _sample(encoder, windows, least)
    calibrators = {
        pooling: Calibrator(encoding_to_use, _kinds(pooling, windows, rows, special))
        for pooling in encoder.tokens
    }
    added = dict.fromkeys(encoder.tokens, 0)
    for batch in encoder.batches(windows.n_tokens[rows]):
        states = encoder(windows, rows[batch])
        for pooling, hidden_states in zip(encoder.tokens, states, strict=True):
            finite = torch.isfinite(hidden_states).all(dim=-1)
            whole = finite.all(dim=1)
            if nonfinite == "error" and not bool(whole.all()):
                lengths = encoder.kept(pooling, windows.n_kept[rows[batch]])
                _raise_non_finite(finite, rows[batch], lengths)
            calibrators[pooling].add(hidden_states, whole)
            added[pooling] += int(whole.sum())
    if not all(added.values()):
        raise NonFiniteError(
            f"each token of {len(rows)} windows has NaN or infinity in a hidden state: check the "
            "snapshot, or extract with precision 32"
        )
    return [calibrator.result() for calibrator in calibrators.values()]


def _sample(encoder: HiddenStateSource, windows: Windows, least: int = 0) -> npt.NDArray[np.int64]:
    """Rows of `CALIBRATION_WINDOWS`, or ``least``, evenly spread over those that keep a token."""
    most = max(least, CALIBRATION_WINDOWS["all" if "all" in encoder.tokens else "pooled"])
    there = np.flatnonzero(windows.n_kept)
    return there[np.linspace(0, len(there) - 1, min(most, len(there))).astype(np.int64)]


def _kinds(
    pooling: TokenPooling, windows: Windows, rows: npt.NDArray[np.int64], special: Collection[int]
) -> npt.NDArray[np.str_]:
    """The kind of each vector that is kept of some windows: poolings are all of one."""
    if pooling != "all":
        return np.full(len(rows), POOLED)
    first, lengths = windows.first_token[rows], windows.n_tokens[rows]
    spans = [np.arange(start, start + n) for start, n in zip(first, lengths, strict=True)]
    of_sample = np.isin(windows.input_ids[np.concatenate(spans)], [*special])
    kinds = np.where(of_sample, "special", "ordinary")
    kinds[np.cumsum(lengths) - lengths] = "first"
    if windows.parts is not None:  # of each item that a window holds
        parts = windows.parts[np.concatenate(spans)]
        kinds[1:][parts[1:] != parts[:-1]] = "first"
    chosen = windows.kept_of(rows)
    return kinds if chosen is None else kinds[chosen]


def _raise_non_finite(
    finite: Tensor, rows: npt.NDArray[np.int64], lengths: npt.NDArray[np.integer]
) -> None:
    """Name the first token and layer that is not finite, (tokens, layers)."""
    token, layer = (int(i) for i in torch.nonzero(~finite)[0])
    starts = np.cumsum(lengths) - lengths
    window = int(np.searchsorted(starts, token, side="right")) - 1
    raise NonFiniteError(
        f"window {rows[window]} of the data, token {token - starts[window]}, layer {layer} of the "
        "kept ones: the hidden state holds NaN or infinity; check the snapshot, extract with "
        "precision 32, or replace and count them with --nonfinite record"
    )
