"""Extraction and an analysis on one and two workers of a Dask cluster, against a single process.

    python benchmarks/cluster.py --json cluster.json

All on this machine; every process has one thread, so that two workers are two cores. Sides:

- *extraction*: windows per second of a whole `extract` call: what it loads, in the client and again
  in every worker, is in it; the imports of the workers are not, as they outlive a call;
- *isotropy*: tokens per second of the analysis of all stored tokens of an int8 split.

Before anything is measured the store that each side writes, and the result that it computes, are
compared with those of the single process, byte for byte.
"""

from __future__ import annotations

import csv
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import dask
import torch
from common.harness import arguments, interleave, ratios, report, versions
from distributed import LocalCluster

from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines import quickstart
from bertvision.pipelines.analysis.isotropy import isotropy_of_arrays as isotropy
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.tasks.generated import QUESTIONS_PER_PARAGRAPH, make_paragraphs
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.dataset import add_dataset
from bertvision.pipelines.workspace.workspace import Workspace

TAG, DATASET, MAX_LENGTH = "0e", "paragraphs", 256
SINGLE = "single process"


def main() -> None:
    """Measure, print a table, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--examples", type=int, default=1200, help="paragraphs, a window each")
    parser.add_argument("--shard-tokens", type=int, default=2048)
    options = parser.parse_args()
    if options.quick:
        options.examples, options.shard_tokens, options.repeats = 96, 512, 2
    torch.set_num_threads(1)
    folder = options.folder / "cluster"
    shutil.rmtree(folder, ignore_errors=True)
    workspace = _workspace(folder, options.examples)

    def store_of(name: str) -> Path:
        return folder / f"store of {name}"

    def extraction(name: str, scheduler: str | None) -> Callable[[], float]:
        def run() -> float:
            shutil.rmtree(store_of(name), ignore_errors=True)
            started = time.perf_counter()
            (done,) = extract(
                workspace,
                TAG,
                dataset=DATASET,
                tokens=("all",),
                precision="32",
                shard_tokens=options.shard_tokens,
                store=str(store_of(name)),
                scheduler=scheduler,
            )
            return done.examples / (time.perf_counter() - started)

        return run

    def analysis(scheduler: str) -> Callable[[], float]:
        def run() -> float:
            split = ActivationSplit(store_of(SINGLE), TAG, f"{DATASET}-all")
            started = time.perf_counter()
            with dask.config.set(num_workers=1):  # of threads; a cluster has its own number
                results[scheduler] = isotropy(
                    {"1e": split.dask()}, max_tokens=None, scheduler=scheduler
                )
            return split.record.tokens / (time.perf_counter() - started)

        return run

    results = {}
    settings = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    settings |= {"silence_logs": logging.CRITICAL}
    with LocalCluster(n_workers=1, **settings) as one, LocalCluster(n_workers=2, **settings) as two:
        clusters = {"1 worker": one.scheduler_address, "2 workers": two.scheduler_address}
        extractions = {
            name: extraction(name, address) for name, address in {SINGLE: None, **clusters}.items()
        }
        analyses = {
            name: analysis(address) for name, address in {SINGLE: "threads", **clusters}.items()
        }
        for side in (*extractions.values(), *analyses.values()):
            side()
        for name in clusters:
            if _files(store_of(name)) != _files(store_of(SINGLE)):
                raise RuntimeError(f"the store of {name} is not that of a single process")
        if len({str(result.to_json()) for result in results.values()}) != 1:
            raise RuntimeError("the analyses do not agree")
        rates = {"extraction": interleave(extractions, options.repeats, warmup=0)}
        rates["isotropy"] = interleave(analyses, options.repeats, warmup=0)
    split = ActivationSplit(store_of(SINGLE), TAG, f"{DATASET}-all")
    report(
        options.json,
        benchmark="cluster",
        settings={
            "encoder": "all-MiniLM-L6-v2",
            "examples": len(split),
            "tokens": split.record.tokens,
            "shards": split.record.shards,
            "bytes": split.info()["bytes"],
            "threads of each process": 1,
        }
        | versions(["dask", "distributed"]),
        unit="windows/s of extraction, tokens/s of isotropy",
        results={
            f"{what}, {name}": values
            for what, sides in rates.items()
            for name, values in sides.items()
        },
        ratios={
            f"{what}, {name}": ratio
            for what, sides in rates.items()
            for name, ratio in ratios(sides, "2 workers", higher_is_better=True).items()
        },
        notes=["a ratio says how many times faster two workers were than that side"],
    )
    shutil.rmtree(folder)


def _workspace(folder: Path, examples: int) -> Workspace:
    """A workspace with MiniLM and generated paragraphs."""
    workspace = feature_workspace(folder / "workspace", str(quickstart.packaged_encoder()))
    path = folder / f"{DATASET}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        paragraphs = make_paragraphs(examples * QUESTIONS_PER_PARAGRAPH, seed=0)
        writer.writerows((p.context, i % 2) for i, p in enumerate(paragraphs))
    columns = {"text": "text", "label": "label", "max_length": MAX_LENGTH}
    add_dataset(workspace.root, "csv", str(path), **columns)
    return workspace


def _files(store: Path) -> dict[str, bytes]:
    paths = (path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): path.read_bytes() for path in paths}


if __name__ == "__main__":
    main()
