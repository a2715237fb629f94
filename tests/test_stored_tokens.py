"""Poolings of stored tokens: the encoder is not run, and what is written is what it would give."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_space import sentence_space
from stores import shard_path
from workspaces import answerable_options

from bertvision.errors import ProvenanceError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.writer import SplitWriter
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.extraction.extract import Extracted, extract, repair
from bertvision.pipelines.extraction.features import ensure_features
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.poolings import POOLINGS, TokenPooling
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.rows import read_costs
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import FinetuneOptions, TrainOptions
from bertvision.pipelines.workspace.workspace import Workspace

NAME = "sentences"
ALIKE: dict[str, Any] = {"dataset": NAME, "precision": "32"}


@pytest.fixture(scope="module")
def plain(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with 40 sentences, of which nothing is stored."""
    return sentence_space(tiny_bert, tmp_path_factory.mktemp("plain"), 40)


@pytest.fixture
def space(plain: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(plain.root, tmp_path / "w")
    return Workspace.find(tmp_path / "w")


def tokens(space: Workspace, encoding: str, tag: str = "0e", **options: Any) -> None:
    """Store all tokens, in several shards."""
    settings = {"tokens": ("all",), "encoding": encoding, "shard_tokens": 512}
    extract(space, tag, **ALIKE, **(settings | options))


def pool(space: Workspace, *poolings: TokenPooling, **options: Any) -> list[Extracted]:
    settings = {"encoding": "float32", "shard_tokens": 8}
    return extract(space, "0e", tokens=poolings, **ALIKE, **(settings | options))


def stored(space: Workspace, pooling: TokenPooling, tag: str = "0e") -> ActivationSplit:
    return space.split(tag, f"{NAME}-all-{pooling}")


def files(space: Workspace, pooling: TokenPooling) -> dict[str, bytes]:
    """The stored shards and arrays of a pooled split, without the metadata."""
    root = Path(str(space.activations)) / f"arrays.zarr/0e/{NAME}-all-{pooling}"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "zarr.json"
    }


def vectors(space: Workspace, pooling: TokenPooling) -> np.ndarray:
    return PooledSplit(space, "0e", NAME, "all", pooling).features()


def finetuned(model: Path, folder: Path) -> Workspace:
    """A workspace of a task with a pooler, with the snapshot 0.5e."""
    options = FinetuneOptions(**answerable_options(model, folder) | {"save_at": ("0.5e",)})
    finetune(folder / "finetuned", options, evaluate=False)
    return Workspace.find(folder / "finetuned")


