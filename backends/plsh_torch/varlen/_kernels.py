"""Torch's own kernels on the pieces of a round: results row by row, and gradients.

Tokens come as ``(rows, E)``, all heads and batch rows one after another, with indices of the rows
that a piece holds. On the CPU pieces of one shape are a batch of SDPA; on CUDA all of them, of
several samples while they are few, are one variable-length attention.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._pieces import Integers

NUMBERS = 1 << 20
"""Numbers of queries and keys that a batch of pieces holds, about."""
TOGETHER = 1 << 20
"""Rows of queries and keys from which samples wait no more for others to share a CUDA call with:
it is busy, and each row takes memory."""
FLASH = (torch.float16, torch.bfloat16)
"""Dtypes that the CUDA kernel takes."""


class Indexed(NamedTuple):
    """The pieces of a round, by the rows of their first query and key.

    Keys have a second row, `own`, among those of all query heads: what heads that share a key head
    add to its gradient stays apart.
    """

    causal: bool
    query: Integers
    queries: Integers
    key: Integers
    own: Integers
    keys: Integers


class Tokens(NamedTuple):
    """All queries, keys and values, as rows ``(rows, E)``."""

    q: Tensor
    k: Tensor
    v: Tensor


class Given(NamedTuple):
    """What a backward pass is given: rows of dO, of the merged output, and of the merged lse."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor


Result = tuple[Tensor, Tensor, Tensor]  # rows of queries, out, lse
Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # rows of queries, own of keys, dq, dk, dv


def forward(tokens: Tokens, rounds: Iterable[Indexed], scale: float) -> Iterator[Result]:
    """Attend in each piece; no row is twice in one result."""
    if packs(tokens.q):
        for parts in together(rounds):
            yield from _forward_cuda(*tokens, parts, scale)
        return
    for pieces in rounds:
        yield from _forward_cpu(*tokens, pieces, scale)


def backward(
    tokens: Tokens, given: Given, rounds: Iterable[Indexed], scale: float
) -> Iterator[Grads]:
    """Return the gradients by what each piece holds; no row is twice in one result."""
    if packs(tokens.q):
        for parts in together(rounds):
            yield from _backward_cuda(*tokens, given, parts, scale)
        return
    for pieces in rounds:
        yield from _backward_cpu(*tokens, given, pieces, scale)


def packs(q: Tensor) -> bool:
    """Whether pieces are sequences of one variable-length attention."""
    return q.is_cuda


# --- the CPU: a batch for each shape --------------------------------------------------------------


