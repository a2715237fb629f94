"""Sites of encoders: their names, and that each is what hooks of one's own see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, LAYERS, Family, make_family, random_model

from bertvision.errors import InputError
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.loading import load_tokenizer, takes_token_types
from bertvision.pipelines.encoders.sites.names import FINAL_NORM, choose_sites, sites_of, width_of
from bertvision.pipelines.encoders.sites.taps import Taps
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sentences.task import sentence_windows
from bertvision.pipelines.tasks.windows import Windows

WORDS = 120
TEXTS = ["anna founded rome", "who?", "a", "the anna in rome founded the city in 1901 " * 4]


def _like(name: str, model_type: str, **settings: Any) -> Family:
    return FAMILIES[name]._replace(
        model_type=model_type, settings=FAMILIES[name].settings | settings
    )


OTHERS = {
    "mpnet": _like("bert", "mpnet", pad_token_id=1),
    "mistral": _like("llama", "mistral", sliding_window=8),
    "qwen3": _like("qwen2", "qwen3", head_dim=8),
    "gemma": _like("llama", "gemma", head_dim=8),
    "gemma2": _like("llama", "gemma2", head_dim=12, sliding_window=8),
    "gemma3": _like("llama", "gemma3_text", head_dim=8, sliding_window=8),
    "pythia": _like("gpt2", "gpt_neox"),
}
KNOWN = FAMILIES | OTHERS


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    """Sentences of many lengths, as word pieces: any model's vocabulary has as many words."""
    tokenizer = load_tokenizer(make_family("bert", tmp_path_factory.mktemp("bert")))
    made = sentence_windows([Sentence(str(i), t) for i, t in enumerate(TEXTS)], tokenizer)
    assert made.input_ids.max() < WORDS
    return made


def model_of(name: str) -> Any:
    """A family's random model; the same each time."""
    return random_model(
        KNOWN[name], WORDS, 0 if "pad_token_id" not in KNOWN[name].settings else None
    )


def own_modules(block: Any) -> tuple[Any, Any, Any, Any]:
    """Terms that a block adds to the residual stream, each with the normalisation behind it."""
    if hasattr(block, "sa_layer_norm"):  # DistilBERT
        return block.attention, block.sa_layer_norm, block.ffn, block.output_layer_norm
    if hasattr(block, "post_feedforward_layernorm"):  # Gemma 2, which normalises what is added
        return block.post_attention_layernorm, None, block.post_feedforward_layernorm, None
    if hasattr(block, "post_mlp_dropout"):  # GPT-NeoX
        return block.attention, None, block.mlp, None
    if hasattr(block, "mlp"):
        return getattr(block, "attn", None) or block.self_attn, None, block.mlp, None
    if hasattr(block.attention, "attn"):  # MPNet
        return block.attention.attn, block.attention.LayerNorm, block.output.dropout, block.output
    within = block.attention.output
    return within.dropout, within.LayerNorm, block.output.dropout, block.output


def own_projections(block: Any) -> tuple[Any, Any, list[Any]]:
    """Output projections of a block's attention and feed-forward layer.

    Also the modules whose outputs the latter reads, multiplied where there are two.
    """
    if hasattr(block, "sa_layer_norm"):  # DistilBERT
        return block.attention.out_lin, block.ffn.lin2, [block.ffn.activation]
    if hasattr(block, "self_attn"):  # Llama
        gated = [block.mlp.act_fn, block.mlp.up_proj]
        return block.self_attn.o_proj, block.mlp.down_proj, gated
    if hasattr(block, "post_mlp_dropout"):  # GPT-NeoX
        return block.attention.dense, block.mlp.dense_4h_to_h, [block.mlp.act]
    if hasattr(getattr(block, "attn", None), "Wo"):  # ModernBERT, whose gate is half of Wi
        return block.attn.Wo, block.mlp.Wo, [block.mlp.act, block.mlp.Wi]
    if hasattr(block, "mlp"):
        return block.attn.c_proj, block.mlp.c_proj, [block.mlp.act]
    if hasattr(block.attention, "attn"):  # MPNet
        return block.attention.attn.o, block.output.dense, [block.intermediate]
    return block.attention.output.dense, block.output.dense, [block.intermediate]


