"""A stand-in for the CuPy module: as much of it as the backend calls, on the emulator.

Arrays are NumPy's memory under a class of module ``cupy``; "binaries" are the source, from which a
launch finds the instance that the emulator runs. What the backend does is recorded.
"""

import ctypes
import re
import types

import numpy as np
from plsh_cupy._params import PARAMS
from plsh_cupy._plan import Instance, Launch

from . import EmulatedDevice

_DTYPES = {"Half": "float16", "BFloat16": "bfloat16", "float": "float32", "double": "float64"}


class NVRTCError(Exception):
    """A compilation failed."""


class _Context:
    """A current object that ``with`` sets and restores."""

    stack: list

    def __enter__(self):
        self.stack.append(self)
        return self

    def __exit__(self, *_):
        assert self.stack.pop() is self


def fake_cupy(emulator, devices=2, capability=90):
    """Return the module: `log` of calls, `broken` to fail compilations, `capturing` streams."""
    cupy = types.ModuleType("cupy")
    cupy.log, cupy.broken, cupy.capturing, cupy.memory = [], None, set(), {}

    class Device(_Context):
        stack: list = []

        def __init__(self, id=None):
            self.id = Device.current() if id is None else id
            self.compute_capability = str(capability)
            assert 0 <= self.id < devices

        @staticmethod
        def current():
            return Device.stack[-1].id if Device.stack else 0

    class Stream(_Context):
        stack: list = []

        def __init__(self, ptr, device):
            self.ptr, self.device = ptr, device

        def is_capturing(self):
            assert self.ptr != 0, "the legacy stream was asked"
            return self.ptr in cupy.capturing

    class ndarray:
        """An array of one of the devices."""

        def __init__(self, host, device):
            self.host, self.device = host, types.SimpleNamespace(id=device)
            self.dtype, self.shape, self.strides = host.dtype, host.shape, host.strides
            self.ndim, self.size = host.ndim, host.size
            address = host.__array_interface__["data"][0]
            self.data = types.SimpleNamespace(ptr=address)
            cupy.memory[address] = host

        def __getitem__(self, key):
            return ndarray(self.host[key], self.device.id)

        def swapaxes(self, a, b):
            return ndarray(self.host.swapaxes(a, b), self.device.id)

        def set(self, host, stream):
            assert stream.device == self.device.id == Device.current()
            cupy.log.append(("upload", self.device.id, stream.ptr))
            self.host[...] = host

        def get(self):
            cupy.log.append(("read", self.device.id))
            return self.host.copy()

    ndarray.__module__ = "cupy"

    def empty(shape, dtype):
        cupy.log.append(("allocate", Device.current()))
        host = EmulatedDevice(emulator).empty(shape, np.dtype(dtype).name)
        return ndarray(host, Device.current())

    class Module:
        def load(self, binary):
            cupy.log.append(("load", Device.current()))
            self.source = binary.decode()

        def get_function(self, symbol):
            macros = dict(re.findall(r"#define (\w+) (.*)", self.source))
            instance = Instance(
                symbol.removeprefix("plsh_"),
                _DTYPES[macros["PLSH_FLOAT"]],
                macros["PLSH_STEP"] == "1",
                int(macros["PLSH_DIM"]),
                int(macros["PLSH_ROWS"]),
            )
            return types.SimpleNamespace(ptr=(Device.current(), instance))

    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra):
        device, instance = function
        assert device == Device.current(), "a kernel of another device"
        assert (gy, gz, by, bz, extra) == (1, 1, 1, 1, 0)
        cupy.log.append(("launch", device, stream, instance.kernel))
        pointer = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
        raw = ctypes.string_at(pointer, PARAMS.itemsize)
        params = np.frombuffer(raw, PARAMS)[0]
        run = EmulatedDevice(emulator)
        for host in cupy.memory.values():
            run._own.add(host.__array_interface__["data"][0])
            run.locate(host)
        run.run(Launch(instance, 0, gx, bx, shared, 0), params)

    def compile_program(program, options):
        cupy.log.append(("compile", tuple(options)))
        if cupy.broken is not None:
            raise NVRTCError("NVRTC_ERROR_COMPILATION")

    def attribute(function, which, value):
        cupy.log.append(("attribute", which, value))

    cupy.ndarray, cupy.empty = ndarray, empty
    cupy.cuda = types.SimpleNamespace(
        Device=Device,
        Module=Module,
        ExternalStream=Stream,
        get_current_stream=lambda: (
            Stream.stack[-1] if Stream.stack else Stream(0, Device.current())
        ),
        driver=types.SimpleNamespace(launchKernel=launch, funcSetAttribute=attribute),
        runtime=types.SimpleNamespace(
            cudaDevAttrMaxSharedMemoryPerBlockOptin=97,
            cudaDevAttrMultiProcessorCount=16,
            deviceGetAttribute=lambda which, device: {97: 227 * 1024, 16: 114}[which],
        ),
        nvrtc=types.SimpleNamespace(
            NVRTCError=NVRTCError,
            createProgram=lambda source, name, headers, names: source,
            compileProgram=compile_program,
            getCUBIN=lambda program: program.encode(),
            getPTX=lambda program: program,
            getProgramLog=lambda program: cupy.broken,
            destroyProgram=lambda program: cupy.log.append(("destroy",)),
            getSupportedArchs=lambda: [75, 80, 90, 100, 120],
            getVersion=lambda: (13, 0),
        ),
    )
    return cupy
