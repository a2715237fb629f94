"""The audit finds each way in which stored states are not those of their tokens, and no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from stores import shard_path
from terminal import run
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel

import bertvision
from bertvision.errors import InputError
from bertvision.featurestore.format.encoding import encode
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.writer import open_writer
from bertvision.jobs.store import Audited
from bertvision.pipelines.audit.audit import at_most
from bertvision.pipelines.audit.distance import Case, diagnose, yardstick
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.extraction.job import ExtractionJob, load_encoder
from bertvision.pipelines.extraction.split_extraction import SplitExtraction
from bertvision.pipelines.workspace.reproduce import stored_options
from bertvision.pipelines.workspace.workspace import Workspace

WORDS = "the a of in and was is who what where anna boris clara london paris city river".split()  # noqa: SIM905
WRONG = (4, 11, 17)
"""Examples that are made wrong; 4 and 5 are of one length."""


class Text(NamedTuple):
    """An example: token ids (tokens,) and hidden states (tokens, 3, 32)."""

    ids: Tensor
    states: Tensor


class Lab(NamedTuple):
    """The tiny encoder, and another one of its kind with other weights."""

    folder: Path
    model: Any
    other: Any


@pytest.fixture(scope="module")
def lab(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Their weights are ten times those of a new BERT, or no token would look at another."""
    folder = tmp_path_factory.mktemp("audit") / "lively"
    shutil.copytree(tiny_bert, folder)
    config = BertConfig.from_pretrained(tiny_bert, initializer_range=0.2)
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(BertModel(config).eval())
    models[0].save_pretrained(folder)
    return Lab(folder, *models)


def computed(model: Any, ids: Tensor) -> Tensor:
    """All hidden states (tokens, 3, 32), by the model's own forward pass of one text."""
    with torch.no_grad():
        found = model(ids[None], output_hidden_states=True).hidden_states
    return torch.stack(found, dim=2)[0]


@pytest.fixture(scope="module")
def texts(lab: Lab) -> list[Text]:
    """24 texts of 12 to 40 tokens; those at 4 and 5, 11 and 12 are of one length."""
    rng, tokenizer = np.random.default_rng(3), AutoTokenizer.from_pretrained(lab.folder)
    found = []
    for i in range(24):
        count = {5: 20, 4: 20, 11: 15, 12: 15}.get(i, int(rng.integers(10, 38)))
        ids = tokenizer(" ".join(rng.choice(WORDS, count)), return_tensors="pt")["input_ids"][0]
        found.append(Text(ids, computed(lab.model, ids)))
    return found


def store(
    root: Path, texts: Sequence[Text], encoding: str, layers: Sequence[int | str] = (0, 1, 2)
) -> Path:
    """The texts as a split ``0e/s`` that was written by keys."""
    made = ActivationStore.create(root)
    given: dict[str, Any] = {"hidden_size": 32, "layers": layers, "encoding": encoding}
    with made.writer("0e", "s", shard_tokens=256, **given) as writer:
        for i, text in enumerate(texts):
            writer.add(f"text-{i}", text.states, input_ids=text.ids)
        writer.finish(0)
    return root


def look(root: Path, lab: Lab, **options: Any) -> Audited:
    return bertvision.audit("0e/s", model=lab.folder, store=root, **options)


def found(audited: Any) -> dict[str, str]:
    return {finding["key"]: finding["kind"] for finding in audited.to_json()["findings"]}


Change = Callable[[Lab, list[Text], int], None]


def roll(lab: Lab, texts: list[Text], i: int) -> None:
    texts[i] = Text(texts[i].ids, texts[i].states.roll(3, dims=0))


def lost_beginning(lab: Lab, texts: list[Text], i: int) -> None:
    states = texts[i].states
    rubbish = states[:5] + torch.randn(states[:5].shape, generator=torch.manual_seed(0))
    texts[i] = Text(texts[i].ids, torch.cat([states[5:], rubbish]))


def swap(lab: Lab, texts: list[Text], i: int) -> None:
    if i == 17:
        return
    one, other = texts[i], texts[i + 1]
    texts[i], texts[i + 1] = Text(one.ids, other.states), Text(other.ids, one.states)


