"""Faults of the CuPy backend's host side that its tests must find, each killed by a named test.

A mutant is a copy of the package with one piece of source replaced, imported in the package's place
together with the tests, which see nothing else.
"""

import contextlib
import importlib
import inspect
import shutil
import sys
from pathlib import Path

import cuda_emulator
import plsh_cupy
import pytest
from emulated import BACKEND
from planted import Mutant

PACKAGE = Path(plsh_cupy.__file__).parent
TESTS = tuple(
    f"test_cupy_{x}" for x in ("host", "device", "torch", "kernels", "tensor", "emulator")
)
HOST, DEVICE, TORCH, KERNELS, TENSOR, _ = TESTS
FRESH = ("plsh_cupy", "cuda_emulator", "emulated", *TESTS)
"""What is imported anew for each mutant."""

RESULTS = "test_results_are_those_of_the_emulated_backend"
DECAY = {"name": "decay"}
COVER = (f"{HOST}.test_launches_cover_each_block_once", {"kernel": "forward", "limit": 5})
SLOPES = (f"{HOST}.test_launches_cover_each_block_once", {"kernel": "backward_slopes", "limit": 5})
STREAM = f"{DEVICE}.test_work_goes_to_the_device_and_stream_of_the_caller"
TORCH_STREAM = f"{TORCH}.test_work_goes_to_the_device_and_stream_of_torch"
REPLACED = (f"{HOST}.test_another_target_or_compiler_compiles_anew",)
REFUSED = f"{HOST}.test_a_read_only_or_full_folder_does_no_harm"
BROKEN = f"{DEVICE}.test_the_current_device_is_restored_after_an_error"
WARM = f"{DEVICE}.test_a_graph_is_recorded_warm_only_and_keeps_its_temporaries"
TABLES = f"{DEVICE}.test_a_table_of_a_recorded_graph_stays"
MISREAD = f"{HOST}.test_a_tensor_that_kernels_would_misread_is_refused"
MISSING = f"{HOST}.test_what_is_missing_is_named_in_one_line"
UNFIT = (f"{TENSOR}.test_what_does_not_fit_is_known",)
SPLIT = (f"{TENSOR}.test_wide_bands_have_tall_tiles_and_go_first",)
FAR = f"{KERNELS}.test_blocks_without_a_formula_need_tables_of_the_tokens_only"

