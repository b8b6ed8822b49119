"""Tensor cores: the instructions and products alone, the choice of kernels, and every fallback.

The emulator has a twin of each instruction: a copy in flight lands at the wait and is poison until
then, and rows of a matrix that meet in a bank of shared memory are a fault.
"""

import itertools

import numpy as np
import pytest
import test_numpy_backend as numpy_tests
from calls import pairwise
from cuda_emulator import LIMITS, EmulatedBackend, EmulatorFault
from emulated import BACKEND, CudaCall, put_in_place
from laws import METHODS, NAMES, inputs
from plsh_cupy import _call, _plan
from plsh_cupy._params import Strided
from plsh_cupy._plan import (
    Instance,
    fit_tensor_cores,
    instance_for,
    instances,
    scale_parts,
    split_heads,
)
from test_cupy_emulator import Probe
from test_cupy_kernels import FACTORS

import plsh
from plsh import testing
from plsh.compat import numpy_dtype

DTYPES = ("float16", "bfloat16")
PLAIN, TENSOR = set(_plan.TENSOR_KERNELS), set(_plan.TENSOR_KERNELS.values())
"""The kernels of a call without, and with tensor cores."""
BITS = {"float16": 11, "bfloat16": 8}


@pytest.fixture(autouse=True)
def _on_the_emulator(monkeypatch):
    put_in_place(monkeypatch)


def launched(work, *given, **call):
    """Return what a call returns, and the kernels that it launches."""
    before = len(BACKEND.emulator.launched)
    got = work(*given, **call)
    return got, [x.instance.kernel for x in BACKEND.emulator.launched[before:]]


# --- instructions and products alone, against plain loops -----------------------------------------


def numbers(shape, dtype, seed=0):
    """Return numbers of that dtype whose products and sums are exact in float32."""
    x = np.random.default_rng(seed).integers(-8, 9, shape) / 8
    return x.astype(numpy_dtype(dtype))


TILES = """
    Shared<Float> rows = arena.take<Float>(ROWS * PITCH);
    Shared<Float> columns = arena.take<Float>(COLUMNS * PITCH);
    const auto all = [](int) { return true; };
    copy_tile(rows, p.q, p.q.data, 0, p.dim, all);
    copy_tile(columns, p.v, p.v.data, 0, p.dim, all);
    commit_copies();
    wait_copies(0);
    __syncthreads();
"""
WRITE = """
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n)
            write<float>(p.out.data + 4 * (64 * row_of(m) + column_of(n)), sum[m][n]);
"""
BODIES = {
    "fragments": """
    const int l = i % 32, g = l / 4, t = l % 4;
    const auto bits = [](const View& x, int row, int column) {
        return (unsigned)read<Float>(x.at(0, 0, row) + 2 * column).bits;
    };
    const auto a = [&](int row, int column) { return bits(p.q, row, column); };
    const auto b = [&](int row, int column) { return bits(p.v, row, column); };
    const unsigned own[4] = {
        a(g, 2 * t) | a(g, 2 * t + 1) << 16, a(g + 8, 2 * t) | a(g + 8, 2 * t + 1) << 16,
        a(g, 2 * t + 8) | a(g, 2 * t + 9) << 16, a(g + 8, 2 * t + 8) | a(g + 8, 2 * t + 9) << 16};
    float s[4] = {1, 2, 3, 4};
    mma<Float>(s[0], s[1], s[2], s[3], own, b(2 * t, g) | b(2 * t + 1, g) << 16,
               b(2 * t + 8, g) | b(2 * t + 9, g) << 16);
    for (int j = 0; j < 4 && i < 32; ++j)
        write<float>(p.out.data + 4 * (8 * (g + j / 2 * 8) + 2 * t + j % 2), s[j]);
    """,
    "rows and columns": TILES + """
    Acc sum[M][N] = {};
    add_dots(sum, rows, columns, p.dim);
    """ + WRITE,
    "pairs and tokens": TILES + """
    Acc pairs[M][N], sum[M][SLOTS] = {};
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n)
            pairs[m][n] = (Acc)((row_of(m) * 7 + column_of(n) * 5) % 16 - 8) / 8;
    add_product(sum, pairs, columns, p.dim);
    """ + WRITE,
    "counts": """
    Shared<unsigned> own = arena.take<unsigned>(ROWS);
    Shared<unsigned> other = arena.take<unsigned>(COLUMNS);
    if (i < 64) {
        own[i] = read<unsigned>(p.q.at(0, 0, i));
        other[i] = read<unsigned>(p.v.at(0, 0, i));
    }
    __syncthreads();
    Acc sum[M][N] = {};
    add_shared(sum, own, other, (int)p.samples);
    """ + WRITE,
    "two numbers": """
    write<unsigned>(p.out.data + 4 * i, pack<Float>(read<float>(p.q.at(0, 0, 2 * i)),
                                                    read<float>(p.q.at(0, 0, 2 * i + 1))));
    """,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a body, or one with a fault, all compiled at once."""
    made = {}

    def run(name, dtype, *given, size=64 * 64, **integers):
        bodies = BODIES | {name: body for name, (body, _) in FAULTS.items()}
        if dtype not in made:
            cases = (f"case {n}: {{ {body} }} break;" for n, body in enumerate(bodies.values()))
            like = Instance("forward_tensor", dtype, True, 64, 64)
            body = f"switch (p.heads) {{ {' '.join(cases)} }}"
            made[dtype] = Probe(tmp_path_factory.mktemp(dtype), body, "tensor", like)
        integers["heads"] = list(bodies).index(name)
        return made[dtype].run(1, *given, size=size, shared_bytes=40_000, **integers)

    return run


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_instruction_multiplies_fragments(dtype, run):
    """Each lane's registers by the layout of PTX, filled and read one by one."""
    a, b = numbers((16, 16), dtype), numbers((16, 8), dtype, 1)
    got = run("fragments", dtype, ("q", a), ("v", b), size=128).view(np.float32)
    start = np.tile(np.array([[1, 2], [3, 4]]).repeat(8, axis=0), 4)
    want = a.astype(float) @ b.astype(float) + start
    np.testing.assert_array_equal(got.reshape(16, 8), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 40, 64])
