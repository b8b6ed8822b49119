"""plsh beside its peers over lengths: times, errors, where plsh begins to win, how it grows."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ..methods import Method
from ..testing import double_precision
from .accuracy import error, exact_rows
from .case import Case, ours
from .machine import free_bytes
from .peers import PEERS, Peer
from .timing import Timing, in_turn

Work = Literal["forward", "training"]


class Measurement(NamedTuple):
    """One implementation at one length.

    Attributes
    ----------
    length : int
    name : str
        "plsh" or a peer's.
    work : {"forward", "training"}
        Training is forward and backward.
    timing : Timing or None
        None where it was left out.
    error : float or None
        Relative Frobenius error of the output on sampled rows, against exact ALiBi in float64.
    ratio : float or None
        Its time over plsh's: above 1 plsh is faster.
    note : str
        Why it was left out, or "".
    """

    length: int
    name: str
    work: Work
    timing: Timing | None
    error: float | None
    ratio: float | None
    note: str = ""


def compare(
    backend: str,
    method: Method,
    cases: Sequence[Case],
    peers: Sequence[str],
    *,
    training: bool = False,
    repeat: int = 5,
    limit: float = 10.0,
    step: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Measure plsh and peers in one process, in turn, case after case.

    Parameters
    ----------
    backend : str
    method : Method
    cases : sequence of Case
        Shortest first.
    peers : sequence of str
        Names in `PEERS`.
    training : bool, default False
        Also time forward and backward, of those that have gradients.
    repeat : int, default 5
    limit : float, default 10.0
        Seconds; a peer whose call is predicted to take longer, from its last length by the square
        of the lengths, is left out, and so is one that needs more than half of the free memory.
    step : callable, optional
        Called after each case.

    Returns
    -------
    list of Measurement

    Examples
    --------
    >>> from plsh import Window
    >>> found = compare("numpy", Window(4), [Case(32, heads=2, head_dim=4)], ["numpy-dense"])
    >>> [row.name for row in found]
    ['plsh', 'numpy-dense']
    """
    rows: list[Measurement] = []
    slow: dict[str, tuple[int, float]] = {}
    for case in cases:
        with contextlib.ExitStack() as stack:
            if case.dtype == "float64":
                stack.enter_context(double_precision("jax" if _uses_jax(backend, peers) else ""))
            rows += _case(backend, method, case, peers, training, repeat, limit, slow)
        step()
    return rows


def _uses_jax(backend: str, peers: Sequence[str]) -> bool:
    return backend == "jax" or any(PEERS[name].kind == "jax" for name in peers)


def _case(
    backend: str,
    method: Method,
    case: Case,
    peers: Sequence[str],
    training: bool,
    repeat: int,
    limit: float,
    slow: dict[str, tuple[int, float]],
) -> list[Measurement]:
    """Measure one case; `slow` holds each peer's last length and seconds, and is brought on."""
    inputs = case.inputs()
    expected = exact_rows(case, inputs)
    runners = {"plsh": ours(backend, method, case, inputs)}
    errors = {"plsh": error(runners["plsh"].output(), expected)}
    notes: dict[str, str] = {}
    for name in peers:
        reason = _too_much(PEERS[name], case, limit, slow.get(name))
        if reason is None:
            try:
                runner = PEERS[name].runner(case, inputs)
                errors[name] = error(runner.output(), expected)
                runners[name] = runner
                continue
            except Exception as failure:  # whatever another library raises concerns it alone
                reason = f"it failed: {type(failure).__name__}: {failure}".split("\n")[0]
        notes[name] = reason
    times = in_turn({name: runner.forward for name, runner in runners.items()}, repeat)
    slow |= {name: (case.length, times[name].seconds) for name in times}
    found = _rows(case, "forward", times, errors, notes)
    if training:
        able = {name: r.training for name, r in runners.items() if r.has_gradients}
        lacking = {name: "it has no gradients here" for name in runners if name not in able}
        times = in_turn(able, repeat)
        slow |= {name: (case.length, times[name].seconds) for name in times}
        found += _rows(case, "training", times, errors, notes | lacking)
    return found


def _too_much(peer: Peer, case: Case, limit: float, last: tuple[int, float] | None) -> str | None:
    """Say why a peer is left out of a case, before it is tried; None if it is not."""
    reason = peer.reason(case)
    if reason is not None:
        return reason
    need = peer.dense * case.score_bytes
    if need > free_bytes(case.device) / 2:
        return f"it needs about {need / 2**30:.1f} GiB, over half of the memory that is free"
    if last is not None:
        seconds = last[1] * (case.length / last[0]) ** 2
        if seconds > limit:
            return f"a call would take about {seconds:.0f} s, over the limit of {limit:g} s"
    return None


def _rows(
    case: Case,
    work: Work,
    times: dict[str, Timing],
    errors: dict[str, float],
    notes: dict[str, str],
) -> list[Measurement]:
    base = times["plsh"].seconds if "plsh" in times else None
    rows = []
    for name, timing in times.items():
        ratio = None if name == "plsh" or base is None else timing.seconds / base
        rows.append(Measurement(case.length, name, work, timing, errors[name], ratio))
    rows += [Measurement(case.length, name, work, None, None, None, x) for name, x in notes.items()]
    return rows


class BreakEven(NamedTuple):
    """The length from which plsh is faster than a peer; None where it was not met, with words."""

    length: float | None
    words: str


def break_even(lengths: Sequence[int], ratios: Sequence[float]) -> BreakEven:
    """Find the length from which on plsh wins, between the lengths that were measured.

    Parameters
    ----------
    lengths : sequence of int
        Growing.
    ratios : sequence of float
        The peer's time over plsh's at each.

    Returns
    -------
    BreakEven
        Interpolated linearly in the logarithms of length and ratio.

    Examples
    --------
    >>> break_even([256, 1024], [0.5, 2.0])
    BreakEven(length=512.0, words='n = 512, interpolated between 256 and 1024')
    """
    behind = [i for i, ratio in enumerate(ratios) if ratio <= 1]
    if not behind:
        return BreakEven(None, f"below n = {lengths[0]}, the shortest measured")
    last = behind[-1]
    if last == len(lengths) - 1:
        return BreakEven(None, f"not up to n = {lengths[last]}, the longest measured")
    a, b = (math.log(x) for x in ratios[last : last + 2])
    low, high = lengths[last : last + 2]
    length = low * (high / low) ** (-a / (b - a))
    return BreakEven(length, f"n = {length:.0f}, interpolated between {low} and {high}")


def growth(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the exponent e of the fit ``seconds = c * length**e``, by least squares of logarithms.

    Examples
    --------
    >>> round(growth([1, 2, 4], [3.0, 6.0, 12.0]), 6)
    1.0
    """
    return float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])
