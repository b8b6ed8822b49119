"""Mutants: each plausible fault of the core is caught by a named test.

A mutant is a module's text with one piece replaced. Its functions' code is put in place of the
original's, so that it runs wherever the original is used, and the named test must fail.
"""

import importlib
import inspect
import sys
import types
from typing import Any, NamedTuple

import pytest

import plsh


class Mutant(NamedTuple):
    """A fault: in `module`, `old` (which occurs once) becomes `new`; `killer` must notice."""

    module: str
    old: str
    new: str
    killer: str  # module:function of a test
    arguments: dict[str, Any] = {}


MUTANTS = {
    "mean of the normalised outputs": Mutant(
        "reduction",
        "out = _sum(outputs * (weight * share)[..., None], axis, xp) / (total * share)[..., None]",
        "out = xp.mean(outputs, axis=axis, keepdims=True)",
        "test_reduction:test_pooling_converges_to_alibi_and_averaged_outputs_would_not",
    ),
    "odd one out of a sum by halves lost": Mutant(
        "reduction",
        "parts.append(x[(*lead, slice(size - 1, size), ...)])",
        "pass",
        "test_reduction:test_reduction_is_attention_under_the_mean_mask",
        {"which": "iid", "causal": False},
    ),
    "one sample instead of all": Mutant(
        "reduction",
        "parts.append(pool(out, lse, 1, xp))",
        "parts.append(pool(out[:, :1, ...], lse[:, :1, ...], 1, xp))",
        "test_reduction:test_reduction_is_attention_under_the_mean_mask",
        {"which": "iid", "causal": False},
    ),
    "ln s not taken off the lse": Mutant(
        "reduction",
        " - math.log(samples)",
        "",
        "test_reduction:test_a_repeated_sample_changes_nothing",
    ),
    "pooling weights without gradient": Mutant(
        "reduction",
        "    weight = xp.where(alive, xp.exp(xp.where(alive, lses - shift, zero)), zero)\n",
        "    weight = xp.where(alive, xp.exp(xp.where(alive, lses - shift, zero)), zero)\n"
        "    weight = weight.detach()\n",
        "test_reduction:test_the_merged_lse_takes_part_in_the_gradient",
    ),
    "last key of each block lost": Mutant(
        "reduction",
        "key_end - key)",
        "np.maximum(key_end - key - 1, 0))",
        "test_reduction:test_reduction_is_attention_under_the_mean_mask",
        {"which": "one block", "causal": False},
    ),
    "padded keys of a block visible": Mutant(
        "reduction",
        "real = np.arange(width) < chunk.keys[:, None]  # (blocks, l)",
        "real = np.arange(width) < width + 0 * chunk.keys[:, None]  # (blocks, l)",
        "test_reduction:test_reduction_is_attention_under_the_mean_mask",
        {"which": "iid", "causal": False},
    ),
    "blocks of one head for all": Mutant(
        "reduction",
        "row = min(h, last)",
        "row = last",
        "test_reduction:test_each_head_has_its_own_blocks",
    ),
    "position lost between stretches of queries": Mutant(
        "reduction",
        "self.offset + start, segments)",
        "self.offset, segments)",
        "test_reduction:test_chunks_and_stretches_are_joined_in_order",
        {"causal": True},
    ),
    "key heads interleaved": Mutant(
        "reduction",
        "g = h // (heads // kv_heads)",
        "g = h % kv_heads",
        "test_numerics:test_grouped_gradients_sum_over_the_group",
        {"ratio": (6, 2), "method": "exact"},
    ),
    "future visible under lsh": Mutant(
        "reduction",
        "    if causal:\n        after",
        "    if causal is None:\n        after",
        "test_numerics:test_the_future_does_not_reach_the_past",
        {"method": "lsh"},
    ),
    "future visible by one token": Mutant(
        "reference",
        "visible & (distance >= 0)",
        "visible & (distance >= -1)",
        "test_positions:test_both_corners_of_the_causal_mask",
    ),
    "own key hidden by the causal mask": Mutant(
        "reduction",
        "(keys.offset + at_k)[:, None, :] <= (queries",
        "(keys.offset + at_k)[:, None, :] < (queries",
        "test_reduction:test_reduction_is_attention_under_the_mean_mask",
        {"which": "iid", "causal": True},
    ),
    "q_offset ignored": Mutant(
        "reference",
        "        return first_q - first_k\n",
        "        return -first_k\n",
        "test_positions:test_decoding_equals_prefill",
        {"method": "exact"},
    ),
    "k_offset ignored by the causal mask": Mutant(
        "reduction",
        "(keys.offset + at_k)[:, None, :]",
        "at_k[:, None, :]",
        "test_positions:test_merged_shards_of_keys_equal_the_whole",
        {"method": "lsh", "causal": True},
    ),
    "k_offset ignored by the blocks": Mutant(
        "reference",
        "request.labels(first_k, first_k + max(k.shape[2], 1))",
        "request.labels(0, max(k.shape[2], 1))",
        "test_positions:test_merged_shards_of_keys_equal_the_whole",
        {"method": "lsh", "causal": False},
    ),
    "offset of the first batch row for all": Mutant(
        "reference",
        "offsets = tuple(x if isinstance(x, int) else x[b] for",
        "offsets = tuple(x if isinstance(x, int) else x[0] for",
        "test_positions:test_offsets_per_batch_row_equal_separate_calls",
        {"method": "lsh"},
    ),
    "slopes of the first batch row for all": Mutant(
        "reference",
        "rows = [row[h] for row in slopes]",
        "rows = [slopes[0][h] for row in slopes]",
        "test_attention:test_slopes_per_batch_row_equal_separate_calls",
        {"method": "exact"},
    ),
    "softmax shift from hidden keys too": Mutant(
        "reduction",
        "top = xp.max(xp.where(visible, scores, lowest), axis=-1, keepdims=True)",
        "top = xp.max(scores, axis=-1, keepdims=True)",
        "test_numerics:test_a_hidden_key_far_above_the_visible_ones_empties_no_row",
        {"method": "exact", "where": "future"},
    ),
    "dead rows uniform": Mutant(
        "reduction",
        "p = xp.where(visible, xp.exp(xp.where(visible, scores - shift, zero)), zero)",
        "p = xp.exp(xp.where(visible, scores - shift, xp.where(seen, lowest, zero)))",
        "test_numerics:test_a_dead_row_is_zero_with_zero_gradients",
        {"method": "exact"},
    ),
    "segments ignored": Mutant(
        "reduction",
        "(ids_q[..., :, None] == ids_k[..., None, :]) & (ids_k",
        "(ids_q[..., :, None] == ids_q[..., :, None]) & (ids_k",
        "test_segments:test_packed_documents_equal_separate_calls",
        {"method": "lsh", "causal": False},
    ),
    "padding sees padding": Mutant(
        "reduction",
        " & (ids_k[..., None, :] >= 0)",
        "",
        "test_segments:test_queries_and_keys_of_padding_do_not_meet",
        {"method": "exact"},
    ),
    "padding not zeroed": Mutant(
        "reduction",
        "return xp.where((ids >= 0)[:, None, :, None], x, _constants(x, xp)[0])",
        "return x",
        "test_segments:test_padded_keys_alone_are_hidden",
        {"method": "exact"},
    ),
    "scale dropped": Mutant(
        "reduction",
        "q = q * scale",
        "q = q * 1.0",
        "test_numerics:test_any_finite_scale",
        {"method": "lsh", "scale": -0.5},
    ),
    "bias scaled": Mutant(
        "reference",
        "return attend_heads(q, k, v, head, (0, 0), segment_ids, request.static.scale, xp)",
        "slopes = tuple(m * request.static.scale for m in slopes)\n"
        "    return attend_heads(q, k, v, head, (0, 0), segment_ids, request.static.scale, xp)",
        "test_attention:test_bias_is_not_scaled",
        {"method": "exact"},
    ),
    "sign of the bias": Mutant(
        "reference",
        "bias = -slope *",
        "bias = slope *",
        "test_numerics:test_slopes_spread_the_weight",
    ),
    "lse without the shift": Mutant(
        "reduction",
        "lse = xp.where(seen, shift + xp.log(total), dead)  # (…, m, 1)",
        "lse = xp.where(seen, xp.log(total), dead)  # (…, m, 1)",
        "test_numerics:test_a_constant_added_to_the_logits_of_a_row_changes_nothing",
        {"method": "exact"},
    ),
    "window without its last token": Mutant(
        "reference",
        "visible = span <= width",
        "visible = span < width",
        "test_numerics:test_tiles_without_a_visible_key",
        {"width": 3},
    ),
    "accumulation in the input dtype": Mutant(
        "reduction",
        "wide = xp.float64 if dtype == xp.float64 else xp.float32",
        "wide = dtype",
        "test_numerics:test_logits_beyond_the_range_of_float16",
        {"method": "exact", "dtype": "float16"},
    ),
    "seed ignored": Mutant(
        "methods",
        "RandomBinning(sigma), method.samples, method.sampler, method.seed, ids)",
        "RandomBinning(sigma), method.samples, method.sampler, 0, ids)",
        "test_attention:test_every_option_of_lsh_acts",
        {"name": "seed"},
    ),
    "sampler ignored": Mutant(
        "methods",
        "RandomBinning(sigma), method.samples, method.sampler, method.seed, ids)",
        'RandomBinning(sigma), method.samples, "stratified", method.seed, ids)',
        "test_attention:test_every_option_of_lsh_acts",
        {"name": "sampler"},
    ),
    "head ids ignored": Mutant(
        "methods",
        "ids = tuple(range(heads)) if method.head_ids is None else method.head_ids",
        "ids = tuple(range(heads))",
        "test_attention:test_a_shard_of_the_heads_passes_its_own_ids",
    ),
    "float32 widths": Mutant(
        "hashing",
        "rounded = [int(w) for w in np.rint(scaled)]",
        "rounded = [int(w) for w in np.rint(scaled.astype(np.float32))]",
        "test_hashing:test_random_binning_widths_are_correctly_rounded",
        {"sigma": 7.25},
    ),
    "float32 labels": Mutant(
        "hashing",
        "first = (later * width + (shift + UNIT - 1)) >> 24",
        "first = np.ceil(np.float32(later * width + shift) / UNIT).astype(np.int64)",
        "test_hashing:test_labels_equal_the_independent_implementation",
        {"family": plsh.RandomBinning(7.0), "base": 10**6},
    ),
    "output left in the inner layout": Mutant(
        "attention",
        'return compat.swap_heads(x) if self.layout == "bshd" else x',
        "return x",
        "test_attention:test_layouts_and_the_absent_batch_axis_are_views_of_one_call",
        {"method": "exact"},
    ),
}


