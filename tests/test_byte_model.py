"""The byte model by NumPy: equal to torch's, the same by cache as whole, trimmed and not."""

import math

import numpy as np
import pytest
import torch

import plsh
from plsh.byte_model import ByteModel, Cache, generate, load, quantise, save
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
    plsh.PositionalLSH(4, family=plsh.RandomBinning([1.0, 2.0, 3.0, 4.0])),
    plsh.PositionalLSH(4, sampler=None, family=plsh.FixedBlocks(3)),
    plsh.RandomBinning(3.0).sample(4, 150),
]


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("method", METHODS, ids=range(len(METHODS)))
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


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ((b"", 1), ValueError, "prompt must have a byte"),
        (("text", 1), TypeError, "prompt must be bytes or integers from 0 to 255, got 'text'"),
        ((b"a", -1), ValueError, "count must be >= 0, got -1"),
        ((b"a", 1.5), TypeError, "count must be an integer, got 1.5"),
        ((b"a", True), TypeError, "count must be an integer, got True"),
        ((b"a", 1, -0.5), ValueError, "temperature must be a finite number >= 0, got -0.5"),
        ((b"a", 1, math.nan), ValueError, "temperature must be a finite number >= 0, got nan"),
        ((b"a", 1, "hot"), TypeError, "temperature must be a number, got 'hot'"),
        ((b"a", 1, 1.0, 1.5), TypeError, "seed must be made of integers, got 1.5"),
        ((b"a", 1, 1.0, -1), ValueError, r"seed must lie in \[0, 2\*\*64\), got -1"),
    ],
)
def test_what_can_not_be_continued_is_said_at_once(model, given, kind, words):
    cache = Cache(model, "window")
    with pytest.raises(kind, match=words):
        generate(cache, *given)
    assert cache.position == 0


def test_the_coldest_draw_is_the_likeliest_byte(model):
    cold, likeliest = (
        bytes(generate(Cache(model, "window"), b"abc", 3, temperature))
        for temperature in (1e-310, 0)
    )
    assert cold == likeliest


@pytest.mark.parametrize(
    ("tokens", "kind", "words"),
    [
        ("abc", TypeError, "tokens must be bytes or integers from 0 to 255, got 'abc'"),
        (np.ones(3), TypeError, "tokens must be bytes or integers"),
        (np.ones(3, bool), TypeError, "tokens must be bytes or integers"),
        ([300], ValueError, "tokens must lie from 0 to 255, got 300 to 300"),
        (np.array([-1]), ValueError, "tokens must lie from 0 to 255, got -1"),
        (np.zeros((1, 2), np.uint8), ValueError, r"tokens must have shape \(n,\), got \(1, 2\)"),
    ],
)
def test_what_is_no_bytes_is_refused(model, tokens, kind, words):
    for call in (
        lambda: model.logits(tokens, model.attention("exact")),
        lambda: Cache(model, "exact").logits(tokens),
        lambda: bits_per_byte(np.zeros((3, 256), np.float32), tokens),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_no_bytes_have_no_logits(model):
    cache = Cache(model, "window")
    for tokens in (b"", [], np.zeros(0, np.uint8)):
        assert model.logits(tokens, model.attention("lsh")).shape == (0, 256)
        assert cache.logits(tokens).shape == (0, 256)
    whole = model.logits(TEXT[:5], model.attention("window"))
    np.testing.assert_allclose(cache.logits(TEXT[:5]), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attend", [ByteModel.attention, Cache])
def test_a_method_and_options_are_checked_at_once(model, attend):
    with pytest.raises(TypeError, match="method must be one of"):
        attend(model, "foo")
    with pytest.raises(ValueError, match="3 heads"):
        attend(model, plsh.PositionalLSH(4, family=plsh.RandomBinning([1.0, 2.0, 3.0])))
    with pytest.raises(ValueError, match="4 heads, got 3"):
        attend(model, plsh.RandomBinning([1.0, 2.0, 3.0]).sample(4, 20))
    for name in ("causal", "slopes", "layout", "return_lse"):
        with pytest.raises(TypeError, match=f"{name} can't be chosen, the byte model gives it"):
            attend(model, "exact", **{name: True})


@pytest.mark.parametrize("name", ["q_offset", "k_offset"])
def test_the_cache_gives_the_positions_itself(model, name):
    with pytest.raises(TypeError, match=f"{name} can't be chosen"):
        Cache(model, "exact", **{name: 1})
    with pytest.raises(TypeError, match="trim must be a bool, got 1"):
        Cache(model, "exact", 1)


@pytest.mark.parametrize("held", [{}, {"heads": 4}, {"heads": 4, "max_bias": 3.0, "length": 9}])
def test_a_file_of_another_kind_is_named(held, tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, q=np.ones(3), **held)
    with pytest.raises(ValueError, match=rf"plsh.byte_model.save wrote, got {path}: .*"):
        load(path)


def test_a_damaged_file_is_named(model, tmp_path):
    path = tmp_path / "weights.npz"
    save(path, model)
    whole = path.read_bytes()
    middle = len(whole) // 2
    broken = bytes(b ^ 255 for b in whole[middle : middle + 64])
    for part in (b"", b"garbage", whole[:-9], whole[:middle] + broken + whole[middle + 64 :]):
        path.write_bytes(part)
        with pytest.raises(ValueError, match=r"path must be a file that .*save wrote, got "):
            load(str(path))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"0.qkv": None}, "weights must hold '0.qkv', got embedding"),
        ({"1.qkv": None}, "weights must be those of 1 layers, got '1.[a-z_]*', too"),
        ({"norm": None}, "weights must hold 'norm', got embedding"),
        ({"norm": np.ones(5)}, r"weights\['norm'\] must be \(32,\), got \(5,\)"),
        ({"1.down": np.ones((32, 7))}, r"weights\['1.down'\] must be \(32, 128\), got \(32, 7\)"),
    ],
)
def test_weights_that_make_no_model_are_named(model, changed, words):
    weights = {name: w for name, w in (model.weights | changed).items() if w is not None}
    with pytest.raises(ValueError, match=words):
        ByteModel(weights, 4, 3.0, 64)
    with pytest.raises(ValueError, match="heads must divide the model's 32 dims, got 5"):
        ByteModel(model.weights, 5, 3.0, 64)


@pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf, 1e300])
def test_a_matrix_without_a_scale_is_refused(entry):
    with pytest.raises(ValueError, match="matrix must be finite in float32, got entries up to"):
        quantise(np.array([[1.0, 2.0], [1.0, entry]]))


@pytest.mark.parametrize("entry", [1e-300, 1e-46, 2.7e-43, 1e-38])
def test_a_row_too_small_for_a_scale_becomes_zeros(entry):
    whole, scale = quantise(np.array([[entry, -entry]]))
    assert (whole.tolist(), scale.tolist()) == ([[0, 0]], [1.0])
