"""Confidence intervals, fitted slopes, and verdicts that can fail."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"

_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5 % points of Student's t for 1, 2, … 30 degrees of freedom."""


class Interval(NamedTuple):
    """An estimate with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Write the estimate with the interval in brackets."""
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


class Claim(NamedTuple):
    """A claim with what was measured.

    Attributes
    ----------
    claim : str
    verdict : str
        `HOLDS`, `FAILS` or `UNDECIDED`.
    measured : Interval
    needs : str
        Where the measured quantity must lie.
    """

    claim: str
    verdict: str
    measured: Interval
    needs: str

    def plain(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return self._asdict() | {"measured": self.measured._asdict()}


def student(degrees: int) -> float:
    """Return the 97.5 % point of Student's t.

    Examples
    --------
    >>> student(2), round(student(100), 2)
    (4.303, 1.98)
    """
    if degrees < 1:
        return math.inf
    if degrees <= len(_T975):
        return _T975[degrees - 1]
    return 1.95996 + 2.3722 / degrees + 2.8225 / degrees**2  # about the normal distribution's


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with its t interval; of one value it is unbounded.

    Examples
    --------
    >>> str(mean_interval([1.0, 2.0, 3.0]))
    '2 [-0.484, 4.48]'
    """
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    if x.size < 2:
        return Interval(mean, -math.inf, math.inf)
    half = student(x.size - 1) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Interval(mean, mean - half, mean + half)


def power_law(sizes: Sequence[float], repeats: Sequence[Sequence[float]]) -> Interval:
    """Fit ``error ~ size**slope`` and return the slope.

    Each repetition, which must be independent of the others, is fitted by least squares on
    logarithms by itself; the interval is that of the mean of their slopes. Points of one
    repetition may depend on one another.

    Parameters
    ----------
    sizes : sequence of float
        Of the points.
    repeats : sequence of sequence of float
        Errors at them, one sequence for each repetition.

    Examples
    --------
    >>> power_law([1, 4, 16], [[2.0, 1.0, 0.5], [4.0, 2.0, 1.0]]).mean
    -0.5
    """
    x = np.log(np.asarray(sizes, dtype=np.float64))
    y = np.log(np.asarray(repeats, dtype=np.float64))
    x = x - x.mean()
    return mean_interval((y @ x / (x @ x)).tolist())


def judge_above(interval: Interval, limit: float = 0.0) -> str:
    """Judge the claim that a quantity lies above a limit.

    Examples
    --------
    >>> judge_above(Interval(1.0, 0.5, 1.5)), judge_above(Interval(0.1, -0.2, 0.4))
    ('holds', 'undecided')
    """
    if interval.low > limit:
        return HOLDS
    return FAILS if interval.high < limit else UNDECIDED


def judge_below(interval: Interval, limit: float) -> str:
    """Judge the claim that a quantity lies below a limit."""
    return judge_above(Interval(-interval.mean, -interval.high, -interval.low), -limit)


def judge_within(interval: Interval, low: float, high: float) -> str:
    """Judge the claim that a quantity lies between two limits.

    Examples
    --------
    >>> judge_within(Interval(-0.5, -0.52, -0.48), -0.6, -0.4)
    'holds'
    """
    verdicts = {judge_above(interval, low), judge_below(interval, high)}
    for verdict in (FAILS, UNDECIDED):
        if verdict in verdicts:
            return verdict
    return HOLDS
