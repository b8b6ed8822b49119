"""Equal bits from equal calls, whatever ran before; batch rows that do not see their mates."""

import numpy as np
import pytest

from plsh.backend import AttentionOutput
from plsh.conformance.suite.common import DTYPES, METHODS, SLOPES, assert_same, bits, make

METHOD = pytest.mark.parametrize("method", METHODS)
DTYPE = pytest.mark.parametrize("dtype", DTYPES)

# --- the same call twice --------------------------------------------------------------------------


@pytest.mark.requirement("NUM-11", "CNF-3")
@METHOD
@DTYPE
def test_the_same_call_gives_the_same_bits(method, dtype, subject):
    problem = make(subject, 70, method=method, dtype=dtype, causal=True)
    first = problem.output(subject)
    for _ in range(20 if subject.full else 3):
        bits(subject, problem.output(subject), first)


@pytest.mark.requirement("NUM-11", "CNF-3")
@pytest.mark.needs("gradients")
@METHOD
@DTYPE
def test_the_same_call_gives_the_same_gradients(method, dtype, subject):
    problem = make(subject, 70, method=method, dtype=dtype, causal=True)
    first = problem.gradients(subject)
    for _ in range(20 if subject.full else 2):
        bits(subject, problem.gradients(subject), first)


OTHERS = [
    {"len_q": 70, "of_another": True},
    {"len_q": 33, "len_k": 90, "q_offset": 57},
    {"len_q": 1, "len_k": 70, "q_offset": 69},
    {"len_q": 70, "seed": 9, "fill": np.nan},
    {"len_q": 130, "seed": 8, "fill": np.nan},
    {"len_q": 70, "batch": 3, "fill": np.inf},
]
"""Calls between two equal ones: of other methods and shapes, and with visible NaN."""


def _other(subject, method, dtype, *, len_q, len_k=None, fill=None, of_another=False, **options):
    if of_another:
        declared = subject.capabilities.methods
        method = next((m for m in METHODS if m in declared and m != method), method)
    problem = make(subject, len_q, len_k, dtype=dtype, method=method, **options)
    if fill is None:
        return problem
    return problem.but(**{x: np.full_like(getattr(problem, x), fill) for x in ("q", "k", "v")})


