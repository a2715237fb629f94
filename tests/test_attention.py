"""Attention heads: what they look at, against known patterns; and gates that switch them off."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from families import ENCODERS, FAMILIES, LAYERS, make_family
from torch import Tensor
from transformers import AutoModel

import bertvision
from bertvision.errors import InputError, UnknownNameError
from bertvision.pipelines.analysis.attention import (
    MEASURES,
    AttentionResult,
    WindowMaps,
    attention_maps,
    load_eager,
    looks,
    sampled_windows,
)
from bertvision.pipelines.analysis.attention import attention_of_maps as attention
from bertvision.pipelines.analysis.prune import gated, replayed
from bertvision.pipelines.tasks.windows import Windows, collate
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace


def of(weights: Tensor, sep: list[int]) -> dict[str, float]:
    """The measures of one head's map."""
    is_sep = np.isin(np.arange(weights.shape[-1]), sep)
    return dict(zip(MEASURES, looks(weights[None, None], is_sep)[:, 0, 0].tolist(), strict=True))


def test_known_patterns_have_their_share_and_no_entropy() -> None:
    n = 6
    assert of(torch.eye(n), [5]) == pytest.approx(
        {"entropy": 0, "cls": 1 / n, "sep": 1 / n, "previous": 0, "next": 0, "same": 1}
    )
    before = torch.zeros(n, n)
    before[torch.arange(1, n), torch.arange(n - 1)] = 1
    before[0, 3] = 1  # the first token has none before it
    found = of(before, [2])
    assert found["previous"] == pytest.approx(1)
    assert (found["next"], found["same"], found["entropy"]) == pytest.approx((0, 0, 0))
    assert of(before.flip(0, 1), [2])["next"] == pytest.approx(1)
    to_sep = torch.zeros(n, n)
    to_sep[:, [2, 5]] = 0.5
    assert of(to_sep, [2, 5])["sep"] == pytest.approx(1)
    assert of(to_sep, [2, 5])["entropy"] == pytest.approx(np.log(2) / np.log(n))


def test_attention_to_all_alike_is_what_the_last_row_says() -> None:
    windows = [
        WindowMaps(row, np.array([1, *[7] * (n - 2), 3], np.int32), torch.full((2, 3, n, n), 1 / n))
        for row, n in enumerate((4, 9, 30))
    ]
    result = attention(iter(windows), sep=3)
    for layer in range(2):
        for head in range(3):
            np.testing.assert_allclose(result.values[:, layer, head], result.alike, rtol=1e-6)
    assert (result.n_windows, result.n_tokens) == (3, 43)


def test_means_and_errors_are_over_windows_in_any_order() -> None:
    random = np.random.default_rng(0)
    windows = []
    for row, n in enumerate((5, 12, 7, 20)):
        weights = torch.from_numpy(random.dirichlet(np.ones(n), (2, 3, n))).float()
        windows.append(WindowMaps(row, random.integers(0, 4, n).astype(np.int32), weights))
    one, other = (attention(iter(some), sep=2) for some in (windows, windows[::-1]))
    each = np.stack([looks(w.weights, w.input_ids == 2) for w in windows])
    np.testing.assert_allclose(one.values, each.mean(0), rtol=1e-12)
    np.testing.assert_allclose(one.errors, each.std(0, ddof=1) / 2, rtol=1e-12)
    np.testing.assert_allclose(one.values, other.values, rtol=1e-12)
    assert AttentionResult.from_json(one.to_json()).to_json() == one.to_json()
    with pytest.raises(InputError, match="there is none"):
        attention(iter([]), sep=2)


def some_windows(lengths: list[int], vocabulary: int) -> Windows:
    total = sum(lengths)
    ids = np.random.default_rng(1).integers(5, vocabulary, total).astype(np.int32)
    nothing = np.zeros((total, 2), np.int32)
    rows = np.arange(len(lengths), dtype=np.int32)
    return Windows(ids, np.zeros(total, np.uint8), nothing, np.array(lengths, np.int32), rows, {})


