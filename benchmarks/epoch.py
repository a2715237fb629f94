"""An epoch of head training from the store against running the encoder again, side by side.

    python benchmarks/epoch.py --json epoch.json
    python benchmarks/epoch.py --workspace DIR --checkpoint 1e --examples 320 --json epoch.json

Without a workspace: synthetic activations with BERT-large's dimensions and SQuAD's lengths, and a
random-weight BERT-large as the encoder that runs again. Sides do the same training step (forward,
loss, backward, Adam) in batches of 16; those from the store decode stored codes, the other one runs
the encoder, without padding. A repetition is an epoch of ``--examples``, its start included, or of
``--encoder-examples`` for the encoder. Times are per example.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from common.bert import encoder_of, windows_of
from common.data import lengths, write_split
from common.harness import arguments, interleave, ratios, report, warm_cache
from common.heads import BATCH, EIGHT, ONE, Heads

from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.precision import Precision, device, resolve_precision
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.training.datamodule import decoded
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

PARTS = ("waiting", "decoding", "computing")


class Source(NamedTuple):
    """The hidden states that heads are trained on, and the encoder that could compute it again."""

    split: ActivationSplit
    windows: Windows
    encoder: Encoder
    folder: Path


def main() -> None:
    """Measure, print a table, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--workspace", help="measure its split train instead of synthetic data")
    parser.add_argument("--checkpoint", default="1e")
    parser.add_argument("--heads", nargs="+", default=ONE, help="trained instead of one")
    parser.add_argument("--examples", type=int, default=240, help="per repetition")
    parser.add_argument("--encoder-examples", type=int, default=32)
    options = parser.parse_args()
    if options.quick:
        options.examples, options.encoder_examples, options.repeats = 96, 32, 2
    precision = resolve_precision("auto")
    source = _of_workspace(options, precision) if options.workspace else _synthetic(options)
    results, parts = measure(source, options, precision)
    one, eight, again = results
    again_ratio = ratios(results, one, higher_is_better=False)
    shares = {
        side: median(
            wait / total for wait, total in zip(parts[side]["waiting"], results[side], strict=True)
        )
        for side in (one, eight)
    }
    waits = {side: median(parts[side]["waiting"]) for side in (one, eight)}
    flat = {f"{side}: {part}": parts[side][part] for side in parts for part in PARTS}
    report(
        options.json,
        benchmark="epoch",
        settings={
            "heads": options.heads,
            "eight heads": EIGHT,
            "examples": min(options.examples, len(source.split)),
            "encoder_examples": options.encoder_examples,
            "layers": len(source.split.record.layers),
            "hidden": source.split.record.hidden_size,
            "encoding": source.split.record.encoding,
            "precision": precision,
            "threads": torch.get_num_threads(),
            "device": device().type,
        },
        unit="seconds per example",
        results=results | flat,
        ratios={
            again: again_ratio[again],
            "waiting / epoch, one head": shares[one],
            "waiting / epoch, eight heads": shares[eight],
            "waiting, eight heads / one head": waits[eight] / waits[one],
        },
        notes=[
            f"waiting for data: {shares[one]:.2%} of an epoch of {one}, {shares[eight]:.2%} of "
            f"{eight}",
            f"running the encoder again takes {again_ratio[again]:.1f} times as long",
        ],
    )


