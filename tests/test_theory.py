"""The bounds of plsh.theory are never exceeded, and say something."""

import math

import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plsh
from plsh import theory
from plsh.testing.oracle import decay_weight, oracle
from plsh.weights import UNLIMITED

NEVER = 1e-300


def laplace(n, sigma):
    at = np.arange(n)
    return np.exp(-np.abs(at[:, None] - at[None, :]) / sigma)


# --- psi ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [1e-308, 1e-3, 0.1, 1.0, 32.0, 256.0, 1e9, 1e300])
def test_psi_agrees_with_fifty_digits_for_tiny_and_huge_sigma(sigma):
    with mpmath.workdps(50):
        s = mpmath.mpf(sigma)
        expected = float(1 + s + mpmath.coth(1 / (2 * s)))
    assert theory.psi(sigma) == pytest.approx(expected, rel=1e-14)


def test_psi_is_one_plus_sigma_plus_the_row_sum_of_the_bias_matrix():
    row_sum = np.exp(-np.abs(np.arange(-4000, 4001)) / 16.0).sum()
    assert theory.psi(16.0) == pytest.approx(17.0 + row_sum, rel=1e-13)


def test_psi_takes_scalars_arrays_and_framework_arrays():
    expected = [theory.psi(1.0), theory.psi(32.0)]
    assert isinstance(expected[0], float)
    for sigma in ([1, 32], np.array([1, 32]), torch.tensor([1.0, 32.0], dtype=torch.bfloat16)):
        values = theory.psi(sigma)
        assert values.dtype == np.float64
        assert values.tolist() == expected
    assert theory.psi(jnp.asarray([1.0, 32.0], dtype=jnp.bfloat16)).tolist() == expected


# --- spectral error -------------------------------------------------------------------------------


def test_expected_form_is_the_formula_of_the_theorem():
    n, s, sigma = 2048, 64, 32.0
    ratio = math.log(n) / s
    expected = (33 + 1 / math.tanh(1 / 64)) * (math.sqrt(ratio) + ratio)
    assert theory.spectral_error_bound(n, s, sigma) == pytest.approx(expected, rel=1e-14)
    both = theory.spectral_error_bound(n, s, [sigma, 4.0], 0.1)
    assert both[1] == theory.spectral_error_bound(n, s, 4.0, 0.1)


@pytest.mark.parametrize("sigma", [0.5, 32.0, 256.0])
@pytest.mark.parametrize("delta", [NEVER, 1e-3, 0.5])
@pytest.mark.parametrize(("n", "samples"), [(1, 1), (2048, 16), (131072, 5000)])
def test_tail_form_puts_delta_into_the_tail(n, samples, sigma, delta):
    eps = theory.spectral_error_bound(n, samples, sigma, delta)
    psi = theory.psi(sigma)
    log_tail = math.log(n) - samples * eps**2 / (4 * psi * (4 * psi + eps))
    assert log_tail == pytest.approx(math.log(delta), rel=1e-10)


@pytest.mark.parametrize("sigma", [4.0, 32.0])
def test_spectral_error_of_iid_masks_stays_below_both_forms(sigma):
    n, samples, trials = 128, 16, 20
    masks = plsh.RandomBinning(sigma).sample(samples, n, sampler="iid", head_ids=range(trials))
    target = laplace(n, sigma)
    errors = [np.linalg.norm(masks.mean_mask(h) - target, 2) for h in range(trials)]
    expected = theory.spectral_error_bound(n, samples, sigma)
    assert np.mean(errors) < expected < 30 * np.mean(errors)
    assert max(errors) < theory.spectral_error_bound(n, samples, sigma, 0.05)


