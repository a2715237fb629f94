"""Writing and reading real hidden states in each encoding, side by side.

    python benchmarks/encodings.py --model FOLDER --data SQUAD.json.gz --json OUT

Texts are extracted by `bertvision.extract`, from loading the encoder to the last shard, into a
workspace of its own for each encoding. The stores are then read in shuffled batches of 16 from the
page cache, as bfloat16: of all layers, and of the last one alone.
"""

from __future__ import annotations

from common import harness  # first: it sets what torch reads when it is imported

# isort: split
import itertools
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rate import questions

import bertvision

ENCODINGS = ("bfloat16", "int8", "int4", "transform:0.05", "transform:0.115", "transform:0.2")
OURS = "int8"
READ = {"all layers": None, "last layer": [-1]}


def main() -> None:
    """Extract and read with every encoding; print a table and write the report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of an encoder")
    parser.add_argument("--data", type=Path, required=True, help="a file of SQuAD's form")
    parser.add_argument("--texts", type=int, default=2000)
    options = parser.parse_args()
    seconds = 2.0
    if options.quick:
        options.texts, options.repeats, seconds = 32, 2, 0.1
    folder = options.folder / f"encodings-{options.texts}"
    folder.mkdir(parents=True, exist_ok=True)
    texts = folder / "texts.jsonl"
    pairs = questions(options.data)[: options.texts]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in pairs))
    written = harness.interleave(
        {e: partial(extract, folder / e, e, options.model, texts) for e in ENCODINGS},
        options.repeats,
        warmup=0,
    )
    results = {f"{e} | extraction": figures for e, figures in written.items()}
    ratios = {
        f"{e} | extraction": ratio
        for e, ratio in harness.ratios(written, OURS, higher_is_better=True).items()
    }
    splits = {e: bertvision.ActivationStore.open(folder / e / "activations") for e in ENCODINGS}
    opened = {e: store["0e/texts-all"] for e, store in splits.items()}
    for condition, layers in READ.items():
        sides = {e: reading(split, layers, seconds) for e, split in opened.items()}
        measured = harness.interleave(sides, options.repeats)
        results |= {f"{e} | {condition}": figures for e, figures in measured.items()}
        found = harness.ratios(measured, OURS, higher_is_better=True)
        ratios |= {f"{e} | {condition}": ratio for e, ratio in found.items()}
    first = next(iter(opened.values())).record
    harness.report(
        options.json,
        benchmark="encodings",
        settings={
            "examples": first.examples,
            "mean_tokens": first.tokens / first.examples,
            "layers": len(first.layers),
            "hidden": first.hidden_size,
            "repeats": options.repeats,
            "readers": {
                e: {"bytes_per_example": split.info()["bytes"] / len(split)}
                for e, split in opened.items()
            },
        },
        unit="examples/s",
        results=results,
        ratios=ratios,
    )


def extract(root: Path, encoding: str, model: Path, texts: Path) -> float:
    """Examples a second of an extraction into a new workspace."""
    shutil.rmtree(root, ignore_errors=True)
    started = time.perf_counter()
    (row,) = bertvision.extract(
        model=str(model), task="text", data=str(texts), encoding=encoding, workspace=root
    )
    return float(row.examples / (time.perf_counter() - started))


def reading(split: Any, layers: list[int] | None, seconds: float) -> Callable[[], float]:
    """A function that gives the examples a second of whole epochs, so many seconds at least."""
    seeds = itertools.count()

    def measure() -> float:
        harness.warm_cache([Path(str(split.storage))])
        loader = bertvision.ActivationLoader(split, layers=layers, seed=next(seeds))
        for batch in loader:  # buffers touched
            batch.decode(torch.bfloat16)
        examples, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            for batch in loader:
                batch.decode(torch.bfloat16)
                examples += len(batch)
        return examples / elapsed

    return measure


if __name__ == "__main__":
    main()
