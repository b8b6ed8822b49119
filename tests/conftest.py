"""Settings of the whole suite."""

import contextlib
import os
import types

import hypothesis
import pytest
from namespaces import strict_flags

from plsh import registry
from plsh.cli import main

# Arrays are small here: threads would only wait for one another. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, and no database: a failure is reproduced by running again.
hypothesis.settings.register_profile("plsh", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("plsh")


@pytest.fixture
def strict():
    """array-api-strict in its strictest settings, restored afterwards."""
    with strict_flags():
        import array_api_strict

        yield array_api_strict


@pytest.fixture
def call(capsys):
    """Run the command line in this process; return status, standard output and error."""

    def run_main(*argv):
        status = main([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return types.SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return run_main


@contextlib.contextmanager
def _kept_registry():
    held = dict(registry._REGISTRY)
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(held)


@pytest.fixture(autouse=True, scope="module")
def _registered_by_modules():
    """Forget what a module registers: every other lists the backends that are installed."""
    with _kept_registry():
        yield


@pytest.fixture(autouse=True)
def _registered_by_tests(_registered_by_modules):
    """Forget what a test registers."""
    with _kept_registry():
        yield