MUTANTS = [
    # Launch shapes
    Mutant("grid not split", "_plan", "range(0, blocks, limits.grid)",
           "range(0, blocks, max(blocks, 1))", *COVER),
    Mutant("last grid full", "_plan", "min(limits.grid, blocks - first)", "limits.grid", *COVER),
    Mutant("tiles rounded down", "_plan", "tiles = -(-length // instance.rows)",
           "tiles = length // instance.rows", *COVER),
    Mutant("slopes by tile", "_plan", '(1 if instance.kernel == "backward_slopes" else tiles)',
           "tiles", *SLOPES),
    Mutant("shared memory unchecked", "_plan", "if shared > limits.shared_bytes:", "if False:",
           f"{HOST}.test_shared_memory_is_checked_before_a_launch", error=pytest.fail.Exception),
    Mutant("tiles never shrink", "_plan", "found.rows > _LEAST_ROWS", "found.rows > 64",
           f"{HOST}.test_tiles_fit_the_device", {"kilobytes": 99}),
    Mutant("bound of D alone", "_plan", "if max(dim, value_dim) <= bound)", "if dim <= bound)",
           f"{HOST}.test_the_bound_of_the_dims_is_the_least_that_holds_both"),
    Mutant("ids of 4 bytes", "_plan", "pieces += [8 * self.rows, 8 * COLUMNS]",
           "pieces += [4 * self.rows, 4 * COLUMNS]", f"{DEVICE}.{RESULTS}", DECAY),
    # Tensor cores
    Mutant("tensor cores of old devices", "_plan", "limits.tensor\n        and ", "True and ",
           *UNFIT, {"why": "an old device"}),
    Mutant("all devices taken for new ones", "_cuda", "tensor=capability >= 80", "tensor=True",
           f"{DEVICE}.test_limits_are_those_of_the_device", {"capability": 75}),
    Mutant("dims in part of a piece", "_plan", "dim % 8 == value_dim % 8 == 0",
           "dim % 4 == value_dim % 8 == 0", *UNFIT, {"why": "D between pieces"}),
    Mutant("rounded counts", "_plan", "samples <= _TENSOR_SAMPLES", "samples > 0", *UNFIT,
           {"why": "many samples"}),
    Mutant("dims taken together", "_plan", "x.strides[-1] == 2 and ", "", *UNFIT,
           {"why": "dims apart"}),
    Mutant("addresses between pieces", "_plan", "(x.address, *x.strides[:-1])", "x.strides[:-1]",
           *UNFIT, {"why": "an address between pieces"}),
    Mutant("tokens between pieces", "_plan", "(x.address, *x.strides[:-1])", "(x.address,)",
           *UNFIT, {"why": "tokens between pieces"}),
    Mutant("a scale rounded into q", "_plan", "2.0 ** (exponent - 1), 2 * fraction", "scale, 1.0",
           f"{TENSOR}.test_the_scale_is_split_without_a_loss", {"scale": 0.3}),
    Mutant("narrow bands with tall tiles", "_plan", "order[:wide]), (instance, order[wide:])",
           "order), (instance, ())", *SPLIT, {"case": "some wide"}),
    Mutant("tall tiles on few processors", "_plan", "-(-length // TALL) < limits.processors",
           "-(-length // TALL) < 0", *SPLIT, {"case": "not one a processor"}),
    # Parameters
    Mutant("strides of 32 bits", "_params", "field[words[axis]] = stride",
           "field[words[axis]] = stride & 0x7FFFFFFF", f"{HOST}.test_strides_are_64_bit"),
    Mutant("heads and rows exchanged", "_params", '"b": "batch", "h": "head"',
           '"b": "head", "h": "batch"', f"{DEVICE}.{RESULTS}", DECAY),
    Mutant("a kind of integers", "_params", '"int16": 2', '"int16": 4',
           f"{HOST}.test_kinds_mirror_their_declaration"),
    # A call
    Mutant("large scales into q", "_plan", "if abs(scale) > 1:\n        return 1.0, scale",
           "if abs(scale) > 1:\n        return scale, 1.0",
           f"{KERNELS}.test_scales_that_leave_the_range_in_one_factor_only"),
    Mutant("every grid from the first block", "_call",
           'params["first_block"] = launch.first_block', 'params["first_block"] = 0',
           f"{KERNELS}.test_work_split_over_several_grids_is_the_same", {"method": "exact"}),
    Mutant("heads left out of the order", "_plan", "sorted(range(len(bandwidths)), key",
           "sorted([0] * len(bandwidths), key", f"{DEVICE}.{RESULTS}", DECAY),
    Mutant("slopes of rows by head", "_call",
           'axes = "bh" if slopes and isinstance(slopes[0], tuple) else "h"',
           'axes = "hb" if slopes and isinstance(slopes[0], tuple) else "h"',
           f"{KERNELS}.test_an_edge_equals_oracle", {"case": 0}),
    Mutant("gradient of integers", "_call", 'if "float" not in dtype:', "if False:",
           f"{KERNELS}.test_slopes_of_every_dtype", {"dtype": "int32"}),
    Mutant("one head of labels taken for all", "_call", "if labels.shape[0] == 1:", "if False:",
           f"{DEVICE}.{RESULTS}", {"name": "table on the host"}),
    Mutant("temporaries of a graph freed", "_call",
           "if self.device.capturing and self._temporaries:", "if False:",
           f"{HOST}.test_a_recorded_graph_keeps_its_temporaries", error=ValueError),
    Mutant("offsets read while a graph is recorded", "_call", "if self.device.capturing:\n",
           "if False:\n", f"{HOST}.test_offsets_are_not_read_while_a_graph_is_recorded",
           error=pytest.fail.Exception),
    # The axis of tables of labels
    Mutant("parts of tiles taken out", "_axis", "max(low - last, 0) % COLUMNS", "0", FAR,
           {"case": "queries after keys", "causal": False}),
    Mutant("labels left where they were", "_axis", "self.places(weight.labels(first, last))",
           "weight.labels(first, last)", FAR, {"case": "rows", "causal": False}),
    Mutant("places without what is before", "_axis", "- self._before[span]", "", FAR,
           {"case": "queries before keys", "causal": False}, (IndexError, AssertionError)),
    # Tables on the device
    Mutant("one table for all devices", "_tables", "full = (device.key, key)", "full = (0, key)",
           f"{HOST}.test_a_table_is_uploaded_once_a_device_and_stream"),
    Mutant("tables without bound", "_tables", "while self._bytes > self._max_bytes:",
           "while False:", f"{HOST}.test_tables_are_bounded"),
    Mutant("tables counted twice", "_tables", "if full not in self._held and cost", "if cost",
           f"{HOST}.test_a_table_that_two_have_made_counts_once"),
    Mutant("recorded tables forgotten", "_tables", "if device.capturing:", "if False:", TABLES),
    # The cache of binaries
    Mutant("one binary for all targets", "_compile", "(version, *options, source)",
           "(version, source)", *REPLACED, {"change": {"target": "sm_80"}},
           pytest.fail.Exception),
    Mutant("one binary for all compilers", "_compile", "(version, *options, source)",
           "(*options, source)", *REPLACED, {"change": {"version": "12.9"}},
           pytest.fail.Exception),
    Mutant("torn entries trusted", "_compile",
           "return binary if hashlib.sha256(binary).digest() == digest else None",
           "return binary", f"{HOST}.test_a_damaged_entry_is_replaced", {"damage": None}),
    Mutant("entries written in place", "_compile", "os.replace(own, path)",
           "path.write_bytes(Path(own).read_bytes())", REFUSED, {"call": "replace"}),
    Mutant("read-only folders raise", "_compile", "with contextlib.suppress(OSError):",
           "with contextlib.suppress(KeyError):", REFUSED, {"call": "mkstemp"}, OSError),
    Mutant("entries left half done", "_compile", "Path(own).unlink(missing_ok=True)", "pass",
           REFUSED, {"call": "fdopen"}),
    Mutant("threads compile at once", "_compile", "    with lock:\n", "    if lock:\n",
           f"{HOST}.test_threads_compile_a_binary_once"),
    Mutant("log of the compiler lost", "_compile", "{log.strip()}", "",
           f"{HOST}.test_an_error_of_the_compiler_carries_its_log_and_a_remedy"),
    Mutant("lines of the source off by one", "_source", "#line {line}", "#line {line + 1}",
           f"{HOST}.test_lines_of_the_source_point_into_its_files", {"kernel": "forward"}),
    # The device
    Mutant("kernels of the last device", "_cuda", "kernel = self._held[device, instance] = ",
           "kernel = self._held[0, instance] = ",
           f"{DEVICE}.test_kernels_are_loaded_once_a_device"),
    Mutant("threads load at once", "_cuda",
           "            with self._lock:\n                kernel =",
           "            if self._lock:\n                kernel =",
           f"{DEVICE}.test_threads_load_a_kernel_once"),
    Mutant("shared memory not asked for", "_cuda", "if most > _OPT_IN:", "if False:",
           f"{DEVICE}.test_a_kernel_that_needs_more_shared_memory_asks_for_it"),
    Mutant("launched on the default stream", "_cuda", "launch.shared_bytes, self.stream, where",
           "launch.shared_bytes, 0, where", STREAM),
    Mutant("tables copied on the default stream", "_cuda",
           "stream=cupy.cuda.get_current_stream())",
           "stream=cupy.cuda.ExternalStream(0, self.index))", STREAM),
    Mutant("the current device used", "_cuda", "with cupy.cuda.Device(x.device.id):",
           "with cupy.cuda.Device():", STREAM),
    Mutant("a capture not refused", "_cuda", "        if self.capturing:\n", "        if False:\n",
           WARM, error=pytest.fail.Exception),
    Mutant("the legacy stream asked", "_cuda", "self.capturing = stream != 0 and bool(",
           "self.capturing = bool(", f"{DEVICE}.{RESULTS}", DECAY),
    Mutant("nothing held for a graph", "_cuda", "lambda held: None, tuple(arrays)",
           "lambda held: None, ()", WARM),
    Mutant("errors of NVRTC as they are", "_cuda", "except nvrtc.NVRTCError as error:",
           "except KeyError as error:", BROKEN, error=Exception),
    Mutant("programs left to NVRTC", "_cuda", "nvrtc.destroyProgram(program)", "pass", BROKEN),
    Mutant("binaries for newer devices", "_cuda", 'return f"compute_{max(older)}"',
           'return f"sm_{max(older)}"',
           f"{HOST}.test_a_device_newer_than_the_compiler_gets_code_for_its_driver",
           {"capability": 130, "target": "compute_120"}),
    Mutant("torch's device not entered", "_cuda", "with torch.cuda.device(index), cupy",
           "with cupy", TORCH_STREAM),
    Mutant("CuPy's stream for tensors", "_cuda",
           "torch.cuda.current_stream(index).cuda_stream", "cupy.cuda.get_current_stream().ptr",
           TORCH_STREAM),
    Mutant("strides of tensors in numbers", "_cuda", "tuple(size * stride for", "tuple(stride for",
           f"{TORCH}.{RESULTS}", DECAY),
    # Refusals
    Mutant("parameters of autograd taken", "_backend", "if wants_gradient(x):", "if False:",
           f"{TORCH}.test_a_parameter_is_refused_with_both_ways_out",
           error=pytest.fail.Exception),
    Mutant("arrays of two devices taken", "_backend", "if here != home:", "if False:",
           f"{DEVICE}.test_arrays_of_two_devices_are_refused", {"name": "v"},
           pytest.fail.Exception),
    Mutant("operands unchecked", "_backend", '"slopes": operands.slopes,', '"slopes": None,',
           MISREAD, {"why": "unaligned", "name": "slopes"}, pytest.fail.Exception),
    Mutant("addresses unchecked", "_backend", "if address % size or any(", "if any(",
           f"{DEVICE}.test_arrays_that_are_not_aligned_are_refused"),
    # Availability
    Mutant("wheel for a newer driver", "_available", "and major < needed", "and needed < 0",
           MISSING, {"lack": "wrong wheel"}),
    Mutant("two wheels taken", "_available", "if len(wheels) > 1:", "if len(wheels) > 2:", MISSING,
           {"lack": "two wheels"}),
    Mutant("no device taken for a fault", "_available", "if code == _NO_DEVICE or ", "if ",
           MISSING, {"lack": "no device"}),
    Mutant("a broken driver raises", "_available", "except Exception as error:",
           "except ImportError as error:", f"{HOST}.test_availability_never_raises",
           error=OSError),
]  # fmt: skip


