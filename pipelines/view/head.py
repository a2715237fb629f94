"""Heads and probes on a page: their probabilities of tokens, and the examples a head errs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from bertvision.errors import InputError, UnknownNameError
from bertvision.featurestore.split import ActivationSplit
from bertvision.models import Kind
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.readouts.directions import SavedProbe
from bertvision.pipelines.report.errors import answer_text
from bertvision.pipelines.results.answers import answer_rows
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.systems import BERT, find_system, parted
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.scores import headline
from bertvision.pipelines.tasks.squad.decoding import decode
from bertvision.pipelines.tasks.tagging import TaggedSentence
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.training.evaluate import run_over
from bertvision.pipelines.training.trained_head import (
    LoadedHead,
    kind_of_run,
    load_head,
    task_of_kind,
)
from bertvision.pipelines.view.measures import Measure
from bertvision.pipelines.view.sample import Ints
from bertvision.pipelines.workspace.heads import find_head, trained_heads, trained_on
from bertvision.pipelines.workspace.reproduce import evaluation_command
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

MOST_ERRORS = 40
_MOST_CLASSES = 24  # columns that can be looked at beside each other


class Head(NamedTuple):
    """A trained head that reads the states of a page, or another system that was scored on them."""

    name: str
    trained_on: str
    kind: Kind | None
    loaded: LoadedHead | None
    """Both are None of the encoder's own output layer and of an ensemble, of which errors alone are
    shown."""


class Error(NamedTuple):
    """An example that a head gets wrong."""

    title: str
    """The question, or the text."""
    parts: list[tuple[str, str]]
    """The context or second text in pieces, each ``gold``, ``predicted``, ``both`` or neither."""
    gold: str
    answer: str


def find(space: Workspace, split: ActivationSplit, text: str) -> Head:
    """Load a head that a user named.

    Args:
        space: Workspace with the head.
        split: Split that it is to read.
        text: ``NAME``, or ``NAME:TRAINED_ON``; without a snapshot that of the split is meant, or
            the only other one. ``bert`` is the encoder's own output layer, and ``max-…`` or
            ``mean-…`` an ensemble.

    Raises:
        UnknownNameError: there is no such head, or several are meant.
        InputError: another snapshot than the split's is to be read, or the split is of other data.
        ProvenanceError: the states are not such as the head was trained on.
        WorkspaceError: the head is damaged.
    """
    tag, (named, tags) = str(split.tag), parted(text)
    if len(tags) > 2 or tags[1:] not in ([], [tag]):
        raise InputError(f"--head {text}: the page is of {split.name}, so that {tag} is read")
    if StoredName.parse(split.split).dataset is not None:
        raise InputError(
            f"--head {text}: {split.name} is of other data than the heads were trained on: "
            "`bertvision probe` trains probes on them"
        )
    if named == BERT or (named.startswith(("max-", "mean-")) and "+" in named):
        name = StoredName.parse(split.split).split
        result = find_system(
            read_results(space, name, []),
            named,
            trained_on=tags[0] if tags else None,
            checkpoint=tag,
        )
        return Head(named, result.trained_on, None, None)
    run = Run.parse(named)
    if tags:
        source = tags[0]
    else:
        own = (tag, run.name) in [(str(at), name) for at, name in trained_heads(space)]
        source = tag if own else str(trained_on(space, [run.name]))
    loaded = load_head(find_head(space, source, run.name), run)
    kind = kind_of_run(Run(loaded.config.head), space.config.task.name)
    loaded.check_fits(split, run.name)
    return Head(run.name, source, kind, loaded)


def probabilities(
    space: Workspace, split: ActivationSplit, head: Head, examples: Ints
) -> Measure | str:
    """A head's probabilities of the tokens of some examples.

    Args:
        space: Workspace of the head.
        split: Split that is read.
        head: Head of the workspace.
        examples: (n,) positions in the split.

    Returns:
        A measure with a column for start and end, or for each class; or the reason why there is
        none.
    """
    if head.loaded is None or head.kind is None:
        return (
            f"{head.name} has no probability of a token here: it does not read the store, and its "
            "errors alone are shown."
        )
    reads = head.loaded.config.tokens
    if reads != StoredName.parse(split.split).tokens:
        return (
            f"{head.name} has no probability of a token: it is a {head.kind} head, which reads "
            f"{'all tokens' if reads == 'all' else 'one vector'} of each window"
            f" (`{StoredName(StoredName.parse(split.split).split, reads).name}`)."
        )
    task = task_of_kind(head.kind, space.config.task.name)
    outputs = _run(head.loaded, task, split, examples)
    if head.kind == "span":
        cuts = np.cumsum(split.plan.n_tokens[examples], dtype=np.int64)[:-1]
        sides = [
            np.concatenate([softmax(part) for part in np.split(outputs[f"{side}_logits"], cuts)])
            for side in ("start", "end")
        ]
        meaning = "Probability that the answer starts or ends here (softmax over the window)."
        return Measure(
            head.name, meaning, ["start", "end"], np.stack(sides, axis=1), "output", ends=(0, 1)
        )
    logits = next(iter(outputs.values()))
    names = list(space.config.task.classes) or ["unanswerable", "answerable"]
    if logits.shape[1] == 1:
        return Measure(head.name, "The score that it gives.", ["score"], logits, "output", True)
    if logits.shape[1] > _MOST_CLASSES:
        return (
            f"{head.name} tells {logits.shape[1]} classes, of which a page shows {_MOST_CLASSES} "
            "at most."
        )
    columns = names if len(names) == logits.shape[1] else [str(i) for i in range(logits.shape[1])]
    what = "token" if task.of_tokens else "window"
    meaning = f"Probability of each class of the {what} (softmax over the classes)."
    return Measure(head.name, meaning, columns, softmax(logits, axis=1), "class", ends=(0, 1))


def probe_measure(
    name: str, probe: SavedProbe, states: npt.NDArray[np.float32], layer: str
) -> Measure:
    """A linear probe's probabilities of its classes, of the first that a page has room for.

    Args:
        name: Name of its file.
        probe: Probe of one layer.
        states: (tokens, hidden) of the layer.
        layer: Name of the layer.
    """
    logits = states @ probe.parameters["weight"].T + probe.parameters["bias"]
    meaning = (
        f"Probability of each class by the probe {name}, which reads layer {layer} (softmax over "
        "all classes). It was trained on a vector for each example."
    )
    columns = probe.classes[:_MOST_CLASSES]
    values = softmax(logits, axis=1)[:, : len(columns)]
    return Measure("probe", meaning, columns, values, "class", ends=(0, 1))


def _run(
    loaded: LoadedHead, task: Task, split: ActivationSplit, examples: Ints
) -> dict[str, npt.NDArray[np.float32]]:
    """Logits of a head on examples of a split, as `run_over` gives them."""
    (outputs,) = run_over(
        [loaded.module],
        task,
        split,
        "32",
        f"{loaded.config.run.name} on {split.name}",
        layers=loaded.config.layers,
        examples=examples,
    )
    return outputs


def errors(
    space: Workspace, split: ActivationSplit, head: Head, seed: int
) -> tuple[list[Error], str]:
    """Examples that a head gets wrong, as it was scored: all, or a seeded choice.

    Args:
        space: Workspace of the head.
        split: Split that is read.
        head: Head of the workspace.
        seed: Seed of the choice.

    Returns:
        The errors in the order of the data, and a sentence on how many there are, or on why there
        are none.

    Raises:
        WorkspaceError: predictions are missing, damaged or of other data.
    """
    name = StoredName.parse(split.split).split
    try:
        result = find_system(
            read_results(space, name, []),
            head.name,
            trained_on=head.trained_on,
            checkpoint=str(split.tag),
        )
    except UnknownNameError:
        if head.loaded is None:
            raise
        run = head.loaded.config.run.text
        again = evaluation_command(run, head.trained_on, str(split.tag), name)
        return [], f"{head.name} was not scored on {split.tag}/{name}: `{again}` scores it."
    rows = answer_rows(space, result)
    metrics = [name for name in headline(result.rules) if name in rows[0]]
    if not metrics:
        return [], "Scores are near or far, neither right nor wrong: no example is an error."
    wrong = np.asarray(
        [i for i, row in enumerate(rows) if any(row[metric] < 100 for metric in metrics)], np.int64
    )
    drawn = np.random.default_rng(seed).permutation(wrong)[:MOST_ERRORS]
    chosen = [rows[i] for i in np.sort(drawn).tolist()]
    items = {item.id: item for item in space.dataset().items(name)}
    starts: dict[str, int | None] = {}
    if "exact" in metrics and chosen and head.loaded is not None:
        starts = _starts(space, split, head.loaded, chosen)
    sentence = f"{head.name} is wrong on {len(wrong):,} of {len(rows):,}"
    sentence += f": {len(chosen)} drawn with seed {seed}." if len(chosen) < len(wrong) else "."
    return [error_of(row, items[row["id"]], starts.get(row["id"])) for row in chosen], sentence


def _starts(
    space: Workspace, split: ActivationSplit, loaded: LoadedHead, rows: Sequence[dict[str, Any]]
) -> dict[str, int | None]:
    """The first character of each answer in its context, from the head's logits of the windows."""
    task = task_of_kind("span", space.config.task.name)
    items = task.items_of(split.table())
    wanted = {row["id"]: row["answer"] for row in rows}
    index = np.flatnonzero([item.id in wanted for item in items])
    examples = np.flatnonzero(np.isin(split.table_rows, index)).astype(np.int64)
    outputs = _run(loaded, task, split, examples)
    lengths = split.plan.n_tokens[examples].astype(np.int64)
    before = np.cumsum(lengths) - lengths
    places = np.repeat(split.plan.first_token[examples] - before, lengths)
    offsets = split.array("offset_mapping")[places + np.arange(lengths.sum())]
    item_index = split.table_rows[examples].astype(np.int32)
    windows = WindowIndex(items, lengths.astype(np.int32), item_index, offsets)
    decoded = decode(Logits(outputs, windows))
    return {
        name: next((c.start for c in decoded[name].n_best if c.text == text), None)
        for name, text in wanted.items()
        if name in decoded
    }


