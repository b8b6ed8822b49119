"""The training study: resumed runs are bit-equal, arms attend as they say, verdicts can fail."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import plsh
from plsh.cli import main
from plsh.cli.common import CliError
from plsh.study import corpus, statistics, training, training_command
from plsh.study.arms import TRAINED, Arm
from plsh.study.evaluation import MULTIPLES, evaluate, scored
from plsh.study.language_model import LanguageModel, Shape
from plsh.study.training_claims import judge
from plsh.testing.oracle import oracle, step_weight

TINY = training.Settings(
    Shape(layers=1, dims=16, heads=2, max_bias=2), length=32, batch=2, steps=6, scored=64
)
SLOPES = TINY.shape.slopes


@pytest.fixture(scope="module")
def text():
    return corpus.load(None, TINY.least_bytes)


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 2, 20, 4, generator=generator, dtype=torch.float64).unbind()


# --- arms ---


def dense(inputs, weight):
    """Causal attention under a positional weight ``(H, n, n)``, by the oracle."""
    q, k, v = (x.numpy() for x in inputs)
    return oracle(q, k, v, weight=np.broadcast_to(weight, (2, 2, 20, 20)), causal=True).out


def masks(s, key):
    """The labels of the paper's masks, ``(H, s, 20)``."""
    family = plsh.RandomBinning(tuple(1 / m for m in SLOPES))
    return family.sample(s, 20, seed=key, sampler="iid").labels()


DISTANCE = np.abs(np.arange(20)[:, None] - np.arange(20))
ALIBI = np.exp(-np.array(SLOPES)[:, None, None] * DISTANCE)


@pytest.mark.parametrize(
    ("arm", "weight"),
    [
        (Arm("exact"), lambda: ALIBI),
        (Arm("no bias"), lambda: np.ones((2, 20, 20))),
        (Arm("window"), lambda: ALIBI * (np.array([8, 16])[:, None, None] >= DISTANCE)),
        (Arm("fixed blocks"), lambda: (
            np.arange(20)[:, None] // np.array([4, 8])[:, None, None]
            == np.arange(20) // np.array([4, 8])[:, None, None]
        )),
        (Arm("lsh", 5), lambda: step_weight(masks(5, (7, 1, 3)), masks(5, (7, 1, 3)))),
        (Arm("lsh", 5, fresh=False), lambda: step_weight(masks(5, (7, 1)), masks(5, (7, 1)))),
    ],
    ids=lambda x: getattr(x, "name", ""),
)  # fmt: skip
def test_an_arm_attends_under_its_weight(inputs, arm, weight):
    out = arm.attend(*inputs, SLOPES, seed=7, layer=1, draw=3)
    np.testing.assert_allclose(out, dense(inputs, weight().astype(float)), rtol=1e-12, atol=1e-12)


def test_the_mean_averages_outputs_each_normalised_alone(inputs):
    labels = masks(3, (7, 1, 3))
    each = [dense(inputs, step_weight(labels[:, [r]], labels[:, [r]])) for r in range(3)]
    out = Arm("mean", 3).attend(*inputs, SLOPES, seed=7, layer=1, draw=3)
    np.testing.assert_allclose(out, np.mean(each, axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("arm", TRAINED, ids=lambda arm: arm.name)
def test_the_model_sees_no_later_byte(arm):
    model = LanguageModel(TINY.shape, seed=0)
    tokens = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 15:] += 1
    before, after = (model(x % 256, arm, 0, 0)[0, :15] for x in (tokens, other))
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-6)


def test_arms_of_a_seed_begin_alike_and_see_the_same_text(text, tmp_path):
    one, two = (training.Run(TINY, arm, 3, text, tmp_path) for arm in TRAINED[:2])
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    a, b = (training.batch_at(text, TINY, 3, 5) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, training.batch_at(text, TINY, 3, 6))


# --- text and evaluation ---


def test_repeated_paragraphs_are_not_held_out(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"\n\n".join(b"paragraph %d" % (i % 50) for i in range(500)))
    loaded = corpus.load(path, 10)
    assert loaded.train.size + loaded.held_out.size == len(b"paragraph 10\n\n" * 50) - 2 - 10
    assert b"".join(x.tobytes() for x in loaded[:2]).count(b"paragraph 49") == 1


def test_text_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"short")
    with pytest.raises(CliError, match="give a longer text"):
        corpus.load(path, 100)


