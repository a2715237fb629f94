"""Groups of texts, such as languages: how far they lie apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bertvision.jobs.analyses.analysed import analysed
from bertvision.jobs.checks import check_snapshots
from bertvision.jobs.data import check_data, open_data
from bertvision.jobs.declare import (
    DataSource,
    FigurePath,
    Precision,
    Seed,
    StorePath,
    WorkspacePath,
    job,
)
from bertvision.jobs.reading import (
    Names,
    Tag,
    parse_names,
    parse_poolings,
    parse_tag,
    path_of,
    text_of,
)
from bertvision.pipelines.options import Option
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.languages import LanguagesResult


@job
def languages(
    checkpoint: Tag,
    *,
    task: Names,
    data: DataSource = None,
    text: str | None = None,
    label: str | None = None,
    pool: str = "mean",
    texts: Annotated[int, Option(ge=10)] = 1_000,
    translations: bool = False,
    precision: Precision = "auto",
    seed: Seed = 0,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> LanguagesResult:
    """Measure how far apart languages, or groups of texts, lie.

    Of several data sets each is a group; of one, such as a file with a column of languages, its
    labels name the groups. Extracts what is missing; ``data`` is needed the first time.

    Args:
        checkpoint: Snapshot to analyse.
        task: Data sets that are the groups, such as mr,subj; or one with labels.
        text: Column of the texts (task csv; default text).
        label: Column of the groups (task csv; default label).
        pool: Pooling of a text's tokens: cls, sep, mean or max.
        texts: At most so many of each group.
        translations: The n-th texts of all groups say the same.
        seed: Seed of samples, halves and clusters.

    Raises:
        UnknownNameError: there is no such snapshot or data set.
        InputError: there are not two groups with enough texts, or an option is wrong.
        ProvenanceError: hidden states were not extracted alike; names the field.
    """
    tag, names = parse_tag(checkpoint), list(dict.fromkeys(parse_names(task)))
    (pooling, *_) = parse_poolings(pool)

    def run(space: Workspace, figure: Path | None) -> LanguagesResult:
        check_snapshots(space, [tag])
        for name in names:
            check_data(space.root, None, name, text_of(data))
        from bertvision.pipelines.analysis.languages import run_languages as measure

        columns = {"text": text, "label": label}
        added = [open_data(space.root, None, name, text_of(data), **columns)[1] for name in names]
        return measure(
            space,
            tag,
            added,
            pooling=pooling,
            texts=texts,
            translations=translations,
            precision=precision,
            seed=seed,
            plot=figure,
        )

    return analysed(
        *(run, (), ()),
        scheduler="threads",
        plot=plot,
        workspace=path_of(workspace),
        store=store,
    )
