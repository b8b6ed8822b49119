"""Conventions: positions, kinds, dtypes, numbers, what is read, and what is an operand."""

import math

import numpy as np
import pytest

import plsh
from plsh import compat, registry, testing
from plsh.backend import AttentionOutput, Availability, Capabilities
from plsh.conformance.calls import Call, check_call

METHODS = ("exact", "window", "lsh")
DTYPES = ("float16", "bfloat16", "float32", "float64")
CHOSEN = {"exact": plsh.Exact(), "window": plsh.Window(9), "lsh": plsh.PositionalLSH(5, seed=2)}
SLOPES = (0.5, 0.05)


def qkv(subject, dtype, n=24, batch=2, heads=2):
    """Arrays of the backend's kind, (B, H, N, 8)."""
    inputs = testing.make_inputs(batch, heads, heads, n, head_dim=8, dtype=dtype, seed=1)
    return [subject.array(x, dtype) for x in inputs[:3]]


def attend(subject, arrays, **keywords):
    return subject.attention(*arrays, return_lse=True, **keywords)


def first_of(subject):
    """A dtype and a method that the backend declares."""
    return subject.capabilities.dtypes[-1], subject.capabilities.methods[0]


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.requirement("CNV-1", "ATT-14")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_token_is_where_its_position_says_and_not_its_index(method, causal, dtype, subject):
    """Some queries and some keys of a call, at their positions, against hiding the others."""
    n, mine, held = 40, slice(11, 30), slice(5, 33)
    q, k, v = testing.make_inputs(2, 2, 2, n, head_dim=8, dtype=dtype, seed=1)[:3]
    ids = np.full((2, n), -1)
    ids[:, held] = 0
    options = {"method": CHOSEN[method], "slopes": SLOPES, "causal": causal}
    queries = np.zeros((2, n), int), ids
    whole = attend(
        subject,
        [subject.array(x, dtype) for x in (q, k, v)],
        segment_ids=tuple(subject.array(x, "int32") for x in queries),
        **options,
    )
    part = attend(
        subject,
        [subject.array(x, dtype) for x in (q[..., mine, :], k[..., held, :], v[..., held, :])],
        q_offset=11,
        k_offset=5,
        **options,
    )
    wide = "float64" if dtype == "float64" else "float32"
    rows = subject.host(whole.out)[..., mine, :], subject.host(whole.lse)[..., mine]
    testing.assert_equal_to_rounding(part.out, subject.array(rows[0], dtype))
    testing.assert_equal_to_rounding(part.lse, subject.array(rows[1], wide), name="lse")


@pytest.mark.requirement("CNV-1", "ATT-12", "ATT-15")
@pytest.mark.parametrize(
    "call",
    [
        Call(method, (2, 1), (17, 20), (8, 8), 3, True, offsets=offsets, dtype=dtype)
        for method in METHODS
        for offsets in ("both", "batch", "far")
        for dtype in ("float16", "float32")
    ],
    ids=str,
)
def test_causality_and_weights_follow_the_offsets(call, subject):
    check_call(call, subject)


# --- kinds ----------------------------------------------------------------------------------------


class Formless:
    """An array without values, of the kind "array-api": shape and dtype are all there is."""

    def __init__(self, *shape, dtype="float32"):
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(dtype)
        self.device = "nowhere"

    def __array_namespace__(self, api_version=None):
        return np

    def __getitem__(self, index):
        if not all(x is None or x is ... or isinstance(x, slice) for x in index):
            raise AssertionError(f"the values were read, at {index}")
        view = np.broadcast_to(np.zeros(()), self.shape)[index]
        return type(self)(*view.shape, dtype=self.dtype)

    def __array__(self, *args, **kwargs):
        raise AssertionError("the values were read")

    __bool__ = __float__ = __int__ = __index__ = __iter__ = __dlpack__ = __array__


class FormlessCupy(Formless):
    """The same, of the kind "cupy"."""

    __module__ = "cupy"


def foreign(subject):
    """Makers of arrays of other kinds than the backend's arrays have, by kind."""
    makers = {
        "numpy": lambda shape, dtype: np.zeros(shape, dtype),
        "array-api": lambda shape, dtype: Formless(*shape, dtype=dtype),
        "cupy": lambda shape, dtype: FormlessCupy(*shape, dtype=dtype),
    }
    return {kind: make for kind, make in makers.items() if kind != subject.kind}


