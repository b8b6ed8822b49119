"""Faults of the torch backend that its tests must find: each mutant is killed by a named test.

A mutant of the kernel is its modules with one piece of source replaced, compiled afresh and put
behind the operators; a mutant of the call path or of the vmap rule takes the place of the functions
that it changes.
"""

import importlib
from pathlib import Path

import plsh_torch
import pytest
import test_torch_backend as tests
import test_torch_threads as threads
import test_torch_transforms as transforms
import torch
from planted import Mutant, call, compile_afresh, controls, new_package
from plsh_torch import _attend, _ops, _vmap
from test_torch_backend import TorchCall

KERNEL = (
    "_cache", "_scratch", "_threads", "_weights", "_tiles", "_whole", "_band", "_bounds", "_call",
)  # fmt: skip
"""The kernel's modules, each after those that it imports."""
FOLDER = Path(plsh_torch.__file__).parent


ORACLE = "test_call_equals_oracle"
CUT = "test_any_cut_of_the_work_gives_the_same"
EXACT = {"call": TorchCall("exact", (2, 1), (321, 321), (16, 8), 1, dtype="float32", flatter=9.0)}
CAUSAL = {"call": TorchCall("exact", (2, 1), (321, 321), (16, 8), 1, True, flatter=99.0)}
WINDOW = {"call": TorchCall("windows", (2, 2), (321, 321), (16, 8), 1, dtype="float32")}
LSH = {"call": TorchCall("lsh", (2, 1), (321, 321), (16, 8), 1, flatter=32.0)}
LSH_CAUSAL = {"call": TorchCall("cuts", (2, 1), (321, 321), (16, 8), 1, causal=True)}
SHORT = {"call": TorchCall("lsh", lengths=(33, 65), flatter=8.0)}
DECAY = {"call": TorchCall("window", lengths=(33, 65))}
PADDED = {"call": TorchCall("exact", lengths=(321, 321), segments="one", dtype="float32")}
GROUPED = {"call": TorchCall("exact", (4, 2), (321, 321), dtype="float32")}
HIDDEN = {"case": "future", "n": 290, "dtype": "float32"}
NAN = {"method": "exact", "causal": False, "fill": float("nan")}
POISON = "test_nothing_is_read_before_it_is_written"
MATES = {"method": "exact", "dtype": "float32"}
COMPILES = "test_a_seed_that_changes_each_step_compiles_at_most_twice"

