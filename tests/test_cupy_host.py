"""The host side of the CuPy backend, without a GPU: launch shapes, sources, cache, errors."""

import ctypes
import hashlib
import importlib.util
import itertools
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuda_emulator import KERNELS
from emulated import BACKEND as EMULATED
from emulated import register_here
from laws import inputs
from plsh_cupy import BACKEND, _available, _backend, _call, _compile, _cuda, _plan, _source, _tables
from plsh_cupy._params import KINDS, PARAMS, Strided
from plsh_cupy._plan import DIMS, Instance, Limits, instance_for, instances, launches

import plsh
from plsh.backend import Operands, Request, Static
from plsh.weights import UNLIMITED, DecayWeight

H100 = Limits(227 * 1024, 2**31 - 1)
FORWARD = Instance("forward", "float32", False, 64, 64)
ALL = instances(H100)
EVERY_KERNEL = (*_plan.KERNELS, *_plan.TENSOR_KERNELS.values())
ROOT = Path(__file__).parents[1]


# --- launch shapes --------------------------------------------------------------------------------


def cover(instance, limits=H100, batch=2, heads=3, length=100):
    return launches(
        instance, batch=batch, heads=heads, length=length, dim=16, value_dim=8, limits=limits
    )


@pytest.mark.parametrize("kernel", _plan.KERNELS)
@pytest.mark.parametrize("limit", [1, 5, 7, 2**31 - 1])
def test_launches_cover_each_block_once(kernel, limit):
    for batch, heads, length in itertools.product((0, 1, 3), (0, 1, 4), (0, 1, 63, 64, 65, 200)):
        found = cover(
            Instance(kernel, "float32", False, 64, 64), Limits(1 << 20, limit), batch, heads, length
        )
        blocks = [b for x in found for b in range(x.first_block, x.first_block + x.grid)]
        per_head = 1 if kernel == "backward_slopes" else -(-length // 64)
        assert blocks == list(range(batch * heads * per_head))
        assert all(1 <= x.grid <= limit for x in found)


def test_large_grids_are_counted_in_python_integers():
    """U024: B*H*tiles beyond 2^31 blocks is split; 70,000 heads of one token are not."""
    found = cover(FORWARD, batch=1 << 20, heads=1 << 10, length=1 << 10)
    assert sum(x.grid for x in found) == 1 << 34
    assert len(found) == 9
    (one,) = cover(FORWARD, batch=70_000, heads=1, length=1)
    assert one.grid == 70_000


def test_shared_memory_is_checked_before_a_launch():
    wide = Instance("backward_keys", "float64", True, 256, 16)
    with pytest.raises(ValueError, match=r"D = 256, Dv = 256 needs \d+ bytes .* device has 65536"):
        launches(wide, batch=1, heads=1, length=9, dim=256, value_dim=256,
                 limits=Limits(65536, 99))  # fmt: skip


@pytest.mark.parametrize("kilobytes", [64, 99, 163, 227])
def test_tiles_fit_the_device(kilobytes):
    """As large as they can be; 99 KiB (8.6, 8.9, 12.0) hold everything, 64 (7.5) all of float32."""
    limits = Limits(kilobytes * 1024, 2**31 - 1, tensor=kilobytes > 64)
    for instance in instances(limits):
        needed = instance.shared_bytes(instance.dim, instance.dim)
        if kilobytes > 64 or instance.dtype != "float64" or instance.dim == 64:
            assert needed <= limits.shared_bytes, instance
        assert instance.rows in ((64, 128) if instance.tensor else (16, 32, 64))
    most = [instance for instance in ALL if limits.tensor or not instance.tensor]
    assert any(i.rows < j.rows for i, j in zip(instances(limits), most, strict=True)) == (
        kilobytes < 163
    )


def test_the_bound_of_the_dims_is_the_least_that_holds_both():
    for dim, value_dim in itertools.product((1, 63, 64, 65, 128, 129, 256), repeat=2):
        bound = instance_for("forward", "float32", False, dim, value_dim, H100).dim
        assert bound >= max(dim, value_dim)
        assert not any(max(dim, value_dim) <= b < bound for b in DIMS)


def test_dims_beyond_the_largest_are_refused():
    """U024, BCK-7: by the core, from the declared limit."""
    q = np.zeros((1, 1, 3, 257), dtype=np.float32)
    plsh_backend = EMULATED.name
    with pytest.raises(plsh.UnsupportedByBackendError, match="head dims go up to 256, got 257"):
        plsh.attention(q, q, q, backend=registered(plsh_backend))


def registered(name):
    plsh.register_backend(EMULATED)
    return name


# --- sources --------------------------------------------------------------------------------------


def test_kernels_include_no_header_of_the_host():
    """U086, U087: nothing but the kernels' own headers, so that NVRTC needs no toolkit."""
    for path in KERNELS.iterdir():
        included = re.findall(r"#\s*include\s*(\S+)", path.read_text())
        assert all(
            re.fullmatch(r"<(device|params|layout|tile|mma|tensor|band|weight|softmax)\.cuh>", x)
            for x in included
        )
    for instance in ALL:
        assert "#include" not in _source.source_of(instance)


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_lines_of_the_source_point_into_its_files(kernel):
    """Each line of the one string is, by its #line, that line of a file."""
    files = {path.name: path.read_text().split("\n") for path in KERNELS.iterdir()}
    name, number, seen = None, 0, 0
    for line in _source.source_of(Instance(kernel, "float32", True, 64, 64)).split("\n"):
        told = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if told:
            name, number = told.group(2), int(told.group(1))
            continue
        if name is not None:
            original = files[name][number - 1]
            assert line == original or (line == "" and "#include" in original)
            seen += line == original
            number += 1
    assert seen > 100


def test_every_kernel_has_the_header_that_says_who_does_what():
    for kernel in EVERY_KERNEL:
        head = (KERNELS / f"{kernel}.cu").read_text().split("#include")[0]
        for word in ("Grid", "Block", "Shared", "Reads", "Writes", "Spec"):
            assert f"// {word}" in head, (kernel, word)
        assert re.search(r"\b(ATT|NUM)-\d+", head)


def test_instances_differ_in_their_source():
    assert len({_source.source_of(i) for i in ALL}) == len(ALL)


# --- the cache of binaries ------------------------------------------------------------------------


def fake(source, name, options):
    """A compiler whose binary is a function of all that it is given."""
    return hashlib.sha256(repr((source, name, options)).encode()).digest() * 1000


def get(folder, compiler=fake, target="sm_90", version="13.0"):
    return _compile.compiled(FORWARD, target, version, compiler, folder)


def never(*_):
    raise AssertionError("compiled again")


def test_a_binary_is_compiled_once(tmp_path):
    first = get(tmp_path)
    assert get(tmp_path, never) == first


@pytest.mark.parametrize("change", [{"target": "sm_80"}, {"version": "12.9"}])
def test_another_target_or_compiler_compiles_anew(tmp_path, change):
    get(tmp_path)
    with pytest.raises(AssertionError, match="compiled again"):
        get(tmp_path, never, **change)


@pytest.mark.parametrize("damage", [b"", b"torn", None])
def test_a_damaged_entry_is_replaced(tmp_path, damage):
    want = get(tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1] if damage is None else damage)
    assert get(tmp_path) == want
    assert get(tmp_path, never) == want
    assert [x.name for x in tmp_path.iterdir()] == [entry.name]


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    """U089: it is a file; then every process compiles for itself."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert get(blocked) == get(tmp_path)
    assert get(blocked / "below") == get(tmp_path)
    assert blocked.read_text() == ""


@pytest.mark.parametrize("call", ["mkstemp", "fdopen", "replace"])
def test_a_read_only_or_full_folder_does_no_harm(tmp_path, monkeypatch, call):
    """U089: whichever step the system refuses; nothing is left behind."""

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(_compile.tempfile if call == "mkstemp" else _compile.os, call, refuse)
        assert get(tmp_path) == fake(*given_to_the_compiler())
    assert list(tmp_path.iterdir()) == []
    get(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def given_to_the_compiler():
    given = []
    _compile.compiled(
        FORWARD, "sm_90", "13.0", lambda *x: given.append(x) or b"", Path("/dev/null")
    )
    return given[0]


def test_threads_compile_a_binary_once(tmp_path):
    """U089: eight threads, one compilation."""
    compilations, gate = [], threading.Barrier(8)

    def slow(*given):
        compilations.append(given)
        time.sleep(0.05)
        return fake(*given)

    def ask(_):
        gate.wait(10)
        return get(tmp_path, slow)

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, range(8)))
    assert len(found) == 1
    assert len(compilations) == 1


RACE = """
import hashlib, sys
from pathlib import Path
from plsh_cupy import _compile
from plsh_cupy._plan import Instance
instance = Instance("forward", "float32", False, 64, 64)
fake = lambda *given: hashlib.sha256(repr(given).encode()).digest() * 1000
print("ready", flush=True)
sys.stdin.readline()
get = lambda: _compile.compiled(instance, "sm_90", "13.0", fake, Path(sys.argv[1]))
print(*{hashlib.sha256(get()).hexdigest() for _ in range(300)})
"""


def test_processes_race_on_the_folder(tmp_path):
    """U089: while entries are torn by another; each gets the right binary."""
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'backends')]!r}\n{RACE}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    want = get(tmp_path)
    (entry,) = tmp_path.glob("*.cubin")
    entry.write_bytes(b"torn")
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    while any(worker.poll() is None for worker in workers):
        entry.write_bytes(b"torn")
        time.sleep(0.001)
    for worker in workers:
        with worker:
            assert worker.stdout.read().split() == [hashlib.sha256(want).hexdigest()]


def test_an_error_of_the_compiler_carries_its_log_and_a_remedy(tmp_path):
    """U086."""

    def broken(source, name, options):
        raise _compile.CompileError(name, options, 'weight.cuh(12): error: expected a ";"')

    with pytest.raises(_compile.CompileError) as caught:
        get(tmp_path, broken)
    assert "forward.cu did not compile" in str(caught.value)
    assert "weight.cuh(12): error" in str(caught.value)
    assert "pip install" in str(caught.value)
    assert get(tmp_path) == get(tmp_path, never)  # a failure is not remembered


def test_the_cache_lies_beside_cupys_own(monkeypatch, tmp_path):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    assert _compile.cache_folder() == tmp_path / "plsh"
    monkeypatch.delenv("CUPY_CACHE_DIR")
    assert _compile.cache_folder().parts[-3:] == (".cupy", "kernel_cache", "plsh")


@pytest.mark.parametrize(
    ("capability", "target"),
    [(80, "sm_80"), (90, "sm_90"), (86, "sm_86"), (103, "compute_100"), (130, "compute_120")],
)
def test_a_device_newer_than_the_compiler_gets_code_for_its_driver(capability, target):
    assert _cuda.target_of(capability, (75, 80, 86, 90, 100, 120)) == target


def test_a_device_older_than_the_compiler_is_named():
    with pytest.raises(RuntimeError, match=r"capability 6\.1.*cupy-cuda12"):
        _cuda.target_of(61, (75, 80))


# --- tables on the device -------------------------------------------------------------------------


class Recorder:
    """A device that counts what is uploaded."""

    capturing = False

    def __init__(self, key="recorder"):
        self.key, self.uploads = key, 0

    def upload(self, x):
        self.uploads += 1
        return x.copy()


def test_a_table_is_uploaded_once_a_device_and_stream():
    """U081: another device or stream has its own."""
    tables, first, second = _tables.Tables(1 << 20), Recorder("a"), Recorder("b")
    for device in (first, second, first, second):
        tables.get(device, "x", lambda: np.arange(4))
    assert (first.uploads, second.uploads) == (1, 1)
    tables.clear()
    tables.get(first, "x", lambda: np.arange(4))
    assert first.uploads == 2


def test_tables_are_bounded():
    """MEM-2: the oldest go; what is too large is not kept at all."""
    tables, device = _tables.Tables(10_000), Recorder()
    for i in range(100):
        tables.get(device, i, lambda: np.zeros(100))
    assert len(tables._held) == tables._bytes // (800 + 1024) == 5
    tables.get(device, 99, lambda: np.zeros(100))
    assert device.uploads == 100
    tables.get(device, "large", lambda: np.zeros(10_000))
    assert len(tables._held) == 5


def test_tables_are_safe_among_threads():
    tables = _tables.Tables(20_000)

    def ask(i):
        value = tables.get(Recorder(), i % 13, lambda: np.full(100, i % 13))
        return bool((value == i % 13).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(2000)))
    assert tables._bytes == sum(cost for _, cost in tables._held.values())


def test_a_table_that_two_have_made_counts_once():
    """Made outside of the lock, by the second while the first makes it."""
    tables, device = _tables.Tables(1 << 20), Recorder()

    def make():
        tables.get(device, "x", lambda: np.arange(4))
        return np.arange(4)

    tables.get(device, "x", make)
    assert tables._bytes == sum(cost for _, cost in tables._held.values())


# --- the parameters -------------------------------------------------------------------------------


def test_parameters_mirror_their_declaration():
    """Names and order of the fields, from the header itself."""
    text = (KERNELS / "params.cuh").read_text()
    body = text.split("struct Params {")[1].split("};")[0]
    body = re.sub(r"//.*", "", body)
    found = re.findall(r"\b(View|int64|double|int) ([^;]*);", body)
    names = [name.strip() for _, group in found for name in group.split(",")]
    assert names == list(PARAMS.names)
    sizes = {"View": 40, "int64": 8, "double": 8, "int": 4}
    kinds = [kind for kind, group in found for _ in group.split(",")]
    assert [PARAMS[name].itemsize for name in names] == [sizes[kind] for kind in kinds]


def test_kinds_mirror_their_declaration():
    text = (KERNELS / "params.cuh").read_text().split("enum Kind {")[1].split("}")[0]
    assert {n.lower(): int(c) for n, c in re.findall(r"(\w+) = (\d+)", text)} == KINDS


def test_strides_are_64_bit():
    """U025: with faked strides, beyond 2^31 and negative."""
    params = np.zeros((), PARAMS)
    Strided(1 << 47, (1 << 40, -(1 << 35), 8, 4)).fill(params, "q", "bhnd")
    assert params["q"].tolist() == (1 << 47, 1 << 40, -(1 << 35), 8, 4)


# --- graphs ---------------------------------------------------------------------------------------


class Captured(type(EMULATED.device())):
    """A device that records a graph."""

    capturing = True

    def __init__(self):
        super().__init__(EMULATED.emulator)
        self.held = []

    def hold(self, owner, arrays):
        self.held.append((owner, list(arrays)))


def decay_request(**operands):
    static = Static(
        "exact", DecayWeight((UNLIMITED,) * 4), True, 0.3, 4, 2, 8, 6, "float32", "numpy"
    )
    given = {
        "slopes": (0.5,) * 4,
        "q_offset": 0,
        "k_offset": 0,
        "segment_ids": None,
        "labels": None,
    }
    return Request(static, Operands(**given | operands))


def test_a_recorded_graph_keeps_its_temporaries():
    """U083: as long as any result lives; a forward pass has none."""
    q, k, v = inputs(20, dtype="float32")
    device = Captured()
    output = _call.attend(device, q, k, v, decay_request())
    assert device.held == []
    grads = _call.vjp(device, q, k, v, output, output.out, None, decay_request())
    assert all(owner is x for (owner, _), x in zip(device.held, grads, strict=True))
    assert {tuple(x.shape for x in kept) for _, kept in device.held} == {((2, 4, 20), (2, 4, 1))}


def test_offsets_are_not_read_while_a_graph_is_recorded():
    """A family whose blocks are made on the host says so; the others read nothing."""
    q, k, v = inputs(20, dtype="float32")
    offset = np.array([3, 4])
    _call.attend(Captured(), q, k, v, decay_request(q_offset=offset, k_offset=offset))
    cuts = plsh.weights.StepWeight(plsh.IndependentCuts(4.0), 3, None, 3, (0, 1, 2, 3))
    static = Static("lsh", cuts, True, 0.3, 4, 2, 8, 6, "float32", "numpy")
    request = Request(static, Operands(None, offset, offset, None, None))
    with pytest.raises(ValueError, match="q_offset and k_offset must be numbers while a graph"):
        _call.attend(Captured(), q, k, v, request)
    _call.attend(EMULATED.device(), q, k, v, request)


# --- availability ---------------------------------------------------------------------------------


class Driver:
    """libcuda with a version, a count of devices and an error."""

    def __init__(self, version=13000, count=1, error=0):
        self.version, self.count, self.error = version, count, error

    def cuDriverGetVersion(self, at):
        ctypes.cast(at, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return 0

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, at):
        ctypes.cast(at, ctypes.POINTER(ctypes.c_int))[0] = self.count
        return 0


SOUND = {"installed": True, "wheels": [("cupy-cuda13x", 13)], "driver": Driver(), "nvrtc": True}
LACKS = {
    "no CuPy": ({"installed": False}, r"CuPy is not installed; pip install"),
    "two wheels": ({"wheels": [("cupy-cuda12x", 12), ("cupy-cuda13x", 13)]}, "keep just one"),
    "no driver": ({"driver": None}, r"no CUDA driver \(libcuda\)"),
    "wrong wheel": ({"driver": Driver(12040)},
                    r"cupy-cuda13x needs a driver for CUDA 13, this one is for CUDA 12"),
    "no device": ({"driver": Driver(error=100)}, "no GPU that it may use"),
    "hidden devices": ({"driver": Driver(count=0)}, "no GPU that it may use"),
    "broken driver": ({"driver": Driver(error=999)}, "fails with error 999"),
    "no NVRTC": ({"nvrtc": False}, r"no NVRTC.*pip install \"plsh\[cupy-cuda13\]\""),
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """A function that sets what availability finds."""
    return put_machine(monkeypatch)


def put_machine(monkeypatch):
    """Return a function that sets what availability finds."""

    def set_up(installed, wheels, driver, nvrtc):
        monkeypatch.setattr(_available, "_works", False)
        spec = SimpleNamespace() if installed else None
        real = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: spec if name == "cupy" else real(name)
        )
        monkeypatch.setattr(_available, "_wheels", lambda: wheels)
        monkeypatch.setattr(_available, "load_driver", lambda: driver)
        monkeypatch.setattr(_available, "find_nvrtc", lambda majors: nvrtc)

    return set_up


@pytest.mark.parametrize("lack", LACKS)
def test_what_is_missing_is_named_in_one_line(lack, machine):
    """U126, U128: with what to install."""
    change, message = LACKS[lack]
    machine(**SOUND | change)
    state = BACKEND.availability()
    assert not state.ok
    assert re.search(message, state.reason), state.reason
    assert "\n" not in state.reason


def test_a_sound_machine_is_available_and_not_asked_again(machine):
    machine(**SOUND)
    assert BACKEND.availability().ok
    machine_gone = dict(SOUND, driver=None)
    works = _available._works
    machine(**machine_gone)
    assert works
    assert not BACKEND.availability().ok  # asked afresh, the driver is missed


def test_availability_never_raises(machine, monkeypatch):
    """U119: a broken installation breaks no listing."""
    machine(**SOUND)

    def broken():
        raise OSError("libcuda.so.1: wrong ELF class")

    monkeypatch.setattr(_available, "load_driver", broken)
    state = BACKEND.availability()
    assert not state.ok
    assert "wrong ELF class" in state.reason
    assert isinstance(state.cause, OSError)


PROGRAM = """
import sys, pickle
import plsh_cupy
backend = plsh_cupy.BACKEND
backend.capabilities(), backend.availability()
assert not {"cupy", "torch", "jax"} & set(sys.modules)
print(backend.availability().reason)
"""


def test_nothing_is_imported_to_say_why_not():
    """BCK-1, BCK-3: here there is no GPU, and the reason is one line."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c",
         f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'backends')]!r}\n{PROGRAM}"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert len(done.stdout.splitlines()) == 1


