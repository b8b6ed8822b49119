"""What users of other attention libraries tripped over: one short test per row of the cases."""

import contextlib
import itertools
import math
import re
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import plsh_numpy._backend as backend
import plsh_numpy._band as band
import pytest
import torch

import plsh
from plsh import testing
from plsh.backend import Capabilities

SLOPES = (0.5, 0.125, 0.03125, 0.0)
METHODS = {
    "exact": {"method": "exact", "slopes": SLOPES},
    "window": {"method": plsh.Window(7), "slopes": SLOPES},
    "lsh": {"method": plsh.PositionalLSH(4, seed=3), "slopes": SLOPES},
}
METHOD = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def tensors(*args, **keywords):
    """Return q, k, v of `make_inputs` as torch tensors."""
    return tuple(torch.from_numpy(x) for x in testing.make_inputs(*args, **keywords)[:3])


def peak_of(f):
    """Return the most bytes that a warm call holds at once beyond its output, on one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_cpus", lambda: 1)
        f()
        backend._FREE.clear()
        tracemalloc.start()
        try:
            out = f()
            return tracemalloc.get_traced_memory()[1] - out.nbytes
        finally:
            tracemalloc.stop()


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(8750, 8), (70000, 1)], ids=str)
@METHOD
def test_seventy_thousand_heads_of_one_and_two_tokens(rows, method):
    """U024: more rows and heads than a launch grid of 65,535, in float16."""
    method = {**method, "slopes": np.resize(SLOPES, rows[1])}
    q, k, v = testing.make_inputs(*rows, rows[1], 1, head_dim=8, dtype="float16")[:3]
    testing.assert_identical(plsh.attention(q, k, v, **method), v)

    q, k, v = testing.make_inputs(*rows, rows[1], 2, head_dim=8, dtype="float16")[:3]
    out = plsh.attention(q, k, v, causal=True, **method)
    testing.assert_identical(out[:, :, 0], v[:, :, 0])
    if method["method"] == "exact":
        want = testing.oracle(q, k, v, slopes=method["slopes"], causal=True).out
        testing.assert_equal_to_rounding(out, want.astype("float16"), units=4)


@pytest.mark.parametrize("return_lse", [False, True])
def test_longer_partition_set_equals_a_fresh_one_and_a_shorter_one_is_refused(return_lse):
    """U015: a reusable plan serves shorter inputs and is refused for longer ones."""
    family = plsh.RandomBinning(20.0)
    q, k, v = testing.make_inputs(2, 4, 2, 300)[:3]

    def attend(length):
        blocks = family.sample(4, length, seed=1)
        return plsh.attention(q, k, v, method=blocks, return_lse=return_lse)

    longer, fresh = attend(4096), attend(300)
    for a, b in zip(*((x if return_lse else (x,)) for x in (longer, fresh)), strict=True):
        testing.assert_identical(a, b)
    with pytest.raises(ValueError, match=r"\[0, 200\).*queries 0 … 299, keys 0 … 299"):
        attend(200)


def test_longer_partition_set_gives_the_gradients_of_a_fresh_one():
    """U015: no NaN in the backward pass of a plan made for more tokens."""
    q, k, v, grad_out, grad_lse = testing.make_inputs(1, 4, 2, 90)
    grads = []
    for length in (4096, 90):
        call = {"method": plsh.RandomBinning(20.0).sample(4, length, seed=1)}
        output = plsh.attention(q, k, v, return_lse=True, **call)
        grads.append(plsh.attention_vjp(q, k, v, output, grad_out, grad_lse, **call))
    for a, b in zip(*(x[:3] for x in grads), strict=True):
        testing.assert_identical(a, b)


# --- calls, devices, transforms -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numpy", "reference"])
def test_calls_at_changing_lengths_are_each_right(name):
    """U068: (5, 9), (4, 12), (9, 9) in a row; nothing of an earlier call is kept."""
    blocks = plsh.RandomBinning(tuple(1 / m if m else math.inf for m in SLOPES)).sample(4, 12)
    for len_q, len_k in ((5, 9), (4, 12), (9, 9)):
        q, k, v = testing.make_inputs(2, 4, 2, len_q, len_k, 8, dtype="float64")[:3]
        call = {"causal": True, "q_offset": len_k - len_q}
        labels = blocks.labels(0, len_k)
        weight = testing.step_weight(labels[..., len_k - len_q :], labels)
        for method, yardstick in (
            ({"method": "exact", "slopes": SLOPES}, {"slopes": SLOPES}),
            (METHODS["window"], {"slopes": SLOPES, "widths": (7,) * 4}),
            ({"method": blocks}, {"weight": weight}),
        ):
            got = plsh.attention(q, k, v, backend=name, **call, **method)
            testing.assert_equal_to_rounding(got, testing.oracle(q, k, v, **call, **yardstick).out)


@pytest.mark.parametrize(
    ("method", "most"),
    [("'lsh'", 10), ("plsh.Window(64)", 10), ("'exact'", 40)],  # four times for its four times n
)
def test_cold_first_call_is_bounded(method, most):
    """U074: a fresh process serves its first call in seconds, at a round length and an odd one."""
    code = (
        "import time, numpy as np, plsh; q = np.ones((1, 4, {n}, 16), 'float32');"
        "start = time.perf_counter(); plsh.attention(q, q, q, method={method}, causal=True);"
        "print(time.perf_counter() - start)"
    )
    seconds = []
    for n in (1000, 4097):
        run = subprocess.run(
            [sys.executable, "-c", code.format(n=n, method=method)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        seconds.append(float(run.stdout))
    assert max(seconds) < 20
    assert seconds[1] / seconds[0] < most


@METHOD
def test_vmap_equals_the_batched_call(method):
    """U075: the blocks depend on the seed alone, so that every sample of a vmap sees the same."""
    q, k, v = tensors(3, 4, 2, 20, head_dim=8)

    def attend(q, k, v):
        return plsh.attention(q, k, v, causal=True, **method)

    want = attend(q, k, v)
    first, second = (torch.vmap(attend)(q, k, v) for _ in range(2))
    assert torch.equal(first, second)
    testing.assert_equal_to_rounding(first, want)


@contextlib.contextmanager
def default_dtype():
    """float64 as torch's default, restored afterwards."""
    held = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(held)


