"""A request as one jitted program and its operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from plsh.backend import AttentionOutput, Request
from plsh.weights import DecayWeight, StepWeight, TableWeight

from ._heads import attend_all
from ._program import Given, Program, program_of
from ._spread import fit, spread_of
from ._steps import bounds, recipe_steps

PROGRAMS = 128
"""Kept at a time. With its derivatives each maps some 300 pieces of memory, of which Linux grants
65530 to a process; the compiler crashes without."""

_made: list[Program] = []  # since they were last forgotten


def attend(q: Any, k: Any, v: Any, request: Request) -> AttentionOutput:
    """Compute attention of checked arrays ``(B, H, N, D)``."""
    spread = spread_of(q, k, v)
    static, arrays = request.static, request.arrays
    weight, ids = static.weight, arrays.segment_ids
    acc = np.dtype("float64" if static.dtype == "float64" else "float32")
    if 0 in (*q.shape[:3], k.shape[2]):
        out = jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
        return AttentionOutput(out, jnp.full(q.shape[:3], -jnp.inf, acc))
    lengths = q.shape[2], k.shape[2]
    sizes = spread.rungs(lengths)
    read = isinstance(weight, StepWeight)
    starts = _start(arrays.q_offset, read), _start(arrays.k_offset, read)
    aligned = arrays.q_offset is arrays.k_offset or (
        all(isinstance(x, np.ndarray) for x in starts) and bool(np.all(starts[0] == starts[1]))
    )
    self_seeing = aligned and lengths[0] == lengths[1] and (ids is None or ids[0] is ids[1])
    reach = bounds(weight, arrays.labels)
    program = program_of(static, sizes, reach, aligned, self_seeing, spread)
    decay, table = isinstance(weight, DecayWeight), isinstance(weight, TableWeight)
    given = Given(
        _slopes(arrays.slopes, acc),
        np.array(weight.bandwidths, np.int32) if decay else None,
        recipe_steps(weight, program.classes, *starts, static.causal)
        if isinstance(weight, StepWeight)
        else None,
        arrays.labels,
        starts[0] if table else None,
        starts[1] if table else None,
        np.int32(0) if aligned else starts[0] - starts[1],
        (np.int32(lengths[0]), np.int32(lengths[1])),
        None if ids is None else _segments(ids, sizes),
    )
    q, k, v = (fit(x, n, 2) for x, n in zip((q, k, v), (sizes[0], sizes[1], sizes[1]), strict=True))
    if spread.eager and len(_made) >= PROGRAMS:
        forget: Any = _run
        forget.clear_cache()
        _made.clear()
    out, lse = _run(program, q, k, v, given)
    return AttentionOutput(fit(out, lengths[0], 2), fit(lse, lengths[0], 2))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _start(offset: Any, read: bool) -> Any:
    """Return an offset as int32; NumPy where its value is known, and to be read."""
    if _is_array(offset) and (isinstance(offset, jax.core.Tracer) or not read):
        return offset.astype(jnp.int32)
    return np.asarray(offset).astype(np.int32)


def _slopes(slopes: Any, acc: Any) -> Any:
    """Return slopes in the accumulation dtype, none so large that a bias overflows."""
    most = float(np.finfo(acc).max) / 2**31
    if isinstance(slopes, tuple):
        return np.minimum(np.array(slopes), most).astype(acc)
    return slopes if slopes is None else jnp.minimum(slopes.astype(acc), most)


def _segments(segment_ids: Any, sizes: tuple[int, int]) -> Any:
    """Return ids and whether each token is not padding, of queries and of keys."""
    # As int32, unequal ids of an unsigned dtype stay unequal, and padding is told apart before.
    wide = jnp.int64 if any(x.dtype.name == "int64" for x in segment_ids) else jnp.int32
    filled = [fit(x, size, 1) for x, size in zip(segment_ids, sizes, strict=True)]
    return tuple((x.astype(wide), x >= 0) for x in filled)


@functools.partial(jax.jit, static_argnums=0)
def _run(program: Program, q: Any, k: Any, v: Any, given: Given) -> tuple[Any, Any]:
    """Compute out ``(B, H, Nq, Dv)`` and lse ``(B, H, Nq)`` of filled-up arrays."""
    _made.append(program)  # while it is traced: once for each program
    run: Any = functools.partial(attend_all, program)
    if program.placed is not None:  # within, JAX places every axis by itself
        mesh: Any = jax.typeof(q).sharding.mesh
        spec: Any = jax.sharding.PartitionSpec
        axes = (*program.placed, None), program.placed
        places = tuple(jax.sharding.NamedSharding(mesh, spec(*x)) for x in axes)
        run = jax.sharding.auto_axes(run, axes=mesh.axis_names, out_sharding=places)
    found: tuple[Any, Any] = run(q, k, v, given)
    return found
