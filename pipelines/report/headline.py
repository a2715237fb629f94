"""The top of the report: facts about the workspace, and sentences made of its numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertvision.errors import StoreError, WorkspaceError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.records import leaving_out
from bertvision.pipelines.results.columns import FOOTNOTE, MARK
from bertvision.pipelines.results.rows import Results
from bertvision.pipelines.tasks.metrics import METRICS
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.text import signed, size
from bertvision.pipelines.workspace.heads import trained_heads
from bertvision.pipelines.workspace.records import read_run_config, read_snapshot_info
from bertvision.pipelines.workspace.selection import source_split
from bertvision.pipelines.workspace.workspace import FILE, Workspace

_BASELINES = ("last-layer", "cls-last-state")
_CONTROLS = {
    f"last-layer-adapter-{size}": (f"adapter-{size}-shared", f"adapter-{size}-independent")
    for size in (386, 64)
}
"""Heads on the last state alone, and those that have the same adapter on every layer."""
_LISTED = 3
"""Snapshots that are named one by one."""


def sentences(results: Results) -> list[str]:
    """The headline.

    Args:
        results: Rows of the workspace, one result at least.
    """
    is_first, trivial = _trivial(results)
    candidates = [
        _untuned(results),
        trivial if is_first else "",
        _same_snapshot(results),
        _last_layer(results),
        _argmax(results),
        _across(results),
        _ensemble(results),
        "" if is_first else trivial,
        _caution(results),
    ]
    return [sentence for sentence in candidates if sentence]


def _untuned(results: Results) -> str:
    """A note on systems whose scores cannot be compared with the others'."""
    marked = [run["run"] for run in results.runs if run["run"].endswith(MARK)]
    return f"{FOOTNOTE} They are {len(marked)} of {len(results.runs)} results." if marked else ""


def _same_snapshot(results: Results) -> str:
    own = [r for r in results.full if r["trained_on"] == r["checkpoint"] and r["bert"] is not None]
    if not own:
        if not results.bert:
            return ""
        last = max(results.bert, key=lambda r: SnapshotTag(r["checkpoint"]))
        return (
            f"BERT at {last['checkpoint']} scores {_score(last, results)}; no head has been "
            "scored on the snapshot it was trained on yet."
        )
    tags = sorted({SnapshotTag(r["checkpoint"]) for r in own})
    best = [_best([r for r in own if r["checkpoint"] == tag]) for tag in tags]
    named = best
    if len(best) > _LISTED:
        named = [max(best, key=lambda r: r["difference"])]
        if best[-1] is not named[0]:
            named.append(best[-1])
    parts = [
        f"{_score(r, results)} at {r['checkpoint']} ({r['name']}; BERT {_number(r['bert'])}, "
        f"{signed(r['difference'])})"
        for r in named
    ]
    n = len({r["name"] for r in own})
    who = f"the best of {n} heads" if n > 1 else "the one head"
    text = f"On the snapshot that it was trained on, {who} scores {_and(parts)}"
    if named is not best:
        above = sum(r["difference"] > 0 for r in best)
        text += f"; it is above BERT at {above} of {len(best)} snapshots"
    return text + "."


def _own(results: Results) -> list[dict[str, Any]]:
    """Heads on the last of the snapshots that they were trained on, where BERT was scored too."""
    own = [r for r in results.full if r["trained_on"] == r["checkpoint"] and r["bert"] is not None]
    last = max((SnapshotTag(r["checkpoint"]) for r in own), default=None)
    return [r for r in own if r["checkpoint"] == last]


def _last_layer(results: Results) -> str:
    """The gain that needs no other layer: BERT's own output layer, trained once more."""
    own = _own(results)
    base = [r for r in own if r["name"] in _BASELINES]
    if not base or len(own) < 2:
        return ""
    return (
        f"The last state alone ({base[0]['name']}), all that BERT's own output layer sees, "
        f"scores {_score(base[0], results)} at {base[0]['checkpoint']} "
        f"({signed(base[0]['difference'])} against BERT). {_control(base[0], own, results)}"
    )


