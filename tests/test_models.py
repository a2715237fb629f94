"""Heads: parameter counts, pooling and adapters against known answers, packing, losses."""

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
from bertvision.models.bilinear import BilinearSpanHead
from bertvision.models.factory import (
    HEADS,
    build_head,
    count_parameters,
    describe_heads,
    encoder_multiplications,
    kind_of,
)
from bertvision.models.heads import AdapterSpanHead, Head
from bertvision.models.outputs import ClassOutput, SpanOutput, class_loss, pad_packed, span_loss
from bertvision.models.pooling import (
    AttentionPooling,
    AveragePooling,
    IndependentAdapter,
    LearnedPooling,
    SharedAdapter,
)

LAYERS, HIDDEN = 5, 12

# Trainable parameters, and all with running statistics, as the paper counts them.
COUNTS = {
    "last-layer": (2_050, 2_050),
    "last-layer-adapter-64": (1_025 * 64 + 130, 65_730),
    "last-layer-adapter-386": (1_025 * 386 + 774, 396_424),
    "learned-pooling": (2_076, 2_076),
    "average-pooling": (2_050, 2_050),
    "attention-pooling": (1_024 + 25 + 2_050, 1_024 + 25 + 2_050),
    "learned-pooling-bilinear-64": (2_076 + 2 * 64 * 1_024, 2_076 + 2 * 64 * 1_024),
    "adapter-64-shared": (68_802, 68_802),
    "adapter-64-shared-skip": (70_850, 70_850),
    "adapter-64-independent": (1_643_202, 1_643_202),
    "adapter-64-independent-skip": (1_645_250, 1_645_250),
    "adapter-386-shared": (414_952, 414_952),
    "adapter-386-shared-skip": (417_000, 417_000),
    "adapter-386-shared-pooled-skip": (811_400, 811_400),
    "adapter-386-independent": (9_910_552, 9_910_552),
    "adapter-386-independent-skip": (9_912_600, 9_912_600),
    "learned-pooling-adapter-386-skip": (398_498, 398_498),
    # BatchNorm of 128 + 128 + 320 channels keeps a mean and a variance of each
    "cnn-1xn": (331_906 - 2 * 576, 331_906),
    "cnn-1xn-dilated": (331_906 - 2 * 576, 331_906),
    "cnn-1xn-no-dropout": (331_906 - 2 * 576, 331_906),
    "learned-pooling-cnn-1xn": (310_428 - 2 * 576, 310_428),
    "average-pooling-cnn-1xn": (310_402 - 2 * 576, 310_402),
    "learned-pooling-adapter-386-cnn-1xn": (693_918 - 2 * 576, 693_918),
    "learned-pooling-adapter-386-cnn-nxn": (1_112_950 - 2 * (105 + 128 + 320), 1_112_950),
    "learned-pooling-adapter-386-inception": (6_411_422 - 2 * 7_280, 6_411_422),
    "learned-pooling-adapter-386-xception": (6_602_702 - 2 * 8_872, 6_602_702),
    "cls-last-state": (2_050, 2_050),
    "cls-learned-pooling": (2_077, 2_077),
    "cls-average-pooling-adapter-386-skip": (398_472, 398_472),
    "cls-learned-pooling-adapter-386-skip": (398_499, 398_499),
    "cls-xception-abbreviated": (264_066, 267_010),
    "cls-xception-abbreviated-skip": (266_114, 269_058),
    "cls-xception-full": (20_662_106, 20_716_634),
}

SPAN = [name for name, spec in HEADS.items() if spec.kind == "span"]
CLS = [name for name, spec in HEADS.items() if spec.kind == "classification"]
# Heads whose tokens do not meet in BatchNorm; test_convolutions.py has the others.
PLAIN = [name for name in SPAN if not any(part in name for part in ("cnn", "ception"))]
PLAIN_CLS = [name for name in CLS if "xception" not in name]


def make(name: str, *, seed: int = 0, layers: int = LAYERS, hidden: int = HIDDEN) -> Head:
    """A head whose weights are all far from zero, so that every path shows in the logits."""
    torch.manual_seed(seed)
    head = build_head(name, layers=layers, hidden=hidden)
    assert isinstance(head, Head)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head


