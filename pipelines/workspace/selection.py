"""The items of a workspace's splits, and which splits heads take."""

from __future__ import annotations

import hashlib
import logging
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from bertvision.errors import InputError, ProvenanceError, UnknownNameError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import DataConfig, FinetuneConfig, WorkspaceConfig

if TYPE_CHECKING:
    from bertvision.pipelines.tasks.data import TaskData
    from bertvision.pipelines.tasks.task import Task

T = TypeVar("T")
log = logging.getLogger(__name__)


def check_split(split: str, splits: Collection[str], dataset: str | None) -> None:
    """Refuse a split that a data set does not have.

    Args:
        split: Split that was asked for.
        splits: Existing splits.
        dataset: the data set's name; None is the workspace's own data.

    Raises:
        UnknownNameError: there is no such split.
    """
    if split not in splits:
        what = "the workspace's own data" if dataset is None else dataset
        known = f"it has {', '.join(splits)}" if splits else "it has none"
        raise UnknownNameError(f"{split!r} is no split of {what}: {known}")


def source_split(split: str, task: TaskConfig) -> str:
    """The split of the source from which a split of the workspace is taken."""
    return "train" if split == "tune" or (split == "dev" and task.dev_fraction) else split


def select_items(
    items: list[T],
    split: str,
    task: TaskConfig,
    finetune: FinetuneConfig,
    kind: Task,
) -> list[T]:
    """The items of a split, out of all items of its source, in their order.

    ``train`` and ``tune`` part the training items by whole groups; where ``dev`` is a part of the
    data too, it is taken off first. Where ``train_questions`` asks for a subset, each is the
    beginning of the whole part in a seeded order of its groups (the last of them in part), so that
    subsets of one seed are nested. Workspaces from before ``linked`` and ``nested`` were settings
    keep the splits that they were made with.

    Args:
        items: Items of the source.
        split: Split of the workspace.
        task: Settings with the sizes of held-out parts.
        finetune: Settings that say how many items are taken, and the seed.
        kind: Key that keeps items together.
    """
    if source_split(split, task) != "train":
        return items
    group = kind.grouping(items) if task.linked else kind.group
    hold_out = hold_out_items if task.linked else hold_out_groups
    if task.dev_fraction:
        items, dev = hold_out(items, task.dev_fraction, group, seed=finetune.seed)
        if split == "dev":
            return dev
    limit = finetune.train_questions
    if limit is not None and not finetune.nested:
        items = _subset(items, limit, group, seed=finetune.seed)
    remaining, tuned = hold_out(items, task.tune_fraction, group, seed=finetune.seed)
    if limit is not None and finetune.nested:
        share = len(tuned) / max(len(items), 1)  # as of all, which is not quite the fraction
        part = min(max(round(share * limit), 1), limit - 1)
        tuned = _first(tuned, part, group, seed=finetune.seed)
        remaining = _first(remaining, limit - len(tuned), group, seed=finetune.seed)
    return remaining if split == "train" else tuned


def fitting(
    read: Mapping[str, TaskData], kind: Task, tokenizer: Any, task: TaskConfig
) -> dict[str, TaskData]:
    """Items of each split, without those that no window holds.

    Raises:
        InputError: there are some, and they are not to be skipped, or nothing is left.
    """
    by_split = dict(read)
    for split, data in read.items():
        if not (misfits := kind.misfits(data.items, tokenizer, task)):
            continue
        first, what = next(iter(misfits.values())), kind.words[1]
        many = f"{len(misfits):,} of {len(data.items):,} {what} of {split} do not fit, the first: "
        items = [item for item in data.items if item.id not in misfits]
        if not task.skip_bad or not items:
            others = "" if task.skip_bad else f"; --skip-bad leaves such {what} out"
            raise InputError(f"{many}{first}: give a larger --max-length{others}")
        log.warning("left out: %s%s", many, first)
        by_split[split] = replace(data, items=items, misfits=tuple(misfits))
    return by_split


