"""The tools that judge: seeded inputs and assertions, which must be able to fail."""

import math

import numpy as np
import pytest
import torch
from namespaces import NAMESPACES, to_numpy

import plsh
from plsh import testing

ONES = np.ones((1, 2, 3, 4))


def close(actual, expected=ONES, like=ONES, **options):
    testing.assert_attention_close(actual, expected, expected, like=like, **options)


COMPARATORS = {
    "attention": close,
    "rounding": testing.assert_equal_to_rounding,
    "identical": testing.assert_identical,
}


@pytest.mark.parametrize("compare", COMPARATORS.values(), ids=COMPARATORS)
def test_equal_arrays_pass(compare):
    compare(ONES.copy(), ONES)
    compare(np.full((2, 2), -math.inf), np.full((2, 2), -math.inf))
    compare(np.zeros((0, 3)), np.zeros((0, 3)))


@pytest.mark.parametrize("compare", COMPARATORS.values(), ids=COMPARATORS)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_on_one_side_fails(compare, odd):
    """U011: NaN in the reference must not hide a number, nor the reverse."""
    broken = ONES.copy()
    broken[0, 1, 2, 3] = odd
    with pytest.raises(AssertionError, match=r"NaN|infinite"):
        compare(broken, ONES)
    with pytest.raises(AssertionError, match=r"NaN|infinite"):
        compare(ONES, broken)
    with pytest.raises(AssertionError, match=r"NaN|infinite"):
        compare(np.zeros_like(ONES), broken)


@pytest.mark.parametrize("compare", COMPARATORS.values(), ids=COMPARATORS)
def test_nan_on_both_sides_fails(compare):
    """A reference that is NaN proves nothing."""
    with pytest.raises(AssertionError, match="NaN"):
        compare(np.full(3, np.nan), np.full(3, np.nan))


@pytest.mark.parametrize("compare", COMPARATORS.values(), ids=COMPARATORS)
def test_infinities_of_opposite_sign_fail(compare):
    with pytest.raises(AssertionError, match="infinite"):
        compare(np.full(3, math.inf), np.full(3, -math.inf))


@pytest.mark.parametrize("compare", COMPARATORS.values(), ids=COMPARATORS)
def test_a_shape_that_only_broadcasts_fails(compare):
    """U011: (n, d) against (1, d)."""
    with pytest.raises(AssertionError, match="shape"):
        compare(np.ones((1, 4)), np.ones((3, 4)))
    with pytest.raises(AssertionError, match="shape"):
        compare(np.ones((3, 4)), np.ones((1, 4)))


def test_another_dtype_fails():
    """U011: the dtype is checked before values."""
    with pytest.raises(AssertionError, match="dtype float64, got float32"):
        close(ONES.astype(np.float32))
    with pytest.raises(AssertionError, match="dtype float32, got float64"):
        close(ONES, dtype="float32")
    for compare in (testing.assert_equal_to_rounding, testing.assert_identical):
        with pytest.raises(AssertionError, match="dtype"):
            compare(ONES.astype(np.float32), ONES)


def test_another_namespace_fails(strict):
    """U011: NumPy where torch was given, and the reverse."""
    tensor = torch.ones((1, 2, 3, 4), dtype=torch.float64)
    with pytest.raises(AssertionError, match="torch array"):
        close(ONES, like=tensor)
    with pytest.raises(AssertionError, match="numpy array"):
        close(tensor)
    with pytest.raises(AssertionError, match="array-api array"):
        close(ONES, like=strict.asarray(ONES))
    for compare in (testing.assert_equal_to_rounding, testing.assert_identical):
        with pytest.raises(AssertionError, match="numpy array"):
            compare(tensor, ONES)


def test_another_device_fails(strict):
    here, there = (strict.asarray(ONES, device=strict.Device(d)) for d in ("CPU_DEVICE", "device1"))
    with pytest.raises(AssertionError, match=r"must be on .*device1.*, got .*CPU_DEVICE"):
        close(here, like=there)


def test_tolerance_is_measured_and_reported():
    """err <= factor * (plain error + eps * max|ref|): just inside passes, just outside fails."""
    expected, plain = 4 * ONES, 4 * ONES + 1e-3
    for factor in (testing.FORWARD, testing.BACKWARD):
        limit = factor * (1e-3 + 4 * 2.0**-52)
        testing.assert_attention_close(
            expected + 0.999 * limit, expected, plain, like=ONES, factor=factor
        )
        with pytest.raises(AssertionError, match=r"error 2\.0.*e-03|error 3\.0.*e-03") as caught:
            testing.assert_attention_close(
                expected + 1.001 * limit, expected, plain, like=ONES, factor=factor
            )
        assert f"tolerance {limit:.3e}" in str(caught.value)
    assert (testing.FORWARD, testing.BACKWARD) == (2.0, 3.0)


def test_a_plain_computation_that_overflows_is_no_yardstick():
    with pytest.raises(AssertionError, match="plain"):
        testing.assert_attention_close(ONES, ONES, math.inf * ONES, like=ONES)


def test_identical_means_every_bit():
    other = ONES.copy()
    other[0, 0, 0, 0] = np.nextafter(1, 2)
    with pytest.raises(AssertionError, match="1 of 24 values differ"):
        testing.assert_identical(other, ONES)


