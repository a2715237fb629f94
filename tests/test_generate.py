"""`bertvision generate`: texts token by token, whose stored states are those of the whole text."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, make_family
from processes import run_code
from terminal import done, run
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import bertvision
from bertvision.errors import (
    DiskSpaceError,
    InputError,
    ProvenanceError,
    UnknownNameError,
)
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.generation import generate as generation
from bertvision.pipelines.generation.decoder import Chooser, nucleus

TEXTS = (
    "anna",
    "who founded rome in 1901? the anna, the anna",
    "a",
    "rome is in the",
    "the the the the 7 - x.",
    "in",
)
SIZES: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
DECODERS = {
    "gpt2": FAMILIES["gpt2"],
    "llama": FAMILIES["llama"],
    "qwen2": FAMILIES["qwen2"],
    "gemma2": FAMILIES["llama"]._replace(
        model_type="gemma2", settings=SIZES | {"sliding_window": 8}
    ),
    "bloom": FAMILIES["gpt2"]._replace(model_type="bloom"),  # whose model counts positions itself
    "gpt_neox": FAMILIES["gpt2"]._replace(model_type="gpt_neox"),
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random decoder of each family."""
    root = tmp_path_factory.mktemp("decoders")
    return {
        name: make_family(family, root / name, AutoModelForCausalLM)
        for name, family in DECODERS.items()
    }


@pytest.fixture(scope="module")
def gpt2(folders: dict[str, Path]) -> Path:
    return folders["gpt2"]


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of very different lengths, with names."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return write_lines(path, *({"id": f"p{i}", "text": text} for i, text in enumerate(TEXTS)))


def generate(model: Path, data: Path, store: Path, **options: Any) -> ActivationSplit:
    """The split of a generation in float32, of batches of four."""
    settings = {"max_new_tokens": 8, "batch_size": 4, "encoding": "float32", "precision": "32"}
    bertvision.generate("0e/s", model=model, data=data, store=store, **settings | options)
    split: ActivationSplit = bertvision.ActivationStore.open(store)["0e/s"]
    return split


def spans(split: ActivationSplit) -> dict[str, tuple[int, slice]]:
    """By key the position of each example, and where its tokens lie."""
    keys, plan = split.table()["id"].to_pylist(), split.plan
    return {
        keys[row]: (i, slice(int(plan.first_token[i]), int(plan.first_token[i] + plan.n_tokens[i])))
        for i, row in enumerate(plan.example_id.tolist())
    }


def tokens_of(split: ActivationSplit) -> dict[str, list[int]]:
    """By key all token ids."""
    ids = split.array("input_ids")
    return {key: ids[span].tolist() for key, (_, span) in spans(split).items()}


def written(split: ActivationSplit) -> dict[str, list[int]]:
    """By key the token ids that were generated."""
    ids, mask = split.array("input_ids"), split.array("generated") == 1
    return {key: ids[span][mask[span]].tolist() for key, (_, span) in spans(split).items()}


