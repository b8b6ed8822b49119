"""Tiles timed on the device in place of the frozen table's; only where they are asked for.

With ``PLSH_TORCH_AUTOTUNE=1`` the first call of a kind runs each kernel under the tiles of the
table that may serve it, and keeps the fastest for the life of the process. The tile decides the
order of sums, so that results of two processes may then differ in their last bits.
"""

import os
from collections.abc import Callable, Hashable

import torch

from ._plan import CLASSES, GROUPS, Tile
from ._tiles import TILES

REPEATS = 3
CHOSEN: dict[Hashable, Tile] = {}


def wanted() -> bool:
    """Whether the environment asks for it."""
    return os.environ.get("PLSH_TORCH_AUTOTUNE", "0") not in ("", "0")


def candidates(
    kernel: str, dtype: str, step: bool, segments: bool, dim: int, generation: int
) -> list[Tile]:
    """Return the tiles that neither spill nor lack memory: those of calls that need no less."""
    place = next(i for i, bound in enumerate(CLASSES) if dim <= bound)
    found = [
        tile
        for (name, group, is_step, has_segments), classes in TILES[generation].items()
        if (name, group) == (kernel, GROUPS[dtype]) and is_step >= step and has_segments >= segments
        for tile in classes[place:]
    ]
    return [Tile(*tile) for tile in dict.fromkeys(found)]


def fastest(key: Hashable, tiles: list[Tile], run: Callable[[Tile], object]) -> Tile:
    """Return the tile under which `run` takes the least time, of calls with that key."""
    if key not in CHOSEN:
        CHOSEN[key] = min(tiles, key=lambda tile: milliseconds(lambda: run(tile)))
    return CHOSEN[key]


def milliseconds(run: Callable[[], object]) -> float:
    """Return the shortest time of some runs on the current stream, after one that compiles."""
    run()
    found: list[float] = []
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    for _ in range(REPEATS):
        begin, end = (event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found)
