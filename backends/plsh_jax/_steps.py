"""The integers of partitions, made for the tilings of a program: on the host, or from a table.

A recipe's come from the host: when the program is traced where the offsets are known, else while it
runs, by a callback. The labels of a `PartitionSet` are looked up on the device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plsh.weights import StepWeight, TableWeight

from ._partitions import common_bounds, table_bounds
from ._weights import Steps, encode

LAST = 1 << 30


@functools.lru_cache(maxsize=256)
def recipe_bounds(weight: StepWeight) -> tuple[int, ...]:
    """Return for each head a bound of its blocks that other seeds share."""
    begin, end = weight.bounds([LAST // 2])
    return common_bounds((end - begin)[..., 0], weight.bandwidths)


def bounds(weight: Any, labels: Any) -> tuple[int, ...]:
    """Return for each head a bound, in tokens, of how far it reaches."""
    if isinstance(weight, StepWeight):
        return recipe_bounds(weight)
    if isinstance(weight, TableWeight):
        few = weight.bandwidths if labels.shape[0] > 1 else weight.bandwidths[:1]
        found = table_bounds(labels, weight.start, few)
        return found if labels.shape[0] > 1 else found * len(weight.bandwidths)
    known: tuple[int, ...] = weight.bandwidths
    return known


def recipe_steps(
    weight: StepWeight, classes: Any, q_start: Any, k_start: Any, causal: bool
) -> tuple[Steps, ...]:
    """Return the steps of each class, NumPy; with an axis of batch rows if the starts have one.

    Traced starts are read by a callback.
    """
    if isinstance(q_start, jax.core.Tracer) or isinstance(k_start, jax.core.Tracer):
        rows = np.broadcast_shapes(q_start.shape, k_start.shape)
        shapes = tuple(_shapes(c, weight.samples, rows, causal) for c in classes)
        return jax.pure_callback(  # type: ignore[no-any-return]
            lambda q, k: _recipe_rows(weight, classes, np.asarray(q), np.asarray(k), causal),
            shapes,
            q_start,
            k_start,
            vmap_method="sequential",
        )
    return _recipe_rows(weight, classes, q_start, k_start, causal)


def _shapes(own: Any, samples: int, rows: tuple[int, ...], causal: bool) -> Steps:
    tiling, heads = own.tiling, (len(own.heads), len(own.heads[0]))
    tiles = tiling.queries // tiling.rows
    lead = (*rows, *heads, tiles)
    form: Any = jax.ShapeDtypeStruct
    bounds = form((*lead, samples), np.int32)
    code = form((*lead, tiling.rows, samples), np.uint8)
    return Steps(code, bounds, None if causal else bounds)


def _recipe_rows(
    weight: StepWeight, classes: Any, q_start: Any, k_start: Any, causal: bool
) -> tuple[Steps, ...]:
    if np.ndim(q_start) == np.ndim(k_start) == 0:
        return _recipe(weight, classes, int(q_start), int(k_start), causal)
    pairs = zip(*(x.tolist() for x in np.broadcast_arrays(q_start, k_start)), strict=True)
    rows = [_recipe(weight, classes, q, k, causal) for q, k in pairs]
    return jax.tree.map(lambda *x: np.stack(x), *rows)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=8)
def _recipe(
    weight: StepWeight, classes: Any, q_start: int, k_start: int, causal: bool
) -> tuple[Steps, ...]:
    """Encode the labels of one row of queries, class by class."""
    found = []
    for own in classes:
        tiling = own.tiling
        labels = [
            [_labels(weight, q_start, tiling.queries, h) for h in heads] for heads in own.heads
        ]
        ends = None
        if not causal:
            last = q_start + np.arange(tiling.rows - 1, tiling.queries, tiling.rows)
            ends = weight.bounds(np.minimum(last, LAST - 1))[1][np.array(own.heads)]
        found.append(
            encode(np, np.array(labels), ends, np.int32(q_start), np.int32(k_start), tiling.rows)
        )
    return tuple(found)


def _labels(weight: StepWeight, start: int, size: int, head: int) -> Any:
    """Return labels ``(s, size)``, the last repeated where positions end."""
    first = min(start, LAST - 1)
    labels = weight.labels(first, min(start + size, LAST), head) if start < LAST else None
    if labels is None:
        labels = weight.labels(first, LAST, head)
    return np.pad(labels, [(0, 0), (0, size - labels.shape[1])], mode="edge")


def table_steps(
    labels: Any, table_start: int, own: Any, q_start: Any, k_start: Any, causal: bool
) -> Steps:
    """Look the steps of a class up in labels ``(H or 1, s, n)``; starts are () or ``(B,)``."""
    tiling, heads = own.tiling, np.array(own.heads)
    table = labels[np.minimum(heads, labels.shape[0] - 1)]  # (keys, heads, s, n)
    if labels.shape[2] == 0:
        table = jnp.zeros((*table.shape[:3], 1), jnp.int32)
    rows = np.broadcast_shapes(q_start.shape, k_start.shape)
    q_start, k_start = (jnp.broadcast_to(x, rows) for x in (q_start, k_start))

    def row(q_start: Any, k_start: Any) -> Steps:
        at = q_start + jnp.arange(tiling.queries, dtype=jnp.int32)
        found = table[..., jnp.clip(at - table_start, 0, table.shape[-1] - 1)]
        ends = None
        if not causal:
            last = at[tiling.rows - 1 :: tiling.rows]
            flat = table.reshape(-1, table.shape[-1])
            after = jax.vmap(lambda x: jnp.searchsorted(x, last, side="right"))(flat)
            ends = table_start + after.astype(jnp.int32).reshape(*table.shape[:3], -1)
        return encode(jnp, found, ends, q_start, k_start, tiling.rows)

    return jax.vmap(row)(q_start, k_start) if rows else row(q_start, k_start)
