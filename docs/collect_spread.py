"""Copies what methods of fine-tuning come to over seeds into docs/results/variants/.

Usage: python docs/collect_spread.py TASK FOLDER...

Each folder is one of `bertvision repeat`, the first that of plain fine-tuning; ``TASK.json`` gets
the rows and runs of `bertvision spread`, without the places they stood in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bertvision

TARGET = Path(__file__).parent / "results" / "variants"


def main(task: str, *folders: str) -> None:
    """Write the file of a task."""
    found = bertvision.spread(list(folders)).to_json()
    if found["unfinished"]:
        raise SystemExit(f"not scored yet: {found['unfinished']}")
    values = {
        **{key: found[key] for key in ("task", "metric", "baseline", "baseline_name", "rows")},
        "runs": [{k: v for k, v in run.items() if k != "folder"} for run in found["runs"]],
    }
    TARGET.mkdir(exist_ok=True)
    text = json.dumps(values, indent=1, ensure_ascii=False)
    (TARGET / f"{task}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2:])
