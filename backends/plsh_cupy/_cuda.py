"""A GPU as the host side sees it, through CuPy: streams, memory, compiled kernels."""

import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from plsh.compat import Array, numpy_dtype

from ._compile import CompileError, compiled
from ._params import PARAMS, Strided
from ._plan import Instance, Launch, Limits

__all__ = ["KERNELS", "CupyDevice", "TorchDevice", "limits_of", "nvrtc_binary", "target_of"]

_OPT_IN = 48 * 1024
"""Dynamic shared memory that a kernel gets without asking."""
_GRID = 2**31 - 1
_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Kernels:
    """Loaded kernels, one of a device and instance; a module of one device is no use on another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[int, Instance], Any] = {}

    def get(self, device: int, instance: Instance) -> Any:
        """Return a kernel of the current device, compiled and loaded if it is not."""
        kernel = self._held.get((device, instance))
        if kernel is None:
            with self._lock:
                kernel = self._held.get((device, instance))
                if kernel is None:
                    kernel = self._held[device, instance] = _load(device, instance)
        return kernel

    def holds(self, device: int, instance: Instance) -> bool:
        """Whether a kernel is loaded."""
        return (device, instance) in self._held

    def clear(self) -> None:
        """Unload every kernel, as after a context was destroyed."""
        with self._lock:
            self._held.clear()


KERNELS = _Kernels()


def _load(device: int, instance: Instance) -> Any:
    import cupy

    nvrtc, driver = cupy.cuda.nvrtc, cupy.cuda.driver
    capability = int(cupy.cuda.Device(device).compute_capability)
    target = target_of(capability, nvrtc.getSupportedArchs())
    version = ".".join(map(str, nvrtc.getVersion()))
    module = cupy.cuda.Module()
    module.load(compiled(instance, target, version, nvrtc_binary))
    kernel = module.get_function(instance.symbol)
    most = min(instance.shared_bytes(instance.dim, instance.dim), limits_of(device).shared_bytes)
    if most > _OPT_IN:
        driver.funcSetAttribute(kernel.ptr, _SHARED_ATTRIBUTE, most)
    return kernel


def target_of(capability: int, known: Sequence[int]) -> str:
    """Return what to compile for: the device itself, or the newest below it, for its driver."""
    if capability in known:
        return f"sm_{capability}"
    older = [arch for arch in known if arch < capability]
    if not older:
        raise RuntimeError(
            f"the device has compute capability {capability / 10:.1f}, and this CUDA compiles for "
            f'{min(known) / 10:.1f} and later; pip install "plsh[cupy-cuda12]"'
        )
    return f"compute_{max(older)}"


def nvrtc_binary(source: str, name: str, options: tuple[str, ...]) -> bytes:
    """Compile with NVRTC."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        ptx = any(option.startswith("-arch=compute_") for option in options)
        found = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(name, options, nvrtc.getProgramLog(program)) from error
    finally:
        nvrtc.destroyProgram(program)
    return found if isinstance(found, bytes) else found.encode()


@functools.cache
def limits_of(device: int) -> Limits:
    """Return what a device allows."""
    import cupy

    runtime = cupy.cuda.runtime
    shared = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
    processors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device)
    capability = int(cupy.cuda.Device(device).compute_capability)
    return Limits(int(shared), _GRID, int(processors), tensor=capability >= 80)


class _CudaDevice:
    """What CuPy and torch arrays share: launches on the caller's device and stream."""

    def __init__(self, index: int, stream: int) -> None:
        import cupy

        self.index, self.stream = index, stream
        self.limits = limits_of(index)
        # The legacy default stream, 0, never records; to ask it would disturb one that does.
        self.capturing = stream != 0 and bool(
            cupy.cuda.ExternalStream(stream, index).is_capturing()
        )

    @property
    def key(self) -> Hashable:
        """Device and stream."""
        return (type(self).__name__, self.index, self.stream)

    def hold(self, owner: Array, arrays: Sequence[Array]) -> None:
        """Keep arrays as long as `owner` lives."""
        weakref.finalize(owner, lambda held: None, tuple(arrays)).atexit = False

    def run(self, launch: Launch, params: npt.NDArray[Any]) -> None:
        """Launch a kernel on the caller's stream."""
        import cupy

        if not KERNELS.holds(self.index, launch.instance):
            self._refuse_capture(f"kernel {launch.instance.symbol} is not loaded")
        kernel = KERNELS.get(self.index, launch.instance)
        argument = np.array(params, dtype=PARAMS)
        pointers = (ctypes.c_void_p * 1)(argument.ctypes.data)
        shape = (launch.grid, 1, 1, launch.block, 1, 1)
        where = ctypes.addressof(pointers)
        cupy.cuda.driver.launchKernel(
            kernel.ptr, *shape, launch.shared_bytes, self.stream, where, 0
        )

    def _refuse_capture(self, what: str) -> None:
        if self.capturing:
            raise RuntimeError(
                f"{what}, and nothing can be loaded or copied from the host while a CUDA graph is "
                "recorded; make the same call once before, and pass partitions as device arrays"
            )


class CupyDevice(_CudaDevice):
    """The device of CuPy arrays, with CuPy's current stream and memory pool there."""

    @classmethod
    @contextmanager
    def of(cls, x: Array) -> Iterator["CupyDevice"]:
        """Enter the device of an array; the caller's is current again afterwards."""
        import cupy

        with cupy.cuda.Device(x.device.id):
            yield cls(x.device.id, cupy.cuda.get_current_stream().ptr)

    def locate(self, x: Array) -> Strided:
        """Return address and strides."""
        return Strided(x.data.ptr, x.strides)

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Allocate from CuPy's pool."""
        import cupy

        return cupy.empty(tuple(shape), dtype=numpy_dtype(dtype))

    def upload(self, x: npt.NDArray[Any]) -> Array:
        """Copy a host array here."""
        import cupy

        self._refuse_capture("a table of this call is not on the device")
        table = cupy.empty(x.shape, dtype=x.dtype)
        # On this stream: the memory may still be read by what was launched there before.
        table.set(np.ascontiguousarray(x), stream=cupy.cuda.get_current_stream())
        return table


class TorchDevice(_CudaDevice):
    """The device of torch tensors, with torch's current stream and allocator there."""

    @classmethod
    @contextmanager
    def of(cls, x: Array) -> Iterator["TorchDevice"]:
        """Enter the device of a tensor; torch's and CuPy's current ones stay as they are."""
        import cupy

        torch, index = sys.modules["torch"], x.device.index
        with torch.cuda.device(index), cupy.cuda.Device(index):
            yield cls(index, torch.cuda.current_stream(index).cuda_stream)

    def locate(self, x: Array) -> Strided:
        """Return address and strides."""
        size = x.element_size()
        return Strided(x.data_ptr(), tuple(size * stride for stride in x.stride()))

    def empty(self, shape: Sequence[int], dtype: str) -> Array:
        """Allocate from torch's allocator."""
        torch = sys.modules["torch"]
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=f"cuda:{self.index}")

    def upload(self, x: npt.NDArray[Any]) -> Array:
        """Copy a host array here."""
        self._refuse_capture("a table of this call is not on the device")
        torch = sys.modules["torch"]
        return torch.from_numpy(np.array(x)).to(f"cuda:{self.index}")
