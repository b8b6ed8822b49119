"""The two kinds of positional weight that a backend is handed, as recipes.

Every method is attention under a weight that vanishes outside a band. `DecayWeight` is
``exp(-slope * distance)`` up to a width; `StepWeight` and `TableWeight` count shared blocks. All
are hashable and hold no arrays: a backend evaluates the integers when it needs them, on the host.
"""

import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .hashing import Bins, Cuts, Family, IntArray, Seed
from .partition import MAX_POSITION

__all__ = ["UNLIMITED", "DecayWeight", "StepWeight", "TableWeight", "Weight", "block_range"]

UNLIMITED = (1 << 31) - 1
"""A bandwidth that no distance exceeds."""


@dataclass(frozen=True, slots=True)
class DecayWeight:
    """``exp(-slope * distance)`` for distances up to `bandwidths`, 0 beyond: exact and window.

    The slopes are an operand (`plsh.backend.Operands`), so that they may be traced.

    Parameters
    ----------
    bandwidths : tuple of int
        For each head the largest distance in tokens that has weight; `UNLIMITED` for no limit.
    """

    bandwidths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepWeight:
    """(Number of the s partitions in which two positions share a block) / s: the recipe.

    Parameters
    ----------
    family : Family
        The hash family, parameters included.
    samples : int
        Partitions per head, s.
    sampler : str or None
        "iid", "stratified", or None where the family has none.
    seed : int or tuple of int
    head_ids : tuple of int
        The stream of each head.
    """

    family: Family
    samples: int
    sampler: str | None
    seed: Seed
    head_ids: tuple[int, ...]

    def labels(self, start: int, stop: int, head: int | None = None) -> IntArray:
        """Return the labels of positions ``[start, stop)``, int32, read-only.

        ``(heads, s, n)``, or ``(s, n)`` of one head. A position below 0 (padding) has the label of
        position 0.
        """
        return _LABELS.get(self, start, stop, head)

    def bounds(self, positions: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return (first position, position after the last) of the blocks at `positions`.

        Two int32 arrays ``(heads, s, len(positions))``.
        """
        return _draw(self).bounds(np.asarray(positions, dtype=np.int64))

    @property
    def bandwidths(self) -> tuple[int, ...]:
        """For each head a distance that no block exceeds, at any position."""
        return _bandwidths(self)

    @property
    def bins(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Widths W and shifts S of blocks of equal width, as in HSH-4; None for other families.

        Two int64 arrays ``(heads, s)`` in units of 2^-24 token, for backends that find blocks on
        the device.
        """
        drawn = _draw(self)
        return (drawn.width, drawn.shift) if isinstance(drawn, Bins) else None


@dataclass(frozen=True, slots=True)
class TableWeight:
    """As `StepWeight`, of a ready `PartitionSet`: its labels are an operand.

    Parameters
    ----------
    samples : int
        Partitions per head, s.
    start, stop : int
        Range of positions of the labels ``(heads or 1, s, stop - start)``.
    bandwidths : tuple of int
        For each attention head a distance that no block exceeds.
    """

    samples: int
    start: int
    stop: int
    bandwidths: tuple[int, ...]


Weight: TypeAlias = DecayWeight | StepWeight | TableWeight


def block_range(weight: Weight) -> tuple[int, int] | None:
    """Return the range of positions in which a weight has blocks; None for a decay."""
    if isinstance(weight, DecayWeight):
        return None
    return (weight.start, weight.stop) if isinstance(weight, TableWeight) else (0, MAX_POSITION)


@functools.lru_cache(maxsize=256)
def _draw(weight: StepWeight) -> Bins | Cuts:
    """Draw the integers of a recipe; a few per head and sample, whatever the length."""
    return weight.family.hash(weight.samples, weight.sampler, weight.seed, weight.head_ids)


@functools.lru_cache(maxsize=256)
def _bandwidths(weight: StepWeight) -> tuple[int, ...]:
    return _draw(weight).bandwidth()


class _LabelCache:
    """Labels lately asked for, least recently used out first, bounded in bytes; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[Any, IntArray] = OrderedDict()
        self._bytes = 0

    def get(self, weight: StepWeight, start: int, stop: int, head: int | None) -> IntArray:
        key = (weight, start, stop, head)
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        drawn = _draw(weight)  # outside the lock: two threads may both draw
        if head is None:
            labels = drawn.labels(start, stop)
        else:
            labels = drawn.head(head).labels(start, stop)[0]
        labels.flags.writeable = False
        with self._lock:
            if key not in self._held and self._cost(labels) <= self._max_bytes:
                self._held[key] = labels
                self._bytes += self._cost(labels)
                while self._bytes > self._max_bytes:
                    self._bytes -= self._cost(self._held.popitem(last=False)[1])
        return labels

    @staticmethod
    def _cost(labels: IntArray) -> int:
        return labels.nbytes + 512  # with the key and the array's own header


_LABELS = _LabelCache(max_bytes=1 << 26)
