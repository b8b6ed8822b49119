"""`plsh.attention` on the reference backend: all options crossed, against the float64 oracle."""

import functools
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from calls import FACTORS, Call, check_call, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import FAMILY, LSH, NAMES, SLOPES, assert_same, attend, inputs

import plsh
from plsh import testing

FACTORS = {
    **FACTORS,
    "lengths": [(n, n) for n in (0, 1, 2, 3, 31, 33, 63, 64, 65, 127, 129)]
    + [(33, 65), (65, 31), (1, 129), (5, 2), (4, 0), (0, 4)],
    "heads": [(1, 1), (4, 2), (6, 2), (8, 1), (3, 1)],
    "dims": [(1, 1), (3, 5), (16, 16), (64, 8), (80, 80)],
    "batch": [None, 0, 1, 2],
}
"""Every option; `pairwise` has every two values of two options meet in some call."""


def crossed(namespace, seed, **changed):
    """Return the calls that cover all pairs of options on one namespace."""
    factors = {**FACTORS, **changed}
    return [Call(**row, namespace=namespace) for row in pairwise(factors, seed)]


# array-api-strict has no float16; its float32 and float64 are checked.
CROSSED = [
    *crossed("numpy", 0),
    *crossed("torch", 1),
    *crossed("strict", 2, dtype=["float32", "float64"]),
]
LONG = [
    Call(method=method, lengths=(1000, 1000), batch=1, heads=(2, 1), causal=causal, namespace=ns)
    for method, ns, causal in (
        ("exact", "numpy", True),
        ("windows", "numpy", False),
        ("lsh", "numpy", True),
        ("lsh-iid", "torch", False),
        ("exact", "torch", False),
        ("set", "strict", True),
    )
]
ON_JAX = {
    "method": ["exact", "window", "lsh", "set1"],
    "lengths": [(17, 17), (5, 17)],
    "dims": [(8, 8), (8, 3)],
    "causal": [False, True],
    "offsets": ["none", "batch"],
    "segments": ["none", "pair"],
    "layout": ["bhsd", "bshd"],
    "dtype": ["float16", "bfloat16", "float32", "float64"],
    "heads": [(2, 1)],
    "samples": [3],
}
JAX = [Call(**row, namespace="jax") for row in pairwise(ON_JAX, 5)]
# XLA takes seconds for each; the first of each method runs always, all pairs where time allows.
JAX_FEW = [next(c for c in JAX if c.method == method) for method in ON_JAX["method"]]


@pytest.mark.parametrize("call", [*CROSSED, *LONG], ids=str)
def test_call_equals_oracle(call):
    """Output, lse, and gradients by q, k, v and slopes.

    U013, U014, U016, U017, U021, U022, U023, U059, U065, U066.
    """
    check_call(call)


@pytest.mark.parametrize("call", JAX_FEW, ids=str)
def test_call_on_jax_equals_oracle(call):
    """One program, jitted: outputs and gradients."""
    check_call(call)


@pytest.mark.slow
@pytest.mark.parametrize("call", [c for c in JAX if c not in JAX_FEW], ids=str)
def test_every_pair_of_options_on_jax_equals_oracle(call):
    check_call(call)


def test_crossing_covers_every_pair():
    calls = [c for c in CROSSED if c.namespace == "torch"]
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(getattr(c, a), getattr(c, b)) for c in calls}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)


CALLS = st.builds(
    Call,
    method=st.sampled_from(FACTORS["method"]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 1)]),
    lengths=st.one_of(
        st.integers(0, 12).map(lambda n: (n, n)),
        st.tuples(st.integers(0, 8), st.integers(0, 12)),
    ),
    dims=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.sampled_from([None, 1, 2]),
    causal=st.booleans(),
    scale=st.one_of(st.none(), st.floats(-2, 2)),
    offsets=st.sampled_from(FACTORS["offsets"]),
    segments=st.sampled_from(FACTORS["segments"]),
    layout=st.sampled_from(["bhsd", "bshd"]),
    return_lse=st.just(True),
    dtype=st.sampled_from(FACTORS["dtype"]),
    std=st.sampled_from([0.1, 1.0]),
    samples=st.integers(1, 6),
)


