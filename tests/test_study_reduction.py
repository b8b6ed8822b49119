"""The study of theorem 2.2: errors by other means, an adversary who is one, verdicts that fail."""

import dataclasses
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

import transformers

import plsh
from plsh import byte_model
from plsh.cli import main
from plsh.cli.common import CliError
from plsh.study import activations, adversary, reduction, reduction_command, statistics
from plsh.study.reduction_claims import ADVERSARIAL, RANDOM_TWIN, judge
from plsh.testing.oracle import oracle, step_weight

TINY = reduction.Settings(
    length=48,
    head_dim=8,
    sigmas=(4, 16),
    spreads=(1.0,),
    samples=(4, 16, 64),
    repeats=3,
    adversary_length=32,
    adversary_steps=8,
    time_lengths=(64, 128),
    time_repeats=2,
)


@pytest.fixture
def heads():
    return reduction.random_heads(TINY, 1.0, 0)


def dense(heads, weight):
    q, k, v = (x[None] for x in heads[:3])
    return oracle(q, k, v, weight=weight, causal=True)


def alibi(heads):
    at = np.arange(heads.q.shape[1])
    return np.exp(-np.array(heads.slopes)[:, None, None] * np.abs(at[:, None] - at))


# --- errors ---


def test_metrics_are_those_of_dense_matrices(heads):
    errors = reduction.Errors(heads)
    method = errors.methods(16, 3)["lsh iid"]
    found = errors.of(method)
    family = plsh.RandomBinning(tuple(1 / m for m in heads.slopes))
    labels = family.sample(16, 48, seed=3, sampler="iid").labels()
    exact, lsh = dense(heads, alibi(heads)), dense(heads, step_weight(labels, labels))
    for h in range(2):
        a, b = exact.out[0, h], lsh.out[0, h]
        rows = np.linalg.norm(b - a, axis=1) / np.linalg.norm(a, axis=1)
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        sums, others = (np.exp(x.lse[0, h])[:, None] for x in (exact, lsh))
        largest = np.linalg.norm(heads.v[h], axis=1).max()
        expected = {
            "relative": np.linalg.norm(b - a) / np.linalg.norm(a),
            "unnormalised": np.linalg.norm(b * others - a * sums) / np.linalg.norm(a * sums),
            "row median": np.median(rows),
            "row 90 %": np.quantile(rows, 0.9),
            "row 99 %": np.quantile(rows, 0.99),
            "cosine mean": cosine.mean(),
            "cosine 1 %": np.quantile(cosine, 0.01),
            "absolute": np.linalg.norm(b - a) / np.sqrt(48) / largest,
        }
        assert {name: x[h] for name, x in found.items()} == pytest.approx(expected, rel=1e-9)


def test_the_error_of_the_bias_matrix_is_that_of_its_decomposition(heads):
    method = plsh.PositionalLSH(16, sampler="iid", seed=3)
    labels = plsh.RandomBinning(16.0).sample(16, 48, seed=3, head_ids=[1], sampler="iid").labels()
    wrong = np.tril(step_weight(labels, labels)[0] - alibi(heads)[1])
    assert reduction.bias_error(method, heads.slopes, 1, 48) == pytest.approx(
        np.linalg.norm(wrong, 2), rel=1e-6
    )


def test_windows_cost_what_lsh_costs(heads):
    """Those of equal arithmetic score at most the pairs, of equal bandwidth reach as far."""
    methods = reduction.Errors(heads).methods(16, 3)
    family = plsh.RandomBinning(tuple(1 / m for m in heads.slopes))
    masks = family.sample(16, 48, seed=3, sampler="iid")
    at = np.arange(48)
    for h in range(2):
        pairs = np.count_nonzero(np.tril(masks.mean_mask(h)))
        for width, least in ((methods["window at the pairs"].width[h], -48), (48, 0)):
            scored = np.count_nonzero(np.tril(np.abs(at[:, None] - at) <= width))
            assert least + pairs <= scored
            assert width == 48 or scored <= pairs
        assert methods["window at the bandwidth"].width[h] >= masks.bandwidth()[h]


def test_logits_spread_as_they_say():
    settings = dataclasses.replace(TINY, length=200, head_dim=64)
    q, k, _, _ = reduction.random_heads(settings, 3.0, 1)
    assert np.std(q @ k.swapaxes(1, 2) / 8) == pytest.approx(3.0, rel=0.05)


def test_an_adversary_does_worse_than_chance_within_his_limits():
    start = adversary.random_limited((4, 16), 32, 0)
    masks = plsh.PositionalLSH(16, sampler="iid", seed=0)
    found = adversary.worst(start, masks, 25)
    before, after = (reduction.Errors(x).of(masks)["absolute"] for x in (start, found))
    assert (after > 1.5 * before).all()
    for x, limit in zip(found[:3], adversary._limits(), strict=True):
        assert np.linalg.norm(x, axis=-1).max() <= limit * (1 + 1e-9)
    logits = found.q @ found.k.swapaxes(1, 2) / adversary.HEAD_DIM**0.5
    assert np.abs(logits).max() <= adversary.LOGIT * (1 + 1e-9)


