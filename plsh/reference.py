"""Backend ``reference``: every method and option on any Array API namespace, written to be read.

lsh is the paper's algorithm (`plsh.reduction`); exact and window attend from tiles of queries to
the keys in their band. It is differentiable where the namespace is, any number of times, and is
the yardstick, not the fast path: under autograd the framework keeps the scores of all tiles.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from . import compat
from .backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Capabilities,
    Harness,
    Request,
)
from .compat import Array
from .errors import UnsupportedByBackendError
from .reduction import Tokens, attend_block, attend_heads, reduce_labels, same_segment
from .weights import DecayWeight

__all__ = ["BACKEND"]

_SCORES = 1 << 18
"""Scores held at a time, per batch row."""


class ReferenceBackend:
    """The paper's reduction, and exact and windowed ALiBi, in plain Array API."""

    name = "reference"
    spec_version = SPEC_VERSION

    def availability(self) -> Availability:
        """Say whether it can be used here: always, it needs NumPy only."""
        return Availability(True)

    def capabilities(self) -> Capabilities:
        """Declare what it can do."""
        return Capabilities(
            arrays=("numpy", "torch", "jax", "cupy", "array-api"),
            gradients="autograd",
            transforms=("jit", "jvp", "vmap", "second_order"),
        )

    def can_run(self, request: Request) -> str | None:
        """Return None if it can serve this request, else the reason."""
        if isinstance(request.static.weight, DecayWeight):
            return None
        arrays = request.arrays
        for name in ("q_offset", "k_offset", "labels"):
            if compat.is_traced(getattr(arrays, name)):
                return f"under lsh it looks blocks up on the host, and {name} is traced"
        return None

    def attend(self, q: Array, k: Array, v: Array, request: Request) -> AttentionOutput:
        """Compute attention of checked arrays ``(B, H, N, D)``."""
        with compat.without_autocast(q):
            return self._attend(q, k, v, request)

    def _attend(self, q: Array, k: Array, v: Array, request: Request) -> AttentionOutput:
        static, arrays = request.static, request.arrays
        first_q, first_k = (_read(x) for x in (arrays.q_offset, arrays.k_offset))
        one = _attend_decay if isinstance(static.weight, DecayWeight) else _attend_lsh
        if isinstance(first_q, int) and isinstance(first_k, int):
            return one(q, k, v, request, (first_q, first_k), arrays.slopes, arrays.segment_ids)
        if one is _attend_decay and not (_is_known(first_q) and _is_known(first_k)):
            return one(q, k, v, request, (first_q, first_k), arrays.slopes, arrays.segment_ids)
        if q.shape[0] == 0:
            return one(q, k, v, request, (0, 0), arrays.slopes, arrays.segment_ids)
        # Positions differ between batch rows: each is a call of its own.
        xp = compat.namespace(q)
        rows = []
        for b in range(q.shape[0]):
            here = slice(b, b + 1)
            offsets = tuple(x if isinstance(x, int) else x[b] for x in (first_q, first_k))
            ids = arrays.segment_ids
            ids = None if ids is None else (ids[0][here, :], ids[1][here, :])
            slopes = _batch_rows(arrays.slopes, here)
            rows.append(
                one(q[here, ...], k[here, ...], v[here, ...], request, offsets, slopes, ids)
            )
        return AttentionOutput(
            xp.concat([row.out for row in rows], axis=0),
            xp.concat([row.lse for row in rows], axis=0),
        )

    def harness(self) -> Harness:
        """Return the handles for tests and benchmarks, on NumPy arrays."""
        from .testing import harness_for  # tools, which a call does not need

        return harness_for("numpy")


def _read(offset: Any) -> Any:
    """Return an offset as an int or a tuple of ints; a traced array stays as it is."""
    if isinstance(offset, int | tuple) or compat.is_traced(offset):
        return offset
    values = compat.to_host(offset).tolist()
    return tuple(values) if isinstance(values, list) else values


def _is_known(offset: Any) -> bool:
    return isinstance(offset, int | tuple)


def _batch_rows(slopes: Any, rows: slice) -> Any:
    """Return slopes of some batch rows, if there is a row for each."""
    if isinstance(slopes, tuple):
        return slopes[rows] if slopes and isinstance(slopes[0], tuple) else slopes
    return slopes if slopes is None or slopes.ndim == 1 else slopes[rows, :]


def _attend_lsh(
    q: Array,
    k: Array,
    v: Array,
    request: Request,
    offsets: Any,
    slopes: Any,
    segment_ids: tuple[Array, Array] | None,
) -> AttentionOutput:
    """Positional LSH of rows that share their positions."""
    first_q, first_k = offsets
    return reduce_labels(
        q,
        k,
        v,
        _host_labels(request.labels(first_q, first_q + q.shape[2])),
        _host_labels(request.labels(first_k, first_k + max(k.shape[2], 1))),
        request.static.causal,
        request.static.scale,
        (first_q, first_k),
        segment_ids,
    )


