"""Faults of the NumPy band kernel that its tests must find: each mutant is killed by a named test.

A mutant is the kernel with one piece of its source replaced, compiled afresh and put in the place
of the registered backend; the named test of `test_numpy_backend` is then called in place.
"""

from pathlib import Path

import plsh_numpy
import pytest
import test_numpy_backend as tests
from planted import Mutant, call, compile_afresh, controls, new_package
from test_numpy_backend import BandCall

from plsh import tiles

FILES = {
    "tiles": Path(tiles.__file__),
    **{
        name: Path(plsh_numpy.__file__).parent / f"{name}.py"
        for name in ("_scratch", "_weights", "_segment", "_band", "_backend")
    },
}
"""The kernel's modules, each after those that it imports."""


ORACLE = "test_call_equals_oracle"
EXACT = {"call": BandCall("exact", lengths=(129, 129), dtype="float32", causal=True)}
FULL = {"call": BandCall("exact", lengths=(65, 127), dtype="float32", layout="bshd")}
WINDOW = {"call": BandCall("window", lengths=(129, 129), dtype="float32")}
NARROW = {"call": BandCall("window", lengths=(600, 600), dtype="float32")}
LSH = {"call": BandCall("lsh", lengths=(129, 129), flatter=8.0)}
LSH_FULL = {"call": BandCall("lsh-iid", lengths=(127, 65), flatter=8.0, dtype="float32")}
LSH_CAUSAL = {"call": BandCall("cuts", lengths=(129, 129), causal=True)}
WIDE = {"call": BandCall("exact", (2, 1), (129, 129), (257, 16), 1, True, dtype="float32")}
LONG = {"call": BandCall("exact", (1, 1), (130, 600), (8, 8), 1, dtype="float32")}
AT_THE_END = {"call": BandCall("window", lengths=(33, 127), dtype="float32")}
PADDED = {"call": BandCall("exact", lengths=(65, 65), segments="one", dtype="float32")}
HIDDEN = {"case": "future", "n": 77, "dtype": "float32"}
NAN = {"method": "exact", "causal": False, "fill": float("nan")}
BEFORE = {"call": BandCall("tol", lengths=(70, 90), flatter=64.0, gap=540, dtype="float32")}
AFTER = {"call": BandCall("tol", lengths=(70, 90), flatter=64.0, gap=-540, dtype="float32")}
BLOCKS_BEFORE = {"call": BandCall("lsh", lengths=(70, 90), flatter=64.0, gap=200)}
BLOCKS_AFTER = {"call": BandCall("lsh", lengths=(70, 90), flatter=64.0, gap=-200)}
IDS_AFTER = {"call": BandCall("set", lengths=(90, 70), flatter=64.0, gap=-150, segments="one")}
NO_GAP = "test_positions_between_queries_and_keys_cost_nothing"
POISON = "test_nothing_is_read_before_it_is_written"

