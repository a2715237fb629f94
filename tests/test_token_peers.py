"""The trainers of SAELens and dictionary_learning run on a token stream, as well as in memory.

They are the real ones, unchanged. Where they are not installed (`pip install '.[sae]'`), the tests
say so and are skipped.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, make_family
from stores import Made
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from bertvision.cli import app
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.tokens.mixture import TokenMixture

HIDDEN, FEATURES, BATCH, STEPS = 16, 32, 128, 250
PAGE = Path(__file__).parents[1] / "docs" / "tokens.md"
Train = Callable[[Iterator[Tensor], int], Callable[[Tensor], Tensor]]


def need(package: str) -> None:
    """Skip where a package is missing; one that is there and cannot be imported fails."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[sae]'")


def planted(store: Path, seed: int | None, first: float = 1, shift: float = 0) -> ActivationSplit:
    """Vectors that are sparse sums of planted directions; an example has a quarter of these.

    Args:
        store: where they are written.
        seed: of the stored order; without one, examples of the same directions lie together.
        first: Factor of the first token of each example.
        shift: Number that is added to every channel.
    """
    made = Made([64] * 64, layers=1, hidden=HIDDEN, shard_tokens=512, seed=seed)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(FEATURES, HIDDEN, generator=generator)
    directions = torch.nn.functional.normalize(directions, dim=1)
    for i in range(64):
        active = torch.rand(64, FEATURES, generator=generator)
        active[:, torch.arange(FEATURES) % 4 != i // 16] = 0
        made.hidden_states[i] = ((active * (active > 0.7)) @ directions)[:, None] + shift
        made.hidden_states[i][0] *= first
    return made.write(store)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> ActivationSplit:
    return planted(tmp_path_factory.mktemp("planted"), seed=0)


def in_memory(vectors: Tensor, seed: int) -> Iterator[Tensor]:
    """Permutations of all vectors, one after another, in full batches."""
    rng = np.random.default_rng(seed)
    while True:
        for rows in np.split(rng.permutation(len(vectors)), len(vectors) // BATCH):
            yield vectors[rows]


def sae_lens(data: Iterator[Tensor], seed: int) -> Callable[[Tensor], Tensor]:
    from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(seed)
    sae = StandardTrainingSAE(
        StandardTrainingSAEConfig(d_in=HIDDEN, d_sae=2 * FEATURES, l1_coefficient=0.1)
    )
    config = SAETrainerConfig(
        total_training_samples=BATCH * STEPS, train_batch_size_samples=BATCH, lr=3e-3, lr_end=3e-3
    )
    return SAETrainer(config, sae, data).fit()


def dictionary_learning(data: Iterator[Tensor], seed: int) -> Callable[[Tensor], Tensor]:
    from dictionary_learning import AutoEncoder
    from dictionary_learning.trainers.standard import StandardTrainer
    from dictionary_learning.training import trainSAE

    made: list[AutoEncoder] = []

    def dictionary(*sizes: int) -> AutoEncoder:
        made.append(AutoEncoder(*sizes))
        return made[0]

    trainer = {
        "trainer": StandardTrainer,
        "steps": STEPS,
        "activation_dim": HIDDEN,
        "dict_size": 2 * FEATURES,
        "layer": 0,
        "lm_name": "planted",
        "dict_class": dictionary,
        "lr": 3e-3,
        "warmup_steps": 10,
        "sparsity_warmup_steps": 10,
        "seed": seed,
        "device": "cpu",
    }
    trainSAE(data, [trainer], steps=STEPS, device="cpu")
    return made[0]


@pytest.mark.parametrize("train", [sae_lens, dictionary_learning])
def test_a_trainer_on_the_stream_ends_where_it_ends_in_memory(
    split: ActivationSplit, train: Train, tmp_path: Path
) -> None:
    """By what is left of the variance: within what the order of batches makes of it by chance."""
    need(train.__name__)
    vectors = torch.cat([batch.vectors for batch in split.tokens(0, shuffle=False, scaled=True)])

    def left(split: ActivationSplit, **options: Any) -> float:
        stream = split.tokens(0, batch_size=BATCH, endless=True, scaled=True, **options)
        return left_of(train, stream.vectors(), vectors)

    memory = [left_of(train, in_memory(vectors, seed), vectors) for seed in range(3)]
    assert max(memory) < 0.1  # something was learned
    mean, bound = np.mean(memory), max(memory) - min(memory) + 0.1 * np.mean(memory)
    sorted_by_direction = planted(tmp_path, seed=None)
    for buffer in (4, 8):
        assert abs(left(split, buffer=buffer) - mean) < bound
    # an order that matters would be seen
    assert left(sorted_by_direction, shuffle=False) > mean + 3 * bound


def left_of(train: Train, data: Iterator[Tensor], *given: Tensor) -> float:
    """The share of the variance that a trained dictionary leaves, of several sets the largest."""
    trained = train(data, 0)
    with torch.no_grad():
        return max(
            float(
                (trained(vectors) - vectors).square().sum()
                / (vectors - vectors.mean(dim=0)).square().sum()
            )
            for vectors in given
        )


@pytest.mark.parametrize("train", [sae_lens, dictionary_learning])
@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": "10x", "scaled": True},
        {"transform": "center", "scaled": True},
        {"transform": "whiten"},
    ],
    ids=["max_norm", "center", "whiten"],
)
def test_a_trainer_learns_from_a_part_of_the_examples_whatever_is_done_to_their_tokens(
    train: Train, options: dict[str, Any], tmp_path: Path
) -> None:
    """Measured on tokens of the other part."""
    need(train.__name__)
    split = planted(tmp_path, seed=0, first=100 if "max_norm" in options else 1)
    trained_on, held_out = split.hold_out(0.25)
    stream = split.tokens(0, batch_size=BATCH, endless=True, examples=trained_on, **options)
    vectors = others(split, held_out, max_norm=options.get("max_norm"))
    if stream.transform is not None:
        vectors = stream.transform(vectors)
    if "scaled" in options:
        vectors *= stream.scale_factors
    assert left_of(train, stream.vectors(), vectors) < 0.05


