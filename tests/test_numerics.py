"""Numerics: finite answers stay finite, dead rows are silent, gradients are exact to any order."""

import itertools
import math

import jax
import numpy as np
import pytest
import torch
from calls import Call, check_call
from laws import METHODS, NAMES, SLOPES, assert_same, attend, inputs

import plsh
from plsh import testing

METHOD = pytest.mark.parametrize("method", NAMES)
DECAY = pytest.mark.parametrize("method", ["exact", "window"])


# Range


@METHOD
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_logits_beyond_the_range_of_float16(method, dtype):
    """U003: q, k up to 900: q.k passes 65,504; rows pick the oracle's key, gradients are finite."""
    rng = np.random.default_rng(0)
    q, k = (900 * rng.uniform(-1, 1, (2, 4, 40, 64)) for _ in range(2))
    v = rng.standard_normal((2, 4, 40, 64))
    arrays = [testing.round_to(x, dtype) for x in (q, k, v)]
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
    got = attend(*tensors, method)
    grads = torch.autograd.grad(got.out.sum(), tensors)
    assert all(torch.all(torch.isfinite(x)) for x in (*got, *grads))
    assert float(got.lse.detach().abs().max()) > 65504
    want = testing.oracle(*arrays, **weight_of(method, 40))
    assert np.max(np.abs(got.out.detach().numpy() - want.out)) < 2e-2


def weight_of(method, n):
    """What the oracle is told of one of the laws' methods."""
    if method == "exact":
        return {"slopes": SLOPES}
    if method == "window":
        return {"slopes": SLOPES, "widths": METHODS["window"].width}
    recipe = METHODS[method]
    if method != "set":
        family = plsh.RandomBinning(tuple(1 / m if m else math.inf for m in SLOPES))
        recipe = family.sample(recipe.samples, n, seed=recipe.seed, sampler=recipe.sampler)
    labels = recipe.labels(0, n)
    return {"weight": testing.step_weight(labels, labels)}


@METHOD
@pytest.mark.parametrize("scale", [1e-4, 0.0, -0.5, 1e-30])
def test_any_finite_scale(method, scale):
    """U004: the scale tames products of 3e3 in float16; 0 and negative ones are legal."""
    size = 3e3 if scale == 1e-4 else 1.0
    q, k, v = inputs(33, dtype="float16")
    q, k = (testing.round_to(np.clip(size * x, -3e3, 3e3), "float16") for x in (q, k))
    got = attend(q, k, v, method, scale=scale)
    call = {"scale": scale, **weight_of(method, 33)}
    want = testing.oracle(q, k, v, **call)
    testing.assert_output_close(
        got, want, testing.plain_attention(q, k, v, dtype="float16", **call), like=q
    )


@pytest.mark.parametrize(
    ("method", "where"),
    [
        (m, where)
        for m in NAMES
        for where in ("future", "segment", "far")
        if (m, where) != ("exact", "far")
    ],
)
def test_a_hidden_key_far_above_the_visible_ones_empties_no_row(method, where):
    """A hidden logit 100 or 1e4 above: the softmax shift comes from visible pairs only.

    Hidden by causality, by a segment, by a window or by a block (exact hides nothing by distance).
    """
    for height in (100, 1e4):
        q, k, v = (np.zeros((1, 4, 12, 8), np.float32) for _ in range(3))
        v[...] = np.arange(12, dtype=np.float32)[:, None]
        q[...] = 1
        k[:, :, 11] = height / 8
        options = {"scale": 1.0}
        if where == "future":
            options["causal"] = True
        elif where == "segment":
            options["segment_ids"] = np.array([[0] * 11 + [1]])
        else:
            options["method"] = plsh.Window(3)
            if method != "window":
                options["method"] = plsh.PartitionSet(
                    [[[0] * 8 + [8] * 4], [[0] * 8 + [8] * 4]] * 2
                )
                options["slopes"] = None
        with np.errstate(divide="ignore", invalid="ignore"):  # a fault shows in the values
            got = attend(q, k, v, method, **options)
        visible = slice(0, 8) if where == "far" else slice(0, 11)
        lse = got.lse[:, :, visible]
        assert np.all(np.isfinite(got.out))
        assert np.all(np.isfinite(lse))
        assert np.all(lse < 3)  # of at most 12 logits of 0
        assert np.all(got.out[:, :, visible] < 11)
        assert np.all(got.out[:, 3, 1:3] > 0)  # more than the first key is seen


