"""What `attention` takes: every form of every argument."""

import dataclasses

import numpy as np
import pytest

import plsh
from plsh import attention, attention_vjp, testing
from plsh.conformance.calls import Call, check_call
from plsh.conformance.doubles import widest

METHODS = ("exact", "window", "lsh")
SHAPES = {
    "no batch row": {"batch": 0},
    "no head": {"heads": (0, 0)},
    "no query": {"lengths": (0, 5)},
    "no key": {"lengths": (5, 0)},
    "no token": {"lengths": (0, 0)},
    "no value": {"dims": (3, 0)},
    "one past a tile": {"lengths": (65, 129)},
    "one number": {"batch": 1, "heads": (1, 1), "lengths": (1, 1), "dims": (1, 1)},
    "no batch axis": {"batch": None, "segments": "pair"},
    "no batch axis, no key": {"batch": None, "lengths": (5, 0), "segments": "pair"},
    "no key, bshd": {"lengths": (5, 0), "layout": "bshd"},
}


@pytest.mark.requirement("ATT-3", "ATT-6", "ATT-7", "ATT-21", "BCK-10", "BCK-11")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_axes_may_be_empty_or_absent(shape, method, subject):
    options = {"lengths": (6, 6), "dims": (3, 5), "dtype": widest(subject), **SHAPES[shape]}
    check_call(Call(method, **options), subject)


def tokens(subject, seed=0, heads=(4, 2), lengths=(20, 20), **options):
    made = testing.make_inputs(2, *heads, *lengths, 4, 4, dtype=widest(subject), seed=seed)
    return [subject.array(x, widest(subject)) for x in made[:3]]


def assert_same(subject, one, other, given=None):
    """Assert that two sets of options give the same output and lse."""
    q, k, v = given or tokens(subject)
    results = [subject.attention(q, k, v, return_lse=True, **x) for x in (one, other)]
    for name, x, y in zip(("out", "lse"), *results, strict=True):
        testing.assert_equal_to_rounding(x, y, name=name)


def assert_differ(subject, one, other):
    """Assert that two sets of options give other outputs: that the option is not ignored."""
    q, k, v = tokens(subject)
    x, y = (subject.host(subject.attention(q, k, v, **options)) for options in (one, other))
    assert np.max(np.abs(x.astype(float) - y)) > 1e-2


@pytest.mark.requirement("ATT-8")
@pytest.mark.needs("method:lsh")
def test_the_default_method_is_lsh(subject):
    assert_same(subject, {}, {"method": "lsh"})
    assert_same(subject, {}, {"method": plsh.PositionalLSH()})


@pytest.mark.requirement("ATT-8", "MTH-8")
@pytest.mark.parametrize("method", METHODS)
def test_a_name_stands_for_the_defaults_of_a_method(method, subject):
    made = {"exact": plsh.Exact(), "window": plsh.Window(), "lsh": plsh.PositionalLSH()}
    assert_same(subject, {"method": method}, {"method": made[method]})


@pytest.mark.requirement("ATT-8", "MTH-6")
@pytest.mark.needs("method:lsh")
@pytest.mark.may_refuse
def test_partitions_are_a_method(subject):
    """Those that the recipe draws: the same attention."""
    family, keywords = plsh.RandomBinning((2.0, 4.0, 8.0, 1.0)), {"samples": 3, "seed": 5}
    recipe = plsh.PositionalLSH(family=family, **keywords)
    drawn = family.sample(n=20, sampler="stratified", **keywords)
    assert_same(subject, {"method": drawn}, {"method": recipe})


SLOPES = (1.0, 0.5, 0.25, 0.0)
FORMS = {
    "list": lambda s: list(SLOPES),
    "numpy float64": lambda s: np.array(SLOPES),
    "numpy float16": lambda s: np.array(SLOPES, "float16"),
    "numpy scalars": lambda s: tuple(map(np.float32, SLOPES)),
    "strided": lambda s: np.repeat(np.array(SLOPES), 2)[::2],
    "own": lambda s: s.array(np.array(SLOPES), "float32"),
}
ONE = {
    "number": lambda s: 0.5,
    "numpy scalar": lambda s: np.float32(0.5),
    "numpy 0-d": lambda s: np.array(0.5),
    "own 0-d": lambda s: s.array(np.array(0.5), "float32"),
}
INTEGERS = {
    "int": lambda s: [1, 0, 2, 1],
    "numpy": lambda s: np.array([1, 0, 2, 1]),
    "own": lambda s: s.array(np.array([1, 0, 2, 1]), "int32"),
}


