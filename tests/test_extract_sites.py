"""``extract --sites``: other sites of an encoder beside its hidden states, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import record_path, shard_path
from terminal import done, run

import bertvision
from bertvision.errors import InputError, NonFiniteError, ProvenanceError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.extraction.extract import extract, repair
from bertvision.pipelines.planning import plan_extraction
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace.job_options import ExtractOptions
from bertvision.pipelines.workspace.reproduce import stored_options
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace

WANTED = ("blocks.*.hook_mlp_out", "blocks.1.hook_attn_out", "blocks.1.hook_resid_post")
SITES = [
    "blocks.0.hook_mlp_out",
    "blocks.1.hook_attn_out",
    "blocks.1.hook_mlp_out",
    "blocks.1.hook_resid_post",
]
EXACT: dict[str, Any] = {"encoding": "float32", "precision": "32", "shard_tokens": 512}


@pytest.fixture(scope="module")
def space(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A copy with sites of dev at both snapshots; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("sites") / "workspace"
    shutil.copytree(workspace.root, folder)
    made = Workspace.find(folder)
    for tag in ("0.5e", "1e"):
        extract(made, tag, splits=("dev",), sites=WANTED, **EXACT)
    return made


@pytest.fixture
def copy(space: Workspace, tmp_path: Path) -> Workspace:
    """A copy that a test may change."""
    shutil.copytree(space.root, tmp_path / "workspace")
    return Workspace.find(tmp_path / "workspace")


def hooked(space: Workspace, tag: str, split: ActivationSplit, example: int) -> torch.Tensor:
    """(seq, sites, hidden) of an example, by hooks of one's own on the snapshot's BERT."""
    snapshot = load_snapshot(space.snapshot_dir(tag))
    layers: Any = snapshot.model.base_model.encoder.layer
    windows = space.windows("dev", snapshot.tokenizer)
    row = int(split.plan.example_id[example])
    token = slice(windows.first_token[row], windows.first_token[row] + windows.n_tokens[row])
    seen: dict[str, torch.Tensor] = {}

    def see(name: str, module: Any) -> None:
        module.register_forward_hook(lambda m, given, out: seen.update({name: out[0]}))

    see("mlp 0", layers[0].output.dense)
    see("attn 1", layers[1].attention.output.dense)
    see("mlp 1", layers[1].output.dense)
    see("mid 1", layers[1].attention.output.LayerNorm)
    with torch.inference_mode():
        snapshot.model(
            input_ids=torch.from_numpy(windows.input_ids[token].astype(np.int64))[None],
            token_type_ids=torch.from_numpy(windows.token_type_ids[token].astype(np.int64))[None],
        )
    parts = [seen["mlp 0"], seen["attn 1"], seen["mlp 1"], seen["mid 1"] + seen["mlp 1"]]
    return torch.stack(parts, dim=1)


@pytest.mark.parametrize("tag", ["0.5e", "1e"])
def test_what_is_stored_is_what_hooks_of_ones_own_see(space: Workspace, tag: str) -> None:
    split = space.split(tag, "dev-sites")
    assert split.layer_names == SITES
    assert split.verify() == []
    for example in (0, len(split) - 1):
        given = split.read([example], layers=SITES).decode()
        torch.testing.assert_close(given, hooked(space, tag, split, example), rtol=1e-5, atol=1e-5)


def test_sites_are_chosen_by_name_wherever_a_split_is_read(space: Workspace) -> None:
    split, name = space.split("1e", "dev-sites"), "blocks.1.hook_mlp_out"
    whole = torch.cat([split.read([i]).decode() for i in range(len(split))])
    expected = whole[:, SITES.index(name)]
    tokens = [batch.vectors for batch in split.tokens(name, shuffle=False)]
    assert torch.equal(torch.cat(tokens), expected)
    assert torch.equal(torch.from_numpy(split.dask([name]).compute()[:, 0]), expected)
    assert split.to_xarray().layer.values.tolist() == SITES
    with pytest.raises(InputError, match="layer blocks.0.hook_attn_out is not stored .* it holds"):
        split.tokens("blocks.0.hook_attn_out")


def test_hidden_states_stay_as_they_are_beside_them(workspace: Workspace, space: Workspace) -> None:
    for before, after in zip(
        workspace.stored_splits(), (s for s in space.stored_splits() if "sites" not in s.split),
        strict=True,
    ):  # fmt: skip
        assert before.record == after.record
    assert space.split("1e", "dev").layer_names == []
    # every other command goes on to read these
    assert workspace.splits() == space.splits()
    assert status(workspace)["next"] == status(space)["next"]


def test_the_same_again_writes_nothing_in_whatever_order_sites_are_named(copy: Workspace) -> None:
    again = (*reversed(SITES), "blocks.0.hook_mlp_out")
    (written,) = extract(copy, "1e", splits=("dev-sites",), sites=again, **EXACT)
    assert (written.split, written.shards_written) == ("dev-sites", 0)


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (["blocks.0.hook_mlp_out"], "1e/dev-sites in .* holds blocks.1.hook_attn_out, "
         "blocks.1.hook_mlp_out, blocks.1.hook_resid_post beside those that are asked for: its "
         "sites were chosen .* `bertvision store rm 1e/dev-sites`"),
        ([*SITES, "*.hook_resid_pre"], "lacks blocks.0.hook_resid_pre, blocks.1.hook_resid_pre: "),
        (["*resid*", "*_out"], "lacks .*_resid_pre, .*_attn_out, .*_resid_mid and 5 more: "),
    ],
)  # fmt: skip
def test_other_sites_are_refused_by_name(space: Workspace, sites: list[str], message: str) -> None:
    with pytest.raises(ProvenanceError, match=message):
        extract(space, "1e", splits=("dev",), sites=tuple(sites), **EXACT)


def test_a_lost_shard_is_computed_again_bit_for_bit(copy: Workspace) -> None:
    split = copy.split("1e", "dev-sites")
    assert split.plan.n_shards > 2
    before = shard_path(split, "hidden_states", 1).read_bytes()
    record_path(split, 1).unlink()
    shard_path(split, "hidden_states", 1).write_bytes(b"")
    assert json.loads(done("status", "-w", copy.root, "--json"))["unfinished"] == {
        "1e": ["dev-sites"]
    }
    (command,) = [c for c in status(copy)["next"] if "--sites" in c]
    assert f"--split dev --encoding float32 --sites {','.join(SITES)} --precision 32" in command
    (written,) = extract(copy, "1e", splits=("dev",), sites=WANTED, **EXACT)
    assert written.shards_written == 1
    assert shard_path(split, "hidden_states", 1).read_bytes() == before


def test_exactly_what_is_damaged_is_extracted_again(copy: Workspace) -> None:
    split = copy.split("1e", "dev-sites")
    data = bytearray(shard_path(split, "hidden_states", 1).read_bytes())
    before, data[100] = bytes(data), data[100] ^ 1
    shard_path(split, "hidden_states", 1).write_bytes(data)
    repaired = repair(copy, "1e", "dev-sites")
    assert (repaired.shards, repaired.lacking) == ([1], None)
    assert shard_path(split, "hidden_states", 1).read_bytes() == before


def test_options_of_a_stored_split_name_its_sites(space: Workspace) -> None:
    options = stored_options(space.split("1e", "dev-sites"))
    assert (options.splits, options.sites, options.layers) == (("dev",), tuple(SITES), None)


def test_poolings_of_sites_stand_beside_those_of_hidden_states(copy: Workspace) -> None:
    """They come from the encoder: no stored hidden states are pooled in their place."""
    written = extract(
        copy, "1e", splits=("dev",), tokens=("mean", "cls"), sites=WANTED, encoding="float32",
        precision="32",
    )  # fmt: skip
    assert [row.split for row in written] == ["dev-sites-mean", "dev-sites-cls"]
    assert [row.pooled_from for row in written] == [None, None]
    tokens, pooled = copy.split("1e", "dev-sites"), copy.split("1e", "dev-sites-mean")
    assert pooled.layer_names == SITES
    for example in range(3):
        row = int(np.flatnonzero(tokens.plan.example_id == pooled.plan.example_id[example])[0])
        mean = tokens.read([row]).decode().mean(dim=0)
        torch.testing.assert_close(pooled.read([example]).decode()[0], mean, rtol=1e-5, atol=1e-5)


def test_what_int8_loses_is_said_of_a_site_by_its_name(copy: Workspace) -> None:
    (written,) = extract(copy, "0.5e", splits=("tune",), sites=WANTED, precision="32")
    assert {error["in_layer"] for error in written.encoding_error.values()} <= set(SITES)


def test_a_site_that_is_not_finite_is_said_with_the_names_of_all(
    copy: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Encoder.__call__

    def broken(self: Encoder, windows: Windows, rows: np.ndarray) -> list[torch.Tensor]:
        states = compute(self, windows, rows)[0].clone()
        states[0, 2] = torch.nan
        return [states]

    monkeypatch.setattr(Encoder, "__call__", broken)
    names = ".*".join(SITES)
    with pytest.raises(NonFiniteError, match=f"tune-sites, shard 0.*{names}.*token 0, layer 2"):
        extract(copy, "1e", splits=("tune",), sites=WANTED, **EXACT)


NEURONS = ("blocks.*.mlp.hook_post",)


@pytest.fixture(scope="module")
def wide(space: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A copy with the feed-forward layer's activations beside the other sites; left as it is."""
    folder = tmp_path_factory.mktemp("wide") / "workspace"
    shutil.copytree(space.root, folder)
    made = Workspace.find(folder)
    options = ExtractOptions(splits=("dev",), sites=NEURONS, **EXACT)
    (planned,) = plan_extraction(made, made.dataset(), ["1e"], options).splits
    (written,) = extract(made, "1e", splits=("dev",), sites=NEURONS, **EXACT)
    assert (written.split, written.bytes) == (planned.split, planned.bytes)
    return made


