"""The torch band kernel on the CPU, forward and backward: the oracle, the laws, memory.

Each test that a mutant of the kernel must fail (`test_torch_mutants`) takes no fixture but
`monkeypatch`, so that it can be called in place.
"""

import itertools
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import plsh_torch
import plsh_torch._cache as cache
import plsh_torch._call as call_module
import plsh_torch._scratch as scratch
import plsh_torch._tiles as tiles
import plsh_torch._weights as weights
import plsh_torch._whole as whole_heads
import pytest
import torch
from calls import FACTORS, FAR, pairwise
from laws import METHODS, NAMES, SLOPES, assert_same, inputs
from test_numpy_backend import BandCall, Poisoned, hidden_call, largest_lse

import plsh
from plsh import testing
from plsh.testing import harness_for
from plsh.tiles import Schedule

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
METHOD = pytest.mark.parametrize("method", NAMES)
HARNESS = harness_for("torch")


def tensor(x):
    """Return a tensor of a NumPy array; other values stay."""
    return torch.tensor(x) if isinstance(x, np.ndarray) else x


def ours(q, k, v, name="exact", **keywords):
    """Call the torch kernel, with the slopes of the laws; output and lse."""
    if name != "set":
        keywords.setdefault("slopes", SLOPES)
    ids = keywords.get("segment_ids")
    if ids is not None:
        pair = ids if isinstance(ids, tuple) else (ids,)
        pair = tuple(map(tensor, pair))
        keywords["segment_ids"] = pair if len(pair) == 2 else pair[0]
    keywords = {"return_lse": True, "backend": "torch", "method": METHODS[name], **keywords}
    return plsh.attention(*map(tensor, (q, k, v)), **keywords)


def cotangents(q, v, seed=1):
    """Return a grad_out and a grad_lse for q and v in layout bhsd, NumPy."""
    rng = np.random.default_rng(seed)
    wide = np.float64 if q.dtype == np.float64 else np.float32
    grad_out = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    return grad_out, rng.standard_normal(q.shape[:-1]).astype(wide)


def everything(q, k, v, name="exact", grads=None, **keywords):
    """Return out, lse and the gradients by q, k, v and, under a decay, the slopes."""
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    if name in ("exact", "window"):
        slopes = torch.tensor(np.asarray(keywords.pop("slopes", SLOPES)), dtype=torch.float64)
        leaves.append(slopes.requires_grad_())
        keywords["slopes"] = slopes
    output = ours(*leaves[:3], name, **keywords)
    given = cotangents(q, v) if grads is None else grads
    found = torch.autograd.grad(tuple(output), leaves, [torch.tensor(x) for x in given])
    return (*(x.detach() for x in output), *found)


WORDS = ("out", "lse", "gradient by q", "gradient by k", "gradient by v", "gradient by slopes")


def assert_all_same(actual, expected, units=32.0):
    """Assert that two results of `everything` agree to rounding; 0: bit for bit."""
    for name, a, b in zip(WORDS, actual, expected, strict=False):
        if units == 0:
            testing.assert_identical(a, b, name=name)
        else:
            testing.assert_equal_to_rounding(a, b, units=units, name=name)


# --- the oracle -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TorchCall(BandCall):
    """A call of this backend, forward and through autograd."""

    namespace: str = "torch"
    backend = "torch"


def check_torch(call):
    """Output, lse and all gradients against the oracle, with the measured tolerance."""
    expected, plain = call.yardsticks
    *leaves, grad_out, grad_lse = call.arrays()
    leaves = [x.requires_grad_() for x in leaves]
    keywords = call.keywords()
    slopes = keywords.pop("slopes")
    if call.is_decay:
        wide = "float64" if call.dtype == "float64" else "float32"
        slopes = call.ns.asarray(slopes, wide).requires_grad_()
        leaves.append(slopes)
    output = plsh.attention(
        *leaves[:3], slopes=slopes, **keywords | {"return_lse": True}
    )  # fmt: skip
    if not call.return_lse:  # asked for or not, the lse never changes the output
        testing.assert_identical(output.out, plsh.attention(*leaves[:3], slopes=slopes, **keywords))
    terms = 0.0
    if call.std != 1:  # every weight has the error of its logit, eps * |logit|, and so does plain
        terms = largest_lse(expected) * float(np.abs(expected.out).max())
    testing.assert_attention_close(output.out, expected.out, plain.out, like=leaves[0], terms=terms)
    wide = "float64" if call.dtype == "float64" else "float32"
    testing.assert_attention_close(
        output.lse, expected.lse, plain.lse, like=leaves[0], dtype=wide, terms=1.0, name="lse"
    )
    given = [grad_out, grad_lse] if call.return_lse else [grad_out]
    found = torch.autograd.grad(tuple(output)[: len(given)], leaves, given, materialize_grads=True)
    grads = plsh.backend.Gradients(*found[:3], found[3] if call.is_decay else None)
    testing.assert_gradients_close(grads, expected, plain, like=leaves[0], from_lse=True)


