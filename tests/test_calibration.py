"""Calibration: tokens with massive activations spoil no other token, and what is lost is said."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hidden_states import hidden_states
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.featurestore.format import arrays, calibration
from bertvision.featurestore.format.calibration import (
    POOLED,
    Calibration,
    Calibrator,
    ChannelStatsAccumulator,
    encoding_error,
    is_beyond_promise,
)
from bertvision.featurestore.format.encoding import decode_numpy, encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.extraction.extract import extract, repair
from bertvision.pipelines.extraction.features import ensure_features
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace.workspace import Workspace

STATED = {"int8": 9e-3, "int4": 0.115}
"""Error of ordinary tokens, in deviations (docs/performance.md)."""
WINDOW = 40


def massive(deviations: float, tokens: int = 1600) -> tuple[torch.Tensor, np.ndarray]:
    """States of which the first token of each window is far off in two channels, and the kinds."""
    x = hidden_states(tokens, 2, 384)
    first = np.arange(tokens) % WINDOW == 0
    x[first, :, 7] += deviations * (1 + 0.02 * torch.randn(int(first.sum()), 2))
    x[first, :, 200] -= 0.6 * deviations
    return x, np.where(first, "first", "ordinary")


def calibrated(x: torch.Tensor, kinds: np.ndarray, encoding: str) -> Calibration:
    calibrator = Calibrator(get_encoding(encoding), kinds)
    for block in x.split(3 * WINDOW + 7):
        calibrator.add(block, torch.ones(len(block), dtype=torch.bool))
    return calibrator.result()


@pytest.mark.parametrize("encoding", STATED)
@pytest.mark.parametrize("deviations", [100.0, 1000.0, 5000.0])
def test_massive_activations_leave_other_tokens_at_the_stated_error(
    deviations: float, encoding: str
) -> None:
    x, kinds = massive(deviations)
    found = calibrated(x, kinds, encoding)
    ordinary = x[torch.from_numpy(kinds == "ordinary")]
    spread = ordinary.std(dim=0)
    error = encoding_error(ordinary, get_encoding(encoding), found.stats, spread)
    assert error.mean() <= STATED[encoding]
    assert found.plain is not None
    # before: the moments of all tokens alike
    spoiled = encoding_error(ordinary, get_encoding(encoding), found.plain, spread)
    assert spoiled.mean() > STATED[encoding]


@pytest.mark.parametrize(("encoding", "most"), [("int8", 0.01), ("int4", 0.06)])
@pytest.mark.parametrize("deviations", [1000.0, 5000.0])
def test_massive_tokens_themselves_lose_little_of_their_own_length(
    deviations: float, encoding: str, most: float
) -> None:
    x, kinds = massive(deviations)
    stats = calibrated(x, kinds, encoding).stats
    first = x[torch.from_numpy(kinds == "first")]
    codes, scale, _ = encode(first, get_encoding(encoding), stats)
    assert scale is not None
    decoded = decode_numpy(codes.numpy(), scale.numpy(), stats, get_encoding(encoding))
    lost = np.linalg.norm(decoded - first.numpy(), axis=-1) / first.norm(dim=-1).numpy()
    assert lost.max() <= most


@pytest.mark.parametrize("encoding", STATED)
def test_where_no_token_stands_out_the_statistics_are_the_plain_moments(encoding: str) -> None:
    """To the last bit: splits that earlier versions wrote of such states come out the same."""
    x = hidden_states(900, 3, 64) * torch.linspace(0.1, 20, 64) + torch.linspace(-40, 90, 64)
    found = calibrated(x, np.full(900, "ordinary"), encoding)
    assert found.plain is not None
    for robust, plain in zip(found.stats, found.plain, strict=True):
        assert torch.equal(robust, plain)


def test_a_channel_is_widened_for_the_token_that_reaches_beyond_the_others() -> None:
    """BERT's [CLS] has them: in int8 no token may lose more than 2 % then."""
    x = hidden_states(1700, 1, 384)
    first = np.arange(1700) % 170 == 0
    x[first, :, 5] = 13.0
    kinds = np.where(first, "first", "ordinary")
    found = calibrated(x, kinds, "int8")
    assert found.plain is not None
    sample, spread = x[torch.from_numpy(first)], x.std(dim=0)
    before = encoding_error(sample, get_encoding("int8"), found.plain, spread)
    assert before.mean() > 0.02 > found.errors["first"].max()
    assert found.errors["ordinary"].max() < 9e-3
    changed = found.stats.std != found.plain.std
    assert changed.nonzero().tolist() == [[0, 5]]


