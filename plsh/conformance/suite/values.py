"""Output, lse and gradients of every combination of options, against the float64 oracle."""

import itertools

import pytest

from plsh.conformance.calls import FACTORS, Call, check_call, pairwise

CROSSED = [Call(**row) for row in pairwise(FACTORS, 11)]

LONG = [
    Call("exact", (4, 2), (300, 300), (64, 64), 2, dtype="float32", flatter=4.0),
    Call("exact", (2, 1), (300, 300), (257, 80), 1, causal=True, dtype="float32"),
    Call("windows", (4, 4), (300, 300), (80, 257), 1, segments="one", flatter=9.0),
    Call("lsh", (3, 1), (300, 300), (16, 16), 3, dtype="float16", flatter=16.0, samples=16),
    Call("lsh", (2, 1), (300, 300), (16, 8), 1, True, dtype="float32", flatter=16.0),
    Call("exact", (2, 1), (1000, 1000), (16, 8), 1, causal=True, flatter=128.0),
    Call("tol", (2, 2), (1000, 1000), (16, 16), 1, dtype="float32", flatter=128.0),
    Call("lsh", (2, 1), (1000, 1000), (8, 16), 1, flatter=128.0, segments="one", samples=16),
    Call("lsh-iid", (2, 1), (1000, 1000), (16, 16), 1, True, flatter=64.0, dtype="float32"),
    Call("set", (2, 1), (1000, 700), (16, 16), 1, flatter=32.0, dtype="float32"),
    Call("cuts", (2, 1), (700, 1000), (16, 16), 1, True, offsets="far", dtype="float32"),
    Call("power", (2, 1), (600, 600), (16, 16), 1, offsets="batch", samples=7),
]
"""Several tiles on either side of a query; the first five are quick."""

DTYPES = [
    Call(method, (4, 2), (70, 70), (16, 8), 2, causal, dtype=dtype, flatter=8.0)
    for method, causal, dtype in itertools.product(
        ("exact", "window", "lsh"), (False, True), ("float16", "bfloat16", "float32", "float64")
    )
]
"""Every dtype with every method."""

FULL = [pytest.param(call, marks=pytest.mark.full) for call in LONG[5:]]


@pytest.mark.requirement("NUM-7", "ATT-1", "ATT-24", "BCK-14", "CNF-1", "CNF-3")
@pytest.mark.parametrize("call", [*CROSSED, *LONG[:5], *FULL], ids=str)
def test_every_pair_of_options_is_right(call, subject):
    check_call(call, subject)


@pytest.mark.requirement("NUM-7", "ATT-1", "CNV-3", "NUM-1", "ATT-6", "ATT-7")
@pytest.mark.parametrize("call", DTYPES, ids=str)
def test_every_dtype_is_right(call, subject):
    check_call(call, subject)