@settings(max_examples=1000)
@given(CALLS)
def test_no_counter_example_to_the_oracle(call):
    check_call(call)


@settings(max_examples=600)
@given(
    st.sampled_from(NAMES),
    st.booleans(),
    st.lists(st.integers(0, 11), max_size=2),
    st.lists(st.integers(0, 11), max_size=2),
    st.integers(0, 40),
)
def test_no_counter_example_to_splitting(method, causal, query_cuts, key_cuts, first):
    """Any chunks of queries, any shards of keys, any place on the axis: the whole call."""
    q, k, v = inputs(11, batch=1, head_dim=3, value_dim=2)
    call = {"causal": causal}
    whole = attend(q, k, v, method, q_offset=first, k_offset=first, **call)
    for a, b in itertools.pairwise([0, *sorted(query_cuts), 11]):
        parts = [
            attend(
                q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], method,
                q_offset=first + a, k_offset=first + c, **call,
            )
            for c, d in itertools.pairwise([0, *sorted(key_cuts), 11])
        ]  # fmt: skip
        part = plsh.AttentionOutput(whole.out[:, :, a:b], whole.lse[:, :, a:b])
        assert_same(plsh.merge(parts), part)


@settings(max_examples=400)
@given(
    st.sampled_from(NAMES),
    st.booleans(),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_no_counter_example_to_packing(method, causal, lengths, before, after):
    """Any documents packed between any paddings equal separate calls at the same positions."""
    total = sum(lengths)
    tokens = inputs(total, batch=1, head_dim=3, value_dim=2)
    ids = np.concatenate(
        [np.full(before, -1), plsh.segments_from_lengths([lengths], total)[0], np.full(after, -1)]
    )[None]
    widths = [(0, 0), (0, 0), (before, after), (0, 0)]
    padded = (np.pad(x, widths, constant_values=np.nan) for x in tokens)
    offset = {"q_offset": -before, "k_offset": -before}
    got = attend(*padded, method, causal=causal, segment_ids=ids, **offset)
    assert not np.any(got.out[:, :, :before])
    start = 0
    for length in lengths:
        doc = slice(start, start + length)
        alone = attend(
            *(x[:, :, doc] for x in tokens), method, causal=causal, q_offset=start, k_offset=start
        )
        seen = slice(before + start, before + start + length)
        assert_same(plsh.AttentionOutput(got.out[:, :, seen], got.lse[:, :, seen]), alone)
        start += length


@pytest.mark.parametrize("shape", list(itertools.product([0, 2], [0, 4], [0, 3], [0, 5], [0, 6])))
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_empty_axes(shape, method):
    """U016, U017: any of B, H, Nq, Nk, Dv is 0: empty in, empty out; no keys, zeros."""
    batch, heads, len_q, len_k, value_dim = shape
    q, k, v = (
        torch.from_numpy(x).requires_grad_()
        for x in testing.make_inputs(
            batch, heads, heads // 2, len_q, len_k, 3, value_dim, "float64"
        )[:3]
    )
    chosen = {"method": plsh.Window(2)} if method == "window" else {}
    got = attend(q, k, v, method, slopes=SLOPES[:heads], q_offset=0, **chosen)
    assert got.out.shape == (batch, heads, len_q, value_dim)
    assert got.lse.shape == (batch, heads, len_q)
    assert got.lse.dtype == torch.float64
    if len_k == 0:
        assert not torch.any(got.out)
        assert torch.all(got.lse == -torch.inf)
    grads = torch.autograd.grad(got.out.sum(), (q, k, v), allow_unused=True)
    for x, grad in zip((q, k, v), grads, strict=True):
        assert grad is None or (grad.shape == x.shape and torch.all(torch.isfinite(grad)))


def test_an_empty_partition_set_serves_an_empty_call():
    nothing = plsh.PartitionSet(np.zeros((1, 2, 0), int))
    q, k, v = inputs(0)
    got = plsh.attention(q, k, v, method=nothing, backend="reference")
    assert got.shape == (2, 4, 0, 6)


# Options


BASE = {"method": "exact", "slopes": SLOPES, "q_offset": 0, "backend": "reference"}
OPTIONS = {
    "causal": {"causal": True},
    "scale": {"scale": 0.9},
    "slopes": {"slopes": (0.25, 0.5, 0.7, 0.1)},
    "q_offset": {"q_offset": 4},
    "k_offset": {"k_offset": 3},
    "segment_ids": {"segment_ids": np.array([[0] * 5 + [1] * 8] * 2)},
    "window": {"method": plsh.Window(3)},
    "lsh": {"method": plsh.PositionalLSH(4)},
}


@pytest.mark.parametrize("pair", list(itertools.permutations(OPTIONS, 2)), ids="-".join)
def test_every_option_acts_alone_and_with_every_other(pair):
    """U031: switching an option on changes the result, whatever else is on."""
    first, second = (OPTIONS[name] for name in pair)
    if "method" in first and "method" in second:
        first = {}  # one method at a time
    check_option_acts(first, second)


def check_option_acts(given, option):
    q, k, v = inputs(13)
    without = plsh.attention(q, k, v, **{**BASE, **given})
    with_option = plsh.attention(q, k, v, **{**BASE, **given, **option})
    assert np.max(np.abs(without - with_option)) > 1e-3


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_acts_alone(name):
    """U031."""
    check_option_acts({}, OPTIONS[name])


LSH_OPTIONS = {
    "samples": plsh.PositionalLSH(9),
    "seed": plsh.PositionalLSH(8, seed=1),
    "seed tuple": plsh.PositionalLSH(8, seed=(0, 1)),
    "sampler": plsh.PositionalLSH(8, sampler="iid"),
    "head_ids": plsh.PositionalLSH(8, head_ids=(4, 5, 6, 7)),
    "family": plsh.PositionalLSH(8, family=plsh.PowerLawBinning(2.0, 0.3)),
    "cuts": plsh.PositionalLSH(8, sampler=None, family=plsh.IndependentCuts(3.0)),
    "fixed": plsh.PositionalLSH(8, sampler=None, family=plsh.FixedBlocks(4)),
    "set": FAMILY.sample(8, 13, seed=2),
}


@pytest.mark.parametrize("name", LSH_OPTIONS)
def test_every_option_of_lsh_acts(name):
    """U031, for what chooses the blocks; head 0, whose slope is steepest."""
    q, k, v = inputs(13)
    method = LSH_OPTIONS[name]
    carries = name in ("family", "cuts", "fixed", "set")
    base = plsh.attention(q, k, v, method=plsh.PositionalLSH(8), slopes=SLOPES, backend="reference")
    got = plsh.attention(
        q, k, v, method=method, slopes=None if carries else SLOPES, backend="reference"
    )
    assert np.max(np.abs(got[:, 0] - base[:, 0])) > 1e-3


def test_a_shard_of_the_heads_passes_its_own_ids():
    """Heads 2 and 3 alone see the blocks that they see among four."""
    q, k, v = inputs(40)
    whole = attend(q, k, v, "lsh")
    shard = plsh.attention(
        q[:, 2:],
        k[:, 1:],
        v[:, 1:],
        method=plsh.PositionalLSH(5, seed=5, head_ids=(2, 3)),
        slopes=SLOPES[2:],
        return_lse=True,
        backend="reference",
    )
    testing.assert_identical(shard.out, whole.out[:, 2:])


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_asking_for_the_lse_never_changes_the_output(method, causal):
    """U028: bit for bit."""
    q, k, v = inputs(33, dtype="float32")
    alone = attend(q, k, v, method, causal=causal, return_lse=False)
    testing.assert_identical(attend(q, k, v, method, causal=causal).out, alone)


@pytest.mark.parametrize("method", NAMES)
def test_layouts_and_the_absent_batch_axis_are_views_of_one_call(method):
    """U023: bit for bit."""
    q, k, v = inputs(13, batch=1)
    whole = attend(q, k, v, method)
    heads_last = attend(*(x.swapaxes(1, 2) for x in (q, k, v)), method, layout="bshd")
    testing.assert_identical(heads_last.out.swapaxes(1, 2), whole.out)
    testing.assert_identical(heads_last.lse, whole.lse)
    alone = attend(q[0], k[0], v[0], method)
    testing.assert_identical(alone.out, whole.out[0])
    alone = attend(*(x[0].swapaxes(0, 1) for x in (q, k, v)), method, layout="bshd")
    testing.assert_identical(alone.out.swapaxes(0, 1), whole.out[0])
    testing.assert_identical(alone.lse, whole.lse[0])


def test_default_slopes_are_the_published_recipe():
    """U057: None is `alibi_slopes`, which is public."""
    q, k, v = inputs(20)
    for method in ("exact", "window", "lsh"):
        call = {"method": method, "backend": "reference"}
        testing.assert_identical(
            plsh.attention(q, k, v, **call),
            plsh.attention(q, k, v, slopes=plsh.alibi_slopes(4), **call),
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "list", "int"])
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_slopes_of_any_kind_mean_the_same(method, dtype):
    """U002: values exact in every dtype give the same bits."""
    import ml_dtypes

    q, k, v = inputs(20, dtype="float32")
    values = (0.5, 0.125, 0.03125, 0.0) if dtype != "int" else (1, 0, 2, 3)
    made = {
        "list": list,
        "int": lambda x: np.array(x, np.int64),
        "bfloat16": lambda x: np.array(x, ml_dtypes.bfloat16),
    }.get(dtype, lambda x: np.array(x, dtype))(values)
    got = attend(q, k, v, method, slopes=made)
    testing.assert_identical(got.out, attend(q, k, v, method, slopes=tuple(map(float, values))).out)