def test_rounding_scales_with_the_values():
    testing.assert_equal_to_rounding(100 * ONES + 1e-13, 100 * ONES)
    with pytest.raises(AssertionError, match="difference"):
        testing.assert_equal_to_rounding(100 * ONES + 1e-11, 100 * ONES)


def check_gradient_error_is_seen(which: str) -> None:
    inputs = testing.make_inputs(1, 2, 1, 5, 5, 3, 4, "float64")
    call = {"slopes": [0.5, 0.1], "grad_out": inputs.grad_out, "grad_lse": inputs.grad_lse}
    right = testing.oracle(*inputs[:3], **call)
    plain = testing.plain_attention(*inputs[:3], dtype="float64", **call)
    grads = [right.q, right.k, right.v, right.slopes]
    testing.assert_gradients_close(grads, right, plain, like=inputs.q)
    testing.assert_gradients_close([*grads[:3], None], right, plain, like=inputs.q)
    index = ("q", "k", "v", "slopes").index(which)
    grads[index] = grads[index] * (1 + 1e-9)
    testing.assert_gradients_close(grads, right, plain, like=inputs.q)


@pytest.mark.parametrize("which", ["q", "k", "v", "slopes"])
def test_an_error_in_one_gradient_fails(which):
    with pytest.raises(AssertionError, match=f"gradient by {which}"):
        check_gradient_error_is_seen(which)


def test_an_error_in_the_lse_alone_fails():
    inputs = testing.make_inputs(1, 1, 1, 5, dtype="float32")
    right = testing.oracle(*inputs[:3], slopes=[0.5])
    plain = testing.plain_attention(*inputs[:3], dtype="float32", slopes=[0.5])
    out, lse = right.out.astype(np.float32), right.lse.astype(np.float32)
    testing.assert_output_close(plsh.AttentionOutput(out, lse), right, plain, like=inputs.q)
    with pytest.raises(AssertionError, match="lse"):
        testing.assert_output_close(
            plsh.AttentionOutput(out, lse + 1e-3), right, plain, like=inputs.q
        )


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("float16", 1e-5, 1e-2),
        ("bfloat16", 1e-4, 5e-2),
        ("float32", 1e-9, 1e-5),
        ("float64", 1e-18, 1e-13),
    ],
)
def test_plain_computation_errs_as_its_precision_does(dtype, low, high):
    inputs = testing.make_inputs(2, 4, 2, 40, dtype=dtype)
    call = {
        "slopes": [0.5, 0.1, 0.02, 0.0],
        "causal": True,
        "grad_out": inputs.grad_out,
        "grad_lse": inputs.grad_lse,
    }
    right = testing.oracle(*inputs[:3], **call)
    plain = testing.plain_attention(*inputs[:3], dtype=dtype, **call)
    for name in ("out", "q", "k", "v"):
        error = np.max(np.abs(getattr(plain, name) - getattr(right, name)))
        assert low < error < high, name
    assert np.max(np.abs(plain.lse - right.lse)) < min(high, 1e-5)  # P is not rounded in it


def test_plain_computation_needs_one_kind_of_weight():
    x = ONES
    for given in ({}, {"weight": 1.0, "slopes": [0.0, 0.0]}):
        with pytest.raises(ValueError, match="weight or slopes"):
            testing.plain_attention(x, x, x, dtype="float64", **given)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_inputs_are_exact_in_their_dtype(name, dtype):
    ns = NAMESPACES[name]
    inputs = testing.make_inputs(2, 4, 2, 6, 7, 3, 5, dtype)
    assert [x.shape for x in inputs] == [
        (2, 4, 6, 3),
        (2, 2, 7, 3),
        (2, 2, 7, 5),
        (2, 4, 6, 5),
        (2, 4, 6),
    ]
    with ns.scope():
        for x in inputs[:4]:
            np.testing.assert_array_equal(to_numpy(ns.asarray(x, dtype)), x)
    assert inputs.grad_lse.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_inputs_depend_on_the_seed_alone():
    state = np.random.get_state()[1].copy()  # noqa: NPY002 (the global state)
    first, again, other = (testing.make_inputs(seed=seed) for seed in (1, 1, 2))
    for a, b, c in zip(first, again, other, strict=True):
        testing.assert_identical(a, b)
        assert not np.array_equal(a, c)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    assert testing.make_inputs(None, 4, 2, 5).q.shape == (4, 5, 16)
    wide = testing.make_inputs(std=100.0)
    assert np.std(wide.q) > 90
    assert np.std(wide.v) < 2


def test_rounding_to_bfloat16_is_that_of_torch():
    """Half to even, over exponents, subnormals, infinities and NaN."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32)
    edge = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x80000001], np.uint32)
    values = np.concatenate([bits, edge]).view(np.float32)
    values = values[~np.isnan(values)]
    want = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(testing.round_to(values, "bfloat16"), want)
    assert np.isnan(testing.round_to(np.nan, "bfloat16"))


@pytest.mark.parametrize("dtype", ["int32", "float8", "f32"])
def test_an_unknown_dtype_of_inputs_is_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be"):
        testing.make_inputs(dtype=dtype)


def test_strict_settings_are_held_and_restored():
    import array_api_strict as xp

    before = xp.get_array_api_strict_flags()
    with NAMESPACES["strict"].scope():
        held = xp.get_array_api_strict_flags()
        with pytest.raises(RuntimeError, match="data-dependent"):
            xp.nonzero(xp.asarray([1]))
    assert xp.get_array_api_strict_flags() == before != held
    assert not held["boolean_indexing"]