@pytest.mark.parametrize("sigma", [0.1, 4.0, 256.0])
@pytest.mark.parametrize("eps", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("delta", [1e-9, 0.3])
def test_samples_for_is_the_smallest_count_that_reaches_the_error(sigma, eps, delta):
    s = theory.samples_for(4096, sigma, eps, delta)
    assert theory.spectral_error_bound(4096, s, sigma, delta) <= eps
    assert s == 1 or theory.spectral_error_bound(4096, s - 1, sigma, delta) > eps


def test_samples_for_inverts_the_tail_form():
    for samples in (1, 2, 7, 64, 1000, 10**6):
        eps = theory.spectral_error_bound(8192, samples, 32.0, 0.01)
        assert theory.samples_for(8192, 32.0, eps, 0.01) == samples


# --- block size -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.01, 1.0, 32.0, 5000.0])
@pytest.mark.parametrize("samples", [1, 16, 1000])
@pytest.mark.parametrize("delta", [NEVER, 1e-6, 0.01, 0.9])
def test_block_size_bound_is_the_least_length_with_a_small_enough_tail(sigma, samples, delta):
    length = theory.block_size_bound(sigma, samples, delta)

    def log_tail(width):
        x = width / sigma
        return math.log(samples) + math.log1p(x) - x

    assert log_tail(length) <= math.log(delta)
    assert length == 1 or log_tail(length - 1) > math.log(delta)


@pytest.mark.parametrize("sampler", ["iid", "stratified"])
def test_longest_block_exceeds_its_bound_as_rarely_as_stated(sampler):
    sigma, samples, delta, trials = 20.0, 16, 0.2, 400
    bound = theory.block_size_bound(sigma, samples, delta)
    masks = plsh.RandomBinning(sigma).sample(
        samples, 5 * bound, start=10_000, sampler=sampler, head_ids=range(trials)
    )
    longest = masks.bandwidth() + 1
    share = np.mean(longest > bound)
    assert share <= delta + 3 * math.sqrt(delta * (1 - delta) / trials)
    assert share >= delta / 4  # not vacuous: iid exceeds it about as often as stated
    assert np.all(longest <= theory.block_size_bound(sigma, samples, 1e-6))


def test_block_size_bound_is_capped_by_the_axis_of_positions():
    assert theory.block_size_bound(1e12, 16, 0.01) == 1 << 30
    assert type(theory.block_size_bound(32.0, 16, 0.01)) is int


# --- theorem 2.2 ----------------------------------------------------------------------------------


def both_outputs(q, k, v, mean_mask, sigma, causal):
    """Outputs of single heads, approximate and exact, with the exact lse."""
    q, k, v = (x[None, None] for x in (q, k, v))
    options = {"causal": causal, "scale": 1.0}
    near = oracle(q, k, v, weight=mean_mask, **options)
    exact = oracle(q, k, v, slopes=[1 / sigma], **options)
    return near.out[0, 0], exact.out[0, 0], exact.lse[0, 0]


def matrix_error(mean_mask, sigma, causal):
    error = mean_mask - laplace(len(mean_mask), sigma)
    return np.tril(error) if causal else error


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("samples", [1, 16])
@pytest.mark.parametrize("sigma", [2.0, 16.0])
def test_output_error_bound_is_never_exceeded_on_random_inputs(sigma, samples, spread, causal):
    n, d = 64, 4
    rng = np.random.default_rng(samples)
    masks = plsh.RandomBinning(sigma).sample(samples, n, sampler="iid", head_ids=range(3))
    for h in range(3):
        q, k, v = (rng.normal(size=(n, d)) for _ in range(3))
        q *= spread
        near, exact, lse = both_outputs(q, k, v, masks.mean_mask(h), sigma, causal)
        error = np.linalg.norm(matrix_error(masks.mean_mask(h), sigma, causal), 2)
        bound = theory.output_error_bound(error, q, k, v, lse, scale=1.0)
        assert np.linalg.norm(near - exact) <= bound


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strength", [0.1, 1.0, 3.0])
def test_output_error_bound_is_never_exceeded_on_adversarial_inputs(strength, causal):
    n, sigma = 48, 8.0
    mean_mask = plsh.RandomBinning(sigma).sample(4, n, sampler="iid", seed=3).mean_mask(0)
    error = matrix_error(mean_mask, sigma, causal)
    left, values, right = np.linalg.svd(error)
    slack = []
    for i in range(4):
        # Logits and values along the error's own singular vectors.
        q = strength * left[:, i : i + 1] / np.abs(left[:, i]).max()
        k = right[i][:, None] / np.abs(right[i]).max()
        for v in (right[i][:, None], np.sign(right[i])[:, None]):
            near, exact, lse = both_outputs(q, k, v, mean_mask, sigma, causal)
            bound = theory.output_error_bound(values[0], q, k, v, lse, scale=1.0)
            assert np.linalg.norm(near - exact) <= bound
            slack.append(bound / np.linalg.norm(near - exact))
    if strength < 1:  # not vacuous; the first causal row alone sets the least denominator
        assert min(slack) < (100 if causal else 10)


def test_triangle_of_the_error_stays_below_the_stated_factor():
    for n in (1, 2, 33, 64):
        error = np.random.default_rng(n).normal(size=(n, n))
        factor = 1 + math.ceil(math.log2(n))
        assert np.linalg.norm(np.tril(error), 2) <= factor * np.linalg.norm(error, 2)


def test_output_error_bound_is_the_proven_formula():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(5, 4)), rng.normal(size=(7, 4)), rng.normal(size=(7, 2))
    lse = rng.normal(size=5)
    longest = [max(np.sqrt((x**2).sum(axis=1))) for x in (q, k, v)]
    gamma = math.exp(0.3 * longest[0] * longest[1])
    size = math.sqrt((v**2).sum()) + math.sqrt(7) * longest[2]
    expected = gamma * 0.2 * size / np.exp(lse).min()
    assert theory.output_error_bound(0.2, q, k, v, lse, 0.3) == pytest.approx(expected, rel=1e-12)


