"""The golden vectors: the core equals them, and they are what the independent oracle writes."""

import importlib.util
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import plsh
from plsh.conformance import vectors
from plsh.hashing import Bins, Cuts, fold_seed, shift_count, words
from plsh.methods import PositionalLSH, resolve
from plsh.weights import StepWeight

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = ("random_binning", "power_law_binning", "fixed_blocks", "independent_cuts")
CASES = [
    pytest.param(case, id=f"{name}-{i}")
    for name in FAMILIES
    for i, case in enumerate(vectors.load(name))
]
ATTENTION = [
    pytest.param(case, id=f"{case['method']['method']}-{i}")
    for i, case in enumerate(vectors.load("attention"))
]
ONE_BLOCK = 1 << 62


def seed_of(stored):
    return tuple(stored) if isinstance(stored, list) else stored


def weight_of(case) -> StepWeight:
    """The recipe of a stored draw: by its family, or by the slopes of a call."""
    parameters = {name: [float(x) for x in row] for name, row in case["parameters"].items()}
    heads = len(case["head_ids"])
    draw = {"sampler": case["sampler"], "seed": seed_of(case["seed"]), "head_ids": case["head_ids"]}
    if "slope" not in parameters:
        family = getattr(plsh, case["family"])(**parameters)
        method = PositionalLSH(case["samples"], family=family, **draw)
        return resolve(method, None, (), heads).weight
    if case["family"] == "RandomBinning":
        method = PositionalLSH(case["samples"], **draw)
        return resolve(method, tuple(parameters["slope"]), (), heads).weight
    sigma = [float("inf") if m == 0 else 1 / float(np.float32(m)) for m in parameters["slope"]]
    method = PositionalLSH(case["samples"], family=plsh.IndependentCuts(sigma), **draw)
    return resolve(method, None, (), heads).weight


def draw_of(case) -> Bins | Cuts:
    weight = weight_of(case)
    return weight.family.hash(weight.samples, weight.sampler, weight.seed, weight.head_ids)


def test_words_equal_the_golden_words():
    stored = vectors.load("words")["words"]
    assert len(stored) == 25
    for case in stored:
        key, counter = (np.array(case[x], dtype=np.uint64) for x in ("key", "counter"))
        raw = np.random.Philox(key=key, counter=counter).random_raw(len(case["words"]))
        assert raw.tolist() == case["words"]
        if counter[1] == 0:
            start = [case["counter"][i] for i in (0, 2, 3)]
            assert words(tuple(case["key"]), len(raw), tuple(start)).tolist() == case["words"]


def test_folded_seeds_equal_the_golden_seeds():
    for case in vectors.load("words")["seeds"]:
        assert fold_seed(tuple(case["seed"])) == case["folded"]


def test_shift_counts_equal_the_golden_counts():
    stored = vectors.load("words")["shift_counts"]
    assert {int(s): m for s, m in stored.items()} == {s: shift_count(s) for s in range(1, 401)}


@pytest.mark.parametrize("case", CASES)
def test_widths_shifts_and_thresholds_equal_the_golden_integers(case):
    hashed = draw_of(case)
    if isinstance(hashed, Cuts):
        assert list(hashed.threshold) == case["threshold"]
        return
    width = [[None if w == ONE_BLOCK else w for w in row] for row in hashed.width.tolist()]
    assert width == case["width"]
    assert hashed.shift.tolist() == case["shift"]


@pytest.mark.parametrize("case", CASES)
def test_labels_equal_the_golden_labels(case):
    """U098: one stream of blocks for a seed, near position 0 and far from it."""
    weight = weight_of(case)
    for stored in case["labels"]:
        start, stop = stored["start"], stored["start"] + len(stored["labels"][0][0])
        labels = weight.labels(start, stop)
        assert labels.dtype == np.int32
        assert labels.tolist() == stored["labels"]
        first, _ = weight.bounds(np.arange(start, stop))
        assert first.tolist() == stored["labels"]


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_and_gradients_equal_the_golden_values(case):
    method, options = dict(case["method"]), dict(case["options"])
    name, slopes = method.pop("method"), method.pop("slopes", None)
    if name == "lsh":
        family = getattr(plsh, method["family"])(*method["parameters"])
        chosen = plsh.PositionalLSH(
            method["samples"],
            sampler=method["sampler"],
            seed=seed_of(method["seed"]),
            family=family,
        )
    else:
        chosen = plsh.Exact() if name == "exact" else plsh.Window(method["width"])
    stored = {k: np.array(x) for k, x in _numbers(case).items()}
    inputs = {x: torch.tensor(stored[x], requires_grad=True) for x in "qkv"}
    if slopes is not None:
        inputs["slopes"] = torch.tensor(slopes, dtype=torch.float64, requires_grad=True)
    if case["segment_ids"] is not None:
        options["segment_ids"] = torch.tensor(case["segment_ids"])
    out, lse = plsh.attention(
        **inputs, method=chosen, return_lse=True, backend="reference", **options
    )
    seen = torch.tensor(np.isfinite(stored["lse"]))
    assert torch.equal(torch.isfinite(lse), seen)
    total = (out * torch.tensor(stored["grad_out"])).sum()
    total = total + (lse * torch.tensor(stored["grad_lse"]))[seen].sum()
    found = dict(zip(inputs, torch.autograd.grad(total, list(inputs.values())), strict=True))
    np.testing.assert_allclose(out.detach(), stored["out"], rtol=0, atol=2e-10)
    np.testing.assert_allclose(lse[seen].detach(), stored["lse"][seen], rtol=0, atol=2e-10)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, stored[f"grad_{name}"], rtol=0, atol=5e-10)


def _numbers(case):
    """The arrays of a case; infinities are stored as strings."""

    def parse(x):
        return [parse(y) for y in x] if isinstance(x, list) else float(x)

    names = ("q", "k", "v", "out", "lse")
    grads = [n for n in case if n.startswith("grad_") and case[n] is not None]
    return {name: parse(case[name]) for name in (*names, *grads)}


def test_golden_attention_has_every_method_and_rows_without_a_key():
    stored = vectors.load("attention")
    assert {c["method"]["method"] for c in stored} == {"lsh", "exact", "window"}
    assert any("-inf" in str(c["lse"]) for c in stored)


def test_regeneration_is_byte_identical(tmp_path):
    golden = _tool()
    golden.main(tmp_path)
    assert sorted(golden.SETS) == sorted(vectors.names())
    for name in golden.SETS:
        written = (tmp_path / f"{name}.json").read_bytes()
        assert written == (golden.VECTORS / f"{name}.json").read_bytes(), name
        assert len(written) < 200_000


def _tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("golden", ROOT / "tools" / "golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_loading_an_unknown_set_names_the_known_ones():
    with pytest.raises(ValueError, match=r"name must be one of .*random_binning"):
        vectors.load("../words")
