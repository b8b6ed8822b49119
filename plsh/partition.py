"""Partitions of the position axis into contiguous blocks, as integers.

A *label* names a block by its first position, never below 0. Labels do not depend on the range
they are looked up in, so the labels of a chunk, a shard or a decoding step are slices of the
labels of the whole sequence. The first block of a range may begin before the range.
"""

from collections.abc import Iterator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from . import compat

__all__ = ["Partition", "PartitionSet"]

MAX_POSITION = 1 << 30
"""Positions are below this, so that positions, distances and labels fit in int32."""


def as_range(start: SupportsIndex, stop: SupportsIndex) -> tuple[int, int]:
    """Check that ``[start, stop)`` is a range of positions."""
    first, last = _index("start", start), _index("stop", stop)
    if not 0 <= first <= last <= MAX_POSITION:
        raise ValueError(
            f"start and stop must satisfy 0 <= start <= stop <= 2**30, got {first} and {last}"
        )
    return first, last


def _index(name: str, value: object) -> int:
    """Return an integer as an int; a bool is none."""
    number = compat.as_int(value)
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return number


def _integers(name: str, values: npt.ArrayLike, ndim: int) -> npt.NDArray[np.int32]:
    array = np.asarray(values)
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    if array.size and (array.min() < 0 or array.max() > MAX_POSITION):
        raise ValueError(f"{name} must lie in [0, 2**30], got {array.min()} … {array.max()}")
    frozen = array.astype(np.int32)
    frozen.flags.writeable = False
    return frozen


class Partition:
    """One partition of the positions ``[start, stop)`` into contiguous blocks.

    Parameters
    ----------
    start, stop : int
        The range of positions, ``0 <= start <= stop <= 2**30``.
    edges : sequence of int
        First position of each block in increasing order, then `stop`. The first may lie before
        `start` (a block that begins before the range); the second, if any block follows, may not.
        An empty range has the one edge `stop`.

    Raises
    ------
    TypeError
        `edges` are not integers.
    ValueError
        The range or the edges break a rule above.

    Notes
    -----
    Spec: PAR-1, PAR-2. Immutable; equal when range and edges are.

    Examples
    --------
    >>> p = Partition(2, 7, [0, 4, 5, 7])
    >>> p.labels().tolist(), p.sizes().tolist()
    ([0, 0, 4, 5, 5], [2, 1, 2])
    """

    __slots__ = ("_edges", "_start", "_stop")

    def __init__(self, start: int, stop: int, edges: npt.ArrayLike) -> None:
        self._start, self._stop = as_range(start, stop)
        self._edges = _integers("edges", edges, 1)
        inner = self._edges[1:-1]
        if self._edges.size == 0 or self._edges[-1] != self._stop:
            raise ValueError(f"edges must end with stop = {self._stop}, got {self._edges.tolist()}")
        if self._start == self._stop:
            if self._edges.size != 1:
                raise ValueError(f"an empty range has edges [{self._stop}], got {self._edges}")
        elif self._edges.size < 2 or self._edges[0] > self._start:
            raise ValueError(
                f"edges must begin at or before start = {self._start}, got {self._edges.tolist()}"
            )
        if inner.size and inner[0] <= self._start:
            raise ValueError(
                f"only the first edge may be <= start = {self._start}, got {self._edges.tolist()}"
            )
        if np.any(np.diff(self._edges) <= 0):
            raise ValueError(f"edges must increase, got {self._edges.tolist()}")

    @property
    def start(self) -> int:
        """First position of the range."""
        return self._start

    @property
    def stop(self) -> int:
        """Position after the last of the range."""
        return self._stop

    @property
    def edges(self) -> npt.NDArray[np.int32]:
        """First position of each block, then `stop`; int32, read-only."""
        return self._edges

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the number of positions of each block inside the range, ``(blocks,)``."""
        return np.diff(np.maximum(self._edges, self._start)).astype(np.int64)

    def labels(self) -> npt.NDArray[np.int32]:
        """Return the label of each position, ``(stop - start,)`` int32."""
        return np.repeat(self._edges[:-1], self.sizes())

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return M, dense: True where two positions share a block. ``(n, n)``: for small n."""
        labels = self.labels()
        shared: npt.NDArray[np.bool_] = labels[:, None] == labels[None, :]
        return shared

    def intersect(self, other: "Partition") -> "Partition":
        """Return the coarsest partition that refines both: its mask is the product of theirs."""
        if not isinstance(other, Partition):
            raise TypeError(f"other must be a Partition, got {other!r}")
        if (self._start, self._stop) != (other.start, other.stop):
            raise ValueError(
                "other must cover the same range: "
                f"[{self._start}, {self._stop}) against [{other.start}, {other.stop})"
            )
        edges = np.union1d(self._edges, other.edges)
        before = int(np.searchsorted(edges, self._start, side="right")) - 1
        return Partition(self._start, self._stop, edges[max(before, 0) :])

    def __len__(self) -> int:
        return self._edges.size - 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        return (self._start, self._stop) == (other.start, other.stop) and np.array_equal(
            self._edges, other.edges
        )

    def __hash__(self) -> int:
        return hash((self._start, self._stop, self._edges.tobytes()))

    def __repr__(self) -> str:
        return f"Partition({self._start}, {self._stop}, {_short(self._edges)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Partition, (self._start, self._stop, self._edges)