@pytest.mark.requirement("CNV-2", "ATT-6")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_results_have_the_kind_of_the_inputs(method, dtype, subject):
    assert subject.kind in subject.capabilities.arrays
    q, k, v = qkv(subject, dtype)
    output = attend(subject, (q, k, v), method=CHOSEN[method], slopes=SLOPES)
    for x in output:
        assert compat.kind(x) == subject.kind
        assert compat.namespace(x) is compat.namespace(q)
        assert compat.same_device(x, q)


@pytest.mark.requirement("CNV-2")
def test_kinds_are_named_by_the_library():
    assert compat.kind(np.zeros(2)) == compat.kind(np.float32(1)) == "numpy"
    assert compat.kind(Formless(2)) == "array-api"
    assert compat.kind(FormlessCupy(2)) == "cupy"
    for other in (1.0, [1.0], None, "x", object(), np):
        assert compat.kind(other) == ""


@pytest.mark.requirement("CNV-2")
@pytest.mark.needs("kind:numpy")
def test_a_subclass_of_ndarray_is_an_array_of_numpy(subject):
    class Named(np.ndarray):
        """Another name, the same meaning."""

    dtype, method = first_of(subject)
    arrays = qkv(subject, dtype)
    expected = attend(subject, arrays, method=method)
    found = attend(subject, [x.view(Named) for x in arrays], method=method)
    for x, y in zip(found, expected, strict=True):
        testing.assert_identical(np.asarray(x), y)


@pytest.mark.requirement("CNV-2")
@pytest.mark.needs("kind:torch")
def test_a_parameter_is_a_tensor(subject):
    import torch

    dtype, method = first_of(subject)
    arrays = qkv(subject, dtype)
    expected = attend(subject, arrays, method=method)
    frozen = [torch.nn.Parameter(x, requires_grad=False) for x in arrays]
    for x, y in zip(attend(subject, frozen, method=method), expected, strict=True):
        testing.assert_equal_to_rounding(x, y)


