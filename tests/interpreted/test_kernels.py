"""The Triton kernels, by Triton's interpreter: the oracle, the laws, extremes, how work is cut."""

import itertools

import kernels_triton
import numpy as np
import plsh_numpy
import pytest
import test_numpy_backend as numpy_tests
import torch
from calls import FACTORS, pairwise
from interpreter import BACKEND, REAL, SMALL
from laws import NAMES, check_long_sums, inputs
from planted import call
from plsh_torch._band import Given as Output
from plsh_torch.cuda import _call, _plan, _tune
from test_numpy_backend import BandCall

import plsh
from plsh import testing

# What overflows on a device without a word makes NumPy warn.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) enc")


PLACED = {"backend": BACKEND}
"""The backend under test."""


def put_in_place(monkeypatch, backend=BACKEND):
    """Let calls of backend "numpy" run on the interpreter."""
    monkeypatch.setitem(PLACED, "backend", backend)
    for method in ("attend", "vjp"):
        ours = getattr(backend, method)
        monkeypatch.setattr(
            type(plsh_numpy.BACKEND), method, lambda self, *x, ours=ours, **kw: ours(*x, **kw)
        )


@pytest.fixture(autouse=True)
def _on_the_interpreter(monkeypatch):
    put_in_place(monkeypatch)


def results(q, k, v, method, grad_out, **keywords):
    """Return out, lse and the gradients that there are."""
    call = {"method": method, "backend": "numpy", **keywords}
    output = plsh.attention(q, k, v, return_lse=True, **call)
    grads = plsh.attention_vjp(q, k, v, output, grad_out, **call)
    return (*output, *(x for x in grads if x is not None))


# --- the oracle -----------------------------------------------------------------------------------

GRID = [
    BandCall(method, (3, 1), (n, n), dims, 1, causal, dtype=dtype, flatter=16.0, **option)
    for n, dims, method, causal, dtype, option in itertools.product(
        (1, 65, 200),
        ((16, 24), (80, 48)),
        ("exact", "lsh"),
        (False, True),
        ("float16", "float32"),
        ({}, {"segments": "one"}, {"offsets": "both"}),
    )
]
"""Lengths × head dims × weights × causal or not × dtypes × segments and offsets, Hkv:H = 1:3."""

QUICK = [x for x in GRID if x.lengths == (65, 65)][1::7]


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid_equals_oracle(case, monkeypatch):
    """Out, lse and all gradients, with the tiles that a device has."""
    put_in_place(monkeypatch, REAL)
    numpy_tests.check_band(case)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_some_of_the_grid_equals_oracle(case, monkeypatch):
    """A few of the grid in every run."""
    put_in_place(monkeypatch, REAL)
    numpy_tests.check_band(case)


FACTORS = {
    **FACTORS,
    "lengths": [(n, n) for n in (0, 1, 33, 64, 65)] + [(33, 70), (70, 33), (1, 70), (4, 0), (0, 4)],
    "heads": [(1, 1), (4, 2), (3, 1)],
    "dims": [(1, 1), (3, 20), (20, 3), (16, 16)],
    "samples": [1, 5, 70],
}
CROSSED = [BandCall(**row) for row in pairwise(FACTORS, 3)]

LONG = [
    BandCall("windows", (2, 1), (130, 130), (16, 8), 1, dtype="float32", flatter=9.0),
    BandCall("lsh", (2, 1), (100, 100), (8, 16), 1, True, dtype="float32", flatter=16.0),
    BandCall("set", (2, 1), (65, 50), (8, 8), 1, dtype="float16", flatter=16.0),
    BandCall("exact", (2, 1), (65, 50), (8, 8), 2, True, dtype="float32", offsets="batch"),
]
"""Several tiles on either side of the diagonal."""

