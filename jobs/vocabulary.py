"""Layers read over the vocabulary: the lens on stored states, and cloze tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bertvision.errors import InputError
from bertvision.jobs.analyses import analysed
from bertvision.jobs.checks import check_snapshots
from bertvision.jobs.declare import (
    FigurePath,
    MaxTokens,
    Resamples,
    SchedulerName,
    Seed,
    StorePath,
    WorkspacePath,
    job,
)
from bertvision.jobs.reading import StrPath, Tag, parse_tag
from bertvision.pipelines.options import Option
from bertvision.pipelines.readouts.options import LensOptions
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.cloze import ClozeResult
    from bertvision.pipelines.analysis.lens import LensResult


@job
def lens(
    checkpoint: Tag,
    *,
    split: str = "dev",
    trained: bool = False,
    train_split: str | None = None,
    steps: Annotated[int | None, Option(ge=1)] = None,
    dropout: Annotated[float | None, Option(ge=0)] = None,
    lr: float | None = None,
    max_tokens: MaxTokens = 10_000,
    seed: Seed = 0,
    scheduler: SchedulerName = "threads",
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> LensResult:
    """Read the word of each token from its state in each layer.

    The encoder's own MLM head reads the state. No word is masked: it says what a layer still holds
    of the word that stands there. With ``trained`` each layer is read by a head of its own, which
    is trained from the store first.

    Examples:
        >>> import bertvision
        >>> read = bertvision.lens("1e", trained=True, steps=3, max_tokens=200)
        >>> read.top1.shape  # (layers,)
        (3,)
        >>> list(read.to_pandas().columns)
        ['name', 'head', 'layer', 'top1', 'top1_rare', 'mrr', 'log_p', 'kl']

    Args:
        checkpoint: Snapshot to read.
        split: Split to read, stored with all tokens.
        trained: Train a head for each layer, instead of the MLM head.
        train_split: Split that heads are trained on (default train).
        steps: Steps of training, of about 512 tokens (default 500).
        dropout: Share of a state set to zero in training (default 0.5).
        lr: Learning rate (default 0.001).

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, the encoder has no MLM head, or an option is
            out of range or belongs to trained heads.
    """
    tag = parse_tag(checkpoint)
    given = {"steps": steps, "dropout": dropout, "lr": lr}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not trained and (chosen or train_split is not None):
        option = "--train-split" if train_split is not None else f"--{next(iter(chosen))}"
        raise InputError(f"{option} is of heads that are trained: give --trained too")
    splits = [split, train_split or "train"] if trained else [split]

    def run(space: Workspace, figure: Path | None) -> LensResult:
        from bertvision.pipelines.analysis.lens import lens as measure

        return measure(
            space,
            tag,
            split=split,
            trained=LensOptions()._replace(**chosen) if trained else None,
            train_split=splits[-1],
            max_tokens=max_tokens or None,
            seed=seed,
            scheduler=scheduler,
            plot=figure,
        )

    return analysed(
        run,
        [tag],
        splits,
        scheduler=scheduler,
        plot=plot,
        workspace=workspace,
        store=store,
    )


@job
def cloze(
    checkpoint: Tag = "0e",
    *,
    items: StrPath = "agreement",
    k: Annotated[int, Option(ge=2)] = 10,
    resamples: Resamples = 10_000,
    seed: Seed = 0,
    plot: FigurePath = None,
    workspace: WorkspacePath = None,
) -> ClozeResult:
    """Ask the encoder for masked words, facts or verbs.

    The encoder runs on texts in which one word is masked, and its own MLM head says how often the
    right word comes before all other candidates, beside guessing, shuffled words and negated texts.

    Args:
        checkpoint: Snapshot to ask.
        items: File of items (.jsonl), or agreement: sentences made here, in which a verb has to
            agree with its subject.
        k: How many first candidates P@k looks at.
        seed: Seed of draws, and of shuffled words.

    Raises:
        UnknownNameError: there is no such snapshot.
        InputError: a line of ``items`` is malformed, none can be asked, the encoder has no MLM
            head, or an option is out of range.
    """
    tag = parse_tag(checkpoint)

    def run(space: Workspace, figure: Path | None) -> ClozeResult:
        from bertvision.pipelines.analysis.cloze_items import AGREEMENT, agreement, read_items

        check_snapshots(space, [tag])
        asked = agreement() if str(items) == AGREEMENT else read_items(Path(items))

        from bertvision.pipelines.analysis.cloze import cloze as measure

        return measure(
            space,
            tag,
            asked,
            source=str(items),
            k=k,
            resamples=resamples,
            seed=seed,
            plot=figure,
        )

    return analysed(run, [], [], scheduler="threads", plot=plot, workspace=workspace, store=None)
