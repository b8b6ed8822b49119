"""`PartitionSet` as a pytree: its labels are the leaf, its range and a bound of its blocks static.

The bound is rounded up so far that redraws of one family nearly always have the same: a training
step that is given the partitions of the step then compiles once. No block ever exceeds it.
"""

from typing import Any

import numpy as np

from plsh.partition import PartitionSet  # while plsh is being imported, it lacks the name

from ._tiling import rung

UNBOUNDED = 1 << 30
"""A bound of blocks that may be as long as the range: no position is further."""


def register() -> None:
    """Make `PartitionSet` a pytree of JAX."""
    import jax

    jax.tree_util.register_pytree_with_keys(
        PartitionSet,
        lambda x: (((jax.tree_util.GetAttrKey("labels"), _leaf(x)),), _static(x)),
        lambda static, leaves: PartitionSet.unchecked(*leaves, *static),
        lambda x: ((_leaf(x),), _static(x)),
    )


def _leaf(partitions: PartitionSet) -> Any:
    return partitions._labels


def _static(partitions: PartitionSet) -> tuple[Any, ...]:
    labels = _leaf(partitions)
    bounds = table_bounds(labels, partitions.start, partitions.bandwidths)
    return partitions.start, partitions.stop, partitions.samples, bounds


def table_bounds(labels: Any, start: int, bandwidths: tuple[int, ...]) -> tuple[int, ...]:
    """Return a bound of each head's blocks that redraws share; that of traced labels is known."""
    if not isinstance(labels, np.ndarray) or labels.ndim != 3 or 0 in labels.shape:
        return bandwidths
    size = labels.shape[2]
    middle = labels[..., size // 2]
    # The block before the one in the middle, if there is one, is whole.
    column = np.maximum(middle - start - 1, 0)
    before = np.take_along_axis(labels, column[..., None], axis=2)[..., 0]
    whole = middle > start
    widths = np.where(whole, middle - before, size // 2 + 1)
    return common_bounds(widths, bandwidths, size)


def common_bounds(
    widths: Any, bandwidths: tuple[int, ...], size: int = UNBOUNDED
) -> tuple[int, ...]:
    """Return a bound for each head from some of its blocks ``(heads, s)`` and their longest.

    The median of the widths hardly differs between draws, unlike the longest; five times as much,
    rounded up, is nearly always (gamma widths) above it. Where widths vary, bounds are 3 * 4^k, as
    coarse as the tiling, and none where a block may fill the range of `size`.
    """
    found = []
    for own, longest in zip(np.asarray(widths), bandwidths, strict=True):
        median = int(np.median(own))
        if longest <= 1.1 * median:
            bound = rung(longest, 2)
        else:
            bound = 3
            while bound < max(longest, 5 * median):
                bound *= 4
        found.append(bound if bound < size else max(longest, UNBOUNDED))
    return tuple(found)
