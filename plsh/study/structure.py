"""Theorem 2.1: how far the mean of random masks is from ALiBi's matrix, and how long blocks are.

For every sigma, length and sampler the same masks give all errors, symmetric and causal. Masks of
"iid" and "cuts" are nested: those of 16 samples are the first of those of 64. Repetitions have
seeds of their own and are independent, so intervals are taken over them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import theory
from ..hashing import IndependentCuts, RandomBinning
from ..partition import PartitionSet
from .statistics import (
    Claim,
    Interval,
    judge_above,
    judge_below,
    judge_within,
    mean_interval,
    power_law,
)

Float = npt.NDArray[np.float64]

SAMPLERS = ("iid", "stratified", "cuts")
METRICS = ("spectral", "relative spectral", "max", "relative frobenius")
DELTA = 0.01
"""Odds at which the bounds with odds are drawn."""
BLOCK_DELTA, BLOCK_SAMPLES, BLOCK_LENGTH = 0.05, 16, 1024
"""Odds, masks and length at which it is counted how often the bound of block sizes is exceeded."""
_SPARE = 1.2
"""Of the odds: the union bound is nearly attained, and a count has an error."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured.

    Parameters
    ----------
    sigmas, lengths, samples : tuple of int
        Of the errors.
    repeats : int
        Seeds.
    block_sigma : int
        Of the longest blocks.
    block_lengths, block_samples : tuple of int
        Of the longest blocks; all lengths are measured with the last but one number of samples.
    block_repeats : int
        Seeds, of the longest blocks.
    block_draws : int
        Draws of `BLOCK_SAMPLES` masks of which it is counted how many exceed their bound.
    """

    sigmas: tuple[int, ...] = (4, 32, 256)
    lengths: tuple[int, ...] = (256, 1024, 2048)
    samples: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096)
    repeats: int = 5
    block_sigma: int = 32
    block_lengths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    block_samples: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    block_repeats: int = 40
    block_draws: int = 10000


QUICK = Settings(
    sigmas=(4, 32),
    lengths=(128, 256),
    samples=(1, 4, 16, 64, 256),
    repeats=4,
    block_lengths=(1024, 4096),
    block_samples=(1, 4, 16, 64),
    block_repeats=20,
    block_draws=2000,
)


# --- masks and their errors -----------------------------------------------------------------------


def draw(sigma: float, n: int, samples: int, sampler: str, seed: int) -> PartitionSet:
    """Return the masks of one head, on positions 0 … n - 1."""
    if sampler == "cuts":
        return IndependentCuts(sigma).sample(samples, n, seed=seed)
    return RandomBinning(sigma).sample(samples, n, seed=seed, sampler=sampler)


def shared(labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return in how many of the masks, ``(s, n)``, each two positions share a block, ``(n, n)``.

    A block [a, b) is a square of ones: four corners of the second difference, summed twice.
    """
    n = labels.shape[-1]
    begin = np.diff(labels, axis=-1, prepend=-1) != 0  # also where position 0 is in an older block
    sample, first = np.nonzero(begin)
    last_of_row = np.append(sample[1:] != sample[:-1], True)
    end = np.where(last_of_row, n, np.append(first[1:], n))
    corners = np.zeros((n + 1) ** 2, dtype=np.int64)
    for row, column, sign in ((first, first, 1), (end, end, 1), (first, end, -1), (end, first, -1)):
        corners += sign * np.bincount(row * (n + 1) + column, minlength=corners.size)
    counts: npt.NDArray[np.int64] = corners.reshape(n + 1, n + 1)[:n, :n].cumsum(0).cumsum(1)
    return counts


def decay(sigma: float, n: int) -> Float:
    """Return L*, ``exp(-|i - j| / sigma)``, ``(n, n)``."""
    at = np.arange(n)
    weights: Float = np.exp(-np.abs(at[:, None] - at) / sigma)
    return weights


