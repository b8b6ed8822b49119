"""Each option changes the result, and as it should; heads, layouts and forms of the output."""

import math

import numpy as np
import pytest

from plsh.backend import AttentionOutput
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
from plsh.hashing import (
    FixedBlocks,
    IndependentCuts,
    PowerLawBinning,
    RandomBinning,
)
from plsh.methods import Exact, PositionalLSH, Window
from plsh.testing import assert_attention_close, assert_equal_to_rounding, assert_identical

METHOD = pytest.mark.parametrize("method", NAMES)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES)

# --- no option is ignored -------------------------------------------------------------------------

IDS = np.array([[0] * 20 + [1] * 20, [0] * 9 + [-1] * 4 + [0] * 27], np.int32)
STEEPER = (1.0, 0.5, 0.25, 0.125)

FLIPS = {
    "causal": (NAMES, {"causal": True}),
    "scale": (NAMES, {"scale": 1.25}),
    "scale of zero": (NAMES, {"scale": 0.0}),
    "negative scale": (NAMES, {"scale": -0.3}),
    "segment_ids": (NAMES, {"segment_ids": IDS}),
    "segment_ids of the keys": (NAMES, {"segment_ids": (np.zeros_like(IDS), IDS)}),
    "q_offset": (NAMES, {"q_offset": 25}),
    "k_offset": (NAMES, {"k_offset": 3, "causal": True}),
    "both offsets": (["lsh", "lsh-iid"], {"q_offset": 77, "k_offset": 77}),
    "slopes": (METHODS, {"slopes": STEEPER}),
    "order of slopes": (METHODS, {"slopes": SLOPES[::-1]}),
    "slopes of the last head": (METHODS, {"slopes": (*SLOPES[:3], 0.25)}),
    "slopes per batch row": (["exact", "window"], {"slopes": (SLOPES, STEEPER)}),
    "width": (["window"], {"method": Window(5)}),
    "width of one head": (["window"], {"method": Window((9, 4, 2, 30))}),
    "width of zero": (["window"], {"method": Window(0)}),
    # Widths follow from slopes by value, which a tracer has none of.
    "tol": (["window"], {"method": Window(tol=0.1), "plain_slopes": True}),
    "samples": (["lsh"], {"method": PositionalLSH(6, seed=5)}),
    "one sample": (["lsh"], {"method": PositionalLSH(1, seed=5)}),
    "sampler": (["lsh"], {"method": PositionalLSH(5, seed=5, sampler="iid")}),
    "seed": (["lsh"], {"method": PositionalLSH(5, seed=6)}),
    "seed of several words": (["lsh"], {"method": PositionalLSH(5, seed=(5, 0))}),
    "head_ids": (["lsh"], {"method": PositionalLSH(5, seed=5, head_ids=(3, 0, 1, 2))}),
    "RandomBinning": (
        ["lsh"],
        {"method": PositionalLSH(5, seed=5, family=RandomBinning((4, 40, 9, 1))), "slopes": None},
    ),
    "PowerLawBinning": (
        ["lsh"],
        {"method": PositionalLSH(5, family=PowerLawBinning(2.0, (0.9, 0.3, 0.1, 0.02))),
         "slopes": None},
    ),
    "FixedBlocks": (
        ["lsh"],
        {"method": PositionalLSH(5, sampler=None, family=FixedBlocks((4.0, 11.3, 1.0, 40.0))),
         "slopes": None},
    ),
    "IndependentCuts": (
        ["lsh"],
        {"method": PositionalLSH(5, sampler=None, family=IndependentCuts((4.0, 20.0, 1.5, 9.0))),
         "slopes": None},
    ),
    "PartitionSet": (
        [pytest.param("lsh", marks=pytest.mark.may_refuse)],
        {"method": RandomBinning((3.0, 30.0, 9.0, 100.0)).sample(5, 40, seed=9), "slopes": None},
    ),
    "PartitionSet of one head": (
        [pytest.param("lsh", marks=pytest.mark.may_refuse)],
        {"method": RandomBinning(6.0).sample(5, 40, seed=9), "slopes": None},
    ),
}  # fmt: skip
"""One option that is not the default: the methods that have it, and its value."""

FLIP = pytest.mark.parametrize(
    ("option", "method"),
    [
        pytest.param(option, *getattr(name, "values", [name]), marks=getattr(name, "marks", ()))
        for option, (names, _) in FLIPS.items()
        for name in names
    ],
)


@pytest.mark.requirement("ATT-24", "BCK-14", "ATT-9", "ATT-13", "MTH-3")
@FLIP
def test_an_option_changes_the_result_as_it_should(option, method, subject):
    default = make(subject, 40, method=method)
    problem = default.but(**FLIPS[option][1])
    problem.check(subject)
    before, after = default.output(subject), problem.output(subject)
    assert np.max(np.abs(before.out - after.out)) > 1e-2