@pytest.mark.parametrize("slope", [1e4, 1e30, 1e300])
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_huge_slope_gives_the_values(method, slope, dtype):
    """U044: each token sees itself alone."""
    q, k, v = inputs(20, dtype=dtype)
    got = attend(q, k, v, method, slopes=[slope] * 4)
    testing.assert_equal_to_rounding(got.out, np.repeat(v, 2, axis=1), units=1)
    self_logits = (q.astype(float) * np.repeat(k, 2, axis=1)).sum(-1) * 8**-0.5
    np.testing.assert_allclose(got.lse, self_logits, atol=1e-5)


@pytest.mark.parametrize("slope", [1e4, 1e30, 1e38, 1e300])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_huge_slope_without_the_own_key_gives_no_nan(slope, dtype):
    """Cross attention far from every key: the nearest key wins; nothing is NaN."""
    arrays = [torch.from_numpy(x).requires_grad_() for x in inputs(3, 5, dtype=dtype)]
    got = attend(*arrays, "exact", slopes=[slope] * 4, q_offset=40)
    grads = torch.autograd.grad(got.out.sum(), arrays)
    for x in (*got, *grads):
        assert not torch.any(torch.isnan(x))
    nearest = arrays[2].detach()[:, :, 4:].repeat_interleave(2, dim=1)
    testing.assert_equal_to_rounding(got.out.detach(), nearest.expand_as(got.out).contiguous())


def test_slopes_spread_the_weight():
    """U044: a larger slope sees less far, and 0 is plain attention."""
    n = 40
    q, k = np.zeros((1, n, 4)), np.zeros((1, n, 4))
    far = np.abs(np.arange(n)[:, None] - np.arange(n))
    seen = []
    for slope in (0.0, 0.1, 1.0, 10.0):
        p = plsh.attention(
            q, k, np.eye(n)[None], method="exact", slopes=[slope], backend="reference"
        )
        seen.append((p[0] * far).sum(axis=-1).mean())
    assert all(a > 1.3 * b for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize("causal", [False, True])
@METHOD
def test_slope_zero_is_plain_attention(method, causal):
    """U051: for every method and seed, without a warning."""
    q, k, v = inputs(33)
    keys, values = (np.repeat(x, 2, axis=1) for x in (k, v))
    logits = q @ keys.swapaxes(-1, -2) * 8**-0.5
    if causal:
        logits = np.where(np.tri(33, dtype=bool), logits, -np.inf)
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    plain = p / p.sum(axis=-1, keepdims=True) @ values
    call = {"causal": causal, "backend": "reference"}
    if method == "set":
        blocks = plsh.RandomBinning(math.inf).sample(3, 33, seed=8)
        testing.assert_equal_to_rounding(plsh.attention(q, k, v, method=blocks, **call), plain)
        return
    if method == "window":
        got = plsh.attention(q, k, v, method=plsh.Window(tol=0.1), slopes=0.0, **call)
        testing.assert_equal_to_rounding(got, plain)
        return
    testing.assert_equal_to_rounding(attend(q, k, v, method, slopes=[0.0] * 4, **call).out, plain)
    if method == "exact":
        return
    for seed in range(5):
        for samples in (1, 3, 16):
            lsh = plsh.PositionalLSH(samples, seed=seed)
            mixed = plsh.attention(q, k, v, method=lsh, slopes=[0.5, 0.25, 0, 0], **call)
            testing.assert_equal_to_rounding(mixed[:, 2:], plain[:, 2:])


# Dead rows and tiles


@METHOD
def test_a_dead_row_is_zero_with_zero_gradients(method):
    """U008: out 0, lse -inf, gradients 0, and the gradients of the others finite."""
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in inputs(16))
    ids = torch.zeros((2, 16), dtype=torch.int64)
    ids[:, 0] = ids[:, 7] = -1
    keys = torch.zeros((2, 16), dtype=torch.int64)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        got = attend(q, k, v, method, segment_ids=(ids, keys))
        grads = torch.autograd.grad(got.out.sum() + got.lse[:, :, 1:7].sum(), (q, k, v))
    dead = torch.tensor([0, 7])
    assert not torch.any(got.out[:, :, dead])
    assert torch.all(got.lse[:, :, dead] == -torch.inf)
    assert not torch.any(grads[0][:, :, dead])
    assert all(torch.all(torch.isfinite(x)) for x in grads)