def _batches(pieces: Indexed, dim: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the rows of queries ``(P, m)`` and keys ``(P, l)``, and own ones, of one shape."""
    shapes = pieces.queries << 32 | pieces.keys
    for shape in np.unique(shapes):
        at = np.flatnonzero(shapes == shape)
        m, width = int(shape) >> 32, int(shape) & 0xFFFFFFFF
        step = max(1, NUMBERS // ((m + width) * dim))
        for i in range(0, at.size, step):
            own = at[i : i + step]
            yield tuple(  # type: ignore[misc]
                torch.from_numpy(first[own][:, None] + np.arange(count))
                for first, count in ((pieces.query, m), (pieces.key, width), (pieces.own, width))
            )


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows as ``(P, 1, m, …)``."""
    return x[rows][:, None]


def _forward_cpu(
    q: Tensor, k: Tensor, v: Tensor, pieces: Indexed, scale: float
) -> Iterator[Result]:
    attend: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for at_q, at_k, _ in _batches(pieces, q.shape[1]):
        out, lse = attend(
            _take(q, at_q), _take(k, at_k), _take(v, at_k), 0.0, pieces.causal, scale=scale
        )
        yield at_q.reshape(-1), out.flatten(0, 2), lse.flatten()


def _backward_cpu(
    q: Tensor, k: Tensor, v: Tensor, given: Given, pieces: Indexed, scale: float
) -> Iterator[Grads]:
    attend: Callable[..., Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for at_q, at_k, own in _batches(pieces, q.shape[1]):
        grads = attend(
            _take(given.grad_out, at_q),
            *(_take(q, at_q), _take(k, at_k), _take(v, at_k)),
            *(_take(given.out, at_q), _take(given.lse, at_q)),
            *(0.0, pieces.causal),
            scale=scale,
        )
        dq, dk, dv = (x.flatten(0, 2) for x in grads)
        yield at_q.reshape(-1), own.reshape(-1), dq, dk, dv


# --- CUDA: one variable-length attention ----------------------------------------------------------


def reason(dtype: torch.dtype, dim: int) -> str | None:
    """Return why CUDA tensors can't be served, or None; `dim` is the larger head dim."""
    if dtype not in FLASH:
        return f"torch's variable-length kernel takes float16 and bfloat16, got {dtype}"
    if dim > 256:
        return f"torch's variable-length kernel takes head dims up to 256, got {dim}"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return "this torch has no variable-length kernel"
    return None


def together(rounds: Iterable[Indexed]) -> Iterator[list[Indexed]]:
    """Gather rounds of one mask, of whatever sample, until they hold many rows."""
    waiting: dict[bool, list[Indexed]] = {False: [], True: []}
    for pieces in rounds:
        parts = waiting[pieces.causal]
        parts.append(pieces)
        if sum(int(x.queries.sum() + x.keys.sum()) for x in parts) >= TOGETHER:
            yield parts
            waiting[pieces.causal] = []
    yield from filter(None, waiting.values())


def _joined(parts: list[Indexed]) -> Indexed:
    """Put the pieces of rounds one after another."""
    return Indexed(parts[0].causal, *map(np.concatenate, zip(*(x[1:] for x in parts), strict=True)))


def _packed(first: Integers, count: Integers, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return the rows of all pieces one after another, where each begins, and the longest."""
    begin = np.concatenate([[0], np.cumsum(count)])
    rows = np.repeat(first - begin[:-1], count) + np.arange(begin[-1])
    at, starts = (torch.from_numpy(x) for x in (rows, begin.astype(np.int32)))
    if device.type == "cuda":  # nothing waits: pinned memory is reused when the copy is done
        at, starts = (x.pin_memory().to(device, non_blocking=True) for x in (at, starts))
    return at, starts, int(count.max())


def _forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, parts: list[Indexed], scale: float
) -> Iterator[Result]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    pieces = _joined(parts)
    at_q, starts_q, most_q = _packed(pieces.query, pieces.queries, q.device)
    at_k, starts_k, most_k = _packed(pieces.key, pieces.keys, q.device)
    attend: Callable[..., Any] = varlen_attn
    out, lse = attend(
        *(q[at_q, None], k[at_k, None], v[at_k, None]),
        *(starts_q, starts_k, most_q, most_k),
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(-1, 0) if pieces.causal else (-1, -1),
    )
    sizes = [int(x.queries.sum()) for x in parts]
    found = (at_q, out[:, 0], lse.reshape(-1))
    yield from zip(*(torch.split_with_sizes(x, sizes) for x in found), strict=True)


def flash_backward() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the backward pass of the variable-length kernel, which is given out and lse."""
    found: Callable[..., tuple[Tensor, Tensor, Tensor]]
    found = torch.ops.aten._flash_attention_backward
    return found


def _backward_cuda(
    q: Tensor, k: Tensor, v: Tensor, given: Given, parts: list[Indexed], scale: float
) -> Iterator[Grads]:
    pieces = _joined(parts)
    at_q, starts_q, most_q = _packed(pieces.query, pieces.queries, q.device)
    at_k, starts_k, most_k = _packed(pieces.key, pieces.keys, q.device)
    own, _, _ = _packed(pieces.own, pieces.keys, q.device)
    none = torch.empty(0, device=q.device)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none
    dq, dk, dv = flash_backward()(
        given.grad_out[at_q, None],
        *(q[at_q, None], k[at_k, None], v[at_k, None]),
        *(given.out[at_q, None], given.lse[at_q][None]),
        *(starts_q, starts_k, most_q, most_k, 0.0, pieces.causal, state, none),
        scale=scale,
    )
    queries = [int(x.queries.sum()) for x in parts]
    keys = [int(x.keys.sum()) for x in parts]
    found = ((at_q, queries), (own, keys), (dq[:, 0], queries), (dk[:, 0], keys), (dv[:, 0], keys))
    yield from zip(*(torch.split_with_sizes(x, sizes) for x, sizes in found), strict=True)


def padded(x: Tensor, dim: int) -> Tensor:
    """Append zeros to the last axis: kernels take one head dim, on CUDA a multiple of 8.

    On the CPU a multiple of 16, so that rows are aligned alike: BLAS may round by alignment.
    """
    step = 8 if x.is_cuda else 16
    return torch.nn.functional.pad(x, (0, -(-dim // step) * step - x.shape[-1]))
