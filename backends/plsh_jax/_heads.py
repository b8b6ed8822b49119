"""The heads of a call over the kernel: one after another, or those of a class side by side."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ._band import Plan, attend_head, finish
from ._program import Class, Given, Program
from ._spread import over
from ._steps import table_steps
from ._tiling import Tiling
from ._weights import Decay, Steps, visits

UNBOUNDED = {"float32": (27.0, 1e-12, 1e12), "float64": (300.0, 1e-100, 1e100)}
"""Logits within need no shift, if the largest value lies between the other two, or is 0."""

SUMS = "plsh sums"
KEPT = jax.checkpoint_policies.save_only_these_names(SUMS)
"""What is kept of a head for the backward pass, besides its inputs."""


def attend_all(program: Program, q: Any, k: Any, v: Any, given: Given) -> tuple[Any, Any]:
    """Compute out ``(B, H, Nq, Dv)`` and lse ``(B, H, Nq)``."""
    if given.ids is not None:  # what stands in padding must not spread
        real_q, real_k = (ids[1][:, None, :, None] for ids in given.ids)
        q, k, v = jnp.where(real_q, q, 0), jnp.where(real_k, k, 0), jnp.where(real_k, v, 0)
    large = _is_large(program, q, k, v, given)
    weights = [weight_of(program, own, number, given) for number, own in enumerate(program.classes)]
    run = _one_by_one if program.one_by_one else _side_by_side
    return run(program, weights, q, k, v, large, given)


def _one_by_one(
    program: Program, weights: Any, q: Any, k: Any, v: Any, large: Any, given: Given
) -> tuple[Any, Any]:
    """Compute row after row, in it head after head, each by the branch of its class."""
    batch, count = q.shape[:2]
    shape = (k.shape[1], count // k.shape[1])
    which, place = np.zeros(count, np.int32), np.zeros((count, 2), np.int32)
    for number, own in enumerate(program.classes):
        for at, h in np.ndenumerate(np.array(own.heads)):
            which[h], place[h] = number, at

    def branch(
        number: int, row: Any, place: Any, ahead: Any, large: Any, q: Any, k: Any, v: Any, ids: Any
    ) -> Any:
        tiling, (weight, by_row) = program.classes[number].tiling, weights[number]
        at, len_k = (*((row,) if by_row else ()), place[0], place[1]), given.lengths[1]
        weight = jax.tree.map(lambda x: x[at], weight)
        seen = visits(tiling, program.causal, weight, ahead, len_k)
        plan = _plan(program, tiling)
        return attend_head(plan, q, k, v, ids, weight, seen, ahead, len_k, large, large)

    def head(q: Any, k: Any, v: Any, ids: Any, ahead: Any, large: Any, row: Any, *at: Any) -> Any:
        branches = [functools.partial(branch, number) for number in range(len(weights))]
        own = row, at[1], ahead, large, q, k, v, ids
        sums = lax.switch(at[0], branches, *own) if len(branches) > 1 else branches[0](*own)
        return _finish(program, sums, q, ids, given.lengths[0])

    moved = jnp.ndim(given.ahead) > 0
    #        q     k      v      ids    ahead  large row   which  place
    heads = (True, False, False, False, False, True, False, True, True)
    keys = (True, True, True, False, False, True, False, True, True)
    rows = (True, True, True, True, moved, True, True, False, False)
    run: Any = jax.checkpoint(head, prevent_cse=False, policy=KEPT)
    for mapped in (heads, keys, rows):
        run = over(run, mapped, True)
    found: tuple[Any, Any] = run(
        q.reshape(batch, *shape, *q.shape[2:]), k, v, given.ids, given.ahead,
        large.reshape(batch, *shape), np.arange(batch),
        which.reshape(shape), place.reshape(*shape, 2),
    )  # fmt: skip
    out, lse = (x.reshape(batch, count, *x.shape[3:]) for x in found)
    return out, lse


def _side_by_side(
    program: Program, weights: Any, q: Any, k: Any, v: Any, large: Any, given: Given
) -> tuple[Any, Any]:
    """Compute all rows and heads of a class together, class by class."""
    outs, lses = {}, {}
    for own, (weight, by_row) in zip(program.classes, weights, strict=True):
        out, lse = _attend_class(program, own, weight, by_row, q, k, v, large, given)
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
    program: Program,
    own: Class,
    weight: Decay | Steps,
    by_row: bool,
    q: Any,
    k: Any,
    v: Any,
    large: Any,
    given: Given,
) -> tuple[Any, Any]:
    """Compute one class: out ``(B, keys, heads, Nq, Dv)`` and lse."""
    shape = (len(own.heads), len(own.heads[0]))
    q = _pick(q, tuple(h for heads in own.heads for h in heads))
    q = q.reshape(q.shape[0], *shape, *q.shape[2:])
    k, v = _pick(k, own.keys), _pick(v, own.keys)
    large = large[:, np.array(own.heads)]  # (B, keys, heads)
    ahead, moved, len_k = given.ahead, jnp.ndim(given.ahead) > 0, given.lengths[1]

    look: Any = functools.partial(visits, own.tiling, program.causal)
    for which in ((True, False, False),) * 2 + ((by_row, moved, False),):
        look = over(look, which, False) if any(which) else look
    seen = look(weight, ahead, len_k)  # (B if they differ, keys, heads, chunks, blocks)
    # A block is visited by all or by none.
    seen = jax.tree.map(lambda x: x.any(axis=tuple(range(x.ndim - 2))), seen)
    any_large, plan = large.any(), _plan(program, own.tiling)

    def head(q: Any, k: Any, v: Any, ids: Any, weight: Any, ahead: Any, large: Any) -> Any:
        sums = attend_head(plan, q, k, v, ids, weight, seen, ahead, len_k, large, any_large)
        return _finish(program, sums, q, ids, given.lengths[0])

    #        q     k      v      ids    weight ahead  large
    heads = (True, False, False, False, True, False, True)
    keys = (True, True, True, False, True, False, True)
    rows = (True, True, True, True, by_row, moved, True)
    run: Any = jax.checkpoint(head, prevent_cse=False, policy=KEPT)
    for mapped in (heads, keys, rows):
        run = over(run, mapped, False)
    found: tuple[Any, Any] = run(q, k, v, given.ids, weight, ahead, large)
    return found


def _finish(program: Program, sums: Any, q: Any, ids: Any, len_q: Any) -> tuple[Any, Any]:
    """Return a head's out ``(Nq, Dv)`` in the dtype of q, and its lse."""
    name: Any = checkpoint_name
    total, out, shift = (name(x, SUMS) for x in sums)
    # Rows that fill a length up may lie so far off that a derivative of theirs is 0 times infinity.
    total = jnp.where(jnp.arange(q.shape[0], dtype=jnp.int32) < len_q, total, 1)
    out, lse = finish(total, out, shift, None if ids is None else ids[0][1])
    return out.astype(q.dtype), lse - math.log(program.samples) if program.samples else lse


