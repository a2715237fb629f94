"""Several processes fine-tune as one does, and end together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from processes import Finished, running
from safetensors.torch import load_file
from terminal import run
from workspaces import SETTINGS, write_squad

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import load_tokenizer
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.kept_logits import keep_logits
from bertvision.pipelines.training.group import RankLostError
from bertvision.pipelines.training.launch import environment, launch, meeting_place
from bertvision.pipelines.training.resume import StoppedError
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = """
import json, os, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from bertvision.errors import BertvisionError
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.kept_logits import keep_logits
from bertvision.pipelines.training.group import Group
from bertvision.pipelines.workspace.job_options import FinetuneOptions
root, options, rank, step, signum = sys.argv[1:]

def sum_gradients(self, parameters, real=Group.sum_gradients, taken=[]):
    taken.append(1)
    if self.rank.number == int(rank) and len(taken) == int(step):
        os.kill(os.getpid(), int(signum))  # while the others wait for this one's gradients
    real(self, parameters)

Group.sum_gradients = sum_gradients
try:
    done = finetune(Path(root), FinetuneOptions(**json.loads(options)), resume_every_seconds=0)
    print(done["steps"])
except BertvisionError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def ranks(
    root: Path, options: dict[str, Any], *kill: int, count: int = 2, code: str = RUN
) -> list[Finished]:
    """Fine-tune with several warm processes; ``kill`` is a rank, a step from 1 and a signal."""
    store = meeting_place()
    arguments = (root, json.dumps(options), *(kill or (-1, 0, 0)))
    with ExitStack() as stack:
        started = [
            stack.enter_context(running(code, *arguments, **environment(store, n, count)))
            for n in range(count)
        ]
        return [child.finished() for child in started]


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With a last batch of one window, of which the second rank has nothing; with dropout."""
    folder = tmp_path_factory.mktemp("squad")
    data = {name: write_squad(folder / f"{name}.json", n, n) for name, n in _SIZES.items()}
    asked = {"model": str(tiny_bert), **data, **SETTINGS, "epochs": 2.0, "save_at": ("0e", "2e")}
    windows = _windows(folder / "plan", asked)
    asked["batch_size"] = next(n for n in range(3, 9) if windows % n == 1)
    return asked


_SIZES = {"train": 9, "dev": 4}


def _windows(root: Path, asked: dict[str, Any]) -> int:
    finetune(root, FinetuneOptions(**{**asked, "save_at": ("0e",)}), evaluate=False)
    workspace = Workspace.find(root)
    return len(workspace.windows("train", load_tokenizer(workspace.snapshot_dir("0e"))))


@pytest.fixture(scope="module")
def exact(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same without dropout, whose draws are another on each rank."""
    model = tmp_path_factory.mktemp("exact") / "model"
    shutil.copytree(options["model"], model)
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(config))
    return {**options, "model": str(model)}


def _same(one: Path, other: Path) -> None:
    """Two workspaces agree to the tolerance that docs/scaling.md states."""
    logs = [pd.read_csv(root / "finetune" / "log.csv") for root in (one, other)]
    assert list(logs[0]["step"]) == list(logs[1]["step"])
    np.testing.assert_allclose(logs[0]["loss"], logs[1]["loss"], rtol=1e-4)
    for split in ("tune", "dev"):
        found = [load_file(root / "bert" / "2e" / f"{split}.safetensors") for root in (one, other)]
        for name in ("start_logits", "end_logits"):
            torch.testing.assert_close(found[0][name], found[1][name], atol=1e-3, rtol=1e-3)
    scores = [
        json.loads((root / "bert" / "2e" / "metrics.json").read_text()) for root in (one, other)
    ]
    for ours, theirs in zip(*(of["rules"].values() for of in scores), strict=True):
        assert ours["metrics"] == theirs["metrics"]
        assert ours["threshold"] == pytest.approx(theirs["threshold"], abs=1e-3)


