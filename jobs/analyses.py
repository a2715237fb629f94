"""Analyses of stored hidden states: isotropy, context, CKA, CCA, RSA, languages, early exits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from bertvision.errors import InputError
from bertvision.jobs.checks import check_snapshots, check_stored, find_workspace
from bertvision.jobs.data import check_data, open_data
from bertvision.jobs.declare import (
    DataSource,
    FigurePath,
    MaxTokens,
    OtherWorkspace,
    Precision,
    SchedulerName,
    Seed,
    StorePath,
    WorkspacePath,
    job,
)
from bertvision.jobs.reading import (
    Names,
    StrPath,
    Tag,
    Tags,
    parse_names,
    parse_poolings,
    parse_tag,
    parse_tags,
    path_of,
    text_of,
)
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import check_suffix
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.cca import CcaResult
    from bertvision.pipelines.analysis.cka import CkaResult
    from bertvision.pipelines.analysis.context import ContextResult
    from bertvision.pipelines.analysis.exits import ExitsResult
    from bertvision.pipelines.analysis.isotropy import IsotropyResult
    from bertvision.pipelines.analysis.languages import LanguagesResult
    from bertvision.pipelines.analysis.result import AnalysisResult
    from bertvision.pipelines.analysis.rsa import RsaResult


R = TypeVar("R", bound="AnalysisResult")


def find_beside(
    beside: StrPath | None, workspace: StrPath | None, tag: str, splits: Sequence[str]
) -> Workspace | None:
    """The workspace that is named by ``--with``, where there is one, with what is read of it.

    Args:
        beside: its folder.
        workspace: folder of the one beside it.
        tag: snapshot that is read of it.
        splits: that are read of this.

    Raises:
        WorkspaceError: there is none.
        InputError: it is the same workspace.
        UnknownNameError: there is no such snapshot or split.
    """
    if beside is None:
        return None
    other = find_workspace(beside)
    if other.root == find_workspace(workspace).root:
        raise InputError(f"--with {other.root}: this is the same workspace; leave --with out")
    for split in splits:
        check_stored(other, tag, split)
    return other


def analysed(
    run: Callable[[Workspace, Path | None], R],
    tags: Sequence[str],
    splits: Sequence[str],
    *,
    scheduler: str,
    plot: StrPath | None,
    workspace: StrPath | None,
    store: StrPath | None,
) -> R:
    """Run an analysis after all checks that need nothing heavy.

    Args:
        run: imports what it needs, and analyses: called with the workspace and the figure's file.
        tags: snapshots that it reads.
        splits: that it reads of each.
        scheduler: where it computes.
        plot: SVG file to write.
        workspace: folder of the experiment.
        store: activation store.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: an option is wrong.
    """
    from bertvision.pipelines.scheduler import check_scheduler

    figure = path_of(plot)
    if figure is not None:
        check_suffix(figure)
    check_scheduler(scheduler)
    space = find_workspace(workspace, store)
    for tag in tags:
        for split in splits:
            check_stored(space, tag, split)
    return run(space, figure)


@job
def cka(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    beside: OtherWorkspace = None,
    max_tokens: MaxTokens = 20_000,
    biased: bool = False,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> CkaResult:
    """Compare the layers of two snapshots by linear CKA.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.cka("0.5e", "1e", max_tokens=200)
        >>> alike.cka.shape  # (layers, layers)
        (3, 3)
        >>> list(alike.to_pandas().columns)
        ['x', 'y', 'layer_x', 'layer_y', 'cka', 'cka_dropped']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have.
        biased: Use the biased estimator.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the two do not hold the same tokens.
    """
    tags = parse_tag(first), parse_tag(second)
    other = find_beside(beside, workspace, tags[1], [split])

    def run(space: Workspace, figure: Path | None) -> CkaResult:
        from bertvision.pipelines.analysis.cka import run_cka as measure

        return measure(
            space,
            *tags,
            split=split,
            beside=other,
            max_tokens=max_tokens or None,
            biased=biased,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags if other is None else tags[:1],
        [split],
        scheduler=scheduler,
        plot=plot,
        workspace=workspace,
        store=store,
    )


@job
def cca(
    first: Tag,
    second: Tag,
    *,
    split: str = "dev",
    beside: OtherWorkspace = None,
    max_tokens: MaxTokens = 20_000,
    keep: float = 0.99,
    ridge: float = 1e-6,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> CcaResult:
    """Compare the layers of two snapshots by SVCCA and PWCCA.

    Examples:
        >>> import bertvision
        >>> alike = bertvision.cca("0.5e", "1e", max_tokens=330)
        >>> alike.pwcca.shape  # (layers, layers)
        (3, 3)
        >>> list(alike.to_pandas().columns)
        ['x', 'y', 'layer_x', 'layer_y', 'pwcca', 'svcca']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have.
        keep: Share of the variance whose directions SVCCA takes.
        ridge: Part of the channels' mean variance that is added to each direction.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a share is out of range.
        ProvenanceError: the two do not hold the same tokens.
    """
    tags = parse_tag(first), parse_tag(second)
    other = find_beside(beside, workspace, tags[1], [split])

    def run(space: Workspace, figure: Path | None) -> CcaResult:
        from bertvision.pipelines.analysis.cca import run_cca as measure

        return measure(
            space,
            *tags,
            split=split,
            beside=other,
            max_tokens=max_tokens or None,
            keep=keep,
            ridge=ridge,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags if other is None else tags[:1],
        [split],
        scheduler=scheduler,
        plot=plot,
        workspace=workspace,
        store=store,
    )


@job
def rsa(
    first: Tag,
    second: Tag,
    *,
    split: Names = "dev",
    max_tokens: Annotated[int, Option(ge=3)] = 5_000,
    repeats: Annotated[int, Option(ge=1)] = 10,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> RsaResult:
    """Compare how tokens are arranged in two snapshots (RSA).

    Tokens are sampled, and their similarities to each other correlated (representational similarity
    analysis).

    Examples:
        >>> import bertvision
        >>> alike = bertvision.rsa("0.5e", "1e", max_tokens=100, repeats=3)
        >>> alike.of_pairs.shape  # (splits, repeats, layers, layers)
        (1, 3, 3, 3)
        >>> [list(row) for row in alike.same_layers()][0]
        ['x', 'y', 'split', 'layer_x', 'layer_y', 'rsa', 'rsa_sd', 'by_token', 'by_token_sd']

    Args:
        first: Snapshot of the rows.
        second: Snapshot of the columns; may be the same.
        split: Split that both have; several side by side, such as dev,mpqa-all.
        max_tokens: Seeded sample of at most so many tokens.
        repeats: Samples of each split.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or a number is too small.
        ProvenanceError: the two do not hold the same tokens; the message names them.
    """
    tags, splits = (parse_tag(first), parse_tag(second)), tuple(dict.fromkeys(parse_names(split)))

    def run(space: Workspace, figure: Path | None) -> RsaResult:
        from bertvision.pipelines.analysis.rsa import run_rsa as measure

        return measure(
            space,
            *tags,
            splits=splits,
            n_tokens=max_tokens,
            repeats=repeats,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags,
        splits,
        scheduler=scheduler,
        plot=plot,
        workspace=workspace,
        store=store,
    )


@job
def isotropy(
    checkpoint: Tags,
    *,
    split: str = "dev",
    max_tokens: MaxTokens = 20_000,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> IsotropyResult:
    """Measure how hidden states spread in each layer.

    All tokens and [CLS] alone are measured: mean cosine, spectrum, outlier channels.

    Examples:
        >>> import bertvision
        >>> spread = bertvision.isotropy("0.5e,1e", max_tokens=200)
        >>> spread.mean_cosine.shape  # (snapshots, tokens and [CLS], layers)
        (2, 2, 3)
        >>> frame = spread.to_pandas()
        >>> len(frame), list(frame.columns)[:5]
        (12, ['snapshot', 'set', 'layer', 'mean_norm', 'mean_cosine'])

    Args:
        checkpoint: Snapshots to analyse, such as 0e,1e.
        split: Split to analyse.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``.
        ProvenanceError: the snapshots do not hold the same layers.
    """
    tags = tuple(dict.fromkeys(parse_tags(checkpoint)))

    def run(space: Workspace, figure: Path | None) -> IsotropyResult:
        from bertvision.pipelines.analysis.isotropy import run_isotropy as measure

        return measure(
            space,
            tags,
            split=split,
            max_tokens=max_tokens or None,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags,
        [split],
        scheduler=scheduler,
        plot=plot,
        workspace=workspace,
        store=store,
    )


@job
def context(
    checkpoint: Tags,
    *,
    split: str = "dev",
    tokens: Annotated[int, Option(ge=10)] = 5_000,
    uses: Annotated[int, Option(ge=2)] = 20,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> ContextResult:
    """Measure how much of a token's state is its context.

    Uses of a word are compared with each other, with other words of their window, and with random
    tokens.

    Examples:
        >>> import bertvision
        >>> words = bertvision.context("0.5e,1e", tokens=300)
        >>> words.self_similarity.shape  # (snapshots, layers)
        (2, 3)
        >>> sorted(words.adjusted())
        ['explained_adjusted', 'intra_adjusted', 'self_adjusted', 'static_adjusted']

    Args:
        checkpoint: Snapshots to analyse, such as 0e,1e.
        split: Split to analyse.
        tokens: Uses of words that are sampled, and tokens of windows.
        uses: Uses of a word, at most.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, or words cannot be told.
        ProvenanceError: the snapshots do not hold the same tokens, or not the same layers.
    """
    tags = tuple(dict.fromkeys(parse_tags(checkpoint)))

    def run(space: Workspace, figure: Path | None) -> ContextResult:
        from bertvision.pipelines.analysis.context import run_context as measure

        return measure(
            space,
            tags,
            split=split,
            tokens=tokens,
            uses=uses,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        tags,
        [split],
        scheduler=scheduler,
        plot=plot,
        workspace=workspace,
        store=store,
    )


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


@job
def exits(
    checkpoint: Tag,
    *,
    split: str = "dev",
    criterion: Names | None = None,
    tolerance: Annotated[float | None, Option(ge=0)] = None,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> ExitsResult:
    """Measure what leaving the encoder early saves and costs.

    Windows that are sure leave early. Stored hidden states go through the output layers of the
    snapshot, and every threshold of a criterion is followed in one pass; the encoder is not run. A
    second call with the same settings, of the same weights, gives what was kept.

    Args:
        checkpoint: Snapshot that was fine-tuned with --variant exits:LAYERS.
        split: Split that is scored: dev or tune.
        criterion: What decides where a window leaves: entropy,probability,patience (default all).
        tolerance: Scores that differ by less agree (default a tenth of their standard deviation).

    Raises:
        UnknownNameError: there is no such snapshot, or what its output layers read is not stored.
        InputError: the snapshot has no output layer below its last, a criterion does not fit the
            task, or ``plot`` does not end in ``.svg``.
        WorkspaceError: fine-tuning kept no answers of this split, or those of other weights.
    """
    tag = parse_tag(checkpoint)
    criteria = None if criterion is None else parse_names(criterion)

    def run(space: Workspace, figure: Path | None) -> ExitsResult:
        from bertvision.pipelines.analysis.exits import run_exits as measure

        return measure(space, tag, split=split, criteria=criteria, tolerance=tolerance, plot=figure)

    return analysed(
        run,
        (),
        (),
        scheduler="threads",
        plot=plot,
        workspace=workspace,
        store=store,
    )
