"""The byte model by NumPy: equal to torch's, the same by cache as whole, trimmed and not."""

import math

import numpy as np
import pytest
import torch

import plsh
from plsh.byte_model import Cache, generate, load, quantise, save
from plsh.byte_model.model import bits_per_byte
from plsh.study import box
from plsh.study.arms import Arm
from plsh.study.language_model import LanguageModel, Shape
from plsh.study.training import Settings

SETTINGS = Settings(Shape(layers=2, dims=32, heads=4, max_bias=3), length=64)
TEXT = np.random.default_rng(0).integers(0, 256, 150).astype(np.uint8)


@pytest.fixture(scope="module")
def trained():
    """A model of torch whose weights are as large as trained ones."""
    model = LanguageModel(SETTINGS.shape, 0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight *= 5
            else:
                weight += 0.1 * torch.arange(len(weight)) / len(weight)
    return model


@pytest.fixture(scope="module")
def model(trained):
    return box.export(trained, SETTINGS)


def test_logits_are_those_of_torch(trained, model):
    with torch.no_grad():
        expected = trained(torch.from_numpy(TEXT.astype(np.int64))[None], Arm("exact"), 0, 0)[0]
    found = model.logits(TEXT, model.attention("exact"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_bytes_and_arrays_are_taken_alike(model):
    exact = model.attention("exact")
    np.testing.assert_array_equal(model.logits(TEXT.tobytes(), exact), model.logits(TEXT, exact))


def test_layers_under_lsh_have_blocks_of_their_own(model, monkeypatch):
    seeds = []
    attention = plsh.attention

    def listen(*args, method, **options):
        seeds.append(method.seed)
        return attention(*args, method=method, **options)

    monkeypatch.setattr("plsh.byte_model.model.attention", listen)
    for method in ("lsh", plsh.PositionalLSH(4, seed=(5, 6))):
        model.logits(TEXT, model.attention(method))
    assert seeds == [(0, 0), (0, 1), (5, 6, 0), (5, 6, 1)]


def test_a_saved_model_is_rounded_to_eight_bits(model, tmp_path):
    path = tmp_path / "weights.npz"
    save(path, model)
    again = load(path)
    assert (again.slopes, again.length, again.layers) == (model.slopes, 64, 2)
    for name, w in model.weights.items():
        step = np.abs(w).max(-1, keepdims=True) / 127 if w.ndim == 2 else 0
        assert (np.abs(again.weights[name] - w) <= 0.501 * step).all()


def test_rows_of_zeros_stay_zeros():
    whole, scale = quantise(np.zeros((2, 3)))
    assert not whole.any()
    assert np.isfinite(scale).all()


def test_bits_are_those_of_the_softmax():
    logits = np.random.default_rng(1).normal(size=(5, 256)).astype(np.float32)
    chance = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy() / np.log(2)
    expected = [-chance[i, t] for i, t in enumerate(b"text")]
    np.testing.assert_allclose(bits_per_byte(logits, b" text"), expected, rtol=1e-12)


METHODS = [
    "exact",
    plsh.Window([3, 5, 9, 20]),
    plsh.PositionalLSH(8, seed=3),
    plsh.PositionalLSH(2, sampler="iid"),
]


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("method", METHODS, ids=["exact", "window", "stratified", "iid"])
def test_the_cache_gives_what_the_whole_text_gives(model, method, trim):
    cache = Cache(model, method, trim)
    parts = [cache.logits(part) for part in np.split(TEXT, [70, 71, 72, 140])]
    whole = model.logits(TEXT, model.attention(method))
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-4, atol=1e-4)


def test_the_cache_holds_what_heads_can_see(model):
    trimmed, whole = (Cache(model, plsh.Window([3, 5, 9, 20]), trim) for trim in (True, False))
    for cache in (trimmed, whole):
        cache.logits(TEXT)
    assert (trimmed.tokens, whole.tokens) == (20, 150)
    assert trimmed.bytes == 2 * 2 * 4 * 20 * 8 * 4
    assert Cache(model, "exact").tokens == 0


def test_a_cache_cut_too_short_is_found_out(model):
    """The check of the check: one position less changes what comes out."""
    cache = Cache(model, plsh.Window([3, 5, 9, 20]))
    cache._reach = [19, 19]
    parts = [cache.logits(part) for part in np.split(TEXT, [100, 101])]
    whole = model.logits(TEXT, model.attention(plsh.Window([3, 5, 9, 20])))
    assert np.abs(np.concatenate(parts) - whole).max() > 1e-3


def test_a_text_goes_on_alike_trimmed_or_not(model):
    method = plsh.PositionalLSH(4, seed=1)
    texts = [
        bytes(generate(Cache(model, method, trim), b"abc" * 20, 30, seed=7))
        for trim in (True, False)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 30


def test_without_temperature_the_likeliest_byte_comes(model):
    found = list(generate(Cache(model, "window"), b"abc", 2, temperature=0))
    text = b"abc"
    for token in found:
        assert token == int(model.logits(text, model.attention("window"))[-1].argmax())
        text += bytes([token])


@pytest.mark.parametrize("given", [(b"", 1), (b"a", 1, -0.5), (b"a", 1, math.nan)])
def test_what_can_not_be_continued_is_said(given):
    with pytest.raises(ValueError, match=r"(prompt|temperature) must"):
        next(generate(Cache(load(), "window"), *given))
