"""Where the arrays live, and what follows: how lengths are rounded, and which axes may be cut up.

On one device heads of one tiling run together, and on a CPU one by one. A head axis that may be
spread over devices is never cut: all heads then run side by side as the widest does, so that no
device asks another for keys. Whether it may be is read from the arrays' sharding where that is
known (concrete arrays; explicit mesh axes) and assumed where it is not (automatic axes, traced).
Inside ``shard_map`` an array is what one device has of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._tiling import PLATFORMS, Platform, length_rung


class Spread(NamedTuple):
    """How a call is to be cut."""

    platform: Platform
    by_heads: bool
    """Whether heads of different tiling may be cut apart."""
    one_by_one: bool
    """Whether heads may run one after another."""
    eager: bool
    """Whether lengths are rounded up, so that calls of other lengths share a program."""
    placed: tuple[Any, ...] | None
    """The mesh axes of B, H and N of q, where they are explicit."""

    def rungs(self, lengths: tuple[int, int]) -> tuple[int, int]:
        """Round the lengths up to a ladder, if the call compiles a program of its own."""
        if not self.eager:
            return lengths
        return length_rung(lengths[0]), length_rung(lengths[1])


def spread_of(q: Any, *others: Any) -> Spread:
    """Read from the arrays how a call is to be cut."""
    traced = any(isinstance(x, jax.core.Tracer) for x in (q, *others))
    if traced:
        platform, sharding = jax.default_backend(), getattr(jax.typeof(q), "sharding", None)
    else:
        platform, sharding = next(iter(q.devices())).platform, q.sharding
    table = PLATFORMS[platform if platform in PLATFORMS else "gpu"]
    # Derivatives are traced, too; but only while a program is being made, so is a new constant.
    eager = not traced or not isinstance(jnp.zeros(()), jax.core.Tracer)
    free = _free_axes(sharding)
    if not free and (traced or len(q.sharding.device_set) == 1):
        return Spread(table, True, True, eager, None)
    explicit = bool(free) and all(free.values())
    spec = (*(getattr(sharding, "spec", None) or ()), None, None, None)
    known = explicit or (not traced and hasattr(sharding, "spec"))
    placed = spec[:3] if explicit else None
    return Spread(table, known and spec[1] is None, False, eager, placed)


def _free_axes(sharding: Any) -> dict[str, bool]:
    """Return the mesh axes that an array may be spread over: whether each is explicit."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {
        name: kind == jax.sharding.AxisType.Explicit
        for name, kind in kinds
        if kind != jax.sharding.AxisType.Manual and mesh.shape[name] > 1
    }


def over(f: Callable[..., Any], mapped: tuple[bool, ...], one_by_one: bool) -> Callable[..., Any]:
    """Map over the leading axis of some arguments, side by side or one after another."""
    if not one_by_one:
        return jax.vmap(f, in_axes=tuple(0 if m else None for m in mapped))

    def loop(*args: Any) -> Any:
        moving = [x for x, m in zip(args, mapped, strict=True) if m]

        def one(own: Any) -> Any:
            items = iter(own)
            return f(*(next(items) if m else x for x, m in zip(args, mapped, strict=True)))

        if jax.tree.leaves(moving)[0].shape[0] == 1:
            alone = one(jax.tree.map(lambda x: x[0], moving))
            return jax.tree.map(lambda x: x[None], alone)
        return lax.map(one, moving)

    return loop


def fit(x: Any, size: int, axis: int) -> Any:
    """Fill an axis up with zeros, or cut it.

    Concrete arrays on one CPU are copied by NumPy: XLA would compile a program for each length.
    """
    length = x.shape[axis]
    if length == size:
        return x
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        devices = x.devices()
        if len(devices) == 1 and next(iter(devices)).platform == "cpu":
            host = np.asarray(x)
            if length > size:
                host = host[(slice(None),) * axis + (slice(size),)]
            else:
                host = np.pad(host, [(0, (size - length) * (a == axis)) for a in range(x.ndim)])
            return jax.device_put(host, x.sharding if x.committed else None)
    if length > size:
        return lax.slice_in_dim(x, 0, size, axis=axis)
    return jnp.pad(x, [(0, (size - length) * (a == axis)) for a in range(x.ndim)])
