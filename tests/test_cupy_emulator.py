"""The emulator finds what it promises, each barrier is needed, and tests reach every line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import cuda_emulator
import numpy as np
import pytest
from cuda_emulator import HERE, KERNELS, EmulatedBackend, Emulator, EmulatorFault
from emulated import BACKEND, results
from laws import inputs
from plsh_cupy._params import PARAMS
from plsh_cupy._plan import Instance, Launch

import plsh
from plsh.compat import numpy_dtype

# --- planted faults, one of a class ---------------------------------------------------------------

PROBE = """
#include <HEADER.cuh>
extern "C" __global__ void plsh_probe(const Params p) {
    Arena arena;
    Shared<int> x = arena.take<int>(THREADS);
    Shared<int> y = arena.take<int>(THREADS);
    const int i = threadIdx.x;
    (void)x, (void)y, (void)i, (void)p;
    BODY
}
"""

SOUND = (
    "x[i] = i; __syncthreads(); y[i] = x[THREADS - 1 - i]; write<int>(p.out.data + 4 * i, y[i]);"
)

FAULTS = {
    "sound": (SOUND, None),
    "missing barrier": (SOUND.replace("__syncthreads(); ", ""), "never written|race: "),
    "race of writers": ("x[0] = i;", "race: write of shared memory at byte 0, which thread"),
    "write after read": ("x[i] = i; __syncthreads(); int z = x[(i + 1) % THREADS]; x[i] = z;",
                         "race: "),
    "race inside a warp": ("x[i] = i; int z = x[i ^ 1]; y[i] = z;", "never written|race: "),
    "uninitialised shared memory": ("y[i] = x[i];", "which was never written"),
    "overrun of a piece": ("x[i + 1] = i;", "outside of its piece"),
    "underrun of a piece": ("y[i - 1] = i;", "outside of its piece"),
    "more shared memory than asked for": ("arena.take<double>(THREADS);", "were asked for"),
    "divergent barrier": ("if (i < 100) __syncthreads();", "barrier divergence"),
    "two barriers": ("if (i < 128) { __syncthreads(); } else {\n __syncthreads(); }",
                     "barrier divergence"),
    "divergent shuffle": ("if (i != 40) __shfl_xor_sync(0xffffffffu, i, 1);",
                          "divergence|thread 40 has ended"),
    "read past an array": ("read<int>(p.out.data + 4 * THREADS);", "outside of every array"),
    "read before an array": ("read<int>(p.out.data - 4);", "outside of every array"),
    "null": ("read<int>(p.q.data);", "outside of every array"),
    "misaligned": ("read<int>(p.out.data + 2);", "misaligned read of 4 bytes"),
    "misaligned vector": ("load_four<int>(x + 1);", "misaligned read of 16 bytes"),
    "write to an input": ("write<int>(p.k.data, 1);", "read-only"),
    "two blocks write one place": ("if (i == 0) write<int>(p.out.data, 1);",
                                   "block 1, thread 0: write of array .* where block 0 wrote"),
    "one block reads what another wrote": (
        "if (i == 0 && blockIdx.x == 0) write<int>(p.out.data, 1);\n"
        "if (i == 0 && blockIdx.x == 1) read<int>(p.out.data);", "where block 0 wrote"),
}  # fmt: skip


class _Probe(NamedTuple):
    """An instance of a kernel of one's own, with what another one leaves open."""

    like: Instance
    kernel: str = "probe"
    symbol: str = "plsh_probe"

    def macros(self, size):
        return self.like.macros(size)


PLAIN = Instance("forward", "float32", False, 64, 64)


class Probe:
    """A kernel with a body of one's own, on an emulator of its own."""

    def __init__(self, folder, body, header="tile", like=PLAIN, core_flags=None):
        for path in KERNELS.iterdir():
            shutil.copy(path, folder)
        (folder / "probe.cu").write_text(PROBE.replace("HEADER", header).replace("BODY", body))
        self.emulator, self.like = Emulator(folder, folder), like
        if core_flags is None:
            shutil.copy(BACKEND.emulator.compile_core(), folder)
        else:
            self.emulator.core_flags = core_flags

    def run(self, blocks=1, *given, size=256, shared_bytes=2048, **integers):
        """Return what it writes; `given` are (view, array of tokens and dims) that it may read."""
        device = EmulatedBackend(emulator=self.emulator).device()
        params = np.zeros((), PARAMS)
        out = device.empty((size,), "float32")
        device.locate(out).fill(params, "out", "d")
        device.locate(np.zeros(4)).fill(params, "k", "d")
        for name, x in given:
            device.locate(x).fill(params, name, "nd")
        for name, x in integers.items():
            params[name] = x
        launch = Launch(_Probe(self.like), 0, blocks, self.like.threads, shared_bytes, 1)
        device.run(launch, params)
        return out.view(np.int32)


