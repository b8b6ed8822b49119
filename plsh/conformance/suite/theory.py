"""Bounds: their formulas, and that what a backend computes never exceeds them."""

import math
from decimal import Context, Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plsh
from plsh import testing, theory
from plsh.weights import UNLIMITED

DTYPES = ("float16", "bfloat16", "float32", "float64")


def decay(n, sigma):
    """L*, the matrix of exact ALiBi."""
    at = np.arange(n)
    return np.exp(-np.abs(at[:, None] - at[None, :]) / sigma)


# --- formulas -------------------------------------------------------------------------------------


@pytest.mark.requirement("THY-1")
@pytest.mark.parametrize("sigma", [1e-308, 1e-3, 0.1, 1.0, 32.0, 256.0, 1e9, 1e300])
def test_psi_neither_overflows_nor_cancels(sigma):
    """Against 60 digits: coth(x/2) = (1 + e^-x) / (1 - e^-x)."""
    with localcontext(Context(prec=400)):
        e = (-1 / Decimal(sigma)).exp()
        exact = float(1 + Decimal(sigma) + (1 + e) / (1 - e))
    assert abs(theory.psi(sigma) - exact) <= 8 * 2.0**-52 * exact
    assert isinstance(theory.psi(sigma), float)


@pytest.mark.requirement("THY-1", "THY-2", "THY-6")
def test_bounds_take_arrays_of_any_library_and_keep_their_shape(subject):
    sigma = [[1.0, 32.0], [0.5, 256.0]]
    single = [[theory.psi(x) for x in row] for row in sigma]
    dtype = subject.capabilities.dtypes[-1]
    for given_ in (sigma, np.array(sigma), subject.array(sigma, dtype)):
        found = theory.psi(given_)
        assert found.dtype == np.float64
        assert found.tolist() == single
        spectral = theory.spectral_error_bound(100, 4, given_, 0.1)
        assert spectral[0, 1] == theory.spectral_error_bound(100, 4, 32.0, 0.1)
        widths = theory.window_width(given_, 1e-3)
        assert widths.shape == (2, 2)
        assert widths[1, 0] == theory.window_width(0.5, 1e-3)


@pytest.mark.requirement("THY-2", "THY-3")
@pytest.mark.parametrize(("n", "samples"), [(1, 1), (2048, 64), (131072, 5000)])
@pytest.mark.parametrize("sigma", [0.5, 32.0, 256.0])
def test_both_forms_of_the_spectral_bound(n, samples, sigma):
    psi, ratio = theory.psi(sigma), math.log(n) / samples
    expected = psi * (math.sqrt(ratio) + ratio)
    np.testing.assert_allclose(theory.spectral_error_bound(n, samples, sigma), expected, 1e-13)
    for delta in (1e-300, 1e-3, 0.5):
        eps = theory.spectral_error_bound(n, samples, sigma, delta)
        log_tail = math.log(n) - samples * eps**2 / (4 * psi * (4 * psi + eps))
        np.testing.assert_allclose(log_tail, math.log(delta), 1e-10)


@pytest.mark.requirement("THY-2")
@pytest.mark.parametrize("sigma", [4.0, 32.0])
def test_iid_masks_stay_below_the_spectral_bounds(sigma):
    n, samples, trials = 64, 16, 8
    masks = plsh.RandomBinning(sigma).sample(samples, n, sampler="iid", head_ids=range(trials))
    differences = [masks.mean_mask(h) - decay(n, sigma) for h in range(trials)]
    errors = [np.abs(np.linalg.eigvalsh(x)).max() for x in differences]
    assert np.mean(errors) < theory.spectral_error_bound(n, samples, sigma)
    assert max(errors) < theory.spectral_error_bound(n, samples, sigma, 0.05)


