"""Faults of the JAX band kernel that its tests must find: each mutant is killed by a named test.

A mutant is the kernel with one piece of its source replaced, compiled afresh and put in the place
of the registered backend's.
"""

import sys
from pathlib import Path

import plsh_jax
import plsh_jax._call as call_module
import pytest
import test_jax_backend as tests
import test_jax_transforms as transforms
from planted import Mutant, call, compile_afresh, new_package
from test_jax_backend import Forward

HERE = Path(plsh_jax.__file__).parent
FILES = ("_weights", "_steps", "_band", "_program", "_heads", "_call")
"""The modules that mutate, each after those that it imports."""


ORACLE = "test_call_equals_oracle"
HIDDEN = "test_a_hidden_key_far_above_the_visible_ones_empties_no_row"
ONE = {"heads": (1, 1), "batch": 1}
EXACT = {"call": Forward("exact", lengths=(33, 33), dtype="float32", causal=True, **ONE)}
HEADS = {"call": Forward("exact", lengths=(33, 33), dtype="float32", heads=(2, 1), batch=1)}
WINDOW = {"call": Forward("window", lengths=(64, 64), dtype="float32", **ONE)}
LSH = {"call": Forward("lsh", lengths=(64, 64), dtype="float32", **ONE)}
LSH_CROSS = {"call": Forward("lsh", lengths=(40, 64), dtype="float32", **ONE)}
CROSS = {"call": Forward("exact", lengths=(7, 33), dtype="float32", segments="pair", **ONE)}

MUTANTS = [
    Mutant("width off by one", "_weights", "distance <= self.width", "distance < self.width",
           ORACLE, WINDOW),
    Mutant("next token seen", "_weights", "apart >= 0", "apart >= -1", ORACLE, EXACT),
    Mutant("block's first key left out", "_weights", "y >= self.begin",
           "y > self.begin", ORACLE, LSH),
    Mutant("one key past a block seen", "_weights", "y < self.end",
           "y <= self.end", ORACLE, LSH),
    Mutant("keys of the tile counted twice", "_weights", "y < x[:, None, :1]",
           "y <= x[:, None, :1]", ORACLE, LSH_CROSS),
    Mutant("keys after the tile left out", "_weights",
           "side == RIGHT or (side == ANYWHERE and not causal)", "side == RIGHT",
           ORACLE, LSH_CROSS),
    Mutant("next token seen where tiles are not banded", "_weights",
           "side in (DIAGONAL, ANYWHERE)", "side == DIAGONAL", ORACLE, EXACT),
    Mutant("left pivot off by one", "_weights", "labels[..., 0, :] - origin",
           "labels[..., 1, :] - origin", ORACLE, LSH),
    Mutant("right pivot off by one", "_weights", "self.code[:, -1:, :]", "self.code[:, -2:-1, :]",
           ORACLE, LSH),
    Mutant("diagonal not symmetrised", "_weights", "count.swapaxes(-1, -2)", "0", ORACLE, LSH),
    Mutant("far blocks not visited", "_weights", "jnp.maximum(low, 0)", "jnp.maximum(low + 8, 0)",
           ORACLE, WINDOW),
    Mutant("blocks visited that all tiles see", "_weights", "seen.any(axis=1)", "seen.all(axis=1)",
           ORACLE, WINDOW),
    Mutant("missing keys seen", "_band", "(y >= 0) & (y < len_k)", "(y >= 0)", ORACLE, CROSS),
    Mutant("segments ignored", "_band", "seen=pairs.seen & same", "seen=pairs.seen",
           ORACLE, CROSS),
    Mutant("dead rows divided", "_band",
           "alive = total > 0 if real is None else (total > 0) & real", "alive = total >= 0",
           "test_rows_that_see_no_key_are_zero_and_have_no_gradient", {"method": "exact"}),
    Mutant("rows that fill a length up are real", "_heads", "dtype=jnp.int32) < len_q",
           "dtype=jnp.int32) >= 0", "test_rows_that_fill_a_length_up_spoil_no_gradient", {}),
    Mutant("no first pass", "_band", "shift = jnp.where(large, shift, 0)", "shift = 0 * shift",
           HIDDEN, {"method": "exact"}),
    Mutant("shift from hidden keys", "_band", "jnp.where(pairs.seen, s, low).max(axis=-1)",
           "s.max(axis=-1)", "test_a_hidden_key_far_above_large_visible_ones_empties_no_row",
           {"method": "exact"}),
    Mutant("shift left out of the lse", "_band", "jnp.log(safe) + shift", "jnp.log(safe)",
           HIDDEN, {"method": "exact"}),
    Mutant("normaliser forgotten", "_heads", "lse - math.log(program.samples)", "lse", ORACLE, LSH),
    Mutant("wrong key head", "_program", "tuple(h[0] // group for h in heads)",
           "tuple(0 for h in heads)",
           "test_heads_and_rows_side_by_side_equal_one_by_one", {"method": "window"}),
    Mutant("weight of another head", "_heads", "place[h] = number, at",
           "place[h] = number, (at[0], 0)", ORACLE, HEADS),
    Mutant("window of keys off by one", "_band", "at = first - origin", "at = first - origin + 1",
           ORACLE, WINDOW),
    Mutant("padding copied", "_heads", "jnp.where(real_k, v, 0)", "v",
           "test_what_stands_in_padding_reaches_nothing", {"method": "exact"}),
    Mutant("jit bakes an offset in", "_call", "offset.astype(jnp.int32)",
           "jnp.zeros_like(offset, jnp.int32)", "test_traced_offsets_equal_known_ones",
           {"method": "exact"}),
    Mutant("derivative stopped", "_band", "own, keys = lay(q, k, v, weight)",
           "own, keys = jax.tree.map(lax.stop_gradient, lay(q, k, v, weight))",
           "test_forward_derivatives_are_differences", {"method": "exact"}),
]  # fmt: skip
QUICK = ("width", "next", "one key past", "segments", "no first pass", "shift from hidden")
"""Those that always run, one for each piece of the kernel."""


def put_in_place(monkeypatch, mutant=None):
    """Compile the kernel, with a fault or without, and let tests run on it."""
    new_package(monkeypatch, "mutant_jax", [str(HERE)])
    for name in ("_tiling", "_spread", "_partitions"):
        real = sys.modules[f"plsh_jax.{name}"]
        monkeypatch.setitem(sys.modules, f"mutant_jax.{name}", real)
    sources = {name: (HERE / f"{name}.py").read_text() for name in FILES}
    made = compile_afresh(monkeypatch, "mutant_jax", sources, mutant)
    monkeypatch.setattr(call_module, "attend", made["_call"].attend)
    tests.use_small(monkeypatch)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, marks=() if m.name.startswith(QUICK) else tests.COMPILES_MORE)
        for m in MUTANTS
    ],
    ids=str,
)
def test_mutant_is_killed(mutant, monkeypatch):
    put_in_place(monkeypatch, mutant)
    module = next(x for x in (tests, transforms) if hasattr(x, mutant.test))
    with pytest.raises(mutant.error):
        call(getattr(module, mutant.test), mutant.arguments, monkeypatch)


def test_the_kernel_compiled_afresh_survives(monkeypatch):
    """So that it is the fault that is found, and not the way in which it is put in place."""
    put_in_place(monkeypatch)
    tests.test_call_equals_oracle(**LSH)
