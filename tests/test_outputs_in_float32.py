"""Output layers compute in float32, so that no two tokens are equal by rounding alone."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from bertvision.models.factory import build_head
from bertvision.pipelines.encoders.loading import Float32Linear, load_model, new_model


def test_tokens_that_differ_by_less_than_bfloat16_tells_keep_different_logits() -> None:
    head = build_head("last-layer", layers=2, hidden=2)
    head.output.weight.data = torch.tensor([[1.0, 2**-9], [2**-9, 1.0]])  # type: ignore[union-attr]
    states = torch.ones(2, 2, 2)
    states[1, :, 1] = 2.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = head(states.bfloat16(), torch.tensor([2]))
    start, end = output.start_logits[0], output.end_logits[0]
    assert (start[1] - start[0]).item() == 2**-9  # 1 + 2⁻⁹ has no place in bfloat16
    assert (end[1] - end[0]).item() == 1


def test_an_encoders_output_layer_is_float32_and_its_encoder_is_not(tiny_bert: Path) -> None:
    model = load_model(tiny_bert, AutoModelForQuestionAnswering)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        states = model.base_model(input_ids=torch.tensor([[1, 5, 2]])).last_hidden_state
        logits = model.qa_outputs(states)
    dense = model.base_model.encoder.layer[0].output.dense
    assert (type(model.qa_outputs), type(dense)) == (Float32Linear, torch.nn.Linear)
    expected = states.double() @ model.qa_outputs.weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected + model.qa_outputs.bias.double())


def test_every_way_to_a_model_keeps_its_outputs_in_float32(tiny_bert: Path, tmp_path: Path) -> None:
    config = load_model(tiny_bert).config
    made = new_model(config, AutoModelForSequenceClassification, seed=0)
    assert type(made.classifier) is Float32Linear
    made.save_pretrained(tmp_path)
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path)  # any reader may have it
    assert type(read.classifier) is torch.nn.Linear
    assert torch.equal(read.classifier.weight, made.classifier.weight)
    alone = load_model(tiny_bert, AutoModel)
    assert not any(isinstance(module, Float32Linear) for module in alone.modules())
