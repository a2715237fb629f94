"""A few sentences that say what came out, made of the numbers and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.results.columns import FOOTNOTE, MARK
from bertvision.pipelines.results.rows import Results
from bertvision.pipelines.text import signed

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
        results: at least one of them.
    """
    is_first, trivial = _trivial(results)
    found = [
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
    return [sentence for sentence in found if sentence]


def _untuned(results: Results) -> str:
    """Whose scores are no measure of the others'."""
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
    """What of the gain needs no other layer: BERT's own output layer, trained once more."""
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
    """What the other layers add, where a control shows it."""
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
    found = _best([r for r in there if r["trained_on"] == first])
    return (
        f"Trained on {first} and scored on {last}, an encoder it never saw in training, the best "
        f"head ({found['name']}) scores {_score(found, results)} against BERT's "
        f"{_number(found['bert'])} at {last} ({signed(found['difference'])})."
    )


def _ensemble(results: Results) -> str:
    found = [r for r in results.ensembles if r["bert"] is not None]
    if not found:
        return ""
    last = max(SnapshotTag(r["checkpoint"]) for r in found)
    best = _best([r for r in found if r["checkpoint"] == last])
    return (
        f"The best ensemble at {last}, {best['name']}, scores {_score(best, results)} "
        f"({signed(best['difference'])} against BERT)."
    )


def _trivial(results: Results) -> tuple[bool, str]:
    """What knowing nothing scores; whether some system is below that, and which."""
    if results.baseline is None:
        return False, ""
    base = results.baseline
    always = {"accuracy": "Always giving the commonest class", "las": "Always giving one arc"}
    what = always.get(results.key, "Never answering")
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
    """What the differences above cannot say, and the command that says it."""
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