def run_probe(folder, body, blocks, core_flags=None):
    """Compile and run a kernel with a body of one's own; return what it wrote."""
    return Probe(folder, body, core_flags=core_flags).run(blocks)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, tmp_path):
    """Race, missing barrier, overrun, uninitialised shared memory, divergence, ownership."""
    body, message = FAULTS[name]
    if message is None:
        np.testing.assert_array_equal(run_probe(tmp_path, body, 1), np.arange(256)[::-1])
        return
    with pytest.raises(EmulatorFault, match=message):
        run_probe(tmp_path, body, 2)


def test_warps_shuffle_and_vote(tmp_path):
    """A lane's neighbour, and one bit a lane; also of lanes that come to it last."""
    body = """
    int other = __shfl_xor_sync(0xffffffffu, i, 3);
    unsigned bits = __ballot_sync(0xffffffffu, i % 3 == 0);
    bool all = __ballot_sync(0xffffffffu, true) == 0xffffffffu;
    write<int>(p.out.data + 4 * i, all && other == (i ^ 3) ? (int)bits : -1);
    """
    votes = (np.arange(256).reshape(8, 32) % 3 == 0).astype(np.uint32) << np.arange(32, dtype="u4")
    want = votes.sum(axis=1, dtype=np.uint32).repeat(32)
    np.testing.assert_array_equal(run_probe(tmp_path, body, 1).view(np.uint32), want)


def test_all_shared_memory_is_handed_out_by_the_arena():
    """Static or dynamic, none is beyond the emulator's sight."""
    for path in KERNELS.glob("*.cu*"):
        assert path.read_text().count("__shared__") == (path.name == "device.cuh")


def test_threads_take_turns_on_any_processor(tmp_path):
    """Without the switch of stacks written for x86-64."""
    flags = ("-O2", "-DPLSH_PORTABLE")
    np.testing.assert_array_equal(run_probe(tmp_path, SOUND, 1, flags), np.arange(256)[::-1])


def test_compiled_kernels_stay_for_the_next_process(tmp_path, monkeypatch):
    """Under a name that changes with the source."""
    instance = Instance("backward_slopes", "float32", False, 64, 64)
    first = Emulator(build=tmp_path).compile(instance)
    run, again = subprocess.run, []
    monkeypatch.setattr(subprocess, "run", lambda *x, **kw: again.append(x) or run(*x, **kw))
    assert Emulator(build=tmp_path).compile(instance) == first
    assert not again
    kernels = shutil.copytree(KERNELS, tmp_path / "kernels")
    with (kernels / "params.cuh").open("a") as file:
        file.write("// changed\n")
    assert Emulator(kernels, tmp_path).compile(instance) != first


def test_a_checkout_that_cannot_be_written_has_a_temporary_folder(tmp_path, monkeypatch):
    blocked = tmp_path / "tests" / "cuda_emulator"
    (tmp_path / ".pytest_cache").write_text("")
    monkeypatch.setattr(cuda_emulator, "HERE", blocked)
    folder = cuda_emulator.shared_folder()
    assert folder.is_dir()
    assert tmp_path not in folder.parents


def test_old_kernels_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_emulator, "HERE", tmp_path / "tests" / "cuda_emulator")
    monkeypatch.setattr(cuda_emulator, "ENTRIES", 3)
    for age in range(6):
        path = cuda_emulator.shared_folder() / str(age)
        path.write_text("")
        os.utime(path, (1000 - age, 1000 - age))
    assert {path.name for path in cuda_emulator.shared_folder().iterdir()} == {"0", "1", "2"}


def test_a_compiler_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"g\+\+.*install"):
        Emulator(build=tmp_path).compile(Instance("forward", "float32", False, 64, 64))


# --- every barrier is needed ----------------------------------------------------------------------

WAITS = r"__syncthreads|wait_copies"
SITES = [
    (path.name, number)
    for path in sorted(KERNELS.glob("*.cu*"))
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if path.name != "mma.cuh" and re.search(WAITS, line)
]


def scenarios(backend):
    """Calls that together need every barrier: tiles on both sides, chunks, words, heads."""
    q, k, v = inputs(193, dtype="float32", batch=1, heads=2, kv_heads=1, head_dim=40, value_dim=36)
    grad_out = np.ones((1, 2, 193, 36), dtype="float32")
    call = {"slopes": 0.01, "segment_ids": np.arange(193)[None] // 70, "backend": backend}
    for method in ("exact", plsh.PositionalLSH(40)):
        yield lambda method=method: results(q, k, v, method, grad_out, **call)
    q, k, v, grad_out = (x[..., :70, :4] for x in (q, k, v, grad_out))
    call = {"slopes": 0.01, "causal": True, "backend": backend}
    far = {"q_offset": 0, "k_offset": 1000}
    yield lambda: results(q, k, v, plsh.PositionalLSH(4), grad_out, **call, **far)
    large = v.copy()
    large[..., 0] = 3e38  # one lane's sums pass the range
    yield lambda: plsh.attention(q, k, large, method="exact", **call)
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 40, "value_dim": 24}
    q, k, v = (x.astype(numpy_dtype("bfloat16")) for x in inputs(193, **shape))
    grad_out = np.ones((1, 2, 193, 24), dtype=q.dtype)
    call = {"slopes": 0.01, "backend": backend}
    for method in ("exact", plsh.PositionalLSH(40)):
        yield lambda method=method: results(
            q, k, v, method, grad_out, segment_ids=np.arange(193)[None] // 70, **call
        )
    yield lambda: results(q, k, v, "exact", grad_out, **call)
    yield lambda: plsh.attention(q, k, v, method="exact", causal=True, **call, **far)
    huge = v.copy()
    huge[..., 0] = 3e38
    yield lambda: plsh.attention(q, k, huge, method="exact", **call)


