"""Which kernel runs on how many threads: pure arithmetic, the same for a GPU and for its emulator.

An instance is a kernel compiled for a dtype, a kind of weight and a bound of the head dims. Tiles
shrink where wide rows of accumulators would not fit in registers. What has a form for tensor cores
takes it where dtype, dims, arrays and device allow.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ._params import Strided

__all__ = [
    "KERNELS",
    "TENSOR_KERNELS",
    "Instance",
    "Launch",
    "Limits",
    "fit_tensor_cores",
    "instance_for",
    "instances",
    "launches",
    "scale_parts",
    "split_heads",
]

KERNELS = ("forward", "backward_queries", "backward_keys", "backward_slopes")
TENSOR_KERNELS = {
    "forward": "forward_tensor",
    "backward_queries": "backward_queries_tensor",
    "backward_keys": "backward_keys_tensor",
}
"""The kernels that do the same on tensor cores."""
TALL_KERNELS = ("forward_tensor",)
"""The kernels whose owned tiles may be twice as tall."""
DTYPES = ("float16", "bfloat16", "float32", "float64")
DIMS = (64, 128, 256)
"""Bounds of max(D, Dv) that kernels are compiled for."""
MAX_DIM = DIMS[-1]
TENSOR_DIMS = DIMS[:2]
_TENSOR_SAMPLES = 2048
"""The most samples on tensor cores: weights, rounded to 16 bits, count up to there."""
COLUMNS = 64
TALL, TALL_FROM = 2 * COLUMNS, 256
"""Rows of a tall tile, and the bandwidth from which a head has them. They halve what visited tiles
ask of the L2 cache, but a row visits COLUMNS more columns, which is much of a narrow band."""
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
    processors: int = 132
    """Multiprocessors."""
    tensor: bool = True
    """Whether there are tensor cores and copies in the background (compute capability 8.0)."""


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
    def tensor(self) -> bool:
        """Whether products are those of tensor cores."""
        return self.kernel in TENSOR_KERNELS.values()

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 2 * self.rows if self.tensor else 256

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
            "PLSH_TENSOR": str(int(self.tensor)),
            "PLSH_STEEPEST": repr(largest / 2**31),  # no product with a distance overflows
            "PLSH_PARAMS_BYTES": str(params_bytes),
        }

    def shared_bytes(self, dim: int, value_dim: int) -> int:
        """Return the dynamic shared memory of a block, piece by piece as the kernel takes it."""
        if self.kernel == "backward_slopes":
            return self.threads * 8
        if self.tensor:
            pitch = 2 * (self.dim + 8)
            pieces = [pitch * COLUMNS] * 2 + [pitch * self.rows, 8 * self.rows]
            if self.kernel == "forward_tensor":
                pieces.append(8 * COLUMNS)
            else:
                pieces += [pitch * self.rows, 2 * 8 * COLUMNS]
            if self.kernel == "backward_queries_tensor":
                pieces.append(8 * self.threads // 4)
            if self.kernel == "backward_keys_tensor":
                pieces += [2 * 4 * COLUMNS] * 2
        else:
            pieces = self._pieces(dim, value_dim)
        if self.step:
            pieces += [4 * _WORD] * 2 + [4 * _LABELS * max(self.rows, COLUMNS)]
            pieces += [8 * self.threads // 32, 4 * self.rows, 4 * COLUMNS]
        return sum(-(-piece // 16) * 16 for piece in pieces)

    def _pieces(self, dim: int, value_dim: int) -> list[int]:
        """Return what the tiles of the kernels without tensor cores take."""
        size = 8 if self.accumulator == "double" else 4
        row, value_row = (-(-d // CHUNK) * CHUNK + 4 for d in (dim, value_dim))
        pieces = [size * self.rows * row]
        if self.kernel != "forward":
            pieces.append(size * self.rows * value_row)
        pieces += [size * COLUMNS * (CHUNK + 4), size * self.rows * (COLUMNS + 4)]
        pieces += [8 * self.rows, 8 * COLUMNS]
        if self.kernel == "backward_queries":
            pieces.append(8 * self.threads // 16)
        if self.kernel == "backward_keys":
            pieces += [size * COLUMNS] * 2
        return pieces


def fit_tensor_cores(
    dtype: str, dim: int, value_dim: int, samples: int, limits: Limits, arrays: Iterable[Strided]
) -> bool:
    """Return whether tensor cores can do a call.

    They copy tokens in whole pieces of 16 bytes: head dims are multiples of 8 and lie together,
    addresses and other strides are multiples of 16 bytes.
    """
    return (
        limits.tensor
        and dtype in ("float16", "bfloat16")
        and max(dim, value_dim) <= TENSOR_DIMS[-1]
        and dim % 8 == value_dim % 8 == 0
        and samples <= _TENSOR_SAMPLES
        and all(
            x.strides[-1] == 2 and not any(at % 16 for at in (x.address, *x.strides[:-1]))
            for x in arrays
        )
    )


def scale_parts(scale: float, dtype: str, tensor: bool) -> tuple[float, float]:
    """Return (factor of q, factor of the products): neither leaves the range before both do.

    So one above 1 goes onto the products, one below into q. On tensor cores q has 16 bits: bfloat16
    takes a power of two without a loss, and float16 needs none, whose products are in range.
    """
    if abs(scale) > 1:
        return 1.0, scale
    if not tensor:
        return scale, 1.0
    if dtype == "float16":
        return 1.0, scale
    fraction, exponent = math.frexp(scale)
    return 2.0 ** (exponent - 1), 2 * fraction


def instance_for(
    kernel: str,
    dtype: str,
    step: bool,
    dim: int,
    value_dim: int,
    limits: Limits,
    *,
    tensor: bool = False,
) -> Instance:
    """Return the instance that serves these head dims: the largest tiles that the device can hold.

    On tensor cores where `tensor` says that they can do the call, and the kernel has that form.
    Where not even the smallest tiles fit, `launches` refuses.
    """
    if kernel == "backward_slopes":
        return Instance(kernel, dtype, False, DIMS[0], COLUMNS)
    bound = next(bound for bound in DIMS if max(dim, value_dim) <= bound)
    if tensor and kernel in TENSOR_KERNELS:
        return Instance(TENSOR_KERNELS[kernel], dtype, step, bound, COLUMNS)
    accumulator = "double" if dtype == "float64" else "float"
    found = Instance(kernel, dtype, step, bound, _ROWS[kernel, accumulator][bound])
    while found.shared_bytes(dim, value_dim) > limits.shared_bytes and found.rows > _LEAST_ROWS:
        found = replace(found, rows=found.rows // 2)
    return found


def split_heads(
    instance: Instance, bandwidths: Sequence[int], *, batch: int, length: int, limits: Limits
) -> list[tuple[Instance, tuple[int, ...]]]:
    """Return the heads that each instance serves: in the order of the work, the longest first.

    Wide bands have tall tiles, where there are enough of them to fill the device.
    """
    order = tuple(sorted(range(len(bandwidths)), key=lambda h: -bandwidths[h]))
    wide = sum(min(bandwidth, length) >= TALL_FROM for bandwidth in bandwidths)
    if instance.kernel not in TALL_KERNELS or batch * wide * -(-length // TALL) < limits.processors:
        wide = 0
    split = (replace(instance, rows=TALL), order[:wide]), (instance, order[wide:])
    return [(instance, heads) for instance, heads in split if heads]


def instances(limits: Limits) -> list[Instance]:
    """Return what a device needs to serve every dtype, kind of weight and bound of the dims."""
    found = [
        instance_for(kernel, dtype, step, dim, dim, limits)
        for kernel in KERNELS
        for dtype in DTYPES
        for step in ((False, True) if kernel != "backward_slopes" else (False,))
        for dim in (DIMS if kernel != "backward_slopes" else DIMS[:1])
    ]
    on_tensor_cores = [
        instance_for(kernel, dtype, step, dim, dim, limits, tensor=True)
        for kernel in TENSOR_KERNELS
        for dtype in ("float16", "bfloat16")
        for step in (False, True)
        for dim in TENSOR_DIMS
        if limits.tensor
    ]
    tall = [replace(x, rows=TALL) for x in on_tensor_cores if x.kernel in TALL_KERNELS]
    return found + on_tensor_cores + tall


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
        Launch(instance, first, min(limits.grid, blocks - first), instance.threads, shared, tiles)
        for first in range(0, blocks, limits.grid)
    ]
