"""Flax's own modules on plsh: at slope 0 they give what they give without it."""

import jax
import jax.numpy as jnp
import numpy as np
import plsh_jax
import pytest
from flax import linen, nnx

PLAIN = plsh_jax.attention_fn("exact", slopes=0.0)


def tokens():
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, 20, 16)), jnp.float32)


def module(attention_fn=None, **options):
    own = {} if attention_fn is None else {"attention_fn": attention_fn}
    options = {"num_heads": 2, "in_features": 16, "decode": False} | own | options
    return nnx.MultiHeadAttention(rngs=nnx.Rngs(0), **options)


def loss(attend):
    return (attend(tokens(), is_causal=True) ** 2).sum()


def test_nnx_module_equals_itself_on_plsh():
    """U107."""
    theirs, ours = module(), module(PLAIN)
    for causal in (False, True):
        got = ours(tokens(), is_causal=causal)
        np.testing.assert_allclose(got, theirs(tokens(), is_causal=causal), atol=2e-6)


@pytest.mark.slow
def test_nnx_module_trains_on_plsh():
    gradients = (jax.tree.leaves(nnx.grad(loss)(module(f))) for f in (None, PLAIN))
    for expected, got in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, expected, atol=3e-5)


def test_linen_module_equals_itself_on_plsh():
    """U107."""
    theirs = linen.MultiHeadDotProductAttention(num_heads=2)
    ours = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=PLAIN)
    weights = theirs.init(jax.random.key(0), tokens())
    expected = theirs.apply(weights, tokens())
    np.testing.assert_allclose(jax.jit(ours.apply)(weights, tokens()), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "call", "words"),
    [
        ({}, {"mask": jnp.ones((2, 1, 20, 20), bool)}, "mask must be None.*causal=True"),
        ({}, {"sow_weights": True}, "module must be None"),
        ({"dropout_rate": 0.1, "deterministic": False}, {}, "dropout_rate must be 0"),
        ({"precision": "default"}, {}, "precision must be None or HIGHEST"),
    ],
)
def test_nnx_module_refuses_what_plsh_cannot_honour(options, call, words):
    attend = module(PLAIN, **options)
    with pytest.raises(TypeError, match=words):
        attend(tokens(), **call)


def test_nnx_module_that_decodes_is_refused_with_the_way_to_decode():
    attend = module(PLAIN, decode=True)
    attend.init_cache((2, 20, 16))
    with pytest.raises(TypeError, match=r"mask must be None.*decode by plsh.attention.*q_offset"):
        attend(tokens()[:, :1])
