"""The registry of heads: names, plugins and classes of one's own."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from torch import nn

from bertvision import plugins
from bertvision.errors import InputError, UnknownNameError
from bertvision.models.factory import HEADS, build_head, describe_heads, kind_of
from bertvision.models.heads import SpanHead
from bertvision.models.outputs import class_loss, span_loss
from bertvision.models.zoo import ENTRY_POINT_GROUP

LAYERS, HIDDEN = 5, 12


class OwnHead(nn.Module):
    """A head of one's own."""

    def __init__(self, *, layers: int, hidden: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(layers), requires_grad=False)
        self.output = nn.Linear(hidden, 2)
        self.norm = nn.BatchNorm1d(hidden)


class OwnClassifier(nn.Module):
    """A classifier of one's own."""

    kind = "classification"

    def __init__(self, *, layers: int, hidden: int) -> None:
        super().__init__()
        self.output = nn.Linear(layers * hidden, 2)


class OwnClassifierOfAny(OwnClassifier):
    def __init__(self, *, layers: int, hidden: int, classes: int = 3) -> None:
        super().__init__(layers=layers, hidden=hidden)
        self.output = nn.Linear(layers * hidden, classes)


def own_classifier(*, layers: int, hidden: int) -> OwnClassifier:
    return OwnClassifier(layers=layers, hidden=hidden)


class OfNoKind(OwnHead):
    kind = "token"


class NeedsMore(OwnHead):
    def __init__(self, *, layers: int, hidden: int, size: int) -> None:
        super().__init__(layers=layers, hidden=hidden + size)


class Bare(nn.Module):
    """Without an `__init__`, so that torch's own would take any argument, and then refuse it."""


class Unfinished(SpanHead):
    """Without `features`."""


class Bald(SpanHead):
    """Gives a tensor where a list of tensors is due."""

    def __init__(self, *, layers: int, hidden: int) -> None:
        super().__init__(layers=layers, hidden=hidden, width=hidden)

    def features(self, hidden_states: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hidden_states[:, -1]


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
        ("{own}:Bare", "no __init__ of its own"),
        ("{own}:Unfinished", "it lacks features"),
        ("{own}:NeedsMore", "missing a required keyword-only argument: 'size'|'size'"),
    ],
)
def test_bad_dotted_path_says_what_is_wrong(own_module: str, target: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        build_head(target.format(own=own_module), layers=3, hidden=8)


def test_features_that_are_no_list_are_said_by_shape(own_module: str) -> None:
    head = build_head(f"{own_module}:Bald", layers=LAYERS, hidden=HIDDEN)
    with pytest.raises(InputError, match=r"features of Bald returned a tensor of shape \(7, 12\)"):
        head(torch.zeros(7, LAYERS, HIDDEN), torch.tensor([3, 4]))


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_own_classifier_that_takes_classes_is_made_for_them(own_module: str, classes: int) -> None:
    target = f"{own_module}:OwnClassifierOfAny"
    head = build_head(target, layers=3, hidden=8, classes=classes)
    assert isinstance(head, OwnClassifierOfAny)
    assert head.output.out_features == classes


@pytest.mark.parametrize("name", ["OwnClassifier", "own_classifier"])
def test_own_classifier_of_two_classes_is_refused_for_others(own_module: str, name: str) -> None:
    target = f"{own_module}:{name}"
    assert isinstance(build_head(target, layers=3, hidden=8, classes=2), OwnClassifier)
    with pytest.raises(InputError, match=r"for two classes, and there are 3.*'classes'"):
        build_head(target, layers=3, hidden=8, classes=3)


def test_own_span_head_has_nothing_to_do_with_classes(own_module: str) -> None:
    assert isinstance(build_head(f"{own_module}:OwnHead", layers=3, hidden=8, classes=3), OwnHead)


def test_plugin_is_built_and_described(own_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("own-head", f"{own_module}:OwnHead", ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints([point]))
    assert isinstance(build_head("own-head", layers=3, hidden=8), OwnHead)
    info = describe_heads(layers=3, hidden=16)[-1]
    assert info.name == "own-head"
    assert info.description == "A head of one's own."
    assert info.trainable == (16 * 2 + 2) + 2 * 16
    # frozen parameters and BatchNorm's running mean and variance, not its counter of batches
    assert info.total == info.trainable + 3 + 2 * 16
    assert (info.kind, info.costly, info.source) == ("span", False, f"{own_module}:OwnHead")
    words = [info.name for info in describe_heads(layers=3, hidden=16, kind="token")]
    assert words == [name for name, spec in HEADS.items() if spec.learns("token")]


def test_plugin_says_its_kind_and_is_described_with_the_pooler_output(
    own_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("own", f"{own_module}:OwnClassifier", ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints([point]))
    info = describe_heads(layers=3, hidden=9)[-1]
    assert (info.name, info.kind, info.costly) == ("own", "classification", False)
    assert info.total == (3 + 1) * 9 * 2 + 2
    assert [i.name for i in describe_heads(3, 9, "span")] == [
        name for name, spec in HEADS.items() if spec.kind == "span"
    ]


def test_own_head_without_attributes_is_a_span_head() -> None:
    assert kind_of(OwnHead(layers=3, hidden=8)) == "span"
    with pytest.raises(InputError, match=r"OfNoKind.kind is 'token'.*span or classification"):
        kind_of(OfNoKind(layers=3, hidden=8))


def test_own_heads_of_their_page_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's module, by dotted path: a head of each kind fits a few examples."""
    page = Path(__file__).parents[1] / "docs" / "how-to" / "own-head.md"
    source = re.search(r"```python\n(# my_heads\.py\n.*?)```", page.read_text(), re.DOTALL)
    assert source is not None
    (tmp_path / "my_heads.py").write_text(source[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_heads", raising=False)
    torch.manual_seed(0)
    states, lengths = torch.randn(12, 3, 32), torch.tensor([5, 4, 3])
    at = torch.tensor([2, 0, 1])
    for name, kind in (("LastLayer", "span"), ("TwoStates", "classification")):
        head = build_head(f"my_heads:{name}", layers=3, hidden=32)
        assert kind_of(head) == kind
        optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
        losses = []
        for _ in range(60):
            if kind == "span":
                loss = span_loss(head(states, lengths), at, at)
            else:
                ones = torch.ones(3, dtype=torch.int64)
                loss = class_loss(head(states[:3], ones), torch.tensor([1, 0, 1]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.1 * losses[0]
