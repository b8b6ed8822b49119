"""Blocks as pieces that a kernel without a bias and with few masks can take: integers of the host.

A piece is a run of queries that sees a run of keys, all of it or, in a square on the diagonal, the
part up to each query. Pieces come in rounds in which no token of a head is twice, so that what
rounds add up needs no atomics, and its order is fixed.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
Labels: TypeAlias = npt.NDArray[np.int32]


class Pieces(NamedTuple):
    """Pieces of several heads; all int64 ``(pieces,)`` but `causal`."""

    causal: bool
    row: Integers  # head, later batch row times heads + head
    query: Integers  # index of the first
    queries: Integers
    key: Integers
    keys: Integers

    def of_rows(self, rows: Integers, heads: int) -> "Pieces":
        """Repeat the pieces of all heads for some batch rows."""
        row = (rows[:, None] * heads + self.row).reshape(-1)
        rest = (np.tile(x, rows.size) for x in self[2:])
        return Pieces(self.causal, row, *rest)


class _Runs(NamedTuple):
    """Runs of tokens of one head, label and segment; all int64 ``(runs,)``."""

    head: Integers
    begin: Integers
    length: Integers
    label: Integers
    segment: Integers


def rounds(
    labels: tuple[Labels, Labels],
    starts: tuple[int, int],
    segments: tuple[Integers, Integers] | None,
    causal: bool,
) -> Iterator[Pieces]:
    """Cut one sample of one batch row into rounds.

    `labels` are those of queries ``(H, Nq)`` and keys ``(H, Nk)``, `starts` the positions of the
    first, and `segments` ``(Nq,)`` and ``(Nk,)``.
    """
    ids = segments or (None, None)
    queries, keys = (_runs(x, own) for x, own in zip(labels, ids, strict=True))
    left, right, turn = _match(queries, keys)
    head, a, b = queries.head[left], queries.begin[left], (queries.begin + queries.length)[left]
    c, d = keys.begin[right], (keys.begin + keys.length)[right]
    if not causal:
        yield from _by_turn(False, head, a, b, c, d, turn)
        return
    ahead = starts[0] - starts[1]  # of the key at a query's own position, as an index
    own = a + ahead
    yield from _by_turn(False, head, a, b, c, np.minimum(d, own), turn)
    low, high = np.maximum(c, own), np.minimum(d, b + ahead)
    yield from _by_turn(True, head, low - ahead, high - ahead, low, high, turn)
    yield from _by_turn(False, head, np.maximum(high - ahead, a), b, low, high, turn)


def _runs(labels: Labels, segments: Integers | None) -> _Runs:
    """Find the runs of tokens that are no padding."""
    heads, count = labels.shape
    ids = np.zeros(count, dtype=np.int64) if segments is None else segments
    new = np.ones((heads, count), dtype=bool)
    new[:, 1:] = (labels[:, 1:] != labels[:, :-1]) | (ids[1:] != ids[:-1])
    head, begin = np.nonzero(new)
    flat = head * count + begin
    length = np.diff(flat, append=heads * count)
    seen = ids[begin] >= 0
    found = (head, begin, length, labels[head, begin].astype(np.int64), ids[begin])
    return _Runs(*(x[seen].astype(np.int64) for x in found))


def _match(queries: _Runs, keys: _Runs) -> tuple[Integers, Integers, Integers]:
    """Pair the runs of one head, label and segment: indices of both, and turns.

    No run takes part twice in one turn: of I runs of queries and J of keys, i and j meet in turn
    (i + j) mod max(I, J).
    """
    counts = queries.head.size
    codes = [
        np.concatenate([a, b]) for a, b in zip(queries, keys, strict=True)
    ]  # head, begin, length, label, segment
    code = codes[0] << 31 | codes[3]
    segment = np.unique(codes[4], return_inverse=True)[1]
    code = np.unique(code, return_inverse=True)[1] * (segment.max(initial=0) + 1) + segment
    code_q, code_k = code[:counts], code[counts:]
    order_q, order_k = np.argsort(code_q, kind="stable"), np.argsort(code_k, kind="stable")
    sorted_q, sorted_k = code_q[order_q], code_k[order_k]
    begin, end = (np.searchsorted(sorted_k, code_q, side=x) for x in ("left", "right"))
    begin_q, end_q = (np.searchsorted(sorted_q, code_q, side=x) for x in ("left", "right"))
    place = np.empty(counts, dtype=np.int64)
    place[order_q] = np.arange(counts)
    matches = end - begin
    left = np.repeat(np.arange(counts), matches)
    j = np.arange(left.size) - np.repeat(np.cumsum(matches) - matches, matches)
    most = np.maximum(matches, end_q - begin_q)[left]
    turn = ((place - begin_q)[left] + j) % np.maximum(most, 1)
    return left, order_k[begin[left] + j], turn


def _by_turn(
    causal: bool, head: Integers, a: Integers, b: Integers, c: Integers, d: Integers, turn: Integers
) -> Iterator[Pieces]:
    """Yield the pieces that hold a pair, queries [a, b) and keys [c, d), turn by turn."""
    real = (a < b) & (c < d)
    for now in np.unique(turn[real]):
        at = np.flatnonzero(real & (turn == now))
        yield Pieces(causal, head[at], a[at], (b - a)[at], c[at], (d - c)[at])
