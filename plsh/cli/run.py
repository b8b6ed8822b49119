"""``plsh run``: attention of the arrays in an ``.npz`` file, written to another."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import validation as rules
from ..compat import swap_heads
from ..methods import Method, Window, window_width
from ..validation import LAYOUTS
from .archive import check_not_input, read_arrays, write_arrays
from .common import (
    Caller,
    CliError,
    add_method,
    check_output,
    describe,
    integers,
    method_of,
    progress,
    write,
)
from .common import add_command as add

NDArray = npt.NDArray[Any]

_EPILOG = """\
The input holds q (B, H, Nq, D), k (B, Hkv, Nk, D) and v (B, Hkv, Nk, Dv) of one floating dtype,
batch axis optional, and may hold slopes (H,) or (B, H) and segment_ids (B, N), or segment_ids_q
and segment_ids_k. Without slopes, the published ALiBi slopes are used.

example:
  python -c "import numpy as np; q, k, v = np.random.randn(3, 1, 8, 1000, 64).astype('f4'); \\
             np.savez('qkv.npz', q=q, k=k, v=v)"
  plsh run --input qkv.npz --output out.npz --method window --tol 1e-4 --causal --lse
"""

_REQUIRED = ("q", "k", "v")
_OPTIONAL = ("slopes", "segment_ids", "segment_ids_q", "segment_ids_k")


def add_command(commands: Any) -> None:
    """Add the command to the parser."""
    summary = "compute attention of q, k, v from an .npz file and write an .npz file"
    parser = add(commands, "run", run, summary, _EPILOG)
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="q, k, v")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="gets out; whole or not at all"
    )
    add_method(parser, "lsh")
    parser.add_argument("--causal", action="store_true", help="hide keys after the query")
    parser.add_argument("--scale", type=float, help="factor of q . k (default D^-1/2)")
    parser.add_argument(
        "--q-offset", type=integers, metavar="N[,N...]", help="position of query 0, or per row"
    )
    parser.add_argument(
        "--k-offset", type=integers, default=0, metavar="N[,N...]", help="of key 0 (default 0)"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="bhsd", help="order of the axes")
    parser.add_argument("--lse", action="store_true", help="also write lse, the log denominators")
    parser.add_argument("--backend", metavar="NAME", help="default: the one for NumPy arrays")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="report each batch row on stderr (default: if it is a terminal)",
    )


class _Inputs(NamedTuple):
    """The operands of a call; `rows` splits them by batch row."""

    q: NDArray
    k: NDArray
    v: NDArray
    slopes: NDArray | None  # (H,) or (B, H)
    segment_ids: tuple[NDArray, NDArray] | None  # (B, Nq), (B, Nk)
    q_offset: int | tuple[int, ...] | None
    k_offset: int | tuple[int, ...]

    def rows(self) -> list["_Inputs"]:
        """Return a call for each batch row; the whole where there is no batch axis, or no row."""
        batch = self.q.shape[0]
        if self.q.ndim == 3 or batch == 0:
            return [self]
        return [self._take(slice(b, b + 1)) for b in range(batch)]

    def _take(self, rows: slice) -> "_Inputs":
        slopes, ids = self.slopes, self.segment_ids
        offsets = (self.q_offset, self.k_offset)
        first_q, first_k = (x[rows] if isinstance(x, tuple) else x for x in offsets)
        return _Inputs(
            self.q[rows],
            self.k[rows],
            self.v[rows],
            slopes[rows] if slopes is not None and slopes.ndim == 2 else slopes,
            None if ids is None else (ids[0][rows], ids[1][rows]),
            first_q,
            0 if first_k is None else first_k,
        )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    method = method_of(args)
    caller = Caller(args.backend)
    check_output("--output", args.output)
    check_not_input(args.output, args.input)
    inputs = _read(args)
    options = {"causal": args.causal, "scale": args.scale, "layout": args.layout}
    options["method"] = _with_one_band(method, inputs.slopes)
    rows = inputs.rows()
    show = sys.stderr.isatty() if args.progress is None else args.progress
    parts = []
    begin = time.perf_counter()
    with progress(args.prog, "batch row", len(rows), show) as step:
        for row in rows:
            try:
                parts.append(caller(**row._asdict(), **options))
            except (TypeError, ValueError) as error:
                raise CliError(f"{args.input}: {error}") from None
            step()
    seconds = time.perf_counter() - begin
    results = {"out": [part.out for part in parts]}
    if args.lse:
        results["lse"] = [part.lse for part in parts]
    arrays = {name: np.concatenate(x) if len(x) > 1 else x[0] for name, x in results.items()}
    write_arrays(args.output, arrays)
    given = ", ".join(f"{name} {getattr(inputs, name).shape}" for name in _REQUIRED)
    made = ", ".join(f"{name} {x.shape}" for name, x in arrays.items())
    write(
        f"{args.output}: {made} from {given} {inputs.q.dtype}; {describe(method)}; "
        f"backend {caller.name}; {seconds:.3g} s"
    )


def _read(args: argparse.Namespace) -> _Inputs:
    """Read the input and check it as a whole; what concerns one batch row is checked with it."""
    arrays = read_arrays(args.input, _REQUIRED, _OPTIONAL)
    q, k, v = (arrays[name] for name in _REQUIRED)
    slopes, ids = arrays.get("slopes"), arrays.get("segment_ids")
    sides = [arrays.get(f"segment_ids_{side}") for side in "qk"]
    if any(x is not None for x in sides):
        if ids is not None or any(x is None for x in sides):
            raise CliError(
                f"{args.input} must hold segment_ids, or both segment_ids_q and segment_ids_k"
            )
        ids = tuple(sides)
    try:
        rules.check_arrays(q, k, v)
        rules.check_shapes(q, k, v, args.layout)
        batch = q.shape[0] if q.ndim == 4 else None
        heads = q.shape[-3 if args.layout == "bhsd" else -2]
        rules.check_slopes(slopes, "numpy", batch, heads)
        rules.check_offset("k_offset", args.k_offset, "numpy", batch)
        if args.q_offset is not None:
            rules.check_offset("q_offset", args.q_offset, "numpy", batch)
        axes = (swap_heads(q), swap_heads(k)) if args.layout == "bshd" else (q, k)
        ids = rules.check_segments(ids, *axes, "numpy")
    except (TypeError, ValueError) as error:
        raise CliError(f"{args.input}: {error}") from None
    return _Inputs(q, k, v, slopes, ids, args.q_offset, args.k_offset)


def _with_one_band(method: Method, slopes: NDArray | None) -> Method:
    """Fix the widths that slopes per batch row share: those of the flattest row."""
    if not isinstance(method, Window) or method.tol is None:
        return method
    if slopes is None or slopes.ndim != 2 or slopes.size == 0:
        return method
    return Window([window_width(slope, method.tol) for slope in slopes.min(axis=0).tolist()])
