"""Positional hash families: from a seed to integers, equal on every machine and at every length.

A family says how wide blocks are; drawing from it gives a *hash*, the integers that place every
position in a block: `Bins` (equal widths, W and S in units of 2^-24 token) or `Cuts`. Nothing
here depends on a length, a device or a framework.
"""

import decimal
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import compat
from .partition import MAX_POSITION, PartitionSet, as_range

__all__ = ["FixedBlocks", "IndependentCuts", "PowerLawBinning", "RandomBinning"]

MAX_SAMPLES = 1 << 20
SAMPLERS = ("iid", "stratified")
UNIT = 1 << 24
"""Fixed point: widths and shifts are integers in units of 2^-24 token."""

_ONE_BLOCK = 1 << 62
_EXACT = decimal.Context(prec=80, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)

Seed: TypeAlias = int | tuple[int, ...]
IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float64]


# --- the stream of random words -----------------------------------------------------------------


def words(key: tuple[int, int], count: int, counter: tuple[int, int, int] = (0, 0, 0)) -> Any:
    """Return raw 64-bit words of Philox under (key, counter), ``(count,)`` uint64.

    `counter` holds the three upper words of the 256-bit counter's start, less the first: the
    stream begins at ``[counter[0], 0, counter[1], counter[2]]``.
    """
    start = np.array([counter[0], 0, counter[1], counter[2]], dtype=np.uint64)
    return np.random.Philox(key=np.array(key, dtype=np.uint64), counter=start).random_raw(count)


def check_seed(seed: object) -> Seed:
    """Return `seed` as an int or a tuple of ints, each in ``[0, 2**64)``."""
    if isinstance(seed, tuple | list):
        if not seed:
            raise ValueError("seed must be an int or a non-empty tuple of ints, got an empty one")
        return tuple(_word("seed", part) for part in seed)
    return _word("seed", seed)


def check_head_ids(head_ids: object) -> tuple[int, ...] | None:
    """Return `head_ids` as a tuple of ints, each in ``[0, 2**64)``; None stays."""
    if head_ids is None:
        return None
    if isinstance(head_ids, str | bytes) or not hasattr(head_ids, "__iter__"):
        raise TypeError(f"head_ids must be a sequence of ints, got {head_ids!r}")
    return tuple(_word("head_ids", h) for h in head_ids)


def check_samples(samples: object, most: float = MAX_SAMPLES) -> int:
    """Return `samples` as an int from 1 to `most`."""
    count = compat.as_int(samples)
    if count is None:
        raise TypeError(f"samples must be an integer, got {samples!r}")
    if count < 1:
        raise ValueError(f"samples must be >= 1, got {count}")
    if count > most:
        raise ValueError(f"samples must be <= {most}, got {count}")
    return count


def check_sampler(sampler: object, family: "Family | None") -> str | None:
    """Check a sampler's name, and that the family has samplers at all; None stays."""
    if sampler is None:
        return None
    if not isinstance(sampler, str):
        raise TypeError(f"sampler must be one of {SAMPLERS}, got {sampler!r}")
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {SAMPLERS}, got {sampler!r}")
    if family is not None and not family.has_samplers:
        raise ValueError(
            f"{type(family).__name__} draws no widths, so it has no sampler, got {sampler!r}; "
            "pass sampler=None"
        )
    return sampler


def _word(name: str, value: object) -> int:
    word = compat.as_int(value)
    if word is None:
        raise TypeError(f"{name} must be made of integers, got {value!r}")
    if not 0 <= word < 1 << 64:
        raise ValueError(f"{name} must lie in [0, 2**64), got {word}")
    return word


def fold_seed(seed: Seed) -> int:
    """Fold a tuple (base, layer, step, …) into one word, from the left."""
    if isinstance(seed, int):
        return seed
    folded = seed[0]
    for part in seed[1:]:
        folded = int(words((folded, part), 1, (0, 0, 2))[0])
    return folded


def shift_count(samples: int) -> int:
    """Return m, how many samples of a stratified draw share a width stratum.

    The largest divisor of s at most 0.9 sqrt(s) that leaves at least five strata, else 1.
    """
    fits = [
        m
        for m in range(1, math.isqrt(samples) + 1)
        if samples % m == 0 and 100 * m * m <= 81 * samples and samples // m >= 5
    ]
    return max(fits, default=1)


