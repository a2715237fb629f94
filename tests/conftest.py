"""Fixtures that every test may use: a tiny BERT with its tokenizer, built here."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

WORDS = """
    the a of in and was is who what where when which did does founded wrote born lives works river
    city firm book king queen 1901 1902 1950 anna boris clara david london paris rome . , ? ' - ##s
""".split()  # noqa: SIM905


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random BERT of 2 layers × hidden 32 (3 states) and its tokenizer."""
    import string

    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForQuestionAnswering, BertTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-bert")
    chars = [*string.ascii_lowercase, *string.digits]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = list(dict.fromkeys([*special, *WORDS, *chars, *("##" + c for c in chars)]))
    tokenizer = Tokenizer(
        models.WordPiece({w: i for i, w in enumerate(vocab)}, unk_token="[UNK]")  # type: ignore[arg-type]
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    BertTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=400,
    )
    BertForQuestionAnswering(config).save_pretrained(folder)
    return folder
