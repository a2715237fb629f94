"""The page of a split: everything in one HTML file, which opens without a server or a network."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from bertvision.errors import InputError, WorkspaceError, counted
from bertvision.featurestore.lazy import layer_labels
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.views.top import TopToken, top_tokens
from bertvision.pipelines.analysis.lens import best_words, pretrained_head
from bertvision.pipelines.analysis.reduce import sampled_rows
from bertvision.pipelines.encoders.loading import is_here
from bertvision.pipelines.files import write_text
from bertvision.pipelines.reading import StoredName, check_hidden_states
from bertvision.pipelines.report.page import is_page, page_environment, page_style
from bertvision.pipelines.view.directions import Directions, check_numbers, read_directions
from bertvision.pipelines.view.head import Error, errors, find, probabilities, probe_measure
from bertvision.pipelines.view.measures import (
    Measure,
    encoded,
    neighbours,
    packed,
    state_measures,
)
from bertvision.pipelines.view.projection import (
    MOST,
    Projection,
    has_umap,
    pca,
    pooled_states,
    umap,
)
from bertvision.pipelines.view.sample import Sample, TokenNames, read_sample
from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace

GENERATOR = "bertvision view"
"""Content of the page's ``meta name="generator"``, which tells it from any other file."""
MOST_DIRECTIONS = 8
"""Directions, or channels, that a page shows."""
TOP = 20
"""Tokens that are named of each."""
_CHANNELS = 3  # shown where none were named
_ROWS = 400  # of a heat map
_COLOURS = 8  # of points


@dataclass(frozen=True)
class ViewOptions:
    """Selection that a page shows of a split.

    Attributes:
        head: Head, as the user named it.
        direction: File of directions or of an autoencoder.
        latents: Numbers of directions or latents; None is a choice.
        channels: Numbers of channels; None is a choice.
        layer: Layer of neighbours, top tokens and latents, by index or name.
        max_tokens: Most tokens in the heat maps.
        seed: Seed of all choices.
    """

    head: str | None = None
    direction: Path | None = None
    latents: Sequence[int] | None = None
    channels: Sequence[int] | None = None
    layer: int | str = -1
    max_tokens: int = 2000
    seed: int = 0


class Top(NamedTuple):
    """The top tokens of a direction."""

    name: str
    meaning: str
    rows: list[tuple[str, int, int, tuple[str, str, str]]]
    """Value, example, place, and the token with the text before and after it."""


@dataclass
class Contents:
    """Parts of a page."""

    facts: list[tuple[str, str]]
    """Names and values of the header."""
    measures: list[Measure]
    lens: dict[str, Any] | None = None
    """Words of the lens, and where their measure stands."""
    tops: list[Top] = field(default_factory=list)
    projections: list[Projection] = field(default_factory=list)
    head: str | None = None
    errors: list[Error] = field(default_factory=list)
    errors_told: str = ""
    notes: list[str] = field(default_factory=list)
    """Parts that are left out, and the reasons."""


def write_view(
    split: ActivationSplit, target: Path, space: Workspace | None, options: ViewOptions
) -> dict[str, Any]:
    """Write the page of a split.

    Args:
        split: Split to show.
        target: File of the page.
        space: Workspace of the split, for its tokenizer, its heads and the names of its classes;
            None of a store alone.
        options: Parts to show.

    Returns:
        ``path``; ``tokens`` and ``examples`` in the heat maps, ``of_tokens`` and ``of_examples`` of
        the split; ``bytes`` of the file; and ``notes``, what is left out and why.

    Raises:
        InputError: an option does not fit the split, or ``target`` is another file.
        UnknownNameError: there is no such head.
        IncompleteSplitError: shards are not committed yet.
        CorruptStoreError: what is stored is damaged.
    """
    check_target(target)
    check_hidden_states(split.split)
    split.require_complete()
    if options.head is not None:
        split.require_all_tokens()
    position, *others = split.layer_positions(_as_layer(options.layer))
    if others:
        raise InputError(f"--layer {options.layer}: name one layer")
    sample = read_sample(split, options.max_tokens, options.seed)
    layers = [str(layer) for layer in layer_labels(split, None)]
    names = TokenNames(split, _tokenizer(split, space))
    facts = _facts(sample, _unit(names), options)
    contents = Contents(facts, state_measures(sample.states, layers))
    _add_head(contents, sample, space, options)
    _add_directions(contents, sample, names, position, layers, options)
    if space is None or names.tokenizer is None:
        contents.notes.append("The words of the lens: there is no snapshot of the encoder here.")
    else:
        _add_lens(contents, sample, names, space, layers)
    points = sampled_rows(len(split), MOST, options.seed)
    pooled = pooled_states(split, points)
    finite = np.isfinite(pooled).all(axis=(1, 2))
    if not finite.all():
        contents.notes.append(
            f"Examples with NaN or infinity in the projection: {(~finite).sum()}."
        )
        points, pooled = points[finite], pooled[finite]
    contents.projections.append(pca(pooled))
    if not has_umap():
        contents.notes.append("UMAP: `pip install umap-learn` adds it to the projections.")
    elif (arranged := umap(pooled, options.seed)) is not None:
        contents.projections.append(arranged)
    data = _data(contents, sample, names, points, layers, position, space)
    text = render(split.name, contents, data, layers[position])
    write_text(target, text)
    return {
        "path": target,
        "tokens": len(sample.states),
        "of_tokens": split.record.tokens,
        "examples": len(sample.examples),
        "of_examples": len(split),
        "bytes": len(text.encode("utf-8")),
        "notes": contents.notes,
    }


