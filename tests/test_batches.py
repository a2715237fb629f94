"""Batches of a forward pass become examples: padding, layers and hooks; misfits are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bertvision import ActivationStore
from bertvision.errors import InputError
from bertvision.featurestore.writing.appending import ActivationWriter

HIDDEN, LENGTHS = 8, [5, 2, 7]
MASKS = {
    "right": torch.tensor([[int(i < n) for i in range(7)] for n in LENGTHS]),
    "left": torch.tensor([[int(i >= 7 - n) for i in range(7)] for n in LENGTHS]),
}
TUPLE = tuple(
    torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(4)
)


def writer(root: Path, layers: list[int], split: str = "dev", **options: Any) -> ActivationWriter:
    options = {"encoding": "float32", "hidden_size": HIDDEN, "layers": layers} | options
    return ActivationStore.create(root / "store").writer("0e", split, **options)


def true(mask: Tensor, layers: list[int]) -> list[Tensor]:
    """(seq, hidden, layers) of each example."""
    return [torch.stack([TUPLE[i][b][mask[b] == 1] for i in layers], -1) for b in range(3)]


@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize("form", ["all layers", "these layers", "one tensor", "turned", "single"])
def test_a_batch_is_its_examples_without_padding(tmp_path: Path, side: str, form: str) -> None:
    mask, layers = MASKS[side], [2] if form == "single" else [0, 3]
    chosen = [TUPLE[i] for i in layers]
    states, options = {
        "all layers": (TUPLE, {}),
        "these layers": (chosen, {}),
        "one tensor": (torch.stack(chosen, dim=2), {}),
        "turned": (torch.stack(chosen).numpy(), {"dims": ("layers", "batch", "seq", "hidden")}),
        "single": (TUPLE[2], {}),
    }[form]
    ids = torch.arange(21).view(3, 7)
    with writer(tmp_path, layers) as out:
        out.add_batch(
            *("abc", states, mask),
            input_ids=ids,
            labels={"label": torch.tensor([4, 5, 6])},
            fields={"loss": ids.float()},
            **options,
        )
        split = out.finish()
    assert split.table()["id"].to_pylist() == ["a", "b", "c"]
    for stored, expected in zip(split, true(mask, layers), strict=True):
        assert torch.equal(stored, expected)
    assert split.labels["label"].tolist() == [4, 5, 6]
    real = np.concatenate([ids[b][mask[b] == 1].numpy() for b in range(3)])
    assert np.array_equal(split.array("input_ids")[:14], real)
    assert np.array_equal(split.array("loss")[:14], real)


def test_without_a_mask_nothing_is_padding(tmp_path: Path) -> None:
    with writer(tmp_path, [1]) as out:
        out.add_batch([1, 2, 3], TUPLE[1])
        assert [len(states) for states in out.finish()] == [7, 7, 7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": "ab"}, "2 keys were given for 3 examples"),
        ({"hidden_states": TUPLE[:3]}, r"3 layers were given, and the split has \[0, 3\]"),
        ({"hidden_states": TUPLE[0]}, "a tensor (batch, seq, 8) for each layer"),
        ({"hidden_states": (TUPLE[0], TUPLE[1][:, :6])}, r"layer 3 is \(3, 6, 8\)"),
        ({"attention_mask": MASKS["left"][:2]}, r"attention_mask is \(2, 7\)"),
        ({"attention_mask": MASKS["left"] * torch.tensor([[1], [0], [1]])}, "row 1 of attention_m"),
        ({"input_ids": torch.zeros(3, 6)}, r"input_ids is \(3, 6\): give \(batch, seq"),
        ({"keys": "aba"}, "keys hold 'a' twice"),
        ({"keys": 5}, "1 keys were given for 3 examples"),
        ({"hidden_states": (TUPLE[0], None)}, "layer 1 given: NoneType is no array"),
        ({"hidden_states": (TUPLE[0], TUPLE[1].to_sparse())}, "layer 1 given is sparse"),
        ({"dims": ("batch", "seq", "hidden", "layers")}, r"dims=.*: leave them out"),
        (
            {"attention_mask": (MASKS["left"] - 1.0) * 1e9},
            r"attention_mask holds -1000000000\.0",
        ),
        ({"attention_mask": MASKS["left"] * 2}, "attention_mask holds 2: give 1 or True"),
        ({"attention_mask": [[1], [1, 1]]}, "attention_mask: list is no array"),
        ({"labels": {"label": [1, 2]}}, r"labels label are \(2,\): give one for each of 3"),
        ({"hidden_states": torch.zeros(3, 7, 2, 8), "dims": ("a",)}, "dims=.*in the array's order"),
    ],
)
def test_what_does_not_go_together_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    given = {"keys": "abc", "hidden_states": TUPLE, "attention_mask": MASKS["right"]} | change
    pattern = message if "\\" in message or ".*" in message else re.escape(message)
    with writer(tmp_path, [0, 3]) as out:
        with pytest.raises(InputError, match=pattern):
            out.add_batch(**given)
        assert len(out) == 0


class Blocks(nn.Module):
    """Two layers, and a third that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.idle = nn.Linear(1, 1)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


