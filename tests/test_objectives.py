"""Objectives beside the task's loss: losses at several layers, and of masked words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_family
from objectives import with_mlm_head
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from workspaces import SETTINGS, write_squad

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.module import FinetuneModule
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import Batch
from bertvision.pipelines.variants.cls import Standardised
from bertvision.pipelines.variants.exits import ExitLayers, ExitsLearned, exits_of
from bertvision.pipelines.variants.masked import Masking, head_of, masked_loss, masked_words
from bertvision.pipelines.variants.registry import fitting_depth, load_variants
from bertvision.pipelines.variants.variant import begin, transformer_layers
from bertvision.pipelines.workspace.config import FinetuneConfig
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

NO_ROWS: Any = None


@pytest.fixture(scope="module")
def masked_bert(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mlm_head(tiny_bert, tmp_path_factory.mktemp("masked") / "bert")


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("squad")
    data = {name: write_squad(folder / f"{name}.json", n, n) for name, n in _SIZES.items()}
    settings = {**SETTINGS, "epochs": 1.0, "save_at": ("1e",), "gradient_clip": 0.0}
    return {"model": str(tiny_bert), **data, **settings}


_SIZES = {"train": 10, "dev": 3}


@pytest.fixture
def model(tiny_bert: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    return load_model(tiny_bert, AutoModelForQuestionAnswering)


def a_batch(**labels: Tensor) -> Batch:
    ids = torch.arange(5, 25).reshape(2, 10)
    return Batch(ids, None, torch.ones_like(ids), labels)


SPANS = {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([2, 5])}


def training(model: PreTrainedModel, task: str, *variants: str) -> FinetuneModule:
    found = load_variants(variants)
    torch.manual_seed(1)
    begin(found, model)
    settings = FinetuneConfig(variant=variants)
    module = FinetuneModule(
        *(model, load_task(task), settings), total_steps=1, digest="", variants=found
    )
    return module.eval()  # nothing is dropped


def fitted(options: dict[str, Any], folder: Path, *texts: str) -> Workspace:
    finetune(folder, FinetuneOptions(**options, variant=texts), evaluate=False)
    return Workspace.find(folder)


def tensors(workspace: Workspace, tag: str = "1e") -> dict[str, Tensor]:
    return load_file(workspace.snapshot_dir(tag) / "model.safetensors")


@pytest.mark.parametrize("text", ["exits:1=0", "exits-detached:1"])
def test_an_encoder_that_hears_of_the_last_loss_alone_is_fine_tuned_plainly(
    options: dict[str, Any], tmp_path: Path, text: str
) -> None:
    plain, other = (
        tensors(fitted(options, tmp_path / name, *texts))
        for name, texts in (("plain", ()), ("other", (text,)))
    )
    assert {name for name in other if name not in plain} == {"exits.at.1.weight", "exits.at.1.bias"}
    for name, expected in plain.items():
        assert torch.equal(other[name], expected), name


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("exits:1", (1 / 2, 1 / 2)),
        ("exits:1=0.5+2=1.5", (1 / 4, 3 / 4)),
        ("exits-by-depth:all", (1 / 3, 2 / 3)),
        ("exits-learned:1", (1 / 2, 1 / 2)),  # at the start
        ("exits-detached:1", (1.0, 1.0)),
    ],
)
def test_losses_of_layers_are_weighted_as_said(
    model: PreTrainedModel, text: str, weights: tuple[float, float]
) -> None:
    module, batch = training(model, "squad_v2", text), a_batch(**SPANS)
    output = model(**batch.inputs, output_hidden_states=True)
    start, end = exits_of(model).at["1"](output.hidden_states[1]).unbind(-1)
    wanted = [
        (
            functional.cross_entropy(a, SPANS["start_positions"], reduction="sum")
            + functional.cross_entropy(b, SPANS["end_positions"], reduction="sum")
        )
        / 2
        for a, b in ((start, end), (output.start_logits, output.end_logits))
    ]
    expected = weights[0] * wanted[0] + weights[1] * wanted[1]
    torch.testing.assert_close(module._loss(batch, NO_ROWS), expected)


def test_an_output_layer_of_classes_reads_the_first_token(tiny_bert: Path) -> None:
    model = load_model(tiny_bert, AutoModelForSequenceClassification, num_labels=3)
    training(model, "answerable", "exits:1")
    states = torch.randn(2, 5, model.config.hidden_size)
    logits = exits_of(model)(1, states, "classification")[0]
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits, exits_of(model).at["1"](states[:, 0]))
    torch.testing.assert_close(exits_of(model)(1, states[:, :1], "classification")[0], logits)


def test_the_gradient_of_a_lower_loss_reaches_the_layers_up_to_it(model: PreTrainedModel) -> None:
    module, batch = training(model, "squad_v2", "exits:1"), a_batch(**SPANS)
    output = model(**batch.inputs, output_hidden_states=True)
    found = exits_of(model)(1, output.hidden_states[1], "span")
    module.task.loss(found, batch).backward()
    lower, upper = transformer_layers(model)
    assert all(p.grad is None or not p.grad.any() for p in upper.parameters())
    assert all(p.grad is not None for p in lower.parameters())
    assert any(p.grad.any() for p in lower.parameters())  # type: ignore[union-attr]


def test_detached_layers_give_the_encoder_no_gradient(model: PreTrainedModel) -> None:
    batch, found = a_batch(**SPANS), []
    for text in ("exits:1=0", "exits-detached:1"):
        again = copy.deepcopy(model)
        training(again, "squad_v2", text)._loss(batch, NO_ROWS).backward()
        found.append({name: p.grad for name, p in again.named_parameters()})
    plain, detached = found
    assert detached.pop("exits.at.1.weight").any()  # type: ignore[union-attr]
    assert all(
        torch.equal(grad, detached[name])  # type: ignore[arg-type]
        for name, grad in plain.items()
        if grad is not None
    )


def test_learned_weights_stay_normalised_and_end_where_kendalls_formula_says() -> None:
    variant, exits = ExitsLearned("exits-learned", "all"), ExitLayers([1, 2], 4, 2, learned=True)
    losses = {1: torch.tensor(6.0), 2: torch.tensor(3.0), 3: torch.tensor(1.5)}  # of 3 windows
    assert exits.scores is not None
    optimizer = torch.optim.Adam([exits.scores], lr=0.01)
    assert variant.joined(exits, losses, 3).item() == pytest.approx(3.5)
    for _ in range(1500):
        optimizer.zero_grad()
        variant.joined(exits, losses, 3).backward()
        optimizer.step()
        assert exits.scores.softmax(0).sum().item() == pytest.approx(1)
    weights, of = exits.scores.detach().softmax(0), torch.tensor([2.0, 1.0, 0.5])
    torch.testing.assert_close(
        weights, 1 / (3 * (1 + of - (weights * of).sum())), rtol=1e-3, atol=0
    )
    assert weights[2] > weights[1] > weights[0] > 0.1


def test_learned_weights_move_in_training_and_are_kept(
    options: dict[str, Any], tmp_path: Path
) -> None:
    held = tensors(fitted({**options, "lr": 1e-5}, tmp_path / "ws", "exits-learned:1"))
    assert held["exits.scores"].shape == (2,)
    assert held["exits.scores"].abs().min() > 1e-3  # far more than three steps of 1e-5 are
    model = load_snapshot(tmp_path / "ws" / "snapshots" / "1e").model
    assert torch.equal(exits_of(model).scores, held["exits.scores"])  # type: ignore[arg-type]


def test_layers_above_those_frozen_in_a_store_have_their_losses(
    options: dict[str, Any], tmp_path: Path
) -> None:
    asked = {**options, "save_at": ("0e", "1e")}
    one, other = (
        fitted(asked, tmp_path / name, f"{name}:1", "exits:1")
        for name in ("freeze", "freeze-stored")
    )
    begun, found, expected = (
        torch.cat([x.flatten() for _, x in sorted(tensors(space, tag).items())])
        for space, tag in ((one, "0e"), (other, "1e"), (one, "1e"))
    )
    assert (found - expected).norm() < 1e-2 * (found - begun).norm()  # up to the order of sums


def test_several_objectives_and_other_variants_go_together(
    options: dict[str, Any], masked_bert: Path, tmp_path: Path
) -> None:
    asked = {**options, "model": str(masked_bert), "task": "answerable"}
    texts = ("cls-norm", "exits-by-depth:all", "mlm:0.5", "layer-decay:0.5")
    workspace = fitted(asked, tmp_path / "ws", *texts)
    model = load_snapshot(workspace.snapshot_dir("1e")).model
    assert isinstance(model.classifier.norm, Standardised)  # type: ignore[union-attr]
    assert not hasattr(exits_of(model).at["1"], "norm")
    held = tensors(workspace)
    assert torch.equal(held["mlm.bias"], head_of(model).bias)  # type: ignore[arg-type]
    begun = AutoModelForMaskedLM.from_pretrained(masked_bert)
    assert not torch.equal(held["mlm.bias"], begun.get_output_embeddings().bias)
    assert not any("decoder" in name for name in held)  # it is the word embeddings
    assert bertvision.status(workspace=workspace.root).variant == list(texts)


def test_output_layers_stand_beside_adapters_and_are_averaged_with_the_rest(
    options: dict[str, Any], masked_bert: Path, tmp_path: Path
) -> None:
    asked = {**options, "model": str(masked_bert), "save_at": ("0e", "1e")}
    workspace = fitted(asked, tmp_path / "ws", "lora:2", "exits:1", "mlm:0.5")
    first, last = tensors(workspace, "0e"), tensors(workspace)
    read = load_snapshot(ensure_snapshot(workspace, "0e+1e")).model.state_dict()
    for name in ("exits.at.1.weight", "mlm.bias"):
        assert not torch.equal(first[name], last[name])
        torch.testing.assert_close(read[name], (first[name] + last[name]) / 2)
    embeddings = next(name for name in first if "word_embeddings" in name)
    assert torch.equal(first[embeddings], last[embeddings])  # the decoder of mlm stays too


FAMILIES = ["bert", "roberta", "distilbert", "electra", "deberta-v2", "modernbert"]


@pytest.mark.parametrize("family", FAMILIES)
def test_masked_words_have_transformers_own_loss_in_every_family(
    family: str, tmp_path: Path
) -> None:
    """A window alone is compared: there both means over masked words are the same."""
    plain = make_family(family, tmp_path / "plain", AutoModelForMaskedLM)
    folder = with_mlm_head(plain, tmp_path / "masked")
    model = load_model(folder, AutoModelForQuestionAnswering)
    begin(load_variants(["mlm:1"]), model, folder)
    ids = torch.arange(5, 19).unsqueeze(0)
    batch, chosen = Batch(ids, None, torch.ones_like(ids), {}), torch.zeros(1, 14, dtype=torch.bool)
    chosen[0, [2, 3, 9]] = True
    masking = head_of(model).masking
    assert masking is not None
    masked = torch.where(chosen, masking.mask, ids)
    own = AutoModelForMaskedLM.from_pretrained(folder).eval()
    expected = own(
        **{**batch.inputs, "input_ids": masked, "labels": ids.masked_fill(~chosen, -100)}
    ).loss
    torch.testing.assert_close(masked_loss(model, batch, masked, chosen), expected)

    read = load_model(folder, AutoModelForQuestionAnswering)
    load_variants(["mlm:1"])[0].build(read)  # without values, as a snapshot is read
    there = head_of(model).state_dict()
    assert {name: x.shape for name, x in head_of(read).state_dict().items()} == {
        name: x.shape for name, x in there.items()
    }
    head_of(read).load_state_dict(there)
    torch.testing.assert_close(masked_loss(read, batch, masked, chosen), expected)


def test_the_masked_loss_of_windows_is_the_sum_of_each_alone(masked_bert: Path) -> None:
    model = load_model(masked_bert, AutoModelForQuestionAnswering)
    begin(load_variants(["mlm:1"]), model, masked_bert)
    batch = a_batch()
    chosen = torch.zeros(2, 10, dtype=torch.bool)
    chosen[0, [2, 3, 7]] = chosen[1, [5]] = True
    ids = torch.where(chosen, 4, batch.input_ids)
    alone = [
        masked_loss(
            model,
            Batch(batch.input_ids[i : i + 1], None, batch.attention_mask[i : i + 1], {}),
            *(ids[i : i + 1], chosen[i : i + 1]),
        )
        for i in range(2)
    ]
    torch.testing.assert_close(masked_loss(model, batch, ids, chosen), alone[0] + alone[1])


def test_words_that_are_nowhere_in_the_text_learn_through_the_decoder(masked_bert: Path) -> None:
    model = load_model(masked_bert, AutoModelForQuestionAnswering)
    module = training(model, "squad_v2")
    variants = load_variants(["mlm:0.5"])
    begin(variants, model, masked_bert)
    module.variants, batch = variants, a_batch(**SPANS)
    torch.manual_seed(0)
    module._loss(batch, NO_ROWS).backward()
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    assert embeddings.weight.grad is not None
    assert embeddings.weight.grad[40:].abs().sum(1).min() > 0
    names = [name for name, _ in model.named_parameters()]
    assert len({name for name in names if "word_embeddings" in name}) == 1


def test_fifteen_percent_of_words_are_chosen_and_masked_as_bert_has_it() -> None:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 1000, (400, 102), generator=random)
    ids[:, 0], ids[:, 60], real = 2, 3, torch.ones(400, 102, dtype=torch.bool)
    real[:, 62:] = False
    masking = Masking(mask=4, special=(0, 2, 3), words=1000)
    torch.manual_seed(0)
    masked, chosen = masked_words(ids, real, masking)
    assert chosen.sum(1).unique().tolist() == [9]  # of 60 words
    assert not chosen[:, [0, 60]].any()
    assert not chosen[~real].any()
    assert torch.equal(masked[~chosen], ids[~chosen])
    became, were = masked[chosen], ids[chosen]
    assert (became == 4).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (became == were).float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert chosen[:, 1:60].float().mean(0).std() < 0.03  # wherever they stand
    torch.manual_seed(0)
    assert torch.equal(masked_words(ids, real, masking)[0], masked)
    one = masked_words(ids[:1, :3], real[:1, :3], masking)[1]
    assert one.sum() == 1  # at least, of two words
    none = torch.tensor([[2, 3]])
    assert not masked_words(none, torch.ones_like(none).bool(), masking)[1].any()


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["exits:3"], r"give exits:all or .*some of the layers 1 to 1 once each; layer 2, the l"),
        (["exits:0"], "layers 1 to 1"),
        (["exits:2"], "layers 1 to 1"),
        (["exits:1+1"], "once each"),
        (["exits:1=-1"], "layers 1 to 1"),
        (["exits:1+2=0"], "whose weight must be above 0"),
        (["exits"], "give exits:LAYERS"),
        (["exits-by-depth:1=2"], r"exits-by-depth:LAYER\+LAYER"),
        (["exits:1", "exits-learned:1"], "exits:1,exits-learned:1: leave one of the two out"),
        (["keep:1", "exits:1"], "layers 1 to 0"),
        (["freeze-stored:2", "exits:1"], "with freeze-stored:2 layer 1 is not run; take freeze:2"),
        (["mlm:0"], "give a number above 0"),
        (["mlm:0.5"], "has no MLM head: its weights lack"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_made(
    options: dict[str, Any], tmp_path: Path, texts: list[str], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        finetune(tmp_path / "ws", FinetuneOptions(**options, variant=tuple(texts)))
    assert not (tmp_path / "ws").exists()


def test_a_head_whose_decoder_is_not_the_word_embeddings_is_refused(
    options: dict[str, Any], masked_bert: Path, tmp_path: Path
) -> None:
    model = AutoModelForMaskedLM.from_pretrained(masked_bert, tie_word_embeddings=False)
    folder = with_mlm_head(masked_bert, tmp_path / "untied")
    model.save_pretrained(folder)
    with pytest.raises(InputError, match="is not its word embeddings"):
        finetune(
            tmp_path / "ws",
            FinetuneOptions(**{**options, "model": str(folder)}, variant=("mlm:1",)),
        )
    assert not (tmp_path / "ws").exists()


def test_depth_is_counted_before_output_layers_are_placed() -> None:
    assert fitting_depth(["exits:13", "copy:2"], 12, "span") == 14
