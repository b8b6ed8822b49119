"""Hashes by the written standard: from a seed to labels, in Python integers and 60 digits.

Written from the text of the specification, and sharing no code with `plsh` or NumPy: its own
Philox, its own quantiles, its own floor division. Slow, and meant to be read.
"""

import struct
from collections.abc import Sequence
from fractions import Fraction

import mpmath

ONE = 1 << 24  # fixed point: one token
LIMIT = 1 << 30  # positions and widths, in tokens
WORD = (1 << 64) - 1

Seed = int | Sequence[int]
Bin = tuple[int | None, int]  # (W, S); W is None for one block over everything


# --- random words ---------------------------------------------------------------------------------


def philox_block(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    """Return the four words of Philox4x64-10 under a key of two words, a counter of four."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & WORD, (left >> 64) ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return [c0, c1, c2, c3]


def word(key: Sequence[int], index: int, counter: Sequence[int] = (0, 0, 0, 0)) -> int:
    """Return word number `index` of the stream. The counter is incremented before each block."""
    count = sum(c << 64 * i for i, c in enumerate(counter)) + 1 + index // 4
    block = [(count >> 64 * i) & WORD for i in range(4)]
    return philox_block(key, block)[index % 4]


def words(key: Sequence[int], count: int, counter: Sequence[int] = (0, 0, 0, 0)) -> list[int]:
    """Return the first `count` words of the stream."""
    return [word(key, i, counter) for i in range(count)]


def fold(seed: Seed) -> int:
    """Fold a tuple (base, layer, step, …) into one word, from the left."""
    if isinstance(seed, int):
        return seed
    folded, *rest = seed
    for x in rest:
        folded = word((folded, x), 0, (0, 0, 0, 2))
    return folded


# --- widths and shifts ----------------------------------------------------------------------------


def shift_count(samples: int) -> int:
    """Return m: the largest divisor with 100 m^2 <= 81 s and s/m >= 5, else 1."""
    return max(
        (m for m in range(1, samples + 1) if samples % m == 0 and 100 * m * m <= 81 * samples
         and samples // m >= 5),
        default=1,
    )  # fmt: skip


def levels(seed: Seed, head: int, samples: int, sampler: str) -> list[tuple[Fraction, Fraction]]:
    """Return for each sample the level p of its width and the share t of its shift."""
    m = shift_count(samples) if sampler == "stratified" else 1
    drawn = samples // m
    strata = drawn if sampler == "stratified" else 1
    unit = [Fraction(2 * (x >> 12) + 1, 1 << 53) for x in words((fold(seed), head), 2 * drawn)]
    return [
        ((g % strata + unit[2 * g]) / strata, (j + unit[2 * g + 1]) / m)
        for g in range(drawn)
        for j in range(m)
    ]


def gamma2_quantile(p: Fraction) -> mpmath.mpf:
    """Solve ``1 - (1 + x) exp(-x) = p`` by Lambert's function, to 60 digits at least."""
    with mpmath.workdps(90):
        q = 1 - mpmath.mpf(p.numerator) / p.denominator
        return -1 - mpmath.lambertw(-q / mpmath.e, -1).real


def power_law_quantile(p: Fraction, r1: float) -> mpmath.mpf:
    """Solve ``1 - (1 + (1 + r1) y) (1 + y)^-(1 + r1) = p``, to 60 digits at least.

    Bisection in ln y, then Newton's method: the left side increases from 0 to 1.
    """
    with mpmath.workdps(90):
        target = mpmath.log(1 - mpmath.mpf(p.numerator) / p.denominator)
        a = 1 + mpmath.mpf(r1)

        def excess(y: mpmath.mpf) -> mpmath.mpf:
            return mpmath.log1p(a * y) - a * mpmath.log1p(y) - target

        low, high = mpmath.mpf(-100), mpmath.mpf(1)
        while excess(mpmath.exp(high)) > 0:
            high *= 2
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(mpmath.exp(middle)) > 0 else (low, middle)
        y = mpmath.exp((low + high) / 2)
        for _ in range(40):
            step = excess(y) / (a / (1 + a * y) - a / (1 + y))
            y -= step
            if abs(step) < abs(y) * mpmath.mpf(10) ** -75:
                return y
    raise ArithmeticError(f"no quantile at p = {p}, r1 = {r1}")


def nearest(w: mpmath.mpf) -> int:
    """Return 2^24 w, w clamped to [1, 2^30], as the nearest integer."""
    with mpmath.workdps(90):
        scaled = ONE * min(max(w, mpmath.mpf(1)), mpmath.mpf(LIMIT))
        whole = int(mpmath.floor(scaled))
        rest = scaled - whole
        if 0 < abs(rest - 0.5) < mpmath.mpf(10) ** -50:
            raise ArithmeticError("60 digits do not decide the rounding")
        if rest == 0.5:  # a tie: only a constant width can have one
            return whole + whole % 2
        return whole + (rest > 0.5)


def sigma_of(slope: float) -> float:
    """Return the decay length of a slope, which is first rounded to float32."""
    single = struct.unpack("f", struct.pack("f", slope))[0]
    return 1.0 / single if single else float("inf")


def bins(
    family: str, parameters: Sequence[float], samples: int, sampler: str, seed: Seed, head: int
) -> list[Bin]:
    """Return (W, S) of each sample of one head, for a family of equal widths."""
    if family == "FixedBlocks":
        return [(nearest(mpmath.mpf(parameters[0])), 0)] * samples
    if family == "RandomBinning" and parameters[0] == float("inf"):
        return [(None, 0)] * samples
    result: list[Bin] = []
    for p, t in levels(seed, head, samples, sampler):
        with mpmath.workdps(90):
            if family == "RandomBinning":
                w = mpmath.mpf(parameters[0]) * gamma2_quantile(p)
            else:
                r1, r2 = parameters
                w = power_law_quantile(p, r1) / mpmath.mpf(r2)
        width = nearest(w)
        result.append((width, t.numerator * width // t.denominator))
    return result


# --- labels ---------------------------------------------------------------------------------------


def bin_label(bin_: Bin, position: int) -> int:
    """Return the first position of the block of `position`, never below 0."""
    width, shift = bin_
    if width is None:
        return 0
    block = (position * ONE - shift) // width
    return max(0, -(-(block * width + shift) // ONE))  # the least p with p 2^24 - S >= block W


def cut_threshold(sigma: float) -> int:
    """Return the probability of a cut, 1 - exp(-1/sigma), in units of 2^-53, half to even."""
    if sigma == float("inf"):
        return 0
    with mpmath.workdps(90):
        scaled = -mpmath.expm1(-1 / mpmath.mpf(sigma)) * (1 << 53)
        return int(mpmath.nint(scaled))


def cut_label(threshold: int, seed: Seed, head: int, sample: int, position: int) -> int:
    """Return the last cut at or before `position`, else 0."""
    if threshold == 0:
        return 0
    key = (fold(seed), head)
    while position >= 1 and word(key, position, (0, 0, sample, 1)) >> 11 >= threshold:
        position -= 1
    return max(position, 0)


def labels(
    family: str,
    parameters: Sequence[float],
    samples: int,
    sampler: str,
    seed: Seed,
    head: int,
    start: int,
    stop: int,
) -> list[list[int]]:
    """Return the labels of positions ``[start, stop)`` of one head, ``[samples][n]``."""
    if family == "IndependentCuts":
        threshold = cut_threshold(parameters[0])
        return [
            [cut_label(threshold, seed, head, r, p) for p in range(start, stop)]
            for r in range(samples)
        ]
    drawn = bins(family, parameters, samples, sampler, seed, head)
    return [[bin_label(b, p) for p in range(start, stop)] for b in drawn]
