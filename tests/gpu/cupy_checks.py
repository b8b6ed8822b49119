"""What only a GPU shows of the CuPy backend: values, streams, devices, graphs, torch, first use.

Run by ``cupy.sh``; its name keeps it out of a run of all tests, which have no GPU.
"""

import os
import subprocess
import sys
import threading

import cupy
import numpy as np
import pytest
import test_cupy_tensor as tensor_tests
import test_numpy_backend as numpy_tests
from emulated import CudaCall
from laws import SLOPES, inputs
from plsh_cupy import _cuda, _tables
from test_cupy_kernels import CROSSED, LARGE, LONG, WIDE

import plsh
from plsh import testing
from plsh.compat import numpy_dtype

METHODS = ("exact", "window", "lsh")


class GpuCall(CudaCall):
    """A call of CuPy arrays."""

    def keywords(self):
        found = super().keywords()
        ids = found["segment_ids"]
        if ids is not None:
            moved = tuple(cupy.asarray(x) for x in (ids if isinstance(ids, tuple) else (ids,)))
            found["segment_ids"] = moved if len(moved) == 2 else moved[0]
        return found | {"backend": "cupy"}

    def arrays(self, which=slice(None)):
        return [cupy.asarray(x) for x in super().arrays(which)]


def as_gpu(case):
    return GpuCall(**{name: getattr(case, name) for name in CudaCall.__dataclass_fields__})


@pytest.mark.parametrize("case", [*CROSSED, *LONG, *WIDE, *LARGE], ids=str)
def test_call_equals_oracle(case):
    numpy_tests.check_band(as_gpu(case))


@pytest.mark.parametrize("case", [*tensor_tests.CROSSED, *tensor_tests.LONG], ids=str)
def test_call_on_tensor_cores_equals_oracle(case):
    numpy_tests.check_band(as_gpu(case))


@pytest.mark.parametrize("case", tensor_tests.HEIGHTS, ids=str)
def test_tall_tiles_equal_oracle(case, monkeypatch):
    tensor_tests.test_tall_tiles_equal_oracle(as_gpu(case), monkeypatch)


def gpu_inputs(n=300, dtype="float32", seed=0, **shape):
    arrays = inputs(n, dtype=dtype, seed=seed, **shape)
    return tuple(cupy.asarray(x.astype(numpy_dtype(dtype))) for x in arrays)


def everything(q, k, v, method="exact", **keywords):
    """Return out, lse and the gradients that there are."""
    call = {"method": method, "slopes": SLOPES, "backend": "cupy", **keywords}
    output = plsh.attention(q, k, v, return_lse=True, **call)
    ones = output.out * 0 + 1
    grads = plsh.attention_vjp(q, k, v, output, ones, **call)
    return (*output, *(x for x in grads if x is not None))


def assert_same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        testing.assert_identical(x, y)


# --- streams, devices, determinism ----------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_repeats_are_bit_equal(method):
    """U092: thirty repeats, forward and backward."""
    q, k, v = gpu_inputs(1000)
    want = everything(q, k, v, method)
    for _ in range(30):
        assert_same_bits(everything(q, k, v, method), want)


@pytest.mark.parametrize("method", METHODS)
def test_work_is_in_the_order_of_the_callers_stream(method):
    """U083: inputs written, and outputs read, on a side stream without waiting."""
    big = cupy.random.default_rng(0).standard_normal((3000, 3000), dtype="float32")
    source = gpu_inputs()
    want = everything(*source, method)
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(50):
        late = [cupy.full_like(x, np.nan) for x in source]
        cupy.cuda.Device().synchronize()
        with stream:
            big @ big  # the copies come long after the launch returns
            for x, y in zip(late, source, strict=True):
                x[...] = y
            got = [x.copy() for x in everything(*late, method)]
        stream.synchronize()
        assert_same_bits(got, want)


def test_current_device_and_stream_stay():
    """U082: after success and after an exception."""
    q, k, v = gpu_inputs(40)
    stream = cupy.cuda.Stream()
    with stream:
        before = (cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr)
        everything(q, k, v)
        with pytest.raises(TypeError):
            plsh.attention(q, k, v.get(), backend="cupy")
        assert (cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr) == before