def test_products_of_rows_and_columns(dtype, dim, run):
    """Copies of whole pieces, zeros up to a multiple of 16 dims, matrices loaded from there."""
    q, v = numbers((64, dim), dtype), numbers((64, dim), dtype, 1)
    got = run("rows and columns", dtype, ("q", q), ("v", v), dim=dim).view(np.float32)
    np.testing.assert_array_equal(got.reshape(64, 64), q.astype(float) @ v.astype(float).T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [24, 64])
def test_products_of_pairs_and_tokens(dtype, dim, run):
    """From the registers where sums are, and columns transposed as they are loaded."""
    q, v = numbers((64, dim), dtype), numbers((64, dim), dtype, 1)
    got = run("pairs and tokens", dtype, ("q", q), ("v", v), dim=dim).view(np.float32)
    row, column = np.indices((64, 64))
    want = ((row * 7 + column * 5) % 16 - 8) / 8 @ v.astype(float)
    np.testing.assert_array_equal(got.reshape(64, 64)[:, :dim], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 16, 17, 32])
def test_counts_are_products_of_zeros_and_ones(dtype, bits, run):
    words = np.random.default_rng(0).integers(0, 1 << bits, (2, 64, 1)).astype("u4")
    got = run("counts", dtype, ("q", words[0]), ("v", words[1]), samples=bits).view(np.float32)
    want = np.bitwise_count(words[0] & words[1][:, 0])
    np.testing.assert_array_equal(got.reshape(64, 64), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_numbers_are_rounded_into_one_register(dtype, run):
    """To nearest even, the first in the lower half; ties, subnormal numbers and infinity too."""
    x = np.random.default_rng(0).standard_normal(256) * 10.0 ** np.linspace(-9, 6, 256)
    x[:4] = 1 + 2.0 ** -BITS[dtype], 1 + 3 * 2.0 ** -BITS[dtype], np.inf, 0
    x = x.astype(np.float32)[:, None]
    got = run("two numbers", dtype, ("q", x), size=128)
    with np.errstate(over="ignore"):
        want = x.astype(numpy_dtype(dtype))
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16)[:, 0])


# --- what the emulator finds ----------------------------------------------------------------------

