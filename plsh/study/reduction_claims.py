"""Verdicts on theorem 2.2, and on lsh beside windows of exact ALiBi at what it costs."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .reduction import METHODS, Cell
from .statistics import (
    Claim,
    Interval,
    judge_above,
    judge_below,
    judge_within,
    mean_interval,
    power_law,
)

ADVERSARIAL, RANDOM_TWIN = "adversarial", "random, of the adversary's norms"


def judge(cells: Sequence[Cell], found: Mapping[str, Interval]) -> list[Claim]:
    """Judge what theorem 2.2 says of outputs, and lsh beside windows."""
    claims = []
    names = list(dict.fromkeys(c.inputs for c in cells))
    for name in names:
        own = [c for c in cells if c.inputs == name and c.method == "lsh iid"]
        ratio = _per_repeat(own, lambda c, r: c.metrics["absolute"][r] / c.metrics["bound"][r], max)
        claims.append(
            Claim(
                f"{name}: the output's error is within theorem 2.2's bound, where it is largest "
                "beside it",
                judge_below(ratio, 1.0),
                ratio,
                "< 1",
            )
        )
        fit = _slope(own, "absolute")
        claims.append(
            Claim(
                f"{name}: the output's error under iid masks falls as samples^-1/2",
                judge_within(fit, -0.6, -0.4),
                fit,
                "in (-0.6, -0.4)",
            )
        )
        if name not in (ADVERSARIAL, RANDOM_TWIN):  # it saw the masks, and no windows
            for window in METHODS[2:]:
                claims += _window(name, [c for c in cells if c.inputs == name], window)
    if {ADVERSARIAL, RANDOM_TWIN} <= set(names):
        claims += _adversary(cells)
    for name, low, high in (("lsh iid s=16", -math.inf, 1.2), ("exact", 1.6, math.inf)):
        if name in found:
            words = "about linearly" if name != "exact" else "about quadratically"
            needs = f"< {high:g}" if name != "exact" else f"> {low:g}"
            claims.append(
                Claim(
                    f"the time of {name} grows {words} with the length (exponent)",
                    judge_within(found[name], low, high),
                    found[name],
                    needs,
                )
            )
    return claims


def _per_repeat(
    cells: Sequence[Cell],
    value: Callable[[Cell, int], float],
    reduce: Callable[[Sequence[float]], float],
) -> Interval:
    """Reduce the cells of each repetition to a number, and take the interval over repetitions."""
    repeats = len(next(iter(cells[0].metrics.values())))
    return mean_interval([reduce([value(c, r) for c in cells]) for r in range(repeats)])


def _slope(cells: Sequence[Cell], metric: str) -> Interval:
    """Fit the error of each repetition, the geometric mean over sigmas, against the samples."""
    samples = sorted({c.samples for c in cells})
    repeats = len(cells[0].metrics[metric])
    points = [
        [
            math.exp(
                float(np.mean([np.log(c.metrics[metric][r]) for c in cells if c.samples == s]))
            )
            for s in samples
        ]
        for r in range(repeats)
    ]
    return power_law(samples, points)


def _window(name: str, cells: Sequence[Cell], window: str) -> list[Claim]:
    """Judge whether lsh's error is larger than a window's, at the number of samples least so."""
    lsh = {(c.sigma, c.samples): c for c in cells if c.method == "lsh iid"}
    other = {(c.sigma, c.samples): c for c in cells if c.method == window}
    floor = 1e-15  # of float64: a window that covers everything has no error at all
    ratios = {
        s: _per_repeat(
            [c for key, c in lsh.items() if key[1] == s],
            lambda c, r: math.log(
                max(c.metrics["relative"][r], floor)
                / max(other[c.sigma, c.samples].metrics["relative"][r], floor)
            ),
            lambda values: float(np.mean(values)),
        )
        for s in sorted({key[1] for key in lsh})
    }
    s, least = min(ratios.items(), key=lambda item: item[1].mean)
    ratio = Interval(*(math.exp(min(x, 700.0)) for x in least))
    return [
        Claim(
            f"{name}: the error of iid lsh is larger than that of a {window} of lsh (geometric "
            f"mean of the ratios over sigmas; least at s = {s})",
            judge_above(ratio, 1.0),
            ratio,
            "> 1",
        )
    ]


def _adversary(cells: Sequence[Cell]) -> list[Claim]:
    """Judge whether an adversary who sees the masks does worse than random inputs of his norms."""
    by = {(c.inputs, c.sigma, c.samples): c for c in cells if c.method == "lsh iid"}
    own = [c for key, c in by.items() if key[0] == ADVERSARIAL]
    ratio = _per_repeat(
        own,
        lambda c, r: math.log(
            c.metrics["absolute"][r] / by[RANDOM_TWIN, c.sigma, c.samples].metrics["absolute"][r]
        ),
        lambda values: float(np.mean(values)),
    )
    factor = Interval(*(math.exp(x) for x in ratio))
    return [
        Claim(
            "an adversary who sees the masks makes larger errors than random inputs with rows of "
            "the same norms (geometric mean of the ratios)",
            judge_above(factor, 1.0),
            factor,
            "> 1",
        )
    ]