@pytest.mark.requirement("THY-3")
@settings(max_examples=30)
@given(
    st.integers(1, 10**6),
    st.floats(0.05, 1e3),
    st.floats(1e-3, 100.0),
    st.floats(1e-9, 0.9),
)
def test_the_sample_count_is_the_smallest_that_reaches_the_error(n, sigma, eps, delta):
    samples = theory.samples_for(n, sigma, eps, delta)
    assert isinstance(samples, int)
    assert theory.spectral_error_bound(n, samples, sigma, delta) <= eps
    assert samples == 1 or theory.spectral_error_bound(n, samples - 1, sigma, delta) > eps


@pytest.mark.requirement("THY-4")
@pytest.mark.parametrize("sigma", [0.01, 1.0, 32.0, 5000.0])
@pytest.mark.parametrize("samples", [1, 16, 1000])
@pytest.mark.parametrize("delta", [1e-300, 1e-6, 0.01, 0.9])
def test_the_block_size_bound_is_the_least_with_a_small_enough_tail(sigma, samples, delta):
    length = theory.block_size_bound(sigma, samples, delta)
    tails = [
        math.log(samples) + math.log1p(x) - x - math.log(delta)
        for x in (length / sigma, (length - 1) / sigma)
    ]
    assert tails[0] <= 0
    assert length == 1 or tails[1] > 0
    assert theory.block_size_bound(1e12, 16, 0.01) == 2**30


@pytest.mark.requirement("THY-4")
@pytest.mark.parametrize("sampler", ["iid", "stratified"])
def test_blocks_exceed_their_bound_as_rarely_as_stated(sampler):
    sigma, samples, delta, trials = 20.0, 16, 0.2, 300
    bound = theory.block_size_bound(sigma, samples, delta)
    masks = plsh.RandomBinning(sigma).sample(
        samples, 4 * bound, start=10_000, sampler=sampler, head_ids=range(trials)
    )
    share = np.mean(masks.bandwidth() + 1 > bound)
    assert delta / 4 <= share <= delta + 3 * math.sqrt(delta * (1 - delta) / trials)


@pytest.mark.requirement("THY-1", "THY-2", "THY-3", "THY-4", "THY-6", "CNF-4")
def test_the_worked_examples_of_the_bounds():
    for found, value in (
        (theory.psi(32.0), 97.00520824856424),
        (theory.spectral_error_bound(2048, 64, 32.0), 45.03889536738677),
        (theory.samples_for(8192, 4.0, 1.0, 0.01), 37765),
        (theory.block_size_bound(32.0, 16, 0.01), 313),
        (theory.window_width(0.5, 1e-6), 28),
        (theory.window_width(0.25, 1e-6), 56),
        (theory.window_width(0.00390625, 1e-6), 3537),
        (theory.window_width(0.0, 1e-6), UNLIMITED),
    ):
        assert type(found) is type(value)
        assert abs(found - value) <= 4 * 2.0**-52 * value


@pytest.mark.requirement("THY-1", "THY-2", "THY-3", "THY-4", "THY-6")
@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: theory.psi(0.0), ValueError, "sigma"),
        (lambda: theory.psi([1.0, -2.0]), ValueError, "sigma"),
        (lambda: theory.psi(math.nan), ValueError, "sigma"),
        (lambda: theory.psi(math.inf), ValueError, "sigma"),
        (lambda: theory.psi("32"), TypeError, "sigma"),
        (lambda: theory.psi(True), TypeError, "sigma"),
        (lambda: theory.spectral_error_bound(0, 4, 1.0), ValueError, "n "),
        (lambda: theory.spectral_error_bound(9.0, 4, 1.0), TypeError, "n "),
        (lambda: theory.spectral_error_bound(9, 0, 1.0), ValueError, "samples"),
        (lambda: theory.spectral_error_bound(9, True, 1.0), TypeError, "samples"),
        (lambda: theory.spectral_error_bound(9, 4, 1.0, 1.0), ValueError, "delta"),
        (lambda: theory.samples_for(9, 1.0, 0.0, 0.1), ValueError, "eps"),
        (lambda: theory.samples_for(9, 1.0, 0.1, 0.0), ValueError, "delta"),
        (lambda: theory.block_size_bound(-1.0, 4, 0.5), ValueError, "sigma"),
        (lambda: theory.block_size_bound(1.0, 4, 1.5), ValueError, "delta"),
        (lambda: theory.window_width(-1.0, 0.1), ValueError, "slope"),
        (lambda: theory.window_width(1.0, 1), ValueError, "tol"),
        (lambda: theory.window_width("a", 0.1), TypeError, "slope"),
    ],
)
def test_arguments_of_the_bounds_are_checked(call, error, name):
    with pytest.raises(error, match=name):
        call()