@pytest.mark.parametrize("method", ["exact", "window"])
def test_slopes_per_batch_row_equal_separate_calls(method):
    """U050: (B, H); and (B, H) of equal rows is (H,)."""
    q, k, v = inputs(20)
    slopes = np.array([SLOPES, (0.1, 0.2, 0.0, 1.0)])
    got = attend(q, k, v, method, slopes=slopes)
    for b in range(2):
        one = attend(*(x[b : b + 1] for x in (q, k, v)), method, slopes=slopes[b])
        testing.assert_identical(got.out[b : b + 1], one.out)
    equal = attend(q, k, v, method, slopes=[SLOPES, SLOPES])
    testing.assert_identical(equal.out, attend(q, k, v, method).out)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_one_slope_serves_all_heads(method):
    """U050: a number, or a 0-d array."""
    q, k, v = inputs(20)
    want = attend(q, k, v, method, slopes=[0.3] * 4)
    for slopes in (0.3, np.float64(0.3), np.array(0.3)):
        testing.assert_identical(attend(q, k, v, method, slopes=slopes).out, want.out)


def check_slopes_belong_to_query_heads(method):
    """U055: under grouped heads a slope moves its own query head only."""
    q, k, v = inputs(20, heads=8, kv_heads=2)
    slopes = [0.5 * 0.5**h for h in range(8)]
    chosen = {"method": plsh.Window(9)} if method == "window" else {}
    got = attend(q, k, v, method, slopes=slopes, **chosen)
    wide = (np.repeat(x, 4, axis=1) for x in (k, v))
    repeated = attend(q, *wide, method, slopes=slopes, **chosen)
    assert_same(got, repeated, units=4)
    slopes[5], slopes[6] = slopes[6], slopes[5]
    swapped = attend(q, k, v, method, slopes=slopes, **chosen)
    moved = np.max(np.abs(got.out - swapped.out), axis=(0, 2, 3)) > 1e-3
    np.testing.assert_array_equal(moved, np.isin(np.arange(8), (5, 6)))


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_slopes_belong_to_query_heads(method):
    """U055."""
    check_slopes_belong_to_query_heads(method)


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_bias_is_not_scaled(method):
    """U056: softmax(scale * q.k - m |i-j|); the other order is slopes * scale."""
    q, k, v = inputs(20, head_dim=16)
    if method == "exact":
        keys = np.repeat(k, 2, axis=1)
        at = np.abs(np.arange(20)[:, None] - np.arange(20))
        bias = np.array(SLOPES)[:, None, None] * at
        logits = 0.25 * (q @ keys.swapaxes(-1, -2) - bias)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        falcon = p / p.sum(axis=-1, keepdims=True) @ np.repeat(v, 2, axis=1)
        ours = attend(q, k, v, method, slopes=[m * 0.25 for m in SLOPES])
        testing.assert_equal_to_rounding(falcon, ours.out)
        assert np.max(np.abs(falcon - attend(q, k, v, method).out)) > 0.5
    # The scale acts on the product alone: it may be moved onto q.
    scaled = attend(4 * q, k, v, method, scale=0.0625)
    assert_same(scaled, attend(q, k, v, method, scale=0.25), units=0)


