"""torch.compile of heads against running them as they are: forward and backward, packed batches.

    python benchmarks/gpu/compile.py --json OUT [--quick] [--heads NAME …] [--dimensions 7x384 …]

Batches of 16 windows have other token counts each time, as in training, so heads are compiled with
dynamic shapes. What compiling itself takes is measured once per head, apart from the repetitions.
Figures are CPU time of all threads, which other work on the machine disturbs less than the clock.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where scripts beside this folder stand

import torch
from common import data, harness
from torch import Tensor, nn

from bertvision.models.factory import build_head
from bertvision.models.outputs import SpanOutput, span_loss

HEADS = [
    "learned-pooling",
    "adapter-64-shared",
    "adapter-386-shared",
    "adapter-386-shared-skip",
    "adapter-386-independent",
    "cnn-1xn",
]

Batch = tuple[Tensor, Tensor]


def main() -> None:
    """Measure every head as it is and compiled; print a table and write the report."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--heads", nargs="+", default=HEADS)
    parser.add_argument("--dimensions", nargs="+", default=["7x384", "25x1024"])
    parser.add_argument("--precision", choices=["bf16", "32"], nargs="+", default=["bf16", "32"])
    parser.add_argument("--batches", type=int, default=4)
    options = parser.parse_args()
    results: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    notes = []
    for dimensions in options.dimensions:
        layers, hidden = map(int, dimensions.split("x"))
        for precision in options.precision:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            drawn = batches(2 if options.quick else options.batches, layers, hidden, dtype)
            for name in options.heads:
                torch._dynamo.reset()
                side = f"{name} {dimensions} {precision}"
                torch.manual_seed(0)
                head = build_head(name, layers=layers, hidden=hidden)
                compiled = torch.compile(head, dynamic=True)
                began = time.perf_counter()
                for batch in drawn:
                    step(compiled, batch)
                first = time.perf_counter() - began  # of the clock
                sides = {"compiled": run(compiled, drawn), "as it is": run(head, drawn)}
                measured = harness.interleave(sides, 2 if options.quick else options.repeats)
                results |= {f"{side}, {how}": figures for how, figures in measured.items()}
                ratio = harness.ratios(measured, "compiled", higher_is_better=False)["as it is"]
                ratios[f"{side}, as it is"] = ratio
                tokens = sum(len(states) for states, _ in drawn)
                usual = (
                    statistics.median(measured["compiled"]) * tokens / 1e6 / torch.get_num_threads()
                )
                notes.append(f"{side}: compiling took {max(0.0, first - usual):.0f} s")
    harness.report(
        options.json,
        benchmark="compile",
        settings={"windows": 16, "batches": 2 if options.quick else options.batches},
        unit="CPU µs/token, forward and backward",
        results=results,
        ratios=ratios,
        notes=notes,
    )


def batches(count: int, layers: int, hidden: int, dtype: torch.dtype) -> list[Batch]:
    """Packed batches of 16 windows of SQuAD's lengths."""
    lengths = torch.from_numpy(data.lengths(16 * count, seed=0)).reshape(count, 16)
    return [(torch.randn(int(n.sum()), layers, hidden, dtype=dtype), n) for n in lengths]


def step(head: Callable[..., SpanOutput], batch: Batch) -> None:
    """Forward and backward on one batch; gradients are dropped first, as a training step does."""
    states, lengths = batch
    if isinstance(head, nn.Module):
        head.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=states.dtype == torch.bfloat16):
        output = head(states, lengths)
    at = torch.zeros(len(lengths), dtype=torch.int64)
    span_loss(output, at, at).backward()  # type: ignore[no-untyped-call]


def run(head: Callable[..., SpanOutput], drawn: Sequence[Batch]) -> Callable[[], float]:
    """A function that takes a step on every batch and gives CPU microseconds per token."""

    def timed() -> float:
        began = time.process_time()
        for batch in drawn:
            step(head, batch)
        return 1e6 * (time.process_time() - began) / sum(len(states) for states, _ in drawn)

    return timed


if __name__ == "__main__":
    main()
