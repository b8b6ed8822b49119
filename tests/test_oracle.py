"""The float64 oracle against plain loops and finite differences."""

import subprocess
import sys

import numpy as np
import pytest

from plsh import testing


def loops(q, k, v, log_weight, scale, seen):
    """One head, one row at a time, from the definition; `seen` and `log_weight` (Nq, Nk)."""
    out, lse = np.zeros((len(q), v.shape[-1])), np.full(len(q), -np.inf)
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if seen[i][j] and log_weight[i][j] > -np.inf]
        if not keys:
            continue
        logits = [scale * float(q[i] @ k[j]) + log_weight[i][j] for j in keys]
        top = max(logits)
        parts = [np.exp(x - top) for x in logits]
        out[i] = sum(p * v[j] for p, j in zip(parts, keys, strict=True)) / sum(parts)
        lse[i] = top + np.log(sum(parts))
    return out, lse


def slow_attention(inputs, slopes, widths, causal, scale, q_offset, k_offset, ids):
    """All heads and rows by `loops`."""
    q, k, v = inputs[:3]
    batch, heads, len_q, _ = q.shape
    group, len_k = heads // k.shape[1], k.shape[2]
    out, lse = np.zeros((batch, heads, len_q, v.shape[-1])), np.zeros((batch, heads, len_q))
    for b in range(batch):
        for h in range(heads):
            seen, bias = np.ones((len_q, len_k), bool), np.zeros((len_q, len_k))
            for i in range(len_q):
                for j in range(len_k):
                    at_q, at_k = q_offset[b] + i, k_offset[b] + j
                    seen[i, j] = not causal or at_k <= at_q
                    if ids is not None:
                        seen[i, j] &= ids[0][b, i] == ids[1][b, j] and ids[1][b, j] >= 0
                    seen[i, j] &= widths is None or abs(at_q - at_k) <= widths[h]
                    bias[i, j] = -slopes[b][h] * abs(at_q - at_k)
            g = h // group
            out[b, h], lse[b, h] = loops(q[b, h], k[b, g], v[b, g], bias, scale, seen)
    return out, lse


def draw(seed=0):
    return testing.make_inputs(2, 4, 2, 7, 9, 3, 5, "float64", seed)


IDS = (
    np.array([[0, 0, 1, 1, -1, 2, 2], [0] * 7]),
    np.array([[0, 0, 0, 1, -1, -1, 2, 3, 3], [0, 0, 0, 0, -1, 0, 0, 1, 1]]),
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [None, (0, 2, 4, 100)])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "segments"])
@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
def test_oracle_equals_loops(causal, widths, ids, scale):
    """Section E of the cases: one query at a time, in float64."""
    inputs = draw()
    offsets = {"q_offset": (5, 0), "k_offset": (2, 3)}
    slopes = np.array([[0.5, 0.25, 0.1, 0.0], [1.0, 0.0, 0.2, 3.0]])
    got = testing.oracle(
        *inputs[:3],
        slopes=slopes,
        widths=widths,
        causal=causal,
        scale=scale,
        segment_ids=ids,
        **offsets,
    )
    c = 3**-0.5 if scale is None else scale
    out, lse = slow_attention(inputs, slopes, widths, causal, c, *offsets.values(), ids)
    np.testing.assert_allclose(got.out, out, atol=1e-14)
    np.testing.assert_allclose(got.lse, lse, atol=1e-14)


