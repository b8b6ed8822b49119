"""Steps of ``cupy.sh`` that are programs: machine, compiling, conformance, small, timings."""

import itertools
import math
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import plsh_cupy
from plsh_cupy import _compile, _cuda, _plan

import plsh
from plsh import testing


def machine():
    """Say what is tested on what."""
    state = plsh_cupy.BACKEND.availability()
    if not state.ok:
        sys.exit(f"the backend is not available: {state.reason}")
    import cupy

    found = cupy.cuda.runtime.getDeviceProperties(0)
    print(
        f"{found['name'].decode()}, compute capability {found['major']}.{found['minor']}, "
        f"driver {cupy.cuda.runtime.driverGetVersion()}, NVRTC {cupy.cuda.nvrtc.getVersion()}, "
        f"CuPy {cupy.__version__}, NumPy {np.__version__}, {cupy.cuda.runtime.getDeviceCount()} GPU"
    )


def compile_one(job):
    """Compile an instance into the cache on disk."""
    instance, target, version = job
    return len(_compile.compiled(instance, target, version, _cuda.nvrtc_binary))


def compiling():
    """Fill the cache on disk, on all cores, as each process would one by one."""
    import cupy

    nvrtc, capability = cupy.cuda.nvrtc, int(cupy.cuda.Device(0).compute_capability)
    target = _cuda.target_of(capability, nvrtc.getSupportedArchs())
    version = ".".join(map(str, nvrtc.getVersion()))
    jobs = [(i, target, version) for i in _plan.instances(_cuda.limits_of(0))]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        sizes = list(pool.map(compile_one, jobs))
    print(f"{len(sizes)} kernels for {target}, {sum(sizes) / 1e6:.1f} MB")


def conformance():
    """Run the suite on CuPy arrays."""
    from plsh.cli import main

    sys.exit(main(["conformance", "cupy"]))


def small():
    """Every kernel once, small: what compute-sanitizer watches."""
    import cupy

    for dtype, method, dim, value_dim in (
        ("float32", plsh.PositionalLSH(40), 40, 33),
        ("float64", "exact", 20, 33),
        ("float16", plsh.Window(30), 100, 33),
        ("float16", plsh.Window(30), 40, 24),  # on tensor cores
        ("float16", plsh.PositionalLSH(40), 40, 24),
    ):
        shape = (1, 2, 1, 200, 200, dim, value_dim)
        arrays = testing.make_inputs(*shape, dtype)
        q, k, v, grad_out = (cupy.asarray(x.astype(dtype)) for x in arrays[:4])
        ids = cupy.asarray(np.arange(200)[None] // 120)
        call = {"method": method, "slopes": 0.02, "segment_ids": ids, "backend": "cupy"}
        output = plsh.attention(q, k, v, return_lse=True, **call)
        plsh.attention_vjp(q, k, v, output, grad_out, **call)
    cupy.cuda.Device().synchronize()


def timed(work, repeats=7):
    """Return the median milliseconds of a call, warm."""
    import cupy

    work()
    taken = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(begin, end))
    return statistics.median(taken)


def peers(shape, dtype):
    """Return milliseconds of torch's causal attention without a bias: forward, both, by backend."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    found = {}
    q, k, v = (
        torch.randn(shape, dtype=getattr(torch, dtype), device="cuda", requires_grad=True)
        for _ in range(3)
    )
    ones = torch.ones_like(q)
    attend = torch.nn.functional.scaled_dot_product_attention
    stream = torch.cuda.current_stream()
    for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                taken = []
                for _ in range(4):
                    begin, half, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                    begin.record(stream)
                    out = attend(q, k, v, is_causal=True)
                    half.record(stream)
                    torch.autograd.grad(out, (q, k, v), ones)
                    end.record(stream)
                    end.synchronize()
                    taken.append((begin.elapsed_time(half), begin.elapsed_time(end)))
                medians = tuple(statistics.median(x) for x in zip(*taken[1:], strict=True))
                found[name.split("_")[0].lower()] = medians
        except (RuntimeError, AttributeError):
            continue
    return found


def dense(q, k, v, slopes):
    """Return causal attention with linear biases by CuPy's own operations, a head at a time."""
    import cupy

    at, out = cupy.arange(q.shape[2], dtype="float32"), cupy.empty_like(v)
    distance = at[:, None] - at
    for h, slope in enumerate(slopes):
        logits = (q[0, h] * q.dtype.type(q.shape[3] ** -0.5)) @ k[0, h].T
        logits = logits.astype("float32") - slope * distance
        logits[distance < 0] = -cupy.inf
        weights = cupy.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[0, h] = weights.astype(v.dtype) @ v[0, h]
    return out