# --- the output under random masks ----------------------------------------------------------------


@pytest.mark.requirement("THY-5")
def test_the_output_bound_is_the_proven_formula(subject):
    rng = np.random.default_rng(0)
    dtype = subject.capabilities.dtypes[-1]
    shapes = (3, 5, 4), (3, 7, 4), (3, 7, 2)
    q, k, v = (subject.array(rng.normal(size=shape), dtype) for shape in shapes)
    lse = rng.normal(size=(3, 5))
    lse[1, 2] = -np.inf  # a row that sees no key has no error
    errors = [0.1, 0.0, 0.3]
    bound = theory.output_error_bound(errors, q, k, v, lse, -0.3)
    assert bound.shape == (3,)
    for h in range(3):
        own_q, own_k, own_v = (subject.host(x)[h].astype(np.float64) for x in (q, k, v))
        longest = [np.linalg.norm(x, axis=1).max() for x in (own_q, own_k, own_v)]
        size = np.linalg.norm(own_v) + math.sqrt(7) * longest[2]
        least = np.exp(lse[h][np.isfinite(lse[h])]).min()
        expected = math.exp(0.3 * longest[0] * longest[1]) * errors[h] * size / least
        np.testing.assert_allclose(bound[h], expected, 1e-12)
    assert theory.output_error_bound(0.1, q, k, v, np.full((3, 5), -np.inf)).tolist() == [0.0] * 3


@pytest.mark.requirement("THY-5", "MTH-3", "ATT-1")
@pytest.mark.needs("method:exact", "method:lsh", "dtype:float64")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("samples", "sampler"), [(1, "iid"), (16, "iid"), (16, "stratified")])
def test_what_a_backend_gives_under_lsh_is_within_the_output_bound(
    samples, sampler, causal, subject
):
    n, slopes, sigma = 48, (0.5, 1 / 16), (2.0, 16.0)
    rng = np.random.default_rng(samples)
    inputs = [0.7 * rng.normal(size=(1, 2, n, 4)) for _ in range(3)]
    q, k, v = (subject.array(x, "float64") for x in inputs)
    method = plsh.PositionalLSH(samples, sampler=sampler, seed=3)
    call = {"slopes": slopes, "causal": causal, "return_lse": True}
    exact = subject.attention(q, k, v, method="exact", **call)
    near = subject.attention(q, k, v, method=method, **call)
    masks = plsh.RandomBinning(sigma).sample(samples, n, seed=3, sampler=sampler)
    errors = [masks.mean_mask(h) - decay(n, sigma[h]) for h in range(2)]
    norms = [np.linalg.norm(np.tril(e) if causal else e, 2) for e in errors]
    bound = theory.output_error_bound([norms], q, k, v, exact.lse)
    distance = np.linalg.norm(subject.host(exact.out) - subject.host(near.out), axis=(-2, -1))
    assert (distance > 0).all()
    assert (distance <= bound).all()


# --- what a window leaves out ---------------------------------------------------------------------


