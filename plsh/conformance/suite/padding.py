"""Segments, padding, and rows that see no key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsh.conformance.suite.common import (
    DTYPES,
    METHODS,
    NAMES,
    SLOPES,
    assert_same,
    make,
    rows,
)
from plsh.hashing import FixedBlocks
from plsh.methods import PositionalLSH, Window
from plsh.testing import assert_equal_to_rounding

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
METHOD = pytest.mark.parametrize("method", NAMES)
DTYPE = pytest.mark.parametrize("dtype", DTYPES)

LOW, HIGH = -(2**31), 2**31 - 1

# --- segments -------------------------------------------------------------------------------------


@pytest.mark.requirement("ATT-19")
@METHOD
@CAUSAL
def test_packed_documents_equal_calls_alone(method, causal, subject):
    ids = np.repeat([[4, 0, 9]] * 2, [15, 1, 24], axis=1).astype(np.int32)
    problem = make(subject, 40, method=method, causal=causal, segment_ids=ids)
    got = problem.output(subject)
    for part in (slice(0, 15), slice(15, 16), slice(16, 40)):
        alone = problem.cut(part, part).but(segment_ids=None).output(subject)
        assert_same(subject, problem.dtype, rows(got, part), alone)


@pytest.mark.requirement("ATT-19", "ATT-24")
@METHOD
@CAUSAL
@pytest.mark.parametrize(
    "ids",
    [
        [[0, 1], [7, 7]],  # interleaved
        [[HIGH, HIGH - 1], [HIGH, 0]],  # they differ beyond float32's integers
        [[2**24 + 1, 2**24], [0, 2**24]],
        [[256, 0], [65536, 0]],  # equal in fewer bits
        [[0, -1], [-2, 3]],  # any negative id is padding
        [[LOW, 0], [-1, -1]],
    ],
    ids=["interleaved", "high", "close", "bits", "padding", "low"],
)
def test_ids_are_compared_as_integers(method, causal, ids, subject):
    ids = np.tile(np.array(ids, np.int32), 20)
    make(subject, 40, method=method, causal=causal, segment_ids=ids).check_output(subject)


@pytest.mark.requirement("ATT-19", "ATT-20")
@METHOD
def test_padding_does_not_see_padding_of_the_same_id(method, subject):
    ids = np.full((2, 20), -1, np.int32)
    ids[1] = -7
    got = make(subject, 20, method=method, segment_ids=ids).output(subject)
    assert not np.any(got.out)
    assert np.all(got.lse == -np.inf)


@pytest.mark.requirement("ATT-19")
@METHOD
def test_queries_and_keys_may_have_ids_of_their_own(method, subject):
    rng = np.random.default_rng(3)
    pair = tuple(rng.integers(-1, 3, (2, n)).astype(np.int32) for n in (21, 40))
    make(subject, 21, 40, method=method, segment_ids=pair, q_offset=9).check_output(subject)
    swapped = (np.zeros((2, 21), np.int32), np.ones((2, 40), np.int32))
    got = make(subject, 21, 40, method=method, segment_ids=swapped, q_offset=9).output(subject)
    assert not np.any(got.out)


@pytest.mark.requirement("ATT-19")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("of", ["int8", "int16", "int32", "int64", "uint8"])
def test_ids_of_any_integer_dtype(method, of, subject):
    ids = np.repeat([[0, 100, 3], [90, 2, 90]], 6, axis=1)
    ids[:, 7] = -1 if of[0] == "i" else 5
    problem = make(subject, 18, method=method, segment_ids=ids.astype(of))
    problem.check_output(subject)


@pytest.mark.requirement("ATT-19")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("of", "other"), [("int64", 2**32), ("int64", 2**31), ("int64", 2**53 + 1), ("uint32", 2**31)]
)
def test_ids_keep_all_their_bits(method, of, other, subject):
    """Equal in 32 bits, or negative there, or equal as float64."""
    first = 2**53 if other > 2**53 else 0
    ids = np.where(np.arange(20) < 9, first, other)[None].repeat(2, axis=0).astype(of)
    problem = make(subject, 20, method=method, causal=True, segment_ids=ids)
    problem.check_output(subject)


@pytest.mark.requirement("ATT-19", "ATT-3")
@pytest.mark.parametrize("method", METHODS)
def test_one_segment_is_no_segment(method, subject):
    problem = make(subject, 33, method=method, causal=True)
    ids = np.full((2, 33), 5, np.int32)
    got = problem.but(segment_ids=ids).output(subject)
    assert_same(subject, problem.dtype, got, problem.output(subject))


@pytest.mark.requirement("ATT-19", "ATT-20", "ATT-21")
@pytest.mark.parametrize("method", METHODS)
def test_any_segments_are_right(method, subject):
    ids = st.lists(st.integers(-2, 2), min_size=24, max_size=24).map(np.array)

    @given(ids, ids, st.booleans(), st.integers(0, 30))
    @settings(max_examples=100 if subject.full else 6)
    def check(of_queries, of_keys, causal, first):
        pair = (of_queries.reshape(2, 12).astype(np.int32), of_keys.reshape(2, 12).astype(np.int32))
        options = {"causal": causal, "q_offset": first, "k_offset": 9, "segment_ids": pair}
        make(subject, 12, method=method, **options).check_output(subject)

    check()


# --- what padding holds ---------------------------------------------------------------------------

PADDED = np.zeros((2, 40), np.int32)
PADDED[0, 33:], PADDED[1, :2], PADDED[1, 15:18] = -1, -3, -1

FILLS = [np.nan, np.inf, -np.inf, 6e4]


@pytest.mark.requirement("ATT-20")
@METHOD
@CAUSAL
@pytest.mark.parametrize("fill", FILLS)
def test_what_stands_in_padding_reaches_no_output(method, causal, fill, subject):
    problem = make(subject, 40, method=method, causal=causal, segment_ids=PADDED)
    zeros, filled = (_filled(problem, x).output(subject) for x in (0.0, fill))
    assert_same(subject, problem.dtype, filled, zeros)
    hidden = PADDED < 0
    assert not np.any(filled.out.swapaxes(1, 2)[hidden])
    assert np.all(filled.lse.swapaxes(1, 2)[hidden] == -np.inf)


@pytest.mark.requirement("ATT-20", "ATT-21")
@pytest.mark.needs("gradients")
@METHOD
@pytest.mark.parametrize("fill", FILLS)
def test_what_stands_in_padding_reaches_no_gradient(method, fill, subject):
    problem = make(subject, 40, method=method, causal=True, segment_ids=PADDED)
    zeros, filled = (_filled(problem, x).gradients(subject) for x in (0.0, fill))
    assert_same(subject, problem.dtype, filled, zeros)
    for x in filled[:3]:
        assert not np.any(x.swapaxes(1, 2)[PADDED < 0])


@pytest.mark.requirement("ATT-20")
@pytest.mark.parametrize("method", METHODS)
@DTYPE
def test_one_kind_of_padded_token_at_a_time(method, dtype, subject):
    """Padded queries, keys and values hold NaN one after the other, in every dtype."""
    problem = _filled(make(subject, 40, method=method, dtype=dtype, segment_ids=PADDED), 0.0)
    zeros = problem.output(subject)
    for name in ("q", "k", "v"):
        x = getattr(_filled(problem, np.nan), name)
        assert_same(subject, dtype, problem.but(**{name: x}).output(subject), zeros)


@pytest.mark.requirement("ATT-20")
@METHOD
def test_padded_keys_alone_are_hidden(method, subject):
    ids = (np.zeros((2, 6), np.int32), PADDED)
    problem = make(subject, 6, 40, method=method, segment_ids=ids, q_offset=30)
    k, v = problem.k.copy(), problem.v.copy()
    for x in (k, v):
        x.swapaxes(1, 2)[PADDED < 0] = np.nan
    problem.but(k=k, v=v).check_output(subject)


def _filled(problem, fill):
    """Return the problem with `fill` in every padded token of q, k and v."""
    new = {}
    for name in ("q", "k", "v"):
        x = getattr(problem, name).copy()
        x.swapaxes(1, 2)[problem.segment_ids < 0] = fill
        new[name] = x
    return problem.but(**new)


# --- rows that see no key -------------------------------------------------------------------------

ALIVE = np.zeros((2, 40), np.int32)
NO_SUCH = np.where(np.arange(40) % 3 == 1, 5, 0).astype(np.int32) * np.ones((2, 1), np.int32)
LATE = np.where(np.arange(40) < 20, -1, 0).astype(np.int32) * np.ones((2, 1), np.int32)
BLOCKS = PositionalLSH(sampler=None, family=FixedBlocks((10.0,) * 4))

DEAD = {
    "padded query": (NAMES, {"segment_ids": (PADDED, ALIVE)}),
    "no key in its segment": (NAMES, {"segment_ids": (NO_SUCH, ALIVE)}),
    "padded keys": (NAMES[1:], {"segment_ids": (ALIVE, LATE)}),
    "before every key": (NAMES, {"causal": True, "q_offset": 0, "k_offset": 17}),
    "window holds no key": (["window"], {"method": Window(5), "q_offset": 0, "k_offset": 20}),
    "window behind": (["window"], {"method": Window(5), "q_offset": 30, "k_offset": 0}),
    "window far away": (["window"], {"method": Window(5), "q_offset": 2**29, "k_offset": 0}),
    "block holds no key": (
        ["lsh"], {"method": BLOCKS, "slopes": None, "q_offset": 0, "k_offset": 20},
    ),
    "all of them": (NAMES, {"segment_ids": (ALIVE - 1, ALIVE)}),
}  # fmt: skip
"""Ways of seeing no key: the methods under which they occur, and the options."""

CASES = [
    pytest.param(case, *getattr(name, "values", [name]), marks=getattr(name, "marks", ()))
    for case, (names, _) in DEAD.items()
    for name in names
]
EVERY_CASE = pytest.mark.parametrize(("case", "method"), CASES)


def _case(subject, case, method):
    problem = make(subject, 40, method=method).but(**DEAD[case][1])
    if case == "window far away":
        return problem.cut(slice(7), slice(9))
    return problem


@pytest.mark.requirement("ATT-21")
@EVERY_CASE
def test_a_row_that_sees_no_key_is_zero(case, method, subject):
    problem = _case(subject, case, method)
    got, expected = problem.output(subject), problem.yardsticks[0]
    dead = np.isneginf(expected.lse)
    assert dead.any()
    assert not np.any(got.out[dead])
    assert np.all(got.lse[dead] == -np.inf)
    problem.check_output(subject)


@pytest.mark.requirement("ATT-21", "NUM-8", "NUM-9")
@pytest.mark.needs("gradients")
@EVERY_CASE
def test_a_row_that_sees_no_key_has_no_gradient(case, method, subject):
    """Whatever the cotangents there, as long as they are finite."""
    problem = _case(subject, case, method)
    dead = np.isneginf(problem.yardsticks[0].lse)
    quiet, loud = (problem.grad_out.copy(), problem.grad_lse.copy()), []
    for x in quiet:
        x[dead] = 0
        y = x.copy()
        y[dead] = 6e4
        loud.append(y)
    silent = problem.but(grad_out=quiet[0], grad_lse=quiet[1])
    silent.check(subject)
    got = problem.but(grad_out=loud[0], grad_lse=loud[1]).gradients(subject)
    assert_same(subject, problem.dtype, got, silent.gradients(subject))
    assert not np.any(got.q[dead])


@pytest.mark.requirement("ATT-21", "ATT-3")
@METHOD
def test_without_keys_every_row_is_dead(method, subject):
    problem = make(subject, 20, 0, method=method)
    got = problem.output(subject)
    assert not np.any(got.out)
    assert np.all(got.lse == -np.inf)


@pytest.mark.requirement("ATT-21", "ATT-3")
@pytest.mark.needs("gradients")
@METHOD
def test_without_keys_every_gradient_is_zero(method, subject):
    grads = make(subject, 20, 0, method=method).gradients(subject)
    for x in grads:
        assert x is None or not np.any(x)  # NaN is truthy


@pytest.mark.requirement("ATT-21", "ATT-20")
@pytest.mark.parametrize("method", METHODS)
@DTYPE
def test_dead_rows_and_live_ones_share_a_tile(method, dtype, subject):
    """One live row among dead ones, at every place of a tile."""
    n = 33
    ids = np.full((n, n), -1, np.int32)
    ids[np.arange(n), np.arange(n)] = 0
    problem = make(subject, n, method=method, dtype=dtype, batch=n, segment_ids=ids)
    got = problem.output(subject)
    own = np.arange(n)
    assert_equal_to_rounding(
        subject.array(got.out[own, :, own], dtype),
        subject.array(np.repeat(problem.v, 2, axis=1)[own, :, own], dtype),
    )
    dead = np.ones((n, n), dtype=bool)
    dead[own, own] = False
    assert not np.any(got.out.swapaxes(1, 2)[dead])
    assert np.all(got.lse.swapaxes(1, 2)[dead] == -np.inf)
    assert np.all(np.isfinite(got.lse[own, :, own]))


@pytest.mark.requirement("ATT-21")
@pytest.mark.parametrize("method", METHODS)
def test_slopes_of_dead_rows_do_not_matter(method, subject):
    """A head of slope 0 and a steep one, all queries padded in one batch row."""
    ids = np.array([[-1] * 40, [0] * 40], np.int32)
    problem = make(subject, 40, method=method, slopes=SLOPES, segment_ids=ids)
    problem.check(subject)
