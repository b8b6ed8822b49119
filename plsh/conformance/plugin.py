"""The pytest plugin of the suite: which tests run, and what came of each requirement.

A test names its requirements by ``@pytest.mark.requirement("ATT-1", …)``, what the backend must
declare by ``needs`` (see `Subject.lacks`), that it is long by ``full``, and that a backend may
decline the call (BCK-14) by ``may_refuse``. Parameters named ``dtype``, ``method`` and ``call``
say what they need by themselves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest

from ..errors import UnsupportedByBackendError
from ..testing import Measured, double_precision
from .calls import Call, method_name
from .requirements import requirements
from .subject import Subject

__all__ = ["Outcome", "SuitePlugin"]


@dataclass
class Outcome:
    """What came of one test.

    Attributes
    ----------
    test : str
    ids : tuple of str
        The requirements that it tests.
    status : {"pass", "fail", "not declared"}
    message : str
        Why it failed, or what is not declared.
    measured : list of Measured
        Errors and tolerances.
    """

    test: str
    ids: tuple[str, ...]
    status: str
    message: str = ""
    measured: list[Measured] = field(default_factory=list)


class SuitePlugin:
    """Selects the tests of the suite for a subject, and keeps their outcomes."""

    def __init__(
        self,
        subject: Subject,
        only: tuple[str, ...],
        until_failed: bool,
        progress: Callable[[int, int], None],
    ) -> None:
        self.subject, self.only, self.progress = subject, only, progress
        self._hopeful = set(only) if until_failed else set()
        self.stopped = False
        """Whether every requirement in `only` failed, which was all that was asked."""
        self.outcomes: list[Outcome] = []
        self.broken: list[str] = []
        """Faults of the suite itself: tests that cannot be collected, or are not marked."""
        self._done = self._total = 0

    @pytest.fixture(name="subject")
    def under_test(self) -> Iterator[Subject]:
        """Return the backend under test."""
        with double_precision(self.subject.kind):
            yield self.subject

    def pytest_configure(self, config: pytest.Config) -> None:
        """Declare the marks, and how hypothesis looks for examples."""
        for line in (
            "requirement(*ids): the requirements of the standard that a test decides",
            "needs(*names): what the backend must declare",
            "full: runs with --full only",
            "may_refuse: the backend may decline the call",
        ):
            config.addinivalue_line("markers", line)
        hypothesis.settings.register_profile(
            "plsh-conformance",
            derandomize=not self.subject.full,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        hypothesis.settings.load_profile("plsh-conformance")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep errors of collection."""
        if report.failed:
            self.broken.append(f"{report.nodeid}: {report.longreprtext}")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Leave the tests that are asked for and whose needs are declared."""
        tested: set[str] = set()
        chosen = []
        for item in items:
            ids = sum((mark.args for mark in item.iter_markers("requirement")), ())
            tested.update(ids)
            if not ids or not set(ids) <= requirements().keys():
                self.broken.append(f"{item.nodeid}: it tests {ids or 'no requirement'}")
                continue
            item.user_properties.append(("ids", ids))
            if self.only and not set(self.only) & set(ids):
                continue
            if item.get_closest_marker("full") and not self.subject.full:
                continue
            lacking = next(filter(None, map(self.subject.lacks, _needs(item))), None)
            if lacking is None:
                chosen.append(item)
            else:
                name = _test_name(item.nodeid)
                self.outcomes.append(Outcome(name, ids, "not declared", lacking))
        untested = requirements().keys() - tested
        if untested and not self.only:
            self.broken.append(f"no test for {', '.join(sorted(untested))}")
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        self._total = len(items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: pytest.CallInfo[None]) -> Any:
        """Keep the outcome of a test, and the errors that it measured."""
        report = yield
        if call.when == "setup":
            self.subject.measured.clear()
        if call.when == "call" or report.failed:
            self._keep(item, call, report)
        return report

    def _keep(self, item: Any, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        status, message = "pass", ""
        error = None if call.excinfo is None else call.excinfo.value
        if isinstance(error, UnsupportedByBackendError) and _may_refuse(item):
            status, message = "not declared", str(error)
        elif not report.passed:
            status, message = "fail", _short(report.longreprtext)
        self.outcomes.append(
            Outcome(
                _test_name(item.nodeid),
                dict(item.user_properties)["ids"],
                status,
                message,
                list(self.subject.measured),
            )
        )
        if status == "fail" and self._hopeful:
            self._hopeful -= set(self.outcomes[-1].ids)
            self.stopped = not self._hopeful
            item.session.shouldstop = self.stopped and "every requirement asked for has failed"
        if call.when == "call":
            self._done += 1
            self.progress(self._done, self._total)


def _needs(item: Any) -> Iterator[str]:
    for mark in item.iter_markers("needs"):
        yield from mark.args
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for name, value in parameters.items():
        if isinstance(value, Call):
            yield from value.needs
        elif name == "dtype":
            yield f"dtype:{value}"
        elif name == "method":
            yield f"method:{method_name(value)}"


def _may_refuse(item: Any) -> bool:
    if item.get_closest_marker("may_refuse"):
        return True
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(value, Call) and value.may_be_refused for value in parameters)


def _test_name(nodeid: str) -> str:
    """Return "module::test[parameters]" of a node id."""
    return nodeid.rpartition("/")[2].replace(".py::", "::")


def _short(text: str) -> str:
    """Return the lines of a failure that say what went wrong."""
    errors = [line[2:].strip() for line in text.splitlines() if line.startswith("E ")]
    return "\n".join(errors[:6]) if errors else "\n".join(text.splitlines()[-6:])
