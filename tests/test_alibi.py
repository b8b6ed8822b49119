"""ALiBi's slopes: the published recipe for any head count."""

import math

import numpy as np
import pytest

import plsh
from plsh import alibi_slopes
from plsh.testing.oracle import oracle


def press(n: int) -> list[float]:
    """The recursion of Press et al., in exponents: a power of two, then every other of twice it."""
    if n & (n - 1) == 0:
        return [2.0 ** (-8.0 * (k + 1) / n) for k in range(n)]
    power = 2 ** int(math.log2(n))
    return press(power) + press(2 * power)[0::2][: n - power]


def mpt(n: int, max_bias: float) -> np.ndarray:
    """The same by concatenation: the series of the next power of two, odd entries first."""
    power = 2 ** math.ceil(math.log2(n))
    series = 2.0 ** -(np.arange(1, power + 1) * (max_bias / power))
    return series if power == n else np.concatenate([series[1::2], series[::2]])[:n]


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [0.25, 0.0625, 2**-6, 2**-8, 0.5, 0.125]),
        (8, [2.0**-k for k in range(1, 9)]),
    ],
)
def test_slopes_of_few_heads(heads, expected):
    """U046."""
    assert alibi_slopes(heads).tolist() == expected


def test_slopes_of_head_counts_that_are_no_power_of_two():
    """U046: 12 and 40 heads were wrong elsewhere."""
    np.testing.assert_allclose(alibi_slopes(12)[-2:], [0.1767767, 0.08838835], rtol=1e-6)
    np.testing.assert_allclose(alibi_slopes(40)[[0, -1]], [0.84089642, 0.27262693], rtol=1e-7)


def test_slopes_of_no_heads_are_empty():
    """U046."""
    assert alibi_slopes(0).shape == (0,)


@pytest.mark.parametrize("heads", [*range(1, 70), 71, 96, 112, 128, 200])
def test_slopes_equal_the_published_recursion(heads):
    slopes = alibi_slopes(heads)
    assert slopes.dtype == np.float64
    assert slopes.shape == (heads,)
    np.testing.assert_allclose(slopes, press(heads), rtol=1e-15)


@pytest.mark.parametrize("heads", [1, 2, 5, 12, 16, 31, 33, 40, 64])
@pytest.mark.parametrize("max_bias", [4.0, 8, 10.5, 16.0])
def test_slopes_equal_the_concatenated_form(heads, max_bias):
    np.testing.assert_allclose(alibi_slopes(heads, max_bias), mpt(heads, max_bias), rtol=1e-15)


def test_slopes_of_40_heads_are_not_one_geometric_series():
    """U047: the default is the released code; the plain series goes in by `slopes`."""
    geometric = 2.0 ** (-8 * np.arange(1, 41) / 40)
    assert not np.allclose(alibi_slopes(40), geometric)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 40, 12, 4)) for _ in range(3))
    for given, meant in ((None, alibi_slopes(40)), (geometric, geometric)):
        out = plsh.attention(q, k, v, method="exact", slopes=given)
        np.testing.assert_allclose(out, oracle(q, k, v, slopes=meant).out, atol=1e-13)


def test_largest_exponent_can_be_raised():
    """U048: long-context models use 16; the default is 8."""
    assert alibi_slopes(32, max_bias=16)[-1] == 2.0**-16
    assert alibi_slopes(32)[-1] == 2.0**-8
    assert (alibi_slopes(32, 8.0) == alibi_slopes(32)).all()


def test_each_call_returns_its_own_array():
    alibi_slopes(4)[0] = 9.0
    assert alibi_slopes(4)[0] == 0.25


def test_numpy_integers_count_heads():
    assert (alibi_slopes(np.int64(12)) == alibi_slopes(12)).all()


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ((-1,), ValueError, "heads"),
        ((8.0,), TypeError, "heads"),
        (("8",), TypeError, "heads"),
        ((None,), TypeError, "heads"),
        ((True,), TypeError, "heads"),
        ((8, 0.0), ValueError, "max_bias"),
        ((8, -8), ValueError, "max_bias"),
        ((8, math.inf), ValueError, "max_bias"),
        ((8, math.nan), ValueError, "max_bias"),
        ((8, "8"), TypeError, "max_bias"),
        ((8, True), TypeError, "max_bias"),
        ((8, None), TypeError, "max_bias"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, name):
    with pytest.raises(error, match=name):
        alibi_slopes(*arguments)
