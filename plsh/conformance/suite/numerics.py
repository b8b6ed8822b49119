"""Precision and range: what accumulates where, far positions, hidden keys, huge numbers."""

import numpy as np
import pytest

from plsh.conformance.suite.common import (
    DTYPES,
    METHODS,
    NAMES,
    SLOPES,
    assert_same,
    make,
    rows,
    wide,
)
from plsh.hashing import FixedBlocks, RandomBinning
from plsh.methods import Exact, PositionalLSH, Window
from plsh.testing import assert_attention_close, assert_equal_to_rounding, round_to

METHOD = pytest.mark.parametrize("method", METHODS)
DECAY = pytest.mark.parametrize("method", ["exact", "window"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
NOT_DOUBLE = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float32": float(np.finfo(np.float32).max),
    "float64": float(np.finfo(np.float64).max),
}
FAR = [pytest.param(n, marks=pytest.mark.full) for n in (2**24 + 1, 2**29 + 1)]
"""Distances beyond the integers of float32."""

PLAIN = {"exact": Exact(), "window": Window(2**31 - 1), "lsh": PositionalLSH(3)}
"""Methods that are plain attention at slope 0."""


def _flat(subject, len_q, len_k, method, dtype, **more):
    """Return a problem of one head in which every key has the same weight."""
    options = {"heads": 1, "kv_heads": 1, "batch": 1, "slopes": (0.0,), "q_offset": 0, **more}
    problem = make(subject, len_q, len_k, method=method, dtype=dtype, **options)
    return problem.but(method=PLAIN[method])


# --- accumulation ---------------------------------------------------------------------------------


@pytest.mark.requirement("NUM-1", "CNV-3", "NUM-8")
@METHOD
@NOT_DOUBLE
def test_sums_over_many_keys_lose_none(method, dtype, subject):
    """A half-precision accumulator stops counting at 2048, or 256."""
    n = 3000
    problem = _flat(subject, 3, n, method, dtype, scale=0.125)
    late = np.where(np.arange(n) < n // 2, 0.0, 1.0)[None, None, :, None]
    problem.but(v=round_to(problem.v / 8 + late, dtype)).check(subject)


@pytest.mark.requirement("NUM-1", "NUM-8", "NUM-9")
@pytest.mark.needs("gradients")
@METHOD
@NOT_DOUBLE
def test_sums_over_many_queries_lose_none(method, dtype, subject):
    """Gradients by a key and its value add up over all queries, those by a slope over all pairs."""
    problem = _flat(subject, 3000, 4, method, dtype, scale=0.125)
    v = np.array([1.0, -1, 0.5, 2])[None, None, :, None] + problem.v / 8
    problem.but(
        q=round_to(1 + problem.q / 8, dtype),
        v=round_to(v, dtype),
        grad_out=round_to(1 + problem.grad_out / 8, dtype),
    ).check(subject)


@pytest.mark.requirement("NUM-1", "CNV-3")
@METHOD
@HALVES
def test_logits_keep_their_last_bits(method, dtype, subject):
    """Logits about 1024 that differ by less than a half-precision number could tell."""
    problem = _flat(subject, 4, 40, method, dtype, scale=1.0)
    q, k = np.zeros_like(problem.q), np.zeros_like(problem.k)
    q[..., 0], q[..., 1], k[..., 0] = 32, 1, 32
    k[..., 1] = round_to(np.linspace(0, 1.9, 40), dtype)
    problem.but(q=q, k=k).check(subject)


@pytest.mark.requirement("NUM-1", "ATT-13")
@METHOD
@DTYPE
@pytest.mark.parametrize("scale", [0.3, -1.7])
def test_the_scaled_queries_are_not_rounded(method, dtype, scale, subject):
    """A scale that is folded into q, or k, in the input dtype shows in the lse."""
    problem = make(subject, 33, method=method, dtype=dtype, scale=scale)
    problem.but(q=round_to(4 * problem.q, dtype)).check(subject)


@pytest.mark.requirement("NUM-1", "NUM-2", "NUM-3")
@DECAY
@HALVES
def test_log_weights_are_not_rounded(method, dtype, subject):
    """A bias of some hundred, whose differences a half-precision number loses."""
    slopes = tuple(float(np.float32(m)) for m in (0.3, 0.123, 0.0777, 0.01))
    problem = make(subject, 5, 40, method=method, dtype=dtype, q_offset=3001, slopes=slopes)
    reach = {"window": Window(5000), "exact": Exact()}[method]
    problem.but(method=reach).check(subject)


@pytest.mark.requirement("NUM-1", "CNV-3")
@METHOD
@DTYPE
def test_inner_products_keep_the_bits_of_the_inputs(method, dtype, subject):
    """One key a query: out is v, dV is dO, and the lse is q k, in full."""
    n = 24
    rng = np.random.default_rng(0)
    problem = make(
        subject, n, method=method, dtype=dtype, batch=1, heads=1, kv_heads=1, dims=(1, 1),
        slopes=(0.5,), scale=1.0, segment_ids=np.arange(n, dtype=np.int32)[None],
    )  # fmt: skip
    if method == "window":
        problem = problem.but(method=Window(3))
    odd = {
        name: round_to(size * (1 + rng.random((1, 1, n, 1))), dtype)
        for name, size in (("q", 1), ("k", 2), ("v", 1), ("grad_out", 1))
    }
    problem = problem.but(**odd)
    problem.check(subject)
    got = problem.output(subject)
    own = subject.array(problem.v, dtype)
    assert_equal_to_rounding(subject.array(got.out, dtype), own, units=2)
    if subject.differentiates:
        by_v = subject.array(problem.gradients(subject).v, dtype)
        assert_equal_to_rounding(by_v, subject.array(problem.grad_out, dtype))


@pytest.mark.requirement("NUM-1", "NUM-7", "NUM-8")
@METHOD
@DTYPE
def test_long_inner_products_are_right(method, dtype, subject):
    """Products that cancel over a long head dim: fewer bits, or a half-precision sum, show."""
    if subject.capabilities.max_head_dim is None:
        dims = (64, 80)
    else:
        dims = (min(64, subject.capabilities.max_head_dim),) * 2
    problem = make(subject, 33, method=method, dtype=dtype, batch=1, dims=dims, scale=0.25)
    large = round_to(2 * np.sign(problem.q), dtype)
    k = problem.k.copy()
    k[..., 1::2] = k[..., ::2]
    large[..., 1::2] = -large[..., ::2]
    q = round_to(large + problem.q, dtype)
    problem.but(q=q, k=k).check(subject)


# --- distances ------------------------------------------------------------------------------------


@pytest.mark.requirement("NUM-2", "ATT-14", "CNV-1")
@DECAY
@DTYPE
@CAUSAL
@pytest.mark.parametrize("first", [2049, 2**24 - 5, 2**29, 2**30 - 40, -(2**30) + 1])
def test_far_positions_have_exact_distances(method, dtype, causal, first, subject):
    """Neighbours that float16, bfloat16 or float32 no longer tells apart."""
    problem = make(
        subject, 20, 33, method=method, dtype=dtype, causal=causal,
        q_offset=first + 7, k_offset=first,
    )  # fmt: skip
    problem.check_output(subject)


@pytest.mark.requirement("NUM-2", "NUM-5")
@pytest.mark.needs("method:exact")
@DTYPE
@pytest.mark.parametrize("apart", [129, 257, 2050, 32769, 65537, *FAR])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_distances_are_exact(dtype, apart, sign, subject):
    """Beyond the integers of int8, int16, float16 and float32, and up to the largest."""
    ends = (apart // 2 + apart % 2, -(apart // 2))
    first = ends if sign > 0 else ends[::-1]
    slopes = tuple(float(np.float32(m / apart)) for m in (1.0, 30.0))
    make(
        subject,
        5,
        9,
        dtype=dtype,
        batch=1,
        heads=2,
        kv_heads=1,
        q_offset=first[0],
        k_offset=first[1],
        slopes=slopes,
    ).check_output(subject)


@pytest.mark.requirement("NUM-2", "MTH-2", "MEM-3")
@pytest.mark.needs("method:window")
@DTYPE
@pytest.mark.parametrize("width", [128, 256, 2048, 4097, 32768, 65537, *FAR])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_edge_of_a_wide_window_is_exact(dtype, width, sign, subject):
    """Keys at distances width - 2 … width + 2: three are seen, two are not."""
    at = (width, -2) if sign > 0 else (0, width - 2)
    problem = make(
        subject, 1, 5, dtype=dtype, batch=1, heads=1, kv_heads=1, q_offset=at[0], k_offset=at[1],
        method="window", slopes=(0.0,),
    ).but(method=Window(width))  # fmt: skip
    got = problem.but(q=0 * problem.q).output(subject)
    expected = np.full(got.lse.shape, np.log(3.0))
    own = wide(dtype)
    assert_equal_to_rounding(subject.array(got.lse, own), subject.array(expected, own), units=4)
    problem.check_output(subject)


@pytest.mark.requirement("NUM-2", "NUM-6", "CNV-1")
@pytest.mark.needs("method:lsh")
@DTYPE
@pytest.mark.parametrize("first", [2047, 65535, 2**24 - 3, 2**30 - 60])
def test_blocks_at_far_positions_are_exact(dtype, first, subject):
    problem = make(
        subject, 30, method="lsh", dtype=dtype, causal=True, q_offset=first, k_offset=first
    )
    problem.check_output(subject)


# --- slopes ---------------------------------------------------------------------------------------


@pytest.mark.requirement("NUM-3", "NUM-1")
@DECAY
@DTYPE
def test_slopes_keep_the_bits_of_the_accumulation_dtype(method, dtype, subject):
    """0.3 and the like, some way off, where a rounded slope moves the lse."""
    slopes = tuple(np.array([0.3, 0.1, 0.77, 1 / 3]).astype(wide(dtype)).astype(float).tolist())
    problem = make(subject, 5, 6, method=method, dtype=dtype, q_offset=13, slopes=slopes)
    problem = problem.but(method=Window(2000) if method == "window" else Exact())
    problem.check(subject)
    problem.but(plain_slopes=True).check_output(subject)


@pytest.mark.requirement("NUM-3", "NUM-5", "ATT-10")
@DECAY
@DTYPE
@pytest.mark.parametrize("slope", [1e4, 1e27, 1e30, 1e38, 1e300])
@pytest.mark.parametrize("first", [40, -40])
def test_a_huge_slope_takes_the_nearest_key(method, dtype, slope, first, subject):
    """Cross attention far from every key: log-weights overflow, the nearest key wins."""
    problem = make(
        subject, 3, 5, method=method, dtype=dtype, q_offset=first, slopes=(slope,) * 4,
        plain_slopes=True,
    ).but(**({"method": Window(100)} if method == "window" else {}))  # fmt: skip
    got = problem.output(subject)
    nearest = problem.v[:, :, 4:] if first > 0 else problem.v[:, :, :1]
    expected = np.broadcast_to(np.repeat(nearest, 2, axis=1), got.out.shape)
    assert_equal_to_rounding(subject.array(got.out, dtype), subject.array(expected, dtype), units=2)
    assert not np.any(np.isnan(got.lse))
    if subject.differentiates and slope < 1e38:
        for x in problem.gradients(subject):
            assert x is None or not np.any(np.isnan(x))


# --- hidden keys ----------------------------------------------------------------------------------


def _hidden(subject, where, method, n, dtype):
    """Return a problem in which the last key is hidden from all queries but the last few."""
    options = {
        "causality": {"causal": True},
        "segment": {"segment_ids": np.array([[0] * (n - 1) + [1]], np.int32)},
        "padding": {"segment_ids": np.array([[0] * (n - 1) + [-1]], np.int32)},
        "window": {"method": Window(3)},
        "block": {
            "method": PositionalLSH(sampler=None, family=FixedBlocks((4.0,) * 4)),
            "slopes": None,
        },
    }[where]
    problem = make(subject, n, method=method, dtype=dtype, batch=1, dims=(8, 8), scale=1.0)
    return problem.but(**options)


HIDING = [
    (where, method)
    for where, methods in (
        ("causality", METHODS), ("segment", METHODS), ("padding", METHODS),
        ("window", ["window"]), ("block", ["lsh"]),
    )
    for method in methods
]  # fmt: skip


@pytest.mark.requirement("NUM-4", "NUM-5", "NUM-8")
@pytest.mark.parametrize(("where", "method"), HIDING)
@pytest.mark.parametrize("n", [12, 77])
@DTYPE
@pytest.mark.parametrize("height", [128.0, 8192.0])
def test_a_hidden_key_empties_no_row(where, method, n, dtype, height, subject):
    """Its logit is far above those of the visible keys."""
    problem = _hidden(subject, where, method, n, dtype)
    q, k = np.ones_like(problem.q), round_to(problem.k / 8, dtype)
    k[:, :, -1] = height / 8
    problem.but(q=q, k=k).check(subject)


@pytest.mark.requirement("NUM-4", "ATT-20", "ATT-12")
@pytest.mark.parametrize(("where", "method"), HIDING)
@pytest.mark.parametrize("size", ["product", "nan", "value"])
@DTYPE
def test_a_hidden_logit_may_overflow(where, method, size, dtype, subject):
    """To infinity, or to NaN; and a hidden value may be the largest number."""
    big = {"float16": 6e4, "float64": 1e200}.get(dtype, 1e30)
    problem = _hidden(subject, where, method, 40, dtype)
    # Queries that see the last key are left out: there the logits are not finite.
    first = {"causality": 39, "segment": 39, "padding": 39, "window": 36, "block": 36}[where]
    queries = slice(0, first)
    q, k, v = problem.q.copy(), problem.k.copy(), problem.v.copy()
    q[..., :2] = round_to(big, dtype)
    k[..., :2] = 0
    calm = problem.but(q=q, k=k).cut(queries)
    k, v = k.copy(), v.copy()
    if size == "value":
        v[:, :, -1] = LARGEST[dtype]
    else:
        k[:, :, -1, :2] = round_to(np.array([1, -1 if size == "nan" else 1]) * big, dtype)
    wild = problem.but(q=q, k=k, v=v).cut(queries)
    with np.errstate(all="ignore"):
        assert_same(subject, dtype, wild.output(subject), calm.output(subject))


@pytest.mark.requirement("NUM-4")
@METHOD
@DTYPE
def test_a_segment_far_above_another_changes_nothing(method, dtype, subject):
    """Two documents in one tile whose logits are 1e4 apart, forward and backward."""
    ids = np.array([[0, 1] * 20], np.int32)
    problem = make(
        subject, 40, method=method, dtype=dtype, batch=1, segment_ids=ids, scale=1.0, causal=True
    )
    q, k = problem.q.copy(), problem.k.copy()
    q[..., 0], k[..., 0] = 100, np.where(ids[0] == 1, 100, -100)
    problem.but(q=q, k=k).check(subject)


# --- range ----------------------------------------------------------------------------------------


@pytest.mark.requirement("NUM-5", "NUM-1")
@METHOD
@DTYPE
def test_logits_beyond_the_range_of_half_precision(method, dtype, subject):
    rng = np.random.default_rng(0)
    problem = make(subject, 40, method=method, dtype=dtype, dims=(64, 6), scale=1.0)
    q, k = (round_to(60 * rng.uniform(-1, 1, x.shape), dtype) for x in (problem.q, problem.k))
    problem = problem.but(q=q, k=k)
    assert np.max(problem.yardsticks[0].lse) > 1e4
    problem.check(subject)


@pytest.mark.requirement("NUM-5", "NUM-4")
@METHOD
@DTYPE
@pytest.mark.parametrize("height", [-1e5, -1e9, 1e5, 1e9])
def test_rows_of_equal_large_logits_are_means(method, dtype, height, subject):
    """Below what stands in for minus infinity in many a kernel, and above the usual."""
    problem = _flat(subject, 40, 40, method, dtype, causal=True, scale=1.0, dims=(1, 6))
    root = round_to(np.sqrt(abs(height)), dtype)
    q, k = np.full_like(problem.q, root), np.full_like(problem.k, np.sign(height) * root)
    problem.but(q=q, k=k).check_output(subject)


@pytest.mark.requirement("NUM-5")
@DECAY
@DTYPE
@pytest.mark.parametrize("first", [300, 3000, -3000])
def test_rows_whose_weights_all_underflow_are_accurate(method, dtype, first, subject):
    problem = make(
        subject, 5, 40, method=method, dtype=dtype, q_offset=first, slopes=(4.0, 1.0, 0.5, 0.0)
    ).but(method=Window(4000) if method == "window" else Exact())
    q, k, v = problem.arrays(subject)
    found = subject.attention(q, k, v, return_lse=True, **problem.keywords(subject))
    expected, plain = problem.yardsticks
    largest = float(np.max(np.abs(expected.lse)))
    subject.record(
        assert_attention_close(
            found.lse, expected.lse, plain.lse, like=q, dtype=wide(dtype), terms=1.0, name="lse"
        )
    )
    # A logit of magnitude L is rounded by eps L, and so are the weights, relative to their sum.
    units = 32 + 4 * largest * EPS[wide(dtype)] / EPS[dtype]
    assert_equal_to_rounding(found.out, subject.array(expected.out, dtype), units=units)


@pytest.mark.requirement("NUM-5", "NUM-1")
@METHOD
@DTYPE
def test_values_at_the_end_of_the_range_average_to_themselves(method, dtype, subject):
    """A sum of P v before it is divided would overflow."""
    problem = _flat(subject, 9, 40, method, dtype)
    v = np.full(problem.v.shape, round_to(LARGEST[dtype] * 0.98, dtype))
    q = 0 * problem.q
    got = problem.but(q=q, v=v).output(subject)
    expected = np.broadcast_to(v[:, :, :1], got.out.shape)
    assert_equal_to_rounding(subject.array(got.out, dtype), subject.array(expected, dtype))


@pytest.mark.requirement("NUM-5", "ATT-12")
@pytest.mark.parametrize("method", NAMES)
def test_a_constant_added_to_all_logits_changes_no_output(method, subject):
    problem = make(subject, 33, method=method, scale=1.0, causal=True)
    q, k = np.copy(problem.q), np.copy(problem.k)
    q[..., 0] = 32
    k[..., 0] = 0
    low = problem.but(q=q, k=k)
    k = k.copy()
    k[..., 0] = 64
    high = problem.but(q=q, k=k)
    low.check_output(subject)
    high.check_output(subject)
    assert np.all(high.output(subject).lse > low.output(subject).lse + 2000)


# --- weights of lsh -------------------------------------------------------------------------------


@pytest.mark.requirement("NUM-6", "HSH-4", "NUM-1")
@pytest.mark.needs("method:lsh")
@DTYPE
@pytest.mark.parametrize(
    "samples",
    [1, 2, 3, 5, 7, 16, 64, 130, 257, 300, pytest.param(2100, marks=pytest.mark.full)],
)
def test_the_weight_is_a_count_over_s(dtype, samples, subject):
    """One key, q = 0: the lse is ln(count / s), for every count that occurs."""
    family = RandomBinning((2.0, 11.0, 40.0, 3000.0))
    problem = make(
        subject, 60, 1, method="lsh", dtype=dtype, batch=1, k_offset=30, dims=(1, 1)
    ).but(method=PositionalLSH(samples, seed=3, family=family), slopes=None)
    problem = problem.but(q=0 * problem.q)
    problem.check_output(subject)
    got = problem.output(subject)
    seen = np.isfinite(got.lse)
    counts = np.exp(got.lse[seen].astype(np.float64)) * samples
    assert np.all(np.abs(counts - np.rint(counts)) < 0.01)
    exact = np.broadcast_to(np.repeat(problem.v, 2, axis=1), got.out.shape)[seen]
    assert_equal_to_rounding(
        subject.array(got.out[seen], dtype), subject.array(exact, dtype), units=8
    )


@pytest.mark.requirement("NUM-6", "NUM-1")
@pytest.mark.needs("method:lsh")
@DTYPE
@pytest.mark.parametrize("samples", [128, 256, 257, 2049, 4096])
def test_counts_of_any_number_of_samples_are_whole(dtype, samples, subject):
    """One block in every partition: the weight is 1, whatever its counter can hold."""
    problem = make(subject, 9, method="lsh", dtype=dtype, batch=1).but(
        method=PositionalLSH(samples, sampler=None, family=FixedBlocks(1e6)), slopes=None
    )
    problem.check_output(subject)


@pytest.mark.requirement("NUM-5", "NUM-1")
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
@DTYPE
def test_sums_of_ordinary_values_may_pass_the_input_dtype(method, dtype, subject):
    """A mean of 1000s is 1000; the sum of 512 of them is past float16."""
    problem = make(subject, 4, 512, method=method, dtype=dtype, batch=1, q_offset=508)
    problem = problem.but(q=0 * problem.q, v=np.full_like(problem.v, 1000.0))
    if method != "lsh":
        problem = problem.but(slopes=(0.0, 0.0, 0.03125, 0.0))
    problem.check_output(subject)


@pytest.mark.requirement("NUM-6", "NUM-10")
@pytest.mark.needs("method:lsh")
@DTYPE
@pytest.mark.parametrize("samples", [1, 3, 16, 300])
def test_partitions_are_pooled_not_averaged(dtype, samples, subject):
    problem = make(subject, 40, method="lsh", dtype=dtype, batch=1).but(
        method=PositionalLSH(samples, seed=4), slopes=(0.5, 0.125, 0.03125, 2.0)
    )
    problem.check(subject)


@pytest.mark.requirement("NUM-3", "ATT-10", "NUM-5")
@DECAY
def test_one_steep_head_does_not_disturb_the_others(method, subject):
    """A slope of 1e20 beside the usual ones: a product with a distance overflows in no head."""
    slopes = (1e20, *SLOPES[1:])
    problem = make(subject, 33, method=method, slopes=slopes, plain_slopes=True)
    problem.check_output(subject)
    usual = problem.but(slopes=SLOPES).output(subject)
    got = problem.output(subject)
    own, expected = (rows(x, slice(None)) for x in (got, usual))
    assert_same(
        subject,
        problem.dtype,
        (own.out[:, 1:], own.lse[:, 1:]),
        (expected.out[:, 1:], expected.lse[:, 1:]),
    )
