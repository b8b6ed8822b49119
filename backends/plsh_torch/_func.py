"""The operators under ``torch.func``, whose gradients need an autograd function of this form.

``torch.library.register_autograd`` makes functions that functorch refuses.
"""

from typing import Any

import torch
from torch import Tensor

from . import _ops, _vmap


class Attend(torch.autograd.Function):
    """`plsh_torch::attend`, differentiable by ``torch.func.grad``, ``vjp`` and ``jacrev``."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        """Call the operator, one transform further out."""
        found: tuple[Tensor, Tensor] = _ops.attend(*args)
        return found

    setup_context = staticmethod(_ops.save)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Map, and stay differentiable further out."""
        return _vmap.map_forward(info, in_dims, *args, operator=Attend.apply)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        """Differentiate, once."""
        return _ops.differentiate(ctx, grad_out, grad_lse, operator=AttendBackward.apply)

    jvp = staticmethod(_ops.refuse_forward)  # forward over reverse mode, as `hessian` does


class AttendBackward(torch.autograd.Function):
    """`plsh_torch::attend_backward`, which has no derivative."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        """Call the operator, one transform further out."""
        found: tuple[Tensor, ...] = _ops.attend_backward(*args)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Map."""
        return _vmap.map_backward(info, in_dims, *args, operator=AttendBackward.apply)

    backward = staticmethod(_ops.refuse)
    jvp = staticmethod(_ops.refuse_forward)


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None
