"""The page of a split: its numbers are the store's, and nothing in a text becomes a part of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from browser import CHROMIUM, measure
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from scipy.special import softmax
from stores import Made
from terminal import done, run
from test_workspace_fixture import unpack

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.readouts.directions import SavedProbe
from bertvision.pipelines.view.directions import read_directions
from bertvision.pipelines.view.head import marked
from bertvision.pipelines.view.measures import neighbours, packed
from bertvision.pipelines.view.projection import pca
from bertvision.pipelines.view.sample import drawn_examples

ATTACK = "</script><script>alert('x')</script><b>&amp;\u2028"


class Elements(HTMLParser):
    """The elements of a page, balanced; the texts of its scripts by id."""

    VOID = frozenset(("meta", "link", "input", "br"))

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def inside(self, tag: str) -> list[str]:
        return [text for of, text in self.texts if of == tag]

    @property
    def data(self) -> Any:
        """The values that the script reads."""
        return json.loads(self.inside("script")[0])

    def numbers(self, name: str) -> np.ndarray[Any, Any]:
        """The (tokens, columns) numbers of a measure."""
        (kept,) = (m for m in self.data["measures"] if m["name"] == name)
        return unpacked(kept).reshape(-1, len(kept["columns"]))

    def step(self, name: str) -> float:
        (step,) = (m["step"] for m in self.data["measures"] if m["name"] == name)
        return float(step)


def unpacked(kept: dict[str, Any]) -> np.ndarray[Any, Any]:
    codes = np.frombuffer(base64.b64decode(kept["codes"]), "<u2").astype(np.float64)
    return np.where(codes == 0xFFFF, np.nan, kept["low"] + kept["step"] * codes)


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of questions with a trained head, as it lies in the fixtures."""
    folder = tmp_path_factory.mktemp("viewed")
    unpack(folder)
    return folder / "squad"


@pytest.fixture(scope="module")
def page(space: Path) -> Elements:
    """The page of its dev split, with the head."""
    path = space.parent / "page.html"
    bertvision.view("1e/dev", head="learned-pooling", output=path, workspace=space)
    return Elements(path)


@pytest.fixture(scope="module")
def states(space: Path) -> np.ndarray[Any, Any]:
    """(tokens, layers, hidden) of the split."""
    split = bertvision.ActivationStore.open(space / "activations")["1e/dev"]
    return split.read(range(len(split))).hidden_states.numpy()


def test_numbers_are_those_of_the_store(page: Elements, states: np.ndarray[Any, Any]) -> None:
    norm = np.linalg.norm(states, axis=2)
    assert np.abs(page.numbers("norm") - norm).max() <= page.step("norm") * 0.51
    unit = states / norm[..., None]
    last = np.einsum("tlh,th->tl", unit, unit[:, -1])
    assert np.abs(page.numbers("cosine to the last layer") - last).max() < 1e-4
    below = page.numbers("cosine to the layer below")
    assert np.isnan(below[:, 0]).all()
    assert np.abs(below[:, 1] - (unit[:, 1] * unit[:, 0]).sum(1)).max() < 1e-4
    assert len(page.data["tokens"]) == len(states) == page.data["examples"][-1][1]


def test_the_head_says_what_it_said_when_it_was_scored(page: Elements, space: Path) -> None:
    folder = space / "heads/1e/learned-pooling/eval/1e"
    logits = load_file(folder / "dev.safetensors")
    ends = [end for _, end in page.data["examples"]]
    for column, side in enumerate(("start", "end")):
        parts = np.split(logits[f"{side}_logits"], ends[:-1])
        expected = np.concatenate([softmax(part) for part in parts])
        assert np.abs(page.numbers("learned-pooling")[:, column] - expected).max() < 1e-4


def test_errors_are_those_of_its_predictions(page: Elements, space: Path) -> None:
    rows = bertvision.predictions("learned-pooling:1e", workspace=space)
    wrong = [row for row in rows if row.exact < 100]
    assert page.inside("p")[0]  # paragraphs are there
    titles = [
        text for (tag, text) in page.texts if tag == "p" and text in {row.question for row in wrong}
    ]
    assert titles == [row.question for row in wrong]
    spans = [
        row for row in wrong if row.answer and row.answer in row.context and row.answer.strip()
    ]
    answers = "".join(page.inside("mark"))
    assert all(row.answer[:5] in answers for row in spans)
    assert f"wrong on {len(wrong)} of {len(rows)}" in page.text


