"""The laws of the draws: E[M̃] is the family's weight, and how fast M̃ comes to it.

Seeds are fixed, so that each test is one sample of the statistics, checked within error bars.
"""

import math

import numpy as np
import pytest

import plsh
from plsh import FixedBlocks, IndependentCuts, PowerLawBinning, RandomBinning

POSITIONS = 96


def runs_of(family, sampler, samples, start, seeds, heads):
    """Labels of `seeds` times `heads` independent draws, ``(runs, s, POSITIONS)``."""
    return np.concatenate(
        [
            family.sample(
                samples,
                POSITIONS,
                start=start,
                seed=seed,
                sampler=sampler,
                head_ids=range(heads),
            ).labels()
            for seed in [*range(seeds - 2), (0, 1), (1 << 64) - 1]
        ]
    )


CASES = [
    # family, sampler, samples, seeds, heads, distances, those at which 5 % must show
    (RandomBinning(10.0), "iid", 16, 5, 240, (1, 3, 10, 25), 3),
    (RandomBinning(10.0), "stratified", 16, 5, 240, (1, 3, 10, 25), 3),
    (RandomBinning(10.0), "stratified", 5, 5, 400, (1, 3, 10, 25), 2),
    (RandomBinning(1.0), "iid", 16, 5, 240, (1, 2), 1),
    (RandomBinning(1.0), "stratified", 16, 5, 120, (1, 2), 1),
    (PowerLawBinning(2.0, 0.1), "iid", 4, 5, 100, (1, 2, 10, 40), 1),
    (PowerLawBinning(2.0, 0.1), "stratified", 16, 5, 40, (1, 2, 10, 40), 2),
    (PowerLawBinning(0.5, 0.5), "stratified", 16, 5, 40, (1, 2, 10, 40), 3),
    (IndependentCuts(10.0), None, 8, 5, 240, (1, 3, 10, 25), 3),
    (IndependentCuts(0.6), None, 8, 5, 240, (1, 2), 1),
]


@pytest.mark.parametrize("start", [0, 10**6])
@pytest.mark.parametrize(
    ("family", "sampler", "samples", "seeds", "heads", "distances", "powerful"),
    CASES,
    ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES],
)
def test_mean_mask_is_the_weight(
    family, sampler, samples, seeds, heads, distances, powerful, start
):
    """E[M̃_ij] = weight(|i - j|) at every pair, near position 0 and far from it."""
    labels = runs_of(family, sampler, samples, start, seeds, heads)
    runs = len(labels)
    for place, distance in enumerate(distances):
        weight = float(family.weight(distance))
        shared = labels[..., :-distance] == labels[..., distance:]
        by_pair = shared.mean(axis=1)  # (runs, POSITIONS - distance)
        for mean in (by_pair, by_pair.mean(axis=1, keepdims=True)):
            error = mean.std(axis=0, ddof=1) / math.sqrt(runs)
            z = (mean.mean(axis=0) - weight) / np.maximum(error, 1e-9)
            assert np.abs(z).max() < 5, (distance, np.abs(z).max())
        if place < powerful:  # of all positions together: a law that is 5 % off has |z| > 8
            assert 8 * error[0] < 0.05 * weight


@pytest.mark.parametrize("family", [RandomBinning(20.0), IndependentCuts(20.0)], ids=repr)
@pytest.mark.parametrize("start", [0, 10**6])
def test_every_pair_of_20000_draws_shares_a_block_as_often_as_alibi_weighs_it(family, start):
    """Section D, mask mean; across tile borders (63|64, 127|128) and to the last position."""
    draws, n = 20_000, 130
    sampler = "iid" if family.has_samplers else None
    shared = family.sample(draws, n, start=start, seed=3, sampler=sampler).mean_mask(0)
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    weight = np.exp(-distance / 20.0)
    error = np.sqrt(weight * (1 - weight) / draws)
    z = np.abs(shared - weight)[distance > 0] / error[distance > 0]
    assert z.max() < 5
    assert (np.diag(shared) == 1).all()


@pytest.mark.parametrize("width", [1.0, 2.5, 7.3, 64.0])
def test_fixed_blocks_have_their_weight_as_the_mean_over_positions(width):
    family, n = FixedBlocks(width), 50_000
    (labels,) = family.sample(1, n, start=123).labels()[0]
    for distance in (0, 1, 2, 5, 30, 63, 64):
        shared = (labels[: n - distance] == labels[distance:]).mean()
        assert abs(shared - float(family.weight(distance))) < 3 * width / n


def test_all_samples_of_fixed_blocks_are_one():
    labels = FixedBlocks(7.3).sample(6, 200, seed=4).labels()
    assert (labels == labels[:, :1]).all()
    assert (labels == FixedBlocks(7.3).sample(6, 200, seed=5).labels()).all()


def test_one_draw_of_a_stratified_set_is_biased_and_the_set_is_not():
    """The s draws together keep the law; the first, of the narrowest stratum, does not."""
    family, distance = RandomBinning(10.0), 10
    labels = runs_of(family, "stratified", 8, 0, 3, 300)
    shared = (labels[..., :-distance] == labels[..., distance:]).mean(axis=-1)  # (runs, s)
    weight = float(family.weight(distance))
    assert shared[:, 0].mean() < 0.2 * weight
    assert shared[:, -1].mean() > 1.5 * weight
    assert abs(shared.mean() - weight) < 0.05 * weight