MUTANTS = [
    # Tiles
    Mutant("last block with keys left out", "_tiles", "(count - 1 - first) // rows",
           "(count - 1 - first) // rows - 1", ORACLE, EXACT),
    Mutant("first block with keys left out", "_tiles", "chunk.tiles * rows - 1) // rows)",
           "chunk.tiles * rows - 1) // rows) + 1", ORACLE, CAUSAL),
    Mutant("chunk as wide as its first tile", "_tiles", "before if before > left else left",
           "left or before", ORACLE, CAUSAL),
    Mutant("padding copied", "_tiles", "(ids[self._batch, there] < 0)[:, None], 0)",
           "(ids[self._batch, there] < -9)[:, None], 0)",
           "test_what_stands_in_padding_reaches_nothing", NAN),
    Mutant("padding sees padding", "_tiles", "keys.masked_fill_(keys < 0, -2)", "pass",
           ORACLE, PADDED),
    Mutant("rows before the keys not zeroed", "_tiles", "out[: here.start] = 0", "pass", POISON),
    Mutant("gradients of keys not cleared", "_call", "Sum(own.zero_(),", "Sum(own,", POISON),
    Mutant("sums of half precision never written", "_call", "] = made.x", "] = 0", ORACLE,
           {"call": TorchCall("exact", (2, 1), (321, 321), dtype="bfloat16")}),
    Mutant("missing keys seen", "_tiles", "if len(at) == here.stop - here.start:", "if True:",
           ORACLE, EXACT),
    Mutant("wrong key head", "_tiles", "own = self._own(name, x, self._head // self._tokens.group)",
           "own = self._own(name, x, self._head % x.shape[1])", ORACLE, GROUPED),
    Mutant("sums over keys from shifted windows", "_tiles", "own = total[tile * rows :",
           "own = total[tile * rows + 1 :", ORACLE, WINDOW, (AssertionError, RuntimeError)),
    Mutant("sums over keys of few tiles from other tiles' queries", "_tiles", "x.unbind(), strict",
           "x.flip(0).unbind(), strict", ORACLE, EXACT),
    Mutant("keys at the edge get no gradient", "_tiles", "head[there] += total[here]", "pass",
           ORACLE, EXACT),
    # Weights
    Mutant("block's first key left out", "_weights", "torch.ge(key, begins,",
           "torch.gt(key, begins,", ORACLE, LSH),
    Mutant("block's last query left out", "_weights", "self._bounds(self._left[1], 0)",
           "self._bounds(self._left[1], 1)", ORACLE, LSH),
    Mutant("right pivot ignored", "_weights", "self._bounds(self._right[0], 0)",
           "self._bounds(self._right[0], FAR)", ORACLE, LSH),
    Mutant("diagonal counted twice", "_weights", "far[:, : self.samples, -at:] = 0", "pass",
           "test_any_cut_of_the_work_gives_the_same", {"method": "lsh", "causal": False}),
    Mutant("causal diagonal not cut", "_weights", ".mul_(lower)", "", ORACLE, LSH_CAUSAL),
    Mutant("normaliser forgotten", "_weights", "math.log(self.samples)", "0.0", ORACLE, LSH),
    Mutant("width off by one", "_weights", "apart.abs() <= self._width",
           "apart.abs() < self._width", ORACLE, WINDOW),
    Mutant("distance off by a piece", "_weights", "-sign * piece.begin * self._rows",
           "-sign * piece.end * self._rows", CUT, {"method": "exact", "causal": True}),
    # Whole heads
    Mutant("width of whole heads off by one", "_whole", "apart.abs() <= limit",
           "apart.abs() < limit", ORACLE, DECAY),
    Mutant("later keys counted by the query's blocks", "_whole",
           "_begun(labels_k, queries).swapaxes(-1, -2)", "before", ORACLE, SHORT),
    Mutant("whole keys start late", "_call", "max(ahead - reach, 0)", "max(ahead - reach + 1, 0)",
           "test_chunks_of_queries_equal_the_whole", {"method": "window", "causal": True}),
    # The kernel
    Mutant("scale forgotten in the gradient", "_band", "piece, ds, q, scale)", "piece, ds, q, 1.0)",
           ORACLE, EXACT),
    Mutant("lse taken for constant", "_band",
           'base = base - group.queries("dlse", given.grad_lse[..., None])', "pass",
           ORACLE, EXACT),
    Mutant("row sum dropped", "_band", "ds.copy_(base)", "ds.zero_()", ORACLE, EXACT),
    Mutant("underflow not noticed", "_band", "(total >= limits.least) &", "(total >= 0) &",
           "test_a_hidden_key_far_above_the_visible_ones_empties_no_row", HIDDEN),
    Mutant("underflow without a shift not noticed", "_band",
           "not total.amin().item() >= 2.0**LEAST", "False",
           "test_rows_that_see_far_keys_only_are_not_empty", {"dtype": "float32", "n": 300}),
    Mutant("shift of mates", "_band", "torch.where(mode.large, top, 0)", "top + 0.1",
           "test_a_batch_row_does_not_depend_on_its_mates", MATES),
    Mutant("cotangents of dead rows kept", "_band",
           "log, do, base = (x.masked_fill(dead, 0) for x in (log, do, base))",
           "log, base = (x.masked_fill(dead, 0) for x in (log, base))",
           "test_rows_that_see_no_key_have_no_gradient", {"method": "exact"}),
    Mutant("keys summed one after another", "_band", "STRIP = 256", "STRIP = 1 << 30",
           "test_sums_over_many_keys_lose_no_digits", {"method": "exact", "rows": 1}),
    Mutant("slopes' gradient of the wrong sign", "_band", ".sub_(group.distance_sum(ds, piece))",
           ".add_(group.distance_sum(ds, piece))", ORACLE, EXACT),
    # Parts and threads
    Mutant("segments all begin at the first query", "_call", "at = begin + chunk.tile * size",
           "at = chunk.tile * size", CUT, {"method": "exact", "causal": True}),
    Mutant("parts of one key head apart", "_call", "(part.rows.start, part.keys.start)",
           "(part.rows.start, part.keys.start, id(part))", ORACLE, GROUPED),
    Mutant("settings not restored", "_threads", "setters.openmp(count)", "pass",
           "test_settings_of_the_caller_and_of_new_threads_are_as_before", {"fails": True}),
    Mutant("threads to come set too", "_threads", "setters.openmp(1)", "torch.set_num_threads(1)",
           "test_settings_of_the_caller_and_of_new_threads_are_as_before", {"fails": False}),
    Mutant("a thread not alone", "_threads", "torch.inference_mode(), alone()",
           "torch.inference_mode()", "test_work_is_shared_and_each_thread_works_alone"),
    Mutant("a thread in a mode of its own", "_threads", "torch.inference_mode(), alone()",
           "alone()", "test_work_is_shared_and_each_thread_works_alone"),
    Mutant("bound by one head's keys", "_bounds", "[rows, None] < 0, 0)", "[rows, None] < -9, 0)",
           "test_what_stands_in_padding_reaches_nothing", NAN),
    # The call path and the vmap rule
    Mutant("seed drawn on the call path", "_recipe", "_words(step.seed) if step",
           "_words(__import__('plsh').hashing.fold_seed(step.seed)) if step", COMPILES,
           {"as_tuple": True, "grad": False}, Exception),
    Mutant("large seeds folded together", "_recipe", "word - (1 << 64) if word >= 1 << 63",
           "word - (1 << 63) if word >= 1 << 63",
           "test_seeds_up_to_the_largest_word_are_told_apart"),
    Mutant("mapped slopes serve the wrong rows", "_vmap",
           "whole[:, None].expand(size, batch, *whole.shape[1:])",
           "whole[None].expand(batch, size, *whole.shape[1:])",
           "test_vmap_over_operands_equals_a_loop"),
    Mutant("gradient of shared slopes not summed", "_vmap", "by_slope.sum(dim=1)",
           "by_slope.mean(dim=1)", "test_vmap_of_grad_and_grad_of_vmap_equal_a_loop",
           {"shape": (4,)}),
]  # fmt: skip


