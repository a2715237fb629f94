"""Some tokens of each example: rules, the positions that are stored, and who needs all tokens."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from numpy.typing import NDArray
from stores import shard_path

import bertvision
from bertvision import ActivationStore
from bertvision.errors import InputError, ProvenanceError
from bertvision.featurestore.format.keeping import Keep
from bertvision.pipelines.analysis.sides import joined_rows
from bertvision.pipelines.extraction.extract import repair
from bertvision.pipelines.workspace.reproduce import extraction_command
from bertvision.pipelines.workspace.workspace import Workspace

PAIRS = [("who founded rome?", "anna"), ("when?", "in 1901"), ("who?", "boris"), ("a", "b c")]
EXACT: dict[str, Any] = {"encoding": "float32", "precision": "32"}


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """States of a tiny decoder for prompts with completions, of all tokens; tests add others."""
    folder = tmp_path_factory.mktemp("keep")
    rows = [json.dumps({"prompt": a + " ", "completion": b}) for a, b in PAIRS]
    (folder / "talks.jsonl").write_text("\n".join(rows))
    decoder = make_family("gpt2", folder / "gpt2")
    data = {"task": "chat", "data": folder / "talks.jsonl", "model": decoder}
    bertvision.extract("0e", pool="none", workspace=folder / "workspace", **data, **EXACT)
    return Workspace.find(folder / "workspace")


def expected(keep: str, length: int, mask: NDArray[Any]) -> NDArray[np.int64]:
    """Places that a rule keeps, said in another way than the code says it."""
    rules = {
        "completion": [i for i in range(length) if mask[i]],
        "from:2": [i for i in range(length) if i >= 2],
        "every:3": list(range(0, length, 3)),
    }
    return np.array(rules[keep], np.int64)


@pytest.mark.parametrize("keep", ["completion", "from:2", "every:3"])
def test_kept_tokens_are_those_of_a_whole_extraction(space: Workspace, keep: str) -> None:
    whole = ActivationStore.open(space.root / "activations")["0e/talks-all"]
    store = space.root / keep.replace(":", "")
    (done,) = bertvision.extract(
        "0e", workspace=space.root, task="talks", keep=keep, store=store, **EXACT
    )
    split = ActivationStore.open(store)["0e"][done.split]
    assert done.split.endswith("talks-all-kept")
    assert split.keep == split.info()["keep"] == keep
    assert f"kept: {keep}" in repr(split)
    rows = {int(row): i for i, row in enumerate(whole.plan.example_id)}
    mask, ids = whole.array("loss_mask"), whole.array("input_ids")
    offsets: list[int] = []
    for i in range(len(split)):
        place = rows[int(split.plan.example_id[i])]
        first, length = int(whole.plan.first_token[place]), int(whole.plan.n_tokens[place])
        positions = expected(keep, length, mask[first : first + length])
        assert np.array_equal(split.positions(i), positions)
        assert torch.equal(split[i], whole[place][positions])
        stored = slice(
            int(split.plan.first_token[i]), int(split.plan.first_token[i]) + len(split[i])
        )
        assert np.array_equal(
            split.array("input_ids")[stored], ids[first : first + length][positions]
        )
        offsets += positions.tolist()
    assert split.to_xarray().position.values.tolist() == offsets
    assert sum(len(b.vectors) for b in split.tokens(shuffle=False)) == split.record.tokens
    assert split.verify() == []
    command = extraction_command(split, "all")
    assert " --split all " in command
    assert f"--keep {keep}" in command


def test_a_kept_split_is_resumed_and_repaired_by_its_own_rule(space: Workspace) -> None:
    where: dict[str, Any] = {
        "workspace": space.root,
        "task": "talks",
        "store": space.root / "again",
    }
    (done,) = bertvision.extract("0e", keep="every:2", **where)
    with pytest.raises(ProvenanceError, match="written with keep = 'every:2', now it is 'from:1'"):
        bertvision.extract("0e", keep="from:1", **where)
    with pytest.raises(InputError, match="some tokens of each window: say which, --keep"):
        bertvision.extract("0e", split=done.split, pool="none", **where)
    made = space.at(str(where["store"]))
    split = made.split("0e", done.split)
    path = shard_path(split, "hidden_states", 0)
    before = path.read_bytes()
    path.write_bytes(bytes([before[0] ^ 255]) + before[1:])
    assert repair(made, "0e", done.split).shards == [0]
    assert path.read_bytes() == before


def test_windows_without_a_kept_token_are_left_out_and_counted(
    space: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    whole = ActivationStore.open(space.root / "activations")["0e/talks-all"]
    lengths = np.sort(whole.plan.n_tokens)
    where: dict[str, Any] = {"workspace": space.root, "task": "talks"}
    with caplog.at_level(logging.WARNING):
        (done,) = bertvision.extract(
            "0e", keep=f"from:{lengths[-1] - 1}", store=space.root / "few", **where, **EXACT
        )
    few = ActivationStore.open(space.root / "few")["0e"][done.split]
    longest = np.flatnonzero(whole.plan.n_tokens == lengths[-1])
    assert sorted(few.plan.example_id) == sorted(whole.plan.example_id[longest])
    assert f"{len(PAIRS) - len(few)} windows, which are left out" in caplog.text
    with pytest.raises(InputError, match=r"from:999: no token of 4 windows is kept"):
        bertvision.extract("0e", keep="from:999", store=space.root / "none", **where)


def test_what_needs_all_tokens_refuses_some_of_them_by_name(space: Workspace) -> None:
    store = ActivationStore.create(space.root / "own")
    with store.writer("0e", "dev", hidden_size=8, layers=[0, 1], keep="from:1") as writer:
        writer.add("a", torch.randn(4, 2, 8))
        split = writer.finish()
    own: dict[str, Any] = {"store": space.root / "own", "workspace": space.root}
    for use in (
        lambda: split.rounding_variance(first=True),
        lambda: bertvision.context("0e", split="dev", **own),
        lambda: bertvision.view("0e/dev", head="learned-pooling", **own),
    ):
        with pytest.raises(InputError, match="0e/dev keeps some tokens of each example"):
            use()


def test_analyses_that_pool_over_tokens_take_the_kept_ones(space: Workspace) -> None:
    """The same numbers as of a split that was written with these tokens alone."""
    store, generator = ActivationStore.create(space.root / "pooled"), torch.Generator()
    texts = [torch.randn(n, 2, 16, generator=generator.manual_seed(n)) for n in range(20, 30)]
    for split, keep in (("half", "every:2"), ("even", None), ("later", "from:2")):
        with store.writer("0e", split, hidden_size=16, layers=[0, 1], keep=keep) as writer:
            for i, states in enumerate(texts):
                writer.add(i, states[::2] if split == "even" else states)
            writer.finish()
    own: dict[str, Any] = {"store": space.root / "pooled", "workspace": space.root}
    half, even = (
        [
            bertvision.cka("0e", "0e", split=split, **own).cka,
            bertvision.rsa("0e", "0e", split=split, **own).of_pairs,
            bertvision.twonn("0e", split=split, **own).to_xarray().dimension,
            bertvision.isotropy("0e", split=split, **own).mean_cosine[:, :1],
        ]
        for split in ("half", "even")
    )
    for one, other in zip(half, even, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert bertvision.isotropy("0e", split="half", **own).sets == ("tokens",)
    x, y = store["0e"]["half"], store["0e"]["later"]
    with pytest.raises(ProvenanceError, match="do not hold the same tokens"):
        joined_rows([x, y])


def test_places_tell_kept_tokens_apart_where_their_numbers_agree(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path)
    for split, keep in (("first", "every:2"), ("last", "from:2"), ("whole", None)):
        with store.writer("0e", split, hidden_size=8, layers=[0], keep=keep) as writer:
            writer.add("a", torch.ones(2 if keep is None else 4, 1, 8))
            writer.finish()
    first, last, whole = (store["0e"][split] for split in ("first", "last", "whole"))
    with pytest.raises(ProvenanceError, match="other tokens of each: every:2 and from:2"):
        joined_rows([first, last])
    with pytest.raises(ProvenanceError, match="other tokens of each: every:2 and all"):
        joined_rows([first, whole])
    assert [rows.tolist() for rows in joined_rows([last, last])] == [[0, 1], [0, 1]]


def test_an_audit_computes_whole_windows_and_compares_the_kept_tokens(space: Workspace) -> None:
    (done,) = bertvision.extract(
        "0e", workspace=space.root, task="talks", keep="every:2", store=space.root / "right"
    )
    name = f"0e/{done.split}"
    where: dict[str, Any] = {"workspace": space.root, "store": space.root / "right"}
    assert bertvision.audit(name, **where).wrong == 0
    with pytest.raises(InputError, match="keeps some tokens of each example"):
        bertvision.audit(name, model=space.config.model.name_or_path, **where)
    whole = ActivationStore.open(space.root / "activations")["0e/talks-all"]
    record = ActivationStore.open(where["store"])[name].record
    made_from = {key: value for key, value in record.provenance.items() if key != "keep"}
    where["store"] = space.root / "wrong"
    with ActivationStore.create(where["store"]).writer(
        *("0e", done.split),
        hidden_size=record.hidden_size,
        layers=record.layers,
        provenance=made_from,
        keep="every:2",
    ) as writer:
        for i, row in enumerate(whole.plan.example_id.tolist()):
            states = whole[i].roll(1, 0) if row == 1 else whole[i]
            writer.add(row, states, dims=("seq", "hidden", "layers"))
        writer.finish()
    (finding,) = bertvision.audit(name, **where).findings
    assert finding["key"] == "1"


def test_a_page_names_kept_tokens_by_their_places(space: Workspace, tmp_path: Path) -> None:
    (done,) = bertvision.extract(
        "0e", workspace=space.root, task="talks", keep="every:3", store=space.root / "page"
    )
    page = bertvision.view(
        f"0e/{done.split}",
        workspace=space.root,
        store=space.root / "page",
        output=tmp_path / "page.html",
    )
    split = ActivationStore.open(space.root / "page")["0e"][done.split]
    assert page.tokens == split.record.tokens
    text = (tmp_path / "page.html").read_text()
    places = [place for i in range(len(split)) for place in split.positions(i).tolist()]
    assert f'"places": {json.dumps(places)}' in text
    assert "every:3" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "every:1"}, "keep is 'every:1': give completion, from:N"),
        ({"keep": "from:0"}, "keep is 'from:0': give"),
        ({"keep": "from:2", "pool": "mean"}, "--keep from:2 beside --pool mean"),
        ({"keep": "answer"}, "reads the field answer of the tokens, and the fields are loss_mask"),
    ],
)
def test_a_rule_that_cannot_be_is_named(
    space: Workspace, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        bertvision.extract(
            "0e", workspace=space.root, task="talks", store=space.root / "no", **options
        )


@pytest.mark.parametrize(
    ("keep", "places"), [("mask", [1, 2]), ("from:3", [3]), ("every:2", [0, 2])]
)
def test_a_writer_keeps_the_same(tmp_path: Path, keep: str, places: list[int]) -> None:
    states, mask = torch.randn(2, 4, 1, 8), torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]])
    store = ActivationStore.create(tmp_path)
    options: dict[str, Any] = {"hidden_size": 8, "layers": [3], "encoding": "float32"}
    with store.writer("0e", "dev", keep=keep, shard_tokens=3, **options) as writer:
        writer.add_batch(
            *("ab", states, None),
            input_ids=torch.arange(8).view(2, 4),
            fields={"mask": mask},
        )
        writer.add("c", states[0, :1], input_ids=[9], fields={"mask": [0]})
        split = writer.finish()
    by_key = dict(zip(split.table()["id"].to_pylist(), range(3), strict=False))
    first = split.plan.example_id.tolist().index(by_key["a"])
    assert split.positions(first).tolist() == places
    assert torch.equal(split[first], states[0, places].transpose(1, 2))
    begin = int(split.plan.first_token[first])
    assert split.array("input_ids")[begin : begin + len(places)].tolist() == places
    if keep == "every:2":
        assert len(split) == 3
    else:
        assert writer.dropped == {"c": f"keep={keep} keeps none of its tokens"}
    with pytest.raises(ProvenanceError, match="keep"):
        store.writer("0e", "dev", keep="from:1", **options)


def test_a_writer_refuses_what_would_not_say_which_tokens_it_has(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path)
    options: dict[str, Any] = {"hidden_size": 8, "layers": [3]}
    with pytest.raises(InputError, match="provenance has keep.*give keep='x' to the writer"):
        store.writer("0e", "dev", provenance={"keep": "x"}, **options)
    with store.writer("0e", "dev", keep="mask", **options) as writer:
        for fields, message in (
            (None, "reads the field mask of the tokens, and there are none"),
            ({"mask": [0, 2]}, "a mask has one value for each token, 0 or 1"),
            ({"kept_position": [0, 1]}, "'kept_position' is a name that the store uses itself"),
        ):
            with pytest.raises(InputError, match=message):
                writer.add("a", torch.randn(2, 1, 8), fields=fields)


def test_completion_is_read_from_either_field() -> None:
    rule, mask = Keep.parse("completion"), np.array([0, 1], np.uint8)
    for name in ("loss_mask", "generated"):
        assert rule.mask([2], {name: mask}).tolist() == [False, True]
