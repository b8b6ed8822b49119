"""The NumPy band kernel, forward and vjp: the oracle, the reduction, the laws, memory.

Each test that a mutant of the kernel must fail (`test_numpy_mutants`) takes no fixture but
`monkeypatch`, so that it can be called in place.
"""

import contextlib
import itertools
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import plsh_numpy._backend as backend
import plsh_numpy._band as band
import plsh_numpy._scratch as scratch
import plsh_numpy._segment as segment
import plsh_numpy._weights as weights
import pytest
from calls import FACTORS, FAR, Call, pairwise
from laws import METHODS, NAMES, SLOPES, assert_same, attend, inputs, rows

import plsh
from plsh import testing, tiles

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
METHOD = pytest.mark.parametrize("method", NAMES)


def ours(*arrays, method="exact", **keywords):
    """Call the band kernel as `laws.attend` calls the reference."""
    return attend(*arrays, method, backend="numpy", **keywords)


def ours_vjp(q, k, v, output, *cotangents, method="exact", **keywords):
    """Return the band kernel's gradients, with the slopes of the laws."""
    if method != "set":
        keywords.setdefault("slopes", SLOPES)
    return plsh.attention_vjp(
        q, k, v, output, *cotangents, method=METHODS[method], backend="numpy", **keywords
    )


def cotangents(q, v, seed=1):
    """Return a grad_out and a grad_lse for q and v in layout bhsd."""
    rng = np.random.default_rng(seed)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    grad_out = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    return grad_out, rng.standard_normal(q.shape[:-1]).astype(wide)


def everything(q, k, v, method="exact", grads=None, **keywords):
    """Return out, lse and the gradients as a tuple of arrays."""
    got = ours(q, k, v, method=method, **keywords)
    given = cotangents(q, v) if grads is None else grads
    found = ours_vjp(q, k, v, got, *given, method=method, **keywords)
    return (*got, *(x for x in found if x is not None))


WORDS = ("out", "lse", "gradient by q", "gradient by k", "gradient by v", "gradient by slopes")


def assert_all_same(actual, expected, units=32.0):
    """Assert that two results of `everything` agree to rounding; 0: bit for bit."""
    assert len(actual) == len(expected)
    for name, a, b in zip(WORDS, actual, expected, strict=False):
        if units == 0:
            testing.assert_identical(a, b, name=name)
        else:
            testing.assert_equal_to_rounding(a, b, units=units, name=name)


# --- the oracle -----------------------------------------------------------------------------------


class BandCall(Call):
    """A call of this backend, forward and vjp."""

    backend = "numpy"


def check_band(call):
    """Output, lse and all gradients against the oracle, with the measured tolerance."""
    expected, plain = call.yardsticks
    q, k, v, grad_out, grad_lse = call.arrays()
    keywords = call.keywords()
    out = plsh.attention(q, k, v, **keywords)
    if call.return_lse:
        output = out
    else:  # asked for or not, the lse never changes the output
        output = plsh.attention(q, k, v, **keywords | {"return_lse": True})
        testing.assert_identical(output.out, out)
    if call.std == 1:
        testing.assert_output_close(output, expected, plain, like=q)
    else:  # every weight has the error of its logit, eps * |logit|, and so does plain
        terms = largest_lse(expected) * float(np.abs(expected.out).max())
        testing.assert_attention_close(output.out, expected.out, plain.out, like=q, terms=terms)
        wide = "float64" if call.dtype == "float64" else "float32"
        testing.assert_attention_close(
            output.lse, expected.lse, plain.lse, like=q, dtype=wide, terms=1.0, name="lse"
        )
    del keywords["return_lse"]
    grads = plsh.attention_vjp(
        q, k, v, output, grad_out, grad_lse if call.return_lse else None, **keywords
    )
    assert (grads.slopes is None) == (not call.is_decay)
    testing.assert_gradients_close(grads, expected, plain, like=q, from_lse=True)


def largest_lse(expected):
    """Return the largest |lse|, or 1."""
    return float(np.max(np.abs(expected.lse), initial=1, where=expected.lse > -np.inf))


CROSSED = [BandCall(**row) for row in pairwise(FACTORS, 11)]

LONG = [
    BandCall("exact", (4, 2), (300, 300), (64, 64), 2, dtype="float32", flatter=4.0),
    BandCall("exact", (2, 1), (300, 300), (257, 80), 1, causal=True, dtype="float32"),
    BandCall("windows", (4, 4), (300, 300), (80, 257), 1, segments="one", flatter=9.0),
    BandCall("lsh", (3, 1), (300, 300), (16, 16), 3, dtype="float16", flatter=16.0, samples=16),
    BandCall("exact", (2, 1), (1000, 1000), (16, 8), 1, causal=True, flatter=128.0),
    BandCall("tol", (2, 2), (1000, 1000), (16, 16), 1, dtype="float32", flatter=128.0),
    BandCall("lsh", (2, 1), (1000, 1000), (8, 16), 1, flatter=128.0, segments="one", samples=16),
    BandCall("lsh-iid", (2, 1), (1000, 1000), (16, 16), 1, True, flatter=64.0, dtype="float32"),
    BandCall("set", (2, 1), (1000, 700), (16, 16), 1, flatter=32.0, dtype="float32"),
    BandCall("cuts", (2, 1), (700, 1000), (16, 16), 1, True, offsets="far", dtype="float32"),
    BandCall("power", (2, 1), (600, 600), (16, 16), 1, offsets="batch", samples=7),
]
"""Several chunks, blocks on either side, and tiles of unequal reach."""


APART = [
    BandCall("exact", lengths=(3, 5), flatter=2.0**14, gap=2**29, dtype="float32"),
    BandCall("exact", lengths=(5, 3), flatter=2.0**14, gap=-(2**29), dtype="float32"),
    BandCall("exact", lengths=(3, 5), gap=9, slope_form="rows", segments="one", causal=True),
    BandCall("exact", lengths=(300, 150), flatter=256.0, gap=-300, dtype="float32"),
    BandCall("exact", lengths=(1100, 40), heads=(2, 1), flatter=256.0, gap=65, dtype="float32"),
    BandCall("exact", lengths=(70, 90), gap=1, dtype="float16"),
    BandCall("tol", lengths=(70, 90), flatter=64.0, gap=540, dtype="float32"),
    BandCall("tol", lengths=(70, 90), flatter=64.0, gap=-540, segments="pair"),
    BandCall("tol", lengths=(65, 3), flatter=64.0, gap=1200, causal=True, slope_form="rows"),
    BandCall("lsh", lengths=(70, 90), flatter=64.0, gap=200, dtype="float32"),
    BandCall("lsh", lengths=(70, 90), flatter=64.0, gap=-200, samples=9),
    BandCall("set", lengths=(90, 70), flatter=64.0, gap=-150, segments="one", dtype="float32"),
    BandCall("lsh-iid", lengths=(600, 9), heads=(2, 1), flatter=64.0, gap=100, causal=True),
    BandCall("cuts", lengths=(40, 41), gap=20),
    BandCall("power", lengths=(65, 33), gap=-40),
]
"""All keys on one side of the queries, near enough to be seen by some heads and rows."""


