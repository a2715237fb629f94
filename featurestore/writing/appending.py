"""ActivationWriter: hidden states that any code makes → a split, one example after another.

Examples may come in any order and be of any length: a shard is planned as it fills, and what it
holds, keys and lengths included, is committed with it. So a writer that was killed goes on where it
was. `finish` then makes an ordinary split of it, which all readers know.

`open_appending` checks the arguments of `ActivationStore.writer` and makes the writer.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from operator import itemgetter
from threading import RLock
from traceback import clear_frames
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from bertvision.errors import BertvisionError, InputError, NonFiniteError
from bertvision.featurestore.creation import library_versions
from bertvision.featurestore.format.encoding import ChannelStats
from bertvision.featurestore.format.keeping import KEEP, Keep
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.format.logits import LOGITS, TOP_LOGITS, TopLogits, TopRule
from bertvision.featurestore.format.names import NonFinite, SnapshotTag, check_name
from bertvision.featurestore.format.plan import SHARD_TOKENS
from bertvision.featurestore.format.records import FEATURES, FORMAT, GROWING
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.durable import full_disk_named
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.writing.batches import BATCH_DIMS, batch_examples, hooked
from bertvision.featurestore.writing.buffer import Example, Losses, ShardBuffer
from bertvision.featurestore.writing.columns import (
    DIMS,
    as_key,
    as_states,
    as_top,
    as_whole,
    check_length,
    check_same,
    kept_rows,
    rows_of,
)
from bertvision.featurestore.writing.committed import Committed, check_all, check_new
from bertvision.featurestore.writing.finishing import finish
from bertvision.featurestore.writing.growing import Column, GrowingLedger, GrowingRecord
from bertvision.featurestore.writing.growth import begin, close_part, commit, keys_due, known_stats
from bertvision.featurestore.writing.origin import tokenizer_digest


class ActivationWriter:
    """Adds examples to a split; made by `ActivationStore.writer`.

    It holds the split, or its part of it, until it is closed. Used in ``with``, it writes what it
    holds at the end of the block; where that ends by an error, the shard that was being filled is
    dropped. Full shards are written in a thread while the next one fills. Several processes, or
    threads, write one split by a writer each, of different parts.

    Attributes:
        dropped: by key why examples that `add` took are not stored: they do not fit the encoding,
            or ``keep`` keeps none of their tokens.

    Examples:
        >>> import torch
        >>> store = bertvision.ActivationStore.create("states")
        >>> states = torch.randn(5, 2, 8)  # (seq, layers, hidden)
        >>> with store.writer("0e", "speech", hidden_size=8, layers=["conv", "top"]) as writer:
        ...     if "clip-1" not in writer:  # after a kill it is not computed again
        ...         writer.add("clip-1", states, labels={"speaker": 3})
        ...     split = writer.finish()
        >>> split[0].shape  # (seq, hidden, layers)
        torch.Size([5, 8, 2])
    """

    def __init__(
        self,
        ledger: GrowingLedger,
        wanted: GrowingRecord,
        *,
        stats: ChannelStats | None,
        nonfinite: NonFinite,
        part: int,
    ) -> None:
        self._ledger, self._storage, self._part = ledger, ledger.storage, part
        self._layout, self._open, self._cut_short = wanted, True, False
        rule = wanted.provenance.get(KEEP)
        self._keep = None if rule is None else Keep.parse(rule)
        self.dropped: dict[str, str] = {}
        with full_disk_named(self._storage), ExitStack() as locks:
            state = ledger.state()
            if isinstance(state, GrowingRecord) and state.final is not None:
                finish(ledger)  # it was killed
            locks.enter_context(ledger.lock_part(part))
            # first: or a split that can never be finished would be begun
            self._due = keys_due(self._storage, ledger.tag, ledger.split)
            with ledger.commit_lock():
                state = begin(ledger, wanted, stats, part)
            self._growing = state if isinstance(state, GrowingRecord) else None
            if self._growing is None:
                table = ActivationSplit(self._storage, ledger.tag, ledger.split).table()
                self._stored = set(table["id"].to_pylist())
                self._buffers: tuple[ShardBuffer, ...] = ()
            else:
                self._committed = Committed(ledger, self._growing)
                self._committed.refresh()
                self._stored = self._committed.keys
                known = known_stats(ledger, self._growing)
                growing, losses = self._growing, Losses()
                self._buffers = tuple(
                    ShardBuffer(growing, nonfinite, known, losses) for _ in range(2)
                )
            self._held = locks.pop_all()
        # examples fill one of two buffers; the other one is empty, or waits to be committed
        self._filling = 0
        self._committing: Future[None] | None = None
        self._adding: str | None = None
        self._numbers = count()  # of the examples that hooks add
        self._thread = ThreadPoolExecutor(1, "bertvision-writer")
        self._lock, self._process = RLock(), os.getpid()

    def __repr__(self) -> str:
        return f"<ActivationWriter {self._ledger.name}: {len(self):,} examples>"

    def __contains__(self, key: object) -> bool:
        """Whether an example was added: here, or as far as was committed when this was opened."""
        with suppress(InputError):
            return self._has(as_key(key))
        return False

    def __len__(self) -> int:
        return len(self._keys())

    def __iter__(self) -> Iterator[str]:
        """Keys of the examples, sorted."""
        return iter(sorted(self._keys()))

    def _has(self, key: str) -> bool:
        # buffers first: what one of them lets go of is among those that are stored by then
        return any(key in buffer for buffer in self._buffers) or key in self._stored

    def _keys(self) -> set[str]:
        return {key for buffer in self._buffers for key in buffer.keys}.union(self._stored)

    @property
    def unwritten(self) -> list[str]:
        """Keys of the examples that a kill would lose now.

        They are those of the shard that is being filled, and of the one that is being written.
        """
        return [] if not self._buffers else [*self._full.keys, *self._buffer.keys]

    @property
    def _buffer(self) -> ShardBuffer:
        """The buffer that is being filled."""
        return self._buffers[self._filling]

    @property
    def _full(self) -> ShardBuffer:
        """The buffer that is being committed; empty where none is."""
        return self._buffers[1 - self._filling]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:
            return  # a forked process holds nothing
        with self._exclusively():
            try:
                if kind is None:
                    self._close()
            finally:
                if self._open:
                    self._cut_short = True
                self._let_go()

    def add(
        self,
        key: str | int,
        hidden_states: Tensor | npt.NDArray[Any],
        *,
        dims: Sequence[str] = DIMS,
        input_ids: object = None,
        labels: Mapping[str, object] | None = None,
        fields: Mapping[str, object] | None = None,
        logits: TopLogits | Tensor | npt.NDArray[Any] | None = None,
    ) -> None:
        """Add an example.

        It is on the disk once its shard is full, or after `flush`, `close` or `finish`.

        Args:
            key: its name, which no other example of the split has; a number is its digits.
            hidden_states: (seq, layers, hidden) float, on any device; copied.
            dims: Names of its axes, where their order is another, such as that of an example that
                is read, ``("seq", "hidden", "layers")``.
            input_ids: (seq,) token ids, or None; of all examples or none.
            labels: arrays of the example as a whole, by name; of each example the same ones.
            fields: arrays of its tokens, by name, (seq, …) each; likewise.
            logits: (seq, vocabulary) of the token that follows each, or what is stored of them,
                where the writer was made with ``logits``.

        Raises:
            InputError: the key is there already, or what is given cannot be stored.
            NonFiniteError: the hidden states hold NaN or infinity, or do not fit the encoding.
                Where it names another example, that one waited for the channel statistics and is
                dropped; this one is added.
            DiskSpaceError: the disk is full; what was committed stays whole.
        """
        with self._exclusively():
            self._require_open()
            name, ledger = as_key(key), self._ledger
            # whether a call like this one was interrupted when it had nearly ended
            again = self._adding == name and bool(self._buffers) and name in self._buffer
            there = self._has(name) and not again
            growing = check_new(name, self._growing, there, self._due, ledger.tag, ledger.split)
            states = as_states(name, hidden_states, growing, dims)
            rows, columns = rows_of(len(states), input_ids, labels, fields)
            top = as_top(name, len(states), logits, growing.top)
            if self._keep is not None and len(states):
                places, rows, columns = kept_rows(self._keep, len(states), rows, columns)
                if not len(places):
                    self.dropped[name] = f"keep={growing.provenance[KEEP]} keeps none of its tokens"
                    return
                states = states[torch.from_numpy(places).to(states.device)]
                top = top and top.map(itemgetter(places))
            check_length(name, len(states), growing)
            if (others := self._columns()) is not None:
                check_same(columns, others, f"example {name!r}")
            if again:
                self._buffer.take_back(name)
            if not self._buffer.has_room(name, len(states)):
                self._hand_over()
            self._use_known_stats()
            self._adding = name
            try:
                self._buffer.put(Example(name, states, rows, columns, top))
            except Exception:
                self._adding = None
                raise
            self._adding = None
            self._tell_refused()

    def add_batch(
        self,
        keys: Iterable[str | int],
        hidden_states: object,
        attention_mask: object = None,
        *,
        dims: Sequence[str] = BATCH_DIMS,
        input_ids: object = None,
        labels: Mapping[str, object] | None = None,
        fields: Mapping[str, object] | None = None,
        logits: object = None,
    ) -> None:
        """Add the examples of a padded batch, as a forward pass gives them, without the padding.

        Args:
            keys: (batch,) their names.
            hidden_states: ``hidden_states`` of a model of transformers, a tuple of (batch, seq,
                hidden) whose entries are taken by the indices of the split's layers; a tensor of
                that shape for each layer of the split; or one of all, (batch, seq, layers, hidden).
            attention_mask: (batch, seq), 0 at padding, on whichever side; None where there is none.
            dims: Names of the axes of one tensor of all layers, where their order is another.
            input_ids: (batch, seq) token ids, or None.
            labels: arrays of the examples, by name, (batch, …) each.
            fields: arrays of their tokens, by name, (batch, seq, …) each.
            logits: (batch, seq, vocabulary) of the token that follows each, where the writer was
                made with ``logits``.

        Raises:
            InputError: Shapes do not go together, or one is there already: none is added; or as
                `add`: examples before stay.
            NonFiniteError, DiskSpaceError: as `add`.

        Examples:
            >>> import torch
            >>> store = bertvision.ActivationStore.create("batches")
            >>> states = tuple(torch.randn(2, 4, 8) for _ in range(3))  # as a model returns them
            >>> mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
            >>> with store.writer("0e", "dev", hidden_size=8, layers=[0, 2]) as writer:
            ...     writer.add_batch(["a", "b"], states, mask)
            ...     split = writer.finish()
            >>> [states.shape for states in split]  # (seq, hidden, layers)
            [torch.Size([4, 8, 2]), torch.Size([2, 8, 2])]
        """
        given = keys.tolist() if isinstance(keys, Tensor | np.ndarray) else keys
        names = [as_key(key) for key in given] if isinstance(given, Iterable) else [as_key(given)]
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise InputError(f"keys hold {twice[0]!r} twice: name each example of a batch once")
        examples = batch_examples(
            *(self._layout, hidden_states, attention_mask, dims, input_ids, labels, fields),
            logits,
        )
        if len(names) != len(examples):
            raise InputError(f"{len(names)} keys were given for {len(examples)} examples")
        if there := [name for name in names if name in self]:
            raise InputError(
                f"{self._ledger.name} has {len(there)} of these {len(names)} examples already, "
                f"{there[0]!r} first: none was added; give the rows whose key is not in writer"
            )
        for key, example in zip(names, examples, strict=True):
            self.add(
                key,
                example.hidden_states,
                input_ids=example.input_ids,
                labels=example.labels,
                fields=example.fields,
                logits=example.logits,
            )

    @contextmanager
    def hook(
        self,
        model: nn.Module,
        modules: Sequence[str] | None = None,
        keys: Iterable[str | int] | None = None,
    ) -> Iterator[Self]:
        """Add what a model computes in somebody's own loop, as long as the block runs.

        Every call of the model is a batch, with the ``attention_mask`` and ``input_ids`` that it is
        given, and the ``logits`` that it returns where the writer was made with ``logits``.
        Examples that the split has already are passed over, so that a loop that was killed is run
        again as it is.

        Args:
            model: A model of transformers; with ``modules`` any.
            modules: Names of its modules, as ``model.named_modules()`` has them, whose outputs
                (batch, seq, hidden) are the layers of the split; None takes the hidden states.
            keys: Names of the examples in the order of the batches; by default numbers from 0,
                which further blocks of this writer continue.

        Raises:
            InputError: There is no such module, or not one for each layer; this writer has a part
                other than 0 and no keys; in the loop, there are too few keys, a pass continues a
                cache, as `generate` does, or gives no logits that are to be stored, or as
                `add_batch`.
        """
        record, count_layers = self._layout, len(self._layout.layers)
        if modules is not None and not isinstance(modules, str) and len(modules) != count_layers:
            raise InputError(
                f"modules={list(modules)}: name one for each of the {count_layers} layers that "
                f"{self._ledger.name} has"
            )
        if keys is None and self._part:
            raise InputError(
                f"keys are None and part is {self._part}: numbers from 0 would name other "
                "examples in each process; give keys="
            )
        named = self._numbers if keys is None else iter(keys)
        seen: set[str] = set()

        def take(
            layers: list[Tensor], mask: Tensor | None, ids: Tensor | None, logits: Tensor | None
        ) -> None:
            wanted = logits if LOGITS in record.provenance else None
            examples = batch_examples(record, layers, mask, BATCH_DIMS, ids, None, None, wanted)
            names = [as_key(key) for key in islice(named, len(examples))]
            if len(names) < len(examples):
                raise InputError(f"keys end before the batch of {len(examples)} examples")
            if twice := [n for n, times in Counter(names).items() if times > 1 or n in seen]:
                raise InputError(f"keys hold {twice[0]!r} twice: name each example once")
            seen.update(names)
            for key, example in zip(names, examples, strict=True):
                if key not in self:
                    self.add(
                        *(key, example.hidden_states),
                        input_ids=example.input_ids,
                        logits=example.logits,
                    )

        with hooked(model, modules, take):
            yield self

    def _columns(self) -> Mapping[str, Column] | None:
        """The kinds of arrays that every example has; None as long as there is none."""
        known = self._committed.columns
        return known if known is not None else self._full.columns or self._buffer.columns

    def flush(self) -> None:
        """Write the examples that are not written yet, as a shard that stays as it is.

        A shard is as long on the disk whatever it holds, so this is for the end, not for each
        example.

        Raises:
            InputError: another process committed one of them meanwhile: `discard` drops all.
            NonFiniteError: one does not fit the encoding; it is dropped, the others are written.
            DiskSpaceError: the disk is full; they are kept.
        """
        with self._exclusively():
            self._require_open()
            self._flush()

    def _flush(self) -> None:
        if self._growing is not None:
            if self._buffer.keys:
                self._hand_over()
            self._settle()
            self._tell_refused()

    def discard(self) -> None:
        """Drop the examples that are not written, so that they can be added again."""
        with self._exclusively():
            if self._growing is not None and self._open:
                with suppress(BertvisionError, OSError):  # what can be written is
                    self._settle()
                self._thread.submit(int).result()  # whatever an interrupt left in its queue
                self._drop_refused()
                for buffer in self._buffers:
                    buffer.clear()

    def close(self) -> None:
        """Write what it holds and let go of the split, which can be resumed later.

        Where that fails it stays open, with the examples that are not written.

        Raises:
            InputError, NonFiniteError, DiskSpaceError: as `flush`.
        """
        with self._exclusively():
            self._close()

    def _close(self) -> None:
        if self._open:
            self._flush()
            if self._growing is not None:
                with full_disk_named(self._storage):
                    close_part(self._ledger, self._growing, self._part)
        self._let_go()

    def finish(self, permute: int | None = None, examples: int | None = None) -> ActivationSplit:
        """Write what it holds, and make the split complete: it takes no more examples then.

        ``plan.example_id`` of the split is the place of a stored example among the sorted keys,
        which are the column ``id`` of `ActivationSplit.table`.

        Args:
            permute: seed of a permutation of the stored order, as training splits of extraction
                have one, so that neighbours are mixed; it takes the split's space once more while
                it is done. None keeps the order in which shards were committed.
            examples: Number of examples it must have, whoever added them; None takes all there are.

        Returns:
            The split, which is read as any other.

        Raises:
            InputError: it has no example, or lacks some; a part of it was begun and not closed;
                this writer's block ended by an error; or it was finished in another order.
            ProvenanceError: another snapshot has the split with other examples.
            CorruptStoreError, IncompleteSplitError: a shard is damaged, or lost since the finish.
            LockedError: another process is adding examples.
        """
        permute = permute if permute is None else as_whole("permute", permute)
        examples = examples if examples is None else as_whole("examples", examples)
        with self._exclusively():
            if self._cut_short:
                raise InputError(
                    f"the writer of {self._ledger.name} was closed by an error, and what it held "
                    "was dropped: make another one with the same arguments, and add what it lacks"
                )
            if self._open and self._growing is not None:
                self._flush()
                self._committed.refresh()
            check_all(self._keys(), self._due, examples, self._ledger.name)
            self._close()
            with full_disk_named(self._storage):
                finish(self._ledger, permute, self._committed.own if self._growing else None)
        split = ActivationSplit(self._storage, self._ledger.tag, self._ledger.split)
        if permute != (there := split.record.permutation_seed):
            raise InputError(
                f"{split.name} is complete already, with permute={there}: a split keeps its order"
            )
        return split.require_complete()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Let one thread at a time change what the writer holds.

        Raises:
            InputError: the writer was made in another process, or a signal handler calls it while
                a call of its own thread is being carried out.
        """
        if os.getpid() != self._process:
            raise InputError(
                f"the writer of {self._ledger.name} was made in process {self._process}, and this "
                f"is process {os.getpid()}, to which a fork does not carry its thread and its "
                "lock: make a writer here, with another part="
            )
        if self._is_called_within():
            raise InputError(
                f"a signal handler calls the writer of {self._ledger.name} while a call of it is "
                "being carried out: note the signal in the handler, and call it afterwards"
            )
        with self._lock:  # one that its thread may take again: an interrupt may leave it taken
            try:
                yield
            except (KeyboardInterrupt, SystemExit) as interrupt:
                # a block that it cut short keeps its lock as long as a traceback holds its frame
                clear_frames(interrupt.__traceback__)
                raise

    def _is_called_within(self) -> bool:
        """Whether a call of this thread is being carried out, and was interrupted for this one.

        The frames tell it, and no flag: an interrupt could leave a flag as it was.
        """
        frame, calls = sys._getframe(1), 0
        while frame is not None:
            if frame.f_code in _CALLS and frame.f_locals.get("self") is self:
                calls += 1
            frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
        return calls > 1

    def _hand_over(self) -> None:
        """Let the shard that was being filled be committed in the thread, and fill the next."""
        self._settle()
        self._filling = 1 - self._filling
        self._committing = self._begin()
        if self._full.waits:  # for the channel statistics
            self._settle()

    def _use_known_stats(self) -> None:
        """Have both buffers encode with the channel statistics that one of them knows."""
        if self._buffer.waits and self._full.stats is not None:
            self._buffer.use(self._full.stats)

    def _settle(self) -> None:
        """Wait until the full buffer is committed; where that failed before, try it again.

        Raises:
            BertvisionError: it cannot be; the next call tries again.
        """
        # an interrupt leaves the thread at its work; what begins then finds the shard committed
        while self._full.keys and not self._full.is_committed:
            if self._committing is None:
                self._committing = self._begin()
            try:
                self._committing.result()
            finally:
                if self._committing.done():
                    self._committing = None
        self._full.clear()

    def _begin(self) -> Future[None]:
        """Begin to commit the full buffer, which does nothing where that was done before."""
        return self._thread.submit(self._commit, self._full, self._full.batch)

    def _tell_refused(self) -> None:
        if refused := self._drop_refused():
            raise NonFiniteError(f"{'; '.join(refused.values())}: dropped, all others are kept")

    def _drop_refused(self) -> dict[str, str]:
        refused = {key: why for buffer in self._buffers for key, why in buffer.refused.items()}
        self.dropped |= refused  # before they are forgotten
        for buffer in self._buffers:
            buffer.refused = {}
        return refused

    def _commit(self, buffer: ShardBuffer, batch: object) -> None:
        assert self._growing is not None
        with full_disk_named(self._storage):
            commit(self._ledger, self._growing, self._committed, buffer, batch)

    def _let_go(self) -> None:
        """Let go of the split; what is left of a call that was interrupted is done again."""
        self._open = False
        self._thread.shutdown()
        self._held.close()

    def _require_open(self) -> None:
        if not self._open:
            raise InputError(
                f"the writer of {self._ledger.name} is closed: make another one with the same "
                "arguments to go on"
            )