def test_output_error_bound_serves_each_head_and_any_array():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, n, 4)).astype("float32") for n in (5, 7, 7))
    lse = rng.normal(size=(2, 3, 5)).astype("float32")
    errors = np.array([0.1, 0.0, 0.3])
    bound = theory.output_error_bound(errors, q, k, v, lse)
    assert bound.shape == (2, 3)
    assert np.all(bound[:, 1] == 0)
    assert bound[1, 2] == theory.output_error_bound(0.3, q[1, 2], k[1, 2], v[1, 2], lse[1, 2])
    assert np.array_equal(bound, theory.output_error_bound(errors, q, k, v, lse, 0.5))
    assert np.array_equal(bound, theory.output_error_bound(errors, q, k, v, lse, -0.5))
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, lse)]
    assert np.array_equal(bound, theory.output_error_bound(errors, *tensors))


def test_output_error_bound_leaves_out_rows_that_see_no_key():
    x = np.ones((3, 2))
    alive = theory.output_error_bound(0.1, x, x, x, np.array([0.0, 1.0, 2.0]))
    assert theory.output_error_bound(0.1, x, x, x, np.array([-np.inf, 0.0, 1.0])) == alive
    assert theory.output_error_bound(0.1, x, x, x, np.full(3, -np.inf)) == 0.0
    assert theory.output_error_bound(0.1, 1e200 * x, 1e200 * x, x, np.zeros(3)) == math.inf


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tol", [1e-9, 1e-3, 0.5])
def test_weights_beyond_the_window_width_are_below_tol(tol):
    slopes = np.array([plsh.alibi_slopes(8), np.linspace(0.001, 3.0, 8)])
    widths = theory.window_width(slopes, tol)
    assert widths.shape == (2, 8)
    assert widths.dtype == np.int64
    assert np.all(np.exp(-slopes * (widths + 1)) < tol)
    assert np.all(np.exp(-slopes * (widths - 1)) > tol)
    for slope, width in zip(slopes[0], widths[0], strict=True):
        assert theory.window_width(slope, tol) == width