# --- hashes: integers that place positions in blocks ----------------------------------------------


class Bins:
    """Blocks of equal width: position p is in block ``floor((p * 2**24 - S) / W)``.

    ``width`` W and ``shift`` S are int64 ``(heads, samples)`` in units of 2^-24 token.
    """

    __slots__ = ("shift", "width")

    def __init__(self, width: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]) -> None:
        self.width, self.shift = width, shift

    def head(self, h: int) -> "Bins":
        """Return the hash of one head."""
        return Bins(self.width[h : h + 1], self.shift[h : h + 1])

    def labels(self, start: int, stop: int) -> IntArray:
        """Return the labels of positions ``[start, stop)``, ``(heads, samples, n)`` int32."""
        out = np.zeros((*self.width.shape, stop - start), dtype=np.int32)
        lo = max(start, 0)  # a negative position has the label of position 0
        if lo >= stop:
            return out
        for h, r in np.ndindex(self.width.shape):
            width, shift = int(self.width[h, r]), int(self.shift[h, r])
            index = (lo * UNIT - shift) // width
            later = np.arange(index + 1, ((stop - 1) * UNIT - shift) // width + 1, dtype=np.int64)
            first = (later * width + (shift + UNIT - 1)) >> 24  # block k begins at ceil(k W + S)
            before = max(0, -((-index * width - shift) // UNIT))
            sizes = np.diff(first, prepend=lo, append=stop)
            out[h, r, lo - start :] = np.repeat(np.concatenate(([before], first)), sizes)
        return out

    def bounds(self, positions: npt.NDArray[np.int64]) -> tuple[IntArray, IntArray]:
        """Return (first position, position after the last) of the blocks at `positions`.

        Two int32 arrays ``(heads, samples, len(positions))``; ends are clipped to 2^30.
        """
        at = np.maximum(np.asarray(positions, dtype=np.int64), 0)
        width, shift = self.width[..., None], self.shift[..., None]
        index = (at * UNIT - shift) // width  # (heads, samples, len(positions))
        first = np.maximum(-((-index * width - shift) // UNIT), 0)
        end = np.where(width == _ONE_BLOCK, MAX_POSITION, -((-(index + 1) * width - shift) // UNIT))
        return first.astype(np.int32), np.minimum(end, MAX_POSITION).astype(np.int32)

    def bandwidth(self) -> tuple[int, ...]:
        """Return for each head the largest distance inside a block, over all positions."""
        longest = np.minimum(-(-self.width // UNIT), MAX_POSITION)  # (heads, samples)
        return tuple(int(w) - 1 for w in longest.max(axis=1))


class Cuts:
    """Blocks between independent cuts: one may fall before any position >= 1.

    ``threshold`` holds for each head the probability of a cut in units of 2^-53.
    """

    __slots__ = ("head_ids", "samples", "seed", "threshold")

    def __init__(
        self, threshold: tuple[int, ...], samples: int, seed: int, head_ids: tuple[int, ...]
    ) -> None:
        self.threshold, self.samples, self.seed, self.head_ids = threshold, samples, seed, head_ids

    def head(self, h: int) -> "Cuts":
        """Return the hash of one head."""
        return Cuts(self.threshold[h : h + 1], self.samples, self.seed, self.head_ids[h : h + 1])

    def labels(self, start: int, stop: int) -> IntArray:
        """Return the labels of positions ``[start, stop)``, ``(heads, samples, n)`` int32.

        The first label needs the last cut before `start`: O(stop - start + 1/probability).
        """
        out = np.zeros((len(self.threshold), self.samples, stop - start), dtype=np.int32)
        lo = max(start, 0)
        if lo >= stop:
            return out
        at = np.arange(lo, stop, dtype=np.int32)
        for h, r in np.ndindex(out.shape[:2]):
            if self.threshold[h]:
                last = np.where(self._cut(h, r, lo, stop), at, 0)
                last[0] = last[0] or self._last_cut(h, r, lo)
                np.maximum.accumulate(last, out=out[h, r, lo - start :])
        return out

    def bounds(self, positions: npt.NDArray[np.int64]) -> tuple[IntArray, IntArray]:
        """Return (first position, position after the last) of the blocks at `positions`.

        Two int32 arrays ``(heads, samples, len(positions))``; ends are clipped to 2^30. Costs as
        much as the labels of the range that `positions` span.
        """
        at = np.maximum(np.asarray(positions, dtype=np.int64), 0)
        shape = (len(self.threshold), self.samples, at.size)
        start = np.zeros(shape, dtype=np.int32)
        end = np.full(shape, MAX_POSITION, dtype=np.int32)
        if at.size == 0:
            return start, end
        lo, hi = int(at.min()), int(at.max()) + 1
        labels = self.labels(lo, hi)
        for h, r in np.ndindex(shape[:2]):
            row = labels[h, r]
            start[h, r] = row[at - lo]
            if self.threshold[h]:
                edges = np.append(np.flatnonzero(np.diff(row)) + lo + 1, self._next_cut(h, r, hi))
                end[h, r] = edges[np.searchsorted(edges, at, side="right")]
        return start, end

    def bandwidth(self) -> tuple[int, ...]:
        """Return for each head the largest distance inside a block: no bound holds everywhere."""
        return (MAX_POSITION - 1,) * len(self.threshold)

    def _cut(self, h: int, r: int, lo: int, hi: int) -> npt.NDArray[np.bool_]:
        """Whether a cut falls before each position of ``[lo, hi)``."""
        block = lo // 4  # the counter counts blocks of four words
        raw = words((self.seed, self.head_ids[h]), hi - 4 * block, (block, r, 1))[lo - 4 * block :]
        cut: npt.NDArray[np.bool_] = (raw >> np.uint64(11)) < np.uint64(self.threshold[h])
        return cut

    def _last_cut(self, h: int, r: int, before: int) -> int:
        while before > 0:
            lo = max(0, before - 4096)
            found = np.flatnonzero(self._cut(h, r, lo, before))
            if found.size:
                return lo + int(found[-1])
            before = lo
        return 0

    def _next_cut(self, h: int, r: int, after: int) -> int:
        while after < MAX_POSITION:
            hi = min(MAX_POSITION, after + 4096)
            found = np.flatnonzero(self._cut(h, r, after, hi))
            if found.size:
                return after + int(found[0])
            after = hi
        return MAX_POSITION


# --- families -------------------------------------------------------------------------------------


def _parameter(name: str, value: Any, low: float, *, infinite: bool) -> Any:
    """Return a parameter as a float or a tuple of floats (one per head), checked."""
    values = compat.as_python(value)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        checked = tuple(_parameter(name, v, low, infinite=infinite) for v in values)
        if any(isinstance(v, tuple) for v in checked):
            raise ValueError(f"{name} must be a number or one number per head, got {value!r}")
        return checked
    if isinstance(values, bool) or not isinstance(values, int | float):
        raise TypeError(f"{name} must be a number or one number per head, got {value!r}")
    if isinstance(values, int) and abs(values) > 1 << 1000:
        raise ValueError(f"{name} must be in the range of float64, got an int of its own size")
    number = float(values)
    if not (number > low and (infinite or number < math.inf)):
        limit = "" if infinite else " and finite"
        raise ValueError(f"{name} must be > {low:g}{limit}, got {number}")
    return number


@dataclass(frozen=True, slots=True)
class Family:
    """What the families share: parameters per head, and `sample`."""

    @property
    def has_samplers(self) -> bool:
        """Whether the family draws widths, so that a sampler applies."""
        return False

    @property
    def heads(self) -> int | None:
        """Number of heads that the parameters name; None where all are scalars."""
        lengths = {len(p) for p in self._parameters() if isinstance(p, tuple)}
        return lengths.pop() if lengths else None

    def _parameters(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))

    def _check_lengths(self) -> None:
        lengths = sorted({len(p) for p in self._parameters() if isinstance(p, tuple)})
        if len(lengths) > 1:
            raise ValueError(
                f"parameters of {type(self).__name__} must have one length, got {lengths}"
            )

    def per_head(self, heads: int) -> list[tuple[float, ...]]:
        """Return the parameters of each of `heads` heads."""
        if self.heads is not None and self.heads != heads:
            raise ValueError(
                f"family {type(self).__name__} has parameters for {self.heads} heads, got {heads}"
            )
        return [
            tuple(p[h] if isinstance(p, tuple) else p for p in self._parameters())
            for h in range(heads)
        ]

    def hash(
        self, samples: int, sampler: str | None, seed: Seed, head_ids: tuple[int, ...]
    ) -> Bins | Cuts:
        """Draw the integers of `samples` partitions for each head (arguments already checked)."""
        raise NotImplementedError

    def sample(
        self,
        samples: int,
        n: int,
        *,
        start: int = 0,
        seed: Seed = 0,
        sampler: str | None = None,
        head_ids: Sequence[int] | None = None,
    ) -> PartitionSet:
        """Draw `samples` partitions of the positions ``[start, start + n)`` for each head.

        Parameters
        ----------
        samples : int
            Number of partitions per head, s >= 1.
        n : int
            Number of positions, >= 0.
        start : int, default 0
            First position; the blocks do not depend on it.
        seed : int or tuple of int, default 0
            In ``[0, 2**64)`` each; a tuple (base, layer, step, …) is folded into one.
        sampler : {"iid", "stratified"}, optional
            None: "stratified" for families of widths; the others have no sampler.
        head_ids : sequence of int, optional
            Stream of each head. None: 0, 1, … for as many heads as the parameters have, at
            least one.

        Returns
        -------
        PartitionSet
            Of ``len(head_ids)`` heads.

        Raises
        ------
        TypeError, ValueError
            An argument breaks a rule above; the message names it.

        Notes
        -----
        Spec: HSH-1 … HSH-9.

        Examples
        --------
        >>> RandomBinning(4.0).sample(2, 6, seed=1).labels().shape
        (1, 2, 6)
        """
        count = check_samples(samples)
        length, begin = compat.as_int(n), compat.as_int(start)
        if length is None or begin is None:
            name, value = ("n", n) if length is None else ("start", start)
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if length < 0:
            raise ValueError(f"n must be >= 0, got {length}")
        first, last = as_range(begin, begin + length)
        check_sampler(sampler, self)
        ids = check_head_ids(head_ids)
        if ids is None:
            ids = tuple(range(1 if self.heads is None else self.heads))
        labels = self.hash(count, sampler, check_seed(seed), ids).labels(first, last)
        labels.flags.writeable = False
        return PartitionSet.unchecked(labels, first, last, count)

    def weight(self, distance: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return E[M], the weight of two positions `distance` tokens apart.

        Parameters
        ----------
        distance : array_like
            Distances in tokens; the sign is ignored.

        Returns
        -------
        numpy.ndarray
            float64, of the shape of `distance`, with a leading axis of heads if the parameters
            have one.

        Raises
        ------
        TypeError
            `distance` is not made of real numbers.

        Examples
        --------
        >>> float(RandomBinning(2.0).weight(2).round(4))
        0.3679
        """
        given = np.asarray(distance)
        if given.dtype.kind not in "iuf" and given.dtype.name != "bfloat16":
            raise TypeError(f"distance must be made of real numbers, got {distance!r}")
        d = np.abs(given.astype(np.float64))
        heads = self.heads
        with np.errstate(over="ignore"):  # a distance of very many lengths has weight 0
            rows = [self._weight(d, *p) for p in self.per_head(1 if heads is None else heads)]
        return np.asarray(rows[0] if heads is None else np.reshape(rows, (heads, *d.shape)))

    def _weight(self, d: npt.NDArray[np.float64], *parameters: float) -> Any:
        raise NotImplementedError


class _WidthFamily(Family):
    """A family of random widths: E[M] is convex, and widths have a distribution function."""

    __slots__ = ()

    @property
    def has_samplers(self) -> bool:
        return True

    def hash(
        self, samples: int, sampler: str | None, seed: Seed, head_ids: tuple[int, ...]
    ) -> Bins:
        """Draw the integers of `samples` partitions for each head (arguments already checked)."""
        m = shift_count(samples) if sampler != "iid" else 1
        strata = samples // m if sampler != "iid" else 1
        draws, key = samples // m, fold_seed(seed)
        width = np.empty((len(head_ids), samples), dtype=np.int64)
        shift = np.empty_like(width)
        # All heads at once: a quantile costs little, a call of NumPy a microsecond.
        drawn: list[tuple[int, list[int]]] = []
        levels: list[int] = []
        each: list[tuple[float, ...]] = []
        for h, parameters in enumerate(self.per_head(len(head_ids))):
            if self._is_one_block(*parameters):
                width[h], shift[h] = _ONE_BLOCK, 0
                continue
            raw = words((key, head_ids[h]), 2 * draws)
            odd = (2 * (raw >> np.uint64(12)) + np.uint64(1)).tolist()  # U = odd / 2^53 in (0, 1)
            drawn.append((h, odd[1::2]))
            levels += [(g % strata << 53) + u for g, u in enumerate(odd[0::2])]
            each += [parameters] * draws
        widths = iter(self._fixed_widths(levels, strata << 53, *zip(*each, strict=True)))
        for h, shifts in drawn:
            own = [next(widths) for _ in shifts]
            width[h] = np.repeat(np.array(own, dtype=np.int64), m)
            shift[h] = [
                ((j << 53) + t) * w // (m << 53)
                for w, t in zip(own, shifts, strict=True)
                for j in range(m)
            ]
        return Bins(width, shift)

    def _is_one_block(self, *parameters: float) -> bool:
        return False

    def _below(self, w: Decimal, *parameters: Decimal) -> tuple[Decimal, Decimal]:
        """Return P(width < w) and the density at w, to about 60 digits."""
        raise NotImplementedError

    def _guess(self, p: FloatArray, q: FloatArray, *parameters: FloatArray) -> tuple[Any, float]:
        """Return widths in tokens at P = p = 1 - q, and a bound of their relative error."""
        raise NotImplementedError

    def _fixed_widths(
        self, levels: list[int], scale: int, *parameters: float | Sequence[float]
    ) -> list[int]:
        """Return W = 2^24 * Q(level / scale), clamped to [1, 2^30] tokens and correctly rounded.

        A parameter is one number, or one for each level.
        """
        if not levels:
            return []
        p = np.array([level / scale for level in levels])
        q = np.array([(scale - level) / scale for level in levels])
        each = [np.broadcast_to(np.array(x, dtype=np.float64), p.shape) for x in parameters]
        with np.errstate(over="ignore"):  # absurd parameters; the clamp follows
            approx, error = self._guess(p, q, *each)
        scaled = np.clip(approx, 1.0, float(MAX_POSITION)) * UNIT
        margin = np.abs(scaled - np.floor(scaled) - 0.5)
        certain = (margin > scaled * error + 2.0**-20) & (scaled < 2.0**48)
        rounded = [int(w) for w in np.rint(scaled)]
        for i in np.flatnonzero(~certain).tolist():
            level = _EXACT.divide(Decimal(levels[i]), Decimal(scale))
            exact = [Decimal(float(x[i])) for x in each]
            rounded[i] = _round_quantile(self._below, exact, level, rounded[i])
        return rounded


def _round_quantile(
    distribution: Callable[..., tuple[Decimal, Decimal]],
    parameters: list[Decimal],
    level: Decimal,
    guess: int,
) -> int:
    """Return the integer W with ``P(2^24 w < W - 1/2) < level <= P(2^24 w < W + 1/2)``.

    Newton's steps inside a bracket that bisection shrinks; the last comparison is the proof. A tie,
    of which none is known, goes down.
    """

    def below(half_units: int) -> tuple[Decimal, Decimal]:
        with decimal.localcontext(_EXACT):
            return distribution(Decimal(half_units) / (2 * UNIT), *parameters)

    lowest, highest = UNIT, MAX_POSITION * UNIT
    if below(2 * lowest)[0] >= level:
        return lowest
    if below(2 * highest)[0] <= level:
        return highest
    low, high = lowest, highest  # P(low) < level < P(high), and low <= W <= high
    width = min(max(guess, low), high)
    while True:
        under, density = below(2 * width - 1)
        if under >= level:
            high = width - 1
        elif below(2 * width + 1)[0] >= level:
            return width
        else:
            low = width + 1
        if density > 0:
            with decimal.localcontext(_EXACT):
                step = (level - under) / density * UNIT + Decimal(width) - Decimal("0.5")
                width = int(step.to_integral_value()) if abs(step) < highest * 4 else -1
        else:
            width = -1
        if not low <= width <= high:
            width = (low + high) // 2


@dataclass(frozen=True, slots=True)
class RandomBinning(_WidthFamily):
    """Widths Gamma(2, sigma), uniform shifts: E[M] = exp(-distance / sigma), which is ALiBi.

    Parameters
    ----------
    sigma : float or sequence of float
        Decay length in tokens, 1/slope; one number, or one per head. > 0; infinity is one block.

    Raises
    ------
    TypeError, ValueError
        `sigma` is not a number, or not positive.

    Notes
    -----
    Spec: HSH-5. Source: Rahimi & Recht 2007; Wolfson & Wagner 2026, section 2.

    Examples
    --------
    >>> RandomBinning(4.0).sample(3, 5, seed=7).heads
    1
    """

    sigma: float | tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", _parameter("sigma", self.sigma, 0.0, infinite=True))

    def _is_one_block(self, sigma: float) -> bool:  # type: ignore[override]
        return sigma == math.inf

    def _weight(self, d: npt.NDArray[np.float64], sigma: float) -> Any:  # type: ignore[override]
        return np.exp(-d / sigma)

    def _below(self, w: Decimal, sigma: Decimal) -> tuple[Decimal, Decimal]:  # type: ignore[override]
        x = w / sigma
        decay = (-x).exp()
        return 1 - (1 + x) * decay, x * decay / sigma

    def _guess(self, p: FloatArray, q: FloatArray, sigma: FloatArray) -> tuple[Any, float]:  # type: ignore[override]
        # 2^-44 is 16 times the largest error met on 10^6 levels, sigma in [1/4, 2^20].
        return sigma * _gamma2_quantile(p, q), 2.0**-44


def _gamma2_quantile(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64]) -> Any:
    """Solve ``1 - (1 + x) exp(-x) = p = 1 - q`` in float64.

    Newton's method on ``x - ln(1 + x) = -ln q`` converges from above, from the bound that
    ``x - ln(1 + x) >= x^2 / (2 + 2x)`` gives. Near 0 it cancels, so the last step is on the
    series of p.
    """
    target = np.where(p < 0.5, -np.log1p(-np.minimum(p, 0.5)), -np.log(q))
    x = target + np.sqrt(target * target + 2 * target)
    for _ in range(6):
        x = x - (x - np.log1p(x) - target) * (1 + x) / x
    series = np.zeros_like(x)
    for k in range(30, 1, -1):
        series = series * x + 1 / math.factorial(k)
    decay = np.exp(-x)
    small = x - (x * x * series * decay - p) / (x * decay)
    large = x + ((1 + x) * decay - q) / (x * decay)
    return np.where(x < 2, small, large)


@dataclass(frozen=True, slots=True)
class PowerLawBinning(_WidthFamily):
    """Widths whose E[M] is the power law ``(1 + r2 * distance) ** -r1`` (KERPLE, logarithmic).

    Parameters
    ----------
    r1 : float or sequence of float
        Exponent, > 0; one number, or one per head. For r1 <= 1 the mean width is infinite and the
        cap of 2^30 tokens cuts it.
    r2 : float or sequence of float
        Inverse length per token, > 0; likewise.

    Raises
    ------
    TypeError, ValueError
        A parameter is not a number, not positive or not finite, or the lengths differ.

    Notes
    -----
    Spec: HSH-6. Source: Chi et al. 2022 (KERPLE); the mixture of widths is that of random binning.

    Examples
    --------
    >>> PowerLawBinning(1.0, 0.5).weight([0, 2]).tolist()
    [1.0, 0.5]
    """

    r1: float | tuple[float, ...]
    r2: float | tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "r1", _parameter("r1", self.r1, 0.0, infinite=False))
        object.__setattr__(self, "r2", _parameter("r2", self.r2, 0.0, infinite=False))
        self._check_lengths()

    def _weight(self, d: npt.NDArray[np.float64], r1: float, r2: float) -> Any:  # type: ignore[override]
        return (1 + r2 * d) ** -r1

    def _below(self, w: Decimal, r1: Decimal, r2: Decimal) -> tuple[Decimal, Decimal]:  # type: ignore[override]
        y = r2 * w
        tail = ((1 + y).ln() * -(1 + r1)).exp()
        return 1 - (1 + (1 + r1) * y) * tail, r1 * (1 + r1) * y * tail / (1 + y) * r2

    def _guess(  # type: ignore[override]
        self, p: FloatArray, q: FloatArray, r1: FloatArray, r2: FloatArray
    ) -> tuple[Any, float]:
        # Only a start: no error is claimed, so every width is proven in exact arithmetic.
        a = 1 + r1
        low, high = np.log(r2), np.log(r2) + 21
        for _ in range(40):
            middle = (low + high) / 2
            y = np.exp(middle)
            over = np.log1p(a * y) - a * np.log1p(y) < np.log(q)
            low, high = np.where(over, low, middle), np.where(over, middle, high)
        return np.exp(low) / r2, math.inf


@dataclass(frozen=True, slots=True)
class IndependentCuts(Family):
    """Cuts before each position, independent with probability 1 - exp(-1/sigma).

    E[M] = exp(-distance / sigma) as for `RandomBinning`, exact on integers; blocks are geometric
    and the longest grows with the length.

    Parameters
    ----------
    sigma : float or sequence of float
        Decay length in tokens, 1/slope; one number, or one per head. > 0; infinity is one block.

    Raises
    ------
    TypeError, ValueError
        `sigma` is not a number, or not positive.

    Notes
    -----
    Spec: HSH-8. The family has no sampler: ``PositionalLSH(family=…, sampler=None)``.

    Examples
    --------
    >>> IndependentCuts(float("inf")).sample(1, 4).labels().tolist()
    [[[0, 0, 0, 0]]]
    """

    sigma: float | tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", _parameter("sigma", self.sigma, 0.0, infinite=True))

    def _weight(self, d: npt.NDArray[np.float64], sigma: float) -> Any:  # type: ignore[override]
        return np.exp(-d / sigma)

    def hash(
        self, samples: int, sampler: str | None, seed: Seed, head_ids: tuple[int, ...]
    ) -> Cuts:
        """Draw the integers of `samples` partitions for each head (arguments already checked)."""
        threshold = tuple(_cut_threshold(sigma) for (sigma,) in self.per_head(len(head_ids)))
        return Cuts(threshold, samples, fold_seed(seed), head_ids)


def _cut_threshold(sigma: float) -> int:
    """Return rint(2^53 (1 - exp(-1/sigma))), exactly rounded."""
    if sigma == math.inf:
        return 0
    with decimal.localcontext(_EXACT):
        chance = 1 - (-1 / Decimal(sigma)).exp()
        return int((chance * (1 << 53)).to_integral_value())


@dataclass(frozen=True, slots=True)
class FixedBlocks(Family):
    """The same blocks of one width in every sample: the paper's baseline.

    Parameters
    ----------
    width : float or sequence of float
        Block width in tokens, > 0, clamped to [1, 2^30]; one number, or one per head.

    Raises
    ------
    TypeError, ValueError
        `width` is not a number, or not positive and finite.

    Notes
    -----
    Spec: HSH-7. E[M] depends on the position; `weight` is its mean over positions,
    ``max(0, 1 - distance / width)``. The family has no sampler.

    Examples
    --------
    >>> FixedBlocks(2).sample(1, 5).labels().tolist()
    [[[0, 0, 2, 2, 4]]]
    """

    width: float | tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", _parameter("width", self.width, 0.0, infinite=False))

    def _weight(self, d: npt.NDArray[np.float64], width: float) -> Any:  # type: ignore[override]
        return np.maximum(0.0, 1 - d / min(max(width, 1.0), float(MAX_POSITION)))

    def hash(
        self, samples: int, sampler: str | None, seed: Seed, head_ids: tuple[int, ...]
    ) -> Bins:
        """Return the integers of `samples` equal partitions for each head."""
        clamped = [min(max(w, 1.0), float(MAX_POSITION)) for (w,) in self.per_head(len(head_ids))]
        fixed = np.array([round(Fraction(w) * UNIT) for w in clamped], dtype=np.int64)
        width = np.repeat(fixed[:, None], samples, axis=1)
        return Bins(width, np.zeros_like(width))
