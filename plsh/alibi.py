"""Slopes of attention with linear biases (Press, Smith & Lewis 2022)."""

import math

import numpy as np
import numpy.typing as npt

from . import compat

__all__ = ["alibi_slopes"]


def alibi_slopes(heads: int, max_bias: float = 8.0) -> npt.NDArray[np.float64]:
    """Return the published ALiBi slopes of each head.

    For a power of two, head ``k = 1 … heads`` has slope ``2**(-max_bias * k / heads)``. Otherwise
    the slopes of the next lower power of two `c` come first, then every other slope of the series
    for ``2 * c``, as in the authors' code (BLOOM, MPT and Baichuan use the same). That order is
    not monotone, and differs from one geometric series over `heads`.

    Parameters
    ----------
    heads : int
        Number of query heads, >= 0.
    max_bias : float, default 8.0
        Exponent of the smallest slope of a power-of-two series; > 0. Long-context models use 16.

    Returns
    -------
    numpy.ndarray
        Slopes per token, shape ``(heads,)``, float64, largest bias first.

    Raises
    ------
    TypeError
        `heads` is not an integer or `max_bias` is not a number.
    ValueError
        `heads` is negative, or `max_bias` is not positive and finite.

    Notes
    -----
    Spec: ALB-1. Source: Press et al. 2022 and their released code.

    Examples
    --------
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    # Here, as torch.compile traces `slopes_of` and can't ask for NumPy's types by `|`.
    if isinstance(max_bias, np.generic | np.ndarray) and max_bias.ndim == 0:
        max_bias = max_bias.item()
    return np.asarray(slopes_of(heads, max_bias), dtype=np.float64)


def slopes_of(heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """`alibi_slopes` as Python numbers, which hash and which compilers fold."""
    count = compat.as_int(heads)
    if count is None:
        raise TypeError(f"heads must be an integer, got {heads!r}")
    if isinstance(max_bias, bool) or not isinstance(max_bias, int | float):
        raise TypeError(f"max_bias must be a number, got {max_bias!r}")
    if count < 0:
        raise ValueError(f"heads must be >= 0, got {heads}")
    if not 0 < max_bias < math.inf:
        raise ValueError(f"max_bias must be positive and finite, got {max_bias}")
    if count == 0:
        return ()
    power = 1 << (int(count).bit_length() - 1)
    series = tuple(2.0 ** (-max_bias * k / power) for k in range(1, power + 1))
    between = tuple(2.0 ** (-max_bias * k / (2 * power)) for k in range(1, 2 * power, 2))
    return series + between[: count - power]
