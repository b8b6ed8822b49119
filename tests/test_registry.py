"""The registry: who is found, who is picked, and what is said of those who can't."""

import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch

import plsh
from plsh import registry
from plsh.backend import SPEC_VERSION, AttentionOutput, Availability, Capabilities, Harness

Q = np.zeros((1, 2, 3, 4), dtype="float32")


class Fake:
    """A right backend, parts of which a test changes."""

    def __init__(self, name="fake", spec_version=SPEC_VERSION, **capabilities):
        self.name, self.spec_version = name, spec_version
        self.declared = Capabilities(**({"arrays": ("numpy",)} | capabilities))
        self.state, self.reason = Availability(True), None

    def availability(self):
        return self.state

    def capabilities(self):
        return self.declared

    def can_run(self, request):
        return self.reason

    def attend(self, q, k, v, request):
        return AttentionOutput(np.full_like(v, 7), np.zeros(q.shape[:-1], dtype="float32"))

    def harness(self):
        return Harness(np.asarray, np.asarray, lambda x: None)


class Dist:
    """As much of a distribution as an entry point shows."""

    def __init__(self, name):
        self.name = name


def point(name, load, owner="other", value=None):
    """Return an entry point whose loading calls `load`, and counts."""

    class Point:
        loads = 0

        def load(self):
            Point.loads += 1
            return load()

    made = Point()
    made.name, made.value, made.dist = name, value or f"{owner}:{name}", Dist(owner)
    made.module = "a_module_not_imported_yet"
    return made


def raising(error):
    def load():
        raise error

    return load


@pytest.fixture
def install(monkeypatch):
    """Return a function that makes the registry what given entry points would make it."""

    def replace(*points, keep=True):
        found = registry.discover(points)
        kept = dict(registry._REGISTRY) if keep else {}
        monkeypatch.setattr(registry, "_REGISTRY", kept | found)

    return replace


def row(name):
    (found,) = [b for b in plsh.backends() if b.name == name]
    return found


# --- one bad backend never breaks the others ---


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module named cuda"),
        OSError("libcudart.so.13: cannot open shared object file"),
        RuntimeError("driver too old"),
        AttributeError("half of a module"),
        SyntaxError("invalid syntax"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_backend_that_fails_to_load_is_listed_with_its_reason_and_breaks_no_other(install, error):
    """U119: ImportError is not the only way to fail."""
    install(point("broken", raising(error)))
    plsh.attention(Q, Q, Q, backend="reference")
    broken = row("broken")
    assert (broken.available, broken.capabilities) == (False, None)
    assert broken.reason == f"it fails to load: {error!r}"
    assert row("reference").available
    with pytest.raises(plsh.BackendUnavailableError, match="'broken' is registered and fails") as e:
        plsh.attention(Q, Q, Q, backend="broken")
    assert e.value.__cause__ is error
    assert isinstance(e.value, ImportError)


def test_failing_import_is_attempted_once_and_its_reason_remembered(install):
    """U118."""
    broken = point("broken", raising(OSError("no driver")))
    install(broken)
    for _ in range(3):
        with pytest.raises(plsh.BackendUnavailableError, match="no driver"):
            plsh.attention(Q, Q, Q, backend="broken")
        plsh.backends()
    assert broken.loads == 1


def test_third_party_backend_loads_on_first_use_and_once(install):
    lazy = point("fake", Fake)
    install(lazy)
    plsh.attention(Q, Q, Q)
    assert lazy.loads == 0
    assert plsh.attention(Q, Q, Q, backend="fake")[0, 0, 0, 0] == 7
    plsh.attention(Q, Q, Q, backend="fake")
    assert lazy.loads == 1


def test_first_party_backend_loads_with_the_package(install):
    """So that no call imports: torch.compile could not trace it."""
    ours = point("fake", Fake, owner="plsh")
    install(ours)
    assert ours.loads == 1


def test_first_party_backend_that_is_being_imported_waits_for_its_first_use(install):
    """It imports plsh, so plsh can't ask it for its object yet."""
    ours = point("fake", Fake, owner="plsh")
    ours.module = __name__
    install(ours)
    assert ours.loads == 0
    assert plsh.attention(Q, Q, Q, backend="fake")[0, 0, 0, 0] == 7


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            lambda: Fake("another"),
            "backend.name must equal its entry point's 'fake', got 'another'",
        ),
        (object, "backend.name must be an identifier, got None"),
        (lambda: Fake, "backend.name must be an identifier"),
    ],
)
def test_entry_point_to_something_else_is_a_failure_to_load(install, made, reason):
    install(point("fake", made))
    assert reason in row("fake").reason
    with pytest.raises(plsh.BackendUnavailableError):
        plsh.attention(Q, Q, Q, backend="fake")


