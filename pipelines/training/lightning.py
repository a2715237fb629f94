"""Shared parts of every training with Lightning: a log without gaps, a clock, and no noise."""

from __future__ import annotations

import csv
import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import pytorch_lightning as pl
from pytorch_lightning.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from tqdm import tqdm

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.options import LoggerName
from bertvision.pipelines.progress import progress
from bertvision.pipelines.training.group import Group


class TrainingLog(pl.Callback):
    """Progress on stderr, and a CSV with a row per step, without gaps or repeats.

    Its last column is the step's wall time, from the end of the step before, in seconds: what the
    machine does besides lengthens single steps, and hardly their median. The module's
    ``training_step`` returns what is logged under ``"log"``: numbers or scalar tensors by column,
    None where a step has no such number.

    Args:
        path: Path of the CSV.
        steps: Steps of the whole training.
        desc: Text of the progress bar.
        columns: beside ``step`` and ``seconds``.
    """

    def __init__(self, path: Path, steps: int, desc: str, columns: Sequence[str]) -> None:
        self.path = path
        self._steps = steps
        self._desc = desc
        self._columns = list(columns)
        self._ended = 0.0
        self._file: TextIO | None = None
        self._bar: tqdm[Any] | None = None

    def rows(self) -> list[list[str]]:
        """The rows that were logged, as text: step, then the columns."""
        if not self.path.is_file():
            return []
        return [line.split(",") for line in self.path.read_text().splitlines()[1:]]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the file; a killed run may have logged more than it saved."""
        done = trainer.global_step
        rows = self.rows()[:done]
        self._file = self.path.open("w")
        lines = [",".join(row) for row in [["step", *self._columns, "seconds"], *rows]]
        self._file.write("\n".join([*lines, ""]))
        self._bar = progress(self._steps, self._desc, "step", initial=done)
        self._ended = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the step's row.

        Raises:
            NonFiniteError: a logged number is NaN or infinite: the training diverged.
        """
        logged = [outputs["log"][column] for column in self._columns]
        values = [None if x is None else float(x) for x in logged]
        for column, value in zip(self._columns, values, strict=True):
            if value is not None and not math.isfinite(value):
                raise NonFiniteError(
                    f"{column} became {value} at step {trainer.global_step}: the training "
                    "diverged; give a lower --lr"
                )
        if self._file is not None and self._bar is not None:
            before, self._ended = self._ended, time.perf_counter()
            values.append(self._ended - before)
            cells = ",".join("" if value is None else f"{value:.6g}" for value in values)
            self._file.write(f"{trainer.global_step},{cells}\n")
            self._file.flush()
            if values[0] is not None:
                self._bar.set_postfix(loss=f"{values[0]:.3f}", refresh=False)
            self._bar.update(1)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the file and the bar: the error's message is to have a line of its own."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the file and the bar."""
        if self._file is not None and self._bar is not None:
            self._bar.close()
            self._file.close()


def seconds_per_step(log: Path) -> float | None:
    """Median wall time of the steps in a `TrainingLog`; None where none was timed."""
    with log.open(newline="") as file:
        timed = [float(row["seconds"]) for row in csv.DictReader(file) if row.get("seconds")]
    return statistics.median(timed) if timed else None


class Clock(pl.Callback):
    """Seconds of training, and of them those spent waiting for data; kept over interruptions.

    Args:
        waited: seconds that this process spent waiting for data so far.
    """

    def __init__(self, waited: Callable[[], float] = lambda: 0.0) -> None:
        self._waited = waited
        self._before = (0.0, 0.0)
        self._started: float | None = None
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """Wall time of training so far."""
        if self._started is None:
            return self._before[0]
        end = time.perf_counter() if self._ended is None else self._ended
        return self._before[0] + end - self._started

    @property
    def wait_seconds(self) -> float:
        """Seconds of these that were spent waiting for data."""
        return self._before[1] + self._waited()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start."""
        self._started = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop."""
        self._ended = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Both times, for the resume file."""
        return {"seconds": self.seconds, "wait_seconds": self.wait_seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from an interrupted run's times."""
        self._before = (state_dict["seconds"], state_dict["wait_seconds"])


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's banners, tips and warnings about things that are meant so."""
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"pytorch_lightning|lightning_fabric")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def trainer(folder: Path, callbacks: list[pl.Callback], group: Group, **options: Any) -> pl.Trainer:
    """A Trainer on the devices of a group that writes nothing of its own into ``folder``."""
    return pl.Trainer(
        callbacks=callbacks,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **group.trainer_options(),
        **options,
    )


@contextmanager
def run_logger(
    name: LoggerName, folder: Path, *, title: str, settings: Mapping[str, Any]
) -> Iterator[Logger]:
    """A logger of Lightning, by name, that has been told the settings, for one run.

    What it writes lies in ``folder/<name>``; W&B sends it away too, as MLflow does where
    MLFLOW_TRACKING_URI names a server: both ask for accounts in their own ways.

    Args:
        name: csv, tensorboard, wandb or mlflow.
        folder: Folder of the snapshot's heads.
        title: Title of the run.
        settings: Settings that the weights depend on, as JSON values.

    Raises:
        InputError: its package is not installed.
    """
    place, server = folder / name, os.environ.get("MLFLOW_TRACKING_URI")
    makers: dict[LoggerName, Callable[[], Logger]] = {
        "csv": lambda: CSVLogger(folder, name=name),
        "tensorboard": lambda: TensorBoardLogger(folder, name=name),
        "wandb": lambda: WandbLogger(title, save_dir=place, project="bertvision"),
        "mlflow": lambda: MLFlowLogger(
            "bertvision",
            run_name=title,
            # not a folder of files: MLflow 3 refuses these
            tracking_uri=server or f"sqlite:///{place}/mlflow.db",
            artifact_location=None if server else (place / "artifacts").as_uri(),
        ),
    }
    place.mkdir(parents=True, exist_ok=True)
    try:
        logger = makers[name]()
    except ModuleNotFoundError as error:
        with suppress(OSError):  # what another run logged there stays
            place.rmdir()
        package = f"bertvision[{name}]" if name == "tensorboard" else name
        raise InputError(
            f"--logger {name} needs a package that is not installed: `pip install {package}`, or "
            "leave it out (losses are always in the head's log.csv)"
        ) from error
    # a run of W&B is ended, or the next one of this process would go on with it
    run = logger.experiment if isinstance(logger, WandbLogger) else None
    try:
        logger.log_hyperparams(dict(settings))
        yield logger
    except BaseException:
        if run is not None:
            run.finish(exit_code=1)
        raise
    if run is not None:
        run.finish()