def next_layer(lab: Lab, texts: list[Text], i: int) -> None:
    texts[i] = Text(texts[i].ids, texts[i].states[:, [1, 2, 2]])


def one_layer(lab: Lab, texts: list[Text], i: int) -> None:
    texts[i] = Text(texts[i].ids, texts[i].states[:, [0, 1, 1]])


def no_prefix(lab: Lab, texts: list[Text], i: int) -> None:
    texts[i] = Text(texts[i].ids[1:], texts[i].states[1:])


def without_cls(lab: Lab, texts: list[Text], i: int) -> None:
    states = computed(lab.model, texts[i].ids[1:])
    rubbish = torch.randn(states[:1].shape, generator=torch.manual_seed(0))
    texts[i] = Text(texts[i].ids, torch.cat([rubbish, states]))


def scaled(lab: Lab, texts: list[Text], i: int) -> None:
    texts[i] = Text(texts[i].ids, texts[i].states * 1.7)


def other_norm(lab: Lab, texts: list[Text], i: int) -> None:
    draw = torch.manual_seed(5)
    norm = torch.nn.LayerNorm(32)
    with torch.no_grad():
        norm.weight.copy_(1 + torch.rand(32, generator=draw))
        norm.bias.copy_(torch.randn(32, generator=draw))
        texts[i] = Text(texts[i].ids, norm(texts[i].states))


def never_filled(lab: Lab, texts: list[Text], i: int) -> None:
    states = texts[i].states.clone()
    states[-4:] = 0
    texts[i] = Text(texts[i].ids, states)


def no_end(lab: Lab, texts: list[Text], i: int) -> None:
    texts[i] = Text(texts[i].ids[:-1], texts[i].states[:-1])


def other_weights(lab: Lab, texts: list[Text], i: int) -> None:
    texts[i] = Text(texts[i].ids, computed(lab.other, texts[i].ids))


CHANGES: dict[Change, str] = {
    roll: "shifted",
    lost_beginning: "shifted",
    swap: "swapped",
    next_layer: "layer",
    one_layer: "layer",
    no_prefix: "prefix",
    without_cls: "prefix",
    scaled: "norm",
    other_norm: "norm",
    never_filled: "empty",
    no_end: "truncated",
    other_weights: "other",
}


@pytest.mark.parametrize("encoding", ["float32", "int8", "int4"])
def test_nothing_is_found_where_nothing_is_wrong(
    tmp_path: Path, lab: Lab, texts: list[Text], encoding: str
) -> None:
    audited = look(store(tmp_path, texts, encoding), lab).to_json()
    assert (audited["sampled"], audited["wrong"], audited["remarks"]) == (24, 0, [])


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_wrong_is_found_and_called_by_its_name(
    tmp_path: Path, lab: Lab, texts: list[Text], change: Change
) -> None:
    harmed = list(texts)
    for i in WRONG:
        change(lab, harmed, i)
    audited = look(store(tmp_path, harmed, "int8"), lab, tolerance=0.02)
    wrong = {f"text-{i}" for i in range(24) if harmed[i] is not texts[i]}
    assert found(audited) == dict.fromkeys(wrong, CHANGES[change]), str(audited)


@pytest.mark.parametrize("change", [roll, swap, one_layer, without_cls, other_norm, other_weights])
def test_what_is_wrong_is_found_in_four_bits_and_with_a_rough_tolerance(
    tmp_path: Path, lab: Lab, texts: list[Text], change: Change
) -> None:
    """The example is found all the same; the name of its trouble is left open.

    A [SEP] that is lost changes less than such a tolerance allows.
    """
    harmed = list(texts)
    for i in WRONG:
        change(lab, harmed, i)
    audited = look(store(tmp_path, harmed, "int4"), lab)
    wrong = {f"text-{i}" for i in range(24) if harmed[i] is not texts[i]}
    assert set(found(audited)) == wrong, str(audited)