@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.floats(0.01, 0.3),
    deviations=st.floats(60, 1e5),
    shift=st.floats(-1e3, 1e3),
    hidden=st.integers(4, 100),
)
@settings(max_examples=40, deadline=None)
def test_mean_and_spread_are_those_of_the_tokens_that_do_not_stand_out(
    seed: int, share: float, deviations: float, shift: float, hidden: int
) -> None:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(shift, 1, (300, 2, hidden)).astype(np.float32))
    odd = np.zeros(300, bool)
    odd[rng.choice(300, max(1, int(share * 300)), replace=False)] = True
    channel = int(rng.integers(hidden))
    x[odd, :, channel] += deviations * hidden**0.5  # far beyond the length of all other channels
    accumulator, others = ChannelStatsAccumulator(), ChannelStatsAccumulator()
    accumulator.add(x)
    others.add(x[~odd])
    ordinary, found = others.result(), accumulator.result(levels=7)
    scale = abs(shift) + 1
    torch.testing.assert_close(found.mean, ordinary.mean, rtol=1e-4, atol=1e-5 * scale)
    torch.testing.assert_close(accumulator.spread(), ordinary.std, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("encoding", STATED)
def test_the_recorded_error_is_that_of_a_direct_computation(encoding: str) -> None:
    x, kinds = massive(300.0, tokens=240)  # few enough that all of them are measured
    found = calibrated(x, kinds, encoding)
    codes, scale, _ = encode(x, get_encoding(encoding), found.stats)
    assert scale is not None
    decoded = decode_numpy(codes.numpy(), scale.numpy(), found.stats, get_encoding(encoding))
    spread = x.numpy()[kinds == "ordinary"].std(axis=0)
    error = np.sqrt((((decoded - x.numpy()) / spread) ** 2).mean(axis=-1))
    assert set(found.errors) == {"first", "ordinary"}
    for kind, by_layer in found.errors.items():
        np.testing.assert_allclose(by_layer, error[kinds == kind].mean(axis=0), rtol=1e-4)


def test_a_calibration_says_what_every_encoding_would_leave() -> None:
    x, kinds = massive(100)
    of_int8, of_int4 = (calibrated(x, kinds, name).compared for name in ("int8", "int4"))
    assert of_int8 == pytest.approx(of_int4)
    assert of_int8["float32"] == 0 < of_int8["float16"] < of_int8["bfloat16"] < of_int8["int4"]
    assert "int4" not in calibrated(x[:, :, :383], kinds, "int8").compared  # packs channels in twos


def test_an_error_beyond_the_promise_is_told_from_others() -> None:
    assert is_beyond_promise(0.0201, "int8")
    assert not is_beyond_promise(0.02, "int8")
    assert not is_beyond_promise(0.0201, "int4")
    assert is_beyond_promise(0.31, "int4")


def test_tokens_that_are_not_finite_are_left_out() -> None:
    x, kinds = massive(1000.0)
    broken = x.clone()
    whole = torch.ones(len(x), dtype=torch.bool)
    whole[::WINDOW] = False
    broken[::WINDOW, 1, 3] = torch.nan
    calibrator = Calibrator(get_encoding("int8"), kinds)
    for block, some in zip(broken.split(500), whole.split(500), strict=True):
        calibrator.add(block, some)
    found = calibrator.result()
    assert set(found.errors) == {"ordinary"}
    assert found.errors["ordinary"].max() < 9e-3


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Workspace:
    """A copy of the shared workspace, with nothing stored."""
    root = tmp_path / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("activations"))
    return Workspace.find(root)


