"""The single-pass band kernel of one head: every pair in the band is scored once.

For each chunk of tiles and each block of keys that it visits:

    S = q k^T + bias        P = exp(S - shift) * factor        sums += P 1,  P v

The shift of a row is known beforehand, so that both sums are linear in P: nothing but the inputs of
a step is kept for the backward pass, and forward, reverse and second-order derivatives are JAX's
own. It is 0 where the norms of q and k bound the logits, as they nearly always do; else it is the
row's lse, from a first pass over its visible pairs. Neither carries a derivative: the result does
not depend on it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._tiling import Tiling
from ._weights import ANYWHERE, DIAGONAL, LEFT, RIGHT, Decay, Steps, first_keys

FLOOR = -1e4
"""A logit whose exponential is 0 in every dtype; -inf would trip ``jax_debug_infs``."""


class Plan(NamedTuple):
    """What is static about a head."""

    tiling: Tiling
    causal: bool
    factor: float
    """Of the products q k; q is scaled by a power of two already."""
    precision: Any


class Keys(NamedTuple):
    """Keys and what goes with them; each has a leading axis of positions, or is None."""

    k: Any
    v: Any
    ids: Any
    alive: Any


class Own(NamedTuple):
    """What a chunk has of its own."""

    q: Any  # (tiles, rows, D)
    ids: Any  # (tiles, rows), or None
    shift: Any  # (tiles, rows)
    x: Any  # (tiles,): of the first query of each tile
    weight: Decay | Steps
    left: Any  # (blocks,) bool: those to visit
    right: Any


Fold = Callable[[Any, Own, Keys, Any, int], Any]


def attend_head(
    plan: Plan,
    q: Any,
    ids: Any,
    keys: Keys,
    weight: Decay | Steps,
    visits: tuple[Any, Any],
    ahead: Any,
    len_k: Any,
    large: Any,
    any_large: Any,
) -> tuple[Any, Any]:
    """Attend from the queries ``(Nq, D)`` of a head to its keys.

    Returns the sums of P v ``(Nq, Dv)`` over those of P, and the log of the latter ``(Nq,)``, -inf
    in a row that sees no key. `large` says that the logits of this head are not bounded,
    `any_large` that those of one that runs beside it are not.
    """
    tiling = plan.tiling
    own = _by_chunk(tiling, q, ids, weight, visits, ahead)
    free: tuple[Own, Keys] = jax.tree.map(lax.stop_gradient, (own, keys))
    zero = _zero(free, q.dtype)
    shift = lax.cond(
        any_large,
        lambda: _shift(plan, *free, len_k, zero),
        lambda: jnp.broadcast_to(zero, own.shift.shape),
    )
    shift = jnp.where(large, shift, 0)
    sums = jax.checkpoint(functools.partial(_sums, plan), prevent_cse=False)
    total, out = sums(own._replace(shift=shift), keys, len_k, zero)
    total, shift, out = (x.reshape(tiling.queries, *x.shape[3:]) for x in (total, shift, out))
    if ids is not None:  # a padding row sees nothing
        total = jnp.where(ids[1], total, 0)
        out = jnp.where(ids[1][:, None], out, 0)
    alive = total > 0
    safe = jnp.where(alive, total, 1)
    lse = jnp.where(alive, jnp.log(safe) + shift, -jnp.inf)
    return out / safe[:, None], lse


def _sums(plan: Plan, own: Own, keys: Keys, len_k: Any, zero: Any) -> tuple[Any, Any]:
    """Return the sums of P ``(chunks, tiles, rows)`` and of P v, of each row."""

    def fold(sums: Any, own: Own, block: Keys, y: Any, side: int) -> Any:
        total, out = sums
        s, pairs = _scores(plan, own, block, y, side, len_k)
        p = jnp.exp(jnp.where(pairs.seen, s - own.shift[:, :, None], FLOOR))
        if pairs.factor is not None:
            p = p * pairs.factor
        step = _dot(p, block.v, (2, 1), plan.precision)
        # A product with ones sums rows in half the time of a reduction.
        ones = jnp.ones(p.shape[::2], p.dtype)
        return total + _dot(p, ones, (2, 1), plan.precision), out + step

    shape = own.q.shape[1:3]
    start = tuple(jnp.broadcast_to(zero, s) for s in (shape, (*shape, keys.v.shape[-1])))
    found: tuple[Any, Any] = _walk(plan.tiling, own, keys, fold, start)
    return found


def _shift(plan: Plan, own: Own, keys: Keys, len_k: Any, zero: Any) -> Any:
    """Return each row's lse ``(chunks, tiles, rows)`` from its visible pairs; 0 for none."""
    low = float(np.finfo(own.q.dtype).min)

    def fold(state: Any, own: Own, block: Keys, y: Any, side: int) -> Any:
        top, total = state
        s, pairs = _scores(plan, own, block, y, side, len_k)
        new = jnp.maximum(top, jnp.where(pairs.seen, s, low).max(axis=-1))
        p = jnp.exp(jnp.where(pairs.seen, s - new[:, :, None], FLOOR))
        if pairs.factor is not None:
            p = p * pairs.factor
        return new, total * jnp.exp(top - new) + p.sum(axis=-1)

    shape = own.q.shape[1:3]
    start = (jnp.broadcast_to(zero + low, shape), jnp.broadcast_to(zero, shape))
    top, total = _walk(plan.tiling, own, keys, fold, start)
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), 0)


