"""The PyTorch backend of plsh: a single-pass band kernel as custom operators, on the CPU and CUDA.

`BACKEND` needs no torch to be imported; the module and the drop-in function load it on first use.
"""

from typing import TYPE_CHECKING, Any

import plsh

from ._backend import BACKEND

if TYPE_CHECKING:
    from ._module import ALiBiAttention
    from ._sdpa import scaled_dot_product_attention

__all__ = ["BACKEND", "ALiBiAttention", "scaled_dot_product_attention"]

# Where this package came first, plsh has left its entry point for the first call, and a compiler
# that traces that call can't follow it.
plsh.register_backend(BACKEND)


def __getattr__(name: str) -> Any:
    if name == "ALiBiAttention":
        from ._module import ALiBiAttention

        return ALiBiAttention
    if name == "scaled_dot_product_attention":
        from ._sdpa import scaled_dot_product_attention

        return scaled_dot_product_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
