"""Bits a value against error: the transform beside the other encodings and beside other codecs.

    python benchmarks/rate.py --model NAME=FOLDER --data train.json --json rate.json

Hidden states of texts by encoders and decoders of your own (folders of transformers, or snapshots),
the questions with their contexts in a file of SQuAD's form. Everything is fitted on the first texts
and measured on others. The error is the root mean square over channels and tokens, in deviations of
the channel, in the mean and in the worst layer; tokens with massive activations, which each codec
treats in its own way, are counted apart. Bits are of the codes with all scales and indices; tables
and matrices, of which a split has one set, are given in MB.

Beside ours: float8 (E4M3) with a scale for each token and layer; bfloat16 and pcodec; a random
rotation with the scalar quantiser of a normal distribution, of each vector by its norm (the way of
TurboQuant, arXiv 2504.19874), here of standardised channels, which favours it; and principal axes
over layers and channels together with bits by the gain of each and DEFLATE (the way of KVTC, arXiv
2511.01815), where layers × channels are few enough for its axes.
"""

from __future__ import annotations

from common import harness  # first: it sets what torch reads when it is imported

# isort: split
import gzip
import json
import random
import shlex
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from bertvision.featurestore.format.calibration import Calibrator
from bertvision.featurestore.format.encoding import decode, encode
from bertvision.featurestore.format.layout import get_encoding

ERRORS = (0.0076, 0.02, 0.05, 0.115, 0.2, 0.3)
_MOST_AXES = 4000
_ROTATED_BITS = (1, 2, 3, 4, 6, 8)


class States(NamedTuple):
    """Hidden states of texts, one after another.

    Attributes:
        values: (tokens, layers, hidden) float32.
        lengths: Tokens of each text.
    """

    values: Tensor
    lengths: list[int]


class Point(NamedTuple):
    """Size and error of a codec at one setting.

    Attributes:
        setting: The setting in words.
        bits: Bits a value.
        error: Root mean square of the errors, in deviations of the channel.
        worst_layer: The same in the layer where it is largest.
    """

    setting: str
    bits: float
    error: float
    worst_layer: float


def main() -> None:
    """Measure all encoders that were named."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--data", type=Path, required=True, help="a file of SQuAD's form")
    parser.add_argument("--channel-tokens", type=int, default=60, help="fitted on, for a channel")
    parser.add_argument("--tokens", type=int, default=8000, help="measured on")
    options = parser.parse_args()
    curves: dict[str, Any] = {}
    for named in options.model:
        name, _, folder = named.partition("=")
        curves[name] = curve(folder, questions(options.data), options)
    report = {
        "benchmark": "rate",
        "command": " ".join(
            [
                "python benchmarks/rate.py",
                *(f"--model {shlex.quote(m + '=FOLDER')}" for m in curves),
            ]
        ),
        "machine": harness.machine(),
        "settings": {"channel_tokens": options.channel_tokens, "tokens": options.tokens},
        "curves": curves,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def questions(path: Path) -> list[tuple[str, str]]:
    """Questions with their contexts, one of each context, in a seeded order."""
    content = path.read_bytes()
    articles = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["data"]
    pairs = [(p["qas"][0]["question"], p["context"]) for a in articles for p in a["paragraphs"]]
    random.Random(0).shuffle(pairs)
    return pairs


def curve(folder: str, pairs: list[tuple[str, str]], options: Any) -> dict[str, Any]:
    """The points of all codecs on the states of an encoder."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    source = hidden_states(model, AutoTokenizer.from_pretrained(folder), iter(pairs))
    hidden = model.config.hidden_size
    measured = gathered(source, options.tokens)
    fitted = gathered(source, options.channel_tokens * hidden)
    layers = fitted.values.shape[1]
    mean, std, usual = moments(fitted.values, measured.values)
    points: dict[str, list[Point]] = {}
    for error in ERRORS:
        points.setdefault("transform", []).append(of_transform(error, fitted, measured, std, usual))
    for encoding in ("int8", "int4"):
        points[encoding] = [of_integers(encoding, fitted, measured, std, usual)]
    points["float8 and a scale"] = [of_float8(measured, std, usual)]
    points["bfloat16 + pcodec"] = [of_pcodec(measured, std, usual)]
    points["random rotation"] = list(of_rotation(measured, mean, std, usual))
    if layers * hidden <= _MOST_AXES:
        points["axes over all layers + DEFLATE"] = list(of_axes(fitted, measured, mean, std, usual))
    for codec, found in points.items():
        for point in found:
            print(f"{folder}: {codec} {point}", file=sys.stderr)
    return {
        "layers": layers,
        "hidden": hidden,
        "fitted_tokens": len(fitted.values),
        "measured_tokens": int(usual.sum()),
        "massive_tokens": int((~usual).sum()),
        "matrices_mb": 2 * layers * hidden**2 * 2 / 1e6,
        "points": {codec: [p._asdict() for p in found] for codec, found in points.items()},
    }


