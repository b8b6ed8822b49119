"""Hashing: from a seed to integers, and those integers as a backend uses them.

The golden vectors say which blocks there are; a backend's outputs say which ones it saw.
"""

import math
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plsh
from plsh import testing
from plsh.conformance import vectors
from plsh.conformance.suite.methods import DTYPES, check_counts, seen_weight
from plsh.hashing import Cuts, fold_seed, shift_count, words
from plsh.weights import StepWeight

LAST = 2**64 - 1
UNIT = 2**24
LIMIT = 2**30
ONE_BLOCK = None
"""How the golden vectors store the width of one block over everything."""

FAMILIES = {
    "RandomBinning": plsh.RandomBinning((1.5, 24.0)),
    "RandomBinning-wide": plsh.RandomBinning((math.inf, 3e5)),
    "PowerLawBinning": plsh.PowerLawBinning((0.5, 2.0), 0.25),
    "IndependentCuts": plsh.IndependentCuts((2.0, 40.0)),
    "FixedBlocks": plsh.FixedBlocks((3.7, 1.0)),
}
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

GOLDEN = [
    pytest.param(case, id=f"{name}-{i}")
    for name in ("random_binning", "power_law_binning", "fixed_blocks", "independent_cuts")
    for i, case in enumerate(vectors.load(name))
]


def method_of(case):
    """The method, and the slopes of the call, that a golden draw stands for."""
    parameters = {name: [float(x) for x in row] for name, row in case["parameters"].items()}
    seed = tuple(case["seed"]) if isinstance(case["seed"], list) else case["seed"]
    draw = {"sampler": case["sampler"], "seed": seed, "head_ids": case["head_ids"]}
    slopes = parameters.pop("slope", None)
    if slopes is not None and case["family"] == "RandomBinning":
        return plsh.PositionalLSH(case["samples"], **draw), slopes
    if slopes is not None:
        single = np.float32(slopes).tolist()
        parameters["sigma"] = [1 / m if m else math.inf for m in single]
    family = getattr(plsh, case["family"])(**parameters)
    return plsh.PositionalLSH(case["samples"], family=family, **draw), None


def hash_of(case):
    """The integers of a golden draw, as the core draws them."""
    method, slopes = method_of(case)
    family = method.family
    if family is None:
        single = [float(np.float32(m)) for m in slopes]
        family = plsh.RandomBinning([1 / m if m else math.inf for m in single])
    return family.hash(method.samples, method.sampler, method.seed, method.head_ids)


# --- words ----------------------------------------------------------------------------------------


def philox(key, index, counter=(0, 0, 0, 0)):
    """Word number `index`, in Python integers: ten rounds on the counter, one block on."""
    count = sum(c << 64 * i for i, c in enumerate(counter)) + 1 + index // 4
    c0, c1, c2, c3 = ((count >> 64 * i) & LAST for i in range(4))
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & LAST, (left >> 64) ^ c3 ^ k1, left & LAST
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & LAST, (k1 + 0xBB67AE8584CAA73B) & LAST
    return (c0, c1, c2, c3)[index % 4]


def fold(seed):
    """Fold a sequence of seeds from the left."""
    folded, *rest = seed
    for part in rest:
        folded = philox((folded, part), 0, (0, 0, 0, 2))
    return folded


@pytest.mark.requirement("HSH-1", "CNF-4")
def test_words_are_those_of_philox():
    stored = vectors.load("words")["words"]
    for case in stored:
        made = [philox(case["key"], i, case["counter"]) for i in range(len(case["words"]))]
        assert made == case["words"]
        if case["counter"][1] == 0:
            upper = [case["counter"][i] for i in (0, 2, 3)]
            drawn = words(tuple(case["key"]), len(made), tuple(upper))
            assert drawn.tolist() == made
    by_place = {(*case["key"], *case["counter"]): case["words"] for case in stored}
    assert by_place[0, 0, 0, 0, 0, 0][:2] == [213000021201967259, 4455796210202625458]
    assert by_place[0, 1, 0, 0, 0, 0][0] == 0xD037F8C3F9A1D176


