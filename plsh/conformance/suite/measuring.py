"""The yardsticks themselves: inputs, oracle, plain computation, tolerance, comparisons."""

import ast
import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plsh
from plsh import compat, testing
from plsh.backend import AttentionOutput, Gradients
from plsh.conformance.doubles import Unreadable, widest

DTYPES = ("float16", "bfloat16", "float32", "float64")
EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
CALL: dict[str, Any] = {"slopes": (0.5, 0.125, 0.03125, 0.0), "causal": True}


def inputs(dtype, seed=0, **shape):
    return testing.make_inputs(
        2, 4, 2, 19, head_dim=8, value_dim=6, dtype=dtype, seed=seed, **shape
    )


def yardsticks(dtype, **call):
    q, k, v, grad_out, grad_lse = inputs(dtype)
    call = {**CALL, "grad_out": grad_out, "grad_lse": grad_lse, **call}
    return testing.oracle(q, k, v, **call), testing.plain_attention(q, k, v, dtype=dtype, **call)


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.requirement("TST-1", "BCK-9")
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_exact_in_the_arrays_of_the_backend(dtype, subject):
    """So that the oracle and the backend have the same inputs."""
    made = inputs(dtype)
    for name, x in zip(made._fields, made, strict=True):
        own = dtype if name != "grad_lse" else "float64" if dtype == "float64" else "float32"
        array = subject.array(x, own)
        assert compat.dtype_name(array) == own
        np.testing.assert_array_equal(subject.host(array).astype(float), x.astype(float))


