"""What the tests that plant faults share: a mutant, how it is compiled, and how its test is called.

A mutant is a package's modules with one piece of source replaced, compiled afresh; each file of
mutants says how they are put in place of the real ones.
"""

import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest


class Mutant(NamedTuple):
    """One fault: `old` text of a module or file becomes `new`, and `test` fails with `error`."""

    name: str
    module: str
    old: str
    new: str
    test: str
    arguments: dict[str, Any] = {}
    error: Any = AssertionError

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def changed(self, source: str) -> str:
        """Return the source with the fault."""
        count = source.count(self.old)
        assert count == 1, f"{self.old!r} is {count} times in {self.module}, not once"
        return source.replace(self.old, self.new)


def new_package(monkeypatch: pytest.MonkeyPatch, name: str, path: Sequence[str] = ()) -> None:
    """Make an empty package, for the time of a test; `path` is where it finds further modules."""
    package = types.ModuleType(name)
    package.__path__ = list(path)
    monkeypatch.setitem(sys.modules, name, package)


def compile_afresh(
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    sources: Mapping[str, str],
    mutant: Mutant | None = None,
    importing: Mapping[str, str] = {},
) -> dict[str, types.ModuleType]:
    """Compile modules as those of a package, each after those that it imports.

    Relative imports are from that package, or for some modules from another, named by `importing`.
    """
    made = {}
    for name, source in sources.items():
        module = made[name] = types.ModuleType(f"{package}.{name}")
        module.__package__ = importing.get(name, package)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if mutant is not None and mutant.module == name:
            source = mutant.changed(source)
        exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return made


def call(
    test: Callable[..., None], arguments: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call a test in place."""
    if "monkeypatch" in inspect.signature(test).parameters:
        arguments = {**arguments, "monkeypatch": monkeypatch}
    test(**arguments)


def controls(mutants: Sequence[Mutant]) -> list[Any]:
    """Return a mutant for every test and arguments: without a fault, each test must pass."""
    found = {f"{m.test}-{sorted(m.arguments.items(), key=str)}": m for m in mutants}
    return [pytest.param(mutant, id=mutant.test) for mutant in found.values()]