@pytest.mark.requirement("HSH-2", "CNF-4")
def test_sequences_of_seeds_are_folded_from_the_left():
    stored = [(case["seed"], case["folded"]) for case in vectors.load("words")["seeds"]]
    stored += [([7], 7), ([1, 2], 8522060295706411025), ([1, 2, 3], 16204543582589677873)]
    for seed, folded in stored:
        assert fold(seed) == fold_seed(tuple(seed)) == folded
        draws = [plsh.RandomBinning(9.0).sample(4, 60, seed=s) for s in (tuple(seed), folded)]
        assert draws[0] == draws[1]


@pytest.mark.requirement("HSH-2", "HSH-9", "CNV-4")
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"seed": -1}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"seed": ()}, ValueError),
        ({"seed": (0, -1)}, ValueError),
        ({"seed": 0.5}, TypeError),
        ({"seed": (0, "1")}, TypeError),
        ({"seed": None}, TypeError),
        ({"head_ids": [2**64]}, ValueError),
        ({"head_ids": [0.0]}, TypeError),
        ({"head_ids": 0}, TypeError),
        ({"head_ids": [0, 1]}, ValueError),
        ({"samples": 0}, ValueError),
        ({"samples": 2.0}, TypeError),
        ({"n": -1}, ValueError),
        ({"n": 4.0}, TypeError),
        ({"start": -1}, ValueError),
        ({"start": LIMIT - 3}, ValueError),
        ({"start": 0.0}, TypeError),
        ({"sampler": "sobol"}, ValueError),
    ],
    ids=repr,
)
def test_arguments_of_a_draw_are_checked(wrong, error):
    family = plsh.RandomBinning((1.0,))
    given_ = {"samples": 2, "n": 4, **wrong}
    with pytest.raises(error):
        family.sample(given_.pop("samples"), given_.pop("n"), **given_)


@pytest.mark.requirement("HSH-2")
def test_heads_and_seeds_draw_their_own_blocks():
    for family in (plsh.RandomBinning(20.0), plsh.PowerLawBinning(3.0, 0.02)):
        rows = [
            row.tobytes()
            for seed in (0, 1, (0, 0), (0, 1), (1, 0), (0, 0, 0), LAST)
            for head in family.sample(4, 400, seed=seed, head_ids=[0, 1, LAST]).labels()
            for row in head
        ]
        assert len(set(rows)) == len(rows)
    twice = plsh.RandomBinning(9.0).sample(3, 200, head_ids=[4, 7, 4]).labels()
    assert (twice[0] == twice[2]).all()
    assert (twice[0] != twice[1]).any()


# --- samplers, widths and shifts ------------------------------------------------------------------