FACTORS = {
    **FACTORS,
    "lengths": [(n, n) for n in (0, 1, 31, 33, 64, 127, 257, 321)]
    + [(33, 65), (300, 31), (1, 300), (20, 400), (5, 2), (4, 0), (0, 4), (290, 330)],
    "heads": [(1, 1), (4, 2), (3, 1)],
    "dims": [(1, 1), (3, 20), (20, 3), (16, 16)],
}
CROSSED = [TorchCall(**row) for row in pairwise(FACTORS, 11)]

LONG = [
    TorchCall("exact", (4, 2), (300, 300), (64, 64), 2, dtype="float32", flatter=4.0),
    TorchCall("exact", (2, 1), (300, 300), (257, 80), 1, causal=True, dtype="float32"),
    TorchCall("windows", (4, 4), (300, 300), (80, 257), 1, segments="one", flatter=9.0),
    TorchCall("lsh", (3, 1), (300, 300), (16, 16), 3, dtype="float16", flatter=16.0, samples=16),
    TorchCall("exact", (2, 1), (1000, 1000), (16, 8), 1, causal=True, flatter=128.0),
    TorchCall("tol", (2, 2), (1000, 1000), (16, 16), 1, dtype="float32", flatter=128.0),
    TorchCall("lsh", (2, 1), (1000, 1000), (8, 16), 1, flatter=128.0, segments="one", samples=16),
    TorchCall("lsh-iid", (2, 1), (1000, 1000), (16, 16), 1, True, flatter=64.0, dtype="float32"),
    TorchCall("set", (2, 1), (1000, 700), (16, 16), 1, flatter=32.0, dtype="float32"),
    TorchCall("cuts", (2, 1), (700, 1000), (16, 16), 1, True, offsets="far", dtype="float32"),
    TorchCall("power", (2, 1), (600, 600), (16, 16), 1, offsets="batch", samples=7),
    TorchCall("lsh", (1, 1), (300, 300), (8, 8), 1, flatter=16.0, samples=300),
]
"""Several chunks, blocks on either side, and tiles of unequal reach."""

LARGE = [
    TorchCall(method, (2, 1), (n, n), (16, 16), 2, causal, dtype=dtype, std=std)
    for (method, causal), n, (dtype, std) in itertools.product(
        (("exact", True), ("windows", False), ("lsh", True), ("blocks", False)),
        (65, 290),
        (("float16", 5.0), ("float32", 12.0), ("float64", 30.0)),
    )
]
"""Logits with a standard deviation of 25 to 900, so that exponentials need a shift."""


@pytest.mark.parametrize("call", [*CROSSED, *LONG, *LARGE], ids=str)
def test_call_equals_oracle(call):
    """U013, U014, U016, U017, U021, U022, U023, U050, U053, U054, U055, U059, U065, U125."""
    check_torch(call)


def test_crossing_covers_every_pair():
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(getattr(c, a), getattr(c, b)) for c in CROSSED}
        assert len(met) == len(FACTORS[a]) * len(FACTORS[b]), (a, b)


@CAUSAL
@pytest.mark.parametrize(
    ("n", "sigma", "samples"), [(1000, 8.0, 4), (1500, 64.0, 16), (3000, 256.0, 5)]
)
def test_single_pass_equals_the_reduction(n, sigma, samples, causal):
    """The same integers give the same function: several chunks, many blocks on either side."""
    q, k, v = inputs(n, batch=1, heads=2, kv_heads=1)
    blocks = plsh.RandomBinning(sigma).sample(samples, n, seed=4)
    want = plsh.reduction(*map(tensor, (q, k, v)), blocks, causal=causal)
    assert_same(ours(q, k, v, "set", method=blocks, causal=causal), want)


