"""A tiny random model of each family, with a tokenizer of its own class over a tiny vocabulary."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel

LAYERS, HIDDEN = 2, 32
_LETTERS = [*string.ascii_lowercase, *string.digits, *".,?'-"]
_WORDS = ["the", "anna", "founded", "rome", "who", "in"]
_BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 130,
}


def _word_piece() -> dict[str, Any]:
    words = [*_BERT, *_WORDS, "##s", *_LETTERS, *("##" + letter for letter in _LETTERS)]
    return {"vocab": {word: i for i, word in enumerate(words)}}


def _byte_bpe(special: list[str]) -> dict[str, Any]:
    merges = [("a", "n"), ("n", "a"), ("\u0120", "f"), ("o", "u")]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*special, *bytes_, *("".join(pair) for pair in merges)]
    return {"vocab": {word: i for i, word in enumerate(words)}, "merges": merges}


def _unigram(special: list[str]) -> dict[str, Any]:
    pieces = ["\u2581", "\u2581anna", "\u2581found", "ed", *_LETTERS]
    return {"vocab": [(w, 0.0) for w in special] + [(p, -1.0 - i) for i, p in enumerate(pieces)]}


def _meta_bpe() -> dict[str, Any]:
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    words = ["<unk>", "<s>", "</s>", *bytes_, "\u2581", *_LETTERS, "an", "ou"]
    vocab = {word: i for i, word in enumerate(words)}
    return {"vocab": vocab, "merges": [("a", "n"), ("o", "u")], "add_bos_token": True}


def _bracketed_bpe() -> dict[str, Any]:
    """The tokenizer of ModernBERT, which has no class of its own."""
    made = _byte_bpe(_BERT)
    tokenizer = Tokenizer(models.BPE(**made))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    return {"tokenizer_object": tokenizer, **dict(zip(names, _BERT, strict=True)), **inputs}


class Family(NamedTuple):
    """How a family's tiny model is made, and what its tokenizer puts around a text."""

    model_type: str
    tokenizer: str
    """Name of its class in transformers."""
    vocabulary: Callable[[], dict[str, Any]]
    settings: dict[str, Any]
    """Options of its configuration, beside the sizes."""
    ends: tuple[bool, bool] = (True, True)
    """Whether a window begins, and ends, with a special token."""
    max_length: int = 130
    packs: bool = False
    """Whether windows are computed without padding."""


FAMILIES: dict[str, Family] = {
    "bert": Family("bert", "BertTokenizer", _word_piece, {}, packs=True),
    "multilingual-bert": Family(
        "bert", "BertTokenizer", lambda: _word_piece() | {"do_lower_case": False}, {}, packs=True
    ),
    "roberta": Family(
        "roberta",
        "RobertaTokenizer",
        lambda: _byte_bpe(_FAIRSEQ),
        {"type_vocab_size": 1},
        max_length=128,
        packs=True,
    ),
    "xlm-roberta": Family(
        "xlm-roberta",
        "XLMRobertaTokenizer",
        lambda: _unigram(_FAIRSEQ),
        {"type_vocab_size": 1},
        max_length=128,
        packs=True,
    ),
    "distilbert": Family("distilbert", "DistilBertTokenizer", _word_piece, {}, packs=True),
    "electra": Family(
        "electra", "ElectraTokenizer", _word_piece, {"embedding_size": 16}, packs=True
    ),
    "deberta-v2": Family(
        "deberta-v2",
        "DebertaV2Tokenizer",
        lambda: _unigram(_BERT),
        {
            "relative_attention": True,
            "position_biased_input": False,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "conv_kernel_size": 3,
            "conv_act": "gelu",
        },
    ),
    "deberta-v3": Family(
        "deberta-v2",
        "DebertaV2Tokenizer",
        lambda: _unigram(_BERT),
        {
            "relative_attention": True,
            "position_biased_input": False,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "modernbert": Family(
        "modernbert",
        "PreTrainedTokenizerFast",
        _bracketed_bpe,
        {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 8},
    ),
    "gpt2": Family(
        "gpt2", "GPT2Tokenizer", lambda: _byte_bpe(["<|endoftext|>"]), {}, ends=(False, False)
    ),
    "llama": Family(
        "llama", "LlamaTokenizer", _meta_bpe, {"num_key_value_heads": 2}, ends=(True, False)
    ),
    "qwen2": Family(
        "qwen2",
        "Qwen2Tokenizer",
        lambda: _byte_bpe(["<|endoftext|>"]),
        {"num_key_value_heads": 2},
        ends=(False, False),
    ),
}
"""By the name under which docs/encoders.md lists them."""

_MIXED = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0},
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8),
}
"""Settings of decoders and mixtures of experts; families that do not have them do not read them."""