@contextlib.contextmanager
def default_device():
    """Torch's default device without memory, restored afterwards."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def outputs_and_gradients(q, k, v, **keywords):
    """Return out, lse and the gradients of their sum."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    got = plsh.attention(*leaves, return_lse=True, **keywords)
    grads = torch.autograd.grad(got.out.sum() + got.lse.sum(), leaves)
    return [x.detach() for x in (*got, *grads)]


@pytest.mark.parametrize("default", [default_dtype, default_device])
@METHOD
def test_defaults_of_torch_do_not_matter(method, default):
    """U090: every internal tensor takes q's device and dtype."""
    q, k, v = tensors(2, 4, 2, 20, head_dim=8)
    options = {
        "causal": True,
        "segment_ids": torch.from_numpy(plsh.segments_from_lengths([[9, 11], [20, 0]], 20)),
        "q_offset": (3, 0),
        "k_offset": (3, 0),
        **method,
    }
    want = outputs_and_gradients(q, k, v, **options)
    with default():
        got = outputs_and_gradients(q, k, v, **options)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        testing.assert_identical(a, b)


@METHOD
def test_autocast_leaves_the_dtype_of_the_inputs(method):
    """U064: bfloat16 autocast changes neither the output of float32 inputs nor its gradients.

    Torch runs the products of a backward pass that itself stands under autocast in bfloat16, for
    any function; then the gradients are still float32, and near.
    """
    q, k, v = tensors(2, 4, 2, 40, head_dim=8)
    want = outputs_and_gradients(q, k, v, **method)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = plsh.attention(*leaves, return_lse=True, **method)
        inside = outputs_and_gradients(q, k, v, **method)
    grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    for a, b, c in zip((out, lse, *grads), want, inside, strict=True):
        assert a.dtype == c.dtype == torch.float32
        testing.assert_identical(a.detach(), b)
        torch.testing.assert_close(c, b, rtol=0, atol=2**-6 * float(b.abs().max()))


@METHOD
def test_training_on_the_cpu(method):
    """U125: five steps of gradient descent through the reference lower the loss each time."""
    torch.manual_seed(0)
    x, target = torch.randn(2, 40, 16), torch.randn(2, 40, 16)
    project = torch.nn.Linear(16, 48)
    optimizer = torch.optim.SGD(project.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        q, k, v = project(x).reshape(2, 40, 3, 4, 4).unbind(2)
        out = plsh.attention(q, k, v, causal=True, layout="bshd", **method)
        loss = (out.reshape(2, 40, 16) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(b < a for a, b in itertools.pairwise(losses))


# --- every path of the NumPy kernel ---------------------------------------------------------------


def both(name, tokens, method):
    """Return out and the gradients by q, k, v of ``sum(out * grad_out)`` on one backend."""
    q, k, v, grad_out = tokens
    if name == "numpy":
        output = plsh.attention(q, k, v, return_lse=True, backend=name, **method)
        return [output.out, *plsh.attention_vjp(q, k, v, output, grad_out, **method)[:3]]
    q, k, v, grad_out = (torch.from_numpy(x) for x in tokens)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = plsh.attention(*leaves, backend=name, **method)
    return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, leaves, grad_out))]


