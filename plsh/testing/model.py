"""A complete backend to read before you write one: a GPU kernel in outline, in NumPy.

The grid is (batch row, query head, tile of queries). A tile keeps its queries and walks over the
tiles of keys in its band; of each it forms the scores and folds them into a running softmax:

    S = c q k^T + log w        hidden pairs: S = -inf
    P = exp(S - top)           top, the running maximum of each row, over visible pairs only
    out = sum(P v) / sum(P)    lse = top + log(sum(P))

The backward pass has two such grids: over tiles of queries for the gradients by q and the slopes,
over tiles of keys for those by k and v, so that each sum has one owner and one order.

Tiles are of a fixed size and live in buffers that are used again and again, as in shared memory.
What lies past the end of the sequence is treated as padding: its segment id is -1, its values are
zeroed. So one comparison of ids covers tails, padding and packed documents.

Every step is a short method. `plsh.testing.mutants` breaks them one at a time.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from plsh.backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Capabilities,
    Gradients,
    Harness,
    Request,
    Static,
)
from plsh.weights import DecayWeight

__all__ = ["BACKEND", "Head", "ModelBackend", "Rows", "Softmax"]

AnyArray = npt.NDArray[Any]
Arrays = tuple[AnyArray, AnyArray, AnyArray]  # q, k, v


class Head(NamedTuple):
    """What all tiles of one batch row and query head share; pairs are of queries and keys."""

    place: tuple[int, int]  # batch row and query head
    key_place: tuple[int, int]  # batch row and key head
    q: AnyArray  # (Nq, D), as given
    k: AnyArray  # (Nk, D)
    v: AnyArray  # (Nk, Dv)
    starts: tuple[int, int]  # positions of token 0
    ids: tuple[AnyArray, AnyArray]  # segments, int64, whole tiles; -1 past the end
    labels: tuple[AnyArray, AnyArray] | None  # of blocks, (s, whole tiles); None under a decay
    slope: Any  # in the accumulation dtype; None under lsh
    width: int  # no pair farther apart has weight
    static: Static
    acc: np.dtype[Any]
    buffers: dict[str, AnyArray]


class Softmax(NamedTuple):
    """The running state of a tile's rows."""

    top: AnyArray  # (tile,): largest score so far; -inf if no key has been seen
    total: AnyArray  # (tile,): sum of exp(score - top)
    values: AnyArray  # (tile, Dv): sum of exp(score - top) v


class Rows(NamedTuple):
    """What the backward pass needs of a head's queries, filled up to whole tiles."""

    grad: AnyArray  # (Nq, Dv): gradient by out; 0 in a row that saw no key
    lse: AnyArray  # (Nq,)
    delta: AnyArray  # (Nq,): grad . out - gradient by lse


