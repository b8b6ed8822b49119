"""The paper's algorithm: positional LSH as many short attentions without a bias.

To be read beside Wolfson & Wagner 2026, section 2. For each head:

1. draw s partitions of the positions into contiguous blocks (`plsh.hashing`, integers);
2. for each partition, attend inside each block: plain softmax attention, no bias (`attend_block`);
3. pool the s results by their log-sum-exp (`pool`): numerators and denominators are averaged over
   the partitions, never the s normalised outputs, which converge to something else.

A block of m queries and m keys costs O(m^2), and n/m of them cover the sequence: for blocks of
about 2 sigma tokens the time is O(n sigma s), and nothing of size n x n exists. Everything is a
pure function on the Array API, so the array library's autograd and transforms apply.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import compat
from . import validation as rules
from .backend import AttentionOutput
from .compat import Array
from .partition import PartitionSet

__all__ = ["merge", "reduction"]

_SCORES = 1 << 18
"""Scores held at a time, per batch row."""
_ROWS = 1 << 14
"""Query rows, times samples, pooled at a time, per batch row."""


def attend_block(
    q: Array, k: Array, v: Array, visible: Array, bias: Array | None, xp: Any
) -> AttentionOutput:
    """Softmax attention of small blocks: ``(…, m, D), (…, l, D), (…, l, Dv) -> (…, m, Dv)``.

    q is scaled already. `visible` and `bias` broadcast to ``(…, m, l)``. No inf and no NaN is
    formed: a row that sees no key has out 0, lse -inf, and zero gradients.
    """
    scores = xp.matmul(q, xp.matrix_transpose(k))  # (…, m, l)
    if bias is not None:
        scores = scores + bias
    zero, lowest, dead = _constants(scores, xp)
    seen = xp.any(xp.broadcast_to(visible, scores.shape), axis=-1, keepdims=True)  # (…, m, 1)
    # The shift comes from visible pairs only: a hidden key far above them must not empty the row.
    top = xp.max(xp.where(visible, scores, lowest), axis=-1, keepdims=True)  # (…, m, 1)
    shift = xp.where(seen, top, zero)
    p = xp.where(visible, xp.exp(xp.where(visible, scores - shift, zero)), zero)  # (…, m, l)
    total = xp.where(seen, xp.sum(p, axis=-1, keepdims=True), zero + 1)  # (…, m, 1)
    out = xp.matmul(p / total, v)  # (…, m, Dv); a mean of values is within their range
    lse = xp.where(seen, shift + xp.log(total), dead)  # (…, m, 1)
    return AttentionOutput(out, lse[..., 0])


def pool(outputs: Array, lses: Array, axis: int, xp: Any) -> AttentionOutput:
    """Add numerators and denominators of attention outputs along `axis` of `lses`.

    `outputs` has one axis more than `lses`, the last. For s partitions subtract ln(s) from the
    lse afterwards: their denominators are averaged.
    """
    zero, lowest, dead = _constants(lses, xp)
    alive = lses != dead  # True for NaN too, which must not vanish
    seen = xp.any(alive, axis=axis, keepdims=True)
    top = xp.max(xp.where(alive, lses, lowest), axis=axis, keepdims=True)
    shift = xp.where(seen, top, zero)
    weight = xp.where(alive, xp.exp(xp.where(alive, lses - shift, zero)), zero)
    # Shares of a power of two are exact, and their sum with the outputs does not overflow.
    share = 2.0 ** -(lses.shape[axis] - 1).bit_length()
    total = xp.where(seen, _sum(weight, axis, xp), zero + 1)
    out = _sum(outputs * (weight * share)[..., None], axis, xp) / (total * share)[..., None]
    lse = xp.where(seen, shift + xp.log(total), dead)
    return AttentionOutput(xp.squeeze(out, axis=axis), xp.squeeze(lse, axis=axis))


def _sum(x: Array, axis: int, xp: Any) -> Array:
    """Sum along an axis, which is kept, by halves: the error grows with the log of their number."""
    lead = (slice(None),) * axis
    while (size := x.shape[axis]) > 1:
        half = size // 2
        parts = [x[(*lead, slice(0, half), ...)] + x[(*lead, slice(half, 2 * half), ...)]]
        if size % 2:
            parts.append(x[(*lead, slice(size - 1, size), ...)])
        x = xp.concat(parts, axis=axis)
    return x


def _constants(like: Array, xp: Any) -> tuple[Array, Array, Array]:
    """Return 0, the lowest finite number and -inf as 0-d arrays of `like`'s dtype and device."""
    dtype, device = like.dtype, compat.device(like)
    values = (0.0, float(xp.finfo(dtype).min), -math.inf)
    zero, lowest, dead = (xp.asarray(x, dtype=dtype, device=device) for x in values)
    return zero, lowest, dead


