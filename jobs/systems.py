"""Systems beside each other: ensembles and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from bertvision.errors import InputError
from bertvision.jobs.show import (
    Shown,
    ShownRecord,
    Values,
    marked_scores,
    meanings,
    score_columns,
    systems_table,
)
from bertvision.pipelines.declare import Resamples, Seed, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import (
    Names,
    StrPath,
    Tag,
    parse_names,
    parse_tag,
    path_of,
)
from bertvision.pipelines.repeats.folder import find_seeds, holds_runs
from bertvision.pipelines.results.columns import Column, marked
from bertvision.pipelines.results.systems import Combine
from bertvision.pipelines.tasks.metrics import COMPARABLE, METRICS, MetricName
from bertvision.pipelines.text import fill, flat_rows
from bertvision.pipelines.uncertainty import By, Seeds
from bertvision.pipelines.workspace.checks import check_trained_heads, find_workspace
from bertvision.pipelines.workspace.heads import trained_on as trained_where
from bertvision.pipelines.workspace.records import BertScores, EnsembleScores, HeadScores


class Ensemble(Shown, EnsembleScores):
    """The scores of an ensemble, and of its members."""

    parts: list[HeadScores | BertScores]
    """Scores of the members, where they were scored on the same split."""

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each member that was scored on the same split, then that of the ensemble."""
        values = self.to_json()
        return flat_rows([*values.pop("parts"), values])

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return ensemble_table(values)


class Comparison(ShownRecord):
    """Two systems on the same items; numbers are points of per cent."""

    first: str
    second: str
    metric: str
    split: str
    threshold_tuned_on: str | None = None
    """Split that tuned the no-answer threshold of both; None where it was left at 0."""
    by: str
    """Unit of the bootstrap."""
    words: tuple[str, str]
    """Names of clusters and items."""
    first_score: float
    second_score: float
    baseline: float | None = None
    """Score of always giving the commonest answer, where the metric has one to tell."""
    difference: float
    """First minus second."""
    low: float
    """Lower end of the 95 % interval of the difference."""
    high: float
    p: float
    """Two-sided."""
    standard_error: float
    questions: int
    clusters: int
    """Number of drawn units: contexts, or questions where each stands alone."""
    resamples: int
    seeds: tuple[int, int] = (1, 1)
    """Trainings of each system that were drawn too; fine-tunings, in a folder of these."""
    sentence: str
    """The comparison in a sentence."""

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return compare_table(values)


@job
def ensemble(
    heads: Names,
    *,
    with_bert: bool = False,
    combine: Combine = "max",
    trained_on: Tag | None = None,
    checkpoint: Tag | None = None,
    split: str = "dev",
    workspace: WorkspacePath = None,
) -> Ensemble:
    """Combine heads, and BERT, from their stored logits.

    Examples:
        >>> import bertvision
        >>> _ = bertvision.train("learned-pooling", checkpoint="1e")
        >>> _ = bertvision.evaluate("learned-pooling")
        >>> bertvision.ensemble("learned-pooling", with_bert=True).members
        ('bert', 'learned-pooling')

    Args:
        heads: Names of trained heads.
        with_bert: Make BERT at the same snapshot a member too.
        combine: Combination of the softmaxes: max or mean.
        trained_on: Snapshot the heads were trained on.
        checkpoint: Snapshot they were scored on; by default the same.
        split: Split that was scored.

    Raises:
        InputError: there are fewer than two members, or one comes twice.
        UnknownNameError: there is no such head.
        WorkspaceError: a member has no logits on this snapshot, or they are of other data.
    """
    names = parse_names(heads)
    source = None if trained_on is None else parse_tag(trained_on)
    target = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(workspace)
    source = source or trained_where(space, names)
    check_trained_heads(space, names, source)
    from bertvision.pipelines.results.ensemble import ensemble as run

    members = run(
        space,
        names,
        with_bert=with_bert,
        trained_on=source,
        tag=target or source,
        combine=combine,
        split=split,
    )
    return Ensemble.model_validate(members)


ComparedBy = Annotated[
    MetricName | None, Option(f"{', '.join(COMPARABLE)}; by default that of the task.")
]


