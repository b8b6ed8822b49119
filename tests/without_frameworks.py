"""A pytest plugin for environments that lack jax and array-api-strict, on purpose.

Only ``pytest -p without_frameworks`` loads it; everywhere else a missing library fails the test. A
test that fails because one of them is missing is skipped and counted.
"""

import importlib.util

import pytest

ABSENT = ("jax", "array_api_strict")
OPTIONAL = (*ABSENT, "triton")
"""Triton comes with some builds of torch."""


def pytest_configure(config):
    """Refuse to hide anything where the libraries are installed."""
    present = [name for name in ABSENT if importlib.util.find_spec(name) is not None]
    if present:
        raise pytest.UsageError(f"without_frameworks is for environments without {present}")


def pytest_ignore_collect(collection_path, config):
    """Leave out files that import one of them at the top."""
    if collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        lines = collection_path.read_text(encoding="utf-8").splitlines()
        needing = (*ABSENT, "plsh_jax._")  # the modules of the JAX kernel import jax
        tops = tuple(f"{word} {name}" for word in ("import", "from") for name in needing)
        return True if any(line.startswith(tops) for line in lines) else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Skip a test whose fixtures need one."""
    return (yield from _skip_if_absent())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that needs one."""
    return (yield from _skip_if_absent())


def _skip_if_absent():
    try:
        return (yield)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in OPTIONAL:
            pytest.skip(f"{name} asks for a newer NumPy")
        raise