# Inputs as they come


VIEWS = {
    "contiguous": np.ascontiguousarray,
    "heads last": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "dims first": lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
    "reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "fortran": np.asfortranarray,
}


@pytest.mark.parametrize("which", range(3), ids="qkv")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_strides_are_honoured(method, view, which):
    """U018, U019: any view of one of the inputs."""
    arrays = list(inputs(13))
    want = attend(*arrays, method)
    arrays[which] = VIEWS[view](arrays[which])
    assert_same(attend(*arrays, method), want)


@pytest.mark.parametrize("method", NAMES)
def test_broadcast_inputs_with_stride_zero(method):
    """U019: expanded batch and heads."""
    q, k, v = inputs(13)
    k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (k, v))
    assert_same(attend(q, k, v, method), attend(q, k.copy(), v.copy(), method))


@pytest.mark.parametrize("method", NAMES)
def test_odd_strides_of_size_one_axes(method):
    """U020: torch.as_strided with strides that mean nothing."""
    base = torch.arange(200, dtype=torch.float64) / 100
    for size, stride in (((1, 4, 5, 8), (7, 13, 8, 1)), ((1, 4, 1, 8), (3, 8, 1, 1))):
        x = torch.as_strided(base, size, stride)
        got, want = (attend(y, y, y, method) for y in (x, x.clone()))
        assert_same(got, want, units=4)


