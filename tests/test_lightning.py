"""A Lightning trainer that resumes goes on as if nothing had happened, wherever it was saved."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from bertvision import ActivationDataModule, ActivationLoader, ActivationStore
from bertvision.errors import BertvisionWarning, InputError

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning") / "store"
    made = ActivationStore.create(folder)
    for split, n in (("train", 23), ("dev", 5)):
        with made.writer("0e", split, hidden_size=4, layers=[0], shard_tokens=16) as writer:
            for i in range(n):
                writer.add(i, torch.randn(1 + i % 5, 1, 4), labels={"number": i})
            writer.finish()
    return folder


@pytest.fixture(autouse=True)
def hush() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Module(pl.LightningModule):
    """Notes which examples it is trained on; kinds differ in where the data come from."""

    def __init__(self, store: Path, kind: str) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[int]]] = []
        self.linear = torch.nn.Linear(4, 1)
        if kind != "data module":
            self.train_dataloader = lambda: self._loader(store, "train", kind)  # type: ignore[method-assign]
            self.val_dataloader = lambda: self._loader(store, "dev", "loader")  # type: ignore[method-assign]

    def _loader(self, store: Path, split: str, kind: str) -> Any:
        opened = ActivationStore.open(store)["0e"][split]
        if kind == "tokens":
            return opened.tokens(0, batch_size=11)
        return ActivationLoader(opened, batch_size=4, shuffle=split == "train")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        numbers = batch.labels["number"] if hasattr(batch, "labels") else batch.examples
        self.seen.append((self.current_epoch, numbers.tolist()))
        weight = self.linear.weight
        return weight.sum() * 0

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class SaveEverywhere(pl.Callback):
    """Saves a checkpoint at every place where Lightning makes one.

    Attributes:
        saved: Path and the batches that were trained on before.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: list[tuple[str, int]] = []

    def _save(self, trainer: pl.Trainer, module: Any, place: str) -> None:
        path = str(self.folder / f"{len(self.saved)}-{place}.ckpt")
        trainer.save_checkpoint(path)
        self.saved.append((path, len(module.seen)))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *rest: Any) -> None:
        # in the middle of an accumulation Lightning makes none: gradients are not saved
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        self._save(trainer, module, "batch")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._save(trainer, module, "epoch")

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._save(trainer, module, "validation")


def fit(
    store: Path, kind: str, settings: dict[str, Any], resume: str | None = None, save: Any = None
) -> Module:
    module = Module(store, kind)
    data = None
    if kind == "data module":
        data = ActivationDataModule(store, "0e", val="dev", batch_size=4)
    options = {"max_epochs": 3} | settings
    trainer = pl.Trainer(**QUIET, **options, callbacks=[save] if save else [])
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return module


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limited": {"limit_train_batches": 3},
    "limited, by steps": {"limit_train_batches": 3, "max_steps": 7},
    "overfitted": {"overfit_batches": 2},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "validated within epochs": {"val_check_interval": 2},
    "accumulated": {"accumulate_grad_batches": 2},
}
KINDS = {
    "data module": set(SETTINGS),
    # a module that overfits gives its loader shuffle=False itself
    "loader": {"plain", "limited, by steps", "reloaded"},
    "tokens": {"plain", "limited, by steps", "validated within epochs", "accumulated"},
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(kind, settings, id=f"{kind}-{name}")
        for kind, names in KINDS.items()
        for name, settings in SETTINGS.items()
        if name in names
    ],
)
def test_a_resumed_trainer_sees_the_batches_of_one_that_was_not_interrupted(
    store: Path, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    saved = SaveEverywhere(tmp_path)
    whole = fit(store, kind, settings, save=saved).seen
    assert len(whole) > 4
    if "max_steps" in settings:
        # of an epoch's end Lightning goes on with an empty epoch there, whatever the loader
        saved.saved = [(path, n) for path, n in saved.saved if "epoch" not in path]
    # every place once in a first, and once in a later epoch
    chosen = {(path.rsplit("-")[-1], whole[n - 1][0]): (path, n) for path, n in saved.saved}
    for path, n in chosen.values():
        assert fit(store, kind, settings, path).seen == whole[n:], path


def test_epochs_of_a_trainer_have_orders_of_their_own_and_overfitting_has_one(store: Path) -> None:
    def epochs(**settings: Any) -> list[list[list[int]]]:
        seen = fit(store, "data module", settings).seen
        return [[batch for epoch, batch in seen if epoch == e] for e in range(3)]

    plain = epochs()
    assert plain[0] != plain[1] != plain[2]
    assert epochs(reload_dataloaders_every_n_epochs=1) == plain
    limited = epochs(limit_train_batches=3)
    assert limited == [batches[:3] for batches in plain]
    one, two, three = epochs(overfit_batches=2)
    assert one == two == three


def test_a_stream_without_end_says_that_its_position_is_missing(store: Path) -> None:
    stream = ActivationStore.open(store)["0e"]["train"].tokens(0, batch_size=4, endless=True)
    stream.set_epoch(0)
    with pytest.raises(InputError, match="give that, or load the position"):
        stream.set_epoch(1)
    next(iter(stream))
    stream.set_epoch(1)  # of a run that goes on
    assert stream.batches == 1


def test_batches_of_a_sanity_check_are_not_left_out_of_the_first_epoch(store: Path) -> None:
    stream = ActivationStore.open(store)["0e"]["train"].tokens(0, batch_size=4)
    drawn = iter(stream)
    next(drawn)
    next(drawn)
    stream.set_epoch(0)
    assert sum(1 for _ in stream) == len(stream)
    stream.load_state_dict(stream.state_dict() | {"batches": len(stream) + 2})
    stream.set_epoch(1)  # of a trainer that resumes within the epoch
    assert sum(1 for _ in stream) == len(stream) - 2


def test_a_loaded_position_that_a_trainer_drops_is_told(store: Path) -> None:
    loader = ActivationLoader(ActivationStore.open(store)["0e"]["train"], batch_size=2)
    loader.load_state_dict({"epoch": 3, "batch": 2})
    with pytest.warns(BertvisionWarning, match="batch 2 of epoch 3, is dropped.* epoch 0"):
        loader.set_epoch(0)
    assert (loader.epoch, loader.batch) == (0, 0)