def test_capabilities_that_raise_or_are_none_are_a_failure_to_load(install):
    for capabilities, reason in (
        (raising(RuntimeError("driver gone")), "driver gone"),
        (lambda: {"arrays": ("numpy",)}, "must declare a Capabilities"),
    ):
        bad = Fake()
        bad.capabilities = capabilities
        install(point("fake", lambda bad=bad: bad))
        assert reason in row("fake").reason
        with pytest.raises((RuntimeError, TypeError), match=reason):
            plsh.register_backend(bad)


def test_availability_that_raises_is_a_reason_not_a_crash(install):
    """The contract says never; a plug-in may still."""
    bad = Fake()
    bad.availability = raising(RuntimeError("driver gone"))
    install(point("fake", lambda: bad))
    assert not row("fake").available
    assert "driver gone" in row("fake").reason
    with pytest.raises(plsh.BackendUnavailableError, match="driver gone"):
        plsh.attention(Q, Q, Q, backend="fake")


# --- two of one name ---


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_with_one_name_the_same_wins_in_every_order_and_a_warning_says_so(order):
    """U119: by the owner's name, whatever order the file system gives."""
    pair = [point("twin", Fake, owner="zeta"), point("twin", Fake, owner="alpha")][::order]
    with pytest.warns(
        RuntimeWarning, match="'twin' is registered by alpha and by zeta; the first is used"
    ):
        found = registry.discover(pair)
    assert found["twin"].point.dist.name == "alpha"


def test_first_party_backend_wins_over_a_stranger_of_the_same_name():
    pair = [point("numpy", Fake, owner="aardvark"), point("numpy", Fake, owner="plsh")]
    with pytest.warns(RuntimeWarning, match="by plsh and by aardvark"):
        found = registry.discover(pair)
    assert found["numpy"].point.dist.name == "plsh"


