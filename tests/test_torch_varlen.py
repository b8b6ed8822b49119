"""Backend "torch_varlen": the oracle, what it refuses, its pieces, and the host side of CUDA."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from calls import FACTORS, pairwise
from laws import SLOPES, inputs
from plsh_torch.varlen import BACKEND, _attend, _kernels
from plsh_torch.varlen._pieces import rounds
from test_torch_backend import TorchCall, check_torch, everything
from torch.autograd import forward_ad

import plsh
from plsh import testing


@dataclass(frozen=True)
class VarlenCall(TorchCall):
    """A call of this backend, forward and through autograd."""

    backend = "torch_varlen"


# --- the oracle and the laws ----------------------------------------------------------------------

FACTORS = {
    **FACTORS,
    "method": ["lsh", "lsh-iid", "set", "set1", "cuts", "blocks", "power"],
    "lengths": [(n, n) for n in (0, 1, 33, 65, 129)]
    + [(33, 65), (65, 31), (1, 129), (5, 2), (4, 0), (0, 4)],
    "dims": [(1, 1), (3, 20), (20, 3), (16, 16)],
    "slope_form": ["heads", "one"],
}
CROSSED = [VarlenCall(**row) for row in pairwise(FACTORS, 11)]
LARGE = [
    VarlenCall("lsh", (2, 1), (65, 65), (16, 16), 2, causal, dtype=dtype, std=std)
    for causal, (dtype, std) in itertools.product(
        (False, True), (("float16", 5.0), ("float32", 12.0), ("float64", 30.0))
    )
]
"""Logits with a standard deviation of 25 to 900."""


@pytest.mark.parametrize("case", [*CROSSED, *LARGE], ids=str)
def test_call_equals_oracle(case):
    """U013, U016, U021, U023, U050, U054: every pair of options."""
    check_torch(case)


@pytest.mark.parametrize("causal", [False, True])
def test_it_equals_the_single_pass(causal):
    """The reduction scores a pair once for each sample, and gives the same."""
    q, k, v = inputs(130, dtype="float64")
    call = {"method": plsh.PositionalLSH(5), "causal": causal, "slopes": [1 / 16] * 4}
    given, other = (
        everything(q, k, v, "lsh", backend=backend, **call) for backend in ("torch_varlen", "torch")
    )
    for a, b in zip(given, other, strict=True):
        testing.assert_equal_to_rounding(a, b, units=64)


def test_the_same_call_twice_is_bit_equal():
    """U094: no atomics, one order."""
    q, k, v = inputs(65, dtype="float32")
    one, two = (everything(q, k, v, "lsh", backend="torch_varlen") for _ in range(2))
    for a, b in zip(one, two, strict=True):
        testing.assert_identical(a, b)


@pytest.mark.parametrize("which", ["out", "lse"])
def test_a_loss_of_one_output_alone(which):
    """The other has no cotangent."""
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs(40, dtype="float64")]
    call = {"method": "lsh", "slopes": SLOPES, "return_lse": True}
    found = []
    for backend in ("torch_varlen", "torch"):
        output = plsh.attention(*leaves, backend=backend, **call)
        loss = getattr(output, which).sum()
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for a, b in zip(*found, strict=True):
        want = torch.zeros_like(a) if b is None else b
        testing.assert_equal_to_rounding(a, want, units=64)


# --- what it refuses ------------------------------------------------------------------------------


def call(q, **keywords):
    return plsh.attention(q, q, q, **{"method": "lsh", "backend": "torch_varlen", **keywords})


def test_other_methods_are_refused():
    """It has no kernel with a bias."""
    with pytest.raises(plsh.UnsupportedByBackendError, match=r"'torch_varlen'.*exact"):
        call(torch.ones(1, 2, 4, 8), method="exact")


def test_transforms_are_refused_by_name():
    """U085: a compiler can't follow the host's integers; backend "torch" is an operator."""
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(plsh.UnsupportedByBackendError, match=r"torch\.func.*backend='torch'"):
        torch.func.grad(lambda x: call(x).sum())(q)
    with (
        pytest.raises(plsh.UnsupportedByBackendError, match="'torch_varlen' has no forward-mode"),
        forward_ad.dual_level(),
    ):
        call(forward_ad.make_dual(q, q))
    x = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    with pytest.raises(plsh.UnsupportedByBackendError, match="no second derivative"):
        first.sum().backward()


def test_what_cuda_kernels_do_not_take_is_said():
    """They take half precision, of head dims up to 256."""
    assert _kernels.reason(torch.bfloat16, 256) is None
    assert "float32" in _kernels.reason(torch.float32, 8)
    assert "257" in _kernels.reason(torch.float16, 257)
    with pytest.raises(plsh.UnsupportedByBackendError, match=r"on meta.*backend='torch'"):
        _attend.attend(*[torch.empty(1, 1, 1, 8, device="meta")] * 3, None)


def test_it_is_available_with_torch():
    assert BACKEND.availability().ok
    assert "torch_varlen" in {backend.name for backend in plsh.backends()}


# --- pieces ---------------------------------------------------------------------------------------


def seen_by(pieces, shape):
    """Return how often each pair ``(head, query, key)`` is in a piece."""
    found = np.zeros(shape, dtype=int)
    for head, i, m, j, n in zip(*pieces[1:], strict=True):
        block = np.tri(m, n) if pieces.causal else np.ones((m, n))
        found[head, i : i + m, j : j + n] += block.astype(int)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_pieces_hold_every_visible_pair_once(seed):
    """And no query, and no key, is twice in a round: what rounds add up needs no atomics."""
    rng = np.random.default_rng(seed)
    heads, len_q, len_k = rng.integers(1, 4), *rng.integers(1, 30, 2)
    starts = tuple(int(x) for x in rng.integers(0, 12, 2))
    cuts = np.sort(rng.integers(0, 60, (heads, 6)), axis=1)
    at_q, at_k = (start + np.arange(n) for start, n in zip(starts, (len_q, len_k), strict=True))
    labels = tuple(
        np.stack([row[np.searchsorted(row[:-1], at, side="right") - 1] for row in cuts])
        .astype(np.int32)
        for at in (at_q, at_k)
    )  # fmt: skip
    ids = None
    if seed % 2:
        ids = tuple(np.sort(rng.integers(-1, 3, n)) for n in (len_q, len_k))
        if seed % 4 == 1:
            ids = tuple(rng.integers(-1, 3, n) for n in (len_q, len_k))
    causal = seed % 3 == 0
    want = labels[0][:, :, None] == labels[1][:, None, :]
    if ids is not None:
        want &= (ids[0][:, None] == ids[1]) & (ids[0] >= 0)[:, None]
    if causal:
        want &= at_q[:, None] >= at_k
    total = np.zeros(want.shape, dtype=int)
    for pieces in rounds(labels, starts, ids, causal):
        found = seen_by(pieces, want.shape)
        total += found
        for first, count in (pieces[2:4], pieces[4:6]):
            rows = [(h, i + x) for h, i, n in zip(pieces.row, first, count, strict=True)
                    for x in range(n)]  # fmt: skip
            assert len(rows) == len(set(rows))
    np.testing.assert_array_equal(total, want)


# --- the host side of CUDA's kernels --------------------------------------------------------------


def attend_packed(q, k, v, starts_q, starts_k, most_q, most_k, *, return_aux, scale, window_size):
    """What `torch.nn.attention.varlen.varlen_attn` does, by dense attention of each sequence."""
    assert return_aux.lse
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=torch.float64)
    pairs = zip(itertools.pairwise(starts_q.tolist()), itertools.pairwise(starts_k.tolist()),
                strict=True)  # fmt: skip
    for (a, b), (c, d) in pairs:
        assert b - a <= most_q
        assert d - c <= most_k
        logits = scale * torch.einsum("qhd,khd->hqk", q[a:b].double(), k[c:d].double())
        if window_size == (-1, 0):
            logits = logits.masked_fill(torch.ones(b - a, d - c).triu(1).bool(), -math.inf)
        else:
            assert window_size == (-1, -1)
        lse[:, a:b] = logits.logsumexp(-1)
        out[a:b] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[c:d].double()).to(q.dtype)
    return out, lse


def gradients_packed(
    grad_out, q, k, v, out, lse, starts_q, starts_k, most_q, most_k, dropout, causal, *state, scale
):
    """What `_flash_attention_backward` does, by dense attention of each sequence."""
    assert dropout == 0
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    pairs = zip(itertools.pairwise(starts_q.tolist()), itertools.pairwise(starts_k.tolist()),
                strict=True)  # fmt: skip
    for (a, b), (c, d) in pairs:
        x, y, z, o, do = (t.double() for t in (q[a:b], k[c:d], v[c:d], out[a:b], grad_out[a:b]))
        p = (scale * torch.einsum("qhd,khd->hqk", x, y) - lse[:, a:b, None]).exp()
        if causal:
            p = p * torch.ones(b - a, d - c).tril()
        ds = p * (torch.einsum("qhd,khd->hqk", do, z) - (o * do).sum(-1).T[..., None])
        dq[a:b] = (scale * torch.einsum("hqk,khd->qhd", ds, y)).to(q.dtype)
        dk[c:d] = (scale * torch.einsum("hqk,qhd->khd", ds, x)).to(q.dtype)
        dv[c:d] = torch.einsum("hqk,qhd->khd", p, do).to(q.dtype)
    return dq, dk, dv


@pytest.mark.parametrize("limit", [_kernels.TOGETHER, 300, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_packed_sequences_give_what_blocks_of_one_shape_do(monkeypatch, causal, ids, limit):
    """CUDA's two kernels, by stand-ins with their signatures: rows, begins, lse, causal squares.

    Samples share a call until they hold so many rows.
    """
    from torch.nn.attention import varlen

    q, k, v = inputs(90, dtype="float64")
    call = {"causal": causal, "slopes": [1 / 8] * 4}
    if ids:
        call["segment_ids"] = np.repeat([[0, 1, -1]], [30, 40, 20], axis=1).repeat(len(q), axis=0)
    want = everything(q, k, v, "lsh", backend="torch_varlen", **call)
    calls = []
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *a, **k: calls.append(1) or attend_packed(*a, **k)
    )
    monkeypatch.setattr(_kernels, "flash_backward", lambda: gradients_packed)
    monkeypatch.setattr(_kernels, "packs", lambda q: True)
    monkeypatch.setattr(_kernels, "TOGETHER", limit)
    got = everything(q, k, v, "lsh", backend="torch_varlen", **call)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9, atol=1e-9)
    least, most = {_kernels.TOGETHER: (1, 2), 300: (3, 16), 1: (5, 30)}[limit]
    assert least <= len(calls) <= most