@contextlib.contextmanager
def planted(mutant, monkeypatch, folder):
    """Import a copy of the package, with a fault if there is one, and its tests; yield the killer.

    Compiled kernels are those of the emulator that all tests share.
    """
    copy = shutil.copytree(PACKAGE, folder / "plsh_cupy", ignore=lambda *_: ["__pycache__"])
    if mutant.old:
        path = copy / f"{mutant.module}.py"
        path.write_text(mutant.changed(path.read_text()))

    def loaded():
        return [name for name in sys.modules if name.partition(".")[0] in FRESH]

    held = {name: sys.modules.pop(name) for name in loaded()}
    try:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(folder)
            emulator = importlib.import_module("cuda_emulator")
            patch.setattr(emulator, "shared_emulator", lambda: BACKEND.emulator)
            patch.setattr(emulator, "_Range", cuda_emulator._Range)
            module, _, name = mutant.test.partition(".")
            tests = importlib.import_module(module)
            assert Path(sys.modules["plsh_cupy"].__file__).is_relative_to(folder)
            if module == KERNELS:
                tests.put_in_place(patch)
            yield getattr(tests, name), arguments_of(tests, name, mutant, patch, folder)
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(held)


def arguments_of(tests, name, mutant, patch, folder):
    """Return what the test is called with: the mutant's arguments, and what fixtures would give."""
    made = {
        "monkeypatch": lambda: patch,
        "tmp_path": lambda: (folder / "empty").mkdir() or folder / "empty",
        "cupy": lambda: tests.put_stand_in(patch, folder),
        "torch": lambda: tests.put_torch(patch, folder),
        "machine": lambda: tests.put_machine(patch),
    }
    given = dict(mutant.arguments)
    if "case" in given and isinstance(given["case"], int):
        given["case"] = tests.EDGES[given["case"]]
    wanted = inspect.signature(getattr(tests, name)).parameters
    return {x: given[x] if x in given else made[x]() for x in wanted}