def test_all_lengths_score_the_same_bytes_with_the_right_ranks(text):
    """A model that knows the text but for every eighth byte: its metrics are known."""

    class Knowing:
        def __call__(self, tokens, arm, seed, draw):
            following = torch.roll(tokens, -1, 1)
            logits = torch.zeros(*tokens.shape, 256)
            logits.scatter_(-1, following[..., None], 50.0)
            return logits

    held_out = np.tile(np.arange(200, dtype=np.uint8), 8)
    windows, stride = scored(32, held_out.size, 320)
    for multiple in MULTIPLES:
        found = evaluate(Knowing(), Arm("exact"), held_out, 32, multiple, 320, 0)
        # The last byte of a window follows none that the model was shown.
        assert found.bytes == windows * stride == 320
        assert found.top1 == pytest.approx(1 - 1 / stride)
        assert found.bits_per_byte > 0


def test_an_ignorant_model_has_eight_bits(text):
    class Ignorant:
        def __call__(self, tokens, arm, seed, draw):
            return torch.zeros(*tokens.shape, 256)

    found = evaluate(Ignorant(), Arm("exact"), text.held_out, 32, 2, 64, 0)
    assert found.bits_per_byte == pytest.approx(8.0)


# --- runs ---


@pytest.mark.parametrize("arm", [Arm("lsh", 4), Arm("exact")], ids=lambda arm: arm.name)
def test_a_killed_run_goes_on_bit_equal(text, tmp_path, monkeypatch, arm):
    monkeypatch.setattr(training, "CHECKPOINT_STEPS", 2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    (expected,) = training.table(TINY, [arm], 1, text, whole)

    def kill(run):
        if run.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.table(TINY, [arm], 1, text, cut, kill)
    taken = []
    (found,) = training.table(TINY, [arm], 1, text, cut, lambda run: taken.append(run.step))
    assert taken == [5, 6]
    del expected["seconds"], found["seconds"]
    assert found == expected
    weights = [torch.load(next(x.glob("*.weights.pt")), weights_only=True) for x in (whole, cut)]
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))
    assert not list(cut.glob("*.checkpoint.pt"))


def test_a_complete_run_is_read_and_one_of_other_settings_refused(text, tmp_path):
    arms = [Arm("no bias")]
    first = training.table(TINY, arms, 1, text, tmp_path)
    again = training.table(TINY, arms, 1, text, tmp_path, lambda run: pytest.fail("it trained"))
    assert again == json.loads(json.dumps(first))
    with pytest.raises(CliError, match="of other settings"):
        training.table(dataclasses.replace(TINY, steps=7), arms, 1, text, tmp_path)


def test_a_length_that_cuts_far_heads_off_is_refused():
    with pytest.raises(CliError, match="at least 8 sigma of every head, 256"):
        training.Settings(length=255)


def test_quick_leaves_json_figures_and_verdicts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_command, "QUICK", dataclasses.replace(TINY, steps=2))
    monkeypatch.setattr(training_command, "TRAINED", TRAINED[:4])
    argv = ["study", "training", "--quick", "--seeds", "2", "--output", str(tmp_path)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    document = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert len(document["runs"]) == 8
    assert all(claim["claim"] in out for claim in document["claims"])
    for name in ("bits", "curves", "swapped"):
        assert (tmp_path / f"training-{name}.png").read_bytes().startswith(b"\x89PNG")


# --- verdicts ---


def results(bits):
    """Results with bits per byte by arm, of which each seed adds its own hundredth."""
    noise = {0: 0.0, 1: 0.001, 2: -0.001}
    return [
        {
            "arm": arm,
            "seed": seed,
            "own": {
                str(m): {"bits_per_byte": b + 0.01 * seed + noise[seed] * place} for m in MULTIPLES
            },
        }
        for place, (arm, b) in enumerate(bits.items())
        for seed in noise
    ]


def verdict(found, words):
    (claim,) = [c for c in found if words == c.claim]
    return claim.verdict


def test_claims_hold_where_the_figures_say_so():
    found = judge(results({"exact": 2.0, "no bias": 3.0, "lsh s=10": 2.01, "fixed blocks": 2.4}))
    assert {c.verdict for c in found} == {statistics.HOLDS}


def test_claims_fail_where_the_figures_say_so():
    found = judge(results({"exact": 2.0, "no bias": 3.0, "lsh s=10": 3.5, "fixed blocks": 2.4}))
    assert verdict(found, "lsh s=10 is as good as exact ALiBi") == statistics.FAILS
    assert verdict(found, "lsh s=10 is better than no bias") == statistics.FAILS
    assert verdict(found, "fixed blocks are worse than lsh s=10") == statistics.FAILS


def test_as_good_is_undecided_where_exact_does_not_beat_no_bias():
    found = judge(results({"exact": 2.0, "no bias": 2.0, "lsh s=10": 2.0}))
    assert verdict(found, "lsh s=10 is as good as exact ALiBi") == statistics.UNDECIDED


def test_one_seed_decides_nothing():
    one = [r for r in results({"exact": 2.0, "no bias": 3.0, "lsh s=10": 2.0}) if r["seed"] == 0]
    assert {c.verdict for c in judge(one)} == {statistics.UNDECIDED}