def _control(base: dict[str, Any], own: Sequence[dict[str, Any]], results: Results) -> str:
    """The gain from other layers, where a control shows it."""
    named = {r["name"]: r for r in own}
    for name, heads in _CONTROLS.items():
        if name in named and (head := next((h for h in heads if h in named), None)):
            more = named[head]["score"] - named[name]["score"]
            return (
                f"{name}, the control with an adapter on that state alone, scores "
                f"{_score(named[name], results)}, and {head}, with one on every layer, "
                f"{_score(named[head], results)}: the difference, {signed(more)}, is what the "
                "other layers bring in these trainings."
            )
    text = "What a head has beyond that may come from the other states or from its own parameters"
    if base["name"] == "last-layer":
        text += ": a control on the last state alone, last-layer-adapter-64 beside "
        text += "adapter-64-shared, tells them apart"
    return f"{text}."


def _argmax(results: Results) -> str:
    """The same comparison by the rule that tunes no threshold."""
    own = [r for r in _own(results) if "argmax_f1" in r]
    bert = [r for r in results.bert if own and r["checkpoint"] == own[0]["checkpoint"]]
    if not own or not bert or "argmax_f1" not in bert[0]:
        return ""
    best = min(own, key=lambda r: (-r["argmax_f1"], r["name"]))
    return (
        f"Without a tuned threshold (argmax), the best head at {best['checkpoint']} is "
        f"{best['name']} with {best['argmax_f1']:.1f} F1, and BERT has {bert[0]['argmax_f1']:.1f}."
    )


def _across(results: Results) -> str:
    moved = [r for r in results.full if _later(r) and r["bert"] is not None]
    if not moved:
        return ""
    # the longest way: the last snapshot, from the first one that was evaluated there
    last = max(SnapshotTag(r["checkpoint"]) for r in moved)
    there = [r for r in moved if r["checkpoint"] == last]
    first = min(SnapshotTag(r["trained_on"]) for r in there)
    best = _best([r for r in there if r["trained_on"] == first])
    return (
        f"Trained on {first} and scored on {last}, an encoder it never saw in training, the best "
        f"head ({best['name']}) scores {_score(best, results)} against BERT's "
        f"{_number(best['bert'])} at {last} ({signed(best['difference'])})."
    )


def _ensemble(results: Results) -> str:
    compared = [r for r in results.ensembles if r["bert"] is not None]
    if not compared:
        return ""
    last = max(SnapshotTag(r["checkpoint"]) for r in compared)
    best = _best([r for r in compared if r["checkpoint"] == last])
    return (
        f"The best ensemble at {last}, {best['name']}, scores {_score(best, results)} "
        f"({signed(best['difference'])} against BERT)."
    )


def _trivial(results: Results) -> tuple[bool, str]:
    """The score of the trivial answer; whether some system is below it, and which."""
    if results.baseline is None:
        return False, ""
    base = results.baseline
    what = METRICS[results.key].always or "Never answering"
    text = f"{what} would score {base:.1f} {_unit(results)}"
    text += f" on these {results.questions:,} {results.items}" if results.questions else ""
    worse = []
    if bert := [r["checkpoint"] for r in results.bert if r["score"] < base]:
        worse.append(f"BERT at {_and(bert)}")
    for rows, kind in ((results.heads, "heads"), (results.ensembles, "ensembles")):
        if low := sorted((r for r in rows if r["score"] < base), key=lambda r: r["score"]):
            named = [f"{r['name']} at {r['checkpoint']}" for r in low[:_LISTED]]
            lowest = "the lowest " if len(low) > _LISTED else ""
            worse.append(f"{len(low)} of {len(rows)} scores of {kind} ({lowest}{_and(named)})")
    if worse:
        are = "are" if len(worse) > 1 or not worse[0].startswith("BERT") else "is"
        text += f": {_and(worse)} {are} below that"
    return bool(worse), text + "."


