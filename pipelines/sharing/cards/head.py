"""The card of a trained head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.sharing.cards.markdown import (
    LIBRARY,
    code,
    digests,
    encoder_name,
    facts,
    on_hub,
    page,
    table,
)
from bertvision.pipelines.tasks.scores import METRICS, headline, headline_metric
from bertvision.pipelines.workspace.records import HeadScores, RunConfig, RunMetrics
from bertvision.pipelines.workspace.reproduce import training_command


def head_card(
    repository: str,
    config: RunConfig,
    metrics: RunMetrics | None,
    scores: Sequence[HeadScores],
    licence: str | None,
) -> bytes:
    """The card of a head.

    Args:
        repository: ``owner/name`` where it is pushed.
        config: of the run.
        metrics: of its training; None where the weights were changed since.
        scores: of the head, on any splits.
        licence: that the weights are given under; None says nothing.
    """
    made_of, training = config.activations, config.training
    about: dict[str, object] = {
        "task": made_of.get("task"),
        "encoder": encoder_name(made_of),
        "snapshot it was trained on": _snapshot(config.trained_on),
        "hidden states": f"layers {', '.join(map(str, config.layers))} of width "
        f"{config.hidden_size:,}, stored as {config.encoding}",
        "tokens": made_of.get("tokens"),
        "parameters": metrics and f"{metrics.trainable:,} trained, {metrics.total:,} in all",
        "examples": metrics and f"{metrics.examples:,}",
        "part of the training data": f"{training.fraction:.4g}",
        "seed": training.seed,
        "training": f"{training.epochs} epochs in batches of {training.batch_size}, learning rate "
        f"{training.lr:g}, precision {training.precision}",
        "epoch whose weights were kept": metrics and metrics.epoch,
        "loss": metrics and metrics.loss,
        "licence": licence,
    }
    load = (
        "import bertvision\n\n"
        f'head = bertvision.Head.from_pretrained("{repository}")\n'
        "output = head(hidden_states, lengths)  # (tokens, layers, hidden), (batch,)"
    )
    if ":" in config.head:
        load = load.replace('")', f'", named="{config.head}")')
    return page(
        _metadata(config, scores, licence),
        config.run.name,
        [
            f"A `{config.head}` head for {made_of.get('task', 'hidden states')}, trained with "
            "[bertvision](https://pypi.org/project/bertvision) on stored hidden states of an "
            "encoder; it does not contain the encoder.",
            facts(about | digests(made_of)),
            "## Use",
            code(load, "python"),
            code(f"bertvision pull {repository}\nbertvision evaluate {config.run.text}", "bash"),
            *_scores(config, scores),
            "## How it was made",
            code(training_command(config), "bash"),
        ],
    )


def _scores(config: RunConfig, scores: Sequence[HeadScores]) -> Iterator[str]:
    if not scores:
        return
    found = [headline(score.rules) for score in scores]
    names = {key: name for key, name in METRICS.items() if any(key in row for row in found)}
    yield "## Scores"
    yield (
        f"In per cent, of this one training (seed {config.training.seed}); n is the number of "
        "items that were scored."
    )
    yield table(
        ["snapshot", "split", "n", *names.values(), "no-answer threshold tuned on"],
        [
            [
                score.checkpoint,
                score.split,
                f"{row['total']:,.0f}" if "total" in row else None,
                *(f"{row[key]:.2f}" if key in row else None for key in names),
                score.threshold_tuned_on,
            ]
            for score, row in zip(scores, found, strict=True)
        ],
    )


def _metadata(config: RunConfig, scores: Sequence[HeadScores], licence: str | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    task = str(config.activations.get("task", ""))
    kind = "question-answering" if config.kind == "span" else "text-classification"
    results = []
    for score in scores:
        metrics = headline(score.rules)
        key = headline_metric(task, metrics)
        results.append(
            EvalResult(
                task_type=kind,
                dataset_type=task,
                dataset_name=task,
                dataset_split=score.split,
                metric_type=key,
                metric_value=round(metrics[key], 4),
                metric_name=f"{METRICS.get(key, key)}, hidden states of {score.checkpoint}",
            )
        )
    return ModelCardData(
        license=licence,
        library_name=LIBRARY,
        pipeline_tag=kind,
        tags=["bertvision", "activations", "probing-head"],
        base_model=on_hub(config.activations.get("model")),
        model_name=config.run.name if results else None,
        eval_results=results or None,
    ).to_yaml()


def _snapshot(tag: str) -> str:
    at = SnapshotTag(tag)
    if at.is_untrained or at.is_mean:
        return f"`{tag}`"
    return f"`{tag}` ({at.fraction:g} epochs of fine-tuning)"