def error_of(row: dict[str, Any], item: Any, start: int | None) -> Error:
    """An error as a page shows it; of tags only the words whose tags differ.

    Args:
        row: Answer to the item (`answer_rows`).
        item: Item of the task.
        start: First character of the answer in its context; None where it is not known.
    """
    gold, answer = answer_text(row["gold"]), answer_text(row["answer"])
    if "question" in row:
        spans = [("gold", a.answer_start, a.answer_start + len(a.text)) for a in item.answers[:1]]
        if start is not None and isinstance(row["answer"], str):
            spans.append(("predicted", start, start + len(row["answer"])))
        return Error(row["question"], marked(row["context"], spans), gold, answer)
    if isinstance(item, TaggedSentence):
        told = str(row["answer"]).split(" ")
        differ = [
            (f"{word}/{tag}", f"{word}/{other}")
            for word, tag, other in zip(item.words, item.tags, told, strict=True)
            if tag != other
        ]
        return Error(item.text, [], *(" ".join(words) for words in zip(*differ, strict=True)))
    second = row.get("pair") or " / ".join(row.get("phrases", ()))
    return Error(row["text"], [(second, "")] if second else [], gold, answer)


def marked(text: str, spans: Sequence[tuple[str, int, int]]) -> list[tuple[str, str]]:
    """A text in pieces, each with the kind of the spans that it is in.

    Args:
        text: Text of a context.
        spans: Kind, first character and end of each span; two kinds at most.

    Returns:
        (piece, kind): the kind of the one span that the piece lies in, ``both`` of two, or ``""``.
        The pieces joined are the text.
    """
    cuts = sorted({0, len(text), *(cut for _, *ends in spans for cut in ends)})
    pieces = []
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        kinds = {kind for kind, first, last in spans if first <= begin and end <= last}
        kind = "both" if len(kinds) > 1 else next(iter(kinds), "")
        pieces.append((text[begin:end], kind))
    return pieces
