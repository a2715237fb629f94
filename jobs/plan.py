"""Costs of training heads, with a store and without one."""

from __future__ import annotations

from typing import Annotated, Any

from bertvision.errors import counted
from bertvision.jobs.dry_run import duration
from bertvision.jobs.heads import asked_training
from bertvision.jobs.show import RowsField, ShownRecord, Values
from bertvision.pipelines.declare import DEFAULTS, NewEncoding, StorePath, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Names, Tag
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.text import fill, size
from bertvision.pipelines.workspace.checks import find_workspace
from bertvision.pipelines.workspace.job_options import Source, TrainOptions


class TrainingCosts(ShownRecord):
    """Costs of training heads, by the source of the hidden states."""

    rows: RowsField
    """A row for each ``source``: ``bytes`` on the disk, ``encoder_seconds`` to load, calibrate and
    run the encoder, ``training_seconds``, and ``seconds`` of both."""
    source: str
    """The source to take."""
    windows: int
    encoder_passes: float
    """How often the encoder goes over the data where nothing is stored."""
    bytes_needed: int
    """Room that storing the states asks for."""
    bytes_free: int | None
    """Free where the store lies; None where that is not known."""
    device: str

    def table(self, values: Values) -> str:
        """The table that the command prints, and which source to take."""
        shown = [Column("source", "--source", "text"), Column("bytes", "disk", "size")]
        times = columns(
            "text", encoder_seconds="encoder", training_seconds="heads", seconds="in all"
        )
        rows = [{**row, **{t.key: duration(row[t.key]) for t in times}} for row in values["rows"]]
        return f"{table_of([*shown, *times], rows)}\n\n{fill(_advice(values))}"


def _advice(values: Values) -> str:
    by_source = {row["source"]: row for row in values["rows"]}
    stored, live = by_source["store"], by_source["live"]
    windows = counted(values["windows"], "window")
    measured = f"Measured on a few shards of {windows}, on {values['device']}."
    free = values["bytes_free"]
    if free is not None and values["bytes_needed"] > free:
        why = f"a store needs {size(values['bytes_needed'])}, and {size(free)} are free"
    elif values["source"] == "live":
        why = "the encoder runs once either way; auto keeps the states for later calls"
    else:
        ratio = live["seconds"] / stored["seconds"]
        why = (
            f"without a store the encoder goes over the data {values['encoder_passes']:.1f} times, "
            f"and training takes {ratio:.1f} times as long"
        )
    return f"Take --source {values['source']}: {why}. {measured}"


@job
def plan(
    heads: Names,
    *,
    checkpoint: Tag | None = None,
    options: TrainOptions = DEFAULTS,
    seeds: Annotated[int, Option(ge=1)] = 1,
    encoding: NewEncoding = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> TrainingCosts:
    """Measure what training heads costs, with a store and without one.

    The encoder computes a few shards and the heads train on them, for about half a minute once the
    encoder is loaded; nothing is kept. The costs are those of a training split of which nothing is
    stored yet; tune and dev are not in them.

    Examples:
        >>> import bertvision
        >>> costs = bertvision.plan("learned-pooling", checkpoint="1e", epochs=20, seeds=3)
        >>> [row.source for row in costs.rows]
        ['store', 'auto', 'live']

    Args:
        heads: Names from `bertvision heads`.
        checkpoint: Snapshot to train on; by default the only one.
        seeds: Number of trainings of each head, with seeds from 0.

    Returns:
        Bytes and seconds by source of the hidden states, and which one to take.

    Raises:
        UnknownNameError: There is no such head or snapshot.
        InputError: A name or an option is wrong.
    """
    space = find_workspace(workspace, store)
    asked = Source("live", encoding)
    runs, tag = asked_training(
        space, heads, checkpoint, options, seed=0, fraction=1.0, source=asked
    )
    from bertvision.pipelines.live.pilot import measure
    from bertvision.pipelines.precision import device

    costs = measure(space, runs, tag, options, seeds=seeds, encoding=encoding)
    training = costs.training_seconds
    once = costs.setup_seconds + costs.encoder_seconds
    live = costs.setup_seconds + costs.live_seconds
    fits = costs.free is None or costs.needed <= costs.free
    by_source = {
        "store": (costs.bytes, once),
        "auto": (costs.bytes, once) if fits else (0, live),
        "live": (0, live),
    }
    rows = [
        {
            "source": source,
            "bytes": size_of_store,
            "encoder_seconds": encoder,
            "training_seconds": training,
            "seconds": encoder + training,
        }
        for source, (size_of_store, encoder) in by_source.items()
    ]
    return TrainingCosts(
        rows=rows,
        source="auto" if fits and costs.live_seconds > costs.encoder_seconds else "live",
        windows=costs.windows,
        encoder_passes=costs.encoder_passes,
        bytes_needed=costs.needed,
        bytes_free=costs.free,
        device=str(device()),
    )
