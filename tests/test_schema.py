"""Names that become paths: nothing but the canonical form passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.featurestore.format.names import SnapshotTag, check_name


@given(st.integers(0, 99_000_000))
def test_every_fraction_has_one_tag_that_reads_back(millionths: int) -> None:
    tag = SnapshotTag.of(millionths / 1e6)
    assert SnapshotTag(str(tag)) == tag
    assert round(tag.fraction * 1e6) == millionths


@pytest.mark.parametrize(
    "text",
    [
        *("", "e", "1", "1.0e", "01e", "0.30e", ".3e", "1e\n", "../1e", "1E", "-1e", "１e", "nan"),
        *("2e+1e", "1e+1e", "1e+", "+", "1e+untrained", "1e + 2e"),
    ],
)
def test_other_spellings_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"0\.3e|write 0|write 1"):
        SnapshotTag(text)


def test_tags_are_ordered_as_numbers() -> None:
    texts = ("10e", "0.3e", "2e", "0e", "1e+2e", "1e", "0.25e", "0.3e+2e", "untrained")
    tags = [SnapshotTag(t) for t in texts]
    expected = ["untrained", "0e", "0.25e", "0.3e", "1e", "2e", "0.3e+2e", "1e+2e", "10e"]
    assert sorted(tags) == expected


@given(st.text(max_size=70))
def test_only_plain_names_pass(text: str) -> None:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    safe = 0 < len(text) <= 63 and set(text) <= allowed and text[0] not in "_-"
    if safe:
        assert check_name(text, "split") == text
    else:
        with pytest.raises(InputError, match="split name"):
            check_name(text, "split")
