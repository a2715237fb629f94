"""Logits in their file: what is in it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.tasks.logits import Logits, WindowIndex

N_TOKENS = np.array([3, 2], np.int32)
ROWS = np.array([0, 0], np.int32)
OFFSETS = np.zeros((5, 2), np.int32)
SPANS = {name: np.arange(5, dtype=np.float32) for name in ("start_logits", "end_logits")}
CLASSES = {"logits": np.arange(6, dtype=np.float32).reshape(2, 3)}
METADATA = {"seconds": "0.125"}


def windows(offset_mapping: np.ndarray | None = OFFSETS) -> WindowIndex:
    return WindowIndex(["an item"], N_TOKENS, ROWS, offset_mapping)


@pytest.mark.parametrize(
    ("arrays", "offset_mapping", "beside"),
    [
        (SPANS, OFFSETS, {"question_index": ROWS, "n_tokens": N_TOKENS}),
        (CLASSES, OFFSETS, {"question_index": ROWS, "n_tokens": N_TOKENS}),
        (CLASSES, None, {"question_index": ROWS}),
    ],
    ids=["spans", "classes", "classes of a pooled split"],
)
def test_a_file_holds_the_logits_and_what_tells_their_windows(
    arrays: dict[str, np.ndarray],
    offset_mapping: np.ndarray | None,
    beside: dict[str, np.ndarray],
    tmp_path: Path,
) -> None:
    logits = Logits(arrays, windows(offset_mapping))
    logits.save(tmp_path / "new" / "dev.safetensors", METADATA)
    save_file({**arrays, **beside}, tmp_path / "expected", METADATA)
    path = tmp_path / "new" / "dev.safetensors"
    assert path.read_bytes() == (tmp_path / "expected").read_bytes()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == METADATA
    found = Logits.load(path, logits.windows, "bertvision evaluate x")
    assert found.kind == logits.kind == ("span" if arrays is SPANS else "classification")
    assert found.arrays.keys() == arrays.keys()
    assert all(np.array_equal(found.arrays[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({**SPANS, "question_index": ROWS}, "are damaged .*n_tokens.*: delete the file"),
        ({**CLASSES}, "are damaged .*question_index"),
        ({"other": ROWS, "question_index": ROWS}, "are damaged .*start_logits"),
        ({**SPANS, "question_index": ROWS, "n_tokens": N_TOKENS[::-1].copy()}, "of other data"),
        ({**CLASSES, "question_index": ROWS + 1}, r"\(2 windows\) are of other data than the 2"),
        ({"logits": CLASSES["logits"][:1], "question_index": ROWS}, "of other data"),
        ({"logits": CLASSES["logits"][:, 0].copy(), "question_index": ROWS}, "of other data"),
        (
            {"start_logits": SPANS["start_logits"], "end_logits": np.zeros(4, np.float32)}
            | {"question_index": ROWS, "n_tokens": N_TOKENS},
            "of other data",
        ),
    ],
    ids=["lengths", "rows", "names", "other lengths", "other rows", "fewer", "flat", "shorter"],
)
def test_what_are_no_logits_of_these_windows_is_refused(
    kept: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "dev.safetensors"
    with pytest.raises(WorkspaceError, match=r"there are no logits .*: `make them` makes them"):
        Logits.load(path, windows(), "make them")
    save_file(kept, path)
    with pytest.raises(WorkspaceError, match=message) as error:
        Logits.load(path, windows(), "make them")
    assert str(path) in str(error.value)
    assert "run `make them`" in str(error.value)


def test_arrays_of_no_kind_of_task_are_refused_by_their_names(tmp_path: Path) -> None:
    """Before they are written, and where another version wrote them."""
    ones = np.ones(1, np.int32)
    index = WindowIndex([], ones, np.zeros(1, np.int32), None)
    logits = Logits({"tags": np.zeros(1, np.float32)}, index)
    with pytest.raises(InputError, match="tags: logits are named logits; start_logits, end_logits"):
        logits.save(tmp_path / "dev.safetensors")
    assert not [*tmp_path.iterdir()]
    save_file({"tags": np.zeros(1, np.float32)}, tmp_path / "dev.safetensors")
    with pytest.raises(WorkspaceError, match="damaged .*tags: logits are named"):
        Logits.load(tmp_path / "dev.safetensors", index, "bertvision finetune --resume")
