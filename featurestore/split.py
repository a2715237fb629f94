"""ActivationSplit: read the activations of one split of one snapshot."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bertvision.errors import CorruptStoreError, InputError, counted, whole_number
from bertvision.featurestore.batch import ActivationBatch
from bertvision.featurestore.format.keeping import KEPT_POSITION
from bertvision.featurestore.format.logits import TopLogits
from bertvision.featurestore.format.shard import ShardReader
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.resident import ResidentCodes
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.views.html import html_table
from bertvision.featurestore.views.text import TokenText

if TYPE_CHECKING:
    import dask.array as da
    import xarray as xr
    from datasets import Dataset

    from bertvision.featurestore.tokens.stream import TokenStream
    from bertvision.featurestore.views.top import TopToken


class ActivationSplit(SplitReader, Sequence[torch.Tensor]):
    """The activations of one split of one snapshot.

    Indexing gives the float32 tensor (seq, hidden, layers) of an example, in stored order; its
    row in the data it was made from is ``plan.example_id[i]``.

    Attributes:
        resident: Codes on a device that batches are gathered from, where `to` took them there.

    Examples:
        >>> split = bertvision.ActivationStore.open("activations")["1e"]["train"]
        >>> split
        <ActivationSplit 1e/train: 72 examples of 4,665 tokens, 3 layers × 32, float32, 1.8 MB>
          labels: answerable, end_positions, question_index, start_positions
        >>> split[7].shape  # (seq, hidden, layers)
        torch.Size([85, 32, 3])
        >>> split.text(7)[5:14]  # "…? [SEP] boris was born in 1901. clara"
        ['', '', 'boris', 'was', 'born', 'in', '1901', '.', 'clara']
    """

    def __init__(self, store: str | Path | Storage, tag: str, split: str) -> None:
        super().__init__(store, tag, split)
        self._last: tuple[int, ShardReader] | None = None
        self.resident: ResidentCodes | None = None

    def __reduce__(self) -> tuple[Callable[..., ActivationSplit], tuple[Any, ...]]:
        """Open again elsewhere: an open file and the memory of a device are of one process."""
        here = (str(self.resident.device), self.resident.layers) if self.resident else ()
        return _reopened, (type(self), self.storage, self.tag, self.split, *here)

    def __repr__(self) -> str:
        kept_on = f" on {self.resident.device}" if self.resident else ""
        return (
            f"<ActivationSplit {self.name}{kept_on}: {self.record.describe()}>\n"
            f"  labels: {', '.join(self.label_names) or 'none'}"
        )

    def _repr_html_(self) -> str:
        record = self.record
        facts = {
            "examples": f"{record.examples:,}, {record.tokens:,} tokens",
            "layers": ", ".join(self.layer_names or map(str, record.layers)),
            "hidden size": f"{record.hidden_size:,}",
            "tokens kept": self.keep or "all",
            "encoding": record.encoding,
            "labels": ", ".join(self.label_names) or "none",
            "complete": "yes" if self.is_complete else self.lacking() or "",
        }
        return html_table([], [*facts.items()], title=f"ActivationSplit {self.name}")

    def read(
        self,
        examples: Sequence[int] | npt.NDArray[np.integer],
        layers: int | str | Sequence[int | str] | None = None,
        *,
        logits: bool = False,
    ) -> ActivationBatch:
        """Read some examples, packed in the order given.

        Args:
            examples: positions in the split.
            layers: indices of hidden states (0 is the embedding output, −1 the last), or names, or
                one of them; None is all.
            logits: Whether the batch has the log-probabilities of next tokens.

        Raises:
            InputError: an example or layer is not there, or the split has no log-probabilities.
            IncompleteSplitError: an example's shard is not committed.
            CorruptStoreError: what is stored is damaged.
        """
        wanted, positions = self._wanted(examples), self.layer_positions(layers)
        if self.resident is not None:
            batch = self.resident.batch(wanted, positions)
            if not logits:
                return batch
            of_device = self.resident.device
            stored = self.gather_logits(wanted, self._shard).map(torch.from_numpy)
            return replace(batch, logits=stored.map(lambda x: x.to(of_device)))
        lengths = self.plan.n_tokens[wanted].astype(np.int64)
        self._shard(int(self.plan.shard[wanted[0]]))  # what it lacks is said before memory is taken
        codes, scale = self.buffers(int(lengths.sum()), len(positions))
        self.gather(wanted, self._shard, positions, codes, scale)
        top = self.gather_logits(wanted, self._shard) if logits else None
        return self.batch(codes, scale, wanted, positions, self.labels, logits=top)

    def _wanted(self, examples: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        wanted = np.asarray(examples, dtype=np.int64).reshape(-1)
        if wanted.size == 0 or wanted.min() < 0 or wanted.max() >= len(self):
            raise InputError(
                f"examples {wanted[:5].tolist()}: name at least one, each from 0 to {len(self) - 1}"
            )
        return wanted

    def to(
        self,
        device: torch.device | str,
        layers: int | str | Sequence[int | str] | None = None,
    ) -> ActivationSplit:
        """The split with its codes on a device, where batches are gathered; the store is read once.

        On a GPU no hidden states travel any more, for any number of epochs and heads; a split in a
        bucket or on a slow disk is read once. What reads whole shards or arrays (`tokens`, `dask`,
        `array`, …) still reads the store.

        Args:
            device: A device of torch, such as ``cuda`` or ``cpu``.
            layers: Hidden states that are taken there; None is all.

        Raises:
            IncompleteSplitError: Shards of the split are not committed yet.
            InputError: There is no such device or layer, or the codes do not fit.

        Examples:
            >>> split = bertvision.ActivationStore.open("activations")["1e/train"].to("cpu")
            >>> split.read([3, 1, 4]).codes.device
            device(type='cpu')
            >>> [len(batch) for batch in bertvision.ActivationLoader(split, batch_size=20)]
            [20, 20, 20, 12]
        """
        opened = type(self)(self.storage, self.tag, self.split)
        opened.resident = ResidentCodes(opened, device, layers)
        return opened

    def logits(self, example: int) -> TopLogits:
        """The most probable next tokens of each token of an example, for the rows of `__getitem__`.

        Args:
            example: Its position in the split, negative from the end.

        Returns:
            ``topk_logprobs`` (seq, k) and ``topk_indices`` (seq, k), the most probable first, and
            ``tail_mass`` (seq,), tensors.

        Raises:
            IndexError: There is no such example.
            InputError: The split has no log-probabilities, or its tokens were shuffled.
            IncompleteSplitError: Its shard is not committed.
            CorruptStoreError: What is stored is damaged.
        """
        self.require_examples()
        wanted = np.array([self._position(example)])
        return self.gather_logits(wanted, self._shard).map(torch.from_numpy)

    def _shard(self, shard: int) -> ShardReader:
        """The shard that was read last stays open: neighbours are often read together.

        It is read and stored once each, as a pair: another thread may open its own in between.
        """
        last = self._last
        if last is None or last[0] != shard:
            self._last = last = shard, self.open_shard(shard)
        return last[1]

    def batch(
        self,
        codes: npt.NDArray[Any],
        scale: npt.NDArray[Any] | None,
        examples: npt.NDArray[np.int64],
        positions: Sequence[int],
        labels: Mapping[str, npt.NDArray[Any]],
        memory: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
        logits: TopLogits | None = None,
    ) -> ActivationBatch:
        """Wrap the filled memory of `buffers` as a batch; nothing is copied but the labels."""
        tensor = torch.from_numpy(codes).transpose(0, 1)
        return ActivationBatch(
            codes=tensor.view(torch.bfloat16) if self.encoding.name == "bfloat16" else tensor,
            scale=None if scale is None else torch.from_numpy(scale),
            stats=self.stats_of(positions),
            lengths=torch.from_numpy(self.plan.n_tokens[examples].astype(np.int64)),
            examples=torch.from_numpy(examples),
            labels={name: torch.from_numpy(values[examples]) for name, values in labels.items()},
            memory=memory,
            logits=logits and logits.map(torch.from_numpy),
        )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.read([self._position(index)]).unpack()[0]

    def _position(self, index: Any) -> int:
        try:
            i = operator.index(index)
        except TypeError:
            raise TypeError(
                f"{index!r} is no example of {self.name}: give a number from 0 to "
                f"{len(self) - 1}, or a slice"
            ) from None
        if not -len(self) <= i < len(self):
            raise IndexError(f"example {i} is outside {self.name}, which has {len(self)}")
        return i % len(self)

    def text(self, example: int) -> list[str]:
        """Text that each token of an example stands for.

        Args:
            example: its position in the split, negative from the end.

        Returns:
            (seq,) strings, for the rows of ``split[example]``: characters of the context, the
            sentence or the pair as they were written; empty for special tokens and, of questions,
            for the tokens of the question, whose place in the text is not stored. Their ids are:
            ``split.array("input_ids")``.

        Raises:
            IndexError: there is no such example.
            InputError: the split keeps one vector for each window, or its table has no text.
            CorruptStoreError: the table or the offsets are damaged.
        """
        return self._token_text.of(self._position(example))

    def positions(self, example: int) -> npt.NDArray[np.int32]:
        """The place of each stored token of an example in what the model read, (seq,) from 0.

        Args:
            example: Its position in the split, negative from the end.

        Raises:
            IndexError: There is no such example.
            CorruptStoreError: The array is damaged.
        """
        self.require_examples()
        i = self._position(example)
        if self.keep is None:
            return np.arange(self.plan.n_tokens[i], dtype=np.int32)
        first = int(self.plan.first_token[i])
        return self._kept_positions[first : first + int(self.plan.n_tokens[i])]

    @cached_property
    def _kept_positions(self) -> npt.NDArray[np.int32]:
        return self.array(KEPT_POSITION)

    @cached_property
    def _token_text(self) -> TokenText:
        """Kept: checking what is read takes longer than the rest."""
        return TokenText(self)

    def tokens(
        self,
        layers: int | str | Sequence[int | str] | None = None,
        *,
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> TokenStream:
        """Stream the vectors of single tokens, as trainers of sparse autoencoders take them.

        Args:
            layers: the index of a hidden state, or its name where it has one, for vectors (n,
                hidden); several, for (n, layers, hidden); or None: all of them.
            batch_size: tokens of a batch.
            shuffle: tokens in a seeded order, mixed over many shards; or in stored order.
            seed: Seed of the order.
            options: the others of `TokenStream`: ``endless``, ``rank``, ``without``, ….

        Raises:
            IncompleteSplitError: shards of the split are not committed yet.
            InputError: an argument is out of range, or a layer is not stored.
        """
        from bertvision.featurestore.tokens.stream import TokenStream

        return TokenStream(
            self, layers, batch_size=batch_size, shuffle=shuffle, seed=seed, **options
        )

    def hold_out(
        self, fraction: float, seed: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Part the examples into those to train on and those that are held out.

        The choice follows from seed and ``example_id``, so that splits of the same examples, of
        other layers or checkpoints, are parted alike whatever the order of storage.

        Args:
            fraction: Part of the examples that is held out, above 0 and below 1.
            seed: Seed of the choice.

        Returns:
            Positions to train on and positions held out, both ascending: ``examples`` of `tokens`.

        Raises:
            InputError: one of the parts would be empty.

        Examples:
            >>> split = bertvision.ActivationStore.open("activations")["1e/train"]
            >>> train, held_out = split.hold_out(0.1)
            >>> stream = split.tokens(-1, examples=train)
            >>> set(next(iter(stream)).examples.tolist()) <= set(train.tolist())
            True
        """
        seed = whole_number("seed", seed, 0)
        number = isinstance(fraction, Real) and not isinstance(fraction, bool)
        if (
            not number
            or not 0 < fraction < 1
            or not 0 < (count := round(fraction * len(self))) < len(self)
        ):
            raise InputError(
                f"a fraction of {fraction!r} of {counted(len(self), 'example')}: give one above 0 "
                "and below 1 that leaves an example in each part"
            )
        ordered = np.argsort(self.plan.example_id, kind="stable")
        drawn = np.random.default_rng([seed, 3]).permutation(len(self))
        return np.sort(ordered[drawn[count:]]), np.sort(ordered[drawn[:count]])

    def top(self, direction: npt.ArrayLike, layer: int | str = -1, k: int = 10) -> list[TopToken]:
        """The tokens that lie furthest along a direction, of all tokens of the split.

        A shard is in memory at a time, of one layer. Scores are exact: sums in float64 of the
        decoded states; of equal scores the token that is stored first comes first.

        Args:
            direction: (hidden,) numbers, or the index of a channel. For the other end give its
                negative.
            layer: index of a hidden state, or its name where it has one.
            k: most tokens.

        Returns:
            Tokens with ``score``, ``example`` and ``position``, the largest score first; scores
            that are NaN are left out. What a token stands for is ``split.text(example)[position]``.

        Raises:
            IncompleteSplitError: shards are not committed yet.
            InputError: the direction does not fit, the layer is not stored, or ``k`` is below 1.
            CorruptStoreError: what is stored is damaged.

        Examples:
            >>> split = bertvision.ActivationStore.open("activations")["1e/train"]
            >>> first, *others = split.top(3, layer=1, k=5)  # channel 3
            >>> bool(split[first.example][first.position, 3, 1] == first.score)
            True
            >>> [token.score <= first.score for token in others]
            [True, True, True, True]
        """
        from bertvision.featurestore.views.top import as_direction, top_tokens

        position, *others = self.layer_positions(layer)
        if others:
            raise InputError(f"layer is {layer!r}: name one of {self.name}, such as -1")
        directions = as_direction(direction, self.record.hidden_size)[None]
        return top_tokens(self, directions, position, k)[0]

    def dask(self, layers: Sequence[int | str] | None = None) -> da.Array:
        """Real tokens as a lazy float32 array (token, layer, hidden), a chunk per shard."""
        from bertvision.featurestore.lazy import to_dask

        return to_dask(self, layers)

    def to_xarray(self, layers: Sequence[int | str] | None = None) -> xr.Dataset:
        """The split as a lazy dataset of labelled arrays over its real tokens.

        Args:
            layers: indices of hidden states, or names, or all.

        Returns:
            As ``xarray.open_dataset(STORE, engine="bertvision")`` gives it (see `labelled`), the
            hidden states on Dask, a chunk per shard.

        Raises:
            IncompleteSplitError: shards are not committed yet.
            InputError: its tokens were shuffled, or a layer is not stored.
        """
        from bertvision.featurestore.views.labelled import labelled

        dataset = labelled(self).isel(layer=self.layer_positions(layers))
        return dataset.assign(hidden_states=(("token", "layer", "hidden"), self.dask(layers)))

    def to_dataset(self, layers: int | str | Sequence[int | str] | None = None) -> Dataset:
        """The split as a ``datasets.Dataset`` of Hugging Face: a row for each example.

        Nothing of the hidden states is copied: rows get theirs when they are asked for, in workers
        of a ``DataLoader`` too, and after every operation of the data set.

        Args:
            layers: indices of hidden states, or names, or one of them; None is all.

        Returns:
            Rows in stored order with ``example``, the position in the split, the columns of
            `table`, the labels, and ``hidden_states``, a float32 tensor (seq, layers, hidden).
            Windows of several texts have no columns of the table.

        Raises:
            IncompleteSplitError: shards are not committed yet.
            InputError: its tokens were shuffled, a layer is not stored, or a column of the data is
                called ``example`` or ``hidden_states``.
            CorruptStoreError: the plan, the labels or the table are damaged.

        Examples:
            >>> split = bertvision.ActivationStore.open("activations")["1e/train"]
            >>> row = split.to_dataset(layers=-1)[7]
            >>> row["hidden_states"].shape  # (seq, layers, hidden)
            torch.Size([85, 1, 32])
            >>> row["question"], row["example"]
            ('when was boris born ?', 7)
        """
        from bertvision.featurestore.views.rows import as_rows

        return as_rows(self, layers)

    def verify(self) -> list[str]:
        """Read everything again and compare it with the ledger.

        Returns:
            What is wrong, a line each, naming the shard, and what is missing; empty when the split
            is whole.
        """
        from bertvision.featurestore.damage import find_damage

        problems = [damage.what for damage in find_damage(self)]
        with suppress(CorruptStoreError):  # of the plan, which is among the damage
            if lacking := self.lacking():
                problems.append(lacking)
        return problems


def _reopened(
    kind: type[ActivationSplit], storage: Storage, tag: str, split: str, *kept_on: Any
) -> ActivationSplit:
    """A split, with its codes on a device where one is named."""
    opened = kind(storage, tag, split)
    return opened.to(*kept_on) if kept_on else opened
