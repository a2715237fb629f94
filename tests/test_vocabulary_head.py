"""Heads over the vocabulary: taken apart, they give the model's own logits; others are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import Family, _word_piece, make_family
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from bertvision.errors import InputError
from bertvision.pipelines.encoders.vocabulary_head import is_causal, load_causal_head, load_mlm_head

ALBERT = Family("albert", "BertTokenizer", _word_piece, {"embedding_size": 16})
MPNET = Family("mpnet", "BertTokenizer", _word_piece, {})
KINDS: dict[str, str | Family] = {
    **{
        name: name
        for name in (
            *("bert", "roberta", "xlm-roberta", "distilbert", "electra"),
            *("deberta-v2", "modernbert"),
        )
    },
    "albert": ALBERT,
    "mpnet": MPNET,
}


def made(kind: str | Family, folder: Path) -> Path:
    """A checkpoint with a head whose biases and LayerNorms are not those of the start."""
    make_family(kind, folder, AutoModelForMaskedLM)
    weights = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    for value in weights.values():
        if value.dim() == 1:
            value += 0.3 * torch.randn(value.shape, generator=random)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_the_last_state_gives_the_models_own_logits(name: str, tmp_path: Path) -> None:
    folder = made(KINDS[name], tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    ids = torch.randint(5, 40, (3, 21), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = model(input_ids=ids, output_hidden_states=True)
    own = output.logits.flatten(0, 1).numpy()
    assert own.std() > 0.05  # the head says something
    head = pickle.loads(pickle.dumps(load_mlm_head(folder, name)))  # as workers get it
    states = output.hidden_states[-1].flatten(0, 1).numpy()
    found = head.features(2, states) @ head.weight.T + head.bias(2)
    np.testing.assert_allclose(found, own, rtol=0, atol=1e-4)
    other = output.hidden_states[1].flatten(0, 1).numpy()
    assert np.abs(head.features(1, other) @ head.weight.T + head.bias(1) - own).max() > 0.05


def test_a_family_without_masked_language_models_is_refused(tmp_path: Path) -> None:
    folder = make_family("gpt2", tmp_path)
    with pytest.raises(InputError, match=r"my-gpt2 has no MLM head: gpt2 is not.*take a checkp"):
        load_mlm_head(folder, "my-gpt2")


def test_a_checkpoint_without_the_heads_weights_is_refused(tmp_path: Path) -> None:
    folder = make_family("bert", tmp_path)  # the encoder alone
    with pytest.raises(InputError, match=r"lack \d of the BertForMaskedLM's \(cls\.predictions"):
        load_mlm_head(folder, "my-bert")


def test_a_checkpoint_without_a_part_of_the_head_is_refused(tmp_path: Path) -> None:
    folder = made("roberta", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.layer_norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lack 1 of .*\(lm_head\.layer_norm\.weight\)"):
        load_mlm_head(folder, "mine")


def test_a_head_that_is_no_linear_decoder_of_the_last_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertForMaskedLM

    folder = made("bert", tmp_path)
    real = BertForMaskedLM.forward

    def capped(self: Any, *args: Any, **given: Any) -> Any:
        output = real(self, *args, **given)
        output.logits = output.logits.tanh() if "input_ids" in given else output.logits
        return output

    monkeypatch.setattr(BertForMaskedLM, "forward", capped)
    with pytest.raises(InputError, match="BertForMaskedLM are not a transform and a linear"):
        load_mlm_head(folder, "capped")


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_a_decoders_output_layer_gives_its_own_logits(name: str, tmp_path: Path) -> None:
    folder = make_family(name, tmp_path, AutoModelForCausalLM)
    weights = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    for value in weights.values():
        if value.dim() == 1:
            value += 0.3 * torch.randn(value.shape, generator=random)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert is_causal(model.config)
    ids = torch.randint(5, 40, (3, 21), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = model(input_ids=ids, output_hidden_states=True)
    own = output.logits.flatten(0, 1).numpy()
    head = pickle.loads(pickle.dumps(load_causal_head(folder, name, [2, 1])))
    last, first = (output.hidden_states[i].flatten(0, 1).numpy() for i in (2, 1))
    found = head.features(0, last) @ head.weight.T + head.bias(0)
    np.testing.assert_allclose(found, own, rtol=0, atol=1e-4)
    norm = model.transformer.ln_f if name == "gpt2" else model.model.norm
    with torch.inference_mode():
        wanted = model.get_output_embeddings()(norm(output.hidden_states[1])).flatten(0, 1)
    found = head.features(1, first) @ head.weight.T + head.bias(1)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=1e-4)


def test_a_decoder_whose_logits_are_bent_or_missing_is_refused(tmp_path: Path) -> None:
    alone = make_family("llama", tmp_path / "alone")
    with pytest.raises(InputError, match="mine has no output layer over its vocabulary"):
        load_causal_head(alone, "mine", [0])
    assert not is_causal(AutoConfig.from_pretrained(make_family("bert", tmp_path / "bert")))
