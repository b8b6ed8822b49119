"""Streams, devices, modules and memory of the CuPy backend, on a stand-in for CuPy itself.

The kernels run in the emulator; what only CuPy and a GPU can show is in ``tests/gpu``.
"""

import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import plsh_cupy
import pytest
from cuda_emulator import KERNELS
from emulated import BACKEND as EMULATED
from emulated import (
    LABELS,
    TABLE,
    host_arrays,
    on_the_backend,
    put_stand_in,
    register_here,
    request,
    requests,
)
from plsh_cupy import _compile, _cuda, _tables
from plsh_cupy._plan import Limits

import plsh
from plsh import testing

BACKEND = plsh_cupy.BACKEND
ROOT = Path(__file__).parents[1]


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    """A fresh stand-in in CuPy's place, with caches of its own."""
    return put_stand_in(monkeypatch, tmp_path)


def everything(arrays, asked):
    """Return out, lse and gradients of the backend, as they are, and as NumPy arrays."""
    made = on_the_backend(BACKEND, arrays, asked)
    return made, [x.get() for x in made]


def on(cupy, device=0):
    return [cupy.ndarray(x.copy(), device) for x in host_arrays()]


@pytest.mark.parametrize("capability", [75, 80, 120])
def test_limits_are_those_of_the_device(capability, monkeypatch, tmp_path):
    """Tensor cores from compute capability 8.0 on."""
    put_stand_in(monkeypatch, tmp_path, capability=capability)
    assert _cuda.limits_of(1) == Limits(227 * 1024, 2**31 - 1, 114, tensor=capability >= 80)


@pytest.mark.parametrize("name", list(requests()))
def test_results_are_those_of_the_emulated_backend(name, cupy):
    """Bit for bit, through NVRTC's calls, module, pointers and launch; contiguous CuPy arrays."""
    asked = requests(lambda x: cupy.ndarray(x.copy(), 0))[name]
    made, got = everything(on(cupy), asked)
    expected = on_the_backend(EMULATED, host_arrays(), requests()[name])
    for a, b in zip(got, expected, strict=True):
        testing.assert_identical(a, b)
    assert all(type(x) is cupy.ndarray and x.host.flags.c_contiguous for x in made)


def test_work_goes_to_the_device_and_stream_of_the_caller(cupy):
    """U081, U082, U083: device 1 while device 0 is current; both are as before afterwards."""
    Device, Stream = cupy.cuda.Device, cupy.cuda.ExternalStream
    arrays = on(cupy, 1)
    with Stream(77, 1):
        made, _ = everything(arrays, request())
        assert cupy.cuda.get_current_stream().ptr == 77
    assert Device.stack == []
    assert all(x.device.id == 1 for x in made)
    placed = {entry[1:3] for entry in cupy.log if entry[0] in ("launch", "upload")}
    assert placed == {(1, 77)}


def test_the_current_device_is_restored_after_an_error(cupy):
    """U082."""
    cupy.broken = "error: expected a declaration"
    with pytest.raises(_compile.CompileError, match="expected a declaration"):
        everything(on(cupy, 1), request())
    assert cupy.cuda.Device.stack == []
    assert ("destroy",) in cupy.log
    cupy.broken = None
    everything(on(cupy, 1), request())


def test_kernels_are_loaded_once_a_device(cupy):
    """U081: 0, 1, 0; the binary is compiled once and loaded on each."""
    for device in (0, 1, 0):
        everything(on(cupy, device), request())
    loads = [entry[1] for entry in cupy.log if entry[0] == "load"]
    assert loads == [0] * 4 + [1] * 4
    assert sum(entry[0] == "compile" for entry in cupy.log) == 4


def test_compilations_name_the_device_and_keep_denormals(cupy):
    everything(on(cupy), request())
    options = {entry[1] for entry in cupy.log if entry[0] == "compile"}
    assert options == {("--std=c++17", "-arch=sm_90")}


def test_a_kernel_that_needs_more_shared_memory_asks_for_it(cupy):
    everything(on(cupy), request())
    asked = [entry[1:] for entry in cupy.log if entry[0] == "attribute"]
    assert asked
    assert all(which == 8 and 48 * 1024 < size <= 227 * 1024 for which, size in asked)


