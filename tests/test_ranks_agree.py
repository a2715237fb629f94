"""Several processes that do not have the same before them say so, and save nothing of it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from test_devices import RUN, ranks
from workspaces import SETTINGS, write_squad

from bertvision.pipelines.training.group import RanksDifferError


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("squad")
    data = {name: write_squad(folder / f"{name}.json", 6, 6) for name in ("train", "dev")}
    asked = {"model": str(tiny_bert), **data, **SETTINGS, "epochs": 2.0, "save_at": ("0e", "2e")}
    return {**asked, "batch_size": 4}


BLIND = """
import os
from pathlib import Path

def is_file(self, real=Path.is_file):
    return real(self) and not (self.name == "resume.ckpt" and os.environ["RANK"] == "1")

Path.is_file = is_file
"""


def test_a_rank_that_does_not_see_the_resume_file_ends_all(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A file system may show it late: the rank would begin anew, and be summed with the rest."""
    ranks(tmp_path, options, 1, 3, signal.SIGTERM)
    before = (tmp_path / "finetune" / "resume.ckpt").read_bytes()
    ended = ranks(tmp_path, options, code=BLIND + RUN)
    assert [each.returncode for each in ended] == [RanksDifferError.exit_code] * 2, ended
    for each in ended:
        assert "rank 1 has another resume file than rank 0" in each.stderr
    assert (tmp_path / "finetune" / "resume.ckpt").read_bytes() == before
    assert not (tmp_path / "snapshots" / "2e").exists()
    again = ranks(tmp_path, options)
    assert [each.returncode for each in again] == [0, 0], again


OTHER_DATA = """
import os
from bertvision.pipelines.workspace.workspace import Workspace

def windows(self, split, tokenizer, real=Workspace.windows):
    found = real(self, split, tokenizer)
    if os.environ["RANK"] == "1":
        found.input_ids[5] += 1
    return found

Workspace.windows = windows
"""


def test_a_rank_with_another_training_text_ends_all(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """One token is enough, such as that of another version of the file on another machine."""
    ended = ranks(tmp_path, options, code=OTHER_DATA + RUN)
    assert [each.returncode for each in ended] == [RanksDifferError.exit_code] * 2, ended
    assert "rank 1 has another set of training windows than rank 0" in ended[0].stderr


DRIFT = """
import os
import torch
from bertvision.pipelines.training.group import Group

def drifting(self, parameters, real=Group.sum_gradients, taken=[]):
    parameters = list(parameters)
    real(self, parameters)
    taken.append(1)
    if len(taken) == 2 and self.rank.number == 1:
        with torch.no_grad():
            parameters[-1].view(-1)[0] += 1e-3  # of one weight, on one rank

Group.sum_gradients = drifting
"""


@pytest.mark.parametrize(
    ("every", "step"), [("0", 2), ("1e9", None)], ids=["resume file", "snapshot"]
)
def test_a_rank_that_drifted_is_named_before_its_step_is_saved(
    options: dict[str, Any], tmp_path: Path, every: str, step: int | None
) -> None:
    """A faulty device is not noticed otherwise, and what is saved would be of the first rank."""
    code = DRIFT + RUN.replace("resume_every_seconds=0", f"resume_every_seconds={every}")
    ended = ranks(tmp_path, options, code=code)
    assert [each.returncode for each in ended] == [RanksDifferError.exit_code] * 2, ended
    for each in ended:
        assert f"rank 1 has other weights than rank 0 after step {step or ''}" in each.stderr
    assert not (tmp_path / "snapshots" / "2e").exists()
    assert (tmp_path / "finetune" / "resume.ckpt").exists() == (step is not None)
    assert not list((tmp_path / "finetune").glob("*.tmp*"))
