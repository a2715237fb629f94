"""Every head on every snapshot, in as few passes as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from bertvision.jobs.show import (
    Row,
    Rows,
    Values,
    baseline_cells,
    meanings,
    metric_names,
    score_charts,
    with_footnote,
)
from bertvision.pipelines.declare import DEFAULTS, Devices, StorePath, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import (
    Names,
    Numbers,
    Tags,
    parse_fractions,
    parse_names,
    parse_tags,
)
from bertvision.pipelines.tasks.registry import head_kind
from bertvision.pipelines.text import fill, format_table, number, size
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

Columns = dict[str, Callable[[Values], str]]
"""How the cells of columns are made of a row, by header."""


@job
def sweep(
    heads: Names | None = None,
    *,
    trained_on: Tags | None = None,
    checkpoint: Tags | None = None,
    fractions: Numbers = 1,
    seeds: Annotated[int, Option(ge=1)] = 1,
    options: TrainOptions = DEFAULTS,
    split: str = "dev",
    devices: Devices = 1,
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
        seeds: How many times each is trained, with seeds from 0.
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
    asked = asked_sweep(space, heads, trained_on, checkpoint, fractions, seeds, split)
    from bertvision.pipelines.results.sweep import sweep as run
    from bertvision.pipelines.results.sweep import sweep_rows

    results = run(space, **asked._asdict(), options=options, split=split, devices=devices)
    return Rows(map(Row, sweep_rows(space, results)), sweep_table, score_charts)


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
        kind = head_kind(space.config.task.name)
        stored_tags(space, sources, kind, "train", "--trained-on")
        stored_tags(space, targets, kind, split, "--checkpoint")
    return AskedSweep(names, sources, targets, parts, range(seeds))


def sweep_table(rows: Sequence[Values]) -> str:
    """Scores of each head on each pair of snapshots, against BERT's at the second; then costs."""
    from bertvision.pipelines.results.columns import marked

    metrics = metric_names(rows)
    system: Columns = {"head": lambda r: marked(r["name"], r)}
    if any(r["fraction"] != 1 for r in rows):
        system["part of data"] = lambda r: f"{r['fraction']:.4g}"
    system |= {"trained on": lambda r: r["trained_on"], "evaluated on": lambda r: r["checkpoint"]}
    compared = _compared(rows, metrics)
    order = sorted(metrics, key=lambda key: metrics[key] != compared)  # what counts stands first
    scores: Columns = {metrics[key]: partial(_with_deviation, key=key) for key in order}
    # with the score before its difference: a narrow terminal leaves out what comes last
    scores, others = (dict(list(scores.items())[part]) for part in (slice(1), slice(1, None)))
    rest: Columns = {f"{compared} − BERT": lambda r: number(r["difference"], "{:+.1f}")}
    if any(r["seeds"] > 1 for r in rows):
        rest["seeds"] = lambda r: str(r["seeds"])
    costs: Columns = {
        "retention": lambda r: number(r.get("retention"), "{:.1f}%"),
        "speed-up": lambda r: number(r.get("speed_up"), "{:.2f}"),
        "% of encoder": lambda r: number(r.get("percent"), "{:.3f}"),
    }
    costs |= {f"{part.replace('_', '-')} s": partial(_seconds, part=part) for part in _PARTS}
    costs["stored"] = lambda r: "-" if r.get("bytes") is None else size(r["bytes"])
    shown = system | scores | rest | others
    lines = [[cell(r) for cell in shown.values()] for r in rows]
    baseline = next((r["baseline"] for r in rows if r.get("baseline") is not None), None)
    if baseline is not None:
        name, cells = baseline_cells(baseline, order)
        first, more = cells[: len(scores)], cells[len(scores) :]
        lines.append([name, *["-"] * (len(system) - 1), *first, *["-"] * len(rest), *more])
    costs = system | costs
    tables = [
        with_footnote(format_table([*shown], lines), [line[0] for line in lines], rows),
        format_table([*costs], [[cell(r) for cell in costs.values()] for r in rows]),
    ]
    return "\n\n".join([*tables, fill(_LEGEND + meanings(order))])


def _seconds(row: Values, part: str) -> str:
    return number(row.get(f"{part}_seconds"))


def _compared(rows: Sequence[Values], metrics: Mapping[str, str]) -> str:
    """Name of the metric that is the rows' score."""
    first = rows[0] if rows else {}
    names = (name for key, name in metrics.items() if first.get(key) == first.get("score"))
    return next(names, "score")


def _with_deviation(row: Values, key: str) -> str:
    """Mean over seeds, with the standard deviation where there is one."""
    deviation = row.get(f"{key}_sd")
    return number(row.get(key)) + ("" if deviation is None else f" ± {deviation:.1f}")
