"""The JAX band kernel: the oracle, dead rows, padding, hidden keys, lengths, compiled programs.

Tiles are made small, so that short calls have many of them. XLA takes seconds for each program, so
most tests share one length, two heads and one compiled kernel; those that compile many more are
slow. Each test that a mutant must fail (`test_jax_mutants`) takes no fixture.
"""

import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import plsh_jax._call as call_module
import plsh_jax._program as program_module
import plsh_jax._spread as spread
import plsh_jax._tiling as tiling
import pytest
from calls import Call, check_call

import plsh
from plsh import testing

SMALL = tiling.Platform((tiling.Size(8, 8, 4, 8), tiling.Size(1 << 31, 16, 1, 8)), apart=0)
TOGETHER = tiling.Platform(SMALL.sizes, apart=1 << 62)
N = 40
SLOPES = (0.5, 0.125)
METHODS = {
    "exact": plsh.Exact(),
    "window": plsh.Window((9, 4)),
    "lsh": plsh.PositionalLSH(5, seed=5),
    "set": plsh.RandomBinning((2.0, 8.0)).sample(4, 400, seed=7),
}
COMPILES_MORE = pytest.mark.slow


def one_of(first, *others):
    """Parameters of which the first runs always, the others where time allows."""
    return [first, *(pytest.param(x, marks=COMPILES_MORE) for x in others)]


@pytest.fixture(autouse=True, scope="module")
def small():
    """Cut short calls into many tiles and chunks."""
    with pytest.MonkeyPatch.context() as patch:
        use_small(patch)
        yield


def use_small(monkeypatch, platform=SMALL):
    monkeypatch.setattr(spread, "PLATFORMS", {"cpu": platform})
    program_module.program_of.cache_clear()
    monkeypatch.setattr(
        call_module, "_run", jax.jit(call_module._run.__wrapped__, static_argnums=0)
    )


def inputs(n=N, len_k=None, dtype="float32", **shape):
    """Return q, k, v of two query heads that share a key head; Dv is not D."""
    shape = {"batch": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "value_dim": 6, **shape}
    return testing.make_inputs(len_q=n, len_k=len_k, dtype=dtype, seed=0, **shape)[:3]


@dataclass(frozen=True)
class JaxCall(Call):
    namespace: str = "jax"
    heads: tuple[int, int] = (2, 1)

    backend = "jax"


class Forward(JaxCall):
    """A call whose gradients are not compared: a program that compiles in a third of the time."""

    @property
    def ns(self):
        return super().ns._replace(vjp=None)


CALLS = [
    JaxCall("lsh", lengths=(97, 97), dtype="float32", segments="one", scale=0.7),
    JaxCall("window", lengths=(70, 70), dtype="float64", offsets="batch", causal=True),
    JaxCall("exact", lengths=(7, 50), dims=(5, 3), dtype="bfloat16", segments="pair", batch=None),
    JaxCall("exact", lengths=(33, 33), dtype="float32", causal=True, heads=(4, 2)),
    JaxCall("window", lengths=(129, 129), dtype="float32", segments="one"),
    JaxCall("windows", lengths=(100, 100), dtype="bfloat16", causal=True, layout="bshd"),
    JaxCall("lsh", lengths=(129, 129), dtype="float32", causal=True, heads=(4, 2)),
    JaxCall("lsh", lengths=(97, 97), dtype="float64", segments="one", scale=0.7),
    JaxCall("lsh-iid", lengths=(40, 64), dtype="float16", causal=True, heads=(4, 1)),
    JaxCall("lsh", lengths=(64, 40), dtype="float32", offsets="batch"),
    JaxCall("set", lengths=(80, 80), dtype="float32", segments="one", batch=None),
    JaxCall("set1", lengths=(1, 65), dtype="float32", causal=True, return_lse=False),
    JaxCall("lsh", lengths=(96, 96), dtype="float32", std=4.0, causal=True, heads=(3, 3)),
]