class Tokens(NamedTuple):
    """One head's tokens: ``x (B, N, …)`` with the position of the first, and segment ids."""

    x: tuple[Array, ...]
    offset: int
    segments: Array | None  # (B, N)

    def part(self, start: int, stop: int) -> "Tokens":
        """Return tokens ``[start, stop)``."""
        segments = None if self.segments is None else self.segments[:, start:stop]
        return Tokens(tuple(x[:, start:stop, :] for x in self.x), self.offset + start, segments)


class _Blocks(NamedTuple):
    """Blocks of queries with the keys they see; all int64 ``(blocks,)``."""

    row: npt.NDArray[np.int64]  # of the first query, in (samples, queries) flattened
    query: npt.NDArray[np.int64]
    queries: npt.NDArray[np.int64]
    key: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]

    def take(self, index: Any) -> "_Blocks":
        return _Blocks(*(field[index] for field in self))


def attend_partitions(
    queries: Tokens,
    keys: Tokens,
    labels_q: npt.NDArray[np.int32],
    labels_k: npt.NDArray[np.int32],
    causal: bool,
    xp: Any,
) -> AttentionOutput:
    """One head of positional LSH: ``(B, Nq, Dv)`` and ``(B, Nq)``.

    Labels are ``(s, Nq)`` and ``(s, Nk)``, on the host. There is at least one key.
    """
    samples, len_q = labels_q.shape
    # A block may be as long as the sequence: so few queries at a time that its scores stay small.
    longest = int(np.diff(np.flatnonzero(np.diff(labels_k, append=-1)), prepend=-1).max())
    stretch = max(1, min(_ROWS // samples, 4 * _SCORES // longest))
    parts = []
    for start in range(0, max(len_q, 1), stretch):
        stop = min(start + stretch, len_q)
        blocks = _find_blocks(labels_q[:, start:stop], labels_k)
        out, lse = _attend_blocks(
            queries.part(start, stop), keys, blocks, samples * (stop - start), causal, xp
        )
        out = xp.reshape(out, (out.shape[0], samples, stop - start, out.shape[-1]))  # (B, s, n, Dv)
        lse = xp.reshape(lse, (lse.shape[0], samples, stop - start))  # (B, s, n)
        parts.append(pool(out, lse, 1, xp))
    out = xp.concat([part.out for part in parts], axis=1)  # (B, Nq, Dv)
    lse = xp.concat([part.lse for part in parts], axis=1) - math.log(samples)  # (B, Nq)
    return AttentionOutput(out, lse)


def _find_blocks(labels_q: npt.NDArray[np.int32], labels_k: npt.NDArray[np.int32]) -> _Blocks:
    """Match the blocks of the queries of each sample with the keys of equal label."""
    found = []
    for sample, (row_q, row_k) in enumerate(zip(labels_q, labels_k, strict=True)):
        begins = np.flatnonzero(np.diff(row_q, prepend=-1))  # labels are >= 0
        ends = np.append(begins[1:], row_q.size)[: begins.size]
        label = row_q[begins]
        key = np.searchsorted(row_k, label, side="left")
        key_end = np.searchsorted(row_k, label, side="right")
        found.append((sample * row_q.size + begins, begins, ends - begins, key, key_end - key))
    return _Blocks(*(np.concatenate(field).astype(np.int64) for field in zip(*found, strict=True)))


def _chunks(blocks: _Blocks) -> Iterator[_Blocks]:
    """Group blocks of like size, at most 4/3 apart, so that padding wastes little."""
    size = [np.ceil(np.log2(np.maximum(m, 1)) * 2.4) for m in (blocks.queries, blocks.keys)]
    group = (size[0] * 256 + size[1]).astype(np.int64)
    for g in np.unique(group):
        index = np.flatnonzero(group == g)
        area = int(blocks.queries[index].max()) * max(1, int(blocks.keys[index].max()))
        step = max(1, _SCORES // area)
        for i in range(0, index.size, step):
            yield blocks.take(index[i : i + step])


def _attend_blocks(
    queries: Tokens, keys: Tokens, blocks: _Blocks, rows: int, causal: bool, xp: Any
) -> AttentionOutput:
    """Attend inside each block; return its rows in order, ``(B, rows, Dv)`` and ``(B, rows)``."""
    place = np.zeros(rows, dtype=np.int32)  # where each row's result stands among the chunks'
    outs, lses, done = [], [], 0
    for chunk in _chunks(blocks):
        out, lse = _attend_chunk(queries, keys, chunk, causal, xp)
        outs.append(out)
        lses.append(lse)
        m = int(chunk.queries.max())
        slot = done + np.arange(chunk.row.size * m).reshape(-1, m)
        real = np.arange(m) < chunk.queries[:, None]
        place[(chunk.row[:, None] + np.arange(m))[real]] = slot[real]
        done += slot.size
    if not outs:  # no queries
        (q,), (k, v) = queries.x, keys.x
        nothing = xp.zeros((q.shape[0], k.shape[1]), dtype=xp.bool, device=compat.device(q))
        return attend_block(q, k, v, nothing[:, None, :], None, xp)
    index = xp.asarray(place, device=compat.device(outs[0]))
    out = xp.take(xp.concat(outs, axis=1), index, axis=1)
    return AttentionOutput(out, xp.take(xp.concat(lses, axis=1), index, axis=1))


def _attend_chunk(
    queries: Tokens, keys: Tokens, chunk: _Blocks, causal: bool, xp: Any
) -> AttentionOutput:
    """Attend inside blocks padded to one size: ``(B, blocks * m, Dv)`` and ``(B, blocks * m)``."""
    (q,), (k, v) = queries.x, keys.x
    batch, device, count = q.shape[0], compat.device(q), chunk.row.size
    m, width = int(chunk.queries.max()), max(1, int(chunk.keys.max()))
    at_q = np.minimum(chunk.query[:, None] + np.arange(m), q.shape[1] - 1)  # (blocks, m)
    at_k = np.minimum(chunk.key[:, None] + np.arange(width), k.shape[1] - 1)  # (blocks, l)

    def gather(x: Array, at: npt.NDArray[np.int64]) -> Array:
        index = xp.asarray(at.reshape(-1).astype(np.int32), device=device)
        return xp.reshape(xp.take(x, index, axis=1), (batch, *at.shape, *x.shape[2:]))

    real = np.arange(width) < chunk.keys[:, None]  # (blocks, l)
    visible = np.broadcast_to(real[:, None, :], (count, m, width))  # (blocks, m, l)
    if causal:
        after = (keys.offset + at_k)[:, None, :] <= (queries.offset + at_q)[:, :, None]
        visible = visible & after
    shown = xp.asarray(visible.copy(), device=device)[None, ...]  # (1, blocks, m, l)
    if queries.segments is not None and keys.segments is not None:
        ids_q, ids_k = gather(queries.segments, at_q), gather(keys.segments, at_k)
        shown = shown & same_segment(ids_q, ids_k)  # (B, blocks, m, l)
    out, lse = attend_block(gather(q, at_q), gather(k, at_k), gather(v, at_k), shown, None, xp)
    return AttentionOutput(
        xp.reshape(out, (batch, count * m, out.shape[-1])), xp.reshape(lse, (batch, count * m))
    )


def same_segment(ids_q: Array, ids_k: Array) -> Array:
    """Which queries and keys see each other: ``(…, m), (…, l) -> (…, m, l)``."""
    return (ids_q[..., :, None] == ids_k[..., None, :]) & (ids_k[..., None, :] >= 0)


def attend_heads(
    q: Array,
    k: Array,
    v: Array,
    head: Callable[[int, Tokens, Tokens], AttentionOutput],
    offsets: tuple[int, int],
    segment_ids: tuple[Array, Array] | None,
    scale: float,
    xp: Any,
) -> AttentionOutput:
    """Run `head` on each query head with its keys; ``(B, H, Nq, Dv)`` and ``(B, H, Nq)``.

    Inputs are widened to the accumulation dtype and q is scaled. Padding is zeroed, so that a NaN
    in it stays there, and a call without keys gets one that nobody sees.
    """
    dtype, heads, kv_heads = q.dtype, q.shape[1], k.shape[1]
    wide = xp.float64 if dtype == xp.float64 else xp.float32
    q, k, v = (xp.astype(x, wide) for x in (q, k, v))
    ids_q, ids_k = segment_ids or (None, None)
    if k.shape[2] == 0:
        hidden = xp.full((k.shape[0], 1), -1, dtype=xp.int32, device=compat.device(k))
        seen = xp.zeros((q.shape[0], q.shape[2]), dtype=xp.int32, device=compat.device(q))
        ids_q, ids_k = seen, hidden
        k, v = (_one_zero_token(x, xp) for x in (k, v))
    if ids_q is not None and ids_k is not None:
        ids_q, ids_k = _comparable(ids_q, xp), _comparable(ids_k, xp)
        q = _zero_padding(q, ids_q, xp)
        k, v = _zero_padding(k, ids_k, xp), _zero_padding(v, ids_k, xp)
    if heads == 0:
        nothing = q[..., :1] * xp.zeros((v.shape[-1],), dtype=wide, device=compat.device(q))
        return AttentionOutput(xp.astype(nothing, dtype), q[..., 0])
    q = q * scale
    done = []
    for h in range(heads):
        g = h // (heads // kv_heads)  # the key head that query head h reads
        queries = Tokens((q[:, h, :, :],), offsets[0], ids_q)
        done.append(head(h, queries, Tokens((k[:, g, :, :], v[:, g, :, :]), offsets[1], ids_k)))
    out = xp.stack([part.out for part in done], axis=1)
    return AttentionOutput(xp.astype(out, dtype), xp.stack([part.lse for part in done], axis=1))


def _one_zero_token(x: Array, xp: Any) -> Array:
    shape = (*x.shape[:2], 1, x.shape[3])
    return xp.concat([x, xp.zeros(shape, dtype=x.dtype, device=compat.device(x))], axis=2)


def _comparable(ids: Array, xp: Any) -> Array:
    """Widen unsigned ids, of which torch compares uint8 only."""
    unsigned = compat.kind(ids) == "torch" and compat.dtype_name(ids).startswith("uint")
    return xp.astype(ids, xp.int64) if unsigned else ids


def _zero_padding(x: Array, ids: Array, xp: Any) -> Array:
    return xp.where((ids >= 0)[:, None, :, None], x, _constants(x, xp)[0])


def reduction(
    q: Array,
    k: Array,
    v: Array,
    partitions: PartitionSet,
    *,
    causal: bool = False,
    scale: float | None = None,
    q_offset: int | None = None,
    k_offset: int = 0,
    segment_ids: Any = None,
) -> AttentionOutput:
    """Positional LSH as the paper states it: attention inside blocks, pooled by log-sum-exp.

    The same function as ``plsh.attention(…, method=partitions)``, by the algorithm itself: it is
    what backends are compared with.

    Parameters
    ----------
    q, k, v : Array, shapes (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)
        Of one kind, dtype and device, as for `plsh.attention`.
    partitions : PartitionSet
        Of the positions of all queries and keys; of one head or of H.
    causal : bool, default False
        Hide keys at positions after the query's.
    scale : float, optional
        Factor of the inner products. None: D**-0.5.
    q_offset : int, optional
        Position of the first query. None: `k_offset`, which needs Nq == Nk.
    k_offset : int, default 0
        Position of the first key.
    segment_ids : integer array (B, N), or a pair of them, optional
        Equal ids see each other; a negative id is padding.

    Returns
    -------
    AttentionOutput
        ``(B, H, Nq, Dv)`` of q's dtype and ``(B, H, Nq)`` float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above; the message names it.

    Notes
    -----
    Spec: RED-1 … RED-4. Source: Wolfson & Wagner 2026, theorem 2.2.

    Examples
    --------
    >>> import numpy as np, plsh
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 50, 8))
    >>> blocks = plsh.RandomBinning((4.0, 16.0)).sample(8, 50)
    >>> plsh.reduction(q, k, v, blocks).out.shape
    (1, 2, 50, 8)
    """
    kind = rules.check_arrays(q, k, v)
    rules.check_shapes(q, k, v, "bhsd")
    if q.ndim != 4:
        raise ValueError(f"q must have shape (batch, heads, len, dim), got {tuple(q.shape)}")
    if not isinstance(partitions, PartitionSet):
        raise TypeError(f"partitions must be a PartitionSet, got {partitions!r}")
    if partitions.heads not in (1, q.shape[1]):
        raise ValueError(f"partitions must be of 1 or {q.shape[1]} heads, got {partitions.heads}")
    len_q, len_k = q.shape[2], k.shape[2]
    first_q, first_k = rules.check_offsets(q_offset, k_offset, (len_q, len_k), kind, None)
    segments = rules.check_segments(segment_ids, q, k, kind)
    causal = rules.check_flag("causal", causal)
    covered = (partitions.start, partitions.stop)
    rules.check_positions(covered, causal, (first_q, first_k), (len_q, len_k), segments)
    labels_q = partitions.labels_at(first_q, first_q + len_q)
    labels_k = partitions.labels_at(first_k, first_k + max(len_k, 1))
    factor = rules.check_scale(scale, q.shape[-1], compat.dtype_name(q))
    with compat.without_autocast(q):
        return reduce_labels(
            q, k, v, labels_q, labels_k, causal, factor, (first_q, first_k), segments
        )


def reduce_labels(
    q: Array,
    k: Array,
    v: Array,
    labels_q: npt.NDArray[np.int32],
    labels_k: npt.NDArray[np.int32],
    causal: bool,
    scale: float,
    offsets: tuple[int, int],
    segment_ids: tuple[Array, Array] | None,
) -> AttentionOutput:
    """`reduction` of checked arguments, with the labels ``(H or 1, s, N)`` of queries and keys.

    There is a label for one key at least.
    """
    xp = compat.namespace(q)
    last = labels_q.shape[0] - 1  # one head of partitions serves all

    def head(h: int, queries: Tokens, keys: Tokens) -> AttentionOutput:
        row = min(h, last)
        return attend_partitions(queries, keys, labels_q[row], labels_k[row], causal, xp)

    return attend_heads(q, k, v, head, offsets, segment_ids, scale, xp)


def _check_part(part: Any, first: Any, layout: str) -> None:
    """Check that `part` is an output with its lse, and like the first."""
    if not isinstance(part, tuple) or len(part) != 2 or "" in map(compat.kind, part):
        raise TypeError(f"outputs must be AttentionOutputs (out, lse), got {type(part).__name__}")
    (out, lse), names = part, ("out", "lse")
    if compat.dtype_name(out) not in rules.DTYPES:
        raise TypeError(f"out must have a dtype of {rules.DTYPES}, got {compat.dtype_name(out)}")
    for x, like, name in zip(part, first, names, strict=True):
        if compat.kind(x) != compat.kind(first[0]):
            raise TypeError(
                f"outputs must be of one array kind, got {compat.kind(first[0])} and "
                f"{compat.kind(x)} for {name}"
            )
        if compat.dtype_name(x) != compat.dtype_name(like) or tuple(x.shape) != tuple(like.shape):
            raise ValueError(
                f"outputs must have one shape and dtype, got {name} {tuple(like.shape)} "
                f"{compat.dtype_name(like)} and {tuple(x.shape)} {compat.dtype_name(x)}"
            )
    rows = tuple((compat.swap_heads(out) if layout == "bshd" else out).shape[:-1])
    if tuple(lse.shape) != rows or compat.dtype_name(lse) not in ("float32", "float64"):
        raise ValueError(
            f"lse must have shape {rows} and float32 or float64 with layout={layout!r}, got "
            f"{tuple(lse.shape)} {compat.dtype_name(lse)}"
        )


def merge(outputs: Sequence[AttentionOutput], *, layout: str = "bhsd") -> AttentionOutput:
    """Merge attention outputs of the same queries over disjoint sets of keys.

    Parameters
    ----------
    outputs : sequence of AttentionOutput
        What ``attention(…, return_lse=True)`` returned for each shard of the keys, with the
        shard's own `k_offset` and one `q_offset`; at least one.
    layout : {"bhsd", "bshd"}, default "bhsd"
        Layout of ``out``.

    Returns
    -------
    AttentionOutput
        Equal to the call on all keys, under every method. Differentiable.

    Raises
    ------
    TypeError, ValueError
        There is no output, one is not a pair (out, lse) of floating dtypes, or the shapes differ.

    Notes
    -----
    Spec: ATT-27.

    Examples
    --------
    >>> import numpy as np, plsh
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 4))
    >>> call = dict(method="exact", q_offset=0, return_lse=True)
    >>> left = plsh.attention(q, k[:, :2], v[:, :2], **call)
    >>> right = plsh.attention(q, k[:, 2:], v[:, 2:], k_offset=2, **call)
    >>> whole = plsh.attention(q, k, v, **call)
    >>> bool(np.allclose(plsh.merge([left, right]).out, whole.out))
    True
    """
    try:
        parts = list(outputs)
    except TypeError:
        raise TypeError(
            f"outputs must be a sequence of AttentionOutputs, got {type(outputs).__name__}"
        ) from None
    if not parts:
        raise ValueError("outputs must hold at least one AttentionOutput, got none")
    layout = rules.check_layout(layout)
    for part in parts:
        _check_part(part, parts[0], layout)
    xp = compat.namespace(parts[0][1])
    dtype = parts[0][1].dtype
    rows = [compat.swap_heads(out) if layout == "bshd" else out for out, _ in parts]
    wide = xp.stack([xp.astype(out, dtype) for out in rows], axis=0)
    out, lse = pool(wide, xp.stack([lse for _, lse in parts], axis=0), 0, xp)
    out = xp.astype(out, parts[0][0].dtype)
    return AttentionOutput(compat.swap_heads(out) if layout == "bshd" else out, lse)
