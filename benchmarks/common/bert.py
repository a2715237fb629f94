"""The encoders and windows that benchmarks of the forward pass share.

Speed depends on sizes and lengths alone, so weights are random unless a trained model is at hand,
and windows are random words with SQuAD's lengths.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import BertConfig, BertModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.plan import SHARD_TOKENS, ShardPlan
from bertvision.pipelines import quickstart
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.precision import Precision, autocast
from bertvision.pipelines.tasks.windows import Windows, collate

_SIMILAR = 0.85


def encoder_of(size: str) -> PreTrainedModel:
    """An encoder in float32.

    Args:
        size: ``large`` (24 × 1024, random weights), ``base`` (12 × 768, likewise), or ``minilm``
            (6 × 384, the trained weights that bertvision brings).
    """
    if size == "minilm":
        return load_model(Path(quickstart.packaged_encoder()))
    depth, width = {"large": (24, 1024), "base": (12, 768)}[size]
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
    )
    torch.manual_seed(0)
    return BertModel(config, add_pooling_layer=False).eval()


def windows_of(lengths: npt.NDArray[np.int64], seed: int = 0) -> Windows:
    """Windows of random words with these lengths."""
    rng = np.random.default_rng(seed)
    tokens, count = int(lengths.sum()), len(lengths)
    labels = np.zeros(count, np.int32)
    return Windows(
        input_ids=rng.integers(1000, 30000, tokens).astype(np.int32),
        token_type_ids=np.zeros(tokens, np.uint8),
        offset_mapping=np.zeros((tokens, 2), np.int32),
        n_tokens=lengths.astype(np.int32),
        item_index=np.arange(count, dtype=np.int32),
        labels={"start_positions": labels, "end_positions": labels},
    )


def split_of(
    windows: Windows,
    model: PreTrainedModel,
    encoding: str = "int8",
    shard_tokens: int = SHARD_TOKENS,
    split: str = "train",
) -> tuple[SplitSpec, SplitContents]:
    """Contents of a split of all hidden states of these windows."""
    import pyarrow as pa

    config = model.config
    spec = SplitSpec(
        tag="1e",
        split=split,
        encoding=encoding,
        layers=tuple(range(config.num_hidden_layers + 1)),
        hidden_size=config.hidden_size,
        provenance={"model": "benchmark"},
    )
    contents = SplitContents(
        ShardPlan.make(windows.n_tokens, shard_tokens=shard_tokens, seed=0),
        per_token={"input_ids": windows.input_ids},
        per_example=dict(windows.labels),
        examples=pa.table({"id": [str(i) for i in range(len(windows))]}),
    )
    return spec, contents


def similar_lengths(lengths: npt.NDArray[np.integer]) -> list[npt.NDArray[np.int64]]:
    """Batches of windows of similar length, longest first, as anybody would form them."""
    order = np.argsort(-lengths, kind="stable")
    cuts, longest = [], lengths[order[0]]
    for i, n in enumerate(lengths[order]):
        if n < _SIMILAR * longest:
            cuts.append(i)
            longest = n
    return np.split(order, cuts)


def padded_forward(
    model: PreTrainedModel,
    windows: Windows,
    rows: npt.NDArray[np.int64],
    precision: Precision,
    *,
    seq: int | None = None,
    hidden_states: bool = False,
) -> BaseModelOutput:
    """The forward pass of transformers' own BertModel over a padded batch.

    Args:
        model: with its weights in float32; autocast does the rest.
        windows: of a split.
        rows: (batch,) which of them.
        precision: of the forward pass.
        seq: pad to so many tokens; by default to the longest of the batch.
        hidden_states: also return those of all layers.
    """
    device = model.device
    batch = collate(windows, windows.first_token, rows, 0)
    more = 0 if seq is None else seq - batch.input_ids.shape[1]
    fields = (batch.input_ids, batch.token_type_ids, batch.attention_mask)
    ids, types, mask = (torch.nn.functional.pad(x, (0, more)).to(device) for x in fields)
    with torch.inference_mode(), autocast(precision, device):
        output: BaseModelOutput = model(
            input_ids=ids,
            token_type_ids=types,
            attention_mask=mask,
            output_hidden_states=hidden_states,
        )
    return output