def test_sites_of_another_width_are_stored_beside_the_others(
    space: Workspace, wide: Workspace
) -> None:
    split, before = wide.split("1e", "dev-sites64"), space.split("1e", "dev-sites")
    assert wide.split("1e", "dev-sites").record == before.record
    assert (split.record.hidden_size, before.record.hidden_size) == (64, 32)
    assert split.layer_names == [f"blocks.{i}.mlp.hook_post" for i in range(2)]
    assert split.verify() == []
    layers = load_snapshot(wide.snapshot_dir("1e")).model.base_model.encoder.layer
    mlp_out = before.read([0], layers=["blocks.0.hook_mlp_out"]).decode()[:, 0]
    with torch.no_grad():
        expected = layers[0].output.dense(split.read([0]).decode()[:, 0])
    torch.testing.assert_close(mlp_out, expected, rtol=1e-5, atol=1e-5)


def test_every_way_of_reading_has_the_other_width(wide: Workspace, tmp_path: Path) -> None:
    split, name = wide.split("1e", "dev-sites64"), "blocks.1.mlp.hook_post"
    expected = torch.cat([split.read([i]).decode() for i in range(len(split))])
    assert expected.shape[1:] == (2, 64)
    vectors = torch.cat([batch.vectors for batch in split.tokens(name, shuffle=False)])
    assert torch.equal(vectors, expected[:, 1])
    assert torch.equal(torch.from_numpy(split.dask().compute()), expected)
    dataset = split.to_xarray()
    assert dataset.sizes["hidden"] == 64
    given: dict[str, Any] = {"layers": [name], "dtype": "float32", "format": "npy"}
    bertvision.export_states(split.name, tmp_path / "out", store=str(split.storage), **given)
    assert {np.load(path).shape[-1] for path in (tmp_path / "out").glob("*hidden*.npy")} == {64}