def check_target(target: Path) -> None:
    """Refuse to replace anything but such a page.

    Raises:
        InputError: ``target`` is a folder or another file, or does not end in ``.html``.
    """
    if target.suffix != ".html":
        raise InputError(f"--output {target}: give a name that ends in .html")
    if target.exists() and not is_page(target, GENERATOR):
        raise InputError(f"--output {target} is there, and no page of `bertvision view`")


def _as_layer(layer: int | str) -> int | str:
    """A layer as it is typed: an index where it is a number."""
    text = str(layer)
    return int(text) if text.removeprefix("-").isdecimal() else layer


def _tokenizer(split: ActivationSplit, space: Workspace | None) -> Any | None:
    """The tokenizer of a split that was extracted, where its snapshot is there."""
    if space is None or split.tag not in space.snapshots() or not _is_extracted(split):
        return None
    return load_snapshot_tokenizer(space.require_snapshot(split.tag))


def _is_extracted(split: ActivationSplit) -> bool:
    """Whether a split is of data of a workspace, and not what a program wrote under a name."""
    return "task" in split.record.provenance


def _add_head(
    contents: Contents, sample: Sample, space: Workspace | None, options: ViewOptions
) -> None:
    if options.head is None:
        contents.notes.append("A head's probabilities and errors: `--head NAME` shows them.")
        return
    if space is None:
        raise InputError(f"--head {options.head}: heads are in a workspace: name it, --workspace")
    head = find(space, sample.split, options.head)
    contents.head = f"{head.name}, trained on {head.trained_on}"
    said = probabilities(space, sample.split, head, sample.examples)
    if isinstance(said, str):
        contents.notes.append(said)
    else:
        contents.measures.append(said)
    contents.errors, contents.errors_told = errors(space, sample.split, head, options.seed)


def _add_directions(
    contents: Contents,
    sample: Sample,
    names: TokenNames,
    position: int,
    layers: list[str],
    options: ViewOptions,
) -> None:
    """Measures and top tokens of channels, and of the directions of a file."""
    split, states, layer = sample.split, sample.states, layers[position]
    hidden = states.shape[2]
    shown: list[tuple[Directions, str]] = []
    if options.direction is not None:
        every = read_directions(options.direction, hidden)
        some = every.chosen(options.latents, states[:, position], MOST_DIRECTIONS)
        how = "" if options.latents is not None else "the first ones"
        if every.thresholds is not None:
            how = how and f"those of the largest mean activation on the {_unit(names)}s shown"
            measure = Measure(
                "latents",
                f"Activations of latents of {options.direction.name}, which read layer {layer}.",
                [name.removeprefix("latent ") for name in some.names],
                some.values(states[:, position] @ some.vectors.T),
                "latent",
            )
            contents.measures.append(measure)
        if every.probe is not None:
            contents.measures.append(
                probe_measure(options.direction.name, every.probe, states[:, position], layer)
            )
            shown_here = {"tag": str(split.tag), "layers": layer}
            contents.notes += [
                f"The probe {options.direction.name} was trained on {noun} {trained_on}; shown is "
                f"{noun} {shown_here[key]}."
                for key, noun in (("tag", "snapshot"), ("layers", "layer"))
                if (trained_on := every.probe.source.get(key, shown_here[key])) != shown_here[key]
            ]
        if len(every.names) > len(some.names) and how:
            contents.notes.append(
                f"Other directions of {options.direction.name}, which has {len(every.names):,}: "
                f"shown are {how}; `--latents` names others."
            )
        shown.append((some, f"of {options.direction.name}"))
    elif options.latents is not None:
        raise InputError("--latents numbers what is in a file: give it with --direction")
    if options.channels is not None or options.direction is None:
        if options.channels is None:
            contents.notes.append(
                f"Other channels: shown are those with the largest mean square in layer {layer} on "
                f"the {_unit(names)}s shown; `--channels` names others, `--direction` a file of "
                "directions."
            )
        shown.append((_channels(states[:, position], options.channels), "of the state"))
    for directions, origin in shown:
        if directions.thresholds is None:
            contents.measures += [
                Measure(name, f"Value of {name} {origin}.", layers, states @ vector, signed=True)
                for name, vector in zip(directions.names, directions.vectors, strict=True)
            ]
        found = top_tokens(split, directions.vectors, position, TOP)
        for i, (name, tokens) in enumerate(zip(directions.names, found, strict=True)):
            contents.tops.append(
                _top(name, f"{name} {origin}", directions.taken([i]), tokens, names)
            )


