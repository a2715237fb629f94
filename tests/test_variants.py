"""Variants of fine-tuning: each does what it is named for, to the last bit where that is exact."""

from __future__ import annotations

import copy
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import ENCODERS, LAYERS, make_family
from objectives import with_mlm_head
from torch import nn
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from workspaces import SETTINGS, write_squad

import bertvision
from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.module import FinetuneModule
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.variants.cls import IsotropicNorm, Standardised, output_layer
from bertvision.pipelines.variants.few_samples import PlainAdam
from bertvision.pipelines.variants.registry import VARIANTS, fitting_depth, load_variants
from bertvision.pipelines.variants.variant import (
    Variant,
    begin,
    embeddings,
    transformer_layers,
)
from bertvision.pipelines.workspace.config import FinetuneConfig
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = {
    "keep": "keep:1",
    "drop": "drop:1",
    "copy": "copy:1",
    "extra": "extra:1",
    "freeze": "freeze:1",
    "freeze-stored": "freeze-stored:1",
    "reinit": "reinit:1",
    "lora": "lora:2",
    "houlsby": "houlsby:3",
    "no-bias-correction": "no-bias-correction",
    "layer-decay": "layer-decay:0.5",
    "mixout": "mixout:0.9",
    "cls-norm": "cls-norm",
    "isobn": "isobn",
    "exits": "exits:1=0.5+2=1",
    "exits-by-depth": "exits-by-depth:all",
    "exits-learned": "exits-learned:1",
    "exits-detached": "exits-detached:1",
    "mlm": "mlm:0.5",
}
"""One of each, for the encoder of two layers."""


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("squad")
    data = {name: write_squad(folder / f"{name}.json", n, n) for name, n in _SIZES.items()}
    settings = {**SETTINGS, "epochs": 1.0, "save_at": ("0e", "1e")}
    masked = with_mlm_head(tiny_bert, folder / "masked")
    return {"model": str(masked), **data, **settings}


_SIZES = {"train": 10, "dev": 3}


