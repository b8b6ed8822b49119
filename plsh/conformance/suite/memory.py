"""Memory that is linear in the length, calls that leave nothing, and no pair left out."""

import contextlib
import gc
import itertools
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from plsh.conformance.suite.common import METHODS, NAMES, bits, dtype_of, make
from plsh.hashing import FixedBlocks
from plsh.methods import Exact, PositionalLSH, Window
from plsh.testing.harness import double_precision

METHOD = pytest.mark.parametrize("method", METHODS)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

# --- peak memory ----------------------------------------------------------------------------------

WIDTH = 1024
PER_TOKEN = 2048
"""Bytes for each further token: half of a row of the band in float32, and much more than a few
copies of a token's q, k, v, output and gradients of 8 numbers each, and its labels."""


@contextlib.contextmanager
def peak(subject):
    """Measure the peak of memory held: yield a list that gets the bytes above the start."""
    found = []
    if subject.kind == "numpy":
        with _traced(found):
            yield found
    elif _is_torch_on_cuda(subject):
        with _cuda(found):
            yield found
    elif subject.kind == "cupy":
        with _pooled(found):
            yield found
    else:
        with _resident(found):
            yield found


@contextlib.contextmanager
def _traced(found):
    tracemalloc.start()
    try:
        yield
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def _is_torch_on_cuda(subject):
    return subject.kind == "torch" and subject.array(np.zeros(1), "float32").is_cuda


@contextlib.contextmanager
def _cuda(found):
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    found.append(torch.cuda.max_memory_allocated() - start)


@contextlib.contextmanager
def _pooled(found):
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    start = pool.total_bytes()
    yield
    found.append(pool.total_bytes() - start)  # the pool gives nothing back by itself


@contextlib.contextmanager
def _resident(found):
    """Sample the resident memory of the process."""
    gc.collect()
    start, top, done = resident(), [0], threading.Event()

    def sample():
        while not done.wait(0.0005):
            top[0] = max(top[0], resident())

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    found.append(max(top[0], resident()) - start)


def resident():
    """Return the resident memory in bytes; the highest so far where Linux's /proc is missing."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * 4096
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _long(subject, method, n, causal):
    """Return a problem of one head, its band some thousand tokens wide."""
    kinds = {
        "exact": (Exact(), (2.0**-9,)),
        "window": (Window(WIDTH), (2.0**-9,)),
        "lsh": (PositionalLSH(8, seed=1), (2.0**-9,)),
    }
    kind, slopes = kinds[method]
    options = {"batch": 1, "heads": 1, "kv_heads": 1, "dims": (8, 8), "causal": causal}
    return make(subject, n, **options).but(method=kind, slopes=slopes, plain_slopes=True)


def _allowed(subject):
    """Return the bytes a token; resident memory is known to some megabytes, no better."""
    return PER_TOKEN if subject.kind == "numpy" else 4 * PER_TOKEN


def _growth(subject, method, causal, run):
    """Return by how many bytes the peak grows with each further token."""
    lengths = (2048, 4096) if method == "exact" and not subject.full else (4096, 8192)
    peaks = []
    for n in lengths:
        problem = _long(subject, method, n, causal)
        inputs, keywords = problem.arrays(subject), problem.keywords(subject)
        run(problem, inputs, keywords)  # caches are warm, programs are compiled
        with peak(subject) as found:
            run(problem, inputs, keywords)
        peaks += found
    return (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])


@pytest.mark.requirement("MEM-1")
@METHOD
@CAUSAL
def test_memory_of_a_call_is_linear(method, causal, subject):
    def run(problem, inputs, keywords):
        subject.attention(*inputs, return_lse=True, **keywords)

    assert _growth(subject, method, causal, run) < _allowed(subject)


@pytest.mark.requirement("MEM-1")
@pytest.mark.needs("vjp")
@METHOD
def test_memory_of_gradients_is_linear(method, subject):
    def run(problem, inputs, keywords):
        subject.gradients(*inputs, *problem.cotangents(subject), **keywords)

    assert _growth(subject, method, True, run) < _allowed(subject)


@pytest.mark.requirement("MEM-1", "NUM-2")
@pytest.mark.parametrize("method", ["exact", "window"])
def test_memory_does_not_grow_with_the_distance(method, subject):
    """Queries far from all keys: no room for the positions in between."""
    peaks = []
    for apart in (100, 20_000):
        problem = _long(subject, method, 20, False).but(q_offset=apart)
        problem = problem.but(method=Window(2**25) if method == "window" else Exact())
        problem.output(subject)
        with peak(subject) as found:
            problem.output(subject)
        peaks += found
    assert peaks[1] - peaks[0] < 200 * _allowed(subject)


# --- from call to call ----------------------------------------------------------------------------


@pytest.mark.requirement("MEM-2")
@METHOD
def test_nothing_grows_from_call_to_call(method, subject):
    n = 64 if subject.kind == "numpy" else 1024
    problem = make(subject, n, method=method, batch=1, causal=True)
    inputs, keywords = problem.arrays(subject), problem.keywords(subject)
    cotangents = problem.cotangents(subject)

    def run(times):
        for _ in range(times):
            if subject.differentiates:
                subject.gradients(*inputs, *cotangents, **keywords)
            else:
                subject.attention(*inputs, return_lse=True, **keywords)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if subject.kind == "numpy" else resident()

    tracemalloc.start()
    try:
        times = 6
        held = [run(times) for _ in range(4)]
        # What leaks grows each time; what the process itself sets up, threads or pools, does not.
        grown = min(after - before for before, after in itertools.pairwise(held))
    finally:
        tracemalloc.stop()
    one = problem.q.nbytes + problem.grad_out.nbytes  # of the size of one call's results
    assert grown < (one if subject.kind == "numpy" else times * one / 2)


@pytest.mark.requirement("MEM-2", "NUM-11")
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.full)])
def test_threads_give_what_calls_one_by_one_give(rounds, subject):
    """Calls of several shapes and methods at once, with seeds that no cache holds yet."""
    known = [m for m in METHODS if m in subject.capabilities.methods]
    problems = [
        make(subject, 40 + 13 * i, method=known[i % len(known)], seed=i, causal=True)
        for i in range(9)
    ]
    problems = [
        p.but(method=PositionalLSH(6, seed=(77, i))) if not p.is_decay else p
        for i, p in enumerate(problems)
    ]

    def run(problem):
        with double_precision(subject.kind):
            found = tuple(problem.output(subject))
            return found + tuple(problem.gradients(subject) if subject.differentiates else ())

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, problems * rounds))
    for i, problem in enumerate(problems * rounds):
        bits(subject, together[i], run(problem))


# --- which pairs are visited ----------------------------------------------------------------------

EDGES = [0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 299]
"""Widths and sizes of blocks at the edges of tiles."""


def _counting(subject, n, causal, **options):
    """Return a problem with q = 0 and slope 0: the lse is the logarithm of the weights' sum."""
    heads = len(EDGES)
    problem = make(
        subject, n, batch=1, heads=heads, kv_heads=1, dims=(1, 1), causal=causal,
        slopes=(0.0,) * heads, **options,
    )  # fmt: skip
    return problem.but(q=0 * problem.q)


