"""The paper's reduction on PyTorch's own kernels: short attentions without a bias, pooled by lse.

`BACKEND` needs no torch to be imported.
"""

from ._backend import BACKEND

__all__ = ["BACKEND"]
