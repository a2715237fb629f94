"""Keeping hidden states in somebody's own loop, beside the same loop without it.

    python benchmarks/hook.py --json hook.json
    python benchmarks/hook.py --model gemma --batches 6 --json hook-gemma.json

Sides, all in seconds of the same padded batches of random words, which the model brings or whose
folder is named:

- *bare loop*: the forward passes, with all hidden states, none of them kept;
- *writer.hook* and *writer.add_batch*: the same loop, all layers of all real tokens stored in int8
  and finished, with checksums and flushes;
- *torch.save*: the same loop, a file of the padded states of each batch as the model gives them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from common.data import lengths
from common.harness import arguments, interleave, ratios, report
from torch import Tensor
from transformers import PreTrainedModel

from bertvision import ActivationStore
from bertvision.featurestore.writing.appending import ActivationWriter
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.precision import device
from bertvision.pipelines.quickstart import packaged_encoder

BARE = "bare loop"
Batch = dict[str, Tensor]


def main() -> None:
    """Measure, print a table, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a model; default: MiniLM")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    if options.quick:
        options.batches, options.batch_size, options.repeats = 2, 4, 2
    model = load_model(options.model or Path(packaged_encoder())).to(device())
    layers = range(model.config.num_hidden_layers + 1)
    batches = padded(options.batches, options.batch_size, model.config.vocab_size)
    folder = options.folder / "hook"

    def timed(loop: Callable[[], None]) -> Callable[[], float]:
        def side() -> float:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            started = time.perf_counter()
            with torch.no_grad():
                loop()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            shutil.rmtree(folder)
            return seconds

        return side

    @contextmanager
    def writer() -> Iterator[ActivationWriter]:
        store = ActivationStore.create(folder)
        with store.writer(
            "0e", "train", hidden_size=model.config.hidden_size, layers=layers
        ) as made:
            yield made
            made.finish()

    def hook() -> None:
        with writer() as out, out.hook(model):
            for batch in batches:
                model(**batch)

    def add_batch() -> None:
        with writer() as out:
            for i, batch in enumerate(batches):
                keys = range(i * options.batch_size, (i + 1) * options.batch_size)
                mask, ids = batch["attention_mask"], batch["input_ids"]
                out.add_batch(keys, states_of(model, batch), mask, input_ids=ids)

    def save() -> None:
        for i, batch in enumerate(batches):
            torch.save(states_of(model, batch), folder / f"{i}.pt")

    def bare() -> None:
        for batch in batches:
            states_of(model, batch)

    sides = {BARE: bare, "writer.hook": hook, "writer.add_batch": add_batch, "torch.save": save}
    results = interleave({name: timed(loop) for name, loop in sides.items()}, options.repeats)
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    report(
        options.json,
        benchmark="hook",
        settings={
            "model": type(model).__name__,
            "layers": len(layers),
            "hidden_size": model.config.hidden_size,
            "batches": options.batches,
            "batch_size": options.batch_size,
            "tokens": real,
            "padding": round(1 - real / sum(batch["input_ids"].numel() for batch in batches), 3),
            "threads": torch.get_num_threads(),
            "device": device().type,
        },
        unit="s",
        results=results,
        ratios=ratios(results, BARE, higher_is_better=False),
        notes=["ours ×: seconds of the side for each second of the bare loop"],
    )


def padded(batches: int, size: int, words: int) -> list[Batch]:
    """Batches of random words with SQuAD's lengths, padded to the longest of each."""
    rng, made = np.random.default_rng(0), []
    for n_tokens in lengths(batches * size).reshape(batches, size):
        mask = np.arange(n_tokens.max()) < n_tokens[:, None]
        ids = np.where(mask, rng.integers(1000, words, mask.shape), 0)
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask * 1)}
        made.append({name: values.to(device()) for name, values in batch.items()})
    return made


def states_of(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, ...]:
    """(batch, seq, hidden) of each layer, the embeddings first."""
    states: tuple[Tensor, ...] = model(**batch, output_hidden_states=True).hidden_states
    return states


if __name__ == "__main__":
    main()
