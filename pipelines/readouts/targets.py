"""Labelled spans of words as examples of probes, with vectors out of stored tokens.

A span is pooled over the tokens of its words, and the vectors of two spans stand end to end, as
edge probing has it (Tenney et al. 2019, arXiv:1905.06316, section 3.1, without their projection).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError, ProvenanceError
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.poolings import TokenPooling, pool_numpy
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.treebank import NO_WORD, is_cut, words_of_tokens
from bertvision.pipelines.workspace.dataset import Dataset

Ints = npt.NDArray[np.int64]
SPAN_POOLINGS: tuple[TokenPooling, ...] = ("first", "last", "mean", "max")
"""Poolings over the tokens of a span."""
_TOKENS_AT_ONCE = 1 << 14  # bounds the memory of decoded states beside the vectors


class SpanTokens(NamedTuple):
    """Tokens of the targets of a split."""

    n_tokens: Ints
    """(windows,) tokens of each window."""
    window: Ints
    """(targets,) window of each, in ascending order."""
    first: Ints
    """(targets, spans) first token of each span, counted inside the window."""
    length: Ints
    """(targets, spans) tokens of each span; 0 where the window has none of a word."""

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """(targets,) whether every word has a token."""
        return np.asarray((self.length > 0).all(axis=1), np.bool_)

    def take(self, rows: Ints) -> SpanTokens:
        """Some of the targets, (rows,) numbers."""
        return SpanTokens(self.n_tokens, self.window[rows], self.first[rows], self.length[rows])


def has_targets(task: Task) -> bool:
    """Whether the labels of a task are those of words, not of windows."""
    return type(task).targets is not Task.targets


def check_span_poolings(poolings: Sequence[TokenPooling]) -> None:
    """Refuse poolings that are of windows.

    Raises:
        InputError: one is.
    """
    for pooling in poolings:
        if pooling not in SPAN_POOLINGS:
            raise InputError(
                f"--pool {pooling}: of the tokens of a word or a span choose "
                f"{', '.join(SPAN_POOLINGS)}"
            )


def span_tokens(dataset: Dataset, split: str, tokenizer: Any) -> SpanTokens:
    """The tokens of all targets of a split, in the order of its items.

    Args:
        dataset: Data of a task that has targets.
        split: Name of the split.
        tokenizer: Tokenizer of the encoder.

    Raises:
        WorkspaceError: the source is gone or not what it was.
    """
    items = dataset.items(split)
    windows = dataset.windows(split, tokenizer)
    window, places = [], []
    for row, (item, begin, n) in enumerate(
        zip(items, windows.first_token, windows.n_tokens, strict=True)
    ):
        if not (targets := dataset.task.targets(item)):
            continue
        word_of = words_of_tokens(item.words, windows.offset_mapping[begin : begin + n])
        seen, numbers = np.flatnonzero(word_of != NO_WORD), np.arange(len(item.words))
        # tokens stand in the order of their words, so that those of a span lie side by side
        begins = np.searchsorted(word_of[seen], numbers)
        ends = np.searchsorted(word_of[seen], numbers, side="right")
        there = begins < ends
        offsets = windows.offset_mapping[begin : begin + n]
        if len(seen) and is_cut(item.text, offsets, dataset.config.max_length):
            # of the last word the window may hold the beginning alone
            last = int(word_of[seen[-1]])
            there[last] &= int(offsets[:, 1].max()) >= len(" ".join(item.words[: last + 1]))
        first, behind = np.append(seen, 0)[begins], seen[ends - 1] + 1 if len(seen) else ends
        for target in targets:
            window.append(row)
            places.append(
                [
                    (first[a], behind[b - 1] - first[a]) if there[a:b].all() else (0, 0)
                    for a, b in target.spans
                ]
            )
    of_targets = np.array(places or np.empty((0, 1, 2)), np.int64)
    return SpanTokens(
        windows.n_tokens.astype(np.int64),
        np.array(window, np.int64),
        of_targets[..., 0],
        of_targets[..., 1],
    )


@dataclass(frozen=True)
class TargetSplit(PooledSplit):
    """Vectors of the targets of a split, out of the stored tokens of its windows.

    ``pooling`` is over the tokens of a span.
    """

    spans: SpanTokens
    """Tokens of the targets."""

    @property
    def name(self) -> str:
        """Name of the stored split, which has all tokens."""
        return StoredName(self.split, "all", self.data.name).name

    def __len__(self) -> int:
        return len(self.spans.window)

    @property
    def width(self) -> int:
        """Channels of a vector of one layer."""
        return self.stored.record.hidden_size * int(self.spans.first.shape[1])

    def blocks(
        self, layers: Sequence[int] | None = None
    ) -> Iterator[tuple[Ints, npt.NDArray[np.float32]]]:
        """Vectors of targets, decoded some windows at a time, so that memory stays bounded.

        Args:
            layers: Indices of hidden states; None is all.

        Yields:
            (block,) numbers of the targets, and their (block, layers, spans × hidden).

        Raises:
            StoreNotFoundError: as `PooledSplit.features`.
            ProvenanceError: the stored windows are not those of the data.
        """
        plan, spans = self.stored.plan, self.spans
        if len(plan) != len(spans.n_tokens) or not np.array_equal(
            spans.n_tokens[plan.example_id], plan.n_tokens
        ):
            raise ProvenanceError(
                f"{self.stored.name} holds other windows than the data make now: the versions of "
                "tokenizers or transformers differ; install those it was extracted with, or use "
                "another --store"
            )
        example = np.argsort(plan.example_id)[spans.window]  # of each target
        order = np.argsort(example, kind="stable")
        read = np.unique(example)
        ends = np.cumsum(plan.n_tokens[read], dtype=np.int64)
        for part in np.split(read, np.flatnonzero(np.diff(ends // _TOKENS_AT_ONCE)) + 1):
            if not len(part):
                continue
            low, high = np.searchsorted(example[order], [part[0], part[-1] + 1])
            rows = order[low:high]
            states = self.stored.read(part, layers).decode().numpy()
            begins = np.cumsum(plan.n_tokens[part], dtype=np.int64) - plan.n_tokens[part]
            start = begins[np.searchsorted(part, example[rows])]
            # spans may overlap, and take more tokens than the windows have
            gathered = np.cumsum(spans.length[rows].sum(axis=1)) // _TOKENS_AT_ONCE
            for some in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(gathered)) + 1):
                chosen = rows[some]
                first, length = start[some, None] + spans.first[chosen], spans.length[chosen]
                vectors = [
                    self._pooled(states, first[:, i], length[:, i]) for i in range(first.shape[1])
                ]
                yield chosen, np.concatenate(vectors, axis=-1)

    def _pooled(
        self, states: npt.NDArray[np.float32], first: Ints, count: Ints
    ) -> npt.NDArray[np.float32]:
        """A vector of each span, (spans, layers, hidden)."""
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        tokens = states[np.repeat(first, count) + within]
        pooled: npt.NDArray[np.float32] = pool_numpy(tokens, count, self.pooling, (False, False))
        return pooled