def batch(*lengths: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(sum(lengths), LAYERS, HIDDEN, generator=generator)
    return states, torch.tensor(lengths)


# --- parameter counts ---------------------------------------------------------------------------


def test_describe_heads_lists_counts_and_percent_of_bert_large() -> None:
    infos = {info.name: info for info in describe_heads()}
    assert {name: info[2:4] for name, info in infos.items()} == COUNTS
    assert infos["adapter-386-shared"].percent == pytest.approx(0.1238, abs=5e-5)
    assert infos["learned-pooling-adapter-386-xception"].percent == pytest.approx(1.9701, abs=5e-5)
    assert infos["cls-xception-abbreviated"].percent == pytest.approx(0.0797, abs=5e-5)


def test_describe_heads_counts_for_other_encoders() -> None:
    infos = {info.name: info.total for info in describe_heads(layers=7, hidden=384)}
    assert infos["learned-pooling"] == 7 + 1 + 2 * 384 + 2
    assert infos["cls-learned-pooling"] == 8 + 1 + 2 * 384 + 2
    assert infos["adapter-64-shared-skip"] == 384 * 64 + 64 + 2 * (7 * 64 + 384) + 2


def test_describe_heads_lists_one_kind() -> None:
    assert [info.name for info in describe_heads(7, 384, "span")] == SPAN
    assert [info.name for info in describe_heads(7, 384, "classification")] == CLS
    assert [info.name for info in describe_heads(7, 384)] == [*SPAN, *CLS]
    with pytest.raises(InputError, match=r"no kind 'spam'.*span or classification"):
        describe_heads(7, 384, "spam")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HEADS)
def test_what_the_registry_says_of_a_head_is_so(name: str) -> None:
    with torch.device("meta"):
        head = build_head(name, layers=4, hidden=16)
    assert kind_of(head) == HEADS[name].kind
    assert name.startswith("cls-") == (HEADS[name].kind == "classification")


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


def test_attention_pooling_begins_as_the_mean() -> None:
    states, _ = batch(4, 3)
    torch.testing.assert_close(AttentionPooling(LAYERS, HIDDEN)(states), states.mean(dim=1))


def test_attention_pooling_weighs_each_tokens_layers_by_its_own_scores() -> None:
    states, _ = batch(4, 3)
    torch.manual_seed(0)
    pooling = AttentionPooling(LAYERS, HIDDEN)
    nn.init.normal_(pooling.query, std=3.0)
    nn.init.normal_(pooling.bias)
    for token, pooled in zip(states, pooling(states), strict=True):
        scores = [layer @ pooling.query / HIDDEN**0.5 for layer in token]
        weights = (torch.stack(scores) + pooling.bias).softmax(dim=0)
        torch.testing.assert_close(pooled, weights @ token)


def test_attention_pooling_without_a_query_is_learned_pooling() -> None:
    states, _ = batch(4, 3)
    attention, learned = AttentionPooling(LAYERS, HIDDEN), LearnedPooling(LAYERS)
    with torch.no_grad():
        attention.bias.copy_(learned.scalars)
    torch.testing.assert_close(attention(states), learned(states))


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


def test_pooled_skip_concatenates_the_compressed_weighted_sum() -> None:
    states, lengths = batch(4, 3)
    head = make("adapter-386-shared-pooled-skip")
    assert isinstance(head, AdapterSpanHead)
    with torch.no_grad():
        head.output.weight.zero_()
        head.output.weight[:, LAYERS * 386 + 5] = 1.0
    pooling, adapter = head.pooled.pooling, head.pooled.adapter
    assert pooling is not None
    assert adapter is not None
    assert adapter is not head.adapter
    expected = adapter(pooling(states))[:4, 5] + head.output.bias[1]
    torch.testing.assert_close(head(states, lengths).end_logits[0], expected)


# --- bilinear -----------------------------------------------------------------------------------


def test_bilinear_end_is_scored_with_the_expected_start_of_its_window() -> None:
    states, lengths = batch(4, 1, 6)
    head = make("learned-pooling-bilinear-64")
    assert isinstance(head, BilinearSpanHead)
    output = head(states, lengths)
    w, b = head.output.weight, head.output.bias
    for i, window in enumerate(states.split(lengths.tolist())):
        x = head.pooling(window)  # (seq, hidden)
        start = x @ w[0] + b[0]
        p = start.softmax(dim=0)
        # E_i[x_i U' V x_j / sqrt(rank)], with the matrix of a pair's score written out
        pair = x @ head.start.weight.T @ head.end.weight @ x.T / 8  # (start, end)
        end = x @ w[1] + b[1] + p @ pair
        n = len(window)
        torch.testing.assert_close(output.start_logits[i, :n], start)
        torch.testing.assert_close(output.end_logits[i, :n], end, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [64, 386])
