"""Measure the JAX backend against jax.nn.dot_product_attention: ratios, errors, memory, growth.

    python tools/bench_jax.py [SECTION...] [--length 8192] [--long 65536] [--repeat 5]
        [--way fwd|grad] [--peer bias|window]

Sections: `lsh` and `window` (time and error beside the peers'), `long` (time, compilation and
memory at --long), `small` (n=128 outside of jit), `programs` (compiled for many lengths).

Causal, B=1, H=8, D=64, float32, standard slopes, all jitted. Each figure is the median of warm
runs, peer and backend in turn: of two calls in a row the second, as the first still pays for the
gigabytes that a peer took and gave back. Error is the relative Frobenius error of the output, on
sampled rows, against exact ALiBi in float64. The peers are `jax.nn.dot_product_attention` with a
dense ALiBi bias and, without one, with the local window of the widest head. The floor is the two
bare batched products, q k and p v, of the tiles that the band kernel visits; the gradient's is that
of seven products instead of two.
"""

import argparse
import functools
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from plsh_jax import _call
from plsh_jax._heads import weight_of
from plsh_jax._weights import visits

import plsh
from plsh import bench

H, D = 8, 64


def inputs(n):
    return tuple(jnp.asarray(x) for x in bench.Case(n).inputs()[:3])


def local_window(width):
    """Return jax.nn's attention of (B, H, N, D) arrays in a window of keys, without a bias."""

    def attend(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, local_window_size=(width, 0)
        )  # fmt: skip
        return out.swapaxes(1, 2)

    return attend


def compiled(f, *arrays):
    start = time.perf_counter()
    program = jax.jit(f).lower(*arrays).compile()
    return program, time.perf_counter() - start


def with_gradient(f):
    return jax.grad(lambda q, k, v: (f(q, k, v) * v).sum(), (0, 1, 2))


def timed(f, *arrays):
    """Return the seconds of a call."""
    start = time.perf_counter()
    jax.block_until_ready(f(*arrays))
    return time.perf_counter() - start


def visited(call):
    """Return (steps, tiles, rows, columns) of the batched products that a call takes."""
    found, run = [], _call._run

    def look(program, *arrays):
        found.append((program, arrays[-1]))
        return run(program, *arrays)

    _call._run = look
    call()
    _call._run = run
    ((program, given),) = found
    shapes = []
    for number, own in enumerate(program.classes):
        tiling, weight = own.tiling, weight_of(program, own, number, given)[0]
        steps = 0
        for at in np.ndindex(len(own.heads), len(own.heads[0])):
            head = jax.tree.map(lambda x, at=at: jnp.asarray(x)[at], weight)
            blocks = visits(tiling, program.causal, head, given.ahead, given.lengths[1])
            steps += sum(int(x.sum()) for x in blocks)
            shapes.append((tiling.chunks, tiling.tiles, tiling.rows, tiling.rows))
        shapes.append((steps, tiling.tiles, tiling.rows, tiling.columns))
    return shapes


def floor(shapes):
    """Compile the bare products, step after step as the kernel takes them."""
    rng = np.random.default_rng(0)
    dot = functools.partial(jnp.matmul, precision="highest")

    def run(operands):
        outs = []
        for (steps, *_), (q, k) in zip(shapes, operands, strict=True):

            def step(out, _, q=q, k=k):
                return dot(dot(q + 0 * out, k.swapaxes(1, 2)), k), None

            outs.append(jax.lax.scan(step, q, None, length=steps)[0])
        return outs

    operands = [
        [jnp.asarray(rng.normal(size=(tiles, x, D)), jnp.float32) for x in (rows, columns)]
        for _, tiles, rows, columns in shapes
    ]
    return functools.partial(compiled(run, operands)[0], operands)


def pairs(method, n, slopes):
    """Pairs of positive weight."""
    if isinstance(method, plsh.PositionalLSH):
        labels = plsh.RandomBinning(1 / slopes).sample(method.samples, n).labels()
        return int((np.arange(n) + 1 - labels.min(axis=1)).sum())
    widths = plsh.theory.window_width(slopes, method.tol)
    return int(sum(np.minimum(np.arange(n), w).sum() + n for w in widths))


PRODUCTS = {"fwd": 1, "grad": 3.5}
PEERS = ("bias", "window")
METHODS = {"lsh": plsh.PositionalLSH(), "window": plsh.Window()}


def ours(method):
    return lambda q, k, v: plsh.attention(q, k, v, method=method, causal=True, backend="jax")


