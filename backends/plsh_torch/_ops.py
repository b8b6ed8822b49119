"""The operators ``plsh_torch::attend`` and ``plsh_torch::attend_backward``.

To compilers they are opaque: tensors and plain values go in, and everything that draws, locks or
reads values of tensors happens inside. Import this module to register them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from plsh import UnsupportedByBackendError
from plsh.compat import without_autocast

from . import cuda
from ._band import Given as Output
from ._call import Call
from ._recipe import Given, Recipe, decode

TENSORS = len(Given._fields)


KINDS = {
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    list[int]: "SymInt[]",
    list[float]: "float[]",
}
"""How a schema names the types of a request's values."""


def schema(lead: str, results: int) -> str:
    """Return the schema of an operator: what comes first, then a request taken apart."""
    rest = [f"{KINDS[kind]} {name}" for name, kind in Given.__annotations__.items()]
    rest += [f"{KINDS[kind]} host_{name}" for name, kind in Recipe.__annotations__.items()]
    return f"({', '.join([lead, *rest])}) -> ({', '.join(['Tensor'] * results)})"


def _call(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> Any:
    """Return who computes on the tensors' device."""
    given, recipe = Given(*rest[:TENSORS]), Recipe(*rest[TENSORS:])
    if q.is_cuda:
        return cuda.call(q, k, v, given, recipe)
    return Call(q, k, v, decode(q, k, v, given, recipe))


@torch.library.custom_op(
    "plsh_torch::attend", mutates_args=(), schema=schema("Tensor q, Tensor k, Tensor v", 2)
)
def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return out ``(B, H, Nq, Dv)`` and lse ``(B, H, Nq)``; `rest` is a request taken apart."""
    with torch.no_grad(), without_autocast(q):
        found: tuple[Tensor, Tensor] = _call(q, k, v, rest).forward()
    return found


@torch.library.custom_op(
    "plsh_torch::attend_backward",
    mutates_args=(),
    schema=schema(
        "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse, "
        "bool[] wanted",
        4,
    ),
)
def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor,
    wanted: list[bool], slopes: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients by q, k, v and the slopes; an empty tensor where none is wanted."""
    with torch.no_grad(), without_autocast(q):
        flags = (wanted[0], wanted[1], wanted[2], wanted[3])
        given = Output(out, lse, grad_out, grad_lse)
        found = list(_call(q, k, v, (slopes, *rest)).backward(given, flags))
        if slopes is not None and found[3] is not None:
            by_slope = found[3] if slopes.ndim == 2 else found[3].sum(dim=0)
            found[3] = by_slope.to(slopes.dtype)
        dq, dk, dv, dm = (q.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dm


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3]
    return q.new_empty((*rows, v.shape[3])), q.new_empty(rows, dtype=_lse_dtype(q))


@attend_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor,
    wanted: list[bool], slopes: Tensor | None, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    inputs = (q, k, v, slopes)
    return tuple(
        x.new_empty(x.shape) if wish and x is not None else q.new_empty(0)
        for x, wish in zip(inputs, wanted, strict=True)
    )


# --- autograd ---


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what `differentiate` needs."""
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3 : 3 + TENSORS])
    ctx.recipe = inputs[3 + TENSORS :]


def differentiate(
    ctx: Any, grad_out: Tensor, grad_lse: Tensor, operator: Any = attend_backward
) -> tuple[Any, ...]:
    """Return the gradients by the inputs of `attend`."""
    refuse_tangents(grad_out, grad_lse)
    q, k, v, out, lse, *given = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:4])
    found = operator(q, k, v, out, lse, grad_out, grad_lse, wanted, *given, *ctx.recipe)
    grads = [x if wish else None for x, wish in zip(found, wanted, strict=True)]
    return (*grads, *(None,) * (TENSORS - 1 + len(ctx.recipe)))


attend.register_autograd(differentiate, setup_context=save)


def refuse_tangents(*inputs: Any, name: str = "torch") -> None:
    """Refuse forward-mode derivatives by name."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for x in inputs:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
            refuse_forward(name=name)


def refuse_forward(ctx: Any = None, *tangents: Any, name: str = "torch") -> Any:
    """Say who has a forward-mode derivative."""
    raise UnsupportedByBackendError(
        f"backend {name!r} has no forward-mode derivative (jvp); take "
        "plsh.attention(…, backend='reference'), or reverse mode"
    )


def refuse(ctx: Any, *grads: Any) -> Any:
    """Say who has a second derivative."""
    raise UnsupportedByBackendError(
        "backend 'torch' has no second derivative; take plsh.attention(…, backend='reference'), "
        "which differentiates any number of times"
    )


attend_backward.register_autograd(refuse)
