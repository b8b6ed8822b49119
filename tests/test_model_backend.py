"""The model backend is right: the float64 oracle and the laws, over the edges of its tiles.

It is what a writer of kernels reads and what the mutants are made from, so that a fault of its own
would hide theirs.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from calls import FACTORS, pairwise
from laws import METHODS, NAMES, SLOPES, attend, inputs
from test_numpy_backend import BandCall, check_band

import plsh
from plsh import testing
from plsh.testing import model
from plsh.testing.model import BACKEND
from plsh.testing.mutants import KINDS, MUTANTS

METHOD = pytest.mark.parametrize("method", NAMES)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
TILE = BACKEND.tile
N = 4 * TILE + 6


@pytest.fixture(autouse=True, scope="module")
def _registered():
    plsh.register_backend(BACKEND)


def everything(q, k, v, method, grads=None, **keywords):
    """Return out, lse and the gradients, with the slopes of the laws."""
    output = attend(q, k, v, method, backend="model", **keywords)
    if method != "set":
        keywords.setdefault("slopes", SLOPES)
    given = cotangents(q, v) if grads is None else grads
    call = {"method": METHODS[method], "backend": "model", **keywords}
    found = plsh.attention_vjp(q, k, v, output, *given, **call)
    return (*output, *(x for x in found if x is not None))


def cotangents(q, v):
    rng = np.random.default_rng(1)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    grad_out = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    return grad_out, rng.standard_normal(q.shape[:-1]).astype(wide)


def assert_all_same(actual, expected, units=0.0):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if units:
            testing.assert_equal_to_rounding(a, b, units=units)
        else:
            testing.assert_identical(a, b)


# --- the oracle -----------------------------------------------------------------------------------


class ModelCall(BandCall):
    """A call of this backend."""

    backend = "model"


FACTORS = {
    **FACTORS,
    "lengths": [(n, n) for n in (0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE, N)]
    + [(TILE, 33), (N, 31), (1, 40), (5, 2), (4, 0), (0, 4)],
    "dims": [(1, 1), (3, 20), (20, 3), (16, 16)],
    "batch": [None, 0, 1, 2],
}

LONG = [
    ModelCall("exact", (2, 1), (150, 150), (16, 8), 1, True, dtype="float32", flatter=16.0),
    ModelCall("windows", (4, 2), (150, 150), (8, 16), 1, flatter=9.0),
    ModelCall("lsh", (3, 1), (150, 150), (16, 16), 1, dtype="float16", flatter=16.0),
    ModelCall("set", (2, 1), (150, 100), (16, 16), 1, dtype="bfloat16", flatter=16.0),
    ModelCall("exact", (2, 1), (N, N), (16, 16), 1, dtype="float32", std=12.0),
]
"""Bands of several tiles on either side, and large logits."""


@pytest.mark.parametrize(
    "call", [*(ModelCall(**row) for row in pairwise(FACTORS, 5)), *LONG], ids=str
)
def test_call_equals_oracle(call):
    check_band(call)


@CAUSAL
@pytest.mark.parametrize("samples", [1, 6])
def test_it_equals_the_reduction(samples, causal):
    q, k, v = inputs(N, heads=2, kv_heads=1)
    blocks = plsh.RandomBinning(9.0).sample(samples, N, seed=4)
    want = plsh.reduction(q, k, v, blocks, causal=causal)
    call = {"method": blocks, "causal": causal, "return_lse": True, "backend": "model"}
    got = plsh.attention(q, k, v, **call)
    assert_all_same(got, want, units=32)


# --- hidden keys, padding, dead rows, extreme values ----------------------------------------------


@METHOD
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_hidden_key_far_above_the_visible_ones_changes_no_bit(method, dtype):
    """A logit of 100, 10^4 or past the range, hidden by causality or by a segment."""
    q, k, v = inputs(N, dtype=dtype)
    q[..., 0] = 1
    hidden = {"causal": np.arange(N) < N - 1, "segment": np.arange(N) != 20}
    ids = np.where(hidden["segment"], 0, 1)[None].repeat(2, axis=0)
    for why, key in (("causal", N - 1), ("segment", 20)):
        call = {"causal": True, "scale": 1.0}
        call |= {"segment_ids": ids} if why == "segment" else {}
        results = []
        for value in (0, 100, 1e4, 0.99 * float(np.finfo(dtype).max)):
            k[:, :, key, 0] = value
            got = attend(q, k, v, method, backend="model", **call)
            results.append([x[:, :, hidden[why]] for x in got])
        for result in results[1:]:
            assert_all_same(result, results[0])


@METHOD
@CAUSAL
@pytest.mark.parametrize("fill", [np.nan, np.inf, 6e4])
def test_what_padding_holds_changes_no_bit(method, causal, fill):
    ids = np.array([[-1] * 3 + [0] * 30 + [-2] * 17 + [1] * 20, [2] * 50 + [-1] * 20])
    q, k, v = inputs(N, dtype="float32")
    filled = [x.copy() for x in (q, k, v)]
    for x in filled:
        x[np.broadcast_to((ids < 0)[:, None], x.shape[:3])] = fill
    call = {"causal": causal, "segment_ids": ids}
    got = everything(*filled, method, cotangents(q, v), **call)
    assert_all_same(got, everything(q, k, v, method, **call))
    padded = np.broadcast_to((ids < 0)[:, None], got[1].shape)
    assert not got[0][padded].any()
    assert not got[2][padded].any()
    assert np.all(got[1][padded] == -np.inf)


@METHOD
def test_rows_that_see_no_key_are_zero_and_have_no_gradient(method):
    q, k, v = inputs(45, 30, dtype="float32")
    call = {"causal": True, "q_offset": 0, "k_offset": 20}
    grads = cotangents(q, v)
    huge = [x.copy() for x in grads]
    for x in huge:
        x[:, :, :20] = np.finfo(x.dtype).max
    got = everything(q, k, v, method, huge, **call)
    assert_all_same(got, everything(q, k, v, method, grads, **call))
    assert not got[0][:, :, :20].any()
    assert not got[2][:, :, :20].any()
    assert np.all(got[1][:, :, :20] == -np.inf)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_near_the_largest_number_and_huge_slopes_stay_finite(method, dtype):
    q, k, v = inputs(N, dtype=dtype)
    large = (v * 0 + 0.9 * float(np.finfo(dtype).max)).astype(dtype)
    got = attend(q, k, large, method, backend="model")
    testing.assert_equal_to_rounding(got.out, np.repeat(large, 2, axis=1))
    for slope in (1e4, 1e300):
        found = everything(q, k, v, method, slopes=slope)
        testing.assert_equal_to_rounding(found[0], np.repeat(v, 2, axis=1), units=4)
        assert all(np.isfinite(x).all() for x in found)


# --- laws -----------------------------------------------------------------------------------------


@METHOD
def test_repeats_batch_mates_and_views_change_no_bit(method):
    """Inputs may be read-only and strided; a row is the same alone and among others."""
    q, k, v = inputs(N, dtype="float32", batch=3)
    q[2] *= 30
    grads = cotangents(q, v)
    whole = everything(q, k, v, method, grads)
    views = [np.repeat(x, 2, axis=-1)[..., ::2] for x in (q, k, v, *grads)]
    for x in views:
        x.flags.writeable = False
    assert_all_same(everything(*views[:3], method, views[3:]), whole)
    for b in range(3):
        own = slice(b, b + 1)
        part = everything(*(x[own] for x in (q, k, v)), method, [x[own] for x in grads])
        assert_all_same(part[:5], [x[own] for x in whole[:5]])


@METHOD
def test_decoding_equals_prefill(method):
    q, k, v = inputs(40)
    whole = attend(q, k, v, method, backend="model", causal=True)
    for t in range(40):
        tokens = (q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1])
        got = attend(*tokens, method, backend="model", q_offset=t)
        assert_all_same(got, [x[:, :, t : t + 1] for x in whole], units=32)


def test_it_uses_what_a_third_party_may_use():
    source = Path(model.__file__).read_text("utf-8")
    assert set(re.findall(r"^from (plsh\S*) import", source, re.M)) <= {
        "plsh.backend",
        "plsh.weights",
    }


# --- the list of mutants --------------------------------------------------------------------------


def test_mutants_are_many_named_and_of_every_kind():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 48
    assert [m.kind for m in MUTANTS] == sorted((m.kind for m in MUTANTS), key=KINDS.index)
    assert {m.kind for m in MUTANTS} == set(KINDS)
    for mutant in MUTANTS:
        assert mutant.name.isidentifier()
        assert mutant.backend.name == mutant.name
        assert isinstance(mutant.backend, model.ModelBackend)
        assert re.fullmatch(r"[A-Za-z][^\n]*[.]", mutant.fault), mutant.fault
        assert mutant.killers


def test_killers_are_requirements_of_the_standard():
    chapters = (Path(__file__).parents[1] / "spec").glob("*.md")
    text = "\n".join(chapter.read_text("utf-8") for chapter in chapters)
    known = set(re.findall(r"^\*\*([A-Z]{3}-\d+)\*\*", text, re.M))
    assert {name for mutant in MUTANTS for name in mutant.killers} <= known
