"""The command line ``plsh``: one module a command, and `main`, which never shows a traceback.

Exit status: 0 done, 1 a backend does not conform, 2 wrong usage or input, 130 interrupted, 141 the
reader of the output left.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from .. import __version__
from ..errors import BackendUnavailableError, UnknownBackendError, UnsupportedByBackendError
from .backends import add_command as add_backends
from .bench import add_command as add_bench
from .common import CliError, Parser
from .conformance import add_command as add_conformance
from .demo import add_command as add_demo
from .plan import add_command as add_plan
from .run import add_command as add_run
from .study import add_command as add_study

__all__ = ["main"]

_EPILOG = """\
examples:
  plsh demo                                     what each method costs and how far off it is
  plsh run --input qkv.npz --output out.npz     attention of your own arrays
  plsh plan --length 65536 --causal             what to expect before running
  plsh bench --length 8192                      what you would gain, beside what you have
  plsh backends                                 who can compute here
  plsh conformance numpy                        whether a backend does what the standard says
  plsh study structure                          whether the paper's claims hold
"""


class _TopParser(Parser):
    """The parser above the commands: whoever goes wrong here sees the list of commands."""

    def error(self, message: str) -> NoReturn:
        """Print the help before the error."""
        self.print_help(sys.stderr)
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name. None: those of the process.

    Returns
    -------
    int
        The exit status.

    Examples
    --------
    >>> main(["--version"])  # doctest: +ELLIPSIS
    plsh ...
    0
    """
    with _closed_streams_go_nowhere():
        return _run(argv)


@contextlib.contextmanager
def _closed_streams_go_nowhere() -> Iterator[None]:
    """Let what is for a stream that the caller closed go nowhere: Python has None in its place."""
    if sys.stdout is not None and sys.stderr is not None:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(sys.stdout or nowhere),
        contextlib.redirect_stderr(sys.stderr or nowhere),
    ):
        yield


def _run(argv: Sequence[str] | None) -> int:
    """Dispatch, and handle what no command can: a reader that left, a full disk, Ctrl-C."""
    try:
        status = _dispatch(argv)
        sys.stdout.flush()  # here, where a reader that left can still be handled
        return status
    except BrokenPipeError:
        _discard_output()
        return 141  # as the shell reports a program that SIGPIPE ended
    except OSError as error:  # a full disk behind the standard output
        _discard_output()
        _complain("plsh", error)
        return 2
    except KeyboardInterrupt:
        return 130


def _dispatch(argv: Sequence[str] | None) -> int:
    """Parse, run the command, and turn what the user can mend into one line and status 2."""
    with contextlib.suppress(AttributeError):  # some names cannot be written in every encoding
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        args, unknown = _parser().parse_known_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    if unknown:
        _complain(args.prog, f"unrecognized arguments: {' '.join(unknown)}")
        return 2
    status: int | None
    try:
        status = args.call(args)
    except (
        CliError,
        UnknownBackendError,
        BackendUnavailableError,
        UnsupportedByBackendError,
    ) as error:
        _complain(args.prog, error)
        return 2
    except MemoryError as error:
        _complain(args.prog, f"out of memory: {error}")
        return 2
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = _TopParser(
        prog="plsh",
        description="Attention with linear biases (ALiBi) in near-linear time, by Positional LSH "
        "or exactly.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"plsh {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    for add_command in (
        add_demo,
        add_run,
        add_backends,
        add_plan,
        add_bench,
        add_conformance,
        add_study,
    ):
        add_command(commands)
    return parser


def _complain(prog: str, error: object) -> None:
    """Write one line to the standard error."""
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)


def _discard_output() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's last flush is silent."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
