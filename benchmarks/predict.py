"""`bertvision.Predictor` against `transformers.pipeline`, on the same encoder and output layer.

    python benchmarks/predict.py --json docs/performance/predict.json

Milliseconds per text of three tasks on the quickstart's encoder: the class of a sentence, the tags
of its words, and the answer to a question on a paragraph, for which transformers 5 has no pipeline:
there the other side is the model called by hand, and the best span of one window.

- *one at a time*: each text is a call, as a service answers;
- *all at once*: a list of all texts, in the pipeline with batches of 16.

Both are asked first for the same answers. Output layers have learned next to nothing: how long an
answer takes does not depend on what they have learned.
"""

from __future__ import annotations

import random
import re
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common.harness import arguments, interleave, ratios, report
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, pipeline
from transformers.utils import logging

import bertvision
from bertvision.pipelines.quickstart import packaged_encoder
from bertvision.pipelines.tasks.generated import make_facts, write_facts

OURS, THEIRS = "bertvision.Predictor", "transformers"
BATCH = 16
TAGS = ("O", "B-name", "I-name")


def main() -> None:
    """Measure, print a table, write every repetition as JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--texts", type=int, default=64)
    options = parser.parse_args()
    if options.quick:
        options.texts, options.repeats = 8, 2
    root = options.folder / "predict"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", bertvision.BertvisionWarning)  # of thresholds: they do not tell
    questions = _questions(options.texts)
    # punctuation stands apart: pipelines take it for words of its own, Predictor where it does
    texts = [" ".join(re.findall(r"\w+|[^\w\s]", one["context"])) for one in questions]
    sides: dict[str, Callable[[], float]] = {}
    for task, given in (
        ("classification", texts),
        ("tagging", texts),
        ("question answering", questions),
    ):
        ours, theirs = _systems(task, _workspace(task, texts, root / task.replace(" ", "-")))
        _check(task, [ours(one) for one in given], [theirs(one, 1) for one in given])
        sides |= {
            f"{OURS}, one at a time | {task}": _each(ours, given),
            f"{THEIRS}, one at a time | {task}": _each(lambda one, f=theirs: f(one, 1), given),
            f"{OURS}, all at once | {task}": _timed(ours, given),
            f"{THEIRS}, all at once | {task}": _timed(lambda all_, f=theirs: f(all_, BATCH), given),
        }
    results = interleave(sides, options.repeats)
    better: dict[str, float] = {}
    for how in ("one at a time", "all at once"):
        for condition in ("classification", "tagging", "question answering"):
            pair = {
                name: figures
                for name, figures in results.items()
                if name in (f"{OURS}, {how} | {condition}", f"{THEIRS}, {how} | {condition}")
            }
            better |= ratios(pair, f"{OURS}, {how} | {condition}", higher_is_better=False)
    report(
        options.json,
        benchmark="predict",
        settings={
            "model": "all-MiniLM-L6-v2",
            "texts": options.texts,
            "batch_size_of_pipelines": BATCH,
            "threads": torch.get_num_threads(),
            "device": "cuda" if torch.cuda.is_available() else "cpu",
        },
        unit="ms per text",
        results=results,
        ratios=better,
    )
    shutil.rmtree(root)


def _questions(count: int) -> list[dict[str, str]]:
    """Questions with their contexts, generated."""
    facts = make_facts(3 * count, seed=3)
    paragraphs = [p for part in facts["data"] for p in part["paragraphs"]]
    pairs = [(p["qas"][0]["question"], p["context"]) for p in paragraphs[:count]]
    return [{"question": question, "context": context} for question, context in pairs]


def _workspace(task: str, texts: list[str], root: Path) -> Path:
    """A workspace whose one snapshot has an output layer of the task."""
    root.mkdir()
    rng = random.Random(0)
    files = {}
    for split in ("train", "dev"):
        if task == "question answering":
            files[split] = root / f"{split}.json"
            write_facts(files[split], 12, seed=1 if split == "train" else 2)
        elif task == "tagging":
            files[split] = root / f"{split}.conll"
            rows = ("\n".join(f"{w}\t{rng.choice(TAGS)}" for w in t.split()) for t in texts[:8])
            files[split].write_text("\n\n".join(rows) + "\n")
        else:
            files[split] = root / f"{split}.csv"
            rows = (f'"{text}",{"no" if i % 2 else "yes"}' for i, text in enumerate(texts[:8]))
            files[split].write_text("text,label\n" + "\n".join(rows) + "\n")
    name = {"classification": "csv", "tagging": "tagging", "question answering": "squad_v2"}[task]
    bertvision.finetune(
        model=str(packaged_encoder()),
        task=name,
        train=str(files["train"]),
        dev=str(files["dev"]),
        save_at="1e",
        tune_fraction=0.0,
        precision="32",
        workspace=root / "workspace",
    )
    return root / "workspace"


def _systems(task: str, workspace: Path) -> tuple[Callable[[Any], Any], Callable[[Any, int], Any]]:
    """Both sides, on the same weights in float32; theirs takes the size of batches too."""
    predictor = bertvision.Predictor.load("bert:1e", workspace=workspace, precision="32")
    folder = str(workspace / "snapshots" / "1e")
    if task == "question answering":
        return predictor, _spans(folder)
    if task == "tagging":
        theirs = pipeline("token-classification", model=folder, aggregation_strategy="first")
    else:
        theirs = pipeline("text-classification", model=folder)
    return predictor, lambda given, size: theirs(given, batch_size=size)


def _spans(folder: str) -> Callable[[Any, int], Any]:
    """The best span of each window, of the model called by hand in padded batches."""
    model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(given: Any, size: int) -> Any:
        rows = [given] if isinstance(given, dict) else given
        answers = []
        for begin in range(0, len(rows), size):
            some = rows[begin : begin + size]
            encoded = tokenizer(
                [row["question"] for row in some],
                [row["context"] for row in some],
                padding=True,
                return_tensors="pt",
                return_offsets_mapping=True,
            )
            offsets = encoded.pop("offset_mapping")
            with torch.inference_mode():
                output = model(**encoded)
            for i, row in enumerate(some):
                inside = torch.tensor([n == 1 for n in encoded.sequence_ids(i)])
                scores = output.start_logits[i][:, None] + output.end_logits[i][None]
                allowed = (inside[:, None] & inside[None]).triu().tril(29)
                best = int(scores.masked_fill(~allowed, -torch.inf).argmax())
                first, last = divmod(best, len(inside))
                start, end = int(offsets[i][first][0]), int(offsets[i][last][1])
                answers.append({"answer": row["context"][start:end]})
        return answers[0] if isinstance(given, dict) else answers

    return answer


def _check(task: str, ours: list[Any], theirs: list[Any]) -> None:
    """Refuse to measure sides that do not say the same.

    Raises:
        SystemExit: they differ. Questions that Predictor leaves without an answer are not compared.
    """
    keys = {"tagging": "entity_group", "classification": "label", "question answering": "answer"}
    for one, other in zip(ours, theirs, strict=True):
        said = [
            [row[keys[task]] for row in (answer if isinstance(answer, list) else [answer])]
            for answer in (one, other)
        ]
        if said[0] != [""] and said[0] != said[1]:
            raise SystemExit(f"{task}: {said[0]} is not {said[1]}: the sides compute other things")


def _each(answer: Callable[[Any], Any], given: list[Any]) -> Callable[[], float]:
    return _timed(lambda several: [answer(one) for one in several], given)


def _timed(answer: Callable[[Any], Any], given: list[Any]) -> Callable[[], float]:
    """Milliseconds per text of a call on all."""

    def seconds() -> float:
        started = time.perf_counter()
        answer(given)
        return 1000 * (time.perf_counter() - started) / len(given)

    return seconds


if __name__ == "__main__":
    main()