def in_arithmetic(lab: Lab, texts: list[Text], kind: torch.dtype) -> list[Text]:
    """The same texts, their states computed in 16 bits."""
    model: Any = BertModel.from_pretrained(lab.folder, dtype=kind).eval()
    return [Text(text.ids, computed(model, text.ids).float()) for text in texts]


@pytest.mark.parametrize(
    ("encoding", "kind"),
    [
        *((encoding, torch.bfloat16) for encoding in ("float32", "int8", "int4", "float16")),
        *((encoding, torch.float16) for encoding in ("bfloat16", "int4")),
    ],
)
def test_arithmetic_and_encodings_are_no_deviation(
    tmp_path: Path, lab: Lab, texts: list[Text], encoding: str, kind: torch.dtype
) -> None:
    audited = look(store(tmp_path, in_arithmetic(lab, texts, kind), encoding), lab).to_json()
    assert (audited["wrong"], audited["deviations"]) == (0, [])


def all_too_large(states: Tensor) -> None:
    states *= 1.02


def one_too_large(states: Tensor) -> None:
    states[:, 1] *= 1.05


def channel_too_small(states: Tensor) -> None:
    states[:, 2, 7] *= 0.87


def moved(states: Tensor) -> None:
    states[:, 1] += 0.05


SHARED: dict[Callable[[Tensor], None], dict[tuple[int, str, tuple[int, ...]], float]] = {
    all_too_large: {(layer, "scale", ()): 0.02 for layer in range(3)},
    one_too_large: {(1, "scale", ()): 0.05},
    channel_too_small: {(2, "scale", (7,)): -0.13},
    moved: {(1, "offset", ()): 0.05},
}


@pytest.mark.parametrize(
    ("change", "encoding"),
    [
        *((change, "int4") for change in SHARED),
        *((channel_too_small, "int8"), (moved, "bfloat16"), (all_too_large, "int8")),
    ],
)
def test_what_all_tokens_share_is_found_below_the_tolerance(
    tmp_path: Path, lab: Lab, texts: list[Text], change: Callable[[Tensor], None], encoding: str
) -> None:
    harmed = in_arithmetic(lab, texts, torch.bfloat16)
    for text in harmed:
        change(text.states)
    audited = look(store(tmp_path, harmed, encoding), lab)
    values = audited.to_json()
    assert values["wrong"] == 0
    shared = {
        (d["layer"], d["kind"], tuple(d["channels"])): d["size"] for d in values["deviations"]
    }
    due = SHARED[change]
    if change is moved:  # in parts of the spread of the layer's channels
        joined = torch.cat([text.states[:, 1] for text in texts])
        due = {key: 0.05 / float(joined.var(dim=0).mean().sqrt()) for key in due}
    assert shared == pytest.approx(due, rel=0.15)
    assert "none is wrong by itself, but all deviate together" in str(audited)
    assert f"hidden state {next(iter(due))[0]}" in str(audited)


def test_a_few_texts_tell_of_no_deviation_and_the_command_fails_on_one(
    tmp_path: Path, lab: Lab, texts: list[Text]
) -> None:
    for text in (harmed := [Text(text.ids, text.states.clone()) for text in texts]):
        one_too_large(text.states)
    root = store(tmp_path, harmed, "int8")
    assert look(root, lab, sample=7).to_json()["deviations"] == []
    words = ("store", "audit", "0e/s", "--store", root, "--model", lab.folder)
    result = run(*words)
    assert result.exit_code == 1
    assert "hidden state 1 is scaled by 1.05" in result.stdout


def test_fewer_rows_than_tokens_are_a_prefix_that_is_missing_or_an_end_that_is(
    texts: list[Text],
) -> None:
    states, nothing = texts[0].states, lambda: ()
    measure = yardstick([text.states for text in texts])
    case = Case(states, states, [0, 1, 2], 0.05, texts[0].ids.numpy().astype(np.int32))
    cut = diagnose(case._replace(stored=states[:-3]), measure, nothing, nothing)
    assert cut.kind == "truncated"
    assert cut.what.startswith("it is cut off: the last 3 tokens")
    late = diagnose(case._replace(stored=states[2:]), measure, nothing, nothing)
    assert late.kind == "prefix"
    assert "the first 2 tokens" in late.what


