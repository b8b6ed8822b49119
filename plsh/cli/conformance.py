"""``plsh conformance``: whether a backend meets every numbered requirement of the standard."""

import argparse
import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .common import CliError, check_output, progress, write
from .common import add_command as add

_EPILOG = """\
exit status: 0 the backend conforms, 1 it does not, 2 nothing was tested (no such backend, it cannot
be used here, wrong usage, or pytest and hypothesis are missing: pip install "plsh[conformance]").

A file of expected failures holds one requirement a line, below a comment with the reason:
  # The kernel rounds P to 8 bits.
  NUM-7

examples:
  plsh conformance numpy
  plsh conformance reference --arrays torch --full --report reference.md
  plsh conformance cupy --device cuda:0 --only NUM-7 --only ATT-21
  plsh conformance --mutants spec/mutants.md
"""


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    summary = "test a backend against every numbered requirement of the standard"
    parser = add(commands, "conformance", conformance, summary, _EPILOG)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a registered backend")
    parser.add_argument(
        "--arrays",
        choices=("numpy", "torch", "jax", "cupy", "array-api"),
        help="kind of arrays, for a backend that takes several (default: its own)",
    )
    parser.add_argument("--device", metavar="D", help="such as cuda:0 (default: the first)")
    parser.add_argument(
        "--full", action="store_true", help="the long tests too, and examples drawn anew"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="ID", help="this requirement; repeatable"
    )
    parser.add_argument(
        "--expected-failures",
        type=Path,
        metavar="FILE",
        help="what fails, with the reasons",
    )
    parser.add_argument(
        "--report",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the report to FILE.json or FILE.md; repeatable",
    )
    parser.add_argument(
        "--mutants",
        type=Path,
        metavar="FILE",
        help="instead of a backend, test the suite: every faulty backend must fail where it "
        "should; writes the table to FILE",
    )


def conformance(args: argparse.Namespace) -> int:
    """Run the command; return the exit status."""
    if (args.name is None) == (args.mutants is None):
        raise CliError("give the NAME of a backend, or --mutants FILE")
    for path in args.report:
        if path.suffix not in (".json", ".md"):
            raise CliError(f"argument --report: a report ends in .json or .md, got {str(path)!r}")
        check_output("--report", path)
    if args.mutants is not None:
        check_output("--mutants", args.mutants)
    runner = _load("runner")
    with contextlib.ExitStack() as stack:
        steps = _Steps(stack, args.name or "mutants")
        if args.mutants is not None:
            return _mutants(args.mutants, steps)
        expected = _expected_failures(args.expected_failures)
        try:
            report = runner.run(
                args.name,
                arrays=args.arrays,
                device=args.device,
                full=args.full,
                only=args.only,
                expected=expected,
                progress=steps,
            )
        except (ValueError, runner.SuiteError) as error:
            raise CliError(str(error)) from error
    for path in args.report:
        with _writing(path):
            report.write(path)
    for line in report.lines():
        write(line)
    if not (report.ids("pass") or report.ids("fail") or report.ids("expected failure")):
        return 2
    return 0 if report.ok else 1


def _mutants(path: Path, steps: Callable[[int, int], None]) -> int:
    """Test the suite by faulty backends, and write the table."""
    mutants = _load("mutants")
    rows = mutants.run_mutants(steps)
    with _writing(path):
        path.write_text(mutants.table(rows), encoding="utf-8")
    survivors = [row for row in rows if row.survives]
    for row in survivors:
        write(f"{row.mutant.name} survives {', '.join(row.survives)}: {row.mutant.fault}")
    write(f"{len(rows) - len(survivors)} of {len(rows)} mutants fail every requirement they should")
    return 1 if survivors else 0


def _load(module: str) -> Any:
    """Import a module of the suite, which needs pytest and hypothesis."""
    try:
        return importlib.import_module(f"plsh.conformance.{module}")
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "hypothesis"):
            raise
        raise CliError(f'it needs {error.name}: pip install "plsh[conformance]"') from error


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CliError(f"can't write {str(path)!r}: {error.strerror}") from error


def _expected_failures(path: Path | None) -> list[str]:
    """Read requirements, each with a reason above it."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"can't read {str(path)!r}: {error}") from error
    found: list[str] = []
    reason = False
    for number, line in enumerate(map(str.strip, lines), 1):
        if line.startswith("#"):
            reason = True
        elif line:
            if not reason:
                raise CliError(f"{path}:{number}: {line!r} has no reason; write one above it (# …)")
            found.append(line)
        else:
            reason = False
    return found


class _Steps:
    """Shows how many tests are done, from when their number is known."""

    def __init__(self, stack: contextlib.ExitStack, what: str) -> None:
        self._stack, self._what = stack, what
        self._step: Callable[[], None] | None = None

    def __call__(self, done: int, total: int) -> None:
        if self._step is None:
            shown = progress("plsh conformance", self._what, total, True)
            self._step = self._stack.enter_context(shown)
        self._step()
