"""The backend object: checks what only this backend must know of its arrays, then calls."""

import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from plsh.backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Capabilities,
    Gradients,
    Harness,
    Request,
)
from plsh.compat import Array, is_traced, kind, numpy_dtype, to_host, wants_gradient

from . import _available, _call
from ._cuda import CupyDevice, TorchDevice
from ._plan import MAX_DIM


class CupyBackend:
    """Raw CUDA kernels of the single-pass band: all methods and options, forward and vjp.

    CuPy arrays, and torch tensors on a CUDA device that need no gradient from autograd. The work is
    put on the caller's current stream and the memory comes from the caller's pool; the same call
    gives the same bits.
    """

    name = "cupy"
    spec_version = SPEC_VERSION

    def availability(self) -> Availability:
        """Say whether it can be used here, and if not why and what to install."""
        return _available.availability()

    def capabilities(self) -> Capabilities:
        """Declare what it can do."""
        return Capabilities(arrays=("cupy", "torch"), gradients="vjp", max_head_dim=MAX_DIM)

    def can_run(self, request: Request) -> str | None:
        """Return None: every request for these arrays can be served."""
        return None

    def attend(self, q: Array, k: Array, v: Array, request: Request) -> AttentionOutput:
        """Compute attention of checked arrays ``(B, H, N, D)``."""
        check_operands(request, q=q, k=k, v=v)
        with _device(q) as device:
            return _call.attend(device, q, k, v, request)

    def vjp(
        self,
        q: Array,
        k: Array,
        v: Array,
        output: AttentionOutput,
        grad_out: Array,
        grad_lse: Array | None,
        request: Request,
    ) -> Gradients:
        """Return the gradients by q, k, v and, under a decay, the slopes."""
        given = {"output.out": output.out, "output.lse": output.lse, "grad_out": grad_out}
        if grad_lse is not None:
            given["grad_lse"] = grad_lse
        check_operands(request, q=q, k=k, v=v, **given)
        with _device(q) as device:
            return _call.vjp(device, q, k, v, output, grad_out, grad_lse, request)

    def harness(self) -> Harness:
        """Return the handles for tests and benchmarks. Imports CuPy."""
        import cupy

        def asarray(x: npt.ArrayLike, dtype: str, device: str | None = None) -> Array:
            with cupy.cuda.Device(0 if device is None else int(device.rpartition(":")[2])):
                return cupy.asarray(np.asarray(x).astype(numpy_dtype(dtype)))

        def to_numpy(x: Array) -> npt.NDArray[Any]:
            host = to_host(x)
            return host.astype(np.float32) if host.dtype.name == "bfloat16" else host

        return Harness(
            asarray=asarray,
            to_numpy=to_numpy,
            synchronize=lambda x: cupy.cuda.Device(x.device.id).synchronize(),
            devices=tuple(f"cuda:{i}" for i in range(cupy.cuda.runtime.getDeviceCount())),
        )


def _device(x: Array) -> AbstractContextManager[CupyDevice | TorchDevice]:
    return TorchDevice.of(x) if kind(x) == "torch" else CupyDevice.of(x)


def check_operands(request: Request, **arrays: Array) -> None:
    """Check every array that a kernel will read: real memory of a CUDA device, aligned."""
    operands = request.arrays
    arrays |= {
        "slopes": operands.slopes,
        "q_offset": operands.q_offset,
        "k_offset": operands.k_offset,
        "labels": operands.labels,
    }
    if operands.segment_ids is not None:
        arrays |= {f"segment_ids[{side}]": x for side, x in enumerate(operands.segment_ids)}
    home: Any = None
    for name, x in arrays.items():
        if kind(x) == "torch":
            _check_torch(name, x)
            here = x.device.index
        elif kind(x) == "cupy":
            _check_aligned(name, x.data.ptr, x.strides, x.dtype.itemsize)
            here = x.device.id
        else:
            continue
        home = here if home is None else home
        if here != home:
            raise ValueError(
                f"{name} must be on the device of q, GPU {home}, got GPU {here}; nothing is copied "
                "between devices implicitly"
            )


def _check_torch(name: str, x: Array) -> None:
    if is_traced(x):
        raise TypeError(
            f"{name} must be concrete for backend 'cupy', which torch can't trace; use backend "
            "'torch' under torch.compile and functorch"
        )
    if x.device.type != "cuda":
        raise TypeError(
            f"{name} must be on a CUDA device for backend 'cupy', got {x.device}; nothing is "
            f"copied between devices implicitly: {name} = {name}.cuda()"
        )
    if sys.modules["torch"].version.hip is not None:
        raise TypeError(f"{name} must be on an NVIDIA GPU for backend 'cupy', got one of ROCm")
    if wants_gradient(x):
        raise TypeError(
            f"{name} requires grad, and backend 'cupy' records nothing for autograd; pass "
            f"{name}.detach() and call plsh.attention_vjp, or use backend 'torch'"
        )
    if x.is_neg():
        raise TypeError(f"{name} is a lazily negated view; pass {name}.resolve_neg()")
    size = x.element_size()
    _check_aligned(name, x.data_ptr(), tuple(size * stride for stride in x.stride()), size)


def _check_aligned(name: str, address: int, strides: tuple[int, ...], size: int) -> None:
    if address % size or any(stride % size for stride in strides):
        raise ValueError(
            f"{name} must be aligned to its {size}-byte numbers for backend 'cupy', got address "
            f"{address:#x} and strides of {strides} bytes; pass a copy of it made on the host"
        )


BACKEND = CupyBackend()
