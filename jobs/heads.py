"""Heads: trained, and evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from bertvision.errors import InputError, WorkspaceError
from bertvision.jobs.show import (
    FRACTION,
    PLACES,
    Row,
    Rows,
    ShownRecord,
    Values,
    marked_scores,
    meanings,
    score_columns,
    systems_table,
)
from bertvision.models import Kind
from bertvision.pipelines.declare import (
    DEFAULTS,
    DataDevice,
    DataSource,
    Devices,
    PrecisionOption,
    Seed,
    StorePath,
    Where,
    WorkspacePath,
    job,
)
from bertvision.pipelines.extraction.layers import kept_layers
from bertvision.pipelines.options import LoggerName, PrecisionName
from bertvision.pipelines.ranks import this_rank
from bertvision.pipelines.reading import (
    Names,
    StoredName,
    StrPath,
    Tag,
    parse_names,
    parse_tag,
)
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.text import fill, number
from bertvision.pipelines.workspace.checks import (
    check_new_heads,
    check_snapshots,
    check_trained_heads,
    check_training_data,
    find_workspace,
)
from bertvision.pipelines.workspace.data import check_source
from bertvision.pipelines.workspace.heads import (
    ResidentActivations,
    check_head_activations,
    head_activations,
    only_tag,
)
from bertvision.pipelines.workspace.heads import trained_on as trained_where
from bertvision.pipelines.workspace.job_options import Source, TrainOptions
from bertvision.pipelines.workspace.reproduce import option_words
from bertvision.pipelines.workspace.runs import HEAD_TOKENS, Run, check_told, own_part, runs_of

if TYPE_CHECKING:
    from bertvision.pipelines.prediction.evaluation import DataScores
    from bertvision.pipelines.training.training_pass import SplitOpener
    from bertvision.pipelines.workspace.records import HeadScores, RunMetrics
    from bertvision.pipelines.workspace.workspace import Workspace


@job
def train(
    heads: Names,
    *,
    checkpoint: Tag | None = None,
    options: TrainOptions = DEFAULTS,
    seed: Seed = 0,
    fraction: float = 1.0,
    overwrite: bool = False,
    tensorboard: bool = False,
    logger: LoggerName | None = None,
    devices: Devices = 1,
    source: str = "store",
    data_device: DataDevice = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
    **changes: Any,
) -> Rows[RunMetrics]:
    """Train heads on hidden states, stored or computed on the way.

    Several heads are trained in one pass. A name may carry its own part of the examples and seed,
    adapter-386-shared@f0.3@s1, and its own layers, learning rate and epochs,
    learned-pooling@l0-6@lr0.01@e3, or pooling, cls-learned-pooling@pmean: heads that differ in
    these stand beside each other. An
    interrupted training is continued, exactly, by the same call.

    Examples:
        >>> import bertvision
        >>> heads = "learned-pooling,adapter-64-shared"
        >>> trained = bertvision.train(heads, checkpoint="1e", epochs=2)
        >>> [(row.head, row.trained_on) for row in trained]
        [('learned-pooling', '1e'), ('adapter-64-shared', '1e')]

    Args:
        heads: Names from `bertvision heads`.
        checkpoint: Snapshot to train on; by default the only one stored.
        seed: Seed of initial weights and order.
        fraction: Part of the training examples, 0 to 1; parts are nested.
        overwrite: Replace heads that were trained otherwise.
        tensorboard: The same as ``logger`` tensorboard.
        logger: Also log losses with csv, tensorboard, wandb or mlflow.
        source: Source of the hidden states: store; auto[:ENCODING], which computes what is not
            stored, and stores it while the first epoch runs; or live[:ENCODING], which computes all
            in each epoch and stores nothing. Heads come out the same. `bertvision plan` says what
            each costs.

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
    rank = this_rank()
    logger = "tensorboard" if tensorboard else logger
    if logger is not None and not (rank.alone and devices == 1):
        option = "--tensorboard" if tensorboard else "--logger"
        raise InputError(f"{option} is for one process: leave it out, or --devices")
    asked = Source.parse(source)
    if asked.name != "store" and not (rank.alone and devices == 1):
        raise InputError(f"--source {source} is for one process: leave it out, or --devices")
    if asked.name != "store" and data_device is not None:
        raise InputError(
            f"--data-device {data_device} keeps a split that is stored: leave --source {source} out"
        )
    space = find_workspace(workspace, store)
    runs, tag = asked_training(
        space, heads, checkpoint, options, seed=seed, fraction=fraction, source=asked
    )
    if devices > 1:
        from bertvision.pipelines.training.launch import share_out
        from bertvision.pipelines.workspace.records import read_run_metrics

        words = ["train", *(run.text for run in runs), "--checkpoint", tag]
        words += [*option_words(options), *(["--overwrite"] if overwrite else [])]
        words += [] if data_device is None else ["--data-device", data_device]
        share_out(words, space, runs, devices)
        folders = (space.head_dir(tag, run.name) for run in options.named(runs, space.config.model))
        return Rows(map(read_run_metrics, folders), trained_table)
    rank.claim_device()
    from bertvision.pipelines.training.train import train as run

    own = own_part(runs, rank)
    with _opened(asked, data_device, runs, options) as splits:
        results = run(space, own, tag, options, overwrite=overwrite, logger=logger, splits=splits)
    return Rows(results, trained_table)