@pytest.fixture
def model(tiny_bert: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    return load_model(tiny_bert, AutoModelForQuestionAnswering)


def training(model: PreTrainedModel, *variants: str, **settings: Any) -> FinetuneModule:
    """The module that trains a model, with variants that have begun."""
    found = load_variants(variants)
    torch.manual_seed(1)
    begin(found, model)
    return FinetuneModule(
        *(model, load_task("squad_v2"), FinetuneConfig.model_validate(settings)),
        total_steps=1,
        digest="",
        variants=found,
    )


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def states(model: PreTrainedModel) -> tuple[torch.Tensor, ...]:
    ids = torch.arange(5, 25).reshape(2, 10)
    with torch.inference_mode():
        found: tuple[torch.Tensor, ...] = model.base_model(
            input_ids=ids, output_hidden_states=True
        ).hidden_states
    return found


def test_every_variant_has_an_example_here() -> None:
    assert set(EXAMPLES) == set(VARIANTS)


@pytest.mark.parametrize("text", ["keep:1", "drop:1"])
def test_the_lowest_layers_alone_give_the_lowest_states(model: PreTrainedModel, text: str) -> None:
    before = states(model)
    begin(load_variants([text]), model)
    for found, expected in zip(states(model), before[:2], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert model.config.num_hidden_layers == 1


def test_copied_layers_have_the_weights_of_the_last_and_their_own_gradient(
    model: PreTrainedModel,
) -> None:
    before = states(model)
    begin(load_variants(["copy:2"]), model)
    layers = transformer_layers(model)
    assert len(layers) == model.config.num_hidden_layers == 4
    for lower, upper in ((0, 2), (1, 3)):
        assert same(weights_of(layers[lower]), weights_of(layers[upper]))
        assert not set(map(id, layers[lower].parameters())) & set(
            map(id, layers[upper].parameters())
        )
    for found, expected in zip(states(model)[:3], before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_extra_layers_are_new_and_those_below_are_as_they_were(model: PreTrainedModel) -> None:
    before, lower = states(model), weights_of(transformer_layers(model))
    torch.manual_seed(3)
    begin(load_variants(["extra:1"]), model)
    layers = transformer_layers(model)
    assert same(weights_of(nn.ModuleList(list(layers)[:2])), lower)
    new = dict(layers[2].named_parameters())
    weight = new["intermediate.dense.weight"]
    assert weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)
    assert not new["intermediate.dense.bias"].any()
    for found, expected in zip(states(model)[:3], before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_reinitialised_layers_are_new_and_others_are_not(model: PreTrainedModel) -> None:
    layers = transformer_layers(model)
    with torch.no_grad():
        for p in layers.parameters():
            p.fill_(7.0)
    lower = weights_of(layers[0])
    begin(load_variants(["reinit:1"]), model)
    assert same(weights_of(layers[0]), lower)
    assert not any((p == 7).any() for p in layers[1].parameters())
    norm = dict(layers[1].named_parameters())["output.LayerNorm.weight"]
    assert (norm == 1).all()


def test_frozen_layers_keep_their_weights_and_drop_nothing_out(model: PreTrainedModel) -> None:
    module = training(model, "freeze:1", lr=0.1, weight_decay=0.5)
    optimizer = module.configure_optimizers()
    module.train()
    lower = [*embeddings(model), transformer_layers(model)[0]]
    assert not any(part.training for top in lower for part in top.modules())
    assert transformer_layers(model)[1].training
    one, other = (states(model) for _ in range(2))
    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[2], other[2])  # the layer above drops out
    frozen = [weights_of(part) for part in lower]
    upper = weights_of(transformer_layers(model)[1])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(same(weights_of(part), held) for part, held in zip(lower, frozen, strict=True))
    assert not same(weights_of(transformer_layers(model)[1]), upper)


def moved(module: FinetuneModule) -> set[str]:
    """Names of the parameters that a step of the optimiser changes."""
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    optimizer = module.configure_optimizers()
    for p in module.model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {n for n, p in module.model.named_parameters() if not torch.equal(p, before[n])}


def test_lora_begins_as_the_encoder_and_trains_two_small_matrices_for_query_and_value(
    model: PreTrainedModel,
) -> None:
    before, width = states(model), model.config.hidden_size
    module = training(model, "lora:2", lr=0.1)
    for found, expected in zip(states(model.eval()), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    changed = moved(module)
    added = {name for name in changed if "lora_" in name}
    assert len(added) == 2 * 2 * 2, "A and B, of query and value, in two layers"
    assert {name for name in changed - added} == {"qa_outputs.weight", "qa_outputs.bias"}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 2 * 2 * (2 * width + 2 * width) + 2 * width + 2


def test_lora_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"pip install bertvision\[peft\]"):
        fitting_depth(["lora:2"], 2, "span")


def test_new_weights_in_frozen_layers_do_not_learn(model: PreTrainedModel) -> None:
    changed = moved(training(model, "freeze:1", "lora:2", lr=0.1))
    assert {n.split("layer.")[1][0] for n in changed if "lora_" in n} == {"1"}


def test_a_snapshot_of_lora_has_the_products_in_its_weights(model: PreTrainedModel) -> None:
    plain = copy.deepcopy(model)
    module = training(model, "lora:2", lr=0.1)
    moved(module)
    merged = module.variants[0].whole(model)
    assert list(merged.state_dict()) == list(plain.state_dict())
    for found, expected in zip(states(merged.eval()), states(model.eval()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    query = transformer_layers(merged)[0].attention.self.query.weight  # type: ignore[union-attr]
    there = transformer_layers(model)[0].attention.self.query  # type: ignore[union-attr]
    product = there.lora_B["default"].weight @ there.lora_A["default"].weight  # type: ignore[index, union-attr]
    torch.testing.assert_close(query, there.base_layer.weight + product)  # type: ignore[union-attr]
    assert torch.linalg.matrix_rank(product) <= 2


def test_bottlenecks_begin_next_to_the_identity_and_are_trained_with_the_norms(
    model: PreTrainedModel,
) -> None:
    before, width = states(model), model.config.hidden_size
    module = training(model, "houlsby:3", lr=0.1)
    for found, expected in zip(states(model.eval()), before, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    assert not torch.equal(states(model)[1], before[1])
    changed = moved(module)
    added = {name for name in changed if ".bottleneck." in name}
    assert len(added) == 2 * 2 * 4, "two in each of two layers, of four tensors"
    norms = {name for name in changed if "LayerNorm" in name}
    assert changed - added - norms == {"qa_outputs.weight", "qa_outputs.bias"}
    assert {name.split("layer.")[1].split(".")[0] for name in norms} == {"0", "1"}
    assert sum(p.numel() for n, p in model.named_parameters() if n in added) == 2 * 2 * (
        2 * 3 * width + 3 + width
    )


@pytest.mark.parametrize(
    ("family", "text"),
    [
        *product([name for name in ENCODERS if name != "albert"], ["lora:2", "houlsby:3"]),
        *product(["llama", "qwen2"], ["lora:2"]),
    ],
)
def test_few_new_weights_find_their_places_in_every_family(
    family: str, text: str, tmp_path: Path
) -> None:
    model = load_model(make_family(family, tmp_path), AutoModelForSequenceClassification)
    ids = torch.randint(5, 20, (1, 9), generator=torch.manual_seed(0))
    with torch.inference_mode():
        before = model(input_ids=ids).logits
    module = training(model, text, lr=0.1)
    with torch.inference_mode():
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, before, atol=1e-3, rtol=0)
    changed = moved(module)
    inside = {n for n in changed if "lora_" in n or ".bottleneck." in n}
    places = {n.split(".lora_")[0].split(".bottleneck")[0] for n in inside}
    assert len(places) in (LAYERS, 2 * LAYERS), "one fused matrix, or two places, in each layer"
    with torch.inference_mode():
        assert not torch.allclose(model(input_ids=ids).logits, before, atol=1e-3)


def test_layers_learn_the_slower_the_lower_they_lie(model: PreTrainedModel) -> None:
    module = training(model, "layer-decay:0.5", lr=1.0)
    optimizer = module.configure_optimizers()
    rates = {id(p): g.get("scale", 1.0) for g in optimizer.param_groups for p in g["params"]}
    assert len(rates) == len(list(model.parameters()))
    expected = [(embeddings(model)[0], 0.125)]
    expected += [
        (layer, 0.5**k) for layer, k in zip(transformer_layers(model), (2, 1), strict=True)
    ]
    expected += [(model.qa_outputs, 1.0)]  # type: ignore[list-item]
    for part, scale in expected:
        assert {rates[id(p)] for p in part.parameters()} == {scale}


def test_adam_without_bias_correction_is_the_published_update() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = PlainAdam([{"params": [p], "weight_decay": 0.1}], lr=0.01)
    expected, m, v = p.detach().clone(), torch.zeros(3), torch.zeros(3)
    for slope in ([1.0, 2.0, -3.0], [0.5, 0.0, 4.0], [-1.0, 1.0, 1.0]):
        g = torch.tensor(slope, dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * m / (v.sqrt() + 1e-8)
        torch.testing.assert_close(p.detach(), expected)


def test_the_first_step_without_bias_correction_is_about_three_times_as_large(
    model: PreTrainedModel,
) -> None:
    """(1 − β₁) / √(1 − β₂) = 0.1 / 0.0316: what Zhang et al. hold for the instability."""
    moved = []
    for variants in ((), ("no-bias-correction",)):
        again = copy.deepcopy(model)
        optimizer = training(again, *variants, lr=1e-3).configure_optimizers()
        before = weights_of(again)
        for parameter in again.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moved.append((weights_of(again)[0] - before[0]).abs().mean().item())
    assert moved[1] / moved[0] == pytest.approx(0.1 / 0.001**0.5, rel=1e-3)


def test_mixout_computes_with_the_pretrained_weights_by_chance_and_with_the_own_in_the_mean(
    model: PreTrainedModel,
) -> None:
    begin(load_variants(["mixout:0.5"]), model)
    linear = next(m for m in model.base_model.modules() if isinstance(m, nn.Linear))
    pretrained = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.add_(1.0)
        linear.bias.zero_()
    unit = torch.eye(linear.in_features)
    linear.eval()
    torch.testing.assert_close(linear(unit).T, linear.weight)
    linear.train()
    torch.manual_seed(0)
    drawn = torch.stack([linear(unit).T.detach() for _ in range(400)])
    # an element is W where it was kept and U where not, rescaled so that the mean is W
    kept, mixed = (linear.weight - 0.5 * pretrained) / 0.5, pretrained
    assert torch.minimum((drawn - kept).abs(), (drawn - mixed).abs()).max() < 1e-5
    torch.testing.assert_close(drawn.mean(0), linear.weight.detach(), atol=0.3, rtol=0)


def test_isobn_leaves_white_channels_alone_and_scales_correlated_ones_down() -> None:
    random = torch.Generator().manual_seed(0)
    white = torch.linalg.qr(torch.randn(400, 6, generator=random).sub(0.3))[0] * 400**0.5
    white -= white.mean(0)
    layer = IsotropicNorm(6)
    layer(torch.linalg.qr(white)[0] * 400**0.5)
    scale = layer.scale()
    torch.testing.assert_close(scale, torch.ones(6), atol=0.02, rtol=0)

    layer = IsotropicNorm(6)
    x = torch.randn(400, 6, generator=random)
    x[:, 1] = x[:, 0]  # two that say the same
    x[:, 5] *= 10  # and one that varies much
    layer(x)
    sigma = x.std(0, correction=0)
    rho = torch.corrcoef(x.T)
    theta = (sigma * rho.square().mean(1) + 1e-3).rsqrt()
    theta *= ((sigma**2).sum() / (sigma**2 * theta**2).sum()).sqrt()
    torch.testing.assert_close(layer.scale(), theta, rtol=1e-4, atol=0)
    assert layer.scale()[0] < layer.scale()[2]
    assert layer.scale()[5] < layer.scale()[2]
    assert layer.eval()(x).var(0).sum().item() == pytest.approx(x.var(0).sum().item(), rel=1e-3)


def test_isobn_takes_its_statistics_in_float32_where_the_encoder_computes_in_bfloat16() -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    plain, mixed = IsotropicNorm(6), IsotropicNorm(6)
    expected = plain(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = mixed(x)
    assert torch.equal(found, expected)
    assert torch.equal(mixed.covariance, plain.covariance)


def test_isobn_keeps_running_means_of_covariances() -> None:
    random = torch.Generator().manual_seed(0)
    layer, batches = IsotropicNorm(3), [torch.randn(8, 3, generator=random) for _ in range(3)]
    for x in batches:
        layer(x)
    expected = torch.cov(batches[0].T, correction=0)
    for x in batches[1:]:
        expected = 0.95 * expected + 0.05 * torch.cov(x.T, correction=0)
    torch.testing.assert_close(layer.covariance, expected)
    layer(batches[0][:1])  # one vector has no variance, and is not counted
    torch.testing.assert_close(layer.covariance, expected)


def test_cls_norm_gives_channels_of_mean_0_and_variance_1() -> None:
    x = 5 + 3 * torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    layer = Standardised(4)
    out = layer(x)
    torch.testing.assert_close(out.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(0, correction=0), torch.ones(4), atol=1e-4, rtol=0)
    assert torch.isfinite(layer(x[:1])).all()


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra"])
def test_what_the_output_layer_reads_is_normalised_in_every_family(
    family: str, tmp_path: Path
) -> None:
    folder = make_family(family, tmp_path)
    model = load_model(folder, AutoModelForSequenceClassification, num_labels=3)
    begin(load_variants(["cls-norm"]), model)
    read: list[torch.Tensor] = []
    output_layer(model)[1].register_forward_hook(lambda m, args, out: read.append(out))
    ids = torch.randint(5, 20, (16, 9), generator=torch.manual_seed(0))
    model.train()
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(read[0], logits)
    torch.testing.assert_close(
        logits.mean(0), output_layer(model)[1].bias, atol=1e-4, rtol=0
    )  # of inputs of mean 0


@pytest.mark.parametrize("family", [name for name in ENCODERS if name != "albert"])
def test_single_layers_are_found_in_every_family(family: str, tmp_path: Path) -> None:
    model = load_model(make_family(family, tmp_path), AutoModelForQuestionAnswering)
    assert len(transformer_layers(model)) == LAYERS
    below = {id(p) for part in embeddings(model) for p in part.parameters()}
    above = {id(p) for p in transformer_layers(model).parameters()}
    assert below
    assert not below & above


def fitted(options: dict[str, Any], folder: Path, text: str, **more: Any) -> Workspace:
    if "classification" in load_variants([text])[0].kinds[:1]:
        options = {**options, "task": "answerable"}
    finetune(folder, FinetuneOptions(**options, variant=(text,)), evaluate=False, **more)
    return Workspace.find(folder)


def snapshots(workspace: Workspace) -> dict[str, bytes]:
    files = sorted(workspace.root.glob("snapshots/[0-9]*/model.safetensors"))
    return {file.parent.name: file.read_bytes() for file in files}


class Whole(NamedTuple):
    """A run with a variant that nothing interrupted, and the model that it trained."""

    text: str
    workspace: Workspace
    trained: PreTrainedModel


@pytest.fixture(scope="module", params=EXAMPLES.values())
def whole(
    request: pytest.FixtureRequest,
    options: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Whole:
    from bertvision.pipelines.finetuning import finetune as module

    trained: list[PreTrainedModel] = []
    load = module.load_pretrained

    def kept(*args: Any) -> PreTrainedModel:
        trained.append(load(*args))
        return trained[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_pretrained", kept)
        workspace = fitted(options, tmp_path_factory.mktemp("whole") / "ws", request.param)
    return Whole(request.param, workspace, trained[0].eval())


def test_an_interrupted_run_with_a_variant_ends_in_the_same_snapshots(
    whole: Whole, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, expected = whole.text, snapshots(whole.workspace)
    assert list(expected) == ["0e", "1e"]
    assert expected["0e"] != expected["1e"]

    step = FinetuneModule.training_step

    def killed(self: FinetuneModule, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch.number == 2:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    monkeypatch.setattr(FinetuneModule, "training_step", killed)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fitted(options, tmp_path / "killed", text, resume_every_seconds=0)
    assert (tmp_path / "killed" / "finetune" / "resume.ckpt").is_file()
    monkeypatch.undo()
    assert snapshots(fitted(options, tmp_path / "killed", text)) == expected


def test_a_snapshot_is_read_as_the_model_that_was_trained(whole: Whole) -> None:
    text, workspace, trained = whole
    read = load_snapshot(workspace.snapshot_dir("1e")).model
    near = {"rtol": 1e-4, "atol": 1e-5} if text.startswith("lora") else {"rtol": 0, "atol": 0}
    depth = workspace.config.model.num_hidden_layers
    assert len(states(read)) == depth + 1
    for found, expected in zip(states(read), states(trained), strict=True):
        torch.testing.assert_close(found, expected, **near)
    ids = torch.arange(5, 25).reshape(2, 10)
    with torch.inference_mode():
        one, other = (model(input_ids=ids).to_tuple() for model in (read, trained))
    for found, expected in zip(one, other, strict=True):
        torch.testing.assert_close(found, expected, **near)
    everything = dict(trained.named_parameters())
    for name, parameter in read.named_parameters():
        if name.startswith(("exits.", "mlm.")):
            assert torch.equal(parameter, everything[name])
    held = json.loads((workspace.snapshot_dir("1e") / "snapshot.json").read_text())
    assert held["finetune"]["variant"] == [text]


def apart(one: Workspace, other: Workspace) -> float:
    """How far two trainings from the same start ended from each other, in parts of the way.

    Adam makes much of gradients that are nearly nothing, whose sign rounding decides.
    """
    begun, found, expected = (
        torch.cat([p.detach().flatten() for p in load_snapshot(folder).model.parameters()])
        for folder in (
            *(one.snapshot_dir("0e"), one.snapshot_dir("1e")),
            other.snapshot_dir("1e"),
        )
    )
    assert (found - begun).norm() > 0
    return float((found - expected).norm() / (found - begun).norm())


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_layers_frozen_in_a_store_give_the_snapshots_of_layers_frozen_in_place(
    options: dict[str, Any], tiny_bert: Path, tmp_path: Path, layers: int
) -> None:
    """The same weights, up to the order of sums, without running the lower layers."""
    asked = {**options, "model": str(tiny_bert)}
    one, other = (
        fitted(asked, tmp_path / name, f"{name}:{layers}") for name in ("freeze", "freeze-stored")
    )
    assert apart(one, other) < 1e-2
    assert not (other.root / "finetune" / "frozen").exists()  # it was needed while training alone


@pytest.mark.parametrize("family", ["roberta", "distilbert", "electra", "deberta-v2"])
def test_a_family_is_trained_from_a_stored_state_where_that_gives_the_same(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """A family for which it would not is refused by name before the first step."""
    asked = {**options, "model": str(make_family(family, tmp_path / "model")), "max_length": 100}
    asked |= {"max_question_length": 20, "overlap": 20}
    if family == "deberta-v2":  # a convolution in its first layer alone
        with pytest.raises(InputError, match="does not compute the same.*take --variant freeze:1"):
            fitted(asked, tmp_path / "stored", "freeze-stored:1")
        return
    one, other = (fitted(asked, tmp_path / n, f"{n}:1") for n in ("freeze", "freeze-stored"))
    assert apart(one, other) < 1e-2


def test_variants_are_combined_in_one_order(model: PreTrainedModel) -> None:
    one, other = (
        load_variants(texts) for texts in (["freeze:1", "keep:1"], ["keep:1", "freeze:1"])
    )
    assert [str(v) for v in one] == [str(v) for v in other] == ["keep:1", "freeze:1"]
    assert fitting_depth(["copy:2", "drop:1"], 12, "span") == 13


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["freez:2"], "there is no variant 'freez'; did you mean freeze"),
        (["freeze"], "give freeze:LAYERS"),
        (["no-bias-correction:1"], "give no-bias-correction alone"),
        (["freeze:3"], "the encoder has 2 layers; freeze 0 to 2"),
        (["keep:2"], "the encoder has 2 layers; keep 1 to 1"),
        (["keep:0"], "give a whole number of layers, from 1"),
        (["reinit:x"], "give a whole number of layers, from 0"),
        (["keep:1", "freeze:2"], "the encoder has 1 layers; freeze 0 to 1"),
        (["mixout:1"], "give a number between 0 and 1"),
        (["layer-decay:1.5"], "give a number above 0, at most 1"),
        (["freeze:1", "freeze:2"], "freeze stands twice"),
        (["isobn"], "is for tasks of the kind classification, and this one is of the kind span"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_made(
    options: dict[str, Any], tmp_path: Path, texts: list[str], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        finetune(tmp_path / "ws", FinetuneOptions(**options, variant=tuple(texts)))
    assert not (tmp_path / "ws").exists()


def test_a_workspace_is_continued_with_its_own_variant_alone(
    options: dict[str, Any], tmp_path: Path
) -> None:
    fitted(options, tmp_path / "ws", "keep:1")
    shown = bertvision.status(workspace=tmp_path / "ws")
    assert shown.variant == ["keep:1"]
    assert "variant    keep:1\n" in str(shown)
    with pytest.raises(WorkspaceError, match="was made with variant = keep:1, not freeze:1"):
        fitted(options, tmp_path / "ws", "freeze:1")


class Halved(Variant):
    """A variant of one's own: one class, named by its dotted path."""

    def begin(self, model: PreTrainedModel) -> None:
        with torch.no_grad():
            for parameter in model.base_model.parameters():
                parameter.mul_(0.5)


def test_a_variant_of_ones_own_is_a_class(
    options: dict[str, Any], tmp_path: Path, tiny_bert: Path
) -> None:
    workspace = fitted(options, tmp_path / "ws", "test_variants:Halved")
    before = load_model(tiny_bert, AutoModelForQuestionAnswering).base_model
    now = load_snapshot(workspace.snapshot_dir("0e")).model.base_model
    for found, expected in zip(now.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(found, 0.5 * expected)