def test_the_plan_pickles():
    """U088: kernels are loaded anew where they arrive."""
    for instance in ALL:
        assert pickle.loads(pickle.dumps(instance)) == instance
    assert isinstance(pickle.loads(pickle.dumps(cover(FORWARD))), list)


# --- arrays that can't be used --------------------------------------------------------------------


def torch_request():
    static = Static("exact", DecayWeight((UNLIMITED,)), True, 1.0, 1, 1, 4, 4, "float32", "torch")
    return Request(static, Operands((0.5,), 0, 0, None, None))


def test_a_tensor_on_the_host_is_refused_with_the_line_that_moves_it():
    """U085: nothing is copied between devices implicitly."""
    x = torch.zeros(1, 1, 3, 4)
    with pytest.raises(TypeError, match=r"q must be on a CUDA device.*q = q\.cuda\(\)"):
        BACKEND.attend(x, x, x, torch_request())


def on_gpu(**changes):
    """A stand-in for a CUDA tensor, of torch's kind."""
    kind = type("Tensor", (), {"__module__": "torch"})
    x = kind()
    given = {
        "dtype": "torch.float32", "shape": (1, 1, 3, 4), "ndim": 4, "requires_grad": False,
        "device": SimpleNamespace(type="cuda", index=0), "layout": torch.strided,
        "is_neg": lambda: False, "element_size": lambda: 4, "data_ptr": lambda: 4096,
        "stride": lambda: (12, 12, 4, 1),
    }  # fmt: skip
    for name, value in (given | changes).items():
        setattr(x, name, value)
    return x