@pytest.mark.requirement("TST-1")
def test_inputs_are_seeded_and_normal(subject):
    dtype = widest(subject)
    one, same, other = inputs(dtype), inputs(dtype), inputs(dtype, seed=1)
    for x, y, z in zip(one, same, other, strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.array_equal(x, z)
    many = testing.make_inputs(4, 4, 4, 100, head_dim=16, dtype="float32", std=3.0)
    for x, std in zip(many, (3, 3, 1, 1, 1), strict=True):
        assert abs(np.std(x) / std - 1) < 0.05
        assert abs(np.mean(x) / std) < 0.05
        assert np.max(np.abs(x)) > 2.5 * std
    shapes = [x.shape for x in testing.make_inputs(None, 6, 3, 5, 7, 2, 9)]
    assert shapes == [(6, 5, 2), (3, 7, 2), (3, 7, 9), (6, 5, 9), (6, 5)]


# --- the oracle -----------------------------------------------------------------------------------


def loops(q, k, v, weight, scale):
    """Attention by its definition, number by number."""
    outs, lses = [], []
    for i, row in enumerate(q):
        terms = [
            weight(i, j) * math.exp(scale * math.fsum(a * b for a, b in zip(row, key, strict=True)))
            for j, key in enumerate(k)
        ]
        total = math.fsum(terms)
        columns = zip(*v, strict=True)
        outs.append([
            math.fsum(t * x for t, x in zip(terms, column, strict=True)) / total if total else 0.0
            for column in columns
        ])  # fmt: skip
        lses.append(math.log(total) if total else -math.inf)
    return np.array(outs), np.array(lses)


@pytest.mark.requirement("TST-2", "ATT-1")
@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_is_the_definition(causal, subject):
    q, k, v, *_ = inputs(widest(subject))
    ids = np.array([[0] * 7 + [1] * 8 + [-1] * 4, [-1] * 3 + [5] * 16])
    slopes, widths, scale = CALL["slopes"], (30, 4, 9, 0), 0.3
    found = testing.oracle(
        q, k, v, slopes=slopes, widths=widths, causal=causal, scale=scale, q_offset=5, k_offset=3,
        segment_ids=ids,
    )  # fmt: skip
    for b, h in np.ndindex(2, 4):

        def weight(i, j, b=b, h=h):
            apart = (i + 5) - (j + 3)
            seen = ids[b, i] == ids[b, j] >= 0 and (apart >= 0 or not causal)
            return math.exp(-slopes[h] * abs(apart)) if seen and abs(apart) <= widths[h] else 0.0

        own = (x.astype(float).tolist() for x in (q[b, h], k[b, h // 2], v[b, h // 2]))
        out, lse = loops(*own, weight, scale)
        np.testing.assert_allclose(found.out[b, h], out, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.lse[b, h], lse, rtol=1e-12, atol=1e-12)


@pytest.mark.requirement("TST-2", "NUM-8", "NUM-9")
def test_the_gradients_of_the_oracle_are_differences(subject):
    """In a direction of every input at once, slopes included."""
    q, k, v, by_out, by_lse = inputs("float64")
    slopes = np.array(CALL["slopes"]) + 0.25
    call = {"causal": True, "grad_out": by_out, "grad_lse": by_lse}
    grads = testing.oracle(q, k, v, slopes=slopes, **call)
    for name, step in zip(("q", "k", "v", "slopes"), inputs("float64", seed=9), strict=False):
        step = step if name != "slopes" else np.array([1.0, -0.5, 0.25, 2.0])

        def loss(t, name=name, step=step):
            given = {"q": q, "k": k, "v": v, "slopes": slopes}
            given[name] = given[name] + t * step
            found = testing.oracle(**given, causal=True)
            return np.sum(found.out * by_out) + np.sum(found.lse * by_lse)

        h = 1e-5
        want = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
        assert abs(np.sum(getattr(grads, name) * step) - want) < 1e-8 * max(1, abs(want))


@pytest.mark.requirement("TST-2")
def test_the_oracle_shares_no_code(subject):
    """Its module imports NumPy and typing, nothing of plsh."""
    tree = ast.parse(Path(inspect.getfile(testing.oracle)).read_text("utf-8"))
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom)
            else []
        )
    }  # fmt: skip
    assert imported == {"typing", "numpy", "numpy.typing"}
    package = type(subject.backend).__module__.partition(".")[0]
    assert package == "plsh" or package not in imported


# --- the plain computation ------------------------------------------------------------------------


@pytest.mark.requirement("TST-3")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_computation_rounds_where_it_says(dtype, subject):
    """Thirds as probabilities: P rounded before the products, the results after, lse not."""
    n = np.arange(1, 4)
    q, k, v = np.zeros((1, 1, 3, 1)), np.zeros((1, 1, 3, 1)), n.reshape(1, 1, 3, 1) / 4
    k = k + n.reshape(1, 1, 3, 1)
    do, dl = np.full((1, 1, 3, 1), 3.0), np.full((1, 1, 3), 0.125)
    found = testing.plain_attention(
        q, k, v, dtype=dtype, slopes=[0.0], scale=1.0, grad_out=do, grad_lse=dl
    )
    wide = np.float64 if dtype == "float64" else np.float32

    def narrow(x):
        return testing.round_to(np.asarray(x, wide), dtype).astype(wide)

    third = wide(1) / wide(3)
    p = narrow(third)
    out = narrow(sum(p * narrow(x) for x in n / 4))
    np.testing.assert_array_equal(found.out, np.full((1, 1, 3, 1), out))
    np.testing.assert_array_equal(found.lse, np.full((1, 1, 3), np.log(wide(3))))
    np.testing.assert_array_equal(found.v, np.full((1, 1, 3, 1), narrow(3 * (p * wide(3)))))
    ds = narrow([third * (wide(3) * wide(x) - wide(3) * out + wide(0.125)) for x in n / 4])
    np.testing.assert_array_equal(found.q[0, 0, :, 0], narrow([ds @ n.astype(wide)] * 3))
    assert not np.any(found.k)  # q is 0


@pytest.mark.requirement("TST-3", "NUM-7")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plain_computation_errs_as_its_precision_does(dtype, subject):
    """Neither a coarser yardstick, which would pass faults, nor a finer one."""
    expected, plain = yardsticks(dtype)
    eps, wide = EPS[dtype], min(EPS[dtype], EPS["float32"])
    for name, unit in (("out", eps), ("lse", wide), ("q", eps), ("k", eps), ("v", eps)):
        x, y = getattr(plain, name), getattr(expected, name)
        error = np.max(np.abs(x - y)) / np.max(np.abs(y))
        assert error < 4 * unit, name
        assert error > unit / 32 or dtype == "float64", name


# --- the tolerance --------------------------------------------------------------------------------


def as_output(subject, result, dtype):
    wide = "float64" if dtype == "float64" else "float32"
    return AttentionOutput(subject.array(result.out, dtype), subject.array(result.lse, wide))


@pytest.mark.requirement("TST-4", "NUM-7", "CNF-3")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tolerance_is_that_of_the_standard(dtype, subject):
    """The plain computation and the rounded truth pass; what is a little farther does not."""
    expected, plain = yardsticks(dtype)
    like = subject.array(inputs(dtype).q, dtype)
    for result in (plain, expected):
        testing.assert_output_close(as_output(subject, result, dtype), expected, plain, like=like)
    eps, wide = EPS[dtype], min(EPS[dtype], EPS["float32"])
    exact = as_output(subject, expected, dtype)
    measured = testing.assert_output_close(exact, expected, plain, like=like)
    for i, (name, unit, t) in enumerate((("out", eps, 0.0), ("lse", wide, 1.0))):
        y, a = getattr(expected, name), np.max(np.abs(getattr(expected, name)))
        own = np.max(np.abs(getattr(plain, name) - y))
        allowed = 2 * (own + unit * a + wide * t + 8 * 2.0**-52 * (a + t))
        np.testing.assert_allclose(measured[i].tolerance, allowed, rtol=1e-12)
        assert measured[i].error <= allowed
        for where in ((0, 0, 0), (-1, -1, -1)):  # one entry
            wrong = y.copy()
            wrong[where] += 3 * allowed + unit * abs(np.max(wrong[where]))
            other = as_output(subject, expected._replace(**{name: wrong}), dtype)
            with pytest.raises(AssertionError, match=rf"{name}: error .* above the tolerance"):
                testing.assert_output_close(other, expected, plain, like=like)


@pytest.mark.requirement("TST-4", "NUM-7")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["q", "k", "v", "slopes"])
def test_the_tolerance_of_gradients_is_that_of_the_standard(which, dtype, subject):
    expected, plain = yardsticks(dtype)
    like = subject.array(inputs(dtype).q, dtype)
    wide = "float64" if dtype == "float64" else "float32"

    def arrays(result):
        made = (subject.array(getattr(result, name), dtype) for name in "qkv")
        return Gradients(*made, subject.array(result.slopes, wide))

    for result in (plain, expected):
        testing.assert_gradients_close(arrays(result), expected, plain, like=like)
    for from_lse in (False, True):
        measured = testing.assert_gradients_close(
            arrays(expected), expected, plain, like=like, from_lse=from_lse
        )
        found = measured[("q", "k", "v", "slopes").index(which)]
        y, t = getattr(expected, which), getattr(plain.terms, which)
        eps = EPS[wide] if which == "slopes" else EPS[dtype]
        if from_lse:
            lse = np.abs(expected.lse)
            lse = max(1.0, np.max(lse[np.isfinite(lse)]))
            shared = EPS[dtype] / EPS["float32"] if which == "slopes" else 1.0
            t = t * max(lse, shared)
        a, own = np.max(np.abs(y)), np.max(np.abs(getattr(plain, which) - y))
        e = min(eps, EPS["float32"])
        allowed = 3 * (own + eps * a + e * t + 8 * 2.0**-52 * (a + t))
        np.testing.assert_allclose(found.tolerance, allowed, rtol=1e-12)
        wrong = y.copy()
        wrong[(-1,) * y.ndim] += 3 * allowed + eps * abs(wrong[(-1,) * y.ndim])
        with pytest.raises(AssertionError, match=rf"gradient by {which}: error"):
            testing.assert_gradients_close(
                arrays(expected._replace(**{which: wrong})), expected, plain, like=like,
                from_lse=from_lse,
            )  # fmt: skip


