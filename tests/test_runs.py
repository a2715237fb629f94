"""Runs: names say what they are, and parts of the data are nested."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.pipelines.training.datamodule import HiddenStates
from bertvision.pipelines.training.module import BatchCollector, Shared
from bertvision.pipelines.workspace.runs import Run, ranks, runs_of

fractions = st.integers(0, 10_000).map(lambda i: i / 10_000)


@given(fractions, st.integers(0, 999_999_999))
def test_a_name_reads_back_as_the_run_it_was_written_from(fraction: float, seed: int) -> None:
    run = Run.of("adapter-386-shared", fraction, seed)
    assert Run.parse(run.name) == run


def test_the_plain_run_has_the_name_of_its_head() -> None:
    assert Run.of("learned-pooling", 1.0, 0).name == "learned-pooling"
    assert Run.of("learned-pooling", 0.3, 1).name == "learned-pooling@f0.3@s1"
    assert Run.of("my.heads:LastLayer", 1.0, 2).name == "my-heads-lastlayer@s2"
    assert Run.parse("my.heads:LastLayer@s2") == Run("my.heads:LastLayer", 1.0, 2)


@given(
    st.none() | st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.none() | st.floats(1e-6, 10),
    st.none() | st.integers(1, 999),
    fractions,
)
def test_settings_that_a_name_carries_are_those_of_the_training(
    layers: list[int] | None, lr: float | None, epochs: int | None, fraction: float
) -> None:
    marks = [f"@s7@f{fraction:.4f}"]  # in whatever order they are typed
    marks += [] if layers is None else [f"@l{'-'.join(map(str, layers))}"]
    marks += [] if lr is None else [f"@lr{lr!r}"]
    marks += [] if epochs is None else [f"@e{epochs}"]
    run = Run.parse("learned-pooling" + "".join(reversed(marks)))
    given = {"layers": layers and tuple(layers), "lr": lr, "epochs": epochs}
    assert run.settings == {name: value for name, value in given.items() if value is not None}
    assert (run.head, run.seed, run.fraction) == ("learned-pooling", 7, fraction)
    assert Run.parse(run.name) == run


def test_the_same_settings_have_one_name() -> None:
    assert Run.parse("a@l00-6@lr0.0100").name == "a@l0-6@lr0.01"
    assert Run.parse("a@lr1000000").name == Run.parse("a@lr1e6").name == "a@lr1e06"
    run = Run.parse("a@l0-6@f0.3@s1").having(lr=0.00123456789)
    assert run.text == "a@l0-6@lr0.00123456789@f0.3@s1"


def test_settings_leave_seeds_and_parts_to_the_command() -> None:
    names = [run.name for run in runs_of(["a@e3@l6", "b@e3@s4"], [0.5], [0, 1])]
    assert names == ["a@l6@e3@f0.5", "a@l6@e3@f0.5@s1", "b@e3@s4"]


@pytest.mark.parametrize(
    "text",
    [
        "a@e0",
        "a@l",
        "a@l-1",
        "a@lr",
        "a@lr-1",
        "a@e1@e2",
        "a@",
        "a@f2",
        "a@f-1",
        "a@f0.12345",
        "a@s",
        "a@s-1",
        "a@x3",
        "a@s1@s2",
        "../a",
        "@s1",
    ],
)
def test_what_is_no_run_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(InputError, match="run|name"):
        Run.parse(text)


def test_every_head_comes_with_every_fraction_and_seed() -> None:
    names = [run.name for run in runs_of(["a", "b@f0.2"], [0.5, 1], [0, 1])]
    assert names == ["a@f0.5", "a", "a@f0.5@s1", "a@s1", "b@f0.2"]
    with pytest.raises(InputError, match="each once"):
        runs_of(["a", "a@s0"], [1], [0])


@given(st.integers(1, 50), st.integers(0, 5), fractions, fractions)
def test_parts_are_nested_and_follow_the_data_not_the_storage(
    n: int, seed: int, one: float, two: float
) -> None:
    rng = np.random.default_rng(n)
    stored = rng.permutation(n)
    in_data_order, in_stored_order = ranks(np.arange(n), seed), ranks(stored, seed)
    assert (in_data_order[stored] == in_stored_order).all()
    small, large = (Run.of("a", f, seed).examples(n) for f in sorted((one, two)))
    chosen = [set(np.flatnonzero(in_data_order < k).tolist()) for k in (small, large)]
    assert chosen[0] <= chosen[1]
    assert [len(c) for c in chosen] == [small, large]


def _batch(positions: list[int]) -> HiddenStates:
    lengths = torch.tensor([1 + p % 3 for p in positions])
    states = torch.cat([torch.full((1 + p % 3, 2, 4), float(p)) for p in positions])
    labels = {"start_positions": torch.tensor([p % 2 for p in positions])}
    return HiddenStates(states, lengths, labels, torch.tensor(positions))


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 40), st.randoms())
def test_a_feed_gives_the_batches_that_its_examples_alone_would_make(
    n: int, batch_size: int, kept: int, random: object
) -> None:
    kept = min(kept, n)
    order = list(range(n))
    random.shuffle(order)  # type: ignore[attr-defined]
    rank = ranks(np.arange(n), 3)
    own = [p for p in order if rank[p] < kept]
    expected = [own[i : i + batch_size] for i in range(0, len(own), batch_size)]
    collector, found = BatchCollector(kept, n, batch_size), []
    for i in range(0, n, batch_size):
        positions = order[i : i + batch_size]
        found.append(collector.take(Shared(_batch(positions)), torch.from_numpy(rank[positions])))
    found.append(collector.rest())
    given_out = [batch for batch in found if batch is not None]
    assert [batch.examples.tolist() for batch in given_out] == expected
    for batch, positions in zip(given_out, expected, strict=True):
        alone = _batch(positions)
        assert torch.equal(batch.hidden_states, alone.hidden_states)
        assert torch.equal(batch.lengths, alone.lengths)
        assert torch.equal(batch.labels["start_positions"], alone.labels["start_positions"])
    assert collector.pending == []