COPY = """
    Shared<Float> x = arena.take<Float>(THREADS * 8);
    const auto read_all = [&](int j) { write<Float>(p.out.data + 2 * i, x[8 * (j % THREADS)]); };
    (void)read_all;
    copy_later<Float>(x + 8 * i, p.q.data + 16 * i, true);
"""
ROWS_OF_EIGHT = """
    Shared<Float> x = arena.take<Float>(THREADS * 64);
    unsigned y[4];
    for (int e = i * 64; e < i * 64 + 64; ++e) x[e] = {0};
    __syncthreads();
"""
FAULTS = {
    "sound": (COPY + "commit_copies(); wait_copies(0); __syncthreads(); read_all(i + 1);", None),
    "sound to itself": (COPY + "commit_copies(); wait_copies(0); read_all(i);", None),
    "missing wait": (COPY + "commit_copies(); __syncthreads(); read_all(i + 1);",
                     "copy of thread .* is in flight"),
    "missing commit": (COPY + "wait_copies(0); read_all(i); commit_copies();", "in flight"),
    "wait for the group before": (COPY + "commit_copies(); wait_copies(1); read_all(i);",
                                  "in flight"),
    "missing barrier after the wait": (COPY + "commit_copies(); wait_copies(0); read_all(i + 1);",
                                       "race|in flight|never written"),
    "overwritten in flight": (COPY + "commit_copies(); x[8 * i] = {0}; wait_copies(0);",
                              "write .* in flight"),
    "copied twice": (COPY + "copy_later<Float>(x + 8 * i, p.q.data, true);", "in flight"),
    "end before the wait": (COPY + "commit_copies();", "copies that were not waited for"),
    "copy out of an array": ("copy_later<Float>(arena.take<Float>(8), p.q.data - 16, true);",
                             "outside of every array"),
    "copy from between pieces": ("copy_later<Float>(arena.take<Float>(8), p.q.data + 8, true);",
                                 "misaligned read of 16 bytes"),
    "copy past its piece": ("copy_later<Float>(arena.take<Float>(4), p.q.data, true);",
                            "outside of its piece"),
    "words of two threads": ("Shared<Float> x = arena.take<Float>(256); x[i] = {0};", "race"),
    "matrix rows in one bank": (
        ROWS_OF_EIGHT + "load_matrices<Float>(y, x + i % 32 * 64);", "bank conflict"),
    "matrix row between pieces": (
        ROWS_OF_EIGHT + "load_transposed<Float>(y, x + (i % 32 * 72 + 4));", "misaligned matrix"),
    "matrices of some lanes": (
        ROWS_OF_EIGHT + "if (i % 32 < 16) load_matrices<Float>(y, x + i % 32 * 72);",
        "has ended|divergence"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, run):
    """A copy without its wait above all: it is poison until then."""
    message = FAULTS[name][1]
    given = ("q", numbers((128, 8), "float16"))
    if message is None:
        got = run(name, "float16", given, size=64).view(np.uint16)
        moved = 0 if "itself" in name else -1
        np.testing.assert_array_equal(got, np.roll(given[1].view(np.uint16)[:, 0], moved))
        return
    with pytest.raises(EmulatorFault, match=message):
        run(name, "float16", given)


# --- the choice -----------------------------------------------------------------------------------

ROW = Strided(1 << 20, (4096, 1024, 128, 2))
FIT = {"dtype": "float16", "dim": 64, "value_dim": 64, "samples": 16, "limits": LIMITS,
       "arrays": (ROW, ROW)}  # fmt: skip
UNFIT = {
    "odd D": {"dim": 63},
    "D between pieces": {"dim": 4},
    "odd Dv": {"value_dim": 63},
    "D above 128": {"dim": 136},
    "Dv above 128": {"value_dim": 136},
    "float32": {"dtype": "float32"},
    "float64": {"dtype": "float64"},
    "many samples": {"samples": 2049},
    "an old device": {"limits": LIMITS._replace(tensor=False)},
    "an address between pieces": {"arrays": (ROW, ROW._replace(address=(1 << 20) + 8))},
    "tokens between pieces": {"arrays": (ROW._replace(strides=(4096, 1024, 136, 2)), ROW)},
    "dims apart": {"arrays": (ROW._replace(strides=(4096, 1024, 128, 4)), ROW)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(8, 128), (64, 64), (128, 8)])
def test_whole_pieces_of_16_bits_fit(dtype, dims):
    assert fit_tensor_cores(**FIT | {"dtype": dtype, "dim": dims[0], "value_dim": dims[1]})
    assert fit_tensor_cores(**FIT | {"samples": 2048})
    backwards = ROW._replace(strides=(0, 1024, -128, 2))
    assert fit_tensor_cores(**FIT | {"arrays": (backwards,)})


@pytest.mark.parametrize("why", UNFIT)
def test_what_does_not_fit_is_known(why):
    assert not fit_tensor_cores(**FIT | UNFIT[why])


def test_the_instance_is_on_tensor_cores_where_there_is_one():
    for kernel, dim in itertools.product(_plan.KERNELS, (8, 64, 72, 128)):
        given = (kernel, "bfloat16", True, dim, 8, LIMITS)
        found = instance_for(*given, tensor=True)
        assert found.tensor == (kernel in _plan.TENSOR_KERNELS)
        assert found.dim >= dim or kernel == "backward_slopes"
        assert not instance_for(*given).tensor
    old = LIMITS._replace(tensor=False)
    assert [i for i in instances(LIMITS) if not i.tensor] == instances(old)
    for instance in instances(LIMITS):
        assert instance.threads == (2 * instance.rows if instance.tensor else 256)


NARROW = Instance("forward_tensor", "float16", False, 64, 64)
TALL = Instance("forward_tensor", "float16", False, 64, 128)


SPLITS = {
    "all wide": ((256, 2**31, 300), {}, [(TALL, (1, 2, 0))]),
    "some wide": ((255, 300, 8, 300), {}, [(TALL, (1, 3)), (NARROW, (0, 2))]),
    "all narrow": ((8, 9), {}, [(NARROW, (1, 0))]),
    "not one a processor": ((300,), {"batch": 1, "length": 128 * 131}, [(NARROW, (0,))]),
    "one a processor": ((300,), {"batch": 1, "length": 128 * 131 + 1}, [(TALL, (0,))]),
    "few tokens": ((2**31,), {"batch": 999, "length": 255}, [(NARROW, (0,))]),
    "no heads": ((), {}, []),
}


@pytest.mark.parametrize("case", SPLITS)
def test_wide_bands_have_tall_tiles_and_go_first(case):
    bandwidths, shape, want = SPLITS[case]
    shape = {"batch": 2, "length": 10_000, "limits": LIMITS, **shape}
    assert _plan.split_heads(NARROW, bandwidths, **shape) == want
    for kernel in _plan.KERNELS:
        other = Instance(kernel, "float16", False, 64, 64)
        order = tuple(h for _, heads in want for h in heads)
        assert _plan.split_heads(other, bandwidths, **shape) == [(other, order)][: len(want)]


@pytest.mark.parametrize("scale", [0.0, 0.125, 0.3, -0.7, 1.0, -1.0, 1.5, 1e30, 1e-30])
def test_the_scale_is_split_without_a_loss(scale):
    """A power of two goes into bfloat16 numbers, and nothing into float16 ones."""
    for dtype, tensor in itertools.product(("float16", "bfloat16", "float32"), (False, True)):
        factor, after = scale_parts(scale, dtype, tensor)
        assert factor * after == scale
        assert abs(factor) <= 1
        if tensor and dtype == "bfloat16":
            assert np.frexp(factor)[0] in (0.5, 1.0)
        if tensor and dtype == "float16":
            assert factor == 1


# --- the oracle -----------------------------------------------------------------------------------

CROSSED = [
    CudaCall(**row)
    for row in pairwise(
        {
            **FACTORS,
            "dtype": list(DTYPES),
            "dims": [(8, 16), (64, 24), (40, 128), (128, 64)],
            "lengths": [(0, 4), (1, 65), (64, 64), (193, 129), (33, 193)],
            "batch": [1, 2],
        },
        5,
    )
]
LONG = [
    CudaCall("exact", (2, 1), (193, 193), (64, 64), 1, True, dtype="float16", flatter=9.0),
    CudaCall("exact", (2, 1), (193, 193), (128, 128), 1, dtype="bfloat16", flatter=9.0),
    CudaCall("lsh", (2, 1), (129, 129), (72, 128), 1, dtype="float16", flatter=9.0, samples=33),
    CudaCall("windows", (4, 2), (257, 257), (16, 8), 1, dtype="float16", flatter=9.0),
    CudaCall("tol", (2, 2), (193, 193), (16, 16), 1, dtype="bfloat16", flatter=32.0),
    CudaCall("lsh", (3, 1), (257, 257), (16, 16), 1, True, dtype="float16", flatter=16.0),
    CudaCall("lsh", (2, 1), (193, 193), (40, 24), 1, dtype="bfloat16", flatter=64.0, samples=70),
    CudaCall("set", (2, 1), (257, 193), (8, 16), 1, dtype="float16", flatter=32.0, samples=33),
    CudaCall("cuts", (2, 1), (193, 257), (16, 16), 1, True, offsets="far", dtype="float16"),
    CudaCall("lsh", (2, 1), (193, 193), (16, 16), 1, segments="one", dtype="float16", flatter=99.0),
    CudaCall("exact", (2, 1), (193, 193), (16, 16), 1, segments="one", dtype="bfloat16"),
    CudaCall("exact", (2, 1), (100, 100), (16, 16), 1, True, dtype="float16", std=5.0),
    CudaCall("lsh", (2, 1), (100, 100), (16, 16), 1, dtype="bfloat16", std=5.0),
    CudaCall("exact", (2, 1), (65, 65), (16, 16), 1, dtype="bfloat16", scale=-0.7),
    CudaCall("exact", (2, 1), (65, 65), (16, 16), 1, dtype="float16", scale=1.5),
]
"""Several tiles on either side, words of samples, segments that hide whole tiles, large logits."""
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in CROSSED[::2]]