class ModelBackend:
    """Every method, option and dtype of the standard for NumPy arrays, forward and vjp."""

    name = "model"
    spec_version = SPEC_VERSION
    tile = 16
    """Queries, and keys, of a tile."""

    # --- what it says of itself -------------------------------------------------------------------

    def availability(self) -> Availability:
        """Say whether it can be used here: look for the device and the library, cheaply."""
        return Availability(True)

    def capabilities(self) -> Capabilities:
        """Declare what it can do; the core refuses everything else."""
        return Capabilities(arrays=("numpy",), gradients="vjp")

    def can_run(self, request: Request) -> str | None:
        """Return None, or why it can't serve a request that it declares."""
        return None

    def harness(self) -> Harness:
        """Return the handles for tests and benchmarks."""
        from plsh.testing import harness_for

        return harness_for("numpy")

    # --- the three grids --------------------------------------------------------------------------

    def attend(self, q: AnyArray, k: AnyArray, v: AnyArray, request: Request) -> AttentionOutput:
        """Compute attention of checked arrays ``(B, H, N, D)``."""
        out = np.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype)
        lse = np.zeros(q.shape[:3], dtype=self.accumulation(q))
        with np.errstate(all="ignore"):  # hidden scores may overflow, and log(0) is -inf
            for group in self.groups((q, k, v), request):
                for head in group:
                    for i in range(0, q.shape[2], self.tile):
                        rows, log = self.attend_tile(head, i)
                        self.store(out[head.place], i, rows)
                        self.store(lse[head.place], i, log)
        return AttentionOutput(out, lse)

    def vjp(
        self,
        q: AnyArray,
        k: AnyArray,
        v: AnyArray,
        output: AttentionOutput,
        grad_out: AnyArray,
        grad_lse: AnyArray | None,
        request: Request,
    ) -> Gradients:
        """Return the gradients by q, k, v and, under a decay, the slopes."""
        dq, dk, dv = (np.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        by_slope = np.zeros(q.shape[:2])  # a long sum of few numbers: float64
        with np.errstate(all="ignore"):
            for group in self.groups((q, k, v), request):
                rows = [self.row_terms(head, output, grad_out, grad_lse) for head in group]
                for head, own in zip(group, rows, strict=True):
                    for i in range(0, q.shape[2], self.tile):
                        by_query, share = self.query_gradients(head, own, i)
                        self.store(dq[head.place], i, by_query)
                        by_slope[head.place] += share
                for j in range(0, k.shape[2], self.tile):
                    by_key, by_value = self.key_gradients(group, rows, j)
                    self.store(dk[group[0].key_place], j, by_key)
                    self.store(dv[group[0].key_place], j, by_value)
        return Gradients(dq, dk, dv, self.slope_gradient(by_slope, self.accumulation(q), request))

    def attend_tile(self, head: Head, i: int) -> tuple[AnyArray, AnyArray]:
        """Return output and lse of the tile of queries at `i`."""
        state = self.walk(head, i)
        out = self.divide(state)
        if not np.isfinite(out).all():  # near the largest number: once more, with smaller values
            small = self.divide(self.walk(head, i, 2.0**-32)) * head.acc.type(2.0**32)
            out = np.where(np.isfinite(out), out, small)
        return out, self.lse(state)

    def walk(self, head: Head, i: int, factor: float = 1.0) -> Softmax:
        """Fold the keys in the band of the tile at `i`, their values times `factor`."""
        q = self.load_queries(head, i)
        state = Softmax(
            np.full(self.tile, -np.inf, dtype=head.acc),
            np.zeros(self.tile, dtype=head.acc),
            np.zeros((self.tile, head.v.shape[1]), dtype=head.acc),
        )
        for j in self.key_tiles(head, i):
            k, v = self.load_keys(head, j), self.load_values(head, j)
            state = self.fold(head, state, self.scores(head, i, j, q, k), v * head.acc.type(factor))
        return state

    def query_gradients(self, head: Head, rows: Rows, i: int) -> tuple[AnyArray, float]:
        """Return dQ of the tile of queries at `i`, and its share of the gradient by the slope."""
        q, dq, share = (
            self.load_queries(head, i),
            np.zeros((self.tile, head.q.shape[1]), head.acc),
            0.0,
        )
        for j in self.key_tiles(head, i):
            k, v = self.load_keys(head, j), self.load_values(head, j)
            _, ds = self.pair_gradients(head, rows, i, j, q, k, v)
            dq += ds @ k
            share -= float(np.sum(self.distance(head, i, j) * ds))
        return dq * head.acc.type(head.static.scale), share

    def key_gradients(
        self, group: list[Head], rows: list[Rows], j: int
    ) -> tuple[AnyArray, AnyArray]:
        """Return dK and dV of the tile of keys at `j`, summed over the heads that read it."""
        dk, dv = (np.zeros((self.tile, x.shape[1]), group[0].acc) for x in (group[0].k, group[0].v))
        k, v = self.load_keys(group[0], j), self.load_values(group[0], j)
        for head, own in zip(group, rows, strict=True):
            for i in self.query_tiles(head, j):
                q = self.load_queries(head, i)
                p, ds = self.pair_gradients(head, own, i, j, q, k, v)
                dk += ds.T @ q  # q carries the scale
                dv += self.narrow(head, p).T @ own.grad[i : i + self.tile]
        return dk, dv

    # --- which head reads what --------------------------------------------------------------------

    def groups(self, arrays: Arrays, request: Request) -> Iterator[list[Head]]:
        """Yield the query heads that read one key head of one batch row, together."""
        q, k, _ = arrays
        buffers: dict[str, AnyArray] = {}
        for b in range(q.shape[0]):
            for g in range(k.shape[1]):
                heads = [h for h in range(q.shape[1]) if self.kv_head(h, request.static) == g]
                if heads:
                    yield [self.head((b, h), arrays, request, buffers) for h in heads]

    def kv_head(self, h: int, static: Static) -> int:
        """Return the key head that query head `h` reads."""
        return h // (static.heads // static.kv_heads)

    def head(
        self, place: tuple[int, int], arrays: Arrays, request: Request, buffers: dict[str, AnyArray]
    ) -> Head:
        """Gather what the tiles of one batch row and query head share."""
        q, k, v = arrays
        (b, h), static, operands = place, request.static, request.arrays
        key_place, acc = (b, self.kv_head(h, static)), self.accumulation(q)
        starts = (self.start(operands.q_offset, b), self.start(operands.k_offset, b))
        pair, (n_q, n_k) = operands.segment_ids, (q.shape[2], k.shape[2])
        ids = (self.segments(pair, 0, b, n_q), self.segments(pair, 1, b, n_k))
        labels = slope = None
        if isinstance(static.weight, DecayWeight):
            slope = self.slope(operands.slopes, b, h, acc)
        else:
            first, second = starts
            labels = (self.labels(request, first, n_q, h), self.labels(request, second, n_k, h))
        own = (q[place], k[key_place], v[key_place], starts, ids, labels, slope)
        return Head(place, key_place, *own, self.width(static, h), static, acc, buffers)

    def accumulation(self, q: AnyArray) -> np.dtype[Any]:
        """Return the dtype of scores, sums and lse: float32, or float64 for float64."""
        return np.dtype(np.float64 if q.dtype == np.float64 else np.float32)

    def start(self, offset: Any, b: int) -> int:
        """Return the position of a batch row's first token: one number for all, or one a row."""
        rows = np.asarray(offset)
        return int(rows[b] if rows.ndim else rows)

    def slope(self, slopes: Any, b: int, h: int, acc: np.dtype[Any]) -> Any:
        """Return a head's slope, of ``(H,)`` or ``(B, H)``, whose products do not overflow."""
        rows = np.asarray(slopes, dtype=np.float64)
        own = rows[b, h] if rows.ndim == 2 else rows[h]
        return acc.type(min(own, float(np.finfo(acc).max) / 2**31))

    def width(self, static: Static, h: int) -> int:
        """Return the distance beyond which head `h` has no weight."""
        return static.weight.bandwidths[h]

    def labels(self, request: Request, start: int, n: int, h: int) -> AnyArray:
        """Return the labels ``(s, n)`` of a head's blocks at the positions from `start` on."""
        return self.fill(request.labels(start, start + n, h))

    def segments(self, pair: Any, side: int, b: int, n: int) -> AnyArray:
        """Return the segments of a batch row's queries (side 0) or keys (side 1)."""
        own = np.zeros(n) if pair is None else pair[side][b]
        return self.fill(own.astype(np.int64))

    def fill(self, x: AnyArray) -> AnyArray:
        """Fill ``(…, n)`` up to whole tiles with -1, the id of padding."""
        tail = np.full((*x.shape[:-1], -x.shape[-1] % self.tile), -1, dtype=x.dtype)
        return np.concatenate([x, tail], axis=-1)

    # --- tiles ------------------------------------------------------------------------------------

    def key_tiles(self, head: Head, i: int) -> range:
        """Return the tiles of keys that the queries of the tile at `i` may see."""
        first = head.starts[0] + i - head.starts[1]  # that of the first query, as a key's index
        after = 0 if head.static.causal else head.width
        return self.tiles(first - head.width, first + self.tile + after, head.k.shape[0])

    def query_tiles(self, head: Head, j: int) -> range:
        """Return the tiles of queries that may see the keys of the tile at `j`."""
        first = head.starts[1] + j - head.starts[0]
        before = 0 if head.static.causal else head.width
        return self.tiles(first - before, first + self.tile + head.width, head.q.shape[0])

    def tiles(self, low: int, high: int, n: int) -> range:
        """Return the first tokens of the tiles that meet ``[low, high)``, of n tokens."""
        return range(max(low, 0) // self.tile * self.tile, min(high, n), self.tile)

    def load_queries(self, head: Head, i: int) -> AnyArray:
        """Load a tile of queries, times the scale."""
        q = self.load(head, "q", head.q, head.ids[0], i)
        q *= head.acc.type(head.static.scale)
        return q

    def load_keys(self, head: Head, j: int) -> AnyArray:
        """Load a tile of keys."""
        return self.load(head, "k", head.k, head.ids[1], j)

    def load_values(self, head: Head, j: int) -> AnyArray:
        """Load a tile of values."""
        return self.load(head, "v", head.v, head.ids[1], j)

    def load(self, head: Head, name: str, x: AnyArray, ids: AnyArray, start: int) -> AnyArray:
        """Copy the tokens from `start` on, widened; padding is zeroed, for 0 times NaN is NaN."""
        part = x[start : start + self.tile]
        tile = self.buffer(head, name, x.shape[1])
        tile[: part.shape[0]] = part
        tile[ids[start : start + self.tile] < 0] = 0
        return tile

    def buffer(self, head: Head, name: str, dim: int) -> AnyArray:
        """Return the tile of that name, with whatever it holds from the last use."""
        return head.buffers.setdefault(name, np.empty((self.tile, dim), dtype=head.acc))

    def store(self, x: AnyArray, start: int, tile: AnyArray) -> None:
        """Write the rows of a tile that exist; rounds to the array's dtype."""
        part = x[start : start + self.tile]
        part[...] = tile[: part.shape[0]]

    # --- the weight of a tile of pairs, (tile, tile) ----------------------------------------------

    def scores(self, head: Head, i: int, j: int, q: AnyArray, k: AnyArray) -> AnyArray:
        """Return ``c q_i . k_j + log w_ij``, -inf where hidden: by a product that is NaN, too."""
        log_w = self.log_weight(head, i, j)
        seen = self.visible(head, i, j) & (log_w > -np.inf)
        return np.where(seen, q @ k.T + log_w, -np.inf)

    def visible(self, head: Head, i: int, j: int) -> AnyArray:
        """Return what neither padding, nor a segment, nor causality hides."""
        q_ids, k_ids = head.ids[0][i : i + self.tile, None], head.ids[1][None, j : j + self.tile]
        seen: AnyArray = (q_ids == k_ids) & (k_ids >= 0)
        return seen & (self.apart(head, i, j) >= 0) if head.static.causal else seen

    def log_weight(self, head: Head, i: int, j: int) -> AnyArray:
        """Return the logarithm of the positional weight, -inf for 0."""
        if head.labels is None:
            distance = self.distance(head, i, j)
            return np.where(distance <= head.width, self.bias(head, distance), -np.inf)
        samples = head.acc.type(head.labels[0].shape[0])
        return np.asarray(np.log(self.count(*head.labels, i, j).astype(head.acc) / samples))

    def bias(self, head: Head, distance: AnyArray) -> AnyArray:
        """Return ``-slope * distance``; the distance is an integer until here."""
        return np.asarray(-head.slope * distance.astype(head.acc))

    def count(self, of_queries: AnyArray, of_keys: AnyArray, i: int, j: int) -> AnyArray:
        """Return in how many partitions two tokens have a common block, that is one label."""
        same = of_queries[:, i : i + self.tile, None] == of_keys[:, None, j : j + self.tile]
        return np.asarray(same.sum(axis=0))

    def distance(self, head: Head, i: int, j: int) -> AnyArray:
        """Return ``|i - j|`` between positions, integers."""
        return np.abs(self.apart(head, i, j))

    def apart(self, head: Head, i: int, j: int) -> AnyArray:
        """Return the positions of queries less those of keys, integers."""
        return self.positions(head, 0, i)[:, None] - self.positions(head, 1, j)[None, :]

    def positions(self, head: Head, side: int, first: int) -> AnyArray:
        """Return the positions of the tile at `first` of the queries (side 0) or keys (side 1)."""
        return head.starts[side] + first + np.arange(self.tile)

    # --- softmax, forward and backward ------------------------------------------------------------

    def fold(self, head: Head, state: Softmax, scores: AnyArray, v: AnyArray) -> Softmax:
        """Fold the scores and values of a tile of keys into the running softmax."""
        top = np.maximum(state.top, scores.max(axis=1))
        shift = np.where(top > -np.inf, top, 0)  # no key seen yet: -inf less -inf would be NaN
        p, kept = np.exp(scores - shift[:, None]), np.exp(state.top - shift)
        total = state.total * kept + p.sum(axis=1)
        return Softmax(top, total, state.values * kept[:, None] + self.narrow(head, p) @ v)

    def narrow(self, head: Head, p: AnyArray) -> AnyArray:
        """Round P to the input dtype, as tensor cores take it; products add up in wide sums."""
        return p.astype(head.v.dtype).astype(head.acc)

    def divide(self, state: Softmax) -> AnyArray:
        """Return the output of a tile's rows: 0 in a row that saw no key."""
        return state.values / np.where(state.total > 0, state.total, 1)[:, None]

    def lse(self, state: Softmax) -> AnyArray:
        """Return the log of the sums: -inf in a row that saw no key."""
        return state.top + np.log(state.total)

    def row_terms(
        self, head: Head, output: AttentionOutput, grad_out: AnyArray, grad_lse: AnyArray | None
    ) -> Rows:
        """Prepare the backward pass, from the whole row's output and lse."""

        def whole(x: AnyArray, rest: float = 0.0) -> AnyArray:
            filled = np.full((head.ids[0].size, *x.shape[1:]), rest, dtype=head.acc)
            filled[: x.shape[0]] = x
            return filled

        grad, out = whole(grad_out[head.place]), whole(output.out[head.place])
        lse = whole(output.lse[head.place], -np.inf)
        by_lse = 0.0 if grad_lse is None else whole(grad_lse[head.place])
        grad[lse == -np.inf] = 0  # whatever was given there
        return Rows(grad, lse, self.delta(grad, out, by_lse))

    def delta(self, grad: AnyArray, out: AnyArray, by_lse: Any) -> AnyArray:
        """Return what a row takes off every dP."""
        return np.asarray(np.sum(grad * out, axis=1) - by_lse)

    def pair_gradients(
        self, head: Head, rows: Rows, i: int, j: int, q: AnyArray, k: AnyArray, v: AnyArray
    ) -> tuple[AnyArray, AnyArray]:
        """Return P and ``dS = P (dP - delta)`` of a tile of pairs, both 0 where hidden."""
        own, scores = slice(i, i + self.tile), self.scores(head, i, j, q, k)
        p = np.where(scores > -np.inf, np.exp(scores - rows.lse[own, None]), 0)
        dp = rows.grad[own] @ v.T
        return p, np.where(p > 0, p * (dp - rows.delta[own, None]), 0)

    def slope_gradient(self, by_slope: AnyArray, acc: np.dtype[Any], request: Request) -> Any:
        """Return the gradient by the slopes in their shape, None where there are none."""
        slopes = request.arrays.slopes
        if slopes is None:
            return None
        return (by_slope if np.ndim(slopes) == 2 else by_slope.sum(axis=0)).astype(acc)


BACKEND = ModelBackend()
