from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.finetuning.steps import StepLoader, plan_batches, steps_per_epoch
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import Windows, collate
from bertvision.pipelines.workspace.config import Order


def ragged(lengths: list[int]) -> Windows:
    total = sum(lengths)
    return Windows(
        input_ids=np.arange(total, dtype=np.int32) % 50,
        token_type_ids=np.zeros(total, np.uint8),
        offset_mapping=np.zeros((total, 2), np.int32),
        n_tokens=np.array(lengths, np.int32),
        item_index=np.arange(len(lengths), dtype=np.int32),
        labels={
            "start_positions": np.array([n // 2 for n in lengths], np.int32),
            "end_positions": np.array([n - 1 for n in lengths], np.int32),
        },
    )


lengths_strategy = st.lists(st.integers(2, 60), min_size=1, max_size=80)


orders = st.sampled_from(get_args(Order))


@given(lengths_strategy, st.integers(1, 9), orders, st.integers(0, 9), st.integers(0, 3))
def test_every_window_is_in_exactly_one_batch_of_an_epoch(
    lengths: list[int], batch_size: int, order: Order, seed: int, epoch: int
) -> None:
    n_tokens = np.array(lengths)
    batches = plan_batches(n_tokens, batch_size, order=order, seed=seed, epoch=epoch, group=3)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    assert len(batches) == -(-len(lengths) // batch_size)
    assert sum(len(batch) < batch_size for batch in batches) <= 1
    again = plan_batches(n_tokens, batch_size, order=order, seed=seed, epoch=epoch, group=3)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


def test_length_grouping_pads_little_and_epochs_differ() -> None:
    n_tokens = np.random.default_rng(0).integers(20, 386, 4000)
    first, second = (plan_batches(n_tokens, 8, seed=0, epoch=epoch) for epoch in (0, 1))
    padded = sum(len(batch) * n_tokens[batch].max() for batch in first)
    assert padded < 1.02 * n_tokens.sum()
    assert not np.array_equal(first[0], second[0])


def test_an_order_that_is_not_shuffled_is_the_same_in_every_epoch_and_with_every_seed() -> None:
    n_tokens = np.array([5, 2, 9, 2, 7])
    for seed, epoch in ((0, 0), (1, 2)):
        given_ = plan_batches(n_tokens, 2, order="given", seed=seed, epoch=epoch)
        assert [batch.tolist() for batch in given_] == [[0, 1], [2, 3], [4]]
        by_length = plan_batches(n_tokens, 2, order="length", seed=seed, epoch=epoch)
        assert [batch.tolist() for batch in by_length] == [[1, 3], [0, 4], [2]]


@given(lengths_strategy, st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.data())
def test_a_loader_resumed_at_any_step_yields_the_rest(
    lengths: list[int], batch_size: int, accumulate: int, steps: int, data: st.DataObject
) -> None:
    order = data.draw(orders)

    def loader() -> StepLoader:
        windows = ragged(lengths)
        return StepLoader(
            windows,
            {"answer": windows.labels["start_positions"]},
            batch_size=batch_size,
            accumulate=accumulate,
            steps=steps,
            seed=1,
            order=order,
            pad_id=0,
        )

    whole = list(loader())
    assert [step.number for step in whole] == list(range(steps)) == list(range(len(loader())))
    per_epoch = steps_per_epoch(len(lengths), batch_size, accumulate)
    for start in range(0, steps - per_epoch + 1, per_epoch):
        epoch = whole[start : start + per_epoch]
        assert sum(len(b.input_ids) for step in epoch for b in step.batches) == len(lengths)
    stop = data.draw(st.integers(0, steps))
    first = loader()
    for _ in zip(range(stop), first, strict=False):
        pass
    state = {"step": stop} if stop == 0 else dict(first.state_dict())
    resumed = loader()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert [step.number for step in rest] == list(range(state["step"], steps))
    for ours, theirs in zip(rest, whole[state["step"] :], strict=True):
        for a, b in zip(ours.batches, theirs.batches, strict=True):
            for x, y in zip(
                (*a[:3], *a.labels.values()), (*b[:3], *b.labels.values()), strict=True
            ):
                assert torch.equal(x, y)


def test_each_window_is_batched_with_its_own_label() -> None:
    windows = ragged([5, 9, 2, 7, 4, 30, 6])
    labels = {"length": windows.n_tokens}
    loader = StepLoader(windows, labels, batch_size=2, accumulate=2, steps=4, seed=3, pad_id=0)
    for step in loader:
        for batch in step.batches:
            assert batch.labels["length"].dtype == torch.int64
            assert batch.labels["length"].tolist() == batch.attention_mask.sum(1).tolist()


@pytest.mark.parametrize("name", ["squad_v2", "answerable"])
def test_the_loss_of_a_window_does_not_depend_on_its_padding(tiny_bert: Path, name: str) -> None:
    task = load_task(name)
    torch.manual_seed(0)
    model = load_model(tiny_bert, task.model_class)
    windows = ragged([9, 30])
    labels, pad = task.labels(windows), 0
    both = collate(windows, windows.first_token, np.array([0, 1]), pad, labels)
    alone = [collate(windows, windows.first_token, np.array([i]), pad, labels) for i in (0, 1)]
    with torch.inference_mode():
        expected = sum(float(task.loss(model(**batch.inputs), batch)) for batch in alone)
        assert float(task.loss(model(**both.inputs), both)) == pytest.approx(expected, rel=1e-5)
        # for a single unpadded window it is transformers' own loss
        theirs = alone[0].labels
        named = {"labels": theirs["answerable"]} if name == "answerable" else theirs
        assert float(task.loss(model(**alone[0].inputs), alone[0])) == pytest.approx(
            float(model(**alone[0].inputs, **named).loss), rel=1e-6
        )