LARGE = [
    BandCall(method, (2, 1), (n, n), (16, 16), 2, causal, dtype=dtype, std=std)
    for (method, causal), n, (dtype, std) in itertools.product(
        (("exact", True), ("windows", False), ("lsh", True), ("blocks", False)),
        (65, 160),
        (("float16", 5.0), ("float32", 5.0), ("float32", 12.0), ("float64", 30.0)),
    )
]
"""Logits with a standard deviation of 25 to 900, so that exponentials need a shift."""


@pytest.mark.parametrize("call", [*CROSSED, *LONG, *APART, *LARGE], ids=str)
def test_call_equals_oracle(call):
    """U013, U014, U016, U017, U021, U022, U023, U035, U050, U054, U059, U065."""
    check_band(call)


def test_crossing_covers_every_pair():
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(getattr(c, a), getattr(c, b)) for c in CROSSED}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)


def test_logits_of_ten_thousand_in_half_precision():
    """U003: products past float16's range; rows nearly one-hot pick the oracle's key."""
    rng = np.random.default_rng(3)
    q, k = ((900 * rng.uniform(-1, 1, (2, 4, 128, 64))).astype(np.float16) for _ in range(2))
    v, grad_out = rng.standard_normal((2, 2, 4, 128, 64)).astype(np.float16)
    for method in ("exact", "window", "lsh"):
        got = everything(q, k, v, method, (grad_out, None))
        assert all(np.isfinite(x).all() for x in got)
        if method == "exact":
            expected = testing.oracle(q, k, v, slopes=SLOPES)
            np.testing.assert_allclose(got[0], expected.out, atol=2e-2)


def test_sums_over_many_keys_lose_no_digits():
    """8000 equal weights, few queries; one after another they would lose some."""
    q, k, v = inputs(3, 8000, dtype="float32")
    out = plsh.attention(
        0 * q, k, v + 1, method="exact", slopes=0.0, q_offset=0, backend="numpy"
    )  # fmt: skip
    mean = (v + 1).astype(np.float64).mean(axis=2).repeat(2, axis=1)[:, :, None]
    assert np.abs(out - mean).max() < 3 * np.finfo(np.float32).eps


def test_one_token_attends_to_itself():
    for dtype in ("float16", "float32", "float64"):
        q, k, v = inputs(1, dtype=dtype)
        for method in NAMES:
            out, _ = ours(q, k, v, method=method)
            testing.assert_equal_to_rounding(out, np.repeat(v, 2, axis=1), units=2)


# --- the paper's algorithm ------------------------------------------------------------------------


@CAUSAL
@pytest.mark.parametrize(
    ("n", "sigma", "samples"), [(1000, 8.0, 4), (1500, 64.0, 16), (3000, 256.0, 5)]
)
def test_single_pass_equals_the_reduction(n, sigma, samples, causal):
    """The same integers give the same function: several chunks, many blocks on either side."""
    q, k, v = inputs(n, batch=1, heads=2, kv_heads=1)
    blocks = plsh.RandomBinning(sigma).sample(samples, n, seed=4)
    want = plsh.reduction(q, k, v, blocks, causal=causal)
    got = plsh.attention(
        q, k, v, method=blocks, causal=causal, return_lse=True, backend="numpy"
    )  # fmt: skip
    assert_same(got, want)


@CAUSAL
@METHOD
def test_band_kernel_equals_the_reference(method, causal):
    """At other positions, with segments and grouped heads, in float32 too."""
    ids = plsh.segments_from_lengths([[150, 100], [7, 240]], 260)
    for dtype in ("float32", "float64"):
        q, k, v = inputs(260, dtype=dtype)
        call = {"causal": causal, "segment_ids": ids, "q_offset": 11, "k_offset": 3}
        assert_same(ours(q, k, v, method=method, **call), attend(q, k, v, method, **call))


# --- how the work is cut --------------------------------------------------------------------------

MODULES = (backend, band, scratch, segment, weights, tiles)
CUTS = {
    "segments": {"SEGMENT": 64},
    "uneven segments": {"SEGMENT": 80},
    "chunks": {"FORWARD": segment.Size(32, 1), "BACKWARD": segment.Size(64, 1)},
    "tiles": {"FORWARD": segment.Size(8, 1 << 19), "BACKWARD": segment.Size(16, 1 << 18)},
    "blocks": {"PRODUCT": 1},
    "batch groups": {"COPIES": 1},
    "all": {
        "SEGMENT": 48,
        "FORWARD": segment.Size(16, 3000),
        "BACKWARD": segment.Size(8, 3000),
        "PRODUCT": 1 << 12,
        "COPIES": 1 << 12,
    },
}


@contextlib.contextmanager
def settings(**values):
    """Set constants of the kernel wherever a module holds them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            holders = [module for module in MODULES if hasattr(module, name)]
            assert holders
            for module in holders:
                patch.setattr(module, name, value)
        yield


def everywhere(method, causal, **keywords):
    """A call with all options on, at positions per batch row: `everything` of it."""
    q, k, v = inputs(150, 140, batch=3)
    ids = tuple(plsh.segments_from_lengths([[90, 40], [120, 5], [n, 0]], n) for n in (150, 140))
    call = {"causal": causal, "segment_ids": ids, "q_offset": (20, 3, 20), "k_offset": (9, 0, 9)}
    return everything(q, k, v, method, **call, **keywords)


@CAUSAL
@METHOD
def test_any_cut_of_the_work_gives_the_same(method, causal):
    """Segments, chunks, tiles, blocks and groups of batch rows, forward and backward."""
    whole = everywhere(method, causal)
    for values in CUTS.values():
        with settings(**values):
            assert_all_same(everywhere(method, causal), whole, units=256)


@METHOD
def test_threads_give_the_same_bits(method, monkeypatch):
    q, k, v = inputs(300, dtype="float32")
    with settings(SEGMENT=96):
        one = everything(q, k, v, method)
        monkeypatch.setattr(backend, "THREADS_PAY", 0)
        monkeypatch.setattr(backend, "_cpus", lambda: 4)
        for _ in range(3):
            assert_all_same(everything(q, k, v, method), one, units=0)


def test_calls_from_several_threads_do_not_disturb_one_another():
    tokens = [inputs(n, dtype="float32") for n in (65, 40, 129, 1)] * 3
    want = [everything(*x, method) for x, method in itertools.product(tokens[:4], NAMES)] * 3
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(everything, *x, m) for x, m in itertools.product(tokens, NAMES)]
        for call, expected in zip(calls, want, strict=True):
            assert_all_same(call.result(), expected, units=0)


class Poisoned:
    """NumPy whose fresh memory holds NaN."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def empty(shape, dtype=float):
        filler = {"f": np.nan, "i": -(2**30), "u": np.iinfo(np.uint8).max}
        return np.full(shape, filler[np.dtype(dtype).kind], dtype)


