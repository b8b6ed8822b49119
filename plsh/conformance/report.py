"""What a run of the suite says: a row for each requirement, and a verdict."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Report", "Row"]


@dataclass
class Row:
    """One requirement.

    Attributes
    ----------
    id, title : str
    status : {"pass", "fail", "not declared", "expected failure"}
    tests : int
        Tests that ran.
    failures : list of (str, str)
        Tests that failed, and why.
    undeclared : list of str
        What the backend does not declare, of the tests that did not run.
    worst : dict or None
        Of the floating comparisons the one nearest to its tolerance: array, error, tolerance, test.
    """

    id: str
    title: str
    status: str
    tests: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    undeclared: list[str] = field(default_factory=list)
    worst: dict[str, Any] | None = None


@dataclass
class Report:
    """The outcome of a run.

    Attributes
    ----------
    backend, arrays, device : str
        What was tested, on which kind of arrays; device "" is the default.
    mode : {"quick", "full", "selected"}
    seconds : float
    versions : dict
        Of the standard, plsh, Python, NumPy, and the library of the arrays.
    machine : str
    rows : list of Row
    """

    backend: str
    arrays: str
    device: str
    mode: str
    seconds: float
    versions: dict[str, str]
    machine: str
    rows: list[Row]

    def ids(self, status: str) -> list[str]:
        """Return the requirements with a status."""
        return [row.id for row in self.rows if row.status == status]

    @property
    def ok(self) -> bool:
        """Whether something was tested and nothing failed."""
        return bool(self.ids("pass")) and not self.ids("fail")

    @property
    def verdict(self) -> str:
        """One line."""
        counts = {s: len(self.ids(s)) for s in ("pass", "fail", "expected failure", "not declared")}
        said = ", ".join(f"{n} {s}" for s, n in counts.items() if n or s in ("pass", "fail"))
        if self.ok:
            word = "conforms" if self.mode != "selected" else "passes the selected requirements"
            if counts["expected failure"]:
                word = "fails only as expected"
        else:
            word = "does not conform" if counts["fail"] else "was not tested"
        return (
            f"{self.backend} on {self.arrays} arrays {word}: {said} "
            f"({self.mode}, {self.seconds:.0f} s)"
        )

    def lines(self) -> Iterator[str]:
        """Yield the table, the failures and the verdict, for a terminal."""
        width = max((len(row.status) for row in self.rows), default=0)
        for row in self.rows:
            more = f"  {_error(row)}" if row.worst else ""
            if row.status == "not declared":
                more = f"  ({', '.join(row.undeclared)})"
            yield f"{row.id:<7} {row.status:<{width}}  {row.title}{more}"
        for row in self.rows:
            for test, message in row.failures:
                yield ""
                yield f"{row.id}: {test}"
                yield from (f"    {line}" for line in message.splitlines())
        yield ""
        yield self.verdict

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        return json.dumps({**asdict(self), "ok": self.ok, "verdict": self.verdict}, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Return the report as a Markdown document."""
        lines = [
            f"# Conformance of `{self.backend}`",
            "",
            f"{self.verdict}.",
            "",
            "; ".join(f"{name} {version}" for name, version in self.versions.items())
            + f"; {self.machine}; device {self.device or 'default'}.",
            "",
            "Errors are against the float64 oracle, beside the measured tolerance (TST-4); shown "
            "is the comparison that came nearest to it.",
            "",
            "| requirement | what it says | status | tests | error / tolerance |",
            "|---|---|---|---|---|",
        ]
        for row in self.rows:
            why = f" ({', '.join(row.undeclared)})" if row.status == "not declared" else ""
            lines.append(
                f"| {row.id} | {row.title} | {row.status}{why} | {row.tests} | {_error(row)} |"
            )
        for row in self.rows:
            for test, message in row.failures:
                lines += ["", f"**{row.id}** `{test}`", "", "```", message, "```"]
        return "\n".join(lines) + "\n"

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to a path that ends in .json, Markdown to one in .md; else ValueError."""
        target = Path(path)
        forms = {".json": self.to_json, ".md": self.to_markdown}
        if target.suffix not in forms:
            raise ValueError(f"a report ends in .json or .md, got {str(path)!r}")
        target.write_text(forms[target.suffix](), encoding="utf-8")


def _error(row: Row) -> str:
    worst = row.worst
    if worst is None:
        return ""
    return f"{worst['error']:.1e} / {worst['tolerance']:.1e} ({worst['array']})"


def machine() -> str:
    """Describe the machine in a few words."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"


def versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the loaded modules."""
    found = {"Python": platform.python_version()}
    for name in modules:
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found