def test_gradients_pass_gradcheck():
    """U053, U065: through out and lse, by q, k, v and slopes."""
    q, k, v = (torch.tensor(x, requires_grad=True) for x in inputs(9, batch=1, heads=2, kv_heads=1))
    slopes = torch.tensor([0.5, 0.1], dtype=torch.float64, requires_grad=True)

    def f(q, k, v, m):
        method = plsh.Window(5)
        return tuple(
            plsh.attention(q, k, v, method=method, slopes=m, return_lse=True, backend="torch")
        )

    assert torch.autograd.gradcheck(f, (q, k, v, slopes))
    method = plsh.PositionalLSH(5, seed=2)
    assert torch.autograd.gradcheck(
        lambda *x: tuple(ours(*x, "lsh", method=method, slopes=(0.2, 0.1))), (q, k, v)
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_sums_over_many_keys_lose_no_digits(method, rows):
    """BLAS may sum thousands of terms one after another, which loses 5 bits and more."""
    n = 3000
    q, k, v = inputs(rows, n, dtype="float32", batch=1, heads=2, kv_heads=1)
    q, v = 0 * q, np.where(np.arange(n) < n // 2, 0, 1)[:, None] + v / 8
    call = {"q_offset": n // 2, "slopes": [0.0] * 2}
    got = ours(q, k, v.astype(np.float32), method, method=method, **call).out
    want = v.astype(np.float32)[:, :1].astype(np.float64).mean(axis=2, keepdims=True)
    error = np.abs(got.numpy() - want).max()
    assert error <= 8 * np.finfo(np.float32).eps * np.abs(want).max() / 2


@pytest.mark.parametrize("n", [40, 300])
def test_a_version_that_changed_after_the_forward_pass_is_noticed(n):
    """Tokens, operands and results, which the backward pass needs as they were."""
    for at in range(7):
        tokens = [torch.tensor(x, requires_grad=True) * 1 for x in inputs(n)]
        ids = torch.zeros(2, n, dtype=torch.int64)
        start, slopes = torch.tensor([1, 2]), torch.tensor(SLOPES)
        output = plsh.attention(
            *tokens, method="exact", segment_ids=ids, q_offset=start, k_offset=start,
            slopes=slopes, return_lse=True, backend="torch",
        )  # fmt: skip
        with torch.no_grad():
            (*tokens, ids, start, slopes, output.lse)[at].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.out.sum().backward()


@METHOD
def test_negative_views_and_a_second_backward(method):
    """Inputs and cotangents with the negative bit; the same graph twice gives the same bits."""
    q, k, v = inputs(70)
    want = everything(q, k, v, method)[:5]

    def negative(x):
        view = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert view.is_neg()
        return view

    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    output = ours(*map(negative, leaves), method)
    grads = [negative(torch.tensor(x)) for x in cotangents(q, v)]
    for _ in range(2):
        found = torch.autograd.grad(tuple(output), leaves, grads, retain_graph=True)
        assert_all_same((*output, *found), want, units=0)


@METHOD
def test_a_query_that_is_not_finite_spoils_its_own_row_only(method):
    for n in (50, 300):
        q, k, v = inputs(n, dtype="float32")
        want = ours(q, k, v, method)
        spoilt = torch.tensor(q)
        spoilt[0, 1, 7, 3] = np.nan
        spoilt.requires_grad_()
        got = ours(spoilt, k, v, method)
        (grad,) = torch.autograd.grad(got.out.sum(), spoilt)
        others = torch.ones(got.lse.shape, dtype=bool)
        others[0, 1, 7] = False
        assert_same(*(plsh.AttentionOutput(*(x[others] for x in y)) for y in (got, want)))
        assert grad[others].isfinite().all()
        assert got.out[~others].isnan().all()
        assert got.lse[~others].isnan().all()


# --- how the work is cut --------------------------------------------------------------------------

MODULES = (tiles, call_module, whole_heads)
CUTS = {
    "chunks": {"PAIRS": 1},
    "chunks of several": {"PAIRS": 1 << 14},
    "no waste": {"WASTE": 0},
    "pieces": {"COLUMNS": 64},
    "short pieces": {"COLUMNS": 96, "PAIRS": 1 << 14},
    "long tiles": {"NARROW": 0},
    "segments": {"SEGMENT": 64, "THREADS_PAY": 0},
    "whole": {"SMALL": 1 << 40},
    "whole in groups": {"SMALL": 1 << 40, "TOGETHER": 1, "PAIRS": 5000},
}


class Settings:
    """Constants of the kernel, set wherever a module holds them."""

    def __init__(self, **values):
        self.values, self.patch = values, pytest.MonkeyPatch()

    def __enter__(self):
        for name, value in self.values.items():
            holders = [module for module in MODULES if hasattr(module, name)]
            assert holders
            for module in holders:
                self.patch.setattr(module, name, value)

    def __exit__(self, *error):
        self.patch.undo()


TILED = {"SMALL": 0, "FEW": 0}
"""Settings that send short calls through tiles too."""


def everywhere(method, causal, **keywords):
    """A call with all options on, at positions per batch row: `everything` of it."""
    q, k, v = inputs(150, 140, batch=3)
    ids = tuple(plsh.segments_from_lengths([[90, 40], [120, 5], [n, 0]], n) for n in (150, 140))
    call = {"causal": causal, "segment_ids": ids, "q_offset": (20, 3, 20), "k_offset": (9, 0, 9)}
    return everything(q, k, v, method, **call, **keywords)


@CAUSAL
@METHOD
def test_any_cut_of_the_work_gives_the_same(method, causal):
    """Chunks, pieces, tiles and whole heads, forward and backward."""
    whole = everywhere(method, causal)
    for values in CUTS.values():
        with Settings(**TILED | values):
            assert_all_same(everywhere(method, causal), whole, units=256)


def test_nothing_is_read_before_it_is_written(monkeypatch):
    """Fresh and reused memory poisoned with NaN: the same bits; no stale and no unwritten rows."""
    q, k, v = inputs(75, dtype="float32")

    def run():
        return [
            result
            for method in NAMES
            for result in (
                everywhere(method, False),
                everywhere(method, True),
                everything(q, k, v, method),
            )
        ]

    for values in ({}, TILED, TILED | {"COLUMNS": 64}):
        with Settings(**values):
            want = run()
            get, empty = scratch.Scratch.get, torch.empty

            def poisoned_get(self, name, shape, dtype, get=get):
                return get(self, name, shape, dtype).fill_(float("nan"))

            def poisoned_empty(*args, empty=empty, **keywords):
                return empty(*args, **keywords).fill_(float("nan"))

            with monkeypatch.context() as patch:
                patch.setattr(scratch.Scratch, "get", poisoned_get)
                patch.setattr(torch, "empty", poisoned_empty)
                patch.setattr(scratch, "np", Poisoned())  # of outputs
                again = run()
        for a, b in zip(again, want, strict=True):
            assert_all_same(a, b, units=0)


def test_calls_from_several_threads_do_not_disturb_one_another():
    tokens = [inputs(n, dtype="float32") for n in (65, 40, 300, 1)] * 2
    want = [everything(*x, m) for x, m in itertools.product(tokens[:4], NAMES)] * 2
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(everything, *x, m) for x, m in itertools.product(tokens, NAMES)]
        for call, expected in zip(calls, want, strict=True):
            assert_all_same(call.result(), expected, units=0)


# --- inputs as they come --------------------------------------------------------------------------

VIEWS = {
    "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dims first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda x: x.repeat_interleave(2, -1).repeat_interleave(3, -2)[..., ::3, ::2],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("n", [75, 300])
def test_strides_are_honoured(view, n):
    """U018, U019, U020: every input and cotangent as a view; nothing is written to."""
    change = VIEWS[view]
    for method in ("exact", "lsh"):
        q, k, v = inputs(n)
        want = everything(q, k, v, method)
        tokens = [change(torch.tensor(x)).requires_grad_() for x in (q, k, v)]
        before = [x.detach().clone() for x in tokens]
        grad_out, grad_lse = map(torch.tensor, cotangents(q, v))
        grads = (change(grad_out), change(grad_lse[..., None])[..., 0])
        output = ours(*tokens, method)
        found = torch.autograd.grad(tuple(output), tokens, grads)
        assert_all_same((*output, *found), want)
        assert all(torch.equal(x, y) for x, y in zip(tokens, before, strict=True))


@METHOD
def test_expanded_inputs_and_cotangents(method):
    """U019: stride 0 in batch, heads and rows; the gradient of ``sum()`` is one such."""
    for n in (45, 300):
        x = torch.tensor(inputs(n)[0][:1, :1], requires_grad=True)
        q, k, v = (x.expand(2, h, n, 8) for h in (4, 2, 2))
        out = ours(q, k, v, method).out
        (expanded,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        (plain,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert_all_same((expanded,), (plain,))


@METHOD
def test_results_are_fresh_contiguous_and_safe_to_write_to(method):
    q, k, v = inputs(300, dtype="float32")
    first = everything(q, k, v, method)
    held = [x.clone() for x in first]
    everything(q + 1, k, v, method)
    assert_all_same(first, held, units=0)
    for x in first:
        assert x.is_contiguous()
        x += 1
    assert_all_same(everything(q, k, v, method), held, units=0)


@METHOD
@pytest.mark.parametrize("n", [40, 300])
def test_any_subset_of_inputs_may_require_grad(method, n):
    """U063: the others get none, and those that do are the same bits."""
    q, k, v = inputs(n)
    whole = everything(q, k, v, method)[2:]
    slopes = torch.tensor(SLOPES, dtype=torch.float64)
    options = range(3 if method in ("exact", "window") else 2 + 1)
    names = (*options, 3) if method in ("exact", "window") else options
    for subset in itertools.product([False, True], repeat=len(names)):
        leaves = [*map(torch.tensor, (q, k, v)), slopes.clone()][: len(names)]
        for x, wish in zip(leaves, subset, strict=True):
            x.requires_grad_(wish)
        keywords = {"slopes": leaves[3]} if len(leaves) > 3 else {}
        output = ours(*leaves[:3], method, **keywords)
        assert output.out.requires_grad == any(subset)
        if not any(subset):
            continue
        torch.autograd.backward(tuple(output), [torch.tensor(x) for x in cotangents(q, v)])
        for x, wish, want in zip(leaves, subset, whole, strict=False):
            assert (x.grad is not None) == wish
            if wish:
                testing.assert_identical(x.grad, want)


@METHOD
def test_a_loss_of_one_output_alone(method):
    """U065: only the lse, or only the output; the other's gradient is zero."""
    q, k, v = inputs(70)
    _, grad_lse = cotangents(q, v)
    zero = np.zeros((2, 4, 70, 6))
    want = everything(q, k, v, method, (zero, grad_lse))
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    lse = ours(*leaves, method).lse
    found = torch.autograd.grad(lse, leaves, torch.tensor(grad_lse), materialize_grads=True)
    assert_all_same(found, want[2:5])
    assert not found[2].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_slopes_of_any_dtype_get_a_gradient_of_it(dtype):
    """U002, U053: (H,), (B, H) and 0-d; the wider the nearer."""
    q, k, v = map(torch.tensor, inputs(60, dtype="float32"))
    for slopes in (SLOPES, [SLOPES, SLOPES], 0.25):
        m = torch.tensor(slopes, dtype=getattr(torch, dtype), requires_grad=True)
        wide = m.detach().double().requires_grad_()
        for x in (m, wide):
            plsh.attention(
                q, k, v, method="exact", slopes=x, backend="torch"
            ).square().sum().backward()
        assert m.grad.dtype == m.dtype
        assert m.grad.shape == m.shape
        error = (m.grad.double() - wide.grad).abs().max()
        assert error <= 4 * torch.finfo(m.dtype).eps * wide.grad.abs().max()


# --- hidden keys, extreme weights, padding --------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("case", ["future", "window", "block", "segment", "padding"])
@pytest.mark.parametrize("n", [77, 290])
def test_a_hidden_key_far_above_the_visible_ones_empties_no_row(case, n, dtype):
    """U010: a logit 100, 10^4, or past the range; rows that do not see it are as without it."""
    call, key, seen = hidden_call(case, n)
    call |= {"scale": 1.0}
    q, k, v = inputs(n, dtype=dtype, batch=1, heads=2, kv_heads=1)
    q[..., 0], k[..., key, :] = 1, 0
    grads = [
        np.where(seen[:, None], 0, cotangents(q, v)[0]).astype(dtype),
        np.zeros_like(cotangents(q, v)[1]),
    ]

    def run(value):
        keys = k.copy()
        keys[..., key, 0] = value
        found = everything(q, keys, v, "set", grads, **call)
        return (*(x[:, :, ~torch.tensor(seen)] for x in found[:3]), *found[3:5])

    assert not seen.all()
    mild = run(0)
    assert mild[1].isfinite().all()
    largest = {"float16": 6e4, "float32": 1e38, "float64": 1e300}[dtype]
    for value in (100, 1e4, largest):  # a shift by 100 rounds what is left
        assert_all_same(run(value), mild, units=256)


@pytest.mark.parametrize("n", [75, 300])
def test_hidden_products_past_the_range_do_no_harm(n):
    """Hidden q·k and dO·v are infinite or NaN in float32; rows that do not see them are finite."""
    seen = np.arange(n) >= n - 5
    q, k, v = inputs(n, dtype="float32")
    grads = (cotangents(q, v)[0] * ~seen[:, None], np.zeros(q.shape[:3], np.float32))
    grads[0][:, :, ~seen] += 2
    want = everything(q, k, v, causal=True, grads=grads)
    for size in (2.0**127, 3e38):
        scaled_k, scaled_v = k / 1024, v.copy()
        scaled_k[:, :, seen] = np.sign(k[:, :, seen]) * np.float32(size)
        scaled_v[:, :, seen] = np.sign(v[:, :, seen]) * np.float32(size)
        got = everything(1024 * q, scaled_k, scaled_v, causal=True, grads=grads)
        for a, b in zip((got[0], got[1], got[2] * 1024), want[:3], strict=True):
            testing.assert_equal_to_rounding(a[:, :, : n - 5], b[:, :, : n - 5])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [40, 300])
def test_rows_that_see_far_keys_only_are_not_empty(dtype, n):
    """Every bias is below the range of exponentials; the oracle has the answer."""
    for slope, offset, causal in ((0.3, 1000, True), (1.0, 1000, False), (0.02, -9000, False)):
        q, k, v = inputs(n, n + 10, dtype=dtype, batch=1, heads=2, kv_heads=1)
        at = {"causal": causal, "q_offset": max(offset, 0), "k_offset": max(-offset, 0)}
        oracle = {"slopes": [slope] * 2, **at}
        expected = testing.oracle(q, k, v, **oracle)
        plain = testing.plain_attention(q, k, v, dtype=dtype, **oracle)
        ones = (np.ones((*q.shape[:3], 6), dtype), np.zeros(q.shape[:3], dtype))
        got = everything(q, k, v, slopes=[slope] * 2, grads=ones, **at)
        largest, like = np.abs(expected.lse).max(), got[0]
        testing.assert_attention_close(got[0], expected.out, plain.out, like=like, terms=largest)
        testing.assert_attention_close(got[1], expected.lse, plain.lse, like=like, terms=1.0)
        rounding = np.finfo(dtype).eps * largest
        for grad, name in zip(got[2:5], "qkv", strict=True):
            want = getattr(expected, name)
            error = np.abs(grad.numpy() - want).max()
            assert error <= 4 * rounding * max(1, np.abs(want).max()), name


@pytest.mark.parametrize(
    ("dtype", "slope"),
    [("float16", 1e4), ("float32", 1e28), ("float32", 1e300), ("float64", 1e300)],
)
def test_a_huge_slope_is_self_attention(dtype, slope):
    """U044: out = v, finite gradients, forward and backward."""
    for n in (70, 290):
        q, k, v = inputs(n, dtype=dtype)
        want = torch.tensor(np.repeat(v, 2, axis=1))
        for method in ("exact", "window", "lsh"):
            for causal in (False, True):
                call = {"slopes": [slope] * 4, "causal": causal, "method": method}
                got = everything(q, k, v, method, **call)
                testing.assert_equal_to_rounding(got[0], want, units=4)
                assert all(x.isfinite().all() for x in got)
        far = ours(q, k, v, slopes=slope, q_offset=1000)  # the nearest key is the last
        testing.assert_equal_to_rounding(
            far.out, want[:, :, -1:].expand(far.out.shape).contiguous(), units=4
        )


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_a_gap_between_queries_and_keys_is_not_visited(method):
    """Shards of keys far from the queries, on either side: slope 0 sees them as if near."""
    for ids in (None, np.zeros((2, 300), dtype=np.int64)):
        q, k, v = inputs(300, dtype="float32")
        call = {"method": method, "slopes": [0.0] * 4, "segment_ids": ids}
        want = everything(q, k, v, method, **call)
        for at in ({"q_offset": FAR}, {"k_offset": FAR, "q_offset": 0}, {"q_offset": 7}):
            assert_all_same(everything(q, k, v, method, **call, **at)[:5], want[:5])
        with Settings(**TILED):
            dead = everything(q, k, v, method, **call, k_offset=FAR, q_offset=0, causal=True)
        assert not any(x.any() for x in (dead[0], *dead[2:5]))
    dead = ours(q, k, v, **call, k_offset=FAR, q_offset=0, causal=True)
    assert not dead.out.any()


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_slope_zero_is_plain_attention(method):
    """U051: softmax without a bias, for every default method and whatever the seed."""
    for n in (70, 300):
        q, k, v = map(torch.tensor, inputs(n))
        got = plsh.attention(q, k, v, method=method, slopes=0.0, backend="torch")
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        testing.assert_equal_to_rounding(got, want)


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 6e4])
@CAUSAL
@METHOD
def test_what_stands_in_padding_reaches_nothing(method, causal, fill):
    """U035, U037: in tokens and in cotangents of padding; the rest has the same bits."""
    n = 75
    ids = np.array([[-1] * 3 + [0] * 40 + [-1] * 5 + [1] * 27, [2] * 50 + [-1] * 25])
    q, k, v = inputs(n, dtype="float32")
    grads = cotangents(q, v)
    padded = ids < 0

    def run(value):
        filled = [x.copy() for x in (q, k, v, *grads)]
        for x in filled:
            x[np.broadcast_to(padded[:, None], x.shape[:3])] = value
        *tokens, grad_out, grad_lse = filled
        return everything(*tokens, method, (grad_out, grad_lse), causal=causal, segment_ids=ids)

    for values in ({}, TILED):
        with Settings(**values):
            got = run(fill)
            assert_all_same(got, run(0), units=0)
        for x in got[0], *got[2:5]:
            assert not np.any(x.numpy()[np.broadcast_to(padded[:, None], x.shape[:3])])
        dead = np.broadcast_to(padded[:, None], got[1].shape)
        assert np.all(got[1].numpy()[dead] == -np.inf)


@METHOD
def test_rows_that_see_no_key_have_no_gradient(method):
    """U008, U009: whatever their cotangents hold, dead rows give zeros and reach nothing."""
    q, k, v = inputs(45, 30)
    call = {"causal": True, "q_offset": 0, "k_offset": 20}
    grads = cotangents(q, v)
    dead = [x.copy() for x in grads]
    for x in dead:
        x[:, :, :20] = np.nan
    for values in ({}, TILED):
        with Settings(**values):
            got = everything(q, k, v, method, tuple(dead), **call)
            assert_all_same(got, everything(q, k, v, method, grads, **call), units=0)
        assert not got[0][:, :, :20].any()
        assert not got[2][:, :, :20].any()
        assert (got[1][:, :, :20] == -np.inf).all()


def test_dead_rows_train_a_shared_projection():
    """U009: a dead row, left out of the loss, leaves finite and unchanged gradients."""
    x = torch.tensor(inputs(60, batch=1, heads=1, kv_heads=1)[0])
    weight = torch.eye(8, dtype=torch.float64, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        y = x @ weight
        ids = torch.tensor([[-1] * 5 + [0] * 55])
        out = plsh.attention(y, y, y, method="exact", segment_ids=ids, backend="torch")
        (dead,) = torch.autograd.grad(out[:, :, 5:].square().sum(), weight)
    y = (x @ weight)[:, :, 5:]
    out = plsh.attention(y, y, y, method="exact", backend="torch")
    (alive,) = torch.autograd.grad(out.square().sum(), weight)
    testing.assert_equal_to_rounding(dead, alive)


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@METHOD
def test_a_batch_row_does_not_depend_on_its_mates(method, dtype):
    """U094, U095: their values never, bit for bit; their number to rounding."""
    for values in ({}, TILED):
        q, k, v = inputs(80, dtype=dtype, batch=4)
        other = [x.copy() for x in (q, k, v)]
        for x, factor in zip(other, (30, 1, 3), strict=True):
            x[2:] *= factor  # these need a shift, the others do not
        with Settings(**values):
            first, again = (everything(*x, method)[:5] for x in ((q, k, v), other))
            assert_all_same([x[:2] for x in again], [x[:2] for x in first], units=0)
            grads = tuple(x[:1] for x in cotangents(q, v))
            alone = everything(q[:1], k[:1], v[:1], method, grads)[:5]
        assert_all_same(alone, [x[:1] for x in first])


def test_slopes_and_positions_per_batch_row_equal_separate_calls():
    """U050: a steep mate changes nothing."""
    q, k, v = inputs(75, batch=3)
    slopes = np.array([SLOPES, (0.1, 0.2, 0.0, 1.0), (40.0, 0.0, 9.0, 3.0)])
    at = (7, 2, 7)
    grads = cotangents(q, v)
    for method, values in itertools.product(("exact", "window"), ({}, TILED)):
        with Settings(**values):
            got = everything(q, k, v, method, slopes=slopes, q_offset=at, k_offset=(1, 2, 1))
            for b in range(3):
                own = np.s_[b : b + 1]
                alone = everything(
                    q[own], k[own], v[own], method, tuple(x[own] for x in grads),
                    slopes=slopes[own], q_offset=at[b], k_offset=(1, 2, 1)[b],
                )  # fmt: skip
                assert_all_same(alone, [x[own] for x in got], units=64)


@METHOD
def test_offsets_as_tensors_equal_numbers(method):
    """U070: 0-d and (B,), of any integer dtype."""
    q, k, v = inputs(50, 60)
    want = ours(q, k, v, method, q_offset=(12, 4), k_offset=3, causal=True)
    for dtype in (torch.int32, torch.int64, torch.uint8):
        at = {"q_offset": torch.tensor([12, 4], dtype=dtype), "k_offset": torch.tensor(3)}
        assert_all_same(ours(q, k, v, method, causal=True, **at), want, units=0)


ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(pathlib.Path(plsh_torch.__file__).parent.parent),
}
"""Of a fresh process."""

PROGRAM = """
import hashlib, torch, plsh, plsh_torch
from plsh import testing
torch.use_deterministic_algorithms(True)
digest = hashlib.sha256()
for n in (400, 33):
    *tokens, grad_out, grad_lse = map(
        torch.tensor, testing.make_inputs(1, 2, 1, n, dtype="float32")
    )
    for method in ("exact", "window", "lsh"):
        results = set()
        for _ in range(10):
            leaves = [x.clone().requires_grad_() for x in tokens]
            output = plsh.attention(
                *leaves, method=method, causal=True, backend="torch", return_lse=True
            )
            grads = torch.autograd.grad(tuple(output), leaves, (grad_out, grad_lse))
            results.add(b"".join(x.detach().numpy().tobytes() for x in (*output, *grads)))
        assert len(results) == 1, (n, method)
        digest.update(results.pop())
print(digest.hexdigest())
"""


def test_repeats_are_equal_from_the_first_call_of_a_process():
    """U013, U092: ten repeats, forward and backward, bit-equal, in two fresh processes."""

    def run(_):
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            check=True,
            capture_output=True,
            timeout=120,
            env=ENVIRONMENT,
        ).stdout

    with ThreadPoolExecutor(2) as pool:
        runs = set(pool.map(run, range(2)))
    assert len(runs) == 1


@METHOD
def test_decoding_equals_prefill(method):
    """U113, U108: one query at a time against a growing cache, over a tile's edge."""
    q, k, v = inputs(70)
    whole = ours(q, k, v, method, causal=True)
    parts = [
        ours(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], method, q_offset=t)
        for t in range(70)
    ]
    joined = plsh.AttentionOutput(
        torch.cat([p.out for p in parts], dim=2), torch.cat([p.lse for p in parts], dim=2)
    )
    assert_same(joined, whole)