@pytest.mark.requirement("HSH-3", "CNF-4")
def test_counts_of_shifts_are_the_largest_divisors_that_fit():
    stored = {int(s): n for s, n in vectors.load("words")["shift_counts"].items()}
    for samples, count in stored.items():
        fits = [n for n in range(1, samples + 1) if samples % n == 0 and samples // n >= 5]
        expected = max((n for n in fits if 100 * n * n <= 81 * samples), default=1)
        assert shift_count(samples) == count == expected


@pytest.mark.requirement("HSH-3")
def test_samplers_are_named_and_width_families_are_stratified_by_default():
    for family in (plsh.RandomBinning(9.0), plsh.PowerLawBinning(1.0, 0.2)):
        named = family.sample(16, 300, seed=4, sampler="stratified")
        assert family.sample(16, 300, seed=4) == named
        assert family.sample(16, 300, seed=4, sampler="iid") != named
    for family in (plsh.FixedBlocks(3.0), plsh.IndependentCuts(3.0)):
        family.sample(2, 10, sampler=None)
        for name in ("iid", "stratified"):
            with pytest.raises(ValueError, match="sampler"):
                family.sample(2, 10, sampler=name)
            with pytest.raises(ValueError, match="sampler"):
                plsh.PositionalLSH(sampler=name, family=family)
    for family in FAMILIES.values():
        with pytest.raises(ValueError, match="sampler"):
            family.sample(2, 10, sampler="sobol", head_ids=[0, 1])


@pytest.mark.requirement("HSH-3", "HSH-4", "HSH-5", "HSH-6", "HSH-7", "HSH-8", "CNF-4", "NUM-13")
@pytest.mark.parametrize("case", GOLDEN)
def test_integers_of_a_draw_are_the_golden_ones(case):
    """Widths, shifts and thresholds in fixed point; labels near position 0 and far from it."""
    drawn = hash_of(case)
    if isinstance(drawn, Cuts):
        assert list(drawn.threshold) == case["threshold"]
    else:
        stored = [[2**62 if w is ONE_BLOCK else w for w in row] for row in case["width"]]
        assert drawn.width.tolist() == stored
        assert drawn.shift.tolist() == case["shift"]
    for part in case["labels"]:
        start, stop = part["start"], part["start"] + len(part["labels"][0][0])
        labels = drawn.labels(start, stop)
        assert labels.dtype == np.int32
        assert labels.tolist() == part["labels"]


def levels(seed, head, samples, sampler):
    """Levels p and shift fractions t of a stream, exact."""
    count = shift_count(samples) if sampler == "stratified" else 1
    drawn = samples // count
    strata = drawn if sampler == "stratified" else 1
    unit = [
        Fraction(2 * (philox((fold(seed), head), i) >> 12) + 1, 2**53) for i in range(2 * drawn)
    ]
    return [
        ((g % strata + unit[2 * g]) / strata, (j + unit[2 * g + 1]) / count)
        for g in range(drawn)
        for j in range(count)
    ]


def below(family, half_units):
    """P(width < half_units / 2^25 tokens), to some 60 digits."""
    w = Decimal(half_units) / (2 * UNIT)
    if isinstance(family, plsh.RandomBinning):
        x = w / Decimal(family.sigma)
        return 1 - (1 + x) * (-x).exp()
    a, y = 1 + Decimal(family.r1), Decimal(family.r2) * w
    return 1 - (1 + a * y) * (-a * (1 + y).ln()).exp()


@pytest.mark.requirement("HSH-4", "HSH-5", "HSH-6", "HSH-3")
@pytest.mark.parametrize(
    "family",
    [
        plsh.RandomBinning(0.7),
        plsh.RandomBinning(256.0),
        plsh.RandomBinning(2.0**20),
        plsh.RandomBinning(1e9),
        plsh.PowerLawBinning(0.5, 1e-3),
        plsh.PowerLawBinning(3.0, 0.1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("sampler", ["iid", "stratified"])
def test_widths_are_correctly_rounded_and_shifts_exact(family, sampler, subject):
    """P(W - 1/2) < p < P(W + 1/2) in 60 digits; at a clamp one side alone."""
    samples = 200 if subject.full else 20
    seed, head = (3, 14), 7
    drawn = family.hash(samples, sampler, seed, (head,))
    pairs = zip(drawn.width[0].tolist(), drawn.shift[0].tolist(), strict=True)
    with localcontext(Context(prec=60)):
        for (width, shift), (p, t) in zip(pairs, levels(seed, head, samples, sampler), strict=True):
            level = Decimal(p.numerator) / p.denominator
            assert UNIT <= width <= LIMIT * UNIT
            assert width == UNIT or below(family, 2 * width - 1) < level
            assert width == LIMIT * UNIT or level < below(family, 2 * width + 1)
            assert shift == t.numerator * width // t.denominator


@pytest.mark.requirement("HSH-4", "HSH-10")
@settings(max_examples=25)
@given(
    st.integers(UNIT, LIMIT * UNIT) | st.integers(UNIT, 40 * UNIT),
    st.integers(0, 2**53 - 1),
    st.integers(0, LIMIT - 40) | st.integers(0, 50),
)
def test_labels_are_the_exact_first_positions_of_blocks(width, fraction, start):
    """In Python integers: block floor((p 2^24 - S) / W) begins at ceil((b W + S) / 2^24)."""
    shift = width * fraction >> 53
    drawn = plsh.hashing.Bins(np.array([[width]]), np.array([[shift]]))
    blocks = [(p * UNIT - shift) // width for p in range(start, start + 40)]
    expected = [max(0, -(-(b * width + shift) // UNIT)) for b in blocks]
    labels = drawn.labels(start, start + 40)[0, 0]
    assert labels.tolist() == expected
    shared = np.equal.outer(labels, labels)
    assert (shared == np.equal.outer(blocks, blocks)).all() or 0 in expected
    assert (np.arange(start, start + 40) - labels <= drawn.bandwidth()[0]).all()
    assert drawn.bandwidth() == (-(-width // UNIT) - 1,)


@pytest.mark.requirement("HSH-7")
def test_fixed_widths_round_half_to_even_and_are_clamped():
    half = 2.0**-25
    widths = [1 + half, 1 + 3 * half, 2 + 5 * half, 7.3, 0.1, 2.0**30, 1e300]
    expected = [UNIT, UNIT + 2, 2 * UNIT + 2, round(Fraction(7.3) * UNIT), UNIT, 2**54, 2**54]
    drawn = plsh.FixedBlocks(widths).hash(3, None, 5, tuple(range(7)))
    for sample in range(3):
        assert drawn.width[:, sample].tolist() == expected
    assert not drawn.shift.any()
    other = plsh.FixedBlocks(2.5).sample(2, 30, seed=9, head_ids=[3])
    assert other == plsh.FixedBlocks(2.5).sample(2, 30)


@pytest.mark.requirement("HSH-8", "HSH-1", "HSH-2")
@pytest.mark.parametrize("sigma", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("start", [0, 1000])
def test_cuts_fall_where_a_word_is_below_the_threshold(sigma, start):
    seed, head, samples, n = (3, 1), 11, 3, 24
    with localcontext(Context(prec=60)):
        chance = (1 - (-1 / Decimal(sigma)).exp()) * 2**53
        threshold = int(chance.to_integral_value())
    labels = plsh.IndependentCuts(sigma).sample(samples, n, start=start, seed=seed, head_ids=[head])
    key = fold(seed), head
    for r in range(samples):
        expected = []
        for p in range(start, start + n):
            while p and philox(key, p, (0, 0, r, 1)) >> 11 >= threshold:
                p -= 1
            expected.append(p)
        assert labels.labels()[0, r].tolist() == expected


@pytest.mark.requirement("HSH-5", "HSH-8", "HSH-10")
def test_an_infinite_length_is_one_block():
    for family in (plsh.RandomBinning(math.inf), plsh.IndependentCuts(math.inf)):
        for seed in (0, LAST):
            drawn = family.hash(4, None, seed, (0,))
            assert not drawn.labels(LIMIT - 5, LIMIT).any()
            assert drawn.bandwidth() == (LIMIT - 1,)


# --- one function of position ---------------------------------------------------------------------


@pytest.mark.requirement("HSH-9", "PAR-3")
@families
@settings(max_examples=8)
@given(
    st.sampled_from([0, 5000, 10**6, LIMIT - 200]),
    st.integers(0, 200),
    st.integers(0, 200),
    st.integers(0, LAST) | st.tuples(st.integers(0, LAST), st.integers(0, 9)),
)
def test_labels_depend_neither_on_the_range_nor_on_other_heads(family, base, one, other, seed):
    first, last = sorted((one, other))
    whole = family.sample(3, 200, start=base, seed=seed, head_ids=[0, 1]).labels()
    part = family.sample(3, last - first, start=base + first, seed=seed, head_ids=[0, 1])
    assert (part.labels() == whole[..., first:last]).all()
    assert part.labels().dtype == np.int32
    alone = type(family)(*(p[1] if isinstance(p, tuple) else p for p in _parameters(family)))
    assert (alone.sample(3, 200, start=base, seed=seed, head_ids=[1]).labels() == whole[1:]).all()
    checked = plsh.PartitionSet(part.labels(), base + first)
    assert checked == part


def _parameters(family):
    return [getattr(family, name) for name in family.__dataclass_fields__]


@pytest.mark.requirement("HSH-9")
def test_default_head_ids_count_from_0():
    for family, heads in ((plsh.RandomBinning(3.0), 1), (plsh.RandomBinning((3.0, 5.0)), 2)):
        drawn = family.sample(2, 50)
        assert drawn.heads == heads
        assert drawn == family.sample(2, 50, start=0, seed=0, head_ids=range(heads))
    end = plsh.RandomBinning(3.0).sample(2, 0, start=LIMIT)
    assert end.labels().shape == (1, 2, 0)


@pytest.mark.requirement("HSH-10", "BCK-13")
@families
def test_bandwidth_is_the_longest_distance_inside_a_block(family):
    sampler = "iid" if family.has_samplers else None
    weight = StepWeight(family, 6, sampler, 2, (0, 1))
    drawn = family.hash(6, sampler, 2, (0, 1))
    if isinstance(drawn, Cuts):
        assert weight.bandwidths == (LIMIT - 1,) * 2
        return
    longest = np.minimum(-(-drawn.width // UNIT), LIMIT).max(axis=1)
    assert weight.bandwidths == tuple(int(w) - 1 for w in longest)
    labels = drawn.labels(0, 4000)
    reached = (np.arange(4000) - labels).max(axis=(1, 2))
    for h, bound in enumerate(weight.bandwidths):
        assert reached[h] <= bound
        assert reached[h] == bound or bound > 100


# --- families -------------------------------------------------------------------------------------


@pytest.mark.requirement("HSH-11", "HSH-5", "HSH-6", "HSH-7", "HSH-8")
def test_weights_are_the_laws_of_the_families():
    d = np.array([[0, 1, 3], [-3, 40, 10**9]])
    a = np.abs(d)
    for family, expected in (
        (plsh.RandomBinning(8.0), np.exp(-a / 8)),
        (plsh.RandomBinning(math.inf), np.ones(a.shape)),
        (plsh.IndependentCuts(8.0), np.exp(-a / 8)),
        (plsh.PowerLawBinning(1.5, 0.25), (1 + 0.25 * a) ** -1.5),
        (plsh.FixedBlocks(10.0), np.maximum(0, 1 - a / 10)),
        (plsh.RandomBinning((8.0, 2.0)), np.stack([np.exp(-a / 8), np.exp(-a / 2)])),
        (
            plsh.PowerLawBinning(1.0, (0.5, 2.0)),
            np.stack([1 / (1 + 0.5 * a), 1 / (1 + 2.0 * a)]),
        ),
    ):
        weight = family.weight(d)
        assert weight.dtype == np.float64
        assert weight.shape == expected.shape
        np.testing.assert_allclose(weight, expected, rtol=1e-14, atol=0)
    assert plsh.RandomBinning((8.0, 2.0)).weight(3).shape == (2,)
    assert plsh.RandomBinning(8.0).weight(3).shape == ()


@pytest.mark.requirement("HSH-5", "HSH-6", "HSH-8", "HSH-3")
@pytest.mark.parametrize(
    "family",
    [plsh.RandomBinning(6.0), plsh.PowerLawBinning(1.5, 0.2), plsh.IndependentCuts(6.0)],
    ids=repr,
)
def test_the_mean_mask_of_many_draws_is_the_weight(family, subject):
    """Within five standard errors of independent draws, at every distance to 30."""
    heads = 1000 if subject.full else 60
    sampler = "iid" if family.has_samplers else None
    labels = family.sample(20, 31, start=777, seed=6, sampler=sampler, head_ids=range(heads))
    shared = labels.labels() == labels.labels()[..., :1]
    expected = family.weight(np.arange(31))
    error = np.sqrt(expected * (1 - expected) / (20 * heads))
    assert (np.abs(shared.mean(axis=(0, 1)) - expected) <= 5 * error + 1e-12).all()


@pytest.mark.requirement("HSH-11", "CNV-4")
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (math.nan, ValueError),
        ([0.0, 1.0], ValueError),
        ("3", TypeError),
        (None, TypeError),
        (True, TypeError),
        (1j, TypeError),
        ([True], TypeError),
    ],
)
def test_parameters_of_a_family_are_checked(value, error):
    for make in (
        plsh.RandomBinning,
        plsh.IndependentCuts,
        plsh.FixedBlocks,
        lambda x: plsh.PowerLawBinning(x, 1.0),
        lambda x: plsh.PowerLawBinning(1.0, x),
    ):
        with pytest.raises(error):
            make(value)


@pytest.mark.requirement("HSH-11", "HSH-5", "HSH-6", "HSH-7")
def test_finite_parameters_must_be_finite_and_lengths_agree():
    for make in (
        lambda: plsh.PowerLawBinning(math.inf, 1.0),
        lambda: plsh.PowerLawBinning(1.0, math.inf),
        lambda: plsh.FixedBlocks(math.inf),
        lambda: plsh.PowerLawBinning((1.0, 2.0), (1.0, 2.0, 3.0)),
        lambda: plsh.RandomBinning([[1.0, 2.0]]),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 — the messages differ
            make()
    assert plsh.RandomBinning(np.float32(0.1)).sigma == float(np.float32(0.1))
    assert plsh.RandomBinning(np.array(3)).sigma == 3.0


# --- as a backend sees them -----------------------------------------------------------------------


@pytest.mark.requirement("HSH-4", "HSH-3", "HSH-9", "NUM-13", "CNF-4", "MTH-3")
@pytest.mark.needs("method:lsh")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", [c for c in GOLDEN if len(c.values[0]["labels"]) > 2 or "16" in c.id]
)
def test_a_backend_sees_the_golden_blocks(case, dtype, subject):
    """U098: near position 0 and up to the last one, in every dtype."""
    method, slopes = method_of(case)
    for part in case["labels"]:
        labels, start = part["labels"], part["start"]
        if not labels[0][0]:
            continue
        places = {"q_offset": start, "k_offset": start}
        check_counts(subject, dtype, labels, labels, method=method, slopes=slopes, **places)


@pytest.mark.requirement("HSH-9", "CNV-1", "NUM-13")
@pytest.mark.needs("method:lsh")
@families
def test_a_backend_sees_one_sequence_of_blocks_at_every_length(family, subject):
    """U098: from a chunk, a longer call and one with more queries."""
    dtype = subject.capabilities.dtypes[-1]
    method = plsh.PositionalLSH(5, sampler=None, seed=2, family=family)
    seen = [
        seen_weight(subject, dtype, 2, lengths, q_offset=q_at, k_offset=k_at, method=method)
        for q_at, k_at, lengths in ((0, 0, (40, 40)), (9, 0, (31, 40)), (20, 13, (3, 22)))
    ]
    whole = np.rint(5 * seen[0])
    assert np.rint(5 * seen[1]).tolist() == whole[:, 9:].tolist()
    assert np.rint(5 * seen[2]).tolist() == whole[:, 20:23, 13:35].tolist()


@pytest.mark.requirement("HSH-2", "HSH-3", "ATT-24")
@pytest.mark.needs("method:lsh")
@pytest.mark.parametrize("seed", [1, (0, 0), (1, 0), (0, 1), LAST])
@pytest.mark.parametrize("sampler", ["iid", "stratified"])
def test_a_backend_draws_by_seed_and_sampler(seed, sampler, subject):
    family = plsh.RandomBinning((9.0, 9.0))
    labels = family.sample(10, 24, seed=seed, sampler=sampler).labels()
    assert (labels != family.sample(10, 24, sampler="iid").labels()).any()
    method = plsh.PositionalLSH(10, sampler=sampler, seed=seed, family=family)
    check_counts(subject, subject.capabilities.dtypes[-1], labels, labels, method=method)


# --- golden outputs -------------------------------------------------------------------------------


def _parsed(x):
    """Numbers of a stored array; infinities are stored as strings."""
    return [_parsed(y) for y in x] if isinstance(x, list) else float(x)


def _attention_cases():
    for i, case in enumerate(vectors.load("attention")):
        name = case["method"]["method"]
        yield pytest.param(case, id=f"{name}-{i}", marks=pytest.mark.needs(f"method:{name}"))


ATTENTION = list(_attention_cases())


def golden_call(case, subject, dtype):
    """Arrays and keywords of a stored call, its yardsticks and cotangents."""
    stored = {
        name: np.array(_parsed(case[name]))
        for name in ("q", "k", "v", "out", "lse", "grad_out", "grad_lse", "grad_q", "grad_k",
                     "grad_v", "grad_slopes")
        if case[name] is not None
    }  # fmt: skip
    how, options = case["method"], dict(case["options"])
    ids = None if case["segment_ids"] is None else np.array(case["segment_ids"])
    keywords = dict(options)
    if how["method"] == "lsh":
        family = getattr(plsh, how["family"])(*how["parameters"])
        seed = tuple(how["seed"]) if isinstance(how["seed"], list) else how["seed"]
        keywords["method"] = plsh.PositionalLSH(
            how["samples"], sampler=how["sampler"], seed=seed, family=family
        )
        drawn = family.sample(
            how["samples"], 1020, seed=seed, sampler=how["sampler"], head_ids=[0, 1]
        )
        labels = [
            drawn.labels(at, at + stored[x].shape[2])
            for at, x in ((options["q_offset"], "q"), (options["k_offset"], "k"))
        ]
        weight = {"weight": testing.step_weight(*labels)[None]}
    else:
        weight = {"slopes": how["slopes"]}
        keywords["method"] = plsh.Exact()
        keywords["slopes"] = subject.array(how["slopes"], _wide(dtype))
        if how["method"] == "window":
            weight["widths"] = [how["width"]] * 2
            keywords["method"] = plsh.Window(how["width"])
    plain = testing.plain_attention(
        *(stored[x] for x in "qkv"),
        dtype=dtype,
        **weight,
        **options,
        segment_ids=ids,
        grad_out=stored["grad_out"],
        grad_lse=stored["grad_lse"],
    )
    by = [stored.get(f"grad_{x}") for x in ("q", "k", "v", "slopes")]
    expected = testing.OracleResult(stored["out"], stored["lse"], *by)
    keywords["segment_ids"] = None if ids is None else subject.array(ids, "int32")
    inputs = [subject.array(stored[x], dtype) for x in "qkv"]
    cotangents = (
        subject.array(stored["grad_out"], dtype),
        subject.array(stored["grad_lse"], _wide(dtype)),
    )
    return inputs, keywords, expected, plain, cotangents


def _wide(dtype):
    return "float64" if dtype == "float64" else "float32"


@pytest.mark.requirement("CNF-4", "ATT-1", "NUM-7")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ATTENTION)
def test_outputs_are_the_golden_ones(case, dtype, subject):
    inputs, keywords, expected, plain, _ = golden_call(case, subject, dtype)
    output = subject.attention(*inputs, return_lse=True, **keywords)
    subject.record(*testing.assert_output_close(output, expected, plain, like=inputs[0]))


@pytest.mark.requirement("CNF-4", "NUM-8", "NUM-9", "NUM-10", "ATT-26")
@pytest.mark.needs("gradients")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ATTENTION)
def test_gradients_are_the_golden_ones(case, dtype, subject):
    inputs, keywords, expected, plain, cotangents = golden_call(case, subject, dtype)
    _, grads = subject.gradients(*inputs, *cotangents, **keywords)
    assert (grads.slopes is None) == (expected.slopes is None)
    subject.record(
        *testing.assert_gradients_close(grads, expected, plain, like=inputs[0], from_lse=True)
    )


STANDARD = {
    "bins": [
        (plsh.RandomBinning(4.0), 2, "iid", 0, 0, [16777216, 38106368], [4052523, 21507791],
         [0, 0, 2, 2, 4, 4, 6, 6, 6, 9, 9, 11, 11, 13, 13, 15]),
        (plsh.RandomBinning(2.0), 2, "iid", (1, 2), 5, [59837163, 36794278], [745060, 21070894],
         [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 8, 11, 11, 13, 13, 15]),
        (plsh.PowerLawBinning(1.0, 0.25), 2, "iid", 0, 0, [16777216, 33625719],
         [4052523, 18978847], [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14]),
        (plsh.FixedBlocks(2.5), 1, None, 0, 0, [41943040], [0],
         [0, 0, 0, 3, 3, 5, 5, 5, 8, 8, 10, 10, 10, 13, 13, 15]),
    ],
    "cuts": [
        (0, [[0, 0, 2, 2, 4, 4, 6, 7, 8, 8, 10, 10, 12, 12, 14, 15],
             [0, 0, 0, 0, 0, 0, 0, 7, 8, 8, 8, 8, 8, 8, 14, 14]]),
        (1000, [[998, 998, 998, 1003, 1003, 1003, 1003, 1007],
                [999, 1001, 1001, 1001, 1001, 1001, 1001, 1001]]),
    ],
}  # fmt: skip
"""Worked examples of the standard; the labels are those of the last sample."""


@pytest.mark.requirement("CNF-4", "HSH-4", "HSH-8", "HSH-10")
def test_the_worked_examples_of_hashing():
    for family, samples, sampler, seed, head, width, shift, labels in STANDARD["bins"]:
        drawn = family.hash(samples, sampler, seed, (head,))
        assert (drawn.width.tolist(), drawn.shift.tolist()) == ([width], [shift])
        assert drawn.labels(0, 16)[0, -1].tolist() == labels
        assert drawn.bandwidth() == (-(-max(width) // UNIT) - 1,)
    for start, labels in STANDARD["cuts"]:
        drawn = plsh.IndependentCuts(4.0).sample(2, len(labels[0]), start=start)
        assert drawn.labels()[0].tolist() == labels


@pytest.mark.requirement("CNF-4", "ATT-1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["exact", "window", "lsh"])
def test_the_worked_examples_of_attention(method, dtype, subject):
    """Zero logits, v = (1, 2, 4), and weights of halves, so that every result is a fraction."""
    slopes, causal, sums = [math.log(2)], True, [(1, 1), (2.5, 1.5), (5.25, 1.75)]
    chosen = plsh.Exact()
    weight = {"slopes": slopes}
    if method == "window":
        causal, sums, chosen = False, [(2, 1.5), (4.5, 2), (5, 1.5)], plsh.Window(1)
        weight["widths"] = [1]
    elif method == "lsh":
        family = plsh.FixedBlocks(2.0)
        slopes, chosen = None, plsh.PositionalLSH(1, sampler=None, family=family)
        sums = [(1, 1), (3, 2), (4, 1)]
        labels = np.array([[[0, 0, 2]]])
        weight = {"weight": testing.step_weight(labels, labels)[None]}
    x, v = np.zeros((1, 1, 3, 1)), np.array([1.0, 2.0, 4.0]).reshape(1, 1, 3, 1)
    plain = testing.plain_attention(x, x, v, dtype=dtype, causal=causal, **weight)
    above, total = np.array(sums, dtype=np.float64).T
    expected = testing.OracleResult(
        (above / total).reshape(1, 1, 3, 1), np.log(total).reshape(1, 1, 3), *[None] * 4
    )
    q, k, values = (subject.array(y, dtype) for y in (x, x, v))
    output = subject.attention(
        q, k, values, method=chosen, slopes=slopes, causal=causal, return_lse=True
    )
    subject.record(*testing.assert_output_close(output, expected, plain, like=q))