def run_all(calls):
    for made in calls:
        made()


@pytest.fixture(scope="module")
def freely_skipped():
    """A backend of its own, so that no other test meets a barrier that is skipped."""
    backend = EmulatedBackend("cupy_skipped", Emulator(build=BACKEND.emulator.build))
    plsh.register_backend(backend)
    return backend


def test_sites_were_found():
    files = [path for path in KERNELS.glob("*.cu*") if path.name != "mma.cuh"]
    assert len(SITES) == sum(len(re.findall(WAITS, path.read_text())) for path in files)
    assert len(SITES) > 35


def test_nothing_is_found_with_every_barrier(freely_skipped):
    run_all(scenarios(freely_skipped.name))


@pytest.mark.parametrize(("file", "line"), SITES)
def test_without_this_barrier_a_fault_is_found(file, line, freely_skipped):
    emulator = freely_skipped.emulator
    emulator.skipped = (file, line)
    try:
        with pytest.raises(
            EmulatorFault, match=r"race|never written|divergence|in flight|not waited"
        ):
            run_all(scenarios(freely_skipped.name))
    finally:
        emulator.skipped = None


# --- coverage -------------------------------------------------------------------------------------

COVER = """
import sys
import test_cupy_kernels as tests
import test_cupy_tensor as tensor_tests
import test_numpy_backend
from cuda_emulator import EmulatedBackend, Emulator
from emulated import put_in_place
import pytest
emulator = Emulator(build=sys.argv[1], flags=("-O0", "--coverage", "-fprofile-abs-path"))
with pytest.MonkeyPatch.context() as patch:
    backend = EmulatedBackend(emulator=emulator)
    patch.setattr(tests, "BACKEND", backend)
    put_in_place(patch, backend)
    for module in (tests, tensor_tests):
        for case in module.COVERING:
            test_numpy_backend.check_band(case)
        for law in module.COVERING_LAWS:
            law()
"""


def measure(build):
    """Run the covering calls; return {file: (lines, lines run, branches, branches taken)}."""
    environment = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[1] / "backends")]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {environment!r}\n{COVER}", str(build)],
        check=True, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    lines, branches = {}, {}
    for data in build.glob("*.gcda"):
        done = subprocess.run(
            ["gcov", "--json-format", "--stdout", "--branch-probabilities", str(data)],
            check=True, capture_output=True, text=True, cwd=build,
        )  # fmt: skip
        for file in json.loads(done.stdout)["files"]:
            path = Path(file["file"])
            if path.parent != KERNELS:
                continue
            for line in file["lines"]:
                key = (path.name, line["line_number"])
                lines[key] = lines.get(key, 0) + line["count"]
                for number, branch in enumerate(line["branches"]):
                    if not branch["throw"]:
                        own = (*key, number)
                        branches[own] = branches.get(own, 0) + branch["count"]
    return lines, branches


@pytest.mark.slow
def test_tests_reach_the_kernels(tmp_path):
    """At least 95 % of the lines and of the branches of every file."""
    lines, branches = measure(tmp_path)
    files = {path.name for path in KERNELS.glob("*.cu*")} - {"device.cuh", "mma.cuh"}
    assert {name for name, _ in lines} == files
    for name in sorted(files):
        for what, counts in (("lines", lines), ("branches", branches)):
            own = {key: count for key, count in counts.items() if key[0] == name}
            reached = sum(count > 0 for count in own.values())
            missed = sorted({key[1] for key, count in own.items() if count == 0})
            assert reached >= 0.95 * len(own), f"{name}: {what} {missed} are not reached"


# --- the twin -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (
            "device.cuh",
            "widen|infinity|power_of_two|logarithm|count_bits|binade|inverse_power|thread_afresh"
            "|read|write|load_four",
        ),
        ("mma.cuh", "pack|mma|load_matrices|load_transposed|copy_later|commit_copies|wait_copies"),
    ],
)
def test_the_twin_declares_what_the_header_does(header, names):
    """Whatever a kernel may call has both forms."""
    ours, twin = ((folder / header).read_text() for folder in (KERNELS, HERE))
    for text in (ours, twin):
        assert set(re.findall(rf"\b({names})(?:<\w+>)?\(", text)) == set(names.split("|"))


def test_the_twin_has_the_types_of_the_device_header():
    ours, twin = ((folder / "device.cuh").read_text() for folder in (KERNELS, HERE))
    for name in ("Half", "BFloat16", "Narrow", "Four", "Arena", "Shared"):
        assert re.search(rf"\b{name}\b", ours)
        assert re.search(rf"\b{name}\b", twin)