def test_nothing_is_read_before_it_is_written(monkeypatch):
    """Fresh and reused memory poisoned with NaN: the same bits; no stale and no unwritten rows."""
    want = [everywhere(method, causal) for method in NAMES for causal in (False, True)]
    q, k, v = inputs(75, dtype="float32")  # two tiles and a third
    short = [everything(q, k, v, method) for method in NAMES]
    for module in MODULES:
        monkeypatch.setattr(module, "np", Poisoned())
        if hasattr(module, "_DIAGONALS"):  # none is kept from above
            monkeypatch.setattr(module, "_DIAGONALS", module._Kept())
    get = segment.Scratch.get

    def poisoned_get(self, name, shape, dtype):
        memory = get(self, name, shape, dtype)
        memory[...] = np.nan
        return memory

    monkeypatch.setattr(segment.Scratch, "get", poisoned_get)
    again = [everywhere(method, causal) for method in NAMES for causal in (False, True)]
    for a, b in zip(again, want, strict=True):
        assert_all_same(a, b, units=0)
    for method, b in zip(NAMES, short, strict=True):
        assert_all_same(everything(q, k, v, method), b, units=0)


def test_calls_of_other_sizes_leave_nothing_behind():
    """U045: big, small, big: the same bits as before."""
    sizes = (200, 33, 200, 1, 16, 65)
    first = [everything(*inputs(n), method) for n in sizes for method in NAMES]
    again = [everything(*inputs(n), method) for n in sizes for method in NAMES]
    for a, b in zip(again, first, strict=True):
        assert_all_same(a, b, units=0)


# --- inputs as they come --------------------------------------------------------------------------


def memmap(x):
    """Return a read-only map of a file of `x`."""
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        x.tofile(file)
        file.flush()
        return np.memmap(file.name, x.dtype, "r", shape=x.shape)


def unaligned(x):
    """Return `x` one byte off any boundary."""
    return np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape)