def _channels(states: np.ndarray[Any, Any], numbers: Sequence[int] | None) -> Directions:
    """Channels that were named, or those with the largest mean square."""
    hidden = states.shape[1]
    if numbers is None:
        squares = (states.astype(np.float64) ** 2).mean(axis=0)
        numbers = np.argsort(-squares, kind="stable")[:_CHANNELS].tolist()
    check_numbers(numbers, hidden, MOST_DIRECTIONS, "--channels")
    return Directions.of([f"channel {i}" for i in numbers], np.eye(hidden)[list(numbers)])


def _top(
    name: str, meaning: str, direction: Directions, tokens: list[TopToken], names: TokenNames
) -> Top:
    values = direction.values([[token.score] for token in tokens]).ravel().tolist()
    rows = [
        (
            f"{value:.3f}".replace("-", "−"),
            t.example,
            int(names.split.positions(t.example)[t.position]),
            names.context(t.example, t.position),
        )
        for value, t in zip(values, tokens, strict=True)
        if value > 0 or direction.thresholds is None  # a latent that is off
    ]
    return Top(name, meaning, rows)


def _add_lens(
    contents: Contents, sample: Sample, names: TokenNames, space: Workspace, layers: list[str]
) -> None:
    """The word that the pretrained head reads in each layer, where there is one."""
    what = "The words of the lens"
    if names.pooled:
        contents.notes.append(f"{what}: {sample.split.name} has one vector for each window.")
        return
    model = space.config.model
    called = "/".join(Path(model.name_or_path).parts[-2:])  # of a path no more than others need
    if not is_here(model.name_or_path, model.revision):
        contents.notes.append(f"{what}: {called} is not on this machine, whose head reads them.")
        return
    try:
        tag, stored = str(sample.split.tag), sample.split.record.layers
        head, called_head, note = pretrained_head(space, tag, stored)
    except (InputError, WorkspaceError) as error:
        said = str(error).replace(model.name_or_path, called)
        contents.notes.append(f"{what}: {said}.")
        return
    words, log_p = best_words(sample.states, head)
    known, index = np.unique(words, return_inverse=True)
    read = [names.word(number) for number in known.tolist()]
    meaning = f"The word that the {called_head} reads, and its probability. {note}"
    contents.measures.append(
        Measure("word of the lens", meaning, layers, np.exp(log_p), ends=(0, 1))
    )
    contents.lens = {
        "words": [name.strip() if name[:1] == " " else f"##{name}" for name in read],
        "codes": encoded(
            index.reshape(words.shape).astype("<u2" if len(known) < 1 << 16 else "<u4")
        ),
        "measure": len(contents.measures) - 1,
    }


def _facts(sample: Sample, unit: str, options: ViewOptions) -> list[tuple[str, str]]:
    """Names and values of the header."""
    split, record = sample.split, sample.split.record
    facts = [("shown", f"all {record.tokens:,} {unit}s of {counted(len(split), 'example')}")]
    if len(sample.examples) < len(split):
        facts = [
            (
                "shown",
                f"{len(sample.states):,} of {record.tokens:,} {unit}s: {len(sample.examples):,} of "
                f"{len(split):,} examples, drawn with seed {options.seed}",
            )
        ]
    if model := record.provenance.get("model"):
        facts.append(("encoder", f"{'/'.join(Path(str(model)).parts[-2:])}, snapshot {split.tag}"))
    encoding: str = record.encoding
    if "ordinary" in split.encoding_error:
        worst = float(split.encoding_error["ordinary"].max())
        encoding += f", off by {worst:.1%} of a {unit}'s deviation at most"
    if split.keep is not None:
        facts.append(("tokens kept of each example", split.keep))
    return [*facts, ("stored as", encoding)]


