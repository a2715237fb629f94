"""Heads of convolutions: no window sees another one or its padding, in training neither."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bertvision.errors import InputError
from bertvision.models import convolution
from bertvision.models.cnn import KernelBank
from bertvision.models.convolution import (
    Conv,
    ConvNorm,
    Rows,
    SeparableNorm,
    average_pool,
    flatten,
    recompute_statistics,
    same,
    to_image,
)
from bertvision.models.factory import HEADS, build_head
from bertvision.models.heads import Head

LAYERS, HIDDEN = 3, 32

SPAN = [name for name in HEADS if "cnn" in name or "ception" in name and "cls" not in name]
CHEAP = [name for name in SPAN if "ception" not in name]
CLS = [name for name in HEADS if name.startswith("cls-xception")]


def batch(*lengths: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(sum(lengths), LAYERS, HIDDEN, generator=generator)
    return states, torch.tensor(lengths)


def make(name: str, *, seed: int = 0, layers: int = LAYERS, hidden: int = HIDDEN) -> Head:
    """A head as training would leave it: norms that are not the identity, statistics of data."""
    torch.manual_seed(seed)
    head = build_head(name, layers=layers, hidden=hidden)
    assert isinstance(head, Head)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.add_(torch.randn_like(module.weight) * 0.2)
                module.bias.add_(torch.randn_like(module.bias) * 0.2)
                module.momentum = 1.0
            elif isinstance(module, nn.Linear):  # adapters begin near zero, and would stay there
                module.weight.add_(torch.randn_like(module.weight) * 0.1)
        states = torch.randn(12, layers, hidden)
        one = head.kind == "classification"
        head(states, torch.ones(12, dtype=torch.int64) if one else torch.tensor([5, 7]))
    return head.eval()


# --- the parts ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([(1, 3), (3, 3), (5, 5), (7, 3)]),
    st.integers(1, 17),
    st.sampled_from([1, 2, 4]),
)
def test_convolution_over_windows_is_that_of_each_window_alone(
    lengths: list[int], kernel: tuple[int, int], width: int, stride: int
) -> None:
    conv = Conv(2, 3, kernel, stride=stride)
    states = torch.randn(sum(lengths), 2, width)
    rows = Rows.between(torch.tensor(lengths), len(states), 3, states.device)
    ours = conv(to_image(states), rows)
    assert ours.shape == (len(states), 3, 1, same(width, stride))
    pieces = []
    for window in states.split(lengths):
        image = window.transpose(0, 1).unsqueeze(0)  # (1, channels, seq, width)
        alone = F.conv2d(image, conv.weight, stride=conv.stride, padding=conv.padding)
        pieces.append(alone[0].transpose(0, 1))
    torch.testing.assert_close(ours.squeeze(2), torch.cat(pieces))


def test_one_row_kernel_is_an_ordinary_convolution_of_each_token() -> None:
    conv = Conv(LAYERS, 6, (1, 7), stride=4, dilation=2)
    states, _ = batch(5)
    expected = F.conv1d(states, conv.weight.squeeze(2), stride=4, padding=6, dilation=2)
    torch.testing.assert_close(conv(to_image(states)).squeeze(2), expected)


def test_kernel_bank_is_seven_convolutions_side_by_side() -> None:
    torch.manual_seed(0)
    bank, states = KernelBank(2), torch.randn(9, 1, 21)
    rows = Rows.between(torch.tensor([9]), 9, 3, states.device)
    ours = bank(to_image(states), rows).squeeze(2)  # (tokens, 14, 6)
    image = states.transpose(0, 1).unsqueeze(0)
    for n in range(1, 8):
        before, after = (n - 1) // 2, n // 2  # 'same'
        padded = F.pad(image, (before, after, before, after))
        alone = F.conv2d(padded, bank.kernels[n - 1], stride=(1, 4))[0].transpose(0, 1)
        torch.testing.assert_close(ours[:, 2 * n - 2 : 2 * n], alone)


def test_flatten_loses_no_feature() -> None:
    image = torch.randn(4, 3, 1, 5)
    assert sorted(flatten(image)[2].tolist()) == sorted(image[2].flatten().tolist())


def test_average_pooling_does_not_count_padding() -> None:
    image = to_image(torch.tensor([[[1.0, 2.0, 6.0, 10.0]]]))
    assert average_pool(image).flatten().tolist() == [1.5, 6.0]


def test_weights_begin_as_glorot_has_them() -> None:
    torch.manual_seed(0)
    weight = Conv(64, 96, (3, 5)).weight
    bound = (6 / ((64 + 96) * 15)) ** 0.5
    assert weight.abs().max().item() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)


# --- statistics ---------------------------------------------------------------------------------


def test_statistics_are_of_real_tokens_only() -> None:
    torch.manual_seed(0)
    lengths = [2, 9, 1]
    layer, states = ConvNorm(Conv(2, 3, (3, 3))), torch.randn(12, 2, 8) + 5.0
    layer.norm.momentum = 1.0
    layer(to_image(states), Rows.between(torch.tensor(lengths), 12, 1, states.device))
    pieces = [
        F.conv2d(window.transpose(0, 1)[None], layer.conv.weight, padding=1)[0].flatten(1)
        for window in states.split(lengths)
    ]
    seen = torch.cat(pieces, dim=1)  # (channels, tokens × width)
    torch.testing.assert_close(layer.norm.running_mean, seen.mean(dim=1))
    torch.testing.assert_close(layer.norm.running_var, seen.var(dim=1))


@pytest.mark.parametrize("name", SPAN)
def test_padding_has_no_part_in_the_statistics(name: str) -> None:
    torch.manual_seed(0)
    head = build_head(name, layers=LAYERS, hidden=HIDDEN)
    norms = [module for module in head.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: list[int] = []
    for norm in norms:
        norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))
    head(*batch(1, 12, 3))
    assert seen == [16] * len(norms)  # 16 real tokens; a padded batch would have 36


def test_recomputed_statistics_are_those_of_the_present_weights() -> None:
    head = make("cnn-1xn")
    norms = [module for module in head.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.mul_(3)  # a step, after which the statistics behind it are others
    states, lengths = batch(100)
    before = head(states, lengths).start_logits
    for norm in norms:
        norm.train()
    right = head(states, lengths).start_logits  # by the statistics of the batch itself
    head.train()
    recompute_statistics(head, [(states, lengths)] * 3)
    assert all(norm.momentum == 1.0 and norm.training for norm in norms)
    assert head.training
    after = head.eval()(states, lengths).start_logits
    error = (after - right).norm() / right.norm()
    assert error < 0.02 < 0.2 < (before - right).norm() / right.norm()


def test_a_head_without_norms_asks_for_no_batch_to_recompute_them() -> None:
    head = build_head("learned-pooling", layers=LAYERS, hidden=HIDDEN)
    asked = iter([batch(3)])
    recompute_statistics(head, asked)
    assert len(list(asked)) == 1


@pytest.mark.parametrize("name", CHEAP)
def test_order_of_windows_changes_nothing_in_training(name: str) -> None:
    torch.manual_seed(0)
    head, other = (build_head(name, layers=LAYERS, hidden=HIDDEN) for _ in range(2))
    other.load_state_dict(head.state_dict())
    for module in (*head.modules(), *other.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    states, lengths = batch(2, 8, 3)
    pieces = states.split(lengths.tolist())
    ours = head(states, lengths)
    theirs = other(torch.cat([pieces[i] for i in (2, 0, 1)]), lengths[[2, 0, 1]])
    torch.testing.assert_close(ours.end_logits[[2, 0, 1]], theirs.end_logits, rtol=1e-4, atol=1e-4)
    for key, value in head.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[key], rtol=1e-4, atol=1e-5)


# --- every span head ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPAN)
def test_window_alone_and_in_a_batch_give_the_same(name: str) -> None:
    # in float64: how far float32 strays in a hundred layers is a matter of the machine's kernels
    head = make(name).double()
    states, lengths = batch(4, 1, 9, 3)
    states, floor = states.double(), torch.finfo(torch.float64).min
    with torch.no_grad():
        together = head(states, lengths)
        pieces = states.split(lengths.tolist())
        for i, (piece, length) in enumerate(zip(pieces, lengths, strict=True)):
            alone = head(piece, length[None])
            for ours, theirs in zip(alone, together, strict=True):
                torch.testing.assert_close(ours[0], theirs[i, :length], rtol=1e-9, atol=1e-9)
                assert (theirs[i, length:] == floor).all()


@pytest.mark.parametrize("name", ["cnn-1xn", "learned-pooling-adapter-386-cnn-1xn"])
def test_one_row_kernels_see_no_other_token(name: str) -> None:
    head, (states, lengths) = make(name), batch(6)
    changed = states.clone()
    changed[2] += 1.0
    before, after = head(states, lengths).start_logits[0], head(changed, lengths).start_logits[0]
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(before[others], after[others])
    assert not torch.allclose(before[2], after[2])


@pytest.mark.parametrize(("name", "reach"), [("cnn-nxn", 6), ("xception", 14), ("inception", 22)])
def test_kernels_over_tokens_see_their_neighbours_within_reach(name: str, reach: int) -> None:
    head, (states, lengths) = make(f"learned-pooling-adapter-386-{name}"), batch(30)
    changed = states.clone()
    changed[0] += 1.0
    with torch.no_grad():
        before, after = (head(x, lengths).start_logits[0] for x in (states, changed))
    moved = (before - after).abs() > 1e-5
    assert moved[:3].all()
    assert not moved[reach + 1 :].any()


def test_a_separable_convolution_keeps_its_input_alone_and_has_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SeparableNorm(8, 16, (3, 3))
    rows = Rows.between(torch.tensor([5, 7]), 12, 1, torch.device("cpu"))

    def step() -> tuple[list[Tensor], int]:
        kept: list[Tensor] = []
        image = torch.linspace(-1, 1, 12 * 8 * 20).sin().reshape(12, 8, 1, 20).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            result = module(image, rows)
        weights = (image, *module.parameters())
        found = torch.autograd.grad(result.square().sum() + result.sum(), weights)
        return list(found), sum(x.numel() for x in kept)

    again, few = step()
    monkeypatch.setattr(convolution, "checkpoint", lambda f, *given, **_: f(*given))
    plain, many = step()
    assert all(map(torch.equal, again, plain))
    assert few < many / 2


@pytest.mark.parametrize("how", ["autocast", "pure"])
@pytest.mark.parametrize("name", CHEAP)
def test_bfloat16_is_close_to_float32(name: str, how: str) -> None:
    head = make(name)
    states, lengths = batch(9, 4, 16)
    reference = head(states, lengths)
    if how == "pure":
        output = head.bfloat16()(states.bfloat16(), lengths)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = head(states, lengths)
    real = torch.arange(16) < lengths[:, None]
    for ours, theirs in zip(output, reference, strict=True):
        assert ours.dtype == torch.float32  # in bfloat16 the best tokens would often be equal
        assert (ours[real].float() - theirs[real]).norm() / theirs[real].norm() < 0.04


def test_dropout_is_where_the_name_says_it() -> None:
    states, lengths = batch(6)

    def differs(name: str) -> bool:
        head = make(name).train()
        first, second = (head(states, lengths).start_logits for _ in range(2))
        return not torch.equal(first, second)

    assert differs("cnn-1xn")
    assert not differs("cnn-1xn-no-dropout")


def test_dilated_head_is_dilated_and_no_other() -> None:
    def dilations(name: str) -> set[tuple[int, ...]]:
        head = build_head(name, layers=LAYERS, hidden=HIDDEN)
        return {m.dilation for m in head.modules() if isinstance(m, nn.Conv2d)}

    assert dilations("cnn-1xn-dilated") == {(1, 2)}
    assert dilations("cnn-1xn") == {(1, 1)}


# --- classification -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLS)
def test_class_logits_are_of_each_example_alone(name: str) -> None:
    head, states = make(name).double(), batch(5)[0].double()
    with torch.no_grad():
        output = head(states, torch.ones(5, dtype=torch.int64)).logits
        assert output.shape == (5, 2)
        for i in range(5):
            alone = head(states[i : i + 1], torch.ones(1, dtype=torch.int64)).logits[0]
            torch.testing.assert_close(alone, output[i], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CLS)
def test_smallest_hidden_size_is_named(name: str) -> None:
    with pytest.raises(InputError, match=r"hidden=8: .* width 9 or more"):
        build_head(name, layers=4, hidden=8)
    head = build_head(name, layers=4, hidden=9)
    assert head(torch.randn(3, 4, 9), torch.ones(3, dtype=torch.int64)).logits.shape == (3, 2)
