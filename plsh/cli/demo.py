"""``plsh demo``: what each method costs and how far off it is, on real text."""

import argparse
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..alibi import slopes_of
from ..attention import attention
from ..methods import Exact, Method, PositionalLSH, Window, resolve
from ..partition import MAX_POSITION
from ..weights import Weight
from . import cost
from .common import Caller, describe, integer, relative_error, write
from .common import add_command as add
from .text import embed, load_text

NDArray = npt.NDArray[Any]

_EPILOG = """\
q, k, v come from the text by a fixed byte n-gram embedding (plsh.cli.text.embed); causal, ALiBi
slopes, float32. Pairs are those with weight > 0, over all heads; seconds and peak memory (beyond
the inputs, as tracemalloc sees it) are of one call each, seconds with placing the blocks; the
error is the relative Frobenius error of the whole output.

example:
  plsh demo --text book.txt --length 32768
"""

EXACT_LENGTH = 2048
"""Where exact attention, and its float64 twin as the yardstick, take no time to speak of."""
LENGTH = 16384
"""Where exact attention is left out."""
HEADS, HEAD_DIM = 8, 64
SAMPLES = (4, 16, 64)
COMPARED = 16
"""Samples of the lsh row whose bandwidth one window is given, and another its number of pairs."""
_CHECKED = 64
"""Queries on which the yardstick of the far table is itself compared with exact."""

_COLUMNS = "{:<41}  {:>8}  {:>9}  {:>9}  {:>9}"


class _Data(NamedTuple):
    """Inputs ``(1, H, n, D)`` float32."""

    q: NDArray
    k: NDArray
    v: NDArray

    def first(self, n: int) -> "_Data":
        return _Data(*(np.ascontiguousarray(x[:, :, :n]) for x in self))

    @property
    def length(self) -> int:
        return int(self.q.shape[2])

    @property
    def slopes(self) -> tuple[float, ...]:
        return slopes_of(self.q.shape[1])


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    summary = "compare the methods on real text: seconds, memory, pairs scored, error"
    parser = add(commands, "demo", demo, summary, _EPILOG)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="default: the help topics of Python itself"
    )
    length = integer(2, MAX_POSITION - 1)
    parser.add_argument(
        "--length", type=length, default=LENGTH, metavar="N", help=f"default {LENGTH}"
    )
    parser.add_argument(
        "--exact-length",
        type=length,
        default=EXACT_LENGTH,
        metavar="N",
        help=f"up to where exact is computed (default {EXACT_LENGTH})",
    )
    parser.add_argument(
        "--heads", type=integer(1), default=HEADS, metavar="H", help=f"default {HEADS}"
    )
    parser.add_argument(
        "--head-dim", type=integer(1), default=HEAD_DIM, metavar="D", help=f"default {HEAD_DIM}"
    )
    parser.add_argument(
        "--seed", type=integer(0, 2**64 - 1), default=0, metavar="S", help="of the partitions"
    )
    parser.add_argument("--backend", metavar="NAME", help="default: the one for NumPy arrays")


def demo(args: argparse.Namespace) -> None:
    """Run the command."""
    caller = Caller(args.backend)
    text = load_text(args.text, args.length)
    write(text.note)
    write(
        f"backend {caller.name}, {args.heads} heads of dim {args.head_dim}, float32, causal, "
        "ALiBi slopes"
    )
    data = _Data(*embed(text.tokens, args.heads, args.head_dim))
    caller(*data.first(min(64, data.length)), method="lsh", causal=True)  # imports, first use
    near = data.first(min(args.exact_length, args.length))
    _near_table(caller, near, args.seed)
    if args.length > near.length:
        _far_table(caller, data, args.seed)
    write()
    write("As an approximation of ALiBi, a window of exact ALiBi beats positional LSH at equal")
    write(
        "arithmetic and at equal bandwidth: compare the windows at the pairs and at the bandwidth"
    )
    write("of lsh with that lsh. What lsh is for: to reproduce and extend the paper, to run ALiBi")
    write("through kernels that take no bias, and for randomised training masks.")