def _opened(
    source: Source, data_device: str | None, runs: Sequence[Run], options: TrainOptions
) -> AbstractContextManager[SplitOpener]:
    """Opens what heads read; stored states are read without what runs an encoder."""
    if data_device is not None:
        return nullcontext(ResidentActivations(data_device, runs, options.layers))
    if source.name == "store":
        return nullcontext(head_activations)
    from bertvision.pipelines.live.splits import Splits

    return Splits(source)


def asked_training(
    space: Workspace,
    heads: Names,
    checkpoint: Tag | None,
    options: TrainOptions,
    *,
    seed: int,
    fraction: float,
    source: Source = Source(),  # noqa: B008  # it cannot change
) -> tuple[list[Run], str]:
    """The runs that are to be trained, and the snapshot, with all that needs nothing heavy checked.

    Args:
        space: the workspace.
        heads: As in `train`, likewise all that follow.
        checkpoint: snapshot to train on.
        options: Options of the training.
        seed: Seed of initial weights and order.
        fraction: part of the training examples.
        source: Source of the hidden states.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        InputError: a name or an option is wrong.
    """
    runs = runs_of(parse_names(heads), [fraction], [seed])
    check_told(runs, options.distil, options.temperature, options.labels_weight)
    tag = None if checkpoint is None else parse_tag(checkpoint)
    named = options.named(runs, space.config.model)
    check_new_heads(space, named)
    if tag is None:
        pools = {run.settings["pool"] for run in named if "pool" in run.settings}
        stored_splits = {StoredName("train", t).name for t in pools or HEAD_TOKENS.values()}
        stored = (name for name, splits in space.stored().items() if stored_splits & set(splits))
        if source.name == "store":
            tag = only_tag(stored, "activations of train")
        else:
            tag = only_tag(space.snapshots() or ["0e"], "snapshots")
    if source.name == "store":
        check_training_data(space, named, tag, options.layers)
    else:
        check_snapshots(space, [tag])
        depth = space.config.model.num_hidden_layers
        for run in named:
            layers = run.settings.get("layers", options.layers)
            kept_layers(layers, depth, pooler=True, tokens="cls")  # at most: others have less
    return runs, tag


