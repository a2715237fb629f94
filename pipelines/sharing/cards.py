"""The card of a repository: its README.md, made of what is recorded and of nothing else.

What no record says is left out. A name is only written where it is one on the hub: of a local
folder the card says that it is local, not where it is. The texts are in ``templates/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.scores import headline, headline_metric
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.records import HeadScores, RunConfig, RunMetrics, SnapshotInfo
from bertvision.pipelines.workspace.reproduce import extraction_command, training_command

LIBRARY = "bertvision"
_HUB_NAME = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?", re.ASCII)
ENCODER = {
    "weights_sha256": "weights",
    "config_sha256": "configuration",
    "tokenizer_sha256": "tokenizer",
    "data_sha256": "data",
}
"""Digests in a provenance, as a card names them."""


def head_card(
    repository: str,
    config: RunConfig,
    metrics: RunMetrics | None,
    scores: Sequence[HeadScores],
    licence: str | None,
) -> bytes:
    """The card of a head.

    Args:
        repository: Its ``owner/name`` on the hub.
        config: Configuration of the run.
        metrics: Metrics of its training; None where the weights were changed since.
        scores: Scores of the head, on any splits.
        licence: Licence of the weights; None says nothing.
    """
    from huggingface_hub import EvalResult, ModelCardData

    task = str(config.activations.get("task", ""))
    kind = "question-answering" if config.kind == "span" else "text-classification"
    headlines = [headline(score.rules) for score in scores]
    results = []
    for score, row in zip(scores, headlines, strict=True):
        key = headline_metric(task, row)
        name = METRICS[key].label if key in METRICS else key
        results.append(
            EvalResult(
                task_type=kind,
                dataset_type=task,
                dataset_name=task,
                dataset_split=score.split,
                metric_type=key,
                metric_value=round(row[key], 4),
                metric_name=f"{name}, hidden states of {score.checkpoint}",
            )
        )
    metadata = ModelCardData(
        license=licence,
        library_name=LIBRARY,
        pipeline_tag=kind,
        tags=["bertvision", "activations", "probing-head"],
        base_model=on_hub(config.activations.get("model")),
        model_name=config.run.name if results else None,
        eval_results=results or None,
    )
    names = {key: m.label for key, m in METRICS.items() if any(key in row for row in headlines)}
    return _card(
        "head",
        repository,
        metadata.to_yaml(),
        config=config,
        metrics=metrics,
        training=config.training,
        made_of=config.activations,
        licence=licence,
        header=["snapshot", "split", "n", *names.values(), "no-answer threshold tuned on"],
        scores=[
            [
                score.checkpoint,
                score.split,
                f"{row['total']:,.0f}" if "total" in row else None,
                *(f"{row[key]:.2f}" if key in row else None for key in names),
                score.threshold_tuned_on,
            ]
            for score, row in zip(scores, headlines, strict=True)
        ],
        command=training_command(config),
    )


def snapshot_card(repository: str, info: SnapshotInfo, licence: str | None) -> bytes:
    """The card of a snapshot.

    Args:
        repository: Its ``owner/name`` on the hub.
        info: Record of the snapshot.
        licence: Licence of the weights; None says nothing.
    """
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(
        license=licence,
        library_name="transformers",
        tags=[LIBRARY],
        base_model=on_hub(info.pretrained.name_or_path),
    )
    spans = find_task(info.task.name).kind == "span"
    return _card(
        "snapshot",
        repository,
        metadata.to_yaml(),
        info=info,
        base=info.pretrained,
        tuning=info.finetune,
        licence=licence,
        model_class="AutoModelForQuestionAnswering" if spans else "AutoModel",
    )


def predictor_card(
    repository: str, name: str, facts: Mapping[str, object], question: bool, licence: str | None
) -> bytes:
    """The card of a predictor.

    Args:
        repository: Its ``owner/name`` on the hub.
        name: Name in its workspace.
        facts: Facts about it, by name.
        question: Whether it answers questions over contexts, and not texts.
        licence: Licence of the weights; None says nothing.
    """
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(
        license=licence,
        library_name=LIBRARY,
        pipeline_tag="question-answering" if question else "text-classification",
        tags=["bertvision"],
    )
    return _card(
        "predictor",
        repository,
        metadata.to_yaml(),
        predictor=name,
        rows=[*facts.items(), ("licence", licence)],
        question=question,
    )


def store_card(
    repository: str,
    splits: Sequence[SplitReader],
    stored_bytes: Mapping[str, int],
    licence: str | None,
) -> bytes:
    """The card of a repository that holds splits of a store.

    Args:
        repository: Its ``owner/name`` on the hub.
        splits: Splits that it holds.
        stored_bytes: Bytes of their hidden states, by name.
        licence: Licence of the text and the hidden states; None says nothing.
    """
    from huggingface_hub import DatasetCardData

    names = sorted({split.split for split in splits})
    encoders = {on_hub(split.record.provenance.get("model")) for split in splits} - {None}
    metadata = DatasetCardData(
        license=licence,
        tags=["bertvision", "activations", "hidden-states", *sorted(map(str, encoders))],
        size_categories=[_category(sum(split.record.examples for split in splits))],
        # so that the viewer shows the texts, which are the same in all snapshots
        configs=[
            {
                "config_name": name,
                # the viewer's names of splits are words
                "data_files": [
                    {"split": re.sub(r"\W", "_", name), "path": f"examples/{name}.parquet"}
                ],
            }
            for name in names
        ],
        library_name=LIBRARY,
    )
    return _card(
        "store",
        repository,
        metadata.to_yaml(),
        splits=splits,
        count=counted(len(splits), "split"),
        total=sum(stored_bytes[split.name] for split in splits),
        rows=[
            [
                f"`{split.name}`",
                f"{split.record.examples:,}",
                f"{split.record.tokens:,}",
                f"{len(split.record.layers)} × {split.record.hidden_size:,}",
                split.record.encoding,
                size(stored_bytes[split.name]),
            ]
            for split in splits
        ],
        licence=licence,
        layer_names=_layer_names,
        errors=_errors,
        extraction=_extraction,
    )


def report_card(repository: str) -> bytes:
    """The card of a report, which the hub shows as a static page.

    Args:
        repository: Its ``owner/name`` on the hub.
    """
    title = repository.rpartition("/")[2]
    metadata = f"title: {title}\nsdk: static\napp_file: index.html\ntags:\n- {LIBRARY}"
    return _card("report", repository, metadata)


def _card(kind: str, repository: str, metadata: str, **values: Any) -> bytes:
    """YAML for the hub, then the template of a kind of card with its values."""
    templates = Environment(  # noqa: S701  # Markdown, which the hub sanitizes
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    text = templates.get_template(f"{kind}.md").render(
        values,
        repository=repository,
        name=repository.rpartition("/")[2],
        encoder_name=encoder_name,
        facts=_facts,
        size=size,
        snapshot_text=_snapshot_text,
        table=_table,
        versions=lambda versions: ", ".join(f"{name} {v}" for name, v in versions.items()),
    )
    return f"---\n{metadata.strip()}\n---\n\n{text}".encode()


def on_hub(name: object) -> str | None:
    """A model's name, where it is one on the hub and no folder of somebody's disk."""
    text = str(name or "")
    return text if _HUB_NAME.fullmatch(text) and not Path(text).exists() else None


def encoder_name(provenance: Mapping[str, Any]) -> str:
    """Name of the encoder on the hub with the revision, or that it is local."""
    name, revision = on_hub(provenance.get("model")), provenance.get("model_revision")
    if name is None:
        return "a local folder (its digests are below)"
    return f"[{name}](https://huggingface.co/{name})" + (f" at `{revision}`" if revision else "")


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; None is an empty cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _facts(
    values: Iterable[tuple[str, object]],
    provenance: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> str:
    """Names and values as a table without the empty ones, then digests of encoder and data."""
    digests = {name: (provenance or {}).get(key) for key, name in ENCODER.items()}
    rows = [(name, value) for name, value in values if value not in (None, "", ())]
    sums = {f"the {name}": digest for name, digest in digests.items() if digest}
    sums |= {split: record.sha256 for split, record in (data or {}).items()}
    rows += [(f"sha256 of {what}", f"`{digest}`") for what, digest in sums.items()]
    return _table(["", ""], rows)


def _snapshot_text(tag: str) -> str:
    at = SnapshotTag(tag)
    if at.is_untrained or at.is_mean or at.is_named:
        return f"`{tag}`"
    return f"`{tag}` ({at.fraction:g} epochs of fine-tuning)"


def _layer_names(split: SplitReader) -> list[str]:
    return list(split.layer_names or map(str, split.record.layers))


def _errors(split: SplitReader) -> list[tuple[str, float, str]]:
    """The layer with the largest error of the encoding, by kind of token."""
    names = _layer_names(split)
    return [
        (kind, float(errors.max()), names[int(errors.argmax())])
        for kind, errors in (split.encoding_error or {}).items()
    ]


def _extraction(split: StoredSplit) -> str | None:
    """Command that extracts a split again; None of one that a program wrote or imported."""
    if "task" not in split.record.provenance:
        return None
    try:
        return extraction_command(split, StoredName.parse(split.split).tokens)
    except InputError:
        return None


def _category(n: int) -> str:
    """The hub's word for a number of examples."""
    bounds = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    for power, bound in enumerate(bounds, 3):
        if n < 10**power:
            return f"n<{bound}" if power == 3 else f"{bounds[power - 4]}<n<{bound}"
    return f"n>{bounds[-1]}"