@pytest.mark.parametrize("family", ENCODERS)
def test_maps_are_those_of_the_model_alone_whatever_the_padding(
    family: str, tmp_path: Path
) -> None:
    folder = make_family(family, tmp_path)
    model, windows = load_eager(folder), some_windows([9, 4, 17, 9], 20)
    found = {m.row: m for m in attention_maps(model, windows, np.array([0, 1, 3]))}
    assert sorted(found) == [0, 1, 3]
    for row, first in ((0, 0), (1, 9), (3, 30)):
        ids = torch.from_numpy(windows.input_ids[first : first + windows.n_tokens[row]]).long()
        alone = model(input_ids=ids[None], output_attentions=True).attentions
        expected = torch.stack([of_layer[0] for of_layer in alone])
        torch.testing.assert_close(found[row].weights, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            found[row].weights.sum(-1), torch.ones(expected.shape[:-1]), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("family", ENCODERS)
def test_a_closed_gate_is_a_head_whose_slice_of_the_output_projection_is_zero(
    family: str, tmp_path: Path
) -> None:
    folder = make_family(family, tmp_path)
    model = AutoModel.from_pretrained(folder).eval()
    ids = {"input_ids": torch.randint(5, 20, (2, 9), generator=torch.manual_seed(0))}
    with torch.inference_mode():
        before = model(**ids).last_hidden_state
        with gated(model) as gates:
            assert gates.shape == (LAYERS, 4)
            torch.testing.assert_close(model(**ids).last_hidden_state, before)
            gates[1, 2] = 0
            masked = model(**ids).last_hidden_state
        torch.testing.assert_close(model(**ids).last_hidden_state, before)
        weights = [
            p
            for name, p in model.named_parameters()
            if p.shape == (32, 32)
            and name.endswith(
                ("attention.output.dense.weight", "attention.out_lin.weight", "attn.Wo.weight")
            )
        ]
        weights[1][:, 16:24] = 0  # the third of four heads
        torch.testing.assert_close(model(**ids).last_hidden_state, masked, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(before, masked)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_that_begins_at_a_layer_gives_what_it_gives_from_the_text(
    family: str, tmp_path: Path
) -> None:
    model = AutoModel.from_pretrained(make_family(family, tmp_path)).eval()
    ids = {"input_ids": torch.randint(5, 20, (2, 9), generator=torch.manual_seed(0))}
    with torch.inference_mode(), gated(model) as gates:
        masked = []
        for layer in range(LAYERS):
            gates[layer, 1] = 0
            masked.append(model(**ids).last_hidden_state)
            gates.fill_(1)
        with replayed(model) as replay:
            whole = model(**ids).last_hidden_state
            for layer in reversed(range(LAYERS)):
                replay.start = layer
                gates[layer, 1] = 0
                assert torch.equal(model(**ids).last_hidden_state, masked[layer])
                gates.fill_(1)
            replay.start = LAYERS
            other = {"input_ids": ids["input_ids"].flip(1)}
            kept = model(**other).last_hidden_state  # of no text but the first
        assert torch.equal(kept, whole)
        assert torch.equal(model(**ids).last_hidden_state, whole)
        assert not torch.equal(model(**other).last_hidden_state, whole)


def test_an_encoder_without_known_attention_heads_is_refused() -> None:
    class Other(torch.nn.Module):
        base_model = property(lambda self: self)
        config = type(
            "Config", (), {"num_hidden_layers": 2, "num_attention_heads": 4, "model_type": "other"}
        )

    with pytest.raises(InputError, match="where other has its attention heads"), gated(Other()):  # type: ignore[arg-type]
        pass


def test_a_sample_of_windows_is_seeded_and_all_where_there_are_fewer() -> None:
    assert sampled_windows(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    assert sampled_windows(5, None, 0).tolist() == [0, 1, 2, 3, 4]
    one = sampled_windows(100, 10, 0)
    assert len(one) == 10
    assert sorted(set(one.tolist())) == one.tolist()
    assert (
        one.tolist() == sampled_windows(100, 10, 0).tolist() != sampled_windows(100, 10, 1).tolist()
    )


@pytest.fixture
def copy(workspace: Workspace, tmp_path: Path) -> Path:
    root = tmp_path / "copy"
    shutil.copytree(workspace.root, root, ignore=lambda *_: {"heads", "activations", "analysis"})
    return root


def test_attention_of_a_snapshot_is_kept_and_taken_again(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is stored but the summary; another seed, or other weights, are measured anew."""
    found = bertvision.attention("1e", windows=5, workspace=copy)
    assert found.values.shape == (6, 2, 4)
    assert (found.n_windows, found.name) == (5, "1e/dev")
    assert sorted(p.name for p in (copy / "analysis").iterdir()) == [
        "attention-1e-dev.json",
        "attention-1e-dev.svg",
    ]
    caplog.set_level("INFO")
    again = bertvision.attention("1e", windows=5, workspace=copy)
    assert again.to_json() == found.to_json()
    assert "as it was measured before" in caplog.text
    caplog.clear()
    other = bertvision.attention("1e", windows=5, seed=1, workspace=copy)
    assert other.to_json() != found.to_json()
    assert "as it was measured before" not in caplog.text
    with pytest.raises(UnknownNameError, match="'test' is no split"):
        bertvision.attention("1e", split="test", workspace=copy)


def test_pruning_masks_each_head_and_orders_them_by_how_the_loss_moves(copy: Path) -> None:
    found = bertvision.prune("1e", items=8, precision="32", workspace=copy)
    space = Workspace.find(copy)
    snapshot, data = load_snapshot(space.snapshot_dir("1e")), space.dataset()
    chosen = np.random.default_rng(0).permutation(len(data.items("dev")))[:8]
    some = [data.items("dev")[i] for i in sorted(chosen[:4])]
    windows = data.task.windows(some, snapshot.tokenizer, data.config)
    batch = collate(
        *(windows, windows.first_token, np.arange(len(windows)), 0, data.task.labels(windows))
    )

    def loss() -> float:
        with torch.inference_mode():
            return float(data.task.loss(snapshot.model(**batch.inputs), batch)) / len(windows)

    with gated(snapshot.model) as gates:
        assert found.loss == pytest.approx(loss(), rel=1e-5)
        gates[1, 0] = 0
        assert found.rise[1, 0] == pytest.approx(loss() - found.loss, abs=1e-5)
        gates.fill_(1)
        moved = np.zeros(gates.shape)  # by central differences of each window's own loss
        for row in range(len(windows)):
            one = collate(
                *(windows, windows.first_token, np.array([row]), 0, data.task.labels(windows))
            )
            for head in np.ndindex(*gates.shape):
                at = []
                for gate in (1.05, 0.95):
                    gates[head] = gate
                    with torch.inference_mode():
                        at.append(float(data.task.loss(snapshot.model(**one.inputs), one)))
                gates[head] = 1
                moved[head] += abs(at[0] - at[1]) / 0.1
    expected = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    np.testing.assert_allclose(found.sensitivity, expected, atol=0.02)
    assert found.left.tolist()[0] == 1
    assert found.left.tolist()[-1] == 0
    # with all heads, and with none, the order makes no difference
    for end in (0, -1):
        assert found.random[end] == pytest.approx(found.score[end])
        assert found.random_sd[end] == pytest.approx(0, abs=1e-9)
    assert (found.n_ranked, found.n_scored) == (4, 4)


def test_a_workspace_without_a_task_has_nothing_to_prune_by(
    tiny_bert: Path, tmp_path: Path
) -> None:
    feature_workspace(tmp_path / "ws", str(tiny_bert))
    with pytest.raises(InputError, match="has no task by which attention heads"):
        bertvision.prune("0e", workspace=tmp_path / "ws")


def test_both_are_in_the_report(copy: Path, tmp_path: Path) -> None:
    bertvision.attention("1e", windows=3, workspace=copy)
    bertvision.prune("1e", items=4, workspace=copy)
    page = bertvision.report(out=tmp_path / "report", workspace=copy).page.read_text()
    assert "What attention heads look at" in page
    assert "Which attention heads the encoder needs" in page