_KINDS = """
    albert apertus arcee aria_text beam bert-generation biogpt bitnet bloom camembert
    clip_text_model cohere cohere2 cohere2_moe cwm data2vec-text deberta deberta-v2 diffllama
    distilbert doge electra ernie4_5 ernie4_5_moe eurobert exaone4 exaone_moe falcon_mamba
    flex_olmo flint gemma gemma2 gemma3_text gemma4_unified_text glm glm4 glm4_moe gpt-sw3 gpt2
    gpt_bigcode gpt_neox gpt_oss granite granite_docling_text granite_swa granitemoe
    granitemoe_swa granitemoeshared gte helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax ibert inkling2_text inkling_text internlm3 iquestcoder jais2 jamba jetmoe
    jina_embeddings_v3 kolibri1 laguna layoutlm lfm2 lfm3 llama llama4_text mamba markuplm
    megatron-bert mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral modernbert-decoder molmo2_text moshi mpnet mpt muse_glimmer_text
    muse_spark_text nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt
    openai_privacy_filter opt persimmon phi phimoe qwen2_moe qwen3 qwen3_5_text qwen3_moe
    qwen3_next qwen3_vl_moe_text qwen3_vl_text rembert roberta roberta-prelayernorm roformer
    seed_oss smollm3 solar_open splinter stablelm starcoder2 tapas tipsv2_text_model ultrabert
    vaultgemma xglm xlm-roberta xlm-roberta-xl ctrl flaubert gpt_neox_japanese mra nomic_bert
    xlm yoso cpmant canine dpr lxmert xmod blip_2_qformer bros
"""

MORE_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_KINDS.split(), _MIXED),
    "fnet": {"tpu_short_seq_length": 130},
    "big_bird": {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2},
    "convbert": {"embedding_size": 32, "head_ratio": 2, "num_groups": 1, "conv_kernel_size": 5},
    "nystromformer": {"num_landmarks": 8, "segment_means_seq_len": 8, "conv_kernel_size": 5},
    "longformer": {"attention_window": 8},
    "mobilebert": {
        **{"hidden_size": 64, "embedding_size": 16},
        **{"true_hidden_size": 32, "intra_bottleneck_size": 32},
    },
    "lilt": {"channel_shrink_ratio": 4},
    "reformer": {
        **{"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [10, 13]},
        **{"attn_layers": ["local", "lsh"], "attention_head_size": 8, "is_decoder": True},
        **{"local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "feed_forward_size": 64},
    },
    **dict.fromkeys(("gptj", "codegen"), {"rotary_dim": 4}),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "squeezebert": {"embedding_size": 32},
    "ernie": {"use_task_id": True},
    "esm": {"position_embedding_type": "rotary", "token_dropout": True},
    "layoutlmv3": {"input_size": 32, "visual_embed": False, "coordinate_size": 5, "shape_size": 6},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 16},
    "roc_bert": {
        **{"shape_vocab_size": 10, "pronunciation_vocab_size": 10},
        **{"shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    },
    "modernbert": {"local_attention": 8},
    "phi3": {"num_key_value_heads": 2},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "num_key_value_heads": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
    "xlstm": {"num_heads": 4},
    "perceiver": {},
}
"""Settings of families by model type, beside the sizes: those of the padded path at large."""

ENCODERS = [name for name, family in FAMILIES.items() if family.ends == (True, True)]
"""The families that are fine-tuned on all tasks; decoders learn tasks of sentences."""


def make_family(name: str | Family, folder: Path, model_class: type[Any] = AutoModel) -> Path:
    """Save a family's random model and tokenizer as a checkpoint in ``folder``."""
    family = FAMILIES[name] if isinstance(name, str) else name
    tokenizer = getattr(transformers, family.tokenizer)(**family.vocabulary())
    tokenizer.save_pretrained(folder)
    random_model(family, len(tokenizer), tokenizer.pad_token_id, model_class).save_pretrained(
        folder
    )
    return folder


def random_model(
    family: Family, words: int, pad: int | None, model_class: type[Any] = AutoModel
) -> Any:
    """A family's random model over so many words, one of which may be the padding."""
    torch.manual_seed(0)
    padding = {} if pad is None else {"pad_token_id": pad}
    config = AutoConfig.for_model(
        family.model_type, vocab_size=words, **_SIZES | padding | family.settings
    )
    # weights larger than those of training's start: a mistake in attention must show in the states
    model = model_class.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model.eval()
