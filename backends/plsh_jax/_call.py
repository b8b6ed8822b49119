"""A request as one jitted program: classes of heads of equal tiling, each mapped over the kernel.

What is static about a program is a hashable `Program`; everything else reaches it as arrays, so
that other seeds, slopes, offsets and lengths of the same rung run without compiling.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from plsh.backend import AttentionOutput, Request, Static
from plsh.weights import DecayWeight, StepWeight, TableWeight

from ._band import Keys, Plan, attend_head
from ._spread import Spread, fit, over, spread_of
from ._steps import bounds, recipe_steps, table_steps
from ._tiling import Tiling
from ._weights import Decay, Steps, visits

UNBOUNDED = {"float32": (27.0, 1e-12, 1e12), "float64": (300.0, 1e-100, 1e100)}
"""Logits within need no shift, if the largest value lies between the other two, or is 0."""


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
    program = _program(static, sizes, reach, aligned, self_seeing, spread)
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


@functools.lru_cache(maxsize=512)
def _program(
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


@functools.partial(jax.jit, static_argnums=0)
def _run(program: Program, q: Any, k: Any, v: Any, given: Given) -> tuple[Any, Any]:
    """Compute out ``(B, H, Nq, Dv)`` and lse ``(B, H, Nq)`` of filled-up arrays."""
    run: Any = functools.partial(_attend_all, program)
    if program.placed is not None:  # within, JAX places every axis by itself
        mesh: Any = jax.typeof(q).sharding.mesh
        spec: Any = jax.sharding.PartitionSpec
        axes = (*program.placed, None), program.placed
        places = tuple(jax.sharding.NamedSharding(mesh, spec(*x)) for x in axes)
        run = jax.sharding.auto_axes(run, axes=mesh.axis_names, out_sharding=places)
    found: tuple[Any, Any] = run(q, k, v, given)
    return found


def _attend_all(program: Program, q: Any, k: Any, v: Any, given: Given) -> tuple[Any, Any]:
    outs, lses = {}, {}
    for number, own in enumerate(program.classes):
        out, lse = _attend_class(program, own, number, q, k, v, given)
        for i, heads in enumerate(own.heads):
            for j, h in enumerate(heads):
                outs[h], lses[h] = (out, i, j), (lse, i, j)
    return _in_order(outs), _in_order(lses)


def _in_order(parts: dict[int, Any]) -> Any:
    """Put heads of classes ``(B, keys, heads, …)`` in order: ``(B, H, …)``."""
    first, count = parts[0][0], len(parts)
    shape = first.shape
    whole = [(h // shape[2], h % shape[2]) for h in range(count)]
    if shape[1] * shape[2] == count and [parts[h][1:] for h in range(count)] == whole:
        return first.reshape(shape[0], count, *shape[3:])
    return jnp.stack([parts[h][0][:, parts[h][1], parts[h][2]] for h in range(count)], axis=1)


def _attend_class(
    program: Program, own: Class, number: int, q: Any, k: Any, v: Any, given: Given
) -> tuple[Any, Any]:
    """Compute one class: out ``(B, keys, heads, Nq, Dv)`` and lse."""
    shape = (len(own.heads), len(own.heads[0]))
    q = _pick(q, tuple(h for heads in own.heads for h in heads))
    q = q.reshape(q.shape[0], *shape, *q.shape[2:])
    k, v = _pick(k, own.keys), _pick(v, own.keys)
    if given.ids is not None:  # what stands in padding must not spread
        real_q, real_k = given.ids[0][1], given.ids[1][1]
        q = jnp.where(real_q[:, None, None, :, None], q, 0)
        k, v = (jnp.where(real_k[:, None, :, None], x, 0) for x in (k, v))
    weight, by_row = _weight(program, own, number, given)
    ahead, moved = given.ahead, jnp.ndim(given.ahead) > 0
    apart, together = program.one_by_one, not program.one_by_one

    look: Any = functools.partial(visits, own.tiling, program.causal)
    for which in ((True, False, False),) * 2 + ((by_row, moved, False),):
        look = over(look, which, False) if any(which) else look
    seen = look(weight, ahead, given.lengths[1])  # (B if they differ, keys, heads, chunks, blocks)
    large = _is_large(program, q, k, v, weight, given)  # (B, keys, heads)
    if together:  # a block is visited by all or by none
        seen = jax.tree.map(lambda x: x.any(axis=tuple(range(x.ndim - 2))), seen)
    any_large = large if apart else large.any()

    run: Any = functools.partial(_attend_one, program, own.tiling, given.lengths[1])
    #        q     k      v      ids    weight seen ahead  large any_large
    heads = (True, False, False, False, True, apart, False, True, apart)
    keys = (True, True, True, False, True, apart, False, True, apart)
    rows = (True, True, True, True, by_row, apart and (by_row or moved), moved, True, apart)
    for mapped in (heads, keys, rows):
        run = over(run, mapped, apart)
    out, lse = run(q, k, v, given.ids, weight, seen, ahead, large, any_large)
    return out, lse


def _attend_one(
    program: Program,
    tiling: Tiling,
    len_k: Any,
    q: Any,
    k: Any,
    v: Any,
    ids: Any,
    weight: Decay | Steps,
    seen: Any,
    ahead: Any,
    large: Any,
    any_large: Any,
) -> tuple[Any, Any]:
    """Run the kernel on one head: out ``(Nq, Dv)`` in q's dtype, and lse."""
    dtype, size = q.dtype, q.shape[0]
    acc = jnp.float64 if program.dtype == "float64" else jnp.float32
    # Scaled by the power of two within, q keeps its digits: what is exact in bfloat16 stays so.
    mantissa, exponent = math.frexp(program.scale)
    q = q.astype(acc) * math.ldexp(1.0, exponent - 1)
    more = tiling.queries - size
    q = jnp.pad(q, ((0, more), (0, 0)))
    keys, own = Keys(k.astype(acc), v.astype(acc), None, None), None
    if ids is not None:
        own = tuple(jnp.pad(x, (0, more)) for x in ids[0])
        keys = keys._replace(ids=ids[1][0], alive=ids[1][1])
    # Half the digits of float32 would do for bfloat16, which every platform multiplies exactly.
    precision = None if program.dtype == "bfloat16" else lax.Precision.HIGHEST
    plan = Plan(tiling, program.causal, 2 * mantissa, precision)
    out, lse = attend_head(plan, q, own, keys, weight, seen, ahead, len_k, large, any_large)
    if program.samples:
        lse = lse - math.log(program.samples)
    return out[:size].astype(dtype), lse[:size]


