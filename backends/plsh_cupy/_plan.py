"""Which kernel runs on how many threads: pure arithmetic, the same for a GPU and for its emulator.

An instance is a kernel compiled for a dtype, a kind of weight and a bound of the head dims. Tiles
shrink where wide rows of accumulators would not fit in registers.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

__all__ = ["KERNELS", "Instance", "Launch", "Limits", "instance_for", "instances", "launches"]

KERNELS = ("forward", "backward_queries", "backward_keys", "backward_slopes")
DTYPES = ("float16", "bfloat16", "float32", "float64")
DIMS = (64, 128, 256)
"""Bounds of max(D, Dv) that kernels are compiled for."""
MAX_DIM = DIMS[-1]
THREADS = 256
COLUMNS = 64
CHUNK = 32
_WORD, _LABELS = 32, 16

_FLOATS = {"float16": "Half", "bfloat16": "BFloat16", "float32": "float", "float64": "double"}

# Rows of the owned tile by (kernel, accumulator, bound of the dims): the most without spills.
_ROWS = {
    ("forward", "float"): {64: 64, 128: 64, 256: 32},
    ("forward", "double"): {64: 32, 128: 32, 256: 16},
    ("backward_queries", "float"): {64: 64, 128: 64, 256: 32},
    ("backward_queries", "double"): {64: 32, 128: 32, 256: 16},
    ("backward_keys", "float"): {64: 64, 128: 32, 256: 32},
    ("backward_keys", "double"): {64: 32, 128: 32, 256: 16},
}
_LEAST_ROWS = 16


class Limits(NamedTuple):
    """What a device allows."""

    shared_bytes: int
    """Dynamic shared memory of one block, after opting in."""
    grid: int
    """Blocks of one launch."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A kernel compiled for one dtype, kind of weight, bound of the head dims and size of tiles.

    `rows` are the tokens of the tile that a block owns.
    """

    kernel: str
    dtype: str
    step: bool
    dim: int
    rows: int

    @property
    def symbol(self) -> str:
        """Name of the kernel in its module."""
        return f"plsh_{self.kernel}"

    @property
    def accumulator(self) -> str:
        """C++ type of the accumulation dtype."""
        return "double" if self.dtype == "float64" else "float"

    def macros(self, params_bytes: int) -> dict[str, str]:
        """Return what the source leaves open."""
        largest = 1.7976931348623157e308 if self.accumulator == "double" else 3.4028234663852886e38
        return {
            "PLSH_FLOAT": _FLOATS[self.dtype],
            "PLSH_ACCUMULATOR": self.accumulator,
            "PLSH_STEP": str(int(self.step)),
            "PLSH_DIM": str(self.dim),
            "PLSH_ROWS": str(self.rows),
            "PLSH_STEEPEST": repr(largest / 2**31),  # no product with a distance overflows
            "PLSH_PARAMS_BYTES": str(params_bytes),
        }

    def shared_bytes(self, dim: int, value_dim: int) -> int:
        """Return the dynamic shared memory of a block, piece by piece as the kernel takes it."""
        if self.kernel == "backward_slopes":
            return THREADS * 8
        size = 8 if self.accumulator == "double" else 4
        row, value_row = (-(-d // CHUNK) * CHUNK + 4 for d in (dim, value_dim))
        pieces = [size * self.rows * row]
        if self.kernel != "forward":
            pieces.append(size * self.rows * value_row)
        pieces += [size * COLUMNS * (CHUNK + 4), size * self.rows * (COLUMNS + 4)]
        pieces += [8 * self.rows, 8 * COLUMNS]
        if self.kernel == "backward_queries":
            pieces.append(8 * THREADS // 16)
        if self.kernel == "backward_keys":
            pieces += [size * COLUMNS] * 2
        if self.step:
            pieces += [4 * _WORD] * 2 + [4 * _LABELS * COLUMNS, 8 * THREADS // 32]
            pieces += [4 * self.rows, 4 * COLUMNS]
        return sum(-(-piece // 16) * 16 for piece in pieces)


def instance_for(
    kernel: str, dtype: str, step: bool, dim: int, value_dim: int, limits: Limits
) -> Instance:
    """Return the instance that serves these head dims: the largest tiles that the device can hold.

    Where not even the smallest tiles fit, `launches` refuses.
    """
    if kernel == "backward_slopes":
        return Instance(kernel, dtype, False, DIMS[0], COLUMNS)
    bound = next(bound for bound in DIMS if max(dim, value_dim) <= bound)
    accumulator = "double" if dtype == "float64" else "float"
    found = Instance(kernel, dtype, step, bound, _ROWS[kernel, accumulator][bound])
    while found.shared_bytes(dim, value_dim) > limits.shared_bytes and found.rows > _LEAST_ROWS:
        found = replace(found, rows=found.rows // 2)
    return found


def instances(limits: Limits) -> list[Instance]:
    """Return what a device needs to serve every dtype, kind of weight and bound of the dims."""
    return [
        instance_for(kernel, dtype, step, dim, dim, limits)
        for kernel in KERNELS
        for dtype in DTYPES
        for step in ((False, True) if kernel != "backward_slopes" else (False,))
        for dim in (DIMS if kernel != "backward_slopes" else DIMS[:1])
    ]


class Launch(NamedTuple):
    """One launch of an instance: blocks [first_block, first_block + grid) of the whole."""

    instance: Instance
    first_block: int
    grid: int
    block: int
    shared_bytes: int
    tiles: int
    """Tiles of one head and batch row, of all launches together."""


def launches(
    instance: Instance,
    *,
    batch: int,
    heads: int,
    length: int,
    dim: int,
    value_dim: int,
    limits: Limits,
) -> list[Launch]:
    """Return the launches that cover `length` owned tokens of each head and batch row.

    Several where one grid is too small, none where there is nothing to own. Raises ValueError where
    a block needs more shared memory than the device has.
    """
    shared = instance.shared_bytes(dim, value_dim)
    if shared > limits.shared_bytes:
        raise ValueError(
            f"q, k and v must have head dims whose tiles fit the device: {instance.symbol} for "
            f"{instance.dtype} with D = {dim}, Dv = {value_dim} needs {shared} bytes of shared "
            f"memory a block, the device has {limits.shared_bytes}; use a smaller head dim or dtype"
        )
    tiles = -(-length // instance.rows)
    blocks = batch * heads * (1 if instance.kernel == "backward_slopes" else tiles)
    return [
        Launch(instance, first, min(limits.grid, blocks - first), THREADS, shared, tiles)
        for first in range(0, blocks, limits.grid)
    ]
