"""The one argument of the kernels, as bytes: the twin of ``kernels/params.cuh``."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["KINDS", "PARAMS", "Strided"]

_VIEWS = (
    "q",
    "k",
    "v",
    "out",
    "lse",
    "grad_out",
    "grad_lse",
    "grad_q",
    "grad_k",
    "grad_v",
    "q_ids",
    "k_ids",
    "q_offset",
    "k_offset",
    "slopes",
    "labels",
    "width",
    "shift",
    "order",
    "bandwidth",
    "delta",
    "by_slope",
    "grad_slopes",
)
_INTEGERS = (
    "first_block",
    "tiles",
    "batch",
    "heads",
    "kv_heads",
    "len_q",
    "len_k",
    "dim",
    "value_dim",
    "samples",
    "q_start",
    "k_start",
    "label_start",
    "label_count",
)
_REALS = (
    "scale",
    "factor",
    "after",
)
_FLAGS = (
    "causal",
    "q_ids_kind",
    "k_ids_kind",
    "q_offset_kind",
    "k_offset_kind",
    "slopes_kind",
    "grad_slopes_kind",
)
_VIEW = np.dtype([("data", "u8")] + [(x, "i8") for x in ("batch", "head", "token", "dim")])

PARAMS: np.dtype[Any] = np.dtype(
    [(x, _VIEW) for x in _VIEWS]
    + [(x, "i8") for x in _INTEGERS]
    + [(x, "f8") for x in _REALS]
    + [(x, "i4") for x in _FLAGS],
    align=True,
)

KINDS = {
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 17,
    "uint16": 18,
    "uint32": 20,
    "uint64": 24,
    "float16": 32,
    "bfloat16": 33,
    "float32": 34,
    "float64": 35,
}
"""Codes of the dtypes of operands, enum Kind of ``params.cuh``."""


class Strided(NamedTuple):
    """Where an array lies: address of its first element, and strides in bytes."""

    address: int
    strides: tuple[int, ...]

    def fill(self, params: npt.NDArray[Any], name: str, axes: str) -> None:
        """Write the view `name`; `axes` names the array's axes: b, h, n and d."""
        field = params[name]
        field["data"] = self.address
        words = {"b": "batch", "h": "head", "n": "token", "d": "dim"}
        for axis, stride in zip(axes, self.strides, strict=True):
            field[words[axis]] = stride
