"""From a request to pieces, and from their results to one, pooled by log-sum-exp."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsh import UnsupportedByBackendError
from plsh.backend import AttentionOutput, Request
from plsh.compat import to_host, without_autocast
from plsh.weights import DecayWeight

from .._func import is_transformed
from .._ops import refuse_tangents
from . import _kernels
from ._kernels import Given, Indexed, Tokens
from ._pieces import rounds


def attend(q: Tensor, k: Tensor, v: Tensor, request: Request) -> AttentionOutput:
    """Compute attention of checked tensors ``(B, H, N, D)``."""
    if torch.compiler.is_compiling() or is_transformed():
        raise UnsupportedByBackendError(
            "backend 'torch_varlen' runs neither under torch.compile nor under torch.func; take "
            "plsh.attention(…, backend='torch')"
        )
    why = _refusal(q, v.shape[-1])
    if why is not None:
        raise UnsupportedByBackendError(
            f"backend 'torch_varlen' can't run this on {q.device}: {why}; take "
            "plsh.attention(…, backend='torch')"
        )
    refuse_tangents(q, k, v, name="torch_varlen")
    out, lse = Varlen.apply(q, k, v, request)  # type: ignore[no-untyped-call]
    return AttentionOutput(out, lse)


def _refusal(q: Tensor, value_dim: int) -> str | None:
    if q.device.type == "cuda":
        return _kernels.reason(q.dtype, max(q.shape[-1], value_dim))
    return None if q.device.type == "cpu" else "it runs on CPU and CUDA tensors"


class Varlen(torch.autograd.Function):
    """Positional LSH by the paper's reduction. The backward pass is that of the pooled estimator.

    With the merged output and lse ``dS = P * (dP - rowsum(dO * O) + dlse)`` in every piece, where P
    is of that lse: what torch's kernels compute when they are given the merged ones.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: Request
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        with without_autocast(q):
            out, lse = _forward(q, k, v, request)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.request = request
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """Return the gradients by q, k and v."""
        q, k, v, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        given = (q, k, v, out, lse, grad_out, grad_lse, ctx.request)
        return (*VarlenBackward.apply(*given), None)  # type: ignore[no-untyped-call]


