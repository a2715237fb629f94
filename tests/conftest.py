"""Fixtures that every test may use: a tiny BERT with its tokenizer, built here."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 8 << 30:
    # to remove the 300,000 files that the tests write takes a disk longer than to write them
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported
    processes = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))

import pytest
from hypothesis import settings

# a shell that starts the tests in the background has them ignore SIGINT, and their children too
signal.signal(signal.SIGINT, signal.default_int_handler)

# how long an example takes is a matter of the machine and of what else it does
settings.register_profile("bertvision", deadline=None)
settings.load_profile("bertvision")

if TYPE_CHECKING:
    from hubs import Hub

    from bertvision.pipelines.workspace.workspace import Workspace

WORDS = """
    the a of in and was is who what where when which did does founded wrote born lives works river
    city firm book king queen 1901 1902 1950 anna boris clara david london paris rome . , ? ' - ##s
""".split()  # noqa: SIM905


LONGEST = """
    test_train test_tutorials test_docs test_memory test_generate test_writer_crash
    test_benchmarks test_variants test_remote test_late_writers test_probe test_corruption
    test_probe_report test_cka test_report_browser test_hub_store test_probe_run test_docstrings
    test_audit test_structure test_encoders test_analysis_results test_isotropy test_parsing_run
    test_cluster_extract test_sweep test_tokens test_hostile test_context test_cli_machine
    test_lease test_scheduler test_devices test_surface test_crash test_writer test_ordering
""".split()  # noqa: SIM905
"""Files that take longest, as they are begun: the processes that share the tests end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_collection_finish() -> None:
    gc.freeze()  # or the collector would look again and again through all modules


@pytest.fixture(scope="session", autouse=True)
def flushed_to_nowhere() -> Iterator[None]:
    """Nothing waits for the disk, which would be half of the time that writing a store takes.

    A test cannot tell the difference: the power stays on. What is flushed, and in which order, is
    seen by `faults.Recorder`, which stands in front of this.
    """
    with mock.patch.object(os, "fsync", lambda file: os.fstat(file) and None):
        yield


@pytest.fixture(scope="session", autouse=True)
def charts_drawn_once() -> Iterator[None]:
    """A chart is drawn once: tests make a hundred reports of the same few workspaces.

    Where drawing itself is tested, `charts_drawn_anew` takes this back.
    """
    from bertvision.pipelines import plotting

    draw, drawn = plotting._panel, dict[bytes, Any]()

    def panel(*chart: Any) -> Any:
        key = pickle.dumps(chart)
        if key not in drawn:
            drawn[key] = draw(*chart)
        return drawn[key]

    with mock.patch.object(plotting, "_panel", panel):
        panel.__dict__["draw"] = draw
        yield


@pytest.fixture
def charts_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chart is drawn when it is asked for, as users have it."""
    from bertvision.pipelines import plotting

    monkeypatch.setattr(plotting, "_panel", plotting._panel.__dict__["draw"])


@pytest.fixture
def charts_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chart is drawn, for tests of the numbers and words of a page: empty ones stand there."""
    from bertvision.pipelines import plotting

    empty = plotting.Panel("<svg></svg>", 1.0, 1.0)
    monkeypatch.setattr(plotting, "_panel", lambda *chart: empty)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums depend on the number of threads: one, where processes are compared bit for bit."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, for tests that write a store again and again."""
    from faults import in_memory

    with in_memory(tmp_path) as folder:
        yield folder


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder that is on a disk wherever the temporary folder of this machine is."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of this process, that huggingface_hub talks to."""
    import hubs

    with hubs.running(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[list[str]]:
    """The requests that an S3 server of this process answers; the environment leads to it."""
    from remotes import s3_server

    with s3_server() as requests:
        yield requests


@pytest.fixture
def tried(record_property: Callable[[str, object], None]) -> Callable[[int, str], None]:
    """Notes how much a test tried, as docs/reliability.md tells it: a number, and of what."""
    return lambda number, what: record_property(what, number)


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random BERT of 2 layers × hidden 32 (3 states) and its tokenizer."""
    import string

    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForQuestionAnswering, BertTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-bert")
    chars = [*string.ascii_lowercase, *string.digits]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = list(dict.fromkeys([*special, *WORDS, *chars, *("##" + c for c in chars)]))
    tokenizer = Tokenizer(
        models.WordPiece({w: i for i, w in enumerate(vocab)}, unk_token="[UNK]")  # type: ignore[arg-type]
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    BertTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=400,
    )
    BertForQuestionAnswering(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def workspace(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with snapshots 0.5e and 1e of the tiny BERT, both extracted in float32.

    Several shards per split. Tests may add heads to it; they must not change what is there.
    """
    from workspaces import write_squad

    from bertvision.pipelines.extraction.extract import extract
    from bertvision.pipelines.finetuning.finetune import finetune
    from bertvision.pipelines.workspace.job_options import FinetuneOptions
    from bertvision.pipelines.workspace.workspace import Workspace

    folder = tmp_path_factory.mktemp("experiment")
    finetune(
        folder / "workspace",
        FinetuneOptions(
            model=str(tiny_bert),
            train=write_squad(folder / "train.json", 30, 1),
            dev=write_squad(folder / "dev.json", 8, 2),
            save_at=("0.5e", "1e"),
            batch_size=8,
            lr=1e-3,
            tune_fraction=0.2,
            precision="32",
        ),
    )
    space = Workspace.find(folder / "workspace")
    for tag in ("0.5e", "1e"):
        extract(space, tag, encoding="float32", precision="32", shard_tokens=512)
    return space


@pytest.fixture(scope="session")
def trained(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the workspace with two heads on 0.5e, one of them also on 1e; for reading."""
    from terminal import done

    ignored = shutil.ignore_patterns("heads")
    root = shutil.copytree(workspace.root, tmp_path_factory.mktemp("heads") / "ws", ignore=ignored)
    common = ["-w", root, "--precision", "32", "--epochs", 2, "--batch-size", 8]
    done("train", "learned-pooling", "adapter-64-shared", "--checkpoint", 0.5, *common)
    done("train", "learned-pooling", "--checkpoint", "1e", *common)
    return root


@pytest.fixture
def dev_json(tmp_path: Path) -> Path:
    """The dev file of the workspace."""
    from workspaces import write_squad

    return Path(write_squad(tmp_path / "dev.json", 8, 2))


@pytest.fixture(scope="session")
def lab(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with all that a report shows; tests must not change what is there."""
    from reports import make_lab

    return make_lab(workspace, tmp_path_factory.mktemp("laboratory") / "lab")


@pytest.fixture
def lab_copy(lab: Workspace, tmp_path: Path) -> Workspace:
    """A copy of the laboratory without its activations, for tests that change files."""
    from bertvision.pipelines.workspace.workspace import Workspace

    ignored = shutil.ignore_patterns("activations", "report", "analysis")
    return Workspace.find(shutil.copytree(lab.root, tmp_path / "other", ignore=ignored))