def _caution(results: Results) -> str:
    """A caution on small differences, with the command that tests them."""
    compared = [r for r in results.full if r["difference"] is not None]
    if not compared:
        return ""
    seeds = {r["seeds"] for r in results.full}
    if seeds == {1}:
        noise = "each was trained with one seed, so that small differences may be chance"
    elif 1 in seeds:
        noise = "± is the standard deviation over seeds, and some heads were trained with one seed"
    else:
        noise = "± is the standard deviation over seeds, of the training alone"
    if (count := len({r["name"] for r in compared})) > 1:
        text = (
            f"The best of {count} heads was chosen by the same scores that are shown, which "
            f"favours it; {noise}"
        )
    else:
        text = noise[0].upper() + noise[1:]
    last = max(SnapshotTag(r["checkpoint"]) for r in compared)
    best = _best([r for r in compared if r["checkpoint"] == last])
    where = last if best["trained_on"] == last else f"{best['trained_on']}:{last}"
    every = " --seeds all" if best["seeds"] > 1 else ""
    return (
        f"{text}; `bertvision compare {best['first_run']}:{where} bert:{last}{every}` says whether "
        "a difference is more than noise."
    )


def _score(row: dict[str, Any], results: Results) -> str:
    sd = n = ""
    if row.get("score_sd") is not None:
        sd, n = f" ± {row['score_sd']:.1f}", f" (n = {row['seeds']})"
    return f"{_number(row['score'])}{sd} {_unit(results)}{n}"


def _number(score: float) -> str:
    """With a true minus: correlations may be below 0."""
    return f"{score:.1f}".replace("-", "−")


def _unit(results: Results) -> str:
    return "% accuracy" if results.key == "accuracy" else results.score


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda r: (-r["score"], r["name"]))


def _later(row: dict[str, Any]) -> bool:
    return SnapshotTag(row["trained_on"]) < SnapshotTag(row["checkpoint"])


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def facts(
    workspace: Workspace, results: Results, left_out: list[str]
) -> list[tuple[str, list[str]]]:
    """Names and values, a line each.

    Args:
        workspace: Workspace that they describe.
        results: Rows of the workspace.
        left_out: List that gets a message for each head that is left out for a damaged
            ``config.json``.
    """
    config = workspace.config
    model, task, tuned = config.model, config.task, config.finetune
    data = [
        f"{name}: {split.questions:,} {results.items} of {split.source}, sha256 "
        f"{split.sha256[:12]}…"
        # once: they are of the source, of which other splits are parts, too
        + (
            f", {len(split.misfits):,} of the source that fit no window left out"
            if split.misfits and source_split(name, task) == name
            else ""
        )
        + (
            f", {len(split.shared):,} of the source that share a text with dev left out"
            if split.shared and source_split(name, task) == name
            else ""
        )
        for name, split in config.data.items()
    ]
    loaded = load_task(task.name)
    revision = f", revision {model.revision}" if model.revision else ""
    entries: list[tuple[str, str | list[str]]] = [
        (
            "Model",
            f"{model.name_or_path}{revision}: {model.num_hidden_layers} layers, width "
            f"{model.hidden_size}, weights sha256 {model.weights_sha256[:12]}…",
        ),
        (
            "Task",
            "none: for hidden states alone"
            if not find_task(task.name).learns
            else f"{task.name}, windows of {task.max_length} tokens"
            + (f", overlap {task.overlap}" if "overlap" in loaded.settings else "")
            + (f", classes {', '.join(task.classes)}" if 0 < len(task.classes) <= 20 else "")
            + (", answerable questions only" if task.answerable_only else ""),
        ),
        ("Data", data),
        ("Snapshots", _snapshots(workspace)),
        (
            "Fine-tuning",
            ""
            if not find_task(task.name).learns
            else "; ".join(f"{tag} is {place}" for tag, place in config.adopted.sources.items())
            if config.adopted
            else f"{tuned.epochs:g} epoch{'' if tuned.epochs == 1 else 's'}, "
            f"batch {tuned.batch_size}"
            + (f" × {tuned.accumulate}" if tuned.accumulate > 1 else "")
            + f", learning rate {tuned.lr:g}, warmup {tuned.warmup:g}, decay {tuned.decay}, "
            f"precision {tuned.precision}, seed {tuned.seed}"
            + (f", variant {', '.join(tuned.variant)}" if tuned.variant else "")
            + (f", begun with the encoder of {tuned.init_from}" if tuned.init_from else "")
            + (
                f", distilled from {tuned.distil} with temperature {tuned.temperature:g}, labels "
                f"weighing {tuned.labels_weight:g}"
                if tuned.distil
                else ""
            ),
        ),
        ("Heads", _heads(workspace, left_out)),
        ("Activations", _stored(workspace)),
        ("Ensembles", f"{len(results.ensembles)}" if results.ensembles else ""),
        ("Versions", ", ".join(f"{name} {version}" for name, version in config.versions.items())),
        ("From", f"{FILE}, snapshots/*/snapshot.json, heads/*/*/config.json"),
    ]
    lines = [(name, [value] if isinstance(value, str) else value) for name, value in entries]
    return [(name, [line for line in value if line]) for name, value in lines if any(value)]