@METHOD
@CAUSAL
def test_chunks_of_queries_equal_the_whole(method, causal):
    """U114: queries in parts, forward and dq; the parts' dk and dv add up."""
    cuts = (0, 100, 101, 390)
    q, k, v = inputs(cuts[-1])
    grads = cotangents(q, v)
    whole = everything(q, k, v, method, grads, causal=causal)
    parts = [
        everything(
            q[:, :, a:b], k, v, method, tuple(x[:, :, a:b] for x in grads),
            causal=causal, q_offset=a,
        )
        for a, b in itertools.pairwise(cuts)
    ]  # fmt: skip
    joined = [torch.cat([p[i] for p in parts], dim=2) for i in range(3)]
    summed = [sum(p[i] for p in parts) for i in range(3, len(whole))]
    assert_all_same([*joined, *summed], whole, units=256)


@METHOD
@CAUSAL
def test_merged_shards_of_keys_equal_the_whole(method, causal):
    """U105, U106: differentiable through `plsh.merge`."""
    cuts = (0, 7, 7, 80, 130)
    q, k, v = inputs(130)
    whole = everything(q, k, v, method, causal=causal)
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    merged = plsh.merge(
        [
            ours(
                leaves[0], *(x[:, :, a:b] for x in leaves[1:]), method,
                causal=causal, q_offset=0, k_offset=a,
            )
            for a, b in itertools.pairwise(cuts)
        ]
    )  # fmt: skip
    grads = torch.autograd.grad(tuple(merged), leaves, [*map(torch.tensor, cotangents(q, v))])
    assert_all_same((*merged, *grads), whole[:5], units=256)


