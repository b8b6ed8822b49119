"""The CUDA kernels, run by the emulator: the oracle, the laws, extremes, how the work is cut.

The emulator fails a launch that races, reads what was not written, leaves an array, or whose
threads part ways at a barrier, so every call here is a check of that too. No GPU is needed.
"""

import itertools
import tracemalloc

import numpy as np
import pytest
import test_numpy_backend as numpy_tests
from calls import FACTORS, pairwise
from cuda_emulator import EmulatedBackend
from emulated import BACKEND, CudaCall, put_in_place, results
from laws import NAMES, check_long_sums, inputs
from planted import call
from plsh_cupy import _plan

import plsh
import plsh.weights
from plsh import testing
from plsh.backend import Operands, Request, Static
from plsh.compat import numpy_dtype


@pytest.fixture(autouse=True)
def _on_the_emulator(monkeypatch):
    put_in_place(monkeypatch)


# --- the oracle -----------------------------------------------------------------------------------

FACTORS = {
    **FACTORS,
    "lengths": [(n, n) for n in (0, 1, 33, 64, 65, 193)]
    + [(33, 129), (129, 33), (1, 193), (4, 0), (0, 4)],
    "heads": [(1, 1), (4, 2), (3, 1)],
    "dims": [(1, 1), (3, 64), (33, 5), (16, 16), (64, 31)],
    "batch": [None, 0, 1, 2],
    "samples": [1, 5, 40],
    "integers": ["int8", "int16", "int32", "int64"],
}
CROSSED = [CudaCall(**row) for row in pairwise(FACTORS, 5)]

LONG = [
    CudaCall("exact", (2, 1), (193, 193), (40, 33), 1, causal=True, dtype="float32", flatter=9.0),
    CudaCall("windows", (4, 2), (257, 257), (16, 16), 1, dtype="float32", flatter=9.0),
    CudaCall("tol", (2, 2), (193, 193), (16, 16), 1, dtype="bfloat16", flatter=32.0),
    CudaCall("lsh", (3, 1), (257, 257), (16, 16), 1, True, dtype="float16", flatter=16.0),
    CudaCall("lsh", (2, 1), (257, 257), (16, 8), 1, flatter=64.0, dtype="float32", samples=70),
    CudaCall("set", (2, 1), (257, 193), (8, 16), 1, flatter=32.0, dtype="float32", samples=33),
    CudaCall("cuts", (2, 1), (193, 257), (16, 16), 1, True, offsets="far", dtype="float32"),
    CudaCall("power", (2, 1), (193, 193), (16, 16), 2, offsets="batch", samples=7),
    CudaCall("exact", (2, 1), (65, 65), (3, 4), 2, dtype="float32", scale=1.5),
    CudaCall("lsh", (2, 1), (65, 65), (2, 4), 2, True, scale=-2.0, flatter=8.0),
    CudaCall("lsh", (2, 1), (193, 193), (16, 16), 1, segments="one", dtype="float32", flatter=99.0),
]
"""Several tiles on either side of the diagonal, and words of samples."""

WIDE = [
    CudaCall("exact", (2, 1), (65, 65), (65, 64), 1, True, dtype="float32", flatter=4.0),
    CudaCall("lsh", (2, 1), (65, 65), (128, 100), 1, dtype="float32", flatter=4.0),
    CudaCall("exact", (1, 1), (65, 65), (129, 256), 1, dtype="float32", flatter=4.0),
    CudaCall("lsh", (1, 1), (65, 65), (256, 130), 1, dtype="float32", flatter=4.0),
    CudaCall("exact", (1, 1), (33, 65), (200, 200), 1, flatter=4.0, segments="pair"),
    CudaCall("lsh", (1, 1), (65, 33), (100, 128), 1, flatter=4.0),
]
"""The other bounds of the head dims."""

