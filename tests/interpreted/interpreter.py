"""The Triton kernels and their host side on CPU tensors, by Triton's interpreter, for NumPy arrays.

The interpreter's product of bfloat16 is wrong, so that such inputs are computed in float32, and
rounded as they come out.
"""

import contextlib
import dataclasses

import numpy as np
import torch
from plsh_torch._band import Given as Output
from plsh_torch._recipe import encode
from plsh_torch.cuda import _call, _plan

from plsh.backend import SPEC_VERSION, AttentionOutput, Availability, Capabilities, Gradients
from plsh.compat import dtype_name, numpy_dtype
from plsh.testing import harness_for

SMALL = _plan.Tile(32, 16, 4, 1)
"""Tiles of which short calls have several, on either side of the diagonal."""


def tensor(x):
    """Return a tensor of a NumPy array, its strides kept; tuples and numbers as they are."""
    if isinstance(x, np.ndarray):
        if dtype_name(x) == "bfloat16":
            x = x.astype(np.float32)
        if any(stride < 0 for stride in x.strides) or not x.flags.writeable:
            return torch.from_numpy(x.copy())
        return torch.from_numpy(x)
    return tuple(map(tensor, x)) if isinstance(x, tuple) else x


class InterpretedBackend:
    """The kernels as a backend of NumPy arrays; `tile` in place of those of the frozen table."""

    spec_version = SPEC_VERSION

    def __init__(self, name="torch_interpreted", tile=SMALL, module=_call):
        self.name, self.tile, self.module = name, tile, module

    def availability(self):
        return Availability(True)

    def capabilities(self):
        most = min(_plan.MAX_DIMS.values())
        return Capabilities(arrays=("numpy",), gradients="vjp", max_head_dim=most)

    def can_run(self, request):
        return None

    def harness(self):
        return harness_for("numpy")

    def call(self, tokens, request):
        fields = [field.name for field in dataclasses.fields(request.arrays)]
        operands = {name: tensor(getattr(request.arrays, name)) for name in fields}
        labels = operands["labels"]
        request = dataclasses.replace(
            request, arrays=dataclasses.replace(request.arrays, **operands)
        )
        return self.module.Call(*map(tensor, tokens), *encode(request, labels))

    @contextlib.contextmanager
    def tiles(self):
        table = self.module.tile_for
        if self.tile is not None:
            self.module.tile_for = lambda *given: self.tile
        try:
            yield
        finally:
            self.module.tile_for = table

    def attend(self, q, k, v, request):
        with self.tiles():
            out, lse = self.call((q, k, v), request).forward()
        return AttentionOutput(out.numpy().astype(q.dtype), lse.numpy())

    def vjp(self, q, k, v, output, grad_out, grad_lse, request):
        if grad_lse is None:
            grad_lse = np.zeros_like(output.lse)
        given = Output(*map(tensor, (output.out, output.lse, grad_out, grad_lse)))
        slopes = request.arrays.slopes
        with self.tiles():
            wanted = (True, True, True, slopes is not None)
            found = self.call((q, k, v), request).backward(given, wanted)
        by_slope = None
        if slopes is not None:
            by_slope = found[3].numpy()
            rows = slopes.ndim == 2 if isinstance(slopes, np.ndarray) else (
                bool(slopes) and isinstance(slopes[0], tuple)
            )  # fmt: skip
            by_slope = by_slope if rows else by_slope.sum(axis=0)
            kind = dtype_name(slopes) if isinstance(slopes, np.ndarray) else "int"
            wide = "float64" if dtype_name(q) == "float64" else "float32"
            by_slope = by_slope.astype(numpy_dtype(kind if "float" in kind else wide))
        return Gradients(*(x.numpy().astype(q.dtype) for x in found[:3]), by_slope)


BACKEND = InterpretedBackend()
REAL = InterpretedBackend(tile=None)
"""With the tiles that a device would have."""
