"""A call on the host's values: cut into parts, which threads work off group by group.

The cut does not depend on the number of threads, nor do results: a row of the output belongs to
one part, and the parts that add to a row of dk or dv are one job, in one order.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plsh.backend import Request
from plsh.tiles import Integers, Schedule
from plsh.weights import DecayWeight, StepWeight

from ._band import LIMITS, Given, Group, Mode, Wanted, backward, forward
from ._bounds import Bounds
from ._cache import TABLES
from ._scratch import Scratch, fresh
from ._threads import run
from ._tiles import Shared, Sum, Tiles, Tokens, chunks, first_positions, tile_rows
from ._weights import LOG2E, Blocks, Decay, Steps, gentle
from ._whole import Whole, WholeDecay, WholeSteps, count_pairs

FEW = 16
"""Queries up to which heads go whole, whatever the keys: decoding."""
SMALL = 1 << 16
"""Pairs of a head up to which it goes whole."""
TOGETHER = 1 << 19
"""Pairs of whole heads that go together, about."""
SEGMENT = 1 << 12
"""Queries of a part of tiles, at most."""
ENOUGH = 32
"""Jobs of a backward pass from which batch rows share one, and what their weights need."""
THREADS_PAY = 1 << 20
"""Pairs from which a call runs on several threads."""


class Part(NamedTuple):
    """Queries of some heads and batch rows; `groups` makes them for one thread, one by one."""

    rows: slice  # of the batch
    keys: slice  # key heads, whose dk and dv it adds to
    pairs: int  # that it visits, about
    groups: Callable[[Scratch], Iterator[tuple[Group, Mode]]]


class Call:
    """A request with its tensors."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, request: Request) -> None:
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.tokens = (q, k, v)
        self.request = request
        self.widths = request.static.weight.bandwidths
        self.group = request.static.heads // max(request.static.kv_heads, 1)
        ids = request.arrays.segment_ids
        self.ids = None if ids is None else _numbered(*ids, self.acc)
        self.bounds = Bounds(self.tokens, self.ids, request.static.scale, self.acc)

    # --- how the work is cut ---

    def parts(self) -> Iterator[Part]:
        """Cut the call into parts."""
        for rows, positions in self._batches():
            tokens = Tokens(*self.tokens, self.ids, *positions, self.acc, self.group)
            visited = self._visited(positions)
            pairs = self.tokens[0].shape[2] * len(visited)
            if not visited:
                continue  # `forward` and `backward` have filled in what that means
            if self.tokens[0].shape[2] <= FEW or pairs <= SMALL:
                yield from self._whole(tokens, rows, visited)
            else:
                yield from self._tiled(tokens, rows)

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

    def _whole(self, tokens: Tokens, rows: slice, visited: range) -> Iterator[Part]:
        """Yield whole heads, of several batch rows or of one."""
        kv_heads, len_q = self.request.static.kv_heads, tokens.q.shape[2]
        each = self.group * max(len_q, FEW) * len(visited)  # of a row and key head
        step = max(1, TOGETHER // (kv_heads * each))
        share = -(-kv_heads // -(-kv_heads * each // TOGETHER))
        weight = self._whole_weight(tokens, rows, visited)
        span = abs(tokens.q_start - tokens.k_start) + max(self._lengths())

        def part(begin: int, head: int) -> Part:
            batch = slice(begin, min(begin + step, rows.stop))
            keys = slice(head, min(head + share, kv_heads))
            heads = slice(keys.start * self.group, keys.stop * self.group)

            def groups(scratch: Scratch) -> Iterator[tuple[Group, Mode]]:
                mode = self._mode(batch, heads, span)
                if mode.large is not None:  # as products have them: (N, group * rows, 1)
                    large = mode.large[..., None].expand(-1, -1, len_q)
                    mode = mode._replace(large=large.reshape(-1, self.group * len_q, 1))
                own = weight.of(slice(begin - rows.start, batch.stop - rows.start), heads)
                yield Whole(tokens, batch, keys, own, visited, scratch), mode

            return Part(batch, keys, (batch.stop - begin) * (keys.stop - head) * each, groups)

        for begin in range(rows.start, rows.stop, step):
            for head in range(0, kv_heads, share):
                yield part(begin, head)

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
            slopes = tuple(tuple(gentle(m, self.acc) for m in x) for x in self._slopes(batch))
            # Of few queries each call is another step of decoding.
            kept, own = len(queries) > FEW, (static.causal, queries, keys, self.acc)
            return WholeDecay(slopes, self.widths, *own, kept)

        def make() -> Tensor:
            of_q, of_k = (self.request.labels(x.start, x.stop) for x in (queries, keys))
            counts = count_pairs(of_q, of_k, queries, keys, static.causal)
            return torch.from_numpy(counts).to(self.acc)

        key = (static.weight, static.causal, queries, keys, self.acc)
        kept = isinstance(static.weight, StepWeight)
        return WholeSteps(TABLES.get(key, make) if kept else make(), static.weight.samples)

    def _tiled(self, tokens: Tokens, rows: slice) -> Iterator[Part]:
        """Yield segments of the queries of each head, of one batch row or of several."""
        keys = range(tokens.k_start, tokens.k_start + tokens.k.shape[2])
        count, heads = tokens.q.shape[2], range(self.request.static.heads)
        step = max(1, (rows.stop - rows.start) * self.request.static.kv_heads // ENOUGH)

        @functools.cache
        def tiles(begin: int, size: int) -> tuple[Integers, tuple[Blocks, Blocks] | None]:
            first = first_positions(tokens.q_start + begin, min(SEGMENT, count - begin), size)
            if isinstance(self.request.static.weight, DecayWeight):
                return first, None
            return first, (self._blocks(first), self._blocks(first + size - 1))

        def part(batch: range, head: int, begin: int) -> Part:
            size = tile_rows(count, self.widths[head])

            def groups(scratch: Scratch) -> Iterator[tuple[Group, Mode]]:
                first, blocks = tiles(begin, size)
                weight = schedule = None
                for row in batch:
                    if weight is None or schedule is None or self._slopes_per_row:
                        weight = self._weight(head, row, first, size, blocks)
                        schedule = Schedule.of(first, size, size, weight.reach(first, size, keys))
                        weight.prepare(schedule)
                    widest = schedule.widest
                    span = size * (1 + max(widest.left, widest.right))
                    mode = self._mode(slice(row, row + 1), slice(head, head + 1), span)
                    shared = Shared(schedule, begin, int(first[0]) - keys.start, len(keys))
                    for chunk in chunks(schedule):
                        at = begin + chunk.tile * size
                        yield Tiles(tokens, (row, head), weight, chunk, at, shared, scratch), mode

            pairs = min(SEGMENT, count - begin) * (min(self.widths[head], len(keys)) + size)
            own = slice(batch.start, batch.stop), slice(head // self.group, head // self.group + 1)
            return Part(*own, len(batch) * pairs, groups)

        for at in range(rows.start, rows.stop, step):
            batch = range(at, min(at + step, rows.stop))
            for head, begin in itertools.product(heads, range(0, count, SEGMENT)):
                yield part(batch, head, begin)

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
        large = ~(self.bounds.logits(rows, heads) < LIMITS[self.acc].bound)  # NaN too
        slant = 0.0
        if self.request.arrays.slopes:
            reach = [min(width, span) for width in self.widths[heads]]
            slant = max(
                abs(gentle(m, self.acc)) * LOG2E * far
                for row in self._slopes(rows)
                for m, far in zip(row[heads], reach, strict=True)
            )
        bounded = self.bounds.exponents(rows, heads).max().item() + slant < -LIMITS[self.acc].floor
        return Mode(large if large.any() else None, bounded)

    @staticmethod
    def _threads(parts: Iterable[Part]) -> int:
        """Return how many threads may work: as many as torch's operations may take."""
        pay = sum(part.pairs for part in parts) >= THREADS_PAY
        return torch.get_num_threads() if pay else 1

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return out ``(B, H, Nq, Dv)`` and lse ``(B, H, Nq)``."""
        q, _, v = self.tokens
        out = fresh((*q.shape[:3], v.shape[3]), q.dtype)
        lse = torch.empty(q.shape[:3], dtype=self.acc, device="cpu")
        if self._is_blank:
            out.zero_(), lse.fill_(-math.inf)
        if q.numel():

            def work(part: Part, scratch: Scratch) -> None:
                for group, mode in part.groups(scratch):
                    forward(group, self.tokens, self.request.static.scale, mode, out, lse)

            parts = sorted(self.parts(), key=lambda part: -part.pairs)
            run(work, parts, self._threads(parts))
        return out, lse

    def backward(
        self, given: Given, wanted: tuple[bool, bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients that are wanted, by q, k, v and the slopes ``(B, H)``."""
        q, k = self.tokens[:2]
        dq, dk, dv = (
            fresh(x.shape, x.dtype) if asked else None
            for x, asked in zip(self.tokens, wanted[:3], strict=True)
        )
        by_slope = (
            torch.zeros(q.shape[:2], dtype=torch.float64, device="cpu") if wanted[3] else None
        )
        if self._is_blank or not q.numel():
            for x in (dq, dk, dv):
                if x is not None:
                    x.zero_()
        if q.numel() and k.numel():
            scale = self.request.static.scale
            self.bounds = Bounds(self.tokens, self.ids, scale, self.acc, given)
            owned: dict[tuple[int, int], list[Part]] = {}
            for part in self.parts():
                owned.setdefault((part.rows.start, part.keys.start), []).append(part)

            def work(parts: list[Part], scratch: Scratch) -> None:
                own_k, own_v = (
                    self._sum(x, parts[0], scratch, name) for name, x in (("dk", dk), ("dv", dv))
                )
                to = Wanted(dq, own_k, own_v, by_slope)
                for part in parts:
                    for group, mode in part.groups(scratch):
                        backward(group, self.tokens, scale, mode.bounded, given, to)
                for x, made in ((dk, own_k), (dv, own_v)):
                    if x is not None and made is not None and x.dtype != self.acc:
                        x[parts[0].rows, parts[0].keys] = made.x

            jobs = sorted(owned.values(), key=lambda parts: -sum(part.pairs for part in parts))
            run(work, jobs, self._threads(itertools.chain(*jobs)))
        return dq, dk, dv, by_slope

    def _sum(self, x: Tensor | None, part: Part, scratch: Scratch, name: str) -> Sum | None:
        """Return where dk or dv of a part's rows and heads is summed, 0: in place if it may be."""
        if x is None:
            return None
        own = x[part.rows, part.keys]
        if x.dtype != self.acc:
            own = scratch.get(f"sum of {name}", tuple(own.shape), self.acc)
        return Sum(own.zero_(), part.rows.start, part.keys.start)


def _numbered(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Number the segment ids of each side alike, from 0 up; padding is -1. Floats hold that."""
    both = np.concatenate([x.detach().numpy().astype(np.int64) for x in (queries, keys)], axis=1)
    numbers = np.unique(both, return_inverse=True)[1].reshape(both.shape)
    numbers[both < 0] = -1
    made = torch.from_numpy(numbers).to(dtype)
    return made[:, : queries.shape[1]], made[:, queries.shape[1] :]