REFUSED = {
    "grad": ({"requires_grad": True}, TypeError, r"requires grad.*\.detach\(\)"),
    "negated": ({"is_neg": lambda: True}, TypeError, r"resolve_neg"),
    "unaligned": ({"data_ptr": lambda: 4098}, ValueError, "must be aligned to its 4-byte numbers"),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("name", ["q", "slopes", "segment_ids[1]"])
def test_a_tensor_that_kernels_would_misread_is_refused(why, name, monkeypatch):
    """U085: of operands as of q, k and v."""
    monkeypatch.setattr(_backend, "is_traced", lambda x: False)
    monkeypatch.setattr(torch.version, "hip", None)
    changes, error, message = REFUSED[why]
    bad, good = on_gpu(**changes), on_gpu()
    operands = {"slopes": (0.5,), "segment_ids": None}
    arrays = {"q": good}
    if name == "q":
        arrays["q"] = bad
    elif name == "slopes":
        operands["slopes"] = bad
    else:
        operands["segment_ids"] = (good, bad)
    request = Request(
        torch_request().static,
        Operands(operands["slopes"], 0, 0, operands["segment_ids"], None),
    )
    with pytest.raises(error, match=re.escape(name) + ".*" + message):
        _backend.check_operands(request, **arrays)
    _backend.check_operands(torch_request(), q=good)


def test_without_grad_mode_a_parameter_is_taken(monkeypatch):
    monkeypatch.setattr(_backend, "is_traced", lambda x: False)
    with torch.no_grad():
        _backend.check_operands(torch_request(), q=on_gpu(requires_grad=True))


def test_a_fake_tensor_is_refused():
    with torch._subclasses.FakeTensorMode():
        x = torch.zeros(1, 1, 3, 4)
        with pytest.raises(TypeError, match=r"must be concrete.*backend 'torch'"):
            BACKEND.attend(x, x, x, torch_request())


def test_it_declares_what_it_takes():
    declared = BACKEND.capabilities()
    assert declared.arrays == ("cupy", "torch")
    assert declared.gradients == "vjp"
    assert declared.max_head_dim == 256
    q, name = np.zeros((1, 1, 3, 4)), register_here()
    with pytest.raises(TypeError, match=r"takes cupy, torch arrays, got numpy.*cupy\.asarray\(q\)"):
        plsh.attention(q, q, q, backend=name)


# --- offline compilation --------------------------------------------------------------------------


def nvrtc():
    """Load NVRTC of the pip wheel."""
    found = importlib.util.find_spec("nvidia")
    roots = [] if found is None else list(found.submodule_search_locations)
    paths = [p for root in roots for p in Path(root).glob("*/lib/libnvrtc.so.*")]
    paths = [p for p in paths if ".alt." not in p.name]
    if not paths:
        raise AssertionError(
            "NVRTC is needed to compile the kernels offline: pip install nvidia-cuda-nvrtc"
        )
    for part in paths[0].parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(paths[0]))