@pytest.mark.parametrize(
    "call",
    [*CALLS[:3], *(pytest.param(call, marks=COMPILES_MORE) for call in CALLS[3:])],
    ids=str,
)
def test_call_equals_oracle(call):
    check_call(call)


def test_lengths_around_tile_edges_equal_numpy():
    """U013: 63 and 64 share a program."""
    for n in (0, 63, 64):
        assert_like_numpy(*inputs(n), method="lsh", causal=True)


def attend(*arrays, method="exact", **keywords):
    """Call the JAX backend with the slopes of the laws, and ask for the lse."""
    if method != "set":
        keywords.setdefault("slopes", SLOPES)
    return plsh.attention(*arrays, method=METHODS[method], return_lse=True, **keywords)


def assert_like_numpy(q, k, v, rounding=64.0, **keywords):
    """Assert that NumPy's band kernel gives the same to rounding."""
    got = attend(*map(jnp.asarray, (q, k, v)), **keywords)
    assert_same(got, attend(q, k, v, **keywords), rounding)


def assert_same(actual, expected, rounding=64.0):
    """Assert that outputs and lse agree to rounding."""
    for a, b in zip(actual, expected, strict=True):
        testing.assert_equal_to_rounding(np.asarray(a), np.asarray(b), units=rounding)


def gradients(**keywords):
    """Return a compiled function of q, k, v to the output with its lse and their gradients."""

    def both(q, k, v):
        outputs, pull = jax.vjp(lambda *x: attend(*x, **keywords), q, k, v)
        return outputs, pull(jax.tree.map(jnp.ones_like, outputs))

    return jax.jit(both)


@pytest.mark.parametrize("method", one_of("window", "lsh"))
def test_heads_and_rows_side_by_side_equal_one_by_one(method, monkeypatch):
    q, k, v = (jnp.asarray(x) for x in inputs(70, kv_heads=2))
    given = {"method": method, "causal": True, "q_offset": (3, 9), "k_offset": 2}
    alone = attend(q, k, v, **given)
    use_small(monkeypatch, TOGETHER)
    assert_same(attend(q, k, v, **given), alone)


