"""The methods: how the positional weight is chosen.

Each is a frozen value: it hashes, compares, pickles and prints, so equal objects share one
compiled program. ``resolve`` turns a method and the slopes into what a backend is handed.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from . import compat
from .hashing import (
    Family,
    RandomBinning,
    Seed,
    check_head_ids,
    check_sampler,
    check_samples,
    check_seed,
)
from .partition import PartitionSet
from .weights import UNLIMITED, DecayWeight, StepWeight, TableWeight, Weight

__all__ = ["Exact", "Method", "PositionalLSH", "Window"]

DEFAULT_TOL = 1e-6


@dataclass(frozen=True, slots=True)
class Exact:
    """Exact ALiBi: weight ``exp(-slope * |i - j|)``, no limit. Quadratic time; the yardstick.

    Notes
    -----
    Spec: MTH-1.

    Examples
    --------
    >>> Exact() == Exact()
    True
    """


@dataclass(frozen=True, slots=True)
class Window:
    """Exact ALiBi up to a distance: weight ``exp(-slope * |i - j|)`` for ``|i - j| <= width``.

    Parameters
    ----------
    width : int or sequence of int, optional
        Largest distance in tokens that is seen, >= 0; one number, or one per head.
    tol : float, optional
        Instead of a width: in ``(0, 1)``; head h sees ``ceil(ln(1/tol) / slope_h)`` tokens, so
        that the largest weight left out is below `tol`. A slope of 0 sets no limit. With neither
        given, 1e-6.

    Raises
    ------
    TypeError
        A width is not an integer, or `tol` not a number.
    ValueError
        Both are given; a width is negative; `tol` is outside (0, 1).

    Notes
    -----
    Spec: MTH-2. The time is near-linear for slopes that do not shrink with the length. By `tol`,
    the slopes must be concrete; by `width` they may be traced and learned. What is left out is
    bounded, row by row, by `plsh.theory.truncation_error_bound`.

    Examples
    --------
    >>> Window(128), Window(tol=1e-3)
    (Window(width=128, tol=None), Window(width=None, tol=0.001))
    """

    width: int | tuple[int, ...] | None = None
    tol: float | None = None

    def __init__(
        self, width: int | Sequence[int] | None = None, *, tol: float | None = None
    ) -> None:
        if width is not None and tol is not None:
            raise ValueError(f"give width or tol, not both; got width={width!r}, tol={tol!r}")
        if width is None and tol is None:
            tol = DEFAULT_TOL
        object.__setattr__(self, "width", None if width is None else _check_width(width))
        object.__setattr__(self, "tol", None if tol is None else _check_tol(tol))


@dataclass(frozen=True, slots=True)
class PositionalLSH:
    """Positional LSH: the weight is the share of `samples` random partitions that agree.

    Parameters
    ----------
    samples : int, default 16
        Partitions per head, s >= 1. The error falls as s**-1/2 (iid) or faster (stratified);
        multiples of 4 stratify best.
    sampler : {"stratified", "iid"} or None, default "stratified"
        How widths and shifts are drawn; "iid" is the paper's. None takes the family's own way,
        and must be given for a family that draws no widths.
    seed : int or tuple of int, default 0
        In ``[0, 2**64)``. Give each layer, and each training step, its own: (base, layer, step).
    family : hash family, optional
        None: `RandomBinning` with sigma = 1/slope. A family carries its own widths; slopes must
        then be None.
    head_ids : sequence of int, optional
        Stream of each head; None: 0, 1, … A shard of the heads passes the ids of its own.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above; the message names it.

    Notes
    -----
    Spec: MTH-3. Source: Wolfson & Wagner 2026, algorithm of section 2.

    Examples
    --------
    >>> PositionalLSH(8, seed=(1, 0)).samples
    8
    """

    samples: int = 16
    sampler: str | None = "stratified"
    seed: Seed = 0
    family: Family | None = None
    head_ids: tuple[int, ...] | None = None

    def __init__(
        self,
        samples: int = 16,
        *,
        sampler: str | None = "stratified",
        seed: Seed = 0,
        family: Family | None = None,
        head_ids: Sequence[int] | None = None,
    ) -> None:
        if family is not None and not isinstance(family, Family):
            raise TypeError(f"family must be a hash family of plsh, got {family!r}")
        object.__setattr__(self, "samples", check_samples(samples))
        object.__setattr__(self, "sampler", check_sampler(sampler, family))
        object.__setattr__(self, "seed", check_seed(seed))
        object.__setattr__(self, "family", family)
        object.__setattr__(self, "head_ids", check_head_ids(head_ids))


Method: TypeAlias = Exact | Window | PositionalLSH | PartitionSet

_BY_NAME: dict[str, Any] = {"exact": Exact, "window": Window, "lsh": PositionalLSH}


class Resolved(NamedTuple):
    """A method with its slopes: what goes into a request."""

    weight: Weight
    slopes: Any  # operand: None, (H,) or (B, H), numbers or array
    labels: Any  # operand: None, or (heads or 1, s, n) int32


def check_method(method: object) -> Method:
    """Return `method` as one of the method objects."""
    if isinstance(method, str) and method in _BY_NAME:
        made: Method = _BY_NAME[method]()
        return made
    if not isinstance(method, Exact | Window | PositionalLSH | PartitionSet):
        raise TypeError(
            f"method must be one of {tuple(_BY_NAME)}, Exact(), Window(), PositionalLSH() or a "
            f"PartitionSet, got {method!r}"
        )
    return method


def method_name(method: Method) -> Literal["exact", "window", "lsh"]:
    """Return the name of what a method computes."""
    if isinstance(method, Exact):
        return "exact"
    return "window" if isinstance(method, Window) else "lsh"


def resolve(method: Method, slopes: Any, default: tuple[float, ...], heads: int) -> Resolved:
    """Turn a method and checked slopes (None, tuples of floats, or an array) into a weight.

    `default` holds the slopes that None means.
    """
    if isinstance(method, PartitionSet):
        return _resolve_table(method, slopes, heads)
    if isinstance(method, PositionalLSH):
        return Resolved(_step_weight(method, slopes, default, heads), None, None)
    slopes = default if slopes is None else slopes
    if isinstance(method, Exact):
        return Resolved(DecayWeight((UNLIMITED,) * heads), slopes, None)
    if method.width is None:
        tol = DEFAULT_TOL if method.tol is None else method.tol
        known = _concrete(slopes, "Window(tol=…)", "pass Window(width), which needs no slopes")
        rows = known if not known or isinstance(known[0], tuple) else (known,)
        # Slopes per batch row share one band a head: that of the flattest.
        flattest = [min(row[h] for row in rows) if rows else 0.0 for h in range(heads)]
        widths = tuple(window_width(slope, tol) for slope in flattest)
        return Resolved(DecayWeight(widths), slopes, None)
    widths = method.width if isinstance(method.width, tuple) else (method.width,) * heads
    if len(widths) != heads:
        raise ValueError(f"method Window needs one width per head ({heads}), got {len(widths)}")
    return Resolved(DecayWeight(widths), slopes, None)


def window_width(slope: float, tol: float) -> int:
    """Return ``ceil(log(1/tol) / slope)``, in float64 in this order; `UNLIMITED` for slope 0."""
    if slope == 0:
        return UNLIMITED
    width = math.log(1 / tol) / slope
    return math.ceil(width) if width < UNLIMITED else UNLIMITED


def _step_weight(
    method: PositionalLSH, slopes: Any, default: tuple[float, ...], heads: int
) -> StepWeight:
    ids = tuple(range(heads)) if method.head_ids is None else method.head_ids
    if len(ids) != heads:
        raise ValueError(f"method needs one of head_ids per head ({heads}), got {len(ids)}")
    family = method.family
    if family is not None:
        if slopes is not None:
            raise ValueError(
                f"slopes must be None with {type(family).__name__}, which carries its own widths"
            )
        family.per_head(heads)  # raises where the head counts differ
        return StepWeight(family, method.samples, method.sampler, method.seed, ids)
    if slopes is None:
        slopes = default
    elif compat.wants_gradient(slopes):
        raise ValueError(
            "slopes require grad, and no gradient flows through random blocks; detach them, or "
            "learn them under method='exact' or Window(width)"
        )
    known = _concrete(slopes, "lsh", "pass them as numbers, or a PartitionSet as method")
    if known and isinstance(known[0], tuple):
        raise ValueError(
            f"slopes under lsh must have shape (H,) = ({heads},), got one row per batch row; "
            "per-batch slopes need method 'exact' or 'window'"
        )
    sigma = tuple(decay_length(slope) for slope in known)
    return StepWeight(RandomBinning(sigma), method.samples, method.sampler, method.seed, ids)


def _resolve_table(table: PartitionSet, slopes: Any, heads: int) -> Resolved:
    if slopes is not None:
        raise ValueError("slopes must be None with a PartitionSet, which carries its own widths")
    if table.heads != 1 and table.heads != heads:  # a tuple would not find a compiler's symbol
        raise ValueError(f"method must hold partitions of 1 or {heads} heads, got {table.heads}")
    widths = table.bandwidths
    widths = widths if table.heads == heads else widths * heads
    weight = TableWeight(table.samples, table.start, table.stop, widths)
    return Resolved(weight, None, table.labels())


def _concrete(slopes: Any, method: str, remedy: str) -> tuple[Any, ...]:
    """Return the slopes as tuples of floats; read a framework's array once."""
    if isinstance(slopes, tuple):
        return slopes
    if compat.is_traced(slopes):
        raise TypeError(f"slopes must be concrete under {method}, got a traced array; {remedy}")
    return as_slopes(compat.to_host(slopes).tolist())