_CALLS = {
    getattr(ActivationWriter, name).__code__
    for name in ("add", "flush", "discard", "close", "finish", "__exit__")
}
"""The calls that take turns."""


_PARTS = 1 << 16


def open_appending(
    storage: Storage,
    tag: str,
    split: str,
    *,
    hidden_size: int,
    layers: Sequence[int | str],
    encoding: str,
    compression: str,
    shard_tokens: int | None,
    provenance: Mapping[str, object],
    tokenizer: Any,
    channel_stats: tuple[Any, Any] | None,
    nonfinite: NonFinite,
    keep: str | None,
    logits: str | None,
    part: int,
) -> ActivationWriter:
    """A writer; arguments and errors are those of `ActivationStore.writer`."""
    if not isinstance(tag, str):
        raise InputError(f"tag is {tag!r}: give a text such as 0e")
    tag = SnapshotTag(tag)
    check_name(split, "split")
    kind = get_encoding(encoding)
    if kind.transformed:
        raise InputError(
            f"encoding {kind.name} is written by `bertvision extract`, which calibrates it on a "
            "sample of the whole split: choose int8 or int4"
        )
    if nonfinite not in get_args(NonFinite):
        raise InputError(f"nonfinite is {nonfinite!r}: choose error or record")
    hidden_size = as_whole("hidden_size", hidden_size)
    shard_tokens = as_whole("shard_tokens", SHARD_TOKENS if shard_tokens is None else shard_tokens)
    if not 0 <= (part := as_whole("part", part)) < _PARTS:
        raise InputError(f"part is {part}: give a number from 0 to {_PARTS - 1}")
    if compression == "pcodec" and np.dtype(kind.zarr_dtype).itemsize == 1:
        raise InputError(
            f"pcodec takes values of two bytes and more: store {kind.name} plain or with zstd"
        )
    positions, origin = _layers(layers, provenance)
    if KEEP in origin:
        raise InputError(
            f"provenance has {KEEP}, which says that tokens are left out: give keep="
            f"{origin[KEEP]!r} to the writer"
        )
    if keep is not None:
        Keep.parse(keep)
        origin[KEEP] = keep
    if LOGITS in origin:
        raise InputError(
            f"provenance has {LOGITS}, which says that log-probabilities are stored: give logits="
            f"{origin[LOGITS]!r} to the writer"
        )
    if logits is not None:
        origin[LOGITS] = str(TopRule.parse(logits))
    if tokenizer is not None:
        origin["tokenizer_sha256"] = tokenizer_digest(tokenizer)
    try:
        wanted = GrowingRecord(
            format=FORMAT,
            requires=tuple(sorted({*FEATURES, GROWING, *({TOP_LOGITS} if logits else ())})),
            tag=tag,
            split=split,
            encoding=kind.name,
            compression=compression,  # type: ignore[arg-type]  # it is checked here
            layers=positions,
            hidden_size=hidden_size,
            shard_tokens=shard_tokens,
            provenance=origin,
            versions=library_versions(),
            writing=secrets.token_hex(16),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the split"
        raise InputError(f"{tag}/{split} cannot be stored: {field}: {first['msg']}") from None
    stats = None
    if channel_stats is not None:
        stats = _stats(channel_stats, (len(positions), hidden_size), kind.quantised)
    ledger = GrowingLedger(storage, tag, split)
    return ActivationWriter(ledger, wanted, stats=stats, nonfinite=nonfinite, part=part)


def _layers(
    layers: Sequence[int | str], provenance: Mapping[str, object]
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Indices of the layers, and the provenance with their names, where they have some."""
    if not isinstance(provenance, Mapping):
        raise InputError(f"provenance is {provenance!r}: give what it was made from, by name")
    origin = dict(provenance)
    given = [] if isinstance(layers, str) or not isinstance(layers, Iterable) else list(layers)
    named = [layer for layer in given if isinstance(layer, str)]
    if not given or (named and len(named) < len(given)):
        raise InputError(
            f"layers are {layers!r}: give a list of indices, or one of names, of one layer at least"
        )
    if not named:
        return tuple(as_whole("a layer", layer) for layer in given), origin
    if len(set(named)) < len(named) or "layer_names" in origin:
        raise InputError(f"layers are {layers!r}: name each once, and only here")
    if not all(name and name.isprintable() for name in named):
        raise InputError(f"layers are {layers!r}: use characters that can be printed")
    origin["layer_names"] = json.dumps(named)
    return tuple(range(len(named))), origin


def _stats(given: tuple[Any, Any], shape: tuple[int, int], quantised: bool) -> ChannelStats:
    """Channel statistics that were given."""
    if not quantised:
        raise InputError("channel_stats are for int8 and int4: leave them out")
    try:
        mean, std = (torch.as_tensor(values, dtype=torch.float32).cpu().clone() for values in given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"channel_stats are no pair of arrays: {error}") from None
    if not mean.shape == std.shape == shape:
        raise InputError(
            f"channel_stats have shapes {tuple(mean.shape)} and {tuple(std.shape)}: give mean and "
            f"deviation of (layers, hidden) = {shape}"
        )
    if not bool(mean.isfinite().all() and std.isfinite().all() and (std > 0).all()):
        raise InputError("channel_stats hold NaN, infinity or a deviation that is not above 0")
    return ChannelStats(mean, std)
