"""What a backend declares, what it takes and refuses, and its harness."""

import numpy as np
import pytest

import plsh
from plsh import attention, attention_vjp, compat, testing
from plsh.backend import SPEC_VERSION, Availability, Capabilities
from plsh.conformance.doubles import (
    DTYPES,
    METHODS,
    OBJECTS,
    SLOPES,
    Recorder,
    everything,
    problem,
    registered,
    widest,
)

KINDS = ("numpy", "torch", "jax", "cupy", "array-api")


@pytest.mark.requirement("BCK-1", "BCK-5", "BCK-6", "CNF-1")
def test_a_backend_has_its_parts_and_declares_names_that_exist(subject):
    """A name that is misspelt would be a capability that nobody tests."""
    backend, declared = subject.backend, subject.capabilities
    assert backend.name == subject.name
    assert backend.spec_version.split(".")[0] == SPEC_VERSION.split(".")[0]
    assert all(part.isdigit() for part in backend.spec_version.split("."))
    state = backend.availability()
    assert isinstance(state, Availability)
    assert (state.ok, state.reason, state.cause) == (True, "", None)
    assert isinstance(declared, Capabilities)
    assert backend.capabilities() == declared
    transforms = ("jvp", "jit", "vmap", "compile", "second_order")
    for found, known in (
        (declared.arrays, KINDS),
        (declared.dtypes, DTYPES),
        (declared.methods, METHODS),
        ((declared.gradients,), ("vjp", "autograd", None)),
        (declared.transforms, transforms),
    ):
        assert set(found) <= set(known)
        assert len(set(found)) == len(found)
    assert declared.arrays
    assert declared.dtypes
    assert declared.methods
    limit = declared.max_head_dim
    assert limit is None or (type(limit) is int and limit >= 1)


@pytest.mark.requirement("BCK-11", "BCK-1")
def test_a_backend_has_a_vjp_if_and_only_if_it_declares_one(subject):
    has = callable(getattr(subject.backend, "vjp", None))
    assert has == (subject.capabilities.gradients == "vjp")


@pytest.mark.requirement("BCK-9", "CNF-1")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_harness_carries_values_to_arrays_and_back(dtype, subject):
    harness = subject.harness
    assert harness.devices
    assert all(isinstance(name, str) for name in harness.devices)
    for device in (None, *harness.devices):
        for shape in ((2, 3), (0, 4), (), (1, 2, 5, 3)):
            x = testing.round_to(np.random.default_rng(0).normal(size=shape), dtype)
            made = harness.asarray(x, dtype=dtype, device=device)
            harness.synchronize(made)
            assert (compat.kind(made), compat.dtype_name(made)) == (subject.kind, dtype)
            assert tuple(made.shape) == shape
            back = harness.to_numpy(made)
            assert type(back) is np.ndarray
            assert back.dtype.name == ("float32" if dtype == "bfloat16" else dtype)
            np.testing.assert_array_equal(back, x)
    default = harness.asarray(np.zeros(2), dtype=dtype, device=None)
    first = harness.asarray(np.zeros(2), dtype=dtype, device=harness.devices[0])
    assert compat.same_device(default, first)


HAS = {
    "torch": {"jvp", "vmap", "compile", "second_order"},
    "jax": {"jvp", "jit", "vmap", "second_order"},
}
"""The transforms of an array library; each of these has a vjp, too."""


@pytest.mark.requirement("BCK-9", "BCK-7", "CNF-1")
def test_the_harness_has_the_transforms_that_are_declared(subject):
    harness, declared = subject.harness, subject.capabilities

    def square(x):
        return (x * x,)

    x = subject.array(np.array([1.0, -2.0, 3.0]), widest(subject))
    one, wanted = x * 0 + 1, HAS.get(subject.kind, set()) & set(declared.transforms)
    somewhere = set().union(*(HAS.get(kind, set()) for kind in declared.arrays))
    for name in set(declared.transforms) - somewhere:  # no library that the suite knows has it
        assert getattr(subject.backend.harness(), name, None) is not None, name
    values, slopes = [square(x)], []
    if "jit" in wanted:
        values.append(harness.jit(square)(x))
    if "compile" in wanted:
        values.append(harness.compile(square)(x))
    if "vmap" in wanted:
        values.append(harness.vmap(square, in_axes=(0,))(x))
    if "jvp" in wanted:
        outputs, tangents = harness.jvp(square, (x,), (one,))
        values.append(outputs)
        slopes.append(tangents)
    if declared.gradients == "autograd" and subject.kind in HAS:
        slopes.append(harness.vjp(square, [x], (one,)))
    for (found,) in values:
        np.testing.assert_array_equal(subject.host(found), [1, 4, 9])
    for (found,) in slopes:
        np.testing.assert_array_equal(subject.host(found), [2, -4, 6])
    first = subject.backend.harness().asarray(np.zeros(1), dtype=widest(subject), device=None)
    assert compat.kind(first) == declared.arrays[0]