@pytest.mark.requirement("NUM-11", "MEM-2", "BCK-10")
@METHOD
@DTYPE
@pytest.mark.parametrize("segments", [pytest.param(False, marks=pytest.mark.full), True])
def test_calls_in_between_leave_nothing_behind(method, dtype, segments, subject):
    """No scratch memory carries values over, NaN above all, which 0 does not quench."""
    ids = np.where(np.arange(70) % 7 == 3, -1, np.arange(70) // 30)[None].repeat(2, axis=0)
    problem = make(
        subject,
        70,
        method=method,
        dtype=dtype,
        segment_ids=ids.astype(np.int32) if segments else None,
    )
    first = problem.output(subject)
    grads = problem.gradients(subject) if subject.differentiates else None
    for options in OTHERS:
        with np.errstate(all="ignore"):
            other = _other(subject, method, dtype, **options)
            if subject.differentiates:
                other.gradients(subject)
            else:
                other.output(subject)
        bits(subject, problem.output(subject), first)
        if grads is not None and (options.get("fill") is not None or subject.full):
            bits(subject, problem.gradients(subject), grads)


@pytest.mark.requirement("NUM-11", "MEM-2")
@METHOD
def test_an_earlier_result_is_not_overwritten(method, subject):
    problem = make(subject, 40, method=method)
    q, k, v = problem.arrays(subject)
    keywords = problem.keywords(subject)
    held = subject.attention(q, k, v, return_lse=True, **keywords)
    before = [np.array(subject.host(x)) for x in held]
    other = make(subject, 40, method=method, seed=5)
    other.output(subject)
    if subject.differentiates:
        other.gradients(subject)
    bits(subject, tuple(map(subject.host, held)), tuple(before))


# --- batch mates ----------------------------------------------------------------------------------


def _mates(problem, change):
    """Return the problem with other values in all batch rows but the second."""
    new = {}
    for name in ("q", "k", "v", "grad_out", "grad_lse"):
        x = getattr(problem, name)
        other = change(x)
        other[1] = x[1]
        new[name] = other
    return problem.but(**new)


CHANGES = {
    "other": lambda x: x[::-1].copy(),
    "zero": lambda x: 0 * x,
    "huge": lambda x: 128 * x,
    "nan": lambda x: np.full_like(x, np.nan),
    "inf": lambda x: np.full_like(x, np.inf),
}


@pytest.mark.requirement("NUM-12")
@METHOD
@DTYPE
@pytest.mark.parametrize("change", CHANGES)
def test_a_row_does_not_depend_on_the_values_of_its_mates(method, dtype, change, subject):
    problem = make(subject, 70, method=method, dtype=dtype, batch=3, causal=True)
    other = _mates(problem, CHANGES[change])
    with np.errstate(all="ignore"):
        bits(subject, _second(other.output(subject)), _second(problem.output(subject)))
        if subject.differentiates:
            got, expected = (p.gradients(subject) for p in (other, problem))
            bits(subject, _second(got[:3]), _second(expected[:3]))


def _second(arrays):
    return tuple(x[1:2] for x in arrays)


@pytest.mark.requirement("NUM-12", "ATT-19")
@METHOD
def test_a_row_does_not_depend_on_the_segments_of_its_mates(method, subject):
    own = np.arange(70) // 30
    results = []
    for mate in (own, 0 * own, 0 * own - 1, np.arange(70), np.where(own == 1, -1, own)):
        ids = np.stack([mate, own, mate]).astype(np.int32)
        problem = make(subject, 70, method=method, batch=3, segment_ids=ids, causal=True)
        found = _second(problem.output(subject))
        if subject.differentiates:
            found += _second(problem.gradients(subject)[:3])
        results.append(found)
    for found in results[1:]:
        bits(subject, found, results[0])


@pytest.mark.requirement("NUM-12", "ATT-15")
@METHOD
@pytest.mark.may_refuse
def test_a_row_does_not_depend_on_the_offsets_of_its_mates(method, subject):
    results = []
    for mate in (7, 8, 20, 200):
        at = (mate, 7, 2 * mate)
        problem = make(subject, 40, method=method, batch=3, q_offset=at, k_offset=at, causal=True)
        found = _second(problem.output(subject))
        if subject.differentiates:
            found += _second(problem.gradients(subject)[:3])
        results.append(found)
    for found in results[1:]:
        bits(subject, found, results[0])


@pytest.mark.requirement("NUM-12", "NUM-9")
@pytest.mark.parametrize("method", ["exact", "window"])
def test_a_row_does_not_depend_on_the_slopes_of_its_mates(method, subject):
    results = []
    for mate in (SLOPES, (0.0,) * 4, (8.0,) * 4):
        problem = make(subject, 40, method=method, batch=3, slopes=(mate, SLOPES, mate))
        found = _second(problem.output(subject))
        if subject.differentiates:
            found += _second(problem.gradients(subject))
        results.append(found)
    for found in results[1:]:
        bits(subject, found, results[0])


@pytest.mark.requirement("NUM-12")
@METHOD
@DTYPE
def test_the_number_of_mates_does_not_matter(method, dtype, subject):
    problem = make(subject, 70, method=method, dtype=dtype, batch=5, causal=True)
    together = problem.output(subject)
    alone = [problem.row(b).output(subject) for b in range(5)]
    expected = AttentionOutput(*(np.concatenate(x) for x in zip(*alone, strict=True)))
    assert_same(subject, dtype, together, expected)
    if subject.differentiates:
        grads = [problem.row(b).gradients(subject) for b in range(5)]
        whole = problem.gradients(subject)
        joined = tuple(np.concatenate([g[i] for g in grads]) for i in range(3))
        assert_same(subject, dtype, whole[:3], joined)