@pytest.mark.parametrize("method", one_of("set", "exact", "lsh"))
def test_rows_that_see_no_key_are_zero_and_have_no_gradient(method):
    """U008, U009."""
    ids = np.where(np.arange(N) % 7 == 3, -1, np.arange(N) // 20)
    ids = np.stack([ids, np.full(N, -1)]).astype(np.int32)
    found = gradients(method=method, causal=True, segment_ids=jnp.asarray(ids))(*inputs())
    (out, lse), grads = jax.tree.map(np.asarray, found)
    dead = ids < 0
    assert (out.swapaxes(1, 2)[dead] == 0).all()
    assert np.isneginf(lse.swapaxes(1, 2)[dead]).all()
    for grad in grads:
        assert np.isfinite(grad).all()
        assert (grad.swapaxes(1, 2)[dead] == 0).all()


def test_no_key_at_all():
    (out, lse), grads = gradients(q_offset=0)(*inputs(5, 0))
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(np.asarray(lse)).all()
    assert all(np.isfinite(g).all() and not np.any(g) for g in grads)


@pytest.mark.parametrize("method", one_of("exact", "lsh"))
def test_what_stands_in_padding_reaches_nothing(method):
    ids = np.where(np.arange(N) < 33, 0, -1).astype(np.int32) * np.ones((2, 1), np.int32)
    padding = ids[:, None, :, None] < 0
    f = gradients(method=method, segment_ids=jnp.asarray(ids), causal=True)
    clean = f(*(np.where(padding, np.float32(0), x) for x in inputs()))
    for fill in (np.nan, np.inf):
        foul = f(*(np.where(padding, np.float32(fill), x) for x in inputs()))
        for a, b in zip(*map(jax.tree.leaves, (clean, foul)), strict=True):
            testing.assert_identical(a, b)


@pytest.mark.parametrize("method", one_of("exact", "lsh", "window"))
def test_a_hidden_key_far_above_the_visible_ones_empties_no_row(method):
    """NUM-4: a key in the future, of logit 1000, underflows every other."""
    assert_like_numpy(*hidden_key(), method=method, causal=True)


@pytest.mark.parametrize("method", one_of("exact", "lsh", "window"))
def test_a_hidden_key_far_above_large_visible_ones_empties_no_row(method):
    """NUM-4: the visible logits, 128, overflow without a shift, and underflow by the hidden one."""
    q, k, v = hidden_key()
    q, k[:, :, :-1] = np.ones_like(q), 16.0
    assert_like_numpy(q, k, v, method=method, causal=True, scale=1.0)


@COMPILES_MORE
@pytest.mark.parametrize("method", ["exact", "lsh", "window"])
def test_a_hidden_key_far_above_the_visible_ones_leaves_gradients_finite(method):
    (out, _), grads = gradients(method=method, causal=True)(*hidden_key())
    assert (np.abs(np.asarray(out)[:, :, :-1]).max(axis=-1) > 0).all()
    assert all(np.isfinite(g).all() for g in grads)


def hidden_key():
    q, k, v = inputs()
    k = k.copy()
    k[:, :, -1] = 1000.0
    return np.abs(q), k, v


def test_a_huge_slope_is_self_attention():
    q, k, v = (jnp.asarray(x) for x in inputs())
    for slope in (1e30, 500.0):
        out, lse = attend(q, k, v, slopes=(slope,) * 2)
        np.testing.assert_allclose(out, jnp.repeat(v, 2, axis=1), rtol=1e-6)
        assert np.isfinite(lse).all()


def test_rows_that_fill_a_length_up_spoil_no_gradient():
    """The last of them sees all keys from so far that its derivatives leave float32's range."""
    arrays = inputs(65, batch=1, heads=1)
    assert tiling.length_rung(65) - 65 > 25
    options = {"method": "exact", "slopes": (3.0,)}
    out, back = jax.vjp(
        lambda *x: plsh.attention(*x, **options, backend="jax"), *map(jnp.asarray, arrays)
    )
    saved = plsh.attention(*arrays, **options, return_lse=True, backend="numpy")
    grads = plsh.attention_vjp(*arrays, saved, np.ones_like(out), **options, backend="numpy")
    for got, want in zip(back(jnp.ones_like(out)), grads, strict=False):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_far_keys_alone_are_attended_where_their_weights_underflow():
    """NUM-5: the nearest key is 4000 tokens away, at slope 0.5."""
    q, k, v = inputs(9, 12)
    at = {"slopes": SLOPES, "q_offset": 4000, "k_offset": 0}
    expected = testing.oracle(q, k, v, **at)
    plain = testing.plain_attention(q, k, v, dtype="float32", **at)
    got = attend(*map(jnp.asarray, (q, k, v)), **at)
    testing.assert_output_close(got, expected, plain, like=got.out)


def test_segments_that_hide_the_near_keys_leave_the_far_ones():
    q, k, v = inputs()
    ids_q, ids_k = np.zeros((2, N), np.int32), np.ones((2, N), np.int32)
    ids_k[:, :2] = 0
    pair = tuple(map(jnp.asarray, (ids_q, ids_k)))
    got = attend(*map(jnp.asarray, (q, k, v)), segment_ids=pair, slopes=(9.0,) * 2)
    expected = attend(q, k, v, segment_ids=(ids_q, ids_k), slopes=(9.0,) * 2)
    np.testing.assert_allclose(got.out, expected.out, rtol=1e-3, atol=1e-4)


def test_values_of_any_size_come_through():
    q, k, v = inputs()
    expected = attend(q, k, v).out
    for size in (1e-30, 1e30):
        got = attend(*map(jnp.asarray, (q, k, v * np.float32(size)))).out
        got = np.asarray(got, np.float64) / size
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_lse_asked_for_or_not_never_changes_the_output():
    q, k, v = (jnp.asarray(x) for x in inputs())
    alone = plsh.attention(q, k, v, method="exact", slopes=SLOPES)
    testing.assert_identical(attend(q, k, v).out, alone)


@pytest.mark.parametrize("method", one_of("exact", "lsh", "set", "window"))
def test_a_batch_row_does_not_depend_on_its_mates(method):
    q, k, v = (jnp.asarray(x) for x in inputs())
    loud = [x.at[1].multiply(1e4) for x in (q, k)]
    first = attend(q, k, v, method=method)
    beside = attend(*loud, v, method=method)
    testing.assert_identical(beside.out[0], first.out[0])


def test_the_ladder_has_few_rungs():
    """U069."""
    assert len({tiling.length_rung(n) for n in range(1000, 1301, 7)}) <= 4
    assert all(n <= tiling.length_rung(n) <= max(64, 1.125 * n) or n < 512 for n in range(5000))


def test_programs_serve_all_lengths_of_a_rung():
    """U069: neither the band programs nor anything around them is compiled for each length."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    programs = call_module._run._cache_size()
    for n in (1120, 1040, 1152, 1034):
        arrays = [jnp.asarray(x) for x in inputs(n, batch=1, heads=1)]
        seen = len(compiled)
        out = plsh.attention(*arrays, method=plsh.Window(9), slopes=(0.1,), causal=True)
        assert out.shape == (1, 1, n, 6)
        assert (len(compiled) > seen) == (n == 1120)
    assert call_module._run._cache_size() == programs + 1


def test_other_seeds_slopes_and_offsets_compile_nothing():
    q, k, v = (jnp.asarray(x) for x in inputs())
    programs = call_module._run._cache_size()
    for seed in range(3):
        method = plsh.PositionalLSH(4, seed=seed)
        plsh.attention(q, k, v, method=method, slopes=SLOPES, causal=True)
    for at, slope in ((4, 0.3), (9, 0.7)):
        plsh.attention(q, k, v, method=plsh.Window(5), slopes=slope, q_offset=at, k_offset=0)
    assert call_module._run._cache_size() <= programs + 2


def test_programs_are_forgotten_before_there_are_too_many(monkeypatch):
    """Each maps memory, until the process may not: some 200 lengths with gradients crashed it."""
    monkeypatch.setattr(call_module, "PROGRAMS", 2)
    kept = []
    for n in (1, 16, 64, 1):
        attend(*(jnp.asarray(x) for x in inputs(n)))
        kept.append(call_module._run._cache_size())
    assert max(kept) <= 2


def test_float32_products_are_pinned_to_float32():
    """NUM-1: on a TPU or GPU the default is fewer bits."""
    q, k, v = (jnp.asarray(x) for x in inputs())
    text = jax.jit(lambda *x: attend(*x, method="exact")).lower(q, k, v).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all("HIGHEST" in line for line in products)


@COMPILES_MORE
def test_nothing_as_large_as_the_pairs_is_kept():
    """MEM-1: neither forward nor backward."""
    n = 8192
    x = jax.ShapeDtypeStruct((1, 1, n, 8), jnp.float32)

    def loss(q, k, v):
        method = plsh.PositionalLSH(4)
        return plsh.attention(q, k, v, method=method, slopes=(0.01,), causal=True).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * n / 4


@pytest.mark.parametrize("method", one_of("exact", "lsh"))
def test_debug_checks_of_jax_find_nothing(method):
    """U005: no NaN and no infinity arises where every row sees a key."""
    q, k, v = (jnp.asarray(x) for x in inputs())
    with jax.debug_nans(True), jax.debug_infs(True):
        attend(q, k, v, method=method, causal=True)


def test_backend_object_needs_no_jax():
    script = (
        "import sys; sys.modules['jax'] = None\n"
        "import plsh, plsh_jax\n"
        "assert plsh_jax.BACKEND.capabilities().arrays == ('jax',)\n"
        "print(plsh_jax.BACKEND.availability().reason)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": "backends"},
    )  # fmt: skip
    assert "pip install" in found.stdout