def test_equal_labels_and_all_different_labels_are_stable():
    """U097: slope 0 is one block, a huge slope a block a token, the same at every repeat."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 70, 8)).astype(np.float32) for _ in range(3))
    for slope, labels in ((0.0, np.zeros(70)), (1e6, np.arange(70))):
        sigma = (1 / slope if slope else math.inf,) * 2
        assert (RandomBinning(sigma).sample(4, 70).labels() == labels).all()
        first, *others = (
            plsh.attention(q, k, v, slopes=[slope] * 2, method=plsh.PositionalLSH(4))
            for _ in range(3)
        )
        assert all((first == other).all() for other in others)
        if slope:
            np.testing.assert_allclose(first, v, rtol=1e-6)


@pytest.mark.parametrize(
    "family", [RandomBinning(30.0), PowerLawBinning(1.5, 0.1), IndependentCuts(30.0)], ids=repr
)
def test_blocks_of_a_length_are_a_prefix_of_those_of_a_longer_one(family):
    """U098: n up to 100,000, and the same integers again from the same seed."""
    whole = family.sample(2, 100_000, seed=(3, 1), head_ids=[7]).labels()
    for n in (0, 1, 1000, 65_536, 99_999):
        assert (family.sample(2, n, seed=(3, 1), head_ids=[7]).labels() == whole[..., :n]).all()
    assert (family.sample(2, 100_000, seed=(3, 1), head_ids=[7]).labels() == whole).all()


def test_layers_with_tuple_seeds_have_uncorrelated_masks_and_with_one_seed_equal_ones():
    family, distance, layers = RandomBinning(20.0), 14, 200
    masks = []
    for layer in range(layers):
        labels = family.sample(4, 400, seed=(11, layer)).labels()[0]
        masks.append((labels[:, :-distance] == labels[:, distance:]).mean(axis=1))  # (s,)
    shared = np.array(masks) - np.mean(masks)  # (layers, s)
    for a, b in (
        (shared[:-1], shared[1:]),
        (shared[::2], shared[1::2]),
        (shared[:100], shared[100:]),
    ):
        product = a.mean(axis=1) * b.mean(axis=1)
        assert abs(product.mean()) < 5 * product.std(ddof=1) / math.sqrt(len(product))
    assert family.sample(4, 400, seed=(11, 7)) == family.sample(4, 400, seed=(11, 7))
    assert family.sample(4, 400, seed=(11, 7)) != family.sample(4, 400, seed=(11, 8))


# --- how fast the error falls ---------------------------------------------------------------------

SIGMA, LENGTH = 32.0, 512
_DISTANCE = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH))
_WEIGHT = np.exp(-_DISTANCE / SIGMA)


def spectral_norm(matrix: np.ndarray) -> float:
    """Return that of a symmetric matrix, by power iteration: to a few percent, from below.

    Without BLAS, whose threads wait for each other on a busy machine.
    """
    x = np.cos(np.arange(len(matrix)) ** 2.0)
    for _ in range(40):
        x = np.einsum("ij,j->i", matrix, x / np.linalg.norm(x))
    return float(np.linalg.norm(x))


_NORM = spectral_norm(_WEIGHT)


def errors(samples: int, sampler: str, repeats: int, *, spectral: bool) -> np.ndarray:
    """Largest entry, and RMS entry or spectral norm over that of L*, of M̃ - L*: (repeats, 2)."""
    found = []
    for repeat in range(repeats):
        drawn = RandomBinning(SIGMA).sample(samples, LENGTH, sampler=sampler, seed=(9, repeat))
        error = drawn.mean_mask(0) - _WEIGHT
        second = spectral_norm(error) / _NORM if spectral else math.sqrt((error**2).mean())
        found.append((np.abs(error).max(), second))
    return np.array(found)


def log_rms(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logarithm of the RMS over repeats, and its standard error."""
    square = (x**2).mean(axis=0)
    return np.log(square) / 2, (x**2).std(axis=0, ddof=1) / square / math.sqrt(len(x)) / 2


def fitted_slope(sampler: str) -> tuple[np.ndarray, np.ndarray]:
    """Slope of log error against log s, for the largest and the RMS entry; its error."""
    counts = (8, 16, 32, 64, 128)
    x = np.log(counts) - np.log(counts).mean()
    y, error = zip(*(log_rms(errors(s, sampler, 12, spectral=False)) for s in counts), strict=True)
    scale = (x**2).sum()
    return x @ np.array(y) / scale, np.sqrt(x**2 @ np.array(error) ** 2) / scale


def test_iid_error_falls_as_the_root_of_the_samples():
    slope, error = fitted_slope("iid")
    assert (error < 0.04).all()
    # The RMS entry falls as s^-1/2 exactly; for the largest theory.md section 5.2 has -0.48.
    assert (np.abs(slope - [-0.48, -0.5]) < 3 * error).all()


def test_stratified_error_falls_faster():
    slope, error = fitted_slope("stratified")
    assert (slope + 3 * error < -0.5).all()


@pytest.mark.parametrize(
    ("samples", "factor"),
    [(16, (0.402 / 0.306, 0.229 / 0.120)), (64, (0.203 / 0.118, 0.100 / 0.039))],
)
def test_stratified_beats_iid_by_the_measured_factor(samples, factor):
    """theory.md section 5.1: largest entry and spectral error, each of its numbers ± 20 %."""
    iid, error_iid = log_rms(errors(samples, "iid", 14, spectral=True))
    stratified, error_stratified = log_rms(errors(samples, "stratified", 14, spectral=True))
    gain, error = iid - stratified, np.hypot(error_iid, error_stratified)
    assert (gain - 3 * error > 0).all()
    table = math.hypot(math.log(1.2), math.log(1.2))
    assert (np.abs(gain - np.log(factor)) < table + 2 * error).all()