@pytest.mark.requirement("BCK-7", "CNF-2")
def test_what_a_backend_does_not_declare_it_refuses(subject):
    declared, make = subject.capabilities, testing.harness_for(subject.kind).asarray
    ones = np.ones((1, 1, 3, 2))
    for dtype in set(DTYPES) - set(declared.dtypes):
        x = make(ones, dtype=dtype, device=None)
        with pytest.raises(plsh.UnsupportedByBackendError, match=dtype):
            attention(x, x, x, method=declared.methods[0], backend=subject.name)
    x = subject.array(ones, widest(subject))
    for method in set(METHODS) - set(declared.methods):
        with pytest.raises(plsh.UnsupportedByBackendError, match=method):
            attention(x, x, x, method=method, backend=subject.name)
    if declared.max_head_dim is not None:
        x = subject.array(np.ones((1, 1, 3, declared.max_head_dim + 1)), widest(subject))
        with pytest.raises(plsh.UnsupportedByBackendError, match=str(declared.max_head_dim)):
            attention(x, x, x, method=declared.methods[0], backend=subject.name)


@pytest.mark.requirement("BCK-7", "BCK-8", "BCK-14", "ATT-24")
@pytest.mark.parametrize("method", METHODS)
def test_what_a_backend_declares_it_serves(method, subject):
    """Refusing is for special operands, not for a part of a method, a dtype or an option."""
    arrays = problem(subject, widest(subject))
    ids = subject.array(np.repeat([[0] * 9 + [1] * 10 + [-1] * 2], 2, axis=0), "int32")
    options = {"method": OBJECTS[method], "slopes": SLOPES}
    for more in (
        {},
        {"causal": True},
        {"scale": 0.0},
        {"k_offset": 1000},
        {"q_offset": 30, "k_offset": 12, "causal": True},
        {"segment_ids": ids},
    ):
        for x in everything(subject, arrays, **options, **more):
            assert not np.any(np.isnan(subject.host(x)))


NARROW = {
    "dtype": {"dtypes": ()},
    "method": {"methods": ()},
    "head dim": {"max_head_dim": 3},
    "value dim": {"max_head_dim": 4, "dims": (2, 5)},
}


@pytest.mark.requirement("BCK-7", "CNF-2", "ERR-1")
@pytest.mark.parametrize("missing", NARROW)
def test_the_core_refuses_for_a_backend_what_it_does_not_declare(missing, subject):
    """Never computed by other means, though others could."""
    options = dict(NARROW[missing])
    q, k, v, *_ = problem(subject, widest(subject), dims=options.pop("dims", (4, 4)))
    narrow = Recorder(capabilities=Capabilities((subject.kind,), gradients="vjp", **options))
    method = subject.capabilities.methods[0]
    with registered(narrow):
        with pytest.raises(plsh.UnsupportedByBackendError, match=narrow.name):
            attention(q, k, v, method=method, backend=narrow.name)
        with pytest.raises(plsh.UnsupportedByBackendError, match=narrow.name):
            attention_vjp(q, k, v, None, None, method=method, backend=narrow.name)
    assert not narrow.calls
    assert not narrow.asked


OPERANDS = {
    "none": lambda s: {},
    "causal": lambda s: {"causal": True},
    "pair of segments": lambda s: {"segment_ids": (s.array(np.zeros((2, 21)), "int32"),) * 2},
    "negative positions": lambda s: {
        "k_offset": -21, "segment_ids": s.array(np.full((2, 21), -1), "int32")},
    "offsets per row": lambda s: {"q_offset": (25, 30), "k_offset": [25, 28]},
    "own offset": lambda s: {"q_offset": s.array(np.array(25), "int32")},
    "own offsets": lambda s: {"q_offset": s.array(np.array([25, 26]), "int32"), "k_offset": 20},
    "far": lambda s: {"k_offset": 2**30 - 30},
}  # fmt: skip


