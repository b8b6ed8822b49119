"""Whole heads of few queries, or of few tokens: a product for each batch row and key head.

A piece is a run of keys here, as indices.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._cache import TABLES
from ._scratch import Scratch
from ._tiles import PAIRS, Sum, Tokens
from ._weights import LOG2E, Labels, Piece


class WholeDecay:
    """``exp(-slope * distance)`` within a width, for the queries and keys of whole heads.

    `slopes` is ``(B or 1, H)``. What is made is kept for the next call if `kept`.
    """

    normaliser = 0.0

    def __init__(
        self,
        slopes: tuple[tuple[float, ...], ...],
        widths: tuple[int, ...],
        causal: bool,
        queries: range,
        keys: range,
        dtype: torch.dtype,
        kept: bool,
    ) -> None:
        self._kept = kept
        self._key: tuple[Any, ...] = (slopes, widths, causal, queries, keys, dtype)

        def find_apart() -> Tensor:
            row, key = (
                torch.arange(x.start, x.stop, dtype=torch.int64, device="cpu")
                for x in (queries, keys)
            )
            return row[:, None] - key

        def find_hidden() -> Tensor:
            apart = find_apart()
            limit = torch.tensor(widths, dtype=torch.int64, device="cpu")[:, None, None]
            seen = apart.abs() <= limit  # (H, rows, W)
            return ~(seen & (apart >= 0) if causal else seen)

        self.distance = self._get(
            ("distance", queries, keys, dtype), lambda: find_apart().abs_().to(dtype)
        )
        own = (widths, causal, queries, keys)
        self._hidden = self._get(("hidden", *own), find_hidden)
        self._all = not self._get(("some hidden", *own), lambda: self._hidden.any()).item()
        self._slopes = torch.tensor(slopes, dtype=dtype, device="cpu")

    def _get(self, key: Any, make: Callable[[], Tensor]) -> Tensor:
        return TABLES.get(key, make) if self._kept else make()

    def of(self, batch: slice, heads: slice) -> "WholeDecay":
        """Return the weight of some batch rows and heads."""
        own = copy.copy(self)
        own._key = (*self._key, batch.start, batch.stop, heads.start, heads.stop)
        own._hidden = self._hidden[heads]
        own._slopes = self._slopes[batch if self._slopes.shape[0] > 1 else slice(None), heads]
        return own

    def start(self, p: Tensor, at: slice, bounded: bool) -> float:
        """Fill ``(B, H, rows, W)``; return what the product must scale it by."""

        def make() -> Tensor:
            bias = self.distance[:, at] * (self._slopes[..., None, None] * -LOG2E)
            if bounded and not self._all:
                bias.masked_fill_(self._hidden[..., at], -math.inf)
            return bias

        p.copy_(self._get(("bias", *self._key, at.start, at.stop, bounded), make))
        return 1.0

    def start_exactly(self, p: Tensor, at: slice) -> float:
        """As `start`, in units of e: distances as integers, rounded once."""
        p.copy_(self.distance[:, at]).mul_(-self._slopes[..., None, None])
        return 1.0

    def factor(self, at: slice, bounded: bool) -> Tensor | None:
        """Return 1 where a pair is in the band, ``(H, rows, W)``; None where all are."""
        if bounded or self._all:
            return None
        return (~self._hidden[..., at]).to(self.distance.dtype)


class WholeSteps:
    """Counts of the partitions in which pairs share a block, ``(H or 1, rows, W)``."""

    def __init__(self, counts: Tensor, samples: int) -> None:
        self._counts, self.normaliser = counts, math.log(samples)

    def of(self, batch: slice, heads: slice) -> "WholeSteps":
        """Return the weight of some batch rows and heads."""
        own = copy.copy(self)
        own._counts = self._counts[heads if self._counts.shape[0] > 1 else slice(None)]
        return own

    def start(self, p: Tensor, at: slice, bounded: bool) -> float:
        """Return 0: the counts say it all."""
        return 0.0

    def start_exactly(self, p: Tensor, at: slice) -> float:
        """Return 0."""
        return 0.0

    def factor(self, at: slice, bounded: bool) -> Tensor:
        """Return the counts."""
        return self._counts[..., at]


def count_pairs(
    labels_q: Labels, labels_k: Labels, queries: range, keys: range, causal: bool
) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Count the partitions in which queries and keys share a block, ``(H, rows, W)``.

    Of a pair, the later token's block begins at or before the earlier one: for each token a
    histogram of where its blocks begin on the other axis, then its running sum. Labels are
    ``(H, s, n)``.
    """
    apart = np.arange(queries.start, queries.stop)[:, None] - np.arange(keys.start, keys.stop)
    before = _begun(labels_q, keys)
    if causal:
        return np.where(apart >= 0, before, 0)
    return np.where(apart >= 0, before, _begun(labels_k, queries).swapaxes(-1, -2))