@pytest.mark.requirement("THY-6", "MTH-2")
@pytest.mark.needs("method:window")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_width_is_the_one_that_a_window_by_tol_uses(dtype, subject):
    slopes = [0.5, 0.3, 0.0]
    widths = theory.window_width(slopes, 0.02)
    assert widths.dtype == np.int64
    assert (np.exp(-np.array(slopes[:2]) * (widths[:2] + 1)) < 0.02).all()
    inputs = testing.make_inputs(1, 3, 3, 40, dtype=dtype)
    q, k, v = (subject.array(x, dtype) for x in inputs[:3])
    results = [
        subject.attention(q, k, v, slopes=slopes, method=method, return_lse=True)
        for method in (plsh.Window(tol=0.02), plsh.Window(widths), plsh.Window(widths - 1))
    ]
    testing.assert_equal_to_rounding(results[0].out, results[1].out)
    testing.assert_equal_to_rounding(results[0].lse, results[1].lse)
    assert not np.array_equal(subject.host(results[0].lse), subject.host(results[2].lse))


def certificate(subject, dtype, inputs, slopes, widths, layout="bhsd", **where):
    """Check a bound that is made from what the backend gave; return it and the true share."""
    exact = testing.oracle(*inputs, slopes=slopes, **where)
    window = testing.oracle(*inputs, slopes=slopes, widths=widths, **where)
    alive = np.isfinite(exact.lse)
    left = np.exp(np.where(alive, window.lse, -np.inf) - np.where(alive, exact.lse, 0.0))
    share = np.where(alive, np.maximum(1 - left, 0), 0)
    turned = [x.swapaxes(1, 2) if layout == "bshd" else x for x in inputs]
    q, k, v = (subject.array(x, dtype) for x in turned)
    method = plsh.Window(widths)
    output = subject.attention(
        q, k, v, slopes=slopes, method=method, layout=layout, return_lse=True, **where
    )
    bound = theory.truncation_error_bound(q, k, output.lse, slopes, widths, layout=layout, **where)
    assert (bound.dtype, bound.shape) == (np.float64, share.shape)
    assert ((bound >= 0) & (bound <= 1)).all()
    assert (share * (1 - 1e-12) - 1e-15 <= bound).all()  # the oracle's own rounding
    group = inputs[0].shape[1] // inputs[1].shape[1]
    largest = np.linalg.norm(inputs[2], axis=-1).max(axis=-1, initial=0.0)
    reach = 2 * np.repeat(largest, group, axis=1)[..., None]
    distance = np.linalg.norm(exact.out - window.out, axis=-1)
    assert (distance <= bound * reach + 1e-12 * (1 + reach)).all()
    return bound, share


@pytest.mark.requirement("THY-7")
@pytest.mark.needs("method:window")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [(0, 0, 0, 0), (0, 3, 40, 20)])
def test_the_certificate_of_a_window_is_never_exceeded(widths, causal, dtype, subject):
    for std, offsets in ((1.0, (25, 5)), (2.5, ((0, 30), (7, 2)))):
        inputs = testing.make_inputs(2, 4, 2, 30, 50, 16, 8, dtype=dtype, seed=7, std=std)
        where = {"causal": causal, "q_offset": offsets[0], "k_offset": offsets[1]}
        certificate(subject, dtype, inputs[:3], [0.5, 0.1, 0.0, 0.3], widths, **where)


@pytest.mark.requirement("THY-7")
@pytest.mark.needs("method:window")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_certificate_is_attained_where_all_keys_are_parallel(layout, causal, dtype, subject):
    """Equality at every row: a miscounted key, side, head or position shows at once."""
    rng = np.random.default_rng(11)
    along = np.array([0.75, 0.0, 1.0])
    q = np.round(rng.uniform(0.5, 2.0, size=(2, 6, 30, 1)) * 64) / 64 * along
    k = np.broadcast_to(np.array([0.25, 1.0, 2.0])[:, None, None] * along, (2, 3, 40, 3))
    v = rng.normal(size=(2, 3, 40, 2)).astype(np.float32).astype(np.float64)
    slopes = np.array([0.0, 0.25, 0.5, 0.015625, 0.125, 2.0])
    widths = (0, 3, 7, 12, 1, 60)
    where = {"causal": causal, "q_offset": 12, "k_offset": 4}
    bound, share = certificate(subject, dtype, (q, k, v), slopes, widths, layout, **where)
    np.testing.assert_allclose(bound, share, rtol=2e-4 if dtype == "float32" else 1e-10)
    assert (share > 0.01).any()
    assert (share == 0).any()


