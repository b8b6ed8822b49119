"""Flax's attention function and `jax.nn.dot_product_attention` on the JAX backend."""

import jax
import jax.numpy as jnp
import numpy as np
import plsh_jax
import pytest
from laws import inputs

import plsh


def arrays(n=20, heads=2):
    shape = {"heads": heads, "kv_heads": heads, "value_dim": 8}
    q, k, v = inputs(n, dtype="float32", **shape)
    return tuple(jnp.asarray(x).swapaxes(1, 2) for x in (q, k, v))


def flax_keywords(**changed):
    """What nnx and linen pass in evaluation."""
    return {
        "mask": None, "dropout_rng": None, "dropout_rate": 0.0, "broadcast_dropout": False,
        "deterministic": True, "dtype": jnp.float32, "precision": None, "module": None,
    } | changed  # fmt: skip


def test_slope_0_equals_jax_nn():
    q, k, v = arrays()
    lengths = jnp.array([20, 13])
    keywords = {"is_causal": True, "scale": 0.3, "key_value_seq_lengths": lengths}
    got = plsh_jax.dot_product_attention(q, k, v, slopes=0.0, method="exact", **keywords)
    expected = jax.nn.dot_product_attention(q, k, v, **keywords)
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_local_window_equals_jax_nn():
    """U031."""
    q, k, v = arrays()
    for keywords in ({"local_window_size": 3}, {"local_window_size": (4, 0), "is_causal": True}):
        got = plsh_jax.dot_product_attention(q, k, v, slopes=0.0, **keywords)
        expected = jax.nn.dot_product_attention(q, k, v, **keywords)
        np.testing.assert_allclose(got, expected, atol=2e-6)


def test_query_lengths_give_rows_of_zeros_and_either_acts_alone():
    """U033."""
    q, k, v = arrays()
    lengths = jnp.array([20, 13])
    got = plsh_jax.dot_product_attention(q, k, v, query_seq_lengths=lengths)
    full = plsh_jax.dot_product_attention(q, k, v)
    np.testing.assert_allclose(got[1, :13], full[1, :13], atol=2e-6)
    assert not np.any(got[1, 13:])


def test_residual_is_the_lse():
    q, k, v = arrays()
    out, lse = plsh_jax.dot_product_attention(q, k, v, return_residual=True)
    expected = plsh.attention(q, k, v, layout="bshd", return_lse=True)
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(lse, expected.lse.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"bias": jnp.zeros(())}, "bias must be None.*slopes"),
        ({"mask": jnp.ones((), bool)}, "mask must be None.*is_causal"),
        ({"implementation": "cudnn"}, "implementation must be None"),
        ({"local_window_size": 3, "method": "lsh"}, "not both"),
    ],
)
def test_dot_product_attention_refuses_what_it_cannot_honour(keywords, words):
    q, k, v = arrays()
    with pytest.raises(TypeError, match=words):
        plsh_jax.dot_product_attention(q, k, v, **keywords)


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
@pytest.mark.parametrize(
    ("lengths", "kind", "words"),
    [
        (np.array([20, 21]), ValueError, r"must lie from 0 to 20, got \[20, 21\]"),
        ([20, -1], ValueError, r"must lie from 0 to 20, got \[20, -1\]"),
        ([20], ValueError, r"must have shape \(2,\), got \(1,\)"),
        (np.array([20.0, 13.0]), TypeError, "must be integers, got dtype float64"),
        ([True, True], TypeError, "must be integers, got dtype bool"),
        (jnp.array([20.0, 13.0]), TypeError, "must be integers, got dtype float32"),
        (jnp.array([True, True]), TypeError, "must be integers, got dtype bool"),
    ],
)
def test_sequence_lengths_are_checked_as_far_as_they_are_known(name, lengths, kind, words):
    q, k, v = arrays()
    with pytest.raises(kind, match=f"{name} {words}"):
        plsh_jax.dot_product_attention(q, k, v, **{name: lengths})


def test_sequence_lengths_on_the_host_and_traced_do_the_same():
    q, k, v = arrays()
    lengths = np.array([20, 13], np.int64)

    def call(lengths):
        return plsh_jax.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)

    expected = call(lengths)
    np.testing.assert_array_equal(call([20, np.int32(13)]), expected)
    np.testing.assert_array_equal(call(jnp.asarray(lengths)), expected)
    np.testing.assert_allclose(jax.jit(call)(lengths), expected, atol=2e-6)


@pytest.mark.parametrize("size", [3.5, True, "3", (1, 2, 3), (3, 3.0)])
def test_a_window_is_made_of_integers(size):
    q, k, v = arrays()
    with pytest.raises(TypeError, match="local_window_size must be an int or a pair of ints"):
        plsh_jax.dot_product_attention(q, k, v, local_window_size=size)


def test_windows_of_two_sizes_are_refused():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="one size for both sides"):
        plsh_jax.dot_product_attention(q, k, v, local_window_size=(3, 4))


def test_flax_function_equals_attention_with_its_options():
    """U107."""
    q, k, v = arrays()
    for options in ({}, {"method": "window", "causal": True}, {"slopes": 0.3, "scale": 0.7}):
        f = plsh_jax.attention_fn(**options)
        got = f(q, k, v, **flax_keywords())
        expected = plsh.attention(q, k, v, layout="bshd", **options)
        np.testing.assert_array_equal(got, expected)
    lead = f(q[:, None], k[:, None], v[:, None], **flax_keywords())
    np.testing.assert_array_equal(lead[:, 0], got)
    half = f(q, k, v, **flax_keywords(dtype=jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mask": jnp.ones((1, 1, 20, 20), bool)}, "mask must be None.*causal=True"),
        ({"bias": jnp.ones(())}, "bias must be None"),
        ({"dropout_rate": 0.1, "deterministic": False}, "dropout_rate must be 0"),
        ({"module": object()}, "module must be None"),
        ({"precision": "default"}, "precision must be None or HIGHEST"),
        ({"einsum_dot_general": max}, "einsum_dot_general must be None"),
        ({"promote": 3}, "promote must be None"),
    ],
)
def test_flax_function_refuses_what_it_cannot_honour(changed, words):
    q, k, v = arrays()
    with pytest.raises(TypeError, match=words):
        plsh_jax.attention_fn()(q, k, v, **flax_keywords(**changed))


def test_dropout_rate_in_evaluation_is_no_dropout():
    q, k, v = arrays()
    f = plsh_jax.attention_fn()
    np.testing.assert_array_equal(f(q, k, v, **flax_keywords(dropout_rate=0.3)), f(q, k, v))