@pytest.mark.requirement("MEM-3", "MTH-2", "ATT-12")
@pytest.mark.parametrize("method", ["window"])
@CAUSAL
@pytest.mark.parametrize(("n", "first"), [(300, 0), (257, 5), (128, 1000), (65, -20)])
def test_every_key_in_a_window_is_seen(method, causal, n, first, subject):
    problem = _counting(subject, n, causal, method=method, q_offset=first, k_offset=first)
    problem.but(method=Window(tuple(EDGES))).check_output(subject)
    moved = problem.but(method=Window(tuple(EDGES)), q_offset=first + 37)
    moved.check_output(subject)


@pytest.mark.requirement("MEM-3", "BCK-13", "NUM-6")
@pytest.mark.parametrize("method", ["lsh"])
@CAUSAL
@pytest.mark.parametrize(("n", "first"), [(300, 0), (257, 5), (128, 1000)])
def test_every_key_in_a_block_is_seen(method, causal, n, first, subject):
    sizes = tuple(float(max(1, 2 * edge if edge > 128 else edge)) for edge in EDGES)
    recipe = PositionalLSH(3, seed=2, sampler=None, family=FixedBlocks(sizes))
    problem = _counting(subject, n, causal, q_offset=first, k_offset=first)
    problem = problem.but(method=recipe, slopes=None)
    problem.check_output(subject)
    problem.but(q_offset=first + 37).check_output(subject)


@pytest.mark.requirement("MEM-3")
@pytest.mark.parametrize("method", NAMES)
@CAUSAL
@pytest.mark.parametrize("lengths", [(300, 40), (40, 300), (1, 300), (300, 1)], ids=str)
def test_every_visible_pair_of_unequal_lengths_is_seen(method, causal, lengths, subject):
    problem = make(
        subject, *lengths, method=method, batch=1, causal=causal, q_offset=100, k_offset=60
    )
    if problem.is_decay:  # flat, for the far keys to count
        problem = problem.but(slopes=(2.0**-6, 2.0**-7, 2.0**-8, 0.0))
    problem.but(q=0 * problem.q).check_output(subject)


@pytest.mark.requirement("MEM-3")
@pytest.mark.full
@pytest.mark.parametrize("method", ["window", "lsh"])
def test_time_is_near_linear(method, subject):
    """Four times the tokens take less than ten times as long; quadratic is sixteen."""
    times = []
    for n in (4096, 16384):
        problem = make(
            subject, n, batch=1, heads=2, kv_heads=1, slopes=(0.25, 0.125), plain_slopes=True
        ).but(method=Window(64) if method == "window" else PositionalLSH(8, seed=1))
        inputs, keywords = problem.arrays(subject), problem.keywords(subject)
        subject.attention(*inputs, **keywords)
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            subject.attention(*inputs, **keywords)
            best = min(best, time.perf_counter() - begin)
        times.append(best)
    assert times[1] < 10 * times[0], f"{dtype_of(subject)}: {times}"
