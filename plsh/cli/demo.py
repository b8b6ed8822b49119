"""``plsh demo``: what each method costs and how far off it is, on real text."""

import argparse
import contextlib
import math
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import byte_model
from ..alibi import slopes_of
from ..attention import attention
from ..byte_model.model import bits_per_byte, of_layer
from ..methods import Exact, Method, PositionalLSH, Window, resolve
from ..partition import MAX_POSITION
from ..weights import Weight
from . import continuation, cost
from .common import Caller, CliError, describe, integer, relative_error, write
from .common import add_command as add
from .text import embed, load_text

NDArray = npt.NDArray[Any]

_EPILOG = """\
The byte model that ships with plsh (plsh.byte_model) reads the text under each method; then the
methods attend with the q, k, v of its last layer. With --heads or --head-dim a fixed byte n-gram
embedding of that size (plsh.cli.text.embed) takes its place. Causal, ALiBi slopes, float32. Pairs
are those with weight > 0, over all heads; seconds and peak memory (beyond the inputs, as
tracemalloc sees it) are of one call each, seconds with placing the blocks; the error is the
relative Frobenius error of the whole output.

examples:
  plsh demo --text book.txt --length 32768
  plsh demo --generate 300 --method lsh
"""

EXACT_LENGTH = 2048
"""Where exact attention, and its float64 twin as the yardstick, take no time to speak of."""
LENGTH = 16384
"""Where exact attention is left out."""
HEADS, HEAD_DIM = 8, 64
TEMPERATURE = 0.6
SAMPLES = (4, 16, 64)
COMPARED = 16
"""Samples of the lsh row whose bandwidth one window is given, and another its number of pairs."""
_CHECKED = 64
"""Queries on which the yardstick of the far table is itself compared with exact."""

_OF_TABLES = ("text", "length", "exact_length", "heads", "head_dim")
_OF_TEXTS = ("prompt", "method", "temperature")
"""Options of the comparison, and of a continued text."""

_COLUMNS = "{:<41}  {:>8}  {:>9}  {:>9}  {:>9}"
_BITS_COLUMNS = "{:<41}  {:>9}  {:>8}  {:>9}  {:>8}"


class _Data(NamedTuple):
    """Inputs ``(1, H, n, D)`` float32, and a slope for each head."""

    q: NDArray
    k: NDArray
    v: NDArray
    slopes: tuple[float, ...]

    def first(self, n: int) -> "_Data":
        q, k, v = (np.ascontiguousarray(x[:, :, :n]) for x in self[:3])
        return _Data(q, k, v, self.slopes)

    @property
    def length(self) -> int:
        return int(self.q.shape[2])


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    summary = "compare the methods on real text: seconds, memory, pairs scored, error"
    parser = add(commands, "demo", demo, summary, _EPILOG)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="default: the help topics of Python itself"
    )
    length = integer(2, MAX_POSITION - 1)
    parser.add_argument("--length", type=length, metavar="N", help=f"default {LENGTH}")
    parser.add_argument(
        "--exact-length",
        type=length,
        metavar="N",
        help=f"up to where exact is computed (default {EXACT_LENGTH})",
    )
    parser.add_argument(
        "--heads", type=integer(1), metavar="H", help=f"of the embedding (then default {HEADS})"
    )
    parser.add_argument(
        "--head-dim", type=integer(1), metavar="D", help=f"likewise (then default {HEAD_DIM})"
    )
    parser.add_argument(
        "--seed", type=integer(0, 2**64 - 1), default=0, metavar="S", help="of the partitions"
    )
    parser.add_argument(
        "--backend",
        type=_backends,
        metavar="NAME[,NAME...]",
        help="default: the one for NumPy arrays; the model runs on each, the rest on the first",
    )
    text = parser.add_argument_group("to continue a text")
    text.add_argument(
        "--generate", type=integer(1), metavar="N", help="draw N bytes from the byte model instead"
    )
    text.add_argument("--prompt", metavar="TEXT", help="what they follow")
    text.add_argument("--method", choices=continuation.METHODS, help="default window")
    text.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help=f"default {TEMPERATURE}; 0: likeliest",
    )


