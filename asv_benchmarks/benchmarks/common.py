"""Parameters and set-up that the benchmarks share.

Parameters are fixed, never read from what is installed: a backend that is absent here shows as
n/a, and the history of the others goes on.
"""

import os
import pathlib
import subprocess

import plsh
from plsh.bench import Case, ours

BACKENDS = ("numpy", "torch", "jax", "cupy", "reference")
METHODS = {"lsh": plsh.PositionalLSH(), "window": plsh.Window(), "exact": plsh.Exact()}
"""The defaults of each: 16 stratified samples, tol 1e-6, no limit."""
APPROXIMATIONS = ("lsh", "window")
DTYPES = ("float32", "bfloat16")
WORKS = ("forward", "training")
SHORT, LONG = 1024, 8192


def check_commit():
    """Refuse to measure another commit than asv says; asv sets ASV_COMMIT where it installs."""
    wanted = os.environ.get("ASV_COMMIT")
    if wanted is None:
        return
    tree = pathlib.Path(plsh.__file__).resolve().parents[1]
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.stdout.strip() != wanted:
        raise RuntimeError(f"{tree} is at {done.stdout or done.stderr!r}, asv says {wanted}")


check_commit()


def available(backend):
    """Whether a backend can be used here."""
    return any(info.name == backend and info.available for info in plsh.backends())


def need(condition):
    """Show n/a unless a condition holds."""
    if not condition:
        raise NotImplementedError


def runner(backend, method, case):
    """Return plsh's runner; n/a where the backend is absent or hasn't the work."""
    need(available(backend))
    # The reference is written to be read: dense, and longer than a benchmark may take.
    need(backend != "reference" or case.length <= SHORT)
    return ours(backend, METHODS[method], case)


class Backends:
    """Benchmarks by backend and method, on the default case of a length."""

    param_names = ("backend", "method")
    params = (BACKENDS, tuple(METHODS))
    length = SHORT

    def setup(self, backend, method):
        """Make the runner, and make it warm."""
        self.case = Case(self.length)
        self.runner = runner(backend, method, self.case)
        self.runner.forward()