MUTANTS = [
    # The schedule
    Mutant("right reach short by a tile", "tiles", "first + rows + width,", "first + width,",
           ORACLE, WINDOW),
    Mutant("left blocks rounded down", "tiles", "-(-reach.before // columns)",
           "reach.before // columns", ORACLE, WINDOW),
    Mutant("chunk as wide as its first tile", "tiles", "max(left, own[0])", "left or own[0]",
           ORACLE, WIDE),
    Mutant("last tile of a chunk lost", "tiles", "len(self.first) - begin,",
           "max(1, len(self.first) - begin - 1),", ORACLE, EXACT),
    # Keys at a distance
    Mutant("keys after a gap left there", "tiles", "- max(after, 0)", "", NO_GAP,
           {"method": "exact", "after": True, "causal": False, "apart": 2**17}),
    Mutant("keys before a gap left there", "tiles", "max(before, 0) -", "-", NO_GAP,
           {"method": "exact", "after": False, "causal": False, "apart": 2**17}),
    Mutant("gap forgotten in the width", "_weights", "self._widths[:, None] - gap",
           "self._widths[:, None]", ORACLE, BEFORE),
    Mutant("gap forgotten in the width on the right", "_weights", "self._widths[:, None] - gap",
           "self._widths[:, None] - max(move, 0)", ORACLE, AFTER),
    Mutant("gap forgotten in the lse", "_weights", "(self._slopes * gap)", "(self._slopes * 0)",
           ORACLE, BEFORE),
    Mutant("gap forgotten in the lse backward", "_band", " + job.weight.normaliser", "", ORACLE,
           BEFORE),
    Mutant("gap forgotten in the slope gradient", "_weights", "(self._apart + self._gap)",
           "self._apart", ORACLE, BEFORE),
    Mutant("block begins not moved", "_weights", "astype(np.int64) + move", "astype(np.int64)",
           ORACLE, BLOCKS_BEFORE),
    Mutant("labels of keys as placed", "_weights", "(far.start - move, far.stop - move)",
           "(far.start, far.stop)", ORACLE, BLOCKS_AFTER),
    Mutant("segment ids of keys as far as they are", "_segment", "keys.start, high - keys.start)",
           "job.keys.start, high - job.keys.start)", ORACLE, IDS_AFTER, ValueError),
    # The weights
    Mutant("left pivot off by one", "_weights", "labels[..., 0]", "labels[..., 1]", ORACLE, LSH),
    Mutant("right pivot off by one", "_weights", "labels[..., -1]", "labels[..., -2]",
           ORACLE, LSH),
    Mutant("block's first key left out", "_weights", "rows, -1, dtype", "rows, 0, dtype",
           ORACLE, LSH),
    Mutant("queries of the next block counted", "_weights", "(labels <= begin[:, None])",
           "(labels <= begin[:, None] + 1)",
           ORACLE, LSH),
    Mutant("right of a tile, a block seen from its end on", "_weights",
           "np.subtract(1, far, out=far)", "pass", ORACLE, LSH),
    Mutant("far operand of one block for all", "_weights", "- rows * blocks[:, None]",
           "- rows * blocks[:1, None]", ORACLE, LSH_CAUSAL),
    Mutant("diagonal in the place of another block", "_weights", "out[:, :, chunk.left] =",
           "out[:, :, 0] =", ORACLE, LSH),
    Mutant("missing keys seen", "_weights", "return whole + _exist(", "return whole or _exist(",
           ORACLE, LSH_FULL),
    Mutant("one key past the end seen", "_weights", "(at >= keys.start) & (at < keys.stop)",
           "(at >= keys.start) & (at <= keys.stop)", ORACLE, FULL),
    Mutant("end of the keys ignored", "_weights",
           " and high + rows * chunk.right <= keys.stop", "",
           ORACLE, AT_THE_END),
    Mutant("diagonal not symmetrised", "_weights", "np.tril(counts, -1)", "0 * counts",
           ORACLE, LSH),
    Mutant("causal diagonal hidden", "_weights", "apart <= 0", "apart < 0", ORACLE, EXACT),
    Mutant("next token seen", "_weights", "apart <= 0", "apart <= 1", ORACLE, EXACT),
    Mutant("causal counts not cut", "_weights", "counts *= np.tri(", "counts + np.tri(",
           ORACLE, LSH_CAUSAL),
    Mutant("width off by one", "_weights", "<= self._widths", "< self._widths", ORACLE, WINDOW),
    Mutant("bias of other keys", "_weights", "self._bias[:, :, None, self._slice(chunk)]",
           "self._bias[:, :, None, : chunk.left + 1 + chunk.right]",
           "test_any_cut_of_the_work_gives_the_same", {"method": "exact", "causal": True}),
    Mutant("normaliser forgotten", "_weights", "math.log(samples)", "0.0", ORACLE, LSH),
    Mutant("padding below 0 counted in the next row", "_weights", "0, rows - 1)",
           "0, None)", "test_left_padding_changes_nothing",
           {"method": "lsh", "causal": False}),
    Mutant("huge slopes overflow", "_weights",
           "np.minimum(slopes, float(np.finfo(dtype).max) / 2**31)", "slopes",
           "test_a_huge_slope_is_self_attention", {"slope": 1e300, "dtype": "float32"}),
    Mutant("counts kept for another seed", "_weights", "(self._recipe, self._causal,",
           "(self._causal,", "test_counts_that_are_kept_are_those_of_the_call"),
    Mutant("counts kept for another mask", "_weights", "self._causal, start,", "start,",
           "test_counts_that_are_kept_are_those_of_the_call"),
    Mutant("counts kept for another place", "_weights", "self._causal, start,", "self._causal,",
           "test_counts_that_are_kept_are_those_of_the_call"),
    Mutant("counts kept for another size of tiles", "_weights", "start, tiles, rows)",
           "start, tiles)", "test_calls_of_other_sizes_leave_nothing_behind", error=ValueError),
    Mutant("all counts kept", "_weights", "self.nbytes > COUNTED", "False",
           "test_counts_that_are_kept_are_bounded"),
    # Copies and views
    Mutant("columns after the keys not zeroed", "_segment",
           "out[:, :, -(-held.stop // rows) :] = 0", "pass", POISON),
    Mutant("block that is partly held not zeroed", "_segment", "out[:, :, block] = 0", "pass",
           POISON),
    Mutant("columns before the keys not zeroed", "_segment",
           "out[:, :, : held.start // rows] = 0", "pass", POISON),
    Mutant("padding copied", "_segment",
           "x = np.where(padding, np.zeros((), x.dtype), x)", "pass",
           "test_what_stands_in_padding_reaches_nothing", NAN),
    Mutant("windows of the first batch rows", "_segment", "batch.start * x.strides[0] + begin",
           "begin", "test_any_cut_of_the_work_gives_the_same", {"method": "exact", "causal": True}),
    Mutant("windows that do not overlap", "_segment", "(*x.strides[:3], *x",
           "(*x.strides[:2], 0, *x", ORACLE, EXACT),
    Mutant("gradients of keys not cleared", "_backend", "dv[:, owns.start : owns.stop] = 0", "pass",
           POISON),
    Mutant("bias of batch mates", "_segment", "bias[batch]", "bias[: out.shape[0]]",
           "test_slopes_and_positions_per_batch_row_equal_separate_calls"),
    Mutant("padding sees padding", "_segment", "= -1, -2", "= -2, -2", ORACLE, PADDED),
    Mutant("scale left out", "_segment", "job.scale * LOG2E", "LOG2E", ORACLE, EXACT),
    Mutant("extra number of the keys unset", "_segment", "out[..., dims:, :] = 1", "pass", POISON),
    Mutant("overlapping windows added in one place", "_segment",
           "begin + tile : begin + tile + blocks", "begin : begin + blocks", ORACLE, LONG),
    Mutant("overlapping windows added from the last block", "_segment",
           "add[:, :, :, block]", "add[:, :, :, -1]", ORACLE, NARROW),
    # The kernel
    Mutant("underflow not noticed", "_band", "(total >= limits.least)", "(total >= 0)",
           "test_a_hidden_key_far_above_the_visible_ones_empties_no_row", HIDDEN),
    Mutant("rows shifted by hidden keys again", "_band", "x[~seen] = -np.inf", "pass",
           "test_a_hidden_key_far_above_the_visible_ones_empties_no_row", HIDDEN),
    Mutant("shift left out of the lse", "_band", "dtype=np.float64) + shift", "dtype=np.float64)",
           "test_a_hidden_key_far_above_the_visible_ones_empties_no_row", HIDDEN),
    Mutant("shifted because of a mate", "_band", "np.where(large[batch], top, 0)", "top",
           "test_a_batch_row_does_not_depend_on_its_mates",
           {"method": "exact", "dtype": "float32"}),
    Mutant("hidden exponents not clamped", "_band", "clamped = not spread < -limits.floor",
           "clamped = False", "test_a_hidden_key_far_above_the_visible_ones_empties_no_row",
           HIDDEN),
    Mutant("tail row unwritten", "_band", "slice(job.rows.start, job.rows.stop), len(job.rows)",
           "slice(job.rows.start, job.rows.stop - 1), len(job.rows) - 1", ORACLE, EXACT),
    Mutant("tile done again unwritten", "_band", "out[b, h, rows][again] = ", "",
           "test_a_hidden_key_far_above_the_visible_ones_empties_no_row", HIDDEN),
    Mutant("lse left out backward", "_band", "np.negative(lse, out=segment.q[..., dims])",
           "segment.q[..., dims] = 0", ORACLE, EXACT),
    Mutant("rowsum left out", "_band", "np.negative(base, out=do[..., dims_v])",
           "do[..., dims_v] = 0", ORACLE, EXACT),
    Mutant("sign of dlse", "_band", "-= given.grad_lse", "+= given.grad_lse", ORACLE, EXACT),
    Mutant("cotangents of dead rows", "_band", "do[dead.reshape(do.shape[:4])] = 0", "pass",
           "test_rows_that_see_no_key_have_no_gradient", {"method": "exact"}),
    Mutant("dk without the scale", "_band", "by_key *= acc.type(job.scale)", "pass", ORACLE, EXACT),
    Mutant("lse in units of log2", "_band", "log * LN2)", "log)", ORACLE, EXACT),
    Mutant("sign of the gradient by slopes", "_band", "by_slope[batch] -=", "by_slope[batch] +=",
           ORACLE, EXACT),
    Mutant("odd block lost where halves are summed", "_band", "blocks - half : blocks]",
           "half : 2 * half]", "test_sums_over_many_keys_lose_no_digits"),
    Mutant("blocks summed one after another", "_band", "blocks > FOLD", "False",
           "test_sums_over_many_keys_lose_no_digits"),
    Mutant("normaliser forgotten backward", "_band",
           " + job.weight.normaliser", "", ORACLE, LSH),
    Mutant("sums over keys not zeroed", "_band", "by_key[...], by_value[...] = 0, 0", "pass",
           POISON),
    # Jobs
    Mutant("wrong key head", "_backend", "h // self.group for h", "h % self.k.shape[1] for h",
           ORACLE, EXACT),
    Mutant("slopes of batch mates", "_backend", "for row in slopes])[task.batch]",
           "for row in slopes])", "test_slopes_and_positions_per_batch_row_equal_separate_calls",
           error=ValueError),
    Mutant("listed batch rows unwritten", "_backend",
           "lse[(*task.place, rows)] = log[:, :, rows]", "pass", ORACLE,
           {"call": BandCall("exact", offsets="batch")}),
    Mutant("overflow warned of", "_backend", 'np.errstate(all="ignore")', "np.errstate()",
           "test_hidden_products_past_the_range_do_no_harm", error=RuntimeWarning),
]  # fmt: skip


