"""The kernels of plsh_cupy on a CPU: the same ``.cu`` files and the same host side, no CUDA.

`Emulator` compiles kernels with g++ against the twin of ``device.cuh`` and runs them in fibres that
check every access; `EmulatedBackend` is a backend of NumPy arrays on top. Test-only.
"""

import atexit
import ctypes
import dataclasses
import functools
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
from plsh_cupy import _call, _plan
from plsh_cupy._params import PARAMS, Strided

from plsh.backend import (
    SPEC_VERSION,
    AttentionOutput,
    Availability,
    Capabilities,
    Harness,
    Operands,
)
from plsh.compat import numpy_dtype, to_host

HERE = Path(__file__).parent
KERNELS = Path(_plan.__file__).parent / "kernels"
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-ffp-contract=off",
)
LIMITS = _plan.Limits(227 * 1024, 2**31 - 1)
"""Those of compute capability 9.0."""


ENTRIES = 400
"""Compiled kernels that are kept from run to run."""


def shared_folder():
    """Return a folder for compiled kernels in pytest's cache, or a temporary one."""
    folder = HERE.parents[1] / ".pytest_cache" / "emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError
        by_age = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in by_age[ENTRIES:]:
            path.unlink(missing_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class EmulatorFault(AssertionError):
    """What the emulator found wrong with a kernel."""


class _Range(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("writable", ctypes.c_int),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("shared_bytes", ctypes.c_int),
        ("order", ctypes.c_uint64),
        ("skipped_file", ctypes.c_char_p),
        ("skipped_line", ctypes.c_int),
    ]


class Emulator:
    """Kernels of one source folder, compiled on first use.

    Parameters
    ----------
    kernels : Path
        The ``.cu`` and ``.cuh`` files.
    build : Path, optional
        Where compiled kernels go, under names that tell what they were made of; None is a folder
        that all processes share from run to run.
    flags : tuple of str
        More flags of g++, such as those of gcov.
    """

    def __init__(self, kernels=KERNELS, build=None, flags=("-O3",)):
        self.kernels = Path(kernels)
        self.flags = flags
        self.core_flags = ("-O2",)
        """Flags for the emulator itself, which switches threads."""
        self.build = shared_folder() if build is None else Path(build)
        self._lock = threading.Lock()
        self._libraries = {}
        self._orders = itertools.count(1)
        self.skipped = None
        """(file name, line) of a barrier that is ignored."""
        self.launched = []
        """The launches so far."""

    @functools.cached_property
    def _compiler(self):
        compiler = shutil.which("g++")
        if compiler is None:
            raise RuntimeError("the emulator of CUDA kernels needs g++ on PATH; install it")
        return compiler

    def _compile(self, stem, suffix, sources, *arguments):
        """Compile what is not there yet; return its path, named after all that it is made of."""
        made_of = hashlib.sha256(repr((FLAGS, arguments)).encode())
        made_of.update(repr((self._compiler, os.stat(self._compiler).st_mtime_ns)).encode())
        for path in sources:
            made_of.update(path.read_bytes())
        target = self.build / f"{stem}-{made_of.hexdigest()[:16]}{suffix}"
        if target.exists():
            return target
        own = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        command = [self._compiler, *FLAGS, *arguments, "-o", str(own)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.build)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        return own.replace(target)

    def compile_core(self):
        """Compile the emulator itself, if it is not; return the object file's path."""
        source = HERE / "emulator.cpp"
        sources = (source, HERE / "emulator.h")
        return self._compile("emulator", ".o", sources, *self.core_flags, "-c", str(source))

    def compile(self, instance):
        """Compile an instance, if it is not; return the shared library's path."""
        folders = (HERE, self.kernels)
        sources = (path for folder in folders for path in sorted(folder.glob("*.[ch]*")))
        return self._compile(
            instance.kernel,
            ".so",
            sources,
            *self.flags,
            *(f"-D{k}={v}" for k, v in instance.macros(PARAMS.itemsize).items()),
            f"-DPLSH_FILE=<{instance.kernel}.cu>",
            f"-DPLSH_KERNEL={instance.symbol}",
            *(f"-I{folder}" for folder in folders),
            "-shared",
            *("-x", "c++", str(HERE / "entry.cpp"), "-x", "none", str(self.compile_core())),
        )

    def library(self, instance):
        """Return a compiled and loaded instance."""
        if instance not in self._libraries:
            self._libraries[instance] = ctypes.CDLL(str(self.compile(instance)))
        return self._libraries[instance]

    def run(self, launch, params, ranges):
        """Run one launch; raise EmulatorFault for what it finds."""
        with self._lock:  # the emulator has one device, and fibres of one thread
            library = self.library(launch.instance)
            self.launched.append(launch)
            file, line = (None, 0) if self.skipped is None else self.skipped
            how = _Launch(
                launch.grid,
                launch.block,
                launch.shared_bytes,
                next(self._orders),
                None if file is None else file.encode(),
                line,
            )
            report = ctypes.create_string_buffer(512)
            table = (_Range * len(ranges))(*ranges)
            params = np.array(params)
            failed = library.emulate(
                ctypes.c_void_p(params.ctypes.data),
                ctypes.byref(how),
                table,
                len(ranges),
                report,
                len(report),
            )
        if failed:
            raise EmulatorFault(f"{launch.instance.symbol}: {report.value.decode()}")


@functools.cache
def shared_emulator():
    """Return the emulator that all tests of this process share."""
    return Emulator()


class EmulatedDevice:
    """The device of one call: NumPy's memory, of which kernels see what the call located."""

    key = "emulated"
    capturing = False

    def __init__(self, emulator, limits=LIMITS):
        self.emulator, self.limits = emulator, limits
        self._ranges = {}
        self._own = set()

    def locate(self, x):
        low, high = np.lib.array_utils.byte_bounds(x)
        address = x.__array_interface__["data"][0]
        if x.size:
            self._ranges[low, high] = _Range(low, high, int(address in self._own))
        return Strided(address, x.strides)

    def empty(self, shape, dtype):
        x = np.empty(shape, dtype=numpy_dtype(dtype))
        x.view(np.uint8).fill(0xFF) if x.size else None  # NaN, whatever the dtype
        self._own.add(x.__array_interface__["data"][0])
        return x

    def upload(self, x):
        return x.copy()

    def hold(self, owner, arrays):
        raise AssertionError("nothing is captured")

    def run(self, launch, params):
        self.emulator.run(launch, params, list(self._ranges.values()))


def _as_on_a_gpu(arrays, request):
    """Copy what only NumPy has, other byte orders and unaligned numbers; leave all other arrays."""

    def native(x):
        if isinstance(x, tuple):
            return tuple(native(y) for y in x)
        if not isinstance(x, np.ndarray) or (x.flags.aligned and x.dtype.isnative):
            return x
        return x.astype(x.dtype.newbyteorder("="))

    operands = request.arrays
    names = [field.name for field in dataclasses.fields(operands)]
    changed = Operands(**{name: native(getattr(operands, name)) for name in names})
    return native(arrays), dataclasses.replace(request, arrays=changed)


class EmulatedBackend:
    """The CuPy backend's kernels and host side, for NumPy arrays, through the emulator."""

    spec_version = SPEC_VERSION

    def __init__(self, name="cupy_emulated", emulator=None, **device):
        self.name, self._emulator, self._device = name, emulator, device

    @property
    def emulator(self):
        return shared_emulator() if self._emulator is None else self._emulator

    def availability(self):
        if shutil.which("g++") is None:
            return Availability(False, "the emulator needs g++; install it")
        return Availability(True)

    def capabilities(self):
        return Capabilities(arrays=("numpy",), gradients="vjp", max_head_dim=_plan.MAX_DIM)

    def can_run(self, request):
        return None

    def device(self):
        return EmulatedDevice(self.emulator, **self._device)

    def attend(self, q, k, v, request):
        given, request = _as_on_a_gpu((q, k, v), request)
        return _call.attend(self.device(), *given, request)

    def vjp(self, q, k, v, output, grad_out, grad_lse, request):
        given, request = _as_on_a_gpu((q, k, v, *output, grad_out, grad_lse), request)
        q, k, v, out, lse, grad_out, grad_lse = given
        output = AttentionOutput(out, lse)
        return _call.vjp(self.device(), q, k, v, output, grad_out, grad_lse, request)

    def harness(self):
        return Harness(
            asarray=lambda x, dtype, device=None: np.asarray(x).astype(numpy_dtype(dtype)),
            to_numpy=to_host,
            synchronize=lambda x: None,
        )