def test_a_split_of_texts_without_a_beginning_is_noted(
    tmp_path: Path, lab: Lab, texts: list[Text]
) -> None:
    """Stretches of packed text begin nowhere: that is no error, but it is said."""
    bare = [Text(text.ids[1:], computed(lab.model, text.ids[1:])) for text in texts]
    audited = look(store(tmp_path, bare, "int8"), lab).to_json()
    assert audited["wrong"] == 0
    assert "24 of 24 sampled examples do not begin with [2]" in audited["remarks"][0]


def test_names_of_layers_must_be_told_and_what_cannot_be_compared_is_refused(
    tmp_path: Path, lab: Lab, texts: list[Text]
) -> None:
    named = [Text(text.ids, text.states[:, [1, 2]]) for text in texts]
    root = store(tmp_path / "named", named, "int8", ["stored 0", "stored 1"])
    with pytest.raises(InputError, match="are called stored 0, stored 1: say with --layers"):
        look(root, lab)
    assert look(root, lab, layers="1,2").to_json()["wrong"] == 0
    assert look(root, lab, layers="1,-1").to_json()["wrong"] == 0
    assert set(found(look(root, lab, layers="0,1")).values()) == {"layer"}
    with pytest.raises(InputError, match="layers 0,1,2: 0e/s has 2 layers|layers 0, 1, 2: "):
        look(root, lab, layers="0,1,2")
    with ActivationStore.create(tmp_path / "bare").writer(
        "0e", "s", hidden_size=32, layers=[0, 1, 2]
    ) as writer:
        writer.add(0, texts[0].states)
        writer.finish()
    with pytest.raises(InputError, match="has no token ids"):
        look(tmp_path / "bare", lab)


def test_a_sample_says_how_many_may_be_wrong(tmp_path: Path, lab: Lab, texts: list[Text]) -> None:
    audited = look(store(tmp_path, texts, "int8"), lab, sample=10)
    assert audited.to_json()["at_most"] == pytest.approx(1 - 0.05 ** (1 / 10))
    assert str(audited).splitlines() == [
        "10 of 24 examples of 0e/s computed again: all are as they should be",
        "with 95% confidence at most 25.89% of the split are wrong",
    ]


def test_the_limit_is_that_of_clopper_and_pearson() -> None:
    for n in (20, 100, 1000):
        assert 0.9 * 3 / n < at_most(0, n, 10**6) < 3 / n  # the rule of three
    assert at_most(2, 50, 10**6) == pytest.approx(0.12061, abs=1e-4)  # its own defining equation:
    p = at_most(2, 50, 10**6)
    below = sum(c * p**k * (1 - p) ** (50 - k) for k, c in ((0, 1), (1, 50), (2, 1225)))
    assert below == pytest.approx(0.05)
    assert at_most(3, 30, 30) == 0.1
    assert at_most(5, 5, 30) == 1.0