@pytest.mark.requirement("THY-7")
def test_rows_that_keep_nothing_have_lost_everything_or_nothing():
    q, k = np.ones((1, 1, 4, 2)), np.ones((1, 1, 2, 2))
    dead, places = np.full((1, 1, 4), -np.inf), {"q_offset": 0, "k_offset": 2}
    bound = theory.truncation_error_bound
    assert bound(q, k, dead, [1.0], 0, causal=True, **places).tolist() == [[[0, 0, 0, 1]]]
    assert bound(q, k, dead, [1.0], 1, **places).tolist() == [[[1, 1, 0, 0]]]
    assert bound(q, k[:, :, :0], dead, [1.0], 0, **places).tolist() == [[[0] * 4]]
    assert not bound(q, q, np.zeros((1, 1, 4)), [0.1], UNLIMITED).any()


@pytest.mark.requirement("THY-7", "MEM-1")
def test_the_certificate_takes_time_and_memory_in_proportion_to_the_tokens():
    """A million queries and keys: of pairs there would be 10^12."""
    n = 10**6
    x = np.ones((1, n, 1), dtype=np.float32)
    bound = theory.truncation_error_bound(x, x, np.zeros((1, n), np.float32), [0.5], 20)
    assert bound.shape == (1, n)
    assert 0 < bound.min() < 1


@pytest.mark.requirement("THY-5", "THY-7")
@pytest.mark.parametrize(
    ("changed", "error", "name"),
    [
        ({"q": np.ones((2, 2, 5, 2))}, ValueError, "head dim"),
        ({"q": np.full((2, 2, 5, 3), np.inf)}, ValueError, "q must be finite"),
        ({"q": [[1.0]]}, TypeError, "q must be an array"),
        ({"lse": np.zeros((2, 5, 2))}, ValueError, "lse"),
        ({"lse": np.full((2, 2, 5), np.nan)}, ValueError, "lse"),
        ({"lse": np.zeros((2, 2, 5), np.float16)}, TypeError, "lse"),
        ({"scale": "1"}, TypeError, "scale"),
    ],
)
def test_arrays_of_the_bounds_are_checked(changed, error, name):
    x = np.ones((2, 2, 5, 3))
    own = {"q": x, "k": x, "lse": np.zeros((2, 2, 5)), **changed}
    with pytest.raises(error, match=name):
        theory.truncation_error_bound(**own, slopes=[0.1, 0.1], width=2)
    with pytest.raises(error, match=name):
        theory.output_error_bound(0.1, **own, v=x)


@pytest.mark.requirement("THY-7")
@pytest.mark.parametrize(
    ("changed", "error", "name"),
    [
        ({"k": np.ones((2, 3, 5, 3))}, ValueError, "heads"),
        ({"k": np.ones((2, 2, 4, 3))}, ValueError, "q_offset"),
        ({"slopes": [0.1]}, ValueError, "slopes"),
        ({"slopes": [-0.1, 1.0]}, ValueError, "slopes"),
        ({"width": -1}, ValueError, "width"),
        ({"width": [1, 2, 3]}, ValueError, "width"),
        ({"width": None}, TypeError, "width"),
        ({"causal": 1}, TypeError, "causal"),
        ({"layout": "hsd"}, ValueError, "layout"),
    ],
)
def test_options_of_the_certificate_are_those_of_attention(changed, error, name):
    x = np.ones((2, 2, 5, 3))
    own = {"q": x, "k": x, "lse": np.zeros((2, 2, 5)), "slopes": [0.1, 0.1], "width": 2, **changed}
    with pytest.raises(error, match=name):
        theory.truncation_error_bound(**own)
