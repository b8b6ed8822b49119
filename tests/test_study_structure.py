"""The study of theorem 2.1: measurements against other ways to make them, verdicts that fail."""

import dataclasses
import json
import math

import numpy as np
import pytest

from plsh import FixedBlocks, RandomBinning
from plsh.cli import study
from plsh.study import statistics, structure

TINY = structure.Settings(
    sigmas=(4,),
    lengths=(64, 128),
    samples=(1, 4, 16, 64),
    repeats=4,
    block_sigma=8,
    block_lengths=(256, 1024),
    block_samples=(1, 4, 16),
    block_repeats=10,
    block_draws=300,
)


# --- measurements ---


@pytest.mark.parametrize("sampler", structure.SAMPLERS)
@pytest.mark.parametrize("n", [1, 2, 37])
def test_shared_counts_the_masks_that_join_two_positions(sampler, n):
    masks = structure.draw(5.0, n, 6, sampler, 3)
    np.testing.assert_array_equal(
        structure.shared(masks.labels()[0]), np.rint(6 * masks.mean_mask(0))
    )


def test_shared_counts_blocks_that_began_before_the_range():
    labels = np.array([[2, 2, 5], [3, 4, 4]], dtype=np.int32)  # positions 3, 4, 5
    assert structure.shared(labels).tolist() == [[2, 1, 0], [1, 2, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    "matrix",
    [
        np.random.default_rng(0).normal(size=(30, 20)),
        np.tril(np.random.default_rng(1).normal(size=(40, 40))),
        structure.decay(3.0, 50),
        np.eye(5),
        np.zeros((4, 4)),
        -np.ones((1, 1)),
    ],
)
def test_spectral_norm_is_the_largest_singular_value(matrix):
    assert structure.spectral_norm(matrix) == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-7)


def test_errors_are_those_of_dense_matrices():
    """The cell of one setting, computed anew by NumPy's decompositions."""
    settings = dataclasses.replace(TINY, lengths=(64,), repeats=2)
    cells = structure.errors(settings)
    at = np.arange(64)
    exact = np.exp(-np.abs(at[:, None] - at) / 4)
    for cell in cells:
        if cell.samples != 16:
            continue
        for seed in range(2):
            wrong = structure.draw(4, 64, 16, cell.sampler, seed).mean_mask(0) - exact
            wrong, target = (np.tril(x) if cell.causal else x for x in (wrong, exact))
            norm = np.linalg.norm(wrong, 2)
            expected = {
                "spectral": norm,
                "relative spectral": norm / np.linalg.norm(target, 2),
                "max": np.abs(wrong).max(),
                "relative frobenius": np.linalg.norm(wrong) / np.linalg.norm(target),
            }
            found = {metric: values[seed] for metric, values in cell.errors.items()}
            assert found == pytest.approx(expected, rel=1e-3)


# --- verdicts ---


def verdicts(found):
    """Return the verdict of each claim by its words."""
    return {claim["claim"]: claim["verdict"] for claim in found["claims"]}


def test_the_claims_hold_of_the_true_masks_or_are_undecided():
    found = verdicts(structure.run(TINY))
    assert statistics.FAILS not in found.values()
    assert sum(v == statistics.HOLDS for v in found.values()) >= 8


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda n, s, seed: FixedBlocks(n / 2).sample(s, n), ["-1/2", "does not grow"]),
        (
            lambda n, s, seed: RandomBinning(16.0).sample(s, n, seed=seed, sampler="iid"),
            ["-1/2", "is longer than the bound"],
        ),
    ],
    ids=["fixed blocks", "twice sigma"],
)
def test_wrong_masks_are_found_out(monkeypatch, wrong, words):
    """What is claimed of iid masks is measured, so masks of another law break it."""
    true = structure.draw

    def draw(sigma, n, samples, sampler, seed):
        if sampler != "iid":
            return true(sigma, n, samples, sampler, seed)
        return wrong(n, samples, seed)

    monkeypatch.setattr(structure, "draw", draw)
    found = verdicts(structure.run(TINY))
    failed = [claim for claim, v in found.items() if v == statistics.FAILS and "iid" in claim]
    for some in words:
        assert any(some in claim for claim in failed)


# --- statistics ---


def test_student_points_are_those_of_the_tables():
    """Points of printed tables, beyond the thirty that are kept."""
    for degrees, point in ((40, 2.021), (60, 2.000), (120, 1.980)):
        assert statistics.student(degrees) == pytest.approx(point, abs=1e-3)
    assert statistics.student(0) == math.inf


def test_intervals_cover_the_mean_as_often_as_they_say():
    draws = np.random.default_rng(0).normal(3.0, 2.0, size=(2000, 3))
    covered = [low <= 3 <= high for _, low, high in map(statistics.mean_interval, draws)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_one_value_decides_nothing():
    alone = statistics.mean_interval([5.0])
    assert statistics.judge_above(alone) == statistics.UNDECIDED


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [((-0.6, -0.4), "holds"), ((-0.9, -0.8), "does not hold"), ((-0.8, -0.5), "undecided")],
)
def test_a_range_is_judged_by_the_whole_interval(interval, verdict):
    judged = statistics.judge_within(statistics.Interval(-0.5, *interval), -0.7, -0.3)
    assert judged == verdict


# --- the command ---


def test_the_command_leaves_json_and_figures(call, tmp_path, monkeypatch):
    monkeypatch.setattr(structure, "QUICK", TINY)
    got = call("study", "structure", "--quick", "--output", tmp_path)
    assert (got.status, got.err) == (0, "")
    document = json.loads((tmp_path / "structure.json").read_text(encoding="utf-8"))
    assert document["settings"]["sigmas"] == [4]
    assert got.out.count("wrote ") == 3
    assert all(claim["claim"] in got.out for claim in document["claims"])
    for name in ("structure-errors.png", "structure-blocks.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_quick_is_quick(call, tmp_path):
    assert call("study", "structure", "--quick", "--output", tmp_path).status == 0


def test_a_missing_extra_is_named_with_its_remedy(call, monkeypatch):
    monkeypatch.setattr(study.importlib.util, "find_spec", lambda name: None)
    got = call("study", "structure")
    assert (got.status, got.out) == (2, "")
    assert got.err.startswith("plsh study structure: error: this study needs matplotlib")
    assert 'pip install "plsh[study]"' in got.err


def test_an_output_that_cannot_be_made_is_refused_before_any_work(call, tmp_path, monkeypatch):
    monkeypatch.setattr(structure, "run", lambda *args: pytest.fail("it began"))
    (tmp_path / "file").touch()
    got = call("study", "structure", "--output", tmp_path / "file" / "below")
    assert (got.status, got.err.count("\n")) == (2, 1)
    assert "cannot make --output" in got.err


@pytest.mark.parametrize("name", ["structure", "reduction", "training", "model"])
def test_help_has_an_example_that_parses(call, name):
    got = call("study", name, "--help")
    examples = [x.split() for x in got.out.splitlines() if x.startswith(f"  plsh study {name}")]
    assert examples
    for example in examples:
        assert call(*example[1:], "--help").status == 0
