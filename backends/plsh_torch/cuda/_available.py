"""Whether the kernels can run on a device, and if not, why; and what torch lets them do."""

import functools
import importlib.util

import torch

from ._plan import MAX_DIMS, generation_of

OLDEST = (8, 0)
"""Compute capability from which products of bfloat16 and asynchronous copies exist."""


def reason(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Return why a device can't run a call whose larger head dim is `dim`, or None."""
    name = str(dtype).rpartition(".")[2]
    if dim > MAX_DIMS[name]:
        return f"its kernels take head dims of {name} up to {MAX_DIMS[name]}, got {dim}"
    return of_device(device)


@functools.cache
def of_device(device: torch.device) -> str | None:
    """Return why a device can't run any call, or None."""
    if importlib.util.find_spec("triton") is None:
        return "its kernels need Triton, which is not installed (pip install triton)"
    if torch.version.hip is not None:
        return "its kernels are written for NVIDIA devices, and this torch is for AMD's"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        found = ".".join(map(str, capability))
        return f"its kernels need compute capability 8.0 or later, and this device has {found}"
    return None


@functools.cache
def generation_on(device: torch.device) -> int:
    """Return the generation whose tiles serve a device; the interpreter's for the CPU."""
    if device.type != "cuda":
        return generation_of((9, 0))
    return generation_of(torch.cuda.get_device_capability(device))


def tf32_allowed() -> bool:
    """Whether torch may round operands of products of float32 to TF32 on CUDA."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # since 2.9; says what the older settings mean too
        return str(matmul.fp32_precision) == "tf32"
    return bool(matmul.allow_tf32)
