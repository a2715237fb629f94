"""Processes that begin with the heavy modules imported: for tests of what becomes of a killed one.

A fresh Python takes seconds to import PyTorch, Transformers and Lightning. Here one process imports
them once and computes nothing, and each child is forked from it: a process of its own, with
its own signals, exit code and files, as `subprocess` gives it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HEAVY = (
    "pytest",
    "bertvision.cli",
    "bertvision.jobs.extract",
    "bertvision.jobs.heads",
    "bertvision.pipelines.extraction.cluster",
    "bertvision.pipelines.finetuning.finetune",
    "bertvision.pipelines.readouts.probe_results",
    "bertvision.pipelines.tasks.squad.spans",
    "bertvision.pipelines.training.train",
    "pandas",
    "s3fs",  # by Lightning, when a training begins
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
)
"""Imported once; what they import themselves is imported with them."""


class Finished(NamedTuple):
    """How a process ended, as `subprocess.CompletedProcess` says it."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """A process that runs a piece of code.

    Args:
        code: Python; a module named ``__main__`` to itself, with `arguments` in ``sys.argv[1:]``.
        arguments: as strings.
        folder: where its output is kept.
        environment: set in it, besides this process's own.
    """

    def __init__(
        self, code: str, arguments: tuple[object, ...], folder: Path, environment: dict[str, str]
    ) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        variables = {**os.environ, **environment}
        words = [str(argument) for argument in arguments]
        self.process = warm_context().Process(
            target=_main, args=(code, words, variables, str(self._out), str(self._err))
        )
        self.process.start()

    def output(self) -> str:
        """Its output so far."""
        return self._out.read_text() if self._out.exists() else ""

    def finished(self) -> Finished:
        """Wait for its end."""
        self.process.join()
        assert self.process.exitcode is not None
        return Finished(self.process.exitcode, self._out.read_text(), self._err.read_text())


@contextmanager
def running(code: str, *arguments: object, **environment: str) -> Iterator[Running]:
    """Run a piece of code in a process of its own, which is killed where it outlives the block."""
    with tempfile.TemporaryDirectory() as folder:
        child = Running(code, arguments, Path(folder), environment)
        try:
            yield child
        finally:
            child.process.kill()
            child.process.join()


def run_code(code: str, *arguments: object, **environment: str) -> Finished:
    """Run a piece of code in a process of its own, to its end.

    Environment variables that a library reads when it is imported must be this process's own.
    """
    with running(code, *arguments, **environment) as child:
        return child.finished()


def warm_context() -> multiprocessing.context.ForkServerContext:
    """A process that holds the heavy modules and forks the others: one for all tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(HEAVY))
    return context


@contextmanager
def warm_pool() -> Iterator[None]:
    """Dask's scheduler ``processes`` has two warm processes, where it would start fresh ones.

    Its threads would take the same pool: what they are to compute stays outside.
    """
    import dask

    from bertvision.pipelines.scheduler import _one_blas_thread

    with (
        ProcessPoolExecutor(2, warm_context(), _one_blas_thread) as pool,
        dask.config.set(pool=pool),
        warnings.catch_warnings(),
    ):
        # the pool was given it already
        warnings.filterwarnings("ignore", "The ``initializer`` argument is ignored")
        yield


def _main(code: str, arguments: list[str], variables: dict[str, str], out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<process>", "exec"), {"__name__": "__main__"})  # noqa: S102