def compile_offline(source, name, options):
    """Compile with NVRTC by ctypes; return a binary, raise CompileError with the log."""
    library, program = nvrtc(), ctypes.c_void_p()
    text = source.encode()
    assert library.nvrtcCreateProgram(
        ctypes.byref(program), text, name.encode(), 0, None, None
    ) == 0  # fmt: skip
    words = (ctypes.c_char_p * len(options))(*(x.encode() for x in options))
    code = library.nvrtcCompileProgram(program, len(options), words)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    said = log.value.decode().strip()
    if code or said:  # a warning is an error
        raise _compile.CompileError(name, options, said)
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, binary)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


FEW = [
    Instance("forward", "bfloat16", True, 64, 64),
    Instance("backward_queries", "float16", False, 64, 64),
    Instance("backward_keys", "float32", True, 64, 64),
    Instance("backward_slopes", "float64", False, 64, 64),
    Instance("forward_tensor", "float16", True, 128, 64),
]


def check_compiles(instance, arch="sm_90"):
    options = (*_source.OPTIONS, f"-arch={arch}")
    name = f"{instance.kernel}.cu"
    assert compile_offline(_source.source_of(instance), name, options)[:4] == b"\x7fELF"


@pytest.mark.parametrize("instance", FEW, ids=lambda i: f"{i.kernel}-{i.dtype}")
def test_kernels_compile_by_nvrtc_without_a_warning(instance):
    """U086, U087: for sm_90, from the wheel alone."""
    check_compiles(instance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "instance", ALL, ids=lambda i: f"{i.kernel}-{i.dtype}-{int(i.step)}-{i.dim}"
)
def test_every_kernel_compiles_by_nvrtc(instance):
    check_compiles(instance)


