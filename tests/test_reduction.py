"""The paper's reduction: what it computes, what it costs, and that no draw is wasted."""

import itertools
import sys
import time
import tracemalloc

import numpy as np
import pytest
import torch
from laws import FAMILY, METHODS, SLOPES, assert_same, attend, inputs

import plsh
from plsh import testing

SETS = {
    "stratified": FAMILY.sample(8, 60, seed=1),
    "iid": FAMILY.sample(5, 60, seed=2, sampler="iid"),
    "one sample": FAMILY.sample(1, 60, seed=3),
    "cuts": plsh.IndependentCuts(6.0).sample(4, 60, seed=4),
    "fixed": plsh.FixedBlocks(7).sample(2, 60),
    "singletons": plsh.FixedBlocks(1).sample(1, 60),
    "one block": plsh.RandomBinning(float("inf")).sample(2, 60),
    "power law": plsh.PowerLawBinning((1.0, 2.0, 0.5, 3.0), 0.2).sample(4, 60),
}
WHICH = pytest.mark.parametrize("which", SETS)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def check_reduction(which, causal, segment_ids=None, scale=None):
    """The reduction is attention under the mean of the masks, dense: out and lse."""
    q, k, v = inputs(60)
    partitions = SETS[which]
    heads = range(4) if partitions.heads > 1 else [0] * 4
    call = {"causal": causal, "segment_ids": segment_ids, "scale": scale}
    weight = np.stack([partitions.mean_mask(h) for h in heads])
    want = testing.oracle(q, k, v, weight=weight, **call)
    got = plsh.reduction(q, k, v, partitions, **call)
    testing.assert_equal_to_rounding(got.out, want.out)
    testing.assert_equal_to_rounding(got.lse, want.lse, name="lse")
    also = plsh.attention(q, k, v, method=partitions, return_lse=True, backend="reference", **call)
    testing.assert_identical(also.out, got.out)
    testing.assert_identical(also.lse, got.lse)


@WHICH
@CAUSAL
def test_reduction_is_attention_under_the_mean_mask(which, causal):
    """reduction == attention(method=partitions) == dense attention under M̃."""
    check_reduction(which, causal)


@WHICH
def test_reduction_with_segments_and_scale(which):
    ids = plsh.segments_from_lengths([[20, 13, 20], [58]], 60)
    check_reduction(which, True, ids, -0.7)


@CAUSAL
def test_chunks_and_stretches_are_joined_in_order(causal, monkeypatch):
    """Small limits of scores and rows: many groups of blocks, many stretches of queries."""
    module = sys.modules["plsh.reduction"]  # the attribute `plsh.reduction` is the function
    monkeypatch.setattr(module, "_SCORES", 64)
    monkeypatch.setattr(module, "_ROWS", 96)
    for which in SETS:
        check_reduction(which, causal)


@pytest.mark.parametrize("method", ["exact", "window"])
@CAUSAL
def test_tiles_of_the_band_are_joined_in_order(method, causal, monkeypatch):
    monkeypatch.setattr("plsh.reference._SCORES", 300)
    q, k, v = inputs(60)
    widths = METHODS["window"].width if method == "window" else None
    want = testing.oracle(q, k, v, slopes=SLOPES, widths=widths, causal=causal)
    got = attend(q, k, v, method, causal=causal)
    testing.assert_equal_to_rounding(got.out, want.out)
    testing.assert_equal_to_rounding(got.lse, want.lse, name="lse")


def test_one_head_of_partitions_serves_all():
    q, k, v = inputs(60)
    one = plsh.PartitionSet(SETS["stratified"].labels()[:1])
    four = plsh.PartitionSet(np.repeat(one.labels(), 4, axis=0))
    for causal in (False, True):
        got, want = (plsh.reduction(q, k, v, p, causal=causal) for p in (one, four))
        testing.assert_identical(got.out, want.out)
        testing.assert_identical(got.lse, want.lse)