@pytest.mark.requirement("TST-4", "CNF-3", "ATT-21")
def test_what_is_not_finite_is_compared_for_equality(subject):
    dtype = widest(subject)
    want = np.array([1.0, -np.inf, 2.0, 0.0])
    like = subject.array(want, dtype)
    testing.assert_attention_close(like, want, want, like=like)
    compare = (
        lambda x: testing.assert_attention_close(x, want, want, like=like),
        lambda x: testing.assert_equal_to_rounding(x, like),
        lambda x: testing.assert_identical(x, like),
    )
    for check in compare:
        check(subject.array(want, dtype))
        for i, odd in ((0, np.nan), (0, np.inf), (1, -1e4), (1, np.inf), (1, np.nan), (2, -np.inf)):
            wrong = want.copy()
            wrong[i] = odd
            with pytest.raises(AssertionError, match=r"NaN|infinite on one side"):
                check(subject.array(wrong, dtype))


@pytest.mark.requirement("CNF-3")
def test_kind_dtype_and_shape_come_before_values(subject):
    """And each is compared for equality, where the values agree as where they do not."""
    dtype = widest(subject)
    other = "float32" if dtype != "float32" else "float64"
    host = np.array([[1.0, 2.0]])
    like = subject.array(host, dtype)
    alien = np.array(host) if subject.kind != "numpy" else Unreadable((1, 2), dtype)
    for value in (1.0, np.nan):
        for x, word in (
            (subject.array(host * value, other), "dtype"),
            (subject.array(np.repeat(host, 2, axis=0) * value, dtype), "shape"),
            (subject.array(host[0] * value, dtype), "shape"),
            (alien, "array"),
        ):
            for check in (testing.assert_equal_to_rounding, testing.assert_identical):
                with pytest.raises(AssertionError, match=rf"must .*{word}"):
                    check(x, like)
            with pytest.raises(AssertionError, match=rf"must .*{word}"):
                testing.assert_attention_close(x, host, host, like=like)


