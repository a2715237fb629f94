"""Some tokens of each example, and not the others: rules by name, and the tokens that they keep.

A split that keeps some has the rule as ``keep`` in its provenance, and the array `KEPT_POSITION`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bertvision.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KEEP = "keep"
"""Name of the rule in a split's provenance."""
KEPT_POSITION = "kept_position"
"""Array of such a split, int32 by token: the place of each stored token in what the model read."""

COMPLETION = ("loss_mask", "generated")
"""Fields that say which tokens are a completion; the first that an example has counts."""

_RULE = re.compile(r"(?:(from|every):([1-9]\d{0,8})|([a-z][a-z0-9_]{0,79}))", re.ASCII)


class Keep(NamedTuple):
    """A rule which tokens of each example are stored.

    Examples:
        >>> from bertvision.featurestore.format.keeping import Keep
        >>> Keep.parse("from:2").mask([4, 3]).tolist()
        [False, False, True, True, False, False, True]
        >>> Keep.parse("every:2").mask([4, 3]).tolist()
        [True, False, True, False, True, False, True]
    """

    kind: str
    """from, every, completion or field."""
    number: int
    """N of ``from:N`` and ``every:N``, else 0."""
    field: str
    """Name of the mask field, else empty."""

    @classmethod
    def parse(cls, text: object) -> Keep:
        """Read a rule.

        Args:
            text: ``completion``; ``from:N``, all but the first N tokens; ``every:N``, one of N
                tokens, the first of them; or the name of a mask field.

        Raises:
            InputError: It is none, or would keep all tokens.
        """
        match = _RULE.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[0] in ("every:1", "from", "every", "all", "none"):
            raise InputError(
                f"keep is {text!r}: give completion, from:N with N from 1 on (all but the first N "
                "tokens), every:N with N from 2 on (one token of N), or the name of a mask field; "
                "to keep all tokens leave it out"
            )
        kind, number, field = match.groups()
        if field == "completion":
            return cls(field, 0, "")
        return cls(kind or "field", int(number or 0), field or "")

    def mask(
        self, lengths: npt.ArrayLike, fields: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Whether each token of some examples is kept.

        Args:
            lengths: (examples,) tokens of each.
            fields: Arrays of their tokens by name, (tokens,) each.

        Returns:
            (tokens,), example after example.

        Raises:
            InputError: There is no such field, or it is no mask.
        """
        import numpy as np  # rules are read where nothing is computed

        n = np.asarray(lengths, np.int64)
        if self.number:
            positions = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
            kept: npt.NDArray[np.bool_] = (
                positions >= self.number if self.kind == "from" else positions % self.number == 0
            )
            return kept
        fields = fields or {}
        wanted = [self.field] if self.field else COMPLETION
        name = next((name for name in wanted if name in fields), None)
        if name is None:
            there = f"the fields are {', '.join(sorted(fields))}" if fields else "there are none"
            raise InputError(
                f"keep={self.field or self.kind} reads the field {' or '.join(wanted)} of the "
                f"tokens, and {there}: name one of these, or give from:N or every:N"
            )
        values = fields[name]
        if values.ndim != 1 or not np.isin(values, (0, 1)).all():
            raise InputError(
                f"keep={self.field or self.kind}: field {name} is {values.dtype} of shape "
                f"{values.shape}: a mask has one value for each token, 0 or 1"
            )
        return values.astype(bool)


def kept_positions(
    keep: npt.NDArray[np.bool_], lengths: npt.NDArray[np.integer]
) -> npt.NDArray[np.int32]:
    """(kept tokens,) the place of each kept token in its example.

    Args:
        keep: (tokens,) whether each is kept.
        lengths: (examples,) tokens of each.
    """
    import numpy as np

    n = lengths.astype(np.int64)
    positions = np.arange(len(keep)) - np.repeat(np.cumsum(n) - n, n)
    return positions[keep].astype(np.int32)