def test_window_width_is_the_one_that_a_window_by_tol_uses():
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(1, 3, 40, 4)) for _ in range(3))
    slopes = [0.5, 0.3, 0.0]
    widths = theory.window_width(slopes, 0.02)
    assert widths[2] == theory.window_width(0, 0.02) == UNLIMITED
    assert type(theory.window_width(0, 0.02)) is int
    by_tol = plsh.attention(q, k, v, slopes=slopes, method=plsh.Window(tol=0.02))
    by_width = plsh.attention(q, k, v, slopes=slopes, method=plsh.Window(widths))
    assert np.array_equal(by_tol, by_width)
    shorter = plsh.attention(q, k, v, slopes=slopes, method=plsh.Window(widths - 1))
    assert not np.array_equal(by_tol, shorter)


# --- what a window leaves out ---------------------------------------------------------------------


def measured(q, k, v, slopes, widths, **where):
    """Share beyond the window, distance of the outputs, and the windowed lse, by the oracle."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    widths = np.broadcast_to(widths, q.shape[1])
    exact = oracle(q, k, v, slopes=slopes, **where)
    window = oracle(q, k, v, slopes=slopes, widths=widths, **where)
    q_at, k_at = (
        np.broadcast_to(where[name], q.shape[0])[:, None] + np.arange(x.shape[2])
        for name, x in (("q_offset", q), ("k_offset", k))
    )
    distance = np.abs(q_at[:, :, None] - k_at[:, None, :])
    beyond = decay_weight(slopes, distance) * (distance[:, None] > widths[:, None, None])
    rest = oracle(q, k, v, weight=beyond, **where)
    alive = np.isfinite(exact.lse)
    share = np.exp(np.where(alive, rest.lse, -np.inf) - np.where(alive, exact.lse, 0.0))
    share *= 1 - 1e-12  # the oracle's own rounding
    return share, np.linalg.norm(exact.out - window.out, axis=-1), window.lse


def check_never_exceeded(q, k, v, slopes, widths, lse=None, **where):
    """Return the bound, after checking it against the oracle."""
    share, distance, window_lse = measured(q, k, v, slopes, widths, **where)
    lse = window_lse if lse is None else lse
    bound = theory.truncation_error_bound(q, k, lse, slopes, widths, **where)
    assert bound.dtype == np.float64
    assert bound.shape == share.shape
    assert np.all((bound >= 0) & (bound <= 1))
    assert np.all(share <= bound)
    group = q.shape[1] // k.shape[1]
    largest = np.linalg.norm(np.asarray(v, dtype=np.float64), axis=-1).max(axis=-1, initial=0.0)
    reach = 2 * np.repeat(largest, group, axis=1)[..., None]
    rounding = 1e-12 * (1 + reach)
    assert np.all(distance <= bound * reach + rounding)
    return bound


@st.composite
def calls(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, kv_heads, group = (draw(st.integers(1, 2)) for _ in range(3))
    heads, dim = kv_heads * group, draw(st.sampled_from([1, 3, 8]))
    len_q, len_k = draw(st.integers(1, 16)), draw(st.integers(0, 16))
    std = draw(st.sampled_from([1.0, 3.0]))
    q = std * rng.normal(size=(batch, heads, len_q, dim))
    k = std * rng.normal(size=(batch, kv_heads, len_k, dim))
    v = rng.normal(size=(batch, kv_heads, len_k, draw(st.sampled_from([1, 4]))))
    adversary = draw(st.sampled_from(["none", "aligned", "near anti-aligned", "one far key"]))
    where = {
        "causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 1.0, -0.5, 0.0])),
        "q_offset": draw(st.integers(0, 20)),
        "k_offset": draw(st.one_of(st.integers(0, 20), st.just(tuple(range(3, 3 + batch))))),
    }
    width = st.integers(0, 12)
    widths = draw(st.one_of(width, st.lists(width, min_size=heads, max_size=heads)))
    shape = (heads,) if draw(st.booleans()) else (batch, heads)
    slopes = rng.choice([0.0, 1e-3, 0.1, 0.5, 3.0], size=shape)
    sign = -1.0 if (where["scale"] or 1.0) < 0 else 1.0
    if adversary != "none":
        along = rng.normal(size=dim)
        along /= np.linalg.norm(along)
        norms = np.linalg.norm(q, axis=-1, keepdims=True)
        q, top = norms * along, std * math.sqrt(dim)
        k = np.broadcast_to(sign * top * along, k.shape).copy()
        if adversary == "near anti-aligned":  # near the first query, that is
            first = np.broadcast_to(where["k_offset"], batch)
            near = np.abs(first[:, None] + np.arange(len_k) - where["q_offset"]) <= np.min(widths)
            k[np.broadcast_to(near[:, None], k.shape[:3])] *= -1
        elif adversary == "one far key" and len_k:
            k[:, :, 1:] = 0
            v[:, :, 0] = 10
    return q, k, v, slopes, widths, where


@settings(max_examples=200, deadline=None)
@given(calls())
def test_truncation_bound_is_never_exceeded(call):
    q, k, v, slopes, widths, where = call
    check_never_exceeded(q, k, v, slopes, widths, **where)


@pytest.mark.parametrize("std", [1.0, 3.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [0, 6, [0, 3, 40, 20]])
def test_truncation_bound_holds_from_the_float32_lse_of_a_window(widths, causal, std):
    rng = np.random.default_rng(7)
    q, k, v = (
        (std * rng.normal(size=shape)).astype("float32")
        for shape in ((2, 4, 30, 64), (2, 2, 50, 64), (2, 2, 50, 8))
    )
    slopes = np.array([0.5, 0.1, 0.0, 0.3])
    where = {"causal": causal, "scale": None, "q_offset": 25, "k_offset": 5}
    lse = plsh.attention(
        q, k, v, slopes=slopes, method=plsh.Window(widths), return_lse=True, **where
    ).lse
    assert lse.dtype == np.float32
    check_never_exceeded(q, k, v, slopes, widths, lse, **where)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_truncation_bound_is_attained_where_all_keys_are_parallel_to_the_queries(
    dtype, layout, causal
):
    """Equality at every row, so a miscounted key, side, head or position shows at once."""
    rng = np.random.default_rng(11)
    along = np.array([0.6, 0.0, 0.8])
    q = (rng.uniform(0.5, 2.0, size=(2, 6, 30, 1)) * along).astype(dtype)
    k = np.broadcast_to(np.array([0.3, 1.0, 2.0])[:, None, None] * along, (2, 3, 40, 3))
    k = k.astype(dtype)
    v = rng.normal(size=(2, 3, 40, 2)).astype(dtype)
    slopes = np.array([[0.0, 0.25, 0.5, 0.01, 0.1, 2.0], [0.3, 0.0, 0.25, 0.05, 1.0, 0.1]])
    widths = [0, 3, 7, 12, 1, 60]
    where = {"causal": causal, "scale": None, "q_offset": (12, 0), "k_offset": (4, 7)}
    share, _, lse = measured(q, k, v, slopes, widths, **where)
    lse = lse.astype(dtype)
    if layout == "bshd":
        q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    bound = theory.truncation_error_bound(q, k, lse, slopes, widths, layout=layout, **where)
    assert np.all(share <= bound)  # although half of the lse were rounded up
    np.testing.assert_allclose(bound, share, rtol=1e-4 if dtype == "float32" else 1e-11)
    assert np.any(share > 0.01)
    assert np.any(share == 0)


def test_truncation_bound_is_tight_when_the_near_keys_point_away():
    """A window that looks harmless by its weights alone and loses nearly everything."""
    along = np.array([1.0, -1.0])
    q = 2.0 * along[None, None, None]
    k = np.broadcast_to(3.0 * along, (1, 1, 100, 2)).copy()
    k[:, :, 80:] *= -1
    v = np.random.default_rng(0).normal(size=(1, 1, 100, 3))
    where = {"causal": True, "scale": None, "q_offset": 99, "k_offset": 0}
    bound = check_never_exceeded(q, k, v, [0.2], 19, **where)
    share, _, _ = measured(q, k, v, [0.2], 19, **where)
    assert share > 0.99
    np.testing.assert_allclose(bound, share, rtol=1e-11)


def test_truncation_bound_certifies_a_wide_window_of_ordinary_inputs():
    rng = np.random.default_rng(5)
    q, k, v = (rng.normal(size=(1, 2, 400, 16)).astype("float32") for _ in range(3))
    slopes = [0.25, 0.5]
    widths = theory.window_width(slopes, 1e-12)
    lse = plsh.attention(q, k, v, slopes=slopes, method=plsh.Window(widths), return_lse=True).lse
    bound = theory.truncation_error_bound(q, k, lse, slopes, widths)
    assert 0 < bound.max() < 1e-6


def test_rows_that_keep_nothing_have_lost_everything_or_nothing():
    """Dead rows: share 1 if a key is beyond the window, 0 if no key is visible at all."""
    q, k = np.ones((1, 1, 4, 2)), np.ones((1, 1, 2, 2))
    dead = np.full((1, 1, 4), -np.inf)
    places = {"q_offset": 0, "k_offset": 2}
    causal = theory.truncation_error_bound(q, k, dead, [1.0], 0, causal=True, **places)
    assert causal.tolist() == [[[0, 0, 0, 1]]]
    for slope in (0.0, 1.0, 1e308):
        both = theory.truncation_error_bound(q, k, dead, [slope], 1, **places)
        assert both.tolist() == [[[1, 1, 0, 0]]]
    none = theory.truncation_error_bound(q, k[:, :, :0], dead, [1.0], 0, **places)
    assert none.tolist() == [[[0] * 4]]


def test_bound_of_a_limitless_window_is_zero():
    x = np.random.default_rng(0).normal(size=(2, 9, 3))
    assert not theory.truncation_error_bound(x, x, np.zeros((2, 9)), [0.0, 0.1], UNLIMITED).any()


def test_huge_logits_and_slopes_give_a_bound_without_overflow():
    q = k = np.full((1, 1, 5, 4), 1e30)
    lse = np.full((1, 1, 5), 1e300)
    near = theory.truncation_error_bound(q, k, lse, [1e-300], 1)
    assert np.all((near >= 0) & (near <= 1))
    assert np.all(theory.truncation_error_bound(1e200 * q, k, lse, [0.0], 1) == 1)
    assert not theory.truncation_error_bound(0 * q, k, 0 * lse, [1e308], 1).any()
    tiny = theory.truncation_error_bound(0 * q, k, 0 * lse, [5e-324], 1)
    assert tiny == pytest.approx(theory.truncation_error_bound(0 * q, k, 0 * lse, [0.0], 1))


def test_truncation_bound_takes_unbatched_empty_and_framework_arrays():
    rng = np.random.default_rng(2)
    q, k = (rng.normal(size=(1, h, 20, 4)).astype("float32") for h in (4, 2))
    lse = rng.normal(size=(1, 4, 20)).astype("float32")
    slopes = plsh.alibi_slopes(4)
    bound = theory.truncation_error_bound(q, k, lse, slopes, 5)
    one = theory.truncation_error_bound(q[0], k[0], lse[0], None, 5)
    assert one.shape == (4, 20)
    assert np.array_equal(one, bound[0])
    for asarray in (torch.from_numpy, jnp.asarray):
        args = [asarray(x) for x in (q, k, lse)]
        other = theory.truncation_error_bound(*args, asarray(slopes.astype("float32")), 5)
        assert np.array_equal(other, bound)
    at = torch.tensor([3])
    moved = theory.truncation_error_bound(q, k, lse, slopes, 5, q_offset=at, k_offset=at)
    assert np.array_equal(moved, bound)
    empty = theory.truncation_error_bound(q[:0], k[:0], lse[:0], slopes, 5, q_offset=())
    assert empty.shape == (0, 4, 20)
    no_heads = theory.truncation_error_bound(q[:, :0], k[:, :0], lse[:, :0], None, 5)
    assert no_heads.shape == (1, 0, 20)


def test_hidden_segments_only_lessen_the_share():
    rng = np.random.default_rng(4)
    q, k, v = (rng.normal(size=(1, 1, 40, 4)) for _ in range(3))
    ids = np.sort(rng.integers(0, 3, size=(1, 40)))
    options = {"slopes": [0.1], "segment_ids": ids}
    window = oracle(q, k, v, widths=[5], **options)
    exact = oracle(q, k, v, **options)
    bound = theory.truncation_error_bound(q, k, window.lse, [0.1], 5)
    assert np.all(1 - np.exp(window.lse - exact.lse) <= bound)


# --- invalid arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: theory.psi(0.0), ValueError, "sigma must be finite and > 0, got 0.0"),
        (lambda: theory.psi([1.0, -2.0]), ValueError, "sigma must be finite and > 0"),
        (lambda: theory.psi(math.nan), ValueError, "sigma must be finite and > 0, got nan"),
        (lambda: theory.psi(math.inf), ValueError, "sigma must be finite"),
        (lambda: theory.psi("32"), TypeError, "sigma must be made of real numbers, got '32'"),
        (lambda: theory.psi(True), TypeError, "sigma must be made of real numbers, got True"),
        (lambda: theory.spectral_error_bound(0, 4, 1.0), ValueError, "n must be >= 1, got 0"),
        (lambda: theory.spectral_error_bound(9.0, 4, 1.0), TypeError, "n must be an integer"),
        (lambda: theory.spectral_error_bound(9, 0, 1.0), ValueError, "samples must be >= 1"),
        (lambda: theory.spectral_error_bound(9, 1.5, 1.0), TypeError, "samples must be an int"),
        (lambda: theory.spectral_error_bound(9, 4, 1.0, 1.0), ValueError, "delta must be one num"),
        (lambda: theory.spectral_error_bound(9, 4, 1.0, 0), ValueError, r"\(0, 1\), got 0"),
        (lambda: theory.samples_for(9, 1.0, 0.0, 0.1), ValueError, "eps must be finite and > 0"),
        (lambda: theory.samples_for(9, 1.0, 1e-200, 0.1), ValueError, "eps must be reachable"),
        (lambda: theory.samples_for(9, [1.0], 0.1, 0.1), ValueError, "sigma must be one number"),
        (lambda: theory.samples_for(9, 1.0, 0.1, None), TypeError, "delta must be made of real"),
        (lambda: theory.block_size_bound(1.0, 4, 1.5), ValueError, "delta must be one number"),
        (lambda: theory.block_size_bound(-1.0, 4, 0.5), ValueError, "sigma must be finite and >"),
        (lambda: theory.window_width(-1.0, 0.1), ValueError, "slope must be finite and >= 0"),
        (lambda: theory.window_width(math.inf, 0.1), ValueError, "slope must be finite and >= 0"),
        (lambda: theory.window_width(1.0, 1), ValueError, "tol must be one number in"),
        (lambda: theory.window_width("a", 0.1), TypeError, "slope must be made of real numbers"),
    ],
)
def test_scalar_bounds_refuse_what_breaks_their_rules(call, error, message):
    with pytest.raises(error, match=message):
        call()


X = np.ones((5, 4))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"spectral_error": -0.1}, ValueError, "spectral_error must be finite and >= 0, got -0.1"),
        ({"spectral_error": [1, 2]}, ValueError, "spectral_error must broadcast to .* got shape"),
        ({"q": X[0]}, ValueError, r"q must have shape \(..., N, D\), got \(4,\)"),
        ({"q": X[None]}, ValueError, "q, k, v must have one leading shape"),
        ({"k": X[:, :3]}, ValueError, "q and k must have one head dim D"),
        ({"q": X[:, :0], "k": X[:, :0]}, ValueError, "head dim D >= 1"),
        ({"v": X[:3]}, ValueError, "k and v must have one length"),
        ({"v": X * np.nan}, ValueError, "v must be finite"),
        ({"k": [[1.0]]}, TypeError, "k must be an array, got list"),
        ({"k": X.astype(int)}, TypeError, "k must have a dtype of .* got int64"),
        ({"lse": np.zeros(4)}, ValueError, r"lse must have shape \(5,\), got \(4,\)"),
        ({"lse": np.full(5, np.nan)}, ValueError, "lse must be finite or -inf"),
        ({"lse": np.zeros(5, "float16")}, TypeError, "lse must have a dtype of"),
        ({"scale": "1"}, TypeError, "scale must be a number"),
    ],
)
def test_output_error_bound_refuses_what_breaks_its_rules(changed, error, message):
    arguments = {"spectral_error": 0.1, "q": X, "k": X, "v": X, "lse": np.zeros(5), **changed}
    with pytest.raises(error, match=message):
        theory.output_error_bound(**arguments)


Q, K = np.ones((2, 4, 5, 3)), np.ones((2, 2, 5, 3))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": Q[0, 0]}, ValueError, r"q must have shape \(batch, heads, len, dim\)"),
        ({"q": Q[0]}, ValueError, "q and k must have one batch size"),
        ({"k": K[:1]}, ValueError, "q and k must have one batch size"),
        ({"k": K[..., :2]}, ValueError, "q and k must have one head dim D"),
        ({"k": np.ones((2, 3, 5, 3))}, ValueError, r"heads of q \(4\) must be a multiple"),
        ({"q": Q * np.inf}, ValueError, "q must be finite"),
        ({"q": Q.tolist()}, TypeError, "q must be an array, got list"),
        ({"lse": np.zeros((2, 5, 4))}, ValueError, r"lse must have shape \(2, 4, 5\)"),
        ({"lse": np.full((2, 4, 5), np.inf)}, ValueError, "lse must be finite or -inf"),
        ({"slopes": [0.1] * 3}, ValueError, r"slopes must have shape \(H,\) = \(4,\)"),
        ({"slopes": [-0.1] * 4}, ValueError, "slopes must be finite and >= 0"),
        ({"width": -1}, ValueError, "width must be >= 0"),
        ({"width": [1, 2]}, ValueError, r"width must be an int or one per head \(4\), got 2"),
        ({"width": 2.5}, TypeError, "width must be an int"),
        ({"width": None}, TypeError, "width must be an int or one int per head, got None"),
        ({"causal": 1}, TypeError, "causal must be a bool"),
        ({"layout": "hsd"}, ValueError, "layout must be one of"),
        ({"k": K[:, :, :3]}, ValueError, "q_offset must be given when the lengths differ"),
        ({"q_offset": 1.5}, TypeError, "q_offset must be an int"),
        ({"k_offset": [1, 2, 3]}, ValueError, "k_offset must be an int or 2 ints"),
        ({"k_offset": 2**30 - 1}, ValueError, "offset must leave all positions below"),
    ],
)
def test_truncation_bound_refuses_what_breaks_its_rules(changed, error, message):
    arguments = {"q": Q, "k": K, "lse": np.zeros((2, 4, 5)), "slopes": [0.1] * 4, "width": 2}
    with pytest.raises(error, match=message):
        theory.truncation_error_bound(**{**arguments, **changed})


def test_values_that_cannot_be_read_are_refused():
    meta = torch.ones((5, 4), device="meta")
    with pytest.raises(TypeError, match="q must be concrete, got a traced array"):
        theory.output_error_bound(0.1, meta, X, X, np.zeros(5))


def test_all_names_are_public_and_carry_their_requirement():
    for i, name in enumerate(
        [
            "psi",
            "spectral_error_bound",
            "samples_for",
            "block_size_bound",
            "output_error_bound",
            "window_width",
            "truncation_error_bound",
        ],
        start=1,
    ):
        assert name in theory.__all__
        assert f"Spec: THY-{i}." in getattr(theory, name).__doc__