def _host_labels(labels: Any) -> npt.NDArray[np.int32]:
    return labels if isinstance(labels, np.ndarray) else compat.to_host(labels)


def _attend_decay(
    q: Array,
    k: Array,
    v: Array,
    request: Request,
    offsets: Any,
    slopes: Any,
    segment_ids: tuple[Array, Array] | None,
) -> AttentionOutput:
    """Exact or windowed ALiBi of rows that share their positions, or of traced offsets."""
    xp = compat.namespace(q)
    weight, causal = request.static.weight, request.static.causal
    if not isinstance(weight, DecayWeight):
        raise UnsupportedByBackendError(f"a decay is needed, got {weight!r}")
    ahead = _difference(offsets, q, xp)  # position of query 0 less that of key 0

    def head(h: int, queries: Tokens, keys: Tokens) -> AttentionOutput:
        slope = _slope_of_head(slopes, h, queries.x[0], xp)
        return _attend_band(queries, keys, slope, weight.bandwidths[h], ahead, causal, xp)

    return attend_heads(q, k, v, head, (0, 0), segment_ids, request.static.scale, xp)


def _difference(offsets: Any, q: Array, xp: Any) -> Any:
    """Return q_offset - k_offset: an int, or an int32 array ``(1 or B, 1, 1)`` if traced."""
    first_q, first_k = offsets
    if isinstance(first_q, int) and isinstance(first_k, int):
        return first_q - first_k
    device = compat.device(q)
    wide = [
        xp.astype(x, xp.int32)
        if not isinstance(x, int | tuple)
        else xp.asarray(x, dtype=xp.int32, device=device)
        for x in (first_q, first_k)
    ]
    return xp.reshape(wide[0] - wide[1], (-1, 1, 1))


def _slope_of_head(slopes: Any, h: int, q: Array, xp: Any) -> Array:
    """Return head h's slope as an array ``()`` or ``(B, 1, 1)`` of q's dtype.

    Larger slopes cut just as sharply as the limit, whose product with any distance is finite.
    """
    largest = float(xp.finfo(q.dtype).max) / 2**31
    if isinstance(slopes, tuple):
        rows = [row[h] for row in slopes] if slopes and isinstance(slopes[0], tuple) else slopes[h]
        clipped = [min(m, largest) for m in rows] if isinstance(rows, list) else min(rows, largest)
        slope = xp.asarray(clipped, dtype=q.dtype, device=compat.device(q))
    else:
        own = xp.astype(slopes[..., h], q.dtype)
        limit = xp.asarray(largest, dtype=q.dtype, device=compat.device(q))
        slope = xp.where(own > limit, limit, own)
    return xp.reshape(slope, (-1, 1, 1)) if slope.ndim else slope


def _attend_band(
    queries: Tokens, keys: Tokens, slope: Array, width: int, ahead: Any, causal: bool, xp: Any
) -> AttentionOutput:
    """One head: tiles of queries against the keys within `width`; ``(B, Nq, Dv)``, ``(B, Nq)``."""
    q, k = queries.x[0], keys.x[0]
    len_q, len_k, device = q.shape[1], k.shape[1], compat.device(q)
    known = isinstance(ahead, int)
    reach = min(width, len_q + len_k + abs(ahead)) if known else len_k
    tile = max(1, min(256, _SCORES // min(len_k, 2 * reach + 256)))
    parts = []
    for start in range(0, max(len_q, 1), tile):
        stop = min(start + tile, len_q)
        low, high = 0, len_k
        if known:  # keys that the first or the last query of the tile may see
            low = max(0, start + ahead - reach)
            high = min(len_k, stop + ahead + (0 if causal else reach))
            low, high = (low, high) if low < high else (0, 1)  # one key that nobody sees
        at_q = xp.arange(start, stop, dtype=xp.int32, device=device)[:, None] + ahead
        distance = at_q - xp.arange(low, high, dtype=xp.int32, device=device)[None, :]
        span = xp.abs(distance)  # (m, l) or (B, m, l)
        visible = span <= width
        if causal:
            visible = visible & (distance >= 0)
        here, there = queries.part(start, stop), keys.part(low, high)
        if here.segments is not None and there.segments is not None:
            visible = visible & same_segment(here.segments, there.segments)
        bias = -slope * xp.astype(span, q.dtype)
        parts.append(attend_block(here.x[0], there.x[0], there.x[1], visible, bias, xp))
    return AttentionOutput(
        xp.concat([part.out for part in parts], axis=1),
        xp.concat([part.lse for part in parts], axis=1),
    )


BACKEND = ReferenceBackend()
