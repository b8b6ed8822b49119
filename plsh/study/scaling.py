"""How time grows with the length: the NumPy backend, 8 heads of 64, float32, standard slopes."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..attention import attention
from ..methods import Exact, Method, PositionalLSH, Window
from .statistics import Interval, power_law

_TIMED: dict[str, Method] = {
    "lsh iid s=16": PositionalLSH(16, sampler="iid"),
    "window tol 1e-6": Window(),
    "exact": Exact(),
}
_EXACT_LENGTH = 8192
"""Exact attention is not timed beyond."""


def times(lengths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Time causal calls of each method at each length, the first one apart."""
    rows = []
    draw = np.random.Generator(np.random.Philox(key=np.array([0, 1], dtype=np.uint64)))
    for n in lengths:
        q, k, v = draw.standard_normal((3, 8, n, 64), dtype=np.float32)
        for name, method in _TIMED.items():
            if name == "exact" and n > _EXACT_LENGTH:
                continue
            seconds = []
            for _ in range(repeats + 1):
                begin = time.perf_counter()
                attention(q, k, v, method=method, causal=True, backend="numpy")
                seconds.append(time.perf_counter() - begin)
            rows.append({"method": name, "n": n, "seconds": [round(x, 6) for x in seconds[1:]]})
    return rows


def exponents(rows: Sequence[Mapping[str, Any]]) -> dict[str, Interval]:
    """Fit seconds ~ n^exponent for each method, round by round."""
    found = {}
    for name in dict.fromkeys(r["method"] for r in rows):
        own = [r for r in rows if r["method"] == name]
        rounds = list(zip(*(r["seconds"] for r in own), strict=True))
        found[name] = power_law([r["n"] for r in own], rounds)
    return found