@pytest.mark.parametrize("name", DECODERS)
def test_stored_states_and_tokens_are_those_of_each_text_alone(
    name: str, folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    """Padding, positions and the cache change nothing: the oracle is transformers, text by text."""
    split = generate(folders[name], prompts, tmp_path / "store")
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    ids, new = tokens_of(split), written(split)
    assert sorted(ids) == [f"p{i}" for i in range(len(TEXTS))]
    for i, text in enumerate(TEXTS):
        key = f"p{i}"
        prompt = tokenizer(text, return_tensors="pt")["input_ids"]
        alone = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
        )
        assert ids[key] == alone[0].tolist()
        assert ids[key] == prompt[0].tolist() + new[key]
        with torch.no_grad():
            at_once = model(alone, output_hidden_states=True).hidden_states
        truth = torch.stack(at_once, dim=-1)[0]  # (seq, hidden, layers)
        torch.testing.assert_close(split[spans(split)[key][0]], truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_mixed_precision_stays_near_float32(
    name: str, folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    """The cache then holds keys and values of 16 bits."""
    split = generate(folders[name], prompts, tmp_path / "store", precision="bf16")
    assert split.record.provenance["precision"] == "bf16"
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    for key, ids in tokens_of(split).items():
        with torch.no_grad():
            at_once = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        truth = torch.stack(at_once, dim=-1)[0]
        stored = split[spans(split)[key][0]]
        assert 0 < float((stored - truth).norm()) < 0.05 * float(truth.norm())


def test_sites_are_those_of_the_texts_at_once(gpt2: Path, prompts: Path, tmp_path: Path) -> None:
    split = generate(gpt2, prompts, tmp_path / "s", sites=["blocks.1.hook_mlp_out", "ln_final.*"])
    assert split.layer_names == ["blocks.1.hook_mlp_out", "ln_final.hook_normalized"]
    model = AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    model.transformer.h[1].mlp.register_forward_hook(lambda _, given, out: seen.append(out[0]))
    model.transformer.ln_f.register_forward_hook(lambda _, given, out: seen.append(out[0]))
    ids = tokens_of(split)
    with torch.no_grad():
        model(torch.tensor([ids["p1"]]))
    stored = split[spans(split)["p1"][0]]
    torch.testing.assert_close(stored, torch.stack(seen, dim=-1), rtol=1e-5, atol=1e-5)


def test_some_layers_are_kept_and_encoded(gpt2: Path, prompts: Path, tmp_path: Path) -> None:
    whole = generate(gpt2, prompts, tmp_path / "whole")
    some = generate(gpt2, prompts, tmp_path / "some", layers="0,-1", encoding="int8")
    assert some.record.layers == (0, 2)
    assert tokens_of(some) == tokens_of(whole)
    for key, (i, _) in spans(some).items():
        truth = whole[spans(whole)[key][0]][..., [0, 2]]
        assert float((some[i] - truth).norm()) < 0.02 * float(truth.norm())


@pytest.mark.parametrize("keep", ["completion", "from:1", "every:3", "generated"])
def test_kept_tokens_are_those_of_a_whole_generation(
    keep: str, gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    whole = generate(gpt2, prompts, tmp_path / "whole")
    some = generate(gpt2, prompts, tmp_path / "some", keep=keep)
    assert some.keep == keep
    ids, mask = whole.array("input_ids"), whole.array("generated")
    for key, (i, span) in spans(some).items():
        example, of_whole = spans(whole)[key]
        new = mask[of_whole] == 1
        places = {
            "from:1": np.arange(len(new)) >= 1,
            "every:3": np.arange(len(new)) % 3 == 0,
        }.get(keep, new)
        assert some.positions(i).tolist() == np.flatnonzero(places).tolist()
        assert some.array("input_ids")[span].tolist() == ids[of_whole][places].tolist()
        assert torch.equal(some[i], whole[example][places])
    if keep in ("completion", "generated"):
        texts = bertvision.generated_texts("0e/s", store=tmp_path / "some")
        everything = bertvision.generated_texts("0e/s", store=tmp_path / "whole")
        assert [t.completion for t in texts] == [t.completion for t in everything]
        assert {t.prompt for t in texts} == {""}
    else:
        with pytest.raises(InputError, match=f"--keep {keep} stores some of them"):
            bertvision.generated_texts("0e/s", store=tmp_path / "some")
    again = bertvision.generate(
        "0e/s",
        model=gpt2,
        data=prompts,
        store=tmp_path / "some",
        keep=keep,
        **{"max_new_tokens": 8, "batch_size": 4, "encoding": "float32", "precision": "32"},
    )
    assert (again.added, again.keep) == (0, keep)
    with pytest.raises(ProvenanceError, match="written with keep = "):
        generate(gpt2, prompts, tmp_path / "some")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "every:1"}, "keep is 'every:1': give completion, from:N"),
        ({"keep": "loss_mask"}, "reads the field loss_mask .* the fields are generated"),
        ({"keep": "from:3"}, "prompt 'p2' has 1 token.* give from:N with N up to 1"),
        ({"keep": "from:1", "jsonl": "out.jsonl"}, "--keep from:1 stores some of them"),
    ],
)
def test_a_rule_that_leaves_texts_without_tokens_is_refused_before_any_is_written(
    options: dict[str, Any], message: str, gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        bertvision.generate("0e/s", model=gpt2, data=prompts, store=tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_a_text_ends_at_its_last_token_and_its_state_is_there(
    gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    """The model's generation settings name the tokens that end a text, one or several."""
    free = written(generate(gpt2, prompts, tmp_path / "free"))
    stop = free["p1"][2]
    GenerationConfig(eos_token_id=[stop, 3]).save_pretrained(folder := copied(gpt2, tmp_path))
    split = generate(folder, prompts, tmp_path / "stopped")
    reasons = split.labels["finish_reason"]
    for key, ids in written(split).items():
        end = free[key].index(stop) + 1 if stop in free[key] else len(free[key])
        assert ids == free[key][:end]
        assert reasons[spans(split)[key][0]] == (0 if stop in free[key] else 1)
    assert reasons[spans(split)["p1"][0]] == 0
    assert split.record.provenance["stop_ids"] == ",".join(map(str, sorted({stop, 3})))
    assert split.plan.total_tokens == sum(map(len, tokens_of(split).values()))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_texts_that_leave_their_batch_change_nothing_in_the_others(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Three of four prompts end where the decoder does, one after another."""
    lengths = (127, 124, 120, 100)
    data = write_lines(tmp_path / "a.jsonl", *({"text": "7" * n} for n in lengths))
    split = generate(folders[name], data, tmp_path / "s", max_new_tokens=16)
    assert sorted(map(len, written(split).values()))[-1] == 16
    assert len(set(map(len, written(split).values()))) == 4
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    for key, ids in tokens_of(split).items():
        with torch.no_grad():
            at_once = model(torch.tensor([ids]), output_hidden_states=True)
        truth = torch.stack(at_once.hidden_states, dim=-1)[0]
        torch.testing.assert_close(split[spans(split)[key][0]], truth, rtol=1e-5, atol=1e-5)
        new = len(written(split)[key])
        assert at_once.logits[0, -new - 1 : -1].argmax(dim=1).tolist() == ids[-new:]


def test_a_text_ends_where_the_decoder_takes_no_more(gpt2: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", {"text": "x" * 127}, {"text": "x"})
    split = generate(gpt2, data, tmp_path / "s", max_new_tokens=20)
    assert {key: len(ids) for key, ids in written(split).items()} == {"line 1": 3, "line 2": 20}
    texts = bertvision.generated_texts("0e/s", store=tmp_path / "s")
    assert [text.finish_reason for text in texts] == ["context", "length"]


def test_what_is_drawn_follows_from_seed_and_key_whatever_the_batches(
    gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    found = [
        written(generate(gpt2, prompts, tmp_path / f"{n}-{seed}", batch_size=n, **drawing))
        for n, seed in ((1, 3), (4, 3), (6, 3), (4, 4))
        if (drawing := {"temperature": 1.5, "top_p": 0.9, "seed": seed})
    ]
    assert found[0] == found[1] == found[2]
    assert all(found[1][key] != found[3][key] for key in found[1])


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repeated words": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[232], [41, 42], [50], [69, 69]]},
    "bias": {"sequence_bias": [[[50], 9.0], [[51, 52], 5.0]]},
    "never": {"suppress_tokens": [*range(30, 60)]},
    "never first": {"begin_suppress_tokens": [*range(200)]},
    "forced end": {"forced_eos_token_id": 0},
    "forced beginning": {"forced_bos_token_id": 7},
    "least": {"min_new_tokens": 5, "eos_token_id": [*range(150)]},
    "least in all": {"min_length": 9, "eos_token_id": [*range(150)]},
    "decay": {"exponential_decay_length_penalty": [2, 1.5], "eos_token_id": [3, 9]},
    "ends": {"eos_token_id": [*range(100, 200), 99_999]},
    "all": {
        **{"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [60]},
        **{"min_new_tokens": 2, "eos_token_id": [*range(100)]},
    },
    "drawn": {"do_sample": True, "top_k": 5, "temperature": 0.6, "top_p": 0.9},
}


def with_settings(model: Path, root: Path, settings: dict[str, Any]) -> Path:
    """A copy of a decoder with settings of generation."""
    folder = copied(model, root)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.fixture(scope="module")
def plain(
    gpt2: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    """The texts of the decoder as it is."""
    return written(generate(gpt2, prompts, tmp_path_factory.mktemp("plain") / "s"))


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_of_the_model_are_applied_as_transformers_applies_them(
    kind: str, gpt2: Path, prompts: Path, plain: dict[str, list[int]], tmp_path: Path
) -> None:
    """To each text by itself, whatever its batch; drawing is what the command says alone."""
    settings = SETTINGS[kind]
    folder = with_settings(gpt2, tmp_path, settings)
    split = generate(folder, prompts, tmp_path / "s")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    new = written(split)
    for key, ids in tokens_of(split).items():
        prompt = torch.tensor(ids[: len(ids) - len(new[key])])[None]
        whole = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0},
        )
        assert whole[0].tolist() == ids
    made_from = split.record.provenance
    applied = {n: v for n, v in settings.items() if n not in ("eos_token_id", *SETTINGS["drawn"])}
    assert json.loads(str(made_from.get("generation_config", "{}"))) == applied
    if applied:  # of the model as it was other texts come
        assert plain != new


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 3}, {"min_p": 0.2}, {"typical_p": 0.5}, {"epsilon_cutoff": 0.05}, {"top_p": 0.3}],
)
def test_draws_are_from_the_tokens_that_settings_of_the_model_leave(
    settings: dict[str, Any], gpt2: Path, tmp_path: Path
) -> None:
    folder = with_settings(gpt2, tmp_path, settings)
    data = write_lines(
        tmp_path / "a.jsonl", *({"id": f"p{i}", "text": "rome is in"} for i in range(30))
    )
    drawn = {"temperature": 1.0, "max_new_tokens": 1}
    split = generate(folder, data, tmp_path / "s", **drawn)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = torch.tensor([next(iter(tokens_of(split).values()))[:-1]])
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{"max_new_tokens": 1, "do_sample": True, "pad_token_id": 0, "temperature": 1.0},
            **{"output_scores": True, "return_dict_in_generate": True, "top_k": None, **settings},
        )
    allowed = set(torch.isfinite(output.scores[0][0]).nonzero().flatten().tolist())
    found = {ids[0] for ids in written(split).values()}
    assert found <= allowed
    plain = {ids[0] for ids in written(generate(gpt2, data, tmp_path / "t", **drawn)).values()}
    assert not plain <= allowed


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"num_beams": 4}, {}, "sets num_beams to 4, which is not done here"),
        ({"stop_strings": ["rome"]}, {}, "sets stop_strings to .*'rome'"),
        ({"guidance_scale": 1.5}, {}, "sets guidance_scale to 1.5"),
        ({"no_repeat_ngram_size": -2}, {}, "cannot be applied: .*ngram_size.* -2"),
        ({"top_h": 0.4}, {"temperature": 1.0}, "sets top_h to 0.4"),
    ],
)
def test_settings_that_cannot_be_applied_are_refused_by_name(
    settings: dict[str, Any], options: dict[str, Any], message: str,
    gpt2: Path, prompts: Path, tmp_path: Path,
) -> None:  # fmt: skip
    folder = with_settings(gpt2, tmp_path, settings)
    with pytest.raises(InputError, match=message):
        generate(folder, prompts, tmp_path / "s", **options)


def test_two_prompts_of_the_same_text_are_gone_on_with_apart(gpt2: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", *({"text": "rome"} for _ in range(4)))
    found = written(generate(gpt2, data, tmp_path / "s", temperature=2.0))
    assert len({tuple(ids) for ids in found.values()}) == 4


def test_tokens_are_drawn_as_likely_as_they_are() -> None:
    likely = torch.tensor([0.5, 0.3, 0.15, 0.05])
    choose = Chooser(["a"], 0.5, 1.0, 7)
    logits = likely.log()[None]
    counts = np.bincount([int(choose(logits, [0])) for _ in range(4000)], minlength=4) / 4000
    sharper = (likely**2 / (likely**2).sum()).numpy()
    np.testing.assert_allclose(counts, sharper, atol=4 * 0.5 / np.sqrt(4000))


def test_a_nucleus_is_the_smallest_set_that_reaches_its_probability() -> None:
    likely = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.97, 0.01, 0.01, 0.01]]).double()
    kept = [[False, True, False, True], [True, False, False, False]]
    assert (nucleus(likely, 0.6) > 0).tolist() == kept
    assert (nucleus(likely, 0.71) > 0).tolist()[0] == [False, True, True, True]
    assert (nucleus(likely, 1e-9) > 0).sum(dim=1).tolist() == [1, 1]


SMALL = 512
"""Tokens of a shard: the 9 batches before the kill fill two."""
DYING = """
import os, signal, sys
import bertvision
from bertvision.pipelines.generation import generate as generation

batches, go_on = [], generation.go_on
def dying(*args, **options):
    batches.append(1)
    if len(batches) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return go_on(*args, **options)
generation.go_on, generation.SHARD_TOKENS = dying, int(sys.argv[4])
bertvision.generate("0e/s", model=sys.argv[1], data=sys.argv[2], store=sys.argv[3],
    max_new_tokens=20, batch_size=4, precision="32")
"""


def test_a_killed_generation_goes_on_and_leaves_the_same_bytes(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "SHARD_TOKENS", SMALL)
    texts = [{"text": " ".join(TEXTS)[: 5 + i % 43]} for i in range(60)]
    data = write_lines(tmp_path / "many.jsonl", *texts)
    options: dict[str, Any] = {"max_new_tokens": 20, "batch_size": 4, "encoding": "int8"}
    whole = generate(gpt2, data, tmp_path / "whole", **options)
    assert whole.plan.n_shards >= 4
    assert run_code(DYING, gpt2, data, tmp_path / "killed", SMALL).returncode == -9
    asked: list[str] = []
    go_on = generation.go_on

    def noted(batch: Sequence[Any], *args: Any, **options: Any) -> Any:
        asked.extend(prompt.key for prompt in batch)
        return go_on(batch, *args, **options)

    monkeypatch.setattr(generation, "go_on", noted)
    again = bertvision.generate(
        "0e/s", model=gpt2, data=data, store=tmp_path / "killed", precision="32", **options
    )
    assert 0 < again.added < len(texts) - 8
    assert again.added <= len(asked) < again.added + 4  # but for the batch that the kill has cut
    for path in sorted((tmp_path / "whole/arrays.zarr/0e/s").rglob("*")):
        if path.is_file():
            other = tmp_path / "killed" / path.relative_to(tmp_path / "whole")
            assert path.read_bytes() == other.read_bytes(), path.name


def test_a_complete_split_is_not_generated_again(
    gpt2: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(gpt2, prompts, tmp_path / "s")
    monkeypatch.setattr(generation, "go_on", None)
    generate(gpt2, prompts, tmp_path / "s")


DRAWING: dict[str, Any] = {"temperature": 1.0, "top_p": 0.8}


@pytest.fixture(scope="module")
def drawn(gpt2: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with texts that were drawn."""
    store = tmp_path_factory.mktemp("drawn") / "store"
    generate(gpt2, prompts, store, **DRAWING)
    return store


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_new_tokens": 9}, "max_new_tokens = 8, now it is 9"),
        ({"temperature": 0.5}, "temperature = 1.0, now it is 0.5"),
        ({"top_p": 0.5}, "top_p = 0.8, now it is 0.5"),
        ({"seed": 1}, "seed = 0, now it is 1"),
        ({"layers": "0"}, "layers = "),
        ({"encoding": "int8"}, "encoding = 'float32', now it is 'int8'"),
        ({"data": "other"}, "prompts_sha256 = "),
        ({"model": "llama"}, "model = .*llama"),
    ],
)
def test_another_setting_is_refused_by_its_name(
    change: dict[str, Any],
    named: str,
    drawn: Path,
    folders: dict[str, Path],
    prompts: Path,
    tmp_path: Path,
) -> None:
    model = folders[change.get("model", "gpt2")]
    data = write_lines(tmp_path / "o.jsonl", {"text": "x"}) if "data" in change else prompts
    changed = {name: value for name, value in change.items() if name not in ("model", "data")}
    with pytest.raises(ProvenanceError, match=named):
        generate(model, data, drawn, **DRAWING | changed)


def copied(folder: Path, root: Path) -> Path:
    """A copy of a decoder, to change."""
    copy = root / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_an_encoder_is_refused(tmp_path: Path, prompts: Path) -> None:
    model = make_family("bert", tmp_path / "bert", AutoModelForCausalLM)
    with pytest.raises(InputError, match="a bert model is an encoder: .* take a decoder"):
        generate(model, prompts, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_model_without_a_cache_of_keys_and_values_is_refused(
    tmp_path: Path, prompts: Path
) -> None:
    family = FAMILIES["gpt2"]._replace(model_type="mamba", settings={"state_size": 4})
    model = make_family(family, tmp_path / "mamba", AutoModelForCausalLM)
    with pytest.raises(InputError, match="a mamba model does not take tokens one by one"):
        generate(model, prompts, tmp_path / "s")


def test_a_decoder_without_its_output_layer_is_refused(tmp_path: Path, prompts: Path) -> None:
    model = make_family("llama", tmp_path / "llama", AutoModel)
    with pytest.raises(InputError, match=r"lack 1 part of a decoder .*, such as lm_head.weight"):
        generate(model, prompts, tmp_path / "s")


def test_a_prompt_longer_than_the_decoder_takes_is_named(gpt2: Path, tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "a.jsonl", {"id": "good", "text": "x"}, {"id": "long", "text": "x" * 130}
    )
    with pytest.raises(InputError, match=r"a.jsonl, long: the prompt has 130 tokens, .* takes 130"):
        generate(gpt2, data, tmp_path / "s")
    assert list(tokens_of(generate(gpt2, data, tmp_path / "s", skip_bad=True))) == ["good"]


def test_conversations_are_answered_through_the_template(gpt2: Path, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "who founded rome?"},
        {"role": "assistant", "content": "anna"},
    ]
    data = write_lines(tmp_path / "a.jsonl", {"messages": turns}, {"messages": turns[:1]})
    with pytest.raises(InputError, match=r"line 1: the tokenizer of .* has no chat template"):
        generate(gpt2, data, tmp_path / "s", task="chat")
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model := copied(gpt2, tmp_path))
    split = generate(model, data, tmp_path / "s", task="chat")
    texts = bertvision.generated_texts("0e/s", store=tmp_path / "s")
    assert [text.prompt for text in texts] == ["<user>who founded rome?\n<assistant>"] * 2
    first, second = written(split).values()
    assert first == second
    bad = write_lines(tmp_path / "b.jsonl", {"messages": turns[1:]})
    with pytest.raises(InputError, match="line 1: has nothing but an answer"):
        generate(model, bad, tmp_path / "t", task="chat")


def test_a_template_that_writes_the_date_is_told_the_one_that_the_split_was_begun_with(
    gpt2: Path, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "who founded rome?"}]
    data = write_lines(tmp_path / "a.jsonl", {"id": "a", "messages": turns})
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    tokenizer.save_pretrained(model := copied(gpt2, tmp_path))
    split = generate(model, data, tmp_path / "s", task="chat", date="2024-07-26")
    assert split.record.provenance["date"] == "2024-07-26"
    again = generate(model, data, tmp_path / "s", task="chat")
    (text,) = bertvision.generated_texts("0e/s", store=tmp_path / "s")
    assert text.prompt.startswith("26 Jul 2024<user>")
    assert tokens_of(again) == tokens_of(split)
    with pytest.raises(ProvenanceError, match="written with date = '2024-07-26', now it is '2024"):
        generate(model, data, tmp_path / "s", task="chat", date="2024-07-27")
    today = generate(model, data, tmp_path / "t", task="chat").record.provenance["date"]
    assert today == datetime.date.today().isoformat()
    with pytest.raises(InputError, match="--date 2024-07-26: no chat template reads the clock"):
        generate(gpt2, data, tmp_path / "u", date="2024-07-26")
    with pytest.raises(InputError, match="--date '2024': write year, month and day as 2024-07-26"):
        generate(model, data, tmp_path / "u", task="chat", date="2024")


