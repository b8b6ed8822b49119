"""Gradients by q, k, v and the slopes, whoever makes them: the backend's vjp or autograd."""

import itertools

import numpy as np
import pytest

from plsh.attention import attention, attention_vjp
from plsh.backend import AttentionOutput, Gradients
from plsh.conformance.calls import Call, check_call
from plsh.conformance.suite.common import (
    DTYPES,
    METHODS,
    NAMES,
    SLOPES,
    assert_same,
    dtype_of,
    make,
    wide,
)
from plsh.methods import Window
from plsh.reduction import merge
from plsh.testing import assert_gradients_close

pytestmark = pytest.mark.needs("gradients")

METHOD = pytest.mark.parametrize("method", NAMES)
DECAY = pytest.mark.parametrize("method", ["exact", "window"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

# --- by q, k and v --------------------------------------------------------------------------------

TILES = [
    Call(method, (4, 2), lengths, (16, 8), 1, causal, dtype=dtype, flatter=8.0, samples=16)
    for method in ("exact", "windows", "lsh", "cuts")
    for lengths, causal, dtype in (
        ((129, 129), True, "float16"), ((129, 65), False, "float32"), ((65, 129), False, "float64"),
    )
]  # fmt: skip
"""Rows that are merged from several tiles and partitions, and sums over several tiles."""


@pytest.mark.requirement("NUM-8", "NUM-9", "NUM-10", "BCK-11")
@pytest.mark.parametrize("call", TILES, ids=str)
def test_gradients_come_from_the_merged_row(call, subject):
    check_call(call, subject)


@pytest.mark.requirement("NUM-8", "NUM-10", "BCK-11")
@METHOD
@DTYPE
@CAUSAL
def test_gradients_through_the_lse_alone(method, dtype, causal, subject):
    problem = make(subject, 40, method=method, dtype=dtype, causal=causal)
    problem.but(grad_out=0 * problem.grad_out).check(subject)


@pytest.mark.requirement("NUM-8", "NUM-10", "ATT-25", "BCK-11")
@METHOD
@DTYPE
@CAUSAL
def test_no_gradient_by_the_lse_is_zero(method, dtype, causal, subject):
    problem = make(subject, 40, method=method, dtype=dtype, causal=causal)
    without = problem.but(grad_lse=None)
    without.check(subject)
    zero = problem.but(grad_lse=0 * problem.grad_lse).gradients(subject)
    assert_same(subject, dtype, zero, without.gradients(subject))


@pytest.mark.requirement("NUM-8", "NUM-10", "ATT-27")
@METHOD
@CAUSAL
def test_gradients_of_merged_shards_equal_the_whole(method, causal, subject):
    """A shard's part has the output and lse of the whole row, through the gradients of merging."""
    problem = make(subject, 61, method=method, causal=causal)
    shards = [problem.cut(keys=slice(a, b)) for a, b in itertools.pairwise((0, 20, 33, 61))]
    if subject.capabilities.gradients == "vjp":
        got = _by_hand(subject, shards)
    else:
        got = _by_autograd(subject, shards)
    assert_same(subject, problem.dtype, got[:3], problem.gradients(subject)[:3])


def _by_hand(subject, shards):
    """Hand each shard its share of the gradients by out and lse."""
    first = shards[0]
    outputs = [shard.output(subject) for shard in shards]
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp.reduce([x.lse.astype(np.float64) for x in outputs])
        shares = [np.exp(np.where(np.isneginf(x.lse), -np.inf, x.lse - lse)) for x in outputs]
    out = sum(
        share[..., None] * x.out.astype(np.float64)
        for share, x in zip(shares, outputs, strict=True)
    )
    found = []
    for shard, share, output in zip(shards, shares, outputs, strict=True):
        away = (first.grad_out * (output.out - out)).sum(axis=-1)
        found.append(
            shard.but(
                grad_out=share[..., None] * first.grad_out,
                grad_lse=share * (away + first.grad_lse),
            ).gradients(subject)
        )
    by_q = sum(x.q for x in found)
    by_k, by_v = (np.concatenate([x[i] for x in found], axis=2) for i in (1, 2))
    return by_q, by_k, by_v


def _by_autograd(subject, shards):
    """Differentiate the merged output."""
    inputs = [subject.array(shards[0].q, shards[0].dtype)]
    for name in ("k", "v"):
        inputs += [subject.array(getattr(shard, name), shard.dtype) for shard in shards]
    n = len(shards)

    def f(q, *pairs):
        return tuple(
            merge(
                [
                    attention(
                        q,
                        pairs[i],
                        pairs[n + i],
                        return_lse=True,
                        backend=subject.name,
                        **shard.keywords(subject),
                    )
                    for i, shard in enumerate(shards)
                ]
            )
        )

    grads = [subject.host(x) for x in subject.vjp(f, inputs, shards[0].cotangents(subject))]
    by_k, by_v = (np.concatenate(x, axis=2) for x in (grads[1 : n + 1], grads[n + 1 :]))
    return grads[0], by_k, by_v


@pytest.mark.requirement("ATT-26", "BCK-11", "NUM-8")
@METHOD
def test_gradients_without_a_batch_axis(method, subject):
    problem = make(subject, 20, method=method, batch=1, causal=True)
    q, k, v, grad_out = (
        subject.array(x[0], problem.dtype)
        for x in (problem.q, problem.k, problem.v, problem.grad_out)
    )
    grad_lse = subject.array(problem.grad_lse[0], wide(problem.dtype))
    _, got = subject.gradients(q, k, v, grad_out, grad_lse, **problem.keywords(subject))
    own = [subject.host(x)[None] for x in got[:3]]
    by_slope = None if got.slopes is None else subject.host(got.slopes)
    assert_same(subject, problem.dtype, (*own, by_slope), tuple(problem.gradients(subject)))


@pytest.mark.requirement("NUM-8", "ATT-13")
@METHOD
@pytest.mark.parametrize("scale", [0.0, -0.7, 0.3])
def test_the_scale_is_a_factor_of_the_gradients(method, scale, subject):
    problem = make(subject, 33, method=method, causal=True, scale=scale)
    problem.check(subject)
    if scale == 0:
        grads = problem.gradients(subject)
        assert not np.any(grads.q)
        assert not np.any(grads.k)


# --- by the slopes --------------------------------------------------------------------------------


@pytest.mark.requirement("NUM-9", "ATT-26", "BCK-11")
@DECAY
@DTYPE
@pytest.mark.parametrize("form", ["heads", "rows", "one"])
@CAUSAL
def test_gradients_by_every_form_of_slopes(method, dtype, form, causal, subject):
    word = "windows" if method == "window" else method
    check_call(Call(word, (4, 2), (33, 33), causal=causal, dtype=dtype, slope_form=form), subject)


@pytest.mark.requirement("ATT-26", "BCK-11", "NUM-9")
@pytest.mark.needs("gradients")
@pytest.mark.parametrize("method", ["exact", "window"])
@pytest.mark.parametrize("batch", [1, 3])
def test_gradient_by_slopes_of_each_batch_row(method, batch, subject):
    """(B, H) slopes have a (B, H) gradient, also for one batch row."""
    problem = make(subject, 20, method=method, batch=batch, causal=True)
    problem = problem.but(slopes=(SLOPES,) * batch)
    problem.check(subject)
    assert problem.gradients(subject).slopes.shape == (batch, 4)


@pytest.mark.requirement("ATT-26", "ATT-3")
@pytest.mark.needs("gradients")
@pytest.mark.parametrize("method", ["exact", "window"])
@pytest.mark.parametrize("shape", [(4,), (0, 4)])
def test_gradient_by_slopes_of_no_batch_row(method, shape, subject):
    problem = make(subject, 12, method=method, batch=1)
    dtype, keywords = problem.dtype, problem.keywords(subject)
    q, k, v, grad_out = (
        subject.array(x[:0], dtype) for x in (problem.q, problem.k, problem.v, problem.grad_out)
    )
    slopes = subject.array(np.full(shape, 0.5), wide(dtype))
    _, got = subject.gradients(q, k, v, grad_out, **{**keywords, "slopes": slopes})
    assert tuple(got.slopes.shape) == shape
    assert not np.any(subject.host(got.slopes))
    if method == "window":  # by tol, the widths come from the slopes
        by_tol = {**keywords, "method": Window(tol=0.5), "slopes": slopes}
        assert subject.attention(q, k, v, **by_tol).shape[:3] == (0, 4, 12)


@pytest.mark.requirement("ATT-26", "ATT-25", "BCK-11")
@pytest.mark.needs("vjp")
@METHOD
@DTYPE
def test_forms_of_the_gradient_by_the_slopes(method, dtype, subject):
    """Of the shape of what was given, and of the accumulation dtype; None under lsh."""
    problem = make(subject, 12, method=method, dtype=dtype)
    q, k, v = problem.arrays(subject)
    cotangents = problem.cotangents(subject)
    forms = {
        "None": (None, (4,)),
        "numbers": (SLOPES, (4,)),
        "NumPy": (np.array(SLOPES), (4,)),
        "one number": (0.25, ()),
        "0-d": (np.array(0.25), ()),
        "rows": ((SLOPES, SLOPES), (2, 4)),
    }
    if not problem.is_decay:
        forms = {"own": (problem.slopes, None)}
    for slopes, shape in forms.values():
        keywords = {**problem.keywords(subject), "slopes": slopes}
        output = subject.attention(q, k, v, return_lse=True, **keywords)
        grads = attention_vjp(q, k, v, output, *cotangents, backend=subject.name, **keywords)
        assert type(grads) is Gradients
        if shape is None:
            assert grads.slopes is None
            continue
        like = subject.array(np.zeros(shape), wide(dtype))
        assert (tuple(grads.slopes.shape), grads.slopes.dtype) == (shape, like.dtype)


@pytest.mark.requirement("NUM-9", "ATT-26")
@pytest.mark.needs("vjp")
@DECAY
def test_numbers_and_arrays_of_slopes_have_one_gradient(method, subject):
    problem = make(subject, 33, method=method, causal=True)
    dtype = problem.dtype
    found = problem.gradients(subject)
    assert_same(subject, dtype, problem.but(plain_slopes=True).gradients(subject), found)
    same = problem.but(slopes=(0.25,) * 4)
    one = same.but(slopes=0.25).gradients(subject)
    heads = same.gradients(subject).slopes
    assert_same(subject, dtype, (*one[:3], one.slopes), (*one[:3], heads.sum()))
    rows = problem.but(slopes=(SLOPES, SLOPES)).gradients(subject)
    assert_same(subject, dtype, (*found[:3], rows.slopes.sum(axis=0)), tuple(found))


@pytest.mark.requirement("NUM-9", "ATT-10")
@DECAY
def test_a_slope_of_zero_has_a_gradient(method, subject):
    problem = make(subject, 33, method=method, slopes=(0.0,) * 4)
    problem.check(subject)
    seen = [0, 1, 3]  # where the window sees more than the own key
    assert np.all(np.abs(problem.gradients(subject).slopes[seen]) > 1e-3)


@pytest.mark.requirement("NUM-9", "NUM-2")
@DECAY
def test_distances_in_the_gradient_by_slopes_are_those_of_positions(method, subject):
    make(subject, 20, 30, method=method, q_offset=2**29 + 14, k_offset=2**29 + 3).check(subject)
    far = make(subject, 5, 30, method="exact", q_offset=5000, slopes=(2.0**-9,) * 4)
    near = far.but(method=make(subject, 1, method=method).method)
    (far if method == "exact" else near).check(subject)


@pytest.mark.requirement("NUM-10", "ATT-11", "ATT-26")
@pytest.mark.parametrize("method", ["lsh", "lsh-iid"])
def test_no_gradient_flows_to_slopes_under_lsh(method, subject):
    problem = make(subject, 20, method=method)
    if subject.capabilities.gradients == "vjp":
        assert problem.gradients(subject).slopes is None
        return
    q, k, v = problem.arrays(subject)
    slopes = subject.array(np.array(SLOPES), wide(problem.dtype))
    keywords = {**problem.keywords(subject), "slopes": None}

    def f(slopes):
        return (attention(q, k, v, backend=subject.name, **{**keywords, "slopes": slopes}),)

    with pytest.raises((ValueError, TypeError), match="slopes"):
        subject.vjp(f, [slopes], problem.cotangents(subject)[:1])


# --- what vjp is given ----------------------------------------------------------------------------


@pytest.mark.requirement("ATT-25", "BCK-11", "NUM-8")
@pytest.mark.needs("vjp")
@METHOD
def test_vjp_takes_what_attention_gave_and_keeps_no_state(method, subject):
    """Two calls of attention, then their gradients in the other order."""
    problems = [make(subject, n, method=method, causal=True, seed=n) for n in (40, 33)]
    arrays = [p.arrays(subject) for p in problems]
    keywords = [p.keywords(subject) for p in problems]
    outputs = [
        subject.attention(*x, return_lse=True, **own)
        for x, own in zip(arrays, keywords, strict=True)
    ]
    for i in (1, 0):
        grads = attention_vjp(
            *arrays[i],
            AttentionOutput(*outputs[i]),
            *problems[i].cotangents(subject),
            backend=subject.name,
            **keywords[i],
        )
        measured = assert_gradients_close(
            grads, *problems[i].yardsticks, like=arrays[i][0], from_lse=True
        )
        subject.record(*measured)


@pytest.mark.requirement("NUM-8", "NUM-10")
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_linear_in_the_cotangents(method, subject):
    dtype = dtype_of(subject)
    problem = make(subject, 33, method=method, dtype=dtype, causal=True)
    once = problem.gradients(subject)
    twice = problem.but(grad_out=2 * problem.grad_out, grad_lse=2 * problem.grad_lse).gradients(
        subject
    )
    doubled = Gradients(*(x if x is None else 2 * x for x in once))
    assert_same(subject, dtype, twice, doubled)