def own_hooks(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every site of a forward pass, by hooks and sums: (tokens, channels) each."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS]
    blocks, seen, hooks = list(lists[0]), {}, []

    def see(module: Any, key: str) -> None:
        def gives(_: Any, given: Any, output: Any) -> None:
            seen[key] = (output[0] if isinstance(output, tuple) else output)[0].clone()
            seen[f"{key} reads"] = given[0][0].clone() if given else None

        hooks.append(module.register_forward_hook(gives))

    for i, block in enumerate(blocks):
        see(block, f"{i}")
        for part, module in zip(("attn", "norm", "mlp", "end"), own_modules(block), strict=True):
            if module is not None:
                see(module, f"{i} {part}")
        z, _, factors = own_projections(block)
        see(z, f"{i} z")
        for number, module in enumerate(factors):
            see(module, f"{i} factor {number}")
    with torch.inference_mode():
        last = model(**inputs).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    found = {}
    for i in range(LAYERS):
        pre, attn, mlp = seen[f"{i} reads"], seen[f"{i} attn"], seen[f"{i} mlp"]
        mid = pre + attn
        post = seen[f"{i} factor 0"]
        if f"{i} factor 1" in seen:
            post = post * seen[f"{i} factor 1"][:, -post.shape[1] :]
        found |= {
            f"blocks.{i}.hook_resid_pre": pre,
            f"blocks.{i}.attn.hook_z": seen[f"{i} z reads"],
            f"blocks.{i}.hook_attn_out": attn,
            f"blocks.{i}.hook_resid_mid": mid,
            f"blocks.{i}.mlp.hook_post": post,
            f"blocks.{i}.hook_mlp_out": mlp,
            f"blocks.{i}.hook_resid_post": seen.get(f"{i} norm", mid) + mlp,
        }
        if f"{i} end" in seen:
            found[f"blocks.{i}.hook_normalized_resid_post"] = seen[f"{i} end"]
        if model.config.model_type == "gpt_neox":  # its parts stand beside each other
            del found[f"blocks.{i}.hook_resid_mid"]
    return found if "0 end" in seen else found | {FINAL_NORM: last}


def alone(model: Any, windows: Windows, row: int) -> dict[str, torch.Tensor]:
    """The inputs of one window: nothing is padded, nothing beside it."""
    token = slice(windows.first_token[row], windows.first_token[row] + windows.n_tokens[row])
    inputs = {"input_ids": torch.from_numpy(windows.input_ids[token].astype(np.int64))[None]}
    if takes_token_types(model):
        types = torch.from_numpy(windows.token_type_ids[token].astype(np.int64))[None]
        inputs["token_type_ids"] = types
    return inputs


@pytest.mark.parametrize("name", KNOWN)
def test_every_site_is_what_hooks_of_ones_own_see(name: str, windows: Windows) -> None:
    own, rows = model_of(name), range(len(windows))
    truth = [own_hooks(own, alone(own, windows, row)) for row in rows]
    every = choose_sites(["*"], own.config.model_type, LAYERS)
    assert list(truth[0]) == list(every)  # in the order of computation
    by_width: dict[int, list[str]] = {}
    for site, values in truth[0].items():
        by_width.setdefault(values.shape[1], []).append(site)
    assert len(by_width) > 1
    for width, sites in by_width.items():
        assert width_of(sites, own.config) == width
        encoder = Encoder(model_of(name), {"all": range(len(sites))}, "32", sites)
        (states,) = encoder(windows, np.array(rows))
        assert states.shape == (windows.n_tokens.sum(), len(sites), width)
        for i, site in enumerate(sites):
            expected = torch.cat([of[site] for of in truth])
            assert expected.abs().max() > 0.01, site
            torch.testing.assert_close(states[:, i], expected, rtol=1e-5, atol=1e-5, msg=site)


@pytest.mark.parametrize("name", KNOWN)
def test_output_projections_of_sites_give_what_is_added(name: str, windows: Windows) -> None:
    model = model_of(name)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == LAYERS]
    values = own_hooks(model, alone(model, windows, 3))
    given: list[torch.Tensor] = []
    for i, block in enumerate(list(lists[0])):
        attn, mlp, _ = own_projections(block)
        for projection, site in ((attn, "attn.hook_z"), (mlp, "mlp.hook_post")):
            hook = projection.register_forward_hook(lambda _, read, out: given.append(out[0]))
            with torch.inference_mode():
                model(**alone(model, windows, 3))
                expected = projection(values[f"blocks.{i}.{site}"])
            hook.remove()
            torch.testing.assert_close(given.pop(0), expected, rtol=1e-5, atol=1e-5, msg=site)
            given.clear()