def test_threads_load_a_kernel_once(cupy, monkeypatch):
    """U089."""
    loaded, gate = [], threading.Barrier(8)

    def load(*key):
        loaded.append(key)
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(_cuda, "_load", load)

    def ask(_):
        gate.wait(10)
        return _cuda.KERNELS.get(0, "instance")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1
    assert loaded == [(0, "instance")]


def test_tables_stay_for_the_next_call(cupy):
    for _ in range(3):
        everything(on(cupy), request())
    assert sum(entry[0] == "upload" for entry in cupy.log) == 4  # slopes, widths, two orders


def test_a_graph_is_recorded_warm_only_and_keeps_its_temporaries(cupy, monkeypatch):
    """U083: cold it says what to do; warm, temporaries live as long as a result."""
    arrays = on(cupy)
    cupy.capturing.add(5)
    with cupy.cuda.ExternalStream(5, 0):
        with pytest.raises(RuntimeError, match="make the same call once before"):
            everything(arrays, request())
        cupy.capturing.clear()
        everything(arrays, request())
        cupy.capturing.add(5)
        output = BACKEND.attend(*arrays[:3], request())
        made = []
        allocate = _cuda.CupyDevice.empty

        def recorded(self, shape, dtype):
            made.append(allocate(self, shape, dtype))
            return made[-1]

        monkeypatch.setattr(_cuda.CupyDevice, "empty", recorded)
        grads = BACKEND.vjp(*arrays[:3], output, arrays[3], None, request())
        with pytest.raises(RuntimeError, match="not on the device"):
            BACKEND.attend(*arrays[:3], request(TABLE, labels=LABELS))
    (delta,) = (x for x in made[:5] if x.shape == (2, 4, 70))
    kept = weakref.ref(delta)
    made.clear()
    del delta, output
    part = grads.k
    del grads
    gc.collect()
    assert kept() is not None
    del part
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("name", sorted(requests().keys() - {"table on the host"}))
def test_a_recorded_call_only_allocates_and_launches(name, cupy):
    """U083: no copy, no synchronisation, no attribute that ends a recording; new inputs."""
    asked = requests(lambda x: cupy.ndarray(x.copy(), 0))[name]
    with cupy.cuda.ExternalStream(5, 0):
        everything(on(cupy), asked)
        cupy.log.clear()
        cupy.capturing.add(5)
        if name == "blocks by position":
            with pytest.raises(ValueError, match="must be numbers while a graph is recorded"):
                on_the_backend(BACKEND, on(cupy), asked)
        else:
            on_the_backend(BACKEND, on(cupy), asked)
            assert {entry[0] for entry in cupy.log} == {"allocate", "launch"}


def test_a_table_of_a_recorded_graph_stays(cupy):
    """The graph reads it at every replay, whatever the cache forgets."""
    tables = _tables.Tables(1 << 12)
    device = _cuda.CupyDevice(0, 0)
    table = tables.get(device, "x", lambda: np.arange(4))
    device.capturing = True
    assert tables.get(device, "x", lambda: np.arange(4)) is table
    tables.clear()
    kept = weakref.ref(table)
    cupy.memory.clear()
    del table
    gc.collect()
    assert kept() is not None


def test_nothing_is_kept_without_a_graph(cupy):
    """MEM-2."""
    arrays = on(cupy)
    made, _ = everything(arrays, request())
    kept = weakref.ref(arrays[0])
    del arrays
    gc.collect()
    assert kept() is None
    assert made


def test_arrays_that_are_not_aligned_are_refused(cupy):
    arrays = on(cupy)
    arrays[1].data.ptr += 2
    with pytest.raises(ValueError, match="k must be aligned to its 4-byte numbers"):
        BACKEND.attend(*arrays[:3], request())


