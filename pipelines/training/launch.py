"""Ranks on this machine: one command in several processes, watched until the last has ended.

What `torchrun` does, with an end that says in a sentence which rank ended the run, and how.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bertvision.errors import InputError
from bertvision.pipelines.ranks import RESULT_FILE, STARTER
from bertvision.pipelines.training.group import PATIENCE, RankLostError
from bertvision.pipelines.training.resume import StoppedError
from bertvision.pipelines.workspace.runs import Run, check_shares
from bertvision.pipelines.workspace.workspace import Workspace

_GRACE = 10.0
"""Seconds that ranks have to end after one of them failed, before they are killed."""
_HEARS = 1.0
"""Seconds after which a signal is heard that the system gave to another thread, which does not
wake the one that hears."""
_BEGIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from bertvision.__main__ import main; main()"
)
_LOOPBACK = {"lo", "lo0"}  # Linux and macOS


def check_devices(devices: int) -> None:
    """Refuse more devices than there are, and ranks that would start ranks.

    Raises:
        InputError: names what is allowed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise InputError(
            f"--devices {devices}: this process was started by torchrun, whose --nproc-per-node "
            "says how many there are: leave --devices out"
        )
    if torch.cuda.is_available() and devices > (there := torch.cuda.device_count()):
        raise InputError(
            f"--devices {devices}: this machine has {there}; give 1 to {there}, or start the "
            "command with torchrun on several machines"
        )


def share_out(
    words: Sequence[str], workspace: Workspace, runs: Sequence[Run], devices: int
) -> None:
    """Run a command on heads as ranks, each of which trains its own part of them.

    Args:
        words: Words of the command, behind ``bertvision``; it takes `own_part` of the same runs.
        workspace: Workspace of the heads.
        runs: the heads.
        devices: Number of ranks.

    Raises:
        InputError: there are fewer devices, or fewer heads.
        StoppedError: see `launch`, likewise RankLostError.
    """
    check_devices(devices)
    check_shares(runs, devices)
    store = workspace.config.activations
    places = ["--workspace", str(workspace.root), *(["--store", store] if store else [])]
    launch([*words, *places], devices)


