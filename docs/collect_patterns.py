"""Copies what analyses of a workspace say of layers into docs/results/patterns/, small.

Usage: python docs/collect_patterns.py ENCODER-TASK-SEED=WORKSPACE...

``docs/results/patterns/ENCODER-TASK-SEED.json`` gets, of what the workspace keeps in ``analysis/``:
RSA of every layer with itself between 0e and later snapshots, by split and sample; isotropy of
tokens; CKA likewise; context of words; structural and edge probes with their intervals. From these
`patterns` judges.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import bertvision
from bertvision.pipelines.analysis.cka import CkaResult
from bertvision.pipelines.analysis.context import ContextResult
from bertvision.pipelines.analysis.isotropy import IsotropyResult
from bertvision.pipelines.analysis.result import read_analyses
from bertvision.pipelines.analysis.rsa import RsaResult
from bertvision.pipelines.analysis.structure import StructureResult
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.tasks.scores import headline, headline_metric

FOLDER = Path(__file__).parent / "results" / "patterns"
_DIGITS = 5


def main(*named: str) -> None:
    """Write a file for each ``ENCODER-TASK-SEED=WORKSPACE``."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for text in named:
        name, _, folder = text.partition("=")
        run = {"encoder": name.rsplit("-", 2)[0], **collected(Path(folder))}
        written = json.dumps(run, indent=None, separators=(",", ":"))
        (FOLDER / f"{name}.json").write_text(written + "\n", encoding="utf-8")


def collected(folder: Path) -> dict[str, Any]:
    """Findings of the analyses of a workspace, by analysis, split and snapshot."""
    workspace = bertvision.Workspace.find(folder)
    config, left_out = workspace.config, list[str]()

    def kept(kind: Any) -> list[Any]:
        return [analysis.result for analysis in read_analyses(workspace, kind, left_out).values()]

    scores = {}
    for result in read_results(workspace, "dev"):
        if result.system == "bert":
            metrics = headline(result.rules)
            scores[result.checkpoint] = metrics[headline_metric(config.task.name, metrics)]
    rsa: dict[str, dict[str, Any]] = {}
    for analysis in kept(RsaResult):
        for split, values in zip(analysis.splits, analysis.of_pairs, strict=True):
            rsa.setdefault(split, {})[analysis.y] = _short(np.diagonal(values, axis1=1, axis2=2))
    isotropy: dict[str, Any] = {}
    for analysis in kept(IsotropyResult):
        at = analysis.sets.index("tokens")
        isotropy[analysis.name] = {
            tag: {
                "mean_cosine": _short(analysis.mean_cosine[i, at]),
                "corrected_cosine": _short(analysis.corrected_cosine[i, at]),
                "log_ratio": _short(analysis.log_ratio[i, at]),
                "outlier_channels": [list(c) for c in analysis.outlier_channels[i][at]],
            }
            for i, tag in enumerate(analysis.snapshots)
        }
    structure = {
        tag: {
            metric: {end: _short(getattr(analysis, end)[i, m]) for end in ("value", "low", "high")}
            for m, metric in enumerate(analysis.metrics)
        }
        | {"upto": {task: _short(analysis.upto[i, :, t]) for t, task in enumerate(analysis.tasks)}}
        for analysis in kept(StructureResult)
        for i, tag in enumerate(analysis.tags)
    }
    context = {
        tag: {name: _short(values[i]) for name, values in analysis.adjusted().items()}
        for analysis in kept(ContextResult)
        for i, tag in enumerate(analysis.snapshots)
    }
    if left_out:
        raise SystemExit("\n".join(left_out))
    return {
        "task": config.task.name,
        "seed": config.finetune.seed,
        "scores": scores,
        "rsa": rsa,
        "cka": {
            f"{analysis.x}-{analysis.y}": _short(np.diagonal(analysis.cka))
            for analysis in kept(CkaResult)
        },
        "isotropy": isotropy,
        "context": context,
        "structure": structure,
    }


def _short(values: Any) -> Any:
    """An array as lists of numbers that are as long as they mean something."""
    return np.round(np.asarray(values, np.float64), _DIGITS).tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])
