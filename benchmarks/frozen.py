"""Fine-tuning with frozen lower layers out of a store, against running them in every step.

    python benchmarks/frozen.py --model all-MiniLM-L6-v2 --layers 4 --json frozen.json

Sides, all in seconds per optimiser step of the same run of `bertvision finetune` on generated
pairs of sentences (median of the steps of a run):

- *freeze-stored*: the upper layers alone, from the stored states of the lower ones;
- *freeze*: all layers run, the lower ones do not learn;
- *all layers*: plain fine-tuning.

The store has to be made first: its seconds, over what an epoch saves, are the epochs after which
it has paid for itself.
"""

from __future__ import annotations

import csv
import random
import shutil
import statistics
import time
from pathlib import Path

from common.harness import arguments, interleave, ratios, report

from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.frozen import FrozenLayers
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.quickstart import packaged_encoder
from bertvision.pipelines.training.lightning import seconds_per_step
from bertvision.pipelines.workspace.creation import open_workspace
from bertvision.pipelines.workspace.job_options import FinetuneOptions

OURS = "freeze-stored"
WORDS = (__doc__ or "").split()
"""The words of the sentences: what they say does not matter here."""


def main() -> None:
    """Measure, print a table, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--model", help="encoder; by default the one of the quickstart")
    parser.add_argument("--layers", type=int, help="frozen layers; by default two thirds of all")
    parser.add_argument("--examples", type=int, default=640)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    if options.quick:
        options.examples, options.repeats = 48, 2
    model = options.model or str(packaged_encoder())
    root = options.folder / "frozen"
    shutil.rmtree(root, ignore_errors=True)
    data = {name: _pairs(root / f"{name}.csv", options.examples, name) for name in ("train", "dev")}
    storing: list[float] = []

    def asked(*variant: str) -> FinetuneOptions:
        return FinetuneOptions(
            model=model,
            task="csv",
            train=str(data["train"]),
            dev=str(data["dev"]),
            pair="pair",
            batch_size=options.batch_size,
            save_at=("1e",),
            variant=variant,
        )

    layers = options.layers
    if layers is None:
        probe = open_workspace(root / "probe", asked(), resume=False)
        layers = max(1, round(probe.config.model.num_hidden_layers * 2 / 3))

    def step(*variant: str) -> float:
        """Median seconds of a step of a fresh run."""
        folder = root / "run"
        shutil.rmtree(folder, ignore_errors=True)
        if variant and variant[0].startswith(OURS):
            space = open_workspace(folder, asked(*variant), resume=False)
            started = time.perf_counter()
            FrozenLayers(space, layers, resolve_precision(space.config.finetune.precision))
            storing.append(time.perf_counter() - started)
        finetune(folder, asked(*variant), evaluate=False)
        seconds = seconds_per_step(folder / "finetune" / "log.csv")
        assert seconds is not None
        return seconds

    sides = {
        OURS: lambda: step(f"{OURS}:{layers}"),
        "freeze": lambda: step(f"freeze:{layers}"),
        "all layers": step,
    }
    results = interleave(sides, options.repeats)
    steps = -(-options.examples // options.batch_size)
    medians = {name: statistics.median(values) for name, values in results.items()}
    stored, saved = statistics.median(storing[1:]), steps * (medians["freeze"] - medians[OURS])
    after = f"{stored / saved:.2f} epochs" if saved > 0 else "no number of epochs"
    report(
        options.json,
        benchmark="frozen",
        settings={
            "model": Path(model).name,
            "frozen_layers": layers,
            "examples": options.examples,
            "batch_size": options.batch_size,
            "seconds_to_store": stored,
            "epochs_to_break_even": stored / saved if saved > 0 else None,
        },
        unit="s per step",
        results=results,
        ratios=ratios(results, OURS, higher_is_better=False),
        notes=[
            f"storing the states of layer {layers} took {stored:.1f} s, an epoch of {steps} steps "
            f"saves {saved:.1f} s against freeze: it has paid for itself after {after}"
        ],
    )
    shutil.rmtree(root)


def _pairs(path: Path, examples: int, seed: str) -> Path:
    """Pairs of sentences of 8 to 40 words, the label whether they share their first word."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["text", "pair", "label"])
        for i in range(examples):
            one, other = (
                [rng.choice(WORDS) for _ in range(rng.randint(8, 40))] + [str(i)] for _ in "ab"
            )
            out.writerow([" ".join(one), " ".join(other), str(one[0] == other[0])])
    return path


if __name__ == "__main__":
    main()