@pytest.fixture(scope="module")
def alone(exact: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace that one process fine-tuned."""
    finetune(root := tmp_path_factory.mktemp("alone") / "ws", FinetuneOptions(**exact))
    return root


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_give_the_snapshots_and_scores_of_one(
    exact: dict[str, Any], alone: Path, tmp_path: Path, count: int
) -> None:
    done = ranks(tmp_path / "several", exact, count=count)
    assert [each.returncode for each in done] == [0] * count, done
    steps = len(pd.read_csv(alone / "finetune" / "log.csv"))
    assert [int(each.stdout) for each in done] == [steps] * count
    _same(alone, tmp_path / "several")


VARIANTS = {
    "learned": "freeze:0,exits-learned:1,layer-decay:0.9,no-bias-correction",
    "lora": "lora:2",
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants_learn_the_same_with_two_processes(
    exact: dict[str, Any], tmp_path: Path, variant: str
) -> None:
    asked = {**exact, "variant": tuple(variant.split(","))}
    if variant == "lora:2":
        # one half of it begins at 0 and the other without a gradient, and Adam makes steps of the
        # rate of whatever little there is: of rounding, which depends on the processor
        asked["lr"] = exact["lr"] / 5
    finetune(tmp_path / "one", FinetuneOptions(**asked))
    done = ranks(tmp_path / "two", asked)
    assert [each.returncode for each in done] == [0, 0], done
    _same(tmp_path / "one", tmp_path / "two")


def test_a_teacher_teaches_two_processes_what_it_teaches_one(
    exact: dict[str, Any], alone: Path, tmp_path: Path
) -> None:
    """Each learns from the logits of its own windows."""
    keep_logits(Workspace.find(alone), "2e", ["train"])
    asked = {**exact, "variant": ("keep:1",), "distil": f"{alone}:2e"}
    finetune(tmp_path / "one", FinetuneOptions(**asked))
    done = ranks(tmp_path / "two", asked)
    assert [each.returncode for each in done] == [0, 0], done
    _same(tmp_path / "one", tmp_path / "two")


@pytest.fixture(scope="module")
def undisturbed(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed") / "ws"
    done = ranks(root, options)
    assert [each.returncode for each in done] == [0, 0], done
    return root


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_the_same_command_gives_the_same_snapshots(
    options: dict[str, Any], undisturbed: Path, tmp_path: Path, rank: int
) -> None:
    """Bit for bit, with dropout: nothing that was saved is lost, whichever rank was killed."""
    ended = ranks(tmp_path, options, rank, 3, signal.SIGKILL)
    assert ended[rank].returncode == -signal.SIGKILL
    assert ended[1 - rank].returncode == RankLostError.exit_code
    assert f"rank {1 - rank} of 2 lost another rank" in ended[1 - rank].stderr
    again = ranks(tmp_path, options)
    assert [each.returncode for each in again] == [0, 0], again
    steps = len(pd.read_csv(undisturbed / "finetune" / "log.csv"))
    assert [int(each.stdout) for each in again] == [steps - 2] * 2
    _same_bytes(tmp_path, undisturbed)


def test_a_signal_to_one_rank_stops_all_after_the_step_and_saves(
    options: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    ended = ranks(tmp_path, options, 1, 3, signal.SIGTERM)
    assert [each.returncode for each in ended] == [75, 128 + signal.SIGTERM]
    assert "another rank was asked to stop; all steps taken are saved" in ended[0].stderr
    again = ranks(tmp_path, options)
    steps = len(pd.read_csv(undisturbed / "finetune" / "log.csv"))
    assert [int(each.stdout) for each in again] == [steps - 3] * 2
    _same_bytes(tmp_path, undisturbed)


ORPHAN = """
import os, signal
if os.environ["RANK"] == "1" and os.fork():
    signal.pause()  # it started the rank, and is killed by it
os.kill = lambda pid, signum, real=os.kill: real(os.getppid(), signum)
"""


def test_ranks_whose_starter_was_killed_stop_and_save(
    options: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    """Or they would train on, with the lock, and nobody to stop them."""
    ended = ranks(tmp_path, options, 1, 2, signal.SIGKILL, code=ORPHAN + RUN)
    assert [each.returncode for each in ended] == [RankLostError.exit_code, -signal.SIGKILL]
    assert "another rank was asked to stop; all steps taken are saved" in ended[0].stderr
    again = ranks(tmp_path, options)
    assert [each.returncode for each in again] == [0, 0], again
    _same_bytes(tmp_path, undisturbed)


SUMS = """
import hashlib, torch
from bertvision.pipelines.training import group
group._BUCKET = 7  # several buckets, and one gradient that is larger than a bucket
with group.joined() as ranks:
    torch.manual_seed(ranks.rank.number)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (3,), (2, 5), (1,))]
    for i, parameter in enumerate(parameters[:3]):  # the last has no gradient anywhere
        if i != ranks.rank.number:  # and this one none on this rank
            parameter.grad = torch.randn(parameter.shape)
    ranks.sum_gradients(parameters)
    sums = torch.cat([p.grad.reshape(-1) for p in parameters[:3]])