VIEWS = {
    "heads last": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "dims first": lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
    "negative": lambda x: np.ascontiguousarray(x[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1],
    "every second": lambda x: np.repeat(np.repeat(x, 2, axis=-1), 3, axis=-2)[..., ::3, ::2],
    "fortran": np.asfortranarray,
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "memmap": memmap,
    "unaligned": unaligned,
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides_are_honoured(view):
    """U018, U019, U020: every input and cotangent as a view, forward and backward, read-only."""
    for n, method in ((75, "exact"), (20, "lsh")):
        q, k, v = inputs(n, dtype="float32")
        output, grads = ours(q, k, v, method=method), cotangents(q, v)
        want = everything(q, k, v, method, grads)
        change = VIEWS[view]
        q, k, v, grad_out = (change(x) for x in (q, k, v, grads[0]))
        grad_lse = change(grads[1][..., None])[..., 0]
        output = plsh.AttentionOutput(change(output.out), change(output.lse[..., None])[..., 0])
        copies = [x.copy() for x in (q, k, v, grad_out, grad_lse, *output)]
        for x in (q, k, v, grad_out, grad_lse, *output):
            x.flags.writeable = False
        got = ours(q, k, v, method=method)
        by = ours_vjp(q, k, v, output, grad_out, grad_lse, method=method)
        for a, b in zip((*got, *by), want, strict=False):
            if a is not None:
                np.testing.assert_array_equal(a, b)
        for x, copy in zip((q, k, v, grad_out, grad_lse, *output), copies, strict=True):
            np.testing.assert_array_equal(x, copy)


@METHOD
def test_broadcast_inputs_with_stride_zero(method):
    """U019: expanded batch and heads; a gradient of its own for each."""
    q, k, v = inputs(45)
    q, k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (q, k, v))
    grads = tuple(np.broadcast_to(x[:1, :1], x.shape) for x in cotangents(q, v))
    want = everything(*(x.copy() for x in (q, k, v)), method, tuple(x.copy() for x in grads))
    assert_all_same(everything(q, k, v, method, grads), want, units=0)


@METHOD
def test_results_are_fresh_and_writable(method):
    q, k, v = inputs(40)
    grads = cotangents(q, v)
    for x in everything(q, k, v, method, grads):
        assert x.flags.c_contiguous
        assert x.flags.writeable
        assert type(x) is np.ndarray
        assert not any(np.shares_memory(x, y) for y in (q, k, v, *grads))


def test_settings_of_floating_point_errors_do_not_matter():
    """A caller's np.errstate(all="raise") meets no overflow of ours."""
    q, k, v = inputs(75, dtype="float32")
    want = everything(q, k, v)
    with np.errstate(all="raise"):
        assert_all_same(everything(q, k, v), want, units=0)
        everything(12 * q, k, v, causal=True)


# --- hidden keys, extreme weights, padding --------------------------------------------------------


def hidden_call(case, n):
    """Return keywords, the hidden key, and which rows see it."""
    at, key = np.arange(n), n - 1
    if case == "future":
        return {"method": plsh.Exact(), "slopes": [0.1, 0.02], "causal": True}, key, at >= key
    key = n // 2 + 3
    if case == "window":
        return {"method": plsh.Window((9, 4)), "slopes": [0.1, 0.02]}, key, np.abs(at - key) <= 9
    if case == "block":
        labels = plsh.FixedBlocks(10.0).sample(2, n).labels()
        seen = labels[0, 0] == labels[0, 0, key]
        return {"method": plsh.PartitionSet(labels), "causal": n % 2 == 0}, key, seen
    ids = np.where((at >= key - 2) & (at < key + 5), 1, 0)[None]
    if case == "padding":
        ids = np.where(at == key, -1, ids)
    call = {"method": plsh.PositionalLSH(4), "slopes": [0.1, 0.02], "segment_ids": ids}
    return call, key, (ids[0] == 1) & (case == "segment") | (at == key)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("case", ["future", "window", "block", "segment", "padding"])
@pytest.mark.parametrize("n", [64, 77])
def test_a_hidden_key_far_above_the_visible_ones_empties_no_row(case, n, dtype):
    """U010: a logit 100, 10^4, or past the range; rows that do not see it are as without it."""
    call, key, seen = hidden_call(case, n)
    call |= {"scale": 1.0, "backend": "numpy"}
    q, k, v = inputs(n, dtype=dtype, batch=1, heads=2, kv_heads=1)
    q[..., 0], k[..., key, :] = 1, 0
    grads = [np.where(seen[:, None], 0, cotangents(q, v)[0]).astype(dtype), None]

    def run(value):
        keys = k.copy()
        keys[..., key, 0] = value
        output = plsh.attention(q, keys, v, return_lse=True, **call)
        by = plsh.attention_vjp(q, keys, v, output, *grads, **call)
        return (*(x[:, :, ~seen] for x in (*output, by.q)), by.k, by.v)

    assert not seen.all()
    mild = run(0)
    assert np.isfinite(mild[1]).all()
    largest = {"float16": 6e4, "float32": 1e38, "float64": 1e300}[dtype]
    for value in (100, 1e4, largest):  # a shift by 100 rounds what is left
        assert_all_same(run(value), mild, units=256)


def test_hidden_products_past_the_range_do_no_harm():
    """A hidden q·k is infinite in float32; rows that do not see it are finite, and nothing warns.

    (Rows that see it have an lse past the range, and are not judged.)
    """
    n, seen = 75, np.arange(75) >= 70
    q, k, v = inputs(n, dtype="float32")
    grads = cotangents(q, v)[0] * ~seen[:, None]
    want = everything(q, k, v, causal=True, grads=(grads, None))
    q, k = 1024 * q, k / 1024
    k[:, :, seen] *= np.float32(2.0**127)
    got = everything(q, k, v, causal=True, grads=(grads, None))
    for a, b in zip((got[0], got[1], got[2] * 1024), want[:3], strict=True):
        testing.assert_equal_to_rounding(a[:, :, ~seen], b[:, :, ~seen])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_that_see_far_keys_only_are_not_empty(dtype):
    """Every bias is below the range of exponentials; the oracle has the answer."""
    for slope, offset, causal in ((0.3, 700, True), (1.0, 1000, False), (0.02, -9000, False)):
        q, k, v = inputs(40, 50, dtype=dtype, batch=1, heads=2, kv_heads=1)
        at = {"causal": causal, "q_offset": max(offset, 0), "k_offset": max(-offset, 0)}
        oracle = {"slopes": [slope] * 2, **at}
        expected = testing.oracle(q, k, v, **oracle)
        plain = testing.plain_attention(q, k, v, dtype=dtype, **oracle)
        got = ours(q, k, v, slopes=slope, **at)
        largest = np.abs(expected.lse).max()
        testing.assert_attention_close(got.out, expected.out, plain.out, like=q, terms=largest)
        testing.assert_attention_close(got.lse, expected.lse, plain.lse, like=q, terms=1.0)
        grads = ours_vjp(q, k, v, got, np.ones_like(got.out), slopes=slope, **at)
        rounding = np.finfo(dtype).eps * largest
        for name in ("q", "k", "v"):
            want = getattr(expected, name)
            error = np.abs(getattr(grads, name) - want).max()
            assert error <= 4 * rounding * max(1, np.abs(want).max()), name


@pytest.mark.parametrize("slope", [1e4, 1e28, 1e300])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_huge_slope_is_self_attention(dtype, slope):
    """U044: out = v, finite gradients, forward and backward."""
    q, k, v = inputs(70, dtype=dtype)
    for method in ("exact", "window", "lsh"):
        for causal in (False, True):
            got = everything(q, k, v, method, slopes=slope, causal=causal)
            testing.assert_equal_to_rounding(got[0], np.repeat(v, 2, axis=1), units=4)
            assert all(np.isfinite(x).all() for x in got)
    far = ours(q, k, v, slopes=slope, q_offset=1000)  # the nearest key is the last
    want = np.repeat(np.broadcast_to(v[:, :, -1:], v.shape), 2, axis=1)
    testing.assert_equal_to_rounding(far.out, want, units=4)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_slope_zero_is_plain_attention(method):
    """U051: softmax without a bias, for every default method and whatever the seed."""
    q, k, v = inputs(70)
    got = plsh.attention(q, k, v, method=method, slopes=0.0, backend="numpy")
    keys, values = (np.repeat(x, 2, axis=1) for x in (k, v))
    logits = q @ keys.swapaxes(-1, -2) / np.sqrt(8)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    testing.assert_equal_to_rounding(got, p / p.sum(axis=-1, keepdims=True) @ values)


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 6e4])
@CAUSAL
@METHOD
def test_what_stands_in_padding_reaches_nothing(method, causal, fill):
    """U035, U037: in tokens and in cotangents of padding; the rest has the same bits."""
    n = 75
    ids = np.array([[-1] * 3 + [0] * 40 + [-1] * 5 + [1] * 27, [2] * 50 + [-1] * 25])
    q, k, v = inputs(n, dtype="float32")
    grads = cotangents(q, v)
    padded = ids < 0

    def run(value):
        filled = [x.copy() for x in (q, k, v, *grads)]
        for x in filled:
            x[np.broadcast_to(padded[:, None], x.shape[:3])] = value
        *tokens, grad_out, grad_lse = filled
        return everything(*tokens, method, (grad_out, grad_lse), causal=causal, segment_ids=ids)

    got = run(fill)
    assert_all_same(got, run(0), units=0)
    for x in got[0], *got[2:5]:
        assert not np.any(x[np.broadcast_to(padded[:, None], x.shape[:3])])
    assert np.all(got[1][np.broadcast_to(padded[:, None], got[1].shape)] == -np.inf)


@METHOD
def test_rows_that_see_no_key_have_no_gradient(method):
    """U008, U009: whatever their cotangents hold, dead rows give zeros and reach nothing."""
    q, k, v = inputs(45, 30)
    call = {"causal": True, "q_offset": 0, "k_offset": 20}
    grads = cotangents(q, v)
    dead = [x.copy() for x in grads]
    for x in dead:
        x[:, :, :20] = np.nan
    got = everything(q, k, v, method, tuple(dead), **call)
    assert_all_same(got, everything(q, k, v, method, grads, **call), units=0)
    assert not np.any(got[0][:, :, :20])
    assert not np.any(got[2][:, :, :20])
    assert np.all(got[1][:, :, :20] == -np.inf)