def selected_data(
    sources: Mapping[str, str | None],
    read: Mapping[str, TaskData],
    task: TaskConfig,
    finetune: FinetuneConfig,
) -> dict[str, DataConfig]:
    """Items of each split of a new workspace, selected from those of its sources.

    Raises:
        InputError: nothing is left to train on, or to score on.
    """
    from bertvision.pipelines.tasks.task import load_task  # heavy, and names of splits are not

    data, kind = {}, load_task(task.name)
    for split in ("train", "tune", "dev"):
        origin = source_split(split, task)
        count = len(select_items(read[origin].items, split, task, finetune, kind))
        if count:
            data[split] = DataConfig(
                source=str(sources[origin]),
                sha256=read[origin].sha256,
                questions=count,
                misfits=read[origin].misfits,
                shared=read[origin].shared,
            )
        elif split != "tune":
            items = read[origin].items
            raise InputError(
                f"{sources[origin]} leaves nothing for the split {split!r}: "
                f"{_why_nothing(items, origin, task, kind)}"
            )
    return data


def _why_nothing(items: list[Any], origin: str, task: TaskConfig, kind: Task) -> str:
    """Why a part of the items of a source is empty, and what to do."""
    group = kind.grouping(items) if task.linked else kind.group
    if origin == "train" and len(items) > 1 and len({group(item) for item in items}) == 1:
        texts = Counter(text for item in items for text in set(kind.texts(item)))
        text, count = texts.most_common(1)[0]
        return (
            f"its {len(items):,} {kind.words[1]} are held out together, as they share texts, such "
            f"as {reprlib.repr(text)} in {count:,} of them; give --train and --dev, each a file of "
            "its own"
        )
    return "use more data, or a larger --train-questions"


def without_shared(
    read: Mapping[str, TaskData], kind: Task, task: TaskConfig
) -> dict[str, TaskData]:
    """Items of each split, if asked without those of train whose texts are in dev.

    Raises:
        InputError: nothing is left to train on.
    """
    from bertvision.pipelines.tasks.soundness import sharing

    by_split = dict(read)
    if not task.skip_shared or not {"train", "dev"} <= set(read):
        return by_split
    out = sharing(kind.texts, read["train"].items, read["dev"].items)
    items = [item for item, text in zip(read["train"].items, out, strict=True) if text is None]
    if not items:
        raise InputError(
            f"--skip-shared leaves nothing of train: each of its {len(out):,} {kind.words[1]} has "
            "a text that is in dev too; give other data, or leave --skip-shared out"
        )
    ids = [x.id for x, text in zip(read["train"].items, out, strict=True) if text is not None]
    if ids:
        log.warning(
            "left out: %s of %s %s of train have a text that is in dev too",
            *(f"{len(ids):,}", f"{len(out):,}", kind.words[1]),
        )
    by_split["train"] = replace(read["train"], items=items, shared=tuple(ids))
    return by_split


def trained_on(config: WorkspaceConfig) -> dict[str, object]:
    """Choice of the items of the training data that are trained on; all others are held out."""
    task, finetune = config.task, config.finetune
    chosen = task.tune_fraction or task.dev_fraction or finetune.train_questions
    return {
        "data": config.data["train"].sha256,
        "tune_fraction": task.tune_fraction,
        "dev_fraction": task.dev_fraction,
        "linked": task.linked,
        "train_questions": finetune.train_questions,
        "nested": finetune.nested,
        "misfits": config.data["train"].misfits,
        "shared": config.data["train"].shared,
        **({"seed": finetune.seed} if chosen else {}),
    }


def check_unlearned(config: WorkspaceConfig, start: WorkspaceConfig, place: str) -> None:
    """Refuse to score items from which the encoder that is begun with has learned.

    Files are told apart by their digests alone: the same texts in another file are not found.

    Args:
        config: Configuration of the new workspace.
        start: Start of the workspace that the encoder was trained in.
        place: Place of the encoder, for the message.

    Raises:
        ProvenanceError: names what differs, or the data.
    """
    if "train" not in start.data:
        return
    learned = start.data["train"].sha256
    if not config.task.dev_fraction and config.data["dev"].sha256 == learned:
        raise ProvenanceError(
            f"{place} was trained on {config.data['dev'].source}, which is to be scored on here: "
            "give another --dev"
        )
    held_out = config.task.tune_fraction or config.task.dev_fraction
    if not held_out or config.data["train"].sha256 != learned:
        return
    there = {"task": start.task.name, **trained_on(start)}
    if difference := first_difference(there, {"task": config.task.name, **trained_on(config)}):
        name, before, now = difference
        raise ProvenanceError(
            f"{place} was trained on other parts of the same data: with {name} = "
            f"{reprlib.repr(before)}, this workspace with {reprlib.repr(now)}, so that it learned "
            "from what is held out here; choose the same parts (for misfits the same tokenizer and "
            "--max-length), or --tune-fraction 0 and a --dev of its own"
        )