@pytest.mark.skipif(cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs")
def test_arrays_of_another_device_run_there():
    """U081, U082: 0, 1, 0, with device 0 current."""
    for index in (0, 1, 0):
        with cupy.cuda.Device(index):
            q, k, v = gpu_inputs(100)
        got = everything(q, k, v)
        assert cupy.cuda.Device().id == 0
        assert all(x.device.id == index for x in got)


def test_kernels_are_loaded_anew_after_they_are_forgotten():
    q, k, v = gpu_inputs(100)
    want = everything(q, k, v)
    _cuda.KERNELS.clear()
    _tables.TABLES.clear()
    assert_same_bits(everything(q, k, v), want)


def test_threads_with_streams_of_their_own():
    q, k, v = gpu_inputs(200)
    want = {method: everything(q, k, v, method) for method in METHODS}
    cupy.cuda.Device().synchronize()
    faults = []

    def work(i):
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for method in METHODS * 5:
                    got = everything(q, k, v, method)
                    stream.synchronize()
                    assert_same_bits(got, want[method])
        except BaseException as error:
            faults.append((i, error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offsets", ["numbers", "arrays"])
def test_a_recorded_graph_replays(method, offsets):
    """U083: forward and backward, on new inputs, after the tables were forgotten."""
    q, k, v = gpu_inputs(200)
    at = {"causal": True, "q_offset": 3, "k_offset": 3}
    if offsets == "arrays":
        at |= {name: cupy.array([3, 3]) for name in ("q_offset", "k_offset")}
    ones = cupy.ones((*q.shape[:3], v.shape[3]), dtype=q.dtype)
    call = {"method": method, "slopes": SLOPES, "backend": "cupy", **at}

    def run():
        output = plsh.attention(q, k, v, return_lse=True, **call)
        grads = plsh.attention_vjp(q, k, v, output, ones, **call)
        return (*output, *(x for x in grads if x is not None))

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        got = run()
        graph = stream.end_capture()
        _tables.TABLES.clear()
        for seed in (1, 2):
            for x, y in zip((q, k, v), gpu_inputs(200, seed=seed), strict=True):
                x[...] = y
            junk = [cupy.full(1 << 16, np.nan, dtype="float32") for _ in range(64)]
            graph.launch()
            stream.synchronize()
            assert_same_bits(got, run())
            del junk


def test_a_graph_is_not_recorded_cold():
    q, k, v = gpu_inputs(50)
    _cuda.KERNELS.clear()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="make the same call once before"):
            plsh.attention(q, k, v, method="exact", slopes=0.77, backend="cupy")
        stream.end_capture()


# --- memory, size ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["window", "lsh"])
def test_memory_is_that_of_the_results(method):
    """MEM-1: beyond inputs and outputs a row's delta and a few small tables."""
    n = 1 << 16
    q = cupy.ones((1, 4, n, 64), dtype="float32")
    everything(q, q, q, method, causal=True)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    got = everything(q, q, q, method, causal=True)
    held = sum(x.nbytes for x in got) + 2 * q.nbytes  # the cotangent, and a copy on its way
    assert pool.total_bytes() - before < held + (4 << 20)


def test_strides_beyond_four_gigabytes():
    """U025: (n - 1) * stride past 2^31 elements, in half precision."""
    n = 40
    base = cupy.zeros((n, 60_000_000), dtype="float16")
    small = gpu_inputs(n, dtype="float16", batch=1, heads=1, kv_heads=1, value_dim=8)
    views = []
    for i, x in enumerate(small):
        view = base[:, 8 * i : 8 * i + 8]
        view[...] = x[0, 0]
        views.append(view[None, None])
    call = {"slopes": 0.1}
    assert_same_bits(everything(*views, **call), everything(*small, **call))


def test_many_small_rows():
    """U024: B * H of 70,000, one token; a row sees itself."""
    v = cupy.random.default_rng(0).standard_normal((70_000, 1, 1, 8), dtype="float32")
    out = plsh.attention(v, v, v, method="exact", slopes=0.5, backend="cupy")
    testing.assert_identical(out, v)


def test_arrays_that_are_not_aligned_are_refused():
    memory = cupy.zeros(1 << 12, dtype="uint8")
    x = cupy.ndarray((1, 4, 9, 8), "float32", memory.data + 2)
    with pytest.raises(ValueError, match="aligned to its 4-byte"):
        plsh.attention(x, x, x, backend="cupy")


# --- torch ----------------------------------------------------------------------------------------


def torch_or_skip():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    return torch


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_torch_tensors_give_torch_tensors(method, dtype):
    """U084: the same numbers as CuPy arrays, on torch's stream, bfloat16 too."""
    torch = torch_or_skip()
    arrays = [torch.from_numpy(x).to("cuda", getattr(torch, dtype)) for x in inputs(150)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        got = everything(*arrays, method)
    stream.synchronize()
    assert all(isinstance(x, torch.Tensor) and x.is_cuda for x in got)
    want = everything(*gpu_inputs(150, dtype=dtype), method)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x.double().cpu().numpy(), cupy.asnumpy(y).astype(np.float64))
    assert torch.cuda.current_device() == 0


def test_torch_parameters_are_refused():
    """U085."""
    torch = torch_or_skip()
    x = torch.zeros(1, 4, 9, 8, device="cuda", requires_grad=True)
    with pytest.raises(TypeError, match=r"requires grad.*detach"):
        plsh.attention(x, x, x, backend="cupy")


def test_a_torch_graph_replays():
    torch = torch_or_skip()
    arrays = [torch.from_numpy(x).float().cuda() for x in inputs(150)]
    everything(*arrays, "lsh")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        everything(*arrays, "lsh")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        got = everything(*arrays, "lsh")
    arrays[0].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(got, everything(*arrays, "lsh"), strict=True):
        assert torch.equal(x, y)


# --- first use ------------------------------------------------------------------------------------

FIRST = """
import cupy, plsh, plsh_cupy, threading
x = cupy.ones((1, 2, 70, 8), dtype="float32")
faults = []
def work():
    try:
        for method in ("exact", "lsh"):
            out = plsh.attention(x, x, x, method=method, backend="cupy")
            assert abs(float(out.sum()) - out.size) < 1e-2
    except BaseException as error:
        faults.append(repr(error))
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not faults, faults
"""


@pytest.mark.parametrize("folder", ["fresh", "read-only"])
def test_first_use_by_many_processes_and_threads(folder, tmp_path):
    """U089: eight processes of eight threads, an empty cache, or one that can't be written."""
    target = tmp_path
    if folder == "read-only":
        target = tmp_path / "file"
        target.write_text("")
    environment = os.environ | {"CUPY_CACHE_DIR": str(target), "CUPY_CACHE_IN_MEMORY": "1"}
    workers = [
        subprocess.Popen([sys.executable, "-c", FIRST], env=environment, stderr=subprocess.PIPE)
        for _ in range(8)
    ]
    for worker in workers:
        assert worker.wait(120) == 0, worker.stderr.read().decode()
        worker.stderr.close()
