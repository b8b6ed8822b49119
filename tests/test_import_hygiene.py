"""``import plsh`` in fresh processes: it brings no framework, is quick, and needs none."""

import importlib.metadata
import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "jax", "jaxlib", "cupy", "array_api_strict", "scipy", "mpmath")


def run(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
    )


LOADED = f"""
import sys
{{imports}}
print(sorted(set({FRAMEWORKS}) & {{{{m.partition(".")[0] for m in sys.modules}}}}))
"""


def test_import_brings_no_framework():
    done = run(LOADED.format(imports="import plsh"))
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_import_check_can_fail():
    done = run(LOADED.format(imports="import plsh, mpmath"))
    assert done.stdout == "['mpmath']\n", done.stdout + done.stderr


def test_import_takes_under_half_a_second_beyond_numpy():
    """The best of three: the machine may be busy, the import may not be slow."""
    code = (
        "import numpy, time; numpy.random.Philox; t = time.perf_counter(); import plsh; "
        "print(time.perf_counter() - t)"
    )
    taken = []
    for _ in range(3):
        taken.append(float(run(code).stdout))
        if taken[-1] < 0.5:
            return
    raise AssertionError(f"import plsh took {taken} seconds")


# A finder that refuses the frameworks, put before all others: they might as well not be installed.
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "jax", "jaxlib", "cupy"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""

WITHOUT = (
    BLOCKED
    + """
import numpy as np, plsh
from plsh.testing import oracle
rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(1, 2, 30, 4)) for _ in range(3))
for method in ("exact", "window", "lsh"):
    out = plsh.attention(q, k, v, method=method, causal=True, backend="reference")
    assert out.shape == q.shape and np.isfinite(out).all()
assert any(b.name == "reference" and b.available for b in plsh.backends())
print("ran")
"""
)


def test_reference_runs_where_no_framework_is_installed():
    """U128."""
    done = run(WITHOUT)
    assert done.stdout == "ran\n", done.stderr


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_block_can_fail(framework):
    done = run(BLOCKED + f"import {framework}")
    assert f"ImportError: {framework} is blocked" in done.stderr


def test_backend_may_be_imported_before_plsh():
    points = importlib.metadata.entry_points(group="plsh.backends")
    modules = sorted(p.module for p in points if p.dist is not None and p.dist.name == "plsh")
    assert "plsh.reference" in modules
    for module in modules:
        done = run(f"import {module}, plsh; print(all(b.capabilities for b in plsh.backends()))")
        assert done.stdout == "True\n", f"{module}: {done.stdout}{done.stderr}"


def test_import_starts_no_thread_and_changes_no_global_state():
    code = """
import threading, warnings, random, os
import numpy as np
before = (threading.active_count(), len(warnings.filters), random.getstate(), dict(os.environ),
          np.geterr(), np.random.get_state()[1].tolist())
import plsh
x = np.zeros((1, 1, 4, 2))
plsh.attention(x, x, x)
after = (threading.active_count(), len(warnings.filters), random.getstate(), dict(os.environ),
         np.geterr(), np.random.get_state()[1].tolist())
print(before == after)
"""
    done = run(code)
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_import_needs_no_docstrings_and_no_asserts():
    """Under ``python -OO`` both are gone."""
    done = run(
        "import numpy as np, plsh; x = np.ones((1, 1, 4, 2)); plsh.attention(x, x, x)", "-OO"
    )
    assert done.returncode == 0, done.stderr
