"""What is static about a call, and what is not: the classes of heads of equal tiling, the operands.

What is static is a hashable `Program`; everything else reaches it as arrays, so that other seeds,
slopes, offsets and lengths of the same rung run without compiling.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from plsh.backend import Static
from plsh.weights import DecayWeight, TableWeight

from ._spread import Spread
from ._tiling import Tiling


class Class(NamedTuple):
    """Heads of one tiling: `heads` holds for each key head of `keys` those that read it."""

    tiling: Tiling
    heads: tuple[tuple[int, ...], ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What is static about a program."""

    classes: tuple[Class, ...]
    dtype: str
    causal: bool
    scale: float
    samples: int
    table_start: int
    one_by_one: bool
    self_seeing: bool
    """Whether each token that is not padding is both a query and a key."""
    placed: tuple[Any, ...] | None
    """The mesh axes of B, H and N of q, where they are explicit."""


class Given(NamedTuple):
    """The operands of a program besides q, k, v; those that a call lacks are None."""

    slopes: Any  # (H,) or (B, H)
    widths: Any  # (H,)
    steps: Any  # for each class
    labels: Any  # (H or 1, s, n)
    q_start: Any  # (), or (B,)
    k_start: Any
    ahead: Any  # q_start - k_start
    lengths: tuple[Any, Any]
    ids: Any  # (ids, whether not padding) of queries and of keys


@functools.lru_cache(maxsize=512)
def program_of(
    static: Static,
    sizes: tuple[int, int],
    reach: tuple[int, ...],
    aligned: bool,
    self_seeing: bool,
    spread: Spread,
) -> Program:
    """Group the heads: those of one key head by tiling, then key heads with equally many."""
    if not spread.by_heads:
        reach = (max(reach),) * len(reach)
    group = static.heads // static.kv_heads
    found: dict[tuple[Tiling, int], list[tuple[int, ...]]] = {}
    for key in range(static.kv_heads):
        own: dict[Tiling, list[int]] = {}
        for h in range(key * group, (key + 1) * group):
            tiling = Tiling.of(sizes, reach[h], static.causal, aligned, spread.platform)
            own.setdefault(tiling, []).append(h)
        for tiling, heads in own.items():
            found.setdefault((tiling, len(heads)), []).append(tuple(heads))
    weight = static.weight
    return Program(
        tuple(
            Class(tiling, tuple(heads), tuple(h[0] // group for h in heads))
            for (tiling, _), heads in found.items()
        ),
        static.dtype,
        static.causal,
        static.scale,
        0 if isinstance(weight, DecayWeight) else weight.samples,
        weight.start if isinstance(weight, TableWeight) else 0,
        spread.one_by_one and sizes[0] * sizes[1] >= spread.platform.apart,
        self_seeing,
        spread.placed,
    )
