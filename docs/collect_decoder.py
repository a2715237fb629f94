"""Writes what stands in docs/results-decoder.md into docs/results/decoder/tables/.

Usage: python docs/collect_decoder.py FOLDER

``FOLDER`` holds what docs/results/decoder/run.sh made. Tables are JSON objects of ``rows`` and
``basis``, which says what they rest on: ``encodings`` and ``errors`` (what storing takes and
loses), ``norms`` (massive activations), ``probes`` by layer, ``poolings`` and ``costs`` of
quantising, ``tuned`` (layers before and after fine-tuning) and ``scores``, ``lens`` and ``cloze``.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bertvision
from bertvision.pipelines.analysis.cka import CkaResult
from bertvision.pipelines.analysis.cloze import ClozeResult
from bertvision.pipelines.analysis.isotropy import IsotropyResult
from bertvision.pipelines.analysis.lens import LensResult
from bertvision.pipelines.analysis.result import AnalysisResult, read_analyses
from bertvision.pipelines.analysis.rsa import RsaResult
from bertvision.pipelines.analysis.twonn import TwoNnResult
from bertvision.pipelines.plotting import Figure, curves, figure
from bertvision.pipelines.readouts.probe_results import ProbeFile
from bertvision.pipelines.results.columns import grouped
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.tasks.scores import headline
from bertvision.pipelines.uncertainty import paired_bootstrap, paired_runs
from bertvision.pipelines.workspace.workspace import Workspace

TABLES = Path(__file__).parent / "results" / "decoder" / "tables"
ENCODINGS = ("float32", "bfloat16", "int8", "int4", "transform:0.115")
PROBED = ("float32", "int8", "int4")
SEEDS = 3
_SPLIT = ("0e", "sst2-dev")
Row = dict[str, Any]


def main(folder: Path) -> None:
    """Write every table."""
    given, first = states(folder / "encoding-float32")
    spread = given[~first].std(dim=0, unbiased=False)
    write("norms", norms(given, first), f"{int((~first).sum()):,} tokens, and one first token.")
    errors = {name: error(folder, name, given, spread) for name in ENCODINGS[1:]}
    basis = f"{int(first.sum())} sentences of SST-2, {len(given):,} tokens with the first ones."
    write("encodings", encodings(folder, errors, first), basis)
    write("errors", error_rows(errors, first), basis)
    files = [*probe_files(folder, "decoder"), *probe_files(folder, "words")]
    probed = probe_rows(files)
    write("probes", probed)
    probes_figure(probed).save(TABLES.parent / "probes.svg")
    write("poolings", pooling_rows(files))
    write("costs", cost_rows(files))
    tuned = [folder / f"tuned-{seed}" for seed in range(SEEDS)]
    write("scores", scores(tuned))
    write("tuned", tuned_rows(tuned))
    decoder = folder / "decoder"
    [lens] = kept(decoder, LensResult)
    write("lens", lens.rows(), " ".join([lens.title() + ".", *lens.remarks()]))
    asked = kept(decoder, ClozeResult)
    write("cloze", [row for result in asked for row in result.rows()])


def write(name: str, rows: Iterable[Mapping[str, Any]], basis: str = "") -> None:
    """Write a table, numbers to six digits."""

    def short(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    content = {"basis": basis, "rows": [{k: short(v) for k, v in row.items()} for row in rows]}
    TABLES.mkdir(exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (TABLES / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def write_texts(source: Path, every: int, target: Path, words: int | None = None) -> list[str]:
    """Every so many contexts of a file of SQuAD, or their first words, as JSON lines.

    Returns:
        The title of each text's article.
    """
    articles = json.loads(gzip.decompress(source.read_bytes()))["data"]
    parts = [(part["context"], own["title"]) for own in articles for part in own["paragraphs"]]
    texts, titles = zip(*parts[::every], strict=True)
    if words is not None:
        texts = tuple(" ".join(text.split()[:words]) for text in texts)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return list(titles)


def states(workspace: Path) -> tuple[Tensor, Tensor]:
    """The hidden states of a split, (tokens, layers, hidden), and which are of first tokens."""
    tag, split = _SPLIT
    stored = bertvision.ActivationStore.open(workspace / "activations")[f"{tag}/{split}"]
    batch = stored.read(range(len(stored)))
    first = torch.zeros(int(batch.lengths.sum()), dtype=torch.bool)
    first[batch.lengths.cumsum(0) - batch.lengths] = True
    return batch.decode(), first


def norms(given: Tensor, first: Tensor) -> list[Row]:
    """A row for each layer: norms, and the channel with most of the squared length."""
    rows = []
    for layer, of_layer in enumerate(given.unbind(1)):
        row: Row = {"layer": layer}
        for name, x in (("first", of_layer[first]), ("other", of_layer[~first])):
            squares = x.square().mean(dim=0)
            channel = int(squares.argmax())
            length = x.norm(dim=1)
            row |= {
                f"{name}_norm": float(length.median()),
                f"{name}_longest": float(length.max()),
                f"{name}_channel": channel,
                f"{name}_value": float(x[:, channel].median()),
                f"{name}_share": float(squares[channel] / squares.sum()),
            }
        row["ratio"] = row["first_norm"] / row["other_norm"]
        row["largest"] = float(of_layer.abs().max())
        rows.append(row)
    return rows


def error(folder: Path, encoding: str, given: Tensor, spread: Tensor) -> Tensor:
    """The error of each token in each layer, (tokens, layers), in deviations of the channel.

    Root mean square over channels, as `bertvision.featurestore.format.calibration` measures it, but
    of every token.
    """
    decoded, _ = states(folder / f"encoding-{plain(encoding)}")
    return ((decoded - given) / spread).square().mean(dim=2).sqrt()


def plain(encoding: str) -> str:
    """An encoding as run.sh writes it in names."""
    return encoding.replace(":", "-").replace(".", "-")


def encodings(folder: Path, errors: Mapping[str, Tensor], first: Tensor) -> list[Row]:
    """A row for each encoding: bytes, seconds and errors."""
    rows: list[Row] = []
    n = int(first.sum())
    for encoding in ENCODINGS:
        workspace = folder / f"encoding-{plain(encoding)}"
        [run] = json.loads(workspace.with_suffix(".json").read_text(encoding="utf-8"))
        store = workspace / "activations"
        on_disk = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        row = {
            "encoding": encoding,
            "bytes": round(run["bytes"] / n),
            "besides": (on_disk - run["bytes"]) / 1e6,
            "encoder_seconds": run["encoder_seconds"],
            "own_seconds": run["seconds"] - run["encoder_seconds"],
        }
        row["smaller"] = rows[0]["bytes"] / row["bytes"] if rows else 1.0
        if encoding in errors:
            for name, chosen in (("first", first), ("other", ~first)):
                by_layer = 100 * errors[encoding][chosen].mean(dim=0)
                row |= {
                    f"{name}_mean": float(by_layer.mean()),
                    f"{name}_most": float(by_layer.max()),
                }
                row[f"{name}_layer"] = int(by_layer.argmax())
        rows.append(row)
    return rows


def error_rows(errors: Mapping[str, Tensor], first: Tensor) -> list[Row]:
    """A row for each layer: the mean error of first and of other tokens by encoding, per cent."""
    by_kind = {
        f"{encoding}_{name}": 100 * of_tokens[chosen].mean(dim=0)
        for encoding, of_tokens in errors.items()
        for name, chosen in (("first", first), ("other", ~first))
    }
    layers = len(next(iter(by_kind.values())))
    return [{"layer": i, **{k: float(x[i]) for k, x in by_kind.items()}} for i in range(layers)]


def probe_files(folder: Path, name: str) -> list[tuple[str, ProbeFile]]:
    """The probes of each encoding, with its name."""
    return [
        (encoding, ProbeFile.read(path))
        for encoding in PROBED
        for path in sorted((folder / f"{name}-{encoding}").glob(f"{ProbeFile.folder}/*/*.json"))
    ]


def by_seed(
    files: Iterable[tuple[str, ProbeFile]],
) -> dict[tuple[str, str], dict[str, list[ProbeFile]]]:
    """Files of probes by data set and pooling, then encoding, by seed.

    Raises:
        SystemExit: some are of other seeds than the others.
    """
    groups: dict[tuple[str, str], dict[str, list[ProbeFile]]] = {}
    for encoding, file in files:
        own = groups.setdefault((file.dataset, str(file.pooling)), {})
        own.setdefault(encoding, []).append(file)
    for key, encoded in groups.items():
        for seeds in encoded.values():
            seeds.sort(key=lambda file: file.settings.seed)
        if {tuple(f.settings.seed for f in seeds) for seeds in encoded.values()} != {(0, 1, 2)}:
            raise SystemExit(f"{key}: probes of seeds 0, 1 and 2 are not all there")
    return groups


def right(files: Iterable[ProbeFile], layer: int) -> np.ndarray:
    """(seeds, examples) whether each scored example is right, × 100; of one layer."""
    bits = []
    for file in files:
        record = file.find((layer,))
        assert record is not None
        bits.append(record.bits(file.examples["scored"]))
    return 100.0 * np.array(bits)


def layers_of(file: ProbeFile) -> list[int]:
    """The layers that were probed alone."""
    return [record.layers[0] for record in file.probes if len(record.layers) == 1]


def best_layer(files: Iterable[ProbeFile]) -> int:
    """The layer with the highest mean score over seeds on held-out examples."""
    held_out: dict[int, list[float]] = {}
    for file in files:
        for record in file.probes:
            held_out.setdefault(record.layers[0], []).append(record.held_out)
    return max(held_out, key=lambda layer: (statistics.mean(held_out[layer]), -layer))


def probe_rows(files: Iterable[tuple[str, ProbeFile]]) -> list[Row]:
    """A row for each data set, pooling and encoding: accuracy by layer, and at the best one.

    ``above`` is how much better that one is than the last layer, in pairs.
    """
    rows = []
    for (dataset, pooling), encoded in by_seed(files).items():
        for encoding, own in encoded.items():
            best = best_layer(own)
            scores = right(own, best)
            interval = paired_bootstrap(scores, np.zeros_like(scores), clusters=own[0].clusters)
            row: Row = {
                "dataset": dataset,
                "pooling": pooling,
                "encoding": encoding,
                "best": str(best),
                "accuracy": interval.first,
                "accuracy_sd": float(scores.mean(axis=1).std(ddof=1)),
                "accuracy_low": interval.low,
                "accuracy_high": interval.high,
                "majority": own[0].majority,
                "train": own[0].examples["train"],
                "scored": own[0].examples["scored"],
            }
            above = paired_runs(scores, right(own, layers_of(own[0])[-1]), clusters=own[0].clusters)
            row |= {"above": above.difference, "above_low": above.low, "above_high": above.high}
            for layer in layers_of(own[0]):
                by_layer = right(own, layer).mean(axis=1)
                row[f"layer_{layer}"] = float(by_layer.mean())
                row[f"layer_{layer}_sd"] = float(by_layer.std(ddof=1))
            rows.append(row)
    return rows


def pooling_rows(files: Iterable[tuple[str, ProbeFile]]) -> list[Row]:
    """A row for each data set of sentences: the last token less the mean, float32, in pairs.

    At the best layer of each, and at the last layer.
    """
    groups, rows = by_seed(files), []
    for dataset in dict.fromkeys(dataset for dataset, pooling in groups if pooling == "last"):
        sides = [groups[dataset, pooling]["float32"] for pooling in ("last", "mean")]
        row: Row = {"dataset": dataset}
        for name, choose in (("best", best_layer), ("top", lambda own: layers_of(own[0])[-1])):
            found = paired_runs(*(right(own, choose(own)) for own in sides))
            row |= {name: found.difference, f"{name}_low": found.low, f"{name}_high": found.high}
        rows.append(row)
    return rows


def probes_figure(rows: Iterable[Row]) -> Figure:
    """Accuracy over layers, a panel for each data set, of float32 states."""
    charts = []
    for dataset, own in grouped(rows, itemgetter("dataset")).items():
        by_layer = [
            {
                "layer": layer,
                "pooling": row["pooling"],
                "accuracy": row[f"layer_{layer}"],
                "accuracy_sd": row[f"layer_{layer}_sd"],
            }
            for row in own
            if row["encoding"] == "float32"
            for layer in range(sum(re.fullmatch(r"layer_\d+", key) is not None for key in row))
        ]
        charts.append(
            curves(
                by_layer,
                "accuracy",
                "accuracy (%)",
                by=["pooling"],
                names=["last", "mean"],
                over="seeds",
                title=dataset,
                levels={"largest class": own[0]["majority"]},
            )
        )
    return figure("Probes over the layers of the decoder", "Accuracy by layer.", charts)


def cost_rows(files: Iterable[tuple[str, ProbeFile]]) -> list[Row]:
    """A row for each data set and pooling: other encodings less float32, in pairs.

    At the layer that is best in float32, and in the mean over all layers; seed by seed and example
    by example.
    """
    rows = []
    for (dataset, pooling), encoded in by_seed(files).items():
        layers, best = layers_of(encoded["float32"][0]), best_layer(encoded["float32"])
        row: Row = {"dataset": dataset, "pooling": pooling, "best": str(best)}
        for encoding in [name for name in encoded if name != "float32"]:
            for name, chosen in (("best", [best]), ("all", layers)):
                sides = [
                    np.mean([right(encoded[side], layer) for layer in chosen], axis=0)
                    for side in (encoding, "float32")
                ]
                found = paired_runs(*sides, clusters=encoded[encoding][0].clusters)
                key = f"{encoding}_{name}"
                row |= {key: found.difference, f"{key}_low": found.low, f"{key}_high": found.high}
        rows.append(row)
    return rows


def kept(folder: Path, kind: type[Any]) -> list[Any]:
    """The results of an analysis that a workspace keeps."""
    left_out: list[str] = []
    found = read_analyses(Workspace.find(folder), kind, left_out)
    if left_out or not found:
        raise SystemExit(f"{folder}: {kind.__name__} is not there: {left_out}")
    return [analysis.result for analysis in found.values()]


def tuned_rows(folders: Iterable[Path]) -> list[Row]:
    """A row for each layer and set of tokens: means over fine-tunings, and their deviations."""
    values: dict[tuple[str, int], dict[str, list[float]]] = {}

    def add(split: str, key: str, by_layer: Iterable[float]) -> None:
        for layer, value in enumerate(by_layer):
            values.setdefault((split, layer), {}).setdefault(key, []).append(float(value))

    for folder in folders:
        for split, result in of_split(folder, CkaResult):
            add(split, "cka", np.diagonal(result.cka))
            add(split, "cka_dropped", np.diagonal(result.cka_dropped))
        for split, result in of_split(folder, RsaResult):
            add(split, "rsa", np.diagonal(result.of_pairs[0].mean(axis=0)))
        for split, result in of_split(folder, IsotropyResult):
            tokens = list(result.sets).index("tokens")
            for i, tag in enumerate(result.snapshots):
                add(split, f"cosine_{tag}", result.mean_cosine[i, tokens])
                add(split, f"corrected_{tag}", result.corrected_cosine[i, tokens])
                add(split, f"variance_{tag}", result.explained_variance[i, tokens, :, 0])
        for split, result in of_split(folder, TwoNnResult):
            for tag in result.dataset.snapshot.values:
                add(split, f"dimension_{tag}", result.dataset.dimension.sel(snapshot=tag).values)
    rows = []
    for (split, layer), found in sorted(values.items()):
        row: Row = {"split": split, "layer": layer}
        for key, seeds in found.items():
            row[key] = statistics.mean(seeds)
            # the pretrained decoder is the same for every seed
            if len(seeds) > 1 and not key.endswith("_0e"):
                row[f"{key}_sd"] = statistics.stdev(seeds)
        rows.append(row)
    return rows


def scores(folders: Iterable[Path]) -> list[Row]:
    """A row for each fine-tuning: accuracy of the decoder on dev after its epoch."""
    return [
        {
            "seed": seed,
            "accuracy": headline(result.rules)["accuracy"],
        }
        for seed, folder in enumerate(folders)
        for result in read_results(Workspace.find(folder), "dev")
        if result.checkpoint == "1e"
    ]


def of_split(folder: Path, kind: type[AnalysisResult]) -> list[tuple[str, Any]]:
    """The results of an analysis with the split that each is of."""
    return [("dev-kept" if "dev-kept" in r.title() else "dev", r) for r in kept(folder, kind)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