def _near_table(caller: Caller, data: _Data, seed: int) -> None:
    """Print all methods where exact can be afforded, against exact in float64."""
    write(f"\nlength {data.length}: error against exact ALiBi in float64")
    exact = _exact(data, 0)
    _write_head()
    for name, method in [("exact", Exact()), *_methods(data, seed)]:
        _measure(caller, data, name, method, lambda out: f"{relative_error(out, exact):.1e}")


def _far_table(caller: Caller, data: _Data, seed: int) -> None:
    """Print the approximations where exact is not afforded, against the widest window."""
    dense = len(data.slopes) * cost.dense_pairs(data.length, causal=True)
    write(f"\nlength {data.length}: exact is left out, it would score {dense / 1e6:.1f} Mpairs;")
    write("error against the first window, tol 1e-6, which stands in for it")
    _write_head()
    (name, method), *rest = _methods(data, seed)
    yardstick = _measure(caller, data, name, method, lambda out: "yardstick")
    expected = yardstick.astype(np.float64)
    for name, method in rest:
        _measure(caller, data, name, method, lambda out: f"{relative_error(out, expected):.1e}")
    write(
        f"the yardstick's own error on the last {_CHECKED} queries, against exact in float64: "
        f"{_yardstick_error(data, yardstick):.1e}"
    )


def _methods(data: _Data, seed: int) -> list[tuple[str, Method]]:
    """List the approximations with their names, the widest window first."""
    causal, n = True, data.length
    weight = _weight(PositionalLSH(COMPARED, seed=seed), data)
    counts = cost.distinct_pairs(weight, n, causal)
    widths = [cost.widest_window(count, n, causal) for count in counts]
    rows: list[tuple[str, Method]] = [
        (describe(window := Window(tol=1e-6)), window),
        (f"window at the bandwidth of lsh samples={COMPARED}", Window(weight.bandwidths)),
        (f"window at the pairs of lsh samples={COMPARED}", Window(widths)),
    ]
    for s in SAMPLES:
        samplers = ("iid", "stratified") if s == COMPARED else ("stratified",)
        for sampler in samplers:
            method = PositionalLSH(s, sampler=sampler, seed=seed)
            rows.append((f"lsh samples={s} {sampler}", method))
    return rows


def _weight(method: Method, data: _Data) -> Weight:
    return resolve(method, None, data.slopes, len(data.slopes)).weight


def _measure(
    caller: Caller, data: _Data, name: str, method: Method, error: Callable[[NDArray], str]
) -> NDArray:
    """Run one method, print its row, and return its output."""

    def call() -> NDArray:
        out: NDArray = caller(*data, method=method, causal=True).out
        return out

    if not caller.takes_numpy:  # compilers work at the first call of a shape
        call()
    begin = time.perf_counter()
    out = call()
    seconds = time.perf_counter() - begin
    memory = f"{_peak(call) / 2**20:.1f}" if caller.takes_numpy else "-"  # others allocate unseen
    pairs = sum(cost.distinct_pairs(_weight(method, data), data.length, causal=True))
    write(_COLUMNS.format(name, f"{seconds:.3f}", memory, f"{pairs / 1e6:.2f}", error(out)))
    return out


def _peak(call: Callable[[], NDArray]) -> int:
    """Return the bytes that a call of its own has at its peak; watching it would cost time."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not tracing:
            tracemalloc.stop()


def _write_head() -> None:
    write(_COLUMNS.format("method", "seconds", "peak MiB", "Mpairs", "error"))


def _yardstick_error(data: _Data, out: NDArray) -> float:
    """Compare the last rows of an output with exact ALiBi in float64."""
    first = data.length - min(_CHECKED, data.length)
    return relative_error(out[:, :, first:], _exact(data, first))


def _exact(data: _Data, first: int) -> NDArray:
    """Return exact ALiBi of the queries from `first` on, in float64: the last yardstick."""
    q, k, v = (x.astype(np.float64) for x in data)
    q = q[:, :, first:]
    out: NDArray = attention(
        q, k, v, method="exact", causal=True, q_offset=first, backend="reference"
    )
    return out
