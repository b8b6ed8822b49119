"""How a kernel is cut: a frozen table of tiles, by the generation of the device.

`_tiles` has the table: the first tiles in a list of preferences whose kernels spill no registers.
``python tools/choose_tiles.py`` makes it anew.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ._tiles import TILES

__all__ = ["MAX_DIMS", "Tile", "block_of", "every_tile", "generation_of", "tile_for"]

MAX_DIMS = {"float16": 256, "bfloat16": 256, "float32": 256, "float64": 128}
"""Largest D and Dv, by dtype."""
CLASSES = (64, 128, 256)
"""Bounds of the head dims that tiles are chosen for."""
GROUPS = {"float16": "half", "bfloat16": "half", "float32": "single", "float64": "double"}
"""Dtypes that share tiles."""
SMALLEST = 16
"""Inner size of a product, at least."""


class Tile(NamedTuple):
    """The tokens that a program owns and visits at a time, its warps, and the stages of loads."""

    rows: int
    columns: int
    warps: int
    stages: int


def block_of(dim: int) -> int:
    """Return the power of 2 that holds a head dim."""
    return max(SMALLEST, 1 << max(dim - 1, 0).bit_length())


def generation_of(capability: tuple[int, int]) -> int:
    """Return the compute capability, such as 90, whose tiles serve a device.

    Devices of 12.x have the shared memory and the products of 8.x.
    """
    major = capability[0]
    return {9: 90, 10: 100, 11: 100}.get(major, 80)


def tile_for(
    kernel: str, dtype: str, step: bool, segments: bool, dim: int, generation: int = 90
) -> Tile:
    """Return the tile of a kernel for the larger head dim.

    Raises ValueError for head dims beyond `MAX_DIMS`.
    """
    if dim > MAX_DIMS[dtype]:
        raise ValueError(f"head dims of {dtype} must be at most {MAX_DIMS[dtype]}, got {dim}")
    place = next(i for i, bound in enumerate(CLASSES) if dim <= bound)
    return Tile(*TILES[generation][kernel, GROUPS[dtype], step, segments][place])


def every_tile() -> Iterator[Tile]:
    """Return all tiles of the table."""
    for table in TILES.values():
        for classes in table.values():
            yield from (Tile(*tile) for tile in classes)