LARGE = [
    CudaCall(method, (2, 1), (100, 100), (16, 16), 1, causal, dtype=dtype, std=std)
    for (method, causal), (dtype, std) in zip(
        (("exact", True), ("windows", False), ("lsh", True), ("blocks", False)),
        (("float16", 5.0), ("float32", 5.0), ("float32", 12.0), ("float64", 30.0)),
        strict=True,
    )
]
"""Logits with a standard deviation of 25 to 900."""


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in CROSSED[1::2]]


@pytest.mark.parametrize("case", [*CROSSED[::2], *SLOW, *LONG, *WIDE, *LARGE], ids=str)
def test_call_equals_oracle(case):
    """U008, U018, U024: out, lse and all gradients, with the measured tolerance."""
    numpy_tests.check_band(case)


def test_crossing_covers_every_pair():
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(getattr(c, a), getattr(c, b)) for c in CROSSED}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)


# --- laws and extremes, as the NumPy backend is tested --------------------------------------------

METHODS = ("exact", "lsh")
LAWS = [
    *(("test_strides_are_honoured", {"view": view}) for view in
      ("heads last", "negative", "every second")),
    *((f"test_{law}", {"method": method}) for method in NAMES for law in
      ("broadcast_inputs_with_stride_zero", "rows_that_see_no_key_have_no_gradient",
       "nan_in_a_visible_query_stays_in_its_row",
       "nan_in_a_visible_key_reaches_the_rows_that_see_it")),
    *((f"test_{law}", {"method": method, "causal": causal})
      for method in NAMES for causal in (False, True)
      for law in ("merged_shards_of_keys_equal_the_whole", "packed_documents_equal_separate_calls")
    ),
    *(("test_what_stands_in_padding_reaches_nothing",
       {"method": method, "causal": causal, "fill": fill})
      for method, causal, fill in zip(
          NAMES, (True, False, True, False, True), (np.nan, np.inf) * 2 + (-np.inf,), strict=True)),
    *(("test_a_hidden_key_far_above_the_visible_ones_empties_no_row",
       {"case": case, "n": n, "dtype": dtype})
      for case, (n, dtype) in itertools.product(
          ("future", "window", "block", "segment", "padding"), ((64, "float32"), (77, "float64")))),
    *(("test_a_huge_slope_is_self_attention", {"dtype": dtype, "slope": slope})
      for dtype, slope in (("float16", 1e4), ("float32", 1e300))),
    *(("test_slope_zero_is_plain_attention", {"method": m}) for m in ("exact", "window", "lsh")),
    *(("test_a_batch_row_does_not_depend_on_its_mates", {"method": m, "dtype": "float32"})
      for m in METHODS),
    *(("test_chunks_of_queries_equal_the_whole", {"method": m, "causal": c})
      for m, c in zip(NAMES, (True, False, True, False, True), strict=True)),
    *(("test_results_are_fresh_and_writable", {"method": method}) for method in METHODS),
    *(("test_left_padding_changes_nothing", {"method": m, "causal": c})
      for m, c in zip(NAMES, (False, True, False, True, False), strict=True)),
    ("test_rows_that_see_far_keys_only_are_not_empty", {"dtype": "float32"}),
    ("test_rows_that_see_far_keys_only_are_not_empty", {"dtype": "float64"}),
    ("test_hidden_products_past_the_range_do_no_harm", {}),
    ("test_one_token_attends_to_itself", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments"),
    LAWS,
    ids=[
        "-".join([name.removeprefix("test_"), *(str(x) for x in arguments.values())])
        for name, arguments in LAWS
    ],
)
def test_law(name, arguments, monkeypatch):
    """U010, U035, U037, U044, U094, U105, U114: see the test of that name in test_numpy_backend."""
    call(getattr(numpy_tests, name), arguments, monkeypatch)


# --- what these kernels alone must get right ------------------------------------------------------


def test_the_order_of_threads_does_not_matter():
    """The same bits in any order in which the threads of a block take turns (U092)."""
    q, k, v = inputs(130, dtype="float32", batch=1)
    grad_out = np.random.default_rng(0).standard_normal((*q.shape[:-1], v.shape[-1]))
    for method in ("exact", plsh.PositionalLSH(20)):
        runs = [results(q, k, v, method, grad_out.astype("float32")) for _ in range(4)]
        for other in runs[1:]:
            for a, b in zip(other, runs[0], strict=True):
                testing.assert_identical(a, b)


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_work_split_over_several_grids_is_the_same(method, monkeypatch):
    """U024: a grid limit of 3 blocks; the same bits."""
    q, k, v = inputs(150, dtype="float32")
    grad_out = np.ones((*q.shape[:-1], v.shape[-1]), dtype="float32")
    whole = results(q, k, v, method, grad_out)
    small = EmulatedBackend(emulator=BACKEND.emulator, limits=_plan.Limits(227 * 1024, 3))
    put_in_place(monkeypatch, small)
    for a, b in zip(results(q, k, v, method, grad_out), whole, strict=True):
        testing.assert_identical(a, b)


def test_nan_in_a_visible_value_stays_near_and_in_its_batch_row():
    """It may reach the rows of the tiles that visit it, and no others."""
    q, k, v = inputs(300, dtype="float32")
    call = {"method": plsh.Window(5), "slopes": 0.1, "backend": "numpy"}
    want = plsh.attention(q, k, v, **call)
    v[0, 0, 150] = np.nan
    got = plsh.attention(q, k, v, **call)
    assert np.isnan(got[0, :2, 145:156]).all()
    far = np.abs(np.arange(300) - 150) > 128
    for a, b in ((got[1], want[1]), (got[0, 2:], want[0, 2:]), (got[:, :, far], want[:, :, far])):
        testing.assert_identical(a, b)


def test_smaller_tiles_on_a_device_of_less_shared_memory(monkeypatch):
    """Of 64 KiB, as compute capability 7.5 has: the backward tiles halve."""
    small = EmulatedBackend(emulator=BACKEND.emulator, limits=_plan.Limits(64 * 1024, 99999))
    put_in_place(monkeypatch, small)
    numpy_tests.check_band(
        CudaCall("lsh", (2, 1), (100, 100), (64, 64), 1, dtype="float32", flatter=9.0)
    )
    rows = {x.instance.kernel: x.instance.rows for x in BACKEND.emulator.launched[-4:]}
    assert rows["backward_keys"] == 32


def test_strides_beyond_four_gigabytes_are_64_bit():
    """U025: a sparse view whose last token lies 5 GiB after its first; untouched memory is free."""
    n, stride = 6, 1 << 30
    line = np.zeros((n - 1) * stride + 64, dtype=np.uint8)
    q, k, v = inputs(n, dtype="float32", batch=1, heads=1, kv_heads=1, value_dim=8)

    def spread(x):
        view = np.ndarray(x.shape, x.dtype, line, 0, (0, 0, stride, 4))
        view[...] = x
        return view

    grad_out = np.ones_like(v)
    want = results(q, k, v, "exact", grad_out)
    for name in ("q", "k", "v", "grad_out"):
        given = {"q": q, "k": k, "v": v, "grad_out": grad_out}
        given[name] = spread(given[name])
        got = results(given["q"], given["k"], given["v"], "exact", given["grad_out"])
        for a, b in zip(got, want, strict=True):
            testing.assert_identical(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_sums_past_the_range_of_values_within_it(method, dtype):
    """NUM-5: values near the largest number and near the least; their mean is one of them."""
    q, k, v = inputs(70, dtype=dtype)
    most = np.finfo(dtype).max
    for size in (most / 2, np.finfo(dtype).tiny * 64):
        big = np.full_like(v, size)
        got = plsh.attention(q, k, big, method=method, backend="numpy")
        np.testing.assert_allclose(got, size, rtol=64 * np.finfo(dtype).eps)


def test_scales_that_leave_the_range_in_one_factor_only():
    """NUM-5: q·k or scale·q alone would overflow; the logits are small."""
    q, k, v = inputs(40, dtype="float32")
    want = plsh.attention(q, k, v, scale=1.0, backend="numpy")
    for by_q, by_k, scale in ((1e30, 1e-20, 1e-10), (1e-18, 1e-18, 1e36), (1e20, 1e17, 1e-37)):
        got = plsh.attention(
            q * np.float32(by_q), k * np.float32(by_k), v, scale=scale, backend="numpy"
        )
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    want = plsh.attention(q, k, v, scale=0.0, backend="numpy")
    got = plsh.attention(q * np.float32(1e20), 0 * k, v, scale=1e30, backend="numpy")
    testing.assert_identical(got, want)


@pytest.mark.parametrize("integers", ["int8", "uint8", "int16", "uint16", "int32", "uint32",
                                      "int64", "uint64"])  # fmt: skip
def test_integers_of_every_dtype(integers):
    """Segment ids, which may be unsigned, in every dtype that they may have."""
    q, k, v = inputs(70, dtype="float32")
    largest = 200 if integers.startswith("u") else 120  # a sign bit of 8 is no sign
    ids = np.repeat([[0, 1, 3, largest, 1]], 14, axis=1).repeat(2, axis=0)
    want = plsh.attention(q, k, v, method="exact", segment_ids=ids, backend="numpy")
    if integers == "uint64":
        with pytest.raises(TypeError, match="uint64"):
            plsh.attention(q, k, v, segment_ids=ids.astype(integers), backend="numpy")
        return
    got = plsh.attention(q, k, v, method="exact", segment_ids=ids.astype(integers), backend="numpy")
    testing.assert_identical(got, want)


def test_a_query_without_a_key_beside_others_reaches_nothing():
    """U009: in a tile with live rows; whatever its cotangents hold."""
    q, k, v = inputs(70, dtype="float32")
    ids = np.where(np.arange(70) % 7 == 3, 5, 0)[None].repeat(2, axis=0)
    grad_out = np.ones((*q.shape[:3], v.shape[3]), dtype="float32")
    filled = np.where(ids[:, None, :, None] == 5, np.float32(np.nan), grad_out)
    for method in ("exact", "lsh"):
        call = {"method": method, "segment_ids": (ids, np.zeros_like(ids))}
        want = results(q, k, v, grad_out=grad_out, **call)
        for a, b in zip(results(q, k, v, grad_out=filled, **call), want, strict=True):
            testing.assert_identical(a, b)


def test_ids_beyond_32_bits_differ():
    """Two ids that agree in their low 32 bits are two segments."""
    q, k, v = inputs(40, dtype="float32")
    small = np.repeat([[5, 6]], 20, axis=1).repeat(2, axis=0)
    large = np.where(small == 6, 5 + (1 << 32), small)
    a, b = (
        plsh.attention(q, k, v, method="exact", segment_ids=ids, backend="numpy")
        for ids in (small, large)
    )
    testing.assert_identical(a, b)


@pytest.mark.parametrize("samples", [1, 16, 17, 32, 33, 100, 300])
def test_any_number_of_samples(samples):
    """A word holds 32 samples, the diagonal's labels 16, and a block has 256 threads."""
    n = 129 if samples <= 100 else 70
    numpy_tests.check_band(
        CudaCall("lsh", (2, 1), (n, n), (8, 8), 1, dtype="float32", samples=samples,
                 flatter=32.0)
    )  # fmt: skip


@pytest.mark.parametrize("method", ["exact", "lsh", "set"])
def test_keys_after_every_query_give_nothing(method):
    """Causal, several heads a key head, no tile visited: zeros, on either side."""
    q, k, v = inputs(70, 75, dtype="float32")
    given = {"method": method, "causal": True, "q_offset": 0, "k_offset": 100}
    out, lse, *grads = numpy_tests.everything(q, k, v, **given)
    assert not out.any()
    assert np.isneginf(lse).all()
    assert not any(x.any() for x in grads)


EDGES = [
    CudaCall("exact", (8, 1), (70, 70), (5, 3), 2, True, dtype="float32", slope_form="rows"),
    CudaCall("lsh", (8, 1), (70, 70), (5, 3), 1, dtype="float16"),
    CudaCall("exact", (2, 1), (1, 70), (256, 1), 1, dtype="float32"),
    CudaCall("lsh", (2, 1), (70, 1), (1, 255), 1, dtype="float16"),
    CudaCall("windows", (2, 1), (1, 0), (1, 1), 1, dtype="float32"),
    CudaCall("set1", (4, 1), (129, 129), (7, 9), 2, True, dtype="float32", offsets="batch"),
    CudaCall("cuts", (4, 1), (70, 70), (7, 9), 2, dtype="float32", offsets="batch",
             segments="pair"),
    CudaCall("exact", (4, 1), (100, 37), (17, 17), 2, True, dtype="float32", offsets="both",
             scale=-3.0),
]  # fmt: skip
"""Eight query heads a key head, one query, one dim, the largest dims, one head of partitions."""


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_an_edge_equals_oracle(case):
    numpy_tests.check_band(case)


def test_sums_over_thousands_of_tokens_round_as_dense_ones():
    """NUM-7: tile by tile; one sum through all of them is ten times off."""
    check_long_sums()


def test_products_over_hundreds_of_dims_round_as_dense_ones():
    """NUM-7: chunk by chunk; with one key the lse is its logit, and nothing hides its rounding."""
    shape = (1, 1, 1, 64, 1, 256, 1)
    q, k, v = testing.make_inputs(*shape, dtype="float32")[:3]
    q, k = np.abs(q), np.abs(k)  # no sum cancels
    call = {"slopes": (0.0,), "scale": 1.0, "q_offset": 0}
    expected = testing.oracle(q, k, v, **call)
    plain = testing.plain_attention(q, k, v, dtype="float32", **call)
    given = [x.astype("float32") for x in (q, k, v)]
    output = plsh.attention(*given, method="exact", return_lse=True, backend="numpy", **call)
    testing.assert_output_close(output, expected, plain, like=output.out)


SLOPE_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32")


@pytest.mark.parametrize("dtype", SLOPE_DTYPES)
def test_slopes_of_every_dtype(dtype):
    """An array of slopes on the device; the gradient has its dtype, if that is a float.

    NumPy slopes become numbers in the core, so this asks the backend itself, as it is asked with
    CuPy arrays.
    """
    q, k, v = inputs(70, dtype="float32")
    values = np.array([1, 0, 2, 1])
    given = testing.round_to(values, dtype) if "int" not in dtype else values
    slopes = given.astype(numpy_dtype(dtype))
    for shape in ((4,), (2, 4)):
        operand = np.broadcast_to(slopes, shape)
        weight = plsh.weights.DecayWeight((plsh.weights.UNLIMITED,) * 4)
        static = Static("exact", weight, True, 0.3, 4, 2, 8, 6, "float32", "numpy")
        request = Request(static, Operands(operand, 3, np.array([3, 3]), None, None))
        out = BACKEND.attend(q, k, v, request)
        grads = BACKEND.vjp(q, k, v, out, np.ones_like(out.out), None, request)
        call = {"method": "exact", "slopes": values, "causal": True, "scale": 0.3}
        want = plsh.attention(q, k, v, return_lse=True, backend="numpy", **call)
        testing.assert_identical(out.out, want.out)
        by = plsh.attention_vjp(
            q, k, v, want, np.ones_like(want.out), backend="numpy",
            **call | {"slopes": np.broadcast_to(values, shape)},
        )  # fmt: skip
        wanted = dtype if "float" in dtype else "float32"
        assert grads.slopes.dtype == numpy_dtype(wanted)
        assert grads.slopes.shape == shape
        np.testing.assert_allclose(
            grads.slopes.astype(float), by.slopes.astype(float), rtol=2.0**-7
        )
        testing.assert_identical(grads.q, by.q)


@pytest.mark.parametrize("method", ["exact", "lsh", "cuts"])
def test_wild_offsets_on_the_device_do_no_harm(method):
    """Their values are not known to the core: far out of range, rows see nothing, or what is near.

    The emulator would find an access outside of an array.
    """
    q, k, v = inputs(40, dtype="float32")
    weight = plsh.weights.DecayWeight((9,) * 4)
    if method == "lsh":
        weight = plsh.weights.StepWeight(plsh.RandomBinning(5.0), 3, "iid", 0, (0, 1, 2, 3))
    elif method == "cuts":
        weight = plsh.weights.StepWeight(plsh.IndependentCuts(5.0), 3, None, 0, (0, 1, 2, 3))
    static = Static(
        "exact" if method == "exact" else "lsh", weight, False, 0.3, 4, 2, 8, 6, "float32", "numpy"
    )
    for first in (2**62, -(2**62), 2**31, -(2**31)):
        offsets = (np.array([first, 0]), np.array([0, 0]))
        slopes = (0.5,) * 4 if method == "exact" else None
        request = Request(static, Operands(slopes, *offsets, None, None))
        out, lse = BACKEND.attend(q, k, v, request)
        BACKEND.vjp(q, k, v, plsh.AttentionOutput(out, lse), np.ones_like(out), None, request)
        # Under lsh a position below 0 counts as 0, which is near.
        near = method != "exact" and first < 0
        assert (np.isfinite(lse[0]) if near else np.isneginf(lse[0])).all()
        assert np.isfinite(lse[1]).all()


FAR_APART = {
    "rows": ((3, 2**29), (0, 2**29 - 7)),
    "queries before keys": ((0, 5), (2**29, 10**6)),
    "queries after keys": ((2**29, 10**6), (0, 5)),
    "padding": ((-(2**29), 10**6), (-3, 10**6)),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", FAR_APART)
def test_blocks_without_a_formula_need_tables_of_the_tokens_only(case, causal):
    """MEM-1: of rows far apart, and of keys far from queries; equal to the reference, by row."""
    q, k, v = inputs(70, 66, dtype="float64")
    family = plsh.IndependentCuts((4.0, 50.0, np.inf, np.inf))
    method = plsh.PositionalLSH(5, sampler=None, family=family)
    q_ids, k_ids = np.zeros((2, 70), dtype=int), np.zeros((2, 66), dtype=int)
    if case == "padding":
        q_ids[0], k_ids[0, :3] = -1, -1
    call = {"method": method, "causal": causal}
    grad_out = np.ones((*q.shape[:3], v.shape[3]))
    offsets = dict(zip(("q_offset", "k_offset"), FAR_APART[case], strict=True))
    results(q, k, v, grad_out=grad_out, q_offset=0, **call)  # what a first call loads is no table
    tracemalloc.start()
    got = results(q, k, v, grad_out=grad_out, segment_ids=(q_ids, k_ids), **offsets, **call)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    for row in (0, 1):
        own = [x[row : row + 1] for x in (q, k, v)]
        alone = {name: first[row] for name, first in offsets.items()} | call
        alone["segment_ids"] = (q_ids[row : row + 1], k_ids[row : row + 1])
        want = plsh.attention(*own, return_lse=True, backend="reference", **alone)
        for a, b in zip(got, want, strict=False):
            testing.assert_equal_to_rounding(a[row : row + 1], b)
        for a, b in zip(got, results(*own, grad_out=grad_out[:1], **alone), strict=True):
            testing.assert_identical(a[row : row + 1], b)


# --- for the measure of coverage ------------------------------------------------------------------

COVERING = [*CROSSED[::3], *LONG, *LARGE]
COVERING_LAWS = [
    lambda: test_sums_past_the_range_of_values_within_it("exact", "float32"),
    lambda: test_wild_offsets_on_the_device_do_no_harm("exact"),
    lambda: test_keys_after_every_query_give_nothing("lsh"),
    lambda: test_any_number_of_samples(300),
    lambda: numpy_tests.test_a_huge_slope_is_self_attention("float32", 1e300),
    *(lambda i=i: test_integers_of_every_dtype(i) for i in ("uint8", "uint16", "uint32")),
    *(lambda d=d: test_slopes_of_every_dtype(d) for d in SLOPE_DTYPES),
]
"""Calls that reach all of the kernels between them."""