# --- activations ---


@pytest.fixture(scope="module")
def byte():
    """A byte model with random weights, two layers of two heads."""
    draw = np.random.default_rng(0)
    shapes = {"qkv": (48, 16), "out": (16, 16), "up": (64, 16), "down": (16, 64)}
    weights = {"embedding": draw.normal(size=(256, 16)), "norm": np.ones(16)}
    for layer in range(2):
        weights |= {f"{layer}.{n}": draw.normal(size=s) / 4 for n, s in shapes.items()}
        weights |= {f"{layer}.{n}": np.ones(16) for n in ("attention_norm", "mlp_norm")}
    return byte_model.ByteModel(weights, 2, 2.0, 32)


def test_heads_of_the_byte_model_are_what_it_attends_with(byte):
    text = np.arange(20, dtype=np.uint8)
    layers = activations.of_byte_model(byte, text)
    assert len(layers) == 2
    seen = []

    def attend(layer, q, k, v):
        seen.append(q[0])
        out = dense(layers[layer], alibi(layers[layer])).out
        return out.astype(np.float32)

    logits = byte.logits(text, attend)
    np.testing.assert_allclose(seen[1], layers[1].q, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        logits, byte.logits(text, byte.attention("exact")), rtol=1e-4, atol=1e-4
    )


SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)
    ),
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(vocab_size=300, d_model=32, n_layers=2, n_heads=4)
    ),
}


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    """A tiny random model of transformers with a tokenizer of words, in a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    MODELS[request.param]().save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    return SimpleNamespace(name=request.param, path=tmp_path)


def test_heads_of_a_model_of_transformers_give_its_attention(saved):
    """From q, k, v the first layer's output projection gets its true input."""
    model = activations.HuggingFace(saved.path)
    inputs = []
    names = {"llama": "o_proj", "bloom": "dense", "mpt": "out_proj"}
    first = next(m for n, m in model.model.named_modules() if n.endswith(names[saved.name]))
    first.register_forward_hook(lambda module, given, out: inputs.append(given[0][0]))
    layers = model.heads("a b a c b b a a", 8)
    assert len(layers) == 2
    heads = layers[0]
    weight = np.ones((4, 8, 8)) if saved.name == "llama" else alibi(heads)
    expected = dense(heads, weight).out[0].swapaxes(0, 1).reshape(8, 32)
    np.testing.assert_allclose(inputs[0].detach().numpy(), expected, rtol=1e-4, atol=1e-6)


def test_a_folder_without_a_model_is_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CliError, match="--model"):
            activations.HuggingFace(path)


# --- verdicts and the command ---


def cells(slope=-0.5, window=0.5, bound=1.0):
    """Cells whose errors follow a power law, with a window's a factor `window` of lsh's."""
    found = []
    for name, scale in (("random", 0.1), (RANDOM_TWIN, 0.1), (ADVERSARIAL, 0.5)):
        for method in reduction.METHODS:
            for s in (4, 16, 64):
                size = scale * s**slope * (window if "window" in method else 1)
                noisy = [size * (1 + 0.01 * r) for r in range(3)]
                metrics = {"relative": noisy, "absolute": noisy, "bound": [bound] * 3}
                found.append(reduction.Cell(name, 4.0, method, s, metrics))
    return found


GROWTH = {
    "lsh iid s=16": statistics.Interval(1.0, 0.9, 1.1),
    "exact": statistics.Interval(1.9, 1.8, 2.0),
}


def test_claims_hold_where_the_figures_say_so():
    assert {c.verdict for c in judge(cells(), GROWTH)} == {statistics.HOLDS}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"slope": -0.2}, "falls as samples^-1/2"),
        ({"window": 2.0}, "is larger than that of a window at the pairs"),
        ({"bound": 0.001}, "is within theorem 2.2's bound"),
    ],
)
def test_claims_fail_where_the_figures_say_so(given, words):
    failed = [c.claim for c in judge(cells(**given), GROWTH) if c.verdict == statistics.FAILS]
    assert any(words in claim for claim in failed)


def test_the_command_leaves_json_and_figures_and_times_anew(byte, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reduction_command, "QUICK", TINY)
    monkeypatch.setattr(byte_model, "load", lambda: byte)
    argv = ["study", "reduction", "--quick", "--output", str(tmp_path)]
    assert main([*argv, "--retime"]) == 2
    assert "of an earlier run" in capsys.readouterr().err
    assert main(argv) == 0
    first = json.loads((tmp_path / "reduction.json").read_text(encoding="utf-8"))
    assert {c["inputs"] for c in first["cells"]} == {
        "random, logits of std 1",
        "byte model",
        ADVERSARIAL,
        RANDOM_TWIN,
    }
    for name in ("errors", "bounds", "rows", "time"):
        assert (tmp_path / f"reduction-{name}.png").read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--retime", "--model", "x"]) == 2
    assert "no --text and no --model" in capsys.readouterr().err
    assert main([*argv, "--retime"]) == 0
    again = json.loads((tmp_path / "reduction.json").read_text(encoding="utf-8"))
    assert again["cells"] == first["cells"]
    assert again["times"] != first["times"]
