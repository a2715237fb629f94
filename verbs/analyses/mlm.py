"""What layers say over the vocabulary: the lens on stored states, and cloze tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.errors import InputError
from bertvision.pipelines.analysis.mlm.options import LensOptions
from bertvision.pipelines.workspace.workspace import Workspace
from bertvision.verbs.arguments.analyses import analysed
from bertvision.verbs.arguments.checks import check_snapshots
from bertvision.verbs.arguments.reading import StrPath, Tag, at_least, parse_tag

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.mlm.cloze_result import ClozeResult
    from bertvision.pipelines.analysis.mlm.lens_result import LensResult


def lens(
    checkpoint: Tag,
    *,
    split: str = "dev",
    trained: bool = False,
    train_split: str | None = None,
    steps: int | None = None,
    dropout: float | None = None,
    lr: float | None = None,
    max_tokens: int = 10_000,
    seed: int = 0,
    scheduler: str = "threads",
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> LensResult:
    """Read the word of each token from its state in every layer, by the encoder's own MLM head.

    The words were not masked: it says what a layer still holds of the word that stands there.

    Examples:
        >>> import bertvision
        >>> read = bertvision.lens("1e", trained=True, steps=3, max_tokens=200)
        >>> read.top1.shape  # (layers,)
        (3,)
        >>> list(read.to_pandas().columns)
        ['name', 'head', 'layer', 'top1', 'top1_rare', 'mrr', 'log_p', 'kl']

    Args:
        checkpoint: snapshot.
        split: to read, stored with all tokens.
        trained: train a head for each layer from the store instead.
        train_split: what these are trained on; by default train.
        steps: how long; by default 500, of about 512 tokens each.
        dropout: share of the channels of a state that are set to zero in training; by default 0.5.
        lr: learning rate in training; by default 0.001.
        max_tokens: seeded sample of at most so many tokens; 0 uses all.
        seed: of the sample, and of training.
        scheduler: threads, processes or ``tcp://HOST:PORT``.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: ``plot`` does not end in ``.svg``, the encoder has no MLM head, or an option is
            out of range or belongs to trained heads.
    """
    tag = parse_tag(checkpoint)
    at_least(max_tokens, 0, "--max-tokens")
    given = {"steps": steps, "dropout": dropout, "lr": lr}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not trained and (chosen or train_split is not None):
        option = "--train-split" if train_split is not None else f"--{next(iter(chosen))}"
        raise InputError(f"{option} is of heads that are trained: give --trained too")
    splits = [split, train_split or "train"] if trained else [split]

    def run(space: Workspace, figure: Path | None) -> LensResult:
        from bertvision.pipelines.analysis.mlm.run import lens as measure

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
        csv=csv,
        workspace=workspace,
        store=store,
    )


def cloze(
    checkpoint: Tag = "0e",
    *,
    items: StrPath = "agreement",
    k: int = 10,
    resamples: int = 10_000,
    seed: int = 0,
    plot: StrPath | None = None,
    csv: StrPath | None = None,
    workspace: StrPath | None = None,
) -> ClozeResult:
    """Ask for masked words: facts, or which verb agrees with its subject.

    It runs the encoder, and reads its last layer by the encoder's own MLM head.

    Args:
        checkpoint: snapshot.
        items: ``.jsonl`` file with a text, its answer and candidates to a line (docs/analyses.md),
            or ``agreement``: sentences that are made here.
        k: of P@k, the share of items whose answer is among the first k.
        resamples: how often the bootstrap draws items, for intervals.
        seed: of the bootstrap, and of the order of shuffled words.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.
        csv: write the rows to this file too.
        workspace: folder of the experiment; by default the one you stand in.

    Raises:
        UnknownNameError: there is no such snapshot.
        InputError: a line of ``items`` is malformed, none can be asked, the encoder has no MLM
            head, or an option is out of range.
    """
    tag = parse_tag(checkpoint)
    at_least(k, 2, "--k")
    at_least(resamples, 1, "--resamples")

    def run(space: Workspace, figure: Path | None) -> ClozeResult:
        from bertvision.pipelines.analysis.mlm.agreement import AGREEMENT, agreement
        from bertvision.pipelines.analysis.mlm.items import read_items

        check_snapshots(space, [tag])
        asked = agreement() if str(items) == AGREEMENT else read_items(Path(items))

        from bertvision.pipelines.analysis.mlm.run import cloze as measure

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

    return analysed(
        run, [], [], scheduler="threads", plot=plot, csv=csv, workspace=workspace, store=None
    )