@job
def evaluate(
    heads: Names,
    *,
    trained_on: Tag | None = None,
    checkpoint: Tag | None = None,
    split: str | None = None,
    data: DataSource = None,
    skip_bad: bool = False,
    precision: PrecisionOption = "auto",
    **where: Unpack[Where],
) -> Rows[HeadScores] | Rows[DataScores]:
    """Score trained heads with the official metric.

    The hidden states may be those of any snapshot. With ``data``, heads, snapshots and ensembles
    are scored on other data of their task, such as those of another domain: the encoder is run,
    and nothing is stored.

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
        heads: Names of trained heads; with ``data`` also as `bertvision predict` takes them, such
            as bert:1e.
        trained_on: Snapshot the heads were trained on; by default the only one.
        checkpoint: Snapshot whose activations to evaluate on; by default the same.
        split: Split to score, or NAME-SPLIT of an added data set; by default dev.
        data: Labelled file, folder or data set of the hub, in a form that the task reads.
        skip_bad: Leave malformed rows of ``data`` out and count them.

    Returns:
        The scores of each head, in the order of ``heads``: ``rules`` has them by decoding rule;
        with ``data`` also ``intervals``, by metric, over other choices of texts.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        ProvenanceError: the activations are of another model or task than the head's.
        IncompleteSplitError: the extraction of the split has not ended.
        InputError: ``data`` are malformed, or have labels that the heads do not know.
    """
    names = parse_names(heads)
    if data is not None:
        return _on_data(
            *(names, trained_on, checkpoint, str(data), split),
            skip_bad=skip_bad,
            precision=precision,
            space=find_workspace(**where),
        )
    asked = StoredName.parse(split or "dev")
    if asked.dataset is not None:
        from bertvision.pipelines.workspace.records import read_dataset_record

        read_dataset_record(find_workspace(**where).root, asked.dataset)  # says which there are
    split = asked._replace(tokens="all").name
    source = None if trained_on is None else parse_tag(trained_on)
    target = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(**where)
    source = source or trained_where(space, names)
    target = target or source
    for name, config in check_trained_heads(space, names, source).items():
        if asked.tokens not in ("all", config.tokens):
            raise InputError(
                f"--split {asked.name}: {name} was trained on {config.tokens}: name {split}, of "
                "which each head reads what it was trained on"
            )
        check_head_activations(space, target, config.tokens, split)
    from bertvision.pipelines.training.evaluate import evaluate as run

    rows = run(space, names, trained_on=source, tag=target, split=split, precision=precision)
    return Rows(rows, evaluated_table)


def _on_data(
    names: Sequence[str],
    trained_on: Tag | None,
    checkpoint: Tag | None,
    data: str,
    split: str | None,
    *,
    skip_bad: bool,
    precision: PrecisionName,
    space: Workspace,
) -> Rows[DataScores]:
    """The scores of systems on data that the workspace does not have."""
    from bertvision.pipelines.prediction.source import find_source

    on, at = (None if tag is None else parse_tag(tag) for tag in (trained_on, checkpoint))
    check_source("--data", data)
    sources = [find_source(name, space, trained_on=on, checkpoint=at) for name in names]
    from bertvision.pipelines.prediction.evaluation import evaluate_on
    from bertvision.pipelines.prediction.predictor import Predictor, load_predictors

    predictors: list[Predictor] = load_predictors(sources, precision)
    return Rows(evaluate_on(predictors, data, split, skip_bad=skip_bad), evaluated_table)


@job
def heads(
    name: str | None = None,
    *,
    hidden: int | None = None,
    layers: int | None = None,
    kind: Kind | None = None,
    workspace: WorkspacePath = None,
) -> Rows[Row] | HeadFacts:
    """List the heads, or show one, with their costs.

    Sizes are those for the workspace's encoder; outside a workspace, for BERT-large.

    Args:
        name: Show this head in full; by default list all.
        hidden: Width of the hidden states; by default the workspace's, or 1024.
        layers: Number of hidden states, with the embedding output; by default the workspace's, or
            25.
        kind: List this kind alone: span or classification.

    Raises:
        UnknownNameError: There is no such head.
    """
    from bertvision.models.factory import describe_head, describe_heads

    layers, hidden, encoder = _dimensions(workspace, layers, hidden)
    if name is not None:
        return HeadFacts(encoder, **describe_head(name, layers, hidden)._asdict())
    rows = (Row(info._asdict()) for info in describe_heads(layers, hidden, kind))
    return Rows(rows, partial(heads_table, encoder=encoder))


class HeadFacts(ShownRecord):
    """A head, with its source and its costs."""

    _encoder: str

    def __init__(self, encoder: str, **values: Any) -> None:
        super().__init__(**values)
        self._encoder = encoder

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return head_table(values, self._encoder)


def _dimensions(
    workspace: StrPath | None, layers: int | None, hidden: int | None
) -> tuple[int, int, str]:
    """Hidden states, their width, and a line that says whose these are."""
    whose, shape = "BERT-large", (25, 1024)
    if layers is None or hidden is None:
        try:
            model = find_workspace(workspace).config.model
            whose, shape = (
                "the workspace's encoder",
                (model.num_hidden_layers + 1, model.hidden_size),
            )
        except WorkspaceError:
            if workspace is not None:
                raise
    if layers is not None or hidden is not None:
        whose = "an encoder"
    layers, hidden = shape[0] if layers is None else layers, shape[1] if hidden is None else hidden
    return layers, hidden, f"for {whose}: {layers} hidden states of width {hidden:,}"


