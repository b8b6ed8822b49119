"""PyTorch's CUDA kernels without a GPU: interpreted, compiled for devices, and their host side."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from plsh_torch import cuda
from plsh_torch.cuda import _available, _plan

import plsh

ROOT = Path(__file__).parents[1]
INTERPRETED = ROOT / "tests" / "interpreted"
TOOLS = str(ROOT / "tools")


def interpret(*arguments):
    """Run the tests under Triton's interpreter, chosen before Triton is imported; return passes."""
    importlib.import_module("triton")  # says so where it is missing
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(INTERPRETED), TOOLS, os.environ.get("PYTHONPATH", "")]),
    }
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, cwd=INTERPRETED, env=environment
    )
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0
    passed = int(re.search(r"(\d+) passed", done.stdout).group(1))
    print(f"{passed} tests passed under the interpreter: {' '.join(arguments)}")
    return passed


def test_kernels_equal_the_oracle_under_the_interpreter():
    """A few calls and laws; ``-m slow`` runs the whole grid."""
    assert interpret("test_kernels.py") >= 25


@pytest.mark.slow
def test_the_grid_equals_the_oracle_under_the_interpreter():
    """Lengths × head dims × weights × causal × dtypes × segments and offsets: 144 calls."""
    assert interpret("test_kernels.py", "-m", "slow", "-k", "test_grid") == 144


@pytest.mark.slow
def test_every_option_and_law_under_the_interpreter():
    assert interpret("test_kernels.py", "-m", "slow", "-k", "not test_grid") > 150


@pytest.mark.slow
def test_faults_of_the_kernels_are_found():
    """Each mutant of the kernels fails its test."""
    assert interpret("test_mutants.py", "-m", "slow or not slow") >= 30


# --- the table of the compiler --------------------------------------------------------------------

TABLE = ROOT / "tests" / "gpu" / "triton.tsv"


def test_every_kernel_compiles_for_its_devices_without_spills(monkeypatch):
    """And products of float16 and bfloat16 run on the tensor cores; by tools/compile_all.py."""
    monkeypatch.syspath_prepend(TOOLS)
    made = importlib.import_module("kernels_triton")
    first, heads, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert first == f"# {made.digest()}", "run python tools/compile_all.py --kernels triton"
    assert heads.split("\t") == list(made.COLUMNS)
    rows = [dict(zip(made.COLUMNS, line.split("\t"), strict=True)) for line in lines]
    for arch in made.ARCHITECTURES:
        of_arch = [row for row in rows if row["arch"] == str(arch)]
        assert len(of_arch) == len(made.wanted(arch))
    for row in rows:
        assert row["spills"] == "0" or row["dtype"] == "float64", row
        assert int(row["registers"]) <= 255
        assert int(row["shared"]) <= made.SHARED[int(row["arch"])] * 1024
        if row["dtype"] in ("float16", "bfloat16"):
            assert row["products"] != "none", row


def test_tiles_are_chosen_for_every_device():
    """Devices of 12.x have the shared memory and the products of 8.x; newer ones are served too."""
    generations = [_plan.generation_of(x) for x in ((8, 0), (8, 9), (9, 0), (10, 3), (12, 1))]
    assert generations == [80, 80, 90, 100, 80]
    assert set(generations) == set(_plan.TILES)
    with pytest.raises(ValueError, match="at most 128, got 129"):
        _plan.tile_for("forward", "float64", True, False, 129)


# --- the script for a machine with a GPU ----------------------------------------------------------

SCRIPT = ROOT / "tests" / "gpu" / "torch.sh"


def test_the_script_for_a_gpu_ends_within_six_minutes():
    """Each step has a limit, and is a program that is there."""
    text = SCRIPT.read_text(encoding="utf-8")
    steps = re.findall(r'step "([^"]+)" (\d+) ', text)
    assert sum(int(limit) for _, limit in steps) < 360
    named = set(re.findall(r"torch_run\.py (\w+)", text))
    programs = (SCRIPT.parent / "torch_run.py").read_text(encoding="utf-8")
    assert named == {"machine", "conformance", "timings"}
    assert all(f"def {name}():" in programs for name in named)


def test_the_script_says_why_it_cannot_run():
    """On a machine without a GPU, or with one that is hidden: at once, and it fails."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 1
    assert "this torch sees no CUDA device" in done.stderr


# --- who may run them -----------------------------------------------------------------------------


@pytest.fixture
def _no_memory():
    """Forget what is known of devices."""
    _available.of_device.cache_clear()
    yield
    _available.of_device.cache_clear()


DEVICE = torch.device("cuda", 0)


@pytest.mark.usefixtures("_no_memory")
def test_a_call_without_triton_is_told_what_to_do(monkeypatch):
    """It names what is missing, and who runs on torch's own operations."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tensor = types.SimpleNamespace(shape=(1, 1, 4, 8), device=DEVICE, dtype=torch.float32)
    with pytest.raises(plsh.UnsupportedByBackendError, match=r"Triton.*backend='reference'"):
        cuda.call(tensor, tensor, tensor, None, None)


@pytest.mark.usefixtures("_no_memory")
@pytest.mark.parametrize(
    ("capability", "hip", "dtype", "dim", "words"),
    [
        ((7, 5), None, torch.float16, 64, "capability 8.0 or later, and this device has 7.5"),
        ((9, 0), "6.0", torch.float16, 64, "NVIDIA"),
        ((9, 0), None, torch.float16, 257, "float16 up to 256, got 257"),
        ((9, 0), None, torch.float64, 129, "float64 up to 128, got 129"),
        ((8, 0), None, torch.float64, 128, None),
        ((10, 0), None, torch.bfloat16, 256, None),
    ],
)
def test_what_a_device_can_not_run_is_said(monkeypatch, capability, hip, dtype, dim, words):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    why = _available.reason(DEVICE, dtype, dim)
    assert why is None if words is None else words in why


def test_other_devices_are_refused_by_name():
    x = torch.empty(1, 2, 4, 8, device="meta")
    fake = types.SimpleNamespace(device=torch.device("mps"))
    from plsh_torch._attend import attend

    with pytest.raises(plsh.UnsupportedByBackendError, match="CPU and CUDA tensors, got mps"):
        attend(fake, x, x, None)
