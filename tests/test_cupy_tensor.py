"""Tensor cores: what the emulator makes of their instructions, and the faults that it finds.

It has a twin of each instruction: a copy in flight lands at the wait and is poison until then, and
rows of a matrix that meet in a bank of shared memory are a fault.
"""

import numpy as np
import pytest
from cuda_emulator import EmulatorFault
from plsh_cupy._plan import Instance
from test_cupy_emulator import Probe

from plsh.compat import numpy_dtype

DTYPES = ("float16", "bfloat16")
BITS = {"float16": 11, "bfloat16": 8}


# --- instructions alone, against plain loops ------------------------------------------------------


def numbers(shape, dtype, seed=0):
    """Return numbers of that dtype whose products and sums are exact in float32."""
    x = np.random.default_rng(seed).integers(-8, 9, shape) / 8
    return x.astype(numpy_dtype(dtype))


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
            like = Instance("forward", dtype, False, 64, 64)
            body = f"switch (p.heads) {{ {' '.join(cases)} }}"
            made[dtype] = Probe(tmp_path_factory.mktemp(dtype), body, like)
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
def test_two_numbers_are_rounded_into_one_register(dtype, run):
    """To nearest even, the first in the lower half; ties, subnormal numbers and infinity too."""
    x = np.random.default_rng(0).standard_normal(512) * 10.0 ** np.linspace(-9, 6, 512)
    x[:4] = 1 + 2.0 ** -BITS[dtype], 1 + 3 * 2.0 ** -BITS[dtype], np.inf, 0
    x = x.astype(np.float32)[:, None]
    got = run("two numbers", dtype, ("q", x), size=256)
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
    given = ("q", numbers((256, 8), "float16"))
    if message is None:
        got = run(name, "float16", given, size=128).view(np.uint16)
        moved = 0 if "itself" in name else -1
        np.testing.assert_array_equal(got, np.roll(given[1].view(np.uint16)[:, 0], moved))
        return
    with pytest.raises(EmulatorFault, match=message):
        run(name, "float16", given)
