"""Faults of the Triton kernels that their tests must find: each mutant is killed by a named test.

A mutant is a copy of the package `plsh_torch.cuda` with one piece of source replaced; calls of the
registered NumPy backend run on it by the interpreter, and the named test is then called.
"""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import test_kernels as tests
from interpreter import InterpretedBackend
from planted import Mutant, call, controls, new_package
from plsh_torch import cuda
from test_numpy_backend import BandCall

pytestmark = tests.pytestmark

ORACLE = "test_call_equals_oracle"
LAW = "test_every_law"


def oracle(*given, **options):
    """Return the arguments of `test_call_equals_oracle`."""
    return {"case": BandCall(*given, **{"dtype": "float32", **options})}


EXACT = oracle("exact", (2, 1), (65, 65), (8, 8), 1, causal=True, flatter=9.0)
FULL = oracle("exact", (4, 2), (40, 65), (8, 8), 1)
WINDOW = oracle("windows", (2, 1), (130, 130), (16, 8), 1, flatter=9.0)
LSH = oracle("lsh", (2, 1), (65, 65), (8, 8), 1, flatter=16.0)
HALF = oracle("lsh", (2, 1), (65, 65), (8, 8), 1, True, flatter=16.0, dtype="float16")
PLAIN_HALF = oracle("exact", (2, 1), (65, 65), (8, 8), 1, flatter=64.0, dtype="float16")
MANY = oracle("lsh", (1, 1), (65, 65), (8, 8), 1, flatter=32.0, samples=70)
TABLE = oracle("set", (2, 1), (65, 50), (8, 8), 1, flatter=16.0, samples=5)
SEGMENTS = oracle("exact", (2, 1), (40, 40), (8, 8), 1, segments="one")
ROWS = oracle("exact", (2, 1), (33, 33), (8, 8), 2, slope_form="rows")
OFFSETS = oracle("exact", (2, 1), (65, 50), (8, 8), 2, offsets="batch")
HIDDEN = {
    "name": "test_a_hidden_key_far_above_the_visible_ones_empties_no_row",
    "arguments": {"case": "future", "n": 64, "dtype": "float32"},
}
CUT = ("test_work_cut_into_many_launches_is_the_same", {"method": "lsh"})

MASKED = """    if MASKED or STEP:
        x = tl.where(seen, x, -float("inf"))
    most = tl.maximum(top, tl.max(x, axis=1))
"""
UNMASKED = """    most = tl.maximum(top, tl.max(x, axis=1))
    if MASKED or STEP:
        x = tl.where(seen, x, -float("inf"))
"""