@pytest.mark.requirement("CNV-2", "ERR-2")
@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("odd", [np.ma.masked_array, lambda x: x.view(np.matrix)])
def test_masked_arrays_and_matrices_are_refused(odd, position, subject):
    dtype, method = first_of(subject)
    arrays = qkv(subject, dtype)
    arrays[position] = odd(np.zeros((4, 8), np.float32))
    with pytest.raises(TypeError, match=rf"^{'qkv'[position]} must be.*asarray"):
        subject.attention(*arrays, method=method)
    ids = odd(np.zeros((2, 24), np.int32))
    with pytest.raises(TypeError, match="segment_ids"):
        subject.attention(*qkv(subject, dtype), method=method, segment_ids=ids)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.requirement("CNV-3", "ATT-6", "ATT-7", "NUM-1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_sums_of_thousands_of_terms_are_kept_in_the_accumulation_dtype(method, dtype, subject):
    """In float16 a sum of ones stops at 2048, in bfloat16 at 256."""
    n, slopes = 2600, (2.0**-12, 2.0**-15)
    inputs = testing.make_inputs(1, 2, 1, 1, n, head_dim=4, dtype=dtype)
    q, k, v = inputs.q, inputs.k, np.abs(inputs.v)  # no sum cancels
    weight, chosen = {"slopes": slopes}, CHOSEN[method]
    if method == "window":
        chosen = plsh.Window(n)
    elif method == "lsh":
        labels = plsh.RandomBinning([1 / m for m in slopes]).sample(5, n, seed=2).labels()
        weight = {"weight": testing.step_weight(labels[..., -1:], labels)[None]}
    places = {"q_offset": n - 1}
    expected = testing.oracle(q, k, v, **weight, **places)
    plain = testing.plain_attention(q, k, v, dtype=dtype, **weight, **places)
    arrays = [subject.array(x, dtype) for x in (q, k, v)]
    output = attend(subject, arrays, method=chosen, slopes=slopes, **places)
    assert compat.dtype_name(output.out) == dtype
    assert compat.dtype_name(output.lse) == ("float64" if dtype == "float64" else "float32")
    subject.record(*testing.assert_output_close(output, expected, plain, like=arrays[0]))


@pytest.mark.requirement("CNV-3", "ATT-2", "ERR-2")
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_other_dtypes_are_refused(dtype, subject):
    method = subject.capabilities.methods[0]
    x = subject.array(np.zeros((1, 2, 4, 8)), dtype)
    with pytest.raises(TypeError, match=dtype):
        subject.attention(x, x, x, method=method)


@pytest.mark.requirement("CNV-3", "BCK-7")
@pytest.mark.parametrize("name", DTYPES)
def test_a_floating_dtype_is_right_or_refused(name, subject):
    """What is not declared is never computed by other means."""
    # float64 stands for what the arrays cannot hold.
    method = subject.capabilities.methods[0]
    x = subject.array(np.zeros((1, 2, 4, 8)), name if _can_hold(subject, name) else "float64")
    dtype = compat.dtype_name(x)
    if dtype in subject.capabilities.dtypes:
        assert compat.dtype_name(subject.attention(x, x, x, method=method)) == dtype
    else:
        with pytest.raises(plsh.UnsupportedByBackendError, match=dtype):
            subject.attention(x, x, x, method=method)


def _can_hold(subject, dtype):
    try:
        subject.array(0, dtype)
    except TypeError:
        return False
    return True


# --- integers, bools, numbers ---------------------------------------------------------------------


@pytest.mark.requirement("CNV-4")
@pytest.mark.parametrize("bad", [True, np.True_], ids=["bool", "numpy"])
def test_a_bool_is_no_integer(bad, subject):
    dtype, method = first_of(subject)
    q, k, v = qkv(subject, dtype)
    for name in ("q_offset", "k_offset"):
        for value in (bad, [bad, 1], np.array([True, False])):
            with pytest.raises(TypeError, match=name):
                subject.attention(q, k, v, method=method, **{name: value})
    ids = subject.array(np.zeros((2, 24)), "bool")
    with pytest.raises(TypeError, match="segment_ids"):
        subject.attention(q, k, v, method=method, segment_ids=ids)
    with pytest.raises(TypeError, match="scale"):
        subject.attention(q, k, v, method=method, scale=bad)
    for value in (bad, [bad, bad], np.array([True, False])):
        with pytest.raises(TypeError, match="slopes"):
            subject.attention(q, k, v, method=method, slopes=value)
    family = plsh.RandomBinning(3.0)
    for make in (
        lambda: plsh.PositionalLSH(bad),
        lambda: plsh.PositionalLSH(seed=bad),
        lambda: plsh.PositionalLSH(seed=(0, bad)),
        lambda: plsh.PositionalLSH(head_ids=[bad]),
        lambda: plsh.Window(bad),
        lambda: plsh.Window([bad, 2]),
        lambda: plsh.Window(tol=bad),
        lambda: family.sample(bad, 4),
        lambda: family.sample(2, bad),
        lambda: family.sample(2, 4, start=bad),
        lambda: family.sample(2, 4, seed=bad),
        lambda: plsh.RandomBinning(bad),
        lambda: plsh.alibi_slopes(bad),
        lambda: plsh.alibi_slopes(4, bad),
        lambda: plsh.Partition(bad, 4, [0, 4]),
        lambda: plsh.PartitionSet([[[0]]], bad),
        lambda: plsh.segments_from_lengths([bad], 4),
        lambda: plsh.segments_from_lengths([1], bad),
        lambda: plsh.theory.psi(bad),
        lambda: plsh.theory.samples_for(bad, 1.0, 0.1, 0.1),
    ):
        with pytest.raises(TypeError):
            make()


@pytest.mark.requirement("CNV-4")
@pytest.mark.parametrize("bad", [0, 1, np.int64(1), "yes", None, 1.0], ids=repr)
def test_an_integer_is_no_bool(bad, subject):
    dtype, method = first_of(subject)
    q, k, v = qkv(subject, dtype)
    for name in ("causal", "return_lse"):
        with pytest.raises(TypeError, match=name):
            subject.attention(q, k, v, method=method, **{name: bad})


@pytest.mark.requirement("CNV-4", "ATT-15", "ATT-9", "ATT-13")
@pytest.mark.parametrize("method", METHODS)
def test_numpy_scalars_and_arrays_without_axes_are_numbers(method, subject):
    dtype = subject.capabilities.dtypes[-1]
    arrays = qkv(subject, dtype)
    options = {"method": CHOSEN[method], "causal": np.True_}
    expected = attend(subject, arrays, q_offset=5, k_offset=3, scale=0.5, slopes=0.25, **options)
    for integer, number in ((np.int64, np.float32), (np.uint8, np.float64), (np.array, np.array)):
        found = attend(
            subject,
            arrays,
            q_offset=integer(5),
            k_offset=integer(3),
            scale=number(0.5),
            slopes=number(0.25),
            **options,
        )
        for x, y in zip(found, expected, strict=True):
            testing.assert_equal_to_rounding(x, y)


@pytest.mark.requirement("CNV-4")
@pytest.mark.parametrize("integer", [np.int8, np.uint64, np.array])
@pytest.mark.parametrize("number", [np.float32, np.float64, np.array])
def test_numpy_numbers_are_parameters(integer, number):
    assert plsh.Window(integer(7)) == plsh.Window(7)
    assert plsh.Window(tol=number(0.25)) == plsh.Window(tol=0.25)
    made = plsh.PositionalLSH(integer(4), seed=integer(3), head_ids=[integer(2)])
    assert made == plsh.PositionalLSH(4, seed=3, head_ids=[2])
    assert plsh.RandomBinning(number(2.5)) == plsh.RandomBinning(2.5)
    assert plsh.alibi_slopes(integer(3), number(8.0)).tolist() == plsh.alibi_slopes(3).tolist()
    family = plsh.RandomBinning(2.5)
    drawn = family.sample(integer(2), integer(9), start=integer(5), seed=integer(1))
    assert drawn == family.sample(2, 9, start=5, seed=1)
    assert plsh.Partition(integer(0), integer(4), [0, 4]) == plsh.Partition(0, 4, [0, 4])
    assert plsh.theory.psi(number(2.5)) == plsh.theory.psi(2.5)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.requirement("CNV-5", "ATT-9", "ATT-13", "ATT-15")
@pytest.mark.parametrize(
    "wrong",
    [
        {"slopes": [0.5, -0.5]},
        {"slopes": np.array([0.5, -0.5])},
        {"slopes": np.array([math.nan, 0.5], np.float32)},
        {"slopes": -1},
        {"slopes": math.inf},
        {"scale": math.nan},
        {"scale": np.float32("inf")},
        {"q_offset": 2**30},
        {"k_offset": np.array([0, 2**30 - 5])},
        {"q_offset": [0, -(2**30)]},
    ],
    ids=repr,
)
def test_values_that_are_known_are_checked(wrong, subject):
    """Python's and NumPy's, whatever the kind of q."""
    dtype, method = first_of(subject)
    (name,) = wrong
    with pytest.raises(ValueError, match=name.removeprefix("k_").removeprefix("q_")):
        subject.attention(*qkv(subject, dtype), method=method, **wrong)


class Blind:
    """A backend that looks at nothing."""

    name, spec_version = "blind", plsh.backend.SPEC_VERSION

    def availability(self):
        return Availability(True)

    def capabilities(self):
        return Capabilities(arrays=("array-api", "cupy"))

    def can_run(self, request):
        return None

    def attend(self, q, k, v, request):
        out = type(q)(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        return AttentionOutput(out, type(q)(*q.shape[:-1], dtype="float32"))


@pytest.mark.requirement("CNV-5", "BCK-15")
@pytest.mark.parametrize("kind", [Formless, FormlessCupy])
def test_values_of_another_library_are_not_read(kind, monkeypatch):
    """These have none. They are judged by kind, shape, dtype and device."""
    monkeypatch.setattr(registry, "find", lambda name, kind: Blind())
    q, k, v = kind(2, 4, 6, 8), kind(2, 2, 6, 8), kind(2, 2, 6, 5)
    operands = {
        "slopes": kind(2, 4),
        "q_offset": kind(2, dtype="int32"),
        "k_offset": kind(dtype="int64"),
        "segment_ids": (kind(2, 6, dtype="int32"), kind(2, 6, dtype="int8")),
    }
    out = plsh.attention(q, k, v, method="exact", causal=True, **operands)
    assert out.shape == (2, 4, 6, 5)
    labels = kind(1, 3, 6, dtype="int32")
    chosen = plsh.PartitionSet.unchecked(labels, 0, 6, 3, bandwidth=(5,))
    assert plsh.attention(q, k, v, method=chosen).shape == (2, 4, 6, 5)
    for name, x, error in (
        ("slopes", kind(3), ValueError),
        ("slopes", kind(4, dtype="bool"), TypeError),
        ("slopes", kind(4, dtype="complex64"), TypeError),
        ("q_offset", kind(3, dtype="int32"), ValueError),
        ("q_offset", kind(2), TypeError),
        ("segment_ids", kind(2, 5, dtype="int32"), ValueError),
        ("segment_ids", kind(2, 6), TypeError),
        ("segment_ids", kind(2, 6, dtype="bool"), TypeError),
        ("segment_ids", kind(2, 6, dtype="uint64"), TypeError),
    ):
        with pytest.raises(error, match=name):
            plsh.attention(q, k, v, method="exact", **{name: x})
    moved = kind(4)
    moved.device = "elsewhere"
    with pytest.raises(ValueError, match=r"slopes.*one device"):
        plsh.attention(q, k, v, method="exact", slopes=moved)


@pytest.mark.requirement("CNV-5", "TRF-5")
@pytest.mark.needs("kind:torch", "transform:compile")
@pytest.mark.parametrize("name", ["slopes", "scale", "k_offset"])
def test_a_numpy_array_that_is_traced_has_no_values(name, subject):
    dtype, method = first_of(subject)
    arrays = qkv(subject, dtype)
    value = {"slopes": np.array(SLOPES), "scale": np.float32(0.5), "k_offset": np.int64(3)}[name]

    def f(q, k, v):
        return plsh.attention(q, k, v, method=method, backend=subject.name, **{name: value})

    with pytest.raises(Exception, match=f"{name} must be concrete") as caught:
        subject.harness.compile(f)(*arrays)
    assert "TypeError" in repr(caught.value) or isinstance(caught.value, TypeError)


# --- nothing is converted -------------------------------------------------------------------------


def converted(message, name, x, like):
    """Run the line of code that a message shows, on an array of NumPy."""
    line = message.partition(f"{name} = ")[2].partition(";")[0]
    assert line, message
    kind = compat.kind(like)
    known = {"numpy": np, name: x, "xp": compat.namespace(like)}
    if kind in ("torch", "jax", "cupy"):
        known[kind] = __import__(kind)
    made = eval(line, {"__builtins__": {}}, known)
    assert compat.kind(made) == kind, line


@pytest.mark.requirement("CNV-6", "ATT-2", "ATT-9", "ERR-4")
def test_a_mix_of_kinds_is_refused_with_the_line_that_converts(subject):
    dtype, method = first_of(subject)
    arrays = qkv(subject, dtype)
    for kind, make in foreign(subject).items():
        for position, name in ((1, "k"), (2, "v")):
            mixed = list(arrays)
            mixed[position] = make((2, 2, 24, 8), "float32")
            with pytest.raises(TypeError, match=rf"{name} = \S*{name}\b") as caught:
                subject.attention(*mixed, method=method)
            assert kind in str(caught.value)
            if kind == "numpy":
                converted(str(caught.value), name, mixed[position], arrays[0])
        for name, shape, of in (
            ("slopes", (2,), "float32"),
            ("q_offset", (2,), "int32"),
            ("segment_ids", (2, 24), "int32"),
        ):
            if kind == "numpy" and name != "segment_ids":
                continue  # NumPy's are read as numbers
            with pytest.raises(TypeError, match=rf"{name} must be.*{kind}.*{name}"):
                subject.attention(*arrays, method=method, **{name: make(shape, of)})


@pytest.mark.requirement("CNV-6", "ATT-22", "ERR-2")
def test_a_kind_that_a_backend_does_not_take_is_not_converted_for_it(subject):
    """With the line for each of q, k and v; every backend refuses what has no kind at all."""
    method = subject.capabilities.methods[0]
    for kind, make in foreign(subject).items():
        if kind in subject.capabilities.arrays:
            continue
        arrays = [make((1, 2, 4, 8), "float32") for _ in range(3)]
        with pytest.raises(TypeError, match=rf"{kind}.*q = .*k = .*v = "):
            subject.attention(*arrays, method=method)
    for wrong in ([[[[1.0]]]], 1.0, None, "q", object()):
        with pytest.raises(TypeError, match=r"q must be an array.*asarray\(q\)"):
            subject.attention(wrong, wrong, wrong, method=method)


@pytest.mark.requirement("CNV-6", "ATT-2")
@pytest.mark.needs("kind:torch")
def test_nothing_moves_between_devices(subject):
    import torch

    dtype, method = first_of(subject)
    arrays = qkv(subject, dtype)
    elsewhere = ["meta", *(d for d in subject.harness.devices if d != str(arrays[0].device))]
    for device in elsewhere:
        for position in (1, 2):
            mixed = list(arrays)
            mixed[position] = mixed[position].to(device)
            with pytest.raises(ValueError, match="device"):
                subject.attention(*mixed, method=method)
        ids = torch.zeros((2, 24), dtype=torch.int32, device=device)
        with pytest.raises(ValueError, match="device"):
            subject.attention(*arrays, method=method, segment_ids=ids)


# --- operands and static arguments ----------------------------------------------------------------


@pytest.mark.requirement("CNV-7", "ATT-9", "ATT-15")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.may_refuse
def test_operands_may_be_arrays_without_axes_or_numbers(method, dtype, subject):
    """Slopes and offsets as arrays of the backend's kind give what numbers give."""
    arrays = qkv(subject, dtype)
    slopes = np.float32(SLOPES).tolist()
    options = {"method": CHOSEN[method], "causal": True}
    expected = attend(subject, arrays, slopes=slopes, q_offset=9, k_offset=4, **options)
    for integer in ("int32", "int64"):
        found = attend(
            subject,
            arrays,
            slopes=subject.array(slopes, "float32"),
            q_offset=subject.array(9, integer),
            k_offset=subject.array(4, integer),
            **options,
        )
        for x, y in zip(found, expected, strict=True):
            testing.assert_equal_to_rounding(x, y)


@pytest.mark.requirement("CNV-7", "ATT-15", "BCK-14", "NUM-12")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.may_refuse
def test_offsets_per_row_may_be_arrays(method, subject):
    """An operand is used or declined: each row is what it is alone, at its own offsets."""
    dtype = subject.capabilities.dtypes[-1]
    arrays = qkv(subject, dtype)
    options = {"method": CHOSEN[method], "slopes": SLOPES, "causal": True}
    places = {"q_offset": (7, 2), "k_offset": (1, 12)}
    alone = [
        attend(
            subject,
            [x[b : b + 1, ...] for x in arrays],
            **{name: at[b] for name, at in places.items()},
            **options,
        )
        for b in range(2)
    ]
    for given in (
        places,
        {name: np.array(at) for name, at in places.items()},
        {name: subject.array(at, "int32") for name, at in places.items()},
        {"q_offset": subject.array((7, 2), "int64"), "k_offset": (1, 12)},
    ):
        found = attend(subject, arrays, **given, **options)
        for b in range(2):
            for x, y in zip(found, alone[b], strict=True):
                testing.assert_equal_to_rounding(x[b : b + 1, ...], y)


@pytest.mark.requirement("CNV-7", "PAR-6", "MTH-6")
@pytest.mark.needs("method:lsh")
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.may_refuse
def test_labels_of_partitions_may_be_arrays(heads, subject):
    dtype = subject.capabilities.dtypes[-1]
    arrays = qkv(subject, dtype)
    made = plsh.RandomBinning((3.0, 20.0)[:heads]).sample(4, 30, start=2, seed=1)
    bandwidth = tuple(made.bandwidth().tolist())
    labels = subject.array(made.labels(), "int32")
    given = plsh.PartitionSet.unchecked(labels, 2, 32, 4, bandwidth=bandwidth)
    places = {"q_offset": 8, "k_offset": 2, "causal": True}
    expected = attend(subject, arrays, method=made, **places)
    for x, y in zip(attend(subject, arrays, method=given, **places), expected, strict=True):
        testing.assert_equal_to_rounding(x, y)


@pytest.mark.requirement("CNV-7", "ATT-13", "ATT-24")
def test_static_arguments_are_no_arrays(subject):
    dtype, method = first_of(subject)
    arrays = qkv(subject, dtype)
    two = subject.array([1, 0], "int32")
    for name in ("causal", "scale", "layout", "method", "backend"):
        with pytest.raises(TypeError, match=name):
            plsh.attention(*arrays, **{"method": method, "backend": subject.name, name: two})
    for make in (
        lambda: plsh.PositionalLSH(two),
        lambda: plsh.PositionalLSH(sampler=two),
        lambda: plsh.PositionalLSH(family=two),
        lambda: plsh.Window(tol=two),
    ):
        with pytest.raises(TypeError):
            make()


@pytest.mark.requirement("CNV-7", "ATT-11", "ATT-13", "TRF-1")
@pytest.mark.needs("transform:jit")
def test_static_arguments_may_not_be_traced(subject):
    dtype, method = first_of(subject)
    arrays = qkv(subject, dtype)

    def with_(name):
        return lambda x: plsh.attention(
            *arrays, **{"method": method, "backend": subject.name, name: x}
        )

    for name in ("scale", "causal", "layout", "method"):
        with pytest.raises(TypeError, match=name):
            subject.harness.jit(with_(name))(subject.array(1.0, "float32"))