def put_in_place(monkeypatch, mutant=None):
    """Compile the kernel, with a fault or without, and let tests run on it."""
    new_package(monkeypatch, "mutant")
    sources = {
        name: path.read_text().replace("from plsh.tiles import", "from .tiles import")
        for name, path in FILES.items()
    }
    made = compile_afresh(monkeypatch, "mutant", sources, mutant)
    for method in ("attend", "vjp"):
        mutated = getattr(made["_backend"].NumpyBackend, method)
        monkeypatch.setattr(type(plsh_numpy.BACKEND), method, mutated)
    monkeypatch.setattr(tests, "backend", made["_backend"])
    monkeypatch.setattr(tests, "segment", made["_segment"])
    monkeypatch.setattr(tests, "MODULES", tuple(made.values()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_killed(mutant, monkeypatch):
    put_in_place(monkeypatch, mutant)
    with pytest.raises(mutant.error):
        call(getattr(tests, mutant.test), mutant.arguments, monkeypatch)


@pytest.mark.parametrize("control", controls(MUTANTS))
def test_the_kernel_compiled_afresh_survives(control, monkeypatch):
    """So that it is the fault that is found, and not the way in which it is put in place."""
    put_in_place(monkeypatch)
    call(getattr(tests, control.test), control.arguments, monkeypatch)


def test_mutants_run_in_place_of_the_registered_backend(monkeypatch):
    broken = Mutant("", "_band", "def forward(", "forward = None\ndef not_forward(", "")
    put_in_place(monkeypatch, broken)
    q, k, v = tests.inputs(3)
    with pytest.raises(TypeError):
        tests.ours(q, k, v)
