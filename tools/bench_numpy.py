"""Measure the NumPy backend against dense NumPy: ratios, errors, memory, growth.

    python tools/bench_numpy.py [--length 8192] [--long 65536] [--repeat 7] [--threads N]

Causal, B=1, H=8, D=64, float32, standard slopes. Each figure is the median of warm runs, peer and
backend in turn, each after a pause in which the BLAS threads of the one before fall asleep, and a
run that is not timed. Error is the relative Frobenius error of the output, on sampled rows, against
float64: `rounding` against the same positional weight, `alibi` against exact ALiBi. The floor is
the two bare products, q k and p v, of the tiles that the band loop visits, by the same number of
threads; the band loop is a call without its checks and its fresh outputs.
"""

import argparse
import platform
import statistics
import time
import tracemalloc

import numpy as np
from plsh_numpy import _backend, _scratch, _segment

import plsh
from plsh import bench

H, D = 8, 64


def inputs(n):
    return bench.Case(n).inputs()[:3]


def pairs(method, n, slopes):
    """Pairs of positive weight."""
    if isinstance(method, plsh.PositionalLSH):
        family = plsh.RandomBinning(1 / slopes)
        labels = family.sample(method.samples, n, sampler=method.sampler).labels()
        return (np.arange(n) + 1 - labels.min(axis=1)).sum(axis=1)
    if isinstance(method, plsh.Window):
        widths = plsh.theory.window_width(slopes, method.tol)
        return np.array([np.minimum(np.arange(n), w).sum() + n for w in widths])
    return np.full(H, n * (n + 1) // 2)


def schedule(q, k, v, method):
    """Return the backend's call and, for each of its jobs, the chunks that it visits."""
    caught = []
    backend = _backend.BACKEND
    original = type(backend).attend

    def spy(self, *args):
        caught.append(args)
        return original(self, *args)

    type(backend).attend = spy
    try:
        plsh.attention(q, k, v, method=method, causal=True, backend="numpy")
    finally:
        type(backend).attend = original
    return _backend._Call.of(*caught[0])


def floor(call):
    """The bare products of the tiles that the band loop visits; returns visited pairs by head."""
    visited = np.zeros(H, dtype=np.int64)
    tasks = [task for heads in call.head_groups(1) for task in call.tasks(heads)]
    segments = [
        _segment.Segment(call.job(t), _scratch.Scratch(), call.acc, _segment.FORWARD) for t in tasks
    ]
    for segment in segments:
        segment.v  # noqa: B018  copied here, and not below

    def run(item, scratch):
        task, segment = item
        for chunk in segment.chunks():
            batch = slice(0, 1)
            p = scratch.get("p", segment.shape(chunk, batch), call.acc)
            keys = segment.keys(segment.kt, chunk, batch)
            np.matmul(segment.tiles(segment.q, chunk, batch), keys, out=p)
            o = scratch.get("product", (*p.shape[:-1], D), call.acc)
            np.matmul(p, segment.keys(segment.v, chunk, batch), out=o)
            visited[task.heads.start] += chunk.tiles * chunk.pairs

    timed(lambda: call.run(run, list(zip(tasks, segments, strict=True))))
    return visited // 2  # run twice


def timed(f, pause=0.1, warm=True):
    """Seconds of a warm run: after the pause the processors wake at a call that is not timed."""
    time.sleep(pause)
    if warm:
        f()
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


LOOPS = []
"""Seconds of each band loop."""


def record_loops():
    original = _backend._Call.run

    def run(*args):
        start = time.perf_counter()
        original(*args)
        LOOPS.append(time.perf_counter() - start)

    _backend._Call.run = run


def peak(f):
    _backend._FREE.clear()  # what is kept between calls counts too
    tracemalloc.start()
    f()
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return size / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--long", type=int, default=65536)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=_backend._cpus())
    args = parser.parse_args()
    _backend._cpus = lambda: args.threads
    record_loops()
    slopes = plsh.alibi_slopes(H)
    n = args.length
    case = bench.Case(n)
    drawn = case.inputs()
    q, k, v, grad_out = drawn[:4]
    dense = bench.PEERS["numpy-dense"].make(case)
    print(f"{platform.machine()}, {args.threads} threads, NumPy {np.__version__}")
    print(f"causal, B=1, H={H}, D={D}, float32, standard slopes, n={n}")
    methods = (plsh.PositionalLSH(), plsh.Window(), plsh.Exact())
    alibi = bench.exact_rows(case, drawn)
    print(f"dense NumPy: rounding {bench.error(dense(q, k, v), alibi):.1e}")
    for method in methods:
        keywords = {"method": method, "causal": True, "backend": "numpy"}

        def forward(keywords=keywords):
            return plsh.attention(q, k, v, return_lse=True, **keywords)

        result = forward()

        def vjp(result=result, keywords=keywords):
            return plsh.attention_vjp(q, k, v, result, grad_out, **keywords)

        rounding = bench.error(result.out, bench.own_rows(case, drawn, method))
        error = bench.error(result.out, alibi)
        call = schedule(q, k, v, method)
        columns = {name: [] for name in ("dense", "fwd", "loop", "floor", "vjp", "back")}
        for _ in range(args.repeat if not isinstance(method, plsh.Exact) else 3):
            columns["dense"].append(timed(lambda: dense(q, k, v)))
            columns["fwd"].append(timed(forward))
            columns["loop"].append(LOOPS[-1])
            visited = floor(call)
            columns["floor"].append(LOOPS[-1])
            columns["vjp"].append(timed(vjp))
            columns["back"].append(LOOPS[-1])
        t = {name: statistics.median(x) for name, x in columns.items()}
        wide = slopes <= 1 / 64
        waste = visited[wide].sum() / pairs(method, n, slopes)[wide].sum()
        print(
            f"{method!r}: {t['fwd'] * 1e3:.1f} ms, {t['dense'] / t['fwd']:.1f}x dense"
            f" ({t['dense'] * 1e3:.0f} ms); fwd+vjp {(t['fwd'] + t['vjp']) * 1e3:.0f} ms;"
            f" band loop over its floor: forward {t['loop'] / t['floor']:.2f},"
            f" fwd+vjp over 3.5 floors {(t['loop'] + t['back']) / (3.5 * t['floor']):.2f};"
            f" visited/weighted pairs (sigma >= 64) {waste:.2f};"
            f" rounding {rounding:.1e}, error against ALiBi {error:.1e}"
        )
    for method in methods[:2]:
        times, sizes = [], []
        for length in (n, args.long):
            x = inputs(length)

            def forward(x=x, method=method):
                return plsh.attention(*x, method=method, causal=True, backend="numpy")

            forward()
            times.append(statistics.median(timed(forward) for _ in range(3)))
            sizes.append(peak(forward) - x[0].nbytes / 2**20)
        print(
            f"{method!r}: n={args.long} takes {times[1]:.2f} s, {times[1] / times[0]:.2f} times"
            f" n={n}; peak beyond inputs and output {sizes[0]:.0f} -> {sizes[1]:.0f} MiB"
        )
    x = tuple(a[:, :, :128] for a in (q, k, v))
    for method in methods:

        def forward(method=method):
            return plsh.attention(*x, method=method, causal=True, backend="numpy")

        small = [timed(forward, 0, warm=False) for _ in range(200)]
        print(f"{method!r}: n=128 warm {statistics.median(small) * 1e3:.2f} ms")
    long = inputs(args.long)
    for method in methods[:2]:
        fresh = plsh.PositionalLSH(seed=7) if isinstance(method, plsh.PositionalLSH) else method

        def forward(method=fresh):
            return plsh.attention(*long, method=method, causal=True, backend="numpy")

        cold, warm = timed(forward, warm=False), timed(forward)
        print(f"{method!r}: n={args.long} first call {cold:.2f} s, second {warm:.2f} s")


if __name__ == "__main__":
    main()