MUTANTS = [
    # _band
    Mutant("the query itself hidden", "_band", "(apart >= lead) if", "(apart > lead) if", ORACLE,
           EXACT),
    Mutant("causality of the keys' side", "_band", "else (apart <= lead)", "else (apart >= lead)",
           ORACLE, EXACT),
    Mutant("width short by one", "_band", "(apart <= most) & (apart >= least)",
           "(apart < most) & (apart > least)", ORACLE, WINDOW),
    Mutant("tiles partly in the band taken whole", "_band",
           "-floor_of(bandwidth - ROWS + 1, COLUMNS)", "-floor_of(bandwidth + 1, COLUMNS)", ORACLE,
           WINDOW),
    Mutant("later tiles partly in the band taken whole", "_band",
           "tl.minimum(last, floor_of(bandwidth + 1, COLUMNS))",
           "tl.minimum(last, floor_of(bandwidth + ROWS, COLUMNS))", ORACLE, WINDOW),
    Mutant("last tile rounded away", "_band", "floor_of(high - own_at + COLUMNS - 1, COLUMNS)",
           "floor_of(high - own_at, COLUMNS)", ORACLE, FULL),
    Mutant("tiles before the first token taken whole", "_band",
           "first = -floor_of(own_at - other_at, COLUMNS)",
           "first = -floor_of(own_at - other_at + COLUMNS - 1, COLUMNS)", ORACLE, OFFSETS),
    Mutant("padding sees padding", "_band", " & (own_ids >= 0)[:, None]", "", ORACLE, SEGMENTS),
    Mutant("segments ignored", "_band", "(own_ids[:, None] == other_ids[None, :])",
           "(other_ids[None, :] >= 0)", ORACLE, SEGMENTS),
    Mutant("slope of the first head", "_band", "b * stride_b + h * stride_h)",
           "b * stride_b + h * 0)", ORACLE, EXACT),
    Mutant("slope of the first batch row", "_band", "slopes + b * stride_b",
           "slopes + b * 0", ORACLE, ROWS),
    Mutant("offset of the first batch row", "_band", "offsets + b * stride",
           "offsets + b * 0", ORACLE, OFFSETS),
    Mutant("blocks rounded to 0", "_band", "index -= (index * w > above).to(tl.int64)",
           "index -= 0", ORACLE, LSH),
    Mutant("begin of a block rounded down", "_band", "begin = (index * w + s + unit) >> 24",
           "begin = (index * w + s) >> 24", ORACLE, LSH),
    Mutant("end of a block one late", "_band", "end = ((index + 1) * w + s + unit) >> 24",
           "end = (((index + 1) * w + s + unit) >> 24) + 1", ORACLE, LSH),
    Mutant("blocks of a table searched too far", "_band", "other=0) > own", "other=0) > own + 1",
           ORACLE, TABLE),
    Mutant("samples that are none counted", "_band", "tl.where(here, begin, LAST), tl.where(here,",
           "begin, tl.where(at == at,", ORACLE, TABLE),
    Mutant("later pivot at the first token", "_band", "begin, end = bounds_of(own_at + ROWS - 1, r",
           "begin, end = bounds_of(own_at, r", ORACLE, LSH),
    Mutant("block of the pivot one short", "_band", "column_at < bound", "column_at <= bound",
           ORACLE, LSH),
    Mutant("causal block of the pivot one short", "_band", "column_at >= before[:, None]",
           "column_at > before[:, None]", ORACLE, HALF),
    Mutant("causal block of the pivot one long", "_band", "column_at < after[:, None]",
           "column_at <= after[:, None]", ORACLE, HALF),
    Mutant("reach of the shortest block", "_band", "low = tl.minimum(low, tl.min(begin, axis=0))",
           "low = tl.minimum(low, tl.max(begin, axis=0))", ORACLE, LSH),
    Mutant("first samples counted alone", "_band",
           "range(0, samples, SAMPLES):\n                own",
           "range(0, 16, SAMPLES):\n                own", ORACLE, MANY),
    # _diagonals
    Mutant("block on the diagonal begins one late", "_diagonals",
           "begin[:, None] <= columns[None, :]", "begin[:, None] < columns[None, :]", ORACLE, LSH),
    Mutant("block of a later key begins one late", "_diagonals",
           "begin[None, :] <= rows[:, None]", "begin[None, :] < rows[:, None]", ORACLE, LSH),
    Mutant("diagonal counted twice", "_diagonals", "here = rows[:, None] < columns[None, :]",
           "here = rows[:, None] <= columns[None, :]", ORACLE, LSH),
    Mutant("weights of the sum, not of the mean", "_diagonals", "given + real(normaliser, ACC)",
           "given", ORACLE, LSH),
    Mutant("dlse forgotten", "_diagonals", " - tl.load(grad_lse + line, mask=live, other=0.0)", "",
           ORACLE, EXACT),
    # _forward
    Mutant("output not rescaled", "_forward", "tl.broadcast_to(fade[:, None],",
           "tl.broadcast_to(fade[:, None] * 0 + 1,", ORACLE, EXACT),
    Mutant("output of half precision not rescaled", "_forward", "acc * fade[:, None]", "acc",
           ORACLE, PLAIN_HALF),
    Mutant("sum not rescaled", "_forward", "total = total * fade +", "total = total +", ORACLE,
           EXACT),
    Mutant("hidden keys in the maximum", "_forward", MASKED, UNMASKED, LAW, HIDDEN),
    Mutant("wrong key head", "_forward", "k + b * k_b + h // group * k_h",
           "k + b * k_b + h % tl.cdiv(heads, group) * k_h", ORACLE, FULL),
    Mutant("lse of the sum, not of the mean", "_forward", "full * real(mean, ACC)", "full",
           ORACLE, LSH),
    # _backward
    Mutant("dq without the scale", "_backward", "(dq * real(scale, ACC))", "(dq * 1.0)", ORACLE,
           EXACT),
    Mutant("dk of one query head", "_backward", "for member in range(group)",
           "for member in range(1)", ORACLE, EXACT),
    Mutant("sign of the slope's gradient", "_backward", "-tl.sum(moved, axis=0)",
           "tl.sum(moved, axis=0)", ORACLE, EXACT),
    Mutant("hidden queries add to dv", "_backward", "p = tl.where(seen, p, 0.0)",
           "p = tl.where(seen, p, p)", ORACLE, EXACT),
    # _call
    Mutant("factor of the scale lost", "_call", '"after": _bits(scale / factor)',
           '"after": _bits(scale)', ORACLE, EXACT),
    Mutant("sums leave the range", "_call", "unit = math.ldexp(1.0, -(most - 1).bit_length())",
           "unit = 1.0", "test_sums_past_the_range_of_values_within_it", {"dtype": "float32"}),
    Mutant("diagonals of the first heads", "_call", "first_rank=first * members",
           "first_rank=0", *CUT),
]  # fmt: skip
FOLDER = Path(cuda.__file__).parent


def put_mutant_in_place(monkeypatch, folder, mutant):
    """Let calls run on a copy of the kernels, with a fault if there is a mutant."""
    package = f"plsh_torch.mutant_{folder.parent.name.replace('-', '_')}"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant is not None:
        path = folder / f"{mutant.module}.py"
        path.write_text(mutant.changed(path.read_text(encoding="utf-8")), encoding="utf-8")
    new_package(monkeypatch, package, [str(folder)])
    module = importlib.import_module(f"{package}._call")
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    tests.put_in_place(monkeypatch, InterpretedBackend(module=module))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_killed(mutant, monkeypatch, tmp_path):
    """The named test fails, by an assertion."""
    put_mutant_in_place(monkeypatch, tmp_path / "cuda", mutant)
    with pytest.raises(mutant.error):
        call(getattr(tests, mutant.test), mutant.arguments, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", controls(MUTANTS))
def test_copy_without_a_fault_passes(mutant, monkeypatch, tmp_path):
    """Every test that kills a mutant passes on the kernels as they are."""
    put_mutant_in_place(monkeypatch, tmp_path / "cuda", None)
    call(getattr(tests, mutant.test), mutant.arguments, monkeypatch)
