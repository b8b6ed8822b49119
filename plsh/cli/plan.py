"""``plsh plan``: what each method would cost and how far off it may be, before running it."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import theory
from ..alibi import slopes_of
from ..methods import (
    DEFAULT_TOL,
    Exact,
    Method,
    PositionalLSH,
    Window,
    decay_length,
    method_name,
    resolve,
)
from ..partition import MAX_POSITION
from ..validation import check_slopes
from ..weights import StepWeight
from . import cost
from .calibrate import Shape, Timer, fit
from .common import Caller, CliError, describe, integer, integers, numbers, write, write_table
from .common import add_command as add

_EPILOG = """\
Pairs are of a query and a key, over all heads of one batch row. Positional LSH has two counts:
scored block by block, once for each sample that joins the pair, as the paper's algorithm does; and
distinct, which a single pass over the band must score. Break-even is the length from which a
method scores fewer pairs than dense attention. Seconds are predicted for one batch row, from short
calls of each method timed now (about two seconds in all), by the tokens and the distinct pairs.

example:
  plsh plan --length 65536 --heads 8 --samples 16 --causal
  plsh plan --length 32768 --causal --measure
"""

_DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_DRAWN = 1 << 27
"""Blocks are counted exactly up to this many labels (heads * samples * length), seconds of work."""
_EXACT_QUERIES = 256
"""Queries of the exact calls that are timed."""
_MEASURED_SECONDS, _MEASURED_BYTES = 60, 1 << 31
"""Calls predicted to take longer, or whose inputs and output are larger, are not made."""


class Row(NamedTuple):
    """What a method costs; lists have one number a head.

    Attributes
    ----------
    name : str
        exact, window or lsh.
    method : str
        The same with its options.
    bandwidth : list of int
        Largest distance with weight > 0.
    pairs : int or float
        Scored, all heads; a float is an expectation over seeds.
    distinct_pairs : int or None
        With weight > 0, all heads; None where only the expectation of `pairs` is known.
    flops : float
        Of the two matrix products over `pairs`.
    label_bytes : int
        Memory beyond inputs, output and tiles.
    break_even : int or None
        First length at which `pairs` is below dense; None if there is none.
    timed_lengths : tuple of int or None
        Lengths of the calls from which `predicted_seconds` comes; None if nothing was timed.
    predicted_seconds : float or None
        Of one call.
    measured_seconds : float or None
        Of the call itself; None if it was not made.
    """

    name: str
    method: str
    bandwidth: list[int]
    pairs: float
    distinct_pairs: int | None
    flops: float
    label_bytes: int
    break_even: int | None
    timed_lengths: tuple[int, int] | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    summary = "plan a call: bandwidth, memory, arithmetic, error bound, break-even with dense"
    parser = add(commands, "plan", plan, summary, _EPILOG)
    parser.add_argument("--length", type=integer(1, MAX_POSITION), required=True, metavar="N")
    parser.add_argument("--heads", type=integer(1), metavar="H", help="default 8")
    parser.add_argument(
        "--slopes", type=numbers, metavar="M[,M...]", help="one per head (default: ALiBi's)"
    )
    parser.add_argument("--head-dim", type=integer(1), default=64, metavar="D", help="default 64")
    parser.add_argument("--value-dim", type=integer(0), metavar="DV", help="default: as --head-dim")
    parser.add_argument("--samples", type=integer(1), default=16, metavar="S", help="default 16")
    parser.add_argument("--sampler", choices=("stratified", "iid"), default="stratified")
    parser.add_argument("--seed", type=integers, default=0, metavar="N[,N...]", help="default 0")
    parser.add_argument(
        "--tol", type=float, default=DEFAULT_TOL, help="of the window (default 1e-6)"
    )
    parser.add_argument(
        "--delta", type=float, default=0.01, help="odds that a bound fails (default 0.01)"
    )
    parser.add_argument("--causal", action="store_true", help="hide keys after the query")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="float32")
    parser.add_argument("--backend", metavar="NAME", help="to time; default: that of NumPy arrays")
    timing = parser.add_mutually_exclusive_group()
    timing.add_argument(
        "--measure",
        action="store_true",
        help="also make the calls, if a minute and 2 GiB of inputs and output suffice",
    )
    timing.add_argument(
        "--no-calibrate", action="store_true", help="time nothing, predict no seconds"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with a number per head")


def plan(args: argparse.Namespace) -> None:
    """Run the command."""
    try:
        slopes = _slopes(args)
        methods: tuple[Method, ...] = (
            Exact(),
            Window(tol=args.tol),
            PositionalLSH(args.samples, sampler=args.sampler, seed=args.seed),
        )
        bounds = _bounds(slopes, args)
        timer = None
        if not args.no_calibrate:
            shape = Shape(slopes, args.head_dim, _value_dim(args), args.dtype, args.causal)
            timer = Timer(Caller(args.backend), shape)
        rows = [_row(method, slopes, args, timer) for method in methods]
    except (TypeError, ValueError) as error:
        raise CliError(error) from None
    report = {
        "length": args.length,
        "slopes": list(slopes),
        "head_dim": args.head_dim,
        "value_dim": _value_dim(args),
        "dtype": args.dtype,
        "causal": args.causal,
        "memory": _memory(len(slopes), args),
        "backend": None if timer is None else timer.backend,
        "methods": [row._asdict() for row in rows],
        "bounds": bounds,
    }
    if args.json:
        write(json.dumps(report, indent=2, allow_nan=False))
    else:
        _show(report, rows, args)


def _slopes(args: argparse.Namespace) -> tuple[float, ...]:
    if args.slopes is None:
        return slopes_of(8 if args.heads is None else args.heads)
    heads = len(args.slopes) if args.heads is None else args.heads
    checked: tuple[float, ...] = check_slopes(args.slopes, "numpy", None, heads)
    return checked


def _value_dim(args: argparse.Namespace) -> int:
    return int(args.head_dim if args.value_dim is None else args.value_dim)


def _memory(heads: int, args: argparse.Namespace) -> dict[str, int]:
    """Return bytes of the inputs and of the output, of one batch row with as many key heads."""
    token = heads * args.length * _DTYPES[args.dtype]
    dim, value_dim = args.head_dim, _value_dim(args)
    return {"inputs": token * (2 * dim + value_dim), "output": token * value_dim}


def _row(
    method: Method, slopes: tuple[float, ...], args: argparse.Namespace, timer: Timer | None
) -> Row:
    n, causal, heads = args.length, args.causal, len(slopes)
    weight = resolve(method, slopes, slopes, heads).weight

    def counted(length: int) -> int:
        return sum(cost.distinct_pairs(weight, length, causal))

    work: Callable[[int], float] = counted
    pairs: float
    if isinstance(weight, StepWeight):
        sigmas = [decay_length(slope) for slope in slopes]

        def expected(length: int) -> float:
            return sum(
                cost.expected_lsh_pairs(length, args.samples, sigma, causal) for sigma in sigmas
            )

        if heads * args.samples * n <= _DRAWN:
            counts = cost.lsh_pairs(weight, n, causal)
            pairs, distinct = sum(c.scored for c in counts), sum(c.distinct for c in counts)
        else:
            work, pairs, distinct = expected, expected(n), None
        labels = 4 * heads * args.samples * n
        even = cost.break_even(expected, heads, causal)
    else:
        pairs = distinct = counted(n)
        labels, even = 0, cost.break_even(counted, heads, causal)
    row = Row(
        method_name(method),
        describe(method),
        [min(width, n - 1) for width in weight.bandwidths],
        pairs,
        distinct,
        cost.flops(pairs, args.head_dim, _value_dim(args)),
        labels,
        even,
    )
    return row if timer is None else _with_seconds(row, method, work, timer, args)


def _with_seconds(
    row: Row,
    method: Method,
    work: Callable[[int], float],
    timer: Timer,
    args: argparse.Namespace,
) -> Row:
    """Add the seconds that are predicted and, if asked for and affordable, measured."""
    n = args.length

    def queries(length: int) -> int:
        # What exact costs far out shows only there, where all queries would take too long.
        return min(length, _EXACT_QUERIES) if isinstance(method, Exact) else length

    def pairs(length: int) -> float:
        last = queries(length)
        if last == length:
            return work(length)
        seen = last * (length - last) + cost.dense_pairs(last, args.causal)
        return len(row.bandwidth) * seen

    line = fit(lambda length: timer(method, length, queries(length)), queries, pairs, n)
    predicted, measured = line.seconds(n, work(n)), None
    memory = sum(_memory(len(row.bandwidth), args).values())
    if args.measure and predicted <= _MEASURED_SECONDS and memory <= _MEASURED_BYTES:
        measured = timer(method, n, n)
    return row._replace(
        timed_lengths=line.lengths, predicted_seconds=predicted, measured_seconds=measured
    )


def _bounds(slopes: Sequence[float], args: argparse.Namespace) -> dict[str, Any]:
    """Return the error bounds of the bias matrix, a number per head; slope 0 has no error."""
    n, s = args.length, args.samples
    decays = [slope for slope in slopes if decay_length(slope) < math.inf]
    sigma = [decay_length(slope) for slope in decays]
    mean = [theory.spectral_error_bound(n, s, x) for x in sigma]
    tail = [theory.spectral_error_bound(n, s, x, args.delta) for x in sigma]
    # ||L*||_2 for long sequences: the sum of exp(-|d| / sigma) over all integers d.
    norm = [1 / math.tanh(0.5 * slope) for slope in decays]
    left_out = [2 * args.tol / math.expm1(slope) if slope < 700 else 0.0 for slope in decays]
    return {
        "slopes": decays,
        "spectral_norm": norm,
        "window_max_weight_left_out": args.tol,
        "window_spectral_error": left_out,
        "lsh_spectral_error_expected": mean,
        "lsh_spectral_error_at_delta": tail,
        "lsh_weight_std": 0.5 / math.sqrt(s),
        "lsh_block_size_at_delta": [theory.block_size_bound(x, s, args.delta) for x in sigma],
        "delta": args.delta,
    }


def _show(report: dict[str, Any], rows: Sequence[Row], args: argparse.Namespace) -> None:
    slopes, memory, bounds = report["slopes"], report["memory"], report["bounds"]
    dense = len(slopes) * cost.dense_pairs(args.length, args.causal)
    write(
        f"length {args.length}, {len(slopes)} heads of slopes {min(slopes):g} to {max(slopes):g}, "
        f"head dims {args.head_dim} and {_value_dim(args)}, {args.dtype}"
        f"{', causal' if args.causal else ''}"
    )
    write(
        f"memory: inputs {_size(memory['inputs'])}, output {_size(memory['output'])}; "
        "beyond them labels, as below, and tiles of fixed size"
    )
    write()
    columns: dict[str, Callable[[Row], str]] = {
        "method": lambda row: row.method,
        "bandwidth min / median / max": lambda row: (
            f"{min(row.bandwidth)} / {int(np.median(row.bandwidth))} / {max(row.bandwidth)}"
        ),
        "pairs scored": lambda row: (
            f"{'' if isinstance(row.pairs, int) else 'about '}{row.pairs:.3e}"
        ),
        "distinct": lambda row: _number(row.distinct_pairs, ".3e"),
        "of dense": lambda row: f"{row.pairs / dense:.2%}",
        "flops": lambda row: f"{row.flops:.2e}",
        "labels": lambda row: _size(row.label_bytes),
        "break-even n": lambda row: "never" if row.break_even is None else str(row.break_even),
    }
    if report["backend"] is not None:
        columns["seconds (predicted)"] = lambda row: _number(row.predicted_seconds, ".3g")
    if args.measure:
        columns["measured"] = lambda row: _number(row.measured_seconds, ".3g")
        columns["ratio"] = lambda row: _number(_ratio(row), ".2f")
    write_table(tuple(columns), [tuple(cell(row) for cell in columns.values()) for row in rows])
    if report["backend"] is not None:
        timed = (f"{row.name} at {' and '.join(map(str, row.timed_lengths or ()))}" for row in rows)
        write(f"seconds: one batch row, backend {report['backend']}, from short calls timed now:")
        write(f"{', '.join(timed)} tokens (of exact, the last {_EXACT_QUERIES} queries)")
    write()
    write(
        "error against exact ALiBi; of the bias matrix: spectral error over coth(slope / 2), which"
    )
    write("its norm tends to as the length grows, for the worst head, before a causal mask")
    write("  exact   rounding only")
    write(f"  window  every weight left out is below {args.tol:g}; {_window_words(bounds)}")
    write("          the output's error depends on the logits too: once a call has run,")
    write("          plsh.theory.truncation_error_bound proves a bound for each of its rows")
    write(f"  lsh     {_lsh_words(bounds)}")
    write(
        f"          one weight is off by a standard deviation of at most "
        f"{bounds['lsh_weight_std']:.3g} (iid; stratified draws less)"
    )


def _ratio(row: Row) -> float | None:
    """Return measured over predicted seconds."""
    if row.measured_seconds is None or row.predicted_seconds is None:
        return None
    return row.measured_seconds / row.predicted_seconds


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _window_words(bounds: dict[str, Any]) -> str:
    share = [e / norm for e, norm in _pairs(bounds, "window_spectral_error")]
    if not share:
        return "slope 0 leaves nothing out"
    return f"bias matrix off by less than {max(share):.2g}"


def _lsh_words(bounds: dict[str, Any]) -> str:
    mean = [e / norm for e, norm in _pairs(bounds, "lsh_spectral_error_expected")]
    tail = [e / norm for e, norm in _pairs(bounds, "lsh_spectral_error_at_delta")]
    if not mean:
        return "slope 0 has no error"
    return (
        f"bias matrix off by {max(mean):.2g} expected (iid; constant 1, as in the paper's code),\n"
        f"          by more than {max(tail):.2g} with probability below {bounds['delta']:g}; "
        "measured, 4 to 10 times less than the first"
    )


def _pairs(bounds: dict[str, Any], name: str) -> list[tuple[float, float]]:
    return list(zip(bounds[name], bounds["spectral_norm"], strict=True))


def _size(count: float) -> str:
    """Write a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"
