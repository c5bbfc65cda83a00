"""Wilson's score interval: what a count out of a few dozen really says."""

from __future__ import annotations

from math import sqrt

_Z95 = 1.959963984540054  # the 97.5 % quantile of the standard normal distribution


def wilson_interval(solved: int, total: int) -> tuple[float, float]:
    """95 % confidence interval of a success rate, as fractions (Wilson 1927).

    Raises:
        ValueError: ``solved`` is not between 0 and ``total``, or ``total`` is not positive.
    """
    if not 0 <= solved <= total or total < 1:
        raise ValueError(f"{solved} of {total} is no success count")
    p, z2 = solved / total, _Z95**2
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z95 / (1 + z2 / total) * sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    # The exact bounds at the ends are 0 and 1; rounding must not step over them.
    return (0.0 if solved == 0 else centre - half), (1.0 if solved == total else centre + half)
