"""Log-probabilities of next tokens: those of the model, at every door, and who refuses them."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from families import FAMILIES, make_family
from stores import Made, shard_path
from transformers import AutoModelForCausalLM

import bertvision
from bertvision import ActivationLoader, ActivationStore, shuffle_tokens
from bertvision.errors import (
    CorruptStoreError,
    FormatVersionError,
    InputError,
    ProvenanceError,
)
from bertvision.featurestore.format import ledger
from bertvision.featurestore.format.logits import OUTPUTS, TopLogits, TopRule
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.extraction.extract import repair
from bertvision.pipelines.workspace.reproduce import extraction_command
from bertvision.pipelines.workspace.workspace import Workspace

TEXTS = ["who founded rome?", "when? in 1901", "anna", "the the the 7 - x. boris", "a b c"]
K = 5
EXACT: dict[str, Any] = {"encoding": "float32", "precision": "32"}
DECODERS = {
    "gpt2": FAMILIES["gpt2"],
    "gemma2": FAMILIES["llama"]._replace(  # which caps its logits
        model_type="gemma2",
        settings={"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 0.5},
    ),
}


def expected(model: Any, ids: Any, k: int = K) -> TopLogits:
    """The same in float64, by a softmax over the whole vocabulary."""
    with torch.no_grad():
        logits = model(torch.as_tensor(np.asarray(ids, np.int64))[None]).logits[0].double()
    probabilities = logits.softmax(dim=1)
    best, indices = probabilities.topk(k, dim=1)
    return TopLogits(best.log(), indices.int(), 1 - best.sum(dim=1))


def check_same(stored: TopLogits, due: TopLogits) -> None:
    assert stored.topk_logprobs.dtype == stored.tail_mass.dtype == torch.float32
    assert torch.equal(stored.topk_indices, due.topk_indices)
    torch.testing.assert_close(stored.topk_logprobs.double(), due.topk_logprobs, atol=3e-6, rtol=0)
    torch.testing.assert_close(stored.tail_mass.double(), due.tail_mass, atol=3e-6, rtol=0)


@pytest.fixture(scope="module", params=DECODERS)
def space(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """States and log-probabilities of a tiny decoder for a few texts."""
    root = tmp_path_factory.mktemp("next")
    rows = [json.dumps({"id": f"t{i}", "text": text}) for i, text in enumerate(TEXTS)]
    (root / "texts.jsonl").write_text("\n".join(rows))
    decoder = make_family(DECODERS[request.param], root / "decoder", AutoModelForCausalLM)
    data: dict[str, Any] = {"task": "text", "data": root / "texts.jsonl", "model": decoder}
    bertvision.extract(
        "0e", pool="none", workspace=root / "workspace", logits=f"top:{K}", **data, **EXACT
    )
    return Workspace.find(root / "workspace")


def stored(space: Workspace) -> ActivationSplit:
    split: ActivationSplit = ActivationStore.open(space.root / "activations")["0e/texts-all"]
    return split


def ids_of(split: ActivationSplit, example: int) -> Any:
    first = int(split.plan.first_token[example])
    return split.array("input_ids")[first : first + int(split.plan.n_tokens[example])]


def test_extracted_log_probabilities_are_those_of_the_model(space: Workspace) -> None:
    split = stored(space)
    model = AutoModelForCausalLM.from_pretrained(space.config.model.name_or_path).eval()
    for i in range(len(split)):
        check_same(split.logits(i), expected(model, ids_of(split, i)))
    assert f"log-probabilities: top:{K}" in repr(split)
    assert split.verify() == []
    assert f"--logits top:{K}" in extraction_command(split, "all")


def test_every_door_gives_the_same(space: Workspace) -> None:
    split = stored(space)
    each = [split.logits(i) for i in range(len(split))]
    batch = split.read([3, 0, 4], logits=True)
    assert split.read([3]).logits is None
    joined = map(torch.cat, zip(each[3], each[0], each[4], strict=True))
    assert all(map(torch.equal, batch.logits or (), joined))
    for readers in (0, 2):
        for got in ActivationLoader(split, batch_size=2, logits=True, readers=readers):
            parts = [each[i] for i in got.examples.tolist()]
            for one, other in zip(got.logits or (), zip(*parts, strict=True), strict=True):
                assert torch.equal(one, torch.cat(other))
    tokens = 0
    for got_tokens in split.tokens(-1, batch_size=7, logits=True, buffer=1):
        places = zip(got_tokens.examples.tolist(), got_tokens.positions.tolist(), strict=True)
        top = got_tokens.to("cpu").logits
        assert top is not None
        for row, (example, position) in enumerate(places):
            for one, other in zip(top, each[example], strict=True):
                assert torch.equal(one[row], other[position])
            tokens += 1
    assert tokens == split.record.tokens
    view = split.to_xarray()
    assert view.topk_logprobs.dims == ("token", "topk")
    assert view.tail_mass.dims == ("token",)
    for name in OUTPUTS:
        whole = np.concatenate([getattr(top, name) for top in each])
        assert np.array_equal(view[name].values, whole)


def test_kept_tokens_have_theirs(space: Workspace) -> None:
    whole = stored(space)
    rows = {int(row): i for i, row in enumerate(whole.plan.example_id)}
    (done,) = bertvision.extract(
        "0e",
        workspace=space.root,
        task="texts",
        keep="every:2",
        logits=f"top:{K}",
        sites=["blocks.0.hook_mlp_out"],
        store=space.root / "kept",
        **EXACT,
    )
    split = ActivationStore.open(space.root / "kept")["0e"][done.split]
    for i in range(len(split)):
        there = whole.logits(rows[int(split.plan.example_id[i])])
        for one, other in zip(split.logits(i), there, strict=True):
            torch.testing.assert_close(one, other[split.positions(i)], atol=1e-6, rtol=1e-6)


def test_a_flipped_byte_is_found_and_repaired(space: Workspace) -> None:
    split = stored(space)
    for name in OUTPUTS:
        path = shard_path(split, name, 0)
        before = path.read_bytes()
        path.write_bytes(bytes([before[0] ^ 1]) + before[1:])
        damaged = stored(space)
        with pytest.raises(CorruptStoreError, match=f"shard 0: {name} was changed on the disk"):
            damaged.logits(0)
        assert damaged[0].shape  # the hidden states are whole
        assert any(f"{name} was changed" in what for what in damaged.verify())
        assert repair(space, "0e", "texts-all").shards == [0]
        assert path.read_bytes() == before


def test_other_numbers_are_refused_and_so_are_encoders_and_poolings(
    space: Workspace, tiny_bert: Path
) -> None:
    where: dict[str, Any] = {
        **{"workspace": space.root, "task": "texts", "pool": "none", **EXACT},
        "store": space.root / "activations",
    }
    with pytest.raises(ProvenanceError, match="written with logits = 'top:5', now it is 'top:4'"):
        bertvision.extract("0e", logits="top:4", **where)
    with pytest.raises(ProvenanceError, match="written with logits = 'top:5', now it is None"):
        bertvision.extract("0e", **where)
    with pytest.raises(InputError, match="--logits top:2 beside --pool mean"):
        bertvision.extract("0e", logits="top:2", **where | {"pool": "mean"})
    with pytest.raises(InputError, match="logits is 'top:0': give top:K"):
        bertvision.extract("0e", logits="top:0", **where)
    with pytest.raises(InputError, match="tokens in its vocabulary"):
        bertvision.extract("0e", logits="top:999", **where | {"store": space.root / "many"})
    with pytest.raises(InputError, match="does not name the token that follows"):
        bertvision.extract(
            "0e",
            **{"task": "text", "data": space.root.parent / "texts.jsonl", "model": tiny_bert},
            **{"pool": "none", "workspace": space.root.parent / "bert", "logits": "top:2"},
        )


def test_generated_texts_have_theirs(space: Workspace, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(space.config.model.name_or_path).eval()
    options: dict[str, Any] = {
        "model": space.config.model.name_or_path,
        "data": space.root.parent / "texts.jsonl",
        **{"max_new_tokens": 6, "batch_size": 3, **EXACT},
    }
    for keep in (None, "completion"):
        store = tmp_path / str(keep)
        bertvision.generate("0e/s", logits=f"top:{K}", keep=keep, store=store, **options)
        split = ActivationStore.open(store)["0e/s"]
        assert split.record.top == TopRule(K)
        if keep is None:
            whole = {int(split.plan.example_id[i]): ids_of(split, i) for i in range(len(split))}
        for i in range(len(split)):
            due = expected(model, whole[int(split.plan.example_id[i])])
            check_same(split.logits(i), due.map(itemgetter(split.positions(i))))


def test_the_output_layer_is_computed_in_float32_whatever_the_precision(
    space: Workspace, tmp_path: Path
) -> None:
    """One of bfloat16 would give a few values alone, and equal ones in a row."""
    options: dict[str, Any] = {"max_new_tokens": 4, "precision": "bf16", "logits": "top:20"}
    model, data = space.config.model.name_or_path, space.root.parent / "texts.jsonl"
    bertvision.generate("0e/s", model=model, data=data, store=tmp_path, **options)
    split = ActivationStore.open(tmp_path)["0e/s"]
    whole = AutoModelForCausalLM.from_pretrained(model).eval()
    for i in range(len(split)):
        top, due = split.logits(i), expected(whole, ids_of(split, i), 20)
        torch.testing.assert_close(
            top.topk_logprobs.double(), due.topk_logprobs, atol=0.05, rtol=0.01
        )
        assert not torch.equal(top.topk_logprobs.bfloat16().float(), top.topk_logprobs)
        assert len(top.topk_logprobs.unique()) > 0.95 * top.topk_logprobs.numel()


@pytest.mark.parametrize("encoding", ["int8", "transform:0.1", "bfloat16"])
def test_they_lie_beside_every_encoding(encoding: str, tmp_path: Path) -> None:
    made = Made([9, 20, 31, 5, 17], encoding=encoding, top=3, shard_tokens=32)
    split = made.write(tmp_path)
    assert made.logits is not None
    for i, row in enumerate(split.plan.example_id.tolist()):
        for one, other in zip(split.logits(i), made.logits[row], strict=True):
            assert np.array_equal(one, other)
    assert split.verify() == []
    zarr_array = zarr.open_group(tmp_path / "arrays.zarr", mode="r")["1e/train/topk_indices"]
    assert np.array_equal(zarr_array[:], split.array("topk_indices"))


def test_shuffled_tokens_keep_theirs(tmp_path: Path) -> None:
    made = Made([9, 20, 31, 5, 17], top=3, shard_tokens=32)
    source = made.write(tmp_path)
    shuffle_tokens("1e/train", "mixed", seed=3, store=tmp_path)
    mixed = ActivationStore.open(tmp_path)["1e/mixed"]
    seen = 0
    for batch in mixed.tokens(0, batch_size=16, shuffle=False, logits=True):
        for row, (i, place) in enumerate(zip(batch.examples, batch.positions, strict=True)):
            there = source.logits(int(i))
            assert batch.logits is not None
            assert all(
                torch.equal(one[row], other[int(place)])
                for one, other in zip(batch.logits, there, strict=True)
            )
            seen += 1
    assert seen == source.record.tokens
    assert mixed.verify() == []


def test_a_writer_takes_logits_and_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path)
    options: dict[str, Any] = {"hidden_size": 8, "layers": [0], "logits": "top:3"}
    states, logits = torch.randn(4, 1, 8), torch.randn(4, 10)
    with pytest.raises(InputError, match="provenance has logits.*give logits='x'"):
        store.writer("0e", "no", hidden_size=8, layers=[0], provenance={"logits": "x"})
    with store.writer("0e", "dev", keep="from:1", **options) as writer:
        for given, message in (
            (None, "'a' comes without logits"),
            (logits[:, :2], "top:3 takes"),
            (logits[:3], "of shapes"),
            (logits * torch.nan, "hold NaN"),
        ):
            with pytest.raises(InputError, match=message):
                writer.add("a", states, logits=given)
        with pytest.raises(InputError, match="'topk_indices' is a name that the store uses itself"):
            writer.add("a", states, logits=logits, fields={"topk_indices": [0] * 4})
        writer.add("a", states, logits=logits)
        split = writer.finish()
    due = TopRule(3).of(logits[1:])
    assert all(map(torch.equal, split.logits(0), due))
    with store.writer("0e", "batch", **options) as writer:
        padded = torch.stack([logits, logits.flip(0)]).bfloat16()
        mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
        writer.add_batch("ab", torch.randn(2, 4, 8), mask, logits=padded)
        batch = writer.finish()
    for i, row in enumerate((padded[0, :3], padded[1, 1:])):
        assert all(map(torch.equal, batch.logits(i), TopRule(3).of(row)))
    with (
        store.writer("0e", "plain", hidden_size=8, layers=[0]) as writer,
        pytest.raises(InputError, match="'a' comes with logits"),
    ):
        writer.add("a", states, logits=logits)
    with store.writer("0e", "plain", hidden_size=8, layers=[0]) as writer:
        writer.add("a", states)
        plain = writer.finish()
    for use in (
        lambda: plain.logits(0),
        lambda: plain.read([0], logits=True),
        lambda: ActivationLoader(plain, logits=True),
        lambda: plain.tokens(logits=True),
    ):
        with pytest.raises(InputError, match="0e/plain has no log-probabilities of next tokens"):
            use()


def test_a_version_that_does_not_know_them_refuses_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Made([4, 5], top=2).write(tmp_path)
    monkeypatch.setattr(ledger, "_KNOWN", ledger._KNOWN - {"top_logits"})
    with pytest.raises(FormatVersionError, match="needs top_logits"):
        ActivationSplit(tmp_path, "1e", "train")


def test_a_small_rest_keeps_its_digits() -> None:
    logits = torch.zeros(1, 100)
    logits[0, :2] = 40.0
    (mass,) = TopRule(2).of(logits).tail_mass.double()
    due = 98 * torch.exp(torch.tensor(-40.0, dtype=torch.float64)) / 2
    torch.testing.assert_close(mass, due, rtol=1e-5, atol=0)