def without_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on nobody may make an encoder."""

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("the encoder was made")

    monkeypatch.setattr(Encoder, "__init__", never)


def of_encoder(space: Workspace) -> Workspace:
    """The same workspace with another store, where there are no tokens."""
    return space.at(str(space.root / "of-encoder"))


def test_exact_tokens_give_the_bytes_of_a_pooled_extraction(
    space: Workspace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(space, "float32")
    plain = pool(of_encoder(space), *POOLINGS)
    assert space.split("0e", f"{NAME}-all").record.shards > 2
    with caplog.at_level(logging.INFO):
        without_encoder(monkeypatch)
        done = pool(space, *POOLINGS)
    assert [d.pooled_from for d in done] == [f"0e/{NAME}-all"] * len(POOLINGS)
    assert [d.pooled_from for d in plain] == [None] * len(POOLINGS)
    assert f"pooled from the float32 tokens of 0e/{NAME}-all" in caplog.text
    for pooling in POOLINGS:
        split, other = stored(space, pooling), stored(of_encoder(space), pooling)
        assert split.record.shards > 3
        assert files(space, pooling) == files(of_encoder(space), pooling)
        assert split.verify() == []
        told = {"pooled_from": f"{NAME}-all", "pooled_from_encoding": "float32"}
        assert split.record.provenance == {**other.record.provenance, **told}


def test_exact_tokens_suffice_for_every_encoding_and_some_layers(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(space, "float32")
    pool(of_encoder(space), "cls", "max", encoding="int8", layers=[2, 0])
    without_encoder(monkeypatch)
    pool(space, "cls", "max", encoding="int8", layers=[2, 0])
    for pooling in ("cls", "max"):
        assert stored(space, pooling).record.layers == (0, 2)
        one, other = (vectors(s, pooling) for s in (space, of_encoder(space)))
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("encoding", "stated"), [("int8", 0.007), ("int4", 0.1)])
def test_the_mean_of_lossy_tokens_is_within_the_error_of_their_encoding(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, encoding: str, stated: float
) -> None:
    """The error of the tokens, less in a mean, and the error of the mean, each encoded once."""
    tokens(space, encoding)
    pool(of_encoder(space), "mean")
    without_encoder(monkeypatch)
    (done,) = pool(space, "mean", encoding=encoding)
    assert done.pooled_from == f"0e/{NAME}-all"
    truth, found = vectors(of_encoder(space), "mean"), vectors(space, "mean")
    deviation = np.linalg.norm(truth - truth.mean(axis=0))
    assert np.linalg.norm(found - truth) < 2 * stated * deviation
    assert stored(space, "mean").record.provenance["pooled_from_encoding"] == encoding


@pytest.mark.parametrize(
    ("held", "asked", "poolings", "why"),
    [
        ({"encoding": "int4"}, {"encoding": "int8"}, ["mean"], "encoding int4 is not the int8"),
        ({"encoding": "int8"}, {"encoding": "float32"}, ["mean"], "int8 is not the float32"),
        ({"encoding": "int8"}, {"encoding": "int8"}, ["cls"], "of int8 tokens only the mean"),
        ({"encoding": "int8"}, {"encoding": "int8"}, ["mean", "max"], "tokens only the mean"),
        ({"encoding": "float32", "layers": [0, 1]}, {}, ["mean"], "but not of layer 2"),
        ({"encoding": "float32"}, {"nonfinite": "record"}, ["mean"], "with nonfinite = 'error'"),
    ],
)
def test_where_tokens_are_not_as_good_the_encoder_is_run(
    space: Workspace,
    caplog: pytest.LogCaptureFixture,
    held: dict[str, Any],
    asked: dict[str, Any],
    poolings: list[TokenPooling],
    why: str,
) -> None:
    """Nobody is to find a coarser arithmetic than was asked for, nor a [CLS] that is all error."""
    tokens(space, **held)
    with caplog.at_level(logging.INFO):
        done = pool(space, *poolings, **asked)
    assert [d.pooled_from for d in done] == [None] * len(poolings)
    assert why in caplog.text
    for pooling in poolings:
        assert "pooled_from" not in stored(space, pooling).record.provenance


def test_unfinished_or_damaged_tokens_are_not_pooled(space: Workspace) -> None:
    tokens(space, "float32", shards=[0])
    (done,) = pool(space, "mean")
    assert done.pooled_from is None
    tokens(space, "float32")
    (Path(str(space.activations)) / f"ledger/0e/{NAME}-all/split.json").write_text("{")
    (done,) = pool(space, "max")
    assert done.pooled_from is None


def test_what_was_begun_is_ended_from_where_it_was_begun(space: Workspace) -> None:
    """From tokens that are stored since, or by the encoder: a split is of one source."""
    pool(space, "max", shards=[0])
    tokens(space, "float32")
    pool(space, "mean", shards=[1])
    done = pool(space, "max", "mean")
    assert {d.split: d.pooled_from for d in done} == {
        f"{NAME}-all-max": None,
        f"{NAME}-all-mean": f"0e/{NAME}-all",
    }
    assert all(stored(space, pooling).verify() == [] for pooling in ("max", "mean"))


def test_a_killed_pooling_is_finished_and_a_damaged_one_repaired_to_the_same_bytes(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(space, "int8")
    whole = space.at(str(space.root / "whole"))
    shutil.copytree(Path(str(space.activations)), whole.activations)
    pool(whole, "mean", encoding="int8")
    write = SplitWriter.write_shard

    def dying(self: SplitWriter, shard: int, *rest: Any) -> Any:
        if shard == 2:
            raise KeyboardInterrupt
        return write(self, shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(SplitWriter, "write_shard", dying)
        with pytest.raises(KeyboardInterrupt):
            pool(space, "mean", encoding="int8")
    assert not stored(space, "mean").is_complete
    without_encoder(monkeypatch)
    (done,) = pool(space, "mean", encoding="int8")
    split = stored(space, "mean")
    assert 0 < done.shards_written < split.record.shards
    assert files(space, "mean") == files(whole, "mean")
    shard_path(split, "hidden_states", 1).write_bytes(b"")
    (Path(str(space.activations)) / f"arrays.zarr/0e/{split.split}/channel_std/c/0/0").unlink()
    assert repair(space, "0e", split.split).shards == [1]
    assert files(space, "mean") == files(whole, "mean")


def test_without_its_tokens_a_pooled_split_is_not_repaired_by_other_arithmetic(
    space: Workspace,
) -> None:
    tokens(space, "int8")
    pool(space, "mean", encoding="int8")
    split, root = stored(space, "mean"), Path(str(space.activations))
    damaged = shard_path(split, "hidden_states", 0)
    damaged.write_bytes(b"")
    shutil.rmtree(root / f"ledger/0e/{NAME}-all")
    shutil.rmtree(root / f"arrays.zarr/0e/{NAME}-all")
    with pytest.raises(ProvenanceError, match=r"was pooled from the int8 tokens.*--pool none"):
        repair(space, "0e", split.split)
    assert damaged.read_bytes() == b""  # nothing was taken back either
    tokens(space, "int8")
    assert repair(space, "0e", split.split).shards == [0]


def test_a_whole_pooled_split_stays_when_its_tokens_go(space: Workspace) -> None:
    """The same call keeps what is there; a call for something else is refused."""
    tokens(space, "int8")
    pool(space, "mean", encoding="int8")
    before = files(space, "mean")
    ActivationStore.open(space.activations).remove("0e", f"{NAME}-all")
    assert pool(space, "mean", encoding="int8") == []
    (done,) = pool(space, "mean", "max", encoding="int8")
    assert (done.split, done.pooled_from) == (f"{NAME}-all-max", None)
    assert files(space, "mean") == before
    for other in ({"encoding": "int4"}, {"encoding": "int8", "layers": (0,)}):
        with pytest.raises(ProvenanceError, match="was pooled from the int8 tokens"):
            pool(space, "mean", **other)


def test_splits_that_are_compared_come_from_alike_sources(space: Workspace) -> None:
    """Tokens of one snapshot alone are stored: both are made by the encoder, or refused."""
    tokens(space, "int8")
    ensure_features(space, ["0e", "untrained"], NAME, ["all"], ["mean"], precision="32")
    for tag in ("0e", "untrained"):
        assert "pooled_from" not in stored(space, "mean", tag).record.provenance
    alone = space.at(str(space.root / "alone"))
    tokens(alone, "int8")
    ensure_features(alone, ["0e"], NAME, ["all"], ["mean"], precision="32")
    with pytest.raises(ProvenanceError, match=r"pooled_from_encoding = .*extract --pool none"):
        ensure_features(alone, ["0e", "untrained"], NAME, ["all"], ["mean"], precision="32")
    tokens(alone, "int8", "untrained")
    # of the [CLS], for which the encoder is run, and of the mean, as that of 0e was made
    ensure_features(alone, ["0e", "untrained"], NAME, ["all"], ["cls", "mean"], precision="32")
    made_from = stored(alone, "mean", "untrained").record.provenance
    assert made_from["pooled_from_encoding"] == "int8"
    assert "pooled_from" not in stored(alone, "cls", "untrained").record.provenance


def test_memory_is_that_of_shards_and_batches(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many windows a pooled shard has, the codes of a stored shard are held at a time."""
    tokens(space, "float32")
    buffers, asked = ActivationSplit.buffers, []

    def counted(self: ActivationSplit, tokens: int, *rest: Any) -> Any:
        asked.append(tokens)
        return buffers(self, tokens, *rest)

    monkeypatch.setattr(ActivationSplit, "buffers", counted)
    pool(space, "mean", shard_tokens=40)
    assert len(asked) == space.split("0e", f"{NAME}-all").record.shards > 2
    assert max(asked) <= 512