@pytest.mark.requirement("ATT-24", "MTH-8", "ATT-8")
@pytest.mark.needs("method:exact", "method:window", "method:lsh")
def test_the_methods_are_three(subject):
    made = [make(subject, 40, method=method).output(subject).out for method in METHODS]
    for i in range(3):
        assert np.max(np.abs(made[i] - made[i - 1])) > 1e-2


@pytest.mark.requirement("ATT-24", "ATT-9", "MTH-8")
@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_those_of_the_standard(method, subject):
    """By name, with slopes by the recipe and scale 1/sqrt(D)."""
    objects = {"exact": Exact(), "window": Window(tol=1e-6), "lsh": PositionalLSH(16, seed=0)}
    slopes = tuple(2.0 ** (-8 * (h + 1) / 4) for h in range(4))
    problem = make(subject, 40, method=method).but(method=objects[method], slopes=slopes)
    q, k, v = problem.arrays(subject)
    expected = problem.but(plain_slopes=True, scale=8**-0.5).output(subject)
    got = AttentionOutput(
        *map(subject.host, subject.attention(q, k, v, method=method, return_lse=True))
    )
    assert_same(subject, problem.dtype, got, expected)
    if method == "lsh":
        assert_identical(subject.attention(q, k, v), subject.array(got.out, problem.dtype))


# --- heads ----------------------------------------------------------------------------------------

GROUPS = [(6, 2), (6, 3), (4, 4), (4, 1), (12, 3), (3, 1), (10, 5)]


@pytest.mark.requirement("ATT-4")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_query_head_reads_its_key_head(method, heads, kv_heads, subject):
    """Values that name their head come out as they are."""
    problem = _heads(make(subject, 33, method=method, heads=heads, kv_heads=kv_heads), heads)
    of_head = np.arange(kv_heads, dtype=float)[None, :, None, None]
    v = np.broadcast_to(of_head + 1, problem.v.shape)
    out = subject.attention(*problem.but(v=v).arrays(subject), **problem.keywords(subject))
    group = heads // kv_heads
    expected = np.repeat(v, group, axis=1)
    assert_equal_to_rounding(out, subject.array(expected, problem.dtype))


@pytest.mark.requirement("ATT-4", "NUM-8", "NUM-9", "MTH-6")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_grouped_heads_are_right(method, heads, kv_heads, subject):
    problem = make(subject, 20, 33, method=method, heads=heads, kv_heads=kv_heads, q_offset=13)
    _heads(problem, heads).check(subject)


def _heads(problem, heads):
    """Return the problem with a slope, or a width, for each of any number of heads."""
    slopes = tuple(2.0 ** (-1 - h % 6) for h in range(heads))
    if isinstance(problem.method, Window):
        return problem.but(slopes=slopes, method=Window(tuple((h * 5) % 17 for h in range(heads))))
    return problem.but(slopes=slopes)


# --- layout and form ------------------------------------------------------------------------------


@pytest.mark.requirement("ATT-5", "ATT-6", "ATT-7")
@METHOD
@CAUSAL
@pytest.mark.parametrize("lengths", [(4, 4), (12, 20)], ids=str)
def test_the_layout_changes_no_value(method, causal, lengths, subject):
    """With as many tokens as heads a layout that is ignored shows in the values alone."""
    problem = make(subject, *lengths, method=method, kv_heads=4, causal=causal, q_offset=8)
    keywords = problem.keywords(subject)
    swapped = (
        subject.array(x.swapaxes(1, 2), problem.dtype) for x in (problem.q, problem.k, problem.v)
    )
    out, lse = subject.attention(*swapped, layout="bshd", return_lse=True, **keywords)
    got = AttentionOutput(subject.host(out).swapaxes(1, 2), subject.host(lse))
    assert_same(subject, problem.dtype, got, problem.output(subject))


@pytest.mark.requirement("ATT-5", "ATT-26", "ATT-7")
@pytest.mark.needs("gradients")
@METHOD
def test_the_layout_changes_no_gradient(method, subject):
    problem = make(subject, 12, 20, method=method, causal=True, q_offset=8)
    dtype = problem.dtype
    q, k, v, grad_out = (
        subject.array(x.swapaxes(1, 2), dtype)
        for x in (problem.q, problem.k, problem.v, problem.grad_out)
    )
    grad_lse = subject.array(problem.grad_lse, wide(dtype))
    _, got = subject.gradients(
        q, k, v, grad_out, grad_lse, layout="bshd", **problem.keywords(subject)
    )
    swapped = [subject.host(x).swapaxes(1, 2) for x in got[:3]]
    by_slope = None if got.slopes is None else subject.host(got.slopes)
    assert_same(subject, dtype, (*swapped, by_slope), tuple(problem.gradients(subject)))