def _snapshots(workspace: Workspace) -> str:
    parts = []
    for tag in workspace.snapshots():
        try:
            step = read_snapshot_info(workspace.snapshot_dir(tag)).step
            parts.append(f"{tag} (step {step:,})")
        except WorkspaceError:
            parts.append(str(tag))  # its scores are here even where its record is not
    return ", ".join(parts)


def _heads(workspace: Workspace, left_out: list[str]) -> str:
    """The number of runs, and the settings that occur among them."""
    configs = []
    for tag, run in trained_heads(workspace):
        with leaving_out(left_out):
            configs.append(read_run_config(workspace.root / "heads" / tag / run))
    if not configs:
        return "none trained yet"
    names = {config.head for config in configs}
    settings = [
        f"{counted(len(names), 'head')} in {counted(len(configs), 'training')}",
        "trained on " + _each(SnapshotTag(config.trained_on) for config in configs),
    ]
    for key, name in (
        ("epochs", "epochs"),
        ("batch_size", "batch"),
        ("lr", "learning rate"),
        ("precision", "precision"),
        ("seed", "seeds"),
        ("fraction", "parts of the data"),
    ):
        settings.append(f"{name} {_each(getattr(config.training, key) for config in configs)}")
    settings.append(f"activations as {_each(config.encoding for config in configs)}")
    return ", ".join(settings)


def _stored(workspace: Workspace) -> list[str]:
    try:
        stored = workspace.stored()
        infos = [workspace.split(tag, name).info() for tag in stored for name in stored[tag]]
        own = [i for i in infos if StoredName.parse(i["split"]).dataset is None]
    except (StoreError, OSError) as error:
        return [f"the store at {workspace.activations} cannot be read: {error}"]
    return [
        f"{i['tag']}/{i['split']}: {counted(i['examples'], 'window')}, {i['encoding']}, "
        f"{size(i['bytes'])}"
        for i in own
    ] + _added(infos) or ["none in the store now"]


def _added(infos: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each data set that was added: what is stored of it."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for info in infos:
        name = StoredName.parse(info["split"]).dataset
        if name is not None:
            by_name.setdefault(name, []).append(info)
    lines = []
    for name, splits_of in by_name.items():
        splits = [StoredName.parse(info["split"]) for info in splits_of]
        lines.append(
            f"{name}: {', '.join(dict.fromkeys(s.split for s in splits))} of "
            f"{', '.join(dict.fromkeys(str(info['tag']) for info in splits_of))}, "
            f"{', '.join(dict.fromkeys(str(s.tokens) for s in splits))} of the tokens, "
            f"{size(sum(info['bytes'] for info in splits_of))}"
        )
    return lines


def _each(values: Iterable[Any]) -> str:
    """The values that occur, once each, numbers as short as they go."""
    different: Sequence[Any] = sorted({v for v in values if v is not None})
    return (
        " / ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in different)
        or "not recorded"
    )
