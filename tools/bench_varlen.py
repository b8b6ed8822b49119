"""Measure backend "torch_varlen", the paper's reduction on torch's own kernels: is it worth it?

    python tools/bench_varlen.py [--lengths 1024 4096 16384] [--samples 4 16] [--device cuda:0]
                                 [--dtype bfloat16] [--repeat 3]

Causal, B=1, H=8, D=64, standard slopes; medians of warm runs in turn, forward and backward, and the
relative Frobenius error against exact ALiBi on sampled rows. It is beside backend "torch", which
computes the same function in a single pass, and beside torch's SDPA with the dense ALiBi mask and
without a bias. A line at the end says from which length it is faster than each, if from any.
"""

import argparse

import torch

import plsh
from plsh import bench

PEERS = ("sdpa-mask", "sdpa-plain")
LONGEST = 8192
"""Tokens up to which what is quadratic is timed."""


def measure(case, samples, repeat):
    """Return (seconds of forward and backward, error) by name."""
    inputs = case.inputs()
    want = bench.exact_rows(case, inputs)
    method = plsh.PositionalLSH(samples)
    runners = {name: bench.ours(name, method, case, inputs) for name in ("torch_varlen", "torch")}
    if case.length <= LONGEST:
        runners |= {name: bench.PEERS[name].runner(case, inputs) for name in PEERS}
    seconds = bench.in_turn({name: x.training for name, x in runners.items()}, repeat)
    return {
        name: (seconds[name].seconds, bench.error(x.output(), want)) for name, x in runners.items()
    }


def verdict(rows, samples, other):
    """Say from which length it is faster than another."""
    ratios = {n: found["torch_varlen"][0] / found[other][0] for (n, s), found in rows.items()
              if s == samples and other in found}  # fmt: skip
    first = next((n for n, ratio in ratios.items() if ratio < 1), None)
    told = ", ".join(f"{ratio:.2f} at {n}" for n, ratio in ratios.items())
    said = "never here" if first is None else f"from n = {first}"
    return f"s = {samples}: faster than {other} {said} (times as long: {told})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    dtype = given.dtype or ("bfloat16" if given.device.startswith("cuda") else "float32")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.device}, {dtype}")
    rows = {}
    for n in given.lengths:
        case = bench.Case(n, dtype=dtype, device=given.device)
        for samples in given.samples:
            found = rows[n, samples] = measure(case, samples, given.repeat)
            for name, (seconds, error) in found.items():
                print(f"{n:7} s={samples:3} {name:13} {1e3 * seconds:9.1f} ms  error {error:.1e}",
                      flush=True)  # fmt: skip
    for samples in given.samples:
        for other in ("torch", *PEERS):
            print(verdict(rows, samples, other))


if __name__ == "__main__":
    main()