def test_a_hook_keeps_what_modules_give_and_goes_away(tmp_path: Path) -> None:
    model, x, mask = Blocks(), torch.randn(3, 7, 4), MASKS["left"]
    with writer(tmp_path, [0, 1]) as out:
        with out.hook(model, ["first", "second"], keys="xyz"):
            model(x, attention_mask=mask)
        model(x)
        split = out.finish()
    expected = torch.stack([model.first(x), model(x)], dim=-1)
    for i in range(3):
        assert torch.equal(split[i], expected[i][mask[i] == 1])
    assert split.table()["id"].to_pylist() == ["x", "y", "z"]


def test_a_hook_on_transformers_keeps_hidden_states_and_goes_on(tmp_path: Path) -> None:
    """The same loop again passes over what is there, and computes the rest."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = BertModel(config).eval()
    ids = [torch.randint(0, 30, (3, 7)), torch.randint(0, 30, (3, 7))]
    for batches in (1, 2):
        with writer(tmp_path, [0, 1, 2]) as out, torch.no_grad():
            with out.hook(model):
                for batch in ids[:batches]:
                    model(input_ids=batch, attention_mask=MASKS["right"])
            assert len(out) == 3 * batches
    with writer(tmp_path, [0, 1, 2]) as out:
        split = out.finish()
    states = model(ids[1], MASKS["right"], output_hidden_states=True).hidden_states
    own = dict(zip(split.table()["id"].to_pylist(), range(6), strict=True))
    place = split.plan.example_id.tolist().index(own["4"])
    assert torch.allclose(split[place], torch.stack([h[1, :2] for h in states], -1), atol=1e-6)
    assert np.array_equal(split.array("input_ids")[:5], ids[0][0, :5].numpy())


def test_a_hook_keeps_the_logits_of_the_model_where_some_are_stored(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_embd=HIDDEN, n_layer=1, n_head=2, n_positions=7)
    model, ids = GPT2LMHeadModel(config).eval(), torch.randint(0, 30, (3, 7))
    given = {"input_ids": ids, "attention_mask": MASKS["right"]}
    with torch.no_grad():
        out = model(**given, output_hidden_states=True)
        for split in ("batch", "hook", "none"):
            top = None if split == "none" else "top:5"
            with writer(tmp_path, [0, 1], split, logits=top) as to:
                if split == "batch":
                    to.add_batch(range(3), out.hidden_states, MASKS["right"], logits=out.logits)
                else:
                    with to.hook(model):
                        model(**given)
                to.finish()
        store = ActivationStore.open(tmp_path / "store")["0e"]
        for i in range(3):
            hooked, batched = store["hook"].logits(i), store["batch"].logits(i)
            assert all(torch.equal(a, b) for a, b in zip(hooked, batched, strict=True))
        with pytest.raises(InputError, match="no log-probabilities"):
            store["none"].logits(0)
        with (
            writer(tmp_path, [0, 1], "states", logits="top:5") as to,
            pytest.raises(InputError, match="comes without logits"),
            to.hook(model.transformer),
        ):
            model.transformer(**given)


@pytest.mark.parametrize(
    ("modules", "keys", "message"),
    [
        (["first"], None, "name one for each of the 2 layers that 0e/dev has"),
        ("first", None, "modules='first': give a list of names"),
        (["first", "first"], None, "name each once"),
        (["first", "second"], "xyx", "keys hold 'x' twice"),
        (["frist", "second"], None, "Blocks has no module 'frist': did you mean first?"),
        (["first", "idle"], None, "module idle was not called in this forward pass"),
        (["first", "second"], "x", "keys end before the batch of 3 examples"),
        (None, None, "Blocks takes no output_hidden_states: name modules="),
    ],
)
def test_a_hook_that_cannot_work_is_named(
    tmp_path: Path, modules: list[str] | None, keys: str | None, message: str
) -> None:
    model = Blocks()
    with (
        writer(tmp_path, [0, 1]) as out,
        pytest.raises(InputError, match=message),
        out.hook(model, modules, keys),
    ):
        model(torch.randn(3, 7, 4))


def test_a_batch_of_which_a_part_is_there_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    with writer(tmp_path, [1]) as out:
        out.add_batch(torch.tensor([7, 8, 9]), TUPLE[1])
        with pytest.raises(InputError, match="has 1 of these 3 examples already, '9' first"):
            out.add_batch([6, 9, 5], TUPLE[1])
        assert list(out) == ["7", "8", "9"]


def test_layers_of_different_types_and_inference_tensors_are_stored(tmp_path: Path) -> None:
    with writer(tmp_path, [0, 3]) as out, torch.inference_mode():
        out.add_batch("abc", (TUPLE[0].clone(), TUPLE[3].bfloat16()), MASKS["left"])
    with writer(tmp_path, [0, 3]) as out:
        split = out.finish()
    expected = torch.stack([TUPLE[0][0], TUPLE[3][0].bfloat16().float()], -1)
    assert torch.equal(split[0], expected[MASKS["left"][0] == 1])


def test_tensors_are_not_taken_for_the_first_of_the_named_layers(tmp_path: Path) -> None:
    with (
        writer(tmp_path, ["conv", "top"]) as out,  # type: ignore[list-item]
        pytest.raises(InputError, match=r"4 layers were .* the split has \['conv', 'top'\]"),
    ):
        out.add_batch("abc", TUPLE)


class Loose(Blocks):
    """Names no arguments, changes a module's output in place, and may call a module twice."""

    again = False

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        first = self.first(args[0] if args else kwargs["x"])
        if self.again:
            self.first(kwargs["x"])
        return self.second(first.tanh_())  # type: ignore[no-any-return]


