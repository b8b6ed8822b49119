"""Measure the torch backend on the CPU against torch's own ways to ALiBi: ratios and errors.

    python tools/bench_torch.py [lsh window exact long small] [--length 8192] [--long 65536]
                                [--repeat 5] [--threads 2] [--no-compile]

Causal, B=1, H=8, D=64, float32, standard slopes. Times are medians of warm runs, plsh and each peer
in turn in one process; FlexAttention is compiled by Inductor and has no backward on the CPU. Errors
are relative Frobenius errors on sampled rows, in float64: `rounding` against the same positional
weight, `alibi` against exact ALiBi. The floor is the bare products of the tiles that are visited,
by torch's own batched product, on as many threads: two forward, seven forward and backward.
"""

import argparse
import functools
import gc
import platform
import subprocess
import sys

import torch
from plsh_torch._band import empty_pairs
from plsh_torch._call import Call
from plsh_torch._scratch import Scratch
from plsh_torch._threads import run as work_off

import plsh
from plsh import bench


def inputs(n, dtype=torch.float32):
    return [torch.from_numpy(x).to(dtype) for x in bench.Case(n).inputs()[:3]]


PEERS = [peer for peer in bench.PEERS.values() if peer.kind == "torch"]


def training(f, arrays):
    """Return a call that runs f and its backward."""
    leaves = [x.detach().requires_grad_() for x in arrays]

    def run():
        out = f(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def in_turn(calls, repeat):
    """Return the median seconds of each call, run in turn and warm."""
    return {name: t.seconds for name, t in bench.in_turn(calls, repeat).items()}


def floors(arrays, method):
    """Return calls of the bare products of the tiles that are visited, forward and training."""
    caught = []
    original = Call.forward

    def spy(self):
        caught.append(self)
        return original(self)

    Call.forward = spy
    try:
        plsh.attention(*arrays, method=method, causal=True, backend="torch")
    finally:
        Call.forward = original
    parts = sorted(caught[0].parts(), key=lambda part: -part.pairs)
    jobs = [[group for group, _ in part.groups(Scratch())] for part in parts]
    q, k, v = arrays

    def bare(backward, groups, scratch):
        for group in groups:
            group.scratch = scratch
            for piece in group.pieces:
                x, keys, values = (
                    group.queries("q", q),
                    group.keys("k", k, piece),
                    group.keys("v", v, piece),
                )
                p = empty_pairs(group, "p", (*x.shape[:2], keys.shape[1]))
                o = scratch.get("o", x.shape, q.dtype)
                add = scratch.get("product", keys.shape, q.dtype)
                torch.bmm(x, keys.mT, out=p)
                torch.bmm(p, values, out=o)
                if backward:
                    torch.bmm(x, keys.mT, out=p)
                    torch.bmm(o, values.mT, out=p)
                    torch.bmm(p, keys, out=o)
                    torch.bmm(p.mT, x, out=add)
                    torch.bmm(p.mT, x, out=add)

    @torch.inference_mode()
    def run(backward):
        work_off(functools.partial(bare, backward), jobs, torch.get_num_threads())

    return lambda: run(False), lambda: run(True)


PEAK = """
import sys, plsh
from plsh import PositionalLSH, Window, bench
sys.path.insert(0, {here!r})
import bench_torch
def run(x):
    return plsh.attention(*x, method={method}, causal=True, backend="torch")
run(bench_torch.inputs(300))
x = bench_torch.inputs({n})
print(bench.host_peak(lambda: run(x)) - x[0].nbytes)
"""


def peak(n, method):
    """Return the peak memory of a forward beyond inputs and output, in MiB, in a fresh process."""
    code = PEAK.format(here=__file__.rpartition("/")[0] or ".", method=method, n=n)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(run.stdout) / 2**20


def against_peers(method, n, repeat, compiled):
    """Print times and errors of a method and of every peer, in turn."""
    case, arrays = bench.Case(n), inputs(n)
    drawn = case.inputs()
    alibi = bench.exact_rows(case, drawn)
    peers = {peer.name: peer.make(case) for peer in PEERS if compiled or not peer.compiled}
    for name, f in peers.items():
        off = bench.error(f(*arrays).numpy(), alibi)
        print(f"  {name}: error against ALiBi {off:.1e}")

    def ours(q, k, v):
        return plsh.attention(q, k, v, method=method, causal=True, backend="torch")

    got = ours(*arrays).numpy()
    rounding = bench.error(got, bench.own_rows(case, drawn, method))
    print(f"{method!r}: rounding {rounding:.1e}, error against ALiBi {bench.error(got, alibi):.1e}")
    bare = floors(arrays, method)
    forward = {name: lambda f=f: f(*arrays) for name, f in peers.items()}
    forward |= {"plsh": lambda: ours(*arrays), "floor": bare[0]}
    both = {p.name: training(peers[p.name], arrays) for p in PEERS if not p.compiled}
    both |= {"plsh": training(ours, arrays), "floor": bare[1]}
    for what, calls in (("fwd", forward), ("fwd+bwd", both)):
        t = in_turn(calls, repeat)
        ratios = ", ".join(
            f"{name} {t[name] * 1e3:.0f} ms = {t[name] / t['plsh']:.1f}x"
            for name in calls
            if name not in ("plsh", "floor")
        )
        over = t["plsh"] / t["floor"]
        print(f"  {what}: {t['plsh'] * 1e3:.1f} ms, over floor {over:.2f}; {ratios}", flush=True)


def long_and_narrow(n, longer):
    """Print times of a long sequence and of other dtypes, and peak memory."""
    for method in (plsh.PositionalLSH(), plsh.Window()):
        run = functools.partial(plsh.attention, method=method, causal=True, backend="torch")
        lengths = {x: functools.partial(run, *inputs(x)) for x in (n, longer)}
        t = in_turn(lengths, 3)
        print(
            f"{method!r}: n={longer} fwd {t[longer]:.2f} s, {t[longer] / t[n]:.2f} times "
            f"n={n}; peak beyond inputs and output {peak(n, method):.0f} -> "
            f"{peak(longer, method):.0f} MiB"
        )
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for what, wrap in (("fwd", lambda f, x: lambda: f(*x)), ("fwd+bwd", training)):
            t = in_turn({d: wrap(run, inputs(n, d)) for d in dtypes}, 5)
            print(f"  {what}:", ", ".join(f"{d} {x * 1e3:.1f} ms" for d, x in t.items()))


def small():
    """Print times of small calls."""
    x = inputs(128)
    for method in ("lsh", "window", "exact"):
        f = functools.partial(plsh.attention, method=method, causal=True, backend="torch")
        calls = {"fwd": functools.partial(f, *x), "fwd+bwd": training(f, x)}
        many = {what: lambda call=call: [call() for _ in range(50)] for what, call in calls.items()}
        t = in_turn(many, 3)
        print(f"{method}: n=128 warm", ", ".join(f"{k} {t[k] * 20:.2f} ms" for k in t))


METHODS = {"lsh": plsh.PositionalLSH(), "window": plsh.Window(), "exact": plsh.Exact()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", help="of lsh, window, exact, long, small; or all")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--long", type=int, default=65536)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", action="store_true", help="leave out FlexAttention")
    args = parser.parse_args()
    every = (*METHODS, "long", "small")
    wanted = args.sections or every
    if unknown := set(wanted) - set(every):
        parser.error(f"sections are {', '.join(every)}, got {', '.join(sorted(unknown))}")
    gc.disable()  # as timeit does: compilers leave many objects to go through
    torch.set_num_threads(args.threads)  # of this process, peers alike
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"causal, B=1, H=8, D=64, float32, standard slopes, n={args.length}", flush=True)
    for name, method in METHODS.items():
        if name in wanted:
            repeat = args.repeat if name != "exact" else 2
            against_peers(method, args.length, repeat, not args.no_compile)
    if "long" in wanted:
        long_and_narrow(args.length, args.long)
    if "small" in wanted:
        small()


if __name__ == "__main__":
    main()