@pytest.mark.parametrize("name", KNOWN)
def test_sites_between_blocks_are_the_hidden_states(name: str, windows: Windows) -> None:
    own = model_of(name)
    with torch.inference_mode():
        output = own(**alone(own, windows, 3), output_hidden_states=True)
    hidden = [state[0] for state in output.hidden_states]
    sites = choose_sites(["*.hook_*resid*"], own.config.model_type, LAYERS)
    if "ln_final" in str(sites_of(own.config.model_type, LAYERS)):
        sites = (*sites, FINAL_NORM)
    encoder = Encoder(model_of(name), {"all": range(len(sites))}, "32", sites)
    values = dict(zip(sites, encoder(windows, np.array([3]))[0].unbind(1), strict=True))
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    for i in range(LAYERS):
        torch.testing.assert_close(values[f"blocks.{i}.hook_resid_pre"], hidden[i], **close)
    before = values[f"blocks.{LAYERS - 1}.hook_resid_post"]
    normed = (
        FINAL_NORM if FINAL_NORM in sites else f"blocks.{LAYERS - 1}.hook_normalized_resid_post"
    )
    torch.testing.assert_close(values[normed], hidden[-1], **close)
    assert (before - hidden[-1]).abs().max() > 0.01  # the one before the norm is another


def test_only_the_blocks_that_are_needed_are_computed(windows: Windows) -> None:
    sites = choose_sites(["blocks.0.hook_mlp_out"], "bert", LAYERS)
    encoder = Encoder(model_of("bert"), {"all": [0]}, "32", sites)
    (alone_,) = encoder(windows, np.arange(len(windows)))
    assert len(encoder.model.encoder.layer) == 1
    every = choose_sites(["*resid*", "*_out"], "bert", LAYERS)
    whole = Encoder(model_of("bert"), {"all": range(len(every))}, "32", every)
    (states,) = whole(windows, np.arange(len(windows)))
    assert torch.equal(alone_[:, 0], states[:, every.index(sites[0])])


def test_a_batch_of_many_sites_is_smaller_in_the_measure_of_them(windows: Windows) -> None:
    lengths, every = np.full(100, 300), choose_sites(["*resid*", "*_out"], "bert", LAYERS)
    few = Encoder(model_of("bert"), {"all": [0]}, "32", every[:1])
    many = Encoder(model_of("bert"), {"all": range(len(every))}, "32", every)
    assert len(every) == 12
    sizes = [max(b.stop - b.start for b in of.batches(lengths)) for of in (few, many)]
    assert sizes == [1024 // 300, 1]


def test_poolings_of_sites_are_those_of_their_tokens(windows: Windows) -> None:
    sites, rows = choose_sites(["*.hook_attn_out"], "gpt2", LAYERS), np.arange(len(windows))
    (tokens,) = Encoder(model_of("gpt2"), {"all": [0, 1]}, "32", sites)(windows, rows)
    (mean,) = Encoder(model_of("gpt2"), {"mean": [0, 1]}, "32", sites)(windows, rows)
    parts = tokens.split(windows.n_tokens.tolist())
    expected = torch.stack([part.mean(dim=0) for part in parts])
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5)