def test_the_pooler_output_is_the_encoders_alone(tiny_bert: Path, tmp_path: Path) -> None:
    """With the [CLS] it is extracted by default, and no token has it."""
    space = finetuned(tiny_bert, tmp_path)
    options: dict[str, Any] = {"splits": ["dev"], "encoding": "float32", "precision": "32"}
    extract(space, "0.5e", tokens=["all"], **options)
    (whole,) = extract(space, "0.5e", tokens=["cls"], **options)
    assert whole.pooled_from is None
    assert space.split("0.5e", "dev-cls").record.layers == (0, 1, 2, 3)
    shutil.copytree(Path(str(space.activations)), tmp_path / "other")
    other = space.at(str(tmp_path / "other"))
    for folder in ("ledger", "arrays.zarr"):
        shutil.rmtree(tmp_path / "other" / folder / "0.5e/dev-cls")
    (some,) = extract(other, "0.5e", tokens=["cls"], layers=[0, 1, 2], **options)
    assert some.pooled_from == "0.5e/dev"
    one, both = (s.split("0.5e", "dev-cls").read(range(20), [0, 1, 2]) for s in (other, space))
    assert bool((one.codes == both.codes).all())


def test_costs_of_a_pooled_split_are_those_of_its_tokens_too(
    tiny_bert: Path, tmp_path: Path
) -> None:
    """The encoder was run once, for the tokens: a head on the pooled states needed that."""
    space = finetuned(tiny_bert, tmp_path)
    for tokens in ("all", "cls"):
        extract(
            space,
            "0.5e",
            tokens=[tokens],
            splits=["train", "dev"],
            layers=[0, 2],
            encoding="float32",
            precision="32",
        )
    head = "cls-learned-pooling"
    train(space, [head], "0.5e", TrainOptions(precision="32"))
    evaluate(space, [head], trained_on="0.5e", tag="0.5e")
    (result,) = (r for r in read_results(space) if r.system == "head")
    (costs,) = read_costs(space, [result])
    folder = space.root / "extraction/0.5e"
    spent = {n: json.loads((folder / f"{n}.json").read_text()) for n in ("train", "train-cls")}
    assert spent["train-cls"]["pooled_from"] == "train"
    assert costs["extraction_seconds"] == sum(record["seconds"] for record in spent.values())
    assert costs["bytes"] == spent["train-cls"]["bytes"]
