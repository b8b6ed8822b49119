"""The yardstick of a backend: the bare matrix products of the tiles that a method visits.

Tiles of 64 queries and blocks of at most 64 keys, as `plsh.tiles` schedules them, multiplied by the
library's own batched product: q k and p v forward. Backends choose their own tiles, so that a ratio
to the floor measures those as well as the work between the products; the floor itself changes with
no backend.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backend import Harness
from ..compat import kind, namespace
from ..methods import Method, resolve
from ..tiles import Schedule, decay_reach, step_reach
from ..weights import DecayWeight, StepWeight
from .case import Case
from .machine import processors

_ROWS = 64
_PRODUCT = 1 << 18
"""Multiplications of one product at most: above, OpenBLAS splits it among threads and waits."""
_BATCH = 64
"""Products of a batch: what it holds fits a cache."""


def floor(method: Method, case: Case, harness: Harness) -> Callable[[], None]:
    """Return a call of the products that a forward needs, warm and synchronised.

    NumPy's product has one thread, so heads run on one each; other libraries thread theirs.
    """
    columns = max(16, min(64, _PRODUCT // (_ROWS * case.head_dim) // 16 * 16))
    counts = blocks(method, case, columns)
    rng = np.random.default_rng(0)
    shapes = {"q": (_ROWS, case.head_dim), "k": (case.head_dim, columns)}
    shapes |= {"v": (columns, case.head_dim)}
    q, k, v = (
        harness.asarray(rng.standard_normal((_BATCH, *shape)), dtype=case.dtype)
        for shape in shapes.values()
    )
    sizes = [[_BATCH] * (n // _BATCH) + [n % _BATCH] * (n % _BATCH > 0) for n in counts]
    if kind(q) == "numpy":
        return _by_heads(sizes, q, k, v)
    multiply = namespace(q).matmul

    def run() -> None:
        for size in (size for head in sizes for size in head):
            last = multiply(multiply(q[:size], k[:size]), v[:size])
        harness.synchronize(last)

    return run


def blocks(method: Method, case: Case, columns: int) -> list[int]:
    """Count for each head the blocks of `columns` keys that its tiles visit."""
    weight = resolve(method, None, case.slopes, case.heads).weight
    first = np.arange(0, case.length, _ROWS, dtype=np.int64)
    keys = range(case.length)
    if isinstance(weight, DecayWeight):
        reaches = [
            decay_reach(first, _ROWS, width, case.causal, keys) for width in weight.bandwidths
        ]
    elif isinstance(weight, StepWeight):
        begins = weight.bounds(first)[0].min(axis=1)
        last = np.minimum(first + _ROWS, case.length) - 1
        ends = weight.bounds(last)[1].max(axis=1)
        reaches = [
            step_reach(first, _ROWS, low, high, case.causal, keys)
            for low, high in zip(begins, ends, strict=True)
        ]
    else:
        raise TypeError(f"method must be a recipe, got {method!r}")
    schedules = [Schedule.of(first, _ROWS, columns, reach) for reach in reaches]
    own = -(-_ROWS // columns) * len(first)  # the diagonal
    return [own + int(s.left.sum() + s.right.sum()) for s in schedules]


def _by_heads(
    sizes: list[list[int]], q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any]
) -> Callable[[], None]:
    """Return the call for NumPy, results written over and over into the same memory."""

    def head(batches: list[int]) -> None:
        p, o = np.empty((*q.shape[:2], k.shape[2]), dtype=q.dtype), np.empty_like(q)
        for size in batches:
            np.matmul(q[:size], k[:size], out=p[:size])
            np.matmul(p[:size], v[:size], out=o[:size])

    def run() -> None:
        with ThreadPoolExecutor(processors()) as pool:
            for _ in pool.map(head, sizes):
                pass

    return run
