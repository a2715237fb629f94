"""Names that become paths: what is not plain is refused, and nothing outside the root changes."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from faults import small
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bertvision.errors import BertvisionError, CorruptStoreError, InputError
from bertvision.featurestore.creation import SplitSpec
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.local import LocalStorage
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.writer import open_writer
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import FinetuneConfig, ModelConfig, WorkspaceConfig
from bertvision.pipelines.workspace.heads import find_head
from bertvision.pipelines.workspace.workspace import Workspace

PIECES = [
    "..", ".", "/", "//", "\\", "\0", ":", "~", "$HOME", "%2e%2e%2f", " ", "\t", "\n", "\r", "*",
    "?", '"', "<", "|", "-", "_", "con", "nul", "NUL", "aux", "com1", "lpt9", "prn", ".json",
    ".tmp", ".lock", "train", "Train", "dev", "1e", "0.3e", "1", "e", "0", "outside", "etc/passwd",
    "caf\u00e9", "cafe\u0301", "\uff11", "\u0663", "\u2167", "\u017f", "\u212a", "\u0131",
    "\u2024\u2024", "\uff0e\uff0e", "\uff0f", "\u2215", "\u202e", "\u200b", "\ufeff", "\ud800",
    "a" * 64, "a" * 5000,
]  # fmt: skip
texts = st.one_of(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join),
    st.text(max_size=70),
    st.from_regex(r"[0-9.]{1,9}e\n?", fullmatch=True),
    st.from_regex(r"[a-zA-Z0-9_-]{1,65}", fullmatch=True),
)
many = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
fewer = settings(many, max_examples=80)
ALLOWED = set("abcdefghijklmnopqrstuvwxyz0123456789_-")
DEVICES = {"con", "prn", "aux", "nul"} | {f"{d}{n}" for d in ("com", "lpt") for n in range(10)}


@many
@given(texts)
@example("train\n")
@example("con")
def test_only_plain_names_pass(text: str) -> None:
    plain = 0 < len(text) <= 63 and set(text) <= ALLOWED and text[0] not in "_-"
    if plain and text not in DEVICES:
        assert check_name(text, "split") == text
        # so no two that pass are one folder on any file system
        assert text == unicodedata.normalize("NFKD", text).casefold().strip(" .")
    else:
        with pytest.raises(InputError, match="split name"):
            check_name(text, "split")


@many
@given(texts)
@example("1e\n")
@example("\uff11e")
@example("1.0e")
@example("1e+2e")
@example("2e+1e")
@example("1e+1e")
@example("1e+untrained")
@example("1e+")
@example("step1000")
@example("nul")
@example("main-dev")
@example("Main")
def test_only_canonical_tags_pass(text: str) -> None:
    try:
        tag = SnapshotTag(text)
    except InputError:
        assert not SnapshotTag.is_valid(text)
        return
    if tag.is_named:  # a folder on every file system, and no part of another name
        assert set(text) <= ALLOWED - {"-"}
        assert text[0].isalpha()
        assert text not in DEVICES
        return
    assert set(text) <= set("0123456789.e+")
    assert "+".join(SnapshotTag.of(part.fraction) for part in tag.parts) == tag == text
    assert list(tag.parts) == sorted(set(tag.parts))
    for part in tag.parts:
        assert str(part.fraction).removesuffix(".0") + "e" == part or part.fraction < 1e-4


@pytest.fixture
def around(tmp_path: Path) -> Path:
    """A folder with a store, a workspace and a secret beside them."""
    small().write(tmp_path / "store")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    (tmp_path / "ws").mkdir()
    return tmp_path


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder, with what changes when it is written."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(parent, name))
            found[os.path.join(parent, name)] = status.st_mtime_ns, status.st_size
    return found


def spec(tag: str, split: str) -> SplitSpec:
    return SplitSpec(
        tag=tag, split=split, encoding="int8", layers=(0, 1), hidden_size=4, provenance={}
    )


@fewer
@given(text=texts)
def test_no_tag_or_split_writes_or_reads_outside_its_store(around: Path, text: str) -> None:
    made, store = small(), around / "store"
    before = listing(around)
    for tag, split in ((text, "train"), ("1e", text)):
        if SnapshotTag.is_valid(tag) and set(split) <= ALLOWED and len(split) < 64:
            continue
        with (
            pytest.raises(InputError),
            open_writer(store, spec(tag, split), made.contents, made.stats),
        ):
            pass
        with pytest.raises(InputError):
            ActivationSplit(store, tag, split)
        with pytest.raises(InputError):
            ActivationStore.open(store)[tag][split]
    assert listing(around) == before


@pytest.fixture
def workspace(around: Path) -> Workspace:
    config = WorkspaceConfig(
        model=ModelConfig(
            name_or_path="tiny", weights_sha256="0" * 64, hidden_size=4, num_hidden_layers=1
        ),
        task=TaskConfig(),
        data={},
        finetune=FinetuneConfig(save_at=("1e",)),
    )
    return Workspace(around / "ws", config)


@fewer
@given(text=texts)
def test_no_head_or_snapshot_lies_outside_its_workspace(workspace: Workspace, text: str) -> None:
    before = listing(workspace.root.parent)
    calls: list[Callable[[], Path]] = [
        lambda: workspace.snapshot_dir(text),
        lambda: workspace.bert_dir(text),
        lambda: workspace.head_dir(text, "linear"),
        lambda: workspace.head_dir("1e", text),
        lambda: workspace.require_snapshot(text),
        lambda: find_head(workspace, "1e", text),
        lambda: Path(workspace.split("1e", text).name),
    ]
    for call in calls:
        with suppress(BertvisionError):
            path = call()
            assert path.resolve() == path.absolute()
            assert path.is_relative_to(workspace.root)
    assert listing(workspace.root.parent) == before


@fewer
@given(text=texts)
@example("/etc/passwd")
@example("../outside/secret")
@example("ledger/../../outside/secret")
def test_no_key_leads_out_of_its_place(around: Path, text: str) -> None:
    storage = LocalStorage(around / "store")
    held = listing(around / "outside")
    top = {path.name for path in around.iterdir()}
    path = os.path.normpath(os.path.join(around / "store", text.split("\0")[0]))
    if "\0" in text or "\ud800" in text or path == str(around / "store"):
        return
    for call in (
        storage.read,
        storage.size,
        storage.names,
        storage.remove,
        storage.sweep,
        storage.open,
    ):
        try:
            found = call(text)  # type: ignore[operator]
        except (CorruptStoreError, OSError):
            continue
        assert found in (None, []) or path.startswith(str(around / "store") + os.sep)
    with suppress(CorruptStoreError, OSError):
        storage.write(text, b"written")
        assert path.startswith(str(around / "store") + os.sep)
    assert listing(around / "outside") == held
    assert {path.name for path in around.iterdir()} == top


@fewer
@given(text=texts)
def test_folders_of_other_names_in_a_store_are_not_looked_at(around: Path, text: str) -> None:
    ledger = str(around / "store/ledger")
    folder = Path(os.path.normpath(os.path.join(ledger, text)))
    if "\0" in text or "\ud800" in text or not folder.is_relative_to(ledger):
        return
    with suppress(OSError):
        (folder / "train").mkdir(parents=True)
        (folder / "train/split.json").write_text("{}")
    names = list(ActivationStore.open(around / "store"))
    assert all(SnapshotTag.is_valid(name) for name in names)
    assert "1e" in names