def test_hooks_are_gone_after_the_pass_even_where_it_fails(windows: Windows) -> None:
    model = model_of("bert")
    sites = dict(enumerate(sites_of("bert", LAYERS).values()))

    def fail(number: int, state: torch.Tensor) -> None:
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"), Taps(model, sites).taken(fail):
        model(**alone(model, windows, 0))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_module_that_transformers_no_longer_has_is_named() -> None:
    model = model_of("gpt2")
    del model.h[1].mlp
    sites = dict(enumerate(sites_of("gpt2", LAYERS).values()))
    with pytest.raises(
        InputError, match=r"no h\.1\.mlp\.c_proj in gpt2: no sites of it can be extracted"
    ):
        Taps(model, sites)


def test_vectors_of_another_size_are_refused() -> None:
    model = model_of("gpt2")
    model.config.hidden_size += 1
    sites = dict(enumerate(sites_of("gpt2", LAYERS).values()))
    with (
        pytest.raises(InputError, match="h.0 of gpt2 reads no vectors of 33 channels, as its"),
        Taps(model, sites).taken(print),
    ):
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["blocks.1.hook_resid_mid"], ["blocks.1.hook_resid_mid"]),
        (["blocks.*.hook_mlp_out"], ["blocks.0.hook_mlp_out", "blocks.1.hook_mlp_out"]),
        (["ln_final*", "blocks.[12].*_out"], ["blocks.1.hook_attn_out", "blocks.1.hook_mlp_out",
                                              FINAL_NORM]),
        (["blocks.0.*_out", "blocks.0.hook_mlp_out"], ["blocks.0.hook_attn_out",
                                                       "blocks.0.hook_mlp_out"]),
    ],
)  # fmt: skip
def test_patterns_mean_sites_once_each_in_the_order_of_computation(
    patterns: list[str], names: list[str]
) -> None:
    assert choose_sites(patterns, "gpt2", 2) == tuple(names)


@pytest.mark.parametrize(
    ("pattern", "model_type", "message"),
    [
        ("h.*.mlp", "gpt2", "'h.*.mlp' means no site of a gpt2 encoder of 2 layers: there are "
         "blocks.0.hook_resid_pre, blocks.0.attn.hook_z, blocks.0.hook_attn_out, "
         "blocks.0.hook_resid_mid, blocks.0.mlp.hook_post, blocks.0.hook_mlp_out, "
         "blocks.0.hook_resid_post, ln_final.hook_normalized, and those"),
        ("blocks.2.hook_mlp_out", "bert", "no site of a bert encoder of 2 layers"),
        (FINAL_NORM, "bert", "no site of a bert encoder"),
        ("blocks.0.hook_normalized_resid_post", "llama", "no site of a llama encoder"),
        ("*", "albert", "no sites are known of a albert encoder: there are those of bert, roberta"),
    ],
)  # fmt: skip
def test_what_an_encoder_does_not_have_is_named_with_what_it_has(
    pattern: str, model_type: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        choose_sites([pattern], model_type, 2)
    assert message in str(caught.value)


def test_sites_of_several_widths_are_refused_with_a_call_for_each() -> None:
    config = model_of("gemma2").config
    with pytest.raises(InputError) as caught:
        width_of(choose_sites(["*_z", "*.mlp.*", "*.[01].hook_mlp_out"], "gemma2", LAYERS), config)
    assert "sites of 3 widths" in str(caught.value)
    assert str(caught.value).endswith(
        "with sites of blocks.*.hook_mlp_out (32 channels) or of "
        "blocks.*.attn.hook_z (48 channels) or of blocks.*.mlp.hook_post (64 channels)"
    )


def test_every_known_family_is_compared() -> None:
    with pytest.raises(InputError) as caught:
        sites_of("none", 1)
    named = str(caught.value).split("those of ")[1].split(";")[0].split(", ")
    assert set(named) == {family.model_type for family in KNOWN.values()}
