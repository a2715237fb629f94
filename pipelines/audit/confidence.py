"""What a sample of examples says of all of them."""

from __future__ import annotations

CONFIDENCE = 0.95


def at_most(wrong: int, sampled: int, examples: int) -> float:
    """The largest part of the examples that may be wrong, with 95 % confidence, one-sided.

    The upper limit of Clopper and Pearson (1934, *The use of confidence or fiducial limits
    illustrated in the case of the binomial*): where none of n is wrong it is 1 − 0.05^(1/n), just
    below 3 / n, the rule of three. That the sample was drawn without putting back makes it an upper
    limit all the more; where all were sampled it is what was found.

    Args:
        wrong: examples of the sample that are wrong.
        sampled: examples of the sample.
        examples: of the split.
    """
    from scipy.stats import beta

    if sampled >= examples:
        return wrong / examples
    return 1.0 if wrong >= sampled else float(beta.ppf(CONFIDENCE, wrong + 1, sampled - wrong))