_LEGEND = (
    "M mult./token: millions of multiplications of a forward pass for each token.  *: costly "
    "beside the encoder; `bertvision sweep` trains it only when named.  `bertvision heads NAME` "
    "shows one head in full."
)


def heads_table(heads: Sequence[Values], encoder: str) -> str:
    """Name, parameters, arithmetic and description of each head.

    Args:
        heads: fields of `HeadInfo`.
        encoder: Encoder of the sizes.
    """
    rows = [
        {**head, "name": head["name"] + " *" * head["costly"], "millions": _millions(head)}
        for head in heads
    ]
    table = table_of(
        [
            Column("name", "head", "text"),
            Column("total", "parameters", "count"),
            Column("percent", "% BERT-large", digits=4),
            Column("millions", "M mult./token", form="{:.3g}"),
            Column("description", "description", "text"),
        ],
        rows,
    )
    return f"{table}\n\n{fill(f'Sizes {encoder}.')}\n{fill(_LEGEND)}"


def head_table(head: Values, encoder: str) -> str:
    """One head: what it does, where it comes from, what it costs."""
    from bertvision.models.zoo import HEADS

    spec = HEADS.get(head["name"])
    made = spec.target + "".join(f" {k}={v}" for k, v in spec.kwargs.items()) if spec else ""
    lines = {
        "head": head["name"],
        "kind": head["kind"],
        "what": head["description"],
        "source": head["source"],
        "made by": made,
        "sizes": encoder,
        "parameters": f"{head['trainable']:,} trained, {head['total']:,} with running statistics",
        "": f"{head['percent']:.4f} % of BERT-large",
        "arithmetic": f"{number(_millions(head), '{:.3g}')} million multiplications for each token",
        "costly": "yes: `bertvision sweep` trains it only when named" if head["costly"] else "no",
    }
    return "\n".join(f"{name:<12}{text}" for name, text in lines.items() if text)


def _millions(head: Values) -> float | None:
    count: int | None = head["multiplications"]
    return None if count is None else count / 1e6


def trained_table(heads: Sequence[Values]) -> str:
    """Table of the trained heads."""
    shown = [
        *columns("text", head="head", trained_on="trained on"),
        FRACTION,
        *columns("count", seed="seed", total="parameters"),
        Column("loss", "loss", digits=3),
        Column("own_seconds", "seconds"),
        Column("waiting", "waiting for data", form="{:.1%}"),
    ]
    shares = [h["wait_seconds"] / h["seconds"] if h["seconds"] else None for h in heads]
    return table_of(shown, [{**h, "waiting": w} for h, w in zip(heads, shares, strict=True)])


def evaluated_table(results: Sequence[Values]) -> str:
    """The scores of each system: of spans with the tuned threshold and by the paper's rule."""
    from bertvision.pipelines.tasks.scores import headline, kind_of_metrics, trivial_score

    spans: list[Values] = []
    classes: list[Values] = []
    for result in results:
        row = {**headline(result["rules"]), "head": marked_scores(result["head"], result)}
        row |= {key: result[key] for key in ("trained_on", "checkpoint")}
        for metric, (low, high) in result.get("intervals", {}).items():
            row |= {f"{metric}_low": low, f"{metric}_high": high}
        if kind_of_metrics(row) == "span":
            argmax = result["rules"]["argmax"]["metrics"]
            spans.append(row | {f"argmax_{key}": argmax[key] for key in ("exact", "f1")})
        else:
            classes.append(row)
    tables = []
    for rows, key, last in (
        (spans, "f1", columns(argmax_exact="argmax EM", argmax_f1="argmax F1")),
        (classes, "accuracy", []),
    ):
        if rows:
            shown = [Column("head", "head", "text"), *PLACES, *score_columns(rows), *last]
            tables.append(systems_table(shown, rows, trivial_score(rows[0], key)))
            tables.append(fill(meanings(shown).strip()))
    return "\n\n".join(filter(None, tables))
