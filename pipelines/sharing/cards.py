"""The card of a repository: its README.md, made of what is recorded and of nothing else.

What no record says is left out. A name is only written where it is one on the hub: of a local
folder stands there that it is one, not where it lay.

The card of a trained head.

The card of a snapshot.

The card of a store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.stored_name import StoredName
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.scores import METRICS, headline, headline_metric
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


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; what is None is an empty cell."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def facts(values: Mapping[str, object]) -> str:
    """Names and values as a table; what is None or empty is left out."""
    return table(
        ["", ""], [(name, value) for name, value in values.items() if value not in (None, "", ())]
    )


def code(text: str, language: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.strip()}\n```"


def page(metadata: str, title: str, sections: Sequence[str]) -> bytes:
    """The card: YAML for the hub, then Markdown.

    Args:
        metadata: in YAML.
        title: of the page.
        sections: in order; an empty one is left out.
    """
    text = "\n\n".join([f"---\n{metadata.strip()}\n---", f"# {title}", *filter(None, sections)])
    return f"{text}\n".encode()


def digests(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The digests of a provenance, by what they are of."""
    return {
        f"sha256 of the {name}": f"`{provenance[key]}`"
        for key, name in ENCODER.items()
        if provenance.get(key)
    }


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def bytes_text(n: int) -> str:
    """Bytes as people read them, and in full."""
    return f"{size(n)} ({n:,} bytes)"


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


def snapshot_card(repository: str, info: SnapshotInfo, licence: str | None) -> bytes:
    """The card of a snapshot.

    Args:
        repository: ``owner/name`` where it is pushed.
        info: what it was made from.
        licence: that the weights are given under; None says nothing.
    """
    from huggingface_hub import ModelCardData

    base, tuning = info.pretrained, info.finetune
    start = {"model": base.name_or_path, "model_revision": base.revision}
    seconds = None if info.seconds is None else f"{info.seconds:,.0f} s of fine-tuning"
    about = {
        "task": info.task.name,
        "pretrained encoder": encoder_name(start),
        "snapshot": f"`{info.tag}`, after {info.step:,} steps of which an epoch has "
        f"{info.steps_per_epoch:,}",
        "fine-tuning": f"batches of {tuning.batch_size}, learning rate {tuning.lr:g}, precision "
        f"{tuning.precision}, seed {tuning.seed}",
        "time": seconds,
        "longest window": info.task.max_length,
        "sha256 of the weights": f"`{info.weights_sha256}`",
        "sha256 of the pretrained weights": f"`{base.weights_sha256}`",
        "written with": ", ".join(f"{name} {v}" for name, v in info.versions.items()),
        "made": info.created,
        "licence": licence,
    } | {f"sha256 of {split}": f"`{data.sha256}`" for split, data in info.data.items()}
    metadata = ModelCardData(
        license=licence,
        library_name="transformers",
        tags=[LIBRARY],
        base_model=on_hub(base.name_or_path),
    ).to_yaml()
    kind = "AutoModelForQuestionAnswering" if find_task(info.task.name).kind == "span" else None
    load = f"""
from transformers import {kind or "AutoModel"}, AutoTokenizer

model = {kind or "AutoModel"}.from_pretrained("{repository}")
tokenizer = AutoTokenizer.from_pretrained("{repository}")
"""
    return page(
        metadata,
        f"{info.task.name} {info.tag}",
        [
            "An encoder at a point of its fine-tuning, kept by "
            "[bertvision](https://pypi.org/project/bertvision).",
            facts(about),
            "## Use",
            code(load, "python"),
            code(f"bertvision pull {repository} {repository.rpartition('/')[2]}", "bash"),
        ],
    )


