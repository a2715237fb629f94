"""Deviations of the statistics of analyses in int8 and int4 from float32.

    python benchmarks/deviation.py --workspace WORKSPACE --checkpoint 0e,1e --split dev \
        --groups trec-test --json docs/analyses/deviation.json

The hidden states of snapshots of a workspace are extracted in float32, int8 and int4, each into a
copy of the workspace that shares the snapshots, and the analyses that read stored states are run
with the same tokens on each. What is reported of every statistic is by how much it differs from
that of float32, over all layers (or pairs of layers, and snapshots). Groups are the classes of a
data set of sentences that was added to the workspace (`bertvision extract --task trec --data
FOLDER`). The same numbers come on any machine, but for what rounding does.
"""

from __future__ import annotations

from common import harness  # first: it sets what torch reads when it is imported

import bertvision

# isort: split
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.pipelines.analysis.languages import FEWEST
from bertvision.pipelines.analysis.languages import languages_of_groups as languages
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.files import to_json
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.workspace.workspace import FILE, Workspace

ENCODINGS = ("float32", "int8", "int4")
Statistics = dict[str, npt.NDArray[np.float64]]


def main() -> None:
    """Extract, measure, compare with float32, and write what was found."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--workspace", required=True)
    parser.add_argument("--checkpoint", default="0e,1e", help="two snapshots")
    parser.add_argument("--split", default="dev")
    parser.add_argument("--groups", help="split with classes, such as trec-test")
    parser.add_argument("--encoder", help="what it is called; by default as in the workspace")
    parser.add_argument("--tokens", type=int, default=3_000, help="of samples of pairs of tokens")
    options = parser.parse_args()
    space, tags = Workspace.find(options.workspace), options.checkpoint.split(",")
    found: dict[str, Statistics] = {}
    with tempfile.TemporaryDirectory(dir=_made(options.folder)) as folder:
        for encoding in ENCODINGS:
            copy = copy_of(space, Path(folder) / encoding)
            for tag in tags:
                stored = {"encoding": encoding, "precision": "32"}
                extract(copy, tag, splits=[options.split], tokens="all", **stored)
                if options.groups:
                    extract(copy, tag, splits=[options.groups], tokens="mean", **stored)
            found[encoding] = measured(copy, tags, options.split, options.groups, options.tokens)
        record = copy.split(tags[0], options.split).record
    report = {
        "benchmark": "deviation",
        "command": " ".join(["python", "benchmarks/deviation.py", *_words(options)]),
        "machine": harness.machine(),
        "settings": {
            "encoder": options.encoder or Path(space.config.model.name_or_path).name,
            "task": space.config.task.name,
            "snapshots": tags,
            "split": options.split,
            "windows": record.examples,
            "tokens": record.tokens,
            "sampled": options.tokens,
            "layers": len(record.layers),
            "hidden": record.hidden_size,
            "groups": options.groups,
        },
        "statistics": compared(found),
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for name, of in report["statistics"].items():
        print(name, {encoding: of[encoding]["absolute"] for encoding in ENCODINGS[1:]})


def copy_of(space: Workspace, root: Path) -> Workspace:
    """A workspace with the same snapshots and data, and nothing stored."""
    root.mkdir(parents=True)
    space.config.write(root / FILE)
    (root / "snapshots").symlink_to(space.root.resolve() / "snapshots")
    if (datasets := space.root / "datasets").exists():
        shutil.copytree(datasets, root / datasets.name)
    return Workspace.find(root)


def measured(
    space: Workspace, tags: Sequence[str], split: str, groups: str | None, tokens: int
) -> Statistics:
    """Every statistic of every analysis that reads stored states.

    Args:
        space: with the states.
        tags: two snapshots.
        split: of both.
        groups: split with a vector for each text, whose classes are groups; None is none.
        tokens: sampled where pairs of tokens are compared.
    """
    one, other = tags
    alike = bertvision.cka(one, other, split=split, workspace=space)
    shared = bertvision.cca(one, other, split=split, workspace=space)
    pairs = bertvision.rsa(one, other, split=split, max_tokens=tokens, repeats=3, workspace=space)
    spread = bertvision.isotropy(tags, split=split, workspace=space)
    words = bertvision.context(tags, split=split, tokens=tokens, workspace=space)
    found: Statistics = {
        "CKA": alike.cka,
        "CKA without the largest channels": alike.cka_dropped,
        "SVCCA": shared.svcca,
        "PWCCA": shared.pwcca,
        "RSA": pairs.of_pairs.mean(axis=1),
        "RSA by token": pairs.of_tokens.mean(axis=1),
    }
    for j, name in enumerate(spread.sets):
        # [CLS] is the same vector in all windows where the embeddings give it out
        of = slice(spread.layers[0] == 0 and name != "tokens", None)
        found |= {
            f"mean cosine, {name}": spread.mean_cosine[:, j, of],
            f"mean cosine, corrected, {name}": spread.corrected_cosine[:, j, of],
            f"log I, {name}": spread.log_ratio[:, j, of],
            f"log I, corrected, {name}": spread.corrected_ratio[:, j, of],
            f"share of the mean vector, {name}": spread.mean_share[:, j, of],
            f"EV {spread.components[0]}, {name}": spread.explained_variance[:, j, of, 0],
            f"mean norm, {name}": spread.mean_norm[:, j, of],
            f"correlation of channels, {name}": spread.mean_correlation[:, j, of],
        }
    found |= {
        "random cosine": words.random_cosine,
        "self-similarity less random": words.adjusted()["self_adjusted"],
        "window less random": words.adjusted()["intra_adjusted"],
        "MEV less random": words.adjusted()["explained_adjusted"],
        "static less another's": words.adjusted()["static_adjusted"],
        "nearest of the same word": words.nearest,
        "margin of the nearest": words.margin,
    }
    if groups:
        found |= of_groups(space, tags, groups)
    return found


def of_groups(space: Workspace, tags: Sequence[str], split: str) -> Statistics:
    """How far classes of texts lie apart, by snapshot and layer; rare classes are left out."""
    name = StoredName.parse(split)
    labels = np.array([item.label for item in space.dataset(name.dataset).items(name.split)])
    groups = [np.flatnonzero(labels == k) for k in np.unique(labels)]
    groups = [rows for rows in groups if len(rows) >= FEWEST]
    results = []
    for tag in tags:
        pooled = PooledSplit(space, tag, name.dataset, name.split, "mean")
        results.append(
            languages(
                lambda layer, pooled=pooled: pooled.features([layer])[:, 0],
                groups,
                [str(k) for k in range(len(groups))],
                layers=pooled.stored.record.layers,
            )
        )
    return {
        "variance between groups": np.array([of.between for of in results]),
        "groups identified": np.array([of.identified for of in results]),
        "groups identified, centred": np.array([of.identified_centred for of in results]),
        "clusters (V-measure)": np.array([of.clusters for of in results]),
    }


def compared(found: Mapping[str, Statistics]) -> dict[str, Any]:
    """By statistic its values, the range in float32, and how far the encodings are off.

    Args:
        found: by encoding, the statistics; NaN where an encoding leaves nothing to be measured.
    """
    told = {}
    for name in found[ENCODINGS[0]]:
        values = {encoding: found[encoding][name].ravel() for encoding in ENCODINGS}
        exact = values[ENCODINGS[0]]
        of: dict[str, Any] = {
            "least": float(exact.min()),
            "most": float(exact.max()),
            "values": {encoding: to_json(of) for encoding, of in values.items()},
        }
        for encoding in ENCODINGS[1:]:
            there = np.isfinite(values[encoding])
            off = np.abs(values[encoding] - exact)[there]
            relative = off / np.maximum(np.abs(exact[there]), np.finfo(np.float64).tiny)
            of[encoding] = {
                "lost": int((~there).sum()),
                "absolute": _summary(off),
                "relative": _summary(relative),
            }
        told[name] = of
    return told


def _summary(off: npt.NDArray[np.float64]) -> dict[str, float] | None:
    """Median and largest; None of nothing."""
    return {"median": float(np.median(off)), "largest": float(off.max())} if len(off) else None


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _words(options: Any) -> list[str]:
    words = ["--workspace WORKSPACE", f"--checkpoint {options.checkpoint}"]
    words += [f"--split {options.split}", f"--tokens {options.tokens}"]
    words += [f"--groups {options.groups}"] if options.groups else []
    return words + ([f"--encoder {options.encoder}"] if options.encoder else [])


if __name__ == "__main__":
    main()