@pytest.mark.parametrize("name", ["v", "labels", "slopes"])
def test_arrays_of_two_devices_are_refused(name, cupy):
    """U085: of operands, too; a kernel would read another device's memory."""
    q, k, v, _ = on(cupy)
    asked = request()
    if name == "v":
        v = on(cupy, 1)[2]
    elif name == "labels":
        asked = request(TABLE, labels=cupy.ndarray(LABELS, 1))
    else:
        asked = request(slopes=cupy.ndarray(np.ones(4), 1))
    with pytest.raises(ValueError, match=rf"{name} must be on the device of q, GPU 0, got GPU 1"):
        BACKEND.attend(q, k, v, asked)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_public_call_takes_arrays(layout, cupy):
    """In either layout, with and without a batch axis; the gradients too."""
    name = register_here()
    for batched in (True, False):
        given = [x if batched else x[0] for x in host_arrays()]
        given = [x.swapaxes(-3, -2) if layout == "bshd" else x for x in given]
        call = {"method": plsh.PositionalLSH(5, seed=1), "layout": layout}
        arrays = [cupy.ndarray(x.copy(), 0) for x in given]
        output = plsh.attention(*arrays[:3], return_lse=True, backend=name, **call)
        grads = plsh.attention_vjp(*arrays[:3], output, arrays[3], backend=name, **call)
        plsh.register_backend(EMULATED)
        call["backend"] = EMULATED.name
        want = plsh.attention(*given[:3], return_lse=True, **call)
        by = plsh.attention_vjp(*given[:3], want, given[3], **call)
        for a, b in zip((*output, *grads[:3]), (*want, *by[:3]), strict=True):
            testing.assert_identical(a.get(), b)
        assert grads.slopes is by.slopes is None


# --- CuPy itself, as far as it goes without a GPU -------------------------------------------------

REAL = """
import weakref
import cupy
from plsh_cupy import _compile, _cuda, _source
from plsh_cupy._plan import Instance

signatures = {
    cupy.cuda.driver.launchKernel: 11, cupy.cuda.driver.funcSetAttribute: 3,
    cupy.cuda.nvrtc.createProgram: 4, cupy.cuda.nvrtc.compileProgram: 2,
    cupy.cuda.nvrtc.getCUBIN: 1, cupy.cuda.nvrtc.getPTX: 1, cupy.cuda.nvrtc.getProgramLog: 1,
    cupy.cuda.nvrtc.destroyProgram: 1, cupy.cuda.runtime.deviceGetAttribute: 2,
}
for function, count in signatures.items():
    told = function.__doc__.splitlines()[0].split("(")[1].split(")")[0]
    assert len(told.split(",")) == count, function.__doc__
assert "stream=None" in cupy.ndarray.set.__doc__
assert cupy.cuda.runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin == 97
assert cupy.cuda.runtime.cudaDevAttrMultiProcessorCount == 16
assert all(hasattr(cupy.cuda.Function, x) for x in ("ptr", "module"))
assert all(hasattr(cupy.cuda.ExternalStream, x) for x in ("is_capturing", "__enter__"))
assert cupy.ndarray.__weakrefoffset__ > 0

instance = Instance("backward_slopes", "float32", False, 64, 64)
source = _source.source_of(instance)
options = (*_source.OPTIONS, "-arch=" + _cuda.target_of(90, cupy.cuda.nvrtc.getSupportedArchs()))
assert options[-1] == "-arch=sm_90"
assert _cuda.nvrtc_binary(source, "backward_slopes.cu", options)[:4] == bytes([127]) + b"ELF"
ptx = (*_source.OPTIONS, "-arch=compute_90")
assert b".target sm_90" in _cuda.nvrtc_binary(source, "backward_slopes.cu", ptx)
try:
    _cuda.nvrtc_binary(source.replace("double sum = 0;", "missing sum = 0;"), "x.cu", options)
except _compile.CompileError as error:
    print(error)
"""


def test_the_stand_in_is_called_as_cupy_is():
    """Signatures of CuPy, and NVRTC through it: a binary, code for a driver, an error's log."""
    paths = [str(ROOT), str(ROOT / "backends")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{REAL}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    line = (KERNELS / "backward_slopes.cu").read_text().splitlines().index("    double sum = 0;")
    assert f"backward_slopes.cu({line + 1}): error: " in done.stdout