@pytest.mark.parametrize("case", [*CROSSED[1::2], *SLOW, *LONG], ids=str)
def test_call_equals_oracle(case):
    """U008, U018, U024: out, lse and all gradients, with the measured tolerance."""
    _, kernels = launched(numpy_tests.check_band, case)
    assert 0 in case.lengths or set(kernels) - {"backward_slopes"} == TENSOR


HEIGHTS = [
    CudaCall("exact", (2, 1), (193, 193), (64, 64), 1, True, dtype="float16", flatter=9.0),
    CudaCall("windows", (4, 2), (257, 257), (16, 8), 1, dtype="bfloat16", flatter=9.0),
    CudaCall("lsh", (3, 1), (257, 257), (16, 16), 1, True, dtype="float16", flatter=16.0),
    CudaCall("lsh", (2, 1), (193, 300), (16, 16), 1, segments="one", dtype="bfloat16",
             samples=70, flatter=64.0),
    CudaCall("set", (2, 1), (257, 193), (8, 16), 1, dtype="float16", flatter=32.0, samples=16),
    CudaCall("cuts", (2, 1), (193, 257), (16, 16), 1, True, offsets="far", dtype="float16"),
]  # fmt: skip
"""Tiles on either side of the diagonal, words of samples, segments; all heads wide, or some."""