def test_each_head_has_its_own_blocks():
    """Swapping the partitions of two heads of equal q, k, v swaps their results."""
    q, k, v = (np.repeat(x[:, :1], x.shape[1], axis=1) for x in inputs(60))
    labels = SETS["stratified"].labels()
    got = plsh.reduction(q, k, v, plsh.PartitionSet(labels))
    swapped = plsh.reduction(q, k, v, plsh.PartitionSet(labels[[1, 0, 2, 3]]))
    testing.assert_identical(swapped.out[:, [1, 0, 2, 3]], got.out)
    assert np.max(np.abs(got.out[:, 0] - got.out[:, 1])) > 0.1


def test_the_order_of_the_samples_does_not_matter():
    q, k, v = inputs(60)
    labels = SETS["stratified"].labels()
    assert_same(
        plsh.reduction(q, k, v, plsh.PartitionSet(labels[:, ::-1])),
        plsh.reduction(q, k, v, plsh.PartitionSet(labels)),
    )


def test_a_repeated_sample_changes_nothing():
    """The lse is the log of the *mean* of the denominators: ln s is taken off."""
    q, k, v = inputs(60)
    labels = SETS["iid"].labels()
    assert_same(
        plsh.reduction(q, k, v, plsh.PartitionSet(np.repeat(labels, 3, axis=1))),
        plsh.reduction(q, k, v, plsh.PartitionSet(labels)),
    )


def test_pooling_converges_to_alibi_and_averaged_outputs_would_not():
    """Numerators and denominators are pooled: 16 times the samples, about a quarter of the error.

    The mean of the normalised outputs has a limit of its own, far away.
    """
    errors, averaged = [], []
    for samples in (16, 256):
        pooled, mean = [], []
        for seed in range(4):
            q, k, v = inputs(64, batch=1, heads=1, kv_heads=1, head_dim=16, seed=seed)
            exact = plsh.attention(q, k, v, method="exact", slopes=[0.1], backend="reference")
            blocks = plsh.RandomBinning(10.0).sample(samples, 64, seed=seed, sampler="iid")
            pooled.append(plsh.reduction(q, k, v, blocks).out - exact)
            singles = [
                plsh.reduction(q, k, v, plsh.PartitionSet(blocks.labels()[:, r : r + 1])).out
                for r in range(samples)
            ]
            mean.append(np.mean(singles, axis=0) - exact)
        errors.append(np.sqrt(np.mean(np.square(pooled))))
        averaged.append(np.sqrt(np.mean(np.square(mean))))
    assert 2.5 < errors[0] / errors[1] < 6.5
    assert averaged[1] > 4 * errors[1]
    assert averaged[0] < 1.6 * averaged[1]


def test_the_merged_lse_takes_part_in_the_gradient():
    """Treating the lse of each mask as a constant would be 14 % wrong."""
    q, k, v = inputs(60)
    partitions = SETS["iid"]
    weight = np.stack([partitions.mean_mask(h) for h in range(4)])
    rng = np.random.default_rng(0)
    grad_out, grad_lse = rng.standard_normal((2, 4, 60, 6)), rng.standard_normal((2, 4, 60))
    want = testing.oracle(q, k, v, weight=weight, grad_out=grad_out, grad_lse=grad_lse)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    got = plsh.reduction(*leaves, partitions)
    grads = torch.autograd.grad(
        got, leaves, (torch.from_numpy(grad_out), torch.from_numpy(grad_lse))
    )
    for grad, right in zip(grads, (want.q, want.k, want.v), strict=True):
        testing.assert_equal_to_rounding(grad, torch.from_numpy(right), units=64)


def test_reduction_takes_offsets_and_unequal_lengths():
    q, k, v = inputs(9, 30)
    partitions = SETS["iid"]
    got = plsh.reduction(q, k, v, partitions, causal=True, q_offset=28, k_offset=4)
    weight = np.stack([partitions.mean_mask(h)[28:37, 4:34] for h in range(4)])
    want = testing.oracle(q, k, v, weight=weight, causal=True, q_offset=28, k_offset=4)
    testing.assert_equal_to_rounding(got.out, want.out)
    testing.assert_equal_to_rounding(got.lse, want.lse)