def test_neurons_are_audited_and_extracted_again_by_name(wide: Workspace, tmp_path: Path) -> None:
    shutil.copytree(wide.root, tmp_path / "workspace")
    copied = Workspace.find(tmp_path / "workspace")
    split = copied.split("1e", "dev-sites64")
    before = shard_path(split, "hidden_states", 1).read_bytes()
    shard_path(split, "hidden_states", 1).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    assert repair(copied, "1e", "dev-sites64").shards == [1]
    assert shard_path(split, "hidden_states", 1).read_bytes() == before
    assert bertvision.audit("1e/dev-sites64", sample=3, workspace=copied.root).wrong == 0
    (pooled,) = extract(copied, "1e", splits=("dev-sites64-mean",), sites=NEURONS, **EXACT)
    assert pooled.split == "dev-sites64-mean"


def test_hidden_states_are_asked_for_where_neurons_are_named(wide: Workspace) -> None:
    with pytest.raises(InputError, match="dev-sites64 holds sites .* name dev; sites are read"):
        bertvision.isotropy("1e", split="dev-sites64", workspace=wide.root)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sites", "h.*.mlp"], "--sites 'h.*.mlp' means no site of an encoder of 2 layers"),
        (["--sites", "ln_final.hook_normalized"], "means no site of a bert encoder of 2 layers"),
        (["--sites", "*", "--layers", "1"], "--layers (1,): name blocks in --sites, as blocks.3.*"),
        (["--sites", "*"], "--sites means sites of 2 widths, and a split holds those of one"),
        (["--sites", "*_post", "--split", "dev-sites"], "--sites means sites of 2 widths"),
        (["--sites", "*.mlp.hook_post", "--split", "dev-sites"], "--split dev-sites: the --sites "
         "that are named have 64 channels, and are stored as dev-sites64: name that, or other"),
        (["--split", "dev-sites"], "--split dev-sites is of sites: name them too, with --sites"),
    ],
)  # fmt: skip
def test_bad_requests_are_named(space: Workspace, words: list[str], message: str) -> None:
    result = run("extract", "--checkpoint", "1e", *words, "-w", space.root)
    assert result.exit_code != 0
    assert message in " ".join(result.stderr.split())


def test_heads_of_hidden_states_refuse_sites_by_name(copy: Workspace) -> None:
    """A split of as many sites as there are hidden states would fit them in size."""
    bertvision.train("learned-pooling", checkpoint="1e", workspace=copy.root)
    with pytest.raises(InputError, match="dev-sites holds sites .* name dev; sites are read"):
        bertvision.evaluate("learned-pooling", split="dev-sites", workspace=copy.root)
    head = bertvision.load_head(copy.head_dir("1e", "learned-pooling"))
    assert set(head.config.layers) <= set(copy.split("1e", "dev-sites").record.layers)
    with pytest.raises(ProvenanceError, match="layer_names = None, 1e/dev-sites was extracted"):
        head.check_fits(copy.split("1e", "dev-sites"), "learned-pooling")
    head.check_fits(copy.split("1e", "dev"), "learned-pooling")


def test_analyses_of_hidden_states_refuse_sites_by_name(space: Workspace) -> None:
    for analysis in (bertvision.isotropy, bertvision.cka):
        tags = ("0.5e", "1e") if analysis is bertvision.cka else ("1e",)
        with pytest.raises(InputError, match="dev-sites holds sites .* name dev; sites are read"):
            analysis(*tags, split="dev-sites", workspace=space.root)
