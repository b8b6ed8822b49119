"""What the tests of the CuPy backend share: calls for the emulator, and its backend in the place of
NumPy's, so that the tests of `test_numpy_backend` run on the CUDA kernels as they stand.
"""

from dataclasses import dataclass

import plsh_numpy
from cuda_emulator import EmulatedBackend
from test_numpy_backend import BandCall

import plsh

BACKEND = EmulatedBackend()
"""The kernels as they are."""


@dataclass(frozen=True)
class CudaCall(BandCall):
    """A call whose integers have a dtype of their own."""

    integers: str = "int32"

    def __str__(self):
        return super().__str__() + ("" if self.integers == "int32" else f"-{self.integers}")

    def keywords(self):
        found = super().keywords()
        ids = found["segment_ids"]
        if ids is not None:
            pair = ids if isinstance(ids, tuple) else (ids,)
            pair = tuple(x.astype(self.integers) for x in pair)
            found["segment_ids"] = pair if len(pair) == 2 else pair[0]
        return found


def put_in_place(monkeypatch, backend=BACKEND):
    """Let calls of backend "numpy" run on an emulated one."""
    for method in ("attend", "vjp"):
        ours = getattr(backend, method)
        monkeypatch.setattr(
            type(plsh_numpy.BACKEND), method, lambda self, *x, ours=ours, **kw: ours(*x, **kw)
        )


def results(q, k, v, method, grad_out, grad_lse=None, backend="numpy", **keywords):
    """Return out, lse and the gradients that there are."""
    call = {"method": method, "backend": backend, **keywords}
    output = plsh.attention(q, k, v, return_lse=True, **call)
    grads = plsh.attention_vjp(q, k, v, output, grad_out, grad_lse, **call)
    return (*output, *(x for x in grads if x is not None))
