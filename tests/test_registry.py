"""The registry of heads: names, plugins and classes of one's own."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch
from torch import nn

from bertvision.errors import InputError, UnknownNameError
from bertvision.models import registry
from bertvision.models.registry import build_head, describe_heads

LAYERS, HIDDEN = 5, 12


class OwnHead(nn.Module):
    """A head of one's own."""

    def __init__(self, *, layers: int, hidden: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(layers), requires_grad=False)
        self.output = nn.Linear(hidden, 2)
        self.norm = nn.BatchNorm1d(hidden)


class NeedsMore(OwnHead):
    def __init__(self, *, layers: int, hidden: int, size: int) -> None:
        super().__init__(layers=layers, hidden=hidden + size)


def not_a_module(*, layers: int, hidden: int) -> int:
    return layers * hidden


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> str:
    """This file under an importable name, as a user's package would be."""
    monkeypatch.setitem(sys.modules, "own_package.heads", sys.modules[__name__])
    return "own_package.heads"


def test_unknown_head_names_close_matches_and_the_command() -> None:
    with pytest.raises(UnknownNameError) as caught:
        build_head("adapter-64-sharde", layers=3, hidden=8)
    assert "did you mean adapter-64-shared" in str(caught.value)
    assert "`bertvision heads` lists them" in str(caught.value)


def test_dotted_path_builds_a_class_of_ones_own(own_module: str) -> None:
    head = build_head(f"{own_module}:OwnHead", layers=3, hidden=8)
    assert isinstance(head, OwnHead)
    assert head.output.in_features == 8


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_package.heads:Head", "No module named 'no_such_package'"),
        ("{own}:Missing", "no attribute 'Missing'"),
        (":Head", "Empty module name"),
        ("{own}:", "no attribute ''"),
        ("{own}:LAYERS", "not a class"),
        ("{own}:not_a_module", "must be a torch.nn.Module"),
        ("{own}:NeedsMore", "missing a required keyword-only argument: 'size'|'size'"),
    ],
)
def test_bad_dotted_path_says_what_is_wrong(own_module: str, target: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        build_head(target.format(own=own_module), layers=3, hidden=8)


def test_plugin_is_built_and_described(own_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("own-head", f"{own_module}:OwnHead", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([point]))
    assert isinstance(build_head("own-head", layers=3, hidden=8), OwnHead)
    info = describe_heads(layers=3, hidden=8)[-1]
    assert info.name == "own-head"
    assert info.description == "A head of one's own."
    assert info.trainable == (8 * 2 + 2) + 2 * 8
    # frozen parameters and BatchNorm's running mean and variance, not its counter of batches
    assert info.total == info.trainable + 3 + 2 * 8