def beside_peers(method, n, repeat, ways, peers):
    """Print times of forward and gradient, peers in turn, and the error."""
    case, slopes, arrays = bench.Case(n), plsh.alibi_slopes(H), inputs(n)
    widest = int(max(plsh.theory.window_width(slopes, plsh.Window().tol)))
    calls = {"plsh": ours(method)}
    if "bias" in peers:
        calls["bias"] = bench.PEERS["jax-bias"].make(case)
    if "window" in peers:
        calls["window"] = local_window(widest)
    runs, took = {}, {}
    for name, f in calls.items():
        for way in ways:
            g = with_gradient(f) if way == "grad" else f
            run, took[name, way] = compiled(g, *arrays)
            runs[name, way] = functools.partial(run, *arrays)
    shapes = visited(functools.partial(calls["plsh"], *arrays))
    runs["floor", "fwd"] = floor(shapes)
    rows = bench.exact_rows(case, case.inputs())
    off = {name: bench.error(np.asarray(jax.jit(f)(*arrays)), rows) for name, f in calls.items()}
    seconds = {key: [] for key in runs}
    for _ in range(repeat):
        for key, run in runs.items():
            timed(run)
            seconds[key].append(timed(run))
    t = {key: statistics.median(x) for key, x in seconds.items()}
    tiles = sum(steps * tiles * rows * columns for steps, tiles, rows, columns in shapes)
    print(f"{method!r}: error against ALiBi {off['plsh']:.1e}; pairs visited over those of positive"
          f" weight {tiles / pairs(method, n, slopes):.2f}")  # fmt: skip
    for way in ways:
        own = t["plsh", way]
        over = own / t["floor", "fwd"] / PRODUCTS[way]
        print(f"  {way} {own * 1e3:.0f} ms, {over:.2f} of its floor, compiled in"
              f" {took['plsh', way]:.1f} s;" + ";".join(
            f" {t[name, way] / own:.1f}x jax.nn with {name} ({t[name, way] * 1e3:.0f} ms,"
            f" error {off[name]:.1e})" for name in peers))  # fmt: skip


def lengths(method, n, long):
    """Print how time, compilation and temporary memory grow."""
    best = {}
    for size in (n, long):
        arrays = inputs(size)
        for way, f in (("fwd", ours(method)), ("grad", with_gradient(ours(method)))):
            program, took = compiled(f, *arrays)
            best[size, way] = min(timed(program, *arrays) for _ in range(3))
            held = program.memory_analysis().temp_size_in_bytes / 2**20
            growth = best[size, way] / best[n, way]
            print(f"{method!r}, n={size}, {way}: {best[size, way]:.3f} s, {growth:.1f} times n={n};"
                  f" compiled in {took:.1f} s; temporary memory {held:.0f} MiB")  # fmt: skip


def small():
    """Print times of short calls outside of jit, and of their compiled programs alone."""
    arrays = inputs(128)
    for name, method in METHODS.items():
        call = ours(method)
        program, _ = compiled(call, *arrays)
        t = [
            statistics.median(timed(f, *arrays) for _ in range(200)) * 1e3 for f in (call, program)
        ]
        print(f"{name}: n=128 outside of jit, warm: {t[0]:.2f} ms, of which the program {t[1]:.2f}")


def programs():
    """Print how many programs serve many lengths."""
    _call._run.clear_cache()
    for length in range(1000, 1301, 7):
        plsh.attention(*inputs(length), method="window", causal=True, backend="jax")
    print(f"programs for n=1000 … 1300 in steps of 7: {_call._run._cache_size()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    sections = ["lsh", "window", "long", "small", "programs"]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--long", type=int, default=65536)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--way", choices=PRODUCTS, help="measure the gradient or forward only")
    parser.add_argument("--peer", choices=PEERS, help="measure beside this one only")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(sections):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    print(f"{platform.machine()}, jax {jax.__version__}, {jax.devices()}, NumPy {np.__version__}")
    print(f"causal, B=1, H={H}, D={D}, float32, standard slopes, n={args.length}", flush=True)
    for section in args.sections or sections:
        if section in METHODS:
            ways = (args.way,) if args.way else tuple(PRODUCTS)
            peers = (args.peer,) if args.peer else PEERS
            beside_peers(METHODS[section], args.length, args.repeat, ways, peers)
        elif section == "long":
            for method in METHODS.values():
                lengths(method, args.length, args.long)
        else:
            {"small": small, "programs": programs}[section]()


if __name__ == "__main__":
    main()