def _zero(operands: Any, dtype: Any) -> Any:
    """Return 0, of the same kind under ``shard_map`` as what is computed from the operands.

    Its loops must begin with values that vary over the mesh axes over which their results do.
    """
    firsts = [x.ravel()[0] for x in jax.tree.leaves(operands) if x.size]
    none = jnp.zeros((), dtype)
    return sum((jnp.where(x > 0, none, none) for x in firsts), none)


def _scores(plan: Plan, own: Own, block: Keys, y: Any, side: int, len_k: Any) -> tuple[Any, Any]:
    """Return the logits ``(tiles, rows, columns)``, bias included, and the weight of the pairs."""
    rows = plan.tiling.rows
    x = own.x[:, None] + jnp.arange(rows, dtype=jnp.int32)  # (tiles, rows)
    y = y[:, None] + jnp.arange(block.k.shape[1], dtype=jnp.int32)  # (tiles, columns)
    exists = (y >= 0) & (y < len_k)
    if side == LEFT:
        exists &= y < own.x[:, None]
    elif side == RIGHT:
        exists &= y >= own.x[:, None] + rows
    if block.alive is not None:
        exists &= block.alive
    pairs = own.weight.pairs(x, y, exists, side, plan.causal, own.q.dtype)
    if block.ids is not None:
        same = own.ids[:, :, None] == block.ids[:, None, :]
        factor = None if pairs.factor is None else jnp.where(same, pairs.factor, 0)
        pairs = pairs._replace(seen=pairs.seen & same, factor=factor)
    s = _dot(own.q, block.k, (2, 2), plan.precision)
    if plan.factor != 1:
        s = s * plan.factor
    return (s if pairs.bias is None else s + pairs.bias), pairs