@pytest.mark.parametrize("train", [sae_lens, dictionary_learning])
def test_a_trainer_learns_from_every_split_of_a_mixture(
    split: ActivationSplit, train: Train, tmp_path: Path
) -> None:
    """They have directions, those of a half of the examples each, and a mean of their own."""
    need(train.__name__)
    splits = [split, planted(tmp_path, seed=0, shift=1)]
    halves = [np.arange(32), np.arange(32, 64)]
    mixture = TokenMixture(splits, [3, 1], layers=0, batch_size=BATCH, scaled=True, examples=halves)
    vectors = [
        others(split, half) * stream.scale_factors
        for split, half, stream in zip(splits, halves, mixture.streams, strict=True)
    ]
    assert left_of(train, mixture.vectors(), *vectors) < 0.1


def others(split: ActivationSplit, examples: np.ndarray, **options: Any) -> Tensor:
    """(n, hidden) all vectors of some examples, in stored order."""
    stream = split.tokens(0, shuffle=False, examples=examples, **options)
    return torch.cat([batch.vectors for batch in stream])


def test_a_training_of_sae_lens_that_was_stopped_goes_on_with_the_next_batch(
    split: ActivationSplit,
) -> None:
    need("sae_lens")

    def vectors(stream: Any, seen: list[Tensor]) -> Iterator[Tensor]:
        for batch in stream.vectors():
            seen.append(batch.clone())
            yield batch

    def stream() -> Any:
        return split.tokens(0, batch_size=BATCH, endless=True, buffer=4)

    whole = list(itertools.islice(stream().vectors(), STEPS + 2))
    first, seen = stream(), []
    sae_lens(vectors(first, seen), 0)
    assert len(seen) == STEPS
    second = stream()
    second.load_state_dict(first.state_dict())
    seen += itertools.islice(second.vectors(), 2)
    assert all(torch.equal(one, other) for one, other in zip(seen, whole, strict=True))


def test_the_factor_is_what_sae_lens_estimates(split: ActivationSplit) -> None:
    need("sae_lens")
    from sae_lens.training.activation_scaler import ActivationScaler

    stream = split.tokens(0, batch_size=64, endless=True)
    scaler = ActivationScaler()
    scaler.estimate_scaling_factor(HIDDEN, stream.vectors(), n_batches_for_norm_estimate=64)
    assert scaler.scaling_factor == pytest.approx(float(stream.scale_factors[0]), rel=1e-4)


def test_the_trainer_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    [source] = [text for text in texts if "dictionary_learning" in text]
    need("dictionary_learning")
    Made([20] * 20, hidden=HIDDEN, encoding="int8", tag="0.3e").write(tmp_path / "activations")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(source, PAGE.name, "exec"), names)
    assert names["stream"].batches >= names["steps"]


def test_the_tutorial_on_a_decoder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny decoder, and fewer steps."""
    need("sae_lens")
    llama = FAMILIES["llama"]
    deep = llama._replace(settings=llama.settings | {"num_hidden_layers": 10})
    make_family(deep, tmp_path / "decoder", AutoModelForCausalLM)
    (tmp_path / "texts").mkdir()
    for part, count in (("train", 60), ("dev", 12)):
        lines = [json.dumps({"text": f"anna founded rome in {1900 + n}"}) for n in range(count)]
        (tmp_path / "texts" / f"{part}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    page = (PAGE.parent / "tutorials" / "sae-on-a-decoder.md").read_text()
    for shown, small in (
        (r"google/gemma-3-270m", "decoder"),
        (r"= (\d+), (\d+)$", "= 32, 20"),
        (r"--latents [\d,]+", "--latents 0"),
    ):
        page, changed = re.subn(shown, small, page, flags=re.MULTILINE)
        assert changed, shown
    names: dict[str, Any] = {}
    for language, source in re.findall(
        r"^```(bash|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    ):
        if language == "bash":
            for line in source.replace("\\\n", " ").splitlines():
                result = CliRunner().invoke(app, shlex.split(line)[1:])
                assert result.exit_code == 0, f"{line}\n{result.output}"
        else:
            exec(compile(source, "sae-on-a-decoder.md", "exec", dont_inherit=True), names)
    assert (tmp_path / "gemma" / "view" / "0e-texts-dev-kept.html").is_file()
