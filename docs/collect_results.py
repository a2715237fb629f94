"""Copies the results of a workspace into docs/results/, from which pages are written.

Usage: python docs/collect_results.py WORKSPACE [FIGURE...]

The workspace's folder gives the name, such as ``squad_v2``. ``docs/results/squad_v2/tables/`` gets
the tables of its report, ``figures/`` the figures that are named, and ``comparisons.json`` what
``claims.toml`` there asks for: each pair by `bertvision compare --seeds all`, or with one seed
where both systems were trained once. Where ``claims.toml`` names a workspace beside, in the same
folder, the second system of each pair is that one's. Of a folder of `bertvision repeat`,
``tables/`` gets the scores of the systems that every fine-tuning has, and pairs are compared over
fine-tunings.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.repeats.folder import find_seeds, holds_runs

RESULTS = Path(__file__).parent / "results"
LEFT_OUT = {"runs", "waiting", "similarity_subsets"}
"""Tables of single runs, whose seeds the others have together, of what is to be done, and of the
many sub-sets of similarity, which `similarity` has as one sample."""


def main(workspace: Path, *figures: str) -> None:
    """Write all files of a run."""
    folder = RESULTS / workspace.resolve().name
    if holds_runs(workspace):
        _write(folder / "tables" / "runs.json", {"rows": scores_of_runs(workspace)})
    else:
        _report(workspace, folder, figures)
    claims = folder / "claims.toml"
    if claims.exists():
        asked = tomllib.loads(claims.read_text(encoding="utf-8"))
        if "errors" in asked:
            _write(folder / "tables" / "errors.json", errors(asked["errors"], workspace))
        name = asked.get("beside", {}).get("workspace")
        beside = workspace.resolve().parent / name if name else None
        asked = asked["claim"]
        pairs = dict.fromkeys(tuple(pair) for claim in asked for pair in claim["pairs"])
        comparisons = [compared(first, second, workspace, beside) for first, second in pairs]
        _write(folder / "comparisons.json", comparisons)


def scores_of_runs(root: Path) -> list[dict[str, Any]]:
    """Mean, spread and runs of each system that was scored in every workspace of a folder."""
    scored = [bertvision.results(workspace=space.root) for space in find_seeds(root)]
    systems = [row.written for row in scored[0]]
    systems = [s for s in systems if all(s in {row.written for row in own} for own in scored)]
    rows = bertvision.spread([f"{root}@{system}" for system in systems]).to_json()["rows"]
    shown = ("runs", "score", "score_sd", "lowest", "highest")
    return [
        {
            "name": "BERT" if name == "bert" else name,
            "trained_on": tags[0],
            "checkpoint": tags[-1],
            **{key: row[key] for key in shown},
        }
        for row in rows
        for name, *tags in [row["system"].split(":")]
    ]


def _report(workspace: Path, folder: Path, figures: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        report = bertvision.report(out=Path(temporary) / "report", workspace=workspace)
        _copy(report.page.parent / "tables", folder / "tables", set(report.tables) - LEFT_OUT)
        _copy(report.page.parent / "figures", folder / "figures", set(figures))


def compared(first: str, second: str, workspace: Path, beside: Path | None) -> dict[str, Any]:
    """A comparison over all seeds there are, with the systems as they were asked for."""
    compare = partial(bertvision.compare, first, second, workspace=workspace, beside=beside)
    try:
        comparison = compare(seeds="one" if holds_runs(workspace) else "all")
    except InputError as error:
        if "one seed each" not in str(error):
            raise
        comparison = compare()
    print(comparison.sentence, file=sys.stderr)
    return {**comparison.to_json(), "first": first, "second": second}


def errors(system: str, workspace: Path) -> dict[str, Any]:
    """Scores of groups of items as a table; below it, who alone is right on how many."""
    analysis = bertvision.error_analysis(system, examples=0, workspace=workspace)
    values = analysis.to_json()
    rows = [{"by": by, **row} for by, groups in values["groups"].items() for row in groups]
    agreement, second = values["agreement"], values["second"]
    basis = (
        f"{values['questions']:,} items, one seed. {values['name']} alone is right on "
        f"{agreement['only the system']}, BERT alone on {agreement['only BERT']}: p of McNemar's "
        f"exact test, as if questions were independent, {agreement['p']:.1g}. Of its "
        f"{second['first_wrong']} wrong answers the second best is right in "
        f"{second['second_right']} cases."
    )
    return {"title": f"Where {system} errs", "basis": basis, "rows": rows}


def _write(path: Path, values: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy(source: Path, target: Path, names: set[str]) -> None:
    """The files of these names without suffix, but for CSV, in place of all that was there."""
    if target.exists():
        shutil.rmtree(target)
    if names:
        target.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.stem in names and path.suffix != ".csv":
            shutil.copy(path, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
