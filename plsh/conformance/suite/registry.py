"""How backends are found, registered and listed, and what an import brings."""

import functools
import json
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

import plsh
from plsh import attention, registry
from plsh.backend import SPEC_VERSION, Availability, Capabilities
from plsh.conformance.doubles import (
    Recorder,
    problem,
    registered,
    widest,
)


@pytest.mark.requirement("BCK-2", "BCK-1")
def test_register_backend_checks_what_it_is_given(subject):
    with registered():
        for part in ("availability", "capabilities", "can_run", "attend", "harness", "vjp"):
            lacking = Recorder()
            setattr(lacking, part, None)
            with pytest.raises(TypeError, match=part):
                plsh.register_backend(lacking)
        for name in (None, "", "two words", "my-backend", 3):
            with pytest.raises(TypeError, match=r"name must be an identifier"):
                plsh.register_backend(Recorder(name=name))
        with pytest.raises(TypeError, match="spec_version"):
            plsh.register_backend(Recorder(spec_version=1.0))
        with pytest.raises(TypeError, match=r"backend\.name"):
            plsh.register_backend(object())
        one = Recorder()
        plsh.register_backend(one)
        plsh.register_backend(one)  # twice does nothing
        for taken in (one.name, subject.name):
            with pytest.raises(ValueError, match=rf"'{taken}' is registered already"):
                plsh.register_backend(Recorder(name=taken))
        assert subject.backend is registry.find(subject.name, "")
    assert one.name not in [row.name for row in plsh.backends()]


@pytest.mark.requirement("BCK-3", "BCK-6", "BCK-5")
def test_backends_are_listed_with_what_they_say(subject):
    said = Availability(False, "no device; buy one", OSError("no driver"))
    with registered(
        Recorder(name="plsh_absent", available=said),
        Recorder(name="plsh_next", spec_version="2.0"),
        Recorder(name="plsh_minor", spec_version="1.99"),
    ):
        rows = plsh.backends()
        found = {row.name: row for row in rows}
        assert [row.name for row in rows] == sorted(found)
    own = found[subject.name]
    assert (own.available, own.reason) == (True, "")
    assert own.capabilities == subject.capabilities
    assert (found["plsh_absent"].available, found["plsh_absent"].reason) == (False, said.reason)
    assert found["plsh_absent"].capabilities is not None
    assert not found["plsh_next"].available
    assert "2.0" in found["plsh_next"].reason
    assert SPEC_VERSION in found["plsh_next"].reason
    assert found["plsh_minor"].available


def point(name, load, owner, module="a_module_that_nobody_imports"):
    dist = SimpleNamespace(name=owner)
    return SimpleNamespace(
        name=name, value=f"{module}:{owner}", module=module, dist=dist, load=load
    )


@pytest.mark.requirement("BCK-4", "BCK-3", "ERR-3")
def test_a_backend_that_fails_to_load_breaks_no_other(subject, monkeypatch):
    failure = OSError("libdevice.so: cannot open shared object file")

    def broken():
        raise failure

    good, loads = Recorder(name="plsh_late"), []

    def late():
        loads.append(1)
        return good

    held = dict(registry._REGISTRY)
    points = [point("plsh_broken", broken, "z"), point("plsh_late", late, "z")]
    points.append(point("plsh_other", lambda: good, "z"))  # not the name of the entry point
    monkeypatch.setattr(registry, "_REGISTRY", held | registry.discover(points))
    assert not loads, "those of others load on first use"
    found = {row.name: row for row in plsh.backends()}
    for name in ("plsh_broken", "plsh_other"):
        assert (found[name].available, found[name].capabilities) == (False, None)
    assert "libdevice.so" in found["plsh_broken"].reason
    assert found["plsh_late"].available
    assert found[subject.name].available
    assert len(loads) == 1
    q, k, v, *_ = problem(subject, widest(subject))
    with pytest.raises(plsh.BackendUnavailableError, match=r"libdevice\.so") as caught:
        attention(q, k, v, backend="plsh_broken")
    assert caught.value.__cause__ is failure


@pytest.mark.requirement("BCK-4")
@pytest.mark.parametrize("order", [1, -1])
def test_of_two_entry_points_with_one_name_the_winner_is_fixed(order, subject):
    backend = Recorder(name="plsh_twin")
    for owners, winner in ((("alpha", "zeta"), "alpha"), (("aardvark", "plsh"), "plsh")):
        points = [point("plsh_twin", lambda: backend, owner) for owner in owners][::order]
        with pytest.warns(RuntimeWarning, match="plsh_twin"):
            found = registry.discover(points)
        assert found["plsh_twin"].point.dist.name == winner
    same = [point("plsh_twin", lambda: backend, "alpha") for _ in range(2)]
    assert list(registry.discover(same)) == ["plsh_twin"]  # no warning


@pytest.mark.requirement("BCK-6", "BCK-3")
def test_availability_that_raises_is_a_reason(subject):
    class Rude(Recorder):
        def availability(self):
            raise RuntimeError("the driver is asleep")

    class Vague(Recorder):
        def availability(self):
            return True

    q, k, v, *_ = problem(subject, widest(subject))
    with registered(Rude(name="plsh_rude"), Vague(name="plsh_vague")):
        found = {row.name: row for row in plsh.backends()}
        with pytest.raises(plsh.BackendUnavailableError) as caught:
            attention(q, k, v, backend="plsh_rude")
    assert not found["plsh_rude"].available
    assert "asleep" in found["plsh_rude"].reason
    assert not found["plsh_vague"].available
    assert "Availability" in found["plsh_vague"].reason
    assert isinstance(caught.value.__cause__, RuntimeError)


FRAMEWORKS = ("torch", "jax", "jaxlib", "cupy", "cupyx")

FRESH = f"""
import json, sys
frameworks = {FRAMEWORKS}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in frameworks:
            asked.append(name)
            raise ImportError(f"{{name}} is not here")
asked = []
sys.meta_path.insert(0, Absent())
import plsh
points = [p for p in plsh.registry.entry_points(group="plsh.backends") if p.dist is not None]
own = [p.module for p in points if p.dist.name == "plsh"]
others = [p.module for p in points if p.dist.name != "plsh"]
result = {{"unloaded": [m for m in own if m not in sys.modules],
           "loaded": [m for m in others if m in sys.modules and m not in own],
           "asked by import": list(asked), "numpy": "numpy" in sys.modules}}
rows = plsh.backends()
result["asked by listing"] = list(asked)
result["rows"] = {{row.name: row.capabilities is not None for row in rows}}
print(json.dumps(result))
"""


@functools.cache
def fresh_process():
    """Import plsh and list the backends in a process that has no framework."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FRESH], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.requirement("BCK-16", "BCK-3", "BCK-4")
def test_importing_and_listing_bring_no_framework(subject):
    found = fresh_process()
    assert found["asked by import"] == []
    assert found["unloaded"] == []
    assert found["loaded"] == []
    assert found["rows"]["reference"]


@pytest.mark.requirement("BCK-1", "BCK-16")
def test_a_backend_declares_without_its_framework(subject):
    """Where it is installed by an entry point; others are in this process as they are."""
    assert isinstance(subject.backend.capabilities(), Capabilities)
    installed = [p.name for p in entry_points(group=registry.GROUP)]
    assert fresh_process()["rows"].get(subject.name, subject.name not in installed)