def spectral_norm(matrix: Float, tolerance: float = 1e-5) -> float:
    """Return the largest singular value, by Lanczos' method on ``A^T A``.

    Parameters
    ----------
    matrix : numpy.ndarray, shape (n, m)
    tolerance : float
        The residual of the Ritz pair, relative to its value, at which it stops.

    Examples
    --------
    >>> round(spectral_norm(np.array([[3.0, 0.0], [4.0, 0.0]])), 9)
    5.0
    """
    size = matrix.shape[1]
    start = np.random.Generator(np.random.Philox(key=np.array([0, 0], dtype=np.uint64)))
    drawn: Float = start.standard_normal((size,))
    basis: list[Float] = [np.asarray(drawn / np.linalg.norm(drawn))]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(size):
        product = np.asarray(matrix.T @ (matrix @ basis[-1]), dtype=np.float64)
        diagonal.append(float(product @ basis[-1]))
        held = np.array(basis)
        for _twice in range(2):  # rounding would bring converged vectors back
            product -= held.T @ (held @ product)
        beside.append(float(np.linalg.norm(product)))
        small = np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1)
        values, vectors = np.linalg.eigh(small)
        largest = max(float(values[-1]), 0.0)
        if beside[-1] * abs(float(vectors[-1, -1])) <= tolerance * largest:
            break
        basis.append(product / beside[-1])
    return math.sqrt(largest)


class Cell(NamedTuple):
    """Errors of one setting: each metric a number for each repetition."""

    sigma: int
    n: int
    sampler: str
    causal: bool
    samples: int
    errors: dict[str, list[float]]
    bound: float
    """On the expected spectral error, of iid masks (theorem 2.1, constant 1)."""
    tail_bound: float
    """On the spectral error, exceeded with probability at most `DELTA` (theorem 2.1)."""
    max_bound: float
    """On the largest entry, likewise (Hoeffding and a union over the pairs)."""


def errors(settings: Settings, step: Callable[[], None] = lambda: None) -> list[Cell]:
    """Measure every setting; `step` is called after each (sigma, length, sampler)."""
    cells = []
    for sigma in settings.sigmas:
        for n in settings.lengths:
            exact = decay(sigma, n)
            targets = {False: exact, True: np.tril(exact)}
            scales = {c: (spectral_norm(t), np.linalg.norm(t)) for c, t in targets.items()}
            for sampler in SAMPLERS:
                table: dict[tuple[bool, int], dict[str, list[float]]] = {
                    (c, s): {m: [] for m in METRICS} for c in targets for s in settings.samples
                }
                for seed in range(settings.repeats):
                    for s, mean in _means(sigma, n, settings.samples, sampler, seed):
                        for c, target in targets.items():
                            wrong = (np.tril(mean) if c else mean) - target
                            norm = spectral_norm(wrong)
                            found = (
                                norm,
                                norm / scales[c][0],
                                float(np.abs(wrong).max()),
                                float(np.linalg.norm(wrong) / scales[c][1]),
                            )
                            for metric, value in zip(METRICS, found, strict=True):
                                table[c, s][metric].append(float(f"{value:.4g}"))
                cells += [
                    Cell(sigma, n, sampler, c, s, values, *_bounds(n, s, sigma))
                    for (c, s), values in table.items()
                ]
                step()
    return cells


def _means(sigma: int, n: int, samples: Sequence[int], sampler: str, seed: int) -> Any:
    """Yield (s, the mean of s masks): nested where the sampler is, else drawn for each s."""
    nested = sampler != "stratified"
    if nested:
        labels = draw(sigma, n, max(samples), sampler, seed).labels()[0]
        total = np.zeros((n, n), dtype=np.int64)
        done = 0
    for s in samples:
        if nested:
            total = total + shared(labels[done:s])
            done = s
            yield s, total / s
        else:
            yield s, shared(draw(sigma, n, s, sampler, seed).labels()[0]) / s


def _bounds(n: int, samples: int, sigma: int) -> tuple[float, float, float]:
    return (
        theory.spectral_error_bound(n, samples, sigma),
        theory.spectral_error_bound(n, samples, sigma, DELTA),
        math.sqrt(math.log(n * n / DELTA) / (2 * samples)),
    )


# --- longest blocks -------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """The longest block of one setting, for each repetition, in tokens."""

    sampler: str
    n: int
    samples: int
    longest: list[int]
    bound: int
    """Not exceeded by RandomBinning, but for odds `DELTA`."""


