"""What `plsh bench` and ``asv_benchmarks/`` share: cases, peers, timing, error, floor, memory.

A `Case` is a problem. `ours` and `PEERS` make `Runner` objects of it, on equal arrays and equal
threads, whose calls return when their work is done. `in_turn` times them, `exact_rows` and `error`
say how far off they are, `floor` gives a backend's yardstick.
"""

from .accuracy import error, exact_rows, own_rows, sampled
from .case import DTYPES, Case, Runner, ours
from .floor import floor
from .machine import facts, free_bytes, share_threads, thread_conflict
from .memory import device_peak, host_peak
from .peers import PEERS, Peer
from .report import BreakEven, Measurement, break_even, compare, growth
from .timing import Timing, in_turn

__all__ = [
    "DTYPES",
    "PEERS",
    "BreakEven",
    "Case",
    "Measurement",
    "Peer",
    "Runner",
    "Timing",
    "break_even",
    "compare",
    "device_peak",
    "error",
    "exact_rows",
    "facts",
    "floor",
    "free_bytes",
    "growth",
    "host_peak",
    "in_turn",
    "ours",
    "own_rows",
    "sampled",
    "share_threads",
    "thread_conflict",
]