def _weight(program: Program, own: Class, number: int, given: Given) -> tuple[Decay | Steps, bool]:
    """Return the weight of a class's heads ``(keys, heads, …)``, and whether rows differ in it.

    If they do, it has an axis of batch rows before.
    """
    if program.samples == 0:
        heads = np.array(own.heads)
        slope = given.slopes[..., heads]
        return Decay(slope, jnp.broadcast_to(given.widths[heads], slope.shape)), slope.ndim == 3
    if given.steps is not None:
        steps = given.steps[number]
    else:
        starts = given.q_start, given.k_start
        steps = table_steps(given.labels, program.table_start, own, *starts, program.causal)
    return steps, steps.begin.ndim == 5


def _is_large(program: Program, q: Any, k: Any, v: Any, weight: Any, given: Given) -> Any:
    """Return whether the logits of a head need a shift ``(B, keys, heads)``."""
    limit, least, most = UNBOUNDED["float64" if program.dtype == "float64" else "float32"]
    acc = jnp.float64 if program.dtype == "float64" else jnp.float32

    def norm(x: Any) -> Any:
        x = lax.stop_gradient(x).astype(acc)
        return jnp.sqrt((x * x).sum(axis=-1).max(axis=-1))

    bound = norm(q) * norm(k)[:, :, None] * abs(program.scale)
    if program.samples == 0:
        # Of the exponent of the nearest key: without segments it is the nearest that exists.
        len_q, len_k = given.lengths
        width = weight.width
        if not program.self_seeing:
            ahead = given.ahead
            if given.ids is None:
                after = jnp.maximum(ahead + (len_q - 1) - (len_k - 1), 0)
                before = jnp.int32(0) if program.causal else jnp.maximum(-ahead, 0)
                apart = jnp.maximum(after, before)
                apart = apart[:, None, None] if jnp.ndim(apart) else apart
                width = jnp.minimum(width, apart)
            bound = bound + lax.stop_gradient(weight.slope) * width.astype(acc)
    size = jnp.abs(lax.stop_gradient(v)).max(axis=(-1, -2), initial=0).astype(acc)[:, :, None]
    usual = (size == 0) | ((size >= least) & (size <= most))
    return ~((bound < limit) & usual)  # a NaN is large


def _pick(x: Any, heads: tuple[int, ...]) -> Any:
    """Return some heads of ``(B, H, …)``; all of them as they are."""
    if heads == tuple(range(x.shape[1])):
        return x
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return lax.slice_in_dim(x, heads[0], heads[-1] + 1, axis=1)
    return x[:, np.array(heads)]
