"""The single-pass band kernel of one head: every pair in the band is scored once.

For each chunk of tiles and each block of keys that it visits:

    S = q k^T + bias        P = exp(S - shift) * factor        sums += P 1,  P v

The shift of a row is known beforehand, so that both sums are linear in P: nothing but the inputs of
a step is kept for the backward pass, and forward, reverse and second-order derivatives are JAX's
own. It is 0 where the norms of q and k bound the logits, as they nearly always do; else it is the
row's lse, from a first pass over its visible pairs. Neither carries a derivative: the result does
not depend on it.
"""

import math
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
    scale: float
    dtype: Any
    """Of logits and sums."""
    precision: Any

    @property
    def scales(self) -> tuple[float, float]:
        """Of q and of the products q k.

        Scaled by the power of two within, q keeps its digits: what is exact in bfloat16 stays so.
        """
        mantissa, exponent = math.frexp(self.scale)
        return math.ldexp(1.0, exponent - 1), 2 * mantissa


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
    k: Any,
    v: Any,
    ids: Any,
    weight: Decay | Steps,
    visits: tuple[Any, Any],
    ahead: Any,
    len_k: Any,
    large: Any,
    any_large: Any,
) -> tuple[Any, Any, Any]:
    """Attend from the queries ``(Nq, D)`` of a head to its keys.

    Returns for each row the sum of P ``(Nq,)``, that of P v ``(Nq, Dv)``, and the shift ``(Nq,)``.
    `large` says that the logits of this head are not bounded, `any_large` that those of one that
    runs beside it are not.
    """
    tiling, size = plan.tiling, q.shape[0]

    def lay(q: Any, k: Any, v: Any, weight: Decay | Steps) -> tuple[Own, Keys]:
        q = _pad(q.astype(plan.dtype) * plan.scales[0], 0, tiling.queries - size)
        own_ids, key_ids = (None, (None, None)) if ids is None else (ids[0][0], ids[1])
        own_ids = None if own_ids is None else _pad(own_ids, 0, tiling.queries - size)
        keys = Keys(k.astype(plan.dtype), v.astype(plan.dtype), *key_ids)
        return _by_chunk(tiling, q, own_ids, weight, visits, ahead), keys

    free: tuple[Own, Keys] = jax.tree.map(lax.stop_gradient, lay(q, k, v, weight))
    zero = _zero(free, plan.dtype)
    shift = lax.cond(
        any_large,
        lambda: _shift(plan, *free, len_k, zero),
        lambda: jnp.broadcast_to(zero, free[0].shift.shape),
    )
    shift = jnp.where(large, shift, 0)

    def sums(q: Any, k: Any, v: Any, weight: Decay | Steps) -> tuple[Any, Any]:
        own, keys = lay(q, k, v, weight)
        return _sums(plan, own._replace(shift=shift), keys, len_k, zero)

    total, out = jax.checkpoint(sums, prevent_cse=False)(q, k, v, weight)
    total, out, shift = (
        x.reshape(tiling.queries, *x.shape[3:])[:size] for x in (total, out, shift)
    )
    return total, out, shift


def finish(total: Any, out: Any, shift: Any, real: Any) -> tuple[Any, Any]:
    """Return what the sums of rows come to, and its lse; 0 and -inf in a row that sees no key.

    `real` says which queries are not padding, or is None.
    """
    alive = total > 0 if real is None else (total > 0) & real
    safe = jnp.where(alive, total, 1)
    lse = jnp.where(alive, jnp.log(safe) + shift, -jnp.inf)
    return jnp.where(alive[:, None], out / safe[:, None], 0), lse


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
    if plan.scales[1] != 1:
        s = s * plan.scales[1]
    return (s if pairs.bias is None else s + pairs.bias), pairs


def _dot(a: Any, b: Any, axes: tuple[int, int], precision: Any) -> Any:
    """Multiply tiles: contract an axis of each, the first is the batch."""
    dims = (((axes[0],), (axes[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, precision=precision)


def _by_chunk(
    tiling: Tiling, q: Any, ids: Any, weight: Decay | Steps, visits: Any, ahead: Any
) -> Own:
    """Lay out what the chunks have of their own, with a leading axis of chunks."""
    count, shape = tiling.chunks, (tiling.tiles, tiling.rows)
    x = ahead + tiling.rows * jnp.arange(count * tiling.tiles, dtype=jnp.int32)
    return Own(
        q.reshape(count, *shape, q.shape[-1]),
        None if ids is None else ids.reshape(count, *shape),
        jnp.zeros((count, *shape), q.dtype),
        x.reshape(count, tiling.tiles),
        weight.by_chunk(tiling),
        *visits,
    )


def _walk(tiling: Tiling, own: Own, keys: Keys, fold: Fold, start: Any) -> Any:
    """Fold every chunk over the blocks that it visits; results have a leading axis of chunks."""
    size, rows, width = keys.k.shape[0], tiling.rows, tiling.columns
    before, after = rows, max(tiling.left * width, size + rows) - size
    if tiling.banded:
        before, after = tiling.left * width, tiling.queries + tiling.right * width - size
    keys = jax.tree.map(lambda x: _pad(x, before, after), keys)
    fold = jax.checkpoint(fold, prevent_cse=False, static_argnums=4)

    def chunk(_: Any, own: Own) -> tuple[None, Any]:
        near, origin = keys, -before  # its position
        if tiling.banded:  # gradients by keys are summed within what the chunk reaches
            origin = own.x[0] - before
            reach = tiling.chunk + before + tiling.right * width
            near = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, own.x[0], reach), keys)

        def window(first: Any, columns: int) -> Keys:
            """Return ``(tiles, columns, …)``: for tile t the keys from ``first + t * rows`` on."""
            at = first - origin

            def tiles(x: Any) -> Any:
                if tiling.tiles == 1:
                    return lax.dynamic_slice_in_dim(x, at, columns)[None]
                x = lax.dynamic_slice_in_dim(x, at, tiling.chunk + columns - rows)
                shape = (tiling.tiles, rows, *x.shape[1:])
                parts = (x[i : i + tiling.chunk].reshape(shape) for i in range(0, columns, rows))
                return jnp.concatenate(list(parts), axis=1)

            found: Keys = jax.tree.map(tiles, near)
            return found

        state = start
        # A decay knows its pairs wherever they lie; steps count the diagonal's by themselves.
        if tiling.banded or isinstance(own.weight, Steps):
            # Where a tile overlaps no key, what stands there is hidden.
            first = own.x[0] if tiling.banded else jnp.clip(own.x[0], -rows, size)
            state = fold(state, own, window(first, rows), own.x, DIAGONAL)
        for side, wanted in ((LEFT if tiling.banded else ANYWHERE, own.left), (RIGHT, own.right)):
            if not wanted.size:
                continue

            def step(state: Any, xs: Any, side: int = side) -> tuple[Any, None]:
                wanted, number = xs
                y = first_keys(tiling, own.x, side, number)
                block = window(y[0], width)
                visited = lax.cond(
                    wanted,
                    lambda state: fold(state, own, block, y, side),
                    lambda state: state,
                    state,
                )
                return visited, None

            numbers = jnp.arange(wanted.shape[0], dtype=jnp.int32)
            state = lax.scan(jax.checkpoint(step, prevent_cse=False), state, (wanted, numbers))[0]
        return None, state

    return lax.scan(jax.checkpoint(chunk, prevent_cse=False), None, own)[1]


def _pad(x: Any, before: int, after: int) -> Any:
    """Fill the leading axis up with zeros; a negative number cuts it."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(before, after, 0)] + [(0, 0, 0)] * (x.ndim - 1))