THRESHOLDS = {
    "head groups": math.isqrt(backend.BACKWARD.pairs // 2),  # two heads fit in a chunk up to here
    "threads": math.isqrt(backend.THREADS_PAY // len(SLOPES)) - 1,  # one thread up to here
    "tiles": backend.FORWARD.rows,  # one tile up to here
    "segments": 100,  # SEGMENT, made small
}


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", ["exact", "lsh"])
def test_repeats_are_equal_on_both_sides_of_every_threshold(name, threshold, monkeypatch):
    """U093: bit for bit, and right, where another path takes over."""
    monkeypatch.setattr(backend, "_cpus", lambda: 2)
    if threshold == "segments":
        monkeypatch.setattr(backend, "SEGMENT", THRESHOLDS[threshold])
    for n in (THRESHOLDS[threshold], THRESHOLDS[threshold] + 1):
        tokens = testing.make_inputs(1, 4, 2, n, head_dim=8, dtype="float64")[:4]
        first, *more = (both("numpy", tokens, METHODS[name]) for _ in range(3))
        for again in more:
            for a, b in zip(again, first, strict=True):
                testing.assert_identical(a, b)
        for a, b in zip(first, both("reference", tokens, METHODS[name]), strict=True):
            testing.assert_equal_to_rounding(a, b, units=256)


SAFE = band.Limits(bound=1e9, floor=-1e9, least=0.0)
PATHS = {
    "bounded": SAFE,
    "clamped": SAFE._replace(floor=-100.0),
    "shifted": SAFE._replace(bound=0.0),
    "by row": SAFE._replace(least=1e30),
    "as shipped": band.LIMITS[np.dtype("float64")],
}
"""Each path of the forward kernel, forced by the limits that choose it."""


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@METHOD
def test_every_path_of_the_kernel_agrees(method, dtype, monkeypatch):
    """U127: plain, clamped, shifted and row by row give the same, with slopes and without."""
    q, k, v = testing.make_inputs(1, 4, 2, 300, head_dim=8, dtype=dtype)[:3]
    redone = []
    by_row = band._by_row
    monkeypatch.setattr(band, "_by_row", lambda *args: redone.append(1) or by_row(*args))

    def attend(slopes):
        return plsh.attention(
            q, k, v, return_lse=True, **{**method, "causal": True, "slopes": slopes}
        )

    for slopes in (SLOPES, (0.0,) * 4):
        want = plsh.attention(
            q, k, v, backend="reference", return_lse=True,
            **{**method, "causal": True, "slopes": slopes},
        )  # fmt: skip
        for path, limits in PATHS.items():
            monkeypatch.setitem(band.LIMITS, np.dtype(dtype), limits)
            redone.clear()
            got = attend(slopes)
            assert bool(redone) == (path == "by row")
            testing.assert_equal_to_rounding(got.out, want.out)
            testing.assert_equal_to_rounding(got.lse, want.lse, name="lse")
            other = attend(tuple(m + 0.25 for m in slopes))
            assert np.abs(other.out - got.out).max() > 1e-2


# --- memory and time ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (plsh.Window(64), plsh.Window(10**9)),
        *(
            [plsh.PositionalLSH(4, family=plsh.RandomBinning(sigma)) for sigma in (64.0, 1e9)],
            [plsh.RandomBinning(64.0).sample(4, n) for n in (64, 8192)],
        ),
    ],
    ids=["window", "lsh", "set"],
)
def test_memory_at_64_tokens_does_not_depend_on_a_maximum(small, large):
    """U101: neither a width, a decay length, a position nor a plan's length costs memory."""
    q, k, v = testing.make_inputs(1, 4, 2, 64)[:3]
    peaks = [peak_of(lambda: plsh.attention(q, k, v, method=m)) for m in (small, large)]  # noqa: B023
    if not isinstance(large, plsh.PartitionSet):
        far = {"method": large, "k_offset": 2**29}
        peaks.append(peak_of(lambda: plsh.attention(q, k, v, **far)))
    assert max(peaks) < 1.1 * min(peaks)


