"""Heads: trained, and evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from bertvision.errors import InputError
from bertvision.pipelines.options import LoggerName, PrecisionName
from bertvision.pipelines.ranks import this_rank
from bertvision.pipelines.text import fill, format_table
from bertvision.pipelines.workspace.heads import check_head_activations, only_tag
from bertvision.pipelines.workspace.heads import trained_on as trained_where
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.reproduce import option_words
from bertvision.pipelines.workspace.runs import Run, check_told, own_part, runs_of
from bertvision.pipelines.workspace.selection import HEAD_TOKENS, head_split
from bertvision.verbs.arguments.checks import (
    check_new_heads,
    check_trained_heads,
    check_training_data,
    find_workspace,
)
from bertvision.verbs.arguments.options import chosen, takes
from bertvision.verbs.arguments.reading import (
    PRECISIONS,
    Names,
    StrPath,
    Tag,
    at_least,
    parse_choice,
    parse_names,
    parse_tag,
)
from bertvision.verbs.rows import Rows
from bertvision.verbs.tables import (
    Values,
    baseline_cells,
    marked_scores,
    meanings,
    metric_cells,
    metric_names,
    number,
    with_footnote,
)

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.records import HeadScores, RunMetrics
    from bertvision.pipelines.workspace.workspace import Workspace


@takes(TrainOptions)
def train(
    heads: Names,
    *,
    checkpoint: Tag | None = None,
    options: TrainOptions | None = None,
    seed: int = 0,
    fraction: float = 1.0,
    overwrite: bool = False,
    tensorboard: bool = False,
    logger: LoggerName | None = None,
    devices: int = 1,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
    **changes: Any,
) -> Rows[RunMetrics]:
    """Train heads on stored activations, several in one pass, without running BERT.

    An interrupted training is continued, exactly, by the same call.

    Examples:
        >>> import bertvision
        >>> heads = "learned-pooling,adapter-64-shared"
        >>> trained = bertvision.train(heads, checkpoint="1e", epochs=2)
        >>> [(row.head, row.trained_on) for row in trained]
        [('learned-pooling', '1e'), ('adapter-64-shared', '1e')]

    Args:
        heads: names of heads, of plugins, or dotted paths ``package.module:Class``; each may carry
            its own part of the examples and seed: ``adapter-386-shared@f0.3@s1``.
        checkpoint: snapshot to train on; by default the only one whose activations are stored.
        **changes: options of the job, by keyword.
        options: these in one object; what is given by keyword goes before it.
        seed: of initial weights and order.
        fraction: part of the training examples, 0 to 1; parts are nested.
        overwrite: replace heads that were trained otherwise.
        tensorboard: as ``logger="tensorboard"``.
        logger: also log losses there, in ``heads/<snapshot>/<logger>``: csv, tensorboard, wandb or
            mlflow.
        devices: processes that share the heads out among them, a GPU for each where there are
            GPUs.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Returns:
        What the training of each head came to, in the order of ``heads``.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        WorkspaceError: a head of that name was trained otherwise; nothing was changed.
        IncompleteSplitError: the extraction of the split has not ended.
        LockedError: another process is training the same heads.
        InputError: there are fewer heads, or fewer GPUs, than ``devices``.
        RankLostError: one of several processes ended; names it, and the same call goes on.
    """
    at_least(devices, 1, "--devices")
    rank = this_rank()
    if logger is not None:
        parse_choice(logger, get_args(LoggerName), "--logger")
    logger = "tensorboard" if tensorboard else logger
    if logger is not None and not (rank.alone and devices == 1):
        option = "--tensorboard" if tensorboard else "--logger"
        raise InputError(f"{option} is for one process: leave it out, or --devices")
    options = chosen(TrainOptions, options, changes)
    space = find_workspace(workspace, store)
    runs, tag = asked_training(space, heads, checkpoint, options, seed=seed, fraction=fraction)
    if devices > 1:
        from bertvision.pipelines.training.launch import share_out
        from bertvision.pipelines.workspace.records import read_run_metrics

        words = ["train", *(run.text for run in runs), "--checkpoint", tag]
        words += [*option_words(options), *(["--overwrite"] if overwrite else [])]
        share_out(words, space, runs, devices)
        folders = (space.head_dir(tag, run.name) for run in options.named(runs))
        return Rows(map(read_run_metrics, folders), trained_table)
    rank.claim_device()
    from bertvision.pipelines.training.train import train as run

    own = own_part(runs, rank)
    found = run(space, own, tag, options, overwrite=overwrite, logger=logger)
    return Rows(found, trained_table)


def asked_training(
    space: Workspace,
    heads: Names,
    checkpoint: Tag | None,
    options: TrainOptions,
    *,
    seed: int,
    fraction: float,
) -> tuple[list[Run], str]:
    """The runs that are to be trained, and the snapshot, with all that needs nothing heavy checked.

    Args:
        space: the workspace.
        heads: as of `train`, likewise all that follow.
        checkpoint: snapshot to train on.
        options: of the training.
        seed: of initial weights and order.
        fraction: part of the training examples.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        InputError: a name or an option is wrong.
    """
    runs = runs_of(parse_names(heads), [fraction], [seed])
    check_told(runs, options.distil, options.temperature, options.labels_weight)
    tag = None if checkpoint is None else parse_tag(checkpoint)
    check_new_heads(space, runs)
    if tag is None:
        held = {head_split(kind, "train") for kind in HEAD_TOKENS}
        stored = (name for name, splits in space.stored().items() if held & set(splits))
        tag = only_tag(stored, "activations of train")
    check_training_data(space, runs, tag, options.layers)
    return runs, tag


def evaluate(
    heads: Names,
    *,
    trained_on: Tag | None = None,
    checkpoint: Tag | None = None,
    split: str = "dev",
    precision: PrecisionName = "auto",
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> Rows[HeadScores]:
    """Score trained heads with the official metric, on any snapshot's activations.

    Examples:
        >>> import bertvision
        >>> _ = bertvision.train("learned-pooling", checkpoint="0.5e")
        >>> (scored,) = bertvision.evaluate("learned-pooling", checkpoint="1e")
        >>> scored.trained_on, scored.checkpoint
        ('0.5e', '1e')
        >>> sorted(scored.rules)
        ['argmax', 'n-best', 'n-best, oracle threshold', 'n-best, threshold 0']
        >>> 0 <= scored.rules["n-best"]["metrics"]["f1"] <= 100
        True

    Args:
        heads: trained heads.
        trained_on: snapshot the heads were trained on; by default the only one.
        checkpoint: snapshot whose activations to evaluate on; by default the same.
        split: what is scored.
        precision: arithmetic of the heads: auto, 32 or bf16.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Returns:
        The scores of each head, in the order of ``heads``: ``rules`` has them by decoding rule.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        ProvenanceError: the activations are of another model or task than the head's.
        IncompleteSplitError: the extraction of the split has not ended.
    """
    names = parse_names(heads)
    parse_choice(precision, PRECISIONS, "--precision")
    source = None if trained_on is None else parse_tag(trained_on)
    target = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(workspace, store)
    source = source or trained_where(space, names)
    target = target or source
    for config in check_trained_heads(space, names, source).values():
        check_head_activations(space, target, config.kind, split)
    from bertvision.pipelines.training.evaluate import evaluate as run

    found = run(space, names, trained_on=source, tag=target, split=split, precision=precision)
    return Rows(found, evaluated_table)


def trained_table(heads: Sequence[Values]) -> str:
    """What a training made."""
    return format_table(
        [
            "head",
            "trained on",
            "part of data",
            "seed",
            "parameters",
            "loss",
            "seconds",
            "waiting for data",
        ],
        [
            [
                h["head"],
                h["trained_on"],
                f"{h['fraction']:.4g}",
                str(h["seed"]),
                f"{h['total']:,}",
                number(h["loss"], "{:.3f}"),
                f"{h['own_seconds']:.1f}",
                f"{h['wait_seconds'] / h['seconds']:.1%}" if h["seconds"] else "-",
            ]
            for h in heads
        ],
    )


def evaluated_table(results: Sequence[Values]) -> str:
    """The scores of each system: of spans with the tuned threshold and by the paper's rule."""
    from bertvision.pipelines.tasks.scores import headline, kind_of_metrics, trivial_score

    spans = [r for r in results if kind_of_metrics(headline(r["rules"])) == "span"]
    classes = [r for r in results if r not in spans]
    tables = []
    for group, argmax in ((spans, ["argmax EM", "argmax F1"]), (classes, [])):
        metrics = [headline(r["rules"]) for r in group]
        names = metric_names(metrics)
        rows = [
            [
                *(marked_scores(r["head"], r), r["trained_on"], r["checkpoint"]),
                *metric_cells(found, names),
                *(metric_cells(r["rules"]["argmax"]["metrics"], ["exact", "f1"]) if argmax else []),
            ]
            for r, found in zip(group, metrics, strict=True)
        ]
        baseline = trivial_score(metrics[0], "f1" if argmax else "accuracy") if metrics else None
        if baseline is not None:
            name, cells = baseline_cells(baseline, names)
            rows.append([name, "-", "-", *cells, *["-"] * len(argmax)])
        header = ["head", "trained on", "evaluated on", *names.values(), *argmax]
        if rows:
            tables.append(with_footnote(format_table(header, rows), [row[0] for row in rows]))
            if legend := meanings(names).strip():
                tables.append(fill(legend))
    return "\n\n".join(tables)
