"""``plsh bench``: what a user would gain with their own n, heads, dims and dtype."""

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import bench as measure
from .. import registry
from ..methods import Method
from ..partition import MAX_POSITION
from ..testing import double_precision
from . import chart
from .common import CliError, add_method, describe, integer, method_of, progress, write, write_table
from .common import add_command as add

_EPILOG = f"""\
q, k, v are normal, batch 1, ALiBi slopes. Times are medians of warm calls, plsh and peers in turn
in one process, on as many threads as this process may use processors; ratio is the peer's time
over plsh's; error is the relative Frobenius error on sampled rows against exact ALiBi in float64.
Break-even is the length from which on plsh is faster, interpolated between measured lengths.

peers, for --against:
{chr(10).join(f"  {peer.name:<12} {peer.summary}" for peer in measure.PEERS.values())}

example:
  plsh bench --length 8192
  plsh bench --backend torch --length 1024,4096,16384 --heads 32 --dims 128 --dtype bfloat16 \\
             --against sdpa-mask,flex-window --training --png gain.png
"""

_SHORTEST = 256
"""First of the lengths measured on the way to a single one."""
_COLUMNS = ("length", "work", "what", "milliseconds", "fastest", "slowest", "error", "ratio")


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    summary = "time plsh beside what you would use instead, with errors and the break-even length"
    parser = add(commands, "bench", bench, summary, _EPILOG)
    parser.add_argument("--backend", metavar="NAME", default="numpy", help="default numpy")
    parser.add_argument(
        "--length",
        type=_lengths,
        default=(8192,),
        metavar="N[,N...]",
        help=f"lengths; of a single one also the powers of two from {_SHORTEST} on (default 8192)",
    )
    parser.add_argument("--heads", type=integer(1), default=8, metavar="H", help="default 8")
    parser.add_argument("--dims", type=integer(1), default=64, metavar="D", help="default 64")
    parser.add_argument("--dtype", choices=tuple(measure.DTYPES), default="float32")
    add_method(parser, "window")
    parser.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=True, help="default --causal"
    )
    parser.add_argument("--device", metavar="NAME", help="of the backend's arrays, such as cuda:0")
    parser.add_argument(
        "--against",
        type=_peers,
        metavar="PEER[,PEER...]",
        help="default: those of the backend's library that need not compile for each length",
    )
    parser.add_argument(
        "--training", action="store_true", help="also time forward and backward together"
    )
    parser.add_argument(
        "--repeat", type=integer(1), default=5, metavar="R", help="samples of a time (default 5)"
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="leave a peer out where a call is predicted to take more seconds (default 10)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, with the machine's facts")
    form.add_argument("--csv", action="store_true", help="print CSV")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="also draw time against length (needs matplotlib)"
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="report each length on stderr (default: if it is a terminal)",
    )


# --- argument types -------------------------------------------------------------------------------


def _lengths(text: str) -> tuple[int, ...]:
    parse = integer(1, MAX_POSITION)
    return tuple(sorted({parse(part) for part in text.split(",")}))


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in measure.PEERS:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(measure.PEERS)}, got {name!r}")
    return names


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds > 0, got {text!r}")
    return value


# --- the command ----------------------------------------------------------------------------------


def bench(args: argparse.Namespace) -> None:
    """Run the command."""
    method = method_of(args)
    pyplot = None if args.png is None else chart.load(args.png)
    conflict = measure.thread_conflict()
    if conflict is not None:
        raise CliError(conflict)
    lengths = args.length
    if len(lengths) == 1:
        lengths = (*_ladder(lengths[0]), lengths[0])
    device = _check_backend(args)
    cases = [
        measure.Case(n, args.heads, args.dims, args.dtype, args.causal, device) for n in lengths
    ]
    _check_memory(cases[-1])
    peers = _chosen(args, cases[0])
    show = sys.stderr.isatty() if args.progress is None else args.progress
    with progress(args.prog, "length", len(cases), show) as step:
        try:
            rows = measure.compare(
                args.backend,
                method,
                cases,
                peers,
                training=args.training,
                repeat=args.repeat,
                limit=args.limit,
                step=step,
            )
        except (TypeError, ValueError) as error:
            raise CliError(error) from None
    problem = _problem(args, method, cases[0])
    if args.json:
        write(json.dumps(_report(problem, rows, peers), indent=2, allow_nan=False))
    elif args.csv:
        write(_csv(rows).rstrip("\n"))
    else:
        _show(problem, rows, peers)
    if pyplot is not None:
        chart.draw(pyplot, args.png, _title(problem), rows)


def _ladder(longest: int) -> Iterator[int]:
    """Give the powers of two below the longest length."""
    n = _SHORTEST
    while n < longest:
        yield n
        n *= 2


def _check_backend(args: argparse.Namespace) -> str:
    """Check what the backend can do with the options; return the device to measure on."""
    backend = registry.find(args.backend, "numpy")
    can = backend.capabilities()
    if args.dtype not in can.dtypes:
        raise CliError(
            f"--dtype {args.dtype} is none that backend {args.backend!r} takes; "
            f"it takes {', '.join(can.dtypes)}"
        )
    if args.method not in can.methods:
        raise CliError(
            f"--method {args.method} is none that backend {args.backend!r} has; "
            f"it has {', '.join(can.methods)}"
        )
    harness = backend.harness()
    if args.training and (can.gradients or "autograd") == "autograd" and harness.vjp is None:
        raise CliError(
            f"--training needs gradients, and backend {args.backend!r} has none for "
            f"{can.arrays[0]} arrays; leave it out, or name another --backend"
        )
    if args.device is not None and args.device not in harness.devices:
        raise CliError(
            f"--device must be one of {', '.join(harness.devices)} for backend "
            f"{args.backend!r}, got {args.device!r}"
        )
    try:
        with double_precision(can.arrays[0]):
            harness.asarray([0.0], dtype=args.dtype)
    except ImportError as error:
        raise CliError(f"--dtype {args.dtype} needs a package: {error}; install it") from None
    return args.device or harness.devices[0]


