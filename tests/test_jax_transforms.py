"""Transforms of JAX applied to attention: each equals a loop, a difference, or the call itself."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_jax_backend import (
    COMPILES_MORE,
    METHODS,
    SLOPES,
    assert_same,
    attend,
    inputs,
    one_of,
    small,  # noqa: F401
)

import plsh
from plsh import testing


def arrays(n=24, **shape):
    return tuple(jnp.asarray(x) for x in inputs(n, **shape))


def assert_each(actual, expected):
    assert_same(jax.tree.leaves(actual), jax.tree.leaves(expected), 256.0)


def loop(f, *xs):
    return jax.tree.map(lambda *x: jnp.stack(x), *[f(*x) for x in zip(*xs, strict=True)])


def loss(q, k, v, **keywords):
    """A number to which output and lse contribute."""
    out, lse = attend(q, k, v, **keywords)
    return (out**2).sum() + jnp.sin(lse).sum()


@COMPILES_MORE
@pytest.mark.parametrize("method", ["lsh", "exact"])
def test_jit_equals_eager(method):
    q, k, v = arrays()
    f = lambda *x: attend(*x, method=method, causal=True)  # noqa: E731
    assert_each(jax.jit(f)(q, k, v), f(q, k, v))


@pytest.mark.parametrize("method", one_of("window", "lsh", "set"))
def test_vmap_over_some_operands_equals_a_loop(method):
    """U023, U076."""
    q, k, v = arrays()
    f = lambda q: attend(q, k[0], v[0], method=method, causal=True)  # noqa: E731
    assert_each(jax.vmap(f)(q), loop(f, q))


@COMPILES_MORE
@pytest.mark.parametrize("method", ["window", "lsh", "set"])
def test_vmap_over_offsets_equals_a_loop(method):
    """U023, U076."""
    q, k, v = arrays()
    f = lambda o: attend(q, k, v, method=method, causal=True, q_offset=o, k_offset=1)  # noqa: E731
    offsets = jnp.array([0, 7])
    assert_each(jax.vmap(f)(offsets), loop(f, offsets))


@COMPILES_MORE
@pytest.mark.parametrize("method", ["lsh", "set", "window"])
def test_vmap_over_segments_equals_a_loop(method):
    """U023, U076."""
    q, k, v = arrays()
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 2, (2, 2, 24)), jnp.int32)
    f = lambda ids: attend(q, k, v, method=method, segment_ids=ids)  # noqa: E731
    assert_each(jax.vmap(f)(ids), loop(f, ids))


@COMPILES_MORE
def test_vmap_over_slopes_and_vmap_of_grad_equal_a_loop():
    q, k, v = arrays()
    slopes = jnp.asarray([[0.5, 0.2], [0.1, 0.0]])
    f = lambda m: attend(q, k, v, method="window", slopes=m)  # noqa: E731
    assert_each(jax.vmap(f)(slopes), loop(f, slopes))
    g = jax.jit(jax.grad(lambda q, m: loss(q, k, v, method="window", slopes=m), (0, 1)))
    assert_each(jax.vmap(g, (None, 0))(q, slopes), loop(lambda m: g(q, m), slopes))


def difference(f, x, t, eps=1e-5):
    """The derivative in the direction t, by central differences."""
    return (f(x + eps * t) - f(x - eps * t)) / (2 * eps)


@pytest.mark.parametrize("method", one_of("exact", "lsh"))
def test_forward_derivatives_are_differences(method):
    """U060."""
    with jax.enable_x64(True):
        q, k, v = arrays(9, dtype="float64", batch=1)
        t = jnp.asarray(np.random.default_rng(0).standard_normal(q.shape))
        f = lambda q: loss(q, k, v, method=method, causal=True)  # noqa: E731
        forward = jax.jit(lambda q: jax.jvp(f, (q,), (t,))[1])
        np.testing.assert_allclose(forward(q), difference(f, q, t), rtol=1e-7)


@COMPILES_MORE
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_second_derivatives_are_differences(method):
    """U061."""
    with jax.enable_x64(True):
        q, k, v = arrays(9, dtype="float64", batch=1)
        t = jnp.asarray(np.random.default_rng(0).standard_normal(q.shape))
        f = lambda q: loss(q, k, v, method=method, causal=True)  # noqa: E731
        g = jax.jit(jax.grad(f))
        second = difference(g, q, t)
        np.testing.assert_allclose(jax.jvp(g, (q,), (t,))[1], second, atol=1e-7)
        twice = jax.grad(lambda q: (g(q) * t).sum())(q)
        np.testing.assert_allclose(twice, second, atol=1e-7)
        np.testing.assert_allclose(jax.linearize(f, q)[1](t), difference(f, q, t), rtol=1e-7)


@COMPILES_MORE
@pytest.mark.parametrize("method", ["window", "lsh"])
def test_jacobians_by_columns_and_by_rows_agree(method):
    """U060, U076: vmap of jvp, and of vjp."""
    with jax.enable_x64(True):
        q, k, v = arrays(9, dtype="float64", batch=1)
        f = lambda q: attend(q, k, v, method=method, causal=True)  # noqa: E731
        assert_each(jax.jit(jax.jacfwd(f))(q), jax.jit(jax.jacrev(f))(q))


@COMPILES_MORE
@pytest.mark.parametrize("method", ["window", "exact"])
def test_slopes_are_learned_under_exact_and_window(method):
    with jax.enable_x64(True):
        q, k, v = arrays(20, dtype="float64")
        m = jnp.asarray([SLOPES, (1.1, 0.35)])
        f = jax.jit(lambda m: loss(q, k, v, method=method, slopes=m))
        t = jnp.asarray(np.random.default_rng(0).random(m.shape))
        got = (jax.jit(jax.grad(f))(m) * t).sum()
        np.testing.assert_allclose(got, difference(f, m, t, 1e-6), rtol=1e-6)


@COMPILES_MORE
def test_checkpoint_changes_no_gradient():
    """U091."""
    q, k, v = arrays()
    f = lambda q: loss(q, k, v, method="lsh", causal=True)  # noqa: E731
    assert_each(jax.grad(jax.checkpoint(f))(q), jax.grad(f)(q))


@pytest.mark.parametrize("method", one_of("lsh", "exact", "set"))
def test_traced_offsets_equal_known_ones(method):
    q, k, v = arrays()
    f = jax.jit(lambda a, b: attend(q, k, v, method=method, q_offset=a, k_offset=b))
    assert_each(f(9, 2), attend(q, k, v, method=method, q_offset=9, k_offset=2))


@pytest.mark.parametrize("method", one_of("set", "exact", "lsh"))
def test_traced_offsets_of_batch_rows_equal_known_ones(method):
    q, k, v = arrays()
    f = jax.jit(lambda a, b: attend(q, k, v, method=method, q_offset=a, k_offset=b))
    known = attend(q, k, v, method=method, q_offset=(9, 4), k_offset=(2, 30))
    assert_each(f(jnp.array([9, 4]), jnp.array([2, 30])), known)


def test_traced_slopes_are_refused_where_blocks_depend_on_them():
    """U077."""
    q, k, v = arrays()
    with pytest.raises(TypeError, match="slopes must be concrete under lsh"):
        jax.jit(lambda m: attend(q, k, v, method="lsh", slopes=m))(jnp.asarray(SLOPES))


def test_partitions_of_each_step_run_one_program():
    q, k, v = arrays()
    f = jax.jit(lambda blocks: plsh.attention(q, k, v, method=blocks, causal=True))
    for seed in range(12):
        blocks = plsh.RandomBinning((1.0, 4.0)).sample(16, 100, seed=seed)
        expected = plsh.attention(*inputs(24), method=blocks, causal=True)
        testing.assert_equal_to_rounding(np.asarray(f(blocks)), expected, units=64.0)
    assert f._cache_size() == 1


def test_partitions_of_many_steps_have_few_bounds():
    family = plsh.RandomBinning(tuple(1 / plsh.alibi_slopes(8)))
    draws = [family.sample(16, 2048, seed=seed) for seed in range(30)]
    assert len({jax.tree.structure(blocks) for blocks in draws}) <= 2


def test_partitions_survive_the_tree():
    blocks = METHODS["set"]
    leaves, tree = jax.tree.flatten(blocks)
    back = jax.tree.unflatten(tree, leaves)
    assert back == blocks
    assert jax.tree.structure(back) == tree
    bounds = np.array(back.bandwidths)
    assert (bounds >= blocks.bandwidth()).all()


@pytest.mark.parametrize(
    "order",
    [
        "import jax, plsh",
        "import plsh; assert plsh.backends(); import jax",
        "import plsh_jax, jax, plsh",
    ],
)
def test_partitions_are_a_tree_whichever_is_imported_first(order):
    script = (
        f"{order}\n"
        "blocks = plsh.RandomBinning(5.0).sample(4, 30)\n"
        "assert len(jax.tree.leaves(blocks)) == 1, jax.tree.leaves(blocks)\n"
        "assert {b.name: b.available for b in plsh.backends()}['jax']\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env={"PYTHONPATH": "backends"})


@COMPILES_MORE
def test_a_program_can_be_exported_for_its_length():
    """U073."""
    q, k, v = arrays()
    f = jax.jit(lambda *x: attend(*x, method="lsh", causal=True).out)
    assert_each(jax.export.export(f)(q, k, v).call(q, k, v), f(q, k, v))


def test_symbolic_lengths_are_refused_and_not_baked_in():
    """U073."""
    f = jax.jit(lambda *x: attend(*x, method="exact", causal=True).out)
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(Exception, match="inconclusive"):
        jax.export.export(f)(*[jax.ShapeDtypeStruct((2, 2, n, 8), jnp.float32)] * 3)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, plsh
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((4, 4, 200, 8)), jnp.float32) for _ in range(3))
def f(q, k, v, method=plsh.PositionalLSH(4)):
    return plsh.attention(q, k, v, method=method, causal=True)
def g(q, k, v):
    return jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2))(q, k, v)
expected = f(q, k, v), *jax.jit(g)(q, k, v)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    for spec in (P("x"), P(None, "x")):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
        program = jax.jit(lambda *x: (f(*x), *g(*x))).lower(*placed).compile()
        text = program.as_text()
        assert not any(w in text for w in ("all-gather", "all-to-all", "collective-permute"))
        got = program(*placed)
        assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
        for a, b in zip(got, expected):
            np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_allclose(f(*placed), expected[0], atol=1e-5)
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
slopes = jnp.asarray(plsh.alibi_slopes(4), jnp.float32)
def local(q, k, v, m):
    return plsh.attention(q, k, v, method="exact", slopes=m, causal=True)
mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "x"),) * 3 + (P("x"),),
                       out_specs=P(None, "x"))
np.testing.assert_allclose(jax.jit(mapped)(q, k, v, slopes), local(q, k, v, slopes), atol=1e-5)
by_rows = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
np.testing.assert_allclose(jax.jit(by_rows)(q, k, v), expected[0], atol=1e-5)
"""


@COMPILES_MORE
def test_four_devices_gather_no_keys():
    """U079: over batch and heads, automatic, explicit and mapped by hand."""
    found = subprocess.run(
        [sys.executable, "-c", SHARDED],
        capture_output=True,
        text=True,
        env={
            "PYTHONPATH": "backends",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        },
    )
    assert found.returncode == 0, found.stderr[-2000:]