def errors_of(method, dtype, dim):
    """Return the largest errors of output and gradients, at a length that the oracle can do."""
    import cupy

    arrays = testing.make_inputs(1, 8, 8, 1024, 1024, dim, dim, dtype)[:4]
    slopes = plsh.alibi_slopes(8)
    *given, grad_out = (cupy.asarray(x.astype(plsh.compat.numpy_dtype(dtype))) for x in arrays)
    call = {"method": method, "causal": True, "backend": "cupy"}
    output = plsh.attention(*given, return_lse=True, **call)
    got = output.out, *plsh.attention_vjp(*given, output, grad_out, **call)[:3]
    exact = testing.oracle(*arrays[:3], slopes=slopes, causal=True, grad_out=arrays[3])
    wanted = exact.out, exact.q, exact.k, exact.v
    pairs = zip(got, wanted, strict=True)
    out, *grads = (np.abs(cupy.asnumpy(a).astype(float) - b).max() for a, b in pairs)
    return out, max(grads)


def timings():
    """Time and memory, causal, standard slopes, with dense attention and torch's kernels beside."""
    import cupy

    rng = np.random.default_rng(0)
    pool = cupy.get_default_memory_pool()
    rows = [("dtype", "n", "H", "D", "method", "forward ms", "fwd+bwd ms", "beyond in+out MB",
             "ns/pair", "max errors", "dense ms", "peer ms (no bias)", "peer/fwd", "peer/both",
             "ns/pair to peer's")]  # fmt: skip
    dtypes = ("float32", "float16", "bfloat16")
    cases = [*itertools.product(dtypes, ((8192, 8, 64), (65536, 8, 64)))]
    cases.append(("bfloat16", (131072, 32, 128)))
    for dtype, (n, heads, dim) in cases:
        shape = (1, heads, n, dim)
        try:
            kind = plsh.compat.numpy_dtype(dtype)
        except ImportError:
            continue
        one_head = (1, 1, n, dim)  # the same numbers for all: their values are not timed
        q, k, v, grad_out = (
            cupy.asarray(np.repeat(rng.standard_normal(one_head, "f4").astype(kind), heads, axis=1))
            for _ in range(4)
        )
        beside = peers(shape, dtype)
        best, best_both = min(beside.values(), default=(math.nan, math.nan))
        name = min(beside, key=beside.get) if beside else "none"
        by_dense = "none"
        if n <= 8192 and dtype != "bfloat16":  # of which CuPy has no products
            slopes = plsh.alibi_slopes(heads)
            by_dense = f"{timed(lambda x=(q, k, v), m=slopes: dense(*x, m), repeats=3):.1f}"
        for method in ("window", "lsh") + (("exact",) if n <= 8192 else ()):
            call = {"method": method, "causal": True, "backend": "cupy"}

            def forward(call=call, x=(q, k, v)):
                return plsh.attention(*x, return_lse=True, **call)

            def both(call=call, x=(q, k, v), grad=grad_out, forward=forward):
                return plsh.attention_vjp(*x, forward(), grad, **call)

            one, two = timed(forward), timed(both)
            pool.free_all_blocks()
            before = pool.total_bytes()
            grads = both()
            beyond = pool.total_bytes() - before - sum(x.nbytes for x in grads if x is not None)
            del grads
            widths, dense_pairs = visible(method, heads, n), visible("exact", heads, n)
            rows.append(
                (dtype, n, heads, dim, method, f"{one:.3f}", f"{two:.3f}",
                 f"{(beyond - q.nbytes) / 1e6:.1f}", f"{1e6 * one / widths:.4f}",
                 "{:.1e} {:.1e}".format(*errors_of(method, dtype, dim)), by_dense,
                 f"{name} {best:.2f} {best_both:.2f}", f"{best / one:.2f}",
                 f"{best_both / two:.2f}", f"{one / widths / (best / dense_pairs):.2f}")
            )  # fmt: skip
    for row in rows:
        print(
            "  ".join(
                str(x).rjust(w)
                for x, w in zip(
                    row, (9, 6, 3, 4, 7, 11, 11, 17, 8, 15, 9, 24, 9, 9, 17), strict=True
                )
            )
        )


def visible(method, heads, n):
    """Return the pairs of weight > 0 in a causal call, all heads."""
    if method == "exact":
        return heads * n * (n + 1) // 2
    slopes = plsh.alibi_slopes(heads)
    if method == "window":
        widths = [math.ceil(math.log(1e6) / m) for m in slopes]
        return sum(n * (w + 1) - w * (w + 1) // 2 for w in (min(w, n - 1) for w in widths))
    sets = plsh.RandomBinning(tuple(1 / m for m in slopes)).sample(16, n)
    first = sets.labels().min(axis=1)  # (H, n)
    return int((np.arange(n) - np.maximum(first, 0) + 1).sum())


if __name__ == "__main__":
    {f.__name__: f for f in (machine, compiling, conformance, small, timings)}[sys.argv[1]]()
