"""Formats in which trainers of sparse autoencoders and draft heads keep states, side by side.

    python benchmarks/trainers.py --json docs/tokens/trainers.json

Each form is written and read as its users do, from the same float16 states in memory:

- *writing*: vectors (a token in a layer) a second, until all is flushed to the disk;
- *reading*: vectors a second of whole examples in random order, as they are stored, out of files
  that are not in the page cache;
- *given again*: a writing process is killed (SIGKILL) at a random moment and the same code is run
  again: the share of the examples that the first had been given that must be given once more;
- *lost*: examples that are then missing, cannot be read, or are wrong, on average over the kills;
- *flipped bits found*: one bit of the stored values is flipped and all examples are read: in how
  many of the tries an error says so.

What "run again" means is what each program does: files that exist are left (speculators, vLLM,
SpecForge), a data set of Arrow or a memory map begins anew, a store goes on.
"""

from __future__ import annotations

import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from common import harness  # first: it sets what torch reads when it is imported

# isort: split
import numpy as np
from common.data import hidden_states, lengths
from peers.kept import FORMS, OURS, Form
from torch import Tensor

_SEED = 0


def states_of(examples: int, layers: int, hidden: int) -> list[Tensor]:
    """Examples of SQuAD's lengths, (seq, layers, hidden) float16 each."""
    sizes = lengths(examples).tolist()
    pool = hidden_states(2048, layers=layers, hidden=hidden, seed=_SEED).half()
    first = np.random.default_rng(_SEED).integers(0, len(pool) - max(sizes), examples).tolist()
    return [pool[i : i + n] for i, n in zip(first, sizes, strict=True)]


def main() -> None:
    """Measure every form; print a table, write every repetition as JSON."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--examples", type=int, default=1200)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tries", type=int, default=10, help="kills, and flipped bits")
    parser.add_argument("--write", nargs=2, metavar=("FORM", "FOLDER"), help="be what is killed")
    options = parser.parse_args()
    if options.quick:
        options.examples, options.layers, options.hidden = 60, 2, 64
        options.repeats = options.tries = 2
    shape = options.layers, options.hidden
    few = max(options.examples // 6, 40)
    if options.write:
        form = next(form for form in FORMS if form.name == options.write[0])
        form.write(Path(options.write[1]), announced(states_of(few, *shape)))
        return
    examples = states_of(options.examples, *shape)
    vectors = sum(map(len, examples)) * options.layers
    folder = options.folder / "trainers"
    shutil.rmtree(folder, ignore_errors=True)

    def writing(form: Form) -> Callable[[], float]:
        def measure() -> float:
            place = fresh(folder / form.name)
            started = time.perf_counter()
            form.write(place, enumerate(examples))
            form.flush(place)
            return vectors / (time.perf_counter() - started)

        return measure

    def reading(form: Form) -> Callable[[], float]:
        seeds = iter(range(10**6))

        def measure() -> float:
            place = folder / form.name
            order = np.random.default_rng(next(seeds)).permutation(len(examples))
            harness.drop_cache([place])
            started = time.perf_counter()
            read = sum(form.sequences(place, order.tolist()))
            elapsed = time.perf_counter() - started
            if read * options.layers != vectors:
                raise RuntimeError(f"{form.name}: {read} tokens of {vectors / options.layers}")
            return vectors / elapsed

        return measure

    results: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}

    def keep(condition: str, found: dict[str, list[float]], higher_is_better: bool) -> None:
        results.update({f"{name} | {condition}": figures for name, figures in found.items()})
        compared = harness.ratios(found, OURS, higher_is_better)
        ratios.update({f"{name} | {condition}": ratio for name, ratio in compared.items()})

    written = harness.interleave({f.name: writing(f) for f in FORMS}, options.repeats)
    sizes = {f.name: [harness.size_of([folder / f.name]) / vectors] for f in FORMS}
    keep("bytes a vector", sizes, higher_is_better=False)
    keep("writing, vectors/s", written, higher_is_better=True)
    read = harness.interleave({f.name: reading(f) for f in FORMS}, options.repeats)
    keep("reading, vectors/s", read, higher_is_better=True)
    some = states_of(few, *shape)
    command = [sys.executable, __file__, *sys.argv[1:], "--write"]
    for form in FORMS:
        place = folder / form.name
        killed = [kill(form, place, command, some, seed) for seed in range(options.tries)]
        form.write(fresh(place), enumerate(some))  # whole, whatever the kills have left
        found = [flip(form, place, len(some), seed) for seed in range(options.tries)]
        results[f"{form.name} | given again after a kill, %"] = [100 * part for part, _ in killed]
        results[f"{form.name} | lost by a kill"] = [statistics.mean(lost for _, lost in killed)]
        results[f"{form.name} | flipped bits found, %"] = [100 * statistics.mean(found)]
        print(f"{form.name}: killed {options.tries} times", file=sys.stderr)
    shutil.rmtree(folder)
    harness.report(
        options.json,
        benchmark="trainers",
        settings={
            "examples": len(examples),
            "tokens": vectors // options.layers,
            "layers": options.layers,
            "hidden": options.hidden,
            "killed": {"examples": len(some), "tries": options.tries},
        },
        unit="form",
        results=results,
        ratios=ratios,
    )


def announced(examples: Iterable[Tensor]) -> Iterable[tuple[int, Tensor]]:
    """Examples with their numbers, each told on standard output when it is taken."""
    for key, states in enumerate(examples):
        print(key, flush=True)
        yield key, states


def kill(
    form: Form, folder: Path, command: list[str], examples: list[Tensor], seed: int
) -> tuple[float, int]:
    """Kill a process that writes, run the same code again, and look at every example.

    Returns:
        The share of what the first had taken that the second took again, and examples that are
        lost.
    """
    fresh(folder)
    rng = random.Random(seed)
    last = rng.randrange(len(examples) // 4, len(examples) - 8)
    arguments = [*command, form.name, str(folder)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < last:
            pass
        time.sleep(rng.random() * 0.004)  # somewhere in what it does with one example or two
        process.send_signal(signal.SIGKILL)
        taken = last + 1 + len(process.stdout.readlines())
    again = 0

    def given() -> Iterable[tuple[int, Tensor]]:
        nonlocal again
        for key, states in enumerate(examples):
            again += key < taken and not form.has(folder, key)
            yield key, states

    form.write(folder, given())
    lost = 0
    for key, states in enumerate(examples):
        try:
            read = form.read(folder, key)
            off = (read.float() - states.float()).norm() / states.float().norm()
            lost += read.shape != states.shape or not bool(off < 0.02)
        except Exception:  # whatever a library says of a file that is cut off
            lost += 1
    return again / taken, lost


def flip(form: Form, folder: Path, examples: int, seed: int) -> bool:
    """Flip a bit of the stored values, read everything, and put it back: whether that was told."""
    rng = random.Random(seed)
    path, begin, end = rng.choice(form.payload(folder))
    with path.open("r+b", buffering=0) as file:
        place = rng.randrange(begin, end)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        try:
            for key in range(examples):
                form.read(folder, key)
            return False
        except Exception:  # any error says so
            return True
        finally:
            file.seek(place)
            file.write(bytes([byte]))


def fresh(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main()
