"""The rules of ``torch.vmap`` for the operators: one more batch axis, folded into the first."""

from typing import Any

import torch
from torch import Tensor

from ._ops import TENSORS, attend, attend_backward
from ._recipe import Given, Recipe

FULL = 3
"""q, k and v lead the arguments of both operators."""


def _fold(x: Tensor, axis: int | None, size: int) -> Tensor:
    """Fold a mapped axis into the batch axis: ``(B, …) -> (size * B, …)``."""
    whole = x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
    return whole.flatten(0, 1)


def _fold_operand(x: Tensor, axis: int | None, size: int, batch: int, ndim: int) -> Tensor:
    """Fold an operand whose batch axis may be absent; `ndim` counts its axes without that."""
    whole = x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
    if whole.ndim == ndim + 1:
        whole = whole[:, None].expand(size, batch, *whole.shape[1:])
    return whole.flatten(0, 1)


def _fold_request(
    given: Given, axes: Any, recipe: Recipe, size: int, batch: int, heads: int
) -> tuple[Given, Recipe]:
    """Fold the operands, and repeat what is listed per batch row."""
    folded = {
        name: None if x is None else _fold_operand(x, axis, size, batch, ndim)
        for name, x, axis, ndim in zip(given._fields[:3], given, axes[:3], (1, 0, 0), strict=False)
    }
    for name, x, axis in zip(given._fields[3:5], given[3:5], axes[3:5], strict=True):
        folded[name] = None if x is None else _fold(x, axis, size)
    lists = {
        name: getattr(recipe, name) * (size if len(getattr(recipe, name)) > one else 1)
        for name, one in (("q_offset", 1), ("k_offset", 1), ("slopes", heads))
    }
    return given._replace(**folded), recipe._replace(**lists)


def _unfold(x: Tensor, size: int) -> Tensor:
    return x.view(size, x.shape[0] // max(size, 1), *x.shape[1:])


def _one_by_one(operator: Any, info: Any, in_dims: Any, args: Any) -> tuple[Any, Any]:
    """Call the operator for each slice: partitions can't be folded into the batch."""
    results = []
    for i in range(info.batch_size):
        slices = [
            x.select(axis, i) if isinstance(x, Tensor) and axis is not None else x
            for x, axis in zip(args, in_dims, strict=True)
        ]
        results.append(operator(*slices))
    found = tuple(torch.stack(x) for x in zip(*results, strict=True))
    return found, (0,) * len(found)


def map_forward(
    info: Any, in_dims: tuple[Any, ...], *args: Any, operator: Any = attend
) -> tuple[Any, Any]:
    """Map `attend`, or what stands for it under ``torch.func``."""
    at = FULL + TENSORS
    given, axes = Given(*args[FULL:at]), Given(*in_dims[FULL:at])
    if axes.labels is not None:
        return _one_by_one(operator, info, in_dims, args)
    size = info.batch_size
    q, k, v = (_fold(x, axis, size) for x, axis in zip(args[:FULL], in_dims[:FULL], strict=True))
    batch, heads = q.shape[0] // max(size, 1), q.shape[1]
    given, recipe = _fold_request(given, axes, Recipe(*args[at:]), size, batch, heads)
    out, lse = operator(q, k, v, *given, *recipe)
    return (_unfold(out, size), _unfold(lse, size)), (0, 0)


def map_backward(
    info: Any, in_dims: tuple[Any, ...], *args: Any, operator: Any = attend_backward
) -> tuple[Any, Any]:
    """Map `attend_backward`; a slope that serves several batch rows sums its gradient over them."""
    tokens = FULL + 4  # and out, lse and their gradients
    wanted, at = args[tokens], tokens + 1 + TENSORS
    given, axes = Given(*args[tokens + 1 : at]), Given(*in_dims[tokens + 1 : at])
    if axes.labels is not None:
        return _one_by_one(operator, info, in_dims, args)
    size = info.batch_size
    folded = [_fold(x, axis, size) for x, axis in zip(args[:tokens], in_dims[:tokens], strict=True)]
    batch, heads = folded[0].shape[0] // max(size, 1), folded[0].shape[1]
    own, recipe = _fold_request(given, axes, Recipe(*args[at:]), size, batch, heads)
    *found, by_slope = operator(*folded, wanted, *own, *recipe)
    grads = [_unfold(x, size) if wish else x for x, wish in zip(found, wanted, strict=False)]
    dims = [0 if wish else None for wish in wanted]
    if wanted[3] and given.slopes is not None:
        by_slope = _unfold(by_slope, size)  # (size, B, H)
        if given.slopes.ndim - (axes.slopes is not None) == 1:
            by_slope = by_slope.sum(dim=1)
    return (*grads, by_slope), tuple(dims)


attend.register_vmap(map_forward)
attend_backward.register_vmap(map_backward)