@METHOD
def test_nan_in_a_visible_query_stays_in_its_row(method):
    q, k, v = inputs(75, dtype="float32")
    want = ours(q, k, v, method=method)
    q[0, :, 40] = np.nan
    got = ours(q, k, v, method=method)
    assert np.isnan(got.out[0, :, 40]).all()
    assert np.isnan(got.lse[0, :, 40]).all()
    others = np.arange(75) != 40
    for a, b in zip(got, want, strict=True):
        testing.assert_equal_to_rounding(a[:, :, others], b[:, :, others])


@METHOD
def test_nan_in_a_visible_key_reaches_the_rows_that_see_it(method):
    """And only those; a NaN in a value may reach the other rows of a tile, see below."""
    q, k, v = inputs(75, dtype="float32")
    want = ours(q, k, v, method=method, causal=True)
    probe = v.copy()
    probe[0, :, 40] += 1e6
    seen = np.abs(ours(q, k, probe, method=method, causal=True).out - want.out).max(axis=-1) > 1
    k[0, :, 40] = np.nan
    got = ours(q, k, v, method=method, causal=True)
    np.testing.assert_array_equal(np.isnan(got.out).any(axis=-1)[seen], True)
    assert not np.isnan(got.out[:, :, :40]).any()
    assert not np.isnan(got.out[1]).any()
    testing.assert_equal_to_rounding(got.out[:, :, :40], want.out[:, :, :40])


def test_nan_in_a_visible_value_stays_near_and_in_its_batch_row():
    q, k, v = inputs(300, dtype="float32")
    call = {"method": plsh.Window(5), "slopes": SLOPES, "backend": "numpy"}
    want = plsh.attention(q, k, v, **call)
    v[0, 0, 150] = np.nan
    got = plsh.attention(q, k, v, **call)
    assert np.isnan(got[0, :2, 145:156]).all()
    far = np.abs(np.arange(300) - 150) > 100
    for a, b in ((got[1], want[1]), (got[0, 2:], want[0, 2:]), (got[:, :, far], want[:, :, far])):
        testing.assert_identical(a, b)


# --- laws -----------------------------------------------------------------------------------------


