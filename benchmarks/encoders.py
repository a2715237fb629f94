"""The forward pass of each family of encoders: packed, padded, and window by window.

    python benchmarks/encoders.py --json encoders.json

Encoders of 6 layers × 384 with random weights compute all hidden states of the same windows. In CPU
milliseconds per window, which other work on the machine disturbs less; give one thread.

- *as extracted*: what `bertvision extract` computes with: packed for BERT and the families like it;
- *padded*: windows of like length together, padded to the longest of them, as for other families;
- *alone*: each window by itself, with neither padding nor company.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import numpy as np
import torch
from common.bert import windows_of
from common.data import lengths
from common.harness import arguments, interleave, ratios, report
from transformers import AutoConfig, PreTrainedModel

from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.forward import PaddedForward, can_pack
from bertvision.pipelines.encoders.kept_states import KeptStates
from bertvision.pipelines.encoders.loading import new_model
from bertvision.pipelines.precision import device
from bertvision.pipelines.tasks.windows import Windows

FAMILIES = ("bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert", "gpt2", "llama")
LAYERS = 6
_SETTINGS: dict[str, dict[str, object]] = {
    "distilbert": {"hidden_dim": 1536},
    "deberta-v2": {  # as of the published ones
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
}
_OURS = "as extracted"


def main() -> None:
    """Measure, print a table, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--examples", type=int, default=48)
    options = parser.parse_args()
    if options.quick:
        options.families, options.examples, options.repeats = ("bert", "gpt2"), 12, 2
    windows = windows_of(lengths(options.examples))
    sides: dict[str, Callable[[], float]] = {}
    for family in options.families:
        sides |= _sides(_model(family), windows, family)
    results = interleave(sides, options.repeats)
    found = {}
    for family in options.families:
        of = {name: x for name, x in results.items() if name.startswith(f"{family}, ")}
        found |= ratios(of, f"{family}, {_OURS}", higher_is_better=False)
    report(
        options.json,
        benchmark="encoders",
        settings={
            "layers": LAYERS,
            "examples": len(windows),
            "tokens": int(windows.n_tokens.sum()),
            "threads": torch.get_num_threads(),
            "device": device().type,
        },
        unit="CPU ms/window",
        results=results,
        ratios=found,
        notes=[],
    )


def _model(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family,
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=514,
        pad_token_id=0,
        **_SETTINGS.get(family, {}),
    )
    return new_model(config, seed=0)


def _sides(model: PreTrainedModel, windows: Windows, family: str) -> dict[str, Callable[[], float]]:
    states = {"all": range(LAYERS + 1)}
    encoder = Encoder(copy.deepcopy(model), states, "32")
    padded = PaddedForward(model.to(device()), states["all"])
    kept = KeptStates(states, model.config.hidden_size, device())
    every = np.arange(len(windows))

    def extracted() -> None:
        for rows in encoder.batches(windows.n_tokens):
            encoder(windows, every[rows])

    def alike() -> None:
        with torch.inference_mode():
            kept.begin(windows.n_tokens)
            padded(windows, every, kept)

    def alone() -> None:
        with torch.inference_mode():
            for row in every:
                kept.begin(windows.n_tokens[[row]])
                padded(windows, np.array([row]), kept)

    runs = {_OURS: extracted, "alone": alone} | ({"padded": alike} if can_pack(model) else {})
    return {f"{family}, {name}": _timed(run, len(windows)) for name, run in runs.items()}


def _timed(run: Callable[[], None], count: int) -> Callable[[], float]:
    def measured() -> float:
        started = time.process_time()
        run()
        return 1000 * (time.process_time() - started) / count

    return measured


if __name__ == "__main__":
    main()