def with_slopes(subject, method):
    """Yield the ways to give the weight of a method."""
    if method == "lsh":
        yield {"method": plsh.RandomBinning((2.0, 3.0, 4.0, 5.0)).sample(3, 60)}
        yield {"method": plsh.FixedBlocks((4.0,)).sample(1, 60)}
        yield {"method": plsh.PositionalLSH(
            1, family=plsh.IndependentCuts((3.0,) * 4), sampler=None)}  # fmt: skip
    else:
        yield {"method": method, "slopes": (SLOPES, SLOPES[::-1])}
        yield (
            {"method": method, "slopes": subject.array(np.array(SLOPES), "float32")}
            if (method == "exact")
            else {"method": plsh.Window(4), "slopes": 0.5}
        )
    yield {"method": method, "slopes": SLOPES}


@pytest.mark.requirement("BCK-8", "BCK-14", "ERR-1")
@pytest.mark.parametrize("case", OPERANDS)
@pytest.mark.parametrize("method", METHODS)
def test_can_run_decides_whether_attend_serves(method, case, subject):
    """None, and then it computes; or a sentence, and the core has made it an error."""
    q, k, v, *_ = problem(subject, widest(subject))
    for options in with_slopes(subject, method):
        if isinstance(options["method"], plsh.PartitionSet) and case == "far":
            options["method"] = plsh.FixedBlocks((4.0,)).sample(1, 60, start=2**30 - 60)
        recorder = Recorder(subject.backend)
        refused = None
        with registered(recorder):
            try:
                out = attention(
                    q, k, v, backend=recorder.name, **options, **OPERANDS[case](subject)
                )
            except plsh.UnsupportedByBackendError as error:
                refused = str(error)
        (request,) = recorder.asked
        reason = subject.backend.can_run(request)
        if refused is None:
            assert reason is None
            assert np.all(np.isfinite(subject.host(out)))
        else:
            assert not recorder.calls, "attend refuses what can_run does not"
            assert isinstance(reason, str)
            assert reason.strip()
            assert reason in refused


@pytest.mark.requirement("BCK-8", "BCK-15")
@pytest.mark.needs("kind:numpy")
@pytest.mark.parametrize("method", METHODS)
def test_can_run_reads_no_values(method, subject):
    class Sealed(np.ndarray):
        def refuse(self, *arguments, **keywords):
            raise AssertionError("can_run reads the values of an operand")

        __array_ufunc__ = __array_function__ = __getitem__ = __iter__ = __bool__ = refuse
        __int__ = __float__ = __index__ = min = max = any = all = tolist = item = refuse

    q, k, v, *_ = problem(subject, widest(subject))
    ids = subject.array(np.zeros((2, 21)), "int32")
    recorder = Recorder(capabilities=subject.capabilities)
    with registered(recorder), pytest.raises(AssertionError, match="must not be asked"):
        attention(
            q, k, v, method=method, slopes=SLOPES, segment_ids=ids, k_offset=5,
            backend=recorder.name,
        )  # fmt: skip
    (request,) = recorder.asked
    operands = plsh.backend.Operands(
        request.arrays.slopes,
        np.array([5, 5]).view(Sealed),
        np.array([5, 5]).view(Sealed),
        tuple(x.view(Sealed) for x in (ids, ids)),
        request.arrays.labels,
    )
    reason = subject.backend.can_run(plsh.backend.Request(request.static, operands))
    assert reason is None or isinstance(reason, str)


@pytest.mark.requirement("BCK-8", "ERR-1")
def test_a_reason_of_can_run_becomes_an_error(subject):
    q, k, v, *_ = problem(subject, widest(subject))
    unwilling = Recorder(refusal="the moon is not full")
    call = {"method": subject.capabilities.methods[0], "backend": unwilling.name}
    with registered(unwilling):
        with pytest.raises(plsh.UnsupportedByBackendError, match="the moon is not full"):
            attention(q, k, v, **call)
        with pytest.raises(plsh.UnsupportedByBackendError, match="the moon is not full"):
            attention_vjp(q, k, v, None, None, **call)
    assert len(unwilling.asked) == 2
    assert not unwilling.calls