def concat(parts):
    return plsh.AttentionOutput(
        np.concatenate([p.out for p in parts], axis=-2),
        np.concatenate([p.lse for p in parts], axis=-1),
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@METHOD
def test_a_batch_row_does_not_depend_on_its_mates(method, dtype):
    """U094, U095: alone, in batches of 2, 4, 8 and in another order, bit-equal, gradients too."""
    q, k, v = inputs(75, dtype=dtype, batch=8)
    q[5:] *= 30  # these need a shift, the others do not
    grads = cotangents(q, v)
    whole = everything(q, k, v, method, grads)
    order = np.random.default_rng(0).permutation(8)
    pick = [np.s_[:1], np.s_[1:2], np.s_[6:7], np.s_[2:4], np.s_[3:7], order]
    for own in pick:
        part = everything(
            q[own], k[own], v[own], method, (grads[0][own], grads[1][own])
        )  # fmt: skip
        count = 5  # by slopes is a sum over the batch
        assert_all_same(part[:count], [x[own] for x in whole[:count]], units=0)


def test_slopes_and_positions_per_batch_row_equal_separate_calls():
    """U050: bit for bit; a steep mate changes nothing."""
    q, k, v = inputs(75, dtype="float32", batch=3)
    slopes = np.array([SLOPES, (0.1, 0.2, 0.0, 1.0), (40.0, 0.0, 9.0, 3.0)])
    at = (7, 2, 7)
    for method in ("exact", "window"):
        got = everything(q, k, v, method, slopes=slopes, q_offset=at, k_offset=(1, 2, 1))
        grads = cotangents(q, v)
        for b in range(3):
            own = np.s_[b : b + 1]
            alone = everything(
                q[own], k[own], v[own], method, tuple(x[own] for x in grads),
                slopes=slopes[own], q_offset=at[b], k_offset=(1, 2, 1)[b],
            )  # fmt: skip
            assert_all_same(alone, [x[own] for x in got], units=0)
        for values in CUTS.values():
            with settings(**values):
                again = everything(
                    q, k, v, method, slopes=slopes, q_offset=at, k_offset=(1, 2, 1)
                )  # fmt: skip
            assert_all_same(again[:5], got[:5], units=256)
            testing.assert_equal_to_rounding(again[5].astype(q.dtype), got[5].astype(q.dtype))


PROGRAM = """
import hashlib, plsh
from plsh import testing
digest = hashlib.sha256()
for n in (300, 1, 31, 33, 64, 129):
    *tokens, grad_out, grad_lse = testing.make_inputs(1, 2, 1, n, dtype="float32")
    for method in ("exact", "window", "lsh"):
        call = {"method": method, "causal": True, "backend": "numpy"}
        results = set()
        for _ in range(10):
            output = plsh.attention(*tokens, return_lse=True, **call)
            grads = plsh.attention_vjp(*tokens, output, grad_out, grad_lse, **call)
            results.add(b"".join(x.tobytes() for x in (*output, *grads) if x is not None))
        assert len(results) == 1, (n, method)
        digest.update(results.pop())
print(digest.hexdigest())
"""


def test_repeats_are_equal_from_the_first_call_of_a_process():
    """U013, U092: ten repeats, forward and backward, bit-equal, in two fresh processes."""
    runs = {
        subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            check=True,
            capture_output=True,
            timeout=120,
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


@METHOD
def test_decoding_equals_prefill(method):
    """U113, U108: one query at a time against a growing cache, over a tile's edge."""
    q, k, v = inputs(70)
    whole = ours(q, k, v, method=method, causal=True)
    parts = [
        ours(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], method=method, q_offset=t)
        for t in range(70)
    ]
    assert_same(concat(parts), whole)


@METHOD
@CAUSAL
def test_chunks_of_queries_equal_the_whole(method, causal):
    """U114: queries in parts, forward and dq; the parts' dk and dv add up."""
    cuts = (0, 100, 101, 230)
    q, k, v = inputs(cuts[-1])
    grads = cotangents(q, v)
    whole = everything(q, k, v, method, grads, causal=causal)
    parts = [
        everything(
            q[:, :, a:b], k, v, method, tuple(x[:, :, a:b] for x in grads),
            causal=causal, q_offset=a,
        )
        for a, b in itertools.pairwise(cuts)
    ]  # fmt: skip
    joined = [np.concatenate([p[i] for p in parts], axis=2) for i in range(3)]
    summed = [sum(p[i] for p in parts) for i in range(3, len(whole))]
    assert_all_same([*joined, *summed], whole, units=256)


@METHOD
@CAUSAL
def test_merged_shards_of_keys_equal_the_whole(method, causal):
    """U105, U106: with a `k_offset` each; gradients from the merged output and lse."""
    cuts = (0, 7, 7, 80, 130)
    q, k, v = inputs(130)
    grads = cotangents(q, v)
    whole = everything(q, k, v, method, grads, causal=causal)
    calls = [
        ((q, k[:, :, a:b], v[:, :, a:b]), {"causal": causal, "q_offset": 0, "k_offset": a})
        for a, b in itertools.pairwise(cuts)
    ]
    merged = plsh.merge([ours(*x, method=method, **call) for x, call in calls])
    assert_all_same(merged, whole[:2])
    parts = [ours_vjp(*x, merged, *grads, method=method, **call) for x, call in calls]
    found = [
        sum(p.q for p in parts),
        *(np.concatenate([getattr(p, name) for p in parts], axis=2) for name in ("k", "v")),
        *([] if parts[0].slopes is None else [sum(p.slopes for p in parts)]),
    ]
    for name, a, b in zip(WORDS[2:], found, whole[2:], strict=False):
        testing.assert_equal_to_rounding(a, b, units=256, name=name)


@METHOD
@CAUSAL
def test_packed_documents_equal_separate_calls(method, causal):
    """U039, U037: between paddings of NaN, at the positions they have."""
    documents, n = (slice(2, 60), slice(60, 61), slice(66, 140)), 150
    ids = np.full((2, n), -1)
    for number, doc in enumerate(documents):
        ids[:, doc] = number
    q, k, v = inputs(n)
    grads = cotangents(q, v)
    for x in (q, k, v, *grads):
        x[np.broadcast_to(ids[:, None] < 0, x.shape[:3])] = np.nan
    got = everything(q, k, v, method, grads, causal=causal, segment_ids=ids)
    for doc in documents:
        at = {"q_offset": doc.start, "k_offset": doc.start, "causal": causal}
        alone = everything(
            *(x[:, :, doc] for x in (q, k, v)), method, tuple(x[:, :, doc] for x in grads), **at
        )
        assert_all_same([x[:, :, doc] for x in got[:5]], alone[:5])


@METHOD
@CAUSAL
def test_left_padding_changes_nothing(method, causal):
    """U035: positions below 0, up to the edge of a tile, over it, and several tiles."""
    q, k, v = inputs(70)
    whole = ours(q, k, v, method=method, causal=causal)
    for pad in (1, 32, 37, 64):
        ids = np.array([[-1] * pad + [0] * 70] * 2)
        widths = [(0, 0), (0, 0), (pad, 0), (0, 0)]
        padded = ours(
            *(np.pad(x, widths, constant_values=np.nan) for x in (q, k, v)),
            method=method,
            causal=causal,
            q_offset=-pad,
            k_offset=-pad,
            segment_ids=ids,
        )
        assert_same(rows(padded, slice(pad, None)), whole)
        assert not np.any(padded.out[:, :, :pad])


@METHOD
def test_a_batch_of_padding_alone_gives_zeros(method):
    """U034: every position below 0, in one tile and in two."""
    for n in (10, 32, 40):
        q, k, v = inputs(n)
        ids = np.full((2, n), -1)
        got = everything(q, k, v, method, q_offset=-100, k_offset=-100, segment_ids=ids)
        assert np.all(got[1] == -np.inf)
        assert not any(np.any(x) for x in (got[0], *got[2:]))


@METHOD
@CAUSAL
def test_asking_for_the_lse_never_changes_the_output(method, causal):
    """U028: bit for bit."""
    q, k, v = inputs(75, dtype="float32")
    alone = ours(q, k, v, method=method, causal=causal, return_lse=False)
    testing.assert_identical(ours(q, k, v, method=method, causal=causal).out, alone)


@pytest.mark.parametrize("method", ["exact", "window"])
@pytest.mark.parametrize("shift", [1, 1000, FAR, -17])
def test_a_decay_depends_on_relative_positions_only(method, shift):
    """U035: bit for bit, far along the axis too."""
    q, k, v = inputs(40, 75, dtype="float32")
    near = everything(q, k, v, method, q_offset=5, causal=True)
    far = everything(q, k, v, method, q_offset=5 + shift, k_offset=shift, causal=True)
    assert_all_same(far, near, units=0)


@pytest.mark.parametrize("shape", list(itertools.product([0, 2], [0, 4], [0, 3], [0, 5], [0, 6])))
def test_empty_axes(shape):
    """U016, U017: any of B, H, Nq, Nk, Dv is 0: empty in, empty out, forward and backward."""
    batch, heads, len_q, len_k, value_dim = shape
    q, k, v = testing.make_inputs(batch, heads, heads // 2, len_q, len_k, 3, value_dim)[:3]
    for method in ("exact", "window", "lsh"):
        call = {"method": method, "slopes": SLOPES[:heads], "q_offset": 0, "backend": "numpy"}
        output = plsh.attention(q, k, v, return_lse=True, **call)
        grads = plsh.attention_vjp(q, k, v, output, *cotangents(q, v), **call)
        assert output.out.shape == (batch, heads, len_q, value_dim)
        assert output.lse.shape == (batch, heads, len_q)
        for x, grad in zip((q, k, v), grads, strict=False):
            assert grad.shape == x.shape
            assert np.isfinite(grad).all()
        if len_k == 0:
            assert not np.any(output.out)
            assert np.all(output.lse == -np.inf)


# --- memory ---------------------------------------------------------------------------------------


def peak_of(f):
    """Return the most bytes that a call holds at once beyond its results, kept ones included."""
    backend._FREE.clear()
    (module,) = (m for m in MODULES if hasattr(m, "_DIAGONALS"))
    tracemalloc.start()
    try:
        with settings(_DIAGONALS=module._Kept()):
            result = f()
        return tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in result if x is not None)
    finally:
        tracemalloc.stop()


def peaks(lengths, call, **shape):
    """Return the peaks of forward and backward, in MiB, on one thread, per length."""
    found = []
    with settings(THREADS_PAY=1 << 60):
        for n in lengths:
            q, k, v = testing.make_inputs(
                **{"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, **shape}, len_q=n
            )[:3]
            call = {**call, "causal": True, "backend": "numpy"}
            output = plsh.attention(q, k, v, return_lse=True, **call)
            found.append(
                (
                    peak_of(lambda: plsh.attention(q, k, v, return_lse=True, **call)) / 2**20,  # noqa: B023
                    peak_of(lambda: plsh.attention_vjp(q, k, v, output, v, **call)) / 2**20,  # noqa: B023
                )
            )
    return np.array(found)


def check_memory(call, lengths, most):
    """Assert that memory is linear in the length, and below `most` MiB."""
    short, long = peaks(lengths, call)
    assert (long <= 1.2 * lengths[1] / lengths[0] * short).all()
    assert (long < most).all()


@pytest.mark.parametrize("method", ["lsh", "window"])
def test_memory_is_linear_and_holds_no_band(method):
    """Design section 7: beyond results, integers per sample and tiles; n = 8192 to 16384."""
    kinds = {"lsh": plsh.PositionalLSH(16), "window": plsh.Window(512)}
    # A float for each pair would take 32 MiB and more.
    check_memory({"method": kinds[method], "slopes": 1 / 64}, (8192, 16384), 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "most"), [(plsh.Window(3000), 20), (plsh.Exact(), 64)], ids=["window", "exact"]
)
def test_memory_of_wide_bands_is_linear(method, most):
    """The pairs of a head are 188 and 1024 MiB; a tile visits all keys under exact."""
    check_memory({"method": method, "slopes": 1 / 64}, (8192, 16384), most)


def test_memory_of_a_large_batch_is_bounded():
    """Batch rows are copied in groups: 64 rows of a short call need no more than one."""
    call = {"method": plsh.Window(64), "slopes": 1 / 64}
    with settings(COPIES=1 << 17):
        (one,), (many,) = (peaks((1024,), call, batch=b) for b in (1, 64))
    assert (many <= 1.2 * one).all()
    (many,) = peaks((1024,), call, batch=64)
    assert (many < 3 * backend.COPIES * 4 / 2**20).all()


def test_memory_of_a_decoding_step_does_not_grow_with_the_heads():
    """U059: query heads that share a key head hold no copy of it each, beyond a fixed size."""
    with settings(COPIES=1 << 17):
        one, many = (decoding_peaks(heads) for heads in (1, 32))
    assert (many < 1.3 * one).all()
    assert (decoding_peaks(32) < 3 * backend.COPIES * 4 / 2**20).all()


def decoding_peaks(heads):
    """Return the peaks, in MiB, of one query of several heads against a cache of one key head."""
    q, k, v = testing.make_inputs(2, heads, 1, 1, 4096, 64)[:3]
    call = {"method": "exact", "causal": True, "q_offset": 4095, "backend": "numpy"}
    output = plsh.attention(q, k, v, return_lse=True, **call)
    with settings(THREADS_PAY=1 << 60):
        forward = peak_of(lambda: plsh.attention(q, k, v, return_lse=True, **call))
        backward = peak_of(lambda: plsh.attention_vjp(q, k, v, output, q, **call))
    return np.array([forward, backward]) / 2**20


FLAT = {
    "exact": plsh.Exact(),
    "window": plsh.Window(2**29),
    "lsh": plsh.PositionalLSH(4, sampler=None, family=plsh.FixedBlocks(2.0**30)),
    "lsh far": plsh.PositionalLSH(4, family=plsh.RandomBinning(2.0**24)),
}
"""Methods that see far, and one that does not see as far as it might have to look."""


@CAUSAL
@pytest.mark.parametrize("method", FLAT)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("apart", [2**17, 2**28])
def test_positions_between_queries_and_keys_cost_nothing(method, after, causal, apart):
    """Far keys on either side: neither time nor memory for what is between."""
    q, k, v, grad_out, _ = testing.make_inputs(1, 2, 1, 70, 150, 16, dtype="float32")
    near, far = (
        {"q_offset": 0, "k_offset": 70 + x} if after else {"q_offset": 150 + x} for x in (0, apart)
    )
    decay = not method.startswith("lsh")
    call = {"method": FLAT[method], "slopes": [0.0, 0.0] if decay else None, "causal": causal}
    call["backend"] = "numpy"
    sizes, times, results = [], [], []
    for places in (near, far):
        start = time.perf_counter()
        own = {**call, **places}
        output = plsh.attention(q, k, v, return_lse=True, **own)
        grads = plsh.attention_vjp(q, k, v, output, grad_out, **own)
        times.append(time.perf_counter() - start)
        sizes.append(peak_of(lambda: plsh.attention(q, k, v, return_lse=True, **own)))  # noqa: B023
        sizes.append(peak_of(lambda: plsh.attention_vjp(q, k, v, output, grad_out, **own)))  # noqa: B023
        results.append((*output, *grads[:3]))
    assert max(sizes) < 1 << 21
    assert times[1] < 1 + 10 * times[0]
    if method != "lsh far":  # all weights are 1, at every distance
        assert_all_same(*results)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_blocks_of_any_length_are_counted_across_a_gap(after):
    """The lse of q = 0 is the logarithm of counts of shared blocks, 2^26 positions apart."""
    samples, n, far = 9, 40, 2**26
    family = plsh.RandomBinning((2.0**25, 2.0**27))
    places = {"q_offset": 0, "k_offset": far} if after else {"q_offset": far, "k_offset": 0}
    q = np.zeros((1, 2, n, 1))
    method = plsh.PositionalLSH(samples, sampler="iid", seed=5, family=family)
    _, lse = plsh.attention(q, q, q, method=method, return_lse=True, backend="numpy", **places)
    labels = [
        family.sample(samples, n, start=start, seed=5, sampler="iid").labels()
        for start in places.values()
    ]
    weight = testing.step_weight(*labels)
    assert (weight > 0).any()
    with np.errstate(divide="ignore"):
        testing.assert_equal_to_rounding(lse[0], np.log(weight.sum(axis=-1)))


@pytest.mark.parametrize("slope", [0.5, 1e30, 1e300])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_steep_decay_over_a_gap_keeps_all_digits(slope, dtype, after):
    """The nearest keys win by their distances, which float32 would round away 2^29 off."""
    n = 5
    q, k, v, grad_out, _ = testing.make_inputs(1, 1, 1, n, n, 8, dtype=dtype)
    far, near = (
        {"q_offset": 0, "k_offset": n + x} if after else {"q_offset": n + x} for x in (2**29, 0)
    )
    call = {"method": "exact", "slopes": slope, "backend": "numpy"}
    away = plsh.attention(q, k, v, return_lse=True, **call, **far)
    close = plsh.attention(q, k, v, return_lse=True, **call, **near)
    testing.assert_equal_to_rounding(away.out, close.out)
    decay = min(slope, float(np.finfo(dtype).max) / 2**31)
    lse = close.lse - 2.0**29 * decay  # of a decay over n positions and the gap
    testing.assert_equal_to_rounding(away.lse, lse.astype(dtype), name="lse")
    grads = plsh.attention_vjp(q, k, v, away, grad_out, **call, **far)
    assert all(np.isfinite(x).all() for x in grads)


def lsh_outputs(changes, n=70):
    """Yield the output and gradient by q of calls under lsh that differ by one thing each."""
    q, k, v = inputs(n, dtype="float32")
    for change in changes:
        call = {"method": "lsh", "causal": True, "q_offset": 3, "k_offset": 3, **change}
        if "seed" in change:
            call["method"] = plsh.PositionalLSH(seed=call.pop("seed"))
        call |= {"slopes": 1 / 16, "backend": "numpy"}
        output = plsh.attention(q, k, v, return_lse=True, **call)
        yield output.out, plsh.attention_vjp(q, k, v, output, v.repeat(2, axis=1), **call).q


CHANGES = ({}, {"seed": 1}, {"causal": False}, {"q_offset": 67, "k_offset": 67})


def test_counts_that_are_kept_are_those_of_the_call():
    """Of two calls that differ in the seed, the mask or the place, neither sees the other's."""
    with settings(COUNTED=0):  # nothing new is kept
        want = [x for change in CHANGES for x in lsh_outputs([change])]
    for order in (CHANGES, CHANGES[::-1]):
        got = list(lsh_outputs([*order, *order]))
        for change, own in zip((*order, *order), got, strict=True):
            for a, b in zip(own, want[CHANGES.index(change)], strict=True):
                testing.assert_identical(a, b)


def test_counts_that_are_kept_are_bounded():
    (module,) = (m for m in MODULES if hasattr(m, "_DIAGONALS"))
    with settings(COUNTED=1 << 16, _DIAGONALS=module._Kept()):
        for seed in range(20):
            list(lsh_outputs([{"seed": seed}]))
        held = module._DIAGONALS
        assert 0 < held.nbytes <= 1 << 16
        assert sum(x.nbytes for x in held._held.values()) < held.nbytes


@pytest.mark.parametrize("kept", [1 << 14, 1 << 24])
def test_memory_kept_between_calls_is_bounded(kept):
    """A thread keeps its scratch memory if it is small."""
    q, k, v = inputs(500, dtype="float32")

    def held():
        ours(q, k, v)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        with settings(KEPT=kept), ThreadPoolExecutor(1) as fresh:
            before = tracemalloc.get_traced_memory()[0]
            assert fresh.submit(held).result() - before < kept + (1 << 16)
    finally:
        tracemalloc.stop()


# --- what a stranger found ------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_threads_do_not_overwrite_the_key_heads_of_others(method, heads):
    """Batch rows at listed positions are copies; each worker writes back its own heads only."""
    x = testing.make_inputs(2, *heads, 300, 300, 8, dtype="float64")
    call = {"method": method, "slopes": SLOPES[: heads[0]], "causal": True, "backend": "numpy"}
    results = []
    for offset in (0, [0, 0]):
        keywords = {**call, "q_offset": offset, "k_offset": offset}
        with settings(THREADS_PAY=0, _cpus=lambda: 4):
            for _ in range(3):
                output = plsh.attention(*x[:3], return_lse=True, **keywords)
                results.append(plsh.attention_vjp(*x[:3], output, x.grad_out, **keywords))
    for grads in results[1:]:
        for a, b in zip(grads[:3], results[0][:3], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ids", [[-2, -2, 0, 0, 1, 1], [-2, -1, 0, 0, 1, -2], [-1, -1, 0, 0, 1, 1]])
def test_padding_of_any_negative_id_sees_nothing(ids):
    """Also other padding of the same id."""
    q, k, v = testing.make_inputs(1, 4, 2, 6, 6, 8, dtype="float64")[:3]
    ids = np.array([ids])
    out, lse = ours(q, k, v, method="exact", segment_ids=ids)
    padding = np.broadcast_to((ids < 0)[:, None], lse.shape)
    assert (np.isneginf(lse) == padding).all()
    assert not out[padding].any()


@pytest.mark.parametrize("backend_name", ["numpy", "reference"])
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_values_near_the_end_of_the_range_average_to_themselves(method, backend_name):
    """Their weighted sum is past it, their mean is not."""
    q = np.zeros((1, 2, 400, 4), np.float32)
    v = np.full_like(q, 3e38)
    out = plsh.attention(q, q, v, method=method, slopes=0.01, backend=backend_name)
    np.testing.assert_allclose(out, v, rtol=1e-6)


# --- time -----------------------------------------------------------------------------------------


def seconds(f, count=1):
    """Return the least time of `count` calls."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        f()
        found.append(time.perf_counter() - start)
    return min(found)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_a_short_warm_call_costs_at_most_a_millisecond_over_its_arithmetic(method):
    """n=128, 8 heads of 64: two products of tiles, exponentials, sums, a division."""
    q, k, v = testing.make_inputs(1, 8, 8, 128, 128, 64, dtype="float32")[:3]

    def call():
        plsh.attention(q, k, v, method=method, causal=True, backend="numpy")

    queries = q.reshape(8, 4, 1, 32, 64)
    keys, values = (x.reshape(8, 1, 4, 32, 64) for x in (k, v))

    def arithmetic():
        p = np.matmul(queries, keys.swapaxes(-1, -2))
        np.exp2(p, out=p)
        out = np.matmul(p, values).sum(axis=2)
        out /= p.sum(axis=(2, 4))[..., None]

    pairs = [(seconds(call, 20), seconds(arithmetic, 20)) for _ in range(20)]
    own, bare = (min(x) for x in zip(*pairs, strict=True))
    assert own - bare < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lsh", "window"])
def test_a_cold_first_call_takes_at_most_three_warm_ones(method):
    """n=65536: no partitions drawn, no memory held. Two heads, for time."""
    q, k, v = testing.make_inputs(1, 2, 2, 65536, 65536, 64, dtype="float32")[:3]
    kinds = {"lsh": lambda seed: plsh.PositionalLSH(seed=seed), "window": lambda _: plsh.Window()}
    cold, warm = [], []
    for seed in range(3):
        call = {"method": kinds[method](10_000 + seed), "slopes": [1 / 16, 1 / 64]}

        def run(call=call):
            plsh.attention(q, k, v, causal=True, backend="numpy", **call)

        backend._FREE.clear()
        cold.append(seconds(run))
        warm.append(seconds(run))
    assert min(cold) < 3 * min(warm)