MORE = [
    BandCall("exact", (2, 1), (65, 65), (8, 8), 2, dtype="float32", slope_form="rows", scale=-0.7),
    BandCall("lsh", (2, 1), (50, 50), (8, 8), 1, dtype="float32", segments="one", scale=0.1),
    BandCall("cuts", (2, 1), (40, 40), (8, 8), 2, True, dtype="float32", offsets="batch"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CROSSED, ids=str)
def test_crossed_options_equal_oracle(case):
    """Every pair of options."""
    numpy_tests.check_band(case)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_call_equals_oracle(case):
    numpy_tests.check_band(case)


MANY = BandCall("lsh", (2, 1), (65, 70), (8, 8), 1, dtype="float32", flatter=32.0, samples=70)
"""More samples than are counted at once."""

LARGE = [
    BandCall(method, (2, 1), (70, 70), (16, 16), 1, causal, dtype=dtype, std=std)
    for (method, causal), (dtype, std) in zip(
        (("exact", True), ("windows", False), ("lsh", True), ("blocks", False)),
        (("float16", 5.0), ("float32", 5.0), ("float32", 12.0), ("float64", 30.0)),
        strict=True,
    )
]
"""Logits with a standard deviation of 25 to 900."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [MANY, *MORE, *LARGE], ids=str)
def test_extremes_equal_oracle(case):
    numpy_tests.check_band(case)


# --- laws and extremes, as the NumPy backend is tested --------------------------------------------

QUICK_LAWS = [
    ("test_what_stands_in_padding_reaches_nothing",
     {"method": "exact", "causal": True, "fill": np.nan}),
    ("test_a_hidden_key_far_above_the_visible_ones_empties_no_row",
     {"case": "future", "n": 64, "dtype": "float32"}),
]  # fmt: skip
LAWS = [
    ("test_one_token_attends_to_itself", {}),
    *(("test_strides_are_honoured", {"view": view}) for view in
      ("heads last", "every second")),
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
          NAMES, (False, False, True, False, True), (np.nan, np.inf, np.nan, np.inf, -np.inf),
          strict=True)),
    *(("test_a_hidden_key_far_above_the_visible_ones_empties_no_row",
       {"case": case, "n": 64, "dtype": "float32"})
      for case in ("block", "window", "segment", "padding")),
    *(("test_a_huge_slope_is_self_attention", {"dtype": dtype, "slope": slope})
      for dtype, slope in (("float16", 1e4), ("float32", 1e300))),
    *(("test_slope_zero_is_plain_attention", {"method": m}) for m in ("exact", "window", "lsh")),
    *(("test_a_batch_row_does_not_depend_on_its_mates", {"method": m, "dtype": "float32"})
      for m in ("exact", "lsh")),
    *(("test_chunks_of_queries_equal_the_whole", {"method": m, "causal": c})
      for m, c in zip(NAMES, (True, False, True, False, True), strict=True)),
    *(("test_left_padding_changes_nothing", {"method": m, "causal": c})
      for m, c in zip(NAMES, (False, True, False, True, False), strict=True)),
    ("test_rows_that_see_far_keys_only_are_not_empty", {"dtype": "float32"}),
    ("test_hidden_products_past_the_range_do_no_harm", {}),
]  # fmt: skip


def named(laws):
    """Return the parameters of laws, by name."""
    return [
        pytest.param(*law, id="-".join([law[0].removeprefix("test_"), *map(str, law[1].values())]))
        for law in laws
    ]


@pytest.mark.parametrize(("name", "arguments"), named(QUICK_LAWS))
def test_law(name, arguments, monkeypatch):
    """U010, U035, U044: see the test of that name in test_numpy_backend."""
    call(getattr(numpy_tests, name), arguments, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), named(LAWS))
def test_every_law(name, arguments, monkeypatch):
    """U010, U035, U037, U094, U105, U114: see the test of that name in test_numpy_backend."""
    call(getattr(numpy_tests, name), arguments, monkeypatch)


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_work_cut_into_many_launches_is_the_same(method, monkeypatch):
    """U024: a head at a time, and few programs a launch; the same bits."""
    q, k, v = inputs(40, dtype="float32", batch=1, heads=2, kv_heads=1)
    grad_out = np.ones((*q.shape[:-1], v.shape[-1]), dtype="float32")
    whole = results(q, k, v, method, grad_out)
    monkeypatch.setattr(PLACED["backend"].module, "SCRATCH", 1)
    monkeypatch.setattr(PLACED["backend"].module, "GRID", 1)
    for a, b in zip(results(q, k, v, method, grad_out), whole, strict=True):
        testing.assert_identical(a, b)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_past_the_range_of_values_within_it(dtype):
    """NUM-5: values near the largest number; their mean is one of them."""
    q, k, v = inputs(40, dtype=dtype, batch=1, heads=2, kv_heads=1)
    size = np.finfo(dtype).max / 2
    big = np.full_like(v, size)
    for method in ("exact", "lsh"):
        got = plsh.attention(q, k, big, method=method, backend="numpy")
        np.testing.assert_allclose(got.astype(float), size, rtol=64 * np.finfo(dtype).eps)


def test_scales_that_leave_the_range_in_one_factor_only():
    """NUM-5: q·k or scale·q alone would overflow; the logits are small."""
    q, k, v = inputs(40, dtype="float32", batch=1, heads=2, kv_heads=1)
    want = plsh.attention(q, k, v, scale=1.0, backend="numpy")
    for by_q, by_k, scale in ((1e30, 1e-20, 1e-10), (1e-18, 1e-18, 1e36), (1e20, 1e17, 1e-37)):
        got = plsh.attention(
            q * np.float32(by_q), k * np.float32(by_k), v, scale=scale, backend="numpy"
        )
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("method", [pytest.param("exact", marks=pytest.mark.slow), "lsh"])
def test_a_query_without_a_key_beside_others_reaches_nothing(method):
    """U009: in a tile with live rows; whatever its cotangents hold."""
    q, k, v = inputs(40, dtype="float32", batch=1, heads=2, kv_heads=1)
    ids = np.where(np.arange(40) % 7 == 3, 5, 0)[None]
    grad_out = np.ones((*q.shape[:3], v.shape[3]), dtype="float32")
    filled = np.where(ids[:, None, :, None] == 5, np.float32(np.nan), grad_out)
    call = {"method": method, "segment_ids": (ids, np.zeros_like(ids))}
    want = results(q, k, v, grad_out=grad_out, **call)
    for a, b in zip(results(q, k, v, grad_out=filled, **call), want, strict=True):
        testing.assert_identical(a, b)


def test_ids_beyond_32_bits_differ():
    """Two ids that agree in their low 32 bits are two segments."""
    q, k, v = inputs(40, dtype="float32", batch=1, heads=2, kv_heads=1)
    small = np.repeat([[5, 6]], 20, axis=1)
    large = np.where(small == 6, 5 + (1 << 32), small)
    a, b = (
        plsh.attention(q, k, v, method="exact", segment_ids=ids, backend="numpy")
        for ids in (small, large)
    )
    testing.assert_identical(a, b)


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
    given = {"q": q, "k": k, "v": v, "grad_out": grad_out}
    for name in ("q", "grad_out"):
        got = results(**{**given, name: spread(given[name])}, method="exact")
        for a, b in zip(got, want, strict=True):
            testing.assert_identical(a, b)


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_wild_offsets_on_the_device_do_no_harm(method):
    """Their values are not known to the host: far out of range, rows see nothing, or what is near.

    Nor does a call read them: operands on the device, of any integer dtype, give the same bits.
    """
    tokens = inputs(40, dtype="float32")
    weight = plsh.weights.DecayWeight((9,) * 4)
    slopes = (0.5,) * 4
    if method == "lsh":
        weight = plsh.weights.StepWeight(plsh.RandomBinning(5.0), 3, "iid", 0, (0, 1, 2, 3))
        slopes = None
    static = plsh.backend.Static(method, weight, False, 0.3, 4, 2, 8, 6, "float32", "torch")
    for first in (2**62, -(2**62)):
        offsets = (torch.tensor([first, 3]), torch.tensor([0, 3]))
        operands = plsh.backend.Operands(slopes, *offsets, None, None)
        got = PLACED["backend"].attend(*tokens, plsh.backend.Request(static, operands))
        # Under lsh a position below 0 counts as 0, which is near.
        near = method == "lsh" and first < 0
        assert (np.isfinite(got.lse[0]) if near else np.isneginf(got.lse[0])).all()
        operands = plsh.backend.Operands(slopes, 3, 3, None, None)
        want = PLACED["backend"].attend(*tokens, plsh.backend.Request(static, operands))
        testing.assert_identical(got.out[1], want.out[1])


def test_sums_over_thousands_of_tokens_round_as_dense_ones():
    """NUM-7: tile by tile; one sum through all of them is ten times off."""
    check_long_sums()


def test_the_tiles_of_the_table_are_sound():
    """A diagonal is whole tiles, and products have an inner size of 16 or more."""
    for tile in [*_plan.every_tile(), SMALL]:
        assert tile.rows % tile.columns == 0
        assert tile.columns >= 16
        assert tile.warps in (4, 8, 16)


# --- what is launched -----------------------------------------------------------------------------


POINTED = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
"""Dtypes as Triton names them."""


class Recorder:
    """In the place of a kernel: keeps what it is launched with, and runs nothing."""

    def __init__(self, kernel, launches):
        self.fn, self.name, self.launches = kernel.fn, kernel.fn.__name__, launches

    def __getitem__(self, grid):
        return lambda **given: self.launches.append((self.name, grid, given))


@pytest.fixture
def launches(monkeypatch):
    """Kernels that are not run, but noted."""
    found = []
    for name, kernel in _call.KERNELS.items():
        monkeypatch.setitem(_call.KERNELS, name, Recorder(kernel, found))
    return found


def request(step, causal, segments, heads=(4, 2), dims=(64, 64)):
    """Return operands for `InterpretedBackend.call`, with 16 samples."""
    weight, slopes = plsh.weights.DecayWeight((9, 30, 20, 40)), (0.5, 0.1, 0.2, 0.05)
    if step:
        family = plsh.RandomBinning((5.0, 20.0, 10.0, 40.0))
        weight, slopes = plsh.weights.StepWeight(family, 16, "iid", 0, (0, 1, 2, 3)), None
    ids = torch.zeros(1, 40, dtype=torch.int64)
    method = "lsh" if step else "exact"
    static = plsh.backend.Static(method, weight, causal, 0.3, *heads, *dims, "float32", "torch")
    operands = plsh.backend.Operands(slopes, 0, 0, (ids, ids) if segments else None, None)
    return plsh.backend.Request(static, operands)


def record(dtype, step, causal, segments):
    """Launch a forward and a backward pass of which nothing is run."""
    q, k, v = (torch.zeros(1, heads, 40, 64, dtype=getattr(torch, dtype)) for heads in (4, 2, 2))
    of_rows = torch.zeros(1, 4, 40)
    made = request(step, causal, segments)
    REAL.call((q, k, v), made).forward()
    REAL.call((q, k, v), made).backward(Output(q, of_rows, q, of_rows), (True,) * 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("step", [False, True])
def test_what_is_compiled_offline_is_what_is_launched(dtype, step, launches):
    """The table of `tools/compile_all.py` is of these constants, types, warps and stages."""
    for causal, segments in itertools.product((False, True), repeat=2):
        launches.clear()
        record(dtype, step, causal, segments)
        seen = set()
        for name, _, given in launches:
            if name not in ("forward", "by_query", "by_key"):
                continue
            instance = kernels_triton.Instance(name, dtype, step, causal, segments, 64)
            tile = _plan.tile_for(name, dtype, step, segments, 64)
            types, values, _ = kernels_triton.arguments(instance, tile)
            assert (given.pop("num_warps"), given.pop("num_stages")) == tile[2:]
            assert list(given) == list(types)
            for i, (argument, value) in enumerate(given.items()):
                if types[argument] == "constexpr":
                    assert value == values[i,], argument
                elif isinstance(value, torch.Tensor):
                    assert types[argument] == f"*{POINTED[value.dtype]}", argument
                else:
                    assert types[argument] in ("i32", "i64"), argument
            seen.add(name)
        assert seen == {"forward", "by_query", "by_key"}


@pytest.mark.parametrize("step", [False, True])
def test_heads_are_launched_by_descending_bandwidth(step, launches):
    """Long bands first, so that none is left over at the end; key heads by their widest member."""
    record("float16", step, True, False)
    orders = {name: given["order"].tolist() for name, _, given in launches if "order" in given}
    assert orders["forward"] == orders["by_query"] == [3, 1, 2, 0]
    assert orders["by_key"] == [1, 0]


def test_tiles_are_timed_only_where_it_is_asked_for(monkeypatch, launches):
    """The fastest of those that may serve the call, found once; the frozen one otherwise."""
    timed, rows = [], {16: 3.0, 32: 1.0, 64: 2.0, 128: 4.0}

    def milliseconds(run):
        run()
        timed.append(launches[-1][2]["ROWS"])
        return rows[timed[-1]]

    monkeypatch.setattr(_tune, "milliseconds", milliseconds)
    monkeypatch.setattr(_tune, "CHOSEN", {})
    record("float32", False, True, False)
    assert not timed
    assert launches[0][2]["ROWS"] == _plan.tile_for("forward", "float32", False, False, 64).rows
    monkeypatch.setenv("PLSH_TORCH_AUTOTUNE", "1")
    record("float32", False, True, False)
    assert {16, 32, 64} <= set(timed)
    tries = len(timed)
    launches.clear()
    record("float32", False, True, False)
    assert len(timed) == tries
    assert {x["ROWS"] for name, _, x in launches if name != "row_terms"} == {32}
