"""Bounds of a call's exponents, by which it chooses how carefully to make them.

A bound belongs to one batch row and head, so that rows do not depend on their mates.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ._band import Given
from ._weights import LOG2E

Pair = tuple[Tensor, Tensor]


class Bounds:
    """Bounds in units of log2, made at need and kept: segments of one head share them.

    `ids` are the segment ids of queries and keys; `given` is what a backward pass is given.
    """

    def __init__(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        ids: Pair | None,
        scale: float,
        acc: torch.dtype,
        given: Given | None = None,
    ) -> None:
        self._held = dict(zip("qkv", tokens, strict=True))
        self._has_given = given is not None
        if given is not None:
            self._held |= {"do": given.grad_out, "lse": given.lse}
        self._ids, self._scale, self._acc = ids, abs(scale) * LOG2E, acc
        self._group = tokens[0].shape[1] // max(tokens[1].shape[1], 1)
        self._kept: dict[tuple[str, int, int], Tensor] = {}

    def logits(self, rows: slice, heads: slice) -> Tensor:
        """Return a bound of ``|q.k|`` for some batch rows and heads, ``(rows, heads)``; NaN stays.

        The heads are one, or all that share some key heads.
        """
        norms = [self._each(name, rows, heads, self._norm) for name in "qk"]
        return norms[0] * norms[1] * self._scale

    def exponents(self, rows: slice, heads: slice) -> Tensor:
        """Return a bound of all exponents but for the bias; infinite if gradients may overflow."""
        bound = self.logits(rows, heads)
        if not self._has_given:
            return bound
        bound = bound + self._each("lse", rows, heads, self._log)
        sizes = [self._each(name, rows, heads, self._norm) for name in ("do", "v")]
        products = sizes[0] * sizes[1]
        return torch.where(products < torch.finfo(self._acc).max / 4, bound, torch.inf)

    def _each(
        self, name: str, rows: slice, heads: slice, make: Callable[[str, slice, slice], Tensor]
    ) -> Tensor:
        """Return what `make` finds of each row and head, of a key head for all that share it."""
        shared = name in "kv"
        own = slice(heads.start // self._group, -(-heads.stop // self._group)) if shared else heads
        key = (name, rows.start, own.start)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make(name, rows, own)
        if not shared:
            return found
        return found.repeat_interleave(self._group, dim=1)[:, : heads.stop - heads.start]

    def _norm(self, name: str, rows: slice, heads: slice) -> Tensor:
        """Return the largest norm of a token."""
        x = self._held[name][rows, heads]
        if x.numel() == 0:
            return torch.zeros(x.shape[:2], dtype=self._acc, device="cpu")
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=self._acc)
        if self._ids is not None:
            norms = norms.masked_fill(self._ids[name in "kv"][rows, None] < 0, 0)
        largest: Tensor = norms.amax(dim=-1)
        return largest

    def _log(self, name: str, rows: slice, heads: slice) -> Tensor:
        """Return the largest size of the log of a row's sum."""
        lse = self._held[name][rows, heads]
        largest: Tensor = lse.abs().masked_fill_(lse == -torch.inf, 0).amax(dim=-1) * LOG2E
        return largest