@pytest.mark.parametrize("case", HEIGHTS, ids=str)
def test_tall_tiles_equal_oracle(case, monkeypatch):
    """The diagonal is two visited tiles; heads of one call have tiles of both heights."""
    heights = []

    def split(*given, limits, **shape):
        parts = split_heads(*given, limits=limits._replace(processors=1), **shape)
        heights.append([instance.rows for instance, _ in parts])
        return parts

    monkeypatch.setattr(_plan, "TALL_FROM", 60)
    monkeypatch.setattr(_call, "split_heads", split)
    numpy_tests.check_band(case)
    assert heights[0] == ([128, 64] if case.method == "windows" else [128])


FALLBACKS = {
    "odd D": CudaCall("exact", (2, 1), (70, 70), (15, 16), 1, dtype="float16"),
    "odd Dv": CudaCall("lsh", (2, 1), (70, 70), (16, 15), 1, True, dtype="bfloat16"),
    "D above 128": CudaCall("lsh", (1, 1), (70, 70), (136, 8), 1, dtype="float16"),
    "float32": CudaCall("exact", (2, 1), (70, 70), (16, 16), 1, dtype="float32"),
}


@pytest.mark.parametrize("why", FALLBACKS)
def test_a_fallback_equals_oracle(why):
    """Other dims and dtypes."""
    _, kernels = launched(numpy_tests.check_band, FALLBACKS[why])
    assert set(kernels) >= PLAIN
    assert not TENSOR & set(kernels)