def measure(
    source: Source, options: argparse.Namespace, precision: Precision
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Seconds per example of each side, and of the parts of each, a figure per repetition."""
    one = "store, one head" if len(options.heads) == 1 else f"store, {len(options.heads)} heads"
    eight, again = "store, eight heads", f"encoder again, {one.partition(', ')[2]}"
    parts: dict[str, dict[str, list[float]]] = {}

    def side(name: str, run: Callable[[], dict[str, float]]) -> Callable[[], float]:
        parts[name] = {part: [] for part in PARTS}

        def repetition() -> float:
            times = run()
            for part, seconds in times.items():
                parts[name][part].append(seconds)
            return sum(times.values())

        return repetition

    few, many = Trainer(source, options.heads, precision), Trainer(source, EIGHT, precision)
    warm_cache([source.folder])
    sides = {
        one: side(one, lambda: few.from_store(options.examples)),
        eight: side(eight, lambda: many.from_store(options.examples)),
        again: side(again, lambda: few.from_encoder(options.encoder_examples)),
    }
    results = interleave(sides, options.repeats)
    return results, {
        name: {part: values[-options.repeats :] for part, values in found.items()}
        for name, found in parts.items()
    }


class Trainer:
    """Trains heads on a source, and takes the time of each part.

    Args:
        source: of hidden states.
        names: of the heads.
        precision: of the heads' arithmetic.
    """

    def __init__(self, source: Source, names: list[str], precision: Precision) -> None:
        self._source = source
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._heads = Heads(names, source.split, precision)
        self._loader = ActivationLoader(source.split, batch_size=BATCH)

    def from_store(self, examples: int) -> dict[str, float]:
        """Seconds per example of the beginning of an epoch from the store, or of a whole one."""
        times, seen = dict.fromkeys(PARTS, 0.0), 0
        waited, started = self._loader.wait_seconds, time.perf_counter()
        for packed in self._loader:
            begun = time.perf_counter()
            batch = decoded(packed.to(device()), self._dtype)
            _finish()
            times["decoding"] += time.perf_counter() - begun
            self._heads.step(batch.hidden_states, batch.lengths, batch.labels)
            _finish()
            seen += len(packed)
            if seen >= examples:
                break
        total = time.perf_counter() - started
        times["waiting"] = self._loader.wait_seconds - waited
        times["computing"] = total - times["waiting"] - times["decoding"]
        return {part: seconds / seen for part, seconds in times.items()}

    def from_encoder(self, examples: int) -> dict[str, float]:
        """Seconds per example of a part of an epoch with the encoder; "waiting" is for it."""
        split, windows, encoder, _ = self._source
        times = dict.fromkeys(PARTS, 0.0)
        order = np.random.default_rng(0).permutation(len(split))[:examples]
        for start in range(0, len(order), BATCH):
            begun = time.perf_counter()
            chosen = order[start : start + BATCH]
            rows = split.plan.example_id[chosen]
            with torch.inference_mode():
                batches = encoder.batches(windows.n_tokens[rows])
                # copied: the encoder reuses its memory
                states = [
                    encoder(windows, rows[batch])[0].to(self._dtype, copy=True) for batch in batches
                ]
            own = torch.cat(states)  # outside inference mode: it may take part in a backward pass
            _finish()
            times["waiting"] += time.perf_counter() - begun
            begun = time.perf_counter()
            labels = {k: torch.from_numpy(v[chosen]).to(device()) for k, v in split.labels.items()}
            n_tokens = torch.from_numpy(split.plan.n_tokens[chosen].astype(np.int64))
            self._heads.step(own, n_tokens.to(device()), labels)
            _finish()
            times["computing"] += time.perf_counter() - begun
        return {part: seconds / len(order) for part, seconds in times.items()}


def _synthetic(options: argparse.Namespace) -> Source:
    n_tokens = lengths(options.examples)
    model = encoder_of("minilm" if options.quick else "large")
    layers, hidden = model.config.num_hidden_layers + 1, model.config.hidden_size
    folder = options.folder / f"epoch-{options.examples}-{hidden}"
    split = write_split(folder, n_tokens, layers=layers, hidden=hidden)
    encoder = Encoder(model, {"all": range(layers)}, resolve_precision("auto"))
    return Source(split, windows_of(n_tokens), encoder, folder)


def _of_workspace(options: argparse.Namespace, precision: Precision) -> Source:
    space = Workspace.find(options.workspace)
    split = space.split(options.checkpoint, "train")
    snapshot = load_snapshot(space.require_snapshot(options.checkpoint))
    windows = space.windows("train", snapshot.tokenizer)
    encoder = Encoder(snapshot.model.base_model, {"all": split.record.layers}, precision)
    return Source(split, windows, encoder, space.activations)


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