def test_files_of_plain_text_and_splits_of_folders_are_prompts(gpt2: Path, tmp_path: Path) -> None:
    (texts := tmp_path / "texts").mkdir()
    for name in ("b.txt", "a.txt"):
        (texts / name).write_text(f"rome {name}")
    assert sorted(tokens_of(generate(gpt2, texts, tmp_path / "s"))) == ["a.txt", "b.txt"]
    (parted := tmp_path / "parted").mkdir()
    for name in ("train", "dev"):
        write_lines(parted / f"{name}.jsonl", {"id": name, "question": "who?"})
    with pytest.raises(UnknownNameError, match="has train, dev: name one of them with --split"):
        generate(gpt2, parted, tmp_path / "t", text="question")
    found = generate(gpt2, parted, tmp_path / "t", text="question", split="dev")
    assert list(tokens_of(found)) == ["dev"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.5}, "--top-p is for tokens that are drawn: give a --temperature above 0"),
        ({"sites": "blocks.*", "layers": "0"}, "--layers beside --sites"),
        ({"layers": "7"}, "the encoder has hidden states 0 .* to 2"),
        ({"sites": "blocks.*.nothing"}, "means no site"),
        ({"max_new_tokens": 0}, "max-new-tokens"),
        ({"task": "squad_v2"}, "--task 'squad_v2': choose one of text, chat"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], message: str, gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        generate(gpt2, prompts, tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_a_disk_that_is_too_small_is_said_before_anything_is_computed(
    gpt2: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "free_bytes", lambda storage: 1000)
    monkeypatch.setattr(generation, "go_on", None)
    with pytest.raises(DiskSpaceError, match=r"1\.57 MB at least are needed in .*, 1 kB are"):
        generate(gpt2, prompts, tmp_path / "s")


def test_the_audit_finds_nothing_wrong_with_a_generated_split(
    gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    generate(gpt2, prompts, tmp_path / "s")
    found = bertvision.audit("0e/s", model=gpt2, store=tmp_path / "s").to_json()
    assert (found["sampled"], found["wrong"], found["remarks"]) == (len(TEXTS), 0, [])


def test_the_command_prints_json_and_writes_the_texts(
    gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    words = ("generate", "0e/s", "--model", gpt2, "--data", prompts, "--store", tmp_path / "s")
    words = (*words, "--max-new-tokens", 5, "--permute", 1, "--jsonl", tmp_path / "t.jsonl")
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert (values["examples"], values["added"], values["generated_tokens"]) == (6, 6, 30)
    assert values["finish_reasons"] == {"stop": 0, "length": 6, "context": 0}
    assert "0e/s: 6 prompts, 79 tokens, and at most 30 that are generated; at most" in result.stderr
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == list(TEXTS)
    split = bertvision.ActivationStore.open(tmp_path / "s")["0e/s"]
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    for line in lines:
        assert split.plan.example_id[line["example"]] == int(line["id"][1])
        assert line["completion"] == tokenizer.decode(written(split)[line["id"]])
    assert done(*words).splitlines()[0].startswith("0e/s: 6 examples, 0 added by this call")


def test_texts_are_read_by_the_tokenizer_that_they_are_of_alone(
    folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    generate(folders["gpt2"], prompts, tmp_path / "s")
    with pytest.raises(InputError, match="is not the one that 0e/s was made with"):
        bertvision.generated_texts("0e/s", tokenizer=folders["llama"], store=tmp_path / "s")


@pytest.mark.parametrize("place", ["prompts.jsonl", "."])
def test_texts_are_never_written_over_their_prompts_or_a_folder(
    gpt2: Path, tmp_path: Path, place: str
) -> None:
    data = write_lines(tmp_path / "prompts.jsonl", {"id": "a", "text": "anna"})
    before = data.read_text()
    with pytest.raises(InputError, match="--jsonl"):
        generate(gpt2, data, tmp_path / "store", jsonl=tmp_path / place)
    assert data.read_text() == before
    assert not (tmp_path / "store").exists()  # it is said before anything is computed


@pytest.mark.parametrize("task", ["text", "chat"])
def test_a_text_that_is_no_unicode_is_named_by_its_row(
    gpt2: Path, tmp_path: Path, task: str
) -> None:
    bad = {"text": "an\ud800na", "messages": [{"role": "user", "content": "an\ud800na"}]}
    data = write_lines(tmp_path / "prompts.jsonl", {"id": "a", **bad})
    with pytest.raises(InputError, match=r"line 1.*lone surrogate '\\ud800' at character 2"):
        generate(gpt2, data, tmp_path / "store", task=task)


def test_tokens_that_the_decoder_does_not_know_are_refused(
    gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    """A tokenizer may have been given tokens after the model was made."""
    model = copied(gpt2, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    known = len(tokenizer)
    tokenizer.add_tokens(["annabel"])
    tokenizer.save_pretrained(model)
    data = write_lines(tmp_path / "prompts.jsonl", {"id": "a", "text": "rome, annabel"})
    message = (
        f"a: the tokenizer gives the token 'annabel' the id {known:,}, .* {known:,} rows, ids 0 to "
    )
    with pytest.raises(InputError, match=message):
        generate(model, data, tmp_path / "store")
    settings = json.loads((model / "config.json").read_text()) | {"pad_token_id": known}
    (model / "config.json").write_text(json.dumps(settings))
    assert len(generate(model, prompts, tmp_path / "store")) == len(TEXTS)  # padding is never seen


def test_weights_that_give_nan_are_called_damaged(
    gpt2: Path, prompts: Path, tmp_path: Path
) -> None:
    folder = copied(gpt2, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.transformer.h[0].mlp.c_fc.bias.data[0] = float("nan")
    model.save_pretrained(folder)
    with pytest.raises(InputError, match="weights are damaged"):
        generate(folder, prompts, tmp_path / "store")


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_the_lowest_temperature_takes_the_likeliest_token(top_p: float) -> None:
    """Logits that were divided to infinity would give no probabilities at all."""
    logits = torch.tensor([[0.0, 5.0, 1.0, 2.0], [-9.0, -8.0, -7.0, -7.5]])
    assert Chooser(["a", "b"], 1e-310, top_p, seed=0)(logits, [0, 1]).tolist() == [1, 2]