def put_in_place(monkeypatch, mutant=None):
    """Compile the kernel, with a fault or without, and let tests run on it."""
    new_package(monkeypatch, "mutant")
    sources = {name: (FOLDER / f"{name}.py").read_text() for name in (*KERNEL, "_recipe", "_vmap")}
    # The rule is registered once.
    sources["_vmap"] = sources["_vmap"].partition("\nattend.register_vmap")[0]
    made = compile_afresh(monkeypatch, "mutant", sources, mutant, {"_vmap": "plsh_torch"})
    monkeypatch.setattr(_ops, "Call", made["_call"].Call)
    monkeypatch.setattr(_ops, "decode", made["_recipe"].decode)
    monkeypatch.setattr(_attend, "encode", made["_recipe"].encode)
    for name in ("_fold", "_fold_operand", "_fold_request", "map_forward", "map_backward"):
        monkeypatch.setattr(_vmap, name, getattr(made["_vmap"], name))
    monkeypatch.setattr(tests, "MODULES", (made["_tiles"], made["_call"], made["_whole"]))
    monkeypatch.setattr(tests, "scratch", made["_scratch"])
    monkeypatch.setattr(threads, "threads", made["_threads"])
    monkeypatch.setattr(threads, "call_module", made["_call"])


def run(mutant, monkeypatch):
    """Call a test of one of the modules."""
    module = next(x for x in (tests, threads, transforms) if hasattr(x, mutant.test))
    torch._dynamo.reset()
    call(getattr(module, mutant.test), mutant.arguments, monkeypatch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_killed(mutant, monkeypatch):
    put_in_place(monkeypatch, mutant)
    with pytest.raises(mutant.error):
        run(mutant, monkeypatch)


@pytest.mark.parametrize("control", controls(MUTANTS))
def test_the_backend_compiled_afresh_survives(control, monkeypatch):
    """So that it is the fault that is found, and not the way in which it is put in place."""
    put_in_place(monkeypatch)
    run(control, monkeypatch)


def test_mutants_run_in_place_of_the_kernel(monkeypatch):
    broken = Mutant("", "_band", "def forward(", "forward = None\ndef not_forward(", "")
    put_in_place(monkeypatch, broken)
    with pytest.raises(TypeError):
        tests.ours(*tests.inputs(3))


def test_every_module_of_the_kernel_is_compiled_afresh():
    """A new module that is forgotten here would be no mutant's."""
    known = {*KERNEL, "_recipe", "_vmap", "__init__", "_attend", "_backend", "_func", "_ops"}
    found = {path.stem for path in FOLDER.glob("*.py")}
    assert found == known | {"_module", "_sdpa"}
    for name in KERNEL:
        importlib.import_module(f"plsh_torch.{name}")
