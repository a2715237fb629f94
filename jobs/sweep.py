"""Every head on every snapshot, in as few passes as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from bertvision.errors import InputError
from bertvision.jobs.show import (
    DIFFERENCE,
    FRACTION,
    PLACES,
    Row,
    Rows,
    Values,
    meanings,
    score_charts,
    score_columns,
    systems_table,
)
from bertvision.pipelines.declare import (
    DEFAULTS,
    DataDevice,
    Devices,
    StorePath,
    WorkspacePath,
    job,
)
from bertvision.pipelines.options import Option
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.ranks import this_rank
from bertvision.pipelines.reading import (
    Names,
    Numbers,
    Tags,
    parse_fractions,
    parse_learning_rates,
    parse_names,
    parse_tags,
)
from bertvision.pipelines.results.columns import Column, marked, table_of
from bertvision.pipelines.tasks.registry import head_kind
from bertvision.pipelines.text import fill
from bertvision.pipelines.workspace.checks import check_new_heads, find_workspace
from bertvision.pipelines.workspace.heads import stored_tags
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.runs import runs_of

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.workspace import Workspace

_PARTS = ("fine_tuning", "extraction", "training")
_LEGEND = (
    "Scores are in per cent.  Retention: what the score is above the row in brackets, never "
    "answering or the largest class, in per cent of what BERT's is at the last snapshot.  "
    "Speed-up: the time to fine-tune BERT up to there, divided by the head's fine-tuning, "
    "extraction and training together; below 1 these take longer."
)


@job
def sweep(
    heads: Names | None = None,
    *,
    trained_on: Tags | None = None,
    checkpoint: Tags | None = None,
    fractions: Numbers = 1,
    seeds: Annotated[int, Option(ge=1)] = 1,
    lr: Numbers | None = None,
    options: TrainOptions = DEFAULTS,
    split: str = "dev",
    devices: Devices = 1,
    data_device: DataDevice = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> Rows[Row]:
    """Train and score heads on many snapshots, parts and seeds.

    What is there already is not done again: a stopped sweep is continued by the same call.

    Examples:
        >>> import bertvision
        >>> rows = bertvision.sweep("learned-pooling", checkpoint="1e", seeds=2)
        >>> [(row.name, row.trained_on, row.seeds) for row in rows]
        [('learned-pooling', '0.5e', 2), ('learned-pooling', '1e', 2)]

    Args:
        heads: Names from `bertvision heads`; by default all but the costly ones.
        trained_on: Snapshots to train on, such as 0.3e,1e; by default all.
        checkpoint: Snapshots to evaluate on; by default all.
        fractions: Parts of the training examples, such as 0,0.1,0.3,1.
        seeds: Trainings of each, with seeds from 0.
        lr: Learning rate of Adam (default 1e-3). Of several, such as 1e-4,3e-4,1e-3, each head gets
            the best on tune.
        split: Split to score.

    Returns:
        A row for each head, part of the data and pair of snapshots, its seeds together: means and
        standard deviations, the difference from BERT, costs, files and commands.

    Raises:
        UnknownNameError: there is no such head, snapshot or stored split.
        WorkspaceError: a head was trained with other options before; nothing was changed.
        StoppedError: SIGINT or SIGTERM; all is saved.
        RankLostError: one of several processes ended; names it, and the same call goes on.
    """
    space = find_workspace(workspace, store)
    options, rates = with_rates(options, lr, split)
    asked = asked_sweep(space, heads, trained_on, checkpoint, fractions, seeds, split, options.pool)
    if rates and (devices > 1 or not this_rank().alone):
        raise InputError("--lr with several values is for one process: leave --devices out")
    from bertvision.pipelines.results.sweep import sweep as run
    from bertvision.pipelines.results.sweep import sweep_rows

    results = run(
        space,
        **asked._asdict(),
        rates=rates,
        options=options,
        split=split,
        devices=devices,
        data_device=data_device,
    )
    table = partial(sweep_table, rates=rates)
    return Rows(map(Row, sweep_rows(space, results)), table, score_charts)


def with_rates(
    options: TrainOptions, lr: Numbers | None, split: str
) -> tuple[TrainOptions, tuple[float, ...]]:
    """Options with a learning rate, or those rates that are to be chosen from.

    Args:
        options: Options of the training.
        lr: Learning rates; None leaves that of the options.
        split: Split that is scored.

    Raises:
        InputError: a part is not a number above 0, or several would be scored on tune.
    """
    rates = () if lr is None else parse_learning_rates(lr)
    if len(rates) == 1:
        return replace(options, lr=rates[0]), ()
    if rates and split == "tune":
        raise InputError(f"--lr {lr} is chosen on tune: score another --split, or give one --lr")
    return options, rates


class AskedSweep(NamedTuple):
    """Arguments of a sweep, as they were read."""

    heads: Sequence[str]
    trained_on: Sequence[str]
    checkpoints: Sequence[str]
    fractions: Sequence[float]
    seeds: Sequence[int]


def asked_sweep(
    space: Workspace,
    heads: Names | None,
    trained_on: Tags | None,
    checkpoint: Tags | None,
    fractions: Numbers,
    seeds: int,
    split: str,
    pool: TokenPooling | None = None,
) -> AskedSweep:
    """Read the arguments of a sweep, and check all that needs nothing heavy.

    Args:
        space: the workspace.
        heads: As in `sweep`, likewise all that follow.
        trained_on: snapshots to train on.
        checkpoint: snapshots to evaluate on.
        fractions: parts of the training examples.
        seeds: Number of trainings of each.
        split: Split that is scored.
        pool: Pooling that heads read whose names say none.

    Raises:
        UnknownNameError: there is no such head, snapshot or stored split.
        InputError: a name or a number is wrong.
    """
    names, parts = parse_names(heads or ()), parse_fractions(fractions)
    sources = () if trained_on is None else parse_tags(trained_on)
    targets = () if checkpoint is None else parse_tags(checkpoint)
    if names:
        check_new_heads(space, runs_of(names, parts, range(seeds)))
    elif space.splits():
        head_kind(space.config.task.name)  # refuses a task that no head learns
        tokens = pool or space.config.model.usual_tokens(space.config.task.name)
        stored_tags(space, sources, tokens, "train", "--trained-on")
        stored_tags(space, targets, tokens, split, "--checkpoint")
    return AskedSweep(names, sources, targets, parts, range(seeds))


def sweep_table(rows: Sequence[Values], rates: Sequence[float] = ()) -> str:
    """Scores of each head on each pair of snapshots, against BERT's at the second; then costs.

    Args:
        rows: Rows of a sweep.
        rates: Learning rates that were chosen from.
    """
    first = rows[0] if rows else {}
    scores = score_columns(rows)
    compared = next((c for c in scores if first.get(c.key) == first.get("score")), None)
    # what counts and its difference stand first: a narrow terminal leaves out what comes last
    scores.sort(key=lambda column: column is not compared)
    system = [Column("name", "head", "text")]
    system += [FRACTION] if any(r["fraction"] != 1 for r in rows) else []
    system += PLACES
    gain = replace(DIFFERENCE, label=f"{compared.label if compared else 'score'} − BERT")
    seeds = [Column("seeds", "seeds", "count")] if any(r["seeds"] > 1 for r in rows) else []
    costs = [
        Column("retention", "retention", form="{:.1f}%"),
        Column("speed_up", "speed-up", digits=2),
        Column("percent", "% of encoder", digits=3),
        *(Column(f"{part}_seconds", f"{part.replace('_', '-')} s") for part in _PARTS),
        Column("bytes", "stored", "size"),
    ]
    named = [{**r, "name": marked(r["name"], r)} for r in rows]
    baseline = next((r["baseline"] for r in rows if r.get("baseline") is not None), None)
    shown = [*system, *scores[:1], gain, *seeds, *scores[1:]]
    legend = fill(_LEGEND + meanings(scores))
    if rates:
        tried = ", ".join(f"{rate:g}" for rate in rates)
        legend += "\n" + fill(
            f"The learning rate behind @lr does best on tune of {tried}, of each head, part of the "
            "data and snapshot trained on, by the mean over seeds."
        )
    tables = [systems_table(shown, named, baseline), table_of([*system, *costs], named)]
    return "\n\n".join([*tables, legend])
