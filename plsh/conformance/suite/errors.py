"""The errors of naming a backend: types, messages, causes. What a suite run itself refuses."""

import pickle

import numpy as np
import pytest

import plsh
from plsh import attention, attention_vjp
from plsh.backend import Availability, Capabilities
from plsh.conformance.doubles import Recorder, registered, widest
from plsh.conformance.report import Report, Row
from plsh.conformance.requirements import requirements
from plsh.conformance.runner import run
from plsh.conformance.subject import Subject


def call(subject, **options):
    x = subject.array(np.ones((1, 2, 3, 4)), widest(subject))
    options = {"method": subject.capabilities.methods[0], **options}
    return attention(x, x, x, **options)


def call_vjp(subject, **options):
    x = subject.array(np.ones((1, 2, 3, 4)), widest(subject))
    options = {"method": subject.capabilities.methods[0], **options}
    return attention_vjp(x, x, x, None, None, **options)


CALLS = pytest.mark.parametrize("function", [call, call_vjp])


@pytest.mark.requirement("ERR-1")
def test_the_types_of_errors(subject):
    for error, base in (
        (plsh.UnknownBackendError, ValueError),
        (plsh.BackendUnavailableError, ImportError),
        (plsh.UnsupportedByBackendError, NotImplementedError),
    ):
        assert issubclass(error, base)
        assert not issubclass(error, TypeError)
        assert str(pickle.loads(pickle.dumps(error("why")))) == "why"
    assert not issubclass(plsh.BackendUnavailableError, plsh.UnknownBackendError)
    assert not issubclass(plsh.UnsupportedByBackendError, ValueError)


@pytest.mark.requirement("ERR-1", "ERR-4", "ATT-22")
@CALLS
def test_an_unknown_backend_lists_the_known(function, subject):
    with pytest.raises(plsh.UnknownBackendError) as caught:
        function(subject, backend="no_such_backend")
    message = str(caught.value)
    for name in ("no_such_backend", subject.name, "reference"):
        assert name in message
    everything = [row.name for row in plsh.backends()]
    with registered(without=everything):
        for name in (None, subject.name):
            with pytest.raises(plsh.UnknownBackendError, match="pip install"):
                function(subject, backend=name)


@pytest.mark.requirement("ERR-1", "ERR-3", "ERR-4", "BCK-6", "ATT-22")
@CALLS
def test_an_unavailable_backend_says_why_and_chains_the_cause(function, subject):
    cause = OSError("libdevice.so: no such file")
    for known in (cause, None):
        said = Availability(False, "no driver; install one", known)
        absent = Recorder(available=said)
        with registered(absent), pytest.raises(plsh.BackendUnavailableError) as caught:
            function(subject, backend=absent.name)
        assert absent.name in str(caught.value)
        assert "no driver; install one" in str(caught.value)
        assert caught.value.__cause__ is known
        assert not absent.calls
        assert not absent.asked


@pytest.mark.requirement("BCK-5", "ERR-1", "ERR-4")
@pytest.mark.parametrize("version", ["0.9", "2.0", "11.0"])
def test_a_backend_of_another_major_is_unavailable(version, subject):
    stale = Recorder(spec_version=version)
    with registered(stale), pytest.raises(plsh.BackendUnavailableError, match=version) as caught:
        call(subject, backend=stale.name)
    assert "install" in str(caught.value)


@pytest.mark.requirement("BCK-5")
def test_a_backend_of_another_minor_runs(subject):
    recorder = Recorder(subject.backend, spec_version="1.99")
    with registered(recorder):
        call(subject, backend=recorder.name)
    assert len(recorder.calls) == 1


@pytest.mark.requirement("ERR-1", "ERR-4", "BCK-7")
@CALLS
def test_an_unsupported_call_says_why_and_who_can(function, subject):
    able = Recorder(subject.backend, name="plsh_able")
    narrow = Recorder(capabilities=Capabilities((subject.kind,), dtypes=("none",), gradients="vjp"))
    with registered(able, narrow), pytest.raises(plsh.UnsupportedByBackendError) as caught:
        function(subject, backend=narrow.name)
    for word in (narrow.name, widest(subject), "plsh_able", subject.name):
        assert word in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.requirement("ERR-1", "BCK-10", "CNF-3")
@pytest.mark.parametrize("wrong", ["an array alone", "lse of another shape", "out of lists"])
def test_a_faulty_backend_is_named(wrong, subject):
    class Faulty(Recorder):
        def attend(self, q, k, v, request):
            out, lse = subject.backend.attend(q, k, v, request)
            if wrong == "an array alone":
                return out
            return (out, lse[..., :1]) if wrong.startswith("lse") else ([0.0], lse)

    faulty = Faulty(capabilities=subject.capabilities)
    with registered(faulty), pytest.raises(TypeError, match=f"backend '{faulty.name}' must return"):
        call(subject, backend=faulty.name)


@pytest.mark.requirement("CNF-2")
def test_a_backend_that_is_not_there_is_not_tested(subject):
    with pytest.raises(plsh.UnknownBackendError):
        run("no_such_backend")
    absent = Recorder(available=Availability(False, "no device"))
    with registered(absent), pytest.raises(plsh.BackendUnavailableError, match="no device"):
        run(absent.name)
    with pytest.raises(ValueError, match="ATT-99"):
        run(subject.name, only=("ATT-99",))
    for options in ({"arrays": "stone"}, {"device": "moon:0"}):
        with pytest.raises(ValueError, match=r"stone|moon:0"):
            run(subject.name, **options)


@pytest.mark.requirement("CNF-2", "CNF-1")
def test_a_run_that_tests_nothing_fails(subject):
    def report(*statuses):
        rows = [Row(f"ATT-{i}", "", status) for i, status in enumerate(statuses)]
        return Report(subject.name, subject.kind, "", "quick", 1.0, {}, "", rows)

    assert report("pass", "not declared").ok
    assert not report().ok
    assert not report("not declared", "not declared").ok
    assert not report("pass", "fail").ok
    assert not report("expected failure").ok
    assert set(requirements()) >= {"ATT-1", "BCK-1", "CNF-1", "TST-4"}


@pytest.mark.requirement("CNF-2", "CNF-1", "BCK-7")
def test_what_is_not_declared_is_known_as_such(subject):
    declared = subject.capabilities
    narrow = Recorder(
        subject.backend,
        capabilities=Capabilities(declared.arrays, ("float32",), ("window",), None),
    )
    with registered(narrow):
        found = Subject(narrow.name)
    for need in ("dtype:float64", "method:lsh", "gradients", "vjp", "autograd", "transform:jit"):
        assert found.lacks(need) == need.replace(":", " ")
    assert found.lacks("dtype:float32") is found.lacks("method:window") is None
    for dtype in declared.dtypes:
        assert subject.lacks(f"dtype:{dtype}") is None or subject.kind != subject.name
    for method in declared.methods:
        assert subject.lacks(f"method:{method}") is None
