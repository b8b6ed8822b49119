"""How a head's queries and keys are cut into tiles: static numbers, one frozen table a platform.

A *chunk* is `tiles` consecutive tiles of `rows` queries. Each tile visits the keys at its own
positions (its diagonal), then blocks of `columns` keys before it and, unless causal, after it.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["PLATFORMS", "Platform", "Tiling", "length_rung", "round_up", "rung"]


class Size(NamedTuple):
    """Tiles for heads that reach up to `reach` keys to a side."""

    reach: int
    rows: int
    tiles: int
    columns: int


@dataclass(frozen=True, slots=True)
class Platform:
    """What suits one platform.

    Attributes
    ----------
    sizes : tuple of Size
        By growing reach; the last serves all that reach further.
    apart : int
        Heads of at least so many pairs of a query and a key run one after another, and batch rows,
        too, each in the cache; others side by side, in a program that compiles in half the time.
    """

    sizes: tuple[Size, ...]
    apart: int


_PARALLEL = Platform((Size(256, 64, 8, 256), Size(1 << 31, 128, 1, 256)), apart=1 << 62)

PLATFORMS = MappingProxyType(
    {
        "cpu": Platform(
            (Size(64, 64, 16, 64), Size(192, 64, 16, 192), Size(1 << 31, 192, 1, 192)),
            apart=1 << 17,
        ),
        "gpu": _PARALLEL,
        "tpu": _PARALLEL,
    }
)
"""Measured on CPU; what is given for the others suits matrix units of 128."""

_LONGEST = 512
"""Columns, at most: a product that adds up more keys in turn loses digits."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The static shape of one head's work; heads of equal tiling share one program.

    Attributes
    ----------
    rows, tiles, columns : int
        Queries of a tile, tiles of a chunk, keys of a block.
    left, right : int
        Blocks of keys before and after each tile; where not banded, all blocks are in the first.
    chunks : int
        Chunks of a head.
    banded : bool
        Whether blocks lie relative to the tile; else each chunk walks over all keys.
    """

    rows: int
    tiles: int
    columns: int
    left: int
    right: int
    chunks: int
    banded: bool

    @property
    def queries(self) -> int:
        """Queries of the head, filled up."""
        return self.chunk * self.chunks

    @property
    def chunk(self) -> int:
        """Queries of a chunk."""
        return self.rows * self.tiles

    @classmethod
    def of(
        cls,
        lengths: tuple[int, int],
        reach: int,
        causal: bool,
        aligned: bool,
        platform: Platform,
    ) -> "Tiling":
        """Choose for a head that reaches `reach` keys to a side.

        `aligned` says that query i and key i have one position.
        """
        len_q, len_k = lengths
        reach = min(reach, len_k)
        size = next(s for s in platform.sizes if reach <= s.reach or s is platform.sizes[-1])
        columns, blocks = size.columns, 1
        while blocks * columns < reach:  # coarsely, so that few tilings serve all heads
            blocks *= 4
        span = columns * blocks * (1 if causal else 2) + size.rows
        if aligned and 2 * span <= len_k and len_q > size.rows:
            chunks = -(-len_q // (size.rows * size.tiles))
            right = 0 if causal else blocks
            return cls(size.rows, size.tiles, columns, blocks, right, chunks, True)
        last = platform.sizes[-1]
        rows = min(last.rows, 1 << max(len_q - 1, 0).bit_length())
        columns = min(last.columns * last.rows // rows, _LONGEST, round_up(max(len_k, 1), 64))
        blocks = -(-len_k // columns)
        return cls(rows, 1, columns, blocks, 0, max(1, -(-len_q // rows)), False)


def round_up(x: int, unit: int) -> int:
    """Round up to a multiple."""
    return -(-x // unit) * unit


def length_rung(n: int) -> int:
    """Round a length up, so that calls of other lengths share a program: by an eighth at most.

    Below 512 tokens, where programs take longer to compile than to run, there are few rungs.
    """
    if n <= 64:
        return next(size for size in (1, 16, 64) if n <= size)
    return max(round_up(n, 64), rung(n, 8))


def rung(x: int, steps: int) -> int:
    """Round up to a geometric ladder of `steps` rungs an octave; a rung stays as it is."""
    if x <= steps:
        return x
    unit = (1 << (x - 1).bit_length()) // (2 * steps)
    return round_up(x, unit)
