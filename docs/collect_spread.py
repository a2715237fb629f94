"""Copies what methods of fine-tuning come to over seeds into docs/results/variants/.

Usage: python docs/collect_spread.py [--timed] NAME FOLDER...

Each folder is one of `bertvision repeat`, the first that of plain fine-tuning; ``NAME.json`` gets
the rows and runs of `bertvision spread`, without the places they stood in. Seconds are left out
unless ``--timed`` says that every run had the same cores to itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bertvision

TARGET = Path(__file__).parent / "results" / "variants"
_ROWS = ("rows", "runs")


def main(name: str, *folders: str, timed: bool) -> None:
    """Write a file of methods."""
    spread = bertvision.spread(list(folders)).to_json()
    if spread["unfinished"]:
        raise SystemExit(f"not scored yet: {spread['unfinished']}")

    def told(key: str) -> bool:
        return key != "folder" and (timed or not key.endswith("_seconds"))

    values = {
        **{key: spread[key] for key in ("task", "metric", "baseline", "baseline_name")},
        **{part: [{k: row[k] for k in row if told(k)} for row in spread[part]] for part in _ROWS},
    }
    TARGET.mkdir(exist_ok=True)
    text = json.dumps(values, indent=1, ensure_ascii=False)
    (TARGET / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(*(a for a in arguments if a != "--timed"), timed="--timed" in arguments)