def test_oracle_takes_a_dense_weight():
    inputs = draw()
    weight = np.random.default_rng(1).integers(0, 3, (2, 4, 7, 9)) / 2
    weight[0, 1, 3] = 0  # a row that sees nothing
    got = testing.oracle(*inputs[:3], weight=weight)
    with np.errstate(divide="ignore"):
        log_weight = np.log(weight)
    for b in range(2):
        for h in range(4):
            q, k, v = inputs.q[b, h], inputs.k[b, h // 2], inputs.v[b, h // 2]
            out, lse = loops(q, k, v, log_weight[b, h], 3**-0.5, np.ones((7, 9), bool))
            np.testing.assert_allclose(got.out[b, h], out, atol=1e-14)
            np.testing.assert_allclose(got.lse[b, h], lse, atol=1e-14)
    assert got.slopes is None
    assert got.lse[0, 1, 3] == -np.inf
    for x in (got.out, got.q):
        assert not np.any(x[0, 1, 3])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ids", [None, IDS], ids=["whole", "segments"])
@pytest.mark.parametrize("per_batch", [False, True])
def test_oracle_gradients_equal_finite_differences(causal, ids, per_batch):
    """By q, k, v and slopes, through the output and the lse."""
    inputs = draw()
    rng = np.random.default_rng(2)
    slopes = np.array([0.5, 0.25, 0.1, 0.02])
    slopes = slopes * rng.uniform(0.5, 2, (2, 1)) if per_batch else slopes
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "slopes": slopes}
    call = {"causal": causal, "segment_ids": ids, "q_offset": 2}

    def run(**changed):
        x = {**arrays, **changed}
        slopes = x.pop("slopes")
        return testing.oracle(
            *x.values(), slopes=slopes, grad_out=inputs.grad_out, grad_lse=inputs.grad_lse, **call
        )

    def loss(result):
        lse = np.where(np.isfinite(result.lse), result.lse, 0)
        return (result.out * inputs.grad_out).sum() + (lse * inputs.grad_lse).sum()

    gradients = run()
    for name, x in arrays.items():
        way, step = rng.standard_normal(x.shape), 1e-5
        ahead, behind = (loss(run(**{name: x + s * way})) for s in (step, -step))
        slope = (getattr(gradients, name) * way).sum()
        assert abs((ahead - behind) / (2 * step) - slope) < 1e-7 * max(1, abs(slope)), name


def test_oracle_gradients_default_to_a_sum_of_the_output():
    inputs = draw()
    slopes = (0.5, 0.25, 0.1, 0.0)
    zeros = np.zeros((2, 4, 7))
    ones = np.ones((2, 4, 7, 5))
    implied = testing.oracle(*inputs[:3], slopes=slopes)
    said = testing.oracle(*inputs[:3], slopes=slopes, grad_out=ones, grad_lse=zeros)
    for a, b in zip(implied, said, strict=True):
        np.testing.assert_array_equal(a, b)


def test_padding_of_the_oracle_may_hold_anything():
    inputs = draw()
    call = {"slopes": (0.5, 0.25, 0.1, 0.0), "segment_ids": IDS}
    clean = testing.oracle(*inputs[:3], **call)
    q, k, v = (x.copy() for x in inputs[:3])
    q[np.broadcast_to((IDS[0] < 0)[:, None], q.shape[:3])] = np.nan
    for x in (k, v):
        x[np.broadcast_to((IDS[1] < 0)[:, None], x.shape[:3])] = np.nan
    for a, b in zip(clean, testing.oracle(q, k, v, **call), strict=True):
        np.testing.assert_array_equal(a, b)


def test_oracle_is_exact_where_the_weight_underflows():
    """Only far keys, at a weight of exp(-5000): the ratios are still those of the definition."""
    q, k, v = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 2, 1)), np.array([[[[1.0], [0.0]]]])
    got = testing.oracle(q, k, v, slopes=[1.0], q_offset=5000)
    np.testing.assert_allclose(got.out[0, 0, 0, 0], 1 / (1 + np.e), rtol=1e-12)
    np.testing.assert_allclose(got.lse[0, 0, 0], -5000 + np.log1p(np.e), rtol=1e-12)


def test_step_weight_counts_shared_blocks():
    weight = testing.step_weight([[0, 0, 2], [0, 1, 1]], [[0, 0, 2], [0, 1, 1]])
    np.testing.assert_array_equal(weight, [[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]])


def test_oracle_needs_one_kind_of_weight():
    x = np.ones((1, 1, 2, 3))
    for given in ({}, {"weight": 1.0, "slopes": [0.0]}):
        with pytest.raises(ValueError, match="weight or slopes"):
            testing.oracle(x, x, x, **given)


def test_oracle_imports_nothing_of_the_core_maths():
    """U042: a reference that shares code with what it judges proves nothing."""
    program = (
        "import sys, types, importlib.util as u\n"
        "package = types.ModuleType('plsh'); package.__path__ = []; sys.modules['plsh'] = package\n"
        "spec = u.spec_from_file_location('oracle', sys.argv[1])\n"
        "module = u.module_from_spec(spec); sys.modules['oracle'] = module\n"
        "spec.loader.exec_module(module)\n"
        "x = [[[[1.0]]]]\n"
        "assert module.oracle(x, x, x, slopes=[1.0]).out[0, 0, 0, 0] == 1.0\n"
        "assert [m for m in sys.modules if m.startswith('plsh')] == ['plsh']\n"
    )
    path = sys.modules["plsh.testing.oracle"].__file__
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=60)
