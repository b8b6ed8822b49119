"""What the commands share: the parser, argument types, tables, progress, and calling a backend."""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .. import compat, registry
from ..attention import attention
from ..backend import AttentionOutput
from ..methods import Exact, Method, PositionalLSH, Window

NDArray = npt.NDArray[Any]


class CliError(Exception):
    """What the user can mend: shown as one line, with exit status 2."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which takes no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Exit with one line and status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_command(
    commands: Any,
    name: str,
    call: Callable[[argparse.Namespace], int | None],
    summary: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Add the parser of a command that runs `call`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", epilog=epilog
    )
    parser.set_defaults(call=call, prog=f"plsh {name}")
    return parser


# --- argument types: a message of ArgumentTypeError follows "argument --name: " -------------------


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return the type of an integer in ``[low, high]``."""

    def parse(text: str) -> int:
        rule = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        with contextlib.suppress(ValueError):
            value = int(text)
            if low <= value and (high is None or value <= high):
                return value
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")

    return parse


def integers(text: str) -> int | tuple[int, ...]:
    """Parse ``3`` as an int and ``3,0,5`` as a tuple."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be an integer, or several with commas between them, got {text!r}"
        ) from None
    return values if "," in text else values[0]


def numbers(text: str) -> tuple[float, ...]:
    """Parse ``0.5,0.25`` as a tuple of floats."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be numbers with commas between them, got {text!r}"
        ) from None


def add_method(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--method`` and the options of each method, which `method_of` reads."""
    parser.add_argument(
        "--method",
        choices=("exact", "window", "lsh"),
        default=default,
        help=f"default {default}",
    )
    lsh = parser.add_argument_group("of --method lsh")
    lsh.add_argument("--samples", type=integer(1), metavar="S", help="partitions (default 16)")
    lsh.add_argument(
        "--sampler", choices=("stratified", "iid"), help="how they are drawn (default stratified)"
    )
    lsh.add_argument("--seed", type=integers, metavar="N[,N...]", help="default 0")
    window = parser.add_argument_group("of --method window (one of them)")
    window.add_argument(
        "--width", type=integers, metavar="N[,N...]", help="largest distance, or one per head"
    )
    window.add_argument(
        "--tol", type=float, help="largest weight left out, by slope (default 1e-6)"
    )


def method_of(args: argparse.Namespace) -> Method:
    """Build the method; an option of another method is refused, not ignored."""
    options = {
        "lsh": {"samples": args.samples, "sampler": args.sampler, "seed": args.seed},
        "window": {"width": args.width, "tol": args.tol},
        "exact": {},
    }
    for owner, values in options.items():
        for name, value in values.items():
            if value is not None and owner != args.method:
                raise CliError(f"--{name} needs --method {owner}, got --method {args.method}")
    given = {name: value for name, value in options[args.method].items() if value is not None}
    if len(given) == 2 and args.method == "window":
        raise CliError("give --width or --tol, not both")
    kind = {"lsh": PositionalLSH, "window": Window, "exact": Exact}[args.method]
    try:
        method: Method = kind(**given)
    except (TypeError, ValueError) as error:
        raise CliError(error) from None
    return method


# --- output ---------------------------------------------------------------------------------------


def check_output(option: str, path: Path) -> None:
    """Find out early that a file can't be written."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise CliError(f"{option} {path} exists and is not a regular file")
    if not target.parent.is_dir():
        raise CliError(f"{option} {path}: there is no directory {target.parent}")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise CliError(f"{option} {path}: the directory {target.parent} is not writable")
    if target.exists() and not os.access(target, os.W_OK):
        raise CliError(f"{option} {path} exists and is not writable")


def write(line: str = "") -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


def write_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, columns as wide as their longest cell."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        write("  ".join(cells).rstrip())


def describe(method: Method) -> str:
    """Name a method and its options in a few words."""
    if isinstance(method, PositionalLSH):
        return f"lsh samples={method.samples} {method.sampler} seed={method.seed}"
    if isinstance(method, Window):
        if method.width is not None:
            return f"window width={method.width}"
        return f"window tol={method.tol:g}"
    return "exact" if isinstance(method, Exact) else "partitions"


@contextlib.contextmanager
def progress(prog: str, what: str, total: int, show: bool) -> Iterator[Callable[[], None]]:
    """Give a function to call after each of `total` steps; it reports on the standard error.

    With tqdm (extra ``cli``) as a bar, else as plain lines, about 20 of them if there are more
    steps.
    """
    if not show:
        yield lambda: None
        return
    try:
        bar_type = importlib.import_module("tqdm").tqdm
    except ImportError:
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            if done % max(1, total // 20) == 0 or done == total:
                print(f"{prog}: {what} {done}/{total}", file=sys.stderr, flush=True)

        yield step
        return
    with bar_type(total=total, desc=f"{prog}: {what}", file=sys.stderr) as bar:
        yield lambda: bar.update(1)


# --- calling a backend ----------------------------------------------------------------------------


class Caller:
    """Calls `plsh.attention` on NumPy arrays by a backend of any array library.

    Files hold no framework's arrays, so moving them to the backend's kind is the command's work.

    Parameters
    ----------
    backend : str or None
        A registered name; None is the one for NumPy arrays.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        As for `plsh.attention`.
    """

    def __init__(self, backend: str | None) -> None:
        self._backend = registry.find(backend, "numpy")
        self.name = self._backend.name
        self.takes_numpy = "numpy" in self._backend.capabilities().arrays

    def __call__(self, q: NDArray, k: NDArray, v: NDArray, **options: Any) -> AttentionOutput:
        """Return (out, lse) as NumPy arrays; `options` are those of `plsh.attention`."""
        if self.takes_numpy:
            result = attention(q, k, v, return_lse=True, backend=self.name, **options)
            return AttentionOutput(*result)
        q, k, v = (self.move(x, x.dtype.name) for x in (q, k, v))
        segments = options.get("segment_ids")
        if segments is not None:
            options["segment_ids"] = tuple(self.move(ids, ids.dtype.name) for ids in segments)
        result = attention(q, k, v, return_lse=True, backend=self.name, **options)
        return AttentionOutput(*(self._backend.harness().to_numpy(x) for x in result))

    def move(self, x: NDArray, dtype: str) -> Any:
        """Return an array of the backend's kind, of the dtype of that name."""
        moved = self._backend.harness().asarray(x, dtype=dtype)
        if compat.dtype_name(moved) != dtype:
            raise CliError(
                f"backend {self.name!r} turns {dtype} into {compat.dtype_name(moved)} here; "
                "give it arrays of that dtype"
            )
        return moved

    def synchronize(self, x: Any) -> None:
        """Wait until an array of the backend's kind is computed."""
        self._backend.harness().synchronize(x)


def relative_error(result: NDArray, expected: NDArray) -> float:
    """Return the relative Frobenius error over a whole array, in float64."""
    difference = result.astype(np.float64) - expected
    return float(np.linalg.norm(difference.ravel()) / np.linalg.norm(expected.ravel()))