@job
def compare(
    first: str,
    second: str,
    *,
    metric: ComparedBy = None,
    by: By = "context",
    resamples: Resamples = 10_000,
    seed: Seed = 0,
    seeds: Seeds = "one",
    beside: Annotated[StrPath | None, Option(flag="--with")] = None,
    split: str = "dev",
    workspace: WorkspacePath = None,
) -> Comparison:
    """Test whether two systems differ by more than noise.

    A paired bootstrap over contexts or items gives the interval of the difference, and p. In a
    folder of runs that `bertvision repeat` made, it is over the fine-tunings too.

    Examples:
        >>> import bertvision
        >>> found = bertvision.compare("bert:1e", "bert:0.5e", resamples=100)
        >>> found.metric, found.low <= found.difference <= found.high
        ('f1', True)

    Args:
        first: System as NAME[:TRAINED_ON[:CHECKPOINT]]: bert:1e, learned-pooling:0.3e:1e, …
        second: The other system, likewise.
        by: Unit to draw: context (with all its questions) or question; of sentences, items.
        resamples: Bootstrap samples.
        seed: Seed of the draws.
        seeds: one, as named, or all trained ones, which are then drawn too.
        beside: Workspace of the second system, with the same data.
        split: Split that was scored.

    Raises:
        UnknownNameError: a system was not scored, or several are meant.
        InputError: the systems are of different kinds, or have no such metric, or ``beside`` has
            other items; in a folder of runs, ``seeds`` or ``beside`` is given, or the metric is no
            mean over items.
        WorkspaceError: predictions are missing, damaged or of other data.
    """
    asked: dict[str, Any] = {"metric": metric, "split": split, "by": by}
    asked |= {"resamples": resamples, "seed": seed}
    folder = Path(path_of(workspace) or ".")
    if holds_runs(folder):
        if beside is not None or seeds != "one":
            raise InputError(
                f"{folder} holds several fine-tunings, each of which has both systems: leave out "
                "--seeds and --with, or name one of its workspaces"
            )
        from bertvision.pipelines.results.compare import compare_runs

        return Comparison.model_validate(compare_runs(find_seeds(folder), first, second, **asked))
    space = find_workspace(workspace)
    other = None if beside is None else find_workspace(beside)
    from bertvision.pipelines.results.compare import compare as run

    return Comparison.model_validate(run(space, first, second, **asked, seeds=seeds, beside=other))


def ensemble_table(result: Values) -> str:
    """The members and their combination, with the metrics that all have."""
    from bertvision.pipelines.tasks.scores import headline, kind_of_metrics, trivial_score
    from bertvision.pipelines.workspace.reproduce import ensemble_name

    together = ensemble_name(result["members"], result["combine"])
    names = [*("BERT" if run == "bert" else run for run in result["members"]), together]
    rows: list[dict[str, Any]] = [
        {**headline(part["rules"]), "system": marked_scores(name, part)}
        for name, part in zip(names, [*result["parts"], result], strict=True)
    ]
    shown = [Column("system", "system", "text")]
    shown += [c for c in score_columns(rows) if all(c.key in row for row in rows)]
    key = "f1" if kind_of_metrics(rows[-1]) == "span" else "accuracy"
    table = systems_table(shown, rows, trivial_score(rows[-1], key))
    how = "highest" if result["combine"] == "max" else "mean"
    legend = (
        f"Scores are in per cent.  {together}: of each candidate answer, the {how} of the "
        "members' probabilities.  A name without @s is the head of seed 0 alone."
        f"{meanings(shown)}"
    )
    return f"{table}\n\n{fill(legend)}"


def compare_table(result: Values) -> str:
    """Both scores, the difference with its interval and p, and what it says."""
    from bertvision.pipelines.tasks.scores import trivial_metrics
    from bertvision.pipelines.uncertainty import format_p

    metric = METRICS[result["metric"]]
    shown = [Column("system", "system", "text"), Column("score", metric.label, "text")]
    rows = [
        {"system": marked(result[system], result), "score": f"{result[f'{system}_score']:.2f}"}
        for system in ("first", "second")
    ]
    rows.append({"system": "first − second", "score": f"{result['difference']:+.2f}"})
    if (baseline := result.get("baseline")) is not None:
        name, _ = trivial_metrics(baseline, [result["metric"] if metric.trivial else "exact"])
        rows.append({"system": name, "score": f"{baseline:.2f}"})
    table = systems_table(shown, rows)
    interval = f"{result['low']:+.2f} to {result['high']:+.2f}"
    p = format_p(result["p"], result["resamples"])
    lines = f"95 % interval of first − second: {interval}\np: {p}"
    return f"{table}\n\n{lines}\n\n{fill(result['sentence'])}"
