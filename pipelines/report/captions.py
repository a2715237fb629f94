"""What a table of scores says of them: the deviation, the interval, and what they rest on."""

from __future__ import annotations

from collections.abc import Sequence

from bertvision.pipelines.results.rows import Results, Row

ENDS = ("sd", "low", "high")
"""What a score has beside itself: its deviation over seeds, and the ends of its interval."""


def scored(r: Row, key: str, metric: str = "score") -> Row:
    """A score under another key, with its deviation and its interval.

    Args:
        r: row of a system.
        key: the new key.
        metric: which score.
    """
    return {key: r.get(metric), **{f"{key}_{end}": r.get(f"{metric}_{end}") for end in ENDS}}


def of_bert(results: Results, r: Row) -> Row:
    """BERT's score that a row is compared with, under ``bert``, with its interval.

    Args:
        results: of the workspace.
        r: row of a system.
    """
    there = (b for b in results.bert if b["checkpoint"] == r["checkpoint"])
    return scored({} if r["bert"] is None else next(there), "bert")


def basis(results: Results, rows: Sequence[Row], *, shown: bool = False) -> str:
    """What scores rest on, for a caption: how many items, seeds, and what an interval covers.

    Args:
        results: of the workspace.
        rows: those that are shown, of heads among others.
        shown: whether intervals stand in the cells, not in the files alone.
    """
    several = any(r["seeds"] > 1 for r in rows if r["system"] != "bert")
    text = counts(results, rows) + (", mean ± standard deviation" if several else "")
    if any(r.get("score_low") is not None for r in rows):
        where = "in brackets" if shown else "in the files"
        text += f"; {where} 95 % intervals over {results.items}, those of one text drawn together"
        if several:
            n = min(r["seeds"] for r in rows if r["system"] != "bert" and r["seeds"] > 1)
            text += (
                ", and over seeds where there are several (too narrow for few seeds: of "
                f"{n} drawn again {100 * ((n - 1) / n) ** 0.5:.0f} % of their spread is left)"
            )
        elif any(r["system"] != "bert" for r in rows):
            text += ": they do not cover the choice of the seed"
    return text and f"{text[0].upper()}{text[1:]}."


def counts(results: Results, rows: Sequence[Row]) -> str:
    """How many items scores are of, and how many seeds: ``450 questions, one seed``.

    Args:
        results: of the workspace.
        rows: those that are shown, of heads among others.
    """
    seeds = sorted({r["seeds"] for r in rows if r["system"] != "bert"})
    parts = [f"{results.questions:,} {results.items}"] if results.questions else []
    if seeds:
        most = "one seed" if seeds == [1] else f"{seeds[-1]} seeds"
        parts.append(f"{seeds[0]} to {most}" if len(seeds) > 1 else most)
    return ", ".join(parts)
