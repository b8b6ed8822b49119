"""The operators on CUDA tensors: Triton kernels, one pass over the band.

`_band` says which tiles a program visits and which pairs count; `_forward`, `_backward` and
`_diagonals` are the kernels, `_plan` how they are cut, and `_call` launches them. Triton is
imported by the first call.
"""

from typing import Any

from torch import Tensor

from plsh import UnsupportedByBackendError

from .._recipe import Given, Recipe
from ._available import reason

__all__ = ["call"]


def call(q: Tensor, k: Tensor, v: Tensor, given: Given, recipe: Recipe) -> Any:
    """Return a call on the device of its tensors, or say why there can't be one."""
    why = reason(q.device, q.dtype, max(q.shape[3], v.shape[3]))
    if why is not None:
        raise UnsupportedByBackendError(
            f"backend 'torch' can't run this on {q.device}: {why}; take plsh.attention(…, "
            "backend='reference'), which runs on torch's own operations where the tensors are"
        )
    from ._call import Call

    return Call(q, k, v, given, recipe)
