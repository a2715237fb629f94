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
    """Of ModernBERT, whose tokenizer has no class of its own."""
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
    """Of its configuration, beside the sizes."""
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

ENCODERS = [name for name, family in FAMILIES.items() if family.ends == (True, True)]
"""Those that are fine-tuned; decoder-only families are sources of features."""


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