def _plan(program: Program, tiling: Tiling) -> Plan:
    # Half the digits of float32 would do for bfloat16, which every platform multiplies exactly.
    precision = None if program.dtype == "bfloat16" else lax.Precision.HIGHEST
    acc = jnp.float64 if program.dtype == "float64" else jnp.float32
    return Plan(tiling, program.causal, program.scale, acc, precision)


def weight_of(
    program: Program, own: Class, number: int, given: Given
) -> tuple[Decay | Steps, bool]:
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


def _is_large(program: Program, q: Any, k: Any, v: Any, given: Given) -> Any:
    """Return whether the logits of a head need a shift ``(B, H)``."""
    limit, least, most = UNBOUNDED["float64" if program.dtype == "float64" else "float32"]
    acc = jnp.float64 if program.dtype == "float64" else jnp.float32
    group = q.shape[1] // k.shape[1]

    def norm(x: Any) -> Any:
        x = lax.stop_gradient(x).astype(acc)
        return jnp.sqrt((x * x).sum(axis=-1).max(axis=-1))

    bound = norm(q) * jnp.repeat(norm(k), group, axis=1) * abs(program.scale)
    if program.samples == 0 and not program.self_seeing:
        # Of the exponent of the nearest key: without segments it is the nearest that exists.
        width, (len_q, len_k) = given.widths, given.lengths
        if given.ids is None:
            after = jnp.maximum(given.ahead + (len_q - 1) - (len_k - 1), 0)
            before = jnp.int32(0) if program.causal else jnp.maximum(-given.ahead, 0)
            width = jnp.minimum(width, jnp.maximum(after, before)[..., None])
        bound = bound + lax.stop_gradient(given.slopes) * width.astype(acc)
    size = jnp.abs(lax.stop_gradient(v)).max(axis=(-1, -2), initial=0).astype(acc)
    usual = (size == 0) | ((size >= least) & (size <= most))
    return ~((bound < limit) & jnp.repeat(usual, group, axis=1))  # a NaN is large


def _pick(x: Any, heads: tuple[int, ...]) -> Any:
    """Return some heads of ``(B, H, …)``; all of them as they are."""
    if heads == tuple(range(x.shape[1])):
        return x
    if heads == tuple(range(heads[0], heads[-1] + 1)):
        return lax.slice_in_dim(x, heads[0], heads[-1] + 1, axis=1)
    return x[:, np.array(heads)]
