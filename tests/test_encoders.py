"""Encoders of every family: states and poolings are those of the family's own forward pass."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import ENCODERS, FAMILIES, HIDDEN, LAYERS, make_family
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.families import FAMILIES as PATHS
from bertvision.pipelines.encoders.forward import (
    PACKED_ATTENTION,
    BatchTokens,
    PackedForward,
    Packing,
    PaddedForward,
    groups,
)
from bertvision.pipelines.encoders.kept_states import check_poolings
from bertvision.pipelines.encoders.loading import (
    dimensions,
    find_pretrained,
    load_model,
    load_tokenizer,
    new_model,
    pad_id,
    takes_token_types,
)
from bertvision.pipelines.extraction.split_extraction import calibrate
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sentences.task import sentence_windows
from bertvision.pipelines.tasks.squad.read import Answer, Question
from bertvision.pipelines.tasks.squad.windows import question_windows
from bertvision.pipelines.tasks.windows import Windows, collate, special_ends

ALL = range(LAYERS + 1)
TEXTS = [
    "anna founded rome",
    "who?",
    "a",
    "the anna in rome founded the city in 1901, and who is in rome now? " * 4,
    "rome in 1901. " * 6,
    "rome in 1902. " * 6,
    # of like length, so that they are padded together
    *("rome in 1901, anna " + "who " * more for more in range(4, 9)),
]


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    """The checkpoint of a family."""
    return str(request.param)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the checkpoint of a family, once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="module")
def folder(name: str, folders: Any) -> Path:
    """The checkpoint of the family."""
    made: Path = folders(name)
    return made


@pytest.fixture(scope="module")
def windows(folder: Path) -> Windows:
    """Sentences and pairs of many lengths."""
    pairs = [Sentence(f"{i}", TEXTS[i], TEXTS[-i]) for i in (1, 4)]
    single = [Sentence(f"s{i}", text) for i, text in enumerate(TEXTS)]
    return sentence_windows([*single, *pairs], load_tokenizer(folder), max_length=60)


def alone(model: Any, windows: Windows, row: int) -> Any:
    """The family's own forward pass of one window: nothing is padded, nothing beside it."""
    token = slice(windows.first_token[row], windows.first_token[row] + windows.n_tokens[row])
    inputs = {
        "input_ids": windows.input_ids[token],
        "token_type_ids": windows.token_type_ids[token],
    }
    if not takes_token_types(model):
        del inputs["token_type_ids"]
    given = {k: torch.from_numpy(v.astype(np.int64)).unsqueeze(0) for k, v in inputs.items()}
    with torch.inference_mode():
        return model(**given, output_hidden_states=True)


def states_alone(model: Any, windows: Windows) -> list[np.ndarray]:
    """(tokens, layers, hidden) of each window, by its own forward pass."""
    outputs = [alone(model, windows, row).hidden_states for row in range(len(windows))]
    return [torch.cat(states).transpose(0, 1).numpy() for states in outputs]


def test_every_state_is_that_of_the_familys_own_forward_pass(
    name: str, folder: Path, windows: Windows
) -> None:
    truth = np.concatenate(states_alone(load_model(folder), windows))
    encoder = Encoder(load_model(folder), {"all": ALL}, "32")
    (states,) = encoder(windows, np.arange(len(windows)))
    assert states.shape == (windows.n_tokens.sum(), LAYERS + 1, HIDDEN)
    np.testing.assert_allclose(states.numpy(), truth, rtol=1e-5, atol=1e-5)
    padded = [windows.n_tokens[group] for group in groups(windows.n_tokens, 1024)]
    assert any(of.min() < of.max() for of in padded)  # or padding would not be put to the test
    assert isinstance(encoder._forward, PackedForward if FAMILIES[name].packs else PaddedForward)
    assert (encoder.attention == PACKED_ATTENTION) == FAMILIES[name].packs
    assert np.abs(truth[:, 1] - truth[:, 2]).max() > 0.1  # layers do something


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_no_block_behind_the_last_wanted_layer_is_computed(
    name: str, folder: Path, windows: Windows, layer: int
) -> None:
    rows = np.arange(len(windows))
    (states,) = Encoder(load_model(folder), {"all": ALL}, "32")(windows, rows)
    whole = states[:, layer].clone()
    model, computed = load_model(folder), set[int]()
    blocks: Any = model.get_submodule(PATHS[model.config.model_type].blocks)
    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, number=i: computed.add(number))
    (given,) = Encoder(model, {"all": [layer]}, "32")(windows, rows)
    assert torch.equal(given[:, 0], whole)
    assert computed <= set(range(max(1, layer)))


