"""Families at large: stored states are those of each text alone, or the family is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import HIDDEN, LAYERS, MORE_FAMILIES, Family, _word_piece, make_family
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import bertvision
from bertvision import ActivationStore
from bertvision.errors import BertvisionError, InputError
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.encoders.padding_trial import distance
from bertvision.pipelines.tasks.windows import Windows, collate

WORDS = ["the", "anna", "founded", "rome", "who", "in"]
LENGTHS = (1, 2, 3, 9, 10, 11, 12, 20, 21, 22, 22, 40, 42, 43, 90, 95, 96, 1)


def family(kind: str) -> Family:
    return Family(kind, "BertTokenizer", _word_piece, MORE_FAMILIES[kind])


def write_texts(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> Path:
    """Texts of lengths that are padded together, and of some that are a block's."""
    path = folder / "texts.jsonl"
    texts = [
        " ".join(WORDS[(i + 3 * k + k * k) % 6] for k in range(n)) for i, n in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def states_alone(folder: Path, ids: Any) -> torch.Tensor:
    """(tokens, layers, hidden) of one text, by a model that has read nothing else."""
    model = AutoModel.from_pretrained(folder).eval()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    given = torch.tensor(ids.astype(np.int64))[None]
    with torch.inference_mode():
        states = model(input_ids=given, output_hidden_states=True).hidden_states
    return torch.stack([state[0, : len(ids)] for state in states], dim=1)


def extract(folder: Path, space: Path, **options: Any) -> Any:
    data = write_texts(folder)
    bertvision.extract(
        *("0e",),
        **{"model": folder, "task": "text", "data": data, "max_length": 120, "workspace": space},
        **{"encoding": "float32", "precision": "32", **options},
    )
    return ActivationStore.open(space / "activations")


def furthest(folder: Path, split: Any) -> float:
    """How far the states of a split are from those of each text alone."""
    ids, plan = split.array("input_ids"), split.plan
    apart = [0.0]
    for example in range(len(split)):
        begin, count = int(plan.first_token[example]), int(plan.n_tokens[example])
        truth = states_alone(folder, ids[begin : begin + count])
        apart.append(distance(split[example].transpose(1, 2), truth))
    return max(apart)


@pytest.mark.parametrize(
    ("kind", "together"),
    [
        ("fnet", "equal"),
        ("convbert", "equal"),
        ("big_bird", "equal"),
        ("nystromformer", "equal"),
        ("albert", "like"),
    ],
)
def test_windows_stand_together_as_far_as_none_changes_the_others(
    kind: str, together: str, tmp_path: Path
) -> None:
    folder = make_family(family(kind), tmp_path / kind)
    split = extract(folder, tmp_path / "space")["0e/texts-all"]
    assert furthest(folder, split) < 1e-4
    attention = str(split.record.provenance["attn_implementation"])
    assert attention.endswith("-of-equal-lengths") == (together == "equal")


def test_poolings_are_those_of_windows_alone_too(tmp_path: Path) -> None:
    folder = make_family(family("fnet"), tmp_path / "fnet")
    store = extract(folder, tmp_path / "space")
    states = {int(row): states for row, states in zip(*_rows(store["0e/texts-all"]), strict=True)}
    other = extract(folder, tmp_path / "other", pool="mean,cls")
    for pooling in ("mean", "cls"):
        rows, pooled = _rows(other[f"0e/texts-all-{pooling}"])
        for row, given in zip(rows, pooled, strict=True):
            whole = states[int(row)]
            truth = whole[:1] if pooling == "cls" else whole.mean(dim=0, keepdim=True)
            depth = truth.shape[1]
            torch.testing.assert_close(given[:, :depth], truth, rtol=1e-5, atol=1e-5)


def _rows(split: Any) -> tuple[Any, list[torch.Tensor]]:
    return split.plan.example_id, [split[i].transpose(1, 2) for i in range(len(split))]


def test_lengths_of_the_data_are_tried_too(tmp_path: Path) -> None:
    """Rotations that are scaled from some length on change a short window beside a long one."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 42}
    settings = {"num_key_value_heads": 2, "rope_parameters": rope | factors}
    folder = make_family(family("phi3")._replace(settings=settings), tmp_path / "phi3")
    split = extract(folder, tmp_path / "space")["0e/texts-all"]
    assert furthest(folder, split) < 1e-4


def test_the_audit_computes_each_window_by_itself(tmp_path: Path) -> None:
    """States that padding has changed are found, though a batch would change them alike."""
    folder = make_family(family("fnet"), tmp_path / "fnet")
    model = load_model(folder)
    rng = np.random.default_rng(0)
    lengths = [30, 30, 28, 27]
    ids = np.concatenate([[2, *rng.integers(5, 50, n - 2), 3] for n in lengths]).astype(np.int32)
    windows = Windows(
        **{"input_ids": ids, "token_type_ids": np.zeros(len(ids), np.uint8)},
        **{"offset_mapping": np.zeros((len(ids), 2), np.int32), "labels": {}},
        **{"n_tokens": np.array(lengths, np.int32), "item_index": np.arange(4, dtype=np.int32)},
    )
    batch = collate(windows, windows.first_token, np.arange(4), 0)
    with torch.inference_mode():
        states = torch.stack(model(**batch.text, output_hidden_states=True).hidden_states, dim=2)
    store = ActivationStore.create(tmp_path / "store")
    given = {"hidden_size": HIDDEN, "layers": range(LAYERS + 1), "encoding": "float32"}
    with store.writer("0e", "s", **given) as writer:
        for i, n in enumerate(lengths):
            writer.add(f"{i}", states[i, :n], input_ids=batch.input_ids[i, :n])
        writer.finish()
    audited = bertvision.audit("0e/s", model=folder, store=tmp_path / "store")
    assert [finding["key"] for finding in audited.to_json()["findings"]] == ["2", "3"]


@pytest.mark.parametrize(
    "kind", ["lilt", "reformer", "bros", pytest.param("perceiver", marks=pytest.mark.slow)]
)
def test_a_family_that_cannot_be_computed_is_refused_in_a_sentence(
    kind: str, tmp_path: Path
) -> None:
    folder = make_family(family(kind), tmp_path / kind)
    with pytest.raises(InputError, match=f"{kind} (model cannot compute|gives hidden states)"):
        extract(folder, tmp_path / "space")


def test_a_model_that_gives_nan_is_left_to_the_check_of_what_is_stored(tmp_path: Path) -> None:
    folder = make_family(family("albert"), tmp_path / "albert")
    model = load_model(folder)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    encoder = Encoder(model, {"all": [LAYERS]}, "32")
    assert encoder.attention == "sdpa"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_family_is_right_or_refused(tmp_path: Path) -> None:
    right, refused, wrong = [], {}, {}
    for kind in (kind for kind in MORE_FAMILIES if kind in CONFIG_MAPPING):
        folder, space = tmp_path / kind, tmp_path / f"{kind}-space"
        make_family(family(kind), folder)
        try:
            split = extract(folder, space)["0e/texts-all"]
        except BertvisionError as error:
            refused[kind] = str(error)
            continue
        apart = furthest(folder, split)
        if apart > 1e-3:
            wrong[kind] = apart
        right.append(kind)
    assert not wrong
    assert all(kind in message for kind, message in refused.items())
    assert len(right) >= 70