def as_slopes(values: Sequence[Any]) -> tuple[Any, ...]:
    """Check slopes given as (nested) numbers: finite and >= 0. Returns them as tuples."""
    checked: list[Any] = []
    for value in values:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            checked.append(as_slopes(value))
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"slopes must be real numbers, got {value!r}")
        if not 0 <= value <= sys.float_info.max:  # an int may lie above
            raise ValueError(f"slopes must be finite and >= 0, got {value!r}")
        checked.append(float(value))
    return tuple(checked)


def decay_length(slope: float) -> float:
    """Return sigma = 1/float32(slope), so that every dtype of slope draws the same blocks."""
    rounded = _float32(slope)
    return 1.0 / rounded if rounded else math.inf


def _float32(x: float) -> float:
    """Round a float >= 0 to float32, half to even; arithmetic that compilers can fold."""
    mantissa, exponent = math.frexp(x)
    unit = max(exponent - 24, -149)
    largest = (2.0 - 2.0**-23) * 2.0**127  # compilers that vary floats would vary a module's own
    return min(math.ldexp(round(math.ldexp(mantissa, exponent - unit)), unit), largest)


def _check_width(width: Any) -> int | tuple[int, ...]:
    values = compat.as_python(width)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        checked = tuple(_check_width(w) for w in values)
        if any(isinstance(w, tuple) for w in checked):
            raise ValueError(f"width must be an int or one int per head, got {width!r}")
        return checked  # type: ignore[return-value]
    number = compat.as_int(values)
    if number is None:
        raise TypeError(f"width must be an int or one int per head, got {width!r}")
    if number < 0:
        raise ValueError(f"width must be >= 0 tokens, got {number}")
    return min(number, UNLIMITED)


def _check_tol(tol: Any) -> float:
    value = compat.as_python(tol)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"tol must be a number, got {tol!r}")
    if not 0 < value < 1:
        raise ValueError(f"tol must lie in (0, 1), got {value!r}")
    return float(value)
