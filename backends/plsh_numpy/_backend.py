"""The backend object: cuts a request into jobs, runs them, assembles the result."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from plsh.backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Capabilities,
    Gradients,
    Harness,
    Request,
)
from plsh.weights import DecayWeight, StepWeight

from ._band import Given, backward, forward
from ._scratch import AnyArray, Scratch
from ._segment import BACKWARD, FORWARD, Job
from ._weights import Decay, Steps

SEGMENT = 1 << 13
"""Queries of a job, at most; the keys and values in their reach are copied once."""
LEAST = 1 << 9
"""Queries of a job at least, if there are fewer keys: where a tile is far from the keys and others
of its job are not, the positions between are visited, and are to be no more than the keys."""
COPIES = 1 << 22
"""Numbers that the copies of the batch rows and heads of one job hold, about."""
KEPT = 1 << 25
"""Bytes of the scratch memory of one processor that is kept between calls, at most."""
THREADS_PAY = 1 << 20
"""Pairs from which a call runs on several threads."""


class NumpyBackend:
    """The single-pass band kernel on NumPy: all methods and options, forward and vjp."""

    name = "numpy"
    spec_version = SPEC_VERSION

    def availability(self) -> Availability:
        """Say whether it can be used here: always."""
        return Availability(True)

    def capabilities(self) -> Capabilities:
        """Declare what it can do."""
        return Capabilities(arrays=("numpy",), gradients="vjp")

    def can_run(self, request: Request) -> str | None:
        """Return None: every request for NumPy arrays can be served."""
        return None

    def attend(self, q: AnyArray, k: AnyArray, v: AnyArray, request: Request) -> AttentionOutput:
        """Compute attention of checked arrays ``(B, H, N, D)``."""
        call = _Call.of(q, k, v, request)
        out = np.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype)
        lse = np.full(q.shape[:3], -np.inf, dtype=call.acc)

        def run(task: _Task, scratch: Scratch) -> None:
            part, log = out[task.place], lse[task.place]  # copies where batch rows are listed
            forward(call.job(task), scratch, call.acc, part, log)
            if not isinstance(task.batch, slice):
                rows = slice(task.rows.start, task.rows.stop)
                out[(*task.place, rows)] = part[:, :, rows]
                lse[(*task.place, rows)] = log[:, :, rows]

        call.run(run, [task for heads in call.head_groups(1) for task in call.tasks(heads)])
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
        call = _Call.of(q, k, v, request)
        dq = np.zeros(q.shape, dtype=q.dtype)
        dk, dv = np.empty(k.shape, dtype=call.acc), np.empty(v.shape, dtype=call.acc)
        by_slope = np.zeros(q.shape[:2])

        def run(item: tuple[range, list[_Task]], scratch: Scratch) -> None:
            owns, tasks = item
            # By the worker itself: fresh pages cost most where they are read before written.
            dk[:, owns.start : owns.stop] = 0
            dv[:, owns.start : owns.stop] = 0
            for task in tasks:
                own, rows = task.place, task.batch
                given = Given(
                    output.out[own],
                    output.lse[own],
                    grad_out[own],
                    None if grad_lse is None else grad_lse[own],
                )
                keys = call.key_heads(task.heads)
                key = (rows, slice(keys[0], keys[-1] + 1))  # no other worker writes there
                parts = (dq[own], dk[key], dv[key])  # copies where batch rows are listed
                by_slope[own] += backward(
                    call.job(task), scratch, call.acc, given, *parts, [g - keys[0] for g in keys]
                )
                if not isinstance(rows, slice):
                    dq[own], dk[key], dv[key] = parts

        # One worker owns a key head, so that sums are made in one order.
        owned: dict[range, list[_Task]] = {}
        for heads in call.head_groups(call.group):
            keys = call.key_heads(heads)
            owned.setdefault(range(keys[0], keys[-1] + 1), []).extend(call.tasks(heads))
        call.run(run, list(owned.items()))
        slopes = request.arrays.slopes
        gradient = None
        if slopes is not None:
            gradient = (by_slope if _per_row(slopes) else by_slope.sum(axis=0)).astype(call.acc)
        return Gradients(
            dq, dk.astype(k.dtype, copy=False), dv.astype(v.dtype, copy=False), gradient
        )

    def harness(self) -> Harness:
        """Return the handles for tests and benchmarks."""
        from plsh.testing import harness_for  # tools, which a call does not need

        return harness_for("numpy")


class _Task(NamedTuple):
    """Heads that share a schedule, batch rows that share their positions, a segment of queries."""

    batch: Any  # index of the batch axis: a slice, or an array of rows
    heads: range
    rows: range
    positions: tuple[int, int]  # of the first query and the first key

    @property
    def place(self) -> tuple[Any, slice]:
        """Index of the batch and head axes."""
        return self.batch, slice(self.heads.start, self.heads.stop)


class _Call(NamedTuple):
    """A request with its arrays."""

    q: AnyArray
    k: AnyArray
    v: AnyArray
    request: Request
    acc: np.dtype[Any]
    bandwidths: tuple[int, ...]
    group: int  # query heads of a key head

    @classmethod
    def of(cls, q: AnyArray, k: AnyArray, v: AnyArray, request: Request) -> "_Call":
        acc: np.dtype[Any] = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
        group = request.static.heads // max(request.static.kv_heads, 1)
        q, k, v = (x.view(np.ndarray) for x in (q, k, v))  # a memmap stays behind
        return cls(q, k, v, request, acc, request.static.weight.bandwidths, group)

    def head_groups(self, whole: int) -> list[range]:
        """Group the heads: several that fit in one chunk, else one by one, longest first.

        A group of several holds a multiple of `whole` heads.
        """
        heads, whole = self.request.static.heads, max(whole, 1)
        pairs = max(self.q.shape[2] * self.k.shape[2], 1)
        fit = min(BACKWARD.pairs // pairs, COPIES // self._numbers()) // whole * whole
        if fit > 1:
            return [range(h, min(h + fit, heads)) for h in range(0, heads, fit)]
        return [range(h, h + 1) for h in sorted(range(heads), key=lambda h: -self.bandwidths[h])]

    def tasks(self, heads: range) -> Iterator[_Task]:
        """Cut the work of some heads into jobs."""
        segment = min(SEGMENT, max(LEAST, self.k.shape[2] // LEAST * LEAST))
        for batch, positions in self._batches(len(heads)):
            for begin in range(0, self.q.shape[2], segment):
                rows = range(begin, min(begin + segment, self.q.shape[2]))
                yield _Task(batch, heads, rows, positions)

    def key_heads(self, heads: range) -> list[int]:
        """Return the key head that each head reads."""
        return [h // self.group for h in heads]

    def _numbers(self) -> int:
        """Return how many numbers the copies of one head and batch row hold, about."""
        length: int = min(self.q.shape[2], SEGMENT) + min(self.k.shape[2], SEGMENT)
        dims: int = self.q.shape[3] + self.v.shape[3]
        return length * dims + 1

    def _batches(self, heads: int) -> Iterator[tuple[Any, tuple[int, int]]]:
        """Group the batch rows by their positions, and into groups that fit in memory."""
        count = self.q.shape[0]
        most = max(1, COPIES // (heads * self._numbers()))
        starts = (self.request.arrays.q_offset, self.request.arrays.k_offset)
        if not any(isinstance(x, tuple) for x in starts):
            for b in range(0, count, most):
                yield slice(b, min(b + most, count)), starts
            return
        listed = [x if isinstance(x, tuple) else (x,) * count for x in starts]
        pairs = list(zip(*listed, strict=True))
        for pair in sorted(set(pairs)):
            rows = np.array([b for b in range(count) if pairs[b] == pair])
            for b in range(0, rows.size, most):
                yield rows[b : b + most], pair

    def job(self, task: _Task) -> Job:
        """Build a task's job."""
        ids, index = self.request.arrays.segment_ids, self.key_heads(task.heads)
        own: Any = index if len(index) > 1 else slice(index[0], index[0] + 1)
        return Job(
            self.q[task.place],
            self.k[task.batch][:, own],
            self.v[task.batch][:, own],
            None if ids is None else (ids[0][task.batch], ids[1][task.batch]),
            self._weight(task),
            self.request.static.scale,
            task.positions[0],
            range(task.positions[1], task.positions[1] + self.k.shape[2]),
            task.rows,
        )

    def _weight(self, task: _Task) -> Decay | Steps:
        weight, causal = self.request.static.weight, self.request.static.causal
        heads = task.place[1]
        widths = self.bandwidths[heads]
        if isinstance(weight, DecayWeight):
            slopes = self.request.arrays.slopes
            if _per_row(slopes):
                own = np.array([row[heads] for row in slopes])[task.batch]
            else:
                own = np.array([slopes[heads]])
            return Decay(own, np.array(widths), causal, self.acc)

        def labels(start: int, stop: int) -> AnyArray:  # (G, s, positions)
            if len(task.heads) == 1:
                one: AnyArray = self.request.labels(start, stop, heads.start)[None]
                return one
            every = self.request.labels(start, stop)  # (H or 1, s, positions)
            return np.broadcast_to(every, (len(self.bandwidths), *every.shape[1:]))[heads]

        recipe = (weight, task.heads) if isinstance(weight, StepWeight) else None
        return Steps(labels, weight.samples, max(widths), causal, self.acc, recipe)

    def run(self, work: Callable[[Any, Scratch], None], items: list[Any]) -> None:
        """Run independent pieces of work, on threads if there is enough to do."""
        queue = deque(items)

        def work_off() -> None:
            scratch = _pop(_FREE) or Scratch()
            # Logits that overflow or underflow are noticed and met by the kernel.
            with np.errstate(all="ignore"):
                while (item := _pop(queue)) is not None:
                    work(item, scratch)
            if scratch.nbytes <= KEPT and len(_FREE) < _cpus():
                _FREE.append(scratch)

        keys = sum(min(2 * width + FORWARD.rows, self.k.shape[2]) for width in self.bandwidths)
        threads = min(len(items), _cpus())
        if threads <= 1 or self.q.shape[0] * self.q.shape[2] * keys < THREADS_PAY:
            work_off()
            return
        with ThreadPoolExecutor(threads - 1) as pool:
            running = [pool.submit(work_off) for _ in range(threads - 1)]
            try:
                work_off()
                for done in running:
                    done.result()
            except BaseException:  # an interrupt, or a fault: what has not begun need not
                queue.clear()
                raise


_FREE: deque[Scratch] = deque()
"""Scratch memory that no thread uses now."""


def _pop(queue: deque[Any]) -> Any:
    """Take the first item, None if there is none; safe among threads."""
    try:
        return queue.popleft()
    except IndexError:
        return None


def _per_row(slopes: Any) -> bool:
    """Whether slopes are given per batch row."""
    return bool(slopes) and isinstance(slopes[0], tuple)


def _cpus() -> int:
    """Count the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


BACKEND = NumpyBackend()