def store_card(
    repository: str,
    splits: Sequence[SplitReader],
    stored_bytes: Mapping[str, int],
    licence: str | None,
) -> bytes:
    """The card of a repository that holds splits of a store.

    Args:
        repository: ``owner/name`` where it is pushed.
        splits: that it holds then.
        stored_bytes: of their hidden states, by name.
        licence: that the text and the hidden states are given under; None says nothing.
    """
    first, held = splits[0].name, sum(stored_bytes[split.name] for split in splits)
    read = (
        "import bertvision\n\n"
        f'store = bertvision.ActivationStore.open("hf://datasets/{repository}")  # no download\n'
        f'split = store["{first}"]\n'
        "split[17]  # float32 (seq, hidden, layers)"
    )
    return page(
        _store_metadata(splits, licence),
        repository.rpartition("/")[2],
        [
            "Hidden states of an encoder on the texts of a task, written by "
            "[bertvision](https://pypi.org/project/bertvision): every shard, array and record is "
            f"under a checksum. {counted(len(splits), 'split')}, {bytes_text(held)} of hidden "
            "states.",
            table(
                ["split", "examples", "tokens", "layers × width", "encoding", "size"],
                [
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
            ),
            f"Licence: {licence}." if licence else "",
            "## Read it",
            code(read, "python"),
            code(f"bertvision pull datasets/{repository} activations", "bash"),
            "`pull` checks each file against the digests of the ledger. The hidden states are Zarr "
            "(`arrays.zarr`), as codes of their encoding; the texts are Parquet (`examples/`).",
            *(part for split in splits for part in _split(split)),
        ],
    )


def _split(split: SplitReader) -> list[str]:
    """Record of one split."""
    record, made_of = split.record, split.record.provenance
    about: dict[str, object] = {
        "encoder": encoder_name(made_of),
        "task": made_of.get("task"),
        "tokens": made_of.get("tokens"),
        "layers": ", ".join(split.layer_names or map(str, record.layers)),
        "encoding": record.encoding,
        "compression": None if record.compression == "none" else record.compression,
        "order of tokens": "permuted" if record.is_shuffled else None,
        "precision of the encoder": made_of.get("precision"),
        "longest window": made_of.get("max_length"),
        "shards": f"{record.shards:,} of {record.shard_tokens:,} tokens",
        "written with": ", ".join(f"{name} {v}" for name, v in record.versions.items()),
    }
    parts = [f"## `{split.name}`", facts(about | digests(made_of))]
    if errors := split.encoding_error:
        names = split.layer_names or list(map(str, record.layers))
        parts += [
            "What the encoding loses, in parts of the distance from the mean, measured on a sample "
            "when it was written:",
            table(
                ["kind of token", "largest error of a layer", "in layer"],
                [[kind, float(of.max()), names[int(of.argmax())]] for kind, of in errors.items()],
            ),
        ]
    if (command := _command(split)) is not None:
        parts += ["Made by:", code(command, "bash")]
    return parts


def _command(split: StoredSplit) -> str | None:
    """Command that extracts it again; None of one that was imported or written by a program."""
    if "task" not in split.record.provenance:
        return None
    try:
        return extraction_command(split, StoredName.parse(split.split).tokens)
    except InputError:
        return None


def _store_metadata(splits: Sequence[SplitReader], licence: str | None) -> str:
    from huggingface_hub import DatasetCardData

    names = sorted({split.split for split in splits})
    encoders = {on_hub(split.record.provenance.get("model")) for split in splits} - {None}
    return DatasetCardData(
        license=licence,
        tags=["bertvision", "activations", "hidden-states", *sorted(map(str, encoders))],
        size_categories=[_category(sum(split.record.examples for split in splits))],
        # so that the viewer shows the texts, which are the same in all snapshots
        configs=[
            {
                "config_name": name,
                "data_files": [{"split": _plain(name), "path": f"examples/{name}.parquet"}],
            }
            for name in names
        ],
        library_name=LIBRARY,
    ).to_yaml()


def _plain(name: str) -> str:
    """A split's name as the hub's viewer takes it."""
    return re.sub(r"\W", "_", name)


def _category(n: int) -> str:
    """The hub's word for a number of examples."""
    bounds = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    for power, bound in enumerate(bounds, 3):
        if n < 10**power:
            return f"n<{bound}" if power == 3 else f"{bounds[power - 4]}<n<{bound}"
    return f"n>{bounds[-1]}"
