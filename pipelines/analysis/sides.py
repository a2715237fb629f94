"""The two snapshots that an analysis sets side by side, of one workspace or of two.

The same tokens of several stored splits, joined on (example id, position).

Splits of the same data may be stored in another order, in shards of another size, by another
encoder: row i of one is not row i of the other. What joins two tokens is the example they belong
to, a row of the data, and where in it they stand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError, ProvenanceError
from bertvision.featurestore.format.keeping import KEPT_POSITION
from bertvision.pipelines.analysis.request import Other, Request, Setting
from bertvision.pipelines.reading import StrPath
from bertvision.pipelines.workspace.checks import check_stored, find_workspace
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    import dask.array as da

    from bertvision.featurestore.split import ActivationSplit


Rows = NDArray[np.int64]


def joined_rows(splits: Sequence[ActivationSplit]) -> list[Rows]:
    """For each split the rows of its tokens, ordered by (example id, position) in all alike.

    Args:
        splits: complete, one or more.

    Returns:
        (tokens,) rows of ``split.dask()`` for each split; element i is the same token in all.

    Raises:
        ProvenanceError: two do not hold the same tokens; names them and what differs.
        CorruptStoreError: the plan or the arrays of one are damaged.
    """
    for other in splits[1:]:
        _check_same_tokens(splits[0], other)
    return [_rows(split) for split in splits]


def places_in(x: ActivationSplit, y: ActivationSplit) -> Rows | None:
    """For each row of a split the row of another that holds the same token.

    Returns:
        (tokens,) rows; None where every token stands in the same row of both.

    Raises:
        ProvenanceError: they do not hold the same tokens; names them and what differs.
        CorruptStoreError: the plan or the arrays of one are damaged.
    """
    here, there = joined_rows((x, y))
    if np.array_equal(here, there):
        return None
    places = np.empty_like(there)
    places[here] = there
    return places


def _rows(split: ActivationSplit) -> Rows:
    """(tokens,) row of each token, by example id and position."""
    plan = split.plan
    n = plan.n_tokens.astype(np.int64)
    by_id = np.argsort(plan.example_id, kind="stable")
    return _spread(np.cumsum(n) - n, n, by_id)


def _spread(first: Rows, n: Rows, examples: Rows) -> Rows:
    """``first``, ``first`` + 1, … for each of some examples, ``n`` of them each."""
    counts = n[examples]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows: Rows = np.repeat(first[examples], counts) + within
    return rows


def _check_same_tokens(x: ActivationSplit, y: ActivationSplit) -> None:
    """Refuse two splits that do not hold the same tokens of the same texts."""
    alike = _same_kept(x, y)
    if alike and x.record.plan_sha256 == y.record.plan_sha256 and _same_texts(x, y):
        return
    what = None
    if not _same_texts(x, y):
        what = "their texts differ"
    elif x.record.examples != y.record.examples:
        what = f"they have {x.record.examples:,} and {y.record.examples:,} examples"
    elif not np.array_equal(np.sort(x.plan.example_id), np.sort(y.plan.example_id)):
        what = "they are of other examples"
    else:
        lengths = [_by_id(split) for split in (x, y)]
        if len(differing := np.flatnonzero(lengths[0] != lengths[1])):
            i = int(differing[0])
            what = (
                f"example {i} has {lengths[0][i]} and {lengths[1][i]} tokens, and "
                f"{len(differing):,} examples differ"
            )
        elif not alike:
            what = f"they keep other tokens of each: {x.keep or 'all'} and {y.keep or 'all'}"
        elif not _same_places(x, y):
            what = "their tokens stand at other places in the text"
    if what is not None:
        one, other = (x.name, y.name)
        if str(x.storage) != str(y.storage):
            one, other = (f"{split.name} in {split.storage}" for split in (x, y))
        raise ProvenanceError(
            f"{one} and {other} do not hold the same tokens ({what}): take splits extracted "
            "from the same data with the same tokenizer and lengths"
        )


def _same_texts(x: ActivationSplit, y: ActivationSplit) -> bool:
    from bertvision.featurestore.format.examples import table_digest

    if x.record.format == y.record.format:
        return x.record.examples_sha256 == y.record.examples_sha256
    # digests of two kinds: the tables themselves are compared, each of which is checked
    return table_digest(x.table()) == table_digest(y.table())


def _by_id(split: ActivationSplit) -> NDArray[np.int32]:
    """(examples,) tokens of each example, by id."""
    lengths: NDArray[np.int32] = split.plan.n_tokens[np.argsort(split.plan.example_id)]
    return lengths


def _same_kept(x: ActivationSplit, y: ActivationSplit) -> bool:
    """Whether two splits keep tokens of the same places, or all."""
    if x.keep is None or y.keep is None:
        return x.keep == y.keep
    return np.array_equal(in_order(x, KEPT_POSITION), in_order(y, KEPT_POSITION))


def _same_places(x: ActivationSplit, y: ActivationSplit) -> bool:
    """Whether tokens are of the same characters; of the same ids, where no places are stored."""
    for name in ("offset_mapping", "input_ids"):
        if all(name in split.record.arrays for split in (x, y)):
            return np.array_equal(in_order(x, name), in_order(y, name))
    return True


def in_order(split: ActivationSplit, name: str) -> NDArray[np.generic]:
    """An array of the token axis, by example id and position, as `joined_rows` has the rows.

    Args:
        split: Split with the array.
        name: Name of the array.

    Returns:
        (tokens, …) values of the real tokens.

    Raises:
        UnknownNameError: the split has no such array.
        CorruptStoreError: it is damaged.
    """
    plan = split.plan
    by_id = np.argsort(plan.example_id, kind="stable")
    rows = _spread(plan.first_token, plan.n_tokens.astype(np.int64), by_id)
    values: NDArray[np.generic] = split.array(name)[rows]
    return values


class Sides(NamedTuple):
    """A split of each of two snapshots.

    Attributes:
        x: Split of the rows.
        y: Split of the columns.
        names: Names of both, for titles.
        apart: Whether they are of two workspaces.
    """

    x: ActivationSplit
    y: ActivationSplit
    names: tuple[str, str]
    apart: bool

    @property
    def are_one(self) -> bool:
        """Whether both are the same split."""
        return not self.apart and self.x.name == self.y.name

    def arrays(self) -> tuple[da.Array, da.Array, Rows | None]:
        """The hidden states of both, the same object where both are one, and see `places_in`.

        Raises:
            ProvenanceError: they do not hold the same tokens.
        """
        places, states = places_in(self.x, self.y), self.x.dask()
        return states, states if self.are_one else self.y.dask(), places

    def told(self) -> dict[str, Any]:
        """Names and layers, as functions of arrays take them."""
        return {
            "names": self.names,
            "layers_x": self.x.record.layers,
            "layers_y": self.y.record.layers,
        }


def pair(
    request: Request, first: str, second: str, split: str, beside: StrPath | Workspace | None
) -> Sides:
    """Read a split of two snapshots.

    Args:
        request: Request that reads them.
        first: Snapshot of the rows.
        second: Snapshot of the columns.
        split: Split that both have.
        beside: Workspace with the second; None is that of the request.

    Raises:
        WorkspaceError: There is no such workspace.
        UnknownNameError: There is no such snapshot or split.
        InputError: ``beside`` is the workspace of the request.
        IncompleteSplitError: Shards of one are missing.
    """
    if beside is None:
        x, y = request.splits([first, second], split, whole=False)
        return Sides(x, y, (x.name, y.name), False)
    other = find_workspace(beside)
    if other.root == request.workspace.root:
        raise InputError(f"--with {other.root}: this is the same workspace; leave --with out")
    check_stored(other, second, split, whole=False)
    (x,) = request.splits([first], split, whole=False)
    y = other.split(second, split).require_complete()
    mine, theirs = told_apart((request.workspace, other))
    request.tags = [first, second]
    request.others = {f"{theirs}: {y.name}": Other(other, y)}
    # as it is typed where one stands in the first
    path = os.path.relpath(other.root, request.workspace.root)
    request.settings["with"] = Setting(path, None, f"with-{theirs}")
    return Sides(x, y, (f"{mine}: {x.name}", f"{theirs}: {y.name}"), True)


def told_apart(workspaces: Sequence[Workspace]) -> list[str]:
    """The names of the folders of workspaces, with as many of those above as tell them apart."""
    parts = [workspace.root.parts for workspace in workspaces]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts) and depth < max(map(len, parts)):
        depth += 1
    return ["-".join(part[-depth:]).removeprefix("/-") for part in parts]