def test_every_pooling_is_that_of_the_familys_own_states(
    name: str, folder: Path, windows: Windows
) -> None:
    own = states_alone(load_model(folder), windows)
    begins, ends = special_ends(load_tokenizer(folder))
    truth: dict[TokenPooling, np.ndarray] = {
        "cls": np.stack([x[0] for x in own]),
        "sep": np.stack([x[-1] for x in own]),
        "mean": np.stack([x.mean(axis=0) for x in own]),
        "max": np.stack([x.max(axis=0) for x in own]),
        "first": np.stack([x[int(begins)] for x in own]),
        "last": np.stack([x[-1 - ends] for x in own]),
    }
    layers = {p: ALL for p in truth} | {"mean": [1]}
    encoder = Encoder(load_model(folder), layers, "32", special=(begins, ends))
    given = dict(zip(encoder.tokens, encoder(windows, np.arange(len(windows))), strict=True))
    truth["mean"] = truth["mean"][:, 1:2]
    for pooling, expected in truth.items():
        np.testing.assert_allclose(given[pooling].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_window_alone_in_a_batch_has_the_states_that_it_has_among_others(
    folder: Path, windows: Windows
) -> None:
    encoder = Encoder(load_model(folder), {"all": [LAYERS]}, "32")
    (states,) = encoder(windows, np.arange(len(windows)))
    together = states.clone().split(windows.n_tokens.tolist())
    for row in range(len(windows)):
        torch.testing.assert_close(
            encoder(windows, np.array([row]))[0], together[row], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", [n for n in FAMILIES if FAMILIES[n].packs], indirect=True)
def test_windows_framed_as_on_a_gpu_have_the_same_states(
    folder: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the attention pads them; here the same code does, on the CPU."""
    (plain,) = Encoder(load_model(folder), {"all": ALL}, "32")(windows, np.arange(len(windows)))

    def framed(lengths: list[int], where: torch.device) -> Packing:
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        return Packing(lengths, mask.flatten().nonzero().squeeze(1), mask[:, None, None])

    monkeypatch.setattr(Packing, "of", framed)
    (given,) = Encoder(load_model(folder), {"all": ALL}, "32")(windows, np.arange(len(windows)))
    torch.testing.assert_close(given, plain, rtol=1e-5, atol=1e-5)


def test_how_much_padding_is_behind_a_window_changes_no_state(folder: Path) -> None:
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    windows = sentence_windows([Sentence(str(i), t) for i, t in enumerate(TEXTS)], tokenizer)
    types, padding = takes_token_types(model), pad_id(tokenizer, model.config)
    batch = collate(windows, windows.first_token, np.arange(2), padding, token_types=types)
    wide = collate(windows, windows.first_token, np.arange(4), padding, token_types=types)
    with torch.inference_mode():
        narrow_states = model(**batch.inputs).last_hidden_state
        wide_states = model(**wide.inputs).last_hidden_state
    for row, n in enumerate(windows.n_tokens[:2]):
        torch.testing.assert_close(
            narrow_states[row, :n], wide_states[row, :n], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"], indirect=True)
def test_the_pooler_output_stands_beside_the_first_token(folder: Path, windows: Windows) -> None:
    model = load_model(folder)
    truth = np.stack([alone(model, windows, i).pooler_output[0] for i in range(len(windows))])
    encoder = Encoder(load_model(folder), {"cls": [0, LAYERS + 1], "mean": [1]}, "32")
    given = encoder(windows, np.arange(len(windows)))[0].numpy()
    assert given.shape == (len(windows), 2, HIDDEN)
    np.testing.assert_allclose(given[:, 1], truth, rtol=1e-5, atol=1e-5)


def test_a_pooler_on_the_padded_path_is_the_models_own(tmp_path: Path) -> None:
    from transformers import AlbertConfig

    config = AlbertConfig(
        vocab_size=60, embedding_size=8, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, intermediate_size=64,
    )  # fmt: skip
    windows = sentence_windows(
        [Sentence(str(i), text) for i, text in enumerate(TEXTS)],
        load_tokenizer(make_family("bert", tmp_path)),
    )
    windows.input_ids[:] %= 60
    model = new_model(config, seed=1)
    truth = np.stack([alone(model, windows, i).pooler_output[0] for i in range(len(windows))])
    encoder = Encoder(model, {"cls": [LAYERS + 1]}, "32")
    (given,) = encoder(windows, np.arange(len(windows)))
    np.testing.assert_allclose(given[:, 0].numpy(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2"], indirect=True)
def test_a_token_without_an_embedding_is_named_before_anything_is_computed(
    folder: Path, tmp_path: Path
) -> None:
    """It was added to the tokenizer alone; texts that do not have it are as before."""
    model = shutil.copytree(folder, tmp_path / "model")
    tokenizer = load_tokenizer(model)
    words = len(tokenizer)
    tokenizer.add_tokens(["annabel", "romulus"])
    tokenizer.save_pretrained(model)
    for name, text in (("without", "anna in rome"), ("with", "romulus founded rome")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    given: dict[str, Any] = {"task": "text", "workspace": tmp_path / "space", "max_length": 100}
    data = tmp_path / "without.jsonl"
    assert len(bertvision.extract("0e", model=model, data=data, **given)) == 1
    message = (
        f"the token 'romulus' the id {words + 1}, .* has {words} rows, ids 0 to {words - 1} "
        r"\(1 such token in the data\): .* model.resize_token_embeddings"
    )
    with pytest.raises(InputError, match=message):
        bertvision.extract("0e", data=tmp_path / "with.jsonl", **given)


def test_sizes_come_from_the_model(name: str, folder: Path) -> None:
    family = FAMILIES[name]
    checkpoint = find_pretrained(str(folder))
    assert dimensions(checkpoint.config) == (LAYERS, HIDDEN, family.max_length)
    tokenizer = load_tokenizer(folder)
    tokenizer.model_max_length = 77
    assert dimensions(checkpoint.config, tokenizer).max_length == 77


def test_windows_of_the_longest_length_can_be_computed(name: str, folder: Path) -> None:
    longest = dimensions(find_pretrained(str(folder)).config).max_length
    sentences = [Sentence("0", "rome in 1901. " * 40), Sentence("1", "who")]
    windows = sentence_windows(sentences, load_tokenizer(folder), max_length=longest)
    assert windows.n_tokens[0] == longest
    (states,) = Encoder(load_model(folder), {"mean": ALL}, "32")(windows, np.arange(2))
    assert torch.isfinite(states).all()


def test_first_and_last_token_are_poolings_where_they_are_special(name: str, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    begins, ends = special_ends(tokenizer)
    assert (begins, ends) == FAMILIES[name].ends
    check_poolings(["mean", "max", "all"], tokenizer)
    allowed = [p for p, has in (("cls", begins), ("sep", ends)) if has]
    allowed += ["mean", "max", "first", "last", "at:FIELD"]
    for pooling, has in (("cls", begins), ("sep", ends)):
        if has:
            check_poolings([pooling], tokenizer)  # type: ignore[list-item]
        else:
            message = f"'{pooling}': windows of '.*{folder.name}' .* {', '.join(allowed)}$"
            with pytest.raises(InputError, match=message):
                check_poolings([pooling], tokenizer)  # type: ignore[list-item]


@pytest.mark.parametrize("name", ENCODERS, indirect=True)
def test_a_question_window_is_what_the_tokenizer_makes_of_the_pair(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    q = Question("q", "who founded rome?", "anna in 1901.", (Answer("1901", 8),), False)
    windows = question_windows([q], tokenizer)
    pair = tokenizer(q.question, q.context, return_offsets_mapping=True, return_token_type_ids=True)
    assert windows.input_ids.tolist() == pair["input_ids"]
    types = np.array(pair["token_type_ids"]) * ("token_type_ids" in tokenizer.model_input_names)
    assert windows.token_type_ids.tolist() == types.tolist()
    sequence = pair.sequence_ids(0)
    assert windows.offset_mapping.tolist() == [
        list(o) if s == 1 else [-1, -1]
        for o, s in zip(pair["offset_mapping"], sequence, strict=True)
    ]
    start, end = (int(windows.labels[f"{x}_positions"][0]) for x in ("start", "end"))
    begin, stop = windows.offset_mapping[start, 0], windows.offset_mapping[end, 1]
    assert q.context[begin:stop].strip() == "1901"


@pytest.mark.parametrize("name", ENCODERS, indirect=True)
def test_a_context_cut_into_windows_is_there_whole(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    context = "anna founded rome in 1901. " * 10
    windows = question_windows(
        [Question("q", "who?", context, (), True)], tokenizer,
        max_length=40, max_question_length=8, overlap=5,
    )  # fmt: skip
    assert len(windows) > 2
    assert (windows.n_tokens <= 40).all()
    ids = tokenizer(context, add_special_tokens=False)["input_ids"]
    found: list[int] = []
    for w in range(len(windows)):
        at = slice(windows.first_token[w], windows.first_token[w] + windows.n_tokens[w])
        of_context = windows.offset_mapping[at, 0] >= 0
        assert of_context[0] == of_context[-1] == False  # noqa: E712  (special ends)
        found += windows.input_ids[at][of_context].tolist()[5 if w else 0 :]
    assert found == ids


@pytest.mark.parametrize("name", ["gpt2", "qwen2"], indirect=True)
def test_questions_need_a_token_that_stands_for_no_answer(folder: Path) -> None:
    with pytest.raises(InputError, match="no special token at the start .* such as bert-base"):
        question_windows([Question("q", "who", "anna", (), True)], load_tokenizer(folder))


@pytest.mark.parametrize("name", ["gpt2"], indirect=True)
def test_a_sentence_without_any_token_is_refused_by_its_name(folder: Path) -> None:
    with pytest.raises(InputError, match="sentence 'x' \\(''\\) makes no token"):
        sentence_windows([Sentence("x", "")], load_tokenizer(folder))


@pytest.mark.parametrize("name", ENCODERS, indirect=True)
@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        (AutoModelForQuestionAnswering, {}),
        (AutoModelForSequenceClassification, {"num_labels": 3}),
    ],
)
def test_encoder_families_learn_a_task(
    name: str, folder: Path, windows: Windows, model_class: type[Any], options: dict[str, int]
) -> None:
    """A step of fine-tuning on a padded batch lowers the loss and reaches the encoder."""
    torch.manual_seed(0)
    model = load_model(folder, model_class, **options)
    tokenizer = load_tokenizer(folder)
    batch = collate(
        *(windows, windows.first_token, np.arange(4), pad_id(tokenizer, model.config)),
        token_types=takes_token_types(model),
    )
    target = torch.tensor([0, 1, 2, 1])

    def loss() -> torch.Tensor:
        output = model(**batch.inputs)
        logits = output.logits if options else output.start_logits
        value: torch.Tensor = torch.nn.functional.cross_entropy(logits, target)
        return value

    before = loss()
    before.backward()
    encoder: Any = model.base_model
    touched = [p for p in encoder.parameters() if p.grad is not None and p.grad.abs().max() > 0]
    assert len(touched) > len(list(encoder.parameters())) // 2
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-4 * parameter.grad
    assert loss() < before


@pytest.mark.parametrize("name", ENCODERS, indirect=True)
def test_the_encoder_of_a_task_model_gives_the_same_states(folder: Path) -> None:
    windows = sentence_windows([Sentence("0", TEXTS[0])], load_tokenizer(folder))
    classifier: Any = load_model(folder, AutoModelForSequenceClassification, num_labels=2)
    rows = np.array([0])
    (of_task,) = Encoder(classifier.base_model, {"all": ALL}, "32")(windows, rows)
    (plain,) = Encoder(load_model(folder), {"all": ALL}, "32")(windows, rows)
    assert torch.equal(of_task, plain)


def test_an_untrained_twin_is_its_seeds_and_no_copy(folder: Path) -> None:
    config = find_pretrained(str(folder)).config
    state = torch.random.get_rng_state()
    twins = [new_model(config, seed=seed).state_dict() for seed in (1, 1, 2)]
    assert torch.equal(state, torch.random.get_rng_state())
    trained = load_model(folder).state_dict()
    assert list(twins[0]) == list(trained)
    matrices = [name for name, value in trained.items() if value.dim() > 1]
    assert all(torch.equal(twins[0][name], twins[1][name]) for name in trained)
    for other in (twins[2], trained):
        assert not any(torch.equal(twins[0][name], other[name]) for name in matrices)


def test_an_untrained_twin_for_a_task_has_its_output_layer(folders: Any) -> None:
    config = find_pretrained(str(folders("roberta"))).config
    twin = new_model(config, AutoModelForSequenceClassification, seed=0, num_labels=5)
    assert twin.config.num_labels == 5
    assert config.num_labels == 2
    other = find_pretrained(str(folders("gpt2"))).config
    with pytest.raises(InputError, match="untrained gpt2 cannot be loaded"):
        new_model(other, AutoModelForMaskedLM, seed=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "nonsense"}, "model_type 'nonsense', which this version of transformers"),
        ({"model_type": "t5"}, "model_type 't5', which is no single stack of layers"),
        ({"model_type": "bart"}, "model_type 'bart', which is no single stack of layers"),
        ({"model_type": "vit"}, "model_type 'vit', which is no single stack of layers over text"),
        ({"model_type": "clip"}, "model_type 'clip', which is no single stack of layers"),
        ({}, "model_type None, which this version"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
            "without running the checkpoint's own code",
        ),
    ],
)
def test_what_is_no_encoder_of_text_is_refused(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "mine.py").write_text("raise SystemExit('foreign code ran')")
    with pytest.raises(InputError, match=message):
        find_pretrained(str(tmp_path))


def test_a_model_without_a_state_per_layer_is_refused(folders: Any) -> None:
    class Short(torch.nn.Module):
        """An encoder that keeps its first state to itself."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.config, self.device = inner, inner.config, inner.device

        @property
        def base_model(self) -> Any:
            return self.inner

        def forward(self, **inputs: Any) -> Any:
            output = self.inner(**inputs)
            output.hidden_states = output.hidden_states[1:]
            return output

    folder = folders("modernbert")
    with pytest.raises(InputError, match="modernbert gives hidden states .* where 3 of .* needed"):
        Encoder(Short(load_model(folder)), {"mean": [LAYERS]}, "32")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert", "gpt2"], indirect=True)
@pytest.mark.parametrize("parts", [False, True])
def test_layers_that_the_configuration_does_not_name_are_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: bool
) -> None:
    model = AutoModelForMaskedLM if "bert" in folder.name else AutoModel
    whole = model.from_pretrained(folder)
    whole.save_pretrained(tmp_path / "cut", max_shard_size="20KB" if parts else "1GB")
    caplog.clear()
    load_model(tmp_path / "cut")
    assert not caplog.records  # an output layer that is not loaded is no layer
    config = tmp_path / "cut" / "config.json"
    depth = "n_layer" if "gpt2" in folder.name else "num_hidden_layers"
    config.write_text(json.dumps(json.loads(config.read_text()) | {depth: LAYERS - 1}))
    load_model(tmp_path / "cut")
    (record,) = caplog.records
    files = "model-0.*-of-.*safetensors" if parts else "model.safetensors"
    message = f"1 layer that .* not name, 1 to 1, in {files}: num_hidden_layers is 1, .* left out"
    assert re.search(message, record.getMessage())


def test_no_limit_of_length_is_said_to_be_none() -> None:
    from transformers import XLNetConfig

    assert dimensions(XLNetConfig(n_layer=1, d_model=8, n_head=2)).max_length == sys.maxsize


def test_groups_hold_every_window_once_and_little_padding() -> None:
    lengths = np.random.default_rng(0).integers(5, 387, 60).astype(np.int32)
    found = groups(lengths, 1024)
    assert sorted(np.concatenate(found).tolist()) == list(range(60))
    for group in found:
        of = lengths[group]
        assert of.min() >= 0.85 * of.max()
        assert len(of) == 1 or len(of) * of.max() <= 1024


def test_statistics_of_poolings_are_of_their_own_vectors(folders: Any) -> None:
    folder = folders("distilbert")
    windows = sentence_windows(
        [Sentence(str(i), text) for i, text in enumerate(TEXTS)], load_tokenizer(folder)
    )
    encoder = Encoder(load_model(folder), {"mean": ALL, "max": [1]}, "32")
    mean, largest = encoder(windows, np.arange(len(windows)))
    mean, largest = mean.clone(), largest.clone()
    stats = [found.stats for found in calibrate(encoder, windows, "int8", hidden_size=HIDDEN)]
    assert [s.mean.shape for s in stats] == [(LAYERS + 1, HIDDEN), (1, HIDDEN)]
    torch.testing.assert_close(stats[0].mean, mean.mean(dim=0))
    torch.testing.assert_close(stats[1].mean, largest.mean(dim=0))


def test_a_padding_token_that_a_text_spells_is_at_the_models_own_position(folders: Any) -> None:
    """RoBERTa's kin leave it uncounted, wherever it comes from."""
    folder = folders("xlm-roberta")
    windows = sentence_windows(
        [Sentence("0", "anna"), Sentence("1", "rome in 1901")], load_tokenizer(folder)
    )
    windows.input_ids[[3, len(windows.input_ids) - 4]] = 1
    truth = np.concatenate(states_alone(load_model(folder), windows))
    (states,) = Encoder(load_model(folder), {"all": ALL}, "32")(windows, np.arange(2))
    np.testing.assert_allclose(states.numpy(), truth, rtol=1e-5, atol=1e-5)


def test_auto_model_is_what_loads_without_a_task(folders: Any) -> None:
    model = load_model(folders("electra"))
    assert type(model) is type(AutoModel.from_config(model.config))
    assert model.dtype == torch.float32
    assert not model.training


@pytest.mark.parametrize("name", ["roberta", "deberta-v2"], indirect=True)
def test_an_encoder_that_is_random_in_part_is_refused(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(copied / "model.safetensors")
    lost = next(name for name in tensors if "layer.1" in name)
    save_file({k: v for k, v in tensors.items() if k != lost}, copied / "model.safetensors")
    for model_class in (AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(InputError, match=f"lack 1 of the encoder's, such as .*{lost}"):
            load_model(copied, model_class)


def test_a_pooler_that_the_checkpoint_lacks_is_none(folders: Any, tmp_path: Path) -> None:
    """Random, it would stand in the store as if it were a state of the encoder."""
    copied = shutil.copytree(folders("bert"), tmp_path / "copy")
    tensors = load_file(copied / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if "pooler" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, copied / "model.safetensors")
    assert load_model(copied).pooler is None
    classifier: Any = load_model(copied, AutoModelForSequenceClassification)
    assert classifier.base_model.pooler is not None  # it learns with the task


@pytest.mark.parametrize("name", ["bert", "gpt2", "deberta-v3"], indirect=True)
def test_a_checkpoint_without_a_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy")
    (copied / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="copy has no tokenizer.json or vocab.txt or vocab.json"):
        load_tokenizer(copied)


@pytest.mark.parametrize("name", ["cpu", "cuda", "mps", "xpu"])
def test_a_pass_has_a_size_on_every_device_that_torch_names(name: str) -> None:
    sizes = BatchTokens(cpu=1024, accelerator=8192)
    assert sizes.on(torch.device(name)) == (1024 if name == "cpu" else 8192)