def test_a_control_is_the_adapter_on_the_last_layer_alone(size: int) -> None:
    states, lengths = batch(4, 3)
    control = make(f"last-layer-adapter-{size}")
    adapter = make(f"adapter-{size}-shared", layers=1)  # of an encoder with no other layer
    assert isinstance(adapter, AdapterSpanHead)
    weights = {
        key.replace("pooled.adapter", "adapter"): w for key, w in control.state_dict().items()
    }
    adapter.load_state_dict(weights)
    found = control(states, lengths)
    for ours, theirs in zip(found, adapter(states[:, -1:], lengths), strict=True):
        torch.testing.assert_close(ours, theirs)
    other = torch.cat([torch.randn_like(states[:, :-1]), states[:, -1:]], dim=1)
    for ours, theirs in zip(control(other, lengths), found, strict=True):
        assert torch.equal(ours, theirs)


# --- every span head ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_permuting_examples_permutes_logits(name: str) -> None:
    head = make(name)
    states, lengths = batch(4, 1, 7, 3)
    order = [2, 0, 3, 1]
    pieces = states.split(lengths.tolist())
    permuted = head(torch.cat([pieces[i] for i in order]), lengths[order])
    for ours, theirs in zip(permuted, head(states, lengths), strict=True):
        torch.testing.assert_close(ours, theirs[order])


@pytest.mark.parametrize("name", PLAIN)
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


@pytest.mark.parametrize("name", SPAN)
def test_gradients_reach_every_parameter(name: str) -> None:
    head = make(name)
    states, lengths = batch(4, 1, 7, 3)
    loss = span_loss(head(states, lengths), torch.tensor([1, 0, 5, 0]), torch.tensor([2, 0, 6, 0]))
    assert torch.isfinite(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        if key != "output.bias":  # a softmax over tokens does not change with it
            assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("how", ["autocast", "pure"])
@pytest.mark.parametrize("name", PLAIN)
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
        assert (ours[~real] == torch.finfo(torch.float32).min).all()
        error = (ours[real].float() - theirs[real]).norm() / theirs[real].norm()
        assert error < 0.02
    loss = span_loss(output, torch.tensor([8, 0, 3]), torch.tensor([8, 0, 15]))
    assert loss.dtype == torch.float32
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in head.parameters())


