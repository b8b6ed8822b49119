"""Steps of ``torch.sh`` that are programs: machine, conformance, timings."""

import importlib.metadata
import sys

import numpy as np
import torch
from plsh_torch.cuda import _available

import plsh
from plsh import bench
from plsh.cli import main


def machine():
    """Say what is tested on what."""
    if not torch.cuda.is_available():
        sys.exit("this torch sees no CUDA device")
    device = torch.device("cuda", 0)
    why = _available.of_device(device)
    if why is not None:
        sys.exit(f"the kernels can't run on this device: {why}")
    triton = importlib.metadata.version("triton")
    found = torch.cuda.get_device_properties(device)
    print(
        f"{found.name}, compute capability {found.major}.{found.minor}, torch {torch.__version__}, "
        f"Triton {triton}, NumPy {np.__version__}, {torch.cuda.device_count()} GPU"
    )


def conformance():
    """Run the suite on CUDA tensors; torch_varlen, which takes half precision, is in the checks."""
    sys.exit(main(["conformance", "torch", "--device", "cuda:0"]))


METHODS = {
    ("torch", "window"): plsh.Window(),
    ("torch", "lsh"): plsh.PositionalLSH(),
    ("torch_varlen", "lsh"): plsh.PositionalLSH(),
    ("torch", "exact"): plsh.Exact(),
}
PEERS = ("sdpa-plain", "flex", "flex-window")
LONGEST = 16384
"""Tokens up to which what is quadratic is timed."""


def makers(case, inputs):
    """Yield (name, a function that makes the runner) of ours and the peers.

    "sdpa-plain" is flash attention without a bias; FlexAttention compiles for long, and is measured
    in one dtype and head dim.
    """
    for (backend, name), method in METHODS.items():
        if name != "exact" or case.length <= LONGEST:
            yield f"{backend} {name}", lambda b=backend, m=method: bench.ours(b, m, case, inputs)
    for name in PEERS:
        compiled = bench.PEERS[name].compiled
        if (name == "flex-window" or case.length <= LONGEST) and not (
            compiled and (case.dtype, case.head_dim) != ("bfloat16", 64)
        ):
            yield name, lambda name=name: bench.PEERS[name].runner(case, inputs)


def timings():
    """Time, memory and errors, causal, standard slopes, of each beside torch's own kernels."""
    head = ("dtype", "n", "D", "what", "forward ms", "fwd+bwd ms", "beyond MB", "error")
    widths = (9, 6, 4, 18, 11, 11, 10, 9)
    rows = [head]
    for dtype, n, dim in (
        ("bfloat16", 8192, 64), ("bfloat16", 65536, 64), ("bfloat16", 8192, 128),
        ("float16", 8192, 64), ("float32", 8192, 64),
    ):  # fmt: skip
        case = bench.Case(n, heads=16, head_dim=dim, dtype=dtype, device="cuda:0")
        inputs = case.inputs()
        want = bench.exact_rows(case, inputs)
        for name, make in makers(case, inputs):
            line = [dtype, n, dim, name]
            try:
                runner = make()
                error = bench.error(runner.output(), want)
                calls = {"forward": runner.forward, "training": runner.training}
                found = bench.in_turn(calls, repeat=3)
                line += [f"{1e3 * found[x].seconds:.3f}" for x in calls]
                line += [f"{(bench.device_peak(runner.training) or 0) / 1e6:.0f}", f"{error:.1e}"]
            except (RuntimeError, NotImplementedError) as reason:
                line += [f"not here: {str(reason).splitlines()[0][:60]}"]
            rows.append(line)
            print(*line, flush=True)
    print()
    for row in rows:
        print("  ".join(str(x).rjust(w) for x, w in zip(row, widths, strict=False)))


if __name__ == "__main__":
    {f.__name__: f for f in (machine, conformance, timings)}[sys.argv[1]]()