def test_an_old_device_falls_back(monkeypatch):
    """Of compute capability 7.5."""
    limits = _plan.Limits(64 * 1024, 2**31 - 1, tensor=False)
    put_in_place(monkeypatch, EmulatedBackend(emulator=BACKEND.emulator, limits=limits))
    case = CudaCall("exact", (2, 1), (70, 70), (16, 16), 1, dtype="float16")
    _, kernels = launched(numpy_tests.check_band, case)
    assert set(kernels) >= PLAIN
    assert not TENSOR & set(kernels)


def arrays(n, dtype, seed=0, **shape):
    """Return q, k and v of that dtype, whose tokens are whole pieces."""
    shape = {"head_dim": 24, "value_dim": 16, **shape}
    return [x.astype(numpy_dtype(dtype)) for x in inputs(n, seed=seed, **shape)]


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_arrays_between_pieces_fall_back(method):
    """Views that 16-byte copies can't take give what the others do, to rounding."""
    q, k, v = arrays(100, "float16")
    call = {"method": METHODS[method], "causal": True, "backend": "numpy"}
    want = plsh.attention(q, k, v, **call)
    apart = np.zeros((*q.shape, 2), q.dtype)[..., 0]
    moved = np.zeros(k.size + 4, k.dtype)[4:].reshape(k.shape)
    wide = np.zeros((*v.shape[:3], v.shape[3] + 4), v.dtype)[..., :-4]
    for index, view in enumerate((apart, moved, wide)):
        given = [q, k, v]
        view[...] = given[index]
        given[index] = view
        got, kernels = launched(plsh.attention, *given, **call)
        assert kernels == ["forward"]
        testing.assert_equal_to_rounding(got, want)
    assert launched(plsh.attention, q, k, v, **call)[1] == ["forward_tensor"]


# --- laws and extremes ----------------------------------------------------------------------------


