"""How much a method computes: pairs of a query and a key, from lengths, widths and partitions.

All counts are of one head and one batch row, for n queries and the same n keys.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..partition import MAX_POSITION
from ..weights import DecayWeight, StepWeight, Weight

_LABELS = 1 << 22
"""Labels looked at a time."""


def dense_pairs(n: int, causal: bool) -> int:
    """Count the pairs that exact attention scores."""
    return n * (n + 1) // 2 if causal else n * n


def window_pairs(n: int, width: int, causal: bool) -> int:
    """Count the pairs at a distance of at most `width`."""
    if n == 0:
        return 0
    w = min(width, n - 1)
    below = n * (w + 1) - w * (w + 1) // 2  # keys at or before the query
    return below if causal else 2 * below - n


def widest_window(pairs: int, n: int, causal: bool) -> int:
    """Return the largest width whose window scores at most `pairs`; at least 0."""
    low, high = 0, max(n - 1, 0)
    while low < high:
        middle = (low + high + 1) // 2
        if window_pairs(n, middle, causal) <= pairs:
            low = middle
        else:
            high = middle - 1
    return low


class LshPairs(NamedTuple):
    """Pairs of positional LSH.

    Attributes
    ----------
    scored : int
        Summed over the samples: what the paper's algorithm, block by block, scores.
    distinct : int
        With weight > 0, each counted once: what a single pass over the band must score.
    """

    scored: int
    distinct: int


def lsh_pairs(weight: StepWeight, n: int, causal: bool) -> list[LshPairs]:
    """Count the pairs inside the drawn blocks of each head. Costs O(heads * samples * n)."""
    heads = len(weight.head_ids)
    scored = np.zeros(heads, dtype=np.int64)
    distinct = np.zeros(heads, dtype=np.int64)
    step = max(1, _LABELS // max(1, heads * weight.samples))
    for start in range(0, n, step):
        stop = min(start + step, n)
        at = np.arange(start, stop, dtype=np.int64)
        labels = weight.labels(start, stop)  # (heads, s, n)
        # A query sees the keys from the start of its block to itself, and of all its blocks the
        # earliest start counts: the union is contiguous.
        scored += (at - labels + 1).sum(axis=(1, 2))
        distinct += (at - labels.min(axis=1) + 1).sum(axis=1)
    if not causal:  # blocks are symmetric; the diagonal was counted once
        scored, distinct = 2 * scored - weight.samples * n, 2 * distinct - n
    return [LshPairs(int(a), int(b)) for a, b in zip(scored, distinct, strict=True)]


def distinct_pairs(weight: Weight, n: int, causal: bool) -> list[int]:
    """Count the pairs with weight > 0 of each head."""
    if isinstance(weight, DecayWeight):
        return [window_pairs(n, width, causal) for width in weight.bandwidths]
    if isinstance(weight, StepWeight):
        return [count.distinct for count in lsh_pairs(weight, n, causal)]
    raise TypeError(f"the pairs of {weight!r} are in labels that it does not hold")


def expected_lsh_pairs(n: int, samples: int, sigma: float, causal: bool) -> float:
    """Return the mean of `LshPairs.scored` over seeds: about ``2 * sigma * samples * n``.

    Two positions at a distance d share a block with probability ``exp(-d / sigma)``, so it is
    the sum of ``(n - d) * samples * exp(-d / sigma)``, in closed form; twice that, less the
    diagonal, without a causal mask.
    """
    if n == 0:
        return 0.0
    if n / sigma < 1e-4:  # the closed form would cancel; blocks are far longer than n
        below = n * (n + 1) / 2 * (1 - (n - 1) / (3 * sigma))
    else:
        gap = -math.expm1(-1 / sigma)  # 1 - x with x = exp(-1 / sigma)
        below = n / gap + (1 - gap) * math.expm1(-n / sigma) / gap**2
    return samples * (below if causal else 2 * below - n)


def break_even(pairs: Callable[[int], float], heads: int, causal: bool) -> int | None:
    """Return the first length at which `pairs`, of all heads, is below dense; None if never.

    The ratio to dense must not grow with the length.
    """

    def cheaper(n: int) -> bool:
        return pairs(n) < heads * dense_pairs(n, causal) * (1 - 1e-12)

    low, high = 0, MAX_POSITION
    if not cheaper(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if cheaper(middle) else (middle, high)
    return high


def flops(pairs: float, head_dim: int, value_dim: int) -> float:
    """Return the multiplications and additions of the two matrix products over `pairs`."""
    return 2 * (head_dim + value_dim) * pairs
