"""Groups of texts, such as languages: how far they lie apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.pipelines.options import PrecisionName
from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed
from bertvision.verbs.arguments.checks import check_snapshots
from bertvision.verbs.arguments.data import check_data, open_data
from bertvision.verbs.arguments.reading import (
    PRECISIONS,
    Names,
    StrPath,
    Tag,
    at_least,
    parse_choice,
    parse_names,
    parse_poolings,
    parse_tag,
    path_of,
    text_of,
)

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.groups.languages_result import LanguagesResult


def languages(
    checkpoint: Tag,
    *,
    task: Names,
    data: StrPath | None = None,
    text: str | None = None,
    label: str | None = None,
    pool: str = "mean",
    texts: int = 1_000,
    translations: bool = False,
    precision: PrecisionName = "auto",
    seed: int = 0,
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> LanguagesResult:
    """Measure how far languages, or any groups of texts, lie apart in each layer.

    Of several data sets each is a group; of one, such as a file with a column of languages, its
    labels name the groups. Extracts what is missing; ``data`` is needed the first time.

    Args:
        checkpoint: snapshot.
        task: data sets, by their tasks: ``mr,subj,trec``, or ``csv``.
        data: where the data are, to be said once: a file, a folder or a data set on the hub.
        text: column of the texts (task csv; default text).
        label: column of the groups (task csv; default label).
        pool: pooling of a text's tokens: cls, sep, mean or max.
        texts: at most so many of each group, a seeded sample; of translations the first.
        translations: the n-th text of each group says the same as the n-th of all others: also
            measure how often the nearest text is the translation.
        precision: arithmetic of the extraction: auto, 32 or bf16.
        seed: of the sample, of the halves that are trained on and scored, and of k-means.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or data set.
        InputError: there are not two groups with enough texts, or an option is wrong.
        ProvenanceError: hidden states were not extracted alike; names the field.
    """
    tag, names = parse_tag(checkpoint), list(dict.fromkeys(parse_names(task)))
    (pooling, *_) = parse_poolings(pool)
    at_least(texts, 10, "--texts")
    parse_choice(precision, PRECISIONS, "--precision")

    def run(space: Workspace, figure: Path | None) -> LanguagesResult:
        check_snapshots(space, [tag])
        for name in names:
            check_data(space.root, None, name, text_of(data))
        from bertvision.pipelines.analysis.groups.run import languages as measure

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
        csv=csv,
        workspace=path_of(workspace),
        store=store,
    )