@METHOD
@CAUSAL
def test_left_padding_changes_nothing(method, causal):
    """U035: positions below 0, up to the edge of a tile, over it, and several tiles."""
    q, k, v = inputs(70)
    whole = ours(q, k, v, method, causal=causal)
    for pad, values in itertools.product((1, 32, 37, 64), ({}, TILED)):
        ids = np.array([[-1] * pad + [0] * 70] * 2)
        widths = [(0, 0), (0, 0), (pad, 0), (0, 0)]
        with Settings(**values):
            padded = ours(
                *(np.pad(x, widths, constant_values=np.nan) for x in (q, k, v)),
                method,
                causal=causal,
                q_offset=-pad,
                k_offset=-pad,
                segment_ids=ids,
            )
        assert_same(plsh.AttentionOutput(*(x[:, :, pad:] for x in padded)), whole)
        assert not padded.out[:, :, :pad].any()


@pytest.mark.parametrize("method", ["exact", "window"])
@pytest.mark.parametrize("shift", [1, 1000, FAR, -17])
def test_a_decay_depends_on_relative_positions_only(method, shift):
    """U035: bit for bit, far along the axis too."""
    q, k, v = inputs(40, 75, dtype="float32")
    for values in ({}, TILED):
        with Settings(**values):
            near = everything(q, k, v, method, q_offset=5, causal=True)
            far = everything(q, k, v, method, q_offset=5 + shift, k_offset=shift, causal=True)
        assert_all_same(far, near, units=0)