@pytest.mark.requirement("ATT-9", "ATT-11", "CNV-4")
@pytest.mark.parametrize("method", METHODS)
def test_slopes_may_have_any_form(method, subject):
    for equal, forms in (
        (SLOPES, FORMS),
        ((0.5,) * 4, ONE),
        ((1.0, 0.0, 2.0, 1.0), INTEGERS),
        (plsh.alibi_slopes(4), {"none": lambda s: None}),
    ):
        for form in forms.values():
            given = {"method": method, "slopes": form(subject)}
            assert_same(subject, given, {"method": method, "slopes": tuple(equal)})


@pytest.mark.requirement("ATT-9", "ATT-11", "ATT-24")
@pytest.mark.parametrize("method", METHODS)
def test_slopes_are_read_and_in_the_order_of_the_heads(method, subject):
    """From an array on the device, too."""
    options = {"method": method, "slopes": subject.array(np.array(SLOPES), "float32")}
    assert_differ(subject, options, options | {"slopes": SLOPES[::-1]})
    q, k, v = tokens(subject, heads=(4, 4))
    whole = subject.attention(q, k, v, **options)
    for h in range(3):  # each alone
        if method == "lsh":
            options["method"] = plsh.PositionalLSH(head_ids=(h,))
        x = [x[:, h : h + 1, :, :] for x in (q, k, v)]
        own = subject.attention(*x, **options | {"slopes": SLOPES[h : h + 1]})
        testing.assert_equal_to_rounding(own, whole[:, h : h + 1, :, :])


@pytest.mark.requirement("ATT-9", "ATT-24", "BCK-14")
@pytest.mark.parametrize("method", ["exact", "window"])
@pytest.mark.parametrize("form", ["nested", "numpy", "own"])
def test_slopes_may_differ_between_batch_rows(form, method, subject):
    rows = (SLOPES, SLOPES[::-1])
    forms = {
        "nested": rows,
        "numpy": np.array(rows),
        "own": subject.array(np.array(rows), "float32"),
    }
    method = plsh.Exact() if method == "exact" else plsh.Window(7)
    q, k, v = tokens(subject)
    whole = subject.attention(q, k, v, method=method, slopes=forms[form])
    for b in range(2):
        own = subject.attention(*(x[b : b + 1, ...] for x in (q, k, v)), method=method,
                                slopes=rows[b])  # fmt: skip
        testing.assert_equal_to_rounding(own, whole[b : b + 1, ...])


@pytest.mark.requirement("ATT-11", "CNV-7")
@pytest.mark.needs("kind:torch")
@pytest.mark.parametrize("method", ["lsh", "tol"])
def test_traced_slopes_are_refused_where_integers_come_of_them_torch(method, subject):
    import torch

    q, k, v = tokens(subject)
    chosen = plsh.Window(tol=0.01) if method == "tol" else method

    def f(slopes):
        return attention(q, k, v, method=chosen, slopes=slopes, backend=subject.name)

    with pytest.raises(TypeError, match=r"slopes must be concrete.*traced.*; "):
        torch.func.vmap(f)(torch.ones(2, 4))


@pytest.mark.requirement("ATT-11", "CNV-7")
@pytest.mark.needs("kind:jax")
@pytest.mark.parametrize("method", ["lsh", "tol"])
def test_traced_slopes_are_refused_where_integers_come_of_them_jax(method, subject):
    import jax

    q, k, v = tokens(subject)
    chosen = plsh.Window(tol=0.01) if method == "tol" else method

    def f(slopes):
        return attention(q, k, v, method=chosen, slopes=slopes, backend=subject.name)

    with pytest.raises(TypeError, match=r"slopes must be concrete.*traced.*; "):
        jax.eval_shape(f, jax.ShapeDtypeStruct((4,), "float32"))


@pytest.mark.requirement("ATT-13", "ATT-24")
@pytest.mark.parametrize("method", METHODS)
def test_scale_may_be_any_number(method, subject):
    for equal, forms in (
        (0.5, (None, np.float32(0.5), np.array(0.5))),  # D is 4
        (-2.0, (-2, np.int64(-2), np.array(-2))),
        (0.0, (0, np.array(0))),
    ):
        for form in forms:
            options = {"method": method, "scale": equal}
            assert_same(subject, options, options | {"scale": form})
    assert_differ(subject, {"method": method}, {"method": method, "scale": -2.0})


@pytest.mark.requirement("ATT-13", "ATT-24", "ATT-1")
@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 2.0])
@pytest.mark.parametrize("method", METHODS)
def test_scale_is_a_factor_of_the_products_and_not_of_the_bias(method, scale, subject):
    check_call(Call(method, scale=scale, dtype=widest(subject)), subject)


