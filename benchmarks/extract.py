"""Extraction against the bare forward pass, and against padded extraction into HDF5.

    python benchmarks/extract.py --size large --json extract.json
    python benchmarks/extract.py --size minilm --examples 480 --json extract-minilm.json

Sides, all in windows per second of the same windows, with the same threads and arithmetic (and in
CPU time, which other work on the machine disturbs less; give one thread then, idle ones spin):

- *extraction*: forward pass, int8 encoding, shards written durably and committed;
- *forward, same batches*: bertvision's own forward pass on the same packed batches, nothing kept;
- *forward, transformers*: its BertModel on the windows of each shard grouped by length, likewise;
- *padded to 386, HDF5*: as the original did: BertModel on batches of 16 windows padded to 386, all
  hidden states as float32 (386, hidden, layers), a chunk each, into one HDF5 file.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common.bert import encoder_of, padded_forward, similar_lengths, split_of, windows_of
from common.data import MAX_LENGTH, lengths
from common.harness import arguments, interleave, ratios, report
from transformers import PreTrainedModel

from bertvision.featurestore.writer import open_writer
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.extraction.shardwork import ShardWork
from bertvision.pipelines.extraction.split_extraction import calibrate
from bertvision.pipelines.precision import Precision, device, resolve_precision
from bertvision.pipelines.tasks.windows import Windows

OURS = "extraction"
_PADDED_BATCH = 16


def main() -> None:
    """Measure, print a table, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--size", choices=["large", "base", "minilm"], default="large")
    parser.add_argument("--examples", type=int, default=96)
    options = parser.parse_args()
    if options.quick:
        options.size, options.examples, options.repeats = "minilm", 48, 2
    precision = resolve_precision("auto")
    windows = windows_of(lengths(options.examples))
    plain = encoder_of(options.size).to(device())
    states = range(plain.config.num_hidden_layers + 1)
    encoder = Encoder(copy.deepcopy(plain), {"all": states}, precision)
    spec, contents = split_of(windows, plain)
    (calibration,) = calibrate(encoder, windows, spec.encoding, hidden_size=spec.hidden_size)
    folder = options.folder / "extract"
    computing: list[float] = []

    def extraction() -> float:
        shutil.rmtree(folder, ignore_errors=True)
        with open_writer(folder, spec, contents, lambda: calibration) as writer:
            work = ShardWork({"all": writer}, windows, encoder, "error")
            pending = {shard: ("all",) for shard in writer.pending()}
            started = time.perf_counter()
            examples = sum(written.record.examples for written in work.write(pending))
            seconds = time.perf_counter() - started
        computing.append(work.seconds / seconds)
        shutil.rmtree(folder)
        return examples / seconds

    plan = contents.plan
    shards = [np.array(plan.examples_of(shard)) for shard in range(plan.n_shards)]

    def same_batches() -> float:
        started = time.perf_counter()
        for members in shards:
            for batch in encoder.batches(plan.n_tokens[members]):
                encoder.forward(windows, plan.example_id[members[batch]])
        _finish()
        return len(windows) / (time.perf_counter() - started)

    def transformers() -> float:
        started = time.perf_counter()
        for members in shards:
            for batch in similar_lengths(plan.n_tokens[members]):
                padded_forward(plain, windows, plan.example_id[members[batch]], precision)
        _finish()
        return len(windows) / (time.perf_counter() - started)

    sides = {
        OURS: extraction,
        "forward, same batches": same_batches,
        "forward, transformers": transformers,
    }
    notes = []
    try:
        import h5py  # noqa: F401
    except ImportError:
        notes.append("h5py is not installed: no padded HDF5 extraction")
    else:
        sides["padded to 386, HDF5"] = lambda: _to_hdf5(plain, windows, precision, options.folder)
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    measured = {name: _with_cpu_time(run, cpu[name]) for name, run in sides.items()}
    results = interleave(measured, options.repeats)
    cpu_time = {name: values[1:] for name, values in cpu.items() if "HDF5" not in name}
    cpu_ratios = ratios(cpu_time, OURS, higher_is_better=False)
    notes += [
        f"of the extraction's time, computing took {np.median(computing[1:]):.1%}; "
        "the rest is waiting for the last shards to be written",
        *(f"CPU time, {name} / extraction: {value:.3f}" for name, value in cpu_ratios.items()),
    ]
    report(
        options.json,
        benchmark="extract",
        settings={
            "size": options.size,
            "examples": len(windows),
            "tokens": int(windows.n_tokens.sum()),
            "shards": plan.n_shards,
            "precision": precision,
            "threads": torch.get_num_threads(),
            "device": device().type,
        },
        unit="windows/s",
        results=results | {f"CPU time, {name}, s": values for name, values in cpu_time.items()},
        ratios=ratios(results, OURS, higher_is_better=True)
        | {f"CPU time, {name}": value for name, value in cpu_ratios.items()},
        notes=notes,
    )


def _with_cpu_time(run: Callable[[], float], into: list[float]) -> Callable[[], float]:
    """The same side, which also notes the CPU seconds of all threads."""

    def measured() -> float:
        started = time.process_time()
        figure = run()
        into.append(time.process_time() - started)
        return figure

    return measured


def _to_hdf5(model: PreTrainedModel, windows: Windows, precision: Precision, folder: Path) -> float:
    """Extract one padded batch the original's way; its rate does not depend on their number."""
    import h5py

    rows = np.arange(min(_PADDED_BATCH, len(windows)))
    layers, hidden = model.config.num_hidden_layers + 1, model.config.hidden_size
    shape = (MAX_LENGTH, hidden, layers)
    path = folder / "extract.h5"
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    output = padded_forward(model, windows, rows, precision, seq=MAX_LENGTH, hidden_states=True)
    states = torch.stack(output.hidden_states or (), dim=-1).float().cpu().numpy()
    with h5py.File(path, "w") as file:
        data = file.create_dataset(
            "hidden_states", (len(rows), *shape), "float32", chunks=(1, *shape)
        )
        for i, example in enumerate(states):
            data[i] = example
    seconds = time.perf_counter() - started
    path.unlink()
    return len(rows) / seconds


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
