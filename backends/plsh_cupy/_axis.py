"""The axis of positions with its empty stretches taken out: what labels are made for.

Under a step weight only the order of tokens and their blocks matter. Labels of blocks without a
formula are held in a table, whose size must be that of the tokens, however far apart they lie.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from plsh.weights import StepWeight

from ._plan import COLUMNS

__all__ = ["MOST", "Axis"]

MOST = 1 << 30
"""Positions end before; kernels hold offsets that they read within as much of 0."""


class Axis:
    """Places of positions: their own, less what is empty before them, in whole tiles.

    Parameters
    ----------
    offsets : sequence of array_like
        First positions of queries and of keys, one or one per batch row.
    lengths : sequence of int
        How many tokens there are from each on.
    """

    def __init__(self, offsets: Sequence[npt.ArrayLike], lengths: Sequence[int]) -> None:
        # A position below 0, of padding, is in the block of position 0.
        found = sorted(
            (min(max(int(at), 0), MOST - 1), min(max(int(at) + length, 1), MOST))
            for side, length in zip(offsets, lengths, strict=True)
            for at in np.atleast_1d(side)
            if length
        )
        spans = found[:1] or [(0, 1)]
        for low, high in found[1:]:
            first, last = spans[-1]
            last += max(low - last, 0) % COLUMNS  # whole tiles go, so that no row's sums change
            if low > last:
                spans[-1:] = [(first, last), (low, high)]
            else:
                spans[-1] = (first, max(last, high))
        self.spans = tuple(spans)
        """Stretches with tokens, apart and in order: (first position, position after the last)."""
        self._starts, self._stops = np.array(spans, dtype=np.int64).T
        gaps = self._starts[1:] - self._stops[:-1]
        self._before = np.concatenate([[0], np.cumsum(gaps)])

    def places(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the places of positions; one in an empty stretch has that of the next token."""
        at = np.asarray(positions, dtype=np.int64)
        span = np.minimum(np.searchsorted(self._stops, at, side="right"), len(self._stops) - 1)
        low = np.where(span > 0, self._starts[span], at)
        found: npt.NDArray[np.int64] = np.maximum(at, low) - self._before[span]
        return found

    def labels(self, weight: StepWeight, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the places where the blocks at places ``[start, stop)`` begin, ``(H, s, n)``."""
        parts: list[npt.NDArray[Any]] = []
        for low, high, before in zip(self._starts, self._stops, self._before, strict=True):
            first, last = max(int(low), start + int(before)), min(int(high), stop + int(before))
            if first < last:
                parts.append(self.places(weight.labels(first, last)))
        return np.concatenate(parts, axis=2, dtype=np.int32)
