"""Wall time of calls that wait for their own work: warm, in turn, the median of several."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

_SAMPLE = 0.01
"""Seconds that a sample should take at least: shorter calls are repeated within it."""
_PAUSE = 0.05
"""Seconds before a sample, in which the waiting threads of the library before fall asleep."""
_CHEAP = 0.25
"""A call below this many seconds is made once untimed after the pause, to wake the processors."""


class Timing(NamedTuple):
    """Seconds of one call: the median of its samples, the fastest and the slowest."""

    seconds: float
    fastest: float
    slowest: float


def in_turn(calls: Mapping[str, Callable[[], object]], repeat: int = 5) -> dict[str, Timing]:
    """Time calls, one sample of each in turn, so that what the machine does meets all alike.

    Parameters
    ----------
    calls : mapping of str to callable
        Each returns when its work is done. Each is called once before, to compile and warm up.
    repeat : int, default 5
        Samples of each.

    Returns
    -------
    dict of str to Timing

    Examples
    --------
    >>> in_turn({"sleep": lambda: time.sleep(0.02)}, 1)["sleep"].seconds >= 0.02
    True
    """
    numbers = {}
    for name, call in calls.items():
        call()
        numbers[name] = max(1, math.ceil(_SAMPLE / max(_sample(call, 1), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in calls.items():
            time.sleep(_PAUSE)
            last = samples[name][-1] if samples[name] else 0.0
            if last < _CHEAP:
                call()
            samples[name].append(_sample(call, numbers[name]))
    return {
        name: Timing(statistics.median(taken), min(taken), max(taken))
        for name, taken in samples.items()
    }


def _sample(call: Callable[[], object], number: int) -> float:
    """Return seconds of one of `number` calls in a row."""
    begin = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - begin) / number