class PartitionSet:
    """Partitions of one range of positions: `samples` of them for each head.

    Parameters
    ----------
    labels : array_like of int, shape ``(heads, samples, n)``
        For each position its block's first position: non-decreasing along the last axis, never
        above the position, and equal to the position wherever it changes.
    start : int, default 0
        Position of the first column. The first block of a row may have begun before it.

    Raises
    ------
    TypeError
        `labels` are not integers.
    ValueError
        `labels` break a rule above, or there is no sample.

    Notes
    -----
    Spec: PAR-3 … PAR-6. Immutable. One head in it serves any number of attention heads. The s draws
    of a stratified set have the right mean *together*; one of them, or a subset, is biased.

    Examples
    --------
    >>> ps = PartitionSet([[[0, 0, 2, 2], [0, 1, 1, 3]]])
    >>> ps[0, 1]
    Partition(0, 4, [0, 1, 3, 4])
    >>> ps.bandwidth().tolist(), ps.mean_mask(0)[0].tolist()
    ([1], [1.0, 0.5, 0.0, 0.0])
    """

    __slots__ = ("_bandwidth", "_labels", "_samples", "_start", "_stop")

    def __init__(self, labels: npt.ArrayLike, start: int = 0) -> None:
        table = _integers("labels", labels, 3)
        first, last = as_range(start, _index("start", start) + table.shape[-1])
        if table.shape[1] < 1:
            raise ValueError(f"labels must hold at least one sample, got shape {table.shape}")
        positions = np.arange(first, last, dtype=np.int32)
        if np.any(table > positions):
            raise ValueError("labels must not exceed their positions: a block begins at its label")
        changed = table[..., 1:] != table[..., :-1]
        if np.any(changed & (table[..., 1:] != positions[1:])):
            raise ValueError("labels must equal the position wherever they change: a block begins")
        self._fill(table, first, last, table.shape[1], None)

    def _fill(self, labels: Any, start: int, stop: int, samples: int, bandwidth: Any) -> None:
        if isinstance(labels, np.ndarray) and labels.flags.writeable:  # as pickle makes them
            labels = labels.view()
            labels.flags.writeable = False
        if isinstance(labels, np.ndarray) and bandwidth is None:
            bandwidth = _reach(labels, start)  # now: when asked for, a compiler would trace it
        self._labels, self._start, self._stop = labels, start, stop
        self._samples, self._bandwidth = samples, bandwidth

    @classmethod
    def unchecked(
        cls,
        labels: Any,
        start: int,
        stop: int,
        samples: int,
        bandwidth: tuple[int, ...] | None = None,
    ) -> "PartitionSet":
        """Build a set whose invariants the caller vouches for; `labels` may be any array.

        For frameworks that rebuild objects from their leaves (a JAX pytree): `labels` is then the
        leaf, possibly traced, and `bandwidth` an upper bound per head that a redraw does not
        outgrow; None computes it, from labels in NumPy.
        """
        self = cls.__new__(cls)
        self._fill(labels, start, stop, samples, bandwidth)
        return self

    @property
    def heads(self) -> int:
        """Number of heads; 1 serves any number of attention heads."""
        return int(self._labels.shape[0])

    @property
    def samples(self) -> int:
        """Number of partitions per head, s."""
        return self._samples

    @property
    def start(self) -> int:
        """First position of the range."""
        return self._start

    @property
    def stop(self) -> int:
        """Position after the last of the range."""
        return self._stop

    def labels(self, start: int | None = None, stop: int | None = None) -> Any:
        """Return the labels of positions ``[start, stop)``, ``(heads, s, stop - start)`` int32.

        None means the end of the set's range. Costs O(stop - start): it is a view.
        """
        first = self._start if start is None else _index("start", start)
        last = self._stop if stop is None else _index("stop", stop)
        if not self._start <= first <= last <= self._stop:
            raise ValueError(
                f"start and stop must lie inside [{self._start}, {self._stop}), "
                f"the range of these partitions, got {first} and {last}"
            )
        return self._labels[..., first - self._start : last - self._start]

    def labels_at(self, start: int, stop: int) -> Any:
        """Return the labels of positions ``[start, stop)``, the ends extended beyond the range.

        For calls whose positions outside the range are padding.
        """
        if self._start <= start <= stop <= self._stop:
            return self.labels(start, stop)
        return extend_labels(self._labels, self._start, start, stop)

    def bandwidth(self) -> npt.NDArray[np.int64]:
        """Return the largest distance inside one block, for each head: ``(heads,)`` int64."""
        return np.asarray(self.bandwidths, dtype=np.int64)

    @property
    def bandwidths(self) -> tuple[int, ...]:
        """`bandwidth` as Python numbers."""
        if self._bandwidth is None:
            raise ValueError("bandwidth must be given to PartitionSet.unchecked with traced labels")
        known: tuple[int, ...] = self._bandwidth
        return known

    def mean_mask(self, head: int) -> npt.NDArray[np.float64]:
        """Return M̃ of one head, dense ``(n, n)`` float64: the mean of its masks. For small n."""
        rows = self._labels[_index("head", head)]  # (s, n)
        total = np.zeros((rows.shape[-1],) * 2)
        for row in rows:
            total += row[:, None] == row[None, :]
        return total / len(rows)

    def __getitem__(self, index: tuple[int, int]) -> Partition:
        head, sample = index
        row = self._labels[_index("head", head), _index("sample", sample)]
        if self._start == self._stop:
            return Partition(self._start, self._stop, [self._stop])
        return Partition(self._start, self._stop, np.append(np.unique(row), self._stop))

    def __iter__(self) -> Iterator[Partition]:
        raise TypeError("a PartitionSet is indexed by [head, sample]; it does not iterate")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PartitionSet):
            return NotImplemented
        return self._start == other.start and np.array_equal(self._labels, other.labels())

    def __hash__(self) -> int:
        return hash((self._start, self._labels.shape, self._labels.tobytes()))

    def __repr__(self) -> str:
        return (
            f"<PartitionSet: {self.heads} heads, {self.samples} samples, "
            f"positions [{self._start}, {self._stop})>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PartitionSet.unchecked, (
            self._labels,
            self._start,
            self._stop,
            self._samples,
            self._bandwidth,
        )


def _reach(labels: npt.NDArray[np.int32], start: int) -> tuple[int, ...]:
    """Return for each head the largest distance inside a block from `start` on."""
    if labels.shape[-1] == 0:
        return (0,) * len(labels)
    at = np.arange(start, start + labels.shape[-1], dtype=np.int32)
    return tuple(int((at - np.maximum(head, start)).max()) for head in labels)


def extend_labels(labels: Any, first: int, start: int, stop: int) -> Any:
    """Return labels of ``[start, stop)`` from labels that begin at `first`, ends repeated."""
    if labels.shape[-1] == 0:
        return np.zeros((*labels.shape[:-1], stop - start), dtype=np.int32)
    index = np.clip(np.arange(start, stop) - first, 0, labels.shape[-1] - 1)
    if compat.kind(labels) != "array-api":
        return labels[..., index]
    xp = compat.namespace(labels)
    return xp.take(labels, xp.asarray(index, device=compat.device(labels)), axis=-1)


def _short(values: npt.NDArray[Any]) -> str:
    """List integers, the middle left out of a long list."""
    if values.size <= 12:
        return str(values.tolist())
    head, tail = (", ".join(map(str, part.tolist())) for part in (values[:6], values[-3:]))
    return f"[{head}, …, {tail}]"