@pytest.mark.parametrize("method", NAMES)
def test_torch_views_of_a_projection(method):
    """U018: q, k, v as transposed views, in all eight combinations."""
    made = [torch.from_numpy(x.swapaxes(1, 2).copy()) for x in inputs(62, batch=1)]
    views = [x.transpose(1, 2) for x in made]
    want = attend(*views, method)
    for choice in itertools.product([False, True], repeat=3):
        arrays = [x.contiguous() if c else x for x, c in zip(views, choice, strict=True)]
        assert_same(attend(*arrays, method), want)


@pytest.mark.parametrize("method", NAMES)
def test_inputs_are_read_only(method):
    """Nothing is written to an input; frozen arrays are taken."""
    arrays = inputs(13)
    slopes, ids = np.array(SLOPES), np.array([[0] * 6 + [-1] + [1] * 6] * 2)
    given = (*arrays, slopes, ids)
    before = [x.copy() for x in given]
    for x in given:
        x.flags.writeable = False
    options = {} if method == "set" else {"slopes": slopes}
    attend(*arrays, method, segment_ids=ids, **options)
    tensors = [torch.from_numpy(x.copy()) for x in arrays]
    attend(*tensors, method)
    for x, y in zip((*given, *tensors), (*before, *before[:3]), strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.parametrize("method", NAMES)
def test_the_output_owns_its_memory(method):
    """A write to the output reaches no input and no later call."""
    q, k, v = inputs(1)
    first = attend(q, k, v, method)
    copy = first.out.copy()
    for x in (q, k, v):
        assert not np.shares_memory(first.out, x)
    first.out[...] = 7
    testing.assert_identical(attend(q, k, v, method).out, copy)


@pytest.mark.parametrize("method", NAMES)
def test_a_changed_input_gives_a_changed_answer(method):
    """U118: no caching of what the user owns."""
    q, k, v = inputs(13)
    before = attend(q, k, v, method)
    k[:, :, 3] += 1
    after = attend(q, k, v, method)
    assert np.max(np.abs(after.out[:, 0] - before.out[:, 0])) > 1e-3
    testing.assert_identical(attend(q, k.copy(), v, method).out, after.out)


def test_calls_of_other_shapes_leave_nothing_behind():
    """U045: one process, changing lengths and head counts; each call is right."""
    for len_q, len_k, heads in ((3, 9, 8), (9, 9, 8), (9, 9, 12), (3, 9, 8)):
        for method in ("exact", "windows", "lsh"):
            check_call(Call(method=method, lengths=(len_q, len_k), heads=(heads, 4)))


@pytest.mark.parametrize("method", NAMES)
def test_global_random_state_is_untouched(method):
    """U091: no draw, and no dependence on the state."""
    q, k, v = inputs(13)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    first = attend(q, k, v, method)
    np.testing.assert_array_equal(np.random.get_state()[1], state[0])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), state[1])
    np.random.seed(2)  # noqa: NPY002
    testing.assert_identical(attend(q, k, v, method).out, first.out)


