"""Families of transformers: what differs between them, an entry for each.

An encoder of a family without an entry is extracted by its own forward pass, and has no sites.
Nothing heavy is imported here, because the command line checks the names of sites.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Family(NamedTuple):
    """Facts of a family: paths of its modules, those of sites inside a block."""

    blocks: str
    """Path of the list of blocks in the encoder."""
    attn_proj: str
    """Reads the outputs of all heads: attention's output projection."""
    resid_mid: str | None
    """Reads the residual stream behind attention: a normalisation; None where the feed-forward
    layer stands beside attention, and not behind it."""
    mlp_proj: str
    """Reads the activations of the feed-forward layer: its output projection."""
    mlp_out: str
    """Gives what the feed-forward layer adds."""
    attn_out: str | None = None
    """Gives what attention adds to the residual stream; None where its output projection does."""
    resid_post: str | None = None
    """Reads the residual stream behind the feed-forward layer, where a block ends with a
    normalisation; None where a block gives the residual stream itself."""
    ln_final: str | None = None
    """Path of the final normalisation in the encoder."""
    intermediate_size: str = "intermediate_size"
    """The attribute of its configuration with the width of the feed-forward layer; where that is
    None it is four hidden sizes."""
    packs: bool = False
    """Whether windows are computed one after another, without padding: so of families whose hidden
    states on that path were compared with their own forward pass."""


_BERT = Family(
    "encoder.layer",
    attn_proj="attention.output.dense",
    resid_mid="attention.output.LayerNorm",
    mlp_proj="output.dense",
    mlp_out="output.dense",
    resid_post="output.LayerNorm",
)
_LLAMA = Family(
    "layers",
    attn_proj="self_attn.o_proj",
    resid_mid="post_attention_layernorm",
    mlp_proj="mlp.down_proj",
    mlp_out="mlp",
    ln_final="norm",
)
_GEMMA = _LLAMA._replace(  # which normalises what is added, too
    attn_out="post_attention_layernorm",
    resid_mid="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra"), _BERT._replace(packs=True)),
    "deberta-v2": _BERT,
    "mpnet": _BERT._replace(attn_proj="attention.attn.o", resid_mid="attention.LayerNorm"),
    "distilbert": Family(
        "transformer.layer",
        attn_proj="attention.out_lin",
        resid_mid="sa_layer_norm",
        mlp_proj="ffn.lin2",
        mlp_out="ffn",
        resid_post="output_layer_norm",
        intermediate_size="hidden_dim",
        packs=True,
    ),
    "modernbert": Family(
        "layers",
        attn_proj="attn.Wo",
        resid_mid="mlp_norm",
        mlp_proj="mlp.Wo",
        mlp_out="mlp",
        ln_final="final_norm",
    ),
    "gpt2": Family(
        "h",
        attn_proj="attn.c_proj",
        resid_mid="ln_2",
        mlp_proj="mlp.c_proj",
        mlp_out="mlp",
        ln_final="ln_f",
        intermediate_size="n_inner",
    ),
    "gpt_neox": Family(
        "layers",
        attn_proj="attention.dense",
        resid_mid=None,
        mlp_proj="mlp.dense_4h_to_h",
        mlp_out="mlp",
        ln_final="final_layer_norm",
    ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
}
"""By model type. Of each a tiny model's sites are compared with hooks of a test's own."""


def position_offset(model: PreTrainedModel) -> int:
    """Position of a window's first token: 0, but in RoBERTa's kin the one after the padding's.

    Their table of positions has a row for padding (`create_position_ids_from_input_ids` of
    transformers, after fairseq), so windows are shorter than the table by that offset.
    """
    from torch import nn

    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0