@pytest.mark.requirement("CNF-3", "NUM-11")
@pytest.mark.parametrize("dtype", DTYPES)
def test_identical_means_every_bit_and_rounding_means_rounding(dtype, subject):
    x = testing.round_to(np.linspace(1, 8, 50), dtype)
    like, eps = subject.array(x, dtype), EPS[dtype]
    testing.assert_identical(subject.array(x, dtype), like)
    near, far = x.astype(float), x.astype(float)
    near[0] += 2 * eps
    far[0] += 40 * eps * 8
    for wrong in (near, far):
        with pytest.raises(AssertionError, match="1 of 50 values differ"):
            testing.assert_identical(subject.array(wrong, dtype), like)
    testing.assert_equal_to_rounding(subject.array(near, dtype), like)
    with pytest.raises(AssertionError, match="above the tolerance"):
        testing.assert_equal_to_rounding(subject.array(far, dtype), like)


@pytest.mark.requirement("CNF-1", "NUM-7", "BCK-7")
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_declared_pair_of_dtype_and_method_is_tested(dtype, method, subject):
    """By default slopes, without any option: nothing that is declared goes untested."""
    q, k, v, *_ = inputs(dtype)
    slopes = tuple(map(float, plsh.alibi_slopes(4)))  # so flat that no window ends
    weight: dict[str, Any] = {"slopes": slopes}
    if method == "lsh":
        sets = plsh.RandomBinning(tuple(1 / m for m in slopes)).sample(16, 19)
        weight = {"weight": testing.step_weight(sets.labels(), sets.labels())}
    expected = testing.oracle(q, k, v, **weight)
    plain = testing.plain_attention(q, k, v, dtype=dtype, **weight)
    arrays = [subject.array(x, dtype) for x in (q, k, v)]
    output = subject.attention(*arrays, method=method, return_lse=True)
    subject.record(*testing.assert_output_close(output, expected, plain, like=arrays[0]))