OFFSETS = {
    "int": lambda s, n: n,
    "numpy scalar": lambda s, n: np.int16(n),
    "numpy 0-d": lambda s, n: np.array(n),
    "own 0-d": lambda s, n: s.array(np.array(n), "int32"),
}
ROWS_OF_OFFSETS = {
    "tuple": lambda s, rows: tuple(rows),
    "list": lambda s, rows: [np.int64(n) for n in rows],
    "numpy": lambda s, rows: np.array(rows, "uint8"),
    "own": lambda s, rows: s.array(np.array(rows), "int32"),
}


@pytest.mark.requirement("ATT-15", "BCK-14", "CNV-4")
@pytest.mark.parametrize("form", OFFSETS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.may_refuse
def test_offsets_may_have_any_form(form, method, subject):
    given = tokens(subject, lengths=(8, 20))
    known = {"method": method, "causal": True, "q_offset": 19, "k_offset": 11}
    make = OFFSETS[form]
    both = {"q_offset": make(subject, 19), "k_offset": make(subject, 11)}
    for options in ({"q_offset": both["q_offset"]}, {"k_offset": both["k_offset"]}, both):
        assert_same(subject, known | options, known, given)


@pytest.mark.requirement("ATT-15", "ATT-24", "BCK-14", "CNV-4", "NUM-12")
@pytest.mark.parametrize("form", ROWS_OF_OFFSETS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.may_refuse
def test_offsets_may_differ_between_batch_rows(form, method, subject):
    q, k, v = tokens(subject, lengths=(8, 20))
    own_q, own_k, make = (19, 25), (11, 3), ROWS_OF_OFFSETS[form]
    options = {"method": method, "causal": True, "slopes": SLOPES, "return_lse": True}
    for of_q, of_k in ((own_q, 11), (19, own_k), (own_q, own_k)):
        given = [make(subject, x) if isinstance(x, tuple) else x for x in (of_q, of_k)]
        whole = subject.attention(q, k, v, q_offset=given[0], k_offset=given[1], **options)
        for b in range(2):
            row = [x[b : b + 1, ...] for x in (q, k, v)]
            at = [x[b] if isinstance(x, tuple) else x for x in (of_q, of_k)]
            alone = subject.attention(*row, q_offset=at[0], k_offset=at[1], **options)
            testing.assert_equal_to_rounding(whole.out[b : b + 1, ...], alone.out)
            testing.assert_equal_to_rounding(whole.lse[b : b + 1, ...], alone.lse)


@pytest.mark.requirement("ATT-15")
@pytest.mark.parametrize("method", METHODS)
def test_queries_begin_where_the_keys_do_if_nothing_is_said(method, subject):
    options = {"method": method, "causal": True, "k_offset": 9}
    assert_same(subject, options, options | {"q_offset": 9})
    assert_differ(subject, options, options | {"q_offset": 3})


@pytest.mark.requirement("ATT-16", "NUM-2")
@pytest.mark.parametrize("method", METHODS)
def test_the_last_position_is_one_below_2_to_the_30(method, subject):
    start = 2**30 - 20
    inputs = testing.make_inputs(2, 4, 2, 20, head_dim=4, dtype=widest(subject))
    weight = {"slopes": SLOPES}
    if method == "window":  # 1e-6
        weight["widths"] = [14, 28, 56, 99]
    if method == "lsh":
        sigma = [1 / m if m else np.inf for m in SLOPES]
        sets = plsh.RandomBinning(sigma).sample(16, 20, start=start, sampler="stratified")
        weight = {"weight": testing.step_weight(sets.labels(), sets.labels())}
    expected = testing.oracle(*inputs[:3], **weight)
    plain = testing.plain_attention(*inputs[:3], dtype=widest(subject), **weight)
    q, k, v = (subject.array(x, widest(subject)) for x in inputs[:3])
    output = subject.attention(
        q, k, v, method=method, slopes=SLOPES, k_offset=start, return_lse=True
    )
    subject.record(*testing.assert_output_close(output, expected, plain, like=q))


@pytest.mark.requirement("ATT-16", "MTH-6", "CNV-1")
@pytest.mark.needs("method:lsh")
@pytest.mark.may_refuse
def test_partitions_have_blocks_from_their_first_position_on(subject):
    """Up to both ends of the range, which does not begin at 0."""
    sets = plsh.FixedBlocks((7.0, 3.0, 12.0, 2.0)).sample(1, 26, start=50)
    made = testing.make_inputs(2, 4, 2, 20, head_dim=4, dtype=widest(subject))[:3]
    for first in (50, 53, 56):
        labels = sets.labels_at(first, first + 20)
        weight = testing.step_weight(labels, labels)
        q, k, v = (subject.array(x, widest(subject)) for x in made)
        output = subject.attention(q, k, v, method=sets, k_offset=first, return_lse=True)
        expected = testing.oracle(*made, weight=weight)
        plain = testing.plain_attention(*made, dtype=widest(subject), weight=weight)
        subject.record(*testing.assert_output_close(output, expected, plain, like=q))


@pytest.mark.requirement("ATT-16", "ATT-21")
@pytest.mark.needs("method:lsh")
def test_a_query_before_every_key_needs_no_block(subject):
    """Under a causal mask it sees nothing."""
    q, k, v = tokens(subject)
    output = subject.attention(q, k, v, causal=True, q_offset=-3, return_lse=True)
    rest = subject.attention(q[:, :, 3:, :], k, v, causal=True, q_offset=0, return_lse=True)
    assert not np.any(subject.host(output.out[:, :, :3, :]))
    assert np.all(subject.host(output.lse[:, :, :3]) == -np.inf)
    testing.assert_equal_to_rounding(output.out[:, :, 3:, :], rest.out)
    testing.assert_equal_to_rounding(output.lse[:, :, 3:], rest.lse)


@pytest.mark.requirement("ATT-16", "ATT-17", "CNV-5")
@pytest.mark.needs("method:lsh")
def test_padding_needs_no_block(subject):
    """NumPy ids are read; those of another library are not, and the rule is the caller's."""
    ids = np.repeat([[-1] * 4 + [0] * 16], 2, axis=0)
    q, k, v = tokens(subject)
    options = {"segment_ids": subject.array(ids, "int32"), "k_offset": -4, "return_lse": True}
    whole = subject.attention(q, k, v, **options)
    part = subject.attention(*(x[:, :, 4:, :] for x in (q, k, v)), return_lse=True)
    assert not np.any(subject.host(whole.out[:, :, :4, :]))
    testing.assert_equal_to_rounding(whole.out[:, :, 4:, :], part.out)
    testing.assert_equal_to_rounding(whole.lse[:, :, 4:], part.lse)


@pytest.mark.requirement("ATT-19", "ATT-24", "ATT-21")
@pytest.mark.parametrize("segments", ["one", "pair"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_segments_hide_other_segments_and_padding(method, causal, segments, subject):
    """In several tiles; positions go on from segment to segment."""
    lengths = (70, 70) if segments == "one" else (40, 70)
    call = Call(method, lengths=lengths, causal=causal, segments=segments, flatter=8.0)
    check_call(dataclasses.replace(call, dtype=widest(subject)), subject)


INTS = ("int8", "int16", "int64", "uint8", "uint16", "uint32")


@pytest.mark.requirement("ATT-19")
@pytest.mark.parametrize("dtype_of_ids", INTS)
@pytest.mark.parametrize("method", METHODS)
def test_segment_ids_may_be_of_any_integer_dtype(dtype_of_ids, method, subject):
    low = -1 if dtype_of_ids.startswith("int") else 1
    ids = np.random.default_rng(3).integers(low, 3, (2, 20))
    wide, own = (subject.array(ids, dtype) for dtype in ("int32", dtype_of_ids))
    options = {"method": method}
    known = options | {"segment_ids": wide}
    assert_same(subject, options | {"segment_ids": own}, known)
    assert_same(subject, options | {"segment_ids": [own, own]}, known)
    assert_differ(subject, options, known)


@pytest.mark.requirement("ATT-19")
@pytest.mark.parametrize("method", METHODS)
def test_large_segment_ids_are_told_apart(method, subject):
    """Neighbours that are equal in float32, and in the low bits."""
    ids = 2**30 + np.repeat([[0, 1, 2, 2**29]], 2, axis=0).repeat(5, axis=1)
    small = np.repeat([[0, 1, 2, 3]], 2, axis=0).repeat(5, axis=1)
    one, other = (
        {"method": method, "segment_ids": subject.array(x, "int32")} for x in (ids, small)
    )
    assert_same(subject, one, other)


@pytest.mark.requirement("ATT-25", "ATT-26", "BCK-11")
@pytest.mark.needs("vjp")
@pytest.mark.parametrize("method", METHODS)
def test_no_grad_lse_is_a_zero_one(method, subject):
    q, k, v = tokens(subject)
    output = subject.attention(q, k, v, method=method, return_lse=True)
    zero = output.lse * 0.0
    options = {"method": method, "backend": subject.name}
    with_zero = attention_vjp(q, k, v, output, output.out, zero, **options)
    without = attention_vjp(q, k, v, tuple(output), output.out, **options)
    for x, y in zip(with_zero, without, strict=True):
        if x is not None:
            testing.assert_equal_to_rounding(x, y)