@pytest.fixture(scope="module")
def space(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A copy of the workspace, with poolings and lossy encodings beside what it has."""
    root = tmp_path_factory.mktemp("audit") / "workspace"
    shutil.copytree(workspace.root, root)
    copied = Workspace.find(root)
    for pool in ("cls", "mean"):
        extract(copied, "0.5e", splits=("dev",), tokens=(pool,), encoding="int8")
    extract(copied, "1e", splits=("dev",), sites=("blocks.*.hook_mlp_out",), encoding="int8")
    return copied


@pytest.mark.parametrize(
    "name", ["0.5e/train", "1e/dev", "0.5e/dev-cls", "0.5e/dev-mean", "1e/dev-sites"]
)
def test_what_was_extracted_is_as_it_should_be(space: Workspace, name: str) -> None:
    audited = bertvision.audit(name, workspace=space.root, sample=12).to_json()
    assert (audited["sampled"], audited["wrong"], audited["remarks"]) == (12, 0, [])


def tamper(space: Workspace, name: str, change: Callable[[list[Tensor]], None]) -> None:
    """Write the shards of a split again with other states; its record and its arrays stay."""
    tag, _, of = name.partition("/")
    split: ActivationSplit = ActivationStore.open(space.activations)[name]
    states = [split[i].transpose(1, 2).clone() for i in range(len(split))]
    change(states)
    options, data = stored_options(split), space.dataset(None)
    job = ExtractionJob(space.root, tag, of, options)
    loaded = load_encoder(space, tag, options)
    made = SplitExtraction(space, data, job, loaded)
    shards = range(split.plan.n_shards)
    with open_writer(
        space.activations,
        made.specs["all"],
        made.contents["all"],
        lambda: made._calibration("all"),
        mend=shards,
    ) as writer:
        for shard in shards:
            members = torch.cat([states[i] for i in split.plan.examples_of(shard)])
            writer.write_shard(shard, *encode(members, split.encoding, split.stats))


def test_what_was_extracted_and_then_replaced_is_found_though_its_checksums_fit(
    space: Workspace, tmp_path: Path
) -> None:
    root = tmp_path / "space"
    shutil.copytree(space.root, root)
    copied = Workspace.find(root)
    split: ActivationSplit = ActivationStore.open(copied.activations)["1e/dev"]
    lengths = split.plan.n_tokens.tolist()
    pairs = [(i, j) for i in range(len(lengths)) for j in range(i) if lengths[i] == lengths[j]]
    one, other = pairs[0]
    left = [i for i in range(len(lengths)) if i not in (one, other)]

    def change(states: list[Tensor]) -> None:
        states[one], states[other] = states[other], states[one]
        states[left[0]] = states[left[0]].roll(-2, dims=0)
        states[left[1]] = states[left[1]][:, [1, 2, 2]]

    tamper(copied, "1e/dev", change)
    assert ActivationStore.open(copied.activations)["1e/dev"].verify() == []
    result = run("store", "audit", "1e/dev", "-w", root, "--sample", 999, "--json")
    assert result.exit_code == 1
    kinds = {f["example"]: f["kind"] for f in json.loads(result.stdout)["findings"]}
    assert kinds == {one: "swapped", other: "swapped", left[0]: "shifted", left[1]: "layer"}
    said = run("store", "audit", "1e/dev", "-w", root, "--sample", 999).stdout
    assert said.splitlines()[0].endswith("of 1e/dev computed again: 4 examples wrong")
    assert "swapped: 2" in said


def test_an_imported_split_of_a_workspace_wants_its_encoder(
    space: Workspace, tmp_path: Path, lab: Lab, texts: list[Text]
) -> None:
    root = store(tmp_path, texts, "int8")
    with pytest.raises(InputError, match="name the encoder that it is of with --model"):
        bertvision.audit("0e/s", workspace=space.root, store=root)
    with pytest.raises(InputError, match="written by a program, .* with --model"):
        bertvision.audit("0e/s", store=root)  # where there is no workspace
    with pytest.raises(InputError, match="--tokenizer and --layers belong to an encoder"):
        bertvision.audit("0e/s", workspace=space.root, store=root, layers="1")


def test_nobody_can_repair_what_was_not_extracted(
    space: Workspace, tmp_path: Path, texts: list[Text]
) -> None:
    np.save(tmp_path / "states.npy", torch.stack([t.states[:12] for t in texts]).numpy())
    bertvision.import_states(tmp_path / "states.npy", "0e/brought", store=tmp_path / "store")
    store(tmp_path / "store", texts, "int8")
    for name, said in (("0e/brought", "bertvision store import` again"), ("0e/s", "that program")):
        given = ("store", "repair", name, "--store", tmp_path / "store")
        assert run(*given, "-w", space.root).exit_code == 0  # it is whole
        split: ActivationSplit = ActivationStore.open(tmp_path / "store")[name]
        shard = shard_path(split, "hidden_states", 0)
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        result = run(*given, "-w", space.root)
        assert result.exit_code == 1
        assert "so that nothing here can repair it" in result.stdout
        assert said in result.stdout
        alone = run(*given, "-w", tmp_path)
        assert alone.exit_code != 0
        assert "cannot be repaired: remove it with `bertvision store rm`" in alone.stderr