def _data(
    contents: Contents,
    sample: Sample,
    names: TokenNames,
    points: np.ndarray[Any, Any],
    layers: list[str],
    position: int,
    space: Workspace | None,
) -> dict[str, Any]:
    """Values that the script of the page reads."""
    ends = np.cumsum(sample.lengths).tolist()
    examples = sample.examples.tolist()
    near, cosines = neighbours(sample.states[:, position])
    return {
        "groups": _groups(sample, names),
        "unit": _unit(names),
        "places": sample.places,
        "tokens": [name for example in examples for name in names.of(example)],
        "examples": [[example, end] for example, end in zip(examples, ends, strict=True)],
        "measures": [measure.to_json() for measure in contents.measures],
        "lens": contents.lens,
        "layer": layers[position],
        "near": {
            "most": near.shape[1],
            "rows": encoded(near.astype("<u2")),
            "cosines": packed(cosines),
        },
        "layers": layers,
        "projections": [
            {"name": p.name, "remarks": p.remarks, **packed(p.points)} for p in contents.projections
        ],
        "points": [[i, names.title(i)] for i in points.tolist()],
        "labels": _labels(sample.split, points, space),
    }


def _unit(names: TokenNames) -> str:
    """The word for a row of the states: a pooled split has a vector for each example."""
    return "vector" if names.pooled else "token"


def _groups(sample: Sample, names: TokenNames) -> list[list[Any]]:
    """The heat maps: title, first row and number of rows of each."""
    if names.pooled:
        count = len(sample.states)
        cuts = [(begin, min(begin + _ROWS, count)) for begin in range(0, count, _ROWS)]
        return [[f"examples {a + 1} to {b} of those shown", a, b - a] for a, b in cuts]
    groups: list[list[Any]] = []
    begin = 0
    for example, length in zip(sample.examples.tolist(), sample.lengths.tolist(), strict=True):
        title = f"{example}: {names.title(example)}"
        for first in range(0, length, _ROWS):
            begins = first if sample.places is None else sample.places[begin + first]
            part = f" (from token {begins})" if length > _ROWS else ""
            groups.append([title + part, begin + first, min(_ROWS, length - first)])
        begin += length
    return groups


def _labels(
    split: ActivationSplit, points: np.ndarray[Any, Any], space: Workspace | None
) -> dict[str, Any] | None:
    """The labels of examples, where the split has some by which points can be coloured."""
    one = [name for name, values in split.labels.items() if values.ndim == 1]
    name = next((name for name in ("label", "answerable") if name in one), None)
    if name is None:
        return None
    values = split.labels[name][points]
    if values.dtype.kind == "f":
        return {"scores": [round(value, 4) for value in values.tolist()]}
    classes: Sequence[str] = ()
    if name == "answerable":
        classes = ("not answerable", "answerable")
    elif space is not None and _is_extracted(split):
        classes = space.dataset(StoredName.parse(split.split).dataset).classes
    known, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    order = np.arange(len(known))
    if len(known) > _COLOURS:
        order = np.argsort(-counts, kind="stable")  # the commonest have colours of their own
    named = known[order].tolist()
    return {
        "classes": [classes[i] if 0 <= i < len(classes) else str(i) for i in named],
        "codes": np.argsort(order)[inverse].tolist(),
    }


def render(name: str, contents: Contents, data: dict[str, Any], layer: str) -> str:
    """The HTML of the page.

    Args:
        name: Name of the split.
        contents: Parts of the page.
        data: Values that its script reads.
        layer: Name of the layer of neighbours and top tokens.
    """
    folder = Path(__file__).parent
    script = (folder / "view.js").read_text(encoding="utf-8")
    digest = b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        page_environment(folder)
        .get_template("template.html")
        .render(
            generator=GENERATOR,
            name=name,
            data=data,
            layer=layer,
            unit=data["unit"],
            script=Markup(script),  # a file of the package
            digest=digest,
            marks=any(kind for error in contents.errors for _, kind in error.parts),
            style=page_style() + Markup((folder / "style.css").read_text(encoding="utf-8")),
            **vars(contents),
        )
    )