def hold_out_items(
    items: Sequence[T], fraction: float, group: Callable[[T], str], *, seed: int
) -> tuple[list[T], list[T]]:
    """As `hold_out_groups`, but a fraction of the items: one group may have a tenth of them.

    Of the groups in their order those are held out that still fit, but for one at least; where
    none does, the smallest is.
    """
    _check_fraction(fraction)
    sizes = Counter(map(group, items))
    left, groups_held_out = round(fraction * len(items)), set[str]()
    for name in _in_seeded_order(sizes, seed):
        if sizes[name] <= left and len(groups_held_out) < len(sizes) - 1:
            groups_held_out.add(name)
            left -= sizes[name]
    if not groups_held_out and fraction > 0 and len(sizes) > 1:
        groups_held_out.add(min(_in_seeded_order(sizes, seed), key=sizes.__getitem__))
    return _parted(items, group, groups_held_out)


def hold_out_groups(
    items: Sequence[T], fraction: float, group: Callable[[T], str], *, seed: int
) -> tuple[list[T], list[T]]:
    """Split items into a kept and a held-out part, by whole groups.

    The groups with the smallest SHA-256 of (seed, group) are held out, so that the choice is the
    same on every machine and whatever the order of the items.

    Args:
        items: Items of a training split.
        fraction: part of the distinct groups to hold out, 0 ≤ fraction < 1; the number is rounded,
            but above 0 it is at least one group, if there are two.
        group: Key that keeps items together, such as their text.
        seed: Seed of the choice of groups.

    Returns:
        (kept, held out), both in the order given.

    Raises:
        InputError: the fraction is outside [0, 1).
    """
    _check_fraction(fraction)
    groups = _in_seeded_order(set(map(group, items)), seed)
    count = round(fraction * len(groups))
    if fraction > 0 and len(groups) > 1:
        count = min(max(count, 1), len(groups) - 1)
    return _parted(items, group, set(groups[:count]))


def _check_fraction(fraction: float) -> None:
    if not 0 <= fraction < 1:
        raise InputError(f"cannot hold out a fraction of {fraction}: give 0 ≤ fraction < 1")


def _in_seeded_order(groups: Iterable[str], seed: int) -> list[str]:
    return sorted(groups, key=lambda name: hashlib.sha256(f"{seed}\n{name}".encode()).digest())


def _parted(
    items: Sequence[T], group: Callable[[T], str], names: Collection[str]
) -> tuple[list[T], list[T]]:
    remaining = [item for item in items if group(item) not in names]
    return remaining, [item for item in items if group(item) in names]


def _first(items: list[T], count: int, group: Callable[[T], str], *, seed: int) -> list[T]:
    """The first ``count`` items in a seeded order of their groups; in their own order."""
    names = list(map(group, items))
    place = {name: i for i, name in enumerate(_in_seeded_order(set(names), seed))}
    chosen = sorted(range(len(items)), key=lambda i: place[names[i]])[:count]
    return [items[i] for i in sorted(chosen)]


def _subset(items: list[T], limit: int, group: Callable[[T], str], *, seed: int) -> list[T]:
    """At most ``limit`` items: whole groups in a seeded order, as many as fit.

    A larger limit may leave out what a smaller one takes: workspaces that are not ``nested``.
    """
    import numpy as np

    sizes = Counter(map(group, items))
    groups = list(sizes)
    chosen: set[str] = set()
    count = 0
    for index in np.random.default_rng([seed, 1]).permutation(len(groups)):
        members = groups[int(index)]
        if count + sizes[members] <= limit:
            chosen.add(members)
            count += sizes[members]
    return [item for item in items if group(item) in chosen]