class VarlenBackward(torch.autograd.Function):
    """The gradients, which have none of their own: asked for, it is an error and no silent zero."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients by q, k and v."""
        with without_autocast(q):
            return _backward(q, *given)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Say who has a second derivative."""
        raise UnsupportedByBackendError(
            "backend 'torch_varlen' has no second derivative; take plsh.attention(…, "
            "backend='reference'), which differentiates any number of times"
        )


def _wide(q: Tensor) -> torch.dtype:
    """Return the dtype in which results are pooled.

    On the CPU that of the kernel, too: in float32 it loses digits over thousands of keys.
    """
    return torch.float32 if q.is_cuda else torch.float64


def _rows(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """View ``(B, H, N, D)`` as rows, of the dtype and head dim that kernels take."""
    rows = x.detach().reshape(x.shape[:3].numel(), x.shape[3])
    return _kernels.padded(rows.to(dtype), dim)


def _prepared(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """Return q such that the scale is above 0, that scale, and what q was multiplied by."""
    if scale > 0:
        return q, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return q * sign, abs(scale) or 1.0, sign


def _tokens(q: Tensor, k: Tensor, v: Tensor) -> Tokens:
    dim, dtype = max(q.shape[3], v.shape[3]), q.dtype if q.is_cuda else _wide(q)
    return Tokens(*(_rows(x, dim, dtype) for x in (q, k, v)))


def _unit(v: Tensor, samples: int) -> float:
    """Return the power of 2 by which values are multiplied, so that no sum of them overflows.

    The kernels add up in a range beyond that of float16, which needs none.
    """
    if v.dtype == torch.float16:
        return 1.0
    return math.ldexp(1.0, -(samples * v.shape[2]).bit_length())


def _forward(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    wide, shape = _wide(q), q.shape[:3]
    scaled, scale, _ = _prepared(q, request.static.scale)
    samples = _samples(request)
    unit = _unit(v, samples)
    tokens = _tokens(scaled, k, v * unit)
    # Sums of what the samples have, in units of exp(top); the denominator is the last dim.
    sums = torch.zeros((shape.numel(), tokens.v.shape[1] + 1), dtype=wide, device=q.device)
    lost = torch.zeros_like(sums)  # what rounding has cost so far
    top = torch.full((shape.numel(), 1), -math.inf, dtype=wide, device=q.device)
    for rows, own, log in _kernels.forward(tokens, _all_rounds(q, k, request), scale):
        before, log = top[rows], log.to(wide)[:, None]
        after = torch.maximum(before, log)  # of NaN, NaN
        shift = after.masked_fill(after == -math.inf, 0)
        fade, gain = ((x - shift).exp() for x in (before, log))
        more = torch.cat([own.to(wide) * gain, gain], dim=1) + lost[rows] * fade
        held = sums[rows] * fade
        sums[rows] = held + more
        lost[rows] = more - (sums[rows] - held)
        top[rows] = after
    out, total = sums[:, :-1], sums[:, -1:]
    dead = total == 0
    out = out / total.masked_fill(dead, 1) / unit
    lse = (top + (total / samples).log()).masked_fill(dead, -math.inf).reshape(shape)
    out = out[:, : v.shape[3]].reshape(*shape, v.shape[3])
    return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _samples(request: Request) -> int:
    weight = request.static.weight
    assert not isinstance(weight, DecayWeight)  # noqa: S101  (lsh alone is declared)
    return weight.samples


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, request: Request,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    value_dim, wide = v.shape[3], _wide(q)
    values = v
    if grad_lse is not None:  # one more dim: v of 1, so that dP has dlse added
        why = _refusal(q, value_dim + 1)
        if why is not None:
            raise UnsupportedByBackendError(
                f"backend 'torch_varlen' takes gradients of the lse by one more dim of v, and {why}"
            )
        kind = q.dtype if q.is_cuda else wide
        values, grad_out = (
            torch.cat([x.to(kind), y.to(kind)[..., None]], dim=3)
            for x, y in ((v, v.new_ones(v.shape[:3])), (grad_out, grad_lse))
        )
    scaled, scale, sign = _prepared(q, request.static.scale)
    tokens = _tokens(scaled, k, values)
    width = tokens.v.shape[1]
    logs = (lse.to(wide) + math.log(_samples(request))).reshape(-1)
    grads, merged = (_rows(x, width, tokens.v.dtype) for x in (grad_out, out))
    given = Given(grads, merged, logs)
    sizes = (q.shape[2], k.shape[2], k.shape[2])
    dq, dk, dv = (
        torch.zeros((q.shape[0] * q.shape[1] * n, width), dtype=wide, device=q.device)
        for n in sizes
    )
    for at, own, *found in _kernels.backward(tokens, given, _all_rounds(q, k, request), scale):
        for to, rows, x in zip((dq, dk, dv), (at, own, own), found, strict=True):
            to[rows] += x.to(wide)  # no row is twice
    dq, dk, dv = (
        x.reshape(*q.shape[:2], n, width) for x, n in zip((dq, dk, dv), sizes, strict=True)
    )
    group = q.shape[1] // max(k.shape[1], 1)
    apart = (q.shape[0], k.shape[1], group, k.shape[2], width)
    dk, dv = (x.reshape(apart).sum(dim=2) for x in (dk, dv))
    dq = dq[..., : q.shape[3]] * sign
    return dq.to(q.dtype), dk[..., : k.shape[3]].to(k.dtype), dv[..., :value_dim].to(v.dtype)


def _all_rounds(q: Tensor, k: Tensor, request: Request) -> Iterator[Indexed]:
    """Yield the pieces of all heads and batch rows, sample by sample."""
    batch, heads, group = q.shape[0], q.shape[1], q.shape[1] // max(k.shape[1], 1)
    len_q, len_k = q.shape[2], k.shape[2]
    operands = request.arrays
    starts = [_per_row(x, batch) for x in (operands.q_offset, operands.k_offset)]
    ids = None
    if operands.segment_ids is not None:
        ids = [to_host(x).astype(np.int64) for x in operands.segment_ids]
    # Batch rows that are alike share their pieces.
    alike: dict[object, list[int]] = {}
    for b in range(batch):
        key = (starts[0][b], starts[1][b], *(() if ids is None else (x[b].tobytes() for x in ids)))
        alike.setdefault(key, []).append(b)
    if not q.numel() or not len_k:
        return
    for rows in alike.values():
        first = (starts[0][rows[0]], starts[1][rows[0]])
        labels = [
            _labels(request, at, at + n, heads) for at, n in zip(first, (len_q, len_k), strict=True)
        ]
        own = None if ids is None else (ids[0][rows[0]], ids[1][rows[0]])
        for sample in range(labels[0].shape[1]):
            pair = (labels[0][:, sample], labels[1][:, sample])
            for pieces in rounds(pair, first, own, request.static.causal):
                here = pieces.of_rows(np.array(rows, dtype=np.int64), heads)
                shared = here.row // heads * (heads // group) + here.row % heads // group
                yield Indexed(
                    here.causal,
                    here.row * len_q + here.query,
                    here.queries,
                    shared * len_k + here.key,
                    here.row * len_k + here.key,
                    here.keys,
                )


def _labels(request: Request, start: int, stop: int, heads: int) -> Any:
    """Return the labels of positions for every head, ``(H, s, n)``."""
    labels = request.labels(start, stop)
    found = labels if isinstance(labels, np.ndarray) else to_host(labels)
    return np.broadcast_to(found, (heads, *found.shape[1:]))


def _per_row(offset: Any, batch: int) -> list[int]:
    """Return a position for every batch row."""
    if isinstance(offset, int):
        return [offset] * batch
    if isinstance(offset, tuple):
        return list(offset)
    found = [int(x) for x in to_host(offset).reshape(-1)]
    return found if len(found) == batch else found * batch
