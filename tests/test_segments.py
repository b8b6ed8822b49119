"""Segments: padding and packed documents equal separate calls, under every method."""

import numpy as np
import pytest
import torch
from laws import FAMILY, METHODS, NAMES, SLOPES, assert_same, attend, inputs, rows

import plsh
from plsh import testing

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
METHOD = pytest.mark.parametrize("method", NAMES)


def pad(x, before, after, fill=np.nan):
    """Add `before` and `after` tokens of `fill` along the sequence axis."""
    widths = [(0, 0)] * (x.ndim - 2) + [(before, after), (0, 0)]
    return np.pad(x, widths, constant_values=fill)


@METHOD
@CAUSAL
def test_left_padding_changes_nothing(method, causal):
    """U035: padding at positions below 0, filled with NaN; exactly the unpadded rows."""
    q, k, v = inputs(20)
    whole = attend(q, k, v, method, causal=causal)
    ids = np.array([[-1] * 3 + [0] * 20] * 2)
    padded = attend(
        *(pad(x, 3, 0) for x in (q, k, v)),
        method,
        causal=causal,
        q_offset=-3,
        k_offset=-3,
        segment_ids=ids,
    )
    assert_same(rows(padded, slice(3, None)), whole)
    assert not np.any(padded.out[:, :, :3])
    assert np.all(padded.lse[:, :, :3] == -np.inf)


@METHOD
@CAUSAL
def test_right_padding_changes_nothing(method, causal):
    """U035, U033: padding after the tokens, filled with NaN."""
    q, k, v = inputs(20)
    whole = attend(q, k, v, method, causal=causal)
    padded = attend(
        *(pad(x, 0, 5) for x in (q, k, v)),
        method,
        causal=causal,
        segment_ids=plsh.segments_from_lengths([20, 20], 25),
    )
    assert_same(rows(padded, slice(0, 20)), whole)
    assert not np.any(padded.out[:, :, 20:])


@METHOD
def test_left_padded_batch_of_unequal_lengths_equals_separate_calls(method):
    """U035: each row's first token is at position 0, by an offset per batch row."""
    q, k, v = inputs(12)
    pads = (5, 2)
    ids = np.where(np.arange(12) < np.array(pads)[:, None], -1, 0)
    offsets = tuple(-p for p in pads)
    got = attend(q, k, v, method, q_offset=offsets, k_offset=offsets, segment_ids=ids)
    for b, p in enumerate(pads):
        alone = attend(*(x[b : b + 1, :, p:] for x in (q, k, v)), method)
        testing.assert_equal_to_rounding(got.out[b : b + 1, :, p:], alone.out)
        testing.assert_equal_to_rounding(got.lse[b : b + 1, :, p:], alone.lse)


@METHOD
def test_padded_keys_alone_are_hidden(method):
    """U033: the lengths of the keys work without those of the queries."""
    q, k, v = inputs(6, 30)
    ids = np.zeros((2, 6), int), plsh.segments_from_lengths([24, 11], 30)
    for x in (k, v):
        x[np.broadcast_to((ids[1] < 0)[:, None], x.shape[:3])] = np.nan
    got = attend(q, k, v, method, q_offset=4, segment_ids=ids)
    for b, length in enumerate((24, 11)):
        alone = attend(
            q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length], method, q_offset=4
        )
        testing.assert_equal_to_rounding(got.out[b : b + 1], alone.out)


@METHOD
def test_a_decoding_step_keeps_its_padding_hidden(method):
    """U036: one query, three pads of 1e3 on the left of the cache."""
    q, k, v = inputs(1, 9)
    alone = attend(q, k, v, method, q_offset=8, causal=True)
    ids = np.zeros((2, 1), int), np.array([[-1] * 3 + [0] * 9] * 2)
    padded = attend(
        q, pad(k, 3, 0, 1e3), pad(v, 3, 0, 1e3), method,
        q_offset=8, k_offset=-3, causal=True, segment_ids=ids,
    )  # fmt: skip
    assert_same(padded, alone)


DOCUMENTS = (slice(0, 5), slice(5, 6), slice(6, 15))


@METHOD
@CAUSAL
def test_packed_documents_equal_separate_calls(method, causal):
    """U039: three documents in one row, each as if alone at its own positions."""
    q, k, v = inputs(15)
    ids = plsh.segments_from_lengths([[5, 1, 9]] * 2, 15)
    packed = attend(q, k, v, method, causal=causal, segment_ids=ids)
    for doc in DOCUMENTS:
        alone = attend(
            *(x[:, :, doc] for x in (q, k, v)),
            method,
            causal=causal,
            q_offset=doc.start,
            k_offset=doc.start,
        )
        assert_same(rows(packed, doc), alone)


@pytest.mark.parametrize("method", NAMES)
def test_gradients_of_packed_documents_equal_separate_calls(method):
    """U039: by q, k, v, and by the slopes where there is one."""
    q, k, v = (torch.from_numpy(x) for x in inputs(15))
    weight = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 4, 15, 6)))
    slopes = torch.tensor(SLOPES, dtype=torch.float64)
    learn = method in ("exact", "window")

    def grads(ids, parts):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, slopes)[: 3 + learn]]
        given = {"slopes": leaves[3]} if learn else {}
        loss = 0
        for part in parts:
            out = attend(
                *(x[:, :, part] for x in leaves[:3]), method,
                segment_ids=ids, q_offset=part.start, k_offset=part.start, **given,
            ).out  # fmt: skip
            loss = loss + (out * weight[:, :, part]).sum()
        return torch.autograd.grad(loss, leaves)

    ids = torch.from_numpy(plsh.segments_from_lengths([[5, 1, 9]] * 2, 15))
    packed, alone = grads(ids, [slice(0, 15)]), grads(None, DOCUMENTS)
    for a, b in zip(packed, alone, strict=True):
        testing.assert_equal_to_rounding(a, b)


