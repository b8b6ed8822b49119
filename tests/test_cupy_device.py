"""Streams, devices, modules and memory of the CuPy backend, on a stand-in for CuPy itself.

The kernels run in the emulator; what only CuPy and a GPU can show is in ``tests/gpu``.
"""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda_emulator.fake_cupy import fake_cupy
from emulated import BACKEND as EMULATED
from laws import inputs
from plsh_cupy import BACKEND, _compile, _cuda, _tables

from plsh import testing
from plsh.backend import Operands, Request, Static
from plsh.weights import UNLIMITED, DecayWeight, StepWeight, TableWeight


@pytest.fixture
def cupy(monkeypatch, tmp_path):
    """Put a fresh stand-in in CuPy's place, with caches of its own."""
    module = fake_cupy(EMULATED.emulator)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module.cuda)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    _cuda.KERNELS.clear()
    _cuda.limits_of.cache_clear()
    _tables.TABLES.clear()
    yield module
    _cuda.KERNELS.clear()
    _cuda.limits_of.cache_clear()
    _tables.TABLES.clear()


def request(weight=None, **operands):
    given = {"slopes": (0.5,) * 4, "q_offset": 0, "k_offset": 0, "segment_ids": None}
    given |= {"labels": None, **operands}
    method = "exact" if weight is None else "lsh"
    if weight is not None:
        given["slopes"] = None
    weight = DecayWeight((UNLIMITED,) * 4) if weight is None else weight
    kinds = ("float32", "cupy")
    return Request(Static(method, weight, True, 0.3, 4, 2, 8, 6, *kinds), Operands(**given))


def everything(arrays, asked):
    """Return out, lse and gradients of the backend, as NumPy arrays, and as they are."""
    q, k, v, grad_out = arrays
    output = BACKEND.attend(q, k, v, asked)
    grads = BACKEND.vjp(q, k, v, output, grad_out, None, asked)
    made = (*output, *(x for x in grads if x is not None))
    return made, [x.get() for x in made]


def host_arrays(n=70):
    q, k, v = inputs(n, dtype="float32")
    return q, k, v, np.ones((*q.shape[:3], v.shape[3]), dtype="float32")


def on(cupy, device=0, arrays=None):
    return [cupy.ndarray(x.copy(), device) for x in (host_arrays() if arrays is None else arrays)]


def expected(asked):
    q, k, v, grad_out = host_arrays()
    output = EMULATED.attend(q, k, v, asked)
    grads = EMULATED.vjp(q, k, v, output, grad_out, None, asked)
    return [x for x in (*output, *grads) if x is not None]


LABELS = np.sort(np.random.default_rng(0).integers(0, 70, (1, 3, 70)), axis=-1).astype(np.int32)
LABELS = np.minimum(LABELS, np.arange(70, dtype=np.int32))


def cases(cupy):
    """Name requests, each with arrays of the device where it may have some."""
    recipe = StepWeight(__import__("plsh").RandomBinning(9.0), 5, "iid", 0, (0, 1, 2, 3))
    ids = np.repeat([[0, 1]], 35, axis=1).repeat(2, axis=0)
    move = (lambda x: x) if cupy is None else (lambda x: cupy.ndarray(x.copy(), 0))
    return {
        "decay": request(),
        "recipe": request(recipe),
        "table on the host": request(TableWeight(3, 0, 70, (69,) * 4), labels=LABELS),
        "table on the device": request(TableWeight(3, 0, 70, (69,) * 4), labels=move(LABELS)),
        "operands on the device": request(
            slopes=move(np.array([0.5, 0.25, 1, 0], dtype="float32")),
            q_offset=move(np.array([5, 9])),
            k_offset=move(np.array(5)),
            segment_ids=(move(ids), move(ids)),
        ),
        "offsets of rows": request(q_offset=(4, 1), k_offset=(4, 0)),
    }


@pytest.mark.parametrize("name", list(cases(None)))
def test_results_are_those_of_the_emulated_backend(name, cupy):
    """Bit for bit, through NVRTC's calls, module, pointers and launch."""
    made, got = everything(on(cupy), cases(cupy)[name])
    for a, b in zip(got, expected(cases(None)[name]), strict=True):
        testing.assert_identical(a, b)
    assert all(type(x) is cupy.ndarray for x in made)


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
    monkeypatch.setattr(_cuda, "_load", lambda *key: loaded.append(key) or object())

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
        labels = TableWeight(3, 0, 70, (69,) * 4)
        with pytest.raises(RuntimeError, match="not on the device"):
            BACKEND.attend(*arrays[:3], request(labels, labels=LABELS))
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
        asked = request(TableWeight(3, 0, 70, (69,) * 4), labels=cupy.ndarray(LABELS, 1))
    else:
        asked = request(slopes=cupy.ndarray(np.ones(4), 1))
    with pytest.raises(ValueError, match=rf"{name} must be on the device of q, GPU 0, got GPU 1"):
        BACKEND.attend(q, k, v, asked)
