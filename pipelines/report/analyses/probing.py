"""Section about probes: what they read from each layer, as figures and a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.drawing.figures import MOST_PANELS
from bertvision.pipelines.drawing.svg import SERIES
from bertvision.pipelines.readouts.probe_results import DOUBTFUL, ProbeFile, Row, probe_rows
from bertvision.pipelines.report.analyses.probe_tables import (
    COMMAND,
    SOURCE,
    by_registry,
    probe_tables,
)
from bertvision.pipelines.report.drawing.probe_figures import (
    gained,
    layer_curves,
    layer_map,
    shown_lines,
)
from bertvision.pipelines.report.section import Figure, Section, make_figure
from bertvision.pipelines.tasks.registry import POOLINGS
from bertvision.pipelines.text import signed
from bertvision.pipelines.workspace.workspace import Workspace

FILES = f"{ProbeFile.folder}/*/*.json"
"""Where probes are, in a workspace."""


def probing_section(workspace: Workspace, left_out: list[str]) -> Section | None:
    """Probes of every data set; None where there are none.

    Figures show the settings that most probes were trained with, and of poolings the one with the
    highest mean of its best layers; tables show all.

    Args:
        workspace: that they are of.
        left_out: gets a message for each file that is damaged and left out.
    """
    rows = probe_rows(ProbeFile.read_all(workspace, left_out))
    if not rows:
        return None
    single = _usual(rows)
    tasks = by_registry({r["dataset"] for r in single})
    pooling = _best_pooling(single)
    of_pooling = [r for r in single if r["pooling"] == pooling]
    lead = (
        "A probe is a small classifier on frozen hidden states, linear or with one hidden layer. "
        "Read a score beside the untrained twin, the same architecture with random weights: "
        "what the twin reaches, the words and their positions give. Layers are chosen on held-out "
        "examples and scored on others; intervals are of resampled examples (95 %), "
        "not of other trainings."
    )
    notes = [
        f"{DOUBTFUL} {task} says little and stays out of means: {text}."
        for task, text in {r["dataset"]: r["doubts"] for r in rows if r["doubts"]}.items()
    ]
    figures = [*_maps(of_pooling, tasks, pooling), *_curves(single, tasks, pooling)]
    tables = probe_tables(rows)
    return Section("probing", "What each layer knows", lead, notes, figures, tables)


def probing_sentence(workspace: Workspace, left_out: list[str]) -> str:
    """What probes found, in one sentence: the best pooling of the last snapshot on average.

    Args:
        workspace: that they are of.
        left_out: gets a message for each file that is damaged and left out.
    """
    rows = _usual(probe_rows(ProbeFile.read_all(workspace, left_out)))
    pooling = _best_pooling(rows)
    found = [r for r in rows if r["best"] and r["pooling"] == pooling]
    found = _sound(found)
    tag = max(SnapshotTag(r["tag"]) for r in found)
    found = [r for r in found if r["tag"] == tag]
    score = sum(r["accuracy"] for r in found) / len(found)
    what = found[0]["dataset"] if len(found) == 1 else f"the mean of {len(found)} data sets"
    text = f"Probes of the best layer of {tag}, {pooling}-pooled, score {score:.1f} % on {what}"
    gains = [r["difference"] for r in found]
    if all(gain is not None for gain in gains):
        text += f", {signed(sum(gains) / len(gains))} against the untrained twin"
    return f"{text}."


def _maps(rows: Sequence[Row], tasks: Sequence[str], pooling: str) -> list[Figure]:
    """A heat map for each snapshot but the twin, all on one scale of colours."""
    shown = [r for r in rows if not SnapshotTag(r["tag"]).is_untrained] or list(rows)
    most = max(abs(gained(r)) for r in shown)
    figures = []
    for tag in sorted({SnapshotTag(r["tag"]) for r in shown}):
        own = [r for r in shown if r["tag"] == tag]
        caption = (
            f"Snapshot {tag}: accuracy of probes on {pooling}-pooled hidden states, and the "
            f"difference from {_reference(own)}, which is also the colour: blue above, orange "
            "below. Framed: the best layer on held-out examples."
        )
        figures.append(
            make_figure(
                f"probe-map-{tag.replace('.', '-')}",
                f"Accuracy by task and layer at {tag}",
                caption,
                SOURCE,
                COMMAND,
                partial(layer_map, own, [task for task in tasks if _has(own, task)], most),
            )
        )
    return figures


def _reference(rows: Sequence[Row]) -> str:
    """What `gained` takes differences from in these rows."""
    twin = [r["difference"] is not None for r in rows]
    if not any(twin):
        return "the most frequent class"
    return "the untrained twin" + (
        "" if all(twin) else " (where none fits, the most frequent class)"
    )


def _curves(single: Sequence[Row], tasks: Sequence[str], pooling: str) -> list[Figure]:
    """Snapshots side by side, what they gained over the twin, and the poolings of the first."""
    tags = [str(tag) for tag in sorted({SnapshotTag(r["tag"]) for r in single})]
    trained = [tag for tag in tags if not SnapshotTag(tag).is_untrained] or tags
    poolings = [p for p in POOLINGS if any(r["pooling"] == p for r in single)]
    of_pooling = [r for r in single if r["pooling"] == pooling]
    figures = []
    if len(tags) > 1:
        caption = (
            f"Accuracy over layers, {pooling}-pooled, a line for each snapshot, with 95 % "
            "intervals; dotted: the most frequent class, dashed: the untrained twin. Of more than "
            f"{SERIES} the twin and the last are shown."
        )
        names = [*trained, *(tag for tag in tags if tag not in trained)]
        figures += _panels("snapshots", caption, of_pooling, tasks, "tag", names, "accuracy")
    if gains := [r for r in of_pooling if r["difference"] is not None]:
        caption = (
            f"What training brought: accuracy less that of the untrained twin, {pooling}-pooled, "
            "with 95 % intervals over the same resampled examples."
        )
        figures += _panels("gains", caption, gains, tasks, "tag", trained, "difference")
    if len(poolings) > 1:
        caption = (
            f"Accuracy over layers of snapshot {trained[0]}, a line for each pooling; dotted: the "
            "most frequent class."
        )
        rows = [r for r in single if r["tag"] == trained[0]]
        figures += _panels("poolings", caption, rows, tasks, "pooling", poolings, "accuracy")
    return figures


def _panels(
    kind: str,
    caption: str,
    rows: Sequence[Row],
    tasks: Sequence[str],
    by: str,
    names: Sequence[str],
    value: str,
) -> list[Figure]:
    """At most `MOST_PANELS` tasks to a figure, and of lines those that `shown_lines` takes."""
    names = shown_lines(names)
    rows = [r for r in rows if r[by] in names and r[value] is not None]
    found = [task for task in tasks if _has(rows, task)]
    parts = [found[i : i + MOST_PANELS] for i in range(0, len(found), MOST_PANELS)]
    return [
        make_figure(
            f"probe-{kind}" + (f"-{i + 1}" if len(parts) > 1 else ""),
            f"Probes over layers: {kind}",
            caption,
            SOURCE,
            COMMAND,
            partial(layer_curves, rows, part, by, names, value),
        )
        for i, part in enumerate(parts)
    ]


def _usual(rows: Sequence[Row]) -> list[Row]:
    """Single layers with the settings that most probes were trained with."""
    usual = Counter(r["settings"] for r in rows).most_common(1)[0][0]
    return [r for r in rows if r["settings"] == usual and "+" not in r["layers"]]


def _best_pooling(rows: Sequence[Row]) -> str:
    """The pooling with the highest mean of held-out accuracies over its best layers.

    The mean is over the data sets and snapshots that all poolings share, without the untrained
    twin and without doubtful data; where they share none, the pooling with most of them comes
    first.
    """
    best = _sound([r for r in rows if r["best"]])
    best = [r for r in best if not SnapshotTag(r["tag"]).is_untrained] or best
    scores: dict[str, dict[tuple[str, str], float]] = {}
    for r in best:
        scores.setdefault(r["pooling"], {})[r["dataset"], r["tag"]] = r["held_out"]
    shared = set.intersection(*(set(found) for found in scores.values()))

    def rank(pooling: str) -> tuple[int, float]:
        found = scores[pooling]
        kept = [found[pair] for pair in shared or found]
        return len(kept), sum(kept) / len(kept)

    return max(scores, key=rank)


def _sound(rows: Sequence[Row]) -> list[Row]:
    """Rows of data that are not doubtful; where there is nothing else, all."""
    return [r for r in rows if not r["doubts"]] or list(rows)


def _has(rows: Sequence[Row], task: str) -> bool:
    return any(r["dataset"] == task for r in rows)
