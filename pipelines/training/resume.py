"""The resume file: a running training, written so that the same command continues it exactly.

Lightning calls such a file a checkpoint. It is written at the end of an optimiser step, every few
minutes and when SIGINT or SIGTERM ask the process to stop, and removed when training is done.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import SIGTERMException

from bertvision.errors import BertvisionError, WorkspaceError
from bertvision.featurestore.storage.durable import write_durably
from bertvision.pipelines.ranks import this_rank
from bertvision.pipelines.training.group import RankLostError


class StoppedError(BertvisionError):
    """A signal asked to stop; everything done so far is saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signum).name}; all steps taken are saved: run the same "
            "command again to continue"
        )
        self.exit_code = 128 + signum
        """Exit code that a shell expects of a process that a signal ended (130, 143)."""


class ResumeFile(pl.Callback):
    """Keeps a training resumable.

    Give it to the trainer as the last callback, so that what the others did for a step is done when
    the step is recorded; call ``fit`` inside `guard`, and `finish` when what it made is saved.
    """

    def __init__(self, path: Path, *, every_seconds: float = 300.0) -> None:
        """Keep the file at ``path``, no more than ``every_seconds`` behind."""
        self.path = path
        self.every_seconds = every_seconds
        self._written = 0.0
        self._signum: int | None = None
        self._stopped = False
        self._starter = os.getppid()

    def find(self, *, before: int | None = None) -> str | None:
        """The file as ``trainer.fit(ckpt_path=…)`` takes it; None where there is none.

        Args:
            before: an optimiser step that is still to be made; a file beyond it is of no use.

        Raises:
            WorkspaceError: the file is damaged.
        """
        if not self.path.is_file():
            return None
        try:
            with zipfile.ZipFile(self.path) as parts:
                # torch writes a checksum of each part, and compares none when it reads
                if (wrong := parts.testzip()) is not None:
                    raise ValueError(f"{wrong} does not pass its checksum")
            step = torch.load(self.path, weights_only=True, mmap=True)["global_step"]
        except Exception as error:  # torch raises errors of many kinds here
            raise WorkspaceError(
                f"the resume file {self.path} is damaged ({type(error).__name__}): delete it to "
                "start this training again"
            ) from error
        return None if before is not None and step >= before else str(self.path)

    def contents(self) -> bytes:
        """Checksums of its parts, which tell the file from every other, if `find` gave it."""
        with zipfile.ZipFile(self.path) as parts:
            parts_text = [
                f"{part.filename} {part.file_size} {part.CRC}" for part in parts.infolist()
            ]
        return "\n".join(parts_text).encode()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Hold SIGINT and SIGTERM back until the end of a step; a second SIGINT does not wait.

        Raises:
            StoppedError: a signal came; the file was written.
            RankLostError: it came to another rank; the file was written.
        """
        with self._signals(), suppress(SIGTERMException):
            yield
        if self._signum is not None:
            raise StoppedError(self._signum)
        if self._stopped:
            raise RankLostError(
                "another rank was asked to stop; all steps taken are saved: run the same command "
                "again to continue"
            )

    def finish(self) -> None:
        """Remove the file, once what was trained is saved."""
        self.path.unlink(missing_ok=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; take SIGTERM back from Lightning, which would not save."""
        self._written = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write the file where it is due or a signal came."""
        if not trainer.is_last_batch:
            self._write_if_due(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The same after the last step of an epoch.

        Lightning counts an epoch only here: a file from before would make it train one too many.
        It also comes here when it stops in the middle, where the file is written already.
        """
        if trainer.is_last_batch:
            self._write_if_due(trainer)

    def _write_if_due(self, trainer: pl.Trainer) -> None:
        first, together = trainer.is_global_zero, trainer.strategy.reduce_boolean_decision
        if not this_rank().alone and os.getppid() != self._starter:
            self._signum = signal.SIGTERM  # what started the ranks was killed, and cannot stop them
        due = first and time.monotonic() - self._written >= self.every_seconds
        # ranks must agree: one that went on alone would wait for the others in its next step
        if not together(due or self._signum is not None, all=False):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if first:
            write_durably(self.path, trainer.save_checkpoint)
        else:
            trainer.save_checkpoint(self.path)  # waits for the first, and writes nothing
        trainer.strategy.barrier()  # nobody leaves before the file has its name
        self._written = time.monotonic()
        if together(self._signum is not None, all=False):
            self._stopped = trainer.should_stop = True

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signums = (signal.SIGINT, signal.SIGTERM)
        previous = {signum: signal.signal(signum, self._on_signal) for signum in signums}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self._signum = signum
