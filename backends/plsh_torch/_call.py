"""A call on the host's values: cut into groups, run one after another.

Products run on the library's own threads, so one group at a time; sums over keys are in one order.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plsh.backend import Request
from plsh.tiles import Integers, Schedule
from plsh.weights import DecayWeight, StepWeight, Weight

from ._band import LIMITS, Given, Group, Mode, Wanted, backward, forward
from ._cache import TABLES
from ._scratch import Scratch, borrow, give_back
from ._tiles import Tiles, Tokens, chunks, first_positions, tile_rows
from ._weights import LOG2E, Blocks, Decay, Steps, gentle
from ._whole import Whole, WholeDecay, WholeSteps, count_pairs

FEW = 16
"""Queries up to which heads go whole, whatever the keys: decoding."""
SMALL = 1 << 16
"""Pairs of a head up to which it goes whole."""
TOGETHER = 1 << 21
"""Pairs that go together, about."""


class Call:
    """A request with its tensors."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> None:
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.tokens = (q, k, v)
        self.request = request
        self.widths = _bandwidths(request.static.weight)
        self.group = request.static.heads // max(request.static.kv_heads, 1)
        ids = request.arrays.segment_ids
        self.ids = None if ids is None else _numbered(*ids, self.acc)
        bounds = self._norms(q, 0) * self._norms(k, 1).repeat_interleave(self.group, dim=1)
        self.bounds = bounds * (abs(request.static.scale) * LOG2E)  # of the logits, (B, H)
        self.spread = self.bounds  # of all exponents but for the bias

    def _norms(self, x: Tensor, side: int) -> Tensor:
        """Return the largest norm of each batch row and head, ``(B, H)``; NaN stays."""
        if x.numel() == 0:
            return torch.zeros(x.shape[:2], dtype=self.acc, device="cpu")
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=self.acc)
        if self.ids is not None:
            norms = norms.masked_fill(self.ids[side][:, None] < 0, 0)
        largest: Tensor = norms.amax(dim=-1)
        return largest

    # --- how the work is cut ---

    def work(self, scratch: Scratch) -> Iterator[tuple[Group, Mode]]:
        """Cut the call into groups."""
        for rows, positions in self._batches():
            tokens = Tokens(*self.tokens, self.ids, *positions, self.acc, self.group)
            visited = self._visited(positions)
            pairs = self.tokens[0].shape[2] * len(visited)
            if not visited:
                continue  # `forward` and `backward` have filled in what that means
            if self.tokens[0].shape[2] <= FEW or pairs <= SMALL:
                yield from self._whole(tokens, rows, visited, scratch)
            else:
                yield from self._tiles(tokens, rows, scratch)

    def _batches(self) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Group neighbouring batch rows of equal positions."""
        count = self.tokens[0].shape[0]
        starts = (self.request.arrays.q_offset, self.request.arrays.k_offset)
        listed = [x if isinstance(x, tuple) else (x,) * count for x in starts]
        begin = 0
        for pair, same in itertools.groupby(zip(*listed, strict=True)):
            stop = begin + len(list(same))
            yield slice(begin, stop), pair
            begin = stop

    def _visited(self, positions: tuple[int, int]) -> range:
        """Return the indices of the keys that any query sees, as far as the bandwidths say."""
        ahead, (len_q, len_k) = positions[0] - positions[1], self._lengths()
        reach = max(self.widths, default=0)
        low = min(max(ahead - reach, 0), len_k)
        high = ahead + len_q + (0 if self.request.static.causal else reach)
        return range(low, max(low, min(high, len_k)))

    @property
    def _is_blank(self) -> bool:
        """Whether there are batch rows without a key in reach, which no group writes."""
        return any(not self._visited(positions) for _, positions in self._batches())

    def _lengths(self) -> tuple[int, int]:
        return self.tokens[0].shape[2], self.tokens[1].shape[2]

    def _whole(
        self, tokens: Tokens, rows: slice, visited: range, scratch: Scratch
    ) -> Iterator[tuple[Group, Mode]]:
        heads = self.request.static.heads
        step = max(1, TOGETHER // max(heads * tokens.q.shape[2] * len(visited), 1))
        shared = None
        for begin in range(rows.start, rows.stop, step):
            batch = slice(begin, min(begin + step, rows.stop))
            if shared is None or self._slopes_per_row:
                shared = self._whole_weight(tokens, batch, visited)
            span = abs(tokens.q_start - tokens.k_start) + max(self._lengths())
            mode = self._mode(batch, slice(heads), span)
            if mode.large is not None:  # as products have them: (B * Hkv, group * rows, 1)
                each = mode.large[..., None].expand(-1, -1, tokens.q.shape[2])
                mode = mode._replace(large=each.reshape(-1, self.group * tokens.q.shape[2], 1))
            yield Whole(tokens, batch, shared, visited, scratch), mode

    @property
    def _slopes_per_row(self) -> bool:
        slopes = self.request.arrays.slopes
        return bool(slopes) and isinstance(slopes[0], tuple)

    def _slopes(self, batch: slice) -> Any:
        slopes = self.request.arrays.slopes
        return slopes[batch] if self._slopes_per_row else (slopes,)

    def _whole_weight(
        self, tokens: Tokens, batch: slice, visited: range
    ) -> WholeDecay | WholeSteps:
        static, (q_start, k_start) = self.request.static, (tokens.q_start, tokens.k_start)
        queries = range(q_start, q_start + tokens.q.shape[2])
        keys = range(visited.start + k_start, visited.stop + k_start)
        if isinstance(static.weight, DecayWeight):
            slopes = [[gentle(m, self.acc) for m in row] for row in self._slopes(batch)]
            made = torch.tensor(slopes, dtype=self.acc, device="cpu")
            return WholeDecay(made, self.widths, static.causal, queries, keys)

        def make() -> Tensor:
            of_q, of_k = (self.request.labels(x.start, x.stop) for x in (queries, keys))
            counts = count_pairs(of_q, of_k, queries, keys, static.causal)
            return torch.from_numpy(counts).to(self.acc)

        key = (static.weight, static.causal, queries, keys, self.acc)
        kept = isinstance(static.weight, StepWeight)
        return WholeSteps(TABLES.get(key, make) if kept else make(), static.weight.samples)

    def _tiles(self, tokens: Tokens, rows: slice, scratch: Scratch) -> Iterator[tuple[Group, Mode]]:
        keys = range(tokens.k_start, tokens.k_start + tokens.k.shape[2])
        count = tokens.q.shape[2]
        blocks: dict[int, tuple[Blocks, Blocks]] = {}
        for head in range(self.request.static.heads):
            size = tile_rows(count, self.widths[head])
            first = first_positions(tokens.q_start, count, size)
            if size not in blocks and not isinstance(self.request.static.weight, DecayWeight):
                blocks[size] = (self._blocks(first), self._blocks(first + size - 1))
            weight = schedule = None
            for row in range(rows.start, rows.stop):
                if weight is None or schedule is None or self._slopes_per_row:
                    weight = self._weight(head, row, first, size, blocks.get(size))
                    schedule = Schedule.of(first, size, size, weight.reach(first, size, keys))
                    weight.prepare(schedule)
                widest = schedule.widest
                span = size * (1 + max(widest.left, widest.right))
                mode = self._mode(slice(row, row + 1), slice(head, head + 1), span)
                for chunk in chunks(schedule):
                    yield Tiles(tokens, (row, head), weight, schedule, chunk, scratch), mode

    def _blocks(self, at: Integers) -> Blocks:
        """Return the blocks at some positions, ``(H or 1, s, n)``."""
        weight = self.request.static.weight
        if isinstance(weight, StepWeight):
            return Blocks(*weight.bounds(at))
        low, table = int(at[0]), self.request.arrays.labels
        begins = self.request.labels(low, int(at[-1]) + 1)[..., at - low]
        # A block ends where labels exceed the positions in it.
        ends = [[np.searchsorted(x, at, side="right") for x in head] for head in table]
        return Blocks(begins, np.asarray(ends) + weight.start)  # type: ignore[union-attr]

    def _weight(
        self, head: int, row: int, first: Integers, size: int, blocks: Any
    ) -> Decay | Steps:
        static = self.request.static
        if isinstance(static.weight, DecayWeight):
            (slopes,) = self._slopes(slice(row, row + 1))
            return Decay(slopes[head], self.widths[head], static.causal, self.acc)
        labels = self.request.labels(int(first[0]), int(first[-1]) + size, head)
        at_first, at_last = (Blocks(*(x[min(head, len(x) - 1)] for x in at)) for at in blocks)
        key = (static.weight, head) if isinstance(static.weight, StepWeight) else None
        return Steps(labels, at_first, at_last, static.causal, self.acc, key)

    # --- running it ---

    def _mode(self, rows: slice, heads: slice, span: int) -> Mode:
        """Choose how carefully exponentials are made, for pairs at most `span` tokens apart."""
        large = ~(self.bounds[rows, heads] < LIMITS[self.acc].bound)  # NaN too
        slant = 0.0
        if self.request.arrays.slopes:
            reach = [min(width, span) for width in self.widths[heads]]
            slant = max(
                abs(gentle(m, self.acc)) * LOG2E * far
                for row in self._slopes(rows)
                for m, far in zip(row[heads], reach, strict=True)
            )
        bounded = self.spread[rows, heads].max().item() + slant < -LIMITS[self.acc].floor
        return Mode(large if large.any() else None, bounded)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return out ``(B, H, Nq, Dv)`` and lse ``(B, H, Nq)``."""
        q, _, v = self.tokens
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device="cpu")
        lse = torch.empty(q.shape[:3], dtype=self.acc, device="cpu")
        if self._is_blank:
            out.zero_(), lse.fill_(-math.inf)
        if q.numel():
            scratch = borrow()
            for group, mode in self.work(scratch):
                forward(group, self.tokens, self.request.static.scale, mode, out, lse)
            give_back(scratch)
        return out, lse

    def backward(
        self, given: Given, wanted: tuple[bool, bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients that are wanted, by q, k, v and the slopes ``(B, H)``."""
        q, k, v = self.tokens
        to = Wanted(
            torch.empty(q.shape, dtype=q.dtype, device="cpu") if wanted[0] else None,
            torch.zeros(k.shape, dtype=self.acc, device="cpu") if wanted[1] else None,
            torch.zeros(v.shape, dtype=self.acc, device="cpu") if wanted[2] else None,
            torch.zeros(q.shape[:2], dtype=torch.float64, device="cpu") if wanted[3] else None,
        )
        if to.q is not None and self._is_blank:
            to.q.zero_()
        if q.numel() and k.numel():
            self.spread = self.bounds + self._spread(given)
            scratch = borrow()
            for group, mode in self.work(scratch):
                backward(group, self.tokens, self.request.static.scale, mode.bounded, given, to)
            give_back(scratch)
        return (
            to.q,
            None if to.k is None else to.k.to(k.dtype),
            None if to.v is None else to.v.to(v.dtype),
            to.slopes,
        )

    def _spread(self, given: Given) -> Tensor:
        """Return what the lse adds to the exponents, ``(B, H)``; infinite if gradients overflow."""
        lse = given.lse.abs().masked_fill(given.lse == -math.inf, 0).amax(dim=-1) * LOG2E
        if given.grad_out.numel():
            largest = [
                torch.linalg.vector_norm(x, math.inf, dtype=self.acc).item()
                for x in (given.grad_out, self.tokens[2])
            ]
            products = largest[0] * largest[1] * given.out.shape[-1]
            if not products < torch.finfo(self.acc).max / 4:
                lse = lse + math.inf
        return lse


@functools.lru_cache(maxsize=256)
def _bandwidths(weight: Weight) -> tuple[int, ...]:
    """Return the bandwidths of a recipe; they need its draw."""
    return weight.bandwidths


def _numbered(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Number the segment ids of each side alike, from 0 up; padding is -1. Floats hold that."""
    both = np.concatenate([x.detach().numpy().astype(np.int64) for x in (queries, keys)], axis=1)
    numbers = np.unique(both, return_inverse=True)[1].reshape(both.shape)
    numbers[both < 0] = -1
    made = torch.from_numpy(numbers).to(dtype)
    return made[:, : queries.shape[1]], made[:, queries.shape[1] :]