def launch(arguments: Sequence[str], devices: int, program: Sequence[str] | None = None) -> str:
    """Run a command as ranks 0 to ``devices`` - 1, and wait until all have ended.

    SIGINT and SIGTERM are passed on to all of them. Where a rank fails, or a second signal comes,
    they are asked to end, and are killed where they have not after ten seconds. What they print
    goes to stderr.

    Args:
        arguments: Arguments of the command.
        devices: Number of ranks.
        program: Program that takes them; by default `own_program`.

    Returns:
        What rank 0 wrote to its `RESULT_FILE`.

    Raises:
        StoppedError: a signal to this process stopped them.
        RankLostError: a rank failed; names it, and how it ended.
    """
    store = meeting_place()
    program = own_program() if program is None else program
    threads = str(max(1, (os.cpu_count() or 1) // devices))
    ranks: list[subprocess.Popen[bytes]] = []
    ended: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory() as folder, _passed_on(ranks, ended) as stopped_by:
        result = Path(folder) / "result"
        told = {RESULT_FILE: str(result), STARTER: str(read_end)}
        try:
            for number in range(devices):
                own = environment(store, number, devices)
                ranks.append(
                    subprocess.Popen(
                        [*program, *arguments],
                        env={"OMP_NUM_THREADS": threads, **os.environ, **own, **told},
                        stdin=subprocess.DEVNULL,
                        stdout=2,
                        pass_fds=[read_end],
                        start_new_session=True,  # Ctrl-C is for this process, which passes it on
                    )
                )
            if (signum := stopped_by()) is not None:  # it came before all were there to hear it
                for rank in ranks:
                    rank.send_signal(signum)
            order = _wait(ranks, ended)
        finally:
            for rank in ranks:
                rank.kill()  # of one that ended it does nothing
            os.close(read_end)
            os.close(write_end)
        _judge([(number, ranks[number].returncode) for number in order], stopped_by())
        return result.read_text()


def own_program() -> list[str]:
    """Command that runs bertvision in another process, which imports what this one would.

    Python alone would look for modules in the current folder first, which this process may not do:
    a folder of data may hold a ``torch.py``.
    """
    quiet = ["--quiet"] if "TQDM_DISABLE" in os.environ else []
    return [sys.executable, "-P", "-c", _BEGIN, json.dumps([*map(str, sys.path)]), *quiet]


def meeting_place() -> TCPStore:
    """Where ranks of this machine find each other, as long as it is held.

    Only this machine reaches it: who can write there can say where the ranks meet. A store that
    binds a socket of its own would listen on every interface.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=PATIENCE,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # the store closes it
        )


def environment(store: TCPStore, number: int, count: int) -> dict[str, str]:
    """Environment that `torchrun` would set for a rank of this machine.

    Args:
        store: the `meeting_place`.
        number: Number of the rank.
        count: Number of all ranks.
    """
    inside = [name for _, name in socket.if_nameindex() if name in _LOOPBACK]
    return {
        # or the ranks would listen to each other on the interface that the host's name has
        **{f"{backend}_SOCKET_IFNAME": name for name in inside for backend in ("GLOO", "NCCL")},
        **{"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)},
        **{"RANK": str(number), "LOCAL_RANK": str(number), "GROUP_RANK": "0"},
        **{"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
        **{"TORCHELASTIC_RUN_ID": "bertvision", "TORCHELASTIC_RESTART_COUNT": "0"},
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, and not in rank 0
    }


def _wait(
    ranks: Sequence[subprocess.Popen[bytes]], ended: queue.SimpleQueue[int | None]
) -> list[int]:
    """Wait for all ranks; once one has failed, not long for the others. Gives their order.

    Args:
        ranks: Ranks that were started.
        ended: is given the number of each, and None where a signal asked not to wait long.
    """

    def watch(rank: int) -> None:
        ranks[rank].wait()
        ended.put(rank)

    for rank in range(len(ranks)):
        threading.Thread(target=watch, args=(rank,), daemon=True).start()
    order: list[int] = []
    deadline: float | None = None
    while len(order) < len(ranks):
        left = _HEARS if deadline is None else deadline - time.monotonic()
        try:
            number = ended.get(timeout=min(_HEARS, max(0.0, left)))
        except queue.Empty:
            if left <= 0:
                for process in ranks:
                    process.kill()
                deadline = None
            continue
        if number is not None:
            order.append(number)
        if (number is None or ranks[number].returncode) and deadline is None:
            deadline = time.monotonic() + _GRACE
            for process in ranks:
                process.terminate()
    return order


def _judge(ends: Sequence[tuple[int, int]], stopped_by: int | None) -> None:
    """Raise where a rank failed.

    Args:
        ends: rank and return code of each, in the order in which they ended.
        stopped_by: the signal that was passed on to them, if one was.
    """
    failed = [(number, code) for number, code in ends if code]
    if not failed:
        return
    lost = RankLostError.exit_code
    if stopped_by is not None and all(
        code in (128 + stopped_by, -stopped_by, lost) for _, code in failed
    ):
        raise StoppedError(stopped_by)
    number, code = next((end for end in failed if end[1] != lost), failed[0])
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    elif code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        how = f"was stopped by {signal.Signals(code - 128).name}"
    else:
        how = f"ended with status {code}; what it said is above"
    error = RankLostError(
        f"rank {number} of {len(ends)} {how}. The others were ended too; what was saved before is "
        "whole, and the same command goes on from it"
    )
    error.exit_code = code if code > 0 else 128 - code
    raise error


@contextmanager
def _passed_on(
    ranks: Sequence[subprocess.Popen[bytes]], ended: queue.SimpleQueue[int | None]
) -> Iterator[Callable[[], int | None]]:
    """Pass SIGINT and SIGTERM on to ranks; gives what tells the first that came.

    A rank that waits inside a library hears none of them, so the second sets `_wait` a deadline.
    """
    came: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        for rank in ranks:
            rank.send_signal(signum)
        if len(came) > 1:
            ended.put(None)

    def first() -> int | None:
        return came[0] if came else None

    if threading.current_thread() is not threading.main_thread():
        yield first
        return
    previous = {s: signal.signal(s, pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield first
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
