"""From a request to the operator; everything here is traceable by ``torch.compile``."""

from typing import Any

import torch
from torch import Tensor

from plsh import UnsupportedByBackendError
from plsh.backend import AttentionOutput, Request

from ._func import Attend, is_transformed
from ._ops import attend as operator
from ._ops import refuse_tangents
from ._recipe import encode

DEVICES = ("cpu", "cuda", "meta")


def attend(q: Tensor, k: Tensor, v: Tensor, request: Request) -> AttentionOutput:
    """Compute attention of checked tensors ``(B, H, N, D)``."""
    if q.device.type not in DEVICES:
        raise UnsupportedByBackendError(
            f"backend 'torch' runs on CPU and CUDA tensors, got {q.device}; move q, k and v by "
            ".cpu(), or take plsh.attention(…, backend='reference'), which runs where they are"
        )
    given, recipe = encode(request, _labels(request.arrays.labels))
    if torch.compiler.is_compiling():
        return AttentionOutput(*operator(q, k, v, *given, *recipe))
    refuse_tangents(q, k, v, request.arrays.slopes)
    run: Any = Attend.apply if is_transformed() else operator
    return AttentionOutput(*run(q, k, v, *given, *recipe))


def _labels(labels: Any) -> Tensor | None:
    """Return a table's labels as a tensor: a copy where they are NumPy's, which are read-only."""
    if labels is None or isinstance(labels, Tensor):
        return labels
    if torch.compiler.is_compiling():
        return torch.as_tensor(labels)
    return torch.tensor(labels, dtype=torch.int32, device="cpu")