# Determinism


PROGRAM = """
import hashlib, sys, numpy, plsh
from plsh import testing
digest = hashlib.sha256()
for n in (1, 2, 3, 31, 65, 129):
    q, k, v = testing.make_inputs(1, 2, 1, n, dtype="float32")[:3]
    for method in ("exact", "window", "lsh"):
        results = [
            plsh.attention(q, k, v, method=method, causal=True, backend="reference").tobytes()
            for _ in range(10)
        ]
        assert len(set(results)) == 1, (n, method)
        digest.update(results[0])
print(digest.hexdigest())
"""


def test_repeats_are_equal_from_the_first_call_of_a_process():
    """U013, U092: ten repeats, bit-equal, in two fresh processes."""
    runs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM], check=True, capture_output=True, timeout=120
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


@pytest.mark.parametrize("method", NAMES)
def test_gradients_are_deterministic(method):
    """U092: forward and backward ten times, bit-equal, and nothing that torch knows better."""
    torch.use_deterministic_algorithms(True)
    try:
        check_ten_gradients(method)
    finally:
        torch.use_deterministic_algorithms(False)


def check_ten_gradients(method):
    arrays = [torch.from_numpy(x) for x in inputs(40, dtype="float32")]
    seen = set()
    for _ in range(10):
        leaves = [x.clone().requires_grad_() for x in arrays]
        got = attend(*leaves, method)
        grads = torch.autograd.grad(got.out.sum() + got.lse.sum(), leaves)
        seen.add(tuple(x.detach().numpy().tobytes() for x in (*got, *grads)))
    assert len(seen) == 1


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_batch_row_does_not_depend_on_its_mates(method, dtype, library):
    """U094, U095: alone, in batches of 2, 4, 8 and in another order, bit-equal on NumPy.

    Torch's own batched product is not: it differs in the last bit with the place in the batch.
    """
    q, k, v = inputs(65, dtype=dtype, batch=8)
    same = testing.assert_identical
    if library == "torch":
        q, k, v = (torch.from_numpy(x) for x in (q, k, v))
        same = functools.partial(testing.assert_equal_to_rounding, units=4)
    whole = attend(q, k, v, method)
    order = np.random.default_rng(0).permutation(8)
    shuffled = attend(q[order], k[order], v[order], method)
    same(shuffled.out, whole.out[order])
    for size in (1, 2, 4):
        part = attend(q[:size], k[:size], v[:size], method)
        same(part.out, whole.out[:size])
        same(part.lse, whole.lse[:size])


@pytest.mark.parametrize("method", LSH)
def test_equal_rows_of_a_batch_see_equal_blocks(method):
    """U094: the batch index is not hashed."""
    q, k, v = (np.repeat(x[:1], 3, axis=0) for x in inputs(40))
    got = attend(q, k, v, method)
    for b in (1, 2):
        testing.assert_identical(got.out[b], got.out[0])


def test_lsh_of_every_dtype_and_library_sees_the_same_blocks():
    """Logits that single out no key: the output is the mean of v over the blocks."""
    calls = [
        Call(method="lsh", scale=0.0, dtype=dtype, namespace=ns)
        for ns, dtype in (("numpy", "float64"), ("torch", "float64"), ("strict", "float32"))
    ]
    for call in calls:
        check_call(call)