print(parameters[3].grad, *(value.hex() for value in sums.tolist()))
"""


def test_sums_of_gradients_are_the_same_bits_on_every_rank() -> None:
    """Or the ranks would drift apart; what has no gradient anywhere keeps none."""
    store = meeting_place()
    with ExitStack() as stack:
        started = [stack.enter_context(running(SUMS, **environment(store, n, 3))) for n in range(3)]
        done = [child.finished() for child in started]
    assert [each.returncode for each in done] == [0] * 3, done
    assert done[0].stdout == done[1].stdout == done[2].stdout
    none, *values = done[0].stdout.split()
    drawn = []
    for rank in range(3):
        torch.manual_seed(rank)
        drawn.append(
            [torch.zeros(n) if i == rank else torch.randn(n) for i, n in enumerate((4, 3, 10))]
        )
    wanted = torch.cat([sum(of) for of in zip(*drawn, strict=True)])  # type: ignore[arg-type]
    assert none == "None"
    torch.testing.assert_close(torch.tensor([float.fromhex(value) for value in values]), wanted)


LISTENING = """
import json, os
from pathlib import Path
from bertvision.pipelines.training.group import joined
with joined():
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    mine = {link[8:-1] for link in links if link.startswith("socket:[")}
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    there = [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in mine]
print(json.dumps(there))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_ranks_of_this_machine_listen_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or who reaches a port could lead the ranks to another machine, or write to them."""
    for _, name in socket.if_nameindex():
        if name != "lo":  # as the profile of a cluster's users may set it
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    store = meeting_place()
    socket.create_connection(("127.0.0.1", store.port)).close()
    with pytest.raises(ConnectionRefusedError):  # who listens everywhere has this one too
        socket.create_connection(("127.0.0.2", store.port)).close()
    with ExitStack() as stack:
        started = [
            stack.enter_context(running(LISTENING, **environment(store, n, 2))) for n in range(2)
        ]
        done = [child.finished() for child in started]
    assert [each.returncode for each in done] == [0, 0], done
    for each in done:
        assert set(json.loads(each.stdout)) == {"0100007F"}  # 127.0.0.1


def _same_bytes(one: Path, other: Path) -> None:
    weights = [root / "snapshots" / "2e" / "model.safetensors" for root in (one, other)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    logs = [
        pd.read_csv(root / "finetune" / "log.csv").drop(columns="seconds") for root in (one, other)
    ]
    pd.testing.assert_frame_equal(*logs)
    assert not (one / "finetune" / "resume.ckpt").exists()


@pytest.mark.parametrize("variant", ["isobn", "cls-norm", "freeze-stored:1"])
def test_variants_that_need_whole_batches_are_refused_by_name(
    options: dict[str, Any], tmp_path: Path, variant: str
) -> None:
    with pytest.raises(InputError, match=f"--variant {variant} .* 2 processes cannot share it"):
        bertvision.finetune(
            **{**options, "variant": (variant,)}, workspace=tmp_path / "ws", devices=2
        )
    assert not (tmp_path / "ws").exists()


@pytest.mark.slow
def test_devices_from_python_give_what_the_workspace_holds(
    exact: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes that are started afresh, as by the command; a library prints to stdout."""
    loud = tmp_path / "loud" / "sitecustomize.py"
    loud.parent.mkdir()
    loud.write_text("print('NCCL version 2')")
    path = [str(loud.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    one = bertvision.finetune(**exact, workspace=tmp_path / "one")
    two = bertvision.finetune(**exact, workspace=tmp_path / "two", devices=2)
    assert (two.steps, two.snapshots) == (one.steps, one.snapshots)
    assert two.seconds > 0
    _same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_torchrun_starts_the_command_as_ranks_and_one_of_them_prints(
    exact: dict[str, Any], tmp_path: Path
) -> None:
    finetune(tmp_path / "one", FinetuneOptions(**exact))
    typed = [f"--{name.replace('_', '-')}={_typed(value)}" for name, value in exact.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["--nproc-per-node=2", "-m", "bertvision", "finetune", "--json"]
    done = subprocess.run(
        [*torchrun, *command, *typed, "--workspace", str(tmp_path / "two")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] > 5
    _same(tmp_path / "one", tmp_path / "two")


def _typed(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _launch(code: str, devices: int = 2) -> str:
    return launch([], devices, program=[sys.executable, "-c", "import os, signal, sys\n" + code])


def test_what_the_first_rank_leaves_is_given_whatever_it_prints() -> None:
    """NCCL prints its version to stdout where NCCL_DEBUG is set, and it is not alone."""
    code = "print('NCCL version 2')\nif os.environ['RANK'] == '0': "
    code += "open(os.environ['BERTVISION_RESULT'], 'w').write(os.environ['WORLD_SIZE'])"
    assert _launch(code, 3) == "3"


WAIT = "signal.pause() if os.environ['RANK'] != '1' else "


@pytest.mark.parametrize(
    ("end", "message", "code"),
    [
        ("os.kill(os.getpid(), 9)", "rank 1 of 3 was killed by SIGKILL", 137),
        ("sys.exit(2)", "rank 1 of 3 ended with status 2; what it said is above", 2),
        ("sys.exit(143)", "rank 1 of 3 was stopped by SIGTERM", 143),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named(end: str, message: str, code: int) -> None:
    with pytest.raises(RankLostError, match=message) as failed:
        _launch(WAIT + end, 3)
    assert failed.value.exit_code == code


def test_a_rank_that_only_lost_another_is_not_blamed(tmp_path: Path) -> None:
    os.mkfifo(listens := tmp_path / "listens")  # whoever opens it waits for the other
    code = f"""
signal.signal(15, lambda *_: sys.exit(3))
if os.environ["RANK"] == "1":
    open({str(listens)!r}).close()
    sys.exit(75)
open({str(listens)!r}, "w").close()
signal.pause()"""
    with pytest.raises(RankLostError, match="rank 0 of 2 ended with status 3"):
        _launch(code)


def test_a_rank_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertvision.pipelines.training.launch._GRACE", 0.1)
    with pytest.raises(RankLostError, match="rank 1 of 2 ended with status 4"):
        _launch("signal.signal(15, signal.SIG_IGN)\nwhile True: " + WAIT + "sys.exit(4)")


def test_a_signal_is_passed_on_to_every_rank() -> None:
    code = f"signal.signal(15, lambda *_: sys.exit(143)); os.kill({os.getpid()}, 15) "
    code += "if os.environ['RANK'] == '1' else None\nsignal.pause()"
    with pytest.raises(StoppedError) as stopped:
        _launch(code)
    assert stopped.value.exit_code == 143


@pytest.mark.parametrize("devices", [0, -1])
def test_no_devices_are_refused(options: dict[str, Any], tmp_path: Path, devices: int) -> None:
    with pytest.raises(InputError, match="--devices"):
        bertvision.finetune(**options, workspace=tmp_path / "ws", devices=devices)


def test_more_devices_than_gpus_are_refused(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="--devices 3: this machine has 2; give 1 to 2"):
        bertvision.finetune(**options, workspace=tmp_path / "ws", devices=3)


def test_devices_under_torchrun_are_refused(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(meeting_place(), 0, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="--devices 2: this process was started by torchrun"):
        bertvision.finetune(**options, workspace=tmp_path / "ws", devices=2)


def test_commands_that_share_nothing_refuse_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or every process would do the same work, and print it."""
    for name, value in environment(meeting_place(), 1, 2).items():
        monkeypatch.setenv(name, value)
    done = run("status")
    assert done.exit_code == 2
    assert "status is for one process, and torchrun started 2" in done.stderr


def test_a_broken_environment_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(InputError, match="RANK=one"):
        bertvision.pipelines.ranks.this_rank()