def test_exact_bias_per_head_takes_no_square_of_memory():
    """U102: the peak is below a tenth of a bias (H, n, n) in half precision; sampled rows right."""
    heads, n = 8, 4096
    q, k, v = testing.make_inputs(1, heads, heads, n)[:3]
    call = {"method": "exact", "causal": True}
    assert peak_of(lambda: plsh.attention(q, k, v, **call)) < heads * n * n * 2 / 10
    out = plsh.attention(q, k, v, **call)
    for i in (0, 1, 31, 32, 1000, 2049, n - 1):
        row = slice(i, i + 1)
        want = testing.oracle(
            q[:, :, row], k, v, slopes=plsh.alibi_slopes(heads), causal=True, q_offset=i
        )
        testing.assert_equal_to_rounding(out[:, :, row], want.out.astype("float32"), units=8)


@pytest.mark.parametrize(("name", "mib"), [("numpy", 4), ("reference", 28)])
def test_grouped_heads_do_not_expand_keys_and_values(name, mib):
    """U103: beyond the output at most twice k and v, and a constant; expanded they take 16 MiB.

    The constant is the scores of a chunk; the reference keeps the outputs of the heads (8 MiB) too.
    """
    q, k, v = testing.make_inputs(1, 32, 2, 1024, head_dim=64)[:3]
    call = {"method": plsh.Window(64), "causal": True, "backend": name}
    assert (
        peak_of(lambda: plsh.attention(q, k, v, **call)) < 2 * (k.nbytes + v.nbytes) + mib * 2**20
    )


@pytest.mark.slow
def test_time_of_lsh_grows_almost_linearly(monkeypatch):
    """U104: at a fixed decay length, on one thread, slower than n^1.3 is a fault."""
    monkeypatch.setattr(backend, "_cpus", lambda: 1)
    method = plsh.PositionalLSH(16, family=plsh.RandomBinning(64.0))

    def best(n):
        q, k, v = testing.make_inputs(1, 4, 4, n, head_dim=64)[:3]
        seconds = []
        for _ in range(4):
            start = time.process_time()
            plsh.attention(q, k, v, method=method, causal=True)
            seconds.append(time.process_time() - start)
        return min(seconds[1:])  # the first draws the blocks

    assert math.log(best(16384) / best(4096), 4) < 1.3


# --- messages and documents -----------------------------------------------------------------------

GAPS = {
    "float16": {"dtypes": ("float32",)},
    "'lsh'": {"methods": ("exact", "window")},
    "head dims go up to 8, got 16": {"max_head_dim": 8},
}


@pytest.mark.parametrize("feature", GAPS)
def test_undeclared_capability_names_feature_backend_and_who_can(feature, monkeypatch):
    """U121: never an argument-type failure."""
    declared = Capabilities(arrays=("numpy",), gradients="vjp", **GAPS[feature])
    monkeypatch.setattr(backend.NumpyBackend, "capabilities", lambda self: declared)
    q = np.ones((1, 4, 5, 16), "float16" if feature == "float16" else "float32")
    with pytest.raises(plsh.UnsupportedByBackendError) as caught:
        plsh.attention(q, q, q, method="lsh")
    message = str(caught.value)
    assert "backend 'numpy'" in message
    assert feature in message
    assert "able to: reference" in message


def test_missing_gradient_names_backend_and_alternative():
    """U121: for the one gap that a shipped backend has."""
    q = np.ones((1, 4, 5, 16))
    output = plsh.attention(q, q, q, return_lse=True)
    with pytest.raises(plsh.UnsupportedByBackendError, match=r"'reference'.* gradient.*autograd"):
        plsh.attention_vjp(q, q, q, output, q, backend="reference")


def test_python_of_the_readme_runs_as_written():
    """U123: every block in turn, in one namespace, at a small length."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    names = {}
    for block in blocks:
        exec(block.replace("8192", "256"), names)
    q, k, v, out, lse, bound = (names[x] for x in ("q", "k", "v", "out", "lse", "bound"))
    want = testing.oracle(q, k, v, slopes=plsh.alibi_slopes(8), causal=True)
    assert out.shape == want.out.shape
    assert lse.shape == bound.shape == want.lse.shape
    assert all(np.isfinite(x).all() for x in names["grads"][:3])
