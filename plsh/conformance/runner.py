"""Runs the suite on a backend and makes the report. Needs pytest and hypothesis."""

import contextlib
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .. import __version__
from ..backend import SPEC_VERSION
from . import report as reports
from .plugin import Outcome, SuitePlugin
from .report import Report, Row
from .requirements import requirements
from .subject import Subject

__all__ = ["SuiteError", "run"]

SUITE = Path(__file__).parent / "suite"


class SuiteError(Exception):
    """The suite could not run as it should: a fault of the suite or of its installation."""


def run(
    name: str,
    *,
    arrays: str | None = None,
    device: str | None = None,
    full: bool = False,
    only: Sequence[str] = (),
    expected: Sequence[str] = (),
    until_failed: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Test a registered backend against every numbered requirement of the standard.

    Parameters
    ----------
    name : str
        Of a registered backend.
    arrays : str, optional
        Kind of arrays, for a backend that takes several. None: those of the backend's harness.
    device : str, optional
        One of the harness's devices. None: the first.
    full : bool, default False
        Run the long tests, too, and draw new examples.
    only : sequence of str, default ()
        The requirements to test. Empty: all.
    expected : sequence of str, default ()
        Requirements that are expected to fail.
    until_failed : bool, default False
        Stop as soon as each requirement in `only` has failed a test.
    progress : callable, optional
        Called with the numbers of tests done and in all.

    Returns
    -------
    Report

    Raises
    ------
    ValueError
        A requirement in `only` or `expected` does not exist; no such arrays or device.
    UnknownBackendError, BackendUnavailableError
        The backend cannot be used here.
    SuiteError
        The suite itself is broken.

    Notes
    -----
    Spec: CNF-1, CNF-2.
    """
    for requirement in (*only, *expected):
        if requirement not in requirements():
            raise ValueError(f"no requirement {requirement!r}; they are named as ATT-1, see spec/")
    subject = Subject(name, arrays, device, full)
    plugin = SuitePlugin(subject, tuple(only), until_failed, progress)
    begin = time.perf_counter()
    with _own_settings():
        code = pytest.main([*_modules(only), *_ARGUMENTS], plugins=[plugin])
    seconds = time.perf_counter() - begin
    if plugin.broken:
        raise SuiteError("the suite is broken: " + "; ".join(plugin.broken))
    if code == pytest.ExitCode.INTERRUPTED and not plugin.stopped:
        raise KeyboardInterrupt
    if code not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
        pytest.ExitCode.INTERRUPTED,
    ):
        raise SuiteError(f"pytest ended with {code!r}")
    rows = [row for row in _rows(plugin.outcomes, expected) if not only or row.id in only]
    return Report(
        name,
        subject.kind,
        device or "",
        "selected" if only else ("full" if full else "quick"),
        seconds,
        {
            "spec": SPEC_VERSION,
            "plsh": __version__,
            **reports.versions(("numpy", "torch", "jax", "cupy", "array_api_strict")),
        },
        reports.machine(),
        rows,
    )


def _modules(only: Sequence[str]) -> list[str]:
    """Return the modules of the suite that name a requirement in `only`; all if it is empty."""
    if not only:
        return [str(SUITE)]
    named = re.compile("|".join(rf"\b{requirement}\b" for requirement in only))
    return [str(p) for p in sorted(SUITE.glob("*.py")) if named.search(p.read_text("utf-8"))]


_ARGUMENTS = [
    f"--rootdir={SUITE}",
    f"-c={os.devnull}",
    "--noconftest",
    "--import-mode=importlib",
    "-pno:cacheprovider",
    "-pno:terminal",
    "-pno:warnings",
    "-opython_files=*.py",
    "--strict-markers",
]


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Keep the caller's settings and plugins of pytest out."""
    held = {name: os.environ.pop(name, None) for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    held["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        for name, value in held.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _rows(outcomes: Sequence[Outcome], expected: Sequence[str]) -> Iterator[Row]:
    by_id: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        for requirement in outcome.ids:
            by_id[requirement].append(outcome)
    for requirement, title in requirements().items():
        own = by_id[requirement]
        failed = [o for o in own if o.status == "fail"]
        ran = [o for o in own if o.status != "not declared"]
        status = "fail" if failed else ("pass" if ran else "not declared")
        if requirement in expected:
            status = {"fail": "expected failure", "pass": "fail"}.get(status, status)
        row = Row(requirement, title, status, len(ran), _unique(failed), worst=_worst(own))
        if status == "not declared":
            row.undeclared = list(dict.fromkeys(o.message for o in own))
        if requirement in expected and status == "fail":
            row.failures.append(("expected failures", "it is listed as a failure, and passes"))
        yield row


def _unique(failed: Sequence[Outcome]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((o.test, o.message) for o in failed))


def _worst(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    found = [(m, o.test) for o in outcomes for m in o.measured if m.tolerance > 0]
    if not found:
        return None
    m, test = max(found, key=lambda x: x[0].error / x[0].tolerance)
    return {"array": m.name, "error": m.error, "tolerance": m.tolerance, "test": test}
