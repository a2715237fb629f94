"""Ensembles: the combination's mathematics, and real members from their stored logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from byhand import change, fields, forget_digests
from hypothesis import given
from hypothesis import strategies as st
from labs import HEADS, scored_copy
from safetensors.numpy import load_file, save_file

from bertvision.errors import BertvisionWarning, InputError, UnknownNameError, WorkspaceError
from bertvision.pipelines.results.ensemble import (
    combine_logits,
    combine_softmaxes,
    ensemble,
    ensemble_dir,
)
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.systems import Combine, read_windows
from bertvision.pipelines.tasks.logits import Logits
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.workspace import Workspace

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)
COMBINE = st.sampled_from(["max", "mean"])


@st.composite
def members(draw: st.DrawFn, at_least: int = 1) -> tuple[list[np.ndarray], np.ndarray]:
    """Logits of some models over groups of some lengths; half of them far apart."""
    lengths = np.array(draw(LENGTHS))
    n = int(lengths.sum())
    scale = draw(st.sampled_from([1.0, 30.0, 2000.0]))
    values = st.lists(st.floats(-1, 1, width=16), min_size=n, max_size=n)
    models = draw(st.lists(values, min_size=at_least, max_size=4))
    return [np.array(model, np.float32) * np.float32(scale) for model in models], lengths


@given(members(), COMBINE)
def test_probabilities_stay_in_zero_to_one(
    given_members: tuple[list[np.ndarray], np.ndarray], combine: Combine
) -> None:
    """Also of logits so far apart that a probability would underflow to 0."""
    models, lengths = given_members
    logs = combine_softmaxes(models, lengths, combine)
    assert np.isfinite(logs).all()
    assert (logs <= 0).all()


@given(members(), COMBINE, st.integers(1, 4))
def test_a_model_with_itself_is_itself(
    given_members: tuple[list[np.ndarray], np.ndarray], combine: Combine, copies: int
) -> None:
    models, lengths = given_members
    found = combine_logits([models[0]] * copies, lengths, combine)
    np.testing.assert_allclose(found, models[0], rtol=1e-6, atol=1e-9)


@given(members(at_least=2), COMBINE)
def test_the_order_of_members_does_not_matter_to_the_last_bit(
    given_members: tuple[list[np.ndarray], np.ndarray], combine: Combine
) -> None:
    models, lengths = given_members
    found = combine_logits(models, lengths, combine)
    assert np.array_equal(found, combine_logits(models[::-1], lengths, combine))
    assert np.array_equal(found, combine_logits([*models[1:], models[0]], lengths, combine))


@given(members(at_least=2), st.floats(-50, 50))
def test_a_constant_on_a_members_logits_changes_no_probability(
    given_members: tuple[list[np.ndarray], np.ndarray], constant: float
) -> None:
    models, lengths = given_members
    moved = [models[0] + np.float64(constant), *models[1:]]
    for combine in ("max", "mean"):
        np.testing.assert_allclose(
            combine_softmaxes(moved, lengths, combine),
            combine_softmaxes(models, lengths, combine),
            atol=1e-9,
        )


def test_known_probabilities() -> None:
    """Two groups of two values each, with probabilities one can read off."""
    first = np.log(np.array([0.9, 0.1, 0.5, 0.5])).astype(np.float32)
    second = np.log(np.array([0.3, 0.7, 0.2, 0.8])).astype(np.float32)
    lengths = np.array([2, 2])
    for combine, expected in (("max", [0.9, 0.7, 0.5, 0.8]), ("mean", [0.6, 0.4, 0.35, 0.65])):
        logs = combine_softmaxes([first, second], lengths, combine)
        np.testing.assert_allclose(np.exp(logs), expected, rtol=1e-6)


def test_the_mean_of_softmaxes_sums_to_one() -> None:
    random = np.random.default_rng(0)
    models = [random.normal(0, 3, 12).astype(np.float32) for _ in range(3)]
    logs = combine_softmaxes(models, np.array([5, 7]), "mean")
    np.testing.assert_allclose(np.add.reduceat(np.exp(logs), [0, 5]), 1)


@pytest.fixture
def lab(workspace: Workspace, tmp_path: Path) -> Workspace:
    return scored_copy(workspace, tmp_path / "lab")


@pytest.mark.parametrize("combine", ["max", "mean"])
def test_an_ensemble_is_scored_like_its_members(lab: Workspace, combine: Combine) -> None:
    found = ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e", combine=combine)
    assert found["members"] == ["bert", *sorted(HEADS)]
    assert set(found["rules"]) == set(found["parts"][0]["rules"])
    assert found["threshold_tuned_on"] == "tune"
    folder = ensemble_dir(lab, found["members"], combine, "0.5e", "1e")
    predictions = json.loads((folder / "predictions.json").read_text())
    assert set(predictions) == {question.id for question in lab.items("dev")}
    result = next(r for r in read_results(lab) if r.folder == folder)
    assert result.rules == found["rules"]
    assert result.command == found["command"]
    assert result.name == f"{combine}(BERT, adapter-64-shared, learned-pooling)"


def test_the_order_in_which_members_are_named_does_not_matter(lab: Workspace) -> None:
    there = ensemble(lab, HEADS, with_bert=False, trained_on="0.5e", tag="1e", combine="mean")
    first = _files(lab)
    back = ensemble(lab, HEADS[::-1], with_bert=False, trained_on="0.5e", tag="1e", combine="mean")
    assert back["members"] == there["members"]
    assert back["rules"] == there["rules"]
    assert _files(lab) == first


@pytest.mark.parametrize("combine", ["max", "mean"])
def test_bert_with_a_head_of_the_same_logits_gives_berts_answers(
    lab: Workspace, combine: Combine
) -> None:
    """Through files, windows, threshold and decoding: the whole way is the identity."""
    head = lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e"
    forget_digests(head)
    for split in ("dev", "tune"):
        shutil.copy(lab.bert_dir("1e") / f"{split}.safetensors", head / f"{split}.safetensors")
    found = ensemble(lab, HEADS[:1], with_bert=True, trained_on="0.5e", tag="1e", combine=combine)
    bert = json.loads((lab.bert_dir("1e") / "metrics.json").read_text())
    assert found["rules"] == bert["rules"]
    folder = ensemble_dir(lab, found["members"], combine, "0.5e", "1e")
    assert json.loads((folder / "predictions.json").read_text()) == json.loads(
        (lab.bert_dir("1e") / "predictions.json").read_text()
    )


def test_stored_logits_of_heads_and_of_bert_are_of_the_same_windows(lab: Workspace) -> None:
    windows = read_windows(lab, "1e", "tune")
    assert len(windows.items) == lab.config.data["tune"].questions
    for folder in (lab.bert_dir("1e"), lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e"):
        logits = Logits.load(folder / "tune.safetensors", windows, "bertvision")
        assert logits.kind == "span"
        kept = load_file(folder / "tune.safetensors")
        assert sorted(kept) == ["end_logits", "n_tokens", "question_index", "start_logits"]
        assert np.array_equal(kept["n_tokens"], windows.n_tokens)


def test_classes_are_combined_like_tokens(lab: Workspace) -> None:
    """Two heads that tell answerable from not: their mean probability decides."""
    windows = read_windows(lab, "1e", "dev")
    random = np.random.default_rng(0)
    shape = (len(windows.item_index), 2)
    logits = [random.normal(0, 2, shape).astype(np.float32) for _ in HEADS]
    for head, values in zip(HEADS, logits, strict=True):
        folder = lab.head_dir("0.5e", head) / "eval" / "1e"
        forget_digests(folder)
        save_file(
            {"logits": values, "question_index": windows.item_index}, folder / "dev.safetensors"
        )
    found = ensemble(lab, HEADS, with_bert=False, trained_on="0.5e", tag="1e", combine="mean")
    assert found["kind"] == "classification"
    chance = np.mean([1 / (1 + np.exp(v[:, 0] - v[:, 1])) for v in logits], axis=0)
    kept = load_file(ensemble_dir(lab, found["members"], "mean", "0.5e", "1e") / "dev.safetensors")
    one = 1 / (1 + np.exp(kept["logits"][:, 0] - kept["logits"][:, 1]))
    np.testing.assert_allclose(one, chance, rtol=1e-4)
    scores = load_task("answerable").score(Logits({"logits": kept["logits"]}, windows), None)
    assert found["rules"] == scores.rules
    with pytest.raises(InputError, match="bert is of kind span, adapter-64-shared of kind class"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")


def test_a_member_without_logits_names_the_command_that_makes_them(lab: Workspace) -> None:
    (lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "dev.safetensors").unlink()
    command = f"bertvision evaluate {HEADS[0]} --trained-on 0.5e --checkpoint 1e"
    with pytest.raises(WorkspaceError, match=command):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    shutil.rmtree(lab.head_dir("0.5e", HEADS[0]) / "eval")
    with pytest.raises(WorkspaceError, match=command):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")


def test_without_logits_on_tune_the_threshold_stays_at_zero(lab: Workspace) -> None:
    (lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "tune.safetensors").unlink()
    with pytest.warns(BertvisionWarning, match=f"{HEADS[0]} has no logits on the split tune"):
        found = ensemble(lab, HEADS[:1], with_bert=True, trained_on="0.5e", tag="1e")
    assert found["threshold_tuned_on"] is None
    assert found["rules"]["n-best"]["threshold"] == 0


def test_logits_of_other_windows_are_refused(lab: Workspace) -> None:
    path = lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "dev.safetensors"
    arrays = load_file(path)
    save_file({**arrays, "question_index": arrays["question_index"][::-1].copy()}, path)
    with pytest.raises(WorkspaceError, match="not as they were written"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    forget_digests(path.parent)
    with pytest.raises(WorkspaceError, match="of other data than"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")
    path.write_bytes(b"no tensors")
    with pytest.raises(WorkspaceError, match="are damaged"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")


def test_members_on_different_encoders_are_refused(lab: Workspace) -> None:
    path = lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "metrics.json"
    provenance = fields(path)["provenance"]
    change(path, provenance={**provenance, "weights_sha256": "0" * 64})
    with pytest.raises(WorkspaceError, match="other weights than bert"):
        ensemble(lab, HEADS, with_bert=True, trained_on="0.5e", tag="1e")


@pytest.mark.parametrize(
    ("runs", "with_bert", "combine", "error", "message"),
    [
        (HEADS[:1], False, "max", InputError, "two members or more"),
        ([HEADS[0], HEADS[0]], False, "max", InputError, "name each once"),
        (HEADS, False, "median", InputError, "choose one of max, mean"),
        (["learned-poolin"], True, "max", UnknownNameError, "did you mean learned-pooling"),
    ],
    ids=["alone", "twice", "combine", "unknown"],
)
def test_what_is_no_ensemble_is_refused(
    lab: Workspace,
    runs: list[str],
    with_bert: bool,
    combine: Combine,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        ensemble(lab, runs, with_bert=with_bert, trained_on="0.5e", tag="1e", combine=combine)


def test_an_ensemble_of_very_many_heads_has_a_name_that_a_disk_takes(lab: Workspace) -> None:
    many = [f"adapter-386-independent-skip@f0.{i}@s{i}" for i in range(40)]
    name = ensemble_dir(lab, many, "max", "0.3e", "1e", "tune").name
    assert len(name) < 200
    assert name != ensemble_dir(lab, many[1:], "max", "0.3e", "1e", "tune").name


def _files(workspace: Workspace) -> dict[str, bytes]:
    """Files of ensembles, but for those with the time that they took."""
    found = {}
    for path in (workspace.root / "ensembles").rglob("*.*"):
        if path.is_file() and path.name != "metrics.json":
            found[str(path.relative_to(workspace.root))] = path.read_bytes()
    return found