def demo(args: argparse.Namespace) -> None:
    """Run the command."""
    names = args.backend or (None,)
    if args.generate is not None:
        _refuse(args, _OF_TABLES, "goes without --generate")
        if len(names) > 1:
            raise CliError(f"--generate takes one --backend, got {','.join(args.backend)}")
        continuation.continue_text(
            continuation.PROMPT if args.prompt is None else args.prompt,
            args.generate,
            args.method or "window",
            TEMPERATURE if args.temperature is None else args.temperature,
            args.seed,
            names[0],
        )
        return
    _refuse(args, _OF_TEXTS, "needs --generate N")
    callers = [Caller(name) for name in names]
    caller = callers[0]
    length, exact_length = args.length or LENGTH, args.exact_length or EXACT_LENGTH
    text = load_text(args.text, length)
    write(text.note)
    if args.heads is None and args.head_dim is None:
        model = byte_model.load()
        write(
            f"the byte model that ships with plsh: {model.layers} layers of {model.heads} heads, "
            f"trained on {model.length} bytes at a time"
        )
        tokens = text.tokens[:exact_length]
        known = ", which it was trained on" if args.text is None else ""
        write(f"bits per byte of {len(tokens)} bytes{known}, the whole model under each method:")
        _bits_table(callers, model, tokens, args.seed)
        data = _last_layer(model, text.tokens)
        of = "of its last layer"
    else:
        heads, head_dim = args.heads or HEADS, args.head_dim or HEAD_DIM
        data = _Data(*embed(text.tokens, heads, head_dim), slopes_of(heads))
        of = "of byte n-grams"
    _, heads, _, head_dim = data.q.shape
    write(
        f"backend {caller.name}, q, k, v {of}, {heads} heads of dim {head_dim}, float32, causal, "
        "ALiBi slopes"
    )
    _call(caller, data.first(min(64, data.length)), PositionalLSH())  # imports, first use
    near = data.first(min(exact_length, length))
    _near_table(caller, near, args.seed)
    if length > near.length:
        _far_table(caller, data, args.seed)
    write()
    write("As an approximation of ALiBi, a window of exact ALiBi beats positional LSH at equal")
    write(
        "arithmetic and at equal bandwidth: compare the windows at the pairs and at the bandwidth"
    )
    write("of lsh with that lsh. What lsh is for: to reproduce and extend the paper, to run ALiBi")
    write("through kernels that take no bias, and for randomised training masks.")


def _refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse options that would have no effect."""
    for name in names:
        if getattr(args, name) is not None:
            raise CliError(f"--{name.replace('_', '-')} {why}")


def _backends(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if "" in names or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"must be different names with commas between them, got {text!r}"
        )
    return names


def _temperature(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")


def _call(caller: Caller, data: _Data, method: Method) -> NDArray:
    out: NDArray = caller(*data[:3], method=method, slopes=data.slopes, causal=True).out
    return out


def _last_layer(model: byte_model.ByteModel, tokens: NDArray) -> _Data:
    """Return the last layer's q, k, v, the model run under a window of ALiBi."""
    window = model.attention("window")
    layers: list[_Data] = []

    def attend(layer: int, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        layers[:] = [_Data(q, k, v, model.slopes)]
        out: NDArray = window(layer, q, k, v)
        return out

    model.logits(tokens, attend)
    return layers[0]


def _bits_table(
    callers: Sequence[Caller], model: byte_model.ByteModel, tokens: NDArray, seed: int
) -> None:
    """Print how well the model predicts the text under each method, on each backend."""
    write(_BITS_COLUMNS.format("under", "backend", "seconds", "peak MiB", "bits"))
    methods: list[Method] = [
        Exact(),
        Window(),
        *(PositionalLSH(s, seed=seed) for s in SAMPLES),
        PositionalLSH(COMPARED, sampler="iid", seed=seed),
    ]
    for caller in callers:
        for method in methods:
            _bits_row(caller, model, tokens, method)
    write()


def _bits_row(caller: Caller, model: byte_model.ByteModel, tokens: NDArray, method: Method) -> None:
    def attend(layer: int, q: NDArray, k: NDArray, v: NDArray) -> NDArray:
        return _call(caller, _Data(q, k, v, model.slopes), of_layer(method, layer))

    def call() -> NDArray:
        return model.logits(tokens, attend)

    logits, seconds, memory = _timed(caller, call)
    bits = f"{bits_per_byte(logits, tokens).mean():.4f}"
    write(_BITS_COLUMNS.format(describe(method), caller.name, seconds, memory, bits))


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
        return _call(caller, data, method)

    out, seconds, memory = _timed(caller, call)
    pairs = sum(cost.distinct_pairs(_weight(method, data), data.length, causal=True))
    write(_COLUMNS.format(name, seconds, memory, f"{pairs / 1e6:.2f}", error(out)))
    return out


def _timed(caller: Caller, call: Callable[[], NDArray]) -> tuple[NDArray, str, str]:
    """Return what a call returns, its seconds, and the MiB that another has at its peak."""
    if not caller.takes_numpy:  # compilers work at the first call of a shape
        call()
    begin = time.perf_counter()
    out = call()
    seconds = time.perf_counter() - begin
    memory = f"{_peak(call) / 2**20:.1f}" if caller.takes_numpy else "-"  # others allocate unseen
    return out, f"{seconds:.3f}", memory


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
    q, k, v = (x.astype(np.float64) for x in data[:3])
    q = q[:, :, first:]
    out: NDArray = attention(
        q,
        k,
        v,
        method="exact",
        slopes=data.slopes,
        causal=True,
        q_offset=first,
        backend="reference",
    )
    return out