@pytest.mark.requirement("ATT-6", "ATT-7", "CNV-3")
@METHOD
@DTYPE
@pytest.mark.parametrize("dims", [(8, 6), (6, 8), (1, 3), (3, 1)], ids=str)
def test_the_output_is_like_q(method, dtype, dims, subject):
    problem = make(subject, 9, 12, method=method, dtype=dtype, dims=dims, q_offset=3)
    q, k, v = problem.arrays(subject)
    out, lse = subject.attention(q, k, v, return_lse=True, **problem.keywords(subject))
    expected, plain = problem.yardsticks
    subject.record(
        assert_attention_close(out, expected.out, plain.out, like=q),
        assert_attention_close(
            lse, expected.lse, plain.lse, like=q, dtype=wide(dtype), terms=1.0, name="lse"
        ),
    )


@pytest.mark.requirement("ATT-7")
@METHOD
@DTYPE
@CAUSAL
def test_asking_for_the_lse_changes_no_bit_of_the_output(method, dtype, causal, subject):
    problem = make(subject, 70, method=method, dtype=dtype, causal=causal)
    q, k, v = problem.arrays(subject)
    keywords = problem.keywords(subject)
    alone = subject.attention(q, k, v, **keywords)
    asked = subject.attention(q, k, v, return_lse=True, **keywords)
    assert type(asked) is AttentionOutput
    assert not isinstance(alone, tuple)
    assert_identical(alone, asked.out)
    assert_identical(subject.attention(q, k, v, return_lse=False, **keywords), asked.out)


# --- limits of the slope --------------------------------------------------------------------------


@pytest.mark.requirement("ATT-10", "MTH-4")
@pytest.mark.parametrize("method", METHODS)
@DTYPE
@CAUSAL
def test_slope_zero_is_plain_attention(method, dtype, causal, subject):
    zero = (0.0,) * 4
    problem = make(subject, 40, method=method, dtype=dtype, slopes=zero, causal=causal)
    plain = problem.but(method=Exact())
    kinds = {
        "exact": [Exact()],
        "window": [Window(tol=0.5), Window(39)],
        "lsh": [
            PositionalLSH(samples, seed=seed, sampler=sampler)
            for samples, seed, sampler in (
                (1, 0, "stratified"), (3, 7, "iid"), (16, 2**63, "stratified"), (16, (1, 2), "iid"),
            )
        ],
    }[method]  # fmt: skip
    inputs = problem.arrays(subject)
    for kind in kinds:
        call = problem.but(method=kind)
        output = subject.attention(*inputs, return_lse=True, **call.keywords(subject))
        expected, rounded = plain.yardsticks
        subject.record(
            assert_attention_close(output.out, expected.out, rounded.out, like=inputs[0]),
            assert_attention_close(
                output.lse,
                expected.lse,
                rounded.lse,
                like=inputs[0],
                dtype=wide(dtype),
                terms=1.0,
                name="lse",
            ),
        )


@pytest.mark.requirement("ATT-10", "NUM-3", "NUM-5")
@pytest.mark.parametrize("method", METHODS)
@DTYPE
@pytest.mark.parametrize("slope", [1e4, 1e30, 1e38, 1e300])
def test_a_huge_slope_attends_to_the_own_position(method, dtype, slope, subject):
    problem = make(
        subject, 40, method=method, dtype=dtype, slopes=(slope,) * 4, plain_slopes=True
    ).but(**({"method": Window(20)} if method == "window" else {}))
    got = problem.output(subject)
    own = np.repeat(problem.v, 2, axis=1)
    assert_equal_to_rounding(subject.array(got.out, dtype), subject.array(own, dtype), units=2)
    keys = np.repeat(problem.k, 2, axis=1).astype(np.float64)
    logits = (problem.q.astype(np.float64) * keys).sum(axis=-1) / math.sqrt(8)
    assert_equal_to_rounding(
        subject.array(got.lse, wide(dtype)), subject.array(logits, wide(dtype)), name="lse"
    )


@pytest.mark.requirement("ATT-10", "ATT-9")
@pytest.mark.needs("method:exact")
def test_a_larger_slope_sees_less_far(subject):
    dtype = dtype_of(subject)
    values = np.arange(40.0)[None, None, :, None] * np.ones((1, 1, 1, 6))
    problem = make(subject, 1, 40, batch=1, heads=4, kv_heads=1, dtype=dtype, q_offset=0)
    slopes = (0.0, 0.03125, 0.125, 1.0)
    out = problem.but(q=0 * problem.q, v=values, slopes=slopes).output(subject).out
    means = out[0, :, 0, 0]
    assert np.all(means[:-1] > 1.2 * means[1:])