def test_a_hook_keeps_an_output_as_it_was_and_refuses_what_it_cannot_tell(tmp_path: Path) -> None:
    model, x = Loose(), torch.randn(3, 7, 4)
    with writer(tmp_path, [0, 1]) as out:
        with out.hook(model, ["first", "second"]), torch.no_grad():
            model(x=x, attention_mask=MASKS["left"])
            with pytest.raises(InputError, match="does not name its arguments"):
                model(x, MASKS["left"])
            model.again = True
            with pytest.raises(InputError, match="first was called twice in this forward pass"):
                model(x=x)
            model.again = False
        with out.hook(model, ["first", "second"]):  # further numbers
            model(x=x)
        split = out.finish()
    assert split.table()["id"].to_pylist() == ["0", "1", "2", "3", "4", "5"]
    assert torch.equal(split[0][..., 0], model.first(x)[0][MASKS["left"][0] == 1])


def test_numbers_from_0_are_for_one_process_and_generation_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_embd=HIDDEN, n_layer=1, n_head=2, n_positions=16)
    model = GPT2LMHeadModel(config).eval()
    with writer(tmp_path, [0, 1], part=1) as out:
        with pytest.raises(InputError, match="keys are None and part is 1"), out.hook(model):
            pass
        with (
            out.hook(model, keys="ab"),
            pytest.raises(InputError, match="continues a cache .* call the model once on"),
        ):
            model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, pad_token_id=0)
