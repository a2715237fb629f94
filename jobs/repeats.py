"""Many seeds: the same fine-tuning with each, and one table that compares methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bertvision.errors import InputError
from bertvision.jobs.finetune import check_new, checked
from bertvision.jobs.show import RowsField, ShownRecord, Values
from bertvision.pipelines.declare import DEFAULTS, FigurePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, Plotted, check_suffix
from bertvision.pipelines.reading import Names, StrPath, Tags, parse_names, path_of
from bertvision.pipelines.repeats.folder import find_seeds
from bertvision.pipelines.text import fill
from bertvision.pipelines.workspace.job_options import FinetuneOptions

if TYPE_CHECKING:
    from bertvision.pipelines.plotting import Figure


class Spread(ShownRecord, Plotted):
    """Methods compared over the seeds of their fine-tunings."""

    task: str
    metric: str
    """Key of the metric that ``score`` is; scores are in per cent."""
    baseline: float | None
    """Score of always giving the commonest answer; None where the metric has none to tell: 0 then
    counts as failed."""
    baseline_name: str
    """Name of that answer: ``majority class``, ``never answering``, …."""
    rows: RowsField
    """For each method ``method``, ``variant``, ``system``, ``runs``, ``unfinished``, ``score``,
    ``score_sd``, ``lowest``, ``highest``, ``failed`` (a share), ``trained_parameters``,
    ``kept_bytes``, ``fine_tuning_seconds``, ``extraction_seconds``, ``training_seconds``, and
    ``difference`` from the first with ``difference_low``, ``difference_high`` and ``no_interval``,
    which says why there is none."""
    runs: RowsField
    """For each run ``method``, ``seed``, ``score``, ``failed``, costs and ``folder``."""
    unfinished: list[dict[str, Any]]
    """For each seed without a score ``method``, ``seed`` and ``command``."""

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return spread_table(values)

    def charts(self) -> dict[str, Chart]:
        """Runs and means of methods; differences from the first with intervals.

        Methods that are one variant with ever other numbers, such as freeze:1, freeze:2, …, have a
        curve too, ``by number``.
        """
        from bertvision.pipelines.repeats.charts import spread_charts

        return spread_charts(self.to_json())

    def figure(self) -> Figure:
        """A row of points for each method, which a notebook shows."""
        from bertvision.pipelines.repeats.charts import spread_figure

        return spread_figure(self.to_json())


@job
def repeat(
    *,
    options: FinetuneOptions = DEFAULTS,
    save_at: Tags | None = None,
    seeds: Annotated[int, Option(ge=1)] = 5,
    workspace: Annotated[StrPath | None, Option(flag="--workspace -w")] = None,
    **changes: Any,
) -> Spread:
    """Fine-tune BERT with several seeds, and compare the runs.

    Each seed has a workspace of its own. An interrupted call is continued by the same call; what is
    there is not done again. Seeds can be added later: new ones get the settings of those that are
    there.

    Args:
        save_at: Fractions of an epoch to snapshot at, such as 0,0.1,0.3,1 (default 1); 2+3 is the
            mean of two.
        seeds: How many seeds; --seed is the first of them.
        workspace: Folder of the workspaces, seed-0, seed-1, …; by default the one you stand in.

    Returns:
        What `spread` says of the folder.

    Raises:
        WorkspaceError: the folder is a workspace itself, or one in it was made with other settings.
        InputError: an option, the model or the data is wrong.
        LockedError: another process is fine-tuning in one of the workspaces.
        StoppedError: SIGINT or SIGTERM; all is saved.
    """
    options = checked(options, save_at)
    root = Path(workspace if workspace is not None else ".").expanduser().resolve()
    if not find_seeds(root):
        check_new(options)
    from bertvision.pipelines.repeats.run import repeat as run

    run(root, options, seeds=seeds)
    return spread(str(root))


@job
def spread(
    folders: Names,
    *,
    plot: FigurePath = None,
) -> Spread:
    """Compare methods over the seeds of their runs.

    Mean, spread, failed runs, costs, and the difference from the first method.

    Args:
        folders: Folders that repeat made, one for each method; FOLDER@NAME:SNAPSHOT scores another
            system than BERT's last snapshot.
        plot: SVG file to write: a row of points for each method.

    Raises:
        WorkspaceError: a folder holds no runs, they differ in more than the seed, none of them is
            scored, or they are of another task, data or metric than those of the first.
        UnknownNameError: no run of a folder has such a system, or several are meant.
        InputError: no folder is named, one is a file or comes twice, or ``plot`` does not end in
            ``.svg``.
    """
    figure = path_of(plot)
    if figure is not None:
        check_suffix(figure)
    if not (names := [name for name in parse_names(folders) if name]):
        raise InputError("name a folder of runs, such as mrpc, which `bertvision repeat` makes")
    from bertvision.pipelines.repeats.spread import spread as run

    found = Spread.model_validate(run(names))
    if figure is not None:
        found.figure().save(figure)
    return found


def spread_table(result: Values) -> str:
    """A line for each method, best read from the left; then what is unfinished."""
    from bertvision.pipelines.repeats.table import LEGEND, basis, columns, remarks, shown
    from bertvision.pipelines.results.columns import table_of

    table = table_of(columns(result), shown(result))
    below = "\n".join(map(fill, remarks(result)))
    return "\n\n".join(filter(None, [basis(result), table, fill(LEGEND), below]))
