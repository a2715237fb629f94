"""Directions of the hidden space out of a file: vectors, a probe's, or an autoencoder's latents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.files import check_regular, read_json
from bertvision.pipelines.readouts.directions import SavedProbe

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.float64]

_NAMES = ("W_enc", "b_enc", "W_dec", "b_dec")
_BLOCK = 1024  # latents whose activations are held at a time
_ARCHITECTURES = ("standard", "jumprelu")
_READ = (
    "vectors (hidden,) or (n, hidden), or an autoencoder's W_enc (hidden, latents), b_enc, W_dec, "
    "b_dec and, of jumprelu, threshold"
)


class Directions(NamedTuple):
    """Directions, channels, or latents of an autoencoder: affine functions of a state."""

    names: Sequence[str]
    vectors: Floats
    """(n, hidden)"""
    offsets: Floats
    """(n,) numbers that are added to the products."""
    thresholds: Floats | None = None
    """(n,) activations that a latent has to exceed, or it is 0; None of directions."""
    probe: SavedProbe | None = None
    """Probe whose classes they lead to, if they are of one."""

    @classmethod
    def of(cls, names: Sequence[str], vectors: Floats) -> Directions:
        """Directions without more: a value is a state times a vector."""
        return cls(names, vectors, np.zeros(len(vectors)))

    def taken(self, numbers: Sequence[int]) -> Directions:
        """Some of them, in the order given."""
        rows = list(numbers)
        thresholds = None if self.thresholds is None else self.thresholds[rows]
        names = [self.names[i] for i in rows]
        return Directions(names, self.vectors[rows], self.offsets[rows], thresholds, self.probe)

    def values(self, products: npt.ArrayLike) -> Floats:
        """The values of states, from their products with the vectors, (…, n)."""
        values = np.asarray(products, np.float64) + self.offsets
        return values if self.thresholds is None else np.where(values > self.thresholds, values, 0)

    def chosen(
        self, numbers: Sequence[int] | None, states: npt.NDArray[np.floating], most: int
    ) -> Directions:
        """The directions that are shown.

        Args:
            numbers: Named numbers; None is the first ones, of latents those with the
                largest mean over the states.
            states: (tokens, hidden)
            most: Directions that may be shown.

        Raises:
            InputError: there is no such direction, or more are named than can be shown.
        """
        count = len(self.names)
        if numbers is None:
            numbers = range(min(most, count))
            if self.thresholds is not None:
                blocks = [range(i, min(i + _BLOCK, count)) for i in range(0, count, _BLOCK)]
                parts = (self.taken(block) for block in blocks)
                means = [part.values(states @ part.vectors.T).mean(axis=0) for part in parts]
                numbers = np.argsort(-np.concatenate(means), kind="stable")[:most].tolist()
        check_numbers(numbers, count, most, "--latents")
        return self.taken(numbers)


def check_numbers(numbers: Sequence[int], count: int, most: int, option: str) -> None:
    """Refuse numbers that there are not, twice the same, or too many for a page.

    Args:
        numbers: Numbers of channels, rows or latents.
        count: Number of existing ones.
        most: Largest number that is shown.
        option: Option that names them.

    Raises:
        InputError: a number is out of range or stands twice, or there are more than ``most``.
    """
    given = ",".join(map(str, numbers))
    if bad := [n for n in numbers if not 0 <= n < count]:
        raise InputError(f"{option} {given}: {bad[0]} is none: give numbers from 0 to {count - 1}")
    if len(set(numbers)) != len(numbers) or len(numbers) > most:
        raise InputError(f"{option} {given}: give at most {most} numbers, each once")


def read_directions(path: Path, hidden: int) -> Directions:
    """Read vectors, a linear probe, or an autoencoder of SAELens; nothing in a file is executed.

    A probe is one that `bertvision probe TASK --save` kept: its directions lead towards each class,
    of two towards the second.

    Of an autoencoder ``cfg.json`` beside the file is read, where there is one: whether ``b_dec`` is
    subtracted from the states first (it is, unless ``apply_b_dec_to_input`` says no), and whether
    its architecture is one that can be read.

    Args:
        path: ``….safetensors``.
        hidden: Width of the hidden states.

    Raises:
        InputError: the file is no safetensors, or holds something else than directions of this
            width.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        raise InputError(f"--direction {path}: give a .safetensors file: no other kind is read")
    check_regular(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"--direction {path} is no safetensors file: {error}") from None
    arrays = {name: _array(tensor, path) for name, tensor in tensors.items()}
    for name, array in arrays.items():
        if name != "means" and not np.isfinite(array).all():  # a class may have no example
            raise InputError(f"--direction {path}: {name} holds NaN or infinity")
    if "W_enc" in arrays:
        return _latents(path, arrays, hidden)
    with safe_open(path, "np") as file:
        metadata = (file.metadata() or {}).get("probe")
    if metadata is not None and {"weight", "bias", "means"} <= set(arrays):
        return _of_probe(path, arrays, *_classes(path, metadata), hidden)
    names, vectors = list[str](), list[Floats]()
    for name, array in sorted(arrays.items()):
        rows = array[None] if array.ndim == 1 else array
        if rows.ndim != 2 or rows.shape[1] != hidden:
            raise InputError(
                f"--direction {path}: {name} has shape {array.shape}, and the hidden states have "
                f"{hidden} channels: a file holds {_READ}"
            )
        if not rows.any(axis=1).all():
            raise InputError(f"--direction {path}: a direction in {name} is zero")
        names += [name] if array.ndim == 1 else [f"{name} {i}" for i in range(len(rows))]
        vectors += [*rows]
    if not vectors:
        raise InputError(f"--direction {path} holds nothing: a file holds {_READ}")
    return Directions.of(names, np.stack(vectors))