@pytest.mark.parametrize("lengths", list(itertools.product([0, 1, 5], repeat=2)))
def test_reduction_of_few_or_no_tokens(lengths):
    q, k, v = inputs(*lengths)
    got = plsh.reduction(q, k, v, SETS["iid"], q_offset=0)
    assert got.out.shape == (2, 4, lengths[0], 6)
    if lengths[1] == 0:
        assert not np.any(got.out)
        assert np.all(got.lse == -np.inf)


def test_reduction_on_the_strictest_array_api(strict):
    q, k, v = inputs(60)
    want = plsh.reduction(q, k, v, SETS["stratified"], causal=True)
    got = plsh.reduction(*(strict.asarray(x) for x in (q, k, v)), SETS["stratified"], causal=True)
    testing.assert_equal_to_rounding(got.out, strict.asarray(want.out))
    testing.assert_equal_to_rounding(got.lse, strict.asarray(want.lse))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"partitions": [[0]]}, TypeError, "PartitionSet"),
        ({"partitions": FAMILY.sample(2, 8)}, ValueError, "inside"),
        ({"partitions": plsh.RandomBinning((1.0, 2.0)).sample(2, 60)}, ValueError, "heads"),
        ({"q": np.zeros((4, 60, 8))}, ValueError, "shape"),
        ({"causal": 1}, TypeError, "causal"),
        ({"q": np.zeros((2, 4, 9, 8))}, ValueError, "q_offset"),
    ],
    ids=["type", "range", "heads", "rank", "flag", "offset"],
)
def test_reduction_refuses_what_breaks_a_rule(change, error, message):
    q, k, v = inputs(60)
    call = {"q": q, "k": k, "v": v, "partitions": SETS["iid"], **change}
    with pytest.raises(error, match=message):
        plsh.reduction(**call)


# Cost


def peak_and_seconds(n, method, slope=0.05):
    q, k, v = inputs(n, dtype="float32", batch=1, heads=1, kv_heads=1, head_dim=16, value_dim=16)
    call = {"method": method, "slopes": [slope], "backend": "reference"}
    plsh.attention(q[:, :, :64], k[:, :, :64], v[:, :, :64], **call)
    tracemalloc.start()
    began = time.perf_counter()
    plsh.attention(q, k, v, **call)
    seconds = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, seconds


@pytest.mark.parametrize("method", ["lsh", "window"])
def test_memory_grows_linearly_with_the_length(method):
    """Nothing of size n x n: eight times the tokens, at most about eight times the memory."""
    chosen = plsh.PositionalLSH(4) if method == "lsh" else plsh.Window(100)
    (small, _), (large, _) = (peak_and_seconds(n, chosen) for n in (4000, 32000))
    assert large < 9 * small


def test_memory_of_lsh_at_a_hundred_thousand_tokens():
    """U100: H=1, d=16, s=4, slope 0.05: below 500 MB beyond the inputs."""
    peak, _ = peak_and_seconds(100_000, plsh.PositionalLSH(4))
    assert peak < 500e6


@pytest.mark.parametrize("method", ["lsh", "exact"])
def test_memory_of_one_block_is_linear_in_the_length(method):
    """A slope of 0: the one block is the whole sequence, and its scores are never held at once."""
    chosen = plsh.PositionalLSH(1) if method == "lsh" else plsh.Exact()
    (small, _), (large, _) = (peak_and_seconds(n, chosen, slope=0.0) for n in (1000, 8000))
    assert large < 9 * small


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lsh", "window"])
def test_time_grows_near_linearly_with_the_length(method):
    chosen = plsh.PositionalLSH(4) if method == "lsh" else plsh.Window(100)
    short, long = (min(peak_and_seconds(n, chosen)[1] for _ in range(3)) for n in (8000, 64000))
    assert long < 16 * short  # 8 times the tokens; quadratic would be 64


@pytest.mark.slow
def test_memory_of_exact_is_linear_in_the_length():
    """U100: chunked, never n x n."""
    peak, _ = peak_and_seconds(20_000, plsh.Exact())
    assert peak < 200e6
