"""The paper's algorithm on the backend's arrays: what it is, and that the backend agrees."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

import plsh
from plsh import compat, testing
from plsh.backend import AttentionOutput, Gradients
from plsh.conformance.doubles import widest

DTYPES = ("float16", "bfloat16", "float32", "float64")
SIGMA = (2.0, 8.0, 30.0, float("inf"))
N = 23
SEGMENTS = np.repeat([[-1] + [0] * 8 + [1] * 6 + [-1] * 2 + [2] * 5 + [-1]], 2, axis=0)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": -0.7},
    "offsets": {"q_offset": 9, "k_offset": 4, "causal": True},
    "queries after": {"q_offset": 60, "k_offset": 2},
    "segments": {"segment_ids": SEGMENTS, "causal": True},
    "pair": {"segment_ids": (SEGMENTS, SEGMENTS[:, ::-1].copy())},
}


def draw(n=128, samples=5, heads=4):
    return plsh.RandomBinning(SIGMA[:heads]).sample(samples, n, seed=3, sampler="stratified")


def inputs(dtype):
    return testing.make_inputs(2, 4, 2, N, head_dim=4, value_dim=6, dtype=dtype)


def arrays(subject, dtype):
    return [subject.array(x, dtype) for x in inputs(dtype)[:4]]


def labels(partitions, options, length=N):
    """Return the labels of queries and keys."""
    first_k = options.get("k_offset", 0)
    first_q = options.get("q_offset", first_k)
    return [partitions.labels_at(first, first + length) for first in (first_q, first_k)]


def yardsticks(dtype, weight, options, **more):
    offsets = {"q_offset": options.get("q_offset", options.get("k_offset", 0))}
    given = {**options, **offsets, "weight": weight, **more}
    expected = testing.oracle(*inputs(dtype)[:3], **given)
    return expected, testing.plain_attention(*inputs(dtype)[:3], dtype=dtype, **given)


def keywords(subject, options):
    """Turn segment ids into arrays of the backend's kind."""
    ids = options.get("segment_ids")
    if ids is None:
        return options
    pair = ids if isinstance(ids, tuple) else (ids, ids)
    made = tuple(subject.array(x, "int32") for x in pair)
    return options | {"segment_ids": made if isinstance(ids, tuple) else made[0]}


@pytest.mark.requirement("RED-1", "RED-3", "NUM-8")
@pytest.mark.parametrize("options", OPTIONS)
def test_reduction_pools_short_attentions(options, subject):
    """By the formulas of RED-1, in float64: one dense softmax inside each partition's blocks."""
    dtype, partitions = widest(subject), draw()
    given = OPTIONS[options]
    of_q, of_k = labels(partitions, given)
    parts = []
    for r in range(partitions.samples):
        same = of_q[:, r, :, None] == of_k[:, r, None, :]
        parts.append(yardsticks(dtype, same.astype(float), given)[0])
    lse = np.stack([part.lse for part in parts])
    share = np.exp(lse - np.maximum(lse.max(axis=0), -1e300))
    total = share.sum(axis=0)
    with np.errstate(divide="ignore"):
        pooled = np.log(total) + np.maximum(lse.max(axis=0), -1e300) - np.log(len(parts))
    pooled = np.where(total > 0, pooled, -np.inf)
    out = sum(w[..., None] * part.out for w, part in zip(share, parts, strict=True))
    out = out / np.where(total > 0, total, 1)[..., None]
    expected, plain = yardsticks(dtype, testing.step_weight(of_q, of_k), given)
    q, k, v, _ = arrays(subject, dtype)
    found = plsh.reduction(q, k, v, partitions, **keywords(subject, given))
    assert isinstance(found, AttentionOutput)
    subject.record(
        *testing.assert_output_close(found, expected._replace(out=out, lse=pooled), plain, like=q)
    )


@pytest.mark.requirement("RED-2", "RED-1", "ATT-1")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["lsh"])
def test_attention_of_the_recipe_is_the_reduction(method, dtype, options, subject):
    """The backend draws the blocks; the reduction is given them. One oracle judges both."""
    given, partitions = OPTIONS[options], draw()
    weight = testing.step_weight(*labels(partitions, given))
    expected, plain = yardsticks(dtype, weight, given)
    q, k, v, _ = arrays(subject, dtype)
    made = keywords(subject, given)
    recipe = plsh.PositionalLSH(5, seed=3, family=plsh.RandomBinning(SIGMA))
    for output in (
        plsh.reduction(q, k, v, partitions, **made),
        subject.attention(q, k, v, method=recipe, return_lse=True, **made),
    ):
        subject.record(*testing.assert_output_close(output, expected, plain, like=q))


@pytest.mark.requirement("RED-2", "MTH-6", "BCK-14")
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.needs("method:lsh")
@pytest.mark.may_refuse
def test_attention_of_the_partitions_is_the_reduction(heads, subject):
    """Of all heads, or of one that serves all; longer than the tokens."""
    dtype, partitions = widest(subject), draw(heads=heads)
    q, k, v, _ = arrays(subject, dtype)
    for options in OPTIONS.values():
        made = keywords(subject, options)
        one = plsh.reduction(q, k, v, partitions, **made)
        other = subject.attention(q, k, v, method=partitions, return_lse=True, **made)
        for x, y in zip(other, one, strict=True):
            testing.assert_equal_to_rounding(x, y)


