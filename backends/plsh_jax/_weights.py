"""Positional weights of one head, as the kernel applies them to a chunk of tiles and a block.

Both say of each pair of a query and a key which `factor` its exponential has, None for 1, which
`bias` its logit, None for 0, and whether it is `seen`. Positions count from the first key on: x of
a query, y of a key. All integers are int32: without x64 JAX has no others.

A step weight reaches the device as the labels of each tile's rows, cut at the tile and relative to
its first row (`code`), and the bounds of the blocks at its first and last position. By the pivot
lemma (`plsh.tiles`) the counts of a tile and of keys before it are one product of 0/1 matrices, and
so are those of keys after it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._tiling import Tiling

LEFT, DIAGONAL, RIGHT, ANYWHERE = -1, 0, 1, 2
FAR = 1 << 30


class Pairs(NamedTuple):
    """The weight of pairs ``(tiles, rows, columns)``."""

    factor: Any
    bias: Any
    seen: Any


class Decay(NamedTuple):
    """``exp(-slope * distance)`` within a width; leaves are scalars."""

    slope: Any
    width: Any

    def reach(self, first: Any, rows: int) -> tuple[Any, Any]:
        """Return the first and the last position seen from tiles that begin at `first`."""
        width = jnp.minimum(self.width, FAR)
        near = jnp.clip(first, -FAR, FAR - rows)  # no sum leaves int32
        return near - width, near + (rows - 1) + width

    def by_chunk(self, tiling: Tiling) -> "Decay":
        """Return what the chunks see of it, with a leading axis of chunks."""
        count = tiling.chunks
        return Decay(*(jnp.broadcast_to(x, (count,)) for x in self))

    def pairs(self, x: Any, y: Any, exists: Any, side: int, causal: bool, dtype: Any) -> Pairs:
        """Weigh the pairs of queries x ``(tiles, rows)`` and keys y ``(tiles, columns)``."""
        apart = x[:, :, None] - y[:, None, :]
        distance = jnp.abs(apart)
        seen = exists[:, None, :] & (distance <= self.width)
        if causal and side in (DIAGONAL, ANYWHERE):
            seen &= apart >= 0
        return Pairs(None, -self.slope * distance.astype(dtype), seen)


class Steps(NamedTuple):
    """Counts of the partitions in which a pair shares a block.

    With a leading axis of all tiles, or of chunks and their tiles.
    """

    code: Any  # (…, rows, s) uint8: 0 for a block that begins before the tile
    begin: Any  # (…, s): of the blocks at the first position
    end: Any  # (…, s): of the blocks at the last position; None if causal

    def reach(self, first: Any, rows: int) -> tuple[Any, Any]:
        """Return the first and the last position seen from tiles that begin at `first`."""
        last = first + (rows - 1)
        return self.begin.min(axis=-1), last if self.end is None else self.end.max(axis=-1) - 1

    def by_chunk(self, tiling: Tiling) -> "Steps":
        """Return what the chunks see of it, with a leading axis of chunks."""
        shape = (tiling.chunks, tiling.tiles)
        return Steps(*(None if x is None else x.reshape(*shape, *x.shape[1:]) for x in self))

    def pairs(self, x: Any, y: Any, exists: Any, side: int, causal: bool, dtype: Any) -> Pairs:
        """Weigh the pairs of queries x ``(tiles, rows)`` and keys y ``(tiles, columns)``.

        Anywhere, the keys at the positions of the tile itself have no weight.
        """
        if side == DIAGONAL:
            count = jnp.where(exists[:, None, :], self._diagonal(causal, dtype), 0)
            return Pairs(count, None, count > 0)
        near, far, y = [], [], y[:, None, :]
        if side in (LEFT, ANYWHERE):  # pivot: the tile's first position
            near.append(self.code == 0)
            far.append((y >= self.begin[:, :, None]) & (y < x[:, None, :1]))
        if side == RIGHT or (side == ANYWHERE and not causal):  # pivot: its last
            rows = jnp.arange(self.code.shape[1], dtype=jnp.uint8)
            near.append(rows[:, None] >= self.code[:, -1:, :])
            far.append((y < self.end[:, :, None]) & (y > x[:, None, -1:]))
        # 0/1 operands: exact in every format that accumulates in float32.
        count = jax.lax.dot_general(
            jnp.concatenate(near, axis=2).astype(dtype),
            (jnp.concatenate(far, axis=1) & exists[:, None, :]).astype(dtype),
            (((2,), (1,)), ((0,), (0,))),
        )
        return Pairs(count, None, count > 0)

    def _diagonal(self, causal: bool, dtype: Any) -> Any:
        """Count the pairs of each tile with itself ``(tiles, rows, rows)``.

        Row i and column j <= i share a block iff i's begins at or before j.
        """
        rows = self.code.shape[1]
        column = jnp.arange(rows, dtype=jnp.uint8)
        count = jnp.sum(self.code[:, :, None, :] <= column[:, None], axis=-1, dtype=jnp.int32)
        lower = np.tri(rows, dtype=bool)
        if causal:
            return jnp.where(lower, count, 0).astype(dtype)
        return jnp.where(lower, count, count.swapaxes(-1, -2)).astype(dtype)


def encode(xp: Any, labels: Any, ends: Any, first: Any, origin: Any, rows: int) -> Steps:
    """Make the steps of heads from the labels of their queries' positions.

    `labels` ``(…, s, tiles * rows)`` and `ends` ``(…, s, tiles)`` (None if causal) are of `xp`,
    NumPy or JAX; `first` is the position of the first query, `origin` that of the first key.
    """
    labels = xp.moveaxis(labels, -2, -1)  # (…, positions, s)
    tiles = labels.shape[-2] // rows
    labels = labels.reshape(*labels.shape[:-2], tiles, rows, labels.shape[-1])
    start = first + rows * xp.arange(tiles, dtype=xp.int32)[:, None]  # (…, tiles, 1)
    code = xp.clip(labels - start[..., None], 0, rows - 1).astype(xp.uint8)
    begin = labels[..., 0, :] - origin
    if ends is not None:
        ends = xp.moveaxis(ends, -2, -1) - origin
    return Steps(code, begin, ends)


def visits(
    tiling: Tiling, causal: bool, weight: Decay | Steps, ahead: Any, len_k: Any
) -> tuple[Any, Any]:
    """Return which blocks each chunk must visit before and after its tiles.

    Two arrays of bools ``(chunks, blocks)``; where tiles are not banded, all blocks are in the
    first. `ahead` is x of the first query.
    """
    count = tiling.chunks
    tile = tiling.rows * jnp.arange(count * tiling.tiles, dtype=jnp.int32)
    first = ahead + tile
    low, high = weight.reach(first, tiling.rows)
    first, low, high = (x.reshape(count, tiling.tiles)[..., None] for x in (first, low, high))
    last = first + (tiling.rows - 1)
    found = []
    for blocks, side in ((tiling.left, LEFT), (tiling.right, RIGHT)):
        at = first_keys(tiling, first, side, jnp.arange(blocks, dtype=jnp.int32))
        end = at + tiling.columns
        if side == LEFT:
            most = first - 1 if tiling.banded else (last if causal else high)
            seen = (end > jnp.maximum(low, 0)) & (at <= jnp.minimum(most, len_k - 1))
        else:
            seen = (at <= jnp.minimum(high, len_k - 1)) & (end > jnp.maximum(last + 1, 0))
        found.append(seen.any(axis=1))
    return found[0], found[1]


def first_keys(tiling: Tiling, first: Any, side: int, block: Any) -> Any:
    """Return y of the first key of a block, for tiles that begin at `first`."""
    if not tiling.banded:
        return block * tiling.columns + 0 * first
    if side == LEFT:
        return first - (tiling.left - block) * tiling.columns
    return first + tiling.rows + block * tiling.columns