def test_stale_duplicate_of_one_entry_point_is_silently_one():
    """An egg-info beside the installed metadata lists the same entry point twice."""
    pair = [point("fake", Fake, owner="plsh", value="m:B") for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(registry.discover(pair)) == ["fake"]
    assert sum(p.loads for p in pair) <= 2


def test_real_entry_points_load():
    entry = EntryPoint("reference", "plsh.reference:BACKEND", registry.GROUP)
    assert registry.discover([entry])["reference"].load() is plsh.reference.BACKEND


# --- unknown, unavailable, unsupported ---


def test_unknown_backend_lists_the_names():
    with pytest.raises(plsh.UnknownBackendError) as caught:
        plsh.attention(Q, Q, Q, backend="nunpy")
    names = ", ".join(sorted(registry._REGISTRY))
    assert str(caught.value) == f"no backend 'nunpy'; registered: {names}"
    assert "reference" in names
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", [None, "numpy"])
def test_empty_registry_says_that_the_package_is_not_installed(install, name):
    install(keep=False)
    assert plsh.backends() == []
    with pytest.raises(plsh.UnknownBackendError, match=r"none is registered.*pip install -e \."):
        plsh.attention(Q, Q, Q, backend=name)


def test_unavailable_backend_gives_its_own_reason(install):
    absent = Fake()
    absent.state = Availability(False, "torch is not installed; pip install 'plsh[torch]'")
    install(point("fake", lambda: absent))
    assert row("fake").reason == absent.state.reason
    assert row("fake").capabilities == absent.declared
    with pytest.raises(plsh.BackendUnavailableError) as caught:
        plsh.attention(Q, Q, Q, backend="fake")
    assert str(caught.value) == f"backend 'fake' is not available: {absent.state.reason}"


@pytest.mark.parametrize("version", ["2.0", "0.9", "11.0"])
def test_other_major_of_the_spec_is_unavailable_with_that_reason(install, version):
    install(point("fake", lambda: Fake(spec_version=version)))
    expected = f"it implements spec {version}, plsh has {SPEC_VERSION}"
    assert expected in row("fake").reason
    with pytest.raises(plsh.BackendUnavailableError, match=expected):
        plsh.attention(Q, Q, Q, backend="fake")


def test_other_minor_of_the_spec_is_available(install):
    install(point("fake", lambda: Fake(spec_version="1.9")))
    assert row("fake").available


@pytest.mark.parametrize(
    ("declared", "keywords", "reason"),
    [
        ({"dtypes": ("float64",)}, {}, "it has no dtype float32"),
        ({"methods": ("exact",)}, {"method": "lsh"}, "it has no method 'lsh'"),
        ({"max_head_dim": 2}, {}, "head dims go up to 2, got 4 and 4"),
    ],
)
def test_undeclared_capability_is_refused_with_reason_and_who_can(
    install, declared, keywords, reason
):
    install()
    plsh.register_backend(Fake(**declared))
    with pytest.raises(plsh.UnsupportedByBackendError) as caught:
        plsh.attention(Q, Q, Q, backend="fake", **keywords)
    message = str(caught.value)
    assert message.startswith(f"backend 'fake' can't run this: {reason}; able to: ")
    assert "reference" in message.partition("able to")[2]
    assert isinstance(caught.value, NotImplementedError)


def test_refusal_by_can_run_carries_its_reason(install):
    install(keep=False)
    picky = Fake()
    picky.reason = "its tiles hold 128 keys"
    plsh.register_backend(picky)
    with pytest.raises(plsh.UnsupportedByBackendError) as caught:
        plsh.attention(Q, Q, Q, backend="fake")
    assert str(caught.value) == (
        "backend 'fake' can't run this: its tiles hold 128 keys; no other loaded backend "
        "declares it either"
    )


def test_refusal_never_falls_back(install):
    """The default for NumPy arrays refuses; the reference would have run; nobody does."""
    install(keep=True)
    picky = Fake("numpy")
    picky.reason = "not today"
    registry._REGISTRY["numpy"] = registry._Entry(backend=picky)
    with pytest.raises(plsh.UnsupportedByBackendError, match="'numpy' can't run this: not today"):
        plsh.attention(Q, Q, Q)


# --- who runs ---


def test_default_backend_is_that_of_the_kind_of_arrays_else_the_reference(install):
    install(keep=False)
    plsh.register_backend(plsh.reference.BACKEND)
    plsh.register_backend(Fake("torch", arrays=("torch",)))
    assert registry.find(None, "torch").name == "torch"
    for kind in ("numpy", "jax", "cupy", "array-api"):
        assert registry.find(None, kind).name == "reference"


def test_named_backend_never_converts(install):
    """U085, U117."""
    install()
    plsh.register_backend(Fake())
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(TypeError, match=r"takes numpy arrays, got torch.*q\.detach\(\)\.cpu\(\)"):
        plsh.attention(x, x, x, backend="fake")


# --- register_backend, backends ---


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "no identifier"}, "backend.name must be an identifier, got 'no identifier'"),
        ({"name": 3}, "backend.name must be an identifier, got 3"),
        ({"spec_version": 1.0}, "backend 'fake' lacks spec_version of plsh.backend.Backend"),
        ({"attend": None}, "backend 'fake' lacks attend of plsh.backend.Backend"),
        ({"can_run": 1, "harness": 2}, "backend 'fake' lacks can_run, harness of"),
    ],
)
def test_incomplete_backend_is_refused_when_registered(install, changed, message):
    install()
    backend = Fake()
    vars(backend).update(changed)
    with pytest.raises(TypeError, match=message):
        plsh.register_backend(backend)
    assert "fake" not in registry._REGISTRY


def test_name_can_be_registered_once(install):
    install()
    first = Fake()
    plsh.register_backend(first)
    plsh.register_backend(first)  # the same object again changes nothing
    with pytest.raises(ValueError, match="backend 'fake' is registered already"):
        plsh.register_backend(Fake())
    with pytest.raises(ValueError, match="backend 'reference' is registered already"):
        plsh.register_backend(Fake("reference"))


def test_backends_lists_rows_by_name(install):
    install(point("zz", Fake), point("aa", raising(OSError("x"))))
    rows = plsh.backends()
    assert [b.name for b in rows] == sorted(registry._REGISTRY)
    assert all(b.available == (b.reason == "") for b in rows)


FRESH = """
import sys
import plsh
rows = plsh.backends()
assert any(b.available for b in rows)
print(sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "jax", "cupy"}))
"""


def test_listing_backends_imports_no_framework():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


# --- no state of the user's data (U118) ---


def test_arrays_are_not_cached():
    """U118: the same objects with other contents give another answer."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 9, 4)) for _ in range(3))
    before = plsh.attention(q, k, v)
    k *= 2
    after = plsh.attention(q, k, v)
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(after, plsh.attention(q, k.copy(), v))