@pytest.mark.parametrize("shape", list(itertools.product([0, 2], [0, 4], [0, 3], [0, 5], [0, 6])))
def test_empty_axes(shape):
    """U016, U017: any of B, H, Nq, Nk, Dv is 0: empty in, empty out, forward and backward."""
    batch, heads, len_q, len_k, value_dim = shape
    tokens = testing.make_inputs(batch, heads, heads // 2, len_q, len_k, 3, value_dim)[:3]
    for method in ("exact", "window", "lsh"):
        leaves = [torch.tensor(x, requires_grad=True) for x in tokens]
        call = {"method": method, "slopes": SLOPES[:heads], "q_offset": 0}
        output = ours(*leaves, method, **call)
        grads = torch.autograd.grad(
            output.out.sum() + output.lse.clamp(min=-1).sum(), leaves, materialize_grads=True
        )
        assert output.out.shape == (batch, heads, len_q, value_dim)
        assert output.lse.shape == (batch, heads, len_q)
        for x, grad in zip(leaves, grads, strict=True):
            assert grad.shape == x.shape
            assert grad.isfinite().all()
        if len_k == 0:
            assert not output.out.any()
            assert (output.lse == -np.inf).all()


# --- memory ---------------------------------------------------------------------------------------

MEMORY = """
import sys, torch, plsh, plsh_torch
n, name = int(sys.argv[1]), sys.argv[2]
method = {"lsh": plsh.PositionalLSH(16), "window": plsh.Window(512)}[name]
def run(n):
    x = [torch.ones(1, 2, n, 16, requires_grad=True) for _ in range(3)]
    out = plsh.attention(*x, method=method, slopes=1 / 64, causal=True, backend="torch")
    out.sum().backward()
def peak():  # ru_maxrss would be that of the parent, if it is larger
    with open("/proc/self/status") as status:
        return int(next(x for x in status if x.startswith("VmHWM")).split()[1]) / 1024
run(300)
before = peak()
run(n)
own = 8 * 2 * n * 16 * 4 / 2**20  # inputs, output, its gradient, and theirs
print(peak() - before - own)
"""


@pytest.mark.parametrize("method", ["lsh", "window"])
def test_memory_holds_no_band(method):
    """Design section 7: forward and backward, beyond inputs and outputs; n = 32768.

    A float for each pair of one head would take 64 MiB under window, and more under lsh.
    """
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, "32768", method],
        check=True, capture_output=True, text=True, timeout=200, env=ENVIRONMENT,
    )  # fmt: skip
    assert float(run.stdout) < 48, run.stdout


def test_tables_kept_between_calls_are_bounded(monkeypatch):
    """Each chunk of an exact call has pieces of its own: kept for all, they are Nq x Nk numbers."""
    tables = cache.Tables(1 << 21)
    monkeypatch.setattr(weights, "TABLES", tables)
    decay = weights.Decay(0.01, 2**31 - 1, True, torch.float32)
    decay.prepare(Schedule.of(np.arange(2), 64, 64, decay.reach(np.arange(2), 64, range(9))))
    for blocks in range(1, 32):
        decay.distance(weights.Piece(-blocks, 1))
    assert len(tables._held) > 2
    assert sum(x.nbytes for x in tables._held.values()) <= 1 << 21


def test_memory_kept_between_calls_is_bounded():
    q, k, v = inputs(700, dtype="float32")
    for kept in (1 << 14, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scratch, "KEPT", kept)
            scratch._FREE.clear()
            for _ in range(5):
                everything(q, k, v, "lsh")
            assert all(held.nbytes <= min(kept, 1 << 25) for held in scratch._FREE)
            assert len(scratch._FREE) <= torch.get_num_threads()
    scratch._FREE.clear()
