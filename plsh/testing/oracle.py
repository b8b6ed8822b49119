"""The dense float64 oracle: attention under a positional weight, written from its definition.

It shares nothing with the core's mathematics: no tiles, no log-sum-exp merging, no hashing. The
weight is given, dense, or as the slopes and widths that define it; partitions come as labels.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["OracleResult", "decay_weight", "oracle", "step_weight", "visibility"]

Float = npt.NDArray[np.float64]


class OracleResult(NamedTuple):
    """Output, lse, and the gradients of ``sum(out * grad_out) + sum(lse * grad_lse)``.

    `slopes` is None where the weight was given dense.
    """

    out: Float
    lse: Float
    q: Float
    k: Float
    v: Float
    slopes: Float | None


def _positions(offset: Any, length: int, batch: int) -> npt.NDArray[np.int64]:
    rows = np.broadcast_to(np.asarray(offset, dtype=np.int64), (batch,))
    return rows[:, None] + np.arange(length)


def decay_weight(
    slopes: npt.ArrayLike, distance: npt.NDArray[np.int64], widths: Any = None
) -> Float:
    """Return ``exp(-slope * distance)`` within `widths`, ``(B, H, Nq, Nk)``.

    `slopes` is ``(H,)`` or ``(B, H)``, `distance` ``(B, Nq, Nk)``, `widths` None or ``(H,)``.
    """
    m = np.asarray(slopes, dtype=np.float64)
    m = np.broadcast_to(m, (distance.shape[0], m.shape[-1]))
    weight = np.exp(-m[:, :, None, None] * distance[:, None])
    if widths is not None:
        limit = np.asarray(widths, dtype=np.int64)[None, :, None, None]
        weight = np.where(distance[:, None] <= limit, weight, 0.0)
    return weight


def step_weight(labels_q: npt.ArrayLike, labels_k: npt.ArrayLike) -> Float:
    """Return the share of partitions in which two tokens share a block, ``(…, Nq, Nk)``.

    Labels are ``(…, s, Nq)`` and ``(…, s, Nk)``.
    """
    a, b = np.asarray(labels_q), np.asarray(labels_k)
    same = a[..., :, :, None] == b[..., :, None, :]
    return np.asarray(same.mean(axis=-3), dtype=np.float64)


def visibility(
    q_at: npt.NDArray[np.int64],
    k_at: npt.NDArray[np.int64],
    causal: bool,
    segment_ids: Any = None,
) -> npt.NDArray[np.bool_]:
    """Return which keys a query sees, ``(B, Nq, Nk)``, from positions ``(B, N)`` and segments."""
    seen = np.ones((q_at.shape[0], q_at.shape[1], k_at.shape[1]), dtype=bool)
    if causal:
        seen &= k_at[:, None, :] <= q_at[:, :, None]
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        a, b = (np.asarray(ids) for ids in pair)
        seen &= (a[:, :, None] == b[:, None, :]) & (b[:, None, :] >= 0)
    return seen


def oracle(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    weight: npt.ArrayLike | None = None,
    slopes: npt.ArrayLike | None = None,
    widths: Any = None,
    causal: bool = False,
    scale: float | None = None,
    q_offset: Any = 0,
    k_offset: Any = 0,
    segment_ids: Any = None,
    grad_out: npt.ArrayLike | None = None,
    grad_lse: npt.ArrayLike | None = None,
) -> OracleResult:
    """Compute attention and its gradients, dense, in float64.

    Parameters
    ----------
    q, k, v : array_like, shapes (B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)
        Converted to float64. Padded tokens may hold anything, NaN included.
    weight : array_like, broadcasting to (B, H, Nq, Nk), optional
        Positional weight w_ij; see `step_weight`. Either this or `slopes`.
    slopes : array_like, shape (H,) or (B, H), optional
        Decay per token.
    widths : array_like of int, shape (H,), optional
        With `slopes`: distances beyond have weight 0.
    causal, scale, q_offset, k_offset, segment_ids
        As for `plsh.attention`; offsets are numbers here, or ``(B,)``.
    grad_out, grad_lse : array_like, optional
        Cotangents; None is ones for the output and zeros for the lse.

    Returns
    -------
    OracleResult
        All float64; the gradients have the shapes of the inputs.
    """
    qd, kd, vd = (np.array(x, dtype=np.float64) for x in (q, k, v))
    batch, heads, len_q, dim = qd.shape
    kv_heads, len_k = kd.shape[1], kd.shape[2]
    c = dim**-0.5 if scale is None else float(scale)
    q_at, k_at = _positions(q_offset, len_q, batch), _positions(k_offset, len_k, batch)
    distance = np.abs(q_at[:, :, None] - k_at[:, None, :])  # (B, Nq, Nk)
    seen = visibility(q_at, k_at, causal, segment_ids)
    if segment_ids is not None:  # what stands in padding must not matter
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        pad_q, pad_k = (np.asarray(ids) < 0 for ids in pair)
        qd[np.broadcast_to(pad_q[:, None, :], qd.shape[:3])] = 0
        for x in (kd, vd):
            x[np.broadcast_to(pad_k[:, None, :], x.shape[:3])] = 0
    if (weight is None) == (slopes is None):
        raise ValueError("give weight or slopes")
    w = decay_weight(slopes, distance, widths) if slopes is not None else np.asarray(weight)
    w = np.where(seen[:, None], np.broadcast_to(w, (batch, heads, len_q, len_k)), 0.0)
    # The logarithm of a decay is exact where the decay itself underflows.
    log_w = np.full(w.shape, -np.inf)
    if slopes is not None:
        m = np.broadcast_to(np.asarray(slopes, dtype=np.float64), (batch, heads))
        inside = seen[:, None] & np.ones((1, heads, 1, 1), dtype=bool)
        if widths is not None:
            inside = inside & (distance[:, None] <= np.asarray(widths)[None, :, None, None])
        exact_log = -m[:, :, None, None] * distance[:, None]
        log_w[inside] = exact_log[inside]
    else:
        log_w[w > 0] = np.log(w[w > 0])

    group = heads // kv_heads if kv_heads else 1
    of = np.arange(heads) // group  # the key head of each query head
    kq, vq = kd[:, of], vd[:, of]
    logits = c * np.einsum("bhid,bhjd->bhij", qd, kq) + log_w
    top = np.max(logits, axis=-1, initial=-np.inf, keepdims=True)
    alive = np.isfinite(top)
    e = np.where(np.isfinite(logits), np.exp(logits - np.where(alive, top, 0.0)), 0.0)
    total = e.sum(axis=-1, keepdims=True)
    p = e / np.where(alive, total, 1.0)
    with np.errstate(divide="ignore"):
        lse = np.where(alive, np.where(alive, top, 0.0) + np.log(total), -np.inf)[..., 0]
    out = np.einsum("bhij,bhjd->bhid", p, vq)

    do = np.ones_like(out) if grad_out is None else np.asarray(grad_out, dtype=np.float64)
    dl = np.zeros_like(lse) if grad_lse is None else np.asarray(grad_lse, dtype=np.float64)
    dp = np.einsum("bhid,bhjd->bhij", do, vq)
    ds = p * (dp - (do * out).sum(axis=-1, keepdims=True) + dl[..., None])
    by_head = [
        c * np.einsum("bhij,bhjd->bhid", ds, kq),
        c * np.einsum("bhij,bhid->bhjd", ds, qd),
        np.einsum("bhij,bhid->bhjd", p, do),
    ]
    dk, dv = (
        x.reshape(batch, kv_heads, group, len_k, x.shape[-1]).sum(axis=2) for x in by_head[1:]
    )
    by_slope = None
    if slopes is not None:
        full = -(ds * distance[:, None]).sum(axis=(-2, -1))  # (B, H)
        by_slope = full if np.ndim(slopes) == 2 else full.sum(axis=0)
    return OracleResult(out, lse, by_head[0], dk, dv, by_slope)
