"""Heads: parameter counts, pooling and adapters against known answers, packing, registry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bertvision.errors import InputError
from bertvision.models.adapters import IndependentAdapter, SharedAdapter
from bertvision.models.heads import AdapterSpanHead, SpanHead
from bertvision.models.outputs import SpanOutput, pad_packed, span_loss
from bertvision.models.pooling import AveragePooling, LearnedPooling
from bertvision.models.registry import HEADS, build_head, describe_heads

LAYERS, HIDDEN = 5, 12

COUNTS = {
    "learned-pooling": 2_076,
    "average-pooling": 2_050,
    "adapter-64-shared": 68_802,
    "adapter-64-shared-skip": 70_850,
    "adapter-64-independent": 1_643_202,
    "adapter-64-independent-skip": 1_645_250,
    "adapter-386-shared": 414_952,
    "adapter-386-shared-skip": 417_000,
    "adapter-386-independent": 9_910_552,
    "adapter-386-independent-skip": 9_912_600,
}


def make(name: str, *, seed: int = 0, layers: int = LAYERS, hidden: int = HIDDEN) -> SpanHead:
    """A head whose weights are all far from zero, so that every path shows in the logits."""
    torch.manual_seed(seed)
    head = build_head(name, layers=layers, hidden=hidden)
    assert isinstance(head, SpanHead)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head


def batch(*lengths: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(sum(lengths), LAYERS, HIDDEN, generator=generator)
    return states, torch.tensor(lengths)


# --- parameter counts ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_count_of_parameters_at_bert_large(name: str, count: int) -> None:
    with torch.device("meta"):
        head = build_head(name, layers=25, hidden=1024)
    assert sum(p.numel() for p in head.parameters()) == count


def test_describe_heads_lists_counts_and_percent_of_bert_large() -> None:
    infos = {info.name: info for info in describe_heads()}
    assert {name: info.total for name, info in infos.items() if name in COUNTS} == COUNTS
    assert all(info.trainable == info.total for info in infos.values() if info.name in COUNTS)
    assert infos["adapter-386-shared"].percent == pytest.approx(0.1238, abs=5e-5)
    assert infos["adapter-386-independent-skip"].percent == pytest.approx(2.9577, abs=5e-5)


def test_describe_heads_counts_for_other_encoders() -> None:
    infos = {info.name: info.total for info in describe_heads(layers=7, hidden=384)}
    assert infos["learned-pooling"] == 7 + 1 + 2 * 384 + 2
    assert infos["adapter-64-shared-skip"] == 384 * 64 + 64 + 2 * (7 * 64 + 384) + 2


# --- pooling ------------------------------------------------------------------------------------


def test_pooling_with_equal_weights_is_the_mean() -> None:
    states, _ = batch(4, 3)
    pooling = LearnedPooling(LAYERS)
    nn.init.constant_(pooling.scalars, 1.7)
    torch.testing.assert_close(pooling(states), states.mean(dim=1))
    torch.testing.assert_close(AveragePooling()(states), states.mean(dim=1))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_pooling_with_one_huge_weight_is_that_layer_times_gamma(layer: int) -> None:
    states, _ = batch(4, 3)
    pooling = LearnedPooling(LAYERS)
    nn.init.zeros_(pooling.scalars)
    with torch.no_grad():
        pooling.scalars[layer] = 200.0
        pooling.gamma.fill_(0.5)
    torch.testing.assert_close(pooling(states), 0.5 * states[:, layer])


def test_pooling_begins_as_the_paper_says() -> None:
    torch.manual_seed(0)
    pooling = LearnedPooling(20_000)
    assert pooling.gamma.item() == 1.0
    assert pooling.scalars.std().item() == pytest.approx(0.05, rel=0.02)
    assert pooling.scalars.mean().item() == pytest.approx(0.0, abs=2e-3)


# --- adapters -----------------------------------------------------------------------------------


def test_independent_adapter_with_tied_weights_is_the_shared_adapter() -> None:
    states, _ = batch(4, 3)
    torch.manual_seed(0)
    shared, independent = SharedAdapter(HIDDEN, 8), IndependentAdapter(LAYERS, HIDDEN, 8)
    with torch.no_grad():
        nn.init.normal_(shared.down.weight)
        nn.init.normal_(shared.down.bias)
        independent.weight.copy_(shared.down.weight)
        independent.bias.copy_(shared.down.bias)
    torch.testing.assert_close(independent(states), shared(states))


def test_independent_adapter_computes_gelu_of_each_layers_own_projection() -> None:
    states, _ = batch(4, 3)
    torch.manual_seed(0)
    adapter = IndependentAdapter(LAYERS, HIDDEN, 8)
    nn.init.normal_(adapter.weight)
    nn.init.normal_(adapter.bias)
    expected = F.gelu(torch.einsum("tlh,lah->tla", states, adapter.weight) + adapter.bias)
    torch.testing.assert_close(adapter(states), expected)


def test_adapters_begin_truncated_at_two_sigma_with_zero_bias() -> None:
    torch.manual_seed(0)
    for weight, bias in (
        (lambda a: (a.down.weight, a.down.bias))(SharedAdapter(512, 64)),
        (lambda a: (a.weight, a.bias))(IndependentAdapter(3, 256, 64)),
    ):
        assert weight.abs().max().item() <= 2e-3
        # the standard deviation of a normal cut at two sigma is 0.8796 sigma
        assert weight.std().item() == pytest.approx(0.8796e-3, rel=0.02)
        assert not bias.any()


@pytest.mark.parametrize("kind", ["shared", "independent"])
def test_skip_concatenates_the_last_layer_in_the_output(kind: str) -> None:
    states, lengths = batch(4, 3)
    plain, skip = make(f"adapter-64-{kind}"), make(f"adapter-64-{kind}-skip")
    assert isinstance(plain, AdapterSpanHead)
    assert isinstance(skip, AdapterSpanHead)
    skip.adapter.load_state_dict(plain.adapter.state_dict())
    width = LAYERS * 64
    with torch.no_grad():
        skip.output.weight[:, :width] = plain.output.weight
        skip.output.weight[:, width:] = 0.0
        skip.output.bias.copy_(plain.output.bias)
    for ours, theirs in zip(skip(states, lengths), plain(states, lengths), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():  # and alone, the skip part reads the last layer only
        skip.output.weight.zero_()
        skip.output.weight[:, width + 2] = 1.0
    alone = skip(states, lengths).start_logits[0]
    torch.testing.assert_close(alone, states[:4, -1, 2] + skip.output.bias[0])


# --- every head ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_permuting_examples_permutes_logits(name: str) -> None:
    head = make(name)
    states, lengths = batch(4, 1, 7, 3)
    order = [2, 0, 3, 1]
    pieces = states.split(lengths.tolist())
    permuted = head(torch.cat([pieces[i] for i in order]), lengths[order])
    for ours, theirs in zip(permuted, head(states, lengths), strict=True):
        torch.testing.assert_close(ours, theirs[order])


@pytest.mark.parametrize("name", HEADS)
def test_padding_never_changes_a_real_token(name: str) -> None:
    head = make(name)
    states, lengths = batch(4, 1, 7, 3)
    together = head(states, lengths)
    floor = torch.finfo(torch.float32).min
    for i, (piece, length) in enumerate(zip(states.split(lengths.tolist()), lengths, strict=True)):
        alone = head(piece, length[None])
        for ours, theirs in zip(alone, together, strict=True):
            assert ours.shape == (1, int(length))
            torch.testing.assert_close(ours[0], theirs[i, :length])
            assert (theirs[i, length:] == floor).all()


@pytest.mark.parametrize("name", HEADS)
def test_gradients_reach_every_parameter(name: str) -> None:
    head = make(name)
    states, lengths = batch(4, 1, 7, 3)
    loss = span_loss(head(states, lengths), torch.tensor([1, 0, 5, 0]), torch.tensor([2, 0, 6, 0]))
    assert torch.isfinite(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("how", ["autocast", "pure"])
@pytest.mark.parametrize("name", HEADS)
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
        assert ours.dtype == torch.bfloat16
        assert (ours[~real] == torch.finfo(torch.bfloat16).min).all()
        error = (ours[real].float() - theirs[real]).norm() / theirs[real].norm()
        assert error < 0.02
    loss = span_loss(output, torch.tensor([8, 0, 3]), torch.tensor([8, 0, 15]))
    assert loss.dtype == torch.float32
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in head.parameters())


@pytest.mark.parametrize("name", HEADS)
def test_safetensors_round_trip_gives_equal_logits(name: str, tmp_path: Path) -> None:
    head, other = make(name, seed=0), make(name, seed=1)
    states, lengths = batch(4, 3)
    save_file(head.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for ours, theirs in zip(other(states, lengths), head(states, lengths), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("layers", "hidden"), [(1, 1), (3, 32), (13, 768)])
def test_heads_take_any_number_of_layers_and_hidden_size(
    name: str, layers: int, hidden: int
) -> None:
    head = make(name, layers=layers, hidden=hidden)
    output = head(torch.randn(5, layers, hidden), torch.tensor([2, 3]))
    assert output.start_logits.shape == output.end_logits.shape == (2, 3)


@pytest.mark.parametrize("shape", [(7, LAYERS + 1, HIDDEN), (7, LAYERS, HIDDEN - 1), (7, HIDDEN)])
def test_hidden_states_of_another_encoder_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"5 layers, 12 hidden.*build the head for this encoder"):
        make("learned-pooling")(torch.zeros(shape), torch.tensor([7]))


@pytest.mark.parametrize("lengths", [[3, 3], [8], [7, 0], [], [[7]]])
def test_lengths_that_do_not_describe_the_tokens_are_refused(lengths: list[int]) -> None:
    states, _ = batch(7)
    with pytest.raises(InputError, match="summing to 7"):
        make("learned-pooling")(states, torch.tensor(lengths, dtype=torch.int64))


# --- outputs ------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.sampled_from([(), (2,), (3, 2)]),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_pad_packed_puts_each_token_in_its_place(
    lengths: list[int], trailing: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.randn(sum(lengths), *trailing, requires_grad=True)
    padded = pad_packed(values, torch.tensor(lengths, dtype=dtype), fill=-9.0)
    expected = nn.utils.rnn.pad_sequence(
        list(values.split(lengths)), batch_first=True, padding_value=-9.0
    )
    assert torch.equal(padded, expected)
    padded.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert torch.equal(values.grad, torch.ones_like(values))


def test_span_loss_is_the_mean_negative_log_probability() -> None:
    start = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.9, 0.0]]).clamp_min(1e-30))
    end = torch.log(torch.tensor([[0.25, 0.25, 0.5], [0.2, 0.8, 0.0]]).clamp_min(1e-30))
    loss = span_loss(SpanOutput(start, end), torch.tensor([0, 1]), torch.tensor([2, 1]))
    expected = -(torch.log(torch.tensor([0.5, 0.9, 0.5, 0.8])).sum()) / 4
    torch.testing.assert_close(loss, expected)


# --- registry -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "hidden"), [(0, 8), (3, 0), (-1, 8)])
def test_impossible_dimensions_are_refused(layers: int, hidden: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        describe_heads(layers, hidden)