def longest_blocks(settings: Settings, step: Callable[[], None] = lambda: None) -> list[Blocks]:
    """Measure the longest blocks: against samples at one length, against length with one number."""
    middle = settings.block_lengths[len(settings.block_lengths) // 2]
    some = settings.block_samples[-2]
    pairs = [(middle, s) for s in settings.block_samples]
    pairs += [(n, some) for n in settings.block_lengths if n != middle]
    sigma = settings.block_sigma
    rows = []
    for sampler in SAMPLERS:
        for n, s in pairs:
            longest = [
                int(draw(sigma, n, s, sampler, seed).bandwidths[0]) + 1
                for seed in range(settings.block_repeats)
            ]
            rows.append(Blocks(sampler, n, s, longest, theory.block_size_bound(sigma, s, DELTA)))
        step()
    return rows


def too_long(settings: Settings, sampler: str) -> Interval:
    """Return the share of draws that have a block longer than the bound, and its interval."""
    sigma = settings.block_sigma
    bound = theory.block_size_bound(sigma, BLOCK_SAMPLES, BLOCK_DELTA)
    over = [
        draw(sigma, BLOCK_LENGTH, BLOCK_SAMPLES, sampler, seed).bandwidths[0] >= bound
        for seed in range(settings.block_draws)
    ]
    return _share(over)


# --- verdicts -------------------------------------------------------------------------------------


def slopes(settings: Settings, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Fit error ~ samples^slope, from 4 samples on, for each setting and metric."""
    fitted = []
    sizes = [s for s in settings.samples if s >= 4]
    for key in dict.fromkeys((c.sigma, c.n, c.sampler, c.causal) for c in cells):
        chosen = {c.samples: c for c in cells if c[:4] == key}
        for metric in METRICS[1:]:  # the absolute error has the slope of the relative one
            repeats = [
                [chosen[s].errors[metric][r] for s in sizes] for r in range(settings.repeats)
            ]
            fit = power_law(sizes, repeats)
            fitted.append(
                dict(zip(("sigma", "n", "sampler", "causal"), key, strict=True))
                | {"metric": metric, "slope": fit._asdict()}
            )
    return fitted


def judge(
    settings: Settings,
    cells: Sequence[Cell],
    blocks: Sequence[Blocks],
    exceeding: Mapping[str, Interval],
) -> list[Claim]:
    """Judge what theorem 2.1 says of the masks that were drawn."""
    iid = [c for c in cells if c.sampler == "iid"]
    claims = []
    for causal in (False, True):
        of = "causal" if causal else "symmetric"
        ratio = max(
            (mean_interval([e / c.bound for e in c.errors["spectral"]]))
            for c in iid
            if c.causal == causal
        )
        claims.append(
            Claim(
                f"the mean {of} spectral error of iid masks is within the bound on its "
                "expectation with constant 1, where it is largest beside it",
                judge_below(ratio, 1.0),
                ratio,
                "< 1",
            )
        )
    symmetric = [c for c in iid if not c.causal]
    claims += [
        _within("spectral error", settings, symmetric, "spectral", "tail_bound"),
        _within("largest entry of the error", settings, iid, "max", "max_bound"),
    ]
    claims += _rates(settings, cells)
    claims += _growth(settings, iid)
    claims += _gains(cells)
    claims += _block_claims(settings, blocks, exceeding)
    return claims


def _within(what: str, settings: Settings, cells: Sequence[Cell], metric: str, bound: str) -> Claim:
    """Judge the largest ratio of an error to its bound, over all settings, seed by seed."""
    largest = mean_interval(
        [
            max(c.errors[metric][r] / getattr(c, bound) for c in cells)
            for r in range(settings.repeats)
        ]
    )
    words = f"the {what} of iid masks is within the bound that holds but for odds of {DELTA:g}"
    return Claim(words, judge_below(largest, 1.0), largest, "< 1")


def _share(events: Sequence[bool]) -> Interval:
    """Return the share of events with the Wilson interval."""
    count, z2 = len(events), 1.96**2
    p = sum(events) / count
    centre = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = math.sqrt(z2 * p * (1 - p) / count + z2 * z2 / (4 * count**2)) / (1 + z2 / count)
    return Interval(p, max(0.0, centre - half), centre + half)


def _rates(settings: Settings, cells: Sequence[Cell]) -> list[Claim]:
    """Judge the slopes at the largest length, symmetric, over all sigmas together."""
    n = max(settings.lengths)
    sizes = [s for s in settings.samples if s >= 4]
    claims = []
    for sampler, low, high, words in (
        ("iid", -0.55, -0.45, "falls as samples^-1/2"),
        ("cuts", -0.55, -0.45, "falls as samples^-1/2"),
        ("stratified", -math.inf, -0.6, "falls faster than samples^-0.6"),
    ):
        for metric in ("relative spectral", "max"):
            repeats = [
                [c.errors[metric][r] for c in cells if c[:4] == (sigma, n, sampler, False)
                 and c.samples in sizes]
                for sigma in settings.sigmas
                for r in range(settings.repeats)
            ]  # fmt: skip
            fit = power_law(sizes, repeats)
            needs = f"in ({low:g}, {high:g})" if math.isfinite(low) else f"< {high:g}"
            claims.append(
                Claim(
                    f"the {metric} error of {sampler} masks {words} from 4 masks on (n = {n})",
                    judge_within(fit, low, high),
                    fit,
                    needs,
                )
            )
    return claims


def _growth(settings: Settings, iid: Sequence[Cell]) -> list[Claim]:
    """Judge how the error grows with the length, against the theorem's sqrt(ln n)."""
    short, long = min(settings.lengths), max(settings.lengths)
    limit = math.sqrt(math.log(long) / math.log(short))
    sigma = min(settings.sigmas)
    ratios = []
    for s in settings.samples:
        pair = {
            c.n: c.errors["spectral"]
            for c in iid
            if (c.sigma, c.samples, c.causal) == (sigma, s, False) and s >= 16
        }
        if pair:
            ratios.append(np.divide(pair[long], pair[short]))
    growth = mean_interval(np.mean(ratios, axis=0).tolist())
    return [
        Claim(
            f"from n = {short} to {long} the spectral error of iid masks of sigma = {sigma} grows "
            "by no more than sqrt(ln n), with 10 % to spare",
            judge_below(growth, 1.1 * limit),
            growth,
            f"< {1.1 * limit:.3g}",
        )
    ]


def _gains(cells: Sequence[Cell]) -> list[Claim]:
    """Judge what stratifying gains, where 64 samples and more are drawn."""
    by = {(c.sigma, c.n, c.causal, c.samples, c.sampler): c for c in cells}
    logs = [
        np.log(np.divide(c.errors["spectral"], by[(*key[:4], "stratified")].errors["spectral"]))
        for key, c in by.items()
        if c.sampler == "iid" and c.samples >= 64 and not c.causal
    ]
    gain = Interval(*(math.exp(x) for x in mean_interval(np.mean(logs, axis=0).tolist())))
    return [
        Claim(
            "from 64 samples on the spectral error of iid masks is larger than that of stratified "
            "ones (geometric mean of the ratios)",
            judge_above(gain, 1.0),
            gain,
            "> 1",
        )
    ]


def _block_claims(
    settings: Settings, blocks: Sequence[Blocks], exceeding: Mapping[str, Interval]
) -> list[Claim]:
    claims = []
    lengths = sorted(settings.block_lengths)
    some = settings.block_samples[-2]
    limit = _SPARE * BLOCK_DELTA
    for sampler, share in exceeding.items():
        claims.append(
            Claim(
                f"a block of {BLOCK_SAMPLES} {sampler} masks is longer than the bound, "
                f"O(sigma log(s/delta)), with odds of delta = {BLOCK_DELTA:g} (a fifth to spare)",
                judge_below(share, limit),
                share,
                f"< {limit:g}",
            )
        )
    for sampler, verb, judge_growth, needs in (
        ("iid", "does not grow", judge_below, "< 1.05"),
        ("cuts", "grows", judge_above, "> 1.05"),
    ):
        at = {b.n: b.longest for b in blocks if b.sampler == sampler and b.samples == some}
        growth = mean_interval(np.divide(at[lengths[-1]], at[lengths[0]]).tolist())
        claims.append(
            Claim(
                f"the longest block of {some} {sampler} masks {verb} with the length: its ratio "
                f"from n = {lengths[0]} to {lengths[-1]}",
                judge_growth(growth, 1.05),
                growth,
                needs,
            )
        )
    return claims


def run(settings: Settings, step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Measure, fit and judge; return what is written as JSON."""
    cells = errors(settings, step)
    blocks = longest_blocks(settings, step)
    exceeding = {x: too_long(settings, x) for x in ("iid", "stratified")}
    return {
        "errors": [c._asdict() for c in cells],
        "slopes": slopes(settings, cells),
        "blocks": [b._asdict() for b in blocks],
        "claims": [c.plain() for c in judge(settings, cells, blocks, exceeding)],
    }


def steps(settings: Settings) -> int:
    """Return how often `run` calls `step`."""
    return len(SAMPLERS) * (len(settings.sigmas) * len(settings.lengths) + 1)