def inject(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first token of each window have a massive activation."""
    compute = Encoder.__call__

    def massive_first(self: Encoder, windows: Windows, rows: np.ndarray) -> list[torch.Tensor]:
        (states,) = compute(self, windows, rows)
        lengths = windows.n_tokens[rows]
        states[np.cumsum(lengths) - lengths, -1, 3] += 3000.0
        return [states]

    monkeypatch.setattr(Encoder, "__call__", massive_first)


def test_what_is_lost_is_stored_shown_and_warned_of(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        (plain,) = extract(space, "1e", splits=["dev"], precision="32")
    told = next(r.getMessage() for r in caplog.records if "by encoding" in r.message)
    assert re.search(
        r"1e/dev by encoding.*: int8 [\d.]+ kB, 0\.0\d+; int4 [\d.]+ kB, 0\.\d+;", told
    )
    assert set(plain.encoding_error) == {"first", "special", "ordinary"}
    assert not [r for r in caplog.records if "error of" in r.message]
    inject(monkeypatch)
    other = space.at(str(space.root / "other"))
    with caplog.at_level(logging.WARNING):
        (done,) = extract(other, "1e", splits=["dev"], precision="32")
    (warning,) = [r.getMessage() for r in caplog.records if "error of" in r.message]
    last = other.split("1e", "dev").record.layers[-1]
    assert "1e/dev: int8 keeps the first token of a window with an error of" in warning
    assert f"in layer {last}" in warning
    assert "--encoding bfloat16" in warning
    split = other.split("1e", "dev")
    assert done.encoding_error == split.info()["encoding_error"]
    assert done.encoding_error["first"]["in_layer"] == last
    assert done.encoding_error["first"]["largest"] == float(split.encoding_error["first"].max())
    assert done.encoding_error["ordinary"]["largest"] < STATED["int8"] < 0.02
    assert done.encoding_error["first"]["largest"] > 0.02


@pytest.mark.parametrize(
    ("tokens", "kinds"), [("all", {"first", "special", "ordinary"}), ("cls", {"pooled"})]
)
def test_what_all_splits_of_a_snapshot_lose_is_said_once(
    space: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tokens: str,
    kinds: set[str],
) -> None:
    monkeypatch.setitem(calibration._LARGEST_ERROR, "int8", 0.0)  # whatever is lost is said
    tags, splits = ["0.5e", "1e"], ["train", "tune", "dev"]
    with caplog.at_level(logging.WARNING):
        if tokens == "all":
            for tag in tags:
                extract(space, tag, splits=splits, precision="32")
        else:
            ensure_features(space, tags, None, splits, ["cls"], precision="32")
    assert all(len(space.stored()[tag]) == len(splits) for tag in tags)
    told = [r.getMessage() for r in caplog.records if "with an error of" in r.getMessage()]
    places = [line.partition(":")[0] for line in told]
    name = "train" if tokens == "all" else "train-cls"
    assert places == [f"{tag}/{name}" for tag in tags for _ in kinds]


def test_a_split_of_floats_says_nothing_of_an_error(space: Workspace) -> None:
    (done,) = extract(space, "1e", splits=["dev"], precision="32", encoding="bfloat16")
    assert done.encoding_error == {}
    assert space.split("1e", "dev").info()["encoding_error"] == {}


def test_a_split_of_an_earlier_version_is_repaired_with_its_own_statistics(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch)
    kept = Calibration.arrays

    def earlier(self: Calibration) -> dict[str, np.ndarray]:
        assert self.plain is not None
        return kept(Calibration(self.plain))

    with monkeypatch.context() as before:
        before.setattr(Calibration, "arrays", earlier)
        extract(space, "1e", splits=["dev"], precision="32")
    split = space.split("1e", "dev")
    assert split.info()["encoding_error"] == {}
    folder = Path(str(split.storage)) / arrays.group_key(split.record)
    damaged = folder / "channel_std/c/0/0"
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes(len(whole)))
    assert repair(space, "1e", "dev").damage
    assert damaged.read_bytes() == whole
    assert split.verify() == []


def test_a_damaged_error_is_measured_again(space: Workspace) -> None:
    extract(space, "1e", splits=["dev"], precision="32")
    split = space.split("1e", "dev")
    folder = Path(str(split.storage)) / arrays.group_key(split.record)
    damaged = folder / "error_ordinary/c/0"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"")
    assert "error_ordinary" in "".join(repair(space, "1e", "dev").damage)
    assert damaged.read_bytes() == whole


@pytest.mark.parametrize("share", [0.05, 0.31])
@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_the_smaller_of_two_classes_is_no_exception_among_pooled_states(
    encoding: str, share: float
) -> None:
    """Saturated pooler outputs of a classifier: two tight groups, of which none may be lost."""
    torch.manual_seed(0)
    sign = torch.where(torch.arange(256) < share * 256, -1.0, 1.0)[:, None, None]
    states = torch.tanh(1.5 * sign * torch.randn(384).sign() + 0.3 * torch.randn(256, 1, 384))
    found = calibrated(states, np.full(256, POOLED), encoding)
    assert found.plain is not None
    torch.testing.assert_close(found.stats.mean, found.plain.mean)
    assert found.errors[POOLED].max() < {"int8": 0.02, "int4": 0.3}[encoding]