def _check_memory(case: measure.Case) -> None:
    """Refuse inputs that would not fit: they are drawn in float64, and kept twice."""
    need = case.heads * case.length * case.head_dim * 8 * 6
    free = measure.free_bytes()
    if need > free:
        raise CliError(
            f"--length {case.length} with --heads {case.heads} and --dims {case.head_dim} needs "
            f"about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; make one smaller"
        )


def _chosen(args: argparse.Namespace, case: measure.Case) -> tuple[str, ...]:
    """Return the peers asked for, which must be able to run, or those that can by default."""
    if args.against is not None:
        for name in args.against:
            reason = measure.PEERS[name].reason(case)
            if reason is not None:
                raise CliError(f"--against {name}: {reason}; leave it out of --against")
        chosen: tuple[str, ...] = args.against
        return chosen
    arrays = registry.find(args.backend, "numpy").capabilities().arrays[0]
    kind = {"cupy": "torch", "array-api": "numpy"}.get(arrays, arrays)
    return tuple(
        peer.name
        for peer in measure.PEERS.values()
        if peer.kind == kind and not peer.compiled and peer.reason(case) is None
    )


# --- output ---------------------------------------------------------------------------------------


def _problem(args: argparse.Namespace, method: Method, case: measure.Case) -> dict[str, Any]:
    return {
        "backend": args.backend,
        "method": describe(method),
        "heads": case.heads,
        "head_dim": case.head_dim,
        "dtype": case.dtype,
        "causal": case.causal,
        "device": case.device,
        "repeat": args.repeat,
    }


def _series(rows: Sequence[measure.Measurement], name: str, work: str) -> list[measure.Measurement]:
    """Return the measured rows of one implementation."""
    return [row for row in rows if (row.name, row.work) == (name, work) and row.timing is not None]


def _break_evens(
    rows: Sequence[measure.Measurement], peers: Sequence[str]
) -> dict[tuple[str, str], measure.BreakEven]:
    """Return the break-even with each peer and work that was measured."""
    found: dict[tuple[str, str], measure.BreakEven] = {}
    for work in dict.fromkeys(row.work for row in rows):
        for name in peers:
            series = _series(rows, name, work)
            ratios = [(row.length, row.ratio) for row in series if row.ratio is not None]
            if ratios:
                found[work, name] = measure.break_even(*zip(*ratios, strict=True))
    return found


def _growth(rows: Sequence[measure.Measurement], work: str) -> float | None:
    """Return the exponent of plsh's time, over the longer half of the lengths."""
    series = [(row.length, row.timing.seconds) for row in _series(rows, "plsh", work) if row.timing]
    upper = series[len(series) // 2 :] if len(series) > 3 else series
    return measure.growth(*zip(*upper, strict=True)) if len(upper) > 1 else None


def _cells(row: measure.Measurement) -> dict[str, Any]:
    """Return a row as numbers: seconds, None where there are none."""
    timing = row.timing or (None, None, None)
    return {
        "length": row.length,
        "work": row.work,
        "what": row.name,
        "seconds": timing[0],
        "fastest": timing[1],
        "slowest": timing[2],
        "error": row.error,
        "ratio": row.ratio,
        "note": row.note,
    }


def _report(
    problem: dict[str, Any], rows: Sequence[measure.Measurement], peers: Sequence[str]
) -> dict[str, Any]:
    works = dict.fromkeys(row.work for row in rows)
    return {
        "machine": measure.facts(),
        **problem,
        "measurements": [_cells(row) for row in rows],
        "break_even": [
            {"work": work, "peer": name, "length": found.length, "words": found.words}
            for (work, name), found in _break_evens(rows, peers).items()
        ],
        "growth": {work: _growth(rows, work) for work in works},
    }


def _csv(rows: Sequence[measure.Measurement]) -> str:
    text = io.StringIO()
    cells = [_cells(row) for row in rows]
    writer = csv.DictWriter(text, fieldnames=list(cells[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return text.getvalue()


def _show(
    problem: dict[str, Any], rows: Sequence[measure.Measurement], peers: Sequence[str]
) -> None:
    """Print the table."""
    write(_title(problem))
    write("; ".join(f"{name} {value}" for name, value in measure.facts().items()))
    write()
    table = []
    left_out: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.timing is None:
            left_out.setdefault((row.name, row.work, row.note), []).append(str(row.length))
            continue
        times = (f"{seconds * 1e3:.3g}" for seconds in row.timing)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.append((str(row.length), row.work, row.name, *times, f"{row.error:.1e}", ratio))
    write_table(_COLUMNS, table)
    write()
    for (name, work, note), lengths in left_out.items():
        write(f"left out: {name}, {work}, at n = {', '.join(lengths)}: {note}")
    for (work, name), found in _break_evens(rows, peers).items():
        write(f"break-even with {name}, {work}: {found.words}")
    for work in dict.fromkeys(row.work for row in rows):
        exponent = _growth(rows, work)
        if exponent is not None:
            write(f"plsh's {work} grows as n^{exponent:.2f} over the longer half of the lengths")


def _title(problem: dict[str, Any]) -> str:
    return (
        f"plsh {problem['method']}, backend {problem['backend']} on {problem['device']}: "
        f"{problem['heads']} heads of dim {problem['head_dim']}, {problem['dtype']}, "
        f"{'causal' if problem['causal'] else 'not causal'}, median of {problem['repeat']}"
    )
