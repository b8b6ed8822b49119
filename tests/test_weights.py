"""StepWeight: a recipe evaluated on demand; its label cache is bounded and thread-safe."""

import dataclasses
import math
import pickle
import sys
import threading
import time

import numpy as np
import pytest

import plsh
from plsh import weights
from plsh.methods import resolve
from plsh.weights import UNLIMITED, DecayWeight, StepWeight, TableWeight, block_range


def recipe(heads=4, samples=16, seed: object = 0, family=None, sampler=None) -> StepWeight:
    family = plsh.RandomBinning(1 / plsh.alibi_slopes(heads)) if family is None else family
    return StepWeight(family, samples, sampler, seed, tuple(range(heads)))


def dense_step(labels):
    return (labels[..., :, None] == labels[..., None, :]).mean(axis=-3)


# --- the recipe -----------------------------------------------------------------------------------


def test_labels_are_those_of_the_family():
    for sampler in ("iid", "stratified", None):
        weight = recipe(sampler=sampler, seed=(2, 3))
        drawn = weight.family.sample(16, 300, start=50, seed=(2, 3), sampler=sampler)
        assert (weight.labels(50, 350) == drawn.labels()).all()


@pytest.mark.parametrize("family", [None, plsh.IndependentCuts((3.0, 9.0, 30.0, 2.0))])
def test_labels_of_one_head_are_its_row(family):
    whole = recipe(family=family, seed=6).labels(900, 950)
    for head in range(4):
        assert (recipe(family=family, seed=6).labels(900, 950, head) == whole[head]).all()


def test_labels_are_read_only():
    """They are shared by all who ask: nobody may change them."""
    for labels in (recipe().labels(0, 40), recipe().labels(0, 40, 2)):
        with pytest.raises(ValueError, match="read-only"):
            labels[..., 0] = 1


def test_labels_of_padding_are_those_of_position_0():
    labels = recipe().labels(-5, 20)
    assert not labels[..., :6].any()
    assert (labels[..., 5:] == recipe().labels(0, 20)).all()


@pytest.mark.parametrize(
    "family", [None, plsh.PowerLawBinning(1.5, 0.2), plsh.IndependentCuts(9.0), plsh.FixedBlocks(5)]
)
def test_bounds_and_bandwidths_agree_with_labels(family):
    weight, at = recipe(2, 6, 1, family), np.array([0, 17, 300, 2999])
    labels = weight.labels(0, 3000)
    first, end = weight.bounds(at)
    assert (first == labels[..., at]).all()
    assert (end > at).all()
    longest = (np.arange(3000) - labels).max(axis=(1, 2))
    assert (longest <= np.array(weight.bandwidths)).all()
    assert all(type(width) is int for width in weight.bandwidths)


def test_families_of_equal_widths_say_their_integers():
    """Blocks begin where they say, equal to the labels; others say None."""
    weight, at = recipe(2, 5, 3, plsh.RandomBinning((4.0, 9.0))), np.arange(50)
    width, shift = weight.bins
    assert width.dtype == shift.dtype == np.int64
    block = (at * (1 << 24) - shift[..., None]) // width[..., None]
    np.testing.assert_array_equal(np.diff(block) != 0, np.diff(weight.labels(0, 50)) != 0)
    assert recipe(2, 5, 3, plsh.IndependentCuts(4.0)).bins is None


def test_pivot_lemma_counts_shared_blocks():
    """For j <= p <= i the count is the number of samples whose block of p holds both."""
    weight, pivot = recipe(2, 8, 4, plsh.RandomBinning(20.0)), 60
    shared = dense_step(weight.labels(0, 120)) * 8
    first, end = (x[..., 0] for x in weight.bounds([pivot]))  # (heads, s)
    i, j = np.arange(pivot, 120), np.arange(pivot + 1)
    inside_i = (i[:, None] < end[:, None, :]).astype(int)  # (heads, i, s)
    inside_j = (j[:, None] >= first[:, None, :]).astype(int)
    assert (inside_i @ inside_j.swapaxes(1, 2) == shared[:, pivot:, : pivot + 1]).all()


def test_weights_are_values():
    for weight in (recipe(seed=(1, 2)), DecayWeight((3, UNLIMITED)), TableWeight(4, 0, 9, (3, 4))):
        other = pickle.loads(pickle.dumps(weight))
        assert other == weight
        assert hash(other) == hash(weight)
        with pytest.raises(AttributeError):
            setattr(weight, dataclasses.fields(weight)[0].name, ())
    assert recipe(seed=1) != recipe(seed=2)
    labels = recipe(seed=7).labels(0, 30)
    assert (pickle.loads(pickle.dumps(recipe(seed=7))).labels(0, 30) == labels).all()


def test_block_range_of_each_kind():
    assert block_range(DecayWeight((1,))) is None
    assert block_range(recipe()) == (0, 1 << 30)
    assert block_range(TableWeight(1, 5, 9, (0,))) == (5, 9)