@pytest.mark.requirement("RED-3")
def test_one_head_of_partitions_serves_every_head(subject):
    one = draw(heads=1)
    all_heads = plsh.PartitionSet(np.repeat(one.labels(), 4, axis=0))
    q, k, v, _ = arrays(subject, widest(subject))
    for x, y in zip(plsh.reduction(q, k, v, one), plsh.reduction(q, k, v, all_heads), strict=True):
        testing.assert_equal_to_rounding(x, y)


@pytest.mark.requirement("RED-3", "ATT-3", "ATT-21")
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1)], ids=str)
def test_reduction_of_few_tokens(lengths, subject):
    dtype = widest(subject)
    made = testing.make_inputs(2, 4, 2, lengths[0], lengths[1], 4, 6, dtype)
    q, k, v = (subject.array(x, dtype) for x in made[:3])
    out, lse = plsh.reduction(q, k, v, draw(), q_offset=3, k_offset=3)
    assert tuple(out.shape) == (2, 4, lengths[0], 6)
    assert tuple(lse.shape) == (2, 4, lengths[0])
    assert compat.kind(out) == compat.kind(lse) == subject.kind
    if lengths[1] == 0:
        assert not np.any(subject.host(out))
        assert np.all(subject.host(lse) == -np.inf)
    else:
        want = np.repeat(subject.host(v), 2, axis=1)[:, :, : lengths[0]]
        testing.assert_equal_to_rounding(out, subject.array(want, dtype))


REFUSED: dict[str, Any] = {
    "no partitions": ({"partitions": "lsh"}, TypeError, "PartitionSet"),
    "other heads": ({"partitions": draw(heads=3)}, ValueError, "3"),
    "offsets per row": ({"k_offset": [1, 2]}, ValueError, "k_offset"),
    "float offset": ({"q_offset": 1.0}, TypeError, "q_offset"),
    "past the partitions": ({"k_offset": 110}, ValueError, r"\[0, 128\)"),
    "before the partitions": ({"k_offset": -1}, ValueError, "k_offset"),
    "causal a number": ({"causal": 1}, TypeError, "causal"),
    "scale NaN": ({"scale": float("nan")}, ValueError, "scale"),
    "ids a list": ({"segment_ids": [[0] * N] * 2}, TypeError, "segment_ids"),
    "a layout": ({"layout": "bshd"}, TypeError, "layout"),
}


@pytest.mark.requirement("RED-3", "ERR-4")
@pytest.mark.parametrize("case", REFUSED)
def test_reduction_refuses_what_breaks_a_rule(case, subject):
    changed, error, words = REFUSED[case]
    options = {"partitions": draw(), **changed}
    q, k, v, _ = arrays(subject, widest(subject))
    with pytest.raises(error, match=words):
        plsh.reduction(q, k, v, options.pop("partitions"), **options)


@pytest.mark.requirement("RED-3")
def test_reduction_has_a_batch_axis_and_one_dtype(subject):
    q, k, v, _ = arrays(subject, widest(subject))
    with pytest.raises(ValueError, match="batch"):
        plsh.reduction(q[0, ...], k[0, ...], v[0, ...], draw())
    with pytest.raises(ValueError, match="D"):
        plsh.reduction(q, k[..., :3], v, draw())
    with pytest.raises(ValueError, match="multiple"):
        plsh.reduction(q[:, :3, ...], k, v, draw(heads=3))
    other = "float32" if widest(subject) != "float32" else "float64"
    with pytest.raises(TypeError, match="dtype"):
        plsh.reduction(q, k, subject.array(subject.host(v), other), draw())


@pytest.mark.requirement("RED-4", "NUM-8", "NUM-10")
@pytest.mark.needs("autograd")
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduction_is_differentiable(dtype, subject):
    """Through the pooled lse, too: the gradient is that of the merged row."""
    partitions, given = draw(), OPTIONS["segments"]
    by_out, by_lse = inputs(dtype)[3:]
    weight = testing.step_weight(*labels(partitions, given))
    expected, plain = yardsticks(dtype, weight, given, grad_out=by_out, grad_lse=by_lse)
    q, k, v, grad_out = arrays(subject, dtype)
    made = keywords(subject, given)

    def f(q, k, v):
        return tuple(plsh.reduction(q, k, v, partitions, **made))

    wide = "float64" if dtype == "float64" else "float32"
    found = subject.vjp(f, [q, k, v], (grad_out, subject.array(by_lse, wide)))
    grads = Gradients(found[0], found[1], found[2], None)
    subject.record(*testing.assert_gradients_close(grads, expected, plain, like=q))


@pytest.mark.requirement("RED-4")
@pytest.mark.needs("kind:torch", "dtype:float64")
def test_reduction_is_differentiable_twice(subject):
    import torch

    q, k, v = (subject.array(np.random.default_rng(i).normal(size=(1, 2, 5, 2)), "float64")
               for i in range(3))  # fmt: skip
    partitions = plsh.PartitionSet([[[0, 0, 2, 2, 2], [0, 1, 1, 1, 4]]])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradgradcheck(
        lambda *x: tuple(plsh.reduction(*x, partitions, causal=True)), leaves
    )


@pytest.mark.requirement("RED-4", "MEM-1")
@pytest.mark.needs("kind:numpy")
def test_reduction_forms_no_square(subject):
    """Memory at 16 thousand tokens, against one dense matrix of them."""
    n = 1 << 14
    q = subject.array(np.ones((1, 1, n, 1)), widest(subject))
    partitions = plsh.FixedBlocks((16.0,)).sample(1, n)
    plsh.reduction(q[:, :, :64, :], q[:, :, :64, :], q[:, :, :64, :], partitions)
    tracemalloc.start()
    try:
        plsh.reduction(q, q, q, partitions)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n * n / 4
