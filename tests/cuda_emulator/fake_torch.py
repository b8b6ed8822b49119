"""A stand-in for the torch module of a machine with GPUs: as much of it as the backend calls.

Tensors are NumPy's memory under a class of module ``torch``, in the memory of a stand-in for CuPy;
those of bfloat16 are held as 16-bit integers. What the backend does is recorded in CuPy's log.
"""

import types
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class _Device:
    type: str
    index: int


class _DType:
    def __init__(self, name):
        self._name = name

    def __repr__(self):
        return f"torch.{self._name}"


def fake_torch(cupy):
    """Return the module: `streams` by device, `grad_enabled`, and tensors in CuPy's memory."""
    torch = types.ModuleType("torch")
    torch.streams, torch.grad_enabled, torch.strided = {}, True, "strided"
    for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int32", "int64"):
        setattr(torch, name, _DType(name))
    current = [0]

    class Tensor:
        """A tensor on one of the devices; index None is the host."""

        layout, is_nested, requires_grad, negative = "strided", False, False, False

        def __init__(self, host, index=0, dtype=None):
            self.host, self.shape, self.ndim = host, host.shape, host.ndim
            self.dtype = getattr(torch, host.dtype.name) if dtype is None else dtype
            self.device = _Device("cpu" if index is None else "cuda", index)
            cupy.memory[self.data_ptr()] = host

        def data_ptr(self):
            return self.host.__array_interface__["data"][0]

        def stride(self):
            return tuple(step // self.host.itemsize for step in self.host.strides)

        def element_size(self):
            return self.host.itemsize

        def is_neg(self):
            return self.negative

        def _like(self, host):
            return Tensor(host, self.device.index, self.dtype)

        def __getitem__(self, key):
            return self._like(self.host[key])

        def swapaxes(self, a, b):
            return self._like(self.host.swapaxes(a, b))

        def detach(self):
            return self._like(self.host)

        def to(self, device):
            index = int(device.removeprefix("cuda:"))
            cupy.log.append(("upload", index, stream_of(index)))
            return Tensor(self.host.copy(), index, self.dtype)

        def cpu(self):
            cupy.log.append(("read", self.device.index))
            return Tensor(self.host.copy(), None, self.dtype)

        def numpy(self):
            assert self.device.type == "cpu"
            return self.host

    Tensor.__module__ = "torch"

    class on_device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            assert current.pop() == self.index

    def stream_of(index):
        return torch.streams.get(index, 0)

    def empty(shape, dtype, device):
        index = int(device.removeprefix("cuda:"))
        assert index == current[-1]
        name = repr(dtype).removeprefix("torch.")
        host = np.empty(shape, "uint16" if name == "bfloat16" else name)
        host.view(np.uint8).fill(0xFF) if host.size else None
        cupy.log.append(("allocate", index, stream_of(index)))
        return Tensor(host, index, dtype)

    torch.Tensor, torch.empty = Tensor, empty
    torch.from_numpy = lambda host: Tensor(host, None)
    torch.is_grad_enabled = lambda: torch.grad_enabled
    torch.version = types.SimpleNamespace(hip=None)
    torch.compiler = types.SimpleNamespace(
        is_compiling=lambda: False, is_dynamo_compiling=lambda: False
    )
    torch._C = types.SimpleNamespace(
        _functorch=types.SimpleNamespace(is_functorch_wrapped_tensor=lambda x: False)
    )
    torch.cuda = types.SimpleNamespace(
        device=on_device,
        current_device=lambda: current[-1],
        current_stream=lambda index: types.SimpleNamespace(cuda_stream=stream_of(index)),
    )
    return torch