@METHOD
def test_gaps_between_documents_are_silent(method):
    """U037: pads of NaN between documents; zero output and zero gradients there."""
    docs = (slice(0, 2), slice(3, 6), slice(7, 8))
    ids = np.array([[0, 0, -1, 1, 1, 1, -1, 2, -1]])
    arrays = inputs(9, batch=1)
    for x in arrays:
        x[:, :, ids[0] < 0] = np.nan
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]
    got = attend(*leaves, method, segment_ids=torch.from_numpy(ids))
    got.out.sum().backward()
    pads = torch.from_numpy(ids[0] < 0)
    assert not torch.any(got.out[:, :, pads])
    for x in leaves:
        assert torch.all(x.grad[:, :, pads] == 0)
        assert torch.all(torch.isfinite(x.grad))
    for doc in docs:
        apart = [torch.from_numpy(x[:, :, doc]).requires_grad_() for x in arrays]
        alone = attend(*apart, method, q_offset=doc.start, k_offset=doc.start)
        alone.out.sum().backward()
        testing.assert_equal_to_rounding(got.out[:, :, doc].detach(), alone.out.detach())
        for x, y in zip(leaves, apart, strict=True):
            testing.assert_equal_to_rounding(x.grad[:, :, doc], y.grad)


@METHOD
def test_a_row_of_length_zero_is_legal(method):
    """U034: lengths [5, 0, 3]: zeros for the empty sample, the others as if alone."""
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in inputs(5, batch=3))
    ids = torch.from_numpy(plsh.segments_from_lengths([5, 0, 3], 5))
    got = attend(q, k, v, method, segment_ids=ids)
    (got.out.sum() + got.lse[torch.isfinite(got.lse)].sum()).backward()
    assert not torch.any(got.out[1])
    assert torch.all(got.lse[1] == -torch.inf)
    for x in (q, k, v):
        assert torch.all(torch.isfinite(x.grad))
        assert not torch.any(x.grad[1])
    for b, length in ((0, 5), (2, 3)):
        alone = attend(*(x[b : b + 1, :, :length] for x in (q, k, v)), method)
        testing.assert_equal_to_rounding(
            got.out[b : b + 1, :, :length].detach(), alone.out.detach()
        )


def test_an_empty_document_contributes_nothing():
    """U034: lengths 3, 0, 4 packed are lengths 3, 4 packed."""
    q, k, v = inputs(7)
    for method in NAMES:
        a, b = (
            attend(q, k, v, method, segment_ids=plsh.segments_from_lengths([x] * 2, 7))
            for x in ([3, 0, 4], [3, 4])
        )
        testing.assert_identical(a.out, b.out)


@METHOD
def test_ids_need_not_be_sorted(method):
    """Equal ids see each other wherever they stand: interleaved documents."""
    q, k, v = inputs(16)
    ids = np.array([[0, 1] * 8, [7, 7, 2, 9] * 4])
    got = attend(q, k, v, method, segment_ids=ids)
    if method in ("exact", "window"):
        widths = None if method == "exact" else METHODS["window"].width
        weight = {"slopes": SLOPES, "widths": widths}
    else:
        weight = {"weight": testing.step_weight(*[dense_labels(method, 16)] * 2)}
    want = testing.oracle(q, k, v, segment_ids=ids, **weight)
    testing.assert_equal_to_rounding(got.out, want.out)
    testing.assert_equal_to_rounding(got.lse, want.lse)


def dense_labels(method, n):
    if method == "set":
        return METHODS["set"].labels(0, n)
    recipe = METHODS[method]
    return FAMILY.sample(recipe.samples, n, seed=recipe.seed, sampler=recipe.sampler).labels()


@METHOD
def test_queries_and_keys_of_padding_do_not_meet(method):
    """A negative id is padding on both sides, also where the ids are equal."""
    q, k, v = inputs(6)
    got = attend(q, k, v, method, segment_ids=np.full((2, 6), -1))
    assert not np.any(got.out)
    assert np.all(got.lse == -np.inf)


@METHOD
def test_one_segment_is_no_segment(method):
    q, k, v = inputs(17)
    got = attend(q, k, v, method, segment_ids=np.zeros((2, 17), np.int64), causal=True)
    testing.assert_identical(got.out, attend(q, k, v, method, causal=True).out)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8"])
def test_ids_of_any_integer_dtype(dtype):
    q, k, v = inputs(8)
    ids = np.array([[0, 0, 0, 1, 1, 2, 2, 2]] * 2, dtype)
    got = attend(q, k, v, "exact", segment_ids=ids)
    assert_same(got, attend(q, k, v, "exact", segment_ids=ids.astype(np.int32)))


@METHOD
def test_segments_without_a_batch_axis(method):
    q, k, v = inputs(8)
    ids = np.array([0, 0, -1, 1, 1, 1, 1, 1])
    got = attend(q[0], k[0], v[0], method, segment_ids=ids)
    want = attend(q[:1], k[:1], v[:1], method, segment_ids=ids[None])
    testing.assert_identical(got.out, want.out[0])
    testing.assert_identical(got.lse, want.lse[0])