QUICK = {
    "grid not split",
    "shared memory unchecked",
    "strides of 32 bits",
    "every grid from the first block",
    "offsets read while a graph is recorded",
    "parts of tiles taken out",
    "one table for all devices",
    "torn entries trusted",
    "read-only folders raise",
    "threads compile at once",
    "log of the compiler lost",
    "kernels of the last device",
    "launched on the default stream",
    "the current device used",
    "CuPy's stream for tensors",
    "parameters of autograd taken",
}
"""Mutants of every run; the others are slow."""


def marked():
    """Return the mutants, those that are not quick marked as slow."""
    slow = (pytest.mark.slow,)
    return [pytest.param(m, marks=() if m.name in QUICK else slow, id=str(m)) for m in MUTANTS]


@pytest.mark.parametrize("mutant", marked())
def test_mutant_is_killed(mutant, monkeypatch, tmp_path):
    with (
        planted(mutant, monkeypatch, tmp_path) as (test, arguments),
        pytest.raises(mutant.error),
    ):
        test(**arguments)


def controls():
    """Return each test and its arguments once, without a fault."""
    found = {f"{m.test}-{m.arguments}": m._replace(old="") for m in MUTANTS}
    return [pytest.param(mutant, id=name) for name, mutant in found.items()]


@pytest.mark.slow  # the tests themselves run in their own files
@pytest.mark.parametrize("control", controls())
def test_the_package_as_it_is_survives(control, monkeypatch, tmp_path):
    """So that it is the fault that is found."""
    with planted(control, monkeypatch, tmp_path) as (test, arguments):
        test(**arguments)


def test_mutants_have_names_of_their_own():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert {m.name for m in MUTANTS} >= QUICK