def both(q, k, v, **call):
    """Return out and lse."""
    return plsh.attention(q, k, v, return_lse=True, backend="numpy", **call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", NAMES)
def test_what_stands_in_padding_reaches_nothing(method, dtype):
    """U010: of queries, keys and values, in a tile with live ones."""
    q, k, v = arrays(100, dtype)
    ids = np.where(np.arange(100) % 9 == 4, -1, 0)[None].repeat(2, axis=0)
    call = {"method": METHODS[method], "segment_ids": ids, "causal": method == "lsh"}
    want = both(q, k, v, **call)
    for x in (q, k, v):
        x[:, :, ids[0] < 0] = np.nan
    for a, b in zip(both(q, k, v, **call), want, strict=True):
        testing.assert_identical(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hidden_key_far_above_the_visible_ones_empties_no_row(dtype):
    """U035: in the future, outside of the window, in another segment."""
    q, k, v = arrays(100, dtype)
    far = k.copy()
    far[:, :, 80] = q[:, :1, 10] * 500
    for call in ({"causal": True}, {"method": plsh.Window(5)},
                 {"segment_ids": np.arange(100)[None].repeat(2, axis=0) // 60}):  # fmt: skip
        call = {"method": "exact", **call}
        got, want = both(q, far, v, **call), both(q, k, v, **call)
        for a, b in zip(got, want, strict=True):
            testing.assert_identical(a[:, :, :60], b[:, :, :60])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_a_call_is_the_same_in_any_order_and_company(method, dtype):
    """U092: any order of threads, grids of 3 blocks, a batch row alone; the same bits."""
    q, k, v = arrays(150, dtype)
    call = {"method": METHODS[method]}
    want = both(q, k, v, **call)
    for a, b in zip(both(q, k, v, **call), want, strict=True):
        testing.assert_identical(a, b)
    for a, b in zip(both(q[1:], k[1:], v[1:], **call), want, strict=True):
        testing.assert_identical(a, b[1:])
    small = EmulatedBackend(emulator=BACKEND.emulator, limits=LIMITS._replace(grid=3))
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(patch, small)
        for a, b in zip(both(q, k, v, **call), want, strict=True):
            testing.assert_identical(a, b)


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_sums_past_the_range_of_values_within_it(method):
    """NUM-5: values near the largest number and near the least; their mean is one of them."""
    q, k, v = arrays(100, "bfloat16")
    for size in (1.5e38, 1e-36):
        big = np.full_like(v, size)
        got = plsh.attention(q, k, big, method=METHODS[method], backend="numpy")
        np.testing.assert_allclose(got.astype(float), float(big.flat[0]), rtol=2.0**-7)


def test_scales_that_leave_the_range_in_one_factor_only():
    """NUM-5: q·k alone would overflow; the logits are small."""
    q, k, v = arrays(70, "bfloat16")
    two = np.asarray(2, q.dtype)
    want = plsh.attention(q, k, v, scale=0.5, backend="numpy")
    for by_q, by_k, scale in ((66, 63, 2.0**-130), (-60, -60, 2.0**119)):
        got = plsh.attention(q * two**by_q, k * two**by_k, v, scale=scale, backend="numpy")
        testing.assert_equal_to_rounding(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("samples", [1, 16, 300])
def test_slope_zero_is_plain_attention(samples, dtype):
    """Every count is the number of samples, however many: whole words, and more than a block."""
    q, k, v = arrays(70, dtype, heads=2, kv_heads=1)
    call = {"slopes": (0.0, 0.0)}
    want = both(q, k, v, method="exact", **call)
    got = both(q, k, v, method=plsh.PositionalLSH(samples), **call)
    testing.assert_equal_to_rounding(got.out, want.out)
    testing.assert_equal_to_rounding(got.lse, want.lse)


def test_strides_of_either_sign_are_taken():
    """Heads last, tokens backwards, rows shared: copies go by the strides."""
    q, k, v = arrays(100, "float16")
    want = both(q, k, v, method="exact")
    last = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    back = [np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1] for x in (q, k, v)]
    shared = [np.broadcast_to(x[:1], x.shape) for x in (q, k, v)]
    for given in (last, back, shared):
        got, kernels = launched(both, *given, method="exact")
        assert kernels == ["forward_tensor"]
        for a, b in zip(got, want, strict=True):
            testing.assert_identical(a[:1], b[:1])


# --- the gradients --------------------------------------------------------------------------------


def gradients(q, k, v, grad_out, **call):
    """Return the gradients by q, k and v, and the kernels that made them."""
    output = both(q, k, v, **call)
    call |= {"backend": "numpy"}
    grads, kernels = launched(plsh.attention_vjp, q, k, v, output, grad_out, None, **call)
    return grads[:3], set(kernels) - {"backward_slopes"}


def with_gradient(n, dtype, **shape):
    """Return q, k, v and the gradient by the output, of two heads that share keys."""
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, **shape}
    return *arrays(n, dtype, **shape), arrays(n, dtype, 1, **shape | {"head_dim": 16})[0]


ON_TENSOR_CORES = TENSOR - {"forward_tensor"}


def test_a_gradient_between_pieces_falls_back():
    """A view of the gradient by the output that 16-byte copies can't take, alone."""
    q, k, v, grad_out = with_gradient(70, "float16")
    want, kernels = gradients(q, k, v, grad_out, method="exact")
    assert kernels == ON_TENSOR_CORES
    moved = np.zeros(grad_out.size + 4, grad_out.dtype)[4:].reshape(grad_out.shape)
    moved[...] = grad_out
    got, kernels = gradients(q, k, v, moved, method="exact")
    assert kernels == PLAIN - {"forward"}
    for a, b in zip(got, want, strict=True):
        testing.assert_equal_to_rounding(a, b)


SIZES = {"huge": (5, 9, 9), "tiny": (-5, -9, -10), "by a huge output": (5, 2, 12)}


@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(DTYPES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_gradients_keep_powers_of_two(method, size, dtype):
    """NUM-8: dS far beyond the range of float16 on either side; the results are within it.

    Every number of the calculation is that of the other call times a power of two, so results are,
    too, but for the digits that numbers below the normal ones lack.
    """
    of_qk, of_v, of_grad = SIZES[size]
    given = [np.round(16 * x.astype(float)) / 16 for x in with_gradient(70, dtype)]
    call = {"method": METHODS[method], "causal": True}
    kind = numpy_dtype(dtype)
    plain, _ = gradients(*(x.astype(kind) for x in given), scale=0.25, **call)
    powers = (of_qk, of_qk, of_v, of_grad)
    given = [(x * 2.0**power).astype(kind) for x, power in zip(given, powers, strict=True)]
    scaled, kernels = gradients(*given, scale=0.25 * 2.0 ** (-2 * of_qk), **call)
    assert kernels == ON_TENSOR_CORES
    by_qk = of_v + of_grad - of_qk
    for got, want, power in zip(scaled, plain, (by_qk, by_qk, of_grad), strict=True):
        times = 2.0**power
        least = 2.0**-24 * (1 + times) if dtype == "float16" else 0
        np.testing.assert_allclose(got.astype(float), want.astype(float) * times, 0, least)


@pytest.mark.parametrize(("method", "dtype"), [("exact", "float16"), ("lsh", "bfloat16")])
def test_padding_reaches_no_gradient(method, dtype):
    """U010: of queries, keys, values and the gradient by the output; its own are 0."""
    q, k, v, grad_out = with_gradient(70, dtype)
    ids = np.where(np.arange(70) % 9 == 4, -1, 0)[None]
    call = {"method": METHODS[method], "segment_ids": ids, "causal": method == "lsh"}
    want, _ = gradients(q, k, v, grad_out, **call)
    for x in (q, k, v, grad_out):
        x[:, :, ids[0] < 0] = np.nan
    for a, b in zip(gradients(q, k, v, grad_out, **call)[0], want, strict=True):
        testing.assert_identical(a, b)
        assert not b[:, :, ids[0] < 0].any()


def test_a_query_without_a_key_reaches_no_gradient():
    """U009: in a tile with live rows; whatever it and its cotangent hold."""
    q, k, v, grad_out = with_gradient(70, "bfloat16")
    ids = np.where(np.arange(70) % 7 == 3, 5, 0)[None]
    call = {"method": "exact", "segment_ids": (ids, np.zeros_like(ids))}
    want, _ = gradients(q, k, v, grad_out, **call)
    q[:, :, ids[0] == 5] = grad_out[:, :, ids[0] == 5] = np.nan
    for a, b in zip(gradients(q, k, v, grad_out, **call)[0], want, strict=True):
        testing.assert_identical(a, b)
    assert not want[0][:, :, ids[0] == 5].any()


def test_what_is_hidden_reaches_no_gradient():
    """Values of the future and gradients of the past, whose products overflow."""
    q, k, v, grad_out = with_gradient(70, "bfloat16")
    call = {"method": "exact", "causal": True}
    grad_out *= np.asarray(64, grad_out.dtype)
    want, _ = gradients(q, k, v, grad_out, **call)
    far = np.full_like(v[:, :, 50:], 1e37)
    got, _ = gradients(q, k, np.concatenate((v[:, :, :50], far), axis=2), grad_out, **call)
    testing.assert_identical(got[0][:, :, :50], want[0][:, :, :50])
    grad_out[:, :, :20] = 3e38
    got, _ = gradients(q, k, v, grad_out, **call)
    for a, b in zip(got[1:], want[1:], strict=True):
        testing.assert_identical(a[:, :, 20:], b[:, :, 20:])


@pytest.mark.parametrize(("method", "dtype"), [("exact", "float16"), ("lsh", "bfloat16")])
def test_gradients_are_the_same_in_any_order_and_company(method, dtype):
    """U092: grids of 3 blocks, a batch row alone; the same bits."""
    given = with_gradient(70, dtype, batch=2)
    call = {"method": METHODS[method]}
    want, _ = gradients(*given, **call)
    for a, b in zip(gradients(*(x[1:] for x in given), **call)[0], want, strict=True):
        testing.assert_identical(a, b[1:])
    small = EmulatedBackend(emulator=BACKEND.emulator, limits=LIMITS._replace(grid=3))
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(patch, small)
        for a, b in zip(gradients(*given, **call)[0], want, strict=True):
            testing.assert_identical(a, b)


# --- for the measure of coverage ------------------------------------------------------------------


def cover_tall_tiles():
    """Run a call whose heads have tall tiles."""
    with pytest.MonkeyPatch.context() as patch:
        test_tall_tiles_equal_oracle(HEIGHTS[3], patch)


COVERING = LONG
COVERING_LAWS = [
    cover_tall_tiles,
    lambda: test_sums_past_the_range_of_values_within_it("exact"),
    lambda: test_what_stands_in_padding_reaches_nothing("exact", "float16"),
    test_a_query_without_a_key_reaches_no_gradient,
]
"""Calls that reach all of the kernels on tensor cores between them."""