def test_slopes_are_rounded_to_float32_first():
    """Whatever dtype the slopes came in, the same blocks are drawn."""
    for slope in (0.1, 1 / 3, 2.0**-8, 1e-40):
        single = float(np.float32(slope))
        method = plsh.PositionalLSH(4)
        weights_ = [resolve(method, (m,), (), 1).weight for m in (slope, single)]
        assert weights_[0] == weights_[1]
        assert weights_[0].family.sigma == (1.0 / single,)
    assert resolve(plsh.PositionalLSH(4), (0.0,), (), 1).weight.family.sigma == (math.inf,)


def test_layers_with_tuple_seeds_draw_independent_blocks():
    """One pair of positions: the number of layers of 3,000 that agree with the next is binomial."""
    sigma, layers = 30.0, 3000
    family = plsh.RandomBinning(sigma)
    at = np.array([100, 120])
    shares = []
    for layer in range(layers):
        first, _ = recipe(1, 1, (5, layer), family, "iid").bounds(at)
        shares.append(first[0, 0, 0] == first[0, 0, 1])
    share = np.array(shares, dtype=float)
    p = math.exp(-20 / sigma)
    assert abs(share.mean() - p) < 5 * math.sqrt(p * (1 - p) / layers)
    for lag in (1, 2, 12):
        correlation = ((share[lag:] - p) * (share[:-lag] - p)).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(layers - lag)
    again, _ = recipe(1, 1, (5, 7), family, "iid").bounds(at)
    assert (again[0, 0, 0] == again[0, 0, 1]) == shares[7]


# --- the cache ------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch) -> weights._LabelCache:
    small = weights._LabelCache(max_bytes=100_000)
    monkeypatch.setattr(weights, "_LABELS", small)
    return small


def held_bytes(cache) -> int:
    return sum(cache._cost(labels) for labels in cache._held.values())


def test_equal_recipes_share_cached_labels(cache):
    assert recipe(seed=3).labels(0, 50) is recipe(seed=3).labels(0, 50)
    assert recipe(seed=3).labels(0, 50) is not recipe(seed=4).labels(0, 50)


def test_cache_keeps_what_was_used_last_within_its_bytes(cache):
    kept = recipe(seed=0).labels(0, 50)  # 4 heads, 16 samples: 12,800 bytes
    for seed in range(1, 30):
        recipe(seed=seed).labels(0, 50)
        assert recipe(seed=0).labels(0, 50) is kept
        assert held_bytes(cache) == cache._bytes <= 100_000
    assert recipe(seed=29) in {key[0] for key in cache._held}
    assert recipe(seed=1) not in {key[0] for key in cache._held}


def test_labels_larger_than_the_cache_are_computed_and_not_kept(cache):
    labels = recipe().labels(0, 5000)
    assert labels.nbytes > 100_000
    assert not cache._held
    assert (labels[..., 100:110] == recipe().labels(100, 110)).all()


def test_cache_is_bounded_for_tiny_and_empty_ranges(cache):
    """A decoding step asks for one position: what an entry itself takes must count as well."""
    weight = recipe(1, 1)
    for position in range(3000):
        weight.labels(position, position + 1)
        weight.labels(position, position)
    real = sum(sys.getsizeof(x) + sys.getsizeof(key) for key, x in cache._held.items())
    assert 20_000 < real <= 100_000


def test_threads_that_hammer_the_cache_get_equal_labels(cache):
    jobs = [(seed, start) for seed in range(6) for start in (0, 30, 1000)]
    expected = {
        job: plsh.RandomBinning(1 / plsh.alibi_slopes(4))
        .sample(16, 80, start=job[1], seed=job[0])
        .labels()
        for job in jobs
    }
    wrong: list[object] = []
    ready = threading.Barrier(8)

    def work(number: int) -> None:
        ready.wait()
        rng = np.random.default_rng(number)
        for i in rng.integers(0, len(jobs), 120):
            seed, start = jobs[i]
            try:
                labels = recipe(seed=seed).labels(start, start + 80)
                if not (labels == expected[jobs[i]]).all() or cache._bytes > 100_000 + 21_000:
                    wrong.append(jobs[i])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert held_bytes(cache) == cache._bytes <= 100_000


def test_shipped_cache_holds_64_mib():
    assert weights._LABELS._max_bytes == 1 << 26


# --- cost -----------------------------------------------------------------------------------------


def best_of_3(call) -> float:
    """Seconds of this thread, the best of three: what the code needs, however busy the machine."""
    times = []
    for attempt in range(3):
        begin = time.thread_time()
        call(attempt)
        times.append(time.thread_time() - begin)
    return min(times)


def test_labels_cost_the_range_and_not_the_position():
    far = 1 << 29
    assert best_of_3(lambda i: recipe(8, 16, i).labels(far, far + 10)) < 0.05
    assert best_of_3(lambda i: recipe(8, 16, i).bounds([far])) < 0.05


def test_labels_of_a_partition_set_are_a_view():
    ps = plsh.RandomBinning(9.0).sample(4, 100_000)
    part = ps.labels(50_000, 50_010)
    assert part.base is not None
    assert np.shares_memory(part, ps.labels())
    assert best_of_3(lambda _: [ps.labels(i, i + 10) for i in range(1000)]) < 0.05
