"""SplitReader: what a stored split is made of: record, plan, arrays, shards.

`split.ActivationSplit` is what users hold; everything that only needs the parts of a split (lazy
views, inspection) takes a reader, so that it stands below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from bertvision.errors import (
    CorruptStoreError,
    IncompleteSplitError,
    InputError,
    UnknownNameError,
    counted,
)
from bertvision.featurestore.format import arrays
from bertvision.featurestore.format.calibration import ERROR, Calibration
from bertvision.featurestore.format.encoding import ChannelStats, squared_steps
from bertvision.featurestore.format.examples import read_examples
from bertvision.featurestore.format.layout import PLAN_ARRAYS, TRANSFORM_ARRAYS, get_encoding
from bertvision.featurestore.format.logits import OUTPUTS, TopLogits, TopRule
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.format.records import PLACES
from bertvision.featurestore.format.shard import ADVICE, ShardReader
from bertvision.featurestore.format.transform import Transform
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.stored_split import StoredSplit

Empty: TypeAlias = Callable[[tuple[int, ...], str], npt.NDArray[Any]]


class SplitReader(StoredSplit):
    """The parts of one split of one snapshot; made and raising as `StoredSplit`."""

    def __init__(self, store: str | Path | Storage, tag: str, split: str) -> None:
        super().__init__(store, tag, split)
        self.encoding = get_encoding(self.record.encoding)

    def array(self, name: str) -> npt.NDArray[Any]:
        """A per-example or per-token array of the split, whole: (examples, …) or (token axis, …).

        Log-probabilities, where the split has some, are read shard by shard.

        Raises:
            UnknownNameError: the split has no such array.
            IncompleteSplitError: log-probabilities are asked for, and shards are missing.
            CorruptStoreError: it is missing or damaged.
        """
        if self.record.top and name in OUTPUTS:
            values: npt.NDArray[Any] = getattr(self._all_logits(), name)
            return values
        if name not in self.record.arrays:
            raise UnknownNameError(
                f"{self.name} has no array {name!r}: it has "
                f"{', '.join(sorted([*self.record.arrays, *(OUTPUTS if self.record.top else ())]))}"
            )
        record = self.record.arrays[name]
        try:
            return arrays.read_array(self.storage, arrays.group_key(self.record), name, record)
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{self.name}: {error}") from None

    @cached_property
    def plan(self) -> ShardPlan:
        """Where each example lies.

        Raises:
            CorruptStoreError: the ledger or the plan's arrays are damaged.
        """
        record = self.record
        plan = ShardPlan(
            **{name: self.array(name) for name in PLAN_ARRAYS},
            shard_tokens=record.shard_tokens,
            seed=record.permutation_seed,
        )
        try:
            plan.check()
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{self.name}: {error}") from None
        if (len(plan), plan.n_shards) != (record.examples, record.shards):
            raise CorruptStoreError(f"the plan of {self.name} is not the one the ledger recorded")
        return plan

    @cached_property
    def stats(self) -> ChannelStats | None:
        """Channel statistics of the quantised encodings, (layers, hidden) each."""
        if not self.encoding.quantised:
            return None
        return self._channel_stats()

    def _channel_stats(self) -> ChannelStats:
        mean, std = (torch.from_numpy(self.array(f"channel_{name}")) for name in ("mean", "std"))
        return ChannelStats(mean, std)

    @cached_property
    def transform(self) -> Transform | None:
        """Coder of the layers, where the encoding is the transform.

        Raises:
            CorruptStoreError: its arrays are missing or damaged.
        """
        if not self.encoding.transformed:
            return None
        values = {name: self.array(name) for name in TRANSFORM_ARRAYS}
        try:
            return Transform(values)
        except CorruptStoreError as error:
            raise CorruptStoreError(f"{self.name}: {error}; {ADVICE}") from None

    @property
    def calibration(self) -> Calibration | None:
        """Calibration that the split is encoded with; None of float encodings.

        Raises:
            CorruptStoreError: its arrays are missing or damaged.
        """
        if not self.encoding.calibrated:
            return None
        return Calibration(self._channel_stats(), self.encoding_error, transform=self.transform)

    @property
    def error_names(self) -> list[str]:
        """Kinds of token whose error is stored."""
        of_layers = (n for n, array in self.record.arrays.items() if array.dims == ("layer",))
        return sorted(name.removeprefix(ERROR) for name in of_layers if name.startswith(ERROR))

    @cached_property
    def encoding_error(self) -> dict[str, npt.NDArray[np.float32]]:
        """Relative error of the encoding by kind of token, (layers,) each (see `calibration`).

        Measured on the calibration sample; empty of float encodings and where an earlier version
        wrote the split.
        """
        return {kind: self.array(f"{ERROR}{kind}") for kind in self.error_names}

    def info(self) -> dict[str, Any]:
        """As `StoredSplit.info`, and what the encoding loses, by kind of token."""
        return super().info() | {
            "encoding_error": {
                kind: {
                    "largest": float(errors.max()),
                    "in_layer": (self.layer_names or self.record.layers)[int(errors.argmax())],
                    "by_layer": [float(f"{error:.4g}") for error in errors],
                }
                for kind, errors in self.encoding_error.items()
            }
        }

    def stats_of(self, positions: Sequence[int]) -> ChannelStats | None:
        """Channel statistics at these positions of the stored layer axis."""
        if self.stats is None or list(positions) == list(range(len(self.record.layers))):
            return self.stats
        index = torch.as_tensor(positions)
        return ChannelStats(self.stats.mean[index], self.stats.std[index])

    def rounding_variance(self, *, first: bool = False) -> npt.NDArray[np.float64] | None:
        """Variance of the rounding errors in each channel, (layers, hidden), from stored scales.

        Args:
            first: Take the first token of each example alone, as [CLS] is.

        Returns:
            None of float encodings, whose errors are parts of the values
            (`Encoding.relative_rounding`).

        Raises:
            CorruptStoreError: a scale or a shard's record is damaged.
            InputError: The split keeps some tokens of each example, and first ones are asked for.
        """
        if first:
            self.require_all_tokens()
        if self.encoding.transformed:
            errors = self.encoding_error
            error = errors.get("first" if first else "ordinary", self.encoding.error)
            deviations = np.reshape(error, (-1, 1)) * self.array("channel_std").astype(np.float64)
            return np.asarray(np.square(deviations))
        if self.stats is None:
            return None
        total = np.zeros(self.stats.std.shape)
        tokens = 0
        for shard in range(self.plan.n_shards):
            examples = self.plan.examples_of(shard)
            reader = self.open_shard(shard, any_order=True)
            assert reader.scale is not None  # it is quantised
            rows = np.arange(reader.tokens)
            if first:
                starts = self.plan.first_token[examples.start : examples.stop]
                rows = starts - shard * self.plan.shard_tokens
            total += squared_steps(reader.scale[rows], self.stats, self.encoding)
            tokens += len(rows)
            reader.close()
        return total / tokens / 12

    def missing_shards(self) -> list[int]:
        """Shards of the plan that the ledger does not name."""
        # of the plan, which is checked: a record alone may claim any number
        return sorted(set(range(self.plan.n_shards)) - self.ledger.shards())

    def require_examples(self) -> Self:
        """Return the split itself, if its examples lie in one piece each.

        Raises:
            InputError: its tokens were shuffled.
        """
        if self.record.is_shuffled:
            raise InputError(
                f"the tokens of {self.name} were shuffled, so that no example of it can be read: "
                "stream them with split.tokens(shuffle=False), or read examples of "
                f"{self.record.provenance.get('shuffled_from')}"
            )
        return self

    def require_complete(self, *, any_order: bool = False) -> Self:
        """Return the split itself, if it is complete.

        Args:
            any_order: Take a split of shuffled tokens as well.

        Raises:
            IncompleteSplitError: shards are not committed yet.
            InputError: its tokens were shuffled.
        """
        if not any_order:
            self.require_examples()
        if lacking := self.lacking():
            raise IncompleteSplitError(lacking)
        return self

    def lacking(self) -> str | None:
        """Sentence on the missing shards and how to finish the split; None of a complete one.

        Raises:
            CorruptStoreError: the plan is damaged.
        """
        missing = self.missing_shards()
        if not missing:
            return None
        return (
            f"{self.name} lacks {len(missing)} of {counted(self.record.shards, 'shard')} "
            f"(first: {missing[0]}): {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        """Remedy of a split that is not finished."""
        origin = self.record.provenance
        if self.record.is_shuffled:
            source, seed = origin.get("shuffled_from"), origin.get("shuffle_seed")
            remedy = f"run `bertvision store shuffle {source} {self.split} --seed {seed}` again"
        elif "data_sha256" in origin:  # an extraction names its data
            remedy = (
                "run the `bertvision extract` that began it again, as `bertvision status` of its "
                "workspace spells it out,"
            )
        else:
            return self.ledger.remedy(
                "no command wrote it from data of a workspace, so remove it with "
                f"`bertvision store rm {self.name}`, and store its examples again"
            )
        return self.ledger.remedy(f"{remedy} to finish it")

    def open_shard(self, shard: int, *, any_order: bool = False) -> ShardReader:
        """Open a committed shard.

        Args:
            shard: its number.
            any_order: Take one of shuffled tokens as well: what the reader takes for an example is
                a run of tokens then, under one checksum.

        Raises:
            IncompleteSplitError: it is not committed.
            InputError: its tokens were shuffled.
            CorruptStoreError: its files are missing, of another length, or fail their checksum.
        """
        if not any_order:
            self.require_examples()
        committed = self.ledger.find_shard(shard, self.record)
        if committed is None:
            raise IncompleteSplitError(f"{self.name} shard {shard} is not written: {self._remedy}")
        examples = self.plan.examples_of(shard)
        lengths = self.plan.n_tokens[examples.start : examples.stop]
        return ShardReader(self.storage, self.record, committed, lengths, self.transform)

    def token_places(self, shard: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The example of each real token of a shard, and its place in that: (tokens,) each."""
        plan = self.plan
        begin = shard * plan.shard_tokens
        rows = slice(begin, begin + plan.tokens_of(shard))
        if self.record.is_shuffled:
            examples, positions = self._places
            return examples[rows], positions[rows]
        stored = plan.examples_of(shard)
        examples = np.repeat(
            np.arange(stored.start, stored.stop), plan.n_tokens[stored.start : stored.stop]
        )
        return examples, np.arange(rows.start, rows.stop) - plan.first_token[examples]

    @cached_property
    def _places(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        examples, positions = map(self.array, PLACES)
        return examples, positions

    def buffers(
        self, tokens: int, layers: int, empty: Empty = np.empty
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Memory to read into: codes (layers, tokens, width), scale (tokens, layers, …) or None.

        Args:
            tokens: Their number.
            layers: Their number.
            empty: makes an uninitialised array of a shape and type.
        """
        encoding, hidden = self.encoding, self.record.hidden_size
        codes = empty((layers, tokens, encoding.codes_size(hidden)), encoding.zarr_dtype)
        if not encoding.quantised:
            return codes, None
        scale_shape = (tokens, layers, *encoding.scale_shape(hidden))
        return codes, empty(scale_shape, encoding.scale_dtype)

    def gather(
        self,
        examples: npt.NDArray[np.int64],
        shard_of: Callable[[int], ShardReader],
        positions: Sequence[int],
        codes: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None,
    ) -> None:
        """Read examples into the memory of `buffers`, neighbours at once."""
        plan = self.plan
        ends = np.cumsum(plan.n_tokens[examples], dtype=np.int64)
        # shard by shard, so that one is open at a time where `shard_of` keeps no more
        order = np.argsort(plan.shard[examples], kind="stable")
        shards, own = plan.shard[examples[order]], examples[order]
        apart = (np.diff(shards) != 0) | (np.diff(order) != 1) | (np.diff(own) != 1)
        starts = np.append(0, np.flatnonzero(apart) + 1)
        stops = np.append(starts[1:], len(order))
        begins = ends[order[starts]] - plan.n_tokens[own[starts]]
        firsts = own[starts] - plan.shard_starts[shards[starts]]
        runs = (shards[starts], firsts, stops - starts, begins, ends[order[stops - 1]])
        for shard, first, count, begin, end in zip(*(part.tolist() for part in runs), strict=True):
            scales = None if scale is None else scale[begin:end]
            shard_of(shard).read(first, first + count, positions, codes[:, begin:end], scales)

    def require_logits(self) -> TopRule:
        """Rule of the log-probabilities beside the tokens.

        Raises:
            InputError: The split has none.
        """
        if self.record.top is None:
            raise InputError(
                f"{self.name} has no log-probabilities of next tokens: write it with --logits "
                "top:64, or store.writer(logits=…)"
            )
        return self.record.top

    def gather_logits(
        self, examples: npt.NDArray[np.int64], shard_of: Callable[[int], ShardReader]
    ) -> TopLogits:
        """Log-probabilities of the tokens of some examples, one after another, arrays of NumPy.

        Args:
            examples: Their positions in the split.
            shard_of: Gives an open shard.

        Raises:
            InputError: The split has none.
            CorruptStoreError: What is stored is damaged.
        """
        plan = self.plan
        ends = np.cumsum(plan.n_tokens[examples], dtype=np.int64)
        out = self.require_logits().empty(int(ends[-1]))
        for i in np.argsort(plan.shard[examples], kind="stable").tolist():
            example, shard = int(examples[i]), int(plan.shard[examples[i]])
            place = example - int(plan.shard_starts[shard])
            rows = slice(int(ends[i] - plan.n_tokens[example]), int(ends[i]))
            shard_of(shard).read_logits(place, place + 1, out.map(itemgetter(rows)))
        return out

    def _all_logits(self) -> TopLogits:
        plan = self.require_complete(any_order=True).plan
        out = self.require_logits().empty(self.record.axis)
        for shard in range(plan.n_shards):
            reader = self.open_shard(shard, any_order=True)
            begin = shard * plan.shard_tokens
            rows = slice(begin, begin + reader.tokens)
            reader.read_logits(0, len(plan.examples_of(shard)), out.map(itemgetter(rows)))
            reader.close()
        return out

    @property
    def label_names(self) -> list[str]:
        """Names of the per-example arrays beside the plan's own."""
        arrays = self.record.arrays.items()
        return sorted(n for n, a in arrays if a.dims[0] == "example" and n not in PLAN_ARRAYS)

    @cached_property
    def labels(self) -> dict[str, npt.NDArray[Any]]:
        """The per-example arrays beside the plan's own, by name: each (examples, …)."""
        return {name: self.array(name) for name in self.label_names}

    @property
    def table_rows(self) -> npt.NDArray[np.integer]:
        """(examples,) the row of `table` that each example is of; several windows may share it."""
        return self.labels.get("question_index", self.plan.example_id)

    def __len__(self) -> int:
        return self.record.examples

    def table(self) -> pa.Table:
        """The text side of the split; rows are those that the task's index arrays point to."""
        record = self.record
        return read_examples(self.storage, self.split, record.examples_sha256, record.format)