@torch.no_grad()
def hidden_states(model: Any, tokenizer: Any, pairs: Iterator[tuple[str, str]]) -> Iterator[Tensor]:
    """States of one text after another, (tokens, layers, hidden)."""
    for question, context in pairs:
        ids = tokenizer(question, context, truncation=True, max_length=386, return_tensors="pt")
        given = {"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"]}
        if "token_type_ids" in ids and model.config.model_type == "bert":
            given["token_type_ids"] = ids["token_type_ids"]
        states = model(**given, output_hidden_states=True).hidden_states
        yield torch.stack([layer[0] for layer in states], dim=1)


def gathered(source: Iterator[Tensor], tokens: int) -> States:
    """Texts until there are so many tokens."""
    texts: list[Tensor] = []
    while sum(map(len, texts)) < tokens:
        texts.append(next(source))
    return States(torch.cat(texts), [len(text) for text in texts])


def moments(fitted: Tensor, measured: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and deviation of channels, and which measured tokens are ordinary in all layers."""
    middle = fitted[::50].median(dim=0).values
    distance = (fitted - middle).norm(dim=-1).median(dim=0).values
    usual = [((x - middle).norm(dim=-1) < 5 * distance).all(dim=1) for x in (fitted, measured)]
    mean, std = fitted[usual[0]].mean(dim=0), fitted[usual[0]].std(dim=0)
    return mean, std.where(std > 1e-6 * std.median(), std.median()), usual[1]


def lost(restored: Tensor, states: Tensor, std: Tensor, usual: Tensor) -> tuple[float, float]:
    """Error in the mean over layers and in the worst one, of ordinary tokens."""
    by_layer = ((restored - states) / std)[usual].square().mean(dim=(0, 2)).sqrt()
    return float(by_layer.square().mean().sqrt()), float(by_layer.max())


def calibration(encoding: str, fitted: States) -> Any:
    """Calibration of an encoding on the fitted texts."""
    kinds = np.full(len(fitted.values), "ordinary")
    kinds[np.cumsum([0, *fitted.lengths[:-1]])] = "first"
    calibrator = Calibrator(get_encoding(encoding), kinds)
    for block in fitted.values.split(1024):
        calibrator.add(block, torch.ones(len(block), dtype=torch.bool))
    return calibrator.result()


def of_transform(
    error: float, fitted: States, measured: States, std: Tensor, usual: Tensor
) -> Point:
    """The project's transform, each text coded by itself as a store does it."""
    transform = calibration(f"transform:{error}", fitted).transform
    coded = list(transform.encode_layers(measured.values, measured.lengths))
    tokens, layers, hidden = measured.values.shape
    out = np.empty((layers, tokens, hidden), np.float32)
    begin = 0
    for i, length in enumerate(measured.lengths):
        words = [of_layer[i] for of_layer in coded]
        transform.decode_layers(words, range(layers), out[:, begin : begin + length])
        begin += length
    restored = torch.from_numpy(out).transpose(0, 1)
    # with its length, of four bytes
    total = sum(words.nbytes + 4 for of_layer in coded for words in of_layer)
    bits = 8 * total / measured.values.numel()
    return Point(f"{error:g}", bits, *lost(restored, measured.values, std, usual))


def of_integers(
    encoding: str, fitted: States, measured: States, std: Tensor, usual: Tensor
) -> Point:
    """The project's int8 or int4."""
    stats = calibration(encoding, fitted).stats
    coded = encode(measured.values, get_encoding(encoding), stats)
    assert coded.scale is not None
    restored = decode(coded.codes, coded.scale, stats)
    nbytes = coded.codes.nbytes + coded.scale.nbytes
    bits = 8 * nbytes / measured.values.numel()
    return Point(encoding, bits, *lost(restored, measured.values, std, usual))


def of_float8(measured: States, std: Tensor, usual: Tensor) -> Point:
    """Values of four bits of exponent and three of mantissa, by the largest of each vector."""
    scale = measured.values.abs().amax(dim=-1, keepdim=True) / 448
    coded = (measured.values / scale).to(torch.float8_e4m3fn)
    bits = 8 + 32 / measured.values.shape[-1]
    return Point("E4M3", bits, *lost(coded.float() * scale, measured.values, std, usual))


def of_pcodec(measured: States, std: Tensor, usual: Tensor) -> Point:
    """bfloat16, each layer compressed without loss."""
    from numcodecs.pcodec import PCodec

    rounded = measured.values.bfloat16()
    codes = rounded.view(torch.uint16).numpy()
    nbytes = sum(
        len(PCodec().encode(np.ascontiguousarray(codes[:, i]))) for i in range(codes.shape[1])
    )
    bits = 8 * nbytes / measured.values.numel()
    return Point("lossless", bits, *lost(rounded.float(), measured.values, std, usual))


def of_rotation(measured: States, mean: Tensor, std: Tensor, usual: Tensor) -> Iterator[Point]:
    """A seeded rotation after which all values are alike, and their best scalar quantiser."""
    values = (measured.values - mean) / std
    hidden = values.shape[-1]
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q
    norms = values.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    rotated = values / norms @ rotation * hidden**0.5
    for bits in _ROTATED_BITS:
        levels = normal_levels(2**bits)
        middles = (levels[1:] + levels[:-1]) / 2
        coded = levels[torch.bucketize(rotated.contiguous(), middles)]
        restored = coded / hidden**0.5 @ rotation.T * norms * std + mean
        found = lost(restored, measured.values, std, usual)
        yield Point(f"{bits} bits", bits + 16 / hidden, *found)


def normal_levels(count: int) -> Tensor:
    """Levels of the quantiser of a normal distribution with the least error (Max 1960; Lloyd)."""
    sample = torch.special.ndtri((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)
    levels = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    for _ in range(300):
        cell = torch.bucketize(sample, (levels[1:] + levels[:-1]) / 2)
        totals = torch.zeros(count, dtype=torch.float64).index_add_(0, cell, sample)
        levels = totals / torch.bincount(cell, minlength=count).clamp_min(1)
    return levels.float()


def of_axes(
    fitted: States, measured: States, mean: Tensor, std: Tensor, usual: Tensor
) -> Iterator[Point]:
    """Principal axes of a token's values in all layers, whole bits for each, then DEFLATE."""
    sample = ((fitted.values - mean) / std).flatten(1)
    values = ((measured.values - mean) / std).flatten(1)
    variances, axes = torch.linalg.eigh(sample.T @ sample / len(sample))
    projected = values @ axes
    reach = (
        (sample @ axes).abs().quantile(0.9995, dim=0)
        if len(sample) < 10_000
        else ((sample[:: len(sample) // 8000] @ axes).abs().amax(dim=0))
    )
    for budget in (0.75, 1.5, 2.5, 3.5, 5.5):
        # a bit more of an axis leaves a quarter of its error: the next bit goes where most is left
        level = variances.clamp_min(1e-12).log2() / 2
        low, high = float(level.min()) - 20, float(level.max()) + 1
        for _ in range(50):
            middle = (low + high) / 2
            bits = (level - middle).round().clamp(0, 12)
            low, high = (middle, high) if bits.mean() > budget else (low, middle)
        steps = torch.where(bits > 0, 2 * reach / (2**bits).clamp_min(2), torch.inf)
        codes = (projected / steps).round()
        most = (2 ** (bits - 1)).floor()
        codes = torch.minimum(torch.maximum(codes, -most), (most - 1).clamp_min(0))
        kept = codes[:, bits > 0].short().numpy()
        packed = zlib.compress(np.packbits(_bits_of(kept, bits[bits > 0])).tobytes(), 6)
        decoded = torch.where(bits > 0, codes * steps.nan_to_num(posinf=0.0), 0.0)
        restored = (decoded @ axes.T).view_as(measured.values) * std + mean
        found = lost(restored, measured.values, std, usual)
        yield Point(f"{budget:g} bits asked", 8 * len(packed) / values.numel(), *found)


def _bits_of(codes: Any, bits: Tensor) -> Any:
    """The bits of codes, each axis in as many as it has, one token after another."""
    columns = []
    for column, count in zip(codes.T, bits.int().tolist(), strict=True):
        columns.append((column[:, None] >> np.arange(count)) & 1)
    return np.concatenate(columns, axis=1).astype(np.uint8)


if __name__ == "__main__":
    main()