def test_a_fault_in_a_kernel_is_reported_at_its_line():
    """U086: the message names the .cu or .cuh file and its own line."""
    source = _source.source_of(FORWARD)
    line = (KERNELS / "band.cuh").read_text().split("\n").index("    int64 tile, b, h;") + 1
    broken = source.replace("    int64 tile, b, h;", "    missing tile, b, h;")
    with pytest.raises(_compile.CompileError, match=rf"band\.cuh\({line}\): error"):
        compile_offline(broken, "forward.cu", (*_source.OPTIONS, "-arch=sm_90"))


TABLE = Path(__file__).parent / "gpu" / "kernels.tsv"


def test_the_table_of_registers_is_of_these_sources(monkeypatch):
    """No spills, and shared memory that each device has; made by tools/compile_all.py."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("kernels_cupy")
    first, header, *rows = TABLE.read_text().splitlines()
    assert first == f"# {tool.digest()}", "run python tools/compile_all.py"
    assert tuple(header.split("\t")) == tool.COLUMNS
    found = [dict(zip(tool.COLUMNS, row.split("\t"), strict=True)) for row in rows]
    assert len(found) == sum(len(tool.wanted(arch)) for arch in tool.ARCHITECTURES)
    for row in found:
        assert row["spills"] == "0", row
        assert int(row["registers"]) <= 255


def test_the_page_of_limits_is_of_this_table():
    spec = importlib.util.spec_from_file_location("roofline", ROOT / "tools/roofline.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    made = tool.PAGE.read_text(encoding="utf-8").split(tool.BEGIN)[1].split(tool.END)[0]
    assert made == tool.tables(), "run python tools/roofline.py --write"


# --- the script for a machine with a GPU ----------------------------------------------------------

SCRIPT = Path(__file__).parent / "gpu" / "cupy.sh"


def test_the_script_for_a_gpu_ends_within_six_minutes():
    """Each step has a limit, and is a program that is there."""
    text = SCRIPT.read_text()
    tools = len(re.findall(r"for tool in ([^;]*);", text)[0].split())
    steps = re.findall(r'step "([^"]+)" (\d+) (.*)', text)
    assert sum(int(limit) * (tools if "$" in name else 1) for name, limit, _ in steps) < 360
    named = set(re.findall(r"cupy_run\.py (\w+)", text))
    programs = (SCRIPT.parent / "cupy_run.py").read_text()
    assert named == {"machine", "compiling", "conformance", "small", "timings"}
    assert all(f"def {name}():" in programs for name in named)


def test_the_script_says_why_it_cannot_run():
    """On a machine without a GPU, or with one that is hidden: at once, and it fails."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 1
    assert re.search("the backend is not available: there is .*driver", done.stderr)
