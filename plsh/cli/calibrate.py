"""Seconds that a call will take, from calls of a few lengths timed on the spot."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..attention import attention
from ..methods import Method
from .common import Caller, CliError

_FIRST = 1024
"""The least tokens to predict longer calls from: below, tiles cost more than their pairs."""
_LONG_SECONDS = 0.3
"""About the most that a timed call may take."""
_REPEATS = 3
"""Calls of a length, if they are short; the fastest counts, as others may use the machine too."""


class Shape(NamedTuple):
    """What is the same in all calls, batch 1 and as many key heads included."""

    slopes: tuple[float, ...]
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool


class Line(NamedTuple):
    """The cost of a method, ``by_token * n + by_pair * pairs(n)`` seconds at length n.

    The first term holds what a token costs whatever it sees (copies, labels, the edges of tiles),
    the second the arithmetic.

    Attributes
    ----------
    by_token, by_pair : float
        Seconds, >= 0.
    lengths : tuple of int
        Those of the calls that were timed.
    """

    by_token: float
    by_pair: float
    lengths: tuple[int, int]

    def seconds(self, n: int, pairs: float) -> float:
        """Predict the seconds of a call of `n` tokens."""
        return self.by_token * n + self.by_pair * pairs


def fit(
    run: Callable[[int], float],
    queries: Callable[[int], int],
    pairs: Callable[[int], float],
    length: int,
) -> Line:
    """Time calls and draw the line through the best times of two lengths.

    The longer is the longest of 1024, 2048, … whose calls take at most about 0.3 s (1024 in
    any case), or `length` if that is shorter; the other is a quarter of it.

    Parameters
    ----------
    run : callable
        Makes a call of some length, of all its queries or the last, and returns its seconds.
    queries, pairs : callable
        How many of them such a call has, >= 1.
    length : int
        The length to be predicted, >= 1.
    """

    @functools.cache
    def best(n: int) -> float:
        times = [run(n)]
        while len(times) < _REPEATS and sum(times) < _LONG_SECONDS:
            times.append(run(n))
        return min(times)

    long = min(_FIRST, length)
    while long < length and 4 * best(long) <= _LONG_SECONDS:  # exact takes four times as long
        long = min(2 * long, length)
    short = max(1, long // 4)
    seconds = [best(n) / queries(n) for n in (short, long)]
    seen = [pairs(n) / queries(n) for n in (short, long)]
    by_pair = 0.0
    if seen[1] > seen[0]:
        by_pair = max(0.0, (seconds[1] - seconds[0]) / (seen[1] - seen[0]))
    # Both terms are >= 0; the line meets the longer call, nearer to what is predicted, always.
    by_pair = min(by_pair, seconds[1] / seen[1])
    return Line(max(0.0, seconds[1] - by_pair * seen[1]), by_pair, (short, long))


class Timer:
    """Times calls of a method on Gaussian inputs.

    Parameters
    ----------
    caller : Caller
        Whose backend to time.
    shape : Shape
        Of the calls.
    """

    def __init__(self, caller: Caller, shape: Shape) -> None:
        self._caller, self._shape = caller, shape
        self.backend = caller.name
        self._held: tuple[tuple[int, int], list[Any]] = ((0, 0), [])

    def __call__(self, method: Method, n: int, queries: int) -> float:
        """Return the seconds of one call of the last queries of `n` tokens, without inputs."""
        shape, arrays = self._shape, self._inputs(n, queries)
        begin = time.perf_counter()
        out = attention(
            *arrays,
            method=method,
            slopes=shape.slopes,
            causal=shape.causal,
            q_offset=n - queries,
            backend=self.backend,
        )
        self._caller.synchronize(out)
        return time.perf_counter() - begin

    def _inputs(self, n: int, queries: int) -> list[Any]:
        """Draw q, k, v, or take those of the last call."""
        if self._held[0] != (n, queries):
            shape, draw = self._shape, np.random.default_rng(0)
            drawn = (
                draw.standard_normal((1, len(shape.slopes), *size), dtype=np.float32)
                for size in ((queries, shape.head_dim), (n, shape.head_dim), (n, shape.value_dim))
            )
            try:
                arrays = [self._caller.move(x, shape.dtype) for x in drawn]
            except ImportError as error:  # NumPy has no bfloat16 of its own
                raise CliError(
                    f"{shape.dtype} calls cannot be timed here: {error}; pass --no-calibrate"
                ) from None
            self._held = ((n, queries), arrays)
        return self._held[1]