def test_errors_of_the_encoder_itself_are_shown(space: Path) -> None:
    path = space.parent / "bert.html"
    viewed = bertvision.view("1e/dev", head="bert:1e", output=path, workspace=space)
    rows = bertvision.predictions("bert:1e", workspace=space)
    wrong = [row for row in rows if row.exact < 100]
    assert f"bert is wrong on {len(wrong)} of {len(rows)}" in Elements(path).text
    assert any("does not read the store" in note for note in viewed.notes)


def test_nothing_is_fetched_and_only_its_own_script_runs(page: Elements) -> None:
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "data"):
            value = attributes.get(name) or "#"
            assert value.startswith("#") or value == "data:,", (tag, value)
    assert "@import" not in page.text
    assert "url(" not in page.text
    data, script = page.inside("script")
    (policy,) = (a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert str(policy).startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'" in str(policy)
    assert [a["id"] for t, a in page.tags if t == "script" and "type" in a] == ["data"]
    assert "fetch(" not in script
    assert "innerHTML" not in script
    assert not {name for _, a in page.tags for name in a if name.startswith("on")}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store alone, of 3,000 tokens whose texts are markup."""
    made = Made([300] * 10, hidden=4, layers=2, shard_tokens=600, split="odd")
    offsets = np.tile(np.array([[0, len(ATTACK)], [1, 9]], np.int32), (1500, 1))
    made.contents.per_token["offset_mapping"] = offsets
    columns = {"id": [ATTACK] * 10, "text": [ATTACK] * 10}
    made.contents = replace(made.contents, examples=pa.table(columns))
    folder = tmp_path_factory.mktemp("hostile")
    made.write(folder)
    return folder


def test_texts_stay_texts_and_a_page_has_a_sample(hostile: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.html"
    seen = bertvision.view("1e/odd", store=hostile, output=path)
    elements = Elements(path)
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert "b" not in {tag for tag, _ in elements.tags}
    assert {" " + ATTACK.strip(), " " + ATTACK[1:9]} == {
        f" {name.strip()}" for name in elements.data["tokens"]
    }
    assert (seen.tokens, seen.of_tokens, seen.examples) == (1800, 3000, 6)
    assert "1,800 of 3,000 tokens: 6 of 10 examples, drawn with seed 0" in elements.text
    assert seen.bytes == path.stat().st_size < 400_000
    bertvision.view("1e/odd", store=hostile, output=path)
    assert Elements(path).text == elements.text  # nothing in it depends on the time or the machine
    again = bertvision.view("1e/odd", store=hostile, output=path, seed=1)
    assert again.tokens == 1800
    assert Elements(path).data["examples"] != elements.data["examples"]


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(1, 900), st.integers(0, 9)
)
def test_a_sample_has_whole_examples_within_the_limit(
    lengths: list[int], most: int, seed: int
) -> None:
    n = np.asarray(lengths)
    if n.min() > most:
        with pytest.raises(InputError, match=f"--max-tokens {most}: the shortest example has"):
            drawn_examples(n, most, seed)
        return
    drawn = drawn_examples(n, most, seed)
    assert n[drawn].sum() <= most
    assert (np.diff(drawn) > 0).all()
    assert len(drawn) == len(n) or n.sum() > most
    assert drawn.tolist() == drawn_examples(n, most, seed).tolist()


@given(st.lists(st.floats(-1e4, 1e4, width=32) | st.just(float("nan")), min_size=1, max_size=50))
def test_packed_numbers_are_off_by_half_a_step(values: list[float]) -> None:
    given_values = np.asarray(values, np.float32)
    kept = packed(given_values)
    read = unpacked(kept)
    assert np.isnan(read).tolist() == np.isnan(given_values).tolist()
    known = ~np.isnan(read)
    off = np.abs(read - given_values)[known]
    assert (off <= kept["step"] * 0.5001 + 1e-9).all()
    assert kept["step"] == 0 or 10.0 ** -kept["digits"] >= kept["step"] or kept["digits"] == 6


@given(st.text(max_size=40), st.data())
def test_a_marked_text_is_the_text(text: str, data: st.DataObject) -> None:
    ends = st.integers(0, len(text))
    spans = [(kind, *sorted((data.draw(ends), data.draw(ends)))) for kind in ("gold", "predicted")]
    pieces = marked(text, spans)
    assert "".join(piece for piece, _ in pieces) == text
    for kind, begin, end in spans:
        assert "".join(p for p, of in pieces if of in (kind, "both")) == text[begin:end]


def test_neighbours_are_the_nearest(page: Elements, states: np.ndarray[Any, Any]) -> None:
    unit = states[:, -1] / np.linalg.norm(states[:, -1], axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -2)
    near = page.data["near"]
    rows = np.frombuffer(base64.b64decode(near["rows"]), "<u2").reshape(len(unit), -1)
    said = unpacked(near["cosines"]).reshape(rows.shape)
    best = np.sort(cosines, axis=1)[:, ::-1][:, : rows.shape[1]]
    assert np.abs(said - best).max() < 1e-4
    assert np.abs(np.take_along_axis(cosines, rows.astype(int), 1) - best).max() < 1e-5
    assert neighbours(np.ones((1, 3), np.float32))[0].shape == (1, 0)


def autoencoder(hidden: int = 16, latents: int = 40) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    shapes = {"W_enc": (hidden, latents), "b_enc": (latents,), "W_dec": (latents, hidden)}
    shapes |= {"b_dec": (hidden,), "threshold": (latents,)}
    return {n: random.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


@pytest.mark.parametrize("subtracts", [True, False])
@pytest.mark.parametrize("jumps", [True, False])
def test_latents_are_those_of_the_autoencoder(tmp_path: Path, subtracts: bool, jumps: bool) -> None:
    arrays = autoencoder()
    if not jumps:
        del arrays["threshold"]
    save_file(arrays, tmp_path / "sae.safetensors")
    settings = {"architecture": "jumprelu" if jumps else "standard"}
    (tmp_path / "cfg.json").write_text(json.dumps(settings | {"apply_b_dec_to_input": subtracts}))
    states = np.random.default_rng(1).normal(size=(50, 16))
    x = torch.from_numpy(states - arrays["b_dec"] * subtracts)
    before = x @ torch.from_numpy(arrays["W_enc"]).double() + torch.from_numpy(arrays["b_enc"])
    expected = before.relu()  # as SAELens computes it
    if jumps:
        expected = expected * (before > torch.from_numpy(arrays["threshold"]))
    found = read_directions(tmp_path / "sae.safetensors", 16)
    assert np.allclose(found.values(states @ found.vectors.T), expected.numpy())
    means = expected.numpy().mean(axis=0)
    chosen = found.chosen(None, states, 5)
    assert chosen.names == [f"latent {i}" for i in np.argsort(-means)[:5]]


def test_directions_are_drawn_and_their_top_tokens_named(
    space: Path, states: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    hidden = states.shape[2]
    vectors = np.random.default_rng(2).normal(size=(3, hidden)).astype(np.float32)
    save_file({"truth": vectors[0], "others": vectors[1:]}, tmp_path / "d.safetensors")
    path = tmp_path / "d.html"
    options: dict[str, Any] = {"direction": tmp_path / "d.safetensors", "output": path}
    bertvision.view("1e/dev", layer=1, channels="2", workspace=space, **options)
    found = Elements(path)
    assert np.abs(found.numbers("truth") - states @ vectors[0]).max() <= found.step("truth")
    assert np.abs(found.numbers("others 1") - states @ vectors[2]).max() <= found.step("others 1")
    assert np.abs(found.numbers("channel 2") - states[..., 2]).max() <= found.step("channel 2")
    assert found.inside("summary") == ["others 0", "others 1", "truth", "channel 2"]
    values = np.sort(states[:, 1] @ vectors[1].astype(np.float64))[::-1][:20]
    spans = [text.replace("−", "-") for text in found.inside("span")]
    shown = [float(text) for text in spans if re.fullmatch(r"-?\d+\.\d{3}", text)]
    assert shown[:20] == pytest.approx(values.tolist(), abs=6e-4)


@pytest.mark.parametrize(
    ("classes", "bias", "message"),
    [
        ("{", 2, "do not name"),
        ("3", 2, "do not name"),
        ('{"classes": ["a", "b"]}', 3, "a row for each of its 2"),
    ],
)
def test_a_file_that_only_looks_like_a_probe_is_refused(
    space: Path, tmp_path: Path, classes: str, bias: int, message: str
) -> None:
    path = tmp_path / "odd.safetensors"
    tensors = {"weight": np.ones((2, 32)), "bias": np.ones(bias), "means": np.ones((2, 32))}
    save_file(tensors, path, {"probe": classes})
    with pytest.raises(InputError, match=message):
        bertvision.view("1e/dev", direction=path, workspace=space)


@pytest.mark.parametrize("classes", [("no", "yes"), ("a", "b", "c")])
def test_a_saved_probe_gives_its_probabilities_and_directions(
    space: Path, states: np.ndarray[Any, Any], tmp_path: Path, classes: tuple[str, ...]
) -> None:
    random = np.random.default_rng(3)
    weight, means = random.normal(size=(2, len(classes), states.shape[2])).astype(np.float32)
    bias = random.normal(size=len(classes)).astype(np.float32)
    probe = SavedProbe({"weight": weight, "bias": bias}, means, classes)
    probe.save(tmp_path / "2.safetensors")
    unlike = probe._replace(source={"tag": "0e", "layers": "1"})
    unlike.save(tmp_path / "1.safetensors")
    deep = probe._replace(parameters={**probe.parameters, "hidden_weight": weight})
    deep.save(tmp_path / "deep.safetensors")
    path = tmp_path / "page.html"
    options: dict[str, Any] = {"direction": tmp_path / "2.safetensors", "output": path}
    bertvision.view("1e/dev", layer=2, workspace=space, **options)
    found = Elements(path)
    assert "; shown is" not in path.read_text(encoding="utf-8")
    options["direction"] = tmp_path / "1.safetensors"
    bertvision.view("1e/dev", layer=2, workspace=space, **options)
    for note in ("snapshot 0e; shown is snapshot 1e", "layer 1; shown is layer 2"):
        assert f"was trained on {note}" in path.read_text(encoding="utf-8")
    with pytest.raises(InputError, match="without --mlp"):
        read_directions(tmp_path / "deep.safetensors", 32)
    expected = softmax(states[:, 2] @ weight.T + bias, axis=1)
    assert np.abs(found.numbers("probe") - expected).max() < 1e-4
    assert found.inside("summary") == [f"towards {c}" for c in classes[len(classes) == 2 :]]
    towards = found.numbers(f"towards {classes[-1]}")
    assert towards == pytest.approx(states @ probe.direction(classes[-1]), abs=1e-2)
    with pytest.raises(InputError, match="the probe reads vectors of width"):
        read_directions(tmp_path / "2.safetensors", 5)


def test_latents_have_columns_of_their_own(
    space: Path, states: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    arrays = autoencoder(states.shape[2])
    save_file(arrays, tmp_path / "sae.safetensors")
    path = tmp_path / "sae.html"
    bertvision.view(
        "1e/dev",
        direction=tmp_path / "sae.safetensors",
        latents=[7, 3],
        output=path,
        workspace=space,
    )
    found = Elements(path)
    (kept,) = (m for m in found.data["measures"] if m["name"] == "latents")
    assert (kept["columns"], kept["over"]) == (["7", "3"], "latent")
    before = (states[:, -1] - arrays["b_dec"]) @ arrays["W_enc"] + arrays["b_enc"]
    expected = np.where(before > np.maximum(arrays["threshold"], 0), before, 0)[:, [7, 3]]
    assert np.abs(found.numbers("latents") - expected).max() <= kept["step"] + 1e-4


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((2, 5))}, r"x has shape \(2, 5\), and the hidden states have 16 channels"),
        ({"x": np.full(16, np.nan)}, "x holds NaN or infinity"),
        ({"x": np.zeros((2, 16))}, "a direction in x is zero"),
        ({"x": np.arange(16)}, "holds torch.int64"),
        ({}, "holds nothing"),
        ({"W_enc": np.ones((16, 4))}, "lacks W_dec: of autoencoders those of the architectures"),
        (autoencoder() | {"W_gate": np.ones(3)}, "has W_gate"),
        (autoencoder(8), r"W_dec has shape \(40, 8\), and of hidden states with 16 channels"),
    ],
)
def test_files_that_hold_something_else_are_refused(
    tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    save_file(arrays, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=message):
        read_directions(tmp_path / "x.safetensors", 16)


def test_no_pickle_and_no_other_architecture_is_read(tmp_path: Path) -> None:
    torch.save(torch.ones(16), tmp_path / "x.pt")
    with pytest.raises(InputError, match="no other kind is read"):
        read_directions(tmp_path / "x.pt", 16)
    (tmp_path / "x.pt").rename(tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="is no safetensors file"):
        read_directions(tmp_path / "x.safetensors", 16)
    save_file(autoencoder(), tmp_path / "x.safetensors")
    for settings, message in (
        ({"architecture": "topk"}, 'of the architecture "topk" are not read'),
        ({"normalize_activations": "layer_norm"}, "fold the factor into its weights"),
    ):
        (tmp_path / "cfg.json").write_text(json.dumps(settings))
        with pytest.raises(InputError, match=message):
            read_directions(tmp_path / "x.safetensors", 16)


def test_pca_of_points_in_a_plane_keeps_their_distances() -> None:
    random = np.random.default_rng(0)
    plane, basis = random.normal(size=(20, 2)), np.linalg.qr(random.normal(size=(9, 2)))[0]
    states = np.stack([plane @ basis.T + 5, np.zeros((20, 9))], axis=1)
    found = pca(states)
    between = np.linalg.norm(found.points[0][:, None] - found.points[0], axis=2)
    assert between == pytest.approx(np.linalg.norm(plane[:, None] - plane, axis=2))
    assert not found.points[1].any()  # of points that are all the same
    first, second = (int(n) for n in re.findall(r"(\d+) %", found.remarks[0]))
    assert first >= second
    assert first + second in (99, 100, 101)


@pytest.mark.slow
def test_umap_arranges_each_layer() -> None:
    pytest.importorskip("umap")
    from bertvision.pipelines.view.projection import umap

    found = umap(np.random.default_rng(0).normal(size=(30, 2, 8)), 0)
    assert found is not None
    assert found.points.shape == (2, 30, 2)
    assert np.isfinite(found.points).all()


def test_the_command_says_where_the_page_is_and_refuses_what_makes_no_sense(
    space: Path, tmp_path: Path
) -> None:
    said = json.loads(done("view", "1e/dev-cls", "-w", space, "--json", "--max-tokens", 12))
    path = Path(said["path"])
    assert path == space / "view" / "1e-dev-cls.html"
    assert (said["tokens"], said["of_tokens"]) == (12, 18)
    assert said["bytes"] == path.stat().st_size
    assert len(Elements(path).data["groups"]) == 1  # vectors of examples stand in one map
    (tmp_path / "mine.html").write_text("mine")
    for options, message in (
        (["--output", tmp_path / "mine.html"], "is there, and no page of `bertvision view`"),
        (["--output", tmp_path / "page.txt"], "give a name that ends in .html"),
        (["--head", "no-such-head"], "no head no-such-head was trained"),
        (["--channels", 99], "--channels 99: 99 is none: give numbers from 0 to"),
        (["--channels", "1,1"], "each once"),
        (["--latents", 1], "--latents numbers what is in a file: give it with --direction"),
        (["--layer", 40], "layer 40 is not stored"),
    ):
        result = run("view", "1e/dev", "-w", space, *options)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
    assert (tmp_path / "mine.html").read_text() == "mine"


KEYS = """
<script>
window.addEventListener("load", () => {
  const press = (key) => document.activeElement.dispatchEvent(
    new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const told = window.noted = [];
  document.querySelector("#grid [tabindex='0']").focus();
  for (const key of ["ArrowDown", "ArrowDown", "ArrowRight", "End", "Enter"]) {
    press(key);
    told.push(document.activeElement.getAttribute("aria-label"));
  }
  told.push(document.getElementById("tip").textContent);
  told.push(document.querySelector("#detail h3").textContent);
  told.push(document.querySelectorAll("#detail .near button").length);
  document.getElementById("plot").focus();
  press("ArrowRight");
  told.push(document.getElementById("point").textContent);
  told.push(document.querySelectorAll("#plot circle").length);
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_a_browser_draws_it_and_keys_alone_suffice(
    page: Elements, states: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    keyed = page.text.replace("</head>", f"{KEYS}</head>")
    narrow, wide = measure(tmp_path, (page.text, 360), (keyed, 1000))
    for found, width in ((narrow, 360), (wide, 1000)):
        assert found["width"] == found["page"] == width
        assert found["requests"] == []
        assert found["dead"] == []
    assert narrow["wide"] == []
    down, _, right, end, chosen, tip, heading, near, point, points = wide["told"]
    second = page.data["tokens"][2].strip()
    assert down.endswith("token 1")
    norms = np.linalg.norm(states, axis=2)
    for said, layer in ((right, 0), (end, 2)):
        place, number, margin = re.fullmatch(r"(.*): norm ([\d.]+) \(± ([\d.]+)\)", said).groups()
        assert place == f"“{second}”, token 2, layer {layer}"
        assert abs(float(number) - norms[2, layer]) <= float(margin) < 0.001
    assert (chosen, tip, heading) == (end, end, f"“{second}”")
    assert near == 5
    assert point.startswith("Example 0 (")
    assert points == 18 + 1  # and the ring around the chosen one