@pytest.mark.parametrize("name", [*PLAIN, "cnn-1xn"])
def test_safetensors_round_trip_gives_equal_logits(name: str, tmp_path: Path) -> None:
    head, other = make(name, seed=0).eval(), make(name, seed=1).eval()
    states, lengths = batch(4, 3)
    save_file(head.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for ours, theirs in zip(other(states, lengths), head(states, lengths), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [name for name in SPAN if "ception" not in name])
@pytest.mark.parametrize(("layers", "hidden"), [(1, 1), (2, 33), (13, 770)])
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


# --- every classification head ------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN_CLS)
def test_class_logits_are_of_each_example_alone(name: str) -> None:
    head = make(name)
    states, _ = batch(6)
    output = head(states, torch.ones(6, dtype=torch.int64))
    assert output.logits.shape == (6, 2)
    for i in range(6):
        alone = head(states[i : i + 1], torch.ones(1, dtype=torch.int64))
        torch.testing.assert_close(alone.logits[0], output.logits[i])


@pytest.mark.parametrize("name", CLS)
def test_class_gradients_reach_every_parameter(name: str) -> None:
    head = make(name)
    states, _ = batch(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = head(states, torch.ones(6, dtype=torch.int64))
    class_loss(output, torch.tensor([0, 1, 1, 0, 1, 1])).backward()  # type: ignore[no-untyped-call]
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("pooling", ["average", "learned"])
def test_class_skip_concatenates_the_last_state(pooling: str) -> None:
    states, _ = batch(6)
    head = make(f"cls-{pooling}-pooling-adapter-386-skip")
    with torch.no_grad():
        head.output.weight.zero_()
        head.output.weight[:, 386 + 2] = 1.0
    logits = head(states, torch.ones(6, dtype=torch.int64)).logits
    torch.testing.assert_close(logits[:, 0], states[:, -1, 2] + head.output.bias[0])


@pytest.mark.parametrize("name", CLS)
def test_all_tokens_given_to_a_classification_head_are_refused(name: str) -> None:
    head = build_head(name, layers=LAYERS, hidden=HIDDEN)
    states, lengths = batch(4, 3)
    with pytest.raises(InputError, match=r"7 tokens of 2 examples.*extract --pool cls"):
        head(states, lengths)


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


def test_losses_of_examples_have_the_mean_that_is_the_loss() -> None:
    start, end = torch.randn(5, 7), torch.randn(5, 7)
    output, at = SpanOutput(start.bfloat16(), end.bfloat16()), torch.tensor([0, 3, 6, 1, 2])
    each = span_loss(output, at, at, reduction="none")
    assert each.shape == (5,)
    assert each.dtype == torch.float32
    torch.testing.assert_close(each.mean(), span_loss(output, at, at))
    one = SpanOutput(*(logits[3:4] for logits in output))
    torch.testing.assert_close(each[3], span_loss(one, at[3:4], at[3:4]))


def test_loss_of_one_logit_is_the_squared_error() -> None:
    output = ClassOutput(torch.tensor([[2.0], [-1.0], [0.5]]).bfloat16())
    scores = torch.tensor([2.5, 1.0, 0.5], dtype=torch.float64)
    each = class_loss(output, scores, reduction="none")
    torch.testing.assert_close(each, torch.tensor([0.25, 4.0, 0.0]))
    torch.testing.assert_close(class_loss(output, scores), each.mean())
    torch.testing.assert_close(class_loss(output, scores, reduction="sum"), each.sum())


@pytest.mark.parametrize("classes", [1, 2, 6])
@pytest.mark.parametrize("name", PLAIN_CLS)
def test_classification_heads_have_a_logit_for_each_class(name: str, classes: int) -> None:
    head = build_head(name, layers=LAYERS, hidden=HIDDEN, classes=classes)
    two = build_head(name, layers=LAYERS, hidden=HIDDEN)
    states, _ = batch(6)
    assert head(states, torch.ones(6, dtype=torch.int64)).logits.shape == (6, classes)
    width = head.output.in_features
    more = count_parameters(head)[0] - count_parameters(two)[0]
    assert more == (classes - 2) * (width + 1)


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize("name", SPAN)
def test_span_heads_are_the_same_whatever_the_classes(name: str, classes: int) -> None:
    with torch.device("meta"):
        head = build_head(name, layers=LAYERS, hidden=16, classes=classes)
        assert count_parameters(head) == count_parameters(
            build_head(name, layers=LAYERS, hidden=16)
        )


def test_no_classes_are_refused() -> None:
    with pytest.raises(InputError, match="0 outputs: .*a logit for each class"):
        build_head("cls-last-state", layers=LAYERS, hidden=HIDDEN, classes=0)


def test_class_loss_is_the_negative_log_probability() -> None:
    output = ClassOutput(torch.log(torch.tensor([[0.25, 0.75], [0.9, 0.1]])))
    each = class_loss(output, torch.tensor([1, 1]), reduction="none")
    torch.testing.assert_close(each, -torch.log(torch.tensor([0.75, 0.1])))
    torch.testing.assert_close(class_loss(output, torch.tensor([1, 1])), each.mean())


# --- registry -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "hidden"), [(0, 8), (3, 0), (-1, 8)])
def test_impossible_dimensions_are_refused(layers: int, hidden: int) -> None:
    with pytest.raises(InputError, match="at least 1"):
        describe_heads(layers, hidden)


# --- cost ---------------------------------------------------------------------------------------


def test_multiplications_are_those_of_the_matrix_products() -> None:
    infos = {info.name: info for info in describe_heads(25, 1024)}
    adapter = 25 * 1024 * 386 + 25 * 386 * 2
    assert infos["adapter-386-shared"].multiplications == adapter
    assert infos["adapter-386-independent"].multiplications == adapter
    assert infos["learned-pooling"].multiplications == 25 * 1024 + 1024 * 2


def test_a_head_is_costly_beside_one_encoder_and_not_beside_another() -> None:
    def costly(layers: int, hidden: int) -> set[str]:
        return {info.name for info in describe_heads(layers, hidden) if info.costly}

    assert costly(25, 1024) == {f"learned-pooling-adapter-386-{x}ception" for x in ("in", "x")}
    assert costly(25, 1024) | {"cnn-1xn", "cls-xception-full"} <= costly(7, 384)
    assert encoder_multiplications(25, 1024) == 24 * 12 * 1024**2