@METHOD
def test_a_dead_row_leaves_shared_weights_alone(method):
    """U009: 0 * NaN in a projection shared by the batch; the dropped row was never there."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.standard_normal((1, 9, 8)))
    maps = [torch.from_numpy(rng.standard_normal((8, 32))) for _ in range(3)]

    def grads(ids, rows):
        weights = [w.clone().requires_grad_() for w in maps]
        q, k, v = ((x @ w).unflatten(-1, (4, 8)).swapaxes(1, 2) for w in weights)
        out = attend(q, k, v, method, segment_ids=ids).out
        return torch.autograd.grad(out[:, :, rows].sum(), weights)

    ids = torch.zeros((1, 9), dtype=torch.int64)
    dead = ids.clone()
    dead[0, 4] = -1
    rows = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        got = grads((dead, ids), rows)
    for a, b in zip(got, grads((ids, ids), rows), strict=True):
        testing.assert_equal_to_rounding(a, b)


@pytest.mark.parametrize("width", [3, 64])
def test_tiles_without_a_visible_key(width):
    """U010: a narrow window over several tiles, with rows of lengths 300 and 5."""
    q, k, v = inputs(300)
    for ids in (None, plsh.segments_from_lengths([300, 5], 300)):
        call = {"slopes": SLOPES, "widths": (width,) * 4, "segment_ids": ids}
        want = testing.oracle(q, k, v, **call)
        got = attend(q, k, v, "window", method=plsh.Window(width), segment_ids=ids)
        testing.assert_equal_to_rounding(got.out, want.out)
        testing.assert_equal_to_rounding(got.lse, want.lse)


def test_keys_out_of_reach_are_not_seen():
    """On both sides: dead rows, no error."""
    q, k, v = inputs(4, 6)
    for q_at, k_at in ((100, 0), (0, 100)):
        got = attend(q, k, v, "window", method=plsh.Window(3), q_offset=q_at, k_offset=k_at)
        assert not np.any(got.out)
        assert np.all(got.lse == -np.inf)


# Shifts and perturbations


def test_decoding_in_float16_equals_prefill():
    """U012: one expression for both; a long row, to 1e-3."""
    q, k, v = inputs(2048, dtype="float16", batch=1)
    for method in ("exact", "lsh"):
        whole = attend(q, k, v, method, causal=True)
        for row in (0, 1, 1000, 2047):
            part = slice(row, row + 1)
            one = attend(q[:, :, part], k, v, method, causal=True, q_offset=row)
            assert np.max(np.abs(one.out - whole.out[:, :, part])) <= 1e-3


@METHOD
def test_a_constant_added_to_the_logits_of_a_row_changes_nothing(method):
    """U012: 1e3 by one more feature of q and k, float32, to 1e-3; the lse moves by it."""
    q, k, v = inputs(33, dtype="float32")
    high = (np.concatenate([x, np.ones_like(x[..., :1]) * c], -1) for x, c in ((q, 1e3), (k, 1)))
    got, want = attend(*high, v, method, scale=1.0), attend(q, k, v, method, scale=1.0)
    assert np.max(np.abs(got.out - want.out)) < 1e-3
    assert np.max(np.abs(got.lse - want.lse - 1e3)) < 1e-2


@METHOD
def test_the_future_does_not_reach_the_past(method):
    """U041: causal with slopes and no mask: later tokens change nothing, bit for bit."""
    q, k, v = inputs(33)
    before = attend(q, k, v, method, causal=True)
    k[:, :, 20:] = 50
    v[:, :, 20:] = 1e9
    after = attend(q, k, v, method, causal=True)
    assert_same(
        plsh.AttentionOutput(after.out[:, :, :20], after.lse[:, :, :20]),
        plsh.AttentionOutput(before.out[:, :, :20], before.lse[:, :, :20]),
        units=4,
    )
    assert np.max(np.abs(after.out[:, :, 20:] - before.out[:, :, 20:])) > 1


# Gradients


def leaves(*arrays):
    return [torch.from_numpy(x).requires_grad_() for x in arrays]


@METHOD
@pytest.mark.parametrize("by", ["scale", "q"])
def test_a_gradient_that_is_zero_is_an_array_of_zeros(method, by):
    """U066: scale 0, or q 0."""
    q, k, v = leaves(*inputs(9))
    if by == "q":
        q = torch.zeros_like(q, requires_grad=True)
    got = attend(q, k, v, method, scale=0.0 if by == "scale" else 1.0)
    by_q, by_k = torch.autograd.grad((got.out**2).sum(), (q, k))
    assert not torch.any(by_k)
    assert torch.any(by_q) == (by == "q")
    assert (by_q.dtype, by_k.shape) == (q.dtype, k.shape)


@METHOD
def test_gradients_equal_finite_differences(method):
    """U052, U065: by q, k, v and slopes, through the output and the lse."""
    small = inputs(5, batch=1, head_dim=3, value_dim=2)
    slopes = torch.tensor((*SLOPES[:3], 0.01), dtype=torch.float64, requires_grad=True)
    learn = method in ("exact", "window")

    def f(q, k, v, *slopes):
        got = attend(q, k, v, method, causal=True, **({"slopes": slopes[0]} if learn else {}))
        return got.out, (got.lse**2).sum()

    assert torch.autograd.gradcheck(f, (*leaves(*small), *([slopes] * learn)))


@pytest.mark.parametrize("per_batch", [False, True])
def test_slope_gradients_equal_the_formula(per_batch):
    """U052: d out_i / d m = -sum_j p_ij |i - j| (v_j - out_i); finite at slope 0, U051."""
    call = Call(method="exact", namespace="torch", causal=True, heads=(4, 2))
    q, k, v = (torch.from_numpy(x) for x in call.inputs[:3])
    rows = (call.slopes, (0.3, 0.0, 1.0, 0.1))
    slopes = torch.tensor(rows if per_batch else rows[0], dtype=torch.float64, requires_grad=True)
    got = attend(q, k, v, "exact", slopes=slopes, causal=True)
    weight = torch.from_numpy(call.inputs.grad_out)
    grad = torch.autograd.grad((got.out * weight).sum(), slopes)[0]
    want = testing.oracle(
        *call.inputs[:3],
        slopes=rows if per_batch else rows[0],
        causal=True,
        grad_out=call.inputs.grad_out,
    )
    np.testing.assert_allclose(grad.numpy(), want.slopes, rtol=1e-10, atol=1e-12)


def test_one_learned_slope_gets_the_sum_over_heads():
    """U054: a 0-d slope; U053: an expanded one."""
    q, k, v = leaves(*inputs(9))
    grads = []
    for make in (lambda m: m, lambda m: m.expand(4), lambda m: m.repeat(4)):
        slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        loss = (attend(q, k, v, "exact", slopes=make(slope)).out ** 2).sum()
        grads.append(torch.autograd.grad(loss, slope)[0])
    assert grads[0].shape == ()
    for grad in grads[1:]:
        testing.assert_equal_to_rounding(grad, grads[0])
    heads = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)
    by_head = torch.autograd.grad((attend(q, k, v, "exact", slopes=heads).out ** 2).sum(), heads)[0]
    testing.assert_equal_to_rounding(by_head.sum(), grads[0])


def test_learned_slopes_descend_to_the_optimum():
    """U053: slopes = softplus(parameter); a loss whose optimum is known falls at each step."""
    q, k, v = (torch.from_numpy(x) for x in inputs(20))
    target = attend(q, k, v, "exact", slopes=[0.3] * 4).out
    raw = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    step = torch.optim.SGD([raw], lr=2.0)
    losses = []
    for _ in range(6):
        out = attend(q, k, v, "exact", slopes=torch.nn.functional.softplus(raw)).out
        loss = ((out - target) ** 2).mean()
        losses.append(loss.item())
        step.zero_grad()
        loss.backward()
        step.step()
    assert all(a > b for a, b in itertools.pairwise(losses))


def test_mixed_dtypes_give_finite_slope_gradients():
    """U006: q, k, v in bfloat16, slopes in float32."""
    call = Call(dtype="bfloat16", namespace="torch", lengths=(128, 128))
    check_call(call)


@pytest.mark.parametrize("ratio", [(6, 2), (12, 3), (8, 1), (4, 4), (6, 3)])
@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_grouped_gradients_sum_over_the_group(ratio, method):
    """U059: equal to autograd through repeated keys, 1e-10."""
    heads, kv_heads = ratio
    arrays = leaves(*inputs(9, heads=heads, kv_heads=kv_heads))
    slopes = [0.4 / (1 + h) for h in range(heads)]
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((2, heads, 9, 6)))

    def grads(repeat):
        q, k, v = arrays
        if repeat:
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        loss = (attend(q, k, v, method, slopes=slopes).out * weight).sum()
        return torch.autograd.grad(loss, arrays)

    for a, b in zip(grads(False), grads(True), strict=True):
        assert float(torch.max(torch.abs(a - b))) < 1e-10


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_second_derivatives(method):
    """U060: gradgradcheck, float64, H=2, n=5, d=3."""
    small = inputs(5, batch=1, heads=2, kv_heads=1, head_dim=3, value_dim=2)
    chosen = plsh.Window(2) if method == "window" else METHODS[method]

    def f(q, k, v):
        return attend(q, k, v, method, method=chosen, slopes=SLOPES[:2], causal=True).out

    assert torch.autograd.gradgradcheck(f, leaves(*small))


@pytest.mark.parametrize("method", ["exact", "lsh"])
def test_gradient_penalty_equals_finite_differences(method):
    """U060: the gradient of |d loss / d q|^2."""
    q, k, v = leaves(*inputs(6))

    def penalty(q):
        loss = (attend(q, k, v, method).out ** 2).sum()
        return (torch.autograd.grad(loss, q, create_graph=True)[0] ** 2).sum()

    way = torch.from_numpy(np.random.default_rng(1).standard_normal(q.shape))
    slope = (torch.autograd.grad(penalty(q), q)[0] * way).sum().item()
    step = 1e-5
    ends = [penalty((q + s * way).detach().requires_grad_()).item() for s in (step, -step)]
    assert abs((ends[0] - ends[1]) / (2 * step) - slope) < 1e-5 * max(1, abs(slope))


@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_forward_mode_in_torch(method):
    """U061: torch.func.jvp and jacfwd against central differences and jacrev."""
    q, k, v = (torch.from_numpy(x) for x in inputs(5, batch=1, head_dim=3, value_dim=2))
    way = torch.from_numpy(np.random.default_rng(1).standard_normal(q.shape))

    def f(q):
        return attend(q, k, v, method, causal=True).out

    _, forward = torch.func.jvp(f, (q,), (way,))
    step = 1e-6
    central = (f(q + step * way) - f(q - step * way)) / (2 * step)
    assert float(torch.max(torch.abs(forward - central))) < 1e-5
    assert torch.allclose(torch.func.jacfwd(f)(q), torch.func.jacrev(f)(q), atol=1e-12)


def test_transforms_of_jax():
    """U061, U076: jvp, vmap of grad, and vmap over some operands; each equals a plain loop."""
    with jax.enable_x64(True):
        q, k, v = (jax.numpy.asarray(x[0]) for x in inputs(5, batch=1, head_dim=3, value_dim=2))
        slopes = jax.numpy.asarray(SLOPES)

        @jax.jit
        def f(q, k, v, slopes):
            return attend(q, k, v, "exact", slopes=slopes, causal=True).out

        way = jax.numpy.asarray(np.random.default_rng(1).standard_normal(q.shape))
        _, forward = jax.jvp(lambda q: f(q, k, v, slopes), (q,), (way,))
        central = (f(q + 1e-6 * way, k, v, slopes) - f(q - 1e-6 * way, k, v, slopes)) / 2e-6
        np.testing.assert_allclose(forward, central, atol=1e-5)

        several = jax.numpy.stack([q, 2 * q, -q])
        mapped = jax.vmap(f, in_axes=(0, None, None, None))(several, k, v, slopes)
        rates = jax.numpy.stack([slopes, 2 * slopes])
        by_slopes = jax.vmap(f, in_axes=(None, None, None, 0))(q, k, v, rates)
        grad = jax.grad(lambda q: (f(q, k, v, slopes) ** 2).sum())
        grads = jax.vmap(grad)(several)
        for i in range(3):
            np.testing.assert_allclose(mapped[i], f(several[i], k, v, slopes), atol=1e-12)
            np.testing.assert_allclose(grads[i], grad(several[i]), atol=1e-12)
        for i in range(2):
            np.testing.assert_allclose(by_slopes[i], f(q, k, v, rates[i]), atol=1e-12)


def test_jax_debug_checks_find_nothing():
    """U005, U009: float64, causal, n = 33, with jax_debug_nans and jax_debug_infs."""
    call = Call(method="exact", heads=(2, 1), causal=True, namespace="jax", return_lse=False)
    with jax.debug_nans(True), jax.debug_infs(True):
        check_call(call)


def test_jax_debug_nans_finds_nothing_in_dead_rows():
    """U009: a row that sees no key, forward and backward."""
    call = Call(
        method="exact",
        heads=(2, 1),
        lengths=(6, 4),
        offsets="cache",
        causal=True,
        segments="pair",
        namespace="jax",
        return_lse=False,
    )
    with jax.debug_nans(True):
        check_call(call)