def killer_of(mutant: Mutant) -> Any:
    module, _, name = mutant.killer.partition(":")
    return getattr(importlib.import_module(module), name)


def functions_of(module: types.ModuleType) -> dict[str, types.FunctionType]:
    """Return a module's own functions and methods, by qualified name."""
    found = {}
    for owner in (module, *vars(module).values()):
        if owner is module or (inspect.isclass(owner) and owner.__module__ == module.__name__):
            for x in vars(owner).values():
                if isinstance(x, types.FunctionType) and x.__module__ == module.__name__:
                    found[x.__qualname__] = x
    return found


def forget_draws() -> None:
    """Empty the caches, so that no mutant's integers outlive it, nor the original's hide it."""
    weights = sys.modules["plsh.weights"]
    weights._draw.cache_clear()
    weights._LABELS.__init__(weights._LABELS._max_bytes)


@pytest.fixture
def infect(monkeypatch):
    """Return a function that puts a mutant in place until the test ends."""

    def infect(mutant: Mutant) -> None:
        original = sys.modules[f"plsh.{mutant.module}"]
        text = inspect.getsource(original)
        count = text.count(mutant.old)
        if count != 1:
            pytest.fail(f"{mutant.old!r} occurs {count} times in plsh.{mutant.module}, not once")
        changed = types.ModuleType(original.__name__)
        changed.__package__ = "plsh"
        monkeypatch.setitem(sys.modules, original.__name__, changed)  # dataclasses look it up
        exec(
            compile(text.replace(mutant.old, mutant.new), original.__file__, "exec"), vars(changed)
        )
        monkeypatch.setitem(sys.modules, original.__name__, original)
        before, after = functions_of(original), functions_of(changed)
        swapped = [n for n in before if before[n].__code__ != after[n].__code__]
        assert swapped
        for name in swapped:
            monkeypatch.setattr(before[name], "__code__", after[name].__code__)
        forget_draws()

    yield infect
    monkeypatch.undo()
    forget_draws()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_dies(name, infect, monkeypatch):
    mutant = MUTANTS[name]
    killer, arguments = killer_of(mutant), dict(mutant.arguments)
    if "monkeypatch" in inspect.signature(killer).parameters:
        arguments["monkeypatch"] = monkeypatch
    infect(mutant)
    with pytest.raises(AssertionError):
        killer(**arguments)


@pytest.mark.parametrize("name", MUTANTS)
def test_killer_passes_without_the_mutant(name, monkeypatch):
    mutant = MUTANTS[name]
    killer, arguments = killer_of(mutant), dict(mutant.arguments)
    if "monkeypatch" in inspect.signature(killer).parameters:
        arguments["monkeypatch"] = monkeypatch
    killer(**arguments)
