"""Slopes and methods: the positional weight that each gives, as it is seen through attention."""

import ast
import dataclasses
import math
import pickle

import numpy as np
import pytest

import plsh
from plsh import testing
from plsh.weights import UNLIMITED

METHODS = ("exact", "window", "lsh")
DTYPES = ("float16", "bfloat16", "float32", "float64")
FAR = 2**29
"""Where a block moves by tokens if the last bit of its width is wrong."""


def seen_weight(subject, dtype, heads=1, lengths=(24, 24), q_offset=0, k_offset=0, **keywords):
    """Recover w_ij ``(H, Nq, Nk)``: for q = 0 and one-hot v, out is w / Σ w, and lse ln Σ w."""
    len_k = lengths[1]
    q, k = (subject.array(np.zeros((1, heads, n, 2)), dtype) for n in lengths)
    chosen = np.broadcast_to(np.eye(len_k), (1, heads, len_k, len_k))
    step = subject.capabilities.max_head_dim or len_k
    parts = []
    for j in range(0, len_k, step):
        v = subject.array(chosen[..., j : j + step], dtype)
        out, lse = subject.attention(
            q, k, v, q_offset=q_offset, k_offset=k_offset, return_lse=True, **keywords
        )
        total = np.exp(subject.host(lse).astype(np.float64))
        parts.append(subject.host(out).astype(np.float64) * total[..., None])
    return np.concatenate(parts, axis=-1)[0]


def shared_blocks(labels_q, labels_k):
    """Count the partitions in which two tokens share a block; labels are ``(H, s, N)``."""
    same = np.asarray(labels_q)[..., :, None] == np.asarray(labels_k)[..., None, :]
    return same.sum(axis=1)


def check_counts(subject, dtype, labels_q, labels_k, heads=None, **keywords):
    """The backend's weights, times s, are the counts of shared blocks."""
    labels_q, labels_k = np.asarray(labels_q), np.asarray(labels_k)
    lengths = labels_q.shape[-1], labels_k.shape[-1]
    heads = len(labels_q) if heads is None else heads
    weight = seen_weight(subject, dtype, heads, lengths, **keywords)
    counts = np.rint(weight * labels_q.shape[1]).astype(int)
    expected = np.broadcast_to(shared_blocks(labels_q, labels_k), counts.shape)
    assert counts.tolist() == expected.tolist()


def check_attention(subject, dtype, weight, heads=(2, 1), lengths=(20, 20), batch=1, **keywords):
    """Output and lse against the oracle, which is told the weight in its own words."""
    inputs = testing.make_inputs(batch, *heads, *lengths, 8, 4, dtype)
    call = {x: keywords[x] for x in ("causal", "q_offset", "k_offset") if x in keywords}
    expected = testing.oracle(*inputs[:3], **weight, **call)
    plain = testing.plain_attention(*inputs[:3], dtype=dtype, **weight, **call)
    q, k, v = (subject.array(x, dtype) for x in inputs[:3])
    output = subject.attention(q, k, v, return_lse=True, **keywords)
    subject.record(*testing.assert_output_close(output, expected, plain, like=q))
    return output


def draw(method, heads, start, n):
    """Labels of the blocks that a `PositionalLSH` with a family means."""
    return method.family.sample(
        method.samples,
        n,
        start=start,
        seed=method.seed,
        sampler=method.sampler,
        head_ids=range(heads) if method.head_ids is None else method.head_ids,
    ).labels()


# --- slopes ---------------------------------------------------------------------------------------


