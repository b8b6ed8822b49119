"""Faults of the transformers integration that its tests must find, each by a named test.

A mutant is the package's modules with one piece of source replaced, compiled afresh and put in the
place of the real ones for the time of one test.
"""

import types
from pathlib import Path

import plsh_torch.transformers
import pytest
import test_transformers as tests
from planted import Mutant, call, compile_afresh, controls

MODULES = ("_settings", "_mask", "_attend", "_native", "_bounded", "_switch", "_trainer")
"""Each after those that it imports."""
FOLDER = Path(plsh_torch.transformers.__file__).parent


PADDED = "test_padded_rows_equal_the_rows_alone"
CACHED = "test_the_bounded_cache_generates_what_the_full_one_does"
BLOOM = {"family": "bloom", "method": tests.plsh.Window((3, 70, 5, 40)), "per_head": True}
NATIVE = "test_a_switched_native_model_equals_eager"

MUTANTS = [
    Mutant("padding is seen", "_mask", "mask.to(torch.int32) - 1, ", "mask.to(torch.int32) * 0, ",
           PADDED, {"name": "plsh_window", "left": True}, ValueError),  # a guard notices
    Mutant("positions count from the padding", "_mask", ", mask.to(torch.int32).argmax(-1)",
           ", None", PADDED, {"name": "plsh", "left": True}),
    Mutant("later tokens are seen", "_attend", "causal=mask.causal", "causal=False",
           "test_later_tokens_are_hidden", {"name": "plsh_window"}),
    Mutant("packed documents see one another", "_mask", "(~joined).to(torch.int32)",
           "(joined & False).to(torch.int32)", "test_packed_documents_equal_separate_ones",
           {"name": "plsh_window"}, ValueError),
    Mutant("a sliding window sees one token more", "_attend", "mask.window - 1)", "mask.window)",
           "test_a_sliding_window_of_the_model_is_kept", {"name": "plsh_exact"}),
    Mutant("layers share their blocks", "_settings", "(seed, layer) if", "(seed, 0) if",
           "test_each_layer_and_step_has_blocks_of_its_own_under_lsh"),
    Mutant("the step is ignored", "_settings", "(seed, layer, step)", "(seed, layer)",
           "test_each_layer_and_step_has_blocks_of_its_own_under_lsh"),
    Mutant("standard slopes in place of the model's", "_switch",
           "known = own_slopes(model) if slopes is None", "known = None if slopes is None",
           "test_a_native_model_keeps_the_slopes_of_its_own_bias"),
    Mutant("the scale is left out", "_native", "attention_mask, self.softmax_scale",
           "attention_mask, 1.0", NATIVE, {"family": "mpt", "heads": 4}),
    Mutant("a key too few is kept", "_bounded", "kept = min(self.count, self.width)",
           "kept = min(self.count, max(self.width - 1, 0))", CACHED, BLOOM, ValueError),
    Mutant("the buffer moves the wrong keys", "_bounded",
           "held[:, :, self.count - kept : self.count].clone()", "held[:, :, :kept].clone()",
           "test_the_bounded_cache_gives_the_logits_of_the_full_one", {"per_head": True}),
    Mutant("heads of a part have the first part's widths", "_attend",
           "of_heads(method, own, heads), slopes[own]",
           "of_heads(method, slice(0, own.stop - own.start), heads), slopes[own]", CACHED, BLOOM,
           ValueError),
    Mutant("beams keep their own rows", "_bounded", "buffer.index(beam_idx)", "pass",
           "test_beams_move_the_rows_of_the_bounded_cache"),
    Mutant("a cache too short is read", "_attend", "if reach > kept:", "if False:",
           "test_a_bounded_cache_for_another_method_is_refused", {}, pytest.fail.Exception),
    Mutant("rope stays", "_switch", "return x.new_ones(shape), x.new_zeros(shape)",
           "return self.replaced(x, position_ids)", "test_rope_is_replaced_and_put_back",
           {"family": "llama"}),
    Mutant("rope does not come back", "_switch", "lambda module: module.replaced)",
           "lambda module: module)", "test_rope_is_replaced_and_put_back", {"family": "llama"}),
    Mutant("the config is shared", "_switch", "copy.deepcopy(config)", "config",
           "test_switching_one_model_leaves_another_of_the_same_config_alone", {}, TypeError),
]  # fmt: skip


def put_in_place(monkeypatch, mutant=None):
    """Compile the package, with a fault or without, and let tests run on it."""
    package = "plsh_torch.transformers"
    sources = {name: (FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
    made = compile_afresh(monkeypatch, package, sources, mutant)
    fresh = types.ModuleType(package)
    for name, module in made.items():
        fresh.__dict__.update({k: v for k, v in module.__dict__.items() if k[0] != "_"})
        setattr(fresh, name, module)
    monkeypatch.setattr(tests, "on_plsh", fresh)


@pytest.fixture
def restored():
    """Register the real functions again, under the same names."""
    yield
    plsh_torch.transformers.register()


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_killed(mutant, monkeypatch, restored):
    put_in_place(monkeypatch, mutant)
    with pytest.raises(mutant.error):
        call(getattr(tests, mutant.test), mutant.arguments, monkeypatch)


@pytest.mark.parametrize("control", controls(MUTANTS))
def test_the_package_compiled_afresh_survives(control, monkeypatch, restored):
    """So that it is the fault that is found, and not the way in which it is put in place."""
    put_in_place(monkeypatch)
    call(getattr(tests, control.test), control.arguments, monkeypatch)