def _dot(a: Any, b: Any, axes: tuple[int, int], precision: Any) -> Any:
    """Multiply tiles: contract an axis of each, the first is the batch."""
    dims = (((axes[0],), (axes[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, precision=precision)


def _by_chunk(
    tiling: Tiling, q: Any, ids: Any, weight: Decay | Steps, visits: Any, ahead: Any
) -> Own:
    """Lay out what the chunks have of their own, with a leading axis of chunks."""
    count, shape = tiling.segments * tiling.chunks, (tiling.tiles, tiling.rows)
    x = ahead + tiling.rows * jnp.arange(count * tiling.tiles, dtype=jnp.int32)
    return Own(
        q.reshape(count, *shape, q.shape[-1]),
        None if ids is None else ids[0].reshape(count, *shape),
        jnp.zeros((count, *shape), q.dtype),
        x.reshape(count, tiling.tiles),
        weight.by_chunk(tiling),
        *visits,
    )


def _walk(tiling: Tiling, own: Own, keys: Keys, fold: Fold, start: Any) -> Any:
    """Fold every chunk over the blocks that it visits; results have a leading axis of chunks."""
    if tiling.banded:
        return _walk_band(tiling, own, keys, fold, start)
    size, width = keys.k.shape[0], tiling.columns
    # A decay knows its pairs wherever they lie; steps count those of the diagonal by themselves.
    has_diagonal = isinstance(own.weight, Steps)
    blocks = jax.tree.map(
        lambda x: _pad(x, 0, tiling.left * width - size).reshape(
            tiling.left, 1, width, *x.shape[1:]
        ),
        keys,
    )
    # The diagonal of a tile that overlaps no key is clamped, and then hidden as such.
    padded = jax.tree.map(lambda x: _pad(x, tiling.rows, tiling.rows), keys)

    def chunk(_: Any, own: Own) -> tuple[None, Any]:
        diagonal = None
        if has_diagonal:
            at = jnp.clip(own.x[0] + tiling.rows, 0, size + tiling.rows)
            diagonal = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, at, tiling.rows)[None], padded
            )
        sides = ((ANYWHERE, blocks, own.left),)
        return None, _visit(tiling, own, diagonal, sides, fold, start)

    return lax.scan(jax.checkpoint(chunk, prevent_cse=False), None, own)[1]


def _walk_band(tiling: Tiling, own: Own, keys: Keys, fold: Fold, start: Any) -> Any:
    """As `_walk`, where key i has the position of query i.

    Each segment of queries has a copy of the keys in its reach, less than twice or (not causal)
    three times the keys in all: gradients by keys are then summed within a segment, and the cost of
    a chunk does not grow with the length.
    """
    before, after = tiling.left * tiling.columns, tiling.right * tiling.columns
    size = tiling.chunk * tiling.chunks  # queries of a segment

    def segments(x: Any) -> Any:
        x = _pad(x, before, tiling.queries + after - x.shape[0])
        ends = size + before + after
        return jnp.stack([x[s * size : s * size + ends] for s in range(tiling.segments)])

    def tiles(x: Any, begin: int, blocks: int, columns: int) -> Any:
        """Return ``(blocks, tiles, columns, …)`` from the keys of a chunk."""
        if tiling.tiles == 1:
            return x[begin : begin + blocks * columns].reshape(blocks, 1, columns, *x.shape[1:])
        # Windows of neighbouring tiles, one block each, overlap.
        rows, parts = tiling.rows, range(begin, begin + columns, tiling.rows)
        shape = (tiling.tiles, rows, *x.shape[1:])
        found = [x[at : at + tiling.chunk].reshape(shape) for at in parts]
        return jnp.concatenate(found, axis=1)[None]

    def segment(_: Any, xs: Any) -> tuple[None, Any]:
        own, keys = xs

        def chunk(_: Any, xs: Any) -> tuple[None, Any]:
            own, number = xs
            width = tiling.chunk + before + after
            near = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, number * tiling.chunk, width), keys
            )
            columns = tiling.columns
            left = jax.tree.map(lambda x: tiles(x, 0, tiling.left, columns), near)
            sides = [(LEFT, left, own.left)]
            if tiling.right:
                begin = before + tiling.rows
                right = jax.tree.map(lambda x: tiles(x, begin, tiling.right, columns), near)
                sides.append((RIGHT, right, own.right))
            diagonal = jax.tree.map(lambda x: tiles(x, before, 1, tiling.rows)[0], near)
            return None, _visit(tiling, own, diagonal, sides, fold, start)

        numbers = jnp.arange(tiling.chunks, dtype=jnp.int32)
        return None, lax.scan(jax.checkpoint(chunk, prevent_cse=False), None, (own, numbers))[1]

    shape = (tiling.segments, tiling.chunks)
    own = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), own)
    found = lax.scan(segment, None, (own, jax.tree.map(segments, keys)))[1]
    count = tiling.segments * tiling.chunks
    return jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), found)


def _visit(
    tiling: Tiling, own: Own, diagonal: Keys | None, sides: Any, fold: Fold, start: Any
) -> Any:
    """Fold one chunk over its diagonal, if there is one, and the blocks to visit of each side."""
    fold = jax.checkpoint(fold, prevent_cse=False, static_argnums=4)
    state = start if diagonal is None else fold(start, own, diagonal, own.x, DIAGONAL)
    for side, blocks, wanted in sides:

        def step(state: Any, xs: Any, side: int = side) -> tuple[Any, None]:
            block, wanted, number = xs
            y = first_keys(tiling, own.x, side, number)
            visited = lax.cond(
                wanted,
                lambda state: fold(state, own, block, y, side),
                lambda state: state,
                state,
            )
            return visited, None

        numbers = jnp.arange(wanted.shape[0], dtype=jnp.int32)
        state = lax.scan(step, state, (blocks, wanted, numbers))[0]
    return state


def _pad(x: Any, before: int, after: int) -> Any:
    """Fill the leading axis up with zeros; a negative number cuts it."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(before, after, 0)] + [(0, 0, 0)] * (x.ndim - 1))