def press(heads, max_bias=8.0):
    """The recursion of the published code: a power of two, then every other of twice it."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-max_bias * (k + 1) / heads) for k in range(heads)]
    power = 1 << (heads.bit_length() - 1)
    return press(power, max_bias) + press(2 * power, max_bias)[0::2][: heads - power]


@pytest.mark.requirement("ALB-1")
@pytest.mark.parametrize("max_bias", [8.0, 8, 16.0, 2.5])
def test_slopes_are_the_published_recipe(max_bias):
    for heads in (*range(1, 34), 40, 48, 71, 112):
        slopes = plsh.alibi_slopes(heads, max_bias)
        assert slopes.dtype == np.float64
        np.testing.assert_array_max_ulp(slopes, np.array(press(heads, max_bias)), 2)
    assert plsh.alibi_slopes(3).tolist() == [0.0625, 0.00390625, 0.25]
    assert plsh.alibi_slopes(4).tolist() == [0.25, 0.0625, 0.015625, 0.00390625]
    assert plsh.alibi_slopes(0, max_bias).shape == (0,)


@pytest.mark.requirement("ALB-1")
@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ((-1,), ValueError, "heads"),
        ((8.0,), TypeError, "heads"),
        (("8",), TypeError, "heads"),
        ((True,), TypeError, "heads"),
        ((8, 0.0), ValueError, "max_bias"),
        ((8, -8), ValueError, "max_bias"),
        ((8, math.inf), ValueError, "max_bias"),
        ((8, math.nan), ValueError, "max_bias"),
        ((8, "8"), TypeError, "max_bias"),
        ((8, True), TypeError, "max_bias"),
    ],
)
def test_arguments_of_alibi_slopes_are_checked(arguments, error, name):
    with pytest.raises(error, match=name):
        plsh.alibi_slopes(*arguments)


@pytest.mark.requirement("ALB-1", "ATT-9", "MTH-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_default_slopes_are_the_recipe_in_the_order_of_the_heads(method, dtype, subject):
    """Six heads: the order is not monotone."""
    slopes = press(6)
    weight = {"slopes": slopes}
    if method == "window":
        weight["widths"] = [math.ceil(math.log(1 / 1e-6) / m) for m in slopes]
    elif method == "lsh":
        sigma = [1 / float(np.float32(m)) for m in slopes]
        labels = plsh.RandomBinning(sigma).sample(16, 20, sampler="stratified").labels()
        weight = {"weight": testing.step_weight(labels, labels)[None]}
    check_attention(subject, dtype, weight, heads=(6, 3), method=method)


# --- exact ----------------------------------------------------------------------------------------


def one_side(distance, after):
    """Offsets that put all keys on one side of the queries, at least that far away."""
    return {"q_offset": 0, "k_offset": distance + 2} if after else {"q_offset": distance + 4}


@pytest.mark.requirement("MTH-1", "NUM-2")
@pytest.mark.needs("method:exact")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("slope", "distance"), [(0.5, 12), (2.0**-14, 2**17), (0.0, 2**17)])
@pytest.mark.parametrize("after", [False, True])
def test_exact_decays_at_every_distance(slope, distance, after, dtype, subject):
    """Many thousand tokens away, too, and on either side."""
    options = {"slopes": [slope, slope / 3], **one_side(distance, after)}
    weight = {"slopes": options["slopes"]}
    check_attention(subject, dtype, weight, lengths=(3, 5), method=plsh.Exact(), **options)


@pytest.mark.requirement("MTH-1", "NUM-5", "ATT-1")
@pytest.mark.needs("method:exact")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("slope", "distance"), [(0.5, 3000), (2.0, 20_000)])
@pytest.mark.parametrize("after", [False, True])
def test_no_key_is_too_far_to_be_seen(slope, distance, after, dtype, subject):
    """The weights underflow; the rows are alive, and their lse says how little they saw."""
    places = one_side(distance, after)
    q, k = (subject.array(np.zeros((1, 1, n, 2)), dtype) for n in (3, 5))
    v = np.ones((1, 1, 5, 2))
    out, lse = subject.attention(
        q, k, subject.array(v, dtype), method="exact", slopes=slope, return_lse=True, **places
    )
    expected = testing.oracle(np.zeros((1, 1, 3, 2)), v, v, slopes=[slope], **places)
    wide = "float64" if dtype == "float64" else "float32"
    testing.assert_equal_to_rounding(out, subject.array(expected.out, dtype))
    testing.assert_equal_to_rounding(lse, subject.array(expected.lse, wide), name="lse")


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.requirement("MTH-2", "ATT-24")
@pytest.mark.needs("method:window")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", [0, 1, (0, 7, 15), (16, 17, 31), (200, UNLIMITED, 2**40)])
def test_a_window_ends_at_its_width(widths, causal, dtype, subject):
    """One token beyond the weight is exactly 0, at the width it is not; per head."""
    options = {"slopes": [0.01, 0.03, 0.0], "causal": causal, "method": plsh.Window(widths)}
    weight = seen_weight(subject, dtype, 3, (40, 40), **options)
    distance = np.arange(40)[:, None] - np.arange(40)[None, :]
    inside = np.abs(distance) <= np.broadcast_to(widths, 3)[:, None, None]
    assert ((weight != 0) == (inside & (distance >= 0 if causal else True))).all()
    oracle = {"slopes": options["slopes"], "widths": np.broadcast_to(widths, 3)}
    check_attention(subject, dtype, oracle, heads=(3, 3), lengths=(40, 40), **options)


LOG10 = (math.log(1 / 0.1), -math.log(0.1))
"""They differ in the last bit: the order of the operations decides a width."""


@pytest.mark.requirement("MTH-2")
@pytest.mark.needs("method:window")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tol", "slope", "width"),
    [
        (None, 0.5, 28),
        (None, 1.0, 14),
        (0.5, math.log(2), 1),
        (0.1, LOG10[0] / 3, 3),
        (0.1, min(LOG10), 2 if LOG10[0] > LOG10[1] else 1),
        (0.9, 1e30, 1),
        (1e-300, 0.0, UNLIMITED),
        (1e-9, 1e-9, UNLIMITED),
    ],
)
def test_a_window_by_tol_has_the_stated_width(tol, slope, width, dtype, subject):
    """Seen from one query whose farthest key is just inside, then just outside."""
    far = min(width, 2**17)
    method = plsh.Window() if tol is None else plsh.Window(tol=tol)
    options = {"slopes": [slope], "method": method}
    q = subject.array(np.zeros((1, 1, 1, 2)), dtype)
    alive = []
    for distance in (far, far + 1):
        _, lse = subject.attention(q, q, q, q_offset=distance, return_lse=True, **options)
        alive.append(bool(np.isfinite(subject.host(lse)).all()))
    assert alive == [True, width == UNLIMITED]


@pytest.mark.requirement("MTH-2", "THY-6")
def test_widths_by_tol_are_computed_in_the_stated_order():
    rng = np.random.default_rng(3)
    for tol in (1e-6, 0.1, 0.3, 1e-3, 0.999, *rng.uniform(0, 1, 40).tolist()):
        exact = [math.log(1 / tol) / n for n in range(1, 12)]
        for slope in (*exact, *(math.nextafter(m, 9.0) for m in exact), -math.log(tol), 0.37):
            expected = math.ceil(math.log(1 / tol) / slope)
            assert plsh.theory.window_width(slope, tol) == expected, (slope, tol)


@pytest.mark.requirement("MTH-2")
@pytest.mark.needs("method:window")
@pytest.mark.parametrize("dtype", DTYPES)
def test_under_tol_slopes_per_row_share_the_width_of_the_smallest(dtype, subject):
    """One width for all rows of a head, although alone a steeper row would have a shorter one."""
    slopes = np.array([[0.5, 2.0], [1.0, 0.25]])
    widths = [math.ceil(math.log(1 / 0.01) / m) for m in (0.5, 0.25)]
    weight = {"slopes": slopes, "widths": widths}
    check_attention(
        subject,
        dtype,
        weight,
        lengths=(30, 30),
        batch=2,
        method=plsh.Window(tol=0.01),
        slopes=slopes,
    )


@pytest.mark.requirement("MTH-2", "CNV-4")
@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: plsh.Window(3, tol=0.1), ValueError, "width"),
        (lambda: plsh.Window(-1), ValueError, "width"),
        (lambda: plsh.Window([1, -1]), ValueError, "width"),
        (lambda: plsh.Window([[1, 2]]), ValueError, "width"),
        (lambda: plsh.Window(1.0), TypeError, "width"),
        (lambda: plsh.Window("3"), TypeError, "width"),
        (lambda: plsh.Window(tol=0.0), ValueError, "tol"),
        (lambda: plsh.Window(tol=1.0), ValueError, "tol"),
        (lambda: plsh.Window(tol=math.nan), ValueError, "tol"),
        (lambda: plsh.Window(tol="0.1"), TypeError, "tol"),
    ],
)
def test_parameters_of_a_window_are_checked(make, error, name):
    with pytest.raises(error, match=name):
        make()
    assert plsh.Window() == plsh.Window(tol=1e-6)
    assert plsh.Window(2**40) == plsh.Window(UNLIMITED)


def refused(subject, error, match, heads=2, **keywords):
    """A call with wrong options is refused before the backend is asked."""
    dtype = subject.capabilities.dtypes[-1]
    q = subject.array(np.zeros((1, heads, 4, 2)), dtype)
    with pytest.raises(error, match=match):
        subject.attention(q, q, q, **keywords)


@pytest.mark.requirement("MTH-2", "MTH-3", "MTH-5", "MTH-6")
@pytest.mark.parametrize(
    ("chosen", "slopes"),
    [
        (plsh.Window([1, 2, 3]), None),
        (plsh.Window([1]), None),
        (plsh.PositionalLSH(head_ids=[0]), None),
        (plsh.PositionalLSH(head_ids=[0, 1, 2]), None),
        (plsh.PositionalLSH(family=plsh.RandomBinning([1.0, 2.0, 3.0])), None),
        (plsh.PositionalLSH(family=plsh.RandomBinning([1.0])), None),
        (plsh.PositionalLSH(family=plsh.RandomBinning(2.0)), [0.5, 0.5]),
        (plsh.PositionalLSH(family=plsh.FixedBlocks(2.0), sampler=None), 0.5),
        (plsh.RandomBinning(2.0).sample(2, 4), 0.5),
        (plsh.RandomBinning(2.0).sample(2, 4, head_ids=[0, 1, 2]), None),
    ],
    ids=repr,
)
def test_what_does_not_fit_the_heads_or_the_slopes_is_refused(chosen, slopes, subject):
    refused(subject, ValueError, "head|slopes", method=chosen, slopes=slopes)


# --- positional LSH -------------------------------------------------------------------------------

FAMILIES = [
    plsh.RandomBinning((2.0, 30.0, 7.5)),
    plsh.RandomBinning(9.0),
    plsh.RandomBinning((1e-3, math.inf, 1e12)),
    plsh.PowerLawBinning(1.5, (0.1, 0.4, 1.0)),
    plsh.FixedBlocks((2.5, 1.0, 11.25)),
    plsh.IndependentCuts((2.0, 30.0, math.inf)),
]


@pytest.mark.requirement("MTH-3", "MTH-5", "NUM-6", "HSH-9")
@pytest.mark.needs("method:lsh")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_the_weight_is_the_share_of_shared_blocks(family, dtype, subject):
    """Per head its own stream, also where one parameter serves all heads."""
    for samples, sampler, seed in ((1, "iid", 3), (16, "stratified", (1, 2))):
        method = plsh.PositionalLSH(
            samples, sampler=sampler if family.has_samplers else None, seed=seed, family=family
        )
        labels_q, labels_k = draw(method, 3, 12, 20), draw(method, 3, 7, 23)
        check_counts(subject, dtype, labels_q, labels_k, method=method, q_offset=12, k_offset=7)
    weight = {"weight": testing.step_weight(labels_q, labels_k)[None]}
    places = {"q_offset": 12, "k_offset": 7}
    check_attention(subject, dtype, weight, (3, 3), (20, 23), method=method, **places)


@pytest.mark.requirement("MTH-3", "HSH-2")
@pytest.mark.needs("method:lsh")
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_ids_name_the_streams(dtype, subject):
    """Equal ids see equal blocks; a shard that passes its own ids sees those of the whole."""
    sigma = (6.0, 6.0, 6.0, 20.0)
    for ids in ([5, 5, 2**64 - 1, 0], [3, 2, 1, 0]):
        method = plsh.PositionalLSH(4, seed=8, family=plsh.RandomBinning(sigma), head_ids=ids)
        labels = draw(method, 4, 0, 24)
        check_counts(subject, dtype, labels, labels, method=method)
        shard = plsh.PositionalLSH(
            4, seed=8, family=plsh.RandomBinning(sigma[2:]), head_ids=ids[2:]
        )
        check_counts(subject, dtype, labels[2:], labels[2:], method=shard)


@pytest.mark.requirement("MTH-3")
def test_parameters_of_positional_lsh_have_their_defaults_and_ranges():
    made = plsh.PositionalLSH()
    assert (made.samples, made.sampler, made.seed) == (16, "stratified", 0)
    assert made.family is None
    assert made.head_ids is None
    assert plsh.PositionalLSH(2**20).samples == 2**20
    assert plsh.PositionalLSH(sampler=None).sampler is None
    with pytest.raises(TypeError):
        plsh.PositionalLSH(4, "iid")
    for wrong, error in (
        ({"samples": 0}, ValueError),
        ({"samples": 2**20 + 1}, ValueError),
        ({"samples": 4.0}, TypeError),
        ({"sampler": "sobol"}, ValueError),
        ({"sampler": 1}, TypeError),
        ({"seed": -1}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"seed": ()}, ValueError),
        ({"seed": "0"}, TypeError),
        ({"seed": 0.0}, TypeError),
        ({"family": "RandomBinning"}, TypeError),
        ({"family": plsh.Exact()}, TypeError),
        ({"head_ids": [-1]}, ValueError),
        ({"head_ids": [2**64]}, ValueError),
        ({"head_ids": 3}, TypeError),
        ({"head_ids": [0.5]}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            plsh.PositionalLSH(**wrong)


SLOPES = (
    (0.1, 1 / 0.10000000149011612),
    (1 / 3, 1 / 0.3333333432674408),
    (1 + 2.0**-24, 1.0),
    (1 + 3 * 2.0**-24, 1 / (1 + 2.0**-22)),
    (2.0**-149, 2.0**149),
    (1.4e-45, 2.0**149),
    (1e-46, math.inf),
    (2.0**-150, math.inf),
    (0.0, math.inf),
    (1e300, 1 / float(np.finfo(np.float32).max)),
)
"""Slopes, and the decay lengths that they stand for: through float32, ties to even."""


@pytest.mark.requirement("MTH-4", "ATT-10", "NUM-13")
@pytest.mark.needs("method:lsh")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, FAR])
def test_blocks_come_from_the_slope_rounded_to_float32(start, dtype, subject):
    """Far out a block moves by tokens where the width is wrong in its last bits."""
    slopes, sigma = zip(*SLOPES, strict=True)
    labels = plsh.RandomBinning(sigma).sample(8, 16, start=start, seed=5).labels()
    naive = [1 / m if m else math.inf for m in slopes[:2]]
    if start:
        other = plsh.RandomBinning(naive).sample(8, 16, start=start, seed=5).labels()
        assert (other != labels[:2]).any()
    method = plsh.PositionalLSH(8, seed=5)
    places = {"q_offset": start, "k_offset": start}
    check_counts(subject, dtype, labels, labels, method=method, slopes=slopes, **places)
    rounded = [float(np.float32(min(m, 3e38))) for m in slopes[:4]]
    as_arrays = (rounded, np.array(rounded, np.float32), subject.array(rounded, "float32"))
    for given in as_arrays:
        own = {"method": method, "slopes": given, **places}
        check_counts(subject, dtype, labels[:4], labels[:4], **own)


@pytest.mark.requirement("MTH-6", "MTH-3", "PAR-4")
@pytest.mark.needs("method:lsh")
@pytest.mark.may_refuse
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("start", [0, 37])
def test_a_set_of_partitions_is_a_method(start, heads, dtype, subject):
    """Of H heads, or of one that serves all; it need not begin at 0."""
    chosen = plsh.RandomBinning((3.0, 9.0, 20.0)[:heads]).sample(6, 40, start=start, seed=4)
    places = {"q_offset": start + 9, "k_offset": start}
    labels_q, labels_k = chosen.labels(start + 9, start + 29), chosen.labels(start, start + 30)
    check_counts(subject, dtype, labels_q, labels_k, heads=3, method=chosen, **places)
    every = np.broadcast_to(testing.step_weight(labels_q, labels_k), (3, 20, 30))
    check_attention(
        subject, dtype, {"weight": every[None]}, (3, 1), (20, 30), method=chosen, **places
    )


# --- values and names -----------------------------------------------------------------------------

VALUES = [
    lambda: plsh.Exact(),
    lambda: plsh.Window(7),
    lambda: plsh.Window(np.array([3, 4])),
    lambda: plsh.Window(tol=np.float64(0.25)),
    lambda: plsh.PositionalLSH(
        np.int64(4), sampler="iid", seed=[1, np.uint64(2)], head_ids=np.arange(2)
    ),
    lambda: plsh.PositionalLSH(family=plsh.PowerLawBinning(np.array([1.0, 2.0]), 0.5)),
    lambda: plsh.RandomBinning(np.array([1, 2])),
    lambda: plsh.IndependentCuts([2, 3.5]),
    lambda: plsh.FixedBlocks(np.float32(2.5)),
]


@pytest.mark.requirement("MTH-7", "HSH-11")
@pytest.mark.parametrize("make", VALUES)
def test_methods_and_families_are_immutable_values(make):
    one, other = make(), make()
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1
    assert pickle.loads(pickle.dumps(one)) == one
    assert "array(" not in repr(one)
    assert _remade(repr(one)) == one
    for name in (f.name for f in dataclasses.fields(one)):
        value = getattr(one, name)
        assert not isinstance(value, np.ndarray | np.generic | list)
        with pytest.raises(AttributeError):
            setattr(one, name, value)
    with pytest.raises((AttributeError, TypeError)):
        one.another = 1


def _remade(text):
    """Make the object again by the call that its repr shows."""

    def build(node):
        if isinstance(node, ast.Call):
            keywords = {word.arg: build(word.value) for word in node.keywords}
            if node.func.id == "Window" and keywords["width"] is not None:
                keywords.pop("tol")
            return getattr(plsh, node.func.id)(*map(build, node.args), **keywords)
        return ast.literal_eval(node)

    return build(ast.parse(text, mode="eval").body)


@pytest.mark.requirement("MTH-7")
def test_methods_with_other_parameters_differ():
    made = [make() for make in VALUES]
    made += [plsh.Window(8), plsh.Window(), plsh.PositionalLSH(), plsh.PositionalLSH(8)]
    made += [plsh.PositionalLSH(seed=1), plsh.PositionalLSH(seed=(1, 0)), plsh.RandomBinning(1.0)]
    made += [plsh.PositionalLSH(head_ids=[0]), plsh.PositionalLSH(sampler="iid")]
    assert len(set(made)) == len(made)


@pytest.mark.requirement("MTH-7", "PAR-3")
def test_a_set_of_partitions_prints_its_shape():
    text = repr(plsh.RandomBinning(3.0).sample(5, 70, start=13, head_ids=[0, 1]))
    assert all(number in text for number in ("2", "5", "13", "83"))
    assert len(text) < 100


@pytest.mark.requirement("MTH-8", "ATT-8")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_a_name_is_its_class_with_the_defaults(method, dtype, subject):
    made = {"exact": plsh.Exact(), "window": plsh.Window(), "lsh": plsh.PositionalLSH()}[method]
    inputs = testing.make_inputs(1, 4, 2, 40, dtype=dtype)
    q, k, v = (subject.array(x, dtype) for x in inputs[:3])
    named = subject.attention(q, k, v, method=method)
    testing.assert_equal_to_rounding(named, subject.attention(q, k, v, method=made))
    if method == "lsh":
        testing.assert_equal_to_rounding(subject.attention(q, k, v), named)


@pytest.mark.requirement("MTH-8", "ATT-8", "ERR-4")
@pytest.mark.parametrize(
    "other",
    ["flash", "LSH", "", None, 3, plsh.Exact, plsh.RandomBinning(4.0), np.zeros((1, 1, 4)), []],
    ids=repr,
)
def test_anything_else_is_refused_with_the_names_and_classes(other, subject):
    refused(subject, TypeError, r"exact.*window.*lsh.*Exact.*Window.*PositionalLSH", method=other)