def _begun(labels: Labels, at: range) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Count for each token the blocks that have begun at each position: ``(H, n, len(at))``."""
    heads, _, count = labels.shape
    size = len(at) + 1
    begins = np.clip(labels.astype(np.int64) - at.start, 0, len(at))
    line = size * np.arange(heads * count).reshape(heads, 1, count)
    found = np.bincount((begins + line).ravel(), minlength=heads * count * size)
    return np.cumsum(found.reshape(heads, count, size)[..., :-1], axis=-1)


class Whole:
    """Heads of batch rows: ``N`` products, one for each row and key head, all its queries in it."""

    def __init__(
        self,
        tokens: Tokens,
        batch: slice,
        keys: slice,
        weight: WholeDecay | WholeSteps,
        visited: range,
        scratch: Scratch,
    ) -> None:
        self.acc, self.scratch, self.weight = tokens.acc, scratch, weight
        self._tokens, self._batch, self._visited = tokens, batch, visited
        self._heads = (slice(keys.start * tokens.group, keys.stop * tokens.group), keys)
        self._products = (batch.stop - batch.start) * (keys.stop - keys.start)
        self._rows = tokens.group * tokens.q.shape[2]
        step = max(1, PAIRS // (self._products * self._rows))
        self.pieces = [
            Piece(c, min(c + step, visited.stop)) for c in range(visited.start, visited.stop, step)
        ]

    # --- tokens in ---

    def queries(self, name: str, x: Tensor) -> Tensor:
        """Return ``(B, H, Nq, D)`` as ``(N, group * Nq, D)``."""
        own = self._clean(x[self._batch, self._heads[0]], 0, slice(None))
        return own.reshape(self._products, self._rows, x.shape[3])

    def keys(self, name: str, x: Tensor, piece: Piece) -> Tensor:
        """Return a piece's keys of ``(B, Hkv, Nk, D)``: ``(N, W, D)``."""
        at = slice(*piece)
        own = self._clean(x[self._batch, self._heads[1], at], 1, at)
        return own.reshape(self._products, piece.end - piece.begin, x.shape[3])

    def _clean(self, x: Tensor, side: int, at: slice) -> Tensor:
        x = x.to(self.acc)
        if self._tokens.ids is None:
            return x
        padding = self._tokens.ids[side][self._batch, at] < 0
        return x.masked_fill(padding[:, None, :, None], 0)  # it must not spread

    # --- weights ---

    def pairs(self, p: Tensor) -> Tensor:
        """View products ``(N, R, W)`` as the weight sees them, ``(B, H, Nq, W)``."""
        heads = self._heads[0].stop - self._heads[0].start
        return p.view(-1, heads, self._tokens.q.shape[2], p.shape[-1])

    def _at(self, piece: Piece) -> slice:
        return slice(piece.begin - self._visited.start, piece.end - self._visited.start)

    def start(self, p: Tensor, piece: Piece, bounded: bool) -> float:
        """Fill pairs with the weight's start; return what the product must scale it by."""
        return self.weight.start(p, self._at(piece), bounded)

    def start_exactly(self, p: Tensor, piece: Piece) -> float:
        """As `start`, in units of e."""
        return self.weight.start_exactly(p, self._at(piece))

    def factor(self, piece: Piece, bounded: bool) -> Tensor | None:
        """Return the weight's factor of a piece; None for 1."""
        return self.weight.factor(self._at(piece), bounded)

    def mask(self, piece: Piece) -> Tensor | None:
        """Return 1 where the key is of the query's segment, else 0; None for all 1."""
        if self._tokens.ids is None:
            return None
        queries, keys = (ids[self._batch] for ids in self._tokens.ids)
        keys = keys[:, slice(*piece)]
        same = (queries[:, :, None] == keys[:, None]) & (keys >= 0)[:, None]
        return same[:, None].to(self.acc)  # (B, 1, Nq, W)

    def distance_sum(self, ds: Tensor, piece: Piece) -> Tensor:
        """Sum pairs times distance, ``(B, H)``."""
        distance = self.weight.distance[:, self._at(piece)]  # type: ignore[union-attr]
        return (self.pairs(ds) * distance).sum(dim=(-2, -1), dtype=torch.float64)

    # --- results out ---

    def per_head(self, x: Tensor) -> Tensor:
        """View what belongs to these rows and heads of ``(B, H)``."""
        return x[self._batch, self._heads[0]]

    def place(self, to: Tensor) -> Tensor | None:
        """View these heads of ``(B, H, Nq, D)`` as ``(N, R, D)``; None where they do not fit."""
        own = self.per_head(to)
        if to.dtype != self.acc or not own.is_contiguous():
            return None
        return own.view(self._products, self._rows, to.shape[3])

    def put(self, to: Tensor, x: Tensor) -> None:
        """Write ``(N, R, …)`` to these heads of ``(B, H, Nq, …)``."""
        own = self.per_head(to)
        own.copy_(x.view(own.shape))

    def add_to_keys(self, to: Sum, piece: Piece, pairs: Tensor, x: Tensor, scale: float) -> None:
        """Add ``scale * pairs^T x``; see `Tiles.add_to_keys`."""
        rows, heads = self._batch, self._heads[1]
        own = to.x[
            rows.start - to.row : rows.stop - to.row,
            heads.start - to.head : heads.stop - to.head,
            slice(*piece),
        ]
        own.add_(torch.bmm(pairs.mT, x).view(own.shape), alpha=scale)