def _array(tensor: Tensor, path: Path) -> Floats:
    if not tensor.is_floating_point():
        raise InputError(f"--direction {path} holds {tensor.dtype}: a file holds {_READ}")
    array: Floats = tensor.double().numpy()
    return array


def _classes(path: Path, text: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of the classes of a probe, and what it was trained on, out of its file's metadata."""
    try:
        source = json.loads(text)
    except ValueError:
        source = None
    names = source.pop("classes", None) if isinstance(source, dict) else None
    if not isinstance(names, list) or len(names) < 2:
        raise InputError(f"--direction {path}: its metadata do not name the classes of a probe")
    return tuple(map(str, names)), {key: str(value) for key, value in source.items()}


def _of_probe(
    path: Path,
    arrays: Mapping[str, Floats],
    classes: tuple[str, ...],
    source: Mapping[str, str],
    hidden: int,
) -> Directions:
    weight, each = arrays["weight"], (len(classes),)
    if arrays["bias"].shape != each or arrays["means"].shape[:1] != each or weight.ndim != 2:
        raise InputError(
            f"--direction {path}: weight, bias and means of a probe have a row for each of its "
            f"{len(classes)} classes"
        )
    if "hidden_weight" in arrays:
        raise InputError(
            f"--direction {path}: the probe has a hidden layer, and so no directions: keep a "
            "linear one (`bertvision probe … --save` without --mlp)"
        )
    if weight.shape != (*each, hidden):
        raise InputError(
            f"--direction {path}: the probe reads vectors of width {weight.shape[-1]}, and the "
            f"hidden states have {hidden} channels: take one of a single layer"
        )
    parameters = {n: a.astype(np.float32) for n, a in arrays.items() if n != "means"}
    probe = SavedProbe(parameters, arrays["means"].astype(np.float32), classes, source)
    towards = classes[1:] if len(classes) == 2 else classes
    vectors = np.stack([probe.direction(label) for label in towards]).astype(np.float64)
    names = [f"towards {label}" for label in towards]
    return Directions(names, vectors, np.zeros(len(names)), probe=probe)


def _latents(path: Path, arrays: Mapping[str, Floats], hidden: int) -> Directions:
    known = {*_NAMES, "threshold"}
    if odd := sorted(set(arrays) - known) or sorted(set(_NAMES) - set(arrays)):
        what = "has" if odd[0] in arrays else "lacks"
        raise InputError(
            f"--direction {path} {what} {odd[0]}: of autoencoders those of the architectures "
            f"{' and '.join(_ARCHITECTURES)} are read, with {_READ.partition('an ')[2]}"
        )
    encoder, latents = arrays["W_enc"], arrays["b_enc"].size
    shapes = {"W_enc": (hidden, latents), "b_enc": (latents,), "W_dec": (latents, hidden)}
    shapes |= {"b_dec": (hidden,), "threshold": (latents,)}
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise InputError(
                f"--direction {path}: {name} has shape {array.shape}, and of hidden states with "
                f"{hidden} channels and {latents} latents it is {shapes[name]}"
            )
    settings = _settings(path)
    offsets = arrays["b_enc"]
    if settings.get("apply_b_dec_to_input", True):
        offsets = offsets - arrays["b_dec"] @ encoder
    thresholds = np.maximum(arrays.get("threshold", np.zeros(latents)), 0)  # after a ReLU
    names = [f"latent {i}" for i in range(latents)]
    return Directions(names, encoder.T, offsets, thresholds)


def _settings(path: Path) -> dict[str, Any]:
    """Settings in ``cfg.json`` beside an autoencoder."""
    beside = path.with_name("cfg.json")
    settings = read_json(beside) if beside.is_file() else {}
    if not isinstance(settings, dict):
        raise InputError(f"{beside} is no object of JSON")
    architecture = settings.get("architecture", "standard")
    if architecture not in _ARCHITECTURES:
        raise InputError(
            f"{beside}: autoencoders of the architecture {json.dumps(architecture)} are not read: "
            f"{' and '.join(_ARCHITECTURES)} are"
        )
    if settings.get("normalize_activations", "none") not in ("none", None):
        raise InputError(
            f"{beside}: the autoencoder reads states that were normalised "
            f"({settings['normalize_activations']}): fold the factor into its weights first"
        )
    return settings
